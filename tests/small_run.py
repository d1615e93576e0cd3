"""Runs that take seconds: one narrow layer, a short context, no evaluation. And what they leave.

small_run.flags(steps=30)                ["--num-layers", "1", ..., "--steps", "30"]
small_run.run("finetune/sft.py", *flags)          the exit status
small_run.numbers_of(out)                metrics.jsonl, without times
small_run.tensors_of(out)                the newest checkpoint
"""

import json
from pathlib import Path

SMALL = dict(
    num_layers=1,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=64,
    seq_length=32,
    global_batch_size=2,
    device="cpu",
    eval_every=0,
)


def flags(**options) -> list[str]:
    """The flags of SMALL; options replace some of them, or come in addition."""
    return as_flags(**SMALL | options)


def as_flags(**options) -> list[str]:
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def run(*words) -> int:
    """`python COMMAND FLAGS` without a new interpreter. Without a command: train.py."""
    import train
    from course import training_commands

    config_class, given = training_commands.split([str(word) for word in words])
    return train.main(given, config_class)


def refusal(capsys, *words) -> str:
    """The one line of a command that refuses its flags."""
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


# what the clock says
TIMES = {
    *("step_seconds", "tokens_per_second", "tflops_per_device", "peak_memory_bytes"),
    *("rollout_seconds", "training_seconds", "predicted_seconds"),
}


def write_lines(path: Path, records: list) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def template(
    name="t",
    splits=(3, 2),
    text="<|VIRTUAL_PROMPT_0|>{text} is<|VIRTUAL_PROMPT_1|>{label}",
    **fields,
) -> dict:
    """An entry of task_templates, for learned prompts."""
    entry = dict(taskname=name, prompt_template=text, truncate_field="text")
    entry |= dict(total_virtual_tokens=sum(splits), virtual_token_splits=list(splits))
    return entry | dict(answer_only_loss=True, answer_field="label") | fields


def lines_of(out: Path) -> list[dict]:
    """What a run has written into metrics.jsonl."""
    return read_lines(Path(out) / "metrics.jsonl")


def numbers_of(out: Path) -> list[dict]:
    lines = lines_of(out)
    return [{name: line[name] for name in line.keys() - TIMES} for line in lines]


def tensors_of(out: Path, prefix: str = "") -> dict:
    """The newest checkpoint, whole: weights, and moments where there is no prefix."""
    import torch

    from run import checkpoint
    from sharding import Sharding, set_sharding

    path = checkpoint.find(out)
    found = {}
    for name, (dtype, shape) in checkpoint.read_index(path)["tensors"].items():
        if name.startswith(prefix):
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            found[name] = set_sharding(empty, Sharding(tuple(shape), ()))
    checkpoint.read(path, found)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def equal(a: dict, b: dict) -> bool:
    """Compares tensors by name, bit for bit."""
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
