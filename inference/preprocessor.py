"""preprocessor_config.json of a Hugging Face folder: how a picture becomes numbers.

    picture [H, W, 3], 0 to 255    ->  the middle square, resized
                                   ->  u = picture / 255, from 0 to 1
                                   ->  (u - mean) / std, what the model reads

In models/ a model reads 2 u - 1: a mean and a std of 0.5. An exported file says so; with others the
weights are changed on import (models/picture_huggingface.py).

Not covered: pictures squeezed into a square, borders, other resampling.
"""

import json
from pathlib import Path
from typing import NotRequired, TypedDict

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


def read(hf_dir: Path, mean: list[float], std: list[float]) -> tuple[list[float], list[float]]:
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
