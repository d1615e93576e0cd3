"""Cross entropy of a large vocabulary, whose gradient overwrites the logits.

    loss = log Σ exp(z) - z_target           ∂loss/∂z = softmax(z) - onehot(target)

Logits z are [b, s, V]: for a vocabulary of 50,000 words the largest tensor of a small model. Plain
autograd keeps them, their float32 copy, the softmax and its gradient at the same time. Here the
softmax overwrites the logits in forward, and the gradient overwrites the softmax in backward.

`tensor_parallel.vocab_parallel_cross_entropy` is the same for logits that are sharded by
vocabulary; `recompute.chunked_loss` makes logits of a few tokens at a time; `kernels.cross_entropy`
is a CUDA kernel.

    python -m course.chunked_head        a lesson, with the head in chunks of recompute.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class _CrossEntropy(torch.autograd.Function):
    """loss = log Σ exp(z) - z_target;  ∂loss/∂z = softmax(z) - onehot(target), in place of z."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size):
        # `z` is a copy of 16-bit logits, or the logits themselves.
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The probability of padding, and so its gradient, is 0.
        z[..., vocab_size:] = -torch.inf
        largest = z.amax(-1)  # [...]
        target_logit = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        # This is one pass of PyTorch, in place. The probability of the largest logit is 1 / Σ exp(z
        # - largest), and never 0.
        p = torch.softmax(z, -1, out=z)
        ctx.save_for_backward(p, targets)
        ctx.dtype = logits.dtype
        # In this order large logits cancel before anything is rounded.
        return (largest - target_logit) - p.amax(-1).log()

    @staticmethod
    def backward(ctx, grad):
        p, targets = ctx.saved_tensors
        return gradient_of_logits(p, targets, grad).to(ctx.dtype), None, None


def gradient_of_logits(
    p: Tensor, targets: Tensor, grad: Tensor, elsewhere: Tensor | None = None
) -> Tensor:
    """∂loss/∂z = (p - onehot(target)) grad, in place of p, the softmax.

    p: [..., V]; targets, grad: [...]; elsewhere: [...], where another rank has the target's column
    """
    minus_onehot = -torch.ones_like(grad)
    if elsewhere is not None:
        minus_onehot.masked_fill_(elsewhere, 0)
    p.scatter_add_(-1, targets.unsqueeze(-1), minus_onehot.unsqueeze(-1))
    return p.mul_(grad.unsqueeze(-1))


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int | None = None) -> Tensor:
    """Per-token loss in at least float32. targets: [...] int64 -> [...].

    logits: [..., V], **overwritten** by their gradient, so backward can run only once. vocab_size:
    columns that count, V by default; padding follows.
    """
    if logits.requires_grad:
        return _CrossEntropy.apply(logits, targets, vocab_size or logits.shape[-1])
    logits = logits[..., :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    # torch's default of -100 would hide a wrong target; training refuses it too.
    loss = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-(2**63))
    return loss.view(targets.shape)
