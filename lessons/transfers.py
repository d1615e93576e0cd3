"""The lesson of pipelines/transfers.py: programs of sends and receives, run in the model of NCCL.

python -m pipelines.transfers
"""

import schedules
from lessons import form
from pipelines import transfers
from pipelines.transfers import Program, Transfer
from schedules import Action

# name -> v, each on P ranks with M micro-batches
SCHEDULES = {name: 2 if name == "interleaved" else 1 for name in schedules.NAMES}
P, M = 4, 8


def is_receive(entry: Action | Transfer) -> bool:
    return isinstance(entry, Transfer) and entry.op == "receive"


def is_settle(entry: Action | Transfer) -> bool:
    return isinstance(entry, Transfer) and entry.op == "settle"


def no_receive(programs: list[Program]) -> list[Program]:
    """Rank 1 never posts its first receive."""
    programs[1].remove(next(filter(is_receive, programs[1])))
    return programs


def no_order(programs: list[Program]) -> list[Program]:
    """Rank 1 posts its first two receives of activations in the reverse order."""
    program = programs[1]
    first, second = [
        i for i, entry in enumerate(program) if is_receive(entry) and entry.kind == "F"
    ][:2]
    program[first], program[second] = program[second], program[first]
    return programs


def no_settle(programs: list[Program]) -> list[Program]:
    """Sends are settled at the end of the step."""
    return [sorted(program, key=is_settle) for program in programs]


# functions of all ranks' programs
WITHOUT = {"receive": no_receive, "order": no_order, "settle": no_settle}
# name -> why checks fail without it
WHY = {
    "receive": (
        "Messages have no names: the first send meets the first receive. F0 meets the receive"
        " that was posted for F1. The last check counts sends alone, so it holds."
    ),
    "order": (
        "That of F1: messages have no names, and the first send meets the first receive. The"
        " model stops here. NCCL may hang, or give F0's numbers out as F1, for both have one"
        " shape. Counts hold."
    ),
    "settle": (
        "The tensors that are kept. Each send keeps its own until the end of the step, and a"
        " rank in the middle has 2 m sends: 16 with m 8, 128 with m 64."
    ),
}


def make_programs(lesson: form.Lesson, name: str, p: int, m: int) -> list[Program]:
    v = SCHEDULES[name]
    programs = transfers.lower(schedules.make(name, p, m, v), v)
    return lesson.mutate(programs) if lesson.mutate else programs


def count(programs: list[Program], op: str) -> int:
    """How many entries of all ranks are `op`."""
    entries = [entry for program in programs for entry in program]
    return sum(isinstance(entry, Transfer) and entry.op == op for entry in entries)


def most_unsettled(program: Program) -> int:
    """The most sends at a time that are not settled: their tensors are kept."""
    unsettled = 0
    most = 0
    for entry in program:
        if isinstance(entry, Transfer):
            unsettled += {"send": 1, "settle": -1, "receive": 0}[entry.op]
            most = max(most, unsettled)
    return most


def short(entry: Action | Transfer) -> str:
    """F0; send F0, where F0 is the activation of micro-batch 0."""
    if isinstance(entry, Action):
        return f"{entry.op}{entry.micro_batch}"
    return f"{entry.op} {entry.kind}{entry.micro_batch}"


def break_each(lesson: form.Lesson) -> None:
    lesson.break_it(
        "receive",
        "Rank 1 lacks one entry. Why is it the next message that does not match?",
        WHY["receive"],
    )
    lesson.break_it("order", "Every message has its receive. Which one does F0 meet?", WHY["order"])
    lesson.break_it("settle", "Every program runs to its end. What grows with m?", WHY["settle"])


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        "1F1B, p 2, m 2. Rank 0 sends F0 and keeps the tensor until rank 1 has it. Which message"
        " shows that, so that rank 0 need not wait?"
    )
    programs = make_programs(lesson, "1f1b", 2, 2)
    for rank, program in enumerate(programs):
        lesson.draw(f"  rank {rank}  " + "; ".join(map(short, program)))
    words = list(map(short, programs[0]))
    before = words[words.index("settle F0") - 1]
    lesson.check(
        f"B0: rank 1 computes it after F0. Rank 0 settles F0 behind {before}, which needs B0",
        before == "B0",
    )

    lesson.predict(
        f"p {P}, m {M}: how many messages has a step of 1F1B? Of interleaved 1F1B with v 2?"
    )
    for name in ("1f1b", "interleaved"):
        v = SCHEDULES[name]
        programs = make_programs(lesson, name, P, M)
        sends, receives = count(programs, "send"), count(programs, "receive")
        formula = 2 * M * (P * v - 1)
        lesson.check(
            f"{name}: {sends} sends, {receives} receives; 2 m (p v - 1) = {formula}",
            sends == receives == formula,
        )

    lesson.predict("Do the programs of all ranks run to their end in a model of NCCL?")
    stuck = {
        name: transfers.deadlock(make_programs(lesson, name, P, M), v)
        for name, v in SCHEDULES.items()
    }
    reasons = [f"{name}: {reason}" for name, reason in stuck.items() if reason]
    lesson.check(
        reasons[0][:300] if reasons else f"{', '.join(stuck)}: nothing is stuck", not reasons
    )

    lesson.predict(
        "1F1B, p 4: of how many messages does a rank keep the tensor at a time, at most? With m 8,"
        " and with m 64?"
    )
    most = [max(map(most_unsettled, make_programs(lesson, "1f1b", P, m))) for m in (M, 8 * M)]
    lesson.check(f"{most[0]} and {most[1]}: p, on rank 0. It does not grow with m", most == [P, P])
    break_each(lesson)
