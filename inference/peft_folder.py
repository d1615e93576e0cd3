r"""Folders of the library `peft` in and out: LoRA and IA3, of every class of architectures.py.

    adapter_config.json          which method, rank, scale, and which modules
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ..
    chat_template.jinja          the chat template of a run on conversations

    ours                          theirs (LoRA)                     theirs (IA3)
    ..lora.a     [r, in]          ..lora_A.weight  [r, in]
    ..lora.b     [out, r]         ..lora_B.weight  [out, r]
    ..ia3.scale  [out] or [in]                                      ..ia3_l  [out, 1] or [1, in]

The names of modules are those of the models (inference/architectures.py). In a GPT-2, query, key
and value are one module, c_attn. Three LoRAs of rank r are one of rank 3 r there, whose B has
blocks:

        [B_q          ]   [A_q]
    B = [     B_k     ]   [A_k] = A       the scale stays: 3 α / 3 r
        [          B_v]   [A_v]

Import takes the blocks apart. A LoRA of c_attn that peft learned has one A for all three: it
becomes three with this A. So both directions give the same sums, and export, then import, gives the
same bits. An IA3 of c_attn scales query too; it is accepted where it scales query by 1. A BLOOM has
such a module too, query_key_value, whose rows stand head by head: the query of head 0, its key, its
value, the query of head 1. A Falcon has it for each head of keys, with all queries of that head.

finetune/adapter_layers.py has one rank and one scale for all layers. Where rank_pattern or
alpha_pattern names others, B is multiplied by the quotient of the scales, and a smaller rank is
filled up with zeros.

Each field of adapter_config.json is obeyed, or in IGNORED, or the folder is refused by its name. So
is adapter_model.bin, a pickle: to load it would execute what it says.

Not covered: experts, whose matrices transformers 5 holds in one parameter, and bottleneck adapters,
which peft does not have.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from base import json_files
from base.model_config import FieldError, MoEConfig
from finetune.adapter_files import Adapter, open_adapter, shapes_of
from finetune.adapter_layers import LINEARS, TARGETS, AdapterConfig
from finetune.frozen_base import fingerprint
from inference import huggingface
from inference.architectures import GPT2, Location, their_tensors
from inference.hf_config import architecture_of
from inference.huggingface import HuggingFaceError, building, read_json
from inference.loading import open_model, read_base
from inference.merged import check_base
from run import checkpoint
from run.checkpoint import beside
from run.tokenizer import CHAT_TEMPLATE

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
# Their modules that hold query, key and value.
FUSED = ("c_attn", "query_key_value")
# What messages call the methods that peft has.
NAMES = {"lora": "LoRA", "ia3": "IA3"}
# Fields of adapter_config.json that change nothing here: where the adapter comes from, ..
IGNORED = {"auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type"}
# .. how peft runs, and how it finds a weight stored (which it looks up itself), ..
IGNORED |= {"inference_mode", "runtime_config", "fan_in_fan_out"}
# .. how the values began, which are in the file, ..
IGNORED |= {"init_ia3_weights", "loftq_config", "eva_config"}
# .. what is used only with megatron_config, or with use_qalora: both are refused.
IGNORED |= {"megatron_core", "qalora_group_size"}
# Fields that are a regular expression, or have some as their keys.
PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")
PATTERNS += ("rank_pattern", "alpha_pattern")
Rank = Annotated[int, Meta(ge=1, lt=2**31)]


class PeftConfig(Struct):
    """The fields of adapter_config.json that import obeys, with peft's defaults. Any other one that
    is not in IGNORED must be null or false."""

    peft_type: str
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None = None
    r: Rank = 8
    lora_alpha: Annotated[float, Meta(gt=0, lt=2**31)] = 8.0
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    init_lora_weights: bool | str = True
    feedforward_modules: str | list[str] | None = None

    def has(self, module: str) -> bool:
        """Whether peft gives this module an adapter."""
        return matches(self.target_modules, module) and not matches(self.exclude_modules, module)

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        rank = of_module(self.rank_pattern, module, self.r)
        return rank, self.scale(rank, of_module(self.alpha_pattern, module, self.lora_alpha))

    def scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def scales_inputs(self, module: str) -> bool:
        """Whether IA3 scales the inputs of this module, not its outputs."""
        names = self.feedforward_modules or []
        if isinstance(names, str):
            return bool(re.fullmatch(names, module))
        return module.endswith(tuple(names))


def of_module(pattern: dict | None, module: str, usual):
    """The value of the first key that fits the end of a module's name."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return usual


def matches(names: str | list[str] | None, module: str) -> bool:
    """As peft finds modules: by a regular expression, or by the end of their names."""
    if isinstance(names, str):
        return names.lower() == "all-linear" or bool(re.fullmatch(names, module))
    return any(f".{module}".endswith(f".{name}") for name in names or [])


# --- modules and their rows -----------------------------------------------------------------------


def their_modules(config: MoEConfig) -> dict[str, dict[str, Location]]:
    """Their module -> {our linear layer, as blocks.0.attention.query: where it lies there}. Without
    those of experts."""
    found = {}
    for theirs, tensor in their_tensors(config, architecture_of(config)).items():
        module, _, kind = theirs.rpartition(".")
        for name, location in tensor.parts.items():
            linear = name.removesuffix(".weight")
            is_linear = linear.startswith("blocks.") and target_of(linear) in LINEARS
            if is_linear and location.rows is not None:
                raise HuggingFaceError(
                    f"{theirs}: its rows have another order here, latents' heads"
                )
            if is_linear and kind == "weight" and "#" not in module:
                found.setdefault(module, {})[linear] = location
    return found


def target_of(linear: str) -> str:
    """blocks.0.attention.query -> query"""
    return linear.split(".")[-1]


def targets_of(names) -> tuple[str, ...]:
    """The targets that parameters of these names belong to, in the order of LINEARS."""
    return tuple(target for target in LINEARS if any(f".{target}." in name for name in names))


def rows_of(location: Location, theirs: Tensor) -> Tensor:
    """The rows of their B, or scale, that are ours, sharing memory: [3 out, n] -> [out, n], or
    where they stand head by head [a_kv, queries or 1, d, n]; [out, n] as it is."""
    parts = location.heads * (location.queries + 2) or 3
    if location.third is not None and len(theirs) % parts:
        raise ValueError(f"{len(theirs)} rows cannot be those of query, key and value")
    return location.view(theirs.t() if location.transposed else theirs)


def base_of(path: str) -> tuple[str | Path, MoEConfig]:
    """(path, configuration) of --base. Raises CheckpointError or HuggingFaceError."""
    return path if huggingface.is_folder(path) else checkpoint.find(path), open_model(path)[0]


# --- export ---------------------------------------------------------------------------------------


def export_adapter(path: str, base: str, hf_dir: str) -> str:
    """Write an adapter as a folder for PeftModel.from_pretrained. Returns a summary. Raises
    CheckpointError or HuggingFaceError."""
    adapter = open_adapter(path)
    if adapter.config.peft == "adapter":
        raise HuggingFaceError(f"{adapter.path}: peft has LoRA and IA3, but no bottleneck adapters")
    base, config = base_of(base)
    check_base(adapter, base, config, read_base)
    values = adapter.values()
    collect = lora_tensors if adapter.config.peft == "lora" else ia3_tensors
    # blocks.0.attention.query.lora.a -> blocks.0.attention.query.
    adapted = {name.rsplit(".", 2)[0] for name in values}
    tensors = {}
    modules = []
    for module, linears in their_modules(config).items():
        here = {name: location for name, location in linears.items() if name in adapted}
        if here:
            modules.append(module)
            adapted -= here.keys()
            for name, tensor in collect(values, here).items():
                tensors[f"{PREFIX}{module}.{name}"] = tensor.contiguous()
    if adapted:
        raise HuggingFaceError(
            f"{adapter.path}: {min(adapted)} belongs to experts, for which peft has no place;"
            " --peft-targets query key value output would have one"
        )
    # Names without the number of the layer: mlp.c_proj, self_attn.q_proj.
    targets = sorted({".".join(module.split(".")[-2:]) for module in modules})
    told = their_config(adapter, targets, base if huggingface.is_folder(base) else None)
    with building(hf_dir) as folder:
        metadata = {"format": "pt", "targets": " ".join(targets_of(adapter.shapes))}
        save_file(tensors, folder / WEIGHTS, metadata)
        # Safetensors makes files that only their owner can read; these are to be given away.
        os.chmod(folder / WEIGHTS, 0o644)
        (folder / "adapter_config.json").write_text(json.dumps(told, indent=1))
        if template := beside(adapter.path, CHAT_TEMPLATE):
            shutil.copyfile(template, folder / CHAT_TEMPLATE)
    return f"{NAMES[adapter.config.peft]} of {', '.join(targets)}, {len(tensors)} tensors"


def lora_tensors(values: dict[str, Tensor], here: dict[str, Location]) -> dict[str, Tensor]:
    """A and B of one of their modules, as peft names them. here: our n layers in it."""
    a = torch.cat([values[f"{name}.lora.a"] for name in here])  # [n r, in]
    b = None
    for i, (name, location) in enumerate(here.items()):
        part = values[f"{name}.lora.b"]  # [out, r]
        r = part.shape[1]
        if b is None:
            b = torch.zeros(location.shape(part.shape[:1])[0], len(a))  # [3 out, n r]
        block = rows_of(location, b)[..., i * r : (i + 1) * r]
        block.copy_(part.view(block.shape))
    return {"lora_A.weight": a, "lora_B.weight": b}


def ia3_tensors(values: dict[str, Tensor], here: dict[str, Location]) -> dict[str, Tensor]:
    """The scale of one of their modules."""
    whole = None
    for name, location in here.items():
        scale = values[f"{name}.ia3.scale"]  # [out]
        if whole is None:
            whole = torch.ones(location.shape(scale.shape)[0], 1)
        rows = rows_of(location, whole)
        rows.copy_(scale.view(rows.shape))
    return {"ia3_l": whole.t() if scales_inputs(here) else whole}  # [1, in] or [3 out, 1]


def scales_inputs(linears: dict[str, Location]) -> bool:
    return [target_of(name) for name in linears] == ["down"]


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
        # Conv1D has its weight as [in, out].
        "fan_in_fan_out": architecture is GPT2,
    }
    if config.peft == "ia3":
        down = architecture.modules["blocks.*.mlp.down"].module.split(".*.")[-1]
        return told | {"feedforward_modules": [name for name in targets if name == down]}
    told |= {"r": config.lora_rank, "lora_alpha": number(config.lora_alpha), "bias": "none"}
    told |= {"lora_dropout": config.lora_dropout}
    n = len({"query", "key", "value"} & set(targets_of(adapter.shapes)))
    for name in targets:
        fused = name.split(".")[-1]
        if fused in FUSED:
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
    known = their_modules(model)
    check_targets(hf_dir, told, tensors, known)
    split = split_lora if told.peft_type == "LORA" else split_ia3
    values = {}
    for module, found in tensors.items():
        if module not in known:
            raise HuggingFaceError(
                f"{hf_dir}: has an adapter of {module}, and adapters.py has none there in a"
                f" {architecture_of(model).name}"
            )
        try:
            values |= split(module, found, known[module], told, metadata)
        except (ValueError, KeyError, RuntimeError) as e:
            reason = f"lacks {e}" if isinstance(e, KeyError) else str(e)
            raise HuggingFaceError(f"{hf_dir}: {module}: {reason}") from None
    config = our_config(told, values)
    check_values(hf_dir, config, model, values)
    run = {"tokenizer": None, "load": str(base)}
    state = huggingface.untrained(run, dataclasses.asdict(model))
    state |= {"base": fingerprint(base, model, read_base), "adapter": dataclasses.asdict(config)}
    parameters = {f"model.{name}": value.contiguous() for name, value in values.items()}
    with building(out) as folder:
        checkpoint.write(folder, 0, parameters, state)
        if template := beside(hf_dir, CHAT_TEMPLATE):
            shutil.copyfile(template, folder / CHAT_TEMPLATE)
    return f"{NAMES[config.peft]} of {', '.join(config.peft_targets)}, {len(values)} tensors"


def read_config(hf_dir: Path) -> PeftConfig:
    """adapter_config.json, if adapter_layers.py computes what it says. Raises
    HuggingFaceError."""
    where = hf_dir / "adapter_config.json"
    if not where.is_file():
        raise HuggingFaceError(f"{hf_dir} has no adapter_config.json, as save_pretrained writes it")
    content = read_json(where)
    try:
        told = json_files.convert(content, PeftConfig, str(where))
    except json_files.JSONError as e:
        raise HuggingFaceError(str(e)) from None
    for name, rule in not_computed(told, content).items():
        raise HuggingFaceError(f"{where}: {name} is {json.dumps(content[name])}; {rule}")
    return told


def not_computed(told: PeftConfig, content: dict) -> dict[str, str]:
    """{field of adapter_config.json: why it is refused}"""
    rules = {}
    if told.peft_type not in ("LORA", "IA3"):
        rules["peft_type"] = "adapters.py has LORA and IA3"
    for name in sorted(content.keys() - {*PeftConfig.__struct_fields__} - IGNORED):
        # Not 0, [] or {}: some fields begin at 0, or are on once they are there.
        if content[name] is not None and content[name] is not False:
            rules[name] = "adapters.py does not compute that"
    if told.bias != "none":
        rules["bias"] = 'adapters.py has only "none": biases stay as they are'
    if told.init_lora_weights not in (True, False, "gaussian", "orthogonal", "eva"):
        rules["init_lora_weights"] = "this one changes the base's weights too"
    for name in PATTERNS:
        value = getattr(told, name)
        try:
            for key in {str: [value], dict: value}.get(type(value), []):
                re.compile(key)
        except re.error as e:
            rules[name] = f"this is no regular expression ({e})"
    return rules


def check_targets(hf_dir: Path, told: PeftConfig, tensors: dict, known: dict) -> None:
    """Whether the modules that have tensors are those that peft finds. known: all modules of the
    base that an adapter can have. Raises HuggingFaceError."""
    without = [module for module in known if told.has(module) and module not in tensors]
    beyond = [module for module in tensors if module in known and not told.has(module)]
    words = f"the target_modules {json.dumps(told.target_modules)}"
    if told.exclude_modules:
        words += f" without the exclude_modules {json.dumps(told.exclude_modules)}"
    for modules, rule in ((beyond, "is none of"), (without, "has no tensors, and is one of")):
        if modules:
            raise HuggingFaceError(
                f"{hf_dir}: {modules[0]} {rule} {words} of its adapter_config.json"
            )


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
    module: str,
    found: dict[str, Tensor],
    linears: dict[str, Location],
    told: PeftConfig,
    metadata: dict,
) -> dict[str, Tensor]:
    """Our A and B of the layers in one of their modules. Raises ValueError or KeyError."""
    a, b = found["lora_A.weight"], found["lora_B.weight"]
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"its A and B are {list(a.shape)} and {list(b.shape)}, not matrices")
    rank, scale = told.rank_and_scale(module)
    if len(a) != rank or b.shape[1] != rank:
        raise ValueError(
            f"its A and B are {list(a.shape)} and {list(b.shape)}; r and rank_pattern say {rank}"
        )
    # All modules have one scale here.
    b = b * (scale / told.scale(told.r, told.lora_alpha))
    if target_of(module) in FUSED and (parts := blocks_of(a, b, linears, told, metadata)):
        return parts
    values = {}
    for name, location in linears.items():
        # A file cannot hold one A under three names.
        values[f"{name}.lora.a"] = a.clone()
        values[f"{name}.lora.b"] = rows_of(location, b).flatten(0, -2)
    return values


def blocks_of(
    a: Tensor, b: Tensor, linears: dict[str, Location], told: PeftConfig, metadata: dict
) -> dict[str, Tensor]:
    """Our A and B of query, key and value, whose blocks stand side by side in B [3 h, n r]; empty
    where B has other values too."""
    chosen = metadata.get("targets", "query key value").split()
    linears = {name: where for name, where in linears.items() if target_of(name) in chosen}
    if len(a) != len(linears) * told.r:
        return {}
    values, rest = {}, b.clone()
    for i, (name, location) in enumerate(linears.items()):
        part = slice(i * told.r, (i + 1) * told.r)
        block = rows_of(location, rest)[..., part]  # [h, r], or head by head
        values[f"{name}.lora.a"] = a[part].clone()
        values[f"{name}.lora.b"] = block.flatten(0, -2).clone()
        block.zero_()
    return {} if rest.any() else values


def split_ia3(
    module: str,
    found: dict[str, Tensor],
    linears: dict[str, Location],
    told: PeftConfig,
    metadata: dict,
) -> dict[str, Tensor]:
    """Our scales of the layers in one of their modules. Raises ValueError or KeyError."""
    scale = found["ia3_l"]
    of_inputs = scales_inputs(linears)
    if told.scales_inputs(module) != of_inputs:
        raise ValueError(
            f"adapters.py scales its {'in' if of_inputs else 'out'}puts, and feedforward_modules is"
            f" {json.dumps(told.feedforward_modules)}"
        )
    if scale.dim() != 2 or scale.shape[0 if of_inputs else 1] != 1:
        expected = "[1, in]" if of_inputs else "[out, 1]"
        raise ValueError(f"its scale is {list(scale.shape)}, and {expected} is expected")
    if of_inputs:
        scale = scale.t()
    chosen = metadata.get("targets", " ".join(TARGETS["ia3"])).split()
    values = {}
    for name, location in linears.items():
        part = rows_of(location, scale).flatten()
        target = target_of(name)
        if target in TARGETS["ia3"] and target in chosen:
            values[f"{name}.ia3.scale"] = part
        elif not part.eq(1).all():
            raise ValueError(
                f"it scales {target} too; adapters.py scales only {', '.join(TARGETS['ia3'])}, and"
                " no other target_modules"
            )
    return values


def our_config(told: PeftConfig, values: dict[str, Tensor]) -> AdapterConfig:
    """The adapter's configuration. Each of the values gets the largest rank, in place."""
    targets = targets_of(values)
    if told.peft_type == "IA3":
        return AdapterConfig("ia3", peft_targets=targets)
    rank = max(len(a) for name, a in values.items() if name.endswith(".lora.a"))
    for name, value in values.items():
        is_a = name.endswith(".lora.a")
        missing = rank - value.shape[0 if is_a else 1]
        values[name] = F.pad(value, (0, 0, 0, missing) if is_a else (0, missing))
    # The scale is peft's, told.lora_alpha / told.r; with use_rslora, its α / √r.
    alpha = told.lora_alpha * rank / told.r
    if told.use_rslora:
        alpha *= math.sqrt(told.r)
    return AdapterConfig("lora", rank, alpha, told.lora_dropout, peft_targets=targets)


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
