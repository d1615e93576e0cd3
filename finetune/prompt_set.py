"""The prompts of a run of reinforcement learning (--data), which the model answers.

    {"prompt": "2 + 3 = ", ..}                                  text of the user
    {"messages": [{"role": "user", "content": ".."}], ..}       a conversation that ends with one

The chat template (finetune/chat.py) makes the tokens after which the model answers. Other fields of
a line go to the reward function. Lines are sorted by a hash of their content, so their order in the
file does not matter; the last twentieth is held out, and lines with one prompt stay together.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from finetune.chat import Chat, message
from finetune.chat_template import ChatError
from finetune.rewards import RewardFunction, check, rate
from finetune.sft_data import (
    NO_SKIP,
    check_length,
    check_messages,
    open_chat,
    open_examples,
    read_lines,
)
from run.data import Order
from run.documents import fingerprint


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
    # The seed of the order; None: the order of the list.
    seed: int | None
    # None where no answer becomes text; then no token ends one
    chat: Chat | None = None
    # None where a reward model rates
    function: RewardFunction | None = None

    def __post_init__(self):
        self.num_sequences = len(self.questions)
        self.order = Order(self.num_sequences, self.seed)
        self.end_tokens: tuple[int, ...] = ()
        if self.chat:
            tokenizer = self.chat.tokenizer.tokenizer
            self.end_tokens = (*tokenizer.stop_ids, self.chat.end_of_turn())
        ids = [question.ids for question in self.questions]
        self.index = {"tokens": sum(map(len, ids)), "corpus": fingerprint(json.dumps(ids))}
        # what is added to the number of a group, where a run went on from groups of another size
        self.offset = 0

    def taken(self, n: int) -> dict:
        """Dataset.taken, counted in questions, whatever the number of answers."""
        name = self.index["corpus"]
        asked = n // self.group_size + self.offset
        return {"blend": name, "start": 0, "before": [], "corpora": {name: asked}}

    def go_on(self, n: int, taken: dict) -> None:
        self.offset = taken["corpora"].get(self.index["corpus"], 0) - n // self.group_size

    def question(self, sample: int) -> Question:
        """sample: counted over the whole run."""
        return self.questions[self.order(sample // self.group_size + self.offset)]

    def text(self, ids: list[int]) -> str:
        """The text of an answer, without the token that ends it."""
        if ids and ids[-1] in self.end_tokens:
            ids = ids[:-1]
        return self.chat.tokenizer.tokenizer.decode(ids)

    def reward(self, sample: int, ids: list[int]) -> float:
        """The function's reward for the answer `ids` to a sample's question. Raises RunError."""
        question = self.question(sample)
        return rate(self.function, question.text, self.text(ids), question.record)


# --- lines ----------------------------------------------------------------------------------------


def asked(record: dict) -> list[dict]:
    """The messages of a line. Raises ChatError."""
    messages = record.get("messages", record.get("prompt"))
    if isinstance(messages, str):
        messages = [message("user", messages)]
    if not isinstance(messages, list) or not messages:
        rule = '"prompt", a text, or "messages", a list of objects with "role" and "content"'
        raise ChatError(f"is no prompt; a line has {rule}", NO_SKIP)
    messages = check_messages(record, messages, ("role", "content"))
    if messages[-1]["role"] == "assistant":
        rule = "the last message is one that the model answers"
        raise ChatError(f"ends with an answer; {rule}", NO_SKIP)
    return messages


def question_of(record: dict, chat: Chat, limit: int) -> Question:
    """limit: of tokens. Raises ChatError."""
    messages = asked(record)
    ids = chat.prompt(messages)
    check_length(len(ids), limit, "leaves beside --answer-tokens only")
    return Question(ids, messages[-1]["content"], record)


def open_prompts(config, world, tokenizer, function) -> tuple[Prompts, Prompts]:
    """(training set, held-out set) of --data. Raises ChatError or CheckpointError."""
    chat = open_chat(config, world, tokenizer)
    limit = config.model_config().seq_length - config.answer_tokens

    def read(paths: list[str], flag: str) -> tuple[list[Question], str]:
        def key(question: Question) -> list:
            return [question.ids, question.record]

        make, skip = partial(question_of, chat=chat, limit=limit), config.skip_bad_examples
        questions, left_out = read_lines(paths, flag, make, key, asked, skip)
        return questions, f"{len(questions):,} prompts{left_out}"

    questions, held_out = open_examples(config, world, chat, read, "prompt")
    if function:
        check(function, questions[0].text, questions[0].record)
    train_set = Prompts(questions, config.answers_per_prompt, config.seed, chat, function)
    return train_set, Prompts(held_out, 1, None, chat, function)
