"""A prompt file: the table of each task, its template, and which model they belong to.

    prompts.safetensors
        sentiment     [10, 768] float32      a row for each virtual token
        questions     [30, 768]
        metadata      templates, the fingerprint of the model, the SHA-256 of the tables

A fingerprint is a hash of a model's shape, its embedding and its norms: the same in every layout
that a checkpoint may have been saved in, and as a Hugging Face folder, and read without the rest of
the model. Nothing in the file is ever unpickled.

    python -m prompts.prompt_file FILE        the tasks in it
"""

import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import torch
from msgspec import Struct, to_builtins
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import checkpoint
import gpt
import huggingface
from prompts.prompt_data import PromptConfig, PromptError, Template
from runtime import json_files, terminal


def read_base(path: "str | Path", names: list[str]) -> dict[str, Tensor]:
    """Some whole parameters of a checkpoint or a Hugging Face folder, float32. All ranks call this
    together."""
    if huggingface.is_folder(path):
        _, read, _ = huggingface.open_folder(Path(path))
        return {name: read(name) for name in names}
    shapes = checkpoint.read_index(checkpoint.find(path))["tensors"]
    found = {f"model.{name}": torch.zeros(shapes[f"model.{name}"][1]) for name in names}
    checkpoint.read(checkpoint.find(path), found)
    return {name.removeprefix("model."): t for name, t in found.items()}


def fingerprint(path: "str | Path", config: gpt.GPTConfig) -> str:
    """Which model this is: a hash of its shape, its embedding and its norms, in whatever layout it
    was saved. All ranks call this together."""
    # as Trainer.shape
    free = {
        "dropout",
        "attention",
        "router_temperature",
        "capacity_factor",
        "aux_loss",
        "z_loss",
    } | ({"seq_length"} if config.llama else set())
    digest = hashlib.sha256(
        json.dumps(
            {k: v for k, v in dataclasses.asdict(config).items() if k not in free}, sort_keys=True
        ).encode()
    )
    names = (
        ["embedding.tokens.weight"]
        + [
            f"blocks.{layer}.{name}.weight"
            for layer in range(config.num_layers)
            for name in ("attention_norm", "mlp_norm")
        ]
        + ["head.norm.weight"]
    )
    for name, weight in read_base(path, names).items():
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()[:16]


def digest(found: dict[str, Tensor]) -> str:
    return hashlib.sha256(
        b"".join(
            task.encode() + t.contiguous().numpy().tobytes() for task, t in sorted(found.items())
        )
    ).hexdigest()


class Described(Struct):
    """What stands beside the tables."""

    templates: list[Template]
    # its fingerprint
    model: str
    # of the tables
    sha256: str


def save(path: "str | Path", config: PromptConfig, found: dict[str, Tensor], model: str) -> None:
    """Write a prompt file: the table of each task, their templates, and the fingerprint of the
    model that they belong to."""
    described = to_builtins(
        Described([config.templates[task] for task in found], model, digest(found))
    )
    temporary = Path(path).with_suffix(".tmp")
    save_file(
        {task: t.contiguous() for task, t in found.items()},
        temporary,
        {"prompts": json.dumps(described)},
    )
    temporary.replace(path)


def load(path: "str | Path", model: str | None = None) -> tuple[PromptConfig, dict[str, Tensor]]:
    """(a configuration for inference, the tables) of a prompt file. model: the fingerprint of the
    model to be used with it. Raises PromptError for another model's."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("a folder, a pipe or a device, not a file")
        with safe_open(path, "pt") as f:
            text = (f.metadata() or {})["prompts"]
            found = {task: f.get_tensor(task) for task in f.keys()}
        described = json_files.parse(text.encode(), Described, "its description")
        templates = described.templates
        config = PromptConfig(
            templates, virtual_prompt_style="inference", new_tasks=[t.taskname for t in templates]
        )
        fits = {
            t.taskname: (
                found[t.taskname].dim() == 2 and len(found[t.taskname]) == t.total_virtual_tokens
            )
            for t in templates
        }
        if (
            found.keys() != fits.keys()
            or not all(fits.values())
            or any(t.dtype != torch.float32 for t in found.values())
        ):
            raise PromptError("its tables and its templates do not fit")
        if described.sha256 != digest(found):
            raise PromptError("its tables are not what was written")
    except (OSError, SafetensorError, KeyError, ValueError) as e:
        raise PromptError(
            f"{path} is not a prompt file, or damaged ({type(e).__name__}:"
            f" {json_files.one_line(e)})"
        ) from None
    if model is not None and model != described.model:
        raise PromptError(
            f"{path} belongs to another model: its prompts were learned for {described.model}, and"
            f" this one is {model}"
        )
    return config, {task: found[task] for task in config.tasks}


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m prompts.prompt_file FILE")
    try:
        config, found = load(sys.argv[1])
    except PromptError as e:
        print(f"prompt_file.py: {e}", file=sys.stderr)
        sys.exit(2)
    for task, table in found.items():
        print(
            f"{task}: {len(table)} vectors of {table.shape[1]} numbers;"
            f" {config.templates[task].prompt_template!r}"
        )


if __name__ == "__main__":
    terminal.run(main)
