"""Reward functions: a Python function that says how good an answer is (--reward FILE.py:FUNCTION).

    def brevity(prompt: str, answer: str, record: dict) -> float:
        return -len(answer)

prompt is the user's last message; answer the text, without the token that ends it; record the whole
line of --prompts, so a line may carry what an answer is checked against. The same answer must get
the same number: a run that is resumed computes the rewards of a step again.

If --reward has no ".py:" in it, it names a run of `--preference reward` (preference.py).
"""

import importlib.util
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from runtime.errors import RunError

RewardFunction = Callable[[str, str, dict], float]


class RewardError(ValueError):
    """--reward cannot be used; the message says why."""


def is_function(reward: str) -> bool:
    """Whether --reward names a function, not a model."""
    return ".py:" in reward


def open_function(reward: str) -> RewardFunction:
    """The function of FILE.py:FUNCTION. Raises RewardError."""
    path, _, name = reward.rpartition(":")
    if not Path(path).is_file():
        raise RewardError(f"--reward {reward}: there is no file {path}")
    # a name that no module of this project has
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look there for the module of a class
    sys.modules[spec.name] = module
    # behind this project's own: the file may import others beside it
    sys.path.append(str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:
        raise RewardError(f"--reward {reward}: {path} fails: {type(e).__name__}: {e}") from None
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise RewardError(
            f"--reward {reward}: {path} has no function {name!r}; there are {', '.join(there)}"
        )
    return function


def rate(function: RewardFunction, prompt: str, answer: str, record: dict) -> float:
    """The reward of an answer, a finite number. Raises RunError where the function fails."""
    about = f"for the prompt {prompt[:60]!r} and the answer {answer[:60]!r}"
    try:
        reward = float(function(prompt, answer, record))
    except (Exception, SystemExit) as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        text = f"--reward: the function fails {about}: {type(e).__name__}: {e} ({where})"
        raise RunError(text, everywhere=True) from None
    if not math.isfinite(reward):
        raise RunError(f"--reward: the function gives {reward} {about}", everywhere=True)
    return reward
