"""A folder belongs to one run: it is locked, refused, or taken over. What is in it is never dropped
without a message."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import two_runs
from small_run import flags, run, write_lines

from run import checkpoint
from run.metrics import Metrics, read_metrics
from run.run_folder import RunFolder, RunFolderError

ROOT = Path(__file__).parent.parent


def in_another_process(*lines: str) -> subprocess.Popen:
    code = "\n".join(["import time", "from run.run_folder import RunFolder", *lines])
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_a_second_run_is_refused_and_told_by_whom(tmp_path):
    first = RunFolder(tmp_path / "run", resume=False)
    for resume in (False, True):
        words = rf"process {os.getpid()} on \S+ trains into it since "
        with pytest.raises(RunFolderError, match=words):
            RunFolder(tmp_path / "run", resume)
    first.close()
    RunFolder(tmp_path / "run", resume=False).close()


def test_a_link_to_nowhere(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(RunFolderError, match=r"is a link to .*gone, which does not exist; create"):
        RunFolder(tmp_path / "run", resume=False)


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    process = in_another_process(
        f"folder = RunFolder({str(tmp_path)!r}, False)",
        "print('locked', flush=True)",
        "time.sleep(60)",
    )
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RunFolderError, match=f"process {process.pid} "):
        RunFolder(tmp_path, resume=False)
    process.send_signal(signal.SIGKILL)
    process.wait()
    RunFolder(tmp_path, resume=False).close()


def test_a_restarted_rank_waits_for_the_one_before(tmp_path):
    held = RunFolder(tmp_path, resume=False, launcher="7 1")
    process = in_another_process(
        f"RunFolder({str(tmp_path)!r}, False, restarts=1, launcher='7 1')",
        "print('in', flush=True)",
    )
    time.sleep(0.5)
    (tmp_path / "config.json").touch()
    held.close()
    assert process.communicate(timeout=20)[0] == "in\n"


def test_another_run_in_the_folder(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "a file server that does not answer")
    with pytest.raises(RunFolderError, match="holds another run; continue it with --resume"):
        RunFolder(tmp_path, resume=False, launcher="1 1")
    assert not (tmp_path / "config.json").exists()
    RunFolder(tmp_path, resume=True).close()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001-of-00002.safetensors", "index.json"]
)
def test_a_folder_with_a_model_is_no_run(tmp_path, name):
    """--resume would write config.json over that of an exported model, or hide an imported
    checkpoint."""
    (tmp_path / name).touch()
    for resume in (False, True):
        with pytest.raises(RunFolderError, match="holds a model, not a run"):
            RunFolder(tmp_path, resume)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["/proc/run", "x" * 300, "a\0b"])
def test_names_that_cannot_be(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=r"--out .*cannot be written"):
        RunFolder(name, resume=False)


def test_two_runs_into_one_folder():
    assert two_runs.main(["--times", "2"]) == 0


# --- metrics.jsonl --------------------------------------------------------------------------------

LINES = [json.dumps({"step": n, "loss": 5.0 - n}) for n in range(1, 7)]


def test_one_bad_byte_costs_one_line_and_is_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    raw = "\n".join(LINES).encode() + b"\n"
    path.write_bytes(raw.replace(b'"step": 2', b'"st\xffp": 2'))
    damaged = path.read_bytes()
    metrics = Metrics(path, last_step=5)
    assert [line["step"] for line in metrics.lines] == [1, 3, 4, 5]
    assert "line 2 cannot be read" in metrics.notice and str(tmp_path) in metrics.notice
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    assert [line["step"] for line in read_metrics(path)[0]] == [1, 3, 4, 5]


def test_a_run_without_a_checkpoint_says_that_it_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    assert "begun anew; its 6 steps are in no checkpoint" in Metrics(path, last_step=0).notice


def test_half_a_line_at_the_end_is_what_a_kill_leaves(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES) + '\n{"step": 7, "lo')
    metrics = Metrics(path, last_step=6)
    assert len(metrics.lines) == 6
    assert not metrics.notice
    assert not (tmp_path / "metrics.jsonl.damaged").exists()


@pytest.mark.parametrize(
    "bad", ['{"step": "2", "loss": 1}', '{"step": 2, "loss": NaN}', '{"loss": 3}', "[" * 9999]
)
def test_lines_of_other_types(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([LINES[0], bad, LINES[2]]) + "\n")
    lines, damaged = read_metrics(path)
    assert [line["step"] for line in lines] == [1, 3] and damaged == [2]


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_empty(tmp_path, monkeypatch):
    assert checkpoint.steps(tmp_path / "missing") == {}
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    with pytest.raises(checkpoint.CheckpointError, match="is its disk mounted"):
        checkpoint.steps(tmp_path / "link")
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        checkpoint.steps(tmp_path / "file")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(checkpoint.CheckpointError, match="Permission denied"):
        checkpoint.find(tmp_path)


def test_links_do_not_stop_the_clean_up(tmp_path):
    """A step folder that is a link, and a link where the next save is built: the links go, what
    they lead to stays."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-000001").symlink_to(elsewhere)
    (folder / ".step-000003.saving").symlink_to(elsewhere)
    (folder / ".step-000009.saving").symlink_to(tmp_path / "nowhere")
    for step in (2, 3, 4):
        checkpoint.save(folder, step, {}, {"config": {}, "model": {}}, keep=2)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000003", "step-000004"]
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize(
    "kept, words",
    [
        ([], "6 of 6 steps have no line, from step 1 to step 6"),
        ([1, 2, 3, 4, 5], "1 of 6 steps have no line, from step 6 to step 6"),
        ([1, 2, 5, 6], "2 of 6 steps have no line, from step 3 to step 4"),
        ([1, 2, 3, 4, 5, 6], ""),
    ],
)
def test_lines_that_are_gone(tmp_path, kept, words):
    """A file that somebody has deleted or cut, or that a power failure has."""
    path = write_lines(tmp_path / "metrics.jsonl", [{"step": n, "loss": 1.0} for n in kept])
    assert Metrics(path, last_step=6).notice == (f"{path}: {words}" if words else "")


def test_lines_are_on_the_disk_before_their_checkpoint(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda number: events.append("lines"))
    save = checkpoint.Saver.save

    def watched(self, *args, **options):
        events.append("save")
        return save(self, *args, **options)

    monkeypatch.setattr(checkpoint.Saver, "save", watched)
    run(*flags(steps=4, save_every=2, out=tmp_path / "run"))
    assert [e for e, before in zip(events, ["", *events]) if e != before][:2] == ["lines", "save"]
