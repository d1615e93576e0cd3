"""One grader for each exercise: what its answer is compared with, and what is counted.

A grader is called on every rank, as grader(*functions, rank, watch), with the answer's functions;
14 has its path. It raises AnswerError with a sentence that teaches, or returns (what was compared,
Par). `watch` counts (grading.py). Those of two ranks stand in graders_of_ranks.py, those of
schedules in graders_of_schedules.py.

The reference is plain computation on one rank, or the project's own function.
"""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import moe
import recompute
from course.exercises import cuda_grader
from course.exercises import graders_of_ranks as of_ranks
from course.exercises import graders_of_schedules as of_schedules
from course.exercises.graders_of_ranks import B, H, S
from course.exercises.grading import AnswerError, Par, Watch, leaf, numbers, same

# --- 11 and 12: activations -----------------------------------------------------------------------


def checkpointing(checkpoint, rank: int, watch: Watch) -> tuple[str, Par]:
    a, b = leaf(numbers(H, 4 * H, seed=1)), leaf(numbers(4 * H, H, seed=2))
    runs = []

    def layer(x: Tensor, scale: float, y: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        return scale * (F.gelu(x @ a) @ b) + y

    start = leaf(numbers(B, S, H))
    fixed = numbers(B, S, H, seed=3)
    (layer(start * 2, 0.5, fixed) * fixed).sum().backward()
    expected = [t.grad for t in (start, a, b)]
    start.grad = a.grad = b.grad = None
    runs.clear()
    # not a leaf: another layer may stand before this one
    x = start * 2
    first = len(watch.made)
    y = checkpoint(layer, x, 0.5, fixed)
    held = watch.held(first, y)
    forward_runs = len(runs)
    same("y", y, layer(start * 2, 0.5, fixed), "Forward gives function(*args).")
    runs.clear()
    (y * fixed).sum().backward()
    hints = (
        "In backward the function runs again on a detached copy of x, and its gradient is that "
        "copy's; if the copy is not detached, backward goes through the layers before a second "
        "time.",
        "The parameters inside get their gradients in the inner backward: output.backward(grad), "
        "not torch.autograd.grad of the arguments alone.",
        "The parameters inside get their gradients in the inner backward.",
    )
    for name, t, right, hint in zip(("x", "A", "B"), (start, a, b), expected, hints):
        same(f"the gradient of {name}", t.grad, right, hint)
    text = (
        f"kept beside the arguments: {held:,} bytes, the paper's 0; the function ran "
        f"{forward_runs} + {len(runs)} times, the paper's 1 + 1"
    )
    reached = held == 0 and forward_runs == len(runs) == 1
    if held:
        text += ". Activations are still there: forward must not record, nor save what is inside."
    return "y and the gradients of x, A and B", Par(reached, text)


def memory_formula(layer_bytes, rank: int, watch: Watch) -> tuple[str, Par]:
    # it breaks things, which no grader does
    from course import recompute as lesson

    small = (lesson.S, lesson.B, lesson.H, lesson.A)
    hints = {
        "none": "Attention keeps 11 s b h + 5 a s² b, the MLP 19 s b h, two LayerNorms 4 s b h. "
        "Tensor parallelism divides 24 of the 34 s b h and all scores by t; the other 10 only "
        "sequence parallelism does.",
        "selective": "Selective recomputation keeps no scores: the term with s² is gone, the rest "
        "stays.",
        "full": "Full recomputation keeps the layer's input, 2 s b h; sequence parallelism shards "
        "it too.",
    }
    large = (2048, 4, 6144, 64)
    cases = list(itertools.product(hints, (1, 2, 8), (False, True), (small, large)))
    for way, t, sequence, sizes in cases:
        right = recompute.layer_bytes(*sizes, t, sequence, way)
        got = layer_bytes(*sizes, t, sequence, way)
        if not isinstance(got, int | float):
            raise AnswerError(f"layer_bytes returned {got!r}, expected a number of bytes.")
        if not math.isclose(got, right, rel_tol=1e-12):
            raise AnswerError(
                f"s, b, h, a = {sizes}, t = {t}, sequence_parallel={sequence}, recompute {way}: "
                f"expected {right:,.0f}, got {got:,.0f}. {hints[way]}"
            )
    # what autograd keeps of a layer of the project's GPT in 16 bits
    kept, _, _ = lesson.measure("none")
    ratio = kept / layer_bytes(*small, 1, False, "none")
    text = f"a real layer, measured: {ratio:.4f} times the formula"
    return f"{len(cases)} sizes of table 2", Par(abs(ratio - 1) < 0.02, text)


# --- 13: Sinkhorn ---------------------------------------------------------------------------------


def sinkhorn(balance, rank: int, watch: Watch) -> tuple[str, Par]:
    n, e = 24, 4
    made = 0
    for scale in (1.0, 3.0, 400.0):
        # all tokens like expert 0
        logits = scale * (numbers(n, e) + torch.tensor([1.0, 0, 0, 0]))
        if scale == 400:
            # far from 0, but as easy as the first
            logits = numbers(n, e) + 2000
        first = len(watch.sizes)
        plan = balance(logits.clone(), 1e-13)
        made = sum(size == n * e for size in watch.sizes[first:])
        same(
            f"the plan of logits near {logits.mean():.0f}",
            plan,
            moe.sinkhorn(logits, 1.0, 1e-13, 100_000),
            "Rows sum to 1/N and columns to 1/E at the same time. One scaling spoils the other, so "
            "both are repeated until the loads are even within the tolerance. exp overflows for "
            "large logits; of each row only differences matter.",
        )
    hint = "a few would do. Keep d0 [N] and d1 [E] instead." if made > 8 else "the rest: vectors"
    return "3 plans within 1e-10", Par(made <= 8, f"{made} matrices [N, E] made; {hint}")


# --- 14: a CUDA kernel ----------------------------------------------------------------------------


def fused_swiglu(answer: str, rank: int, watch: Watch) -> tuple[str, Par]:
    """answer: the path of the .cu file, which `cuda_grader.build` has compiled."""
    stub = re.search(r"^ *// Your code: (.*)\n}", Path(answer).read_text(), re.MULTILINE)
    if stub:
        raise NotImplementedError(stub[1].capitalize())
    library = cuda_grader.load(answer)
    W = 4
    for n in (W, 256 * W, 300 * W):
        guard = 1024 * W
        given = numbers(2, n).float()
        # what a kernel writes beyond the end is seen
        memory = torch.full((n + 2 * guard,), torch.nan)
        y = memory[guard : guard + n]
        gate, up = given[0].clone(), given[1].clone()
        bytes_in, bytes_out = cuda_grader.run(library, gate, up, y)
        outside = torch.cat((memory[:guard], memory[guard + n :]))
        if not outside.isnan().all():
            raise AnswerError(
                "The kernel has written beyond the end of y: return where i >= vectors."
            )
        missing = y.isnan().sum().item()
        if missing:
            raise AnswerError(
                f"n = {n:,}: {missing:,} numbers of y were never written, the first at index "
                f"{y.isnan().nonzero()[0].item()}. A thread's vector is number blockIdx.x * "
                "blockDim.x + threadIdx.x, and a vector has W = 4 floats."
            )
        exact = F.silu(given[0].double()) * given[1].double()
        torch_error = (F.silu(given[0]) * given[1] - exact).abs().max()
        error = (y - exact).abs()
        # the gate of tests/test_kernels.py
        if not error.max() <= 2 * torch_error:
            i = error.argmax()
            raise AnswerError(
                f"n = {n:,}, index {i}: gate {gate[i]:.6g}, up {up[i]:.6g}, expected {exact[i]:.6g}"
                f", got {y[i]:.6g}. y = gate · sigmoid(gate) · up."
            )
    text = f"vectors of 16 bytes: {bytes_in:,} bytes in and {bytes_out:,} out for n = {n:,}; "
    once = (bytes_in, bytes_out) == (8 * n, 4 * n)
    if once:
        text += "gate and up are read once, y is written once"
    else:
        text += (
            f"one pass is {8 * n:,} in and {4 * n:,} out. Move whole vectors with read() and "
            "write(): a load of single floats moves a quarter as much."
        )
    return "3 sizes, the error at most twice PyTorch's", Par(once, text)


# --- the list -------------------------------------------------------------------------------------


class Exercise(NamedTuple):
    """functions: of the file, the first arguments of the grader. ranks: that the answer needs."""

    file: str
    functions: str
    grader: Callable[..., tuple[str, Par]]
    ranks: int = 1


EXERCISES = {
    1: Exercise("01_shards.py", "shard_of gather", of_ranks.shards, 2),
    2: Exercise("02_f_and_g.py", "copy_to_ranks reduce_from_ranks", of_ranks.f_and_g, 2),
    3: Exercise(
        "03_vocabulary_loss.py", "vocab_parallel_cross_entropy", of_ranks.vocabulary_loss, 2
    ),
    4: Exercise("04_g_and_g_bar.py", "gather_sequence scatter_sequence", of_ranks.g_and_g_bar, 2),
    5: Exercise("05_one_f_one_b.py", "one_f_one_b", of_schedules.one_f_one_b),
    6: Exercise("06_interleaved.py", "interleaved_one_f_one_b", of_schedules.interleaved),
    7: Exercise("07_zb_h1.py", "zero_bubble_h1", of_schedules.zb_h1),
    8: Exercise("08_simulate.py", "simulate", of_schedules.simulation),
    9: Exercise("09_zero2_reduce.py", "reduce_gradients", of_ranks.zero2_reduce, 2),
    10: Exercise("10_zero3_gather.py", "sharded_linear", of_ranks.zero3_gather, 2),
    11: Exercise("11_checkpoint.py", "checkpoint", checkpointing),
    12: Exercise("12_memory_formula.py", "layer_bytes", memory_formula),
    13: Exercise("13_sinkhorn.py", "sinkhorn", sinkhorn),
    14: Exercise("14_swiglu.cu", "", fused_swiglu),
}
