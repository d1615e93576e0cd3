"""Draw a picture of each technique: what each rank holds, and what is sent when.

    python -m benchmarks.pictures                 docs/figures/ranks_tensor.svg and seven more

Shapes are in the papers' letters (docs/course.md), and weights are written as in y = x W. A picture
is a list of boxes, arrows and notes, made from pictures.toml. Its lanes are ranks; a
black bar across them is a collective. Forward goes from left to right, backward to the left.
"""

import re
import textwrap
import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import schedules
from benchmarks import style

HERE = Path(__file__).parent
DATA = tomllib.loads((HERE / "pictures.toml").read_text(encoding="utf-8"))


WIDTH, HEIGHT = 100, 56
# Points.
SMALL, TITLE = 9, 14
# Between two lines of text.
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
    # A hatch ends where text begins.
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
    # No line ends inside a shape.
    foot = re.sub(r"\[[^]]*]", lambda shape: shape[0].replace(" ", "\xa0"), texts["foot"])
    lines = textwrap.wrap(foot, 120, break_on_hyphens=False)
    y = HEIGHT - 3.4 - LINE * len(lines)
    head = [Note(2, 1, texts["title"], TITLE, bold=True), Note(2, 4.6, texts["subtitle"])]
    for item in [*head, *items, Note(2, y, "\n".join(lines)), *legend(items)]:
        DRAW[type(item)](axes, item)
    style.save(figure, path)


def lanes(count: int, top: float, height: float, gap: float = 1) -> tuple[list, list]:
    """(the y of each lane, the lanes with the names of the ranks)"""
    places = [top + i * (height + gap) for i in range(count)]
    names = [Note(2.5, y + 0.6, f"rank {i}", 10, bold=True) for i, y in enumerate(places)]
    return places, [*[Box(1.5, y, 97, height, "rank") for y in places], *names]


def heads(y: float, texts: dict[float, str]) -> list:
    return [Note(x, y, text, bold=True) for x, text in texts.items()]


def sent(x: float, y: float, forward: str, backward: str) -> list:
    there = Note(x, y, f"forward →  {forward}", colour=FORWARD)
    return [there, Note(x, y + 2.2, f"backward ←  {backward}", colour=BACKWARD)]


def collectives(bars: list, top: float, bottom: float) -> list:
    """Bars across the lanes, and under each what it does in forward and in backward."""
    items = []
    for x, name, note_x, *what in bars:
        letter = name if len(name) == 1 else ""
        items.append(Box(x, top, 2.6, bottom - top, "collective", letter))
        items.append(Note(note_x, bottom + 0.5, name, 10, bold=True))
        items += sent(note_x, bottom + 2.8, *what)
    return items


def flow(y: float, *stops: float) -> list:
    """Arrows from left to right: from the first to the second of two places, and so on."""
    return [Line((x, y), (end, y)) for x, end in zip(stops[::2], stops[1::2])]


def two_ranks(data: dict) -> list:
    """Two lanes with the same boxes and lines."""
    places, items = lanes(2, 7.5, data["height"])
    for i, top in enumerate(places):
        parts = {"columns": (i / 2, 0, (i + 1) / 2, 1), "rows": (0, i / 2, 1, (i + 1) / 2)}
        for x, y, *size, kind, text, shape, cut in data["boxes"]:
            text = text.replace("_", "₀₁"[i])
            items.append(Box(x, top + y, *size, kind, text, shape, parts.get(cut, WHOLE)))
        for y, *stops in data["flow"]:
            items += flow(top + y, *stops)
        for x, y, end_x, end_y in data.get("lines", []):
            items.append(Line((x, top + y), (end_x, top + end_y)))
    return items + collectives(data["bars"], 7.5, places[1] + data["height"])


def context(data: dict) -> list:
    """Whose keys and values each rank has, step by step."""
    n = 4
    places, items = lanes(n, 10.3, 6.8, 0.6)
    steps = [40 + 15.5 * step for step in range(n)]
    items += heads(7.6, {10: "tokens: 2 of 2N pieces", 31: "holds"})
    items += heads(7.6, {x: f"step {step}" for step, x in enumerate(steps)})
    for rank, y in enumerate(places):
        for piece in range(2 * n):
            kind = "activations" if piece in (rank, 2 * n - 1 - rank) else "elsewhere"
            items.append(Box(10 + 2.4 * piece, y + 2, 2.4, 3, kind, str(piece)))
        items += [Box(31, y + 1.2, 5, 4.4, "activations", "q"), *flow(y + 3.4, 36, 40)]
        for step, x in enumerate(steps):
            owner = (rank - step) % n
            items.append(Box(x, y + 1.2, 9, 4.4, "activations", f"k, v\nof rank {owner}"))
            if step < n - 1:
                receiver = steps[step + 1], places[(rank + 1) % n] + 3.4
                items.append(Line((x + 9, y + 3.4), receiver, "sent"))
    return items + sent(2, 40.2, *data["sent"])


def pipeline(data: dict) -> list:
    """The stages, and a simulated time line with its messages."""
    p, m = 3, 4
    places, items = lanes(p, 10, 7.3, 2.2)
    left, unit = 28, 3.85
    items += heads(7.3, {9: "holds", left: "time →"})
    items += [Box(9, y + 1, 15, 5.5, "weights", held) for held, y in zip(data["stages"], places)]
    for y, below in pairwise(places):
        items += [Line((14, y + 6.5), (14, below + 1), "sent")]
        items += [Line((19, below + 1), (19, y + 6.5), "back")]
    for e in schedules.simulate(schedules.make("1f1b", p, m), schedules.Cost()):
        x, y, end = left + unit * e.start, places[e.rank], left + unit * e.end
        kind, step, line = {"F": ("forward", 1, "sent"), "B": ("backward", -1, "back")}[e.op]
        items.append(Box(x, y + 1, end - x, 5.5, kind, f"{e.op}{e.micro_batch}"))
        if 0 <= e.rank + step < p:
            leaves, arrives = (6.5, 1) if e.op == "F" else (1, 6.5)
            receiver = end + 0.4, places[e.rank + step] + arrives
            items.append(Line((end - 0.8, y + leaves), receiver, line))
    return items + sent(2, 37.8, *data["sent"])


def zero(data: dict) -> list:
    """A column for each stage of ZeRO."""
    n = 4
    places, items = lanes(n, 10.2, 5.6, 0.6)
    items += heads(35.3, {2: "bytes"}) + heads(37.6, {2: "sends"}) + heads(46.2, {2: "numbers"})
    for stage, (size, what, numbers) in enumerate(data["stages"]):
        x = 10.5 + 22.2 * stage
        items += heads(7.5, {x: f"stage {stage}"})
        items += [Note(x, 35.3, size), Note(x, 37.6, what), Note(x, 46.2, numbers)]
        for rank, y in enumerate(places):
            part = (rank / n, 0, (rank + 1) / n, 1)
            kinds = {"weights": "2Ψ", "gradients": "4Ψ", "optimizer": "12Ψ"}
            for i, (kind, text) in enumerate(kinds.items()):
                # Stage 1 cuts the last of the three, stage 2 the last two.
                held = (text, "", WHOLE) if i + stage < 3 else ("", "", part)
                items.append(Box(x + 6.8 * i, y + 0.7, 6.3, 4.2, kind, *held))
    return items


def experts(data: dict) -> list:
    """Where each token is, from column to column."""
    places, items = lanes(2, 9.8, 14.2)
    items += heads(7.3, {9: "routed", 24: "sorted", 46: "at the experts", 71: "results"})
    items += heads(7.3, {89: "home"})
    tokens = data["tokens"]
    chosen = tokens[0] | tokens[1]
    # The middle of each token's row, in each column.
    at = {}

    def column(rank: int, x: float, names, text: str) -> None:
        for i, token in enumerate(names):
            y = places[rank] + 0.9 + 3.2 * i
            kind = "own" if token in tokens[0] else "other"
            label = text.format(token=token, expert=f"E{chosen[token]}")
            items.append(Box(x, y, 8, 2.7, kind, label))
            at[token, x] = y + 1.35

    for rank in range(2):
        column(rank, 9, tokens[rank], "{token} → {expert}")
        column(rank, 24, sorted(tokens[rank], key=chosen.get), "{token}")
        arrived = sorted((t for t in chosen if chosen[t] // 2 == rank), key=chosen.get)
        column(rank, 46, arrived, "{token}")
        column(rank, 69.5, arrived, "{expert}({token})")
        column(rank, 89, tokens[rank], "p {expert}({token})")
        for expert in (2 * rank, 2 * rank + 1):
            ys = [at[t, 46] for t in arrived if chosen[t] == expert]
            height = ys[-1] - ys[0] + 2.7
            items.append(Box(57.8, ys[0] - 1.35, 8, height, "weights", f"E{expert}"))
    items += collectives(data["bars"], 9.8, 39.2)
    for t in chosen:
        items += flow(at[t, 46], 54, 57.8, 65.8, 69.5)
        for start, end, kind in ((9, 24, "flow"), (24, 46, "sent"), (69.5, 89, "sent")):
            items.append(Line((start + 8, at[t, start]), (end, at[t, end]), kind))
    return items


def recompute(data: dict) -> list:
    """A row for each granularity: what is kept of a layer."""
    items = []
    for row, (name, size, freed, again) in enumerate(data["rows"]):
        y = 7.6 + 13.1 * row
        items += [Box(1.5, y, 97, 12.5, "rank"), Note(3, y + 0.5, name, 10, bold=True)]
        items.append(Note(15, y + 0.6, size))
        x, places = 3, []
        for i, (text, caption, width) in enumerate(data["kept"]):
            kind = "freed" if i in freed else "activations"
            items.append(Box(x, y + 3.3, width, 4.4, kind, text, caption))
            places.append((x, x + width))
            x += width + 1.6
        if again:
            start, end = places[again[0]][0], places[again[1]][1]
            items.append(Line((start, y + 11), (end, y + 11), "again"))
    return items


# Pictures of two ranks are data alone.
PICTURES = dict.fromkeys(DATA, two_ranks) | {
    "context": context,
    "pipeline": pipeline,
    "zero": zero,
    "experts": experts,
    "recompute": recompute,
}


def draw_all(folder: Path = HERE.parent / "docs" / "figures") -> None:
    for name, picture in PICTURES.items():
        draw(DATA[name], picture(DATA[name]), folder / f"ranks_{name}.svg")


if __name__ == "__main__":
    draw_all()
