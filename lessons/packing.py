"""The lesson of packing.py and document_mask.py: what packing saves, and that it changes nothing.

python -m tuning.packing
"""

import contextlib
import time
from unittest import mock

import numpy as np
import torch

import gpt
from attention import document_mask
from data import Batch, Dataset
from lessons import demo, form
from tuning.packing import Example, Packed

S, V = 64, 257


def no_mask():
    """Attention is causal, and sees the documents before."""
    causal = torch.ones(1, S, S, dtype=torch.bool).tril()
    return mock.patch.object(document_mask, "visible", lambda documents: causal)


def no_positions():
    """Positions go on through the documents of a row."""
    return mock.patch.object(
        gpt, "positions_of", lambda documents: torch.arange(S).expand_as(documents)
    )


WITHOUT = {"mask": no_mask, "positions": no_positions}

# the answers to what break_it asks
WHY = {
    "mask": (
        "All from there on: later documents attend to the changed one. They are trained with a"
        " context that they do not have when the model is used. The loss falls all the same."
    ),
    "positions": (
        "Yes: the loss of a document then depends on its place in the row. This GPT has learned"
        " positions, and they are trained for other places than a prompt has. With rotary positions"
        " it would not matter: there attention depends only on the difference of two positions."
    ),
}


# --- data -----------------------------------------------------------------------------------------


def skewed_examples(n: int, s: int, seed: int = 0) -> list[Example]:
    """n examples of random ids with log-normal lengths: the mean is about s / 8, none takes more
    than s positions. Every target counts."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(s / 12), 0.9, n).astype(int), 1, s)
    return [Example(rng.integers(V, size=x + 1).tolist(), [True] * (x + 1)) for x in lengths]


class Padded(Dataset):
    """The same examples, a row for each."""

    def __init__(self, examples: list[Example], s: int):
        self.rows = [Packed([example], s, None) for example in examples]
        self.s = s
        self.num_sequences = len(examples)

    def batch(self, samples) -> Batch:
        rows = [self.rows[n % self.num_sequences].batch([0]) for n in samples]
        batch = Batch(*map(torch.cat, zip(*rows)))
        return batch._replace(samples=torch.tensor(list(samples)), documents=None)

    def counted_tokens(self, samples) -> int:
        return sum(self.rows[n % self.num_sequences].counted_tokens([0]) for n in samples)

    def positions(self, samples) -> int:
        return sum(self.rows[n % self.num_sequences].positions([0]) for n in samples)


def counted_share(dataset) -> float:
    """The share of the positions of an epoch whose target counts."""
    n = dataset.num_sequences
    return dataset.counted_tokens(range(n)) / (n * dataset.s)


def tokens_per_second(model: gpt.GPT, datasets: list, b: int, rounds: int = 5) -> list[float]:
    """Counted tokens over the seconds of forward and backward of b rows, for each data set. They
    take turns, so that what else this machine does meets all of them; the medians of the rounds."""
    rates = [[] for _ in datasets]
    for k in range(rounds + 1):
        for dataset, of_dataset in zip(datasets, rates):
            batch = dataset.batch(range(k * b, (k + 1) * b))
            begin = time.perf_counter()
            losses = model(batch.tokens, batch.targets, gpt.Context(documents=batch.documents))
            (losses * batch.loss_mask).sum().backward()
            of_dataset.append(int(batch.loss_mask.sum()) / (time.perf_counter() - begin))
            model.zero_grad()
    # the first round warms up
    return [float(np.median(of_dataset[1:])) for of_dataset in rates]


# --- the lesson -----------------------------------------------------------------------------------


def make_model() -> gpt.GPT:
    config = demo.tiny_config(seq_length=S, attention="explicit")
    return gpt.GPT(config).double()


def teach_fill(lesson: form.Lesson) -> tuple[Packed, Padded]:
    examples = skewed_examples(2000, S)
    packed, padded = Packed(examples, S, seed=0), Padded(examples, S)
    lengths = np.array(packed.lengths)
    lesson.predict(
        f"2,000 examples take {lengths.sum():,} positions: half of them at most"
        f" {int(np.median(lengths))}, a twentieth more than {int(np.quantile(lengths, 0.95))}. A"
        f" row has s = {S}. With one example a row, what share of the positions is used? Packed by"
        " first-fit, how many rows are there?"
    )
    shares = {"padded": counted_share(padded), "packed": counted_share(packed)}
    for name, dataset in (("padded", padded), ("packed", packed)):
        share = shares[name]
        lesson.say(f"{name} {dataset.num_sequences:>6,} rows {share:>7.1%}  {form.bar(share, 1)}")
    fewest = -(-int(lengths.sum()) // S)
    lesson.check(
        f"{packed.num_sequences} rows, and at least {fewest} are needed: {shares['packed']:.1%}"
        f" used, {shares['packed'] / shares['padded']:.1f} times as many tokens for the same"
        " computation",
        shares["packed"] > 0.98,
    )
    rates = tokens_per_second(make_model(), [padded, packed], b=8)
    lesson.say(
        f"measured, counted tokens per second: padded {rates[0]:,.0f}, packed {rates[1]:,.0f}"
    )
    return packed, padded


@torch.no_grad()
def teach_apart(lesson: form.Lesson, packed: Packed) -> None:
    batch = packed.batch([0])
    numbers = batch.documents[0].tolist()
    first = [numbers.index(n) for n in sorted(set(numbers))]
    start, stop = first[1], first[2]
    lesson.predict(
        f"A row has documents that begin at {', '.join(map(str, first))}. All tokens from {start}"
        f" to {stop - 1} are changed. At which positions do the logits change?"
    )
    model = make_model()
    other = batch.tokens.clone()
    other[:, start:stop] = (other[:, start:stop] + 1) % V
    context = gpt.Context(documents=batch.documents)
    logits = [model(tokens, context=context)[0] for tokens in (batch.tokens, other)]
    rows = (logits[0] != logits[1]).any(-1).nonzero().flatten().tolist()
    lesson.check(
        f"from {rows[0]} to {rows[-1]}, {len(rows)} positions: only in the changed document",
        rows == list(range(start, stop)),
    )
    lesson.break_it("mask", "Attention is causal only. Which positions change?", WHY["mask"])


def gradients(model: gpt.GPT, batch: Batch) -> tuple[float, dict]:
    """(sum of the counted losses, gradients)"""
    model.zero_grad()
    losses = model(batch.tokens, batch.targets, gpt.Context(documents=batch.documents))
    total = (losses * batch.loss_mask).sum()
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def teach_equal(lesson: form.Lesson, packed: Packed, padded: Padded) -> None:
    lesson.predict(
        "Eight packed rows, and the same examples with a row for each. How far apart are the loss"
        " and the gradients, in float64?"
    )
    model = make_model()
    samples = range(8)
    examples = [i for sample in samples for i in packed.row(sample)]
    total, of_rows = gradients(model, packed.batch(samples))
    alone, one_by_one = gradients(model, padded.batch(examples))
    largest = max(g.abs().max() for g in one_by_one.values())
    worst = max((of_rows[n] - g).abs().max() / largest for n, g in one_by_one.items())
    count = packed.counted_tokens(samples)
    lesson.check(
        f"loss {total / count:.6f} in 8 rows, {alone / count:.6f} in {len(examples)} rows;"
        f" gradients differ by {worst:.0e} of the largest one",
        abs(total / alone - 1) < 1e-10 and worst < 1e-10,
    )
    lesson.break_it(
        "positions", "Positions do not restart in each document. Does it matter?", WHY["positions"]
    )


def teach(lesson: form.Lesson) -> None:
    with lesson.mutate() if lesson.mutate else contextlib.nullcontext():
        packed, padded = teach_fill(lesson)
        teach_apart(lesson, packed)
        teach_equal(lesson, packed, padded)
