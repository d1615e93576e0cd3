"""The order of layouts on this machine: as the planner predicts it, and as measured.

    python comparisons/planner_here.py [--ranks 4] [--rounds 2] [--steps 8] [--toy] [--out DIR]

    shape A: the layouts of comparisons/layouts.py
    layout                      predicted, s   measured, s   ratio   order
    pp 4, 1F1B                         0.585         0.575    1.02    1  1
    ...
    Spearman correlation of the orders 0.97

Two shapes of a model. Before each, planning/measure.py measures the machine; then every layout of
comparisons/layouts.py runs for some steps, in turn, for --rounds rounds. No constant is fitted to
these runs. Give it a machine on which nothing else runs.

comparisons/planner.py draws planner_here.json.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
from layouts import ALWAYS, SHAPES, layouts
from report import format_spread, median, spread

import planner
from planning import measure, plan, try_layouts
from planning.inputs import Machine, software_of
from run import flags as train_flags

# name -> flags over those of comparisons/layouts.py
MODELS = {"8 layers of 256": "", "4 layers of 512": "--num-layers 4 --hidden-size 512"}
QUICK = measure.Sizes(hidden=32, sequence=16, added=2**12, message=2**12, seconds=0.01, repeats=2)


def predict(machine: Machine, ranks: int, words: list[str]) -> dict[str, float]:
    """Seconds of a step by part, of train.py with these flags."""
    config = train_flags.parse(words, 0)
    layout = plan.layout_of(config, ranks)
    return planner.step_time(machine, software_of(machine), config.model_config(), layout)


def of_model(machine: Machine, common: list[str], args) -> list[dict]:
    """A row for each layout."""
    todo = layouts(args.ranks)
    if args.toy:
        todo = dict(list(todo.items())[:2])
    seconds = {name: [] for name in todo}
    for i in range(args.rounds):
        for name, (ranks, flags) in todo.items():
            words = [*common, *flags.split()]
            seconds[name].append(try_layouts.step_seconds(ranks, words, args.steps))
            text = f"round {i + 1}/{args.rounds}  {name:<44}{seconds[name][-1]:>8.3f} s"
            print(text, file=sys.stderr, flush=True)
    rows = []
    for name, (ranks, flags) in todo.items():
        parts = predict(machine, ranks, [*common, *flags.split()])
        rows.append(
            {
                "name": name,
                "flags": flags,
                "predicted": sum(parts.values()),
                "measured": median(seconds[name]),
                "rounds": spread(seconds[name]),
                "parts": parts,
            }
        )
    return rows


def show(name: str, found: dict) -> None:
    rows = found["rows"]
    print(f"\n{name}, {found['machine']['processors']} processors")
    names = [row["name"] for row in rows]
    predicted = [row["predicted"] for row in rows]
    measured = [row["measured"] for row in rows]
    print("\n".join(try_layouts.table(names, predicted, measured)))
    print(f"Spearman correlation of the orders {found['spearman']:.3f}")
    worst = max(rows, key=lambda row: row["rounds"]["max"] / row["rounds"]["min"])
    print(f"rounds differ most for {worst['name']}: {format_spread(worst['rounds'])} s")


def arguments():
    parser = report.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    args = report.parse(parser)
    if args.toy:
        args.rounds, args.steps = 1, try_layouts.WARMUP + 1
    if args.steps <= try_layouts.WARMUP:
        first = try_layouts.WARMUP
        report.refuse(parser, f"--steps {args.steps}: the first {first} do not count; name more")
    return args


def main() -> int:
    args = arguments()
    results = {}
    for name, over in MODELS.items():
        if args.toy:
            # the same for both
            over = ""
        machine = measure.measure(args.ranks, QUICK if args.toy else None)
        print("\n".join(measure.describe(machine)), file=sys.stderr, flush=True)
        shape = SHAPES["toy" if args.toy else "cpu"]
        common = f"{ALWAYS} {shape} --device cpu --precision fp32 {over}".split()
        rows = of_model(machine, common, args)
        predicted = [row["predicted"] for row in rows]
        measured = [row["measured"] for row in rows]
        results[name] = {
            "flags": common,
            "machine": dataclasses.asdict(machine),
            "spearman": try_layouts.spearman(predicted, measured),
            "rows": rows,
        }
        show(name, results[name])
    report.save("planner_here", {"ranks": args.ranks, "models": results}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
