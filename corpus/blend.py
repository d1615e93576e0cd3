"""Several corpora with weights, as one.

`--data 0.7:A 0.3:B` draws seven samples in ten from corpus A and three from B. Which corpus gives
sample number n of the blend, and which of its own samples it gives, depends on n and the weights
alone. Sample m = 0, 1, ... of corpus k, of weight w_k, is due at time (m + 1/2) / w_k, and the
blend takes the samples as they are due:

    0.7:A 0.3:B     A 0.71   B 1.67   A 2.14   A 3.57   A, B 5.0   A 6.43   A 7.86   B 8.33   A 9.29

By time t corpus k has given floor(w_k t + 1/2) samples. This is always close to its share, and
known at any t without a walk from the start. Sample 2^50 costs as much as sample 0, and a resume
needs no state. Weights are exact fractions, so that no machine rounds another order. Each corpus
keeps its own epochs, a new permutation each, and its own token cache.

    python -m corpus.blend 0.7:A 0.3:B       the order of the first samples, and each corpus's count

Megatron-LM takes the corpus that is furthest behind its share, and stores this choice for every
sample of the run. Both follow the weights within about one sample.
"""

import hashlib
import heapq
import math
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch

import data
from corpus.token_cache import shown
from data import Batch, Corpus, DataError
from runtime import terminal


class Part(NamedTuple):
    """One corpus of a blend."""

    # None: it is the only one
    weight: Fraction | None
    # what named it, for messages
    where: str
    # in the token cache
    folder: Path


def parse_weights(names: list[str]) -> list[tuple[Fraction | None, list[str]]]:
    """(weight, [path]) for each WEIGHT:PATH; names without weights are one corpus, (None, names).
    Raises DataError."""
    pairs = [split_weight(name) for name in names]
    if all(weight is None for weight, _ in pairs):
        return [(None, names)]
    for name, (weight, _) in zip(names, pairs):
        if weight is None:
            raise DataError(
                f"{shown(name)}: has no weight; give one to all corpora, as 0.5:PATH, or to none"
            )
        if not name.partition(":")[2]:
            raise DataError(f"{shown(name)}: names no path behind its weight, as in 0.7:PATH")
        if not 0 < weight < math.inf:
            raise DataError(f"{shown(name)}: a weight must be above 0 and finite, as in 0.7:PATH")
    return [(Fraction(repr(weight)), [path]) for weight, path in pairs]


def split_weight(name: str) -> tuple[float | None, str]:
    """(0.7, A) for 0.7:A. (None, name) for what exists under its whole name, or has no weight."""
    number, colon, path = name.partition(":")
    try:
        exists = os.path.lexists(name)
    # a zero byte in the name
    except ValueError:
        exists = False
    try:
        return (float(number), path) if colon and not exists else (None, name)
    except ValueError:
        return None, name


def prepare(names: list[str], tokenizer, flag: str = "--data", **share) -> list[Part]:
    """Every corpus of `names`, tokenised. share: goes on to data.prepare. Raises DataError."""
    try:
        corpora = parse_weights(names)
    except DataError as e:
        raise DataError(f"{flag} {e}") from None
    parts = []
    for weight, paths in corpora:
        where = flag if weight is None else f"{flag} {shown(paths[0])}"
        parts.append(Part(weight, where, data.prepare(paths, tokenizer, flag=flag, **share)))
    return parts


def open_parts(
    parts: list[Part], seq_length: int, seed: int | None, split: str = "train"
) -> "Corpus | Blend":
    """The windows of one corpus, or of the blend of several. Raises DataError."""
    corpora = [Corpus(part.folder, seq_length, seed, split, part.where) for part in parts]
    return corpora[0] if len(parts) == 1 else Blend(corpora, [part.weight for part in parts])


class Interleave:
    """Which corpus gives sample n: a function of n alone."""

    def __init__(self, weights: list[Fraction]):
        """weights: positive; only their ratios count."""
        scale = math.lcm(*(w.denominator for w in weights))
        # w_k = shares[k] / total
        self.shares = [int(w * scale) for w in weights]
        self.total = sum(self.shares)
        common = math.lcm(*self.shares)
        # between two samples of corpus k: 1 / w_k, in units of total / common
        self.steps = [common // share for share in self.shares]

    def __call__(self, n: int) -> tuple[int, int]:
        """(k, m): sample n of the blend is sample m of corpus k."""
        # Rounding adds at most 1/2 for each of K corpora: at time n - K/2 no more than n samples
        # were taken. Start there, then take the few that are left one by one.
        time = max(0, n - (len(self.shares) + 1) // 2)
        taken = [(2 * share * time + self.total) // (2 * self.total) for share in self.shares]
        # (m + 1/2) / w_k, in units of total / (2 common)
        due = [((2 * m + 1) * step, k) for k, (m, step) in enumerate(zip(taken, self.steps))]
        heapq.heapify(due)
        for _ in range(n - sum(taken)):
            when, k = due[0]
            taken[k] += 1
            heapq.heapreplace(due, (when + 2 * self.steps[k], k))
        k = due[0][1]
        return k, taken[k]


class Blend:
    """Corpora as one `data.Corpus`: sample number n is the same under every layout."""

    def __init__(self, corpora: list[Corpus], weights: list[Fraction]):
        self.corpora = corpora
        self.locate = Interleave(weights)
        self.s = corpora[0].s
        self.num_sequences = sum(c.num_sequences for c in corpora)
        shares = [Fraction(share, self.locate.total) for share in self.locate.shares]
        indices = [c.index for c in corpora]
        made_of = " ".join(f"{share}:{index['corpus']}" for share, index in zip(shares, indices))
        tokens = sum(index["tokens"] for index in indices)
        per_token = sum(
            share * Fraction(i["bytes"], i["tokens"]) for share, i in zip(shares, indices)
        )
        # bytes: bytes / tokens is that of the blend's samples
        self.index = {
            "corpus": hashlib.sha256(made_of.encode()).hexdigest()[:16],
            "tokens": tokens,
            "bytes": round(tokens * per_token),
        }

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers."""
        rows = [self.corpora[k].batch([m]) for k, m in map(self.locate, samples)]
        return Batch(*map(torch.cat, list(zip(*rows))[:3]), torch.as_tensor(list(samples)))

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count: known before any forward."""
        return len(samples) * self.s


def main():
    try:
        corpora = parse_weights(sys.argv[1:] or ["0.7:A", "0.3:B"])
    except DataError as e:
        print(f"blend.py: {e}", file=sys.stderr)
        sys.exit(2)
    if corpora[0][0] is None:
        return print("no weights: one corpus of all files")
    locate = Interleave([weight for weight, _ in corpora])
    for start in (0, 2**50):
        order = [locate(n)[0] for n in range(start, start + 1000)]
        counts = [f"{order.count(k)} of {paths[0]}" for k, (_, paths) in enumerate(corpora)]
        print(f"samples {start}, ...: " + " ".join(corpora[k][1][0] for k in order[:20]))
        print("    of a thousand: " + ", ".join(counts))


if __name__ == "__main__":
    terminal.run(main)
