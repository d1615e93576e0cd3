"""An adapter's files, opened and checked; and an adapter merged into the weights of its base.

    runs/lora/checkpoints/step-000100/       a run with --peft, its newest checkpoint
        index.json     "adapter": its AdapterConfig; "base": the fingerprint of its base
        shard-..       blocks.0.attention.query.lora.a, ..: the adapter alone

    LoRA    W' = W + α/r B A
    IA3     key, value   W' = diag(s) W, b' = s b          y = s (W x + b)
            down         W' = W diag(s)                    y = W (s x) + b

A merged model needs the same time and memory as its base. A bottleneck adapter has a nonlinearity
between its two matrices, so it cannot be merged into a weight.

The sums are in float64. `merge` takes a whole parameter or a shard: an adapter's parameters are
sharded as the weight is, and B A of two shards is the shard of B A.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from base import json_files
from base.model_config import FieldError, MoEConfig
from finetune import adapters
from finetune.adapter_config import METHODS, AdapterConfig
from finetune.frozen_base import fingerprint, read_base
from inference.architectures import empty_model
from run import checkpoint
from run.checkpoint import CheckpointError, beside
from run.tokenizer import CHAT_TEMPLATE

Fingerprint = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class Adapter:
    """An adapter on the disk. shapes: our name -> the shape of the whole parameter."""

    path: Path
    config: AdapterConfig
    model: MoEConfig
    # the fingerprint of the model that it was learned for
    base: str
    # where that model was, for messages
    base_path: str
    shapes: dict[str, tuple[int, ...]]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Verify the files and fill `tensors`, our name -> this rank's shard, in place. A
        collective. Raises CheckpointError."""
        checkpoint.load(self.path, {f"model.{name}": t for name, t in tensors.items()})

    def values(self) -> dict[str, Tensor]:
        """Every parameter, whole, in float32. A collective. Raises CheckpointError."""
        values = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        self.load(values)
        return values


# --- opened ---------------------------------------------------------------------------------------


def open_adapter(path: str | Path) -> Adapter:
    """The adapter in a run with --peft, or in a checkpoint; its values are not read. Raises
    CheckpointError for what is none, or does not hold what its description says."""
    path = checkpoint.find(path)
    if (path / "adapter_config.json").is_file() and not (path / "index.json").is_file():
        raise CheckpointError(
            f"{path} is a folder of the library peft; python -m finetune.adapters import {path}"
            " --base BASE OUT makes an adapter of it"
        )
    index = checkpoint.read_index(path)
    if "adapter" not in index:
        held = "prompts"
        if "model.embedding.tokens.weight" in index["tensors"]:
            held = "a whole model"
        raise CheckpointError(
            f"{path} holds {held}, not an adapter; name the --out of a run with --peft"
        )
    try:
        told = json_files.convert(index["adapter"], dict, f"{path}/index.json: adapter")
        config = json_files.convert_exactly(told, AdapterConfig, f"{path}/index.json: adapter")
        base = json_files.convert(index.get("base"), Fingerprint, f"{path}/index.json: base")
        model = MoEConfig(**index["model"])
        expected = shapes_of(config, model)
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{path}: its adapter: {json_files.one_line(e)}") from None
    saved = {}
    for name, (_, shape) in index["tensors"].items():
        if name.startswith("model."):
            saved[name.removeprefix("model.")] = tuple(shape)
    if saved != expected:
        names = sorted(saved.items() ^ expected.items())
        raise CheckpointError(
            f"{path} holds another adapter than its index.json says: {names[0][0]} differs"
        )
    base_path = str(index["config"].get("load") or "")
    return Adapter(path, config, model, base, base_path, expected)


def shapes_of(config: AdapterConfig, model: MoEConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> the shape of each parameter of such an adapter. Raises FieldError."""
    if config.peft not in METHODS:
        raise FieldError("peft", config.peft, f"must be one of {', '.join(METHODS)}")
    adapted = empty_model(model)
    adapters.apply(adapted, config)
    return {
        name: tuple(p.shape) for name, p in adapted.named_parameters() if adapters.is_adapter(name)
    }


def num_parameters(config: AdapterConfig, model: MoEConfig) -> int:
    """How many parameters learn, in the whole model.

    LoRA       r (in + out)    for each matrix
    adapter    2 h k + 2 h     D, U and a LayerNorm's weight and bias, at each place
    IA3        out, or in      one for each key and value, or MLP activation
    """
    return sum(math.prod(shape) for shape in shapes_of(config, model).values())


def check_fields(adapter: Adapter, base: str | Path, config: MoEConfig) -> None:
    """Whether a base has the shape of the model that an adapter was learned for. Raises
    CheckpointError, naming the fields."""
    here = checkpoint.fixed_fields(config)
    differing = [
        f"{field} is {value} there and {here[field]} here"
        for field, value in checkpoint.fixed_fields(adapter.model).items()
        if value != here[field]
    ]
    if differing:
        raise of_another_model(adapter, base, "; ".join(differing[:3]))


def check_base(adapter: Adapter, base: str | Path, config: MoEConfig) -> None:
    """Whether the model at `base`, of this configuration, is the one that an adapter was learned
    for. A collective. Raises CheckpointError, naming both."""
    check_fields(adapter, base, config)
    here = fingerprint(base, config)
    if here != adapter.base:
        why = f"its fingerprint is {adapter.base} there and {here} here"
        raise of_another_model(adapter, base, why)


def of_another_model(adapter: Adapter, base: str | Path, why: str) -> CheckpointError:
    where = f"its run had --load {adapter.base_path}" if adapter.base_path else "name that one"
    return CheckpointError(
        f"{adapter.path}: was trained on another model than {base}: {why}; {where}, as it was"
        " before any further training"
    )


# --- merged ---------------------------------------------------------------------------------------


def merge(name: str, weight: Tensor, values: dict[str, Tensor], config: AdapterConfig) -> Tensor:
    """A parameter of the base with an adapter in it, in float64; as it is, where there is none.

    name: of the parameter; weight: its value, or this rank's shard. values: of the adapter, by
    name, sharded alike.
    """
    module, _, kind = name.rpartition(".")
    if kind == "weight" and f"{module}.lora.a" in values:
        a = values[f"{module}.lora.a"].to(weight.device, torch.float64)  # [.., r, in]
        b = values[f"{module}.lora.b"].to(weight.device, torch.float64)  # [.., out, r]
        return weight.double().add(b @ a, alpha=config.lora_alpha / config.lora_rank)
    if f"{module}.ia3.scale" in values:
        s = values[f"{module}.ia3.scale"].to(weight.device, torch.float64)
        if module.endswith(".down"):
            if kind == "bias":
                return weight
            s = s.unsqueeze(-2)  # [.., 1, in]
        elif kind == "weight":
            s = s.unsqueeze(-1)  # [.., out, 1]
        return weight.double() * s
    return weight


class MergedModel:
    """The model at `base`, a checkpoint or a run, with an adapter in it; read one parameter at a
    time. Raises CheckpointError where they do not belong together."""

    def __init__(self, base: str | Path, path: str | Path):
        self.base = checkpoint.find(base)
        self.adapter = open_adapter(path)
        if self.adapter.config.peft == "adapter":
            raise CheckpointError(
                f"{self.adapter.path}: bottleneck adapters cannot be merged, for between their two"
                " matrices is a nonlinearity; generate.py --adapter runs them beside the base"
            )
        self.config, self.index = checkpoint.read_model(self.base)
        check_base(self.adapter, self.base, self.config)
        self.values = self.adapter.values()
        # of an adapter that was trained on conversations
        self.chat_template = beside(self.adapter.path, CHAT_TEMPLATE)
        # of the parameters that were read, those that the adapter changes
        self.changed: set[str] = set()

    def read(self, name: str) -> Tensor:
        """A whole parameter, float32."""
        weight = read_base(self.base, [name])[name]
        merged = merge(name, weight, self.values, self.adapter.config)
        if merged is not weight:
            self.changed.add(name)
        return merged.float()
