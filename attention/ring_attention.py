r"""Ring attention: keys and values travel round the ranks of a sequence (arXiv 2310.01889).

Each of N ranks has the queries, keys and values of some tokens (context_parallel.py). Rank r begins
with its own keys and values. Then it gets those of rank r - 1, of r - 2, and so on: it computes
attention to the ones that it has while the next ones are on their way.

    step        0          1          2          3           rank 1 of 4
    compute     own        rank 0's   rank 3's   rank 2's
    receive     rank 0's   rank 3's   rank 2's

Softmax needs the sum over all keys. Partial results over different keys K merge exactly, if each
keeps the logarithm L of its sum:

    o_K = softmax over K alone, times v       L_K = log Σ_(j in K) exp(q k_j / √d)
    L   = log Σ_K exp(L_K)                    o   = Σ_K exp(L_K - L) o_K

Backward goes round again. With L of all keys, each block's probabilities are exp(q k_j / √d - L),
so it gives its part of ∂q, ∂k and ∂v (FlashAttention, arXiv 2205.14135, appendix B.2). ∂k and ∂v
follow k and v, one step behind, and end at home, where the part of the own queries waits. So
backward sends twice what forward sends. The s x s matrix never exists whole.

    python context_parallel.py        the lesson of this file and of context_parallel.py

Not covered: kernels for a document mask (packing) or dropout, whose blocks of s/N queries by s/N
keys are written.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("context_parallel")

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from base import compiling
from base.attention_kernels import kernel_for
from dropout import Dropout, dropout_mask
from gpt import Context


def own_positions(s: int, rank: int, n: int, device=None) -> Tensor:
    """Positions of a rank's tokens in a sequence of s, of the 2n pieces number `rank` and number
    2n - 1 - rank. [s/n], ascending."""
    piece = s // (2 * n)
    at = torch.arange(piece, device=device)
    return torch.cat((at + rank * piece, at + (2 * n - 1 - rank) * piece))


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which parts are summed: 16 bits are too few."""
    return torch.promote_types(dtype, torch.float32)


# --- attention to some keys, and its gradient -----------------------------------------------------


class Block(NamedTuple):
    """Which queries of this rank meet which keys of another, and how."""

    # rows of the queries, and of the keys
    queries: slice
    keys: slice
    # query i sees keys 0 .. i alone
    causal: bool
    # [b, 1, m, n], true where a query sees a key; None: as `causal` says
    visible: Tensor | None
    # [b, a, m, n], true where dropout removes a probability; the others are divided by `keep`
    dropped: Tensor | None
    keep: float


def probabilities(q: Tensor, k: Tensor, block: Block, log_sum: Tensor | None = None):
    """(exp(q kᵀ / √d - L), L). log_sum: L; None: that of these keys alone. q: [b, a, m, d];
    k: [b, a, n, d] -> [b, a, m, n] and [b, a, m, 1]"""
    scores = (q @ k.transpose(2, 3)).to(wide(q.dtype)) * q.shape[-1] ** -0.5
    if block.visible is not None:
        scores = scores.masked_fill(~block.visible, -torch.inf)
    elif block.causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    if log_sum is None:
        log_sum = scores.logsumexp(-1, keepdim=True)
    # a query that sees none of these keys has -inf: 0, not exp(-inf + inf)
    return (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)).exp(), log_sum


def drop(p: Tensor, block: Block) -> Tensor:
    return p if block.dropped is None else p.masked_fill(block.dropped, 0.0) / block.keep


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone: (o [b, a, m, d], L [b, a, m, 1])"""
    kernel = kernel_for(q, k)
    if kernel and block.visible is None and block.dropped is None:
        return kernel.forward(q, k, v, block.causal)
    p, log_sum = probabilities(q, k, block)
    return drop(p, block).to(v.dtype) @ v, log_sum


def attend_backward(q, k, v, o, log_sum, grad, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """(∂q, ∂k, ∂v) through these keys. o, log_sum: over all keys; grad: ∂o, [b, a, m, d]."""
    kernel = kernel_for(q, k)
    if kernel and block.visible is None and block.dropped is None:
        return kernel.backward(grad, q, k, v, o, log_sum, block.causal)
    p, _ = probabilities(q, k, block, log_sum)
    dp = drop((grad @ v.transpose(2, 3)).to(p.dtype), block)
    # what softmax over all keys takes off: Σ_j p_j ∂p_j = o ∂o
    delta = (o.to(p.dtype) * grad).sum(-1, keepdim=True)
    ds = (p * (dp - delta) * q.shape[-1] ** -0.5).to(q.dtype)
    return ds @ k, ds.transpose(2, 3) @ q, drop(p, block).to(q.dtype).transpose(2, 3) @ grad


def merge(o: Tensor, log_sum: Tensor, more_o: Tensor, more_log_sum: Tensor):
    """Two partial results over different keys as one, (o, L)."""
    total = torch.logaddexp(log_sum, more_log_sum)
    return o * (log_sum - total).exp() + more_o * (more_log_sum - total).exp(), total


# --- what meets what ------------------------------------------------------------------------------


class Blocks:
    """This rank's queries, and the keys of each rank. context.documents: [b, s], of the whole
    sequence."""

    def __init__(self, core: "RingAttention", context: Context, s: int):
        self.group = core.group
        self.rank, self.n = core.group.rank(), core.group.size()
        self.dropout = None
        if context.drop_key is not None and core.dropout is not None and core.dropout.p > 0:
            self.dropout = core.dropout
        self.drop_key = context.drop_key
        self.documents = context.documents
        self.s = s

    def meeting(self, source: int, q: Tensor) -> Block:
        """Own queries q, [b, a, s/N, d], and the keys of rank `source`.

        The first halves of the ranks' tokens are in the ranks' order, the second halves in reverse.
        So of a rank before, all queries see the first half of the keys; of a rank after, the second
        half of the queries sees all keys.
        """
        half = q.shape[2] // 2
        queries = slice(half, None) if source > self.rank else slice(None)
        keys = slice(half) if source < self.rank else slice(None)
        at_q = own_positions(self.s, self.rank, self.n, q.device)[queries]
        at_k = own_positions(self.s, source, self.n, q.device)[keys]
        visible, dropped, keep = None, None, 1.0
        if self.documents is not None:
            same = self.documents[:, at_q].unsqueeze(2) == self.documents[:, at_k].unsqueeze(1)
            visible = (same & (at_k <= at_q.unsqueeze(1))).unsqueeze(1)  # [b, 1, m, n]
        if self.dropout is not None:
            heads = self.dropout.shard_index.get(1, 0) * q.shape[1]
            shape = (*q.shape[:2], len(at_q), len(at_k))
            start = {1: heads, 2: at_q, 3: at_k}
            site, keep = self.dropout.site, 1 - self.dropout.p
            dropped = dropout_mask(self.drop_key, site, shape, start, self.dropout.p)
        return Block(queries, keys, source == self.rank, visible, dropped, keep)


def repeat(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: query heads share one key head. [b, a_kv, n, d] -> [b, a, n, d]"""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# --- the ring -------------------------------------------------------------------------------------


class Ring:
    """A tensor goes to the next rank, and one comes from the rank before, while something computes.
    All ranks start and wait in one order: NCCL pairs messages by it, gloo by tag."""

    def __init__(self, group: dist.ProcessGroup, tag: int):
        ranks = dist.get_process_group_ranks(group)
        self.next = ranks[(group.rank() + 1) % len(ranks)]
        self.before = ranks[group.rank() - 1]
        self.group = group
        self.tag = tag

    def start(self, x: Tensor) -> None:
        self.sent = x.contiguous()
        self.received = torch.empty_like(self.sent)
        ops = [
            dist.P2POp(dist.isend, self.sent, self.next, self.group, self.tag),
            dist.P2POp(dist.irecv, self.received, self.before, self.group, self.tag),
        ]
        self.works = dist.batch_isend_irecv(ops)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        self.sent = None
        return self.received


def around(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """(rank, its keys and values) for all N ranks, this one first. While the caller computes with
    one, the next is on its way. kv: of this rank, [2, b, a_kv, s/N, d]"""
    ring = Ring(group, tag=0)
    n = group.size()
    for step in range(n):
        if step < n - 1:
            ring.start(kv)
        yield (group.rank() - step) % n, kv
        if step < n - 1:
            kv = ring.wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, blocks: Blocks):
        for source, kv in around(torch.stack((k, v)), blocks.group):
            block = blocks.meeting(source, q)
            rows = block.queries
            k_part, v_part = (repeat(x, q.shape[1]) for x in kv[..., block.keys, :])
            part, part_sum = attend(q[:, :, rows], k_part, v_part, block)
            if source == blocks.rank:
                # the first: all queries
                o, log_sum = part.to(wide(q.dtype)), part_sum
            else:
                merged = merge(o[:, :, rows], log_sum[:, :, rows], part, part_sum)
                o[:, :, rows], log_sum[:, :, rows] = merged
        ctx.blocks = blocks
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, log_sum)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, o, log_sum = ctx.saved_tensors
        blocks = ctx.blocks
        # for what is found about keys and values of other ranks
        home = Ring(blocks.group, tag=1)
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        for step, (source, kv) in enumerate(around(torch.stack((k, v)), blocks.group)):
            block = blocks.meeting(source, q)
            of_queries = [x[:, :, block.queries] for x in (q, o, log_sum, grad)]
            dq_part, dkv = through(block, kv, *of_queries)
            dq[:, :, block.queries] += dq_part
            if step == 0:
                own = dkv
                continue
            # what the ranks before have found for these keys
            found = home.wait() if step > 1 else torch.zeros_like(own)
            found[..., block.keys, :] += dkv
            home.start(found)
        dk, dv = own.add_(home.wait())
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def through(block: Block, kv: Tensor, q, o, log_sum, grad) -> tuple[Tensor, Tensor]:
    """(∂q of these queries, [∂k, ∂v] of the keys of `block`, in at least 32 bits)"""
    k, v = (repeat(x, q.shape[1]) for x in kv[..., block.keys, :])
    dq, dk, dv = attend_backward(q, k, v, o, log_sum, grad, block)
    dkv = torch.stack((dk, dv)).to(wide(kv.dtype))  # [2, b, a, n, d]
    if dkv.shape[2] > kv.shape[2]:
        # heads that share a key: [2, b, a_kv, a / a_kv, n, d]
        dkv = dkv.unflatten(2, (kv.shape[2], -1)).sum(3)
    return dq, dkv


class RingAttention(nn.Module):
    """In the place of gpt.FusedAttention or gpt.ExplicitAttention. q: [b, a, s/N, d]; k, v:
    [b, a_kv, s/N, d]; context.documents: [b, s], of the whole sequence -> [b, s/N, ad]"""

    def __init__(self, group: dist.ProcessGroup, inner: nn.Module | None = None):
        """inner: the attention of one device, in whose place this is."""
        super().__init__()
        self.group = group
        self.inner = inner
        self.dropout: Dropout | None = getattr(inner, "dropout", None)

    @compiling.left_out
    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        blocks = Blocks(self, context, q.shape[2] * self.group.size())
        return _RingAttention.apply(q, k, v, blocks).transpose(1, 2).flatten(2)
