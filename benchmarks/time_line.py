"""The time line of a step on one rank, measured: events (what, .., start, end), in seconds."""

import time

from benchmarks import style

COMPUTING = "forward", "backward"
COLOURS = {
    "forward": style.COLOURS["F"],
    "backward": style.COLOURS["B"],
    # All-gathers carry weights, the ring keys and values.
    "all-gather": style.COLOURS["weights"],
    "keys and values": style.COLOURS["weights"],
    "reduce-scatter": style.COLOURS["gradients"],
    "gradients": style.COLOURS["gradients"],
}


def noted(events: list, what: str, function, begin: float | None = None):
    """The function, which notes when each call began and ended. begin: if it began before."""

    def call(*args, **options):
        start = begin or time.perf_counter()
        result = function(*args, **options)
        events.append((what, start, time.perf_counter()))
        return result

    return call


def hidden(events: list, what: str) -> float:
    """The share of the time of one kind of messages that passed while a layer computed."""
    computing = [event[-2:] for event in events if event[0] in COMPUTING]
    messages = [event[-2:] for event in events if event[0] == what]
    overlap = sum(
        max(0, min(last, end) - max(first, start))
        for first, last in messages
        for start, end in computing
    )
    return overlap / sum(last - first for first, last in messages)


def draw_event(axes, y: int, what: str, start: float, end: float, height: float = 0.8) -> None:
    """A box. start, end: ms."""
    box = dict(height=height, color=COLOURS[what], edgecolor="white", linewidth=0.5)
    axes.barh(y, end - start, left=start, **box)
