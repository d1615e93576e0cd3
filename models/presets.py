"""The shapes of published models, as in run/presets.py: BERT and RoBERTa, T5 and mT5.

PRESETS[name] = (fields of the model's configuration, published number of parameters or 0)
RECIPES[name] = how it was pretrained, "" for the others; tokens of a step are those of the sources
"""

from run import presets


def _bert(num_layers: int, hidden_size: int, num_heads: int, **fields) -> dict:
    shape = dict(num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, dropout=0.1)
    return shape | fields


ROBERTA = dict(vocab_size=50265, norm_eps=1e-5, token_types=1)
# The published numbers have the pooler too.
BERT_PRESETS: dict[str, tuple[dict, float]] = {
    "tiny": (_bert(4, 256, 8, seq_length=128, vocab_size=260, dropout=0.0), 0),
    "bert-base": (_bert(12, 768, 12), 110e6),
    "bert-large": (_bert(24, 1024, 16), 340e6),
    # Megatron-LM's largest BERT (arXiv 1909.08053, table 4)
    "bert-3.9b": (_bert(48, 2560, 40), 3.9e9),
    "roberta-base": (_bert(12, 768, 12, **ROBERTA), 125e6),
    "roberta-large": (_bert(24, 1024, 16, **ROBERTA), 355e6),
}


def _recipe(name: str, lr: float, sequences: int, warmup: int = 10_000) -> presets.Recipe:
    """sequences: of 512 tokens, in a step; warmup: steps."""
    return presets.Recipe(name, lr, sequences * 512, warmup * sequences * 512)


ROBERTA_NAME = "RoBERTa (arXiv 1907.11692, table 9)"
BERT_RECIPES = {
    "tiny": presets.TINY._replace(lr=1e-3),
    "roberta-base": _recipe(ROBERTA_NAME, 6e-4, 8192, 24_000),
    "roberta-large": _recipe(ROBERTA_NAME, 4e-4, 8192, 30_000),
    "": _recipe("BERT (arXiv 1810.04805, A.2)", 1e-4, 256),
}


def _t5(layers: int, h: int, heads: int, d: int, ffn: int, **fields) -> dict:
    """layers: of each half."""
    shape = dict(num_layers=2 * layers, hidden_size=h, num_heads=heads, head_dim=d, dropout=0.1)
    return shape | dict(ffn_hidden_size=ffn) | fields


V1_1 = dict(activation="geglu", tied=False)
MT5 = V1_1 | dict(vocab_size=250112, seq_length=1024, target_length=229)
TINY = V1_1 | dict(seq_length=128, target_length=32, vocab_size=358, dropout=0.0)
T5_PRESETS: dict[str, tuple[dict, float]] = {
    "tiny": (_t5(3, 256, 8, 32, 688, **TINY), 0),
    "t5-small": (_t5(6, 512, 8, 64, 2048), 60_506_624),
    "t5-base": (_t5(12, 768, 12, 64, 3072), 222_903_552),
    "t5-large": (_t5(24, 1024, 16, 64, 4096), 737_668_096),
    "t5-3b": (_t5(24, 1024, 32, 128, 16384), 2_851_598_336),
    "t5-11b": (_t5(24, 1024, 128, 128, 65536), 11_307_321_344),
    "t5-v1.1-base": (_t5(12, 768, 12, 64, 2048, **V1_1), 247_577_856),
    "t5-v1.1-xl": (_t5(24, 2048, 32, 64, 5120, **V1_1), 2_849_757_184),
    "mt5-small": (_t5(8, 512, 6, 64, 1024, **MT5), 300_176_768),
    "mt5-base": (_t5(12, 768, 12, 64, 2048, **MT5), 582_401_280),
    "mt5-xxl": (_t5(24, 4096, 64, 64, 10240, **MT5), 12_921_057_280),
}
T5_RECIPES = {
    "tiny": presets.TINY._replace(lr=1e-3),
    "": _recipe("T5 220M in NeMo (t5/220m.yaml)", 1e-4, 2048),
}
