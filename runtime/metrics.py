"""What a run tells: `metrics.jsonl` for programs, a line per step and `loss.png` for people.

A line of metrics.jsonl is one step, floats in full precision, so that two runs can be compared bit
for bit:

    {"step": 1, "loss": 5.56, "grad_norm": 3.2, "lr": 6e-05, "tokens": 2048, "step_seconds": 0.2,
    "tokens_per_second": 10240.0,
     "tflops_per_device": 0.11, "peak_memory_bytes": 570425344}

and now and then `mfu` (on GPUs whose peak is known), `eval_loss`, `loss_scale` (fp16) and
`skipped_steps` (those whose gradients were not finite). With experts also `expert_load` (for each
layer that has them, how many choices fell on each expert, over an even share) and, each with a
number for each layer, `dropped_share` (of choices), `router_entropy` (nats), `load_balancing_loss`
and `z_loss` (before their coefficients; `loss` is without them).

    python -m runtime.metrics runs/default       draws runs/default/loss.png again
"""

import itertools
import json
import math
import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime import json_files, terminal


def finite(x):
    """The same with None for what JSON has no number for, in lists too."""
    if isinstance(x, list):
        return [finite(y) for y in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


class MetricsError(RuntimeError):
    """metrics.jsonl cannot be read or written; the message says why."""


def read_metrics(path: Path) -> tuple[list[dict], list[int]]:
    """(the lines of a metrics.jsonl, the numbers of those that cannot be read). Half a line at the
    end, which a kill leaves, counts as neither. Raises MetricsError."""
    try:
        raw = json_files.read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as e:
        raise MetricsError(
            f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})"
        ) from None
    lines = []
    damaged = []
    for number, text in enumerate(raw, 1):
        try:
            json_files.parse(text, Line)
            lines.append(json_files.parse(text, dict))
        except json_files.JSONError:
            if text.strip() and number < len(raw):
                damaged.append(number)
    return lines, damaged


@dataclass
class Line:
    """What every line of metrics.jsonl has; numbers that were not finite are null."""

    step: int
    loss: float | None
    eval_loss: float | None = None


class Metrics:
    """metrics.jsonl: one line a step, flushed before any checkpoint of that step. Rank 0 has it."""

    def __init__(self, path: Path, last_step: int):
        """Lines beyond `last_step`, which a killed run wrote after its last checkpoint, are cut; so
        is half a line at the end. Where other lines cannot be read, the file as it was is kept
        beside, as metrics.jsonl.damaged, and `self.notice` says so. Raises MetricsError."""
        lines, damaged = read_metrics(path)
        self.path = path
        self.notice = ""
        self.lines = [line for line in lines if line["step"] <= last_step]
        try:
            if damaged:
                kept = next(
                    name
                    for n in itertools.count(1)
                    if not os.path.lexists(name := f"{path}.damaged" + (f".{n}" if n > 1 else ""))
                )
                shutil.copyfile(path, kept)
                self.notice = (
                    f"{path}: line {', '.join(map(str, damaged))} cannot be read and is left out;"
                    f" the file as it was is {kept}"
                )
            elif lines and not last_step:
                self.notice = f"{path}: begun anew; its {len(lines)} steps are in no checkpoint"
            temporary = path.with_suffix(".tmp")
            temporary.unlink(missing_ok=True)
            temporary.write_text(
                "".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8"
            )
            os.replace(temporary, path)
            self.file = open(path, "a", encoding="utf-8")
        except OSError as e:
            raise MetricsError(f"{path}: cannot be written ({e.strerror})") from None

    def add(self, line: dict) -> None:
        """Raises MetricsError."""
        line = {k: finite(v) for k, v in line.items()}
        self.lines.append(line)
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as e:
            raise MetricsError(f"{self.path}: cannot be written ({e.strerror})") from None


class Curves:
    """The numbers of each step for TensorBoard: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, last_step: int):
        """Curves beyond `last_step` are hidden. Needs the package tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=last_step + 1)

    def add(self, line: dict) -> None:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()


# FLOP/s of dense matrix multiplication in 16 bits, from NVIDIA's data sheets (the sparse numbers
# are twice as high).
PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def mfu(tflops: float, device: torch.device, precision: str) -> dict:
    """{"mfu": share of the device's peak}, or {} where the peak is not known: on CPUs, other GPUs,
    in fp32."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return {}
    name = torch.cuda.get_device_name(device)
    return next(({"mfu": tflops * 1e12 / peak} for gpu, peak in PEAK.items() if gpu in name), {})


def plot_loss(lines: list[dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [x["step"] for x in lines],
        [x["loss"] for x in lines],
        linewidth=0.8,
        color="tab:blue",
        label="training",
    )
    held_out = [x for x in lines if "eval_loss" in x]
    axes.plot(
        [x["step"] for x in held_out],
        [x["eval_loss"] for x in held_out],
        "o-",
        color="tab:orange",
        label="held out",
    )
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def progress(line: dict, steps: int, seconds_left: float, bytes_per_token: float) -> str:
    """One line for a person."""
    text = (
        f"step {line['step']:>{len(str(steps))}}/{steps}  loss {line['loss']:.4f}  grad"
        f" {line['grad_norm']:.2f}  lr {line['lr']:.1e}  {line['tokens_per_second']:,.0f} tok/s "
        f" {line['tflops_per_device']:.3f} TFLOP/s per device "
        f" {line['peak_memory_bytes'] / 2**30:.2f} GiB  {duration(seconds_left)} left"
    )
    if "mfu" in line:
        text += f"  MFU {line['mfu']:.1%}"
    if not math.isfinite(line["grad_norm"]):
        text += "  not finite: skipped"
    if "expert_load" in line:
        text += f"  load up to {max(max(layer) for layer in line['expert_load']):.2f}"
    if "eval_loss" in line:
        text += (
            f"\n    held-out loss {line['eval_loss']:.4f},"
            f" {line['eval_loss'] / bytes_per_token:.4f} nats per byte"
        )
    return text


def peak_memory(device: torch.device) -> int:
    """Bytes: of tensors on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


def main() -> int:
    """Exit status: 0, or 2 with one message."""
    if len(sys.argv) != 2:
        print(
            "usage: python -m runtime.metrics RUN, a folder with a metrics.jsonl", file=sys.stderr
        )
        return 2
    out = Path(sys.argv[1])
    try:
        lines, damaged = read_metrics(out / "metrics.jsonl")
        if not lines:
            raise MetricsError(f"{out}: has no metrics.jsonl with a step in it")
        plot_loss(lines, str(out), out / "loss.png")
    except (MetricsError, OSError, ValueError) as e:
        print(f"metrics.py: {e}", file=sys.stderr)
        return 2
    if damaged:
        print(
            f"metrics.jsonl: line {', '.join(map(str, damaged))} cannot be read and is left out",
            file=sys.stderr,
        )
    print(out / "loss.png")
    return 0


if __name__ == "__main__":
    terminal.run(main)
