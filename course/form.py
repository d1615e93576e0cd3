"""The form of every lesson: PREDICT, CHECK, BREAK IT.

`python -m course.tensor_parallel` asks a question with numbers, measures, and puts the measurement
beside the formula:

    PREDICT  All-reduces in one layer, forward and backward? Bytes each?
    CHECK    forward 2, backward 2, each b s h 8 = 131,072 bytes                                  ok
    BREAK IT --without f    same first loss, wrong gradients. Why?

`--quiz` asks you for the numbers, and says how far off you were (quiz.py). `--without NAME` removes
one mechanism: checks that needed it fail, and WHY is said. `--why` says it without a run. The exit
status is 1 where a check fails.

A lesson is a function of a `Lesson`, in the file of its name; `main` runs it, then asks of what
can be removed. A removal is a mutation of course/mutations, or a function of the lesson:

    WITHOUT = form.Removals()
    WITHOUT["f"] = form.Removal(bugs.no_f, "Wrong gradients. Why?", "Each rank has a part.")

    @WITHOUT.replace("scale", float8, "scale_of", "Which numbers are lost?")
    def scale_of_1(amax, to, power_of_two):
        "What is far from 1: the docstring is WHY."
        return torch.ones(())

    def teach(lesson: form.Lesson) -> None:
        lesson.predict("All-reduces in the forward of one layer?", "all-reduces")
        calls = lesson.on_ranks(2, calls_of_a_layer)[0]
        lesson.check(f"forward {len(calls)}", len(calls) == 2, [len(calls)])
"""

import argparse
import importlib
import os
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from base import terminal
from course import ranks
from course.quiz import MARGIN, Quiz

WIDTH = 100


class Removal(NamedTuple):
    """A mechanism that --without can remove."""

    # `removed` calls it: it changes this project for good, or returns a context that ends. A lesson
    # that does not enter `removed` reads it as it is.
    mutate: Any
    # The question of BREAK IT, and the answer, printed where it is removed.
    question: str
    why: str


class Removals(dict[str, Removal]):
    """Name -> removal. A function that is added has WHY as its docstring."""

    def add(self, name: str, question: str) -> Callable:
        """A function that removes the mechanism."""

        def enter(mutate: Callable) -> Callable:
            self[name] = Removal(mutate, question, why_of(mutate))
            return mutate

        return enter

    def replace(self, name: str, owner: Any, attribute: str, question: str) -> Callable:
        """A function that takes the place of another. owner: a class, a module or its name."""
        path = owner if isinstance(owner, str) else owner.__name__
        if isinstance(owner, type):
            path = f"{owner.__module__}.{owner.__qualname__}"

        def enter(function: Callable) -> Callable:
            # It is patched by name, so that it can be sent to ranks.
            patch = partial(mock.patch, f"{path}.{attribute}", function)
            self[name] = Removal(patch, question, why_of(function))
            return function

        return enter


def why_of(function: Callable) -> str:
    return " ".join(function.__doc__.split())


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
        self.quiz = Quiz() if quiz else None
        self.without = without
        # The `mutate` of that Removal, or None.
        self.mutate = mutate
        self.questions = 0
        self.checks = 0
        self.failed = 0

    def removed(self) -> AbstractContextManager:
        """A context in which the mechanism is removed from this process. A mutation of
        course/mutations would stay for good: it is for ranks alone."""
        function = getattr(self.mutate, "func", self.mutate)
        module = getattr(function, "__module__", "")
        return removed(None if module.startswith("course.mutations") else self.mutate)

    def on_ranks(self, world: int, function: Callable, *args) -> list:
        """function(rank, *args) on `world` ranks, each without the mechanism: see `ranks.run`."""
        return ranks.run(on_rank, world, self.mutate, function, args)

    def one_and_many(self, world: int, function: Callable, *args) -> tuple[Any, list]:
        """(what one rank returns, what each of `world` ranks returns without the mechanism)."""
        return ranks.run(function, 1, *args)[0], self.on_ranks(world, function, *args)

    def say(self, text: str = "") -> None:
        """A line as it is, below the others: for tables, bars and time lines."""
        print(" " * MARGIN + text if text else "", flush=True)

    def draw(self, picture: str) -> None:
        """Lines as they are, from the left edge."""
        print(picture, flush=True)

    def bars(self, values: dict[str, float], largest: float = 0) -> None:
        """A bar for each of these. largest: of a bar of full length; the default is the largest."""
        width = max(map(len, values))
        for name, value in values.items():
            self.say(f"{name:<{width}}{value:>12,}  {bar(value, largest or max(values.values()))}")

    def _paragraph(self, label: str, text: str, width: int = WIDTH) -> list[str]:
        return textwrap.wrap(
            text, width, initial_indent=label.ljust(MARGIN), subsequent_indent=" " * MARGIN
        )

    def _print(self, label: str, text: str) -> None:
        print("\n".join(self._paragraph(label, text)), flush=True)

    def predict(self, question: str, names: str = "") -> None:
        """Ask. names: of the numbers that answer it, "in forward; in backward". With --quiz, wait
        for each of them; without names, for a line of words."""
        if self.questions:
            print()
        self.questions += 1
        self._print("PREDICT", question)
        if self.quiz:
            self.quiz.ask(names)

    def check(self, text: str, holds: bool, numbers: Sequence[float] = ()) -> None:
        """The measurement beside the formula, and whether they agree. numbers: those that the
        question has named, in their order; several checks may share them."""
        self.checks += 1
        self.failed += not holds
        verdict = "ok" if holds else "WRONG"
        *lines, last = self._paragraph("CHECK", text, WIDTH - 7)
        print("\n".join([*lines, last.ljust(WIDTH - 5) + verdict.rjust(5)]), flush=True)
        if self.quiz:
            for line in self.quiz.compare(numbers):
                self._print("YOU SAID", line)

    def break_it(self, name: str, removal: Removal) -> None:
        """Name a flag that removes one mechanism, and ask what it does."""
        self._print("BREAK IT", f"--without {name}   {removal.question}")

    def explain(self, removal: Removal) -> None:
        """Answer the question of BREAK IT."""
        self._print("WHY", removal.why)

    def score(self) -> None:
        """With --quiz: how many of the reader's numbers are right."""
        if self.quiz and self.quiz.factors:
            self._print("SCORE", self.quiz.score())

    def verdict(self) -> int:
        """Says how the checks went. Returns the exit status."""
        without = f" without {self.without}" if self.without else ""
        outcome = f"{self.failed} of {self.checks} checks fail{without}."
        if not self.failed:
            more = f"To break one: python {self.command} --without NAME"
            more = f"None of them needs {self.without}." if self.without else more
            outcome = f"All {self.checks} checks hold. {more}"
        print(outcome, flush=True)
        self.score()
        return 1 if self.failed else 0


def has_no_keyboard() -> bool:
    """Whether this is `!python FILE` in a notebook: its terminal never sends a line. (`%run` asks
    in a box below the cell.)"""
    return "JPY_PARENT_PID" in os.environ and os.isatty(0)


def run(name: str) -> None:
    """`python -m course.NAME`. The process ends with the lesson's status."""
    terminal.command(lambda argv: main(name, argv))


def main(name: str, argv: list[str] | None = None) -> int:
    """Run the lesson course/NAME.py. Returns its status."""
    # It is imported by its name, for ranks that are other processes.
    module = importlib.import_module(f"course.{name}")
    removals = module.WITHOUT
    command = f"-m course.{name}"
    args = parse(command, list(removals), argv)
    mutate = removals[args.without].mutate if args.without else None
    if args.quiz and has_no_keyboard():
        print("A cell has no keyboard, so no question waits. docs/course.ipynb asks one by one.\n")
        args.quiz = False
    lesson = Lesson(command, args.quiz, args.without, mutate)
    if args.why is not None:
        for mechanism in args.why or removals:
            lesson.break_it(mechanism, removals[mechanism])
            lesson.explain(removals[mechanism])
        return 0
    torch.set_num_threads(1)
    ranks.fork_this_process()
    try:
        module.teach(lesson)
    except KeyboardInterrupt:
        # Ctrl-C at a question of --quiz.
        print(flush=True)
        lesson.score()
        raise
    if args.without:
        lesson.explain(removals[args.without])
    else:
        for mechanism, removal in removals.items():
            lesson.break_it(mechanism, removal)
    return lesson.verdict()


def parse(command: str, mechanisms: list[str], argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python {command}", description="A lesson: predict, check, break it."
    )
    parser.add_argument(
        "--quiz",
        action="store_true",
        help="ask for your predictions, say how far off each number is, and give a score",
    )
    parser.add_argument(
        "--without",
        choices=mechanisms,
        default="",
        help="remove one mechanism; WHY says at the end why checks fail",
    )
    parser.add_argument(
        "--why",
        nargs="*",
        choices=mechanisms,
        help="print WHY of these mechanisms, or of all, and run nothing",
    )
    args = parser.parse_args(argv)
    if args.why is not None and (args.quiz or args.without):
        parser.error("--why runs nothing: leave out --quiz and --without")
    return args


# --- pictures in text -----------------------------------------------------------------------------


def bar(value: float, largest: float, width: int = 40) -> str:
    """A bar of text: `largest` is `width` characters long."""
    return "█" * round(width * value / largest) if largest else ""
