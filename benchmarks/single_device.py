"""One training step on one device: this project beside transformers' GPT-2 and beside nanoGPT, in
turn, in one run.

    python -m benchmarks.single_device [--nanogpt FOLDER] [--threads 2] [--rounds 15] [--toy]

All have the same shapes, random tokens, fused AdamW, clipping and scaled_dot_product_attention, and
no dropout. A process of each takes a step in turn, while the others wait. On a CPU the others have
the settings of the process that train.py makes (base/cpu.py), and transformers once more as it
comes. A ratio is the median over rounds of their seconds over ours. Ours has GPT-2's own GELU, the
tanh form; nanoGPT has the exact one, which PyTorch computes faster on CPUs.

In bf16 ours keeps fp32 masters and moments. The others train in plain bf16, which is less work; and
once more under autocast, which keeps fp32 weights too. --nanogpt: a checkout of nanoGPT; without
one it is left out.

The peak of matrix multiplications is measured in every round. Our share of it is model FLOPs
(model_config.flops_per_token) over the time of forward and backward.

    python -m benchmarks.single_device --other FOLDER

compares with another checkout of this project instead, before and after a change: a process of each
takes a step in turn.
"""

import bisect
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import train
from base import cpu
from base.model_config import GPTConfig, flops_per_token
from benchmarks import report
from benchmarks.report import median, spread, timed

# Random also for the processes of another checkout
from benchmarks.steps import Random, Steps
from course import ranks
from run import data
from run.config import DTYPES
from run.metrics import mfu

GPT2 = dict(model="gpt2", seq_length=256, dropout=0.0)
SMALL = dict(num_layers=4, hidden_size=256, num_heads=8, vocab_size=8192, global_batch_size=8)
TINY = dict(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512, seq_length=32)
CASES = {"small": GPT2 | SMALL, "gpt2-124m": GPT2 | dict(global_batch_size=2)}
TOY = {"toy": GPT2 | TINY | dict(global_batch_size=2)}
# Takes a training step of the checkout in its folder for each line that it reads, and prints the
# seconds.
STEPS = """
import json, sys
import torch, train
from benchmarks.report import timed
from base import cpu
from base.groups import Groups
from benchmarks.single_device import Random
fields, device, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
if device == "cpu":
    cpu.set_up()
config = train.Config(**fields)
c = config.model_config()
dataset = Random(config.global_batch_size, c.seq_length, c.vocab_size)
trainer = train.Trainer(config, torch.device(device), Groups())
for _ in sys.stdin:
    print(timed(lambda: (trainer.forward_backward(1, dataset), trainer.update(1))), flush=True)
"""
# of an operation, in the breakdown of a step: parts of its name in PyTorch's profiler
KINDS = {
    "attention": ("scaled_dot_product", "flash_attention", "bmm", "triu"),
    "matrix multiplications": ("aten::mm", "aten::addmm"),
    "GELU": ("gelu",),
    "norms of layers": ("layer_norm",),
    "softmax, cross entropy": tuple(
        "softmax nll_loss aten::amax aten::gather aten::scatter _CrossEntropy".split()
    ),
    "embedding": ("embedding", "index"),
    "optimizer": ("adamw", "vector_norm", "foreach", "Optimizer"),
    "copies, sums and zeros": tuple(
        f"aten::{name}" for name in "add copy_ fill_ zero_ sum clone mul sub cat".split()
    ),
}
# steps of a breakdown, the least of which counts for each kind: the profiler's own memory lies
# between that of tensors, and now and then a large one gets new pages, which the kernel zeroes
PROFILED = 5


# --- the steps ------------------------------------------------------------------------------------


def transformers_step(c: GPTConfig, batch: data.Batch, place, autocast, _):
    """A function that takes one training step of transformers' GPT-2. place: device and dtype of
    the model; autocast: makes a context of the forward."""
    import transformers

    shape = dict(n_embd=c.hidden_size, n_layer=c.num_layers, n_head=c.num_heads)
    shape |= dict(vocab_size=c.vocab_size, n_positions=c.seq_length)
    no_dropout = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    config = transformers.GPT2Config(**shape, **no_dropout, attn_implementation="sdpa")
    model = transformers.GPT2LMHeadModel(config).to(*place)
    # it shifts the targets itself
    targets = torch.cat((batch.tokens[:, :1], batch.targets), 1)[:, : c.seq_length]

    def forward():
        with autocast():
            return model(input_ids=batch.tokens, labels=targets, use_cache=False).loss

    return step_of(model, forward)


def nanogpt_step(c: GPTConfig, batch: data.Batch, place, autocast, folder: str):
    """The same of nanoGPT. folder: its checkout."""
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig

    shape = dict(n_embd=c.hidden_size, n_layer=c.num_layers, n_head=c.num_heads, dropout=0.0)
    model = GPT(GPTConfig(**shape, vocab_size=c.vocab_size, block_size=c.seq_length, bias=True))
    model.to(*place)

    def forward():
        with autocast():
            return model(batch.tokens, batch.targets)[1]

    return step_of(model, forward)


def step_of(model: torch.nn.Module, forward):
    optimizer = torch.optim.AdamW(
        [
            dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=0.1),
            dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0),
        ],
        lr=1e-4,
        betas=(0.9, 0.95),
        fused=True,
    )

    def step():
        optimizer.zero_grad()
        forward().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


class Peer(NamedTuple):
    step: Callable
    # whether it has the settings of base/cpu.py
    settings: bool = True
    autocast: bool = False


def peers_of(args, precision: str) -> dict[str, Peer]:
    peers = {"transformers": Peer(transformers_step)}
    if args.nanogpt:
        peers["nanoGPT"] = Peer(nanogpt_step)
    if precision == "bf16":
        peers |= {f"{name}, autocast": peer._replace(autocast=True) for name, peer in peers.items()}
    if args.device == "cpu":
        peers["transformers as it comes"] = Peer(transformers_step, settings=False)
    return peers


def breakdown(step) -> dict[str, float]:
    """Milliseconds of one step by kind of operation, from the profiler."""
    microseconds = [dict.fromkeys([*KINDS, "the rest"], 0.0) for _ in range(PROFILED)]
    with torch.profiler.profile() as profile:
        for n in range(PROFILED):
            with torch.profiler.record_function(f"step {n}"):
                step()
    events = profile.events()
    ends = [e.time_range.end for e in events if e.name.startswith("step ")]
    for event in events:
        kinds = [kind for kind, parts in KINDS.items() if any(p in event.name for p in parts)]
        n = min(bisect.bisect_left(ends, event.time_range.start), PROFILED - 1)
        # the first kind that fits
        microseconds[n][[*kinds, "the rest"][0]] += event.self_cpu_time_total
    return {kind: min(us[kind] for us in microseconds) / 1e3 for kind in microseconds[0]}


def on_rank(rank: int, peers: dict, fields: dict, precision: str, args):
    """(measurements round by round, breakdown). Rank 0 is this project: (seconds of forward and
    backward, of the optimizer, FLOP/s of a matrix multiplication). The others are peers: (seconds
    of a step,). A breakdown is that of a step on a CPU; else None."""
    peer = list(peers.values())[rank - 1] if rank else None
    if args.device == "cpu" and (not peer or peer.settings):
        cpu.set_up()
    dtype = DTYPES[precision]
    if peer is None:
        ours = Steps(fields, device=args.device, precision=precision)
        step = ours.step
        measures = [
            lambda: timed(ours.forward_backward),
            lambda: timed(lambda: ours.trainer.update(1)),
            lambda: report.matmul_flops(dtype, args.device, repeats=3),
        ]
    else:
        c = train.Config(**fields).model_config()
        batch = Random(fields["global_batch_size"], c.seq_length, c.vocab_size).fixed
        weights = torch.float32 if peer.autocast else dtype
        autocast = functools.partial(torch.autocast, args.device, dtype, enabled=peer.autocast)
        place = args.device, weights
        step = peer.step(c, batch.to(args.device), place, autocast, args.nanogpt)
        measures = [lambda: timed(step)]
    measured = []
    # two rounds to warm up
    for _ in range(args.rounds + 2):
        for turn in range(dist.get_world_size()):
            dist.barrier()
            if turn == rank:
                measured.append([measure() for measure in measures])
    milliseconds = None
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == rank and args.device == "cpu":
            milliseconds = breakdown(step)
    dist.barrier()
    return measured[2:], milliseconds


# --- two checkouts --------------------------------------------------------------------------------


def next_step(process: subprocess.Popen) -> float:
    """Seconds of one step of a process that runs STEPS. Where it failed, its error was printed."""
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())
    except (BrokenPipeError, ValueError):
        sys.exit(f"single_device.py: the step of {process.args[-1]} failed")


def compare_checkouts(other: Path, fields: dict, rounds: int, device: str, threads: int) -> dict:
    """Seconds of a step of this checkout and of another, in turn, and their ratio."""
    processes = {}
    try:
        for name, folder in (("this", report.ROOT), ("other", other)):
            arguments = [json.dumps([fields, device, threads]), str(folder)]
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            command = [sys.executable, "-c", STEPS, *arguments]
            processes[name] = subprocess.Popen(command, cwd=folder, **pipes)
        steps = {name: functools.partial(next_step, p) for name, p in processes.items()}
        times = report.in_turn(steps, rounds)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    seconds = {name: spread([t[name] for t in times]) for name in processes}
    return {"seconds": seconds, "other over this": report.ratio(times, "other", "this")}


# --- the results ----------------------------------------------------------------------------------


def measure(fields: dict, precision: str, args) -> dict:
    """A row of results. fields: of train.Config."""
    peers = peers_of(args, precision)
    (ours, milliseconds), *theirs = ranks.run(
        on_rank, 1 + len(peers), peers, fields, precision, args, threads=args.threads, timeout=300
    )
    config = train.Config(**fields).model_config()
    tokens = fields["global_batch_size"] * config.seq_length
    flops = tokens * flops_per_token(config)
    peaks = [peak for _, _, peak in ours]
    steps = [forward_backward + update for forward_backward, update, _ in ours]
    step = median(steps)
    shares_of_peak = [flops / forward_backward / peak for forward_backward, _, peak in ours]
    seconds = {name: [s for (s,) in rows] for name, (rows, _) in zip(peers, theirs)}
    result = {
        "tokens_per_second": tokens / step,
        "their_tokens_per_second": {name: tokens / median(s) for name, s in seconds.items()},
        "ratio": {
            name: spread([one / own for own, one in zip(steps, s)]) for name, s in seconds.items()
        },
        "matmul_peak_flops": spread(peaks),
        "share_of_peak_outside_optimizer": spread(shares_of_peak),
        "share_of_peak": flops / step / median(peaks),
        "optimizer_share_of_step": median([u / (fb + u) for fb, u, _ in ours]),
        "milliseconds": {"ours": milliseconds} | {n: ms for n, (_, ms) in zip(peers, theirs)},
    }
    return result | mfu(flops / step / 1e12, torch.device(args.device), precision)


def measure_cases(args) -> dict:
    """{"CASE PRECISION": row}, printed as they come."""
    results = {}
    table = report.Table()
    for name in args.cases:
        for precision in args.precisions:
            fields = (CASES | TOY)[name]
            if args.other:
                last = args.rounds, args.device, args.threads
                row = compare_checkouts(args.other, fields | {"precision": precision}, *last)
                shown = row["seconds"] | {"other over this": row["other over this"]}
            else:
                row = measure(fields, precision, args)
                shown = {key: value for key, value in row.items() if key != "milliseconds"}
            table.row({"": f"{name} {precision}"} | shown)
            results[f"{name} {precision}"] = row
    return results


def main():
    parser = report.arguments(__doc__, threads=2, rounds=15)
    report.device(parser)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    kinds = ["fp32", "bf16"]
    parser.add_argument("--precisions", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="another checkout")
    nanogpt = "a checkout of nanoGPT, to be measured too"
    parser.add_argument("--nanogpt", metavar="FOLDER", help=nanogpt)
    args = report.parse(parser, rounds=1, threads=1, cases=TOY, precisions=["fp32"])
    if args.other and not (args.other / "train.py").exists():
        report.refuse(parser, f"--other {args.other}: no checkout of this project, has no train.py")
    if args.nanogpt and not (Path(args.nanogpt) / "model.py").exists():
        report.refuse(parser, f"--nanogpt {args.nanogpt}: no checkout of nanoGPT, has no model.py")
    results = {"results": measure_cases(args)}
    if not args.other and args.device == "cpu":
        print("\nmilliseconds of a step by kind of operation, the least of five steps:")
        for name, row in results["results"].items():
            report.Table({"": f"{name}, {who}"} | ms for who, ms in row["milliseconds"].items())
    name = "two_checkouts" if args.other else "single_device"
    report.save(name, results, args, threads=args.threads)


if __name__ == "__main__":
    main()
