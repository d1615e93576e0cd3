"""Jobs spread over the processes of one rank, with a progress line."""

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from base import terminal


def run_jobs(work: Callable[..., int], jobs: list[tuple], workers: int, show: bool) -> None:
    """Call `work(*job)` for each job in up to `workers` processes.

    work: a function of a module, which returns the bytes of text that it has tokenized. show:
    whether to print the progress.
    """
    with contextlib.closing(Progress(len(jobs), show)) as progress:
        for size in results(work, jobs, workers):
            progress.add(size)


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


class Progress:
    """One line on standard error that is written again after each job."""

    def __init__(self, total: int, show: bool):
        """total: number of jobs."""
        self.total = total
        self.done = 0
        self.bytes = 0
        self.start = time.time()
        self.show = show and total > 0

    def add(self, size: int) -> None:
        """A job over `size` bytes is done."""
        self.done += 1
        self.bytes += size
        if self.show:
            rate = self.bytes / 2**20 / max(time.time() - self.start, 1e-9)
            message = f"\rdata: tokenized {self.done}/{self.total} parts, {rate:.1f} MiB/s"
            terminal.say(message, error=True, end="")

    def close(self) -> None:
        """End the line."""
        if self.show and self.done:
            terminal.say(error=True)
