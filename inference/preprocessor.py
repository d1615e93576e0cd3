"""preprocessor_config.json of a Hugging Face folder: how a picture becomes numbers.

    picture, 0 to 255   ->   the middle square, resized, from 0 to 1: u   ->   (u - mean) / std

In models/ a model reads x = 2 u - 1: a mean and a std of 0.5, as an exported file says. On import
other ones, such as CLIP's, go into the weights W of a patch and its position:

    (u - mean) / std  =  x / (2 std) + (1/2 - mean) / std       W' = W / (2 std)
                                                                position += W (1/2 - mean) / std

Not covered: pictures squeezed into a square, borders, other resampling.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from base import json_files, terminal
from inference.architectures import HuggingFaceError

FILE = "preprocessor_config.json"
HALF = [0.5, 0.5, 0.5]
# Our [h, 3 p²], a colour after the other, and [s, h], the last of patches.
PATCH, POSITIONS = "embedding.patches.patch.weight", "embedding.patches.positions"


class Preprocessor(TypedDict, total=False):
    """The fields that change numbers."""

    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    image_mean: list[float]
    image_std: list[float]


def read(hf_dir: Path) -> tuple[list[float], list[float]]:
    """(mean, std) of a folder, of three colours each; without the file they are 0.5, and a line
    says so. Raises JSONError or HuggingFaceError."""
    file = hf_dir / FILE
    if not file.is_file():
        terminal.say(f"huggingface.py: {hf_dir} has no {FILE}: mean and std are taken as 0.5")
        return HALF, HALF
    fields = json_files.read(file, Preprocessor)
    factor = fields.get("rescale_factor", 1 / 255)
    if not fields.get("do_rescale", True) or abs(factor * 255 - 1) > 1e-3:
        rule = "this project divides a picture's numbers by 255"
        raise HuggingFaceError(f"{file}: do_rescale is false, or rescale_factor not 1/255; {rule}")
    if not fields.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    # Without them each class of transformers has its own.
    mean, std = fields.get("image_mean", []), fields.get("image_std", [])
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise HuggingFaceError(f"{file}: image_mean and image_std: must be three numbers, std > 0")
    return mean, std


def in_weights(read: Callable, mean, std, patches: int) -> Callable:
    """read(name), a whole parameter, with mean and std in PATCH and in the last POSITIONS."""
    mean, std = (torch.tensor(numbers, dtype=torch.float64) for numbers in (mean, std))
    if mean.eq(0.5).all() and std.eq(0.5).all():
        return read

    def read_changed(name: str) -> Tensor:
        if name not in (PATCH, POSITIONS):
            return read(name)
        w = read(PATCH).double().unflatten(1, (3, -1))  # [h, 3, p²]
        if name == PATCH:
            return (w / (2 * std[:, None])).flatten(1).float()
        p = read(POSITIONS).double()
        p[-patches:] += w.sum(2) @ ((0.5 - mean) / std)
        return p.float()

    return read_changed


def write(folder: Path, side: int) -> None:
    """side: of a picture, in pixels."""
    # The class that takes the middle square, resized bicubically, as models/pictures.py does.
    fields = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}}
    fields |= {"crop_size": {"height": side, "width": side}, "image_mean": HALF, "image_std": HALF}
    (folder / FILE).write_text(json.dumps(fields, indent=1))
