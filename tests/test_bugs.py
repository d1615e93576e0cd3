"""bugs.py, what benchmarks/silent_bugs.py has measured, and docs/bugs.md: they name the same bugs,
and the same numbers."""

import importlib
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from course import bug_runs, mutations
from course.exercises import bugs

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "bugs.md").read_text()
BUGS = mutations.bugs()


@pytest.fixture
def comparison():
    return importlib.import_module("benchmarks.silent_bugs")


@pytest.fixture
def measured() -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "silent_bugs.json").read_text())


def test_list(capsys):
    assert bugs.main([]) == 0
    printed = capsys.readouterr().out
    assert set(re.findall(r"^  ([a-z0-9-]+) ", printed, re.MULTILINE)) == set(BUGS)
    assert all(len(line) <= 100 for line in printed.split("\n"))


def test_one(capsys):
    assert bugs.main(["no-tied-sum", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "Pipeline.sum_tied = lambda self: None" in printed
    assert "step 1: gradient of embedding.tokens.weight" in printed
    assert re.search(r"embedding +1 of 2 wrong, by up to .* number: tokens\.weight", printed)
    assert re.search(r"blocks\.0 +16 of 16 right", printed)
    lines = printed.split("\n")
    assert len(lines) <= 45 and all(len(line) <= 100 for line in lines)


def test_steps_are_of_one_bug(capsys):
    with pytest.raises(SystemExit) as left:
        bugs.main(["--steps", "3"])
    assert left.value.code == 2
    assert "course.exercises.bugs: error: " in capsys.readouterr().err


def test_unknown_name(capsys):
    assert bugs.main(["tied-sum"]) == 2
    err = capsys.readouterr().err
    assert "no-tied-sum" in err and err.count("\n") == 1


def test_a_layout_without_a_bug_differs_in_nothing():
    one = bug_runs.train(1, None, {}, 3)
    two = bug_runs.train(2, None, dict(tp=2, sequence_parallel=True), 3)
    row = bug_runs.compare(two, one)
    assert row["first"] == "" and not row["wrong gradients"]
    assert row["ranks differ"] == [0.0, 0.0, 0.0]
    for number in (row["loss"], row["late"], row["norm"] - 1, row["norms of ranks differ"]):
        assert abs(number) < 1e-10
    # other weights are noticed
    weight = two.parameters["embedding.tokens.weight"]
    weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    losses = [bug_runs.held_out_loss({}, run.parameters) for run in (one, two)]
    assert losses[1] > losses[0] + 0.1


def test_code_is_shown():
    for bug in BUGS.values():
        lines = bugs.code_of(bug)
        assert lines and '"""' not in "".join(lines) and "@bug" not in "".join(lines)


# --- docs/bugs.md and the JSON --------------------------------------------------------------------


def test_every_bug_is_measured(measured):
    assert sorted(measured["bugs"]) == sorted(BUGS) and not measured["toy"]
    for name, row in measured["bugs"].items():
        assert re.match(BUGS[name].first, row["first"]), (name, row["first"])


def test_tables_are_the_measured_numbers(comparison, measured):
    """`python -m benchmarks.silent_bugs` prints their rows."""
    for kind, table in comparison.tables(measured).items():
        assert table in DOC, f"the table of {kind} is not that of silent_bugs.json:\n{table}"


def test_every_bug_has_an_entry_among_its_kind(comparison, measured):
    sections = {}
    for section in re.split(r"^## ", DOC, flags=re.MULTILINE)[1:]:
        sections[section.split("\n")[0]] = re.findall(r"^### (.*)$", section, re.MULTILINE)
    entries = [name for names in sections.values() for name in names]
    assert sorted(entries) == sorted(BUGS)
    for name, row in measured["bugs"].items():
        heading = row["kind"].capitalize()
        assert name in sections[heading], f"{name}: its first difference is in {heading}"


def test_entries_are_complete():
    for name, bug in BUGS.items():
        assert f"### {name}\n\n{bug.removes}" in re.sub(r"(?<!\n)\n(?![\n#-])", " ", DOC), name
        entry = bugs.entry(name)
        assert list(entry) == ["Symptom", "Apart", "In the wild"], name
        wild = re.search(rf"### {name}\n.*?\*In the wild\*: (.*?)(\n\n|\Z)", DOC, re.DOTALL)[1]
        links = re.findall(r"\[([\w./-]+)#(\d+)\]\((.*?)\)", wild)
        assert links or "not found in a public tracker" in wild, name
        for repository, number, url in links:
            of_github = rf"https://github\.com/{re.escape(repository)}/(issues|pull)/{number}"
            assert re.fullmatch(of_github, url), url


def test_table_of_symptoms(comparison, measured):
    """Every bug is a candidate of exactly one symptom, and none of them is empty."""
    assert comparison.table_of_symptoms(measured) in DOC
    shown = [
        [name for name, row in measured["bugs"].items() if shows(row)]
        for shows, _ in comparison.SYMPTOMS.values()
    ]
    assert sorted(itertools.chain(*shown)) == sorted(BUGS)
    assert all(shown)


def test_counts_in_the_text(comparison, measured):
    rows = measured["bugs"].values()
    total = len(rows)
    fine = sum(not row["loss gives it away"] for row in rows)
    differ = sum(any(row["ranks differ"]) for row in rows)
    norm = sum(comparison.off(row["norm"]) for row in rows)
    worse = sum(row["weights are worse"] for row in rows)
    text = " ".join(DOC.split())
    assert f"These are {total} such bugs" in text
    assert f"**{fine} of the {total} curves" in text
    results = (ROOT / "docs" / "results.md").read_text()
    assert f"{fine} of {total} curves" in results
    assert f"It sees {differ} of the {total}." in text
    assert f"It sees {norm} (by more than a tenth)" in text
    assert f"**Saved weights, evaluated on one device.** It sees {worse}." in text
    seeds = [0.0, *measured["right"]["dense"]["late of other seeds"]]
    assert f"end up to {max(seeds) - min(seeds):.2f} apart" in text
