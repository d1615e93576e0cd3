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

import time

import report
import torch
import torch.distributed as dist
from report import median, ratio, spread
from steps import GPT, Steps

from base.world import Groups, keep_freed_memory
from proof import ranks

TOY = GPT | dict(num_layers=2, hidden_size=64, seq_length=32)


def on_rank(rank: int, rounds: int, shape: dict) -> list[dict]:
    """Seconds of each kind, round by round."""
    keep_freed_memory()
    both = Steps(shape, Groups(dp=dist.group.WORLD), global_batch_size=8)
    one = Steps(shape, global_batch_size=4)
    gradients = torch.zeros(one.trainer.num_parameters)

    def all_reduce() -> float:
        dist.barrier()
        start = time.process_time()
        dist.all_reduce(gradients)
        return time.process_time() - start

    kinds = dict(sent=both.together, silent=both.silent, alone=one.alone, all_reduce=all_reduce)
    return report.in_turn(kinds, rounds)


def main():
    args = report.parse(report.arguments(__doc__, rounds=25), rounds=1)
    shape = TOY if args.toy else GPT
    times = ranks.run(on_rank, 2, args.rounds, shape)[0]
    results = {
        "tokens_per_second": 8 * shape["seq_length"] / median([t["sent"] for t in times]),
        "step_seconds": spread([t["sent"] for t in times]),
        "of_no_communication": ratio(times, "silent", "sent"),
        "over_one_rank": ratio(times, "alone", "sent", factor=2),
        "all_reduce_processor_seconds": spread([t["all_reduce"] for t in times]),
    }
    report.save("data_parallel", results, args, threads=1)
    report.print_results(results)


if __name__ == "__main__":
    main()
