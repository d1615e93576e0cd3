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

Not covered: export; multi-latent attention, Mamba, shared experts; FP8 weights; optimizer states;
NeMo 2, whose shapes are in its code; the formats torch and zarr. Megatron Bridge has most of these.
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
from finetune.nemo_config import read_file
from inference import hf_config, huggingface
from inference.architectures import LLAMA, HuggingFaceError, Location
from inference.hf_config import refused
from moe import empty_model
from sharding import num_parameters

# --- their names ----------------------------------------------------------------------------------

QKV = "self_attention.linear_qkv."
FC1 = ("mlp.linear_fc1.", "mlp.experts.experts.linear_fc1.")
# Our module -> what stands there before weight or bias; behind the first four, inside a layer.
TENSORS = {
    "embedding.tokens": ("embedding.word_embeddings.",),
    "embedding.positions": ("embedding.position_embeddings.",),
    "head.norm": ("decoder.final_layernorm.",),
    "head.output": ("output_layer.",),
    "attention_norm": (QKV + "layer_norm_", "input_layernorm."),
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), (QKV,)),
    "attention.head_norms.query_norm": ("self_attention.q_layernorm.",),
    "attention.head_norms.key_norm": ("self_attention.k_layernorm.",),
    "attention.output": ("self_attention.linear_proj.",),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.router": ("mlp.router.",),
    **dict.fromkeys(("mlp.gate", "mlp.up"), FC1),
    "mlp.down": ("mlp.linear_fc2.", "mlp.experts.experts.linear_fc2."),
}
# NeMo's name of a field -> Megatron-LM's.
ALIASES = dict(bias="add_bias_linear", qkv_bias="add_qkv_bias", num_moe_experts="num_experts")
ALIASES |= dict(layernorm_epsilon="norm_epsilon", rotary_percentage="rotary_percent")
ALIASES |= dict(layernorm_zero_centered_gamma="apply_layernorm_1p")
ALIASES |= dict(bias_activation_fusion="bias_gelu_fusion")
ALIASES |= dict(scale_positional_embedding="use_rope_scaling")
ALIASES |= dict(seq_len_interpolation_factor="rotary_seq_len_interpolation_factor")
SAME = ("num_layers", "hidden_size", "ffn_hidden_size", "num_experts", "rotary_base")
NORMS = ("layernorm", "layernorm1p", "rmsnorm", "rmsnorm1p")
ACTIVATIONS = ("gelu", "exact-gelu", "squared-relu", "swiglu")
# Fields with one value here.
FALSE = """rotary_interleaved multi_latent_attention apply_residual_connection_post_layernorm
    qk_l2_norm moe_router_pre_softmax moe_apply_probs_on_input"""
NULL = """window_size rotary_seq_len_interpolation_factor no_rope_freq softmax_scale mtp_num_layers
    activation_func_clamp_value moe_expert_capacity_factor moe_shared_expert_intermediate_size
    moe_router_group_topk moe_router_topk_scaling_factor"""
# The tables of inference/architectures.py, for what `unified` returns.
MEGATRON = dataclasses.replace(
    LLAMA,
    constants={"router": "topk"},
    fields={name: name for name in SAME}
    | dict(num_attention_heads="num_heads", num_query_groups="num_kv_heads", kv_channels="head_dim")
    | dict(max_position_embeddings="seq_length", padded_vocab_size="vocab_size")
    | dict(norm_epsilon="norm_eps", rotary_percent="rotary_share", moe_router_topk="router_topk")
    | dict(rope_scaling_factor="rotary_factor", hidden_dropout="dropout")
    | dict(attention_dropout="dropout"),
    missing=dict(num_query_groups=0, ffn_hidden_size=0, kv_channels=0, norm_epsilon=1e-5)
    | dict(rotary_base=10000.0, rotary_percent=1.0, num_experts=0, moe_router_topk=2)
    | dict(hidden_dropout=0.1, attention_dropout=0.1),
    choices={
        "biases": ("attention_bias", {name: name for name in ("all", "qkv", "none")}),
        "add_bias_linear": ("mlp_bias", {True: True, False: False}),
        "normalization": ("norm", {name: name for name in NORMS}),
        "activation": ("activation", {name: name for name in ACTIVATIONS}),
        "position_embedding_type": ("positions", {"learned_absolute": "learned", "rope": "rotary"}),
        "untie_embeddings_and_output_weights": ("tied", {False: True, True: False}),
        "qk_layernorm": ("qk_norm", {False: False, True: True}),
    },
    computed={"moe_router_load_balancing_type": ("aux_loss", "none"), "moe_layer_freq": (1,)}
    | {"moe_router_score_function": ("softmax",), "softmax_type": ("vanilla",)}
    | {"glu_linear_offset": (0.0,)}
    | dict.fromkeys(FALSE.split(), (False,))
    | dict.fromkeys(NULL.split(), (None,)),
)


def unified(theirs: dict) -> dict:
    """The fields of MEGATRON, from Megatron-LM's arguments or NeMo's YAML."""
    fields = {ALIASES.get(name, name): value for name, value in theirs.items()}
    fields = {name: x for name, x in fields.items() if not isinstance(x, Dropped | None)}
    get = fields.get
    bias = fields.setdefault("add_bias_linear", True)
    fields["biases"] = "all" if bias else "qkv" if get("add_qkv_bias") else "none"
    norm = str(get("normalization", "layernorm")).lower()
    fields["normalization"] = norm + "1p" * bool(get("apply_layernorm_1p"))
    flags = [name for name in ("swiglu", "squared_relu", "quick_geglu") if get(name)]
    activation = (flags or [get("activation", "gelu")])[0].replace("_", "-").removeprefix("fast-")
    # GELU has the tanh form in their fused kernel alone.
    exact = activation == "gelu" and not get("bias_gelu_fusion", True)
    fields["activation"] = "exact-gelu" if exact else activation
    factor = get("rope_scaling_factor", 8.0) if get("use_rope_scaling") else 1.0
    shared = get("share_embeddings_and_output_weights", True)
    fields.setdefault("untie_embeddings_and_output_weights", not shared)
    if get("num_experts") and get("moe_ffn_hidden_size"):
        fields["ffn_hidden_size"] = get("moe_ffn_hidden_size")
    # Without grouped queries this argument is 1, and has no effect.
    if not get("group_query_attention", True):
        fields.pop("num_query_groups", None)
    return fields | {"rope_scaling_factor": factor}


# --- their files ----------------------------------------------------------------------------------


class Dropped:
    """An object of a class that is not read."""

    def __init__(self, *args, **kwargs): ...

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
    latest = source / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        step = latest.read_text().strip()
        source /= step if step == "release" else f"iter_{step:0>7}"
    nemo = source / "model_config.yaml"
    folder = source / "model_weights" if nemo.is_file() else source
    if not (folder / "metadata.json").is_file():
        hint = "a .nemo file is a tar: unpack it, and name the folder"
        raise HuggingFaceError(f"{folder} has no metadata.json of the format torch_dist ({hint})")
    form = hf_config.read_json(folder / "metadata.json").get("sharded_backend")
    if form != "torch_dist":
        raise HuggingFaceError(f"{folder} has the format {form}; only torch_dist is read")
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
        for name, tensor in content.state_dict_metadata.items():
            # The others are objects, such as the states of random numbers.
            if isinstance(tensor, metadata.TensorStorageMetadata):
                index = [metadata.MetadataIndex(name, chunk.offsets) for chunk in tensor.chunks]
                parts = [(c, content.storage_data[i]) for c, i in zip(tensor.chunks, index)]
                found[re.sub(r"^(model|module)\.", "", name)] = tensor.size, parts
    return found


def read_tensor(folder: Path, size: torch.Size, parts: list, layer: int | None) -> Tensor:
    """One layer of a stack, or a whole tensor (None), in float32. Raises HuggingFaceError."""
    first, end = (0, size[0]) if layer is None else (layer, layer + 1)
    rows = torch.empty(end - first, *size[1:])
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
    name, kv = ours.split(".")[-2], config.num_kv_heads
    if name in ("query", "key", "value"):
        third = ("query", "key", "value").index(name)
        return Location("", third=third, heads=kv, queries=config.num_heads // kv).read(theirs)
    if config.gated and name in ("gate", "up"):
        # [.., 2 ffn, h] of a weight, [2 ffn] of a bias.
        return theirs.chunk(2, -min(theirs.dim(), 2))[name == "up"]
    # Their vocabulary is padded.
    is_vocabulary = ours in ("embedding.tokens.weight", "head.output.weight")
    return theirs[: config.vocab_size] if is_vocabulary else theirs


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
        stack = [config.num_layers] if block and not name.startswith(start[1]) else []
        size, parts = stored[name]
        found[ours] = size, parts, int(block) if stack else None
        with refused(RuntimeError, where=f"{name} is {[*size]}: "):
            mine = part(ours, torch.empty(size[len(stack) :], device="meta"), config)
        if mine.shape != parameter.shape or [*size[: len(stack)]] != stack:
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
    padded = stored.get("embedding.word_embeddings.weight", [[None]])[0][0]
    size = {"padded_vocab_size": padded if vocab_size is None else vocab_size}
    with refused(ValueError, where=f"{source}: "):
        config = hf_config.read_fields(unified(fields) | size, MEGATRON)
        found = match(stored, config)
    run = {"tokenizer": huggingface.tokenizer_name(target, config)}
    with huggingface.building(target) as path:
        state = huggingface.untrained(run, dataclasses.asdict(config))
        huggingface.write_checkpoint(
            path, config, state, lambda n: part(n, read_tensor(folder, *found[n]), config).clone()
        )
    count = f"{num_parameters(empty_model(config)):,} parameters"
    return f"{target}: {count}; left out: {len(optimizer)} tensors of the optimizer"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m inference.megatron", description=__doc__[:86])
    parser.add_argument("source", type=Path, help="a folder of Megatron-LM, or an unpacked .nemo")
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("--vocab-size", type=int, help="without padding (default: with it)")
    args = vars(parser.parse_args(argv))
    return huggingface.report("megatron.py", lambda: import_folder(**args))


if __name__ == "__main__":
    terminal.command(main)
