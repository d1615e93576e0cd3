"""Every silent bug of course/mutations/ for 100 steps, beside one device without it.

    python -m benchmarks.silent_bugs [--steps 100] [--seeds 3] [--toy] [--out DIR] [--figures DIR]
        [--bugs NAME ...]     measures these and keeps the others of DIR: in float64 a row is the
                              same on every machine, but for early-reduction, which is a race

A GPT (h 64, L 2, a 4, s 64, 8 sequences a step, dropout 0.1, float64) on gloo ranks, in the layout
in which the bug shows. For each bug:

    first           the first tensor that differs from one device's, in the order of execution
    late            the mean loss of the last quarter, minus the right one
    held out        the loss of one device with these weights on unseen text, minus the right one
    norm            the gradient norm of step 1, over the right one
    ranks differ    ranks that should hold the same: gradients, parameters after step 1 and the last

The loss gives a bug away if `late`, or the loss of step 1, is further from the right one than right
runs with other seeds are from each other. A seed draws weights and masks, not text.

Figure: docs/figures/silent_bugs.svg, six of the curves; all are in the JSON
"""

import math
import textwrap
from pathlib import Path

import torch

from benchmarks import report, style
from course import bug_runs, mutations, ranks
from course.bug_runs import late

# Steps of which a point of a curve is the mean.
POINT = 4
# A bug of each kind: of the loss, of gradients, of ranks.
TOY = ("no-g", "no-tied-sum")
# The first difference: what one reads in the table.
KINDS = {
    "initial": "weights before step 1",
    "step 1: output": "forward of step 1",
    "step 1: loss": "loss of step 1",
    "step 1: gradient of": "gradients of step 1",
    "step 1: gradient norm": "gradient norm of step 1",
    "step 1: updated": "update of step 1",
    "step 2": "step 2",
}

# --- measure --------------------------------------------------------------------------------------


def short(value: float) -> float | None:
    """Four digits; None where it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def curve(losses: list[float]) -> list[float]:
    points = [losses[i : i + POINT] for i in range(0, len(losses), POINT)]
    return [short(sum(point) / len(point)) for point in points]


def kind(first: str) -> str:
    """The row of KINDS that the label of a tensor belongs to."""
    return next(name for start, name in KINDS.items() if first.startswith(start))


def measure_right(flags: dict, steps: int, seeds: int) -> tuple[bug_runs.Training, dict]:
    """One device without a bug, and what other seeds make of it."""
    runs = []
    for seed in range(seeds + 1):
        of_seed = flags | (dict(seed=bug_runs.SETTING["seed"] + seed) if seed else {})
        run = bug_runs.train(1, None, of_seed, steps)
        runs.append((run, bug_runs.held_out_loss(of_seed, run.parameters)))
    (one, held_out), *others = runs
    results = {
        "curve": curve(one.losses),
        "late": short(late(one.losses)),
        "held out": short(held_out),
        "loss of other seeds": [short(run.losses[0] / one.losses[0] - 1) for run, _ in others],
        "late of other seeds": [short(late(run.losses) - late(one.losses)) for run, _ in others],
        "held out of other seeds": [short(loss - held_out) for _, loss in others],
    }
    return one, results


def outside(value: float | None, seeds: list[float]) -> bool:
    """Whether this difference from the right run is larger than any between right runs: `seeds` has
    the others', from the same one."""
    return value is None or abs(value) > max(0.0, *seeds) - min(0.0, *seeds)


def measure(bug: mutations.Bug, one: bug_runs.Training, right: dict, steps: int) -> dict:
    """A bug beside one device."""
    flags = bug_runs.flags_of(bug)
    two = bug_runs.train(bug.world, bug.apply, flags, steps)
    row = bug_runs.compare(two, one)
    held_out = bug_runs.held_out_loss(flags, two.parameters) - right["held out"]
    wrong = row["wrong gradients"]
    results = {
        "technique": bug.technique,
        "kind": kind(row["first"]),
        "first": row["first"],
        "held out": short(held_out),
        **{name: short(row[name]) for name in ("loss", "late", "norm", "norms of ranks differ")},
        "wrong gradients": len(wrong),
        "gradients": row["gradients"],
        # A few are named.
        "wrong": {name: short(value) for name, value in wrong.items()} if len(wrong) < 10 else {},
        "ranks differ": [short(value) for value in row["ranks differ"]],
    }
    results["loss gives it away"] = outside(results["late"], right["late of other seeds"]) or (
        outside(results["loss"], right["loss of other seeds"])
    )
    results["weights are worse"] = outside(results["held out"], right["held out of other seeds"])
    results["curve"] = curve(two.losses)
    return results


# --- the tables of docs/bugs.md -------------------------------------------------------------------


def off(norm: float | None) -> bool:
    """A gradient norm, over the right one."""
    return norm is None or abs(norm - 1) > 0.1


def looks_right(row: dict) -> bool:
    """Up to the last layer of step 1, and then the curve."""
    return row["kind"] not in list(KINDS.values())[:3] and not row["loss gives it away"]


def first_output(row: dict, layer: str) -> bool:
    return row["first"].startswith(f"step 1: output of {layer}")


# What one sees, in the order in which one would: (which bugs show it, what separates them). Every
# bug shows one.
SYMPTOMS = {
    "before step 1, the weights are not one device's": (
        lambda row: row["kind"] == "weights before step 1",
        "do replicas differ, or are shards equal that should differ?",
    ),
    "the loss of step 1 is not one device's; the embedding's output differs first": (
        lambda row: first_output(row, "embedding"),
        "right with `--dropout 0`? With `--tp 2` alone? In which part of the sequence, which"
        " samples?",
    ),
    "the same; a block's output differs first": (
        lambda row: first_output(row, "blocks"),
        "a block with experts or without, on which stage? Right with `--dropout 0`?",
    ),
    "the same; the head's output differs first, the loss of each token": (
        lambda row: first_output(row, "head"),
        "too high, or too low by ln t?",
    ),
    "the same; every output is right": (
        lambda row: row["kind"] == "loss of step 1",
        "a whole factor, or a little? Gradients right or wrong?",
    ),
    "the loss of step 1 is right, later it is too high": (
        lambda row: row["kind"] not in list(KINDS.values())[:3] and row["loss gives it away"],
        "which gradients of step 1 are wrong? If none, is the loss of step 2?",
    ),
    "the curve looks right, and one device finds the saved weights worse": (
        lambda row: looks_right(row) and row["weights are worse"],
        "do ranks that should hold the same differ, and in which tensors?",
    ),
    "curve and weights look right, the gradient norm of step 1 is off by more than a tenth": (
        lambda row: looks_right(row) and not row["weights are worse"] and off(row["norm"]),
        "a whole factor or none? Are gradients wrong, which, or the norm alone?",
    ),
    "curve, weights and norm look right": (
        lambda row: looks_right(row) and not row["weights are worse"] and not off(row["norm"]),
        "only a comparison of tensors with one device finds these: which gradients?",
    ),
}
# What some show beside it.
SIGNS = {
    "ranks that should hold the same weights do not": (
        lambda row: any(row["ranks differ"]),
        "from the start, after the first update, or in a few tensors alone?",
    ),
    "ranks log different gradient norms": (
        lambda row: row["norms of ranks differ"] > 1e-6,
        "if their gradients are equal, the norm is not summed over shards or stages",
    ),
}


def table_of_symptoms(results: dict) -> str:
    """What one sees -> candidates -> the check that separates them, in Markdown."""
    lines = ["| what you see | candidates | what separates them |", "|---|---|---|"]
    for symptom, (shows, check) in (SYMPTOMS | SIGNS).items():
        names = [f"[{name}](#{name})" for name, row in results["bugs"].items() if shows(row)]
        lines.append(f"| {symptom} | {', '.join(names)} | {check} |")
    return "\n".join(lines)


# A word in a parameter's name: the part of the model that it belongs to; the first counts.
PLACES = dict(embedding="embedding", norm="norms", router="routers", mlp="MLPs") | {"": "attention"}


def words_of_gradients(row: dict) -> str:
    """All, none, or how many and where."""
    count, total = row["wrong gradients"], row["gradients"]
    # The gradients of key biases, which are 0, may be wrong too.
    if not count or count >= total:
        return "all" if count else "right"
    # A name has an empty word.
    places = {next(PLACES[word] for word in PLACES if word in name) for name in row["wrong"]}
    return f"{count} of {total}" + (f": {', '.join(sorted(places))}" if 0 < len(places) < 4 else "")


def words_of_ranks(row: dict) -> str:
    signs = "gradients differ", "weights differ", "weights differ later", "norms differ"
    differ = *row["ranks differ"], row["norms of ranks differ"] > 1e-6
    return next((sign for sign, differs in zip(signs, differ) if differs), "agree")


def signed(value: float | None, unit: str = "") -> str:
    """0 where it is only rounding."""
    if value is None:
        return "not finite"
    text = f"{value:+.2f}"
    if abs(value) < bug_runs.ROUNDING:
        return "0"
    return (text if float(text) else text[1:]) + unit


def row_of_table(name: str, row: dict) -> str:
    loss, held_out = signed(row["late"]), signed(row["held out"])
    cells = [
        f"[{name}](#{name})",
        signed(row["loss"] and 100 * row["loss"], "%"),
        f"**{loss}**" if row["loss gives it away"] else loss,
        f"**{held_out}**" if row["weights are worse"] else held_out,
        f"{row['norm']:.3f}" if row["norm"] is not None else "not finite",
        words_of_gradients(row),
        words_of_ranks(row),
    ]
    return f"| {' | '.join(cells)} |"


def tables(results: dict) -> dict[str, str]:
    """Kind -> table in Markdown, bugs in their order in course/mutations/."""
    head = "| bug | loss, step 1 | loss, late | held out | norm | gradients | ranks |\n"
    head += "|---|---|---|---|---|---|---|"
    found = {}
    for name in KINDS.values():
        bugs = results["bugs"].items()
        if rows := [row_of_table(bug, row) for bug, row in bugs if row["kind"] == name]:
            found[name] = "\n".join([head, *rows])
    return found


# --- the figure -----------------------------------------------------------------------------------


# Four that look right, and two that do not.
SHOWN = "no-gradient-sum no-tied-sum no-norm-gradient-sum mean-of-means no-f no-all-gather".split()


def draw_bug(axes, name: str, row: dict, right: list[float]) -> None:
    """A panel: the right curve, and that of the bug."""
    x = [POINT * i + POINT / 2 for i in range(len(right))]
    axes.plot(x, right, color=style.COLOURS["one device"], linewidth=4, alpha=0.35)
    seen = row["loss gives it away"]
    colour = style.SERIES[1 if seen else 0]
    wrong = [math.nan if y is None else y for y in row["curve"]]
    axes.plot(x, wrong, color=colour, linestyle="--" if seen else "-")
    removes = textwrap.fill(mutations.bugs()[name].removes, 46)
    title = f"{name}: {'seen' if seen else 'looks right'}\n{removes}"
    axes.set_title(title, fontsize=style.SMALL, color=style.ink(colour))


def draw(results: dict, figures: Path) -> None:
    """results: what silent_bugs.json holds."""
    bugs = results["bugs"]
    figure, grid = style.figure(4.6, 2, 3, sharex=True, sharey=True)
    shown = [name for name in SHOWN if name in bugs]
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, name in zip(grid.flat, shown):
        draw_bug(axes, name, bugs[name], results["right"][bugs[name]["right"]]["curve"])
    for axes in grid[:, 0]:
        axes.set_ylabel("loss")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    fine = sum(not row["loss gives it away"] for row in bugs.values())
    figure.suptitle(
        f"{len(shown)} of {len(bugs)} silent bugs. Thick and grey: the loss without the bug. Of all"
        f" {len(bugs)}, {fine} stay as near to it as another seed does."
    )
    style.save(figure, figures / "silent_bugs.svg")


def main():
    parser = report.arguments(__doc__, steps=100, seeds=3)
    parser.add_argument("--bugs", nargs="+", default=[], help="measure these, keep the others")
    args = report.parse(parser, steps=POINT, seeds=1)
    torch.set_num_threads(1)
    results = {"toy": args.toy, "steps": args.steps, "right": {}, "bugs": {}}
    kept = results
    if args.bugs:
        kept = report.saved("silent_bugs", args)
        results["kept"] = kept["environment"]
    ones = {}
    for name, bug in mutations.bugs().items():
        if name in kept["bugs"] and name not in args.bugs:
            row = results["bugs"][name] = kept["bugs"][name]
            results["right"][row["right"]] = kept["right"][row["right"]]
            continue
        if args.toy and name not in TOY:
            continue
        flags = mutations.of_one_device(bug_runs.flags_of(bug))
        key = " ".join(f"{flag} {value}" for flag, value in flags.items()) or "dense"
        if key not in ones:
            ones[key], results["right"][key] = measure_right(flags, args.steps, args.seeds)
        row = measure(bug, ones[key], results["right"][key], args.steps)
        results["bugs"][name] = {"right": key, **row}
        print(f"{name}: first {row['first']}; {row_of_table(name, row)}", flush=True)
    report.finish("silent_bugs", results, args, draw, threads=1)


if __name__ == "__main__":
    ranks.preload("train")
    main()
