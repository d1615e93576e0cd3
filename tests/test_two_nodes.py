"""Two nodes, each with a launcher of its own: one of them is killed, and both are started again."""

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path

import processes
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


def start_nodes(flags: list[str]) -> list[processes.Command]:
    """Two launchers of one rank each, as on two machines. Each leads its own session, and
    has its share of the cores: ranks that think themselves alone would take all of them."""
    endpoint = f"127.0.0.1:{processes.free_port()}"
    launcher = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", endpoint]
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // 2)
    nodes = []
    for n in range(2):
        argv = [*launcher, ROOT / "train.py", *flags]
        node = processes.start_launcher(argv, OMP_NUM_THREADS="1")
        os.sched_setaffinity(node.process.pid, cores[n * each :][:each] or cores)
        nodes.append(node)
    return nodes


def kill(node: processes.Command) -> None:
    """Kill the launcher and its rank at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.process.pid, signal.SIGKILL)
    node.wait()


def wait_for_steps(out: Path, steps: int, nodes: list[processes.Command]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (out / "metrics.jsonl").exists() or len(small_run.lines_of(out)) < steps:
        assert time.monotonic() < deadline and all(node.returncode is None for node in nodes)
        time.sleep(0.01)


def test_a_killed_node(tmp_path):
    """The node that is left ends by itself. The losses and weights are then those of a run that
    nobody disturbed, bit for bit."""
    flags = [*FLAGS, "--cache", str(tmp_path / "cache")]
    done = processes.run(["train.py", *flags, "--out", tmp_path / "undisturbed"], world=2)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "killed"
    flags += ["--out", str(out)]
    nodes = start_nodes(flags)
    try:
        # its second checkpoint is there by then
        wait_for_steps(out, 12, nodes)
        kill(nodes[1])
        assert nodes[0].wait(PATIENCE) != 0
        before = len(small_run.lines_of(out))
        assert before < STEPS, "the run was over when its node was killed"
        nodes += start_nodes([*flags, "--resume"])
        assert [node.wait(PATIENCE) for node in nodes[2:]] == [0, 0], nodes[2].stderr
    finally:
        for node in nodes:
            kill(node)
    assert small_run.numbers_of(out) == small_run.numbers_of(tmp_path / "undisturbed")
    tensors = [small_run.tensors_of(folder) for folder in (out, tmp_path / "undisturbed")]
    assert small_run.equal(*tensors)
