"""What FP8 does to the loss: the default model on the default corpus, bf16 beside three recipes.

    python -m benchmarks.fp8_training [--seeds 3] [--steps 1000] [--lr 1e-3] [--toy] [--out DIR]

Run again, it goes on with what its file lacks: about 8 minutes for each run on one thread.

    bf16               no FP8
    bf16, other sums   the same in two micro-batches: what rounding alone does to a loss
    current            one scale for a tensor, from its own maximum
    delayed            one scale for a tensor, from the maxima of the last 16 steps
    block              a scale for each 1 x 128 or 128 x 128 values
    e4m3 everywhere    current, with gradients in e4m3 instead of e5m2

A run is 1,000 steps of 16 sequences, on one thread; FP8 is emulated. Compared is the held-out loss
after the last step, over the same 256 sequences, with that of bf16 and the same seed. A seed sets
the weights and the order of samples. Rounding alone makes two runs differ, so look at the spread.

At the default rate of 3e-3 the model is at the edge of stability, and rounding alone moves the loss
by percents. At 1e-3 it does not.

Figure: docs/figures/fp8_training.svg
"""

import multiprocessing
import os
from pathlib import Path
from statistics import mean

import torch

import fp8
from base import cpu
from benchmarks import report, steps, style

MUTATION = "e4m3 everywhere"
CASES = {
    "bf16": {},
    "bf16, other sums": {"micro_batch_size": 8},
    "current": {"fp8": "current"},
    "delayed": {"fp8": "delayed"},
    "block": {"fp8": "block"},
    MUTATION: {"fp8": "current"},
}
TOY = steps.TOY | dict(seq_length=32)
# steps, of means
WINDOW = 50


def measure(job: tuple) -> tuple[str, int, dict]:
    """(case, seed, one run), on one thread. fields: of train.Config, empty for the default model.
    Losses are in nats per byte; those of training are means of 50 steps. saturated: of these 50,
    the steps in which some tensor had values beyond its scale."""
    case, seed, num_steps, lr, fields = job
    torch.set_num_threads(1)
    cpu.set_up()
    if case == MUTATION:
        fp8.Recipe.format = lambda self, operand: fp8.E4M3
    fields = fields | dict(precision="bf16", seed=seed, steps=num_steps, lr=lr) | CASES[case]
    trainer, training, held_out = steps.on_corpus(fields)
    losses, saturated = [], []
    for _, loss in steps.losses(trainer, training):
        losses.append(loss)
        if trainer.fp8:
            saturated.append("fp8_saturated" in trainer.fp8.warnings(trainer.fp8.report))
    return (
        case,
        seed,
        {
            "held_out": trainer.task.evaluate(held_out, 8 if "model" in fields else 256),
            "training": [mean(part) for part in pieces(losses)],
            "saturated": [sum(part) for part in pieces(saturated)],
            "skipped_steps": int(trainer.optimizer.skipped),
        },
    )


def pieces(of_steps: list) -> list[list]:
    return [of_steps[i : i + WINDOW] for i in range(0, len(of_steps), WINDOW)]


def pairs(runs: dict, case: str) -> list[tuple[dict, dict]]:
    """(run of the case, run of bf16) with the same seed, for seeds that have both."""
    return [(of[case], of["bf16"]) for of in runs.values() if {case, "bf16"} <= of.keys()]


def ratios(runs: dict) -> dict:
    """Held-out loss of each case over that of bf16 with the same seed."""
    found = {}
    for case in CASES:
        of_seeds = [run["held_out"] / bf16["held_out"] for run, bf16 in pairs(runs, case)]
        if case != "bf16" and of_seeds:
            found[case] = report.spread(of_seeds)
    return found


def draw(results: dict, figures: Path) -> None:
    """Training loss over that of bf16, means of 50 steps and of the seeds."""
    figure, axes = style.figure(3)
    for case in results["ratio"]:
        both = pairs(results["results"], case)
        losses = torch.tensor([[run["training"] for run in pair] for pair in both])
        ratio = (losses[:, 0] / losses[:, 1]).mean(0)
        ends = [WINDOW * (i + 1) for i in range(len(ratio))]
        axes.plot(ends, (100 * (ratio - 1)).tolist(), label=case)
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set(xlabel="step", ylabel="training loss over that of bf16, %")
    axes.legend()
    style.save(figure, figures / "fp8_training.svg")


def main():
    parser = report.arguments(__doc__, seeds=3, steps=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = report.parse(parser, seeds=1, steps=3)
    torch.set_num_threads(1)
    runs = report.earlier("fp8_training", parser, args)
    fields = TOY if args.toy else {}
    jobs = []
    for seed in range(args.seeds):
        todo = [case for case in CASES if case not in runs.get(f"seed {seed}", {})]
        jobs += [(case, seed, args.steps, args.lr, fields) for case in todo]
    jobs.sort(key=lambda job: job[0] == MUTATION)
    if args.toy:
        # bf16 and the mutation: starting a process takes seconds
        jobs = [jobs[0], jobs[-1]]
    results = {"toy": args.toy, "steps": args.steps, "lr": args.lr, "results": runs}
    # threads of this process's OpenMP do not survive a fork of it
    context = multiprocessing.get_context("forkserver")
    # a process for each run: one case changes fp8.py
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for case, seed, run in pool.imap_unordered(measure, jobs):
            runs.setdefault(f"seed {seed}", {})[case] = run
            results["ratio"] = ratios(runs)
            print(f"seed {seed}, {case}: held out {run['held_out']:.4f}", flush=True)
            report.write("fp8_training", results, args)
    results["ratio"] = ratios(runs)
    for case, ratio in results["ratio"].items():
        print(f"{case}: held-out loss over that of bf16 {report.format_spread(ratio, '.4f')}")
    report.finish("fp8_training", results, args, draw)


if __name__ == "__main__":
    main()
