"""Exercise 9: ZeRO-2, each rank keeps its row of the gradients.                    (25 minutes)

Data-parallel ranks hold the same model and train it on different samples. The gradient is the sum
over ranks. Plain data parallelism gives every rank the whole sum (an all-reduce). In ZeRO the
optimizer of rank r updates only shard r of each parameter. So rank r needs only its shard of the
sum, and N ranks keep 1/N of the gradients each. That is a reduce-scatter.

One collective moves one layer. Its gradients are laid out as [N, T]: row r holds shard r of each
gradient, one after the other. Each is cut along dimension 0, and padded at its own end with zeros.
For N = 2, a weight [5, 2] and a bias [2]:

    row 0    w00 w01 w10 w11 w20 w21  b0          weight rows 0 1 2, bias 0
    row 1    w30 w31 w40 w41   0   0  b1          weight rows 3 4 and padding, bias 1

`reduce_scatter(row, flat.view(-1), group=group)` sums `flat` [N, T] over the ranks; rank r gets row
r of the sum in `row` [T]. A step has m micro-batches: every backward brings gradients, which are
reduced at once and freed; the rows are added up.

Read         fsdp.py, its introduction and its section `units`
Paper        ZeRO, arXiv 1910.02054, section 5.2
Not yet      `accumulate` and `reduce` in fsdp.py
Check        python -m course.exercises.check 9      --hint: a hint, one more at each call
Par          one reduce-scatter for each micro-batch; between them a rank keeps 1/N
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp import reduce_scatter


def reduce_gradients(
    grads: list[Tensor], summed: Tensor | None, group: dist.ProcessGroup
) -> Tensor:
    """After the backward of one micro-batch: `summed` and this rank's row of the sum of `grads`.

    grads: of one layer, whole, from this rank's samples; dimension 0 of each has N or more.
    summed: what this function returned for the micro-batch before, [T]; None for the first.
    """
    raise NotImplementedError(
        "For each gradient: add rows of zeros until N = group.size() divides it, then view it as "
        "[N, -1]. Join them along dimension 1: that is [N, T]. Reduce-scatter. Add to `summed`."
    )
