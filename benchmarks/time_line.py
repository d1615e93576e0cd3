"""The time line of a step on one rank, measured: events (what, .., start, end), in seconds."""

import time

COMPUTING = "forward", "backward"


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
