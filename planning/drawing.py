"""Time lines of pipeline schedules, simulated or measured: a row for a rank, a box for an action.

python -m course.schedules        a lesson with time lines
"""

from schedules import Event

# One colour for both types of backward; all three differ for readers who are colour-blind.
COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#e69f00", "W": "#f0e442"}
IDLE = "#eeeeee"
MEANINGS = {
    "F": "F: forward",
    "B": "B: backward",
    "I": "I: input gradient",
    "W": "W: weight gradient",
}


def text_on(rgb: tuple[float, float, float]) -> str:
    """The colour of text that can be read on a colour: by its luminance (WCAG 2)."""
    red, green, blue = (c**2.2 for c in rgb)
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "white"


def draw(axes, events: list[Event], title: str) -> None:
    """One row per rank, a box per action with its micro-batch number, later chunks darker.
    Simulated and measured events alike."""
    import matplotlib.colors

    num_ranks = 1 + max(e.rank for e in events)
    last_chunk = max(e.chunk for e in events)
    first = min(e.start for e in events)
    last = max(e.end for e in events)
    for e in events:
        duration = e.end - e.start
        brightness = 1 - 0.45 * e.chunk / max(1, last_chunk)
        rgb = [c * brightness for c in matplotlib.colors.to_rgb(COLOURS[e.op])]
        middle = (e.start + e.end) / 2 - first
        style = dict(height=0.94, color=rgb, edgecolor="black", linewidth=0.4)
        axes.barh(-e.rank, duration, left=e.start - first, **style)
        # a number only where the box has room for it
        if duration > 0.012 * (last - first):
            style = dict(ha="center", va="center", fontsize=8, color=text_on(rgb))
            axes.text(middle, -e.rank, e.micro_batch, **style)
    axes.set_yticks([-rank for rank in range(num_ranks)], [f"rank {r}" for r in range(num_ranks)])
    axes.set_title(title, loc="left", fontsize=9)
    axes.set(xlim=(0, last - first), facecolor=IDLE)
    axes.grid(visible=False)


def plot(panels: dict[str, list[Event]], path, unit: str = "seconds") -> None:
    """Write a figure with one panel for each title, one under the other, on one scale of time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = 0.8
    longest = 0.0
    for events in panels.values():
        height += 0.5 + 0.3 * (1 + max(e.rank for e in events))
        longest = max(longest, max(e.end for e in events) - min(e.start for e in events))
    figure, rows = plt.subplots(
        len(panels), 1, figsize=(8.5, height), layout="constrained", squeeze=False, sharex=True
    )
    for axes, (title, events) in zip(rows[:, 0], panels.items()):
        draw(axes, events, title)
        axes.set_xlim(0, longest)
    rows[-1, 0].set_xlabel(unit)
    ops = {e.op for events in panels.values() for e in events}
    boxes = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[op]) for op in "FBIW" if op in ops]
    boxes.append(plt.Rectangle((0, 0), 1, 1, color=IDLE))
    names = [MEANINGS[op] for op in "FBIW" if op in ops] + ["idle"]
    figure.legend(
        boxes,
        names,
        loc="outside lower center",
        ncols=len(boxes),
        fontsize=8,
        title="numbers: micro-batches; darker: a later chunk of the rank",
        title_fontsize=8,
        frameon=False,
    )
    # Without a date: what is drawn again is the same file.
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def text(events: list[Event], unit: float = 1.0) -> str:
    """Time lines in letters, two for each `unit` of seconds. F0 is forward of micro-batch 0 (of a
    number with two digits only the first is shown). Lower case: a later chunk. Dashes: the rest of
    a long action. Dots: idle time."""
    lines = []
    for rank in range(1 + max(e.rank for e in events)):
        line = ""
        for e in events:
            if e.rank == rank:
                op = e.op.lower() if e.chunk else e.op
                # Both rounded, so that what follows without a pause is drawn without one.
                start, end = round(e.start / unit), round(e.end / unit)
                letters = f"{op}{e.micro_batch}"[:2].ljust(2 * (end - start), "-")
                line = line.ljust(2 * start, ".") + letters
        lines.append(f"  rank {rank}  {line}")
    return "\n".join(lines)
