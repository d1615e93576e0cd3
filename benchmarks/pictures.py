"""Draw a picture of each technique: what each rank holds, and what is sent when.

    python -m benchmarks.pictures                 docs/figures/ranks_tensor.svg and seven more

Shapes are in the papers' letters (docs/course.md), and weights are written as in y = x W. A picture
is a list of boxes, arrows and notes (shapes.py), made from pictures.toml. Its lanes are ranks; a
black bar across them is a collective. Forward goes from left to right, backward to the left.
"""

import tomllib
from itertools import pairwise
from pathlib import Path

import schedules
from benchmarks.shapes import BACKWARD, FORWARD, WHOLE, Box, Line, Note, draw

HERE = Path(__file__).parent
DATA = tomllib.loads((HERE / "pictures.toml").read_text(encoding="utf-8"))


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
                # stage 1 cuts the last of the three, stage 2 the last two
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
    # the middle of each token's row, in each column
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


# those of two ranks are data alone
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
