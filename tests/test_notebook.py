"""docs/course.ipynb is what course/page/notebook.py writes, and its cells run in their order."""

import contextlib
import functools
import io
import json
import sys
from pathlib import Path

import pytest
import torch

from course import form
from course.exercises import check
from course.page import notebook

ROOT = Path(__file__).parent.parent


@functools.cache
def in_this_process(command: str) -> str:
    """As notebook.run, without another import of torch."""
    _, module, *words = command.split()
    printed = io.StringIO()
    threads = torch.get_num_threads()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        if module == "course.exercises.check":
            check.main(words)
        else:
            form.main(module.removeprefix("course."), words)
    torch.set_num_threads(threads)
    return printed.getvalue()


@pytest.fixture
def no_answers(monkeypatch):
    def nobody(prompt: str) -> str:
        print(prompt, end="")
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    monkeypatch.setattr(notebook, "run", in_this_process)


def test_notebook_is_up_to_date_and_runs(no_answers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebook, "OUT", tmp_path / "course.ipynb")
    notebook.main()
    assert str(notebook.OUT) in capsys.readouterr().out
    same = notebook.OUT.read_bytes() == (ROOT / "docs" / "course.ipynb").read_bytes()
    assert same, "docs/course.ipynb: run `python -m course.page.notebook`, and commit"
    check_cells(tmp_path, monkeypatch)


# part of a cell: what it prints
PRINTED = {
    "print(answers[": "CHECK",
    "--without": "fail without",
    "exercises.check": "not written yet",
}


def check_cells(folder: Path, monkeypatch) -> None:
    """Each cell, with the reader's answers in a folder of the test."""
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setattr("sys.path", list(sys.path))
    known, ran = {}, []
    for cell in json.loads((ROOT / "docs" / "course.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None
        source = "".join(cell["source"]).replace(notebook.ANSWERS, str(folder))
        if source.startswith("%%writefile "):
            first, _, stub = source.partition("\n")
            Path(first.split()[1]).write_text(stub)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(source, known)
        for part, expected in PRINTED.items():
            if part in source:
                assert expected in printed.getvalue(), source
                ran.append(part)
    assert [ran.count(part) for part in PRINTED] == [20, 5, 4]


def test_a_lesson_is_a_process_of_its_own():
    answers = notebook.ask("course.gpt")
    assert len(answers) == 4 and all(answer.startswith("CHECK") for answer in answers)
    with pytest.raises(RuntimeError, match=r"No module named course\.no_lesson"):
        notebook.ask("course.no_lesson")


def test_a_cell_with_an_exclamation_mark_waits_for_nobody(monkeypatch, capsys):
    """`!python -m course.dropout --quiz` has a terminal, in which no line ever comes."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    monkeypatch.setattr("builtins.input", None)
    assert form.main("dropout", ["--quiz"]) == 0
    assert capsys.readouterr().out.startswith("A cell has no keyboard")
