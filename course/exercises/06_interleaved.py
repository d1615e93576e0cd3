"""Exercise 6: interleaved 1F1B, a smaller bubble.                                  (25 minutes)

In 1F1B a rank waits until the first micro-batch has passed p - 1 whole ranks. Divide the layers
more finely: p v chunks, v of them on each rank. Rank r has chunk c as stage c p + r. A stage takes
1/v of the time, so the first wait is 1/v as long, and so is the bubble. There are v times as many
messages: that is the price.

    p = 2, v = 2        stage 0 -> stage 1 -> stage 2 -> stage 3
                        rank 0     rank 1     rank 0     rank 1
                        chunk 0    chunk 0    chunk 1    chunk 1

In which order? Groups of p micro-batches: p of them through chunk 0, the same p through chunk 1,
and so on; then the next group. Backwards go in the same groups, but from chunk v - 1 to chunk 0.
F0.1 is F of micro-batch 0, chunk 1. For p = 2, m = 4, v = 2:

    forwards     F0.0 F1.0   F0.1 F1.1   F2.0 F3.0   F2.1 F3.1
    backwards    B0.1 B1.1   B0.0 B1.0   B2.1 B3.1   B2.0 B3.0

Every rank has these two lists, and alternates as in exercise 5. Only the warmup is longer:

    warmup    2 (p - 1 - rank) + (v - 1) p forwards       (never more than the m v that there are)

(v - 1) p of them are the earlier chunks of the first group. A rank that is one place nearer to the
start begins one action earlier and gets its first gradient one action later: 2 more for each place.

Read         exercise 5
Paper        arXiv 2104.04473, section 2.2.2, figure 4
Not yet      `interleaved_one_f_one_b` in schedules.py
Check        python -m course.exercises.check 6      --hint: a hint, one more at each call
Par          idle time / ideal time is (p - 1) / (v m)
"""

from schedules import Action


def interleaved_one_f_one_b(p: int, m: int, v: int) -> list[list[Action]]:
    """For each of p ranks, its actions: Action(op, chunk, micro_batch). p divides m; v > 1."""
    raise NotImplementedError(
        "Make `forwards` with three loops: groups of p micro-batches, chunks, micro-batches of the "
        "group. `backwards` is the same list with B, and chunk v - 1 - chunk. Then warmup, one F "
        "one B, and the rest."
    )
