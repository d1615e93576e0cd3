"""Files of texts with labels, or of questions with answers, as models/classify.py reads them.

    {"text": "..", "label": ".."}           {"text": "..", "second": "..", "label": ".."}
    {"question": "..", "context": "..", "answer": "..", "start": 7}     start: of the answer, in
                                                                        characters of the context

A line becomes [CLS] first text [SEP] second text [SEP]; a RoBERTa, which has one type of token, has
[SEP] twice between them. What is longer than --seq-length loses its end; of two texts each keeps
half of the room at least. An answer that is lost so is refused, or with --skip-bad-examples left
out and counted. A label 1 is read as "1". Examples of one text, or context, are on the same side:
trained on, or held out.
"""

import unicodedata
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.chat import message
from finetune.chat_template import ChatError, ChatTokenizer, Tokens
from finetune.sft_data import NO_SKIP, open_examples, read_lines


class Row(NamedTuple):
    """An example. The first n ids have type 0; then the second text begins."""

    ids: list[int]
    n: int
    record: dict
    # Of the second text: the characters [first, end) of each token.
    characters: list[tuple[int, int]]
    # The positions of the answer's first and last token; None where there is none.
    span: list[int] | None


class Reader:
    """Lines to rows of at most `limit` tokens. cls, sep: ids of special tokens; types: of tokens,
    how many the model has. answered: whether a line must say what is right."""

    def __init__(self, tokenizer, cls: int, sep: int, limit: int, types=2, answered=True):
        self.tokenizer, self.cls, self.sep = ChatTokenizer(tokenizer), cls, sep
        self.limit, self.types, self.answered = limit, types, answered

    def encode(self, text: str) -> Tokens:
        """Raises ChatError."""
        # Not with its `encode`, which looks for an end of text: a BERT has none.
        return self.tokenizer.encode_piece(text)

    def row(self, record: dict) -> Row:
        """Raises ChatError."""
        if isinstance(record.get("label"), int):
            record = record | {"label": str(record["label"])}
        spans = "context" in record
        first, second = ("question", "context") if spans else ("text", "second")
        paired = second in record
        names = [first, *[second] * paired, *["answer" if spans else "label"] * self.answered]
        if not all(isinstance(record.get(name), str) for name in names):
            form = '"text", or "question" and "context"; all are text'
            if self.answered:
                form = '"text" and "label", or "question", "context", "answer" and "start"'
                form += "; all but start are text"
            raise ChatError(f"is no example; a line has {form}", NO_SKIP)
        a, b = (self.encode(record.get(name, "")) for name in (first, second))
        between = [self.sep] * (2 if paired and self.types == 1 else 1)
        room = self.limit - 1 - len(between) - paired
        of_a = a.ids[: max(room - len(b.ids), room // 2)]
        of_b = b.ids[: room - len(of_a)]
        unlabelled = self.answered and not spans and not record["label"]
        if unlabelled or not of_a or (paired and not of_b):
            raise ChatError("has an empty text or label", "empty")
        ids = [self.cls, *of_a, *between, *of_b, *[self.sep] * paired]
        ends = (with_accents(record.get(second, ""), end) for end in b.ends[: len(of_b)])
        characters = list(zip(b.starts, ends))
        n = 1 + len(of_a) + len(between)
        span = self.span(record, characters, n) if spans and self.answered else None
        return Row(ids, n, record, characters, span)

    def span(self, record: dict, characters: list[tuple[int, int]], n: int) -> list[int]:
        """The positions of an answer's first and last token. n: that of the context. Raises
        ChatError."""
        start, answer = record.get("start"), record["answer"]
        here = isinstance(start, int) and start >= 0
        if not here or not record["context"].startswith(answer, start):
            raise ChatError(f"start {start}: the answer does not stand there", "not at start")
        end = start + len(answer)
        places = enumerate(characters, n)
        found = [k for k, (begin, stop) in places if begin < end and stop > start]
        if not found or characters[-1][1] < end:
            raise ChatError("the answer is empty, or beyond --seq-length", "beyond --seq-length")
        return [found[0], found[-1]]

    def read(self, paths: list[str], flag: str, skip: bool) -> tuple[list[Row], str]:
        """(rows, a summary), as of sft_data.read_lines."""

        def asked(record: dict) -> list[dict]:
            return [message("user", record.get("context", record.get("text")))]

        rows, left_out = read_lines(paths, flag, self.row, lambda row: row.record, asked, skip)
        return rows, f"{len(rows):,} examples{left_out}"


def with_accents(text: str, end: int) -> int:
    """An end of a token, moved behind the accents that follow: many tokenizers drop them."""
    while unicodedata.category(text[end : end + 1] or " ") == "Mn":
        end += 1
    return end


def open_rows(
    config, world, reader: Reader, labels: list[str] | None
) -> tuple[list[Row], list[Row], list[str]]:
    """(what is learned from, what is held out, the labels; [] for answers) of --data and
    --val-data. labels: those of --load; None: those of --data. Raises ChatError."""

    read = partial(reader.read, skip=config.skip_bad_examples)
    learned, held_out = open_examples(config, world, None, read, "example")
    # An answer counts as a label without a name.
    found = {row.record["label"] if row.span is None else "" for row in [*learned, *held_out]}
    known = sorted(found - {""}) if labels is None else labels
    if found - set(known or [""]) or len(known) == 1:
        what = f"has the labels {sorted(found)} ('' for an answer)"
        rule = "two or more would fit, or answers alone"
        if labels is not None:
            rule = f"--load has {labels or 'answers'}"
        raise ChatError(f"--data {' '.join(config.data)}: {what}; {rule}")
    return learned, held_out, known


# --- what a model predicts ------------------------------------------------------------------------


def best(scores: Tensor, row: Row, labels: list[str]) -> tuple[str, float]:
    """(the label or the answer, its probability). scores: of the example, [n, 1] for n labels, [s,
    2] for the first and the last token of an answer."""
    if labels:
        p = scores[:, 0].softmax(0)
        return labels[p.argmax()], p.max().item()
    p = scores[: len(row.ids)].softmax(0)[row.n : -1]  # [tokens of the context, 2]
    # White space neither begins nor ends an answer.
    context = row.record["context"]
    p = p * torch.tensor([[bool(context[a:b].strip())] for a, b in row.characters])
    both = p[:, :1].mul(p[:, 1]).triu()
    first, last = divmod(int(both.argmax()), len(p))
    begin, end = row.characters[first][0], row.characters[last][1]
    return context[begin:end].strip(), both.max().item()
