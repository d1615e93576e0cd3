"""The lesson of serve.py: blocks by hand, ten requests on a time line, what a cache wastes, and a
model that answers.

python serve.py
"""

import random
from unittest import mock

import torch

import generate
import serve
import sharding
from lessons import demo, form
from serve import BlockPool, Request, Scheduler, Sequence, Step
from serving import engine
from serving.engine import Engine
from serving.paged_attention import PagedCache

# --- what --without removes -----------------------------------------------------------------------


def release_for_all(self, block: int) -> None:
    """A block is free when the first of its users leaves."""
    self.users[block] -= 1
    self.free[block] = None


def without_parent(parent: bytes, tokens: list[int], original=serve.hash_of) -> bytes:
    return original(b"", tokens)


def mask_of_the_next(self, pieces, local, original=PagedCache.prepare_decodes) -> None:
    """Each sequence that decodes has the mask of the one before it."""
    original(self, pieces, local)
    if self.mask is not None:
        self.mask = self.mask.roll(1, dims=0)


def sample_by_place(logits, keys, positions, params, original=engine.sample):
    return original(logits, list(range(len(keys))), positions, params)


WITHOUT = {
    "users": form.Removal(
        lambda: mock.patch.object(BlockPool, "release", release_for_all),
        "Who leaves frees its blocks. Whose text is lost?",
        "That of others who share the prefix: their tables still name the block, and a new sequence"
        " writes into it. The invariants see it when the first one leaves; answers change once the"
        " block is taken, so a large cache hides it.",
    ),
    "parent": form.Removal(
        lambda: mock.patch.object(serve, "hash_of", without_parent),
        "A hash of the block's own tokens. What is found?",
        "Keys and values of equal tokens behind other ones. The last prompt finds its question in a"
        " block of the first prompt, which begins otherwise. No invariant sees it: the tables are"
        " in order.",
    ),
    "mask": form.Removal(
        lambda: mock.patch.object(PagedCache, "prepare_decodes", mask_of_the_next),
        "Sequences swap masks. Who sees what?",
        "A short sequence with the mask of a longer one looks at columns that it has not filled; a"
        " long one does not see its newest tokens. Sequences of one length would hide it.",
    ),
    "request": form.Removal(
        lambda: mock.patch.object(engine, "sample", sample_by_place),
        "Random numbers of (place in the step, position). Who cares?",
        "Whoever asks twice: the place depends on who else is served, and changes when others come"
        " and leave. So the answer depends on them, and a preempted text goes on otherwise.",
    ),
}

# --- steps without a model ------------------------------------------------------------------------


class Simulation:
    """Sequences that get a token for each one they draw: the number of their request."""

    def __init__(self, prompts: list[list[int]], answers: list[int], scheduler: Scheduler):
        """answers: tokens of each."""
        self.scheduler = scheduler
        self.pool = scheduler.pool
        requests = [Request(*pair) for pair in zip(prompts, answers)]
        self.sequences = [Sequence(n, request) for n, request in enumerate(requests)]
        scheduler.waiting.extend(self.sequences)

    def step(self) -> Step | None:
        """None: all have ended."""
        step = self.scheduler.schedule()
        for piece in step.pieces if step else ():
            sequence = self.sequences[piece.number]
            sequence.in_flight = False
            if piece.next is None:
                sequence.ids.append(piece.number)
            request = sequence.request
            if len(sequence.ids) == len(request.prompt) + request.max_tokens:
                self.scheduler.remove(sequence)
        return step


def by_hand(lesson: form.Lesson) -> None:
    lesson.predict(
        "Blocks of 4 tokens. The prompts 1 2 3 4 5 6, 1 2 3 4 8 9 and once more 1 2 3 4 5 6 begin in"
        " one step. How many blocks have they, and how many tokens run? Then each draws: copies?",
        "blocks; tokens; copies",
    )
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8, 9], [1, 2, 3, 4, 5, 6]]
    hand = Simulation(prompts, [9] * 3, Scheduler(BlockPool(9, 4), 4, 32))
    steps = []
    for _ in range(2):
        steps.append(hand.step())
        tables = "  ".join(str(sequence.table) for sequence in hand.sequences)
        lesson.say(f"{str(steps[-1]):<63}tables {tables}")
    tokens = sum(len(piece.tokens) for piece in steps[0].pieces)
    blocks = len({block for piece in steps[0].pieces for block in piece.table})
    copies = steps[1].copies
    lesson.check(
        f"{blocks} blocks; {tokens} tokens = 6 + 2 + 1, for the last one runs in any case, and draws."
        f" Copy on write: {copies}, (from, to)",
        (blocks, tokens, copies) == (3, 9, [(2, 4)]),
        [blocks, tokens, len(copies)],
    )


# --- ten requests ---------------------------------------------------------------------------------

# tokens of each prompt and answer
TEN = [(4, 3), (12, 14), (2, 2), (6, 9), (8, 2), (3, 12), (5, 4), (10, 3), (8, 8), (4, 2)]
AT_A_TIME = 4
# a step with fewer tokens takes as long: the weights are read in any case
FIXED = 8


def columns(tokens: int) -> int:
    """Of the time line: max(FIXED, tokens), in units of FIXED."""
    return -(-max(FIXED, tokens) // FIXED)


def static_rows() -> list[str]:
    """Batches in which all wait for the longest; prompts and answers are filled up to it."""
    rows = []
    start = 0
    for first in range(0, len(TEN), AT_A_TIME):
        batch = TEN[first : first + AT_A_TIME]
        prefill = columns(len(batch) * max(prompt for prompt, _ in batch))
        longest = max(answer for _, answer in batch)
        for _, answer in batch:
            waits = "·" * (longest - answer)
            rows.append(" " * start + "░" * prefill + "█" * (answer - 1) + waits)
        start += prefill + longest - 1
    return rows


def continuous_rows() -> list[str]:
    prompts = [[n] * prompt for n, (prompt, _) in enumerate(TEN)]
    scheduler = Scheduler(BlockPool(99, 4), AT_A_TIME, budget=FIXED)
    simulation = Simulation(prompts, [answer for _, answer in TEN], scheduler)
    rows = [""] * len(TEN)
    time = 0
    while step := simulation.step():
        for piece in step.pieces:
            mark = "░" if piece.start < TEN[piece.number][0] else "█"
            rows[piece.number] = rows[piece.number].ljust(time) + mark
        # a budget of FIXED tokens
        time += 1
    return rows


def time_line(lesson: form.Lesson) -> None:
    lengths = ", ".join(f"{prompt} + {answer}" for prompt, answer in TEN)
    lesson.predict(
        f"Ten requests (prompt + answer): {lengths}. {AT_A_TIME} run at a time. A step takes max"
        f" ({FIXED}, its tokens); here 1 = {FIXED}. How long do padded batches of {AT_A_TIME} take?"
        f" And continuous ones, at most {FIXED} tokens a step?",
        "batches; continuous",
    )
    static, continuous = static_rows(), continuous_rows()
    times = [max(map(len, rows)) for rows in (static, continuous)]
    lesson.draw(f"  {'░ prompt  █ decodes  · waits for the batch':<{times[0] + 3}}continuous")
    for n, (left, right) in enumerate(zip(static, continuous)):
        lesson.draw(f"{n} {left:<{times[0] + 3}}{right}")
    computed = sum(prompt + answer - 1 for prompt, answer in TEN)
    fewest = computed / FIXED
    lesson.check(
        f"{times[0]} and {times[1]}: {times[0] / times[1]:.1f} times as long. {computed} tokens are"
        f" computed; {FIXED} in each step would take {fewest:.1f}",
        fewest <= times[1] < times[0] / 1.5,
        times,
    )


# --- what the cache wastes ------------------------------------------------------------------------

BLOCK = 16
SEQUENCES = 16


def waste_of_batches(lengths: list[tuple[int, int]]) -> float:
    """Of a cache with a row for each sequence of a batch, as long as the batch's longest."""
    held = reserved = 0
    for first in range(0, len(lengths), SEQUENCES):
        batch = lengths[first : first + SEQUENCES]
        longest = max(answer for _, answer in batch)
        columns = max(prompt for prompt, _ in batch) + longest
        for time in range(longest):
            held += sum(prompt + min(time, answer) for prompt, answer in batch)
            reserved += len(batch) * columns
    return 1 - held / reserved


def waste_of_blocks(lengths: list[tuple[int, int]]) -> float:
    prompts = [[n] * prompt for n, (prompt, _) in enumerate(lengths)]
    scheduler = Scheduler(BlockPool(9999, BLOCK), SEQUENCES, budget=512)
    simulation = Simulation(prompts, [answer for _, answer in lengths], scheduler)
    held = reserved = 0
    while simulation.step():
        held += sum(sequence.computed for sequence in scheduler.running)
        reserved += BLOCK * sum(users > 0 for users in simulation.pool.users)
    return 1 - held / reserved


def waste(lesson: form.Lesson) -> None:
    lesson.predict(
        f"200 requests: prompts and answers of 16 to 256 tokens each, {SEQUENCES} at a time. Which"
        f" share of the cache holds nothing: a row of the longest for each, or blocks of {BLOCK}?",
        "share of rows; share of blocks",
    )
    rng = random.Random(0)
    lengths = [(rng.randint(16, 256), rng.randint(16, 256)) for _ in range(200)]
    shares = [waste_of_batches(lengths), waste_of_blocks(lengths)]
    lesson.check(
        f"rows {shares[0]:.1%}, blocks {shares[1]:.1%}: half a block a sequence, {BLOCK // 2} of"
        " some 200 tokens",
        shares[0] > 0.3 and shares[1] < 0.04,
        shares,
    )


NEW = 16

# --- a model --------------------------------------------------------------------------------------


class CheckedEngine(Engine):
    """Counts the steps after which the invariants of the blocks do not hold."""

    broken = 0

    def complete(self, *step) -> list[engine.Output]:
        outputs = super().complete(*step)
        try:
            self.pool.check([sequence.table for sequence in self.sequences.values()])
        except AssertionError:
            self.broken += 1
        return outputs


def a_model(lesson: form.Lesson) -> None:
    lesson.predict(
        "A Llama serves 8 prompts, blocks of 4: 7 begin with the same 8 tokens. How many tokens"
        " does the prefix cache save? With half the blocks, how many answers change?",
        "tokens; answers",
    )
    config = demo.tiny_config(num_layers=4, hidden_size=128, seq_length=64, llama=True)
    model = demo.meta_model(config)
    sharding.init(model, 0, "cpu", torch.float64)
    question = [20, 21, 22, 23]
    prompts = [[9] * 8 + question + [1]]
    prompts += [[*range(1, 9), *[30 + n] * n] for n in range(1, 7)]
    prompts.append([*range(1, 9), *question, 2])
    alone = [generate.generate(model, [prompt], NEW)[0] for prompt in prompts]
    for blocks, words in ((57, "blocks for all"), (25, "24 blocks")):
        served = CheckedEngine(model, max_sequences=8, block_size=4, num_blocks=blocks)
        answers = served.generate(prompts, NEW)
        served.close()
        changed = sum(a != b for a, b in zip(alone, answers))
        scheduler = served.scheduler
        lesson.check(
            f"{words}: {changed} of 8 answers are not those of generate.py; the prefix cache had"
            f" {scheduler.found} tokens; {scheduler.preemptions} preemptions; the invariants fail"
            f" after {served.broken} steps",
            changed == served.broken == 0,
            [scheduler.found] if blocks == 57 else [changed],
        )


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        by_hand(lesson)
        time_line(lesson)
        waste(lesson)
        a_model(lesson)
