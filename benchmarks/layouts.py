"""The same training run under every layout: tokens/s, peak memory, and one loss.

    python -m benchmarks.layouts [--ranks 4] [--rounds 3] [--steps 8] [--toy] [--out DIR]
    python -m benchmarks.layouts -- --hidden-size 768       flags after -- go to every train.py

Each layout but the first is `torchrun train.py` on N ranks: GPUs if there are N, else CPU ranks
that share the cores. All have the same model, global batch, micro-batch size and seed, and take
turns. Tokens/s of a round are the median over its steps, the first 3 left out.

Peak memory is the bytes of tensors on the rank that has most; on CPUs those of the first two steps
are counted (planning/counters.py), for the process has libraries beside them.

The losses of all steps must be those of one device: to 1e-4 in fp32, 2e-2 in bf16. Rows marked with
* compute something else: experts are compared with each other, bf16 moments with nothing.

Figures: docs/figures/same_loss.svg, one device and six layouts; docs/figures/layouts.svg, all
"""

import itertools
import re
import sys
from pathlib import Path
from unittest import mock

import torch

import train
from benchmarks import report, style
from benchmarks.report import median, spread
from planning.counters import LiveTensors
from planning.try_layouts import EarlyEndError, run
from run import training_run

EXPLICIT = "--tp 2 --sequence-parallel --attention explicit"
# (name, flags). The ranks that --tp and --pp leave are data-parallel; their number goes in front of
# the name.
LAYOUTS = [
    ("", ""),
    ("stage 1", "--zero-stage 1"),
    ("stage 2", "--zero-stage 2"),
    ("stage 3", "--zero-stage 3"),
    ("stage 3, full recompute", "--zero-stage 3 --recompute full"),
    ("tp 2", "--tp 2"),
    ("tp 2 + sequence", "--tp 2 --sequence-parallel"),
    ("tp 4 + sequence", "--tp 4 --sequence-parallel"),
    ("tp 8 + sequence", "--tp 8 --sequence-parallel"),
    ("tp 2 + sequence, explicit attention", EXPLICIT),
    ("tp 2 + sequence, selective recompute", f"{EXPLICIT} --recompute selective"),
    ("pp 2, 1F1B", "--pp 2"),
    ("pp 2, interleaved v = 2", "--pp 2 --virtual-stages 2"),
    ("pp 4, 1F1B", "--pp 4"),
    ("pp 4, ZB-H1", "--pp 4 --schedule zb-h1"),
    ("tp 2 + sequence, pp 2", "--tp 2 --sequence-parallel --pp 2"),
    ("tp 2 + sequence, pp 2, stage 1", "--tp 2 --sequence-parallel --pp 2 --zero-stage 1"),
    ("stage 1, bf16 moments *", "--zero-stage 1 --optimizer-state bf16"),
    ("8 experts *", "--num-experts 8 --expert-every 4"),
    ("8 experts over 2 *", "--num-experts 8 --expert-every 4 --ep 2"),
]
# (layers, h, a, s, global batch size, micro-batch size)
SHAPES = {
    "cpu": (8, 256, 8, 256, 8, 1),
    "cuda": (24, 2048, 16, 2048, 32, 2),
    "toy": (4, 64, 8, 32, 8, 1),
}
SHAPE = "--num-layers {} --hidden-size {} --num-heads {} --seq-length {} --global-batch-size {}"
SHAPE += " --micro-batch-size {}"
ALWAYS = "--model gpt2 --vocab-size 257 --dropout 0 --lr 1e-3 --warmup-steps 4 --timeout 300"
# Largest relative difference of a loss.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
# Steps that do not count.
WARMUP = 3
# The flags that a figure's title names.
SHAPE_FLAGS = ("num-layers", "hidden-size", "seq-length", "global-batch-size", "micro-batch-size")
# The layouts of README's picture, by their flags: none are one device and plain data parallelism.
SHOWN = (
    "",
    "--zero-stage 3",
    "--zero-stage 3 --recompute full",
    "--tp 4 --sequence-parallel",
    "--pp 4 --schedule zb-h1",
    "--tp 2 --sequence-parallel --pp 2",
)


def degree(name: str, flags: str) -> int:
    match = re.search(rf"--{name} (\d+)", flags)
    return int(match[1]) if match else 1


def layouts(n: int) -> dict[str, tuple[int, str]]:
    """{name: (ranks, flags)}, one device first, of the layouts whose degrees fit n ranks."""
    fitting = {"one device": (1, "")}
    for name, flags in LAYOUTS:
        model_ranks = degree("tp", flags) * degree("pp", flags)
        dp = n // model_ranks
        if dp * model_ranks != n or dp % degree("ep", flags) != 0:
            continue
        if dp == 1 and "--zero-stage" in flags:
            continue
        words = [name] if name else []
        if dp > 1:
            words.insert(0, f"dp {dp}")
        fitting[", ".join(words)] = n, flags
    return fitting


def family(ranks: int, flags: str) -> str:
    """A key of style.COLOURS; experts are another computation, and have a *."""
    if ranks == 1:
        return "one device"
    if "--num-experts" in flags:
        return "experts *"
    words = [word for flag, word in (("--tp", "tensor"), ("--pp", "pipeline")) if flag in flags]
    return " and ".join(words) or "data"


# --- one run --------------------------------------------------------------------------------------


def on_rank(flags: list[str]) -> int:
    """train.py on this rank, with the peak memory that it reports replaced: by that of tensors in
    the first two steps, which it reports in all later ones too."""
    live = LiveTensors()
    calls = itertools.count(1)

    def peak_memory(device) -> int:
        if next(calls) == 2:
            live.__exit__(None, None, None)
        return live.peak

    # Raises if the name is no longer there: else the process would be measured unnoticed.
    with mock.patch.object(training_run, "peak_memory", peak_memory):
        live.__enter__()
        return train.main(flags)


# --- all runs -------------------------------------------------------------------------------------


def tokens_per_second(lines: list[dict]) -> float:
    """The median over the steps of a run. lines: of metrics.jsonl."""
    return median([line["tokens_per_second"] for line in lines[WARMUP:]])


def run_all(
    todo: dict[str, tuple[int, str]], common: list[str], device: str, rounds: int, steps: int
) -> tuple[dict[str, list], dict[str, str]]:
    """({name: lines of metrics.jsonl of each of its runs}, {name: why it failed})"""
    runs = {name: [] for name in todo}
    failed = {}
    for i in range(rounds):
        script = ["train.py"]
        if device == "cpu" and i == 0:
            script = ["-m", "benchmarks.layouts", "--on-rank"]
        for name in list(runs):
            ranks, flags = todo[name]
            try:
                lines = run(ranks, script, [*common, *flags.split()], steps)
            except EarlyEndError as e:
                del runs[name]
                failed[name] = str(e)
                print(f"{name}: {e}", file=sys.stderr, flush=True)
                continue
            runs[name].append(lines)
            rate, loss = tokens_per_second(lines), lines[-1]["loss"]
            line = f"round {i + 1}/{rounds}  {name:<44}{rate:>10,.0f} tokens/s  loss {loss:.6f}"
            print(line, file=sys.stderr, flush=True)
    return runs, failed


def rows_of(todo: dict[str, tuple[int, str]], runs: dict[str, list]) -> list[dict]:
    """A row for each layout that ran, in the order of `todo`."""
    rows = []
    # The losses that the others must have, for each computation.
    expected = {}
    for name in runs:
        ranks, flags = todo[name]
        losses = [[line["loss"] for line in lines] for lines in runs[name]]
        computation = "--num-experts" in flags, "--optimizer-state" in flags
        reference = expected.setdefault(computation, losses[0])
        differences = [abs(a / b - 1) for run in losses for a, b in zip(run, reference)]
        row = {"name": name, "family": family(ranks, flags), "flags": flags}
        row["peak_memory_bytes"] = runs[name][0][-1]["peak_memory_bytes"]
        row["tokens_per_second"] = spread([tokens_per_second(lines) for lines in runs[name]])
        rows.append(row | {"losses": losses[0], "loss_difference": max(differences)})
    return rows


def colour_of(row: dict) -> str:
    recomputes = "--recompute" in row["flags"]
    return style.COLOURS["recompute" if recomputes else row["family"].removesuffix(" *")]


def draw(results: dict, figures: Path) -> None:
    """results: what layouts.json holds."""
    draw_same_loss(results, figures / "same_loss.svg")
    rows = results["rows"]
    size = 1.2 + 0.24 * len(rows)
    options = dict(width_ratios=(0.7, 2, 2), sharey=True)
    figure, (losses, rates, memory) = style.figure(size, 1, 3, **options)
    # In digits: equal ones are seen at once.
    for y, row in enumerate(rows):
        style.inside(losses, f"{row['losses'][-1]:.5f}", (0.5, y), "white")
    losses.set(xlabel=f"loss of step {results['steps']}", xlim=(0, 1), xticks=[])
    losses.spines[:].set_visible(False)
    draw_bars(rates, rows, "tokens/s", [row["tokens_per_second"] for row in rows])
    draw_bars(memory, rows, "peak memory of a rank, MiB", mebibytes(rows))
    style.rows_of(losses, [row["name"] for row in rows])
    figure.suptitle(figure_title(results))
    style.save(figure, figures / "layouts.svg")


def draw_same_loss(results: dict, path: Path) -> None:
    """The losses of one device and of a few layouts, lying on each other; memory beside them."""
    rows = [row for row in results["rows"] if row["flags"] in SHOWN]
    figure, (losses, memory) = style.figure(3.6, 1, 2, width_ratios=(5, 4))
    steps = range(1, results["steps"] + 1)
    for i, row in enumerate(rows):
        # Each thinner than the one below it, so that all are seen.
        width = 1.5 + 2 * (len(rows) - 1 - i)
        line = dict(linewidth=width, solid_capstyle="round", solid_joinstyle="round")
        losses.plot(steps, row["losses"], color=colour_of(row), **line)
    worst = max(row["loss_difference"] for row in rows)
    words = (
        f"{len(rows)} curves lie on each other.\nLargest relative difference from\n"
        f"one device, in any step: {worst:.1e}"
    )
    losses.text(0.97, 0.95, words, transform=losses.transAxes, ha="right", va="top")
    losses.set(title="Loss, nats per token", xlabel="step", xticks=steps)
    draw_bars(memory, rows, "MiB", mebibytes(rows))
    style.rows_of(memory, [row["name"] for row in rows])
    memory.set_title("Peak memory of a rank")
    style.save(figure, path)


def mebibytes(rows: list[dict]) -> list[dict]:
    """Peak memory, which has no spread."""
    return [dict.fromkeys(report.SPREAD, row["peak_memory_bytes"] / 2**20) for row in rows]


def draw_bars(axes, rows: list[dict], label: str, values: list[dict]) -> None:
    """values: for each row what `spread` returned; a line from least to most where they differ."""
    for y, (row, value) in enumerate(zip(rows, values)):
        hatch = "///" if row["name"].endswith("*") else None
        box = dict(height=0.72, color=colour_of(row), edgecolor="white", linewidth=0)
        style.bar(axes, y, value, f"{value['median']:,.0f}", hatch=hatch, **box)
    axes.set_xlabel(label)
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def figure_title(results: dict) -> str:
    """What ran, and by how much the losses differ."""
    # The last one counts: a flag after -- replaces ours.
    value_of = dict(re.findall(r"--(\S+) (\S+)", " ".join(results["flags"])))
    shape = ", ".join(f"{name} {value_of[name]}" for name in SHAPE_FLAGS)
    devices = {"cuda": "GPUs", "cpu": "CPU ranks"}[value_of["device"]]
    difference = max(row["loss_difference"] for row in results["rows"])
    return (
        f"The same {results['steps']} steps on {results['ranks']} {devices},"
        f" {value_of['precision']} ({shape})\n"
        f"Losses of one computation differ by at most {difference:.0e}, in any step"
        " (*: another computation)"
    )


def main() -> int:
    if sys.argv[1:2] == ["--on-rank"]:
        return on_rank(sys.argv[2:])
    parser = report.arguments(__doc__, ranks=4, rounds=3, steps=8)
    precision = "default: bf16 on GPUs, fp32 on CPUs"
    parser.add_argument("--precision", choices=list(TOLERANCE), help=precision)
    parser.add_argument("flags", nargs="*", help="after --: more flags for every train.py")
    args = report.parse(parser, rounds=1, steps=WARMUP + 1)
    if args.steps <= WARMUP:
        report.refuse(parser, f"--steps {args.steps}: the first {WARMUP} do not count; name more")
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    precision = args.precision or {"cuda": "bf16", "cpu": "fp32"}[device]
    shape = SHAPE.format(*SHAPES["toy" if args.toy else device])
    common = [*ALWAYS.split(), *shape.split(), "--device", device, "--precision", precision]
    common += args.flags
    todo = layouts(args.ranks)
    if args.toy:
        todo = dict(list(todo.items())[:2])

    runs, failed = run_all(todo, common, device, args.rounds, args.steps)
    rows = rows_of(todo, runs)
    if not rows:
        return 1
    shown = ("name", "tokens_per_second", "peak_memory_bytes", "loss_difference")
    report.Table([{key: row[key] for key in shown} for row in rows])
    worst = max(rows, key=lambda row: row["loss_difference"])
    print(
        f"\nlargest relative difference of a loss, {len(rows)} layouts, {args.steps} steps,"
        f" {precision}: {worst['loss_difference']:.1e} ({worst['name']})"
    )
    # Not >: a loss may be NaN.
    wrong = [row["name"] for row in rows if not row["loss_difference"] <= TOLERANCE[precision]]
    if wrong:
        rule = f"losses differ by more than {TOLERANCE[precision]:.0e}"
        print(f"{rule}: {'; '.join(wrong)}", file=sys.stderr)
    results = {"ranks": args.ranks, "steps": args.steps, "flags": common}
    results |= {"rows": rows, "failed": failed}
    report.finish("layouts", results, args, draw)
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
