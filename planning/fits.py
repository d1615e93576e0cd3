"""What to say where no layout fits: why, and how many GPUs would hold the model.

every layout of 8 GPUs takes at least 367 GiB on each, of which a100 has 75 for tensors; 64 GPUs
would hold it
"""

from collections.abc import Callable

from planning.inputs import Machine, Software
from planning.layouts import layouts
from planning.memory import memory
from routers import MoEConfig

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
    if least is None:
        return no_layout(machine, model, gpus, global_batch, fits)
    message = (
        f"every layout of {gpus:,} GPUs takes at least {gib(least)} GiB on each, of which"
        f" {machine.name} has {gib(USABLE * machine.memory)} for tensors"
    )
    return f"{message}; {enough(gpus, global_batch, fits)}"


def enough(gpus: int, global_batch: int, fits: Callable[[int, int], bool]) -> str:
    """How many GPUs would hold the model."""
    for times in (2**i for i in range(13)):
        n = times * gpus
        if fits(n, global_batch):
            return f"{n:,} GPUs would hold it"
        # a batch that so many can share
        batch = -(-global_batch // n) * n
        if batch != global_batch and fits(n, batch):
            return f"{n:,} GPUs with --batch {batch} would hold it"
    return "a smaller model would fit"


def no_layout(
    machine: Machine,
    model: MoEConfig,
    gpus: int,
    global_batch: int,
    fits: Callable[[int, int], bool],
) -> str:
    """Why nothing divides, and the next numbers that would, and have the memory."""
    message = (
        f"no layout of {gpus:,} GPUs with even stages divides {model.num_heads} heads,"
        f" {model.num_layers} layers and a step of {global_batch:,} sequences"
    )
    for pp in range(2, min(gpus, model.num_layers) + 1):
        if gpus % pp == 0 and global_batch % (gpus // pp) == 0:
            message += f" (uneven stages do: train.py --pp {pp} --layer-split)"
            break
    # then data parallelism alone is a layout
    batch = -(-global_batch // gpus) * gpus
    found = [f"--batch {batch}"] if batch != global_batch and fits(gpus, batch) else []
    node = machine.ranks_per_node
    smaller = [n for n in range(gpus - 1, 0, -1) if n <= node or n % node == 0]
    found += [f"--gpus {n}" for n in smaller if fits(n, global_batch)][:1]
    if not found:
        return f"{message}; {enough(gpus, global_batch, fits)}"
    return f"{message}; {' or '.join(found)} would fit"


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
