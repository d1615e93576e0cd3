"""Bytes of a rank in parameters, gradients and optimizer state, and elements sent in a step, for
the four ZeRO stages: measured beside the formulas.

    python comparisons/zero_memory.py [--ranks 4] [--toy] [--out DIR]

A GPT (h 256, L 4, a 8, s 64, V 1000; tied) in bf16 with fp32 gradients, masters and moments, and
with --optimizer-state bf16; 2 micro-batches. Bytes are those of the storages that the rank holds
after backward, each once; elements are counted call by call, padding included, an all-reduce as 2.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from single_device import Random

import fsdp
import train
from lessons import ranks
from runtime.world import Groups

SHAPE = dict(
    model="gpt2",
    num_layers=4,
    hidden_size=256,
    num_heads=8,
    seq_length=64,
    vocab_size=1000,
    dropout=0.0,
    precision="bf16",
)
TOY = SHAPE | dict(num_layers=2, hidden_size=64, seq_length=32)
# micro-batches
M = 2
PARTS = ("parameters", "gradients", "optimizer state")


def on_rank(rank: int, n: int, stage: int, state: str, shape: dict):
    """({part: bytes}, elements sent over Ψ (N - 1) / N, Ψ)"""
    config = train.Config(
        **shape,
        zero_stage=stage,
        optimizer_state=state,
        global_batch_size=M * n,
        micro_batch_size=1,
    )
    trainer = train.Trainer(config, torch.device("cpu"), Groups(dp=dist.group.WORLD))
    sharder = trainer.gradients[0]
    optimizer = trainer.optimizer
    dataset = Random(M * n, shape["seq_length"], shape["vocab_size"])
    with ranks.Collectives() as sent:
        trainer.forward_backward(1, dataset)
        held = fsdp.held_bytes(trainer.model, sharder)
        trainer.update(1)
    kept = [
        *optimizer.masters.values(),
        *optimizer.low.values(),
        *optimizer.exp_avg.values(),
        *optimizer.exp_avg_sq.values(),
    ]
    padded = sum(unit.n * unit.T for unit in sharder.units)
    # gradients travel in fp32, parameters in bf16
    item = {"all-reduce": 4, "reduce-scatter": 4, "all-gather": 2}
    elements = sum(
        size // item[kind] * (2 if kind == "all-reduce" else 1)
        for kind, size in sent.calls
        if size > 64
    )
    return (
        dict(zip(PARTS, (*held, sum(x.nbytes for x in kept)))),
        elements / padded,
        trainer.num_parameters,
    )


def draw(rows: list[dict], n: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(PARTS, ("#4c78a8", "#f2b447", "#59a14f")))
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for x, row in enumerate(rows):
        bottom = 0.0
        for part in PARTS:
            axes.bar(
                x,
                row["measured"][part],
                bottom=bottom,
                width=0.7,
                color=colours[part],
                label=part if x == 0 else None,
            )
            bottom += row["measured"][part]
        axes.plot(
            [x - 0.4, x + 0.4],
            [sum(row["formula"].values())] * 2,
            color="black",
            linewidth=1.5,
            label="formula" if x == 0 else None,
        )
    axes.set(
        xticks=range(len(rows)),
        xticklabels=[
            f"{row['stage']}" + ("\nbf16 state" if row["state"] == "bf16" else "") for row in rows
        ],
        xlabel="stage",
        ylabel="bytes per parameter of the model",
        title=f"A rank's memory, measured, N = {n}, bf16",
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    args = report.parse(parser)
    n, shape, rows = (2, TOY, []) if args.toy else (args.ranks, SHAPE, [])
    print(f"{n} ranks: bytes per parameter, measured (the rank that has most) / by formula")
    for stage, state in [(stage, state) for state in ("fp32", "bf16") for stage in range(4)]:
        results = ranks.run(on_rank, n, n, stage, state, shape)
        psi = results[0][2]
        measured = {part: max(held[part] for held, _, _ in results) / psi for part in PARTS}
        formula = dict(
            zip(PARTS, fsdp.bytes_per_parameter(stage, n, state=12 if state == "fp32" else 6))
        )
        rows.append(
            {
                "stage": stage,
                "state": state,
                "measured": measured,
                "formula": formula,
                "sent": results[0][1],
                "sent_formula": fsdp.elements_sent(stage, M),
            }
        )
        print(
            f"stage {stage}, state {state}: "
            + ", ".join(f"{part} {measured[part]:.3f} / {formula[part]:.3f}" for part in PARTS)
            + f"; sent {results[0][1]:.3f} / {fsdp.elements_sent(stage, M)} times Ψ (N - 1) / N"
        )
    worst = max(
        abs(row["measured"][part] / row["formula"][part] - 1) for row in rows for part in PARTS
    )
    paper = [sum(fsdp.bytes_per_parameter(stage, 64, gradient=2)) * 7.5 for stage in range(4)]
    print(
        f"largest difference {worst:.2%}; the paper's 7.5 B parameters on 64 devices, its 2-byte"
        f" gradients, by formula: {', '.join(f'{gb:.1f}' for gb in paper)} GB"
    )
    report.save(
        "zero_memory",
        {
            "ranks": n,
            "micro_batches": M,
            "rows": rows,
            "largest_difference": worst,
            "paper_7.5B_64_GB": paper,
        },
        args,
    )
    draw(rows, n, args.figures / "zero_memory.png")


if __name__ == "__main__":
    main()
