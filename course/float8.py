"""The lesson of base/float8.py and fp8.py: what a byte means, how it rounds, and why a tensor, or a
block of it, has a scale."""

import math
from unittest import mock

import torch
from torch import Tensor

import fp8
from base import float8
from base.float8 import E4M3, E5M2, Format, decode_by_hand
from base.model_config import LINEARS
from course import demo, form
from fp8 import INPUT, Recipe, Scaling

WITHOUT = form.Removals()


@WITHOUT.replace("scale", float8, "scale_of", "Which numbers are lost?")
def scale_of_1(amax: Tensor, to: Format, power_of_two: bool) -> Tensor:
    """What is far from 1. Gradients of 1e-6 lie below half of the smallest number, 2^-17, and
    become 0. Numbers between 1 and 3 lie in the range of e4m3 already."""
    return torch.ones(())


@WITHOUT.replace("power-of-two", float8, "scale_of", "What is lost?")
def any_scale(amax: Tensor, to: Format, power_of_two: bool, original=float8.scale_of) -> Tensor:
    """Numbers of 4 bits, times 448 / 3 = 149.33, have more than 4 bits: most are rounded. So what
    was in bytes once, by other scales or in other blocks, is rounded a second time."""
    return original(amax, to, False)


@WITHOUT.replace("nan", fp8, "scale_of", "Infinity has the scale of 1. What is trained?")
def finite_scale(amax: Tensor, to: Format, power_of_two: bool, original=float8.scale_of) -> Tensor:
    """Infinity saturates like any value that is too large: it becomes 448, and 448 / 256 = 1.75.
    All is finite after it, so the step is taken, with a value that means nothing."""
    return original(torch.where(amax.isfinite(), amax, 1.0), to, power_of_two)


@WITHOUT.replace("blocks", Scaling, "quantise", "Which values are lost?")
def in_one_block(self, tensors, places, operand, group, block, original=Scaling.quantise):
    """Then the outlier's block is the whole tensor. The scale is that of the recipe `current`, and
    so is the error."""
    return original(self, tensors, places, operand, group, tuple(tensors[0].shape))


@WITHOUT.add("history", "Which steps saturate?")
def no_history():
    """Each of the five jumps, not the first alone: after a step with maximum 1 the scale is that of
    1 again. 16 steps remember the larger maximum."""
    one = property(lambda self: 1, lambda self, value: None)
    return mock.patch.object(Recipe, "history", one, create=True)


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        meaning(lesson)
        small_and_large(lesson)
        powers_of_two(lesson)
        outlier(lesson)
        jumps(lesson)
        not_finite(lesson)


# --- numbers --------------------------------------------------------------------------------------

BYTES = torch.arange(256, dtype=torch.uint8)


def as_bits(byte: int, of: Format) -> str:
    """0 0111 001: sign, exponent, mantissa."""
    bits = f"{byte:08b}"
    end = 8 - of.mantissa_bits
    return f"{bits[0]} {bits[1:end]} {bits[end:]}"


def meaning(lesson: form.Lesson) -> None:
    lesson.predict(
        "e4m3, bias 7: the byte 0 1000 101 has e = 8 and m = 5 of 8. Which number is it?", "number"
    )
    rows = [("smallest", 0x01, 0x01), ("one", 0x38, 0x3C), ("largest", 0x7E, 0x7B)]
    for name, of_e4m3, of_e5m2 in rows:
        line = f"{name:9}"
        for byte, of in ((of_e4m3, E4M3), (of_e5m2, E5M2)):
            line += f"{of.name} {as_bits(byte, of)} = {decode_by_hand(byte, of):<15.7g}"
        lesson.say(line.rstrip())
    equal = 0
    for of in (E4M3, E5M2):
        numbers = BYTES.view(of.dtype).double()
        by_hand = torch.tensor([decode_by_hand(byte, of) for byte in range(256)]).double()
        equal += numbers.eq(by_hand).logical_or(numbers.isnan() & by_hand.isnan()).sum().item()
    value = decode_by_hand(0b01000101, E4M3)
    lesson.check(
        f"2^(8 - 7) (1 + 5/8) = {value}; {equal} of 2 x 256 bytes by hand are PyTorch's numbers",
        value == 3.25 and equal == 512,
        [value],
    )


# --- scales ---------------------------------------------------------------------------------------


def in_bytes_and_back(x: Tensor, to: Format, power_of_two: bool = True) -> Tensor:
    """x [M, K] after it was scaled, rounded to bytes, and divided by its scale."""
    scale = float8.scale_of(float8.block_maxima(x, None), to, power_of_two)
    return float8.quantise(x, scale, to, None, power_of_two).values(x.dtype)


def unscaled(x: Tensor, to: Format) -> Tensor:
    return float8.quantise(x, torch.ones(()), to, None, True).values(torch.float32)


def small_and_large(lesson: form.Lesson) -> None:
    lesson.predict(
        "What becomes of 1,000 in e4m3 and in e5m2? And of 4,096 gradients of size 1e-6 in e5m2,"
        " whose smallest number is 2^-16 = 1.5e-5: how many become 0? With the scale 57,344 / max"
        " |x|?",
        "1,000 in e4m3; 1,000 in e5m2; gradients that become 0; with the scale",
    )
    thousand = torch.tensor([[1e3]])
    found = [unscaled(thousand, of).item() for of in (E4M3, E5M2)]
    lesson.check(
        f"{found[0]:,.0f}, the largest number (it saturates, and gives no infinity), and"
        f" {found[1]:,.0f}, the nearest",
        found == [448, 1024],
        found,
    )
    x = 1e-6 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    scaled = in_bytes_and_back(x, E5M2)
    error = demo.relative_error(x, scaled)
    zeros = [(y == 0).sum().item() for y in (unscaled(x, E5M2), scaled)]
    lesson.check(
        f"{zeros[0]:,}; {zeros[1]:,} with a scale, and the tensor is off by {error:.1%}",
        zeros == [4096, 0] and error < 1 / 9,
        zeros,
    )


def powers_of_two(lesson: form.Lesson) -> None:
    lesson.predict(
        "4,096 numbers of 4 significant bits, from 1 to 3. The scale is 448 / 3 = 149.33, or"
        " rounded down, 128. How many come back from e4m3 as they were?",
        "equal with 128",
    )
    x = 1 + torch.randint(17, (64, 64), generator=torch.Generator().manual_seed(0)) / 8
    # 4 significant bits have steps of 1/8 below 2, of 1/4 above.
    x = torch.where(x > 2, (4 * x).floor() / 4, x)
    # The largest number occurs.
    x[0, 0] = 3
    equal = [(in_bytes_and_back(x, E4M3, exact) == x).sum().item() for exact in (False, True)]
    lesson.check(
        f"{equal[0]:,} with 149.33; {equal[1]:,} with 128, which only moves exponents",
        equal[0] < 2048 and equal[1] == 4096,
        [equal[1]],
    )


# --- recipes --------------------------------------------------------------------------------------

# The place of the tensor: the first layer's matrix `up`.
PLACE = (0, list(LINEARS).index("up"))
NAME = "blocks.0.mlp.up input"


def in_bytes(scaling: Scaling, x: Tensor) -> float8.Quantised:
    """The input x [tokens, in] of a matrix, as forward rounds it."""
    return scaling.quantise([x], [PLACE], INPUT, None, (1, scaling.recipe.block))[0]


def outlier(lesson: form.Lesson) -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 1e5
    lesson.predict(
        f"One of {x.numel():,} values is 100,000, the others are about 1. e4m3 reaches from 2^-9 to"
        " 448. How many of the others become 0 with one scale? With one for each block of 1 x 128?",
        "zeros with one scale; zeros with blocks",
    )
    others = torch.ones_like(x, dtype=torch.bool)
    others[0, 0] = False
    rounded = {
        name: in_bytes(Scaling(Recipe(name), 1, "cpu"), x).values(torch.float32)[others]
        for name in ("current", "block")
    }
    zeros = {name: (y == 0).sum().item() for name, y in rounded.items()}
    error = demo.relative_error(x[others], rounded["block"])
    # 2^-10, half of the smallest number, over the scale 2^-8
    expected = (x[others].abs() <= 0.25).sum().item()
    of_block = (x[0, 1:128].abs() <= 0.25).sum().item()
    lesson.check(
        f"448 / 100,000 is rounded down to 2^-8, so all below 1/4: {zeros['current']:,}; in the"
        f" outlier's block {zeros['block']}",
        zeros == {"current": expected, "block": of_block} and error < 0.05,
        [zeros["current"], zeros["block"]],
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
        # Rounding alone errs by at most 1/17.
        if y.max() < largest / 1.2:
            cut.append(step)
        scaling.end_step()
        if NAME in scaling.warnings(scaling.report).get("fp8_saturated", []):
            logged.append(step)
    return cut, logged


def jumps(lesson: form.Lesson) -> None:
    lesson.predict(
        "The maxima of an input are 1, 1, 4, five times. In which of the 15 steps are values cut,"
        " with the recipe current? With delayed, which goes by the maxima of 16 steps before?"
    )
    maxima = [1.0, 1.0, 4.0] * 5
    current = saturated_steps(Recipe("current"), maxima)
    delayed = saturated_steps(Recipe("delayed"), maxima)
    lesson.check(
        f"{current[0] or 'none'}; delayed {delayed[0]}, the first jump; the log's fp8_saturated:"
        f" {delayed[1]}",
        current == ([], []) and delayed == ([3], [3]),
    )


def not_finite(lesson: form.Lesson) -> None:
    lesson.predict("One value is infinite. What is y = x wᵀ, and what does the optimizer do?")
    scaling = Scaling(Recipe("delayed"), 1, "cpu")
    x = torch.ones(32, 64)
    in_bytes(scaling, x)
    scaling.end_step()
    x[3, 5] = math.inf
    y = in_bytes(scaling, x) @ in_bytes(Scaling(Recipe(), 1, "cpu"), torch.ones(16, 64)).t()
    scaling.end_step()
    names = scaling.warnings(scaling.report).get("fp8_not_finite", [])
    lesson.check(
        f"{y.isnan().sum().item()} of {y.numel()} are NaN: the step is skipped; the log's"
        f" fp8_not_finite: {', '.join(names)}",
        y.isnan().all().item() and names == [NAME],
    )


if __name__ == "__main__":
    form.run("float8")
