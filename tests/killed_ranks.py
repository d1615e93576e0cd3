"""Ranks killed (SIGKILL) at random moments under torchrun's restarts: every run ends with the
weights and the curve of an undisturbed one, bit for bit.

python tests/killed_ranks.py [--runs 20] [--kills 2]
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FLAGS = (
    "--save-every",
    "1",
    "--dropout",
    "0.1",
    "--steps",
    "16",
    "--zero-stage",
    "3",
    "--optimizer-state",
    "bf16",
    "--precision",
    "bf16",
    "--micro-batch-size",
    "1",
)


def run(command: list[str], seed: int, most: int) -> tuple[int, str]:
    """Run `python -m torch.distributed.run .. train.py ..` with restarts, and kill a random rank at
    up to `most` random moments. Returns (kills, output)."""
    g = random.Random(seed)
    process = subprocess.Popen(
        [*command[:3], "--max-restarts", str(most + 1), *command[3:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kills = []
    output = []
    begun = threading.Event()

    def kill():
        for _ in range(most):
            begun.wait()
            begun.clear()
            time.sleep(g.uniform(0, 0.8))
            ranks = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
            ).stdout.split()
            if process.poll() is None and ranks:
                os.kill(int(g.choice(ranks)), signal.SIGKILL)
                kills.append(time.time())

    threading.Thread(target=kill, daemon=True).start()
    for line in process.stdout:
        output.append(line)
        if (
            re.match(r"step +\d", line)
            and len(output) > 1
            and not re.match(r"step +\d", output[-2])
        ):
            # the first step since the start, or since a restart
            begun.set()
    if process.wait() != 0:
        raise RuntimeError(f"exit status {process.returncode}\n{''.join(output)}")
    return len(kills), "".join(output)


def state(folder: Path) -> tuple[list, dict]:
    """(curve, every tensor of the last checkpoint)"""
    from safetensors import safe_open

    import checkpoint

    tensors = {}
    for file in sorted(checkpoint.find(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            tensors |= {(file.name, n): f.get_tensor(n) for n in f.keys()}
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(x["step"], x["loss"], x["grad_norm"]) for x in lines], tensors


def main():
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=2, help="at most, in each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(Path(argparse.__file__).read_text())
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            str(Path(__file__).parent.parent / "train.py"),
            *FLAGS,
            "--device",
            "cpu",
            "--num-layers",
            "2",
            "--hidden-size",
            "32",
            "--num-heads",
            "4",
            "--ffn-hidden-size",
            "64",
            "--seq-length",
            "32",
            "--global-batch-size",
            "4",
            "--eval-every",
            "0",
            "--data",
            str(text),
        ]
        run([*command, "--out", f"{folder}/whole"], 0, 0)
        curve, tensors = state(Path(folder) / "whole")
        killed = same = 0
        for seed in range(args.runs):
            kills, _ = run([*command, "--out", f"{folder}/{seed}"], seed, args.kills)
            its_curve, its_tensors = state(Path(folder) / str(seed))
            equal = (
                its_curve == curve
                and its_tensors.keys() == tensors.keys()
                and all(torch.equal(t, tensors[n]) for n, t in its_tensors.items())
            )
            killed = killed + kills
            same = same + equal
            print(
                f"run {seed}: {kills} kills, {'the same, bit for bit' if equal else 'DIFFERS'}",
                flush=True,
            )
        print(
            f"{same} of {args.runs} runs, with {killed} kills in all, ended with the undisturbed"
            " run's curve, weights and moments"
        )
        sys.exit(same < args.runs)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
