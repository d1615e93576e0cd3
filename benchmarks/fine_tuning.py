r"""Ways to fine-tune, on one task: full fine-tuning, LoRA of three ranks, bottleneck adapters, IA3,
p-tuning and prompt tuning.

    python train.py --seq-length 256 --steps 2400 --warmup-steps 100 --eval-every 600 \
                    --out runs/base --keep 4
    python -m benchmarks.fine_tuning --base runs/base/checkpoints/step-001800 [--seeds 0 1 2]
    python -m benchmarks.fine_tuning --prompts --base runs/base

In which of five languages is a snippet of 64 characters? The model has read only Python. Snippets
come from the standard library and from installed packages; every fourth file is for the test. The
answer, a letter and an end of text, is generated greedily; of the untuned model, the likeliest of
the five letters counts. Adapters learn from the templates of prompts: `prompt_tuning.py --peft`.

Training takes 20 to 40 minutes on two cores, each comparison an hour or more. A result is kept as
soon as it is there, and a command goes on after it was stopped. Several share the work: under one
--out, with other --methods each. With --toy the base has learned nothing.

    accuracy    on snippets of unseen files, with each seed
    memory      bytes after backward in weights, gradients and optimizer state, beside the formula
    seconds     one step of each method in turn; a ratio is to full fine-tuning in the same round

--prompts: p-tuning and prompt tuning against the number of virtual tokens and of examples. Without
it training snippets are cut to 64 tokens: a few have up to 154 bytes, and all are padded to the
longest.

Figures: docs/figures/fine_tuning.svg; with --prompts docs/figures/prompt_tuning.svg
"""

import argparse
import json
import os
import random
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

import generate
import prompt_tuning
import train
from base.groups import Groups
from base.model_config import GPTConfig
from benchmarks import report, style
from benchmarks.steps import as_argv, run_train, seconds_of_step, state_tensors, write_lines
from course import training_commands
from course.fsdp import storage_bytes
from finetune import nemo_config, prompt_file
from finetune.frozen_base import fingerprint
from inference import loading
from inference.adapted import Adapters
from run import documents, flags, rules

# --- snippets -------------------------------------------------------------------------------------

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
# Characters of a snippet.
LENGTH = 64
# snippets: (training, test)
SIZES = (2000, 300)
TOY_SIZES = (20, 5)


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


def snippets(sizes: tuple[int, int]) -> tuple[list[dict], list[dict]]:
    """(training, test) lines, in random order. Every fourth file of a language is for the test."""
    generator = random.Random(0)
    training, test = [], []
    for letter in LANGUAGES:
        texts = texts_of(letter, generator)
        to_train = [text for i, text in enumerate(texts) if i % 4]
        training += draw_lines(to_train, letter, sizes[0] // len(LANGUAGES), generator)
        test += draw_lines(texts[::4], letter, sizes[1] // len(LANGUAGES), generator)
    generator.shuffle(training)
    generator.shuffle(test)
    return training, test


# --- learning it ----------------------------------------------------------------------------------

QUESTION = "\n# language: "
# Virtual tokens, where they are not what is compared.
TOKENS = 10
# The encoder of p-tuning.
ENCODER = {"encoder_type": "mlp", "encoder_hidden": 32, "num_layers": 3, "init_std": 0.3}


class Method(NamedTuple):
    # The virtual_prompt_style of the configuration.
    style: str
    steps: int
    lr: float
    # Flags of the command.
    flags: str = ""


FULL = Method("fine-tuning", 200, 1e-3)
P_TUNING = Method("p-tuning", 600, 0.03)
PROMPT_TUNING = Method("prompt-tuning", 600, 0.1)


class Experiment:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.folder, self.device = folder, args.device
        # Run or checkpoint of the frozen model.
        self.base = args.base or toy_base(folder, args.device)
        self.training, self.test = snippets(TOY_SIZES if args.toy else SIZES)
        self.toy = args.toy
        # Whether training snippets of more than LENGTH bytes are cut: padding is to the longest.
        self.cut = not args.prompts

    def open_base(self) -> tuple:
        """(model, tokenizer)"""
        model, index = loading.load_model(self.base, self.device)
        return model, loading.find_tokenizer(self.base, index)


def run_flags(
    experiment: Experiment,
    folder: Path,
    method: Method,
    seed: int = 0,
    tokens: int | None = None,
    n: int | None = None,
) -> tuple[str, dict]:
    """(flags, {flag: path}) of a run in `folder`, where its configuration and its lines are
    written. tokens: virtual tokens; n: of the training lines, the first."""
    if tokens is None:
        tokens = 0 if method.style == "fine-tuning" else TOKENS
    prompt = "<|VIRTUAL_PROMPT_0|>" if tokens else ""
    template = {
        "taskname": TASK,
        "prompt_template": "{snippet}" + QUESTION + prompt + "{label}",
        "total_virtual_tokens": tokens,
        "virtual_token_splits": [tokens] if tokens else [],
        "answer_only_loss": True,
        "answer_field": "label",
        "truncate_field": "snippet",
    }
    settings = {
        "virtual_prompt_style": method.style,
        "new_tasks": [TASK],
        "task_templates": [template],
        "data": {
            "train_ds": [write_lines(folder / "train.jsonl", experiment.training[:n])],
            "validation_ds": [write_lines(folder / "test.jsonl", experiment.test)],
        },
        "prompt_tuning": {
            "new_prompt_init_methods": ["text"],
            "new_prompt_init_text": ["Python, C++, CMake, SVG or English? "],
        },
        "p_tuning": ENCODER,
    }
    if experiment.cut:
        # The last token, end of text, is only a target.
        settings["data"]["max_seq_length"] = LENGTH + len(QUESTION) + tokens + len("P")
    path = folder / "prompts.json"
    path.write_text(json.dumps(settings))
    words = (
        f"prompt_tuning.py --seed {seed} --steps {1 if experiment.toy else method.steps}"
        f" --lr {method.lr} --warmup-steps 20 --global-batch-size 32 --weight-decay 0.01"
        f" --save-every 0 --eval-every 0 --device {experiment.device} {method.flags}"
    )
    return words, dict(config=path, load=experiment.base, out=folder / "run")


def learn(experiment: Experiment, method: Method, *options) -> float:
    """Accuracy, by `prompt_tuning.py` and generate.py. The run's files are removed. options: seed,
    tokens and n of `run_flags`."""
    with tempfile.TemporaryDirectory(dir=experiment.folder) as folder:
        words, paths = run_flags(experiment, Path(folder), method, *options)
        run_train(words, **paths)
        model, tokenizer = experiment.open_base()
        config = nemo_config.PromptConfig.read(paths["config"])
        first_id = model.config.vocab_size
        if method.style != "fine-tuning":
            identity = fingerprint(experiment.base, model.config, loading.read_base)
            config, tables = prompt_file.load(paths["out"] / "prompts.safetensors", identity)
            first_id = prompt_tuning.apply_tables(model, tables)[TASK]
        elif "--peft" in method.flags:
            learned = Adapters([str(paths["out"])], experiment.base, model.config)
            learned.put(model, Groups())
        else:
            model, _ = loading.load_model(paths["out"], experiment.device)
        fill = config.templates[TASK].fill
        s = model.config.seq_length
        prompts = [fill(line, tokenizer, first_id, s, answer=False) for line in experiment.test]
        return accuracy(model, tokenizer, [prompt.ids for prompt in prompts], experiment.test)


def accuracy(model, tokenizer, prompts: list[list[int]], test: list[dict], batch: int = 100):
    """The share of right answers, generated for `batch` prompts at a time."""
    correct = 0
    for start in range(0, len(test), batch):
        some = prompts[start : start + batch]
        answers = generate.generate(model, some, 3, temperature=0, eot=tokenizer.eot)
        for line, ids in zip(test[start : start + batch], answers):
            correct += tokenizer.decode(ids) == line["label"]
    return correct / len(test)


def make_trainer(experiment: Experiment, method: Method, flags_besides: str = ""):
    """(trainer, training set) of a method. Weights are random."""
    folder = Path(tempfile.mkdtemp(dir=experiment.folder))
    words, paths = run_flags(experiment, folder, method)
    config_class, argv = training_commands.split(as_argv(f"{words} {flags_besides}", **paths))
    config = flags.parse(argv, 0, config_class)
    rules.validate(config, 1)
    _, index, _ = loading.open_model(experiment.base)
    tokenizer = loading.find_tokenizer(experiment.base, index)
    task = config.task()
    silent = SimpleNamespace(say=lambda text: None)
    dataset, _ = task.open_data(config, silent, tokenizer)
    return train.Trainer(config, torch.device(experiment.device), Groups(), task), dataset


def num_learned(trainer) -> int:
    return sum(p.numel() for p in trainer.optimizer.parameters.values())


# --- without learning -----------------------------------------------------------------------------


def questions(experiment: Experiment, tokenizer) -> list[list[int]]:
    texts = [line["snippet"] + QUESTION for line in experiment.test]
    return [list(map(int, tokenizer.encode(text))) for text in texts]


@torch.no_grad()
def likeliest_letter_accuracy(experiment: Experiment) -> float:
    """The untuned model is given the choice of the letters."""
    model, tokenizer = experiment.open_base()
    letters = list(LANGUAGES)
    ids = [int(tokenizer.encode(letter)[0]) for letter in letters]
    correct = 0
    for line, prompt in zip(experiment.test, questions(experiment, tokenizer)):
        logits = model(torch.tensor([prompt], device=experiment.device))[0, -1]
        correct += letters[int(logits[ids].argmax())] == line["label"]
    return correct / len(experiment.test)


def free_accuracy(experiment: Experiment) -> float:
    """The untuned model generates what it likes."""
    model, tokenizer = experiment.open_base()
    return accuracy(model, tokenizer, questions(experiment, tokenizer), experiment.test, batch=1)


# --- a base, and what is compared -----------------------------------------------------------------


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


# --- methods --------------------------------------------------------------------------------------


ALL = "full fine-tuning"


def peft(flags: str, lr: float) -> Method:
    return FULL._replace(lr=lr, flags=f"--peft {flags}")


def lora(rank: int, lr: float) -> Method:
    """The scale α / r of B A x is 2 for every rank."""
    return peft(f"lora --lora-rank {rank} --lora-alpha {2 * rank}", lr)


METHODS = {
    ALL: FULL,
    "LoRA, rank 32": lora(32, 2e-3),
    "LoRA, rank 8": lora(8, 5e-3),
    "LoRA, rank 2": lora(2, 5e-3),
    "adapters, size 32": peft("adapter", 3e-3),
    # Vectors have no weight decay, so any but the default is refused.
    "IA3": peft("ia3 --weight-decay 0.1", 1e-1),
    "p-tuning": P_TUNING,
}
# The other ranks of LoRA are the same code.
TOY_METHODS = [name for name in METHODS if name not in ("LoRA, rank 32", "LoRA, rank 2")]
# The methods of --prompts.
PROMPTS = {"p-tuning": P_TUNING, "prompt-tuning": PROMPT_TUNING}
ALL_PROMPTS = {"fine-tuning": FULL} | PROMPTS


def learned_by_formula(name: str, config: GPTConfig) -> int:
    """How many parameters a method learns in a model without biases, or with tied embeddings."""
    h, L, f = config.hidden_size, config.num_layers, config.ffn_hidden_size
    kv = config.num_kv_heads * config.head_dim
    # [in, out] of query, key, value, output, gate, up, down
    linears = [(h, h), (h, kv), (h, kv), (h, h), (h, f), (h, f), (f, h)]
    weights = sum(a * b for a, b in linears)
    if name == ALL:
        # Embedding and head; two norms in each layer, and one in the head.
        return L * weights + 2 * config.vocab_size * h + (2 * L + 1) * h
    if name == "IA3":
        return L * (2 * kv + f)
    if name == "p-tuning":
        n = TOKENS
        e = ENCODER["encoder_hidden"]
        # Vectors, then an MLP of three layers.
        return n * h + (h + 1) * e + (e + 1) * e + (e + 1) * h
    size = int(name.split()[-1])
    if name.startswith("LoRA"):
        return L * size * sum(a + b for a, b in linears)
    # After attention and after the MLP: a norm, D and U.
    return L * 2 * (2 * h + 2 * h * size)


# --- memory and time of a step --------------------------------------------------------------------


PARTS = ("weights", "gradients", "optimizer state")


def held_bytes(trainer) -> dict[str, int]:
    """Bytes by part, after a backward. A storage counts once, in the first part that has it: in
    float32 a weight is its own master."""
    parameters = list(trainer.model.parameters())
    gradients = [getattr(p, "main_grad", None) for p in parameters]
    seen, held = [], {}
    for part, tensors in zip(PARTS, (parameters, gradients, state_tensors(trainer.optimizer))):
        before = storage_bytes(seen)
        seen += tensors
        held[part] = storage_bytes(seen) - before
    return held


def measure_memory(experiment: Experiment, name: str) -> dict:
    """{precision: {"measured": {part: bytes}, "formula": {part: bytes}}}"""
    result = {}
    # Bytes of a weight, and of its state: in bf16 masters are float32, in float32 there are none.
    for precision, weight, state in (("fp32", 4, 8), ("bf16", 2, 12)):
        trainer, dataset = make_trainer(experiment, METHODS[name], f"--precision {precision}")
        trainer.forward_backward(1, dataset)
        config = trainer.model_config
        learned = learned_by_formula(name, config)
        # With those of the model, if these are not the same.
        parameters = learned + (learned_by_formula(ALL, config) if name != ALL else 0)
        formula = dict(zip(PARTS, (weight * parameters, 4 * learned, state * learned)))
        result[precision] = {"measured": held_bytes(trainer), "formula": formula}
        result["learned"] = num_learned(trainer)
    return result


def measure_seconds(experiment: Experiment, names: list[str], rounds: int) -> dict:
    """{method: {"seconds": spread, "ratio": spread}}, and how busy the machine was."""
    trainers = {name: make_trainer(experiment, METHODS[name]) for name in names}
    kinds = {name: partial(seconds_of_step, *both) for name, both in trainers.items()}
    before = os.getloadavg()[0]
    times = report.in_turn(kinds, rounds)
    result = {"load_average": [before, os.getloadavg()[0]], "processors": os.cpu_count()}
    for name in names:
        result[name] = {
            "seconds": report.spread([t[name] for t in times]),
            "ratio": report.ratio(times, name, ALL),
        }
    return result


# --------------------------------------------------------------------------------------------------
# all results: {"untuned": accuracy, "accuracy": {method: {seed: accuracy}}, "memory": {method: ..},
# "seconds": {method: {"seconds": spread, "ratio": spread}}}


def measure_all(experiment: Experiment, note: Callable, args: argparse.Namespace) -> None:
    note("untuned", measure=partial(likeliest_letter_accuracy, experiment))
    for name in args.methods:
        note("memory", name, measure=partial(measure_memory, experiment, name))
    for seed in args.seeds:
        for name in args.methods:
            measure = partial(learn, experiment, METHODS[name], seed)
            note("accuracy", name, seed, measure=measure)


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
        gained, most = (accuracy[method]["median"] - before for method in (name, ALL))
        cells = {"": name, "parameters": results["memory"][name]["learned"]}
        cells |= {"MiB": sum(mebibytes(results, name).values()), "accuracy": accuracy[name]}
        cells |= {"way": gained / (most or 1)}
        table.row(cells | {f"step, of {ALL}": results["seconds"][name]["ratio"]})


def draw(results: dict, figures: Path) -> None:
    """results: what fine_tuning.json or prompt_tuning.json holds. Of the first three panels with a
    row for each method."""
    if "by_tokens" in results:
        draw_prompts(results, figures)
        return
    figure, (accuracy, memory, seconds) = style.figure(2.9, 1, 3)
    names, colour = names_in(results), style.SERIES[0]
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
    full = sum(mebibytes(results, ALL).values())
    memory.legend(loc="lower right")
    memory.set(xlim=(0, 1.8 * full), xlabel="MiB, and parameters learned")
    ratios = [results["seconds"][name]["ratio"] for name in names]
    style.ranges(seconds, range(len(names)), ratios, colour)
    seconds.axvline(1, color="black", linewidth=0.8)
    seconds.set(xlabel="time of a step, over full")
    for axes in (accuracy, memory, seconds):
        style.rows_of(axes, names, hidden=axes is not accuracy)
    style.save(figure, figures / "fine_tuning.svg")


# --------------------------------------------------------------------------------------------------
# --prompts. All results: {"accuracy": {what: number or spread}, "parameters": {style: number},
# "by_tokens" and "by_examples": {style: {number: spread}}}


def of_seeds(experiment: Experiment, name: str, seeds: list[int], *options) -> dict:
    """The spread of accuracies. options: of `learn`, after the seed."""
    method = ALL_PROMPTS[name]
    return report.spread([learn(experiment, method, seed, *options) for seed in seeds])


def measure_prompts(experiment: Experiment, note: Callable, args: argparse.Namespace) -> None:
    note("accuracy", "untuned", measure=partial(likeliest_letter_accuracy, experiment))
    note("accuracy", "untuned, freely generated", measure=partial(free_accuracy, experiment))
    for name, method in ALL_PROMPTS.items():
        make = partial(make_trainer, experiment, method)
        note("parameters", name, measure=lambda make=make: num_learned(make()[0]))
        note("accuracy", name, measure=partial(of_seeds, experiment, name, args.seeds))
    for name in PROMPTS:
        # The whole task is a point of both curves.
        whole = partial(report.saved("prompt_tuning", args)["accuracy"].get, name)
        note("by_tokens", name, TOKENS, measure=whole)
        note("by_examples", name, len(experiment.training), measure=whole)
        curve = partial(of_seeds, experiment, name, args.curve_seeds)
        for n in args.tokens:
            note("by_tokens", name, n, measure=partial(curve, n))
        for n in args.examples:
            note("by_examples", name, n, measure=partial(curve, TOKENS, n))


def print_prompts(results: dict) -> None:
    before = results["accuracy"]["untuned"]
    ceiling = results["accuracy"]["fine-tuning"]["median"]
    table = report.Table()
    for method in PROMPTS:
        reached = results["accuracy"][method]["median"]
        cells = {"": method, "parameters": results["parameters"][method], "accuracy": reached}
        table.row(cells | {"way": (reached - before) / (ceiling - before or 1)})


def draw_prompts(results: dict, figures: Path) -> None:
    """results: what prompt_tuning.json holds. A curve of each style of learning, against the number
    of virtual tokens, and of examples."""
    figure, panels = style.figure(3.2, 1, 2, sharey=True)
    levels = {
        "full fine-tuning": results["accuracy"]["fine-tuning"]["median"],
        "untuned": results["accuracy"]["untuned"],
    }
    for axes, key in zip(panels, ("by_tokens", "by_examples")):
        for name, curve in results[key].items():
            points = {int(n): curve[n] for n in sorted(curve, key=int)}
            style.band(axes, list(points), list(points.values()), style.COLOURS[name], name)
        style.ticks(axes, x=sorted({int(n) for curve in results[key].values() for n in curve}))
        axes.set_ylim(0, 1)
        for y in levels.values():
            axes.axhline(y, color=style.COLOURS["fine-tuning"], linestyle="--", linewidth=1)
    left, right = panels
    left.set(xlabel="virtual tokens", ylabel="accuracy on unseen files")
    right.set(xlabel="training examples")
    for text, y in levels.items():
        style.label(right, text, (right.get_xlim()[0], y), offset=(2, 6))
    style.label_ends(right)
    style.save(figure, figures / "prompt_tuning.svg")


def main():
    curves = dict(tokens=[1, 10, 30], examples=[100, 500, 2000], curve_seeds=[0])
    parser = report.arguments(__doc__, rounds=11, seeds=[0, 1, 2], **curves)
    base = "run or checkpoint of the model, with the byte tokenizer"
    parser.add_argument("--base", metavar="DIR", help=base)
    report.device(parser)
    fresh = "measures again what its JSON file under --out has already"
    parser.add_argument("--fresh", action="store_true", help=fresh)
    methods = "accuracy and memory of these alone (default: everything)"
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="NAME", help=methods)
    prompts = "the curves of prompts instead"
    parser.add_argument("--prompts", action="store_true", help=prompts)
    toy = dict(rounds=1, seeds=[0], tokens=[TOKENS], examples=[TOY_SIZES[0]])
    args = report.parse(parser, **toy)
    if not args.toy and not args.base:
        report.refuse(parser, f"--base DIR is missing: {base}")
    name = "prompt_tuning" if args.prompts else "fine_tuning"
    if args.fresh or args.toy:
        (args.out / f"{name}.json").unlink(missing_ok=True)
    note = partial(report.note, name, args)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(args, Path(folder))
        if args.prompts:
            measure_prompts(experiment, note, args)
        else:
            everything = args.methods is None
            args.methods = args.methods or (TOY_METHODS if args.toy else [*METHODS])
            measure_all(experiment, note, args)
            if not everything:
                return
            seconds = partial(measure_seconds, experiment, args.methods, args.rounds)
            note("seconds", measure=seconds)
    results = report.saved(name, args)
    # Of the last process that measured.
    del results["environment"]
    (print_prompts if args.prompts else print_summary)(results)
    report.finish(name, results, args, draw)


if __name__ == "__main__":
    main()
