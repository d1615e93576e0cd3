"""Exercise 13: Sinkhorn, a router whose load is even.                              (25 minutes)

A mixture of experts has E MLPs, and a router says which token goes to which. Left alone, it sends
all tokens to a few experts. Sinkhorn's algorithm finds a plan: a matrix of tokens by experts in
which every row sums to 1/N, so that each token counts the same, and every column to 1/E, so that
each expert does. A token goes where its row of the plan is largest.

    logits  e0  e1        plan                      the raw logits send all to e0
    t0     2.0 1.0        .10  .15   -> e1
    t1     2.2 1.0        .12  .13   -> e1          rows sum to 1/4
    t2     1.5 1.0        .07  .18   -> e1          columns sum to 1/2
    t3     3.0 0.0        .21  .04   -> e0

The plan is diag(d0) C diag(d1) with C = exp(logits): each row and each column of C times a number.
There is one such plan. To find it, start with d1 = 1 and repeat:

    d0 = (1/N) / (C d1)          now the rows are right, and the columns are not
    d1 = (1/E) / (Cᵀ d0)         now the columns are right, and the rows are not, but less wrong

until the columns are right after the first of the two lines already: d1 times (Cᵀ d0) is each
expert's load, and E times that is 1 where it is even.

Read         the section `routers` of moe.py
Paper        Clark et al., arXiv 2202.01169, section 3.1
Not yet      `scale_rows_and_columns` and `balance` in base/transport_plan.py
Check        python -m course.exercises.check 13      --hint: a hint, one more at each call
Par          the matrix C is made once; an iteration makes vectors only
"""

import torch
from torch import Tensor


def sinkhorn(logits: Tensor, tolerance: float) -> Tensor:
    """The plan, [N, E]. logits: [N, E], float64, of any size.

    tolerance: end where the loads, times E, differ from 1 by at most this much on average.
    """
    raise NotImplementedError(
        "exp overflows for logits above 709. The plan does not change if a number is subtracted "
        "from a row: which one keeps exp at most 1?"
    )
