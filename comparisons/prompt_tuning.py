r"""A frozen model learns to tell languages apart: accuracy before, with prompt tuning, with
p-tuning, and with full fine-tuning as the ceiling.

    python train.py --seq-length 256 --steps 2400 --warmup-steps 100 --eval-every 600 \
                    --out runs/base
    python comparisons/prompt_tuning.py --base runs/base [--seeds 0 1 2]

The first command trains the model on Python's library, in 20 to 40 minutes on 2 cores. The second
takes an hour and a half. It keeps each result as soon as it is there, and goes on after it was
stopped. --toy runs all of it in seconds, without --base with a tiny model of its own.

The task: in which language is a snippet of 64 characters (snippets.py)? The model has read only
Python.

The answer is a letter and an end of text, generated greedily. It is right when it is equal. The
untuned model does not know that a letter is asked for; there, the likeliest of the five letters
counts as its answer.

Figure: figures/prompt_tuning.svg
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import report
import style
import torch
from snippets import LANGUAGES, LENGTH, SIZES, TASK, TOY_SIZES, snippets

import checkpoint
import generate
import prompt_tuning
import sharding
import train
from inference import loading
from prompts import nemo_config, prompt_file
from proof import kinds
from tuning.frozen_base import fingerprint

PROMPTS = "p-tuning", "prompt-tuning"
QUESTION = "\n# language: "
# virtual tokens, where they are not what is compared
TOKENS = 10
STEPS = {"p-tuning": 600, "prompt-tuning": 600, "fine-tuning": 200}
LEARNING_RATES = {"p-tuning": 0.03, "prompt-tuning": 0.1, "fine-tuning": 1e-3}
# of p-tuning's encoder
ENCODER = {"encoder_type": "mlp", "encoder_hidden": 32, "num_layers": 3, "init_std": 0.3}


# --- learning it ----------------------------------------------------------------------------------


@dataclass
class Experiment:
    folder: Path
    # run or checkpoint of the frozen model
    base: str
    device: str
    training: list[dict]
    test: list[dict]
    # of training: {style: steps}
    steps: dict[str, int]
    # whether training snippets of more than LENGTH bytes are cut: padding is to the longest one
    cut: bool = False


def write_lines(path: Path, lines: list[dict]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def template_of(task: str, text: str, tokens: int) -> dict:
    """A text, virtual tokens, and the label, which is learned."""
    prompt = "<|VIRTUAL_PROMPT_0|>" if tokens else ""
    return {
        "taskname": task,
        "prompt_template": text + prompt + "{label}",
        "total_virtual_tokens": tokens,
        "virtual_token_splits": [tokens] if tokens else [],
        "answer_only_loss": True,
        "answer_field": "label",
    }


def write_settings(experiment: Experiment, style: str, tokens: int, lines: list[dict]) -> Path:
    """The configuration of prompts, with its training and test lines. tokens: virtual
    tokens, 0 for fine-tuning."""
    folder = experiment.folder
    template = template_of(TASK, "{snippet}" + QUESTION, tokens) | {"truncate_field": "snippet"}
    settings = {
        "virtual_prompt_style": style,
        "new_tasks": [TASK],
        "task_templates": [template],
        "data": {
            "train_ds": [write_lines(folder / "train.jsonl", lines)],
            "validation_ds": [write_lines(folder / "test.jsonl", experiment.test)],
        },
        "prompt_tuning": {
            "new_prompt_init_methods": ["text"],
            "new_prompt_init_text": ["Python, C++, CMake, SVG or English? "],
        },
        "p_tuning": ENCODER,
    }
    if experiment.cut:
        # the last token, end of text, is only a target
        longest = LENGTH + len(QUESTION) + tokens + len("P")
        settings["data"]["max_seq_length"] = longest
    path = folder / "prompts.json"
    path.write_text(json.dumps(settings))
    return path


def as_argv(flags: str, **paths) -> list[str]:
    """flags: separated by spaces; paths: of flags that name a file or folder, which may have
    spaces."""
    argv = flags.split()
    for flag, path in paths.items():
        argv += [f"--{flag.replace('_', '-')}", str(path)]
    return argv


def run_train(flags: str, **paths) -> None:
    """A command in this process, by default train.py, with the flags of `as_argv`. Exits if it
    fails, or if a signal has stopped it: what has learned for a part of the steps is no result."""
    kind, argv = kinds.split(as_argv(flags, **paths))
    status = train.main(argv, kind)
    if status:
        sys.exit(status)
    index = checkpoint.read_index(checkpoint.find(paths["out"]))
    if index["step"] < index["config"]["steps"]:
        sys.exit(130)


def training_flags(experiment: Experiment, seed: int, steps: int, lr: float) -> str:
    """Those that all methods have in common."""
    return (
        f"prompt_tuning.py train --seed {seed} --steps {steps} --lr {lr}"
        " --warmup-steps 20 --global-batch-size 32 --weight-decay 0.01"
        f" --save-every 0 --eval-every 0 --device {experiment.device}"
    )


def learn(
    experiment: Experiment,
    style: str,
    seed: int,
    tokens: int,
    lines: list[dict],
    lr: float | None = None,
) -> float:
    """Accuracy, by train.py and generate.py. lr: by default that of LEARNING_RATES."""
    out = experiment.folder / f"{style}-{seed}-{tokens}-{len(lines)}"
    settings = write_settings(experiment, style, tokens, lines)
    run_train(
        training_flags(experiment, seed, experiment.steps[style], lr or LEARNING_RATES[style]),
        config=settings,
        load=experiment.base,
        out=out,
    )
    config = nemo_config.PromptConfig.read(settings)
    fine_tuned = style == "fine-tuning"
    model, index = loading.load_model(out if fine_tuned else experiment.base, experiment.device)
    tokenizer = loading.find_tokenizer(experiment.base, index)
    first_id = model.config.vocab_size
    if not fine_tuned:
        identity = fingerprint(experiment.base, model.config)
        config, tables = prompt_file.load(out / "prompts.safetensors", identity)
        first_id = prompt_tuning.apply_tables(model, config, tables)[TASK]
    return task_accuracy(experiment, config, model, tokenizer, first_id)


def num_learned(experiment: Experiment, style: str) -> int:
    """Parameters of the prompts, and of p-tuning's encoder; or of the whole model."""
    model, index = loading.load_model(experiment.base, experiment.device)
    if style == "fine-tuning":
        return sharding.num_parameters(model)
    settings = write_settings(experiment, style, TOKENS, experiment.training)
    config = nemo_config.PromptConfig.read(settings)
    tokenizer = loading.find_tokenizer(experiment.base, index)
    h = model.config.hidden_size
    embedding = torch.zeros(model.config.vocab_size, h)
    values = prompt_tuning.initial_values(config, h, 0, tokenizer, embedding)
    return sum(value.numel() for value in values.values())


def task_accuracy(
    experiment: Experiment, config: nemo_config.PromptConfig, model, tokenizer, first_id: int
) -> float:
    """Of a model that has learned the task. first_id: of the task's virtual tokens."""
    template = config.templates[TASK]
    prompts = []
    for line in experiment.test:
        filled = template.fill(line, tokenizer, first_id, model.config.seq_length, answer=False)
        prompts.append(filled.ids)
    return accuracy(model, tokenizer, prompts, experiment.test)


def accuracy(model, tokenizer, prompts: list[list[int]], test: list[dict], batch: int = 100):
    """The share of right answers, generated for `batch` prompts at a time."""
    correct = 0
    for start in range(0, len(test), batch):
        answers = generate.generate(
            model, prompts[start : start + batch], 3, temperature=0, eot=tokenizer.eot
        )
        for line, ids in zip(test[start : start + batch], answers):
            correct += tokenizer.decode(ids) == line["label"]
    return correct / len(test)


# --- without learning -----------------------------------------------------------------------------


def untuned(experiment: Experiment):
    """(model, tokenizer, prompts)"""
    model, index = loading.load_model(experiment.base, experiment.device)
    tokenizer = loading.find_tokenizer(experiment.base, index)
    texts = [line["snippet"] + QUESTION for line in experiment.test]
    return model, tokenizer, [list(map(int, tokenizer.encode(text))) for text in texts]


@torch.no_grad()
def likeliest_letter_accuracy(experiment: Experiment) -> float:
    """Of the untuned model, which is given the choice of the letters."""
    model, tokenizer, prompts = untuned(experiment)
    letters = list(LANGUAGES)
    ids = [int(tokenizer.encode(letter)[0]) for letter in letters]
    correct = 0
    for line, prompt in zip(experiment.test, prompts):
        logits = model(torch.tensor([prompt], device=experiment.device))[0, -1]
        correct += letters[int(logits[ids].argmax())] == line["label"]
    return correct / len(experiment.test)


def free_accuracy(experiment: Experiment) -> float:
    """Of the untuned model, which generates what it likes."""
    model, tokenizer, prompts = untuned(experiment)
    return accuracy(model, tokenizer, prompts, experiment.test, batch=1)


def toy_base(folder: Path, device: str) -> str:
    """The run of a tiny model that has learned nothing."""
    text = folder / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 500)
    run_train(
        "--model tiny --num-layers 2 --hidden-size 32 --num-heads 4 --ffn-hidden-size 64"
        f" --seq-length 256 --steps 1 --global-batch-size 2 --device {device}",
        data=text,
        out=folder / "base",
    )
    return str(folder / "base")


# --------------------------------------------------------------------------------------------------
# all results: {"accuracy": {what: number or spread}, "parameters": {style: number},
# "by_tokens" and "by_examples": {style: {number: spread}}}


def of_seeds(experiment: Experiment, style: str, seeds: list[int], tokens: int, n: int) -> dict:
    """The spread of accuracies. n: of the training lines, the first."""
    lines = experiment.training[:n]
    return report.spread([learn(experiment, style, seed, tokens, lines) for seed in seeds])


def measure_all(experiment: Experiment, notes: report.Notes, args: argparse.Namespace) -> None:
    every = len(experiment.training)
    likeliest = partial(likeliest_letter_accuracy, experiment)
    notes.note("accuracy", "untuned", measure=likeliest)
    free = partial(free_accuracy, experiment)
    notes.note("accuracy", "untuned, freely generated", measure=free)
    for method in ("p-tuning", "fine-tuning", "prompt-tuning"):
        notes.note("parameters", method, measure=partial(num_learned, experiment, method))
        tokens = 0 if method == "fine-tuning" else TOKENS
        whole = partial(of_seeds, experiment, method, args.seeds, tokens, every)
        notes.note("accuracy", method, measure=whole)
    for method in PROMPTS:
        # the whole task is a point of both curves
        accuracy = notes.read()["accuracy"][method]
        notes.note("by_tokens", method, TOKENS, measure=lambda found=accuracy: found)
        notes.note("by_examples", method, every, measure=lambda found=accuracy: found)
        curve = partial(of_seeds, experiment, method, args.curve_seeds)
        for n in args.tokens:
            notes.note("by_tokens", method, n, measure=partial(curve, n, every))
        for n in args.examples:
            notes.note("by_examples", method, n, measure=partial(curve, TOKENS, n))


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


def arguments(doc: str, **counts: int) -> argparse.ArgumentParser:
    """The flags of comparisons that learn this task."""
    parser = report.arguments(doc, **counts)
    base = "run or checkpoint of the model, with the byte tokenizer"
    parser.add_argument("--base", metavar="DIR", help=base)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    report.device(parser)
    fresh = "measures again what its JSON file under --out has already"
    parser.add_argument("--fresh", action="store_true", help=fresh)
    return parser


def parse(parser: argparse.ArgumentParser, **toy) -> argparse.Namespace:
    args = report.parse(parser, seeds=[0], **toy)
    if not args.toy and not args.base:
        what = "the run or checkpoint of a model with the byte tokenizer"
        report.refuse(parser, f"--base DIR is missing: {what}")
    return args


def make_experiment(args: argparse.Namespace, folder: Path, cut: bool = False) -> Experiment:
    training, test = snippets(TOY_SIZES if args.toy else SIZES)
    steps = dict.fromkeys(STEPS, 1) if args.toy else STEPS
    base = args.base or toy_base(folder, args.device)
    return Experiment(folder, base, args.device, training, test, steps, cut)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 10, 30])
    parser.add_argument("--examples", nargs="+", type=int, default=[100, 500, 2000])
    curves = "seeds of the two curves"
    parser.add_argument("--curve-seeds", nargs="+", type=int, default=[0], help=curves)
    args = parse(parser, tokens=[TOKENS], examples=[TOY_SIZES[0]])
    notes = report.Notes("prompt_tuning", args)
    with tempfile.TemporaryDirectory() as folder:
        measure_all(make_experiment(args, Path(folder)), notes, args)
    results = notes.read()
    print_summary(results)
    report.finish("prompt_tuning", results, args, draw)


if __name__ == "__main__":
    main()
