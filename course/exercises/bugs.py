"""A gallery of silent bugs: distributed training with one mechanism removed.

Nothing crashes, and nearly always the loss falls. Each bug is a few lines that change this project
(course/mutations/). This file trains a small GPT with the bug, beside one device without it. In
float64 a correct layout gives one device's numbers to 1e-10, so every difference shown is the bug.

    python -m course.exercises.bugs                    the list: name, and what is removed
    python -m course.exercises.bugs no-tied-sum        one bug: its code, losses, gradients, ranks
    python -m benchmarks.redraw silent_bugs            draws six of the curves

docs/bugs.md starts from the other end: what you see in a run, and which bugs show it.

Not covered: bugs that crash or hang (docs/hangs.md), and those of precision, for which there is the
loss scale.
"""

import argparse
import difflib
import inspect
import json
import math
import re
import sys
import textwrap
from itertools import groupby
from pathlib import Path

import torch

from base import terminal
from course import bug_runs, form, mutations, ranks
from course.mutations import Bug

ROOT = Path(__file__).parent.parent.parent
# The steps that are shown. The learning rate follows the schedule of bug_runs.SETTING.
STEPS = 30
# The width of the labels before the paragraphs that `show` prints.
LABEL = 12

# --- what is known without a run ------------------------------------------------------------------


def say(label: str, text: str, margin: int = LABEL) -> None:
    """A paragraph, its label before it."""
    indent = " " * margin
    print(textwrap.fill(text, 100, initial_indent=label.ljust(margin), subsequent_indent=indent))


def list_bugs() -> None:
    """Every bug, by technique."""
    for technique, group in groupby(mutations.bugs().values(), lambda bug: bug.technique):
        print(f"\n{technique}")
        for bug in group:
            say(f"  {bug.name}", bug.removes, 36)


def code_of(bug: Bug, most: int = 7) -> list[str]:
    """The changed lines: the function without its decorators and docstring, under the name of what
    it replaces."""
    head, _, body = inspect.getsource(bug.function).split('"""')
    lines = textwrap.dedent(body).strip("\n").split("\n")
    if hasattr(bug.function, "replaces"):
        owner, attribute = bug.function.replaces
        signature = head[head.index(f"def {bug.function.__name__}(") :].rstrip()
        signature = signature.replace(bug.function.__name__, f"{owner.__name__}.{attribute}", 1)
        lines = [*signature.split("\n"), *(f"    {line}".rstrip() for line in lines)]
    return lines if len(lines) <= most else [*lines[: most - 1], "..."]


def entry(name: str) -> dict[str, str]:
    """The paragraphs of a bug in docs/bugs.md: label -> text without links."""
    text = (ROOT / "docs" / "bugs.md").read_text()
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)[1]
    section = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", section)
    paragraphs = re.findall(r"^- \*([^*]+)\*: (.*?)(?=^-|\Z)", section, re.MULTILINE | re.DOTALL)
    return {label: " ".join(body.split()) for label, body in paragraphs}


# --- one bug --------------------------------------------------------------------------------------


def layout(bug: Bug, flags: dict) -> str:
    """2 ranks, --tp 2 --sequence-parallel"""
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    return f"{bug.world} ranks, {words.replace(' True', '')}"


def show_losses(one: list[float], two: list[float]) -> None:
    """Both, and bars of the one with the bug; | is where the right one is."""
    print(f"{'LOSS':{LABEL}}step    right     wrong")
    top = 1.2 * max(one)
    for i in sorted({0, *range(4, len(one), 5), len(one) - 1}):
        bar = list(form.bar(min(two[i], top) if math.isfinite(two[i]) else top, top, 60).ljust(61))
        bar[len(form.bar(one[i], top, 60))] = "|"
        print(f"{'':{LABEL}}{i + 1:4}   {one[i]:6.3f}    {two[i]:6.3f}   {''.join(bar).rstrip()}")


def layers(names) -> dict[str, list[str]]:
    """Names of parameters by layer: embedding, blocks.0, .., head."""
    found = {}
    for name in names:
        parts = name.split(".")
        found.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else 1]), []).append(name)
    return found


def gradient_lines(wrong: dict[str, float], names) -> list[str]:
    """One line for each layer, from the last to the first. wrong: name of a gradient -> largest
    difference, as a share of its largest number; infinite where ranks hold different numbers."""
    of_layers = layers(names)
    blocks = sorted((layer for layer in of_layers if layer.startswith("blocks")), reverse=True)
    lines = []
    others = sorted(of_layers.keys() - {"head", *blocks, "embedding"})
    for layer in ("head", *blocks, "embedding", *others):
        count = len(of_layers[layer])
        of_layer = {name: wrong[name] for name in of_layers[layer] if name in wrong}
        text = f"  {layer:11}{layer_text(layer, of_layer, count)}"
        lines += textwrap.wrap(text, 100 - LABEL, subsequent_indent=" " * 13)
    return lines


def layer_text(layer: str, wrong: dict[str, float], count: int) -> str:
    """What is wrong among the `count` gradients of a layer."""
    if not wrong:
        return f"{count} of {count} right"
    finite = [apart for apart in wrong.values() if math.isfinite(apart)]
    text = f"{len(wrong)} of {count} wrong"
    if finite:
        text += f", by up to {max(finite):.0e} of its largest number"
    if len(finite) < len(wrong):
        text += f"; {len(wrong) - len(finite)} differ between ranks"
    if len(wrong) <= count / 2:
        text += ": " + ", ".join(name.removeprefix(layer + ".") for name in wrong)
    return text


def show(bug: Bug, steps: int) -> None:
    """Train with the bug and without, and print everything."""
    flags = bug_runs.flags_of(bug)
    print(f"{bug.name}   {layout(bug, flags)}")
    say("REMOVED", bug.removes)
    for line in code_of(bug):
        print((" " * LABEL + line).rstrip())
    sys.stdout.flush()
    one_flags = mutations.of_one_device(flags)
    one = bug_runs.train(1, None, one_flags, steps)
    two = bug_runs.train(bug.world, bug.apply, flags, steps)
    row = bug_runs.compare(two, one)
    show_losses(one.losses, two.losses)
    print(f"{'GRADIENTS':{LABEL}}of step 1, tensors of each layer, from the last to the first")
    for line in gradient_lines(row["wrong gradients"], one.gradients):
        print(" " * LABEL + line)
    say("", f"norm of all: {row['norm']:.3f} of the right one")
    gradients, updated, parameters = row["ranks differ"]
    say(
        "RANKS",
        f"that should hold the same differ by {gradients:.2g} in gradients,"
        f" {updated:.2g} in parameters after step 1, {parameters:.2g} after step {steps}",
    )
    right, wrong = (bug_runs.held_out_loss(flags, run.parameters) for run in (one, two))
    say("HELD OUT", f"loss of one device with these weights: right {right:.3f}, wrong {wrong:.3f}")
    say("SEEN BY", f"verify.py: {row['first']}; test_gate_sees[{bug.name}]; {glance(bug.name)}")
    for label, text in entry(bug.name).items():
        say(label.upper(), text)


def glance(name: str) -> str:
    """Whether the loss curve gives a bug away, as benchmarks/silent_bugs.py has measured."""
    results = json.loads((ROOT / "benchmarks" / "results" / "silent_bugs.json").read_text())
    row = results["bugs"][name]
    seeds = [0.0, *results["right"][row["right"]]["late of other seeds"]]
    verdict = "yes" if row["loss gives it away"] else "no"
    late = "not finite" if row["late"] is None else f"{row['late']:+.2f}"
    return (
        f"the loss curve: {verdict} ({late} after {results['steps']} steps; seeds alone differ by"
        f" {max(seeds) - min(seeds):.2f})"
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 for a name that is not in the list. argv: default, that of
    this process."""
    parser = argparse.ArgumentParser(
        prog="python -m course.exercises.bugs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="a bug of the list")
    parser.add_argument("--steps", type=int, help=f"of training (default: {STEPS})")
    args = parser.parse_args(argv)
    if args.steps and not args.name:
        parser.error(f"--steps {args.steps}: is for one bug; name it")
    steps = STEPS if args.steps is None else args.steps
    ranks.preload("train")
    if steps < 1:
        parser.error(f"--steps {steps}: must be at least 1")
    bugs = mutations.bugs()
    if not args.name:
        list_bugs()
    elif args.name not in bugs:
        near = ", ".join(difflib.get_close_matches(args.name, bugs, 3, 0.4))
        near = near or "python -m course.exercises.bugs lists them"
        print(f"bugs.py: {args.name}: no such bug; near: {near}", file=sys.stderr)
        return 2
    else:
        torch.set_num_threads(1)
        show(bugs[args.name], steps)
    return 0


if __name__ == "__main__":
    terminal.command(main)
