"""Runs a function on N gloo ranks of this machine: for tests, lessons and comparisons.

    results = ranks.run(function, 4, *args)

calls `function(rank, *args)` on each of 4 ranks and returns a list of what they returned.

Each rank is a process, forked from a server that has imported torch but has computed nothing. So a
launch takes tenths of a second, where fresh interpreters take seconds. (Forking this process would
hang, for OpenMP's threads do not survive a fork. A lesson has none, and `fork_this_process`.) Ranks
meet through a file, so no port can clash, and each computes with one thread.

When a rank fails, the others are stopped and its traceback is raised here. When a rank is missing
or hangs, the process group's timeout turns that into a failure.

`Collectives` (planning/counters.py) counts the collectives of a process.
"""

import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from unittest import mock

import torch
import torch.distributed as dist

from base import terminal
from planning.counters import Collectives

__all__ = ["Collectives", "fork_this_process", "preload", "run"]

_context = multiprocessing.get_context("forkserver")
_has_server = False
# Every rank would import these after the fork.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
]
_context.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Have ranks find these modules imported. Before the first `run`. None of them may initialise
    CUDA while it is imported: what is forked afterwards could not use it."""
    global _has_server
    _has_server = True
    _context.set_forkserver_preload([*PRELOADED, *modules])


def fork_this_process() -> None:
    """Fork ranks from this process from now on, unless `preload` has said what a server imports.
    It saves the server's import of torch. Only where this process has computed with one thread."""
    global _context
    if not _has_server:
        _context = multiprocessing.get_context("fork")


def start_server() -> None:
    """Start the server that forks ranks, if there is none. Ctrl-C is for this process, which ends
    what it has started: the server would print a traceback while it imports torch."""
    if _context.get_start_method() != "forkserver":
        return
    # The server of Python 3.11 skips in silence what is not on its own path.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def run(
    function,
    world: int,
    *args,
    threads: int = 1,
    timeout: float = 60,
    limit: float = 600,
    backend: str = "gloo",
) -> list:
    """Call `function(rank, *args)` on `world` ranks with a default group, and return their results
    in the order of ranks. The function and its arguments must be picklable: a function stands at
    the top of a module. threads: of each rank; timeout: seconds that a collective may wait; limit:
    seconds that the whole may take; backend: gloo, that of nccl_rules.py, or nccl: rank r has GPU
    r of this machine.

    Raises RuntimeError with the first failing rank's traceback, or with the numbers of the ranks
    that died or did not finish."""
    processes = []
    pipes = []
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        try:
            start_server()
            for rank in range(world):
                pipe, rank_end = _context.Pipe()
                process = _context.Process(
                    target=_main,
                    args=(rank, world, store, threads, timeout, backend, function, args, rank_end),
                    daemon=True,
                )
                process.start()
                rank_end.close()
                processes.append(process)
                pipes.append(pipe)
            results = _collect(processes, pipes, limit)
            _dismiss(processes, pipes, timeout)
        except KeyboardInterrupt:
            # The server may be about to fork another rank.
            terminal.kill_descendants()
            raise
        finally:
            for process in processes:
                process.kill()
                process.join()
    return results


def _main(rank, world, store: str, threads, timeout: float, backend: str, function, args, pipe):
    """What the process of one rank does. It sends (finished, result or traceback), and leaves when
    it is told to."""
    # What was imported before the fork stays: a collection need not look at it.
    gc.freeze()
    torch.set_num_threads(threads)
    try:
        device = None
        if backend == "nccl-rules":
            importlib.import_module("nccl_rules")
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=world,
            store=dist.FileStore(store, world),
            timeout=timedelta(seconds=timeout),
            device_id=device,
        )
        outcome = True, function(rank, *args)
    except BaseException:
        outcome = False, traceback.format_exc()
    # Plain pickle sends tensors by value, without shared memory.
    pipe.send_bytes(pickle.dumps(outcome))
    # Ranks leave together, so that no peer sees a closed socket.
    pipe.recv_bytes()
    # Whatever holds a process group goes before the group.
    function = args = outcome = None
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _collect(processes: list, pipes: list, limit: float) -> list:
    """The results, in the order of ranks. Raises RuntimeError as `run` does."""
    deadline = time.monotonic() + limit
    results = {}
    while len(results) < len(processes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        seconds_left = max(0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(waiting, seconds_left)
        if not ready:
            raise RuntimeError(f"ranks {list(waiting.values())} did not finish in {limit:.0f} s")
        for pipe in ready:
            rank = waiting[pipe]
            results[rank] = _receive(rank, pipe, processes)
    return [results[rank] for rank in range(len(processes))]


def _receive(rank: int, pipe, processes: list):
    """The result that a rank sent."""
    try:
        finished, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        raise _death(rank, processes) from None
    if finished:
        return value
    # A peer that died a moment ago may be the cause; then this rank only lost its connection to it.
    peers = {process.sentinel: r for r, process in enumerate(processes) if r != rank}
    dead = multiprocessing.connection.wait(peers, timeout=1)
    if dead:
        raise _death(peers[dead[0]], processes)
    raise RuntimeError(f"rank {rank} of {len(processes)} failed:\n{value}")


def _death(rank: int, processes: list) -> RuntimeError:
    processes[rank].join()
    exit_code = processes[rank].exitcode
    return RuntimeError(f"rank {rank} of {len(processes)} died with exit code {exit_code}")


def _dismiss(processes: list, pipes: list, timeout: float) -> None:
    """Let the ranks leave. Raises RuntimeError for one that does not, or leaves with an error."""
    for pipe in pipes:
        pipe.send_bytes(b"leave")
    for rank, process in enumerate(processes):
        process.join(timeout)
        if process.exitcode != 0:
            raise RuntimeError(
                f"rank {rank} of {len(processes)} left with exit code {process.exitcode}"
            )
