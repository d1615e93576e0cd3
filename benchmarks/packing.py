"""Padding short conversations, and packing them: positions that are text, and tokens per second.

    python -m benchmarks.packing [--rounds 11] [--toy] [--out DIR] [--figures DIR]

The conversations are skewed, as real ones are: lengths are log-normal, with many short ones and a
few long ones. A step of the model `tiny` (4 layers of 256) computes 16 rows, in three ways:

    padded            a conversation in a row of s = 256 positions
    to the longest    the same; the rows of a step are as long as its longest conversation
    packed            first-fit (finetune/packing.py), with the document mask

    text, counted        shares of the computed positions: not padding; targets that count
    tokens_per_second    of text; the three take turns, and a ratio is to padded in the same round

Figure: docs/figures/packing.svg
"""

import math
import os
from pathlib import Path

import numpy as np
import torch

import train
from base.groups import Groups
from benchmarks import report, style
from benchmarks.steps import TOY, seconds_of_step
from finetune.packing import Example, Packed
from run.data import Batch
from run.pretraining import Config


class Padded(Packed):
    """Each conversation in a row of its own, of s positions. Padding comes after all that is read,
    so the causal mask hides it."""

    def rows_of(self, epoch: int) -> list[list[int]]:
        if epoch not in self.packed:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
            self.packed[epoch] = [[i] for i in order.tolist()]
        return self.packed[epoch]

    def batch(self, samples) -> Batch:
        return super().batch(samples)._replace(documents=None)


class PaddedToLongest(Padded):
    """The same, with as many positions as the longest conversation of the batch has."""

    def batch(self, samples) -> Batch:
        batch = super().batch(samples)
        longest = max(self.lengths[i] for sample in samples for i in self.row(sample))
        names = ("tokens", "targets", "loss_mask", "real")
        return batch._replace(**{name: getattr(batch, name)[:, :longest] for name in names})


PADDINGS = {"padded": Padded, "to the longest": PaddedToLongest, "packed": Packed}
# Rows of a step, positions of a row.
ROWS = 16
POSITIONS = 256
CONVERSATIONS = 4000
TOY_CONVERSATIONS = 400


def conversations(n: int, s: int) -> list[Example]:
    """Conversations of random bytes. Lengths are log-normal, with median s / 8: many short ones, a
    few long ones. The loss is taken on the second half, the answer."""
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.normal(math.log(s / 8), 0.9, n)).astype(int).clip(4, s)
    examples = []
    for length in lengths:
        ids = generator.integers(0, 256, length + 1).tolist()
        examples.append(Example(ids, [i > length // 2 for i in range(length + 1)]))
    return examples


class PaddingRun:
    """Steps of full fine-tuning on conversations that are padded, or packed."""

    def __init__(self, trainer, dataset: Packed):
        self.trainer = trainer
        self.dataset = dataset
        self.steps = 0

    def text(self, samples) -> int:
        """Tokens of the conversations in these rows."""
        return sum(self.dataset.lengths[i] for sample in samples for i in self.dataset.row(sample))

    def shares(self) -> dict[str, float]:
        """Shares of the positions that an epoch computes: text, and counted tokens."""
        dataset = self.dataset
        done = range(len(dataset.rows_of(0)) // ROWS * ROWS)
        steps = [dataset.batch(done[first : first + ROWS]) for first in done[::ROWS]]
        positions = sum(batch.tokens.numel() for batch in steps)
        counted = dataset.counted_tokens(done)
        return {"text": self.text(done) / positions, "counted": counted / positions}

    def tokens_per_second(self) -> float:
        """Tokens of text in a second of the next step."""
        self.steps += 1
        tokens = self.text(self.trainer.task.samples(self.steps))
        return tokens / seconds_of_step(self.trainer, self.dataset, self.steps)


def measure(rounds: int, n: int, model: dict) -> dict:
    """{kind: {"fill", "counted": shares of the computed positions, "tokens_per_second", "ratio":
    spreads}}. ratio: to padded, in the same round. n: conversations; model: fields of
    its configuration."""
    s = POSITIONS
    config = Config(**model, seq_length=s, global_batch_size=ROWS, device="cpu")
    trainer = train.Trainer(config, torch.device("cpu"), Groups())
    examples = conversations(n, s)
    runs = {name: PaddingRun(trainer, kind(examples, s, 0)) for name, kind in PADDINGS.items()}
    before = os.getloadavg()[0]
    rates = report.in_turn({name: run.tokens_per_second for name, run in runs.items()}, rounds)
    lengths = sorted(len(example.ids) - 1 for example in examples)
    result = {
        "load_average": [before, os.getloadavg()[0]],
        "processors": os.cpu_count(),
        "conversations": n,
        "positions": s,
        "rows of packed": len(runs["packed"].dataset.rows_of(0)),
        "fill of packed": runs["packed"].dataset.fill(),
        # Each hundredth part of them.
        "lengths": [lengths[i * n // 100] for i in range(100)],
    }
    for name, run in runs.items():
        result[name] = run.shares() | {
            "tokens_per_second": report.spread([r[name] for r in rates]),
            "ratio": report.ratio(rates, name, "padded"),
        }
    return result


def draw(padding: dict, figures: Path) -> None:
    """padding: what packing.json holds. Three panels: the lengths; what positions hold; tokens per
    second."""
    figure, (lengths, positions, speed) = style.figure(2.0, 1, 3)
    lengths.plot(padding["lengths"], range(100), color=style.SERIES[1])
    lengths.set(ylabel="% of conversations", xlabel="up to so many tokens", ylim=(0, 100))
    names = list(PADDINGS)
    colours = dict(answer=style.SERIES[1], question="#f0b48c", padding="#e4e4e4")
    for y, name in enumerate(names):
        text, counted = 100 * padding[name]["text"], 100 * padding[name]["counted"]
        parts = dict(answer=counted, question=text - counted, padding=100 - text)
        style.stack(positions, y, parts, colours)
    style.rows_of(positions, names)
    positions.set(xlim=(0, 100), xlabel="% answer, question, padding")
    spreads = [padding[name]["ratio"] for name in names]
    style.ranges(speed, range(len(names)), spreads, style.SERIES[1])
    style.rows_of(speed, names, hidden=True)
    speed.set(xlabel="tokens/s, over padded")
    style.save(figure, figures / "packing.svg")


def main():
    args = report.parse(report.arguments(__doc__, rounds=11), rounds=1)
    size = (TOY_CONVERSATIONS, TOY) if args.toy else (CONVERSATIONS, {})
    results = measure(args.rounds, *size)
    table = report.Table()
    for name in PADDINGS:
        table.row({"": name} | results[name])
    report.finish("packing", results, args, draw)


if __name__ == "__main__":
    main()
