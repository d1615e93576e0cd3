"""One training step on one device: this project beside Hugging Face transformers' GPT-2, in turn,
in one run.

    python comparisons/single_device.py [--threads 2] [--rounds 15] [--toy] [--out DIR]

Both have the same shapes, random tokens, fused AdamW, clipping and scaled_dot_product_attention,
and no dropout. Three processes take turns, a step each, while the others wait: ours, as train.py
runs it; transformers as it comes; and transformers with the setting of the memory allocator that
train.py makes on CPUs. A ratio is the median over rounds of their seconds over ours. In bf16 ours
keeps fp32 masters and moments; theirs trains in plain bf16, which is less work.

The peak of matrix multiplications is measured in every round. Our share of it is model FLOPs
(model_config.flops_per_token) over the time of forward and backward. The optimizer's time stands
apart.

    python comparisons/single_device.py --other FOLDER

compares with another checkout of this project instead, before and after a change: a process of each
takes a step in turn.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import report
import torch
import torch.distributed as dist
from report import median, spread, timed

# Random also for the processes of another checkout
from steps import Random, Steps

import data
import train
from base.world import keep_freed_memory
from model_config import GPTConfig, flops_per_token
from proof import ranks
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
sys.path.insert(1, "comparisons")
import torch, train
from report import timed
from base.world import Groups, keep_freed_memory
from single_device import Random
fields, device, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
if device == "cpu":
    keep_freed_memory()
config = train.Config(**fields)
c = config.model_config()
dataset = Random(config.global_batch_size, c.seq_length, c.vocab_size)
trainer = train.Trainer(config, torch.device(device), Groups())
for _ in sys.stdin:
    print(timed(lambda: (trainer.forward_backward(1, dataset), trainer.update(1))), flush=True)
"""
# of an operation, in the breakdown of a step: parts of its name in PyTorch's profiler
KINDS = {
    "matrix multiplications": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "attention": ("scaled_dot_product", "flash_attention"),
    "GELU": ("gelu",),
    "norm": ("layer_norm",),
    "cross entropy": tuple(
        "_CrossEntropy aten::exp aten::amax aten::div aten::gather aten::scatter aten::log".split()
    ),
    "embedding": ("embedding", "index"),
    "copies, sums and zeros": tuple(
        f"aten::{name}" for name in "add copy_ fill_ zero_ sum clone mul sub".split()
    ),
}


# --- the steps ------------------------------------------------------------------------------------


def transformers_step(c: GPTConfig, batch: data.Batch, dtype: torch.dtype, device: str):
    """A function that takes one training step of transformers' GPT-2."""
    import transformers

    shape = dict(n_embd=c.hidden_size, n_layer=c.num_layers, n_head=c.num_heads)
    shape |= dict(vocab_size=c.vocab_size, n_positions=c.seq_length)
    no_dropout = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    config = transformers.GPT2Config(**shape, **no_dropout, attn_implementation="sdpa")
    model = transformers.GPT2LMHeadModel(config).to(device, dtype)
    options = dict(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    batch = batch.to(device)
    # it shifts the targets itself
    targets = torch.cat((batch.tokens[:, :1], batch.targets), 1)[:, : c.seq_length]

    def step():
        optimizer.zero_grad()
        model(input_ids=batch.tokens, labels=targets, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def breakdown(step) -> dict[str, float]:
    """Share of the time of one step by kind of operation, from the profiler."""
    with torch.profiler.profile() as profile:
        step()
    seconds = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profile.key_averages():
        kinds = [kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)]
        seconds[[*kinds, "the rest"][0]] += event.self_cpu_time_total
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items()}


def on_rank(rank: int, fields: dict, precision: str, rounds: int, device: str):
    """(measurements round by round, breakdown). Rank 0 is this project: (seconds of forward and
    backward, of the optimizer, FLOP/s of a matrix multiplication). Rank 1 is transformers, rank 2
    transformers with our allocator setting: (seconds of a step,). The breakdown of forward and
    backward is rank 0's, on a CPU; else None."""
    if rank != 1 and device == "cpu":
        keep_freed_memory()
    dtype = DTYPES[precision]
    if rank == 0:
        ours = Steps(fields, device=device, precision=precision)
        measures = [
            lambda: timed(ours.forward_backward),
            lambda: timed(lambda: ours.trainer.update(1)),
            lambda: report.matmul_flops(dtype, device, repeats=3),
        ]
    else:
        config = train.Config(**fields, precision=precision)
        c = config.model_config()
        dataset = Random(config.global_batch_size, c.seq_length, c.vocab_size)
        step = transformers_step(c, dataset.fixed, dtype, device)
        measures = [lambda: timed(step)]
    measured = []
    # two rounds to warm up
    for _ in range(rounds + 2):
        for turn in range(dist.get_world_size()):
            dist.barrier()
            if turn == rank:
                measured.append([measure() for measure in measures])
    dist.barrier()
    shares = None
    if rank == 0 and device == "cpu":
        shares = breakdown(ours.forward_backward)
    dist.barrier()
    return measured[2:], shares


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


def measure(fields: dict, precision: str, rounds: int, device: str, threads: int) -> dict:
    """A row of results. fields: of train.Config."""
    (ours, shares), (plain, _), (same_allocator, _) = ranks.run(
        on_rank, 3, fields, precision, rounds, device, threads=threads, timeout=300
    )
    config = train.Config(**fields).model_config()
    tokens = fields["global_batch_size"] * config.seq_length
    flops = tokens * flops_per_token(config)
    peaks = [peak for _, _, peak in ours]
    steps = [forward_backward + update for forward_backward, update, _ in ours]
    step = median(steps)

    def ratio(theirs: list) -> dict:
        return spread([seconds / our_step for our_step, (seconds,) in zip(steps, theirs)])

    shares_of_peak = [flops / forward_backward / peak for forward_backward, _, peak in ours]
    result = {
        "tokens_per_second": tokens / step,
        "transformers_tokens_per_second": tokens / median([seconds for (seconds,) in plain]),
        "ratio": ratio(plain),
        "ratio_with_our_allocator_setting": ratio(same_allocator),
        "matmul_peak_flops": spread(peaks),
        "share_of_peak_outside_optimizer": spread(shares_of_peak),
        "share_of_peak": flops / step / median(peaks),
        "optimizer_share_of_step": median([u / (fb + u) for fb, u, _ in ours]),
        "breakdown_outside_optimizer": shares,
    }
    return result | mfu(flops / step / 1e12, torch.device(device), precision)


def measure_cases(args) -> dict:
    """{"CASE PRECISION": row}, printed as they come."""
    results = {}
    table = report.Table()
    for name in args.cases:
        for precision in args.precisions:
            fields = (CASES | TOY)[name]
            last = args.rounds, args.device, args.threads
            if args.other:
                row = compare_checkouts(args.other, fields | {"precision": precision}, *last)
                shown = row["seconds"] | {"other over this": row["other over this"]}
            else:
                row = shown = measure(fields, precision, *last)
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
    args = report.parse(parser, rounds=1, threads=1, cases=TOY, precisions=["fp32"])
    if args.other and not (args.other / "train.py").exists():
        report.refuse(parser, f"--other {args.other}: no checkout of this project, has no train.py")
    results = {"results": measure_cases(args)}
    name = "two_checkouts" if args.other else "single_device"
    report.save(name, results, args, threads=args.threads)


if __name__ == "__main__":
    main()
