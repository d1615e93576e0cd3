"""The lesson of models/diffusion.py and dit.py: from noise to numbers; guidance; two ranks."""

import math

import torch
from torch import Tensor

from course import demo, form
from models import diffusion, dit
from models.pictures import Context

WITHOUT = form.Removals()


@WITHOUT.replace("remix", diffusion.Process, "step", "Where do the samples end?")
def noiseless(self, x_t, t, s, found, z=None, clip=False):
    """All at one place: at 0, the mean of the data; with the caption 1 all at 1, since the first
    guess is 0.6. The noise in x_s carries on what x_t began: without it nothing tells samples
    apart."""
    return self.rates(s)[0] * self.picture(x_t, t, found)


@WITHOUT.replace("guidance", diffusion, "guided", "How many samples follow the caption now?")
def unguided(model, captions, empty, w, source=None, w_source=1.0):
    """As many as of the data, whatever w is: the model is asked with its conditions alone."""
    return lambda x_t, t: model(x_t, t, captions, source)


@WITHOUT.replace("slices", dit.Embedding, "share_sequence", "Which positions does rank 1 embed?")
def first_slice(self, group):
    """Those of rank 0 again: caption and time stand twice, and the last patches nowhere."""
    self.shard = 0, group.size()


SAMPLES, RIGHT = 2000, 0.8


def best_model(x_t: Tensor, t: float, captions: Tensor, source=None) -> Tensor:
    """The noise that the best model finds. The data are -1 and 1, equally often; a caption (-1 or
    1; 0: none) is right in 80% of them. E[x | x_t, c] = tanh(a x_t / b² + c ln(0.8 / 0.2) / 2)"""
    a, b = diffusion.DDPM().rates(t)
    x = torch.tanh(a * x_t / b**2 + captions * math.log(RIGHT / (1 - RIGHT)) / 2)
    return (x_t - a * x) / b


def samples(lesson: form.Lesson, steps: int, caption: int, w: float) -> Tensor:
    """[SAMPLES, 1]"""
    g = torch.Generator().manual_seed(0)
    captions = torch.full((SAMPLES, 1), caption)
    with lesson.removed():
        find = diffusion.guided(best_model, captions, torch.zeros(1), w)
        draw = lambda: torch.randn(SAMPLES, 1, generator=g, dtype=torch.float64)  # noqa: E731
        return diffusion.sample(diffusion.DDPM(), find, draw, steps)


def two_conditions(x_t: Tensor, t: float, captions: Tensor, source: Tensor) -> Tensor:
    """1 without caption and source, 2 with the source, 5 with both."""
    return 1 + source + 3 * captions


def edits(lesson: form.Lesson) -> None:
    lesson.predict(
        "An edit has a caption and a source, and a guidance for each: w = 3, w_source = 2. A model"
        " finds 1 with none of the two, 2 with the source, 5 with both. What is used?",
        "the guided number",
    )
    ones = torch.ones(1, 1)
    with lesson.removed():
        used = diffusion.guided(two_conditions, ones, torch.zeros(1), 3, ones, 2)(ones, 0).item()
    lesson.check(f"{used:.0f} (right: 1 + 2 (2 - 1) + 3 (5 - 2) = 12)", used == 12, [used])


def one_step(rank: int) -> dict:
    """A DiT, and how many positions this rank embeds."""
    fields = dict(num_layers=2, hidden_size=64, num_heads=4, picture_size=16, patch_size=4)
    config = dit.DiTConfig(**fields, text_length=7, vocab_size=64)
    model = demo.sharded_model(config)
    tokens, _ = demo.random_tokens(4, config.seq_length, 64)
    pictures, noise = torch.randn(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    context = Context(pictures=pictures, times=torch.tensor([10.0, 300.0, 600.0, 990.0]))
    embedded = model.embedding(tokens, context)
    return demo.one_step(model, tokens, noise, context) | {"positions": embedded.shape[1]}


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        "In DDPM's schedule of 1000 times, x_t = a x + b ε with a² + b² = 1. What is a in the"
        " middle, at time 499, and at the end, 999?",
        "a at 499; a at 999",
    )
    a = [diffusion.DDPM().rates(t)[0] for t in (499, 999)]
    lesson.check(
        f"{a[0]:.3f} and {a[1]:.4f}: half of the times are almost noise alone",
        0.27 < a[0] < 0.29 and 0.006 < a[1] < 0.007,
        a,
    )
    lesson.predict(
        f"The data are -1 and 1, and the best model of them draws {SAMPLES:,} numbers from noise."
        " How many percent end within 0.1 of -1 or 1, in one step, and in 25?",
        "percent in 1 step; in 25",
    )
    drawn = [samples(lesson, steps, 0, 1.0) for steps in (1, 25)]
    near = [100 * ((x.abs() - 1).abs() < 0.1).double().mean().item() for x in drawn]
    lesson.check(
        f"{near[0]:.0f} and {near[1]:.0f} (right: 0, and nearly all). In noise alone the best guess"
        " is the mean of all data; each step makes it more one of them",
        near[0] == 0 and near[1] > 95,
        near,
    )
    lesson.predict(
        "Now there are captions, -1 or 1, of which 80% are right. How many percent of the samples"
        " for 1 are above 0, with guidance w = 1 (none), and with w = 3?",
        "percent with w = 1; with w = 3",
    )
    above = [100 * (samples(lesson, 25, 1, w) > 0).double().mean().item() for w in (1.0, 3.0)]
    lesson.check(
        f"{above[0]:.0f} and {above[1]:.0f} (right: 80, as in the data, and nearly all)",
        abs(above[0] - 80) < 5 and above[1] > 95,
        above,
    )
    edits(lesson)
    lesson.predict(
        "A DiT reads 7 tokens of a caption, a time and 16 patches, on two tensor and sequence"
        " parallel ranks. How many positions does each embed? How many are patches on rank 0?",
        "positions; patches",
    )
    one, two = lesson.one_and_many(2, one_step)
    positions = two[0]["positions"]
    numbers = [positions, positions - 8]
    lesson.check(f"{numbers[0]}, with {numbers[1]} patches on rank 0", numbers == [12, 4], numbers)
    demo.check_step(lesson, one, two[0])


if __name__ == "__main__":
    form.run("diffusion")
