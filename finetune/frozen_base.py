"""A run that trains a few new parameters beside a frozen model: what prompts and adapters share.

The weights of --load are frozen: they have no gradients, no masters and no optimizer state, and
take no place in the run's checkpoints. A checkpoint names its base by the fingerprint of the model,
and a run that goes on with another base is refused.

finetune/prompt_tuning.py and finetune/adapter_learning.py are built on this class.
"""

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

import sharding
from base.model_config import GPTConfig, MoEConfig
from moe import empty_model
from run import checkpoint
from run.task import WholeModel
from sharding import Shard, Sharding, local_slice, set_sharding, sharding_of


class FirstOf:
    """In the place of a process group: this rank is the first of n, so its slice is the first."""

    def __init__(self, n: int):
        self.n = n

    def size(self) -> int:
        return self.n

    def rank(self) -> int:
        return 0


def read_base(path: str | Path, names: list[str], first: bool = False) -> dict[str, Tensor]:
    """Parameters, in float32, of the model at `path`, a checkpoint or a run.

    first: not whole ones, but their first slice along dimension 0, [1, ..]. A collective. Raises
    CheckpointError."""
    path = checkpoint.find(path)
    saved = checkpoint.read_index(path)["tensors"]
    parameters = {}
    for key in (f"model.{name}" for name in names):
        _, shape = saved[key]
        record = Sharding(tuple(shape), (Shard(0, FirstOf(shape[0])),) if first else ())
        parameters[key] = set_sharding(torch.zeros(local_slice(record)[1]), record)
    checkpoint.read(path, parameters)
    return dict(zip(names, parameters.values()))


def identifying_fields(config: MoEConfig) -> dict:
    """The fields that a fingerprint is of. Those that came later count where they are not what
    `llama` alone says: so a prompt or an adapter of before still knows its model."""
    sizes = config.num_layers, config.hidden_size, config.num_heads
    plain = MoEConfig(*sizes, llama=config.llama)
    later = []
    for shape, first in (GPTConfig, "head_dim"), (MoEConfig, "first_dense_layers"):
        names = [field.name for field in dataclasses.fields(shape)]
        later += names[names.index(first) :]
    fixed = checkpoint.fixed_fields(config)
    for name in later:
        if name in fixed and fixed[name] == getattr(plain, name):
            del fixed[name]
    return fixed


def fingerprint(path: str | Path, config: MoEConfig, read=read_base) -> str:
    """Identifies the model at `path`: 16 hex digits, the same for a checkpoint under any layout and
    for a Hugging Face folder.

    A hash of its configuration, its embedding and its norms, and of the first row of every other
    parameter: a base with a merged adapter is another model. read: inference.loading.read_base,
    where `path` may be a Hugging Face folder. A collective.
    """
    # what may differ when weights are loaded may differ here
    fields = json.dumps(identifying_fields(config), sort_keys=True)
    digest = hashlib.sha256(fields.encode())
    names = [name for name, _ in empty_model(config).named_parameters()]
    whole = [n for n in names if n == "embedding.tokens.weight" or n.endswith("norm.weight")]
    others = [name for name in names if name not in whole]
    for part in (read(path, whole), read(path, others, first=True)):
        for name, weight in part.items():
            digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_identity(config, path: Path, index: dict, identity: str) -> None:
    """Whether a run that goes on from the checkpoint at `path` has the frozen model that it began
    with. identity: the fingerprint of that of --load. Raises CheckpointError."""
    if index.get("base", identity) != identity:
        rule = f"is not the model that the run in {path} began with; it has changed since"
        other = "name that one (CKPT/checkpoints/step-..), or start again with another --out"
        raise checkpoint.CheckpointError(f"--load {config.load}: {rule}; {other}")


class FrozenBase(WholeModel):
    """Which parameters learn: new ones, and none of the model."""

    # a frozen weight takes the forward and the input gradient, but no weight gradient
    share_of_flops = 2 / 3
    # what is learned, for messages
    learned_things = "new"
    # routers use their raw logits, as they will when the result is used
    balances_experts = False

    def before_techniques(self, stage) -> None:
        super().before_techniques(stage)
        stage.requires_grad_(False)

    def is_of_base(self, name: str) -> bool:
        """Whether a parameter of this global name is in the checkpoint of --load."""
        raise NotImplementedError

    def kept(self) -> dict[str, Tensor]:
        """None: the base has a checkpoint of its own."""
        return {}

    def load_base(self, tokenizer) -> None:
        """Load the frozen model from --load. A collective. Raises CheckpointError."""
        path = checkpoint.find(self.config.load)
        parameters = sharding.named_parameters(*self.trainer.stages)
        frozen = {f"model.{name}": p for name, p in parameters if self.is_of_base(name)}
        checkpoint.load(path, frozen, checkpoint.fixed_fields(self.model_config, True))
        self.identity = fingerprint(path, self.model_config)

    def check_base(self, path: Path, index: dict) -> None:
        check_identity(self.config, path, index, self.identity)

    def load_weights(self, world) -> None:
        """`load_base` has loaded them."""

    def extra_state(self) -> dict:
        return {"base": self.identity}

    def num_learned(self) -> int:
        """How many parameters learn, if this rank's stage has all of them."""
        parameters = self.trainer.optimizer.parameters.values()
        return sum(math.prod(sharding_of(p).shape) for p in parameters)

    def describe(self) -> str:
        return f", all frozen, and {self.num_learned():,} {self.learned_things} parameters"
