"""A training step on one device, beside peers: on a GPU by gpu.py, on a CPU in turn with them.

    python -m benchmarks.gpu gpt2 llama fp8 medium
    python -m benchmarks.gpu llama --cases "kernels auto, full recompute" "llama2-7b, kernels auto"

    stage        model                 shape                                    batch    state
    gpt2         gpt2-124m             L 12  h 768   a 12  s 1024  V 50304      32 x 8   float32
    llama, fp8   llama2-7b-16-layers   L 16  h 4096  a 32  s 4096  V 32000      1 x 8    bf16
    medium       gpt2-350m             L 24  h 1024  a 16  s 1024  V 50304      16 x 8   float32
                 gpt-1.3b              L 24  h 2048  a 16  s 2048  V 50304      4 x 8    float32

The cases that say most come first: fused kernels on and off, torch.compile on and off. By name
there are more: recomputation, FP8 for each model, and all 32 layers of Llama-2 7B, for GPUs of more
than 80 GB. nanoGPT, a plain Llama, torchao and nanochat are in peers.py. "Sums apart": gradients of
weights are added to their float32 sums after the product, not inside it.

A step is one of train.Trainer on random tokens, without dropout, the optimizer's step included. 32
x 8 is 8 micro-batches of 32 sequences. The vocabulary of 50257 is padded to 50304, so that a row of
logits is a whole number of vectors. In FP8 are all layers but the first and the last. Initial
weights are drawn on the GPU, because a CPU takes a minute for those of 7 billion parameters. MFU is
model FLOPs / time / the device's dense bf16 peak, also of FP8; without a known peak, that of a
matrix multiplication measured here. The losses of a model's first steps should agree in all cases
of this project, to the precision of bf16 or FP8.

    python -m benchmarks.training_step [--threads 2] [--rounds 15] [--toy]
    python -m benchmarks.training_step --other FOLDER       beside another checkout of this project

On a CPU a process of this project and one of each peer take a step in turn, while the others wait:
GPT-2 by nanoGPT (peers.py) and by transformers, which runs once more without the settings of
base/cpu.py. In bf16 ours keeps fp32 masters and moments; the others train in plain bf16, which is
less work, and once more under autocast, which keeps fp32 weights too.
"""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import fp8
import optimizer
import planner
from base import cpu
from base.model_config import flops_per_token
from benchmarks import peers, report
from benchmarks.report import median, spread, timed
from benchmarks.steps import Steps, profile
from course import ranks
from course.training_commands import config_of
from gpt import GPT
from planning.inputs import H100
from planning.memory import memory
from planning.plan import layout_of, software_of
from run.config import DTYPES
from run.metrics import peak_flops, peak_memory
from run.task import Task, WholeModel

BF16 = dict(precision="bf16", dropout=0.0, warmup_steps=0)
GPT2 = dict(model="gpt2", vocab_size=50304)
MEDIUM = GPT2 | dict(num_layers=24, num_heads=16)
LLAMA = dict(model="llama2-7b", optimizer_state="bf16", micro_batch_size=1, global_batch_size=8)
MODELS = {
    "gpt2-124m": GPT2 | dict(micro_batch_size=32, global_batch_size=256),
    "llama2-7b-16-layers": LLAMA | dict(num_layers=16),
    "llama2-7b": LLAMA,
    "gpt2-350m": MEDIUM | dict(hidden_size=1024, micro_batch_size=16, global_batch_size=128),
    "gpt-1.3b": MEDIUM
    | dict(hidden_size=2048, seq_length=2048, micro_batch_size=4, global_batch_size=32),
}
# Blocks of 128 x 128 numbers, and a layer that is neither the first nor the last, for FP8.
TOY = dict(num_layers=3, hidden_size=128, num_heads=4, seq_length=64, vocab_size=512)
TOY |= dict(micro_batch_size=2, global_batch_size=4)
RECOMPUTE = {
    "": {},
    ", selective recompute": dict(recompute="selective", attention="explicit"),
    ", full recompute": dict(recompute="full"),
}
AUTO, OFF = "kernels auto", "kernels off"
# The cases of a stage, those that say most first.
FIRST = {
    "gpt2": [AUTO, "nanoGPT, compile", f"{OFF}, compile", f"{AUTO}, compile", OFF, "nanoGPT"],
    "llama": [AUTO, f"{AUTO}, micro-batch 2", "plain Llama, compile", f"{AUTO}, compile"],
    "fp8": [AUTO, "fp8 current", "fp8 delayed", "fp8 block", "fp8 current, micro-batch 2"],
    "medium": [f"gpt2-350m, {AUTO}", f"gpt-1.3b, {AUTO}"],
}
FIRST["gpt2"] += [f"{AUTO}, sums apart"]
FIRST["llama"] += [f"{AUTO}, sums apart", f"{OFF}, compile", "plain Llama"]
FIRST["fp8"] += ["fp8 current, compile", "torchao tensorwise, compile", "like nanochat, compile"]
FIRST["medium"] += [f"gpt2-350m, {AUTO}, compile", f"gpt-1.3b, {AUTO}, compile"]
# The first is named by its case alone, but in `medium`.
OF_STAGE = {
    "gpt2": ("gpt2-124m",),
    "llama": ("llama2-7b-16-layers", "llama2-7b"),
    "fp8": ("llama2-7b-16-layers", "llama2-7b"),
    "medium": ("gpt2-350m", "gpt-1.3b"),
}
# (model, tokens/s of one GPU, what it is and what differs)
PUBLISHED = [
    ("gpt2-124m", 475_000, "llm.c, GPT-2 124M, bf16, H100, one of 8"),
    ("llama2-7b", 16_913, "NeMo, Llama-2 7B, FP8 (here bf16), H200"),
    ("llama2-7b", 16_934, "NeMo, Llama-2 7B, FP8 (here bf16), H100, one of 8"),
]
# Whose rows say where the time of a step goes.
PROFILED = ("gpt2", AUTO), ("llama", AUTO), ("fp8", "fp8 current")
# Steps that are not counted, and that are.
WARMUP, COUNTED = 2, 3
ONE_STEP = dict(warmup=1, counted=1)


def of_model(model: str) -> dict[str, dict]:
    """{case: fields of train.Config}. Fields that are none of them: `peer`, whose FP8 or whose
    trainer it is, and `apart`."""
    named = {}
    for recompute, flag, compiled in itertools.product(RECOMPUTE, ("auto", "off"), (False, True)):
        name = f"kernels {flag}" + compiled * ", compile" + recompute
        named[name] = dict(kernels=flag, compile=compiled, **RECOMPUTE[recompute])
    auto = dict(kernels="auto")
    size = 2 * MODELS[model]["micro_batch_size"]
    twice = auto | dict(micro_batch_size=size)
    named[f"{AUTO}, sums apart"] = auto | dict(apart=True)
    named[f"{AUTO}, micro-batch {size}"] = twice
    for recipe in ("current", "delayed", "block"):
        named[f"fp8 {recipe}"] = auto | dict(fp8=recipe)
        named[f"fp8 {recipe}, compile"] = auto | dict(fp8=recipe, compile=True)
    named[f"fp8 current, micro-batch {size}"] = twice | dict(fp8="current")
    for peer in peers.PEERS:
        if "llama" in model or not peer.startswith("torchao"):
            named[f"{peer}, compile"] = dict(kernels="off", compile=True, peer=peer)
    trainer = "plain Llama" if "llama" in model else "nanoGPT"
    for compiled in (False, True):
        named[trainer + compiled * ", compile"] = dict(compile=compiled, peer=trainer)
    return named


def every_case(stage: str) -> dict[str, tuple[str, dict]]:
    """{name: (model, fields)}, those of FIRST first."""
    found = {}
    for model in OF_STAGE[stage]:
        prefix = "" if model == OF_STAGE[stage][0] and stage != "medium" else f"{model}, "
        found |= {prefix + case: (model, fields) for case, fields in of_model(model).items()}
    return {name: found[name] for name in (*FIRST[stage], *found)}


def chosen(stage: str, args) -> dict[str, tuple[str, dict]]:
    """Those of FIRST, or those that --cases names."""
    found = every_case(stage)
    return found if args.cases else {name: found[name] for name in FIRST[stage]}


def cases_of(stage: str, args) -> dict:
    """{name: a function that measures it}; of gpu.py."""
    if stage == "warm":
        return to_warm(args)
    found = {}
    for name, (model, fields) in chosen(stage, args).items():
        given, options = BF16 | MODELS[model] | fields, {}
        if args.toy:
            given |= TOY | (dict(ffn_hidden_size=256) if "llama" in model else {})
            options = ONE_STEP | dict(backend="eager")
        profiled = (stage, name) in PROFILED
        found[name] = partial(measure, model, given, profiled=profiled, **options)
    return found


def to_warm(args) -> dict:
    """One block of each kind, compiled: the code of the others is then in the compiler's cache."""
    found = {}
    for stage, names in FIRST.items():
        for name in names:
            model, fields = every_case(stage)[name]
            if fields.get("compile"):
                given = BF16 | MODELS[model] | fields
                # In FP8 is neither the first layer nor the last.
                given |= dict(num_layers=3 if stage == "fp8" else 1)
                given |= dict(global_batch_size=given["micro_batch_size"])
                found[f"{stage}, {name}"] = partial(measure, model, given, **ONE_STEP)
    return found


# --- a case ---------------------------------------------------------------------------------------


class WithPeer(WholeModel):
    """Trains in the FP8 of others: peer is one of peers.PEERS."""

    def __init__(self, peer: str):
        self.peer = peer

    def after_model_parallel(self, stage: GPT) -> None:
        layers = fp8.fp8_layers(self.model_config.num_layers, self.config.fp8_skip)
        peers.convert(stage, self.peer, layers)


def drawn_on_the_gpu():
    """A context in which initial weights are drawn there, from the same seeds: other values, from
    the normal distribution of gpt.py, but for the smaller one before residual connections."""
    on_the_cpu = GPT.init_parameter

    def init_parameter(model, name: str, shape, generator: torch.Generator) -> torch.Tensor:
        if name.endswith(("norm.weight", "bias")) or not torch.cuda.is_available():
            return on_the_cpu(model, name, shape, generator)
        seeded = torch.Generator("cuda").manual_seed(generator.initial_seed())
        return torch.randn(shape, generator=seeded, device="cuda").mul_(0.02)

    return mock.patch.object(GPT, "init_parameter", init_parameter)


def make(fields: dict, device: torch.device):
    """What takes the steps: of this project, or of a peer."""
    fields = dict(fields)
    peer, apart = fields.pop("peer", None), fields.pop("apart", False)
    if peer in ("nanoGPT", "plain Llama"):
        return peers.Steps(config_of(fields), device)
    # Only a weight that is used once can be summed inside its product.
    uses_of = (lambda model: Counter()) if apart else optimizer.uses_of
    with drawn_on_the_gpu(), mock.patch.object(optimizer, "uses_of", uses_of):
        return Steps(fields, device=device, task=Task(WithPeer(peer)) if peer else None)


@functools.cache
def peak(n: int) -> tuple[float, str]:
    """(the FLOP/s that are an MFU of 100%, where that number comes from). n: of a matrix."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if known := peak_flops(device):
        return known, f"{torch.cuda.get_device_name()}'s dense bf16 peak"
    return report.matmul_flops(torch.bfloat16, device, n), "a matrix multiplication measured here"


# {model: the losses of its first case}
LOSSES = {}


def measure(
    model: str,
    fields: dict,
    warmup: int = WARMUP,
    counted: int = COUNTED,
    profiled: bool = False,
    backend: str = "inductor",
) -> dict:
    """A row: train in this process. backend: of torch.compile."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        cpu.set_up()
    else:
        torch.cuda.reset_peak_memory_stats()
    built = []
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        init = timed(lambda: built.append(make(fields, device)))
    steps = built[0]
    losses, seconds = [], []
    for number in range(1, 1 + warmup + counted):
        seconds.append(timed(lambda number=number: losses.append(steps.step(number))))
    tokens = steps.config.global_batch_size * steps.model_config.seq_length
    rates = spread([tokens / x for x in seconds[warmup:]])
    flops, of = peak(256 if backend == "eager" else 2048)
    row = {
        "tokens/s": rates,
        "% MFU": 100 * rates["median"] * flops_per_token(steps.model_config) / flops,
        "GiB": peak_memory(device) / 2**30,
        "MFU of": of,
        "losses": losses[:2],
        "s of the first step": seconds[0],
        "s to build": init,
    }
    if isinstance(steps, Steps):
        first = LOSSES.setdefault(model, losses)
        row["losses differ by"] = max(abs(a / b - 1) for a, b in zip(losses[:2], first))
        row["kernels refused"] = steps.trainer.kernels_refused
        # Near the time of a step: the GPU waits for the host.
        row["s of the host"] = steps.enqueue()
    if profiled:
        row["profile"] = profile(lambda: steps.step(2))
    return row


# --- predicted and published ----------------------------------------------------------------------


def predicted_step(model: str, fields: dict) -> tuple[float, float]:
    """(tokens/s, bytes of the GPU's memory) of a step on an H100, by planner.py. fields: of a case
    of this project."""
    given = {name: value for name, value in fields.items() if name != "apart"}
    config = config_of(BF16 | MODELS[model] | given)
    shape, layout, software = config.model_config(), layout_of(config, 1), software_of(config)
    if fields.get("apart"):
        software = dataclasses.replace(software, fuses_accumulation=())
    seconds = sum(planner.step_time(H100, software, shape, layout).values())
    tokens = config.global_batch_size * shape.seq_length
    return tokens / seconds, sum(memory(shape, layout, software).values())


def predicted(stage: str, args) -> dict[str, str]:
    """Each case but those of peers."""
    found = {}
    for name, (model, fields) in chosen(stage, args).items():
        if "peer" not in fields:
            rate, nbytes = predicted_step(model, fields)
            found[name] = f"{rate:,.0f} tokens/s, {nbytes / 2**30:.1f} GiB"
    return found


def published(model: str) -> list[tuple[int, str]]:
    """(tokens/s, what it is) of the published figures of a model; of half its layers, the tokens/s
    of as many FLOP/s."""
    whole = model.removesuffix("-16-layers")
    found = [(rate, name) for of, rate, name in PUBLISHED if of == whole]
    if whole == model:
        return found
    flops = [flops_per_token(config_of(MODELS[name]).model_config()) for name in (whole, model)]
    more = flops[0] / flops[1]
    return [(round(more * rate), f"{name}; its FLOP/s in 16 layers") for rate, name in found]


# --- in turn with peers, on a CPU -----------------------------------------------------------------

IN_TURN = dict(model="gpt2", seq_length=256, dropout=0.0)
CASES = {
    "small": dict(num_layers=4, hidden_size=256, num_heads=8, vocab_size=8192, global_batch_size=8),
    "gpt2-124m": dict(global_batch_size=2),
    "toy": TOY | dict(seq_length=32, global_batch_size=2),
}
# Takes a step of the checkout in its folder for each line that it reads, and prints the seconds.
STEPS = """
import json, sys, torch
from base import cpu
from benchmarks.report import timed
from benchmarks.steps import Steps
fields, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
cpu.set_up()
steps = Steps(fields)
for _ in sys.stdin:
    print(timed(steps.step), flush=True)
"""
# Operations: parts of their names in PyTorch's profiler. The first that fits counts.
OPERATIONS = {
    "attention": ("scaled_dot_product", "flash_attention", "bmm", "triu"),
    "matrix multiplications": ("aten::mm", "aten::addmm"),
    "GELU": ("gelu",),
    "norms of layers": ("layer_norm",),
    "softmax, cross entropy": (
        *("softmax", "nll_loss", "aten::amax", "aten::gather", "aten::scatter", "_CrossEntropy"),
    ),
    "embedding": ("embedding", "index"),
    "optimizer": ("adamw", "vector_norm", "foreach", "Optimizer"),
    "copies, sums and zeros": tuple(
        f"aten::{name}" for name in "add copy_ fill_ zero_ sum clone mul sub cat".split()
    ),
}


def breakdown(step, times: int) -> dict[str, float]:
    """Milliseconds of a step by operation: the least of so many steps."""
    steps = []
    for _ in range(times):
        with torch.profiler.profile() as profiler:
            step(1)
        steps.append(dict.fromkeys([*OPERATIONS, "the rest"], 0.0))
        for event in profiler.key_averages():
            fits = (
                name for name, parts in OPERATIONS.items() if any(p in event.key for p in parts)
            )
            steps[-1][next(fits, "the rest")] += event.self_cpu_time_total / 1e3
    return {name: min(of[name] for of in steps) for name in steps[0]}


def peers_of(precision: str) -> dict[str, dict]:
    """{peer: options of peers.Steps}"""
    found = {"nanoGPT": dict(plain=True), "transformers": dict(plain=True, theirs=True)}
    if precision == "bf16":
        found |= {f"{name}, autocast": given | dict(plain=False) for name, given in found.items()}
    return found | {"transformers as it comes": found["transformers"]}


def on_rank(rank: int, fields: dict, precision: str, rounds: int, n: int):
    """(seconds round by round, breakdown). Rank 0 is this project: (forward and backward,
    optimizer, FLOP/s of a multiplication of n x n matrices); the others are peers: (a step,). All
    but the last have the settings of the process that train.py makes (base/cpu.py)."""
    others = [None, *peers_of(precision).values()]
    if rank < len(others) - 1:
        cpu.set_up()
    if rank == 0:
        steps = Steps(fields, precision=precision)
        measures = [
            lambda: timed(steps.forward_backward),
            lambda: timed(lambda: steps.trainer.update(1)),
            lambda: report.matmul_flops(DTYPES[precision], "cpu", n, repeats=3),
        ]
    else:
        config = config_of(fields | dict(precision=precision))
        steps = peers.Steps(config, torch.device("cpu"), **others[rank])
        measures = [lambda: timed(lambda: steps.step(1))]
    measured = []
    # Two rounds warm up; then comes the breakdown. While one rank works, the others wait.
    for n in range(rounds + 3):
        for turn in range(len(others)):
            dist.barrier()
            if turn == rank and n < rounds + 2:
                measured.append([measure() for measure in measures])
            elif turn == rank:
                milliseconds = breakdown(steps.step, 5 if rounds > 1 else 1)
    dist.barrier()
    return measured[2:], milliseconds


def beside_peers(fields: dict, precision: str, args) -> dict:
    """A row of results. A ratio is the median over rounds of their seconds over ours."""
    names = list(peers_of(precision))
    options = dict(threads=args.threads, timeout=300)
    n = 256 if args.toy else 2048
    (ours, milliseconds), *theirs = ranks.run(
        on_rank, 1 + len(names), fields, precision, args.rounds, n, **options
    )
    c = config_of(fields).model_config()
    tokens = fields["global_batch_size"] * c.seq_length
    flops = tokens * flops_per_token(c)
    steps = [forward_backward + update for forward_backward, update, _ in ours]
    seconds = {name: [s for (s,) in rows] for name, (rows, _) in zip(names, theirs)}
    peaks = [x for _, _, x in ours]
    return {
        "tokens_per_second": tokens / median(steps),
        "their_tokens_per_second": {name: tokens / median(s) for name, s in seconds.items()},
        "ratio": {
            name: spread([one / own for own, one in zip(steps, s)]) for name, s in seconds.items()
        },
        "matmul_peak_flops": spread(peaks),
        "share_of_peak_outside_optimizer": spread([flops / fb / x for fb, _, x in ours]),
        "share_of_peak": flops / median(steps) / median(peaks),
        "optimizer_share_of_step": median([u / (fb + u) for fb, u, _ in ours]),
        "milliseconds": {"ours": milliseconds} | {n: ms for n, (_, ms) in zip(names, theirs)},
    }


def next_step(process: subprocess.Popen) -> float:
    """Seconds of one step of a process that runs STEPS. Where it failed, its error was printed."""
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())
    except (BrokenPipeError, ValueError):
        sys.exit(f"training_step.py: the step of {process.args[-1]} failed")


def beside_checkout(fields: dict, precision: str, args) -> dict:
    """Seconds of a step of this checkout and of another, in turn, and their ratio."""
    processes = {}
    given = json.dumps([fields | dict(precision=precision), args.threads])
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for name, folder in (("this", report.ROOT), ("other", args.other)):
            command = [sys.executable, "-c", STEPS, given, str(folder)]
            processes[name] = subprocess.Popen(command, cwd=folder, **pipes)
        steps = {name: partial(next_step, process) for name, process in processes.items()}
        times = report.in_turn(steps, args.rounds)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    seconds = {name: spread([t[name] for t in times]) for name in processes}
    return {"seconds": seconds, "other over this": report.ratio(times, "other", "this")}


def main():
    parser = report.arguments(__doc__, threads=2, rounds=15)
    parser.add_argument("--cases", nargs="+", default=["small", "gpt2-124m"], choices=CASES)
    precisions = ["fp32", "bf16"]
    parser.add_argument("--precisions", nargs="+", default=precisions, choices=precisions)
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="another checkout")
    args = report.parse(parser, rounds=1, threads=1, cases=["toy"], precisions=["fp32"])
    if args.other and not (args.other / "train.py").exists():
        report.refuse(parser, f"--other {args.other}: no checkout of this project, has no train.py")
    compare = beside_checkout if args.other else beside_peers
    results, table = {}, report.Table()
    for name, precision in itertools.product(args.cases, args.precisions):
        case = f"{name} {precision}"
        row = results[case] = compare(IN_TURN | CASES[name], precision, args)
        shown = {key: value for key, value in row.items() if key != "milliseconds"}
        table.row({"": case} | shown)
    for case, row in results.items():
        report.Table(
            {"ms": f"{case}, {who}"} | ms for who, ms in row.get("milliseconds", {}).items()
        )
    name = "two_checkouts" if args.other else "training_step"
    report.finish(name, {"results": results}, args, threads=args.threads)


if __name__ == "__main__":
    main()
