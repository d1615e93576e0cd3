"""The lesson of optimizer.py: what 16-bit weights forget, bytes of state, the size of a step.

python optimizer.py
"""

from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor, nn

import optimizer
from lessons import form
from optimizer import AdamW


def no_master():
    """The master keeps the 16 bits of the weight, no more."""
    return mock.patch.object(AdamW, "weights_from_masters", round_masters)


def round_masters(self, names=None, original=AdamW.weights_from_masters) -> None:
    original(self, names)
    for name, master in self.masters.items():
        master.copy_(self.parameters[name].detach())


def no_low_bits():
    """Of the master only the upper half is kept."""
    return mock.patch.object(optimizer, "split_master", split_without_low)


def split_without_low(
    master: Tensor, weight: Tensor, low: Tensor, original=optimizer.split_master
) -> None:
    original(master, weight, low)
    low.zero_()


def no_bias_correction():
    """m and v are taken as they are, as after many steps."""
    return mock.patch.object(AdamW, "allocate", allocate_old)


def allocate_old(self, original=AdamW.allocate) -> None:
    original(self)
    self.updates.fill_(1e6)


# each returns a context in which the mechanism is missing
WITHOUT = {"master": no_master, "low-bits": no_low_bits, "bias-correction": no_bias_correction}
# name -> why checks fail without it
WHY = {
    "bias-correction": (
        "After one step m is 0.1 g, and v is 0.05 g²: lr 0.1 / √0.05 = 0.447 lr. After 100"
        " steps m and v have nearly their full size, so the check with a master holds."
    ),
    "master": (
        "Below 1 bf16 numbers are 0.0039 apart. A step of less than half of that is rounded"
        " away, each time anew, for nothing keeps the rest. A small learning rate makes all"
        " steps so small."
    ),
    "low-bits": (
        "Those of less than half the distance between two bf16 numbers, as without a master:"
        " the weight and low bits of 0 are a master rounded to bf16. With an fp32 master no low"
        " bits are needed, so the check before holds."
    ),
}


def moved(
    value: float, gradients: list[float], lr: float, dtype=torch.float32, shape=(1,), **options
) -> float:
    """A weight of `value` after one step of AdamW for each gradient."""
    p = nn.Parameter(torch.full(shape, value, dtype=dtype))
    adamw = AdamW([("w", p)], **options)
    for gradient in gradients:
        p.main_grad = torch.full(shape, gradient)
        adamw.step(lr)
    return p.flatten()[0].item()


def bytes_per_parameter(state_dtype: torch.dtype | None) -> float:
    """Of a bf16 weight and its optimizer state."""
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    adamw = AdamW([("w", p)], state_dtype=state_dtype)
    states = adamw.masters, adamw.low, adamw.exp_avg, adamw.exp_avg_sq
    return (p.nbytes + sum(x.nbytes for state in states for x in state.values())) / p.numel()


def teach(lesson: form.Lesson) -> None:
    with (lesson.mutate or nullcontext)():
        first_step(lesson)
        masters(lesson)
        state(lesson)
        decay(lesson)
    learning_rate(lesson)
    lesson.break_it(
        "bias-correction",
        "v rises more slowly than m. How large is the first step?",
        WHY["bias-correction"],
    )
    lesson.break_it(
        "master", "Why does training stop when the learning rate gets small?", WHY["master"]
    )
    lesson.break_it("low-bits", "Training still runs. Which updates are lost?", WHY["low-bits"])


def first_step(lesson: form.Lesson) -> None:
    lesson.predict(
        "lr 0.001, no decay. How far does the first step move a weight whose gradient is 100? One"
        " whose gradient is 0.01?"
    )
    large, small = [-moved(0.0, [g], 1e-3) for g in (100.0, 0.01)]
    lesson.check(
        f"{large:.6f} and {small:.6f}: at t = 1 the step is lr g / √g² = lr",
        max(abs(large - 1e-3), abs(small - 1e-3)) < 1e-8,
    )


def masters(lesson: form.Lesson) -> None:
    lesson.predict(
        "A bf16 weight is 1, and 100 steps of lr 0.001 each subtract 0.001. What is it then, if it"
        " is updated in bf16? If an fp32 master is?"
    )
    plain = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        plain -= 1e-3
    value = moved(1.0, [1.0] * 100, 1e-3, torch.bfloat16)
    rounded = torch.tensor(0.9).bfloat16().item()
    lesson.check(
        f"in bf16 {plain.item():.4f}, for below 1 its numbers are 0.0039 apart; with a master"
        f" {value:.4f}, 0.9 in bf16",
        plain.item() == 1 and value == rounded,
    )


def state(lesson: form.Lesson) -> None:
    lesson.predict(
        "Bytes of a bf16 parameter and its AdamW state: with the state in fp32, and in 16 bits? Is"
        " the master still exact in 16 bits?"
    )
    wide, narrow = bytes_per_parameter(None), bytes_per_parameter(torch.bfloat16)
    lesson.check(
        f"{wide:.0f} = 2 + 4 + 4 + 4 and {narrow:.0f} = 2 + 2 + 2 + 2", (wide, narrow) == (14, 8)
    )
    master = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    low = torch.empty_like(master, dtype=torch.int16)
    optimizer.split_master(master, weight, low)
    equal = (optimizer.join_master(weight, low) == master).sum().item()
    lesson.check(
        f"{equal:,} of 100,000 masters, split into weight and low bits and joined, are the same",
        equal == 100_000,
    )


def decay(lesson: form.Lesson) -> None:
    lesson.predict(
        "lr 0.1, weight decay 0.1, gradient 0. A weight of 1 after a step, in a matrix? In a bias?"
    )
    matrix, bias = [moved(1.0, [0.0], 0.1, shape=shape) for shape in ((2, 2), (2,))]
    lesson.check(
        f"{matrix:.4f} = w - lr λ w; {bias:.4f}: no decay of biases and norms",
        abs(matrix - 0.99) < 1e-6 and bias == 1,
    )


def learning_rate(lesson: form.Lesson) -> None:
    lesson.predict(
        "Peak 3e-4, minimum 3e-5, 10 of 100 steps warmup. The learning rate at step 5, 10, 55, 100?"
    )
    rates = {n: optimizer.learning_rate(n, 3e-4, 3e-5, 10, 100) for n in range(1, 101)}
    for step in (5, 10, 25, 55, 85, 100):
        lesson.say(f"step {step:>3}  {rates[step]:.2e}  {form.bar(rates[step], 3e-4)}")
    shown = [rates[step] for step in (5, 10, 55, 100)]
    expected = [1.5e-4, 3e-4, 1.65e-4, 3e-5]
    lesson.check(
        "half the peak, the peak, half of peak + minimum, the minimum",
        all(abs(a - b) < 1e-12 for a, b in zip(shown, expected)),
    )
