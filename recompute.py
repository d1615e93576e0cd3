"""Activation recomputation: keep less for backward, and compute it again there (Korthikanti et al.,
arXiv 2205.05198, sections 4 and 5).

    none         everything that backward needs is kept
    selective    core attention, softmax(q kᵀ) v with its dropout, is computed again. Its 5 a s² b
                 bytes are most of a layer for long sequences; its 4 b s² h FLOPs are few.
    full         only a layer's input is kept, 2 s b h bytes, and the whole layer is computed
                 again: a third more FLOPs

    forward      x --layer, not recorded--> y          kept: x
    backward     x --layer, recorded------> y,  then back through that recording with ∂L/∂y

    python recompute.py      one layer, three ways: bytes by formula and measured, FLOPs, gradients

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

import contextlib
import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
from dropout import dropout_key
from model_config import GPTConfig

# --- modules that run once ------------------------------------------------------------------------

# results of RunOnce modules in the checkpoint that is running
_results = None


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
    before = _results
    _results = results
    try:
        yield
    finally:
        _results = before


# --- one function ---------------------------------------------------------------------------------


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    # recording is off in here, as in every autograd function
    def forward(ctx, function, *args):
        ctx.function = function
        ctx.results = []
        ctx.is_tensor = [isinstance(a, Tensor) for a in args]
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        with _keeping(ctx.results):
            return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        tensors = iter(ctx.saved_tensors)
        args = [
            next(tensors).detach() if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others)
        ]
        for a, needed in zip(args, ctx.needs_input_grad[1:]):
            if needed:
                a.requires_grad_()
        with torch.enable_grad(), _keeping(ctx.results):
            # again, recording
            output = ctx.function(*args)
        # parameters inside get theirs here
        output.backward(grad)
        return None, *(
            a.grad if needed else None for a, needed in zip(args, ctx.needs_input_grad[1:])
        )


@torch.compiler.disable
def checkpoint(function, *args) -> Tensor:
    """function(*args), of which only the arguments are kept for backward. `function` returns one
    tensor and is the same when it runs again; a tensor that it uses without being an argument must
    be a parameter. Where no argument needs a gradient, backward would not come back to it: it runs
    as it is, recorded, and keeps what it keeps."""
    if not torch.is_grad_enabled() or not any(
        isinstance(a, Tensor) and a.requires_grad for a in args
    ):
        return function(*args)
    return _Checkpoint.apply(function, *args)


def check(config: GPTConfig, granularity: str, layers: int | None) -> None:
    """Raises ValueError, naming what to change."""
    if granularity not in ("none", "selective", "full"):
        raise ValueError(f"recompute {granularity}: must be none, selective or full")
    if layers is not None and not 0 <= layers <= config.num_layers:
        raise ValueError(
            f"recompute_layers {layers}: must be from 0 to num_layers {config.num_layers}"
        )
    if layers is not None and granularity == "none":
        raise ValueError(f"recompute_layers {layers}: needs recompute selective or full")


def apply(model: gpt.GPT, granularity: str, layers: int | None = None) -> None:
    """Make layers 0 .. layers - 1 of the whole model (None: all) recompute. granularity: none,
    selective or full. After all techniques that change what a layer computes. Raises ValueError as
    `check`."""
    check(model.config, granularity, layers)
    for number, block in model.blocks.items():
        if granularity == "none" or (layers is not None and int(number) >= layers):
            continue
        if granularity == "full":
            for module in block.modules():
                if isinstance(module, RunOnce):
                    module.forward = partial(once, module.forward)
            block.forward = partial(checkpoint, block.forward)
        # fused: nothing to save
        elif isinstance(block.attention.core, gpt.ExplicitAttention):
            block.attention.core.forward = partial(checkpoint, block.attention.core.forward)


# --------------------------------------------------------------------------------------------------
# The formulas of the paper, for its model: LayerNorm, GELU with 4h inside, dropout everywhere,
# 16-bit activations, 1-byte masks.

# table 2: (sequence parallelism, recompute)
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
) -> float:
    """Bytes of activations that one layer keeps on one rank (table 2).

    attention 11 sbh + 5 a s² b, MLP 19 sbh, two LayerNorms 4 sbh; of the 34 sbh, tensor parallelism
    cuts 24."""
    if recompute == "full":
        # its input alone, whole or a slice
        return 2 * s * b * h / (t if sequence_parallel else 1)
    # the two inputs of matrices, two masks, two LayerNorms
    outside = 10 / t if sequence_parallel else 10
    # softmax 2, its mask 1, after dropout 2, times a s² b
    scores = 5 * a * s / (h * t) if recompute == "none" else 0
    return s * b * h * (outside + 24 / t + scores)


def first_stage_layers(L: int, p: int = 1, v: int = 1) -> float:
    """How many layers' activations the first of p pipeline stages keeps under 1F1B: L whatever p is
    (p micro-batches of L / p layers), and 1 + (p - 1) / (p v) times that with v interleaved chunks
    (section 4.2.3)."""
    return L * (1 + (p - 1) / (p * v)) if v > 1 else L


def outside_layers_bytes(s: int, b: int, h: int, V: int, t: int = 1, p: int = 1) -> float:
    """Bytes outside the layers on the first stage, sequence-parallel: the mask of the embedding's
    dropout, and with one stage the final LayerNorm, the head's input and the fp32 logits (section
    4.3). For the 22B model the paper says "less than 0.01%"; this, its formula, gives 0.57% of the
    layers' bytes under tensor and sequence parallelism."""
    return s * b * h * p / t + (4 * s * b * h / t * (1 + V / h) if p == 1 else 0)


# --------------------------------------------------------------------------------------------------


class _Kept:
    """What autograd holds of one saved tensor: gone when the graph drops it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def saved_bytes(function, *parameters: Tensor) -> int:
    """Call `function`, which runs a forward pass and returns what keeps its graph alive. Returns
    the bytes that autograd holds for the backward pass: each storage once, whole, the storages of
    `parameters` left out."""
    kept = []

    def pack(tensor):
        # an output itself would keep its own graph alive
        holder = _Kept(tensor.detach())
        kept.append(weakref.ref(holder))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = function()
    left_out = {p.untyped_storage().data_ptr() for p in parameters}
    storages = {
        s.data_ptr(): s.nbytes()
        for ref in kept
        if (holder := ref())
        for s in [holder.tensor.untyped_storage()]
    }
    return sum(size for address, size in storages.items() if address not in left_out)


# --------------------------------------------------------------------------------------------------


def main():
    from torch.utils.flop_counter import FlopCounterMode

    import sharding

    s = 1024
    b = 2
    h = 512
    a = 8
    key = dropout_key(0, 1, torch.arange(b))
    first = None
    print(
        f"one GPT layer, h {h}, a {a}, s {s}, b {b}, dropout 0.1, bf16: what is kept, what is"
        " computed"
    )
    print(
        f"{'':>10}{'bytes by formula':>18}{'measured':>12}{'ratio':>8}{'FLOPs':>18}{'more':>16}{'':>3}gradients"
    )
    for granularity in ("none", "selective", "full"):
        with torch.device("meta"):
            model = gpt.GPT(
                GPTConfig(
                    num_layers=1,
                    hidden_size=h,
                    num_heads=a,
                    seq_length=s,
                    vocab_size=64,
                    dropout=0.1,
                )
            )
        apply(model, granularity)
        sharding.init(model, 0, "cpu", torch.bfloat16)
        block = model.blocks["0"]
        x = (
            torch.randn(b, s, h, generator=torch.Generator().manual_seed(0))
            .bfloat16()
            .requires_grad_()
        )
        measured = saved_bytes(lambda: block(x, key), *block.parameters())
        formula = layer_bytes(s, b, h, a, recompute=granularity)
        with FlopCounterMode(display=False) as flops:
            block(x, key).sum().backward()
        gradients = [p.grad for p in block.parameters()]
        first = first or (flops.get_total_flops(), gradients)
        same = (
            ""
            if first[1] is gradients
            else "identical"
            if all(map(torch.equal, first[1], gradients))
            else "differ"
        )
        print(
            f"{granularity:>10}{formula:>18,.0f}{measured:>12,}{measured / formula:>8.4f}{flops.get_total_flops():>18,}{flops.get_total_flops() - first[0]:>16,}"
            f"   {same}"
        )
    print(
        f"by the paper: selective 4 b s² h = {4 * b * s * s * h:,} more FLOPs, full one forward"
        f" pass of the layer, 24 b s h² + 4 b s² h = {24 * b * s * h * h + 4 * b * s * s * h:,}"
    )


if __name__ == "__main__":
    main()
