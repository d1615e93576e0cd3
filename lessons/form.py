"""The form of every lesson: PREDICT, CHECK, BREAK IT.

`python tensor_parallel.py` asks a question with numbers, measures, and puts the measurement beside
the formula:

    PREDICT  All-reduces in one layer, forward and backward? Bytes each?
    CHECK    forward 2, backward 2, each b s h 8 = 131,072 bytes                                  ok
    BREAK IT python tensor_parallel.py --without f      same first loss, wrong gradients. Why?

`--quiz` waits for your answer after each question. `--without NAME` removes one mechanism: checks
that needed it fail. The exit status is 1 where a check fails.

A lesson is a function of a `Lesson`, in the file of its name; `main` runs it:

    # a name for --without -> a function that removes the mechanism
    WITHOUT = {"f": bugs.no_f}

    def teach(lesson: form.Lesson) -> None:
        lesson.predict("All-reduces in one layer?")
        lesson.check(f"forward {len(calls)}", len(calls) == 2)
        lesson.break_it("f", "Same first loss, wrong gradients. Why?", "Each rank has a part.")
"""

import argparse
import importlib
import statistics
import textwrap
import time
from collections.abc import Callable

import torch

from proof import ranks

WIDTH = 100
# "PREDICT  "
MARGIN = 9


class Lesson:
    """What a lesson prints, and how many of its checks failed."""

    def __init__(self, command: str, quiz: bool = False, without: str = "", mutate=None):
        """command: tensor_parallel.py. without: the mechanism that was removed, by `mutate()`."""
        self.command = command
        self.quiz = quiz
        self.without = without
        # What WITHOUT has under that name; None: nothing is removed. On ranks picklable, and called
        # first on every rank. Elsewhere it changes what it is given, or gives a context that ends.
        self.mutate: Callable | None = mutate
        self.questions = 0
        self.checks = 0
        self.failed = 0

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
        """Name a flag that removes one mechanism, and ask what it does. why: the answer,
        printed where it is removed."""
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


def main(name: str, argv: list[str] | None = None) -> int:
    """Run the lesson of a module (of tuning.packing: lessons/packing.py). Returns its status."""
    folder, _, file = name.rpartition(".")
    module = importlib.import_module(f"lessons.{file}")
    command = f"-m {name}" if folder else f"{name}.py"
    parser = argparse.ArgumentParser(
        prog=f"python {command}", description="A lesson: predict, check, break it."
    )
    parser.add_argument("--quiz", action="store_true", help="wait for an answer to each question")
    if module.WITHOUT:
        parser.add_argument(
            "--without", choices=list(module.WITHOUT), default="", help="remove one mechanism"
        )
    arguments = vars(parser.parse_args(argv))
    removed = arguments.get("without", "")
    torch.set_num_threads(1)
    ranks.fork_this_process()
    lesson = Lesson(command, arguments["quiz"], removed, module.WITHOUT.get(removed))
    module.teach(lesson)
    return lesson.verdict()


# --- pictures in text -----------------------------------------------------------------------------


def bar(value: float, largest: float, width: int = 40) -> str:
    """A bar of text: `largest` is `width` characters long."""
    return "█" * round(width * value / largest) if largest else ""


# --- time -----------------------------------------------------------------------------------------


class Turns:
    """Whether a thread had a processor to itself while it computed.

        with turns:
            compute()

    Where other processes take turns with it, it takes longer than its processor time, and times do
    not mean anything. Waiting (for a message, a disk) inside the `with` counts as a turn of others.
    """

    def __init__(self):
        self.seconds = 0.0
        self.processor_seconds = 0.0

    def __enter__(self) -> "Turns":
        self.seconds -= time.perf_counter()
        self.processor_seconds -= time.thread_time()
        return self

    def __exit__(self, *error) -> None:
        self.seconds += time.perf_counter()
        self.processor_seconds += time.thread_time()

    def shared(self, limit: float = 1.25) -> bool:
        return self.seconds > limit * self.processor_seconds


def busy(limit: float = 1.25, seconds: float = 0.2) -> bool:
    """Whether this machine is too busy for times of one process to mean something, as a loop that
    only computes sees it. Where several ranks are timed, let each have its `Turns`: beside one
    other process two cores still have room for one rank, and not for two."""
    with Turns() as turns:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            sum(range(1000))
    return turns.shared(limit)


def median_seconds(function: Callable[[], object], repetitions: int = 5) -> float:
    """The median time of a call; the first call warms up and does not count."""
    function()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
