"""All even layouts of a model on a number of ranks, with a global batch: train.py accepts each.

Each technique's own check decides (tensor_parallel.check, ..), as in run/rules.py. Which sizes
divide the ranks and the batch is decided here.

Sequences of at least LONG tokens are also spread over context-parallel ranks.

Where a layout needs them, planner.search adds --recompute-layers and --head-chunk. Where none fits,
`what_would_fit` says how many GPUs would hold the model.

Not covered: uneven --layer-split; gpipe, which is as fast as 1f1b and holds more; --cp for shorter
sequences; --data-parallel-replicate-degree, which `train.py --plan` and `planner.py predict` know.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import context_parallel
import moe
import pipeline_parallel
import recompute
import sequence_parallel
import tensor_parallel
from base.model_config import FieldError, MoEConfig
from planning.inputs import STATE_IN_16_BITS, Layout, Machine, Software
from planning.memory import memory
from schedules import Placement

# Tokens of a sequence that is spread over ranks.
LONG = 8192
# Of a device's memory, what tensors may take. The rest is CUDA's and NCCL's, or lies in blocks that
# are too small.
USABLE = 0.94


def accepts(check, *arguments) -> bool:
    try:
        check(*arguments)
    except FieldError:
        return False
    return True


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def layouts(
    model: MoEConfig,
    software: Software,
    ranks: int,
    global_batch: int,
    micro_batches: list[int] | None = None,
) -> Iterator[Layout]:
    """Smaller micro-batches first. micro_batches: only of these sizes."""
    meshes = list(meshes_of(model, software, ranks, global_batch))
    for b in micro_batches or divisors(global_batch):
        if model.router == "sinkhorn" and b * model.seq_length < model.num_experts:
            # No plan of so few tokens is even.
            continue
        for tp, pp, dp, ep, cp, kind in meshes:
            if global_batch // dp % b:
                continue
            m = global_batch // dp // b
            for choice in itertools.product(
                schedules_of(model, software, pp, m),
                sequence_of(model, tp, cp),
                recompute_of(model, cp, kind),
                software.zero_stages if dp * cp > 1 else [0],
            ):
                (schedule, v), sequence, again, stage = choice
                sizes = tp, pp, dp, ep, v, schedule, b, global_batch, again, sequence, stage
                yield Layout(*sizes, cp=cp, cp_kind=kind)


def meshes_of(
    model: MoEConfig, software: Software, ranks: int, global_batch: int
) -> Iterator[tuple[int, int, int, int, int, str]]:
    """(tp, pp, dp, ep, cp, cp_kind)"""
    for tp in divisors(ranks):
        if not accepts(tensor_parallel.check, model, tp, ranks):
            continue
        for pp in divisors(ranks // tp):
            if not accepts(pipeline_parallel.check, model.num_layers, Placement(pp)):
                continue
            replicas = ranks // tp // pp
            experts = [ep for ep in divisors(replicas) if accepts(moe.check, model, ep, replicas)]
            contexts = contexts_of(model, software, tp, replicas)
            for (cp, kind), ep in itertools.product(contexts, experts):
                if global_batch % (replicas // cp) == 0:
                    yield tp, pp, replicas // cp, ep, cp, kind


def contexts_of(
    model: MoEConfig, software: Software, tp: int, replicas: int
) -> list[tuple[int, str]]:
    """(cp, cp_kind)"""
    found = [(1, "ring")]
    if model.cross_layers:
        return found
    if model.seq_length >= LONG:
        for cp, kind in itertools.product(divisors(replicas)[1:], software.cp_kinds):
            # A ring hides later tokens.
            sees_both = kind == "ring" and not model.causal
            if not sees_both and accepts(context_parallel.check, model, cp, tp, kind):
                found.append((cp, kind))
    return found


def sequence_of(model: MoEConfig, tp: int, cp: int) -> list[bool]:
    """Whether sequence parallelism. It cuts again what context parallelism has cut into pieces."""
    pieces = 2 * cp if cp > 1 else 1
    uneven = model.target_length % tp
    if tp == 1 or uneven or not accepts(sequence_parallel.check, model, pieces * tp):
        return [False]
    return [False, True]


def schedules_of(
    model: MoEConfig, software: Software, pp: int, m: int
) -> list[tuple[str | None, int]]:
    """(schedule, virtual stages)"""
    if pp == 1:
        return [(None, 1)]
    found = [(name, 1) for name in ("1f1b", "zb-h1") if name in software.schedules]
    # An encoder-decoder's tables are on each stage once.
    if m % pp == 0 and not model.cross_layers:
        for v in divisors(model.num_layers // pp)[1:]:
            found.append(("interleaved", v))
    return found


def recompute_of(model: MoEConfig, cp: int, kind: str) -> list[str]:
    """Fused attention, and a ring, have nothing that selective recomputation would compute
    again."""
    if model.attention == "fused" or (cp > 1 and kind == "ring"):
        return ["none", "full"]
    return list(recompute.GRANULARITIES)


# --- where none fits ------------------------------------------------------------------------------


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
        room = USABLE * machine.memory
        flag = "--optimizer-state bf16 or " if less <= room else ""
        return (
            f"every layout of {gpus:,} GPUs takes at least {gib(least)} GiB on each, of which"
            f" {machine.name} has {gib(room)} for tensors; {flag}{enough(gpus, global_batch, fits)}"
        )
    # Data parallelism alone can share this batch.
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
    numbers = f"{model.num_heads} heads, {model.num_layers} layers and a step of {global_batch:,}"
    message = f"no layout of {gpus:,} GPUs with even stages divides {numbers} sequences"
    for pp in range(2, min(gpus, model.num_layers) + 1):
        if gpus % pp == 0 and global_batch % (gpus // pp) == 0:
            return f"{message} (uneven stages do: train.py --pp {pp} --layer-split)"
    return message


def gib(nbytes: float) -> str:
    """Three digits of GiB below 10, whole ones above."""
    amount = nbytes / 2**30
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.3g}"


def least_bytes(software: Software, model: MoEConfig, gpus: int, global_batch: int) -> float | None:
    """Bytes of the layout that takes least on each rank; None where there is no layout."""
    needs = [
        sum(memory(model, layout, software).values())
        for layout in layouts(model, software, gpus, global_batch, micro_batches=[1])
    ]
    return min(needs, default=None)
