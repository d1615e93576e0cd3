"""ViT and CLIP in Hugging Face folders: the tables of inference/architectures.py.

    models/vit.py                         ViTForImageClassification
    embedding.patches.patch  [h, c p²]    vit.embeddings.patch_embeddings.projection  [h, c, p, p]
    blocks.N.attention.query              vit.encoder.layer.N.attention.attention.query
    labels of index.json                  id2label

    models/clip.py                        CLIPModel
    blocks.N.mlp.up                       text_model.encoder.layers.N.mlp.fc1; after the text's
                                          vision_model.encoder.layers.0.mlp.fc1, ..

Their patches are a convolution: the same numbers as our matrix. What is done to a picture before is
in inference/preprocessor.py.

Not covered: positions of another picture size (interpolation), other channels than three; a CLIP
with GELU, or whose text has another MLP than 4 h' wide.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from base import json_files
from inference import preprocessor
from inference.architectures import Architecture, HuggingFaceError, Location
from models.clip import CLIPConfig
from models.vit import PictureConfig, ViTConfig

CLASS, POSITIONS = "embedding.patches.class_tokens", "embedding.patches.positions"
PATCH = "embedding.patches.patch"


class OfPictures(Architecture):
    # What transformers has where preprocessor_config.json says nothing.
    mean = std = (0.5, 0.5, 0.5)

    def reader(self, hf_dir: Path, config: PictureConfig, read: Callable) -> Callable:
        scales = preprocessor.read(hf_dir, self.mean, self.std)
        names = f"{PATCH}.weight", POSITIONS
        return preprocessor.in_weights(read, *scales, *names, config.num_patches)

    def read(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields

    def write_beside(self, folder: Path, hf_config: dict, index: dict) -> dict[str, Any]:
        preprocessor.write(folder, hf_config.get("vision_config", hf_config)["image_size"])
        return hf_config


def of_blocks(ours: str, theirs: str, names: str) -> dict[str, Location]:
    """ours, theirs: a block; names: theirs of the modules in it."""
    modules = "attention_norm attention.query attention.key attention.value attention.output"
    modules = f"{modules} mlp_norm mlp.up mlp.down".split()
    pairs = zip(modules, names.split(), strict=True)
    return {f"{ours}.{a}": Location(f"{theirs}.{b}") for a, b in pairs}


# Theirs -> ours.
SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_hidden_size",
    "image_size": "picture_size",
    "patch_size": "patch_size",
    "layer_norm_eps": "norm_eps",
}

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
            f"{PATCH}.weight": (f"{PROJECTION}.weight", [h, 3, p, p]),
            POSITIONS: ("vit.embeddings.position_embeddings", [1, s, h]),
            CLASS: ("vit.embeddings.cls_token", [1, 1, h]),
        }

    def read_beside(self, hf_dir: Path) -> dict[str, Any]:
        names = json_files.read(hf_dir / "config.json", Labels).get("id2label")
        return {"labels": [names[str(n)] for n in range(len(names))]} if names else {}

    def write_beside(self, folder: Path, hf_config: dict, index: dict) -> dict[str, Any]:
        labels = index.get("labels") or [f"LABEL_{n}" for n in range(hf_config["num_labels"])]
        hf_config["id2label"] = dict(enumerate(labels))
        hf_config["label2id"] = {label: n for n, label in enumerate(labels)}
        return super().write_beside(folder, hf_config, index)


PROJECTION, SELF = "vit.embeddings.patch_embeddings.projection", "attention.attention"
DROPOUTS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), "dropout")
VIT = OfViT(
    name="ViTForImageClassification",
    model_type="vit",
    preset="vit-base",
    prefix="vit.",
    constants={"class_tokens": 1},
    fields=SIZES | DROPOUTS | {"num_labels": "classes"},
    choices={"hidden_act": ("activation", {"gelu": "exact-gelu", "gelu_new": "gelu"})},
    computed={"num_channels": (3,), "qkv_bias": (True,)},
    modules={
        PATCH: Location(PROJECTION),
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

# --- CLIP -----------------------------------------------------------------------------------------

TEXT, PICTURE = "text_config", "vision_config"


class OfCLIP(OfPictures):
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)

    def flat(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Raises HuggingFaceError where the text has another norm or MLP than ours."""
        flat = self.missing | super().flat(hf_config)
        inner, h = (flat[f"{TEXT}.{name}"] for name in ("intermediate_size", "hidden_size"))
        if [inner] != [4 * h for h in [h] if isinstance(h, int)]:
            raise HuggingFaceError(f"{TEXT}.intermediate_size is {inner}, not 4 times {h}")
        of_text, of_picture = (flat[f"{half}.layer_norm_eps"] for half in self.parts)
        if of_text != of_picture:
            raise HuggingFaceError(f"layer_norm_eps is {of_text} in {TEXT}, and {of_picture}")
        return flat

    def read(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"num_layers": fields["num_layers"] + fields["text_layers"]}

    def write(self, hf_config: dict[str, Any], config: CLIPConfig) -> dict[str, Any]:
        hf_config[f"{PICTURE}.num_hidden_layers"] -= config.text_layers
        of_text = {"intermediate_size": 4 * config.text_hidden_size}
        of_text["layer_norm_eps"] = config.norm_eps
        return hf_config | {f"{TEXT}.{name}": value for name, value in of_text.items()}

    def locate(self, module: str, config: CLIPConfig) -> tuple[Location | None, str]:
        """blocks.7.mlp.up is layer 1 of the picture after six layers of text."""
        if block := re.match(r"blocks\.(\d+)", module):
            half, number = "text", int(block[1])
            if number >= config.text_layers:
                half, number = "picture", number - config.text_layers
            module = module.replace(block[0], f"{half}.{number}")
        return super().locate(module, config)

    def reshaped(self, config: CLIPConfig) -> dict[str, tuple[str, list[int]]]:
        h, p, s = config.hidden_size, config.patch_size, config.num_patches + config.class_tokens
        return {
            f"{PATCH}.weight": ("vision_model.embeddings.patch_embedding.weight", [h, 3, p, p]),
            POSITIONS: ("vision_model.embeddings.position_embedding.weight", [s, h]),
            CLASS: ("vision_model.embeddings.class_embedding", [h]),
            "head.scale": ("logit_scale", []),
        }

    def special_tokens(self, tokenizer) -> tuple[dict[int, str], dict[str, int]]:
        """The end token also pads."""
        begin = {} if tokenizer.bos is None else {"bos_token": tokenizer.bos}
        return {}, begin | {"eos_token": tokenizer.eot, "pad_token": tokenizer.eot}

    def special_ids(self, tokenizer) -> dict[str, int]:
        """Raises HuggingFaceError."""
        if tokenizer.eot == 2:
            raise HuggingFaceError("the end token is 2, which CLIPModel reads as: the largest id")
        return {"eos_token_id": tokenizer.eot}

    def write_beside(self, folder: Path, hf_config: dict, index: dict) -> dict[str, Any]:
        """A text's feature is that of the end token, in its part of config.json."""
        if "eos_token_id" in hf_config:
            hf_config[TEXT]["eos_token_id"] = hf_config.pop("eos_token_id")
        return super().write_beside(folder, hf_config, index)


def of_parts(text, picture) -> dict:
    """The items of two dictionaries under the names of parts."""
    of_text = {f"{TEXT}.{name}": value for name, value in text.items()}
    return of_text | {f"{PICTURE}.{name}": value for name, value in picture.items()}


OF_TEXT = {
    "num_hidden_layers": "text_layers",
    "hidden_size": "text_hidden_size",
    "num_attention_heads": "text_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "text_length",
}
DEFAULTS = of_parts(
    dict(zip(OF_TEXT, (12, 512, 8, 49408, 77))) | dict(intermediate_size=2048, layer_norm_eps=1e-5),
    dict(zip(SIZES, (12, 768, 12, 3072, 224, 32, 1e-5))),
)
ONLY = dict(hidden_act=("quick_gelu",), attention_dropout=(0.0,))
OF_LAYER = "layer_norm1 self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj"
OF_LAYER += " layer_norm2 mlp.fc1 mlp.fc2"
CLIP = OfCLIP(
    name="CLIPModel",
    model_type="clip",
    preset="clip-vit-base-32",
    prefix="",
    parts=(TEXT, PICTURE),
    constants={"class_tokens": 1},
    fields=of_parts(OF_TEXT, SIZES) | {"projection_dim": "embedding_size"},
    choices={},
    computed=of_parts(ONLY, ONLY | {"num_channels": (3,)}),
    modules={
        "embedding.tokens": Location("text_model.embeddings.token_embedding"),
        "embedding.positions": Location("text_model.embeddings.position_embedding"),
        "embedding.picture_norm": Location("vision_model.pre_layrnorm"),
        "head.text_norm": Location("text_model.final_layer_norm"),
        "head.picture_norm": Location("vision_model.post_layernorm"),
        "head.text": Location("text_projection"),
        "head.picture": Location("visual_projection"),
    }
    | of_blocks("text.*", "text_model.encoder.layers.*", OF_LAYER)
    | of_blocks("picture.*", "vision_model.encoder.layers.*", OF_LAYER),
    ignored=r"(text|vision)_model\.embeddings\.position_ids",
    missing=DEFAULTS | {"projection_dim": 512},
    shape_class=CLIPConfig,
)

ARCHITECTURES = (VIT, CLIP)
