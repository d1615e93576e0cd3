"""The lesson of recompute.py: one layer, three ways."""

import torch
from torch import Tensor

import gpt
import recompute
from base import dropout
from base.model_config import GPTConfig
from course import demo, form
from course.mutations import recompute as bugs
from planning import counters

S, B, H, A = 128, 2, 128, 4

WITHOUT = form.Removals()
WITHOUT["same-masks"] = form.Removal(
    bugs.new_masks_in_recomputation,
    "Dropout draws new masks. Is the loss wrong? Why not?",
    "The loss comes from the first run. Backward then uses a second run with other masks: of the"
    " whole layer with full; of attention's scores with selective, so that only q, k, v and the"
    " norm before them get wrong gradients.",
)


@WITHOUT.replace(
    "recomputation", recompute, "checkpoint", "Everything is kept. Can gradients show it?"
)
def no_recomputation(function, *args):
    """No. Recomputation gives the same numbers again, so gradients are equal with it and without
    it. Only bytes and FLOPs show it."""
    return function(*args)


def measure(granularity: str) -> tuple[int, int, list[Tensor]]:
    """(bytes kept, FLOPs, gradients) of one layer, forward and backward, in bf16."""
    config = GPTConfig(1, H, A, seq_length=S, vocab_size=64, dropout=0.1)
    model = demo.make_model(config, dtype=torch.bfloat16)
    recompute.apply(model, granularity)
    block = model.blocks["0"]
    x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16().requires_grad_()
    context = gpt.Context(dropout.dropout_key(0, 1, torch.arange(B)))
    kept = counters.saved_bytes(lambda: block(x, context), *block.parameters())
    flops = demo.flops(lambda: block(x, context).sum().backward())
    return kept, flops, [p.grad for p in block.parameters()]


def on_rank(rank: int) -> dict:
    return {granularity: measure(granularity) for granularity in recompute.GRANULARITIES}


def teach_flops(lesson: form.Lesson, none: int, selective: int, full: int) -> None:
    """FLOPs of forward and backward, of each way."""
    score_flops = 4 * B * S * S * H
    layer_flops = 24 * B * S * H * H + score_flops
    lesson.predict(
        "Selective computes q kᵀ and the product with v a second time, 2 b s² h FLOPs each. Full"
        " computes all of forward again, 24 b s h² more. How many FLOPs are added?",
        "FLOPs, selective; FLOPs, full",
    )
    lesson.check(
        f"selective {selective - none:,}; 4 b s² h = {score_flops:,}",
        selective - none == score_flops,
        [selective - none],
    )
    lesson.check(
        f"full {full - none:,}; 24 b s h² + 4 b s² h = {layer_flops:,}",
        full - none == layer_flops,
        [full - none],
    )


def teach(lesson: form.Lesson) -> None:
    results = lesson.on_ranks(1, on_rank)[0]
    none, selective, full = results.values()
    lesson.predict(
        f"One GPT layer in bf16: s {S}, b {B}, h {H}, a {A}, dropout 0.1. How many bytes does it"
        " keep for backward: by the formula; without the s² part; and if it keeps its input alone?",
        "by the formula; without s²; its input",
    )
    ratios = []
    for name, (kept, _, _) in results.items():
        formula = recompute.layer_bytes(S, B, H, A, recompute=name)
        ratios.append(kept / formula)
        lesson.say(f"{name:<10}{kept:>10,} / {formula:>9,.0f}  {form.bar(kept, none[0])}")
    lesson.check(
        "measured / formula (34 s b h + 5 a s² b, 34 s b h, 2 s b h): "
        + ", ".join(f"{ratio:.3f}" for ratio in ratios),
        all(abs(ratio - 1) < 0.02 for ratio in ratios),
        [kept for kept, _, _ in results.values()],
    )

    teach_flops(lesson, none[1], selective[1], full[1])

    lesson.predict(
        f"Dropout runs twice. How many of the {len(none[2])} gradients differ in the last bit?",
        "gradients, selective; gradients, full",
    )
    different = []
    for _, _, gradients in (selective, full):
        different.append(sum(not torch.equal(a, b) for a, b in zip(none[2], gradients)))
    counts = f"{different[0]} with selective, {different[1]} with full"
    lesson.check(
        f"{counts}: masks are hashes of coordinates, so the same again",
        different == [0, 0],
        different,
    )


if __name__ == "__main__":
    form.run("recompute")
