"""The lesson of chunked_head.py: peak bytes and FLOPs of the loss, whole and in chunks.

python chunked_head.py
"""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import chunked_head
import gpt
from lessons import form

B, S, H, V = 4, 256, 64, 8192
# tokens; 0: all at once, gpt.Head
CHUNKS = (0, 256, 64)


def no_chunks(head: nn.Module) -> None:
    """All tokens are one chunk."""
    if isinstance(head, chunked_head.ChunkedHead):
        head.chunk = B * S


WITHOUT = {"chunks": no_chunks}

# the answers to what break_it asks
WHY = {
    "chunks": (
        "No. It still forgets its logits and computes them again: 8 b s h V FLOPs and the"
        " same gradients. But all logits exist at one time, and beside them ∂W twice: more"
        " bytes than the head of gpt.py."
    ),
}


def measure(chunk: int, mutate) -> tuple[int, int, list[Tensor]]:
    """(peak bytes, FLOPs, [∂x, ∂W]) of the head and its loss, forward and backward."""
    config = gpt.GPTConfig(num_layers=1, hidden_size=H, num_heads=1, seq_length=S, vocab_size=V)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, H, generator=generator, requires_grad=True)
    targets = torch.randint(V, (B, S), generator=generator)
    model = nn.Module()
    model.head = gpt.Head(config)
    nn.init.normal_(model.head.output.weight, std=0.02, generator=generator)
    chunked_head.apply(model, chunk)
    if mutate:
        mutate(model.head)

    def step():
        model.head(x, targets).mean().backward()

    peak = chunked_head.peak_bytes(step)
    gradients = [x.grad, model.head.output.weight.grad]
    with FlopCounterMode(display=False) as counter:
        step()
    return peak, counter.get_total_flops(), gradients


def teach(lesson: form.Lesson) -> None:
    logits = 4 * B * S * V
    lesson.predict(
        f"b {B}, s {S}, h {H}, V {V:,}, float32: how many bytes have the logits, b s V? Beside"
        " them are x and ∂x [b, s, h], and ∂W [V, h]. How many at the peak of forward and backward?"
    )
    results = {chunk: measure(chunk, lesson.mutate) for chunk in CHUNKS}
    formulas = {0: logits + 4 * (2 * B * S * H + V * H)}
    peak = results[0][0]
    lesson.check(
        f"logits {logits:,}; peak {peak:,}, by formula 4 (b s V + 2 b s h + V h) = {formulas[0]:,}",
        abs(peak / formulas[0] - 1) < 0.02,
    )

    lesson.predict(
        "And with the logits of 64 tokens at a time? Beside the sum ∂W there is then what one"
        " chunk adds to it."
    )
    for chunk in CHUNKS[1:]:
        formulas[chunk] = 4 * (chunk * V + 2 * B * S * H + 2 * V * H)
    for chunk, (peak, _, _) in results.items():
        name = f"{chunk} tokens" if chunk else "whole"
        lesson.say(f"{name:<12}{peak:>12,}  {form.bar(peak, results[0][0])}")
    ratios = [results[chunk][0] / formulas[chunk] for chunk in CHUNKS[1:]]
    lesson.check(
        f"measured / 4 (N V + 2 b s h + 2 V h): {ratios[0]:.3f} for N 256, {ratios[1]:.3f} for 64",
        all(abs(ratio - 1) < 0.02 for ratio in ratios),
    )
    lesson.break_it(
        "chunks", "All tokens are one chunk. Is this the head of gpt.py?", WHY["chunks"]
    )

    lesson.predict(
        "A multiplication by W has 2 b s h V FLOPs; forward has one, backward two. Chunks forget"
        " their logits, and backward needs them. How many FLOPs then, in b s h V?"
    )
    flops = [results[chunk][1] / (B * S * H * V) for chunk in CHUNKS]
    lesson.check(
        f"whole {flops[0]:.2f}; 256 tokens {flops[1]:.2f}; 64 tokens {flops[2]:.2f}: 6 and 8",
        flops == [6, 8, 8],
    )

    lesson.predict("Do the gradients change?")
    worst = 0.0
    for chunk in CHUNKS[1:]:
        for whole, chunked in zip(results[0][2], results[chunk][2]):
            worst = max(worst, ((whole - chunked).abs().max() / whole.abs().max()).item())
    lesson.check(f"by rounding: largest relative difference {worst:.1e}", worst < 1e-5)
