"""What to say where no layout fits: why, and how many GPUs would hold the model.

every layout of 8 GPUs takes at least 367 GiB on each, of which a100 has 75 for tensors; 64 GPUs
would hold it
"""

import dataclasses
from collections.abc import Callable

from base.model_config import MoEConfig
from planning.inputs import STATE_IN_16_BITS, Machine, Software
from planning.layouts import layouts
from planning.memory import memory

# Of a device's memory, what tensors may take. The rest is CUDA's and NCCL's, or lies in blocks that
# are too small.
USABLE = 0.94


class PlanError(ValueError):
    """Nothing fits; the message says what would."""


def what_would_fit(
    machine: Machine, software: Software, model: MoEConfig, gpus: int, global_batch: int
) -> str:
    """Why no layout fits, and what would."""

    def fits(gpus: int, batch: int) -> bool:
        least = least_bytes(software, model, gpus, batch)
        return least is not None and least <= USABLE * machine.memory

    least = least_bytes(software, model, gpus, global_batch)
    if least is not None:
        smaller = dataclasses.replace(software, optimizer_state=STATE_IN_16_BITS)
        less = least_bytes(smaller, model, gpus, global_batch)
        flag = "--optimizer-state bf16 or " if less <= USABLE * machine.memory else ""
        return (
            f"every layout of {gpus:,} GPUs takes at least {gib(least)} GiB on each, of which"
            f" {machine.name} has {gib(USABLE * machine.memory)} for tensors;"
            f" {flag}{enough(gpus, global_batch, fits)}"
        )
    # data parallelism alone can share this batch
    batch = divisible(global_batch, gpus)
    found = [f"--batch {batch}"] if batch != global_batch and fits(gpus, batch) else []
    node = machine.ranks_per_node
    for n in range(gpus - 1, 0, -1):
        if (n <= node or n % node == 0) and fits(n, global_batch):
            found.append(f"--gpus {n}")
            break
    would = f"{' or '.join(found)} would fit" if found else enough(gpus, global_batch, fits)
    return f"{nothing_divides(model, gpus, global_batch)}; {would}"


def divisible(batch: int, gpus: int) -> int:
    """The next batch that so many GPUs can share."""
    return -(-batch // gpus) * gpus


def enough(gpus: int, global_batch: int, fits: Callable[[int, int], bool]) -> str:
    """How many GPUs would hold the model."""
    for n in (gpus * 2**i for i in range(13)):
        if fits(n, global_batch):
            return f"{n:,} GPUs would hold it"
        batch = divisible(global_batch, n)
        if batch != global_batch and fits(n, batch):
            return f"{n:,} GPUs with --batch {batch} would hold it"
    return "a smaller model would fit"


def nothing_divides(model: MoEConfig, gpus: int, global_batch: int) -> str:
    message = (
        f"no layout of {gpus:,} GPUs with even stages divides {model.num_heads} heads,"
        f" {model.num_layers} layers and a step of {global_batch:,} sequences"
    )
    for pp in range(2, min(gpus, model.num_layers) + 1):
        if gpus % pp == 0 and global_batch % (gpus // pp) == 0:
            return f"{message} (uneven stages do: train.py --pp {pp} --layer-split)"
    return message


def gib(nbytes: float) -> str:
    """Three digits of GiB below 10, whole ones above."""
    amount = nbytes / 2**30
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.3g}"


def least_bytes(software: Software, model: MoEConfig, gpus: int, global_batch: int) -> float | None:
    """Of the layout that takes least on each rank; None where there is no layout."""
    needs = [
        sum(memory(model, layout, software).values())
        for layout in layouts(model, software, gpus, global_batch, micro_batches=[1])
    ]
    return min(needs, default=None)
