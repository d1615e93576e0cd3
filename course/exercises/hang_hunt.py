"""Bug hunts whose runs crash or hang. Which line is wrong?

Each hunt trains a small model on two ranks, with a bug of tests/hangs.py in it. You see the end of
each rank's log: the watchdog's message or a traceback, and the last collectives that torch's flight
recorder has. You name the bug. docs/hangs.md says how to read such logs.

    python -m course.exercises.check hunt 7                            prints the logs, and asks
    python -m course.exercises.check hunt 7 --answer save-on-rank-0    answers
"""

import hang_runs
from hangs import HANGS

from course.exercises import hunt
from course.exercises.hunt import Hunt

HUNTS = {
    7: Hunt(
        "save-on-rank-0",
        ("other-order", "bad-sample", "sum-if-large"),
        "The ranks wait in different groups: rank 0 in the first collective of the group for "
        "checkpoints, rank 1 in a gradient sum of the next step. Rank 1 never came to the save.",
        "run/training_run.py, `save_is_due`: all ranks must decide alike",
    ),
    8: Hunt(
        "bad-sample",
        ("save-on-rank-0", "own-counts", "sum-if-large"),
        "Rank 0 fails in a collective, because its peer is gone: such an error is never the cause. "
        "The other log has an error that needs no second rank.",
        "data.py, `Corpus.batch`; gpt.py checks token ids, on a GPU it would be an assertion",
    ),
    9: Hunt(
        "sum-if-large",
        ("save-on-rank-0", "other-order", "no-wait"),
        "Both ranks have a collective with the same number in the same group, and not the same "
        "one: rank 0 sums one number, rank 1 already gathers parameters. Three steps went well, so "
        "what decides depends on data.",
        "optimizer.py, `global_norm`: all ranks must decide alike about a collective",
    ),
    10: Hunt(
        "other-order",
        ("own-counts", "bad-sample", "save-on-rank-0"),
        "More bytes come than the receiver expects. All collectives are there, each of a size that "
        "the model has, but rank 1 ends with the size that rank 0 waits for.",
        "fsdp.py, `reduce_in_order`: ranks reduce their layers in one order",
    ),
    11: Hunt(
        "own-counts",
        ("other-order", "sum-if-large", "bad-sample"),
        "More rows come in an all-to-all than a rank has room for. Its peer has room to spare, and "
        "fails later, in another line. Each keeps as many rows as it has sent: an all-to-all needs "
        "the numbers of the other rank.",
        "moe.py, `dispatch`: `plan.received`, which the ranks have told each other",
    ),
    12: Hunt(
        "sends-first",
        ("no-wait", "other-order", "own-counts"),
        "Each host waits in its first send until the other posts a receive, and both receives "
        "stand behind the sends. On gloo this run ends well: its sends wait for nobody.",
        "context_parallel.py, `Ring.start`: both messages as one operation",
    ),
    13: Hunt(
        "no-wait",
        ("sends-first", "bad-sample", "sum-if-large"),
        "Nothing hangs. But what a message brings was read before its `wait`, where the rules "
        "leave NaN, and at the end there are messages that nobody has waited for.",
        "context_parallel.py, `Ring.wait`",
    ),
}
HINT = (
    "Which rank ended, or stopped, first? What does the other one wait for? Compare the "
    "collectives of the ranks by group and number."
)


def symptoms(number: int) -> str:
    """Runs the command of a hunt, and shows what each rank has printed."""
    found = HUNTS[number]
    hang = HANGS[found.bug]
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in hang.flags.items())
    backend = "NCCL's rules on CPUs" if hang.by_rules else "gloo"
    lines = [
        f"hunt {number}: 2 ranks, {backend}, train.py {words}".rstrip() + "; one line is wrong",
        "",
        hang_runs.show(hang_runs.run_hang(found.bug)),
        "",
        "Which one is it?",
    ]
    return "\n".join(lines + hunt.choices(found, {name: HANGS[name].wrong for name in HANGS}))


def judge(number: int, answer: str) -> tuple[bool, str]:
    """Whether the answer is right, and what to read."""
    return hunt.verdict(HUNTS[number], answer, HINT)
