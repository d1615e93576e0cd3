"""What sequence parallelism needs: g, g-bar, the gradients of the norms."""

import torch

import gpt
import sequence_parallel
from course.mutations import bug, replaces
from course.mutations.tensor_parallel import dropout_without
from sequence_parallel import start_gather, start_scatter

SP = dict(tp=2, sequence_parallel=True)


def mine(x, group):
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


def gather_alone(x, group, gather=sequence_parallel.gather_sequence):
    """The slices are gathered; their gradients stay with each rank."""
    parts = list(gather(x.detach(), group).chunk(group.size(), 1))
    parts[group.rank()] = x
    return torch.cat(parts, 1)


def in_g(start_input=start_gather, start_input_grad=start_scatter):
    """Another g in column-parallel layers."""
    sequence_parallel.STARTS[sequence_parallel.GatherSequence] = (start_input, start_input_grad)


@bug(2, SP, first="step 1: gradient of head.norm")
def no_sum_in_g():
    """The gradient of a column-parallel layer's input is not summed by the reduce-scatter."""
    in_g(start_input_grad=lambda x, group: lambda: mine(x, group))


@bug(2, SP, first="step 1: output of blocks.0")
def no_gather_in_g():
    """Every rank repeats its own slice of the sequence instead of gathering the others'."""
    in_g(start_input=lambda x, group: lambda: x.repeat(1, group.size(), 1))


@bug(2, SP, first="step 1: gradient of blocks.1.mlp.up.weight")
def stale_input():
    """Backward's second all-gather gives another tensor than forward's."""
    seen = {}

    def start_input(x, group, original=sequence_parallel.start_gather):
        finish = original(x, group)
        again = seen.pop(x.data_ptr(), False)
        if not again:
            seen[x.data_ptr()] = True
        return (lambda: 2 * finish()) if again else finish

    in_g(start_input=start_input)


@bug(2, SP, first="step 1: output of embedding")
def no_sum_in_g_bar():
    """Each rank keeps its slice of its own part: the reduce-scatter does not sum."""
    sequence_parallel.scatter_sequence = mine


@bug(2, SP, first="step 1: gradient of blocks.1.mlp.down.weight")
def no_gather_in_g_bar():
    """The gradient of a row-parallel layer's output is zero outside of this rank's slice."""

    def back(grad, group):
        parts = [torch.zeros_like(grad) for _ in range(group.size())]
        parts[group.rank()] = grad
        return lambda: torch.cat(parts, 1)

    sequence_parallel.scatter_sequence = lambda x, group: sequence_parallel._Pair.apply(
        x, group, sequence_parallel.start_scatter, back
    )


@bug(2, SP, first="step 1: gradient of head.norm")
def no_norm_gradient_sum():
    """The gradients of norm weights are those of each rank's slice of the sequence."""
    sequence_parallel._CopyWeights.backward = staticmethod(lambda ctx, *grads: (None, *grads))


@bug(2, SP | dict(model="bloom-560m"), first="step 1: gradient of embedding.norm")
@replaces(sequence_parallel, "synchronise")
def no_embedding_norm_sum(part, group, original=sequence_parallel.synchronise):
    """The gradient of the embedding's norm is that of each rank's slice of the sequence."""
    if not isinstance(part, gpt.Embedding):
        original(part, group)


@bug(2, SP, first="step 1: output of embedding")
def positions_from_0():
    """Every slice of the sequence gets the position embeddings of the first."""
    original = sequence_parallel.ShardedPositions.__init__
    sequence_parallel.ShardedPositions.__init__ = lambda self, positions, n, t: original(
        self, positions, 0, t
    )


@bug(2, SP, first="step 1: output of embedding")
def same_masks_on_every_slice():
    """Every slice of the sequence gets the dropout mask of the first."""
    dropout_without(3)
