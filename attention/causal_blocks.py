"""Fused attention on a CPU, for short sequences: a block of rows of the scores at a time.

A causal mask hides the upper triangle. A block of rows needs the columns up to its last row, and no
others. With s = 4 and blocks of 2 rows:

    q \\ k  0 1 2 3
      0    x . | - -      block 0: rows 0 and 1, columns 0 and 1
      1    x x | - -      - is never computed, . is computed and masked
      2    x x   x .      block 1: rows 2 and 3, all columns
      3    x x   x x

A block is two large matrix multiplications and a softmax. On CPUs the kernel of
`scaled_dot_product_attention` multiplies smaller pieces, and takes up to three times as long
([docs/results.md](../docs/results.md#one-device)). As in that kernel, the s x s matrix never exists
whole, and backward computes the probabilities again from q and k (FlashAttention, arXiv 2205.14135,
section 3.1): it keeps q, k and v.

Where heads share a key (grouped-query attention), the rows of all heads that share it stand one
after the other, and multiply it at once.

    python -m attention.causal_blocks      a lesson: FLOPs, bytes that are kept, equal gradients

Not covered: other masks; blocks of columns, with which FlashAttention also bounds the width of a
block. So a sequence of more than `LONGEST` tokens, or with documents, is left to PyTorch.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("attention.causal_blocks")

import math
from types import MethodType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import gpt

# rows of a block
ROWS = 128
# Beyond so many tokens PyTorch's kernel is as fast in float32.
LONGEST = 512


def probabilities(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q kᵀ / √d + causal mask) of a block. q: [n, r, rows, d], its last row sees all of k;
    k: [n, columns, d] -> [n, r rows, columns]"""
    r, rows, d = q.shape[1:]
    mask = causal_mask(rows, k.shape[1], q.dtype).repeat(r, 1)
    scores = torch.baddbmm(mask, q.flatten(1, 2), k.transpose(1, 2), alpha=d**-0.5)
    return scores.softmax(-1)


def causal_mask(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """0 where a row sees a column, else -∞. [rows, columns], of which the last row sees all."""
    return torch.full((rows, columns), -math.inf, dtype=dtype).triu(columns - rows + 1)


def blocks(s: int) -> list[slice]:
    """The rows of each block; the last may have fewer."""
    return [slice(first, min(s, first + ROWS)) for first in range(0, s, ROWS)]


class _CausalAttention(torch.autograd.Function):
    """y = p v of each block of rows; p is computed again in backward:

    ∂v = pᵀ ∂y    ∂p = ∂y vᵀ    ∂z = p (∂p - Σ p ∂p)    ∂q = ∂z k / √d    ∂k = ∂zᵀ q / √d

    where z are the scores
    """

    @staticmethod
    def forward(ctx, q, k, v):
        # q: [n, r, s, d]; k, v: [n, s, d]. n: batch and key heads; r: heads that share one
        ctx.save_for_backward(q, k, v)
        y = torch.empty_like(q)
        for rows in blocks(q.shape[2]):
            p = probabilities(q[:, :, rows], k[:, : rows.stop])
            y[:, :, rows] = (p @ v[:, : rows.stop]).view_as(y[:, :, rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in blocks(q.shape[2]):
            columns = slice(rows.stop)
            p = probabilities(q[:, :, rows], k[:, columns])
            q_rows, dy_rows = q[:, :, rows].flatten(1, 2), dy[:, :, rows].flatten(1, 2)
            dv[:, columns].baddbmm_(p.transpose(1, 2), dy_rows)
            dp = dy_rows @ v[:, columns].transpose(1, 2)
            dz = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, :, rows] = (dz @ k[:, columns]).mul_(scale).view_as(dq[:, :, rows])
            dk[:, columns].baddbmm_(dz.transpose(1, 2), q_rows, alpha=scale)
        return dq, dk, dv


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d + causal mask) v. q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, a, s, d]"""
    b, a, s, d = q.shape
    group = a // k.shape[1]
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    return _CausalAttention.apply(q.reshape(len(k), group, s, d), k, v).view(b, a, s, d)


def attention_of_module(
    self: gpt.FusedAttention, q: Tensor, k: Tensor, v: Tensor, context: gpt.Context
) -> Tensor:
    if context.documents is not None or q.shape[2] > LONGEST:
        return gpt.FusedAttention.forward(self, q, k, v, context)
    return causal_attention(q, k, v).transpose(1, 2).flatten(2)


def apply(model: gpt.GPT) -> None:
    """Let fused attention compute so, in place; on a CPU. Before what wraps the core or its
    forward."""
    for module in model.modules():
        if type(module) is gpt.FusedAttention:
            module.forward = MethodType(attention_of_module, module)
