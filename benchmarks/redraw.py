"""Draw every figure of a comparison again from benchmarks/results/. Nothing is measured.

    python -m benchmarks.redraw                                 all, into docs/figures/
    python -m benchmarks.redraw layouts --figures /tmp/look     those of layouts.json

A comparison ends with the same `draw`, from the file that it has written.
"""

import argparse
import importlib
import json
from pathlib import Path

from base import terminal
from benchmarks import report

# The module whose `draw` reads NAME.json, where it has another name.
DRAWN_BY = {"gpu": "gpu_table", "prompt_tuning": "fine_tuning"} | {
    f"loss_{name}": "loss_of_variants" for name in ("state", "fp8", "experts", "muon")
}


def redraw(name: str, figures: Path) -> None:
    """Draw the figures of NAME.json into a folder."""
    results = json.loads((report.RESULTS / f"{name}.json").read_text())
    importlib.import_module(f"benchmarks.{DRAWN_BY.get(name, name)}").draw(results, figures)


def measured() -> list[str]:
    """The names of the results that have a figure. Those of a GPU may not be there yet."""
    names = []
    for path in sorted(report.RESULTS.glob("*.json")):
        script = report.HERE / f"{DRAWN_BY.get(path.stem, path.stem)}.py"
        if script.exists() and "\ndef draw(" in script.read_text():
            names.append(path.stem)
    return names


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(measured()))
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", default=report.ROOT / "docs" / "figures"
    )
    args = parser.parse_args()
    report.check_names(parser, args.names, measured())
    args.figures.mkdir(parents=True, exist_ok=True)
    for name in args.names or measured():
        redraw(name, args.figures)
        print(f"drawn: {name}", flush=True)


if __name__ == "__main__":
    terminal.run(main)
