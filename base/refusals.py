"""A rank that is refused alone: all ranks end with one line, which names it.

A file that only one machine has is missing on the others. The rank that misses it ends, and the
others would wait for it in a collective. So it writes its message into the store that the ranks
share, and on every other rank a thread reads it there.

    generate.py: rank 1: --checkpoint runs/chat: no such folder

Usually all ranks read the same files, and are refused for the same reason. Rank 0 then says the
line, without the number of a rank.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from base import terminal

# Seconds that a refused rank waits for the others.
PATIENCE = 10
# Seconds in which ranks that read the same files find the same fault.
TOGETHER = 2
# Seconds that rank 0 stays alive: its process may hold the store that the others still read.
LAST_WORD = 0.3


class Refusals:
    """What the ranks tell each other about refusals, through their common store."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        """store: a connection that nothing else uses."""
        self.store = store
        self.rank = rank
        self.size = size
        self.stopped = threading.Event()
        # the watching thread and the main thread may find a refusal together
        self.ending = threading.Lock()

    def first(self) -> str | None:
        """The message of the rank that was refused first, with its number. None: there is none, or
        the store is gone."""
        with contextlib.suppress(dist.DistError):
            if self.store.check(["first"]):
                return self.store.get("first").decode()
        return None

    def watch(self) -> None:
        """From now on a refusal of another rank ends this process with status 2."""
        threading.Thread(target=self.wait_for_one, daemon=True).start()

    def wait_for_one(self) -> None:
        while not self.stopped.wait(1):
            message = self.first()
            # this rank may be about to find the same fault
            if message and not self.stopped.wait(TOGETHER):
                self.end(message)

    def end(self, message: str) -> None:
        """End this process, because another rank was refused. Rank 0 says the message."""
        text = f"{Path(sys.argv[0]).name}: {message}"
        with self.ending, contextlib.suppress(dist.DistError):
            terminal.tell_launcher(text)
            if self.rank == 0:
                terminal.say(text, error=True)
                self.store.set("said", "")
                time.sleep(LAST_WORD)
            else:
                # torchrun kills all ranks when the first one ends: the line comes before
                self.comes(lambda: self.store.check(["said"]), PATIENCE)
        os._exit(2)

    def share(self, message: str, say: Callable[[str], None]) -> None:
        """Tell the other ranks why this one is refused. say(message) is called on one rank, or on
        each that finds the store gone."""
        self.stopped.set()
        own = f"rank {self.rank}: {message}"
        try:
            self.store.compare_set("first", "", own)
            self.store.add("refused", 1)
            if self.rank:
                if not self.comes(lambda: self.store.check(["said"]), PATIENCE):
                    say(own)
                return
            everywhere = self.comes(lambda: self.store.add("refused", 0) == self.size, TOGETHER)
            say(message if everywhere else own)
            self.store.set("said", "")
            # the others look every second
            time.sleep(LAST_WORD if everywhere else 2 + TOGETHER)
        except dist.DistError:
            # the store is gone with the rank that held it
            say(own)

    def comes(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition is true within so many seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
