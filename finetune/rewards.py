"""Reward functions: a Python function that says how good an answer is (--reward FILE.py:FUNCTION).

    def brevity(prompt: str, answer: str, record: dict) -> float:
        return -len(answer)

prompt is the user's last message; answer the text, without the token that ends it; record the whole
line of --data, so a line may carry what an answer is checked against. The same answer must get
the same number: a run that is resumed computes the rewards of a step again. What the function
prints goes to standard error.

Before a model is loaded, the function is tried on a made-up answer (`check`).

If --reward has no ".py:" in it, it names a run of `finetune/preference.py --method reward`.
"""

import contextlib
import inspect
import io
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from base import terminal
from base.errors import InputError, RunError

RewardFunction = Callable[[str, str, dict], float]
MADE_UP = "an answer"


class RewardError(InputError):
    """--reward cannot be used; the message says why."""


def is_function(reward: str) -> bool:
    """Whether --reward names a function, not a model."""
    return ".py:" in reward


def open_function(reward: str) -> RewardFunction:
    """The function of FILE.py:FUNCTION. Raises RewardError."""
    path, _, name = reward.rpartition(":")
    if not Path(path).is_file():
        raise RewardError(f"--reward {reward}: there is no file {path}")
    # behind this project's own: the file may import others beside it
    sys.path.append(str(Path(path).resolve().parent))
    try:
        # a name that no module of this project has
        with no_exit():
            names = runpy.run_path(path, run_name=f"reward_{Path(path).stem}")
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        raise RewardError(f"--reward {reward}: {path} fails: {words_of(e)}") from None
    function = names.get(name)
    if not callable(function):
        there = [n for n, x in names.items() if callable(x) and not n.startswith("_")]
        others = f"there are {', '.join(there)}" if there else "it has none"
        raise RewardError(f"--reward {reward}: {path} has no function {name!r}; {others}")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"--reward {reward}: is async; a plain function is needed")
    check_signature(function, reward)
    return function


def check_signature(function: RewardFunction, reward: str) -> None:
    """Raises RewardError."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # what is written in C may have none
        return
    try:
        signature.bind("prompt", "answer", {})
    except TypeError as e:
        rule = "is called with (prompt, answer, record), which it does not take"
        raise RewardError(f"--reward {reward}: {rule}: {e}") from None


def check(function: RewardFunction, prompt: str, record: dict) -> None:
    """Raises RewardError where the function gives no finite number for a made-up answer."""
    try:
        rate(function, prompt, MADE_UP, record)
    except RunError as e:
        raise RewardError(str(e)) from None


def words_of(error: BaseException) -> str:
    """Its type and text; the type alone where the text itself raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def rate(function: RewardFunction, prompt: str, answer: str, record: dict) -> float:
    """The reward of an answer, a finite number. Raises RunError where the function fails."""
    about = f"for the prompt {prompt[:60]!r} and the answer {answer[:60]!r}"
    try:
        with output_aside(), no_exit():
            reward = function(prompt, answer, record)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        # pytest's fail() raises no Exception
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        why = terminal.one_line(words_of(e))
        text = f"--reward: the function fails {about}: {why} ({where})"
        raise RunError(text, everywhere=True) from None
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        gave = terminal.one_line(repr(reward))[:60]
        text = f"--reward: the function gave {gave} {about}; a finite number is needed"
        raise RunError(text, everywhere=True)
    return number


@contextlib.contextmanager
def no_exit():
    """os._exit, which would end the run without a word and with status 0, raises an error."""

    def refuse(status):
        raise RuntimeError(f"calls os._exit({status})")

    exit_at_once, os._exit = os._exit, refuse
    try:
        yield
    finally:
        os._exit = exit_at_once


@contextlib.contextmanager
def output_aside():
    """What is printed meanwhile goes to standard error. Closing standard output has no effect."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    if not printed.closed and printed.getvalue():
        terminal.say(printed.getvalue(), error=True, end="")
