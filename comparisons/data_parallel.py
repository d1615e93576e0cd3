"""Two data-parallel ranks with one thread each: what the communication costs, and what the second
rank gains.

    python comparisons/data_parallel.py [--rounds 25] [--toy] [--out DIR]

Each round runs four things in turn, in the same two processes:

    sent         a step of both ranks, gradients summed
    silent       the same without the all-reduces
    alone        a step of rank 0 on its share, as on one device, while rank 1 waits
    all_reduce   processor time of one all-reduce of as many bytes as the gradients have

Ratios are medians over rounds. Shape: h 512, L 4, a 8, s 256, V 257, 4 sequences a rank, fp32.
"""

import sys
import time
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
)
TOY = SHAPE | dict(num_layers=2, hidden_size=64, seq_length=32)


def on_rank(rank: int, rounds: int, shape: dict) -> list[dict]:
    """Seconds of each kind, round by round."""
    keep_freed_memory()
    cpu = torch.device("cpu")
    both_config = train.Config(**shape, global_batch_size=8)
    both = train.Trainer(both_config, cpu, Groups(dp=dist.group.WORLD))
    one = train.Trainer(train.Config(**shape, global_batch_size=4), cpu, Groups())
    dataset = Random(4, shape["seq_length"], 257)
    gradients = torch.zeros(sum(p.numel() for p in one.model.parameters()))

    def step(trainer):
        trainer.forward_backward(1, dataset)
        trainer.update(1)

    def sent() -> float:
        return report.timed_together(lambda: step(both))

    def silent() -> float:
        with report.without_all_reduce():
            return sent()

    def alone() -> float:
        return report.timed_alone(lambda: step(one))

    def all_reduce() -> float:
        dist.barrier()
        start = time.process_time()
        dist.all_reduce(gradients)
        return time.process_time() - start

    kinds = {"sent": sent, "silent": silent, "alone": alone, "all_reduce": all_reduce}
    return report.in_turn(kinds, rounds)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    args = report.parse(parser)
    shape = TOY if args.toy else SHAPE
    rounds = 1 if args.toy else args.rounds
    times = ranks.run(on_rank, 2, rounds, shape)[0]
    tokens = 8 * shape["seq_length"]
    results = {
        "tokens_per_second": tokens / report.median([t["sent"] for t in times]),
        "step_seconds": spread([t["sent"] for t in times]),
        "of_no_communication": spread([t["silent"] / t["sent"] for t in times]),
        "over_one_rank": spread([2 * t["alone"] / t["sent"] for t in times]),
        "all_reduce_processor_seconds": spread([t["all_reduce"] for t in times]),
    }
    report.save("data_parallel", results, args, threads=1)
    report.print_results(results)


if __name__ == "__main__":
    main()
