"""The lesson of base/causal_blocks.py: FLOPs, kept bytes and gradients, beside attention whose
scores are whole."""

from unittest import mock

import torch
from torch import Tensor

import gpt
from base import causal_blocks
from course import demo, form
from planning import counters

B, A, S, D = 2, 4, 512, 16
# FLOPs of q kᵀ and of p v, with whole matrices
WHOLE = 4 * B * A * S * S * D

WITHOUT = form.Removals()


@WITHOUT.add("blocks", "One block has all rows. What changes, and what does not?")
def one_block():
    """All scores are computed, and half of them are masked: the FLOPs of whole matrices. Bytes and
    gradients stay: they do not depend on how the rows are cut."""
    return mock.patch.object(causal_blocks, "ROWS", S)


@WITHOUT.add("mask", "Blocks leave columns out. Which row sees its future then?")
def no_mask():
    """All rows of a block but its last one: they see columns up to the last row."""
    zeros = lambda tokens, r, dtype: torch.zeros(r * tokens, tokens, dtype=dtype)  # noqa: E731
    return mock.patch.object(causal_blocks, "causal_mask", zeros)


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose scores are whole, as gpt.ExplicitAttention has it."""
    return gpt.CausalProbabilities()(q, k, None) @ v


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, B, A, S, D, generator=generator, dtype=torch.float64)
    return [part.clone().requires_grad_() for part in x]


def gradients(attention) -> dict[str, Tensor]:
    qkv = leaves()
    y = attention(*qkv)
    y.square().sum().backward()
    return {"y": y.detach()} | dict(zip(("q", "k", "v"), (x.grad for x in qkv)))


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        flops(lesson)
        kept_bytes(lesson)
        lesson.predict("Does any gradient differ from that of whole scores?")
        expected, found = gradients(whole), gradients(causal_blocks.causal_attention)
        worst = demo.largest_difference(expected, found)
        lesson.check(f"none: the largest relative difference is {worst:.1e}", worst < 1e-10)


def flops(lesson: form.Lesson) -> None:
    lesson.predict(
        f"{S} rows in blocks of 128; a block has the columns up to its last row. What share of the"
        " s x s scores is computed, in forward? What share does a causal mask need?",
        "share computed; share that a mask needs",
    )
    found = demo.flops(lambda: causal_blocks.causal_attention(*leaves())) / WHOLE
    n = S // 128
    lesson.check(
        f"{found:.1%} of the FLOPs; (1 + .. + n) / n² = (n + 1) / 2n = {(n + 1) / (2 * n):.1%}; a"
        f" mask needs (s + 1) / 2s = {(S + 1) / (2 * S):.1%}",
        found == (n + 1) / (2 * n),
        [found, (S + 1) / (2 * S)],
    )


def kept_bytes(lesson: form.Lesson) -> None:
    lesson.predict(
        f"b {B}, a {A}, s {S}, d {D}, float64. How many bytes are kept for backward? And where the"
        " probabilities are whole?",
        "bytes",
    )
    ours = counters.saved_bytes(lambda: causal_blocks.causal_attention(*leaves()))
    theirs = counters.saved_bytes(lambda: whole(*leaves()))
    qkv, p = 3 * B * A * S * D * 8, B * A * S * S * 8
    lesson.check(
        f"{ours:,} and {theirs:,}; q, k and v: 3 b a s d 8 = {qkv:,}, with p: + b a s² 8 ="
        f" {qkv + p:,}",
        ours == qkv and theirs >= qkv + p,
        [ours],
    )


if __name__ == "__main__":
    form.run("causal_blocks")
