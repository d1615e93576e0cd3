"""`--quiz`: what the reader answers is kept, compared with the measurement, and counted.

    PREDICT  The model has 118,592 parameters. How many has each of two ranks?
             your answer: parameters = 50e3
    CHECK    60,800: a little more than half, ..                                               ok
    YOU SAID parameters = 50e3: 17.8% too small; it is 60,800
    ..
    SCORE    3 of 4 numbers right, to 1%; 1 more within a factor of 2.

A question that names numbers is asked for each of them, and its CHECK gives them. Any other answer
is shown below the CHECK as it was typed, without a score. No answer to a number counts as wrong.

Without a terminal a line is read for each question and forgotten.
"""

import math
import re
import signal
import sys
import textwrap
from collections.abc import Sequence

from base import terminal

# "PREDICT  "
MARGIN = 9
NO_NUMBER = "no number. Write 1,024, 1.5e9, 12%, 2/3, 2^16, ln 257 or 3 GiB; return: no answer"
# right: at most 1% off; 33% is right for 1/3
RIGHT = 1.0102
NEAR = 2.0

# --- a number -------------------------------------------------------------------------------------

DIGITS = r"[+-]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
UNITS = {"": 1, "%": 0.01}
for power, letter in enumerate("kmgt", start=1):
    UNITS |= {letter: 1000**power, f"{letter}i": 1024**power}
FUNCTIONS = {"": float, "ln": math.log, "log": math.log, "sqrt": math.sqrt, "√": math.sqrt}
FACTOR = re.compile(
    # A function, a number, its unit, its power.
    rf"({'|'.join(FUNCTIONS)})\s*\(?({DIGITS})\s*({'|'.join(UNITS)})(?:b|bytes?)?\)?(?:\^(\d+))?",
    re.IGNORECASE,
)


def number_of(text: str) -> float | None:
    """The value of 1,024, 1.5e9, 12%, 3 GiB, 2^16, ln 257, √2, or of products and quotients of
    these; None for other words."""
    value = 1.0
    # A factor, then in turn * or / and a factor.
    first, *rest = re.split(r"\s*([*·/])\s*", text.strip().replace("**", "^"))
    try:
        for sign, word in zip(["*", *rest[::2]], [first, *rest[1::2]]):
            factor = factor_of(word)
            value = value / factor if sign == "/" else value * factor
    except (ValueError, ArithmeticError):
        return None
    return value if math.isfinite(value) else None


def factor_of(word: str) -> float:
    """Raises ValueError or ArithmeticError for what is no number."""
    found = FACTOR.fullmatch(word)
    if found is None:
        raise ValueError
    function, digits, unit, power = found.groups()
    number = float(digits.replace(",", "")) * UNITS[unit.lower()]
    return FUNCTIONS[function.lower()](number) ** int(power or 1)


def written(number: float) -> str:
    """60,800 and 0.3333"""
    if abs(number) < 1e15 and (abs(number) >= 1000 or number == round(number)):
        return f"{number:,.0f}"
    return f"{number:.4g}"


def factor_off(said: float | None, right: float) -> float:
    """1 or more; infinite without a number, and where there is no factor: 0, or the other sign."""
    if said == right:
        return 1.0
    if said is None or said * right <= 0:
        return math.inf
    return max(said / right, right / said)


def how_far(said: float, right: float) -> str:
    """17.8% too small; it is 60,800"""
    factor = factor_off(said, right)
    if factor < 1.0001:
        return "right"
    direction = "large" if abs(said) > abs(right) else "small"
    if factor == math.inf:
        off = f"off by {written(abs(said - right))}"
    elif factor < NEAR:
        off = f"{abs(said / right - 1):.1%} too {direction}"
    else:
        off = f"too {direction} by a factor of {written(round(factor, 1))}"
    return f"{'right, ' if factor <= RIGHT else ''}{off}; it is {written(right)}"


# --- a quiz ---------------------------------------------------------------------------------------


def typed(prompt: str) -> str:
    """A line of the reader; "" where there is none. Ctrl-C raises KeyboardInterrupt; elsewhere it
    ends a lesson at once."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return terminal.one_line(input(" " * MARGIN + prompt).strip())
    except EOFError:
        print(flush=True)
        return ""
    finally:
        signal.signal(signal.SIGINT, handler)


class Quiz:
    """Asks, keeps the answers until a CHECK answers them, and counts."""

    def __init__(self):
        # Without a terminal nobody can be asked again or shown an answer.
        self.keeps = sys.stdin.isatty()
        # Answers not yet shown beside a CHECK: in words, and (name, answer) of numbers.
        self.words = ""
        self.answers: list[tuple[str, str]] = []
        # The factor by which each answer is off.
        self.factors: list[float] = []

    def ask(self, names: str) -> None:
        """Ask for each of the numbers "in forward; in backward"; without names, for words."""
        self.words, self.answers = "", []
        if not self.keeps:
            typed("your answer: ")
            return
        if not names:
            self.words = typed("your answer: ")
            return
        for name in names.split("; "):
            answer = typed(f"your answer: {name} = ")
            while answer and number_of(answer) is None:
                print(" " * MARGIN + NO_NUMBER)
                answer = typed(f"your answer: {name} = ")
            self.answers.append((name, answer))

    def compare(self, numbers: Sequence[float]) -> list[str]:
        """The answers to the numbers that a CHECK gives, and how far off they are; an answer in
        words stands at the first CHECK after its question."""
        lines = [textwrap.shorten(self.words, 200, placeholder=" ..")] if self.words else []
        self.words = ""
        for (name, answer), right in zip(self.answers, map(float, numbers)):
            self.factors.append(factor_off(number_of(answer), right))
            if answer:
                lines.append(f"{name} = {answer}: {how_far(number_of(answer), right)}")
        self.answers = self.answers[len(numbers) :]
        return lines

    def score(self) -> str:
        """3 of 4 numbers right, to 1%; 1 more within a factor of 2."""
        right = sum(factor <= RIGHT for factor in self.factors)
        near = sum(RIGHT < factor <= NEAR for factor in self.factors)
        text = f"{right} of {len(self.factors)} numbers right, to 1%"
        return f"{text}; {near} more within a factor of 2." if near else f"{text}."
