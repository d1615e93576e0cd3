"""Two data-parallel ranks with one thread each: what the communication costs, and what the second
rank gains.

    python comparisons/data_parallel.py [--rounds 25] [--toy] [--out DIR]

Each round runs four things in turn, in the same two processes: a step of both ranks with the
gradients summed; the same with the all-reduces left out; a step of rank 0 alone, on its share and
without buckets, as on one device, while rank 1 waits; and an all-reduce of as many bytes as the
gradients have, alone. Ratios are medians over rounds. (h 512, L 4, a 8, s 256, V 257, 4 sequences a
rank, fp32)"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import spread, timed
from single_device import Random

import fsdp
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
)
TOY = SHAPE | dict(num_layers=2, hidden_size=64, seq_length=32)


def on_rank(rank: int, rounds: int, shape: dict) -> list[dict]:
    keep_freed_memory()
    both = train.Trainer(
        train.Config(**shape, global_batch_size=8), torch.device("cpu"), Groups(dp=dist.group.WORLD)
    )
    one = train.Trainer(train.Config(**shape, global_batch_size=4), torch.device("cpu"), Groups())
    dataset = Random(4, shape["seq_length"], 257)
    all_reduce = dist.all_reduce
    gradients = torch.zeros(sum(p.numel() for p in one.model.parameters()))

    def step(trainer):
        trainer.forward_backward(1, dataset)
        trainer.update(1)

    def together() -> float:
        dist.barrier()
        return timed(lambda: (step(both), dist.barrier()))

    def silent() -> float:
        fsdp.dist.all_reduce = lambda *args, **kwargs: report.Done()
        seconds = together()
        fsdp.dist.all_reduce = all_reduce
        return seconds

    def alone() -> float:
        dist.barrier()
        seconds = timed(lambda: step(one)) if rank == 0 else 0.0
        dist.barrier()
        return seconds

    def processor_time() -> float:
        dist.barrier()
        start = time.process_time()
        dist.all_reduce(gradients)
        return time.process_time() - start

    kinds = {"sent": together, "silent": silent, "alone": alone, "all_reduce": processor_time}
    return report.in_turn(kinds, rounds)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    args = report.parse(parser)
    shape, rounds = (TOY, 1) if args.toy else (SHAPE, args.rounds)
    times = ranks.run(on_rank, 2, rounds, shape)[0]
    # what the ranks had, for the record
    torch.set_num_threads(1)
    results = {
        "tokens_per_second": 8 * shape["seq_length"] / report.median([t["sent"] for t in times]),
        "step_seconds": spread([t["sent"] for t in times]),
        "of_no_communication": spread([t["silent"] / t["sent"] for t in times]),
        "over_one_rank": spread([2 * t["alone"] / t["sent"] for t in times]),
        "all_reduce_processor_seconds": spread([t["all_reduce"] for t in times]),
    }
    report.save("data_parallel", results, args)
    for name, value in results.items():
        print(
            f"{name}: {value:,.0f}"
            if isinstance(value, float)
            else f"{name}: {value['median']:.3f} ({value['min']:.3f} to {value['max']:.3f})"
        )


if __name__ == "__main__":
    main()
