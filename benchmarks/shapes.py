"""The visual language of the pictures: boxes, arrows and notes, given as data, and their drawing.

A picture is 100 units wide and 56 high, as a slide is; y grows downwards. The kind of a box says
what the thing is; the filled part of a dashed box is what this rank holds of the whole. Kinds
differ in grey too: by brightness, edge, hatch or corners.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from benchmarks import style

WIDTH, HEIGHT = 100, 56
# points
SMALL, TITLE = 9, 14
# between two lines of text
LINE = 2.1
WHOLE = (0, 0, 1, 1)
FORWARD, BACKWARD = "#0072b2", "#b34700"
DASHED = dict(edgecolor="#777777", linestyle=(0, (3, 2)))
ROUND = dict(edgecolor="#882255", rounded=True)
# kind: (its name in the legend, its fill, options)
KINDS = {
    "rank": ("", "#f3f3f3", dict(edgecolor="#bbbbbb")),
    "weights": ("weights, trained", style.COLOURS["weights"], {}),
    "frozen": ("weights, frozen", "#bdbdbd", dict(linewidth=1.5)),
    "gradients": ("gradients", style.COLOURS["gradients"], {}),
    "optimizer": ("optimizer state", style.COLOURS["optimizer state"], dict(hatch="///")),
    "activations": ("activations", "#eab8bf", ROUND),
    "terms": ("one term of a sum", "#fbeef0", dict(hatch="..", **ROUND)),
    "own": ("tokens of rank 0", "#eab8bf", ROUND),
    "other": ("tokens of rank 1", "white", dict(linewidth=1.5, rounded=True)),
    "forward": ("F: forward", style.COLOURS["F"], {}),
    "backward": ("B: backward", style.COLOURS["B"], {}),
    "collective": ("collective", "black", {}),
    "freed": ("freed after forward", "white", DASHED),
    "elsewhere": ("held by other ranks", "none", DASHED),
}
# kind: (its name in the legend, colour, line width, line style)
LINES = {
    "flow": ("", "#555555", 1.2, "-"),
    "sent": ("sent in forward", FORWARD, 2.2, "-"),
    "back": ("sent in backward", BACKWARD, 2.2, (0, (2, 1))),
    "again": ("computed again in backward", BACKWARD, 1.6, (0, (2, 1))),
}


@dataclass
class Box:
    """x, y: the upper left corner. part: what is filled, (left, top, right, bottom) from 0 to 1.
    caption: text under the box."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str = ""
    caption: str = ""
    part: tuple = WHOLE


@dataclass
class Line:
    """An arrow from one place to another."""

    start: tuple
    end: tuple
    kind: str = "flow"


@dataclass
class Note:
    """Lines of text. x, y: where the first begins, and its top."""

    x: float
    y: float
    text: str
    size: float = SMALL
    colour: str = "black"
    bold: bool = False


def draw_patch(axes, place: tuple, width: float, height: float, kind: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    _, fill, options = KINDS[kind]
    options = dict(facecolor=fill, edgecolor="black", linewidth=1, rounded=False) | options
    corners = "round,rounding_size=0.9" if options.pop("rounded") else "square"
    axes.add_patch(FancyBboxPatch(place, width, height, f"{corners},pad=0", **options))


def draw_box(axes, box: Box) -> None:
    if box.part != WHOLE:
        draw_patch(axes, (box.x, box.y), box.width, box.height, "elsewhere")
    left, top, right, bottom = box.part
    x, y = box.x + left * box.width, box.y + top * box.height
    width, height = (right - left) * box.width, (bottom - top) * box.height
    draw_patch(axes, (x, y), width, height, box.kind)
    _, fill, options = KINDS[box.kind]
    text = dict(ha="center", va="center", fontsize=SMALL, linespacing=1.25)
    # a hatch ends where text begins
    behind = dict(facecolor=fill, edgecolor="none", pad=0.6) if "hatch" in options else None
    colour = "black" if fill == "none" else style.contrast(fill)
    axes.text(x + width / 2, y + height / 2, box.text, color=colour, bbox=behind, **text)
    below = box.x + box.width / 2, box.y + box.height + 1.5
    axes.text(*below, box.caption, **text)


def draw_line(axes, line: Line) -> None:
    _, colour, width, dashes = LINES[line.kind]
    arrow = dict(arrowstyle="-|>", color=colour, linewidth=width, linestyle=dashes)
    arrow |= dict(shrinkA=0, shrinkB=0, mutation_scale=9 + 2 * width)
    axes.annotate("", line.end, line.start, arrowprops=arrow)


def draw_note(axes, note: Note) -> None:
    options = dict(fontsize=note.size, color=note.colour, weight="bold" if note.bold else "normal")
    for i, line in enumerate(note.text.split("\n")):
        axes.text(note.x, note.y + note.size / 6 + i * LINE, line, va="baseline", **options)


DRAW = {Box: draw_box, Line: draw_line, Note: draw_note}


def legend(items: list) -> list:
    """One row, at the foot, of the kinds that these items have."""
    used = {item.kind for item in items if not isinstance(item, Note)}
    if any(isinstance(item, Box) and item.part != WHOLE for item in items):
        used.add("elsewhere")
    found, x, y = [], 2, HEIGHT - 2.8
    for kind, (name, *_) in (KINDS | LINES).items():
        if kind in used and name:
            line = Line((x, y + 0.9), (x + 2.6, y + 0.9), kind)
            found += [line if kind in LINES else Box(x, y, 2.6, 1.7, kind), Note(x + 3.2, y, name)]
            x += 4.8 + 0.8 * len(name)
    return found


def draw(texts: dict[str, str], items: list, path: Path) -> None:
    """Write one picture. texts: title, subtitle, and foot, a paragraph above the legend."""
    figure = style.pyplot().figure(figsize=(style.WIDTH, style.WIDTH * HEIGHT / WIDTH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.set_axis_off()
    # no line ends inside a shape
    foot = re.sub(r"\[[^]]*]", lambda shape: shape[0].replace(" ", "\xa0"), texts["foot"])
    lines = textwrap.wrap(foot, 120, break_on_hyphens=False)
    y = HEIGHT - 3.4 - LINE * len(lines)
    head = [Note(2, 1, texts["title"], TITLE, bold=True), Note(2, 4.6, texts["subtitle"])]
    for item in [*head, *items, Note(2, y, "\n".join(lines)), *legend(items)]:
        DRAW[type(item)](axes, item)
    style.save(figure, path)
