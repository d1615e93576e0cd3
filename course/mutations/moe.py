"""What expert parallelism needs: two exchanges, their gradients, routing of whole micro-batches."""

import torch

import fsdp
import moe
import sequence_parallel
import tensor_parallel
from course.mutations import bug, replaces
from course.mutations.sequence_parallel import gather_alone
from sharding import sharding_of

EXPERTS = dict(num_experts=4, micro_batch_size=2)
EP = EXPERTS | dict(ep=2)
TP = EXPERTS | dict(tp=2)
SP = TP | dict(sequence_parallel=True)


@bug(4, EP, first="step 1: gradient of blocks.1.mlp.down.weight")
@replaces(fsdp.DataParallel, "accumulate")
def experts_divided_by_ep(self, p, original=fsdp.DataParallel.accumulate):
    """The gradient of an expert is divided by the ranks whose tokens it has seen."""
    if len(sharding_of(p).shape) == 3 and p.grad is not None:
        p.grad /= 2
    original(self, p)


@bug(4, EP, first="step 1: gradient of blocks.1.mlp.down.weight")
def experts_summed_over_all():
    """The gradients of experts are summed over all ranks, also those with other experts."""
    fsdp.is_sharded_over = lambda p, group: False


@bug(4, EP, first="step 1: output of blocks.0")
def no_combine_exchange():
    """The second all-to-all is missing: a token gets rows that are not its own."""
    forward = moe._AllToAll.forward
    calls = []

    def skip(ctx, rows, sent, received, *rest):
        calls.append(1)
        if len(calls) % 2:
            return forward(ctx, rows, sent, received, *rest)
        ctx.arguments = received, sent, *rest
        if not len(rows):
            return rows.new_zeros(sum(received), rows.shape[1])
        return rows.repeat(3, 1)[: sum(received)]

    moe._AllToAll.forward = staticmethod(skip)


@bug(4, EP, first="step 1: gradient of blocks.1.mlp.down.weight")
def no_expert_gradients_back():
    """The backward of the all-to-all is missing: tokens get no gradient from experts."""
    moe._AllToAll.backward = staticmethod(
        lambda ctx, grad: (grad.new_zeros(sum(ctx.arguments[1]), grad.shape[1]), *[None] * 4)
    )


@bug(4, EP, first="step 1: output of blocks.0")
def probabilities_of_other_tokens():
    """Each token's experts are weighted by another token's router probabilities."""
    moe.combine = lambda rows, probabilities, *rest, original=moe.combine: original(
        rows, probabilities.flip(0), *rest
    )


@bug(2, SP, first="step 1: output of blocks.0")
def routed_by_slice():
    """Each tensor-parallel rank balances its own slice of the sequence."""
    forward = moe.Routing.forward

    def by_slice(self, logits, real):
        scores = self.scores

        def of_halves(logits, training):
            # [b s, E] -> two times [b, s / 2, E], for s = 16
            halves = logits.unflatten(0, (-1, 16)).chunk(2, 1)
            parts = [scores(half.flatten(0, 1), training).unflatten(0, (-1, 8)) for half in halves]
            return torch.cat(parts, 1).flatten(0, 1)

        self.scores = of_halves
        plan = forward(self, logits, real)
        self.scores = scores
        return plan

    moe.Routing.forward = by_slice


@bug(2, SP, first="step 1: gradient of blocks.1.mlp.router")
@replaces(sequence_parallel, "gather_sequence")
def no_router_gradient_sum(x, group, original=sequence_parallel.gather_sequence):
    """The slices of the router's logits are gathered; their gradients stay with each rank."""
    # E
    return gather_alone(x, group) if x.shape[-1] == 4 else original(x, group)


@bug(2, TP, first="step 1: gradient of blocks.1.mlp.router")
def no_f_around_experts():
    """The input gradient of an expert layer is each tensor-parallel rank's part."""
    tensor_parallel.copy_to_ranks = lambda x, group: x


@bug(
    2,
    SP | dict(router="topk", router_topk=2, aux_loss=0.1, z_loss=0.1),
    first="step 1: gradient of blocks.1.mlp.router",
)
def router_losses_counted_twice():
    """Each tensor-parallel rank adds the router's losses of all tokens."""
    losses = moe.Router.losses
    moe.Router.losses = lambda self, logits, share: 2 * losses(self, logits, share)
