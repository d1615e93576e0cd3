"""A micro-benchmark of this machine: the six constants of a prediction, in about twenty seconds.

All ranks work at once, as in training, and each measurement is one constant:

    matmul       forward and backward of one layer, less what the next two explain
    memory       z = x + y
    overhead     forward and backward of a layer so small that its arithmetic takes no time
    wait         an all-reduce of a few bytes between two computations
    link         an all-reduce of 4 MiB
    processors   counted

Nothing is fitted to a training run. CPU ranks share the processors (planning/shared.py), so the
rates are those of the whole machine at work, divided by its processors.

    python planner.py measure --ranks 4 --out machine.json
    python planner.py plan --machine machine.json --model tiny --gpus 4 --batch 16

Where there are GPUs, each rank has one: bf16, NCCL, no overhead. Not yet run on several GPUs.

Not covered: several nodes.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import gpt
import planner
from base import terminal
from base.world import keep_freed_memory
from planning.inputs import Constants, Layout, Machine, software_of
from proof import ranks as rank_processes
from routers import MoEConfig

# shares of rates that are measured, not read from a data sheet
MEASURED = Constants(matmul=1.0, memory=1.0, node=1.0, network=1.0, wait=0.0)
NAME = "this machine"
RANKS = 4
MOST_RANKS = 64
# Ctrl-C, kill, and a terminal that is closed
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Sizes(NamedTuple):
    """What is timed."""

    # of the layer
    hidden: int = 256
    sequence: int = 256
    # numbers that are added, and bytes of the large all-reduce
    added: int = 2**22
    message: int = 2**22
    # of each measurement, and how often it is repeated
    seconds: float = 0.1
    repeats: int = 24


# on GPUs
LARGE = Sizes(hidden=4096, sequence=2048, added=2**28, message=2**28)
# bytes of a message that takes no time but its wait
FEW_BYTES = 4096


class Times(NamedTuple):
    """Seconds, while all ranks work. Those of collectives are without the computation between."""

    layer: float
    tiny_layer: float
    add: float
    # of pairs of ranks, and of all
    wait_of_two: float = 0.0
    wait_of_all: float = 0.0
    message: float = 0.0


# --- on each rank ---------------------------------------------------------------------------------


def now(device: str) -> float:
    """The time when all ranks are here."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def seconds_of(works: list, sizes: Sizes, device: str) -> list[float]:
    """Of one call of each function, while all ranks call it. They take turns, so that a machine
    that slows down for a moment slows all of them down; the medians count."""
    calls = [calls_in(sizes.seconds, work, device) for work in works]
    times = [[] for _ in works]
    for _ in range(sizes.repeats):
        for work, count, found in zip(works, calls, times):
            start = now(device)
            for _ in range(count):
                work()
            found.append((now(device) - start) / count)
    return [statistics.median(found) for found in times]


def calls_in(seconds: float, work, device: str) -> int:
    """How many calls fit into so many seconds: the same number on all ranks."""
    work()
    start = now(device)
    work()
    once = torch.tensor(now(device) - start)
    dist.broadcast(once, 0)
    return max(1, int(seconds / float(once)))


def model_of(hidden: int, sequence: int) -> MoEConfig:
    """One layer, with heads of 32 or 128."""
    heads = max(1, hidden // (128 if hidden >= 2048 else 32))
    return MoEConfig(1, hidden, heads, seq_length=sequence, vocab_size=256, attention="fused")


def one_layer(hidden: int, sequence: int, device: str):
    """Forward and backward of one layer, as a function."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    block = gpt.Block(model_of(hidden, sequence)).to(device, dtype)
    x = torch.randn(1, sequence, hidden, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def work():
        block(x).backward(grad)
        block.zero_grad()
        x.grad = None

    return work


def on_rank(rank: int, world: int, device: str, sizes: Sizes) -> Times:
    """All measurements, on one of `world` ranks."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        # as train.py does
        keep_freed_memory()
    h, s = sizes.hidden, sizes.sequence
    x, y, z = torch.ones(3, sizes.added, device=device)
    works = [one_layer(h, s, device), one_layer(8, 8, device), lambda: torch.add(x, y, out=z)]
    times = Times(*seconds_of(works, sizes, device))
    if world == 1:
        return times
    backend = "nccl" if device == "cuda" else "gloo"
    everybody = dist.new_group(backend=backend)
    pairs = [dist.new_group([i, i + 1], backend=backend) for i in range(0, world - 1, 2)]
    # where their number is odd, the last rank computes alone
    pair = pairs[rank // 2] if rank < 2 * len(pairs) else None
    few = torch.ones(FEW_BYTES // 4, device=device)
    large = torch.ones(sizes.message // 4, device=device)
    # about as much as there is between two collectives of tensor parallelism
    between = one_layer(h, max(8, s // 4), device)

    def wait(group):
        between()
        if group:
            dist.all_reduce(few, group=group)

    works = [
        between,
        lambda: wait(pair),
        lambda: wait(everybody),
        lambda: dist.all_reduce(large, group=everybody),
    ]
    alone, with_two, with_all, message = seconds_of(works, sizes, device)
    return times._replace(
        wait_of_two=with_two - alone, wait_of_all=with_all - alone, message=message
    )


# --- from times to a machine ----------------------------------------------------------------------


def machine_of(times: Times, ranks: int, processors: int, memory: float, sizes: Sizes) -> Machine:
    """processors: that the ranks share, 0 where each has a GPU. memory: bytes for each rank."""
    machine = Machine(NAME, 1.0, memory, 1.0, 1.0, 1.0, ranks, MEASURED, processors)
    share = machine.processors_of(ranks) if processors else 1.0
    # noise must not make what is left negative
    per_member = (times.wait_of_two / 2 + times.wait_of_all / ranks) / 2
    # an all-reduce takes two passes, and each waits
    wait = max(0.0, per_member if processors else times.wait_of_all) / 2
    copying = max(times.message / 4, times.message - 2 * wait * (ranks if processors else 1))
    # two numbers are read, one is written
    bandwidth = 12 * sizes.added / times.add / share
    # one rank alone has no link
    link = 2 * (ranks - 1) / ranks * sizes.message / copying if ranks > 1 else bandwidth
    machine = dataclasses.replace(
        machine,
        memory_bandwidth=bandwidth,
        node_bandwidth=link,
        network_bandwidth=link,
        constants=dataclasses.replace(MEASURED, wait=wait),
        # threads do not divide it
        overhead=times.tiny_layer * min(1, share) if processors else 0.0,
    )
    # at 1 FLOP/s, the layer's arithmetic takes as many seconds as it has FLOPs
    flops, elementwise = layer_of(machine, sizes)
    rest = elementwise / share + (times.tiny_layer if processors else 0.0)
    matmul = max(times.layer / 4, times.layer - rest)
    return dataclasses.replace(machine, peak=flops / matmul / share)


def layer_of(machine: Machine, sizes: Sizes) -> tuple[float, float]:
    """(seconds of matrix multiplications, of element-wise operations) in forward and backward of
    the layer that is timed, on one processor."""
    model = model_of(sizes.hidden, sizes.sequence)
    software = dataclasses.replace(software_of(machine), fuses_accumulation=True)
    rank = planner.Rank(machine, software, model, Layout())
    forward, backward, _ = planner.layer(rank)
    return forward.matmul + backward.matmul, forward.elementwise + backward.elementwise


def measure(ranks: int, sizes: Sizes | None = None) -> Machine:
    """This machine, as `ranks` ranks find it: GPUs where there are enough, else CPU ranks."""
    if torch.cuda.device_count() >= ranks:
        sizes = sizes or LARGE
        times = rank_processes.run(on_rank, ranks, ranks, "cuda", sizes)[0]
        memory = torch.cuda.get_device_properties(0).total_memory
        return machine_of(times, ranks, 0, memory, sizes)
    sizes = sizes or Sizes()
    processors = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
    threads = max(1, processors // ranks)
    times = rank_processes.run(on_rank, ranks, ranks, "cpu", sizes, threads=threads)[0]
    return machine_of(times, ranks, processors, memory, sizes)


# --- the command ----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str):
        terminal.refuse(f"planner.py: {message}; --help lists the flags")


@contextlib.contextmanager
def interruptible():
    """Signals that end a process raise KeyboardInterrupt in here, so that what was started is ended
    and its files are removed. Only the first does: the end is not interrupted."""
    owner = os.getpid()

    def interrupt(number, frame):
        if os.getpid() != owner:
            # a rank that was forked from this process
            os._exit(130)
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)
        raise KeyboardInterrupt

    # nohup ignores SIGHUP, and so it stays
    heard = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def measure_once(ranks: int) -> Machine:
    """`measure` in a command, which has computed nothing yet."""
    if not torch.cuda.is_available():
        # no server of ranks that would still import torch when the command has ended
        rank_processes.fork_this_process()
    return measure(ranks)


def check_out(path: str) -> None:
    """Refuse a file that cannot be written, before the time is spent."""
    folder = Path(path).parent
    reason = ""
    if not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif Path(path).is_dir():
        reason = "it is a folder"
    elif not os.access(path if Path(path).exists() else folder, os.W_OK):
        reason = "permission denied"
    if reason:
        terminal.refuse(f"planner.py: --out {path}: cannot be written ({reason})")


def describe(machine: Machine) -> list[str]:
    """A line for each constant."""
    whose = "a processor" if machine.processors else "a GPU"
    lines = [
        f"matmul       {machine.peak / 1e9:>10,.1f} GFLOP/s of {whose}",
        f"memory       {machine.memory_bandwidth / 1e9:>10,.1f} GB/s of {whose}",
        f"link         {machine.node_bandwidth / 1e9:>10,.3f} GB/s of a rank in a collective",
        f"wait         {machine.constants.wait * 1e6:>10,.0f} µs of each pass of a collective",
    ]
    if machine.processors:
        lines[-1] += ", for each member"
        lines.append(f"overhead     {machine.overhead * 1e6:>10,.0f} µs of a layer, both ways")
        lines.append(f"processors   {machine.processors:>10} shared by all ranks")
    return lines


def save(machine: Machine, path: str) -> None:
    """Raises OSError."""
    Path(path).write_text(json.dumps(dataclasses.asdict(machine), indent=1) + "\n")


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = Parser(prog="planner.py measure", description="Measure the constants of this machine.")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"ranks (default: {RANKS})")
    parser.add_argument("--out", default="machine.json", help="file (default: machine.json)")
    args = parser.parse_args(argv)
    if not 1 <= args.ranks <= MOST_RANKS:
        bounds = f"must be from 1 to {MOST_RANKS}; 4 would fit"
        terminal.refuse(f"planner.py: --ranks {args.ranks}: {bounds}")
    check_out(args.out)
    start = time.perf_counter()
    with interruptible():
        machine = measure_once(args.ranks)
    try:
        save(machine, args.out)
    except OSError as e:
        terminal.refuse(f"planner.py: --out {args.out}: cannot be written ({e.strerror})")
    seconds = time.perf_counter() - start
    print(f"{NAME}, as {args.ranks} ranks find it ({seconds:.0f} s):")
    print("\n".join(describe(machine)))
    print(f"written to {args.out}, for --machine {args.out} and train.py --plan {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
