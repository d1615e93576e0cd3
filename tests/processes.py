"""Starts commands of this project as `python FILE FLAGS`, `python -m MODULE FLAGS` and torchrun do,
without waiting for imports.

    done = processes.run(["train.py", "--steps", "3"], world=2)       # two ranks, to their end
    done.returncode, done.stdout, done.stderr

    process = processes.start(["train.py", "--steps", "1000"])        # one process
    process.wait_for("step ")
    process.kill(signal.SIGINT)
    process.wait()

A new interpreter imports PyTorch and this project for 3 to 6 seconds. These processes are forked
from a server that has imported what `ranks.preload` names (tests/conftest.py). Only a launcher
(`start_launcher`) starts processes of its own. What PyTorch reads from the environment while it is
imported is the server's. What a test says about the start or the end of an interpreter, or about
torchrun itself, needs `subprocess` instead.
"""

import contextlib
import gc
import itertools
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path

import shortened

from course import ranks

ROOT = Path(__file__).parent.parent


class Command:
    """A running command. Its output goes to files, so that nobody needs to read it meanwhile."""

    def __init__(
        self,
        argv: list,
        environment: dict[str, str],
        is_shortened: bool = True,
        is_launcher: bool = False,
    ):
        self.folder = tempfile.TemporaryDirectory()
        ranks.start_server()
        context = multiprocessing.get_context("forkserver")
        words = [str(word) for word in argv[argv[0] == "-m" :]]
        self.process = context.Process(
            target=_become,
            args=(words, os.environ | environment, os.getcwd(), self.folder.name),
            kwargs=dict(is_shortened=is_shortened, is_launcher=is_launcher),
            daemon=not is_launcher,
        )
        self.process.start()

    def _output(self, name: str) -> str:
        path = Path(self.folder.name) / name
        # half a character may be written
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def stdout(self) -> str:
        return self._output("stdout")

    @property
    def stderr(self) -> str:
        return self._output("stderr")

    @property
    def returncode(self) -> int | None:
        """The exit status, minus a signal's number, or None while it runs."""
        return self.process.exitcode

    def wait_for(self, start: str, timeout: float = 60) -> None:
        """Wait until a line of standard output starts like this."""
        deadline = time.monotonic() + timeout
        while not any(line.startswith(start) for line in self.stdout.splitlines()):
            running = self.returncode is None and time.monotonic() < deadline
            assert running, f"no line starts with {start!r}:\n{self.stdout}{self.stderr}"
            time.sleep(0.01)

    def kill(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = 60) -> int:
        """The exit status. Fails where the command does not end."""
        self.process.join(timeout)
        assert self.returncode is not None, f"still running:\n{self.stdout}{self.stderr}"
        return self.returncode


def _become(
    argv: list[str],
    environment: dict[str, str],
    folder: str,
    outputs: str,
    is_shortened: bool,
    is_launcher: bool,
) -> None:
    if is_launcher:
        os.setsid()
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    # what a package has asked for while it was preloaded; TMPDIR may be another one here
    tempfile.tempdir = None
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(outputs, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
        setattr(sys, name, open(number, "w", closefd=False))
    sys.argv = argv
    sys.path.insert(0, str(ROOT))
    if is_shortened:
        shortened.shorten(setattr)
    if argv[0].endswith(".py"):
        sys.argv[0] = str(ROOT / argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        # the server has imported some of them
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def start(argv: list, is_shortened: bool = True, **environment: str) -> Command:
    return Command(argv, environment, is_shortened)


def start_launcher(argv: list, **environment: str) -> Command:
    """tests/forked_torchrun.py with its flags. It leads a session, and may start processes: the
    caller ends all of them (os.killpg)."""
    argv = ["tests/forked_torchrun.py", *argv]
    return Command(argv, environment, is_launcher=True)


def start_ranks(world: int, argv: list, is_shortened: bool = True) -> list[Command]:
    """All ranks of a command on this machine."""
    port = free_port()
    return [start(argv, is_shortened, **of_rank(rank, world, port)) for rank in range(world)]


def of_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment variables of one rank, as a launcher sets them. port: where ranks meet."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def ports():
    """Numbers below those that the system gives to connections (32768 and more on Linux): the ranks
    of other tests cannot take one before it is used. Each pytest worker has 2,500 of its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    for n in itertools.count(os.getpid()):
        yield 10000 + 2500 * worker + n % 2500


PORTS = ports()


def free_port() -> int:
    while True:
        port = next(PORTS)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


def run(
    argv: list, world: int = 1, timeout: float = 120, is_shortened: bool = True
) -> subprocess.CompletedProcess:
    """Run a command to its end. When a rank fails, the others are killed after a moment, in which
    they may end by themselves, and the exit status is that of the first to fail. is_shortened:
    without what shortened.py leaves out."""
    started = start_ranks(world, argv, is_shortened) if world > 1 else [start(argv, is_shortened)]
    deadline = time.monotonic() + timeout
    running = {command.process.sentinel: command for command in started}
    status = 0
    while running:
        ended = wait(running, max(0, deadline - time.monotonic()))
        for sentinel in ended:
            ended_with = running.pop(sentinel).wait()
            if ended_with and not status:
                status = ended_with
                deadline = min(deadline, time.monotonic() + 5)
        if not ended:
            late = [command.stderr for command in running.values()]
            for command in running.values():
                command.process.kill()
            assert status, f"still running after {timeout} s:\n{''.join(late)}"
            break
    stdout = "".join(command.stdout for command in started)
    stderr = "".join(command.stderr for command in started)
    return subprocess.CompletedProcess(argv, status, stdout, stderr)
