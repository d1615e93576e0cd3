"""Exercise 5: 1F1B, a pipeline schedule as a list.                                 (20 minutes)

A pipeline gives each of p ranks a part of the layers, and divides the batch into m micro-batches.
F of a micro-batch goes from rank 0 to rank p - 1, B, its backward, comes back. A schedule is one
list for each rank: what it computes, in order. It has no times; a rank waits for what it needs.

GPipe does all F first, then all B. So a rank holds the activations of m micro-batches:

    rank 0    F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --     p = 3, m = 4; B takes
    rank 1    .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 --           twice as long as F, and
    rank 2    .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 --                 dots are idle time

1F1B begins with B as soon as the first gradient comes back. Its time is that of GPipe, and a rank
holds only the micro-batches that are on their way. A list has three parts:

    warmup    forwards only: as many as needed, so that no rank behind waits for this one
    steady    one F, one B in turn
    cooldown  the backwards that are left

Micro-batches go in order. Rank r holds at most p - r of them at a time, however large m is: a
micro-batch is held from its F to its B. How long is the warmup of rank r? And if m is small?

On paper first: the lists for p = 2, m = 3. Each has 6 actions.

Read         this page alone; an action is (op, chunk, micro_batch)
Paper        PipeDream-Flush, in Megatron-LM's arXiv 2104.04473, section 2.2.1
Not yet      schedules.py, from its first line: `one_f_one_b` and `_alternate`
Check        python -m course.exercises.check 5      --hint: a hint, one more at each call
Par          rank r holds at most p - r micro-batches; idle time / ideal time is (p - 1) / m
"""

from schedules import Action


def one_f_one_b(p: int, m: int) -> list[list[Action]]:
    """For each of p ranks, its actions for m micro-batches: Action("F", 0, k) or Action("B", 0, k)
    of micro-batch k. The 0 is for exercise 6."""
    raise NotImplementedError("How many F come before the first B on rank r?")
