"""Sequences that are decoded together: what goes into each forward pass, what comes out of it.

    Sequence        a prompt, and the tokens generated after it
    DecodeBatch     sequences that go forward together, and their key-value cache
    NewToken        what one step gives to one sequence

A model has seq_length positions. When a text outgrows them, its context begins later, at a multiple
of half of seq_length, and is prefilled again: the cached keys belong to the old positions.

    seq_length 8:      tokens so far     1 .. 8      9 .. 12     13 .. 16
                       context begins    0           4           8

`any_unfinished` is for ranks in lockstep: their forward passes are collectives of all of them, so
each goes on until the last one has finished.

    python -m course.generate       a lesson: three prompts together, and each by itself

Not covered: a new prompt in the place of a finished sequence (continuous batching):
inference/scheduler.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import context_parallel
from base.groups import Groups
from inference.kv_cache import Cache, Caches, power_of_two
from inference.sampling import DIVERGED
from run.checkpoint import gather

# State of a batch; the largest one of the ranks decides.
FINISHED, UNFINISHED, NOT_FINITE = 0, 1, 2


class NewToken(NamedTuple):
    """What a step gives to a sequence."""

    # The prompt's.
    number: int
    # None: the token ends the text, and is not part of it.
    token: int | None
    # None, or why the sequence is finished: `end of text`, `stop` or `length`.
    finish: str | None


@dataclass(frozen=True)
class StopRule:
    """When a sequence is finished."""

    max_tokens: int
    end_tokens: tuple[int, ...] = ()
    # stopped(number of the prompt, generated ids).
    stopped: Callable[[int, list[int]], bool] | None = None


@dataclass
class Sequence:
    """A prompt, and what was generated after it."""

    # The prompt's.
    number: int
    ids: list[int]
    # The key of its random numbers (sampling.keys_of).
    key: int
    # NewToken says what it can be.
    finish: str | None = None
    prompt_length: int = field(init=False)

    def __post_init__(self):
        self.prompt_length = len(self.ids)

    def append(self, token: int, rule: StopRule) -> NewToken:
        if token in rule.end_tokens:
            self.finish = "end of text"
            return NewToken(self.number, None, self.finish)
        self.ids.append(token)
        if rule.stopped and rule.stopped(self.number, self.ids[self.prompt_length :]):
            self.finish = "stop"
        elif len(self.ids) - self.prompt_length == rule.max_tokens:
            self.finish = "length"
        return NewToken(self.number, token, self.finish)


def context_start(n: int, seq_length: int) -> int:
    """The first token in the context of a sequence of n tokens: 0 while they fit into seq_length,
    then a multiple of its half."""
    half = max(1, seq_length // 2)
    halves_beyond = -(-(n - seq_length) // half)  # rounded up
    return max(0, halves_beyond * half)


@dataclass
class DecodeBatch:
    """Sequences that go forward together on this rank."""

    sequences: list[Sequence]
    rule: StopRule
    seq_length: int
    device: torch.device
    caches: Caches
    cached: bool = True
    # The ranks that have these sequences too, and share their prefill.
    cp_group: dist.ProcessGroup | None = None
    # How many tokens attention looks back at (GPTConfig.sliding_window); 0: all.
    window: int = 0
    # Where each sequence's context in the cache begins.
    starts: list[int] = field(default_factory=list)
    # [b], during prefill the column of each sequence's last token, in the whole context
    last_column: Tensor | None = None
    diverged: bool = False
    cache: Cache = field(init=False)

    def __post_init__(self):
        longest = max(sequence.prompt_length for sequence in self.sequences) + self.rule.max_tokens
        if self.caches.keeps:
            longest = power_of_two(longest)
        columns = min(longest, self.seq_length, self.window or self.seq_length)
        rows = len(self.sequences)
        self.cache = self.caches.take(rows, columns if self.cached else 0, self.cp_group)

    def next_tokens(self) -> Tensor:
        """The tokens of the next forward pass: the newest of each sequence [b, 1], or the contexts
        [b, s], padded at the end, where they are not in the cache; of N ranks that share them,
        this one's [b, s/N]. Prepares the cache for it."""
        lengths = self.positions()
        starts = [context_start(length, self.seq_length) for length in lengths]
        last_columns = [length - start - 1 for length, start in zip(lengths, starts)]
        if self.cache.columns and starts == self.starts:
            self.last_column = None
            self.cache.begin_decode(last_columns, self.device)
            tokens = [sequence.ids[-1:] for sequence in self.sequences]
            return torch.tensor(tokens, device=self.device)  # [b, 1]
        self.starts = starts
        self.last_column = torch.tensor(last_columns, device=self.device)
        self.cache.begin_prefill(last_columns)
        contexts = [seq.ids[start:] for seq, start in zip(self.sequences, starts)]
        s = max(map(len, contexts))
        if self.cp_group:
            # Two pieces of equal length for each rank.
            s += -s % (2 * self.cp_group.size())
        padded = [context + [0] * (s - len(context)) for context in contexts]
        tokens = torch.tensor(padded, device=self.device)  # [b, s]
        return context_parallel.shard(tokens, self.cp_group) if self.cp_group else tokens

    def keys(self) -> list[int]:
        return [sequence.key for sequence in self.sequences]

    def positions(self) -> list[int]:
        """Where the tokens to come will stand in their texts."""
        return [len(sequence.ids) for sequence in self.sequences]

    def append(self, tokens: list[int]) -> list[NewToken]:
        """Give each unfinished sequence its token. tokens: [b] of `sampling.sample`; with one that
        is DIVERGED the batch has no new tokens, and `any_unfinished` raises the error."""
        if DIVERGED in tokens:
            self.diverged = True
            return []
        new_tokens = [
            sequence.append(token, self.rule)
            for sequence, token in zip(self.sequences, tokens)
            if not sequence.finish
        ]
        self.drop_finished()
        return new_tokens

    def drop_finished(self) -> None:
        """Go on without the finished sequences, once they are half of the batch."""
        n = len(self.sequences)
        rows = [i for i, sequence in enumerate(self.sequences) if not sequence.finish]
        if not rows or 2 * len(rows) > n:
            return
        if self.caches.keeps:
            # Some finished ones too, so that the next size is n / 2, n / 4, ..
            size = n // 2
            while size >= 2 * len(rows):
                size //= 2
            finished = [i for i in range(n) if i not in rows]
            rows = sorted(rows + finished[: size - len(rows)])
        smaller = self.caches.take(len(rows), self.cache.columns, self.cp_group)
        self.cache.keep(rows, smaller)
        self.caches.put_back(n, self.cache)
        self.cache = smaller
        self.sequences = [self.sequences[i] for i in rows]
        self.starts = [self.starts[i] for i in rows]

    def end(self) -> None:
        """All sequences are finished: other batches may have the cache."""
        self.caches.put_back(len(self.sequences), self.cache)

    @property
    def state(self) -> int:
        if self.diverged:
            return NOT_FINITE
        finished = all(sequence.finish for sequence in self.sequences)
        return FINISHED if finished else UNFINISHED


# observe(batch, logits [b, V], sampled [b]), before `batch.append(sampled)`.
Observer = Callable[[DecodeBatch, Tensor, Tensor], None]


def any_unfinished(batch: DecodeBatch, lockstep: dist.ProcessGroup | None) -> bool:
    """Whether the batch of this rank, or of another rank of the lockstep group, goes on. Raises
    FloatingPointError, on all of these ranks, where logits are not finite."""
    state = max_over_ranks(batch.state, lockstep, batch.device)
    if state == NOT_FINITE:
        raise FloatingPointError("the model's logits are not finite")
    return state == UNFINISHED


def data_parallel(groups: Groups) -> tuple[int, int]:
    """(ranks that have other prompts, the number of this one among them)"""
    return (groups.dp.size(), groups.dp.rank()) if groups.dp else (1, 0)


def from_all_ranks(found, groups: Groups) -> list:
    """What each rank has found, on every rank. found: None where its logits were not finite; then
    every rank raises FloatingPointError."""
    of_ranks = gather(found, groups.all) if groups.all else [found]
    if None in of_ranks:
        raise FloatingPointError("the model's logits are not finite")
    return of_ranks


def max_over_ranks(number: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The largest of the ranks' numbers: an all-reduce, where there is a group."""
    if group is None:
        return number
    number = torch.tensor([number], device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return int(number)
