"""The lesson of rollout.py: two ranks write answers, equal to those of one, and train on them."""

from typing import NamedTuple

import torch.distributed as dist

from base.groups import Groups
from course import demo, form
from finetune.answer_rows import Answer, Rows
from gpt import Context
from inference import rollout

V, S = 16, 32
# The token that ends an answer.
END = 0
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11, 12], [1, 2, 3]]
MAX_TOKENS = 12

# --- what --without removes: each is called on every rank -----------------------------------------

WITHOUT = form.Removals()


@WITHOUT.replace(
    "sample", rollout, "keys", "Numbers of (seed, step, place in the share). What changes?"
)
def place_in_share(seed, step, samples, original=rollout.keys):
    """The three answers of rank 1: its first one gets the random numbers of rank 0's first one. So
    another number of ranks gives other answers, and no run can be compared with one device."""
    return original(seed, step, range(len(samples)))


@WITHOUT.replace("position", rollout, "tokens_of", "They are one position late. Does a run stop?")
def one_position_late(*args, original=rollout.tokens_of):
    """No. π / π_old is not 1 before an update, as it must be, so PPO clips it where nothing has
    changed. The loss looks like any other."""
    return [(ids, log_probs[1:] + log_probs[:1]) for ids, log_probs in original(*args)]


@WITHOUT.replace("end-token", Rows, "__init__", "End tokens do not count. What is not learned?")
def cut_end_token(rows, answers: list[Answer], *sizes, original=Rows.__init__):
    """When to stop. It is a choice of the model as well; without this target no reward reaches
    it."""
    original(rows, answers, *sizes)
    for answer, place in zip(answers, rows.places):
        if answer.ended:
            rows.all.loss_mask[place.row, place.last - 1] = False


@WITHOUT.replace("step", rollout, "key_of", "Numbers of (seed, sample) alone. How many now?")
def no_step(seed, step, sample, original=rollout.key_of):
    """All, as long as the weights are the same. Each step draws with the same random numbers, so
    the model tries little that is new."""
    return original(seed, 0, sample)


# --- on a rank ------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a rank has after two rollouts; every rank has the same."""

    answers: list[Answer]
    # The next step's answers, with the same weights and prompts.
    of_next_step: list[Answer]
    # Log-probabilities of each answer, by a training forward over the rows.
    trained: list[list[float]]
    num_rows: int
    targets: int


def on_rank(rank: int) -> Seen:
    world = dist.get_world_size()
    groups = Groups.make("cpu", world) if world > 1 else Groups()
    model = demo.make_model(demo.tiny_config(seq_length=S, vocab_size=V, llama=True))
    samples = list(range(len(PROMPTS)))
    steps = [
        rollout.write_answers(model, PROMPTS, samples, 0, step, MAX_TOKENS, (END,), groups)
        for step in (1, 2)
    ]
    rows = Rows(steps[0], S)
    every_row = range(rows.num_sequences)
    batch = rows.batch(every_row)
    losses = model(batch.tokens, batch.targets, Context(documents=batch.documents))  # [R, s]
    trained = [values.tolist() for values in rows.collect(-losses.detach())]
    return Seen(*steps, trained, rows.num_sequences, rows.counted_tokens(every_row))


# --- the lesson -----------------------------------------------------------------------------------


def teach(lesson: form.Lesson) -> None:
    one, two = (lesson.on_ranks(world, on_rank)[0] for world in (1, 2))
    for answer in one.answers:
        end = "the end token" if answer.ended else "cut off"
        lesson.say(f"{answer.prompt!s:<14} -> {' '.join(map(str, answer.ids))}   {end}")
    teach_ranks(lesson, one, two)
    teach_log_probs(lesson, two)
    teach_targets(lesson, two)
    lesson.predict(
        "The next step, with the same weights and prompts: how many answers are equal?",
        "equal answers",
    )
    equal = count_equal(two.answers, two.of_next_step)
    lesson.check(
        f"{equal} of {len(PROMPTS)}: a step has random numbers of its own", equal == 0, [equal]
    )


def count_equal(a: list[Answer], b: list[Answer]) -> int:
    return sum(x.ids == y.ids for x, y in zip(a, b))


def teach_ranks(lesson: form.Lesson, one: Seen, two: Seen) -> None:
    lesson.predict(
        f"One rank wrote these {len(PROMPTS)} answers. Two data-parallel ranks write three each,"
        " drawn at temperature 1. How many are the same? Are those to the two equal prompts?",
        "equal answers",
    )
    equal = count_equal(one.answers, two.answers)
    twins = two.answers[0].ids == two.answers[-1].ids
    lesson.check(
        f"{equal} of {len(PROMPTS)}, for the random numbers depend on (seed, step, sample) alone;"
        f" equal prompts have {'equal' if twins else 'different'} answers",
        equal == len(PROMPTS) and not twins,
        [equal],
    )


def teach_log_probs(lesson: form.Lesson, two: Seen) -> None:
    lesson.predict(
        f"A training forward reads the {len(PROMPTS)} answers in {two.num_rows} packed rows, in"
        " float64. How far are its log-probabilities from those of generation, which had a cache?"
    )
    pairs = [
        (drawn, trained)
        for answer, of_answer in zip(two.answers, two.trained)
        for drawn, trained in zip(answer.log_probs, of_answer)
    ]
    worst = max(abs(drawn - trained) for drawn, trained in pairs)
    lesson.check(
        f"{worst:.0e} at most, over {len(pairs)} tokens: so π / π_old is 1 before an update",
        worst < 1e-10,
    )


def teach_targets(lesson: form.Lesson, two: Seen) -> None:
    written = sum(len(answer.ids) for answer in two.answers)
    ended = sum(answer.ended for answer in two.answers)
    lesson.predict(
        f"The model drew {written} tokens, {ended} of them end tokens. How many targets are in the"
        " loss?",
        "targets",
    )
    lesson.check(
        f"{two.targets}, where {written} were drawn: each choice of the model is one, to stop too",
        two.targets == written,
        [two.targets],
    )


if __name__ == "__main__":
    form.run("rollout")
