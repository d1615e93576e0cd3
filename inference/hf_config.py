"""config.json of a Hugging Face folder and MoEConfig: the one from the other, by the tables of
architectures.py.

    rms_norm_eps 1e-6     <->  norm_eps 1e-6         a number under another name
    attention_bias true   <->  attention_bias all    a choice
    hidden_act silu                                  what is computed here; all else is refused

A class of transformers describes a model if its MoEConfig, written as that class's config.json and
read again, is the same: nothing else says which class a model is exported as.
"""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from base import json_files
from base.model_config import FieldError, MoEConfig
from inference.architectures import ARCHITECTURES, Architecture, HuggingFaceError
from run.checkpoint_index import CheckpointError, command_of, fixed_fields, read_index, read_model
from run.presets import why_not_exported

# What null means, where it is not what absence means.
NULLS = {"sliding_window": 0, "num_key_value_heads": 0, "q_lora_rank": 0}
# Fields that are never 0 there, while 0 has a meaning in MoEConfig.
NOT_ZERO = {
    "num_key_value_heads": "as many as heads",
    "sliding_window": "no window",
    "num_decoder_layers": "as many as num_layers",
}
# Layers without and with a sliding window.
LAYER_TYPES = ("full_attention", "sliding_attention")
# rope_type -> {field of rope_parameters: field of GPTConfig}
ROPE = {"factor": "rotary_factor", "original_max_position_embeddings": "rotary_original_length"}
LOW, HIGH = "rotary_low_frequency", "rotary_high_frequency"
ROPES = {
    "llama3": ROPE | {"low_freq_factor": LOW, "high_freq_factor": HIGH},
    "yarn": ROPE | {"beta_slow": LOW, "beta_fast": HIGH, "attention_factor": "rotary_attention"},
}


@contextlib.contextmanager
def refused(*errors: type[Exception], where: str = ""):
    """These errors become HuggingFaceErrors. where: what stands before their words."""
    try:
        yield
    except errors as e:
        raise HuggingFaceError(f"{where}{str(e) or type(e).__name__}") from None


def read_json(path: Path, schema=dict[str, Any]):
    """The content of a JSON file as `schema`. Raises HuggingFaceError."""
    with refused(json_files.JSONError):
        return json_files.read(path, schema)


# --- config.json -> MoEConfig ---------------------------------------------------------------------


def to_model_config(hf_config: dict) -> MoEConfig:
    """The model that a config.json describes. Raises HuggingFaceError, naming the field, for what
    is not computed here."""
    return read_fields(hf_config, find_architecture(hf_config))


def find_architecture(hf_config: dict) -> Architecture:
    """The class that a config.json names. Raises HuggingFaceError."""
    names = hf_config.get("architectures")
    known = ARCHITECTURES
    if names not in [[architecture.name] for architecture in known]:
        known += other_architectures()
    for architecture in known:
        if names == [architecture.name]:
            return architecture
    *most, last = (architecture.name for architecture in known)
    raise HuggingFaceError(
        f"architectures is {json.dumps(names)}; this project has {', '.join(most)} and {last}"
    )


def other_architectures() -> tuple[Architecture, ...]:
    """Those of models/, which only folders and checkpoints of such a model load."""
    from models import huggingface, picture_huggingface

    return huggingface.ARCHITECTURES + picture_huggingface.ARCHITECTURES


def read_fields(hf_config: dict, architecture: Architecture) -> MoEConfig:
    """to_model_config, of a class. Raises HuggingFaceError."""
    hf_config = architecture.flat(hf_config)
    check_computed(hf_config, architecture)
    fields = dict(architecture.constants)
    for theirs, ours in architecture.fields.items():
        number = number_type(ours, architecture.shape_class)
        value = read_number(hf_config, theirs, number, architecture.missing)
        if fields.setdefault(ours, value) != value and ours != "dropout":
            raise HuggingFaceError(f"{theirs} is {value}; another field says {fields[ours]}")
        # Three fields of theirs are our dropout: the largest counts.
        fields[ours] = max(value, fields[ours])
    for theirs, (ours, values) in architecture.choices.items():
        value = values[one_of(hf_config, theirs, tuple(values))]
        # Some of their fields say the same thing twice.
        if fields.setdefault(ours, value) != value and theirs in hf_config:
            raise HuggingFaceError(
                f"{theirs} is {json.dumps(hf_config[theirs])}; other fields say that {ours} is"
                f" {fields[ours]}"
            )
    if architecture.rotary:
        fields |= rotary_fields(hf_config, architecture.missing)
    if architecture.has_windows:
        fields |= window_fields(hf_config, fields["num_layers"])
    if (field := architecture.num_experts) and not fields["num_experts"]:
        raise HuggingFaceError(f"{field} is 0; a {architecture.name} has experts")
    fields = architecture.read(fields)
    # Our fields whose number is that of theirs; others, as head_dim of a DeepSeek, are computed.
    names = {
        ours: theirs
        for theirs, ours in architecture.fields.items()
        if hf_config.get(theirs) == fields[ours]
    }
    try:
        config = architecture.shape_class(**fields)
    except FieldError as e:
        raise HuggingFaceError(e.message(lambda name: names.get(name, name))) from None
    if config.num_experts and config.router_topk == 1 and config.normalise_topk is None:
        gates = "with num_experts_per_tok 1 a gate is 1 there, where here it is the probability"
        raise HuggingFaceError(f"router_topk 1: {gates}")
    return config


def check_computed(hf_config: dict, architecture: Architecture) -> None:
    """Raises HuggingFaceError for a field with a value that is not computed here."""
    if hf_config.get("quantization_config"):
        quantized = hf_config["quantization_config"]
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise HuggingFaceError(
            f"quantization_config is there ({method}): the weights are packed in fewer bits, and"
            " here a model has its own; import the folder that it was made from"
        )
    for field, absent in NOT_ZERO.items():
        if hf_config.get(field) == 0 and field in architecture.fields:
            raise HuggingFaceError(f"{field} is 0; {absent} would be null, or no field")
    for field, values in architecture.computed.items():
        one_of(hf_config, field, values)
    start, padding = hf_config.get("decoder_start_token_id"), hf_config.get("pad_token_id", 0)
    if "is_encoder_decoder" in architecture.computed and start not in (None, padding):
        raise HuggingFaceError(
            f"decoder_start_token_id is {json.dumps(start)}; here a decoder begins with the padding"
            f" token, {json.dumps(padding)}"
        )
    slices = hf_config.get("pretraining_tp", 1)
    if hf_config.get("slow_but_exact") and slices != 1:
        raise HuggingFaceError(
            f"slow_but_exact is true with pretraining_tp {json.dumps(slices)}; there transformers"
            " leaves out biases, and this project has them: false would fit"
        )
    layers = [] if architecture.has_windows else hf_config.get("layer_types") or []
    if any(layer != "full_attention" for layer in layers):
        raise HuggingFaceError(
            f"layer_types is {json.dumps(layers)}; there is one attention for all layers here"
        )


def window_fields(hf_config: dict, num_layers: int) -> dict:
    """The window of a Qwen, in the layers of layer_types, or else from max_window_layers on."""
    window = read_number(hf_config, "sliding_window", int, {"sliding_window": 4096})
    first = read_number(hf_config, "max_window_layers", int, {"max_window_layers": 28})
    types = hf_config.get("layer_types") or [LAYER_TYPES[n >= first] for n in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {*LAYER_TYPES}:
        raise HuggingFaceError(
            f"layer_types is {json.dumps(types)}; {' or '.join(LAYER_TYPES)} for each layer"
        )
    pattern = "".join(str(LAYER_TYPES.index(name)) for name in types)
    if not (hf_config.get("use_sliding_window") and window and "1" in pattern):
        return {}
    # The shortest part that repeats.
    n = next(
        n for n in range(1, num_layers + 1) if (pattern[:n] * num_layers)[:num_layers] == pattern
    )
    return {"sliding_window": window, "window_pattern": pattern[:n]}


def one_of(hf_config: dict, field: str, values: tuple):
    """The value of a field, the first of `values` where it is absent. Raises HuggingFaceError for
    another one."""
    value = hf_config.get(field, values[0])
    if value not in values:
        allowed = " or ".join(map(json.dumps, values))
        raise HuggingFaceError(f"{field} is {json.dumps(value)}; this project has only {allowed}")
    return value


def read_number(hf_config: dict, field: str, number: type, missing: dict[str, float]) -> float:
    """A field of config.json, as int or float. missing: field -> what its absence means. Raises
    HuggingFaceError."""
    value = hf_config.get(field)
    if value is None:
        value = missing.get(field)
        if field in hf_config:
            value = NULLS.get(field, value)
    if value is None:
        raise HuggingFaceError(f"{field} is missing")
    # type(), because true is an int; NaN fails the comparison.
    if type(value) not in (int, number) or not 0 <= value < 1e30:
        expected = "an integer" if number is int else "a number"
        raise HuggingFaceError(
            f"{field} is {json.dumps(value)}; this project takes {expected}, 0 or more"
        )
    return number(value)


def number_type(field: str, shape_class: type[MoEConfig] = MoEConfig) -> type:
    """int or float: the type of a field of a configuration."""
    return int if shape_class.__dataclass_fields__[field].type is int else float


def rotary_fields(hf_config: dict, missing: dict[str, float]) -> dict[str, float]:
    """The base and the scaling of rotary positions, where transformers 4 (top level, rope_scaling)
    or 5 (rope_parameters) writes them. Raises HuggingFaceError."""
    field = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    rope = hf_config.get(field) or {}
    rope_type = None
    # A Nemotron rotates a share of each head.
    has_share = "partial_rotary_factor" in missing
    if isinstance(rope, dict) and (has_share or rope.get("partial_rotary_factor", 1.0) == 1.0):
        rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", *ROPES) or not rope.get("truncate", True):
        raise HuggingFaceError(
            f"{field} is {json.dumps(rope)}; this project has the default rotary positions, and"
            " those of rope_type llama3 and yarn, the last with truncate true"
        )
    outside, inside = hf_config.get("rope_theta"), rope.get("rope_theta")
    if None not in (outside, inside) and outside != inside:
        raise HuggingFaceError(
            f"rope_theta is {json.dumps(outside)}, and {json.dumps(inside)} in {field}; they must"
            " be equal, or one of them left out"
        )
    theta = {"rope_theta": outside} | rope
    fields = {"rotary_base": read_number(theta, "rope_theta", float, missing)}
    if has_share:
        both = hf_config | rope
        fields["rotary_share"] = read_number(both, "partial_rotary_factor", float, missing)
    if "mscale_all_dim" in missing:
        fields["rotary_mscale"] = read_number(rope, "mscale_all_dim", float, missing)
    if rope_type in ROPES:
        fields["rotary_scaling"] = rope_type
        missing = dict(beta_slow=1.0, beta_fast=32.0, attention_factor=yarn_attention(rope))
        for theirs, ours in ROPES[rope_type].items():
            fields[ours] = read_number(rope, theirs, number_type(ours), missing)
    return fields


def yarn_attention(rope: dict) -> float:
    """The attention_factor that DeepSeek's two mscale say together; 0: the default."""
    scales = [read_number(rope, name, float, {name: 0.0}) for name in ("mscale", "mscale_all_dim")]
    grown = math.log(read_number(rope, "factor", float, {"factor": 1.0}) or 1.0)
    return (0.1 * scales[0] * grown + 1) / (0.1 * scales[1] * grown + 1) if all(scales) else 0.0


# --- MoEConfig -> config.json ---------------------------------------------------------------------


def read_any_model(path: Path) -> tuple[MoEConfig, dict]:
    """(configuration, index) of a checkpoint, of a decoder or a model of models/. Raises
    CheckpointError."""
    index = read_index(path)
    if "model.head.scores.weight" in index["tensors"]:
        rule = "only models that fill in words are exported"
        raise CheckpointError(f"{path} holds a classifier (models.classify); {rule}")
    command = command_of(index["model"])
    classes = [MoEConfig]
    if command != "train.py":
        classes = [architecture.shape_class for architecture in other_architectures()]
    own = [c for c in classes if command_of(c.__dataclass_fields__) == command]
    if not own:
        rule = "no class of transformers is one, so it is neither exported nor merged"
        raise CheckpointError(f"{path} holds a model of {command}: {rule}")
    return read_model(path, shape_class=own[0])


def architecture_of(config: MoEConfig) -> Architecture:
    """The class of transformers that describes this model. Raises HuggingFaceError, naming the
    fields for which the nearest one does not."""
    other = hasattr(config, "build")
    whole = config if other else MoEConfig(**dataclasses.asdict(config))
    differing = {}
    for architecture in other_architectures() if other else ARCHITECTURES:
        if not isinstance(whole, architecture.shape_class):
            continue
        # A DeepSeek may have dense layers alone.
        with_experts = whole.num_experts > 0
        if bool(architecture.num_experts) != with_experts and not whole.kv_rank:
            continue
        differing[architecture.name] = differences(whole, architecture)
        if not differing[architecture.name]:
            return architecture
    nearest = min(differing, key=lambda name: len(differing[name]))
    others = ", ".join(differing[nearest])
    raise HuggingFaceError(f"no class of transformers is this model: {nearest} has no {others}")


def differences(config: MoEConfig, architecture: Architecture) -> list[str]:
    """The fields of a model, and their values, that do not come back when this class's config.json
    is written and read."""
    try:
        described = fixed_fields(read_fields(write_fields(config, architecture), architecture))
    except HuggingFaceError as e:
        return [str(e)]
    fields = fixed_fields(config)
    # It only chooses defaults of other fields, and these are compared.
    del fields["llama"]
    return [f"{name} {value}" for name, value in fields.items() if described.get(name) != value]


def write_fields(config: MoEConfig, architecture: Architecture) -> dict:
    """A choice that the class does not have gets the class's default: `differences` sees it."""
    hf_config = {"architectures": [architecture.name], "model_type": architecture.model_type}
    hf_config |= {theirs: getattr(config, ours) for theirs, ours in architecture.fields.items()}
    for theirs, (ours, values) in architecture.choices.items():
        inverse = {value: key for key, value in values.items()}
        hf_config[theirs] = inverse.get(getattr(config, ours), next(iter(values)))
    hf_config |= {field: values[0] for field, values in architecture.computed.items()}
    for field, value in NULLS.items():
        if hf_config.get(field) == value:
            hf_config[field] = None
    if architecture.has_windows and config.sliding_window:
        windows = [config.window_of(n) > 0 for n in range(config.num_layers)]
        hf_config |= dict(use_sliding_window=True, sliding_window=config.sliding_window)
        hf_config |= dict(max_window_layers=0, layer_types=[LAYER_TYPES[x] for x in windows])
    if architecture.rotary:
        hf_config |= write_rotary(config, "partial_rotary_factor" in architecture.missing)
    return architecture.write(hf_config, config)


def write_rotary(config: MoEConfig, has_share: bool) -> dict:
    """The fields for transformers 5, and those for 4. has_share: whether a share of each head is
    named that is rotated."""
    theta = {"rope_theta": config.rotary_base}
    if has_share:
        theta["partial_rotary_factor"] = config.rotary_share
    if config.rotary_factor == 1:
        return theta | {"rope_parameters": {"rope_type": "default"} | theta}
    rope = {theirs: getattr(config, ours) for theirs, ours in ROPES[config.rotary_scaling].items()}
    rope |= {"rope_type": config.rotary_scaling}
    if not config.rotary_attention:
        rope.pop("attention_factor", None)
    if config.rotary_mscale:
        rope["mscale_all_dim"] = config.rotary_mscale
    return theta | {"rope_parameters": rope | theta, "rope_scaling": rope}


def to_hf_config(config: MoEConfig) -> dict:
    """config.json, for transformers 4 and 5. Raises HuggingFaceError for a model that it cannot
    describe."""
    if why := why_not_exported(config):
        raise HuggingFaceError(why)
    architecture = architecture_of(config)
    hf_config = architecture.nested(write_fields(config, architecture))
    if hasattr(config, "build"):
        return hf_config
    # The end-of-text token of bytes, and of GPT-2's vocabulary.
    end_of_text = {257: 256, 50257: 50256}.get(config.vocab_size)
    return hf_config | {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
