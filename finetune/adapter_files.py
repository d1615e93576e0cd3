"""An adapter's files, opened and checked.

    runs/lora/checkpoints/step-000100/       a run with --peft, its newest checkpoint
        index.json     "adapter": its AdapterConfig; "base": the fingerprint of its base
        shard-..       blocks.0.attention.query.lora.a, ..: the adapter alone

inference/merged.py merges an adapter into the weights of its base.
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
from finetune import adapter_layers
from finetune.adapter_layers import METHODS, AdapterConfig
from moe import empty_model
from run import checkpoint
from run.checkpoint import CheckpointError
from run.checkpoint_index import check_command

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


def open_adapter(path: str | Path, shape_class: type[MoEConfig] = MoEConfig) -> Adapter:
    """The adapter in a run with --peft, or in a checkpoint; its values are not read. shape_class:
    of its model. Raises CheckpointError for what is none, or does not hold what its description
    says."""
    path = checkpoint.find(path)
    if (path / "adapter_config.json").is_file() and not (path / "index.json").is_file():
        use = f"python -m inference.adapters import {path} --base BASE OUT makes an adapter of it"
        raise CheckpointError(f"{path} is a folder of the library peft; {use}")
    index = checkpoint.read_index(path)
    check_command(path, index["model"], shape_class)
    if "adapter" not in index:
        prompts = any(".embedding.tokens.prompts." in name for name in index["tensors"])
        held = "prompts" if prompts else "a whole model"
        raise CheckpointError(
            f"{path} holds {held}, not an adapter; name the --out of a run with --peft"
        )
    try:
        told = json_files.convert(index["adapter"], dict, f"{path}/index.json: adapter")
        config = json_files.convert_exactly(told, AdapterConfig, f"{path}/index.json: adapter")
        base = json_files.convert(index.get("base"), Fingerprint, f"{path}/index.json: base")
        model = shape_class(**index["model"])
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
    adapter_layers.apply(adapted, config)
    return {
        name: tuple(p.shape)
        for name, p in adapted.named_parameters()
        if adapter_layers.is_adapter(name)
    }


def num_parameters(config: AdapterConfig, model: MoEConfig) -> int:
    """How many parameters learn, in the whole model.

    LoRA       r (in + out)    for each matrix
    adapter    2 h k + 2 h     D, U and a LayerNorm's weight and bias, at each place
    IA3        out, or in      one for each key and value, or MLP activation
    """
    return sum(math.prod(shape) for shape in shapes_of(config, model).values())
