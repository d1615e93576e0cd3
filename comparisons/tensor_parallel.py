"""Two tensor-parallel ranks with one thread each, beside one rank with one thread; and sequence
parallelism beside it.

    python comparisons/tensor_parallel.py [--rounds 15] [--toy] [--out DIR]

Each round runs four things in turn, in the same two processes: a step of rank 0 alone, on the whole
batch, while rank 1 waits; a step of both under `--tp 2`; the same with `--sequence-parallel`; and
with the collectives left out. Ratios are medians over rounds. (h 512, L 4, a 8, s 256, b 8, V 257,
fp32)"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import spread, timed
from single_device import Random

import train
from lessons import ranks
from runtime.world import Groups, keep_freed_memory

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
    keep_freed_memory()
    cpu = torch.device("cpu")
    group = dist.group.WORLD
    one = train.Trainer(train.Config(**shape), cpu, Groups())
    tensor = train.Trainer(train.Config(**shape, tp=2), cpu, Groups(tp=group))
    sequence = train.Trainer(
        train.Config(**shape, tp=2, sequence_parallel=True), cpu, Groups(tp=group)
    )
    dataset = Random(shape["global_batch_size"], shape["seq_length"], shape["vocab_size"])
    all_reduce = dist.all_reduce

    def step(trainer):
        trainer.forward_backward(1, dataset)
        trainer.update(1)

    def both(trainer) -> float:
        dist.barrier()
        return timed(lambda: (step(trainer), dist.barrier()))

    def alone() -> float:
        dist.barrier()
        seconds = timed(lambda: step(one)) if rank == 0 else 0.0
        dist.barrier()
        return seconds

    def silent() -> float:
        dist.all_reduce = lambda *args, **options: report.Done()
        seconds = both(tensor)
        dist.all_reduce = all_reduce
        return seconds

    kinds = {
        "one": alone,
        "tensor": lambda: both(tensor),
        "sequence": lambda: both(sequence),
        "silent": silent,
    }
    return report.in_turn(kinds, rounds)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.parse(parser)
    shape, rounds = (TOY, 1) if args.toy else (SHAPE, args.rounds)
    times = ranks.run(on_rank, 2, rounds, shape)[0]
    # what the ranks had, for the record
    torch.set_num_threads(1)
    results = {
        "tokens_per_second": (
            shape["global_batch_size"]
            * shape["seq_length"]
            / report.median([t["tensor"] for t in times])
        ),
        "step_seconds": spread([t["tensor"] for t in times]),
        "tensor_over_one_rank": spread([t["one"] / t["tensor"] for t in times]),
        "sequence_over_one_rank": spread([t["one"] / t["sequence"] for t in times]),
        "sequence_over_tensor": spread([t["tensor"] / t["sequence"] for t in times]),
        "tensor_of_no_communication": spread([t["silent"] / t["tensor"] for t in times]),
    }
    report.save("tensor_parallel", results, args)
    for name, value in results.items():
        print(
            f"{name}: {value:,.0f}"
            if isinstance(value, float)
            else f"{name}: {value['median']:.3f} ({value['min']:.3f} to {value['max']:.3f})"
        )


if __name__ == "__main__":
    main()
