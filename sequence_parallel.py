"""Sequence parallelism: activations that tensor parallelism replicates are sharded along the
sequence (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

Tensor parallelism shards the matrices, but every rank still computes and keeps the same LayerNorm,
dropout and residual: 10 sbh of a layer's 34 sbh bytes (two LayerNorms 4, two dropout masks 2, two
matrix inputs 4). These act on each token alone, so each rank can compute s / t of the tokens. An
all-reduce is a reduce-scatter followed by an all-gather. The sharded part is placed between them,
and as many bytes are sent as before:

    tensor     f: identity   | all-reduce       attention or MLP    f̄: all-reduce     | identity
    sequence   g: all-gather | reduce-scatter   attention or MLP    ḡ: reduce-scatter | all-gather

    (forward | backward; the letters of figures 4 and 5: f̄ is what arXiv 1909.08053 calls g)

    [b, s/t, h] --LayerNorm, g--> [b, s, h] --X A_i .. B_i, ḡ--> [b, s/t, h] --dropout, residual-->

    python -m course.sequence_parallel      two ranks: gradients, bytes sent, bytes kept
    picture: docs/figures/ranks_sequence.svg

This has two consequences. First, a replicated weight that is applied to s/t of the tokens (norms,
positions, the biases after ḡ) has only a part of its gradient on each rank. Such weights pass
through identity | all-reduce before a layer uses them, with one flat all-reduce for each layer.
Second, the input of X A_i is kept for backward as its shard, [b, s/t, h]. Backward gathers it again
while it computes the input gradient (overlap, below).

Not covered: Megatron-LM stores activations as [s, b, h], so that one collective moves the shards of
b sequences; here NCCL starts b collectives in one launch. Megatron-LM sums the norms' gradients
once a step in the optimizer; here each micro-batch does, where the weights are used. Transformer
Engine (user buffers) also overlaps inside the kernel of one matrix multiplication.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

import gpt
import tensor_parallel
from base import compiling
from base.document_mask import positions_of
from base.dropout import Dropout
from base.groups import all_gather, reduce_scatter
from base.model_config import FieldError, GPTConfig, multiples_near
from sharding import sharding_of
from tensor_parallel import ColumnParallelInput, CopyToRanks, RowParallelLinear

# === sequence parallelism =========================================================================

# --- g and ḡ --------------------------------------------------------------------------------------


def launches_together(group: dist.ProcessGroup) -> bool:
    """Whether the backend runs several collectives as one launch, as NCCL does. Then each of the b
    sequences has its own, without a copy. Otherwise one collective moves a copy of all."""
    return dist.get_backend(group).startswith("nccl")


def start_gather(x: Tensor, group: dist.ProcessGroup):
    """Start to all-gather shards of the sequence.

    x: [b, s/t, h]; returns a function that waits and returns [b, s, h].
    """
    b, t = x.shape[0], group.size()
    x = x.contiguous()
    if launches_together(group):
        whole = x.new_empty(b, t, *x.shape[1:])  # [b, t, s/t, h]
        work = group.allgather_into_tensor_coalesced(list(whole.flatten(1, 2)), list(x))
    else:
        shards = x.new_empty(t, *x.shape)  # [t, b, s/t, h]
        work = all_gather(shards.flatten(0, 1), x, group=group, async_op=True)
        whole = shards.transpose(0, 1)

    def finish() -> Tensor:
        work.wait()
        return whole.flatten(1, 2)  # [b, s, h]

    return finish


def start_scatter(x: Tensor, group: dist.ProcessGroup):
    """Start to reduce-scatter. x: [b, s, h], each rank's part of a sum; returns a function that
    waits and returns [b, s/t, h]."""
    parts = x.unflatten(1, (group.size(), -1))  # [b, t, s/t, h]
    mine = torch.empty_like(parts[:, 0], memory_format=torch.contiguous_format)
    if launches_together(group):
        work = group.reduce_scatter_tensor_coalesced(list(mine), list(x.contiguous()))
    else:
        shards = parts.transpose(0, 1).flatten(0, 1).contiguous()  # [t b, s/t, h]
        work = reduce_scatter(mine, shards, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return mine

    return finish


class _Pair(torch.autograd.Function):
    """A collective, and its adjoint in backward."""

    @staticmethod
    def forward(ctx, x, group, collective, adjoint):
        ctx.group = group
        ctx.adjoint = adjoint
        return collective(x, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.adjoint(grad, ctx.group)(), None, None, None


@compiling.left_out
def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g (figure 5): shards [b, s/t, h] become the whole [b, s, h] on every rank."""
    return _Pair.apply(x, group, start_gather, start_scatter)


@compiling.left_out
def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """ḡ (figure 5): parts of a sum [b, s, h] become each rank's shard of the sum, [b, s/t, h]."""
    return _Pair.apply(x, group, start_scatter, start_gather)


class GatherSequence(tensor_parallel.CopyToRanks):
    """g as a module; it replaces f."""

    def forward(self, x: Tensor) -> Tensor:
        return gather_sequence(x, self.group)


class ScatterSequence(tensor_parallel.ReduceFromRanks):
    """ḡ as a module; it replaces f̄."""

    def forward(self, x: Tensor) -> Tensor:
        return scatter_sequence(x, self.group)


class ShardedPositions(nn.Module):
    """Adds a vector for each position to x, the n-th of t shards of the sequence. x: [b, s/t, h]"""

    is_lookup = True

    def __init__(self, positions: gpt.LearnedPositions, n: int, t: int):
        super().__init__()
        self.weight = positions.weight
        self.n = n
        self.t = t

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """documents: [b, s], of the whole sequence: this shard may begin inside a document."""
        length = x.shape[1]
        if documents is not None:
            positions = positions_of(documents).chunk(self.t, dim=1)[self.n]  # [b, s/t]
            return x + F.embedding(positions, self.weight)
        return x + self.weight[self.n * length : (self.n + 1) * length]


# --- replicated weights ---------------------------------------------------------------------------


class _CopyWeights(torch.autograd.Function):
    """Identity in forward; in backward one all-reduce of all gradients, concatenated."""

    @staticmethod
    def forward(ctx, group, *weights):
        ctx.group = group
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        flat = torch.cat([grad.flatten() for grad in grads])
        # 16-bit parts are summed in 32 bits.
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        dist.all_reduce(flat, group=ctx.group)
        parts = flat.split([grad.numel() for grad in grads])
        return None, *(part.view_as(grad).to(grad.dtype) for part, grad in zip(parts, grads))


@compiling.left_out
def copy_weights(weights: list[nn.Parameter], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    return _CopyWeights.apply(group, *weights)


class Forward(nn.Module):
    """Runs a module by its present forward. It is part of no model: `functional_call` calls it with
    other tensors in place of the parameters of these names."""

    def __init__(self, module: nn.Module, names: list[str]):
        super().__init__()
        self.module = module
        self.run = module.forward
        self.names = [f"module.{name}" for name in names]

    def forward(self, *args, **kwargs) -> Tensor:
        return self.run(*args, **kwargs)


def run_with_copies(forward: Forward, group: dist.ProcessGroup, *args, **kwargs) -> Tensor:
    """Run the forward of a module on copies of its replicated weights, which pass through identity
    | all-reduce."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    copies = copy_weights([forward.get_parameter(name) for name in forward.names], group)
    weights = dict(zip(forward.names, copies))
    return functional_call(forward, weights, args, kwargs, tie_weights=False)


def synchronise(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Pass the trainable parameters of `module` that `group` does not shard through identity |
    all-reduce, together, whenever it runs."""
    names = []
    for name, p in module.named_parameters():
        groups = [shard.group for shard in sharding_of(p).placements]
        if p.requires_grad and group not in groups:
            names.append(name)
    if names:
        module.forward = partial(run_with_copies, Forward(module, names), group)


# --- check and apply ------------------------------------------------------------------------------

# {collective of tensor parallelism: that of sequence parallelism}
REPLACEMENTS = {
    tensor_parallel.CopyToRanks: GatherSequence,
    tensor_parallel.ReduceFromRanks: ScatterSequence,
}


def check(config: GPTConfig, t: int) -> None:
    """Raises FieldError if sequences cannot be sharded over t ranks."""
    s = config.seq_length
    if s % t:
        rule = "must be divisible by {tp} under sequence parallelism"
        raise FieldError("seq_length", s, rule, multiples_near(s, t), tp=t)


def shard_sequence(model: gpt.GPT, group: dist.ProcessGroup, sharded: bool = True) -> list:
    """Put g and ḡ around each tensor-parallel region. sharded False puts f and f̄ back, for
    generation: its steps of one token cannot be sharded.

    Returns the replaced modules as (parent, name, module).
    """
    replacements = REPLACEMENTS
    if not sharded:
        replacements = {new: old for old, new in REPLACEMENTS.items()}
    replaced = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in replacements:
                setattr(parent, name, replacements[type(child)](group))
                replaced.append((parent, name, child))
    return replaced


@contextlib.contextmanager
def whole_sequences(models: list[gpt.GPT], group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context in which the models are only tensor parallel, for generation during training.
    Models that are not sequence parallel do not change."""
    replaced = []
    for model in models:
        replaced += shard_sequence(model, group, sharded=False)
    try:
        yield
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)


def apply(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Make a model that `tensor_parallel.apply` has sharded over the same group sequence parallel,
    in place. It takes tokens [b, s] with s divisible by t.

    Raises FieldError as `check`, ValueError for a model that is not tensor parallel.
    """
    check(model.config, group.size())
    parts = [model.embedding, *model.blocks.values(), model.head]
    parts = [part for part in parts if part is not None]
    check_order(model, group)
    for module in model.modules():
        if isinstance(module, tensor_parallel.ParallelHeadNorms):
            # `synchronise` sums these gradients with those of the layer's other replicated weights.
            module.enter = nn.Identity()
    shard_sequence(model, group)
    of_attention = {m.dropout for m in model.modules() if isinstance(m, gpt.ExplicitAttention)}
    for module in model.modules():
        if isinstance(module, Dropout) and module not in of_attention:
            # Dropout masks depend on this rank's shard of the sequence.
            module.shard_index[1] = group.rank()
        if hasattr(module, "share_sequence"):
            # It knows by itself what its shard is (models/vit.py).
            module.share_sequence(group)
        elif isinstance(module, gpt.Embedding) and module.positions is not None:
            module.positions = ShardedPositions(module.positions, group.rank(), group.size())
    for part in parts:
        synchronise(part, group)


def check_order(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Raises ValueError if `apply` is called too early, too late, or twice."""
    regions = [module for module in model.modules() if isinstance(module, tuple(REPLACEMENTS))]
    groups = {module.group for module in regions}
    # A pipeline stage may be without a block, and an embedding or head without a vocabulary.
    if groups != {group} and (groups or model.blocks):
        raise ValueError(
            "sequence parallelism works on a model that is sharded over the same group: call "
            "tensor_parallel.apply(model, group) first"
        )
    if any(isinstance(module, GatherSequence) for module in regions):
        raise ValueError("this model is sequence parallel already")
    if any(isinstance(block.forward, partial) for block in model.blocks.values()):
        raise ValueError(
            "this model recomputes already: recompute.apply comes after sequence_parallel.apply, "
            "so that what this adds runs again too"
        )


# === overlap: backward communicates while it computes =============================================
#
# A matrix multiplication y = x Wᵀ has two gradients. Tensor parallelism sends only the first:
#
#     ∂x = ∂y W       each rank has a part, and the parts are summed over ranks
#     ∂W = ∂yᵀ x      stays on its rank
#
# In tensor_parallel.py autograd computes both, and waits for the sum afterwards. Here one autograd
# function of a column-parallel layer runs them in an order that hides the communication. The two
# entries of a row run at the same time:
#
#     f, tensor parallelism                  g, sequence parallelism
#
#     compute ∂x                             compute ∂x      all-gather x
#     compute ∂W      all-reduce ∂x          compute ∂W      reduce-scatter ∂x
#
# ∂W can also be deferred. Where the pipeline has put a list on a weight, backward appends the
# inputs of ∂W to it (pipeline_parallel.py). Or the product is added directly to the sum of the
# weight's gradients (optimizer.py, `fuse_accumulation`).

# --- asynchronous communication -------------------------------------------------------------------


def start_nothing(x: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """The identity, with the signature of the collectives: returns a function that returns x."""
    return lambda: x


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to sum x over the ranks, in place; returns a function that waits and returns x."""
    work = dist.all_reduce(x, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


NOTHING = (start_nothing, start_nothing)
# The collective that starts on x in forward, and that on ∂x in backward.
STARTS = {
    CopyToRanks: (start_nothing, start_all_reduce),
    GatherSequence: (start_gather, start_scatter),
}

# --- the linear layer -----------------------------------------------------------------------------


def weight_gradient(weight: Tensor, grad_output: Tensor, x: Tensor) -> Tensor | None:
    """∂W = ∂yᵀ x, or None if the three tensors are appended to the weight's list, or if the
    weight's accumulator has added ∂W to its sum.

    grad_output: ∂y [b s, out]; x: [b s, in] -> [out, in]
    """
    if getattr(weight, "deferred", None) is not None:
        weight.deferred.append((weight, grad_output, x))
        return None
    accumulator = getattr(weight, "accumulator", None)
    # In FP8 (fp8.py) x and grad_output are not tensors.
    if accumulator is None or not isinstance(x, Tensor):
        return grad_output.t() @ x
    accumulator.accumulate_product(weight, grad_output, x)
    return None


class _Linear(torch.autograd.Function):
    """Y_i = f(x) W_iᵀ + b_i for several W_i that read the same x: n weights, then n biases or None.
    starts: an entry of STARTS. multiply: gathers x and multiplies, instead (base/ring.py)."""

    @staticmethod
    def forward(ctx, x, starts, group, multiply, n, *weights_and_biases):
        weights = weights_and_biases[:n]
        biases = weights_and_biases[n:]
        ctx.starts, ctx.group, ctx.n = starts, group, n
        # ctx keeps the parameters themselves, not saved copies: they carry the lists.
        ctx.weights = weights
        ctx.save_for_backward(x)
        start_input, _ = starts
        if multiply:
            products = multiply(x, group, weights, biases)
        else:
            whole = start_input(x, group)()  # [b, s, in]
            products = (F.linear(whole, w, b) for w, b in zip(weights, biases))
        # These are views, with a bias or of shards, which cross entropy may not overwrite.
        return tuple(torch.ops.aten._unsafe_view(y, y.shape) for y in products)  # [b, s, out] each

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        n, group, weights = ctx.n, ctx.group, ctx.weights
        start_input, start_input_grad = ctx.starts
        (x,) = ctx.saved_tensors
        weights_wanted = ctx.needs_input_grad[5 : 5 + n]
        biases_wanted = ctx.needs_input_grad[5 + n :]
        # The input is gathered while the input gradient is computed.
        arriving = start_input(x, group) if any(weights_wanted) else None
        grads_output = [grad.flatten(0, -2) for grad in grads]  # [b s, out]
        dx = grads_output[0] @ weights[0]
        for grad_output, weight in zip(grads_output[1:], weights[1:]):
            dx.addmm_(grad_output, weight)
        # The input gradient is reduced while the weight gradients are computed.
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
        return leaving(), None, None, None, None, *d_weights, *d_biases


@compiling.left_out
def linear(
    x: Tensor, *weights_and_biases: Tensor | None, starts=NOTHING, group=None, multiply=None
) -> tuple[Tensor, ...]:
    """x: [b, s, in], or a shard of it -> [b, s, out] for each weight [out, in].

    weights_and_biases: n weights, then n biases or None.
    """
    n = len(weights_and_biases) // 2
    return _Linear.apply(x, starts, group, multiply, n, *weights_and_biases)


def weights_and_biases(linears: tuple[nn.Linear, ...]) -> list[Tensor | None]:
    """The n weights of n layers, then the n biases; None where the next module adds the bias."""
    biases = [None] * len(linears)
    for i, layer in enumerate(linears):
        if not isinstance(layer, gpt.DeferredBiasLinear):
            biases[i] = layer.bias
    return [layer.weight for layer in linears] + biases


class JoinedProjection(gpt.ProjectTogether):
    """gpt.ProjectTogether on one device, as one autograd function for all layers. So ∂x is added up
    inside their matrix multiplications, not by an addition after each. It reads the parameters of
    the layers, and does not call them."""

    def forward(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        return list(linear(x, *weights_and_biases(linears)))


class OverlappedInput(ColumnParallelInput):
    """ColumnParallelInput whose communication overlaps with computation. It reads the parameters of
    the layers, and does not call them."""

    # Of base/ring.py: multiplies shards as they arrive.
    multiply = None

    def forward(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        how = dict(starts=STARTS[type(self.enter)], group=self.enter.group)
        if type(self.enter) is GatherSequence:
            how["multiply"] = self.multiply
        return list(linear(x, *weights_and_biases(linears), **how))


@compiling.left_out
def multiply_and_scatter(row: RowParallelLinear, multiply: Callable, x: Tensor) -> Tensor:
    """The forward of a row-parallel layer. multiply: of base/ring.py."""
    if not isinstance(row.reduce, ScatterSequence):
        # Generation has no shards of a sequence.
        return RowParallelLinear.forward(row, x)
    return multiply(x, row.weight, row.group, weight_gradient)


# --- apply ----------------------------------------------------------------------------------------


def overlap_backward(model: gpt.GPT, in_shards: bool = False) -> None:
    """Make the column-parallel layers of a model or pipeline stage overlap, in place. in_shards: so
    do, under sequence parallelism, the products that otherwise wait for all shards.

    Call it after everything that adds such layers: tensor parallelism, adapters, soft prompts.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is ColumnParallelInput:
                overlapped = OverlappedInput(child.enter.group)
                # `enter` is f, or g of sequence parallelism.
                overlapped.enter = child.enter
                setattr(parent, name, overlapped)
    if in_shards:
        from base import ring

        for module in model.modules():
            if isinstance(module, OverlappedInput):
                module.multiply = ring.multiply_shards
            # With adapters beside its matrix a layer has another forward, and waits.
            elif isinstance(module, RowParallelLinear) and "forward" not in vars(module):
                module.forward = partial(multiply_and_scatter, module, ring.multiply_and_scatter)
