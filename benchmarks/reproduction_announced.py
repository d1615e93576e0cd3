"""What was announced, and what other projects reach on GPUs. See reproduction.py.

Where an announcement does not name its layout, batch or baseline, ours stands in the row.
"""

import dataclasses
import statistics

import planner
from base.model_config import MoEConfig, flops_per_token
from benchmarks.reproduction_papers import Claim, preset, saved, step_times
from benchmarks.reproduction_predictions import (
    FP8,
    LLAMA_A100,
    LLAMA_H200,
    LLAMA_MODELS,
    OF_FP8,
    OF_LARGE,
    PREDICTED,
    UNREACHABLE,
    Search,
    days,
    described,
    llama_plan,
    of_layout,
    sharded_only,
    tokens_per_second,
)
from planning.inputs import A100, H100, H200, MACHINES, SOFTWARE, TRAIN, Layout

# --- other projects on GPUs -----------------------------------------------------------------------

PEAKS = {"a100": 312, "h100": 989, "h200": 989}
# Llama 3.1 8B, s 8192: tokens/s of each GPU; the batch is our choice
TORCHTITAN = (
    ("FSDP", H100, TRAIN, 5_762),
    ("FSDP, compiled", H100, TRAIN, 6_667),
    ("FSDP, compiled, FP8", H100, FP8, 8_532),
    ("FSDP, compiled, FP8", H200, FP8, 10_938),
)
TORCHTITAN_BATCH = 16
OF_TORCHTITAN = (
    "Its batch and its recomputation are not said, and its H100s are held to 500 W, of 700."
)
GPT_2_BATCH = 512
OF_GPT_2 = (
    "No row that was fitted has so small a model, and the loss of 50,257 logits a token is counted"
    " as single operations, where llm.c has one kernel."
)
OF_CEILING = (
    "The share was fitted to whole steps of training; it is no measurement of one operation."
)


def peaks() -> list[Claim]:
    """Data sheets, and the rates that the planner takes beside two measured ones."""
    found = []
    for name, tflops in PEAKS.items():
        claim = f"{name.upper()}: dense peak in bf16, TFLOP/s"
        found.append(Claim(claim, tflops, MACHINES[name].peak / 1e12, "data sheet"))
    shares = H200.constants
    copy, matmul = H200.memory_bandwidth * shares.memory, H200.peak * shares.matmul
    names = "H200: copy on the device, TB/s", "H200: matmul of 8192³ in bf16, TFLOP/s"
    for claim, published, ours in zip(names, (4.3, 790), (copy / 1e12, matmul / 1e12)):
        found.append(Claim(claim, published, ours, PREDICTED, why=OF_CEILING))
    return found


def other_projects(search: Search) -> list[Claim]:
    llama = LLAMA_MODELS["7b"]
    rate = 16_913 * flops_per_token(llama) / 1e12
    found = [Claim("Llama-2 7B: TFLOP/s of 16,913 tokens/s", 779, rate, "counted")]
    model = preset("llama3.1-8b", seq_length=8192)
    for kind, machine, software, published in TORCHTITAN:
        plan = search.best(machine, software, model, 8, TORCHTITAN_BATCH, keep=sharded_only)
        claim = f"torchtitan, Llama 3.1 8B, {kind}: tokens/s of each {machine.name.upper()}"
        ours = tokens_per_second(plan, model)
        found.append(Claim(claim, published, ours, PREDICTED, described(plan), OF_TORCHTITAN))
    model = preset("gpt2", dropout=0.0)
    plan = search.best(H100, TRAIN, model, 8, GPT_2_BATCH)
    claim = "llm.c, GPT-2 124M: tokens/s of each of 8 H100"
    ours = tokens_per_second(plan, model)
    found.append(Claim(claim, 475_000, ours, PREDICTED, described(plan), OF_GPT_2))
    return [*found, *megatron_core()]


def megatron_core() -> list[Claim]:
    """7.1B, L 30, h 4096, s 4096, t 2: the share of an H100's peak was fitted to it. The
    vocabulary makes it 7.1 billion; micro-batches of 4 are our choice."""
    model = MoEConfig(30, 4096, 32, seq_length=4096, vocab_size=128256, tied=False)
    sizes = dict(tp=2, dp=4, micro_batch_size=4, global_batch_size=128, sequence_parallel=True)
    plan = of_layout(H100, TRAIN, model, Layout(**sizes, zero_stage=1))
    rate = tokens_per_second(plan, model) * flops_per_token(model)
    names = "Megatron-core, 7.1B: TFLOP/s of an H100", "Megatron-core, 7.1B: % of the peak"
    return [
        Claim(claim, published, ours, "fitted", described(plan))
        for claim, published, ours in zip(names, (465.9, 47), (rate / 1e12, 100 * rate / H100.peak))
    ]


# --- GPT-3 175B -----------------------------------------------------------------------------------

GPT_3, GPT_3_BATCH = preset("gpt3-175b"), 1536
# a plain layout, as a careful user would choose it
COMMON = Layout(tp=8, pp=16, dp=8, global_batch_size=GPT_3_BATCH, recompute="full")
MEGATRON = SOFTWARE["megatron-2022"]
OF_BEFORE = (
    "The announced 10 days are the 34 of 2021 less 24; the published seconds of table 5, on 16"
    " replicas, give 7.3."
)
OF_COMMON = (
    "The common configuration, its GPUs and its batch are not named; the slowest layout searched"
    " takes {:.0f} times as long as the fastest."
)


def gpt_3_layouts(search: Search) -> list[planner.Plan]:
    """Each that fits 1,024 A100s."""
    return search.plans(A100, TRAIN, GPT_3, 1024, GPT_3_BATCH)


def gpt_3(search: Search) -> list[Claim]:
    best, *_, worst = gpt_3_layouts(search)
    common = of_layout(A100, TRAIN, GPT_3, COMMON)
    note = f"the fastest, {described(best)}, over {described(common)}"
    why = OF_COMMON.format(worst.seconds / best.seconds)
    claim = "175B, 1,024 A100: days for 300 billion tokens"
    faster = common.seconds / best.seconds
    return [
        Claim(claim, 24, days(best, GPT_3), PREDICTED, described(best)),
        *days_before(),
        *techniques(search),
        Claim("175B: speed over a common configuration", 6.85, faster, PREDICTED, note, why),
    ]


def days_before() -> list[Claim]:
    """Full recomputation against sequence parallelism with selective recomputation, under the
    layout of table 5 on 1,024 GPUs."""
    model = preset("megatron-175b")
    layout = Layout(tp=8, pp=8, dp=16, virtual_stages=3, global_batch_size=GPT_3_BATCH)
    before, after = (
        days(of_layout(A100, MEGATRON, model, dataclasses.replace(layout, **fields)), model)
        for fields in (
            dict(recompute="full"),
            dict(recompute="selective", sequence_parallel=True),
        )
    )
    less = before - after
    note = f"{before:.1f} - {after:.1f} days, layout of table 5, d 16"
    return [
        Claim("175B: days less than before", 10, less, PREDICTED, note, OF_BEFORE),
        Claim("175B: GPU hours less", 250_000, less * 24 * 1024, PREDICTED, note, OF_BEFORE),
    ]


def neither(layout: Layout) -> bool:
    """No sequence parallelism, no selective recomputation."""
    return not layout.sequence_parallel and layout.recompute != "selective"


# GPUs and sequences of table 5
TABLE_5 = {"22b": (8, 4), "175b": (64, 64), "530b": (280, 280), "1t": (512, 512)}
OF_NEW = (
    "What the new techniques are compared with is not said; here it is the best layout without"
    " them, and only 22B fits without any recomputation."
)


def techniques(search: Search) -> list[Claim]:
    """What sequence parallelism and selective recomputation give."""
    seconds = {name: predicted for name, (_, predicted) in step_times("table5").items()}
    names = [name.removesuffix(" full") for name in seconds if name.endswith("full")]
    speedups = [seconds[f"{name} full"] / seconds[f"{name} sel+sp"] for name in names]
    shorter = [1 / speedup for speedup in speedups]
    note = "the four models of table 5"
    more = []
    for name, (n, B) in TABLE_5.items():
        case = A100, MEGATRON, preset(f"megatron-{name}"), n, B
        without = search.best(*case, keep=neither)
        more.append(without.seconds / search.best(*case).seconds)
    return [
        Claim("20B to 1T: times as fast, up to", 1.3, max(speedups), PREDICTED, note),
        Claim("time over that of full recomputation, most", 0.8, max(shorter), PREDICTED, note),
        Claim("time over that of full recomputation, least", 0.7, min(shorter), PREDICTED, note),
        Claim("the new techniques: times as fast, least", 1.1, min(more), PREDICTED, note, OF_NEW),
        Claim("the new techniques: times as fast, most", 1.2, max(more), PREDICTED, note, OF_NEW),
    ]


# --- many GPUs ------------------------------------------------------------------------------------

# GPUs; the batch, a sequence for each, is our choice
SMALL, LARGE = 512, 10_752
MLPERF = preset("gpt3-175b", dropout=0.0)
ONE_T = preset("megatron-1t")
ONE_T_LAYOUT = Layout(tp=8, pp=64, dp=6, global_batch_size=3072, recompute="full")
OF_SCALING = "The batch is not said, and the share of FP8 was fitted to Llama-2 7B alone."


def with_recomputation(c: MoEConfig) -> float:
    """FLOPs of a token when every layer is computed again, as the paper of 2021 counts them."""
    head = 6 * c.vocab_size * c.hidden_size
    return (flops_per_token(c) - head) * 4 / 3 + head


def scaled(search: Search, gpus: list[int]) -> list[planner.Plan]:
    """The fastest layout on SMALL H100s in FP8, and the same with more replicas."""
    layout = search.best(H100, FP8, MLPERF, SMALL, SMALL).layout
    found = []
    for n in gpus:
        sizes = dict(dp=layout.dp * n // SMALL, global_batch_size=n)
        found.append(of_layout(H100, FP8, MLPERF, dataclasses.replace(layout, **sizes)))
    return found


def many_gpus(search: Search) -> list[Claim]:
    plans = scaled(search, [SMALL, LARGE])
    few, many = (tokens_per_second(plan, MLPERF) for plan in plans)
    one_t = of_layout(A100, SOFTWARE["megatron-2021"], ONE_T, ONE_T_LAYOUT)
    rate = tokens_per_second(one_t, ONE_T) * with_recomputation(ONE_T)
    fig12 = {name: predicted for name, (_, predicted) in step_times("fig12").items()}
    gains = [fig12[f"B {B}, v 1"] / fig12[f"B {B}, v 4"] for B in (12, 24, 36, 48, 60)]
    tflops = few * flops_per_token(MLPERF) / 1e12
    note = described(plans[0])
    whole = rate * one_t.layout.ranks / 1e15
    return [
        Claim("175B, FP8: TFLOP/s of an H100, up to", 797, tflops, PREDICTED, note, OF_SCALING),
        Claim(
            "175B: speed of an H100 among 10,752 over one among 512, nearly",
            1,
            many / few,
            PREDICTED,
            described(plans[1]),
            OF_SCALING,
        ),
        Claim("1T on 3,072 A100: PFLOP/s", 502, whole, PREDICTED, described(one_t)),
        Claim("1T: % of the peak", 52, 100 * rate / A100.peak, PREDICTED, described(one_t)),
        Claim(
            "interleaving: times as fast, over",
            1.1,
            statistics.median(gains),
            PREDICTED,
            "175B, p 12, v 4, median of five batches of figure 12",
        ),
    ]


# --- Llama 2, optimizer state, RLHF ---------------------------------------------------------------

TIMES_FASTER = {"7b": 3.7, "13b": 4.0, "70b": 4.2}
OF_RLHF = (
    "What its slow side does is not said. Here a step of a tiny model on CPU ranks is {:.1f} times"
    " as fast with a cache of keys and values as without (`python -m benchmarks.rollout`)."
)


def llama_2(search: Search) -> list[Claim]:
    found = []
    rates = {}
    for (name, n, _), (_, before, _) in zip(LLAMA_H200, LLAMA_A100):
        plans = llama_plan(search, H200, name, n), llama_plan(search, A100, name, before)
        rates[name], slow = (tokens_per_second(plan, LLAMA_MODELS[name]) for plan in plans)
        claim = f"Llama-2 {name.upper()}: times as fast on H200 as on A100"
        note = f"FP8 on {n} H200, bf16 on {before} A100"
        why = OF_LARGE if name == "70b" else OF_FP8
        found.append(Claim(claim, TIMES_FASTER[name], rates[name] / slow, PREDICTED, note, why))
    each = rates["70b"]
    tflops = each * flops_per_token(LLAMA_MODELS["70b"]) / 1e12
    for claim, published, ours in (
        ("70B on 8 H200: TFLOP/s of each, up to", 836, tflops),
        ("70B on 8 H200: tokens/s of the node, over", 15_000, 8 * each),
        ("70B on 8 H200: hours for 1 billion tokens", 18, 1e9 / (8 * each) / 3600),
    ):
        found.append(Claim(claim, published, ours, PREDICTED, "FP8, state in 16 bits", OF_LARGE))
    return found


def measured_here() -> list[Claim]:
    state = saved("optimizer_state")["rows"][0]
    before, after = (state[kind]["bytes_per_parameter"] for kind in ("fp32", "bf16"))
    step = saved("rollout")["results"]["cache"]["0"]
    faster = step["no cache"]["step"] / step["cache"]["step"]
    return [
        Claim(
            "optimizer state of mixed precision: times the bandwidth of the model's state",
            1.8,
            before / after,
            "measured",
            f"{before:g} bytes of weights and state over {after:g}",
        ),
        Claim(
            "RLHF, fast inference in the loop: times as fast, up to",
            5.6,
            None,
            UNREACHABLE,
            why=OF_RLHF.format(faster),
        ),
    ]
