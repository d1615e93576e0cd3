"""The activation memory of one transformer layer: the paper's formulas beside what autograd holds
(arXiv 2205.05198, table 2 and figure 7).

    python -m benchmarks.activation_memory [--toy] [--out DIR]

Measured are all rows of table 2, on t = 1, 2 and 4 tensor-parallel ranks: the bytes that rank 0
keeps for the backward pass of one layer in bf16 (LayerNorm, GELU, dropout 0.1, explicit attention).
Then the formulas alone, for the paper's models: GiB of activations on the first pipeline stage.

Figure: docs/figures/activation_memory.svg
"""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import recompute
import sequence_parallel
import sharding
import tensor_parallel
from base.dropout import dropout_key
from base.model_config import GPTConfig
from benchmarks import report, style
from course import demo, ranks
from gpt import PLAIN, Context
from planning import counters

# The first two have 5as/h of 106.7 and 80.
SHAPES = {
    "as 22B": dict(s=2048, b=1, h=768, a=8),
    "as 175B": dict(s=2048, b=1, h=1024, a=8),
    "short": dict(s=512, b=4, h=512, a=8),
    "odd": dict(s=300, b=3, h=480, a=12),
}
TOY = {"tiny": dict(s=32, b=1, h=64, a=4)}
# GiB of a GPU of 80 GB.
CARD = 80e9 / 2**30
# Table 3: a, h, L, t, p, v, micro-batch size b.
MODELS = {
    "22B": (64, 6144, 48, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (128, 20480, 105, 8, 35, 3, 1),
    "1T": (160, 25600, 128, 8, 64, 1, 1),
}
# Rows of table 2 that the figure shows.
DRAWN = "tensor", "tensor + sequence", "tensor + selective", "tensor + sequence + selective", "full"


class Layer:
    """One layer, tensor-parallel over all ranks, and sequence-parallel if `sequence`, with its
    input. granularity: of recomputation; fields: of GPTConfig."""

    def __init__(self, shape: dict, sequence: bool, granularity: str, device, dtype, **fields):
        s, b, h, a = (shape[name] for name in "sbha")
        sizes = dict(num_layers=1, hidden_size=h, num_heads=a, seq_length=s, vocab_size=64)
        config = GPTConfig(**sizes, **fields)
        group = dist.group.WORLD
        model = demo.meta_model(config)
        if group.size() > 1:
            tensor_parallel.apply(model, group)
            if sequence:
                sequence_parallel.apply(model, group)
            sequence_parallel.overlap_backward(model)
        recompute.apply(model, granularity)
        sharding.init(model, 0, device, dtype)
        self.block = model.blocks["0"]
        local_s = s // group.size() if sequence else s
        self.x = torch.randn(b, local_s, h, device=device, dtype=dtype, requires_grad=True)
        self.context = PLAIN
        if config.dropout:
            self.context = Context(dropout_key(0, 1, torch.arange(b, device=device)))

    def forward(self) -> Tensor:
        return self.block(self.x, self.context)


def measure(rank: int, shapes: dict) -> dict:
    """{(shape, row): bytes that one layer keeps on this rank}"""
    measured = {}
    for name, shape in shapes.items():
        for row, (sequence, granularity) in recompute.ROWS.items():
            if row != "no parallelism" or dist.get_world_size() == 1:
                layer = Layer(shape, sequence, granularity, "cpu", torch.bfloat16, dropout=0.1)
                kept = counters.saved_bytes(layer.forward, *layer.block.parameters())
                measured[name, row] = kept
    return measured


def first_stage_table() -> dict[str, dict[str, float]]:
    """{model: {row: GiB of activations in the layers of the first pipeline stage}}, by the formula,
    of the rows with tensor parallelism."""
    rows = {row: flags for row, flags in recompute.ROWS.items() if row != "no parallelism"}
    found = {}
    for model, (a, h, L, t, p, v, b) in MODELS.items():
        gib = recompute.first_stage_layers(L, p, v) / 2**30
        layer_bytes = partial(recompute.layer_bytes, 2048, b, h, a, t)
        found[model] = {row: gib * layer_bytes(*flags) for row, flags in rows.items()}
    return found


def draw(results: dict, figures: Path) -> None:
    """results: what activation_memory.json holds. Above the paper's models, by its formulas; below
    one layer: a bar of the measured bytes, and a mark where the formula is."""
    shapes = results["shapes"]
    columns = max(len(MODELS), len(shapes))
    figure, (models, layers) = style.figure(4.5, 2, columns, sharey=True)
    for axes, (model, gib) in zip(models, results["first_stage_GiB"].items()):
        axes.axvline(CARD, color="black", linestyle="--", linewidth=1, zorder=0.5)
        bars = axes.barh(DRAWN, [gib[row] for row in DRAWN], color=style.COLOURS["activations"])
        # The dashed line stops at a number.
        box = dict(facecolor="white", edgecolor="none", pad=0.5)
        axes.bar_label(bars, fmt="{:.1f}", fontsize=style.SMALL, padding=3, bbox=box)
        axes.set(title=model, xlabel="GiB on the first stage", xlim=(0, 180))
    for axes in models:
        style.label(axes, f"{CARD:.1f}", (CARD, 4), offset=(3, 0))
    t = max(r["t"] for r in results["layers"])
    found = {(r["layer"], r["row"]): r for r in results["layers"] if r["t"] == t}
    for axes, (name, x) in zip(layers, shapes.items()):
        of_rows = [found[name, row] for row in DRAWN]
        measured, formula = ([r[k] / 2**20 for r in of_rows] for k in ("measured", "formula"))
        bars = axes.barh(DRAWN, measured, color=style.COLOURS["activations"])
        axes.bar_label(bars, fmt="{:.1f}", fontsize=style.SMALL, padding=4)
        axes.plot(formula, DRAWN, "k|", markersize=10)
        sizes = f"h {x['h']}, a {x['a']}, s {x['s']}"
        axes.set(title=f"{name}\n{sizes}", xlabel="MiB of one layer", xlim=(0, 1.45 * max(formula)))
    for axes in [*models, *layers]:
        style.rows_of(axes, DRAWN)
        axes.title.set_size(style.SMALL)
    figure.suptitle(
        "Activations that a rank holds. Above: the paper's models by its formulas, t = 8; dashed:"
        f" a GPU of 80 GB, {CARD:.1f} GiB.\nBelow: one layer, t = {t}; bar: measured; black mark:"
        " the formula."
    )
    style.save(figure, figures / "activation_memory.svg")


def main():
    args = report.parse(report.arguments(__doc__))
    shapes = TOY if args.toy else SHAPES
    table = report.Table()
    layers = []
    for t in (1, 2) if args.toy else (1, 2, 4):
        for (name, row), measured in ranks.run(measure, t, shapes)[0].items():
            sequence, granularity = recompute.ROWS[row]
            flags = dict(sequence_parallel=sequence, recompute=granularity)
            formula = recompute.layer_bytes(**shapes[name], t=t, **flags)
            result = {"layer": name, "t": t, "row": row, "formula": formula, "measured": measured}
            layers.append(result | {"ratio": measured / formula})
            table.row(result | {"ratio": f"{100 * (measured / formula - 1):+.3f}%"})
    results = {"largest_difference": max(abs(r["ratio"] - 1) for r in layers)}
    print(f"largest difference: {results['largest_difference']:.2%}")
    results |= {"layers": layers, "shapes": shapes, "first_stage_GiB": first_stage_table()}
    print("\nGiB of activations on the first stage:")
    report.Table([{"model": model} | gib for model, gib in results["first_stage_GiB"].items()])
    report.finish("activation_memory", results, args, draw)


if __name__ == "__main__":
    main()
