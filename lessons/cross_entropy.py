"""The lesson of base/cross_entropy.py: the gradient by hand, large logits, peak bytes.

python -m base.cross_entropy
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from base.cross_entropy import cross_entropy
from chunked_head import peak_bytes
from lessons import form

N, V = 128, 20000


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's own, which keeps the logits as they are."""
    return F.cross_entropy(logits, targets, reduction="none")


def without_maximum(logits: Tensor, targets: Tensor) -> Tensor:
    """The formula as it is written."""
    total = logits.exp().sum(-1)
    return total.log() - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


WITHOUT = {"maximum": without_maximum, "in-place": plain}


def loss_and_gradient(function, *logits: float) -> tuple[float, list[float]]:
    """Of one token whose target is the first of these logits."""
    z = torch.tensor([logits], requires_grad=True)
    # as from a matrix multiplication, which does not keep its output
    loss = function(z + 0, torch.tensor([0]))
    loss.backward()
    return loss.item(), z.grad[0].tolist()


def close(found: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) < 1e-6 for a, b in zip(found, expected))


def teach_bytes(lesson: form.Lesson, function) -> None:
    size = 4 * N * V
    lesson.predict(
        f"{N} tokens, V = {V:,}: the logits have 4 N V = {size:,} bytes. F.cross_entropy"
        " keeps log softmax in a second tensor, and writes the gradient to a third. How many bytes"
        " at the peak of forward and backward? How many here, where each overwrites the one before?"
    )
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(N, V, generator=generator, requires_grad=True)
    targets = torch.randint(V, (N,), generator=generator)
    peaks = {}
    gradients = {}
    for name, loss in (("F.cross_entropy", plain), ("here", function)):
        z.grad = None
        peaks[name] = peak_bytes(lambda loss=loss: loss(z + 0, targets).mean().backward())
        gradients[name] = z.grad
        lesson.say(f"{name:<16}{peaks[name]:>11,}  {form.bar(peaks[name], 3 * size, 45)}")
    times = [peak / size for peak in peaks.values()]
    lesson.check(
        f"{times[0]:.2f} and {times[1]:.2f} times the logits",
        abs(times[0] - 3) < 0.02 and abs(times[1] - 1) < 0.02,
    )
    reference, gradient = gradients.values()
    worst = ((reference - gradient).abs().max() / reference.abs().max()).item()
    lesson.check(f"largest relative difference of the gradients {worst:.1e}", worst < 1e-5)
    lesson.break_it(
        "in-place",
        "F.cross_entropy instead. What does it give back for the memory?",
        "The logits stay as they are, and backward can run a second time, for autograd's"
        " tensors are not overwritten. Loss and gradients are the same function, so these"
        " checks hold.",
    )


def teach_second_backward(lesson: form.Lesson, function) -> None:
    lesson.predict("Backward has overwritten softmax by the gradient. Can it run a second time?")
    z = torch.zeros(1, 3, requires_grad=True)
    loss = function(z + 0, torch.tensor([0])).sum()
    loss.backward(retain_graph=True)
    try:
        loss.backward()
        found = "yes"
    except RuntimeError:
        found = "no, RuntimeError"
    lesson.check(f"{found}: autograd knows that a tensor it kept has changed", found != "yes")


def teach(lesson: form.Lesson) -> None:
    function = lesson.mutate or cross_entropy
    lesson.predict(
        "A vocabulary of 3, with logits 2, 1, 0; the first is the target. What is the loss? What is"
        " its gradient by each logit? (e² = 7.39, e = 2.72)"
    )
    loss, gradient = loss_and_gradient(function, 2.0, 1.0, 0.0)
    total = math.e**2 + math.e + 1
    expected = [math.e**2 / total - 1, math.e / total, 1 / total]
    lesson.check(
        f"loss {loss:.4f}; log (e² + e + 1) - 2 = {math.log(total) - 2:.4f}",
        close([loss], [math.log(total) - 2]),
    )
    lesson.check(
        "gradient " + ", ".join(f"{g:.4f}" for g in gradient) + "; softmax(z) - (1, 0, 0) = "
        f"{', '.join(f'{g:.4f}' for g in expected)}",
        close(gradient, expected),
    )

    lesson.predict("Logits 1000, 0, 0: exp(1000) is too large for float32. What is the loss?")
    loss, gradient = loss_and_gradient(function, 1000.0, 0.0, 0.0)
    lesson.check(
        f"{loss}, and the gradient is {gradient}: the largest logit is subtracted first",
        close([loss, *gradient], [0, 0, 0, 0]),
    )
    lesson.break_it(
        "maximum",
        "Which logits still give the right loss?",
        "All whose Σ exp(z) is neither infinite nor 0 in float32: the largest logit between"
        " about -100 and 88. The checks of bytes and of a second backward fail because"
        " autograd, which has this formula now, overwrites nothing.",
    )
    teach_bytes(lesson, function)
    teach_second_backward(lesson, function)
