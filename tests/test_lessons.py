"""`python FILE`: the lessons, and the demonstrations of modules whose own tests do not run them."""

import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import processes
import pytest
import torch

from base import start
from lessons import form

ROOT = Path(__file__).parent.parent


def status_of_lesson(name: str, argv: list[str]) -> int:
    """`python NAME.py`, in this process."""
    threads = torch.get_num_threads()
    try:
        return form.main(name, argv)
    finally:
        torch.set_num_threads(threads)


def run(name, argv, monkeypatch, capsys) -> str:
    """What `python NAME.py` prints, in this process."""
    monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, argv)])
    threads = torch.get_num_threads()
    try:
        importlib.import_module(name).main()
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "name, argv, words",
    [
        ("data", ["--seq-length", "16"], "sequences of 16 tokens to train on"),
        ("base.json_files", [ROOT / "comparisons" / "fsdp.json"], "fsdp.json: JSON"),
        ("tuning.chat_template", [], "26 tokens; the assistant's:"),
        ("inference.weight_layouts", [], "microseconds to multiply"),
        ("inference.sampling", [], "0.000  1.000  0.000  0.000"),
        ("proof.ranks", [], "8 ranks: the sum of their numbers is 28"),
        ("corpus.tokenizer", ["some text"], "9 bytes, 9 tokens"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_lesson(name, argv, words, monkeypatch, capsys):
    assert words in run(name, argv, monkeypatch, capsys)


def test_metrics(tmp_path, monkeypatch, capsys):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in (1, 2, 3):
            row = {"step": step, "loss": 5.0 - step, "lr": 0.1, "tokens": step, "grad_norm": 1.0}
            if step == 2:
                # as after a step that was skipped
                row |= {"loss": None, "eval_loss": 4.0}
            file.write(json.dumps(row) + "\n")
    figure = tmp_path / "loss.png"
    assert str(figure) in run("run.metrics", [tmp_path], monkeypatch, capsys)
    assert figure.exists()


# --- lessons: predict, check, break it ------------------------------------------------------------

LESSONS = [
    name
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")])
    for name in re.findall(r'^    start\.lesson\("([\w.]+)"', path.read_text(), re.MULTILINE)
    if path == ROOT / (name.replace(".", "/") + ".py")
]


def lesson_of(name: str):
    return importlib.import_module(f"lessons.{name.rpartition('.')[2]}")


def test_every_lesson_is_the_lesson_of_a_file():
    lessons = [path.stem for path in (ROOT / "lessons").glob("*.py")]
    names = {name.rpartition(".")[2] for name in LESSONS}
    assert names == set(lessons) - {"__init__", "form", "demo"}


def removals() -> list[tuple[str, str]]:
    """(lesson, what --without removes), with "" for nothing."""
    cases = []
    for name in LESSONS:
        cases += [(name, removed) for removed in ("", *lesson_of(name).WITHOUT)]
    return cases


@pytest.mark.parametrize("name, removed", removals())
def test_predict_check_break_it(name, removed, capsys):
    """Every check holds; without a mechanism, one does not. It fits on a projector."""
    argv = ["--without", removed] if removed else []
    status = status_of_lesson(name, argv)
    out = capsys.readouterr().out
    assert status == (1 if removed else 0), out
    assert ("WRONG" in out) == bool(removed), out
    assert "PREDICT" in out and "CHECK" in out
    # the answer to the question of BREAK IT
    assert len(re.findall("^WHY ", out, re.MULTILINE)) == bool(removed), out
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    # the README and docs/course.md say `python NAME.py`, and each flag that is named exists
    command = f"-m {name}" if "." in name else f"{name}.py"
    for said, mechanism in re.findall(r"python (\S+|-m \S+) --without (\S+)", out):
        assert said == command and mechanism in lesson_of(name).WITHOUT


def test_what_an_unchecked_shape_does_is_what_its_lesson_says(capsys):
    status_of_lesson("model_config", ["--without", "check"])
    out = capsys.readouterr().out
    assert "CHECK    in forward: " in out and "CHECK    nothing: it runs " in out


def test_quiz_waits_for_an_answer(monkeypatch, capsys):
    answers = iter(["two", "no"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    lesson = form.Lesson("some.py", quiz=True)
    lesson.predict("How many?")
    lesson.check("2", True)
    lesson.predict("More?")
    lesson.check("a measured 3 where the formula says 4", False)
    assert next(answers, "none left") == "none left"
    assert lesson.verdict() == 1
    out = capsys.readouterr().out
    assert "1 of 2 checks fail." in out
    assert re.search(r"says 4 +WRONG$", out, re.MULTILINE)


def test_a_lesson_from_the_command_line():
    """`python FILE`, its exit status, and a flag that does not exist."""
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    # no input, a terminal without Greek letters
    command = f"{sys.executable} tensor_parallel.py --without f --quiz <&-"
    ascii_only = os.environ | dict(PYTHONIOENCODING="ascii")
    broken = run(["bash", "-c", command], env=ascii_only)
    assert broken.returncode == 1 and "2 of 5 checks fail without f." in broken.stdout
    assert "\\u2202L" in broken.stdout and not broken.stderr
    # no input, a full disk; of a lesson that starts quickly
    closed = run(["bash", "-c", f"{sys.executable} dropout.py --quiz <&- > /dev/full"])
    assert closed.returncode == 1 and "No space left on device" in closed.stderr
    assert "Traceback" not in closed.stderr
    unknown = processes.run(["dropout.py", "--without", "h"])
    assert unknown.returncode == 2 and "choose from" in unknown.stderr


@pytest.mark.parametrize(
    "argv, asked",
    [
        ([], True),
        (["--quiz"], True),
        (["--without", "mask"], True),
        (["--checkpoint", "runs/one"], False),
        (["show", "runs/one"], False),
        (["--help"], False),
    ],
)
def test_a_command_starts_its_lesson_without_arguments(argv, asked):
    assert start.is_asked(argv) == asked
