"""A ring of ranks: tensors go from rank to rank while each rank computes with what it has.

    rank 0 -> rank 1 -> .. -> rank t - 1 -> rank 0

Ring attention (context_parallel.py) sends keys and values around. Sequence parallelism sends shards
of the sequence, so that an all-gather runs beside the product that reads it, and a reduce-scatter
beside the product whose parts it sums (`--tp-comm-overlap`). Each product becomes t smaller ones:

    all-gather, X A_i       multiply a shard of X    while the next shard arrives
    Y_i B_i, reduce-scatter compute a term of a sum  while the sum so far goes on

    seconds      c + (t - 1) max(c, x) instead of t c + (t - 1) x,  c to multiply, x to send a shard

The idea is that of arXiv 2105.05720; Megatron-LM calls it tp-comm-overlap.

Not covered: kernels that wait for a shard inside one product; rings in both directions.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Ring:
    """Sends a tensor to the next rank and receives one from the rank before, during computation.
    All ranks start and wait in one order, by which NCCL pairs messages; gloo pairs them by tag."""

    def __init__(self, group: dist.ProcessGroup, tag: int = 0):
        ranks = dist.get_process_group_ranks(group)
        self.next = ranks[(group.rank() + 1) % len(ranks)]
        self.before = ranks[group.rank() - 1]
        self.group = group
        self.tag = tag

    def start(self, x: Tensor) -> None:
        self.sent = x.contiguous()
        self.received = torch.empty_like(self.sent)
        ops = [
            dist.P2POp(dist.isend, self.sent, self.next, self.group, self.tag),
            dist.P2POp(dist.irecv, self.received, self.before, self.group, self.tag),
        ]
        self.works = dist.batch_isend_irecv(ops)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        self.sent = None
        return self.received


def around(x: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """(rank, its x) for all ranks, this one first. While the caller computes with one, the next is
    sent. x: of equal shape on all ranks."""
    rank, n = ring.group.rank(), ring.group.size()
    for step in range(n):
        if step < n - 1:
            ring.start(x)
        yield (rank - step) % n, x
        if step < n - 1:
            x = ring.wait()


def sum_around(term: Callable[[int], Tensor], ring: Ring) -> Tensor:
    """Σ over ranks of their term(this rank). A sum begins on the rank after the one that it is for,
    and goes all the way round. term(n): this rank's part of the sum for rank n."""
    rank, n = ring.group.rank(), ring.group.size()
    for step in range(n):
        total = term((rank - 1 - step) % n)
        if step > 0:
            total += ring.wait()
        if step < n - 1:
            ring.start(total)
    return total


# --- products of sequence parallelism -------------------------------------------------------------


def multiply_shards(x: Tensor, group: dist.ProcessGroup, weights, biases) -> list[Tensor]:
    """X W_iᵀ + b_i, of shards of X as they arrive. x: [b, s/t, in] -> [b, s, out] each"""
    shape = (len(x), group.size(), x.shape[1])
    products = [x.new_empty(*shape, len(w)) for w in weights]  # [b, t, s/t, out]
    for n, shard in around(x, Ring(group)):
        for y, weight, bias in zip(products, weights, biases):
            y[:, n] = F.linear(shard, weight, bias)
    return [y.flatten(1, 2) for y in products]


class _MultiplyAndScatter(torch.autograd.Function):
    """ḡ(Y Wᵀ) of sequence_parallel.py. In backward shards of ∂Z arrive while ∂Y is computed, and ∂W
    reads them all."""

    @staticmethod
    def forward(ctx, y, weight, group, weight_gradient):
        ctx.group, ctx.weight, ctx.weight_gradient = group, weight, weight_gradient
        ctx.save_for_backward(y)
        shards = y.chunk(group.size(), 1)
        return sum_around(lambda n: F.linear(shards[n], weight), Ring(group))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        dy = torch.empty_like(y, memory_format=torch.contiguous_format)
        whole = grad.new_empty(*y.shape[:2], grad.shape[-1])  # [b, s, out]
        length = grad.shape[1]
        for n, shard in around(grad, Ring(ctx.group)):
            rows = slice(n * length, (n + 1) * length)
            whole[:, rows] = shard
            dy[:, rows] = shard @ ctx.weight
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = ctx.weight_gradient(ctx.weight, whole.flatten(0, 1), y.flatten(0, 1))
        return dy, d_weight, None, None


def multiply_and_scatter(y: Tensor, weight: Tensor, group, weight_gradient: Callable) -> Tensor:
    """Z = Σ_i Y_i B_i, of which each rank gets its shard. y: [b, s, in / t] -> [b, s/t, out].
    weight_gradient: that of sequence_parallel.py."""
    return _MultiplyAndScatter.apply(y, weight, group, weight_gradient)
