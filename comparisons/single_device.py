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

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import median, spread, timed

import data
import train
from base.world import Groups, keep_freed_memory
from lessons import demo
from model_config import GPTConfig, flops_per_token
from proof import ranks
from run.config import DTYPES
from run.metrics import mfu

CASES = {
    "small": dict(
        model="gpt2",
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        seq_length=256,
        vocab_size=8192,
        dropout=0.0,
        global_batch_size=8,
    ),
    "gpt2-124m": dict(model="gpt2", seq_length=256, dropout=0.0, global_batch_size=2),
}
TOY = {
    "toy": dict(
        model="gpt2",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        seq_length=32,
        vocab_size=512,
        dropout=0.0,
        global_batch_size=2,
    )
}
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
    "cross entropy": (
        "_CrossEntropy",
        "aten::exp",
        "aten::amax",
        "aten::div",
        "aten::gather",
        "aten::scatter",
        "aten::log",
    ),
    "embedding": ("embedding", "index"),
    "copies, sums and zeros": (
        "aten::add",
        "aten::copy_",
        "aten::fill_",
        "aten::zero_",
        "aten::sum",
        "aten::clone",
        "aten::mul",
        "aten::sub",
    ),
}


class Random(data.Dataset):
    """Random tokens that are already in memory, as a data set: sample n is row n of one batch, over
    and over. batch: rows; s: tokens of a row; v: size of the vocabulary."""

    def __init__(self, batch: int, s: int, v: int):
        self.s = s
        tokens, targets = demo.random_tokens(batch, s, v)
        self.fixed = data.Batch(
            tokens.contiguous(),
            targets.contiguous(),
            torch.ones(batch, s, dtype=torch.bool),
            torch.arange(batch),
        )

    def batch(self, samples) -> data.Batch:
        """samples: a range that does not pass the last row."""
        first = samples[0] % len(self.fixed.tokens)
        rows = slice(first, first + len(samples))
        return data.Batch(
            self.fixed.tokens[rows],
            self.fixed.targets[rows],
            self.fixed.loss_mask[rows],
            self.fixed.samples[rows],
        )

    def counted_tokens(self, samples) -> int:
        return self.fixed.targets.numel()


# --------------------------------------------------------------------------------------------------
# the steps


def transformers_step(c: GPTConfig, batch: data.Batch, dtype: torch.dtype, device: str):
    """A function that takes one training step of transformers' GPT-2."""
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.seq_length,
            n_embd=c.hidden_size,
            n_layer=c.num_layers,
            n_head=c.num_heads,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            attn_implementation="sdpa",
        )
    ).to(device, dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batch = batch.to(device)
    # it shifts the targets itself
    targets = torch.cat((batch.tokens[:, :1], batch.targets), 1)[:, : c.seq_length]

    def step():
        optimizer.zero_grad()
        model(input_ids=batch.tokens, labels=targets, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def kind_of(operation: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in operation for part in parts):
            return kind
    return "the rest"


def breakdown(step) -> dict[str, float]:
    """Share of the time of one step by kind of operation, from the profiler."""
    with torch.profiler.profile() as profile:
        step()
    seconds = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profile.key_averages():
        seconds[kind_of(event.key)] += event.self_cpu_time_total
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items()}


def on_rank(rank: int, fields: dict, precision: str, rounds: int, device: str):
    """(measurements round by round, breakdown). Rank 0 is this project: (seconds of forward and
    backward, of the optimizer, FLOP/s of a matrix multiplication). Rank 1 is transformers, rank 2
    transformers with our allocator setting: (seconds of a step,). The breakdown of forward and
    backward is rank 0's, on a CPU; else None."""
    if rank != 1 and device == "cpu":
        keep_freed_memory()
    config = train.Config(**fields, precision=precision)
    c = config.model_config()
    dtype = DTYPES[precision]
    dataset = Random(config.global_batch_size, c.seq_length, c.vocab_size)
    if rank == 0:
        trainer = train.Trainer(config, torch.device(device), Groups())

        def forward_backward():
            trainer.forward_backward(1, dataset)

        measures = [
            lambda: timed(forward_backward),
            lambda: timed(lambda: trainer.update(1)),
            lambda: report.matmul_flops(dtype, device, repeats=3),
        ]
    else:
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
        shares = breakdown(forward_backward)
    dist.barrier()
    return measured[2:], shares


# --------------------------------------------------------------------------------------------------
# two checkouts


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
        for name, folder in (("this", Path(__file__).parent.parent), ("other", other)):
            processes[name] = subprocess.Popen(
                [sys.executable, "-c", STEPS, json.dumps([fields, device, threads]), str(folder)],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        steps = {name: functools.partial(next_step, p) for name, p in processes.items()}
        times = report.in_turn(steps, rounds)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    seconds = {name: spread([t[name] for t in times]) for name in processes}
    return {"seconds": seconds, "other over this": spread([t["other"] / t["this"] for t in times])}


def main_of_checkouts(cases: dict, args) -> None:
    results = {}
    print(f"{'':<22}{'this, s':>10}{'other, s':>10}   other over this")
    for name, fields in cases.items():
        for precision in args.precisions:
            fields = fields | {"precision": precision}
            row = compare_checkouts(args.other, fields, args.rounds, args.device, args.threads)
            results[f"{name} {precision}"] = row
            this, other = (row["seconds"][key]["median"] for key in ("this", "other"))
            ratio = report.format_spread(row["other over this"])
            print(f"{name + ' ' + precision:<22}{this:>10.3f}{other:>10.3f}   {ratio}", flush=True)
    report.save("two_checkouts", {"results": results}, args, threads=args.threads)


# --------------------------------------------------------------------------------------------------
# the results


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


def print_row(name: str, row: dict) -> None:
    shares = row["breakdown_outside_optimizer"]
    print(
        f"{name:<22}{row['tokens_per_second']:>10,.0f}"
        f"{row['transformers_tokens_per_second']:>14,.0f}"
        f"{row['ratio']['median']:>8.2f}"
        f"{row['ratio_with_our_allocator_setting']['median']:>16.2f}"
        f"{row['share_of_peak_outside_optimizer']['median']:>15.0%}"
        f" {row['optimizer_share_of_step']:>10.0%}",
        flush=True,
    )
    if shares:
        largest_first = sorted(shares.items(), key=lambda item: -item[1])
        print("    " + ", ".join(f"{k} {v:.0%}" for k, v in largest_first if v >= 0.005))


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"]
    )
    parser.add_argument("--other", type=Path, metavar="FOLDER", help="another checkout")
    args = report.parse(parser)
    if args.other and not (args.other / "train.py").exists():
        report.refuse(parser, f"--other {args.other}: no checkout of this project, has no train.py")
    cases = {name: CASES[name] for name in args.cases}
    if args.toy:
        cases = TOY
        args.rounds = 1
        args.threads = 1
        args.precisions = ["fp32"]
    if args.other:
        main_of_checkouts(cases, args)
        return
    results = {}
    print(
        f"{'':<22}{'tokens/s':>10}{'transformers':>14}{'ratio':>8}{'same allocator':>16}"
        f"{'of matmul peak':>16}{'optimizer':>11}"
    )
    for name, fields in cases.items():
        for precision in args.precisions:
            row = measure(fields, precision, args.rounds, args.device, args.threads)
            results[f"{name} {precision}"] = row
            print_row(f"{name} {precision}", row)
    report.save("single_device", {"results": results}, args, threads=args.threads)


if __name__ == "__main__":
    main()
