"""Programs of a pipeline by the rules of GPUs and NCCL, simulated."""

import itertools
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from base.groups import disjoint, nccl_groups, pipeline_links
from course import ranks
from course.nccl_model import run
from pipeline_parallel import Transfer, add_transfers
from schedules import (
    NAMES,
    V_SHAPED,
    Action,
    Cost,
    ScheduleError,
    make,
    placement_of,
    simulate,
)

SIZES = (2, 4, 8)
CASES = [(name, p) for name in NAMES for p in SIZES]


def schedule_of(name, p, m=None):
    v = 2 if name == "interleaved" or name in V_SHAPED else 1
    return make(name, p, m or 2 * p, v), placement_of(name, p, v)


def end_of(events):
    return max(event.end for event in events)


def is_stuck(programs, placement, **machine):
    try:
        run(programs, placement=placement, **machine)
    except ScheduleError:
        return True
    return False


def with_first_messages(programs, v_shaped):
    """What `groups.nccl_groups` does before: a message through each link, in one order."""
    p = len(programs)
    before = [[] for _ in range(p)]
    links = itertools.chain(*disjoint(pipeline_links(p, v_shaped)))
    for number, (sender, receiver, kind) in enumerate(links):
        before[sender].append(Transfer("send", receiver, kind, -1, number))
        before[receiver].append(Transfer("receive", sender, kind, -1, number))
    return [first + program for first, program in zip(before, programs)]


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("name, p", CASES)
def test_no_schedule_is_stuck(name, p, queues):
    """Nor in evaluation, nor with one micro-batch. No connection is there at first."""
    schedule, placement = schedule_of(name, p)
    forwards = [[a for a in actions if a.op == "F"] for actions in schedule]
    cases = [schedule, forwards]
    if name not in ("interleaved", "dualpipe-v"):
        cases.append(schedule_of(name, p, 1)[0])
    for case in cases:
        programs = with_first_messages(add_transfers(case, placement), placement.v_shaped)
        run(programs, placement=placement, queues=queues, connected=False)


def test_two_receives_ahead_are_stuck():
    """What this project did once: two receives ahead, and connections that are made in the step,
    because an all-reduce had made another one. And with all connections made."""
    stuck = {}
    for name, p in CASES:
        schedule, placement = schedule_of(name, p)
        programs = add_transfers(schedule, placement, ahead=2)
        stuck[name, p] = [
            is_stuck(programs, placement, connected=False),
            is_stuck(programs, placement, queues=8),
            is_stuck(programs, placement, queues=1),
        ]
    in_the_first_step = [case for case, row in stuck.items() if row[0]]
    assert in_the_first_step == [
        *[("gpipe", 8)],
        *[("1f1b", p) for p in SIZES],
        *[("interleaved", 2)],
        *[("zb-h1", p) for p in SIZES],
    ]
    assert [case for case, row in stuck.items() if row[1]] == [("gpipe", 8)]
    assert {name for (name, _), row in stuck.items() if row[2]} == {"gpipe", "interleaved"}


@pytest.mark.parametrize("name, p", CASES)
def test_one_receive_ahead_hides_what_can_be_hidden(name, p):
    """With one, the time is that of a machine where messages are on their way by themselves; with
    none, each message of the steady state takes time."""
    schedule, placement = schedule_of(name, p)
    for transfer in (0, 0.1):
        cost = Cost(transfer=transfer)
        ideal = end_of(simulate(schedule, cost, placement))
        for queues in (1, 8):
            soon, late = (
                end_of(run(add_transfers(schedule, placement, ahead), cost, placement, queues))
                for ahead in (1, 0)
            )
            assert soon == pytest.approx(ideal)
            assert late > ideal if transfer else late == pytest.approx(ideal)


def on_rank(rank, pipelines):
    """{link: messages that went each way}, how often the ranks split, and the groups' names."""
    import nccl_rules

    split = mock.Mock(side_effect=nccl_rules.split_group)
    with mock.patch.object(dist, "split_group", split):
        groups = nccl_groups(pipelines, rank, torch.device("cpu"), timedelta(seconds=20))
    messages = {link: dict(group.messages) for link, group in groups.items()}
    return messages, split.call_count, [group.group_name for group in groups.values()]


@pytest.mark.parametrize("pipelines, splits", [([[0, 2], [1, 3]], 4), ([[0, 1, 2]], 7)])
def test_every_link_has_carried_a_message(pipelines, splits):
    """Not an all-reduce, which makes another connection. Each has a communicator of its own."""
    world = sum(map(len, pipelines))
    found = ranks.run(on_rank, world, pipelines, backend="nccl-rules")
    for pipeline in pipelines:
        links = pipeline_links(len(pipeline))
        for position, rank in enumerate(pipeline):
            messages, count, names = found[rank]
            assert count == splits and len(set(names)) == len(names)
            assert sorted(messages) == [link for link in links if position in link[:2]]
            for (sender, receiver, _), sent in messages.items():
                assert sent == {(int(sender > receiver), int(receiver > sender)): 1}


def test_communicators_of_1024_ranks():
    """A new_group for each pair of each pipeline: 16 x 130 of them."""
    rounds = disjoint(pipeline_links(64))
    assert len(rounds) == 5 and sum(map(len, rounds)) * 1024 // 64 == 2064


# --- each rule, alone -----------------------------------------------------------------------------

F0, F1 = Action("F", 0, 0), Action("F", 0, 1)
B0, B1 = Action("B", 0, 0), Action("B", 0, 1)


def message(op, peer, kind, stage, k=0):
    return Transfer(op, peer, kind, stage, k)


def test_meeting():
    """Each host posts its receive first. The hosts wait for each other, unless both links have
    carried a message."""
    first = [message("receive", 1, "B", 0), F0, message("send", 1, "F", 1), B0]
    second = [message("receive", 0, "F", 1), F0, B0, message("send", 0, "B", 0)]
    with pytest.raises(ScheduleError, match=r"host 0 waits to post .*'receive', peer=1, kind='B'"):
        run([first, second], connected=False)
    assert end_of(run([first, second])) == 6.0


def test_queue():
    """A receive that waits behind another one of its stream holds up the forward behind it, where
    both streams share the one queue."""
    first = [message("receive", 1, "B", 0, 0), message("receive", 1, "B", 0, 1)]
    first += [F0, message("send", 1, "F", 1, 0), F1, message("send", 1, "F", 1, 1), B0, B1]
    second = [message("receive", 0, "F", 1, 0), F0, B0, message("send", 0, "B", 0, 0)]
    second += [message("receive", 0, "F", 1, 1), F1, B1, message("send", 0, "B", 0, 1)]
    run([first, second], queues=3)
    with pytest.raises(ScheduleError, match="GPU 0 waits at"):
        run([first, second], queues=1)


def test_message_order():
    """The first send meets the first receive."""
    first = [F0, message("send", 1, "F", 1, 0), F1, message("send", 1, "F", 1, 1)]
    second = [message("receive", 0, "F", 1, 1), message("receive", 0, "F", 1, 0), F0, F1]
    with pytest.raises(ScheduleError, match=r"rank 0 sends .1, 0. where rank 1 receives .1, 1."):
        run([first, second])


def test_stream():
    """A send starts after the actions that were enqueued before it, and an action after the message
    that it needs."""
    first = [F0, F1, message("send", 1, "F", 1, 0)]
    second = [message("receive", 0, "F", 1, 0), F0]
    events = run([first, second], Cost(transfer=0.5))
    assert [e.start for e in events if e.rank == 1] == [2.5]


def test_a_message_without_its_receive():
    with pytest.raises(ScheduleError, match="waits for a receive never posted"):
        run([[F0, message("send", 1, "F", 1)], [F0]])
