"""Write docs/course.ipynb: sittings 1 to 3 of docs/course.md, to run in Jupyter or VS Code.

    python -m course.page.notebook

Nothing is written twice. The text is that of docs/course.md, the questions are those that the
lessons ask, and the exercises are the files of course/exercises/. Cells call `ask` and `run`,
below: each lesson and each grade is a process of its own, so a cell never changes the kernel.

    Predict and run    a text cell with one question, and a cell that prints its answer; and so on
    Exercise           a text cell, a cell to fill in, which writes a file, and one that grades it

Not covered: sittings 4 to 12. Change SITTINGS to have more.
"""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from base import terminal

ROOT = Path(__file__).parent.parent.parent
OUT = ROOT / "docs" / "course.ipynb"
SITTINGS = (1, 2, 3)
# where the reader's answers are, so that a cell that runs again overwrites no file of
# course/exercises/
ANSWERS = "runs/notebook"

INTRODUCTION = f"""# The course, sittings 1 to 3

The text is that of [course.md](course.md), which has the symbols and sittings 4 to 12. Install with
`make train` and `.venv/bin/pip install jupyterlab`, and start `.venv/bin/jupyter lab`. The kernel
must be the Python of `.venv`.

Run the cells in order. Where a cell says *Your answer*, write a prediction into it before you run
the next one. Your answers to exercises are in `{ANSWERS}`."""

SETUP = f"""import os
import sys

# Jupyter starts in the folder of the notebook
if not os.path.exists("gpt.py"):
    os.chdir("..")
sys.path.insert(0, os.getcwd())
os.makedirs("{ANSWERS}", exist_ok=True)"""
IMPORTS = "from course.page.notebook import ask, run"


# --- what the cells call --------------------------------------------------------------------------


def run(command: str) -> str:
    """What `python COMMAND` prints. Nobody can answer it."""
    words = [sys.executable, *shlex.split(command)]
    done = subprocess.run(
        words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.decode()


def ask(lesson: str) -> list[str]:
    """Run a lesson; the answers to its questions, in their order."""
    return [answer for _, answer in questions_and_answers(lesson)]


def questions_and_answers(lesson: str) -> list[tuple[str, str]]:
    """Raises RuntimeError where the lesson asks nothing, with what it prints."""
    printed = run(f"-m {lesson} --quiz")
    pattern = r"^PREDICT  (.*?)\n *your answer: \n(.*?)(?=\n\nPREDICT|\Z)"
    found = re.findall(pattern, printed, re.MULTILINE | re.DOTALL)
    if not found:
        raise RuntimeError(printed)
    return found


# --- cells ----------------------------------------------------------------------------------------


def text(source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}


def code(source: str) -> dict:
    empty = {"execution_count": None, "outputs": []}
    return text(source) | {"cell_type": "code"} | empty


def lessons(bullet: str) -> list[dict]:
    """The lessons that a bullet of the course runs."""
    cells = []
    for lesson in re.findall(r"python\s+-m\s+(course\.\w+)\s+--quiz", bullet):
        cells += [text(f"### {lesson}"), code(f'answers = ask("{lesson}")')]
        pairs = questions_and_answers(lesson)
        for i, (question, _) in enumerate(pairs):
            # a line may end inside of a word with a hyphen
            question = " ".join(re.sub(r"(?<=\w-)\n *", "", question).split())
            cells.append(text(f"**Predict** {question}\n\n*Your answer:*"))
            cells.append(code(f"print(answers[{i}])"))
        names = re.findall(r"^BREAK IT --without (\S+)", pairs[-1][1], re.MULTILINE)
        cells.append(
            text(f"**Break it** Which checks will fail? Then another name: {', '.join(names)}.")
        )
        cells.append(code(f'print(run("-m {lesson} --without {names[0]}"))'))
    return cells


def exercises(bullet: str) -> list[dict]:
    """The exercises that a bullet of the course names."""
    cells = []
    for number in re.findall(r"\[(\d\d)\]", bullet):
        (path,) = (ROOT / "course" / "exercises").glob(f"{number}_*.py")
        source = path.read_text()
        title, _, body = ast.get_docstring(ast.parse(source)).partition("\n")
        # its last lines, a word and what it says: a list
        body = re.sub(r"^(Read|Paper|Not yet|Par)  +", r"- **\1** ", body, flags=re.MULTILINE)
        body = re.sub(r"^Check  .*\n", "", body, flags=re.MULTILINE)
        stub = source.split('"""\n', 1)[1].strip()
        cells.append(text(f"### {' '.join(title.split())}\n{body}"))
        cells.append(code(f"%%writefile {ANSWERS}/{path.name}\n{stub}"))
        command = f"-m course.exercises.check {int(number)} --solutions {ANSWERS}"
        cells.append(code(f'print(run("{command}"))'))
    return cells


# the bullets of a sitting that have cells of their own
CELLS = {"Predict and run": lessons, "Exercise": exercises, "Exercises": exercises}


def sitting(number: int, course: str) -> list[dict]:
    section = re.search(rf"^## {number}\. .*?(?=\n## |\Z)", course, re.MULTILINE | re.DOTALL)[0]
    cells = []
    words = ""
    for part in re.split(r"\n(?=- \*\*)", section):
        words += part + "\n"
        name = re.match(r"- \*\*(.*?)\*\*|", part)[1]
        if name in CELLS:
            cells += [text(words.strip()), *CELLS[name](part)]
            words = ""
    return [*cells, text(words.strip())]


def notebook() -> dict:
    course = (ROOT / "docs" / "course.md").read_text()
    cells = [text(INTRODUCTION), code(SETUP), code(IMPORTS)]
    for number in SITTINGS:
        cells += sitting(number, course)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def main(argv: list[str] | None = None) -> None:
    content = json.dumps(notebook(), indent=1, ensure_ascii=False)
    OUT.write_text(content + "\n", encoding="utf-8")
    print(f"written: {OUT}")


if __name__ == "__main__":
    terminal.command(main)
