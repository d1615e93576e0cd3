"""What 16-bit optimizer state does to the loss: the default model on the default corpus, bf16
weights, 500 steps of 8 sequences, --optimizer-state fp32 and bf16.

    python comparisons/optimizer_state.py [--seeds 2] [--lr 1e-3] [--toy] [--out DIR]

Held-out loss after the last step over the same 256 sequences, and the mean training loss of the
last 50 steps, for each seed (weights and order of samples): one run differs from another by
rounding too, so look at the spread. At the default rate of 3e-3 the model is at the edge of
stability, and rounding alone moves the loss by percents; at 1e-3 it does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch

import data
import train
from corpus.tokenizer import ByteTokenizer
from runtime.world import Groups, keep_freed_memory

TOY = dict(model="tiny", num_layers=2, hidden_size=32, num_heads=4, ffn_hidden_size=64)


def losses(state: str, seed: int, steps: int, lr: float, fields: dict) -> dict:
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
    found = []
    for step in range(1, steps + 1):
        found.append(trainer.forward_backward(step, train_set).item())
        trainer.update(step)
    optimizer = trainer.optimizer
    last = found[-50:]
    held = [
        *optimizer.parameters.values(),
        *optimizer.masters.values(),
        *optimizer.low.values(),
        *optimizer.exp_avg.values(),
        *optimizer.exp_avg_sq.values(),
    ]
    return {
        "held_out": trainer.evaluate(held_out, 8 if fields else 256),
        "training": sum(last) / len(last),
        "bytes_per_parameter": sum(x.nbytes for x in held) / trainer.num_parameters,
    }


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
        row = {
            state: losses(state, seed, args.steps, args.lr, fields) for state in ("fp32", "bf16")
        }
        rows.append(
            row
            | {
                "ratio": {
                    key: row["bf16"][key] / row["fp32"][key] for key in ("held_out", "training")
                }
            }
        )
        print(
            f"seed {seed}: "
            + "; ".join(
                f"{state}: {row[state]['bytes_per_parameter']:.0f} bytes a parameter, held out"
                f" {row[state]['held_out']:.4f}, training {row[state]['training']:.4f}"
                for state in row
            )
            + f"; ratio {rows[-1]['ratio']['held_out']:.4f}, {rows[-1]['ratio']['training']:.4f}",
            flush=True,
        )
    report.save(
        "optimizer_state",
        {
            "steps": args.steps,
            "lr": args.lr,
            "rows": rows,
            "held_out_ratio": report.spread([r["ratio"]["held_out"] for r in rows]),
        },
        args,
    )


if __name__ == "__main__":
    main()
