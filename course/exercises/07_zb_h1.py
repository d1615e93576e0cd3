"""Exercise 7: ZB-H1, backward in two parts.                                        (20 minutes)

Backward of y = x Wᵀ computes two things: ∂x = ∂y W, for which the rank before is waiting, and
∂W = ∂yᵀ x, which nobody needs before the optimizer's step. 1F1B computes both at once, and the rank
before waits for both. Here B becomes I, the input gradient, and W, the weight gradient, later:

    1F1B       rank 0    F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --         p = 3, m = 4
               rank 1    .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 --
               rank 2    .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --

I goes out at once, and W fills time in which the rank would wait. How long may W be put off? What
it is computed from stays in memory until then. 1F1B holds at most p - r micro-batches on rank r:
rank 0 has the most. ZB-H1 lets every rank hold p. A micro-batch is held from its F to its W.

So some number of W may wait on rank r, and no more, from the first I to the last. Where an I would
make it one more, the oldest W comes right after this I. At the end come the W that are left. Which
number is it?

On paper first: the lists for p = 2, m = 3. Each has 9 actions.

Read         exercise 5
Paper        Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1, figure 3
Not yet      `zero_bubble_h1` in schedules.py
Check        python -m course.exercises.check 7      --hint: a hint, one more at each call
Par          with T_F = T_I = T_W the bubble is (p - 1) / (3 m), a third of what 1F1B has
"""

from schedules import Action, one_f_one_b


def zero_bubble_h1(p: int, m: int) -> list[list[Action]]:
    """For each of p ranks: Action("F", 0, k), Action("I", 0, k) and Action("W", 0, k)."""
    raise NotImplementedError(
        "In the list of one_f_one_b, B becomes I. Which W, if any, comes right after it on rank r?"
    )
