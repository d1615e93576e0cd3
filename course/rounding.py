"""How far apart losses may be without a bug: runs of one device that differ only in rounding.

a + b + c has another last bit in another order, so two right runs drift apart. Here some runs of
one device add in other orders: of the samples of a step, of its micro-batches, of the columns of a
matrix. The band at a step is twice their largest relative difference so far (verify.py says how
often a run without a bug leaves it).
"""

import math
from functools import partial, partialmethod

import torch
import torch.nn.functional as F
from torch import Tensor

import gpt
from base.float8 import Quantised, product_dtype
from course import ranks
from course.parity import Run
from course.shrink import one_device
from course.synthetic import Synthetic
from course.training_commands import config_of
from finetune.preference import PreferenceConfig

# The runs that make a band.
RUNS = 6
# The band may have no width: the first loss of DPO is log 2 in any order of sums. Then losses may
# differ by what rounding one number does, in float32.
ROUNDING = 2**-23
# The first steps share one band.
SHARED = 5


def skewed(dataset: Synthetic, generator: torch.Generator) -> Tensor:
    """[s + 1] token ids that are not equally frequent: something to learn."""
    return (torch.rand(dataset.s + 1, generator=generator) ** 3 * dataset.v).long()


def learn_something(run: Run) -> None:
    """Pairs of answers have it already: they can be told apart."""
    if not isinstance(run.trainer.config, PreferenceConfig):
        # Padded rows are cut from whole ones.
        dataset = getattr(run.dataset, "whole", run.dataset)
        dataset.draw = partial(skewed, dataset)


def losses_of(rank: int, world: int, layout: dict, steps: int, mutate) -> list[float]:
    if mutate:
        mutate()
    run = Run(world, config_of(layout))
    learn_something(run)
    return run.train(steps).losses


def losses_in_another_order(rank: int, layout: dict, steps: int, parts: int) -> list[float]:
    """Losses of one device whose order of sums depends on the rank; rank 0 has the usual one.

    Products of the matrices that tensor parallelism shards by rows, and all in FP8, are added in
    `parts` parts. The samples of a step have another order, and other micro-batches if there are no
    experts and no FP8, whose scales are those of a micro-batch."""
    # Micro-batches divide each size of a ramp-up.
    batch_sizes = config_of(layout).batch_sizes
    batch = math.gcd(batch_sizes.start, batch_sizes.step)
    # The number of sequences that stay together.
    pair = 2 if layout["command"] == PreferenceConfig.name_in_messages() else 1
    fixed = layout["num_experts"] or layout["fp8"] != "off"
    if rank and not fixed:
        sizes = [n for n in range(pair, batch + 1, pair) if batch % n == 0]
        layout = layout | dict(micro_batch_size=sizes[rank % len(sizes)])
    run = Run(1, config_of(layout))
    learn_something(run)
    t = run.trainer
    if rank:
        generator = torch.Generator().manual_seed(rank)
        # This process has one run.
        Quantised.__matmul__ = partialmethod(product_in_parts, parts, rank)
        for block in t.model.blocks.values():
            for linear in (block.attention.output, block.mlp.down):
                if type(linear) is gpt.DeferredBiasLinear:
                    order = torch.randperm(linear.in_features, generator=generator)
                    # Its forward stays, because it may have an adapter in it.
                    linear.__class__ = LinearInParts
                    linear.parts = order.chunk(parts)
        # Routing and scales depend on the samples of a micro-batch, so samples stay in theirs.
        size = t.micro_batch if fixed else batch
        t.task.samples = partial(shuffled, t.task.samples, size, pair, generator)
    return run.train(steps).losses


class LinearInParts(gpt.DeferredBiasLinear):
    """x Wᵀ, [b, s, out]; each part of the inner dimension is rounded, then they are added."""

    parts: tuple[Tensor, ...]

    def forward(self, x: Tensor) -> Tensor:
        return sum(F.linear(x[..., part], self.weight[:, part]) for part in self.parts)


def product_in_parts(a: Quantised, parts: int, seed: int, b: Quantised) -> Tensor:
    """a @ b, [M, K] @ [K, N]. The bytes are the same: only the order of the sum over K differs."""
    wide = product_dtype(a.dtype, a.exact)
    x, y = a.values(wide), b.values(wide)
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
    return sum(x[:, part] @ y[part] for part in order.chunk(parts)).to(a.dtype)


def shuffled(samples, size: int, pair: int, generator: torch.Generator, step: int) -> list[int]:
    """The samples of a step, each `size` of them in another order; each `pair` stays together."""
    numbers = []
    for part in torch.tensor(list(samples(step))).split(size):
        pairs = part.view(-1, pair)
        numbers += pairs[torch.randperm(len(pairs), generator=generator)].flatten().tolist()
    return numbers


def band_of(runs: list[dict[int, float]]) -> dict[int, float]:
    """{step: the relative difference of two losses up to which they are normal}, for the steps that
    all runs have. runs: {step: loss} of runs that differ only in the order of their sums."""
    steps = sorted(set.intersection(*map(set, runs)))
    spread = []
    for step in steps:
        losses = [run[step] for run in runs]
        spread.append((max(losses) - min(losses)) / losses[0])
    return {step: 2 * max(spread[: max(i + 1, SHARED)]) for i, step in enumerate(steps)}


def measure_band(layout: dict, steps: int, parts: int) -> tuple[dict[int, float], dict[int, float]]:
    """(the band, the losses of one device), of a layout as `shrink` gives it, in its precision."""
    one = one_device(layout)
    runs = ranks.run(losses_in_another_order, RUNS, one, steps, parts)
    runs = [dict(enumerate(losses, 1)) for losses in runs]
    return band_of(runs), runs[0]


def times_band(a: dict[int, float], b: dict[int, float], band: dict[int, float]) -> dict:
    """{step: relative difference of the losses, over the band}, for the steps that all have."""
    found = {}
    for step in sorted(a.keys() & b.keys() & band.keys()):
        apart, limit = abs(a[step] - b[step]), max(band[step], ROUNDING) * abs(b[step])
        found[step] = 0.0
        if apart:
            found[step] = apart / limit if limit else float("inf")
    return found
