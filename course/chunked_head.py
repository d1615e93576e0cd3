"""The lesson of recompute.py and base/cross_entropy.py: the loss of a token by hand; peak bytes and
FLOPs of the loss of many, whole and in chunks."""

import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
import recompute
from course import demo, form
from planning import counters

B, S, H, V = 4, 256, 64, 8192

WITHOUT = form.Removals()


@WITHOUT.replace("maximum", gpt, "cross_entropy", "Which logits still give the right loss?")
def without_maximum(logits: Tensor, targets: Tensor, vocab_size=None) -> Tensor:
    """All whose Σ exp(z) is neither infinite nor 0 in float32: the largest logit between about -100
    and 88. The check of bytes fails because autograd, which has this formula now, overwrites
    nothing."""
    total = logits.exp().sum(-1)
    return total.log() - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@WITHOUT.replace("in-place", gpt, "cross_entropy", "F.cross_entropy. What is the memory for?")
def pytorchs_own(logits: Tensor, targets: Tensor, vocab_size=None) -> Tensor:
    """The logits stay as they are, and autograd keeps log softmax beside them. Loss and gradients
    are the same function, so these checks hold."""
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


@WITHOUT.add("chunks", "All tokens are one chunk. Is this the head of gpt.py?")
def no_chunks():
    """No. It still forgets its logits and computes them again: 8 b s h V FLOPs and the same
    gradients. But all logits exist at one time, and beside them ∂W twice: more bytes than the head
    of gpt.py."""
    one = property(lambda head: B * S, lambda head, chunk: None)
    return mock.patch.object(recompute.ChunkedHead, "chunk", one, create=True)


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        one_token(lesson)
        large_logits(lesson)
        chunks(lesson)


def loss_and_gradient(*logits: float) -> tuple[float, list[float]]:
    """Loss and gradient of one token whose target is the first of these logits."""
    z = torch.tensor([logits], requires_grad=True)
    # Like a matrix multiplication, an addition does not keep its output.
    loss = gpt.cross_entropy(z + 0, torch.tensor([0]))
    loss.backward()
    return loss.item(), z.grad[0].tolist()


def close(found: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) < 1e-6 for a, b in zip(found, expected))


def one_token(lesson: form.Lesson) -> None:
    lesson.predict(
        "A vocabulary of 3, with logits 2, 1, 0; the first is the target. What is the loss? What is"
        " its gradient by each logit? (e² = 7.39, e = 2.72)",
        "loss; gradient by the first",
    )
    loss, gradient = loss_and_gradient(2.0, 1.0, 0.0)
    total = math.e**2 + math.e + 1
    expected = [math.e**2 / total - 1, math.e / total, 1 / total]
    lesson.check(
        f"loss {loss:.4f}; log (e² + e + 1) - 2 = {math.log(total) - 2:.4f}",
        close([loss], [math.log(total) - 2]),
        [loss],
    )
    lesson.check(
        "gradient " + ", ".join(f"{g:.4f}" for g in gradient) + "; softmax(z) - (1, 0, 0) = "
        f"{', '.join(f'{g:.4f}' for g in expected)}",
        close(gradient, expected),
        [gradient[0]],
    )


def large_logits(lesson: form.Lesson) -> None:
    lesson.predict(
        "Logits 1000, 0, 0: exp(1000) is too large for float32. What is the loss?", "loss"
    )
    loss, gradient = loss_and_gradient(1000.0, 0.0, 0.0)
    lesson.check(
        f"{loss}, and the gradient is {gradient}: the largest logit is subtracted first",
        close([loss, *gradient], [0, 0, 0, 0]),
        [loss],
    )


def measure(chunk: int) -> tuple[int, int, list[Tensor]]:
    """(peak bytes, FLOPs, [∂x, ∂W]) of the head and its loss, forward and backward. chunk: tokens;
    0: all at once, gpt.Head."""
    config = gpt.GPTConfig(num_layers=1, hidden_size=H, num_heads=1, seq_length=S, vocab_size=V)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, S, H, generator=generator, requires_grad=True)
    targets = torch.randint(V, (B, S), generator=generator)
    model = nn.Module()
    model.head = gpt.Head(config)
    nn.init.normal_(model.head.output.weight, std=0.02, generator=generator)
    recompute.chunk_head(model, chunk)

    def step():
        model.head(x, targets).mean().backward()

    peak = counters.peak_bytes(step)
    gradients = [x.grad, model.head.output.weight.grad]
    return peak, demo.flops(step), gradients


def chunks(lesson: form.Lesson) -> None:
    logits = 4 * B * S * V
    lesson.predict(
        f"b {B}, s {S}, h {H}, V {V:,}, float32: the logits, b s V, have {logits:,} bytes."
        " F.cross_entropy keeps log softmax and makes two gradients of this size. Here each"
        " overwrites the one before; at the end x and ∂x [b, s, h] and ∂W [V, h] are beside it. How"
        " many bytes at the peak? With the logits of 64 tokens at a time, and ∂W and a part of it?",
        "bytes at the peak; with 64 tokens at a time",
    )
    with mock.patch.object(gpt, "cross_entropy", pytorchs_own):
        results = {"F.cross_entropy": measure(0)}
    results |= {"whole": measure(0), "256 tokens": measure(256), "64 tokens": measure(64)}
    formulas = {
        "F.cross_entropy": 3 * logits,
        "whole": logits + 4 * (2 * B * S * H + V * H),
        "256 tokens": 4 * (256 * V + 2 * B * S * H + 2 * V * H),
        "64 tokens": 4 * (64 * V + 2 * B * S * H + 2 * V * H),
    }
    lesson.bars({name: peak for name, (peak, _, _) in results.items()}, 3 * logits)
    ratios = [results[name][0] / formula for name, formula in formulas.items()]
    lesson.check(
        "measured / 4 (3 b s V), 4 (b s V + 2 b s h + V h), 4 (N V + 2 b s h + 2 V h): "
        + ", ".join(f"{ratio:.3f}" for ratio in ratios),
        all(abs(ratio - 1) < 0.02 for ratio in ratios),
        [results["whole"][0], results["64 tokens"][0]],
    )

    lesson.predict(
        "A multiplication by W has 2 b s h V FLOPs; forward has one, backward two. Chunks forget"
        " their logits, and backward needs them. How many FLOPs then, in b s h V?",
        "FLOPs / b s h V",
    )
    flops = [flops / (B * S * H * V) for _, flops, _ in results.values()]
    lesson.check(
        f"whole {flops[1]:.2f}; 256 tokens {flops[2]:.2f}; 64 tokens {flops[3]:.2f}: 6 and 8",
        flops == [6, 6, 8, 8],
        [flops[3]],
    )

    lesson.predict("Do the gradients change?")
    expected = results["F.cross_entropy"][2]
    worst = max(
        demo.difference(a, b) for _, _, found in results.values() for a, b in zip(expected, found)
    )
    lesson.check(f"by rounding: largest relative difference {worst:.1e}", worst < 1e-5)


if __name__ == "__main__":
    form.run("chunked_head")
