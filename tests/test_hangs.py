"""Bugs that crash or hang a run, the page about them, and their hunts: each run is repeated, and
its logs have the lines that docs/hangs.md shows."""

import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from pathlib import Path

import hang_runs
import hangs
import pytest
import torch
import torch.distributed as dist
from hangs import HANGS, Hang
from torch.distributed.flight_recorder import fr_trace

from course import ranks
from course.exercises import check, hang_hunt

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "hangs.md").read_text()
HUNT_OF = {found.bug: number for number, found in hang_hunt.HUNTS.items()}


def section(heading: str) -> str:
    return re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", DOC, re.MULTILINE | re.DOTALL)[1]


def excerpt(heading: str) -> str:
    """The last log in a section."""
    return re.findall(r"^```\n(.*?)^```$", section(heading), re.MULTILINE | re.DOTALL)[-1]


def normal(text: str) -> str:
    """Without numbers, folds and the name of the folder."""
    return " ".join(re.sub(r"in \S+/(?=\w+\.py)|\d+", "", text).split())


def assert_shown(shown: str, log: str) -> None:
    """Every line of a page's log is in the log of a run, in this order."""
    text, at = normal(shown), 0
    for line in log.split("\n"):
        found = text.find(normal(line), at)
        assert found >= 0, f"{line!r} is not in\n{shown}"
        at = found + len(normal(line))


@pytest.mark.parametrize("name", HANGS)
def test_log_is_that_of_the_page(name):
    """The run fails on both ranks; what the reader of the hunt sees has the lines of the page."""
    start = time.monotonic()
    text = hang_hunt.symptoms(HUNT_OF[name])
    assert time.monotonic() - start < 40
    assert HANGS[name].wrong in " ".join(section(name).split())
    statuses = re.findall(r"^rank \d, exit status (-?\d+)$", text, re.MULTILINE)
    # 1: an error, a hang that the watchdog has ended, or a broken rule; -6: gloo aborts
    assert len(statuses) == 2 and set(statuses) <= {"1", "-6"}, text
    assert_shown(text, excerpt(name))
    lines = text.split("\n")
    assert max(map(len, lines)) <= 100 and len(lines) < 50
    assert multiprocessing.active_children() == []


# one for each layout, and for gloo where only the rules see the bug
WITHOUT = [
    (None, dict(save_every=2), False),
    (None, HANGS["sum-if-large"].flags, False),
    (None, HANGS["no-wait"].flags, True),
    (HANGS["sends-first"], HANGS["sends-first"].flags, False),
    pytest.param(None, HANGS["own-counts"].flags, False, marks=pytest.mark.repetition),
]


@pytest.mark.parametrize("hang, flags, by_rules", WITHOUT)
def test_without_it_the_same_run_passes(hang, flags, by_rules):
    for rank in hang_runs.run(hang, flags, by_rules, timeout=30):
        assert rank.status == 0 and "train.py:" not in rank.log, rank.log
    assert {name for name, of in HANGS.items() if not of.flags} == {"bad-sample", "other-order"}


def test_what_detail_and_the_rules_say():
    hang = HANGS["other-order"]
    detail = hang_runs.run(hang, {}, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert_shown(hang_runs.show(detail), excerpt("TORCH_DISTRIBUTED_DEBUG=DETAIL"))
    by_rules = hang_runs.run(hang, {}, by_rules=True)
    assert_shown(hang_runs.show(by_rules), excerpt("NCCL_DEBUG, and a run without a GPU"))
    hang = HANGS["own-counts"]
    words = "another size: rank 1 of a group of 2 ranks sends"
    assert words in hang_runs.show(hang_runs.run(hang, hang.flags, by_rules=True))
    assert words in " ".join(section("own-counts").split())


def test_stacks_of_a_run_that_hangs(monkeypatch):
    """As `kill -ABRT` prints them."""
    run_processes = hang_runs.run_processes

    def abort(log: Path) -> None:
        while not log.exists() or "step 2/4" not in log.read_text():
            time.sleep(0.1)
        # until rank 1 is in step 3
        time.sleep(1)
        for rank in multiprocessing.active_children():
            os.kill(rank.pid, signal.SIGABRT)

    def run_and_abort(arguments, seconds):
        threading.Thread(target=abort, args=[Path(arguments[0][-1])], daemon=True).start()
        return run_processes(arguments, seconds)

    monkeypatch.setattr(hang_runs, "run_processes", run_and_abort)
    hang = HANGS["save-on-rank-0"]
    found = hang_runs.run(hang, hang.flags, timeout=30)
    assert_shown(hang_runs.show(found), excerpt("A stack of every thread"))


ENDLESS = Hang(
    "",
    "train",
    "Trainer.update",
    "        c = self.config\n",
    "        while True: __import__('time').sleep(9)\n",
    {},
)


def test_no_process_stays_behind():
    """Ranks that neither end nor answer are killed when the time is over."""
    start = time.monotonic()
    found = hang_runs.run(ENDLESS, {}, timeout=300, seconds=2)
    assert [rank.status for rank in found] == [-signal.SIGKILL] * 2
    assert time.monotonic() - start < 20 and multiprocessing.active_children() == []


def write_trace(rank, folder):
    dist.all_reduce(torch.ones(2))
    trace = torch._C._distributed_c10d._dump_fr_trace()
    (folder / f"rank_{rank}").write_bytes(trace)
    return pickle.loads(trace)["entries"][-1]["profiling_name"]


def test_gloo_records_and_torch_cannot_read_it(tmp_path):
    """As the table of the flight recorder says."""
    assert ranks.run(write_trace, 2, tmp_path) == ["gloo:all_reduce"] * 2
    with pytest.raises(KeyError):
        fr_trace.main([str(tmp_path), "-p", "rank_"])


def test_a_line_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="must be there once"):
        hangs.rewrite("fsdp", "apply", "no such line", "")
    with pytest.raises(ValueError, match="must be there once"):
        hangs.rewrite("fsdp", "apply", "if stage == 3:", "\n")


@pytest.mark.parametrize("number", hang_hunt.HUNTS)
def test_hunt_knows_its_answer(number, capsys):
    found = hang_hunt.HUNTS[number]
    assert len(set(found.names)) == 4 and set(found.names) <= HANGS.keys()
    for answer, status, words in (
        (found.bug, 0, f"Right: {found.bug}."),
        (found.others[0], 1, f"No, not {found.others[0]}."),
        ("no-such-bug", 1, "is none of"),
    ):
        with pytest.raises(SystemExit) as ended:
            check.main(["hunt", str(number), "--answer", answer])
        assert ended.value.code == status and words in capsys.readouterr().out


def test_page_and_hunts_have_every_bug():
    assert sorted(HUNT_OF) == sorted(HANGS)
    assert f"These are {len(HANGS)} of them" in DOC
    assert set(re.findall(r"^### ([a-z0-9-]+)$", DOC, re.MULTILINE)) == set(HANGS)
