"""Schedules need no ranks: everything here runs on lists."""

import ast
import copy
import dataclasses
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as pipelining

import moe
import schedules
from base.model_config import FieldError
from course import nccl_model
from pipeline_parallel import add_transfers
from planning import drawing, memory
from planning.drawing import text
from planning.inputs import SOFTWARE
from run.pretraining import Config
from schedules import (
    NAMES,
    V_SHAPED,
    Action,
    Cost,
    Placement,
    ScheduleError,
    actions_of,
    bubble,
    bubble_formula,
    deferred_weight_gradients,
    in_flight,
    join_pairs,
    make,
    placement_of,
    simulate,
)

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "training.md").read_text()


def micro_batches(p):
    """The numbers of micro-batches at which a schedule may change its form."""
    chosen = {1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 3, 4 * p, 31, 64}
    return [m for m in range(1, 65) if m in chosen]


def chunks(name, p, m):
    """The numbers of chunks to try."""
    if name in V_SHAPED:
        return (2,) if name == "zb-v" or m >= 2 * p else ()
    if name != "interleaved":
        return (1,)
    return (1, 2, 3, 4) if m % p == 0 else ()


def promised_in_flight(name, p, m, v):
    """How many micro-batches each rank holds at most, by the papers."""
    if name == "gpipe":
        return [m] * p
    if name == "zb-v":
        return [min(2 * p, m + min(m, rank + 1)) for rank in range(p)]
    if name == "dualpipe-v":
        return [2 * p + 1] * p
    if v > 1:
        return [min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1) for rank in range(p)]
    return [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize(
    "p, numbers",
    [(p, micro_batches(p)) for p in (1, 2, 3, 4, 5)]
    + [pytest.param(p, range(1, 65), marks=pytest.mark.repetition) for p in range(1, 17)],
)
def test_every_schedule(p, numbers):
    """m up to 64 and v up to 4: every action once in an order that runs (make validates), the
    bubble exactly the formula's, no deadlock on GPUs, and as much held in memory as the schedule
    promises."""
    for m, name in itertools.product(numbers, NAMES):
        for v in chunks(name, p, m):
            check_schedule(name, p, m, v)


def check_schedule(*case):
    name, p, m, v = case
    schedule = make(name, p, m, v)
    placement = placement_of(name, p, v)
    least = {"zb-h1": p, "zb-v": 2 * p - 1}.get(name, 1)
    if m >= least:
        simulated = bubble(simulate(schedule, Cost(), placement))
        assert simulated == pytest.approx(bubble_formula(name, p, m, v), rel=1e-12), case
    # raises where something is stuck
    nccl_model.run(add_transfers(schedule, placement), placement=placement, queues=1)
    owed = deferred_weight_gradients(schedule)
    deferred = [min(m, rank + 1) if name in ("zb-h1", "dualpipe-v") else 0 for rank in range(p)]
    if name == "zb-v":
        # Until its W runs, as the paper counts, a chunk is held too: never more than 2 p at a time.
        deferred = [2 * rank + 1 if m >= least else n for rank, n in enumerate(owed)]
        assert max(held_until_w(actions) for actions in schedule) <= 2 * p, case
    assert owed == deferred, case
    assert in_flight(schedule) == promised_in_flight(name, p, m, v), case


def held_until_w(actions):
    """The most (chunk, micro-batch) pairs at a time between F and B or W."""
    changes = ({"F": 1, "B": -1, "I": 0, "W": -1}[a.op] for a in actions)
    return max(itertools.accumulate(changes))


def test_zb_v_beside_the_paper():
    """2401.10241, section 6: with equal times no rank waits between its first and last action, and
    none holds more than the first rank under 1F1B."""
    for p, m in ((2, 3), (4, 12), (8, 15)):
        events = simulate(make("zb-v", p, m, 2), Cost(), Placement(p, 2, True))
        for rank in range(p):
            of_rank = [e for e in events if e.rank == rank]
            assert all(b.start == a.end for a, b in itertools.pairwise(of_rank))
            # The chunks before this one take 1 each.
            assert of_rank[0].start == rank
        assert 2 * max(in_flight(make("1f1b", p, m))) == 2 * p


@pytest.mark.parametrize("forward, input, weight", [(1, 1, 1), (2, 2, 1), (5, 6, 4), (4, 4, 3)])
def test_bubbles_of_a_v(forward, input, weight):
    cost = Cost(forward, input, weight)
    for name, (p, m) in itertools.product(V_SHAPED, ((2, 4), (4, 11), (5, 25))):
        if name == "zb-v" or input <= forward:
            idle = bubble(simulate(make(name, p, m, 2), cost, Placement(p, 2, True)))
            assert idle == pytest.approx(bubble_formula(name, p, m, 2, cost)), (name, p, m)


@pytest.mark.parametrize("exchange", [0, 0.25, 0.5])
@pytest.mark.parametrize("forward, input, weight", [(1, 1, 1), (2, 2, 1), (2, 3, 2)])
def test_dualpipe_v_beside_the_table(forward, input, weight, exchange):
    """DeepSeek's DualPipe, for 2 p stages: the last rank waits (p - 1) (F&B + B - 3 W), where F&B
    is the time of a pair."""
    cost = Cost(forward, input, weight, exchange=exchange)
    for p, m in ((2, 4), (4, 8), (5, 17)):
        placement = Placement(p, 2, True)
        joined = [join_pairs(actions) for actions in make("dualpipe-v", p, m, 2, overlap=True)]
        end = max(e.end for e in simulate(joined, cost, placement))
        busy = [cost.of(actions_of(entry), p - 1, placement) for entry in joined[-1]]
        pair = forward + input + weight - 2 * exchange
        assert end - sum(busy) == pytest.approx((p - 1) * (pair + input - 2 * weight))


def test_the_table_of_the_documentation():
    row = r"^\| ([\w-]+)(?:, v 2)? \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+), ([\d.]+) \|$"
    rows = re.findall(row, DOCS, re.M)
    assert len(rows) == 5
    for name, *numbers in rows:
        v = 1 if name in ("1f1b", "zb-h1") else 2
        schedule = make(name, 8, 64, v)
        events = simulate(schedule, Cost(1 / v, 1 / v, 1 / v), placement_of(name, 8, v))
        step, idle, first, last = map(float, numbers)
        assert max(e.end for e in events) == pytest.approx(step)
        assert 100 * bubble(events) == pytest.approx(idle, abs=0.05)
        assert [held_until_w(schedule[rank]) / v for rank in (0, -1)] == [first, last]


OPS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def of_torch(schedule_class, p, m):
    """The lists of a schedule of torch.distributed.pipelining."""
    lists = []
    sizes = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    for rank in range(p):
        found = schedule_class._calculate_single_rank_operations(sizes, rank)
        found = [part for action in found if action for part in action.sub_actions or [action]]
        lists.append(
            [
                Action(OPS[a.computation_type.name], int(a.stage_index != rank), a.microbatch_index)
                for a in found
            ]
        )
    return lists


def test_a_v_beside_torch():
    """DualPipeV: the same lists. ZB-V: the same bubble and as much in flight."""
    for p, m in ((1, 2), (2, 4), (3, 7), (4, 16)):
        assert of_torch(pipelining.ScheduleDualPipeV, p, m) == make("dualpipe-v", p, m, 2)
        theirs = of_torch(pipelining.ScheduleZBVZeroBubble, p, m)
        ours = make("zb-v", p, m, 2)
        assert in_flight(theirs) == in_flight(ours)
        bubbles = [bubble(simulate(x, Cost(), Placement(p, 2, True))) for x in (theirs, ours)]
        assert bubbles[0] == pytest.approx(bubbles[1])


def test_a_wrong_v_is_seen():
    """Chunk 1 in looped order; a W before its I; two receives in the other order."""
    placement = Placement(3, 2, True)
    for name in V_SHAPED:
        schedule = make(name, 3, 6, 2)
        with pytest.raises(ScheduleError, match="the order cannot run"):
            schedules.validate(schedule, 6, Placement(3, 2))
        early = copy.deepcopy(schedule)
        at = next(i for i, a in enumerate(early[2]) if a.op == "W")
        early[2].insert(early[2].index(early[2][at]._replace(op="I")), early[2].pop(at))
        with pytest.raises(ScheduleError, match="comes before its I"):
            schedules.validate(early, 6, placement)
        programs = add_transfers(schedule, placement)
        of_one = [i for i, x in enumerate(programs[1]) if x[:3] == ("receive", 2, "F")]
        program = programs[1]
        program[of_one[0]], program[of_one[1]] = program[of_one[1]], program[of_one[0]]
        with pytest.raises(ScheduleError):
            nccl_model.run(programs, placement=placement)


@pytest.mark.parametrize(
    "forward, input, weight",
    [(1, 1, 1), (2, 3, 1), (3, 2, 2), (4, 4, 4), (1, 4, 1), (7, 5, 5), (2, 2, 0)],
)
def test_zero_bubble_formula(forward, input, weight):
    """2401.10241: (p - 1)(T_F + T_I - T_W), for T_W <= T_F and m >= p."""
    cost = Cost(forward, input, weight)
    for p in (2, 3, 4, 8, 13):
        for m in (p, p + 1, 3 * p):
            ideal = m * (forward + input + weight)
            zero_bubble = bubble(simulate(make("zb-h1", p, m), cost)) * ideal
            assert zero_bubble == pytest.approx((p - 1) * (forward + input - weight)), (p, m)
            plain = bubble(simulate(make("1f1b", p, m), cost)) * ideal
            assert plain == pytest.approx((p - 1) * (forward + input + weight)), (p, m)


@pytest.mark.parametrize("forward, input, weight", [(5, 1, 4), (2, 1, 2), (7, 3, 5)])
def test_zero_bubble_where_weights_take_longer_than_inputs(forward, input, weight):
    """The last rank cannot start before (p - 1) T_F: no schedule has a smaller bubble than that,
    and this one has no larger one."""
    cost = Cost(forward, input, weight)
    for p, m in ((2, 2), (4, 9), (8, 8)):
        expected = pytest.approx((p - 1) * forward / (m * (forward + input + weight)))
        assert bubble(simulate(make("zb-h1", p, m), cost)) == expected
        assert bubble_formula("zb-h1", p, m, 1, cost) == expected


# file -> (kind, p, m, cost) of each picture in its docstring
EVEN = Cost(1, 0.5, 0.5)
PICTURES = {
    "schedules.py": [("1f1b", 4, 6, Cost())],
    "pipeline_parallel.py": [("1f1b", 2, 2, EVEN)],
    "course/exercises/05_one_f_one_b.py": [("gpipe", 3, 4, Cost())],
    "course/exercises/07_zb_h1.py": [("1f1b", 3, 4, Cost())],
    "course/exercises/08_simulate.py": [("1f1b", 2, 2, Cost())],
}
ROW = re.compile(r"rank (\d) +((?:[FBIW]\d|\.\.|--)(?: (?:[FBIW]\d|\.\.|--))*)")


def pictures(file) -> list[dict[int, list[str]]]:
    """Of a docstring: rank -> slots, once for each time line. A new one begins where the rank does
    not grow."""
    found = [{}]
    for rank, slots in ROW.findall(ast.get_docstring(ast.parse((ROOT / file).read_text()))):
        if found[-1] and int(rank) <= max(found[-1]):
            found.append({})
        found[-1][int(rank)] = slots.split()
    return found


def test_pictures_in_docstrings():
    """Every time line of the tree is what `make` and `simulate` give, up to where it is cut."""
    folders = "", "course/", "course/exercises/"
    files = [str(path.relative_to(ROOT)) for at in folders for path in ROOT.glob(f"{at}*.py")]
    assert {file for file in files if pictures(file) != [{}]} == set(PICTURES)
    for file, drawn in PICTURES.items():
        assert len(pictures(file)) == len(drawn), file
        for rows, (kind, p, m, cost) in zip(pictures(file), drawn):
            lines = text(simulate(make(kind, p, m), cost)).splitlines()
            for rank, slots in rows.items():
                line = lines[rank].split()[-1]
                expected = [line[n : n + 2] for n in range(0, len(line), 2)]
                # idle time at the end is not drawn by `text`
                while slots[-1] == ".." and len(slots) > len(expected):
                    slots.pop()
                assert slots == expected[: len(slots)], (file, kind, rank)


def test_one_list_of_schedules_and_of_routers():
    """Flags, planner and model read it, and an unknown name raises everywhere."""
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(Config)}
    assert choices["schedule"] == tuple(NAMES) and choices["router"] == tuple(moe.ROUTERS)
    for software in SOFTWARE.values():
        assert set(software.schedules) <= set(NAMES)
    for ask in (
        lambda: memory.in_flight("dualpipe", 2, 4, 1, 0),
        lambda: bubble_formula("dualpipe", 2, 4),
        lambda: make("dualpipe", 2, 4),
    ):
        with pytest.raises(ScheduleError, match="dualpipe"):
            ask()
    with pytest.raises(FieldError, match="router"):
        moe.MoEConfig(2, 8, 2, num_experts=2, router="random")


def test_by_hand():
    """The figures of 2104.04473 (p = 4, m = 8) in letters."""

    def words(actions):
        return " ".join(f"{a.op}{a.chunk}{a.micro_batch}" for a in actions)

    assert words(make("1f1b", 4, 4)[2]) == "F00 F01 B00 F02 B01 F03 B02 B03"
    assert words(make("gpipe", 2, 3)[1]) == "F00 F01 F02 B00 B01 B02"
    assert words(make("interleaved", 2, 2, 2)[0]) == "F00 F01 F10 F11 B10 B11 B00 B01"
    assert words(make("interleaved", 2, 2, 2)[1]) == "F00 F01 F10 B10 F11 B11 B00 B01"
    assert words(make("zb-h1", 2, 3)[1]) == "F00 I00 F01 I01 W00 F02 I02 W01 W02"
    zb_v = "F00 F01 F02 F10 I10 W10 F11 I11 W11 I00 W00 F12 I12 W12 I01 W01 I02 W02"
    assert words(make("zb-v", 2, 3, 2)[0]) == zb_v
    dualpipe_v = "F00 F10 F01 F11 F02 B10 F12 B00 F03 B11 F13 B01 B12 B02 I13 I03 W13 W03"
    assert words(make("dualpipe-v", 2, 4, 2)[1]) == dualpipe_v
    events = simulate(make("1f1b", 2, 2), Cost(1, 1, 1, transfer=0.5))
    ends = {(e.rank, e.op, e.micro_batch): e.end for e in events}
    first = {(0, "F", 0): 1, (0, "F", 1): 2, (0, "B", 0): 7, (0, "B", 1): 10}
    second = {(1, "F", 0): 2.5, (1, "B", 0): 4.5, (1, "F", 1): 5.5, (1, "B", 1): 7.5}
    assert ends == first | second


def test_cost_of_each_stage():
    events = simulate(make("gpipe", 2, 1), Cost(forward=[1, 5], input=[2, 3], weight=0))
    assert max(e.end for e in events) == 11


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda s: s[1].pop(), ["rank 1, position 7", "without B of chunk 0, micro-batch 3"]),
        (lambda s: s[0].pop(3), ["rank 0", "B of chunk 0, micro-batch 2", "before its F"]),
        (
            lambda s: s[1].insert(3, s[1][0]),
            ["rank 1, position 3", "F of chunk 0, micro-batch 0", "twice"],
        ),
        (lambda s: s[0].insert(0, Action("X", 0, 0)), ["rank 0, position 0", "F, B, I, W"]),
        (lambda s: s[0].append(Action("F", 0, 9)), ["micro-batch 9", "0 to 3"]),
        (lambda s: s[0].append(Action("W", 0, 0)), ["W of chunk 0, micro-batch 0", "before its I"]),
        (lambda s: s[0].append(Action("I", 0, 0)), ["I of chunk 0, micro-batch 0", "twice"]),
        # rank 0 begins with the last micro-batch
        (
            lambda s: s[0].sort(key=lambda a: (-a.micro_batch, a.op == "B")),
            ["waits for", "order cannot run"],
        ),
    ],
)
def test_validate_names_rank_position_and_rule(damage, words):
    schedule = copy.deepcopy(make("1f1b", 2, 4))
    damage(schedule)
    with pytest.raises(ScheduleError) as e:
        schedules.validate(schedule, 4)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_bad_arguments():
    with pytest.raises(ScheduleError, match="6 must be divisible by 4"):
        make("interleaved", 4, 6, 2)
    with pytest.raises(ScheduleError, match="only interleaved"):
        make("1f1b", 4, 8, 2)
    for arguments in (("interleaved", 0, 2, 2), ("interleaved", 2, 2, 0), ("1f1b", 2, 0)):
        with pytest.raises(ScheduleError, match="p, m and v are at least 1"):
            make(*arguments)
    with pytest.raises(ScheduleError, match=r"rank 0, position 0: .* is no Action"):
        schedules.validate([[("F", 0, 0)]], 1)


def test_plot(tmp_path):
    events = {}
    for name in NAMES:
        v = max(chunks(name, 2, 4))
        events[name] = simulate(make(name, 2, 4, v), Cost(), placement_of(name, 2, v))
    drawing.plot(events, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_numbers_can_be_read_on_every_chunk():
    """Text on any grey has a contrast of at least 4.5 (WCAG 2)."""
    for grey in range(256):
        c = grey / 255
        luminance = c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        contrasts = {"black": (luminance + 0.05) / 0.05, "white": 1.05 / (luminance + 0.05)}
        assert contrasts[drawing.text_on((c, c, c))] >= 4.5
