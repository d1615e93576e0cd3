"""The six constants, fitted to published times, and how far predictions are from the others.

The constants of planning/inputs.py are fitted to six rows (FITTED), by least squares of
log(predicted / published): a row that is 10% off counts the same whether it takes a second or an
hour. Weak priors keep a constant of which the rows say nothing. Only the other rows, held out, say
how good a prediction is.

    fitted, held_out = split(rows)
    summary(calibrate(A100, fitted), held_out)

    python -m benchmarks.planner      the constants, errors by group, without each ingredient

Not covered: how uncertain the constants are; errors of the published times. A row that was read off
a plot has one.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

import planner
from planning.inputs import Constants, Machine
from planning.rows import Row

# (group, name) of the rows that the constants in planning/inputs.py were fitted to. Each says most
# about one constant: memory, node, matmul, wait, network, zero3.
FITTED = [
    ("table1", "1.7B"),
    ("table1", "18B"),
    ("table2-ptdp", "PTD 96 384"),
    ("fig15", "t 8, d 8, B 512"),
    ("fig15", "t 32, d 2, B 512"),
    ("table2-zero3", "Z3 96 768"),
]

# --- fitting --------------------------------------------------------------------------------------

# What a constant is expected to be before any measurement, and the standard deviation of its
# logarithm.
PRIOR = {
    "matmul": (0.7, 0.3),
    "memory": (0.7, 0.3),
    "node": (0.7, 0.3),
    "network": (0.5, 0.5),
    "wait": (100e-6, 1.0),
    "zero3": (1e-3, 3.0),
}
# The standard deviation of the logarithm of a measured time.
NOISE = 0.03


def log_error(machine: Machine, row: Row) -> float:
    """log(predicted / published seconds)."""
    seconds = sum(planner.step_time(machine, row.software, row.model, row.layout).values())
    return np.log(seconds / row.seconds)


def calibrate(machine: Machine, rows: list[Row]) -> Machine:
    """The machine with the constants that fit the rows best."""
    expected, deviation = np.array(list(PRIOR.values())).T
    expected = np.log(expected)

    def with_constants(x: np.ndarray) -> Machine:
        return dataclasses.replace(machine, constants=Constants(*map(float, np.exp(x))))

    def residuals(x: np.ndarray) -> np.ndarray:
        fitted = with_constants(x)
        errors = [log_error(fitted, row) / NOISE for row in rows]
        return np.concatenate([errors, (x - expected) / deviation])

    return with_constants(least_squares(residuals, expected))


def least_squares(residuals, x: np.ndarray, steps: int = 30) -> np.ndarray:
    """The x near the one given where the sum of residuals(x)² is least (Gauss and Newton)."""
    for _ in range(steps):
        current = residuals(x)
        slopes = [(residuals(x + 1e-6 * axis) - current) / 1e-6 for axis in np.eye(len(x))]
        # At most a factor of e, where x is a logarithm: far away the slopes are others.
        step = np.linalg.lstsq(np.stack(slopes, axis=1), -current)[0].clip(-1, 1)
        x = x + step
        if np.abs(step).max() < 1e-7:
            break
    return x


# --- errors ---------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """The size of predicted / published - 1, over many rows."""

    mean: float
    # Nine of ten rows are at most so far off.
    ninth_decile: float
    worst: float
    rows: int


def error(machine: Machine, row: Row) -> float:
    """predicted / published seconds - 1"""
    return float(np.exp(log_error(machine, row)) - 1)


def summary(machine: Machine, rows: list[Row]) -> Errors:
    size = np.abs([error(machine, row) for row in rows])
    return Errors(size.mean(), np.quantile(size, 0.9), size.max(), len(size))


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(fitted, held out)"""
    chosen = [row for row in rows if (row.group, row.name) in FITTED]
    return chosen, [row for row in rows if row not in chosen]


def by_group(machine: Machine, rows: list[Row]) -> dict[str, Errors]:
    """The errors of each group of rows."""
    groups = dict.fromkeys(row.group for row in rows)
    return {
        group: summary(machine, [row for row in rows if row.group == group]) for group in groups
    }
