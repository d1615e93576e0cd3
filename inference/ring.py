"""The ring of a pipeline's stages, in which texts are generated.

A token goes through all stages before the next one of the same text can start. With one batch only
one stage would work at a time. With p micro-batches all of them work, each on another one:

    stage 0     a0 b0 a1 b1 a2 b2                a, b: micro-batches
    stage 1        a0 b0 a1 b1 a2 b2             a1: the forward pass that reads the token a0 gave

The stages form a ring: each sends its activations to the next. The last one samples, and sends the
tokens round to all others, because each of them has the texts (it must know which are finished, and
the first one embeds the new tokens).

    activations   0 -> 1 -> .. -> p - 1
    tokens        p - 1 -> 0 -> 1 -> .. -> p - 2

With v stages on each rank (virtual stages), the activations go round v times first. In a V they go
to rank p - 1 and back; rank 0 samples, and the tokens go 0 -> 1 -> .. -> p - 1.

    torchrun --nproc-per-node 2 generate.py --pp 2 --checkpoint runs/default --prompt "def "

Not covered: micro-batches that grow or shrink with the load.
"""

from collections import deque

from torch import Tensor

from pipeline_parallel import Channels
from schedules import Placement


class Ring:
    """Sends to the next rank, receives from the one before. Messages between two ranks arrive in
    the order in which they were sent. In a V chunk 1 goes the other way, and the tokens, which are
    drawn where they are read, have a channel of their own."""

    def __init__(self, channels: Channels, placement: Placement | None = None):
        """placement: by default looped."""
        self.channels = channels
        self.rank = channels.group.rank()
        self.p = channels.group.size()
        self.placement = placement or Placement(self.p)
        # The rank that samples.
        self.last = self.placement.rank_of(self.placement.last_stage)
        self.is_last = self.rank == self.last
        self.kind_of_tokens = "B" if self.placement.v_shaped else "F"
        # (work, tensor): the tensor must live until it is sent.
        self.sending = deque()
        # Activations for the next chunk of this rank.
        self.turning = deque()

    def send(self, tensor: Tensor) -> None:
        self.send_to((self.rank + 1) % self.p, tensor, self.kind_of_tokens)

    def send_activations(self, x: Tensor, chunk: int) -> None:
        """Sends to the stage after this chunk."""
        to = self.placement.rank_of(self.placement.stage_of(self.rank, chunk) + 1)
        if to == self.rank:
            self.turning.append(x)
        else:
            self.send_to(to, x, "F")

    def send_to(self, peer: int, tensor: Tensor, kind: str) -> None:
        tensor = tensor.contiguous()
        work = self.channels.send(tensor, peer, kind, int(kind == "B"))
        self.sending.append((work, tensor))
        # What was sent so long ago has been received, for its answer has come round.
        self.wait_for_all_but(4 * self.p)

    def receive(self, buffer: Tensor, chunk: int = 0) -> Tensor:
        """What the stage before this chunk has sent. Fills the buffer, and returns it."""
        stage = self.placement.stage_of(self.rank, chunk)
        sender = self.placement.rank_of((stage - 1) % (self.placement.last_stage + 1))
        if sender == self.rank:
            return self.turning.popleft()
        self.channels.receive(buffer, sender, "F", 0).wait()
        return buffer

    def pass_on(self, tokens: Tensor) -> Tensor:
        """The tokens that the last stage has sent; every stage but the last calls it. tokens: [b],
        a buffer."""
        kind = self.kind_of_tokens
        self.channels.receive(tokens, (self.rank - 1) % self.p, kind, int(kind == "B")).wait()
        # The last stage has them.
        if (self.rank + 1) % self.p != self.last:
            self.send(tokens)
        return tokens

    def wait_for_all_but(self, most: int) -> None:
        while len(self.sending) > most:
            work, _ = self.sending.popleft()
            work.wait()
