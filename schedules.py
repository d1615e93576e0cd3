"""Pipeline schedules as data: one list of actions for each rank.

    gpipe          all forwards, then all backwards (arXiv 1811.06965)
    1f1b           after a warmup, one forward, one backward (arXiv 2104.04473, section 2.2.1)
    interleaved    1F1B with v chunks of layers on each rank: a smaller bubble (section 2.2.2)
    zb-h1          1F1B with backward in two parts, input gradients at once and weight gradients
                   later, where the rank would otherwise be idle (arXiv 2401.10241)
    zb-v           two chunks on each rank, placed as a V: less bubble, equal memory (section 6)
    dualpipe-v     a V whose steady state is pairs of F and B, of which one can communicate while
                   the other computes (arXiv 2412.19437, section 3.2.1)

    rank 0    F0 F1 F2 F3 .. .. .. .. .. .. B0 -- F4 B1 -- F5       1F1B, p = 4 ranks; B takes
    rank 1    .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 --       twice as long as F (B0 --),
    rank 2    .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3       and dots are idle time: the
    rank 3    .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4       bubble

    python -m course.schedules      a lesson: time lines, bubbles, activations in flight

An action is (op, chunk, micro_batch). The ops are F, forward; B, backward; and for zero-bubble
schedules I, the input gradient, and W, the weight gradient, instead of B.

A list holds compute only, in order, without times: time is the output of `simulate`. The model is
divided into p * v stages, and a `Placement` says which rank has which. F of stage i needs F of
stage i - 1; B (or I) of stage i needs B (or I) of stage i + 1. pipeline_parallel.py derives sends
and receives from the lists. (In Megatron-LM a schedule is control flow, interleaved with
communication.)

Not covered: lists made for measured times, by search (the papers' automatic schedulers); V-Half and
V-Min, which hold less (arXiv 2405.15362).
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class Action(NamedTuple):
    op: str  # F, B, I or W
    chunk: int  # which of this rank's chunks of layers, from 0
    micro_batch: int  # from 0

    def __str__(self):
        return f"{self.op} of chunk {self.chunk}, micro-batch {self.micro_batch}"


# The actions of each rank, in order.
Schedule = list[list[Action]]


class ScheduleError(ValueError):
    """A list that breaks a rule; the message names the rank, the position and the rule."""


# --- stages and ranks -----------------------------------------------------------------------------


class Placement(NamedTuple):
    """Which rank has which of the p v stages, for p = 4 and v = 2:

        looped      rank 0: stages 0 4    rank 1: 1 5    rank 2: 2 6    rank 3: 3 7
        V-shaped    rank 0: stages 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

    In a V every second chunk goes back from rank p - 1 to rank 0, which so has both ends of the
    model.
    """

    p: int
    v: int = 1
    v_shaped: bool = False

    def stage_of(self, rank: int, chunk: int) -> int:
        return chunk * self.p + self._position(rank, chunk)

    def rank_of(self, stage: int) -> int:
        chunk, position = divmod(stage, self.p)
        return self._position(position, chunk)

    def _position(self, rank: int, chunk: int) -> int:
        """Turn a rank into its position in a chunk's order of ranks, or back."""
        return self.p - 1 - rank if self.v_shaped and chunk % 2 else rank

    @property
    def last_stage(self) -> int:
        return self.p * self.v - 1


# --- the schedules --------------------------------------------------------------------------------
#
# p ranks, m micro-batches, v chunks on each rank.


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards: each rank holds the activations of m micro-batches."""
    return [[Action(op, 0, k) for op in "FB" for k in range(m)] for _ in range(p)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """p - 1 - rank forwards of warmup: each rank holds at most p - rank micro-batches."""
    forward = [Action("F", 0, k) for k in range(m)]
    backward = [Action("B", 0, k) for k in range(m)]
    return [_alternate(forward, backward, warmup=p - 1 - rank) for rank in range(p)]


def interleaved_one_f_one_b(p: int, m: int, v: int, extra: int = 0) -> Schedule:
    """Each group of p micro-batches goes through chunks 0 to v - 1, and backward from the last
    chunk to the first. extra: more forwards of warmup. With 1 every F has another micro-batch than
    the B that follows it (`join_pairs`). Raises ScheduleError where p does not divide m."""
    if m % p:
        raise ScheduleError(
            f"interleaving needs micro-batches in groups of p: {m} must be divisible by {p}"
        )
    if v == 1 and not extra:
        return one_f_one_b(p, m)
    forward = [
        Action("F", chunk, group + k)
        for group in range(0, m, p)
        for chunk in range(v)
        for k in range(p)
    ]
    backward = [Action("B", v - 1 - a.chunk, a.micro_batch) for a in forward]
    shortest = (v - 1) * p + extra
    return [_alternate(forward, backward, 2 * (p - 1 - rank) + shortest) for rank in range(p)]


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """1F1B with I in place of B. On rank r the W of micro-batch k comes after the I of k + r, so
    that input gradients are sent sooner. The remaining W come at the end."""
    schedule = []
    for rank, one_f_one_b_actions in enumerate(one_f_one_b(p, m)):
        actions = []
        for a in one_f_one_b_actions:
            if a.op == "F":
                actions.append(a)
                continue
            actions.append(a._replace(op="I"))
            if a.micro_batch >= rank:
                actions.append(Action("W", 0, a.micro_batch - rank))
        actions += [Action("W", 0, k) for k in range(max(0, m - rank), m)]
        schedule.append(actions)
    return schedule


def zero_bubble_v(p: int, m: int) -> Schedule:
    """A V, with I and W. If F, I and W take equal time, no rank waits between its first action and
    its last. Each rank holds at most 2 p chunks, as much as the first rank under 1F1B, which has p
    micro-batches of chunks that are twice as large."""
    schedule = []
    for rank in range(p):
        # With fewer micro-batches than a full list has, the surplus is left out.
        steady = max(m, 2 * p - 1) - (2 * p - 1 - rank)
        phases = [
            # Until the first micro-batch has come back from the tip of the V ..
            ("F0", 2 * (p - rank) - 1),
            ("F1 F0", rank),
            # .. and its gradient has come from rank 0, then from the tip.
            ("F1 I1 W", p - rank),
            ("F0 I0 W F1 I1 W", steady),
            ("I0 W F1 I1 W", p - rank - 1),
            ("I0 I1", rank),
            ("I0 W", p - rank),
            ("W", 2 * rank),
        ]
        schedule.append(_write_out(phases, m))
    return schedule


def dualpipe_v(p: int, m: int) -> Schedule:
    """A V whose steady state alternates pairs: F of chunk 0 and B of chunk 1, F of 1 and B of 0. I
    and W fill the ends alone. Each rank holds 2 p + 1 chunks. Raises ScheduleError for m < 2 p."""
    if m < 2 * p:
        raise ScheduleError(
            f"dualpipe-v needs 2 p micro-batches or more: {m} are fewer than {2 * p}"
        )
    schedule = []
    for rank in range(p):
        # Ranks between this one and the tip of the V.
        behind = p - 1 - rank
        phases = [
            # Until the first micro-batch has come back from the tip, then its gradient from rank 0.
            ("F0", 2 * behind),
            ("F0 F1", rank + 1),
            ("I1 W F1", behind),
            ("F0 B1 F1 B0", m - 2 * p + rank + 1),
            # No F of chunk 0 is left.
            ("B1 F1 B0", behind),
            # Of the last rank + 1 backwards of each chunk half are whole. The others leave their
            # weight gradients for the end, where the rank would wait.
            ("B1 B0", (rank + 1) // 2),
            ("B1 I0", (rank + 1) % 2),
            ("I1 I0", (rank + 1) // 2),
            ("W I0", behind),
            ("W", rank + 1),
        ]
        schedule.append(_write_out(phases, m))
    return schedule


def _write_out(phases: list[tuple[str, int]], m: int) -> list[Action]:
    """A list from (words, how often they come). F1 is F of chunk 1, of the micro-batch that is next
    in turn; W is the weight gradient that has waited longest. Micro-batches from m on are left
    out."""
    next_micro_batch = Counter()
    waiting = deque()
    actions = []
    for word in (word for words, times in phases for word in words.split() * times):
        if word == "W":
            action = waiting.popleft()
        else:
            op, chunk = word[0], int(word[1])
            kind = KIND[op], chunk
            action = Action(op, chunk, next_micro_batch[kind])
            next_micro_batch[kind] += 1
        if action.op == "I":
            waiting.append(action._replace(op="W"))
        if action.micro_batch < m:
            actions.append(action)
    return actions


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    warmup = min(warmup, len(forward))
    steady = [a for pair in zip(forward[warmup:], backward) for a in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


NAMES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_one_f_one_b,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
    "dualpipe-v": dualpipe_v,
}
# Schedules of two chunks on each rank, placed as a V.
V_SHAPED = ("zb-v", "dualpipe-v")
# Schedules that have I and W.
SPLIT_BACKWARD = ("zb-h1", *V_SHAPED)
# Those whose F and B can be joined and fill the time: in 1F1B a Pair would wait for the Pairs of
# both neighbours, one after the other, and half of the time would be idle.
JOINABLE = ("interleaved", "dualpipe-v")


def placement_of(name: str, p: int, v: int = 1) -> Placement:
    return Placement(p, v, name in V_SHAPED)


def make(name: str, p: int, m: int, v: int = 1, overlap: bool = False) -> Schedule:
    """The schedule of that name, validated. overlap: its F and B will be joined (`join_pairs`).
    Raises ScheduleError."""
    schedule, placement = lists(name, p, m, v, overlap), placement_of(name, p, v)
    validate(schedule, m, placement)
    if overlap:
        # This raises where the pairs would wait for each other.
        simulate([join_pairs(actions) for actions in schedule], Cost(), placement)
    return schedule


# The same list each time: a pipeline adds its transfers once.
cached = lru_cache(maxsize=64)(make)


def lists(name: str, p: int, m: int, v: int = 1, overlap: bool = False) -> Schedule:
    """The schedule of that name. Raises ScheduleError where there is none for p, m and v."""
    if name not in NAMES or p < 1 or m < 1 or v < 1:
        raise ScheduleError(
            f"{name}, p {p}, m {m}, v {v}: the schedules are {', '.join(NAMES)}, and p, m and v are"
            " at least 1"
        )
    if name == "interleaved":
        return interleaved_one_f_one_b(p, m, v, extra=int(overlap))
    if name in V_SHAPED and v != 2:
        raise ScheduleError(f"{name} has two chunks on each rank, not {v}")
    if v > 1 and name not in V_SHAPED:
        raise ScheduleError(
            f"{name} has one chunk on each rank, not {v}: only interleaved has more"
        )
    return NAMES[name](p, m)


# --- inputs and results of actions ----------------------------------------------------------------

# (kind, stage, micro_batch) of an action's result. kind: F, the activation that leaves the stage;
# B, the gradient of the stage's input, from B or I; W, a weight gradient.
Result = tuple[str, int, int]

KIND = {"F": "F", "B": "B", "I": "B", "W": "W"}
# The distance from the stage that computes a result to the stage that needs it.
DIRECTION = {"F": 1, "B": -1, "I": -1, "W": 0}


def result_of(action: Action, rank: int, placement: Placement) -> Result:
    return KIND[action.op], placement.stage_of(rank, action.chunk), action.micro_batch


def needs(action: Action, rank: int, placement: Placement) -> list[Result]:
    """The results that must exist before an action can start."""
    stage = placement.stage_of(rank, action.chunk)
    k = action.micro_batch
    if action.op == "W":
        return [("B", stage, k)]
    if action.op == "F":
        return [("F", stage - 1, k)] if stage > 0 else []
    needed = [("F", stage, k)]
    if stage < placement.last_stage:
        needed.append(("B", stage + 1, k))
    return needed


# --- a forward and a backward in turns ------------------------------------------------------------


class Pair(NamedTuple):
    """Two actions that run in turns: one computes while the other's all-to-alls take tokens to
    experts and back (base/turns.py)."""

    forward: Action
    backward: Action


def join_pairs(entries: list) -> list:
    """Make a Pair of each F and the B of another micro-batch that is the rank's next action.

    entries: a list of a schedule, or a program of pipeline_parallel.py. There the messages between
    the two follow the pair: what B receives was posted before F.
    """
    joined, between = [], []
    for entry in entries:
        last = joined[-1] if joined else None
        if not isinstance(entry, Action):
            between.append(entry)
        elif isinstance(last, Action) and _may_join(last, entry):
            joined[-1] = Pair(last, entry)
        else:
            joined += [*between, entry]
            between = []
    return joined + between


def _may_join(first: Action, second: Action) -> bool:
    return first.op == "F" and second.op == "B" and first.micro_batch != second.micro_batch


def actions_of(entry: Action | Pair) -> tuple[Action, ...]:
    return (entry,) if isinstance(entry, Action) else tuple(entry)


# --- validation and simulation --------------------------------------------------------------------


def validate(schedule: Schedule, m: int, placement: Placement | None = None) -> None:
    """Check that each chunk runs each micro-batch forward once and backward once (B, or I then W),
    in an order that can run. Raises ScheduleError, naming rank, position and rule.
    placement: by default looped, one chunk on each rank."""
    placement = placement or Placement(len(schedule))
    for rank, actions in enumerate(schedule):
        seen: set[Action] = set()
        for position, action in enumerate(actions):
            broken_rule = _broken_rule(action, seen, m, placement.v)
            if broken_rule:
                raise ScheduleError(f"rank {rank}, position {position}: {action}: {broken_rule}")
            seen.add(action)
        missing = _missing(seen, m, placement.v)
        if missing:
            raise ScheduleError(f"rank {rank}, position {len(actions)}: ends without {missing}")
    simulate(schedule, Cost(), placement)


def _broken_rule(action: Action, seen: set[Action], m: int, v: int) -> str:
    """Why an action cannot come after the `seen` ones; "" if it can."""
    if not isinstance(action, Action) or not all(type(n) is int for n in action[1:]):
        return "is no Action(op, chunk, micro_batch)"
    in_range = 0 <= action.chunk < v and 0 <= action.micro_batch < m
    if action.op not in KIND or not in_range:
        return f"the ops are F, B, I, W, the chunks 0 to {v - 1}, the micro-batches 0 to {m - 1}"
    alternative = {"B": "I", "I": "B"}.get(action.op)
    if action in seen or (alternative and action._replace(op=alternative) in seen):
        return "comes twice"
    before = {"F": None, "B": "F", "I": "F", "W": "I"}[action.op]
    if before and action._replace(op=before) not in seen:
        return f"comes before its {before}"
    return ""


def _missing(seen: set[Action], m: int, v: int) -> Action | None:
    """The first action that is missing from a list; None if it is complete."""
    for chunk in range(v):
        for k in range(m):
            is_split = Action("I", chunk, k) in seen
            for op in "FIW" if is_split else "FB":
                if Action(op, chunk, k) not in seen:
                    return Action(op, chunk, k)
    return None


@dataclass(frozen=True)
class Cost:
    """Seconds of one action on one chunk, and of one transfer. B takes input + weight. A field that
    is a list has one number for each stage."""

    forward: float | list[float] = 1.0
    input: float | list[float] = 1.0
    weight: float | list[float] = 1.0
    transfer: float = 0.0
    # How many seconds of `forward`, and of `input`, are all-to-alls. Meanwhile the other half of a
    # Pair computes.
    exchange: float = 0.0

    def seconds(self, op: str, stage: int) -> float:
        if op == "B":
            return self.seconds("I", stage) + self.seconds("W", stage)
        cost = {"F": self.forward, "I": self.input, "W": self.weight}[op]
        return cost[stage] if isinstance(cost, list) else cost

    def of(self, actions: tuple[Action, ...], rank: int, placement: Placement) -> float:
        """Seconds of an action, or of a Pair: its computation, or its all-to-alls if they take
        longer."""
        total = sum(self.seconds(a.op, placement.stage_of(rank, a.chunk)) for a in actions)
        exchanges = 2 * self.exchange
        return total if len(actions) == 1 else max(total - exchanges, exchanges)


class Event(NamedTuple):
    """An action with its times in seconds, simulated or measured."""

    rank: int
    op: str
    chunk: int
    micro_batch: int
    start: float
    end: float


def simulate(schedule: Schedule, cost: Cost, placement: Placement | None = None) -> list[Event]:
    """Run the lists: an action starts when its rank is free and its inputs have arrived. Returns
    events sorted by start. Raises ScheduleError, which names the waiting action, on a deadlock.
    The entries may be Pairs. placement: by default looped."""
    p = len(schedule)
    chunks = 1 + max(a.chunk for entries in schedule for x in entries for a in actions_of(x))
    placement = placement or Placement(p, chunks)
    ended: dict[Result, float] = {}
    free_at = [0.0] * p
    position = [0] * p
    events = []
    progress = True
    while progress:
        progress = False
        for rank, entries in enumerate(schedule):
            while position[rank] < len(entries):
                actions = actions_of(entries[position[rank]])
                start = free_at[rank]
                needed = [r for action in actions for r in needs(action, rank, placement)]
                if not all(result in ended for result in needed):
                    break
                for result in needed:
                    from_this_rank = placement.rank_of(result[1]) == rank
                    arrival = ended[result] + (0 if from_this_rank else cost.transfer)
                    start = max(start, arrival)
                end = free_at[rank] = start + cost.of(actions, rank, placement)
                for action in actions:
                    ended[result_of(action, rank, placement)] = end
                    events.append(Event(rank, *action, start, end))
                position[rank] += 1
                progress = True
    for rank, entries in enumerate(schedule):
        if position[rank] < len(entries):
            action, kind, stage, k = next(
                (action, *result)
                for action in actions_of(entries[position[rank]])
                for result in needs(action, rank, placement)
                if result not in ended
            )
            other = placement.rank_of(stage)
            raise ScheduleError(
                f"rank {rank}, position {position[rank]}: {action}: waits for the {kind} of"
                f" micro-batch {k} on rank {other}, which itself waits: the order cannot run"
            )
    return sorted(events, key=lambda e: (e.start, e.rank))


# --- the bubble, and memory -----------------------------------------------------------------------


def bubble(events: list[Event]) -> float:
    """Idle time as a fraction of the ideal time, which is the work of the busiest rank: t_pb / t_id
    of arXiv 2104.04473, section 2.2."""
    work = defaultdict(float)
    for e in events:
        work[e.rank] += e.end - e.start
    duration = max(e.end for e in events) - min(e.start for e in events)
    return duration / max(work.values()) - 1


def bubble_formula(name: str, p: int, m: int, v: int = 1, cost: Cost = Cost()) -> float:
    """The bubble by the papers' formulas.

    T_F, T_I and T_W are the times of F, I and W. GPipe and 1F1B: (p - 1) / m. Interleaved: (p - 1)
    / (v m). ZB-H1 with m >= p and T_W <= T_F: a time of (p - 1) (T_F + T_I - T_W). For T_W > T_I it
    is (p - 1) T_F, because the last rank cannot start earlier. In a V the times are those of a
    chunk, half as long. ZB-V with m >= 2 p - 1 and T_F, T_W <= T_I <= 2 T_W: (p - 1) T_I.
    DualPipeV with T_W <= T_I <= T_F <= T_I + T_W: as ZB-H1.
    """
    if name in ("gpipe", "1f1b", "interleaved"):
        return (p - 1) / (v * m)
    if name not in SPLIT_BACKWARD:
        raise ScheduleError(f"{name}: there is no formula; the schedules are {', '.join(NAMES)}")
    if name == "zb-v":
        bubble_time = (p - 1) * cost.input
    else:
        bubble_time = (p - 1) * (cost.forward + max(0, cost.input - cost.weight))
    return bubble_time / (v * m * (cost.forward + cost.input + cost.weight))


# How an action changes the number of (chunk, micro-batch) pairs in flight, and of those that wait
# for their W.
IN_FLIGHT = {"F": 1, "B": -1, "I": -1, "W": 0}
DEFERRED = {"F": 0, "B": 0, "I": 1, "W": -1}


def in_flight(schedule: Schedule) -> list[int]:
    """For each rank, the most (chunk, micro-batch) pairs at a time that have run F, but not yet B
    (or I). Their activations are held."""
    return [_peak(actions, IN_FLIGHT) for actions in schedule]


def deferred_weight_gradients(schedule: Schedule) -> list[int]:
    """For each rank, the most (chunk, micro-batch) pairs at a time that have run I, but not yet W.
    The inputs of their weight gradients are held."""
    return [_peak(actions, DEFERRED) for actions in schedule]


def _peak(actions: list[Action], change: dict[str, int]) -> int:
    """The largest sum of the changes so far."""
    return max(accumulate((change[action.op] for action in actions), initial=0))
