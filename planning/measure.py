"""This machine's processors as a machine of planner.py: a file that `plan` and `try` take.

    python planner.py measure --ranks 2 > machine.json
    python planner.py try 5 --ranks 2 --hidden-size 256

All ranks measure at the same time, one thread each, as they train: they share memory and
processors. In float32:

    peak               FLOP/s of a product of matrices
    memory_bandwidth   bytes/s that an element-wise operation reads and writes
    wait               seconds of a pass of gloo's all-reduce of one number (an all-reduce is two)
    node_bandwidth     bytes/s of a rank in an all-reduce, without the waits

These are measured, so each share of them is 1. `hidden` is 1: a message is sent by the processor
that would compute beside it.

Not covered: caches, and how long an operation takes to start; both matter in small models.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from planning import commands
from planning.inputs import Constants, Machine

# [tokens, h] x [h, 4 h]; elements of what is added and of what is reduced: 4 MiB.
TOKENS, HIDDEN, ELEMENTS = 1024, 512, 2**20
TIMES = 10


def least_seconds(operation: Callable[[], object], group: dist.ProcessGroup | None) -> float:
    """The least of TIMES, each begun by all ranks together: others may use this machine too."""
    found = []
    for _ in range(TIMES):
        if group:
            dist.barrier(group)
        begin = time.perf_counter()
        operation()
        found.append(time.perf_counter() - begin)
    return min(found)


def measure(group: dist.ProcessGroup | None) -> Machine:
    """The machine on which the ranks of this group run, None for a single one; called on each."""
    ranks = group.size() if group else 1
    x, matrix = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, 4 * HIDDEN)
    numbers, one = torch.randn(ELEMENTS), torch.zeros(1)
    product = least_seconds(lambda: x @ matrix, group)
    added = least_seconds(lambda: numbers + 1, group)
    wait, link = 0.0, 1e12
    if group:
        least = least_seconds(lambda: dist.all_reduce(one, group=group), group)
        whole = least_seconds(lambda: dist.all_reduce(numbers, group=group), group)
        # Two passes, in each of which a rank sends (N - 1) / N of the bytes.
        wait = least / 2
        link = 2 * numbers.nbytes * (ranks - 1) / ranks / max(whole - least, 1e-9)
    return Machine(
        name=f"{ranks} ranks on CPUs",
        peak=2 * x.numel() * matrix.shape[1] / product,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks,
        memory_bandwidth=2 * numbers.nbytes / added,
        node_bandwidth=link,
        network_bandwidth=link,
        ranks_per_node=ranks,
        constants=Constants(matmul=1.0, memory=1.0, node=1.0, network=1.0, wait=wait, hidden=1.0),
    )


def torchrun(ranks: int) -> list[str]:
    """The words that start so many ranks on this machine."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*words, "--nproc-per-node", str(ranks)]


def measured(ranks: int) -> Machine:
    """Starts so many ranks, which measure."""
    words = [*torchrun(ranks), "-m", "planning.measure"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, env=environment, check=True)
    fields = json.loads(done.stdout)
    return Machine(**fields | {"constants": Constants(**fields["constants"])})


def main(argv: list[str]) -> None:
    parser = commands.Parser("measure", "Measure this machine's processors: a file for --machine.")
    parser.add_counts(("ranks", 2, "that run at the same time"))
    print(json.dumps(dataclasses.asdict(measured(parser.parse_args(argv).ranks)), indent=1))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = measure(dist.group.WORLD if dist.get_world_size() > 1 else None)
    if dist.get_rank() == 0:
        print(json.dumps(dataclasses.asdict(found)))
    dist.destroy_process_group()
