"""The lesson of optimizer.py: sums in float32, the loss scale, the size of a step, what 16-bit
weights forget, bytes of state, Muon's update, the learning rate and the batch of a step."""

from unittest import mock

import torch
from torch import Tensor, nn

import optimizer
from course import form
from optimizer import AdamW, GradientAccumulator, LossScaler
from run import muon, task

WITHOUT = form.Removals()


@WITHOUT.replace(
    "float32", optimizer, "accumulation_dtype", "Each gradient is right. Which sums are wrong?"
)
def own_dtype(dtype: torch.dtype) -> torch.dtype:
    """Those that need more bits than the weight's type has: 256 + 1 is 256 in bf16, and 6.6e-4
    divided by 2^16 is 0 in fp16. The search adds no gradients."""
    return dtype


@WITHOUT.replace("scale", LossScaler, "__init__", "The loss is right. Which weights learn nothing?")
def unscaled(self, *arguments, original=LossScaler.__init__, **options) -> None:
    """Those whose gradients are below about 3e-8: fp16 rounds them to 0 in backward. Sums of larger
    gradients are right. With a scale of 1 nothing overflows, so no step is skipped."""
    original(self, *arguments, **options)
    self.scale = 1.0


@WITHOUT.add("search", "The same scale is found. What does it cost?")
def no_search():
    """15 more steps that are computed and then skipped: each overflow but the first halves the
    scale, and the way from 2^32 to 2^16 takes 17 steps, not 2."""
    never = property(lambda self: False, lambda self, value: None)
    return mock.patch.object(LossScaler, "searching", never, create=True)


@WITHOUT.replace("master", AdamW, "weights_from_masters", "Why does training stop at a small lr?")
def round_masters(self, names=None, original=AdamW.weights_from_masters) -> None:
    """Below 1 bf16 numbers are 0.0039 apart. A step of less than half of that is rounded away, each
    time anew, for nothing keeps the rest. A small learning rate makes all steps so small."""
    original(self, names)
    for name, master in self.masters.items():
        master.copy_(self.parameters[name].detach())


@WITHOUT.replace(
    "low-bits", optimizer, "split_master", "Training still runs. Which updates are lost?"
)
def split_without_low(
    master: Tensor, weight: Tensor, low: Tensor, original=optimizer.split_master
) -> None:
    """Those of less than half the distance between two bf16 numbers, as without a master: the
    weight and low bits of 0 are a master rounded to bf16. With an fp32 master no low bits are
    needed, so the check before holds."""
    original(master, weight, low)
    low.zero_()


@WITHOUT.replace("bias-correction", AdamW, "allocate", "How large is the first step?")
def allocate_old(self, original=AdamW.allocate) -> None:
    """v rises more slowly than m. After one step m is 0.1 g, and v is 0.05 g²: lr 0.1 / √0.05 =
    0.447 lr. After 100 steps m and v have nearly their full size, so the check with a master
    holds."""
    original(self)
    self.updates.fill_(1e6)


@WITHOUT.add("newton-schulz", "The matrix is divided by its norm alone. What stays small?")
def no_newton_schulz():
    """The small singular value: one factor for all keeps the ratio of 7.13 to 0.04. Each step of
    Newton-Schulz makes a small one about 3.4 times as large, and keeps a large one near 1."""
    return mock.patch.object(muon, "STEPS", 0)


@WITHOUT.replace("stable", optimizer, "learning_rate", "wsd decays from warmup on. What is lost?")
def decay_at_once(*arguments, decay=0, original=optimizer.learning_rate):
    """The stable part: from any of its steps a run can go on longer, or decay and end. A schedule
    that falls all the time must know its last step before its first."""
    return original(*arguments, decay=arguments[4])


@WITHOUT.replace("ramp-up", task, "batch_after", "All batches have full size. What is lost?")
def full_size(steps: int, taken: int, sizes: range, rampup: int) -> range:
    """Updates: 4 steps take the samples of 8. Early gradients agree so well that a small batch
    gives nearly the same direction (arXiv 1812.06162), so more steps learn more."""
    first = taken + steps * sizes[-1]
    return range(first, first + sizes[-1])


# --- the lesson -----------------------------------------------------------------------------------


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        sums(lesson)
        loss_scale(lesson)
        first_step(lesson)
        masters(lesson)
        state(lesson)
        muon_update(lesson)
        schedules(lesson)


def sum_of(dtype: torch.dtype, gradient: float, times: int, scaler=None) -> float:
    """The `main_grad` of a weight after `times` backward passes that each bring `gradient`."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1, dtype=dtype))])
    accumulator = GradientAccumulator(model, scaler)
    scale = scaler.scale if scaler else 1.0
    for _ in range(times):
        # The loss is in float32 until the loss scale is in it.
        loss = model[0].float() * gradient * scale
        loss.sum().backward()
    accumulator.reduce_gradients()
    return model[0].main_grad.item()


def sums(lesson: form.Lesson) -> None:
    lesson.predict(
        "300 micro-batches each bring a gradient of 1. Their sum in bf16? In main_grad?",
        "in bf16; in main_grad",
    )
    plain = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(300):
        plain += 1
    total = sum_of(torch.bfloat16, 1.0, 300)
    lesson.check(
        f"in bf16 {plain.item():.0f}, for 256 + 1 is rounded to 256; in main_grad {total:.0f}",
        (plain.item(), total) == (256, 300),
        [plain.item(), total],
    )


def skipped_steps() -> tuple[int, float]:
    """(steps that are skipped until one is finite, the scale of that step), where gradients
    overflow above a scale of 2^16."""
    scaler = LossScaler()
    skipped = 0
    while scaler.scale > 2.0**16:
        scaler.update(finite=False)
        skipped += 1
    return skipped, scaler.scale


def loss_scale(lesson: form.Lesson) -> None:
    lesson.predict(
        "A gradient of 1e-8 in fp16, whose smallest number is 6e-8: what is in main_grad without a"
        " loss scale, and with 2^16? The scale begins at 2^32, and here gradients overflow above"
        " 2^16; an overflow skips the step and divides the scale by 2^8. Skipped steps? By"
        " halving?",
        "main_grad without a scale; main_grad with 2^16; skipped steps; by halving",
    )
    without = sum_of(torch.float16, 1e-8, 1)
    scaled = sum_of(torch.float16, 1e-8, 1, LossScaler(scale=2.0**16))
    lesson.check(
        f"{without:.2e} without; with 2^16 backward computes 6.6e-4, and main_grad is {scaled:.2e}",
        without == 0 and abs(scaled / 1e-8 - 1) < 1e-3,
        [without, scaled],
    )
    skipped, scale = skipped_steps()
    with no_search():
        by_halves = skipped_steps()[0]
    lesson.check(
        f"{skipped}, at last {scale:,.0f} = 2^16; by halving {by_halves}: the first overflow"
        " changes nothing",
        (skipped, scale, by_halves) == (2, 2.0**16, 17),
        [skipped, by_halves],
    )


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


def first_step(lesson: form.Lesson) -> None:
    lesson.predict(
        "lr 0.001, no decay: how far does the first step move a weight whose gradient is 100?"
        " 0.01?",
        "with gradient 100; with gradient 0.01",
    )
    large, small = [-moved(0.0, [g], 1e-3) for g in (100.0, 0.01)]
    lesson.check(
        f"{large:.6f} and {small:.6f}: at t = 1 the step is lr g / √g² = lr",
        max(abs(large - 1e-3), abs(small - 1e-3)) < 1e-8,
        [large, small],
    )


def masters(lesson: form.Lesson) -> None:
    lesson.predict(
        "A bf16 weight is 1, and 100 steps of lr 0.001 each subtract 0.001. What is it then, if it"
        " is updated in bf16? If an fp32 master is?",
        "in bf16; with a master",
    )
    plain = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(100):
        plain -= 1e-3
    value = moved(1.0, [1.0] * 100, 1e-3, torch.bfloat16)
    rounded = torch.tensor(0.9).bfloat16().item()
    lesson.check(
        f"in bf16 {plain.item():.4f}: below 1 its numbers are 0.0039 apart; with a master"
        f" {value:.4f}",
        plain.item() == 1 and value == rounded,
        [plain.item(), value],
    )


def bytes_per_parameter(state_dtype: torch.dtype | None) -> float:
    """Bytes of a bf16 weight and its optimizer state, for each parameter."""
    p = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    adamw = AdamW([("w", p)], state_dtype=state_dtype)
    states = adamw.masters, adamw.low, adamw.exp_avg, adamw.exp_avg_sq
    return (p.nbytes + sum(x.nbytes for state in states for x in state.values())) / p.numel()


def state(lesson: form.Lesson) -> None:
    lesson.predict(
        "Bytes of a bf16 parameter and its AdamW state: with the state in fp32, and in 16 bits? Is"
        " the master still exact in 16 bits?",
        "bytes, fp32; bytes, 16 bits",
    )
    wide, narrow = bytes_per_parameter(None), bytes_per_parameter(torch.bfloat16)
    lesson.check(
        f"{wide:.0f} = 2 + 4 + 4 + 4 and {narrow:.0f} = 2 + 2 + 2 + 2",
        (wide, narrow) == (14, 8),
        [wide, narrow],
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


def muon_update(lesson: form.Lesson) -> None:
    lesson.predict(
        "A gradient [[3, 4], [3, 4.1]] has singular values 7.13 and 0.04. The smaller one of Muon's"
        " update (run/muon.py)? If two ranks have a row each, and orthogonalise it alone?",
        "whole; in slices",
    )
    gradient = torch.tensor([[3.0, 4.0], [3.0, 4.1]])
    slices = torch.cat([muon.orthogonalize(row) for row in gradient.split(1)])
    values = [torch.linalg.svdvals(x) for x in (muon.orthogonalize(gradient), slices)]
    text = " and ".join(f"{small:.2f} (beside {large:.2f})" for large, small in values)
    smaller = [x[1].item() for x in values]
    lesson.check(f"{text}: a rank gets the others' slices first", smaller[0] > 0.6, smaller)


def schedules(lesson: form.Lesson) -> None:
    lesson.predict(
        "The rate: 1 at step 10, 0 at step 110. At 85, by a line, a cosine, wsd of 10 steps?",
        "line; cosine; wsd",
    )
    rates = [
        optimizer.learning_rate(85, 1.0, 0.0, 10, 110, schedule, decay=10)
        for schedule in ("linear", "cosine", "wsd")
    ]
    lesson.check(
        f"{rates[0]:.2f}, {rates[1]:.3f} and {rates[2]:.2f}: wsd begins to decay at step 100",
        rates[0] == 0.25 and rates[1] < 0.25 and rates[2] == 1,
        rates,
    )
    lesson.predict(
        "--rampup-batch-size 2 2 24 (from 2 by 2, to 8 after 24 samples): steps smaller than 8?",
        "steps",
    )
    sizes = [len(task.batch_after(step, 0, range(2, 9, 2), 24)) for step in range(9)]
    smaller = sum(size < 8 for size in sizes)
    lesson.check(
        f"{smaller}: {sizes}; size 6 for steps that begin before sample 24",
        sizes == [2] * 4 + [4] * 2 + [6] * 2 + [8],
        [smaller],
    )


if __name__ == "__main__":
    form.run("optimizer")
