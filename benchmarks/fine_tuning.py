r"""Ways to fine-tune, on one task: full fine-tuning, LoRA of three ranks, bottleneck adapters, IA3
and p-tuning. Accuracy, learned parameters, memory, and seconds of a step.

    python train.py --seq-length 256 --steps 2400 --warmup-steps 100 --eval-every 600 \
                    --out runs/base --keep 4
    python -m benchmarks.fine_tuning --base runs/base/checkpoints/step-001800 [--seeds 0 1 2]

The task, the model and the two ways at the ends, full fine-tuning and p-tuning, are those of
benchmarks/language_task.py: in which of five languages is a snippet of 64 characters? Adapters
learn from the same templates: `prompt_tuning.py --peft`, virtual_prompt_style fine-tuning.

The model is the one after 1,800 of these steps. The second command takes an hour on one processor.
It keeps each result as soon as it is there, and goes on after it was stopped. Several of them share
the work: under one --out, with other --methods each. --toy runs all of it in seconds, without
--base with a tiny model of its own.

Snippets have 64 characters, but a few have up to 154 bytes, which are tokens here. For training
they are cut to 64: padding all of them to the longest one would double the time of a step.

Learning rates: `--sweep` trains a method for 60 steps with seed 7, which is not reported, on all
training snippets but 300, and tests it on these; the model was the one after 1,400 steps. The best
rate is in METHODS (of two that are within 0.01, the lower one). Rank 2 has that of rank 8.

    memory      bytes after backward in weights, gradients and optimizer state, in storages that are
                counted once, beside the formula. Activations are left out.
    seconds     one step of each method in turn, in one process; a ratio is to full fine-tuning in
                the same round

Figure: docs/figures/fine_tuning.svg
"""

import argparse
import dataclasses
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


def peft(flags: str, lr: float, *rates: float) -> Method:
    return Method("fine-tuning", lr, f"--peft {flags}", rates)


def lora(rank: int, lr: float, *rates: float) -> Method:
    """The scale α / r of B A x is 2 for every rank."""
    return peft(f"lora --lora-rank {rank} --lora-alpha {2 * rank}", lr, *rates)


METHODS = {
    FULL: task.FULL,
    "LoRA, rank 32": lora(32, 2e-3, 2e-3, 5e-3),
    "LoRA, rank 8": lora(8, 5e-3, 2e-3, 5e-3, 1e-2),
    "LoRA, rank 2": lora(2, 5e-3),
    "adapters, size 32": peft("adapter", 3e-3, 3e-3, 1e-2),
    # vectors have no weight decay, so any but the default is refused
    "IA3": peft("ia3 --weight-decay 0.1", 1e-1, 3e-2, 1e-1),
    "p-tuning": task.P_TUNING,
}
# with --toy; the other ranks are the same code
TOY_METHODS = [name for name in METHODS if name not in ("LoRA, rank 32", "LoRA, rank 2")]
SWEEP_SEED = 7
SWEEP_STEPS = 60
# of the training snippets, those on which --sweep tests
SWEEP_TEST = 300


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
# "seconds": {method: {"seconds": spread, "ratio": spread}}, "sweep": {method: {rate: accuracy}}}


def measure_sweep(experiment: Experiment, notes: report.Notes, names: list[str]) -> None:
    """Neither the test snippets nor their files are seen."""
    lines = experiment.training
    n = min(SWEEP_TEST, len(lines) // 4)
    steps = {style: min(steps, SWEEP_STEPS) for style, steps in experiment.steps.items()}
    changes = dict(training=lines[:-n], test=lines[-n:], steps=steps)
    experiment = dataclasses.replace(experiment, **changes)
    for name in names:
        for rate in METHODS[name].rates:
            method = dataclasses.replace(METHODS[name], lr=rate)
            notes.note(
                "sweep", name, rate, measure=partial(task.learn, experiment, method, SWEEP_SEED)
            )


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
    """results: what fine_tuning.json holds."""
    figure, panels = style.figure(2.9, 1, 3)
    draw_methods(panels, results)
    for axes in panels[1:]:
        style.rows_of(axes, names_in(results), hidden=True)
    style.save(figure, figures / "fine_tuning.svg")


def arguments() -> argparse.Namespace:
    parser = task.arguments(__doc__, rounds=11)
    methods = "accuracy and memory of these alone (default: everything)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=methods)
    parser.add_argument("--sweep", action="store_true", help="compare learning rates instead")
    args = task.parse(parser, rounds=1)
    args.everything = args.methods is None
    args.methods = args.methods or (TOY_METHODS if args.toy else [*METHODS])
    return args


def main():
    args = arguments()
    notes = report.Notes("fine_tuning", args)
    with tempfile.TemporaryDirectory() as folder:
        experiment = task.make_experiment(args, Path(folder), cut=True)
        if args.sweep:
            measure_sweep(experiment, notes, args.methods)
            return
        measure_all(experiment, notes, args)
        if not args.everything:
            return
        seconds = partial(measure_seconds, experiment, args.methods, args.rounds)
        notes.note("seconds", measure=seconds)
    results = notes.read()
    print_summary(results)
    report.finish("fine_tuning", results, args, draw)


if __name__ == "__main__":
    main()
