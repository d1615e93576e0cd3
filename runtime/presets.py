"""The shapes of published models.

    PRESETS[name] = (fields of the model's configuration, published number of parameters or 0)

    tiny, tiny-moe        for a laptop
    gpt2-...              Radford et al. 2019, as released
    gpt3-...              GPT-3 (arXiv 2005.14165) in the sizes that NeMo configures
    megatron-...          arXiv 2104.04473, table 1, and arXiv 2205.05198, table 3
    llama2-...            arXiv 2307.09288, as released
    mixtral-8x7b          arXiv 2401.04088, as released

    python -m runtime.presets        parameters of each, counted, beside the published number

`--model NAME` of train.py takes one. Each model is built on the meta device, so that counting its
parameters needs no memory.
"""


def _gpt(num_layers, hidden_size, num_heads, seq_length=2048, vocab_size=51200) -> dict:
    return dict(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        seq_length=seq_length,
        vocab_size=vocab_size,
        dropout=0.1,
    )


def _llama2(num_layers, hidden_size, num_heads, ffn_hidden_size, **fields) -> dict:
    """fields: more fields, or other values than Llama-2's."""
    return (
        dict(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            ffn_hidden_size=ffn_hidden_size,
            seq_length=4096,
            vocab_size=32000,
            llama=True,
        )
        | fields
    )


PRESETS: dict[str, tuple[dict, float]] = {
    # The vocabulary is bytes and an end-of-text token. Llama's block learns faster than GPT-2's in
    # the first minutes.
    "tiny": (
        dict(
            num_layers=4,
            hidden_size=256,
            num_heads=8,
            ffn_hidden_size=688,
            seq_length=128,
            vocab_size=257,
            llama=True,
        ),
        0,
    ),
    # The same with 8 experts in every second layer: the same FLOPs, three times the parameters.
    "tiny-moe": (
        dict(
            num_layers=4,
            hidden_size=256,
            num_heads=8,
            ffn_hidden_size=688,
            seq_length=128,
            vocab_size=257,
            llama=True,
            num_experts=8,
            expert_every=2,
        ),
        0,
    ),
    # Radford et al. 2019, as released
    "gpt2": (_gpt(12, 768, 12, 1024, 50257), 124_439_808),
    "gpt2-medium": (_gpt(24, 1024, 16, 1024, 50257), 354_823_168),
    "gpt2-large": (_gpt(36, 1280, 20, 1024, 50257), 774_030_080),
    "gpt2-xl": (_gpt(48, 1600, 25, 1024, 50257), 1_557_611_200),
    # NeMo's GPT-3 configurations
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
        _llama2(
            32,
            4096,
            32,
            14336,
            num_kv_heads=8,
            seq_length=32768,
            rotary_base=1e6,
            num_experts=8,
            router="topk",
            router_topk=2,
            aux_loss=0.02,
            z_loss=0.0,
        ),
        46_702_792_704,
    ),
}


def main():
    # not above: whoever reads the table needs no model
    import torch

    import moe
    from routers import MoEConfig
    from runtime.sizes import flops_per_token
    from sharding import num_parameters

    print(
        f"{'preset':<15}{'L':>5}{'h':>7}{'heads':>6}{'kv':>5}{'s':>6}{'V':>7}"
        f"{'parameters':>20}{'published':>12}{'ratio':>7}{'GFLOP/token':>13}"
    )
    for name, (fields, published) in PRESETS.items():
        config = MoEConfig(**fields)
        # shapes without storage
        with torch.device("meta"):
            count = num_parameters(moe.build(config))
        beside = f"{'':>19}"
        if published:
            beside = f"{published / 1e9:>11.4g}B{count / published:>7.3f}"
        print(
            f"{name:<15}{config.num_layers:>5}{config.hidden_size:>7}{config.num_heads:>6}"
            f"{config.num_kv_heads:>5}{config.seq_length:>6}{config.vocab_size:>7}"
            f"{count:>20,}{beside}{flops_per_token(config) / 1e9:>13,.3f}"
        )


if __name__ == "__main__":
    from runtime import terminal

    terminal.run(main)
