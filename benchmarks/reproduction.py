"""Every published number that this project is held to, beside ours: docs/reproduction.md.

    python -m benchmarks.reproduction [--toy] [--out DIR] [--figures DIR]

A claim is one number of a paper, of NeMo's tables or of an announcement; reproduction.toml has all
of them, with the reason of each that is off by more than 10%. Ours is

    counted          by a function, a schedule, or the trainer's step on the meta device
    measured         on CPU ranks: read from the JSON of another comparison
    predicted        by planner.py for the published layout, or for the fastest one that fits
    fitted           predicted too, but a constant of the planner was fitted to this very number
    data sheet       an input of the planner

Nothing is timed; it takes a minute. With --out benchmarks/results the page is written again. Global
batches that are not published are our choice, and stand in each row.

Figures: docs/figures/reproduction.svg, docs/figures/reproduction_scaling.svg
"""

import dataclasses
import itertools
import json
import statistics
import tomllib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

import fsdp
import moe
import planner
import recompute
import schedules
import train
from base.model_config import MoEConfig, flops_per_token
from benchmarks import report, style
from planning import as_rank
from planning import rows as published_rows
from planning.inputs import (
    A100,
    H100,
    H200,
    MACHINES,
    SOFTWARE,
    STATE_IN_16_BITS,
    TRAIN,
    Layout,
    Machine,
)
from planning.layer_time import Rank, layer
from planning.memory import block_parameters
from planning.serving import ENGINES, Serving
from run import flags
from run.presets import PRESETS
from sharding import num_parameters

PAGE = report.ROOT / "docs" / "reproduction.md"
BEGIN, END = "<!-- written by benchmarks/reproduction.py -->", "<!-- end -->"
CLAIMS = tomllib.loads((report.HERE / "reproduction.toml").read_text(encoding="utf-8"))
# A ratio that is farther from 1 has a reason.
OFF = 0.1
FP8 = dataclasses.replace(TRAIN, fp8="delayed")
MEGATRON = SOFTWARE["megatron-2022"]
TOKENS, DAY = 300e9, 86400


class Ours(NamedTuple):
    """Our number. note: the layout or the example; published: the value of a paper's formula."""

    value: float
    note: str = ""
    published: float | None = None


# --- what the numbers are made of -----------------------------------------------------------------


def preset(name: str, **fields) -> MoEConfig:
    return MoEConfig(**(PRESETS[name][0] | fields))


@lru_cache
def counted(words: str) -> as_rank.Report:
    """The report of `train.py --as-rank R --of N ..`."""
    config, question = flags.parse_all(words.split(), 0, train.Config)
    return as_rank.report(config, train.Trainer, question["as_rank"], question["of"])


def saved(name: str) -> dict:
    return json.loads((report.RESULTS / f"{name}.json").read_text())


def step_times(group: str) -> dict[str, tuple[float, float]]:
    """{row of planning/published_times.json: (published, predicted seconds)}"""
    found = {}
    for row in published_rows.read(published_rows.PUBLISHED):
        if row.group == group:
            parts = planner.step_time(row.machine, row.software, row.model, row.layout)
            found[row.name] = row.seconds, sum(parts.values())
    return found


def plan_of(machine: Machine, software, model: MoEConfig, layout: Layout) -> planner.Plan:
    """The plan of a layout that was published."""
    return planner.Plan(layout, planner.step_time(machine, software, model, layout), {})


def tokens_per_second(plan: planner.Plan, model: MoEConfig) -> float:
    """The rate of each GPU."""
    return plan.layout.global_batch_size * model.seq_length / plan.seconds / plan.layout.ranks


def days(plan: planner.Plan, model: MoEConfig) -> float:
    return TOKENS / (plan.layout.ranks * tokens_per_second(plan, model)) / DAY


def described(plan: planner.Plan) -> str:
    """`--tp 8 ..`, for the column that says how."""
    return f"`{' '.join(plan.layout.flags())}`"


class Search:
    """The fastest plan of a case (machine, software, model, GPUs, global batch); each is searched
    once. toy: of the first layouts that fit, in place of all."""

    def __init__(self, toy: bool):
        self.toy = toy
        self.found = {}

    def best(self, *case, keep: Callable = lambda layout: True) -> planner.Plan:
        if self.toy:
            kept = (plan for plan in planner.fitting(*case) if keep(plan.layout))
            return min(itertools.islice(kept, 2), key=lambda plan: plan.seconds)
        if case not in self.found:
            self.found[case] = planner.search(*case)
        return next(plan for plan in self.found[case] if keep(plan.layout))


# --- Megatron-LM, 2021 ----------------------------------------------------------------------------

# Published TFLOP/s of a GPU, and GPUs, for the models of table 1.
TABLE_1 = {
    "1.7B": (137, 32),
    "3.6B": (138, 64),
    "7.5B": (142, 128),
    "18B": (135, 256),
    "39B": (138, 512),
    "76B": (140, 1024),
}
OF_64 = "--as-rank 0 --of 64 --model megatron-3.6b --tp 2 --micro-batch-size 16"
OF_64 += " --global-batch-size 512"
OF_PIPELINE = "--as-rank 8 --of 64 --model megatron-175b --tp 8 --pp 8 --micro-batch-size 1"
OF_PIPELINE += " --global-batch-size 64"
# The pipeline of the examples.
P, M, V_STAGES = 4, 8, 2
EXAMPLE = f"p {P}, m {M}"


def table_1() -> list[Ours]:
    found = []
    for (name, (tflops, _)), (published, predicted) in zip(
        TABLE_1.items(), step_times("table1").values(), strict=True
    ):
        with torch.device("meta"):
            count = num_parameters(moe.build(preset(f"megatron-{name.lower()}")))
        rate = tflops * published / predicted
        found += [Ours(count / 1e9), Ours(rate), Ours(100e12 * rate / A100.peak)]
    return found


def megatron_formulas() -> list[Ours]:
    c = preset("megatron-3.6b")
    L, h, s, V, B, n = c.num_layers, c.hidden_size, c.seq_length, c.vocab_size, 512, 64
    with torch.device("meta"):
        parameters = num_parameters(moe.build(c))
    formula = 12 * L * h * h * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))
    step = 96 * B * s * L * h * h * (1 + s / (6 * h) + V / (16 * L * h))
    forward = 24 * B * s * h * h + 4 * B * s * s * h
    full, plain = counted(f"{OF_64} --recompute full").flops, counted(OF_64).flops
    return [
        Ours(parameters, "3.6B", formula),
        Ours(n * full, "3.6B, 64 ranks", step),
        Ours(n * (full - plain) / L, "3.6B, 64 ranks", forward),
    ]


def bubbles() -> list[Ours]:
    """Forward and backward take 1 and 2."""
    found, lists = [], {}
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", V_STAGES)):
        lists[name] = schedules.lists(name, P, M, v)
        idle = schedules.bubble(schedules.simulate(lists[name], schedules.Cost()))
        note = f"{EXAMPLE}, v {v}"
        found.append(Ours(idle, note, (P - 1) / (v * M)))
        if name == "1f1b":
            found.append(Ours(idle / (1 + idle), note, (P - 1) / (M + P - 1)))
    held = [max(schedules.in_flight(lists[name])) for name in ("gpipe", "1f1b")]
    return [*found, *(Ours(most, EXAMPLE) for most in held)]


def collectives() -> list[Ours]:
    """All-reduces of a layer, without those of the ends; messages of a stage in the middle."""
    L = preset("megatron-3.6b").num_layers

    def calls(words: str, kind: str, group: str) -> int:
        found = counted(words).collectives
        largest = max(c.bytes for c in found if (c.kind, c.group) == (kind, group))
        return sum(c.count for c in found if (c.kind, c.group, c.bytes) == (kind, group, largest))

    plain = calls(OF_64, "all-reduce", "tp")
    # Full recomputation repeats those of forward.
    forward = (calls(f"{OF_64} --recompute full", "all-reduce", "tp") - plain) / L
    sends = [calls(f"{OF_PIPELINE}{v}", "send", "pp") for v in ("", " --virtual-stages 3")]
    return [
        Ours(forward, "3.6B, t 2"),
        Ours(plain // L - forward, "3.6B, t 2"),
        Ours(sends[1] / sends[0], "175B, p 8, v 3"),
    ]


def with_recomputation(c: MoEConfig) -> float:
    """FLOPs of a token when every layer is computed again, as the paper of 2021 counts them."""
    head = 6 * c.vocab_size * c.hidden_size
    return (flops_per_token(c) - head) * 4 / 3 + head


def days_of_2021() -> list[Ours]:
    parameters, gpus, rate = 175e9, 1024, 140e12
    short = 8 * TOKENS * parameters / (gpus * rate) / DAY
    long = with_recomputation(preset("megatron-175b")) * TOKENS / (gpus * rate) / DAY
    return [Ours(short, "1,024 GPUs of 140 TFLOP/s"), Ours(short / long, "175B")]


# --- Korthikanti et al., 2022 ---------------------------------------------------------------------

# Layers of table 4: sequence parallelism, recomputation.
TABLE_4 = {
    "none": (False, "none"),
    "sequence": (True, "none"),
    "full": (False, "full"),
    "selective": (False, "selective"),
    "selective + sequence": (True, "selective"),
}
FIRST_STAGE = {
    "22B": "--of 8 --model megatron-22b --tp 8 --micro-batch-size 4 --global-batch-size 4",
    "175B": "--of 64 --model megatron-175b --tp 8 --pp 8 --virtual-stages 3 --micro-batch-size 1"
    " --global-batch-size 64",
}
BOTH = " --sequence-parallel --recompute selective"


def layer_bytes() -> list[Ours]:
    """Table 2: the bytes that were measured beside its formulas."""
    rows = {r["row"]: r for r in saved("activation_memory")["layers"] if r["layer"] == "as 175B"}
    return [Ours(r["measured"], f"h 1024, a 8, t {r['t']}", r["formula"]) for r in rows.values()]


def first_stage() -> list[Ours]:
    held = max(schedules.in_flight(schedules.lists("interleaved", 8, 64, 3)))
    formula = recompute.first_stage_layers(96, 8, 3) / 96
    found = [Ours(held / (8 * 3), "p 8, v 3", formula)]
    for words, more in itertools.product(FIRST_STAGE.values(), ("", BOTH)):
        gib = counted(f"--as-rank 0 {words}{more}").activations / 2**30
        found.append(Ours(gib, "with the ends"))
    return found


def outside_and_state() -> list[Ours]:
    c = preset("megatron-22b")
    s, h, a, L, V, b, t = 2048, c.hidden_size, c.num_heads, c.num_layers, c.vocab_size, 4, 8
    layers = L * recompute.layer_bytes(s, b, h, a, t, sequence_parallel=True)
    found = [Ours(100 * recompute.outside_layers_bytes(s, b, h, V, t) / layers)]
    for name, layout in (("megatron-22b", Layout(tp=8)), ("megatron-175b", Layout(tp=8, pp=8))):
        c = preset(name)
        numbers = sum(block_parameters(c, layout)[:2]) * c.num_layers / layout.pp
        gib = sum(fsdp.bytes_per_parameter(0, 1)) * numbers / 2**30
        found.append(Ours(gib, "matrices of the layers"))
    return found


def layer_times() -> list[Ours]:
    """Milliseconds of forward and backward; then both together, over those of the plain layer."""
    found, totals = [], {}
    for name, (sequence, again) in TABLE_4.items():
        sizes = dict(tp=8, micro_batch_size=4, global_batch_size=4)
        layout = Layout(**sizes, sequence_parallel=sequence, recompute=again)
        passes = layer(Rank(A100, MEGATRON, preset("megatron-22b"), layout))
        ours = [1000 * sum(seconds) for seconds in passes[:2]]
        totals[name] = sum(ours)
        found += map(Ours, ours)
    overheads = ("full", "selective", "selective + sequence")
    return [*found, *(Ours(totals[name] / totals["none"]) for name in overheads)]


def table_5() -> list[Ours]:
    """Seconds of a step; model and hardware FLOPs over the peak in these seconds; FLOPs."""
    seconds = step_times("table5")
    found = [Ours(predicted, "", published) for published, predicted in seconds.values()]
    for name, B, n in (("22B", 4, 8), ("175B", 64, 64)):
        peak = seconds[f"{name} sel+sp"][1] * n * A100.peak
        flops = step_flops(preset(f"megatron-{name.lower()}"), B)
        found += [Ours(100 * of_step / peak) for of_step in flops]
    for more, formula in zip(("", BOTH), step_flops(preset("megatron-22b"), 4)):
        flops = 8 * counted(f"--as-rank 0 {FIRST_STAGE['22B']}{more}").flops
        found.append(Ours(flops, "8 ranks", formula))
    return found


def step_flops(c: MoEConfig, B: int) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs with selective recomputation) by the paper's formulas: 72 B L s
    h² (1 + s/6h + V/12hL), and s/3h in the place of s/6h."""
    L, h, s, V = c.num_layers, c.hidden_size, c.seq_length, c.vocab_size
    each = 72 * B * L * s * h * h
    head = V / (12 * h * L)
    return each * (1 + s / (6 * h) + head), each * (1 + s / (3 * h) + head)


# --- ZeRO, zero bubble ----------------------------------------------------------------------------


def zero() -> list[Ours]:
    """Bytes, with gradients of 2 bytes as in the paper; elements sent of one micro-batch, and those
    that were measured of several."""
    stages = range(4)
    found = [Ours(7.5 * sum(fsdp.bytes_per_parameter(n, 64, gradient=2))) for n in stages]
    found += [Ours(fsdp.elements_sent(n, 1)) for n in stages]
    results = saved("zero_memory")
    m, note = results["micro_batches"], f"{results['ranks']} CPU ranks"
    for row in results["rows"]:
        if row["state"] == "fp32":
            elements = {2: m + 1, 3: 3 * m}.get(row["stage"], 2)
            found.append(Ours(row["sent"], note, elements))
    return found


def zero_bubble() -> list[Ours]:
    """Seconds in which the busiest rank waits, with T_F 1, T_B 1.1, T_W 0.8; activations held."""
    cost = schedules.Cost(1.0, 1.1, 0.8)
    f, b, w = cost.forward, cost.input, cost.weight
    found = []
    for name, formula in (("1f1b", f + b + w), ("zb-h1", f + b - w)):
        lists = schedules.lists(name, P, M)
        idle = schedules.bubble(schedules.simulate(lists, cost)) * M * (f + b + w)
        found.append(Ours(idle, EXAMPLE, (P - 1) * formula))
    return [*found, Ours(max(schedules.in_flight(lists)), EXAMPLE)]


# --- NeMo, and other projects on GPUs -------------------------------------------------------------

LLAMA = {name: preset(f"llama2-{name}") for name in ("7b", "13b", "70b")}
LLAMA_BATCH = 128
# GPUs of the published tokens/s.
LLAMA_GPUS = {H200: (8, 8, 8), A100: (8, 8, 32)}
GPUS = (800, 480, 160)
PARAMETERS = {"126M": 126e6, "5B": 5e9, "20B": 20e9, "40B": 40e9, "175B": 175e9}
DAYS_BATCH = 2400
# NeMo's published layouts: t, p, v, micro-batch, B, GPUs.
H100_LAYOUTS = {
    "gpt3-5b": (1, 1, 1, 4, 2048, 64),
    "gpt3-20b": (2, 1, 1, 2, 256, 64),
    "llama2-7b": (1, 1, 1, 1, 128, 8),
    "llama2-13b": (1, 4, 10, 1, 128, 16),
}


def peaks() -> list[Ours]:
    """Data sheets; the rates that the planner takes; the FLOP/s of NeMo's Llama-2 7B."""
    shares = H200.constants
    copy, matmul = H200.memory_bandwidth * shares.memory, H200.peak * shares.matmul
    found = [MACHINES[name].peak for name in ("a100", "h100", "h200")]
    found += [copy, matmul, 16_913 * flops_per_token(LLAMA["7b"])]
    return [Ours(value / 1e12) for value in found]


def megatron_core() -> list[Ours]:
    """7.1B, L 30, h 4096, s 4096, t 2: the share of an H100's peak was fitted to it. The
    vocabulary makes it 7.1 billion; micro-batches of 4 are our choice."""
    model = MoEConfig(30, 4096, 32, seq_length=4096, vocab_size=128256, tied=False)
    sizes = dict(tp=2, dp=4, micro_batch_size=4, global_batch_size=128, sequence_parallel=True)
    plan = plan_of(H100, TRAIN, model, Layout(**sizes, zero_stage=1))
    rate = tokens_per_second(plan, model) * flops_per_token(model)
    return [Ours(x, described(plan)) for x in (rate / 1e12, 100 * rate / H100.peak)]


def encoders() -> list[Ours]:
    """Tokens/s of BERT, T5 and mT5; of a sequence the tokens of the source count."""
    found = []
    for row in published_rows.read(published_rows.ENCODERS):
        plan = plan_of(row.machine, row.software, row.model, row.layout)
        rate = tokens_per_second(plan, row.model) * row.layout.ranks
        found.append(Ours(rate, described(plan)))
    return found


def nemo_days(search: Search) -> list[Ours]:
    found = []
    for name, n in itertools.product(PARAMETERS, GPUS):
        model = preset(f"gpt3-{name.lower()}")
        plan = search.best(A100, TRAIN, model, n, DAYS_BATCH)
        found.append(Ours(days(plan, model), described(plan)))
    return found


def rule_of_thumb() -> list[Ours]:
    """8 N tokens at 140 TFLOP/s over the published days: least and most, from 5B up and of 126M."""
    cases = zip(itertools.product(PARAMETERS.values(), GPUS), rows_of("nemo_days"), strict=True)
    ratios = [8 * size * TOKENS / (140e12 * n) / DAY / row[1] for (size, n), row in cases]
    return [Ours(end(part)) for part in (ratios[3:], ratios[:3]) for end in (min, max)]


def llama_plan(search: Search, machine: Machine, name: str, n: int) -> planner.Plan:
    """bf16 on A100s, FP8 on others; the state of 70B in 16 bits where 32 do not fit."""
    software = TRAIN if machine is A100 else FP8
    if machine is not A100 and name == "70b" and n * machine.memory < 2e12:
        software = dataclasses.replace(FP8, optimizer_state=STATE_IN_16_BITS)
    return search.best(machine, software, LLAMA[name], n, LLAMA_BATCH)


def llama_speeds(search: Search) -> list[Ours]:
    found = []
    for machine, gpus in LLAMA_GPUS.items():
        for name, n in zip(LLAMA, gpus):
            plan = llama_plan(search, machine, name, n)
            small = (machine, name) == (H200, "70b")
            note = "`--optimizer-state bf16`, " * small + described(plan)
            found.append(Ours(tokens_per_second(plan, LLAMA[name]), note))
    return found


def h100_speeds() -> list[Ours]:
    """Under NeMo's layouts, with its distributed optimizer (stage 1); then the FLOPs of a token,
    which NeMo counts as 6N + 12Lhs with N = L (2h² + 2h² kv/a + 3 h ffn) + V h."""
    found = []
    for name, (t, p, v, b, B, n) in H100_LAYOUTS.items():
        model = preset(name, dropout=0.0)
        sizes = dict(tp=t, pp=p, dp=n // t // p, virtual_stages=v, micro_batch_size=b)
        layout = Layout(**sizes, global_batch_size=B, sequence_parallel=t > 1, zero_stage=1)
        plan = plan_of(H100, FP8, model, layout)
        found.append(Ours(tokens_per_second(plan, model), described(plan)))
    c = LLAMA["7b"]
    L, h, kv = c.num_layers, c.hidden_size, c.num_kv_heads / c.num_heads
    matrices = L * (2 * h * h + 2 * h * h * kv + 3 * h * c.ffn_hidden_size)
    formula = 6 * (matrices + c.vocab_size * h) + 12 * L * h * c.seq_length
    return [*found, Ours(flops_per_token(c), "Llama-2 7B", formula)]


def fsdp_speed(search: Search, n: int) -> Ours:
    """Speed of FSDP (ZeRO stage 3 and nothing else) over that of tensor and pipeline parallelism,
    whose parameters are not sharded over data-parallel ranks, of GPT-20B on n H100s."""
    case = H100, TRAIN, preset("gpt3-20b", dropout=0.0), n, 256
    alone = search.best(*case, keep=lambda x: x.tp == x.pp == 1 and x.zero_stage == 3)
    both = search.best(*case, keep=lambda x: x.zero_stage <= 1)
    return Ours(both.seconds / alone.seconds, f"{described(alone)} over {described(both)}")


def fsdp_ratios(search: Search) -> list[Ours]:
    return [fsdp_speed(search, n) for n in (8, 16, 32, 64, 128)]


# --- what was announced ---------------------------------------------------------------------------

GPT_3 = preset("gpt3-175b")
# GPUs of the largest run, and of the run that it is compared with.
SMALL, LARGE = 512, 10_752
MLPERF = preset("gpt3-175b", dropout=0.0)
ONE_T = preset("megatron-1t")
ONE_T_LAYOUT = Layout(tp=8, pp=64, dp=6, global_batch_size=3072, recompute="full")


def best_175b(search: Search) -> list[Ours]:
    plan = search.best(A100, TRAIN, GPT_3, 1024, 1536)
    return [Ours(days(plan, GPT_3), described(plan))]


def days_before() -> list[Ours]:
    """Full recomputation against sequence parallelism with selective recomputation, under the
    layout of table 5 on 1,024 GPUs: days and GPU hours less."""
    model = preset("megatron-175b")
    layout = Layout(tp=8, pp=8, dp=16, virtual_stages=3, global_batch_size=1536)
    before, after = (
        days(plan_of(A100, MEGATRON, model, dataclasses.replace(layout, **fields)), model)
        for fields in (dict(recompute="full"), dict(recompute="selective", sequence_parallel=True))
    )
    note = f"{before:.1f} - {after:.1f} days, layout of table 5, d 16"
    return [Ours(before - after, note), Ours((before - after) * 24 * 1024, note)]


def techniques() -> list[Ours]:
    """Sequence parallelism and selective recomputation beside full recomputation."""
    predicted = [seconds for _, seconds in step_times("table5").values()]
    # Each model has two rows: full, and the new techniques.
    speedups = [full / new for full, new in zip(predicted[::2], predicted[1::2], strict=True)]
    note = "the four models of table 5"
    return [Ours(x, note) for x in (max(speedups), 1 / min(speedups), 1 / max(speedups))]


def scaled(search: Search, n: int) -> planner.Plan:
    """The fastest layout on SMALL H100s in FP8, with as many replicas as n GPUs have; a sequence
    for each GPU is our choice."""
    layout = search.best(H100, FP8, MLPERF, SMALL, SMALL).layout
    sizes = dict(dp=layout.dp * n // SMALL, global_batch_size=n)
    return plan_of(H100, FP8, MLPERF, dataclasses.replace(layout, **sizes))


def many_gpus(search: Search) -> list[Ours]:
    few, many = scaled(search, SMALL), scaled(search, LARGE)
    slow, fast = (tokens_per_second(plan, MLPERF) for plan in (few, many))
    tflops = slow * flops_per_token(MLPERF) / 1e12
    return [Ours(tflops, described(few)), Ours(fast / slow, described(many))]


def one_t() -> list[Ours]:
    """1T on 3,072 A100s; then what interleaving gives, by figure 12."""
    plan = plan_of(A100, SOFTWARE["megatron-2021"], ONE_T, ONE_T_LAYOUT)
    rate = tokens_per_second(plan, ONE_T) * with_recomputation(ONE_T)
    seconds = {name: predicted for name, (_, predicted) in step_times("fig12").items()}
    gains = [seconds[f"B {B}, v 1"] / seconds[f"B {B}, v 4"] for B in (12, 24, 36, 48, 60)]
    note = "175B, p 12, v 4, median of five batches of figure 12"
    return [
        Ours(rate * plan.layout.ranks / 1e15, described(plan)),
        Ours(100 * rate / A100.peak, described(plan)),
        Ours(statistics.median(gains), note),
    ]


def llama_by_gpu(search: Search) -> list[Ours]:
    """Times as fast on H200s in FP8 as on A100s in bf16; then 70B on a node of H200s."""
    found = []
    for name, n, before in zip(LLAMA, LLAMA_GPUS[H200], LLAMA_GPUS[A100]):
        plans = llama_plan(search, H200, name, n), llama_plan(search, A100, name, before)
        each, slow = (tokens_per_second(plan, LLAMA[name]) for plan in plans)
        found.append(Ours(each / slow, f"FP8 on {n} H200, bf16 on {before} A100"))
    tflops = each * flops_per_token(LLAMA["70b"]) / 1e12
    of_node = tflops, 8 * each, 1e9 / (8 * each) / 3600
    return [*found, *(Ours(x, "FP8, state in 16 bits") for x in of_node)]


def optimizer_state() -> list[Ours]:
    state = saved("loss_state")["rows"]
    before, after = (state[kind]["bytes_per_parameter"]["median"] for kind in ("fp32", "bf16"))
    return [Ours(before / after, f"{before:g} bytes of weights and state over {after:g}")]


def falcon() -> list[Ours]:
    """Falcon 180B on one H200: the published batch; its lengths stand in no text."""
    one = Serving(H200, ENGINES["graphs"], preset("falcon-180b"), weights="int4")
    batch, tokens = 256, 128
    size = sum(one.bytes(batch, 2 * tokens, 2048).values()) / 2**30
    note = f"{batch} prompts of {tokens} tokens, as many of each answer, {size:.0f} GiB"
    return [Ours(batch * tokens / one.request(batch, tokens, tokens), note)]


# --- claims beside ours ---------------------------------------------------------------------------

# A part of reproduction.toml has the name of the function that computes its numbers.
MEGATRON_2021 = table_1, megatron_formulas, bubbles, collectives, days_of_2021
MEGATRON_2022 = layer_bytes, first_stage, outside_and_state, layer_times, table_5
OF_ZERO = zero, zero_bubble
NEMO = peaks, megatron_core, rule_of_thumb, encoders, h100_speeds
ANNOUNCED = days_before, techniques, one_t, falcon, optimizer_state
COUNTED = {f.__name__: f for f in (*MEGATRON_2021, *MEGATRON_2022, *OF_ZERO, *NEMO, *ANNOUNCED)}
SEARCHED = {
    f.__name__: f
    for f in (nemo_days, llama_speeds, fsdp_ratios, best_175b, many_gpus, llama_by_gpu)
}


def rows_of(part: str) -> list[list]:
    """The claims of a part as they stand in reproduction.toml."""
    (section,) = (s for s in CLAIMS["sections"] if part in s["parts"])
    return section["parts"][part]["claims"]


def claims_of(part: str, found: list[Ours]) -> list[dict]:
    """Rows of the page: each claim beside ours."""
    rows = []
    for (claim, published, *more), ours in zip(rows_of(part), found, strict=True):
        how, why = [*more, *("counted", "")[len(more) :]]
        published = ours.published if published == "formula" else published
        row = {"part": part, "claim": claim, "published": published, "ours": ours.value}
        row |= {"how": how, "note": ours.note, "ratio": ours.value / published}
        rows.append(row | {"why": CLAIMS["reasons"][why] if why else ""})
    return rows


def measure(toy: bool) -> dict:
    search = Search(toy)
    functions = COUNTED | {name: partial(f, search) for name, f in SEARCHED.items()}
    sections = []
    for section in CLAIMS["sections"]:
        claims = [c for part in section["parts"] for c in claims_of(part, functions[part]())]
        named = {key: section[key] for key in ("title", "source")}
        sections.append(named | {"commands": dict(section["commands"]), "claims": claims})
        print(f"{section['title']}: {len(claims)} claims", flush=True)
    return {"toy": toy, "sections": sections, "weak_scaling": weak_scaling(search)}


# --- the page -------------------------------------------------------------------------------------


def is_off(claim: dict) -> bool:
    return abs(claim["ratio"] - 1) > OFF


def number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def row_of(claim: dict) -> str:
    ratio = f"{claim['ratio']:.2f}"
    how = ", ".join(filter(None, (claim["how"], claim["note"])))
    cells = claim["claim"], number(claim["published"]), number(claim["ours"]), how
    return f"| {' | '.join(cells)} | {f'**{ratio}**' if is_off(claim) else ratio} |"


def reasons(claims: list[dict]) -> list[str]:
    """A line for each reason, with the claims that it is about."""
    found: dict[str, list[str]] = {}
    for claim in filter(is_off, claims):
        found.setdefault(claim["why"], []).append(f"{claim['claim']} ({claim['ratio']:.2f})")
    return [f"- *{'; '.join(names)}*: {why}" for why, names in found.items()]


def table_of(section: dict) -> list[str]:
    commands = "; ".join(f"{how}: `{command}`" for how, command in section["commands"].items())
    lines = [f"## {section['title']}", "", f"Source: {section['source']}."]
    lines += ["", f"Commands: {commands}."]
    lines += ["", "| claim | published | ours | how | ratio |", "|---|---|---|---|---|"]
    lines += map(row_of, section["claims"])
    because = reasons(section["claims"])
    return lines + (["", *because] if because else [])


def summary(sections: list[dict]) -> list[str]:
    """How many claims of each section are within 10%, and how many are off."""
    rows = {}
    for section in sections:
        anchor = section["title"].lower().replace(",", "").replace(" ", "-")
        rows[f"[{section['title']}](#{anchor})"] = section["claims"]
    rows["all"] = [claim for claims in rows.values() for claim in claims]
    lines = ["| source | claims | within 10% | off |", "|---|---|---|---|"]
    for name, claims in rows.items():
        off = sum(map(is_off, claims))
        lines.append(f"| {name} | {len(claims)} | {len(claims) - off} | {off} |")
    return lines


def page(text: str, results: dict) -> str:
    """The page with the tables of these results. text: the page as it is."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [summary(results["sections"]), *map(table_of, results["sections"])]
    tables = "\n\n".join("\n".join(lines) for lines in parts)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


# --- figures --------------------------------------------------------------------------------------

# The end of the axis of ratios.
MOST_SHOWN = 1.7
H100_GPUS = (512, 1024, 2048, 3072, 5376, 10_752)


def weak_scaling(search: Search) -> dict[int, float]:
    """{H100s: predicted PFLOP/s}, of which little was published."""
    flops = flops_per_token(MLPERF) / 1e15
    return {n: n * flops * tokens_per_second(scaled(search, n), MLPERF) for n in H100_GPUS}


def draw_ratios(axes, sections: list[dict]) -> None:
    """A row for each section, and a mark for each of its claims: ours over the published number."""
    axes.axvspan(1 - OFF, 1 + OFF, color="#e4e4e4", linewidth=0)
    for y, section in enumerate(sections):
        for off in (False, True):
            ratios = [c["ratio"] for c in section["claims"] if is_off(c) == off]
            axes.plot(ratios, [y] * len(ratios), "o", color=style.SERIES[off], alpha=0.5)
        for ratio in (c["ratio"] for c in section["claims"] if c["ratio"] > MOST_SHOWN):
            style.label(axes, f"{ratio:.0f} →", (MOST_SHOWN, y), offset=(-24, 0))
    style.rows_of(axes, [section["title"] for section in sections])
    axes.set(xlim=(0.6, MOST_SHOWN), xlabel="ours / published; grey: within 10%")


def draw_scaling(axes, results: dict) -> None:
    gpus = [n for _, n in TABLE_1.values()]
    claims = [c for section in results["sections"] for c in section["claims"]]
    of_table, one_t = ([c for c in claims if c["part"] == part] for part in ("table_1", "one_t"))

    def petaflops(key: str) -> list[float]:
        # Of each model of table 1 the second claim is TFLOP/s of a GPU; of 1T the first is PFLOP/s.
        return [n * c[key] / 1000 for n, c in zip(gpus, of_table[1::3])] + [one_t[0][key]]

    a100 = dict(color=style.SERIES[0], label="A100, predicted")
    axes.plot([*gpus, 3072], petaflops("ours"), "s-", **a100)
    axes.plot([*gpus, 3072], petaflops("published"), "o", color="black", label="A100, published")
    h100 = results["weak_scaling"].values()
    axes.plot(H100_GPUS, h100, "s-", color=style.SERIES[1], label="H100, predicted")
    marks = {32: "32", 256: "256", 1024: "1,024", 10752: "10,752"}
    style.ticks(axes, x=marks, y={10: "10", 100: "100", 1000: "1,000", 10000: "10,000"})
    axes.set(xlabel="GPUs", ylabel="PFLOP/s")
    axes.set_title("Weak scaling: 1.7B to 1T on A100s, 175B in FP8 on H100s")
    axes.legend(loc="upper left")


def draw(results: dict, figures: Path) -> None:
    """results: what reproduction.json holds."""
    drawn = {"": (draw_ratios, results["sections"]), "_scaling": (draw_scaling, results)}
    for name, (function, found) in drawn.items():
        figure, axes = style.figure(3.4)
        function(axes, found)
        style.save(figure, figures / f"reproduction{name}.svg")


def main():
    args = report.parse(report.arguments(__doc__))
    results = measure(args.toy)
    print("\n".join(summary(results["sections"])))
    for section in results["sections"]:
        print("\n".join(reasons(section["claims"])))
    report.finish("reproduction", results, args, draw)
    if args.out.resolve() == report.RESULTS:
        PAGE.write_text(page(PAGE.read_text(), results))
        print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
