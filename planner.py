"""Planner: predicts the time and memory of a training step, and finds the fastest layout.

A step is a sum of parts. Each part is a quantity that follows from the layout, divided by a rate
from a data sheet times the share of this rate that training reaches. In one layer, with b
micro-batch, s sequence, h hidden, t tensor-parallel ranks, p stages, v of them on each rank:

    matmul        24 b s h² + 4 b s² h FLOPs forward in each layer, twice backward     / FLOP/s
    elementwise   bytes that norms, dropout, activations, softmax read and write       / bytes/s
    tensor        2 (t-1)/t of the bytes of each all-reduce                            / bytes/s
    context       waits for keys and values of other ranks' tokens
    pipeline      sends between stages
    bubble        (p - 1) (forward + backward) / v, with the seconds of a rank's layers
    head          logits and loss, on the last stage, which is usually the slowest
    data          sums of gradients over data-parallel ranks
    optimizer     bytes that the update reads and writes

Four shares and two waits, for each pass of a collective, are fitted to published times; two more
are chosen (`Constants`).

    python -m course.planner   the constants, one layout taken apart, beside published times

Sources: FLOPs, arXiv 2104.04473, appendix; bubble, section 2.2; activations, arXiv 2205.05198;
collectives, ZeRO, arXiv 1910.02054, section 7.

Not covered: times of single kernels and of each matrix size (Calculon, arXiv 2305.14500, has them);
the time to launch kernels on GPUs, which is most of a tiny model's step.
"""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

import schedules
from base import terminal
from base.model_config import MoEConfig
from planning.inputs import STATE_IN_16_BITS, Layout, Machine, PlanError, Software
from planning.layer_time import Pass, Rank, layer
from planning.layouts import USABLE, layouts, what_would_fit
from planning.memory import (
    Stage,
    Stages,
    block_parameters,
    in_blocks,
    learned,
    memory,
    parameters,
    stages_of,
    tokens_of,
    waits_for_w,
)
from run import muon

# --- bytes outside the layers ---------------------------------------------------------------------

# For each logit: to 32 bits (6), maximum (4), minus it (8), exp (8), sum (4), softmax (8), its
# gradient (8), to 16 bits (6). With --head-chunk backward repeats to 32 bits (6) and minus (8).
LOSS, LOSS_AGAIN = 52, 14
# For each parameter: unscale (8), norm (4), clip (8), zero (4), the gradient (4).
UPDATE = 28
# Its state is also read and written. In 32 bits it is copied to 16 (6); in 16 bits the weight is
# the other half of the master (4).
TO_16_BITS, OTHER_HALF = 6, 4

# Products of 16 bits in the time of one of 32 bits: 312 / 19.5 TFLOP/s of an A100, 989 / 67 of an
# H100.
IN_32_BITS = 16

# Weights and biases of a GPT's layer: of two norms and four products.
PARAMETERS = 12

# --- outside the layers ---------------------------------------------------------------------------


def head(rank: Rank) -> float:
    """Seconds of one micro-batch in the output layer and the loss, forward and backward.

    With one stage the rank has the embedding as well, and waits for its all-reduce too.
    """
    halves = {rank.half(False), rank.half(True)}
    rank = rank.half(True)
    modules = rank.model.mtp_layers
    tokens = (1 + modules) * rank.tokens
    logits = tokens * rank.model.vocab_size / rank.layout.tp
    # The gradient of the head's input is summed, and the parts of the embedding, of each half.
    waits = rank.collective("tp", (1 + modules) * rank.activation, passes=2)
    # Of a module: the parts of the embedding, and its matrix [h, 2h].
    runs = 1 + (rank.layout.recompute == "full" and rank.layout.recompute_layers is None)
    waits += modules * rank.collective("tp", rank.activation, passes=2)
    for half in halves if rank.layout.pp == 1 else ():
        waits += half.collective("tp", half.activation, passes=2)
    # The loss reduces the largest logit, then the sum of exponentials and the target's logit, in 32
    # bits.
    waits += rank.collective("tp", 4 * tokens, passes=2)
    waits += rank.collective("tp", 8 * tokens, passes=2)
    again = rank.layout.head_chunk > 0
    loss = (LOSS + LOSS_AGAIN * again) * logits / rank.bytes_per_second
    # Chunks multiply again in backward; a frozen matrix has no gradient.
    multiplied = 6 + 2 * again - (2 if rank.software.lora_rank else 0)
    h = rank.model.hidden_size
    transform = 6 * rank.tokens * h * h * rank.model.head_transform
    transform += 4 * (2 + runs) * rank.tokens / rank.sequence_ranks * h * h * modules
    return rank.matmul(multiplied * logits * h + transform) + loss + waits


def pipeline(rank: Rank) -> float:
    """Seconds of sends in a step, and of the sum of a tied embedding's two gradients."""
    model, layout = rank.model, rank.layout
    if rank.software.scatters_pipeline:
        send = rank.send(rank.activation / layout.tp)
        if not layout.sequence_parallel:
            send += rank.collective("tp", rank.activation)
    else:
        send = rank.send(rank.activation / rank.sequence_ranks)
    # Each chunk and micro-batch sends activations and gradients; more while the pipeline fills.
    count = 2 * (layout.micro_batches * layout.virtual_stages + layout.pp - 1)
    is_summed = (model.tied or model.mtp_layers) and not rank.software.lora_rank
    is_summed = is_summed and not layout.placement.v_shaped
    tied = model.vocab_size * model.hidden_size / layout.tp if is_summed else 0
    return count * send + rank.send(rank.software.gradient * tied)


def data_parallel(rank: Rank, forward: float, backward: float) -> float:
    """Seconds that sums of gradients and gathers of parameters add to a step.

    forward, backward: seconds of one micro-batch, which they overlap. A rank waits for what is
    longer than these; the overlapped part slows them down (`Constants.hidden`).
    """
    software, stage, m = rank.software, rank.layout.zero_stage, rank.layout.micro_batches
    gather, reduce, across = gathers_and_sums(rank)

    # Collectives of single parameters mostly wait, and share no hardware with computation.
    lost = 0.0 if software.waits_for_reductions else rank.machine.constants.hidden

    def beside(seconds: float, computation: float) -> float:
        waits = max(0.0, seconds - computation)
        return waits + lost * (seconds - waits)

    if stage == 3:
        if software.waits_for_reductions:
            return m * (beside(gather, forward) + beside(gather, backward) + reduce)
        return m * (beside(gather, forward) + beside(gather + reduce, backward)) + across
    if not software.overlaps_data:
        backward = 0.0
    if stage == 2:
        return m * beside(reduce, backward) + across + gather
    if stage == 1:
        return beside(reduce, backward) + across + gather
    # An all-reduce moves twice the bytes.
    return beside(2 * reduce, backward)


def gathers_and_sums(rank: Rank) -> tuple[float, float, float]:
    """Seconds of the collectives over data-parallel ranks, each by itself: (all-gathers of
    parameters, reduce-scatters of gradients, hybrid sharding's all-reduce of a rank's rows over R
    groups of S ranks: 2 Ψ / S (R - 1) / R elements once a step). Ranks that share experts have
    fewer replicas."""
    software, layout = rank.software, rank.layout
    # Each layer, the embedding and the head are units; or each parameter of the layers.
    single = software.waits_for_reductions
    units = rank.model.num_layers / layout.pp + 2 if software.reduces_by_layer else 1
    if single:
        units = PARAMETERS * rank.model.num_layers / layout.pp
    # These parameters have gradients, and change in a step.
    learning = learned(rank.model, layout, software)
    gathered = parameters(rank.model, layout, software) if layout.zero_stage == 3 else learning

    def seconds(groups, numbers: tuple[float, float], number_bytes: int, passes: int = 1) -> float:
        total = 0.0
        for group, count in zip(groups, numbers):
            if count:
                nbytes = number_bytes * count / units
                total += units * rank.collective(group, nbytes, passes, single)
        return total

    inside, across = ("shard", "expert_shard"), ("replicate", "replicate")
    rows = learning[0] / layout.shard, learning[1] / layout.expert_shard
    return (
        seconds(inside, gathered, software.weight),
        seconds(inside, learning, software.reduced),
        seconds(across, rows, software.reduced, passes=2),
    )


# --- a step ---------------------------------------------------------------------------------------


class Layers(NamedTuple):
    """Layers of one pipeline rank: all with cross attention, or none."""

    number: float
    recomputed: float  # share of these layers
    in_fp8: float  # share of these layers
    crosses: bool


class Work(NamedTuple):
    """The work of one pipeline rank in a micro-batch."""

    layers: tuple[Layers, ...]
    head: bool


def layers_of(stages: list[Stage], ranks: int) -> tuple[Layers, ...]:
    """The layers of so many pipeline ranks, as those of their mean."""
    found = []
    for crosses in (False, True):
        blocks = [(b, n) for stage in stages for b, n in stage.blocks if b.crosses == crosses]
        if total := sum(n for _, n in blocks):
            again = sum(n for block, n in blocks if block.recomputes)
            fp8 = sum(n for block, n in blocks if block.fp8)
            found.append(Layers(total / ranks, again / total, fp8 / total, crosses))
    return tuple(found)


@lru_cache(maxsize=2**12)
def works_of(of_ranks: Stages) -> tuple[Work, ...]:
    """The different works of all pipeline ranks, then that of the mean rank, for which most ranks
    wait while the pipeline fills."""
    works = [Work(layers_of(stages, 1), stages[-1].head) for stages in of_ranks]
    everything = [stage for stages in of_ranks for stage in stages]
    return *dict.fromkeys(works), Work(layers_of(everything, len(of_ranks)), False)


def step_time(
    machine: Machine, software: Software, model: MoEConfig, layout: Layout
) -> dict[str, float]:
    """Seconds of one step of the global batch, by part. Their sum is the step.

    The time is that of the slowest rank, mostly the last one, which has the head. Raises
    ScheduleError for a schedule whose bubble has no formula, PlanError for FP8 on a machine without
    it.
    """
    p, m = layout.pp, layout.micro_batches
    # This raises for a schedule without a formula.
    schedules.bubble_formula(layout.pipeline_schedule, p, m, layout.virtual_stages)
    rank = Rank(machine, software, model, layout)
    of_head = head(rank)
    *works, mean = works_of(stages_of(model, layout, software))
    passes = {layers: layer(rank, *layers[1:]) for work in works for layers in work.layers}

    def sums_of(work: Work) -> list[float]:
        """Seconds of all layers, forward and backward."""
        return [sum(n[0] * sum(passes[n][direction]) for n in work.layers) for direction in (0, 1)]

    work = max(works, key=lambda work: sum(sums_of(work)) + work.head * of_head)
    seconds = dict.fromkeys(Pass._fields, 0.0)
    for layers in work.layers:
        for name, in_forward, in_backward in zip(Pass._fields, *passes[layers][:2]):
            seconds[name] += m * layers.number * (in_forward + in_backward)
    if layout.ep_comm_overlap:
        computed = sum(seconds.values()) - seconds["expert"]
        seconds["expert"] -= joined_share(layout) * min(seconds["expert"], computed)
    # If another rank is slower, the head counts only once, while the pipeline fills and drains.
    seconds["head"] = (m if work.head else 1) * of_head
    if p > 1:
        seconds["bubble"] = fill_and_drain(rank, mean)
        seconds["pipeline"] = pipeline(rank)
    if layout.replicas > 1:
        seconds["data"] = data_parallel(rank, *sums_of(work))
    seconds["optimizer"] = update(rank)
    return seconds


def joined_share(layout: Layout) -> float:
    """The share of forwards that run in turns with a backward, on the mean rank."""
    p, v, m = layout.pp, layout.virtual_stages, layout.micro_batches
    lists = schedules.lists(layout.pipeline_schedule, p, m, v, overlap=True)
    pairs = sum(len(actions) - len(schedules.join_pairs(actions)) for actions in lists)
    return pairs / (p * v * m)


def fill_and_drain(rank: Rank, mean: Work) -> float:
    """Seconds of the bubble: a rank waits while the others fill and drain the pipeline."""
    total = 0.0
    for layers in mean.layers:
        forward, backward, deferred = layer(rank, *layers[1:])
        waits = sum(forward) + sum(backward)
        if waits_for_w(rank.layout):
            # f + I - W instead of f + I + W: weight gradients fill the waits for input gradients.
            waits -= 2 * min(deferred, sum(backward) / 2)
        if rank.layout.pipeline_schedule == "zb-v":
            waits = max(sum(forward), sum(backward) - deferred)
        total += (rank.layout.pp - 1) * layers.number * waits
    return total / rank.layout.virtual_stages


def update(rank: Rank) -> float:
    """Seconds of the optimizer's step."""
    software, layout = rank.software, rank.layout
    shards = layout.shard if layout.zero_stage else 1
    held = sum(learned(rank.model, layout, software))
    nbytes = UPDATE + 2 * software.optimizer_state
    if software.weight == 2:
        in_16_bits = software.optimizer_state == STATE_IN_16_BITS
        nbytes += OTHER_HALF if in_16_bits else TO_16_BITS
    seconds = nbytes * held / shards / rank.bytes_per_second
    return seconds + newton_schulz(rank) if software.muon else seconds


def newton_schulz(rank: Rank) -> float:
    """Seconds of Muon's products, in 32 bits, and of the all-to-alls to owners and back."""
    model, layout, software = rank.model, rank.layout, rank.software
    h, d = model.hidden_size, model.head_dim
    heads = model.num_heads, model.num_kv_heads
    attention = 2 * sum(muon.flops((n * d, h)) for n in heads)
    sizes = model.ffn_hidden_size, model.expert_size, model.shared_ffn_size
    mlp, expert, shared = ((2 + model.gated) * muon.flops((n, h)) for n in sizes)
    of_rank = stages_of(model, layout, software)[0]
    flops = in_blocks(of_rank, (attention, mlp, model.num_experts // layout.ep * expert, shared))
    shards = (layout.shard, layout.expert_shard) if layout.zero_stage else (1, 1)
    products = sum(x / n / layout.tp for x, n in zip(flops, shards))
    nbytes = software.gradient * sum(in_blocks(of_rank, block_parameters(model, layout)))
    sends = rank.collective("tp", nbytes / shards[0], passes=2)
    if layout.zero_stage:
        sends += rank.collective("shard", nbytes, passes=2)
    return rank.matmul(products * (IN_32_BITS if software.weight == 2 else 1)) + sends


# --- search ---------------------------------------------------------------------------------------


# Tokens that have logits at a time, if those of a micro-batch do not fit.
HEAD_CHUNK = 1024
# A layout is searched more closely if it may take at most this many times the fastest's time.
NEAR = 1.05


class Plan(NamedTuple):
    """A layout, with its `step_time` and `memory`."""

    layout: Layout
    parts: dict[str, float]
    bytes: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def search(
    machine: Machine, software: Software, model: MoEConfig, gpus: int, global_batch: int
) -> list[Plan]:
    """Every layout that train.py accepts and that fits into memory, the fastest first. Raises
    PlanError if none does."""
    # Of equally fast layouts the one with the largest micro-batch is first: it launches fewer
    # kernels.
    plans = sorted(
        fitting(machine, software, model, gpus, global_batch),
        key=lambda plan: (round(plan.seconds, 9), -plan.layout.micro_batch_size),
    )
    if not plans:
        raise PlanError(what_would_fit(machine, software, model, gpus, global_batch))
    return plans


def fitting(
    machine: Machine, software: Software, model: MoEConfig, gpus: int, global_batch: int
) -> Iterator[Plan]:
    """Every layout that train.py accepts and that fits into memory. Recomputation and --head-chunk
    are tried only if a layout does not fit without them: both take time."""
    limit = USABLE * machine.memory
    # Layouts that do not fit, without their micro-batch size: larger ones will not fit either.
    full = set()
    # Layouts that fit without recomputation.
    fit_plain = set()
    fastest = math.inf
    for layout in layouts(model, software, gpus, global_batch):
        plain = dataclasses.replace(layout, recompute="none")
        others = dataclasses.replace(layout, micro_batch_size=1)
        if others in full or plain in fit_plain:
            continue
        layout = made_to_fit(model, software, layout, limit)
        if layout is None:
            full.add(others)
            continue
        if layout == plain:
            fit_plain.add(plain)
        elif layout.recompute != "none":
            least = dataclasses.replace(layout, recompute="none")
            # A layout that is too slow even without recomputation recomputes all.
            if sum(step_time(machine, software, model, least).values()) < NEAR * fastest:
                layout = recomputing_least(model, software, layout, limit)
        seconds = step_time(machine, software, model, layout)
        plan = Plan(layout, seconds, memory(model, layout, software))
        fastest = min(fastest, plan.seconds)
        yield plan


def fits(model: MoEConfig, software: Software, layout: Layout, limit: float, **fields) -> bool:
    """Whether a layout, with other values of these fields, takes at most `limit` bytes."""
    changed = dataclasses.replace(layout, **fields)
    return sum(memory(model, changed, software).values()) <= limit


def made_to_fit(
    model: MoEConfig, software: Software, layout: Layout, limit: float
) -> Layout | None:
    """The layout, or the same with --head-chunk; None if neither fits."""
    has_chunks = layout.tokens(tokens_of(model, bool(model.cross_layers))) > HEAD_CHUNK
    for chunk in (0, HEAD_CHUNK) if has_chunks else (0,):
        if fits(model, software, layout, limit, head_chunk=chunk):
            return dataclasses.replace(layout, head_chunk=chunk)
    return None


def recomputing_least(model: MoEConfig, software: Software, layout: Layout, limit: float) -> Layout:
    """The layout with as few recomputed layers as fit, by bisection. All layers fit."""
    fit = partial(fits, model, software, layout, limit)
    some = range(1, model.num_layers)
    skipped = bisect_left(some, True, key=lambda n: fit(recompute_layers=n))
    layers = some[skipped] if skipped < len(some) else None
    return dataclasses.replace(layout, recompute_layers=layers)


if __name__ == "__main__":
    from planning import commands

    terminal.command(commands.main)
