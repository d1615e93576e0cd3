"""The stylesheet of all figures: one width, one colour for each concept, one way to write a file.

    figure, axes = style.figure(3)                       # 3 inches high; rows and columns as in
    axes.plot(x, y, color=style.COLOURS["tensor"])       # plt.subplots
    style.label_ends(axes)
    style.save(figure, path)

A page of this repository on GitHub shows a picture of 8.5 inches at its full size, so that a point
is a point: no text is smaller than 8 of them. Text stays text, which a reader can search, in a file
a third as large as with outlines. Where DejaVu Sans is missing, Verdana is as wide. The background
is white, also on a dark page.

A file depends on what is drawn and on the version of matplotlib, which it names; it has no date.
"""

import re
from pathlib import Path

from planning.drawing import COLOURS as ACTIONS
from planning.drawing import text_on

# Inches.
WIDTH = 8.5
# Points.
SMALL = 8

# Each can be told from the others of its group by readers who are colour-blind (Okabe and Ito's
# colours, and Tol's "muted"). Groups do not meet in one figure, but for actions and memory.
COLOURS = {
    # Memory.
    "weights": "#332288",
    "gradients": "#ddcc77",
    "optimizer state": "#44aa99",
    "activations": "#cc6677",
    # F, B, I, W.
    **ACTIONS,
    # Techniques.
    "one device": "#4d4d4d",
    "dense": "#4d4d4d",
    "data": "#0072b2",
    "tensor": "#e69f00",
    "pipeline": "#009e73",
    "tensor and pipeline": "#cc79a7",
    "experts": "#d55e00",
    "recompute": "#56b4e9",
    # Learning a task.
    "p-tuning": "#0072b2",
    "prompt-tuning": "#009e73",
    "fine-tuning": "#4d4d4d",
}
# For models and others that are compared in one figure alone.
SERIES = ("#0072b2", "#d55e00", "#009e73")

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "figure.titlesize": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    # It makes the names inside the file the same each time.
    "svg.hashsalt": "figures",
}


def pyplot():
    """matplotlib.pyplot in this style, drawing into files: it opens no window."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(RC)
    return plt


def figure(height: float, rows: int = 1, columns: int = 1, **options):
    """(figure, axes) of plt.subplots. height: inches."""
    size = (WIDTH, height)
    return pyplot().subplots(rows, columns, figsize=size, layout="constrained", **options)


def save(figure, path: Path) -> None:
    """Write the figure and forget it. Places in an SVG file have two digits behind the point: more
    would make the figure of silent bugs a fifth larger, and nobody sees them."""
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
    if Path(path).suffix == ".svg":
        text = Path(path).read_text(encoding="utf-8")
        text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
        text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
        places = r' (d|x|y)="[^"]*"|(translate|rotate)\([^)]*\)'
        text = re.sub(places, lambda found: shorter(found[0]), text)
        Path(path).write_text(text, encoding="utf-8")
    print(f"written: {path}", flush=True)


def shorter(numbers: str) -> str:
    """Text whose numbers have at most two digits behind the point."""
    return re.sub(r"(\.\d\d)\d+", r"\1", numbers)


def ink(colour: str) -> tuple[float, float, float]:
    """A colour dark enough for text on white, of the same hue."""
    import matplotlib.colors

    rgb = matplotlib.colors.to_rgb(colour)
    return tuple(0.6 * c for c in rgb) if text_on(rgb) == "black" else rgb


def label_ends(axes) -> None:
    """Write each line's label at its right end. Where two would meet, the upper one moves up. A
    line that leaves the axes has none."""
    # Places the axes, so that data can be turned into pixels.
    axes.figure.draw_without_rendering()
    ends = []
    for line in axes.get_lines():
        x, y = axes.transData.transform(line.get_xydata()[-1])
        if not line.get_label().startswith("_") and axes.bbox.contains(x, y):
            ends.append((72 / axes.figure.dpi * y, line))
    lowest = float("-inf")
    for end, line in sorted(ends, key=lambda pair: pair[0]):
        y = max(end, lowest)
        lowest = y + 1.2 * SMALL
        label(axes, line.get_label(), line.get_xydata()[-1], line.get_color(), (6, y - end))


def label(axes, text: str, xy, colour: str = "black", offset=(6, 0), **options) -> None:
    """Write text beside a point. offset: in points."""
    options = dict(textcoords="offset points", va="center", fontsize=SMALL) | options
    axes.annotate(text, xy, offset, color=ink(colour), annotation_clip=False, **options)


def inside(axes, text: str, xy, colour: str) -> None:
    """Write text in the middle of a box of this colour."""
    import matplotlib.colors

    options = dict(ha="center", va="center", fontsize=SMALL)
    axes.text(*xy, text, color=text_on(matplotlib.colors.to_rgb(colour)), **options)


def columns_of(spreads: list[dict]) -> list[list[float]]:
    """Medians, least and most of what `report.spread` returned."""
    return [[x[key] for x in spreads] for key in ("median", "min", "max")]


def ranges(axes, positions, spreads: list[dict], colour: str, **options) -> None:
    """Points at the medians, on horizontal lines from the least to the most. spreads: what
    `report.spread` returned."""
    medians, least, most = columns_of(spreads)
    axes.hlines(positions, least, most, color=colour, linewidth=1.5)
    options = dict(marker="o", linestyle="none", markersize=5) | options
    axes.plot(medians, positions, color=colour, **options)


def bar(axes, y: int, values: dict, text: str, **options) -> None:
    """A bar to the median, a line from the least to the most where they differ, and a text."""
    middle, least, most = (values[key] for key in ("median", "min", "max"))
    axes.barh(y, middle, **options)
    if least < most:
        errors = [[middle - least], [most - middle]]
        axes.errorbar(middle, y, xerr=errors, color="#333333", linewidth=1, capsize=2)
    label(axes, text, (most, y), offset=(4, 0))


def band(axes, x, spreads: list[dict], colour: str, name: str) -> None:
    """A line of medians, in a band from the least to the most."""
    medians, least, most = columns_of(spreads)
    axes.plot(x, medians, "o-", color=colour, label=name)
    axes.fill_between(x, least, most, color=colour, alpha=0.15, linewidth=0)


def stack(axes, y: int, parts: dict[str, float], colours: dict, **options) -> float:
    """A bar of parts, one after the other, with labels for a legend on the first row. Returns where
    it ends."""
    left = 0.0
    for part, value in parts.items():
        name = part if y == 0 else None
        options = dict(height=0.7) | options
        axes.barh(y, value, left=left, color=colours[part], label=name, **options)
        left += value
    return left


def ticks(axes, x=None, y=None, minor: bool = False) -> None:
    """Put these marks on one axis or both, which become logarithmic: {place: its name}, or places
    that are their own names. minor: whether small marks stand between them."""
    for name, places in (("x", x), ("y", y)):
        if places is not None:
            names = list(places.values() if isinstance(places, dict) else places)
            marks = {f"{name}scale": "log", f"{name}ticks": list(places)}
            axes.set(**marks, **{f"{name}ticklabels": names})
    if not minor:
        axes.minorticks_off()


def rows_of(axes, names, hidden: bool = False) -> None:
    """Name the rows 0, 1, ... of a chart, the first on top. hidden: another panel names them."""
    axes.set_yticks(range(len(names)), [""] * len(names) if hidden else names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
