"""Jobs spread over the processes of one rank, with a progress line."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from base import terminal


def run_jobs(work: Callable[..., int], jobs: list[tuple], workers: int, show: bool) -> None:
    """Call `work(*job)` for each job in up to `workers` processes.

    work: a function of a module, which returns the bytes of text that it has tokenized. show:
    whether to print the progress, in one line that is written again after each job.
    """
    start = time.time()
    mebibytes = 0
    done = 0
    try:
        for size in results(work, jobs, workers):
            done += 1
            mebibytes += size / 2**20
            rate = mebibytes / max(time.time() - start, 1e-9)
            if show:
                message = f"\rdata: tokenized {done}/{len(jobs)} parts, {rate:.1f} MiB/s"
                terminal.say(message, error=True, end="")
    finally:
        if show and done:
            terminal.say(error=True)


def results(work, jobs: list[tuple], workers: int) -> Iterator[int]:
    """Yield what `work` returns for each job, in the order in which they end."""
    if len(jobs) < 2 or workers < 2:
        for job in jobs:
            yield work(*job)
        return
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches the workers too. With the default handler they end without a traceback each.
    default_handler = (signal.signal, (signal.SIGINT, signal.SIG_DFL))
    with ProcessPoolExecutor(min(workers, len(jobs)), context, *default_handler) as pool:
        for future in as_completed([pool.submit(work, *job) for job in jobs]):
            yield future.result()
