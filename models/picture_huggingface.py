"""ViT in Hugging Face folders: the tables of inference/architectures.py.

    models/vit.py                         ViTForImageClassification
    embedding.patches.patch  [h, c p²]    vit.embeddings.patch_embeddings.projection  [h, c, p, p]
    embedding.patches.class_tokens        vit.embeddings.cls_token                    [1, 1, h]
    blocks.N.attention.query              vit.encoder.layer.N.attention.attention.query
    labels of index.json                  id2label

Their patches are a convolution: the same numbers as our matrix. They read (u - mean) / std of
numbers u from 0 to 1 (inference/preprocessor.py), and we x = 2 u - 1. On import, other means and
stds than 0.5 go into the weights:

    (u - mean) / std  =  x / (2 std) + (1/2 - mean) / std       W' = W / (2 std), and
                                                                positions += W (1/2 - mean) / std

Not covered: positions of another picture size (interpolation), other channels than three.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from base import json_files
from inference import preprocessor
from inference.architectures import Architecture, HuggingFaceError, Location
from models.vit import PictureConfig, ViTConfig

PATCH, POSITIONS = "embedding.patches.patch.weight", "embedding.patches.positions"


class OfPictures(Architecture):
    # What transformers has where the file says nothing.
    mean = std = preprocessor.HALF

    def reader(self, hf_dir: Path, config: PictureConfig, read: Callable) -> Callable:
        """With mean and std in the weights. Raises HuggingFaceError."""
        mean, std = preprocessor.read(hf_dir, self.mean, self.std)
        if mean == std == preprocessor.HALF:
            return read
        mean, std = torch.tensor([mean, std], dtype=torch.float64)

        def folded(name: str) -> Tensor:
            if name not in (PATCH, POSITIONS):
                return read(name)
            weight = read(PATCH).double().unflatten(1, (3, -1))  # [h, c, p²]
            if name == PATCH:
                return (weight / (2 * std[:, None])).flatten(1).float()
            positions = read(name).double()
            positions[-config.num_patches :] += weight.sum(2) @ ((0.5 - mean) / std)
            return positions.float()

        return folded

    def read(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields

    def reshaped(self, config: PictureConfig) -> dict[str, tuple[str, list[int]]]:
        """Our parameter -> (theirs, its shape), where it has another one."""
        raise NotImplementedError

    def place(self, name: str, shape: torch.Size, config: PictureConfig):
        theirs, sizes = self.reshaped(config).get(name, ("", None))
        if theirs:
            return Location(theirs, shapes=(sizes, shape)), theirs
        return super().place(name, shape, config)

    def write_beside(self, folder: Path, config: PictureConfig, index: dict) -> dict[str, Any]:
        preprocessor.write(folder, config.picture_size)
        return {}


def of_blocks(ours: str, theirs: str, names: str) -> dict[str, Location]:
    """ours, theirs: a block; names: theirs of the modules in it."""
    modules = "attention_norm attention.query attention.key attention.value attention.output"
    modules = f"{modules} mlp_norm mlp.up mlp.down".split()
    pairs = zip(modules, names.split(), strict=True)
    return {f"{ours}.{a}": Location(f"{theirs}.{b}") for a, b in pairs}


# --- ViT ------------------------------------------------------------------------------------------


class Labels(TypedDict):
    id2label: NotRequired[dict[str, str] | None]


class OfViT(OfPictures):
    def flat(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """As transformers, it believes id2label more than num_labels. Raises HuggingFaceError."""
        names = json_files.convert(hf_config, Labels, "config.json").get("id2label")
        if names is None:
            return hf_config
        if names.keys() != {str(n) for n in range(len(names))}:
            raise HuggingFaceError("id2label has not one name for each of the labels 0, 1, ..")
        return hf_config | {"num_labels": len(names)}

    def reshaped(self, config: ViTConfig) -> dict[str, tuple[str, list[int]]]:
        h, s, p = config.hidden_size, config.seq_length, config.patch_size
        return {
            PATCH: ("vit.embeddings.patch_embeddings.projection.weight", [h, 3, p, p]),
            POSITIONS: ("vit.embeddings.position_embeddings", [1, s, h]),
            "embedding.patches.class_tokens": ("vit.embeddings.cls_token", [1, 1, h]),
        }

    def read_beside(self, hf_dir: Path) -> dict[str, Any]:
        names = json_files.read(hf_dir / "config.json", Labels).get("id2label")
        return {"labels": [names[str(n)] for n in range(len(names))]} if names else {}

    def write_beside(self, folder: Path, config: ViTConfig, index: dict) -> dict[str, Any]:
        labels = index.get("labels") or [f"LABEL_{n}" for n in range(config.classes)]
        ids = {label: n for n, label in enumerate(labels)}
        names = {"id2label": dict(enumerate(labels)), "label2id": ids}
        return super().write_beside(folder, config, index) | names


FIELDS = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_hidden_size",
    "image_size": "picture_size",
    "patch_size": "patch_size",
    "layer_norm_eps": "norm_eps",
}
DROPOUTS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), "dropout")
SELF = "attention.attention"
VIT = OfViT(
    name="ViTForImageClassification",
    model_type="vit",
    preset="vit-base",
    prefix="vit.",
    constants={"class_tokens": 1},
    fields=FIELDS | DROPOUTS | {"num_labels": "classes"},
    choices={"hidden_act": ("activation", {"gelu": "exact-gelu", "gelu_new": "gelu"})},
    computed={"num_channels": (3,), "qkv_bias": (True,)},
    modules={
        "embedding.patches.patch": Location("vit.embeddings.patch_embeddings.projection"),
        "head.norm": Location("vit.layernorm"),
        "head.output": Location("classifier"),
    }
    | of_blocks(
        "blocks.*",
        "vit.encoder.layer.*",
        f"layernorm_before {SELF}.query {SELF}.key {SELF}.value attention.output.dense"
        " layernorm_after intermediate.dense output.dense",
    ),
    # Other classes read them.
    ignored=r"pooler\.dense\..*|embeddings\.mask_token",
    missing={"num_labels": 2, "layer_norm_eps": 1e-12} | dict.fromkeys(DROPOUTS, 0.0),
    shape_class=ViTConfig,
)

ARCHITECTURES = (VIT,)
