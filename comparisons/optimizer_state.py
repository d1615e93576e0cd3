"""What 16-bit optimizer state does to the loss: the default model on the default corpus, bf16
weights, with --optimizer-state fp32 and bf16.

    python comparisons/optimizer_state.py [--seeds 2] [--steps 500] [--lr 1e-3] [--toy] [--out DIR]

A run is 500 steps of 8 sequences. Compared are the held-out loss after the last step, over the same
256 sequences, and the mean training loss of the last 50 steps. A seed sets the weights and the
order of samples. Rounding alone makes two runs differ, so look at the spread.

At the default rate of 3e-3 the model is at the edge of stability, and rounding alone moves the loss
by percents. At 1e-3 it does not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch

import data
import train
from base.world import Groups, keep_freed_memory
from corpus.tokenizer import ByteTokenizer

TOY = dict(model="tiny", num_layers=2, hidden_size=32, num_heads=4, ffn_hidden_size=64)
# sequences of the held-out loss
HELD_OUT = 256
HELD_OUT_TOY = 8


def measure(state: str, seed: int, steps: int, lr: float, fields: dict) -> dict:
    """One run. state: fp32 or bf16; fields: of train.Config, empty for the default model. Losses
    are in nats per byte."""
    config = train.Config(
        precision="bf16",
        optimizer_state=state,
        seed=seed,
        steps=steps,
        lr=lr,
        global_batch_size=8,
        device="cpu",
        **fields,
    )
    trainer = train.Trainer(config, torch.device("cpu"), Groups())
    folder = data.prepare([], ByteTokenizer())
    train_set = data.Corpus(folder, 128, seed)
    held_out = data.Corpus(folder, 128, None, "held-out")
    losses = []
    for step in range(1, steps + 1):
        losses.append(trainer.forward_backward(step, train_set).item())
        trainer.update(step)
    optimizer = trainer.optimizer
    weight_bytes = sum(p.nbytes for p in optimizer.parameters.values())
    state_bytes = report.optimizer_bytes(optimizer)
    last = losses[-50:]
    return {
        "held_out": trainer.task.evaluate(held_out, HELD_OUT_TOY if fields else HELD_OUT),
        "training": sum(last) / len(last),
        "bytes_per_parameter": (weight_bytes + state_bytes) / trainer.num_parameters,
    }


def print_row(seed: int, row: dict) -> None:
    parts = []
    for state in ("fp32", "bf16"):
        r = row[state]
        parts.append(
            f"{state}: {r['bytes_per_parameter']:.0f} bytes a parameter, held out"
            f" {r['held_out']:.4f}, training {r['training']:.4f}"
        )
    ratio = row["ratio"]
    parts.append(f"ratio {ratio['held_out']:.4f}, {ratio['training']:.4f}")
    print(f"seed {seed}: {'; '.join(parts)}", flush=True)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=500)
    args = report.parse(parser)
    fields = TOY if args.toy else {}
    if args.toy:
        args.seeds = 1
        args.steps = 3
    keep_freed_memory()
    rows = []
    for seed in range(args.seeds):
        fp32 = measure("fp32", seed, args.steps, args.lr, fields)
        bf16 = measure("bf16", seed, args.steps, args.lr, fields)
        ratio = {loss: bf16[loss] / fp32[loss] for loss in ("held_out", "training")}
        rows.append({"fp32": fp32, "bf16": bf16, "ratio": ratio})
        print_row(seed, rows[-1])
    report.save(
        "optimizer_state",
        {
            "steps": args.steps,
            "lr": args.lr,
            "rows": rows,
            "held_out_ratio": report.spread([row["ratio"]["held_out"] for row in rows]),
        },
        args,
    )


if __name__ == "__main__":
    main()
