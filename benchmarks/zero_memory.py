"""The four ZeRO stages: bytes of a rank in parameters, gradients and optimizer state, and elements
sent in a step, measured beside the formulas (arXiv 1910.02054, sections 5 and 7).

    python -m benchmarks.zero_memory [--ranks 4] [--toy] [--out DIR]

A GPT (h 256, L 4, a 8, s 64, V 1000; tied) in bf16 with fp32 gradients, masters and moments, and
again with --optimizer-state bf16; 2 micro-batches. Bytes are those of the storages that the rank
holds after backward, each once. Elements are counted call by call, padding included; an all-reduce
counts as 2.

Figure: docs/figures/zero_memory.svg
"""

import itertools
from pathlib import Path

import torch.distributed as dist

import fsdp
from base.groups import Groups
from benchmarks import report, style
from benchmarks.steps import GPT, Steps, state_bytes
from course import ranks
from course.fsdp import held_bytes

SHAPE = GPT | dict(hidden_size=256, seq_length=64, vocab_size=1000, precision="bf16")
TOY = SHAPE | dict(num_layers=2, hidden_size=64, seq_length=32)
# Micro-batches.
M = 2
PARTS = ("parameters", "gradients", "optimizer state")
# Bytes per parameter: masters and moments, or the low half of masters and 16-bit moments.
STATE_BYTES = {"fp32": 12, "bf16": 6}
# Gradients travel in fp32, parameters in bf16.
ITEM_BYTES = {"all-reduce": 4, "reduce-scatter": 4, "all-gather": 2}


def on_rank(rank: int, n: int, stage: int, state: str, shape: dict) -> tuple[dict, float, int]:
    """({part: bytes}, elements sent over Ψ (N - 1) / N, Ψ)"""
    batch = dict(global_batch_size=M * n, micro_batch_size=1)
    flags = dict(zero_stage=stage, optimizer_state=state)
    steps = Steps(shape, Groups(dp=dist.group.WORLD), **batch, **flags)
    trainer = steps.trainer
    sharder = trainer.gradients[0]
    with ranks.Collectives() as sent:
        steps.forward_backward()
        held = held_bytes(trainer.model, sharder)
        trainer.update(1)
        trainer.task.wait_for_parameters()
    parts = dict(zip(PARTS, (*held, state_bytes(trainer.optimizer))))
    # The norm is one number.
    calls = [(kind, size) for kind, size in sent.calls if size > 64]
    elements = [size / ITEM_BYTES[kind] * (1 + (kind == "all-reduce")) for kind, size in calls]
    # With padding.
    psi = sum(unit.N * unit.T for unit in sharder.units)
    return parts, sum(elements) / psi, trainer.num_parameters


def measure(n: int, stage: int, state: str, shape: dict) -> dict:
    """A row of results: bytes per parameter of the model, of the rank that has most."""
    results = ranks.run(on_rank, n, n, stage, state, shape)
    _, sent, psi = results[0]
    formula = fsdp.bytes_per_parameter(stage, n, state=STATE_BYTES[state])
    return {
        "stage": stage,
        "state": state,
        "measured": {part: max(held[part] for held, _, _ in results) / psi for part in PARTS},
        "formula": dict(zip(PARTS, formula)),
        "sent": sent,
        "sent_formula": fsdp.elements_sent(stage, M),
    }


def draw(results: dict, figures: Path) -> None:
    """results: what zero_memory.json holds. For each row a bar of the measured parts, their sum,
    and a mark where the formula is."""
    rows = results["rows"]
    figure, axes = style.figure(3)
    colours = style.COLOURS | {"parameters": style.COLOURS["weights"]}
    for y, row in enumerate(rows):
        end = style.stack(axes, y, row["measured"], colours, height=0.75)
        for part, bar in zip(PARTS, axes.patches) if y == 0 else ():
            style.inside(axes, part, bar.get_center(), colours[part])
        total = sum(row["formula"].values())
        axes.plot([total, total], [y - 0.45, y + 0.45], color="black", linewidth=2)
        style.label(axes, f"{end:.1f}", (end, y))
    names = [f"stage {row['stage']}, {row['state']} state" for row in rows]
    style.rows_of(axes, names)
    axes.set(
        xticks=range(0, 19, 2),
        xlabel="bytes of a rank, per parameter of the model",
        title=f"Measured, {results['ranks']} ranks, bf16 (black mark: the formula)",
    )
    style.save(figure, figures / "zero_memory.svg")


def main():
    args = report.parse(report.arguments(__doc__, ranks=4), ranks=2)
    shape = TOY if args.toy else SHAPE
    print(f"{args.ranks} ranks: bytes per parameter of the rank that has most")
    rows = []
    table = report.Table()
    for state, stage in itertools.product(STATE_BYTES, range(4)):
        row = measure(args.ranks, stage, state, shape)
        rows.append(row)
        cells = {x: f"{row['measured'][x]:.3f} / {row['formula'][x]:.3f}" for x in PARTS}
        sent = f"{row['sent']:.3f} / {row['sent_formula']} times Ψ (N - 1) / N"
        table.row({"stage": stage, "state": state, **cells, "sent": sent})
    off = [row["measured"][part] / row["formula"][part] - 1 for row in rows for part in PARTS]
    worst = max(map(abs, off))
    # 7.5 B parameters on 64 devices, with the paper's 2-byte gradients
    paper = [sum(fsdp.bytes_per_parameter(stage, 64, gradient=2)) * 7.5 for stage in range(4)]
    print(
        f"largest difference {worst:.2%}; the paper's 7.5 B parameters on 64 devices, its 2-byte"
        f" gradients, by formula: {', '.join(f'{gb:.1f}' for gb in paper)} GB"
    )
    results = {"ranks": args.ranks, "micro_batches": M, "rows": rows}
    results |= {"largest_difference": worst, "paper_7.5B_64_GB": paper}
    report.finish("zero_memory", results, args, draw)


if __name__ == "__main__":
    main()
