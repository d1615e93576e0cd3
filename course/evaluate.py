"""The lesson of inference/evaluate.py: what is scored, long texts, batches."""

import torch

from base.groups import Groups
from base.model_config import MoEConfig
from course import demo, form
from inference import evaluate
from inference.evaluate import Evaluator

CONTEXT = 16
CONFIG = demo.tiny_config(MoEConfig, seq_length=CONTEXT, llama=True, vocab_size=61)

WITHOUT = form.Removals()


@WITHOUT.replace("left", evaluate, "pad", "Texts are cut on the right. Which scores change?")
def cut_on_the_right(rows, seq_length, pad=evaluate.pad):
    """Those of texts beyond the context: the end of the text, which is to be scored, is what is cut
    off, and other tokens are scored. Nothing looks wrong: they are log-probabilities too."""
    cut = []
    for context, continuation in rows:
        ids = [*context, *continuation][: seq_length + 1]
        cut.append((ids[: -len(continuation)], ids[-len(continuation) :]))
    return pad(cut, seq_length)


def make_evaluator() -> Evaluator:
    """The evaluator of a Llama with random weights, float64; 4 requests in a batch."""
    return Evaluator(demo.make_model(CONFIG), None, Groups(), 4)


def random_requests(count: int) -> list[evaluate.Request]:
    """Contexts of 1 to 12 tokens, continuations of 1 to 3."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for n in range(count):
        ids = torch.randint(61, (2 + n * 5 % 12 + n % 3,), generator=generator).tolist()
        split = 1 + n * 5 % 12
        requests.append((ids[:split], ids[split:]))
    return requests


def token_log_probs(model, ids: list[int]) -> list[float]:
    """log p of each token after those before it, from a training forward."""
    ids = torch.tensor([ids])
    return (-model(ids[:, :-1], ids[:, 1:])[0]).tolist()


def largest_difference(a: list[evaluate.Score], b: list[evaluate.Score]) -> float:
    return max(abs(x - y) for (x, _), (y, _) in zip(a, b, strict=True))


def teach(lesson: form.Lesson) -> None:
    evaluator = make_evaluator()
    with lesson.removed():
        one_request(lesson, evaluator)
        long_texts(lesson, evaluator)
        batches(lesson, evaluator)


def one_request(lesson: form.Lesson, evaluator: Evaluator) -> None:
    lesson.predict(
        "A context of 7 tokens, a continuation of 3. For log p, how many tokens does the model"
        " read, and how many positions go through the head, where a training forward has all?",
        "tokens read; positions through the head",
    )
    ids = [5, 9, 2, 44, 17, 3, 30, 8, 21, 50]
    through_head = []
    model = evaluator.model
    hook = model.head.output.register_forward_hook(
        lambda module, inputs, logits: through_head.append(logits.numel() // 61)
    )
    ((log_p, _),) = evaluator.log_likelihoods([(ids[:7], ids[7:])])
    hook.remove()
    by_hand = sum(token_log_probs(model, ids)[-3:])
    lesson.check(
        f"9, for the last token predicts nothing; {sum(through_head)}. log p = {log_p:.4f}; a"
        f" training forward gives {by_hand:.4f}",
        through_head == [3] and abs(log_p - by_hand) < 1e-12,
        [9, sum(through_head)],
    )


def long_texts(lesson: form.Lesson, evaluator: Evaluator) -> None:
    lesson.predict(
        f"The model's context holds {CONTEXT} tokens. The same continuation after 30 tokens: which"
        " of them are read? And a text of 40 tokens, scored as a whole: how many forward passes?",
        "forward passes",
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (40,), generator=generator).tolist()
    ((log_p, _),) = evaluator.log_likelihoods([(ids[:30], ids[30:33])])
    by_hand = sum(token_log_probs(evaluator.model, ids[33 - CONTEXT - 1 : 33])[-3:])
    lesson.check(
        f"the last {CONTEXT} before the last one: log p = {log_p:.4f}; by hand {by_hand:.4f}",
        abs(log_p - by_hand) < 1e-12,
    )
    requests = evaluate.windows(ids, 0, CONTEXT)
    sizes = [(len(context), len(continuation)) for context, continuation in requests]
    scored = [token for _, continuation in requests for token in continuation]
    lesson.check(
        f"{len(requests)}; tokens to read and to score: {', '.join(f'{c} {y}' for c, y in sizes)}."
        " Each of the 40 is scored once, the last 8 in a full context too",
        scored == ids and sizes == [(1, 16), (1, 16), (9, 8)],
        [len(requests)],
    )


def batches(lesson: form.Lesson, evaluator: Evaluator) -> None:
    lesson.predict(
        "24 requests, padded four by four. Does a score depend on the others in its batch? How many"
        " positions are padding, the longest requests first, and in the order in which they come?"
    )
    requests = random_requests(24)
    together = evaluator.log_likelihoods(requests)
    alone = [evaluator.log_likelihoods([request])[0] for request in requests]
    difference = largest_difference(together, alone)
    lesson.check(f"largest difference to each by itself {difference:.0e}", difference < 1e-12)
    lengths = [len(context) + len(continuation) - 1 for context, continuation in requests]
    by_length = evaluator.batches(lengths)
    as_they_come = [range(start, start + 4) for start in range(0, 24, 4)]
    padding = []
    for numbers in (by_length, as_they_come):
        sizes = [[lengths[n] for n in batch] for batch in numbers]
        padding.append(sum(4 * max(batch) - sum(batch) for batch in sizes))
    lesson.check(
        f"{padding[0]} and {padding[1]}, beside {sum(lengths)} tokens", padding[0] < padding[1] / 3
    )


if __name__ == "__main__":
    form.run("evaluate")
