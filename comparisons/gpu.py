"""What to run where there is a GPU: six commands of at most ten minutes each, in this order.

    python comparisons/gpu.py                 all six
    python comparisons/gpu.py check           one of them: check, kernels, gpt2, llama, fp8, nccl
    python comparisons/gpu.py --toy           all six at tiny sizes, also without a GPU

    check     builds the kernels; their bytes and errors; their tests on the GPU; compute-sanitizer
    kernels   the time of each operation                               comparisons/kernels.py
    gpt2      a step of GPT-2 124M                                     comparisons/training_step.py
    llama     one device's loss and gradients under layouts that share the GPU; a step of 16 layers
              of Llama-2 7B, for all 32 need more than 80 GB
    fp8       a layer's products in FP8, by size; those 16 layers        comparisons/fp8.py speed
    nccl      layouts of ranks that have a GPU each                      comparisons/nccl.py

docs/gpu.md says what each prints and writes. The output also goes to gpu_NAME.txt, a line at a
time, and the comparisons write their files after each case. So whatever stops a command costs at
most the case that it was in. The same command again measures first what has no result yet.
"""

import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import report
import torch
from report import ROOT

from base.world import why_no_gpu

# Seconds that a command may take. What still runs is stopped a little before: the command's own
# imports take time too.
LIMIT = 600
MARGIN = 20
# Seconds that a comparison has to end by itself, after it may begin no case.
END = 30
# Seconds that parity may take of the ten minutes of `llama`.
PARITY = 240
COMMANDS = "check", "kernels", "gpt2", "llama", "fp8", "nccl"
# A line for each test, and the reason of each that is skipped.
PYTEST = ["-m", "pytest", "-vv", "-rs", "--no-header", "-p", "no:cacheprovider", "-m", "gpu"]
KERNEL_TESTS = ["tests/test_scaled_mm.py", "tests/test_fp8_cast.py", "tests/test_kernels.py"]
PARITY_TESTS = ["tests/test_compositions.py", "tests/test_generate.py", "tests/test_optimizer.py"]
# Those that say most come first: time may be over after any of them.
KERNELS = "kernels auto"
# the whole model needs more than 80 GB
LLAMA = "llama2-7b-16-layers"
LLAMA_CASES = [KERNELS, "kernels off, compile", f"{KERNELS}, compile", "kernels off"]
GPT2_CASES = list(LLAMA_CASES)
LLAMA_CASES += [f"{KERNELS}, full recompute"]
FP8_CASES = [f"{KERNELS}, fp8 current", f"{KERNELS}, compile"]
FP8_CASES += [f"{KERNELS}, fp8 {recipe}, compile" for recipe in ("current", "block", "delayed")]
FP8_CASES += ["torchao tensorwise, compile", "like nanochat, compile"]
FP8_CASES += [f"{KERNELS}, fp8 {recipe}" for recipe in ("block", "delayed")]
FP8_CASES += ["torchao rowwise, compile"]
# Seconds that the times of layers may take of the ten minutes of `fp8`.
LAYERS = 180


def from_root(folder: Path) -> str:
    """Its name where commands run. Folders of the project have no name of this machine in it."""
    folder = folder.resolve()
    return str(folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder)


def parts(name: str, args) -> list[tuple[list[str], float]]:
    """What a command runs, one after the other: (arguments of python, seconds at most)."""
    pytest = list(PYTEST)
    if not args.toy and importlib.util.find_spec("xdist"):
        pytest += ["-n", "4", "--dist", "worksteal"]
    flags = ["--out", from_root(args.out), "--figures", from_root(args.figures)]
    flags += ["--toy"] if args.toy else []
    step = ["comparisons/training_step.py", *flags, "--models"]
    return {
        "check": [
            (["kernels.py"], LIMIT),
            # those with compute-sanitizer come last
            ([*pytest, *KERNEL_TESTS], LIMIT),
        ],
        "kernels": [(["comparisons/kernels.py", *flags], LIMIT)],
        "gpt2": [([*step, "gpt2-124m", "--cases", *GPT2_CASES], LIMIT)],
        "llama": [
            ([*pytest, *PARITY_TESTS], PARITY),
            ([*step, LLAMA, "--steps", "5", "--cases", *LLAMA_CASES], LIMIT),
        ],
        "fp8": [
            (["comparisons/fp8.py", "speed", *flags], LAYERS),
            ([*step, LLAMA, "--steps", "5", "--cases", *FP8_CASES], LIMIT),
        ],
        "nccl": [(["comparisons/nccl.py", *flags], LIMIT)],
    }[name]


def call(argv: list[str], seconds: float, log: TextIO) -> tuple[int, str]:
    """Run python with these arguments; its output goes to the screen and to the log. Returns its
    exit status and its last line. After so many seconds it is killed, with the processes that it
    started."""
    # One thread, because tests run beside each other. Unbuffered: what was printed before a kill is
    # kept.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    options = dict(cwd=ROOT, env=environment, start_new_session=True)
    process = subprocess.Popen([sys.executable, *argv], **output, **options)

    def kill():
        # Also those that outlive the first of them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    last = ""
    try:
        for line in process.stdout:
            say(line.rstrip("\n"), log)
            last = line.strip("= \n") or last
        return process.wait(), last
    finally:
        timer.cancel()
        kill()


def say(line: str, log: TextIO) -> None:
    print(line, flush=True)
    print(line, file=log, flush=True)


def describe(status: int) -> str:
    if status == 0:
        return "done"
    if status == -signal.SIGKILL:
        return "stopped, for its time was over"
    return f"failed, exit status {status}"


def run(name: str, args) -> bool:
    """One of the commands. Returns whether all its parts were done."""
    deadline = time.monotonic() + LIMIT - MARGIN
    done = True
    ends = []
    with open(args.out / f"gpu_{name}.txt", "w") as log:
        for key, value in report.environment().items():
            say(f"{key}: {value}", log)
        for argv, most in parts(name, args):
            start = time.monotonic()
            seconds = max(0, min(most, deadline - start))
            command = f"python {shlex.join(argv)}"
            say(f"\n$ {command}", log)
            if argv[0].startswith("comparisons/"):
                # It ends by itself, and draws what it has.
                argv = [*argv, "--minutes", f"{max(0, seconds - END) / 60:.1f}"]
            status, last = call(argv, seconds, log)
            done = done and status == 0
            took = time.monotonic() - start
            ends.append(f"{describe(status)}, {took:.0f} s: {command[:100]}\n    {last}")
        say(f"\n{name}\n  " + "\n  ".join(ends), log)
        print(f"written: {log.name}\n", flush=True)
    return done


def main() -> int:
    parser = report.arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="COMMAND", help=", ".join(COMMANDS))
    args = report.parse(parser)
    report.check_names(parser, args.names, COMMANDS)
    if not torch.cuda.is_available() and not args.toy:
        rule = "no GPU can be used here; --toy runs all of it at tiny sizes"
        report.refuse(parser, f"{why_no_gpu()}: {rule}")
    results = [run(name, args) for name in args.names or COMMANDS]
    return int(not all(results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
