"""What every comparison shares: its flags, its timing, its tables, and the files that it writes.

    args = report.parse(report.arguments(__doc__, rounds=15), rounds=1)   # with --toy one round
    times = report.in_turn({"ours": ..., "theirs": ...}, args.rounds)
    results = {"ratio": report.ratio(times, "ours", "theirs")}
    report.finish("name", results, args, draw)     # NAME.json, with device and versions; figures

Two things are compared in one run, in turn, and by the median of their ratios: the speed of a
shared machine changes from minute to minute, a ratio within a round hardly does.
"""

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"

# Git ignores it.
SCRATCH = ROOT / "runs" / "benchmarks"
# Flags that are at least 1.
COUNTS = {
    "rounds": "in each of which every contender is measured, in turn",
    "steps": "of training",
    "seeds": "runs that differ in nothing else",
    "threads": "of each process",
    "ranks": "processes of this machine",
    "sequences": "of held-out text",
}
# Between two lines about how far a comparison is.
SECONDS_OF_SILENCE = 10
# Results in one file have these in common.
SAME = "device", "torch", "python"
SPREAD = "median", "min", "max"

# --- flags ----------------------------------------------------------------------------------------


def arguments(doc: str, **counts: int | list[int]) -> argparse.ArgumentParser:
    """A parser with the flags that every comparison has: --toy, --out and --figures; and a flag for
    each whole number, or list of these, in `counts`, with its default."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    toy = "tiny sizes: runs every part in seconds; the numbers mean nothing"
    parser.add_argument("--toy", action="store_true", help=toy)
    out = "folder of NAME.json (default: runs/benchmarks; with --toy runs/benchmarks/toy)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    figures = "folder of NAME.svg (default: that of --out)"
    parser.add_argument("--figures", type=Path, metavar="DIR", help=figures)
    for name, default in counts.items():
        words = f"{COUNTS.get(name, '')} (default: {default})"
        many = dict(nargs="+") if isinstance(default, list) else {}
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=words, **many)
    return parser


def device(parser: argparse.ArgumentParser) -> None:
    """Add --device: a GPU where there is one."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def parse(parser: argparse.ArgumentParser, **toy) -> argparse.Namespace:
    """The flags of this process, with the folders made; those in `toy` have these values with
    --toy. A flag that cannot be accepted ends the process: one line, exit status 2."""
    args = parser.parse_args()
    args.out = args.out or (SCRATCH / "toy" if args.toy else SCRATCH)
    args.figures = args.figures or args.out
    for name in COUNTS:
        value = getattr(args, name, 1)
        if isinstance(value, int) and value < 1:
            refuse(parser, f"--{name} {value}: must be at least 1")
    for flag, folder in (("--out", args.out), ("--figures", args.figures)):
        if args.toy and folder.resolve() in (RESULTS, ROOT / "docs" / "figures"):
            rule = "--toy does not overwrite measured results; name another folder"
            refuse(parser, f"{flag} {folder}: {rule}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            refuse(parser, f"{flag} {folder}: {e.strerror}; name a folder that can be written")
    if args.toy:
        vars(args).update(toy)
    return args


def refuse(parser: argparse.ArgumentParser, message: str) -> None:
    """One line on stderr, exit status 2."""
    print(f"{parser.prog}: {message}", file=sys.stderr)
    sys.exit(2)


def check_names(parser: argparse.ArgumentParser, names: list[str], known) -> None:
    """Refuse unknown words without a flag. (choices= would refuse that there are none.)"""
    if unknown := [name for name in names if name not in known]:
        refuse(parser, f"{', '.join(unknown)}: not known; there are {', '.join(known)}")


# --- results --------------------------------------------------------------------------------------


def processor() -> str:
    """The name of this machine's processor."""
    if sys.platform != "linux":
        return platform.processor()
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return name[1].strip() if name else platform.processor()


def environment(threads: int | None = None) -> dict:
    """Device, versions, date and command, to stand beside every number. threads: of each rank,
    where ranks computed; by default those of this process."""
    device = f"{processor()}, {threads or torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def replace(path: Path, content: dict, default: Callable | None = None) -> None:
    """Write a JSON file. A process that is killed leaves the old file or the new one. default: as
    of json.dumps."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, default=default) + "\n")
    os.replace(temporary, path)


def write(name: str, results: dict, args: argparse.Namespace, threads: int | None = None) -> Path:
    """Write NAME.json, the environment first, into the folder of --out. threads: as in
    `environment`."""
    path = args.out / f"{name}.json"
    replace(path, {"environment": environment(threads), **results})
    return path


def saved(name: str, args: argparse.Namespace) -> dict:
    """What NAME.json in the folder of --out holds."""
    return json.loads((args.out / f"{name}.json").read_text())


def finish(name: str, results: dict, args: argparse.Namespace, draw=None, threads=None) -> None:
    """`write`, print where, and draw the figures, if there are any, from what was written."""
    print(f"written: {write(name, results, args, threads)}", flush=True)
    if draw:
        draw(saved(name, args), args.figures)


def earlier(name: str, parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict:
    """{title: {case: results}} of NAME.json in the folder of --out, for new cases to be added to.

    Results of another device or of other versions are not mixed with new ones. They end the
    process: one line, exit status 2. With --toy they are forgotten.
    """
    path = args.out / f"{name}.json"
    here = {key: environment()[key] for key in SAME} | {"toy": args.toy}
    try:
        found = saved(name, args)
        there = {key: found["environment"][key] for key in SAME} | {"toy": found["toy"]}
        if there == here:
            return found["results"]
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError):
        there = {"file": "not written by this command"}
    if not args.toy:
        differs = [f"{key} {value}" for key, value in there.items() if value != here.get(key)]
        refuse(
            parser,
            f"{path} has other results ({', '.join(differs)}), which are not mixed with new ones;"
            " name another folder with --out, or move that file away",
        )
    return {}


def table_at(results: dict, keys) -> dict:
    """The nested dictionary to which these keys lead, made where it is missing."""
    for key in keys:
        results = results.setdefault(key, {})
    return results


def note(name: str, args: argparse.Namespace, *keys, measure: Callable) -> None:
    """Measure what NAME.json does not have yet, and save it. keys: of the nested dictionaries on
    the way to it. The file is read again after: another process may have added its own."""
    *way, last = map(str, keys)

    def read() -> dict:
        try:
            return saved(name, args)
        except FileNotFoundError:
            return {}
        except ValueError as e:
            sys.exit(f"{name}.json: {e}; --fresh measures everything again")

    if last not in table_at(read(), way):
        value = measure()
        results = read()
        table_at(results, way)[last] = value
        print(*keys, value, flush=True)
        results.pop("environment", None)
        write(name, results, args)


def one_line(error: Exception) -> str:
    """What went wrong, for a row of a table."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:160]


def faulty() -> bool:
    """Whether the GPU serves this process no more, as after an access to a wrong address."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.ones(1, device="cuda").item()
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# --- numbers, and tables of them ------------------------------------------------------------------


def spread(values) -> dict:
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def ratio(times: list[dict], one: str, other: str, factor: float = 1) -> dict:
    """The spread over rounds of factor * (what `one` gave) / (what `other` gave in that round)."""
    return spread([factor * t[one] / t[other] for t in times])


def scaled(values: dict, factor: float) -> dict:
    """A spread in another unit."""
    return {key: factor * values[key] for key in SPREAD}


def format_spread(values: dict, number: str = ".3f") -> str:
    """What `spread` returned, as "median (min to max)". number: the format of each."""
    middle, least, most = (format(values[key], number) for key in SPREAD)
    return f"{middle} ({least} to {most})"


def text_of(value) -> str:
    """Words, a number, what `spread` returned, more of these by name, or a dash for what is not
    there."""
    if isinstance(value, dict):
        if "median" not in value:
            return ", ".join(f"{name} {text_of(x)}" for name, x in value.items())
        return format_spread(value, ",.0f" if value["median"] >= 100 else ".4g")
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.5g}"
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else str(value)


class Table:
    """Prints rows in Markdown as they come, and before the first the names of the columns."""

    def __init__(self, rows: list[dict] = ()):
        self.has_head = False
        for row in rows:
            self.row(row)

    def row(self, cells: dict) -> None:
        """cells: {column: what `text_of` takes}"""
        if not self.has_head:
            print(f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|")
        self.has_head = True
        print(f"| {' | '.join(map(text_of, cells.values()))} |", flush=True)


def print_results(results: dict) -> None:
    """A line for each."""
    for name, value in results.items():
        print(f"{name}: {text_of(value)}")


# --- timing ---------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function) -> float:
    """Seconds of one call, GPU work included."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def timed_together(function) -> float:
    """Seconds of one call on all ranks, until the last has finished."""
    dist.barrier()
    return timed(lambda: (function(), dist.barrier()))


def in_turn(contenders: dict, rounds: int) -> list[dict]:
    """Each round calls every function of `contenders`, in reverse in every other round. Two more
    rounds before them warm up, but for a single round, which is a trial of the code and measures
    nothing. Returns for each round {contender: what its function returned}."""
    warm_up = 2 if rounds > 1 else 0
    results = []
    begin = said = time.monotonic()
    for i in range(-warm_up, rounds):
        order = contenders if i % 2 else reversed(contenders)
        results.append({name: contenders[name]() for name in order})
        now = time.monotonic()
        if now - said > SECONDS_OF_SILENCE and not (dist.is_initialized() and dist.get_rank()):
            said = now
            left = (now - begin) / len(results) * (rounds - 1 - i) / 60
            line = f"round {i + 1} of {rounds}, {left:.1f} minutes left"
            print(line, file=sys.stderr, flush=True)
    return results[warm_up:]


def without_all_reduce():
    """A context in which all-reduces of this process return at once and sum nothing: what is timed
    is the computation alone."""
    done = SimpleNamespace(wait=lambda: None)
    return mock.patch.object(dist, "all_reduce", lambda *args, **options: done)


def matmul_flops(dtype: torch.dtype, device: str, n: int = 2048, repeats: int = 9) -> float:
    """FLOP/s of an n × n × n matrix multiplication of random data, the median of several: the peak
    that a model can reach."""
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    a @ b
    return 2 * n**3 / median([timed(lambda: a @ b) for _ in range(repeats)])
