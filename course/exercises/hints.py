"""Hints in steps: a question, a smaller case, nearly the rule; the last names the answer's file.

    python -m course.exercises.check 2 --hint        the next hint of exercise 2
    python -m course.exercises.check 2 --hint 1      the first one again

hints.toml has them. Which one was shown last stands in .hints.json, beside the answers.
"""

import contextlib
import json
import tomllib
from pathlib import Path

# The number of an exercise, as a string -> its hints.
HINTS = tomllib.loads((Path(__file__).parent / "hints.toml").read_text(encoding="utf-8"))


def count(number: int) -> int:
    return len(HINTS[str(number)])


def next_hint(number: int, folder: Path) -> int:
    """The hint after the one that was shown last, from 1; the last one stays."""
    return min(shown_last(folder).get(str(number), 0) + 1, count(number))


def show(number: int, hint: int, folder: Path) -> str:
    """The text of a hint, which is noted as the last one shown."""
    notes = shown_last(folder) | {str(number): hint}
    # A folder that cannot be written begins with the first hint each time.
    with contextlib.suppress(OSError):
        (folder / ".hints.json").write_text(json.dumps(notes))
    more = "It is the last one."
    if hint < count(number):
        more = f"One more: python -m course.exercises.check {number} --hint"
    return f"hint {hint} of {count(number)}\n\n{HINTS[str(number)][hint - 1]}\n{more}"


def shown_last(folder: Path) -> dict[str, int]:
    """{exercise: hint}; nothing where the notes are missing or damaged."""
    try:
        notes = json.loads((folder / ".hints.json").read_bytes())
        return {name: int(notes[name]) for name in HINTS.keys() & notes.keys()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
