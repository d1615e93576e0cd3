"""What a step of BERT or T5 computes with: a batch, and what each layer gets of it.

BERT    tokens [b, s]        a text;                   targets [b, s]
T5      tokens [b, n + m]    source | decoder input;   targets [b, m], which the decoder writes
"""

from typing import NamedTuple

import torch
from torch import Tensor

from base.device_queue import to_device


class Context(NamedTuple):
    """The inputs of every layer beside x, as gpt.Context has them."""

    source: int = 0  # n, the positions of x that are T5's encoder's
    drop_key: Tensor | None = None  # [b]
    documents: Tensor | None = None  # [b, n + m], each token's document: it sees no other
    types: Tensor | None = None  # [b, s], each token's type; None: all 0
    rotary: None = None


class Batch(NamedTuple):
    """As run.data.Batch, of n + m positions; BERT has n = 0."""

    tokens: Tensor  # [b, n + m] int64
    targets: Tensor | None  # [b, m] int64; None: the head gives logits
    loss_mask: Tensor  # [b, m] bool: the targets that count
    samples: Tensor  # [b] int64: global sample numbers
    documents: Tensor | None = None  # [b, n + m] int64
    real: Tensor | None = None  # [b, n + m] bool: no padding. None: all
    types: Tensor | None = None  # [b, s] int64

    def to(self, device) -> "Batch":
        return self._make(None if x is None else to_device(x, device) for x in self)

    def rows(self) -> list["Batch"]:
        """Batches of one sequence each."""
        columns = [[None] * len(self.tokens) if x is None else x.split(1) for x in self]
        return [Batch(*row) for row in zip(*columns)]

    def context(self, drop_key: Tensor | None = None) -> Context:
        n = self.tokens.shape[1] - self.loss_mask.shape[1]
        return Context(n, drop_key, self.documents, self.types)


def pad_rows(rows: list[list[int]], length: int, pad: int = 0) -> tuple[Tensor, Tensor]:
    """(token ids of rows, each filled up to a length; which of them are no padding), [b, length]"""
    at, lengths = torch.arange(length), torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    return tokens, at < lengths.unsqueeze(1)
