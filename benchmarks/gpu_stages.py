"""The stages of gpu.py, and their results in gpu.json."""

import argparse
import json
from typing import NamedTuple

from benchmarks import report


class Stage(NamedTuple):
    # Seconds at most.
    limit: float
    # The module of benchmarks/ whose cases it measures.
    module: str


STAGES = {
    "environment": Stage(40, "gpu_checks"),
    "build": Stage(90, "gpu_checks"),
    "tests": Stage(120, "gpu_checks"),
    "gpt2": Stage(110, "training_step"),
    "kernels": Stage(60, "kernels"),
    "llama": Stage(120, "training_step"),
    "parity": Stage(45, "gpu_checks"),
    "run": Stage(75, "gpu_checks"),
    "fp8": Stage(90, "training_step"),
    "decode": Stage(60, "generation"),
    "serve": Stage(60, "serving_speed"),
    "attention": Stage(30, "products"),
    "matrices": Stage(45, "products"),
    "medium": Stage(60, "training_step"),
    "sanitizer": Stage(120, "gpu_checks"),
    "nccl": Stage(120, "nccl"),
}
# Compiles blocks, beside the tests.
WARM = Stage(120, "training_step")
# How a stage's process ends, with its exit status, or None where it was killed; after any other
# status, that of a FAULT or of a signal, another process goes on.
FAILED, REFUSED, LEFT, FAULT = 1, 2, 3, 4
WORDS = {0: "done", FAILED: "failed", REFUSED: "refused", None: "killed, its time was over"}
WORDS[LEFT] = "done, but for cases that had no time left"
# Values of a case that are shown, the first ones; not those that every case has.
SHOWN, OF_EVERY_CASE = 3, ("s in all", "run")

# --- what is known so far -------------------------------------------------------------------------


def read(args: argparse.Namespace) -> dict:
    """gpu.json: {"environment", "toy", "results": {stage: {case: row}}, "stages": {stage: how it
    ended}}"""
    try:
        found = report.saved("gpu", args)
    except FileNotFoundError:
        return {"toy": args.toy, "results": {}, "stages": {}}
    if "results" not in found:
        raise ValueError("gpu.json was not written by this command")
    return found


def note(args: argparse.Namespace, value: dict, *keys: str) -> None:
    """Put a value into gpu.json. Where the file cannot be written, the screen has the value."""
    found = read(args)
    report.table_at(found, keys[:-1])[keys[-1]] = value
    try:
        report.replace(args.out / "gpu.json", found, default=str)
    except OSError as e:
        words = f"{args.out / 'gpu.json'} cannot be written, {e.strerror}"
        print(f"{args.stage}: {words}: {json.dumps(value, default=str)}", flush=True)


def shown(row: dict, most: int = SHOWN) -> str:
    """The first values of a case, or why there are none."""
    if "error" in row:
        return f"FAILED, {row['error']}"
    texts = []
    for name, value in row.items():
        if name in OF_EVERY_CASE:
            continue
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, int | float) or (isinstance(value, dict) and "median" in value):
            texts.append(f"{report.text_of(value)} {name}")
    return " | ".join(texts[:most])
