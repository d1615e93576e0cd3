"""What prompt tuning keeps in memory and on the disk, beside fine-tuning: GPT-2 124M, two tasks of
100 virtual tokens, two steps of train.py each, in processes of their own.

    python comparisons/prompt_memory.py [--toy] [--out DIR]

The peak is that of the whole process (or of tensors on a GPU), libraries and the reading of the
checkpoint included. Weights are random: memory does not ask."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch

import checkpoint
import gpt
import sharding
from runtime.presets import PRESETS


def settings(folder: Path, style: str, tokens: int) -> dict:
    template = {
        "prompt_template": "{text}" + "<|VIRTUAL_PROMPT_0|>" * bool(tokens) + "{label}",
        "total_virtual_tokens": tokens,
        "virtual_token_splits": [tokens] * bool(tokens),
        "answer_only_loss": True,
        "answer_field": "label",
    }
    lines = folder / "lines.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"taskname": task, "text": "x" * 20, "label": "y"}) + "\n" for task in "ab"
        )
    )
    return {
        "virtual_prompt_style": style,
        "new_tasks": ["a", "b"],
        "task_templates": [template | {"taskname": task} for task in "ab"],
        "prompt_tuning": {"new_prompt_init_methods": ["random"] * 2},
        "data": {"train_ds": [str(lines)], "validation_ds": [str(lines)]},
    }


def main():
    args = report.parse(report.arguments(__doc__))
    toy = (
        dict(num_layers=2, hidden_size=64, num_heads=4, seq_length=256, vocab_size=257)
        if args.toy
        else {}
    )
    config = gpt.GPTConfig(**PRESETS["gpt2"][0] | toy)
    results = {}
    with torch.device("meta"):
        model = gpt.GPT(config)
    sharding.init(model, 0, "cpu", torch.float32)
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        base = checkpoint.write(
            Path(folder) / "base",
            0,
            weights,
            {"config": {"tokenizer": "bytes"}, "model": dataclasses.asdict(config)},
        )
        for style, tokens in (("prompt-tuning", 100), ("fine-tuning", 0)):
            path = Path(folder) / f"{style}.json"
            out = Path(folder) / style
            path.write_text(json.dumps(settings(Path(folder), style, tokens)))
            subprocess.run(
                [
                    sys.executable,
                    Path(__file__).parent.parent / "train.py",
                    "--prompt-config",
                    path,
                    "--load",
                    base,
                    "--out",
                    out,
                    "--steps",
                    "2",
                    "--global-batch-size",
                    "2",
                    "--micro-batch-size",
                    "1",
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            learned = sum(
                torch.Size(shape).numel()
                for name, (_, shape) in checkpoint.read_index(checkpoint.find(out))[
                    "tensors"
                ].items()
                if name.startswith("model.")
            )
            results[style] = {
                "parameters": learned,
                "peak_memory_bytes": json.loads(
                    (out / "metrics.jsonl").read_text().splitlines()[-1]
                )["peak_memory_bytes"],
                "checkpoint_bytes": sum(f.stat().st_size for f in checkpoint.find(out).iterdir()),
            }
            print(
                f"{style:>14}: {learned:>12,} parameters learned, peak"
                f" {results[style]['peak_memory_bytes'] / 2**30:.2f} GiB, a checkpoint of"
                f" {results[style]['checkpoint_bytes'] / 1e6:,.1f} MB",
                flush=True,
            )
    report.save("prompt_memory", {"results": results}, args)


if __name__ == "__main__":
    main()
