"""Two computations take turns (base/turns.py): a forward and a backward of a pipeline, while
tokens travel to experts and back (--ep-comm-overlap)."""

import pytest
from parity import SMALL, again, check, needs_compiler, same, train, without_cpp

import schedules
from base.turns import Turns
from course import nccl_model, ranks
from course.parity import Run
from course.training_commands import config_of
from pipeline_parallel import add_transfers
from run.config import ConfigError
from run.rules import validate
from schedules import Cost, Pair, Placement, ScheduleError, join_pairs


class Message:
    """Notes when it is waited for."""

    def __init__(self, notes: list[str], name: str):
        self.notes, self.name = notes, name

    def wait(self):
        self.notes.append(f"{self.name} is there")


def computation(turns: Turns, notes: list[str], name: str, messages: int):
    def run():
        for n in range(messages):
            notes.append(f"{name}{n}")
            turns.wait(Message(notes, f"{name}{n}"))
        notes.append(f"{name} ends")

    return run


@pytest.mark.parametrize("messages, expected", [
    ((1, 1), "a0, b0, a0 is there, a ends, b0 is there, b ends"),
    ((2, 1), "a0, b0, a0 is there, a1, b0 is there, b ends, a1 is there, a ends"),
    ((0, 2), "a ends, b0, b0 is there, b1, b1 is there, b ends"),
    ((2, 0), "a0, b ends, a0 is there, a1, a1 is there, a ends"),
])  # fmt: skip
def test_who_starts_a_message_gives_the_turn(messages, expected):
    """And the last one goes on alone. A second pair begins as the first one did."""
    turns = Turns()
    for _ in range(2):
        notes = []
        first, second = (computation(turns, notes, *x) for x in zip("ab", messages))
        turns.together(first, second)
        assert ", ".join(notes) == expected


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_ends_both(fails):
    """The other one sends nothing more: its peers would take it for another message."""
    turns, notes = Turns(), []

    def broken():
        turns.wait(Message(notes, "broken"))
        raise ValueError("broken")

    both = [computation(turns, notes, "whole", 3), broken]
    with pytest.raises(ValueError, match="broken"):
        turns.together(*(both if fails else both[::-1]))
    # Without its second message, or not begun.
    assert "whole2" not in notes and "whole ends" not in notes


# --- in a pipeline --------------------------------------------------------------------------------

EXPERTS = SMALL | dict(num_experts=4, router="topk", router_topk=2, num_layers=4)
OVERLAP = dict(pp=2, ep=2, ep_comm_overlap=True, micro_batch_size=1)
TWO_CHUNKS = OVERLAP | dict(virtual_stages=2)
LAYOUTS = [
    TWO_CHUNKS | dict(recompute="full"),
    again(TWO_CHUNKS | dict(zero_stage=1)),
    again(TWO_CHUNKS | dict(zero_stage=2, recompute="selective")),
    again(TWO_CHUNKS | dict(cp=2)),
    again(TWO_CHUNKS | dict(fp8="current", fp8_skip=0, dropout=0.0)),
    again(TWO_CHUNKS | dict(fp8="delayed", fp8_skip=0, dropout=0.0)),
    again(TWO_CHUNKS | dict(router="sinkhorn", router_topk=1, capacity_factor=1.0)),
    again(TWO_CHUNKS | dict(layer_split=[1, 0, 2, 1])),
    again(TWO_CHUNKS | dict(tp=2, sequence_parallel=True), id="8 ranks"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    check(8 if "tp" in layout else 4, [layout], EXPERTS)


@needs_compiler
@pytest.mark.repetition
def test_compiled():
    compiled = dict(compile=True, mutate=without_cpp)
    same(train(4, base=EXPERTS, **TWO_CHUNKS, **compiled), train(base=EXPERTS, micro_batch_size=1))


def passes(rank: int, flags: dict) -> tuple[int, int]:
    """(how often the turn was given for a message in a step, pairs of the rank's program)"""
    run = Run(4, config_of(flags))
    pipeline = run.trainer.pipeline
    turns, given = pipeline.turns, []
    pass_on = turns.pass_on

    def noted():
        given.append(turns.running)
        pass_on()

    turns.pass_on = noted
    run.train(1)
    return given.count(2), sum(isinstance(entry, Pair) for entry in pipeline.program)


def test_each_message_of_a_pair_gives_the_turn():
    """A chunk has one layer here: two all-to-alls of rows in F, and two in B."""
    flags = EXPERTS | TWO_CHUNKS | dict(expert_every=1)
    for given, pairs in ranks.run(passes, 4, flags):
        assert given == 4 * pairs > 0


def pairs_of_one_micro_batch():
    schedules._may_join = lambda first, second: (first.op, second.op) == ("F", "B")
    interleaved = schedules.interleaved_one_f_one_b
    schedules.interleaved_one_f_one_b = lambda p, m, v, extra: interleaved(p, m, v)


@pytest.mark.repetition
def test_a_backward_cannot_join_its_own_forward():
    """Without the extra forward the last rank's B follows its own F: nothing can run."""
    with pytest.raises(RuntimeError, match="the order cannot run"):
        train(world=4, mutate=pairs_of_one_micro_batch, base=EXPERTS | TWO_CHUNKS)


@pytest.mark.parametrize("flags, message", [
    (dict(ep=2, num_experts=4), "ep_comm_overlap.*needs --ep 2 or more and --pp 2"),
    (OVERLAP | dict(num_experts=4), "ep_comm_overlap.*joins F and B of --schedule interleaved"),
    (TWO_CHUNKS | dict(zero_stage=3, num_experts=4, num_layers=4), "zero_stage.*frees"),
    (
        TWO_CHUNKS | dict(num_experts=4, num_layers=4, global_batch_size=4),
        "ep_comm_overlap.*needs 2 x --pp 2",
    ),
])  # fmt: skip
def test_what_is_refused(flags, message):
    with pytest.raises(ConfigError, match=message.replace("_", "-")):
        validate(config_of(SMALL | flags | dict(ep_comm_overlap=True)), 4)


# --- schedules whose F and B are joined -----------------------------------------------------------

SIZES = [(2, 1), (2, 2), (4, 1), (4, 3), (8, 2)]


@pytest.mark.parametrize("p, v", SIZES)
def test_joined_schedules_are_never_stuck(p, v):
    """On GPUs neither, with 2 p micro-batches or more."""
    for m in (2 * p, 3 * p, 4 * p):
        schedule, placement = schedules.make("interleaved", p, m, v, overlap=True), Placement(p, v)
        programs = [join_pairs(program) for program in add_transfers(schedule, placement)]
        for queues in (1, 8):
            nccl_model.run(programs, placement=placement, queues=queues)
    with pytest.raises(ScheduleError, match="cannot run"):
        schedules.make("interleaved", p, p, v, overlap=True)


@pytest.mark.parametrize("p, v", SIZES)
def test_all_but_warmup_is_joined(p, v):
    """And one more micro-batch of a chunk is in flight."""
    m = 4 * p
    plain, lists = (schedules.lists("interleaved", p, m, v, overlap) for overlap in (False, True))
    pairs = [sum(isinstance(x, Pair) for x in join_pairs(actions)) for actions in lists]
    assert pairs == [v * m - (2 * (p - 1 - rank) + (v - 1) * p + 1) for rank in range(p)]
    assert sum(pairs) / p == v * (m - p)
    if v > 1:
        assert schedules.in_flight(lists) == [n + 1 for n in schedules.in_flight(plain)]


def seconds(p: int, m: int, v: int, exchange: float, overlap: bool) -> float:
    """A step whose layers compute for 1 in F, I and W each, and exchange in F and in I."""
    lists = schedules.make("interleaved", p, m, v, overlap)
    if overlap:
        lists = [join_pairs(actions) for actions in lists]
    cost = Cost((1 + exchange) / v, (1 + exchange) / v, 1 / v, exchange=exchange / v)
    return max(event.end for event in schedules.simulate(lists, cost))


def test_time_of_a_joined_schedule():
    """The all-to-alls of all pairs are hidden; those of warmup and of its backwards are not."""
    p, m, v = 8, 64, 2
    plain, joined = (seconds(p, m, v, 1.0, overlap) for overlap in (False, True))
    assert (plain, joined) == (337.5, 218.5)
    assert 3 * m < joined < 3 * m + 2 * p + 4 * p


def joined_1f1b(p: int, m: int) -> float:
    lists = [join_pairs(actions) for actions in schedules.make("1f1b", p, m)]
    return max(event.end for event in schedules.simulate(lists, Cost(2, 2, 1, exchange=1.0)))


def test_1f1b_is_slower_joined():
    """Why it is refused: neighbours' pairs wait for each other, so every second slot is idle."""
    plain = max(e.end for e in schedules.simulate(schedules.make("1f1b", 4, 16), Cost(2, 2, 1)))
    assert plain == 95 and joined_1f1b(4, 16) == 140
