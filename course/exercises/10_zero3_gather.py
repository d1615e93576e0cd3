"""Exercise 10: ZeRO-3, gather a weight, use it, drop it.                           (30 minutes)

ZeRO-3 shards the parameters too. A rank keeps its rows of each weight. It has the whole weight only
while a layer runs: it gathers the rows of all ranks, computes, and drops them. Backward needs the
weight again, so it is gathered again. What is kept from forward to backward is the input and the
row, never the whole weight:

    forward      gather W        y = x Wᵀ                                    drop W
    backward     gather W        ∂x = ∂y W     ∂W = ∂yᵀ x, summed: row r     drop W

Each rank has samples of its own: x and ∂x differ from rank to rank and nothing is summed there. ∂W
of this rank is one term of the sum over the ranks, as in exercise 9.

W [out, in] is cut along dimension 0. A row [ceil(out / N), in] has zeros at the end where N does
not divide `out`. `all_gather(whole, row, group=group)` fills whole [N * rows, in].

Read         exercises 1 and 9; `FullySharded` in the docstring of fsdp.py, not its code
Paper        ZeRO, arXiv 1910.02054, section 5.3; PyTorch FSDP, arXiv 2304.11277, section 3
Not yet      `FullySharded` in fsdp.py
Check        python -m course.exercises.check 10      --hint: a hint, one more at each call
Par          two all-gathers and one reduce-scatter: 3 times the weight instead of 2. Between
             forward and backward the whole weight is not in memory
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import all_gather, reduce_scatter


class ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row, out_features, group):
        raise NotImplementedError(
            "Gather W into row.new_empty(N * rows, in) and cut it to out_features rows. "
            "ctx.save_for_backward keeps tensors: which two does backward need?"
        )

    @staticmethod
    def backward(ctx, grad):
        """Four gradients: of x, of row, and None for the rest."""
        raise NotImplementedError(
            "Gather W again: ∂x = grad @ W. ∂W = gradᵀ x, padded to N * rows rows with zeros, then "
            "reduce-scattered into a tensor like row."
        )


def sharded_linear(x: Tensor, row: Tensor, out_features: int, group: dist.ProcessGroup) -> Tensor:
    """y = x Wᵀ, where each rank has its rows of W. x: [samples, in] -> [samples, out_features]"""
    return ShardedLinear.apply(x, row, out_features, group)
