r"""A frozen model learns to tell languages apart: accuracy before, with prompt tuning, with
p-tuning, and with full fine-tuning as the ceiling.

    python train.py --seq-length 256 --steps 2400 --warmup-steps 100 --eval-every 600 \
                    --out runs/base
    python -m benchmarks.prompt_tuning --base runs/base [--seeds 0 1 2]

The first command trains the model on Python's library, in 20 to 40 minutes on 2 cores. The second
takes an hour and a half. It keeps each result as soon as it is there, and goes on after it was
stopped. --toy runs all of it in seconds, without --base with a tiny model of its own.

The task, in language_task.py: in which language is a snippet of 64 characters?

Figure: docs/figures/prompt_tuning.svg
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import language_task as task
from benchmarks import report, style
from benchmarks.language_task import TOKENS, TOY_SIZES, Experiment

METHODS = {
    "p-tuning": task.P_TUNING,
    "fine-tuning": task.FULL,
    "prompt-tuning": task.PROMPT_TUNING,
}
PROMPTS = "p-tuning", "prompt-tuning"

# --------------------------------------------------------------------------------------------------
# all results: {"accuracy": {what: number or spread}, "parameters": {style: number},
# "by_tokens" and "by_examples": {style: {number: spread}}}


def of_seeds(
    experiment: Experiment, name: str, seeds: list[int], tokens: int | None = None, n: int = 10**9
) -> dict:
    """The spread of accuracies. n: of the training lines, the first."""
    lines = experiment.training[:n]
    method = METHODS[name]
    return report.spread([task.learn(experiment, method, seed, tokens, lines) for seed in seeds])


def num_learned(experiment: Experiment, name: str) -> int:
    """Parameters of the prompts, and of p-tuning's encoder; or of the whole model."""
    return task.num_learned(task.make_trainer(experiment, METHODS[name])[0])


def measure_all(experiment: Experiment, notes: report.Notes, args: argparse.Namespace) -> None:
    likeliest = partial(task.likeliest_letter_accuracy, experiment)
    notes.note("accuracy", "untuned", measure=likeliest)
    free = partial(task.free_accuracy, experiment)
    notes.note("accuracy", "untuned, freely generated", measure=free)
    for name in METHODS:
        notes.note("parameters", name, measure=partial(num_learned, experiment, name))
        notes.note("accuracy", name, measure=partial(of_seeds, experiment, name, args.seeds))
    for name in PROMPTS:
        # the whole task is a point of both curves
        accuracy = notes.read()["accuracy"][name]
        notes.note("by_tokens", name, TOKENS, measure=lambda found=accuracy: found)
        every = len(experiment.training)
        notes.note("by_examples", name, every, measure=lambda found=accuracy: found)
        curve = partial(of_seeds, experiment, name, args.curve_seeds)
        for n in args.tokens:
            notes.note("by_tokens", name, n, measure=partial(curve, n))
        for n in args.examples:
            notes.note("by_examples", name, n, measure=partial(curve, TOKENS, n))


def print_summary(results: dict) -> None:
    before = results["accuracy"]["untuned"]
    ceiling = results["accuracy"]["fine-tuning"]["median"]
    for method in PROMPTS:
        reached = results["accuracy"][method]["median"]
        share = (reached - before) / (ceiling - before or 1)
        print(
            f"{method}: {reached:.3f}, {share:.2f} of the way from {before:.3f} to {ceiling:.3f},"
            f" {results['parameters'][method]:,} parameters learned"
        )


def draw_curve(axes, curves: dict[str, dict]) -> None:
    """curves: {style of learning: {number of tokens or examples: spread}}"""
    for name, curve in curves.items():
        points = {int(n): curve[n] for n in sorted(curve, key=int)}
        style.band(axes, list(points), list(points.values()), style.COLOURS[name], name)
    style.ticks(axes, x=sorted({int(n) for curve in curves.values() for n in curve}))
    axes.set_ylim(0, 1)


def draw(results: dict, figures: Path) -> None:
    """results: what prompt_tuning.json holds."""
    figure, (left, right) = style.figure(3.2, 1, 2, sharey=True)
    draw_curve(left, results["by_tokens"])
    draw_curve(right, results["by_examples"])
    left.set(xlabel="virtual tokens", ylabel="accuracy on unseen files")
    right.set(xlabel="training examples")
    levels = {
        "full fine-tuning": results["accuracy"]["fine-tuning"]["median"],
        "untuned": results["accuracy"]["untuned"],
    }
    for axes in (left, right):
        for text, y in levels.items():
            axes.axhline(y, color=style.COLOURS["fine-tuning"], linestyle="--", linewidth=1)
            if axes is right:
                start = axes.get_xlim()[0]
                style.label(axes, text, (start, y), offset=(2, 6))
    style.label_ends(right)
    style.save(figure, figures / "prompt_tuning.svg")


def main():
    parser = task.arguments(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 10, 30])
    parser.add_argument("--examples", nargs="+", type=int, default=[100, 500, 2000])
    curves = "seeds of the two curves"
    parser.add_argument("--curve-seeds", nargs="+", type=int, default=[0], help=curves)
    args = task.parse(parser, tokens=[TOKENS], examples=[TOY_SIZES[0]])
    notes = report.Notes("prompt_tuning", args)
    with tempfile.TemporaryDirectory() as folder:
        measure_all(task.make_experiment(args, Path(folder)), notes, args)
    results = notes.read()
    print_summary(results)
    report.finish("prompt_tuning", results, args, draw)


if __name__ == "__main__":
    main()
