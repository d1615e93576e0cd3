"""Two computations that take turns: one computes while the other's message travels.

    F, micro-batch 5    attention  all-to-all ..........  experts    all-to-all ........
    B, micro-batch 2               experts' gradients  all-to-all ..  attention's gradient

Each has a thread, and only one of the two runs at a time. Who starts a message gives the turn to
the other one, and waits for the message when the turn comes back. So the order of all operations
follows from the code, not from the clock: every rank starts its messages in one order, as NCCL
requires. On a GPU both threads enqueue on one stream, in this order.

Sources: DeepSeek-V3's report (arXiv 2412.19437), section 3.2.1; Megatron-LM calls it
overlap-moe-expert-parallel-comm.

Not covered: kernels of both that share a GPU's multiprocessors at the same time.
"""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist


class Turns:
    """Gives the turn to and fro between two functions, in `together`."""

    def __init__(self):
        # How many of the two have not returned, and which of them has the turn.
        self.running, self.now = 0, 0
        self.may_go: list[threading.Semaphore] = []
        self.errors: list[BaseException] = []

    def together(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both functions in turns. Raises what one of them raises: the other ends at its next
        message, because its peers will not send the one that comes then."""
        self.running, self.now, self.errors = 2, 0, []
        self.may_go = [threading.Semaphore(0), threading.Semaphore(0)]
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def run_second():
            self.may_go[1].acquire()
            # A new thread begins on the first GPU and its default stream.
            with torch.cuda.stream(stream):
                self.run(second)

        thread = threading.Thread(target=run_second)
        thread.start()
        self.run(first)
        thread.join()
        if self.errors:
            raise self.errors[0]

    def run(self, function: Callable[[], None]) -> None:
        try:
            if not self.errors:
                function()
        except BaseException as e:
            self.errors.append(e)
        self.running -= 1
        self.pass_on()

    def wait(self, work: dist.Work) -> None:
        """Wait for a message that has started. Before that the other function has its turn.

        On a GPU autograd calls this in a thread of its own, so `now` says whose turn it is."""
        if self.running == 2:
            me = self.now
            self.pass_on()
            self.may_go[me].acquire()
            if self.errors:
                raise RuntimeError("the other computation of this pair has failed")
        work.wait()

    def pass_on(self) -> None:
        self.now = 1 - self.now
        self.may_go[self.now].release()
