"""FP8 training: matrix multiplications of 8-bit numbers (arXiv 2209.05433). GPUs from compute
capability 8.9 on run them at up to twice the FLOP/s of 16 bits.

base/float8.py has the formats e4m3 and e5m2, and a scale that maps the largest value of a tensor to
the largest number of its format. A linear layer has three products, and both operands of each are
rounded to bytes. Sums are in float32; results have the type of x.

    forward            y  = x Wᵀ        e4m3 e4m3
    input gradient     ∂x = ∂y W        e5m2 e4m3      gradients need more powers of two, but not
    weight gradient    ∂W = ∂yᵀ x       e5m2 e4m3      within a block: there all is in e4m3

A scale comes from the maximum of a tensor, by one of three recipes (next section). Without blocks
it is that of the whole tensor, over all tensor-parallel and context-parallel ranks that hold parts:

    column-parallel    x is whole        W, ∂y are parts
    row-parallel       x, W are parts    ∂y is whole
    context-parallel   W is whole        x, ∂y are parts

    python -m course.fp8       the three products, which bytes they read, two ranks beside one

`apply` gives the matrices of attention and MLP these products. The first and the last layer, norms,
softmax, embedding, head and routers stay in the precision of the run. Weights and their gradients
are stored as without FP8. Experts have other scales (last section).

A weight is rounded to bytes once in a step (with ZeRO stage 3, by default, for each product). They
are kept until the next update, on GPUs by rows and by columns: 2 bytes per parameter. Backward
keeps the bytes of x, half the memory of 16 bits. Under sequence parallelism it keeps this rank's
shard of x instead, as without FP8. Recomputing a layer gives the same bytes. A scale of x or ∂y
belongs to one micro-batch, so layouts with the same micro-batch size give equal results.

Not covered (Transformer Engine or torchao have the first five): all-gathers of bytes; casts fused
with the operation before; a margin above the maximum; a history of micro-batches; ∂W of experts;
key and value of latent attention, which decoding absorbs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import moe
import sequence_parallel
import tensor_parallel
from base import compiling, fp8_cast
from base.float8 import (
    E4M3,
    E5M2,
    Format,
    Quantised,
    block_maxima,
    in_both_layouts,
    product_dtype,
    quantise,
    scale_of,
)
from base.grouped_linear import grouped_linear, grouped_weight_gradient
from base.model_config import LINEARS, FieldError, GPTConfig, divisors
from sequence_parallel import GatherSequence, start_nothing

# === scaling ======================================================================================
#
# Each operand of a matrix multiplication in FP8 has a scale: the largest number of its format,
# divided by a maximum called amax (base/float8.py). Three recipes say which maximum:
#
#     current    the present maximum of this tensor. The tensor is read once more, unless the kernel
#                that made it has noted its maximum. Tensor-parallel ranks that hold parts of it
#                take the largest of their maxima, in a small all-reduce
#     delayed    the maximum of this tensor in the last 16 steps, known beforehand (Transformer
#                Engine's first recipe). Larger values saturate. The first step uses `current`
#     block      one for each 1 x 128 values of activations and of gradients, and each 128 x 128 of
#                weights, so that a large value affects only its own block (DeepSeek-V3, arXiv
#                2412.19437, section 3.3.2). The 128 lie in the dimension that the product sums
#                over. The range within a block is short, so gradients too are in e4m3. No block
#                lies on two ranks, so there is no all-reduce
#
# `Scaling` has the maxima of all tensors of a model, in one table. After a step, `end_step` takes
# the largest over all ranks, in one small all-reduce, for the history and the log. It also drops
# the bytes of weights, because the optimizer has changed the weights.
#
# NaN and infinity make the scale NaN, and so the product and all that follows, up to the norm of
# the gradients. So the step is skipped (optimizer.py). The log names such tensors, the first one
# first, and the history leaves out this step.
#
# If a tensor's whole history is zero, its present maximum is used. Ranks that hold parts of it do
# not exchange that one: each takes the maximum of its part.

# --- recipes --------------------------------------------------------------------------------------

# The operands of a linear layer's products: x, W and ∂y.
INPUT, WEIGHT, GRADIENT = range(3)
OPERANDS = ("input", "weight", "gradient")


@dataclass(frozen=True)
class Recipe:
    """scaling: current, delayed or block. power_of_two: whether scales are rounded down to powers
    of two. block: the size of blocks, 128 on GPUs. history: the number of steps for `delayed`."""

    scaling: str = "current"
    power_of_two: bool = True
    block: int = 128
    history: int = 16

    def format(self, operand: int) -> Format:
        """The format of an operand. e4m3 has finer steps, e5m2 the range that the gradients of a
        whole tensor need."""
        return E5M2 if operand == GRADIENT and self.scaling != "block" else E4M3


# --- scales ---------------------------------------------------------------------------------------


class Scaling:
    """The maxima of all FP8 tensors of a model, and the bytes of this rank's weights.

    amax: [L, matrices, operands] float32, the maxima of this step on this rank. history: [n, L,
    matrices, operands], those of all ranks in the last n steps, newest first. A tensor's place in
    these tables is (layer, matrix) and its operand.
    """

    def __init__(self, recipe: Recipe, num_layers: int, device, keep_bytes: bool = True):
        """keep_bytes: keep the bytes of weights for a step. False, for ZeRO stage 3, keeps only the
        scales (of experts not even these), and each product makes the bytes again."""
        self.recipe = recipe
        self.keep_bytes = keep_bytes
        # The context-parallel ranks, which have parts of each input and gradient.
        self.context_group: dist.ProcessGroup | None = None
        shape = num_layers, len(LINEARS), len(OPERANDS)
        self.amax = torch.zeros(shape, device=device)
        self.history = torch.zeros(0, *shape, device=device)
        self.of_history: tuple = None, None
        # Whether the kernels of fp8_cast.py are used where they can be.
        self.fused = False
        # {weight: (scale, or maximum of a kernel; (bytes for y, bytes for ∂x) or None)}; for
        # experts only the pair.
        self.weights: dict[nn.Parameter, tuple] = {}
        # False without gradients: neither an evaluation nor the first forward of recompute.py
        # records maxima of inputs.
        self.recording = True
        # [L, matrices]: True for matrices of experts. Their scales are current ones, of rows, in
        # every recipe.
        self.by_row = torch.zeros(shape[:2], dtype=torch.bool, device=device)
        # [2, L, matrices, operands]: amax of the last step over all ranks, then `saturated`.
        self.report = torch.zeros(2, *shape, device=device)

    def scales(self, tensors: list[Tensor], places, operand: int, group, block) -> list[Tensor]:
        """The scale of each tensor [M, K], or the scales of its blocks. Records the maxima.

        places: (layer, matrix) of each tensor. group: the tensor-parallel ranks that hold parts of
        these tensors, or None where each rank has them whole. block: (rows, columns), or None.
        """
        amaxes = []
        for x, place in zip(tensors, places):
            # NaN becomes infinity, which survives a maximum over ranks.
            amax = block_maxima(x, block).nan_to_num(torch.inf, torch.inf)
            self.record(amax, place, operand)
            amaxes.append(amax)
        if block is None and len(self.history):
            # The recipe is delayed, after the first step.
            pairs = zip(amaxes, places)
            amaxes = [self.amax_of_history(amax, place, operand) for amax, place in pairs]
        elif block is None:
            # The recipe is current, or this is the first step of delayed.
            amaxes = self.of_all_ranks(amaxes, operand, group)
        to = self.recipe.format(operand)
        return [scale_of(amax, to, self.recipe.power_of_two) for amax in amaxes]

    def of_all_ranks(self, amaxes: list[Tensor], operand: int, group) -> list[Tensor]:
        """The largest of the maxima of all ranks that hold parts: `group`, as in `scales`, and,
        unless it is a weight, the context-parallel ranks."""
        for ranks in (group, None if operand == WEIGHT else self.context_group):
            if ranks is not None:
                together = torch.stack(amaxes)
                dist.all_reduce(together, dist.ReduceOp.MAX, group=ranks)
                amaxes = list(together)
        return amaxes

    @property
    def known(self) -> Tensor:
        """The largest maxima of the history, [L, matrices, operands], computed once a step."""
        if self.of_history[0] is not self.history:
            self.of_history = self.history, self.history.amax(0)
        return self.of_history[1]

    def amax_of_history(self, now: Tensor, place, operand: int) -> Tensor:
        """The largest maximum of the last steps. now: the tensor's present maximum, used if the
        history has none; if it is infinite, so is the result."""
        known = self.known[*place, operand]
        known = torch.where(known > 0, known, now)
        return torch.where(now.isfinite(), known, torch.inf)

    def record(self, amax: Tensor, place, operand: int) -> None:
        """Record a tensor's maximum in this step. amax: one number, or one for each block or row;
        infinity for NaN."""
        if amax.numel() and (self.recording or operand != INPUT):
            seen = self.amax[*place, operand]
            largest = amax.amax() if amax.numel() > 1 else amax.reshape(())
            torch.maximum(seen, largest, out=seen)

    def quantise(self, tensors, places, operand: int, group, block) -> list[Quantised]:
        """Round matrices to bytes. Arguments as in `scales`; only the recipe `block` uses
        `block`."""
        recipe = self.recipe
        block = block if recipe.scaling == "block" else None
        scales = self.scales(tensors, places, operand, group, block)
        to = recipe.format(operand)
        return [quantise(x, s, to, block, recipe.power_of_two) for x, s in zip(tensors, scales)]

    def both(
        self, tensors, places, operand: int, group, wanted: tuple[bool, bool] = (True, True)
    ) -> list[tuple[Quantised | None, Quantised | None]]:
        """Round inputs or gradients [tokens, n] to bytes: (for sums over n, for sums over tokens).

        Blocks lie in the dimension that is summed over, so the two are rounded differently. Other
        recipes use the same bytes twice. wanted: which of the two are needed; the other may be
        None.
        """
        size = self.recipe.block
        if self.casts_in_kernels(tensors):
            return self.cast(tensors, places, operand, group, wanted)[0]
        if self.recipe.scaling != "block":
            once = self.quantise(tensors, places, operand, group, None)
            return list(zip(once, once))
        made = []
        for block, is_wanted in zip(((1, size), (size, 1)), wanted):
            if is_wanted:
                made.append(self.quantise(tensors, places, operand, group, block))
            else:
                made.append([None] * len(tensors))
        return list(zip(*made))

    def casts_in_kernels(self, tensors: list[Tensor]) -> bool:
        has_blocks = self.recipe.scaling == "block"
        return self.fused and not has_blocks and all(map(fp8_cast.supported, tensors))

    def cast(
        self, tensors: list[Tensor], places, operand: int, group, wanted, maxima=None
    ) -> tuple[list[tuple[Quantised | None, Quantised | None]], list[Tensor]]:
        """(`both` by kernels, the maxima), which are also recorded. maxima: [1] each, of tensors
        that were cast before; by default they are computed."""
        history = [None] * len(tensors)
        if len(self.history):
            history = [self.known[*place, operand].reshape(1) for place in places]
        if maxima is None:
            maxima = self.maxima(tensors, history)
            if not len(self.history):
                maxima = self.of_all_ranks(maxima, operand, group)
        # cuBLAS reads a scale at an address that 16 bytes divide.
        inverses = torch.zeros(len(tensors), 4, device=self.amax.device)[:, :1]
        options = self.recipe.format(operand), self.recipe.power_of_two, wanted
        pairs = []
        for x, place, amax, *scales in zip(tensors, places, maxima, inverses, history):
            pairs.append(fp8_cast.cast(x, amax, *scales, *options))
            self.record(amax, place, operand)
        return pairs, maxima

    def maxima(self, tensors: list[Tensor], history: list) -> list[Tensor]:
        """Each tensor's maximum here: noted on it, or by a kernel if not in the history."""
        found = [amax for x in tensors if (amax := fp8_cast.noted_maximum(x)) is not None]
        if len(found) < len(tensors):
            found = list(torch.zeros(len(tensors), device=self.amax.device).split(1))
            for x, amax, known in zip(tensors, found, history):
                fp8_cast.fp8_maximum(x, amax, known)
        return found

    def weight(
        self, w: nn.Parameter, place, group, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Quantised | None, Quantised | None]:
        """The bytes of a weight [out, in], (for y, for ∂x), made at its first use in a step;
        without `keep_bytes` at each use, by the scale of the first. wanted: as in `both`.

        On GPUs that multiply bytes the two are stored by rows and by columns: y sums over the
        columns of W, and ∂x over its rows.
        """
        scale, pair = self.weights.get(w, (None, None))
        if pair is not None:
            return pair
        if self.keep_bytes:
            wanted = True, True
        if self.casts_in_kernels([w]):
            (pair,), scale = self.cast([w.detach()], [place], WEIGHT, group, wanted, scale)
        else:
            scale, pair = self.weight_by_pytorch(w.detach(), place, group, scale)
        self.weights[w] = scale, (pair if self.keep_bytes else None)
        return pair

    def weight_by_pytorch(self, w: Tensor, place, group, scale: Tensor | None):
        """(scale, pair) of `weight`. scale: that of the first use, or None."""
        recipe = self.recipe
        block = (recipe.block, recipe.block) if recipe.scaling == "block" else None
        if scale is None:
            (scale,) = self.scales([w], [place], WEIGHT, group, block)
        q = quantise(w, scale, recipe.format(WEIGHT), block, recipe.power_of_two)
        # Bytes that are not kept are used once: their product copies them if necessary.
        return scale, (in_both_layouts(q) if self.keep_bytes else (q, q))

    @torch.no_grad()
    def end_step(self, group: dist.ProcessGroup | None = None, taken: Tensor | None = None) -> None:
        """After the optimizer's step: drop the bytes of old weights, and take the step's maxima
        over all ranks. group: all ranks, for one all-reduce; taken: whether the optimizer took the
        step, on the device, or None if it did."""
        self.weights.clear()
        self.report = torch.stack((self.amax, self.saturated()))
        self.amax.zero_()
        if group is not None:
            dist.all_reduce(self.report, dist.ReduceOp.MAX, group=group)
        amax = self.report[0]
        if self.recipe.scaling == "delayed":
            row = amax.nan_to_num(0.0, 0.0).unsqueeze(0)
            history = torch.cat((row, self.history))
            if taken is not None:
                # The maxima of a skipped step are infinite or very large: with them, the gradients
                # of 16 steps would round to zero.
                as_before = torch.cat((self.history, torch.zeros_like(row)))
                history = torch.where(taken, history, as_before)
            self.history = history[: self.recipe.history]

    def saturated(self) -> Tensor:
        """1 where this step's maximum is too large for its scale from the history, else 0."""
        too_large = torch.zeros_like(self.amax)
        if len(self.history):
            for operand in range(len(OPERANDS)):
                to = self.recipe.format(operand)
                known = self.known[..., operand]
                scaled = self.amax[..., operand] * scale_of(known, to, self.recipe.power_of_two)
                # NaN (infinity times 0) is not too large.
                too_large[..., operand] = (known > 0) & (scaled > to.largest)
        return too_large.masked_fill(self.by_row.unsqueeze(-1), 0)

    @staticmethod
    def warnings(report: Tensor) -> dict[str, list[str]]:
        """The names, for the log, of tensors that were not finite, and of those that saturated.
        report: `Scaling.report`, on the host.

        They are in the order of computation: weights, then inputs from the first layer on, then
        gradients from the last layer on. So the first name is where infinity or NaN began.
        """
        found = {"fp8_not_finite": [], "fp8_saturated": []}
        in_order = list(product(range(report.shape[1]), range(len(LINEARS))))
        places = [(place, operand) for operand in (WEIGHT, INPUT) for place in in_order]
        places += [(place, GRADIENT) for place in reversed(in_order)]
        for (number, matrix), operand in places:
            amax, saturated = report[:, number, matrix, operand].tolist()
            name = list(LINEARS)[matrix]
            name = f"blocks.{number}.{LINEARS[name]}.{name} {OPERANDS[operand]}"
            if not amax < float("inf"):
                found["fp8_not_finite"].append(name)
            elif saturated:
                found["fp8_saturated"].append(name)
        return {key: names for key, names in found.items() if names}

    def state_dict(self) -> dict:
        return {"history": self.history.tolist()}

    def load_state_dict(self, state: dict | None) -> None:
        """Restore the history; without one, start with none. Raises ValueError for the history of
        another model."""
        rows = state["history"] if state else []
        if self.recipe.scaling != "delayed" or not rows:
            return
        history = torch.tensor(rows, dtype=torch.float32, device=self.history.device)
        if history.shape[1:] != self.history.shape[1:]:
            here = list(self.history.shape[1:])
            raise ValueError(f"a row of the FP8 history is {list(history.shape[1:])}, not {here}")
        self.history = history[: self.recipe.history]


# === linear layers ================================================================================

# --- the three products of a linear layer ---------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Linear layers that read one input (query, key and value): the places of their scales, and
    how tensor parallelism shards them."""

    scaling: Scaling
    places: tuple[tuple[int, int], ...]  # (layer, matrix) of each weight
    # The ranks that hold parts of x, W and ∂y, or None where each rank has all of it.
    input_group: dist.ProcessGroup | None = None
    weight_group: dist.ProcessGroup | None = None
    gradient_group: dist.ProcessGroup | None = None
    # f of a column-parallel layer, over `group`, as in sequence_parallel.py.
    group: dist.ProcessGroup | None = None
    start_input: Callable = start_nothing
    start_input_grad: Callable = start_nothing

    def input_bytes(
        self, x: Tensor, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Quantised | None, Quantised | None]:
        """x [b, s, in] -> its bytes (for y, for ∂W), [b s, in]. All weights share them; their
        maximum has the place of the first weight. wanted: as in Scaling.both."""
        flat = fp8_cast.as_matrix(x)
        return self.scaling.both([flat], self.places[:1], INPUT, self.input_group, wanted)[0]

    def weight_bytes(
        self, i: int, w: nn.Parameter, wanted: tuple[bool, bool]
    ) -> tuple[Quantised | None, Quantised | None]:
        """The i-th weight in bytes, (for y, for ∂x): [out / t, in], or [out, in / t] of a
        row-parallel layer. wanted: as in Scaling.both."""
        return self.scaling.weight(w, self.places[i], self.weight_group, wanted)


class _Linear(torch.autograd.Function):
    """Y_i = X W_iᵀ + b_i for several W_i that read the same X: n weights, then n biases or None."""

    @staticmethod
    def forward(ctx, x, layer, n, *weights_and_biases):
        weights = weights_and_biases[:n]
        biases = weights_and_biases[n:]
        # ctx keeps the parameters themselves, not saved copies: pipeline_parallel.py writes to
        # them.
        ctx.layer, ctx.n, ctx.weights = layer, n, weights
        whole = layer.start_input(x, layer.group)()  # [b, s, in]
        # Sequence parallelism keeps the shard of x, and gathers x again in backward.
        ctx.gathers = whole is not x
        # Frozen weights do not need x, nor does a forward that is not recorded.
        learns = layer.scaling.recording and any(ctx.needs_input_grad[3 : 3 + n])
        for_y, for_dw = layer.input_bytes(whole, (True, learns and not ctx.gathers))
        if learns and ctx.gathers:
            ctx.save_for_backward(x)
        elif learns:
            # Autograd keeps the tensors, ctx the other fields.
            ctx.save_for_backward(for_dw.q, for_dw.inverse)
            ctx.for_dw = replace(for_dw, q=None, inverse=None)
        outputs = []
        for i, (w, bias) in enumerate(zip(weights, biases)):
            w_for_y, _ = layer.weight_bytes(i, w, (True, False))
            y = for_y @ w_for_y.t()  # [b s, out / t]
            y = y if bias is None else y + bias
            # The output must not be a view for autograd, because g overwrites it in place.
            outputs.append(torch.ops.aten._unsafe_view(y, (*whole.shape[:-1], y.shape[-1])))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        layer, n, weights = ctx.layer, ctx.n, ctx.weights
        weights_wanted = ctx.needs_input_grad[3 : 3 + n]
        biases_wanted = ctx.needs_input_grad[3 + n :]
        grads_output = [fp8_cast.as_matrix(grad) for grad in grads]  # [b s, out / t]
        # Ranks agree on maxima first: on GPUs this would queue behind the gather.
        wanted = True, any(weights_wanted)
        group = layer.gradient_group
        pairs = layer.scaling.both(grads_output, layer.places, GRADIENT, group, wanted)
        # Communication overlaps with the products, in the order of sequence_parallel.py.
        arriving = None
        if ctx.gathers and any(weights_wanted):
            arriving = layer.start_input(*ctx.saved_tensors, layer.group)
        dx = 0
        for i, (for_dx, _) in enumerate(pairs):
            _, w_for_dx = layer.weight_bytes(i, weights[i], (False, True))
            dx = dx + for_dx @ w_for_dx  # [b s, in]
        leaving = layer.start_input_grad(dx.view(*grads[0].shape[:-1], -1), layer.group)
        if arriving:
            _, x = layer.input_bytes(arriving(), (False, True))
        elif any(weights_wanted):
            q, inverse = ctx.saved_tensors
            x = replace(ctx.for_dw, q=q, inverse=inverse)
        d_weights = [None] * n
        d_biases = [None] * n
        for i, (_, for_dw) in enumerate(pairs):
            if weights_wanted[i]:
                d_weights[i] = sequence_parallel.weight_gradient(weights[i], for_dw, x)
            if biases_wanted[i]:
                d_biases[i] = grads_output[i].sum(0)
        return leaving(), None, None, *d_weights, *d_biases


@compiling.left_out
def linear(layer: Layer, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
    """x: [b, s, in], or a shard of it -> [b, s, out / t] for each weight [out / t, in]."""
    layer.scaling.recording = torch.is_grad_enabled()
    return _Linear.apply(x, layer, len(layer.places), *weights_and_biases)


class FP8Input(gpt.ProjectTogether):
    """Rounds the input of linear layers once for all. Replaces `project`, and communicates like it.

    project: gpt.ProjectTogether, or tensor_parallel.ColumnParallelInput. places: as in Layer.
    """

    def __init__(self, project: gpt.ProjectTogether, scaling: Scaling, places):
        super().__init__()
        self.project = project
        self.scaling = scaling
        self.places = places

    def gathers(self) -> bool:
        """Whether x arrives as a shard of the sequence."""
        return type(getattr(self.project, "enter", None)) is GatherSequence

    def forward(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        layer = Layer(self.scaling, self.places)
        p = self.project
        if isinstance(p, tensor_parallel.ColumnParallelInput):
            group = p.enter.group
            start_input, start_input_grad = sequence_parallel.STARTS[type(p.enter)]
            f = dict(group=group, start_input=start_input, start_input_grad=start_input_grad)
            # Each rank has its rows of W, that is, its columns of ∂y.
            layer = replace(layer, weight_group=group, gradient_group=group, **f)
        return list(linear(layer, x, *sequence_parallel.weights_and_biases(linears)))


def row_linear(layer: Layer, x: Tensor, weight: nn.Parameter) -> Tensor:
    """The product of RowParallelLinear, before its sum, and of FP8Linear.
    x: [b, s, in / t] -> [b, s, out]"""
    return linear(layer, x, weight, None)[0]


class FP8Linear(gpt.DeferredBiasLinear):
    """gpt.DeferredBiasLinear in FP8."""

    # (x, weight) -> y, as in tensor_parallel.RowParallelLinear.
    linear: Callable

    def __init__(self, plain: gpt.DeferredBiasLinear):
        """plain: the layer whose parameters it takes."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight)


# --- check and apply ------------------------------------------------------------------------------


def fp8_layers(num_layers: int, skip: int) -> range:
    """All but the first and the last `skip` layers."""
    return range(skip, num_layers - skip)


def check(config: GPTConfig, recipe: Recipe, skip: int, t: int = 1, cp: int = 1) -> None:
    """Raises FieldError if no layer is left, or if t or cp ranks would cut blocks."""
    L = config.num_layers
    if not fp8_layers(L, skip):
        rule = "first and last layers are not in FP8, and {num_layers} leaves no other"
        fits = f"0 to {(L - 1) // 2}" if L > 2 else 0
        raise FieldError("fp8_skip", skip, rule, fits, num_layers=L)
    if recipe.scaling != "block":
        return
    s, n = config.seq_length, 2 * cp * recipe.block
    if cp > 1 and s % n:
        rule = "must be divisible by twice {cp} times {fp8_block}: a block of tokens is on one rank"
        raise FieldError("seq_length", s, rule, max(n, s - s % n), cp=cp, fp8_block=recipe.block)
    sizes = dict(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads * config.head_dim,
        num_kv_heads=config.num_kv_heads * config.value_size,
    )
    # Experts have a scale for each row.
    if set(fp8_layers(L, skip)) - set(getattr(config, "expert_layers", ())):
        sizes["ffn_hidden_size"] = config.ffn_hidden_size
    for field, size in sizes.items():
        if t > 1 and size // t % recipe.block:
            n = size // t
            rule = f"blocks must not be cut: {{tp}} gives each rank {n} of {{{field}}}"
            fits = divisors(gcd(*(size // t for size in sizes.values())), recipe.block)
            values = {field: getattr(config, field)}
            raise FieldError("fp8_block", recipe.block, rule, fits, tp=t, **values)


def make(recipe: tuple, config: GPTConfig, device, keep_bytes: bool) -> Scaling:
    """The scales of a model. recipe: the fields of a Recipe; keep_bytes: as in Scaling."""
    # Cross attention (models/t5.py) counts as further layers, after all others.
    layers = config.num_layers * (1 + bool(config.cross_layers))
    return Scaling(Recipe(*recipe), layers, device, keep_bytes)


def apply(model: gpt.GPT, scaling: Scaling, skip: int = 1, cp_group=None) -> None:
    """Give attention and MLP of a model or pipeline stage FP8 matrix multiplications, in place.
    Parameters keep their names and their precision. cp_group: the context-parallel ranks, or None.

    Call it after tensor and sequence parallelism; before adapters, zero bubble and recomputation.
    """
    scaling.context_group = cp_group
    numbers = fp8_layers(model.config.num_layers, skip)
    for name, block in model.blocks.items():
        number = int(name)
        if number not in numbers:
            continue
        attention, mlp = block.attention, block.mlp
        columns = ("query",) if hasattr(attention, "project_kv") else ("query", "key", "value")
        in_fp8(attention, columns, "output", scaling, number)
        if cross := getattr(block, "cross_attention", None):
            of_cross = scaling, model.config.num_layers + number
            in_fp8(cross, ("query",), "output", *of_cross)
            in_fp8(cross, ("key", "value"), None, *of_cross, project="project_kv")
        if isinstance(mlp, gpt.MLP):
            columns = ("up",) if mlp.gate is None else ("gate", "up")
            in_fp8(mlp, columns, "down", scaling, number)
        else:
            apply_to_experts(mlp, scaling, number)
        if scaling.fused and scaling.recipe.scaling == "current":
            mark_casts(block)


def mark_casts(block: gpt.Block) -> None:
    """Ask the norms and SwiGLU, by `is_cast`, to note maxima for the casts after them (kernels.py).
    Not if their output is gathered before the cast, which would not read the note."""
    for norm, part in ((block.attention_norm, block.attention), (block.mlp_norm, block.mlp)):
        if isinstance(part, gpt.Attention | gpt.MLP):
            norm.is_cast = not part.project.gathers()
        if isinstance(part, gpt.MLP):
            part.activation.is_cast = True


def in_fp8(
    part: nn.Module,
    columns: tuple[str, ...],
    row: str | None,
    scaling: Scaling,
    number: int,
    project: str = "project",
) -> None:
    """Change attention or an MLP, `part` of layer `number`. columns: its matrices that tensor
    parallelism shards by columns, which `project` calls; row: the one that it shards by rows."""
    together = getattr(part, project)
    if isinstance(together, FP8Input):
        raise ValueError("this model is in FP8 already: call fp8.apply once")
    if type(together) is not gpt.ProjectTogether and not isinstance(
        together, tensor_parallel.ColumnParallelInput
    ):
        raise ValueError("this model has adapters: fp8.apply comes before adapter_layers.apply")
    names = list(LINEARS)
    places = tuple((number, names.index(name)) for name in columns)
    setattr(part, project, FP8Input(together, scaling, places))
    if row is None:
        return
    output = getattr(part, row)
    layer = Layer(scaling, ((number, names.index(row)),))
    if isinstance(output, tensor_parallel.RowParallelLinear):
        # Each rank has its part of x and its columns of W.
        layer = replace(layer, input_group=output.group, weight_group=output.group)
    else:
        output = FP8Linear(output)
        setattr(part, row, output)
    output.linear = partial(row_linear, layer)


# === experts ======================================================================================
#
# Experts in FP8 have one scale for each row: for each token, and for each output of a weight.
#
# An expert multiplies the tokens that chose it (moe.py). Under expert parallelism these come from
# the micro-batches of several ranks, so the maximum of this tensor would depend on the layout. The
# scale of a row does not:
#
#     y_ij  =  Σ_k q(x)_ik q(w)_jk / (scale_i scale_j)          x: [rows, in]; w: [out, in]
#
# The scales are factors of the sum, so they must not depend on k. Each product sums over another
# dimension, so a weight is in bytes twice:
#
#                                         with a scale each
#     forward            y  = x Wᵀ        rows of x; rows of W
#     input gradient     ∂x = ∂y W        rows of ∂y; columns of W
#     weight gradient    ∂W = ∂yᵀ x       over rows: not in FP8, so backward keeps x itself
#
# e4m3 is enough for gradients too: within a row the range is short. Every recipe gives experts
# these scales, from present maxima.
#
# Tensor-parallel ranks that hold parts of a row exchange their maxima: of x and of W in the second
# matrix (W_down), of ∂y and of the columns of W in the first ones (W_gate, W_up).
#
# On Hopper GPUs, in bf16, torch._scaled_grouped_mm multiplies the bytes of all experts. Its sums
# have fewer bits than float32 (`use_fast_accum`), as in torchao.


@dataclass(frozen=True)
class ExpertLayer:
    """Matrices of experts that read the same rows: their places in `Scaling`, and for operands
    whose rows are sharded the ranks that hold the parts, else None."""

    scaling: Scaling
    places: tuple[tuple[int, int], ...]
    input_group: dist.ProcessGroup | None
    gradient_group: dist.ProcessGroup | None

    def in_bytes(self, x: Tensor, place, operand: int, group) -> Quantised:
        """x: [rows, n] -> its bytes, with a scale for each row"""
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
        """(for y [E out, in], for ∂x [E in, out]) of a weight [E, out, in], made once in a step;
        without `keep_bytes` for each product, which needs one of them: the other is None."""
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
    (y,) = grouped_linear(x.values(wide), counts, w.values(wide).view(shape))
    return y.to(x.dtype)


def runs_in_fp8(x: Quantised, shape: tuple[int, int, int]) -> bool:
    """Whether torch._scaled_grouped_mm accepts x: Hopper, bf16 results, rows of a multiple of 16
    bytes. shape: of the weight, [E, N, K]."""
    # Without CUDA it is an AMD GPU, where e4m3 is another format.
    if not x.q.is_cuda or not torch.version.cuda:
        return False
    if x.dtype != torch.bfloat16 or not len(x.q):
        return False
    aligned = all(size % 16 == 0 for size in shape[1:])
    return aligned and torch.cuda.get_device_capability(x.q.device)[0] == 9


class _GroupedLinear(torch.autograd.Function):
    """Y_i = [X_e W_ieᵀ for each expert e], for several W_i that read the same rows."""

    @staticmethod
    def forward(ctx, x, counts, layer, *weights):
        # Frozen weights do not need x.
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
                d_weights[i] = grouped_weight_gradient(x, grad, counts, w)
        return dx, None, None, *d_weights


def multiply_in_fp8(
    layers: dict, rows: Tensor, counts: Tensor, *matrices: moe.ExpertLinear
) -> list[Tensor]:
    """moe.MoE.multiply in FP8. rows: [rows, in]; counts: [E] -> [rows, out] each"""
    layer = layers[matrices[0]]
    layer.scaling.recording = torch.is_grad_enabled()
    return list(_GroupedLinear.apply(rows, counts, layer, *(matrix.weight for matrix in matrices)))


def apply_to_experts(mlp: moe.MoE, scaling: Scaling, number: int) -> None:
    """Give the experts of layer `number` FP8 matrix multiplications, in place."""
    group = None
    if isinstance(mlp.enter, tensor_parallel.CopyToRanks):
        group = mlp.enter.group
    names = list(LINEARS)
    first = mlp.up if mlp.gate is None else mlp.gate
    of_first = ("up",) if mlp.gate is None else ("gate", "up")
    places = tuple((number, names.index(name)) for name in of_first)
    layers = {
        # Each rank has its rows of W, that is, its columns of y.
        first: ExpertLayer(scaling, places, input_group=None, gradient_group=group),
        # Each rank has its part of the rows of x.
        mlp.down: ExpertLayer(scaling, ((number, names.index("down")),), group, None),
    }
    mlp.multiply = partial(multiply_in_fp8, layers)
    for place in (*places, *layers[mlp.down].places):
        scaling.by_row[*place] = True
