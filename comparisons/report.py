"""What every comparison shares: its flags, its timing, and the files that it writes.

    args = report.parse(report.arguments(__doc__))           # --toy, --out, --figures
    times = report.in_turn({"ours": ..., "theirs": ...}, rounds=15)
    ratio = report.spread([t["ours"] / t["theirs"] for t in times])
    report.save("name", {"ratio": ratio}, args)              # NAME.json, with device and versions

Two things are compared in one run, in turn, and by the median of their ratios: the speed of a
shared machine changes from minute to minute, a ratio within a round hardly does.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
# git ignores it
SCRATCH = HERE.parent / "runs" / "comparisons"
# flags that are at least 1
COUNTS = "rounds", "steps", "seeds", "threads", "ranks"
# between two lines about how far a comparison is
SECONDS_OF_SILENCE = 10
# of the environment: results that are put into one file have these in common
SAME = "device", "torch", "python"

# --------------------------------------------------------------------------------------------------
# flags


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with the flags that every comparison has: --toy, --out and --figures."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="tiny sizes: runs every part in seconds; the numbers mean nothing",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of NAME.json (default: runs/comparisons; with --toy runs/comparisons/toy)",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="folder of NAME.svg (default: that of --out)"
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of this process, with the folders made. A flag that cannot be accepted ends the
    process: one line, exit status 2."""
    args = parser.parse_args()
    args.out = args.out or (SCRATCH / "toy" if args.toy else SCRATCH)
    args.figures = args.figures or args.out
    for name in COUNTS:
        value = getattr(args, name, 1)
        if isinstance(value, int) and value < 1:
            refuse(parser, f"--{name} {value}: must be at least 1")
    measured = (HERE.resolve(), HERE.resolve().parent / "figures")
    for flag, folder in (("--out", args.out), ("--figures", args.figures)):
        if args.toy and folder.resolve() in measured:
            refuse(
                parser,
                f"{flag} {folder}: --toy does not overwrite measured results; name another folder",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            refuse(parser, f"{flag} {folder}: {e.strerror}; name a folder that can be written")
    return args


def refuse(parser: argparse.ArgumentParser, message: str) -> None:
    """One line on stderr, exit status 2."""
    print(f"{parser.prog}: {message}", file=sys.stderr)
    sys.exit(2)


def minutes(parser: argparse.ArgumentParser) -> None:
    """Add --minutes, for a comparison that writes its file after each case."""
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="begin no case after so many minutes; cases without results come first",
    )


def missing_first(pairs, results: dict) -> list[tuple[str, str]]:
    """Pairs (title, case) in the order in which to measure them: those without results first."""
    return sorted(pairs, key=lambda pair: pair[1] in results.get(pair[0], {}))


# --------------------------------------------------------------------------------------------------
# results


def processor() -> str:
    """The name of this machine's processor."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor()


def environment(threads: int | None = None) -> dict:
    """Device, versions, date and command, to stand beside every number. threads: of each rank,
    where ranks computed; by default those of this process."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor()}, {threads or torch.get_num_threads()} threads"
    return {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": f"python comparisons/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
    }


def write(name: str, results: dict, args: argparse.Namespace, threads: int | None = None) -> Path:
    """Write NAME.json, the environment first, into the folder of --out. A process that is killed
    leaves the old file or the new one. threads: as in `environment`."""
    path = args.out / f"{name}.json"
    text = json.dumps({"environment": environment(threads), **results}, indent=1) + "\n"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
    return path


def save(name: str, results: dict, args: argparse.Namespace, threads: int | None = None) -> None:
    """`write`, and print where."""
    print(f"written: {write(name, results, args, threads)}", flush=True)


def saved(name: str, args: argparse.Namespace) -> dict:
    """What NAME.json in the folder of --out holds."""
    return json.loads((args.out / f"{name}.json").read_text())


def earlier(name: str, parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict:
    """{title: {case: results}} of NAME.json in the folder of --out, for new cases to be added to.

    Results of another device or of other versions are not mixed with new ones. They end the
    process: one line, exit status 2. With --toy they are forgotten.
    """
    path = args.out / f"{name}.json"
    try:
        found = saved(name, args)
        there = {key: found["environment"][key] for key in SAME} | {"toy": found["toy"]}
        results = found["results"]
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError):
        there, results = {"file": "not written by this command"}, {}
    here = {key: environment()[key] for key in SAME} | {"toy": args.toy}
    if there == here:
        return results
    if not args.toy:
        differs = [key for key in there if there[key] != here.get(key)]
        was = ", ".join(f"{key} {there[key]}" for key in differs)
        now = ", ".join(f"{key} {here[key]}" for key in differs if key in here)
        refuse(
            parser,
            f"{path} has other results ({was}; here {now or 'none'}), which are not mixed with"
            " new ones; name another folder with --out, or move that file away",
        )
    return {}


def one_line(error: Exception) -> str:
    """What went wrong, for a row of a table."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def spread(values) -> dict:
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def format_spread(values: dict, number: str = ".3f") -> str:
    """What `spread` returned, as "median (min to max)". number: the format of each."""
    middle, least, most = (format(values[key], number) for key in ("median", "min", "max"))
    return f"{middle} ({least} to {most})"


def print_results(results: dict) -> None:
    """A line for each: a number, or what `spread` returned."""
    for name, value in results.items():
        text = format_spread(value) if isinstance(value, dict) else f"{value:,.0f}"
        print(f"{name}: {text}")


# --------------------------------------------------------------------------------------------------
# timing


def timed(function) -> float:
    """Seconds of one call, GPU work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed_together(function) -> float:
    """Seconds of one call on all ranks, until the last has finished."""
    dist.barrier()
    return timed(lambda: (function(), dist.barrier()))


def timed_alone(function) -> float:
    """Seconds of one call on rank 0, while the other ranks wait and return 0."""
    dist.barrier()
    seconds = timed(function) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    return seconds


def in_turn(kinds: dict, rounds: int) -> list[dict]:
    """Each round calls every function of `kinds`, in reverse in every other round. Two more rounds
    before them warm up, but for a single round, which is a trial of the code and measures nothing.
    Returns for each round {kind: what its function returned}."""
    warm_up = 2 if rounds > 1 else 0
    results = []
    begin = said = time.monotonic()
    for i in range(-warm_up, rounds):
        order = kinds if i % 2 else reversed(kinds)
        results.append({kind: kinds[kind]() for kind in order})
        now = time.monotonic()
        if now - said > SECONDS_OF_SILENCE and not (dist.is_initialized() and dist.get_rank()):
            said = now
            left = (now - begin) / len(results) * (rounds - 1 - i) / 60
            print(
                f"round {i + 1} of {rounds}, {left:.1f} minutes left", file=sys.stderr, flush=True
            )
    return results[warm_up:]


class Done:
    """Stands in for a collective that was left out."""

    def wait(self):
        pass


@contextlib.contextmanager
def without_all_reduce():
    """While entered, all-reduces of this process return at once and sum nothing: what is timed is
    the computation alone."""
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **options: Done()
    try:
        yield
    finally:
        dist.all_reduce = original


def matmul_flops(dtype: torch.dtype, device: str, n: int = 2048, repeats: int = 9) -> float:
    """FLOP/s of an n × n × n matrix multiplication of random data, the median of several: the peak
    that a model can reach."""
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    a @ b
    return 2 * n**3 / median([timed(lambda: a @ b) for _ in range(repeats)])


# --------------------------------------------------------------------------------------------------
# memory


def optimizer_bytes(optimizer) -> int:
    """Bytes of this rank's optimizer state: fp32 masters, or the low bits that complete bf16
    weights to them, and both moments."""
    kinds = (optimizer.masters, optimizer.low, optimizer.exp_avg, optimizer.exp_avg_sq)
    return sum(tensor.nbytes for kind in kinds for tensor in kind.values())
