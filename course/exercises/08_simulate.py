"""Exercise 8: simulate a schedule.                                                 (35 minutes)

A schedule's lists hold no times. Time follows from two rules:

    an action starts when its rank is free and everything that it needs has arrived
    what another rank computed arrives `transfer` seconds after it was done; what this rank computed
    is there at once

    rank 0   F0 F1 .. .. B0 -- .. B1 --      p = 2, m = 2, F takes 1 s, B 2 s, transfers 0 s
    rank 1   .. F0 B0 -- F1 B1 --            F0 on rank 1 needs F0 of rank 0, so it starts at 1 s

Go round the ranks. On each, run actions from its list while the next one can start; when it needs
a result that nobody has computed yet, go on to the next rank. When no rank can go on, all lists
are done, or they wait for each other: a deadlock. On a cluster that is a hang at night; here it is
an error.

schedules.py gives you
    needs(action, rank, placement)      the results that an action needs: a list of (kind, stage, k)
    result_of(action, rank, placement)  the result that it gives, written in the same way
    cost.seconds(op, stage)             how long it takes; stage = placement.stage_of(rank, chunk)
    cost.transfer                       seconds from rank to rank; placement.rank_of(stage) is the
                                        rank of a result
    Event(rank, op, chunk, micro_batch, start, end)

Read         schedules.py: the first 25 lines, `Placement`, `needs`, `Cost`, `Event`
Paper        arXiv 2104.04473, section 2.2: figures 3 and 4 are drawn from such times
Not yet      `simulate` in schedules.py
Check        python -m course.exercises.check 8      --hint: a hint, one more at each call
Par          the bubble of 1F1B, simulated, is exactly (p - 1) / m
"""

from schedules import Action, Cost, Event, Placement, ScheduleError, needs, result_of


def simulate(schedule: list[list[Action]], cost: Cost, placement: Placement) -> list[Event]:
    """The events of all actions, in any order. placement: which rank has which stage.

    Raises ScheduleError where the lists wait for each other.
    """
    raise NotImplementedError(
        "Keep three things: `ended`, {result: when it was done}; `free_at`, for each rank; and "
        "`position`, for each rank, in its list. An action starts at the largest of free_at and of "
        "all arrivals."
    )
