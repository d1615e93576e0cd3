"""Bug hunts: a training run with one mechanism removed. Which one?

A silent bug of distributed training shows in few places: the loss of the first step, the losses
after it, the gradients of some layers, or ranks that no longer hold the same. Where it does *not*
show tells as much. Each hunt trains a small model in float64 on two ranks, with a bug of
course/mutations/ in it, beside one device. You name what is missing.

    python -m course.exercises.check hunt 1                    prints the symptoms, and asks
    python -m course.exercises.check hunt 1 --answer no-g      answers
"""

import textwrap
from typing import NamedTuple

from course import bug_runs, mutations
from course.exercises import bugs
from course.parity import Result, train


class Hunt(NamedTuple):
    # The removed mechanism: a name of mutations.bugs().
    bug: str
    # Plausible names; all of these bugs can happen under the same flags.
    others: tuple[str, ...]
    # How the symptoms lead to the answer.
    why: str
    # The file and the place.
    read: str

    @property
    def names(self) -> list[str]:
        return sorted((self.bug, *self.others))


HUNTS = {
    1: Hunt(
        "no-f",
        ("no-g", "clones", "no-vocabulary-sums"),
        "The first loss is right, so forward is whole: the weights are right, and g and the loss "
        "have their sums. Backward is wrong from the head on, and ranks differ in every norm that "
        "stands before a matrix cut by columns: each has its own part of the gradient.",
        "sequence_parallel.py, `start_all_reduce` in the backward of `_Linear`; exercise 2",
    ),
    2: Hunt(
        "clones",
        ("no-f", "no-g", "no-vocabulary-sums"),
        "The first loss is wrong already, but it is one that an untrained model has, ln 61 = 4.11, "
        "and no gradient differs between ranks: all sums are there. What is summed is wrong.",
        "sharding.py, `init`: a parameter is drawn whole, then sharded by rank",
    ),
    3: Hunt(
        "no-norm-gradient-sum",
        ("no-sum-in-g", "no-sum-in-g-bar", "positions-from-0"),
        "Only weights that stand outside of the tensor-parallel regions are wrong, and each rank "
        "has another gradient for them: each has seen its own slice of the sequence.",
        "sequence_parallel.py, `_CopyWeights` and `synchronise`",
    ),
    4: Hunt(
        "no-tied-sum",
        ("loss-divided-twice", "norm-of-one-stage", "targets-of-another-micro-batch"),
        "One tensor alone is wrong: the matrix that is the embedding on the first stage and the "
        "head on the last. Each stage has the gradient of its own use.",
        "pipeline_parallel.py, `sum_tied`",
    ),
    5: Hunt(
        "mean-of-means",
        ("no-gradient-sum", "no-accumulation", "same-samples-on-every-rank"),
        "Every gradient is a little wrong, and all ranks agree: the sum is there, and so are all "
        "samples, but they count with other weights. Ranks have unequal numbers of tokens.",
        "train.py, `forward_backward`: one count of tokens for the whole global batch",
    ),
    6: Hunt(
        "no-parameter-gather",
        ("no-reduce-scatter", "shard-of-another-rank", "norm-of-one-shard"),
        "The first loss, every gradient and so the first update are right. The second loss is "
        "wrong: the ranks do not compute with what they have updated.",
        "fsdp.py, `renew_parameters`; exercise 9",
    ),
}


# --- symptoms -------------------------------------------------------------------------------------


def row(numbers: list[float]) -> str:
    return "      ".join(f"{number:.12f}" for number in numbers)


def show(number: int, right: Result, run: Result) -> str:
    """What is seen of a run, beside one device."""
    found = HUNTS[number]
    bug = mutations.bugs()[found.bug]
    steps = range(1, len(run.losses) + 1)
    lines = [
        f"hunt {number}: {bugs.layout(bug, bug.flags)}; one mechanism is missing",
        "",
        "loss         " + "              ".join(f"step {step}" for step in steps),
        "  one device " + row(right.losses),
        "  this run   " + row(run.losses),
        "gradient norm",
        "  one device " + row(right.norms),
        "  this run   " + row(run.norms),
        "gradients of step 1, tensors of each layer, from the last layer to the first",
        *bugs.gradient_lines(bug_runs.wrong_gradients(run, right), right.gradients),
        "",
        "Which one is it?",
    ]
    for name in found.names:
        text = f"  {name:32}{mutations.bugs()[name].removes}"
        lines += textwrap.wrap(text, 100, subsequent_indent=" " * 34)
    return "\n".join(lines)


def symptoms(number: int) -> str:
    """Trains the run of a hunt, and one device beside it."""
    bug = mutations.bugs()[HUNTS[number].bug]
    right = train(1)
    run = train(bug.world, mutate=bug.apply, **bug.flags)
    return show(number, right, run)


HINT = (
    "Ask of each name: is the first loss right without it? Which gradients are? Do the ranks agree?"
)


def judge(number: int, answer: str) -> tuple[bool, str]:
    """Whether the answer is right, and what to read."""
    found = HUNTS[number]
    if answer == found.bug:
        return True, f"Right: {found.bug}. {found.why}\nRead {found.read}."
    if answer not in found.names:
        return False, f"{answer} is none of {', '.join(found.names)}."
    return False, f"No, not {answer}. {HINT}"
