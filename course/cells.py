"""What the cells of docs/course.ipynb call: a lesson as a process of its own."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(command: str) -> str:
    """What `python COMMAND` prints. Nobody can answer it."""
    words = [sys.executable, *shlex.split(command)]
    done = subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.decode()


def ask(lesson: str) -> list[str]:
    """The answers to the questions of a lesson, in their order. Raises RuntimeError where the
    lesson asks nothing, with what it prints."""
    printed = run(f"-m {lesson} --quiz")
    pattern = r"^PREDICT  .*?\n *your answer: \n(.*?)(?=\n\nPREDICT|\Z)"
    found = re.findall(pattern, printed, re.MULTILINE | re.DOTALL)
    if not found:
        raise RuntimeError(printed)
    return found
