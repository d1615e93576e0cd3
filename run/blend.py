"""Which corpus gives sample n, where several are trained on with weights.

`--data 0.7:A 0.3:B` draws seven samples in ten from corpus A and three from B. Sample m = 0, 1, ...
of corpus k, which has weight w_k, is due at time

    t = (m + 1/2) / w_k

and the blend takes the samples in the order of these times:

    0.7:A 0.3:B     A 0.71   B 1.67   A 2.14   A 3.57   A 5.0   B 5.0   A 6.43   A 7.86   B 8.33

By time t corpus k has given floor(w_k t + 1/2) samples, at most half a sample from its share. The
count needs no earlier samples, so sample 2^50 costs as much as sample 0. Weights are exact
fractions, so every machine computes the same order.

When a run is resumed with other weights or corpora, the blend begins anew, and each corpus goes on
after the samples that it has given so far, which the checkpoint records (run/data.py).

    python -m run.blend 0.7:A 0.3:B       the order of the first samples, and each corpus's count

Not covered: the stored choices of Megatron-LM, which takes the corpus that is furthest behind its
share. Both follow the weights within about one sample.
"""

import heapq
import math
import os
import sys
from fractions import Fraction

from base import terminal
from run.documents import DataError


def parse_weights(names: list[str]) -> list[tuple[Fraction | None, list[str]]]:
    """(weight, [path]) for each WEIGHT:PATH. Names without weights are one corpus: (None, names).
    Raises DataError."""
    pairs = [split_weight(name) for name in names]
    if all(weight is None for weight, _ in pairs):
        return [(None, names)]
    for name, (weight, path) in zip(names, pairs):
        if weight is None:
            raise DataError(f"{name}: has no weight; give one to all corpora, as 0.5:PATH, or none")
        if not path or not 0 < weight < math.inf:
            raise DataError(f"{name}: needs a weight above 0 and finite, and a path: 0.7:PATH")
    return [(Fraction(repr(weight)), [path]) for weight, path in pairs]


def split_weight(name: str) -> tuple[float | None, str]:
    """(0.7, A) for 0.7:A; (None, name) without a weight, or where a file has this whole name."""
    number, colon, path = name.partition(":")
    if not colon or os.path.lexists(name):
        return None, name
    try:
        return float(number), path
    except ValueError:
        return None, name


class Interleave:
    """The corpus of sample n, a function of n and the weights alone."""

    def __init__(self, weights: list[Fraction]):
        """weights: positive; only their ratios count."""
        scale = math.lcm(*(weight.denominator for weight in weights))
        # w_k = shares[k] / total, with the w_k summing to 1
        self.shares = [int(weight * scale) for weight in weights]
        self.total = sum(self.shares)
        # Times are integers in units of total / common. Two samples of corpus k are 1 / w_k apart.
        common = math.lcm(*self.shares)
        self.steps = [common // share for share in self.shares]

    def __call__(self, n: int) -> tuple[int, int]:
        """(k, m): sample n of the blend is sample m of corpus k."""
        taken = self.taken(n)
        # (m + 1/2) / w_k, in half units: the next sample of each corpus.
        _, k = min(((2 * taken[k] + 1) * self.steps[k], k) for k in range(len(self.shares)))
        return k, taken[k]

    def taken(self, n: int) -> list[int]:
        """How many of the first n samples come from each corpus."""
        # Rounding adds at most 1/2 for each of K corpora: by time n - K/2 no more than n samples
        # were taken. Start there, then take the few that are left one by one.
        time = max(0, n - (len(self.shares) + 1) // 2)
        # floor(w_k time + 1/2)
        taken = [(2 * share * time + self.total) // (2 * self.total) for share in self.shares]
        # (m + 1/2) / w_k, in half units: the next sample of each corpus.
        due = [((2 * taken[k] + 1) * self.steps[k], k) for k in range(len(self.shares))]
        heapq.heapify(due)
        for _ in range(n - sum(taken)):
            when, k = due[0]
            taken[k] += 1
            heapq.heapreplace(due, (when + 2 * self.steps[k], k))
        return taken


def main():
    corpora = parse_weights(sys.argv[1:] or ["0.7:A", "0.3:B"])
    if corpora[0][0] is None:
        return print("no weights: one corpus of all files")
    locate = Interleave([weight for weight, _ in corpora])
    for start in (0, 2**50):
        order = [locate(n)[0] for n in range(start, start + 1000)]
        counts = [f"{order.count(k)} of {name}" for k, (_, (name,)) in enumerate(corpora)]
        print(f"samples {start}, ...: " + " ".join(corpora[k][1][0] for k in order[:20]))
        print("    of a thousand: " + ", ".join(counts))


if __name__ == "__main__":
    terminal.run(main)
