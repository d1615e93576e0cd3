"""The lesson of float8.py: what a byte means, how it rounds, and why a tensor has a scale.

python -m precision.float8
"""

import math
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from lessons import form
from precision import float8
from precision.float8 import E4M3, E5M2, Format, decode_by_hand, encode_by_hand


def no_scale():
    """Numbers are rounded to bytes as they are."""
    return mock.patch.object(float8, "scale_of", lambda amax, to, power_of_two: torch.ones(()))


def any_scale(original=float8.scale_of):
    """A scale is never rounded to a power of two."""
    return mock.patch.object(
        float8, "scale_of", lambda amax, to, power_of_two: original(amax, to, False)
    )


# each returns a context in which the mechanism is missing
WITHOUT = {"scale": no_scale, "power-of-two": any_scale}

# the answers to what break_it asks
WHY = {
    "scale": (
        "What is far from 1. Gradients of 1e-6 lie below half of the smallest number, 2^-17, and"
        " become 0. Numbers between 1 and 3 lie in the range of e4m3 already."
    ),
    "power-of-two": (
        "Numbers of 4 bits, times 448 / 3 = 149.33, have more than 4 bits: most are rounded. So"
        " what was in bytes once, by other scales or in other blocks, is rounded a second time."
    ),
}

BYTES = torch.arange(256, dtype=torch.uint8)


def finite_numbers(of: Format) -> set[float]:
    """What its 256 bytes mean, without infinity and NaN. 0 and -0 are one number."""
    return {x for x in (decode_by_hand(byte, of) for byte in range(256)) if math.isfinite(x)}


def as_bits(byte: int, of: Format) -> str:
    """0 0111 001: sign, exponent, mantissa."""
    bits = f"{byte:08b}"
    end = 8 - of.mantissa_bits
    return f"{bits[0]} {bits[1:end]} {bits[end:]}"


def in_bytes_and_back(x: Tensor, to: Format, power_of_two: bool = True) -> Tensor:
    """x [M, K] after it was scaled, rounded to bytes, and divided by its scale."""
    scale = float8.scale_of(float8.block_maxima(x, None), to, power_of_two)
    return float8.quantise(x, scale, to, None, power_of_two).values(x.dtype)


def teach(lesson: form.Lesson) -> None:
    with (lesson.mutate or nullcontext)():
        meaning(lesson)
        density(lesson)
        largest(lesson)
        small_gradients(lesson)
        powers_of_two(lesson)
    lesson.break_it("scale", "Which numbers are lost, and which are not?", WHY["scale"])
    lesson.break_it(
        "power-of-two", "The largest number still becomes 448. What is lost?", WHY["power-of-two"]
    )


def meaning(lesson: form.Lesson) -> None:
    lesson.predict(
        "e4m3, bias 7: the byte 0 1000 101 has e = 8 and m = 5 of 8. Which number is it?"
    )
    rows = [
        ("smallest", 0x01, 0x01),
        ("smallest normal", 0x08, 0x04),
        ("one", 0x38, 0x3C),
        ("next after one", 0x39, 0x3D),
        ("largest", 0x7E, 0x7B),
        ("after it", 0x7F, 0x7C),
    ]
    lesson.say(f"{'':17}{'e4m3':<32}e5m2")
    for name, of_e4m3, of_e5m2 in rows:
        line = f"{name:17}"
        for byte, of in ((of_e4m3, E4M3), (of_e5m2, E5M2)):
            line += f"{as_bits(byte, of)} = {decode_by_hand(byte, of):<19.7g}"
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
    )


def density(lesson: form.Lesson) -> None:
    lesson.predict(
        "How many numbers has each format from 1 up to 2? Between two neighbours, how far off is"
        " the nearest at most, as a share of the number?"
    )
    counts = []
    errors = []
    # the same in each power of two
    x = torch.linspace(1, 16, 15 * 2**10 + 1, dtype=torch.float64)
    for of in (E4M3, E5M2):
        counts.append(sum(1 <= number < 2 for number in finite_numbers(of)))
        nearest = encode_by_hand(x, of).view(of.dtype).double()
        errors.append(((nearest - x).abs() / x).max().item())
    lesson.check(
        f"e4m3 {counts[0]}, e5m2 {counts[1]}; {errors[0]:.1%} and {errors[1]:.1%}: half a step of"
        " 1/8 at 1 + 1/16 is 1/17, half a step of 1/4 at 1 + 1/8 is 1/9",
        counts == [8, 4] and errors == [1 / 17, 1 / 9],
    )


def largest(lesson: form.Lesson) -> None:
    lesson.predict("What becomes of 1,000 in e4m3? In e5m2? And of a million?")
    x = torch.tensor([1e3, 1e6])
    found = []
    for of in (E4M3, E5M2):
        one = torch.ones(())
        found += float8.quantise(x.view(1, 2), one, of, None, True).values(torch.float32)[0]
    numbers = [number.item() for number in found]
    lesson.check(
        f"e4m3 {numbers[0]:,.0f} and {numbers[1]:,.0f}: they saturate, which is to become"
        f" the largest number; e5m2 {numbers[2]:,.0f}, the nearest, and {numbers[3]:,.0f}. Neither"
        " gives infinity: one value too large is no reason to stop",
        numbers == [448, 448, 1024, 57344],
    )


def small_gradients(lesson: form.Lesson) -> None:
    lesson.predict(
        "4,096 gradients of size 1e-6. The smallest number of e5m2 is 2^-16 = 1.5e-5. How many of"
        " them are 0 in e5m2 without a scale? With 57,344 / max |x|?"
    )
    x = 1e-6 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    plain = float8.quantise(x, torch.ones(()), E5M2, None, True).values(torch.float32)
    scaled = in_bytes_and_back(x, E5M2)
    error = ((scaled - x).norm() / x.norm()).item()
    zeros = [(y == 0).sum().item() for y in (plain, scaled)]
    lesson.check(
        f"{zeros[0]:,} without, {zeros[1]:,} with, and the tensor is off by {error:.1%}",
        zeros == [4096, 0] and error < 1 / 9,
    )


def powers_of_two(lesson: form.Lesson) -> None:
    lesson.predict(
        "4,096 numbers of 4 significant bits, from 1 to 3. The scale is 448 / 3 = 149.33, or"
        " rounded down, 128. How many come back from e4m3 as they were?"
    )
    x = 1 + torch.randint(17, (64, 64), generator=torch.Generator().manual_seed(0)) / 8
    # 4 significant bits: steps of 1/8 below 2, of 1/4 above
    x = torch.where(x > 2, (4 * x).floor() / 4, x)
    # the largest is there
    x[0, 0] = 3
    equal = [(in_bytes_and_back(x, E4M3, exact) == x).sum().item() for exact in (False, True)]
    lesson.check(
        f"{equal[0]:,} with 149.33; {equal[1]:,} with 128, which only moves exponents",
        equal[0] < 2048 and equal[1] == 4096,
    )
