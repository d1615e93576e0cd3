"""One training step on one GPU in bf16, beside published figures: tokens/s, MFU and peak memory.

    python comparisons/training_step.py [--models llama2-7b] [--cases "kernels auto"] [--steps 10]

The cases are fused kernels on and off, torch.compile on and off, each kind of recomputation, and
FP8 (fp8.py) by each recipe, with fused kernels, compiled or not. Beside these stand the FP8 of
torchao, for the model without biases, and a recipe like nanochat's (fp8_peers.py): without fused
kernels, compiled. In FP8 are all layers but the first and the last. The models:

    model                 shape                                         micro-batch   state
    gpt2-124m             L 12  h 768   a 12  s 1024  V 50304  GPT      32 x 8        float32
    gpt-1.3b              L 24  h 2048  a 16  s 2048  V 50304  GPT      4 x 8         float32
    llama2-7b             L 32  h 4096  a 32  s 4096  V 32000  Llama    1 x 8         bf16
    llama2-7b-16-layers   L 16  the same                                1 x 8         bf16

The whole Llama-2 7B is for GPUs of more than 80 GB: weights and state (bf16: 8 bytes a parameter),
gradients in float32 and what a micro-batch keeps are 102 GB, by planning/memory.py; half of its
layers need 56. The last column of the table is what is predicted. To FP8's cases it adds a byte for
each weight; of the compiler and of fused kernels it knows nothing.

32 x 8 is 8 micro-batches of 32 sequences. The vocabulary of 50257 is padded to 50304, so that a row
of logits is a whole number of vectors. Selective recomputation is of explicit attention; the other
cases have fused attention. The small model fits without recomputation.

A step is one of train.Trainer on random tokens, without dropout, the optimizer's step included.
Each case runs in a process of its own, so that peaks of memory do not mix and a case that does not
fit costs one line. There initial weights are drawn on the GPU, because drawing those of 7 billion
parameters on a CPU takes a minute. After 3 steps of warm-up the median, minimum and maximum of
--steps steps count. MFU is model FLOPs (model_config.py) / time / the device's dense bf16 peak,
also of FP8. If that peak is not known, it is that of a large matrix multiplication measured here,
and the output says so. The losses of a model's first steps should agree in all cases, to the
precision of bf16 or FP8.

training_step.json is written after each case, and cases that it has already stay: a case measured
again replaces the old one. The figure, figures/training_step.svg, shows all of the file's cases.

--toy runs the same at toy size on any device: one case of each model.
"""

import dataclasses
import itertools
import json
import math
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import report
import style
import torch
from fp8_peers import PEERS, convert
from report import spread, timed
from steps import Steps

import fp8
import kernels
from base import cpu
from base.world import why_no_gpu
from gpt import GPT
from model_config import flops_per_token
from planning.inputs import TRAIN
from planning.memory import memory
from planning.plan import layout_of
from proof.kinds import config_of
from run.metrics import peak_flops, peak_memory
from run.task import Task

BF16 = dict(precision="bf16", dropout=0.0, warmup_steps=0)
GPT2 = dict(model="gpt2", vocab_size=50304)
GPT13 = GPT2 | dict(num_layers=24, hidden_size=2048, num_heads=16, seq_length=2048)
LLAMA = dict(model="llama2-7b", optimizer_state="bf16", micro_batch_size=1, global_batch_size=8)
CASES = {
    "gpt2-124m": GPT2 | dict(micro_batch_size=32, global_batch_size=256),
    "gpt-1.3b": GPT13 | dict(micro_batch_size=4, global_batch_size=32),
    "llama2-7b": LLAMA,
    "llama2-7b-16-layers": LLAMA | dict(num_layers=16),
}
TOY = dict(num_layers=2, hidden_size=64, num_heads=4, seq_length=64, vocab_size=512)
TOY |= dict(micro_batch_size=2, global_batch_size=4)
RECOMPUTE = {
    "": {},
    ", selective recompute": dict(recompute="selective", attention="explicit"),
    ", full recompute": dict(recompute="full"),
}
# (model, tokens/s of one GPU, what it is and what differs)
PUBLISHED = [
    ("gpt2-124m", 475_000, "llm.c, GPT-2 124M, bf16, H100, one of 8"),
    ("llama2-7b", 16_913, "NeMo, Llama-2 7B, FP8 (here bf16), H200"),
    ("llama2-7b", 16_934, "NeMo, Llama-2 7B, FP8 (here bf16), H100, one of 8"),
]
# Steps that are not counted.
WARMUP = 3
# (kernels, compile): a colour's name
COLOURS = {
    ("off", False): "PyTorch",
    ("off", True): "compiled",
    ("auto", False): "fused",
    ("auto", True): "fused and compiled",
}


def cases(model: str) -> dict[str, dict]:
    """{name: fields of train.Config}: kernels x torch.compile x recomputation, which gpt2-124m does
    not need; then FP8. A field `peer` is whose FP8 it is, if not that of fp8.py."""
    named = {}
    flags = "off", "auto"
    for recompute, flag, compiled in itertools.product(RECOMPUTE, flags, (False, True)):
        if model != "gpt2-124m" or not recompute:
            name = f"kernels {flag}" + compiled * ", compile" + recompute
            named[name] = dict(kernels=flag, compile=compiled, **RECOMPUTE[recompute])
    for recipe, compiled in itertools.product(("current", "delayed", "block"), (False, True)):
        name = f"kernels auto, fp8 {recipe}" + compiled * ", compile"
        named[name] = dict(kernels="auto", compile=compiled, fp8=recipe)
    for peer in PEERS:
        if "llama" in model or not peer.startswith("torchao"):
            named[f"{peer}, compile"] = dict(kernels="off", compile=True, peer=peer)
    return named


class WithPeer(Task):
    """Trains in the FP8 of others: peer is one of fp8_peers.PEERS."""

    def __init__(self, peer: str):
        super().__init__()
        self.peer = peer

    def after_model_parallel(self, stage: GPT) -> None:
        super().after_model_parallel(stage)
        layers = fp8.fp8_layers(self.model_config.num_layers, self.config.fp8_skip)
        convert(stage, self.peer, layers)


def draw_on_the_gpu() -> None:
    """Have initial weights of this process drawn there, from the same seeds: other values, from
    the normal distribution of gpt.py, but for the smaller one before residual connections."""
    on_the_cpu = GPT.init_parameter

    def init_parameter(model, name: str, shape, generator: torch.Generator) -> torch.Tensor:
        if name.endswith(("norm.weight", "bias")):
            return on_the_cpu(model, name, shape, generator)
        seeded = torch.Generator("cuda").manual_seed(generator.initial_seed())
        return torch.randn(shape, generator=seeded, device="cuda").mul_(0.02)

    GPT.init_parameter = init_parameter


def run_case(fields: dict, counted: int) -> dict:
    """Train in this process.

    Returns tokens_per_second of each counted step, losses of the warm-up steps, peak_memory_bytes,
    flops_per_token, and why the kernels did not run: "off", a reason, or "".
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        cpu.set_up()
    fields = dict(fields)
    peer = fields.pop("peer", None)
    steps = Steps(fields, device=device, task=WithPeer(peer) if peer else None)
    tokens = steps.config.global_batch_size * steps.model_config.seq_length
    losses = []
    rates = []
    for number in range(1, WARMUP + counted + 1):
        seconds = timed(lambda number=number: losses.append(steps.step(number)))
        rates.append(tokens / seconds)
    return {
        "tokens_per_second": rates[WARMUP:],
        "losses": losses[:WARMUP],
        "peak_memory_bytes": peak_memory(device),
        "flops_per_token": flops_per_token(steps.model_config),
        "kernels_refused": steps.trainer.kernels_refused,
    }


def in_process(fields: dict, steps: int, seconds: float | None = None) -> dict | None:
    """run_case in a process of its own; {"error": a few words} if it failed, None if it was
    stopped after so many seconds."""
    command = [sys.executable, __file__, "--steps", str(steps), "--fields", json.dumps(fields)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if "out of memory" in done.stderr.lower():
        return {"error": "out of memory"}
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": lines[-1][:160] if lines else f"exit status {done.returncode}"}


def peak(toy: bool) -> tuple[float, str]:
    """(the FLOP/s that are an MFU of 100%, where that number comes from)

    toy: a small multiplication, because one of the usual size can take minutes on a CPU in bf16.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if known := peak_flops(device):
        name = torch.cuda.get_device_name()
        return known, f"{name}'s dense bf16 peak, {known / 1e12:.0f} TFLOP/s"
    measured = report.matmul_flops(torch.bfloat16, device, n=256 if toy else 2048)
    return measured, f"a bf16 matrix multiplication measured here, {measured / 1e12:.2f} TFLOP/s"


def predicted_bytes(model: str, fields: dict) -> float:
    """What a step takes of the GPU's memory, by the planner's formulas. fields: of a case."""
    fields = {name: value for name, value in fields.items() if name != "peer"}
    config = config_of(BF16 | CASES[model] | fields)
    # an fp32 master and two moments, or their 16 bits
    state = 6 if config.optimizer_state == "bf16" else 12
    software = dataclasses.replace(TRAIN, optimizer_state=state)
    parts = memory(config.model_config(), layout_of(config, 1), software)
    # FP8 holds the weights in bytes too, for a step
    in_bytes = parts["parameters"] / software.weight if config.fp8 != "off" else 0
    return sum(parts.values()) + in_bytes


def published(model: str) -> list[tuple[int, str]]:
    """(tokens/s, what it is) of the published figures of a model; of half its layers, the tokens/s
    of as many FLOP/s."""
    whole = model.removesuffix("-16-layers")
    found = [(rate, name) for of_model, rate, name in PUBLISHED if of_model == whole]
    if whole == model:
        return found
    flops = [flops_per_token(config_of(CASES[name]).model_config()) for name in (whole, model)]
    more = flops[0] / flops[1]
    return [(round(more * rate), f"{name}; its FLOP/s in 16 layers") for rate, name in found]


def draw_model(axes, model: str, rows: dict) -> None:
    """A bar for each case, with the numbers beside it, or why there is none."""
    for y, row in enumerate(rows.values()):
        if "error" in row:
            style.label(axes, row["error"][:60], (0, y))
            continue
        rate = row["tokens_per_second"]
        colour = style.COLOURS[COLOURS[row["kernels"], row["compile"]]]
        memory = row["peak_memory_bytes"] / 2**30
        text = f"{rate['median']:,.0f}   MFU {row['mfu']:.1%}   {memory:.1f} GiB"
        style.bar(axes, y, rate, text, height=0.75, color=colour)
    title = [model]
    for line, (rate, name) in zip(("dashed", "dotted"), published(model)):
        axes.axvline(rate, color="black", linewidth=1, linestyle=line)
        title.append(f"{line}: {rate:,}, {name}")
    style.rows_of(axes, list(rows))
    axes.set_title("\n".join(title))
    axes.margins(x=0.4)
    # also where no case has a bar
    axes.set_xlim(left=0)


def draw(results: dict, figures: Path) -> None:
    """results: what training_step.json holds."""
    models = in_order(results["results"])
    heights = [len(rows) + 1.5 for rows in models.values()]
    size = 1.3 + 0.3 * sum(heights)
    figure, panels = style.figure(size, len(models), height_ratios=heights, squeeze=False)
    for axes, (model, rows) in zip(panels[:, 0], models.items()):
        draw_model(axes, model, rows)
    panels[-1, 0].set_xlabel("tokens/s of one device")
    figure.suptitle(f"A training step; MFU of {results['peak']}")
    style.save(figure, figures / "training_step.svg")


def shown(row: dict | None) -> dict:
    """The columns of a case, or why there are none."""
    if row is None or "error" in row:
        return {"tokens/s": row["error"] if row else "no time left", "MFU": "", "GiB": ""}
    memory = row["peak_memory_bytes"] / 2**30
    return {"tokens/s": row["tokens_per_second"], "MFU": f"{row['mfu']:.1%}", "GiB": memory}


def measure(model: str, name: str, args, flops: float) -> dict | None:
    """The row of one case, None if there was no time left. flops: FLOP/s of an MFU of 100%."""
    fields = cases(model)[name]
    given = BF16 | CASES[model] | fields
    if args.toy:
        given |= TOY | (dict(ffn_hidden_size=176) if "llama" in model else {})
    left = args.deadline - time.monotonic()
    if left <= 0:
        return None
    if args.toy and model != next(iter(CASES)):
        # Processes start slowly, so only one model tests that they do.
        row = run_case(given, args.steps)
    else:
        row = in_process(given, args.steps, left if math.isfinite(left) else None)
    if row is None:
        return None
    row |= {"kernels": fields["kernels"], "compile": fields["compile"]}
    row |= {"date": date.today().isoformat()}
    if "error" not in row:
        row["tokens_per_second"] = spread(row["tokens_per_second"])
        row["mfu"] = row["tokens_per_second"]["median"] * row["flops_per_token"] / flops
    return row


def print_losses(model: str, rows: dict[str, dict]) -> None:
    """How far the losses of the first steps differ between the cases of a model."""
    losses = [row["losses"] for row in rows.values() if "error" not in row]
    if losses:
        first = losses[0]
        largest = max(abs(a / b - 1) for case in losses for a, b in zip(case, first))
        words = f"losses of the first {WARMUP} steps differ by at most {largest:.1e}"
        print(f"{model}: {words} between {len(losses)} cases")


def run(args, results: dict, flops: float, of: str) -> list[dict]:
    """Add the chosen cases to the results, and write them after each. Returns the new rows."""
    pairs = []
    for model in args.models:
        names = [name for name in args.cases if name in cases(model)]
        pairs += [(model, name) for name in names[: 1 if args.toy else None]]
    rows = []
    table = report.Table()
    saved = {"toy": args.toy, "peak_flops": flops, "peak": of, "published": PUBLISHED}
    for model, name in report.missing_first(pairs, results):
        row = measure(model, name, args, flops)
        predicted = {"GiB predicted": predicted_bytes(model, cases(model)[name]) / 2**30}
        table.row({"model": model, "case": name} | shown(row) | predicted)
        if row is not None:
            rows.append(row)
            results.setdefault(model, {})[name] = row
            report.write("training_step", saved | {"results": results}, args)
    return rows


def in_order(results: dict) -> dict[str, dict]:
    """The models and cases in the order in which they stand above."""
    return {
        model: {name: results[model][name] for name in cases(model) if name in results[model]}
        for model in CASES
        if model in results
    }


def main() -> int:
    names = list(dict.fromkeys(name for model in CASES for name in cases(model)))
    parser = report.arguments(__doc__, steps=10)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--cases", nargs="+", metavar="CASE", default=names, choices=names)
    parser.add_argument("--fields", type=json.loads, help="(one case, in a process of its own)")
    report.minutes(parser)
    args = report.parse(parser, steps=2)
    if args.fields:
        if torch.cuda.is_available():
            draw_on_the_gpu()
        print(json.dumps(run_case(args.fields, args.steps)))
        return 0
    results = report.earlier("training_step", parser, args)
    if not torch.cuda.is_available() and not args.toy:
        rule = "no GPU can be used here; --toy runs the same at toy size on any device"
        sys.exit(f"training_step.py: {why_no_gpu()}: {rule}")
    flops, of = peak(args.toy)
    if why_not := kernels.why_not():
        print(f"(fused kernels do not run here, {why_not}: 'kernels auto' is PyTorch's own)")
    print(f"MFU: of {of}\n")
    rows = run(args, results, flops, of)
    results = in_order(results)
    for model in args.models:
        for rate, name in published(model):
            print(f"| {name} | published | {rate:,} | | | |")
    for model, of_model in results.items():
        print_losses(model, of_model)
    if results:
        print(f"written: {args.out / 'training_step.json'}")
        draw(report.saved("training_step", args), args.figures)
    return int(any(row.get("error", "out of memory") != "out of memory" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
