"""Activation recomputation: keep less for backward, and compute it again there (Korthikanti et al.,
arXiv 2205.05198, sections 4 and 5).

Backward needs the activations of forward. They take more memory than anything else in training:
34 s b h + 5 a s² b bytes in each layer. Three granularities:

    none         everything that backward needs is kept
    selective    core attention, softmax(q kᵀ) v with its dropout, is computed again: it keeps most
                 of a layer's bytes, 5 a s² b, and costs few FLOPs, 4 b s² h
    full         a layer keeps only its input, 2 s b h bytes, and is computed again as a whole:
                 a third more FLOPs

    forward      x --layer, not recorded--> y          kept: x
    backward     x --layer, recorded------> y,  then back through this recording with ∂L/∂y

    python recompute.py      one layer, three ways: bytes kept, FLOPs, equal gradients
    picture: figures/ranks_recompute.svg

Dropout needs no care: its masks are hashes of coordinates, so the second run makes the same ones. A
`RunOnce` module runs once, and recomputation reuses its result: a router's dispatch plan, for
example. Parameters get their gradients in the inner backward, where a data-parallel bucket sees
them as always.

Under tensor parallelism `full` repeats a layer's two all-reduces too (with sequence parallelism its
four collectives), and with experts on other ranks their all-to-alls. `selective` repeats none: core
attention has none. Fused attention keeps no s² matrix (FlashAttention, arXiv 2205.14135, is
selective recomputation inside one kernel), so `selective` leaves a fused core as it is.

Not covered: recomputing the norm, the activation or the MLP alone; kept inputs that are spread over
tensor-parallel ranks (Megatron-LM). `torch.utils.checkpoint` (use_reentrant=True) does the same and
keeps the generators' state. Like it, this works with `loss.backward()`, not with
torch.autograd.grad of parameters inside.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("recompute")

import contextlib
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
from base import compiling
from model_config import FieldError, GPTConfig

# --- one function ---------------------------------------------------------------------------------


@compiling.left_out
def checkpoint(function, *args) -> Tensor:
    """function(*args), of which only the arguments are kept for backward.

    `function` returns one tensor, and the same one when it runs again. A tensor that it uses and
    does not get as an argument must be a parameter. Where no argument needs a gradient, backward
    would never come back here; then `function` runs as it is, and keeps what it keeps.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
        return _Checkpoint.apply(function, *args)
    return function(*args)


# stands where a tensor was among the arguments
_SAVED = object()


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *args):
        # recording is off in here, as in every autograd function
        ctx.function = function
        ctx.run_once_results = []
        # tensors are saved by autograd, the other arguments here
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        ctx.args = list(args)
        for i, a in enumerate(args):
            if isinstance(a, Tensor):
                ctx.args[i] = _SAVED
        with _keeping(ctx.run_once_results):
            return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        saved = iter(ctx.saved_tensors)
        args = list(ctx.args)
        for i, needs_grad in enumerate(ctx.needs_input_grad[1:]):
            if args[i] is _SAVED:
                # a leaf of the inner recording
                args[i] = next(saved).detach().requires_grad_(needs_grad)
        with torch.enable_grad(), _keeping(ctx.run_once_results):
            output = ctx.function(*args)
        # parameters inside get their gradients here
        output.backward(grad)
        grads = [a.grad if isinstance(a, Tensor) else None for a in args]
        return None, *grads


# --- modules that run once ------------------------------------------------------------------------

# the results of RunOnce modules, in the checkpoint that is running
_results: list | None = None


class RunOnce(nn.Module):
    """A module without a gradient whose result is kept: recomputation does not run it again."""


def once(function, *args):
    """function(*args); in the second run of a checkpoint, what it gave in the first."""
    if _results is None:
        return function(*args)
    # only the second run records
    if torch.is_grad_enabled():
        return _results.pop(0)
    _results.append(function(*args))
    return _results[-1]


@contextlib.contextmanager
def _keeping(results: list):
    global _results
    outer = _results
    _results = results
    try:
        yield
    finally:
        _results = outer


# --- in a model -----------------------------------------------------------------------------------


GRANULARITIES = ("none", "selective", "full")


def check(config: GPTConfig, granularity: str, layers: int | None) -> None:
    """Raises FieldError for what does not exist. Arguments as in `apply`."""
    if granularity not in GRANULARITIES:
        raise FieldError("recompute", granularity, "must be none, selective or full")
    if layers is None:
        return
    L = config.num_layers
    if not 0 <= layers <= L:
        raise FieldError("recompute_layers", layers, "must be from 0 to {num_layers}", num_layers=L)
    if granularity == "none":
        rule = "needs {recompute}"
        raise FieldError("recompute_layers", layers, rule, recompute="selective or full")


def apply(model: gpt.GPT, granularity: str, layers: int | None = None) -> None:
    """Make layers 0 .. layers - 1 of the whole model (None: all) recompute.

    granularity: none, selective or full. Comes after all techniques that change what a layer
    computes. Raises FieldError as `check`.
    """
    check(model.config, granularity, layers)
    for number, block in model.blocks.items():
        if layers is not None and int(number) >= layers:
            continue
        # context parallelism may have put it inside of another
        core = getattr(block.attention.core, "inner", block.attention.core)
        if granularity == "full":
            for module in block.modules():
                if isinstance(module, RunOnce):
                    module.forward = partial(once, module.forward)
            block.forward = partial(checkpoint, block.forward)
        elif granularity == "selective" and isinstance(core, gpt.ExplicitAttention):
            core.forward = partial(checkpoint, core.forward)


# --- the paper's formulas -------------------------------------------------------------------------
#
# For the paper's model: LayerNorm, GELU with 4h inside, dropout everywhere, 16-bit activations,
# 1-byte masks. s, b, h, a, L, V are as in gpt.py; t tensor-parallel ranks, p pipeline stages; cp
# ranks that share a sequence, which the paper does not have: each has 1 / cp of the tokens.

# the rows of table 2: (sequence parallelism, recompute)
ROWS = {
    "no parallelism": (False, "none"),
    "tensor": (False, "none"),
    "tensor + sequence": (True, "none"),
    "tensor + selective": (False, "selective"),
    "tensor + sequence + selective": (True, "selective"),
    "full": (False, "full"),
}


def layer_bytes(
    s: int,
    b: int,
    h: int,
    a: int,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    cp: int = 1,
) -> float:
    """Bytes of activations that one layer keeps on one rank (table 2).

    Attention keeps 11 s b h + 5 a s² b, the MLP 19 s b h, two LayerNorms 4 s b h. Tensor
    parallelism divides 24 of the 34 s b h by t, sequence parallelism the other 10. Context
    parallelism divides all of it by cp. (A ring keeps no s² numbers: "selective" has its bytes,
    but for its result and a number for each row of scores.)
    """
    sequence_ranks = t if sequence_parallel else 1
    tokens = s * b / cp
    if recompute == "full":
        # the layer's input
        return 2 * tokens * h / sequence_ranks
    # the inputs of the two column-parallel matrices, two masks, two LayerNorms
    outside = 10 / sequence_ranks
    # softmax 2, its mask 1, after dropout 2, times a s² b
    scores = 5 * a * s / (h * t) if recompute == "none" else 0
    return tokens * h * (outside + 24 / t + scores)


def first_stage_layers(L: int, p: int = 1, v: int = 1) -> float:
    """How many layers' activations the first of p pipeline stages keeps under 1F1B (section 4.2.3).

    It keeps p micro-batches of L / p layers, L in all. v interleaved chunks on each stage make it
    1 + (p - 1) / (p v) times as many.
    """
    if v == 1:
        return L
    return L * (1 + (p - 1) / (p * v))


def outside_layers_bytes(
    s: int,
    b: int,
    h: int,
    V: int,
    t: int = 1,
    p: int = 1,
    sequence_parallel: bool = True,
    cp: int = 1,
) -> float:
    """Bytes outside the layers on the first stage (section 4.3, which has sequence parallelism).

    The mask of the embedding's dropout; with one stage also the input of the final LayerNorm, that
    of the head, and the fp32 logits. For the 22B model the paper says "less than 0.01%" of the
    layers' bytes under tensor and sequence parallelism. Its formula, this one, gives 0.57%.
    """
    sequence_ranks = t if sequence_parallel else 1
    tokens = s * b / cp
    embedding = tokens * h * p / sequence_ranks
    if p > 1:
        return embedding
    return embedding + 4 * tokens * (h / sequence_ranks + V / t)


# --- bytes measured -------------------------------------------------------------------------------


class _Kept:
    """What autograd holds of one saved tensor: gone when the graph drops it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def saved_bytes(function, *parameters: Tensor) -> int:
    """The bytes that autograd holds for backward after function(), a forward pass that returns what
    keeps its graph alive. Each storage counts once, whole; those of `parameters` do not count."""
    kept = []

    def pack(tensor):
        # detached: an output itself would keep its own graph alive
        holder = _Kept(tensor.detach())
        kept.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        # bound to a name, so that the graph lives while it is measured
        output = function()  # noqa: F841
    storages = {}
    for reference in kept:
        holder = reference()
        if holder is not None:
            storage = holder.tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    for p in parameters:
        storages.pop(p.untyped_storage().data_ptr(), None)
    return sum(storages.values())
