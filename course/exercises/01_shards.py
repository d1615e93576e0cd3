"""Exercise 1: cut a weight, and put it back together.                              (15 minutes)

A model that is too large for one device is divided. A weight then exists on no rank as a whole
(a rank is one process, with one device): rank r of n holds part r of one of its dimensions.
Collectives, the operations in which all ranks take part, move tensors of equal size. So all parts
have the same size, ceil(size / n), and what is missing at the end is filled with zeros: padding.

    weight [5, 2], dimension 0, n = 2          a part has ceil(5 / 2) = 3 rows

    rank 0    rows 0 1 2                       rank 1    rows 3 4, and a row of zeros

    gather    rows 0 1 2 | 3 4 and the zeros   ->   the first 5 of the 6 rows

An all-gather sends each rank's tensor to all ranks. It is one call:
`dist.all_gather(parts, part, group=group)` fills `parts`, a list of n tensors like `part`.

Read         gpt.py once; the top of course/ranks.py, for what runs your code on two ranks
Paper        Megatron-LM, arXiv 1909.08053, section 3: weights, cut by columns or by rows
Not yet      `shard_of` and `gather` in sharding.py
Check        python -m course.exercises.check 1      --hint: a hint, one more at each call
Par          one all-gather
"""

import torch
import torch.distributed as dist
from torch import Tensor


def shard_of(whole: Tensor, dim: int, rank: int, n: int) -> Tensor:
    """Part `rank` of n of a tensor, along `dim`: all parts have one size, with zeros at the end."""
    raise NotImplementedError(
        "Where does part `rank` begin and end, if all parts have ceil(size / n) rows? Nothing may "
        "lie beyond the end: it can begin there too. `narrow` cuts, `F.pad` or `cat` adds zeros."
    )


def gather(part: Tensor, size: int, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor, on every rank, from each rank's part. size: of `dim`, without padding.

    group.size() is the number of ranks. A tensor that is sent must be contiguous.
    """
    raise NotImplementedError(
        "Make a list of empty tensors like `part`, one for each rank; all-gather; join them along "
        "`dim` with torch.cat; drop the padding."
    )
