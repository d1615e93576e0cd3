"""Files of pairs, as finetune/preference.py reads them (--data).

    {"prompt": "..", "chosen": "..", "rejected": ".."}
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
    {"chosen": [messages], "rejected": [messages]}          each with the prompt, as on Hugging Face

A message is {"role": "user", "content": ".."}. The two conversations of a pair are equal but for
their last message, the assistant's answer. They become text by a chat template, as in
finetune/sft.py.

All pairs of one prompt are on the same side: trained on, or held out.

Sample 2k is the chosen answer of a pair and 2k + 1 the rejected one: two rows of a batch, that have
the prompt and the answer with the token that ends it. Every epoch permutes the pairs.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.chat import Chat, message
from finetune.chat_template import ChatError
from finetune.packing import Example, Padded
from finetune.sft_data import (
    NO_SKIP,
    check_length,
    hash_of,
    messages_of,
    open_chat,
    open_examples,
    read_lines,
)
from run.data import Batch, Order
from run.documents import fingerprint

# --- lines ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Token ids of the same prompt and an answer each; the answer's tokens count."""

    chosen: Example
    rejected: Example


def conversation(record: dict, key: str) -> list[dict]:
    """The messages of one answer, with those before it. Raises ChatError."""
    prompt, answer = record.get("prompt"), record.get(key)
    if isinstance(answer, str):
        answer = [message("assistant", answer)]
        if prompt is None:
            raise ChatError(f'"{key}" is text, so the line needs a "prompt" too', NO_SKIP)
    if isinstance(prompt, str):
        prompt = [message("user", prompt)]
    if not isinstance(answer, list) or not isinstance(prompt, list | None):
        rule = '"prompt", "chosen" and "rejected", each text or a list of messages'
        raise ChatError(f"is no pair; a line has {rule}", NO_SKIP)
    # on Hugging Face a list may begin with the prompt, and the prompt stand beside it once more
    first = answer[0].get("role") if answer and isinstance(answer[0], dict) else None
    whole = answer if first != "assistant" else (prompt or []) + answer
    try:
        messages = messages_of(record | {"messages": whole}, ("role", "content"))
    except ChatError as e:
        raise ChatError(f"{key}: {e}", NO_SKIP) from None
    if messages[-1]["role"] != "assistant":
        raise ChatError(f"{key}: the last message is not the assistant's answer", NO_SKIP)
    return messages


def pair_of(record: dict, chat: Chat, limit: int) -> Pair:
    """limit: of tokens. Raises ChatError."""
    chosen, rejected = (conversation(record, key) for key in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        rule = "differ before their last message: they answer two questions"
        raise ChatError(f"chosen and rejected {rule}", "two questions")
    pair = Pair(*(answer_example(chat, messages) for messages in (chosen, rejected)))
    if pair.chosen.ids == pair.rejected.ids:
        raise ChatError("chosen and rejected are equal", "equal answers")
    check_length(max(len(example.ids) for example in pair), limit, "has room for")
    return pair


def answer_example(chat: Chat, messages: list[dict]) -> Example:
    """The last answer counts alone, and nothing follows the token that ends it. Raises
    ChatError."""
    before = [each | {"weight": 0} for each in messages[:-1]]
    ids, counted = chat.example([*before, messages[-1]])
    end = max(n for n, counts in enumerate(counted) if counts) + 1
    return Example(ids[:end], counted[:end])


def read_pairs(
    paths: list[str], flag: str, chat: Chat, limit: int, skip: bool
) -> tuple[list[Pair], str]:
    """(pairs, a summary), as of sft_data.read_lines. limit: of tokens."""

    def asked(record: dict) -> list[dict]:
        return conversation(record, "chosen")[:-1]

    make = partial(pair_of, chat=chat, limit=limit)
    pairs, left_out = read_lines(paths, flag, make, ids_of, asked, skip)
    tokens = sum(len(ids) for pair in pairs for ids in ids_of(pair))
    return pairs, f"{len(pairs):,} pairs, {tokens:,} tokens{left_out}"


def ids_of(pair: Pair) -> list[list[int]]:
    return [example.ids for example in pair]


# --- batches --------------------------------------------------------------------------------------


class Pairs(Padded):
    """A data set of pairs: the rows of `pairs`, each chosen answer before the rejected one. In a
    row position i has the target i + 1, and the last one has none."""

    read_last = True

    def __init__(self, pairs: list[Pair], seed: int | None, multiple_of: int, last_token: bool):
        """Arguments as of Padded. last_token: a reward is read at the last token; else the answer's
        tokens are targets."""
        super().__init__([example for pair in pairs for example in pair], None, multiple_of)
        self.pairs = pairs
        self.multiple_of = multiple_of
        self.last_token = last_token
        self.order = Order(len(pairs), seed)
        hashes = "".join(hash_of(ids_of(pair)) for pair in pairs)
        self.index = {"tokens": self.index["tokens"], "corpus": fingerprint(hashes)}
        # [num_sequences] float64, of each row
        self.reference: Tensor | None = None

    def in_order(self) -> "Pairs":
        """The same rows, each as the sample of its number."""
        return Pairs(self.pairs, None, self.multiple_of, self.last_token)

    def row(self, sample: int) -> int:
        """2 pair + (1 for the rejected)."""
        pair, rejected = divmod(int(sample), 2)
        return 2 * self.order(pair) + rejected

    def batch(self, samples) -> Batch:
        """samples: global sample numbers, both of each pair."""
        samples = list(samples)
        batch = super().batch(samples)
        if self.last_token:
            # [b, 1]: the last position that holds a token
            last = batch.real.sum(1, keepdim=True) - 1
            batch = batch._replace(loss_mask=torch.arange(self.s) == last)
        if self.reference is None:
            return batch
        return batch._replace(reference=self.reference[[self.row(n) for n in samples]])

    def counted_tokens(self, samples) -> int:
        return len(samples) if self.last_token else super().counted_tokens(samples)


# --- a run ----------------------------------------------------------------------------------------


def open_data(config, world, tokenizer) -> tuple[Pairs, Pairs]:
    """(training set, held-out set) of --data. Raises ChatError or CheckpointError."""
    chat = open_chat(config, world, tokenizer)
    shards = config.length_multiple
    limit = config.model_config().seq_length // shards * shards
    read = partial(read_pairs, chat=chat, limit=limit, skip=config.skip_bad_examples)
    pairs, held_out = open_examples(config, world, chat, read, "pair")
    last_token = config.method == "reward"
    train_set = Pairs(pairs, config.seed, shards, last_token)
    return train_set, Pairs(held_out, None, shards, last_token)
