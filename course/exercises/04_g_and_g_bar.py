"""Exercise 4: g and ḡ, the two functions of sequence parallelism.                  (25 minutes)

Between two tensor-parallel regions stand LayerNorm, dropout and the residual. With f and g of
exercise 2 every rank computes and keeps them for all tokens, t times the same. They act on each
token alone, so each rank can take s/t of the tokens. An all-reduce is a reduce-scatter, then an
all-gather. Put the sharded part between the two, and the bytes that are sent stay the same:

    [b, s/t, h] --g-->  [b, s, h]  --GELU(X A_i) B_i-->  [b, s, h]  --ḡ-->  [b, s/t, h]
                all-gather          a term of a sum          reduce-scatter

These are the letters of arXiv 2205.05198. Its g is not the g of exercise 2, for which it writes f̄.

    all-gather        each rank gives its shard, every rank gets all shards, joined
    reduce-scatter    each rank gives a whole tensor; rank r gets shard r of their sum

Backward. In g a shard goes to all ranks: what is its gradient? In ḡ a rank's term has a part in the
shard of each rank: where are the parts of its gradient, and what brings them together?

Collectives join and cut along dimension 0, and the sequence is dimension 1:
`all_gather(out [t b, s/t, h], x)` and `reduce_scatter(out [b, s/t, h], x [t b, s/t, h])` with
`group=group`. Order the dimensions before or after it. Tensors must be contiguous.

Read         exercise 2
Paper        Korthikanti et al., arXiv 2205.05198, section 4.2.2, figure 5
Not yet      sequence_parallel.py, from its first line: `start_gather`, `start_scatter`
Check        python -m course.exercises.check 4      --hint: a hint, one more at each call
Par          one all-gather and one reduce-scatter in forward, the same in backward
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import all_gather, reduce_scatter


class Pair(torch.autograd.Function):
    """forward_function(x, group) in forward, backward_function(grad, group) in backward."""

    @staticmethod
    def forward(ctx, x, group, forward_function, backward_function):
        ctx.group = group
        ctx.backward_function = backward_function
        return forward_function(x, group)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_function(grad, ctx.group), None, None, None


def join(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather along the sequence. [b, s/t, h] -> [b, s, h]"""
    raise NotImplementedError(
        "`all_gather` gives the shard of rank 0, then that of rank 1. In which order are its rows?"
    )


def sum_and_cut(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter along the sequence. [b, s, h] -> [b, s/t, h]"""
    raise NotImplementedError("Which rows must stand first, so that rank 0 gets its tokens?")


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g: shards [b, s/t, h] become the whole [b, s, h] on every rank."""
    # the second `join` is a placeholder: which function is the backward of g?
    return Pair.apply(x, group, join, join)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """ḡ: terms [b, s, h] of a sum become each rank's shard of the sum, [b, s/t, h]."""
    # and the second `sum_and_cut`: which is the backward of ḡ?
    return Pair.apply(x, group, sum_and_cut, sum_and_cut)
