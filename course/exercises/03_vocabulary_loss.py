"""Exercise 3: the loss of logits that are cut by vocabulary.                       (30 minutes)

The head computes one logit z for each word of the vocabulary. Its matrix is cut by rows, so rank r
has logits of its own words alone: [b, s, V/t]. To gather them would move b s V numbers, and V is
50,000. But the loss of a token is

    log Σ exp(z) - z_target

and needs three numbers of all words, each of which is a reduction over ranks:

    largest     max z: exp(z - largest) cannot overflow, and the loss of z - largest is the same
    total       Σ exp(z - largest)
    target      z_target - largest: one rank has this word; the others add 0

    V = 7, t = 2     rank 0    words 0 1 2 3        rank 1    words 4 5 6 and a column of padding

The padding is no word. It must add nothing to `total`, nor be `largest`: set it to -inf.

Let autograd do the rest. `reduce_from_ranks` of exercise 2 is a sum whose backward is right; it
overwrites its argument. No gradient goes through `largest`, so take it of z.detach(), and reduce it
by `dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)`.

Read         base/cross_entropy.py
Paper        Megatron-LM, arXiv 1909.08053, section 3: "fuse the output .. with the cross entropy"
Not yet      `local_ids` and `_VocabParallelCrossEntropy` in tensor_parallel.py
Check        python -m course.exercises.check 3      --hint: a hint, one more at each call
Par          3 b s numbers are reduced, in forward; none in backward
"""

import torch
import torch.distributed as dist
from torch import Tensor

from tensor_parallel import reduce_from_ranks


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """The loss of each token, [b, s], the same on every rank.

    logits: [b, s, n], those of words group.rank() * n up to group.rank() * n + n - 1; those of
    vocab_size and above are padding. targets: [b, s], numbers of words.
    """
    raise NotImplementedError(
        "Begin with the padding: which of this rank's columns are at vocab_size or above? "
        "`masked_fill` gives a copy. For the target: its column here is targets - first, and where "
        "that is outside of 0 .. n - 1, gather any column and mask it with 0."
    )
