"""Packing: several short examples share one sequence, instead of padding each to the full length.

A batch is a matrix [b, s], so every row has the same length s. Padding fills a row behind a short
example with positions that do not count. Packing fills it with more examples:

    examples a to e, of 5, 3, 2, 4 and 1 tokens; s = 8; . is padding

    padded   a a a a a . . .      packed   a a a a a b b b     row 0: documents 0 and 1
             b b b . . . . .               c c d d d d e .     row 1: documents 0, 1, 2; padding
             c c . . . . . .                                   is document 3, and does not count
             d d d d . . . .
             e . . . . . . .
            15 of 40 positions used      15 of 16 positions used

A step computes every position, padding too. So a packed batch trains on more tokens for the same
computation.

The examples of a row are called documents. None may see another one: attention is masked outside a
token's own document, and positions restart at 0 (document_mask.py). So each token has the loss that
it has when its example is alone in a row (Krell et al. 2021, arXiv 2107.02027). The loss of a batch
is the mean over its counted tokens, so an example has the same weight in any row of the batch.

    python -m course.packing  fill; one example changed; gradients beside one example a row
    python -m finetune.sft --load CKPT --data chats.jsonl --pack --out runs/chat

First-fit chooses the rows: examples are shuffled, and each goes into the first row that has room.
The result depends on (seed, epoch) alone, and every epoch packs anew. Sorting by length first
(first-fit-decreasing) would fill even better, but then a long example would meet the same short
ones in every epoch.

Not covered: examples nearly as long as s. First-fit fills at least 98% where most examples are
shorter than s / 4; but two of length 0.6 s never fit in one row. NeMo packs once, before training,
into a file.
"""

import hashlib
import json
from typing import NamedTuple

import numpy as np
import torch

from run.data import Batch, Dataset, Order
from run.documents import fingerprint


class Example(NamedTuple):
    """Token ids, and for each whether the loss is taken on it. The first one is nobody's target."""

    ids: list[int]
    counted: list[bool]


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Rows of at most `capacity` in all: each number of a length goes into the first row that has
    room. Raises ValueError for a length that is not from 1 to capacity.

    O(n log rows): a tree has, above each pair of rows, the larger free space of the two.
    """
    for number, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(f"length {length} of number {number}: must be from 1 to {capacity}")
    # any two neighbouring rows hold more than `capacity` together
    most = 2 * sum(lengths) // capacity + 1
    leaves = 1 << (most - 1).bit_length()
    # node n has the children 2 n and 2 n + 1; row r is node leaves + r
    free = [capacity] * (2 * leaves)
    rows = []
    for number, length in enumerate(lengths):
        node = 1
        while node < leaves:
            node *= 2
            # to the right if nothing on the left has room
            node += free[node] < length
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(number)
        free[node] -= length
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return rows


def lay_out(rows: list[list[Example]], s: int, read_last: bool = False) -> Batch:
    """Rows of s tokens, each with some examples, its documents, one behind the other.

    The last id of an example is only a target, so the next example begins where it stands.
    read_last: it has a position too, without a target. samples: the numbers of the rows.
    """
    # [b, s + 1]: behind the last example its last id stands, also in the last column
    tokens = torch.zeros(len(rows), s + 1, dtype=torch.int64)
    targets = torch.zeros(len(rows), s, dtype=torch.int64)
    mask = torch.zeros_like(targets, dtype=torch.bool)
    documents = torch.zeros_like(targets)
    real = torch.zeros_like(mask)
    for n, examples in enumerate(rows):
        at = 0
        for document, example in enumerate(examples):
            end = at + len(example.ids) - 1
            tokens[n, at : end + 1] = torch.tensor(example.ids)
            targets[n, at:end] = torch.tensor(example.ids[1:])
            mask[n, at:end] = torch.tensor(example.counted[1:])
            at = end + read_last
            # from here on another document: the next one, or padding
            documents[n, at:] = document + 1
        real[n, :at] = True
    return Batch(tokens[:, :-1], targets, mask, torch.arange(len(rows)), documents, real)


class Padded(Dataset):
    """Examples as batches of one example a row, padded at the end to a common length `s`, with the
    interface of a data set of run/data.py. Padding is never a target."""

    # whether the last id of an example has a position, or is only a target
    read_last = False

    def __init__(self, examples: list[Example], seed: int | None, multiple_of: int = 1):
        """seed: of the order, None for the order of the file. multiple_of: what the padded length
        must be divisible by (sequence parallelism)."""
        self.examples, self.num_sequences = examples, len(examples)
        self.order = Order(len(examples), seed)
        longest = max(map(self.length, examples))
        self.s = -(-longest // multiple_of) * multiple_of
        num_tokens = sum(len(example.ids) for example in examples)
        self.index = dict(tokens=num_tokens, bytes=num_tokens)
        self.index["corpus"] = fingerprint(json.dumps(examples))

    def length(self, example: Example) -> int:
        """Positions that an example takes."""
        return len(example.ids) - 1 + self.read_last

    def row(self, sample: int) -> int:
        """The number of the example that a sample is."""
        return self.order(sample)

    def example(self, sample: int) -> Example:
        return self.examples[self.row(sample)]

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers. All but these are [b, s]; a target that does not count
        is 0."""
        samples = list(samples)
        batch = lay_out([[self.example(n)] for n in samples], self.s, self.read_last)
        targets = batch.targets * batch.loss_mask
        return batch._replace(targets=targets, samples=torch.as_tensor(samples), documents=None)

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count: known before any forward."""
        # The first token of an example is nobody's target.
        return sum(sum(self.example(sample).counted[1:]) for sample in samples)

    def positions(self, samples) -> int:
        return sum(self.length(self.example(sample)) for sample in samples)


class Packed(Dataset):
    """Examples as batches of packed sequences, with the interface of a data set of run/data.py.

    Sample number n is a row of epoch 0, then of epoch 1, and so on. Epochs may differ by a few
    rows.
    """

    def __init__(self, examples: list[Example], seq_length: int, seed: int | None):
        """seed: of the order and so of the rows; None for the order of the file.

        An example of n ids takes n - 1 positions: its last id is only a target. Raises ValueError
        for one that takes none, or more than seq_length, and where there is no example.
        """
        if not examples:
            raise ValueError("no examples to pack")
        self.examples = examples
        self.s = seq_length
        self.seed = seed
        self.lengths = [len(example.ids) - 1 for example in examples]
        # [examples]: counted targets
        self.counts = np.array([sum(example.counted[1:]) for example in examples])
        # the number of the first sample after each epoch so far
        self.ends: list[int] = []
        # epoch -> rows, of the last two: a batch may begin in one and end in the next
        self.packed: dict[int, list[list[int]]] = {}
        self.num_sequences = len(self.rows_of(0))
        num_tokens = sum(len(example.ids) for example in examples)
        digest = hashlib.sha256()
        for example in examples:
            digest.update(repr(tuple(example)).encode())
        self.index = dict(tokens=num_tokens, bytes=num_tokens, corpus=digest.hexdigest()[:16])

    def rows_of(self, epoch: int) -> list[list[int]]:
        """Which examples share a row, of all rows of an epoch."""
        if epoch not in self.packed:
            if self.seed is None:
                rows = first_fit(self.lengths, self.s)
            else:
                generator = np.random.default_rng([self.seed, epoch])
                order = generator.permutation(len(self.examples))
                packed = first_fit([self.lengths[i] for i in order], self.s)
                # the first rows are the fullest
                rows = [order[packed[r]].tolist() for r in generator.permutation(len(packed))]
            self.packed[epoch] = rows
            if len(self.packed) > 2:
                del self.packed[next(iter(self.packed))]
        return self.packed[epoch]

    def row(self, sample: int) -> list[int]:
        """The numbers of the examples in a sample."""
        sample = int(sample)
        while not self.ends or self.ends[-1] <= sample:
            before = self.ends[-1] if self.ends else 0
            self.ends.append(before + len(self.rows_of(len(self.ends))))
        epoch = int(np.searchsorted(self.ends, sample, side="right"))
        first = self.ends[epoch - 1] if epoch else 0
        return self.rows_of(epoch)[sample - first]

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers. All but these are [b, s]; a target that does not count
        is 0."""
        samples = list(samples)
        batch = lay_out([[self.examples[i] for i in self.row(n)] for n in samples], self.s)
        return batch._replace(
            tokens=batch.tokens * batch.real,
            targets=batch.targets * batch.loss_mask,
            samples=torch.as_tensor(samples),
        )

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count: known before any forward."""
        return int(sum(self.counts[self.row(sample)].sum() for sample in samples))

    def positions(self, samples) -> int:
        return sum(self.lengths[i] for sample in samples for i in self.row(sample))

    def fill(self, epoch: int = 0) -> float:
        """The share of positions that are not padding."""
        return sum(self.lengths) / (len(self.rows_of(epoch)) * self.s)
