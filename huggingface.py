"""The same weights as Hugging Face folders: what `transformers` saved goes on training here, what was trained here loads there.

A model is a config.json, and tensors under other names. One table for each architecture says where each of our tensors lies in which of theirs:
import takes a view of their tensor there, export fills the same view. In float32 nothing is computed, so nothing is rounded.

    gpt.py                           GPT2LMHeadModel                              LlamaForCausalLM
    embedding.tokens                 transformer.wte                              model.embed_tokens
    embedding.positions              transformer.wpe                              -
    blocks.N.attention.query [h, h]  transformer.h.N.attn.c_attn [h, q | k | v]   model.layers.N.self_attn.q_proj
    blocks.N.mlp.up        [ffn, h]  transformer.h.N.mlp.c_fc    [h, ffn]         model.layers.N.mlp.up_proj
    head.norm                        transformer.ln_f                             model.norm
    head.output                      tied to the embedding                        lm_head

GPT-2's Conv1D computes y = x W where ours is y = x Wᵀ, with query, key and value side by side in one matrix. Llama's rotary pairs are (i, i + d/2) on
both sides, so rows keep their order (Meta's own files interleave them). Dropout is one number here and up to three there: the largest counts.

MixtralForCausalLM is LlamaForCausalLM with experts in every layer. Their matrices are one tensor here, one for each expert e there:

    blocks.N.mlp.router       [E, h]       model.layers.N.block_sparse_moe.gate                  [E, h]
    blocks.N.mlp.gate         [E, ffn, h]  model.layers.N.block_sparse_moe.experts.e.w1          [ffn, h]; up is w3, down w2

Of the routers only topk with router_topk >= 2 is Mixtral's. aux_loss keeps its number, not its weight: with even load each layer's is 1 here, all
layers' together k there. Capacity and z-loss have no field there. transformers 5 fuses experts in memory; in files only if told to: not read here.

    python huggingface.py                                     a small GPT-2 there and back: names, bits, logits
    python huggingface.py import HF_DIR CKPT                  then: python generate.py --checkpoint CKPT
    python huggingface.py export CKPT HF_DIR --dtype bf16     CKPT may be a run's folder: its newest checkpoint

In memory at a time are the tensors of one file, never a model; a folder appears under its name when it is whole. Only safetensors are read: a
pytorch_model.bin is a pickle, and loading it executes what it says. What gpt.py does not compute is refused by name, never ignored.

Megatron Bridge adds dozens of architectures, scaled rotary positions, and conversion on GPUs, each rank its slices; a checkpoint here loads under
any layout, so one process is enough.
"""
import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import checkpoint
import sharding
from config import MODEL_FLAGS, Config
from gpt import GPT, GPTConfig, num_parameters
from tokenizer import FileTokenizer, TokenizerError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STORED = ("F32", "BF16", "F16")                                            # the same, as safetensors calls them


class HuggingFaceError(Exception):
    """A folder that cannot be imported, or a checkpoint that cannot be exported; the message says which, and why."""


# ---------------------------------------------------------------------------------------------------------------------

class Place(NamedTuple):
    """Where our tensor lies in theirs. A module's weight and bias go together."""
    module: str                          # * is the number of the layer; #, of an expert: a tensor for each, together [E, ..]
    transposed: bool = False             # Conv1D: [in, out]
    third: int | None = None             # of its columns: query, key or value

    def view(self, theirs: Tensor) -> Tensor:
        """The part of their tensor that is ours, in our order. [in, out] or [in, 3 out] -> [out, in]"""
        if self.third is not None:
            theirs = theirs.chunk(3, dim=-1)[self.third]
        return theirs.t() if self.transposed else theirs                   # t() of a bias is the bias

    def shape(self, ours: torch.Size) -> list[int]:
        """The shape of their tensor."""
        *rest, last = reversed(ours) if self.transposed else ours
        return [*rest, last if self.third is None else 3 * last]


def split(name: str, theirs: Tensor) -> dict[str, Tensor]:
    """By the names in their files: where # stands for the number of an expert, one for each. [..] -> {name: [..]}; [E, ..] -> E of them"""
    return {name.replace("#", str(e)): t for e, t in enumerate(theirs)} if "#" in name else {name: theirs}


@dataclass(frozen=True)
class Architecture:
    name: str                            # of the class in transformers
    model_type: str
    prefix: str                          # of its tensors' names; some files leave it out
    fields: dict[str, str]               # of config.json -> of GPTConfig
    computed: dict[str, tuple]           # fields of config.json -> the values for which gpt.py computes the same; the first is the default
    modules: dict[str, Place]            # ours -> theirs
    ignored: str                         # a pattern: tensors that are computed or tied, without prefix
    missing: dict[str, float]            # what a field means that config.json does not have


GPT2 = Architecture(
    "GPT2LMHeadModel", "gpt2", "transformer.",
    fields={"n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_heads", "n_inner": "ffn_hidden_size", "n_positions": "seq_length",
            "vocab_size": "vocab_size", "layer_norm_epsilon": "norm_eps", "embd_pdrop": "dropout", "attn_pdrop": "dropout", "resid_pdrop": "dropout"},
    computed={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "tie_word_embeddings": (True,), "scale_attn_weights": (True,),
              "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    modules={
        "embedding.tokens": Place("transformer.wte"), "embedding.positions": Place("transformer.wpe"), "head.norm": Place("transformer.ln_f"),
        "blocks.*.attention_norm": Place("transformer.h.*.ln_1"), "blocks.*.mlp_norm": Place("transformer.h.*.ln_2"),
        "blocks.*.attention.query": Place("transformer.h.*.attn.c_attn", transposed=True, third=0),
        "blocks.*.attention.key": Place("transformer.h.*.attn.c_attn", transposed=True, third=1),
        "blocks.*.attention.value": Place("transformer.h.*.attn.c_attn", transposed=True, third=2),
        "blocks.*.attention.output": Place("transformer.h.*.attn.c_proj", transposed=True),
        "blocks.*.mlp.up": Place("transformer.h.*.mlp.c_fc", transposed=True),
        "blocks.*.mlp.down": Place("transformer.h.*.mlp.c_proj", transposed=True)},
    ignored=r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight",
    missing={"n_inner": 0, "layer_norm_epsilon": 1e-5, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1})

LLAMA = Architecture(
    "LlamaForCausalLM", "llama", "model.",
    fields={"num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size", "max_position_embeddings": "seq_length", "vocab_size": "vocab_size", "rms_norm_eps": "norm_eps",
            "attention_dropout": "dropout"},
    computed={"hidden_act": ("silu", "swish"), "tie_word_embeddings": (False,), "attention_bias": (False,), "mlp_bias": (False,)},
    modules={
        "embedding.tokens": Place("model.embed_tokens"), "head.norm": Place("model.norm"), "head.output": Place("lm_head"),
        "blocks.*.attention_norm": Place("model.layers.*.input_layernorm"), "blocks.*.mlp_norm": Place("model.layers.*.post_attention_layernorm"),
        "blocks.*.attention.query": Place("model.layers.*.self_attn.q_proj"), "blocks.*.attention.key": Place("model.layers.*.self_attn.k_proj"),
        "blocks.*.attention.value": Place("model.layers.*.self_attn.v_proj"), "blocks.*.attention.output": Place("model.layers.*.self_attn.o_proj"),
        "blocks.*.mlp.gate": Place("model.layers.*.mlp.gate_proj"), "blocks.*.mlp.up": Place("model.layers.*.mlp.up_proj"),
        "blocks.*.mlp.down": Place("model.layers.*.mlp.down_proj")},
    ignored=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    missing={"num_key_value_heads": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_dropout": 0.0})

MIXTRAL = dataclasses.replace(
    LLAMA, name="MixtralForCausalLM", model_type="mixtral",
    fields=LLAMA.fields | {"num_local_experts": "num_experts", "num_experts_per_tok": "router_topk", "router_aux_loss_coef": "aux_loss"},
    computed=LLAMA.computed | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
    modules=LLAMA.modules | {
        "blocks.*.mlp.router": Place("model.layers.*.block_sparse_moe.gate"), "blocks.*.mlp.gate": Place("model.layers.*.block_sparse_moe.experts.#.w1"),
        "blocks.*.mlp.up": Place("model.layers.*.block_sparse_moe.experts.#.w3"), "blocks.*.mlp.down": Place("model.layers.*.block_sparse_moe.experts.#.w2")},
    missing=LLAMA.missing | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001})


def architecture_of(config: GPTConfig) -> Architecture:
    return (MIXTRAL if config.num_experts else LLAMA) if config.llama else GPT2


def empty_model(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def layout(config: GPTConfig) -> dict[str, tuple[list[int], dict[str, Place]]]:
    """Their name -> (its shape, {our name: where in it}), in the order of the model."""
    architecture, found = architecture_of(config), {}
    for name, parameter in empty_model(config).named_parameters():
        module, kind = name.rsplit(".", 1)
        layer = (re.findall(r"\d+", module) or [""])[0]
        place = architecture.modules.get(re.sub(r"\d+", "*", module))
        if place is None:
            raise HuggingFaceError(f"{name} has no place in a {architecture.name}")
        theirs = f"{place.module.replace('*', layer)}.{kind}"
        found.setdefault(theirs, (place.shape(parameter.shape), {}))[1][name] = place
    return found


# --- config.json -----------------------------------------------------------------------------------------------------

def number(hf_config: dict, field: str, kind: type, missing: dict[str, float]) -> float:
    """A field, checked. Raises HuggingFaceError."""
    value = hf_config.get(field)
    value = missing.get(field) if value is None else value
    if value is None:
        raise HuggingFaceError(f"{field} is missing")
    if type(value) not in (int, kind) or not 0 <= value < 1e30:            # NaN and true fail too
        raise HuggingFaceError(f"{field} is {json.dumps(value)}; gpt.py takes {'an integer' if kind is int else 'a number'}, 0 or more")
    return kind(value)


def rotary_base(hf_config: dict, missing: dict[str, float]) -> float:
    """rope_theta, where transformers 4 (top level, rope_scaling) or 5 (rope_parameters) writes it. Raises HuggingFaceError."""
    field = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    rope = hf_config.get(field) or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise HuggingFaceError(f"{field} is {json.dumps(rope)}; gpt.py has only the default rotary positions, without scaling")
    return number({"rope_theta": hf_config.get("rope_theta")} | rope, "rope_theta", float, missing)


def check_experts(config: GPTConfig) -> None:
    """Raises HuggingFaceError for a model with experts that a Mixtral does not compute."""
    for field, same, why in (("router", config.router == "topk", "a Mixtral's gates are the softmax over the chosen logits, those of router topk"),
                             ("router_topk", config.router_topk > 1, "a Mixtral with num_experts_per_tok 1 has gate 1, where here it is the probability"),
                             ("expert_every", config.expert_every == 1, "a Mixtral has experts in every layer")):
        if not same:
            raise HuggingFaceError(f"{field} {getattr(config, field)}: {why}")


def to_gpt_config(hf_config: dict) -> GPTConfig:
    """The model that a config.json describes. Raises HuggingFaceError, naming the field, for what gpt.py does not compute."""
    names = hf_config.get("architectures")
    architecture = next((a for a in (GPT2, LLAMA, MIXTRAL) if names == [a.name]), None)
    if architecture is None:
        raise HuggingFaceError(f"architectures is {json.dumps(names)}; gpt.py has {GPT2.name}, {LLAMA.name} and {MIXTRAL.name}")
    for field, values in architecture.computed.items():
        if hf_config.get(field, values[0]) not in values:
            raise HuggingFaceError(f"{field} is {json.dumps(hf_config[field])}; gpt.py has only {' or '.join(json.dumps(v) for v in values)}")
    kinds, fields = {f.name: int if f.type is int else float for f in dataclasses.fields(GPTConfig)}, {}
    for theirs, ours in architecture.fields.items():
        fields[ours] = max(number(hf_config, theirs, kinds[ours], architecture.missing), fields.get(ours, 0))
    if architecture is not GPT2:
        fields |= {"llama": True, "rotary_base": rotary_base(hf_config, architecture.missing)}
    if architecture is MIXTRAL:
        fields |= {"router": "topk", "z_loss": 0.0}
    try:
        config = GPTConfig(**fields)
    except ValueError as e:
        raise HuggingFaceError(str(e)) from None
    if architecture is MIXTRAL:
        check_experts(config)
    if config.llama and hf_config.get("head_dim") not in (None, config.head_dim):
        raise HuggingFaceError(f"head_dim is {json.dumps(hf_config['head_dim'])}; gpt.py has only hidden_size / num_attention_heads = {config.head_dim}")
    return config


def to_hf_config(config: GPTConfig) -> dict:
    """config.json, for transformers 4 and 5. Raises HuggingFaceError for a model that it cannot describe."""
    architecture = architecture_of(config)
    if architecture is MIXTRAL:
        check_experts(config)
    if not config.llama and config.num_kv_heads != config.num_heads:
        raise HuggingFaceError(f"num_kv_heads {config.num_kv_heads} of num_heads {config.num_heads}: {GPT2.name} has no grouped-query attention")
    eot = {257: 256, 50257: 50256}.get(config.vocab_size)                  # of bytes, of GPT-2's tokens
    rotary = {"head_dim": config.head_dim, "rope_theta": config.rotary_base, "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base}}
    return {"architectures": [architecture.name], "model_type": architecture.model_type,
            **{theirs: getattr(config, ours) for theirs, ours in architecture.fields.items()},
            **{field: values[0] for field, values in architecture.computed.items()},
            **(rotary if config.llama else {}), "bos_token_id": eot, "eos_token_id": eot}


# --- import ----------------------------------------------------------------------------------------------------------

def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as e:
        raise HuggingFaceError(f"{path} cannot be read as JSON ({e})") from None
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises HuggingFaceError."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise HuggingFaceError(f"{index} has no weight_map from tensors to files beside it")
        return [folder / n for n in sorted(set(names.values()))]
    if any(folder.glob("pytorch_model*.bin")):
        raise HuggingFaceError(f"{folder} has only a pytorch_model.bin, a pickle, which is never opened here; if you trust it, load it with transformers "
                               "and save_pretrained(folder, safe_serialization=True)")
    raise HuggingFaceError(f"{folder} has neither model.safetensors nor {index.name}")


def read_headers(folder: Path) -> dict[str, tuple[Path, list[int], str]]:
    """Each tensor's (file, shape, dtype), without its values. Raises HuggingFaceError."""
    found = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as f:
                slices = {name: f.get_slice(name) for name in f.keys()}
                found |= {name: (file, s.get_shape(), s.get_dtype()) for name, s in slices.items()}
        except FileNotFoundError:
            raise HuggingFaceError(f"{file} is missing, and model.safetensors.index.json names it") from None
        except (SafetensorError, OSError) as e:
            raise HuggingFaceError(f"{file} is damaged, or not safetensors ({e})") from None
    return found


def read_tensor(file: Path, name: str) -> Tensor:
    """Mapped, not read: what is not touched takes no memory."""
    with safe_open(file, "pt") as f:
        return f.get_tensor(name)


def match(folder: Path, config: GPTConfig) -> dict[str, tuple[list[tuple[Path, str]], Place]]:
    """Our name -> ([(file, their name)], one for each expert; where in it). Raises HuggingFaceError, naming what is missing, left over or different."""
    architecture, wrong, found = architecture_of(config), [], {}
    there = {name.removeprefix(architecture.prefix): (name, *rest) for name, rest in read_headers(folder).items()}
    head = there.get("lm_head.weight")
    there = {short: entry for short, entry in there.items() if not re.fullmatch(architecture.ignored, short)}
    for whole, (shape, places) in layout(config).items():
        sources = []
        for name, part in split(whole, torch.empty(shape, device="meta")).items():
            theirs, file, stored, dtype = there.pop(name.removeprefix(architecture.prefix), (name, None, None, None))
            if file is None:
                wrong.append(f"{name} is missing")
            elif stored != list(part.shape) or dtype not in STORED:
                wrong.append(f"{name} is {dtype} {stored} there, and {' or '.join(STORED)} {list(part.shape)} in gpt.py")
            sources.append((file, theirs))
        found |= {ours: (sources, place) for ours, place in places.items()}
    wrong += [f"{name} is not in gpt.py" for name, *_ in there.values()]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise HuggingFaceError(f"{folder} holds another model than its config.json: {'; '.join(wrong[:3])}{more}")
    if head and not config.llama:                                          # transformers would use a second copy that differs
        one, other = read_tensor(head[1], head[0]), read_tensor(*found["embedding.tokens.weight"][0][0])
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise HuggingFaceError(f"{folder}: lm_head.weight differs from transformer.wte.weight; in gpt.py a GPT-2 has one tensor for both")
    return found


@contextlib.contextmanager
def building(target: Path):
    """A folder that takes the target's name when all went well, and is gone otherwise. Raises HuggingFaceError."""
    target = Path(target).resolve()
    folder = target.with_name(f".{target.name}.writing")
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise HuggingFaceError(f"{target} exists, and is not an empty folder")
        shutil.rmtree(folder, ignore_errors=True)                          # of one that was killed
        folder.mkdir(parents=True)
        yield folder
        os.rename(folder, target)
    except (OSError, SafetensorError, checkpoint.CheckpointError, TokenizerError) as e:
        raise HuggingFaceError(f"{target} cannot be written: {e}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def import_folder(hf_dir: Path, path: Path) -> GPTConfig:
    """Write the model in a Hugging Face folder as a checkpoint at `path`: float32, step 0, no moments. Raises HuggingFaceError."""
    hf_dir = Path(hf_dir)
    if not (hf_dir / "config.json").is_file():
        raise HuggingFaceError(f"{hf_dir} is not a folder with a config.json, as save_pretrained writes it")
    hf_config = read_json(hf_dir / "config.json")
    try:
        config = to_gpt_config(hf_config)
    except HuggingFaceError as e:
        raise HuggingFaceError(f"{hf_dir}/config.json: {e}") from None
    found = match(hf_dir, config)
    parameters = {f"model.{n}": p.detach() for n, p in empty_model(config).named_parameters()}

    def read(name: str) -> Tensor:
        sources, place = found[name.removeprefix("model.")]
        if "#" not in place.module:
            return place.view(read_tensor(*sources[0])).contiguous().float()
        ours = torch.empty(parameters[name].shape)                       # [E, ..]
        for expert, source in zip(ours, sources, strict=True):
            expert.copy_(read_tensor(*source))
        return ours
    with building(path) as folder:
        tokenizer = {50257: "gpt2", 257: "bytes"}.get(config.vocab_size)
        if (hf_dir / "tokenizer.json").is_file() or not tokenizer:       # where there is none, who needs it is told so
            tokenizer = str(Path(path).resolve() / "tokenizer.json")
        flags = {k: v for k, v in dataclasses.asdict(config).items() if k in MODEL_FLAGS}
        preset = {"gpt2": "gpt2", "llama": "llama2-7b", "mixtral": "mixtral-8x7b"}[architecture_of(config).model_type]
        run = Config(model=preset, tokenizer=tokenizer, **flags)
        state = {"config": dataclasses.asdict(run), "model": dataclasses.asdict(config), "tokens": 0, "corpus": None, "optimizer": None}
        checkpoint.write(folder, 0, parameters, state, read)
        if (hf_dir / "tokenizer.json").is_file():
            FileTokenizer(str(hf_dir / "tokenizer.json"))                # whether it can be read
            shutil.copyfile(hf_dir / "tokenizer.json", folder / "tokenizer.json")
    return config


# --- export ----------------------------------------------------------------------------------------------------------

def shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, in files of at most `limit` bytes; a larger tensor has one of its own, and so do experts that together are larger."""
    found, room = [], 0
    for name, size in sizes.items():
        if size > room or not found:
            found.append([])
            room = limit
        found[-1].append(name)
        room -= size
    return found


def write_shard(path: Path, file: Path, theirs: dict[str, tuple[list[int], dict[str, Place]]], dtype: torch.dtype) -> list[str]:
    """Some of their tensors, filled from a checkpoint through the views that import takes; gone from memory before the next shard. Returns the names."""
    filled = {name: torch.empty(shape, dtype=dtype) for name, (shape, _) in theirs.items()}
    checkpoint.read(path, {f"model.{ours}": place.view(filled[name]) for name, (_, places) in theirs.items() for ours, place in places.items()})
    tensors = {name: t for whole in filled for name, t in split(whole, filled[whole]).items()}
    infinite = [name for name, t in tensors.items() if t.isinf().any()] if dtype == torch.float16 else []
    if infinite:
        raise HuggingFaceError(f"{path}: {infinite[0]} has values beyond 65504, the largest in fp16; --dtype bf16 has them")
    save_file(tensors, file, {"format": "pt"})
    return list(tensors)


def export_folder(path: Path, hf_dir: Path, dtype: str = "fp32", max_shard_bytes: int = 5 * 10**9) -> GPTConfig:
    """Write the model of a checkpoint, or of a run's newest one, as a folder for from_pretrained. Raises HuggingFaceError or CheckpointError."""
    if not Path(path).is_dir():
        raise HuggingFaceError(f"{path} is not a folder")
    path = checkpoint.find(path)
    try:
        config = GPTConfig(**checkpoint.read_index(path)["model"])
    except (TypeError, ValueError) as e:
        raise HuggingFaceError(f"{path}/index.json does not describe a model of this project ({e})") from None
    hf_config, theirs = to_hf_config(config) | {"dtype": str(DTYPES[dtype]).removeprefix("torch.")}, layout(config)
    sizes = {name: torch.Size(shape).numel() * DTYPES[dtype].itemsize for name, (shape, _) in theirs.items()}
    files, weight_map = shards(sizes, max_shard_bytes), {}
    with building(hf_dir) as folder:
        checkpoint.verify(path)
        for k, names in enumerate(files, 1):
            file = f"model-{k:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            weight_map |= dict.fromkeys(write_shard(path, folder / file, {name: theirs[name] for name in names}, DTYPES[dtype]), file)
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        run = path.parent.parent if path.parent.name == "checkpoints" else path      # train.py keeps a copy in the run's folder
        if tokenizer := next((f / "tokenizer.json" for f in (path, run) if (f / "tokenizer.json").is_file()), None):
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
            eot = FileTokenizer(str(tokenizer)).eot
            hf_config |= {"bos_token_id": eot, "eos_token_id": eot} if eot < config.vocab_size else {}
        (folder / "config.json").write_text(json.dumps(hf_config, indent=1))
    return config


# ---------------------------------------------------------------------------------------------------------------------

def lesson():
    """A GPT-2 there and back."""
    config = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=257)
    model, g = empty_model(config), torch.Generator().manual_seed(0)
    sharding.init(model, 0, "cpu", torch.float32)
    ours = {f"model.{name}": p.detach().add_(torch.randn(p.shape, generator=g) * 0.02) for name, p in model.named_parameters()}    # no bias stays 0
    with tempfile.TemporaryDirectory() as folder:
        here, there, back = (Path(folder) / name for name in ("here", "there", "back"))
        state = {"config": {"tokenizer": "bytes"}, "model": dataclasses.asdict(config), "tokens": 0, "corpus": None, "optimizer": None}
        checkpoint.write(here, 0, ours, state)
        export_folder(here, there)
        print(f"a GPT-2 of {num_parameters(model):,} parameters, exported as {' and '.join(sorted(f.name for f in there.iterdir()))}; its first layer:\n")
        rows = [(name, theirs, shape, place) for theirs, (shape, places) in layout(config).items() for name, place in places.items()]
        for name, theirs, shape, place in rows:
            if name.startswith("blocks.0."):
                part = "transposed" * (place.transposed and len(shape) == 2) + f", part {place.third}" * (place.third is not None)
                print(f"  {name:<34}{str(list(ours[f'model.{name}'].shape)):<11}{part.strip(', '):<20}{theirs:<36}{shape}")
        import_folder(there, back)
        again = {name: torch.empty_like(t) for name, t in ours.items()}
        checkpoint.read(back, again)
        print(f"\nimported again: {sum(torch.equal(t, again[name]) for name, t in ours.items())} of {len(ours)} tensors are equal to the last bit")
        if importlib.util.find_spec("transformers"):
            import transformers
            transformers.utils.logging.disable_progress_bar()
            tokens = torch.randint(257, (4, 32), generator=g)
            with torch.no_grad():
                logits, expected = model(tokens), transformers.AutoModelForCausalLM.from_pretrained(there).eval()(tokens).logits
            print(f"loaded by transformers {transformers.__version__}: logits up to {expected.abs().max():.2f}, "
                  f"largest difference {(logits - expected).abs().max():.1e}")


def size(text: str) -> int:
    """5GB, 500MB, or bytes."""
    found = re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a size like 5GB or 5000000000")
    return int(found[1]) * 1000 ** ["", "K", "M", "G", "T"].index(found[2])


def main(argv: list[str]) -> int:
    """Exit status: 0, or 2 with one message."""
    if not argv:
        lesson()
        return 0
    parser = argparse.ArgumentParser(description="The same weights as Hugging Face folders, in and out; without arguments, a small example.")
    parser.add_argument("command", choices=("import", "export"))
    parser.add_argument("source", help="to import: a folder with config.json and safetensors; to export: a checkpoint, or the folder of a run")
    parser.add_argument("target", help="a new folder")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="of an export (default: fp32); an import is fp32")
    parser.add_argument("--max-shard-size", type=size, default="5GB", help="of an export's files, like 5GB, or in bytes (default: 5GB)")
    args = parser.parse_args(argv)
    try:
        if args.command == "import":
            config = import_folder(args.source, args.target)
        else:
            config = export_folder(args.source, args.target, args.dtype, args.max_shard_size)
    except (HuggingFaceError, checkpoint.CheckpointError) as e:
        print(f"huggingface.py: {e}", file=sys.stderr)
        return 2
    print(f"{args.target}: {architecture_of(config).name}, {num_parameters(empty_model(config)):,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
