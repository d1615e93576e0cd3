"""serve.py without a model: invariants of blocks and steps, over histories drawn at random.

The oracle is SlotCache, a cache without a model. A key and a value depend on the adapter, on the
position and on all tokens up to it. So a slot holds these instead of numbers. A piece writes its
slots, and must then find its own sequence's past through its table, token for token.

Each of MUTATIONS breaks serve.py in one place. The histories must see it.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest

import serve
from serve import BlockPool, Draw, Piece, Request, Scheduler, Sequence, Step

# --- the oracle -----------------------------------------------------------------------------------


class Slot(NamedTuple):
    """What the key and the value of a token depend on."""

    position: int
    token: int
    # a hash of the adapter and of all tokens before
    past: int


def slots_of(adapter: str | None, ids: list[int]) -> list[Slot]:
    """What the cache must hold for a text."""
    past = hash(adapter)
    slots = []
    for position, token in enumerate(ids):
        slots.append(Slot(position, token, past))
        past = hash((past, token))
    return slots


class SlotCache:
    """Runs steps as serving/paged_attention.py does: copies, then all writes, then all reads."""

    def __init__(self, block_size: int, window: int):
        self.size = block_size
        self.window = window
        # (block, place in it) -> what was written last
        self.slots: dict[tuple[int, int], Slot] = {}

    def run(self, step: Step, texts: dict[int, list[Slot]]) -> None:
        """texts: number of a request -> slots of its whole text. Raises AssertionError where a
        piece finds another text than its own."""
        for source, target in step.copies:
            for place in range(self.size):
                self.slots[target, place] = self.slots.get((source, place))
        for piece in step.pieces:
            if piece.writes:
                for position in range(piece.start, piece.start + len(piece.tokens)):
                    self.slots[self.at(piece, position)] = texts[piece.number][position]
        for piece in step.pieces:
            seen_from = max(0, piece.start - self.window + 1) if self.window else 0
            for position in range(seen_from, piece.start + len(piece.tokens)):
                found = self.slots.get(self.at(piece, position))
                assert found == texts[piece.number][position], "the cache has another text"

    def at(self, piece: Piece, position: int) -> tuple[int, int]:
        block = piece.table[position // self.size]
        assert block, "a token that is seen has no block"
        return block, position % self.size


# --- a history ------------------------------------------------------------------------------------

ADAPTERS = (None, "french", "code")


class Sizes(NamedTuple):
    block_size: int
    num_blocks: int
    max_sequences: int
    budget: int
    stages: int = 1
    window: int = 0


class Wish(NamedTuple):
    """A request, and what a model would answer."""

    request: Request
    answer: list[int]

    @property
    def text(self) -> list[int]:
        return self.request.prompt + self.answer


class History:
    """Requests come, are answered step by step, or are cancelled. After each event the invariants
    are checked."""

    def __init__(self, sizes: Sizes, wishes: list[Wish], rng: random.Random, cancels: float = 0):
        """cancels: the probability that a request is cancelled, at each step."""
        self.sizes = sizes
        self.rng = rng
        self.cancels = cancels
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size)
        self.scheduler = Scheduler(self.pool, *sizes[2:])
        self.cache = SlotCache(sizes.block_size, sizes.window)
        self.wishes = wishes
        self.texts = {
            n: slots_of(wish.request.adapter, wish.text) for n, wish in enumerate(wishes)
        }
        self.to_come = deque(range(len(wishes)))
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: deque[Step] = deque()
        self.steps = 0
        self.copies = 0
        self.cancelled: set[int] = set()
        # adapter -> steps of others while it was ready
        self.passed_over = Counter()
        # number -> positions of its prompt whose logits were computed in this attempt
        self.with_logits: dict[int, int] = {}

    def run(self) -> "History":
        idle = 0
        while self.to_come or self.sequences:
            self.come_and_go()
            step = self.schedule()
            if step:
                self.in_flight.append(step)
            idle = 0 if step or self.in_flight or not self.sequences else idle + 1
            assert idle <= len(ADAPTERS), "nobody goes on"
            if self.in_flight and (len(self.in_flight) == self.sizes.stages or not step):
                self.complete(self.in_flight.popleft())
            self.check_blocks()
        assert not self.scheduler.running and not self.scheduler.waiting
        assert len(self.pool.free) == self.sizes.num_blocks - 1, "a block is lost"
        return self

    def check_blocks(self) -> None:
        assert not any(sequence.table for sequence in self.scheduler.waiting)
        self.pool.check([sequence.table for sequence in self.scheduler.running])

    # --- requests ---

    def come_and_go(self) -> None:
        while self.to_come and (not self.sequences or self.rng.random() < 0.4):
            number = self.to_come.popleft()
            sequence = Sequence(number, self.wishes[number].request)
            self.sequences[number] = sequence
            self.scheduler.waiting.append(sequence)
        for number in list(self.sequences):
            if self.rng.random() < self.cancels:
                self.cancel(number)

    def cancel(self, number: int) -> None:
        sequence = self.sequences[number]
        sequence.finish = "cancelled"
        self.cancelled.add(number)
        if not sequence.in_flight:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self.sequences[sequence.number]

    # --- steps ---

    def schedule(self) -> Step | None:
        ready = [s for s in self.scheduler.running if not s.in_flight]
        decoding = [s for s in ready if s.to_compute == 1]
        preemptions = self.scheduler.preemptions
        step = self.scheduler.schedule()
        self.check_blocks()
        if step is None:
            # a sequence that gave up its blocks leaves them to others
            gave_up = self.scheduler.preemptions > preemptions
            assert not ready or gave_up, "the scheduler waits, though a sequence is ready"
            return None
        self.steps += 1
        self.copies += len(step.copies)
        self.check_limits(step)
        self.check_turns(step, ready)
        self.check_decodes(step, ready, decoding)
        for piece in step.pieces:
            self.check_piece(step, piece)
        self.cache.run(step, self.texts)
        return step

    def check_limits(self, step: Step) -> None:
        numbers = [piece.number for piece in step.pieces]
        assert len(set(numbers)) == len(numbers), "a sequence is twice in a step"
        others = {piece.number for s in self.in_flight for piece in s.pieces}
        assert others.isdisjoint(numbers), "a sequence is in two steps in flight"
        assert sum(len(piece.tokens) for piece in step.pieces) <= self.sizes.budget
        assert len(self.scheduler.running) <= self.sizes.max_sequences
        lengths = [len(piece.tokens) > 1 for piece in step.pieces]
        assert lengths == sorted(lengths), "pieces of one token do not come first"

    def check_turns(self, step: Step, ready: list[Sequence]) -> None:
        """One adapter a step, and nobody waits for longer than all others take."""
        adapters = {self.sequences[piece.number].request.adapter for piece in step.pieces}
        assert adapters == {step.adapter}, "a step has two adapters"
        passed_over = {s.request.adapter for s in ready} - adapters
        self.passed_over = Counter({a: self.passed_over[a] + 1 for a in passed_over})
        assert max(self.passed_over.values(), default=0) < len(ADAPTERS), "an adapter waits"

    def check_decodes(self, step: Step, ready: list[Sequence], decoding: list[Sequence]) -> None:
        """A prompt that had begun goes on only where all that decode do, too."""
        running = [s for s in ready if s in self.scheduler.running]
        goes_on = {piece.number for piece in step.pieces}
        prompts = [s for s in running if s.number in goes_on and s not in decoding]
        left_out = [
            s
            for s in running
            if s in decoding and s.number not in goes_on and s.request.adapter == step.adapter
        ]
        assert not (prompts and left_out), "a prompt goes before a decode"

    def check_piece(self, step: Step, piece: Piece) -> None:
        sequence = self.sequences[piece.number]
        end = piece.start + len(piece.tokens)
        assert piece.tokens and piece.tokens == sequence.ids[piece.start : end]
        assert piece.next == (sequence.ids[end] if end < len(sequence.ids) else None)
        assert len(piece.table) == -(-end // self.sizes.block_size)
        copied = {target for _, target in step.copies}
        if piece.writes:
            written = piece.table[piece.start // self.sizes.block_size :]
            users = [self.pool.users[block] for block in written]
            # the first ones may have found it already, where an earlier piece of this step fills it
            assert not copied & {block for block in written if self.pool.users[block] > 1}, users
        if piece.draw.of_prompt:
            known = self.with_logits.get(piece.number, 0) if piece.start else 0
            assert piece.start == known and piece.writes, "a prompt's token has no logits"
            self.with_logits[piece.number] = end

    def complete(self, step: Step) -> None:
        """As serving.engine.Engine.complete."""
        for piece in step.pieces:
            sequence = self.sequences[piece.number]
            sequence.in_flight = False
            if sequence.finish:
                self.end(sequence)
            elif piece.next is None:
                self.append(sequence)

    def append(self, sequence: Sequence) -> None:
        wish = self.wishes[sequence.number]
        new = len(sequence.ids) - len(wish.request.prompt)
        sequence.ids += wish.answer[new : new + 1]
        if len(sequence.ids) == len(wish.text):
            assert sequence.ids == wish.text
            sequence.finish = "length"
            self.end(sequence)
