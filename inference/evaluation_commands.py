"""The command line of inference/evaluate.py: the perplexity of documents.

    python -m inference.evaluate --checkpoint runs/default --perplexity a.txt b.jsonl
    torchrun --nproc-per-node 2 -m inference.evaluate --tp 2 --checkpoint HF_DIR --perplexity a.txt

The model is loaded as generate.py loads it, under any layout; ranks that are left over share the
texts. `--out` gets all numbers as JSON.

The perplexity of a document of n tokens is exp(-log p / n). The number of tokens depends on the
tokenizer; bits per byte do not, -log2 p / bytes, so they compare models with other vocabularies.
"""

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

from inference import cli
from inference.evaluate import Evaluator
from run.config import ConfigError
from run.documents import DataError, find_files, read_documents
from run.tokenizer import begin_id
from run.world import World

SECONDS_OF_SILENCE = 10
# generate.py's flags that are none here, for its checks
NO_SAMPLING = dict(stop=[], max_tokens=0, temperature=0.0, top_k=0, top_p=1.0, seed=None)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The perplexity of documents.")
    cli.add_model_flags(parser)
    flag = parser.add_argument
    texts = 'text files, one document each; of .jsonl files each line, {"text": ".."}'
    flag("--perplexity", nargs="+", default=[], metavar="FILE", help=texts)
    flag("--adapter", action="append", default=[], help="a run with --peft for this model")
    flag("--batch-size", type=int, default=16, help="texts that a rank reads at a time")
    flag("--out", metavar="FILE", help="a new JSON file with all numbers")
    return parser


def check_flags(args: argparse.Namespace, world: World):
    """What can be known before the ranks meet. Returns (the model's configuration, documents).
    Raises the errors of command.REFUSED."""
    check_own_flags(args)
    return cli.check_flags(args, world), read_files(args.perplexity)


def check_own_flags(args: argparse.Namespace) -> None:
    """Those that generate.py has not. Raises ConfigError."""
    if not args.perplexity:
        raise ConfigError("--perplexity FILE: name a text; docs/evaluation.md has benchmarks")
    if args.cp > 1:
        raise ConfigError(
            f"--cp {args.cp}: ranks do not share a text here; without the flag they share the texts"
        )
    if len(args.adapter) > 1:
        raise ConfigError(f"--adapter {args.adapter[1]}: one model is evaluated, with one adapter")
    if args.out is not None:
        check_out(args.out)


def check_out(name: str) -> None:
    """Raises ConfigError, before hours of work, for a file that could not be written after them."""
    if not name or os.path.lexists(name) or not Path(name).resolve().parent.is_dir():
        raise ConfigError(f"--out {name or repr(name)}: must be a new file in a folder that exists")
    try:
        # it has no name, so nothing is left
        with tempfile.TemporaryFile(dir=Path(name).resolve().parent):
            pass
    except OSError as e:
        raise ConfigError(f"--out {name}: cannot be written ({e.strerror or e})") from None


def read_files(names: list[str]) -> list[tuple[str, str]]:
    """(name, text) of each document that has text. Raises ConfigError."""
    found = []
    try:
        for path in find_files(names) if names else []:
            for number, text in enumerate(read_documents(path, 0, None), 1):
                if not text:
                    continue
                # the number of the document, which is its line if none is blank
                found.append((f"{path}:{number}" if ".jsonl" in path.suffixes else str(path), text))
    except DataError as e:
        raise ConfigError(f"--perplexity {e}") from None
    if names and not found:
        raise ConfigError(f"--perplexity {' '.join(names)}: no document has any text")
    return found


def run(args: argparse.Namespace, world: World) -> None:
    config, documents = check_flags(args, world)
    adapters = cli.open_adapters(args, config)
    model, tokenizer, lockstep = cli.connect(args, world, None, cli.MONTH, adapters)
    evaluator = Evaluator(
        model, tokenizer, world.groups, args.batch_size, lockstep, Progress(world)
    )
    rows = perplexities(evaluator, documents)
    world.say(table_of(rows))
    if args.out and world.rank == 0:
        write(args.out, {"documents": rows})


class Progress:
    """Says how far an evaluation is, every ten seconds."""

    def __init__(self, world: World):
        self.world = world
        self.last = time.monotonic()

    def __call__(self, done: int, count: int) -> None:
        if time.monotonic() - self.last >= SECONDS_OF_SILENCE:
            self.last = time.monotonic()
            self.world.say_aside(f"{done:,} of {count:,} texts")


# --- documents ------------------------------------------------------------------------------------


def perplexities(evaluator: Evaluator, documents: list[tuple[str, str]]) -> list[dict]:
    """Of each document, and at the end of all together. A collective."""
    texts = [[int(i) for i in evaluator.tokenizer.encode(text)] for _, text in documents]
    log_probs = evaluator.rolling(texts, begin_id(evaluator.tokenizer))
    rows = []
    for (name, text), ids, log_p in zip(documents, texts, log_probs):
        rows.append(measures(name, len(ids), len(text.encode()), log_p))
    total = [sum(row[key] for row in rows) for key in ("tokens", "bytes", "log_prob")]
    return [*rows, measures("all", *total)]


def measures(name: str, tokens: int, size: int, log_p: float) -> dict:
    loss = -log_p / max(1, tokens)
    return {
        "name": name,
        "tokens": tokens,
        "bytes": size,
        "log_prob": log_p,
        "perplexity": math.exp(loss) if loss < 709 else math.inf,
        "bits_per_byte": -log_p / math.log(2) / max(1, size),
    }


def table_of(rows: list[dict]) -> str:
    lines = [f"{'tokens':>12}{'bytes':>12}{'perplexity':>14}{'bits/byte':>11}  document"]
    for row in rows:
        numbers = f"{row['tokens']:>12,}{row['bytes']:>12,}{row['perplexity']:>14,.4f}"
        lines.append(f"{numbers}{row['bits_per_byte']:>11.4f}  {row['name']}")
    return "\n".join(lines)


def write(path: str, report: dict) -> None:
    text = json.dumps(report, indent=1)
    with open(path, "x") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            # a full disk; half a file would look like a result
            os.unlink(path)
            raise


def main(argv: list[str]) -> int:
    parser = make_parser()
    # of generate.py, for its checks
    parser.set_defaults(prompt_file=None, **NO_SAMPLING)
    return cli.command("evaluate.py", run, argv, parser)
