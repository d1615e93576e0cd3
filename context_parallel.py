r"""Context parallelism: one long sequence over many ranks.

Activations grow with the sequence. Here each of N ranks keeps 1/N of the tokens of every sequence,
in all layers. Norms, MLPs and linear layers work on each token alone, so they do not change.
Attention does: a query needs the keys and values of all earlier tokens, on any rank.

Under a causal mask late tokens need more work than early ones. So a sequence is cut into 2N pieces,
and rank r has piece r and piece 2N - 1 - r (zigzag):

    N = 2     keys   0    1    2    3
    query  0         \    .    .    .     rank 0      \  causal: half of a block's work
           1         #    \    .    .     rank 1      #  all of it
           2         #    #    \    .     rank 1      .  nothing
           3         #    #    #    \     rank 0      each rank has 3 # and 2 \

Cut in order, rank 0 would have queries 0 and 1: one # and two \; rank 1 five # and two \.

Two types of attention over these ranks:

    ring          keys and values travel round; each rank adds their part to its queries' results
    all-to-all    each rank gets all tokens of some heads, [b, a, s/N, d] -> [b, a/N, s, d], runs
                  one device's attention, and gives the results back (Ulysses, arXiv 2309.14509)

    bytes that a rank sends in a layer's forward; k = a_kv / a, x bytes a number
    ring          2 k (N - 1) b s h x / N            keys and values, N - 1 times
    all-to-all    (2 + 2 k) (N - 1) b s h x / N²     queries, keys, values, and the result

    and in backward; y = max(x, 4), for gradients are summed in at least 32 bits
    ring          2 k (N - 1) (x + y) b s h / N      keys and values again, and their gradients
    all-to-all    as in forward                      gradients, the other way

Position embeddings, rotary angles, dropout masks and document masks depend on the position of a
token in the whole sequence. The ranks hold the same weights, and their gradients are summed like
those of data-parallel ranks, over dp times cp ranks.

    python -m course.context_parallel
    torchrun --nproc-per-node 2 train.py --cp 2
    picture: docs/figures/ranks_context.svg

Sliding windows and ALiBi (families.py) depend on the distance of two tokens. A ring's blocks know
the positions of their queries and keys, and leave out what a window hides; its keys still travel
all the way round. After an exchange a rank has whole sequences, and needs the slopes of its heads.

Not covered: keys that stay on a node while queries travel, or travel only as far as a window;
kernels for a document mask (packing), a window, ALiBi or dropout, whose blocks of s/N queries by
s/N keys are written to memory.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
from base import compiling
from base.attention_kernels import Kernel, kernel_for
from base.document_mask import positions_of
from base.dropout import Dropout, dropout_mask
from base.model_config import FieldError, GPTConfig, divisors, multiples_near
from base.ring import Ring, around
from base.rotary import Rotary
from families import LocalBias, local_bias
from gpt import Context
from moe import Routing

# === ring attention ===============================================================================
#
# Keys and values travel round the ranks of a sequence (arXiv 2310.01889).
#
# Each of N ranks has the queries, keys and values of some tokens. Rank r begins with its own keys
# and values, then receives those of rank r - 1, of r - 2, and so on. It computes attention to the
# current ones while it receives the next ones.
#
#     step        0          1          2          3           rank 1 of 4
#     compute     own        rank 0's   rank 3's   rank 2's
#     receive     rank 0's   rank 3's   rank 2's
#
# Softmax needs the sum over all keys. Partial results over different keys K merge exactly, if each
# keeps the logarithm L of its sum:
#
#     o_K = softmax over K alone, times v       L_K = log Σ_(j in K) exp(q k_j / √d)
#     L   = log Σ_K exp(L_K)                    o   = Σ_K exp(L_K - L) o_K
#
# Backward goes round again. With L of all keys, each block's probabilities are exp(q k_j / √d - L),
# which give its part of ∂q, ∂k and ∂v (FlashAttention, arXiv 2205.14135, appendix B.2). ∂k and ∂v
# follow k and v, one step behind, and end on their own rank, which adds its own part. So backward
# sends twice as much as forward. The s x s matrix never exists whole.


def own_positions(s: int, rank: int, n: int, device=None) -> Tensor:
    """The positions of a rank's tokens in a sequence of s: pieces `rank` and 2n - 1 - rank of 2n.
    [s/n], ascending."""
    piece = s // (2 * n)
    at = torch.arange(piece, device=device)
    return torch.cat((at + rank * piece, at + (2 * n - 1 - rank) * piece))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


# --- attention to some keys, and its gradient -----------------------------------------------------


class Block(NamedTuple):
    """The queries of this rank that attend to keys of another, and their masks."""

    queries: slice  # of the query rows
    keys: slice  # of the key rows
    causal: bool  # query i sees only keys 0 .. i
    # [b, 1, m, n], true where a query sees a key; None: `causal` decides.
    visible: Tensor | None
    # [b, a, m, n], true where dropout removes a probability; the others are divided by `keep`.
    dropped: Tensor | None
    keep: float
    # [1, 1 or a, m, n], what ALiBi and a sliding window add to the scores.
    bias: Tensor | None = None


def probabilities(q: Tensor, k: Tensor, block: Block, log_sum: Tensor | None = None):
    """(exp(q kᵀ / √d - L), L). log_sum: L of all keys; None: that of these keys is computed.
    q: [b, a, m, d]; k: [b, a, n, d] -> [b, a, m, n] and [b, a, m, 1]"""
    scores = (q @ k.transpose(2, 3)).to(wide(q.dtype)) * q.shape[-1] ** -0.5
    if block.bias is not None:
        scores = scores + block.bias
    if block.visible is not None:
        scores = scores.masked_fill(~block.visible, -torch.inf)
    elif block.causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
    if log_sum is None:
        log_sum = scores.logsumexp(-1, keepdim=True)
    # A query that sees none of these keys has log_sum -inf; the clamp makes its row 0, not exp(-inf
    # + inf).
    return (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)).exp(), log_sum


def drop(p: Tensor, block: Block) -> Tensor:
    return p if block.dropped is None else p.masked_fill(block.dropped, 0.0) / block.keep


def kernel_of(block: Block, q: Tensor, k: Tensor) -> Kernel | None:
    """The kernel for this block; None if it is computed by tensor operations."""
    is_plain = block.visible is None and block.dropped is None and block.bias is None
    return kernel_for(q, k) if is_plain else None


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Attention to these keys alone: (o [b, a, m, d], L [b, a, m, 1])"""
    if kernel := kernel_of(block, q, k):
        return kernel.forward(q, k, v, block.causal)
    p, log_sum = probabilities(q, k, block)
    return drop(p, block).to(v.dtype) @ v, log_sum


def attend_backward(q, k, v, o, log_sum, grad, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """(∂q, ∂k, ∂v) through these keys. o, log_sum: over all keys; grad: ∂o, [b, a, m, d]."""
    if kernel := kernel_of(block, q, k):
        return kernel.backward(grad, q, k, v, o, log_sum, block.causal)
    p, _ = probabilities(q, k, block, log_sum)
    dp = drop((grad @ v.transpose(2, 3)).to(p.dtype), block)
    # [b, a, m, 1]: softmax over all keys subtracts Σ_j p_j ∂p_j = o ∂o.
    delta = (o.to(p.dtype) * grad).sum(-1, keepdim=True)
    ds = (p * (dp - delta) * q.shape[-1] ** -0.5).to(q.dtype)
    return ds @ k, ds.transpose(2, 3) @ q, drop(p, block).to(q.dtype).transpose(2, 3) @ grad


def merge(o: Tensor, log_sum: Tensor, more_o: Tensor, more_log_sum: Tensor):
    """Merge two partial results over different keys into one, (o, L)."""
    total = torch.logaddexp(log_sum, more_log_sum)
    return o * (log_sum - total).exp() + more_o * (more_log_sum - total).exp(), total


# --- blocks of queries and keys -------------------------------------------------------------------


class Blocks:
    """Makes the Block of this rank's queries and the keys of each rank. context.documents: [b, s],
    of the whole sequence."""

    def __init__(self, core: "RingAttention", context: Context, s: int):
        self.group, self.local, self.s = core.group, core.local, s
        self.rank, self.n = core.group.rank(), core.group.size()
        self.drop_key, self.documents = context.drop_key, context.documents
        drops = self.drop_key is not None and core.dropout is not None and core.dropout.p > 0
        self.dropout = core.dropout if drops else None

    def meeting(self, source: int, q: Tensor) -> Block:
        """The Block of this rank's queries q, [b, a, s/N, d], and the keys of rank `source`.

        The first halves of the ranks' tokens are in the ranks' order, the second halves in reverse.
        So if `source` is a lower rank, all queries see the first half of its keys. If it is a
        higher rank, the second half of the queries sees all its keys.
        """
        half = q.shape[2] // 2
        queries = slice(half if source > self.rank else 0, 2 * half)
        keys = slice(half if source < self.rank else 2 * half)
        if self.local and self.local.window:
            queries, keys = self.within_window(source, queries, keys)
        at_q = own_positions(self.s, self.rank, self.n, q.device)[queries]
        at_k = own_positions(self.s, source, self.n, q.device)[keys]
        visible, dropped, keep, bias = None, None, 1.0, None
        if self.local:
            bias = self.local.between(at_q.unsqueeze(0), at_k.unsqueeze(0), q)
        if self.documents is not None:
            same = self.documents[:, at_q].unsqueeze(2) == self.documents[:, at_k].unsqueeze(1)
            visible = (same & (at_k <= at_q.unsqueeze(1))).unsqueeze(1)  # [b, 1, m, n]
        if self.dropout is not None:
            heads = self.dropout.shard_index.get(1, 0) * q.shape[1]
            shape = (*q.shape[:2], len(at_q), len(at_k))
            start = {1: heads, 2: at_q, 3: at_k}
            site, keep = self.dropout.site, 1 - self.dropout.p
            dropped = dropout_mask(self.drop_key, site, shape, start, self.dropout.p)
        return Block(queries, keys, source == self.rank, visible, dropped, keep, bias)

    def within_window(self, source: int, queries: slice, keys: slice) -> tuple[slice, slice]:
        """Without the last queries, which see none of these keys, and the first keys, which none
        of the queries sees. Both are empty if the window is over before."""
        # On the CPU: the host needs the sizes.
        at_q = own_positions(self.s, self.rank, self.n, "cpu")[queries]
        at_k = own_positions(self.s, source, self.n, "cpu")[keys]
        num_queries = int((at_q < at_k[-1] + self.local.window).sum())
        num_keys = int((at_k > at_q[0] - self.local.window).sum())
        queries = slice(queries.start, queries.start + num_queries)
        return queries, slice(keys.stop - num_keys, keys.stop)


def repeat(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: query heads share one key head. [b, a_kv, n, d] -> [b, a, n, d]"""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# --- the ring -------------------------------------------------------------------------------------


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, blocks: Blocks):
        o = log_sum = None
        # kv: of a rank, [2, b, a_kv, s/N, d]
        for source, kv in around(torch.stack((k, v)), Ring(blocks.group)):
            block = blocks.meeting(source, q)
            rows = block.queries
            k_part, v_part = (repeat(x, q.shape[1]) for x in kv[..., block.keys, :])
            part, part_sum = attend(q[:, :, rows], k_part, v_part, block)
            if o is None:
                # This rank's own block comes first, and has all queries.
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
        # This ring carries the gradients of other ranks' keys and values.
        home = Ring(blocks.group, tag=1)
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        for step, (source, kv) in enumerate(around(torch.stack((k, v)), Ring(blocks.group))):
            block = blocks.meeting(source, q)
            of_queries = [x[:, :, block.queries] for x in (q, o, log_sum, grad)]
            dq_part, dkv = through(block, kv, *of_queries)
            dq[:, :, block.queries] += dq_part
            if step == 0:
                own = dkv
                continue
            # The sum that earlier ranks have computed for these keys.
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
        # [2, b, a_kv, a / a_kv, n, d]: the heads that share a key head are summed.
        dkv = dkv.unflatten(2, (kv.shape[2], -1)).sum(3)
    return dq, dkv


class RingAttention(nn.Module):
    """Replaces gpt.FusedAttention or gpt.ExplicitAttention. q: [b, a, s/N, d]; k, v:
    [b, a_kv, s/N, d]; context.documents: [b, s], of the whole sequence -> [b, s/N, ad]"""

    def __init__(self, group: dist.ProcessGroup, inner: nn.Module | None = None):
        """inner: the replaced attention of one device, or only its LocalBias."""
        super().__init__()
        self.group = group
        self.inner = inner
        self.local = local_bias(inner) if inner else None
        self.dropout: Dropout | None = getattr(inner, "dropout", None)

    @compiling.left_out
    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        blocks = Blocks(self, context, q.shape[2] * self.group.size())
        size = v.shape[-1]
        if size < k.shape[-1]:
            # Latent attention: keys and values travel as one tensor, and zeros fill it up.
            v = F.pad(v, (0, k.shape[-1] - size))
        return _RingAttention.apply(q, k, v, blocks)[..., :size].transpose(1, 2).flatten(2)


# === context parallelism ==========================================================================

# --- the tokens of a rank -------------------------------------------------------------------------


def coordinates(
    group: dist.ProcessGroup, sequence_shards: int, size: int, n: int, device=None
) -> Tensor:
    """The positions of this rank's tokens, or of their n-th shard under sequence parallelism, which
    cuts them into `sequence_shards` shards of `size` tokens. [size]"""
    own = own_positions(size * sequence_shards * group.size(), group.rank(), group.size(), device)
    return own[n * size : (n + 1) * size]


def shard(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's tokens. x: s in dimension `dim` -> s/N"""
    pieces = x.chunk(2 * group.size(), dim)
    return torch.cat((pieces[group.rank()], pieces[2 * group.size() - 1 - group.rank()]), dim)


def gather(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """The reverse of `shard`, without a gradient: all tokens, on every rank. s/N -> s"""
    shards = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(shards, x.contiguous(), group=group)
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([first for first, _ in halves] + [last for _, last in halves[::-1]], dim)


def shard_batch(batch, group: dist.ProcessGroup):
    """This rank's part of a data.Batch. `documents` stays whole."""
    parts = {}
    for name in ("tokens", "targets", "loss_mask", "real", "types"):
        whole = getattr(batch, name, None)
        if whole is not None:
            parts[name] = shard(whole, group)
    return batch._replace(**parts)


# --- all-to-all -----------------------------------------------------------------------------------


def exchange(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    """Cut x along `split`, send the n-th part to rank n, and join the received parts along
    `join`."""
    parts = torch.stack(x.chunk(group.size(), split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(0), join)


class _AllToAll(torch.autograd.Function):
    """`exchange`, whose adjoint is `exchange` with split and join swapped."""

    @staticmethod
    def forward(ctx, x, group, split, join):
        ctx.arguments = group, join, split
        return exchange(x, group, split, join)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return exchange(grad, *ctx.arguments), None, None, None


class AllToAllAttention(nn.Module):
    """Runs the attention of one device, `inner`, on all tokens of some heads. Shapes as in
    RingAttention."""

    def __init__(self, group: dist.ProcessGroup, inner: nn.Module):
        super().__init__()
        self.group = group
        self.inner = inner

    @compiling.left_out
    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: gpt.Context) -> Tensor:
        n = self.group.size()
        s = q.shape[2] * n
        # order[i] is the position of the i-th token, where ranks follow one another.
        order = torch.cat([own_positions(s, rank, n, q.device) for rank in range(n)])
        ascending = order.argsort()
        q, k, v = (_AllToAll.apply(x, self.group, 1, 2)[:, :, ascending] for x in (q, k, v))
        y = self.inner(q, k, v, context)  # [b, s, ad / N]
        return _AllToAll.apply(y[:, order], self.group, 1, 2)


# --- positions ------------------------------------------------------------------------------------


class OwnPositions(nn.Module):
    """Adds a vector for each of this rank's positions. x: [b, s/N, h]"""

    is_lookup = True

    def __init__(self, positions: nn.Module, group: dist.ProcessGroup, sequence_shards: int):
        super().__init__()
        # The weight is assigned first, so that it keeps its global name.
        self.weight = positions.weight
        self.inner = positions
        self.group = group
        self.sequence_shards = sequence_shards

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        n = getattr(self.inner, "n", 0)
        at = coordinates(self.group, self.sequence_shards, x.shape[1], n, x.device)
        if documents is not None:
            at = positions_of(documents)[:, at]
        return x + F.embedding(at, self.weight)


class OwnRotary(Rotary):
    """Rotates with this rank's rows of the whole sequence's table."""

    def __init__(self, inner: Rotary, group: dist.ProcessGroup):
        super().__init__()
        self.inner = inner
        self.group = group

    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(q, k, tuple(shard(x, self.group, -2) for x in table))


class OwnHeads(LocalBias):
    """The bias of those of ALiBi's heads that an exchange gives to this rank."""

    def __init__(self, inner: LocalBias, group: dist.ProcessGroup):
        nn.Module.__init__(self)
        self.inner = inner
        self.window, self.slopes = inner.window, inner.slopes
        self.shard_heads(group)


# --- check and apply ------------------------------------------------------------------------------

COMM_TYPES = ("ring", "all-to-all")


def check(config: GPTConfig, n: int, t: int, kind: str) -> None:
    """Raises FieldError if n ranks cannot share a sequence. t: tensor-parallel ranks."""
    if n == 1:
        return
    if kind == "ring" and not config.causal:
        raise FieldError("cp_kind", kind, "needs a causal mask", "all-to-all")
    s = config.seq_length
    if s % (2 * n):
        rule = "must be divisible by twice {cp}: the sequence is cut into so many pieces"
        raise FieldError("seq_length", s, rule, multiples_near(s, 2 * n), cp=n)
    for field in ("num_heads", "num_kv_heads"):
        heads = max(1, getattr(config, field) // t)
        if kind == "all-to-all" and heads % n:
            rule = f"must divide {{{field}}} over {{tp}} where heads are exchanged ({{cp_kind}})"
            others = {field: getattr(config, field), "tp": t, "cp_kind": kind}
            raise FieldError("cp", n, rule, divisors(heads, n), **others)


def apply(
    model: gpt.GPT, group: dist.ProcessGroup | None, kind: str, sequence_shards: int = 1
) -> None:
    """Make a model or pipeline stage work on this rank's tokens, in place; without a group, do
    nothing. context.documents stays that of the whole sequence. sequence_shards: the shards into
    which sequence parallelism cuts this rank's tokens. Call it after tensor and sequence
    parallelism and adapters."""
    if group is None:
        return
    # The table of rotary angles covers the whole sequence.
    model.run_blocks = partial(run_blocks_of_all, model.run_blocks, group.size())
    for module in model.modules():
        if isinstance(module, Dropout):
            # x is [b, s/N, ..]; sequence parallelism may shard dimension 1 again.
            shards = sequence_shards if 1 in module.shard_index else 1
            module.coordinates = partial(coordinates, group, shards)
        elif isinstance(module, Routing):
            module.sequence_group = group
            module.gather, module.shard = partial(gather, group=group), partial(shard, group=group)
    if model.embedding is not None and model.embedding.positions is not None:
        positions = model.embedding.positions
        model.embedding.positions = OwnPositions(positions, group, sequence_shards)
    for block in model.blocks.values():
        attention = block.attention
        attention.rotary = OwnRotary(attention.rotary, group)
        attention.core = make_core(attention.core, group, kind)


def run_blocks_of_all(run_blocks, n: int, x: Tensor, s: int, *rest) -> Tensor:
    """gpt.GPT.run_blocks on one of n ranks. s: the number of its tokens."""
    return run_blocks(x, s * n, *rest)


def make_core(core: nn.Module, group: dist.ProcessGroup, kind: str) -> nn.Module:
    """The attention that replaces one device's `core`."""
    dropout = getattr(core, "dropout", None)
    if dropout is not None:
        # This mask has coordinates of probabilities [b, a, s, s], not of tokens.
        dropout.coordinates = None
    if kind == "ring":
        return RingAttention(group, core)
    if dropout is not None:
        heads = dropout.shard_index.get(1, 0) * group.size() + group.rank()
        dropout.shard_index[1] = heads
    for parent in list(core.modules()):
        if isinstance(getattr(parent, "local", None), LocalBias):
            parent.local = OwnHeads(parent.local, group)
    return AllToAllAttention(group, core)


# What `apply` puts in the place of a module of one device, which stays in it as `inner`.
OWN = OwnPositions | OwnRotary | OwnHeads | RingAttention | AllToAllAttention


@contextlib.contextmanager
def whole_sequences(models: list[gpt.GPT]) -> Iterator[None]:
    """A context in which the models work on whole sequences, without dropout, as on one device: for
    generation during training. Models that are not context parallel do not change."""
    changed = []
    for model in models:
        if isinstance(model.run_blocks, partial):
            changed.append((model, "run_blocks", model.run_blocks, model.run_blocks.args[0]))
        for parent in model.modules():
            for name, child in parent.named_children():
                if isinstance(child, OWN):
                    changed.append((parent, name, child, child.inner))
    try:
        for owner, name, _, of_one_device in changed:
            setattr(owner, name, of_one_device)
        yield
    finally:
        for owner, name, own, _ in changed:
            setattr(owner, name, own)
