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

import report
import torch.distributed as dist
from report import median, ratio, spread
from steps import GPT, Steps

from base.world import Groups, keep_freed_memory
from proof import ranks

SHAPE = GPT | dict(global_batch_size=8)
TOY = SHAPE | dict(num_layers=2, hidden_size=64, seq_length=32)


def on_rank(rank: int, rounds: int, shape: dict) -> list[dict]:
    """Seconds of each kind, round by round."""
    keep_freed_memory()
    groups = Groups(tp=dist.group.WORLD)
    tensor = Steps(shape, groups, tp=2)
    kinds = {
        "one": Steps(shape).alone,
        "tensor": tensor.together,
        "sequence": Steps(shape, groups, tp=2, sequence_parallel=True).together,
        "silent": tensor.silent,
    }
    return report.in_turn(kinds, rounds)


def main():
    args = report.parse(report.arguments(__doc__, rounds=15), rounds=1)
    shape = TOY if args.toy else SHAPE
    times = ranks.run(on_rank, 2, args.rounds, shape)[0]
    tokens = shape["global_batch_size"] * shape["seq_length"]
    results = {
        "tokens_per_second": tokens / median([t["tensor"] for t in times]),
        "step_seconds": spread([t["tensor"] for t in times]),
        "tensor_over_one_rank": ratio(times, "one", "tensor"),
        "sequence_over_one_rank": ratio(times, "one", "sequence"),
        "sequence_over_tensor": ratio(times, "tensor", "sequence"),
        "tensor_of_no_communication": ratio(times, "silent", "tensor"),
    }
    report.save("tensor_parallel", results, args, threads=1)
    report.print_results(results)


if __name__ == "__main__":
    main()
