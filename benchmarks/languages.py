r"""A classifier of languages: fine-tuned from a pretrained BERT, and from scratch.

    python -m benchmarks.languages [--folders /usr /opt] [--seeds 3]

In which language is a snippet of 96 bytes? The files are those of this machine, each content once.
Of ten files of a language, six are for pretraining, without a label; two give the snippets that are
learned, and two those of the test. A BERT learns to fill in hidden bytes of the first. Then
classifiers learn from few labels, in equally many steps: from its weights, and from random ones;
with two learning rates each. A snippet begins with a line, and more than half of it are letters.
What was stopped goes on under the same --out.
"""

import argparse
import itertools
import os
import random
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.steps import run_train, write_lines
from models.classify import ClassifyConfig
from models.runs import BertRun
from run.documents import fingerprint

ENDINGS = dict(py="python", h="c", c="c", hpp="c++", cpp="c++", pl="perl", pm="perl", vim="vim")
ENDINGS |= dict(js="javascript", cmake="cmake", html="html", rst="rst", yaml="yaml", tcl="tcl")
ENDINGS |= dict(sql="sql", f90="fortran", sh="shell", rb="ruby")
SNIPPET = 96
# Files of a language, at least and at most, and characters of each; labels for learning and test.
LEAST, MOST, LONGEST = 300, 400, 8000
LEARNED, TESTED = 32, 60
SHAPE = "--num-layers 4 --hidden-size 128 --num-heads 4 --seq-length 128"
PRETRAINING = "--global-batch-size 32 --lr 2e-3 --warmup-steps 100 --log-every 50 --save-every 100"
FINE_TUNING = "--global-batch-size 32 --warmup-steps 10 --save-every 0 --log-every 50"
RATES = ("1e-3", "3e-4")
TOY = "--num-layers 1 --hidden-size 16 --num-heads 2 --seq-length 128"


def find_files(folders: list[Path]) -> dict[str, list[Path]]:
    """Language -> its files, in random order."""
    found = {}
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in names:
                language = ENDINGS.get(name.rpartition(".")[2])
                if language:
                    found.setdefault(language, []).append(Path(where, name))
    for files in found.values():
        files.sort()
        random.Random(0).shuffle(files)
    return found


def texts_of(files: list[Path], known: set[str]) -> list[str]:
    """The beginnings of at most MOST files. known: of contents so far, also of other languages."""
    texts = []
    for file in files:
        try:
            text = file.read_bytes()[:LONGEST].decode("ascii")
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) > 2 * SNIPPET and fingerprint(text) not in known:
            known.add(fingerprint(text))
            texts.append(text)
        if len(texts) == MOST:
            break
    return texts


def snippets_of(texts: list[str], label: str, n: int, known: set[str]) -> list[dict]:
    """n snippets from texts in turn, none twice. known: of all snippets so far."""
    generator, lines = random.Random(0), []
    for text in texts * (4 * n):
        begin = text.rfind("\n", 0, generator.randrange(len(text) - SNIPPET)) + 1
        snippet = text[begin : begin + SNIPPET]
        letters = sum(c.isalpha() for c in snippet)
        if letters > SNIPPET / 2 and snippet.strip() not in known:
            known.add(snippet.strip())
            lines.append({"text": snippet, "label": label})
        if len(lines) == n:
            return lines
    return lines


def prepare(args: argparse.Namespace, folder: Path) -> list[str]:
    """Write the texts and the snippets into a folder, where they are not yet. The languages."""
    least = 10 if args.toy else LEAST
    sizes = (4, 4) if args.toy else (LEARNED, TESTED)
    known, lines = set(), ([], [])
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    for language, files in sorted(find_files(args.folders).items()):
        texts = texts_of(files, known)
        if len(texts) < least:
            continue
        n = len(texts) // 10
        for k, text in enumerate(texts[4 * n :]):
            (folder / "texts" / f"{language}-{k}.txt").write_text(text)
        for part, size, of_part in zip(lines, sizes, (texts[: n * 2], texts[n * 2 : n * 4])):
            part += snippets_of(of_part, language, size, known)
    for name, part in zip(("learned", "test"), lines):
        write_lines(folder / f"{name}.jsonl", part)
    return sorted({line["label"] for line in lines[1]})


def run(config_class, flags: str, steps: int, out: Path, **paths) -> dict:
    """The last line of metrics.jsonl of a run, which goes on if it was stopped."""
    resume = " --resume" if (out / "checkpoints").exists() else ""
    return run_train(f"{flags} --steps {steps}{resume}", config_class, out=out, **paths)


def classify(args: argparse.Namespace, folder: Path, begin: str, name: str) -> list[float]:
    """Test accuracy with each seed. begin: flags of the first weights."""
    paths = dict(data=folder / "learned.jsonl", val_data=folder / "test.jsonl")
    lines = [
        run(
            ClassifyConfig, f"{begin} --seed {seed}", args.steps, folder / f"{name}-{seed}", **paths
        )
        for seed in range(args.seeds)
    ]
    return [line["eval_accuracy"] for line in lines]


def main() -> None:
    parser = report.arguments(__doc__, seeds=3, pretraining=600, steps=75)
    parser.add_argument(
        "--folders", nargs="+", type=Path, default=[Path(sys.prefix)], metavar="DIR"
    )
    args = report.parse(parser, seeds=1, pretraining=2, steps=2)
    folder = args.out / "languages"
    languages = prepare(args, folder)
    if len(languages) < 2:
        report.refuse(parser, f"--folders: fewer than two languages have {LEAST} files")
    shape = TOY if args.toy else SHAPE
    base = folder / "base"
    flags = f"{shape} {PRETRAINING} --eval-every 500"
    paths = dict(data=folder / "texts", cache=folder / "cache")
    last = run(BertRun, flags, args.pretraining, base, **paths)
    results = {"toy": args.toy, "languages": languages}
    results |= {"masked accuracy": last["eval_accuracy"], "accuracy": {}}
    starts = {"scratch": f"{shape} --vocab-size 260", "pretrained": f"--load {base}"}
    table = report.Table()
    for rate, start in itertools.product(RATES, starts):
        name = f"{start}-{rate}"
        flags = f"{starts[start]} --lr {rate} {FINE_TUNING}"
        found = results["accuracy"][name] = classify(args, folder, flags, name)
        table.row({"begins": start, "learning rate": rate, "accuracy": report.spread(found)})
    report.finish("languages", results, args)


if __name__ == "__main__":
    main()
