"""What recomputation costs in time: forward and backward of one layer, in the form of table 4 of
arXiv 2205.05198.

    python -m benchmarks.recompute_overhead [--rounds 15] [--toy] [--out DIR]

Two tensor-parallel ranks run one layer. Attention has the same share of its FLOPs as in the paper's
22B model, s / (6h + s) = 5.3%: h 768, a 8, s 256, b 4. (On a GPU it is one rank, with that model's
own layer, in bf16.) Each round runs every row in turn; an overhead is the median of the ratios to
the first row of the same round.
"""

import torch
import torch.distributed as dist

from base import cpu
from benchmarks import report
from benchmarks.activation_memory import Layer
from benchmarks.report import median, spread
from course import demo, ranks

# row: (sequence parallelism, recompute, the paper's milliseconds of forward, and of backward)
ROWS = {
    "no recompute": (False, "none", 7.7, 11.9),
    "sequence parallelism": (True, "none", 7.2, 11.8),
    "full": (False, "full", 7.7, 19.5),
    "selective": (False, "selective", 7.7, 13.2),
    "selective + sequence": (True, "selective", 7.2, 13.1),
    "full + sequence": (True, "full", None, None),
}
# The paper's overheads, over forward and backward without recomputation, 19.6 ms.
PAPER = {row: (f + b) / 19.6 - 1 for row, (_, _, f, b) in ROWS.items() if f}
SHAPES = {
    "toy": dict(s=32, b=2, h=64, a=4),
    "cpu": dict(s=256, b=4, h=768, a=8),
    "cuda": dict(s=2048, b=4, h=6144, a=64),
}


class TimedLayer(Layer):
    """With the gradient of its output."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.grad_output = torch.randn_like(self.x)

    def times(self) -> tuple[float, float]:
        """Seconds of (forward, backward)."""
        outputs = []
        dist.barrier()
        forward = report.timed(lambda: outputs.append(self.forward()))
        backward = report.timed(lambda: outputs.pop().backward(self.grad_output))
        return forward, backward


def extra_flops(granularity: str, shape: dict, t: int) -> float:
    """The paper's formulas: FLOPs of a rank that recomputation adds."""
    s, b, h = shape["s"], shape["b"], shape["h"]
    attention = 4 * b * s * s * h
    layer = 24 * b * s * h * h + attention
    return {"none": 0, "selective": attention, "full": layer}[granularity] / t


def on_rank(rank: int, rounds: int, dropout: float, shape: dict) -> dict:
    """times: {row: [(forward, backward)] by round}; flops: {row: FLOPs}"""
    cpu.set_up()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    fields = dict(dropout=dropout, attention="explicit")
    kinds = {}
    flops = {}
    for row, (sequence, granularity, _, _) in ROWS.items():
        if sequence and dist.get_world_size() == 1:
            continue
        layer = TimedLayer(shape, sequence, granularity, device, dtype, **fields)
        kinds[row] = layer.times
        flops[row] = demo.flops(layer.times)
    times = report.in_turn(kinds, rounds)
    return {"times": {row: [t[row] for t in times] for row in kinds}, "flops": flops}


def table(measured: dict, shape: dict, t: int) -> list[dict]:
    """measured: what `on_rank` returned."""
    rows = []
    base, flops = measured["times"]["no recompute"], measured["flops"]
    for row, times in measured["times"].items():
        found = {"row": row}
        found["forward_ms"] = 1e3 * median([f for f, _ in times])
        found["backward_ms"] = 1e3 * median([b for _, b in times])
        found["overhead"] = spread([sum(x) / sum(y) - 1 for x, y in zip(times, base)])
        found["extra_flops"] = flops[row] - flops["no recompute"]
        found["extra_flops_formula"] = extra_flops(ROWS[row][1], shape, t)
        rows.append(found)
    return rows


def main():
    args = report.parse(report.arguments(__doc__, rounds=15), rounds=1)
    cuda = torch.cuda.is_available()
    world = 1 if cuda else 2
    shape = SHAPES["toy" if args.toy else "cuda" if cuda else "cpu"]
    results = {}
    printed = report.Table()
    for dropout in (0.1, 0.0):
        measured = ranks.run(on_rank, world, args.rounds, dropout, shape)[0]
        rows = results[f"dropout {dropout}"] = table(measured, shape, world)
        for row in rows:
            printed.row({"dropout": dropout} | row | {"paper": PAPER.get(row["row"])})
    report.finish("recompute_overhead", results, args, threads=1)


if __name__ == "__main__":
    main()
