"""Files of conversations, as sft.py reads them (--data).

    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}]}
    {"prompt": "..", "completion": ".."}            a question and its answer

Each line has one conversation; other fields are ignored. A conversation that cannot be used ends
the run with one message; with --skip-bad-examples it is left out, and counted. A line that is no
conversation at all always ends the run.

The conversations are sorted by a hash of their tokens, as documents are in data.py. So which ones
are held out does not depend on the order of the files, and equal ones are neighbours.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from base import json_files
from checkpoints.tokenizer_files import beside
from corpus.tokenizer import CHAT_TEMPLATE
from data import HELD_OUT
from run.opening import first_ids
from run.task import Task
from sft import Chat, Conversations, message
from tuning.chat_template import ChatError, ChatTokenizer, open_template
from tuning.packing import Example, Packed

# --- lines ----------------------------------------------------------------------------------------


def read_conversations(path: str, flag: str = "--data") -> Iterator[tuple[str, list[dict]]]:
    """(file and line, messages) of each line. Raises ChatError."""
    lines = json_files.read_lines(path)
    while True:
        try:
            number, record = next(lines)
        except StopIteration:
            return
        except json_files.JSONError as e:
            raise ChatError(f"{flag} {e}") from None
        where = f"{flag} {path}, line {number}"
        yield where, messages_of(record, where)


def messages_of(record: dict, where: str) -> list[dict]:
    """Raises ChatError for what is no conversation."""
    if "messages" not in record and {"prompt", "completion"} <= record.keys():
        messages = [message("user", record["prompt"]), message("assistant", record["completion"])]
    else:
        messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatError(
            f'{where}: is no conversation; a line has "messages", a list of objects with "role" and'
            ' "content", or "prompt" and "completion"'
        )
    if record.get("tools"):
        raise ChatError(f"{where}: has tools, which are not supported")
    for n, each in enumerate(messages, 1):
        if not isinstance(each, dict) or not all(
            isinstance(each.get(key), str) for key in ("role", "content")
        ):
            raise ChatError(f'{where}, message {n}: "role" and "content" must be text')
    return messages


def read_examples(
    paths: list[str], flag: str, chat: Chat, loss_on: str, limit: int, skip: bool
) -> tuple[list[Example], str]:
    """(conversations in the order of a hash, a summary). limit: of tokens. skip: leave out what
    cannot be used. Raises ChatError, naming file and line."""
    examples = []
    skipped = Counter()
    for path in paths:
        for where, messages in read_conversations(path, flag):
            try:
                example = chat.example(messages, loss_on)
                check_length(example, limit)
            except ChatError as e:
                if not skip:
                    raise ChatError(f"{where}: {e} (--skip-bad-examples leaves it out)") from None
                skipped[e.reason] += 1
            else:
                examples.append(example)
    left_out = ""
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        left_out = f"; {skipped.total()} skipped ({reasons})"
    if not examples:
        raise ChatError(f"{flag} {' '.join(paths)}: no conversations to train on{left_out}")
    tokens = sum(len(example.ids) for example in examples)
    targets = sum(sum(example.counted[1:]) for example in examples)
    summary = f"{len(examples):,} conversations, {targets:,} of {tokens:,} tokens in the loss"
    return sorted(examples, key=hash_of), summary + left_out


def check_length(example: Example, limit: int) -> None:
    """Raises ChatError."""
    if len(example.ids) > limit:
        raise ChatError(
            f"has {len(example.ids)} tokens, and --seq-length {limit - 1} has room for {limit}",
            "too long",
        )


def hash_of(example: Example) -> str:
    return hashlib.sha256(json.dumps(example.ids).encode()).hexdigest()


# --- a run ----------------------------------------------------------------------------------------


def open_chat(config, tokenizer) -> Chat:
    """The chat template of a run, config: tuning.sft_command.ChatConfig. It becomes one of the
    tokenizer's files, which the run and its checkpoints keep. Raises ChatError or
    CheckpointError."""
    copies = [Path(config.out) / CHAT_TEMPLATE] if config.resume else []
    if config.load:
        copies.append(beside(config.base(), CHAT_TEMPLATE))
    copy = next((path for path in copies if path and path.is_file()), None)
    choice = config.chat_template
    if config.resume and choice not in ("auto", "plain") and not Path(choice).exists() and copy:
        # the file has moved: the run has a copy
        choice = str(copy)
    chat_tokenizer = ChatTokenizer(tokenizer)
    template = open_template(choice, chat_tokenizer, copy)
    tokenizer.files = tokenizer.files | {CHAT_TEMPLATE: template.text.encode()}
    return Chat(template, chat_tokenizer)


def hold_out(examples: list, paths: list[str], one: str) -> tuple[list, list]:
    """(all but the last twentieth, the last twentieth). one: what an example is called. Raises
    ChatError where there is a single one."""
    n = max(1, len(examples) // HELD_OUT)
    if n == len(examples):
        raise ChatError(
            f"--data {' '.join(paths)}: has one {one}, and one is held out; more, or"
            " --val-data FILE, would do"
        )
    return examples[:-n], examples[-n:]


def open_data(config, world, tokenizer) -> tuple[Conversations, Conversations]:
    """(training set, held-out set) of --data. Raises ChatError or CheckpointError."""
    chat = open_chat(config, tokenizer)
    shards = config.length_multiple
    model = config.model_config()
    # the last token of a row is only a target
    limit = model.seq_length // shards * shards + 1
    reading = (chat, config.loss_on, limit, config.skip_bad_examples)
    examples, summary = read_examples(config.data, "--data", *reading)
    if config.val_data:
        held_out, val_summary = read_examples(config.val_data, "--val-data", *reading)
        summary += f"; --val-data: {val_summary}"
    else:
        examples, held_out = hold_out(examples, config.data, "conversation")
        summary += f"; {len(held_out):,} of them held out"
    world.say(f"--data: {summary}; {chat.template.where}")
    try:
        chat.prompt([message("user", "a")])
    except ChatError as e:
        world.say(f"generate.py --chat will not work with this template: {e}")
    if not config.load:
        world.say(
            "without --load: a new model learns these conversations and nothing else; --load"
            " CKPT names a trained one"
        )
    if config.pack:
        train_set = Packed(examples, limit - 1, config.seed)
        rows = f"{train_set.num_sequences:,} rows of {limit - 1} tokens"
        world.say(f"--pack: {rows}, filled to {train_set.fill():.1%}")
        return train_set, Packed(held_out, limit - 1, None)
    train_set = Conversations(examples, model.vocab_size, config.seed, shards)
    return train_set, Conversations(held_out, model.vocab_size, None, shards)


class ConversationTask(Task):
    """Conversations, of which the answers count."""

    def open_data(self, config, world, tokenizer):
        return open_data(config, world, tokenizer)

    def sample_prompt(self, tokenizer, held_out) -> tuple[list[int], tuple[int, ...]]:
        """--sample-prompt as a user's message, or a question that was held out."""
        chat = open_chat(self.config, tokenizer)
        stop_ids = (*tokenizer.stop_ids, chat.end_of_turn())
        if self.config.sample_prompt is None:
            return first_ids(held_out), stop_ids
        ids = chat.prompt([message("user", self.config.sample_prompt)])
        return ids[-self.model_config.seq_length :], stop_ids
