"""The constants of a machine with GPUs, measured in some seconds. All ranks work at once, as in
training, and each measurement is one constant:

    matmul       a matrix multiplication in bf16
    memory       z = x + y
    wait         an all-reduce of a few bytes
    link         an all-reduce of 256 MiB

    python planner.py measure --ranks 8 --out machine.json
    python planner.py plan --machine machine.json --model gpt3-20b --gpus 8 --batch 64

The file is short: for a machine that is not here it is written by hand (docs/planning.md).

This has not yet run on a GPU. Not covered: several nodes; CPU ranks, which share processors.
"""

import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from course import ranks as rank_processes
from planning import commands
from planning.inputs import Constants, Machine
from run.config import ConfigError


class Sizes(NamedTuple):
    """What is timed."""

    # of the square matrices
    matrix: int = 8192
    # numbers that are added, and of the two messages
    added: int = 2**28
    few: int = 2**10
    message: int = 2**26
    # of each measurement
    repeats: int = 50


class Times(NamedTuple):
    """Seconds, while all ranks work."""

    matmul: float
    add: float
    few: float = 0.0
    message: float = 0.0


def seconds_of(work, repeats: int, device: str) -> float:
    """Of one call of a function, while all ranks call it: the median."""
    ends = []
    for _ in range(repeats + 1):
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        ends.append(time.perf_counter())
    return statistics.median(end - start for start, end in itertools.pairwise(ends))


def on_rank(rank: int, world: int, device: str, sizes: Sizes) -> Times:
    """All measurements, on one of `world` ranks."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    a, b = torch.ones(2, sizes.matrix, sizes.matrix, device=device, dtype=torch.bfloat16)
    x, y, z = torch.ones(3, sizes.added, device=device)
    works = [lambda: a @ b, lambda: torch.add(x, y, out=z)]
    if world > 1:
        group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
        few, message = x[: sizes.few], x[: sizes.message]
        works += [lambda: dist.all_reduce(few, group=group)]
        works += [lambda: dist.all_reduce(message, group=group)]
    return Times(*(seconds_of(work, sizes.repeats, device) for work in works))


def machine_of(times: Times, ranks: int, memory: float, sizes: Sizes) -> Machine:
    """memory: bytes of each GPU. Rates are measured, so all of each is reached."""
    # two numbers are read, one is written
    bandwidth = 12 * sizes.added / times.add
    link = bandwidth
    if ranks > 1:
        # noise must not make what is left negative
        copying = max(times.message / 4, times.message - times.few)
        link = 2 * (ranks - 1) / ranks * 4 * sizes.message / copying
    peak = 2 * sizes.matrix**3 / times.matmul
    # an all-reduce takes two passes, and each waits
    constants = Constants(matmul=1.0, memory=1.0, node=1.0, network=1.0, wait=times.few / 2)
    return Machine("this machine", peak, memory, bandwidth, link, link, ranks, constants)


def measure(ranks: int) -> Machine:
    """This machine, as `ranks` ranks find it, each with a GPU."""
    sizes = Sizes()
    times = rank_processes.run(on_rank, ranks, ranks, "cuda", sizes)[0]
    return machine_of(times, ranks, torch.cuda.get_device_properties(0).total_memory, sizes)


def main(argv: list[str]) -> None:
    parser = commands.make_parser("measure", "Measure the constants of this machine's GPUs.")
    parser.add_argument("--ranks", type=commands.count, default=None, help="(default: all GPUs)")
    parser.add_argument("--out", default="machine.json", help="file (default: machine.json)")
    args = parser.parse_args(argv)
    here = torch.cuda.device_count()
    ranks = args.ranks or max(1, here)
    if ranks > here:
        raise ConfigError(
            f"--ranks {ranks}: this machine has {here} GPUs; docs/planning.md says how to write"
            f" {args.out} by hand"
        )
    text = json.dumps(dataclasses.asdict(measure(ranks)), indent=1)
    print(text)
    try:
        Path(args.out).write_text(text + "\n")
    except OSError as e:
        raise ConfigError(f"--out {args.out}: cannot be written ({e.strerror})") from None
    print(f"written to {args.out}, for --machine {args.out} and train.py --plan {args.out}")
