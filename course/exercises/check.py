"""Grades your answers to the exercises.

    python -m course.exercises.check          all of them, one line each
    python -m course.exercises.check 2        one, with what differs and why
    python -m course.exercises.check 2 --hint one hint more at each call; --hint 1 the first again
    python -m course.exercises.check hunt 1   a training run with a silent bug: which one? (hunt.py)

    correct    equal to the project's own function: 1e-10 in float64, data exactly
    par        as many collectives, as many bytes, as much memory as in the paper

You edit course/exercises/01_shards.py and so on: each says what to write and what to read before.
course/exercises/README.md lists them. The exit status is 0 where all that were asked for are
correct and reach par.

    --hint [K]           of one exercise: the next hint, or the K-th (hints.py)
    --solutions DIR      grade the files of that folder instead
    --answer NAME        of a hunt; without it the symptoms are shown first
"""

import argparse
import os
import re
import sys
import tempfile
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from base import terminal
from course import ranks
from course.exercises import cuda_grader, hints
from course.exercises.graders import EXERCISES
from course.exercises.grading import Grade, Watch, grade_on_rank

FOLDER = Path(__file__).resolve().parent


class Answer(NamedTuple):
    """A file to grade. path: absolute."""

    number: int
    path: str


# The time limit of an answer.
SECONDS = 10

# --- on the ranks ---------------------------------------------------------------------------------

# Where ranks end differently, the first of these is shown.
ENDS = ("crash", "disagreement", "wrong", "peer failed", "right")


def grade_on_ranks(
    rank: int, answers: list[Answer], folder: str, seconds: int
) -> list[tuple[str, Grade]]:
    """(one of ENDS, the grade) of each answer, on this rank."""
    world = dist.get_world_size()
    store = dist.FileStore(os.path.join(folder, "announcements"), world)
    store.set_timeout(timedelta(seconds=2 * seconds))
    found = []
    for i, answer in enumerate(answers):
        watch = Watch(rank, world, store, str(i), answer.path)
        found.append(grade_on_rank(EXERCISES[answer.number], watch, seconds))
    return found


def grade(answers: list[Answer], seconds: int = SECONDS) -> list[Grade]:
    """Grade answers one after the other, on ranks that start once. All need as many ranks."""
    (world,) = {EXERCISES[answer.number].ranks for answer in answers}
    problem = cuda_grader.build([a.path for a in answers if a.path.endswith(".cu")])
    if problem:
        return [Grade(False, problem)] * len(answers)
    limit = (2 * seconds + 5) * len(answers)
    with tempfile.TemporaryDirectory() as folder:
        try:
            of_ranks = ranks.run(
                grade_on_ranks, world, answers, folder, seconds, timeout=2 * seconds, limit=limit
            )
        except RuntimeError as error:
            # A rank was killed.
            message = str(error).strip().split("\n")[-1]
            if re.search("exit code -(7|11)$", message):
                message += ": a wrong address. Is every index inside of the tensors?"
            return [Grade(False, message)] * len(answers)
    worst = [min(ends, key=lambda end: ENDS.index(end[0])) for ends in zip(*of_ranks)]
    return [found for _, found in worst]


# --- on the screen --------------------------------------------------------------------------------


def title(number: int) -> str:
    """01 shards"""
    return Path(EXERCISES[number].file).stem.replace("_", " ")


def line(number: int, found: Grade) -> str:
    """One line for one exercise."""
    correct = "yes" if found.correct else "no"
    words = found.par.count if found.correct else found.why
    # Only the first clause: check.py NUMBER says the rest.
    words = re.split(r"[;.] |\n", words)[0]
    par = "yes" if found.par and found.par.reached else "no"
    text = f"{title(number):22} correct {correct:4} par {par if found.par else '-':4} {words}"
    return text if len(text) <= 100 else text[:97] + "..."


def report(number: int, found: Grade) -> str:
    """All that there is to say about one exercise."""
    lines = [f"exercise {title(number)}   (course/exercises/{EXERCISES[number].file})"]
    lines.append(labelled("correct", found.correct, found.why))
    if found.par:
        lines.append(labelled("par", found.par.reached, found.par.count))
    return "\n".join(lines)


def labelled(label: str, yes: bool, text: str) -> str:
    """`correct: no   ...`, folded to 100 columns."""
    start = f"  {label + ':':9}{'yes' if yes else 'no':5}"
    folded = []
    for part in text.split("\n"):
        folded += textwrap.wrap(part, 100 - len(start)) or [""]
    return start + ("\n" + " " * len(start)).join(folded)


def grade_exercises(numbers: list[int], folder: Path) -> bool:
    """Prints a line for each, or a report of a single one. Whether all are correct and on par."""
    ranks.preload("course.exercises.graders")
    good = 0
    for number in numbers:
        path = (folder / EXERCISES[number].file).resolve()
        found = Grade(False, f"there is no file {path}")
        if path.exists():
            (found,) = grade([Answer(number, str(path))])
        print((report if len(numbers) == 1 else line)(number, found), flush=True)
        good += found.correct and found.par.reached
    if len(numbers) > 1:
        print(f"{good} of {len(numbers)} done; python -m course.exercises.check NUMBER says more")
    return good == len(numbers)


def hunt_bug(number: int, answer: str | None) -> bool:
    """Prints the symptoms, unless an answer is given, and judges it. Whether it is right."""
    # It imports train.py, which no exercise needs.
    from course.exercises import hunt

    if number not in hunt.HUNTS:
        terminal.refuse(f"hunt {number}: the hunts are 1 to {max(hunt.HUNTS)}")
    if answer is None:
        ranks.preload("train")
        print(hunt.symptoms(number), flush=True)
        if not sys.stdin.isatty():
            print(f"python -m course.exercises.check hunt {number} --answer NAME")
            return True
        answer = asked(hunt.HUNTS[number].names)
    right, text = hunt.judge(number, answer.strip().lower())
    print("\n".join(textwrap.fill(part, 100) for part in text.split("\n")))
    return right


def asked(names) -> str:
    """One of the names; "none" at the end of input."""
    try:
        while (answer := input("your answer: ").strip().lower()) not in names:
            print(f"one of {', '.join(names)}")
    except EOFError:
        print()
        return "none"
    except KeyboardInterrupt:
        print()
        raise
    return answer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", metavar="NUMBER | hunt")
    parser.add_argument("hunt", nargs="?", type=int, metavar="NUMBER of a hunt")
    parser.add_argument("--solutions", type=Path, default=FOLDER, metavar="DIR")
    parser.add_argument("--answer", metavar="NAME")
    parser.add_argument("--hint", nargs="?", type=int, const=True, metavar="K")
    args = parser.parse_args(argv)
    number = int(args.what) if args.what and args.what.isdecimal() else 0
    if args.hint is not None and number not in EXERCISES:
        parser.error(f"--hint: of which exercise, 1 to {len(EXERCISES)}? check.py NUMBER --hint")
    if args.what == "hunt":
        sys.exit(not hunt_bug(1 if args.hunt is None else args.hunt, args.answer))
    if args.hunt is not None:
        parser.error(f"{args.what} {args.hunt}: one exercise, or none for all")
    if args.what is None:
        sys.exit(not grade_exercises(list(EXERCISES), args.solutions))
    if number not in EXERCISES:
        parser.error(f"{args.what}: the exercises are 1 to {len(EXERCISES)}, and hunt")
    if args.hint is not None:
        # Without a number it is True.
        hint = hints.next_hint(number, args.solutions) if args.hint is True else args.hint
        if not 1 <= hint <= hints.count(number):
            parser.error(f"--hint {hint}: exercise {number} has hints 1 to {hints.count(number)}")
        print(hints.show(number, hint, args.solutions))
        return
    sys.exit(not grade_exercises([number], args.solutions))


if __name__ == "__main__":
    terminal.run(main)
