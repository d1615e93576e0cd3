"""Data parallelism: every rank trains on its own part of the global batch, and the gradients are summed.

    stage 0     parameters, gradients and optimizer state on every rank; gradients all-reduced (PyTorch DDP, arXiv 2006.15704)

The sum can run while backward still does: parameters are grouped into buckets in the order in which backward finishes them
(the last layer first), and a bucket's all-reduce starts as soon as its last gradient is there. Only the loop knows which
backward is the last of a step; on the others nothing is sent.

    backward    [ head | block 3 | block 2 | block 1 | block 0 | embedding ]
    all-reduce         [ head    | block 3 | block 2 | block 1 | block 0 | embedding ]

Gradients are summed, never averaged: the loss of each micro-batch is already divided by the number of counted tokens in the
whole global batch, so unequal masks and any split into ranks and micro-batches come out right.

    python fsdp.py      two ranks against one: same gradients, bytes sent

Left out, and found in DDP: unused-parameter search (every bucket is reduced, an unused parameter adds zeros), and gradient
compression.
"""
import torch
import torch.distributed as dist
from torch import nn

from optimizer import GradientAccumulator, LossScaler, accumulation_dtype

BUCKET_BYTES = 8 * 2**20         # a bucket is closed once it holds so much; the last one is what nothing can hide


class _Bucket:
    """Parameters whose gradients lie side by side in one flat tensor, so that one collective reduces them all."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=accumulation_dtype(first.dtype), device=first.device)
        self.waiting, self.work = len(parameters), None


class DataParallel(GradientAccumulator):
    """Stage 0. `parameter.main_grad` is a view into its bucket; after `reduce_gradients()` it is the sum over the group."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, scaler: LossScaler | None = None):
        self.group, self.last, self.buckets = group, False, []
        fill, size = [], 0
        for p in reversed(list(model.parameters())):                     # the order in which backward reaches them, nearly
            fill.append(p)
            size += p.numel() * accumulation_dtype(p.dtype).itemsize
            if size >= BUCKET_BYTES:
                self.buckets.append(_Bucket(fill))
                fill, size = [], 0
        if fill:
            self.buckets.append(_Bucket(fill))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for bucket in self.buckets:
            for p, part in zip(bucket.parameters, bucket.flat.split([p.numel() for p in bucket.parameters])):
                p.main_grad = part.view(p.shape)
        super().__init__(model, scaler)

    def accumulate(self, p: nn.Parameter) -> None:
        if p.grad is None:
            return
        super().accumulate(p)
        if self.last:
            self.bucket_of[p].waiting -= 1
            self.launch()

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()

    def last_backward(self) -> None:
        """The next backward is the step's last: buckets may go as soon as they are full."""
        self.last = True

    def launch(self, everything: bool = False) -> None:
        """Start the all-reduce of full buckets, in the same order on every rank."""
        for bucket in self.buckets:
            if bucket.work is None:
                if bucket.waiting and not everything:
                    return
                bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def reduce_gradients(self) -> None:
        """Wait until every `main_grad` is the sum over the group."""
        self.launch(everything=True)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.work, bucket.waiting = None, len(bucket.parameters)
        self.last = False


def shard(model: nn.Module, group: dist.ProcessGroup, stage: int = 0, scaler: LossScaler | None = None) -> DataParallel:
    """Make `model` one of `group.size()` replicas; all ranks must hold equal weights. Raises ValueError for another stage."""
    if stage != 0:
        raise ValueError(f"stage {stage}: must be 0")
    return DataParallel(model, group, scaler)


# ---------------------------------------------------------------------------------------------------------------------

def _lesson(rank: int, world: int):
    import gpt
    import sharding
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(**gpt.PRESETS["tiny"][0]))
    sharding.init(model, 0, "cpu", torch.float32)
    gradients = GradientAccumulator(model) if world == 1 else shard(model, dist.group.WORLD)
    sent, arrived, all_reduce = [], [], dist.all_reduce                  # sent: (bytes, gradients that were there when it left)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(arrived.append)

    def counted(tensor, **options):
        sent.append((tensor.nbytes, len(arrived) + 1))
        return all_reduce(tensor, **options)
    dist.all_reduce = counted
    tokens = torch.randint(257, (4, 65), generator=torch.Generator().manual_seed(0)).chunk(world)[rank]
    gradients.last_backward()
    model(tokens[:, :-1], tokens[:, 1:]).sum().backward(torch.tensor(1 / 256))
    gradients.reduce_gradients()
    return {name: p.main_grad for name, p in model.named_parameters()}, sent, len(arrived)


def main():
    import ranks
    (one, _, _), = ranks.run(_lesson, 1, 1)
    (two, sent, count), _ = ranks.run(_lesson, 2, 2)
    worst = max(((one[n] - two[n]).abs().max() / one[n].abs().max()).item() for n in one)
    print(f"tiny, 4 sequences on one rank, or 2 on each of two: largest relative difference of a gradient {worst:.1e}")
    for size, ready in sent:
        print(f"an all-reduce of {size:,} bytes left when {ready} of {count} gradients were there")
    print(f"in all {sum(size for size, _ in sent):,} bytes, 4 for each of {sum(g.numel() for g in one.values()):,} parameters: Ψ elements, "
          "of which a ring sends 2 (N - 1)/N from each rank")


if __name__ == "__main__":
    main()
