"""Experts in FP8: one scale for each row, that is for each token, and for each output of a weight.

An expert multiplies the tokens that chose it (moe.py). Under expert parallelism these come from the
micro-batches of several ranks, so there is no one tensor whose maximum could give a scale. A scale
of its own for each row does not ask who else is in the tensor, and the layout changes nothing:

    y_ij  =  Σ_k q(x)_ik q(w)_jk / (scale_i scale_j)          x: [rows, in]; w: [out, in]

The scales stand outside of the sum, so they must not depend on k. Each product sums over another
dimension, so a weight is in bytes twice:

                                        what has a scale
    forward            y  = x Wᵀ        rows of x; rows of W
    input gradient     ∂x = ∂y W        rows of ∂y; columns of W
    weight gradient    ∂W = ∂yᵀ x       the sum is over rows: not in FP8, so backward keeps x itself

e4m3 is enough for gradients too: within a row the range is short. Experts have these scales with
each recipe of precision/fp8_scaling.py, from the maxima of now.

Where tensor-parallel ranks hold parts of a row they agree on its maximum: of x and of W in the
second matrix (W_down), of ∂y and of the columns of W in the first ones (W_gate, W_up).

On Hopper GPUs, in bf16, torch._scaled_grouped_mm multiplies the bytes of all experts. Its sums have
fewer bits than float32 (`use_fast_accum`), as in torchao.

Not covered: ∂W in FP8, with a scale for each column of an expert's rows (torchao).
"""

if __name__ == "__main__":
    from base import start

    start.lesson("fp8")

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import moe
import tensor_parallel
from model_config import LINEARS
from precision.float8 import E4M3, Quantised, block_maxima, product_dtype, quantise, scale_of
from precision.fp8_scaling import GRADIENT, INPUT, WEIGHT, Scaling


@dataclass(frozen=True)
class Layer:
    """Matrices of experts that read the same rows: their places in `Scaling`, and which operands
    are parts of rows: of each, the ranks that hold the other parts, or None."""

    scaling: Scaling
    places: tuple[tuple[int, int], ...]
    input_group: dist.ProcessGroup | None
    gradient_group: dist.ProcessGroup | None

    def in_bytes(self, x: Tensor, place, operand: int, group) -> Quantised:
        """x: [rows, n] -> with a scale for each row"""
        scaling, block = self.scaling, (1, x.shape[1])
        amax = block_maxima(x, block).nan_to_num(torch.inf, torch.inf)  # [rows, 1]
        scaling.record(amax, place, operand)
        if group is not None:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        exact = scaling.recipe.power_of_two
        return quantise(x, scale_of(amax, E4M3, exact), E4M3, block, exact)

    def weight_bytes(
        self, i: int, w: Tensor, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Quantised | None, Quantised | None]:
        """(for y [E out, in], for ∂x [E in, out]) of a weight [E, out, in]. Made once a step;
        without `keep_bytes` for each product, which wants one of the two: the other is None."""
        keep = self.scaling.keep_bytes
        found = self.scaling.weights.get(w)
        if found is None:
            flat, place = w.detach(), self.places[i]
            for_y = for_dx = None
            if keep or wanted[0]:
                for_y = self.in_bytes(flat.flatten(0, 1), place, WEIGHT, self.input_group)
            if keep or wanted[1]:
                columns = flat.transpose(1, 2).flatten(0, 1)
                for_dx = self.in_bytes(columns, place, WEIGHT, self.gradient_group)
            found = for_y, for_dx
            if keep:
                self.scaling.weights[w] = found
        return found


def multiply(x: Quantised, counts: Tensor, w: Quantised) -> Tensor:
    """Each expert's rows times its matrix. x: [rows, K]; counts: [E]; w: [E N, K] -> [rows, N]"""
    experts = len(counts)
    shape = experts, w.q.shape[0] // experts, w.q.shape[1]
    if runs_in_fp8(x, shape):
        ends = counts.cumsum(0, dtype=torch.int32)
        scales = x.inverse.flatten(), w.inverse.view(shape[:2])
        matrices = w.q.view(shape).transpose(1, 2)
        return torch._scaled_grouped_mm(
            x.q, matrices, *scales, offs=ends, out_dtype=x.dtype, use_fast_accum=True
        )
    wide = product_dtype(x.dtype, x.exact)
    (y,) = moe.grouped_linear(x.values(wide), counts, w.values(wide).view(shape))
    return y.to(x.dtype)


def runs_in_fp8(x: Quantised, shape: tuple[int, int, int]) -> bool:
    """Whether torch._scaled_grouped_mm takes it: Hopper, bf16 results, rows of whole 16 bytes.
    shape: of the weight, [E, N, K]."""
    # no CUDA: an AMD GPU, where e4m3 is another format
    if not x.q.is_cuda or not torch.version.cuda:
        return False
    if x.dtype != torch.bfloat16 or not len(x.q):
        return False
    aligned = all(size % 16 == 0 for size in shape[1:])
    return aligned and torch.cuda.get_device_capability(x.q.device)[0] == 9


def weight_gradient(x: Tensor, grad: Tensor, counts: Tensor, like: Tensor) -> Tensor:
    """∂W_e = ∂y_eᵀ x_e of each expert, in the precision of the run. like: [E, out, in]"""
    # the library's product under the conditions of moe.grouped_linear
    aligned = all(size % 8 == 0 for size in like.shape[1:])
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x) and aligned:
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(grad.t(), x, offs=ends)
    dw = torch.empty_like(like)
    sizes = counts.tolist()
    for e, (rows, d_rows) in enumerate(zip(x.split(sizes), grad.split(sizes))):
        torch.mm(d_rows.t(), rows, out=dw[e])
    return dw


class _GroupedLinear(torch.autograd.Function):
    """Y_i = [X_e W_ieᵀ for each expert e], for several W_i that read the same rows."""

    @staticmethod
    def forward(ctx, x, counts, layer, *weights):
        # frozen weights have no use for x
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, counts)
        ctx.layer, ctx.weights = layer, weights
        q = layer.in_bytes(x, layer.places[0], INPUT, layer.input_group)
        only_y = True, False
        bytes_of_weights = [layer.weight_bytes(i, w, only_y)[0] for i, w in enumerate(weights)]
        return tuple(multiply(q, counts, q_w) for q_w in bytes_of_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, counts = ctx.saved_tensors
        layer = ctx.layer
        dx = 0
        d_weights = [None] * len(grads)
        for i, (grad, w) in enumerate(zip(grads, ctx.weights)):
            grad = grad.contiguous()
            q = layer.in_bytes(grad, layer.places[i], GRADIENT, layer.gradient_group)
            dx = dx + multiply(q, counts, layer.weight_bytes(i, w, (False, True))[1])
            if ctx.needs_input_grad[3 + i]:
                d_weights[i] = weight_gradient(x, grad, counts, w)
        return dx, None, None, *d_weights


def multiply_in_fp8(
    layers: dict, rows: Tensor, counts: Tensor, *matrices: moe.ExpertLinear
) -> list[Tensor]:
    """moe.MoE.multiply in FP8. rows: [rows, in]; counts: [E] -> [rows, out] each"""
    layer = layers[matrices[0]]
    layer.scaling.recording = torch.is_grad_enabled()
    return list(_GroupedLinear.apply(rows, counts, layer, *(matrix.weight for matrix in matrices)))


def apply(mlp: moe.MoE, scaling: Scaling, number: int) -> None:
    """Give the experts of layer `number` FP8 matrix multiplications; in place."""
    group = None
    if isinstance(mlp.enter, tensor_parallel.CopyToRanks):
        group = mlp.enter.group
    names = list(LINEARS)
    first = mlp.up if mlp.gate is None else mlp.gate
    of_first = ("up",) if mlp.gate is None else ("gate", "up")
    places = tuple((number, names.index(name)) for name in of_first)
    layers = {
        # each rank has its rows of W, that is its columns of y
        first: Layer(scaling, places, input_group=None, gradient_group=group),
        # each rank has its part of the rows of x
        mlp.down: Layer(scaling, ((number, names.index("down")),), group, None),
    }
    mlp.multiply = partial(multiply_in_fp8, layers)
    for place in (*places, *layers[mlp.down].places):
        scaling.by_row[*place] = True
