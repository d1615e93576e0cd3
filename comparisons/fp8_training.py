"""What FP8 does to the loss: the default model on the default corpus, bf16 beside three recipes.

    python comparisons/fp8_training.py [--seeds 3] [--steps 1000] [--lr 1e-3] [--toy] [--out DIR]

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

Figure: figures/fp8_training.svg
"""

import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import style
import torch

import data
import train
from base.world import Groups, keep_freed_memory
from corpus.tokenizer import ByteTokenizer
from precision import fp8_scaling

CASES = {
    "bf16": {},
    "bf16, other sums": {"micro_batch_size": 8},
    "current": {"fp8": "current"},
    "delayed": {"fp8": "delayed"},
    "block": {"fp8": "block"},
    "e4m3 everywhere": {"fp8": "current"},
}
TOY = dict(
    model="tiny", num_layers=3, hidden_size=32, num_heads=4, ffn_hidden_size=64, seq_length=32
)
# sequences of the held-out loss
HELD_OUT = 256
HELD_OUT_TOY = 8
# steps, of means
WINDOW = 50


def measure(case: str, seed: int, steps: int, lr: float, fields: dict) -> dict:
    """One run, on one thread. fields: of train.Config, empty for the default model. Losses are in
    nats per byte; those of training are means of 50 steps. saturated: of these 50, the steps in
    which some tensor had values beyond its scale."""
    torch.set_num_threads(1)
    keep_freed_memory()
    if case == "e4m3 everywhere":
        fp8_scaling.Recipe.format = lambda self, operand: fp8_scaling.E4M3
    config = train.Config(
        precision="bf16", seed=seed, steps=steps, lr=lr, device="cpu", **CASES[case], **fields
    )
    trainer = train.Trainer(config, torch.device("cpu"), Groups())
    folder = data.prepare([], ByteTokenizer())
    train_set = data.Corpus(folder, trainer.model_config.seq_length, seed)
    held_out = data.Corpus(folder, trainer.model_config.seq_length, None, "held-out")
    losses, saturated = [], []
    for step in range(1, steps + 1):
        losses.append(trainer.forward_backward(step, train_set).item())
        trainer.update(step)
        if trainer.fp8:
            warnings = fp8_scaling.warnings(trainer.fp8.report)
            saturated.append("fp8_saturated" in warnings)
    return {
        "held_out": trainer.task.evaluate(held_out, HELD_OUT_TOY if fields else HELD_OUT),
        "training": [sum(part) / len(part) for part in pieces(losses)],
        "saturated": [sum(part) for part in pieces(saturated)],
        "skipped_steps": int(trainer.optimizer.skipped),
    }


def pieces(of_steps: list) -> list[list]:
    return [of_steps[i : i + WINDOW] for i in range(0, len(of_steps), WINDOW)]


def in_own_process(job: tuple) -> tuple[str, int, dict]:
    case, seed, *rest = job
    return case, seed, measure(case, seed, *rest)


def ratios(runs: dict) -> dict:
    """Held-out loss of each case over that of bf16 with the same seed, for seeds that have both."""
    found = {}
    for case in CASES:
        pairs = [(of[case], of["bf16"]) for of in runs.values() if {case, "bf16"} <= of.keys()]
        if case != "bf16" and pairs:
            found[case] = report.spread([run["held_out"] / bf16["held_out"] for run, bf16 in pairs])
    return found


def draw(results: dict, figures: Path) -> None:
    """Training loss over that of bf16, means of 50 steps and of the seeds."""
    figure, axes = style.figure(3)
    for case in results["ratio"]:
        each = []
        for of_seed in results["results"].values():
            if {case, "bf16"} <= of_seed.keys():
                pairs = torch.tensor([of_seed[name]["training"] for name in (case, "bf16")])
                each.append(pairs[0] / pairs[1])
        ratio = torch.stack(each).mean(0)
        steps = [WINDOW * (i + 1) for i in range(len(ratio))]
        axes.plot(steps, (100 * (ratio - 1)).tolist(), label=case)
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set(xlabel="step", ylabel="training loss over that of bf16, %")
    axes.legend()
    style.save(figure, figures / "fp8_training.svg")


def missing(runs: dict, seeds: int) -> list[tuple[str, int]]:
    """(case, seed) without results, the mutation last."""
    pairs = [(case, seed) for seed in range(seeds) for case in CASES]
    pairs.sort(key=lambda pair: pair[0] == "e4m3 everywhere")
    return [(case, seed) for case, seed in pairs if case not in runs.get(f"seed {seed}", {})]


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=1000)
    args = report.parse(parser)
    fields = TOY if args.toy else {}
    if args.toy:
        args.seeds = 1
        args.steps = 3
    torch.set_num_threads(1)
    runs = report.earlier("fp8_training", parser, args)
    jobs = [(*pair, args.steps, args.lr, fields) for pair in missing(runs, args.seeds)]
    if args.toy:
        # bf16 and the mutation: starting a process takes seconds
        jobs = [jobs[0], jobs[-1]]
    results = {"toy": args.toy, "steps": args.steps, "lr": args.lr, "results": runs}
    # threads of this process's OpenMP do not survive a fork of it
    context = multiprocessing.get_context("forkserver")
    # a process for each run: one case changes precision/fp8_scaling.py
    with context.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for case, seed, run in pool.imap_unordered(in_own_process, jobs):
            runs.setdefault(f"seed {seed}", {})[case] = run
            results["ratio"] = ratios(runs)
            print(f"seed {seed}, {case}: held out {run['held_out']:.4f}", flush=True)
            report.write("fp8_training", results, args)
    results["ratio"] = ratios(runs)
    for case, ratio in results["ratio"].items():
        print(f"{case}: held-out loss over that of bf16 {report.format_spread(ratio, '.4f')}")
    report.save("fp8_training", results, args)
    draw(results, args.figures)


if __name__ == "__main__":
    main()
