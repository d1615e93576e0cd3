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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from base import json_files
from base.device_queue import to_device
from models.shapes import COLOURS, DESCRIBE, SHAPES, drawing, edited
from run.data import HELD_OUT
from run.documents import DataError, file_errors, fingerprint


class Context(NamedTuple):
    """The inputs of every layer beside x, as gpt.Context has them."""

    drop_key: Tensor | None = None  # [b]
    documents: Tensor | None = None  # [b, s], each position's document: it sees no other
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
    noise: Tensor | None = None  # [b, z, h, w]

    def to(self, device) -> "Batch":
        return self._make(None if x is None else to_device(x, device) for x in self)

    def context(self, drop_key: Tensor | None = None) -> Context:
        return Context(drop_key, pictures=self.pictures, times=self.times, noise=self.noise)


@dataclass(slots=True)
class Listed:
    """A file of a folder, and what is known of it, as in a line of metadata.jsonl. source: the
    picture that an edit begins with; question, answer: what is asked about the picture."""

    file_name: str
    text: str = ""
    label: str | int = ""
    source: str | None = None
    question: str = ""
    answer: str = ""

    @property
    def pictures(self) -> list[str]:
        """Those that are read: the file, and its source."""
        return [name for name in (self.file_name, self.source) if name is not None]


class Example(NamedTuple):
    picture: np.ndarray  # [H, W, 3] uint8
    caption: str
    label: str
    # The picture that an edit begins with; then the caption is what to change.
    source: np.ndarray | None = None


# --- data sets ------------------------------------------------------------------------------------


class Examples(Sequence):
    """Pictures, each made or read when it is asked for. side: pixels of it."""

    # The different ones.
    labels: Sequence[str]
    # Text that is another one where the examples are.
    content: str
    # What is known of each, in a folder.
    files: Sequence[Listed] = ()

    @property
    def held_out(self) -> int:
        """How many are not trained on: the last ones."""
        return max(1, len(self) // HELD_OUT)

    def questions(self, n: int) -> dict[str, str]:
        """What may be asked about picture n, with the answers."""
        raise NotImplementedError


class Drawn(Examples):
    """Drawings. edits: whether they are pairs."""

    labels = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)

    def __init__(self, count: int, side: int, edits: bool = False):
        self.count, self.side, self.edits = count, side, edits
        self.content = f"{count} shapes{', edited' * edits}"

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


class Digits(Examples):
    """scikit-learn's handwritten digits, in an order that mixes them."""

    labels, content = tuple("0123456789"), "digits"

    def __init__(self, side: int):
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            rule = "needs scikit-learn: pip install scikit-learn"
            raise DataError(f"--data digits: {rule}") from None
        self.side, digits = side, load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        # Ink goes from 0 to 16, and a byte to 255.
        self.pixels = (digits.images[order] * 15.9).astype(np.uint8)  # [N, 8, 8]
        self.shown = [str(n) for n in digits.target[order]]

    def __len__(self) -> int:
        return len(self.shown)

    def __getitem__(self, n: int) -> Example:
        from PIL import Image

        picture = resized(Image.fromarray(self.pixels[n]), self.side)
        return Example(picture, self.questions(n)[DESCRIBE], self.shown[n])

    def questions(self, n: int) -> dict[str, str]:
        return {DESCRIBE: f"a handwritten {self.shown[n]}"}


class Folder(Examples):
    """The pictures of a folder. Raises JSONError, and DataError where one cannot be read: at once
    if its first bytes are of no picture."""

    held_out = 0

    def __init__(self, folder: Path, side: int):
        self.folder, self.side = folder, side
        listed = folder / "metadata.jsonl"
        if listed.exists():
            self.files = [line for _, line in json_files.read_lines(listed, Listed)]
        else:
            self.files = [self.beside_its_caption(path) for path in pictures_below(folder)]
        sizes = []
        for path in (folder / name for file in self.files for name in file.pictures):
            with opened(path):
                sizes.append(path.stat().st_size)
        self.content = fingerprint(f"{self.files} {sizes}")
        self.labels = sorted({str(file.label) for file in self.files})
        self.mix()

    def mix(self) -> None:
        """All lines about one picture stay together, so that it is trained on, or held out."""
        names = sorted({file.file_name for file in self.files})
        if len(names) < 2:
            rule = f"needs two pictures or more (.png, .jpg, .jpeg), and has {len(names)}"
            raise DataError(f"--data {self.folder}: {rule}")
        np.random.default_rng(0).shuffle(names)
        place = {name: n for n, name in enumerate(names)}
        self.files.sort(key=lambda file: place[file.file_name])
        last = set(names[-max(1, len(names) // HELD_OUT) :])
        self.held_out = sum(file.file_name in last for file in self.files)

    def beside_its_caption(self, path: Path) -> Listed:
        text = path.with_suffix(".txt")
        with file_errors(text):
            caption = text.read_text("utf-8").strip() if text.exists() else ""
        return Listed(str(path.relative_to(self.folder)), caption, path.parent.name)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, n: int) -> Example:
        file = self.files[n]
        picture, *source = (read_picture(self.folder / p, self.side) for p in file.pictures)
        return Example(picture, file.text, str(file.label), *source)

    def questions(self, n: int) -> dict[str, str]:
        file = self.files[n]
        return {file.question or DESCRIBE: file.answer or file.text}


def pictures_below(folder: Path) -> list[Path]:
    """The picture files of a folder of folders, without hidden ones. Raises DataError."""
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.name == "metadata.jsonl":
            raise DataError(f"--data {folder}: has a metadata.jsonl in {path.parent}; name this")
        if path.suffix.lower() in (".png", ".jpg", ".jpeg") and path.is_file() and not hidden:
            found.append(path)
    return found


@contextmanager
def opened(path: str | Path):
    """The PIL image of a file, of which no pixel is read yet. Raises DataError, also for what fails
    in the body."""
    from PIL import Image

    with file_errors(path):
        try:
            with Image.open(path) as image:
                yield image
        except (SyntaxError, Image.DecompressionBombError) as e:
            raise ValueError(str(e)) from None


def read_picture(path: str | Path, side: int) -> np.ndarray:
    """[side, side, 3] uint8. Raises DataError."""
    with opened(path) as image:
        return resized(image, side)


def resized(image, side: int) -> np.ndarray:
    """The middle of a PIL image as a square of `side` pixels, turned as its camera was held; what
    is transparent becomes white. [side, side, 3] uint8"""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # Grey of 16 bits.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side)))


# Drawings of a data set; the last twentieth is held out.
DRAWINGS = 200_000


def open_pictures(paths: list[str], side: int, edits: bool = False) -> Examples:
    """The examples that --data names. Raises DataError."""
    (name,) = paths or ["shapes"]
    if name == "shapes":
        return Drawn(DRAWINGS, side, edits)
    if name != "digits" and not Path(name).is_dir():
        raise DataError(f"--data {name}: is neither shapes, nor digits, nor a folder of pictures")
    found = Digits(side) if name == "digits" else Folder(Path(name), side)
    # Digits have no sources.
    lines = found.files or [Listed(name)]
    without = [line.file_name for line in lines if line.source is None]
    if edits and without:
        rule = f'{without[0]} has no "source" in metadata.jsonl, and an edit begins with one'
        raise DataError(f"--data {name}: {rule}")
    return found


# --- as tensors -----------------------------------------------------------------------------------


def to_tensor(pictures: list[np.ndarray]) -> Tensor:
    """uint8 [H, W, 3] each -> [b, 3, H, W] from -1 to 1"""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1


def to_uint8(pictures: Tensor) -> np.ndarray:
    """[b, 3, H, W] -> [b, H, W, 3] uint8"""
    return ((pictures.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
