"""A rank that hangs is named, with its step, and the run ends instead of waiting for ever.

One rank that stops (a GPU that fell off the bus, a file server that does not answer, a deadlock) leaves all the others in a collective that never
ends. Each rank has a thread that watches its main thread's heartbeat, one a step. Where it stops for `seconds`, the rank writes into the
store that the ranks met at which step it is in, and which line; the first of those that can still write reads what all have written, and
says so. Then every rank ends, and the launcher may start them again.

    rank 0: step 7, waiting for all ranks in torch/distributed/distributed_c10d.py:3210 all_gather
    rank 1: does not answer; last heard of in step 7

A rank that is stopped does not answer; one that runs in circles shows where.
"""
import os
import sys
import threading
import time

import torch.distributed as dist


class Watchdog:
    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float, end=os._exit):
        """store: of all ranks. end(1) is called where the heartbeat has stopped: nothing else can be relied on then."""
        self.store, self.rank, self.size, self.seconds, self.end = dist.PrefixStore("watchdog", store), rank, size, seconds, end
        self.watched, self.stopped = threading.get_ident(), threading.Event()
        self.beat("the start")
        threading.Thread(target=self.watch, daemon=True).start()

    def beat(self, where: str) -> None:
        """Progress, in words: "step 7". From the thread that made this."""
        self.where, self.last = where, time.monotonic()
        self.store.set(f"beat {self.rank}", where)

    def stop(self) -> None:
        self.stopped.set()

    def watch(self) -> None:
        while not self.stopped.wait(min(1, self.seconds / 10)):
            if time.monotonic() - self.last > self.seconds:
                self.store.set(f"waits {self.rank}", f"{self.where}, in {self.line()}")
                time.sleep(min(10, self.seconds))                        # the others' time is up a little earlier or later
                if not self.stopped.is_set():
                    self.report()
                    self.end(1)

    def line(self) -> str:
        """Where the watched thread is."""
        frame = sys._current_frames()[self.watched]
        while frame.f_back and "torch/utils" in frame.f_code.co_filename:
            frame = frame.f_back
        return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"

    def report(self) -> None:
        """From the first rank that can."""
        waits = [self.store.check([f"waits {rank}"]) for rank in range(self.size)]
        if waits.index(True) == self.rank:
            print(f"train.py: no progress for {self.seconds:.0f} s:", file=sys.stderr)
            for rank, can_speak in enumerate(waits):
                text = self.store.get(f"waits {rank}").decode() if can_speak else f"does not answer; last heard of in {self.store.get(f'beat {rank}').decode()}"
                print(f"train.py: rank {rank}: {text}", file=sys.stderr, flush=True)
