"""Layouts by NCCL, a GPU for each rank: each gives what one device gives, in float64.

    python -m benchmarks.gpu nccl            two or more GPUs of one machine
    python -m benchmarks.gpu nccl --toy      a few of the same on CPUs, by the rules of NCCL

A case is a layout (course/verify.py: every tensor of two steps of a small model, to 1e-10), PPO
with ZeRO stage 3 (answers, gradients and weights, to 1e-10), or a run of torchrun train.py, which
goes on from its first checkpoint under another layout. The reference is one CPU; for the run it is
one GPU. One that hangs is stopped after two minutes, a run after three.

With a line that says DIFFERS or FAILED: `python -m course.verify --backend nccl --ranks N --
FLAGS`.

Not covered: several machines, 16 bits, CUDA kernels, speed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.report import ROOT
from course import parity, ranks, verify
from course.shrink import shrink
from run import checkpoint
from run.metrics import read_metrics

GPT2 = "--model gpt2"
# (ranks, flags of train.py): GPT-2 has a tied embedding, and dropout
LAYOUTS = [
    (2, f"{GPT2} --pp 2"),
    (2, f"{GPT2} --pp 2 --schedule gpipe"),
    (2, f"{GPT2} --pp 2 --virtual-stages 2"),
    (2, f"{GPT2} --pp 2 --schedule zb-h1"),
    (2, f"{GPT2} --tp 2 --sequence-parallel"),
    (2, "--model llama2-70b --tp 2 --sequence-parallel --recompute selective"),
    (2, f"{GPT2} --cp 2"),
    (2, f"{GPT2} --cp 2 --cp-kind all-to-all"),
    (2, f"{GPT2} --zero-stage 1 --micro-batch-size 1"),
    (2, f"{GPT2} --zero-stage 2 --micro-batch-size 1"),
    (2, f"{GPT2} --zero-stage 3 --recompute full --micro-batch-size 1"),
    (2, "--model mixtral-8x7b --ep 2 --micro-batch-size 1"),
    (4, f"{GPT2} --pp 4"),
    (4, f"{GPT2} --pp 4 --schedule zb-h1"),
    (4, f"{GPT2} --pp 2 --tp 2 --sequence-parallel"),
    (4, f"{GPT2} --pp 2 --zero-stage 2 --schedule zb-h1"),
    (4, f"{GPT2} --cp 2 --zero-stage 3"),
    (8, "--model llama2-7b --tp 2 --pp 2 --zero-stage 1 --sequence-parallel"),
]
# The numbers of those that --toy checks.
TOY = 3, 4
REINFORCEMENT = parity.SMALL | dict(command="reinforcement.py", method="ppo", critic_lr=1e-2)
REINFORCEMENT |= dict(seq_length=24, dropout=0.0, answer_tokens=8, micro_batch_size=1, epochs=2)
REINFORCEMENT |= dict(lr=5e-3)
RUN = (
    "--num-layers 2 --hidden-size 32 --num-heads 4 --ffn-hidden-size 64 --seq-length 32"
    " --global-batch-size 4 --micro-batch-size 1 --dropout 0.1 --precision fp64 --eval-every 0"
    " --steps 6 --save-every 3 --warmup-steps 0 --lr 1e-3"
)
# The layout of a run, and that under which it goes on.
FIRST, SECOND = "--pp 2", "--zero-stage 3"
OF_A_RUN = f"torchrun train.py {FIRST}, --resume {SECOND}"


def check_layout(world: int, flags: str, backend: str) -> str:
    """What is wrong with a layout, "" for nothing."""
    small_world, layout = shrink(*verify.read_flags(flags.split(), world))
    assert small_world == world, flags
    first = parity.first_difference(*verify.compare(world, layout, backend=backend))
    return f"first in {first}" if first else ""


def check_reinforcement(backend: str) -> str:
    one = parity.train(steps=2, base=REINFORCEMENT)
    device = "cuda" if backend == "nccl" else "cpu"
    layout = REINFORCEMENT | dict(zero_stage=3, device=device)
    two = parity.train(2, steps=2, base=layout, backend=backend)
    return worst_of(parity.difference(two, one))


def worst_of(differences: dict) -> str:
    """Those above the tolerance, or NaN."""
    above = [f"{name} by {x:.1e}" for name, x in differences.items() if not x <= verify.TOLERANCE]
    return ", ".join(above)


def launch(world: int, argv: list[str]) -> None:
    """Run a command on so many ranks. Raises RuntimeError with what it said when it failed."""
    launcher = [sys.executable]
    if world > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run([*launcher, *argv], cwd=ROOT, capture_output=True, text=True, timeout=180)
    if done.returncode:
        # What NCCL_DEBUG has printed, if it is set.
        print(done.stdout, end="")
        lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
        raise RuntimeError((lines or done.stderr.splitlines())[-1])


def check_run(device: str) -> str:
    """A run of two ranks beside one of one process, and the same after it was resumed."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train.py", *RUN.split(), "--device", device, "--data", argparse.__file__]
        words += ["--cache", f"{folder}/cache"]
        one, two = Path(folder) / "one", Path(folder) / "two"
        launch(1, [*words, "--out", str(one)])
        launch(2, [*words, *FIRST.split(), "--out", str(two)])
        of_run = compare_losses(two, one)
        # As if the run had been killed after its first checkpoint.
        shutil.rmtree(checkpoint.find(two))
        launch(2, ["train.py", "--resume", "--out", str(two), *SECOND.split()])
        resumed = compare_losses(two, one)
    return of_run or (resumed and f"after --resume: {resumed}")


def compare_losses(out: Path, one: Path) -> str:
    lines, expected = (read_metrics(folder / "metrics.jsonl")[0] for folder in (out, one))
    pairs = list(zip(lines, expected, strict=True))
    names = "loss", "grad_norm"
    return worst_of({name: max(abs(a[name] / b[name] - 1) for a, b in pairs) for name in names})


def checks(toy: bool) -> list[tuple]:
    """(ranks, name, a function that says what is wrong)"""
    backend, device = ("nccl-rules", "cpu") if toy else ("nccl", "cuda")
    layouts = [LAYOUTS[i] for i in TOY] if toy else LAYOUTS
    found = [(n, flags, partial(check_layout, n, flags, backend)) for n, flags in layouts]
    ppo = "reinforcement.py --method ppo --zero-stage 3"
    found.append((2, ppo, partial(check_reinforcement, backend)))
    return [*found, (2, OF_A_RUN, partial(check_run, device))]


def outcome(check) -> dict:
    """A row of gpu.json."""
    try:
        wrong = check()
    except Exception as e:
        # The last line of a rank's traceback says what happened.
        return {"error": str(e).strip().splitlines()[-1][:160]}
    return {"error": f"DIFFERS, {wrong}"} if wrong else {"found": "equal"}


def cases_of(stage: str, args) -> dict:
    """{name: a function that checks it}; of gpu.py."""
    gpus = torch.cuda.device_count()
    if gpus < 2 and not args.toy:
        words = "nothing to check: NCCL needs two GPUs or more, one for each rank"
        return {"layouts": lambda: {"found": words}}
    ranks.preload("train", "course.parity", "course.verify")
    found = {}
    for world, name, check in checks(args.toy):
        needs = partial(dict, found=f"needs {world} GPUs")
        enough = world <= gpus or args.toy
        found[f"{world} ranks, {name}"] = partial(outcome, check) if enough else needs
    return found
