"""Pictures: drawn ones, handwritten digits, files; and what a step gets of them.

    --data shapes   "a small red circle on white": drawn, each from its number
    --data digits   1,797 handwritten digits of 8 x 8 pixels (scikit-learn)
    --data DIR      DIR/metadata.jsonl, a line {"file_name": "a.png", "text": ".."} for each file,
                    as of Hugging Face's imagefolder ("label": its class; "source": the picture that
                    an edit begins with; "question", "answer": what is asked about it); or
                    DIR/LABEL/a.png, and its caption in a.txt

A picture becomes a tensor [c, size, size] of numbers from -1 to 1. A twentieth is held out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from base import json_files
from base.device_queue import to_device
from run.data import DataError


class Context(NamedTuple):
    """The inputs of every layer beside x, as gpt.Context has them."""

    drop_key: Tensor | None = None  # [b]
    documents: Tensor | None = None  # [b, s], each position's document: it sees no other
    real: Tensor | None = None  # [b, s] bool
    rotary: tuple[Tensor, Tensor] | None = None
    block_mask: object | None = None
    pictures: Tensor | None = None  # [b, c, H, W]
    times: Tensor | None = None  # [b], how much noise they have (models/diffusion.py)
    noise: Tensor | None = None  # [b, z, h, w], of their latents (models/autoencoder.py)


class Batch(NamedTuple):
    """As run.data.Batch, with a picture for each sample. A position of a sequence that is no token
    of text has token 0."""

    tokens: Tensor  # [b, s] int64
    targets: Tensor | None  # what the head compares with; None: it gives what it has found
    loss_mask: Tensor  # [b, m] bool: the losses that count
    samples: Tensor  # [b] int64
    pictures: Tensor  # [b, c, H, W] float32
    times: Tensor | None = None  # [b] float32
    documents: Tensor | None = None  # [b, s]
    real: Tensor | None = None  # [b, s] bool
    noise: Tensor | None = None  # [b, z, h, w]

    def to(self, device) -> "Batch":
        return self._make(None if x is None else to_device(x, device) for x in self)

    def context(self, drop_key: Tensor | None = None) -> Context:
        others = dict(pictures=self.pictures, times=self.times, noise=self.noise)
        return Context(drop_key, self.documents, self.real, **others)


class Example(NamedTuple):
    picture: np.ndarray  # [H, W, 3] uint8
    caption: str
    label: str
    # The picture that an edit begins with; then the caption is what to change.
    source: np.ndarray | None = None


# --- drawn pictures -------------------------------------------------------------------------------

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


class Drawn(Sequence):
    """Drawings, each made when it is asked for. edits: whether they are pairs."""

    labels = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)

    def __init__(self, count: int, side: int, edits: bool = False):
        self.count, self.side, self.edits = count, side, edits

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Example:
        shown = drawing(n)
        if not self.edits:
            return Example(shown.draw(self.side), shown.caption, shown.label)
        after, words = edited(shown, n)
        return Example(after.draw(self.side), words, after.label, shown.draw(self.side))

    def questions(self, n: int) -> dict[str, str]:
        return drawing(n).questions


# --- pictures of files ----------------------------------------------------------------------------


class Digits(Sequence):
    """scikit-learn's handwritten digits, in an order that mixes them."""

    def __init__(self, side: int):
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            rule = "needs scikit-learn: pip install scikit-learn"
            raise DataError(f"--data digits: {rule}") from None
        self.side, digits = side, load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        self.pixels = (digits.images[order] * 15.9).astype(np.uint8)  # [N, 8, 8]
        self.labels = [str(n) for n in digits.target[order]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, n: int) -> Example:
        from PIL import Image

        picture = resized(Image.fromarray(self.pixels[n]), self.side)
        return Example(picture, f"a handwritten {self.labels[n]}", self.labels[n])

    def questions(self, n: int) -> dict[str, str]:
        return {DESCRIBE: f"a handwritten {self.labels[n]}"}


def resized(image, side: int) -> np.ndarray:
    """The middle of a PIL image as a square of `side` pixels. [side, side, 3] uint8"""
    from PIL import ImageOps

    return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side)))


class Listed(TypedDict):
    """A line of metadata.jsonl. source: the picture that an edit begins with; question, answer:
    what is asked about the picture."""

    file_name: str
    text: NotRequired[str]
    label: NotRequired[str | int]
    source: NotRequired[str | None]
    question: NotRequired[str]
    answer: NotRequired[str]


class Folder(Sequence):
    """The pictures of a folder. Raises JSONError; and DataError where one cannot be read."""

    def __init__(self, folder: Path, side: int):
        self.side = side
        # (path, caption or answer, label, path of the source or None, question)
        self.files: list[tuple] = []
        listed = folder / "metadata.jsonl"
        if listed.exists():
            for _, line in json_files.read_lines(listed, Listed):
                answer = line.get("answer", line.get("text", ""))
                names = answer, str(line.get("label", ""))
                before = folder / line["source"] if line.get("source") else None
                question = line.get("question", "")
                self.files.append((folder / line["file_name"], *names, before, question))
        else:
            found = (p for p in folder.rglob("*") if p.suffix.lower() in (".png", ".jpg", ".jpeg"))
            for path in sorted(found):
                beside = path.with_suffix(".txt")
                caption = beside.read_text("utf-8").strip() if beside.exists() else ""
                self.files.append((path, caption, path.parent.name, None, ""))
        np.random.default_rng(0).shuffle(self.files)
        self.labels = [label for _, _, label, *_ in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, n: int) -> Example:
        path, caption, label, source, _ = self.files[n]
        picture, *before = (read_picture(p, self.side) for p in (path, source) if p)
        return Example(picture, caption, label, *before)

    def questions(self, n: int) -> dict[str, str]:
        _, answer, _, _, question = self.files[n]
        return {question or DESCRIBE: answer}


def read_picture(path: str | Path, side: int) -> np.ndarray:
    """[side, side, 3] uint8. Raises DataError."""
    from PIL import Image

    try:
        return resized(Image.open(path), side)
    except (OSError, ValueError, Image.DecompressionBombError) as e:
        raise DataError(f"{path}: cannot be read as a picture ({e})") from None


# Drawings of a data set; the last twentieth is held out.
DRAWINGS = 200_000


def open_pictures(paths: list[str], side: int, edits: bool = False) -> Sequence:
    """The examples that --data names. Raises DataError."""
    (name,) = paths or ["shapes"]
    if name == "shapes":
        return Drawn(DRAWINGS, side, edits)
    found = Digits(side) if name == "digits" else None
    if not found and Path(name).is_dir():
        found = Folder(Path(name), side)
    if not found or len(found) < 2:
        raise DataError(f"--data {name}: is neither shapes, nor digits, nor a folder of pictures")
    if edits and found[0].source is None:
        raise DataError(f'--data {name}: an edit needs lines with "source" in metadata.jsonl')
    return found


# --- as tensors -----------------------------------------------------------------------------------


def to_tensor(pictures: list[np.ndarray]) -> Tensor:
    """uint8 [H, W, 3] each -> [b, 3, H, W] from -1 to 1"""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1


def to_uint8(pictures: Tensor) -> np.ndarray:
    """[b, 3, H, W] -> [b, H, W, 3] uint8"""
    return ((pictures.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
