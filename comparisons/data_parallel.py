"""Two data-parallel ranks with one thread each: what the communication costs, and what the second rank gains.

    python comparisons/data_parallel.py [--rounds 15]

Each round runs three steps in turn, in the same two processes: both ranks with the gradients summed; both ranks with the
all-reduces left out; and rank 0 alone on its own share while rank 1 waits. Ratios are medians over rounds.
(h 512, L 4, a 8, s 256, V 257, 4 sequences a rank, fp32)
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

import fsdp
import ranks
import report
import train
from report import spread, timed
from single_device import Random


class Done:
    def wait(self):
        pass


def on_rank(rank: int, rounds: int):
    train.keep_freed_memory()
    config = train.Config(model="gpt2", dropout=0.0, num_layers=4, hidden_size=512, num_heads=8, seq_length=256, vocab_size=257, global_batch_size=8, precision="fp32")
    trainer = train.Trainer(config, torch.device("cpu"), dist.group.WORLD)
    dataset = Random(4, 256, 257)
    all_reduce = dist.all_reduce

    def step():
        trainer.forward_backward(1, dataset)
        trainer.update(1)
        dist.barrier()

    def measured(send: bool) -> float:
        fsdp.dist.all_reduce = all_reduce if send else lambda *args, **kwargs: Done()
        dist.barrier()
        seconds = timed(step)
        fsdp.dist.all_reduce = all_reduce
        return seconds

    def alone() -> float:
        fsdp.dist.all_reduce = lambda *args, **kwargs: Done()
        dist.barrier()
        seconds = timed(lambda: (trainer.forward_backward(1, dataset), trainer.update(1))) if rank == 0 else 0.0
        fsdp.dist.all_reduce = all_reduce
        dist.barrier()
        return seconds
    measured(True), measured(False)
    return [(measured(True), measured(False), alone()) if i % 2 else (lambda b, a, c: (a, b, c))(measured(False), measured(True), alone())
            for i in range(rounds)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    times = ranks.run(on_rank, 2, args.rounds)[0]
    against_silent = spread([without / with_ for with_, without, _ in times])
    against_one = spread([2 * one / with_ for with_, _, one in times])
    tokens = 8 * 256
    print(f"{tokens / report.median([t[0] for t in times]):,.0f} tokens/s on 2 ranks; of the same without communication "
          f"{against_silent['median']:.3f} ({against_silent['min']:.3f} to {against_silent['max']:.3f}); over one rank "
          f"{against_one['median']:.2f} ({against_one['min']:.2f} to {against_one['max']:.2f})")
    torch.set_num_threads(1)
    report.save("data_parallel", {"tokens_per_second": tokens / report.median([t[0] for t in times]),
                                  "of_no_communication": against_silent, "over_one_rank": against_one})


if __name__ == "__main__":
    main()
