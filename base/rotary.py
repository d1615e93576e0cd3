"""Rotary positions (RoPE, Su et al., arXiv 2104.09864): queries and keys are rotated by an angle.

The d numbers of a head are d/2 pairs (x_i, x_{i+d/2}), and each pair is a point in a plane. Before
the scores are computed, pair i of the token at position p is rotated by

    p · base^(-2i/d)        i < d/2        pair 0 by p radians, the last one by almost nothing

The product of a rotated query and a rotated key depends only on the difference of their angles. So
a score depends on the distance of two tokens, not on their positions.

    python -m course.gpt       the lesson of the model

Sequences longer than those of training need other frequencies (families.py).
"""

import torch
from torch import Tensor, nn

from base.document_mask import positions_of
from base.model_config import GPTConfig


class Rotary(nn.Module):
    """Rotates queries and keys. q: [b, a, s, d]; k: [b, a_kv, s, d]; table: of `rotary_table`"""

    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotate(q, table), rotate(k, table)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (x_i, x_{i+d/2}) by its position's angle. x: [b, a, s, d]. A table of fewer
    columns rotates only so many of each head's numbers, the first (Nemotron)."""
    n = table[0].shape[-1]
    if n < x.shape[-1]:
        return torch.cat((rotate(x[..., :n], table), x[..., n:]), dim=-1)
    low, high = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-high, low), dim=-1) * table[1]


def rotary_frequencies(config: GPTConfig, device: torch.device) -> Tensor:
    """base^(-2i/d), i < d/2: [d/2], float64. d: how many of a head's numbers are rotated."""
    d = config.rotated_size
    return config.rotary_base ** (-torch.arange(0, d, 2, device=device).double() / d)


def rotary_table(
    frequencies: Tensor, s: int, like: Tensor, documents: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, twice over: [s, d] or [b, 1, s, d] each.

    like: has their device and dtype; documents: [b, s], each restarts positions; scale: their
    factor (YaRN)."""
    at = torch.arange(s, device=like.device)
    if documents is not None:
        at = positions_of(documents).unsqueeze(1)  # [b, 1, s]
    return rotary_at(frequencies, at, like, scale)


def rotary_at(
    frequencies: Tensor, at: Tensor, like: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of positions `at`, of any shape, times a scale: [.., d] each."""
    angle = at.double().unsqueeze(-1) * frequencies.repeat(2)  # [.., d]
    return (scale * angle.cos()).to(like.dtype), (scale * angle.sin()).to(like.dtype)
