"""The gate: any layout against one device, in one line.

    same(train(world=4, micro_batch_size=1), train())

`train` runs a few steps of any configuration on `world` ranks (proof/parity.py).
"""

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
    "difference",
    "differs",
    "put_together",
    "same",
    "train",
    "train_each",
]


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
