"""What context parallelism needs: positions, every step of the ring, exact merging, one sum."""

import torch

import context_parallel
from base.dropout import Dropout
from base.groups import Groups
from course.mutations import bug, replaces

RING = dict(cp=2, micro_batch_size=2)


@bug(2, RING, RING | dict(cp_kind="all-to-all"), first="step 1: output of embedding")
@replaces(context_parallel.OwnPositions, "forward")
def no_zigzag_positions(self, x, documents=None):
    """Positions are those of a sequence cut in order; the tokens are cut in zigzag."""
    n = x.shape[1]
    return x + self.weight[self.group.rank() * n : (self.group.rank() + 1) * n]


@bug(2, RING, RING | dict(cp_kind="all-to-all"), first="step 1: output of embedding")
@replaces(context_parallel, "apply")
def same_masks_on_every_piece(model, *args, original=context_parallel.apply):
    """Dropout numbers the tokens of each context-parallel rank from 0."""
    original(model, *args)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.coordinates = None


@bug(2, RING, first="step 1: output of blocks.0")
def ring_stops_early():
    """The last step of the ring is missing: no query sees the keys that come last."""
    context_parallel.merge = lambda o, log_sum, *more: (o, log_sum)


@bug(2, RING, first="step 1: output of blocks.0")
@replaces(context_parallel, "merge")
def merge_without_rescaling(o, log_sum, more_o, more_log_sum):
    """Partial results of attention are averaged, whatever share of the softmax each has."""
    return (o + more_o) / 2, torch.logaddexp(log_sum, more_log_sum)


@bug(2, RING, first="step 1: gradient of blocks.1.attention")
@replaces(context_parallel.Ring, "wait")
def key_gradients_stay(self, original=context_parallel.Ring.wait):
    """What a rank finds for the keys and values of another one never travels home."""
    own, received = self.sent, original(self)
    # Tag 1 is that of gradients.
    return own if self.tag == 1 else received


@bug(
    2,
    RING,
    RING | dict(cp_kind="all-to-all"),
    RING | dict(zero_stage=2),
    first="step 1: gradient of head.norm",
)
def replicas_without_cp():
    """Gradients are summed over data-parallel ranks alone, each of which has seen a part of the
    tokens."""
    original = Groups.make.__func__

    def make(cls, *args, **options):
        groups = original(cls, *args, **options)
        groups.replicas = groups.shard = groups.dp
        return groups

    Groups.make = classmethod(make)


@bug(2, RING | dict(cp_kind="all-to-all"), first="step 1: output of blocks.0")
@replaces(context_parallel.AllToAllAttention, "forward")
def tokens_by_rank(self, *args, original=context_parallel.AllToAllAttention.forward):
    """With all heads exchanged for tokens, these stay in the order of the ranks: the causal mask is
    about another order."""
    zigzag = context_parallel.own_positions
    context_parallel.own_positions = lambda s, rank, n, device=None: (
        torch.arange(s // n, device=device) + rank * (s // n)
    )
    y = original(self, *args)
    context_parallel.own_positions = zigzag
    return y
