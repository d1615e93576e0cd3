"""The gate: any layout against one device, in one line.

    same(train(world=4, micro_batch_size=1), train())
    check(4, [dict(tp=4), dict(pp=2, tp=2)])        several layouts, each against one device

`train` runs a few steps of any configuration on `world` ranks (course/parity.py).
"""

import shutil
from functools import partial

import pytest
import torch

import train as trainer
from base.groups import Groups
from course import ranks
from course.parity import LLAMA, SMALL, Result, difference, on_rank, put_together, train
from course.synthetic import Documents, Prompted, Synthetic, SyntheticPairs
from course.training_commands import config_of
from run.config import LAYOUT

__all__ = [
    "DATA",
    "LLAMA",
    "SMALL",
    "Documents",
    "Prompted",
    "Result",
    "Synthetic",
    "SyntheticPairs",
    "again",
    "check",
    "difference",
    "differs",
    "gates",
    "needs_compiler",
    "put_together",
    "same",
    "step",
    "train",
    "train_each",
    "trainer_of",
    "without_cpp",
]


# for a trainer of SMALL or LLAMA
DATA = Synthetic(SMALL["seq_length"], SMALL["vocab_size"])


def train_each(
    world: int,
    variants: list[dict],
    steps: int = 3,
    base: dict = SMALL,
    trace: bool = False,
    **flags,
) -> list[Result]:
    """Several runs on the same ranks, one after the other: launching them costs more than a run."""
    variants = [base | flags | variant for variant in variants]
    return ranks.run(on_rank, world, world, variants, steps, None, trace)[0]


def trainer_of(base: dict = SMALL, groups: Groups | None = None, **flags) -> trainer.Trainer:
    """In this process, whose data is yet to be chosen."""
    config = config_of(base | flags)
    return trainer.Trainer(config, torch.device("cpu"), groups or Groups(), config.task())


def step(t: trainer.Trainer, number: int = 1, data=DATA) -> torch.Tensor:
    """The gradient norm."""
    t.forward_backward(number, data)
    return t.update(number)[0]


def again(*values, **options):
    """A case that covers no more than another one does: `make test-all` runs it."""
    return pytest.param(*values, marks=pytest.mark.repetition, **options)


def gates(cases: dict[str, tuple], more: dict[str, tuple]):
    """A test of each (configuration, ranks, layouts), under its name; of `more` in
    `make test-all`."""
    params = [pytest.param(*case, id=name) for name, case in cases.items()]
    params += [again(*case, id=name) for name, case in more.items()]
    return pytest.mark.parametrize("base, world, layouts", params)


needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="torch.compile needs a C++ compiler on the CPU"
)


def without_cpp():
    """torch.compile traces and differentiates, but generates no C++ from the graphs: compiling that
    takes a minute."""
    torch.compile = partial(torch.compile, backend="aot_eager")


def same(a: Result, b: Result, tolerance: float = 1e-10) -> None:
    """In float32 (a wider tolerance) the gate is about loss and gradients: Adam makes steps of
    rounding noise."""
    worst = difference(a, b)
    assert b.margin > 10 * tolerance, f"a token's routing is {b.margin:.1e} from a tie"
    if tolerance > 1e-10:
        del worst["parameter"]
    assert all(x <= tolerance for x in worst.values()), worst


def differs(a: Result, b: Result, at_least: float = 1e-3) -> None:
    """For mutations: something that the gate looks at is off by far more than rounding."""
    worst = difference(a, b)
    assert max(worst.values()) >= at_least, worst


# what changes speed and memory alone
OF_LAYOUT = {*LAYOUT, "recompute", "recompute_layers", "head_chunk", "device", "micro_batch_size"}
OF_LAYOUT.add("make_vocab_size_divisible_by")


def check(
    world: int,
    layouts: list[dict],
    base: dict = SMALL,
    steps: int = 3,
    tolerance: float = 1e-10,
    device: str = "cpu",
) -> None:
    """Each of the layouts on `world` ranks gives what one device gives with those of its flags that
    are no layout. Routing and FP8 scales are about a micro-batch, which one device takes too.
    device: the one device."""
    for layout, result in zip(layouts, train_each(world, layouts, steps, base), strict=True):
        flags = base | layout
        one = {name: value for name, value in flags.items() if name not in OF_LAYOUT}
        if "micro_batch_size" in flags and {"num_experts", "fp8"} & flags.keys():
            one["micro_batch_size"] = flags["micro_batch_size"]
        try:
            same(result, train(steps=steps, base=one | dict(device=device)), tolerance)
        except AssertionError as e:
            raise AssertionError(f"{layout}: {e}") from e
