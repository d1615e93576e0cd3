"""Files of conversations, as finetune/sft.py reads them (--data).

    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}]}
    {"prompt": "..", "completion": ".."}            a question and its answer

Each line has one conversation; other fields are ignored, but for those of UNSUPPORTED. A message
may have a "weight" too: with 0 it is no target. Another key with something in it is refused: the
text would lack what it says. A conversation that cannot be used ends the run with one message; with
--skip-bad-examples it is left out, and counted. A line that is no conversation at all always ends
the run.

The conversations are sorted by a hash of their tokens, as documents are in run/data.py. So which
ones are held out does not depend on the order of the files. The last twentieth is held out, with
one rule: all conversations that begin with the same question are on the same side. So the held-out
loss is that of questions that the model has not learned to answer.

A template may write the date into the text. A run keeps the moment at which it began (--date), and
its template says this one each time the run goes on. So the tokens stay the same, and with them the
order and what is held out.
"""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from base import json_files
from finetune.chat import Chat, message
from finetune.chat_template import ChatError, ChatTemplate, ChatTokenizer, open_template
from finetune.packing import Example, Packed, Padded
from run import flags
from run.checkpoint import beside
from run.data import HELD_OUT
from run.task import Task, first_ids
from run.tokenizer import CHAT_TEMPLATE

# the `reason` of a ChatError for a line that --skip-bad-examples does not leave out
NO_SKIP = ""
# Fields of a line that would change the text.
UNSUPPORTED = ("tools", "functions", "chat_template_kwargs")
# what a key that says nothing holds, in files where every message has the keys of all
NOTHING = (None, "", [], {})

# --- lines ----------------------------------------------------------------------------------------


class Examples(list):
    """What the lines of files became. questions: a key for the question of each."""

    def __init__(self, examples, questions):
        super().__init__(examples)
        self.questions = questions


def read_lines(
    paths: list[str],
    flag: str,
    make: Callable[[dict], object],
    key: Callable,
    asked: Callable[[dict], list[dict]],
    skip: bool,
) -> tuple[Examples, str]:
    """What `make` gives for each line of JSON-lines files, in the order of a hash of `key(..)`; and
    a summary of what is left out. asked: the messages of a line that are its question. skip: leave
    out, and count, what cannot be used. Raises ChatError, naming file and line."""
    found = []
    skipped = Counter()
    for path in paths:
        try:
            for number, record in json_files.read_lines(path):
                try:
                    example = make(record)
                    found.append((hash_of(key(example)), question_key(asked(record)), example))
                except ChatError as e:
                    if not skip or e.reason == NO_SKIP:
                        helps = " (--skip-bad-examples leaves it out)" if e.reason else ""
                        raise ChatError(f"{flag} {path}, line {number}: {e}{helps}") from None
                    skipped[e.reason] += 1
        except json_files.JSONError as e:
            raise ChatError(f"{flag} {e}") from None
    left_out = ""
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        left_out = f"; {skipped.total()} skipped ({reasons})"
    if not found:
        raise ChatError(f"{flag} {' '.join(paths)}: nothing to learn from{left_out}")
    _, questions, examples = zip(*sorted(found, key=lambda each: each[:2]))
    return Examples(examples, questions), left_out


def hash_of(content) -> str:
    """SHA-256 of the content as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def question_key(messages: list[dict]) -> str:
    """Templates strip contents, so space around them makes no other question."""
    return hash_of([[each["role"], each["content"].strip()] for each in messages])


def check_length(n: int, limit: int, room: str) -> None:
    """Raises ChatError."""
    if n > limit:
        raise ChatError(f"has {n} tokens, and --seq-length {room} {limit}", "too long")


def messages_of(record: dict, known: tuple[str, ...] = ("role", "content", "weight")) -> list[dict]:
    """known: keys of a message. Raises ChatError for what is no conversation."""
    if "messages" not in record and {"prompt", "completion"} <= record.keys():
        messages = [message("user", record["prompt"]), message("assistant", record["completion"])]
    else:
        messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        rule = '"messages" with "role" and "content" each, or "prompt" and "completion"'
        raise ChatError(f"is no conversation; a line has {rule}", NO_SKIP)
    return check_messages(record, messages, known)


def check_messages(record: dict, messages: list, known: tuple[str, ...]) -> list[dict]:
    """The messages of a line, each with those of the keys `known` that it has. Raises ChatError."""
    for key in UNSUPPORTED:
        if record.get(key):
            raise ChatError(f"has {key}, which is not supported", NO_SKIP)
    found = []
    for n, each in enumerate(messages, 1):
        each = each if isinstance(each, dict) else {}
        said = {key: value for key, value in each.items() if value not in NOTHING}
        for key in said:
            if key not in known:
                rule = f"which is not supported; {', '.join(known)} are"
                raise ChatError(f"message {n}: has {key}, {rule}", NO_SKIP)
        if not all(isinstance(each.get(key), str) for key in ("role", "content")):
            raise ChatError(f'message {n}: "role" and "content" must be text', NO_SKIP)
        if said.get("weight", 1) not in (0, 1):
            raise ChatError(f"message {n}: weight {json.dumps(said['weight'])}: 0 or 1", NO_SKIP)
        found.append({"role": each["role"], "content": each["content"]} | said)
    return found


def first_question(messages: list[dict]) -> list[dict]:
    """The messages before the first answer to the user that is learned; all, where none is."""
    asked = False
    for n, each in enumerate(messages):
        if asked and each["role"] == "assistant" and each.get("weight") != 0:
            return messages[:n]
        asked = asked or each["role"] == "user"
    return messages


def read_examples(
    paths: list[str], flag: str, chat: Chat, loss_on: str, limit: int, skip: bool
) -> tuple[list[Example], str]:
    """(conversations, a summary), as of `read_lines`. limit: of tokens."""

    def make(record: dict) -> Example:
        example = chat.example(messages_of(record), loss_on)
        check_length(len(example.ids), limit, f"{limit - 1} has room for")
        return example

    def asked(record: dict) -> list[dict]:
        return first_question(messages_of(record))

    examples, left_out = read_lines(paths, flag, make, lambda example: example.ids, asked, skip)
    tokens = sum(len(example.ids) for example in examples)
    targets = sum(sum(example.counted[1:]) for example in examples)
    summary = f"{len(examples):,} conversations, {targets:,} of {tokens:,} tokens in the loss"
    return examples, summary + left_out


# --- a run ----------------------------------------------------------------------------------------


def now() -> str:
    return datetime.datetime.now().isoformat(timespec="seconds")


def begun(config) -> str:
    """When a run began: a run that goes on has it in its config.json. Raises ConfigError."""
    # ranks that torchrun has restarted go on without the flags that they have there
    saved = flags.saved_flags(Path(config.out), type(config)) if config.resume else {}
    return saved.get("date") or now()


def date_of(config, world, template: ChatTemplate) -> str | None:
    """--date of a run whose template asks for it; by default rank 0 says when the run began. Raises
    ChatError or ConfigError."""
    if not template.asks_for_date:
        # a run that goes on, with another template, has it from config.json
        if config.date and not config.resume:
            raise ChatError(f"--date {config.date}: {template.where} does not ask for the date")
        return None
    if not config.date:
        config.date = world.on_rank_0(lambda: begun(config))
    return config.date


def open_chat(config, world, tokenizer) -> Chat:
    """The chat template of a run, config: finetune.sft.ChatConfig. It becomes one of the
    tokenizer's files, which the run and its checkpoints keep. world: None once the data are open.
    Raises ChatError or CheckpointError."""
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
    template.date = date_of(config, world, template)
    tokenizer.files = tokenizer.files | {CHAT_TEMPLATE: template.text.encode()}
    return Chat(template, chat_tokenizer)


def held_out_questions(questions: list[str]) -> set[str]:
    """Which questions are held out, with all their examples. questions: that of each example.

    From the end, as many as fit into a twentieth of the examples. Where no question has so few, it
    is the one with the fewest.
    """
    sizes = Counter(questions)
    room = max(1, len(questions) // HELD_OUT)
    found = set()
    for question in reversed(questions):
        if question not in found and sizes[question] <= room:
            found.add(question)
            room -= sizes[question]
    return found or {min(reversed(questions), key=sizes.get)}


def split(examples: Examples) -> tuple[list, list, str]:
    """(what is learned from, what is held out, a summary) of two examples or more."""
    if len(set(examples.questions)) == 1:
        n = max(1, len(examples) // HELD_OUT)
        warning = f"{n:,} of them held out, but all have one question, so it is trained on too"
        return examples[:-n], examples[-n:], warning
    apart = held_out_questions(examples.questions)
    learned, held_out = [], []
    for example, question in zip(examples, examples.questions):
        (held_out if question in apart else learned).append(example)
    return learned, held_out, f"{len(held_out):,} of them held out"


def open_examples(config, world, chat: Chat | None, read: Callable, what: str) -> tuple[list, list]:
    """(what is learned from, what is held out) of --data and --val-data. chat: None where no
    template makes the text. read(paths, flag): what `read_lines` gives, with a summary; what: an
    example is called. Raises ChatError."""
    examples, summary = read(config.data, "--data")
    val_data = getattr(config, "val_data", None)
    if val_data:
        held_out, val_summary = read(val_data, "--val-data")
        summary += f"; --val-data: {val_summary}"
    else:
        if len(examples) == 1:
            rule = f"has one {what}, and one is held out; more would do ({summary})"
            raise ChatError(f"--data {' '.join(config.data)}: {rule}")
        examples, held_out, of_them = split(examples)
        summary += f"; {of_them}"
    if chat:
        date = f", with the date {chat.template.date}" if chat.template.date else ""
        summary += f"; {chat.template.where}{date}"
    world.say(f"--data: {summary}")
    return examples, held_out


def open_data(config, world, tokenizer) -> tuple[Padded | Packed, Padded | Packed]:
    """(training set, held-out set) of --data. Raises ChatError or CheckpointError."""
    chat = open_chat(config, world, tokenizer)
    shards = config.length_multiple
    s = config.model_config().seq_length // shards * shards
    # the last token of a row is only a target
    options = dict(chat=chat, loss_on=config.loss_on, limit=s + 1, skip=config.skip_bad_examples)
    read = partial(read_examples, **options)
    examples, held_out = open_examples(config, world, chat, read, "conversation")
    try:
        chat.prompt([message("user", "a")])
        if not chat.learns_what_is_asked():
            rule = "what is learned here follows another text than what generate.py asks"
            world.say(f"{chat.template.where} asks with a text that no answer follows here: {rule}")
    except ChatError as e:
        world.say(f"generate.py --chat will not work with this template: {e}")
    if not config.load:
        world.say("without --load a new model learns these conversations and nothing else")
    if config.pack:
        train_set = Packed(examples, s, config.seed)
        rows = f"{train_set.num_sequences:,} rows of {s} tokens"
        world.say(f"--pack: {rows}, filled to {train_set.fill():.1%}")
        return train_set, Packed(held_out, s, None)
    return Padded(examples, config.seed, shards), Padded(held_out, None, shards)


class ConversationTask(Task):
    """Conversations, of which the answers count."""

    other_data = " (some samples may come again, and others are held out)"

    def open_data(self, config, world, tokenizer):
        return open_data(config, world, tokenizer)

    def sum_of_ranks(self, sums: Tensor) -> Tensor:
        """Sums over the samples of all ranks; tensor-parallel ranks have the same. A collective."""
        sums = sums.clone()
        for group in filter(None, (self.groups.dp, self.groups.pp)):
            dist.all_reduce(sums, group=group)
        return sums

    def sample_prompt(self, tokenizer, held_out) -> tuple[list[int], tuple[int, ...]]:
        """--sample-prompt as a user's message, or a question that was held out."""
        chat = open_chat(self.config, None, tokenizer)
        stop_ids = (*tokenizer.stop_ids, chat.end_of_turn())
        if self.config.sample_prompt is None:
            return first_ids(held_out), stop_ids
        ids = chat.prompt([message("user", self.config.sample_prompt)])
        return ids[-self.model_config.seq_length :], stop_ids
