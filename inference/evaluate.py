"""Evaluation: what a model knows, by the probability of texts.

Two questions (lm-evaluation-harness, arXiv 2405.14782):

    log-likelihood   log p(continuation | context)    multiple choice: the most likely answer counts
    rolling          log p(text), window by window    the perplexity of a document

Both are sums of what a training forward gives. For a context c and a continuation y of n
tokens

    log p(y | c) = Σ_i log_softmax(logits of c y_1 .. y_i-1)[y_i]

so one forward pass over both gives all n terms. Only n positions go through the head:

    read       c1 c2 c3 y1 y2              without the last token
    target      .  . y1 y2 y3              n = 3 positions count

A text that is longer than the model's context is cut on the left, for the continuation is on the
right. A whole text is scored window by window, and each token counts once. A window begins where
the one before ends; only the last one begins earlier, so that it is full too:

    read       . t1 t2 t3 | t4 t5 t6 t7 | t6 t7 t8 t9        context 4; . is the begin token
    count     t1 t2 t3 t4 | t5 t6 t7 t8 |       t9 t10

    python -m course.evaluate                                            a lesson
    python -m inference.evaluate --checkpoint runs/default --perplexity FILE
    torchrun --nproc-per-node 4 -m inference.evaluate --tp 2 --checkpoint HF_DIR --perplexity FILE

lm-eval asks a server (inference/serve.py, docs/evaluation.md).

Not covered: multiple choice whose answers share the forward pass over their context; a text shared
by context-parallel ranks.
"""

import argparse
import itertools
import json
import math
import os
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from base import terminal
from base.attention_kernels import any_shape
from base.groups import Groups
from gpt import GPT
from inference import cli
from inference.batches import data_parallel, from_all_ranks
from pipeline_parallel import Pipeline, stages_of
from run.config import ConfigError
from run.documents import DataError, find_files, read_documents
from run.tokenizer import Tokenizer, TokenizerError
from run.world import World

# Positions that go through the head together: their logits take 4 V bytes each.
HEAD_POSITIONS = 1024
SECONDS_OF_SILENCE = 10

# Token ids to read, and the ids to score after them; at least one of each.
Request = tuple[list[int], list[int]]
# Log p(continuation | context), and whether each token of it is the most likely one.
Score = tuple[float, bool]

# What a rank reads that has no request of its own.
IDLE = [0], [0]


def check(request: Request, seq_length: int) -> None:
    """Raises ValueError for what cannot be scored."""
    context, continuation = request
    if not context or not continuation:
        empty = "continuation" if context else "context"
        raise ValueError(f"the {empty} has no token of its own")
    if len(continuation) > seq_length:
        raise ValueError(
            f"the continuation has {len(continuation)} tokens, and the model's context holds"
            f" {seq_length}"
        )


def windows(ids: list[int], begin: int, seq_length: int) -> list[Request]:
    """Requests that score each token of a text once. begin: the token before the text."""
    whole = [begin, *ids]
    requests = []
    for start in range(0, len(ids), seq_length):
        end = min(start + seq_length, len(ids))
        first = max(0, end - seq_length)
        requests.append((whole[first : start + 1], whole[start + 1 : end + 1]))
    return requests


@dataclass
class Evaluator:
    """Asks a model that may be spread over ranks. Every rank calls the same methods with the same
    arguments, and gets all results, in the order of the requests.

    They raise FloatingPointError, on every rank, where logits are not finite."""

    model: GPT | Pipeline
    tokenizer: object
    groups: Groups
    # Texts that each data-parallel rank reads at a time.
    batch_size: int = 16
    # generate.stream explains it.
    lockstep: dist.ProcessGroup | None = None
    # Told after each batch: requests that are done, of how many.
    progress: Callable[[int, int], None] = lambda done, count: None

    def __post_init__(self):
        self.stages = stages_of(self.model)
        self.config = self.stages[0].config

    @torch.inference_mode()
    @any_shape()
    def log_likelihoods(self, requests: list[Request]) -> list[Score]:
        """log p(continuation | context) of each request. Raises ValueError as `check`."""
        for request in requests:
            check(request, self.config.seq_length)
        found = {}
        for numbers in self.batches([len(c) + len(y) for c, y in requests]):
            scores = self.score([requests[n] for n in numbers])
            found |= zip(numbers, scores)
        finite = all(math.isfinite(log_p) for log_p, _ in found.values())
        return self.gather(found if finite else None)

    def rolling(self, texts: list[list[int]], begin: int) -> list[float]:
        """log p(text) of each text, whatever its length. begin: the token before each."""
        of_texts = [windows(ids, begin, self.config.seq_length) for ids in texts]
        scores = iter(self.log_likelihoods(list(itertools.chain(*of_texts))))
        return [sum(next(scores)[0] for _ in requests) for requests in of_texts]

    # -- requests over ranks -----------------------------------------------------------------------

    def batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """This rank's batches of requests, by number; the longest come first, so that texts of like
        lengths are padded together. Every rank has as many, for forward passes may be collectives;
        the last one may be empty."""
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        dp, rank = data_parallel(self.groups)
        size = dp * self.batch_size
        for start in range(0, len(order), size):
            yield order[start : start + size][rank::dp]
            self.progress(min(start + size, len(order)), len(order))

    def gather(self, found: dict | None) -> list:
        """All results, from those of each rank. found: request -> result; None: not finite."""
        results = dict(ChainMap(*from_all_ranks(found, self.groups)))
        return [results[n] for n in sorted(results)]

    # -- one batch ---------------------------------------------------------------------------------

    def score(self, requests: list[Request]) -> list[Score]:
        """The scores of a batch; empty on a pipeline stage without the head."""
        p = 1 if isinstance(self.model, GPT) else self.model.p
        rows = [*requests]
        # As many rows in each micro-batch of a pipeline, and at least one.
        while not rows or len(rows) % p:
            rows.append(IDLE)
        device = next(itertools.chain(*(stage.parameters() for stage in self.stages))).device
        tokens, targets = (x.to(device) for x in pad(rows, self.config.seq_length))
        b, s = len(rows) // p, tokens.shape[1]
        # One list for each micro-batch.
        scores = [[] for _ in range(p)]

        def run_stage(chunk: int, m: int, x: Tensor | None) -> Tensor:
            """x: [b, s, h] of the stage before"""
            stage = self.stages[chunk]
            part = slice(m * b, (m + 1) * b)
            if stage.embedding is not None:
                x = stage.embedding(tokens[part])  # [b, s, h]
            x = stage.run_blocks(x, s)
            if stage.head is not None:
                scores[m] = head_scores(stage.head, x, targets[part])
            return x

        if isinstance(self.model, GPT):
            run_stage(0, 0, None)
        else:
            self.model.run(self.model.forward_only(p), run_stage, b, s)
        return list(itertools.chain(*scores))[: len(requests)]


def pad(rows: list[Request], seq_length: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), each [b, s]; targets are -1 where nothing counts. Padding comes after a
    row, where no token that counts attends to it."""
    texts = [[*context, *continuation][-(seq_length + 1) :] for context, continuation in rows]
    s = max(map(len, texts)) - 1
    tokens = torch.zeros(len(rows), s, dtype=torch.int64)
    targets = torch.full_like(tokens, -1)
    for row, (ids, (_, continuation)) in enumerate(zip(texts, rows)):
        end = len(ids) - 1
        tokens[row, :end] = torch.tensor(ids[:-1])
        targets[row, end - len(continuation) : end] = torch.tensor(continuation)
    return tokens, targets


def head_scores(head: nn.Module, x: Tensor, targets: Tensor) -> list[Score]:
    """x: [b, s, h]; targets: [b, s], -1 where nothing counts. Under tensor parallelism the head
    gathers the logits, as it does to generate."""
    counts = targets >= 0
    log_probs = []
    most_likely = []
    # [n, h] and [n], the positions that count, row after row
    for h, target in zip(x[counts].split(HEAD_POSITIONS), targets[counts].split(HEAD_POSITIONS)):
        logits = head(h.unsqueeze(0))[0]  # [n, V]
        log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        log_probs.append(log_p.gather(1, target.unsqueeze(1)).squeeze(1).double())
        most_likely.append(log_p.argmax(-1) == target)
    lengths = counts.sum(1).tolist()
    of_rows = zip(torch.cat(log_probs).split(lengths), torch.cat(most_likely).split(lengths))
    return [(log_p.sum().item(), greedy.all().item()) for log_p, greedy in of_rows]


# --- documents ------------------------------------------------------------------------------------


def begin_id(tokenizer: Tokenizer) -> int:
    """The id before a text whose every token is scored: the begin token that the files name, even
    if it begins no text, or else the end of text. Raises TokenizerError."""
    for token in (tokenizer.named_bos, tokenizer.bos, tokenizer.eot):
        if token is not None:
            return token
    raise TokenizerError("the model knows neither a begin nor an end token, and a text needs one")


def perplexities(evaluator: Evaluator, documents: list[tuple[str, str]]) -> list[dict]:
    """A row for each document, and one for all together. A collective."""
    texts = [[int(i) for i in evaluator.tokenizer.encode(text)] for _, text in documents]
    log_probs = evaluator.rolling(texts, begin_id(evaluator.tokenizer))
    rows = []
    for (name, text), ids, log_p in zip(documents, texts, log_probs):
        rows.append(measures(name, len(ids), len(text.encode()), log_p))
    total = [sum(row[key] for row in rows) for key in ("tokens", "bytes", "log_prob")]
    return [*rows, measures("all", *total)]


def measures(name: str, tokens: int, size: int, log_p: float) -> dict:
    """perplexity: exp(-log p / tokens), which depends on the tokenizer. bits_per_byte: -log2 p /
    bytes, which compares models of any vocabulary."""
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


# --- the command line -----------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    about = "The perplexity of documents."
    parser = argparse.ArgumentParser(prog="python -m inference.evaluate", description=about)
    cli.add_model_flags(parser)
    flag = parser.add_argument
    texts = 'text files, one document each; of .jsonl files each line, {"text": ".."}'
    flag("--perplexity", nargs="+", default=[], metavar="FILE", help=texts)
    flag("--adapter", action="append", default=[], help="a run with --peft for this model")
    flag("--batch-size", type=int, default=16, help="texts that a rank reads at a time")
    flag("--out", metavar="FILE", help="a new JSON file with all numbers")
    return parser


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
        # It has no name, so nothing is left.
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
                # The number of the document, which is its line if none is blank.
                found.append((f"{path}:{number}" if ".jsonl" in path.suffixes else str(path), text))
    except DataError as e:
        raise ConfigError(f"--perplexity {e}") from None
    if names and not found:
        raise ConfigError(f"--perplexity {' '.join(names)}: no document has any text")
    return found


def run(args: argparse.Namespace, world: World) -> None:
    check_own_flags(args)
    config, documents = cli.check_model_flags(args, world), read_files(args.perplexity)
    adapters = cli.open_adapters(args, config, named=False)
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


def write(path: str, report: dict) -> None:
    text = json.dumps(report, indent=1)
    with open(path, "x") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            # A full disk; half a file would look like a result.
            os.unlink(path)
            raise


def main(argv: list[str]) -> int:
    return cli.command("evaluate.py", run, argv, make_parser())


if __name__ == "__main__":
    terminal.command(main)
