"""Files of pairs of texts, as models/seq2seq.py reads them.

    {"source": "..", "target": ".."}        a text, and what is written for it

Other fields are ignored. A pair of which a text is too long is refused, or with --skip-bad-examples
left out and counted. Pairs of one source are on the same side: trained on, or held out.
"""

from collections.abc import Callable
from typing import NamedTuple

from finetune.chat import message
from finetune.chat_template import ChatError
from finetune.sft_data import NO_SKIP, read_lines
from run.tokenizer import TokenizerError


class Pair(NamedTuple):
    """Token ids. ids: of the source."""

    ids: list[int]
    target: list[int]


class Part(NamedTuple):
    """How one text of a pair is read."""

    name: str
    encode: Callable[[str], list[int]]
    # The flag of the most tokens that it may have, and this number.
    flag: str
    most: int

    def ids(self, record: dict) -> list[int]:
        """Raises ChatError."""
        if not isinstance(record.get(self.name), str):
            raise ChatError('is no pair; a line has "source" and "target", both text', NO_SKIP)
        try:
            ids = self.encode(record[self.name])
        except (TokenizerError, UnicodeEncodeError) as e:
            raise ChatError(f"its {self.name} cannot be encoded ({e})", "not text") from None
        if len(ids) > self.most:
            why = f"its {self.name} has {len(ids)} tokens, and {self.flag} is {self.most}"
            raise ChatError(why, "too long")
        return ids


def read_pairs(
    paths: list[str], flag: str, source: Part, target: Part, skip: bool
) -> tuple[list[Pair], str]:
    """(pairs, a summary), as of sft_data.read_lines."""

    def pair(record: dict) -> Pair:
        return Pair(source.ids(record), target.ids(record))

    def asked(record: dict) -> list[dict]:
        return [message("user", record["source"])]

    pairs, left_out = read_lines(paths, flag, pair, lambda pair: pair, asked, skip)
    return pairs, f"{len(pairs):,} pairs{left_out}"
