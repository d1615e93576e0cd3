"""Activation recomputation: forward keeps fewer activations, and backward computes them again
(Korthikanti et al., arXiv 2205.05198, sections 4 and 5).

Backward needs the activations of forward. They take more memory than anything else in training:
34 s b h + 5 a s² b bytes in each layer. Three granularities:

    none         everything that backward needs is kept
    selective    core attention, softmax(q kᵀ) v with its dropout, is computed again: it keeps most
                 of a layer's bytes, 5 a s² b, and costs few FLOPs, 4 b s² h
    full         a layer keeps only its input, 2 s b h bytes, and is computed again as a whole:
                 a third more FLOPs

    forward      x --layer, not recorded--> y          kept: x
    backward     x --layer, recorded------> y,  then back through this recording with ∂L/∂y

    python -m course.recompute      one layer, three ways: bytes kept, FLOPs, equal gradients
    picture: docs/figures/ranks_recompute.svg

Dropout masks are hashes of coordinates, so the second run makes the same ones. Recomputation reuses
the result of a `RunOnce` module, such as a router's dispatch plan. Parameters get their gradients
in the inner backward, and their hooks run as usual. As with `torch.utils.checkpoint`
(use_reentrant=True), call `loss.backward()`, not torch.autograd.grad of parameters inside.

Under tensor parallelism `full` repeats a layer's two all-reduces too (with sequence parallelism its
four collectives), and with expert parallelism the all-to-alls. `selective` repeats none: core
attention has none. Fused attention keeps no s² matrix (FlashAttention, arXiv 2205.14135, is
selective recomputation inside one kernel), so `selective` does not change a fused core.

Not covered: recomputing the norm, the activation or the MLP alone; kept inputs that are sharded
over tensor-parallel ranks (Megatron-LM). For the head in chunks: fused kernels for the loss of a
chunk; a deferred ∂W under --schedule zb-h1; Liger's gradients in forward, which save the second
multiplication, but need each token's factor g in forward.
"""

import contextlib
import threading
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import sharding
import tensor_parallel
from base import compiling
from base.cross_entropy import gradient_of_logits
from base.model_config import FieldError, GPTConfig

# === recomputation ================================================================================

# --- one function ---------------------------------------------------------------------------------


@compiling.left_out
def checkpoint(function, *args) -> Tensor:
    """Return function(*args), and keep only the arguments for backward.

    `function` returns one tensor, and the same one when it runs again. Every tensor that it uses is
    an argument or a parameter. If no argument needs a gradient, backward would never reach this
    node. Then `function` runs without recomputation.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    if torch.is_grad_enabled() and any(a.requires_grad for a in tensors):
        return _Checkpoint.apply(function, *args)
    return function(*args)


# Takes the place of a tensor among the arguments.
_SAVED = object()


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *args):
        # Recording is off here, as in every autograd function.
        ctx.function = function
        ctx.run_once_results = []
        # Autograd saves tensors; ctx keeps the other arguments.
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
                # The tensor becomes a leaf of the inner recording.
                args[i] = next(saved).detach().requires_grad_(needs_grad)
        with torch.enable_grad(), _keeping(ctx.run_once_results):
            output = ctx.function(*args)
        # Parameters inside get their gradients here.
        output.backward(grad)
        grads = [a.grad if isinstance(a, Tensor) else None for a in args]
        return None, *grads


# --- modules that run once ------------------------------------------------------------------------


class _Running(threading.local):
    """The checkpoint that is running in this thread: with --ep-comm-overlap one thread runs forward
    while another recomputes."""

    results: list | None = None  # of RunOnce modules


_running = _Running()


class RunOnce(nn.Module):
    """A module without a gradient whose result is kept: recomputation does not run it again."""


def once(function, *args):
    """Return function(*args); in the second run of a checkpoint, the result of the first."""
    results = _running.results
    if results is None:
        return function(*args)
    # Only the second run records.
    if torch.is_grad_enabled():
        return results.pop(0)
    results.append(function(*args))
    return results[-1]


@contextlib.contextmanager
def _keeping(results: list):
    outer = _running.results
    _running.results = results
    try:
        yield
    finally:
        _running.results = outer


# --- check and apply ------------------------------------------------------------------------------


GRANULARITIES = ("none", "selective", "full")


def check(config: GPTConfig, granularity: str, layers: int | None) -> None:
    """Raises FieldError for a wrong granularity or number of layers. Arguments as in `apply`."""
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

    granularity: none, selective or full. Call it after all techniques that change the computation
    of a layer. Raises FieldError as `check`.
    """
    check(model.config, granularity, layers)
    for number, block in model.blocks.items():
        if layers is not None and int(number) >= layers:
            continue
        if granularity == "full":
            for module in block.modules():
                if isinstance(module, RunOnce):
                    module.forward = partial(once, module.forward)
            block.forward = partial(checkpoint, block.forward)
        elif granularity == "selective":
            for core in block.modules():
                if isinstance(core, gpt.ExplicitAttention):
                    core.forward = partial(checkpoint, core.forward)


# --- the paper's formulas -------------------------------------------------------------------------
#
# They hold for the paper's model: LayerNorm, GELU with 4h inside, dropout everywhere, 16-bit
# activations, 1-byte masks. s, b, h, a, L, V are as in gpt.py; t tensor-parallel ranks, p pipeline
# stages; cp context-parallel ranks (not in the paper), each with 1 / cp of the tokens.

# The rows of table 2: (sequence parallelism, recompute).
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
    parallelism divides all of it by cp. (A ring keeps no s² numbers. Its bytes are those of
    "selective", its result, and a number for each row of scores.)
    """
    sequence_ranks = t if sequence_parallel else 1
    tokens = s * b / cp
    if recompute == "full":
        return 2 * tokens * h / sequence_ranks
    # The inputs of the two column-parallel matrices, two masks, two LayerNorms.
    outside = 10 / sequence_ranks
    # Softmax 2, its mask 1, after dropout 2, times a s² b.
    scores = 5 * a * s / (h * t) if recompute == "none" else 0
    return tokens * h * (outside + 24 / t + scores)


def first_stage_layers(L: int, p: int = 1, v: int = 1) -> float:
    """The number of layers whose activations the first of p stages keeps (1F1B, section 4.2.3).

    It keeps p micro-batches of L / p layers, L in all. With v interleaved chunks on each rank it
    keeps 1 + (p - 1) / (p v) times as many.
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

    They are the mask of the embedding's dropout, and with one stage also the inputs of the final
    LayerNorm and of the head, and the fp32 logits. For the 22B model the paper says "less than
    0.01%" of the layers' bytes under tensor and sequence parallelism. Its formula, used here, gives
    0.57%.
    """
    sequence_ranks = t if sequence_parallel else 1
    tokens = s * b / cp
    embedding = tokens * h * p / sequence_ranks
    if p > 1:
        return embedding
    return embedding + 4 * tokens * (h / sequence_ranks + V / t)


# === the head in chunks ===========================================================================
#
# Logits are [b, s, V]. For GPT-2 (V = 50,257) with 32 sequences of 1,024 tokens they have 3.3 GB in
# 16 bits, and twice that in float32: often the largest tensor of a step. But the loss of a token
# needs only the logits of this token, so a few tokens at a time are enough:
#
#     forward     for N tokens at a time:  z = x Wᵀ [N, V]      L = log Σ exp(z), kept
#                                          loss = L - z_target
#     backward    for N tokens at a time:  z = x Wᵀ again       ∂z = g (exp(z - L) - onehot)
#                                          ∂x = ∂z W            ∂W += ∂zᵀ x
#
# So N V logits exist instead of b s V. Backward also has ∂W in float32, and one chunk's term of it.
# The cost is one more multiplication by W: 8 instead of 6 b s h V FLOPs. With tensor parallelism
# each rank has V / t columns, and the ranks reduce three numbers of each token, as in
# tensor_parallel.vocab_parallel_cross_entropy.


class _ChunkedLoss(torch.autograd.Function):
    """loss = log Σ exp(z) - z_target with z = x Wᵀ, for `chunk` rows of x at a time.

    x: [n, h]; weight: [V, h], or with a group this rank's rows [V / t, h]; targets: [n], global ids
    -> [n], in at least float32
    """

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, vocab_size, group):
        # Autograd does not save it: under ZeRO stage 3 its values are freed, and gathered again.
        ctx.weight = weight
        ctx.chunk = chunk
        # The columns after these are padding.
        ctx.columns = vocab_size
        local, elsewhere = targets, torch.zeros_like(targets, dtype=torch.bool)
        if group is not None:
            local, elsewhere = tensor_parallel.local_ids(targets, len(weight), vocab_size, group)
            ctx.columns = tensor_parallel.columns_of_rank(len(weight), vocab_size, group)
        dtype = torch.promote_types(x.dtype, torch.float32)
        largest, total, target_logit = x.new_empty(3, len(x), dtype=dtype)
        for rows in row_chunks(len(x), chunk):
            z = logits_of(x[rows], weight, ctx.columns)  # [N, V / t]
            # The clamp keeps it finite on a rank that has only padding.
            largest[rows] = z.amax(-1).clamp_(min=torch.finfo(dtype).min)
            target_logit[rows] = z.gather(-1, local[rows].unsqueeze(-1)).squeeze(-1)
            total[rows] = z.sub_(largest[rows].unsqueeze(-1)).exp_().sum(-1)
            # This frees these logits before the next ones are made.
            del z
        target_logit = target_logit.masked_fill(elsewhere, 0)
        if group is not None:
            statistics = largest, total, target_logit
            largest, total, target_logit = tensor_parallel.reduce_statistics(*statistics, group)
        log_total = total.log() + largest
        ctx.save_for_backward(x, local, elsewhere, log_total)
        return log_total - target_logit

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, local, elsewhere, log_total = ctx.saved_tensors
        weight = ctx.weight
        dx = torch.empty_like(x)
        dw = None
        if ctx.needs_input_grad[1]:
            # Chunks are summed in at least float32.
            dw = torch.zeros_like(weight, dtype=log_total.dtype)
        for rows in row_chunks(len(x), ctx.chunk):
            z = logits_of(x[rows], weight, ctx.columns)
            p = z.sub_(log_total[rows].unsqueeze(-1)).exp_()
            dz = gradient_of_logits(p, local[rows], grad[rows], elsewhere[rows]).to(x.dtype)
            dx[rows] = dz @ weight
            if dw is not None:
                dw += dz.t() @ x[rows]
            del z, p, dz
        return dx, dw, None, None, None, None


def row_chunks(n: int, chunk: int) -> list[slice]:
    """Split n rows into slices of `chunk` rows; the last may have fewer."""
    return [slice(start, start + chunk) for start in range(0, n, chunk)]


def logits_of(x: Tensor, weight: Tensor, columns: int) -> Tensor:
    """The logits [N, V / t] in at least float32, a new tensor; -∞ in padding, after `columns`."""
    z = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
    z[:, columns:] = -torch.inf
    return z


@compiling.left_out
def chunked_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The loss of each token, from the head's input and its matrix, `chunk` tokens at a time.

    x: [b, s, h]; weight: [V, h], or [V / t, h] on each rank of a group; targets: [b, s] -> [b, s],
    in at least float32.
    """
    rows = x.flatten(0, 1), weight, targets.flatten()
    return _ChunkedLoss.apply(*rows, chunk, vocab_size, group).view(targets.shape)


# --- check and apply ------------------------------------------------------------------------------


class ChunkedHead(nn.Module):
    """gpt.Head, or its tensor-parallel form, with the loss of `chunk` tokens at a time. Parameters
    keep their names."""

    def __init__(self, head: gpt.Head | tensor_parallel.VocabParallelHead, chunk: int):
        super().__init__()
        self.norm = head.norm
        self.output = head.output
        self.chunk = chunk
        self.vocab_size = sharding.sharding_of(head.output.weight).shape[0]
        self.group = getattr(head, "group", None)
        # f, which sequence parallelism replaces by g.
        self.enter = nn.Identity()
        if self.group is not None:
            self.enter = tensor_parallel.CopyToRanks(self.group)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """As in gpt.Head. Without targets (generation) the logits are whole."""
        x = self.enter(self.norm(x))  # [b, s, h]
        weight, bias = self.output.weight, self.output.bias
        if targets is not None:
            if bias is not None:
                # BERT's: one more column of the matrix, for an input that is 1.
                x, weight = F.pad(x, (0, 1), value=1.0), torch.cat((weight, bias.unsqueeze(1)), 1)
            return chunked_loss(x, weight, targets, self.chunk, self.vocab_size, self.group)
        logits = self.output(x)
        if self.group is None:
            return logits[..., : self.vocab_size]
        return tensor_parallel.gather_logits(logits, self.vocab_size, self.group)


def check_head(chunk: int) -> None:
    """Raises FieldError for a negative number of tokens."""
    if chunk < 0:
        raise FieldError("head_chunk", chunk, "must be 0 (off) or a number of tokens", fits=[1024])


def chunk_head(model: gpt.GPT, chunk: int) -> None:
    """Make the head of a model or pipeline stage, if it has one, work on `chunk` tokens at a time,
    in place. Call it after tensor_parallel.apply and before sequence_parallel.apply."""
    check_head(chunk)
    if model.head is not None and chunk:
        model.head = ChunkedHead(model.head, chunk)
