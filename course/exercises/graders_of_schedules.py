"""The graders of pipeline schedules: exercises 5 to 8. See graders.py."""

import schedules
from course.exercises.grading import AnswerError, Par, Watch

# seconds, of simulated times
TIME_TOLERANCE = 1e-9

# --- 5 to 7: schedules ----------------------------------------------------------------------------


def action_text(actions: list, v: int) -> str:
    """F0 F1 B0; with chunks F0.1: micro-batch 0 of chunk 1."""
    words = []
    for op, chunk, k in actions:
        words.append(f"{op}{k}.{chunk}" if v > 1 else f"{op}{k}")
    return " ".join(words)


def difference_of_lists(case: str, got: list, expected: list, v: int, hint: str) -> None:
    """Raises AnswerError at the first action that differs."""
    if not isinstance(got, list) or len(got) != len(expected):
        raise AnswerError(f"{case}: expected a list of {len(expected)} lists, one for each rank.")
    for rank, (mine, right) in enumerate(zip(got, expected)):
        try:
            mine = [schedules.Action(*action) for action in mine]
        except TypeError:
            raise AnswerError(
                f"{case}, rank {rank}: expected a list of Action(op, chunk, micro_batch), got "
                f"{mine!r:.60}"
            ) from None
        right = [tuple(action) for action in right]
        if mine == right:
            continue
        pairs = zip([*mine, None], [*right, None])
        position = next(i for i, (a, b) in enumerate(pairs) if a != b)
        most = max(0, position - 4)
        raise AnswerError(
            f"{case}, rank {rank}, position {position}.\n"
            f"expected  .. {action_text(right[most : position + 5], v)} ..\n"
            f"got       .. {action_text(mine[most : position + 5], v)} ..\n{hint}"
        )


def schedule_par(got: list, expected: list, name: str, case: tuple[int, int, int]) -> Par | None:
    """Micro-batches in flight and the bubble, beside the paper's. None where the lists cannot run:
    then there is nothing to count."""
    p, m, v = case
    try:
        if len(got) != p:
            return None
        got = [[schedules.Action(*action) for action in actions] for actions in got]
        schedules.validate(got, m, v)
    except (schedules.ScheduleError, TypeError):
        return None
    held, of_paper = (max(schedules.in_flight(lists)) for lists in (got, expected))
    cost = schedules.Cost(1 / v, 1 / v, 1 / v)
    bubble = schedules.bubble(schedules.simulate(got, cost, v))
    formula = schedules.bubble_formula(name, p, m, v, cost)
    unit = "chunks of a micro-batch" if v > 1 else "micro-batches"
    text = (
        f"p {p}, m {m}: {held} {unit} in flight, the paper's {of_paper}; bubble {bubble:.4f}, the "
        f"paper's {formula:.4f}"
    )
    return Par(held <= of_paper and bubble <= formula + TIME_TOLERANCE, text)


def schedule_grader(name: str, hint: str, chunks: tuple[int, ...] = (1,)):
    """A grader of lists: equal to the project's for p up to 6 ranks."""

    def grader(make, rank: int, watch: Watch) -> tuple[str, Par]:
        count = 0
        par = None
        # the case of the picture first
        for p, m in [(4, 8), *((p, m) for p in range(1, 7) for m in range(1, 13))]:
            for v in chunks:
                if v > 1 and m % p:
                    continue
                sizes = (p, m, v) if chunks != (1,) else (p, m)
                expected = schedules.make(name, p, m, v)
                got = make(*sizes)
                par = par or schedule_par(got, expected, name, (p, m, v))
                case = ", ".join(f"{letter} {n}" for letter, n in zip("pmv", sizes))
                try:
                    difference_of_lists(case, got, expected, v, hint)
                except AnswerError as error:
                    error.par = schedule_par(got, expected, name, (p, m, v))
                    raise
                count += 1
        return f"{count} schedules, p from 1 to 6", par

    return grader


one_f_one_b = schedule_grader(
    "1f1b",
    "Warmup is what the ranks behind need until the first gradient comes back: how many forwards "
    "is that? Then one F, one B in turn, and the backwards that are left. With few micro-batches "
    "the warmup ends early.",
)
interleaved = schedule_grader(
    "interleaved",
    "Forwards go through chunk 0, then chunk 1 and so on, for groups of p micro-batches; backwards "
    "in the same groups, but from the last chunk to the first. Warmup is 2 (p - 1 - rank) + "
    "(v - 1) p actions.",
    (2, 3),
)
zb_h1 = schedule_grader(
    "zb-h1",
    "I stands where 1F1B has B. How many W may wait on this rank? One more, and the oldest comes "
    "right after the I; the W that are left come at the end.",
)


# --- 8: simulate ----------------------------------------------------------------------------------


def simulation(simulate, rank: int, watch: Watch) -> tuple[str, Par]:
    cost = schedules.Cost(1.0, 1.25, 0.75, transfer=0.5)
    cases = [("gpipe", 3, 4, 1), ("1f1b", 4, 8, 1), ("interleaved", 2, 4, 2), ("zb-h1", 4, 6, 1)]
    for name, p, m, v in cases:
        schedule = schedules.make(name, p, m, v)
        for of_transfer, now in (("", schedules.Cost()), (", transfers of 0.5 s", cost)):
            expected = {tuple(e)[:4]: e for e in schedules.simulate(schedule, now, v)}
            events = simulate([list(actions) for actions in schedule], now, v)
            got = {tuple(e)[:4]: schedules.Event(*e) for e in events or []}
            case = f"{name}, p {p}, m {m}{of_transfer}"
            _compare_events(case, got, expected)
    _refuses_a_deadlock(simulate)
    events = [schedules.Event(*e) for e in simulate(schedules.make("1f1b", 4, 8), cost=_ONE, v=1)]
    bubble = schedules.bubble(events)
    text = f"1f1b, p 4, m 8: bubble {bubble:.4f}, the paper's (p - 1) / m = {3 / 8:.4f}"
    return f"the times of {2 * len(cases)} runs; a deadlock, refused", Par(bubble == 3 / 8, text)


_ONE = schedules.Cost()


def _compare_events(case: str, got: dict, expected: dict) -> None:
    for key in got.keys() - expected.keys():
        raise AnswerError(
            f"{case}: rank {key[0]} runs {schedules.Action(*key[1:])}, which is not in its list."
        )
    # by start, so that the first difference is the cause of the others
    for key, event in expected.items():
        action = schedules.Action(*key[1:])
        if key not in got:
            raise AnswerError(
                f"{case}: rank {key[0]} never runs {action}. Every action has an event."
            )
        times = got[key].start, got[key].end
        if max(abs(times[0] - event.start), abs(times[1] - event.end)) > TIME_TOLERANCE:
            raise AnswerError(
                f"{case}, rank {key[0]}, {action}: expected {event.start:g} to {event.end:g} s, got"
                f" {times[0]:g} to {times[1]:g}. An action starts when its rank is free and all "
                "that it needs has arrived; what another rank computed arrives after a transfer, "
                "what this rank computed at once."
            )


def _refuses_a_deadlock(simulate) -> None:
    """Rank 0 wants the gradient before rank 1 has the activation."""
    action = schedules.Action
    orders = ("F0 B1 F1 B0", "F0 B0 F1 B1")
    stuck = [[action(op, 0, int(k)) for op, k in order.split()] for order in orders]
    try:
        simulate(stuck, _ONE, 1)
    except schedules.ScheduleError:
        return
    raise AnswerError(
        "Two lists that wait for each other came back as if they had run. Where no rank can go on "
        "and actions are left, raise ScheduleError: a deadlock is found here, not on a cluster."
    )
