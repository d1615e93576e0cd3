"""The gate: any layout against one device, in one line.

    same(train(world=4, micro_batch_size=1), train())

`train` runs a few steps of any configuration on `world` ranks (proof/parity.py).
"""

import shutil
from functools import partial

import pytest
import torch

from proof.parity import (
    LLAMA,
    SMALL,
    Result,
    difference,
    put_together,
    train,
    train_each,
)
from proof.synthetic import Documents, Prompted, Synthetic, SyntheticPairs

__all__ = [
    "LLAMA",
    "SMALL",
    "Documents",
    "Prompted",
    "Result",
    "Synthetic",
    "SyntheticPairs",
    "again",
    "difference",
    "differs",
    "needs_compiler",
    "put_together",
    "same",
    "train",
    "train_each",
    "without_cpp",
]


def again(*values, **options):
    """A case that covers no more than another one does: `make test-all` runs it."""
    return pytest.param(*values, marks=pytest.mark.repetition, **options)


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
