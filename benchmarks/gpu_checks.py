"""Stages of gpu.py that check: the machine, the kernels' build, tests, parity, a run of train.py.

Every test with the marker gpu is in one of two stages: those of compute-sanitizer, which take
minutes, are in the last one. Beside the tests run the other stages at toy size, each in a process
of its own, so that what breaks anywhere is known early, and the stage `warm` of training_step.py.
"""

import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from base import cuda_kernels
from benchmarks import report
from benchmarks.gpu_stages import WORDS
from benchmarks.report import ROOT, median
from course.parity import LLAMA, SMALL, Result, Run
from course.training_commands import config_of
from planning.plan import predict
from run import flags
from run.metrics import read_metrics

PACKAGES = "numpy msgspec transformers tokenizers safetensors matplotlib triton torchao trl".split()
PYTEST = "-m pytest -vv -rfEs --no-header --tb=short -p no:cacheprovider --all -m gpu".split()
SELECTED = {"tests": ["-k", "not sanitizer"], "sanitizer": ["-k", "sanitizer"]}
# With --toy these are collected, and skipped.
TOY_TESTS = {"tests": "tests/test_device_queue.py", "sanitizer": "tests/test_kernels.py"}
OUTCOMES = {"passed": "PASSED", "failed": "FAILED", "skipped": "SKIPPED", "errors": "ERROR"}
# Stages that run beside the tests at toy size, in two lanes.
SMOKE = "gpt2 run serve attention matrices medium parity kernels llama fp8 decode".split()
# Seconds that a stage has left when its last process is stopped.
MARGIN = 8
SIZES = dict(hidden_size=128, seq_length=256, vocab_size=512, dropout=0.0, num_layers=3)
PARITY = {
    "gpt": SMALL | SIZES,
    "gpt, dropout": SMALL | SIZES | dict(dropout=0.1),
    "llama": LLAMA | SIZES | dict(ffn_hidden_size=384),
}
RUN = "--model gpt2 --vocab-size 50304 --dropout 0 --global-batch-size 64 --micro-batch-size 32"
RUN += " --steps 120 --warmup-steps 20 --eval-every 60 --log-every 10 --plan h100"
TOY_RUN = "--num-layers 1 --hidden-size 32 --num-heads 4 --seq-length 32 --global-batch-size 2"
TOY_RUN += " --steps 3 --warmup-steps 1 --eval-every 0"


def cases_of(stage: str, args) -> dict:
    """{name: a function that measures it}; of gpu.py."""
    one = {
        "environment": {"versions": versions, "speed": partial(speed, args.toy)},
        "build": {"kernels": build},
        # Its tools run beside each other.
        "sanitizer": {"pytest": partial(pytest, "sanitizer", args, 4)},
        "run": {"train.py": partial(train, args)},
    }
    return one.get(stage) or {"tests": all_tests, "parity": parity_cases}[stage](args)


def call(argv: list[str], deadline: float) -> tuple[int | None, list[str]]:
    """Run python with these arguments: (its exit status, None where it was stopped, its lines)."""
    # One thread: tests run beside each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    options = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    seconds = max(1, deadline - MARGIN - time.monotonic())
    try:
        done = subprocess.run([sys.executable, *argv], timeout=seconds, **options)
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as e:
        status, output = None, e.stdout or b""
    lines = output.decode(errors="replace").splitlines()
    print(f"$ python {' '.join(argv)}", *lines, sep="\n", flush=True)
    return status, lines


def ended(status: int | None) -> dict:
    """For a row: how a process ended."""
    if status == 0:
        return {}
    return {"error": "stopped, for its time was over" if status is None else f"status {status}"}


# --- the machine ----------------------------------------------------------------------------------


def said(command: str) -> str:
    """The last line that a command prints."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return (done.stdout.strip() or "none").splitlines()[-1]


def versions() -> dict:
    installed = {str(d.name).lower(): d.version for d in importlib.metadata.distributions()}
    query = "nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
    return {
        "GPU": said(f"{query} --format=csv,noheader"),
        "nvcc": said("nvcc --version"),
        "compute-sanitizer": said("compute-sanitizer --version"),
        "torch": [torch.__version__, torch.version.cuda, torch.backends.cudnn.version()],
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: installed.get(name, "missing") for name in PACKAGES},
    }


def speed(toy: bool) -> dict:
    """What this GPU reaches: a copy, bytes read and written, and a matrix multiplication."""
    from benchmarks.kernels import copy_bandwidth, one_stream

    device = "cuda" if torch.cuda.is_available() else "cpu"
    flops = report.matmul_flops(torch.bfloat16, device, 256 if toy else 8192)
    with one_stream(device):
        bandwidth = copy_bandwidth(device)
    return {"TB/s of a copy": bandwidth / 1e12, "TFLOP/s of 8192³ in bf16": flops / 1e12}


def build() -> dict:
    """A library for each element type; all are compiled at once."""
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        reasons = list(pool.map(cuda_kernels.why_not, cuda_kernels.ELEMENTS))
    row = {"s to build": time.monotonic() - start, "why not": reasons}
    return row | ({"error": max(reasons)} if any(reasons) and torch.cuda.is_available() else {})


# --- tests ----------------------------------------------------------------------------------------


def pytest(stage: str, args, workers: int) -> dict:
    """Run the tests of a stage."""
    argv = [*PYTEST, *SELECTED[stage]]
    if args.toy:
        argv.append(TOY_TESTS[stage])
    elif importlib.util.find_spec("xdist"):
        argv += ["-n", str(workers), "--dist", "worksteal"]
    status, lines = call(argv, args.deadline)
    # pytest-xdist begins the line of an outcome with the worker's name; the summary repeats it.
    tests = [f" {line} " for line in lines if "::" in line and not line.startswith("FAILED")]
    row = {name: sum(f" {word} " in line for line in tests) for name, word in OUTCOMES.items()}
    failed = {line.strip()[-160:] for line in tests if " FAILED " in line or " ERROR " in line}
    row["which"] = sorted(failed)[:40]
    row["why"] = [line[:160] for line in lines if line.startswith("E  ")][:40]
    row["last line"] = lines[-1] if lines else ""
    return row | ended(status)


def all_tests(args) -> dict:
    """All run at once; each case waits for one of them. With --toy only the tests: all else is
    measured at that size anyway."""
    if args.toy:
        return {"pytest": partial(pytest, "tests", args, 1)}
    lanes = ThreadPoolExecutor(2)

    @functools.cache
    def started() -> dict[str, Future]:
        own = ThreadPoolExecutor(2)
        found = {"pytest": own.submit(pytest, "tests", args, 8)}
        found["warm"] = own.submit(alone, "warm", args, [])
        for stage in SMOKE:
            found[f"{stage}, toy"] = lanes.submit(alone, stage, args, ["--toy"])
        return found

    names = [*(f"{stage}, toy" for stage in SMOKE), "pytest", "warm"]
    return {name: lambda name=name: started()[name].result() for name in names}


def alone(stage: str, args, flags: list[str]) -> dict:
    """A stage in a folder of its own: how many cases it has measured, and what failed in it."""
    with tempfile.TemporaryDirectory() as folder:
        limit = max(10, args.deadline - MARGIN - time.monotonic())
        argv = ["-m", "benchmarks.gpu", "--stage", stage, "--out", folder, "--run", args.run]
        status, lines = call([*argv, *flags, "--limit", f"{limit:.0f}"], args.deadline)
        path = Path(folder) / "gpu.json"
        rows = json.loads(path.read_text())["results"].get(stage, {}) if path.exists() else {}
    failed = {name: row["error"] for name, row in rows.items() if "error" in row}
    row = {"cases": len(rows), "failed": failed}
    if failed or status != 0:
        row |= {"error": f"{failed or WORDS.get(status, status)}"[:300], "said": lines[-3:]}
    return row


# --- parity ---------------------------------------------------------------------------------------


def parity_cases(args) -> dict:
    """Three steps of small models, beside those of a CPU in float32: precisions, kernels, FP8."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}

    @functools.cache
    def reference(name: str) -> Result:
        return trained(PARITY[name] | dict(precision="fp32", device="cpu", kernels="off"))

    def compare(name: str, **fields) -> dict:
        return differences(trained(PARITY[name] | dict(device=device) | fields), reference(name))

    for name in PARITY:
        for precision in ("fp32", "bf16"):
            for kernels in ("off", "auto"):
                one = partial(compare, name, precision=precision, kernels=kernels)
                found[f"{name}, {precision}, kernels {kernels}"] = one
    for recipe in ("current", "delayed", "block"):
        one = partial(compare, "llama", precision="bf16", fp8=recipe, fp8_skip=0)
        found[f"llama, fp8 {recipe}"] = one
    found["llama, bf16, compile"] = partial(compare, "llama", precision="bf16", compile=True)
    return dict(list(found.items())[:2]) if args.toy and device == "cpu" else found


def trained(fields: dict) -> Result:
    return Run(1, config_of(fields)).train(3)


def differences(found: Result, reference: Result) -> dict:
    """Relative: of all gradients of the first step as one vector, of the matrix that differs most,
    of losses and norms."""
    exact = {name: x.double() for name, x in reference.gradients.items()}
    off = {name: found.gradients[name].double().cpu() - x for name, x in exact.items()}
    squares = [sum(x.norm() ** 2 for x in of.values()) for of in (off, exact)]
    # The exact gradient of some vectors is near 0.
    matrices = [(off[name].norm() / x.norm()).item() for name, x in exact.items() if x.dim() > 1]
    return {
        "gradient": math.sqrt(squares[0] / squares[1]),
        "loss": max(abs(a / b - 1) for a, b in zip(found.losses, reference.losses)),
        "worst matrix": max(matrices),
        "norm": max(abs(a / b - 1) for a, b in zip(found.norms, reference.norms)),
    }


# --- a run ----------------------------------------------------------------------------------------


def predicted(stage: str, args) -> dict[str, str]:
    """A step on an H100, predicted by planner.py."""
    if stage != "run":
        return {}
    config = flags.parse(RUN.split(), 0)
    tokens = config.global_batch_size * config.model_config().seq_length
    return {"train.py": f"{tokens / sum(predict(config, 1).values()):,.0f} tokens/s"}


def train(args) -> dict:
    """train.py on Python's library: it learns, evaluates, saves, and writes a sample."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (TOY_RUN if args.toy else RUN).split()
        argv = ["train.py", *flags, "--out", f"{folder}/run", "--cache", f"{folder}/cache"]
        status, _ = call(argv, args.deadline)
        lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")[0]
    if not lines:
        return {"error": "no step"} | ended(status)
    later = lines[len(lines) // 2 :]
    losses = [line["loss"] for line in lines]
    row = {"tokens/s": median([line["tokens_per_second"] for line in later]), "loss": losses[-1]}
    row |= {name: later[-1].get(name) for name in ("eval_loss", "mfu", "predicted_seconds")}
    row["step, s"] = median([line["step_seconds"] for line in later])
    row["losses"] = losses[:: max(1, len(losses) // 12)]
    return row | ended(status)
