"""The lesson of fp8_scaling.py: one outlier, maxima that grow, and a number that is not finite.

python -m precision.fp8_scaling
"""

from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from lessons import form
from model_config import LINEARS
from precision import float8, fp8_scaling
from precision.fp8_scaling import INPUT, Recipe, Scaling


def no_blocks(original=Scaling.quantise):
    """One block is as large as the tensor."""

    def quantise(self, tensors, places, operand, group, block):
        return original(self, tensors, places, operand, group, tuple(tensors[0].shape))

    return mock.patch.object(Scaling, "quantise", quantise)


def no_history():
    """The history is that of one step."""
    return mock.patch.object(Recipe, "history", property(lambda self: 1, ignore), create=True)


def ignore(self, value) -> None:
    pass


def no_nan(original=float8.scale_of):
    """A maximum that is not finite counts as 1."""

    def scale_of(amax, to, power_of_two):
        return original(torch.where(amax.isfinite(), amax, 1.0), to, power_of_two)

    return mock.patch.object(fp8_scaling, "scale_of", scale_of)


# each returns a context in which the mechanism is missing
WITHOUT = {"blocks": no_blocks, "history": no_history, "nan": no_nan}

# the answers to what break_it asks
WHY = {
    "blocks": (
        "Then the outlier's block is the whole tensor. The scale is that of the recipe `current`,"
        " and so is the error."
    ),
    "history": (
        "Each of the five jumps, not the first alone: after a step with maximum 1 the scale is that"
        " of 1 again. 16 steps remember the larger maximum."
    ),
    "nan": (
        "Infinity saturates like any value that is too large: it becomes 448, and 448 / 256 = 1.75."
        " All is finite after it, so the step is taken, with a value that means nothing."
    ),
}

# where the tensor is: the first layer's matrix `up`
PLACE = (0, list(LINEARS).index("up"))
NAME = "blocks.0.mlp.up input"


def in_bytes(scaling: Scaling, x: Tensor) -> float8.Quantised:
    """The input x [tokens, in] of a matrix, as forward rounds it."""
    n = scaling.recipe.block
    return scaling.quantise([x], [PLACE], INPUT, None, (1, n))[0]


def teach(lesson: form.Lesson) -> None:
    with (lesson.mutate or nullcontext)():
        outlier(lesson)
        jumps(lesson)
        not_finite(lesson)
    lesson.break_it("blocks", "A block of the tensor's size. Which values are lost?", WHY["blocks"])
    lesson.break_it("history", "A history of one step. Which steps saturate?", WHY["history"])
    lesson.break_it("nan", "Infinity gets the scale of 1. What is trained then?", WHY["nan"])


def outlier(lesson: form.Lesson) -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 1e5
    lesson.predict(
        f"One of {x.numel():,} values is 100,000, the others are about 1. e4m3 reaches from 2^-9 to"
        " 448. How many of the others become 0 with one scale? With one for each block of 1 x 128?"
    )
    others = torch.ones_like(x, dtype=torch.bool)
    others[0, 0] = False
    zeros = {}
    errors = {}
    lesson.say("recipe       others that become 0       their relative error")
    for name in ("current", "block"):
        y = in_bytes(Scaling(Recipe(name), 1, "cpu"), x).values(torch.float32)
        zeros[name] = (y[others] == 0).sum().item()
        errors[name] = ((y - x)[others].norm() / x[others].norm()).item()
        lesson.say(f"{name:12} {zeros[name]:>22,}   {errors[name]:>24.1%}")
    scale = 2.0**-8
    half_a_step = 2.0**-10
    expected = (x[others].abs() <= half_a_step / scale).sum().item()
    of_block = (x[0, 1:128].abs() <= half_a_step / scale).sum().item()
    lesson.check(
        f"448 / 100,000 is rounded down to 2^-8. What is below 2^-10 then, half of the smallest"
        f" number, becomes 0: all x below 2^-10 / 2^-8 = 1/4, {expected:,} values; in the outlier's"
        f" block {of_block}",
        zeros == {"current": expected, "block": of_block} and errors["block"] < 0.05,
    )


def saturated_steps(recipe: Recipe, maxima: list[float]) -> tuple[list[int], list[int]]:
    """Steps, from 1, in which values are cut to the largest number; those in which the log says so.
    The input has these maxima."""
    scaling = Scaling(recipe, 1, "cpu")
    cut = []
    logged = []
    for step, largest in enumerate(maxima, 1):
        x = torch.linspace(-largest, largest, 4096).view(64, 64)
        y = in_bytes(scaling, x).values(torch.float32)
        # rounding alone keeps within 1/17
        if y.max() < largest / 1.2:
            cut.append(step)
        scaling.end_step()
        if NAME in fp8_scaling.warnings(scaling.report).get("fp8_saturated", []):
            logged.append(step)
    return cut, logged


def jumps(lesson: form.Lesson) -> None:
    maxima = [1.0, 1.0, 4.0] * 5
    lesson.predict(
        "The maxima of an input are 1, 1, 4, five times. In which of the 15 steps are values cut,"
        " with the recipe current? With delayed, which goes by the maxima of 16 steps before?"
    )
    current = saturated_steps(Recipe("current"), maxima)
    delayed = saturated_steps(Recipe("delayed"), maxima)
    lesson.check(
        f"current in {current[0] or 'none'}; delayed in {delayed[0]}, at the first jump; the log's"
        f" fp8_saturated has these steps: {delayed[1]}",
        current == ([], []) and delayed == ([3], [3]),
    )
    lesson.predict(
        "Delayed: a maximum of 1,000 once, then of 1 again. How long is the scale too small?"
    )
    scaling = Scaling(Recipe("delayed"), 1, "cpu")
    small = 0
    for largest in [1.0, 1000.0] + [1.0] * 30:
        q = in_bytes(scaling, torch.full((16, 16), largest))
        # 448 / 1, rounded down
        small += 1 / q.inverse.item() < 256
        scaling.end_step()
    lesson.check(f"for {small} steps, as long as the history is", small == 16)


def not_finite(lesson: form.Lesson) -> None:
    lesson.predict(
        "One value is infinite. e4m3 has no infinity. What is y = x wᵀ, and what does the"
        " optimizer do?"
    )
    scaling = Scaling(Recipe("delayed"), 1, "cpu")
    x = torch.ones(32, 64)
    in_bytes(scaling, x)
    scaling.end_step()
    x[3, 5] = torch.inf
    y = in_bytes(scaling, x) @ in_bytes(Scaling(Recipe(), 1, "cpu"), torch.ones(16, 64)).t()
    scaling.end_step()
    names = fp8_scaling.warnings(scaling.report).get("fp8_not_finite", [])
    lesson.check(
        f"{y.isnan().sum().item()} of {y.numel()} values are NaN, so the gradient is, and the step"
        f" is skipped; fp8_not_finite in the log: {', '.join(names)}",
        y.isnan().all().item() and names == [NAME],
    )
