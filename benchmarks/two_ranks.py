"""Two ranks with one thread each beside one rank: what the second rank gains, and what the
communication costs.

    python -m benchmarks.two_ranks data [--rounds 25] [--toy] [--out DIR]
    python -m benchmarks.two_ranks tensor [--rounds 25] [--toy] [--out DIR]

Each round runs four things in turn, in the same two processes. Of data parallelism:

    sent         a step of both ranks, gradients summed
    silent       the same without the all-reduces
    alone        a step of rank 0 on its share, as on one device, while rank 1 waits
    all_reduce   processor time of one all-reduce of as many bytes as the gradients have

and of tensor parallelism:

    tensor       a step of both ranks under --tp 2
    silent       the same without the all-reduces
    alone        a step of rank 0 on the whole batch, while rank 1 waits
    sequence     a step under --tp 2 --sequence-parallel

Ratios are medians over rounds. Shape: h 512, L 4, a 8, s 256, V 257, a batch of 8, fp32.
"""

import time

import torch
import torch.distributed as dist

from base import cpu
from base.groups import Groups
from benchmarks import report
from benchmarks.report import median, ratio, spread
from benchmarks.steps import GPT, Steps
from course import ranks

SHAPE = GPT | dict(global_batch_size=8)
TOY = SHAPE | dict(num_layers=2, hidden_size=64, seq_length=32)


def data_kinds(shape: dict) -> dict:
    both = Steps(shape, Groups(dp=dist.group.WORLD))
    one = Steps(shape, global_batch_size=4)
    gradients = torch.zeros(one.trainer.num_parameters)

    def all_reduce() -> float:
        dist.barrier()
        start = time.process_time()
        dist.all_reduce(gradients)
        return time.process_time() - start

    return dict(sent=both.together, silent=both.silent, alone=one.alone, all_reduce=all_reduce)


def data_results(times: list[dict]) -> dict:
    return {
        "of_no_communication": ratio(times, "silent", "sent"),
        "over_one_rank": ratio(times, "alone", "sent", factor=2),
        "all_reduce_processor_seconds": spread([t["all_reduce"] for t in times]),
    }


def tensor_kinds(shape: dict) -> dict:
    groups = Groups(tp=dist.group.WORLD)
    both = Steps(shape, groups, tp=2)
    sequence = Steps(shape, groups, tp=2, sequence_parallel=True)
    alone = Steps(shape).alone
    return dict(alone=alone, tensor=both.together, sequence=sequence.together, silent=both.silent)


def tensor_results(times: list[dict]) -> dict:
    return {
        "tensor_over_one_rank": ratio(times, "alone", "tensor"),
        "sequence_over_one_rank": ratio(times, "alone", "sequence"),
        "sequence_over_tensor": ratio(times, "tensor", "sequence"),
        "tensor_of_no_communication": ratio(times, "silent", "tensor"),
    }


# what: (its kinds on a rank, its results, the kind whose step it is about)
PARTS = {
    "data": (data_kinds, data_results, "sent"),
    "tensor": (tensor_kinds, tensor_results, "tensor"),
}


def on_rank(rank: int, what: str, rounds: int, shape: dict) -> list[dict]:
    """Seconds of each kind, round by round."""
    cpu.set_up()
    return report.in_turn(PARTS[what][0](shape), rounds)


def main():
    parser = report.arguments(__doc__, rounds=25)
    parser.add_argument("what", choices=PARTS)
    args = report.parse(parser, rounds=1)
    shape = TOY if args.toy else SHAPE
    times = ranks.run(on_rank, 2, args.what, args.rounds, shape)[0]
    _, results_of, kind = PARTS[args.what]
    seconds = [t[kind] for t in times]
    results = {
        "tokens_per_second": shape["global_batch_size"] * shape["seq_length"] / median(seconds),
        "step_seconds": spread(seconds),
    }
    results |= results_of(times)
    report.save(f"{args.what}_parallel", results, args, threads=1)
    report.print_results(results)


if __name__ == "__main__":
    main()
