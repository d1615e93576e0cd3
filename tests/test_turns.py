"""Two computations take turns (base/turns.py)."""

import pytest

from base.turns import Turns


class Message:
    """Notes when it is waited for."""

    def __init__(self, notes: list[str], name: str):
        self.notes, self.name = notes, name

    def wait(self):
        self.notes.append(f"{self.name} is there")


def computation(turns: Turns, notes: list[str], name: str, messages: int):
    def run():
        for n in range(messages):
            notes.append(f"{name}{n}")
            turns.wait(Message(notes, f"{name}{n}"))
        notes.append(f"{name} ends")

    return run


@pytest.mark.parametrize("messages, expected", [
    ((1, 1), "a0, b0, a0 is there, a ends, b0 is there, b ends"),
    ((2, 1), "a0, b0, a0 is there, a1, b0 is there, b ends, a1 is there, a ends"),
    ((0, 2), "a ends, b0, b0 is there, b1, b1 is there, b ends"),
    ((2, 0), "a0, b ends, a0 is there, a1, a1 is there, a ends"),
])  # fmt: skip
def test_who_starts_a_message_gives_the_turn(messages, expected):
    """And the last one goes on alone. A second pair begins as the first one did."""
    turns = Turns()
    for _ in range(2):
        notes = []
        first, second = (computation(turns, notes, *x) for x in zip("ab", messages))
        turns.together(first, second)
        assert ", ".join(notes) == expected


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_ends_both(fails):
    turns, notes = Turns(), []

    def broken():
        turns.wait(Message(notes, "broken"))
        raise ValueError("broken")

    both = [computation(turns, notes, "whole", 3), broken]
    with pytest.raises(ValueError, match="broken"):
        turns.together(*(both if fails else both[::-1]))
    assert notes[-1] == "whole ends"
