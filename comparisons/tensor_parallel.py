"""Two tensor-parallel ranks with one thread each, beside one rank; and sequence parallelism beside
both.

    python comparisons/tensor_parallel.py [--rounds 15] [--toy] [--out DIR]

Each round runs four things in turn, in the same two processes:

    one        a step of rank 0 alone on the whole batch, while rank 1 waits
    tensor     a step of both ranks under --tp 2
    sequence   the same with --sequence-parallel
    silent     a step under --tp 2 without the all-reduces

Ratios are medians over rounds. Shape: h 512, L 4, a 8, s 256, b 8, V 257, fp32.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import spread
from single_device import Random

import train
from base.world import Groups, keep_freed_memory
from proof import ranks

SHAPE = dict(
    model="gpt2",
    dropout=0.0,
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    seq_length=256,
    vocab_size=257,
    precision="fp32",
    global_batch_size=8,
)
TOY = SHAPE | dict(num_layers=2, hidden_size=64, seq_length=32)


def on_rank(rank: int, rounds: int, shape: dict) -> list[dict]:
    """Seconds of each kind, round by round."""
    keep_freed_memory()
    groups = Groups(tp=dist.group.WORLD)
    dataset = Random(shape["global_batch_size"], shape["seq_length"], shape["vocab_size"])

    def build(groups: Groups, **flags) -> train.Trainer:
        return train.Trainer(train.Config(**shape, **flags), torch.device("cpu"), groups)

    one = build(Groups())
    tensor = build(groups, tp=2)
    sequence = build(groups, tp=2, sequence_parallel=True)

    def step(trainer):
        trainer.forward_backward(1, dataset)
        trainer.update(1)

    def together(trainer) -> float:
        return report.timed_together(lambda: step(trainer))

    def silent() -> float:
        with report.without_all_reduce():
            return together(tensor)

    kinds = {
        "one": lambda: report.timed_alone(lambda: step(one)),
        "tensor": lambda: together(tensor),
        "sequence": lambda: together(sequence),
        "silent": silent,
    }
    return report.in_turn(kinds, rounds)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.parse(parser)
    shape = TOY if args.toy else SHAPE
    rounds = 1 if args.toy else args.rounds
    times = ranks.run(on_rank, 2, rounds, shape)[0]
    tokens = shape["global_batch_size"] * shape["seq_length"]
    results = {
        "tokens_per_second": tokens / report.median([t["tensor"] for t in times]),
        "step_seconds": spread([t["tensor"] for t in times]),
        "tensor_over_one_rank": spread([t["one"] / t["tensor"] for t in times]),
        "sequence_over_one_rank": spread([t["one"] / t["sequence"] for t in times]),
        "sequence_over_tensor": spread([t["tensor"] / t["sequence"] for t in times]),
        "tensor_of_no_communication": spread([t["silent"] / t["tensor"] for t in times]),
    }
    report.save("tensor_parallel", results, args, threads=1)
    report.print_results(results)


if __name__ == "__main__":
    main()
