"""The form of every lesson: PREDICT, CHECK, BREAK IT.

`python tensor_parallel.py` asks a question with numbers, measures, and puts the measurement beside
the formula:

    PREDICT  All-reduces in one layer, forward and backward? Bytes each?
    CHECK    forward 2, backward 2, each b s h 8 = 131,072 bytes                                  ok
    BREAK IT python tensor_parallel.py --without f      same first loss, wrong gradients. Why?

`--quiz` waits for your answer after each question. `--without NAME` removes one mechanism: checks
that needed it fail. The exit status is 1 where a check fails.

A lesson is a function of a `Lesson`, in the file of its name; `main` runs it, then asks of what
can be removed:

    WITHOUT = {
        "f": form.Removal(
            bugs.no_f,
            "Same first loss, wrong gradients. Why?",
            "Each rank has a part of ∂L/∂X.",
        ),
    }

    def teach(lesson: form.Lesson) -> None:
        lesson.predict("All-reduces in one layer?")
        calls = lesson.on_ranks(2, calls_of_a_layer)[0]
        lesson.check(f"forward {len(calls)}", len(calls) == 2)
"""

import argparse
import importlib
import os
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from proof import ranks

WIDTH = 100
# "PREDICT  "
MARGIN = 9


class Removal(NamedTuple):
    """A mechanism that --without can remove."""

    # `removed` calls it: it changes this project for good, or returns a context that ends. A lesson
    # that does not enter `removed` reads it as it is.
    mutate: Any
    # what BREAK IT asks, and the answer, printed where it is removed
    question: str
    why: str


def removed(mutate: Callable | None) -> AbstractContextManager:
    """A context without the mechanism that `mutate` removes; None removes nothing."""
    context = mutate() if mutate else None
    return context or nullcontext()


def on_rank(rank: int, mutate: Callable | None, function: Callable, args: tuple):
    with removed(mutate):
        return function(rank, *args)


class Lesson:
    """What a lesson prints, and how many of its checks failed."""

    def __init__(self, command: str, quiz: bool = False, without: str = "", mutate=None):
        """command: tensor_parallel.py. without: the name of what is removed, by `mutate`."""
        self.command = command
        self.quiz = quiz
        self.without = without
        # of the Removal of that name; None: nothing is removed
        self.mutate = mutate
        self.questions = 0
        self.checks = 0
        self.failed = 0

    def removed(self) -> AbstractContextManager:
        """A context in which the mechanism is removed from this process."""
        return removed(self.mutate)

    def on_ranks(self, world: int, function: Callable, *args) -> list:
        """function(rank, *args) on `world` ranks, each without the mechanism: see `ranks.run`."""
        return ranks.run(on_rank, world, self.mutate, function, args)

    def say(self, text: str = "") -> None:
        """A line as it is, below the others: for tables, bars and time lines."""
        print(" " * MARGIN + text if text else "", flush=True)

    def draw(self, picture: str) -> None:
        """Lines as they are, from the left edge."""
        print(picture, flush=True)

    def _paragraph(self, label: str, text: str, width: int = WIDTH) -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=label.ljust(MARGIN), subsequent_indent=" " * MARGIN
        )

    def predict(self, question: str) -> None:
        """Ask. With --quiz, wait for a line from the reader."""
        if self.questions:
            print()
        self.questions += 1
        print("\n".join(self._paragraph("PREDICT", question)), flush=True)
        if self.quiz:
            try:
                input(" " * MARGIN + "your answer: ")
            except EOFError:
                print(flush=True)

    def check(self, text: str, holds: bool) -> None:
        """The measurement beside the formula, and whether they agree."""
        self.checks += 1
        self.failed += not holds
        verdict = "ok" if holds else "WRONG"
        *lines, last = self._paragraph("CHECK", text, WIDTH - 7)
        print("\n".join([*lines, last.ljust(WIDTH - 5) + verdict.rjust(5)]), flush=True)

    def break_it(self, name: str, question: str, why: str) -> None:
        """Name a flag that removes one mechanism, and ask what it does; where it is removed, say
        why."""
        if not self.without:
            command = f"python {self.command} --without {name}"
            print("\n".join(self._paragraph("BREAK IT", f"{command}   {question}")), flush=True)
        elif self.without == name:
            print("\n".join(self._paragraph("WHY", why)), flush=True)

    def verdict(self) -> int:
        """Says how the checks went. Returns the exit status."""
        if not self.failed:
            outcome = f"All {self.checks} checks hold."
            if self.without:
                outcome += f" None of them needs {self.without}."
        else:
            without = f" without {self.without}" if self.without else ""
            outcome = f"{self.failed} of {self.checks} checks fail{without}."
        print(outcome, flush=True)
        return 1 if self.failed else 0


def has_no_keyboard() -> bool:
    """Whether this is `!python FILE` in a notebook: its terminal never sends a line. (`%run` asks
    in a box below the cell.)"""
    return "JPY_PARENT_PID" in os.environ and os.isatty(0)


def main(name: str, argv: list[str] | None = None) -> int:
    """Run the lesson of a module (of tuning.packing: lessons/packing.py). Returns its status."""
    folder, _, file = name.rpartition(".")
    module = importlib.import_module(f"lessons.{file}")
    removals = module.WITHOUT
    command = f"-m {name}" if folder else f"{name}.py"
    parser = argparse.ArgumentParser(
        prog=f"python {command}", description="A lesson: predict, check, break it."
    )
    parser.add_argument("--quiz", action="store_true", help="wait for an answer to each question")
    parser.add_argument(
        "--without", choices=list(removals), default="", help="remove one mechanism"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    ranks.fork_this_process()
    mutate = removals[args.without].mutate if args.without else None
    if args.quiz and has_no_keyboard():
        print("A cell has no keyboard, so no question waits. docs/course.ipynb asks one by one.\n")
        args.quiz = False
    lesson = Lesson(command, args.quiz, args.without, mutate)
    module.teach(lesson)
    for mechanism, removal in removals.items():
        lesson.break_it(mechanism, removal.question, removal.why)
    return lesson.verdict()


# --- pictures in text -----------------------------------------------------------------------------


def bar(value: float, largest: float, width: int = 40) -> str:
    """A bar of text: `largest` is `width` characters long."""
    return "█" * round(width * value / largest) if largest else ""
