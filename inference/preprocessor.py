"""preprocessor_config.json of a Hugging Face folder: how a picture becomes numbers.

    picture [H, W, 3], 0 to 255    ->  the middle square, resized
                                   ->  u = picture / 255, from 0 to 1
                                   ->  (u - mean) / std, what the model reads

In models/ a model reads x = 2 u - 1: a mean and a std of 0.5, as an exported file says. On import
other ones, such as CLIP's, go into the weights W of a patch and its position:

    (u - mean) / std  =  x / (2 std) + (1/2 - mean) / std       W' = W / (2 std)
                                                                position += W (1/2 - mean) / std

Not covered: pictures squeezed into a square, borders, other resampling.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from base import json_files, terminal
from inference.architectures import HuggingFaceError

FILE = "preprocessor_config.json"
HALF = [0.5, 0.5, 0.5]


class Preprocessor(TypedDict):
    """The fields that change numbers."""

    do_rescale: NotRequired[bool]
    rescale_factor: NotRequired[float]
    do_normalize: NotRequired[bool]
    image_mean: NotRequired[list[float]]
    image_std: NotRequired[list[float]]


def read(hf_dir: Path, mean: Sequence[float], std: Sequence[float]) -> tuple:
    """(mean, std) of a folder, of three colours each. mean, std: where the file has none; without
    the file they are 0.5, and a line says so. Raises JSONError or HuggingFaceError."""
    file = hf_dir / FILE
    if not file.is_file():
        terminal.say(f"huggingface.py: {hf_dir} has no {FILE}: mean and std are taken as 0.5")
        return HALF, HALF
    fields = json_files.read(file, Preprocessor)
    factor = fields.get("rescale_factor", 1 / 255)
    if not fields.get("do_rescale", True) or abs(factor * 255 - 1) > 1e-3:
        rule = "this project divides a picture's numbers by 255"
        raise HuggingFaceError(f"{file}: do_rescale is false, or rescale_factor not 1/255; {rule}")
    mean, std = fields.get("image_mean", mean), fields.get("image_std", std)
    if not fields.get("do_normalize", True):
        mean, std = [0.0] * 3, [1.0] * 3
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise HuggingFaceError(f"{file}: image_mean and image_std: must be three numbers, std > 0")
    return mean, std


def in_weights(read: Callable, mean, std, weight: str, positions: str, n: int) -> Callable:
    """read(name), a whole parameter, with mean and std in them. weight, positions: names of the
    parameters [h, 3 p²], a colour after the other, and [s, h], whose last n are of patches."""
    mean, std = torch.tensor([[*mean], [*std]], dtype=torch.float64)

    def read_changed(name: str) -> Tensor:
        if name not in (weight, positions):
            return read(name)
        w = read(weight).double().unflatten(1, (3, -1))  # [h, 3, p²]
        if name == weight:
            return (w / (2 * std[:, None])).flatten(1).float()
        p = read(positions).double()
        p[-n:] += w.sum(2) @ ((0.5 - mean) / std)
        return p.float()

    return read if mean.eq(0.5).all() and std.eq(0.5).all() else read_changed


def write(folder: Path, side: int) -> None:
    """side: of a picture, in pixels."""
    fields = {
        # The class that takes the middle square, as models/pictures.py does.
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        # Bicubic.
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": HALF,
        "image_std": HALF,
    }
    (folder / FILE).write_text(json.dumps(fields, indent=1))
