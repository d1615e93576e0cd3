"""A run does not depend on who reads its lines, nor on when Ctrl-C comes."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import processes
import pytest
import small_run

from base import terminal

ROOT = Path(__file__).parent.parent
STEPS = 30


@pytest.fixture
def command(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("if x in y: déjà vu\n" * 2000, encoding="utf-8")
    flags = small_run.flags(steps=STEPS, warmup_steps=5, data=text, out=tmp_path / "run")
    return [sys.executable, str(ROOT / "train.py"), *flags]


def steps(folder: Path) -> int:
    return len(small_run.lines_of(folder / "run"))


def test_closed_input_full_output_and_ascii(tmp_path, command):
    ascii_only = dict(PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run(
        ["bash", "-c", " ".join(command) + " <&- > /dev/full"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | ascii_only,
    )
    assert done.returncode == 0 and steps(tmp_path) == STEPS
    assert "Traceback" not in done.stderr
    assert "standard output is gone (No space left on device)" in done.stderr
    assert (tmp_path / "run/sample.txt").exists()


def test_characters_that_the_terminal_does_not_have(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.prepare()
    terminal.say("déjà vu")
    assert stream.buffer.getvalue() == b"d\\xe9j\\xe0 vu\n"


def test_closed_streams_keep_their_numbers(tmp_path):
    """Otherwise the first file that is opened is number 1, and gets what is printed."""
    code = "; ".join(
        (
            "import os, sys",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "from base import terminal",
            "terminal.prepare()",
            f"f = open({str(tmp_path / 'file')!r}, 'w')",
            "os.write(1, b'words')",
            "sys.exit(f.fileno())",
        )
    )
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" <&- >&- 2>&-'])
    assert done.returncode > 2 and (tmp_path / "file").read_text() == ""


def of_session(session: int) -> list[str]:
    """What runs in a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition(") ")
            if int(rest.split()[3]) == session and rest[0] != "Z":
                found.append(name)
    return found


def test_ctrl_c_before_the_ranks_stand():
    """Ranks, the server that forks them, and its tracker end too."""
    argv = [sys.executable, "-m", "course.verify", "--steps", "0", "--", "--tp", "2"]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(argv, cwd=ROOT, start_new_session=True, **streams)
    deadline = time.monotonic() + 60
    while len(of_session(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and b"Traceback" not in output, output
    while of_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
        deadline = min(deadline, time.monotonic() + 2)
    assert not of_session(process.pid)


def test_ctrl_c_removes_what_is_half_written(tmp_path):
    """Also where a library would catch KeyboardInterrupt, or runs long without looking for it."""
    program = (
        "import os, pathlib, signal, sys\n"
        "from base import terminal\n"
        "terminal.quiet()\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "with terminal.removed_at_the_end(folder):\n"
        "    folder.mkdir()\n"
        "    (folder / 'weights').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    signal.pause()\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / ".model.writing")]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_the_run_in_one_line(tmp_path, command, monkeypatch, capfd):
    import train
    from run import metrics, training_run

    class Full(metrics.Metrics):
        def add(self, line):
            if line["step"] == 4:
                self.file = open("/dev/full", "w")
            super().add(line)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_run, "Metrics", Full)
    before = threading.enumerate()
    assert train.main([*command[2:], "--save-every", "2"]) == 1
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("train.py")]
    assert len(error) == 1
    assert all(words in error[0] for words in ("after step 4", "No space left", "--resume"))
    monkeypatch.setattr(training_run, "Metrics", metrics.Metrics)
    # the save of step 2 may still be on its way; a process would end after it
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(60)
    assert train.main([*command[2:], "--resume"]) == 0
    assert [line["step"] for line in small_run.lines_of("run")] == list(range(1, STEPS + 1))


def test_a_small_command_with_a_closed_or_full_output():
    line = f"{sys.executable} -m run.blend"
    for output in ("| true", "> /dev/full"):
        done = subprocess.run(
            ["bash", "-c", f"{line} {output}"], cwd=ROOT, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_whoever_stops_reading_does_not_stop_the_run(tmp_path, command):
    """Standard output ends after a line, and standard error is full. Two ranks, each a new
    interpreter: gloo has aborted at exit before, when groups were left to the interpreter."""
    words = [*command, "--cache", str(tmp_path / "cache")]
    port = processes.free_port()
    both = []
    with open("/dev/full", "w") as full:
        for rank in range(2):
            environment = os.environ | processes.of_rank(rank, 2, port)
            streams = dict(stdout=subprocess.PIPE, stderr=full)
            both.append(subprocess.Popen(words, cwd=tmp_path, env=environment, **streams))
    both[0].stdout.readline()
    for process in both:
        process.stdout.close()
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert steps(tmp_path) == STEPS


def test_a_rank_that_says_nothing_ends_after_rank_0(monkeypatch):
    """torchrun ends all ranks with the first one: rank 0 would be stopped before its message."""
    import train

    waited = []
    monkeypatch.setattr(terminal.time, "sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(SystemExit):
            train.main(["--no-such-flag"])
    assert waited == [3]
