"""The six constants, fitted; how far predictions are from published times; what each ingredient of
the model is worth.

The constants of planning/inputs.py are fitted to six rows (FITTED), by least squares of
log(predicted / published): a row that is 10% off counts the same whether it takes a second or an
hour. Weak priors keep a constant of which the rows say nothing. Only the other rows, held out, say
how good a prediction is. To see what an ingredient is worth, leave it out, fit the constants again
to the same six rows, and look at the rows held out:

    with WITHOUT["wait"]():
        machine, errors = measure(rows)

    python comparisons/planner.py      the constants, errors by group, without each ingredient

Not covered: how uncertain the constants are; errors of the published times. A row that was read off
a plot has one.
"""

import dataclasses
from typing import NamedTuple
from unittest import mock

import numpy as np

import planner
from planning.inputs import Constants, Machine
from planning.rows import Row

ZERO_3 = "table2-zero3"
# (group, name) of the rows that the constants in planning/inputs.py were fitted to. Each says most
# about one constant: memory, node, matmul, wait, network, zero3.
FITTED = [
    ("table1", "1.7B"),
    ("table1", "18B"),
    ("table2-ptdp", "PTD 96 384"),
    ("fig15", "t 8, d 8, B 512"),
    ("fig15", "t 32, d 2, B 512"),
    (ZERO_3, "Z3 96 768"),
]

# --- fitting --------------------------------------------------------------------------------------

# what a constant is expected to be before any measurement, and the standard deviation of its
# logarithm
PRIOR = {
    "matmul": (0.7, 0.3),
    "memory": (0.7, 0.3),
    "node": (0.7, 0.3),
    "network": (0.5, 0.5),
    "wait": (100e-6, 1.0),
    "zero3": (0.1, 1.0),
}
# of a measured time: the standard deviation of its logarithm
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
        step = np.linalg.lstsq(np.stack(slopes, axis=1), -current)[0]
        x = x + step
        if np.abs(step).max() < 1e-7:
            break
    return x


# --- errors ---------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """Of many rows: predicted / published - 1, without sign."""

    mean: float
    # nine of ten rows are at most so far off
    ninth_decile: float
    worst: float
    rows: int


def error(machine: Machine, row: Row) -> float:
    """predicted / published seconds - 1"""
    return float(np.exp(log_error(machine, row)) - 1)


def summary(machine: Machine, rows: list[Row]) -> Errors:
    size = np.abs([error(machine, row) for row in rows])
    return Errors(size.mean(), np.quantile(size, 0.9), size.max(), len(size))


def is_fitted(row: Row) -> bool:
    return (row.group, row.name) in FITTED


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(fitted, held out)"""
    return [row for row in rows if is_fitted(row)], [row for row in rows if not is_fitted(row)]


def by_group(machine: Machine, rows: list[Row]) -> dict[str, Errors]:
    """Of the rows of each group."""
    groups = dict.fromkeys(row.group for row in rows)
    return {
        group: summary(machine, [row for row in rows if row.group == group]) for group in groups
    }


def measure(rows: list[Row]) -> tuple[Machine, Errors]:
    """Fits the constants to the six rows of FITTED. Returns the machine with them, and the errors
    of the rows that are held out."""
    fitted, held_out = split(rows)
    machine = calibrate(fitted[0].machine, fitted)
    return machine, summary(machine, held_out)


# --- the rows that are farthest off ---------------------------------------------------------------


def worst(machine: Machine, rows: list[Row], count: int = 5) -> list[tuple[Row, float]]:
    """The rows that are farthest off, and their errors."""
    found = [(row, error(machine, row)) for row in rows]
    return sorted(found, key=lambda pair: -abs(pair[1]))[:count]


# --- leaving an ingredient out --------------------------------------------------------------------


def without_adapters():
    """Ranks of a group on one node do not share their adapters: each ring has one."""

    def link(self, size, stride):
        return self.node_link if size * stride <= self.ranks_per_node else self.network_link

    return mock.patch.object(Machine, "link", link)


def without_wait():
    """A collective and a send take the time of their bytes alone."""
    step_time = planner.step_time

    def at_once(machine, *rest):
        constants = dataclasses.replace(machine.constants, wait=0.0)
        return step_time(dataclasses.replace(machine, constants=constants), *rest)

    return mock.patch.object(planner, "step_time", at_once)


def without_collectives():
    """Collectives take no time; sends between stages do."""
    return mock.patch.object(planner.Rank, "collective", lambda *args, **options: 0.0)


def without_slow_stage():
    """The head's time is spread over all stages, instead of making the last one the slowest."""
    step_time = planner.step_time

    def spread(machine, software, model, layout):
        seconds = step_time(machine, software, model, layout)
        return seconds | {"head": seconds["head"] / layout.pp}

    return mock.patch.object(planner, "step_time", spread)


def without_elementwise():
    """Element-wise operations of the layers take no time."""
    return mock.patch.object(planner.Rank, "read_write", lambda rank, nbytes: 0.0)


def without_overlap():
    """Backward waits for each tensor-parallel all-reduce."""
    tensor_backward = planner.tensor_backward

    def waiting(rank, all_reduce, linear):
        return tensor_backward(rank, all_reduce, linear=0.0)

    return mock.patch.object(planner, "tensor_backward", waiting)


# name -> a context in which planner.step_time does without one ingredient
WITHOUT = {
    "adapters": without_adapters,
    "collectives": without_collectives,
    "wait": without_wait,
    "slow-stage": without_slow_stage,
    "elementwise": without_elementwise,
    "overlap": without_overlap,
}


def ablations(rows: list[Row]) -> dict[str, Errors]:
    """{ingredient that is left out: errors of the rows held out}, constants fitted again; "" with
    nothing left out."""
    found = {"": measure(rows)[1]}
    for name, left_out in WITHOUT.items():
        with left_out():
            found[name] = measure(rows)[1]
    return found


# --- other choices of six rows --------------------------------------------------------------------


def random_choices(rows: list[Row], times: int = 30, seed: int = 0) -> list[Errors]:
    """Errors of the rows held out when the six fitted rows are drawn at random: five of any group,
    and one of ZeRO-3."""
    generator = np.random.default_rng(seed)
    zero_3 = [row for row in rows if row.group == ZERO_3]
    others = [row for row in rows if row.group != ZERO_3]
    found = []
    for _ in range(times):
        chosen = [others[i] for i in generator.choice(len(others), 5, replace=False)]
        chosen.append(zero_3[generator.integers(len(zero_3))])
        machine = calibrate(rows[0].machine, chosen)
        found.append(summary(machine, [row for row in rows if row not in chosen]))
    return found
