import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import small_run
import torch.distributed as dist

from base.terminal import descendants
from run.watchdog import Watchdog


def watched(size=1, seconds=0.3, store=None):
    ended = []
    return Watchdog(store or dist.HashStore(), 0, size, seconds, ended.append), ended


def wait_for(ended: list) -> None:
    deadline = time.monotonic() + 10
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_heart_that_beats():
    dog, ended = watched()
    for step in range(8):
        dog.beat(f"step {step}")
        time.sleep(0.1)
    # And one that pauses.
    dog.pause()
    time.sleep(1)
    assert not ended
    dog.stop()


def test_a_rank_that_hangs_is_named_with_its_step_and_line(capfd):
    """Rank 1 was heard of in step 6, and does not answer."""
    store = dist.HashStore()
    store.set("beat 1", "step 6")
    dog, ended = watched(2, store=store)
    dog.beat("step 7")
    wait_for(ended)
    dog.stop()
    err = capfd.readouterr().err
    assert ended and ended[0] == 1
    assert "rank 0: step 7, in tests/test_watchdog.py:" in err
    assert "rank 1: does not answer; last heard of in step 6" in err


def test_a_slow_rank_that_goes_on_is_left_alone():
    dog, ended = watched(seconds=0.5)
    dog.beat("step 1")
    # Late, but before the ranks are ended.
    time.sleep(0.7)
    dog.beat("step 2")
    time.sleep(0.4)
    dog.pause()
    time.sleep(1)
    assert not ended and not dog.store.check(["waits 0"])
    dog.stop()


class Gone(dist.HashStore):
    """The machine that held the store is gone."""

    def check(self, keys):
        raise RuntimeError("connection refused")


def test_without_the_store_the_rank_ends_all_the_same(capfd):
    dog, ended = watched(store=Gone())
    dog.beat("step 3")
    wait_for(ended)
    dog.stop()
    assert ended and "no word of the others" in capfd.readouterr().err


# --- ranks that were started without a launcher ---------------------------------------------------


@pytest.fixture
def argv(tmp_path, monkeypatch):
    """A run of train.py on a text in an empty folder."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"x{random.Random(n).randrange(99)} = {n}\n" for n in range(3000)))
    return ["train.py", *small_run.flags(data=text)]


def test_a_rank_alone_does_not_wait_for_ever(argv):
    # Each has a port of its own, so they never meet.
    environments = [processes.of_rank(rank, 2, processes.free_port()) for rank in range(2)]
    both = [processes.start([*argv, "--timeout", "1"], **e) for e in environments]
    for rank, process in enumerate(both):
        assert process.wait() == 1 and "Traceback" not in process.stderr
        assert f"train.py: rank {rank}: the 2 ranks did not meet within 1 s" in process.stderr


def test_a_folder_that_rank_0_refuses_ends_all_ranks(argv):
    both = processes.start_ranks(2, [*argv, "--out", "/proc/run"])
    assert [process.wait() for process in both] == [2, 2]
    assert "--out /proc/run: cannot be written" in both[0].stderr
    assert "train.py" not in both[1].stderr


def test_rank_0_is_stopped_and_holds_the_store(argv):
    flags = ["--steps", "100000", "--timeout", "2", "--out", "run"]
    both = processes.start_ranks(2, [*argv, *flags])
    both[0].wait_for("step ")
    both[0].kill(signal.SIGSTOP)
    assert both[1].wait() == 1 and "rank 1: no progress for 2 s" in both[1].stderr
    assert "no word of the others (the store does not answer)" in both[1].stderr
    both[0].kill(signal.SIGKILL)


STOPS = """
import os, signal, sys
from run import launch
import train

agree = launch.check_data_agree

def stop(*args):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    agree(*args)

launch.check_data_agree = stop
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_rank_is_stopped_before_the_first_step(argv):
    """While the data are opened. (The others waited for a minute more, and gloo said why.)"""
    Path("stops.py").write_text(STOPS)
    words = [Path("stops.py").resolve(), *argv[1:], "--timeout", "2", "--out", "run"]
    begin = time.monotonic()
    both = processes.start_ranks(2, words)
    assert both[0].wait() == 1 and both[1].wait() == -signal.SIGKILL
    assert time.monotonic() - begin < 20
    assert "no progress for 2 s" in both[0].stderr
    last = "does not answer; last heard of in the preparation of the first step"
    assert f"rank 1: {last}" in both[0].stderr


def test_torchrun_is_killed_while_its_ranks_begin(argv):
    """They end at once. (They looked for each other until --timeout was over.)"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += [Path(__file__).parent.parent / argv[0], *argv[1:], "--out", "run"]
    launcher = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL)
    ranks = []
    while len(ranks) < 2:
        time.sleep(0.05)
        ranks = [pid for pid in descendants(launcher.pid) if is_python(pid)]
    # torchrun has set the environment of these, and they have begun
    time.sleep(0.5)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(map(is_python, ranks)):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.05)


def is_python(pid: int) -> bool:
    """Whether a process runs a command of this test, and is no zombie."""
    try:
        return b"--out\0run" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_ranks_with_other_flags_are_refused(argv):
    """Their replicas would differ, and nobody would see it."""
    port = processes.free_port()
    both = []
    for rank in range(2):
        flags = ["--out", "run", "--seed", str(rank)]
        both.append(processes.start([*argv, *flags], **processes.of_rank(rank, 2, port)))
    assert [process.wait() for process in both] == [2, 2]
    assert "--seed: rank 1 was started with 1, and rank 0 with 0" in both[0].stderr
    assert "train.py" not in both[1].stderr
    assert not Path("run").exists()
