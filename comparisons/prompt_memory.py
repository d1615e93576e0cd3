"""What prompt tuning keeps in memory and on the disk, beside fine-tuning.

    python comparisons/prompt_memory.py [--toy] [--out DIR]

GPT-2 124M learns two tasks of 100 virtual tokens, by two steps of train.py, in a process of its
own; then the same by fine-tuning. Compared are the parameters that are learned, the peak memory and
the size of a checkpoint. The peak is that of the whole process (on a GPU, of tensors), libraries
and the reading of the base model included. Weights are random: memory does not depend on them.
"""

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch

import checkpoint
import sharding
from lessons import demo
from model_config import GPTConfig
from run.presets import PRESETS

ROOT = Path(__file__).parent.parent
TOY = dict(num_layers=2, hidden_size=64, num_heads=4, seq_length=256, vocab_size=257)
# virtual tokens of a task
STYLES = {"prompt-tuning": 100, "fine-tuning": 0}
TASKS = ("a", "b")


def write_settings(folder: Path, style: str) -> Path:
    """The configuration of --prompt-config, with its training lines."""
    tokens = STYLES[style]
    lines = folder / "lines.jsonl"
    with open(lines, "w") as file:
        for task in TASKS:
            file.write(json.dumps({"taskname": task, "text": "x" * 20, "label": "y"}) + "\n")
    prompt = "<|VIRTUAL_PROMPT_0|>" if tokens else ""
    template = {
        "prompt_template": "{text}" + prompt + "{label}",
        "total_virtual_tokens": tokens,
        "virtual_token_splits": [tokens] if tokens else [],
        "answer_only_loss": True,
        "answer_field": "label",
    }
    settings = {
        "virtual_prompt_style": style,
        "new_tasks": list(TASKS),
        "task_templates": [template | {"taskname": task} for task in TASKS],
        "prompt_tuning": {"new_prompt_init_methods": ["random"] * len(TASKS)},
        "data": {"train_ds": [str(lines)], "validation_ds": [str(lines)]},
    }
    path = folder / f"{style}.json"
    path.write_text(json.dumps(settings))
    return path


def write_base(folder: Path, config: GPTConfig) -> Path:
    """A checkpoint of a model with random weights."""
    model = demo.meta_model(config)
    sharding.init(model, 0, "cpu", torch.float32)
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    description = {"config": {"tokenizer": "bytes"}, "model": dataclasses.asdict(config)}
    return checkpoint.write(folder / "base", 0, weights, description)


def measure(folder: Path, base: Path, style: str) -> dict:
    """Two steps of train.py in a process of its own."""
    settings = write_settings(folder, style)
    out = folder / style
    command = [sys.executable, ROOT / "train.py", "--prompt-config", settings, "--load", base]
    command += ["--out", out, "--steps", "2"]
    command += ["--global-batch-size", "2", "--micro-batch-size", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    saved = checkpoint.find(out)
    learned = 0
    for name, (_, shape) in checkpoint.read_index(saved)["tensors"].items():
        if name.startswith("model."):
            learned += math.prod(shape)
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
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        base = write_base(folder, GPTConfig(**fields))
        for style in STYLES:
            row = results[style] = measure(folder, base, style)
            print(
                f"{style:>14}: {row['parameters']:>12,} parameters learned, peak"
                f" {row['peak_memory_bytes'] / 2**30:.2f} GiB, a checkpoint of"
                f" {row['checkpoint_bytes'] / 1e6:,.1f} MB",
                flush=True,
            )
    report.save("prompt_memory", {"results": results}, args)


if __name__ == "__main__":
    main()
