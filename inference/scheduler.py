"""Serving: many people's requests share one model, and none waits for another to end.

    paged cache           the memory of keys and values is cut into blocks of some tokens. Each
                          sequence has a table of blocks, anywhere in memory, and takes the next one
                          when it needs it (vLLM, arXiv 2309.06180, section 4)
    prefix cache          a block is found again by a hash of its tokens and of all before them. So
                          a prompt that begins like an earlier one is not computed twice
    continuous batching   each step asks anew who takes part. A request joins as soon as there is
                          room, and leaves with its last token (Orca, Yu et al., OSDI 2022)
    chunked prefill       a step has a budget of tokens: one for each sequence that decodes, and the
                          rest for pieces of new prompts (Sarathi-Serve, arXiv 2403.02310)

    a step of 8 tokens    A decodes  | B decodes | C: tokens 0 .. 5 of its prompt of 9
    the next step         A decodes  | C: 6 .. 8, and draws  | D: 0 .. 3      B has ended

    blocks of 4 tokens    block   0 1 2 3 4 5 6        E  [3 1]      E and F begin with the same
                                  - E F E F G .        F  [3 2 4]    4 tokens, and share block 3

Prefill computes a prompt, decoding one new token of each sequence (generate.py). A token is drawn
from the logits of the last one, which must run even where the prefix cache has all keys and values.

A step is data: the scheduler needs no model (inference/engine.py runs the steps). Where blocks run
out, the youngest sequence gives up its own, and is computed again later: its text stays the same,
because its random numbers belong to (seed, prompt, position) (inference/sampling.py).

    python -m course.serve                       a lesson: ten requests, in batches and continuously
    python -m inference.serve --checkpoint runs/chat   OpenAI's API (inference/server.py)
    torchrun --nproc-per-node 2 -m inference.serve --checkpoint runs/chat --tp 2

Not covered: priorities, blocks in the host's memory, speculative decoding (vLLM, SGLang have them).
"""

import hashlib
from array import array
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.requests import DrawOptions, Sequence

# --- blocks ---------------------------------------------------------------------------------------


class BlockPool:
    """Which block of the cache belongs to which sequence. Block 0 is scratch: it pads tables and
    absorbs discarded writes."""

    def __init__(self, num_blocks: int, block_size: int):
        """block_size: tokens of a block."""
        self.block_size = block_size
        # The number of tables that each block stands in.
        self.users = [0] * num_blocks
        # Blocks in no table, the next one to be taken first. Until then their hashes stay.
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        # The prefix cache: hash -> block, and block -> {number of its first tokens: their hash}
        self.block_of: dict[bytes, int] = {}
        self.hashes_of: dict[int, dict[int, bytes]] = defaultdict(dict)

    def allocate(self, last: int = 0) -> int:
        """A free block: the one after `last`, or the first. Raises StopIteration without one."""
        block = last + 1 if last and last + 1 in self.free else next(iter(self.free))
        del self.free[block]
        self.overwrite(block, 0)
        self.users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table uses this block."""
        self.free.pop(block, None)
        self.users[block] += 1

    def release(self, block: int) -> None:
        """One table fewer uses this block. Blocks that can be found are taken last."""
        self.users[block] -= 1
        if self.users[block] == 0:
            self.free[block] = None
            self.free.move_to_end(block, last=block in self.hashes_of)

    def remember(self, block: int, filled: int, prefix_hash: bytes) -> None:
        """The first `filled` tokens of a block, and all tokens before, have this hash."""
        if prefix_hash not in self.block_of:
            self.block_of[prefix_hash] = block
            self.hashes_of[block][filled] = prefix_hash

    def overwrite(self, block: int, kept: int) -> None:
        """Tokens after the first `kept` ones are overwritten: their hashes go."""
        hashes = self.hashes_of.get(block, {})
        for filled in [n for n in hashes if n > kept]:
            del self.block_of[hashes.pop(filled)]
        if not hashes:
            self.hashes_of.pop(block, None)

    def check(self, tables: list[list[int]]) -> None:
        """The invariants. tables: of all sequences. Raises AssertionError."""
        users = [0] * len(self.users)
        for block in (block for table in tables for block in table if block):
            users[block] += 1
        assert users == self.users, "a block has other users than its tables say"
        assert 0 not in self.free, "block 0 is given away"
        free = {block for block in range(1, len(users)) if users[block] == 0}
        assert free == set(self.free), "a block is free and in use, or neither"
        found = {h: block for block, of in self.hashes_of.items() for h in of.values()}
        assert found == self.block_of, "a hash finds another block than its own"


def hash_of(parent: bytes, tokens: list[int]) -> bytes:
    """The hash of a block: of its tokens, and of the hash of the block before it."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


# --- sequences ------------------------------------------------------------------------------------


@dataclass(eq=False)
class PagedSequence(Sequence):
    """A sequence, and its place in the cache."""

    # Its blocks, in order; 0 for one that no later token looks at.
    table: list[int] = field(default_factory=list)
    # So many tokens have keys and values in the cache, once the steps in flight have run.
    computed: int = 0
    hashes: list[bytes] = field(default_factory=list)
    in_flight: bool = False

    @property
    def to_compute(self) -> int:
        return len(self.ids) - self.computed

    def prefix_hash(self, end: int, size: int) -> bytes:
        """The hash of tokens 0 .. end - 1, in blocks of `size`."""
        for start in range(len(self.hashes) * size, end - size + 1, size):
            self.hashes.append(self.block_hash(start, start + size, size))
        if end % size == 0:
            return self.hashes[end // size - 1]
        return self.block_hash(end - end % size, end, size)

    def block_hash(self, start: int, end: int, size: int) -> bytes:
        # With another adapter, the same tokens have other keys and values.
        parent = self.hashes[start // size - 1] if start else repr(self.request.adapter).encode()
        return hash_of(parent, self.ids[start:end])


# --- a step, as data ------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The tokens of one sequence in a step."""

    number: int
    # The position of the first one.
    start: int
    tokens: list[int]
    # The blocks of all tokens so far.
    table: list[int]
    # False: the cache has their keys and values already.
    writes: bool
    # The token after the last one; None: it is drawn.
    next: int | None
    draw: DrawOptions


class Step(NamedTuple):
    """One forward pass."""

    # Pieces of one token come first, the shortest sequence before the others.
    pieces: list[Piece]
    # Blocks that are copied before it: (from, to).
    copies: list[tuple[int, int]]
    adapter: str | None = None

    def __str__(self) -> str:
        words = []
        for piece in self.pieces:
            last = piece.start + len(piece.tokens) - 1
            draws = ", and draws" if piece.next is None else ""
            span = f"{piece.start} .. {last}" if last > piece.start else f"{last}"
            words.append(f"{piece.number}: {span}{draws}")
        return " | ".join(words)


def most_blocks(tokens: int, block_size: int, budget: int, window: int) -> int:
    """The most blocks that a sequence of so many tokens holds at a time."""
    # With a window: what a piece looks back at, the piece, the beginning of its first block.
    held = min(tokens, window + budget + block_size) if window else tokens
    return -(-held // block_size)


# --- the scheduler --------------------------------------------------------------------------------


class Scheduler:
    """Decides what the next step computes."""

    def __init__(
        self, pool: BlockPool, max_sequences: int, budget: int, stages: int = 1, window: int = 0
    ):
        """max_sequences: that run at a time. budget: tokens of a step. stages: of a pipeline, which
        has so many steps in flight. window: so far back a token looks (0: to the first one)."""
        self.pool = pool
        self.max_sequences = max_sequences
        self.budget = budget
        self.stages = stages
        self.window = window
        self.waiting: deque[PagedSequence] = deque()
        # The oldest first.
        self.running: list[PagedSequence] = []
        # Adapter -> the number of its last step.
        self.turns: dict[str | None, int] = defaultdict(int)
        # How often a sequence gave up its blocks; tokens that the prefix cache had.
        self.preemptions = self.found = 0

    def schedule(self) -> Step | None:
        """The next step; None where no sequence can go on before a step in flight ends."""
        ready = [sequence for sequence in self.running if not sequence.in_flight]
        candidates = list(ready)
        if self.waiting and self.may_begin(self.waiting[0].request.adapter):
            candidates.append(self.waiting[0])
        if not candidates:
            return None
        # A step has one adapter; adapters take turns.
        adapter = min((s.request.adapter for s in candidates), key=lambda name: self.turns[name])
        ready = [sequence for sequence in ready if sequence.request.adapter == adapter]
        # Decodes first.
        ready.sort(key=lambda sequence: sequence.to_compute > 1)
        step = Step([], [], adapter)
        left = self.budget
        # The stages of a pipeline divide the sequences among them.
        for sequence in ready[: -(-len(self.running) // self.stages)]:
            # An earlier one may have taken its blocks.
            if left and sequence in self.running:
                left -= self.place(step, sequence, left)
        while left and self.may_begin(adapter):
            self.running.append(self.waiting.popleft())
            left -= self.place(step, self.running[-1], left)
        self.turns[adapter] = 1 + max(self.turns.values())
        # One call of attention serves several pieces of one token, if they are about as long.
        step.pieces.sort(key=lambda p: (1, 0) if len(p.tokens) > 1 else (0, len(p.table)))
        return step if step.pieces else None

    def may_begin(self, adapter: str | None) -> bool:
        """Whether the first one that waits begins: there are blocks for all of its tokens."""
        if not self.waiting or len(self.running) == self.max_sequences:
            return False
        sequence = self.waiting[0]
        found = [] if self.window else self.blocks_found(sequence)
        in_use = sum(self.pool.users[block] > 0 for block in found)
        most = most_blocks(len(sequence.ids), self.pool.block_size, self.budget, self.window)
        has_room = most - in_use <= len(self.pool.free)
        return has_room and sequence.request.adapter == adapter

    def place(self, step: Step, sequence: PagedSequence, left: int) -> int:
        """Add a piece of at most `left` tokens to the step. Returns how many it has: 0 where the
        sequence itself had to give up its blocks."""
        for block in self.blocks_found(sequence):
            # It may be one that an earlier piece of this step fills: each layer writes all keys
            # and values before it reads them.
            self.pool.share(block)
            sequence.table.append(block)
            end = min(sequence.computed + self.pool.block_size, len(sequence.ids))
            self.found += end - sequence.computed
            sequence.computed = end
        # The last token runs in any case: the next one is drawn from its logits.
        start = min(sequence.computed, len(sequence.ids) - 1)
        count = min(left, len(sequence.ids) - start)
        writes = sequence.computed == start
        if writes and not self.make_room(step, sequence, start + count):
            return 0
        sequence.computed = start + count
        sequence.in_flight = True
        if writes:
            self.remember(sequence, start)
        tokens, table = sequence.ids[start : start + count], list(sequence.table)
        after = sequence.ids[start + count] if sequence.to_compute else None
        draw = sequence.request.draw
        step.pieces.append(Piece(sequence.number, start, tokens, table, writes, after, draw))
        return count

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def blocks_found(self, sequence: PagedSequence) -> list[int]:
        """Blocks of the prefix cache that have the sequence's next tokens."""
        found = []
        size, at = self.pool.block_size, sequence.computed
        while at % size == 0 and at < len(sequence.ids) and not sequence.request.draw.reads_all:
            at = min(at + size, len(sequence.ids))
            block = self.pool.block_of.get(sequence.prefix_hash(at, size))
            if block is None:
                break
            found.append(block)
        return found

    def make_room(self, step: Step, sequence: PagedSequence, end: int) -> bool:
        """Give the sequence blocks of its own for tokens `computed` .. end - 1, if need be those of
        the youngest. False: it was the youngest itself."""
        table, users = sequence.table, self.pool.users
        first, kept = divmod(sequence.computed, self.pool.block_size)
        self.leave_window(sequence)

        def is_shared() -> bool:
            return kept > 0 and users[table[first]] > 1

        while len(self.pool.free) < self.blocks_for(end) - len(table) + is_shared():
            youngest = next(s for s in reversed(self.running) if not s.in_flight)
            self.preempt(youngest)
            if youngest is sequence:
                return False
        if is_shared():
            # Copy on write: others read this block.
            shared, table[first] = table[first], self.pool.allocate()
            step.copies.append((shared, table[first]))
            self.pool.release(shared)
        elif kept:
            self.pool.overwrite(table[first], kept)
        while len(table) < self.blocks_for(end):
            # One sequence alone has neighbours, if it can: they are read without a copy.
            alone = table and len(self.running) == 1 and not self.waiting
            table.append(self.pool.allocate(table[-1] if alone else 0))
        return True

    def remember(self, sequence: PagedSequence, start: int) -> None:
        """Let others find the blocks that the tokens from `start` fill, and the last block of the
        prompt."""
        size, end = self.pool.block_size, sequence.computed
        ends = list(range(start - start % size + size, end + 1, size))
        if end == len(sequence.request.prompt) and end % size:
            ends.append(end)
        for at in ends:
            first, filled = (at - 1) // size, (at - 1) % size + 1
            self.pool.remember(sequence.table[first], filled, sequence.prefix_hash(at, size))

    def leave_window(self, sequence: PagedSequence) -> None:
        """Give back the blocks that no later token looks at."""
        if self.window:
            unseen = max(0, sequence.computed - self.window + 1) // self.pool.block_size
            for i, block in enumerate(sequence.table[:unseen]):
                if block:
                    self.pool.release(block)
                    sequence.table[i] = 0

    def preempt(self, sequence: PagedSequence) -> None:
        """Take all blocks of a sequence. It is the next one that begins, and what it had is
        computed again, unless the prefix cache still has it."""
        self.release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def release(self, sequence: PagedSequence) -> None:
        # The end of a text goes before its beginning, which others may share.
        for block in reversed(sequence.table):
            if block:
                self.pool.release(block)
        sequence.table, sequence.computed = [], 0

    def remove(self, sequence: PagedSequence) -> None:
        """Forget a sequence that has ended, and is not in flight."""
        self.release(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
