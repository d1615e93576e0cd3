"""The lesson of inference/scheduler.py: blocks by hand, a time line, a model that answers."""

import itertools
from collections.abc import Iterator

import generate
from course import demo, form
from inference import engine, scheduler
from inference.paged_attention import Decodes
from inference.requests import Request
from inference.scheduler import BlockPool, PagedSequence, Scheduler, Step

WITHOUT = form.Removals()


@WITHOUT.replace("users", BlockPool, "share", "A shared block counts one user. Who is hurt?")
def share_as_one(self, block: int) -> None:
    """Whoever shares it still. The first to write makes no copy, and the first to leave frees it: a
    new sequence writes there. In a large cache the block is not taken soon, and all answers are
    right; BlockPool.check, which the tests call after each step, is not fooled."""
    self.free.pop(block, None)
    self.users[block] = 1


@WITHOUT.replace("parent", scheduler, "hash_of", "A hash of the block's own tokens. What is found?")
def without_parent(parent: bytes, tokens: list[int], original=scheduler.hash_of) -> bytes:
    """Keys and values of equal tokens that follow other tokens: the last prompt finds its question
    in the first, which begins otherwise. The tables are in order: no invariant fails."""
    return original(b"", tokens)


@WITHOUT.replace("mask", Decodes, "__init__", "Sequences swap masks. Who sees what?")
def mask_of_another(self, *args, original=Decodes.__init__) -> None:
    """Under a longer one's mask a sequence looks at places that it has not filled, under a shorter
    one's not at its newest tokens. With equal lengths, no error shows."""
    original(self, *args)
    if self.mask is not None:
        self.mask = self.mask.roll(1, dims=0)


@WITHOUT.replace(
    "request", engine, "sample", "Random numbers of the row in the step. What do answers depend on?"
)
def sample_by_place(logits, keys, positions, params, original=engine.sample):
    """The place in the step depends on who else is served, and so does the answer. After a
    preemption a text goes on as another one."""
    return original(logits, list(range(len(keys))), positions, params)


# --- steps without a model ------------------------------------------------------------------------


def steps(scheduler: Scheduler, requests: list[Request]) -> Iterator[Step]:
    """All steps. Each token that is drawn is the number of its request."""
    sequences = [PagedSequence(n, request) for n, request in enumerate(requests)]
    scheduler.waiting.extend(sequences)
    while step := scheduler.schedule():
        for piece in step.pieces:
            sequence = sequences[piece.number]
            sequence.in_flight = False
            if piece.next is None:
                sequence.ids.append(piece.number)
            if len(sequence.ids) == len(sequence.request.prompt) + sequence.request.max_tokens:
                scheduler.remove(sequence)
        yield step


def by_hand(lesson: form.Lesson) -> None:
    lesson.predict(
        "Blocks of 4 tokens. The prompts 1 2 3 4 5 6, 1 2 3 4 8 9 and again 1 2 3 4 5 6 begin in"
        " one step. How many blocks do they use together? How many tokens does the step compute? In"
        " the next step each writes its new token: how many blocks are copied?",
        "blocks; tokens; copies",
    )
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8, 9], [1, 2, 3, 4, 5, 6]]
    requests = [Request(prompt, 9) for prompt in prompts]
    two_steps = list(itertools.islice(steps(Scheduler(BlockPool(9, 4), 4, 32), requests), 2))
    for step in two_steps:
        tables = " ".join(str(piece.table) for piece in step.pieces)
        lesson.say(f"{step!s:<62} blocks {tables}")
    tokens = sum(len(piece.tokens) for piece in two_steps[0].pieces)
    blocks = len({block for piece in two_steps[0].pieces for block in piece.table})
    copies = two_steps[1].copies
    lesson.check(
        f"{blocks} blocks; 6 + 2 + 1 = {tokens} tokens: the last one of a prompt always runs."
        f" Copied on write, (from, to): {copies}",
        (blocks, tokens, copies) == (3, 9, [(2, 4)]),
        [blocks, tokens, len(copies)],
    )


# --- ten requests ---------------------------------------------------------------------------------

# Tokens of each prompt and answer.
TEN = [(4, 3), (12, 14), (2, 2), (6, 9), (8, 2), (3, 12), (5, 4), (10, 3), (8, 8), (4, 2)]
# A step with fewer tokens takes as long: the weights are read in any case.
FIXED = 8


def static_rows() -> list[str]:
    """Batches in which all wait for the longest; prompts are filled up to it."""
    rows = []
    start = 0
    for first in range(0, len(TEN), 4):
        batch = TEN[first : first + 4]
        longest = max(answer for _, answer in batch)
        prefill = max(FIXED, len(batch) * max(prompt for prompt, _ in batch)) // FIXED
        for _, answer in batch:
            decodes = "█" * (answer - 1) + "·" * (longest - answer)
            rows.append(" " * start + "░" * prefill + decodes)
        start += prefill + longest - 1
    return rows


def continuous_rows() -> list[str]:
    rows = [""] * len(TEN)
    scheduler = Scheduler(BlockPool(99, 4), 4, FIXED)
    # No two prompts begin alike.
    requests = [Request([n] * prompt, answer) for n, (prompt, answer) in enumerate(TEN)]
    for time, step in enumerate(steps(scheduler, requests)):
        for piece in step.pieces:
            mark = "░" if piece.start < TEN[piece.number][0] else "█"
            rows[piece.number] = rows[piece.number].ljust(time) + mark
    return rows


def time_line(lesson: form.Lesson) -> None:
    lengths = ", ".join(f"{prompt} + {answer}" for prompt, answer in TEN)
    lesson.predict(
        f"Ten requests (prompt + answer): {lengths}. 4 run at a time. A step of up to {FIXED}"
        f" tokens takes 1, one of n tokens n / {FIXED}. How long do padded batches of 4 take? And"
        f" continuous ones, at most {FIXED} tokens a step?",
        "batches; continuous",
    )
    static, continuous = static_rows(), continuous_rows()
    times = [max(map(len, rows)) for rows in (static, continuous)]
    lesson.draw(f"  {'░ prompt  █ decodes  · waits for its batch':<{times[0] + 3}}continuous")
    for n, (left, right) in enumerate(zip(static, continuous)):
        lesson.draw(f"{n} {left:<{times[0] + 3}}{right}")
    fewest = sum(prompt + answer - 1 for prompt, answer in TEN) / FIXED
    lesson.check(
        f"{times[0]} and {times[1]}: {times[0] / times[1]:.1f} times as long; full steps would take"
        f" {fewest:.1f}",
        fewest <= times[1] < times[0] / 1.5,
        times,
    )


# --- a model --------------------------------------------------------------------------------------


def a_model(lesson: form.Lesson) -> None:
    lesson.predict(
        "A Llama gets 8 prompts, in blocks of 4: 7 begin with the same 8 tokens. How many does the"
        " prefix cache save? If blocks run out and some are preempted, how many answers change?",
        "saved; changed",
    )
    config = demo.tiny_config(num_layers=4, hidden_size=128, seq_length=64, llama=True)
    model = demo.make_model(config)
    question = [20, 21, 22, 23]
    prompts = [[9] * 8 + question + [1]]
    prompts += [[*range(1, 9), *[30 + n] * n] for n in range(1, 7)]
    prompts.append([*range(1, 9), *question, 2])
    alone = [generate.generate(model, [prompt], 16)[0] for prompt in prompts]
    for blocks in (56, 24):
        served = engine.Engine(model, max_sequences=8, block_size=4, num_blocks=blocks + 1)
        answers = served.generate(prompts, 16)
        served.close()
        changed = sum(a != b for a, b in zip(alone, answers))
        saved, preemptions = served.scheduler.found, served.scheduler.preemptions
        lesson.check(
            f"{blocks} blocks: {saved} tokens saved, {preemptions} preemptions; {8 - changed} of 8"
            " answers are those of generate.py",
            changed == 0,
            [changed] if preemptions else [saved],
        )


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        by_hand(lesson)
        time_line(lesson)
        a_model(lesson)


if __name__ == "__main__":
    form.run("serve")
