"""A rank that hangs is named, with its step, and the run ends instead of waiting for ever.

One rank that stops (a GPU that fell off the bus, a file server that does not answer, a deadlock)
leaves all the others in a collective that never ends. Each rank has a thread that watches its main
thread's heartbeat: one at each step, evaluation and save. Where it stops for `seconds`, the rank
writes its position into the store through which the ranks met; the first of those that can still
write reads what all have written, and says so. Then every rank ends, and the launcher may start
them again.

    rank 0: step 7, in repository/fsdp.py:186 finish_reductions
    rank 1: does not answer; last heard of in step 7

A rank that is stopped (SIGSTOP), or whose machine is gone, does not answer; one that runs in
circles shows where. On a GPU the line is where the host waits for the device, often a little after
the collective that does not end."""

import os
import sys
import threading
import time

import torch.distributed as dist


class Watchdog:
    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float, end=os._exit):
        """store: a connection to the ranks' common store that only this watchdog uses. end(1) is
        called where the heartbeat has stopped: nothing else can be relied on then."""
        self.store = store
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.end = end
        # last: when the heart beat; None while nobody has to hear it
        self.watched = threading.get_ident()
        self.last = None
        self.gone = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def beat(self, where: str) -> None:
        """Progress, in words: "step 7". From the thread that made this."""
        self.where = where
        self.last = time.monotonic()
        self.store.set(f"beat {self.rank}", where)

    def pause(self) -> None:
        """What comes now may take long: until the next beat nobody watches."""
        self.last = None

    def stop(self) -> None:
        self.gone.set()

    def watch(self) -> None:
        while not self.gone.wait(min(1, self.seconds / 10)):
            last = self.last
            if last is not None and time.monotonic() - last > self.seconds:
                # In a thread of its own: the store may be on a machine that is gone, or in a
                # process that is
                # stopped, and then each word to it waits for ever.
                speaker = threading.Thread(target=self.speak, args=(last,), daemon=True)
                speaker.start()
                # `speak` waits once for the others; as long again for the store.
                speaker.join(2 * min(10, self.seconds))
                if speaker.is_alive():
                    self.say_alone("the store does not answer")
                if self.last == last and not self.gone.is_set():
                    self.end(1)

    def speak(self, last: float) -> None:
        """Tell the others where this rank is; if it does not go on meanwhile, report. last: its
        last heartbeat."""
        try:
            self.store.set(f"waits {self.rank}", f"{self.where}, in {self.line()}")
            # the others' time is up a little earlier or later
            self.gone.wait(min(10, self.seconds))
            # it was slow, and goes on
            if self.last != last:
                self.store.delete_key(f"waits {self.rank}")
            else:
                self.report()
        # the rank that holds the store may be gone
        except Exception as e:
            self.say_alone(e)

    def say_alone(self, why) -> None:
        print(
            f"train.py: rank {self.rank}: no progress for {self.seconds:.0f} s in {self.where}, and"
            f" no word of the others ({why})",
            file=sys.stderr,
            flush=True,
        )

    def line(self) -> str:
        """Where the watched thread is: the innermost line outside of torch."""
        frame = sys._current_frames()[self.watched]
        while frame.f_back and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        return (
            f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
            f" {frame.f_code.co_name}"
        )

    def report(self) -> None:
        """From the first rank that can."""
        waits = [self.store.check([f"waits {rank}"]) for rank in range(self.size)]
        if waits.index(True) == self.rank:
            print(f"train.py: no progress for {self.seconds:.0f} s:", file=sys.stderr)
            for rank, can_speak in enumerate(waits):
                heard = (
                    self.store.get(f"beat {rank}").decode()
                    if self.store.check([f"beat {rank}"])
                    else "the start"
                )
                text = (
                    self.store.get(f"waits {rank}").decode()
                    if can_speak
                    else f"does not answer; last heard of in {heard}"
                )
                print(f"train.py: rank {rank}: {text}", file=sys.stderr, flush=True)
