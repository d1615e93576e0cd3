"""A frozen model learns to tell languages apart: accuracy before, with prompt tuning, with
p-tuning, and with full fine-tuning as the ceiling.

    python train.py --seq-length 256 --steps 2400 --warmup-steps 100 --eval-every 600 --out runs/base      # the model: Python's library, 20 to 40 minutes on 2 cores
    python comparisons/prompt_tuning.py --base runs/base [--seeds 0 1 2]                                    # an hour and a half

The task: which language is a snippet of 64 characters in? Python from the standard library; C++,
CMake, SVG and English (package descriptions) from the packages that requirements.txt installs. The
model has read only Python. Files are split, so that no test snippet comes from a file that was
trained on; as many snippets of each language. The answer is a letter and an end of text, generated
greedily, and right when it is equal. The untuned model, which does not know that letters are asked
for, is given the choice: the likeliest of the five letters counts as its answer.

Each result is kept as soon as it is there, and a run that was stopped goes on. `--toy` runs all of
it in seconds, with a tiny model of its own where there is no --base."""

import json
import random
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch

import generate
import prompt_tuning
import train
from corpus import documents
from inference import cli
from prompts import prompt_data, prompt_file
from runtime import json_files

SITE = Path(torch.__file__).parent.parent
# letter: (folder, files)
LANGUAGES = {
    "P": (Path(sysconfig.get_path("stdlib")), "*.py"),
    "C": (SITE / "torch" / "include", "*.h"),
    "M": (SITE / "torch" / "share", "*.cmake"),
    "S": (SITE / "matplotlib", "*.svg"),
    "E": (SITE, "*.dist-info/METADATA"),
}
LENGTH = 64
TRAIN = 2000
TEST = 300
TEXT = "{snippet}"
QUESTION = "\n# language: "


def snippets(seed: int = 0) -> tuple[list[dict], list[dict]]:
    """(training, test) lines. The files of a language, 200 at most, are split 3 to 1; a file is
    drawn by its size, up to 20,000 characters of it."""
    g = random.Random(seed)
    sets = ([], [])
    for letter, (folder, pattern) in LANGUAGES.items():
        files = documents.standard_library() if letter == "P" else sorted(folder.rglob(pattern))
        files = [f for f in files if f.stat().st_size > 800]
        g.shuffle(files)
        texts = [f.read_text(errors="ignore")[:20000] for f in files[:200]]
        for lines, some, n in (
            (sets[0], [t for i, t in enumerate(texts) if i % 4], TRAIN // 5),
            (sets[1], texts[::4], TEST // 5),
        ):
            while n:
                text = g.choices(some, [len(t) for t in some])[0]
                begin = text.rfind("\n", 0, g.randrange(max(1, len(text) - LENGTH))) + 1
                snippet = text[begin : begin + LENGTH]
                if len(snippet.strip()) >= 0.6 * LENGTH:
                    lines.append({"taskname": "language", "snippet": snippet, "label": letter})
                    n -= 1
    for lines in sets:
        g.shuffle(lines)
    return sets


def write(path: Path, lines: list[dict]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def template(tokens: int) -> dict:
    return {
        "taskname": "language",
        "prompt_template": TEXT + QUESTION + "<|VIRTUAL_PROMPT_0|>" * bool(tokens) + "{label}",
        "total_virtual_tokens": tokens,
        "virtual_token_splits": [tokens] * bool(tokens),
        "truncate_field": "snippet",
        "answer_only_loss": True,
        "answer_field": "label",
    }


def configuration(style: str, tokens: int, train_file: str, test_file: str) -> dict:
    return {
        "virtual_prompt_style": style,
        "new_tasks": ["language"],
        "task_templates": [template(tokens)],
        "data": {"train_ds": [train_file], "validation_ds": [test_file]},
        "prompt_tuning": {
            "new_prompt_init_methods": ["text"],
            "new_prompt_init_text": ["Python, C++, CMake, SVG or English? "],
        },
        "p_tuning": {"encoder_type": "mlp", "encoder_hidden": HIDDEN, "init_std": INIT},
    }


HIDDEN = 32
INIT = 0.3
STEPS = {"p-tuning": 600, "prompt-tuning": 600, "fine-tuning": 200}
RATES = {"p-tuning": 0.03, "prompt-tuning": 0.1, "fine-tuning": 1e-3}


def learn(
    folder: Path,
    base: str,
    style: str,
    seed: int,
    tokens: int,
    lines: list[dict],
    test: list[dict],
    steps: int | None = None,
) -> tuple[float, int]:
    """(accuracy, parameters learned), by train.py and generate.py."""
    out = folder / f"{style}-{seed}-{tokens}-{len(lines)}"
    steps = steps or STEPS[style]
    settings = folder / "prompts.json"
    settings.write_text(
        json.dumps(
            configuration(
                style,
                tokens,
                write(folder / "train.jsonl", lines),
                write(folder / "test.jsonl", test),
            )
        )
    )
    status = train.main(
        [
            "--prompt-config",
            str(settings),
            "--load",
            base,
            "--out",
            str(out),
            "--seed",
            str(seed),
            "--steps",
            str(steps),
            "--lr",
            str(RATES[style]),
            "--warmup-steps",
            "20",
            "--global-batch-size",
            "32",
            "--weight-decay",
            "0.01",
            "--save-every",
            "0",
            "--eval-every",
            "0",
            "--device",
            DEVICE,
        ]
    )
    if status:
        sys.exit(status)
    model, index = cli.load_model(out if style == "fine-tuning" else base, DEVICE)
    tokenizer = cli.find_tokenizer(base, index)
    if style == "fine-tuning":
        config = prompt_data.PromptConfig.read(settings)
        first = model.config.vocab_size
        learned = train.num_parameters(model)
    else:
        config, tables = prompt_file.load(
            out / "prompts.safetensors", prompt_file.fingerprint(base, model.config)
        )
        first = prompt_tuning.attach_tables(model, config, tables)["language"]
        values = prompt_tuning.initial_values(
            prompt_data.PromptConfig.read(settings),
            model.config.hidden_size,
            0,
            tokenizer,
            torch.zeros(model.config.vocab_size, model.config.hidden_size),
        )
        learned = sum(x.numel() for x in values.values())
    prompts = [
        config.templates["language"]
        .fill(line, tokenizer, first, model.config.seq_length, answer=False)
        .ids
        for line in test
    ]
    correct = 0
    for start in range(0, len(test), 100):
        for line, ids in zip(
            test[start : start + 100],
            generate.generate(
                model, prompts[start : start + 100], 3, temperature=0, eot=tokenizer.eot
            ),
        ):
            correct += tokenizer.decode(ids) == line["label"]
    return correct / len(test), learned


def toy_base(folder: Path) -> str:
    """The run of a tiny model that has learned nothing."""
    (folder / "text.txt").write_text("def f(x):\n    return x\n" * 500)
    status = train.main(
        [
            "--model",
            "tiny",
            "--num-layers",
            "2",
            "--hidden-size",
            "32",
            "--num-heads",
            "4",
            "--ffn-hidden-size",
            "64",
            "--seq-length",
            "256",
            "--steps",
            "1",
            "--global-batch-size",
            "2",
            "--data",
            str(folder / "text.txt"),
            "--out",
            str(folder / "base"),
            "--device",
            DEVICE,
        ]
    )
    if status:
        sys.exit(status)
    return str(folder / "base")


@torch.no_grad()
def untuned(base: str, test: list[dict]) -> tuple[float, float]:
    """(accuracy of the likeliest letter, accuracy of what is generated)."""
    model, index = cli.load_model(base, DEVICE)
    tokenizer = cli.find_tokenizer(base, index)
    letters = list(LANGUAGES)
    among = 0
    free = 0
    ids = [int(tokenizer.encode(letter)[0]) for letter in letters]
    for line in test:
        prompt = [int(i) for i in tokenizer.encode(line["snippet"] + QUESTION)]
        logits = model(torch.tensor([prompt], device=DEVICE))[0, -1]
        among += letters[int(logits[ids].argmax())] == line["label"]
        free += (
            tokenizer.decode(
                generate.generate(model, [prompt], 3, temperature=0, eot=tokenizer.eot)[0]
            )
            == line["label"]
        )
    return among / len(test), free / len(test)


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for ax, name, label in (
        (axes[0], "by_tokens", "virtual tokens"),
        (axes[1], "by_examples", "training examples"),
    ):
        ticks = sorted({int(n) for found in results[name].values() for n in found})
        for style, colour in (("p-tuning", "tab:blue"), ("prompt-tuning", "tab:green")):
            points = sorted((int(n), r) for n, r in results[name].get(style, {}).items())
            if points:
                ax.plot(
                    [n for n, _ in points],
                    [r["median"] for _, r in points],
                    "o-",
                    color=colour,
                    label=style,
                )
                ax.fill_between(
                    [n for n, _ in points],
                    [r["min"] for _, r in points],
                    [r["max"] for _, r in points],
                    color=colour,
                    alpha=0.15,
                )
        for what, style in (("fine-tuning", "--"), ("untuned", ":")):
            level = results["accuracy"][what]
            ax.axhline(
                level["median"] if isinstance(level, dict) else level,
                color="gray",
                linestyle=style,
                label={"fine-tuning": "full fine-tuning"}.get(what, what),
            )
        ax.set(xlabel=label, xscale="log", xticks=ticks, xticklabels=ticks, ylim=(0, 1))
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy on unseen files")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


def main():
    global TRAIN, TEST, DEVICE
    parser = report.arguments(__doc__)
    parser.add_argument(
        "--base", metavar="DIR", help="the run or checkpoint of the model, with the byte tokenizer"
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
        help="measure again what prompt_tuning.json under --out has already",
    )
    args = report.parse(parser)
    DEVICE = args.device
    if args.toy:
        TRAIN = 20
        TEST = 5
        args.seeds = args.seeds[:1]
        args.tokens = [10]
        args.examples = [20]
        STEPS.update(dict.fromkeys(STEPS, 1))
    elif not args.base:
        report.refuse(
            parser,
            "--base DIR is missing: the run or checkpoint of a model with the byte tokenizer",
        )
    lines, test = snippets()
    saved = args.out / "prompt_tuning.json"
    results = {"accuracy": {}, "parameters": {}, "by_tokens": {}, "by_examples": {}}
    if saved.exists() and not args.fresh and not args.toy:
        try:
            results |= {k: v for k, v in json_files.read(saved, dict).items() if k != "environment"}
        except json_files.JSONError as e:
            report.refuse(parser, f"{e}; --fresh measures everything again")

    def note(table: dict, key, measure) -> None:
        """Measure what is not there yet, and keep it."""
        if str(key) not in table:
            table[str(key)] = measure()
            print(key, table[str(key)], flush=True)
            report.save("prompt_tuning", results, args)

    with tempfile.TemporaryDirectory() as folder:
        args.base = args.base or toy_base(Path(folder))

        def spread(style, seeds, tokens, some):
            runs = [
                learn(Path(folder), args.base, style, seed, tokens, some, test) for seed in seeds
            ]
            results["parameters"].setdefault(style, runs[0][1])
            return report.spread([accuracy for accuracy, _ in runs])

        for key, i in (("untuned", 0), ("untuned, freely generated", 1)):
            note(results["accuracy"], key, lambda: untuned(args.base, test)[i])
        for style in ("p-tuning", "fine-tuning", "prompt-tuning"):
            note(
                results["accuracy"],
                style,
                lambda: spread(style, args.seeds, 10 * (style != "fine-tuning"), lines),
            )
        for style in ("p-tuning", "prompt-tuning"):
            by_tokens = results["by_tokens"].setdefault(style, {})
            by_examples = results["by_examples"].setdefault(style, {})
            by_tokens["10"] = by_examples[str(len(lines))] = results["accuracy"][style]
            for n in args.tokens:
                note(by_tokens, n, lambda: spread(style, args.curve_seeds, n, lines))
            for n in args.examples:
                note(by_examples, n, lambda: spread(style, args.curve_seeds, 10, lines[:n]))
    before = results["accuracy"]["untuned"]
    ceiling = results["accuracy"]["fine-tuning"]["median"]
    for style in ("p-tuning", "prompt-tuning"):
        way = (results["accuracy"][style]["median"] - before) / (ceiling - before or 1)
        print(
            f"{style}: {results['accuracy'][style]['median']:.3f}, {way:.2f} of the way from"
            f" {before:.3f} to {ceiling:.3f}, {results['parameters'][style]:,} parameters learned"
        )
    draw(results, args.figures / "prompt_tuning.png")


if __name__ == "__main__":
    main()
