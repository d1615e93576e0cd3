"""The data of prompt learning: templates and JSON lines become examples with virtual tokens.

    line of data            {"taskname": "sentiment", "sentence": "good fun", "label": "positive"}
    its task's template     "<|VIRTUAL_PROMPT_0|>{sentence} sentiment:<|VIRTUAL_PROMPT_1|>{label}"
    virtual_token_splits    [3, 2]

    V V V g o o d _ f u n _ s e n t i m e n t : V V p o s i t i v e <end of text>
                                                    '---------- loss ----------'  answer_only_loss

The names are NeMo's. A virtual token is an id beyond the vocabulary, V + j for the j-th one, and is
never a target. Which vector stands for it is decided in prompt_tuning.py.

    python -m prompts.prompt_data       an example, token by token

Literal text and fields are tokenised one by one. So the prompt that asks for an answer has just the
tokens with which its example began in training. An example that is too long, its answer included,
loses the end of its `truncate_field`; where that is null, it is skipped.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from msgspec import Meta, Struct, field

from base import json_files, terminal
from base.errors import InputError
from data import Batch, Dataset
from prompts import nemo_config

STYLES = ("prompt-tuning", "p-tuning", "inference", "fine-tuning")
ENCODERS = ("mlp", "lstm", "tpmlp")
MARKER = re.compile(r"<\|VIRTUAL_PROMPT_(\d+)\|>")
FIELD = re.compile(r"\{(\w+)\}")
MARKER_OR_FIELD = re.compile(r"(<\|VIRTUAL_PROMPT_\d+\|>|\{\w+\})")
# what an output file has beside the fields of a template
RESERVED = {"taskname", "prediction", "finish"}
# with more, answers are no classes
MOST_ANSWERS = 100
# in the place of a field's name; no field can be called so
END_OF_TEXT = "end of text"


class PromptError(InputError):
    """A template, a configuration or a line of data that cannot be used; the message says which,
    and what would fit."""


# --- templates ------------------------------------------------------------------------------------


class Example(NamedTuple):
    taskname: str
    # text and virtual tokens
    ids: list[int]
    # the tokens from this position on are targets, if they are text
    loss_from: int
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
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.taskname):
            raise self.error(
                "the name of a task is made of letters, digits, _ and -, and does not begin with"
                " one of the last two"
            )
        self.check_markers()
        self.check_fields()
        self.check_answer()

    def error(self, problem: str) -> PromptError:
        return PromptError(f"task_templates, {self.taskname!r}: {problem}")

    def check_markers(self) -> None:
        splits = self.virtual_token_splits
        markers = [int(number) for number in MARKER.findall(self.prompt_template)]
        wanted = list(range(len(splits)))
        if sorted(markers) != wanted:
            raise self.error(
                f"the markers <|VIRTUAL_PROMPT_i|> have the numbers {markers}, and"
                f" virtual_token_splits {splits} asks for {wanted}, each once"
            )
        if sum(splits) != self.total_virtual_tokens:
            raise self.error(
                f"virtual_token_splits {splits} must add up to total_virtual_tokens"
                f" {self.total_virtual_tokens}, not to {sum(splits)}"
            )

    def check_fields(self) -> None:
        fields = self.fields
        for name in ("truncate_field", "answer_field"):
            value = getattr(self, name)
            if value is not None and value not in fields:
                raise self.error(
                    f"{name} {value!r} is not a field of the template, which has {fields}"
                )
        reserved = RESERVED & set(fields)
        if reserved:
            raise self.error(
                f"fields may not be called {sorted(reserved)}: these names have another meaning"
            )
        if len(set(fields)) < len(fields):
            raise self.error(f"a field stands twice in the template: {fields}")

    def check_answer(self) -> None:
        answer = self.answer_field
        if answer is None:
            if self.answer_only_loss:
                raise self.error("answer_only_loss needs an answer_field")
            return
        last = self.pieces[-1]
        if last != f"{{{answer}}}":
            raise self.error(
                f"answer_field {answer!r} must end the template, which ends with {last!r}"
            )
        if answer == self.truncate_field:
            raise self.error(
                f"answer_field {answer!r} is also the truncate_field; name another one, or null"
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
        excess = sum(len(ids) for _, ids in parts) - limit
        if excess > 0:
            parts = self.truncate(parts, excess)
            if parts is None:
                return None
        ids = [i for _, part in parts for i in part]
        loss_from = 0
        if self.answer_only_loss:
            loss_from = sum(
                len(part) for name, part in parts if name not in (self.answer_field, END_OF_TEXT)
            )
        return Example(self.taskname, ids, loss_from, truncated=excess > 0)

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
        """(field, END_OF_TEXT or None, its token ids) for each piece of the template."""
        # the id of the first virtual token at each marker
        starts = [first_virtual + int(n) for n in np.cumsum([0, *self.virtual_token_splits])]
        parts = []
        for piece in self.pieces:
            marker = MARKER.fullmatch(piece)
            name = FIELD.fullmatch(piece)
            if marker:
                number = int(marker[1])
                parts.append((None, list(range(starts[number], starts[number + 1]))))
            elif not name:
                parts.append((None, [int(i) for i in tokenizer.encode(piece)]))
            elif answer or name[1] != self.answer_field:
                ids = [int(i) for i in tokenizer.encode(str(record[name[1]]))]
                parts.append((name[1], ids))
        if answer:
            parts.append((END_OF_TEXT, [tokenizer.eot]))
        return parts

    def truncate(self, parts: list[tuple], excess: int) -> list[tuple] | None:
        """The parts with `excess` tokens less in the truncate_field; None where that is too
        short."""
        if self.truncate_field is None:
            return None
        truncated = []
        for name, ids in parts:
            if name == self.truncate_field:
                kept = len(ids) - excess
                if kept < 0:
                    return None
                ids = ids[:kept]
            truncated.append((name, ids))
        return truncated


# --- configuration --------------------------------------------------------------------------------


class PromptTuning(Struct, forbid_unknown_fields=True):
    """How the tables of new tasks are initialised, one entry for each new task."""

    # random; or text: the embeddings of a text, repeated until the table is full
    new_prompt_init_methods: list[str] = field(default_factory=list)
    new_prompt_init_text: list[str | None] = field(default_factory=list)


class PTuning(Struct, forbid_unknown_fields=True):
    """The encoder that computes the virtual tokens' vectors in p-tuning."""

    encoder_type: str = "mlp"
    # its hidden size; 0 for the model's
    encoder_hidden: Annotated[int, Meta(ge=0, le=2**16)] = 0
    # linear layers of the mlp, layers of the lstm; tpmlp always has two
    num_layers: Annotated[int, Meta(ge=1, le=64)] = 2
    dropout: float = 0.0
    # of the encoder's inputs
    init_std: Annotated[float, Meta(gt=0, le=1000)] = 1.0


class Data(Struct, forbid_unknown_fields=True):
    """Files of JSON lines."""

    train_ds: list[str] = field(default_factory=list)
    validation_ds: list[str] = field(default_factory=list)
    # null: the model's context
    max_seq_length: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    shuffle: bool = True


class PromptConfig(Struct, forbid_unknown_fields=True):
    """The content of --prompt-config, a file with NeMo's names. Raises PromptError."""

    task_templates: list[Template]
    # fine-tuning is elsewhere in NeMo: no virtual tokens, the whole model is trained
    virtual_prompt_style: str = "p-tuning"
    language_model_path: str | None = None
    # a prompt file, with the existing tasks
    restore_path: str | None = None
    existing_tasks: list[str] = field(default_factory=list)
    new_tasks: list[str] = field(default_factory=list)
    prompt_tuning: PromptTuning = field(default_factory=PromptTuning)
    p_tuning: PTuning = field(default_factory=PTuning)
    data: Data = field(default_factory=Data)

    @classmethod
    def read(cls, path: "str | Path") -> "PromptConfig":
        return cls.read_with_notices(path)[0]

    @classmethod
    def read_with_notices(cls, path: "str | Path") -> "tuple[PromptConfig, list[str]]":
        """(the configuration, what to tell the user about it)"""
        try:
            content, notices = nemo_config.read(path)
            return json_files.convert(content, cls, str(path)), notices
        except json_files.JSONError as e:
            raise PromptError(f"--prompt-config {e}") from None

    @classmethod
    def of(cls, content: dict) -> "PromptConfig":
        try:
            return json_files.convert(content, cls, "the configuration")
        except json_files.JSONError as e:
            raise PromptError(str(e)) from None

    @property
    def templates(self) -> dict[str, Template]:
        return {template.taskname: template for template in self.task_templates}

    @property
    def tasks(self) -> list[str]:
        return [*self.existing_tasks, *self.new_tasks]

    @property
    def learned(self) -> bool:
        """Whether prompts are learned, and the model is frozen."""
        return self.virtual_prompt_style in ("prompt-tuning", "p-tuning")

    def first_ids(self, vocab_size: int) -> dict[str, int]:
        """The id of each task's first virtual token."""
        first_ids = {}
        next_id = vocab_size
        for task in self.tasks:
            first_ids[task] = next_id
            next_id += self.templates[task].total_virtual_tokens
        return first_ids

    def __post_init__(self):
        if self.virtual_prompt_style not in STYLES:
            raise PromptError(
                f"virtual_prompt_style {self.virtual_prompt_style!r}: must be one of"
                f" {', '.join(STYLES)}"
            )
        self.check_tasks()
        self.check_virtual_tokens()
        if not self.new_tasks:
            raise PromptError("new_tasks is empty: name the tasks to learn")
        if self.existing_tasks and not self.restore_path:
            raise PromptError(
                f"existing_tasks {self.existing_tasks}: restore_path must name the prompt file that"
                " has them"
            )
        if self.virtual_prompt_style == "prompt-tuning":
            self.check_init_methods()
        self.check_encoder()

    def check_tasks(self) -> None:
        """Each task has one template and stands in one list."""
        if len(self.templates) < len(self.task_templates):
            raise PromptError("task_templates: two have the same taskname")
        for name in ("existing_tasks", "new_tasks"):
            for task in getattr(self, name):
                if task not in self.templates:
                    raise PromptError(
                        f"{name}: {task!r} has no template; there are {sorted(self.templates)}"
                    )
        if len(set(self.tasks)) < len(self.tasks):
            raise PromptError(
                f"existing_tasks {self.existing_tasks}, new_tasks {self.new_tasks}: a task stands"
                " there twice"
            )

    def check_virtual_tokens(self) -> None:
        """There are virtual tokens where prompts are learned, and only there."""
        if self.virtual_prompt_style == "inference":
            return
        for task in self.tasks:
            virtual_tokens = self.templates[task].total_virtual_tokens
            if self.learned != (virtual_tokens > 0):
                raise PromptError(
                    f"{task!r} has {virtual_tokens} virtual tokens, and virtual_prompt_style is"
                    f" {self.virtual_prompt_style}"
                )

    def check_init_methods(self) -> None:
        methods = self.prompt_tuning.new_prompt_init_methods
        texts = self.prompt_tuning.new_prompt_init_text
        unknown = set(methods) - {"text", "random"}
        if len(methods) != len(self.new_tasks) or unknown:
            raise PromptError(
                f"prompt_tuning.new_prompt_init_methods {methods}: one of text and random for each"
                f" of new_tasks {self.new_tasks}"
            )
        for n, method in enumerate(methods):
            has_text = n < len(texts) and texts[n]
            if method == "text" and not has_text:
                raise PromptError(
                    f"prompt_tuning.new_prompt_init_text {texts}: {self.new_tasks[n]!r} begins from"
                    " a text, and none stands in its place"
                )

    def check_encoder(self) -> None:
        encoder = self.p_tuning.encoder_type
        if encoder not in ENCODERS:
            raise PromptError(
                f"p_tuning.encoder_type {encoder!r}: must be one of {', '.join(ENCODERS)}"
            )
        least, most = {"mlp": (2, 64), "lstm": (1, 64), "tpmlp": (2, 2)}[encoder]
        if not least <= self.p_tuning.num_layers <= most:
            only = str(least) if least == most else f"{least} to {most}"
            raise PromptError(
                f"p_tuning.num_layers {self.p_tuning.num_layers}: {encoder} has {only}"
            )
        if self.p_tuning.dropout:
            raise PromptError(
                f"p_tuning.dropout {self.p_tuning.dropout}: must be 0; the encoder's inputs are"
                " learned and few, with nothing to generalise over"
            )


# --- JSON lines -----------------------------------------------------------------------------------


def read_lines(path: str) -> Iterator[tuple[int, dict]]:
    """(line number, object) of a JSON-lines file, `-` for standard input. Raises PromptError,
    naming the line."""
    try:
        yield from json_files.read_lines(path)
    except json_files.JSONError as e:
        raise PromptError(str(e)) from None


def read_examples(
    paths: list[str],
    templates: dict[str, Template],
    first_virtual: dict[str, int],
    tokenizer,
    limit: int,
    answer: bool = True,
) -> tuple[list[Example | None], list[dict], str]:
    """The examples of JSON-lines files.

    templates, first_virtual: of the tasks that may occur; limit, answer: as in Template.fill.
    Returns (for each line its example, None where it is too long; for each line its record; a
    summary with the numbers of truncated and skipped ones). Raises PromptError.
    """
    examples = []
    records = []
    for path in paths:
        for number, record in read_lines(path):
            task = record.get("taskname")
            if not isinstance(task, str) or task not in templates:
                raise PromptError(
                    f"{path}, line {number}: taskname {task!r} is none of the tasks here,"
                    f" {sorted(templates)}"
                )
            try:
                first = first_virtual[task]
                examples.append(templates[task].fill(record, tokenizer, first, limit, answer))
            except PromptError as e:
                raise PromptError(f"{path}, line {number}: {e}") from None
            records.append(record)
    dropped = dropped_answers(templates, examples, records) if answer else []
    return examples, records, _summary(paths, examples, limit) + "".join(dropped)


def dropped_answers(
    templates: dict[str, Template], examples: list[Example | None], records: list[dict]
) -> list[str]:
    """A warning for each task, and each of few answers, of which every example was skipped: it
    will not be learned."""
    kept = {}
    for example, record in zip(examples, records):
        task = record["taskname"]
        field = templates[task].answer_field
        kinds = [task]
        if field:
            kinds.append(f"{task}, {field} {str(record[field])[:30]!r}")
        for kind in kinds:
            kept.setdefault(kind, []).append(example is not None)
    if len(kept) > MOST_ANSWERS:
        return []
    return [
        f"; every example of {kind} is skipped ({len(found)})"
        for kind, found in kept.items()
        if not any(found)
    ]


def _summary(paths: list[str], examples: list[Example | None], limit: int) -> str:
    """How many examples there are, and how many were truncated or skipped. Raises PromptError
    where none is left."""
    usable = [example for example in examples if example]
    skipped = len(examples) - len(usable)
    truncated = sum(example.truncated for example in usable)
    if not usable:
        message = f"{', '.join(paths) or 'no file'}: no examples"
        if skipped:
            message += f"; {skipped} are longer than {limit} tokens and were skipped"
        raise PromptError(message)
    too_long = []
    if truncated:
        too_long.append(f"{truncated} truncated")
    if skipped:
        too_long.append(f"{skipped} skipped")
    summary = f"{len(usable)} examples"
    if too_long:
        summary += f", {' and '.join(too_long)} (longer than {limit} tokens)"
    return summary


# --- batches --------------------------------------------------------------------------------------


class PromptData(Dataset):
    """Examples as batches, with the interface of a data set of data.py. Sample number n is an
    example of epoch 0, then of epoch 1, and so on; all are padded to one length, `s`."""

    def __init__(
        self, examples: list[Example], vocab_size: int, seed: int | None, multiple_of: int = 1
    ):
        """seed: of the order, None for the order of the file. multiple_of: what the padded length
        must be divisible by (sequence parallelism)."""
        self.examples = examples
        self.vocab_size = vocab_size
        self.seed = seed
        # the epoch whose order is in `order`
        self.epoch = None
        longest = max(len(example.ids) for example in examples) - 1
        self.s = -(-longest // multiple_of) * multiple_of
        self.num_sequences = len(examples)
        num_tokens = sum(len(example.ids) for example in examples)
        text = json.dumps([example.ids for example in examples])
        self.index = {
            "tokens": num_tokens,
            "bytes": num_tokens,
            "corpus": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    def example(self, sample: int) -> Example:
        epoch, n = divmod(int(sample), self.num_sequences)
        if self.seed is None:
            return self.examples[n]
        if epoch != self.epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self.order = generator.permutation(self.num_sequences)
            self.epoch = epoch
        return self.examples[self.order[n]]

    def is_target(self, example: Example) -> list[bool]:
        """For each token of an example, whether the loss is taken on it."""
        return [
            n >= example.loss_from and token < self.vocab_size
            for n, token in enumerate(example.ids)
        ]

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers. All but these are [b, s]; a target that does not count
        is 0. The last id of an example is only a target, so where it stands is padding."""
        samples = list(samples)
        ids = torch.zeros(len(samples), self.s + 1, dtype=torch.int64)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        real = torch.zeros_like(mask[:, 1:])
        for row, sample in enumerate(samples):
            example = self.example(sample)
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            mask[row, : len(example.ids)] = torch.tensor(self.is_target(example))
            real[row, : len(example.ids) - 1] = True
        targets = ids * mask
        samples = torch.as_tensor(samples)
        return Batch(ids[:, :-1], targets[:, 1:], mask[:, 1:], samples, real=real)

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count: known before any forward."""
        # The first token of an example is nobody's target.
        return sum(sum(self.is_target(self.example(sample))[1:]) for sample in samples)

    def positions(self, samples) -> int:
        return sum(len(self.example(sample).ids) - 1 for sample in samples)


# --- python -m prompts.prompt_data ----------------------------------------------------------------


def show(token: int, tokenizer) -> str:
    """One token for people: its text, V0 for the first virtual token, <end> for the end of text."""
    if token >= tokenizer.vocab_size:
        return f"V{token - tokenizer.vocab_size}"
    if token == tokenizer.eot:
        return "<end>"
    return tokenizer.decode([token])


def main():
    from corpus.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    template = Template(
        taskname="sentiment",
        prompt_template="<|VIRTUAL_PROMPT_0|>{sentence} sentiment:<|VIRTUAL_PROMPT_1|>{label}",
        total_virtual_tokens=5,
        virtual_token_splits=[3, 2],
        truncate_field="sentence",
        answer_only_loss=True,
        answer_field="label",
    )
    record = {"taskname": "sentiment", "sentence": "good fun", "label": "positive"}
    for limit in (64, 30, 20):
        example = template.fill(record, tokenizer, tokenizer.vocab_size, limit)
        if example is None:
            print(f"at most {limit} tokens: skipped")
            continue
        text = " ".join(show(token, tokenizer) for token in example.ids)
        batch = PromptData([example], tokenizer.vocab_size, seed=None).batch([0])
        targets = batch.targets[batch.loss_mask].tolist()
        print(f"at most {limit} tokens: {text}")
        print(
            f"    {len(example.ids)} tokens; the loss is taken on"
            f" {[show(token, tokenizer) for token in targets]}"
        )


if __name__ == "__main__":
    terminal.run(main)
