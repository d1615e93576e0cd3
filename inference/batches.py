"""Sequences that are decoded together: what goes into each forward pass, what comes out of it.

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

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

import context_parallel
from base.groups import Groups
from base.model_config import GPTConfig
from inference.kv_cache import Cache, Caches, power_of_two
from inference.requests import Output, Sequence
from inference.sampling import DIVERGED, LogProb, log_probs, sample
from run.checkpoint import gather

# State of a batch; the largest one of the ranks decides.
FINISHED, UNFINISHED, NOT_FINITE = 0, 1, 2


def context_start(n: int, seq_length: int) -> int:
    """The first token in the context of a sequence of n tokens: 0 while they fit into seq_length,
    then a multiple of its half."""
    half = max(1, seq_length // 2)
    halves_beyond = -(-(n - seq_length) // half)  # rounded up
    return max(0, halves_beyond * half)


@dataclass(eq=False)
class DecodeBatch:
    """Sequences that go forward together on this rank."""

    sequences: list[Sequence]
    config: GPTConfig
    device: torch.device
    caches: Caches
    cached: bool = True
    # The ranks that have these sequences too, and share their prefill.
    cp_group: dist.ProcessGroup | None = None
    # Where each sequence's context in the cache begins.
    starts: list[int] = field(default_factory=list)
    # [b], during prefill the column of each sequence's last token, in the whole context
    last_column: Tensor | None = None
    # The tokens that go forward [b, s], and those drawn after it [b].
    tokens: Tensor | None = None
    drawn: Tensor | None = None
    # Of the drawn tokens, where they are asked for.
    log_probs: list[LogProb] | None = None
    diverged: bool = False
    cache: Cache = field(init=False)

    def __post_init__(self):
        requests = [sequence.request for sequence in self.sequences]
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        if self.caches.keeps:
            longest = power_of_two(longest)
        context = self.config.seq_length
        columns = min(longest, context, self.config.common_window or context)
        rows = len(self.sequences)
        self.cache = self.caches.take(rows, columns if self.cached else 0, self.cp_group)

    def next_tokens(self) -> Tensor:
        """The tokens of the next forward pass: the newest of each sequence [b, 1], or the contexts
        [b, s], padded at the end, where they are not in the cache; of N ranks that share them,
        this one's [b, s/N]. Prepares the cache for it."""
        lengths = self.positions()
        starts = [context_start(length, self.config.seq_length) for length in lengths]
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

    def positions(self) -> list[int]:
        """Where the tokens to come will stand in their texts."""
        return [len(sequence.ids) for sequence in self.sequences]

    def draw(self, logits: Tensor) -> None:
        """Draw the next token of each sequence: `drawn`. logits: [b, V]"""
        draws = [sequence.request.draw for sequence in self.sequences]
        keys = [draw.key for draw in draws]
        # They are drawn alike.
        first = draws[0]
        self.drawn = sample(logits, keys, self.positions(), first.sampling)
        if first.log_probs is not None:
            self.log_probs = log_probs(logits, self.drawn.tolist(), first.log_probs)

    def append(self, tokens: list[int]) -> list[Output]:
        """Give each unfinished sequence its token. tokens: [b]; with one that is DIVERGED the batch
        has no outputs, and `any_unfinished` raises the error."""
        if DIVERGED in tokens:
            self.diverged = True
            return []
        known = self.log_probs or [None] * len(tokens)
        outputs = [
            sequence.append(token, log_prob)
            for sequence, token, log_prob in zip(self.sequences, tokens, known)
            if not sequence.finish
        ]
        self.drop_finished()
        return outputs

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
