"""The special tokens of BERT and T5: those of the tokenizer, or new ids behind its own.

    BERT    [CLS] first text [SEP] second text [SEP]    [MASK] hides a token, [PAD] fills a row
    T5      <pad> begins what the decoder reads; </s> ends a text; <extra_id_0>, .. are sentinels

A tokenizer.json of a published model has them. Bytes have none: 256 ends a text there, and the
others are 257, 258, ..
"""

import itertools
import re
from typing import NamedTuple

from run.tokenizer import TokenizerError

SENTINELS = 100


class BertTokens(NamedTuple):
    sep: int
    cls: int
    mask: int
    pad: int
    # Of the tokenizer with these tokens.
    vocab_size: int

    @property
    def names(self) -> dict[int, str]:
        return {self.sep: "[SEP]", self.cls: "[CLS]", self.mask: "[MASK]", self.pad: ""}


class T5Tokens(NamedTuple):
    eos: int
    pad: int
    sentinels: list[int]
    vocab_size: int

    @property
    def names(self) -> dict[int, str]:
        names = {token: f"<extra_id_{n}>" for n, token in enumerate(self.sentinels)}
        return names | {self.eos: "</s>", self.pad: ""}


# Names in published tokenizers: BERT's, then RoBERTa's; T5's, then mT5's.
BERT_NAMES = [("[SEP]", "</s>"), ("[CLS]", "<s>"), ("[MASK]", "<mask>"), ("[PAD]", "<pad>")]
SENTINEL_NAMES = [(f"<extra_id_{n}>", f"▁<extra_id_{n}>") for n in range(SENTINELS)]
T5_NAMES = [("</s>",), ("<pad>",), *SENTINEL_NAMES]


def bert_tokens(tokenizer) -> BertTokens:
    ids, size = find(tokenizer, BERT_NAMES)
    return BertTokens(*ids, size)


def t5_tokens(tokenizer) -> T5Tokens:
    (eos, pad, *sentinels), size = find(tokenizer, T5_NAMES)
    return T5Tokens(eos, pad, sentinels, size)


def find(tokenizer, names: list[tuple[str, ...]]) -> tuple[list[int], int]:
    """(the id of each token, the size of the vocabulary with them). names: that each may have;
    the first token is the tokenizer's end of text where it has none of its names."""
    vocabulary = getattr(tokenizer, "vocabulary", {})
    size = tokenizer.vocab_size
    named_end = any(name in vocabulary for name in names[0])
    if named_end and tokenizer.eot not in vocabulary.values():
        # A new id for the end of text, which becomes the token of that name (models/masking.py).
        size = max(vocabulary.values()) + 1
    ids = []
    for of_token in names:
        known = [vocabulary[name] for name in of_token if name in vocabulary]
        if not known and not ids:
            known = [tokenizer.eot]
        if not known:
            known, size = [size], size + 1
        ids.append(known[0])
    return ids, size


def spell(ids: list[int], names: dict[int, str], tokenizer) -> str:
    """A text with the names of its special tokens; padding has none."""
    words = []
    for special, group in itertools.groupby(ids, names.__contains__):
        run = list(group)
        words += [names[i] for i in run] if special else [tokenizer.decode(run)]
    return "".join(words)


SENTINEL = re.compile(r"(<extra_id_\d+>)")


class T5Text:
    """Encodes the texts of a T5: `</s>` ends each, and `<extra_id_7>` in one is sentinel 7."""

    # `encode` adds the one that the tokenizer has.
    bos = None

    def __init__(self, tokenizer, vocab_size: int, prefix: str = "", imported: bool = False):
        """vocab_size: of the model, which may lack sentinels. prefix: comes before each text; it
        names the task. imported: the model has learned no token that its tokenizer lacks. Raises
        TokenizerError."""
        self.tokenizer, self.prefix, self.tokens = tokenizer, prefix, t5_tokens(tokenizer)
        if max(self.tokens.eos, self.tokens.pad) >= vocab_size:
            rule = f"has no </s> or no <pad> among the {vocab_size} ids that the model knows"
            raise TokenizerError(f"--tokenizer {tokenizer.name}: {rule}")
        learned = tokenizer.vocab_size if imported else vocab_size
        known = [token for token in self.tokens.sentinels if token < learned]
        self.sentinels = {self.tokens.names[token]: token for token in known}
        self.vocabulary = getattr(tokenizer, "vocabulary", {})
        # The space before it belongs to a sentinel of mT5.
        self.space = " " if SENTINEL_NAMES[0][1] in self.vocabulary else ""

    def encode(self, text: str) -> list[int]:
        """Raises TokenizerError; UnicodeEncodeError for half of a surrogate pair."""
        text, begin = self.prefix + text, self.tokenizer.bos
        for name in SENTINEL.findall(text):
            if name not in self.sentinels:
                raise TokenizerError(f"{name} is no token that the model has learned; leave it out")
        # A published tokenizer finds its sentinels itself.
        known = self.sentinels.keys() <= self.vocabulary.keys()
        ids = [] if begin is None else [begin]
        for part in [text] if known else SENTINEL.split(text):
            if part in self.sentinels:
                ids.append(self.sentinels[part])
            else:
                ids += map(int, self.tokenizer.encode(part.removesuffix(self.space)))
        return [*ids, self.tokens.eos]


def fill(text: str, written: str) -> str:
    """A text with what was written in the places of its sentinels: `<extra_id_0> France` in `The
    capital of <extra_id_0> is Paris`."""
    _, *pairs = SENTINEL.split(written)
    for name, words in zip(pairs[::2], pairs[1::2]):
        text = text.replace(name, words.strip(), 1)
    return text
