"""The flags of a run, with every size made small: a layout on a laptop, in seconds.

    world, layout = shrink(config, world=64)        flags for at most 8 ranks
    one_device(layout)                              flags of the same training on one device

What a layout does to a model stays, and only its size goes:

    ranks            at most 2 of tp, cp, ep and replicas, at most 4 of pp; under hybrid sharding 2
                     groups of 2 replicas, if they fit
    layers           one in each pipeline stage, two or none where --layer-split is uneven
    heads            2 key-value heads, and as many query heads for each as before, up to 8
    MLP              its ratio to the hidden size
    vocabulary       61 where tp does not divide it, else 64
    experts          4, or 2; some of them are chosen for a token, or all
    micro-batches    several where there were several, in whole groups of pp if interleaved
    adapters         r 4 or less, an inner size of 8 or less
    as they are      dropout, schedule, recomputation, ZeRO stage, sequence parallelism, routers,
                     precision, learning rate

    python -m course.verify -- --model llama2-70b --tp 8 --pp 4
"""

import dataclasses

from base.model_config import EXPERT_FIELDS, MoEConfig
from run.config import RunConfig
from run.presets import PRESETS

MOST_RANKS = 8
# The fields whose values are shown, the user's and the small one.
SHOWN = (
    "ranks tp pp cp ep data_parallel_replicate_degree virtual_stages layer_split num_layers"
    " hidden_size num_heads num_kv_heads ffn_hidden_size seq_length vocab_size num_experts"
    " expert_every router_topk recompute_layers global_batch_size micro_batch_size lora_rank"
    " adapter_size"
).split()


# The fields that make a family.
PARTS = (
    "llama norm activation positions attention_bias mlp_bias tied qk_norm embedding_norm"
    " embedding_scale rotary_factor rotary_scaling rotary_share parallel_block"
).split()


def shrink(config: RunConfig, world: int) -> tuple[int, dict]:
    """(ranks, every flag of the small run). config: checked for `world` ranks."""
    model = config.model_config()
    tp, pp, cp, ep, dp = shrink_ranks(config, world)
    layout = dict(command=config.name_in_messages()) | dataclasses.asdict(config)
    layout |= dict(tp=tp, pp=pp, cp=cp, ep=ep)
    layout["ep_comm_overlap"] = config.ep_comm_overlap and min(pp, ep) > 1
    most = 2 if dp * cp >= 4 else 1
    replicate = min(config.data_parallel_replicate_degree, most)
    layout["data_parallel_replicate_degree"] = replicate
    # The ranks that share the heads.
    shares = tp * cp if config.cp_kind == "all-to-all" else tp
    layout |= shrink_layers(config, model, pp) | shrink_model(model, config.tp, tp, shares)
    if "window_pattern" in layout:
        layout["window_pattern"] = model.window_pattern
    if model.num_experts:
        layout |= shrink_experts(model, ep, layout["num_layers"])
    if getattr(config, "peft", None):
        layout |= shrink_adapters(config, tp)
    if config.fp8 != "off":
        layout |= shrink_fp8(config, layout, tp)
    layout |= shrink_batch(config, world, pp, dp)
    layout |= dict(
        # Only the family of a checkpoint's shape is left to say.
        model=family_of(model) if config.load else config.model,
        load=None,
        attention=None,
        head_chunk=min(config.head_chunk, 5),
        kernels="off",
        compile=False,
        device="cpu",
    )
    return tp * pp * cp * dp, layout


def family_of(model: MoEConfig) -> str:
    """The preset that has most of the model's parts."""

    def shared(name: str) -> int:
        preset = MoEConfig(**PRESETS[name][0])
        return sum(getattr(preset, part) == getattr(model, part) for part in PARTS)

    return max(PRESETS, key=shared)


def shrink_ranks(config: RunConfig, world: int) -> tuple[int, int, int, int, int]:
    """(tp, pp, cp, ep, dp)"""
    replicas = world // config.tp // config.pp
    tp, pp, cp, ep = (min(n, 2) for n in (config.tp, config.pp, config.cp, config.ep))
    dp = min(replicas // config.cp, 2)
    if ep == 2 and cp == 1:
        # Each expert has two replicas too.
        dp = ep * min(replicas // config.ep, 2)
    if config.data_parallel_replicate_degree > 1:
        dp = 4 // cp
    if tp * pp * cp * dp > MOST_RANKS:
        dp = max(1, ep // cp)
    if tp * cp * dp * 4 <= MOST_RANKS:
        pp = min(config.pp, 4)
    return tp, pp, cp, ep, dp


def shrink_layers(config: RunConfig, model: MoEConfig, pp: int) -> dict:
    v = min(config.virtual_stages, 2)
    every = min(model.expert_every, 2) if model.num_experts else 1
    layers = pp * v if pp > 1 else min(model.num_layers, 2 * every)
    split = None
    if config.layer_split:
        split = shrink_split(config.layer_split, pp, v)
        layers = sum(split)
    some = config.recompute_layers
    if some is not None:
        # All, none, or some of them.
        some = layers if some == model.num_layers else min(some, layers // 2)
    return dict(num_layers=layers, virtual_stages=v, layer_split=split, recompute_layers=some)


def shrink_split(split: list[int], pp: int, v: int) -> list[int]:
    """The first and the last stages: 0 layers where there were none, 1 where they were fewest,
    else 2."""
    n = pp * v
    kept = split[: n - n // 2] + split[len(split) - n // 2 :]
    fewest = min(layers for layers in kept if layers) if any(kept) else 1
    small = [min(layers, 1 if layers == fewest else 2) for layers in kept]
    for rank in range(1, pp - 1):
        # A rank without the embedding or the head needs a layer.
        if not sum(small[rank::pp]):
            small[rank] = 1
    # All of its layers were in stages that are left out.
    if not any(small):
        small[0] = 1
    return small


def shrink_model(model: MoEConfig, was_tp: int, tp: int, shares: int) -> dict:
    """was_tp: of the user's layout; shares: how many ranks share the heads."""
    queries = min(model.num_heads // model.num_kv_heads, 8)
    kv = max(min(model.num_kv_heads, 2), shares)
    if queries == 1:
        kv = min(model.num_kv_heads, 4) // shares * shares
    if model.num_kv_heads < was_tp:
        # Ranks share a head here too.
        kv, queries = 1, tp * max(1, queries // tp)
    # The channels of one head.
    channels = 8 if kv * queries <= 8 else 4
    hidden = kv * queries * channels
    ffn = tp * max(1, round(hidden * model.ffn_hidden_size / model.hidden_size / tp))
    latents = {}
    if model.kv_rank:
        latents = dict(kv_rank=16, query_rank=min(model.query_rank, 12), rope_head_dim=channels)
        latents |= dict(value_head_dim=min(model.value_head_dim, channels))
    own_size = model.kv_rank or model.head_dim * model.num_heads != model.hidden_size
    return latents | dict(
        hidden_size=hidden,
        num_heads=kv * queries,
        num_kv_heads=kv,
        ffn_hidden_size=ffn,
        seq_length=16,
        vocab_size=61 if model.vocab_size % was_tp else 64,
        dropout=model.dropout,
        norm=model.norm,
        activation=model.activation,
        positions=model.positions,
        # A head size that is not hidden size / heads stays so.
        head_dim=2 * channels if own_size else 0,
        sliding_window=min(model.sliding_window, 5),
    )


def shrink_experts(model: MoEConfig, ep: int, layers: int) -> dict:
    values = {name: getattr(model, name) for name in EXPERT_FIELDS}
    experts = min(model.num_experts, 4) // ep * ep
    chosen = min(model.router_topk, experts)
    if model.router_topk < model.num_experts:
        chosen = min(chosen, max(1, experts - 1))
    groups = min(model.expert_groups, 2)
    best = groups if model.topk_groups == model.expert_groups else 1
    values |= dict(expert_groups=groups, topk_groups=best)
    # Small as the MLP's: 24 has the divisors of a small tp.
    sizes = {name: min(values[name], 24) for name in ("expert_ffn_size", "shared_ffn_size")}
    return (
        values
        | sizes
        | dict(
            num_experts=experts,
            router_topk=min(chosen, best * experts // groups),
            expert_every=min(model.expert_every, 2, layers),
            first_dense_layers=min(model.first_dense_layers, 1, layers - 1),
        )
    )


def shrink_adapters(config: RunConfig, tp: int) -> dict:
    if config.peft == "lora":
        return dict(lora_rank=min(config.lora_rank, 4))
    if config.peft == "adapter":
        return dict(adapter_size=tp * max(1, min(config.adapter_size, 8) // tp))
    return {}


def shrink_batch(config: RunConfig, world: int, pp: int, dp: int) -> dict:
    was_dp = world // config.tp // config.pp // config.cp
    b = config.micro_batch(was_dp)
    m = config.global_batch_size // was_dp // b
    if config.pipeline_schedule == "interleaved":
        m = pp * min(m // config.pp, 2)
    else:
        m = min(m, 2 * pp if pp > 1 else 3)
    b, ramp = min(b, 2), {}
    if config.rampup_batch_size:
        # The first step has the least that its schedule takes, and the second one all.
        m = 4 * pp
        ramp = dict(rampup_batch_size=[b * 2 * pp * dp, b * 2 * pp * dp, 1])
    return dict(micro_batch_size=b, global_batch_size=b * m * dp) | ramp


def shrink_fp8(config: RunConfig, layout: dict, tp: int) -> dict:
    """FP8 in all layers, and blocks that are not cut."""
    small = dict(fp8_skip=0)
    if config.fp8 == "block":
        ffn = -(-layout["ffn_hidden_size"] // (4 * tp)) * 4 * tp
        small |= dict(fp8_block=4, ffn_hidden_size=ffn)
    return small


def one_device(layout: dict) -> dict:
    """The flags of one device that computes the same. Experts and FP8 scales depend on the
    micro-batch."""
    alone = dict(tp=1, pp=1, ep=1, virtual_stages=1, schedule=None, layer_split=None)
    alone |= dict(cp=1, cp_kind="ring", sequence_parallel=False, zero_stage=0, reduce_dtype=None)
    alone |= dict(tp_comm_overlap=False, ep_comm_overlap=False)
    alone |= dict(recompute="none", recompute_layers=None, head_chunk=0)
    alone |= dict(data_parallel_replicate_degree=1)
    if not layout["num_experts"] and layout["fp8"] == "off":
        alone["micro_batch_size"] = None
    return layout | alone


def described(config: RunConfig, world: int, small_world: int, layout: dict) -> str:
    """What was shrunk, in a line."""
    model = config.model_config()
    micro_batch = config.micro_batch(world // config.tp // config.pp // config.cp)
    values = vars(config) | vars(model) | dict(ranks=world, micro_batch_size=micro_batch)
    small = layout | dict(ranks=small_world)
    changes = []
    for name in SHOWN:
        if small.get(name) not in (None, values.get(name)):
            changes.append(f"{name} {values[name]} -> {small[name]}")
    return f"{small_world} ranks; shrunk: " + ", ".join(changes)
