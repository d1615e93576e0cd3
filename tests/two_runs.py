"""Two runs started together into one folder: one trains to its end, the other is refused, and
nothing is lost.

    python tests/two_runs.py [--times 20]

Every second time both are new runs; the other times both continue (--resume) what was trained the
time before."""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import processes  # noqa: E402 (needs the path)
import small_run  # noqa: E402

STEPS = 100
FLAGS = small_run.flags(save_every=50, log_every=50)


def compete(text: Path, out: Path, resume: bool) -> str:
    """Start two runs into `out`. Returns what went wrong, "" for nothing."""
    last_step = 2 * STEPS if resume else STEPS
    flags = [*FLAGS, *small_run.as_flags(data=text, out=out, steps=last_step)]
    if resume:
        flags.append("--resume")
    both = [processes.start(["train.py", *flags]) for _ in range(2)]
    ended = []
    for process in both:
        status = process.wait(timeout=120)
        messages = [line for line in process.stderr.splitlines() if line.startswith("train.py")]
        ended.append((status, messages))
    (trained, _), (refused, messages) = sorted(ended, key=lambda entry: entry[0])
    steps = [line["step"] for line in small_run.lines_of(out)]
    if (trained, refused) != (0, 2):
        return f"exit statuses {trained} and {refused}, not 0 and 2: {ended}"
    if len(messages) != 1 or f"--out {out}" not in messages[0]:
        return f"the refusal is {messages}"
    if steps != list(range(1, last_step + 1)):
        return f"metrics.jsonl has {len(steps)} of {last_step} steps"
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    args = parser.parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(Path(argparse.__file__).read_text())
        for n in range(args.times):
            # the second of a pair resumes what the first has trained
            problem = compete(text, Path(folder) / f"run-{n // 2}", resume=bool(n % 2))
            failed += bool(problem)
            result = problem or "one trained, one was refused, every step is there"
            print(f"{n + 1}: {result}", flush=True)
    print(f"{args.times - failed} of {args.times} times as it should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
