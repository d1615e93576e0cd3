"""Zero-bubble pipelines split backward in two (Qi et al., arXiv 2401.10241).

A matrix multiplication y = x Wᵀ has two gradients:

    I    ∂x = ∂y W       the stage before waits for it
    W    ∂W = ∂yᵀ x      nobody waits for it

So a schedule can run I as soon as ∂y arrives, and use the time in which a rank would wait for W:

    1f1b     rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
    zb-h1    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3

with p = 3 and m = 4; B is I and W, and so takes two slots (--); a dot is a slot of waiting.

During I a linear layer appends (weight, ∂y, x) to the list that the pipeline has put on its weight
(`weight.deferred`); during W the pipeline processes the list. Without a list the weight gradient is
computed at once. Gradients of biases and norms stay with I. The layer is that of overlap.py, here
without communication.

    python -m pipelines.zero_bubble            a lesson: what I leaves to W, FLOPs, bytes, gradients
    python pipeline_parallel.py      zb-h1 beside the other schedules

Not covered: ZB-H2 and ZB-V, and overlapping the data-parallel sum with W (Megatron-LM).
"""

if __name__ == "__main__":
    from base import start

    start.lesson("pipelines.zero_bubble")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
import overlap
import tensor_parallel


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, whose weight gradient may wait."""
    (y,) = overlap.linear(x, weight, bias)
    return y


class Linear(nn.Linear):
    """nn.Linear, whose weight gradient may wait."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class DeferredBiasLinear(gpt.DeferredBiasLinear):
    """gpt.DeferredBiasLinear, whose weight gradient may wait."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


REPLACEMENTS = {nn.Linear: Linear, gpt.DeferredBiasLinear: DeferredBiasLinear}


def with_weights_of(new: type[nn.Linear], old: nn.Linear) -> nn.Linear:
    """A module of class `new` with the very parameters of `old`."""
    with torch.device("meta"):
        module = new(old.in_features, old.out_features, bias=old.bias is not None)
    module.weight = old.weight
    module.bias = old.bias
    return module


def apply(model: gpt.GPT) -> None:
    """Let the linear layers of a model, or of a stage, defer their weight gradients; in place.

    After overlap.apply, whose layers defer too; before recompute.apply.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # a frozen weight has no gradient to defer
            if type(child) in REPLACEMENTS and child.weight.requires_grad:
                setattr(parent, name, with_weights_of(REPLACEMENTS[type(child)], child))
            if type(child) is gpt.SharedInput:
                setattr(parent, name, overlap.JoinedInput())
    for module in model.modules():
        # not that of fp8.py, which defers too
        if isinstance(module, tensor_parallel.RowParallelLinear) and module.linear is F.linear:
            module.linear = linear
