"""inference/scheduler.py without a model: invariants of blocks and steps, over histories drawn at
random.

The oracle is SlotCache, a cache without a model. A key and a value depend on the adapter, on the
position and on all tokens up to it. So a slot holds these instead of numbers. A piece writes its
slots, and must then find its own sequence's past through its table, token for token.

Each of MUTATIONS breaks inference/scheduler.py in one place. The histories must see it.
"""

import inspect
import random
import textwrap
from collections import Counter, deque
from typing import NamedTuple

import pytest

from inference import scheduler
from inference.requests import DrawOptions, Request
from inference.scheduler import BlockPool, PagedSequence, Piece, Scheduler, Step

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
    """Runs steps as inference/paged_attention.py does: copies, then all writes, then all reads."""

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
# of 10,000 histories, the worst had 1.6 steps for each token
MOST_ATTEMPTS = 3


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


class CheckedScheduler(Scheduler):
    def preempt(self, sequence: PagedSequence) -> None:
        assert self.preemptions < 1000, "sequences give up their blocks again and again"
        assert not sequence.in_flight, "a step needs the blocks that are given up"
        younger = self.running[self.running.index(sequence) + 1 :]
        assert all(s.in_flight for s in younger), "a younger sequence keeps its blocks"
        super().preempt(sequence)


class History:
    """Requests come, are answered step by step, or are cancelled. After each event the invariants
    are checked."""

    def __init__(self, sizes: Sizes, wishes: list[Wish], rng: random.Random, cancels: float = 0):
        """cancels: the probability that a request is cancelled, at each step."""
        self.sizes = sizes
        self.rng = rng
        self.cancels = cancels
        self.pool = BlockPool(sizes.num_blocks, sizes.block_size)
        self.scheduler = CheckedScheduler(self.pool, *sizes[2:])
        self.cache = SlotCache(sizes.block_size, sizes.window)
        self.wishes = wishes
        self.texts = {n: slots_of(wish.request.adapter, wish.text) for n, wish in enumerate(wishes)}
        self.to_come = deque(range(len(wishes)))
        self.sequences: dict[int, PagedSequence] = {}
        self.in_flight: deque[Step] = deque()
        self.steps = 0
        self.copies = 0
        self.cancelled: set[int] = set()
        self.answered: set[int] = set()
        # a token runs once, and again for each time that its sequence gave up its blocks
        self.most_steps = MOST_ATTEMPTS * sum(len(wish.text) + 1 for wish in wishes)
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
        assert self.answered | self.cancelled == set(self.texts), "a request has no answer"
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
            sequence = PagedSequence(number, self.wishes[number].request)
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

    def end(self, sequence: PagedSequence) -> None:
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
        assert self.steps <= self.most_steps, "sequences give up their blocks again and again"
        self.copies += len(step.copies)
        self.check_limits(step)
        self.check_turns(step, ready)
        self.check_decodes(step, ready, decoding)
        for piece in step.pieces:
            self.check_piece(piece)
        self.cache.run(step, self.texts)
        return step

    def check_limits(self, step: Step) -> None:
        numbers = [piece.number for piece in step.pieces]
        assert len(set(numbers)) == len(numbers), "a sequence is twice in a step"
        others = {piece.number for s in self.in_flight for piece in s.pieces}
        assert others.isdisjoint(numbers), "a sequence is in two steps in flight"
        tokens = sum(len(piece.tokens) for piece in step.pieces)
        assert tokens <= self.sizes.budget, "the budget is exceeded"
        assert len(self.scheduler.running) <= self.sizes.max_sequences, "too many sequences run"
        lengths = [len(piece.tokens) > 1 for piece in step.pieces]
        assert lengths == sorted(lengths), "pieces of one token do not come first"

    def check_turns(self, step: Step, ready: list[PagedSequence]) -> None:
        """One adapter a step, and nobody waits for longer than all others take."""
        adapters = {self.sequences[piece.number].request.adapter for piece in step.pieces}
        assert adapters == {step.adapter}, "a step has two adapters"
        passed_over = {s.request.adapter for s in ready} - adapters
        self.passed_over = Counter({a: self.passed_over[a] + 1 for a in passed_over})
        assert max(self.passed_over.values(), default=0) < len(ADAPTERS), "an adapter waits"

    def check_decodes(
        self, step: Step, ready: list[PagedSequence], decoding: list[PagedSequence]
    ) -> None:
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

    def check_piece(self, piece: Piece) -> None:
        sequence = self.sequences[piece.number]
        end = piece.start + len(piece.tokens)
        assert piece.tokens, "a piece has no tokens"
        assert piece.tokens == sequence.ids[piece.start : end]
        assert piece.next == (sequence.ids[end] if end < len(sequence.ids) else None)
        assert len(piece.table) == -(-end // self.sizes.block_size)
        if piece.draw.of_prompt:
            known = self.with_logits.get(piece.number, 0) if piece.start else 0
            assert piece.start == known and piece.writes, "a prompt's token has no logits"
            self.with_logits[piece.number] = end

    def complete(self, step: Step) -> None:
        """As inference.engine.Engine.complete."""
        for piece in step.pieces:
            sequence = self.sequences[piece.number]
            sequence.in_flight = False
            if sequence.finish:
                self.end(sequence)
            elif piece.next is None:
                self.append(sequence)

    def append(self, sequence: PagedSequence) -> None:
        wish = self.wishes[sequence.number]
        new = len(sequence.ids) - len(wish.request.prompt)
        sequence.ids += wish.answer[new : new + 1]
        if len(sequence.ids) == len(wish.text):
            assert sequence.ids == wish.text
            sequence.finish = "length"
            self.answered.add(sequence.number)
            self.end(sequence)


# --- histories drawn at random --------------------------------------------------------------------


def drawn_wishes(rng: random.Random) -> list[Wish]:
    """Requests that often begin alike, of few different tokens, so that blocks often do, too."""

    def tokens(fewest: int, most: int) -> list[int]:
        return rng.choices(range(3), k=rng.randint(fewest, most))

    beginnings = [tokens(1, 16) for _ in range(3)]
    adapters = rng.choice([ADAPTERS[:1], ADAPTERS])
    wishes: list[Wish] = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        prompt = rng.choice(beginnings)
        if wishes and kind < 0.25:
            # the next turn of a conversation
            prompt = rng.choice(wishes).text[:30]
        elif wishes and kind < 0.6:
            prompt = rng.choice(wishes).request.prompt
        if kind > 0.5:
            prompt = prompt[: rng.randint(1, len(prompt))] + tokens(0, 4)
        answer = tokens(0, 16)
        draw = DrawOptions(of_prompt=rng.random() < 0.1)
        adapter = rng.choice(adapters)
        wishes.append(Wish(Request(prompt, len(answer), draw, adapter=adapter), answer))
    return wishes


def drawn(seed: int) -> History:
    rng = random.Random(seed)
    wishes = drawn_wishes(rng)
    size = rng.randint(1, 5)
    # engine.check refuses what does not fit into an empty cache
    budget, window = rng.randint(1, 12), rng.choice([0, 0, rng.randint(1, 9)])
    longest = max(len(wish.text) for wish in wishes)
    fewest = scheduler.most_blocks(longest, size, budget, window) + 1
    sizes = Sizes(
        block_size=size,
        num_blocks=fewest + rng.choice([0, 0, 0, 1, 3, 10, 40]),
        max_sequences=rng.randint(1, 6),
        budget=budget,
        stages=rng.randint(1, 3),
        window=window,
    )
    return History(sizes, wishes, rng, cancels=rng.choice([0, 0, 0.02]))


def test_histories_drawn_at_random():
    steps = copies = preemptions = found = cancelled = 0
    for seed in range(300):
        history = drawn(seed).run()
        steps += history.steps
        copies += history.copies
        cancelled += len(history.cancelled)
        preemptions += history.scheduler.preemptions
        found += history.scheduler.found
    # what is checked does happen
    assert steps > 12_000 and found > 3_000
    assert min(copies, preemptions, cancelled) > 30


# --- mutations ------------------------------------------------------------------------------------


WRONG_TEXT = "the cache has another text"
# how a history fails -> mutations: (function of scheduler.py, a piece of it, its replacement)
MUTATIONS = {
    "a token that is seen has no block": [
        ("Scheduler.leave_window", "- self.window + 1", "- self.window + 2"),
    ],
    "a block is free and in use, or neither": [
        ("BlockPool.release", "if self.users[block] == 0", "if True"),
        ("BlockPool.share", "self.free.pop(block, None)", "pass"),
    ],
    "a step needs the blocks that are given up": [
        ("Scheduler.make_room", "if not s.in_flight", ""),
    ],
    "a block has other users than its tables say": [
        ("Scheduler.remove", "self.release(sequence)", "pass"),
        ("BlockPool.release", "self.users[block] -= 1", "pass"),
        ("BlockPool.share", "self.users[block] += 1", "pass"),
    ],
    WRONG_TEXT: [
        ("scheduler.hash_of", "parent + ", ""),
        ("PagedSequence.block_hash", "repr(self.request.adapter).encode()", 'b""'),
        ("Scheduler.make_room", "kept > 0 and users[table[first]] > 1", "False"),
        ("Scheduler.make_room", "step.copies.append((shared, table[first]))", "pass"),
        ("Scheduler.make_room", "self.pool.overwrite(table[first], kept)", "pass"),
        ("BlockPool.allocate", "self.overwrite(block, 0)", "pass"),
        ("Scheduler.remember", "end + 1, size", "end + size, size"),
    ],
    "a prompt's token has no logits": [
        ("Scheduler.blocks_found", " and not sequence.request.draw.reads_all", ""),
    ],
    "a piece has no tokens": [
        ("Scheduler.place", "min(sequence.computed, len(sequence.ids) - 1)", "sequence.computed"),
    ],
    "the budget is exceeded": [
        ("Scheduler.place", "min(left, len(sequence.ids) - start)", "len(sequence.ids) - start"),
    ],
    "too many sequences run": [
        ("Scheduler.may_begin", " or len(self.running) == self.max_sequences", ""),
    ],
    "a step has two adapters": [
        ("Scheduler.may_begin", "has_room and sequence.request.adapter == adapter", "has_room"),
    ],
    "an adapter waits": [
        ("Scheduler.schedule", "self.turns[name]", "-self.turns[name]"),
    ],
    "the scheduler waits, though a sequence is ready": [
        ("Scheduler.schedule", "self.may_begin(self.waiting[0].request.adapter)", "True"),
    ],
    "a prompt goes before a decode": [
        ("Scheduler.schedule", "sequence.to_compute > 1", "sequence.to_compute == 1"),
    ],
    "a younger sequence keeps its blocks": [
        ("Scheduler.make_room", "reversed(self.running)", "self.running"),
    ],
}


def mutate(monkeypatch, function: str, old: str, new: str) -> None:
    owner, name = function.split(".")
    owner = getattr(scheduler, owner, scheduler)
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) == 1, "scheduler.py has changed: write the mutation anew"
    names = dict(vars(scheduler))
    exec(source.replace(old, new), names)
    monkeypatch.setattr(owner, name, names[name])


def failure_of(history: History) -> str:
    try:
        history.run()
    except (AssertionError, LookupError) as error:
        return str(error).split("\n")[0]
    return ""


@pytest.mark.parametrize(
    "failure, mutation", [(failure, m) for failure, several in MUTATIONS.items() for m in several]
)
def test_a_mutation_is_seen(failure, mutation, monkeypatch):
    mutate(monkeypatch, *mutation)
    if failure == WRONG_TEXT:
        # the cache sees it alone, also where the invariants would come first
        monkeypatch.setattr(BlockPool, "check", lambda *_: None)
    assert any(failure_of(drawn(seed)) == failure for seed in range(1000))


# --- worked by hand -------------------------------------------------------------------------------


class ByHand:
    """A scheduler, and the sequences that it was given."""

    def __init__(self, num_blocks: int, block_size: int, *limits: int, **more: int):
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, *limits, **more)
        self.sequences: list[PagedSequence] = []

    def add(self, *prompts: list[int], adapter: str | None = None) -> list[PagedSequence]:
        new = []
        for prompt in prompts:
            new.append(PagedSequence(len(self.sequences), Request(prompt, 99, adapter=adapter)))
            self.sequences.append(new[-1])
        self.scheduler.waiting += new
        return new

    def step(self, *tokens: int) -> Step:
        """A step that has run. tokens: what its pieces draw, in their order."""
        step = self.scheduler.schedule()
        self.end(step, *tokens)
        return step

    def end(self, step: Step, *tokens: int) -> None:
        drawn = iter(tokens)
        for piece in step.pieces:
            sequence = self.sequences[piece.number]
            sequence.in_flight = False
            if piece.next is None:
                sequence.ids.append(next(drawn))
        assert next(drawn, None) is None
        self.check()

    def check(self) -> None:
        self.pool.check([sequence.table for sequence in self.sequences])


def test_the_step_in_the_introduction():
    """A and B decode, C begins; then B has ended, and D begins."""
    hand = ByHand(20, 4, 4, 8)
    a, b = hand.add([1, 2], [3, 4, 5])
    assert str(hand.step(8, 8)) == "0: 0 .. 1, and draws | 1: 0 .. 2, and draws"
    hand.add([11, 12, 13, 14, 15, 16, 17, 18, 19], [21, 22, 23, 24, 25])
    step = hand.step(9, 9)
    assert str(step) == "0: 2, and draws | 1: 3, and draws | 2: 0 .. 5"
    assert step.pieces[2].next == 17
    hand.scheduler.remove(b)
    assert str(hand.step(7, 7)) == "0: 3, and draws | 2: 6 .. 8, and draws | 3: 0 .. 3"
    assert str(hand.step(6, 6, 6)) == "0: 4, and draws | 3: 4, and draws | 2: 9, and draws"
    assert a.ids == [1, 2, 8, 9, 7, 6]


def test_an_equal_prompt_is_found_whole_and_copied_on_write():
    hand = ByHand(9, 4, 4, 20)
    hand.add([1, 2, 3, 4, 5, 6])
    hand.step(7)
    hand.add([1, 2, 3, 4, 5, 6])
    step = hand.scheduler.schedule()
    # the first one writes its 7 into a block that nobody shares yet
    assert step.copies == [] and str(step) == "0: 6, and draws | 1: 5, and draws"
    # the last token runs for its logits
    assert [piece.writes for piece in step.pieces] == [True, False]
    assert [piece.table for piece in step.pieces] == [[1, 2], [1, 2]]
    hand.end(step, 8, 9)
    step = hand.step(8, 8)
    # the younger one shares block 2 still, so the first that writes takes a copy
    assert step.copies == [(2, 3)]
    assert [piece.table for piece in step.pieces] == [[1, 3], [1, 2]]


def test_preempted_and_back():
    """4 blocks of 2 tokens, and two sequences that need 3 each."""
    hand = ByHand(5, 2, 4, 20)
    a, b = hand.add([1, 2, 3], [4, 5, 6])
    hand.step(7, 7)
    hand.step(8, 8)
    assert not hand.pool.free
    assert str(hand.step(9)) == "0: 4, and draws" and hand.scheduler.preemptions == 1
    assert b.table == [] and b.computed == 0 and b.ids == [4, 5, 6, 7, 8]
    # it comes before all others, and waits until there is room for all of its tokens
    hand.add([1])
    assert hand.scheduler.waiting[0] is b and str(hand.step(9)) == "0: 5, and draws"
    hand.scheduler.remove(a)
    # its first block was taken last, and is found again
    found = hand.scheduler.found
    assert str(hand.step(9, 9)) == "2: 0, and draws | 1: 2 .. 4, and draws"
    assert hand.scheduler.found == found + 2 and b.ids == [4, 5, 6, 7, 8, 9]


def test_stages_divide_the_sequences():
    hand = ByHand(20, 4, 4, 20, stages=2)
    hand.add([1], [2], [3], [4])
    hand.step(0, 0, 0, 0)
    first, second = hand.scheduler.schedule(), hand.scheduler.schedule()
    assert str(first) == "0: 1, and draws | 1: 1, and draws"
    assert str(second) == "2: 1, and draws | 3: 1, and draws"
    assert hand.scheduler.schedule() is None
    hand.end(first, 0, 0)
    assert str(hand.scheduler.schedule()) == "0: 2, and draws | 1: 2, and draws"


def test_an_empty_pool_says_so():
    pool = BlockPool(2, 4)
    assert pool.allocate() == 1
    with pytest.raises(StopIteration):
        pool.allocate()
