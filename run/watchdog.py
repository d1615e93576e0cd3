"""A rank that hangs is named with its step, and the run ends instead of waiting forever.

One rank that stops (a GPU that fell off the bus, a file server that does not answer, a deadlock)
leaves all others in a collective that never ends. So each rank has a watchdog: a thread that
watches the heartbeat of the main thread, one beat at each step, evaluation and save.

    1. After `seconds` without a beat, the rank writes where it is into the ranks' common store.
    2. It waits a moment for the others to do the same.
    3. The lowest rank that could write reports for all.
    4. Every rank ends with status 1 and kills silent ranks of its machine, for which the launcher
       would wait. The launcher may start all of them again.

    train.py: no progress for 600 s:
    train.py: rank 0: step 7, in repository/fsdp.py:186 finish_reductions
    train.py: rank 1: does not answer; last heard of in step 7

    python train.py --timeout 600        the flag that sets `seconds`

A rank that is stopped (SIGSTOP), or whose machine is gone, does not answer; a rank in an endless
loop shows where it is. On a GPU the line is where the host waits for the device, often a little
after the collective that does not end, and the device may be one step behind the host.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from base import terminal

# The longest wait, in seconds, for the other ranks' answers, or for the store's.
PATIENCE = 10


class Watchdog:
    """Watches the thread that makes it. The thread calls `beat` as it makes progress."""

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float, end=os._exit):
        """store: a connection to the common store that only this watchdog uses. end(1) is called
        when the heartbeat has stopped; the default skips clean-up, which may hang too."""
        self.store = store
        store.set(f"process {rank}", f"{socket.gethostname()} {os.getpid()}")
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.end = end
        self.patience = min(PATIENCE, seconds)
        self.watched_thread = threading.get_ident()
        # The time of the latest heartbeat. None: nobody watches.
        self.last = None
        self.stopped = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def beat(self, where: str) -> None:
        """Note progress. where: what begins now, for example "step 7"."""
        self.where = where
        self.last = time.monotonic()
        self.store.set(f"beat {self.rank}", where)

    def pause(self) -> None:
        """Stop watching until the next beat."""
        self.last = None

    def stop(self) -> None:
        self.stopped.set()

    # --- everything below runs in the watchdog's own threads

    def watch(self) -> None:
        while not self.stopped.wait(min(1, self.seconds / 10)):
            last = self.last
            if last is None or time.monotonic() - last <= self.seconds:
                continue
            # A call to a store that is gone or stopped never returns, so it has its own thread.
            reporter = threading.Thread(target=self.report_silence, args=(last,), daemon=True)
            reporter.start()
            # One wait for the other ranks, one for the store.
            reporter.join(2 * self.patience)
            if reporter.is_alive():
                self.report_alone("the store does not answer")
            if self.last == last and not self.stopped.is_set():
                self.end(1)

    def report_silence(self, last: float) -> None:
        """Write where this rank is; if there is still no heartbeat after `last`, report."""
        try:
            self.store.set(f"waits {self.rank}", f"{self.where}, in {self.line()}")
            # The deadline of the others is a little earlier or later.
            self.stopped.wait(self.patience)
            if self.last == last:
                self.report()
                self.kill_silent()
            else:
                # The main thread was slow, and goes on.
                self.store.delete_key(f"waits {self.rank}")
        except Exception as e:
            # The rank that holds the store may be gone.
            self.report_alone(e)

    def report(self) -> None:
        """Print where each rank is. The lowest rank that could write does it."""
        has_written = [self.store.check([f"waits {rank}"]) for rank in range(self.size)]
        if has_written.index(True) != self.rank:
            return
        self.say(f"no progress for {self.seconds:.0f} s:")
        for rank in range(self.size):
            message = "does not answer; not heard of since the start"
            if has_written[rank]:
                message = self.store.get(f"waits {rank}").decode()
            elif self.store.check([f"beat {rank}"]):
                where = self.store.get(f"beat {rank}").decode()
                message = f"does not answer; last heard of in {where}"
            self.say(f"rank {rank}: {message}")

    def kill_silent(self) -> None:
        """End the ranks of this machine that could not write: they may be stopped."""
        for rank in range(self.size):
            if not self.store.check([f"waits {rank}"]) and self.store.check([f"process {rank}"]):
                host, pid = self.store.get(f"process {rank}").decode().split()
                if host == socket.gethostname():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def report_alone(self, reason) -> None:
        said = f"no progress for {self.seconds:.0f} s in {self.where}, and no word of the others"
        self.say(f"rank {self.rank}: {said} ({reason})")

    def say(self, message: str) -> None:
        terminal.say(f"{Path(sys.argv[0]).name}: {message}", error=True)

    def line(self) -> str:
        """File, line and function of the watched thread's innermost frame outside torch."""
        frame = sys._current_frames()[self.watched_thread]
        while frame.f_back and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        file = "/".join(frame.f_code.co_filename.split("/")[-2:])
        return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
