"""An adapter merged into the weights of its base.

    LoRA    W' = W + α/r B A
    IA3     key, value   W' = diag(s) W, b' = s b          y = s (W x + b)
            down         W' = W diag(s)                    y = W (s x) + b

A merged model needs the same time and memory as its base. A bottleneck adapter has a nonlinearity
between its two matrices, so it cannot be merged into a weight.

The sums are in float64. `merge` takes a whole parameter or a shard: an adapter's parameters are
sharded as the weight is, and B A of two shards is the shard of B A.
"""

from pathlib import Path

import torch
from torch import Tensor

from base.model_config import MoEConfig
from finetune import frozen_base
from finetune.adapter_files import Adapter, open_adapter
from finetune.adapter_layers import AdapterConfig
from inference.hf_config import read_any_model
from run import checkpoint
from run.checkpoint import CheckpointError, beside
from run.tokenizer import CHAT_TEMPLATE

# --- the base of an adapter -----------------------------------------------------------------------


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


def check_base(
    adapter: Adapter, base: str | Path, config: MoEConfig, read=frozen_base.read_base
) -> None:
    """Whether the model at `base`, of this configuration, is the one that an adapter was learned
    for. read: as of frozen_base.fingerprint. A collective. Raises CheckpointError, naming both."""
    check_fields(adapter, base, config)
    here = frozen_base.fingerprint(base, config, read)
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
        self.config, self.index = read_any_model(self.base)
        self.adapter = open_adapter(path, type(self.config))
        if self.adapter.config.peft == "adapter":
            raise CheckpointError(
                f"{self.adapter.path}: bottleneck adapters cannot be merged, for between their two"
                " matrices is a nonlinearity; generate.py --adapter runs them beside the base"
            )
        check_base(self.adapter, self.base, self.config)
        self.values = self.adapter.values()
        # None, unless the adapter was trained on conversations.
        self.chat_template = beside(self.adapter.path, CHAT_TEMPLATE)
        # The parameters that were read and that the adapter changes.
        self.changed: set[str] = set()

    def read(self, name: str) -> Tensor:
        """A whole parameter, float32."""
        weight = frozen_base.read_base(self.base, [name])[name]
        merged = merge(name, weight, self.values, self.adapter.config)
        if merged is not weight:
            self.changed.add(name)
        return merged.float()
