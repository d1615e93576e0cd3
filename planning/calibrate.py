"""Fits the six constants of planning/inputs.py to measured step times.

Least squares of log(predicted / measured): a row that is 10% off counts the same whether it takes a
second or an hour. Weak priors keep a constant of which the rows say nothing.

    python -m planning.calibrate      fits the rows FITTED, prints the constants and all errors

Not covered: how uncertain the constants are.
"""

import dataclasses

import numpy as np

import planner
from planning import rows as published
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


def error(machine: Machine, row: Row) -> float:
    """log(predicted / measured seconds)."""
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
        errors = [error(fitted, row) / NOISE for row in rows]
        return np.concatenate([errors, (x - expected) / deviation])

    return with_constants(least_squares(residuals, expected))


def least_squares(residuals, x: np.ndarray, steps: int = 100) -> np.ndarray:
    """The x near the one given where the sum of residuals(x)² is least (Levenberg-Marquardt: a
    large damping takes small steps downhill, a small one takes those of Gauss and Newton)."""
    current = residuals(x)
    damping = 1.0
    for _ in range(steps):
        slopes = [(residuals(x + 1e-6 * axis) - current) / 1e-6 for axis in np.eye(len(x))]
        jacobian = np.stack(slopes, axis=1)  # [residuals, constants]
        step = np.linalg.solve(
            jacobian.T @ jacobian + damping * np.eye(len(x)), -jacobian.T @ current
        )
        moved = residuals(x + step)
        if moved @ moved < current @ current:
            x, current, damping = x + step, moved, damping / 3
        else:
            damping *= 4
        if np.abs(step).max() < 1e-7:
            break
    return x


def main():
    rows = published.read(published.PUBLISHED)
    fitted = [row for row in rows if (row.group, row.name) in FITTED]
    machine = calibrate(fitted[0].machine, fitted)
    for name, value in dataclasses.asdict(machine.constants).items():
        print(f"{name:<9}{value:.3g}")
    for row in rows:
        e = np.exp(error(machine, row)) - 1
        mark = "fitted" if row in fitted else ""
        print(f"{row.group:<14}{row.name:<20}{row.seconds:>9.3f} s {e:>+7.1%} {mark}")


if __name__ == "__main__":
    main()
