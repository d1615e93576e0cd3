"""Two runs started together into one folder: one trains to its end, the other is refused, and
nothing is lost.

    python tests/two_runs.py [--times 20]

Half of the times both are fresh runs; half of the times both go on (--resume) with a run that is in
the folder."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS = 100
FLAGS = [
    "--device",
    "cpu",
    "--num-layers",
    "1",
    "--hidden-size",
    "32",
    "--num-heads",
    "4",
    "--ffn-hidden-size",
    "64",
]
FLAGS += [
    "--seq-length",
    "32",
    "--global-batch-size",
    "2",
    "--eval-every",
    "0",
    "--save-every",
    "50",
    "--log-every",
    "50",
]


def start(text: Path, out: Path, *more: str) -> subprocess.Popen:
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *FLAGS,
        "--data",
        str(text),
        "--out",
        str(out),
        *more,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out.parent
    )


def compete(text: Path, out: Path, resume: bool) -> str:
    """What went wrong with two runs into `out`, "" for nothing."""
    if resume:
        done = start(text, out, "--steps", "50")
        done.communicate()
        if done.returncode != 0:
            return f"the run to go on with ended with status {done.returncode}"
    flags = ["--steps", str(STEPS), "--resume"] if resume else ["--steps", str(STEPS)]
    both = [start(text, out, *flags) for _ in range(2)]
    ended = []
    for process in both:
        _, error = process.communicate(timeout=120)
        said = [line for line in error.splitlines() if line.startswith("train.py")]
        ended.append((process.returncode, said))
    (good, _), (bad, said) = sorted(ended, key=lambda one: one[0])
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    if (good, bad) != (0, 2):
        return f"exit statuses {good} and {bad}, not 0 and 2: {ended}"
    if len(said) != 1 or f"--out {out}" not in said[0]:
        return f"the refusal is {said}"
    if steps != list(range(1, STEPS + 1)):
        return f"metrics.jsonl has {len(steps)} of {STEPS} steps"
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args(argv)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(Path(argparse.__file__).read_text())
        for n in range(args.times):
            problem = compete(text, Path(folder) / f"run-{n}", resume=bool(n % 2))
            wrong += bool(problem)
            print(
                f"{n + 1}: {problem or 'one trained, one was refused, every step is there'}",
                flush=True,
            )
    print(f"{args.times - wrong} of {args.times} times as it should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
