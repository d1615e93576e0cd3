"""What every comparison shares: where and when it ran, medians, and the file that the README's
numbers come from."""

import argparse
import json
import platform
import sys
import time
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).parent
# git ignores it
SCRATCH = HERE.parent / "runs" / "comparisons"
# flags that are at least 1
COUNTS = "rounds", "steps", "seeds", "threads", "ranks"


def arguments(doc: str) -> argparse.ArgumentParser:
    """A parser with the flags that every comparison has: --toy, --out and --figures."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="tiny sizes, in seconds, to see that all of it runs; the numbers say nothing",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of NAME.json (default: runs/comparisons, of --toy runs/comparisons/toy)",
    )
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="folder of NAME.png (default: that of --out)"
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags of this process, with the folders made. Exits with status 2, and one line, where a
    flag cannot be."""
    args = parser.parse_args()
    args.out = args.out or (SCRATCH / "toy" if args.toy else SCRATCH)
    args.figures = args.figures or args.out
    for name in COUNTS:
        value = getattr(args, name, 1)
        if isinstance(value, int) and value < 1:
            refuse(parser, f"--{name} {value}: must be at least 1")
    for flag, folder in (("--out", args.out), ("--figures", args.figures)):
        if args.toy and folder.resolve() in (HERE.resolve(), HERE.resolve().parent / "figures"):
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


def environment() -> dict:
    """Device, versions, date and command, to stand beside every number."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        names = (
            [
                line.split(":")[1].strip()
                for line in open("/proc/cpuinfo")
                if line.startswith("model name")
            ]
            if sys.platform == "linux"
            else []
        )
        device = f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"
    return {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "command": f"python comparisons/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
    }


def save(name: str, results: dict, args: argparse.Namespace) -> None:
    """Write NAME.json into the folder of --out, and say where."""
    path = args.out / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    print(f"written: {path}", flush=True)


def timed(function) -> float:
    """Seconds of one call, GPU work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(kinds: dict, rounds: int) -> list[dict]:
    """Each round calls every function of `kinds`, every other one in reverse, after two rounds to
    warm up: [{name: what it returned}]"""
    results = [
        {kind: kinds[kind]() for kind in (kinds if i % 2 else reversed(kinds))}
        for i in range(-2, rounds)
    ]
    return results[2:]


class Done:
    """Stands in for a collective that was left out."""

    def wait(self):
        pass


def median(values) -> float:
    values = sorted(values)
    return (
        values[len(values) // 2]
        if len(values) % 2
        else (values[len(values) // 2 - 1] + values[len(values) // 2]) / 2
    )


def spread(values) -> dict:
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def matmul_flops(dtype: torch.dtype, device: str, n: int = 2048, repeats: int = 9) -> float:
    """FLOP/s of an n × n × n matrix multiplication of random data, the median of several: the peak
    that a model can reach."""
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    a @ b
    return 2 * n**3 / median([timed(lambda: a @ b) for _ in range(repeats)])
