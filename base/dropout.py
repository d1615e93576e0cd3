"""Dropout whose mask is a hash of coordinates: no random-number generator, no state.

An element is dropped if a hash of its coordinates is small. The coordinates are

    (seed, step, sample)   ->   one key per sample       dropout_key
    layer                  ->   one key per layer        layer_key
    site in the layer      ->   0 embedding, 1 attention, 2 after attention, 3 after the MLP;
                                4 to 14 LoRA, 20 to 22 T5's cross attention and last norms
    position in the tensor ->   dropout_mask

So every rank computes the mask of just its shard, recomputation gives the same mask again, and the
CPU, the GPU and compiled code agree bit for bit. A generator would have to be saved, restored and
advanced by the same number on every rank.

    mask [b, s, h]    rank 0 | rank 1       the same bits as on one device, whichever way
                      s: 0 1 | 2 3          the tensor is sharded

    python -m course.dropout    the mask of a whole tensor and of its shards, and which masks differ

Not covered: a generator per rank, whose state is saved for recomputation and in checkpoints, as in
Megatron-LM. There another layout drops other elements.
"""

import torch
from torch import Tensor, nn


def hash_(x: Tensor) -> Tensor:
    """Scramble int32 values in place: two multiplications between xor-shifts.

    The constants are those of C. Wellons' lowbias32. `>>` copies the sign bit; the masks make it
    the unsigned shift.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def dropout_key(seed: int, step: int, samples: Tensor) -> Tensor:
    """One int32 key per sample. samples: [b] global sample numbers (int64). Returns [b].

    Do not compile it: torch 2.13's compiler for CPUs assumes that an int32 product that begins with
    a known number is positive, and gives other keys.
    """
    key = torch.full_like(samples, seed & 0x7FFFFFFF, dtype=torch.int32)
    for word in (step & 0x7FFFFFFF, (samples & 0x7FFFFFFF).int(), (samples >> 31).int()):
        key = hash_(key ^ word)
    return key


def layer_key(key: Tensor | None, layer: int) -> Tensor | None:
    """The keys of one layer, [b] -> [b]; None (no dropout) stays None. They are made outside the
    block, so that all blocks run the same compiled code."""
    return None if key is None else hash_(key ^ (layer + 1))


def dropout_mask(key: Tensor, site: int, shape, start: dict[int, int | Tensor], p: float) -> Tensor:
    """Boolean mask, true (dropped) with probability p. Arguments as in `position_hash`."""
    return position_hash(key, site, shape, start) < threshold(p)


def threshold(p: float) -> int:
    """The number below which a share p of the signed 32-bit integers lies."""
    return round(p * 2**32) - 2**31


def position_hash(key: Tensor, site: int, shape, start: dict[int, int | Tensor]) -> Tensor:
    """Hashes of coordinates, uniform over the signed 32-bit integers.

    key: [b]; shape: [b, ...] of this shard; start: {dimension: first global coordinate, or all of
    them} for each dimension in which the shard does not begin at 0.
    """
    x = hash_(key ^ site)
    for dim in range(1, len(shape)):
        n = start.get(dim, 0)
        if not isinstance(n, Tensor):
            n = n + torch.arange(shape[dim], device=key.device)
        n = n + 1
        # The product is int64: compilers assume that an int32 product of small numbers is positive.
        # Of 0x9E3779B1 these are the 31 bits that count; Triton takes no constant beyond int32.
        spread = (n * 0x1E3779B1 & 0x7FFFFFFF).int()
        # Another coordinate is hashed.
        x = hash_(x.unsqueeze(-1) ^ spread)
    return x


class Dropout(nn.Module):
    """Zeroes elements with probability p, and scales the others by 1 / (1 - p).

    Keeps the mask for backward, one byte per element. Where x is only a shard, the technique that
    sharded it sets `shard_index`: {dimension: n} if x is the n-th of equal shards.
    """

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p = p
        self.site = site
        self.shard_index: dict[int, int] = {}
        # (size, n) -> [size]: the coordinates of dimension 1 where they are not a range.
        self.coordinates = None

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        """x: [b, ...]; key: [b] from `layer_key`, or None in evaluation: nothing is dropped."""
        if key is None or self.p == 0:
            return x
        start = {dim: n * x.shape[dim] for dim, n in self.shard_index.items()}
        if self.coordinates:
            start[1] = self.coordinates(x.shape[1], self.shard_index.get(1, 0))
        mask = dropout_mask(key, self.site, x.shape, start, self.p)
        return x.masked_fill(mask, 0.0) * (1 / (1 - self.p))
