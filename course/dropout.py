"""The lesson of base/dropout.py: which elements are dropped, on one rank, on two, and again."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from base.dropout import Dropout, dropout_key, dropout_mask, layer_key
from course import form

P = 0.25
N = 1000
# A mask depends on these; start: the first coordinate of a shard in each dimension.
COORDINATES = dict(seed=0, step=1, sample=7, layer=0, site=1, start={})

WITHOUT = form.Removals()


@WITHOUT.add("coordinates", "Each rank counts its rows from 0. What does rank 1 drop?")
def no_coordinates(where: dict) -> None:
    """Rank 1 drops the places that rank 0 drops: both hash rows 0 and 1. Each mask alone is a good
    one, with the right share of zeros, so only the comparison with one device fails."""
    where["start"] = {}


@WITHOUT.add("step", "A sample loses the same elements in every step. Would you notice?")
def no_step(where: dict) -> None:
    """The step is not in the hash, so two steps have one mask; sample, layer and site still change
    it. Each single step is right and the loss falls: only two steps beside each other show it."""
    where["step"] = 0


def key_of(where: dict) -> Tensor:
    """[1]: of one sample in one layer."""
    key = dropout_key(where["seed"], where["step"], torch.tensor([where["sample"]]))
    return layer_key(key, where["layer"])


def mask(lesson: form.Lesson, shape: tuple[int, int], **changes) -> Tensor:
    """True where an element is dropped, at COORDINATES with `changes`."""
    where = COORDINATES | changes
    if lesson.mutate:
        lesson.mutate(where)
    return dropout_mask(key_of(where), where["site"], (1, *shape), where["start"], P)[0]


def picture(row: Tensor) -> str:
    return " ".join("·" if dropped else "█" for dropped in row)


def teach_shards(lesson: form.Lesson) -> None:
    lesson.predict(
        "A tensor of 4 rows and 12 columns; rank 0 has rows 0 and 1, rank 1 has rows 2 and 3. Each"
        " computes the mask of its own rows. How many of the 48 elements differ from the mask of"
        " one device?",
        "elements that differ",
    )
    whole = mask(lesson, (4, 12))
    shards = torch.cat([mask(lesson, (2, 12), start={1: first}) for first in (0, 2)])
    lesson.say(f"{'one device (· is dropped)':<32}two ranks")
    for n, (row, of_shard) in enumerate(zip(whole, shards)):
        lesson.say(f"{picture(row):<32}{picture(of_shard)}   rank {n // 2}")
    different = (whole != shards).sum().item()
    lesson.check(
        f"{different}: a mask is a hash of global coordinates; rank 1 counts from row 2",
        different == 0,
        [different],
    )


def teach_again(lesson: form.Lesson) -> None:
    lesson.predict(
        "Recomputation runs dropout a second time. What share of the elements is dropped in one"
        " run and not in the other: with this hash? With F.dropout, which draws new numbers?",
        "share with this hash; share with F.dropout",
    )
    ours = (mask(lesson, (N, N)) != mask(lesson, (N, N))).double().mean().item()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = (F.dropout(torch.ones(N, N), P) == 0 for _ in range(2))
    theirs = (first != second).double().mean().item()
    independent = 2 * P * (1 - P)
    lesson.check(
        f"the hash {ours:.3f}; F.dropout {theirs:.3f}; independent masks: 2 p (1 - p) ="
        f" {independent:.3f}",
        ours == 0 and abs(theirs - independent) < 0.003,
        [ours, independent],
    )

    lesson.predict(
        "And between two steps, two samples, two layers, or two places in a layer? These should be"
        " independent.",
        "share",
    )
    here = mask(lesson, (N, N))
    shares = {}
    for name in ("step", "sample", "layer", "site"):
        other = mask(lesson, (N, N), **{name: COORDINATES[name] + 1})
        shares[name] = (here != other).double().mean().item()
    lesson.check(
        ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
        + f"; 2 p (1 - p) = {independent:.3f}",
        all(abs(share - independent) < 0.003 for share in shares.values()),
        [independent],
    )


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        f"x is 1 everywhere, {N * N:,} elements; p = {P}. How many become 0? What do the others"
        " become, so that the mean stays 1?",
        "zeros; the others",
    )
    y = Dropout(P, site=1)(torch.ones(1, N, N), key_of(COORDINATES))
    dropped = (y == 0).sum().item()
    kept = y.max().item()
    deviation = math.sqrt(P * (1 - P)) * N
    lesson.check(
        f"{dropped:,} are 0; p N = {P * N * N:,.0f}, with a standard deviation of {deviation:.0f}",
        abs(dropped - P * N * N) < 4 * deviation,
        [dropped],
    )
    lesson.check(
        f"others are {kept:.4f}; 1 / (1 - p) = {1 / (1 - P):.4f}; the mean is {y.mean():.4f}",
        abs(kept - 1 / (1 - P)) < 1e-6 and abs(y.mean().item() - 1) < 0.003,
        [kept],
    )
    teach_shards(lesson)
    teach_again(lesson)


if __name__ == "__main__":
    form.run("dropout")
