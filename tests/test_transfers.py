"""Sends and receives, from lists alone: no ranks are needed."""

import random

import pytest

from course import nccl_model
from pipeline_parallel import Transfer, add_transfers
from schedules import Action, Placement, ScheduleError, make


def test_lowering_by_hand():
    first, second = add_transfers(make("1f1b", 2, 2))

    def word(entry):
        if isinstance(entry, Action):
            return str(entry)
        return entry.op, entry.kind, entry.micro_batch

    assert [word(entry) for entry in second] == [
        ("receive", "F", 0),
        "F of chunk 0, micro-batch 0",
        ("receive", "F", 1),
        "B of chunk 0, micro-batch 0",
        ("send", "B", 0),
        "F of chunk 0, micro-batch 1",
        "B of chunk 0, micro-batch 1",
        ("send", "B", 1),
        ("settle", "B", 0),
        ("settle", "B", 1),
    ]
    # An activation has arrived when its gradient comes back.
    settled = [(i, entry.micro_batch) for i, entry in enumerate(first) if entry[0] == "settle"]
    assert [first[i - 1] for i, _ in settled] == [Action("B", 0, 0), Action("B", 0, 1)]
    assert [micro_batch for _, micro_batch in settled] == [0, 1]
    assert sum(isinstance(entry, Transfer) and entry.op == "send" for entry in first) == 2


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 3)])
def test_every_send_has_its_receive(name, v):
    p = 4
    m = 8
    programs = add_transfers(make(name, p, m, v), Placement(p, v))
    sides = {"send": [], "receive": [], "settle": []}
    for rank, program in enumerate(programs):
        for entry in program:
            if isinstance(entry, Transfer):
                ends = min(rank, entry.peer), max(rank, entry.peer)
                sides[entry.op].append((*ends, entry.kind, entry.stage, entry.micro_batch))
    assert sorted(sides["send"]) == sorted(sides["receive"])
    # nearly v times the traffic
    assert len(sides["send"]) == 2 * m * (p * v - 1)


def test_wrong_programs_are_seen():
    """A send or a receive that is missing, and swapped receives."""
    for seed in range(20):
        g = random.Random(seed)
        programs = add_transfers(make("interleaved", 4, 8, 2), Placement(4, 2))
        rank = g.randrange(4)
        program = programs[rank]
        transfers = [
            i for i, x in enumerate(program) if isinstance(x, Transfer) and x.op != "settle"
        ]
        if seed % 2:
            del program[g.choice(transfers)]
        else:
            channel = "receive", (rank - 1) % 4, "F"
            receives = [i for i in transfers if program[i][:3] == channel]
            i, j = g.sample(receives, 2)
            program[i], program[j] = program[j], program[i]
        with pytest.raises(ScheduleError):
            nccl_model.run(programs, placement=Placement(4, 2))
