"""FP8 training: matrix multiplications read bytes (arXiv 2209.05433). GPUs from compute capability
8.9 on have up to twice the FLOP/s of 16 bits for them.

float8.py has the numbers: e4m3 and e5m2, and a scale that brings the largest value of a tensor to
the largest number of its format. A linear layer has three products, and both operands of each are
rounded to bytes. Sums are in float32; results have the type of x.

    forward            y  = x Wᵀ        e4m3 e4m3
    input gradient     ∂x = ∂y W        e5m2 e4m3      gradients spread over more powers of two;
    weight gradient    ∂W = ∂yᵀ x       e5m2 e4m3      within a block they do not: all is in e4m3

fp8_scaling.py has the scales, by three recipes: from the maximum of a tensor now (current), from
those of the last steps (delayed), or one for each block of it (block). Without blocks a maximum is
that of the whole tensor. Where tensor-parallel ranks hold parts of it, it is the largest of theirs:

    column-parallel    x is whole        W, ∂y are parts
    row-parallel       x, W are parts    ∂y is whole

    python fp8.py       the three products, which bytes they read, two ranks beside one

`apply` gives the matrices of attention and MLP these products. The first and the last layer, norms,
softmax, embedding, head and routers stay in the precision of the run. Weights and their gradients
are stored as without FP8. Experts have a way of their own: precision/fp8_experts.py.

A weight becomes bytes once in a step (with ZeRO stage 3, by default, for each product). They are
kept beside it until the next update, on GPUs by rows and by columns: 2 bytes a parameter. Of x,
backward has the bytes: half the memory of 16 bits. But where sequence parallelism gathers x it has
this rank's shard, as without FP8. If a layer is recomputed, the same bytes come out. A scale of x
or ∂y is that of one micro-batch, so layouts are equal to one device with the same micro-batch size.

Not covered, and in Transformer Engine or torchao: all-gathers of bytes; casts fused with the
operation before.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("fp8")

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import overlap
import tensor_parallel
from base import compiling
from model_config import LINEARS, FieldError, GPTConfig, divisors
from overlap import start_nothing
from pipelines import zero_bubble
from precision import fp8_cast, fp8_experts
from precision.float8 import Quantised
from precision.fp8_scaling import GRADIENT, INPUT, Recipe, Scaling
from sequence_parallel import GatherSequence

# --- the three products of a linear layer ---------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Linear layers of a model's layer that read one input: where their scales are, and how tensor
    parallelism cuts them. (Of query, key and value there is one Layer.)"""

    scaling: Scaling
    # (layer, matrix) of each weight
    places: tuple[tuple[int, int], ...]
    # the ranks that hold parts of x, W and ∂y, or None where each rank has all of it
    input_group: dist.ProcessGroup | None = None
    weight_group: dist.ProcessGroup | None = None
    gradient_group: dist.ProcessGroup | None = None
    # f of a column-parallel layer, over `group`: as in overlap.py
    group: dist.ProcessGroup | None = None
    start_input: Callable = start_nothing
    start_input_grad: Callable = start_nothing

    def input_bytes(
        self, x: Tensor, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Quantised | None, Quantised | None]:
        """x [b, s, in] in bytes -> (for y, for ∂W), [b s, in]. All the weights share them; their
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
        # the parameters themselves, not saved copies: pipelines/zero_bubble.py writes to them
        ctx.layer, ctx.n, ctx.weights = layer, n, weights
        whole = layer.start_input(x, layer.group)()  # [b, s, in]
        # sequence parallelism keeps the shard of x, and gathers x again in backward
        ctx.gathers = whole is not x
        # frozen weights have no use for x, nor has a forward that is not recorded
        learns = layer.scaling.recording and any(ctx.needs_input_grad[3 : 3 + n])
        for_y, for_dw = layer.input_bytes(whole, (True, learns and not ctx.gathers))
        if learns and ctx.gathers:
            ctx.save_for_backward(x)
        elif learns:
            # autograd keeps the tensors, ctx the rest of the record
            ctx.save_for_backward(for_dw.q, for_dw.inverse)
            ctx.for_dw = replace(for_dw, q=None, inverse=None)
        outputs = []
        for i, (w, bias) in enumerate(zip(weights, biases)):
            w_for_y, _ = layer.weight_bytes(i, w, (True, False))
            y = for_y @ w_for_y.t()  # [b s, out / t]
            y = y if bias is None else y + bias
            # not a view for autograd, because g overwrites it in place
            outputs.append(torch.ops.aten._unsafe_view(y, (*whole.shape[:-1], y.shape[-1])))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        layer, n, weights = ctx.layer, ctx.n, ctx.weights
        weights_wanted = ctx.needs_input_grad[3 : 3 + n]
        biases_wanted = ctx.needs_input_grad[3 + n :]
        grads_output = [fp8_cast.as_matrix(grad) for grad in grads]  # [b s, out / t]
        # ranks agree on maxima first: on GPUs this would queue behind the gather
        wanted = True, any(weights_wanted)
        group = layer.gradient_group
        pairs = layer.scaling.both(grads_output, layer.places, GRADIENT, group, wanted)
        # communication runs beside the products, in the order of overlap.py
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
                d_weights[i] = overlap.weight_gradient(weights[i], for_dw, x)
            if biases_wanted[i]:
                d_biases[i] = grads_output[i].sum(0)
        return leaving(), None, None, *d_weights, *d_biases


@compiling.left_out
def linear(layer: Layer, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
    """x: [b, s, in], or a shard of it -> [b, s, out / t] for each weight [out / t, in]."""
    layer.scaling.recording = torch.is_grad_enabled()
    return _Linear.apply(x, layer, len(layer.places), *weights_and_biases)


class FP8Input(gpt.SharedInput):
    """Linear layers that read one input: it is rounded once for all. Takes the place of `project`,
    and communicates as that one did.

    project: gpt.SharedInput, or tensor_parallel.ColumnParallelLinear. places: of the layers, as in
    Layer.
    """

    def __init__(self, project: gpt.SharedInput, scaling: Scaling, places):
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
        if isinstance(p, tensor_parallel.ColumnParallelLinear):
            group = p.enter.group
            start_input, start_input_grad = overlap.STARTS[type(p.enter)]
            f = dict(group=group, start_input=start_input, start_input_grad=start_input_grad)
            # each rank has its rows of W, that is its columns of ∂y
            layer = replace(layer, weight_group=group, gradient_group=group, **f)
        return list(linear(layer, x, *overlap.weights_and_biases(linears)))


def row_linear(layer: Layer, x: Tensor, weight: nn.Parameter) -> Tensor:
    """What RowParallelLinear computes before its sum, and FP8Linear. x: [b, s, in / t] -> [b, s,
    out]"""
    return linear(layer, x, weight, None)[0]


class FP8Linear(gpt.DeferredBiasLinear):
    """gpt.DeferredBiasLinear in FP8."""

    # as of tensor_parallel.RowParallelLinear: (x, weight) -> y
    linear: Callable

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight)


# --- in a model -----------------------------------------------------------------------------------


def fp8_layers(num_layers: int, skip: int) -> range:
    """All but the first and the last `skip` layers."""
    return range(skip, num_layers - skip)


def check(config: GPTConfig, recipe: Recipe, skip: int, t: int = 1) -> None:
    """Raises FieldError where no layer is left, and where blocks would be cut over t ranks."""
    L = config.num_layers
    if not fp8_layers(L, skip):
        rule = "first and last layers are not in FP8, and {num_layers} leaves no other"
        fits = f"0 to {(L - 1) // 2}" if L > 2 else 0
        raise FieldError("fp8_skip", skip, rule, fits, num_layers=L)
    if recipe.scaling != "block" or t == 1:
        return
    sizes = dict(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads * config.head_dim,
        num_kv_heads=config.num_kv_heads * config.head_dim,
    )
    # experts have a scale for each row
    if set(fp8_layers(L, skip)) - set(getattr(config, "expert_layers", ())):
        sizes["ffn_hidden_size"] = config.ffn_hidden_size
    for field, size in sizes.items():
        if size // t % recipe.block:
            n = size // t
            rule = f"blocks must not be cut: {{tp}} gives each rank {n} of {{{field}}}"
            fits = divisors(gcd(*(size // t for size in sizes.values())), recipe.block)
            values = {field: getattr(config, field)}
            raise FieldError("fp8_block", recipe.block, rule, fits, tp=t, **values)


def make(recipe: tuple, config: GPTConfig, device, keep_bytes: bool) -> Scaling:
    """The scales of a model. recipe: the fields of a Recipe; keep_bytes: as in Scaling."""
    return Scaling(Recipe(*recipe), config.num_layers, device, keep_bytes)


def apply(model: gpt.GPT, scaling: Scaling, skip: int = 1) -> None:
    """Give attention and MLP of a model, or of a stage of it, FP8 matrix multiplications; in place.
    Parameters keep their names and their precision.

    Comes after tensor and sequence parallelism; before adapters, zero bubble and recomputation.
    """
    numbers = fp8_layers(model.config.num_layers, skip)
    for name, block in model.blocks.items():
        number = int(name)
        if number not in numbers:
            continue
        attention, mlp = block.attention, block.mlp
        in_fp8(attention, ("query", "key", "value"), "output", scaling, number)
        if isinstance(mlp, gpt.MLP):
            columns = ("up",) if mlp.gate is None else ("gate", "up")
            in_fp8(mlp, columns, "down", scaling, number)
        else:
            fp8_experts.apply(mlp, scaling, number)
        if scaling.fused and scaling.recipe.scaling == "current":
            mark_casts(block)


def mark_casts(block: gpt.Block) -> None:
    """Ask the norms and SwiGLU, by `is_cast`, to note maxima for the casts after them (kernels.py).
    Of a shard that is gathered before its cast, nobody would read it."""
    for norm, part in ((block.attention_norm, block.attention), (block.mlp_norm, block.mlp)):
        if isinstance(part, gpt.Attention | gpt.MLP):
            norm.is_cast = not part.project.gathers()
        if isinstance(part, gpt.MLP):
            part.activation.is_cast = True


def in_fp8(part: nn.Module, columns: tuple[str, ...], row: str, scaling: Scaling, number: int):
    """Change attention or an MLP, `part` of layer `number`. columns: its matrices that read its
    input; row: the one that gives its output. So tensor parallelism cuts them."""
    if isinstance(part.project, FP8Input):
        raise ValueError("this model is in FP8 already: call fp8.apply once")
    if type(part.project) is not gpt.SharedInput and not isinstance(
        part.project, tensor_parallel.ColumnParallelLinear
    ):
        raise ValueError("this model has adapters: fp8.apply comes before adapters.apply")
    names = list(LINEARS)
    places = tuple((number, names.index(name)) for name in columns)
    part.project = FP8Input(part.project, scaling, places)
    output = getattr(part, row)
    layer = Layer(scaling, ((number, names.index(row)),))
    if isinstance(output, tensor_parallel.RowParallelLinear):
        # each rank has its part of x and its columns of W
        layer = replace(layer, input_group=output.group, weight_group=output.group)
    else:
        output = zero_bubble.with_weights_of(FP8Linear, output)
        setattr(part, row, output)
    output.linear = partial(row_linear, layer)
