"""BERT, RoBERTa, T5 and mT5 in Hugging Face folders: the tables of inference/architectures.py.

    models/bert.py             BertForMaskedLM
    blocks.N.attention.query   bert.encoder.layer.N.attention.self.query
    head.norm.dense            cls.predictions.transform.dense

    models/t5.py               T5ForConditionalGeneration, MT5ForConditionalGeneration
    blocks.N.attention.query   encoder.block.N. ..; in the decoder's first block decoder.block.0. ..
    positions [2, buckets, a]  two tables [buckets, a], in block 0 of encoder and decoder

Dropped on import: BERT's pooler and its prediction of the next sentence; rows 0 and 1 of RoBERTa's
positions, because these begin after padding token 1. An export has zeros there. A BERT with one
type of token is exported as a RoBERTa, and an mT5 as the T5 1.1 that it is.
"""

import dataclasses
from typing import Any

from inference.architectures import Architecture, HuggingFaceError, Location, in_halves
from models.bert import BertConfig
from models.special_tokens import bert_tokens, t5_tokens
from models.t5 import T5Config

# --- BERT and RoBERTa -----------------------------------------------------------------------------


class OfBert(Architecture):
    def special_tokens(self, tokenizer) -> tuple[dict[int, str], dict[str, int]]:
        ids = bert_tokens(tokenizer)
        fields = dict(cls_token=ids.cls, sep_token=ids.sep, mask_token=ids.mask, pad_token=ids.pad)
        return ids.names | {ids.pad: "[PAD]"}, fields

    def special_ids(self, tokenizer) -> dict[str, int]:
        """Raises HuggingFaceError."""
        ids = bert_tokens(tokenizer)
        if self is ROBERTA and ids.pad != 1:
            rule = f"and a {self.name} counts positions from padding token 1"
            fits = "train a BERT, as --model bert-base, or with a tokenizer.json whose <pad> is 1"
            pad = f"the padding token of {tokenizer.name} is {ids.pad}"
            raise HuggingFaceError(f"{pad}, {rule}: {fits}")
        return {"bos_token_id": ids.cls, "eos_token_id": ids.sep, "pad_token_id": ids.pad}


def bert_modules(name: str, transform: str, norm: str, output: str) -> dict[str, Location]:
    """name: of the model in its tensors' names; the others: their modules of the head."""
    modules = {
        "embedding.tokens": "embeddings.word_embeddings",
        "embedding.positions": "embeddings.position_embeddings",
        "embedding.types": "embeddings.token_type_embeddings",
        "embedding.norm": "embeddings.LayerNorm",
        "blocks.*.attention.query": "encoder.layer.*.attention.self.query",
        "blocks.*.attention.key": "encoder.layer.*.attention.self.key",
        "blocks.*.attention.value": "encoder.layer.*.attention.self.value",
        "blocks.*.attention.output": "encoder.layer.*.attention.output.dense",
        "blocks.*.attention_norm": "encoder.layer.*.attention.output.LayerNorm",
        "blocks.*.mlp.up": "encoder.layer.*.intermediate.dense",
        "blocks.*.mlp.down": "encoder.layer.*.output.dense",
        "blocks.*.mlp_norm": "encoder.layer.*.output.LayerNorm",
    }
    head = {"head.norm.dense": transform, "head.norm.norm": norm, "head.output": output}
    modules = {ours: f"{name}.{theirs}" for ours, theirs in modules.items()} | head
    return {ours: Location(theirs) for ours, theirs in modules.items()}


TRANSFORM = "cls.predictions.transform"
BERT = OfBert(
    name="BertForMaskedLM",
    model_type="bert",
    preset="bert-base",
    prefix="bert.",
    fields={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
        "vocab_size": "vocab_size",
        "type_vocab_size": "token_types",
        "layer_norm_eps": "norm_eps",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "dropout",
    },
    choices={"hidden_act": ("activation", {"gelu": "exact-gelu", "gelu_new": "gelu"})},
    computed={
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    modules=bert_modules("bert", f"{TRANSFORM}.dense", f"{TRANSFORM}.LayerNorm", "cls.predictions"),
    ignored=r"embeddings\.position_ids|pooler\.dense\..*|cls\.seq_relationship\..*",
    copies={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    missing={"type_vocab_size": 2, "layer_norm_eps": 1e-12}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1),
    shape_class=BertConfig,
)

ROBERTA = dataclasses.replace(
    BERT,
    name="RobertaForMaskedLM",
    model_type="roberta",
    preset="roberta-base",
    prefix="roberta.",
    constants={"token_types": 1},
    fields={theirs: ours for theirs, ours in BERT.fields.items() if ours != "token_types"},
    # Its head has GELU by the error function, whatever hidden_act is.
    choices={"hidden_act": ("activation", {"gelu": "exact-gelu"})},
    computed=BERT.computed | {"type_vocab_size": (1,), "pad_token_id": (1,)},
    modules=bert_modules("roberta", "lm_head.dense", "lm_head.layer_norm", "lm_head"),
    first_position=2,
    copies={
        "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)

# --- T5 and mT5 -----------------------------------------------------------------------------------


class OfT5(Architecture):
    def read(self, fields: dict[str, Any]) -> dict[str, Any]:
        """In the table num_layers is the decoder's (0: as many as in the encoder); in T5Config it
        counts both halves."""
        encoder = fields["encoder_layers"]
        decoder = fields["num_layers"] or encoder
        if not encoder:
            raise HuggingFaceError("num_layers is 0; a T5 has an encoder")
        return fields | {"num_layers": encoder + decoder}

    def write(self, hf_config: dict[str, Any], config: T5Config) -> dict[str, Any]:
        decoder = config.num_layers - config.encoder_layers
        # The ids of published models, where there is no tokenizer.
        ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        hf_config |= {"num_decoder_layers": decoder, "tie_word_embeddings": config.tied}
        return hf_config | ids

    def locate(self, module: str, config: T5Config) -> tuple[Location | None, str]:
        module = in_halves(module, config.encoder_layers, "encoder", "decoder")
        if not config.gated:
            module = module.replace("mlp.up", "mlp.alone")
        return super().locate(module, config)

    def special_tokens(self, tokenizer) -> tuple[dict[int, str], dict[str, int]]:
        ids = t5_tokens(tokenizer)
        return ids.names | {ids.pad: "<pad>"}, dict(eos_token=ids.eos, pad_token=ids.pad)

    def special_ids(self, tokenizer) -> dict[str, int]:
        eos, pad, *_ = t5_tokens(tokenizer)
        return {"pad_token_id": pad, "eos_token_id": eos, "decoder_start_token_id": pad}


def half_modules(half: str, mlp: int) -> dict[str, Location]:
    """The blocks of a half. mlp: the number of the MLP in a block there."""
    modules = {
        "attention_norm": "0.layer_norm",
        "cross_norm": "1.layer_norm",
        "mlp_norm": f"{mlp}.layer_norm",
        "mlp.gate": f"{mlp}.DenseReluDense.wi_0",
        "mlp.up": f"{mlp}.DenseReluDense.wi_1",
        "mlp.alone": f"{mlp}.DenseReluDense.wi",
        "mlp.down": f"{mlp}.DenseReluDense.wo",
    }
    for ours in ("query", "key", "value", "output"):
        modules[f"attention.{ours}"] = f"0.SelfAttention.{ours[0]}"
        modules[f"cross_attention.{ours}"] = f"1.EncDecAttention.{ours[0]}"
    block = f"{half}.block.*.layer"
    found = {f"{half}.*.{ours}": Location(f"{block}.{x}") for ours, x in modules.items()}
    return found | {f"{half}.*.last_norm": Location(f"{half}.final_layer_norm")}


SHARED = ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias"
T5 = OfT5(
    name="T5ForConditionalGeneration",
    model_type="t5",
    preset="t5-base",
    prefix="",
    fields={
        "num_layers": "encoder_layers",
        # The decoder's: `read` adds the encoder's.
        "num_decoder_layers": "num_layers",
        "d_model": "hidden_size",
        "num_heads": "num_heads",
        "d_kv": "head_dim",
        "d_ff": "ffn_hidden_size",
        "n_positions": "seq_length",
        "vocab_size": "vocab_size",
        "relative_attention_num_buckets": "buckets",
        "relative_attention_max_distance": "max_distance",
        "layer_norm_epsilon": "norm_eps",
        "dropout_rate": "dropout",
    },
    choices={
        "feed_forward_proj": ("activation", {"relu": "relu", "gated-gelu": "geglu"}),
        "dense_act_fn": ("activation", {"relu": "relu", "gelu_new": "geglu"}),
        "is_gated_act": ("activation", {False: "relu", True: "geglu"}),
        # In transformers 5 only; tie_word_embeddings is always true there.
        "scale_decoder_outputs": ("tied", {True: True, False: False}),
    },
    computed={"is_encoder_decoder": (True,), "is_decoder": (False,)},
    modules={"embedding.tokens": Location("shared"), "head.output": Location("lm_head")}
    | {"positions": Location("{encoder,decoder}." + TABLE)}
    | half_modules("encoder", 1)
    | half_modules("decoder", 2),
    ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    copies={f"{copy}.weight": "shared.weight" for copy in SHARED},
    missing={
        "num_decoder_layers": 0,
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
    },
    aliases={"tie_word_embeddings": "scale_decoder_outputs"},
    shape_class=T5Config,
)

MT5 = dataclasses.replace(
    T5,
    name="MT5ForConditionalGeneration",
    model_type="mt5",
    preset="mt5-base",
    constants={"tied": False},
    choices={theirs: choice for theirs, choice in T5.choices.items() if choice[0] != "tied"},
)

# A model is exported as the first that it fits.
ARCHITECTURES = (ROBERTA, BERT, T5, MT5)
