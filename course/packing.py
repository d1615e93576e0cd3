"""The lesson of packing.py and document_mask.py: what packing saves, and that it changes
nothing."""

from unittest import mock

import numpy as np
import torch

import gpt
from base import document_mask
from course import demo, form
from finetune.packing import Example, Packed
from run.data import Batch

S, V = 64, 257

WITHOUT = form.Removals()


@WITHOUT.add("mask", "Attention is causal only. Which positions change?")
def no_mask():
    """All from there on: later documents attend to the changed one. They are trained with a context
    that they do not have when the model is used. The loss falls all the same."""
    causal = torch.ones(1, S, S, dtype=torch.bool).tril()
    return mock.patch.object(document_mask, "visible", lambda documents: causal)


@WITHOUT.add("positions", "Positions do not restart in each document. Does it matter?")
def no_positions():
    """Yes: the loss of a document then depends on its place in the row. This GPT has learned
    positions, and they are trained for other places than a prompt has. With rotary positions it
    would not matter: there attention depends only on the difference of two positions."""
    return mock.patch.object(
        gpt, "positions_of", lambda documents: torch.arange(S).expand_as(documents)
    )


# --- data -----------------------------------------------------------------------------------------


def skewed_examples(n: int, s: int, seed: int = 0) -> list[Example]:
    """n examples of random ids with log-normal lengths: the mean is about s / 8, none takes more
    than s positions. Every target counts."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(s / 12), 0.9, n).astype(int), 1, s)
    return [Example(rng.integers(V, size=x + 1).tolist(), [True] * (x + 1)) for x in lengths]


def make_model() -> gpt.GPT:
    config = demo.tiny_config(seq_length=S, attention="explicit")
    return gpt.GPT(config).double()


def teach_fill(lesson: form.Lesson) -> Packed:
    packed = Packed(skewed_examples(2000, S), S, seed=0)
    lengths = np.array(packed.lengths)
    lesson.predict(
        f"2,000 examples take {lengths.sum():,} positions: half of them at most"
        f" {int(np.median(lengths))}, a twentieth more than {int(np.quantile(lengths, 0.95))}. A"
        f" row has s = {S}. With one example a row, what share of the positions is used? Packed by"
        " first-fit, how many rows are there?",
        "share used; rows",
    )
    padded, used = lengths.mean() / S, packed.fill(0)
    for name, rows, share in (("padded", 2000, padded), ("packed", packed.num_sequences, used)):
        lesson.say(f"{name} {rows:>6,} rows {share:>7.1%}  {form.bar(share, 1)}")
    fewest = -(-int(lengths.sum()) // S)
    lesson.check(
        f"{packed.num_sequences} rows, and at least {fewest} are needed: {used:.1%} used,"
        f" {used / padded:.1f} times as many tokens for the same computation",
        used > 0.98,
        [padded, packed.num_sequences],
    )
    return packed


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


def step(batches: list[Batch]) -> tuple[float, dict]:
    """(sum of the counted losses, gradients)"""
    model = make_model()
    total = 0.0
    for batch in batches:
        losses = model(batch.tokens, batch.targets, gpt.Context(documents=batch.documents))
        loss = (losses * batch.loss_mask).sum()
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def teach_equal(lesson: form.Lesson, packed: Packed) -> None:
    lesson.predict(
        "Eight packed rows, and the same examples with a row for each. How far apart are the loss"
        " and the gradients, in float64?"
    )
    samples = range(8)
    examples = [packed.examples[i] for sample in samples for i in packed.row(sample)]
    total, of_rows = step([packed.batch(samples)])
    alone, one_by_one = step([Packed([example], S, None).batch([0]) for example in examples])
    largest = max(g.abs().max() for g in one_by_one.values())
    worst = max((of_rows[n] - g).abs().max() / largest for n, g in one_by_one.items())
    count = packed.counted_tokens(samples)
    lesson.check(
        f"loss {total / count:.6f} in 8 rows, {alone / count:.6f} in {len(examples)} rows;"
        f" gradients differ by {worst:.0e} of the largest one",
        abs(total / alone - 1) < 1e-10 and worst < 1e-10,
    )


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        packed = teach_fill(lesson)
        teach_apart(lesson, packed)
        teach_equal(lesson, packed)


if __name__ == "__main__":
    form.run("packing")
