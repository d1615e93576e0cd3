"""Megatron-LM's checkpoints in: its format torch_dist, which unpacked .nemo files have too.

Megatron-Core writes one global tensor for each parameter of a GPT, its layers stacked; in some
checkpoints each layer has its own (decoder.layers.7. ..). Query, key and value are one matrix,
group by group: the queries that share a key, this key, its value. Gate and up are one matrix:

    decoder.layers.self_attention.linear_qkv.weight   [L, ng (np/ng + 2) hn, h]
    decoder.layers.mlp.linear_fc1.weight              [L, 2 ffn, h]

np heads of hn numbers in ng groups (their letters). A norm is part of the linear layer behind it
where Transformer Engine fuses them (linear_qkv.layer_norm_weight). The shape of the model stands in
Megatron-LM's arguments (common.pt), or in NeMo's model_config.yaml.

    python -m inference.megatron MEGATRON_DIR CKPT --vocab-size 50257

What is not computed exactly here is refused by name. No code of a file runs: of a pickle only plain
data is built. A layer is read at a time, and a file of 1 GiB is written.

Not covered: export; multi-latent attention, Mamba, shared experts, FP8 weights, optimizer states,
NeMo 2, the formats torch and zarr. Megatron Bridge has most of these.
"""

import argparse
import dataclasses
import io
import pickle
import re
import zipfile
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from base import terminal
from base.model_config import MoEConfig
from inference import huggingface
from inference.architectures import HuggingFaceError, Location
from inference.hf_config import read_json, refused
from moe import empty_model
from run.yaml_config import TABLE, Keys, read_file
from sharding import num_parameters

# --- their names ----------------------------------------------------------------------------------

QKV = ("self_attention.linear_qkv.",)
FC1 = ("mlp.linear_fc1.", "mlp.experts.experts.linear_fc1.")
VOCABULARY = ("embedding.tokens.weight", "head.output.weight")
# Our module -> what stands there before weight or bias; behind the first four, inside a layer.
TENSORS = {
    "embedding.tokens": ("embedding.word_embeddings.",),
    "embedding.positions": ("embedding.position_embeddings.",),
    "head.norm": ("decoder.final_layernorm.",),
    "head.output": ("output_layer.",),
    "attention_norm": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), QKV),
    "attention.head_norms.query_norm": ("self_attention.q_layernorm.",),
    "attention.head_norms.key_norm": ("self_attention.k_layernorm.",),
    "attention.output": ("self_attention.linear_proj.",),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.router": ("mlp.router.",),
    **dict.fromkeys(("mlp.gate", "mlp.up"), FC1),
    "mlp.down": ("mlp.linear_fc2.", "mlp.experts.experts.linear_fc2."),
}
# Fields that keys of run/yaml_config.py set, among others.
SHAPE = MoEConfig.__dataclass_fields__.keys() - {"seq_length", "vocab_size", "dropout"}
EXACT = dict(gelu="exact-gelu", geglu="exact-geglu")
# Key -> the value for which the same is computed here; of those in OFF null, false or 0.
OFF = """rotary_interleaved rotary_seq_len_interpolation_factor seq_len_interpolation_factor
    multi_latent_attention apply_residual_connection_post_layernorm apply_embedding_scaling
    quick_geglu glu_linear_offset activation_func_clamp_value window_size no_rope_freq softmax_scale
    qk_l2_norm mtp_num_layers moe_router_pre_softmax moe_router_group_topk moe_apply_probs_on_input
    moe_expert_capacity_factor moe_shared_expert_intermediate_size moe_router_topk_scaling_factor"""
COMPUTED = dict.fromkeys(OFF.split()) | dict(softmax_type="vanilla", moe_layer_freq=1)
COMPUTED |= dict(moe_router_score_function="softmax", moe_router_load_balancing_type="aux_loss")


def model_config(theirs: dict, vocab_size: int | None) -> MoEConfig:
    """From Megatron-LM's arguments, or NeMo's YAML. Raises HuggingFaceError, naming the key."""
    plain = {name: x for name, x in theirs.items() if not isinstance(x, Dropped)}
    keys = Keys(plain, {}, 1)
    get = keys.get
    for name, value in COMPUTED.items():
        if (get(name) or value) != value:
            raise HuggingFaceError(f"{name} is {get(name)}; only {value} is computed here")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"):
        if get(name) is None:
            raise HuggingFaceError(f"{name} is missing")
    for name in (name for name, (ours, _) in TABLE.items() if SHAPE >= {*ours}):
        with refused(Exception, where=f"{name}: "):
            keys.take(name)
    fields = {"activation": "gelu", "seq_length": get("max_position_embeddings")} | keys.flags
    fields |= dict(vocab_size=vocab_size, qk_norm=get("qk_layernorm", False), router="topk")
    fields["dropout"] = max(get("hidden_dropout", 0.1), get("attention_dropout", 0.1))
    fields["num_experts"] = get("num_experts", get("num_moe_experts", 0))
    fields["router_topk"] = get("moe_router_topk", 2)
    if fields["num_experts"] and get("moe_ffn_hidden_size"):
        fields["ffn_hidden_size"] = get("moe_ffn_hidden_size")
    # GELU has the tanh form in their fused kernel alone.
    if not get("bias_gelu_fusion", get("bias_activation_fusion", True)):
        fields["activation"] = EXACT.get(fields["activation"], fields["activation"])
    if get("use_rope_scaling", get("scale_positional_embedding")):
        fields["rotary_factor"] = get("rope_scaling_factor", 8.0)
    return MoEConfig(**fields)


# --- their files ----------------------------------------------------------------------------------


class Dropped:
    """An object of a class that is not read."""

    def __init__(self, *args, **kwargs): ...

    # What a pickle calls to fill an object.
    __setstate__ = __setitem__ = append = extend = __init__


class PlainUnpickler(pickle.Unpickler):
    """Builds Python's data and the classes in `known`, and calls nothing else."""

    known = (metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, torch.Size)
    known += (metadata.ChunkStorageMetadata, filesystem._StorageInfo, argparse.Namespace)

    def find_class(self, module: str, name: str):
        return {(c.__module__, c.__name__): c for c in self.known}.get((module, name), Dropped)

    def persistent_load(self, pid): ...


def open_folder(source: Path) -> tuple[Path, dict]:
    """(folder of the tensors, fields that describe the model). Raises HuggingFaceError."""
    if not source.is_dir():
        hint = "a .nemo file is a tar: unpack it, and name what it gives"
        raise HuggingFaceError(f"{source}: no such folder ({hint})")
    latest = source / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        with refused(ValueError, where=f"{latest} cannot be read: "):
            step = latest.read_text().strip()
        source /= step if step == "release" else f"iter_{step:0>7}"
    nemo = source / "model_config.yaml"
    folder = source / "model_weights" if nemo.is_file() else source
    form = folder / "metadata.json"
    if not form.is_file():
        raise HuggingFaceError(f"{form} is not there, which the format torch_dist has")
    if read_json(form).get("sharded_backend") != "torch_dist":
        raise HuggingFaceError(f"{form}: only sharded_backend torch_dist is read")
    if nemo.is_file():
        return folder, read_file(nemo)
    path = folder / "common.pt"
    with refused(Exception, where=f"{path} cannot be read: "), zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return folder, vars(PlainUnpickler(archive.open(name)).load()["args"])


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, list]]:
    """Their name, without NeMo's prefix -> (size, [(a part's offsets and sizes, where it is)]).
    Raises HuggingFaceError."""
    path, found = folder / ".metadata", {}
    with refused(Exception, where=f"{path} cannot be read: "), open(path, "rb") as file:
        content = PlainUnpickler(file).load()
        places = content.storage_data
        for name, tensor in content.state_dict_metadata.items():
            # The others are objects, such as the states of random numbers.
            if isinstance(tensor, metadata.TensorStorageMetadata):
                index = metadata.MetadataIndex
                parts = [(c, places[index(name, c.offsets)]) for c in tensor.chunks]
                found[re.sub(r"^(model|module)\.", "", name)] = tensor.size, parts
    return found


def read_tensor(folder: Path, size: torch.Size, parts: list, layer: int | None) -> Tensor:
    """One layer of a stack, or a whole tensor (None), in float32. Raises HuggingFaceError."""
    first, end = (0, size[0]) if layer is None else (layer, layer + 1)
    # What no part fills stays NaN.
    rows = torch.full((end - first, *size[1:]), torch.nan)
    for chunk, info in parts:
        start = chunk.offsets[0]
        a, b = max(first, start), min(end, start + chunk.sizes[0])
        if a >= b:
            continue
        file = folder / info.relative_path
        with refused(Exception, where=f"{file} cannot be read: "), open(file, "rb") as stream:
            stream.seek(info.offset)
            item = torch.load(io.BytesIO(stream.read(info.length)), weights_only=True)
            if item.dtype not in huggingface.DTYPES.values():
                raise HuggingFaceError(f"it has weights in {item.dtype}")
            others = [slice(n, n + m) for n, m in zip(chunk.offsets[1:], chunk.sizes[1:])]
            rows[(slice(a - first, b - first), *others)] = item[a - start : b - start]
    return rows if layer is None else rows[0]


# --- ours from theirs -----------------------------------------------------------------------------


def part(ours: str, theirs: Tensor, config: MoEConfig) -> Tensor:
    """Our parameter, in the tensor of one layer that holds it."""
    name, kv, thirds = ours.split(".")[-2], config.num_kv_heads, ("query", "key", "value")
    if name in thirds:
        queries = config.num_heads // kv
        return Location("", third=thirds.index(name), heads=kv, queries=queries).read(theirs)
    if config.gated and name in ("gate", "up"):
        # [.., 2 ffn, h] of a weight, [2 ffn] of a bias.
        gate, up = theirs.chunk(2, -min(theirs.dim(), 2))
        return gate if name == "gate" else up
    # Their vocabulary is padded.
    return theirs[: config.vocab_size] if ours in VOCABULARY else theirs


def match(stored: dict, config: MoEConfig) -> dict[str, tuple]:
    """Our parameter -> (their size, parts, the layer in a stack). Raises HuggingFaceError, naming
    what is missing, left over or different."""
    found, left, wrong = {}, set(stored), []
    for ours, parameter in empty_model(config).named_parameters():
        block, module, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*)\.(\w+)", ours).groups()
        start = ["decoder.layers.", f"decoder.layers.{block}."] if block else [""]
        names = [layers + theirs + leaf for theirs in TENSORS[module] for layers in start]
        name = next((name for name in names if name in stored), None)
        if not name:
            wrong.append(f"{names[0]} is missing")
            continue
        left.discard(name)
        size, parts = stored[name]
        stacked = bool(block) and not name.startswith(start[1])
        found[ours] = size, parts, int(block) if stacked else None
        with refused(RuntimeError, where=f"{name} is {[*size]}: "):
            of_layer = torch.empty(size[1:] if stacked else size, device="meta")
            shape = part(ours, of_layer, config).shape
        if shape != parameter.shape or (stacked and size[0] != config.num_layers):
            wrong.append(f"{name} is {[*size]}, where {ours} is {[*parameter.shape]}")
    wrong = list(dict.fromkeys(wrong)) + [f"{name} has no place here" for name in sorted(left)]
    if wrong:
        raise HuggingFaceError("; ".join(wrong[:3]) + f" ({len(wrong)} in all)")
    return found


def import_folder(source: Path, target: Path, vocab_size: int | None = None) -> str:
    """Write their model as a checkpoint of ours: float32, step 0, no optimizer moments. Returns
    what was done. Raises HuggingFaceError."""
    folder, fields = open_folder(source)
    stored = stored_tensors(folder)
    optimizer = {name for name in stored if re.match(r"(chained_\d+\.)?optimizer\.", name)}
    stored = {name: stored[name] for name in stored.keys() - optimizer}
    if "embedding.word_embeddings.weight" not in stored:
        raise HuggingFaceError(f"{folder}: embedding.word_embeddings.weight is missing")
    if vocab_size is None:
        vocab_size = stored["embedding.word_embeddings.weight"][0][0]
    with refused(ValueError, TypeError, AttributeError, where=f"{source}: "):
        config = model_config(fields, vocab_size)
        found = match(stored, config)

    def read(name: str) -> Tensor:
        tensor = part(name, read_tensor(folder, *found[name]), config).clone()
        if tensor.isnan().any():
            raise HuggingFaceError(f"{folder}: a part of {name} is missing, or holds NaN")
        return tensor

    run = {"tokenizer": huggingface.tokenizer_name(target, config)}
    state = huggingface.untrained(run, dataclasses.asdict(config))
    with huggingface.building(target) as path:
        huggingface.write_checkpoint(path, config, state, read)
    count = f"{num_parameters(empty_model(config)):,} parameters"
    return f"{target}: {count}; left out: {len(optimizer)} tensors of the optimizer"


def main(argv: list[str]) -> int:
    about = "Megatron-LM's checkpoints in."
    parser = argparse.ArgumentParser(prog="python -m inference.megatron", description=about)
    parser.add_argument("source", type=Path, help="a folder of Megatron-LM, or an unpacked .nemo")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("--vocab-size", type=int, help="without padding (default: with it)")
    args = vars(parser.parse_args(argv))
    return huggingface.report("megatron.py", lambda: import_folder(**args))


if __name__ == "__main__":
    terminal.command(main)
