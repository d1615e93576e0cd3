"""What to run where there is a GPU: stages in order of value, in twelve minutes.

    python -m benchmarks.gpu                               all stages
    python -m benchmarks.gpu --seconds 300 gpt2 llama      these, in this order
    python -m benchmarks.gpu fp8 --cases "fp8 block"       a case of a stage, by name
    python -m benchmarks.gpu --toy                         all, at tiny sizes, also without a GPU
    python -m benchmarks.gpu table                         what was predicted, and measured

A stage is a process with a limit of seconds, and what ends it ends it alone. It measures cases, one
after the other: functions of a module of this folder, each with a name (`cases_of`). What a case
gives is in gpu.json before the next one begins, with the time at which the command began. A case
that fails costs a line. After an access to a wrong address the GPU serves a process no more: the
stage then goes on in a new process, with the next case. Cases without a result come first.

gpu.json holds the results of one device and of one version of PyTorch and Python. gpu.txt has all
that was printed. docs/gpu.md says what each stage measures, and what was predicted.
"""

import argparse
import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from datetime import datetime

import torch

from base import terminal
from benchmarks import report
from benchmarks.gpu_stages import (
    FAILED,
    FAULT,
    LEFT,
    REFUSED,
    STAGES,
    WARM,
    WORDS,
    note,
    read,
    shown,
)
from run.world import why_no_gpu

# The words of a stage's process, after python.
COMMAND = ["-m", "benchmarks.gpu"]
PROCESSES = 4
# Seconds with which begin at the least: a stage, a case, a case that compiles.
BEGIN, CASE, COMPILED = 10, 5, 20

# --- in the process of a stage --------------------------------------------------------------------


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """The cases of a stage. Returns the exit status."""
    if not args.toy and "environment" in read(args):
        report.earlier("gpu", parser, args)
    note(args, report.environment() | {"command": "python -m benchmarks.gpu"}, "environment")
    module = STAGES.get(args.stage, WARM).module
    cases = importlib.import_module(f"benchmarks.{module}").cases_of(args.stage, args)
    report.check_names(parser, args.cases, cases)
    stage = args.stage
    rows = read(args)["results"].get(stage, {})
    failed = left = 0
    # Those without a result come first.
    for name in sorted(args.cases or cases, key=lambda name: name in rows):
        keys = "results", stage, name
        row = rows.get(name, {})
        if row.get("run") == args.run:
            print(f"{name}: measured by the process before this one")
        elif time.monotonic() > args.deadline - (COMPILED if "compile" in name else CASE):
            print(f"{stage}: {name}: no time left")
            left += 1
        else:
            note(args, {"error": "its process ended", "run": args.run}, *keys)
            row = attempt(cases[name])
            print(f"{stage}: {name}: {shown(row)}\n{json.dumps(row, default=str)}", flush=True)
            note(args, row | {"run": args.run}, *keys)
            if report.faulty():
                return FAULT
        failed += "error" in row and row.get("run", args.run) == args.run
    return FAILED if failed else LEFT if left else 0


def attempt(case) -> dict:
    """What a case gives, or its error; and the seconds that it took."""
    start = time.monotonic()
    try:
        row = case()
    except Exception as e:
        traceback.print_exc(file=sys.stdout)
        row = {"error": report.one_line(e)}
    seconds = round(time.monotonic() - start, 1)
    # The next one begins with what this one has left free.
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    return row | {"s in all": seconds}


# --- the process that starts the stages -----------------------------------------------------------


class Command:
    """Starts the process of each stage, and shows what it prints."""

    def __init__(self, args: argparse.Namespace, parser: argparse.ArgumentParser):
        self.args = args
        self.begun = datetime.now().isoformat(timespec="seconds")
        self.end = time.monotonic() + args.seconds
        # Few stages have all of the time.
        self.scale = max(1.0, args.seconds / sum(STAGES[name].limit for name in args.names))
        self.tail = deque(maxlen=3)
        try:
            self.log = open(args.out / "gpu.txt", "a")
            fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if args.toy:
                (args.out / "gpu.json").unlink(missing_ok=True)
            read(args)
        except BlockingIOError:
            report.refuse(parser, f"--out {args.out}: another run writes into this folder")
        except (OSError, ValueError) as e:
            report.refuse(parser, f"--out {args.out}: {e}; name another folder")

    def say(self, line: str, on_screen: bool = True) -> None:
        if on_screen:
            terminal.say(line)
        try:
            print(line, file=self.log, flush=True)
        except OSError as e:
            terminal.say(f"gpu.txt cannot be written, {e.strerror}")
            self.log = open(os.devnull, "w")

    def run(self) -> int:
        """All stages. Returns the exit status."""
        statuses = {}
        for name in self.args.names:
            statuses[name] = self.stage(name)
            if statuses[name] == REFUSED:
                return REFUSED
        failed = [name for name, status in statuses.items() if status != 0]
        self.say(f"not done: {', '.join(failed)}" if failed else "all done")
        return int(bool(failed))

    def stage(self, name: str) -> int | None:
        """Returns how its last process ended."""
        self.args.stage = name
        begin = time.monotonic()
        limit = min(self.scale * STAGES[name].limit, self.end - begin)
        if limit < BEGIN:
            self.conclude("no time left", begin)
            return LEFT
        word = "interrupted"
        try:
            for _ in range(PROCESSES):
                status = self.process(begin + limit - time.monotonic())
                if status in WORDS:
                    break
                self.say(f"{name}: a process ended with status {status}")
            word = WORDS.get(status, "failed")
        finally:
            self.conclude(word, begin)
        return status

    def process(self, seconds: float) -> int | None:
        """Measure cases of the stage. Returns the exit status, None if it was killed in the end."""
        args = self.args
        argv = ["--stage", args.stage, "--out", str(args.out), "--run", self.begun]
        argv += ["--limit", f"{seconds:.1f}", *["--toy"] * args.toy]
        argv += ["--cases", *args.cases] if args.cases else []
        output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        # In a session, which is killed as one.
        process = subprocess.Popen(
            [sys.executable, "-u", *COMMAND, *argv], start_new_session=True, **output
        )
        reader = threading.Thread(target=self.follow, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            return process.wait(max(0, seconds))
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also what outlives the first of them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(5)

    def follow(self, lines) -> None:
        """Everything goes to the log, and to the screen what is said of a case."""
        for line in lines:
            of_case = line.startswith(f"{self.args.stage}: ")
            self.say(line.rstrip("\n"), of_case)
            if not of_case and line.strip():
                self.tail.append(line.strip())

    def conclude(self, word: str, begin: float) -> None:
        """The last line of a stage: how it ended, and what it found."""
        stage, now = self.args.stage, time.monotonic()
        note(self.args, {"ended": word, "s": now - begin, "run": self.begun}, "stages", stage)
        rows = read(self.args)["results"].get(stage, {})
        rows = {case: row for case, row in rows.items() if row["run"] == self.begun}
        if word != "done" and not any("error" in row for row in rows.values()):
            for line in self.tail:
                self.say(f"  {line}")
        self.tail.clear()
        found = "; ".join(f"{case}: {shown(row, 1)}" for case, row in rows.items())
        left = f"{now - begin:.0f} s, {max(0, self.end - now):.0f} s left"
        self.say(f"[{stage}] {word}, {left}; {found}"[:500] + "\n")


def main() -> int:
    parser = report.arguments(__doc__)
    names = f"{', '.join(STAGES)}; or table"
    parser.add_argument("names", nargs="*", metavar="STAGE", help=names)
    seconds = "of all stages together (default: 720)"
    parser.add_argument("--seconds", type=float, default=720, help=seconds)
    parser.add_argument("--cases", nargs="+", default=[], help="of each stage, only these")
    # The process of a stage has these.
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=600, help=argparse.SUPPRESS)
    args = report.parse(parser, seconds=3600)
    # It shall end by itself, before it is killed.
    args.deadline = time.monotonic() + args.limit - 3
    if args.stage:
        return measure(args, parser)
    if args.names == ["table"]:
        # It imports the modules of all stages, which this process does not need.
        importlib.import_module("benchmarks.gpu_table").show(args)
        return 0
    report.check_names(parser, args.names, STAGES)
    args.names = args.names or list(STAGES)
    if not torch.cuda.is_available() and not args.toy:
        rule = "no GPU can be used here; --toy runs all of it at tiny sizes"
        report.refuse(parser, f"{why_no_gpu()}: {rule}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return Command(args, parser).run()


if __name__ == "__main__":
    terminal.run(main)
