"""A key-value cache: what attention needs of the tokens so far, kept instead of computed again.

The new token's query meets the keys and values of all tokens up to it. Those depend on earlier
tokens alone, so they are computed once, when their token runs:

    prefill    q, k, v of all s tokens at once, causal, as in training; k and v stay in columns 0 .. s - 1
    decode     q, k, v of one token for each row, whose k and v go to the column of its position; q attends to the columns up to it

    row 0      a b c d x . .        column j is position j, in every row: a shorter row has free columns at its end, which its mask leaves out
    row 1      e f y . . . .

2 L a_kv d numbers for each token: grouped-query attention (arXiv 2305.13245) shrinks it by a /
a_kv. `caching` puts the cache into a finished model from outside, and takes it out again.

    python generate.py       tokens with it and without, and their speed

What a serving system adds: pages, so that rows of any length share memory (vLLM, arXiv 2309.06180).
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from gpt import GPT


class Cache:
    """Keys and values of the tokens so far, of each layer [b, a_kv, columns, d], and where the
    tokens of the forward that runs belong."""

    def __init__(self, columns: int):
        self.columns = columns
        self.keys = {}
        self.values = {}
        # [b] of the tokens to decode; None: prefill, of the columns from 0 on
        self.positions: Tensor | None = None
        # the same, where it is one number for all rows
        self.at: int | None = None
        # [b, 1, 1, used] 0 or -inf; None: all of `used` are seen
        self.mask: Tensor | None = None
        # columns that anybody looks at
        self.used = 0

    def attend(self, layer: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, s, a d]"""
        if self.positions is None:
            for store, x in ((self.keys, k), (self.values, v)) if self.columns else ():
                if layer not in store:
                    # zeros: 0 times what was never written is 0
                    store[layer] = x.new_zeros(*x.shape[:2], self.columns, x.shape[3])
                store[layer][:, :, : x.shape[2]] = x
            context = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
            return context.transpose(1, 2).flatten(2)
        keys = self.keys[layer]
        values = self.values[layer]
        for store, x in ((keys, k), (values, v)):
            if self.at is not None:
                store[:, :, self.at] = x[:, :, 0]
            else:
                store[torch.arange(len(x), device=x.device), :, self.positions] = x[:, :, 0]
        # [b, a_kv, a / a_kv, d]: heads that share a key are rows
        q = q.reshape(*k.shape[:2], -1, k.shape[3])
        context = F.scaled_dot_product_attention(
            q, keys[:, :, : self.used], values[:, :, : self.used], self.mask
        )
        return context.flatten(1).unsqueeze(1)  # [b, 1, a d]

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        for store in (self.keys, self.values):
            for layer, x in store.items():
                store[layer] = x[rows]


@dataclass
class Place:
    """Whose cache the modules below read and write."""

    cache: Cache | None = None


class CachedAttention(nn.Module):
    """Stands where the core attention stood."""

    def __init__(self, layer: str, place: Place):
        super().__init__()
        self.layer = layer
        self.place = place

    def forward(self, q: Tensor, k: Tensor, v: Tensor, drop_key: None) -> Tensor:
        return self.place.cache.attend(self.layer, q, k, v)


class PositionsOfRows(nn.Module):
    """x + a vector for each token's position. x: [b, s, h]"""

    def __init__(self, positions: gpt.LearnedPositions, place: Place):
        super().__init__()
        self.weight = positions.weight
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        at = self.place.cache.positions
        return x + (self.weight[: x.shape[1]] if at is None else self.weight[at].unsqueeze(1))


@contextlib.contextmanager
def caching(chunks: list[GPT], place: Place):
    """Meanwhile these chunks evaluate, and their attention goes through the cache."""
    replaced = []
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
        if chunk.embedding is not None and chunk.embedding.positions is not None:
            replaced.append(
                (
                    chunk.embedding,
                    "positions",
                    chunk.embedding.positions,
                    PositionsOfRows(chunk.embedding.positions, place),
                )
            )
        for layer, block in chunk.blocks.items():
            replaced.append(
                (block.attention, "core", block.attention.core, CachedAttention(layer, place))
            )
    try:
        for module, name, _, new in replaced:
            setattr(module, name, new)
        yield
    finally:
        for module, name, old, _ in replaced:
            setattr(module, name, old)
        for chunk, before in zip(chunks, training):
            chunk.train(before)
