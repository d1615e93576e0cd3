"""Diffusion: a model learns to take noise away from pictures, and then draws from noise alone.

A picture x and noise ε are mixed, from t = 0 (hardly any noise) to 1000 (hardly anything else):

    x_t = a(t) x + b(t) ε

    DDPM      Ho et al., arXiv 2006.11239, equation 4:  a = √ᾱ_t, b = √(1 - ᾱ_t),
              ᾱ_t = Π (1 - β_i); the model finds ε (--objective noise)
    Flow      flow matching (arXiv 2210.02747; rectified flow, arXiv 2209.03003):
              a = 1 - t / 1000, b = t / 1000; the model finds ε - x (--objective flow)

The loss is the mean squared error. A sample begins as noise. In each step the model says what x and
ε are in x_t, and both are mixed again, at an earlier time s:

    x_s = a(s) x + √(b(s)² - σ²) ε + σ z         z: new noise

With σ = 0 this is DDIM (arXiv 2010.02502, equation 12) or, with flow, a step of Euler's method.
With the largest σ it is DDPM's step.

Guidance: training leaves out a tenth of the captions (an empty one takes their place). So one model
gives ε(c) and ε(∅), and w > 1 goes beyond ε(c) (arXiv 2207.12598, as Imagen writes it):

    ε = ε(∅) + w (ε(c) - ε(∅))

    python -m models.draw --checkpoint runs/dit --caption "a small red circle on white"

Not covered: learned variances, other noise schedules, weights of the loss, samplers of higher
order, dynamic thresholds, an average of the weights over steps, distillation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from models.picture_data import Captioned, caption_ids
from models.pictures import Batch, Example, to_tensor
from models.vit import PictureConfig

# --- noise and its steps --------------------------------------------------------------------------

# T, the number of times; a model sees a time from 0 to T.
T = 1000


class Process:
    """How pictures become noise, and what the model finds: ε - c x."""

    c: float

    def rates(self, t: float) -> tuple[float, float]:
        """a(t), b(t)"""
        raise NotImplementedError

    def time(self, u: float) -> float:
        """The time of a training example. u: uniform in [0, 1)."""
        return u * T

    def times(self, steps: int) -> list[float]:
        """The times of a sample's steps: all noise first, at last none."""
        return [T * k / steps for k in range(steps, -1, -1)]

    def add_noise(self, x: Tensor, noise: Tensor, t: float) -> Tensor:
        a, b = self.rates(t)
        return a * x + b * noise

    def target(self, x: Tensor, noise: Tensor) -> Tensor:
        return noise - self.c * x

    def picture(self, x_t: Tensor, t: float, found: Tensor) -> Tensor:
        """x, by what the model has found in x_t: ε = found + c x, and x_t = a x + b ε."""
        a, b = self.rates(t)
        return (x_t - b * found) / (a + b * self.c)

    def step(self, x_t: Tensor, t: float, s: float, found: Tensor, z=None, clip=False) -> Tensor:
        """From time t to s. z: new noise, for DDPM's step; None: σ = 0. clip: x is a picture, of
        numbers from -1 to 1."""
        (a, b), (a_s, b_s) = self.rates(t), self.rates(s)
        x = self.picture(x_t, t, found)
        if clip:
            x = x.clamp(-1, 1)
        noise = (x_t - a * x) / b
        if z is None:
            return a_s * x + b_s * noise
        # β̃ of arXiv 2010.02502, equation 16
        variance = (b_s / b) ** 2 * (1 - (a / a_s) ** 2)
        return a_s * x + math.sqrt(b_s**2 - variance) * noise + math.sqrt(variance) * z


class Flow(Process):
    """Flow matching."""

    c = 1.0

    def rates(self, t: float) -> tuple[float, float]:
        return 1 - t / T, t / T


class DDPM(Process):
    """β from 1e-4 to 0.02 (section 4). Times are whole numbers below T; at -1 there is no noise."""

    c = 0.0

    def __init__(self, kept: Tensor | None = None):
        """kept: ᾱ of each time, [T] float64; by default that of the paper."""
        beta = torch.linspace(1e-4, 0.02, T, dtype=torch.float64, device="cpu")
        kept = (1 - beta).cumprod(0) if kept is None else kept
        self.kept: list[float] = [*kept.tolist(), 1.0]

    def rates(self, t: float) -> tuple[float, float]:
        kept = self.kept[int(t)]
        return math.sqrt(kept), math.sqrt(1 - kept)

    def time(self, u: float) -> float:
        return float(int(u * T))

    def times(self, steps: int) -> list[float]:
        return [round(t) - 1.0 for t in super().times(steps)]


# What --objective names.
OBJECTIVES: dict[str, Callable[[], Process]] = {"noise": DDPM, "flow": Flow}

# --- samples --------------------------------------------------------------------------------------


def guided(
    model: Callable, captions: Tensor, empty: Tensor, w: float, source=None, w_source: float = 1.0
) -> Callable[[Tensor, float], Tensor]:
    """What `sample` asks, (x_t, t) -> found, made of model(x_t, t, captions, source).

    captions: [n, m] ids; empty: those of no caption, [m]; w: the guidance; source: [n, c, H, W],
    which edits begin with, or None. With it there are two guidances (InstructPix2Pix, arXiv
    2211.09800, equation 3), and zeros are no source:

        ε = ε(∅, ∅) + w_source (ε(∅, source) - ε(∅, ∅)) + w (ε(c, source) - ε(∅, source))"""
    nothing = empty.expand_as(captions)
    texts, weights = [nothing, captions], [w]
    if source is not None:
        texts, weights = [nothing, nothing, captions], [w_source, w]
        source = torch.cat((torch.zeros_like(source), source, source))
    k, ids = len(texts), torch.cat(texts)

    def find(x_t: Tensor, t: float) -> Tensor:
        found = model(torch.cat([x_t] * k), t, ids, source).chunk(k)
        result = found[0]
        for weight, without, given in zip(weights, found, found[1:]):
            result = result + weight * (given - without)
        return result

    return find


@torch.no_grad()
def sample(process: Process, find: Callable, draw: Callable, steps: int, ddpm=False, clip=False):
    """Pictures from noise. find(x_t, t): what the model finds; draw(): new noise, as large as the
    pictures; ddpm: whether each step has new noise; clip: as of Process.step."""
    x = draw()
    for t, s in pairwise(process.times(steps)):
        x = process.step(x, t, s, find(x, t), draw() if ddpm else None, clip)
    return x


# --- what a model needs ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DenoiserConfig(PictureConfig):
    """The shape of a model that takes noise away: model(tokens, targets, context).

    tokens: [b, s], the caption first; context.pictures: [b, channels + source_channels, H, W], the
    noised picture and what an edit begins with; context.times: [b]. It gives the squared error of
    each picture, [b, 1]; without targets what it finds, [b, channels, H, W]."""

    vocab_size: int = 257
    # Channels of the picture that an edit begins with; 0: there is none.
    source_channels: int = 0
    # m, the tokens of a caption.
    text_length: int = 39

    @property
    def positions_before(self) -> int:
        self.check_size("text_length")
        self.check_range("source_channels", 0, 2**15, "must be at least 0 and at most 2^15")
        return self.text_length + 1


class TimeEmbedding(nn.Module):
    """A vector for each time: W silu(V [cos, sin](t ω) + a) + b. times: [b] -> [b, h]"""

    def __init__(self, h: int, features: int = 256):
        super().__init__()
        self.first, self.second = nn.Linear(features, h), nn.Linear(h, h)

    def forward(self, times: Tensor) -> Tensor:
        half = self.first.in_features // 2
        rates = torch.exp(torch.arange(half, device=times.device) * (-math.log(10_000) / half))
        angles = times.unsqueeze(1) * rates  # [b, features / 2]
        x = torch.cat((angles.cos(), angles.sin()), 1).to(self.first.weight.dtype)
        return self.second(F.silu(self.first(x)))


def squared_error(found: Tensor, targets: Tensor) -> Tensor:
    """[b, c, H, W] each -> the mean of each picture, [b, 1], at least in float32."""
    found = found.to(torch.promote_types(found.dtype, torch.float32))
    return (found - targets).square().flatten(1).mean(1, keepdim=True)


# --- data -----------------------------------------------------------------------------------------


class NoisedData(Captioned):
    """Pictures with noise, and their captions. Time, noise and what is left out of the conditions
    depend on (seed, sample) alone. targets: [b, c, H, W]"""

    def __init__(self, *args, process: Process, encode: Callable, edits: bool, **options):
        """encode: a picture [1, 3, H, W] -> what is noised, [1, c, H', W']; edits: whether the
        model reads sources."""
        super().__init__(*args, **options)
        self.process, self.encode, self.edits = process, encode, edits
        self.empty = caption_ids(self.tokenizer, "", self.m)[0]

    def noised(self, sample: int, example: Example) -> tuple[list[int], Tensor, Tensor, float]:
        """(ids of the caption, noised picture and source, target, time). What is left out:

        part, uniform    0 ..      0.05 ..   0.1 ..    0.15 .. 1
        caption          empty     empty
        source                     zeros     zeros"""
        g = gpt.generator(0, f"{self.sequence_of.seed}, noise of {sample}")
        u, part = torch.rand(2, generator=g, dtype=torch.float64).tolist()
        x = self.encode(to_tensor([example.picture]))
        noise = torch.randn(x.shape, generator=g)
        t = self.process.time(u)
        inputs = [self.process.add_noise(x, noise, t)]
        if self.edits:
            source = self.encode(to_tensor([example.source]))
            inputs.append(torch.zeros_like(source) if 0.05 <= part < 0.15 else source)
        ids = self.empty if part < 0.1 else self.text_and_target(example)[0]
        return ids, torch.cat(inputs, 1), self.process.target(x, noise), t

    def batch(self, samples) -> Batch:
        rows = [self.noised(int(n), self.example(n)) for n in samples]
        ids, pictures, targets, times = zip(*rows)
        tokens = F.pad(torch.tensor(ids), (0, self.s - self.m))
        counts = torch.ones(len(rows), 1, dtype=torch.bool)
        others = torch.tensor(list(samples)), torch.cat(pictures), torch.tensor(times)
        return Batch(tokens, torch.cat(targets), counts, *others)
