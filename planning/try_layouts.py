"""How far off is the planner here? Runs the layouts that it thinks fastest, a few steps each.

    python planner.py try 5 --ranks 8 --model gpt2      the five best, for 8 steps each

    layout                      predicted, s   measured, s   ratio   order
    pp 4                               0.585         0.575    1.02       1
    dp 2, pp 2, zero-stage 1           0.623         0.659    0.95       2

Further flags are train.py's: the model, --global-batch-size. Each run is `torchrun train.py`, on
GPUs where there are enough; its time is the median over the steps, without the first three. Order:
by the measured time. Without GPUs and a machine's file, planning/measure.py measures this machine's
processors first.

Not covered: noise. On a busy machine the measured order is that of luck.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import planner
from base import terminal
from planning import commands, measure, plan
from planning.inputs import Layout, Software
from run import flags, rules
from run.config import LAYOUT, ConfigError, flag_name
from run.pretraining import Config

ROOT = Path(__file__).parent.parent
# Steps that do not count.
WARMUP = 3
# Steps of a run, which is stopped before.
MOST_STEPS = 1000


class EarlyEndError(RuntimeError):
    """A run of train.py ended before its steps were done; the message is what it said."""


def run(ranks: int, script: list[str], flags: list[str], steps: int) -> list[dict]:
    """The first `steps` lines of metrics.jsonl of a training run. script: train.py, or what calls
    it. Raises EarlyEndError."""
    folder = Path(tempfile.mkdtemp())
    with terminal.removed_at_the_end(folder), tempfile.TemporaryFile("w+") as stderr:
        out = folder / "run"
        launcher = measure.torchrun(ranks) if ranks > 1 else [sys.executable]
        # Stopped by SIGTERM after `steps`, so that nobody waits for a sample of text.
        ends = ["--steps", str(MOST_STEPS), "--out", str(out)]
        process = subprocess.Popen(
            [*launcher, *script, *flags, *ends],
            cwd=ROOT,
            # The launcher's own files are removed with the folder.
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # Ctrl-C reaches this process alone, which ends the launcher.
            start_new_session=True,
        )
        try:
            return lines_of(process, out / "metrics.jsonl", stderr, steps)
        finally:
            process.terminate()
            process.wait()


def lines_of(process: subprocess.Popen, metrics: Path, stderr, steps: int) -> list[dict]:
    """The first lines of metrics.jsonl, when they are there. Raises EarlyEndError."""
    lines = []
    while len(lines) < steps:
        # Asked before the file is read, so that no line is missed.
        ended = process.poll() is not None
        if metrics.exists():
            # The last may be half a line, or empty.
            lines = metrics.read_text().split("\n")[:-1]
        if ended and len(lines) < steps:
            raise EarlyEndError(failure(stderr, process.returncode))
        time.sleep(0.1)
    return [json.loads(line) for line in lines[:steps]]


def failure(stderr, status: int) -> str:
    """What train.py said is wrong, or the last line that it wrote."""
    stderr.seek(0)
    lines = [line.strip() for line in stderr if line.strip()]
    messages = [line for line in lines if line.startswith("train.py: ")]
    return [*messages, *lines[-1:], f"exit status {status}"][0]


def name_of(layout: Layout) -> str:
    """dp 2, pp 2, micro-batch-size 1"""
    words = " ".join(["--dp", str(layout.dp), *layout.flags()])
    parts = [part.strip() for part in words.split("--") if part]
    return ", ".join(part for part in parts if not re.match("dp 1$|global-batch", part))


def table(names: list[str], predicted: list[float], measured: list[float]) -> list[str]:
    """A heading, a line for each layout, and how far off the prediction is."""
    width = max(map(len, names)) + 2
    lines = [f"{'layout':<{width}}{'predicted, s':>14}{'measured, s':>13}{'ratio':>7}{'order':>7}"]
    for name, p, m in zip(names, predicted, measured):
        order = sorted(measured).index(m) + 1
        lines.append(f"{name:<{width}}{p:>14.3f}{m:>13.3f}{p / m:>7.2f}{order:>7}")
    off = statistics.mean(abs(p / m - 1) for p, m in zip(predicted, measured))
    slower = measured[0] / min(measured) - 1
    text = (
        f"off by {off:.0%} on average; the first is {slower:.0%} slower than the fastest of these"
    )
    if off > 0.3:
        text += "; caches and the start of operations, which matter in small models, are left out"
    return [*lines, text]


# --- the command ----------------------------------------------------------------------------------


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(ours, train.py's). Raises ConfigError."""
    parser = commands.Parser("try", "Run the layouts that are predicted to be the fastest.")
    parser.epilog = "Further flags go to train.py: --model, --hidden-size, --global-batch-size, .."
    parser.add_argument("count", type=commands.count, help="how many layouts")
    parser.add_argument("--ranks", type=commands.count, default=4, help="(default: 4)")
    machine = "a preset of --gpu, or a file; by default the GPU's name, or ./machine.json"
    parser.add_argument("--machine", metavar="FILE", default="auto", help=machine)
    parser.add_argument("--steps", type=int, default=8, help="of each (default: 8)")
    args, rest = parser.parse_known_args(argv)
    if not WARMUP < args.steps <= MOST_STEPS:
        raise ConfigError(f"--steps {args.steps}: must be from {WARMUP + 1} to {MOST_STEPS}")
    return args, rest


def config_of(rest: list[str]) -> Config:
    """The run without a layout. Raises ConfigError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = flags.parse(rest, 0)
    except SystemExit:
        # What argparse refuses is printed in the name of train.py.
        message = said.getvalue().strip().removeprefix("train.py: ")
        raise ConfigError(message.replace("; --help", "; train.py --help")) from None
    others = "recompute", "recompute_layers", "head_chunk", "micro_batch_size"
    tried = dict.fromkeys((*LAYOUT, *others), "is what is tried here")
    unkept = dict.fromkeys(("out", "plan", "resume"), "the runs that are tried leave nothing")
    for field, rule in (tried | unkept).items():
        if getattr(config, field) != getattr(Config(), field):
            raise ConfigError(f"{flag_name(field)}: {rule}; leave it out")
    rules.validate(config, 1)
    return config


def on_processors(config: Config) -> Software:
    """train.py on CPUs: in float32 unless --precision says otherwise. The processor that would
    compute beside a message sends it."""
    config = dataclasses.replace(config, precision=config.precision or "fp32")
    return dataclasses.replace(plan.software_of(config), overlaps_tensor=False)


def main(argv: list[str]) -> int:
    """Predict, run and print. Returns the exit status."""
    args, rest = arguments(argv)
    config = config_of(rest)
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    software = plan.software_of(config) if device == "cuda" else on_processors(config)
    if device == "cpu" and args.machine == "auto" and not Path(plan.FILE).exists():
        machine = measure.measured(args.ranks)
    else:
        machine = plan.machine_of(args.machine, "--machine")
    model, batch = config.model_config(), config.global_batch_size
    plans = planner.search(machine, software, model, args.ranks, batch)[: args.count]
    # Kill, and a terminal that is closed, end it as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.getsignal(signal.SIGINT))
    tried = {}
    for found in plans:
        name = name_of(found.layout)
        print(f"{name} ..", file=sys.stderr, flush=True)
        words = [*rest, "--device", device, *found.layout.flags()]
        try:
            lines = run(args.ranks, ["train.py"], words, args.steps)
        except EarlyEndError as e:
            print(f"{name}: {e}", file=sys.stderr)
            continue
        seconds = [line["step_seconds"] for line in lines[WARMUP:]]
        tried[name] = found.seconds, statistics.median(seconds)
    if tried:
        print("\n".join(table(list(tried), *zip(*tried.values()))))
    return 0 if len(tried) == len(plans) else 1
