"""A prompt file: the learned prompts of each task, their templates, and which model they belong to.

    prompts.safetensors
        sentiment     [10, 768] float32      one row for each virtual token
        questions     [30, 768]
        metadata      the templates, the fingerprint of the model, the SHA-256 of the tables

Prompts are meaningless for another model than the one that they were learned for. The fingerprint
(finetune/frozen_base.py) detects this. Nothing in the file is ever unpickled.

    python -m finetune.prompt_file FILE        the tasks in it
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from msgspec import Struct, to_builtins
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from base import json_files, terminal
from finetune.nemo_config import PromptConfig
from finetune.prompt_template import Template
from prompt_tuning import PromptError


class Metadata(Struct):
    """What stands beside the tables. model: its fingerprint; sha256: of the tables."""

    templates: list[Template]
    model: str
    sha256: str


def hash_tables(tables: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for task, table in sorted(tables.items()):
        digest.update(task.encode() + table.contiguous().numpy().tobytes())
    return digest.hexdigest()


def save(path: str | Path, config: PromptConfig, tables: dict[str, Tensor], model: str) -> None:
    """Write a prompt file. tables: task -> [virtual tokens, h] float32. model: the fingerprint of
    the model that they belong to."""
    templates = [config.templates[task] for task in tables]
    metadata = to_builtins(Metadata(templates, model, hash_tables(tables)))
    temporary = Path(path).with_suffix(".tmp")
    save_file(
        {task: table.contiguous() for task, table in tables.items()},
        temporary,
        {"prompts": json.dumps(metadata)},
    )
    temporary.replace(path)


def load(path: str | Path, model: str | None = None) -> tuple[PromptConfig, dict[str, Tensor]]:
    """(configuration for inference, tables by task) of a prompt file. model: the fingerprint of the
    model that will use them. Raises PromptError for a damaged file or another model's."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("a folder, a pipe or a device, not a file")
        with safe_open(path, "pt") as f:
            text = (f.metadata() or {})["prompts"]
            tables = {task: f.get_tensor(task) for task in f.keys()}
        metadata = json_files.parse(text.encode(), Metadata, "its description")
        tasks = [template.taskname for template in metadata.templates]
        config = PromptConfig(metadata.templates, "inference", new_tasks=tasks)
        expected = {task: config.templates[task].total_virtual_tokens for task in tasks}
        is_table = all(t.dim() == 2 and t.dtype == torch.float32 for t in tables.values())
        if not is_table or {task: len(table) for task, table in tables.items()} != expected:
            raise PromptError("its tables and its templates do not fit")
        if metadata.sha256 != hash_tables(tables):
            raise PromptError("its tables are not what was written")
    except (OSError, SafetensorError, KeyError, ValueError) as e:
        why = f"{type(e).__name__}: {json_files.one_line(e)}"
        raise PromptError(f"{path} is not a prompt file, or damaged ({why})") from None
    if model is not None and model != metadata.model:
        rule = f"its prompts were learned for {metadata.model}, and this one is {model}"
        raise PromptError(f"{path} belongs to another model: {rule}")
    return config, {task: tables[task] for task in tasks}


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m finetune.prompt_file FILE")
    config, tables = load(sys.argv[1])
    for task, table in tables.items():
        print(
            f"{task}: {len(table)} vectors of {table.shape[1]} numbers;"
            f" {config.templates[task].prompt_template!r}"
        )


if __name__ == "__main__":
    terminal.run(main)
