"""One layer's parameters as one tensor: what fsdp.py sends in a single collective.

Data-parallel ranks each keep a shard of every parameter (ZeRO, arXiv 1910.02054; PyTorch FSDP's
FlatParameter, arXiv 2304.11277, section 3.2.1). A collective for each parameter would send many
small messages. So the parameters of a layer are flattened to one tensor [N, T]. Row r holds rank
r's shard of each parameter, one after the other. A parameter that N does not divide is padded at
its end. For N = 2, weight [5, 2] and bias [2], both sharded along dimension 0, T is 7:

    row 0    w00 w01 w10 w11 w20 w21  b0        weight[0:3], bias[0:1]
    row 1    w30 w31 w40 w41  -   -   b1        weight[3:5] and a row of padding, bias[1:2]

An all-gather collects the rows of all ranks on every rank: all parameters of the layer. A
reduce-scatter sums tensors [N, T] over the ranks and gives rank r row r of the sum. For gradients
in this order, row r has the gradients of rank r's shards.

    python fsdp.py        the lesson of this file and of fsdp.py

fsdp.py decides when the rows are sent. This file knows where each element lies.

Not covered: PyTorch's newer `fully_shard` keeps each parameter as a DTensor of its own.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("fsdp")

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


def shard_dim(shape: torch.Size, n: int) -> int:
    """The dimension along which a parameter is sharded over n ranks: the first one of size n or
    more, else the largest."""
    for dim, size in enumerate(shape):
        if size >= n:
            return dim
    return max(range(len(shape)), key=lambda dim: shape[dim])


class Slot(NamedTuple):
    """Where the shard of one parameter lies in every row."""

    # where the first element stands
    offset: int
    # the dimension along which the parameter is sharded
    dim: int
    # the shape of a shard, padding included
    shape: torch.Size


class FlatParameters:
    """Parameters, flattened to [N, T] as in the picture above."""

    def __init__(self, parameters: list[nn.Parameter], n: int):
        """n: N, the number of ranks that share them."""
        self.parameters = parameters
        self.N = n
        self.T = 0
        self.padding = False
        self.slots: dict[nn.Parameter, Slot] = {}
        for p in parameters:
            dim = shard_dim(p.shape, n)
            shape = list(p.shape)
            # rounded up
            shape[dim] = -(-p.shape[dim] // n)
            self.slots[p] = Slot(self.T, dim, torch.Size(shape))
            self.T += math.prod(shape)
            self.padding |= n * shape[dim] > p.shape[dim]

    def shard_in(self, row: Tensor, p: nn.Parameter) -> Tensor:
        """A view of the shard of p, with padding, in row [T]."""
        offset, _, shape = self.slots[p]
        return row[offset : offset + shape.numel()].view(shape)

    def shards_in(self, flat: Tensor, p: nn.Parameter) -> Tensor:
        """A view of the shards of p of all ranks in flat [N, T]: [N, *shape of a shard]."""
        offset, _, shape = self.slots[p]
        return flat[:, offset : offset + shape.numel()].unflatten(1, shape)

    def views(self, flat: Tensor, p: nn.Parameter, whole: Tensor) -> Iterator[tuple]:
        """Pairs (view of flat [N, T], view of whole) of the same elements of p.

        whole has the shape of p: p itself, or its gradient. Copying inside the pairs moves p into
        flat, or out of it. The first pair has all shards that are full; the second one, if there is
        one, has what stands before the padding in the next shard. In the example above: the
        weight's first three rows, then its last two.
        """
        _, dim, shape = self.slots[p]
        size = shape[dim]
        full, rest = divmod(whole.shape[dim], size)
        shards = self.shards_in(flat, p)
        in_whole = whole.narrow(dim, 0, full * size).unflatten(dim, (full, size))
        # both [full, *shape of a shard]
        yield shards[:full], in_whole.movedim(dim, 0)
        if rest:
            yield shards[full].narrow(dim, 0, rest), whole.narrow(dim, full * size, rest)
