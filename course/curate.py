"""The lesson of run/curate.py: how many near-duplicates MinHash finds, and which it removes.

Not covered: rules, repairs and test sets, which are in run/cleaning.py.
"""

from unittest import mock

import numpy as np

from course import form
from run import curate

# With sets of 99 the three similarities are exact: 66 / 132, 78 / 120, 88 / 110.
PAIRS, SIZE, THRESHOLD = 500, 99, 0.8
SIMILARITIES = (0.5, 0.65, 0.8)

WITHOUT = form.Removals()


@WITHOUT.add("permutations", "All permutations are the same one. How many pairs meet?")
def one_permutation():
    """A share s of them, at any b and r: all minima of a pair are equal, or none. The curve is no
    longer steep: pairs of 0.5 meet half of the time, and a fifth of those of 0.8 is missed."""
    first = {name: np.broadcast_to(getattr(curate, name)[:1], (128, 1)) for name in "AC"}
    return mock.patch.multiple(curate, **first)


@WITHOUT.replace("comparison", curate, "jaccard", "Pairs that met are removed. What is lost?")
def no_comparison(x: np.ndarray, y: np.ndarray) -> float:
    """Documents that are no near-duplicates: more than half of the pairs of 0.65 meet. With the
    comparison, meeting costs time, and no document."""
    return 1.0


def planted(s: float, generator: np.random.Generator) -> list[np.ndarray]:
    """Sets of shingles, two after each other with the similarity s."""
    common = round(2 * SIZE * s / (1 + s))
    sets = []
    for _ in range(PAIRS):
        shingles = generator.integers(2**63, size=2 * SIZE - common).astype(np.uint64) * 2
        sets += [np.sort(shingles[:SIZE]), np.sort(shingles[-SIZE:])]
    return sets


def teach(lesson: form.Lesson) -> None:
    generator = np.random.default_rng(0)
    b, r = curate.choose_bands(THRESHOLD)
    lesson.predict(
        f"b = {b} bands of r = {r} minima. Two documents meet if all minima of a band are equal. Of"
        f" {PAIRS} pairs with a Jaccard similarity of {', '.join(map(str, SIMILARITIES))}: how"
        " many meet?",
        "; ".join(f"of {s}" for s in SIMILARITIES),
    )
    sets, met, expected = [], [], []
    with lesson.removed():
        for s in SIMILARITIES:
            sets.append(planted(s, generator))
            keys = np.array([curate.band_keys(x, b, r) for x in sets[-1]])
            met.append(int((keys[::2] == keys[1::2]).any(1).sum()))
            expected.append(PAIRS * curate.meets(s, b, r))
        lesson.bars(dict(zip(map(str, SIMILARITIES), met)), PAIRS)
        # Five standard deviations.
        near = [abs(n - e) < 5 * (e - e * e / PAIRS) ** 0.5 + 1 for n, e in zip(met, expected)]
        formula = ", ".join(f"{e:.0f}" for e in expected) + " on average"
        lesson.check(f"{met}; by 1 - (1 - s^r)^b {formula}", all(near), list(map(round, expected)))

        lesson.predict(
            f"Then the pairs that met are compared, with a threshold of {THRESHOLD}. How many"
            f" documents are removed of each {PAIRS} pairs?",
            "; ".join(f"of {s}" for s in SIMILARITIES),
        )
        removed = []
        for pairs in sets:
            keys = np.array([curate.band_keys(x, b, r) for x in pairs]).T
            removed.append(len(curate.near_duplicates(pairs, keys, THRESHOLD)))
        right = [0 if s < THRESHOLD else n for s, n in zip(SIMILARITIES, met)]
        text = f"{removed}: of pairs under the threshold none, of the others one of each that met"
        lesson.check(text, removed == right, removed)


if __name__ == "__main__":
    form.run("curate")
