r"""A frozen model learns to tell languages apart: accuracy before, with prompt tuning, with
p-tuning, and with full fine-tuning as the ceiling.

    python train.py --seq-length 256 --steps 2400 --warmup-steps 100 --eval-every 600 \
                    --out runs/base
    python comparisons/prompt_tuning.py --base runs/base [--seeds 0 1 2]

The first command trains the model on Python's library, in 20 to 40 minutes on 2 cores. The second
takes an hour and a half. It keeps each result as soon as it is there, and goes on after it was
stopped. --toy runs all of it in seconds, without --base with a tiny model of its own.

The task: in which language is a snippet of 64 characters? Python comes from the standard library;
C++, CMake, SVG and English (package descriptions) from the packages that requirements.txt installs.
The model has read only Python. Files are split, so that no test snippet comes from a file that was
trained on. Each language has as many snippets as the others.

The answer is a letter and an end of text, generated greedily. It is right when it is equal. The
untuned model does not know that a letter is asked for; there, the likeliest of the five letters
counts as its answer.

Figure: figures/prompt_tuning.svg
"""

import argparse
import json
import random
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import style
import torch

import checkpoint
import generate
import gpt
import prompt_tuning
import sharding
import train
from base import json_files
from corpus import documents
from inference import loading
from prompts import prompt_data, prompt_file
from tuning.frozen_base import fingerprint

SITE = Path(torch.__file__).parent.parent
# letter: (folder, files)
LANGUAGES = {
    "P": (Path(sysconfig.get_path("stdlib")), "*.py"),
    "C": (SITE / "torch" / "include", "*.h"),
    "M": (SITE / "torch" / "share", "*.cmake"),
    "S": (SITE / "matplotlib", "*.svg"),
    "E": (SITE, "*.dist-info/METADATA"),
}
TASK = "language"
# characters of a snippet
LENGTH = 64
QUESTION = "\n# language: "
# snippets: (training, test)
SIZES = (2000, 300)
TOY_SIZES = (20, 5)
# virtual tokens, where they are not what is compared
TOKENS = 10
STEPS = {"p-tuning": 600, "prompt-tuning": 600, "fine-tuning": 200}
LEARNING_RATES = {"p-tuning": 0.03, "prompt-tuning": 0.1, "fine-tuning": 1e-3}
# of p-tuning's encoder
ENCODER = {"encoder_type": "mlp", "encoder_hidden": 32, "num_layers": 3, "init_std": 0.3}


# --------------------------------------------------------------------------------------------------
# the task


def texts_of(letter: str, generator: random.Random) -> list[str]:
    """The beginnings, up to 20,000 characters, of at most 200 files in a language."""
    folder, pattern = LANGUAGES[letter]
    files = documents.standard_library() if letter == "P" else sorted(folder.rglob(pattern))
    files = [file for file in files if file.stat().st_size > 800]
    generator.shuffle(files)
    return [file.read_text(errors="ignore")[:20000] for file in files[:200]]


def draw_lines(texts: list[str], letter: str, n: int, generator: random.Random) -> list[dict]:
    """n snippets that begin with a line, most of each not blank. A text is drawn by its length."""
    lines = []
    while len(lines) < n:
        text = generator.choices(texts, [len(t) for t in texts])[0]
        position = generator.randrange(max(1, len(text) - LENGTH))
        begin = text.rfind("\n", 0, position) + 1
        snippet = text[begin : begin + LENGTH]
        if len(snippet.strip()) >= 0.6 * LENGTH:
            lines.append({"taskname": TASK, "snippet": snippet, "label": letter})
    return lines


def snippets(sizes: tuple[int, int], seed: int = 0) -> tuple[list[dict], list[dict]]:
    """(training, test) lines, in random order. Every fourth file of a language is for the test."""
    generator = random.Random(seed)
    training = []
    test = []
    for letter in LANGUAGES:
        texts = texts_of(letter, generator)
        to_train = [text for i, text in enumerate(texts) if i % 4]
        training += draw_lines(to_train, letter, sizes[0] // len(LANGUAGES), generator)
        test += draw_lines(texts[::4], letter, sizes[1] // len(LANGUAGES), generator)
    generator.shuffle(training)
    generator.shuffle(test)
    return training, test


# --------------------------------------------------------------------------------------------------
# learning it


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


def write_settings(experiment: Experiment, style: str, tokens: int, lines: list[dict]) -> Path:
    """The configuration of --prompt-config, with its training and test lines. tokens: virtual
    tokens, 0 for fine-tuning."""
    folder = experiment.folder
    prompt = "<|VIRTUAL_PROMPT_0|>" if tokens else ""
    template = {
        "taskname": TASK,
        "prompt_template": "{snippet}" + QUESTION + prompt + "{label}",
        "total_virtual_tokens": tokens,
        "virtual_token_splits": [tokens] if tokens else [],
        "truncate_field": "snippet",
        "answer_only_loss": True,
        "answer_field": "label",
    }
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
    """train.py in this process, with the flags of `as_argv`. Exits if it fails, or if a signal has
    stopped it: what has learned for a part of the steps is no result."""
    status = train.main(as_argv(flags, **paths))
    if status:
        sys.exit(status)
    index = checkpoint.read_index(checkpoint.find(paths["out"]))
    if index["step"] < index["config"]["steps"]:
        sys.exit(130)


def training_flags(experiment: Experiment, seed: int, steps: int, lr: float) -> str:
    """Those that all methods have in common."""
    return (
        f"--seed {seed} --steps {steps} --lr {lr}"
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
) -> tuple[float, int]:
    """(accuracy, parameters learned), by train.py and generate.py. lr: by default that of
    LEARNING_RATES."""
    out = experiment.folder / f"{style}-{seed}-{tokens}-{len(lines)}"
    settings = write_settings(experiment, style, tokens, lines)
    run_train(
        training_flags(experiment, seed, experiment.steps[style], lr or LEARNING_RATES[style]),
        prompt_config=settings,
        load=experiment.base,
        out=out,
    )
    config = prompt_data.PromptConfig.read(settings)
    if style == "fine-tuning":
        model, index = loading.load_model(out, experiment.device)
        tokenizer = loading.find_tokenizer(experiment.base, index)
        first_id = model.config.vocab_size
        learned = sharding.num_parameters(model)
    else:
        model, index = loading.load_model(experiment.base, experiment.device)
        tokenizer = loading.find_tokenizer(experiment.base, index)
        learned = num_learned(config, model, tokenizer)
        identity = fingerprint(experiment.base, model.config)
        config, tables = prompt_file.load(out / "prompts.safetensors", identity)
        first_id = prompt_tuning.apply_tables(model, config, tables)[TASK]
    return task_accuracy(experiment, config, model, tokenizer, first_id), learned


def num_learned(config: prompt_data.PromptConfig, model: gpt.GPT, tokenizer) -> int:
    """Parameters of the prompts, and of p-tuning's encoder."""
    embedding = torch.zeros(model.config.vocab_size, model.config.hidden_size)
    values = prompt_tuning.initial_values(config, model.config.hidden_size, 0, tokenizer, embedding)
    return sum(value.numel() for value in values.values())


def task_accuracy(
    experiment: Experiment, config: prompt_data.PromptConfig, model, tokenizer, first_id: int
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


# --------------------------------------------------------------------------------------------------
# without learning


def untuned(experiment: Experiment):
    """(model, tokenizer, prompts)"""
    model, index = loading.load_model(experiment.base, experiment.device)
    tokenizer = loading.find_tokenizer(experiment.base, index)
    prompts = []
    for line in experiment.test:
        prompts.append([int(i) for i in tokenizer.encode(line["snippet"] + QUESTION)])
    return model, tokenizer, prompts


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


class Measurements:
    """The results so far. Each is saved as soon as it is there."""

    def __init__(self, args: argparse.Namespace, results: dict):
        self.args = args
        self.results = results

    def note(self, table: dict, key, measure, *arguments) -> None:
        """Measure what is not there yet."""
        if str(key) not in table:
            table[str(key)] = measure(*arguments)
            print(key, table[str(key)], flush=True)
            report.save("prompt_tuning", self.results, self.args)

    def spread(
        self, experiment: Experiment, style: str, seeds: list[int], tokens: int, lines: list[dict]
    ) -> dict:
        runs = [learn(experiment, style, seed, tokens, lines) for seed in seeds]
        _, learned = runs[0]
        self.results["parameters"].setdefault(style, learned)
        return report.spread([share for share, _ in runs])

    def all(self, experiment: Experiment) -> None:
        table = self.results["accuracy"]
        lines = experiment.training
        self.note(table, "untuned", likeliest_letter_accuracy, experiment)
        self.note(table, "untuned, freely generated", free_accuracy, experiment)
        for method in ("p-tuning", "fine-tuning", "prompt-tuning"):
            tokens = 0 if method == "fine-tuning" else TOKENS
            seeds = self.args.seeds
            self.note(table, method, self.spread, experiment, method, seeds, tokens, lines)
        seeds = self.args.curve_seeds
        for method in ("p-tuning", "prompt-tuning"):
            by_tokens = self.results["by_tokens"].setdefault(method, {})
            by_examples = self.results["by_examples"].setdefault(method, {})
            by_tokens[str(TOKENS)] = table[method]
            by_examples[str(len(lines))] = table[method]
            for n in self.args.tokens:
                self.note(by_tokens, n, self.spread, experiment, method, seeds, n, lines)
            for n in self.args.examples:
                some = lines[:n]
                self.note(by_examples, n, self.spread, experiment, method, seeds, TOKENS, some)


def print_summary(results: dict) -> None:
    before = results["accuracy"]["untuned"]
    ceiling = results["accuracy"]["fine-tuning"]["median"]
    for method in ("p-tuning", "prompt-tuning"):
        reached = results["accuracy"][method]["median"]
        share = (reached - before) / (ceiling - before or 1)
        print(
            f"{method}: {reached:.3f}, {share:.2f} of the way from"
            f" {before:.3f} to {ceiling:.3f}, {results['parameters'][method]:,} parameters learned"
        )


def draw_curve(axes, curves: dict[str, dict]) -> None:
    """curves: {style of learning: {number of tokens or examples: spread}}"""
    ticks = sorted({int(n) for curve in curves.values() for n in curve})
    for name, curve in curves.items():
        points = sorted((int(n), r) for n, r in curve.items())
        x = [n for n, _ in points]
        colour = style.COLOURS[name]
        axes.plot(x, [r["median"] for _, r in points], "o-", color=colour, label=name)
        least = [r["min"] for _, r in points]
        most = [r["max"] for _, r in points]
        axes.fill_between(x, least, most, color=colour, alpha=0.15, linewidth=0)
    axes.set(xscale="log", xticks=ticks, xticklabels=ticks, ylim=(0, 1))
    axes.minorticks_off()


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


def arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = report.arguments(__doc__)
    parser.add_argument(
        "--base", metavar="DIR", help="run or checkpoint of the model, with the byte tokenizer"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 10, 30])
    parser.add_argument("--examples", nargs="+", type=int, default=[100, 500, 2000])
    parser.add_argument(
        "--curve-seeds", nargs="+", type=int, default=[0], help="seeds of the two curves"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="measures again what prompt_tuning.json under --out has already",
    )
    args = report.parse(parser)
    if args.toy:
        args.seeds = args.seeds[:1]
        args.tokens = [TOKENS]
        args.examples = [TOY_SIZES[0]]
    elif not args.base:
        report.refuse(
            parser,
            "--base DIR is missing: the run or checkpoint of a model with the byte tokenizer",
        )
    return parser, args


def saved_results(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict:
    """Those of an earlier run under the same --out, or empty tables."""
    results = {"accuracy": {}, "parameters": {}, "by_tokens": {}, "by_examples": {}}
    saved = args.out / "prompt_tuning.json"
    if saved.exists() and not args.fresh and not args.toy:
        try:
            results |= json_files.read(saved, dict)
        except json_files.JSONError as e:
            report.refuse(parser, f"{e}; --fresh measures everything again")
        results.pop("environment", None)
    return results


def main():
    parser, args = arguments()
    training, test = snippets(TOY_SIZES if args.toy else SIZES)
    results = saved_results(parser, args)
    steps = dict.fromkeys(STEPS, 1) if args.toy else STEPS
    with tempfile.TemporaryDirectory() as folder:
        base = args.base or toy_base(Path(folder), args.device)
        experiment = Experiment(Path(folder), base, args.device, training, test, steps)
        Measurements(args, results).all(experiment)
    print_summary(results)
    draw(report.saved("prompt_tuning", args), args.figures)


if __name__ == "__main__":
    main()
