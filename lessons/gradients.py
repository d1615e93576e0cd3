"""The lesson of gradients.py: sums in float32, and the loss scale of fp16.

python gradients.py
"""

from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor, nn

import gradients
from gradients import GradientAccumulator, LossScaler
from lessons import form


def no_float32():
    """Gradients are added up in the weight's own type."""
    return mock.patch.object(gradients, "accumulation_dtype", lambda dtype: dtype)


def no_scale():
    """The loss is not multiplied before backward."""
    return mock.patch.object(LossScaler, "__init__", unscaled)


def unscaled(self, *arguments, original=LossScaler.__init__, **options) -> None:
    original(self, *arguments, **options)
    self.scale = 1.0


def no_search():
    """The first scale is halved until it fits."""
    return mock.patch.object(
        LossScaler, "searching", property(lambda self: False, ignore), create=True
    )


def ignore(self, value) -> None:
    pass


# each returns a context in which the mechanism is missing
WITHOUT = {"float32": no_float32, "scale": no_scale, "search": no_search}

# the answers to what break_it asks
WHY = {
    "float32": (
        "Those that need more bits than the weight's type has: 256 + 1 is 256 in bf16, 80,000"
        " is infinite in fp16, and 6.6e-4 divided by 2^16 is 0 in fp16. The search adds no"
        " gradients."
    ),
    "scale": (
        "Those whose gradients are below about 3e-8: fp16 rounds them to 0 in backward. Sums"
        " of larger gradients are right. With a scale of 1 nothing overflows, so no step is"
        " skipped."
    ),
    "search": (
        "15 more steps that are computed and then skipped: each overflow but the first halves"
        " the scale, and the way from 2^32 to 2^16 takes 17 steps, not 2."
    ),
}


def sum_of(dtype: torch.dtype, gradient: float, times: int, scaler=None) -> float:
    """The `main_grad` of a weight after `times` backward passes that each bring `gradient`."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1, dtype=dtype))])
    accumulator = GradientAccumulator(model, scaler)
    scale = scaler.scale if scaler else 1.0
    for _ in range(times):
        # in float32 until the loss scale is in it
        loss = model[0].float() * gradient * scale
        loss.sum().backward()
    accumulator.reduce_gradients()
    return model[0].main_grad.item()


class Tied(nn.Module):
    """One fp16 weight under two names, as embedding and head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(1, dtype=torch.float16))
        self.head = self.embedding

    def forward(self, gradient: float) -> Tensor:
        return (self.embedding.float() * gradient + self.head.float() * gradient).sum()


def skipped_steps(fits: float) -> tuple[int, float]:
    """(steps that are skipped until one is finite, the scale of that step). fits: the largest scale
    at which no gradient overflows."""
    scaler = LossScaler()
    skipped = 0
    while scaler.scale > fits:
        scaler.update(finite=False)
        skipped += 1
    return skipped, scaler.scale


def teach(lesson: form.Lesson) -> None:
    with (lesson.mutate or nullcontext)():
        sums(lesson)
        tied(lesson)
        small(lesson)
        search(lesson)
    lesson.break_it("float32", "Each gradient is right. Which sums are wrong?", WHY["float32"])
    lesson.break_it("scale", "The loss is right. Which weights learn nothing?", WHY["scale"])
    lesson.break_it(
        "search", "The scale that is found is the same. What does it cost?", WHY["search"]
    )


def sums(lesson: form.Lesson) -> None:
    lesson.predict("300 micro-batches each bring a gradient of 1. Their sum in bf16? In main_grad?")
    plain = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(300):
        plain += 1
    total = sum_of(torch.bfloat16, 1.0, 300)
    lesson.check(
        f"in bf16 {plain.item():.0f}, for 256 + 1 is rounded to 256; in main_grad {total:.0f}",
        (plain.item(), total) == (256, 300),
    )


def tied(lesson: form.Lesson) -> None:
    lesson.predict(
        "A tied fp16 weight is used twice, and each use brings a gradient of 40,000. fp16 ends at"
        " 65,504. The sum?"
    )
    model = Tied()
    # named, so that it is not freed: autograd's hooks hold it by a weak reference
    accumulator = GradientAccumulator(model)
    model(40_000.0).backward()
    accumulator.reduce_gradients()
    total = model.embedding.main_grad.item()
    lesson.check(f"{total:,.0f}: autograd sums both uses in float32", total == 80_000)


def small(lesson: form.Lesson) -> None:
    lesson.predict(
        "A gradient of 1e-8 in fp16, whose smallest number is 6e-8. What is in main_grad without a"
        " loss scale? With 2^16?"
    )
    without = sum_of(torch.float16, 1e-8, 1)
    scaled = sum_of(torch.float16, 1e-8, 1, LossScaler(scale=2.0**16))
    lesson.check(
        f"{without:.2e} without; with 2^16 backward computes 6.6e-4, and main_grad is {scaled:.2e}",
        without == 0 and abs(scaled / 1e-8 - 1) < 1e-3,
    )


def search(lesson: form.Lesson) -> None:
    lesson.predict(
        "The loss scale begins at 2^32; gradients overflow above 2^16. An overflow skips the step"
        " and divides the scale by 2^8. How many steps are skipped? How many by halving it?"
    )
    skipped, scale = skipped_steps(2.0**16)
    with no_search():
        by_halves = skipped_steps(2.0**16)[0]
    lesson.check(
        f"{skipped}, then the scale is {scale:,.0f} = 2^16; by halving {by_halves}, for the first"
        " overflow changes nothing (hysteresis 2)",
        (skipped, scale, by_halves) == (2, 2.0**16, 17),
    )
