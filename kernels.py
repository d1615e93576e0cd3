"""Fused CUDA operations: one pass over memory where PyTorch makes several.

Between its matrix multiplications a transformer adds, scales and normalises. That is little
arithmetic per element, so these operations take the time of moving their bytes: a GPU that
multiplies at 800 TFLOP/s copies at 4 TB/s, and could do 800 FLOPs while an element of 2 bytes is
read and written. PyTorch reads and writes memory once per small operation. A fused kernel reads
each input once and writes each output once, and no kernel can be faster than that.

    python kernels.py       do the kernels run here; bytes moved, beside PyTorch's own operations

Bytes per element of the first argument in bf16, forward + backward:

    operation           one pass   computes                                      source
    rms_norm             4 + 6     x / √(mean x² + ε) w                          arXiv 1910.07467
    layer_norm           4 + 6     (x - mean) / √(variance + ε) w + b            arXiv 1607.06450
    add_norm             8 + 8     x + residual, and the norm of that
    rotary               8 + 8     queries and keys rotated by their position    arXiv 2104.09864
    swiglu               6 + 10    silu(gate) up                                 arXiv 2002.05202
    bias_gelu            4 + 6     gelu(x + b), tanh form                        arXiv 1606.08415
    bias_dropout_add     6 + 4     residual + dropout(x + b), mask recomputed    dropout.py
    causal_softmax       3 + 4     softmax(scale x + causal mask); half is read
    cross_entropy        2 + 4     log Σ exp z - z_target, gradient in place     arXiv 1805.02867
    permute              6 + 6     copies of tokens, sorted by expert, k = 2     moe.py
    unpermute            3 + 5     back: times probabilities, summed, k = 2      moe.py
    adamw                20        all parameters, bf16 moments, split master    optimizer.py

The CUDA sources are in csrc/: read common.cuh, then swiglu.cu, norms.cu, cross_entropy.cu. Here an
operation is a function that checks its arguments, allocates its outputs and launches its kernel.
With meta tensors nothing is launched, so the same function tells torch.compile the shapes. Matrix
multiplications stay with cuBLAS, attention with scaled_dot_product_attention.

How a memory-bound kernel comes near the limit: instructions that move vectors of 16 bytes; several
loads in flight before the first is used; neighbouring threads at neighbouring addresses; sums in
registers and shuffles; each element read once. Comments in the CUDA sources say where each of these
is decided; comparisons/kernels.py measures how near each kernel comes.

On CPUs, in float64, for empty tensors, and for rows that are not whole vectors or too long, the
functions below compute with PyTorch's own operations, those of gpt.py and moe.py. (Not adamw, which
then raises RuntimeError.) `apply(model, device, dtype)` puts them into a finished model from
outside. It changes the class of a module (nn.RMSNorm becomes RMSNorm below), so names, parameters
and the work of other techniques stay. Hooks on the norms of a block do not run: the block computes
them.

Not covered, and found in Transformer Engine, Apex and Liger: casts to FP8 (fp8.py uses PyTorch's);
norms fused with the matrix multiplication behind them; kernels tuned for each card and size.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("kernels")

import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import moe
import tensor_parallel
from attention.rotary import rotate
from base import compiling, cuda_kernels
from base import cross_entropy as plain
from base.cuda_kernels import (
    LONGEST,
    check,
    empty,
    gradient,
    launch,
    per_row,
    query,
    rows,
    supported,
    supported_rows,
    vector_elements,
    why_not,
)
from dropout import dropout_mask

LIBRARY = torch.library.Library("kernels", "DEF")
operation = functools.partial(cuda_kernels.operation, LIBRARY)
of_rows = functools.partial(cuda_kernels.of_rows, LIBRARY)

# --- norms ----------------------------------------------------------------------------------------


@operation(
    "norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def norm_forward(x, residual, weight, bias, eps):
    """-> z = x + residual (empty without a residual); y, its LayerNorm, or without a bias its
    RMSNorm; mean (empty for RMSNorm) and rstd, [..] float32"""
    h = x.shape[-1:]
    check("norm", x, residual=(residual, x.shape), weight=(weight, h), bias=(bias, h))
    z = empty(x, 0) if residual is None else empty(x)
    mean = empty(x, 0) if bias is None else per_row(x)
    outputs = z, empty(x), mean, per_row(x)
    return launch("norm_forward", x, (x, residual, weight, bias), outputs, rows(x), *h, eps)


@operation(
    "norm_backward(Tensor dy, Tensor? dz, Tensor z, Tensor weight, Tensor mean, Tensor rstd,"
    " bool weights) -> (Tensor, Tensor)"
)
def norm_backward(dy, dz, z, weight, mean, rstd, weights):
    """dz: the gradient of z that comes from elsewhere, or None. -> the gradient of z; with
    `weights` those of weight and bias, [1 or 2, h]"""
    h = z.shape[-1]
    with_mean = mean.numel() > 0
    blocks = query("norm_blocks", z, rows(z), h, with_mean)
    dweights, parts = summed_over_rows(z, weights, 1 + with_mean, blocks)
    outputs = empty(z), dweights
    sizes = rows(z), h, with_mean, blocks
    return launch("norm_backward", z, (dy, dz, z, weight, mean, rstd), outputs, parts, *sizes)


def summed_over_rows(
    t: Tensor, wanted: bool, sums: int, blocks: int
) -> tuple[Tensor, Tensor | None]:
    """For some sums over the rows of t [.., h]: (their result [sums, h], the partial sums of blocks
    [sums, blocks, h])."""
    if not wanted:
        return empty(t, 0), None
    h = t.shape[-1]
    return empty(t, sums, h), empty(t, sums, blocks, h, dtype=torch.float32)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        z, y, mean, rstd = norm_forward(x, residual, weight, bias, eps)
        z = x if residual is None else z
        ctx.save_for_backward(z, weight, mean, rstd)
        ctx.set_materialize_grads(False)
        # a view: autograd does not let an input be an output
        return z.view_as(z), y

    @staticmethod
    @once_differentiable
    def backward(ctx, dz, dy):
        _, residual, weight, bias, _ = ctx.needs_input_grad
        dw = db = None
        # Without dy nobody used the norm.
        if dy is not None:
            dz, dweights = norm_backward(dy, dz, *ctx.saved_tensors, weight or bias)
            dw = dweights[0] if weight else None
            db = dweights[1] if bias else None
        return dz, dz if residual else None, dw, db, None


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float):
    """(z, its norm), z = x + residual: a LayerNorm, or without a bias an RMSNorm.

    x, residual: [.., h]; without a residual z is x. In backward the gradient that reaches z beside
    the norm is added in the same pass.
    """
    if supported_rows(x, LONGEST) and weight is not None:
        return _Norm.apply(x, residual, weight, bias, eps)
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


def aligned_heads(t: Tensor) -> Tensor:
    """t [b, a, s, d] with any strides, if each head begins at a multiple of 16 bytes; else a copy
    of which that is true."""
    begins = t.storage_offset(), *t.stride()[:3]
    in_vectors = t.stride(-1) == 1 and not any(n % vector_elements(t) for n in begins)
    return t if in_vectors else t.clone(memory_format=torch.contiguous_format)


@operation("rotary(Tensor q, Tensor k, Tensor cosine, Tensor sine, float sign) -> (Tensor, Tensor)")
def rotary_forward(q, k, cosine, sine, sign):
    """sign: 1, or -1 to rotate back, which is the gradient -> q and k rotated, which lie in memory
    as [b, s, a, d], like a projection's outputs"""
    b, a, s, d = q.shape
    table = dict(cosine=(cosine, (s, d)), sine=(sine, (s, d)))
    check("rotary", q, k=(k, (b, k.shape[1], s, d)), **table)
    outputs = tuple(empty(t, b, s, t.shape[1], d).transpose(1, 2) for t in (q, k))
    q, k = aligned_heads(q), aligned_heads(k)
    sizes = *q.stride()[:3], *k.stride()[:3], b, a, k.shape[1], s, d
    # q and k are not made dense
    return launch("rotary", q, (cosine, sine), outputs, q, k, *sizes, sign)


@gradient(rotary_forward, keep=(2, 3))
def _(ctx, dq, dk):
    return *rotary_forward(dq, dk, *ctx.saved_tensors, -1.0), None, None, None


def rotary(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """attention.rotary.rotate of queries and keys together (arXiv 2104.09864, eq. 34).

    q: [b, a, s, d]; k: [b, a_kv, s, d], both of any strides; cosine, sine: [s, d] of
    rotary_table -> the shapes of q and k
    """
    is_small = q.numel() + k.numel() < 2**31
    whole_vectors = q.shape[-1] % (2 * vector_elements(q)) == 0
    if not (supported(q) and supported(k) and is_small and whole_vectors):
        return rotate(q, (cosine, sine)), rotate(k, (cosine, sine))
    return rotary_forward(q, k, cosine, sine, 1.0)


# --- SwiGLU ---------------------------------------------------------------------------------------


swiglu_forward = of_rows("swiglu(Tensor gate, Tensor up) -> Tensor")
swiglu_backward = of_rows("swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)")


@gradient(swiglu_forward, keep=(0, 1))
def _(ctx, dy):
    return swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up (arXiv 2002.05202, eq. 6). gate, up: one shape, any -> the same shape"""
    if not supported(gate) or gate.numel() % vector_elements(gate):
        return F.silu(gate) * up
    check("swiglu", gate, up=(up, gate.shape))
    return swiglu_forward(gate, up)


# --- bias + GELU, bias + dropout + residual -------------------------------------------------------


bias_gelu_forward = of_rows("bias_gelu(Tensor x, Tensor? bias) -> Tensor")


@operation("bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool wanted) -> (Tensor, Tensor)")
def bias_gelu_backward(dy, x, bias, wanted):
    """-> dx [.., h]; if it is wanted dbias [1, h]"""
    sizes = rows(x), x.shape[-1]
    d_bias, parts = summed_over_rows(x, wanted, 1, query("bias_gelu_parts", x, *sizes))
    return launch("bias_gelu_backward", x, (dy, x, bias), (empty(x), d_bias), parts, *sizes)


@gradient(bias_gelu_forward, keep=(0, 1))
def _(ctx, dy):
    wanted = ctx.needs_input_grad[1]
    dx, d_bias = bias_gelu_backward(dy, *ctx.saved_tensors, wanted)
    return dx, d_bias[0] if wanted else None


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias) in the tanh form (arXiv 1606.08415, section 2).

    x: [.., h]; bias: [h] or None -> [.., h]
    """
    if not supported_rows(x):
        return F.gelu(x if bias is None else x + bias, approximate="tanh")
    check("bias_gelu", x, bias=(bias, x.shape[-1:]))
    return bias_gelu_forward(x, bias)


bias_dropout_add_forward = of_rows(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, Tensor? key,"
    " int s, int start, int site, int limit, float scale) -> Tensor"
)


@operation(
    "bias_dropout_add_backward(Tensor dy, Tensor key, int s, int start, int site, int limit,"
    " float scale, bool bias) -> (Tensor, Tensor)"
)
def bias_dropout_add_backward(dy, key, s, start, site, limit, scale, bias):
    """-> dx [b, s, h]; dbias [1, h], empty without a bias"""
    sizes = rows(dy), dy.shape[-1]
    d_bias, parts = summed_over_rows(dy, bias, 1, query("bias_dropout_add_parts", dy, *sizes))
    sizes = *sizes, s, start, site, limit, scale
    return launch("bias_dropout_add_backward", dy, (dy, key), (empty(dy), d_bias), parts, *sizes)


@gradient(bias_dropout_add_forward, keep=(3,))
def _(ctx, dy):
    (key,) = ctx.saved_tensors
    bias = ctx.needs_input_grad[1]
    if key is None:
        # Nothing was dropped: dx is dy itself.
        dx, d_bias = dy, dy.reshape(1, -1, dy.shape[-1]).sum(1) if bias else None
    else:
        dx, d_bias = bias_dropout_add_backward(dy, key, *ctx.numbers, bias)
    return dx, d_bias[0] if bias else None, dy, *[None] * 6


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    key: Tensor | None,
    site: int,
    start: int,
    p: float,
) -> Tensor:
    """residual + dropout(x + bias), with the mask of dropout.dropout_mask.

    x, residual: [b, s, h]; bias: [h] or None; key: [b] from dropout.layer_key, None for no dropout;
    site: which dropout of a layer; start: global number of the first position
    -> [b, s, h]
    """
    key = key if p else None
    if not 0 <= p < 1:
        raise ValueError(f"bias_dropout_add: p is {p}, expected at least 0 and below 1")
    if key is not None and x.dim() != 3:
        shape = f"x has shape {list(x.shape)}, expected [b, s, h], whose coordinates are hashed"
        raise ValueError(f"bias_dropout_add: {shape}")
    if supported_rows(x):
        of_key = key, x.shape[:1], torch.int32
        shapes = dict(bias=(bias, x.shape[-1:]), residual=(residual, x.shape), key=of_key)
        check("bias_dropout_add", x, **shapes)
        s = 1 if key is None else x.shape[1]
        limit = min(round(p * 2**32), 2**32 - 1)
        tensors = x, bias, residual, key
        return bias_dropout_add_forward(*tensors, s, start, site, limit, 1 / (1 - p))
    y = x if bias is None else x + bias
    if key is not None:
        dropped = dropout_mask(key, site, x.shape, {1: start}, p)
        y = y.masked_fill(dropped, 0.0) * (1 / (1 - p))
    return residual + y


# --- causal softmax -------------------------------------------------------------------------------


causal_softmax_forward = of_rows("causal_softmax(Tensor scores, float scale) -> Tensor")
causal_softmax_backward = of_rows(
    "causal_softmax_backward(Tensor dp, Tensor p, float scale) -> Tensor"
)


@gradient(causal_softmax_forward, keep_output=True)
def _(ctx, dp):
    return causal_softmax_backward(dp, *ctx.saved_tensors, *ctx.numbers), None


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """softmax(scale scores), in which row i attends to columns 0 .. i.

    scores: [.., s, s] -> [.., s, s], 0 above the diagonal
    """
    if scores.dim() < 2 or scores.shape[-1] != scores.shape[-2]:
        shape = list(scores.shape)
        raise ValueError(f"causal_softmax: scores has shape {shape}, expected [.., s, s]")
    if not supported_rows(scores, LONGEST):
        above = torch.full_like(scores, -math.inf).triu(1)
        return (scores * scale + above).softmax(-1)
    return causal_softmax_forward(scores, scale)


# --- cross entropy --------------------------------------------------------------------------------


# The target of a row whose token is in another rank's columns, as in the CUDA source.
ELSEWHERE = -(2**62)


@operation(
    "cross_entropy_statistics(Tensor logits, Tensor targets, int valid) -> (Tensor, Tensor, Tensor)"
)
def cross_entropy_statistics(logits, targets, valid):
    """logits: [.., V], of which the first `valid` columns count; targets: [..] int64, or ELSEWHERE
    -> largest, total = Σ exp(z - largest), target_logit (0 for ELSEWHERE), each [..] float32"""
    check("cross_entropy", logits, targets=(targets, logits.shape[:-1], torch.int64))
    outputs = per_row(logits), per_row(logits), per_row(logits)
    sizes = rows(logits), logits.shape[-1], valid
    return launch("cross_entropy_statistics", logits, (logits, targets), outputs, *sizes)


@operation(
    "cross_entropy_gradient(Tensor(a!) logits, Tensor targets, Tensor largest, Tensor total,"
    " Tensor grad, int valid) -> ()"
)
def cross_entropy_gradient(logits, targets, largest, total, grad, valid):
    """Overwrites logits with their gradient, grad (exp(z - largest) / total - onehot(target)), and
    with 0 beyond the valid columns. largest, total: [..], of the whole row; grad: [..], float32"""
    if not logits.is_contiguous():
        raise ValueError("cross_entropy_gradient: logits are not contiguous, and are overwritten")
    sizes = rows(logits), logits.shape[-1], valid
    inputs = targets, largest, total, grad
    launch("cross_entropy_gradient", logits, inputs, logits, *sizes)
    if logits.device.type != "meta":
        torch.autograd.graph.increment_version(logits)


class _CrossEntropy(torch.autograd.Function):
    """logits are whole rows if `group` is None. With a group they are this rank's columns, and the
    statistics are all-reduced."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, group):
        n = logits.shape[-1]
        local, valid = targets, n
        if group is not None:
            local, elsewhere = tensor_parallel.local_ids(targets, n, vocab_size, group)
            local = local.masked_fill(elsewhere & (local >= 0), ELSEWHERE)
            valid = min(n, max(0, vocab_size - group.rank() * n))
        largest, total, target_logit = cross_entropy_statistics(logits, local, valid)
        if group is not None:
            of_all = largest.clone()
            dist.all_reduce(of_all, dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * (largest - of_all).exp(), target_logit))
            dist.all_reduce(sums, group=group)
            largest = of_all
            total, target_logit = sums
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


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """log Σ exp z - z_target of each row, in float32.

    logits: [.., V]; targets: [..] int64 -> [..]. Backward **overwrites** the logits with their
    gradient, so it can run only once.
    """
    if not supported(logits):
        return plain.cross_entropy(logits, targets)
    return _CrossEntropy.apply(logits.contiguous(), targets, logits.shape[-1], None)


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


@operation("permute(Tensor x, Tensor order, Tensor position) -> Tensor")
def permute_forward(x, order, position):
    """x: [n, h]; order: [m], assignments; assignment a belongs to token a % n; position, for the
    gradient: [k, n] -> [m, h]"""
    of_token = position.shape[:1] + x.shape[:1]
    of_order = order, (order.numel(),), torch.int64
    check("permute", x, order=of_order, position=(position, of_token, torch.int64))
    y = empty(x, len(order), x.shape[1])
    return launch("permute", x, (x, order), y, len(order), *x.shape)


@operation(
    "unpermute(Tensor rows, Tensor position, Tensor? probabilities, Tensor? order) -> Tensor"
)
def unpermute_forward(rows, position, probabilities, order):
    """rows: [m, h]; position: [k, n], the row of each token's choices, m where it was dropped;
    probabilities: [n, k] float32, or None for 1; order, for the gradient: [m] -> [n, h]"""
    k, n = position.shape
    check(
        "unpermute",
        rows,
        probabilities=(probabilities, (n, k), torch.float32),
        position=(position, (k, n), torch.int64),
        order=(order, rows.shape[:1], torch.int64),
    )
    m, h = rows.shape
    return launch("unpermute", rows, (rows, position, probabilities), empty(rows, n, h), m, n, k, h)


@operation(
    "unpermute_backward(Tensor dy, Tensor rows, Tensor order, Tensor probabilities)"
    " -> (Tensor, Tensor)"
)
def unpermute_backward(dy, rows, order, probabilities):
    """dy: [n, h]; rows: [m, h]; order: [m]; probabilities: [n, k] -> drows [m, h]; dprobabilities
    [n, k], 0 for dropped choices"""
    outputs = empty(rows), empty(probabilities).zero_()
    sizes = len(rows), *probabilities.shape, rows.shape[1]
    inputs = dy, rows, order, probabilities
    return launch("unpermute_backward", rows, inputs, outputs, *sizes)


@gradient(permute_forward, keep=(2,))
def _(ctx, dy):
    # the gradient of permute is unpermute without probabilities
    return unpermute_forward(dy, *ctx.saved_tensors, None, None), None, None


@gradient(unpermute_forward, keep=(0, 2, 3))
def _(ctx, dy):
    rows, probabilities, order = ctx.saved_tensors
    d_rows, d_probabilities = unpermute_backward(dy, rows, order, probabilities)
    return d_rows, None, d_probabilities, None


def permute(x: Tensor, order: Tensor, position: Tensor) -> Tensor:
    """Copies of the tokens in the order of the assignments (moe.DispatchPlan).

    x: [n, h]; order: [m]; position: [k, n], the inverse of order -> [m, h]
    """
    if not supported_rows(x) or not len(order):
        return moe.permute(x, order, position)
    return permute_forward(x, order, position)


def unpermute(rows: Tensor, probabilities: Tensor, position: Tensor, order: Tensor) -> Tensor:
    """The sum of each token's rows times their router probabilities, the way back from `permute`.

    rows: [m, h]; probabilities: [n, k] float32; position: [k, n]; order: [m] -> [n, h]
    """
    if not supported_rows(rows):
        return moe.unpermute(rows, probabilities, position, order)
    return unpermute_forward(rows, position, probabilities, order)


# --- AdamW ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def on_device(numbers: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers, which is copied when they change, and without waiting for the copy. For
    one stream of a device, and not while a CUDA graph is captured."""
    t = torch.tensor(numbers, dtype=dtype)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


@operation(
    "adamw(Tensor(a!)[] weights, Tensor(b!)[] lows, Tensor(c!)[] masters, Tensor[] gradients,"
    " Tensor(d!)[] exp_avgs, Tensor(e!)[] exp_avg_sqs, float[] decays, Tensor control,"
    " float lr, float beta1, float beta2, float eps) -> ()"
)
def adamw_update(
    weights, lows, masters, gradients, exp_avgs, exp_avg_sqs, decays, control, lr, beta1, beta2, eps
):
    """As `adamw`; lists of None are empty here."""
    w = weights[0]
    nones = [None] * len(weights)
    state = torch.float32 if masters else torch.bfloat16
    gradients = [g.contiguous() for g in gradients]
    kinds = dict(
        weight=(weights, w.dtype),
        low=(lows or nones, torch.int16),
        master=(masters or nones, torch.float32),
        gradient=(gradients, torch.float32),
        exp_avg=(exp_avgs, state),
        exp_avg_sq=(exp_avg_sqs, state),
    )
    for name, (tensors, dtype) in kinds.items():
        for t, weight in zip(tensors, weights):
            check("adamw", w, **{name: (t, weight.shape, dtype)})
            if t is not None and not t.is_contiguous():
                raise ValueError(f"adamw: {name} is not contiguous, and it is changed in place")
    check("adamw", w, control=(control, (3,), torch.float32))
    if len(decays) != len(weights) or bool(lows) != (w.dtype == torch.bfloat16 and not masters):
        raise ValueError("adamw: lows or decays do not belong to these weights; see kernels.adamw")
    if w.device.type == "meta":
        return
    table = []
    blocks = 0
    for of_parameter in zip(*(tensors for tensors, _ in kinds.values())):
        n = of_parameter[0].numel()
        table += [0 if t is None else t.data_ptr() for t in of_parameter]
        table += [n, blocks]
        blocks += -(-n // query("adamw_elements", w))
    if blocks:
        tables = on_device(tuple(table), torch.int64, w.device)
        decays = on_device(tuple(decays), torch.float32, w.device)
        sizes = len(weights), blocks, bool(masters)
        options = lr, beta1, beta2, eps, math.log(beta1), math.log(beta2)
        launch("adamw", w, (tables, decays, control), (), *sizes, *options)
    for t in (*weights, *lows, *masters, *exp_avgs, *exp_avg_sqs):
        torch.autograd.graph.increment_version(t)


def adamw(
    weights, lows, masters, gradients, exp_avgs, exp_avg_sqs, decays, control, lr, beta1, beta2, eps
):
    """optimizer.AdamW's update of many parameters of one kind, in place, in one launch and one pass
    over their bytes (arXiv 1711.05101, algorithm 2).

    weight      low      master     exp_avg, exp_avg_sq
    bf16        int16    None       bf16                   the master is split into weight and low
    float32     None     None       bf16                   the weight is the master
    16 bits     None     float32    float32                the master is beside the weight

    Lists of these, of gradients in float32 and of weight decays, one for each parameter; control:
    float32 [3] on the device: a factor of the gradients, the number of this update from 1 on, 0 to
    skip it. Raises ValueError.
    """
    if not weights:
        return
    lows, masters = ([t for t in tensors if t is not None] for tensors in (lows, masters))
    lists = weights, lows, masters, gradients, exp_avgs, exp_avg_sqs, decays
    adamw_update(*lists, control, lr, beta1, beta2, eps)


# --- in a model -----------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def of_norm(norm: nn.Module) -> tuple:
    """weight, bias and ε of a norm that the operations compute."""
    return norm.weight, getattr(norm, "bias", None), norm.eps


class Block(gpt.Block):
    """gpt.Block, whose norms also pass on the residual, so that in backward the gradients of both
    are added in one pass. Without dropout and bias they add the residual too."""

    def forward(self, x: Tensor, context: gpt.Context = gpt.PLAIN) -> Tensor:
        norms = self.attention_norm, self.mlp_norm
        if not all(isinstance(norm, RMSNorm | LayerNorm) for norm in norms):
            return super().forward(x, context)
        x, y = add_norm(x, None, *of_norm(self.attention_norm))
        y = self.attention(y, context)
        bias = self.attention.output.bias
        if only_adds(self.attention_residual, bias, context.drop_key):
            x, y = add_norm(y, x, *of_norm(self.mlp_norm))
        else:
            x = self.attention_residual(y, bias, x, context.drop_key)
            x, y = add_norm(x, None, *of_norm(self.mlp_norm))
        y = self.mlp(y)
        return self.mlp_residual(y, self.mlp.down.bias, x, context.drop_key)


class Rotary(gpt.Rotary):
    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        # While decoding, and with documents, each row has its own positions and so its own table.
        return rotary(q, k, *table) if table[0].dim() == 2 else super().forward(q, k, table)


class SwiGLU(gpt.SwiGLU):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)


class GELU(gpt.GELU):
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return bias_gelu(x, bias)


def only_adds(module: gpt.BiasDropoutAdd, bias: Tensor | None, drop_key: Tensor | None) -> bool:
    """Whether nothing is left of the module but residual + x."""
    return bias is None and (drop_key is None or module.dropout.p == 0)


class BiasDropoutAdd(gpt.BiasDropoutAdd):
    def forward(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, drop_key: Tensor | None
    ) -> Tensor:
        if only_adds(self, bias, drop_key):
            # PyTorch does this in one pass already.
            return residual + x
        if self.dropout.coordinates:
            # the operation knows a range of positions alone
            return super().forward(x, bias, residual, drop_key)
        start = self.dropout.shard_index.get(1, 0) * x.shape[1]
        mask = self.dropout.site, start, self.dropout.p
        return bias_dropout_add(x, bias, residual, drop_key, *mask)


class CausalProbabilities(gpt.CausalProbabilities):
    def forward(self, q: Tensor, k: Tensor, documents: Tensor | None) -> Tensor:
        if documents is not None:
            # the operation knows the causal mask alone
            return super().forward(q, k, documents)
        return causal_softmax(q @ k.transpose(2, 3), q.shape[-1] ** -0.5)


class Head(gpt.Head):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets)


class VocabParallelHead(tensor_parallel.VocabParallelHead):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.group)


class MoE(moe.MoE):
    permute = staticmethod(permute)
    unpermute = staticmethod(unpermute)


FUSED = {
    nn.RMSNorm: RMSNorm,
    nn.LayerNorm: LayerNorm,
    gpt.Block: Block,
    gpt.Rotary: Rotary,
    gpt.SwiGLU: SwiGLU,
    gpt.GELU: GELU,
    gpt.BiasDropoutAdd: BiasDropoutAdd,
    gpt.CausalProbabilities: CausalProbabilities,
    gpt.Head: Head,
    tensor_parallel.VocabParallelHead: VocabParallelHead,
    moe.MoE: MoE,
}


def swap(model: nn.Module) -> None:
    """Make the modules of a model compute with the operations above, on any device.

    To be called after tensor_parallel.apply and whatever else replaces modules, and before what
    wraps the forward of a block. The operations need arguments of one dtype, so the model does not
    run under autocast afterwards.
    """
    for module in model.modules():
        if isinstance(module, nn.RMSNorm | nn.LayerNorm) and (
            len(module.normalized_shape) > 1
            or module.weight is None
            or module.eps is None
            or (isinstance(module, nn.LayerNorm) and module.bias is None)
        ):
            # Not a norm that the operations compute.
            continue
        module.__class__ = FUSED.get(type(module), type(module))


def apply(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """`swap` if the kernels of this dtype run on this device. Returns None, or why they do not: the
    model is unchanged then."""
    refused = why_not(dtype) if device.type == "cuda" else "no CUDA device"
    if refused:
        return refused
    swap(model)
    return None
