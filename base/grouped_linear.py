"""A linear layer of each expert, for its own rows: many small matrix multiplications at once.

    rows   x x x | x | x x     counts 3 1 2, in the order of experts
    times  W0    | W1| W2      each W: [out, in]

moe.py sorts its rows in this order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _GroupedLinear(torch.autograd.Function):
    """Y_i = [X_e W_ieᵀ for each expert e], for several W_i that read the same rows."""

    @staticmethod
    def forward(ctx, x, counts, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.counts = counts
        outputs = [x.new_empty(len(x), w.shape[1]) for w in weights]
        # Split returns views, so the outputs are filled in place.
        for e, (rows, *parts) in enumerate(zip(*(t.split(counts) for t in (x, *outputs)))):
            for w, y in zip(weights, parts):
                torch.mm(rows, w[e].t(), out=y)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        dx = torch.zeros_like(x)
        wanted = ctx.needs_input_grad[2:]
        d_weights = [torch.empty_like(w) if want else None for w, want in zip(weights, wanted)]
        pieces = zip(*(t.split(ctx.counts) for t in (x, dx, *grads)))
        for e, (rows, d_rows, *parts) in enumerate(pieces):
            for w, dw, grad in zip(weights, d_weights, parts):
                d_rows.addmm_(grad, w[e])
                if dw is not None:
                    # An expert without rows has a gradient of zeros.
                    torch.mm(grad.t(), rows, out=dw[e])
        return dx, None, *d_weights


def library_takes(x: Tensor, *weights: Tensor) -> bool:
    """Whether torch's kernel multiplies rows x with these weights, [E, out, in] each, or makes
    gradients of them: in bf16 on a GPU, in rows of multiples of 16 bytes."""
    aligned = all(size % 8 == 0 for w in weights for size in w.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0 and aligned


def grouped_by_library(x: Tensor, counts: Tensor, *weights: Tensor) -> list[Tensor]:
    """_GroupedLinear by torch's kernel, for all experts at once."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return [F.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in weights]


def grouped_linear(x: Tensor, counts: Tensor, *weights: Tensor) -> list[Tensor]:
    """A linear layer of each expert, for its own rows.

    x: [rows, in] in the order of experts; counts: [E] rows of each; weights: [E, out, in] each ->
    [rows, out] each. On a GPU one kernel computes all experts (`library_takes`). Elsewhere each
    expert is one matrix multiplication, and the host waits for the counts; the library's CPU
    version is the same loop.
    """
    if library_takes(x, *weights):
        return grouped_by_library(x, counts, *weights)
    return list(_GroupedLinear.apply(x, counts.tolist(), *weights))


def grouped_weight_gradient(x: Tensor, grad: Tensor, counts: Tensor, like: Tensor) -> Tensor:
    """∂W_e = ∂y_eᵀ x_e of each expert, in the precision of the run. like: [E, out, in]"""
    if library_takes(x, like):
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(grad.t(), x, offs=ends)
    dw = torch.empty_like(like)
    sizes = counts.tolist()
    for e, (rows, d_rows) in enumerate(zip(x.split(sizes), grad.split(sizes))):
        torch.mm(d_rows.t(), rows, out=dw[e])
    return dw
