"""How far off is the planner here? Runs the layouts that it thinks fastest, a few steps each.

    python planner.py try 5 --ranks 4 --model tiny        the five best, for 8 steps each

    layout                      predicted, s   measured, s   predicted / measured   order
    pp 4                               0.585         0.575                   1.02   1  1
    dp 2, pp 2, zero-stage 1           0.623         0.659                   0.95   2  2

Further flags are train.py's: the model, --global-batch-size, the precision. Each run is `torchrun
train.py` on CPU ranks, or on GPUs where there are enough; its time is the median over the steps,
without the first three. Layouts that differ only in what costs no time, such as the micro-batch of
equal ones, are all tried: the planner ranks them too.

Not covered: noise. On a busy machine the measured order is that of luck.
"""

import argparse
import contextlib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import planner
from base import json_files, terminal
from planning import measure
from planning.inputs import Layout, Machine, software_of
from run import flags, rules
from run.config import LAYOUT, Config, ConfigError, flag_name

ROOT = Path(__file__).parent.parent
# steps that do not count
WARMUP = 3
# of a run, which is stopped before
MOST_STEPS = 1000


class EarlyEndError(RuntimeError):
    """A run of train.py ended before its steps were done; the message is what it said."""


def run(ranks: int, script: list[str], flags: list[str], steps: int) -> list[dict]:
    """The first `steps` lines of metrics.jsonl of a training run. script: train.py, or what calls
    it. Raises EarlyEndError."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as stderr:
        out = Path(folder) / "run"
        metrics = out / "metrics.jsonl"
        launcher = [*torchrun, "--nproc-per-node", str(ranks)] if ranks > 1 else [sys.executable]
        command = [*launcher, *script, *flags]
        # stopped by SIGTERM after `steps`, so that nobody waits for a sample of text
        command += ["--steps", str(MOST_STEPS), "--out", str(out)]
        lines = []
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            # the launcher's own files are removed with the folder
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # Ctrl-C reaches this process alone, which ends the launcher
            start_new_session=True,
        )
        try:
            while len(lines) < steps:
                # asked before the file is read, so that no line is missed
                ended = process.poll() is not None
                if metrics.exists():
                    # the last may be half a line, or empty
                    lines = metrics.read_text().split("\n")[:-1]
                if ended and len(lines) < steps:
                    raise EarlyEndError(failure(stderr, process.returncode))
                time.sleep(0.1)
        finally:
            end(process)
        return [json.loads(line) for line in lines[:steps]]


def end(process: subprocess.Popen) -> None:
    """Stop a run and wait until it has ended. Signals wait as long, for its folder is in use."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, measure.ENDING)
    try:
        process.terminate()
        process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def step_seconds(ranks: int, words: list[str], steps: int) -> float:
    """Of train.py with these flags, the median of the steps after the first three. Raises
    EarlyEndError."""
    lines = run(ranks, ["train.py"], words, steps)
    return statistics.median(line["step_seconds"] for line in lines[WARMUP:])


def failure(stderr, status: int) -> str:
    """What train.py said is wrong, or the last line that it wrote."""
    stderr.seek(0)
    lines = [line.strip() for line in stderr if line.strip()]
    messages = [line for line in lines if line.startswith("train.py: ")]
    if messages:
        return messages[0]
    return lines[-1] if lines else f"exit status {status}"


def name_of(layout: Layout) -> str:
    """dp 2, pp 2, micro-batch-size 1"""
    words = [f"dp {layout.dp}"] if layout.dp > 1 else []
    text = " ".join(layout.flags())
    parts = [part.strip() for part in text.split("--") if part.strip()]
    return ", ".join(words + [part for part in parts if not part.startswith("global-batch")])


def order(values: list[float]) -> list[int]:
    """The place of each, from 1 for the least."""
    return [1 + sum(other < value for other in values) for value in values]


def spearman(predicted: list[float], measured: list[float]) -> float:
    """The correlation of their ranks: 1 where the order is the same. Equal values share a rank."""

    def ranks(values):
        # the mean of the first and the last place that equal values have
        return [sum((x < y) + (x <= y) for x in values) for y in values]

    return float(np.corrcoef(ranks(predicted), ranks(measured))[0, 1])


def table(names: list[str], predicted: list[float], measured: list[float]) -> list[str]:
    """A heading, a line for each layout, and one for the order."""
    width = max(map(len, names)) + 2
    heading = f"{'layout':<{width}}{'predicted, s':>14}{'measured, s':>13}{'ratio':>7}{'order':>8}"
    lines = [heading]
    places = zip(order(predicted), order(measured))
    for name, p, m, (expected, found) in zip(names, predicted, measured, places):
        lines.append(f"{name:<{width}}{p:>14.3f}{m:>13.3f}{p / m:>7.2f}{expected:>5}{found:>3}")
    ratios = [p / m for p, m in zip(predicted, measured)]
    off = statistics.mean(abs(ratio - 1) for ratio in ratios)
    chosen = measured[predicted.index(min(predicted))]
    text = f"off by {off:.0%} on average; the first is {chosen / min(measured) - 1:.0%} slower than"
    return [*lines, f"{text} the fastest of these"]


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(ours, train.py's)"""
    parser = measure.Parser(
        prog="planner.py try",
        description="Run the layouts that are predicted to be the fastest.",
        epilog="Further flags go to train.py: --model, --hidden-size, --global-batch-size, ..",
        allow_abbrev=False,
    )
    parser.add_argument("count", type=int, help="how many layouts")
    parser.add_argument("--ranks", type=int, default=measure.RANKS, help="(default: 4)")
    parser.add_argument(
        "--machine", metavar="FILE", help="of `measure`; by default it is measured now"
    )
    parser.add_argument("--steps", type=int, default=8, help="of each (default: 8)")
    args, rest = parser.parse_known_args(argv)
    for name, value, least, most in (
        ("count", args.count, 1, 1000),
        ("--ranks", args.ranks, 1, measure.MOST_RANKS),
        ("--steps", args.steps, WARMUP + 1, MOST_STEPS),
    ):
        if not least <= value <= most:
            terminal.refuse(f"planner.py: {name} {value}: must be from {least} to {most}")
    return args, rest


def machine_of(args: argparse.Namespace) -> Machine:
    """That of --machine, or this one, measured now. Raises JSONError."""
    if args.machine:
        return json_files.read(args.machine, Machine)
    print("measuring this machine ..", file=sys.stderr, flush=True)
    return measure.measure_once(args.ranks)


def config_of(rest: list[str]) -> Config:
    """The run without a layout. Raises ConfigError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = flags.parse(rest, 0)
    except SystemExit:
        # what argparse refuses is printed in the name of train.py
        message = said.getvalue().strip().removeprefix("train.py: ")
        raise ConfigError(message.replace("; --help", "; train.py --help")) from None
    for field in (*LAYOUT, "recompute", "micro_batch_size"):
        if getattr(config, field) != getattr(Config(), field):
            raise ConfigError(f"{flag_name(field)}: is what is tried here; leave it out")
    rules.validate(config, 1)
    return config


def plans_of(machine: Machine, config: Config, ranks: int) -> list[planner.Plan]:
    """The fastest first, as predicted. Raises ConfigError or PlanError."""
    model, batch = config.model_config(), config.global_batch_size
    return planner.search(machine, software_of(machine), model, ranks, batch)


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    args, rest = arguments(argv)
    with measure.interruptible():
        return try_layouts(args, rest)


def try_layouts(args: argparse.Namespace, rest: list[str]) -> int:
    """Predict, run and print. Returns the exit status."""
    try:
        config = config_of(rest)
        machine = machine_of(args)
        plans = plans_of(machine, config, args.ranks)[: args.count]
    except (ConfigError, json_files.JSONError, planner.PlanError) as e:
        terminal.refuse(f"planner.py: {e}")
    device = "cpu" if machine.processors else "cuda"
    names, predicted, measured = [], [], []
    for plan in plans:
        name = name_of(plan.layout)
        print(f"{name} ..", file=sys.stderr, flush=True)
        words = [*rest, "--device", device, *plan.layout.flags()]
        try:
            measured.append(step_seconds(args.ranks, words, args.steps))
        except EarlyEndError as e:
            print(f"{name}: {e}", file=sys.stderr)
            continue
        names.append(name)
        predicted.append(plan.seconds)
    if not names:
        return 1
    print("\n".join(table(names, predicted, measured)))
    return 0 if len(names) == len(plans) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
