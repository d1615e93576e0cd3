"""Runs train.py on 2 ranks with a bug of hangs.py, and shows what each rank has printed.

    show(run_hang("save-on-rank-0"))      the log of each rank

The ranks run the command as torchrun starts it, with `--timeout 2`, so that the watchdog ends a run
that hangs. Before it leaves, a rank prints its last collectives from torch's flight recorder: what
each was, whether it waits, and the line that has called it.

No rank stays behind. All are killed when one has ended, or when the time is over. And each has an
alarm of the operating system, which ends it even if this process is gone.

    python -m course.exercises.check hunt 7
"""

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from hangs import HANGS, Hang, rewrite

from base import terminal, watchdog
from course import ranks

ROOT = Path(__file__).parent.parent
# that a run may take, and that the others have when one rank has ended
SECONDS = 60
GRACE = 5
SETTING = dict(
    model="gpt2",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    seq_length=32,
    vocab_size=257,
    tokenizer="bytes",
    global_batch_size=4,
    steps=4,
    warmup_steps=2,
    lr=1e-3,
    device="cpu",
)


class Rank(NamedTuple):
    """What is left of a rank. status: as its process has ended, minus a signal's number."""

    status: int
    log: str


# --- on a rank ------------------------------------------------------------------------------------


def _main(rank: int, hang: Hang | None, by_rules: bool, environment: dict, argv: list, log: str):
    """What the process of a rank does: the command, with its output in the file `log`."""
    signal.alarm(SECONDS + GRACE)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(file, number)
        setattr(sys, name, open(number, "w", closefd=False))
    # what PYTHONFAULTHANDLER=1 does
    faulthandler.enable()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    leave = os._exit

    def record_and_leave(status: int, patience: float = 0) -> None:
        # under the rules gloo's collectives are not those of the run
        for line in () if by_rules else recorded():
            terminal.say(line)
        time.sleep(patience)
        leave(status)

    # The two ends of a run without any clean-up: after an error, and by the watchdog. There the
    # other rank records too, while this one is still connected.
    os._exit = record_and_leave
    watchdog.Watchdog.__init__.__defaults__ = (partial(record_and_leave, patience=1),)
    sys.argv = ["train.py", *argv]
    if hang:
        hang.apply()
    status = run_by_rules(argv) if by_rules else importlib.import_module("train").main(argv)
    sys.stdout.flush()
    leave(status)


def run_by_rules(argv: list[str]) -> int:
    """train.py with the process group of nccl_rules.py in the place of gloo."""
    rules = importlib.import_module("nccl_rules")
    # rank 0 leaves last, for it holds the store in which hosts meet
    rules.MACHINE.timeout = 3 if os.environ["RANK"] == "0" else 2
    which = ('"nccl" if nccl else "gloo"', '"nccl" if nccl else "nccl-rules"')
    rewrite("base.world", "World.connect", *which)
    status = importlib.import_module("train").main(argv)
    try:
        rules.check_waits()
    except rules.RuleError as e:
        terminal.say(f"RuleError: {str(e).split(';')[0]}")
        status = 1
    return status


def recorded(most: int = 3) -> list[str]:
    """The last collectives of this process in torch's flight recorder, one line each."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace()).get("entries", [])
    lines = []
    for entry in entries[-most:]:
        frame = next(f for f in entry["frames"] if "/torch/" not in f["filename"])
        state = "ended" if entry["retired"] else "waits"
        what = f"{entry['profiling_name'].split(':')[1]} {entry['input_sizes'][0]}"
        where = f"{relative(frame['filename'])}:{frame['line']} {frame['name']}"
        group, number = entry["process_group"][0], entry["collective_seq_id"]
        lines.append(f"recorder: group {group}, number {number}: {what}, {state}, {where}")
    return lines


# --- all ranks ------------------------------------------------------------------------------------


def run(
    hang: Hang | None,
    flags: dict,
    by_rules: bool = False,
    timeout: int = 2,
    seconds: float = SECONDS,
    **environment: str,
) -> list[Rank]:
    """Both ranks of one run. flags: of train.py, beside SETTING. timeout: its --timeout."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        text = Path(folder, "text.txt")
        text.write_text("".join(f"x{n * n % 97} = {n}\n" for n in range(3000)))
        options = SETTING | flags | dict(data=text, out=f"{folder}/run", cache=f"{folder}/cache")
        argv = ["--timeout", str(timeout)]
        for name, value in options.items():
            argv += [f"--{name.replace('_', '-')}", str(value)]
        environment |= dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        environment |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        logs = [f"{folder}/{rank}" for rank in range(2)]
        arguments = [(r, hang, by_rules, environment, argv, log) for r, log in enumerate(logs)]
        statuses = run_processes(arguments, seconds)
        return [
            Rank(*of)
            for of in zip(statuses, (Path(log).read_text(errors="replace") for log in logs))
        ]


def run_processes(arguments: list[tuple], seconds: float) -> list[int]:
    """The statuses of processes that call `_main`. When this returns, none of them is there."""
    ranks.start_server()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_main, args=of, daemon=True) for of in arguments]
    try:
        for process in processes:
            process.start()
        sentinels = [process.sentinel for process in processes]
        if multiprocessing.connection.wait(sentinels, seconds):
            for process in processes:
                process.join(GRACE)
    finally:
        for process in processes:
            if process.pid:
                process.kill()
                process.join()
    return [process.exitcode for process in processes]


def run_hang(name: str) -> list[Rank]:
    hang = HANGS[name]
    return run(hang, hang.flags, hang.by_rules)


# --- for people -----------------------------------------------------------------------------------

# a frame of a traceback, or of what faulthandler prints
FRAME = re.compile(r'  File "(.+)", line (\d+),? in (\S+)\n(?:    (\S.*)\n)?(?:[ ^~]+\n)?')
HIDDEN = re.compile("site-packages|/watchdog.py|/refusals.py|/run/launch.py|/hang_runs|/nccl_")
SHOWN = re.compile("(step|train.py|recorder|terminate|  what|Fatal|RuleError| {4}[a-z_/]+.py:)")
FRAMES = 3


def relative(path: str) -> str:
    return path.removeprefix(f"{ROOT}/")


def shorten(log: str) -> list[str]:
    """A log from its last step on. Of tracebacks, the innermost frames of this project, as
    FILE:LINE FUNCTION: CODE; where a process has aborted, the innermost comes first."""

    def short(frame: re.Match) -> str:
        path, line, function, code = frame.groups()
        if HIDDEN.search(path) or not path.startswith(str(ROOT)):
            return ""
        return f"    {relative(path)}:{line} {function}{': ' + code if code else ''}\n"

    begin = max((found.start() for found in re.finditer("^step ", log, re.MULTILINE)), default=0)
    lines = [line for line in FRAME.sub(short, log[begin:]).split("\n") if SHOWN.match(line)]
    frames = [line for line in lines if line.startswith("    ")]
    hidden = frames[FRAMES:] if "Fatal Python error" in log else frames[:-FRAMES]
    return [line.split("  lr ")[0] for line in lines if line not in hidden]


def show(found: list[Rank]) -> str:
    """The logs of all ranks, in lines of at most 100 columns."""
    lines = []
    for rank, (status, log) in enumerate(found):
        lines.append(f"rank {rank}, exit status {status}")
        for line in shorten(log):
            lines += textwrap.wrap(f"  {line}", 100, subsequent_indent=" " * 6)
    return "\n".join(lines)
