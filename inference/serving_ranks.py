"""What the ranks of an engine tell each other: the driver's steps, activations, what was drawn.

Rank 0 is the driver: it alone knows the requests. The other ranks hold a part of the model and of
the cache, and wait for steps.

    driver -> tensor-parallel ranks of the first stage       step          broadcast
    stage  -> the same rank of the next stage                step, activations
    last stage -> driver                                     what was drawn

A step travels with its activations. With p stages, a stage may be up to p - 1 steps behind the
driver.

    torchrun --nproc-per-node 4 -m inference.serve --tp 2 --pp 2 --checkpoint runs/chat

A rank that dies leaves the others in a collective, or idle before one. The kernel tells each
process when another one has ended (pidfd_open), so all end with one line and status 1.

Not covered: a rank that hangs, or whose machine is gone, is waited for; objects are pickled, tens
of microseconds a step, and production systems write them into shared memory.
"""

import os
import pickle
import select
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from base import terminal
from base.groups import Groups
from pipeline_parallel import Channels
from run.world import World

# bytes of the first message of an object, which begins with its length: most fit
FIRST = 4096
LENGTH = 8


class Link:
    """This rank's place among the others. Without groups, it is alone."""

    def __init__(self, groups: Groups, device: torch.device):
        self.tp = groups.tp
        self.channels = Channels(groups.pp, groups.nccl) if groups.pp else None
        self.stages = groups.pp.size() if groups.pp else 1
        self.stage = groups.pp.rank() if groups.pp else 0
        self.is_last = self.stage == self.stages - 1
        tp_rank = groups.tp.rank() if groups.tp else 0
        self.is_driver = self.stage == 0 and tp_rank == 0
        # who tells the driver what was drawn
        self.answers = self.is_last and tp_rank == 0 and self.stages > 1
        self.device = device
        # messages that must live until they have arrived, the oldest first
        self.sending: deque[tuple[dist.Work, Tensor]] = deque()

    def share_step(self, step=None):
        """The driver's step, on all ranks of the first stage; on other stages, that of the stage
        before. None: there are no more."""
        if self.stage > 0:
            return self.receive_object()
        if self.tp is None:
            return step
        source = dist.get_process_group_ranks(self.tp)[0]
        broadcast = partial(dist.broadcast, src=source, group=self.tp)
        if not self.is_driver:
            return unpacked(broadcast, self.device)
        for message in packed(step, self.device):
            broadcast(message)
        return step

    # --- to the next stage; from the last one to the first ---

    def send(self, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        work = self.channels.send(tensor, (self.stage + 1) % self.stages, "F", 0)
        self.sending.append((work, tensor))
        # three messages at most belong to a step, and what it gave has come back by then
        while len(self.sending) > 3 * (self.stages + 1):
            self.sending.popleft()[0].wait()

    def receive(self, tensor: Tensor) -> None:
        self.channels.receive(tensor, (self.stage - 1) % self.stages, "F", 0).wait()

    def send_object(self, value) -> None:
        for message in packed(value, self.device):
            self.send(message)

    def receive_object(self):
        return unpacked(self.receive, self.device)

    def close(self) -> None:
        while self.sending:
            self.sending.popleft()[0].wait()
        self.tp = self.channels = None


def packed(value, device: torch.device) -> list[Tensor]:
    """An object as one or two messages of bytes: FIRST of them, and the rest."""
    content = pickle.dumps(value)
    content = len(content).to_bytes(LENGTH, "little") + content
    message = torch.frombuffer(bytearray(content.ljust(FIRST, b"\0")), dtype=torch.uint8)
    first, rest = message.to(device).split([FIRST, len(message) - FIRST])
    return [first, rest] if len(rest) else [first]


def unpacked(receive: Callable[[Tensor], object], device: torch.device):
    """The object. receive(tensor): the next message."""
    message = torch.empty(FIRST, dtype=torch.uint8, device=device)
    receive(message)
    length = int.from_bytes(bytes(message[:LENGTH].tolist()), "little")
    if LENGTH + length > FIRST:
        rest = message.new_empty(LENGTH + length - FIRST)
        receive(rest)
        message = torch.cat((message, rest))
    # from a rank of this engine
    return pickle.loads(message[LENGTH:].cpu().numpy().tobytes())


# --- a rank that dies -----------------------------------------------------------------------------


class Processes:
    """The processes of the other ranks on this machine."""

    def __init__(self, world: World):
        """A collective."""
        self.rank = world.rank
        # rank -> a file that can be read once its process has ended; and one for all of them
        self.files: dict[int, int] = {}
        self.ended = select.epoll()
        host = socket.gethostname()
        for rank, (at, pid) in enumerate(world.gather((host, os.getpid()))):
            if at == host and rank != world.rank:
                self.files[rank] = os.pidfd_open(pid)
                self.ended.register(self.files[rank], select.EPOLLIN)

    def fail(self, error: Exception | None = None) -> None:
        """End all ranks, with one line and status 1. error: what this rank met, perhaps because
        another one dies: a second shows it."""
        ended = dict(self.ended.poll(1))
        dead = [rank for rank, file in self.files.items() if file in ended]
        others = self.files.keys() - {*dead}
        if dead:
            error = f"rank {', '.join(map(str, dead))} has died, and the server ends with it"
        elif not isinstance(error, FloatingPointError):
            traceback.print_exception(error)
        if dead and self.rank > min(others, default=self.rank):
            # that one says so, and ends this process
            time.sleep(10)
            os._exit(1)
        terminal.say(terminal.one_line(f"serve.py: {error}"), error=True)
        for rank in others:
            signal.pidfd_send_signal(self.files[rank], signal.SIGKILL)
        os._exit(1)
