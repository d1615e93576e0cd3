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
travel one step behind k and v, and end at home, where the part of the own queries has waited for
them. So backward sends twice what forward sends. The s x s matrix never exists whole.

    python ring_attention.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dropout import Dropout, dropout_mask


def own_positions(s: int, rank: int, n: int, device=None) -> Tensor:
    """Positions of this rank's tokens in a sequence of s, [s/n], ascending."""
    piece = s // (2 * n)
    at = torch.arange(piece, device=device)
    return torch.cat((at + rank * piece, at + (2 * n - 1 - rank) * piece))


# --- attention to some keys, and its gradient -----------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropped: Tensor | None, keep: float
):
    """(o, L) over these keys alone. q: [b, a, m, d]; k, v: [b, a, n, d]; mask: true where a query
    sees a key, [m, n] or [b, 1, m, n], None for all; dropped: [b, a, m, n] true where dropout
    removes a probability, the others are divided by `keep`. o: [b, a, m, d], L: [b, a, m, 1]."""
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    log_sum = scores.logsumexp(-1, keepdim=True)
    # a query that sees none of these keys: 0, not exp(-inf + inf)
    p = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)).exp()
    if dropped is not None:
        p = p.masked_fill(dropped, 0.0) / keep
    return p @ v, log_sum


def attend_backward(q, k, v, mask, dropped, keep, log_sum, grad, delta):
    """(∂q, ∂k, ∂v) through these keys. log_sum: over all keys; grad: ∂o; delta: Σ o ∂o of each
    query, [b, a, m, 1]."""
    scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = (scores - log_sum).exp()
    dp = grad @ v.transpose(2, 3)
    kept = p
    if dropped is not None:
        kept = p.masked_fill(dropped, 0.0) / keep
        dp = dp.masked_fill(dropped, 0.0) / keep
    ds = p * (dp - delta) * scale
    return ds @ k, ds.transpose(2, 3) @ q, kept.transpose(2, 3) @ grad


def merge(o: Tensor, log_sum: Tensor, more_o: Tensor, more_log_sum: Tensor):
    """Two partial results over different keys as one."""
    total = torch.logaddexp(log_sum, more_log_sum)
    return o * (log_sum - total).exp() + more_o * (more_log_sum - total).exp(), total


# --- the ring -------------------------------------------------------------------------------------


class Ring:
    """Tensors that go to the next rank and come from the one before, while something computes."""

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


class Blocks:
    """Attention of this rank's queries to the keys of one rank after the other: which of them see
    which, and what dropout removes."""

    def __init__(self, core: "RingAttention", drop_key, documents: Tensor | None, s: int):
        self.core = core
        self.drop_key = drop_key
        self.documents = documents
        self.rank, self.n = core.group.rank(), core.group.size()
        self.s = s

    def parts(self, source: int, m: int) -> tuple[slice, slice]:
        """Which of the m own queries, and which of the m keys of `source`, meet."""
        if source < self.rank:
            return slice(0, m), slice(0, m // 2)
        return slice(m // 2 if source > self.rank else 0, m), slice(0, m)

    def mask(self, source: int, qs: slice, ks: slice, device) -> Tensor | None:
        """True where a query sees a key; None where all see all."""
        at_q = own_positions(self.s, self.rank, self.n, device)[qs]
        at_k = own_positions(self.s, source, self.n, device)[ks]
        if self.documents is not None:
            same = self.documents[:, at_q].unsqueeze(2) == self.documents[:, at_k].unsqueeze(1)
            return (same & (at_k <= at_q.unsqueeze(1))).unsqueeze(1)
        return at_k <= at_q.unsqueeze(1) if source == self.rank else None

    def dropped(self, source: int, qs: slice, ks: slice, q: Tensor) -> Tensor | None:
        dropout = self.core.dropout
        if dropout is None or self.drop_key is None or dropout.p == 0:
            return None
        at_q = own_positions(self.s, self.rank, self.n, q.device)[qs]
        at_k = own_positions(self.s, source, self.n, q.device)[ks]
        heads = dropout.shard_index.get(1, 0) * q.shape[1]
        shape = (*q.shape[:2], len(at_q), len(at_k))
        return dropout_mask(
            self.drop_key, dropout.site, shape, {1: heads, 2: at_q, 3: at_k}, dropout.p
        )

    def forward(self, source: int, q: Tensor, kv: Tensor):
        """(queries that saw something, o, L)"""
        qs, ks = self.parts(source, q.shape[2])
        k, v = (repeat(x, q.shape[1]) for x in kv[..., ks, :])
        q = q[:, :, qs]
        dropped = self.dropped(source, qs, ks, q)
        if self.is_plain(q, dropped):
            causal = source == self.rank
            o, log_sum = FLASH(q, k, v, 0.0, causal)
            return qs, o, log_sum.unsqueeze(-1)
        mask = self.mask(source, qs, ks, q.device)
        return qs, *attend(q, k, v, mask, dropped, self.keep)

    def backward(self, source: int, q, kv, o, log_sum, grad, delta):
        """(queries, their ∂q, keys, their [∂k, ∂v])"""
        qs, ks = self.parts(source, q.shape[2])
        k, v = (repeat(x, q.shape[1]) for x in kv[..., ks, :])
        q, o, log_sum, grad, delta = (x[:, :, qs] for x in (q, o, log_sum, grad, delta))
        dropped = self.dropped(source, qs, ks, q)
        if self.is_plain(q, dropped):
            causal = source == self.rank
            dq, dk, dv = FLASH_BACKWARD(
                grad, q, k, v, o, log_sum.squeeze(-1).contiguous(), 0.0, causal
            )
        else:
            mask = self.mask(source, qs, ks, q.device)
            dq, dk, dv = attend_backward(q, k, v, mask, dropped, self.keep, log_sum, grad, delta)
        dkv = torch.stack((dk, dv))
        if dkv.shape[2] > kv.shape[2]:
            dkv = dkv.unflatten(2, (kv.shape[2], -1)).sum(3)
        return qs, dq, ks, dkv

    @property
    def keep(self) -> float:
        return 1 - self.core.dropout.p if self.core.dropout else 1.0

    def is_plain(self, q: Tensor, dropped: Tensor | None) -> bool:
        """Whether PyTorch's kernel for CPUs computes it."""
        return q.device.type == "cpu" and dropped is None and self.documents is None


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def repeat(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: query heads share one key head. [b, a_kv, n, d] -> [b, a, n, d]"""
    return x if heads == x.shape[1] else x.repeat_interleave(heads // x.shape[1], dim=1)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, blocks: Blocks):
        ring = Ring(blocks.core.group, 0)
        kv = torch.stack((k, v))  # [2, b, a_kv, s/N, d]
        o = log_sum = None
        for step in range(blocks.n):
            if step < blocks.n - 1:
                ring.start(kv)
            source = (blocks.rank - step) % blocks.n
            qs, part, part_sum = blocks.forward(source, q, kv)
            if o is None:
                o, log_sum = part, part_sum
            else:
                merged = merge(o[:, :, qs], log_sum[:, :, qs], part, part_sum)
                o[:, :, qs], log_sum[:, :, qs] = merged
            if step < blocks.n - 1:
                kv = ring.wait()
        ctx.blocks = blocks
        ctx.save_for_backward(q, k, v, o, log_sum)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, o, log_sum = ctx.saved_tensors
        blocks = ctx.blocks
        ring, home = Ring(blocks.core.group, 0), Ring(blocks.core.group, 1)
        delta = (o * grad).sum(-1, keepdim=True)
        kv = torch.stack((k, v))
        dq = torch.zeros_like(q)
        for step in range(blocks.n):
            if step < blocks.n - 1:
                ring.start(kv)
            source = (blocks.rank - step) % blocks.n
            qs, part, ks, dkv = blocks.backward(source, q, kv, o, log_sum, grad, delta)
            dq[:, :, qs] += part
            if step == 0:
                # of the own keys: the other ranks' parts come last
                own = dkv
            else:
                # what the ranks before have found for these keys
                found = home.wait() if step > 1 else torch.zeros_like(kv)
                found[..., ks, :] += dkv
                home.start(found)
            if step < blocks.n - 1:
                kv = ring.wait()
        dk, dv = own.add_(home.wait())
        return dq, dk, dv, None


class RingAttention(nn.Module):
    """In the place of gpt.FusedAttention or gpt.ExplicitAttention. q: [b, a, s/N, d]; k, v:
    [b, a_kv, s/N, d]; documents: [b, s], of the whole sequence -> [b, s/N, ad]"""

    def __init__(self, group: dist.ProcessGroup, dropout: Dropout | None):
        super().__init__()
        self.group = group
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, drop_key, documents=None) -> Tensor:
        blocks = Blocks(self, drop_key, documents, q.shape[2] * self.group.size())
        return _RingAttention.apply(q, k, v, blocks).transpose(1, 2).flatten(2)
