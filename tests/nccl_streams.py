"""Streams of a GPU, on CPUs: each runs its operations in the order in which the host posts them.

A GPU has few hardware queues. Streams beyond that number share them, and an operation that cannot
start holds up what was posted behind it in its queue, of whatever stream. nccl_rules.py posts the
operations of each communicator here. `MACHINE.queues` is the number of queues.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class RuleError(RuntimeError):
    """A rule of NCCL is broken. The message names the communicator, the operation and the rule."""


class Operation:
    """What a host has posted. `run` is called by the thread of its stream."""

    def __init__(self, what: str, run: Callable, ahead: "Operation | None"):
        self.what = what
        self.run = run
        # the one before it in its hardware queue
        self.ahead = ahead
        self.started = threading.Event()
        self.ended = threading.Event()
        self.error: Exception | None = None


class Machine:
    """What the communicators of one process share: the hardware queues of its GPU."""

    def __init__(self):
        # CUDA_DEVICE_MAX_CONNECTIONS of a GPU
        self.queues = 8
        # the compute stream is the first
        self.streams = 1
        # seconds, of the default group: torch gives others half an hour
        self.timeout: float | None = None
        # hardware queue -> the operation that was posted last
        self.latest: dict[int, Operation] = {}
        # what nobody has waited for yet
        self.open: set[Operation] = set()

    def queue_of_next_stream(self) -> int:
        self.streams += 1
        return (self.streams - 1) % self.queues


MACHINE = Machine()


class Stream:
    """Runs its operations in order, in a thread of its own."""

    def __init__(self, name: str, timeout: float):
        self.name = name
        self.timeout = timeout
        self.queue = MACHINE.queue_of_next_stream()
        self.posted: SimpleQueue = SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while (operation := self.posted.get()) is not None:
            try:
                if operation.ahead and not operation.ahead.started.wait(self.timeout):
                    raise RuleError(
                        f"{operation.what} cannot start: {operation.ahead.what}, which is before it"
                        " in a hardware queue, waits"
                    )
                operation.started.set()
                operation.run()
            except RuleError as e:
                operation.error = e
            except Exception as e:
                operation.error = RuleError(f"{operation.what} does not end: {e}")
            # neither those before it nor its tensors stay in memory
            operation.ahead = operation.run = None
            operation.started.set()
            operation.ended.set()

    def post(self, what: str, run: Callable) -> Operation:
        what = f"{what} of {self.name}"
        operation = Operation(what, run, MACHINE.latest.get(self.queue))
        MACHINE.latest[self.queue] = operation
        MACHINE.open.add(operation)
        self.posted.put(operation)
        # compute is in queue 0, so it is held up by what cannot start there
        if self.queue == 0 and not operation.started.wait(self.timeout):
            raise RuleError(f"{what} holds up the computation: they share a hardware queue")
        return operation
