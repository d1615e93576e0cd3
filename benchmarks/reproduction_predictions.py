"""The claims about GPUs: what planner.py predicts beside them. See reproduction.py.

A prediction is that of the fastest layout that fits, or of the published layout where there is one.
Global batches that are not published are our choice: they stand in each row.
"""

import dataclasses
import itertools
from collections.abc import Callable

import planner
from base.model_config import MoEConfig, flops_per_token
from benchmarks.reproduction_papers import Claim, preset
from planning.budget import gpt_of
from planning.inputs import (
    A100,
    H100,
    H200,
    STATE_IN_16_BITS,
    TRAIN,
    Layout,
    Machine,
    Software,
)
from planning.serving import ENGINES, Serving

FP8 = dataclasses.replace(TRAIN, fp8="delayed")
# the state in 16 bits
SMALL_FP8 = dataclasses.replace(FP8, optimizer_state=STATE_IN_16_BITS)
TOKENS = 300e9
DAY = 86400
PREDICTED, UNREACHABLE = "predicted", "not reachable"


# --- searches -------------------------------------------------------------------------------------


def any_layout(layout: Layout) -> bool:
    return True


def sharded_only(layout: Layout) -> bool:
    """FSDP: ZeRO stage 3 and nothing else."""
    return layout.tp == layout.pp == 1 and layout.zero_stage == 3


def tensor_and_pipeline(layout: Layout) -> bool:
    """3D parallelism: parameters are not sharded over data-parallel ranks."""
    return layout.zero_stage <= 1


class Search:
    """Searches, each made once. toy: the first layouts that fit, in place of all."""

    def __init__(self, toy: bool):
        self.toy = toy
        self.found = {}

    def plans(self, *case, keep: Callable = any_layout) -> list[planner.Plan]:
        """Of a case (machine, software, model, GPUs, global batch), the fastest first."""
        if self.toy:
            kept = (plan for plan in planner.fitting(*case) if keep(plan.layout))
            return sorted(itertools.islice(kept, 2), key=lambda plan: plan.seconds)
        if case not in self.found:
            self.found[case] = planner.search(*case)
        return [plan for plan in self.found[case] if keep(plan.layout)]

    def best(self, *case, keep: Callable = any_layout) -> planner.Plan:
        return self.plans(*case, keep=keep)[0]


def tokens_per_second(plan: planner.Plan, model: MoEConfig) -> float:
    """Of each GPU."""
    return plan.layout.global_batch_size * model.seq_length / plan.seconds / plan.layout.ranks


def days(plan: planner.Plan, model: MoEConfig) -> float:
    return TOKENS / (plan.layout.ranks * tokens_per_second(plan, model)) / DAY


def of_layout(
    machine: Machine, software: Software, model: MoEConfig, layout: Layout
) -> planner.Plan:
    """A plan of a layout that was published."""
    return planner.Plan(layout, planner.step_time(machine, software, model, layout), {})


def described(plan: planner.Plan) -> str:
    """`--tp 8 ..`, for the column that says how."""
    return f"`{' '.join(plan.layout.flags())}`"


# --- NeMo's tables --------------------------------------------------------------------------------

GPUS = (800, 480, 160)
# days for 300 billion tokens; sequences of a step: our choice
DAYS = {
    "126M": (0.07, 0.12, 0.37),
    "5B": (0.8, 1.3, 3.9),
    "20B": (3.6, 6.0, 18.1),
    "40B": (6.6, 10.9, 32.8),
    "175B": (28.0, 46.7, 140.0),
}
DAYS_BATCH = 2400
OF_DAYS = {
    "5B": "With 2,400 sequences in a step the sum of gradients is a tenth of it; with 9,600 the"
    " ratio is 1.04.",
    "20B": "NeMo's layout and batch are not published; this is the fastest of all layouts.",
    "40B": "NeMo's layout and batch are not published; this is the fastest of all layouts.",
    "126M": "The planner leaves out the time to launch kernels, which a small model waits for.",
}
# rule of thumb over the published days: least and most, from 5B up and of 126M
RULE = {"from 5B up": (1.37, 1.59), "126M": (0.42, 0.45)}
PARAMETERS = {"126M": 126e6, "5B": 5e9, "20B": 20e9, "40B": 40e9, "175B": 175e9}


def nemo_days(search: Search) -> list[Claim]:
    found = []
    for name, published in DAYS.items():
        model = preset(f"gpt3-{name.lower()}")
        for n, number in zip(GPUS, published):
            plan = search.best(A100, TRAIN, model, n, DAYS_BATCH)
            claim = f"{name} on {n} A100: days for 300 billion tokens"
            why = OF_DAYS.get(name, "")
            ours = days(plan, model)
            found.append(Claim(claim, number, ours, PREDICTED, described(plan), why))
    return found


def rule_of_thumb() -> list[Claim]:
    """8 N tokens at 140 TFLOP/s, over the published days."""
    found = []
    for name, ends in RULE.items():
        models = ["126M"] if name == "126M" else list(DAYS)[1:]
        ratios = []
        for model, n in itertools.product(models, range(len(GPUS))):
            seconds = 8 * PARAMETERS[model] * TOKENS / (140e12 * GPUS[n])
            ratios.append(seconds / DAY / DAYS[model][n])
        for what, published, ours in zip(("least", "most"), ends, (min(ratios), max(ratios))):
            claim = f"rule of thumb over published days, {name}, {what}"
            found.append(Claim(claim, published, ours, "counted"))
    return found


# GB, least and most; layers of the smallest and the largest model, of GPT-3 175B's proportions
INFERENCE = {
    "100M to 3B": ((0.2, 6), (7, 24)),
    "5B to 20B": ((10, 600), (29, 46)),
    "100B to 300B": ((200, 2000), (80, 115)),
    "0.5T to 1T": ((1000, 5000), (136, 172)),
}
# sequences at a time, tokens of a prompt and its answer
OF_INFERENCE = {"least": (1, 60 + 20), "most": (256, 200 + 200)}
OF_SMALLEST = "0.2 GB is 2 bytes for each of 100 million weights; this GPT has 113 million."
OF_WEIGHTS = "6 GB is 2 bytes for each of 3 billion weights; 256 sequences add 30 GB of cache."
OF_MEMORY = (
    "Predicted are weights, cache and activations; what the published number has beside them is not"
    " said, and of 20B it is nearly all of 8 GPUs of 80 GB."
)
OFF_INFERENCE = {"100M to 3B": (OF_SMALLEST, OF_WEIGHTS)}


def inference_memory() -> list[Claim]:
    found = []
    for name, (numbers, layers) in INFERENCE.items():
        reasons = OFF_INFERENCE.get(name, (OF_MEMORY, OF_MEMORY))
        ends = zip(OF_INFERENCE.items(), numbers, layers, reasons)
        for (what, (batch, tokens)), number, depth, why in ends:
            one = Serving(A100, ENGINES["graphs"], gpt_of(depth))
            ours = sum(one.bytes(batch, tokens, budget=2048).values()) / 1e9
            claim = f"{name}: GB of inference in FP16, {what}"
            note = f"{depth} layers of {128 * depth:,}, {batch} x {tokens} tokens"
            found.append(Claim(claim, number, ours, PREDICTED, note, why))
    return found


# --- Llama 2 and GPT-3 by GPU ---------------------------------------------------------------------

LLAMA_BATCH = 128
# tokens/s of each GPU: model, GPUs, published
LLAMA_H200 = (("7b", 8, 16_913), ("13b", 8, 9_432), ("70b", 8, 1_880))
LLAMA_A100 = (("7b", 8, 4_583), ("13b", 8, 2_357), ("70b", 32, 451))
# published layouts: t, p, v, micro-batch, B, GPUs
H100_FP8 = {
    "gpt3-5b": (23_406, (1, 1, 1, 4, 2048, 64)),
    "gpt3-20b": (5_851, (2, 1, 1, 2, 256, 64)),
    "llama2-7b": (16_934, (1, 1, 1, 1, 128, 8)),
    "llama2-13b": (8_715, (1, 4, 10, 1, 128, 16)),
}
OF_LARGE = (
    "Its state in 16 bits and recomputation fit 70B into 8 GPUs here; how NeMo made it fit is not"
    " published."
)
OF_MESSAGES = (
    "Messages are 20 to 30% of the predicted step, at shares of the links fitted to A100s;"
    " 5B and 7B, which have few, are less than 10% off."
)
OF_FP8 = "The share of FP8 was fitted to Llama-2 7B alone."
LLAMA_MODELS = {name: preset(f"llama2-{name}") for name, _, _ in LLAMA_A100}


def llama_plan(search: Search, machine: Machine, name: str, n: int) -> planner.Plan:
    """bf16 on A100s, FP8 on others; the state of 70B in 16 bits where 32 do not fit."""
    model = LLAMA_MODELS[name]
    if machine is A100:
        return search.best(machine, TRAIN, model, n, LLAMA_BATCH)
    software = SMALL_FP8 if name == "70b" and n * machine.memory < 2e12 else FP8
    return search.best(machine, software, model, n, LLAMA_BATCH)


def llama_speeds(search: Search) -> list[Claim]:
    found = []
    for machine, kind, cases in ((H200, "FP8", LLAMA_H200), (A100, "bf16", LLAMA_A100)):
        for name, n, published in cases:
            plan = llama_plan(search, machine, name, n)
            ours = tokens_per_second(plan, LLAMA_MODELS[name])
            claim = (
                f"Llama-2 {name.upper()} on {n} {machine.name.upper()}, {kind}: tokens/s of each"
            )
            # the share of FP8 was fitted to it
            how = "fitted" if (machine, name) == (H200, "7b") else PREDICTED
            words, why = described(plan), ""
            if (machine, name) == (H200, "70b"):
                words, why = f"`--optimizer-state bf16`, {words}", OF_LARGE
            found.append(Claim(claim, published, ours, how, words, why))
    return found


def layout_of(t: int, p: int, v: int, b: int, B: int, n: int) -> Layout:
    """NeMo's, with its distributed optimizer (stage 1)."""
    sizes = dict(tp=t, pp=p, dp=n // t // p, virtual_stages=v, micro_batch_size=b)
    return Layout(**sizes, global_batch_size=B, sequence_parallel=t > 1, zero_stage=1)


def h100_speeds() -> list[Claim]:
    found = []
    for name, (published, sizes) in H100_FP8.items():
        model = preset(name, dropout=0.0)
        plan = of_layout(H100, FP8, model, layout_of(*sizes))
        claim = f"{name} on {sizes[-1]} H100, FP8: tokens/s of each"
        ours = tokens_per_second(plan, model)
        found.append(Claim(claim, published, ours, PREDICTED, described(plan), OF_MESSAGES))
    # NeMo counts 6N + 12Lhs, with N = L (2h² + 2h² kv/a + 3 h ffn) + V h
    c = LLAMA_MODELS["7b"]
    L, h = c.num_layers, c.hidden_size
    matrices = L * (
        2 * h * h + 2 * h * h * c.num_kv_heads / c.num_heads + 3 * h * c.ffn_hidden_size
    )
    formula = 6 * (matrices + c.vocab_size * h) + 12 * L * h * c.seq_length
    claim = "FLOPs of a token, 6N + 12Lhs"
    found.append(Claim(claim, formula, flops_per_token(c), "counted", "Llama-2 7B"))
    return found


FSDP_BATCH = 256
FSDP = {8: 0.78, 16: 0.88, 32: 0.89, 64: 0.86, 128: 0.96}
OF_FSDP = (
    "The 3D layouts of train.py have what NeMo hides: sends between stages, tensor-parallel"
    " collectives of forward, and from stage 1 on the addition to the sums of gradients."
)


def fsdp_speeds(search: Search, gpus) -> dict[int, tuple[planner.Plan, planner.Plan]]:
    """{GPUs: (FSDP, tensor and pipeline parallelism)} of GPT-20B on H100s."""
    model = preset("gpt3-20b", dropout=0.0)
    found = {}
    for n in gpus:
        case = H100, TRAIN, model, n, FSDP_BATCH
        kinds = sharded_only, tensor_and_pipeline
        found[n] = tuple(search.best(*case, keep=keep) for keep in kinds)
    return found


def fsdp_ratios(search: Search) -> list[Claim]:
    found = []
    for n, (fsdp, both) in fsdp_speeds(search, FSDP).items():
        claim = f"GPT-20B on {n} H100: speed of FSDP over tensor + pipeline"
        note = f"{described(fsdp)} over {described(both)}"
        ours = both.seconds / fsdp.seconds
        found.append(Claim(claim, FSDP[n], ours, PREDICTED, note, OF_FSDP))
    return found
