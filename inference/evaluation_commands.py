"""The command line of inference/evaluate.py: tasks of lm-eval, and the perplexity of documents.

    python -m inference.evaluate --checkpoint runs/default --perplexity a.txt b.jsonl
    python -m inference.evaluate --checkpoint HF_DIR --tasks hellaswag gsm8k --out scores.json
    torchrun --nproc-per-node 2 -m inference.evaluate --tp 2 --checkpoint HF_DIR --tasks hellaswag

The model is loaded as generate.py loads it, under any layout; ranks that are left over share the
requests. `--out` gets all numbers as JSON: of the tasks also each item, with the model's answers.

lm-eval runs on rank 0. The other ranks follow: `lead` sends them the name of a method of the
evaluator and its arguments, and all call it together.

    rank 0      lm-eval -> HarnessLM -> call ─┬─> evaluator.log_likelihoods(requests)
    rank 1                                    └─> evaluator.log_likelihoods(requests)

The perplexity of a document of n tokens is exp(-log p / n). The number of tokens depends on the
tokenizer; bits per byte do not, -log2 p / bytes, so they compare models with other vocabularies.
"""

import argparse
import importlib.util
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from base.world import World
from inference import cli
from inference.evaluate import Evaluator
from inference.loading import find_chat
from run.config import ConfigError, flag_name
from run.documents import DataError, find_files, read_documents
from run.tokenizer import begin_id

SECONDS_OF_SILENCE = 10
# flags that say nothing to --perplexity
OF_TASKS = ("num_fewshot", "limit", "apply_chat_template", "include_path")
# generate.py's flags that are none here, for its checks
NO_SAMPLING = dict(stop=[], max_tokens=0, temperature=0.0, top_k=0, top_p=1.0, seed=None)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Evaluate a model; without arguments, a lesson.")
    cli.add_model_flags(parser)
    flag = parser.add_argument
    several = dict(nargs="+", default=[])
    repeated = dict(action="append", default=[])
    flag("--tasks", **several, metavar="NAME", help="tasks of lm-eval, or your own")
    flag("--num-fewshot", type=int, metavar="N", help="examples before each question")
    flag("--limit", type=int, metavar="N", help="only the first N items of each task")
    flag("--include-path", **repeated, metavar="DIR", help="of task files of your own; several")
    own = "write each question in the chat template of the model's folder"
    flag("--apply-chat-template", action="store_true", help=own)
    texts = 'text files, one document each; of .jsonl files each line, {"text": ".."}'
    flag("--perplexity", **several, metavar="FILE", help=texts)
    flag("--adapter", **repeated, help="a run with --peft for this model")
    flag("--batch-size", type=int, default=16, help="texts that a rank reads at a time")
    flag("--out", metavar="FILE", help="a new JSON file with all numbers, and each item")
    return parser


def check_flags(args: argparse.Namespace, world: World):
    """What can be known before the ranks meet. Returns (the model's configuration, the task manager
    of lm-eval on rank 0, documents). Raises the errors of command.REFUSED."""
    check_own_flags(args)
    config = cli.check_flags(args, world)
    manager = None
    # lm-eval takes seconds to import, and runs on rank 0 alone
    if args.tasks and world.rank == 0:
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(
                f"--tasks {args.tasks[0]}: needs the package lm-eval (pip install lm-eval);"
                " --perplexity FILE does not"
            )
        from inference import harness

        manager, args.tasks = harness.find_tasks(args.tasks, args.include_path)
    return config, manager, read_files(args.perplexity)


def check_own_flags(args: argparse.Namespace) -> None:
    """Those that generate.py has not. Raises ConfigError."""
    if not args.tasks and not args.perplexity:
        raise ConfigError("--tasks NAME or --perplexity FILE: give one of them, or both")
    cli.check_least(args, {"num_fewshot": 0, "limit": 1})
    for name in OF_TASKS:
        given = getattr(args, name)
        if given is not False and given not in (None, []) and not args.tasks:
            raise ConfigError(f"{flag_name(name)}: is of --tasks; leave it out")
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
    """What `python -m course.evaluate` does with flags."""
    config, manager, documents = check_flags(args, world)
    adapters = cli.open_adapters(args, config)
    model, tokenizer, lockstep = cli.connect(args, world, None, cli.MONTH, adapters)
    evaluator = Evaluator(
        model, tokenizer, world.groups, args.batch_size, lockstep, Progress(world)
    )
    report = {}
    if documents:
        report["documents"] = perplexities(evaluator, documents)
        world.say(table_of(report["documents"]))
    if args.tasks:
        report |= evaluate_tasks(args, world, evaluator, manager)
    if args.out and world.rank == 0:
        write(args.out, report)


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


# --- tasks ----------------------------------------------------------------------------------------


def evaluate_tasks(args: argparse.Namespace, world: World, evaluator: Evaluator, manager) -> dict:
    """lm-eval's results and items; on other ranks than 0 nothing. A collective."""

    def work(call) -> dict:
        from inference import harness

        chat = None
        if args.apply_chat_template:
            chat = find_chat(args.checkpoint, evaluator.tokenizer, args.adapter)
            chat = harness.find_template(chat)
        lm = harness.HarnessLM(evaluator, call, chat)
        results = harness.run_tasks(lm, manager, args.tasks, args.num_fewshot, args.limit)
        world.say(harness.table_of(results))
        return results

    return lead(world, evaluator, work) or {}


def lead(world: World, evaluator: Evaluator, work: Callable[[Callable], object]):
    """A collective. Rank 0 calls work(call), and call(name, *arguments) calls this method of the
    evaluator on every rank. Returns what work gives, on other ranks None."""

    def call(name: str, *arguments):
        world.gather((name, arguments))
        return getattr(evaluator, name)(*arguments)

    if world.rank:
        while request := world.gather(None)[0]:
            name, arguments = request
            getattr(evaluator, name)(*arguments)
        return None
    try:
        result = work(call)
    except FloatingPointError:
        # raised by the evaluator, on every rank
        raise
    except Exception:
        world.gather(None)
        raise
    world.gather(None)
    return result


def write(path: str, report: dict) -> None:
    # of lm-eval, numbers of NumPy and functions too
    text = json.dumps(
        report, indent=1, default=lambda x: x.item() if hasattr(x, "item") else str(x)
    )
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
