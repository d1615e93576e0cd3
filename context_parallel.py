r"""Context parallelism: one long sequence over many ranks.

Activations grow with the sequence. Here each of N ranks keeps 1/N of the tokens of every sequence,
in all layers. Norms, MLPs and linear layers work on each token alone, so they need nothing new.
Attention does: a query sees the keys and values of all earlier tokens, wherever they are.

A causal mask makes late tokens more work than early ones. So a sequence is cut into 2N pieces, and
rank r has piece r and piece 2N - 1 - r (zigzag):

    N = 2     keys   0    1    2    3
    query  0         \    .    .    .     rank 0      \  causal: half of a block's work
           1         #    \    .    .     rank 1      #  all of it
           2         #    #    \    .     rank 1      .  nothing
           3         #    #    #    \     rank 0      each rank has 3 # and 2 \

Cut in order, rank 0 would have queries 0 and 1: one # and two \; rank 1 five # and two \.

Two kinds of attention over these ranks:

    ring          keys and values travel round; each rank computes what they add to its queries
                  (attention/ring_attention.py)
    all-to-all    each rank gets all tokens of some heads, [b, a, s/N, d] -> [b, a/N, s, d], runs
                  one device's attention, and gives the results back (Ulysses, arXiv 2309.14509)

    bytes that a rank sends in a layer's forward; k = a_kv / a, x bytes a number
    ring          2 k (N - 1) b s h x / N            keys and values, N - 1 times
    all-to-all    (2 + 2 k) (N - 1) b s h x / N²     queries, keys, values, and the result

    and in backward; y = max(x, 4), for gradients are summed in at least 32 bits
    ring          2 k (N - 1) (x + y) b s h / N      keys and values again, and their gradients
    all-to-all    as in forward                      gradients, the other way

All else goes by the position of a token in the whole sequence: position embeddings, rotary angles,
dropout masks, document masks. The ranks hold the same weights, and their gradients are summed as
those of data-parallel ranks are: over dp times cp ranks.

    python context_parallel.py
    torchrun --nproc-per-node 2 train.py --cp 2
    picture: figures/ranks_context.svg

Not covered: keys that stay on a node while queries travel; pieces for sliding windows.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("context_parallel")

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
from attention.document_mask import positions_of
from attention.ring_attention import RingAttention, own_positions
from attention.rotary import Rotary
from base import compiling
from dropout import Dropout
from model_config import FieldError, GPTConfig, divisors
from routers import Routing

# --- who has which tokens -------------------------------------------------------------------------


def coordinates(
    group: dist.ProcessGroup, sequence_shards: int, size: int, n: int, device=None
) -> Tensor:
    """The positions in the n-th of `sequence_shards` shards, of `size` tokens each, of this rank's
    tokens (sequence parallelism). [size]"""
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
    """This rank's part of a data.Batch. documents stay whole."""
    parts = {}
    for name in ("tokens", "targets", "loss_mask", "real"):
        whole = getattr(batch, name)
        parts[name] = None if whole is None else shard(whole, group)
    return batch._replace(**parts)


# --- all-to-all -----------------------------------------------------------------------------------


def exchange(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    """Cut x along `split`, give the n-th part to rank n, and join what comes along `join`."""
    parts = torch.stack(x.chunk(group.size(), split))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(0), join)


class _AllToAll(torch.autograd.Function):
    """Its adjoint is the same with split and join changed over."""

    @staticmethod
    def forward(ctx, x, group, split, join):
        ctx.arguments = group, join, split
        return exchange(x, group, split, join)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return exchange(grad, *ctx.arguments), None, None, None


class AllToAllAttention(nn.Module):
    """Attention to all tokens, by the attention `inner` of one device on a part of the heads. As
    ring_attention.RingAttention."""

    def __init__(self, group: dist.ProcessGroup, inner: nn.Module):
        super().__init__()
        self.group = group
        self.inner = inner

    @compiling.left_out
    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: gpt.Context) -> Tensor:
        n = self.group.size()
        s = q.shape[2] * n
        # where each token of the ranks' tokens, one rank after the other, belongs
        order = torch.cat([own_positions(s, rank, n, q.device) for rank in range(n)])
        ascending = order.argsort()
        q, k, v = (_AllToAll.apply(x, self.group, 1, 2)[:, :, ascending] for x in (q, k, v))
        y = self.inner(q, k, v, context)  # [b, s, ad / N]
        return _AllToAll.apply(y[:, order], self.group, 1, 2)


# --- positions ------------------------------------------------------------------------------------


class OwnPositions(nn.Module):
    """x + a vector for each of this rank's positions. x: [b, s/N, h]"""

    def __init__(self, positions: nn.Module, group: dist.ProcessGroup, sequence_shards: int):
        super().__init__()
        # first, so that the weight keeps its global name
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


# --- in a model -----------------------------------------------------------------------------------

KINDS = ("ring", "all-to-all")


def check(config: GPTConfig, n: int, t: int, kind: str) -> None:
    """Raises FieldError where n ranks cannot share a sequence; t: of tensor parallelism."""
    if n == 1:
        return
    check_attention(config, n)
    s = config.seq_length
    if s % (2 * n):
        low = s // (2 * n) * 2 * n
        fits = f"{low} or {low + 2 * n}" if low else 2 * n
        rule = "must be divisible by twice {cp}: the sequence is cut into so many pieces"
        raise FieldError("seq_length", s, rule, fits, cp=n)
    for field in ("num_heads", "num_kv_heads"):
        heads = getattr(config, field) // t
        if kind == "all-to-all" and heads % n:
            rule = f"must divide {{{field}}} over {{tp}} where heads are exchanged ({{cp_kind}})"
            others = {field: getattr(config, field), "tp": t, "cp_kind": kind}
            raise FieldError("cp", n, rule, divisors(heads, n), **others)


def check_attention(config: GPTConfig, n: int) -> None:
    """Raises FieldError where n ranks do not compute what this model's tokens attend to."""
    if n > 1 and (config.positions == "alibi" or config.sliding_window):
        what = "ALiBi" if config.positions == "alibi" else "a sliding window"
        raise FieldError("cp", n, f"a model with {what} cannot share its sequences", 1)


def apply(
    model: gpt.GPT, group: dist.ProcessGroup | None, kind: str, sequence_shards: int = 1
) -> None:
    """Let a model, or a stage of one, work on this rank's tokens, in place; without a group, leave
    it as it is. documents, where there are any, stay those of the whole sequence. sequence_shards:
    of sequence parallelism, which cuts this rank's tokens again. After tensor and sequence
    parallelism and adapters."""
    if group is None:
        return
    # the table of rotary angles is that of the whole sequence
    model.run_blocks = partial(run_blocks_of_all, model.run_blocks, group.size())
    for module in model.modules():
        if isinstance(module, Dropout):
            # x [b, s/N, ..], of which sequence parallelism may have cut dimension 1 again
            shards = sequence_shards if 1 in module.shard_index else 1
            module.coordinates = partial(coordinates, group, shards)
        elif isinstance(module, Routing):
            module.sequence_group = group
    if model.embedding is not None and model.embedding.positions is not None:
        positions = model.embedding.positions
        model.embedding.positions = OwnPositions(positions, group, sequence_shards)
    for block in model.blocks.values():
        attention = block.attention
        attention.rotary = OwnRotary(attention.rotary, group)
        attention.core = make_core(attention.core, group, kind)


def run_blocks_of_all(run_blocks, n: int, x: Tensor, s: int, *rest) -> Tensor:
    """gpt.GPT.run_blocks for one of n ranks. s: of its tokens."""
    return run_blocks(x, s * n, *rest)


def make_core(core: nn.Module, group: dist.ProcessGroup, kind: str) -> nn.Module:
    """What attends in the place of one device's `core`."""
    dropout = getattr(core, "dropout", None)
    if dropout is not None:
        # this mask is of probabilities [b, a, s, s], not of tokens
        dropout.coordinates = None
    if kind == "ring":
        return RingAttention(group, core)
    if dropout is not None:
        heads = dropout.shard_index.get(1, 0) * group.size() + group.rank()
        dropout.shard_index[1] = heads
    return AllToAllAttention(group, core)


@contextlib.contextmanager
def whole_sequences(models: list[gpt.GPT]) -> Iterator[None]:
    """For text generated in the middle of training: inside this context the models work on whole
    sequences, without dropout, as on one device. Of models that are not context parallel nothing
    changes."""
    changed = []
    for model in models:
        if isinstance(model.run_blocks, partial):
            changed.append((model, "run_blocks", model.run_blocks, model.run_blocks.args[0]))
        for parent in model.modules():
            for name, child in parent.named_children():
                if isinstance(child, OwnPositions | OwnRotary | RingAttention | AllToAllAttention):
                    changed.append((parent, name, child, child.inner))
    try:
        for owner, name, _, of_one_device in changed:
            setattr(owner, name, of_one_device)
        yield
    finally:
        for owner, name, own, _ in changed:
            setattr(owner, name, own)
