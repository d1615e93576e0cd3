"""The task that fine_tuning.py learns: in which language is a snippet of 64
characters? The model has read only Python.

Python comes from the standard library; C++, CMake, SVG and English (package descriptions) from the
packages that pyproject.toml names. Files are split, so that no test snippet comes from a file
that was trained on. Each language has as many snippets as the others.

The answer is a letter and an end of text, generated greedily. It is right when it is equal. The
untuned model does not know that a letter is asked for; there, the likeliest of the five letters
counts as its answer.
"""

import argparse
import json
import random
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

import generate
import prompt_tuning
import train
from base.groups import Groups
from benchmarks import report
from benchmarks.steps import as_argv, run_train, write_lines
from course import kinds
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
# characters of a snippet
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


# --- learning it ----------------------------------------------------------------------------------

QUESTION = "\n# language: "
# virtual tokens, where they are not what is compared
TOKENS = 10
STEPS = {"p-tuning": 600, "prompt-tuning": 600, "fine-tuning": 200}
# of p-tuning's encoder
ENCODER = {"encoder_type": "mlp", "encoder_hidden": 32, "num_layers": 3, "init_std": 0.3}


@dataclass(frozen=True)
class Method:
    # of the configuration
    style: str
    lr: float
    # of the command
    flags: str = ""

    @property
    def tokens(self) -> int:
        """Virtual tokens."""
        return 0 if self.style == "fine-tuning" else TOKENS


FULL = Method("fine-tuning", 1e-3)
P_TUNING = Method("p-tuning", 0.03)
PROMPT_TUNING = Method("prompt-tuning", 0.1)


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

    def open_base(self) -> tuple:
        """(model, tokenizer)"""
        model, index = loading.load_model(self.base, self.device)
        return model, loading.find_tokenizer(self.base, index)


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


def run_flags(
    experiment: Experiment, folder: Path, method: Method, seed: int, tokens: int, lines: list[dict]
) -> tuple[str, dict]:
    """(flags, {flag: path}) of a run in `folder`, where its configuration and its lines are
    written. tokens: virtual tokens."""
    template = template_of(TASK, "{snippet}" + QUESTION, tokens) | {"truncate_field": "snippet"}
    settings = {
        "virtual_prompt_style": method.style,
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
    words = (
        f"prompt_tuning.py --seed {seed} --steps {experiment.steps[method.style]}"
        f" --lr {method.lr} --warmup-steps 20 --global-batch-size 32 --weight-decay 0.01"
        f" --save-every 0 --eval-every 0 --device {experiment.device} {method.flags}"
    )
    return words, dict(config=path, load=experiment.base, out=folder / "run")


def learn(
    experiment: Experiment,
    method: Method,
    seed: int,
    tokens: int | None = None,
    lines: list[dict] | None = None,
) -> float:
    """Accuracy, by `prompt_tuning.py` and generate.py. The run's files are removed."""
    tokens = method.tokens if tokens is None else tokens
    with tempfile.TemporaryDirectory(dir=experiment.folder) as folder:
        lines = experiment.training if lines is None else lines
        words, paths = run_flags(experiment, Path(folder), method, seed, tokens, lines)
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
        answers = generate.generate(
            model, prompts[start : start + batch], 3, temperature=0, eot=tokenizer.eot
        )
        for line, ids in zip(test[start : start + batch], answers):
            correct += tokenizer.decode(ids) == line["label"]
    return correct / len(test)


def make_trainer(experiment: Experiment, method: Method, flags_besides: str = ""):
    """(trainer, training set) of a method. Weights are random."""
    folder = Path(tempfile.mkdtemp(dir=experiment.folder))
    lines = experiment.training
    words, paths = run_flags(experiment, folder, method, 0, method.tokens, lines)
    kind, argv = kinds.split(as_argv(f"{words} {flags_besides}", **paths))
    config = flags.parse(argv, 0, kind)
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
    """Of the untuned model, which is given the choice of the letters."""
    model, tokenizer = experiment.open_base()
    letters = list(LANGUAGES)
    ids = [int(tokenizer.encode(letter)[0]) for letter in letters]
    correct = 0
    for line, prompt in zip(experiment.test, questions(experiment, tokenizer)):
        logits = model(torch.tensor([prompt], device=experiment.device))[0, -1]
        correct += letters[int(logits[ids].argmax())] == line["label"]
    return correct / len(experiment.test)


def free_accuracy(experiment: Experiment) -> float:
    """Of the untuned model, which generates what it likes."""
    model, tokenizer = experiment.open_base()
    prompts = questions(experiment, tokenizer)
    return accuracy(model, tokenizer, prompts, experiment.test, batch=1)


# --- the commands ---------------------------------------------------------------------------------


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
