"""What each of our tensors and fields is called in a model of `transformers`: GPT-2, Llama,
Mixtral.

One table for each architecture says where each of our tensors lies in which of theirs, and which
fields of their config.json are which of GPTConfig's. huggingface.py reads and writes folders by it
(`python huggingface.py` prints one layer's names). What gpt.py does not compute is refused by name,
never ignored.

    gpt.py                           GPT2LMHeadModel                              LlamaForCausalLM
    embedding.tokens                 transformer.wte                              model.embed_tokens
    embedding.positions              transformer.wpe                              -
    blocks.N.attention.query [h, h]  transformer.h.N.attn.c_attn [h, q | k | v]   model.layers.N.self_attn.q_proj
    blocks.N.mlp.up        [ffn, h]  transformer.h.N.mlp.c_fc    [h, ffn]         model.layers.N.mlp.up_proj
    head.norm                        transformer.ln_f                             model.norm
    head.output                      tied to the embedding                        lm_head

GPT-2's Conv1D computes y = x W where ours is y = x Wᵀ, with query, key and value side by side in
one matrix. Llama's rotary pairs are (i, i + d/2) on both sides, so rows keep their order (Meta's
own files interleave them). Dropout is one number here and up to three there: the largest counts.

MixtralForCausalLM is LlamaForCausalLM with experts in every layer. Their matrices are one tensor
here, one for each expert e there:

    blocks.N.mlp.router       [E, h]       model.layers.N.block_sparse_moe.gate                  [E, h]
    blocks.N.mlp.gate         [E, ffn, h]  model.layers.N.block_sparse_moe.experts.e.w1          [ffn, h]; up is w3, down w2

Of the routers only topk with router_topk >= 2 is Mixtral's. aux_loss keeps its number, not its
weight: with even load each layer's is 1 here, all layers' together k there. Capacity and z-loss
have no field there. transformers 5 fuses experts in memory; in files only if told to: not read
here."""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpt import GPT, GPTConfig


class HuggingFaceError(Exception):
    """A folder that cannot be imported, or a checkpoint that cannot be exported; the message says
    which, and why."""


# --------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where our tensor lies in theirs. A module's weight and bias go together."""

    # * is the number of the layer; #, of an expert: a tensor for each, together [E, ..]
    module: str
    # Conv1D: [in, out]
    transposed: bool = False
    # of its columns: query, key or value
    third: int | None = None

    def view(self, theirs: Tensor) -> Tensor:
        """The part of their tensor that is ours, in our order. [in, out] or [in, 3 out] -> [out,
        in]"""
        if self.third is not None:
            theirs = theirs.chunk(3, dim=-1)[self.third]
        # t() of a bias is the bias
        return theirs.t() if self.transposed else theirs

    def shape(self, ours: torch.Size) -> list[int]:
        """The shape of their tensor."""
        *rest, last = reversed(ours) if self.transposed else ours
        return [*rest, last if self.third is None else 3 * last]


def split(name: str, theirs: Tensor) -> dict[str, Tensor]:
    """By the names in their files: where # stands for the number of an expert, one for each. [..]
    -> {name: [..]}; [E, ..] -> E of them"""
    return (
        {name.replace("#", str(e)): t for e, t in enumerate(theirs)}
        if "#" in name
        else {name: theirs}
    )


@dataclass(frozen=True)
class Architecture:
    # of the class in transformers
    name: str
    model_type: str
    # of its tensors' names; some files leave it out
    prefix: str
    # of config.json -> of GPTConfig
    fields: dict[str, str]
    # fields of config.json -> the values for which gpt.py computes the same; the first is the
    # default
    computed: dict[str, tuple]
    # ours -> theirs
    modules: dict[str, Place]
    # a pattern: tensors that are computed or tied, without prefix
    ignored: str
    # what a field means that config.json does not have
    missing: dict[str, float]


GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    "transformer.",
    fields={
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_heads",
        "n_inner": "ffn_hidden_size",
        "n_positions": "seq_length",
        "vocab_size": "vocab_size",
        "layer_norm_epsilon": "norm_eps",
        "embd_pdrop": "dropout",
        "attn_pdrop": "dropout",
        "resid_pdrop": "dropout",
    },
    computed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    modules={
        "embedding.tokens": Place("transformer.wte"),
        "embedding.positions": Place("transformer.wpe"),
        "head.norm": Place("transformer.ln_f"),
        "blocks.*.attention_norm": Place("transformer.h.*.ln_1"),
        "blocks.*.mlp_norm": Place("transformer.h.*.ln_2"),
        "blocks.*.attention.query": Place("transformer.h.*.attn.c_attn", transposed=True, third=0),
        "blocks.*.attention.key": Place("transformer.h.*.attn.c_attn", transposed=True, third=1),
        "blocks.*.attention.value": Place("transformer.h.*.attn.c_attn", transposed=True, third=2),
        "blocks.*.attention.output": Place("transformer.h.*.attn.c_proj", transposed=True),
        "blocks.*.mlp.up": Place("transformer.h.*.mlp.c_fc", transposed=True),
        "blocks.*.mlp.down": Place("transformer.h.*.mlp.c_proj", transposed=True),
    },
    ignored=r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight",
    missing={
        "n_inner": 0,
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
)

LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    "model.",
    fields={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
        "vocab_size": "vocab_size",
        "rms_norm_eps": "norm_eps",
        "attention_dropout": "dropout",
    },
    computed={
        "hidden_act": ("silu", "swish"),
        "tie_word_embeddings": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    modules={
        "embedding.tokens": Place("model.embed_tokens"),
        "head.norm": Place("model.norm"),
        "head.output": Place("lm_head"),
        "blocks.*.attention_norm": Place("model.layers.*.input_layernorm"),
        "blocks.*.mlp_norm": Place("model.layers.*.post_attention_layernorm"),
        "blocks.*.attention.query": Place("model.layers.*.self_attn.q_proj"),
        "blocks.*.attention.key": Place("model.layers.*.self_attn.k_proj"),
        "blocks.*.attention.value": Place("model.layers.*.self_attn.v_proj"),
        "blocks.*.attention.output": Place("model.layers.*.self_attn.o_proj"),
        "blocks.*.mlp.gate": Place("model.layers.*.mlp.gate_proj"),
        "blocks.*.mlp.up": Place("model.layers.*.mlp.up_proj"),
        "blocks.*.mlp.down": Place("model.layers.*.mlp.down_proj"),
    },
    ignored=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    missing={
        "num_key_value_heads": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
    },
)

MIXTRAL = dataclasses.replace(
    LLAMA,
    name="MixtralForCausalLM",
    model_type="mixtral",
    fields=LLAMA.fields
    | {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "router_topk",
        "router_aux_loss_coef": "aux_loss",
    },
    computed=LLAMA.computed | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
    modules=LLAMA.modules
    | {
        "blocks.*.mlp.router": Place("model.layers.*.block_sparse_moe.gate"),
        "blocks.*.mlp.gate": Place("model.layers.*.block_sparse_moe.experts.#.w1"),
        "blocks.*.mlp.up": Place("model.layers.*.block_sparse_moe.experts.#.w3"),
        "blocks.*.mlp.down": Place("model.layers.*.block_sparse_moe.experts.#.w2"),
    },
    missing=LLAMA.missing
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
)


def architecture_of(config: GPTConfig) -> Architecture:
    return (MIXTRAL if config.num_experts else LLAMA) if config.llama else GPT2


def empty_model(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def layout(config: GPTConfig) -> dict[str, tuple[list[int], dict[str, Place]]]:
    """Their name -> (its shape, {our name: where in it}), in the order of the model."""
    architecture = architecture_of(config)
    found = {}
    for name, parameter in empty_model(config).named_parameters():
        module, kind = name.rsplit(".", 1)
        layer = (re.findall(r"\d+", module) or [""])[0]
        place = architecture.modules.get(re.sub(r"\d+", "*", module))
        if place is None:
            raise HuggingFaceError(f"{name} has no place in a {architecture.name}")
        theirs = f"{place.module.replace('*', layer)}.{kind}"
        found.setdefault(theirs, (place.shape(parameter.shape), {}))[1][name] = place
    return found


# --- config.json ----------------------------------------------------------------------------------


def number(hf_config: dict, field: str, kind: type, missing: dict[str, float]) -> float:
    """A field, checked. Raises HuggingFaceError."""
    value = hf_config.get(field)
    value = missing.get(field) if value is None else value
    if value is None:
        raise HuggingFaceError(f"{field} is missing")
    # NaN and true fail too
    if type(value) not in (int, kind) or not 0 <= value < 1e30:
        raise HuggingFaceError(
            f"{field} is {json.dumps(value)}; gpt.py takes"
            f" {'an integer' if kind is int else 'a number'}, 0 or more"
        )
    return kind(value)


def rotary_base(hf_config: dict, missing: dict[str, float]) -> float:
    """rope_theta, where transformers 4 (top level, rope_scaling) or 5 (rope_parameters) writes it.
    Raises HuggingFaceError."""
    field = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    rope = hf_config.get(field) or {}
    if (
        not isinstance(rope, dict)
        or rope.get("rope_type", rope.get("type", "default")) != "default"
    ):
        raise HuggingFaceError(
            f"{field} is {json.dumps(rope)}; gpt.py has only the default rotary positions, without"
            " scaling"
        )
    return number({"rope_theta": hf_config.get("rope_theta")} | rope, "rope_theta", float, missing)


def check_experts(config: GPTConfig) -> None:
    """Raises HuggingFaceError for a model with experts that a Mixtral does not compute, naming all
    that differs."""
    wrong = []
    for field, same, why in (
        (
            "router",
            config.router == "topk",
            "a Mixtral's gates are the softmax over the chosen logits, those of router topk",
        ),
        (
            "router_topk",
            config.router_topk > 1,
            "a Mixtral with num_experts_per_tok 1 has gate 1, where here it is the probability",
        ),
        ("expert_every", config.expert_every == 1, "a Mixtral has experts in every layer"),
    ):
        if not same:
            wrong.append(f"{field} {getattr(config, field)}: {why}")
    if wrong:
        raise HuggingFaceError("; ".join(wrong))


def to_gpt_config(hf_config: dict) -> GPTConfig:
    """The model that a config.json describes. Raises HuggingFaceError, naming the field, for what
    gpt.py does not compute."""
    names = hf_config.get("architectures")
    architecture = next((a for a in (GPT2, LLAMA, MIXTRAL) if names == [a.name]), None)
    if architecture is None:
        raise HuggingFaceError(
            f"architectures is {json.dumps(names)}; gpt.py has {GPT2.name}, {LLAMA.name} and"
            f" {MIXTRAL.name}"
        )
    for field, values in architecture.computed.items():
        if hf_config.get(field, values[0]) not in values:
            raise HuggingFaceError(
                f"{field} is {json.dumps(hf_config[field])}; gpt.py has only"
                f" {' or '.join(json.dumps(v) for v in values)}"
            )
    kinds = {f.name: int if f.type is int else float for f in dataclasses.fields(GPTConfig)}
    fields = {}
    for theirs, ours in architecture.fields.items():
        fields[ours] = max(
            number(hf_config, theirs, kinds[ours], architecture.missing), fields.get(ours, 0)
        )
    if architecture is not GPT2:
        fields |= {"llama": True, "rotary_base": rotary_base(hf_config, architecture.missing)}
    if architecture is MIXTRAL:
        fields |= {"router": "topk", "z_loss": 0.0}
        if not fields["num_experts"]:
            raise HuggingFaceError(f"num_local_experts is 0; a {MIXTRAL.name} has experts")
    try:
        config = GPTConfig(**fields)
    except ValueError as e:
        raise HuggingFaceError(str(e)) from None
    if architecture is MIXTRAL:
        check_experts(config)
    if config.llama and hf_config.get("head_dim") not in (None, config.head_dim):
        raise HuggingFaceError(
            f"head_dim is {json.dumps(hf_config['head_dim'])}; gpt.py has only hidden_size /"
            f" num_attention_heads = {config.head_dim}"
        )
    return config


def check_export_of_experts(config: GPTConfig) -> None:
    """Raises HuggingFaceError for experts that no class of transformers has, naming the flags of a
    training whose would be exported."""
    if not config.num_experts:
        return
    if not config.llama:
        raise HuggingFaceError(
            f"num_experts {config.num_experts}: {GPT2.name} has none; only models of Llama's kind"
            f" have, as {MIXTRAL.name}: train with --model tiny-moe, llama2-7b or mixtral-8x7b"
        )
    try:
        check_experts(config)
    except HuggingFaceError as e:
        fit = f"--router topk --router-topk {max(2, config.router_topk)} --expert-every 1"
        raise HuggingFaceError(f"{e}; a model trained with {fit} could be exported") from None


def to_hf_config(config: GPTConfig) -> dict:
    """config.json, for transformers 4 and 5. Raises HuggingFaceError for a model that it cannot
    describe."""
    architecture = architecture_of(config)
    check_export_of_experts(config)
    if not config.llama and config.num_kv_heads != config.num_heads:
        raise HuggingFaceError(
            f"num_kv_heads {config.num_kv_heads} of num_heads {config.num_heads}: {GPT2.name} has"
            " no grouped-query attention"
        )
    # of bytes, of GPT-2's tokens
    eot = {257: 256, 50257: 50256}.get(config.vocab_size)
    rotary = {
        "head_dim": config.head_dim,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
    }
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **{theirs: getattr(config, ours) for theirs, ours in architecture.fields.items()},
        **{field: values[0] for field, values in architecture.computed.items()},
        **(rotary if config.llama else {}),
        "bos_token_id": eot,
        "eos_token_id": eot,
    }
