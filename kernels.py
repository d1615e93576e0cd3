"""Fused CUDA operations: one pass over memory where PyTorch makes several.

Between its matrix multiplications a transformer adds, scales and normalises. That is little
arithmetic per element, so the time of these operations is that of moving their bytes: a GPU with
800 TFLOP/s and 4 TB/s could do 800 FLOPs while an element of 2 bytes is read and written. PyTorch
reads and writes memory once per small operation. A fused kernel reads each input once and writes
each output once, and no kernel can be faster than that.

    python -m course.kernels   do the kernels run here; bytes moved, beside PyTorch's own operations

Bytes per element of the first argument in bf16, forward + backward:

    operation           one pass   computes                                      source
    rms_norm             4 + 6     x / √(mean x² + ε) w                          arXiv 1910.07467
    layer_norm           4 + 6     (x - mean) / √(variance + ε) w + b            arXiv 1607.06450
    add_norm             8 + 8     residual + x + b, and the norm of that
    rotary               8 + 8     queries and keys rotated by their position    arXiv 2104.09864
    swiglu               6 + 10    silu(gate) up                                 arXiv 2002.05202
    bias_gelu            4 + 6     gelu(x + b), tanh form                        arXiv 1606.08415
    bias_dropout_add     6 + 4     residual + dropout(x + b), mask recomputed    base/dropout.py
    causal_softmax       3 + 4     softmax(scale x + causal mask); half is read
    softmax_dropout      3 + 4     dropout of that, mask and softmax recomputed  base/dropout.py
    cross_entropy        2 + 4     log Σ exp z - z_target, gradient in place     arXiv 1805.02867
    permute              6 + 6     copies of tokens, sorted by expert, k = 2     moe.py
    unpermute            3 + 5     back: times probabilities, summed, k = 2      moe.py
    adamw                20        all parameters, bf16 moments, split master    optimizer.py

The CUDA sources are in base/csrc/: read common.cuh, then swiglu.cu, norms.cu, cross_entropy.cu.
Each kernel has here a signature (base/cuda_kernels.py), a gradient and a PyTorch fallback. Casts to
FP8 are in base/fp8_cast.py. Matrix multiplications stay with cuBLAS, attention with
scaled_dot_product_attention.

A memory-bound kernel comes near the limit by instructions that move vectors of 16 bytes, several
loads in flight before the first is used, neighbouring threads at neighbouring addresses, sums in
registers and shuffles, and reading each element once. Comments in the CUDA sources say where each
of these is decided; benchmarks/kernels.py measures how near each kernel comes.

On CPUs, in float64, for empty tensors, and for rows that are not whole vectors or too long, the
functions below fall back to the PyTorch operations of gpt.py and moe.py. (adamw raises RuntimeError
instead.) `apply(model, device, dtype)` makes them the forward of the modules of a finished model,
so names, parameters and other techniques do not change. Hooks on the norms of a block do not run:
the block computes them.

Tests run the source in an emulator, and on a GPU if there is one. docs/gpu.md has the times on an
H100. compute-sanitizer has not yet run over it.

Not covered (Transformer Engine, Apex and Liger have them): norms fused with the matrix
multiplication behind them; kernels tuned for each card and size.
"""

import math
from types import MethodType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import moe
import tensor_parallel
from base import adamw_kernel, causal_blocks, compiling, cpu
from base import cross_entropy as plain
from base.cuda_kernels import (
    LONGEST,
    gradient,
    kernel,
    supported,
    supported_rows,
    vector_elements,
    why_not,
)
from base.dropout import dropout_mask
from base.fp8_cast import note_maximum
from base.rotary import Rotary, rotate

# --- norms ----------------------------------------------------------------------------------------

# z = residual + (x + x_bias). y is its LayerNorm, or without a bias its RMSNorm. n: 1 for max |y|,
# or 0.
norm_forward = kernel(
    "add_norm(x[.., h], x_bias[h]?, residual[.., h]?, weight[h], bias[h]?, eps: float, n: int)"
    " -> z[.., h] if residual, y[.., h], mean f32[..] if bias, rstd f32[..], amax max[n]"
)
# dz: the gradient of z from elsewhere. n: 1, with means 2, with x_bias 3, or 0 if none of these is
# trained.
norm_backward = kernel(
    "add_norm_backward(dy[.., h], dz[.., h]?, z[.., h], weight[h], mean f32[..]?, rstd f32[..],"
    " n: int) -> dx[.., h], dweights sum[n, h]"
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x_bias, residual, weight, bias, eps, n):
        z, y, mean, rstd, amax = norm_forward(x, x_bias, residual, weight, bias, eps, n)
        z = x if residual is None else z
        ctx.save_for_backward(z, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(amax)
        # Autograd does not let an input be an output, so this returns a view.
        return z.view_as(z), y, amax

    @staticmethod
    @once_differentiable
    def backward(ctx, dz, dy, _):
        _, x_bias, residual, *learns, _, _ = ctx.needs_input_grad
        sums = [None] * 3
        # Without dy nobody used the norm.
        if dy is not None:
            z, w, mean, rstd = ctx.saved_tensors
            n = 1 + (mean.numel() > 0) + x_bias if x_bias or any(learns) else 0
            dz, found = norm_backward(dy, dz, z, w, mean, rstd, n)
            sums[:n] = found
        elif x_bias:
            sums[2] = dz.flatten(0, -2).sum(0)
        dw, db = (s if wanted else None for s, wanted in zip(sums, learns))
        return dz, sums[2], dz if residual else None, dw, db, None, None


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    notes: bool = False,
) -> tuple[Tensor, Tensor]:
    """(z, its norm), z = residual + (x + x_bias): a LayerNorm, or without a bias an RMSNorm.

    x, residual: [.., h]; without a residual z is x; x_bias: [h] or None, which needs a residual;
    notes: whether to note the norm's maximum on it, for a cast to FP8. Backward adds the gradient
    that reaches z directly in the same pass.
    """
    # The kernel sums the gradient of x_bias with those of a LayerNorm, in rows that are not too
    # long.
    if x_bias is not None and (bias is None or not supported_rows(x, LONGEST // 2)):
        x, residual = bias_dropout_add(x, x_bias, residual, None, 0, 0, 0.0), None
        x_bias = None
    if supported_rows(x, LONGEST):
        z, y, amax = _Norm.apply(x, x_bias, residual, weight, bias, eps, int(notes))
        note_maximum(y, amax)
        return z, y
    z = x if residual is None else x + residual
    if bias is None:
        return z, F.rms_norm(z, z.shape[-1:], weight, eps)
    return z, F.layer_norm(z, z.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / √(mean x² + ε) weight, over the last dimension (arXiv 1910.07467, eq. 4).

    x: [.., h]; weight: [h], of the same dtype -> [.., h]. Raises ValueError for shapes and dtypes
    that do not fit together, like every operation here.
    """
    return add_norm(x, None, weight, None, eps)[1]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / √(variance + ε) weight + bias, over the last dimension (arXiv 1607.06450).

    x: [.., h]; weight, bias: [h] -> [.., h]
    """
    return add_norm(x, None, weight, bias, eps)[1]


# --- rotary embedding -----------------------------------------------------------------------------

# sign: 1, or -1 to rotate back, which is the gradient.
rotary_forward = kernel(
    "rotary(q heads[b, a, s, d], k heads[b, c, s, d], cosine[s, d], sine[s, d], sign: float)"
    " -> q_out heads[b, a, s, d], k_out heads[b, c, s, d]"
)


@gradient(rotary_forward, keep=(2, 3))
def rotary_gradient(ctx, dq, dk):
    return *rotary_forward(dq, dk, *ctx.saved_tensors, -1.0), None, None, None


def rotary(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """base.rotary.rotate of queries and keys together (arXiv 2104.09864, eq. 34).

    q: [b, a, s, d]; k: [b, a_kv, s, d], both of any strides; cosine, sine: [s, d] of
    rotary_table -> the shapes of q and k
    """
    is_small = q.numel() + k.numel() < 2**31
    whole_vectors = q.shape[-1] % (2 * vector_elements(q)) == 0
    if not (supported(q) and supported(k) and is_small and whole_vectors):
        return rotate(q, (cosine, sine)), rotate(k, (cosine, sine))
    return rotary_forward(q, k, cosine, sine, 1.0)


# --- SwiGLU ---------------------------------------------------------------------------------------

# n: 1 for max |y|, or 0; in backward 2 for the maxima of both gradients.
swiglu_forward = kernel("swiglu(gate[.., h], up[.., h], n: int) -> y[.., h], amax max[n]")
swiglu_backward = kernel(
    "swiglu_backward(dy[.., h], gate[.., h], up[.., h], n: int)"
    " -> d_gate[.., h], d_up[.., h], amax max[n]"
)


@gradient(swiglu_forward, keep=(0, 1))
def swiglu_gradient(ctx, dy, _):
    *grads, maxima = swiglu_backward(dy, *ctx.saved_tensors, 2 * ctx.numbers[0])
    for i, grad in enumerate(grads):
        note_maximum(grad, maxima[i : i + 1])
    return *grads, None


def swiglu(gate: Tensor, up: Tensor, notes: bool = False) -> Tensor:
    """silu(gate) up (arXiv 2002.05202, eq. 6). gate, up: any one shape -> the same shape. notes:
    whether to note maxima on the result and on both gradients, for casts to FP8."""
    if not supported(gate) or gate.numel() % vector_elements(gate):
        return F.silu(gate) * up
    y, amax = swiglu_forward(gate, up, int(notes))
    note_maximum(y, amax.detach())
    return y


# --- bias + GELU, bias + dropout + residual -------------------------------------------------------

bias_gelu_forward = kernel("bias_gelu(x[.., h], bias[h]?) -> y[.., h]")
# n: 1 for the gradient of the bias, or 0.
bias_gelu_backward = kernel(
    "bias_gelu_backward(dy[.., h], x[.., h], bias[h]?, n: int) -> dx[.., h], d_bias sum[n, h]"
)


@gradient(bias_gelu_forward, keep=(0, 1))
def bias_gelu_gradient(ctx, dy):
    wanted = ctx.needs_input_grad[1]
    dx, d_bias = bias_gelu_backward(dy, *ctx.saved_tensors, int(wanted))
    return dx, d_bias[0] if wanted else None


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias) in the tanh form (arXiv 1606.08415, section 2).

    x: [.., h]; bias: [h] or None -> [.., h]
    """
    if not supported_rows(x):
        return F.gelu(x if bias is None else x + bias, approximate="tanh")
    return bias_gelu_forward(x, bias)


# start: global number of the first position; limit: p 2^32; n: 1 for sums of y over rows, or 0.
bias_dropout_add_forward = kernel(
    "bias_dropout_add(x[b, s, h], bias[h]?, residual[b, s, h]?, key i32[b]?, n: int,"
    " start: int, site: int, limit: int, scale: float) -> y[b, s, h], sums sum[n, h]"
)


@gradient(bias_dropout_add_forward, keep=(3,))
def bias_dropout_add_gradient(ctx, dy, _):
    (key,) = ctx.saved_tensors
    wanted = ctx.needs_input_grad[1]
    if key is None:
        # Nothing was dropped: dx is dy itself.
        dx, d_bias = dy, dy.sum((0, 1), keepdim=True)[0] if wanted else None
    else:
        mask = ctx.numbers[1:]
        dx, d_bias = bias_dropout_add_forward(dy, None, None, key, int(wanted), *mask)
    return dx, d_bias[0] if wanted else None, dy, *[None] * 6


def mask_numbers(start: int, site: int, p: float) -> tuple[int, int, int, float]:
    """The numbers of dropout that a kernel takes beside keys: start, site, limit and scale."""
    return start, site, min(round(p * 2**32), 2**32 - 1), 1 / (1 - p)


def bias_dropout_add(x, bias, residual, key, site: int, start: int, p: float) -> Tensor:
    """residual + dropout(x + bias), with the mask of dropout.dropout_mask.

    x, residual: [b, s, h]; bias: [h] or None; key: [b] from dropout.layer_key, None for no dropout;
    site: which dropout of a layer; start: global number of the first position
    -> [b, s, h]
    """
    key = key if p else None
    if supported_rows(x):
        mask = mask_numbers(start, site, p)
        return bias_dropout_add_forward(x, bias, residual, key, 0, *mask)[0]
    y = x if bias is None else x + bias
    if key is not None:
        dropped = dropout_mask(key, site, x.shape, {1: start}, p)
        y = y.masked_fill(dropped, 0.0) * (1 / (1 - p))
    return residual + y


# --- causal softmax -------------------------------------------------------------------------------

causal_softmax_forward = kernel("causal_softmax(scores[.., s, s], scale: float) -> y[.., s, s]")
causal_softmax_backward = kernel(
    "causal_softmax_backward(dp[.., s, s], p[.., s, s], scale: float) -> d_scores[.., s, s]"
)


@gradient(causal_softmax_forward, keep_output=True)
def causal_softmax_gradient(ctx, dp):
    return causal_softmax_backward(dp, *ctx.saved_tensors, *ctx.numbers), None


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """softmax(scale scores) where row i attends to columns 0 .. i.

    scores: [.., s, s] -> [.., s, s], 0 above the diagonal
    """
    if not supported_rows(scores, LONGEST):
        above = torch.full_like(scores, -math.inf).triu(1)
        return (scores * scale + above).softmax(-1)
    return causal_softmax_forward(scores, scale)


# start: global number of the first head; keep_scale: 1 / (1 - p). Backward starts from the scores,
# so that neither a mask nor the undropped probabilities stay in memory.
softmax_dropout_forward = kernel(
    "softmax_dropout(scores[b, a, s, s], key i32[b], scale: float,"
    " start: int, site: int, limit: int, keep_scale: float) -> y[b, a, s, s]"
)
softmax_dropout_backward = kernel(
    "softmax_dropout_backward(dy[b, a, s, s], scores[b, a, s, s], key i32[b], scale: float,"
    " start: int, site: int, limit: int, keep_scale: float) -> d_scores[b, a, s, s]"
)


@gradient(softmax_dropout_forward, keep=(0, 1))
def softmax_dropout_gradient(ctx, dy):
    return softmax_dropout_backward(dy, *ctx.saved_tensors, *ctx.numbers), *[None] * 6


def softmax_dropout(
    scores: Tensor, key: Tensor, scale: float, site: int, start: int, p: float
) -> Tensor:
    """dropout(causal_softmax(scores, scale)), with the mask of dropout.dropout_mask.

    scores: [b, a, s, s]; key: [b] from dropout.layer_key; site: which dropout of a layer; start:
    global number of the first head -> [b, a, s, s]
    """
    if supported_rows(scores, LONGEST):
        return softmax_dropout_forward(scores, key, scale, *mask_numbers(start, site, p))
    dropped = dropout_mask(key, site, scores.shape, {1: start}, p)
    return causal_softmax(scores, scale).masked_fill(dropped, 0.0) * (1 / (1 - p))


# --- cross entropy --------------------------------------------------------------------------------

# The target of a row whose token is in another rank's columns, as in the CUDA source.
ELSEWHERE = -(2**62)

# The first `valid` columns count. total: Σ exp(z - largest); target_logit: 0 for ELSEWHERE.
cross_entropy_statistics = kernel(
    "cross_entropy_statistics(logits[.., V], targets i64[..], valid: int)"
    " -> largest f32[..], total f32[..], target_logit f32[..]"
)
# Overwrites logits with their gradient, grad (exp(z - largest) / total - onehot(target)), and with
# 0 beyond the valid columns. largest and total are those of the whole row.
cross_entropy_gradient = kernel(
    "cross_entropy_gradient(logits![.., V], targets i64[..], largest f32[..], total f32[..],"
    " grad f32[..], valid: int) -> ()"
)


class _CrossEntropy(torch.autograd.Function):
    """logits are whole rows if `group` is None. With a group they are this rank's columns, and the
    statistics are all-reduced."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, group):
        n = logits.shape[-1]
        local, valid = targets, vocab_size
        if group is not None:
            local, elsewhere = tensor_parallel.local_ids(targets, n, vocab_size, group)
            local = local.masked_fill(elsewhere & (local >= 0), ELSEWHERE)
            valid = tensor_parallel.columns_of_rank(n, vocab_size, group)
        statistics = cross_entropy_statistics(logits, local, valid)
        if group is not None:
            statistics = tensor_parallel.reduce_statistics(*statistics, group)
        largest, total, target_logit = statistics
        ctx.save_for_backward(logits, local, largest, total)
        ctx.valid = valid
        return total.log() + (largest - target_logit)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, *statistics = ctx.saved_tensors
        gradient = logits.detach()
        cross_entropy_gradient(gradient, *statistics, grad, ctx.valid)
        return gradient, None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int | None = None) -> Tensor:
    """log Σ exp z - z_target of each row, in float32.

    logits: [.., V]; targets: [..] int64 -> [..]; vocab_size: columns that count, V by default.
    Backward **overwrites** the logits with their gradient, so it can run only once.
    """
    if not supported(logits):
        return plain.cross_entropy(logits, targets, vocab_size)
    return _CrossEntropy.apply(logits.contiguous(), targets, vocab_size or logits.shape[-1], None)


@compiling.left_out
def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """cross_entropy of logits [.., V / t] that are sharded over the vocabulary.

    As tensor_parallel.vocab_parallel_cross_entropy: only the statistics are all-reduced, 3 numbers
    per row.
    """
    if not supported(logits):
        return tensor_parallel.vocab_parallel_cross_entropy(logits, targets, vocab_size, group)
    return _CrossEntropy.apply(logits.contiguous(), targets, vocab_size, group)


# --- the permutation of a mixture of experts ------------------------------------------------------

# order: choices; choice c belongs to token c % n. position: for the gradient.
permute_forward = kernel("permute(x[n, h], order i64[m], position i64[k, n]) -> y[m, h]")
# position: the row of each token's choices, m for a dropped one. Without probabilities they are 1.
# order: for the gradient.
unpermute_forward = kernel(
    "unpermute(rows[m, h], position i64[k, n], probabilities f32[n, k]?, order i64[m]?) -> y[n, h]"
)
# Dropped choices keep their d_probabilities.
unpermute_backward = kernel(
    "unpermute_backward(dy[n, h], rows[m, h], order i64[m], probabilities f32[n, k],"
    " d_probabilities! f32[n, k]) -> d_rows[m, h]"
)


@gradient(permute_forward, keep=(2,))
def permute_gradient(ctx, dy):
    # The gradient of permute is unpermute without probabilities.
    return unpermute_forward(dy, *ctx.saved_tensors, None, None), None, None


@gradient(unpermute_forward, keep=(0, 2, 3))
def unpermute_gradient(ctx, dy):
    rows, probabilities, order = ctx.saved_tensors
    d_probabilities = torch.zeros(probabilities.shape, device=dy.device)
    d_rows = unpermute_backward(dy, rows, order, probabilities, d_probabilities)
    return d_rows, None, d_probabilities, None


def permute(x: Tensor, order: Tensor, position: Tensor) -> Tensor:
    """Copies of the tokens in the order of the choices (moe.Dispatch).

    x: [n, h]; order: [m]; position: [k, n], the inverse of order -> [m, h]
    """
    if not supported_rows(x) or not len(order):
        return moe.permute(x, order, position)
    return permute_forward(x, order, position)


def unpermute(rows: Tensor, probabilities: Tensor, position: Tensor, order: Tensor) -> Tensor:
    """The reverse of `permute`: the sum of each token's rows times their router probabilities.

    rows: [m, h]; probabilities: [n, k] float32; position: [k, n]; order: [m] -> [n, h]
    """
    if not supported_rows(rows):
        return moe.unpermute(rows, probabilities, position, order)
    return unpermute_forward(rows, position, probabilities, order)


# --- the update of the optimizer ------------------------------------------------------------------

adamw = adamw_kernel.adamw

# --- apply ----------------------------------------------------------------------------------------
#
# These functions become the forward of a module, or the loss of a head. self is the module.


def norm_of_module(self: nn.RMSNorm | nn.LayerNorm, x: Tensor) -> Tensor:
    return add_norm(x, None, *of_norm(self))[1]


def of_norm(norm: nn.Module) -> tuple | None:
    """(weight, bias, ε) of a norm that the kernels compute; None for another norm."""
    if type(norm) not in (nn.RMSNorm, nn.LayerNorm) or len(norm.normalized_shape) > 1:
        return None
    bias = getattr(norm, "bias", None)
    lacks_bias = type(norm) is nn.LayerNorm and bias is None
    if lacks_bias or norm.weight is None or norm.eps is None:
        return None
    return norm.weight, bias, norm.eps


def block(self: gpt.Block, x: Tensor, context: gpt.Context = gpt.PLAIN) -> Tensor:
    """The forward of gpt.Block whose norms also return the residual, so that backward adds both
    gradients in one pass. Without dropout the second norm adds the bias and the residual too."""
    first, second = of_norm(self.attention_norm), of_norm(self.mlp_norm)
    if first is None or second is None:
        return gpt.Block.forward(self, x, context)
    x, y = add_norm(x, None, *first, notes=is_cast(self.attention_norm))
    y = self.attention(y, context)
    bias = self.attention.output.bias
    if drops(self.attention_residual, context.drop_key):
        x = self.attention_residual(y, bias, x, context.drop_key)
        x, y = add_norm(x, None, *second, notes=is_cast(self.mlp_norm))
    else:
        x, y = add_norm(y, x, *second, bias, is_cast(self.mlp_norm))
    y = self.mlp(y, context)
    return self.mlp_residual(y, self.mlp.down.bias, x, context.drop_key)


def is_cast(module: nn.Module) -> bool:
    """Whether the module's output is cast to FP8 by its own maximum (fp8.py), and can carry a note:
    compiled code makes none."""
    return bool(getattr(module, "is_cast", False)) and not torch.compiler.is_compiling()


def drops(module: gpt.BiasDropoutAdd, drop_key: Tensor | None) -> bool:
    return drop_key is not None and module.dropout.p > 0


def bias_dropout_add_of_module(
    self: gpt.BiasDropoutAdd, x: Tensor, bias: Tensor | None, residual: Tensor, drop_key
) -> Tensor:
    # PyTorch adds two tensors in one pass already, and the kernel supports only consecutive
    # positions.
    only_adds = bias is None and not drops(self, drop_key)
    if only_adds or self.dropout.coordinates:
        return gpt.BiasDropoutAdd.forward(self, x, bias, residual, drop_key)
    start = self.dropout.shard_index.get(1, 0) * x.shape[1]
    mask = self.dropout.site, start, self.dropout.p
    return bias_dropout_add(x, bias, residual, drop_key, *mask)


def rotary_of_module(self: Rotary, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]):
    # While decoding, and with documents, each row has its own positions and so its own table. The
    # kernel rotates whole heads.
    if table[0].dim() == 2 and table[0].shape[-1] == q.shape[-1]:
        return rotary(q, k, *table)
    return Rotary.forward(self, q, k, table)


def explicit_attention(
    self: gpt.ExplicitAttention, q: Tensor, k: Tensor, v: Tensor, context: gpt.Context
) -> Tensor:
    # The kernels support only the causal mask and consecutive heads.
    is_causal = type(self.probabilities) is gpt.CausalProbabilities and context.documents is None
    if not is_causal or self.dropout.coordinates:
        return gpt.ExplicitAttention.forward(self, q, k, v, context)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores, scale = q @ k.transpose(2, 3), q.shape[-1] ** -0.5
    if context.drop_key is None or self.dropout.p == 0:
        p = causal_softmax(scores, scale)
    else:
        start = self.dropout.shard_index.get(1, 0) * q.shape[1]
        mask = self.dropout.site, start, self.dropout.p
        p = softmax_dropout(scores, context.drop_key, scale, *mask)
    return (p @ v).transpose(1, 2).flatten(2)


def parallel_loss(self: tensor_parallel.VocabParallelHead, logits, targets) -> Tensor:
    return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.group)


# (class, replaced method, function of the module and the method's arguments)
FUSED = [
    (nn.RMSNorm, "forward", norm_of_module),
    (nn.LayerNorm, "forward", norm_of_module),
    (gpt.Block, "forward", block),
    (Rotary, "forward", rotary_of_module),
    (gpt.SwiGLU, "forward", lambda self, gate, up: swiglu(gate, up, is_cast(self))),
    (gpt.GELU, "forward", lambda self, x, bias: bias_gelu(x, bias)),
    (gpt.BiasDropoutAdd, "forward", bias_dropout_add_of_module),
    (gpt.ExplicitAttention, "forward", explicit_attention),
    (gpt.Head, "loss", lambda self, *args: cross_entropy(*args, self.vocab_size)),
    (tensor_parallel.VocabParallelHead, "loss", parallel_loss),
    (moe.MoE, "permute", lambda self, *args: permute(*args)),
    (moe.MoE, "unpermute", lambda self, *args: unpermute(*args)),
]


def swap(model: nn.Module) -> None:
    """Make the modules of a model compute with the functions above, on any device.

    Call it after all techniques that replace modules (tensor_parallel.apply), and before those that
    wrap the forward of a block. The kernels need arguments of one dtype, so the model does not run
    under autocast afterwards.
    """
    for module in model.modules():
        for own, name, function in FUSED:
            is_computed = function is not norm_of_module or of_norm(module) is not None
            if type(module) is own and is_computed:
                setattr(module, name, MethodType(function, module))


def apply(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Call `swap` if the kernels of this dtype run on this device. Returns None, or why they do
    not; then only `apply_on_cpu` changes the model."""
    if device.type == "cpu":
        apply_on_cpu(model, dtype)
    refused = why_not(dtype) if device.type == "cuda" else "no CUDA device"
    if not refused:
        swap(model)
    return refused or None


def apply_on_cpu(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace fused attention and GELU by forms that are faster on a CPU, in place. For float32
    attention only if oneDNN multiplies (base/cpu.py): with MKL blocks of rows are no faster."""
    by_onednn = torch.get_float32_matmul_precision() != "highest"
    has_blocks = dtype in (torch.bfloat16, torch.float64) or (dtype == torch.float32 and by_onednn)
    for module in model.modules():
        if type(module) is gpt.FusedAttention and has_blocks:
            module.forward = MethodType(attention_on_cpu, module)
        # In 16 bits each of its steps would be rounded.
        if type(module) is gpt.GELU and dtype.itemsize >= 4:
            module.forward = MethodType(gelu_on_cpu, module)


def attention_on_cpu(self: gpt.FusedAttention, q: Tensor, k: Tensor, v: Tensor, context) -> Tensor:
    if context.documents is not None or q.shape[2] > causal_blocks.LONGEST:
        return gpt.FusedAttention.forward(self, q, k, v, context)
    return causal_blocks.causal_attention(q, k, v).transpose(1, 2).flatten(2)


def gelu_on_cpu(self: gpt.GELU, x: Tensor, bias: Tensor | None) -> Tensor:
    return cpu.gelu(x if bias is None else x.add_(bias))
