r"""Folders of the library `peft` in and out: LoRA and IA3, of every class of architectures.py.

    adapter_config.json          which method, rank, scale, and which modules
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ..
    chat_template.jinja          the chat template of a run on conversations

    ours                          theirs (LoRA)                     theirs (IA3)
    ..lora.a     [r, in]          ..lora_A.weight  [r, in]
    ..lora.b     [out, r]         ..lora_B.weight  [out, r]
    ..ia3.scale  [out] or [in]                                      ..ia3_l  [out, 1] or [1, in]

The names of modules are those of the models (exchange/architectures.py). In a GPT-2, query, key and
value are one module, c_attn. Three LoRAs of rank r are one of rank 3 r there, whose B has blocks:

        [B_q          ]   [A_q]
    B = [     B_k     ]   [A_k] = A       the scale stays: 3 α / 3 r
        [          B_v]   [A_v]

Import takes the blocks apart. A LoRA of c_attn that peft learned has one A for all three: it
becomes three with this A. So both directions give the same sums, and export, then import, gives the
same bits. An IA3 of c_attn scales query too; it is accepted where it scales query by 1. A BLOOM has
such a module too, query_key_value, whose rows stand head by head: the query of head 0, its key, its
value, the query of head 1.

A folder that says what adapters.py does not compute is refused, and so is adapter_model.bin, a
pickle: to load it would execute what it says.

Not covered: experts, whose matrices transformers 5 holds in one parameter, and bottleneck adapters,
which peft does not have.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import checkpoint
import huggingface
from checkpoints.tokenizer_files import beside
from corpus.tokenizer import CHAT_TEMPLATE
from exchange.architectures import BLOOM, GPT2
from exchange.hf_config import architecture_of
from huggingface import HuggingFaceError, building, read_json
from model_config import FieldError
from routers import MoEConfig
from tuning.adapter_config import LINEARS, TARGETS, AdapterConfig
from tuning.adapter_files import Adapter, as_json, check_base, open_adapter, shapes_of
from tuning.frozen_base import fingerprint

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
# class -> its module that holds query, key and value
FUSED = {"GPT2LMHeadModel": "c_attn", "BloomForCausalLM": "query_key_value"}
# what messages call the methods that peft has
NAMES = {"lora": "LoRA", "ia3": "IA3"}
# of adapter_config.json: what import reads, and what changes nothing here
READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern"}
READ |= {"alpha_pattern", "bias", "init_lora_weights", "target_modules", "feedforward_modules"}
HARMLESS = {"auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type"}
HARMLESS |= {"inference_mode", "fan_in_fan_out", "megatron_core", "qalora_group_size"}
HARMLESS |= {"init_ia3_weights", "eva_config", "exclude_modules"}


class Place(NamedTuple):
    """Where the adapter of one of our linear layers lies in theirs.

    layer: its number; target: of LINEARS; third: of FUSED, 0 query, 1 key, 2 value; heads: where
    the rows of FUSED stand head by head, how many heads."""

    layer: int
    target: str
    third: int | None
    heads: int = 0


def ours_of(layer: int, target: str) -> str:
    return f"blocks.{layer}.{LINEARS[target]}.{target}"


def places(config: MoEConfig) -> dict[str, list[Place]]:
    """Their module -> which of our linear layers it holds. Without those of experts."""
    found = {}
    architecture = architecture_of(config)
    for layer in range(config.num_layers):
        for target, part in LINEARS.items():
            location = architecture.modules.get(f"blocks.*.{part}.{target}")
            if location and "#" not in location.module:
                module = location.module.replace("*", str(layer))
                by_head = architecture is BLOOM and location.third is not None
                heads = config.num_heads if by_head else 0
                place = Place(layer, target, location.third, heads)
                found.setdefault(module, []).append(place)
    return found


def to_their_rows(rows: Tensor, place: Place) -> Tensor:
    """Rows of query, then key, then value, as their module has them. [3 a d, ..]"""
    if not place.heads:
        return rows
    return rows.unflatten(0, (3, place.heads, -1)).transpose(0, 1).flatten(0, 2)


def to_our_rows(rows: Tensor, place: Place) -> Tensor:
    """The inverse."""
    if not place.heads:
        return rows
    return rows.unflatten(0, (place.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def base_of(path: str) -> tuple[str | Path, MoEConfig]:
    """(path, configuration) of --base. Raises CheckpointError or HuggingFaceError."""
    if huggingface.is_folder(path):
        return path, huggingface.open_folder(Path(path))[0]
    path = checkpoint.find(path)
    return path, checkpoint.read_model(path)[0]


# --- export ---------------------------------------------------------------------------------------


def export_adapter(path: str, base: str, hf_dir: str) -> str:
    """Write an adapter as a folder for PeftModel.from_pretrained. Returns a summary. Raises
    CheckpointError or HuggingFaceError."""
    adapter = open_adapter(path)
    if adapter.config.peft == "adapter":
        raise HuggingFaceError(f"{adapter.path}: peft has LoRA and IA3, but no bottleneck adapters")
    base, config = base_of(base)
    check_base(adapter, base, config)
    values = adapter.values()
    collect = lora_tensors if adapter.config.peft == "lora" else ia3_tensors
    tensors = {}
    modules = set()
    for module, held in places(config).items():
        found = collect(values, held)
        modules |= {module} if found else set()
        tensors |= {f"{PREFIX}{module}.{name}": t.contiguous() for name, t in found.items()}
        for place in held:
            for part in ("lora.a", "lora.b", "ia3.scale"):
                values.pop(f"{ours_of(place.layer, place.target)}.{part}", None)
    if values:
        raise HuggingFaceError(
            f"{adapter.path}: {next(iter(values))} belongs to experts, for which peft has no"
            " place; --peft-targets query key value output would have one"
        )
    # of the first layer, without its number: mlp.c_proj, self_attn.q_proj
    targets = sorted({".".join(module.split(".")[-2:]) for module in modules})
    told = their_config(adapter, targets, base if huggingface.is_folder(base) else None)
    with building(hf_dir) as folder:
        metadata = {"format": "pt", "targets": " ".join(targets_in(adapter))}
        save_file(tensors, folder / WEIGHTS, metadata)
        # safetensors makes files that only their owner can read; these are to be given away
        os.chmod(folder / WEIGHTS, 0o644)
        (folder / "adapter_config.json").write_text(json.dumps(told, indent=1))
        if template := beside(adapter.path, CHAT_TEMPLATE):
            shutil.copyfile(template, folder / CHAT_TEMPLATE)
    return f"{NAMES[adapter.config.peft]} of {', '.join(targets)}, {len(tensors)} tensors"


def targets_in(adapter: Adapter) -> list[str]:
    """The linear layers that have an adapter."""
    return [name for name in LINEARS if any(f".{name}." in each for each in adapter.shapes)]


def lora_tensors(values: dict[str, Tensor], held: list[Place]) -> dict[str, Tensor]:
    """A and B of one of their modules, as peft names them; none where there is no adapter."""
    pairs = {}
    for place in held:
        name = ours_of(place.layer, place.target)
        if f"{name}.lora.a" in values:
            pairs[place.third] = values[f"{name}.lora.a"], values[f"{name}.lora.b"]
    if not pairs:
        return {}
    a = torch.cat([a for a, _ in pairs.values()])  # [n r, in]
    if None in pairs:
        return {"lora_A.weight": a, "lora_B.weight": pairs[None][1]}
    h, r = pairs[next(iter(pairs))][1].shape
    b = torch.zeros(3 * h, len(a))  # [3 h, n r]
    for i, (third, (_, part)) in enumerate(pairs.items()):
        b[third * h : (third + 1) * h, i * r : (i + 1) * r] = part
    return {"lora_A.weight": a, "lora_B.weight": to_their_rows(b, held[0])}


def ia3_tensors(values: dict[str, Tensor], held: list[Place]) -> dict[str, Tensor]:
    scales = {}
    for place in held:
        scale = values.get(f"{ours_of(place.layer, place.target)}.ia3.scale")
        if scale is not None:
            scales[place] = scale
    if not scales:
        return {}
    place, scale = next(iter(scales.items()))
    if place.third is None:
        return {"ia3_l": scale[None] if place.target == "down" else scale[:, None]}
    whole = torch.ones(3, len(scale))
    for place, scale in scales.items():
        whole[place.third] = scale
    return {"ia3_l": to_their_rows(whole.view(-1, 1), place)}  # [3 h, 1]


def their_config(adapter: Adapter, targets: list[str], base: str | Path | None) -> dict[str, Any]:
    """adapter_config.json"""
    config = adapter.config
    architecture = architecture_of(adapter.model)
    told = {
        "peft_type": config.peft.upper(),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base) if base else None,
        "inference_mode": True,
        "target_modules": targets,
        # Conv1D has its weight as [in, out]
        "fan_in_fan_out": architecture is GPT2,
    }
    if config.peft == "ia3":
        down = architecture.modules["blocks.*.mlp.down"].module.split(".*.")[-1]
        inner = [name for name in targets if name == down]
        return told | {"feedforward_modules": inner}
    told |= {"r": config.lora_rank, "lora_alpha": number(config.lora_alpha), "bias": "none"}
    told |= {"lora_dropout": config.lora_dropout}
    n = len({"query", "key", "value"} & set(targets_in(adapter)))
    fused = FUSED.get(architecture.name)
    if fused and n:
        told["rank_pattern"] = {fused: n * config.lora_rank}
        told["alpha_pattern"] = {fused: number(n * config.lora_alpha)}
    return told


def number(x: float) -> int | float:
    """16.0 as 16: peft's own folders have an integer."""
    return int(x) if x == int(x) else x


# --- import ---------------------------------------------------------------------------------------


def import_adapter(hf_dir: str, base: str, out: str) -> str:
    """Write the adapter in a folder of peft as a checkpoint at `out`, which holds it as a run of
    --peft would. Returns a summary. Raises CheckpointError or HuggingFaceError."""
    hf_dir = Path(hf_dir)
    told = read_config(hf_dir)
    tensors, metadata = read_tensors(hf_dir)
    base, model = base_of(base)
    check_targets(hf_dir, told.get("target_modules"), tensors, places(model))
    unstack = split_lora if told["peft_type"] == "LORA" else split_ia3
    known = places(model)
    values = {}
    for module, found in tensors.items():
        if module not in known:
            raise HuggingFaceError(
                f"{hf_dir}: has an adapter of {module}, and adapters.py has none there in a"
                f" {architecture_of(model).name}"
            )
        try:
            values |= unstack(module, found, known[module], told, metadata)
        except (ValueError, KeyError, RuntimeError) as e:
            reason = f"lacks {e}" if isinstance(e, KeyError) else str(e)
            raise HuggingFaceError(f"{hf_dir}: {module}: {reason}") from None
    config = our_config(told, values)
    check_values(hf_dir, config, model, values)
    state = {
        "config": {"tokenizer": None, "load": str(base)},
        "model": dataclasses.asdict(model),
        "tokens": 0,
        "corpus": None,
        "optimizer": None,
        "base": fingerprint(base, model),
        "adapter": as_json(config),
    }
    parameters = {f"model.{name}": value.contiguous() for name, value in values.items()}
    with building(out) as folder:
        checkpoint.write(folder, 0, parameters, state)
        if template := beside(hf_dir, CHAT_TEMPLATE):
            shutil.copyfile(template, folder / CHAT_TEMPLATE)
    return f"{NAMES[config.peft]} of {', '.join(config.peft_targets)}, {len(values)} tensors"


def read_config(hf_dir: Path) -> dict[str, Any]:
    """adapter_config.json, if adapters.py computes what it says. Raises HuggingFaceError."""
    where = hf_dir / "adapter_config.json"
    if not where.is_file():
        raise HuggingFaceError(f"{hf_dir} has no adapter_config.json, as save_pretrained writes it")
    told = read_json(where)
    check_fields = {"LORA": check_lora, "IA3": lambda told, refuse: None}

    def refuse(field: str, rule: str):
        raise HuggingFaceError(f"{where}: {field} is {json.dumps(told.get(field))}; {rule}")

    if told.get("peft_type") not in list(check_fields):
        refuse("peft_type", "adapters.py has LORA and IA3")
    for field in sorted(told.keys() - READ - HARMLESS):
        if told[field]:
            refuse(field, "adapters.py does not compute that")
    check_fields[told["peft_type"]](told, refuse)
    return told


def check_targets(hf_dir: Path, targets, tensors: dict, known: dict[str, list[Place]]) -> None:
    """Whether target_modules, by which peft finds the layers, are those that have tensors. known:
    all modules of the base that an adapter can have. Raises HuggingFaceError."""
    if targets in (None, "all-linear"):
        return

    def is_target(module: str) -> bool:
        if isinstance(targets, str):
            try:
                return bool(re.fullmatch(targets, module))
            except re.error:
                return False
        return any(module == t or module.endswith(f".{t}") for t in targets)

    if not isinstance(targets, str | list) or not all(isinstance(t, str) for t in targets):
        raise HuggingFaceError(f"{hf_dir}: target_modules is {json.dumps(targets)}; names, or one")
    without = [module for module in known if is_target(module) and module not in tensors]
    beyond = [module for module in tensors if module in known and not is_target(module)]
    for modules, rule in ((beyond, "is none of"), (without, "has no tensors, and is one of")):
        if modules:
            raise HuggingFaceError(
                f"{hf_dir}: {modules[0]} {rule} the target_modules {json.dumps(targets)} of its"
                " adapter_config.json"
            )


def check_lora(told: dict[str, Any], refuse: Callable[[str, str], None]) -> None:
    """refuse(field, rule): raises an error."""
    if told.get("bias", "none") != "none":
        refuse("bias", 'adapters.py has only "none": biases stay as they are')
    if told.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal", "eva"):
        refuse("init_lora_weights", "this one changes the base's weights too")
    if type(told.get("r", 8)) is not int or not 1 <= told.get("r", 8) < 2**31:
        refuse("r", "an integer from 1 on is expected")
    for field, most in (("lora_alpha", 2.0**31), ("lora_dropout", 1)):
        value = told.get(field, 0)
        if type(value) not in (int, float) or not 0 <= value < most:
            refuse(field, f"a number from 0 to {most:.0f} is expected")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = told.get(field) or {}
        if not isinstance(pattern, dict) or pattern.keys() - FUSED.values():
            refuse(field, "adapters.py has one rank and one scale for all modules")


def read_tensors(hf_dir: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """({their module: {"lora_A.weight": its value in float32, ..}}, metadata of the file). Raises
    HuggingFaceError."""
    file = hf_dir / WEIGHTS
    if not file.is_file():
        if (hf_dir / "adapter_model.bin").exists():
            raise HuggingFaceError(
                f"{hf_dir} has only an adapter_model.bin, a pickle, which is never opened here; if"
                " you trust it, load it with peft and save_pretrained(folder,"
                " safe_serialization=True)"
            )
        raise HuggingFaceError(f"{hf_dir} has no {WEIGHTS}")
    tensors = {}
    try:
        with safe_open(file, "pt") as f:
            metadata = f.metadata() or {}
            for name in f.keys():
                match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.(lora_[AB]\.weight|ia3_l)", name)
                if not match:
                    raise HuggingFaceError(f"{file}: {name} is nothing that adapters.py has")
                tensors.setdefault(match[1], {})[match[2]] = f.get_tensor(name).float()
    except (SafetensorError, OSError) as e:
        raise HuggingFaceError(f"{file} cannot be read: {e}") from None
    if not tensors:
        raise HuggingFaceError(f"{file} is empty")
    return tensors, metadata


def split_lora(
    module: str, found: dict[str, Tensor], held: list[Place], told: dict, metadata: dict
) -> dict[str, Tensor]:
    """Our A and B of the layers in one of their modules. Raises ValueError or KeyError."""
    a, b = found["lora_A.weight"], found["lora_B.weight"]
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"its A and B are {list(a.shape)} and {list(b.shape)}, not matrices")
    b = to_our_rows(b, held[0])
    r = told.get("r", 8)
    fused = module.split(".")[-1]
    pattern = (told.get("rank_pattern") or {}).get(fused)
    if held[0].third is None or pattern is None:
        # one A for query, key and value
        blocks = b.chunk(len(held))
        return pairs_of([(place, a, block) for place, block in zip(held, blocks)])
    if told.get("use_rslora"):
        raise ValueError("use_rslora and rank_pattern give it another scale than the others have")
    chosen = metadata.get("targets", "query key value").split()
    held_here = [place for place in held if place.target in chosen]
    n = len(held_here)
    alpha = told.get("lora_alpha", 8)
    scaled = (told.get("alpha_pattern") or {}).get(fused, alpha) == n * alpha
    if pattern != n * r or a.shape[0] != n * r or not scaled:
        raise ValueError(f"rank_pattern {pattern}: {n} times r {r}, with {n} times alpha, is known")
    # [3, h, n, r]: block (third, i) belongs to query, key or value and to its A
    blocks = b.view(3, -1, n, r)
    pairs = []
    rest = b.clone().view(3, -1, n, r)
    for i, place in enumerate(held_here):
        pairs.append((place, a[i * r : (i + 1) * r], blocks[place.third, :, i]))
        rest[place.third, :, i] = 0
    if rest.any():
        raise ValueError("its B is not of one block for each of query, key and value")
    return pairs_of(pairs)


def pairs_of(pairs: list[tuple[Place, Tensor, Tensor]]) -> dict[str, Tensor]:
    values = {}
    for place, a, b in pairs:
        name = ours_of(place.layer, place.target)
        # a file cannot hold one A under three names
        values |= {f"{name}.lora.a": a.clone(), f"{name}.lora.b": b}
    return values


def split_ia3(
    module: str, found: dict[str, Tensor], held: list[Place], told: dict, metadata: dict
) -> dict[str, Tensor]:
    """Our scales of the layers in one of their modules. Raises ValueError or KeyError."""
    scale = found["ia3_l"]
    # scales of outputs are [out, 1], of inputs [1, in]
    of_inputs = held[0].target == "down"
    if scale.dim() != 2 or scale.shape[0 if of_inputs else 1] != 1:
        expected = "[1, in]" if of_inputs else "[out, 1]"
        raise ValueError(f"its scale is {list(scale.shape)}, and {expected} is expected")
    scale = to_our_rows(scale, held[0]).flatten()
    parts = {place.target: part for place, part in zip(held, scale.chunk(len(held)))}
    chosen = metadata.get("targets", " ".join(TARGETS["ia3"])).split()
    values = {}
    for place in held:
        if place.target in TARGETS["ia3"] and place.target in chosen:
            values[f"{ours_of(place.layer, place.target)}.ia3.scale"] = parts[place.target]
        elif not parts[place.target].eq(1).all():
            raise ValueError(
                f"it scales {place.target} too, and adapters.py scales only"
                f" {', '.join(TARGETS['ia3'])}"
            )
    return values


def our_config(told: dict, values: dict[str, Tensor]) -> AdapterConfig:
    targets = tuple(name for name in LINEARS if any(f".{name}." in each for each in values))
    if told["peft_type"] == "IA3":
        return AdapterConfig("ia3", peft_targets=targets)
    r = told.get("r", 8)
    alpha = float(told.get("lora_alpha", 8))
    if told.get("use_rslora"):
        # its scale is α / √r, ours α / r
        alpha *= math.sqrt(r)
    dropout = told.get("lora_dropout") or 0.0
    return AdapterConfig("lora", r, alpha, dropout, peft_targets=targets)


def check_values(
    hf_dir: Path, config: AdapterConfig, model: MoEConfig, values: dict[str, Tensor]
) -> None:
    """Whether every layer has its adapter, of the right shape. Raises HuggingFaceError."""
    try:
        expected = shapes_of(config, model)
    except FieldError as e:
        raise HuggingFaceError(f"{hf_dir}: {e}") from None
    for name, shape in expected.items():
        if name not in values:
            raise HuggingFaceError(f"{hf_dir}: lacks {name}; adapters.py has one in every layer")
        if tuple(values[name].shape) != shape:
            raise HuggingFaceError(
                f"{hf_dir}: {name} is {list(values[name].shape)}, not {list(shape)}: it belongs to"
                " another model than --base"
            )
    if extra := sorted(values.keys() - expected.keys()):
        raise HuggingFaceError(f"{hf_dir}: {extra[0]} has no place in the model of --base")
