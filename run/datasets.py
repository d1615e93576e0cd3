"""What a run learns from: a data set gives a batch for any sample numbers.

Batch      tokens, targets, which targets count
Dataset    batch(samples) -> Batch; what is counted before any forward
Order      which item a sample is: every epoch is a permutation of its own
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from base.device_queue import to_device


class Batch(NamedTuple):
    # [b, s] int64
    tokens: Tensor
    # [b, s] int64: the next token of each
    targets: Tensor
    # [b, s] bool: the targets that count
    loss_mask: Tensor
    # [b] int64: global sample numbers, for the dropout key
    samples: Tensor
    # [b, s] int64, not decreasing along a row: the number of each token's document. None: attention
    # and positions do not know of documents (base/document_mask.py)
    documents: Tensor | None = None
    # [b, s] bool: the positions that hold a token; the others are padding. None: all of them
    real: Tensor | None = None
    # [b] float64: log-probabilities of answers under a reference (finetune/preference_data.py)
    reference: Tensor | None = None

    def to(self, device) -> "Batch":
        return Batch(*(None if x is None else to_device(x, device) for x in self))


class Dataset:
    """What a run learns from. A sample is a row of `s` positions; batch(samples) gives a Batch."""

    s: int

    def taken(self, n: int) -> dict | None:
        """What a checkpoint keeps of the first n samples of a run, beside their number."""

    def go_on(self, n: int, taken: dict) -> None:
        """Sample n is the next, after those of which `taken` told."""

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count: known before any forward."""
        return self.positions(samples)

    def positions(self, samples) -> int:
        """How many positions of these samples hold a token, and are not padding."""
        return len(samples) * self.s


class Order:
    """Sample n -> one of `count` items: all of them in epoch 0, then in epoch 1, ... Every epoch is
    a permutation of its own, by (seed, epoch) alone; without a seed it is the order of the items.
    """

    def __init__(self, count: int, seed: int | None):
        self.count = count
        self.seed = seed
        # the epoch whose permutation is in `permuted`
        self.epoch = None

    def __call__(self, sample: int) -> int:
        epoch, n = divmod(int(sample), self.count)
        if self.seed is None:
            return n
        if epoch != self.epoch:
            self.permuted = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self.epoch = epoch
        return int(self.permuted[n])
