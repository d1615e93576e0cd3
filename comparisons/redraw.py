"""Draw every figure again from the results in comparisons/*.json. Nothing is measured.

    python comparisons/redraw.py                                 all, into figures/
    python comparisons/redraw.py layouts --figures /tmp/look     those of layouts.json

A comparison ends with the same `draw`, from the file that it has written.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
# the root first: lessons and comparisons share names
sys.path[:0] = [str(HERE.parent), str(HERE)]

from base import terminal  # noqa: E402

# NAME.json: the comparison whose `draw` reads it
DRAWN_BY = {
    "activation_memory": "activation_memory",
    "context": "context",
    "fine_tuning": "fine_tuning",
    "packing": "packing",
    "fp8": "fp8",
    "fp8_speed": "fp8",
    "fp8_training": "fp8_training",
    "fsdp": "fsdp",
    "generation": "generation",
    "kernels": "kernels",
    "layouts": "layouts",
    "moe_training": "moe",
    "pipeline": "pipeline",
    "planner": "planner",
    "preference": "preference",
    "prompt_tuning": "prompt_tuning",
    "quantization": "quantization",
    "recompute_overhead": "recompute_overhead",
    "rollout": "rollout",
    "silent_bugs": "silent_bugs",
    "training_step": "training_step",
    "zero_memory": "zero_memory",
}


def redraw(name: str, figures: Path) -> None:
    """Draw the figures of NAME.json into a folder."""
    results = json.loads((HERE / f"{name}.json").read_text())
    importlib.import_module(f"comparisons.{DRAWN_BY[name]}").draw(results, figures)


def measured() -> list[str]:
    """The names of the results that are there. Those of a GPU may not be yet."""
    return [name for name in DRAWN_BY if (HERE / f"{name}.json").exists()]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # no choices=: it would refuse the empty list
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(measured()))
    parser.add_argument("--figures", type=Path, metavar="DIR", default=HERE.parent / "figures")
    args = parser.parse_args()
    unknown = set(args.names) - set(measured())
    if unknown:
        parser.error(f"no results to draw: {', '.join(unknown)}; there are {', '.join(measured())}")
    args.figures.mkdir(parents=True, exist_ok=True)
    for name in args.names or measured():
        redraw(name, args.figures)
        print(f"drawn: {name}", flush=True)


if __name__ == "__main__":
    terminal.run(main)
