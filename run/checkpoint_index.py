"""Reads index.json, the description of a checkpoint, as untrusted input.

A checkpoint may be damaged, or made to deceive. Nothing of a size that stands in it is allocated
before these checks, the cheapest first:

    checksum     index.json has the SHA-256 that stands in index.json.sha256
    types        each field has the type and the range that `Index` gives it
    files        each file is there, as long as recorded; no other safetensors file is there
    sizes        the tensors are no larger than the files, the model no larger than its tensors
    slices       each slice in a file lies inside a tensor of the index, with the same dtype

`checkpoint.verify` compares the checksums of the files, and so reads every byte. The index is JSON,
which executes nothing; the metadata file of torch.distributed.checkpoint is a pickle, and is
neither written nor read.

    python -m run.checkpoint show CKPT      the index of a checkpoint, after all checks but the last
"""

import contextlib
import dataclasses
import hashlib
import re
from math import prod
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open

from base import json_files
from base.errors import InputError
from base.model_config import MoEConfig, least_parameters, with_modules
from run import world

FORMAT = 2
# torch's name of a dtype, as in an index -> its name in a safetensors file
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class CheckpointError(InputError):
    """A checkpoint that cannot be written or read. The message says which, and why."""


class Damaged(CheckpointError):  # noqa: N818 (reads well: except checkpoint.Damaged)
    """A checkpoint that is not what was written. An earlier one may be whole."""


# --- the index ------------------------------------------------------------------------------------

# JSON numbers are exact up to 2^53.
Count = Annotated[int, Meta(ge=0, le=2**53)]
FileName = Annotated[str, Meta(max_length=255, pattern="^[^/]+$")]


class FileRecord(TypedDict):
    bytes: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ScalerRecord(TypedDict):
    scale: Annotated[float, Meta(ge=1)]
    good_steps: Count
    tolerance: Count
    # Older checkpoints lack it.
    searching: NotRequired[bool]


class OptimizerRecord(TypedDict):
    updates: Count
    skipped: Count
    scaler: NotRequired[ScalerRecord | None]


# A float32 that is a maximum of absolute values.
Maximum = Annotated[float, Meta(ge=0, le=torch.finfo(torch.float32).max)]


class FP8Record(TypedDict):
    # [steps, layers, matrices, operands], as of fp8_scaling.Scaling
    history: list[list[list[list[Maximum]]]]


class RunRecord(TypedDict):
    tokenizer: NotRequired[str | None]
    global_batch_size: NotRequired[Count]


class TakenRecord(TypedDict):
    """What a run has taken from its data, as of run/blend.py."""

    blend: str
    start: Count
    before: list[Count]
    # corpus -> samples
    corpora: dict[str, Count]


class Index(TypedDict):
    """The fields of index.json that the code relies on; others may stand beside them. The fields of
    `model` are checked by MoEConfig."""

    format: int
    step: Count
    # name -> (dtype, global shape)
    tensors: dict[str, tuple[str, list[Count]]]
    files: dict[FileName, FileRecord]
    config: RunRecord
    model: dict[str, Any]
    tokens: NotRequired[Count | None]
    samples: NotRequired[Count | None]
    taken: NotRequired[TakenRecord | None]
    corpus: NotRequired[str | None]
    optimizer: NotRequired[OptimizerRecord | None]
    fp8: NotRequired[FP8Record | None]


def read_index(path: Path) -> dict:
    """The checked index of the checkpoint at `path`, whose files have their recorded lengths.
    Raises CheckpointError, or Damaged."""
    path = Path(path)
    try:
        index = json_files.parse(read_signed(path), dict[str, Any], f"{path}/index.json")
    except json_files.JSONError as e:
        raise Damaged(str(e)) from None
    check_index(index, f"{path}/index.json")
    check_files(path, index["files"])
    return index


def read_signed(path: Path) -> bytes:
    """The bytes of index.json, compared with the checksum beside it. Raises Damaged."""
    try:
        text = json_files.read_bytes(path / "index.json")
        checksum = json_files.read_bytes(path / "index.json.sha256")
    except FileNotFoundError as e:
        rule = f"it has no {Path(e.filename).name}"
        if (path / "config.json").exists():
            rule += "; python -m inference.huggingface import makes one of a Hugging Face folder"
        raise Damaged(f"{path} is not a checkpoint of this project, or damaged: {rule}") from None
    except OSError as e:
        raise Damaged(f"{path}/index.json cannot be read ({e})") from None
    if checksum != f"{hashlib.sha256(text).hexdigest()}  index.json\n".encode():
        raise Damaged(f"{path}: index.json, or index.json.sha256, is damaged: they do not fit")
    return text


@contextlib.contextmanager
def describing(where: str):
    """Turn an error about the content of an index into a CheckpointError that names the index."""
    try:
        yield
    except (TypeError, ValueError) as e:
        rule = f"does not describe a model of this project ({json_files.one_line(e)})"
        raise CheckpointError(f"{where} {rule}") from None


def check_index(index: dict, where: str) -> None:
    """Check the types and ranges of an index, and that its tensors are no larger than its files.
    where: begins the messages. Raises CheckpointError."""
    if index.get("format") != FORMAT or not {"tensors", "files", "model"} <= index.keys():
        rule = f"is not the index of a checkpoint of this project (format {FORMAT})"
        raise CheckpointError(f"{where} {rule}")
    with describing(where):
        json_files.convert(index, Index, "index.json")
        if index["model"] and command_of(index["model"]) == "train.py":
            MoEConfig(**index["model"])
    tensor_bytes = 0
    for name, (dtype, shape) in index["tensors"].items():
        if dtype not in DTYPES:
            rule = f"{name} is {dtype}; a checkpoint has {', '.join(DTYPES)}"
            raise CheckpointError(f"{where}: {rule}")
        tensor_bytes += prod(shape) * getattr(torch, dtype).itemsize
    file_bytes = sum(file["bytes"] for file in index["files"].values())
    if tensor_bytes > file_bytes:
        rule = f"would have {tensor_bytes:,} bytes, and its files have {file_bytes:,}"
        raise CheckpointError(f"{where}: its tensors {rule}")


def check_files(path: Path, files: dict[str, FileRecord]) -> None:
    """Check that the safetensors files of a folder are those of the index, with their lengths.
    Raises Damaged, naming the file."""
    for name, record in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != record["bytes"]:
            what = "missing" if size is None else f"{size} bytes long, not {record['bytes']}"
            raise Damaged(f"{file} is {what}: the checkpoint is damaged")
    for file in path.glob("*.safetensors"):
        if file.name not in files:
            raise Damaged(f"{file} is not in the checkpoint's index: it was put there later")


# --- the model in it ------------------------------------------------------------------------------

# A field that the models of one command alone have -> this command (models/).
OTHER_MODELS = {
    "token_types": "-m models.bert",
    "buckets": "-m models.t5",
    "text_hidden_size": "-m models.clip",
    "class_tokens": "-m models.vit",
    "caption_layers": "-m models.unet",
    "source_channels": "-m models.dit",
    "latent_channels": "-m models.autoencoder",
    "vision_layers": "-m models.multimodal",
}
# A command that trains a model -> what writes with its adapters, and with its prompts.
WRITERS = {
    "train.py": ("generate.py", "inference.prompt_tuning"),
    "-m models.t5": ("python -m models.generate_t5", "python -m models.generate_t5 --prompts"),
}


def fixed_fields(config: MoEConfig, weights_only: bool = False) -> dict[str, Any]:
    """The fields of a model that a checkpoint must agree with, and their values.

    Free are the fields on which no weight's shape or meaning depends: dropout, initial values, the
    attention kernel, coefficients of a router's losses, modules behind the last layer and, where
    positions are computed, the sequence lengths. weights_only: training begins anew from the
    weights, and may choose another router, longer sequences (YaRN) or other labels."""
    free = "dropout attention init_std mtp_layers bias_rate"
    free += " router_temperature capacity_factor aux_loss z_loss"
    if config.positions != "learned":
        free += " seq_length target_length"
    if weights_only:
        free += " router router_topk classes rotary_scaling rotary_factor rotary_low_frequency"
        free += " rotary_high_frequency rotary_original_length rotary_attention"
    fields = dataclasses.asdict(config).items()
    return {name: value for name, value in fields if name not in free.split()}


def model_fields(saved: dict[str, Any]) -> dict[str, Any]:
    """The fields of the model in an index. Those that an older version lacked have their defaults.
    Fields that are no model's stay as they are."""
    try:
        return dataclasses.asdict(MoEConfig(**saved))
    except (TypeError, ValueError):
        return saved


def command_of(fields: dict) -> str:
    """The command that trains a model with these fields of its configuration."""
    return next((command for field, command in OTHER_MODELS.items() if field in fields), "train.py")


def read_model(
    path: Path, value_head: bool = False, shape_class: type[MoEConfig] = MoEConfig
) -> tuple[MoEConfig, dict]:
    """(configuration, index) of a checkpoint of a whole model, whose tensors fit its configuration.
    value_head: whether a reward model will do. shape_class: of the configuration. Raises
    CheckpointError."""
    index = read_index(path)
    shapes = {
        name: shape for name, (_, shape) in index["tensors"].items() if name.startswith("model.")
    }
    with_adapter, with_prompts = WRITERS.get(command_of(index["model"]), ("", ""))
    gives_numbers = "model.head.value.weight" in shapes and not value_head
    holds = ""
    if gives_numbers and "labels" in index:
        holds = (
            "a classifier (finetune.classify), which labels texts, and writes none; name the model"
            " that it began as, or python -m models.use_bert predict"
        )
    elif "adapter" in index:
        use = f"use this one with it: {with_adapter} --checkpoint BASE --adapter {path}, or "
        holds = (
            "an adapter alone; name the model that it was trained on instead, and"
            f" {use if with_adapter else ''}make one model of both: python -m inference.adapters"
            f" merge BASE {path} OUT"
        )
    elif gives_numbers:
        holds = (
            "a reward model, which gives a number for an answer, and no next token; name the model"
            " that it began as. python -m finetune.preference --method reward goes on from it, and"
            " python -m finetune.reinforcement --reward learns from what it says"
        )
    elif any(name.startswith("model.embedding.tokens.prompts.") for name in shapes):
        use = f"give the prompt file to {with_prompts}"
        holds = f"prompts alone; name the model that they were learned for, and {use}"
    if holds:
        raise CheckpointError(f"{path} holds {holds}")
    check_command(path, index["model"], shape_class)
    with describing(f"{path}/index.json"):
        config = shape_class(**index["model"])
        check_sizes(config, shapes)
    return config, index


def check_command(path: Path, fields: dict, wanted: MoEConfig | type[MoEConfig]) -> None:
    """Check that the model at `path`, with these fields of its configuration, is of the wanted
    type. Raises CheckpointError."""
    own, needed = command_of(fields), command_of(wanted.__dataclass_fields__)
    if own != needed:
        rule = f"holds a model of {own}, and this command needs one of {needed}"
        raise CheckpointError(f"{path} {rule}")


def check_sizes(config: MoEConfig, shapes: dict[str, list[int]]) -> None:
    """Check coarsely that a configuration can belong to these tensors, before a model of its size
    is built; smaller differences show when tensors are matched. shapes: name -> shape; a name up to
    its first number is its layer's, also in Hugging Face's names. Raises ValueError."""
    layers = [re.match(r".*?\.\d{1,6}\.", name) for name in shapes]
    num_layers = len({layer[0] for layer in layers if layer})
    if with_modules(config).num_layers + config.layers_beside != num_layers:
        rule = f"there are tensors of {num_layers} layers"
        raise ValueError(f"num_layers {config.num_layers}: {rule}")
    needed = least_parameters(config)
    present = sum(prod(shape) for shape in shapes.values())
    if needed > 2 * present:
        fields = ("hidden_size", "ffn_hidden_size", "vocab_size", "seq_length", "num_experts")
        sizes = ", ".join(f"{field} {getattr(config, field)}" for field in fields)
        rule = f"a model of {needed:,} parameters or more, and its tensors have {present:,}"
        raise ValueError(f"{sizes}: {rule}")


def check_room(what: str, needed: int, device) -> None:
    """Check that a device has `needed` bytes in all, before they are allocated: a CPU without
    memory ends any process, not always this one. Raises CheckpointError."""
    device = torch.device(device)
    total = world.memory(device.type, 1)
    if needed > total:
        raise CheckpointError(f"{what}: takes {needed:,} bytes, and {device} has {total:,} in all")


# --- the slices in its files ----------------------------------------------------------------------


def read_header(file: Path) -> dict[str, tuple[str, list[int], list[int]]]:
    """Tensor -> (dtype as safetensors names it, shape, offset in the global tensor) of one file.
    Raises CheckpointError."""
    header = {}
    try:
        with safe_open(file, "pt") as f:
            # Written by torch.distributed.checkpoint: {name: {"saved_offsets": [..]}}
            offsets = (f.metadata() or {}).get("DCP_SHARDING_INFO", "{}").encode()
            starts = json_files.parse(offsets, dict[str, dict[str, list[Count]]], str(file))
            for name in f.keys():
                part = f.get_slice(name)
                shape = part.get_shape()
                start = starts[name]["saved_offsets"] if starts else [0] * len(shape)
                header[name] = (part.get_dtype(), shape, start)
        return header
    except (SafetensorError, OSError, KeyError, json_files.JSONError) as e:
        why = f"damaged, or not safetensors ({json_files.one_line(e)})"
        raise CheckpointError(f"{file} cannot be loaded: {why}") from None


def check_slices(file: Path, index: dict) -> None:
    """Check that each slice in a file lies inside a tensor of the index, with the same dtype: torch
    would convert another one silently. Raises CheckpointError."""
    for name, (dtype, shape, start) in read_header(file).items():
        global_dtype, global_shape = index["tensors"].get(name, (None, []))
        inside = len(start) == len(shape) == len(global_shape) and all(
            offset + length <= size for offset, length, size in zip(start, shape, global_shape)
        )
        if dtype != DTYPES.get(global_dtype) or not inside:
            there = f"{name} is {dtype} {shape} from {start} on there"
            rule = f"{there}, and {global_dtype} {global_shape} in the index"
            raise CheckpointError(f"{file} cannot be loaded: {rule}")
