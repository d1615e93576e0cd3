"""The names that our tensors and fields have in models of `transformers`: one table for each class.

It says where each of our tensors lies in theirs, and which field of their config.json is which of
MoEConfig's (GPTConfig's, and those of experts: moe.py). inference/huggingface.py reads and
writes folders by these tables, hf_config.py config.json. A model that is not computed exactly here
is refused, and the message names the field. The tables of BERT and T5 are in models/huggingface.py.

    gpt.py                      GPT2LMHeadModel                      LlamaForCausalLM
    embedding.tokens            transformer.wte                      model.embed_tokens
    embedding.positions         transformer.wpe                      -
    blocks.N.attention.query    transformer.h.N.attn.c_attn          model.layers.N.self_attn.q_proj
                     [h, h]                 [h, q | k | v]                                    [h, h]
    blocks.N.mlp.up  [ffn, h]   transformer.h.N.mlp.c_fc  [h, ffn]   model.layers.N.mlp.up_proj
    head.norm                   transformer.ln_f                     model.norm
    head.output                 the tied embedding                   lm_head

GPT-2's Conv1D computes y = x W where ours is y = x Wᵀ, and holds query, key and value side by side
in one matrix. BLOOM is GPT-2 with ALiBi and a norm of the embedding, and has them in one matrix
head by head: the query of head 0, its key, its value, the query of head 1. In Falcon's several
queries come before the key and the value that they share. Mistral, Qwen, Gemma and Nemotron have
Llama's names, and another part or two. MixtralForCausalLM is LlamaForCausalLM with experts in
every layer. Their matrices are one tensor here, and one tensor for each expert e there:

    blocks.N.mlp.router  [E, h]        model.layers.N.block_sparse_moe.gate            [E, h]
    blocks.N.mlp.gate    [E, ffn, h]   model.layers.N.block_sparse_moe.experts.e.w1    [ffn, h]
    blocks.N.mlp.up      [E, ffn, h]                                           e.w3    [ffn, h]
    blocks.N.mlp.down    [E, h, ffn]                                           e.w2    [h, ffn]

Hazards. Llama's rotary pairs are (i, i + d/2) on both sides, so rows keep their order; Meta's own
files interleave them. Dropout is one number here and up to three there: the largest is taken. A
Mixtral's router is our topk with router_topk of 2 or more. aux_loss keeps its number, but not its
weight: with even load, every layer contributes 1 here, and all layers together k there. A Mistral
without a window is exported as the Llama that it is.

Not covered: capacity and z-loss, for which config.json has no field; files with fused experts, as
transformers 5 writes them when told to; windows in some layers, but for a Qwen's; a DeepSeek's
heads with pairs in halves (rope_interleave false), and its modules of multi-token prediction, which
import leaves out: no logit of the model depends on them.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.errors import InputError
from base.model_config import MoEConfig
from moe import empty_model
from run.tokenizer import Tokenizer


class HuggingFaceError(InputError):
    """A folder that cannot be imported, or a checkpoint that cannot be exported; the message says
    which, and why."""


# --- tensors --------------------------------------------------------------------------------------

# The part of a name that stands for several names.
SEVERAL = re.compile("#|{(.*)}")


class Location(NamedTuple):
    """Where a tensor of ours lies in one of theirs. One location serves a module's weight and bias.

    module: their name of the module. A * in it is the number of the layer. A # is the number of an
    expert: they have one tensor for each expert, which we stack to [E, ..]. {a,b} in it means two
    tensors, of names with a and with b, which we stack to [2, ..].
    skipped: the first rows of theirs, which no model reads, and which ours lacks.
    shapes: of theirs and of ours, where these differ for the same numbers.
    transposed: theirs is [in, out] (Conv1D), ours [out, in].
    rows: of theirs, which are ours, in our order; theirs has `size` of them.
    third: theirs holds query, key and value side by side; ours is column block 0, 1 or 2.
    heads: theirs holds them by heads of keys: [a_kv, queries + 2, d, in]. 0: all of query, then
    key, then value. queries: that share one of these heads, a / a_kv."""

    module: str
    transposed: bool = False
    third: int | None = None
    heads: int = 0
    queries: int = 1
    skipped: int = 0
    shapes: tuple[Sequence[int], Sequence[int]] | None = None
    rows: Tensor | None = None
    size: int = 0

    def view(self, theirs: Tensor) -> Tensor:
        """The part of their tensor that is ours, in our order, sharing memory: [in, out] or
        [in, 3 out] -> [out, in], with heads -> [a_kv, queries or 1, d, in]. A bias has no `in`."""
        if self.shapes:
            return theirs.view(self.shapes[1])
        if self.heads:
            each = theirs.unflatten(0, (self.heads, self.queries + 2, -1))
            return each.split((self.queries, 1, 1), dim=1)[self.third]
        if self.third is not None:
            theirs = theirs.chunk(3, dim=-1)[self.third]
        theirs = theirs[self.skipped :]
        # t() leaves a bias as it is.
        return theirs.t() if self.transposed else theirs

    def read(self, theirs: Tensor) -> Tensor:
        """Our tensor."""
        if self.rows is not None:
            return theirs[self.rows]
        view = self.view(theirs)
        return view.flatten(0, 2) if self.heads else view

    @property
    def is_view(self) -> bool:
        """Whether `view` is our tensor; else `read` copies it."""
        return not self.heads and self.rows is None

    def write(self, theirs: Tensor, ours: Tensor) -> None:
        """The reverse of `read`, where it copies."""
        if self.rows is None:
            view = self.view(theirs)
            view.copy_(ours.view(view.shape))
        else:
            theirs[self.rows] = ours

    def shape(self, ours: torch.Size) -> list[int]:
        """The shape of their tensor."""
        if self.shapes:
            return [*self.shapes[0]]
        if self.heads:
            own = self.queries if self.third == 0 else 1
            return [ours[0] // own * (self.queries + 2), *ours[1:]]
        shape = [*(reversed(ours) if self.transposed else ours)]
        shape[0] = self.size or shape[0] + self.skipped
        shape[-1] *= 1 if self.third is None else 3
        return shape

    @property
    def is_stack(self) -> bool:
        """Whether they have several tensors for one of ours."""
        return bool(SEVERAL.search(self.module))


class TheirTensor(NamedTuple):
    """A tensor of a model of transformers, or several of them, stacked."""

    shape: list[int]
    # Our name -> where ours lies in it.
    parts: dict[str, Location]


def in_halves(module: str, first: int, *halves: str) -> str:
    """blocks.7.mlp.up -> decoder.1.mlp.up, after six blocks of the encoder. first: blocks of the
    first half; halves: their names."""
    block = re.match(r"blocks\.(\d+)", module)
    if not block:
        return module
    number, half = int(block[1]), halves[0]
    if number >= first:
        number, half = number - first, halves[1]
    return module.replace(block[0], f"{half}.{number}")


def unstack(name: str, theirs: Tensor) -> dict[str, Tensor]:
    """Name in their files -> tensor. [n, ..] -> n of [..], where # in the name stands for the
    numbers from 0, or {a,b} for a and b; otherwise the tensor itself."""
    several = SEVERAL.search(name)
    if not several:
        return {name: theirs}
    parts = several[1].split(",") if several[1] else map(str, range(len(theirs)))
    return {name.replace(several[0], part): tensor for part, tensor in zip(parts, theirs)}


@dataclass(frozen=True)
class Architecture:
    """One class of transformers, as tables; what no table says is a method.

    name: of the class. model_type: in config.json. preset: of a run with such a model (train.py
    --model). prefix: of its tensors' names; some files leave it out.
    constants: field of MoEConfig -> its value in all models of this class.
    fields: field of config.json -> field of MoEConfig, a number.
    choices: field of config.json -> (field of MoEConfig, {their value: ours}); the first is the
    default.
    computed: field of config.json -> the values for which the same is computed here; the first is
    the default.
    modules: our module -> where it lies in theirs. experts: those of layers with experts, before
    those of `modules`, where other layers have none.
    reshaped: our parameter -> (theirs, its shape of ours): another shape, or a name that no module
    has.
    ignored: a pattern, without prefix, of tensors that are computed, or that no logit depends on.
    missing: field of config.json -> what its absence means.
    parts: fields of config.json that hold fields, which the tables name part.field.
    aliases: field of another version's config.json -> field.
    copies: a tensor, without prefix, that some files have beside the one that it is a copy of ->
    that one. renamed: the end of a tensor's name in older files -> its end.
    first_position: the row of the first position in their table.
    shape_class: the configuration of our model."""

    name: str
    model_type: str
    preset: str
    prefix: str
    fields: dict[str, str]
    choices: dict[str, tuple[str, dict]]
    computed: dict[str, tuple]
    modules: dict[str, Location]
    missing: dict[str, float]
    experts: dict[str, Location] = field(default_factory=dict)
    ignored: str = "-"
    constants: dict[str, str | bool | int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    first_position: int = 0
    reshaped: dict[str, tuple[str, Callable[..., tuple]]] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    shape_class: type[MoEConfig] = MoEConfig

    @property
    def has_windows(self) -> bool:
        """Whether config.json says which layers have a sliding window."""
        return True in self.computed.get("use_sliding_window", ())

    @property
    def rotary(self) -> bool:
        """Whether config.json has the base and the scaling of rotary positions."""
        return bool(self.constants.get("llama")) or self.constants.get("positions") == "rotary"

    @property
    def num_experts(self) -> str:
        """Their field of the number of experts; "" for a class without experts."""
        return next((theirs for theirs, ours in self.fields.items() if ours == "num_experts"), "")

    def read(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of our configuration, from those that the tables give."""
        first = self.first_position
        return fields | ({"seq_length": fields["seq_length"] - first} if first else {})

    def write(self, hf_config: dict[str, Any], config: MoEConfig) -> dict[str, Any]:
        """The fields of config.json, from those that the tables give."""
        longest = {"max_position_embeddings": config.seq_length + self.first_position}
        return hf_config | (longest if self.first_position else {})

    def flat(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """The fields of a config.json under the names that the tables have. Raises
        HuggingFaceError."""
        flat = {self.aliases.get(name, name): x for name, x in hf_config.items()} | hf_config
        for part in self.parts:
            # Older files have both; transformers reads the first.
            fields = hf_config.get(f"{part}_dict") or hf_config.get(part) or {}
            if not isinstance(fields, dict):
                raise HuggingFaceError(f"{part} holds no fields")
            flat |= {f"{part}.{name}": x for name, x in fields.items()}
        return flat

    def nested(self, flat: dict[str, Any]) -> dict[str, Any]:
        """A config.json, of fields under the names that the tables have."""
        hf_config = {part: {} for part in self.parts}
        for name, value in flat.items():
            part, _, field = name.rpartition(".")
            (hf_config[part] if part else hf_config)[field] = value
        return hf_config

    def place(self, name: str, shape: torch.Size, config: MoEConfig) -> tuple[Location | None, str]:
        """(where a parameter of ours lies, the name of their tensor)"""
        if name in self.reshaped:
            theirs, reshape = self.reshaped[name]
            return Location(theirs, shapes=(reshape(*shape), shape)), theirs
        # blocks.7.mlp.up.weight -> blocks.7.mlp.up, weight.
        module, leaf = name.rsplit(".", 1)
        location, layer = self.locate(module, config)
        return location, f"{location.module}.{leaf}".replace("*", layer) if location else ""

    def unread(self, names: Iterable[str]) -> set[str]:
        """Those of a folder's tensors, without prefix, that are not imported."""
        return {name for name in names if re.fullmatch(self.ignored, name)}

    def reader(self, hf_dir: Path, config: MoEConfig, read: Callable) -> Callable:
        """read(our name), a whole parameter, with what the files of a folder change in it."""
        return read

    def read_beside(self, hf_dir: Path) -> dict[str, Any]:
        """Further fields of a checkpoint's index, from the files of a folder."""
        return {}

    def write_beside(self, folder: Path, hf_config: dict, index: dict) -> dict[str, Any]:
        """Write further files of a folder. Returns its whole config.json. index: of the
        checkpoint."""
        return hf_config

    def locate(self, module: str, config: MoEConfig) -> tuple[Location | None, str]:
        """(where a module of ours lies, the number of its layer there)"""
        layer = re.search(r"\d+|$", module)[0]
        modules = self.modules
        if layer and int(layer) in getattr(config, "expert_layers", ()):
            modules = modules | self.experts
        location = modules.get(re.sub(r"\d+", "*", module))
        if module == "embedding.positions" and location:
            location = location._replace(skipped=self.first_position)
        return location, layer

    def special_tokens(self, tokenizer: Tokenizer) -> tuple[dict[int, str], dict[str, int]]:
        """(id -> token, field of tokenizer_config.json -> id) of those that a tokenizer may lack"""
        return {}, {}

    def special_ids(self, tokenizer: Tokenizer) -> dict[str, int | list[int]]:
        """Ids in config.json. A missing begin token is the end token, as in GPT-2."""
        begins = (tokenizer.declared_bos, tokenizer.bos, tokenizer.eot)
        stop_ids = list(tokenizer.stop_ids)
        padding = {} if tokenizer.padding is None else {"pad_token_id": tokenizer.padding}
        return padding | {
            "bos_token_id": next(i for i in begins if i is not None),
            "eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0],
        }


class LatentArchitecture(Architecture):
    """A DeepSeek. Its heads are [plain | rotated] with rotary pairs side by side, (0, 1), (2, 3),
    where ours are [rotated | plain] with pairs (i, i + n/2). The rows of key and value are in one
    matrix, head by head; those of the latent and of the rotated key in another."""

    def flat(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        flat = super().flat(hf_config)
        methods = self.computed.get("topk_method", ("",))
        greedy = flat.get("topk_method", methods[0]) == "greedy"
        return flat | (dict(n_group=1, topk_group=1) if greedy else {})

    def unread(self, names: Iterable[str]) -> set[str]:
        """Also the modules of multi-token prediction. Each has the names of a layer after the
        last, and beside them eh_proj."""
        module = ".eh_proj.weight"
        modules = tuple(name.removesuffix(module) + "." for name in names if name.endswith(module))
        return super().unread(names) | {name for name in names if name.startswith(modules)}

    def read(self, fields: dict[str, Any]) -> dict[str, Any]:
        fields["head_dim"] += fields["rope_head_dim"]
        fields["shared_ffn_size"] *= fields["expert_ffn_size"]
        if fields["first_dense_layers"] >= fields["num_layers"]:
            fields["num_experts"] = 0
        return super().read(fields)

    def write(self, hf_config: dict[str, Any], config: MoEConfig) -> dict[str, Any]:
        hf_config["qk_nope_head_dim"] = config.head_dim - config.rope_head_dim
        hf_config["n_shared_experts"] = config.shared_ffn_size // config.expert_size
        if not config.num_experts:
            hf_config |= {"first_k_dense_replace": config.num_layers, "n_routed_experts": 1}
        if hf_config.get("topk_method") == "greedy" and config.expert_groups > 1:
            hf_config["topk_method"] = "group_limited_greedy"
        return super().write(hf_config, config)

    def place(self, name: str, shape: torch.Size, config: MoEConfig) -> tuple[Location | None, str]:
        location, theirs = super().place(name, shape, config)
        return location, theirs.replace("gate.bias", "gate.e_score_correction_bias")

    def locate(self, module: str, config: MoEConfig) -> tuple[Location | None, str]:
        location, layer = super().locate(module, config)
        name, rope, value = module.rpartition(".")[2], config.rope_head_dim, config.value_size
        a, plain = config.num_heads, torch.arange(config.head_dim - rope, device="cpu")
        turned = torch.arange(rope, device="cpu").view(-1, 2).t().flatten()
        values = torch.arange(value, device="cpu") + len(plain)
        # Ours -> (heads, rows of theirs in a head, which of them).
        latents = 1, config.kv_rank + rope
        parts = {
            "query": (a, config.head_dim, torch.cat((turned + len(plain), plain))),
            "key": (a, len(plain) + value, plain),
            "value": (a, len(plain) + value, values),
            "kv_down": (*latents, torch.arange(config.kv_rank, device="cpu")),
            "rope_key": (*latents, turned + config.kv_rank),
        }
        if name in parts and location:
            heads, size, rows = parts[name]
            rows = torch.arange(heads, device="cpu").unsqueeze(1) * size + rows
            location = location._replace(rows=rows.flatten(), size=heads * size)
        if name == "query" and not config.query_rank:
            location = location._replace(module=location.module.replace("q_b_proj", "q_proj"))
        return location, layer


# Field -> (ours, {theirs: ours}), for a field that is true or false on both sides.
NO_MLP_BIAS = {"mlp_bias": ("mlp_bias", {False: False, True: True})}
NOT_TIED = {"tie_word_embeddings": ("tied", {False: False, True: True})}
TIED = {"tie_word_embeddings": ("tied", {True: True, False: False})}
NO_BIAS = {"attention_bias": ("attention_bias", {False: "none", True: "all"})}

GPT2_QKV = "transformer.h.*.attn.c_attn"
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
    choices=TIED,
    computed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    modules={
        "embedding.tokens": Location("transformer.wte"),
        "embedding.positions": Location("transformer.wpe"),
        "head.norm": Location("transformer.ln_f"),
        "head.output": Location("lm_head"),
        "blocks.*.attention_norm": Location("transformer.h.*.ln_1"),
        "blocks.*.mlp_norm": Location("transformer.h.*.ln_2"),
        "blocks.*.attention.query": Location(GPT2_QKV, transposed=True, third=0),
        "blocks.*.attention.key": Location(GPT2_QKV, transposed=True, third=1),
        "blocks.*.attention.value": Location(GPT2_QKV, transposed=True, third=2),
        "blocks.*.attention.output": Location("transformer.h.*.attn.c_proj", transposed=True),
        "blocks.*.mlp.up": Location("transformer.h.*.mlp.c_fc", transposed=True),
        "blocks.*.mlp.down": Location("transformer.h.*.mlp.c_proj", transposed=True),
    },
    ignored=r"h\.\d+\.attn\.(masked_)?bias",
    copies={"lm_head.weight": "wte.weight"},
    missing={"n_inner": 0, "layer_norm_epsilon": 1e-5}
    | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1),
)

TOKENS, POSITIONS = Location("transformer.tokens_embed"), Location("transformer.positions_embed")
GPT1 = dataclasses.replace(
    GPT2,
    name="OpenAIGPTLMHeadModel",
    model_type="openai-gpt",
    preset="gpt1",
    constants={"post_norm": True},
    fields={theirs: ours for theirs, ours in GPT2.fields.items() if theirs != "n_inner"},
    # "gelu" means the tanh form there.
    computed={"afn": ("gelu",)},
    modules=GPT2.modules | {"embedding.tokens": TOKENS, "embedding.positions": POSITIONS},
    ignored=r"position_ids|h\.\d+\.attn\.bias",
    copies={"lm_head.weight": "tokens_embed.weight"},
)

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    preset="llama2-7b",
    prefix="model.",
    constants={"llama": True},
    fields={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
        "vocab_size": "vocab_size",
        "head_dim": "head_dim",
        "rms_norm_eps": "norm_eps",
        "attention_dropout": "dropout",
    },
    choices=NOT_TIED | NO_BIAS | NO_MLP_BIAS,
    computed={"hidden_act": ("silu", "swish")},
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
    copies={"lm_head.weight": "embed_tokens.weight"},
    missing={
        "num_key_value_heads": 0,
        "head_dim": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
    },
)

MISTRAL = dataclasses.replace(
    LLAMA,
    name="MistralForCausalLM",
    model_type="mistral",
    preset="mistral-7b",
    fields=LLAMA.fields | {"sliding_window": "sliding_window"},
    choices=NOT_TIED,
    missing=LLAMA.missing | {"num_key_value_heads": 8, "sliding_window": 4096},
)

QWEN2 = dataclasses.replace(
    LLAMA,
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    preset="qwen2.5-7b",
    constants={"llama": True, "attention_bias": "qkv"},
    choices=NOT_TIED,
    computed=LLAMA.computed | {"use_sliding_window": (False, True)},
    missing=LLAMA.missing | {"num_key_value_heads": 32},
)

QWEN3 = dataclasses.replace(
    LLAMA,
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    preset="qwen3-8b",
    constants={"llama": True, "qk_norm": True},
    choices=NOT_TIED | NO_BIAS,
    computed=QWEN2.computed,
    modules=LLAMA.modules
    | {
        "blocks.*.attention.head_norms.query_norm": Location("model.layers.*.self_attn.q_norm"),
        "blocks.*.attention.head_norms.key_norm": Location("model.layers.*.self_attn.k_norm"),
    },
    missing=QWEN2.missing | {"head_dim": 128},
)

GEMMA = dataclasses.replace(
    LLAMA,
    name="GemmaForCausalLM",
    model_type="gemma",
    preset="gemma-7b",
    constants={"llama": True, "norm": "rmsnorm1p", "activation": "geglu", "embedding_scale": True},
    choices=TIED | NO_BIAS,
    computed={
        # "gelu" stands in files of before, and means the tanh form there too.
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, False),
    },
    missing=LLAMA.missing | {"num_key_value_heads": 16, "head_dim": 256},
)

BLOOM_QKV = "transformer.h.*.self_attention.query_key_value"
BLOOM = Architecture(
    name="BloomForCausalLM",
    model_type="bloom",
    preset="bloom-7b1",
    prefix="transformer.",
    constants={"positions": "alibi", "embedding_norm": True},
    fields={
        "n_layer": "num_layers",
        "hidden_size": "hidden_size",
        "n_head": "num_heads",
        "seq_length": "seq_length",
        "vocab_size": "vocab_size",
        "layer_norm_epsilon": "norm_eps",
        "hidden_dropout": "dropout",
        "attention_dropout": "dropout",
    },
    choices=TIED,
    computed={"apply_residual_connection_post_layernorm": (False,)},
    modules={
        "embedding.tokens": Location("transformer.word_embeddings"),
        "embedding.norm": Location("transformer.word_embeddings_layernorm"),
        "head.norm": Location("transformer.ln_f"),
        "head.output": Location("lm_head"),
        "blocks.*.attention_norm": Location("transformer.h.*.input_layernorm"),
        "blocks.*.mlp_norm": Location("transformer.h.*.post_attention_layernorm"),
        "blocks.*.attention.query": Location(BLOOM_QKV, third=0),
        "blocks.*.attention.key": Location(BLOOM_QKV, third=1),
        "blocks.*.attention.value": Location(BLOOM_QKV, third=2),
        "blocks.*.attention.output": Location("transformer.h.*.self_attention.dense"),
        "blocks.*.mlp.up": Location("transformer.h.*.mlp.dense_h_to_4h"),
        "blocks.*.mlp.down": Location("transformer.h.*.mlp.dense_4h_to_h"),
    },
    missing={
        "layer_norm_epsilon": 1e-5,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # No field of transformers; released models have it.
        "seq_length": 2048,
    },
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head"},
    copies={"lm_head.weight": "word_embeddings.weight"},
)

# The blocks of 40B and 180B ("new decoder architecture"); 7B has one norm for attention and MLP.
FALCON = dataclasses.replace(
    BLOOM,
    name="FalconForCausalLM",
    model_type="falcon",
    preset="falcon-180b",
    constants=dict(positions="rotary", activation="exact-gelu", parallel_block=True)
    | dict(attention_bias="none", mlp_bias=False),
    fields=dict(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    | dict(max_position_embeddings="seq_length", layer_norm_epsilon="norm_eps")
    | {name: name for name in ("hidden_size", "num_kv_heads", "ffn_hidden_size", "vocab_size")}
    | dict.fromkeys(("hidden_dropout", "attention_dropout"), "dropout"),
    computed=dict(new_decoder_architecture=(True,), num_ln_in_parallel_attn=(2, None))
    | dict(parallel_attn=(True,), alibi=(False,), bias=(False,), activation=("gelu",)),
    modules={ours: place for ours, place in BLOOM.modules.items() if ours != "embedding.norm"}
    | {
        "blocks.*.attention_norm": Location("transformer.h.*.ln_attn"),
        "blocks.*.mlp_norm": Location("transformer.h.*.ln_mlp"),
    },
    missing=BLOOM.missing
    | dict(num_kv_heads=0, ffn_hidden_size=0, max_position_embeddings=2048, rope_theta=10000.0),
    aliases={"n_embed": "hidden_size"},
)

NEMOTRON = dataclasses.replace(
    LLAMA,
    name="NemotronForCausalLM",
    model_type="nemotron",
    preset="nemotron-3-8b",
    constants={"llama": True, "norm": "layernorm1p", "activation": "squared-relu"},
    fields={theirs.replace("rms_", ""): ours for theirs, ours in LLAMA.fields.items()},
    computed={"hidden_act": ("relu2",)},
    modules={ours: place for ours, place in LLAMA.modules.items() if ours != "blocks.*.mlp.gate"},
    missing=LLAMA.missing | {"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    aliases=dict.fromkeys(("rope_percent", "rope_percentage"), "partial_rotary_factor")
    | {"layer_norm_eps": "norm_eps"},
)

MIXTRAL = dataclasses.replace(
    LLAMA,
    name="MixtralForCausalLM",
    model_type="mixtral",
    preset="mixtral-8x7b",
    constants={"llama": True, "router": "topk", "z_loss": 0.0},
    choices=NOT_TIED,
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
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
)

# The experts of Qwen and DeepSeek.
FINE_FIELDS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "router_topk",
    "moe_intermediate_size": "expert_ffn_size",
    "router_aux_loss_coef": "aux_loss",
}
# k = 1 is refused (hf_config.py), and with more experts null is true.
NORMALISED = {"norm_topk_prob": ("normalise_topk", {False: False, True: None})}
EVERY_LAYER = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
FINE_EXPERTS = {
    f"blocks.*.mlp.{name}": Location(f"model.layers.*.mlp.experts.#.{name}_proj")
    for name in ("gate", "up", "down")
} | {"blocks.*.mlp.router": Location("model.layers.*.mlp.gate")}

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    preset="qwen3-30b-a3b",
    constants=QWEN3.constants | {"router": "topk", "z_loss": 0.0},
    choices=QWEN3.choices | NORMALISED,
    fields=QWEN3.fields | FINE_FIELDS,
    computed=QWEN3.computed | EVERY_LAYER | {"use_sliding_window": (False,)},
    experts=FINE_EXPERTS,
    aliases={"num_local_experts": "num_experts"},
    missing=QWEN3.missing
    | dict(num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
    | dict(moe_intermediate_size=768, router_aux_loss_coef=0.001, head_dim=0),
)

QWEN2_MOE = dataclasses.replace(
    QWEN2,
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    preset="qwen1.5-moe-a2.7b",
    constants=QWEN2.constants | {"router": "topk", "z_loss": 0.0, "shared_gate": True},
    choices=QWEN2.choices | NORMALISED,
    fields=QWEN2.fields | FINE_FIELDS | {"shared_expert_intermediate_size": "shared_ffn_size"},
    computed=QWEN2.computed | EVERY_LAYER | {"qkv_bias": (True,), "use_sliding_window": (False,)},
    experts=FINE_EXPERTS
    | {
        f"blocks.*.mlp.shared.{name}": Location(f"model.layers.*.mlp.shared_expert.{name}_proj")
        for name in ("gate", "up", "down")
    }
    | {"blocks.*.mlp.shared.of_token": Location("model.layers.*.mlp.shared_expert_gate")},
    missing=QWEN2.missing
    | dict(num_key_value_heads=16, num_experts=60, num_experts_per_tok=4)
    | dict(moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    | dict(router_aux_loss_coef=0.001),
)

ATTENTION = "model.layers.*.self_attn."
DEEPSEEK_V3 = LatentArchitecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    preset="deepseek-v3",
    prefix="model.",
    constants={"llama": True, "router": "bias"},
    fields={theirs: ours for theirs, ours in LLAMA.fields.items() if theirs != "head_dim"}
    | {"kv_lora_rank": "kv_rank", "q_lora_rank": "query_rank", "v_head_dim": "value_head_dim"}
    | {"qk_rope_head_dim": "rope_head_dim", "qk_nope_head_dim": "head_dim"}
    | {"n_routed_experts": "num_experts", "num_experts_per_tok": "router_topk"}
    | {"moe_intermediate_size": "expert_ffn_size", "n_shared_experts": "shared_ffn_size"}
    | {"first_k_dense_replace": "first_dense_layers", "routed_scaling_factor": "router_scale"}
    | {"n_group": "expert_groups", "topk_group": "topk_groups"},
    choices=NOT_TIED | {"norm_topk_prob": ("normalise_topk", {True: True, False: False})},
    # The norms of latents have this epsilon always.
    computed=LLAMA.computed
    | dict(rope_interleave=(True,), attention_bias=(False,), rms_norm_eps=(1e-6,))
    | dict(scoring_func=("sigmoid",), topk_method=("noaux_tc",), moe_layer_freq=(1,)),
    modules=LLAMA.modules
    | {
        "blocks.*.attention.query_down": Location(ATTENTION + "q_a_proj"),
        "blocks.*.attention.query_norm": Location(ATTENTION + "q_a_layernorm"),
        "blocks.*.attention.query": Location(ATTENTION + "q_b_proj"),
        "blocks.*.attention.kv_norm": Location(ATTENTION + "kv_a_layernorm"),
    }
    | dict.fromkeys(
        ("blocks.*.attention.kv_down", "blocks.*.attention.rope_key"),
        Location(ATTENTION + "kv_a_proj_with_mqa"),
    )
    | dict.fromkeys(
        ("blocks.*.attention.key", "blocks.*.attention.value"), Location(ATTENTION + "kv_b_proj")
    ),
    experts=FINE_EXPERTS
    | {
        f"blocks.*.mlp.shared.{name}": Location(f"model.layers.*.mlp.shared_experts.{name}_proj")
        for name in ("gate", "up", "down")
    },
    missing=LLAMA.missing | dict(q_lora_rank=0, mscale_all_dim=0.0, first_k_dense_replace=3),
)
DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    preset="deepseek-v2-lite",
    constants=dict(llama=True, router="topk", normalise_topk=False, aux_loss=0.0, z_loss=0.0),
    choices=NOT_TIED,
    computed=LLAMA.computed
    | dict(attention_bias=(False,), rms_norm_eps=(1e-6,), mlp_bias=(False,))
    | dict(topk_method=("greedy", "group_limited_greedy")),
    missing=DEEPSEEK_V3.missing | dict(first_k_dense_replace=0, num_experts_per_tok=1),
)


ARCHITECTURES = (GPT2, GPT1, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, BLOOM, MIXTRAL)
ARCHITECTURES += (FALCON, NEMOTRON, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3, DEEPSEEK_V2)


def their_tensors(config: MoEConfig, architecture: Architecture) -> dict[str, TheirTensor]:
    """Their name -> their tensor, in the order of the model. Raises HuggingFaceError."""
    tensors = {}
    for name, parameter in empty_model(config).named_parameters():
        location, theirs = architecture.place(name, parameter.shape, config)
        if location is None:
            raise HuggingFaceError(f"{name} has no place in a {architecture.name}")
        if architecture in (BLOOM, FALCON) and location.third is not None:
            heads = config.num_kv_heads
            location = location._replace(heads=heads, queries=config.num_heads // heads)
        tensor = TheirTensor(location.shape(parameter.shape), {})
        # Where query, key and value share one of theirs.
        tensors.setdefault(theirs, tensor).parts[name] = location
    return tensors
