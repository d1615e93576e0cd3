"""Overlap: in backward, column-parallel layers communicate while they compute.

A matrix multiplication y = x Wᵀ has two gradients. Tensor parallelism sends only the first:

    ∂x = ∂y W       each rank has a part, and the parts are summed over ranks
    ∂W = ∂yᵀ x      stays on its rank

In tensor_parallel.py autograd computes both, and waits for the sum afterwards. Here one autograd
function does all of it, in an order that hides the communication. What stands in one row runs at
the same time:

    f, tensor parallelism                  g, sequence parallelism

    compute ∂x                             compute ∂x      all-gather x
    compute ∂W      all-reduce ∂x          compute ∂W      reduce-scatter ∂x

Under sequence parallelism a layer keeps only its rank's shard of x, [b, s/t, h]. So backward
gathers x again (arXiv 2205.05198, section 4.2.2).

    python sequence_parallel.py      a lesson: the collectives of backward, the bytes that are kept

∂W can also wait for longer. Where the pipeline has put a list on a weight, backward appends to it
what ∂W is computed from (pipelines/zero_bubble.py). Or it goes straight to the sum of the weight's
gradients (gradients.py, `fuse_accumulation`).

Not covered: overlap inside one matrix multiplication, chunk by chunk (user buffers of Transformer
Engine).
"""

if __name__ == "__main__":
    from base import start

    start.lesson("sequence_parallel")

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
from base import compiling
from sequence_parallel import GatherSequence, start_gather, start_scatter
from tensor_parallel import ColumnParallelLinear, CopyToRanks

# --- communication that is under way --------------------------------------------------------------


def start_nothing(x: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """The identity, in the form of the others: returns a function that gives x."""
    return lambda: x


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum x over the ranks, in place; returns a function that waits and gives x."""
    work = dist.all_reduce(x, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


NOTHING = (start_nothing, start_nothing)
# what begins for x in forward, and for ∂x in backward
STARTS = {
    CopyToRanks: (start_nothing, start_all_reduce),
    GatherSequence: (start_gather, start_scatter),
}

# --- the linear layer -----------------------------------------------------------------------------


def weight_gradient(weight: Tensor, grad_output: Tensor, x: Tensor) -> Tensor | None:
    """∂W = ∂yᵀ x; or None where the weight has a list, to which the three are appended, and where
    the weight has an accumulator, which has added ∂W to the sum.

    grad_output: ∂y [b s, out]; x: [b s, in] -> [out, in]
    """
    if getattr(weight, "deferred", None) is not None:
        weight.deferred.append((weight, grad_output, x))
        return None
    accumulator = getattr(weight, "accumulator", None)
    # in FP8 (fp8.py) these are no tensors
    if accumulator is None or not isinstance(x, Tensor):
        return grad_output.t() @ x
    accumulator.accumulate_product(weight, grad_output, x)
    return None


class _Linear(torch.autograd.Function):
    """Y_i = f(x) W_iᵀ + b_i for several W_i that read the same x: n weights, then n biases or None.
    starts: what begins for x in forward, and for ∂x in backward."""

    @staticmethod
    def forward(ctx, x, starts, group, n, *weights_and_biases):
        weights = weights_and_biases[:n]
        biases = weights_and_biases[n:]
        ctx.starts, ctx.group, ctx.n = starts, group, n
        # the parameters themselves, not saved copies: they have the lists
        ctx.weights = weights
        ctx.save_for_backward(x)
        start_input, _ = starts
        whole = start_input(x, group)()  # [b, s, in]
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases))  # [b, s, out] each

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        n, group, weights = ctx.n, ctx.group, ctx.weights
        start_input, start_input_grad = ctx.starts
        (x,) = ctx.saved_tensors
        weights_wanted = ctx.needs_input_grad[4 : 4 + n]
        biases_wanted = ctx.needs_input_grad[4 + n :]
        # the input is on its way while the input gradient is computed
        arriving = start_input(x, group) if any(weights_wanted) else None
        grads_output = [grad.flatten(0, -2) for grad in grads]  # [b s, out]
        dx = grads_output[0] @ weights[0]
        for grad_output, weight in zip(grads_output[1:], weights[1:]):
            dx.addmm_(grad_output, weight)
        # the input gradient is on its way while the weight gradients are computed
        leaving = start_input_grad(dx.view(*grads[0].shape[:-1], -1), group)
        d_weights = [None] * n
        d_biases = [None] * n
        if arriving:
            whole = arriving().flatten(0, -2)  # [b s, in]
        for i, grad_output in enumerate(grads_output):
            if weights_wanted[i]:
                d_weights[i] = weight_gradient(weights[i], grad_output, whole)
            if biases_wanted[i]:
                d_biases[i] = grad_output.sum(0)
        return leaving(), None, None, None, *d_weights, *d_biases


@compiling.left_out
def linear(
    x: Tensor, *weights_and_biases: Tensor | None, starts=NOTHING, group=None
) -> tuple[Tensor, ...]:
    """x: [b, s, in], or a shard of it -> [b, s, out] for each weight [out, in].

    weights_and_biases: n weights, then n biases or None.
    """
    return _Linear.apply(x, starts, group, len(weights_and_biases) // 2, *weights_and_biases)


def weights_and_biases(linears: tuple[nn.Linear, ...]) -> list[Tensor | None]:
    """Of n layers n weights, then n biases; None where the next module adds the bias."""
    biases = [None] * len(linears)
    for i, layer in enumerate(linears):
        if not isinstance(layer, gpt.DeferredBiasLinear):
            biases[i] = layer.bias
    return [layer.weight for layer in linears] + biases


class JoinedInput(gpt.SharedInput):
    """gpt.SharedInput on one device: one function of autograd for all the layers. So ∂x is added up
    inside their matrix multiplications, and not by an addition after each. It reads the parameters
    of the layers, and does not call them."""

    def forward(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        return list(linear(x, *weights_and_biases(linears)))


class OverlappedLinear(ColumnParallelLinear):
    """ColumnParallelLinear, whose communication runs beside computation. It reads the parameters of
    the layers, and does not call them."""

    def forward(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        starts = STARTS[type(self.enter)]
        group = self.enter.group
        return list(linear(x, *weights_and_biases(linears), starts=starts, group=group))


# --- in a model -----------------------------------------------------------------------------------


def apply(model: gpt.GPT) -> None:
    """Let the column-parallel layers of a model, or of a stage, overlap; in place.

    After everything that adds such layers: tensor parallelism, adapters, prompts.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is ColumnParallelLinear:
                overlapped = OverlappedLinear(child.enter.group)
                # f, or g of sequence parallelism
                overlapped.enter = child.enter
                setattr(parent, name, overlapped)
