"""The key-value cache: keys and values of earlier tokens are kept, not computed again.

In a causal model the key and the value of a token depend on this token and on those before it. So
they never change once they are computed:

    prefill    q, k, v of all s tokens of the prompt at once, causal, as in training;
               k and v are stored in columns 0 .. s - 1
    decode     q, k, v of the newest token of each sequence; k and v are stored in the column
               of its position, and q attends to the columns up to that one

    column         0 1 2 3 4 5
    sequence 0     a b c d x .         column j is position j in every row;
    sequence 1     e f y . . .         a mask hides what a shorter row has not filled

Of a layer with a sliding window of w tokens (families.py) the cache has w columns at most.
Position p is stored in column p mod w, in the place of the key that has just left the window.

The cache has 2 L a_kv d numbers for each token (a_kv: heads of keys and values). Grouped-query
attention (arXiv 2305.13245) makes it smaller by a / a_kv. Of latent attention (families.py) it has
L (kv_rank + rope_head_dim), on each tensor-parallel rank.

Context parallelism (context_parallel.py) shares a long prefill. Each of N ranks computes 1/N of the
tokens, with ring attention. Their keys and values are gathered, so that every rank has the whole
cache, and decodes all sequences as one device does: a step of one token has nothing to share.

`caching` puts the cache into a finished model from outside, and takes it out again.

    python -m course.generate       a lesson: with the cache and without, bytes, FLOPs

Not covered: a cache in blocks, so that sequences of any length share memory without free columns:
inference/scheduler.py.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import context_parallel
import gpt
from context_parallel import RingAttention, own_positions
from families import LatentAttention, LocalBias, local_bias, window_of
from gpt import GPT, PLAIN, Context

# {window of some layers (0: none): their LocalBias, if they have one}
Windows = dict[int, LocalBias | None]


class Cache:
    """Keys and values of one batch, and where the tokens of the current forward pass belong."""

    def __init__(self, columns: int, group: dist.ProcessGroup | None = None):
        """columns: how many tokens of a sequence it keeps, in a layer with a sliding window at most
        as many as the window has; with 0 nothing is stored, and each forward is a prefill.
        group: the context-parallel ranks that share a prefill."""
        self.columns = columns
        self.group = group
        # Layer -> [b, a_kv, columns, d].
        self.keys: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        # [b], the position of each sequence's newest token; None: prefill
        self.positions: Tensor | None = None
        # Columns that some sequence has filled.
        self.used = 0
        # Window (0: none) -> [b, 1 or a, 1, used], what is added to the scores: -inf for a column
        # that a sequence has not filled. Empty: prefill.
        self.masks: dict[int, Tensor] = {}
        # [b, 1], of a prefill: the position of each sequence's last token
        self.last: Tensor | None = None
        # Captured forward passes over the tensors above (cuda_graphs.Graphs).
        self.graphs = None

    def begin_prefill(self, last: list[int]) -> None:
        """last: the position of each sequence's last token; what follows it is padding."""
        self.positions = None
        self.last = torch.tensor(last).unsqueeze(1)

    def prefill_positions(self, s: int, device: torch.device) -> Tensor:
        """Where the s tokens of this rank stand in a prefill, [s]."""
        if self.group is None:
            return torch.arange(s, device=device)
        n = self.group.size()
        return own_positions(s * n, self.group.rank(), n, device)

    def begin_decode(self, positions: list[int], device: torch.device) -> None:
        """The next forward has one token for each sequence. positions: of these tokens."""
        self.positions = torch.tensor(positions, device=device)
        self.used = min(max(positions) + 1, self.columns)

    def columns_of(self, window: int) -> int:
        """The columns of a layer with this window."""
        return min(self.columns, window or self.columns)

    def update_masks(self, dtype: torch.dtype, locals: Windows) -> None:
        """Hide the columns after each sequence's position: once for a forward pass, for all layers
        with one window."""
        self.masks = {}
        if self.positions is None:
            return
        positions = self.positions.unsqueeze(1)  # [b, 1]
        for window, local in locals.items():
            has_slopes = local is not None and local.slopes is not None
            columns = self.columns_of(window)
            columns = self.positions_in(positions, min(self.used, columns), columns)
            # A column that is not filled has a negative position.
            hidden = (columns < 0)[:, None, None]
            like = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)  # [b, 1, 1, used]
            bias = local.between(positions, columns, like) if has_slopes else like
            self.masks[window] = bias.masked_fill(hidden, -torch.inf)

    def positions_in(self, last: Tensor, used: int, columns: int) -> Tensor:
        """The position of the token in each used column, where the newest token stands at `last`:
        the largest p <= last with p mod columns = column. Negative: the column is not filled yet.
        last: [b, 1] -> [b, used]"""
        column = torch.arange(used, device=last.device)
        return last - (last - column) % columns

    def attend(
        self, layer: str, local: LocalBias | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store k and v, and attend to all tokens so far. local: of families.py; q: [b, a, s, d];
        k, v: [b, a_kv, s, d] -> [b, s, a d]"""
        if self.positions is None:
            return self.attend_prefill(layer, local, q, k, v)
        return self.attend_decode(layer, window_of(local), q, k, v)

    def attend_prefill(
        self, layer: str, local: LocalBias | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Causal attention over the s tokens that come in; [b, a, s/N, d] of N ranks that share
        them."""
        self.store(self.keys, layer, k, window_of(local))
        self.store(self.values, layer, v, window_of(local))
        return self.attend_whole(local, q, k, v)

    def store(self, stored: dict[str, Tensor], layer: str, new: Tensor, window: int) -> None:
        """Keep what a prefill gives. stored: keys or values; new: [b, a_kv, s, d], or this rank's
        part of it"""
        if not self.columns:
            return
        if layer not in stored:
            # Zeros: a hidden column counts 0 times its value, and 0 times NaN is NaN.
            columns = self.columns_of(window)
            stored[layer] = new.new_zeros(*new.shape[:2], columns, new.shape[3])
        if self.group:
            new = context_parallel.gather(new, self.group, dim=2)
        new = self.newest(new, stored[layer].shape[2])
        stored[layer][:, :, : new.shape[2]] = new

    def attend_whole(self, local: LocalBias | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention among the tokens of a prefill."""
        if self.group:
            return RingAttention(self.group, local)(q, k, v, PLAIN)
        bias = local(q) if local else None
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=grouped
        )  # [b, a, s, d]
        return y.transpose(1, 2).flatten(2)

    def newest(self, x: Tensor, columns: int) -> Tensor:
        """What the columns hold after a prefill. x: [b, a_kv, s, d] -> [b, a_kv, columns, d] where
        s is more"""
        if x.shape[2] <= columns:
            return x
        at = self.positions_in(self.last, columns, columns).clamp(min=0).to(x.device)
        return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    def attend_decode(self, layer: str, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one token for each sequence (s = 1) to the columns of the cache."""
        keys = self.keys[layer]
        # Latents are both.
        values = self.values.get(layer, keys)
        # Tokens of one sequence share its row (speculative.py).
        rows = torch.arange(len(k), device=k.device) % len(keys)
        for stored, new in ((keys, k), (values, v)):
            stored[rows, :, self.positions % stored.shape[2]] = new[:, :, 0]
        # Heads that share a key stand where the tokens of a sequence would: [b, a_kv, a / a_kv, d].
        q = q.reshape(*k.shape[:2], -1, k.shape[3])
        mask = self.masks.get(window)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.view(*q.shape[:3], -1)
        keys, values = (x[:, :, : self.used].expand(len(k), -1, -1, -1) for x in (keys, values))
        context = decode_attention(q, keys, values, mask)  # [b, a_kv, a / a_kv, d]
        return context.flatten(1).unsqueeze(1)  # [b, 1, a d]

    @torch.inference_mode()
    def keep(self, rows: list[int], smaller: "Cache") -> None:
        """Copy these rows of the batch into a cache of so many."""
        for stored, target in ((self.keys, smaller.keys), (self.values, smaller.values)):
            for layer, tensor in stored.items():
                # Not into other memory, over which a graph may be captured.
                if layer in target:
                    target[layer].copy_(tensor[rows])
                else:
                    target[layer] = tensor[rows]


def power_of_two(n: int) -> int:
    """The smallest one that is at least n."""
    return 1 << (n - 1).bit_length()


class Caches:
    """Makes caches. Where decoding steps are captured (`keeps`), a cache is used again for other
    texts, with its graphs. Then its numbers of rows and of columns are few different ones."""

    def __init__(self, keeps: bool):
        self.keeps = keeps
        # (rows, columns, group) -> caches that no batch uses now.
        self.free: dict[tuple, list[Cache]] = defaultdict(list)

    def take(self, rows: int, columns: int, group: dist.ProcessGroup | None = None) -> Cache:
        """As Cache; rows: sequences of the batch."""
        free = self.free[rows, columns, group]
        return free.pop() if free else Cache(columns, group)

    def put_back(self, rows: int, cache: Cache) -> None:
        if self.keeps:
            self.free[rows, cache.columns, cache.group].append(cache)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √d + mask) v. On a CPU from 32 heads (of all sequences together) on: one
    batched matmul for all, where torch's kernel calls one for each. q: [b, a, s, d]; k, v:
    [b, a, used, d]; mask: [b, 1, 1, used] or [b, a, s, used]"""
    b, a, s, d = q.shape
    # In 16 bits the matmul would round the scores.
    if q.device.type != "cpu" or q.dtype.itemsize < 4 or b * a < 32:
        return F.scaled_dot_product_attention(q, k, v, mask)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # [b a, .., d]
    scores = torch.bmm(q * d**-0.5, k.transpose(1, 2))  # [b a, s, used]
    if mask is not None:
        scores.view(b, a, s, -1).add_(mask)
    return torch.bmm(scores.softmax(-1), v).view(b, a, s, d)


@dataclass
class CacheSlot:
    """Holds the cache of the batch that goes forward now. The modules of a model look here, so that
    several batches can take turns."""

    cache: Cache | None = None


class CachedAttention(nn.Module):
    """Replaces the core attention of one layer."""

    def __init__(self, layer: str, slot: CacheSlot, local: LocalBias | None):
        super().__init__()
        self.layer = layer
        self.slot = slot
        self.local = local

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, s, a d]"""
        return self.slot.cache.attend(self.layer, self.local, q, k, v)


class CachedLatents(nn.Module):
    """Replaces families.Expanded. The cache keeps [r | c], w numbers of a token, no values. A
    prefill computes keys and values of all heads. A step does not: in the absorbed form (arXiv
    2405.04434, section 2.1.2) all heads share one key.

        q · [r | W_uk c]  =  [q_r | q_k W_uk] · [r | c]          Σ p_j W_uv c_j  =  W_uv Σ p_j c_j
    """

    def __init__(self, layer: str, slot: CacheSlot, local: LocalBias | None):
        super().__init__()
        self.layer, self.slot, self.local = layer, slot, local

    def forward(self, attention: LatentAttention, q, c, r, context: Context) -> Tensor:
        """Shapes as of LatentAttention.latents -> [b, s, a value_size]"""
        cache, latents = self.slot.cache, torch.cat((r, c.unsqueeze(1)), -1)
        if cache.positions is None:
            cache.store(cache.keys, self.layer, latents, window_of(self.local))
            return cache.attend_whole(self.local, q, *attention.keys_and_values(c, r))
        rope, w = r.shape[-1], latents.shape[-1]
        w_uk = attention.key.weight.unflatten(0, (-1, attention.key_size))  # [a, d - rope, kv_rank]
        w_uv = attention.value.weight.unflatten(0, (-1, attention.value_size))
        q = torch.cat((q[..., :rope], q[..., rope:] @ w_uk), -1)  # [b, a, s, w]
        # The cache divides scores by √w, and they need √d.
        q = q * (w / attention.head_dim) ** 0.5
        y = cache.attend(self.layer, self.local, q, latents, latents)  # [b, s, a w]
        of_latents = y.unflatten(-1, (-1, w))[..., rope:].transpose(1, 2)  # [b, a, s, kv_rank]
        return (of_latents @ w_uv.transpose(1, 2)).transpose(1, 2).flatten(2)


class CachedPositions(nn.Module):
    """Replaces gpt.LearnedPositions: while decoding, each sequence has a position of its own."""

    def __init__(self, positions: gpt.LearnedPositions, slot: CacheSlot):
        super().__init__()
        self.weight = positions.weight
        self.slot = slot

    def forward(self, x: Tensor, documents=None) -> Tensor:
        """x: [b, s, h] -> [b, s, h]"""
        positions = self.slot.cache.positions
        if positions is None:
            positions = self.slot.cache.prefill_positions(x.shape[1], x.device)
            # What fills a prompt up may be longer than the context.
            return x + self.weight[positions.clamp(max=len(self.weight) - 1)]
        return x + self.weight[positions].unsqueeze(1)


@contextlib.contextmanager
def caching(stages: list[GPT], slot: CacheSlot, find: Callable | None = None):
    """Inside this context the stages are in evaluation mode, and their attention uses the cache in
    `slot`. Afterwards they are as before. find: in the place of `replacements`."""
    was_training = [stage.training for stage in stages]
    originals = []
    try:
        for stage in stages:
            stage.eval()
            for parent, name, replacement in (find or replacements)(stage, slot):
                originals.append((parent, name, getattr(parent, name)))
                setattr(parent, name, replacement)
        yield
    finally:
        for parent, name, original in originals:
            setattr(parent, name, original)
        for stage, training in zip(stages, was_training):
            stage.train(training)


def replacements(stage: GPT, slot: CacheSlot) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name of the submodule, what replaces it) for each module that needs the cache."""
    embedding = stage.embedding
    if embedding is not None and embedding.positions is not None:
        yield embedding, "positions", CachedPositions(embedding.positions, slot)
    for layer, block in stage.blocks.items():
        latent = isinstance(block.attention, LatentAttention)
        name, cached = ("attend", CachedLatents) if latent else ("core", CachedAttention)
        yield block.attention, name, cached(layer, slot, local_bias(block))
