import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import small_run
import torch.distributed as dist

from runtime.watchdog import Watchdog


def watched(size=1, seconds=0.3, store=None):
    ended = []
    return Watchdog(store or dist.HashStore(), 0, size, seconds, ended.append), ended


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
    time.sleep(1)
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
    time.sleep(1)
    dog.stop()
    assert ended and "no word of the others" in capfd.readouterr().err


class Blocked(dist.HashStore):
    """The process that held the store is stopped: each question to it waits for ever."""

    def check(self, keys):
        threading.Event().wait()


def test_a_store_that_does_not_answer_holds_nobody(capfd):
    dog, ended = watched(store=Blocked())
    dog.beat("step 3")
    time.sleep(2)
    dog.stop()
    assert ended and "no word of the others (the store does not answer)" in capfd.readouterr().err


# --- ranks that were started without a launcher ---------------------------------------------------

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(rank: int, port: int, folder: Path, *flags: str) -> subprocess.Popen:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"x{random.Random(n).randrange(99)} = {n}\n" for n in range(3000)))
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [sys.executable, str(ROOT / "train.py"), *small_run.flags(data=text), *flags]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )


def test_a_rank_alone_does_not_wait_for_ever(tmp_path):
    # Each has a port of its own, so they never meet.
    both = [start(rank, free_port(), tmp_path, "--timeout", "3") for rank in range(2)]
    for rank, process in enumerate(both):
        error = process.communicate(timeout=60)[1]
        assert process.returncode == 1 and "Traceback" not in error
        assert f"train.py: rank {rank}: the 2 ranks did not meet within 3 s" in error


def test_a_folder_that_rank_0_refuses_ends_all_ranks(tmp_path):
    port = free_port()
    both = [start(rank, port, tmp_path, "--out", "/proc/run") for rank in range(2)]
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in both]
    assert [status for _, status in ended] == [2, 2]
    assert "--out /proc/run: cannot be written" in ended[0][0] and "train.py" not in ended[1][0]


def test_rank_0_is_stopped_and_holds_the_store(tmp_path):
    port = free_port()
    both = [
        start(rank, port, tmp_path, "--steps", "100000", "--timeout", "4", "--out", "run")
        for rank in range(2)
    ]
    try:
        for line in both[0].stdout:
            if line.startswith("step "):
                break
        both[0].send_signal(signal.SIGSTOP)
        error = both[1].communicate(timeout=60)[1]
        assert both[1].returncode == 1 and "rank 1: no progress for 4 s" in error
    finally:
        both[0].kill()
        both[0].communicate()


def test_ranks_with_other_flags_are_refused(tmp_path):
    """Their replicas would differ, and nobody would see it."""
    port = free_port()
    both = [start(rank, port, tmp_path, "--out", "run", "--seed", str(rank)) for rank in range(2)]
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in both]
    assert [status for _, status in ended] == [2, 2]
    assert "--seed: rank 1 was started with 1, and rank 0 with 0" in ended[0][0]
    assert "train.py" not in ended[1][0]
    assert not (tmp_path / "run").exists()
