"""The names that our tensors and fields have in models of `transformers`: GPT-2, Llama, Mixtral.

One table for each architecture says where each of our tensors lies in theirs, and which field of
their config.json is which of MoEConfig's. huggingface.py reads and writes folders by these tables.
A model that gpt.py does not compute exactly is refused, and the message names the field.

    gpt.py                      GPT2LMHeadModel                      LlamaForCausalLM
    embedding.tokens            transformer.wte                      model.embed_tokens
    embedding.positions         transformer.wpe                      -
    blocks.N.attention.query    transformer.h.N.attn.c_attn          model.layers.N.self_attn.q_proj
                     [h, h]                 [h, q | k | v]                                    [h, h]
    blocks.N.mlp.up  [ffn, h]   transformer.h.N.mlp.c_fc  [h, ffn]   model.layers.N.mlp.up_proj
    head.norm                   transformer.ln_f                     model.norm
    head.output                 the tied embedding                   lm_head

GPT-2's Conv1D computes y = x W where ours is y = x Wᵀ, and holds query, key and value side by side
in one matrix. MixtralForCausalLM is LlamaForCausalLM with experts in every layer. Their matrices
are one tensor here, and one tensor for each expert e there:

    blocks.N.mlp.router  [E, h]        model.layers.N.block_sparse_moe.gate            [E, h]
    blocks.N.mlp.gate    [E, ffn, h]   model.layers.N.block_sparse_moe.experts.e.w1    [ffn, h]
    blocks.N.mlp.up      [E, ffn, h]                                           e.w3    [ffn, h]
    blocks.N.mlp.down    [E, h, ffn]                                           e.w2    [h, ffn]

    python huggingface.py        a lesson: where query, key and value lie in a GPT-2's files

Hazards. Llama's rotary pairs are (i, i + d/2) on both sides, so rows keep their order; Meta's own
files interleave them. Dropout is one number here and up to three there: the largest is taken. A
Mixtral's router is our topk with router_topk of 2 or more. aux_loss keeps its number, but not its
weight: with even load, every layer contributes 1 here, and all layers together k there.

Not covered: capacity and z-loss, for which config.json has no field, and files with fused experts,
as transformers 5 writes them when told to."""

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import moe
from gpt import GPT
from routers import MoEConfig


class HuggingFaceError(Exception):
    """A folder that cannot be imported, or a checkpoint that cannot be exported; the message says
    which, and why."""


# --- tensors --------------------------------------------------------------------------------------


class Location(NamedTuple):
    """Where a tensor of ours lies in one of theirs. One location serves a module's weight and bias.

    module: their name of the module. A * in it is the number of the layer. A # is the number of an
    expert: they have one tensor for each expert, which we stack to [E, ..].
    transposed: theirs is [in, out] (Conv1D), ours [out, in].
    third: theirs holds query, key and value side by side; ours is column block 0, 1 or 2."""

    module: str
    transposed: bool = False
    third: int | None = None

    def view(self, theirs: Tensor) -> Tensor:
        """The part of their tensor that is ours, in our order, sharing memory: [in, out] or
        [in, 3 out] -> [out, in]. A bias is [out] or [3 out] -> [out]."""
        if self.third is not None:
            theirs = theirs.chunk(3, dim=-1)[self.third]
        # t() leaves a bias as it is
        return theirs.t() if self.transposed else theirs

    def shape(self, ours: torch.Size) -> list[int]:
        """The shape of their tensor."""
        *rest, last = reversed(ours) if self.transposed else ours
        return [*rest, last if self.third is None else 3 * last]


class TheirTensor(NamedTuple):
    """A tensor of a model of transformers, experts stacked."""

    shape: list[int]
    # our name -> where ours lies in it
    parts: dict[str, Location]


def unstack_experts(name: str, theirs: Tensor) -> dict[str, Tensor]:
    """Name in their files -> tensor. [E, ..] -> E of [..], where # stands for an expert's number in
    the name; otherwise the tensor itself."""
    if "#" not in name:
        return {name: theirs}
    return {name.replace("#", str(e)): expert for e, expert in enumerate(theirs)}


@dataclass(frozen=True)
class Architecture:
    """One class of transformers, as tables.

    name: of the class. model_type: in config.json. preset: of a run with such a model (train.py
    --model). prefix: of its tensors' names; some files leave it out.
    fields: field of config.json -> field of MoEConfig.
    computed: field of config.json -> the values for which gpt.py computes the same; the first is
    the default.
    modules: our module -> where it lies in theirs.
    ignored: a pattern, without prefix, of tensors that are computed or tied.
    missing: field of config.json -> what its absence means."""

    name: str
    model_type: str
    preset: str
    prefix: str
    fields: dict[str, str]
    computed: dict[str, tuple]
    modules: dict[str, Location]
    ignored: str
    missing: dict[str, float]


GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    preset="gpt2",
    prefix="transformer.",
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
        "embedding.tokens": Location("transformer.wte"),
        "embedding.positions": Location("transformer.wpe"),
        "head.norm": Location("transformer.ln_f"),
        "blocks.*.attention_norm": Location("transformer.h.*.ln_1"),
        "blocks.*.mlp_norm": Location("transformer.h.*.ln_2"),
        "blocks.*.attention.query": Location(
            "transformer.h.*.attn.c_attn", transposed=True, third=0
        ),
        "blocks.*.attention.key": Location("transformer.h.*.attn.c_attn", transposed=True, third=1),
        "blocks.*.attention.value": Location(
            "transformer.h.*.attn.c_attn", transposed=True, third=2
        ),
        "blocks.*.attention.output": Location("transformer.h.*.attn.c_proj", transposed=True),
        "blocks.*.mlp.up": Location("transformer.h.*.mlp.c_fc", transposed=True),
        "blocks.*.mlp.down": Location("transformer.h.*.mlp.c_proj", transposed=True),
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
    name="LlamaForCausalLM",
    model_type="llama",
    preset="llama2-7b",
    prefix="model.",
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
        "embedding.tokens": Location("model.embed_tokens"),
        "head.norm": Location("model.norm"),
        "head.output": Location("lm_head"),
        "blocks.*.attention_norm": Location("model.layers.*.input_layernorm"),
        "blocks.*.mlp_norm": Location("model.layers.*.post_attention_layernorm"),
        "blocks.*.attention.query": Location("model.layers.*.self_attn.q_proj"),
        "blocks.*.attention.key": Location("model.layers.*.self_attn.k_proj"),
        "blocks.*.attention.value": Location("model.layers.*.self_attn.v_proj"),
        "blocks.*.attention.output": Location("model.layers.*.self_attn.o_proj"),
        "blocks.*.mlp.gate": Location("model.layers.*.mlp.gate_proj"),
        "blocks.*.mlp.up": Location("model.layers.*.mlp.up_proj"),
        "blocks.*.mlp.down": Location("model.layers.*.mlp.down_proj"),
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
    preset="mixtral-8x7b",
    fields=LLAMA.fields
    | {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "router_topk",
        "router_aux_loss_coef": "aux_loss",
    },
    computed=LLAMA.computed | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
    modules=LLAMA.modules
    | {
        "blocks.*.mlp.router": Location("model.layers.*.block_sparse_moe.gate"),
        "blocks.*.mlp.gate": Location("model.layers.*.block_sparse_moe.experts.#.w1"),
        "blocks.*.mlp.up": Location("model.layers.*.block_sparse_moe.experts.#.w3"),
        "blocks.*.mlp.down": Location("model.layers.*.block_sparse_moe.experts.#.w2"),
    },
    missing=LLAMA.missing
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
)


def architecture_of(config: MoEConfig) -> Architecture:
    if not config.llama:
        return GPT2
    # a GPTConfig has no experts
    return MIXTRAL if getattr(config, "num_experts", 0) else LLAMA


def empty_model(config: MoEConfig) -> GPT:
    """On the meta device: names and shapes, no values."""
    with torch.device("meta"):
        return moe.build(config)


def their_tensors(config: MoEConfig) -> dict[str, TheirTensor]:
    """Their name -> their tensor, in the order of the model. Raises HuggingFaceError."""
    architecture = architecture_of(config)
    tensors = {}
    for name, parameter in empty_model(config).named_parameters():
        # blocks.7.mlp.up.weight -> blocks.7.mlp.up, weight
        module, kind = name.rsplit(".", 1)
        location = architecture.modules.get(re.sub(r"\d+", "*", module))
        if location is None:
            raise HuggingFaceError(f"{name} has no place in a {architecture.name}")
        layer = re.search(r"\d+", module)
        theirs = f"{location.module}.{kind}"
        if layer:
            theirs = theirs.replace("*", layer[0])
        tensor = TheirTensor(location.shape(parameter.shape), {})
        # GPT-2's query, key and value share one of theirs
        tensors.setdefault(theirs, tensor).parts[name] = location
    return tensors


# --- config.json -> MoEConfig ---------------------------------------------------------------------


def to_gpt_config(hf_config: dict) -> MoEConfig:
    """The model that a config.json describes. Raises HuggingFaceError, naming the field, for what
    gpt.py does not compute."""
    architecture = find_architecture(hf_config)
    check_computed(hf_config, architecture)
    integers = {field.name for field in dataclasses.fields(MoEConfig) if field.type is int}
    fields = {}
    for theirs, ours in architecture.fields.items():
        kind = int if ours in integers else float
        value = read_number(hf_config, theirs, kind, architecture.missing)
        # three fields of theirs are our dropout: the largest counts
        fields[ours] = max(value, fields.get(ours, 0))
    if architecture is not GPT2:
        fields |= {"llama": True, "rotary_base": rotary_base(hf_config, architecture.missing)}
    if architecture is MIXTRAL:
        fields |= {"router": "topk", "z_loss": 0.0}
        if not fields["num_experts"]:
            raise HuggingFaceError(f"num_local_experts is 0; a {MIXTRAL.name} has experts")
    try:
        config = MoEConfig(**fields)
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


def find_architecture(hf_config: dict) -> Architecture:
    """Raises HuggingFaceError."""
    names = hf_config.get("architectures")
    for architecture in (GPT2, LLAMA, MIXTRAL):
        if names == [architecture.name]:
            return architecture
    raise HuggingFaceError(
        f"architectures is {json.dumps(names)}; gpt.py has {GPT2.name}, {LLAMA.name} and"
        f" {MIXTRAL.name}"
    )


def check_computed(hf_config: dict, architecture: Architecture) -> None:
    """Raises HuggingFaceError for a field with a value that gpt.py does not compute."""
    for field, values in architecture.computed.items():
        value = hf_config.get(field, values[0])
        if value not in values:
            allowed = " or ".join(map(json.dumps, values))
            raise HuggingFaceError(f"{field} is {json.dumps(value)}; gpt.py has only {allowed}")


def read_number(hf_config: dict, field: str, kind: type, missing: dict[str, float]) -> float:
    """A field of config.json, as int or float. missing: field -> what its absence means. Raises
    HuggingFaceError."""
    value = hf_config.get(field)
    if value is None:
        value = missing.get(field)
    if value is None:
        raise HuggingFaceError(f"{field} is missing")
    # type(), because true is an int; NaN fails the comparison
    if type(value) not in (int, kind) or not 0 <= value < 1e30:
        expected = "an integer" if kind is int else "a number"
        raise HuggingFaceError(
            f"{field} is {json.dumps(value)}; gpt.py takes {expected}, 0 or more"
        )
    return kind(value)


def rotary_base(hf_config: dict, missing: dict[str, float]) -> float:
    """rope_theta, where transformers 4 (top level, rope_scaling) or 5 (rope_parameters) writes it.
    Raises HuggingFaceError."""
    field = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    rope = hf_config.get(field) or {}
    scaled = not isinstance(rope, dict)
    if not scaled:
        scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if scaled:
        raise HuggingFaceError(
            f"{field} is {json.dumps(rope)}; gpt.py has only the default rotary positions, without"
            " scaling"
        )
    theta = {"rope_theta": hf_config.get("rope_theta")} | rope
    return read_number(theta, "rope_theta", float, missing)


def check_experts(config: MoEConfig) -> None:
    """Raises HuggingFaceError for a model with experts that a Mixtral does not compute, naming all
    that differs."""
    differing = []
    if config.router != "topk":
        differing.append(
            f"router {config.router}: a Mixtral's gates are the softmax over the chosen logits,"
            " those of router topk"
        )
    if config.router_topk < 2:
        differing.append(
            f"router_topk {config.router_topk}: a Mixtral with num_experts_per_tok 1 has gate 1,"
            " where here it is the probability"
        )
    if config.expert_every != 1:
        differing.append(
            f"expert_every {config.expert_every}: a Mixtral has experts in every layer"
        )
    if differing:
        raise HuggingFaceError("; ".join(differing))


# --- MoEConfig -> config.json ---------------------------------------------------------------------


def to_hf_config(config: MoEConfig) -> dict:
    """config.json, for transformers 4 and 5. Raises HuggingFaceError for a model that it cannot
    describe."""
    architecture = architecture_of(config)
    check_export_of_experts(config)
    if not config.llama and config.num_kv_heads != config.num_heads:
        raise HuggingFaceError(
            f"num_kv_heads {config.num_kv_heads} of num_heads {config.num_heads}: {GPT2.name} has"
            " no grouped-query attention"
        )
    hf_config = {"architectures": [architecture.name], "model_type": architecture.model_type}
    hf_config |= {theirs: getattr(config, ours) for theirs, ours in architecture.fields.items()}
    hf_config |= {field: values[0] for field, values in architecture.computed.items()}
    if config.llama:
        hf_config |= {
            "head_dim": config.head_dim,
            "rope_theta": config.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        }
    # the end-of-text token of bytes, and of GPT-2's vocabulary
    end_of_text = {257: 256, 50257: 50256}.get(config.vocab_size)
    return hf_config | {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def check_export_of_experts(config: MoEConfig) -> None:
    """Raises HuggingFaceError for experts that no class of transformers has, naming the training
    flags with which a model can be exported."""
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
        flags = f"--router topk --router-topk {max(2, config.router_topk)} --expert-every 1"
        raise HuggingFaceError(f"{e}; a model trained with {flags} could be exported") from None
