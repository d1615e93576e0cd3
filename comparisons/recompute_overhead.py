"""What recomputation costs in time: forward and backward of one layer, in the form of table 4 of
arXiv 2205.05198.

    python comparisons/recompute_overhead.py [--rounds 15] [--toy] [--out DIR]

Two tensor-parallel ranks run one layer. Attention has the same share of its FLOPs as in the paper's
22B model, s / (6h + s) = 5.3%: h 768, a 8, s 256, b 4. (On a GPU it is one rank, with that model's
own layer: h 6144, a 64, s 2048, b 4, bf16.) Each round runs every configuration in turn. Times are
medians over rounds; an overhead is the median of the ratios to the first row of the same round.

The figure, figures/recompute_overhead.svg, has the overheads: medians, on lines from the least to
the most of the rounds. It does not have times, whose ranges are not kept.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import style
import torch
import torch.distributed as dist
from activation_memory import parallel_layer
from torch.utils.flop_counter import FlopCounterMode

from base.world import keep_freed_memory
from dropout import dropout_key
from gpt import PLAIN, Context
from model_config import GPTConfig
from proof import ranks

# row: (sequence parallelism, recompute, the paper's milliseconds of forward, and of backward)
ROWS = {
    "no recompute": (False, "none", 7.7, 11.9),
    "sequence parallelism": (True, "none", 7.2, 11.8),
    "full": (False, "full", 7.7, 19.5),
    "selective": (False, "selective", 7.7, 13.2),
    "selective + sequence": (True, "selective", 7.2, 13.1),
    "full + sequence": (True, "full", None, None),
}
# the paper's forward and backward without recomputation, ms
PAPER_BASE = 19.6
SHAPES = {
    "toy": dict(s=32, b=2, h=64, a=4),
    "cpu": dict(s=256, b=4, h=768, a=8),
    "cuda": dict(s=2048, b=4, h=6144, a=64),
}


class Layer:
    """One layer, with its input and the gradient of its output."""

    def __init__(self, shape: dict, dropout: float, sequence: bool, granularity: str):
        group = dist.group.WORLD
        s, b, h, a = (shape[name] for name in "sbha")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        config = GPTConfig(
            num_layers=1,
            hidden_size=h,
            num_heads=a,
            seq_length=s,
            vocab_size=64,
            dropout=dropout,
            attention="explicit",
        )
        self.block = parallel_layer(config, group, sequence, granularity, device, dtype)
        local_s = s // group.size() if sequence else s
        self.x = torch.randn(b, local_s, h, device=device, dtype=dtype, requires_grad=True)
        self.grad_output = torch.randn_like(self.x)
        self.context = PLAIN
        if dropout:
            self.context = Context(dropout_key(0, 1, torch.arange(b, device=device)))

    def times(self) -> tuple[float, float]:
        """Seconds of (forward, backward)."""
        outputs = []
        dist.barrier()
        forward = report.timed(lambda: outputs.append(self.block(self.x, self.context)))
        backward = report.timed(lambda: outputs.pop().backward(self.grad_output))
        return forward, backward


def extra_flops(shape: dict, t: int) -> dict[str, float]:
    """The paper's formulas: FLOPs of a rank that recomputation adds, {recompute: FLOPs}."""
    s, b, h = shape["s"], shape["b"], shape["h"]
    attention = 4 * b * s * s * h
    return {"selective": attention / t, "full": (24 * b * s * h * h + attention) / t}


def on_rank(rank: int, rounds: int, dropout: float, shape: dict) -> dict:
    """times: {row: [(forward, backward)] by round}; flops: {row: FLOPs}"""
    keep_freed_memory()
    t = dist.get_world_size()
    kinds = {}
    flops = {}
    for row, (sequence, granularity, _, _) in ROWS.items():
        if sequence and t == 1:
            continue
        layer = Layer(shape, dropout, sequence, granularity)
        kinds[row] = layer.times
        with FlopCounterMode(display=False) as counter:
            layer.times()
        flops[row] = counter.get_total_flops()
    times = report.in_turn(kinds, rounds)
    return {"times": {row: [t[row] for t in times] for row in kinds}, "flops": flops}


def table(measured: dict, formulas: dict[str, float]) -> list[dict]:
    """measured: what `on_rank` returned; formulas: what `extra_flops` returned."""
    rows = []
    base = [forward + backward for forward, backward in measured["times"]["no recompute"]]
    for row, times in measured["times"].items():
        _, granularity, _, _ = ROWS[row]
        overheads = [(f + b) / base_time - 1 for (f, b), base_time in zip(times, base)]
        rows.append(
            {
                "row": row,
                "forward_ms": 1e3 * report.median([f for f, _ in times]),
                "backward_ms": 1e3 * report.median([b for _, b in times]),
                "overhead": report.spread(overheads),
                "extra_flops": measured["flops"][row] - measured["flops"]["no recompute"],
                "extra_flops_formula": formulas.get(granularity, 0),
            }
        )
    return rows


def print_table(rows: list[dict], dropout: float) -> None:
    print(
        f"dropout {dropout}; {'':<11}{'forward':>9}{'backward':>10}"
        f" ms{'overhead':>10}{'more FLOPs':>16}{'formula':>16}{'the paper':>19}"
    )
    for r in rows:
        _, _, forward, backward = ROWS[r["row"]]
        paper = ""
        if forward:
            overhead = (forward + backward) / PAPER_BASE - 1
            paper = f"{forward} + {backward}: {100 * overhead:.0f}%"
        print(
            f"{r['row']:<24}{r['forward_ms']:>9.1f}{r['backward_ms']:>10.1f}"
            f"{100 * r['overhead']['median']:>12.0f}%{r['extra_flops']:>16,}"
            f"{r['extra_flops_formula']:>16,.0f}{paper:>19}"
        )


# of the figure: the dropouts that were measured: marker
MARKERS = {"dropout 0.1": "o", "dropout 0.0": "s"}


def draw(results: dict, figures: Path) -> None:
    """results: what recompute_overhead.json holds."""
    # the first row is the base of the others
    names = list(ROWS)[1:]
    figure, axes = style.figure(3.2)
    for i, (dropout, marker) in enumerate(MARKERS.items()):
        rows = results[dropout][1:]
        positions = [names.index(row["row"]) + 0.24 * i for row in rows]
        spreads = []
        for row in rows:
            spreads.append({key: 100 * row["overhead"][key] for key in ("median", "min", "max")})
        style.ranges(axes, positions, spreads, style.COLOURS["recompute"], marker=marker)
        label = f"measured, {dropout}" if i == 0 else dropout
        style.label(axes, label, (spreads[0]["max"], positions[0]))
    paper = {}
    for y, name in enumerate(names):
        _, _, forward, backward = ROWS[name]
        if forward:
            paper[y - 0.24] = 100 * ((forward + backward) / PAPER_BASE - 1)
    axes.plot(list(paper.values()), list(paper), "kD", markersize=5)
    y = names.index("full") - 0.24
    style.label(axes, "the paper: 22B layer, A100", (paper[y], y))
    axes.axvline(0, color="black", linewidth=0.8)
    style.rows_of(axes, names)
    axes.set(
        xlabel="% more time of forward and backward than without recomputation",
        title="Overhead of one layer: median, and a line from the least to the most of the rounds",
    )
    style.save(figure, figures / "recompute_overhead.svg")


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.parse(parser)
    cuda = torch.cuda.is_available()
    world = 1 if cuda else 2
    shape = SHAPES["cuda" if cuda else "cpu"]
    rounds = args.rounds
    if args.toy:
        shape = SHAPES["toy"]
        rounds = 1
    results = {}
    for dropout in (0.1, 0.0):
        measured = ranks.run(on_rank, world, rounds, dropout, shape)[0]
        rows = results[f"dropout {dropout}"] = table(measured, extra_flops(shape, world))
        print_table(rows, dropout)
    report.save("recompute_overhead", results, args, threads=1)
    draw(report.saved("recompute_overhead", args), args.figures)


if __name__ == "__main__":
    main()
