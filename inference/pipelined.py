"""Pipelined decoding: the batch is divided into micro-batches, one for each pipeline stage.

A token goes through all stages before the next one of the same text can start. With one batch only
one stage would work at a time. With p micro-batches all of them work, each on another one:

    stage 0     a0 b0 a1 b1 a2 b2                a, b: micro-batches
    stage 1        a0 b0 a1 b1 a2 b2             a1: the forward pass that reads the token a0 gave

The stages form a ring: each sends its activations to the next. The last one samples, and sends the
tokens round to all others, because each of them has the texts (it must know which are finished, and
the first one embeds the new tokens).

    activations   0 -> 1 -> .. -> p - 1
    tokens        p - 1 -> 0 -> 1 -> .. -> p - 2

With v stages on each rank (virtual stages), the activations go round v times first.

The loop for one device is generate.decode; tests/test_generate.py holds both to the same tokens.

    torchrun --nproc-per-node 2 generate.py --pp 2 --checkpoint runs/default --prompt "def "

Not covered: micro-batches that grow or shrink with the load.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inference.batches import DecodeBatch, NewToken, Observer, any_unfinished
from inference.sampling import SamplingParams, sample
from pipeline_parallel import Channels


class Ring:
    """The stages in a ring: send to the next rank, receive from the one before. Messages between
    two ranks arrive in the order in which they were sent."""

    def __init__(self, channels: Channels):
        self.channels = channels
        self.rank = channels.group.rank()
        self.p = channels.group.size()
        # (work, tensor): the tensor must live until it is sent.
        self.sending = deque()

    def send(self, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        work = self.channels.send(tensor, (self.rank + 1) % self.p, "F", 0)
        self.sending.append((work, tensor))
        # What was sent so long ago has been received, for its answer has come round.
        self.wait_for_all_but(4 * self.p)

    def receive(self, buffer: Tensor) -> Tensor:
        """Fills the buffer, and returns it."""
        self.channels.receive(buffer, (self.rank - 1) % self.p, "F", 0).wait()
        return buffer

    def wait_for_all_but(self, most: int) -> None:
        while len(self.sending) > most:
            work, _ = self.sending.popleft()
            work.wait()


@dataclass
class PipelinedDecoder:
    """Decodes micro-batches on this stage. All stages, and all ranks of the lockstep group, run it
    with as many micro-batches."""

    # generate.ModelRunner of this rank's stages.
    runner: Any
    ring: Ring
    micro_batches: list[DecodeBatch]
    params: SamplingParams
    # generate.stream explains it.
    lockstep: dist.ProcessGroup | None
    observe: Observer | None = None
    # Micro-batch -> the tokens of its current forward pass [b, s].
    inputs: dict[int, Tensor] = field(default_factory=dict)
    # Micro-batch -> the tokens sampled for it [b], on the last stage.
    sampled: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.is_first = self.ring.rank == 0
        self.is_last = self.ring.rank == self.ring.p - 1

    def decode(self):
        """Yields list[NewToken] after each step of a micro-batch, until all are finished."""
        unfinished = list(range(len(self.micro_batches)))
        for m in unfinished:
            self.start_step(m)
        while unfinished:
            # The rounds of virtual stages.
            for chunk in range(1, len(self.runner.stages)):
                for m in unfinished:
                    self.forward(chunk, m)
            for m in list(unfinished):
                new_tokens, goes_on = self.finish_step(m)
                if new_tokens:
                    yield new_tokens
                if goes_on:
                    self.start_step(m)
                else:
                    unfinished.remove(m)
        self.ring.wait_for_all_but(0)

    def start_step(self, m: int) -> None:
        self.inputs[m] = self.micro_batches[m].next_tokens()
        self.forward(0, m)

    def forward(self, chunk: int, m: int) -> None:
        """Micro-batch m through stage number `chunk` of this rank: receive, compute, send."""
        batch = self.micro_batches[m]
        tokens = self.inputs[m]
        activations = None
        if not (self.is_first and chunk == 0):
            shape = (*tokens.shape, self.runner.config.hidden_size)
            activations = self.ring.receive(
                torch.empty(shape, dtype=self.runner.dtype, device=self.runner.device)
            )  # [b, s, h]
        # [b, s, h], or logits [b, V]
        output = self.runner.forward(batch, tokens, chunk, activations)
        if self.is_last and chunk == len(self.runner.stages) - 1:
            logits = output
            output = sample(logits, batch.keys(), batch.positions(), self.params)  # [b]
            if self.observe:
                self.observe(batch, logits, output)
            self.sampled[m] = output
        self.ring.send(output)

    def finish_step(self, m: int) -> tuple[list[NewToken], bool]:
        """(new tokens of micro-batch m, whether any rank in lockstep goes on with it). The sampled
        tokens come round from the last stage."""
        batch = self.micro_batches[m]
        if self.is_last:
            tokens = self.sampled.pop(m)  # [b]
        else:
            b = len(batch.sequences)
            tokens = self.ring.receive(torch.empty(b, dtype=torch.long, device=self.runner.device))
            # The last stage has them.
            if self.ring.rank < self.ring.p - 2:
                self.ring.send(tokens)
        return batch.append(tokens.tolist()), any_unfinished(batch, self.lockstep)
