"""Templates and JSON lines to examples with virtual tokens in them: the data of prompt learning,
with NeMo's names.

    {"taskname": "sentiment", "sentence": "good fun", "label": "positive"}                              a line of data
    "<|VIRTUAL_PROMPT_0|>{sentence} sentiment:<|VIRTUAL_PROMPT_1|>{label}", virtual_token_splits [3, 2]  the template of its task

    V V V g o o d _ f u n _ s e n t i m e n t : V V p o s i t i v e <end of text>
                                                    `--- the loss, with answer_only_loss ---´

A virtual token is an id beyond the vocabulary, V + j; prompt_tuning.py says what vector stands for
it. It is never a label. Literal text and fields are tokenised one by one, so that the prompt of an
answer is the beginning of the example that it was trained on. What is too long, the answer
included, loses the end of its `truncate_field`, or is skipped where that is null.

    python -m prompts.prompt_data       an example, token by token
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from msgspec import Meta, Struct, field

from data import Batch
from runtime import json_files, terminal

STYLES = ("prompt-tuning", "p-tuning", "inference", "fine-tuning")
ENCODERS = ("mlp", "lstm", "tpmlp")
MARKER = re.compile(r"<\|VIRTUAL_PROMPT_(\d+)\|>")


class PromptError(ValueError):
    """A template, a configuration or a line of data that cannot be used; the message says which,
    and what would fit."""


class Template(Struct, forbid_unknown_fields=True, frozen=True):
    """One entry of `task_templates`. Raises PromptError; json_files.convert also checks the
    types."""

    taskname: str
    prompt_template: str
    total_virtual_tokens: Annotated[int, Meta(ge=0, lt=2**16)]
    virtual_token_splits: list[Annotated[int, Meta(ge=1, lt=2**16)]]
    # null: what is too long is skipped
    truncate_field: str | None = None
    answer_only_loss: bool = False
    answer_field: str | None = None

    def __post_init__(self):
        def wrong(problem):
            raise PromptError(f"task_templates, {self.taskname!r}: {problem}")

        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.taskname):
            wrong(
                "the name of a task is made of letters, digits, _ and -, and does not begin with"
                " one of the last two"
            )
        markers = [int(n) for n in MARKER.findall(self.prompt_template)]
        splits = self.virtual_token_splits
        if sorted(markers) != list(range(len(splits))):
            wrong(
                f"the markers <|VIRTUAL_PROMPT_i|> have the numbers {markers}, and"
                f" virtual_token_splits {splits} asks for {list(range(len(splits)))}, each once"
            )
        if sum(splits) != self.total_virtual_tokens:
            wrong(
                f"virtual_token_splits {splits} must add up to total_virtual_tokens"
                f" {self.total_virtual_tokens}, not to {sum(splits)}"
            )
        for name in ("truncate_field", "answer_field"):
            if getattr(self, name) is not None and getattr(self, name) not in self.fields:
                wrong(
                    f"{name} {getattr(self, name)!r} is not a field of the template, which has"
                    f" {self.fields}"
                )
        if taken := {"taskname", "prediction", "finish"} & set(self.fields):
            wrong(
                f"fields may not be called {sorted(taken)}: these are the names of something else"
            )
        if len(set(self.fields)) < len(self.fields):
            wrong(f"a field stands twice in the template: {self.fields}")
        if self.answer_only_loss and self.answer_field is None:
            wrong("answer_only_loss needs an answer_field")
        if self.answer_field is not None and self.pieces[-1] != f"{{{self.answer_field}}}":
            wrong(
                f"answer_field {self.answer_field!r} must end the template, which ends with"
                f" {self.pieces[-1]!r}"
            )
        if self.answer_field is not None and self.answer_field == self.truncate_field:
            wrong(
                f"answer_field {self.answer_field!r} is also the truncate_field; name another one,"
                " or null"
            )

    @property
    def pieces(self) -> list[str]:
        """Literal text, {fields} and markers, in order."""
        return [
            x for x in re.split(r"(<\|VIRTUAL_PROMPT_\d+\|>|\{\w+\})", self.prompt_template) if x
        ]

    @property
    def fields(self) -> list[str]:
        return [x[1:-1] for x in self.pieces if re.fullmatch(r"\{\w+\}", x)]

    def fill(
        self, record: dict, tokenizer, first_virtual: int, limit: int, answer: bool = True
    ) -> "Example | None":
        """The example of one record, at most `limit` tokens long; None where it cannot be that
        short. first_virtual: id of the task's first virtual token. answer: with the answer and an
        end-of-text token; without, the prompt that asks for it. Raises PromptError for a field that
        is missing or too many."""
        wanted = [name for name in self.fields if answer or name != self.answer_field]
        missing = [n for n in wanted if n not in record]
        more = [n for n in record if n not in self.fields and n != "taskname"]
        if missing or more:
            raise PromptError(
                f"the template of {self.taskname!r} has the fields {self.fields}; the line "
                + (f"lacks {missing}" if missing else f"also has {more}")
            )
        wrong = [n for n in wanted if not isinstance(record[n], str | int | float)]
        if wrong:
            raise PromptError(f"field {wrong[0]!r} is neither text nor a number")
        starts = np.cumsum([0, *self.virtual_token_splits])
        # (field or None, ids)
        parts = []
        for piece in self.pieces:
            marker = MARKER.fullmatch(piece)
            name = piece[1:-1]
            if marker:
                n = int(marker[1])
                parts.append(
                    (
                        None,
                        list(
                            range(
                                first_virtual + int(starts[n]), first_virtual + int(starts[n + 1])
                            )
                        ),
                    )
                )
            elif name in self.fields and piece == f"{{{name}}}":
                if answer or name != self.answer_field:
                    parts.append((name, [int(i) for i in tokenizer.encode(str(record[name]))]))
            else:
                parts.append((None, [int(i) for i in tokenizer.encode(piece)]))
        if answer:
            parts.append(("end of text", [tokenizer.eot]))
        excess = sum(len(ids) for _, ids in parts) - limit
        cut = False
        if excess > 0:
            kept = {
                name: len(ids) - excess
                for name, ids in parts
                if name == self.truncate_field and name is not None
            }
            if not kept or min(kept.values()) < 0:
                return None
            parts = [(name, ids[: kept[name]] if name in kept else ids) for name, ids in parts]
            cut = True
        ids = [i for _, part in parts for i in part]
        behind = sum(
            len(part) for name, part in parts if name in (self.answer_field, "end of text")
        )
        return Example(self.taskname, ids, len(ids) - behind if self.answer_only_loss else 0, cut)


class Example(NamedTuple):
    taskname: str
    # text and virtual tokens
    ids: list[int]
    # tokens from here on count as targets, if they are text
    loss_from: int
    truncated: bool


# --- configuration --------------------------------------------------------------------------------


class PromptTuning(Struct, forbid_unknown_fields=True):
    """How new tables begin: one entry for each new task."""

    # text: the embeddings of a text, over and over to fill the table; random
    new_prompt_init_methods: list[str] = field(default_factory=list)
    new_prompt_init_text: list[str | None] = field(default_factory=list)


class PTuning(Struct, forbid_unknown_fields=True):
    encoder_type: str = "mlp"
    # e; 0: h
    encoder_hidden: Annotated[int, Meta(ge=0, le=2**16)] = 0
    # of the lstm
    num_layers: Annotated[int, Meta(ge=1, le=64)] = 2
    dropout: float = 0.0
    # of the encoder's inputs
    init_std: Annotated[float, Meta(gt=0, le=1000)] = 1.0


class Data(Struct, forbid_unknown_fields=True):
    train_ds: list[str] = field(default_factory=list)
    validation_ds: list[str] = field(default_factory=list)
    # null: the model's context
    max_seq_length: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    shuffle: bool = True


class PromptConfig(Struct, forbid_unknown_fields=True):
    """What a JSON file with NeMo's names says. Raises PromptError."""

    task_templates: list[Template]
    # fine-tuning, which NeMo has elsewhere: no virtual tokens, the whole model learns
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
        try:
            return json_files.read(path, cls)
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
        return {t.taskname: t for t in self.task_templates}

    @property
    def tasks(self) -> list[str]:
        return [*self.existing_tasks, *self.new_tasks]

    @property
    def learned(self) -> bool:
        """Whether prompts are learned, of a frozen model."""
        return self.virtual_prompt_style in ("prompt-tuning", "p-tuning")

    def first_ids(self, vocab_size: int) -> dict[str, int]:
        """The id of each task's first virtual token."""
        sizes = [self.templates[task].total_virtual_tokens for task in self.tasks]
        return {task: vocab_size + sum(sizes[:n]) for n, task in enumerate(self.tasks)}

    def __post_init__(self):
        def wrong(problem):
            raise PromptError(problem)

        if self.virtual_prompt_style not in STYLES:
            wrong(
                f"virtual_prompt_style {self.virtual_prompt_style!r}: must be one of"
                f" {', '.join(STYLES)}"
            )
        if len(self.templates) < len(self.task_templates):
            wrong("task_templates: two have the same taskname")
        for name in ("existing_tasks", "new_tasks"):
            for task in getattr(self, name):
                if task not in self.templates:
                    wrong(f"{name}: {task!r} has no template; there are {sorted(self.templates)}")
        if len(set(self.tasks)) < len(self.tasks):
            wrong(
                f"existing_tasks {self.existing_tasks}, new_tasks {self.new_tasks}: a task stands"
                " there twice"
            )
        for task in self.tasks:
            if (
                self.learned != bool(self.templates[task].total_virtual_tokens)
                and self.virtual_prompt_style != "inference"
            ):
                wrong(
                    f"{task!r} has {self.templates[task].total_virtual_tokens} virtual tokens, and"
                    f" virtual_prompt_style is {self.virtual_prompt_style}"
                )
        if not self.new_tasks:
            wrong("new_tasks is empty: name the tasks to learn")
        if self.existing_tasks and not self.restore_path:
            wrong(
                f"existing_tasks {self.existing_tasks}: restore_path must name the prompt file that"
                " has them"
            )
        methods = self.prompt_tuning.new_prompt_init_methods
        texts = self.prompt_tuning.new_prompt_init_text
        if self.virtual_prompt_style == "prompt-tuning":
            if len(methods) != len(self.new_tasks) or any(
                m not in ("text", "random") for m in methods
            ):
                wrong(
                    f"prompt_tuning.new_prompt_init_methods {methods}: one of text and random for"
                    f" each of new_tasks {self.new_tasks}"
                )
            for n, method in enumerate(methods):
                if method == "text" and not (n < len(texts) and texts[n]):
                    wrong(
                        f"prompt_tuning.new_prompt_init_text {texts}: {self.new_tasks[n]!r} begins"
                        " from a text, and none stands in its place"
                    )
        p = self.p_tuning
        if p.encoder_type not in ENCODERS:
            wrong(f"p_tuning.encoder_type {p.encoder_type!r}: must be one of {', '.join(ENCODERS)}")
        if p.dropout:
            wrong(
                f"p_tuning.dropout {p.dropout}: must be 0; the encoder sees no data, and a few"
                " vectors are soon learned"
            )


# --- lines ----------------------------------------------------------------------------------------


def read_lines(path: str):
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
) -> tuple[list, list[dict], str]:
    """(examples, None where one is too long; the records of all lines; what was truncated or
    skipped, as a sentence) of JSON-lines files. templates, first_virtual: of the tasks that may
    come. Raises PromptError."""
    examples = []
    records = []
    for path, number, record in ((path, *entry) for path in paths for entry in read_lines(path)):
        task = record.get("taskname")
        if not isinstance(task, str) or task not in templates:
            raise PromptError(
                f"{path}, line {number}: taskname {task!r} is none of the tasks here,"
                f" {sorted(templates)}"
            )
        try:
            example = templates[task].fill(record, tokenizer, first_virtual[task], limit, answer)
        except PromptError as e:
            raise PromptError(f"{path}, line {number}: {e}") from None
        examples.append(example)
        records.append(record)
    whole = [example for example in examples if example]
    skipped = len(examples) - len(whole)
    truncated = sum(example.truncated for example in whole)
    if not whole:
        raise PromptError(
            f"{', '.join(paths) or 'no file'}: no examples"
            + (f"; {skipped} are longer than {limit} tokens and were skipped" if skipped else "")
        )
    told = [f"{truncated} truncated"] * bool(truncated) + [f"{skipped} skipped"] * bool(skipped)
    return (
        examples,
        records,
        f"{len(whole)} examples"
        + (f", {' and '.join(told)} (longer than {limit} tokens)" if told else ""),
    )


class PromptData:
    """Examples as data.Corpus gives windows: sample number n is an example of epoch 0, then 1, ..;
    all padded to one length."""

    def __init__(
        self, examples: list[Example], vocab_size: int, seed: int | None, multiple_of: int = 1
    ):
        """seed None: in order. multiple_of: what the padded length must be divisible by (sequence
        parallelism)."""
        self.examples = examples
        self.vocab_size = vocab_size
        self.seed = seed
        self.epoch = None
        longest = max(len(example.ids) for example in examples) - 1
        self.s = -(-longest // multiple_of) * multiple_of
        self.num_sequences = len(examples)
        text = json.dumps([example.ids for example in examples])
        self.index = {
            "tokens": sum(len(example.ids) for example in examples),
            "bytes": sum(len(example.ids) for example in examples),
            "corpus": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    def example(self, sample: int) -> Example:
        epoch, n = divmod(int(sample), self.num_sequences)
        if self.seed is None:
            return self.examples[n]
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences),
            )
        return self.examples[self.order[n]]

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers."""
        tokens = []
        targets = []
        mask = []
        for example in map(self.example, samples):
            pad = self.s + 1 - len(example.ids)
            ids = example.ids + [0] * pad
            counts = [
                n >= example.loss_from and i < self.vocab_size for n, i in enumerate(example.ids)
            ] + [False] * pad
            tokens.append(ids[:-1])
            targets.append([i if c else 0 for i, c in zip(ids, counts)][1:])
            mask.append(counts[1:])
        return Batch(
            torch.tensor(tokens),
            torch.tensor(targets),
            torch.tensor(mask),
            torch.as_tensor(list(samples)),
        )

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count: known before any forward."""
        return sum(
            n >= max(example.loss_from, 1) and i < self.vocab_size
            for example in map(self.example, samples)
            for n, i in enumerate(example.ids)
        )


def main():
    from corpus.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    template = Template(
        "sentiment",
        "<|VIRTUAL_PROMPT_0|>{sentence} sentiment:<|VIRTUAL_PROMPT_1|>{label}",
        5,
        [3, 2],
        "sentence",
        True,
        "label",
    )
    record = {"taskname": "sentiment", "sentence": "good fun", "label": "positive"}
    for limit in (64, 30, 20):
        example = template.fill(record, tokenizer, tokenizer.vocab_size, limit)
        print(
            f"at most {limit} tokens: "
            + (
                "skipped"
                if example is None
                else " ".join(
                    f"V{i - 257}" if i > 256 else "<end>" if i == 256 else repr(chr(i))[1:-1]
                    for i in example.ids
                )
            )
        )
        if example:
            batch = PromptData([example], tokenizer.vocab_size, None).batch([0])
            print(
                f"    {len(example.ids)} tokens; the loss is taken on"
                f" {[tokenizer.decode([i]) or '<end>' for i in batch.targets[batch.loss_mask].tolist()]}"
            )


if __name__ == "__main__":
    terminal.run(main)
