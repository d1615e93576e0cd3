"""Exercise 5: 1F1B, a pipeline schedule as a list.                                 (20 minutes)

A pipeline gives each of p ranks a part of the layers, and divides the batch into m micro-batches.
F of a micro-batch goes from rank 0 to rank p - 1, B, its backward, comes back. A schedule is one
list for each rank: what it computes, in order. It has no times; a rank waits for what it needs.

GPipe does all F first, then all B. So a rank holds the activations of m micro-batches. 1F1B begins
with B as soon as the first gradient comes back: it holds only as many as are on their way.

    rank 0    F0 F1 F2 F3 .. .. .. .. .. .. B0 -- F4 B1 -- F5       p = 4; B takes twice as long
    rank 1    .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 --       as F, dots are idle time
    rank 2    .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3
    rank 3    .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4

    warmup    p - 1 - rank forwards          (3, 2, 1 and 0 in the picture; never more than m)
    steady    one F, one B in turn
    cooldown  the backwards that are left

On paper first: write the list of rank 1 for p = 4, m = 6. It has 12 actions.

Read         the first 25 lines of schedules.py, and `Action`
Paper        PipeDream-Flush, in Megatron-LM's arXiv 2104.04473, section 2.2.1
Not yet      `one_f_one_b` and `_alternate` in schedules.py
Check        python exercises/check.py 5
Par          rank r holds at most p - r micro-batches; idle time / ideal time is (p - 1) / m
"""

from schedules import Action


def one_f_one_b(p: int, m: int) -> list[list[Action]]:
    """For each of p ranks, its actions for m micro-batches: Action("F", 0, k) or Action("B", 0, k)
    of micro-batch k. The 0 is for exercise 6."""
    raise NotImplementedError(
        "For each rank: make the list of all F and the list of all B. Take the warmup from the "
        "first; then one of each, while there are F left; then the other B."
    )
