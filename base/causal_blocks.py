"""Fused attention on a CPU, for short sequences: a block of rows of the scores at a time.

A causal mask hides the upper triangle. A block of rows needs only the columns up to its last row.
With s = 4 and blocks of 2 rows:

    q \\ k  0 1 2 3
      0    x . | - -      block 0: rows 0 and 1, columns 0 and 1
      1    x x | - -      - is never computed, . is computed and masked
      2    x x   x .      block 1: rows 2 and 3, all columns
      3    x x   x x

A block is two large matrix multiplications and a softmax. Where oneDNN multiplies (in 16 bits; in
float32 by base/cpu.py), small matrices are slow, and the kernel of `scaled_dot_product_attention`
multiplies many: it takes up to three times as long
([docs/results.md](../docs/results.md#one-device)). As in that kernel, the s x s matrix never exists
whole, and backward computes the probabilities again from copies of q and k (FlashAttention, arXiv
2205.14135, section 3.1). In 16 bits the scores have 16 bits, as in explicit attention; PyTorch's
kernel has them in float32.

r heads may share a key (grouped-query attention). Then a token has r rows, one for each head, and
one product multiplies all of them by the key.

    python -m course.causal_blocks      a lesson: FLOPs, bytes that are kept, equal gradients

Not covered: second derivatives; other masks; blocks of columns, by which FlashAttention also limits
the width of a block. So PyTorch computes sequences of more than `LONGEST` tokens, or with
documents.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# The number of tokens of a block.
ROWS = 128
# For more tokens PyTorch's kernel is as fast in float32, and kernels.py uses that one.
LONGEST = 512


class Block(NamedTuple):
    """Rows of q and of the scores, r for each token, and the columns up to the last of them."""

    rows: slice
    columns: slice
    r: int

    @property
    def tokens(self) -> int:
        return (self.rows.stop - self.rows.start) // self.r


def blocks(s: int, r: int) -> list[Block]:
    """The blocks from the bottom of the matrix to its top. The first may have fewer rows."""
    ends = [(first, min(s, first + ROWS)) for first in range(0, s, ROWS)]
    return [Block(slice(r * first, r * end), slice(end), r) for first, end in reversed(ends)]


def probabilities(q: Tensor, k: Tensor, block: Block, scale: float) -> Tensor:
    """softmax(q kᵀ / √d + causal mask) of a block. q: [n, s r, d]; k: [n, s, d]
    -> [n, rows, columns]"""
    q, k = q[:, block.rows], k[:, block.columns]
    # With beta 0 the first argument is not read.
    scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=scale)
    # All rows see the columns before these.
    scores[:, :, -block.tokens :] += causal_mask(block.tokens, block.r, q.dtype)
    return torch.softmax(scores, -1, out=scores)


def causal_mask(tokens: int, r: int, dtype: torch.dtype) -> Tensor:
    """0 where a row sees a column, else -∞. [tokens r, tokens]"""
    mask = torch.full((tokens, tokens), -math.inf, dtype=dtype).triu(1)
    return mask.repeat_interleave(r, 0)


class _CausalAttention(torch.autograd.Function):
    """y = p v of each block of rows. Backward computes p again; z are the scores:

    ∂v = pᵀ ∂y    ∂p = ∂y vᵀ    ∂z = p (∂p - Σ p ∂p)    ∂q = ∂z k / √d    ∂k = ∂zᵀ q / √d
    """

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.a_kv = a_kv = k.shape[1]
        ctx.r = q.shape[1] // a_kv
        q, k, v = (rows_of_groups(x, a_kv) for x in (q, k, v))  # q: [n, s r, d]; k, v: [n, s, d]
        ctx.save_for_backward(q, k, v)
        s, d = k.shape[1:]
        y = q.new_empty(*q.shape[:2], v.shape[2])
        for block in blocks(s, ctx.r):
            p = probabilities(q, k, block, d**-0.5)
            torch.bmm(p, v[:, block.columns], out=y[:, block.rows])
        return heads_of_rows(y, a_kv, s)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q, k, v = ctx.saved_tensors
        dy = rows_of_groups(dy, ctx.a_kv)
        s, d = k.shape[1:]
        scale = d**-0.5
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        # The block at the bottom has all columns, so its gradients overwrite the empty tensors.
        beta = 0
        for block in blocks(s, ctx.r):
            rows, columns = block.rows, block.columns
            p = probabilities(q, k, block, scale)
            dv[:, columns].baddbmm_(p.transpose(1, 2), dy[:, rows], beta=beta)
            dp = torch.bmm(dy[:, rows], v[:, columns].transpose(1, 2))
            dz = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(scale)
            torch.bmm(dz, k[:, columns], out=dq[:, rows])
            dk[:, columns].baddbmm_(dz.transpose(1, 2), q[:, rows], beta=beta)
            beta = 1
        return tuple(heads_of_rows(x, ctx.a_kv, s) for x in (dq, dk, dv))


def rows_of_groups(x: Tensor, a_kv: int) -> Tensor:
    """[b, a, s, d] -> [n, s r, d], where n = b a_kv, and r = a / a_kv heads share a key"""
    return x.unflatten(1, (a_kv, -1)).transpose(2, 3).flatten(2, 3).flatten(0, 1)


def heads_of_rows(x: Tensor, a_kv: int, s: int) -> Tensor:
    """The reverse, with the numbers of a token next to each other in memory for gpt.Attention."""
    x = x.view(-1, a_kv, s, x.shape[1] // s, x.shape[2])  # [b, a_kv, s, r, d]
    return x.transpose(1, 2).flatten(2, 3).transpose(1, 2)  # [b, a, s, d]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d + causal mask) v. q: [b, a, s, d]; k, v: [b, a_kv, s, d], or v of
    another width -> [b, a, s, d], or that width"""
    return _CausalAttention.apply(q, k, v)
