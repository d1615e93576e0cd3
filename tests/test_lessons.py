"""`python -m course.NAME`: the lessons, and demonstrations of modules whose own tests do not run
them."""

import contextlib
import importlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from parity import again

from course import cells as cells_of_the_notebook
from course import form, mutations, quiz

ROOT = Path(__file__).parent.parent


def status_of_lesson(name: str, argv: list[str]) -> int:
    """`python -m course.NAME`, in this process."""
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
        ("run.data", ["--seq-length", "16"], "sequences of 16 tokens to train on"),
        ("base.json_files", [ROOT / "benchmarks" / "results" / "fsdp.json"], "fsdp.json: JSON"),
        ("finetune.chat_template", [], "26 tokens; the assistant's:"),
        ("inference.weight_layouts", [], "microseconds to multiply"),
        ("inference.sampling", [], "0.000  1.000  0.000  0.000"),
        ("run.tokenizer", ["some text"], "9 bytes, 9 tokens"),
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
    path.stem
    for path in sorted((ROOT / "course").glob("*.py"))
    if "\ndef teach(" in path.read_text()
]


def lesson_of(name: str):
    return importlib.import_module(f"course.{name}")


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_under_its_own_name(name):
    assert f'\n    form.run("{name}")\n' in (ROOT / "course" / f"{name}.py").read_text()


def removals() -> list:
    """(lesson, what --without removes), with "" for nothing. What a bug of course/mutations removes
    test_compositions.py sees too: one of these for each lesson."""
    bugs = {bug.apply for bug in mutations.bugs().values()}
    cases = []
    for name in LESSONS:
        of_lesson = lesson_of(name).WITHOUT
        cases.append((name, ""))
        others = [removed for removed in of_lesson if of_lesson[removed].mutate not in bugs]
        for removed in of_lesson:
            is_own = removed in (others or [next(iter(of_lesson))])
            cases.append((name, removed) if is_own else again(name, removed))
    return cases


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def reader(monkeypatch):
    """reader("7", ..) sits at a terminal and answers so, the last answer for ever: an exception is
    raised. Returns the prompts that it has been shown."""

    def sit_down(*answers) -> list[str]:
        prompts = []

        def answer(prompt: str) -> str:
            prompts.append(prompt)
            said = answers[min(len(prompts), len(answers)) - 1]
            if isinstance(said, str):
                return said
            raise said

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", answer)
        return prompts

    return sit_down


@pytest.mark.parametrize("name, removed", removals())
def test_predict_check_break_it(name, removed, capsys, reader):
    """Every check holds; without a mechanism, one does not. It fits on a projector. Each number
    that the quiz asks for has a check that gives it."""
    prompts = reader("7")
    status = status_of_lesson(name, ["--without", removed] if removed else ["--quiz"])
    out = capsys.readouterr().out
    assert status == (1 if removed else 0), out
    assert ("WRONG" in out) == bool(removed), out
    assert "PREDICT" in out and "CHECK" in out
    # the answer to the question of BREAK IT
    assert len(re.findall("^WHY ", out, re.MULTILINE)) == bool(removed), out
    lines = out.splitlines()
    answers = [line.removeprefix("YOU SAID ") for line in lines if line.startswith("YOU SAID ")]
    asked = [prompt.partition("answer: ")[2] for prompt in prompts]
    assert [answer.partition("7")[0] for answer in answers] == asked, out
    assert sum(line.startswith("SCORE ") for line in lines) == any(asked)
    assert len(lines) - len(answers) - any(asked) <= 40
    assert max(map(len, lines)) <= 100
    # each flag that is named exists
    known = {*lesson_of(name).WITHOUT, "NAME"}
    assert set(re.findall(r"--without (\S+)", out)) <= known
    assert removed or f"python -m course.{name} --without NAME" in out


def test_quiz_without_a_terminal_reads_a_line_and_forgets_it(monkeypatch, capsys):
    answers = iter(["two", "no"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    lesson = form.Lesson("some.py", quiz=True)
    lesson.predict("How many?", "in forward; in backward")
    lesson.check("2", True, [1, 1])
    lesson.predict("More?")
    lesson.check("a measured 3 where the formula says 4", False)
    assert next(answers, "none left") == "none left"
    assert lesson.verdict() == 1
    out = capsys.readouterr().out
    assert "1 of 2 checks fail." in out and "YOU SAID" not in out and "SCORE" not in out
    assert re.search(r"says 4 +WRONG$", out, re.MULTILINE)


def test_quiz_shows_answers_beside_checks_and_counts(reader, capsys):
    answers = ["none", "2", "64 KiB", "", EOFError(), "they do", "60e3", "-1"]
    prompts = reader(*answers)
    lesson = form.Lesson("some.py", quiz=True)
    lesson.predict("All-reduces? Bytes each? Here? There?", "all-reduces; bytes each; here; there")
    lesson.check("2 all-reduces", True, [2])
    lesson.check("each of 131,072 bytes", True, [131_072, 1, 1])
    lesson.predict("Do gradients differ?")
    lesson.check("the loss does not", True)
    lesson.check("nor do gradients", True)
    lesson.predict("Parameters? And twice?", "parameters; twice")
    lesson.check("60,500", True, [60_500, 0])
    assert lesson.verdict() == 0
    # the first answer is no number, so it is asked for again
    names = ["all-reduces = "] * 2 + ["bytes each = ", "here = ", "there = ", ""]
    names += ["parameters = ", "twice = "]
    assert prompts == [f"         your answer: {name}" for name in names]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "PREDICT  All-reduces? Bytes each? Here? There?",
        f"         {quiz.NO_NUMBER}",
        # Ctrl-D ends no line
        "",
        f"CHECK    2 all-reduces{'ok':>78}",
        "YOU SAID all-reduces = 2: right",
        f"CHECK    each of 131,072 bytes{'ok':>70}",
        "YOU SAID bytes each = 64 KiB: too small by a factor of 2; it is 131,072",
        "",
        "PREDICT  Do gradients differ?",
        f"CHECK    the loss does not{'ok':>74}",
        "YOU SAID they do",
        f"CHECK    nor do gradients{'ok':>75}",
        "",
        "PREDICT  Parameters? And twice?",
        f"CHECK    60,500{'ok':>85}",
        "YOU SAID parameters = 60e3: right, 0.8% too small; it is 60,500",
        "YOU SAID twice = -1: off by 1; it is 0",
        "All 5 checks hold. To break one: python some.py --without NAME",
        "SCORE    2 of 6 numbers right, to 1%; 1 more within a factor of 2.",
    ]


@pytest.mark.parametrize(
    "text, number",
    [
        ("1,024", 1024),
        ("1,234,567.5", 1_234_567.5),
        ("1.5e9", 1.5e9),
        ("-.5E-3", -0.0005),
        ("12%", 0.12),
        ("62.5 %", 0.625),
        ("3 GiB", 3 * 2**30),
        ("3gb", 3e9),
        ("1.5 k", 1500),
        ("7 bytes", 7),
        ("2/3", 2 / 3),
        ("8 * 32*64 · 8", 131_072),
        ("1 KiB / 2", 512),
        ("2**3 / 2^2", 2),
        ("ln 257", math.log(257)),
        ("0.02/sqrt(4)", 0.01),
        ("√2", math.sqrt(2)),
        *[(text, None) for text in ("", "two", "1,5", "0,375", "12,34", "2 3", "2 or 3", "1/0")],
        *[
            (text, None)
            for text in ("nan", "inf", "1e999", "ln 0", "10^400", "/2", "%", "GiB", "1e9/1e-999")
        ],
    ],
)
def test_numbers_that_a_reader_writes(text, number):
    assert quiz.number_of(text) == (number and pytest.approx(number, rel=1e-15))


@pytest.mark.parametrize(
    "said, right, words",
    [
        (0, 0, "right"),
        (0.33333, 1 / 3, "right"),
        (0.333, 1 / 3, "right, 0.1% too small; it is 0.3333"),
        (0.33, 1 / 3, "right, 1.0% too small; it is 0.3333"),
        (60, 59, "1.7% too large; it is 59"),
        (-3, -2, "50.0% too large; it is -2"),
        (2, 4, "too small by a factor of 2; it is 4"),
        (1e6, 3, "too large by a factor of 333,333; it is 3"),
        (0, 5, "off by 5; it is 5"),
        (0.5, -0.5, "off by 1; it is -0.5"),
        (-1.7e308, 1.7e308, "off by inf; it is 1.7e+308"),
        (1e300, 1e-300, "off by 1e+300; it is 1e-300"),
    ],
)
def test_how_far_off_in_words(said, right, words):
    assert quiz.how_far(said, right) == words


def test_ctrl_c_at_a_question_ends_the_lesson_with_its_score(reader, capsys):
    reader("7", "7", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        status_of_lesson("schedules", ["--quiz"])
    assert capsys.readouterr().out.endswith("\nSCORE    0 of 2 numbers right, to 1%.\n")


def test_quiz_in_a_terminal():
    """Ctrl-D is no answer, Ctrl-C ends it with status 130, and neither shows a traceback."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "course.schedules", "--quiz"]
    lesson = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    for answer in (b"1/3\n", b"\x04", None):
        while not seen.endswith(b" = "):
            seen += os.read(ours, 4096)
        if answer:
            os.write(ours, answer)
            seen += b"|"
    # one that comes between the prompt and the read is seen with the next one; one that comes while
    # Python ends would end it by the signal
    while lesson.poll() is None:
        lesson.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            lesson.wait(5)
    assert lesson.returncode == 130
    seen = (seen + os.read(ours, 4096)).decode()
    os.close(ours)
    assert "YOU SAID bubble of GPipe = 1/3: right" in seen and "Traceback" not in seen
    assert seen.count("YOU SAID") == 1 and "SCORE    1 of 2 numbers right, to 1%." in seen


@pytest.mark.parametrize("names", [[], ["own-shard"], ["g", "f"]])
def test_why_without_a_run(names, monkeypatch, capsys):
    monkeypatch.setattr("course.tensor_parallel.teach", None)
    removals = lesson_of("tensor_parallel").WITHOUT
    assert status_of_lesson("tensor_parallel", ["--why", *names]) == 0
    said = " ".join(capsys.readouterr().out.split())
    expected = []
    for name in names or removals:
        removal = removals[name]
        asked = f"BREAK IT --without {name} {removal.question}"
        expected += [asked, f"WHY {removal.why}"]
    assert said == " ".join(expected)


@pytest.mark.parametrize(
    "argv", [["--why", "--quiz"], ["--without", "f", "--why"], ["--why", "x"], ["--without", "x"]]
)
def test_why_is_alone_and_of_the_lesson(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        status_of_lesson("tensor_parallel", argv)
    said = capsys.readouterr().err
    assert "--quiz" in said and "--without {f,g,own-shard}" in said and "--why [" in said


def test_a_cell_of_the_notebook():
    """The notebook calls lessons that are there, and an answer is what a lesson prints."""
    text = (ROOT / "docs" / "course.ipynb").read_text()
    asked = re.findall(r'ask\(\\"course\.(\w+)\\"\)', text)
    assert len(asked) == 5 and set(asked) <= set(LESSONS)
    answers = cells_of_the_notebook.ask("course.gpt")
    assert len(answers) == 4 and all(answer.startswith("CHECK") for answer in answers)
    with pytest.raises(RuntimeError, match="No module named"):
        cells_of_the_notebook.ask("course.no_lesson")


def test_a_cell_with_an_exclamation_mark_waits_for_nobody(monkeypatch, capsys):
    """`!python -m course.dropout --quiz` has a terminal, in which no line ever comes."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    monkeypatch.setattr("builtins.input", None)
    assert status_of_lesson("dropout", ["--quiz"]) == 0
    assert capsys.readouterr().out.startswith("A cell has no keyboard")


def test_a_lesson_from_the_command_line():
    """Its exit status: without input, in a terminal without block characters; on a full disk."""
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    command = f"{sys.executable} -m course.dropout --quiz <&-"
    ascii_only = os.environ | dict(PYTHONIOENCODING="ascii")
    broken = run(["bash", "-c", f"{command} --without step"], env=ascii_only)
    assert broken.returncode == 1 and "1 of 5 checks fail without step." in broken.stdout
    assert "\\u2588" in broken.stdout and not broken.stderr
    closed = run(["bash", "-c", f"{command} > /dev/full"])
    assert closed.returncode == 1 and "No space left on device" in closed.stderr
    assert "Traceback" not in closed.stderr
