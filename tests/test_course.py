"""docs/course.md: its words, minutes and answers, as the files that it reads have them."""

import re
import shlex
from pathlib import Path

import pytest

from run import flags, rules
from run.config import ConfigError
from run.pretraining import Config

ROOT = Path(__file__).parent.parent
COURSE = (ROOT / "docs" / "course.md").read_text()
# heading -> text
SECTIONS = dict(part.split("\n", 1) for part in COURSE.split("\n## ")[1:])
SITTINGS = [text for heading, text in SECTIONS.items() if heading[0].isdigit()]


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def item(sitting: str, name: str) -> str:
    """What stands behind **name** in a sitting; "" where there is no such item."""
    found = re.search(rf"^- \*\*{name}s?\*\*(.*?)(?=^- \*\*|\Z)", sitting, re.M | re.S)
    return found[1] if found else ""


def files_read(sitting: str) -> list[str]:
    return re.findall(r"\]\(\.\./([\w/.]+)\)", item(sitting, "Read"))


# --- the glossary ---------------------------------------------------------------------------------

# what stands for a term in a text, where that is more than its name
PATTERNS = {
    "held-out": "held[-_ ]out",
    "process group": "process ?group",
    "master weight": "master(?: weight)?",
    "shard": "shard(?:s|ed)?",
}
GLOSSARY = {row[0].strip("*"): row for row in rows("Glossary")}


def pattern(term: str) -> str:
    return rf"(?<![\w-])({PATTERNS.get(term, term)})(?:e?s)?(?![\w-])"


def met_first(term: str) -> str:
    """The sitting, and the first file of those it reads, that has a term."""
    for number, sitting in enumerate(SITTINGS, 1):
        for file in files_read(sitting):
            if re.search(pattern(term), (ROOT / file).read_text(), re.I):
                return f"{number}, {file}"
    return "README.md"


@pytest.mark.parametrize("term", GLOSSARY)
def test_where_a_term_is_first_met(term):
    assert GLOSSARY[term][2] == met_first(term)
    assert list(GLOSSARY) == sorted(GLOSSARY, key=str.lower)


def prose(text: str) -> str:
    """Without code, pictures, headings and the addresses of links."""
    text = re.sub(r"^```.*?^```|`[^`]+`|!\[[^]]*\]\([^)]*\)|^#[^\n]*$", "", text, flags=re.M | re.S)
    return re.sub(r"\](?:\((?!\S*#glossary)[^)]*\)|\[(?!g\])[^]]*\])", "]", text)


def unexplained(text: str) -> list[str]:
    """The terms whose first use has neither a link to the glossary nor an explanation behind it."""
    found = []
    for term in GLOSSARY:
        first = re.search(pattern(term), prose(text), re.I)
        if first and not re.match(r"\]\(\S*#glossary\)|\]\[g\]| \(|: ", prose(text)[first.end() :]):
            found.append(term)
    return found


@pytest.mark.parametrize("name", ["README.md", "course/exercises/README.md", "docs/course.md"])
def test_first_uses_are_explained(name):
    """Of the course, what stands before its glossary."""
    text = (ROOT / name).read_text().partition("\n## Glossary")[0]
    assert not unexplained(text)
    link = re.search(r"^\[g\]: (.*)$", text, re.M)
    assert "[g]" not in prose(text) or link[1] == "docs/course.md#glossary"


def test_what_explains_a_term():
    assert unexplained("Two ranks share a matrix") == ["rank"]
    assert not unexplained("Two [ranks](course.md#glossary), or ranks")
    assert unexplained("[A rank](gpt.py), and a [rank](course.md#glossary)") == ["rank"]
    assert not unexplained("A shard (a part of a tensor), `rank`") and not unexplained("sharding")


# --- minutes, answers, the trap -------------------------------------------------------------------


def exercise_minutes() -> dict[str, int]:
    text = (ROOT / "course" / "exercises" / "README.md").read_text()
    return {n: int(minutes) for n, minutes in re.findall(r"^\| \[(\d\d)\].* (\d+) \|$", text, re.M)}


def lines_of(file: str) -> int:
    """Of a file to read; of kernels.py its introduction alone."""
    text = (ROOT / file).read_text()
    return (text.partition('\n"""\n')[0] if file == "kernels.py" else text).count("\n")


def test_minutes_are_those_of_the_files_and_exercises():
    """15 lines a minute, within a fifth; and sums that are sums."""
    *table, total = [[int(x) for x in row[1:]] for row in rows("Minutes")]
    assert len(table) == len(SITTINGS)
    exercises = exercise_minutes()
    for sitting, (read, *others, practice, together) in zip(SITTINGS, table, strict=True):
        files = [file for file in files_read(sitting) if file != "families.py"]
        assert read == pytest.approx(sum(map(lines_of, files)) / 15, rel=0.2), files
        numbers = re.findall(r"\b\d\d\b", item(sitting, "Exercise"))
        assert not numbers or practice == sum(exercises[n] for n in numbers), numbers
        assert together == read + sum(others) + practice
    assert total == [sum(column) for column in zip(*table)]
    hours = round(total[-1] / 60)
    assert f"{hours} hours" in " ".join((ROOT / "README.md").read_text().split())


def test_the_lecture_takes_90_minutes():
    assert sum(int(row[0]) for row in rows("One lecture of 90 minutes")) == 90


@pytest.mark.parametrize("number", range(1, len(SITTINGS) + 1))
def test_a_sitting_breaks_something_and_answers_what_it_asks(number):
    sitting = SITTINGS[number - 1]
    assert "without" in item(sitting, "Break it") or number == 11
    thought = item(sitting, "Think")
    assert "<details><summary>Answer</summary>" in thought or not thought
    assert sitting.count("<details>") == sitting.count("</details>")


def test_the_trap_of_sitting_4():
    """Its command is refused in the words of its answer."""
    trap = SITTINGS[3].partition("**A trap.**")[2]
    command = re.search(r"^```sh\npython train.py (.*?)```", trap, re.M | re.S)[1]
    words = shlex.split(command.replace("\\\n", " "))
    config, question = flags.parse_all(words, 0, Config)
    with pytest.raises(ConfigError) as refused:
        rules.validate(config, question["of"])
    answer = " ".join(re.search(r"refused: \*(.*?)\*\.", trap, re.S)[1].split())
    assert str(refused.value).endswith(answer)
    config.global_batch_size = 16
    rules.validate(config, question["of"])
