"""What tensor parallelism needs: f, g, its own slice of everything."""

from dataclasses import replace

import torch.distributed as dist

import families
import sequence_parallel
import sharding
import tensor_parallel
from base import dropout
from course.mutations import bug
from sharding import Shard, shard_of


@bug(2, dict(tp=2), first="step 1: gradient of head.norm")
def no_f():
    """The gradient of a column-parallel layer's input is each rank's part, not the sum."""
    tensor_parallel.copy_to_ranks = lambda x, group: x
    sequence_parallel.STARTS[tensor_parallel.CopyToRanks] = sequence_parallel.NOTHING


@bug(2, dict(tp=2), first="step 1: output of embedding")
def no_g():
    """The output of row-parallel layers, and of the embedding, is each rank's part."""
    tensor_parallel.reduce_from_ranks = lambda x, group: x


@bug(2, dict(tp=2), first="initial embedding.tokens")
def clones():
    """Every tensor-parallel rank starts from rank 0's shard of the weights."""

    class First:
        def __init__(self, group):
            self.size = group.size

        def rank(self):
            return 0

    def shard_of_rank_0(whole, record, original=shard_of):
        first = tuple(Shard(c.dim, First(c.group)) for c in record.placements)
        return original(whole, replace(record, placements=first))

    sharding.shard_of = shard_of_rank_0


def without_all_reduce(op):
    """Cross entropy without one of its two reductions."""
    forward = tensor_parallel._VocabParallelCrossEntropy.forward
    all_reduce = dist.all_reduce

    def silent(ctx, *args):
        dist.all_reduce = lambda x, o=dist.ReduceOp.SUM, **options: (
            None if o == op else all_reduce(x, o, **options)
        )
        result = forward(ctx, *args)
        dist.all_reduce = all_reduce
        return result

    tensor_parallel._VocabParallelCrossEntropy.forward = staticmethod(silent)


@bug(2, dict(tp=2), first="step 1: output of head")
def no_vocabulary_maximum():
    """Each rank subtracts the largest logit of its own part of the vocabulary."""
    without_all_reduce(dist.ReduceOp.MAX)


@bug(2, dict(tp=2), first="step 1: output of head")
def no_vocabulary_sums():
    """The sum in softmax is over this rank's part of the vocabulary."""
    without_all_reduce(dist.ReduceOp.SUM)


def dropout_without(dims):
    """Masks of tensors with so many dimensions begin at coordinate 0 on every rank."""
    original = dropout.Dropout.forward

    def forward(self, x, key):
        shard_index = self.shard_index
        if x.dim() == dims:
            self.shard_index = {}
        y = original(self, x, key)
        self.shard_index = shard_index
        return y

    dropout.Dropout.forward = forward


@bug(2, dict(tp=2), first="step 1: output of blocks.0")
def same_masks_on_every_head():
    """Every rank's attention heads get the dropout masks of the first rank's."""
    dropout_without(4)


@bug(
    2,
    dict(tp=2, model="qwen3-0.6b", num_kv_heads=2, head_dim=16, ffn_hidden_size=96),
    first="step 1: gradient of blocks.1.attention.head_norms",
)
def no_head_norm_sum():
    """The gradients of the norms of queries and keys are those of each rank's heads."""
    tensor_parallel.ParallelHeadNorms.forward = families.HeadNorms.forward
