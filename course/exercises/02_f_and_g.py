"""Exercise 2: f and g, the two functions of tensor parallelism.                    (25 minutes)

An MLP computes Z = GELU(X A) B. Cut A by columns and B by rows over the ranks. GELU acts on each
element alone, so every rank can compute its term of the sum without the others:

    X --f-->  GELU(X A_i) B_i  --g-->  Z = Σ_i GELU(X A_i) B_i       A = [A_1 A_2]
                                                                     B = [B_1; B_2]

Forward. X is on every rank already: f does nothing. Each rank has one term of Z: g sums them, so
that every rank has Z. A sum over ranks is an all-reduce: `dist.all_reduce(x, group=group)`, which
overwrites x.

Backward. It runs from right to left. Every rank has ∂L/∂Z, and each term's gradient is the same:
what does g have to do? Then each rank computes ∂L/∂X from its own columns. X went to all ranks:
what is its gradient?

An autograd function has a forward and a backward of its own. `ctx` carries what backward needs;
backward returns one gradient for each argument of forward, None for `group`.

Read         sharding.py up to `shard_of`; `MLP` in gpt.py
Paper        Megatron-LM, arXiv 1909.08053, section 3, figure 3
Not yet      tensor_parallel.py, from its first line: `_Copy` and `_Reduce` are f and g
Check        python -m course.exercises.check 2      --hint: a hint, one more at each call
Par          two all-reduces of b s h elements: one in forward, one in backward
"""

import torch
import torch.distributed as dist
from torch import Tensor


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        # A new tensor object of the same memory.
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError(
            "Backward of f. Each rank has ∂L/∂X of its own columns of A only. What is ∂L/∂X? "
            "Work on a copy, grad.clone(): autograd may still need `grad`."
        )


class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        raise NotImplementedError(
            "Forward of g. Each rank has one term of Z, and every rank needs their sum. "
            "Work on a copy, x.clone(), as all_reduce overwrites x."
        )

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError(
            "Backward of g. Z = Z_1 + Z_2, and every rank has ∂L/∂Z: what is ∂L/∂Z_1?"
        )


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """f: x, the same on every rank, enters a region where each rank computes a part."""
    return F.apply(x, group)


def reduce_from_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g: each rank's term leaves the region as the sum."""
    return G.apply(x, group)
