"""Runs a function on N gloo ranks of this machine: for tests, lessons and comparisons.

    results = ranks.run(function, 4, *args)          # function(rank, *args) on each rank; a list of what they returned

Each rank is a process forked from a server that has torch imported already but has computed nothing
(forking a process in which OpenMP threads ran would hang), so a launch takes tenths of a second
instead of the seconds that fresh interpreters take. Ranks meet through a file, so no port can
clash, and each computes with one thread.

When a rank fails, the others are stopped and its traceback is raised here; when a rank is missing
or hangs, the process group's timeout turns that into a failure. `python -m lessons.ranks` times a launch.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.device_mesh"]
)


def _main(rank: int, world: int, store: str, threads: int, timeout: float, function, args, pipe):
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world,
            store=dist.FileStore(store, world),
            timeout=timedelta(seconds=timeout),
        )
        outcome = True, function(rank, *args)
    except BaseException:
        outcome = False, traceback.format_exc()
    # plain pickle: tensors by value, no shared memory
    pipe.send_bytes(pickle.dumps(outcome))
    # leave together, so that no peer sees a closed socket
    pipe.recv_bytes()
    function = args = outcome = None
    # whatever holds a process group goes before the group
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def run(
    function, world: int, *args, threads: int = 1, timeout: float = 60, limit: float = 600
) -> list:
    """Call `function(rank, *args)` on `world` ranks with a default gloo group. Both must be
    picklable: a function at the top of a module. timeout: seconds a collective may wait; limit:
    seconds the whole may take.

    Raises RuntimeError with the first failing rank's traceback, or naming the ranks that died or
    did not finish."""
    results = {}
    folder = tempfile.TemporaryDirectory()
    pipes = []
    processes = []
    try:
        for rank in range(world):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_main,
                args=(
                    rank,
                    world,
                    os.path.join(folder.name, "store"),
                    threads,
                    timeout,
                    function,
                    args,
                    there,
                ),
                daemon=True,
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        deadline = time.monotonic() + limit
        while len(results) < world:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(
                    f"ranks {[r for r in range(world) if r not in results]} did not finish in"
                    f" {limit:.0f} s"
                )
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    finished, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    processes[rank].join()
                    raise RuntimeError(
                        f"rank {rank} of {world} died with exit code {processes[rank].exitcode}"
                    ) from None
                if not finished:
                    # The cause may be a rank that died a moment ago: then this one only lost its
                    # peer.
                    alive = {p.sentinel: r for r, p in enumerate(processes) if r != rank}
                    for sentinel in multiprocessing.connection.wait(alive, timeout=1):
                        died = alive[sentinel]
                        processes[died].join()
                        raise RuntimeError(
                            f"rank {died} of {world} died with exit code {processes[died].exitcode}"
                        )
                    raise RuntimeError(f"rank {rank} of {world} failed:\n{value}")
                results[rank] = value
        for pipe in pipes:
            pipe.send_bytes(b"leave")
        for rank, process in enumerate(processes):
            process.join(timeout)
            if process.exitcode != 0:
                raise RuntimeError(f"rank {rank} of {world} left with exit code {process.exitcode}")
    finally:
        for process in processes:
            process.kill()
            process.join()
        folder.cleanup()
    return [results[rank] for rank in range(world)]


class Collectives(TorchDispatchMode):
    """While entered, notes every collective of this process: `calls` is a list of (name, bytes of
    the largest tensor in it)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            kinds = {
                "allreduce": "all-reduce",
                "allgather": "all-gather",
                "reduce_scatter": "reduce-scatter",
                "alltoall": "all-to-all",
            }
            name = str(function.overloadpacket).split(".")[-1]
            size = max(
                (x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)), default=0
            )
            self.calls.append(
                (next((kind for key, kind in kinds.items() if key in name), name), size)
            )
        return function(*args, **(kwargs or {}))


def _lesson(rank: int):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


def main():
    # starts the server
    run(_lesson, 1)
    for n in (2, 4, 8):
        start = time.perf_counter()
        total = run(_lesson, n)[0]
        print(
            f"{n} ranks: the sum of their numbers is {total:.0f}, {time.perf_counter() - start:.2f}"
            " s from launch to exit"
        )


if __name__ == "__main__":
    main()
