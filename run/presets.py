"""The shapes of published models, and how each was pretrained, its learning rate above all.

    PRESETS[name] = (fields of the model's configuration, published number of parameters or 0)

    tiny, tiny-moe        for a laptop
    gpt1                  Radford et al. 2018, as released
    gpt2-...              Radford et al. 2019, as released
    gpt3-...              GPT-3 (arXiv 2005.14165) in the sizes that NeMo configures
    megatron-...          arXiv 2104.04473, table 1, and arXiv 2205.05198, table 3; 530b is MT-NLG
                          (arXiv 2201.11990)
    llama2-...            arXiv 2307.09288, as released
    mixtral-8x7b          arXiv 2401.04088, as released
    llama3 .. nemotron    one model or two of each other family, as released

    python -m run.presets        parameters of each, counted, beside the published number

`--model NAME` of train.py takes one. Models are counted on the meta device, without memory.
"""

import difflib
import math
from typing import NamedTuple

from base.model_config import MoEConfig, flops_per_token, least_parameters


def _gpt(num_layers, hidden_size, num_heads, seq_length=2048, vocab_size=51200) -> dict:
    sizes = dict(num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads)
    return sizes | dict(seq_length=seq_length, vocab_size=vocab_size, dropout=0.1)


def _llama2(num_layers, hidden_size, num_heads, ffn_hidden_size, **fields) -> dict:
    """fields: more fields, or other values than Llama-2's."""
    sizes = dict(num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads)
    sizes |= dict(ffn_hidden_size=ffn_hidden_size, seq_length=4096, vocab_size=32000, llama=True)
    return sizes | fields


def _tiny(**fields) -> dict:
    return _llama2(4, 256, 8, 688, seq_length=128, vocab_size=257, **fields)


def _llama3(*sizes, **fields) -> dict:
    own = dict(num_kv_heads=8, seq_length=131072, vocab_size=128256, rotary_base=5e5)
    return _llama2(*sizes) | own | fields


def _qwen(*sizes, **fields) -> dict:
    own = dict(seq_length=32768, vocab_size=151936, rotary_base=1e6, norm_eps=1e-6)
    return _llama2(*sizes) | own | fields


def _gemma(*sizes, **fields) -> dict:
    own = dict(seq_length=8192, vocab_size=256000, head_dim=256, tied=True, embedding_scale=True)
    own |= dict(norm="rmsnorm1p", norm_eps=1e-6, activation="geglu")
    return _llama2(*sizes) | own | fields


def _experts(num_experts: int, router_topk: int, expert_ffn_size: int, **fields) -> dict:
    """fields: more fields, or other values than Qwen's."""
    own = dict(router="topk", aux_loss=0.001, z_loss=0.0)
    sizes = dict(num_experts=num_experts, router_topk=router_topk, expert_ffn_size=expert_ffn_size)
    return own | sizes | fields


def _bloom(*sizes) -> dict:
    own = dict(dropout=0.0, positions="alibi", embedding_norm=True)
    return _gpt(*sizes, 2048, 250880) | own


PRESETS: dict[str, tuple[dict, float]] = {
    # The vocabulary is bytes and an end-of-text token. Llama's block learns faster than GPT-2's in
    # the first minutes.
    "tiny": (_tiny(), 0),
    # The same with 8 experts in every second layer: the same FLOPs, three times the parameters.
    "tiny-moe": (_tiny(num_experts=8, expert_every=2), 0),
    # Radford et al. 2018, as released.
    "gpt1": (_gpt(12, 768, 12, 512, 40478) | dict(post_norm=True), 116_534_784),
    # Radford et al. 2019, as released.
    "gpt2": (_gpt(12, 768, 12, 1024, 50257), 124_439_808),
    "gpt2-medium": (_gpt(24, 1024, 16, 1024, 50257), 354_823_168),
    "gpt2-large": (_gpt(36, 1280, 20, 1024, 50257), 774_030_080),
    "gpt2-xl": (_gpt(48, 1600, 25, 1024, 50257), 1_557_611_200),
    # NeMo's GPT-3 configurations.
    "gpt3-126m": (_gpt(12, 768, 12, 2048, 50257), 126e6),
    "gpt3-5b": (_gpt(24, 4096, 32, 2048, 50257), 5e9),
    "gpt3-20b": (_gpt(44, 6144, 48, 2048, 50257), 20e9),
    "gpt3-40b": (_gpt(48, 8192, 64, 2048, 50257), 40e9),
    "gpt3-175b": (_gpt(96, 12288, 96, 2048, 50257), 175e9),
    # arXiv 2104.04473, table 1
    "megatron-1.7b": (_gpt(24, 2304, 24), 1.7e9),
    "megatron-3.6b": (_gpt(30, 3072, 32), 3.6e9),
    "megatron-7.5b": (_gpt(36, 4096, 32), 7.5e9),
    "megatron-18b": (_gpt(40, 6144, 48), 18.4e9),
    "megatron-39b": (_gpt(48, 8192, 64), 39.1e9),
    "megatron-76b": (_gpt(60, 10240, 80), 76.1e9),
    # arXiv 2205.05198, table 3
    "megatron-22b": (_gpt(48, 6144, 64), 22e9),
    "megatron-175b": (_gpt(96, 12288, 96), 175e9),
    "megatron-530b": (_gpt(105, 20480, 128), 530e9),
    "megatron-1t": (_gpt(128, 25600, 160), 1e12),
    # arXiv 2307.09288, as released
    "llama2-7b": (_llama2(32, 4096, 32, 11008), 6_738_415_616),
    "llama2-13b": (_llama2(40, 5120, 40, 13824), 13_015_864_320),
    "llama2-70b": (_llama2(80, 8192, 64, 28672, num_kv_heads=8), 68_976_648_192),
    # arXiv 2401.04088, as released
    "mixtral-8x7b": (
        _llama2(32, 4096, 32, 14336, num_kv_heads=8, seq_length=32768, rotary_base=1e6)
        | dict(num_experts=8, router="topk", router_topk=2, aux_loss=0.02, z_loss=0.0),
        46_702_792_704,
    ),
    # arXiv 2407.21783, as released
    "llama3.1-8b": (_llama3(32, 4096, 32, 14336, rotary_factor=8.0), 8_030_261_248),
    "llama3.2-1b": (_llama3(16, 2048, 32, 8192, rotary_factor=32.0, tied=True), 1_235_814_400),
    # arXiv 2502.02737, as released
    "smollm2-135m": (
        _llama2(30, 576, 9, 1536, num_kv_heads=3, seq_length=8192, vocab_size=49152)
        | dict(rotary_base=1e5, tied=True),
        134_515_008,
    ),
    # arXiv 2310.06825, as released
    "mistral-7b": (
        _llama2(32, 4096, 32, 14336, num_kv_heads=8, seq_length=32768, sliding_window=4096),
        7_241_732_096,
    ),
    # arXiv 2412.15115, as released
    "qwen2.5-7b": (
        _qwen(28, 3584, 28, 18944, num_kv_heads=4, vocab_size=152064, attention_bias="qkv"),
        7_615_616_512,
    ),
    # arXiv 2505.09388, as released
    "qwen3-0.6b": (
        _qwen(28, 1024, 16, 3072, num_kv_heads=8, head_dim=128, qk_norm=True, tied=True),
        596_049_920,
    ),
    "qwen3-8b": (
        _qwen(36, 4096, 32, 12288, num_kv_heads=8, head_dim=128, qk_norm=True),
        8_190_735_360,
    ),
    # arXiv 2407.10671, section 2.2.2, and its model before, as released
    "qwen1.5-moe-a2.7b": (
        _qwen(24, 2048, 16, 5632, seq_length=8192, attention_bias="qkv")
        | _experts(60, 4, 1408, shared_ffn_size=5632, shared_gate=True, normalise_topk=False),
        14_315_784_192,
    ),
    # arXiv 2505.09388, as released
    "qwen3-30b-a3b": (
        _qwen(48, 2048, 32, 6144, num_kv_heads=4, head_dim=128, qk_norm=True, seq_length=40960)
        | _experts(128, 8, 768),
        30_532_122_624,
    ),
    # arXiv 2405.04434, appendix B, and 2412.19437, section 4.2: as pretrained, on 4096 tokens
    "deepseek-v2-lite": (
        _llama2(27, 2048, 16, 10944, vocab_size=102400, norm_eps=1e-6)
        | dict(kv_rank=512, head_dim=192, rope_head_dim=64, value_head_dim=128)
        | _experts(64, 6, 1408, shared_ffn_size=2816, first_dense_layers=1, normalise_topk=False),
        15_706_484_224,
    ),
    "deepseek-v3": (
        _llama2(61, 7168, 128, 18432, vocab_size=129280, norm_eps=1e-6)
        | dict(kv_rank=512, query_rank=1536, head_dim=192, rope_head_dim=64, value_head_dim=128)
        | _experts(256, 8, 2048, shared_ffn_size=2048, first_dense_layers=3, aux_loss=0.0)
        | dict(router="bias", router_scale=2.5, expert_groups=8, topk_groups=4),
        671_026_419_200,
    ),
    # arXiv 2403.08295, as released
    "gemma-2b": (_gemma(18, 2048, 8, 16384, num_kv_heads=1), 2_506_172_416),
    "gemma-7b": (_gemma(28, 3072, 16, 24576), 8_537_680_896),
    # arXiv 2211.05100, as released
    "bloom-560m": (_bloom(24, 1024, 16), 559_214_592),
    "bloom-7b1": (_bloom(30, 4096, 32), 7_069_016_064),
    "bloom-176b": (_bloom(70, 14336, 112), 176_247_271_424),
    # arXiv 2311.16867, as released
    "falcon-180b": (
        _gpt(80, 14848, 232, 2048, 65024)
        | dict(dropout=0.0, num_kv_heads=8, positions="rotary", parallel_block=True)
        | dict(activation="exact-gelu", attention_bias="none", mlp_bias=False),
        180e9,
    ),
    # NVIDIA's nemotron-3-8b-base-4k: half the bytes of a copy on huggingface.co, 17.08 GB in 16
    # bits (thhaus/nemotron3-8b); nobody has published a count.
    "nemotron-3-8b": (
        _llama2(32, 4096, 32, 16384, vocab_size=256000, rotary_share=0.5)
        | dict(norm="layernorm1p", activation="squared-relu"),
        8.54e9,
    ),
}


# --- how to pretrain ------------------------------------------------------------------------------
#
#     by size        the row of GPT-3's table whose size is nearest on a log scale
#                    below 30M, which its table does not have: the row of the preset tiny
#     presets        as published: Llama 2 and 3, BLOOM; not with --load
#     with --load    a tenth of the rate by size
#
# The papers of GPT-3 and Llama 2 agree on the rest, which is train.py's default: a cosine down to a
# tenth of the peak, weight decay 0.1, a gradient norm of at most 1, betas 0.9 and 0.95.
#
# Other types of training have their own rate (`default_lr` of their configuration). Each is where a
# search begins, not where it ends.


class Recipe(NamedTuple):
    """How one model was pretrained."""

    name: str
    # The peak of the cosine.
    lr: float
    # Tokens of a step, and of the linear warmup.
    batch: int
    warmup: int


def _gpt3(name: str, lr: float, sequences: int, source: str = "2005.14165, table 2.1") -> Recipe:
    """sequences: in a step. The papers round their tokens to 0.5M, 1M, 2M and 3.2M."""
    return Recipe(f"{name} (arXiv {source})", lr, sequences * 2048, 375_000_000)


def _bloom_recipe(name: str, lr: float, sequences: int) -> Recipe:
    return _gpt3(name, lr, sequences, "2211.05100, table 3")


def _llama(name: str, lr: float, source: str = "2307.09288, section 2.2") -> Recipe:
    """Steps of 4M tokens, 2,000 of them warmup."""
    batch = 1024 * 4096
    return Recipe(f"{name} (arXiv {source})", lr, batch, 2000 * batch)


# parameters -> recipe
GPT_3 = {
    125e6: _gpt3("GPT-3 125M", 6e-4, 256),
    350e6: _gpt3("GPT-3 350M", 3e-4, 256),
    760e6: _gpt3("GPT-3 760M", 2.5e-4, 256),
    1.3e9: _gpt3("GPT-3 1.3B", 2e-4, 512),
    2.7e9: _gpt3("GPT-3 2.7B", 1.6e-4, 512),
    6.7e9: _gpt3("GPT-3 6.7B", 1.2e-4, 1024),
    13e9: _gpt3("GPT-3 13B", 1e-4, 1024),
    175e9: _gpt3("GPT-3 175B", 6e-5, 1536),
}
SMALL, SMALL_RATE = 30e6, 3e-3
# train.py's own batch and warmup.
TINY = Recipe("the preset tiny", SMALL_RATE, 16 * 128, 50 * 16 * 128)
PUBLISHED = {
    "llama2-7b": _llama("Llama 2 7B", 3e-4),
    "llama2-13b": _llama("Llama 2 13B", 3e-4),
    "llama2-70b": _llama("Llama 2 70B", 1.5e-4),
    # Only the rate of 8B is published.
    "llama3.1-8b": _llama("Llama 3 8B", 3e-4, "2407.21783, table 3; batch and warmup of Llama 2"),
    "bloom-560m": _bloom_recipe("BLOOM 560M", 3e-4, 256),
    "bloom-7b1": _bloom_recipe("BLOOM 7.1B", 1.2e-4, 512),
    "bloom-176b": _bloom_recipe("BLOOM 176B", 6e-5, 2048),
}


def recipe_of_size(parameters: int) -> Recipe:
    """The recipe whose size is nearest on a log scale."""
    if parameters < SMALL:
        return TINY
    return GPT_3[min(GPT_3, key=lambda size: abs(math.log(size / parameters)))]


def recipe_of_model(config) -> tuple[Recipe, str]:
    """(how a run's model is pretrained, words that say which model). config: run.config.RunConfig.
    Raises its errors."""
    if config.recipes:
        recipe = config.recipes.get("" if config.load else config.model, config.recipes[""])
        return recipe, recipe.name
    model = config.model_config()
    parameters = least_parameters(model)
    as_published = config.num_layers is None and config.hidden_size is None
    if config.model in PUBLISHED and as_published and not config.load:
        return PUBLISHED[config.model], config.model
    return recipe_of_size(parameters), f"a model of about {parameters / 1e6:,.1f} M parameters"


def lr_of_model(config) -> tuple[float, str]:
    """(the peak rate of pretraining a run's model, words that say which). As `recipe_of_model`."""
    recipe, what = recipe_of_model(config)
    return recipe.lr, what


def default_lr(config) -> tuple[float, str]:
    """The same for training all parameters: fine-tuning has a tenth of the rate."""
    rate, what = lr_of_model(config)
    return (rate / 10, f"fine-tuning {what}") if config.load else (rate, what)


def why_not_exported(config: MoEConfig) -> str:
    """Why no Hugging Face class has the experts of this model, and which training flags would fit;
    empty where one may have them (inference/hf_config.py compares every field)."""
    router, k, every = config.router, config.router_topk, config.expert_every
    if config.num_experts and not config.llama:
        return (
            f"num_experts {config.num_experts}: GPT2LMHeadModel has none; only models of Llama's"
            " family have: train with --model tiny-moe, llama2-7b or mixtral-8x7b"
        )
    if config.num_experts and (router == "sinkhorn" or k == 1 or every > 1):
        flags = f"--router topk --router-topk {max(2, k)} --expert-every 1"
        what = f"router {router}, router_topk {k}, expert_every {every}"
        return f"{what}; a model trained with {flags} could be exported"
    return ""


def no_such(name: str, presets) -> str:
    """What to say of a name that is not among the presets: the nearest ones, or all."""
    near = difflib.get_close_matches(name, presets, n=3, cutoff=0.5)
    return f"no such preset; {'near are' if near else 'there are'} {', '.join(near or presets)}"


def main():
    # Imported here, because readers of the table build no model.
    import torch

    import moe
    from sharding import num_parameters

    print(
        f"{'preset':<18}{'L':>5}{'h':>7}{'heads':>6}{'kv':>5}{'s':>8}{'V':>8}"
        f"{'parameters':>20}{'published':>12}{'ratio':>7}{'GFLOP/token':>13}"
    )
    for name, (fields, published) in PRESETS.items():
        config = MoEConfig(**fields)
        # Shapes without storage.
        with torch.device("meta"):
            count = num_parameters(moe.build(config))
        beside = f"{'':>19}"
        if published:
            beside = f"{published / 1e9:>11.4g}B{count / published:>7.3f}"
        print(
            f"{name:<18}{config.num_layers:>5}{config.hidden_size:>7}{config.num_heads:>6}"
            f"{config.num_kv_heads:>5}{config.seq_length:>8}{config.vocab_size:>8}"
            f"{count:>20,}{beside}{flops_per_token(config) / 1e9:>13,.3f}"
        )


if __name__ == "__main__":
    from base import terminal

    terminal.run(main)
