"""Templates of prompt learning: a line of data becomes an example with virtual tokens.

    line of data            {"taskname": "sentiment", "sentence": "good fun", "label": "positive"}
    its task's template     "<|VIRTUAL_PROMPT_0|>{sentence} sentiment:<|VIRTUAL_PROMPT_1|>{label}"
    virtual_token_splits    [3, 2]

    V V V g o o d _ f u n _ s e n t i m e n t : V V p o s i t i v e <end of text>
                                                    '---------- loss ----------'  answer_only_loss

The names are NeMo's. A virtual token is an id beyond the vocabulary, V + j for the j-th one. Which
vector stands for it is decided in prompt_tuning.py.

Literal text and fields are tokenised one by one. So the prompt that asks for an answer has just the
tokens with which its example began in training. An example that is too long, its answer included,
loses the end of its `truncate_field`; where that is null, it is skipped.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from prompt_tuning import PromptError

MARKER = re.compile(r"<\|VIRTUAL_PROMPT_(\d+)\|>")
FIELD = re.compile(r"\{(\w+)\}")
MARKER_OR_FIELD = re.compile(r"(<\|VIRTUAL_PROMPT_\d+\|>|\{\w+\})")
# in the place of a field's name, which has only word characters
VIRTUAL = "<|VIRTUAL_PROMPT|>"
# what an output file has beside the fields of a template
RESERVED = {"taskname", "prediction", "finish"}


class Example(NamedTuple):
    """As packing.Example."""

    # text and virtual tokens
    ids: list[int]
    # for each whether it is a target: a virtual token never is
    counted: list[bool]
    truncated: bool


class Template(Struct, forbid_unknown_fields=True, frozen=True):
    """One entry of `task_templates`. Raises PromptError; json_files.convert also checks the
    types."""

    taskname: str
    prompt_template: str
    total_virtual_tokens: Annotated[int, Meta(ge=0, lt=2**16)]
    # how many virtual tokens stand at the marker <|VIRTUAL_PROMPT_i|>
    virtual_token_splits: list[Annotated[int, Meta(ge=1, lt=2**16)]]
    # null: an example that is too long is skipped
    truncate_field: str | None = None
    answer_only_loss: bool = False
    answer_field: str | None = None

    def __post_init__(self):
        for fits, problem in self.rules():
            if not fits:
                raise PromptError(f"task_templates, {self.taskname!r}: {problem}")

    def rules(self) -> Iterator[tuple[bool, str]]:
        """(whether the template keeps a rule, what to say where it does not) of each rule."""
        named = bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.taskname))
        yield (
            named,
            "the name of a task is made of letters, digits, _ and -, and does not begin with one of"
            " the last two",
        )
        splits, total = self.virtual_token_splits, self.total_virtual_tokens
        markers = [int(number) for number in MARKER.findall(self.prompt_template)]
        wanted = list(range(len(splits)))
        yield (
            sorted(markers) == wanted,
            f"the markers <|VIRTUAL_PROMPT_i|> have the numbers {markers}, and"
            f" virtual_token_splits {splits} asks for {wanted}, each once",
        )
        yield (
            sum(splits) == total,
            f"virtual_token_splits {splits} must add up to total_virtual_tokens {total}, not to"
            f" {sum(splits)}",
        )
        fields, answer = self.fields, self.answer_field
        for name in ("truncate_field", "answer_field"):
            value = getattr(self, name)
            problem = f"{name} {value!r} is not a field of the template, which has {fields}"
            yield value is None or value in fields, problem
        reserved = sorted(RESERVED & set(fields))
        yield not reserved, f"fields may not be called {reserved}: these names have another meaning"
        yield len(set(fields)) == len(fields), f"a field stands twice in the template: {fields}"
        yield bool(answer) or not self.answer_only_loss, "answer_only_loss needs an answer_field"
        if answer:
            last = self.pieces[-1]
            problem = f"answer_field {answer!r} must end the template, which ends with {last!r}"
            yield last == f"{{{answer}}}", problem
            yield (
                answer != self.truncate_field,
                f"answer_field {answer!r} is also the truncate_field; name another one, or null",
            )

    @property
    def pieces(self) -> list[str]:
        """Literal text, {fields} and markers, in order."""
        return [piece for piece in MARKER_OR_FIELD.split(self.prompt_template) if piece]

    @property
    def fields(self) -> list[str]:
        return [piece[1:-1] for piece in self.pieces if FIELD.fullmatch(piece)]

    def fill(
        self, record: dict, tokenizer, first_virtual: int, limit: int, answer: bool = True
    ) -> Example | None:
        """The example of one record, at most `limit` tokens long; None where it cannot be that
        short.

        first_virtual: the id of the task's first virtual token. answer: with the answer and an
        end-of-text token; without, the prompt that asks for it. Raises PromptError for a record
        that lacks a field or has another one.
        """
        self.check_record(record, answer)
        parts = self.encode(record, tokenizer, first_virtual, answer)
        # one for the end of text
        excess = sum(len(ids) for _, ids in parts) + answer - limit
        if excess > 0:
            cut = next((ids for name, ids in parts if name and name == self.truncate_field), [])
            if excess > len(cut):
                return None
            del cut[len(cut) - excess :]
        ids, counted = [], []
        for name, part in parts:
            ids += part
            is_target = name == self.answer_field if self.answer_only_loss else name != VIRTUAL
            counted += [is_target] * len(part)
        if answer:
            ids.append(tokenizer.eot)
            counted.append(True)
        return Example(ids, counted, truncated=excess > 0)

    def check_record(self, record: dict, answer: bool) -> None:
        """Raises PromptError where the fields are not the template's."""
        wanted = [name for name in self.fields if answer or name != self.answer_field]
        expected = f"the template of {self.taskname!r} has the fields {self.fields}"
        missing = [name for name in wanted if name not in record]
        if missing:
            raise PromptError(f"{expected}; the line lacks {missing}")
        unknown = [name for name in record if name not in self.fields and name != "taskname"]
        if unknown:
            raise PromptError(f"{expected}; the line also has {unknown}")
        for name in wanted:
            if not isinstance(record[name], str | int | float):
                raise PromptError(f"field {name!r} is neither text nor a number")

    def encode(
        self, record: dict, tokenizer, first_virtual: int, answer: bool
    ) -> list[tuple[str | None, list[int]]]:
        """(field, VIRTUAL or None, its token ids) for each piece of the template."""
        # the id of the first virtual token at each marker
        starts = list(itertools.accumulate(self.virtual_token_splits, initial=first_virtual))
        parts = []
        for piece in self.pieces:
            marker = MARKER.fullmatch(piece)
            field = FIELD.fullmatch(piece)
            if marker:
                number = int(marker[1])
                parts.append((VIRTUAL, list(range(starts[number], starts[number + 1]))))
            elif not field:
                parts.append((None, [int(i) for i in tokenizer.encode(piece)]))
            elif answer or field[1] != self.answer_field:
                text = str(record[field[1]])
                parts.append((field[1], [int(i) for i in tokenizer.encode(text)]))
        return parts
