r"""Ways to fine-tune, on one task: full fine-tuning, LoRA of three ranks, bottleneck adapters, IA3,
p-tuning and prompt tuning.

    python train.py --seq-length 256 --steps 2400 --warmup-steps 100 --eval-every 600 \
                    --out runs/base --keep 4
    python -m benchmarks.fine_tuning --base runs/base/checkpoints/step-001800 [--seeds 0 1 2]
    python -m benchmarks.fine_tuning --prompts --base runs/base

In which of five languages is a snippet of 64 characters? (language_task.py.) Adapters learn from
the templates of prompts: `prompt_tuning.py --peft`, virtual_prompt_style fine-tuning.
Training takes 20 to 40 minutes on two cores, each comparison an hour or more. A result is kept as
soon as it is there, and a command goes on after it was stopped. Several share the work: under one
--out, with other --methods each. With --toy the base is a tiny model that has learned nothing.

    accuracy    on snippets of unseen files, with each seed
    memory      bytes after backward in weights, gradients and optimizer state, in storages that are
                counted once, beside the formula. Activations are left out.
    seconds     one step of each method in turn, in one process; a ratio is to full fine-tuning in
                the same round

--prompts: p-tuning and prompt tuning against the number of virtual tokens and of examples, between
the untuned model and full fine-tuning. Without it training snippets are cut to 64 tokens: a few
have up to 154 bytes, and padding all to the longest would double the time of a step.

Figures: docs/figures/fine_tuning.svg; with --prompts docs/figures/prompt_tuning.svg
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

from base.model_config import GPTConfig
from benchmarks import language_task as task
from benchmarks import report, style
from benchmarks.language_task import Experiment, Method
from benchmarks.steps import seconds_of_step, state_tensors
from course.fsdp import storage_bytes

# --- methods --------------------------------------------------------------------------------------


FULL = "full fine-tuning"


def peft(flags: str, lr: float) -> Method:
    return Method("fine-tuning", lr, f"--peft {flags}")


def lora(rank: int, lr: float) -> Method:
    """The scale α / r of B A x is 2 for every rank."""
    return peft(f"lora --lora-rank {rank} --lora-alpha {2 * rank}", lr)


METHODS = {
    FULL: task.FULL,
    "LoRA, rank 32": lora(32, 2e-3),
    "LoRA, rank 8": lora(8, 5e-3),
    "LoRA, rank 2": lora(2, 5e-3),
    "adapters, size 32": peft("adapter", 3e-3),
    # vectors have no weight decay, so any but the default is refused
    "IA3": peft("ia3 --weight-decay 0.1", 1e-1),
    "p-tuning": task.P_TUNING,
}
# with --toy; the other ranks are the same code
TOY_METHODS = [name for name in METHODS if name not in ("LoRA, rank 32", "LoRA, rank 2")]
# Of --prompts.
PROMPTS = {"p-tuning": task.P_TUNING, "prompt-tuning": task.PROMPT_TUNING}
ALL_PROMPTS = {"fine-tuning": task.FULL} | PROMPTS


def learned_by_formula(name: str, config: GPTConfig) -> int:
    """How many parameters a method learns in a model without biases, or with tied embeddings."""
    h, L, f = config.hidden_size, config.num_layers, config.ffn_hidden_size
    kv = config.num_kv_heads * config.head_dim
    # [in, out] of query, key, value, output, gate, up, down
    linears = [(h, h), (h, kv), (h, kv), (h, h), (h, f), (h, f), (f, h)]
    weights = sum(a * b for a, b in linears)
    if name == FULL:
        # embedding and head; two norms in each layer, and one in the head
        return L * weights + 2 * config.vocab_size * h + (2 * L + 1) * h
    if name == "IA3":
        return L * (2 * kv + f)
    if name == "p-tuning":
        n = task.TOKENS
        e = task.ENCODER["encoder_hidden"]
        # vectors, then an MLP of three layers
        return n * h + (h + 1) * e + (e + 1) * e + (e + 1) * h
    size = int(name.split()[-1])
    if name.startswith("LoRA"):
        return L * size * sum(a + b for a, b in linears)
    # after attention and after the MLP: a norm, D and U
    return L * 2 * (2 * h + 2 * h * size)


# --- memory and time of a step --------------------------------------------------------------------


PARTS = ("weights", "gradients", "optimizer state")


def held_bytes(trainer) -> dict[str, int]:
    """Bytes by part, after a backward. A storage counts once, in the first part that has it: in
    float32 a weight is its own master."""
    parameters = list(trainer.model.parameters())
    gradients = [getattr(p, "main_grad", None) for p in parameters]
    seen = []
    held = {}
    for part, tensors in zip(PARTS, (parameters, gradients, state_tensors(trainer.optimizer))):
        before = storage_bytes(seen)
        seen += tensors
        held[part] = storage_bytes(seen) - before
    return held


def measure_memory(experiment: Experiment, name: str) -> dict:
    """{precision: {"measured": {part: bytes}, "formula": {part: bytes}}}"""
    result = {}
    # bytes of a weight, and of its state: in bf16 masters are float32, in float32 there are none
    for precision, weight, state in (("fp32", 4, 8), ("bf16", 2, 12)):
        trainer, dataset = task.make_trainer(experiment, METHODS[name], f"--precision {precision}")
        trainer.forward_backward(1, dataset)
        config = trainer.model_config
        learned = learned_by_formula(name, config)
        # with those of the model, if these are not the same
        parameters = learned + (learned_by_formula(FULL, config) if name != FULL else 0)
        formula = dict(zip(PARTS, (weight * parameters, 4 * learned, state * learned)))
        result[precision] = {"measured": held_bytes(trainer), "formula": formula}
        result["learned"] = task.num_learned(trainer)
    return result


def measure_seconds(experiment: Experiment, names: list[str], rounds: int) -> dict:
    """{method: {"seconds": spread, "ratio": spread}}, and how busy the machine was."""
    trainers = {name: task.make_trainer(experiment, METHODS[name]) for name in names}
    kinds = {name: partial(seconds_of_step, *both) for name, both in trainers.items()}
    before = os.getloadavg()[0]
    times = report.in_turn(kinds, rounds)
    result = {"load_average": [before, os.getloadavg()[0]], "processors": os.cpu_count()}
    for name in names:
        result[name] = {
            "seconds": report.spread([t[name] for t in times]),
            "ratio": report.ratio(times, name, FULL),
        }
    return result


# --------------------------------------------------------------------------------------------------
# all results: {"untuned": accuracy, "accuracy": {method: {seed: accuracy}}, "memory": {method: ..},
# "seconds": {method: {"seconds": spread, "ratio": spread}}}


def measure_all(experiment: Experiment, notes: report.Notes, args: argparse.Namespace) -> None:
    likeliest = partial(task.likeliest_letter_accuracy, experiment)
    notes.note("untuned", measure=likeliest)
    for name in args.methods:
        notes.note("memory", name, measure=partial(measure_memory, experiment, name))
    for seed in args.seeds:
        for name in args.methods:
            measure = partial(task.learn, experiment, METHODS[name], seed)
            notes.note("accuracy", name, seed, measure=measure)


# --- figure ---------------------------------------------------------------------------------------


def names_in(results: dict) -> list[str]:
    """The methods that were measured, in the order of METHODS."""
    return [name for name in METHODS if name in results["accuracy"]]


def mebibytes(results: dict, name: str) -> dict[str, float]:
    """{part: held in float32}"""
    held = results["memory"][name]["fp32"]["measured"]
    return {part: size / 2**20 for part, size in held.items()}


def print_summary(results: dict) -> None:
    """way: from the untuned model (0) to full fine-tuning (1), by medians over seeds."""
    before = results["untuned"]
    names = names_in(results)
    accuracy = {name: report.spread(results["accuracy"][name].values()) for name in names}
    table = report.Table()
    for name in names:
        gained = [accuracy[method]["median"] - before for method in (name, FULL)]
        cells = {"": name, "parameters": results["memory"][name]["learned"]}
        cells |= {"MiB": sum(mebibytes(results, name).values()), "accuracy": accuracy[name]}
        cells |= {"way": gained[0] / (gained[1] or 1)}
        table.row(cells | {f"step, of {FULL}": results["seconds"][name]["ratio"]})


def draw_methods(axes, results: dict) -> None:
    """Three panels with a row for each method."""
    accuracy, memory, seconds = axes
    names = names_in(results)
    colour = style.SERIES[0]
    spreads = [report.spread(results["accuracy"][name].values()) for name in names]
    style.ranges(accuracy, range(len(names)), spreads, colour)
    accuracy.axvline(results["untuned"], color="black", linestyle="--", linewidth=1)
    where = (results["untuned"], len(names) - 1)
    style.label(accuracy, "untuned", where, offset=(4, 0))
    accuracy.set(xlim=(0, 1), xlabel="accuracy on unseen files")
    for y, name in enumerate(names):
        end = style.stack(memory, y, mebibytes(results, name), style.COLOURS)
        learned = results["memory"][name]["learned"]
        style.label(memory, f"{learned:,}", (end, y), offset=(3, 0))
    full = sum(mebibytes(results, FULL).values())
    memory.legend(loc="lower right")
    memory.set(xlim=(0, 1.8 * full), xlabel="MiB, and parameters learned")
    ratios = [results["seconds"][name]["ratio"] for name in names]
    style.ranges(seconds, range(len(names)), ratios, colour)
    seconds.axvline(1, color="black", linewidth=0.8)
    seconds.set(xlabel="time of a step, over full")
    style.rows_of(accuracy, names)


def draw(results: dict, figures: Path) -> None:
    """results: what fine_tuning.json or prompt_tuning.json holds."""
    if "by_tokens" in results:
        draw_prompts(results, figures)
        return
    figure, panels = style.figure(2.9, 1, 3)
    draw_methods(panels, results)
    for axes in panels[1:]:
        style.rows_of(axes, names_in(results), hidden=True)
    style.save(figure, figures / "fine_tuning.svg")


# --------------------------------------------------------------------------------------------------
# --prompts. All results: {"accuracy": {what: number or spread}, "parameters": {style: number},
# "by_tokens" and "by_examples": {style: {number: spread}}}


def of_seeds(
    experiment: Experiment, name: str, seeds: list[int], tokens: int | None = None, n: int = 10**9
) -> dict:
    """The spread of accuracies. n: of the training lines, the first."""
    lines = experiment.training[:n]
    method = ALL_PROMPTS[name]
    return report.spread([task.learn(experiment, method, seed, tokens, lines) for seed in seeds])


def num_learned(experiment: Experiment, name: str) -> int:
    """Parameters of the prompts, and of p-tuning's encoder; or of the whole model."""
    return task.num_learned(task.make_trainer(experiment, ALL_PROMPTS[name])[0])


def measure_prompts(experiment: Experiment, notes: report.Notes, args: argparse.Namespace) -> None:
    likeliest = partial(task.likeliest_letter_accuracy, experiment)
    notes.note("accuracy", "untuned", measure=likeliest)
    free = partial(task.free_accuracy, experiment)
    notes.note("accuracy", "untuned, freely generated", measure=free)
    for name in ALL_PROMPTS:
        notes.note("parameters", name, measure=partial(num_learned, experiment, name))
        notes.note("accuracy", name, measure=partial(of_seeds, experiment, name, args.seeds))
    for name in PROMPTS:
        # the whole task is a point of both curves
        accuracy = notes.read()["accuracy"][name]
        notes.note("by_tokens", name, task.TOKENS, measure=lambda found=accuracy: found)
        every = len(experiment.training)
        notes.note("by_examples", name, every, measure=lambda found=accuracy: found)
        curve = partial(of_seeds, experiment, name, args.curve_seeds)
        for n in args.tokens:
            notes.note("by_tokens", name, n, measure=partial(curve, n))
        for n in args.examples:
            notes.note("by_examples", name, n, measure=partial(curve, task.TOKENS, n))


def print_prompts(results: dict) -> None:
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


def draw_prompts(results: dict, figures: Path) -> None:
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
    parser = task.arguments(__doc__, rounds=11)
    methods = "accuracy and memory of these alone (default: everything)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=methods)
    prompts = "the curves of prompts instead"
    parser.add_argument("--prompts", action="store_true", help=prompts)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 10, 30])
    parser.add_argument("--examples", nargs="+", type=int, default=[100, 500, 2000])
    curves = "seeds of the two curves"
    parser.add_argument("--curve-seeds", nargs="+", type=int, default=[0], help=curves)
    args = task.parse(parser, rounds=1, tokens=[task.TOKENS], examples=[task.TOY_SIZES[0]])
    name = "prompt_tuning" if args.prompts else "fine_tuning"
    notes = report.Notes(name, args)
    with tempfile.TemporaryDirectory() as folder:
        experiment = task.make_experiment(args, Path(folder), cut=not args.prompts)
        if args.prompts:
            measure_prompts(experiment, notes, args)
        else:
            everything = args.methods is None
            args.methods = args.methods or (TOY_METHODS if args.toy else [*METHODS])
            measure_all(experiment, notes, args)
            if not everything:
                return
            seconds = partial(measure_seconds, experiment, args.methods, args.rounds)
            notes.note("seconds", measure=seconds)
    results = notes.read()
    (print_prompts if args.prompts else print_summary)(results)
    report.finish(name, results, args, draw)


if __name__ == "__main__":
    main()
