"""What prompt tuning keeps in memory and on the disk, beside fine-tuning.

    python -m benchmarks.prompt_memory [--toy] [--out DIR]

GPT-2 124M learns two tasks of 100 virtual tokens, by two steps of train.py, in a process of its
own; then the same by fine-tuning. Compared are the parameters that are learned, the peak memory and
the size of a checkpoint. The peak is that of the whole process (on a GPU, of tensors), libraries
and the reading of the base model included. Weights are random: memory does not depend on them.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import sharding
from base.model_config import GPTConfig
from benchmarks import report
from benchmarks.language_task import template_of
from benchmarks.steps import as_argv, write_lines, write_model
from course import demo
from run import checkpoint
from run.presets import PRESETS

TOY = dict(num_layers=2, hidden_size=64, num_heads=4, seq_length=256, vocab_size=257)
# virtual tokens of a task
STYLES = {"prompt-tuning": 100, "fine-tuning": 0}
TASKS = ("a", "b")


def write_settings(folder: Path, style: str) -> Path:
    """The configuration of prompts, with its training lines."""
    records = [{"taskname": task, "text": "x" * 20, "label": "y"} for task in TASKS]
    lines = write_lines(folder / "lines.jsonl", records)
    templates = [template_of(task, "{text}", STYLES[style]) for task in TASKS]
    settings = {
        "virtual_prompt_style": style,
        "new_tasks": list(TASKS),
        "task_templates": templates,
        "prompt_tuning": {"new_prompt_init_methods": ["random"] * len(TASKS)},
        "data": {"train_ds": [lines], "validation_ds": [lines]},
    }
    path = folder / f"{style}.json"
    path.write_text(json.dumps(settings))
    return path


def write_base(folder: Path, config: GPTConfig) -> Path:
    """A checkpoint of a model with random weights."""
    model = demo.meta_model(config)
    sharding.init(model, 0, "cpu", torch.float32)
    return write_model(folder / "base", model, {"tokenizer": "bytes"})


def measure(folder: Path, base: Path, style: str) -> dict:
    """Two steps in a process of its own."""
    settings = write_settings(folder, style)
    out = folder / style
    words = "train --steps 2 --global-batch-size 2 --micro-batch-size 1"
    argv = as_argv(words, config=settings, load=base, out=out)
    command = [sys.executable, "-m", "finetune.prompt_tuning", *argv]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    saved = checkpoint.find(out)
    tensors = checkpoint.read_index(saved)["tensors"].items()
    learned = sum(math.prod(shape) for name, (_, shape) in tensors if name.startswith("model."))
    last_line = (out / "metrics.jsonl").read_text().splitlines()[-1]
    return {
        "parameters": learned,
        "peak_memory_bytes": json.loads(last_line)["peak_memory_bytes"],
        "checkpoint_bytes": sum(file.stat().st_size for file in saved.iterdir()),
    }


def main():
    args = report.parse(report.arguments(__doc__))
    fields = PRESETS["gpt2"][0] | (TOY if args.toy else {})
    results = {}
    table = report.Table()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        base = write_base(folder, GPTConfig(**fields))
        for style in STYLES:
            results[style] = measure(folder, base, style)
            table.row({"": style} | results[style])
    report.save("prompt_memory", {"results": results}, args)


if __name__ == "__main__":
    main()
