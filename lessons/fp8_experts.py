"""The lesson of precision/fp8_experts.py: why each row of an expert's input has a scale of its own.

python -m precision.fp8_experts
"""

from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from lessons import form
from precision import fp8_experts
from precision.float8 import E4M3, block_maxima, quantise, scale_of
from precision.fp8_scaling import INPUT, Recipe, Scaling
from proof import parity

# tokens of a rank's micro-batch that chose one expert; the size of each
TOKENS, H = 64, 32
MODEL = parity.LLAMA | dict(
    num_experts=4, router="topk", micro_batch_size=2, fp8="current", fp8_skip=0
)


def one_scale(self, x: Tensor, place, operand: int, group):
    """A tensor has one scale, whoever is in it."""
    amax = block_maxima(x, None).nan_to_num(torch.inf, torch.inf)
    return quantise(x, scale_of(amax, E4M3, True), E4M3, None, True)


def without_row_scales():
    return mock.patch.object(fp8_experts.Layer, "in_bytes", one_scale)


# each returns a context in which the mechanism is missing
WITHOUT = {"row-scales": without_row_scales}

# the answer to what break_it asks
WHY = {
    "row-scales": (
        "What a token becomes now depends on who else chose the expert. On two expert-parallel"
        " ranks these are tokens of two micro-batches, on one device those of one. No product is"
        " wrong, and no number is the same."
    )
}


def teach(lesson: form.Lesson) -> None:
    with (lesson.mutate or nullcontext)():
        alone_and_together(lesson)
        one_large_token(lesson)
        which_rows(lesson)
    lesson.break_it("row-scales", "Is anything wrong then, or only different?", WHY["row-scales"])


def layer() -> fp8_experts.Layer:
    return fp8_experts.Layer(Scaling(Recipe(), 1, "cpu"), ((0, 5),), None, None)


def tokens(seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(seed)) * size


def alone_and_together(lesson: form.Lesson) -> None:
    lesson.predict(
        "Two ranks send 64 tokens each to one expert; those of the second are ten times as large."
        " In how many of the first rank's 64 rows do the bytes differ from those without the"
        " second?"
    )
    first, second = tokens(0), tokens(1, 10.0)
    alone = layer().in_bytes(first, (0, 5), INPUT, None)
    together = layer().in_bytes(torch.cat((first, second)), (0, 5), INPUT, None)
    differ = (alone.q.view(torch.uint8) != together.q[:TOKENS].view(torch.uint8)).any(1).sum()
    lesson.check(
        f"in {differ} of {TOKENS}: a row's scale depends on this row alone", differ.item() == 0
    )


def one_large_token(lesson: form.Lesson) -> None:
    lesson.predict(
        "One token is a million times as large as the others. By how much do the others change"
        " when they become bytes?"
    )
    x = tokens(0).double()
    x[0] *= 1e6
    rounded = layer().in_bytes(x, (0, 5), INPUT, None).values(torch.float64)
    error = ((rounded - x)[1:].norm() / x[1:].norm()).item()
    lesson.check(
        f"by {error:.1%}, the rounding of e4m3: only the row of the large one has its scale",
        error < 0.04,
    )


def which_rows(lesson: form.Lesson) -> None:
    lesson.predict(
        "y = x Wᵀ sums over the columns of W, ∂x = ∂y W over its rows. How many scales has a weight"
        f" of one expert, [{H}, {TOKENS}], for the one, and for the other?"
    )
    w = torch.nn.Parameter(torch.stack((tokens(2).t(), tokens(3).t())))  # [E, H, TOKENS]
    for_y, for_dx = layer().weight_bytes(0, w)
    counts = [q.inverse.numel() // len(w) for q in (for_y, for_dx)]
    lesson.check(
        f"{counts[0]} and {counts[1]}: a scale must not change along the sum, so a weight has two"
        " sets of bytes",
        counts == [H, TOKENS],
    )
    lesson.predict("Expert parallelism on two ranks, beside one device: the same loss, gradients?")
    mutate = without_for_good if lesson.mutate else None
    two = parity.train(2, mutate=mutate, base=MODEL, ep=2)
    worst = max(parity.difference(two, parity.train(base=MODEL)).values())
    lesson.check(f"yes: the largest relative difference is {worst:.0e}", worst < 1e-10)


def without_for_good() -> None:
    fp8_experts.Layer.in_bytes = one_scale
