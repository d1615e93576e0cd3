"""The same training run under every layout: tokens/s, peak memory, and one loss.

    python comparisons/layouts.py [--ranks 4] [--rounds 3] [--steps 8] [--out DIR]      --toy: a few layouts of a small model, to see that all of it runs
    python comparisons/layouts.py -- --hidden-size 768                      what follows -- goes to every train.py

`torchrun train.py` on N ranks (GPUs where there are so many, else CPU ranks that share the cores)
with one model, one global batch in micro-batches of one size, one seed; layouts take turns, a run
of --steps steps each, for --rounds rounds. The first 3 steps of a run do not count: a round's
tokens/s is the median of the others, and the table has the median of the rounds with the least and
the most. After its last step a run is stopped by SIGTERM, so that nobody waits for its sample of
text.

Memory is the peak of bytes of tensors, of the rank that has most. On CPUs train.py tells the peak
of the process instead, in which libraries and gloo's own buffers hide the layout: there, in the
first round, a profiler of allocations looks at its first two steps.

The losses of all steps must be those of one device, to 1e-4 in fp32. Two kinds of rows are another
computation, and marked: experts, which are compared among themselves, and moments in bf16, which
are not compared. Figure: figures/layouts.png."""

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
from report import median, spread

import train

HERE = Path(__file__).parent.parent
# name, flags; data-parallel ranks are what --tp and --pp leave, and are put before the name
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
    ("tp 2 + sequence, explicit attention", "--tp 2 --sequence-parallel --attention explicit"),
    (
        "tp 2 + sequence, selective recompute",
        "--tp 2 --sequence-parallel --attention explicit --recompute selective",
    ),
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
SHAPES = {
    "cpu": (
        "--num-layers 8 --hidden-size 256 --num-heads 8 --seq-length 256 --global-batch-size 8"
        " --micro-batch-size 1"
    ),
    "cuda": (
        "--num-layers 24 --hidden-size 2048 --num-heads 16 --seq-length 2048 --global-batch-size 32"
        " --micro-batch-size 2"
    ),
    "toy": (
        "--num-layers 4 --hidden-size 64 --num-heads 8 --seq-length 32 --global-batch-size 8"
        " --micro-batch-size 1"
    ),
}
ALWAYS = "--model gpt2 --vocab-size 257 --dropout 0 --lr 1e-3 --warmup-steps 4 --timeout 300"
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
WARMUP = 3
COLOURS = {
    "one device": "#8c8c8c",
    "data": "#4c78a8",
    "tensor": "#f2b447",
    "pipeline": "#59a14f",
    "tensor and pipeline": "#b07aa1",
    "experts *": "#d9a9a0",
}


def layouts(n: int) -> dict[str, tuple[int, str]]:
    """{name: (ranks, flags)}, one device first, of the layouts whose degrees fit n ranks."""
    found = {"one device": (1, "")}
    for name, flags in LAYOUTS:
        tp, pp, ep = (
            int(m[1]) if (m := re.search(rf"--{degree} (\d+)", flags)) else 1
            for degree in ("tp", "pp", "ep")
        )
        dp = n // (tp * pp)
        if dp * tp * pp == n and dp % ep == 0 and (dp > 1 or "--zero-stage" not in flags):
            found[", ".join([f"dp {dp}"] * (dp > 1) + [name] * bool(name))] = n, flags
    return found


def family(ranks: int, flags: str) -> str:
    tp = "--tp" in flags
    pp = "--pp" in flags
    return (
        "one device"
        if ranks == 1
        else (
            "experts *"
            if "--num-experts" in flags
            else (
                "tensor and pipeline"
                if tp and pp
                else "tensor"
                if tp
                else "pipeline"
                if pp
                else "data"
            )
        )
    )


def computation(flags: str) -> str:
    """Layouts with the same answer here must have the same losses."""
    return next((word for word in ("--num-experts", "--optimizer-state") if word in flags), "")


def on_rank(flags: list[str]) -> int:
    """train.py on this rank; the peak memory that it tells is that of tensors, found in the first
    two steps, for all that follow."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    calls = itertools.count(1)
    found = [0]

    def peak_memory(device) -> int:
        if next(calls) == 2:
            profiler.stop()
            events = sorted(
                (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"),
                key=lambda e: e.start_ns(),
            )
            found[0] = max(itertools.accumulate(e.nbytes() for e in events))
        return found[0]

    train.peak_memory = peak_memory
    profiler.start()
    return train.main(flags)


def run(ranks: int, script: list[str], flags: list[str], steps: int) -> list[dict]:
    """The first `steps` lines of metrics.jsonl. Raises RuntimeError with what train.py says is
    wrong."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        path = Path(folder) / "run" / "metrics.jsonl"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                *script,
                *flags,
                "--steps",
                "1000",
                "--out",
                str(path.parent),
            ],
            cwd=HERE,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        lines = []
        try:
            while len(lines) < steps:
                ended = process.poll() is not None
                # half a line is none yet
                lines = path.read_text().split("\n")[:-1] if path.exists() else []
                if ended and len(lines) < steps:
                    said.seek(0)
                    words = [line.strip() for line in said if line.strip()]
                    raise RuntimeError(
                        next(
                            (line for line in words if line.startswith("train.py: ")),
                            words[-1] if words else f"exit status {process.returncode}",
                        )
                    )
                time.sleep(0.1)
        finally:
            process.terminate()
            process.wait()
        return [json.loads(line) for line in lines[:steps]]


def draw(rows: list[dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 1.2 + 0.32 * len(rows)), layout="constrained", sharey=True
    )
    for y, row in enumerate(rows):
        style = dict(
            height=0.72,
            color=COLOURS[row["family"]],
            hatch="///" if row["name"].endswith("*") else None,
            edgecolor="white",
            linewidth=0,
        )
        rate = row["tokens_per_second"]
        memory = row["peak_memory_bytes"] / 2**20
        left.barh(y, rate["median"], **style)
        left.errorbar(
            rate["median"],
            y,
            xerr=[[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]],
            color="#333333",
            linewidth=1,
            capsize=2,
        )
        right.barh(y, memory, **style)
        for axes, end, told in (
            (left, rate["max"], f"{rate['median']:,.0f}"),
            (right, memory, f"{memory:,.0f}"),
        ):
            axes.annotate(
                told, (end, y), (5, 0), textcoords="offset points", va="center", fontsize=8
            )
    for axes, label in ((left, "tokens/s"), (right, "peak memory of a rank, MiB")):
        axes.set_xlabel(label)
        axes.margins(x=0.12, y=0.01)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    left.set_yticks(range(len(rows)), [row["name"] for row in rows])
    left.invert_yaxis()
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def main() -> int:
    if sys.argv[1:2] == ["--on-rank"]:
        return on_rank(sys.argv[2:])
    parser = report.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--precision", choices=list(TOLERANCE), help="the default is bf16 on GPUs and fp32 on CPUs"
    )
    parser.add_argument("flags", nargs="*", help="after --, more flags for every train.py")
    args = report.parse(parser)
    device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    precision = args.precision or {"cuda": "bf16", "cpu": "fp32"}[device]
    rounds, steps, shape = (
        (1, WARMUP + 1, SHAPES["toy"]) if args.toy else (args.rounds, args.steps, SHAPES[device])
    )
    common = [
        *ALWAYS.split(),
        *shape.split(),
        "--device",
        device,
        "--precision",
        precision,
        *args.flags,
    ]
    if steps <= WARMUP:
        report.refuse(parser, f"--steps {steps}: the first {WARMUP} do not count")

    todo = layouts(args.ranks)
    runs = {}
    failed = {}
    if args.toy:
        todo = dict(list(todo.items())[:2])
    for i in range(rounds):
        script = (
            [f"{HERE}/comparisons/layouts.py", "--on-rank"]
            if device == "cpu" and i == 0
            else ["train.py"]
        )
        for name, (ranks, flags) in todo.items():
            if name in failed:
                continue
            try:
                lines = run(ranks, script, [*common, *flags.split()], steps)
            except RuntimeError as e:
                failed[name] = str(e)
                print(f"{name}: {e}", file=sys.stderr, flush=True)
                continue
            runs.setdefault(name, []).append(lines)
            print(
                f"round {i + 1}/{rounds} "
                f" {name:<44}{median([x['tokens_per_second'] for x in lines[WARMUP:]]):>10,.0f}"
                f" tokens/s  loss {lines[-1]['loss']:.6f}",
                file=sys.stderr,
                flush=True,
            )

    rows = []
    first = {}
    for name in (name for name in todo if name in runs and name not in failed):
        ranks, flags = todo[name]
        losses = [[x["loss"] for x in lines] for lines in runs[name]]
        expected = first.setdefault(computation(flags), losses[0])
        rows.append(
            {
                "name": name,
                "family": family(ranks, flags),
                "flags": flags,
                "peak_memory_bytes": runs[name][0][-1]["peak_memory_bytes"],
                "tokens_per_second": spread(
                    [
                        median([x["tokens_per_second"] for x in lines[WARMUP:]])
                        for lines in runs[name]
                    ]
                ),
                "losses": losses[0],
                "loss_difference": max(
                    abs(a / b - 1) for other in losses for a, b in zip(other, expected)
                ),
            }
        )
    if not rows:
        return 1
    print(
        "| layout | tokens/s | peak memory of a rank, MiB | largest difference of a loss"
        " |\n|---|---|---|---|"
    )
    for row in rows:
        rate = row["tokens_per_second"]
        difference = f"{row['loss_difference']:.1e}" if row["loss_difference"] else ""
        print(
            f"| {row['name']} | {rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f}) |"
            f" {row['peak_memory_bytes'] / 2**20:,.0f} | {difference} |"
        )
    worst = max(rows, key=lambda row: row["loss_difference"])
    wrong = [row["name"] for row in rows if not row["loss_difference"] <= TOLERANCE[precision]]
    print(
        f"\nlargest relative difference of a loss, {len(rows)} layouts, {steps} steps, {precision}:"
        f" {worst['loss_difference']:.1e} ({worst['name']})"
    )
    if wrong:
        print(
            f"the loss is another, by more than {TOLERANCE[precision]:.0e}: {'; '.join(wrong)}",
            file=sys.stderr,
        )
    shape = {
        name: re.findall(rf"--{name} (\d+)", " ".join(common))[-1]
        for name in (
            "num-layers",
            "hidden-size",
            "seq-length",
            "global-batch-size",
            "micro-batch-size",
        )
    }
    title = (
        f"The same {steps} steps on {args.ranks} {'GPUs' if device == 'cuda' else 'CPU ranks'},"
        f" {precision} ({', '.join(f'{name} {n}' for name, n in shape.items())})"
    )
    report.save(
        "layouts",
        {"ranks": args.ranks, "steps": steps, "flags": common, "rows": rows, "failed": failed},
        args,
    )
    draw(rows, title, args.figures / "layouts.png")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
