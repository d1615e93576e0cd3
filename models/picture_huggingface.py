"""ViT and CLIP in Hugging Face folders: the tables of inference/architectures.py.

    embedding.patches.patch  [h, 3 p²]    a convolution of the same numbers  [h, 3, p, p]
    blocks.N of a CLIP                    text_model.encoder.layers.N; after the text's
                                          vision_model.encoder.layers.0, ..
    labels of index.json                  id2label

Not covered: positions of another picture size (interpolation), other channels than three; a CLIP
with GELU, or whose text has another MLP than 4 h' wide.
"""

from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any

from base import json_files
from inference import preprocessor
from inference.architectures import Architecture, HuggingFaceError, Location, in_halves
from inference.preprocessor import PATCH, POSITIONS
from models.clip import CLIPConfig
from models.vit import PictureConfig, ViTConfig

CLASS = "embedding.patches.class_tokens"


class OfPictures(Architecture):
    def reader(self, hf_dir: Path, config: PictureConfig, read: Callable) -> Callable:
        return preprocessor.in_weights(read, *preprocessor.read(hf_dir), config.num_patches)

    def write_beside(self, folder: Path, hf_config: dict, index: dict) -> dict[str, Any]:
        preprocessor.write(folder, hf_config.get(PICTURE, hf_config)["image_size"])
        return hf_config


def blocks(ours: str, theirs: str, names: str) -> dict[str, Location]:
    """ours, theirs: a block; names: theirs of the modules in it."""
    modules = "attention_norm attention.query attention.key attention.value attention.output"
    pairs = zip(f"{modules} mlp_norm mlp.up mlp.down".split(), names.split(), strict=True)
    return {f"{ours}.{a}": Location(f"{theirs}.{b}") for a, b in pairs}


def kernel(h: int, n: int) -> tuple[int, ...]:
    """The shape of a convolution that is our [h, n], n = 3 p²."""
    return h, 3, isqrt(n // 3), isqrt(n // 3)


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


class OfViT(OfPictures):
    def flat(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """As transformers, it believes id2label more than num_labels. Raises HuggingFaceError."""
        names = json_files.convert(hf_config.get("id2label") or {}, dict[str, str], "id2label")
        labels = [names.get(str(n)) for n in range(len(names))]
        if None in labels:
            raise HuggingFaceError("id2label has not one name for each of the labels 0, 1, ..")
        count = {"num_labels": len(labels)} if labels else {}
        return hf_config | {"labels": labels} | count

    def read_beside(self, hf_dir: Path) -> dict[str, Any]:
        return {"labels": self.flat(json_files.read(hf_dir / "config.json", dict))["labels"]}

    def write_beside(self, folder: Path, hf_config: dict, index: dict) -> dict[str, Any]:
        labels = index.get("labels") or [f"LABEL_{n}" for n in range(hf_config["num_labels"])]
        hf_config["id2label"] = dict(enumerate(labels))
        hf_config["label2id"] = {label: n for n, label in enumerate(labels)}
        return super().write_beside(folder, hf_config, index)


PROJECTION, SELF = "vit.embeddings.patch_embeddings.projection", "attention.attention"
VIT_LAYER = f"layernorm_before {SELF}.query {SELF}.key {SELF}.value attention.output.dense"
VIT_LAYER += " layernorm_after intermediate.dense output.dense"
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
    modules=blocks("blocks.*", "vit.encoder.layer.*", VIT_LAYER)
    | {
        "embedding.patches.patch": Location(PROJECTION),
        "head.norm": Location("vit.layernorm"),
        "head.output": Location("classifier"),
    },
    reshaped={
        PATCH: (f"{PROJECTION}.weight", kernel),
        POSITIONS: ("vit.embeddings.position_embeddings", lambda s, h: (1, s, h)),
        CLASS: ("vit.embeddings.cls_token", lambda k, h: (1, k, h)),
    },
    # Other classes read them.
    ignored=r"pooler\.dense\..*|embeddings\.mask_token",
    missing={"num_labels": 2, "layer_norm_eps": 1e-12} | dict.fromkeys(DROPOUTS, 0.0),
    shape_class=ViTConfig,
)

# --- CLIP -----------------------------------------------------------------------------------------

TEXT, PICTURE = "text_config", "vision_config"


class OfCLIP(OfPictures):
    def read(self, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"num_layers": fields["num_layers"] + fields["text_layers"]}

    def write(self, hf_config: dict[str, Any], config: CLIPConfig) -> dict[str, Any]:
        hf_config[f"{PICTURE}.num_hidden_layers"] -= config.text_layers
        return hf_config | {f"{TEXT}.intermediate_size": 4 * config.text_hidden_size}

    def locate(self, module: str, config: CLIPConfig) -> tuple[Location | None, str]:
        return super().locate(in_halves(module, config.text_layers, "text", "picture"), config)

    def special_tokens(self, tokenizer) -> tuple[dict[int, str], dict[str, int]]:
        """The end token also pads."""
        begin = {} if tokenizer.bos is None else {"bos_token": tokenizer.bos}
        return {}, begin | {"eos_token": tokenizer.eot, "pad_token": tokenizer.eot}

    def special_ids(self, tokenizer) -> dict[str, int]:
        """Raises HuggingFaceError."""
        if tokenizer.eot == 2:
            raise HuggingFaceError("the end token is 2, which CLIPModel reads as: the largest id")
        return {f"{TEXT}.eos_token_id": tokenizer.eot}


def under(part: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {f"{part}.{name}": value for name, value in fields.items()}


# Theirs -> ours, and what they have where config.json says nothing.
OF_TEXT = {
    "num_hidden_layers": "text_layers",
    "hidden_size": "text_hidden_size",
    "num_attention_heads": "text_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "text_length",
    "layer_norm_eps": "norm_eps",
}
TEXT_DEFAULTS = dict(zip(OF_TEXT, (12, 512, 8, 49408, 77, 1e-5)))
PICTURE_DEFAULTS = dict(zip(SIZES, (12, 768, 12, 3072, 224, 32, 1e-5)))
ONLY = dict(hidden_act=("quick_gelu",), attention_dropout=(0.0,))
CLIP_LAYER = "layer_norm1 self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj"
CLIP_LAYER += " layer_norm2 mlp.fc1 mlp.fc2"
CLIP = OfCLIP(
    name="CLIPModel",
    model_type="clip",
    preset="clip-vit-base-32",
    prefix="",
    parts=(TEXT, PICTURE),
    constants={"class_tokens": 1},
    fields=under(TEXT, OF_TEXT) | under(PICTURE, SIZES) | {"projection_dim": "embedding_size"},
    choices={},
    computed=under(TEXT, ONLY) | under(PICTURE, ONLY | {"num_channels": (3,)}),
    modules=blocks("text.*", "text_model.encoder.layers.*", CLIP_LAYER)
    | blocks("picture.*", "vision_model.encoder.layers.*", CLIP_LAYER)
    | {
        "embedding.tokens": Location("text_model.embeddings.token_embedding"),
        "embedding.positions": Location("text_model.embeddings.position_embedding"),
        "embedding.picture_norm": Location("vision_model.pre_layrnorm"),
        "head.text_norm": Location("text_model.final_layer_norm"),
        "head.picture_norm": Location("vision_model.post_layernorm"),
        "head.text": Location("text_projection"),
        "head.picture": Location("visual_projection"),
    },
    reshaped={
        PATCH: ("vision_model.embeddings.patch_embedding.weight", kernel),
        POSITIONS: ("vision_model.embeddings.position_embedding.weight", lambda s, h: (s, h)),
        CLASS: ("vision_model.embeddings.class_embedding", lambda k, h: (k * h,)),
        "head.scale": ("logit_scale", lambda one: ()),
    },
    ignored=r"(text|vision)_model\.embeddings\.position_ids",
    missing=under(TEXT, TEXT_DEFAULTS) | under(PICTURE, PICTURE_DEFAULTS) | {"projection_dim": 512},
    shape_class=CLIPConfig,
)

ARCHITECTURES = (VIT, CLIP)
