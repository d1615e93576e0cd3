"""The activation memory of one layer, by the paper's formula and as autograd holds it (arXiv
2205.05198, table 2 and figure 7).

    python comparisons/activation_memory.py [--toy] [--out DIR]

For each row of the table, t = 1, 2, 4 tensor-parallel ranks, and layers whose 5as/h is that of the
paper's 22B and 175B models and of two others (LayerNorm, GELU, dropout 0.1, explicit attention,
bf16): formula, measured bytes of rank 0, difference. Then the formulas on the paper's models:
gibibytes of activations on the first pipeline stage. Figure: figures/activation_memory.png."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist

import gpt
import recompute
import sequence_parallel
import sharding
import tensor_parallel
from lessons import ranks

# 5as/h of 106.7 and 80
SHAPES = {
    "as 22B": dict(s=2048, b=1, h=768, a=8),
    "as 175B": dict(s=2048, b=1, h=1024, a=8),
    "short": dict(s=512, b=4, h=512, a=8),
    "odd": dict(s=300, b=3, h=480, a=12),
}
TOY = {"tiny": dict(s=32, b=1, h=64, a=4)}
# FACTS of table 3: a, h, L, t, p, v, micro-batch
MODELS = {
    "22B": (64, 6144, 48, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (128, 20480, 105, 8, 35, 3, 1),
    "1T": (160, 25600, 128, 8, 64, 1, 1),
}


def measure(rank: int, shapes: dict) -> dict:
    """{(shape, row): bytes that one layer keeps on this rank}"""
    group = dist.group.WORLD
    found = {}
    t = group.size()
    for name, shape in shapes.items():
        for row, (sequence, granularity) in recompute.ROWS.items():
            if row == "no parallelism" and t > 1:
                continue
            with torch.device("meta"):
                model = gpt.GPT(
                    gpt.GPTConfig(
                        num_layers=1,
                        hidden_size=shape["h"],
                        num_heads=shape["a"],
                        seq_length=shape["s"],
                        vocab_size=64,
                        dropout=0.1,
                    )
                )
            if t > 1:
                tensor_parallel.apply(model, group)
                if sequence:
                    sequence_parallel.apply(model, group)
            recompute.apply(model, granularity)
            sharding.init(model, 0, "cpu", torch.bfloat16)
            block = model.blocks["0"]
            s = shape["s"] // (t if sequence else 1)
            x = torch.randn(shape["b"], s, shape["h"]).bfloat16().requires_grad_()
            key = gpt.dropout_key(0, 1, torch.arange(shape["b"]))
            found[name, row] = recompute.saved_bytes(lambda: block(x, key), *block.parameters())
    return found


def first_stage(model: str, sequence: bool, granularity: str) -> float:
    """GiB of activations in the layers of the first stage."""
    a, h, L, t, p, v, b = MODELS[model]
    return (
        recompute.layer_bytes(2048, b, h, a, t, sequence, granularity)
        * recompute.first_stage_layers(L, p, v)
        / 2**30
    )


def draw(measured: list[dict], shapes: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = ["tensor + sequence", "tensor + selective", "tensor + sequence + selective", "full"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4), layout="constrained", sharey=True)
    t = max(r["t"] for r in measured)
    here = {(r["layer"], r["row"]): r for r in measured if r["t"] == t}
    for i, row in enumerate(rows):
        percent = [
            100
            * first_stage(model, *recompute.ROWS[row])
            / first_stage(model, *recompute.ROWS["tensor"])
            for model in MODELS
        ]
        bars = left.bar([j + 0.2 * (i - 1.5) for j in range(len(MODELS))], percent, 0.18, label=row)
        left.bar_label(bars, [f"{x:.0f}" for x in percent], fontsize=8)
        percent, formula = (
            [100 * here[s, row][kind] / here[s, "tensor"][kind] for s in shapes]
            for kind in ("measured", "formula")
        )
        places = [j + 0.2 * (i - 1.5) for j in range(len(shapes))]
        right.bar_label(
            right.bar(places, percent, 0.18), [f"{x:.0f}" for x in percent], fontsize=8, padding=3
        )
        right.plot(places, formula, "k_", markersize=11, label="by formula" if i == 0 else None)
    left.set_xticks(range(len(MODELS)), MODELS)
    left.set(
        ylabel="% of tensor parallelism alone",
        title="The paper's models by its formulas, t = 8 (arXiv 2205.05198, figure 7)",
        ylim=(0, 100),
    )
    right.set_xticks(
        range(len(shapes)),
        [f"{name}\nh {x['h']}, a {x['a']}, s {x['s']}" for name, x in shapes.items()],
        fontsize=8,
    )
    right.set_title(f"Measured: what autograd holds for one layer, t = {t}")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=120)


def main():
    args = report.parse(report.arguments(__doc__))
    shapes = TOY if args.toy else SHAPES
    results = []
    worst = 0.0
    print(f"{'layer':<9}{'t':>2}  {'row':<30}{'formula':>14}{'measured':>14}{'difference':>12}")
    for t in (1, 2) if args.toy else (1, 2, 4):
        for (name, row), measured in ranks.run(measure, t, shapes)[0].items():
            formula = recompute.layer_bytes(
                **shapes[name],
                t=t,
                sequence_parallel=recompute.ROWS[row][0],
                recompute=recompute.ROWS[row][1],
            )
            results.append(
                {
                    "layer": name,
                    "t": t,
                    "row": row,
                    "formula": formula,
                    "measured": measured,
                    "ratio": measured / formula,
                }
            )
            worst = max(worst, abs(measured / formula - 1))
            print(
                f"{name:<9}{t:>2} "
                f" {row:<30}{formula:>14,.0f}{measured:>14,}{100 * (measured / formula - 1):>11.3f}%"
            )
    print(f"largest difference: {100 * worst:.2f}%")
    predicted = {
        model: {row: first_stage(model, *recompute.ROWS[row]) for row in list(recompute.ROWS)[1:]}
        for model in MODELS
    }
    print(
        f"\nGiB of activations on the first stage:\n{'row':<30}"
        + "".join(f"{model:>10}" for model in MODELS)
    )
    for row in list(recompute.ROWS)[1:]:
        print(f"{row:<30}" + "".join(f"{predicted[model][row]:>10.2f}" for model in MODELS))
    report.save(
        "activation_memory",
        {
            "largest_difference": worst,
            "layers": results,
            "shapes": shapes,
            "first_stage_GiB": predicted,
        },
        args,
    )
    draw(results, shapes, args.figures / "activation_memory.png")


if __name__ == "__main__":
    main()
