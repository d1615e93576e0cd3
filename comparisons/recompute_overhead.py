"""What recomputation costs in time: forward and backward of one layer, in the form of table 4 of
arXiv 2205.05198.

    python comparisons/recompute_overhead.py [--rounds 15] [--toy] [--out DIR]

Two tensor-parallel ranks run one layer whose attention has the same share of the FLOPs as in the
paper's 22B model, s / (6h + s) = 5.3%: h 768, a 8, s 256, b 4 (on a GPU, with one rank: h 6144, a
64, s 2048, b 4, bf16). Each round runs every configuration in turn; times are medians over rounds,
overheads medians of the ratio to the first row in the same round. Figure:
figures/recompute_overhead.png."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import gpt
import recompute
import sequence_parallel
import sharding
import tensor_parallel
from lessons import ranks
from runtime.world import keep_freed_memory

# (sequence parallelism, recompute): the paper's milliseconds, forward and backward
ROWS = {
    "no recompute": (False, "none", 7.7, 11.9),
    "sequence parallelism": (True, "none", 7.2, 11.8),
    "full": (False, "full", 7.7, 19.5),
    "selective": (False, "selective", 7.7, 13.2),
    "selective + sequence": (True, "selective", 7.2, 13.1),
    "full + sequence": (True, "full", None, None),
}


def on_rank(rank: int, rounds: int, dropout: float, toy: bool) -> dict:
    keep_freed_memory()
    group = dist.group.WORLD
    cuda = torch.cuda.is_available()
    t = group.size()
    s, b, h, a = (32, 2, 64, 4) if toy else (2048, 4, 6144, 64) if cuda else (256, 4, 768, 8)
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    config = gpt.GPTConfig(
        num_layers=1,
        hidden_size=h,
        num_heads=a,
        seq_length=s,
        vocab_size=64,
        dropout=dropout,
        attention="explicit",
    )
    key = gpt.dropout_key(0, 1, torch.arange(b, device=device)) if dropout else None
    kinds = {}
    flops = {}
    for row, (sequence, granularity, *_) in ROWS.items():
        if sequence and t == 1:
            continue
        with torch.device("meta"):
            model = gpt.GPT(config)
        if t > 1:
            tensor_parallel.apply(model, group)
        if sequence:
            sequence_parallel.apply(model, group)
        recompute.apply(model, granularity)
        sharding.init(model, 0, device, dtype)
        x = torch.randn(
            b, s // t if sequence else s, h, device=device, dtype=dtype, requires_grad=True
        )

        def both(block=model.blocks["0"], x=x, grad=torch.randn_like(x)) -> tuple[float, float]:
            outputs = []
            dist.barrier()
            return report.timed(lambda: outputs.append(block(x, key))), report.timed(
                lambda: outputs.pop().backward(grad)
            )

        kinds[row] = both
        with FlopCounterMode(display=False) as counter:
            both()
        flops[row] = counter.get_total_flops()
    times = report.in_turn(kinds, rounds)
    return {
        "times": {row: [t[row] for t in times] for row in kinds},
        "flops": flops,
        "extra_flops_formula": {
            "selective": 4 * b * s * s * h / t,
            "full": (24 * b * s * h * h + 4 * b * s * s * h) / t,
        },
    }


def table(measured: dict) -> list[dict]:
    rows = []
    base = [f + b for f, b in measured["times"]["no recompute"]]
    for row, times in measured["times"].items():
        rows.append(
            {
                "row": row,
                "forward_ms": 1e3 * report.median([f for f, _ in times]),
                "backward_ms": 1e3 * report.median([b for _, b in times]),
                "overhead": report.spread([(f + b) / one - 1 for (f, b), one in zip(times, base)]),
                "extra_flops": measured["flops"][row] - measured["flops"]["no recompute"],
            }
        )
    return rows


def draw(tables: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, 1 + len(tables), figsize=(5 * (1 + len(tables)), 3.4), layout="constrained", sharey=True
    )
    paper = [(row, f, b) for row, (_, _, f, b) in ROWS.items() if f]
    bars = {
        "the paper: 22B layer, 8 A100": paper,
        **{
            name: [(r["row"], r["forward_ms"], r["backward_ms"]) for r in rows]
            for name, rows in tables.items()
        },
    }
    for axes, (name, rows) in zip(panels, bars.items()):
        base = next(f + b for row, f, b in rows if row == "no recompute")
        places = [-list(ROWS).index(row) for row, _, _ in rows]
        forward = [100 * f / base for _, f, _ in rows]
        total = [100 * (f + b) / base for _, f, b in rows]
        axes.barh(places, forward, color="tab:blue", label="forward")
        ends = axes.barh(
            places,
            [x - f for x, f in zip(total, forward)],
            left=forward,
            color="tab:orange",
            label="backward, recomputation included",
        )
        axes.bar_label(ends, [f"{x:.0f}" for x in total], fontsize=8, padding=2)
        axes.set_yticks([-i for i in range(len(ROWS))], list(ROWS))
        axes.set(title=name, xlabel="% of no recomputation", xlim=(0, 175))
        axes.grid(alpha=0.3, axis="x")
    panels[0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=120)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.parse(parser)
    results = {}
    world = 1 if torch.cuda.is_available() else 2
    for dropout in (0.1, 0.0):
        measured = ranks.run(on_rank, world, 1 if args.toy else args.rounds, dropout, args.toy)[0]
        rows = results[f"dropout {dropout}"] = table(measured)
        print(
            f"dropout {dropout}; {'':<11}{'forward':>9}{'backward':>10}"
            f" ms{'overhead':>10}{'more FLOPs':>16}{'formula':>16}{'the paper':>19}"
        )
        for r in rows:
            sequence, granularity, f, b = ROWS[r["row"]]
            r["extra_flops_formula"] = measured["extra_flops_formula"].get(granularity, 0)
            paper = f"{f} + {b}: {100 * ((f + b) / 19.6 - 1):.0f}%" if f else ""
            print(
                f"{r['row']:<24}{r['forward_ms']:>9.1f}{r['backward_ms']:>10.1f}{100 * r['overhead']['median']:>12.0f}%{r['extra_flops']:>16,}"
                f"{r['extra_flops_formula']:>16,.0f}{paper:>19}"
            )
    # what the ranks had, for the record
    torch.set_num_threads(1)
    report.save("recompute_overhead", results, args)
    draw(
        {f"{world} ranks here, {name}": rows for name, rows in results.items()},
        args.figures / "recompute_overhead.png",
    )


if __name__ == "__main__":
    main()
