"""The data of prompt learning: JSON lines become examples.

    python -m finetune.prompt_data       an example, token by token

A virtual token is never a target. With `answer_only_loss` only the answer is, and the end of text.
"""

import itertools
from collections import defaultdict

from base import json_files, terminal
from finetune.prompt_template import Example, Template
from prompt_tuning import PromptError

# With more different answers than this, they are no classes.
MOST_ANSWERS = 100


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
        for number, record in json_files.read_lines(path):
            task = record.get("taskname")
            try:
                if not isinstance(task, str) or task not in templates:
                    known = sorted(templates)
                    raise PromptError(f"taskname {task!r} is none of the tasks here, {known}")
                first = first_virtual[task]
                examples.append(templates[task].fill(record, tokenizer, first, limit, answer))
            except PromptError as e:
                raise PromptError(f"{path}, line {number}: {e}") from None
            records.append(record)
    summary = count(paths, examples, limit)
    if answer:
        summary += "".join(never_learned(templates, examples, records))
    return examples, records, summary


def count(paths: list[str], examples: list[Example | None], limit: int) -> str:
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
    counts = {"truncated": truncated, "skipped": skipped}
    too_long = [f"{n} {what}" for what, n in counts.items() if n]
    summary = f"{len(usable)} examples"
    if too_long:
        summary += f", {' and '.join(too_long)} (longer than {limit} tokens)"
    return summary


def never_learned(
    templates: dict[str, Template], examples: list[Example | None], records: list[dict]
) -> list[str]:
    """A warning for each task, and each of few answers, of which every example was skipped."""
    kept = defaultdict(list)
    for example, record in zip(examples, records):
        task = record["taskname"]
        kept[task].append(example)
        if field := templates[task].answer_field:
            kept[f"{task}, {field} {str(record[field])[:30]!r}"].append(example)
    if len(kept) > MOST_ANSWERS:
        return []
    return [
        f"; every example of {what} is skipped ({len(found)})"
        for what, found in kept.items()
        if not any(found)
    ]


# --- python -m finetune.prompt_data
# ----------------------------------------------------------------


def show(token: int, tokenizer) -> str:
    """One token for people: its text, V0 for the first virtual token, <end> for the end of text."""
    if token >= tokenizer.vocab_size:
        return f"V{token - tokenizer.vocab_size}"
    return "<end>" if token == tokenizer.eot else tokenizer.decode([token])


def main():
    from run.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    template = Template(
        "sentiment",
        "<|VIRTUAL_PROMPT_0|>{sentence} sentiment:<|VIRTUAL_PROMPT_1|>{label}",
        total_virtual_tokens=5,
        virtual_token_splits=[3, 2],
        truncate_field="sentence",
        answer_only_loss=True,
        answer_field="label",
    )
    record = {"taskname": "sentiment", "sentence": "good fun", "label": "positive"}
    for limit in (64, 30, 20):
        print(f"at most {limit} tokens: ", end="")
        example = template.fill(record, tokenizer, tokenizer.vocab_size, limit)
        if example is None:
            print("skipped")
            continue
        targets = itertools.compress(example.ids, example.counted)
        print(" ".join(show(token, tokenizer) for token in example.ids))
        print(
            f"    {len(example.ids)} tokens; the loss is taken on"
            f" {[show(token, tokenizer) for token in targets]}"
        )


if __name__ == "__main__":
    terminal.run(main)
