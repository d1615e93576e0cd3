"""Two nodes, each with a launcher of its own: one of them is killed, and both are started again."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
import small_run

ROOT = Path(__file__).parent.parent
STEPS = 40
FLAGS = small_run.flags(
    dropout=0.1,
    zero_stage=3,
    micro_batch_size=1,
    steps=STEPS,
    save_every=5,
    log_every=STEPS,
    data=argparse.__file__,
)
# seconds, of a machine that does much else
PATIENCE = 120


def start_nodes(flags: list[str], logs: list[Path]) -> list[subprocess.Popen]:
    """A launcher of one rank for each log, as on so many machines. Each leads its own session, and
    has its share of the cores: ranks that think themselves alone would take all of them."""
    endpoint = f"127.0.0.1:{processes.free_port()}"
    launcher = ["--nnodes", str(len(logs)), "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", endpoint]
    command = [sys.executable, ROOT / "tests/forked_torchrun.py", *launcher, ROOT / "train.py"]
    options = dict(env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // len(logs))
    nodes = []
    for n, log in enumerate(logs):
        with open(log, "w") as file:
            streams = dict(stdout=file, stderr=subprocess.STDOUT)
            node = subprocess.Popen([*command, *flags], **streams, **options)
        os.sched_setaffinity(node.pid, cores[n * each :][:each] or cores)
        nodes.append(node)
    return nodes


def kill(node: subprocess.Popen) -> None:
    """The launcher and its rank, at once."""
    try:
        os.killpg(node.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    node.wait()


def wait_for_steps(out: Path, steps: int, nodes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (out / "metrics.jsonl").exists() or len(small_run.lines_of(out)) < steps:
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes)
        time.sleep(0.01)


@pytest.fixture
def logs(tmp_path):
    return [tmp_path / f"node-{n}.log" for n in range(2)]


def test_a_killed_node(tmp_path, logs):
    """The node that is left ends by itself. The losses and weights are then those of a run that
    nobody disturbed, bit for bit."""
    flags = [*FLAGS, "--cache", str(tmp_path / "cache")]
    done = processes.run(["train.py", *flags, "--out", tmp_path / "undisturbed"], world=2)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "killed"
    flags += ["--out", str(out)]
    nodes = start_nodes(flags, logs)
    try:
        # its second checkpoint is there by then
        wait_for_steps(out, 12, nodes)
        kill(nodes[1])
        assert nodes[0].wait(PATIENCE) != 0
        before = len(small_run.lines_of(out))
        assert before < STEPS, "the run was over when its node was killed"
        nodes += start_nodes([*flags, "--resume"], logs)
        assert [node.wait(PATIENCE) for node in nodes[2:]] == [0, 0], logs[0].read_text()
    finally:
        for node in nodes:
            kill(node)
    assert small_run.numbers_of(out) == small_run.numbers_of(tmp_path / "undisturbed")
    tensors = [small_run.tensors_of(folder) for folder in (out, tmp_path / "undisturbed")]
    assert small_run.equal(*tensors)
