"""Drawn pictures: a circle, a square, a triangle or a cross, with a caption, a label, and questions
about it. Each is made from its number alone: "a small red circle on white".
"""

from typing import NamedTuple

import numpy as np

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {"red": (230, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230)}
COLOURS["yellow"] = (240, 210, 40)
GROUNDS = {"black": (0, 0, 0), "white": (255, 255, 255)}
SIZES = {"small": 0.2, "large": 0.34}
# The question whose answer is the caption.
DESCRIBE = "describe the picture"


class Drawing(NamedTuple):
    """What a drawn picture shows. at: its centre; lengths are parts of the picture's side."""

    size: str
    colour: str
    shape: str
    ground: str
    at: tuple[float, float]

    @property
    def caption(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} on {self.ground}"

    @property
    def label(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def questions(self) -> dict[str, str]:
        """What may be asked about it, with the answers."""
        return {
            "what colour is it?": self.colour,
            "what shape is it?": self.shape,
            "how large is it?": self.size,
            "what is behind it?": self.ground,
            DESCRIBE: self.caption,
        }

    def draw(self, side: int) -> np.ndarray:
        """[side, side, 3] uint8. Each pixel is the mean of 4 x 4 points, so edges are smooth."""
        points = (np.arange(4 * side) + 0.5) / (4 * side)
        x, y = np.meshgrid(points - self.at[0], points - self.at[1])
        r = SIZES[self.size]
        inside = {
            "circle": x**2 + y**2 < r**2,
            "square": np.maximum(abs(x), abs(y)) < 0.85 * r,
            "triangle": (abs(y) < r) & (abs(x) < (y + r) / 2),
            "cross": (np.minimum(abs(x), abs(y)) < r / 3.5) & (np.maximum(abs(x), abs(y)) < r),
        }[self.shape]
        cover = inside.reshape(side, 4, side, 4).mean((1, 3))[..., None]
        colour, ground = (np.array(rgb) for rgb in (COLOURS[self.colour], GROUNDS[self.ground]))
        return np.round(cover * colour + (1 - cover) * ground).astype(np.uint8)


def drawing(number: int) -> Drawing:
    """Drawing number n, the same on every machine."""
    g = np.random.default_rng(number)
    names = [str(g.choice(list(of))) for of in (SIZES, COLOURS, SHAPES, GROUNDS)]
    return Drawing(*names, (g.uniform(0.35, 0.65), g.uniform(0.35, 0.65)))


def edited(before: Drawing, number: int) -> tuple[Drawing, str]:
    """A drawing with one thing changed, and the instruction that says which."""
    g = np.random.default_rng([number, 1])
    field, names = [("colour", COLOURS), ("shape", SHAPES), ("ground", GROUNDS)][g.integers(3)]
    new = str(g.choice([name for name in names if name != getattr(before, field)]))
    words = {"colour": "make it {}", "shape": "make it a {}", "ground": "on {}"}[field]
    return before._replace(**{field: new}), words.format(new)
