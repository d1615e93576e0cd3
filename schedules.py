"""Pipeline schedules as data: a list of actions for each rank, and everything else reads the list.

    gpipe           all forwards, then all backwards (arXiv 1811.06965)
    1f1b            after a warmup, one forward, one backward (PipeDream-Flush; arXiv 2104.04473, section 2.2.1)
    interleaved     1F1B with v chunks of layers on each rank, so that the pipeline fills in v times smaller steps (section 2.2.2)
    zb-h1           1F1B with backward cut in two: input gradients at once, weight gradients when there is room (arXiv 2401.10241)

    rank 0    F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4    B5    B6    B7            1F1B, p = 4, m = 8
    rank 1       F0 F1 F2    B0 F3 B1 F4 ...
    rank 2          F0 F1 B0 F2 B1 F3 ...
    rank 3             F0 B0 F1 B1 F2 B2 ...

An action is (op, chunk, micro_batch). op: F forward; B backward; or, for zero-bubble schedules, I
for the input gradient and W for the weight gradient. A list holds compute alone, in order, without
idle slots: time is what `simulate` makes of it. Stage k of the model, k = chunk p + rank, is a
chunk of layers; stage k's F needs stage k - 1's, its B needs stage k + 1's.

What has to be sent follows from the lists: `lower` derives it, and `deadlock` shows, without a GPU,
that in a model of NCCL it gets through: each (sender, receiver, kind) is a communicator that exists
beforehand, a queue whose head blocks until the peer has posted the match.

    python schedules.py        the schedules as time lines, bubbles by simulation and by formula

In Megatron-LM a schedule is control flow with the communication between the lines; other schedules
(ZB-V, DualPipe) are other lists."""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    # F, B, or I and W
    op: str
    # which of this rank's chunks
    chunk: int
    micro_batch: int

    def __str__(self):
        return f"{self.op} of chunk {self.chunk}, micro-batch {self.micro_batch}"


# of each rank
Schedule = list[list[Action]]


class ScheduleError(ValueError):
    """A list that breaks a rule: which rank, which position, which rule."""


# --------------------------------------------------------------------------------------------------
# p ranks, m micro-batches, v chunks on each rank.


def gpipe(p: int, m: int) -> Schedule:
    return [[Action(op, 0, k) for op in "FB" for k in range(m)] for _ in range(p)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """At most p - rank micro-batches are in flight."""
    return [
        _alternate(
            [Action("F", 0, k) for k in range(m)],
            [Action("B", 0, k) for k in range(m)],
            p - 1 - rank,
        )
        for rank in range(p)
    ]


def interleaved_one_f_one_b(p: int, m: int, v: int) -> Schedule:
    """Micro-batches go through chunk 0 in groups of p, then through chunk 1, ..; backward from the
    last chunk to the first. Raises ScheduleError where p does not divide m."""
    if m % p:
        raise ScheduleError(
            f"interleaving needs micro-batches in groups of p: {m} must be divisible by {p}"
        )
    forward = [
        Action("F", chunk, first + k)
        for first in range(0, m, p)
        for chunk in range(v)
        for k in range(p)
    ]
    backward = [Action("B", v - 1 - a.chunk, a.micro_batch) for a in forward]
    return [
        _alternate(forward, backward, 2 * (p - 1 - rank) + (v - 1) * p if v > 1 else p - 1 - rank)
        for rank in range(p)
    ]


def zero_bubble_h1(p: int, m: int) -> Schedule:
    """1F1B's order with I in the place of B; rank r owes r weight gradients, so that it passes
    input gradients on sooner, and pays at the end."""
    schedule = []
    for rank in range(p):
        actions = []
        for a in one_f_one_b(p, m)[rank]:
            actions.append(a if a.op == "F" else a._replace(op="I"))
            if a.op == "B" and a.micro_batch >= rank:
                actions.append(Action("W", 0, a.micro_batch - rank))
        schedule.append(actions + [Action("W", 0, k) for k in range(max(0, m - rank), m)])
    return schedule


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then what is left of
    backward."""
    warmup = min(warmup, len(forward))
    steady = [a for pair in zip(forward[warmup:], backward) for a in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


NAMES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_one_f_one_b,
    "zb-h1": zero_bubble_h1,
}


def make(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """The schedule of that name, validated. Raises ScheduleError."""
    if name not in NAMES or p < 1 or m < 1 or v < 1:
        raise ScheduleError(
            f"{name}, p {p}, m {m}, v {v}: there are {', '.join(NAMES)}, and p, m and v are at"
            " least 1"
        )
    if name != "interleaved" and v > 1:
        raise ScheduleError(
            f"{name} has one chunk on each rank, not {v}: only interleaved has more"
        )
    schedule = interleaved_one_f_one_b(p, m, v) if name == "interleaved" else NAMES[name](p, m)
    validate(schedule, m, v)
    return schedule


# --------------------------------------------------------------------------------------------------


def needs(a: Action, rank: int, p: int, v: int) -> list[tuple[str, int, int]]:
    """What must have ended before an action can start, as (op, stage, micro_batch), op being F, B
    (or I) or W."""
    stage = a.chunk * p + rank
    if a.op == "F":
        return [("F", stage - 1, a.micro_batch)] if stage else []
    if a.op == "W":
        return [("B", stage, a.micro_batch)]
    return [("F", stage, a.micro_batch)] + (
        [("B", stage + 1, a.micro_batch)] if stage < p * v - 1 else []
    )


def ends(a: Action, rank: int, p: int) -> tuple[str, int, int]:
    """What an action provides, in the same terms."""
    return "B" if a.op == "I" else a.op, a.chunk * p + rank, a.micro_batch


def validate(schedule: Schedule, m: int, v: int = 1) -> None:
    """Each chunk sees each micro-batch forward once and backward once (B, or I then W), in an order
    that can run. Raises ScheduleError, naming rank, position and rule."""
    p = len(schedule)
    for rank, actions in enumerate(schedule):
        seen: dict[Action, int] = {}
        for position, a in enumerate(actions):
            where = f"rank {rank}, position {position}: {a}"
            if not isinstance(a, Action) or not all(type(n) is int for n in a[1:]):
                raise ScheduleError(f"{where}: is no Action(op, chunk, micro_batch)")
            if (
                a.op not in ("F", "B", "I", "W")
                or not 0 <= a.chunk < v
                or not 0 <= a.micro_batch < m
            ):
                raise ScheduleError(
                    f"{where}: there are the ops F, B, I, W, chunks 0 to {v - 1} and micro-batches"
                    f" 0 to {m - 1}"
                )
            if a in seen or (a.op in "BI" and a._replace(op="I" if a.op == "B" else "B") in seen):
                raise ScheduleError(f"{where}: comes twice")
            before = {"F": None, "W": "I"}.get(a.op, "F")
            if before and a._replace(op=before) not in seen:
                raise ScheduleError(f"{where}: comes before its {before}")
            seen[a] = position
        for chunk in range(v):
            for k in range(m):
                missing = [
                    op
                    for op in (("F", "I", "W") if Action("I", chunk, k) in seen else ("F", "B"))
                    if Action(op, chunk, k) not in seen
                ]
                if missing:
                    raise ScheduleError(
                        f"rank {rank}, position {len(actions)}: ends without"
                        f" {Action(missing[0], chunk, k)}"
                    )
    simulate(schedule, Cost(), v)


@dataclass(frozen=True)
class Cost:
    """Seconds of one action on one chunk, and of one transfer. B takes input + weight. A list has
    one number for each stage."""

    forward: float | list[float] = 1.0
    input: float | list[float] = 1.0
    weight: float | list[float] = 1.0
    transfer: float = 0.0

    def of(self, op: str, stage: int) -> float:
        f, i, w = (
            x[stage] if isinstance(x, list) else x for x in (self.forward, self.input, self.weight)
        )
        return {"F": f, "I": i, "W": w, "B": i + w}[op]


class Event(NamedTuple):
    rank: int
    op: str
    chunk: int
    micro_batch: int
    start: float
    end: float


def simulate(schedule: Schedule, cost: Cost, v: int | None = None) -> list[Event]:
    """Run the lists: each action starts when its rank is free and what it needs has arrived. Raises
    ScheduleError, naming what waits for what, if they cannot all run."""
    p = len(schedule)
    v = v or 1 + max(a.chunk for actions in schedule for a in actions)
    seconds = {(op, stage): cost.of(op, stage) for op in "FBIW" for stage in range(p * v)}
    ended = {}
    free = [0.0] * p
    position = [0] * p
    events = []
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions):
                a = actions[position[rank]]
                needed = needs(a, rank, p, v)
                if not all(n in ended for n in needed):
                    break
                start = max(
                    [free[rank]]
                    + [ended[n] + (cost.transfer if n[1] % p != rank else 0) for n in needed]
                )
                free[rank] = ended[ends(a, rank, p)] = start + seconds[a.op, a.chunk * p + rank]
                events.append(Event(rank, *a, start, free[rank]))
                position[rank] += 1
                progress = True
    for rank, actions in enumerate(schedule):
        if position[rank] < len(actions):
            a = actions[position[rank]]
            op, stage, k = next(n for n in needs(a, rank, p, v) if n not in ended)
            raise ScheduleError(
                f"rank {rank}, position {position[rank]}: {a}: waits for the {op} of micro-batch"
                f" {k} on rank {stage % p}, which itself waits: the order cannot run"
            )
    return sorted(events, key=lambda e: (e.start, e.rank))


def bubble(events: list[Event]) -> float:
    """Idle time as a fraction of the ideal, the work of the busiest rank (section 2.2: t_pb /
    t_id)."""
    work = defaultdict(float)
    for e in events:
        work[e.rank] += e.end - e.start
    return (max(e.end for e in events) - min(e.start for e in events)) / max(work.values()) - 1


def bubble_formula(name: str, p: int, m: int, v: int = 1, cost: Cost = Cost()) -> float:
    """(p - 1) / m for GPipe and 1F1B, (p - 1) / (v m) interleaved; ZB-H1: (p - 1)(T_F + T_I - T_W)
    of time, for m >= p and T_W <= T_F. Where T_W > T_I even that is out of reach: the last rank
    cannot start before (p - 1) T_F."""
    if name == "zb-h1":
        return (
            (p - 1)
            * (cost.forward + max(0, cost.input - cost.weight))
            / (m * (cost.forward + cost.input + cost.weight))
        )
    return (p - 1) / (v * m)


def in_flight(schedule: Schedule) -> list[int]:
    """For each rank, the most (chunk, micro-batch) pairs that have been through forward and not yet
    through B (or I)."""
    return [_most(actions, {"F": 1, "B": -1, "I": -1, "W": 0}) for actions in schedule]


def owed(schedule: Schedule) -> list[int]:
    """For each rank, the most weight gradients (each a chunk's, for a micro-batch) that wait for
    their W, with what they are computed from."""
    return [_most(actions, {"F": 0, "B": 0, "I": 1, "W": -1}) for actions in schedule]


def _most(actions: list[Action], change: dict[str, int]) -> int:
    counts = [0]
    for a in actions:
        counts.append(counts[-1] + change[a.op])
    return max(counts)


# --------------------------------------------------------------------------------------------------


class Transfer(NamedTuple):
    """op: send; receive, to post it; or settle, to wait for a send that has certainly arrived, and
    let go of what was sent. kind: F for an activation, B for a gradient; stage: the one that it
    goes to."""

    op: str
    peer: int
    kind: str
    stage: int
    micro_batch: int


def source(a: Action, rank: int, p: int, v: int) -> tuple[int, str, int] | None:
    """(rank, kind, own stage) that an action's input comes from, None where it comes from nowhere
    or from this rank."""
    stage = a.chunk * p + rank
    kind = "B" if a.op == "I" else a.op
    other = {"F": stage - 1, "B": stage + 1}.get(kind, -1)
    return (other % p, kind, stage) if 0 <= other < p * v and other % p != rank else None


def lower(schedule: Schedule, v: int = 1, ahead: int = 2) -> list[list[Action | Transfer]]:
    """The lists with their communication. A send follows the action that makes its content. A
    receive is posted `ahead` actions before the one that needs it; receives from one peer and of
    one kind in the order in which that peer sends, as NCCL wants. What a peer sends tells how far
    it is: everything sent to it that its list needs before that point has arrived, and is
    settled."""
    p = len(schedule)
    # (sender, receiver, kind): {(stage, micro_batch): the sender's position}, in the order of
    # sending
    sent = defaultdict(dict)
    # (receiver, kind, stage, micro_batch): the receiver's position
    used = {}
    for rank, actions in enumerate(schedule):
        for position, a in enumerate(actions):
            stage = a.chunk * p + rank
            kind = "B" if a.op == "I" else a.op
            to = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
            if 0 <= to < p * v and to % p != rank:
                sent[rank, to % p, kind][to, a.micro_batch] = position
            if source(a, rank, p, v):
                used[rank, kind, stage, a.micro_batch] = position
    in_order = {channel: list(sends) for channel, sends in sent.items()}
    programs = []
    index = {
        channel: {what: n for n, what in enumerate(sends)} for channel, sends in in_order.items()
    }
    for rank, actions in enumerate(schedule):
        program = []
        posted = defaultdict(int)
        unsettled = []
        leaves = {
            position: Transfer("send", to, kind, *what)
            for (sender, to, kind), sends in sent.items()
            if sender == rank
            for what, position in sends.items()
        }
        for i, a in enumerate(actions):
            for later in actions[i : i + ahead + 1]:
                if origin := source(later, rank, p, v):
                    channel = origin[0], rank, origin[1]
                    upto = index[channel][origin[2], later.micro_batch] + 1
                    program += [
                        Transfer("receive", *origin[:2], *what)
                        for what in in_order[channel][posted[channel] : upto]
                    ]
                    posted[channel] = max(posted[channel], upto)
            program.append(a)
            if origin := source(a, rank, p, v):
                peer_is_at = sent[origin[0], rank, origin[1]][origin[2], a.micro_batch]
                done = [
                    t
                    for t in unsettled
                    if t.peer == origin[0]
                    and used[t.peer, t.kind, t.stage, t.micro_batch] <= peer_is_at
                ]
                program += [t._replace(op="settle") for t in done]
                unsettled = [t for t in unsettled if t not in done]
            if i in leaves:
                program.append(leaves[i])
                unsettled.append(leaves[i])
        programs.append(program + [t._replace(op="settle") for t in unsettled])
    return programs


def deadlock(programs: list[list[Action | Transfer]], v: int = 1) -> str | None:
    """None if the programs run to their end in this model of NCCL: posting never waits (so every
    communicator has been set up before), each (sender, receiver, kind) is a communicator, a queue
    on either side, whose heads must match and complete together; an action waits for what it
    receives, a settle for what was sent. Otherwise, what is stuck. Not modelled: other traffic on
    the GPU, and hardware queues that are fewer than the communicators
    (CUDA_DEVICE_MAX_CONNECTIONS)."""
    p = len(programs)
    # (sender, receiver, kind, side): [(stage, micro_batch)]
    queues = defaultdict(deque)
    arrived = set()
    position = [0] * p
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                x = program[position[rank]]
                if isinstance(x, Transfer) and x.op == "settle":
                    if (x.kind, x.stage, x.micro_batch) not in arrived:
                        break
                elif isinstance(x, Transfer):
                    channel = (rank, x.peer, x.kind) if x.op == "send" else (x.peer, rank, x.kind)
                    queues[*channel, x.op].append((x.stage, x.micro_batch))
                    sends = queues[*channel, "send"]
                    receives = queues[*channel, "receive"]
                    while sends and receives:
                        if sends[0] != receives[0]:
                            return (
                                f"rank {channel[0]} sends {sends[0]} where rank {channel[1]}"
                                f" receives {receives[0]} (stage, micro-batch)"
                            )
                        arrived.add((channel[2], *sends.popleft()))
                        receives.popleft()
                else:
                    origin = source(x, rank, p, v)
                    if origin and (*origin[1:], x.micro_batch) not in arrived:
                        break
                position[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} at {program[position[rank]]}"
        for rank, program in enumerate(programs)
        if position[rank] < len(program)
    ]
    left = [f"{side} {channel}" for (*channel, side), queue in queues.items() if queue]
    return "; ".join(stuck + left) or None


# --------------------------------------------------------------------------------------------------


def draw(axes, events: list[Event], title: str) -> None:
    """One row per rank, a box per action with its micro-batch number; later chunks darker.
    Simulated and measured events alike."""
    import matplotlib.colors

    ranks = 1 + max(e.rank for e in events)
    chunks = 1 + max(e.chunk for e in events)
    first = min(e.start for e in events)
    last = max(e.end for e in events)
    colours = {"F": "#7aa6d8", "B": "#8fc98b", "I": "#8fc98b", "W": "#e3c36b"}
    for e in events:
        shade = matplotlib.colors.to_rgb(colours[e.op])
        shade = (
            [c * (1 - 0.45 * e.chunk / max(1, chunks - 1)) for c in shade] if chunks > 1 else shade
        )
        axes.barh(
            -e.rank,
            e.end - e.start,
            left=e.start - first,
            height=0.94,
            color=shade,
            edgecolor="black",
            linewidth=0.4,
        )
        if (e.end - e.start) > 0.012 * (last - first):
            axes.text(
                (e.start + e.end) / 2 - first,
                -e.rank,
                e.micro_batch,
                ha="center",
                va="center",
                fontsize=6,
            )
    axes.set_yticks([-r for r in range(ranks)], [f"rank {r}" for r in range(ranks)])
    axes.set(
        title=f"{title}: bubble {100 * bubble(events):.0f}% of the ideal time",
        xlim=(0, last - first),
        facecolor="#eeeeee",
    )


def plot(panels: dict[str, list[Event]], path) -> None:
    """panels: title -> events; one under the other, on one scale of time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(
        len(panels),
        1,
        figsize=(
            12,
            0.5 + sum(0.6 + 0.32 * (1 + max(e.rank for e in ev)) for ev in panels.values()),
        ),
        layout="constrained",
        squeeze=False,
    )
    longest = max(max(e.end for e in ev) - min(e.start for e in ev) for ev in panels.values())
    for axes, (title, events) in zip(rows[:, 0], panels.items()):
        draw(axes, events, title)
        axes.set_xlim(0, longest)
    rows[-1, 0].set_xlabel("seconds")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def text(events: list[Event], unit: float = 1.0) -> str:
    """The same in letters, lower case for later chunks: idle time as dots."""
    lines = []
    for rank in range(1 + max(e.rank for e in events)):
        line = ""
        for e in (e for e in events if e.rank == rank):
            line = line.ljust(
                round(e.start / unit) * 2, "."
            ) + f"{e.op.lower() if e.chunk else e.op}{e.micro_batch}"[:2].ljust(
                round((e.end - e.start) / unit) * 2, "-"
            )
        lines.append(f"  rank {rank}  {line}")
    return "\n".join(lines)


def main():
    p = 4
    m = 8
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        schedule = make(name, p, m, v)
        cost = Cost(1 / v, 1 / v, 1 / v)
        events = simulate(schedule, cost)
        print(
            f"{name}: p {p}, m {m}, v {v}: bubble {bubble(events):.4f} of the ideal time, by"
            f" formula {bubble_formula(name, p, m, v, cost):.4f}; in flight"
            f" {in_flight(schedule)}{f', weight gradients owed {owed(schedule)}' if name == 'zb-h1' else ''};"
            f" stuck on NCCL: {deadlock(lower(schedule, v), v)}"
        )
        print(text(events, 1 / v))


if __name__ == "__main__":
    main()
