"""What the ranks of an engine tell each other: the driver's steps, activations, what was drawn.

Rank 0 is the driver: it alone knows the requests. The other ranks hold a part of the model and of
the cache, and wait for steps.

    driver -> tensor-parallel ranks of the first stage       step          broadcast
    stage  -> the same rank of the next stage                step, activations
    last stage -> driver                                     what was drawn

A step travels with its activations. With p stages, a stage may be up to p - 1 steps behind the
driver.

    torchrun --nproc-per-node 4 serve.py --tp 2 --pp 2 --checkpoint runs/chat

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

import torch
import torch.distributed as dist
from torch import Tensor

from base import terminal
from base.world import Groups, World
from pipeline_parallel import Channels

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
        if self.tp:
            return self.broadcast(step)
        return step

    def broadcast(self, step):
        source = dist.get_process_group_ranks(self.tp)[0]
        messages = [torch.empty(FIRST, dtype=torch.uint8, device=self.device)]
        if self.is_driver:
            messages = packed(step, self.device)
        dist.broadcast(messages[0], source, group=self.tp)
        if not self.is_driver and (rest := length_of_rest(messages[0])):
            messages.append(torch.empty(rest, dtype=torch.uint8, device=self.device))
        if len(messages) > 1:
            dist.broadcast(messages[1], source, group=self.tp)
        return step if self.is_driver else unpacked(messages)

    # --- to the next stage; from the last one to the first ---

    def send(self, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        work = self.channels.send(tensor, (self.stage + 1) % self.stages, "F", 0)
        self.sending.append((work, tensor))
        # three messages at most belong to a step, and what it gave has come back by then
        while len(self.sending) > 3 * (self.stages + 1):
            self.sending.popleft()[0].wait()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self.channels.receive(tensor, (self.stage - 1) % self.stages, "F", 0).wait()
        return tensor

    def send_object(self, value) -> None:
        for message in packed(value, self.device):
            self.send(message)

    def receive_object(self):
        messages = [self.receive((FIRST,), torch.uint8)]
        if rest := length_of_rest(messages[0]):
            messages.append(self.receive((rest,), torch.uint8))
        return unpacked(messages)

    def close(self) -> None:
        while self.sending:
            self.sending.popleft()[0].wait()
        self.tp = self.channels = None


def packed(value, device: torch.device) -> list[Tensor]:
    """An object as one or two messages of bytes: FIRST of them, and the rest."""
    content = pickle.dumps(value)
    content = len(content).to_bytes(LENGTH, "little") + content
    message = torch.frombuffer(bytearray(content.ljust(FIRST, b"\0")), dtype=torch.uint8)
    messages = message.to(device).split([FIRST, len(message) - FIRST])
    return [m for m in messages if len(m)]


def length_of_rest(first: Tensor) -> int:
    """How many bytes follow the first message."""
    length = int.from_bytes(bytes(first[:LENGTH].tolist()), "little")
    return max(0, LENGTH + length - FIRST)


def unpacked(messages: list[Tensor]):
    content = torch.cat(messages).cpu().numpy().tobytes()
    length = int.from_bytes(content[:LENGTH], "little")
    # from a rank of this engine
    return pickle.loads(content[LENGTH : LENGTH + length])


# --- a rank that dies -----------------------------------------------------------------------------


class Processes:
    """The processes of the other ranks on this machine."""

    def __init__(self, world: World):
        """A collective."""
        self.rank = world.rank
        host = socket.gethostname()
        places = world.gather((host, os.getpid()))
        # rank -> a file that can be read once its process has ended
        self.files = {n: os.pidfd_open(pid) for n, (at, pid) in enumerate(places) if at == host}
        os.close(self.files.pop(self.rank))

    def dead(self, patience: float) -> list[int]:
        """Ranks that have ended, the first of them within so many seconds."""
        ended = select.select([*self.files.values()], [], [], patience if self.files else 0)[0]
        return [rank for rank, file in self.files.items() if file in ended]

    def fail(self, error: Exception | None = None) -> None:
        """End all ranks, with one line and status 1. error: what this rank met, perhaps because
        another one has died."""
        dead = self.dead(patience=1)
        living = sorted({self.rank, *self.files} - {*dead})
        if dead:
            error = f"rank {', '.join(map(str, dead))} has died, and the server ends with it"
        elif not isinstance(error, FloatingPointError):
            traceback.print_exception(error)
        if dead and self.rank > living[0]:
            # that one says so, and ends this process
            time.sleep(10)
        else:
            terminal.say(terminal.one_line(f"serve.py: {error}"), error=True)
            for rank in {*living} - {self.rank}:
                signal.pidfd_send_signal(self.files[rank], signal.SIGKILL)
        os._exit(1)
