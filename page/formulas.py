"""What docs/explorer.html computes from the lessons' formulas. The page runs these very functions:
explorer.py translates them, and all that they call, to JavaScript.

    time_lines     a schedule, simulated: events, bubble, what is held in memory
    waits_for      why an action does not start sooner
    held           what a rank holds at one moment
    memory         bytes of a rank by a layout: weights, gradients, optimizer state, activations

    python explorer.py
"""

from typing import NamedTuple

import moe
import pipeline_parallel
import recompute
import schedules
import sequence_parallel
import tensor_parallel
from routers import MoEConfig
from run import room, sizes
from schedules import Action, Cost, Event

# --- schedules ------------------------------------------------------------------------------------


class TimeLines(NamedTuple):
    # by start
    events: list[Event]
    # idle time / ideal time, simulated and by the papers' formula
    bubble: float
    formula: float
    # idle time / total time
    idle_of_total: float
    # for each rank, the most at a time
    in_flight: list[int]
    deferred: list[int]


def time_lines(
    name: str,
    p: int,
    m: int,
    v: int,
    forward: float,
    input: float,
    weight: float,
    transfer: float,
) -> TimeLines:
    """forward, input, weight: times of one micro-batch in all layers of a rank, of which a chunk
    takes 1 / v. Raises ScheduleError."""
    schedule = schedules.lists(name, p, m, v)
    cost = Cost(forward / v, input / v, weight / v, transfer)
    events = schedules.simulate(schedule, cost, v)
    idle = schedules.bubble(events)
    return TimeLines(
        events,
        idle,
        schedules.bubble_formula(name, p, m, v, cost),
        # ideal + idle = total
        idle / (1 + idle),
        schedules.in_flight(schedule),
        schedules.deferred_weight_gradients(schedule),
    )


def waits_for(
    event: Event, events: list[Event], p: int, v: int, transfer: float
) -> list[tuple[Event, float]]:
    """Pairs (event, when its result is there) of all that `event` waits for: the actions whose
    results it needs, and at the end of the list the one before it on its own rank."""
    found = []
    needed = schedules.needs(_action(event), event.rank, p, v)
    for other in events:
        if schedules.result_of(_action(other), other.rank, p) in needed:
            delay = 0 if other.rank == event.rank else transfer
            found.append((other, other.end + delay))
    on_this_rank = [e for e in events if e.rank == event.rank]
    position = on_this_rank.index(event)
    if position > 0:
        before = on_this_rank[position - 1]
        # it may be one of them
        found = [pair for pair in found if pair[0] != before]
        found.append((before, before.end))
    return found


def _action(event: Event) -> Action:
    return Action(event.op, event.chunk, event.micro_batch)


def held(events: list[Event], rank: int, time: float, change: dict[str, int]) -> int:
    """How many pairs (chunk, micro-batch) a rank holds at a time. change: schedules.IN_FLIGHT, or
    DEFERRED."""
    return sum(change[e.op] for e in events if e.rank == rank and e.end <= time)


# --- memory ---------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes."""

    weights: float
    gradients: float
    state: float
    activations: float


def matrices_of(config: MoEConfig, rank: int, p: int, v: int) -> tuple[int, int]:
    """(numbers outside the experts, numbers of the experts) in the matrices of a pipeline rank: its
    layers; on the first the embedding, on the last the head, which may be the embedding again."""
    h = config.hidden_size
    chunk = config.num_layers // (p * v)
    layers = 0
    with_experts = 0
    for layer in range(config.num_layers):
        if layer // chunk % p == rank:
            layers += 1
            if layer in config.expert_layers:
                with_experts += 1
    attention = sizes.block_matrices(config, 0) // config.num_layers
    mlp = sizes.mlp_matrices(config)
    dense = layers * attention + (layers - with_experts) * mlp
    dense += with_experts * h * config.num_experts
    if rank == 0:
        dense += h * config.vocab_size
        if config.positions == "learned":
            dense += h * config.seq_length
    if rank == p - 1 and (p > 1 or not config.tied):
        dense += h * config.vocab_size
    return dense, with_experts * config.num_experts * mlp


def memory(
    config: MoEConfig,
    t: int,
    p: int,
    v: int,
    dp: int,
    ep: int,
    zero_stage: int,
    b: int,
    sequence: bool,
    granularity: str,
) -> Memory:
    """Of the fullest rank: in mixed precision, under 1F1B or interleaved with m >= p.

    The activations are those of the paper's layer (recompute.py), of which a fused core keeps no
    s² matrix. Raises FieldError for what cannot be.
    """
    config.check()
    tensor_parallel.check(config, t, t * p * dp)
    if sequence:
        sequence_parallel.check(config, t)
    pipeline_parallel.check(config.num_layers, p, v)
    moe.check(config, ep, dp)
    ranks = {"tp": t, "pp": p, "dp": dp, "ep": ep}
    parts = (0.0, 0.0, 0.0)
    for rank in range(p):
        dense, experts = matrices_of(config, rank, p, v)
        of_rank = room.parts_of(dense, experts, "bf16", "fp32", zero_stage, ranks)
        if sum(of_rank) > sum(parts):
            parts = of_rank
    if config.attention == "fused" and granularity == "none":
        granularity = "selective"
    s = config.seq_length
    h = config.hidden_size
    layer = recompute.layer_bytes(s, b, h, config.num_heads, t, sequence, granularity)
    layers = layer * recompute.first_stage_layers(config.num_layers, p, v)
    outside = recompute.outside_layers_bytes(s, b, h, config.vocab_size, t, p, sequence)
    return Memory(*parts, layers + outside)
