"""Files of pairs, as preference.py reads them (--data).

    {"prompt": "..", "chosen": "..", "rejected": ".."}
    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}
    {"chosen": [messages], "rejected": [messages]}          each with the prompt, as on Hugging Face

A message is {"role": "user", "content": ".."}. The two conversations of a pair are equal but for
their last message, the assistant's answer. They become text by a chat template, as in sft.py.

Sample 2k is the chosen answer of a pair and 2k + 1 the rejected one: two rows of a batch, that have
the prompt and the answer with the token that ends it. Every epoch permutes the pairs.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from base import json_files
from base.device_queue import to_device
from data import Dataset
from sft import Chat, message
from tuning.chat_template import ChatError
from tuning.packing import Example
from tuning.sft_data import hold_out, messages_of, open_chat

# --- lines ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Token ids of the same prompt and an answer each; the answer's tokens count."""

    chosen: Example
    rejected: Example


def read_lines(path: str, flag: str) -> Iterator[tuple[str, dict]]:
    """(file and line, record) of each line. Raises ChatError."""
    try:
        for number, record in json_files.read_lines(path):
            yield f"{flag} {path}, line {number}", record
    except json_files.JSONError as e:
        raise ChatError(f"{flag} {e}") from None


def conversation(record: dict, key: str, where: str) -> list[dict]:
    """The messages of one answer, with those before it. Raises ChatError."""
    prompt, answer = record.get("prompt"), record.get(key)
    if isinstance(answer, str):
        answer = [message("assistant", answer)]
        if prompt is None:
            raise ChatError(f'{where}: "{key}" is text, so the line needs a "prompt" too')
    if isinstance(prompt, str):
        prompt = [message("user", prompt)]
    if not isinstance(answer, list) or not isinstance(prompt, list | None):
        raise ChatError(
            f'{where}: is no pair; a line has "prompt", "chosen" and "rejected", each text or a'
            " list of messages"
        )
    # on Hugging Face a list may begin with the prompt, and the prompt stand beside it once more
    first = answer[0].get("role") if answer and isinstance(answer[0], dict) else None
    whole = answer if first != "assistant" else (prompt or []) + answer
    messages = messages_of({"messages": whole}, f"{where}, {key}")
    if messages[-1]["role"] != "assistant":
        raise ChatError(f"{where}, {key}: the last message is not the assistant's answer")
    return messages


def pair_of(record: dict, where: str, chat: Chat, limit: int) -> Pair:
    """Raises ChatError."""
    chosen, rejected = (conversation(record, key, where) for key in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ChatError(
            "chosen and rejected differ before their last message: they answer two questions",
            "two questions",
        )
    pair = Pair(*(answer_example(chat, messages) for messages in (chosen, rejected)))
    if pair.chosen.ids == pair.rejected.ids:
        raise ChatError("chosen and rejected are equal", "equal answers")
    longest = max(len(example.ids) for example in pair)
    if longest > limit:
        raise ChatError(f"has {longest} tokens, and --seq-length has room for {limit}", "too long")
    return pair


def answer_example(chat: Chat, messages: list[dict]) -> Example:
    """The last answer counts alone, and nothing follows the token that ends it. Raises
    ChatError."""
    ids, counted = chat.example(messages)
    end = max(n for n, counts in enumerate(counted) if counts) + 1
    start = end - 1
    while start > 1 and counted[start - 1]:
        start -= 1
    return Example(ids[:end], [start <= n for n in range(end)])


def read_pairs(
    paths: list[str], flag: str, chat: Chat, limit: int, skip: bool
) -> tuple[list[Pair], str]:
    """(pairs in the order of a hash, a summary). limit: of tokens. skip: leave out what cannot be
    used. Raises ChatError, naming file and line."""
    pairs = []
    skipped = Counter()
    for path in paths:
        for where, record in read_lines(path, flag):
            # what is no pair at all always ends the run
            for key in ("chosen", "rejected"):
                conversation(record, key, where)
            try:
                pairs.append(pair_of(record, where, chat, limit))
            except ChatError as e:
                if not skip:
                    raise ChatError(f"{where}: {e} (--skip-bad-examples leaves it out)") from None
                skipped[e.reason] += 1
    left_out = ""
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        left_out = f"; {skipped.total()} skipped ({reasons})"
    if not pairs:
        raise ChatError(f"{flag} {' '.join(paths)}: no pairs to learn from{left_out}")
    tokens = sum(len(example.ids) for pair in pairs for example in pair)
    summary = f"{len(pairs):,} pairs, {tokens:,} tokens{left_out}"
    return sorted(pairs, key=hash_of), summary


def hash_of(pair: Pair) -> str:
    return hashlib.sha256(json.dumps([example.ids for example in pair]).encode()).hexdigest()


# --- batches --------------------------------------------------------------------------------------


class PairBatch(NamedTuple):
    """As data.Batch."""

    # [2 n, s] int64
    tokens: Tensor
    # [2 n, s] int64
    targets: Tensor
    # [2 n, s] bool
    loss_mask: Tensor
    # [2 n] int64
    samples: Tensor
    documents: Tensor | None = None
    # [2 n] float64, for DPO: log-probabilities of the answers under the model before training
    reference: Tensor | None = None
    real: Tensor | None = None

    def to(self, device) -> "PairBatch":
        return PairBatch(*(None if x is None else to_device(x, device) for x in self))


class Pairs(Dataset):
    """A data set of pairs, with the interface of those of data.py. Rows are padded at the end to
    one length, `s`. In a row position i has the target i + 1, and the last one has none."""

    def __init__(self, pairs: list[Pair], seed: int | None, multiple_of: int, last_token: bool):
        """seed: of the order, None for the order of the file. multiple_of: what the padded length
        must be divisible by (sequence parallelism). last_token: a reward is read at the last token;
        else the answer's tokens are targets."""
        self.pairs = pairs
        self.seed = seed
        self.multiple_of = multiple_of
        self.last_token = last_token
        lengths = [len(example.ids) for pair in pairs for example in pair]
        self.s = -(-max(lengths) // multiple_of) * multiple_of
        self.num_sequences = len(lengths)
        content = hashlib.sha256("".join(hash_of(pair) for pair in pairs).encode())
        self.index = {"tokens": sum(lengths), "corpus": content.hexdigest()[:16]}
        # [num_sequences] float64, of each row
        self.reference: Tensor | None = None
        # the epoch whose order is in `order`
        self.epoch = None

    def in_order(self) -> "Pairs":
        """The same rows, each as the sample of its number."""
        return Pairs(self.pairs, None, self.multiple_of, self.last_token)

    def row(self, sample: int) -> int:
        """A sample of epoch 0, then of epoch 1, and so on -> 2 pair + (1 for the rejected)."""
        epoch, n = divmod(int(sample), self.num_sequences)
        if self.seed is None:
            return n
        if epoch != self.epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self.order = generator.permutation(len(self.pairs))
            self.epoch = epoch
        return 2 * int(self.order[n // 2]) + n % 2

    def mask(self, example: Example) -> list[bool]:
        """For each position, whether it counts."""
        if self.last_token:
            return [False] * (len(example.ids) - 1) + [True]
        return [*example.counted[1:], False]

    def batch(self, samples) -> PairBatch:
        """samples: global sample numbers, both of each pair."""
        samples = list(samples)
        return self.batch_of_rows([self.row(sample) for sample in samples], samples)

    def batch_of_rows(self, rows: list[int], samples: list[int]) -> PairBatch:
        ids = torch.zeros(len(rows), self.s + 1, dtype=torch.int64)
        mask = torch.zeros(len(rows), self.s, dtype=torch.bool)
        real = torch.zeros_like(mask)
        for at, row in enumerate(rows):
            example = self.pairs[row // 2][row % 2]
            ids[at, : len(example.ids)] = torch.tensor(example.ids)
            mask[at, : len(example.ids)] = torch.tensor(self.mask(example))
            real[at, : len(example.ids)] = True
        reference = None if self.reference is None else self.reference[rows]
        samples = torch.as_tensor(samples)
        return PairBatch(ids[:, :-1], ids[:, 1:], mask, samples, reference=reference, real=real)

    def examples(self, samples) -> list[Example]:
        return [self.pairs[row // 2][row % 2] for row in map(self.row, samples)]

    def counted_tokens(self, samples) -> int:
        return sum(sum(self.mask(example)) for example in self.examples(samples))

    def positions(self, samples) -> int:
        return sum(len(example.ids) for example in self.examples(samples))


# --- a run ----------------------------------------------------------------------------------------


def open_data(config, world, tokenizer) -> tuple[Pairs, Pairs]:
    """(training set, held-out set) of --data. Raises ChatError or CheckpointError."""
    chat = open_chat(config, tokenizer)
    shards = config.length_multiple
    limit = config.model_config().seq_length // shards * shards
    pairs, summary = read_pairs(config.data, "--data", chat, limit, config.skip_bad_examples)
    if config.val_data:
        reading = ("--val-data", chat, limit, config.skip_bad_examples)
        held_out, val_summary = read_pairs(config.val_data, *reading)
        summary += f"; --val-data: {val_summary}"
    else:
        pairs, held_out = hold_out(pairs, config.data, "pair")
        summary += f"; {len(held_out):,} of them held out"
    world.say(f"--data: {summary}; {chat.template.where}")
    last_token = config.method == "reward"
    train_set = Pairs(pairs, config.seed, shards, last_token)
    return train_set, Pairs(held_out, None, shards, last_token)
