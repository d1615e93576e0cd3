"""Parity of layouts drawn at random: pipelines, tensor, sequence, context, expert and (sharded)
data parallelism, recomputation, on up to 8 ranks.

    python tests/random_layouts.py [--count 200] [--first 0] [--families] [--cp] [--peft] [--fp8]
                                  [--rows] [--models] [--pictures] [--muon] [--hybrid] [--latents]
                                  [--rampup]

Layout n is drawn from seed n. Each is trained for three steps and held to one device by the gate of
parity.py.
"""

import argparse
import math
import random
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from parity import LLAMA, SMALL, same, train  # noqa: E402 (needs the path)

import pipeline_parallel  # noqa: E402
import schedules  # noqa: E402
from base.model_config import CHOICES, FieldError  # noqa: E402
from schedules import Placement  # noqa: E402


def draw(seed: int) -> dict:
    """{"world", "model", "layout"}: flags that one device runs too, and flags of the layout."""
    g = random.Random(seed)
    while True:
        pp = g.choice([1, 2, 3, 4, 5, 6, 8])
        tp = g.choice([1, 1, 2, 4])
        dp = g.choice([1, 1, 2, 3])
        if 1 < pp * tp * dp <= 8:
            break
    micro = g.choice([1, 2])
    m = g.choice([1, 2, 3, 4, 6])
    model = dict(
        num_layers=g.randint(pp, pp + 4),
        num_heads=4,
        seq_length=4 * g.randint(1, 4),
        vocab_size=g.choice([5, 61, 257]),
        dropout=g.choice([0.0, 0.1]),
        seed=seed,
    )
    layout = dict(
        pp=pp, tp=tp, micro_batch_size=micro, recompute=g.choice(["none", "selective", "full"])
    )
    if tp > 1:
        layout |= draw_sequence_parallel(g.random() < 0.5, seed)
    if pp > 1:
        layout["schedule"] = g.choice(["gpipe", "1f1b", "interleaved", "zb-h1"])
        v = g.choice([1, 2, 3]) if layout["schedule"] == "interleaved" else 1
        if layout["schedule"] == "interleaved":
            m = pp * g.choice([1, 2])
            layout["virtual_stages"] = v
        layout["layer_split"] = draw_layer_split(g, model["num_layers"], Placement(pp, v))
        m = draw_v(seed, model["num_layers"], layout, m)
    model["global_batch_size"] = micro * m * dp
    if dp > 1:
        # of its own: the other draws stay what they were
        layout["zero_stage"] = random.Random(-1 - seed).randrange(4)
    g_experts = random.Random(-(10**6) - seed)
    # who goes where depends on the micro-batch, so one device takes the same ones
    if g_experts.random() < 0.4:
        model |= draw_experts(g_experts, model["num_layers"]) | draw_deepseek(seed, model)
        model["micro_batch_size"] = micro
        layout["ep"] = g_experts.choice([n for n in range(1, dp + 1) if dp % n == 0])
        may_join = layout.get("schedule") in schedules.JOINABLE and m >= 2 * pp
        if layout["ep"] > 1 and may_join and layout["zero_stage"] < 3:
            layout["ep_comm_overlap"] = True
    base = SMALL
    if g.random() >= 0.5:
        # one and two are fewer than some tensor-parallel ranks
        base = LLAMA | dict(num_kv_heads=random.Random(-(10**7) - seed).choice([1, 2, 4]))
    return {"world": pp * tp * dp, "model": base | model, "layout": layout}


def draw_sequence_parallel(sequence: bool, seed: int) -> dict:
    in_shards = random.Random(-11 * 10**6 - seed).random() < 0.5
    return dict(sequence_parallel=sequence, tp_comm_overlap=sequence and in_shards)


def draw_layer_split(g: random.Random, num_layers: int, placement: Placement) -> list[int]:
    """Layers of each of the p v stages. A rank without a parameter is refused, so none is drawn."""
    while True:
        ends = sorted(g.randint(0, num_layers) for _ in range(placement.last_stage))
        split = [end - start for start, end in zip([0, *ends], [*ends, num_layers])]
        try:
            pipeline_parallel.check(num_layers, placement, split)
        except FieldError:
            continue
        return split


def draw_v(seed: int, num_layers: int, layout: dict, m: int) -> int:
    """Put a third of the pipelines on a V. Returns the number of micro-batches."""
    g = random.Random(-11 * 10**6 - seed)
    if g.random() > 1 / 3:
        return m
    p = layout["pp"]
    layout |= dict(schedule=g.choice(schedules.V_SHAPED), virtual_stages=2)
    layout["layer_split"] = draw_layer_split(g, num_layers, Placement(p, 2, True))
    return max(m, 2 * p) if layout["schedule"] == "dualpipe-v" else m


def draw_experts(g: random.Random, num_layers: int) -> dict:
    return dict(
        num_experts=12 * g.choice([1, 2]),
        router=g.choice(["sinkhorn", "topk"]),
        router_topk=g.choice([1, 2]),
        expert_every=g.randint(1, num_layers),
        capacity_factor=g.choice([0.0, 1.0]),
    )


def draw_deepseek(seed: int, model: dict) -> dict:
    """For half of the models: experts in groups, small and shared ones; 12 or 24 in all."""
    g = random.Random(-(10**7) - seed)
    if g.random() < 0.5:
        return {}
    groups = g.choice([1, 2, 3, 6])
    return dict(
        router=g.choice(["bias", "bias", "topk"]),
        router_scale=g.choice([1.0, 2.5]),
        bias_rate=0.01,
        expert_groups=groups,
        topk_groups=g.randint(1, groups),
        first_dense_layers=g.randint(0, model["num_layers"] - 1),
        expert_every=1,
        expert_ffn_size=8 * g.randint(1, 3),
        shared_ffn_size=g.choice([0, 8, 24]),
    )


# presets whose blocks differ
FAMILIES = "llama3.2-1b mistral-7b qwen2.5-7b qwen3-0.6b gemma-2b bloom-560m".split()
FAMILIES += ["falcon-180b", "nemotron-3-8b"]


def parts_of_others(g: random.Random, family: str) -> dict:
    flags = {}
    if g.random() < 0.3:
        flags["norm"] = g.choice(["rmsnorm", "rmsnorm1p"])
    elif g.random() < 0.1 and family != "qwen3-0.6b":
        flags["norm"] = "layernorm1p"
    if g.random() < 0.3:
        flags["activation"] = g.choice(CHOICES["activation"])
    if g.random() < 0.3:
        flags["positions"] = g.choice(["learned", "rotary", "alibi"])
    if g.random() < 0.3 and flags.get("positions") is None and family != "bloom-560m":
        flags |= dict(rotary_factor=4.0, rotary_scaling="yarn", rotary_original_length=64)
    return flags


def with_family(drawn: dict, seed: int) -> dict:
    """The same layout of a model of another family; some have a part of yet another one."""
    g = random.Random(-5 * 10**6 - seed)
    family = g.choice(FAMILIES)
    # an even size, for rotary positions; not h / a
    flags = dict(model=family, ffn_hidden_size=56, head_dim=g.choice([6, 8, 12]))
    if family == "nemotron-3-8b":
        # positions on a half of them
        flags["head_dim"] = g.choice([8, 12])
    if family != "bloom-560m":
        layout = drawn["layout"]
        grouped = layout["tp"] < 4 and layout.get("cp_kind") != "all-to-all"
        flags["num_kv_heads"] = 2 if grouped else 4
    if family == "mistral-7b":
        flags["sliding_window"] = g.randint(1, 9)
        flags["window_pattern"] = random.Random(flags["sliding_window"]).choice(["1", "10", "001"])
    flags |= parts_of_others(g, family)
    if "cp" in drawn["layout"] and flags.get("sliding_window") == 1:
        # Tokens that see only themselves have queries whose gradient is rounding.
        flags["sliding_window"] = 2
    return drawn | {"model": drawn["model"] | flags}


def with_latents(drawn: dict, seed: int) -> dict:
    """The same layout of a model with latent attention."""
    g = random.Random(-11 * 10**6 - seed)
    rope = g.choice([2, 4])
    flags = dict(model="llama2-7b", ffn_hidden_size=56, num_kv_heads=4, rope_head_dim=rope)
    flags |= dict(head_dim=rope + 2 * g.randint(1, 4), kv_rank=g.randint(3, 9))
    flags |= dict(query_rank=g.choice([0, 5, 8]), value_head_dim=g.randint(2, 4))
    return drawn | {"model": drawn["model"] | flags}


def with_cp(drawn: dict, seed: int) -> dict:
    """The same layout, or another one where it has too many ranks, with sequences shared by 2 or 4
    context-parallel ranks."""
    while drawn["world"] > 4:
        seed += 10**6
        drawn = draw(seed)
    g = random.Random(-4 * 10**6 - seed)
    model, layout, world = drawn["model"], drawn["layout"], drawn["world"]
    cp = g.choice([n for n in (2, 4) if n * world <= 8])
    model = model | dict(seq_length=2 * cp * layout["tp"] * g.randint(1, 3))
    layout = layout | dict(cp=cp)
    if g.random() < 0.3:
        model["document_mask"] = True
    heads = max(1, model.get("num_kv_heads", model["num_heads"]) // layout["tp"])
    if heads % cp == 0:
        layout["cp_kind"] = g.choice(["ring", "all-to-all"])
    replicas = replicas_of(drawn) * cp
    layout["zero_stage"] = g.randrange(4)
    if model.get("num_experts"):
        layout["ep"] = g.choice([n for n in (1, 2, 4) if replicas % n == 0])
    return {"world": world * cp, "model": model, "layout": layout}


def with_hybrid(drawn: dict, seed: int) -> dict:
    """Twice the same layout, or another one that has data-parallel ranks: in two groups that each
    hold all shards."""
    while not 2 <= replicas_of(drawn) <= drawn["world"] <= 4:
        seed += 10**6
        drawn = draw(seed)
    model = drawn["model"] | dict(global_batch_size=2 * drawn["model"]["global_batch_size"])
    stage = random.Random(-7 * 10**6 - seed).randint(1, 3)
    layout = drawn["layout"] | dict(data_parallel_replicate_degree=2, zero_stage=stage)
    return {"world": 2 * drawn["world"], "model": model, "layout": layout}


def replicas_of(drawn: dict) -> int:
    return drawn["world"] // drawn["layout"]["pp"] // drawn["layout"]["tp"]


def with_models(drawn: dict, seed: int) -> dict:
    """The same layout of a BERT or a T5, without experts and, of a T5, without virtual stages."""
    g = random.Random(-8 * 10**6 - seed)
    model, layout, world = drawn["model"], dict(drawn["layout"]), drawn["world"]
    kept = ("num_layers", "seq_length", "vocab_size", "dropout", "seed", "global_batch_size")
    model = SMALL | {name: model[name] for name in kept}
    model |= dict(ffn_hidden_size=48, head_dim=8, document_mask=g.random() < 0.5)
    layout.pop("ep", None)
    layout["head_chunk"] = g.choice([0, 0, 3])
    if not model["dropout"]:
        model["attention"] = g.choice(["fused", "explicit"])
    if g.random() < 0.5:
        # two types of token, or one
        model |= dict(command="bert.py", model=g.choice(["tiny", "roberta-base"]))
        cp = g.choice([1, 2, 4])
        if world * cp <= 8 and layout["tp"] * cp <= model["num_heads"]:
            model["seq_length"] *= cp
            layout["cp"] = cp
            world *= cp
        return {"world": world, "model": model, "layout": layout}
    model["num_layers"] = max(2, model["num_layers"])
    model |= dict(command="t5.py", encoder_layers=g.randint(1, model["num_layers"] - 1))
    # tied, with ReLU; or a head of its own, and a gated MLP
    model |= dict(model=g.choice(["t5-small", "tiny"]), target_length=4 * g.randint(1, 3))
    if layout["pp"] > 1:
        layout.pop("virtual_stages", None)
        layout["schedule"] = g.choice(["gpipe", "1f1b", "zb-h1"])
        layout["layer_split"] = draw_layer_split(g, model["num_layers"], Placement(layout["pp"]))
    return {"world": world, "model": model, "layout": layout}


def with_pictures(drawn: dict, seed: int) -> dict:
    """The same layout of a model that reads pictures (models/), without experts."""
    g = random.Random(-9 * 10**6 - seed)
    layout = {name: value for name, value in drawn["layout"].items() if name != "ep"}
    kept = SMALL | drawn["model"]
    model = {n: kept[n] for n in SMALL.keys() - {"seq_length", "vocab_size"}}
    patch, side = g.choice([1, 2, 3]), g.randint(1, 4)
    model |= dict(model="tiny", patch_size=patch, picture_size=patch * side)
    model |= dict(ffn_hidden_size=48, head_dim=8)
    shards = layout["tp"] if layout.get("sequence_parallel") else 1
    of_model = {"vit": of_vit, "dit": of_dit, "clip": of_clip, "multimodal": of_multimodal}
    # A CLIP has two layers at least.
    command = g.choice([name for name in of_model if name != "clip" or model["num_layers"] > 1])
    model |= of_model[command](g, side**2, shards, model["num_layers"])
    if command == "clip":
        del model["dropout"]
    # Without a picture in a batch a projection alone has no gradient.
    if model["global_batch_size"] < 4:
        model.pop("freeze", None)
    if not model.get("dropout"):
        model["attention"] = g.choice(["fused", "explicit"])
    return drawn | {"model": model | dict(command=f"{command}.py"), "layout": layout}


# The fields of a model, of a sequence that its shards divide. n: patches of a picture.


def of_vit(g: random.Random, n: int, shards: int, layers: int) -> dict:
    return dict(class_tokens=shards * g.randint(0, 2) + -n % shards, classes=g.randint(16, 20))


def of_dit(g: random.Random, n: int, shards: int, layers: int) -> dict:
    fields = dict(objective=g.choice(["noise", "flow"]), edit=g.random() < 0.5)
    return fields | dict(text_length=1 + shards * g.randint(0, 2) + -(n + 2) % shards)


def of_clip(g: random.Random, n: int, shards: int, layers: int) -> dict:
    """Some layers of the text, the others of the picture."""
    fields = dict(text_layers=g.randint(1, layers - 1), text_length=4 * g.randint(9, 12))
    fields |= dict(text_hidden_size=g.choice([16, 32]), text_heads=4, embedding_size=12)
    return fields | dict(class_tokens=1 + shards * g.randint(0, 1) + -(n + 1) % shards)


def of_multimodal(g: random.Random, n: int, shards: int, layers: int) -> dict:
    """A decoder, and a tower of another width."""
    fields = dict(model=g.choice(["tiny", "tiny-gpt2"]), vocab_size=61)
    fields |= dict(vision_layers=g.randint(1, 3), vision_heads=4)
    fields |= dict(vision_hidden_size=4 * g.randint(3, 8))
    fields |= dict(vision_class_tokens=shards * g.randint(0, 1) + -n % shards)
    fields |= dict(vision_encoder=g.choice(["vit", "clip"]))
    fields |= dict(projection=g.choice(["linear", "mlp2x_gelu"]))
    fields["freeze"] = g.choice([[], [], ["vision"], ["vision", "decoder"]])
    # The picture stands in the middle (course/synthetic.py).
    return fields | dict(seq_length=-(-(2 * n + 4) // 4) * 4)


def with_peft(drawn: dict, seed: int) -> dict:
    """The same layout of a frozen model with LoRA, bottleneck adapters or IA3."""
    g = random.Random(-2 * 10**6 - seed)
    method = g.choice(["lora", "adapter", "ia3"])
    flags = dict(peft=method, lora_rank=g.randint(1, 5), adapter_size=4 * g.randint(1, 3))
    places = ["attention", "mlp"] if method == "adapter" else ["key", "value", "down"]
    if method == "lora":
        places += ["query", "output", "up"]
        # experts have no dropout
        if not drawn["model"].get("num_experts"):
            flags["lora_dropout"] = g.choice([0.0, 0.2])
    flags["peft_targets"] = g.sample(places, g.randint(1, len(places)))
    return drawn | {"model": drawn["model"] | flags}


def with_rows(drawn: dict, seed: int) -> dict:
    """The same layout, perhaps with context-parallel ranks, of a model with experts, on rows of
    unequal lengths: no router may see what pads them."""
    g = random.Random(-6 * 10**6 - seed)
    if drawn["world"] <= 4 and g.random() < 0.5:
        drawn = with_cp(drawn, seed)
    model, layout = drawn["model"], drawn["layout"]
    model = model | dict(command="sft.py", data=["-"], seq_length=model["seq_length"] + 16)
    # of text alone
    model.pop("document_mask", None)
    if not model.get("num_experts"):
        model |= draw_experts(g, model["num_layers"])
        model["micro_batch_size"] = layout["micro_batch_size"]
    if layout["micro_batch_size"] == 1:
        # the plan of one short row is a tie
        model["router"] = "topk"
    if model["router"] == "topk":
        model |= dict(aux_loss=g.choice([0.01, 1.0]), z_loss=g.choice([0.0, 0.1]))
    return drawn | {"model": model}


def with_muon(drawn: dict, seed: int) -> dict:
    return drawn | {"model": drawn["model"] | dict(optimizer="muon")}


def with_mtp(drawn: dict, seed: int) -> dict:
    """With one or two modules that predict further tokens."""
    if drawn["model"]["model"] == "falcon-180b":
        return drawn
    return drawn | {"model": drawn["model"] | dict(mtp_layers=1 + seed % 2)}


def with_fp8(drawn: dict, seed: int) -> dict:
    """The same layout in FP8, by a recipe drawn at random. Scales are those of a micro-batch, so
    one device has the same ones; blocks are not cut."""
    g = random.Random(-3 * 10**6 - seed)
    model, tp, cp = drawn["model"], drawn["layout"]["tp"], drawn["layout"].get("cp", 1)
    h, heads = model["hidden_size"], model["num_heads"]
    kv, d = model.get("num_kv_heads", heads), model.get("head_dim", h // heads)
    widths = [h, model.get("ffn_hidden_size", 4 * h), kv * d, heads * d]
    largest = math.gcd(*(width // tp for width in widths))
    if cp > 1:
        largest = math.gcd(largest, model["seq_length"] // (2 * cp))
    flags = dict(
        fp8=g.choice(["current", "delayed", "block"]),
        # with powers of two a wrong maximum often gives the same scale
        fp8_scales=g.choice(["any", "power-of-two"]),
        fp8_skip=g.randint(0, (model["num_layers"] - 1) // 2),
        micro_batch_size=drawn["layout"]["micro_batch_size"],
    )
    if flags["fp8"] == "block":
        flags["fp8_block"] = g.choice([n for n in range(1, largest + 1) if largest % n == 0])
    layout = drawn["layout"] | dict(tp_comm_overlap=False)
    return drawn | {"model": model | flags, "layout": layout}


def with_rampup(drawn: dict, seed: int) -> dict:
    """The same layout with steps of two or three sizes."""
    g = random.Random(-12 * 10**6 - seed)
    layout, schedule = drawn["layout"], drawn["layout"].get("schedule")
    pp = layout["pp"]
    each = drawn["world"] // pp // layout["tp"] // layout.get("cp", 1) * layout["micro_batch_size"]
    increment = each * pp if schedule == "interleaved" else each
    doubled = schedule == "dualpipe-v" or layout.get("ep_comm_overlap")
    start = 2 * pp * each if doubled else increment * g.randint(1, 2)
    last = start + increment * g.randint(1, 2)
    ramp = dict(rampup_batch_size=[start, increment, g.randint(1, 2 * start)])
    return drawn | {"model": drawn["model"] | ramp | dict(global_batch_size=last)}


# flag -> (what it makes of a layout, its help)
CHANGES = {
    "cp": (with_cp, "with sequences shared by ranks"),
    "latents": (with_latents, "with latent attention"),
    "families": (with_family, "of Mistral, Qwen, Gemma, BLOOM"),
    "models": (with_models, "of BERT and T5"),
    "pictures": (with_pictures, "of models that read pictures"),
    "rows": (with_rows, "experts, rows of unequal lengths"),
    "peft": (with_peft, "of frozen models with adapters"),
    "fp8": (with_fp8, "in FP8, by a recipe of its own each"),
    "muon": (with_muon, "with Muon in the place of AdamW"),
    "mtp": (with_mtp, "with multi-token prediction"),
    "hybrid": (with_hybrid, "in two groups of ranks that each hold all shards"),
    "rampup": (with_rampup, "with a batch that grows"),
}


def drawn(flags: str, seed: int) -> dict:
    """flags: of this command, in the order of CHANGES."""
    found = draw(seed)
    for flag in flags.split():
        change, _ = CHANGES[flag.removeprefix("--")]
        found = change(found, seed)
    return found


def check(drawn: dict) -> None:
    """Raises AssertionError where the layout is not one device."""
    a = train(drawn["world"], base=drawn["model"], **drawn["layout"])
    same(a, train(base=drawn["model"], recompute="none"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    for name, (_, text) in CHANGES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    args = parser.parse_args()
    flags = " ".join(name for name in CHANGES if getattr(args, name))
    failed = 0
    for seed in range(args.first, args.first + args.count):
        layout = drawn(flags, seed)
        try:
            check(layout)
        except (AssertionError, RuntimeError) as e:
            failed += 1
            print(f"seed {seed}: {layout}: {str(e)[-600:]}", flush=True)
    print(f"{args.count - failed} of {args.count} layouts equal one device")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
