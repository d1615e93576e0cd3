"""The claims of papers: what this project counts beside what they say. See reproduction.py.

Counted are the trainer's own steps on the meta device (planning/as_rank.py), its schedules and its
functions; some numbers were measured on CPU ranks by other comparisons, and are read from their
JSON.
"""

import json
from functools import lru_cache
from typing import NamedTuple

import torch

import fsdp
import moe
import planner
import recompute
import schedules
import train
from base.model_config import MoEConfig, flops_per_token
from benchmarks import report
from moe import build
from planning import as_rank
from planning import rows as published_rows
from planning.inputs import A100, SOFTWARE, Layout
from planning.layer_time import Rank, layer
from planning.memory import block_parameters
from run import flags
from run.presets import PRESETS
from sharding import num_parameters


class Claim(NamedTuple):
    """A row: what was claimed, and what this project has. how: counted, measured, predicted,
    fitted or not reachable. note: which layout or example. why: one sentence for a ratio that is
    off, or for a number that cannot be reached."""

    claim: str
    published: float
    ours: float | None
    how: str = "counted"
    note: str = ""
    why: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None else self.ours / self.published


def preset(name: str, **fields) -> MoEConfig:
    return MoEConfig(**(PRESETS[name][0] | fields))


@lru_cache
def counted(words: str) -> as_rank.Report:
    """What `train.py --as-rank R --of N ..` finds."""
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


# --- Megatron-LM, 2021 ----------------------------------------------------------------------------

# table 1: parameters in 10⁹, TFLOP/s of each GPU, % of the peak
TABLE_1 = {
    "1.7B": (1.7, 137, 44),
    "3.6B": (3.6, 138, 44),
    "7.5B": (7.5, 142, 46),
    "18B": (18.4, 135, 43),
    "39B": (39.1, 138, 44),
    "76B": (76.1, 140, 45),
}
FITTED_OF_TABLE_1 = ("1.7B", "18B")
OF_64 = "--as-rank 0 --of 64 --model megatron-3.6b --tp 2 --micro-batch-size 16"
OF_64 += " --global-batch-size 512"
OF_PIPELINE = "--as-rank 8 --of 64 --model megatron-175b --tp 8 --pp 8 --micro-batch-size 1"
OF_PIPELINE += " --global-batch-size 64"
# of pipelines in the examples
P, M, V_STAGES = 4, 8, 2


def table_1() -> list[Claim]:
    found = []
    seconds = step_times("table1")
    for name, (billions, tflops, percent) in TABLE_1.items():
        with torch.device("meta"):
            count = num_parameters(build(preset(f"megatron-{name.lower()}")))
        found.append(Claim(f"{name}: parameters, 10⁹", billions, count / 1e9))
        measured, predicted = seconds[name]
        rate = tflops * measured / predicted
        how = "fitted" if name in FITTED_OF_TABLE_1 else "predicted"
        found.append(Claim(f"{name}: TFLOP/s of a GPU", tflops, rate, how))
        found.append(Claim(f"{name}: % of the peak", percent, 100e12 * rate / A100.peak, how))
    return found


def megatron_formulas() -> list[Claim]:
    c = preset("megatron-3.6b")
    L, h, s, V, B, n = c.num_layers, c.hidden_size, c.seq_length, c.vocab_size, 512, 64
    with torch.device("meta"):
        parameters = num_parameters(build(c))
    formula = 12 * L * h * h * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))
    step = 96 * B * s * L * h * h * (1 + s / (6 * h) + V / (16 * L * h))
    layer = 24 * B * s * h * h + 4 * B * s * s * h
    full, plain = counted(f"{OF_64} --recompute full").flops, counted(OF_64).flops
    return [
        Claim("parameters, 12 L h² (1 + 13/12h + (V + s)/12Lh)", formula, parameters, note="3.6B"),
        Claim("FLOPs of a step with full recomputation", step, n * full, note="3.6B, 64 ranks"),
        Claim(
            "forward FLOPs of a layer, 24 B s h² + 4 B s² h",
            layer,
            n * (full - plain) / L,
            note="3.6B, 64 ranks",
        ),
        *bubbles(),
        *collectives(L),
        *days_of_gpt_3(),
    ]


def bubbles() -> list[Claim]:
    """p 4, m 8, v 2; forward and backward take 1 and 2."""
    found = []
    lists = {}
    for name, v, published in (
        ("gpipe", 1, (P - 1) / M),
        ("1f1b", 1, (P - 1) / M),
        ("interleaved", V_STAGES, (P - 1) / (V_STAGES * M)),
    ):
        lists[name] = schedules.lists(name, P, M, v)
        idle = schedules.bubble(schedules.simulate(lists[name], schedules.Cost()))
        note = f"p {P}, m {M}, v {v}"
        found.append(Claim(f"{name}: bubble over the ideal time", published, idle, note=note))
        if name == "1f1b":
            claim = "1f1b: bubble over the whole time, (p - 1)/(m + p - 1)"
            found.append(Claim(claim, (P - 1) / (M + P - 1), idle / (1 + idle), note=note))
    for name, most in (("gpipe", M), ("1f1b", P)):
        held = max(schedules.in_flight(lists[name]))
        found.append(Claim(f"{name}: micro-batches in flight", most, held, note=f"p {P}, m {M}"))
    return found


def collectives(L: int) -> list[Claim]:
    """All-reduces of a layer, without those of the ends; messages of a stage in the middle."""

    def calls(words: str, kind: str, group: str) -> int:
        found = counted(words).collectives
        largest = max(c.bytes for c in found if (c.kind, c.group) == (kind, group))
        return sum(c.count for c in found if (c.kind, c.group, c.bytes) == (kind, group, largest))

    plain = calls(OF_64, "all-reduce", "tp")
    again = calls(f"{OF_64} --recompute full", "all-reduce", "tp")
    # full recomputation repeats those of forward
    forward = (again - plain) / L
    sends = [calls(f"{OF_PIPELINE}{v}", "send", "pp") for v in ("", " --virtual-stages 3")]
    return [
        Claim("all-reduces of a layer, forward", 2, forward, note="3.6B, t 2"),
        Claim("all-reduces of a layer, backward", 2, plain // L - forward, note="3.6B, t 2"),
        Claim("interleaving: times the messages, v", 3, sends[1] / sends[0], note="175B, p 8, v 3"),
    ]


def days_of_gpt_3() -> list[Claim]:
    tokens, parameters, gpus, rate = 300e9, 175e9, 1024, 140e12
    short = 8 * tokens * parameters / (gpus * rate) / 86400
    c = preset("megatron-175b")
    head = 6 * c.vocab_size * c.hidden_size
    long = ((flops_per_token(c) - head) * 4 / 3 + head) * tokens / (gpus * rate) / 86400
    claim = "175B: days for 300 billion tokens, 8TP/nX"
    return [
        Claim(claim, 34, short, note="1,024 GPUs of 140 TFLOP/s"),
        Claim("8TP/nX over the formula of FLOPs", 0.98, short / long, note="175B"),
    ]


# --- Korthikanti et al., 2022 ---------------------------------------------------------------------

# milliseconds of a 22B layer, table 4: forward, backward; sequence parallelism, recompute
TABLE_4 = {
    "none": (7.7, 11.9, False, "none"),
    "sequence": (7.2, 11.8, True, "none"),
    "full": (7.7, 19.5, False, "full"),
    "selective": (7.7, 13.2, False, "selective"),
    "selective + sequence": (7.2, 13.1, True, "selective"),
}
OVERHEADS = {"full": 1.39, "selective": 1.07, "selective + sequence": 1.04}
# GiB of the first stage: tensor; tensor + sequence + selective
FIRST_STAGE = {
    "22B": (59.25, 9.5625, "--of 8 --model megatron-22b --tp 8 --micro-batch-size 4"),
    "175B": (66.84375, 12.3515625, "--of 64 --model megatron-175b --tp 8 --pp 8"),
}
BATCHES = {"22B": " --global-batch-size 4", "175B": " --virtual-stages 3 --global-batch-size 64"}
BOTH = " --sequence-parallel --recompute selective"
STATE_GIB = 45.5625
# % of the peak, by model FLOPs and by all
UTILISATION = {"22B": (41.5, 43.7), "175B": (51.4, 52.8)}


def activation_formulas() -> list[Claim]:
    """Table 2 beside measured bytes; the first stage by the trainer's own step."""
    found = []
    largest = {r["row"]: r for r in saved("activation_memory")["layers"] if r["layer"] == "as 175B"}
    for name, row in largest.items():
        note = f"h 1024, a 8, t {row['t']}"
        claim = f"bytes of a layer, {name}"
        found.append(Claim(claim, row["formula"], row["measured"], "measured", note))
    held = max(schedules.in_flight(schedules.lists("interleaved", 8, 64, 3)))
    claim = "interleaved: layers held by the first stage, over L"
    formula = recompute.first_stage_layers(96, 8, 3) / 96
    found.append(Claim(claim, formula, held / (8 * 3), note="p 8, v 3"))
    for name, (tensor, both, words) in FIRST_STAGE.items():
        words = f"--as-rank 0 {words}{BATCHES[name]}"
        if name == "175B":
            words += " --micro-batch-size 1"
        for what, gib, more in (
            ("tensor", tensor, ""),
            ("tensor + sequence + selective", both, BOTH),
        ):
            ours = counted(words + more).activations / 2**30
            claim = f"{name}: GiB of activations on the first stage, {what}"
            found.append(Claim(claim, gib, ours, note="with the ends"))
    return found + outside_and_state()


def outside_and_state() -> list[Claim]:
    c = preset("megatron-22b")
    s, h, a, L, V, b, t = 2048, c.hidden_size, c.num_heads, c.num_layers, c.vocab_size, 4, 8
    layers = L * recompute.layer_bytes(s, b, h, a, t, sequence_parallel=True)
    share = recompute.outside_layers_bytes(s, b, h, V, t) / layers
    found = [
        Claim(
            "22B: % of the activations outside the layers",
            0.01,
            100 * share,
            why="The paper's own formula gives 0.57%; its text says less than 0.01%.",
        )
    ]
    for name, layout in (("22B", Layout(tp=8)), ("175B", Layout(tp=8, pp=8))):
        c = preset(f"megatron-{name.lower()}")
        numbers = sum(block_parameters(c, layout)[:2]) * c.num_layers / layout.pp
        gib = sum(fsdp.bytes_per_parameter(0, 1)) * numbers / 2**30
        claim = f"{name}: GiB of weights, gradients and optimizer state"
        found.append(Claim(claim, STATE_GIB, gib, note="matrices of the layers"))
    return found


def layer_times() -> list[Claim]:
    """Table 4, and Table 4's overheads: of forward and backward together."""
    found, totals = [], {}
    software = SOFTWARE["megatron-2022"]
    for name, (forward, backward, sequence, again) in TABLE_4.items():
        sizes = dict(tp=8, micro_batch_size=4, global_batch_size=4)
        layout = Layout(**sizes, sequence_parallel=sequence, recompute=again)
        passes = layer(Rank(A100, software, preset("megatron-22b"), layout))
        ours = [1000 * sum(seconds) for seconds in passes[:2]]
        totals[name] = sum(ours)
        for what, published, value in zip(("forward", "backward"), (forward, backward), ours):
            claim = f"22B layer, {name}: ms {what}"
            found.append(Claim(claim, published, value, "predicted"))
    for name, published in OVERHEADS.items():
        claim = f"22B layer, {name}: both passes over none"
        found.append(Claim(claim, published, totals[name] / totals["none"], "predicted"))
    return found


def table_5() -> list[Claim]:
    """Seconds of a step; then model and hardware FLOPs over the peak, of the predicted seconds."""
    found = []
    seconds = step_times("table5")
    for name, (published, predicted) in seconds.items():
        found.append(Claim(f"{name}: seconds of a step", published, predicted, "predicted"))
    for name, percents in UTILISATION.items():
        B, n = {"22B": (4, 8), "175B": (64, 64)}[name]
        peak = seconds[f"{name} sel+sp"][1] * n * A100.peak
        flops = step_flops(preset(f"megatron-{name.lower()}"), B)
        for what, published, of_step in zip(("MFU", "HFU"), percents, flops):
            claim = f"{name} sel+sp: {what} by the paper's formula, %"
            found.append(Claim(claim, published, 100 * of_step / peak, "predicted"))
    words = f"--as-rank 0 {FIRST_STAGE['22B'][-1]}{BATCHES['22B']}"
    ours = [8 * counted(f"{words}{more}").flops for more in ("", BOTH)]
    for what, formula, flops in zip(
        ("model FLOPs of a step", "hardware FLOPs of a step, selective"),
        step_flops(preset("megatron-22b"), 4),
        ours,
    ):
        found.append(Claim(f"22B: {what}", formula, flops, note="8 ranks"))
    return found


def step_flops(c: MoEConfig, B: int) -> tuple[float, float]:
    """(model FLOPs, hardware FLOPs with selective recomputation) by the paper's formulas: 72 B L s
    h² (1 + s/6h + V/12hL), and s/3h in the place of s/6h."""
    L, h, s, V = c.num_layers, c.hidden_size, c.seq_length, c.vocab_size
    each = 72 * B * L * s * h * h
    head = V / (12 * h * L)
    return each * (1 + s / (6 * h) + head), each * (1 + s / (3 * h) + head)


# --- ZeRO, zero bubble, Sinkhorn, prompts ---------------------------------------------------------

# GB of 7.5 billion parameters on 64 devices; elements sent over Ψ, of one micro-batch
ZERO = {0: (120, 2), 1: (31.4, 2), 2: (16.6, 2), 3: (1.9, 3)}


def zero() -> list[Claim]:
    found = []
    for stage, (gb, _) in ZERO.items():
        # the paper's gradients have 2 bytes
        each = sum(fsdp.bytes_per_parameter(stage, 64, gradient=2))
        found.append(Claim(f"stage {stage}: GB of 7.5B on 64 devices", gb, 7.5 * each))
    for stage, (_, elements) in ZERO.items():
        claim = f"stage {stage}: elements sent over Ψ (N - 1)/N, m 1"
        found.append(Claim(claim, elements, fsdp.elements_sent(stage, 1)))
    results = saved("zero_memory")
    m = results["micro_batches"]
    for row in results["rows"]:
        if row["state"] == "fp32":
            elements = {2: m + 1, 3: 3 * m}.get(row["stage"], 2)
            claim = f"stage {row['stage']}: elements sent over Ψ (N - 1)/N, m {m}"
            note = f"{results['ranks']} CPU ranks"
            found.append(Claim(claim, elements, row["sent"], "measured", note))
    return found


def zero_bubble() -> list[Claim]:
    """Seconds in which the busiest rank waits, with T_F 1, T_B 1.1, T_W 0.8."""
    cost = schedules.Cost(1.0, 1.1, 0.8)
    f, b, w = cost.forward, cost.input, cost.weight
    found, held = [], {}
    for name, formula, seconds in (
        ("1f1b", "(p - 1)(T_F + T_B + T_W)", (P - 1) * (f + b + w)),
        ("zb-h1", "(p - 1)(T_F + T_B - T_W)", (P - 1) * (f + b - w)),
    ):
        lists = schedules.lists(name, P, M)
        held[name] = max(schedules.in_flight(lists))
        idle = schedules.bubble(schedules.simulate(lists, cost)) * M * (f + b + w)
        found.append(Claim(f"{name}: bubble, {formula}", seconds, idle, note=f"p {P}, m {M}"))
    claim = "zb-h1: micro-batches in flight, those of 1f1b"
    return [*found, Claim(claim, held["1f1b"], held["zb-h1"], note=f"p {P}, m {M}")]


# four tokens, two experts
LOGITS = [[2.0, 1.0], [2.2, 1.0], [1.5, 1.0], [3.0, 0.0]]
GATES = (0.73106, 0.73106, 0.73106, 0.95257)
CHOSEN = (1, 1, 1, 0)


def sinkhorn() -> list[Claim]:
    """The gate is the sigmoid of the raw logit of the expert that the plan chooses."""
    logits = torch.tensor(LOGITS)
    plan = moe.sinkhorn(logits)
    chosen = plan.argmax(1)
    gates = logits.gather(1, chosen[:, None]).sigmoid().flatten().tolist()
    needed = 1
    while not torch.equal(moe.sinkhorn(logits, max_iterations=needed), plan):
        needed += 1
    found = [Claim("iterations until the error of the loads is at most 1e-4", 6, needed)]
    equal = sum(x == y for x, y in zip(chosen.tolist(), CHOSEN))
    found.append(Claim("tokens with the published expert, of 1, 1, 1, 0", 4, equal))
    for token, (published, gate) in enumerate(zip(GATES, gates)):
        found.append(Claim(f"gate of token {token}", published, gate))
    return found


def prompts() -> list[Claim]:
    results = saved("prompt_memory")["results"]["prompt-tuning"]
    claim = "prompt tuning: parameters that learn, h 768, 2 tasks of 100 tokens"
    return [Claim(claim, 153_600, results["parameters"], "measured")]
