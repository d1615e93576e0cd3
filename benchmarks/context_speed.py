"""The part `speed` of context.py: steps of two ranks, each with its part of a sequence, beside one
rank; the time line of a step; and the cut of the ring in other repositories.
"""

import contextlib
import threading
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import context_parallel
from base import cpu
from base.groups import Groups
from benchmarks import report, style, time_line
from benchmarks.report import format_spread, median
from benchmarks.steps import Steps
from course import ranks

MESSAGES = ("keys and values", "gradients")
# --- cut in order: rank r has the r-th of N parts -------------------------------------------------


class InOrder(context_parallel.Blocks):
    """What meets what where rank r has part r: nothing of later ranks' keys."""

    def meeting(self, source: int, q: Tensor) -> context_parallel.Block:
        queries = visible = None
        if source > self.rank:
            # no query at all; no kernel takes so few
            queries = q.shape[2]
            visible = torch.ones(1, 1, 0, q.shape[2], dtype=torch.bool)
        rows = slice(queries, None)
        return context_parallel.Block(rows, slice(None), source == self.rank, visible, None, 1.0)


def own_part(s: int, rank: int, n: int, device=None) -> Tensor:
    """In the place of `own_positions`."""
    return torch.arange(rank * s // n, (rank + 1) * s // n, device=device)


def shard_in_order(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """In the place of context_parallel.shard."""
    return x.chunk(group.size(), dim)[group.rank()]


@contextlib.contextmanager
def cut_in_order():
    """While entered, sequences are cut in order, not in zigzag."""
    ring = mock.patch.multiple(context_parallel, Blocks=InOrder, own_positions=own_part)
    others = dict(own_positions=own_part, shard=shard_in_order)
    with ring, mock.patch.multiple(context_parallel, **others):
        yield


CUTTINGS = {"zigzag": contextlib.nullcontext, "in order": cut_in_order}
# --- speed ----------------------------------------------------------------------------------------


class Silent(context_parallel.Ring):
    """A ring without messages: a rank gets what it has. What is timed is the computation alone."""

    def start(self, x: Tensor) -> None:
        self.received = x.clone()

    def wait(self) -> Tensor:
        return self.received


class Measured(Steps):
    """Steps of one kind on this rank, or of one rank alone: their losses, and their processor
    seconds, in which no rank waits. context: in which they run."""

    def __init__(self, shape: dict, kind: str | None = None, context=contextlib.nullcontext):
        self.context = context
        self.losses = []
        self.processor = []
        groups, flags = None, {}
        n = dist.get_world_size()
        if kind and n > 1:
            groups = Groups(cp=dist.group.WORLD, replicas=dist.group.WORLD)
            flags = dict(cp=n, cp_kind=kind)
        with self.context():
            super().__init__(shape, groups, **flags)

    def step(self) -> None:
        start = time.process_time()
        with self.context():
            self.losses.append(super().step())
        self.processor.append(time.process_time() - start)


@contextlib.contextmanager
def silent():
    with mock.patch.object(context_parallel, "Ring", Silent), report.without_all_reduce():
        yield


def on_rank(rank: int, rounds: int, shape: dict) -> dict:
    """times: {kind: seconds}, round by round; processor: {kind: seconds of a step}; losses: {kind:
    of the first step, this rank's part}; events: {cutting: time line of a step}"""
    cpu.set_up()
    one = Measured(shape)
    steps = {
        "ring": Measured(shape, "ring"),
        "all-to-all": Measured(shape, "all-to-all"),
        "in order": Measured(shape, "ring", cut_in_order),
        "silent": Measured(shape, "ring", silent),
        # each rank its own sequence: what the machine has to give
        "apart": one,
    }
    kinds = {"one": one.alone} | {name: measured.together for name, measured in steps.items()}
    times = report.in_turn(kinds, rounds)
    events = {"zigzag": recorded(steps["ring"]), "in order": recorded(steps["in order"])}
    return {
        "times": times,
        "processor": {name: median(measured.processor) for name, measured in steps.items()},
        "losses": {name: measured.losses[0] for name, measured in steps.items()},
        "events": events,
    }


# --- the time line of a step: (what, start, end), in seconds


class TimedRing(context_parallel.Ring):
    """Notes when messages are on their way. A thread waits for each, for gloo does not tell when
    one arrives."""

    events: list

    def start(self, x: Tensor) -> None:
        what = "gradients" if self.tag else "keys and values"
        begin = time.perf_counter()
        super().start(x)
        works, self.works = self.works, []
        finish = time_line.noted(self.events, what, lambda: [work.wait() for work in works], begin)
        self.waiter = threading.Thread(target=finish)
        self.waiter.start()

    def wait(self) -> Tensor:
        self.waiter.join()
        return super().wait()


def recorded(measured: Measured) -> list[tuple[str, float, float]]:
    """The events of one step, by this machine's clock: when blocks compute, and when messages are
    on their way."""
    events = TimedRing.events = []
    noting = {
        "attend": time_line.noted(events, "forward", context_parallel.attend),
        "through": time_line.noted(events, "backward", context_parallel.through),
        "Ring": TimedRing,
    }
    with mock.patch.multiple(context_parallel, **noting):
        dist.barrier()
        measured.step()
    return sorted(events, key=lambda event: event[1])


def speed_part(shape: dict, rounds: int) -> dict:
    measured = ranks.run(on_rank, 2, rounds, shape, timeout=600, limit=7200)
    times = measured[0]["times"]
    results = {"shape": shape, "tokens_per_second": {}, "share_of_twice": {}, "loss_difference": {}}
    for kind in times[0]:
        sequences = 2 if kind == "apart" else 1
        tokens = sequences * shape["seq_length"]
        results["tokens_per_second"][kind] = tokens / median([t[kind] for t in times])
        if kind != "one":
            results["share_of_twice"][kind] = report.ratio(times, "one", kind, sequences / 2)
    one_loss = measured[0]["losses"]["apart"]
    for kind in ("ring", "all-to-all", "in order"):
        loss = sum(m["losses"][kind] for m in measured)
        results["loss_difference"][kind] = abs(loss - one_loss) / one_loss
    # of the rank that has most; "apart" is a whole sequence
    busiest = {k: max(m["processor"][k] for m in measured) for k in measured[0]["processor"]}
    results["processor_seconds"] = busiest
    results["ring_over_in_order"] = report.ratio(times, "in order", "ring")
    results["time_line"] = {}
    for cutting in CUTTINGS:
        by_rank = [m["events"][cutting] for m in measured]
        begin = min(start for events in by_rank for _, start, _ in events)
        by_rank = [[(w, x - begin, y - begin) for w, x, y in events] for events in by_rank]
        results["time_line"][cutting] = by_rank
    zigzag = results["time_line"]["zigzag"]
    results["hidden"] = {w: [time_line.hidden(x, w) for x in zigzag] for w in MESSAGES}
    for kind, share in results["share_of_twice"].items():
        print(f"{kind:<11} {format_spread(share)} of twice one rank's tokens/s")
    last = "ring_over_in_order", "processor_seconds", "loss_difference", "hidden"
    report.print_results({name: results[name] for name in last})
    return results


# --- drawn ----------------------------------------------------------------------------------------

COLOURS = {"zigzag": style.SERIES[0], "in order": style.SERIES[1]}
NAMES = {
    "ring": "ring, zigzag",
    "all-to-all": "all-to-all",
    "in order": "ring, cut in order",
    "silent": "ring without messages",
    "apart": "two ranks apart",
}


def draw_speed(axes, shares: dict) -> None:
    for y, kind in enumerate(NAMES):
        colour = COLOURS["in order" if kind == "in order" else "zigzag"]
        style.ranges(axes, [y], [shares[kind]], colour if y < 3 else style.COLOURS["one device"])
        middle = shares[kind]["median"]
        style.label(axes, f"{middle:.2f}", (middle, y), offset=(-9, 9))
    style.rows_of(axes, list(NAMES.values()))
    axes.axvline(0.85, color="black", linestyle="--", linewidth=1, zorder=0.5)
    axes.set(title="Speed of two ranks", xlabel="share of twice one rank's")


def bounds(by_rank: list, direction: str) -> tuple[float, float]:
    """(begin, end) of the second layer's attention in this direction, on the two ranks."""
    # two blocks of each layer
    blocks = [[event for event in events if event[0] == direction][2:4] for events in by_rank]
    return min(first[1] for first, _ in blocks), max(last[2] for _, last in blocks)


def draw_time_line(axes, by_rank: list, direction: str, seconds: float) -> None:
    """Of one layer's attention, on two ranks: blocks above, messages below. seconds: shown"""
    begin, _ = bounds(by_rank, direction)
    end = begin + seconds
    margin = 0.12 * seconds
    for rank, events in enumerate(by_rank):
        for what, start, last in events:
            if last >= begin - margin and start <= end + margin:
                row, height = (2 * rank + 1, 0.5) if what in MESSAGES else (2 * rank, 0.8)
                left, right = 1e3 * (start - begin), 1e3 * (last - begin)
                time_line.draw_event(axes, row, what, left, right, height)
    axes.set_xlim(-1e3 * margin, 1e3 * (end - begin + margin))
    rows = [f"rank {rank}\n{what}" for rank in range(2) for what in ("blocks", "messages")]
    style.rows_of(axes, rows)


def draw_time_lines(cuttings: dict, path: Path) -> None:
    figure, panels = style.figure(3.6, 2, 2, sharex="col", sharey=True)
    for row, (cutting, by_rank) in zip(panels, cuttings.items()):
        for axes, direction in zip(row, ("forward", "backward")):
            both = [bounds(x, direction) for x in cuttings.values()]
            draw_time_line(axes, by_rank, direction, max(end - begin for begin, end in both))
            axes.set_title(f"{cutting}: {direction} of one layer's attention")
    for axes in panels[-1]:
        axes.set_xlabel("ms")
    figure.suptitle(
        "Measured, two ranks. Messages, from the call to the end: keys and values dark, their"
        " gradients light"
    )
    style.save(figure, path)
