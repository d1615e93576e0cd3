"""What a run records: metrics.jsonl for programs; a line per step and loss.png for people.

Each line of metrics.jsonl is one step. Floats have full precision, so that two runs can be compared
bit for bit:

    {"step": 1, "loss": 5.56, "grad_norm": 3.2, "lr": 6e-05, "tokens": 2048, "step_seconds": 0.2,
     "tokens_per_second": 10240.0, "tflops_per_device": 0.11, "peak_memory_bytes": 570425344}

    python -m run.metrics runs/default       draws runs/default/loss.png again

`tokens` counts the tokens of the loss since the start of the run. Some lines have more fields:

    mfu                    share of the peak FLOP/s, on GPUs whose peak is known
    eval_loss              loss on held-out text, after an evaluation
    loss_scale             fp16 only
    skipped_steps          steps so far whose gradients were not finite
    fp8_not_finite         --fp8: tensors with NaN or infinity, the first of them first
    fp8_saturated          --fp8 delayed: tensors with values beyond what their scale allows
    predicted_seconds      of a step, by planner.py, with --plan

docs/preferences.md has the fields of finetune/preference.py and finetune/reinforcement.py. With
experts, these fields have one number for each layer with experts:

    expert_load                    for each expert: its choices / an even share
    dropped_share                  share of choices dropped because an expert was full
    router_entropy                 nats
    load_balancing_loss, z_loss    before their coefficients; `loss` is without them
"""

import contextlib
import json
import math
import os
import re
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from base import json_files, terminal
from base.errors import InputError, cause


class MetricsError(InputError):
    """metrics.jsonl cannot be read or written; the message says why."""


@dataclass
class Line:
    """The fields that are checked in every line. Numbers that were not finite are null."""

    step: int
    loss: float | None
    eval_loss: float | None = None


def read_metrics(path: Path) -> tuple[list[dict], list[int]]:
    """(the lines of a metrics.jsonl, the numbers of the lines that cannot be read). Half a line at
    the end, which a killed process leaves, is neither. A missing file has no lines. Raises
    MetricsError."""
    try:
        data = json_files.read_bytes(path)
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as e:
        raise MetricsError(f"{path}: cannot be read ({cause(e)})") from None
    lines = []
    damaged = []
    whole = data.count(b"\n")
    for number, text in json_files.lines(data):
        try:
            json_files.parse(text, Line)
            lines.append(json_files.parse(text, dict))
        except json_files.JSONError:
            if number <= whole:
                damaged.append(number)
    return lines, damaged


class Metrics:
    """metrics.jsonl: one line a step, written before any checkpoint of that step, by rank 0."""

    def __init__(self, path: Path, last_step: int):
        """Continue the file of a run that resumes after `last_step`, 0 for a new run. Later lines,
        which a killed run wrote after its last checkpoint, are removed, as is half a line at the
        end. If other lines cannot be read, the old file is kept as metrics.jsonl.damaged. `notice`
        tells the user, or is "". Raises MetricsError."""
        lines, damaged = read_metrics(path)
        self.path = path
        self.notice = ""
        self.lines = [line for line in lines if line["step"] <= last_step]
        lost = sorted(set(range(1, last_step + 1)) - {line["step"] for line in self.lines})
        with self.writing():
            if damaged:
                shutil.copyfile(path, f"{path}.damaged")
                self.notice = f"{path}: {left_out(damaged)}; {path}.damaged is as it was"
            elif lines and not last_step:
                self.notice = f"{path}: begun anew; its {len(lines)} steps are in no checkpoint"
            elif lost:
                missing = f"{len(lost)} of {last_step} steps have no line"
                self.notice = f"{path}: {missing}, from step {lost[0]} to step {lost[-1]}"
            # A rename is one operation: a kill leaves the old file or the new one.
            text = "".join(json.dumps(line) + "\n" for line in self.lines)
            path.with_suffix(".tmp").write_text(text, encoding="utf-8")
            os.replace(path.with_suffix(".tmp"), path)
            self.file = open(path, "a", encoding="utf-8")

    def sync(self) -> None:
        """Flush to the disk before a checkpoint: after a power failure the lines are there too."""
        with self.writing():
            os.fsync(self.file.fileno())

    def add(self, line: dict) -> None:
        """Raises MetricsError."""
        line = {name: finite(value) for name, value in line.items()}
        self.lines.append(line)
        with self.writing():
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()

    @contextlib.contextmanager
    def writing(self):
        try:
            yield
        except OSError as e:
            raise MetricsError(f"{self.path}: cannot be written ({e.strerror})") from None


def finite(value):
    """The value, with None for NaN and infinity, which JSON lacks; in lists too."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def left_out(damaged: list[int]) -> str:
    return f"line {', '.join(map(str, damaged))} cannot be read and is left out"


class Curves:
    """The numbers of each step for TensorBoard: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, last_step: int):
        """last_step: later points of an earlier run are hidden. Needs the package tensorboard."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=last_step + 1)

    def add(self, line: dict) -> None:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()


# Words of a GPU's name -> FLOP/s of dense matrix multiplication in 16 bits, from NVIDIA's data
# sheets. The sparse numbers, and those of FP8 from Hopper on, are twice as high.
PEAK = {
    "A100": 312e12,
    "H100 HBM3": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "GB300": 2500e12,
}


def peak_flops(device: torch.device) -> float | None:
    """The device's dense peak in 16 bits, FLOP/s. None on CPUs, other GPUs and parts of a GPU."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """The entry of PEAK with most words, all of them in `name` (torch.cuda.get_device_name)."""
    words = set(re.split("[ -]", name))
    fitting = [known for known in PEAK if set(known.split()) <= words]
    if not fitting or "MIG" in words:
        return None
    return PEAK[max(fitting, key=lambda known: len(known.split()))]


def mfu(tflops: float, device: torch.device, precision: str, fp8: bool = False) -> dict:
    """{"mfu": share of the device's dense peak}, or {} in fp32 and where the peak is unknown. fp8:
    the device multiplies in FP8, whose peak counts though not all products are in FP8."""
    peak = peak_flops(device) if precision in ("bf16", "fp16") else None
    return {"mfu": tflops * 1e12 / (2 * peak if fp8 else peak)} if peak else {}


def plot_loss(lines: list[dict], title: str, path: Path) -> None:
    """Draw the training loss, and the held-out loss of the evaluations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, style, color, label in (
        ("loss", "-", "tab:blue", "training"),
        ("eval_loss", "o-", "tab:orange", "held out"),
    ):
        steps = [line["step"] for line in lines if name in line]
        losses = [line[name] for line in lines if name in line]
        axes.plot(steps, losses, style, linewidth=0.8, color=color, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def progress(line: dict, steps: int, seconds_left: float, bytes_per_token: float | None) -> str:
    """A line of metrics.jsonl for people, with a second line after an evaluation."""
    parts = [
        f"step {line['step']:>{len(str(steps))}}/{steps}",
        f"loss {line['loss']:.4f}",
        f"grad {line['grad_norm']:.2f}",
        f"lr {line['lr']:.1e}",
        f"{line['tokens_per_second']:,.0f} tok/s",
        f"{line['tflops_per_device']:.3f} TFLOP/s per device",
        f"{line['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"{duration(seconds_left)} left",
    ]
    if "predicted_seconds" in line:
        predicted = line["predicted_seconds"]
        parts.append(f"{line['step_seconds']:.3g} s (predicted {predicted:.3g})")
    if "reward" in line:
        parts.insert(1, f"reward {line['reward']:.3f}")
        # Not -0.000.
        parts.insert(2, f"KL {round(line['kl'], 3) + 0:.3f}")
    if "accuracy" in line:
        parts.insert(2, f"accuracy {line['accuracy']:.1%}")
    if "mfu" in line:
        parts.append(f"MFU {line['mfu']:.1%}")
    if not math.isfinite(line["grad_norm"]):
        first = "".join(f", first {name}" for name in line.get("fp8_not_finite", [])[:1])
        parts.append(f"not finite{first}: skipped")
    if "expert_load" in line:
        parts.append(f"load up to {max(max(layer) for layer in line['expert_load']):.2f}")
    return "  ".join(parts) + of_evaluation(line, bytes_per_token)


def of_evaluation(line: dict, bytes_per_token: float | None) -> str:
    """The second line, of held-out data; "" where there was no evaluation."""
    text = ""
    if "eval_loss" in line:
        loss = line["eval_loss"]
        text += f"\n    held-out loss {loss:.4f}"
        if bytes_per_token:
            text += f" nats per token, {loss / bytes_per_token:.4f} nats per byte"
    for name in filter(line.__contains__, ("eval_accuracy", "eval_exact_match", "eval_f1")):
        text += f", {name.removeprefix('eval_').replace('_', ' ')} {line[name]:.1%}"
    if "eval_reward" in line:
        text += f"\n    held-out reward {line['eval_reward']:.4f}"
    return text


def peak_memory(device: torch.device) -> int:
    """Bytes of the tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def duration(seconds: float) -> str:
    """2m05s, or from an hour on 1h02m."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours}h{of_hour:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def main() -> None:
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m run.metrics RUN, a folder with a metrics.jsonl")
    out = Path(sys.argv[1])
    try:
        lines, damaged = read_metrics(out / "metrics.jsonl")
        if not lines:
            raise MetricsError(f"{out}: has no metrics.jsonl with a step in it")
        plot_loss(lines, str(out), out / "loss.png")
    except (OSError, ValueError) as e:
        terminal.refuse(f"metrics.py: {e}")
    if damaged:
        terminal.say(f"metrics.jsonl: {left_out(damaged)}", error=True)
    print(out / "loss.png")


if __name__ == "__main__":
    terminal.run(main)
