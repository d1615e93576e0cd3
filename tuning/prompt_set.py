"""The prompts of a run of reinforcement learning (--data), which the model answers.

    {"prompt": "2 + 3 = ", ..}                                  text of the user
    {"messages": [{"role": "user", "content": ".."}], ..}       a conversation that ends with one

The chat template (sft.py) makes the tokens after which the model answers. Other fields of a line go
to the reward function. Lines are sorted by a hash of their content, so their order in the file does
not matter; the last twentieth is held out.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from base import json_files
from data import HELD_OUT
from sft import Chat, message
from tuning.chat_template import ChatError
from tuning.rewards import RewardFunction, check, rate
from tuning.sft_data import open_chat


class Question(NamedTuple):
    # the tokens after which the model answers
    ids: list[int]
    # the user's last message; the reward function gets it as `prompt`
    text: str
    # the whole line
    record: dict


@dataclass
class Prompts:
    """Which question each sample answers: `group_size` samples in a row have the same one. Every
    epoch is a new permutation of the questions.

        group_size 2    sample     0 1 | 2 3 | 4 5 | 6 7 ..
                        question    7  |  2  |  9  |  0  ..
    """

    questions: list[Question]
    group_size: int
    # of the order; None: that of the list
    seed: int | None
    # None where no answer becomes text; then no token ends one
    chat: Chat | None = None
    # None where a reward model rates
    function: RewardFunction | None = None

    def __post_init__(self):
        self.num_sequences = len(self.questions)
        # the epoch whose order is in `order`
        self.epoch = None
        self.end_tokens: tuple[int, ...] = ()
        if self.chat:
            tokenizer = self.chat.tokenizer.tokenizer
            self.end_tokens = (*tokenizer.stop_ids, self.chat.end_of_turn())
        content = json.dumps([question.ids for question in self.questions]).encode()
        self.index = {
            "tokens": sum(len(question.ids) for question in self.questions),
            "corpus": hashlib.sha256(content).hexdigest()[:16],
        }

    def question(self, sample: int) -> Question:
        """sample: counted over the whole run."""
        epoch, n = divmod(sample // self.group_size, self.num_sequences)
        if self.seed is None:
            return self.questions[n]
        if epoch != self.epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self.order = generator.permutation(self.num_sequences)
            self.epoch = epoch
        return self.questions[self.order[n]]

    def text(self, ids: list[int]) -> str:
        """Of an answer, without the token that ends it."""
        if ids and ids[-1] in self.end_tokens:
            ids = ids[:-1]
        return self.chat.tokenizer.tokenizer.decode(ids)

    def reward(self, sample: int, ids: list[int]) -> float:
        """Of the answer `ids` to the question of a sample, by the function. Raises RunError."""
        question = self.question(sample)
        return rate(self.function, question.text, self.text(ids), question.record)


# --- lines ----------------------------------------------------------------------------------------


def read_questions(config, chat: Chat, limit: int) -> tuple[list[Question], str]:
    """(the questions of --data in the order of a hash, a summary). limit: of tokens. Raises
    ChatError, naming file and line."""
    questions = []
    skipped = Counter()
    for path in config.data:
        try:
            for number, record in json_files.read_lines(path):
                try:
                    questions.append(question_of(record, chat, limit))
                except ChatError as e:
                    where = f"--data {path}, line {number}"
                    if not config.skip_bad_examples or not e.reason:
                        raise ChatError(f"{where}: {e}") from None
                    skipped[e.reason] += 1
        except json_files.JSONError as e:
            raise ChatError(f"--data {e}") from None
    if len(questions) < 2:
        raise ChatError(
            f"--data {' '.join(config.data)}: {len(questions)} prompts that can be used; at"
            " least two are needed, because one is held out"
        )
    summary = f"{len(questions):,} prompts"
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        summary += f"; {skipped.total()} skipped ({reasons})"
    return sorted(questions, key=hash_of), summary


def question_of(record: dict, chat: Chat, limit: int) -> Question:
    """Raises ChatError; its `reason` is empty where --skip-bad-examples does not help."""
    messages = record.get("messages", record.get("prompt"))
    if isinstance(messages, str):
        messages = [message("user", messages)]
    if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
        raise ChatError(
            'is no prompt; a line has "prompt", a text, or "messages", a list of objects with'
            ' "role" and "content"',
            "",
        )
    if messages[-1]["role"] == "assistant":
        raise ChatError("ends with an answer; the last message is one that the model answers", "")
    ids = chat.prompt(messages)
    if len(ids) > limit:
        raise ChatError(
            f"has {len(ids)} tokens, and --seq-length leaves {limit} beside --answer-tokens"
            " (--skip-bad-examples leaves it out)",
            "too long",
        )
    return Question(ids, messages[-1]["content"], record)


def is_message(each) -> bool:
    return isinstance(each, dict) and {type(each.get(key)) for key in ("role", "content")} == {str}


def hash_of(question: Question) -> str:
    content = json.dumps([question.ids, question.record], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def open_prompts(config, world, tokenizer, function) -> tuple[Prompts, Prompts]:
    """(training set, held-out set) of --data. Raises ChatError or CheckpointError."""
    chat = open_chat(config, tokenizer)
    limit = config.model_config().seq_length - config.answer_tokens
    questions, summary = read_questions(config, chat, limit)
    if function:
        check(function, questions[0].text, questions[0].record)
    n = max(1, len(questions) // HELD_OUT)
    world.say(f"--data: {summary}; {n:,} of them held out; {chat.template.where}")
    train_set = Prompts(questions[:-n], config.answers_per_prompt, config.seed, chat, function)
    return train_set, Prompts(questions[-n:], 1, None, chat, function)
