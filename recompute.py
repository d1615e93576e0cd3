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

    python -m course.recompute      one layer, three ways: bytes kept, FLOPs, equal gradients
    picture: docs/figures/ranks_recompute.svg

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
torch.autograd.grad of parameters inside. Of the head in chunks: fused kernels for the loss of a
chunk; under --schedule zb-h1 its ∂W is computed with ∂x, and does not wait. Liger computes its
gradients in forward. That saves the second multiplication, but forward must know g, the factor of
each token's loss.
"""

import contextlib
import os
import weakref
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
from base.model_config import FieldError, GPTConfig

# === recomputation ================================================================================

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


# === the head in chunks ===========================================================================
#
# The head and its loss, a few tokens at a time, so that the logits never exist whole.
#
# Logits are [b, s, V]. For GPT-2 (V = 50,257) with 32 sequences of 1,024 tokens they have 3.3 GB in
# 16 bits, and twice that in float32: often the largest tensor of a step. But the loss of a token
# needs the logits of this token alone:
#
#     forward     for N tokens at a time:  z = x Wᵀ [N, V]      L = log Σ exp(z), kept
#                                          loss = L - z_target
#     backward    for N tokens at a time:  z = x Wᵀ again       ∂z = g (exp(z - L) - onehot)
#                                          ∂x = ∂z W            ∂W += ∂zᵀ x
#
# So N V logits exist instead of b s V. Beside them backward has ∂W in float32, and what a chunk
# adds to it. The price is one more multiplication by W: 8 instead of 6 b s h V FLOPs. (Selective
# recomputation, arXiv 2205.05198, applied to the head.) With tensor parallelism each rank has V / t
# columns, and the ranks reduce three numbers of each token, as in
# tensor_parallel.vocab_parallel_cross_entropy.


class _ChunkedLoss(torch.autograd.Function):
    """loss = log Σ exp(z) - z_target with z = x Wᵀ, for `chunk` rows of x at a time.

    x: [n, h]; weight: [V, h], or with a group this rank's rows [V / t, h]; targets: [n], global ids
    -> [n], in at least float32
    """

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, vocab_size, group):
        # not saved by autograd: under ZeRO stage 3 its values are freed, and gathered again
        ctx.weight = weight
        ctx.chunk = chunk
        # the columns after these are padding
        ctx.columns = vocab_size
        local, elsewhere = targets, torch.zeros_like(targets, dtype=torch.bool)
        if group is not None:
            local, elsewhere = tensor_parallel.local_ids(targets, len(weight), vocab_size, group)
            ctx.columns = min(len(weight), max(0, vocab_size - group.rank() * len(weight)))
        dtype = torch.promote_types(x.dtype, torch.float32)
        largest, total, target_logit = x.new_empty(3, len(x), dtype=dtype)
        for rows in row_chunks(len(x), chunk):
            z = logits_of(x[rows], weight, ctx.columns)  # [N, V / t]
            # finite also where a rank has padding alone
            largest[rows] = z.amax(-1).clamp_(min=torch.finfo(dtype).min)
            target_logit[rows] = z.gather(-1, local[rows].unsqueeze(-1)).squeeze(-1)
            total[rows] = z.sub_(largest[rows].unsqueeze(-1)).exp_().sum(-1)
            # free these logits before the next ones are made
            del z
        target_logit = target_logit.masked_fill(elsewhere, 0)
        if group is not None:
            of_rank = largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * (of_rank - largest).exp(), target_logit))  # [2, n]
            dist.all_reduce(sums, group=group)
            total, target_logit = sums
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
            # summed over chunks in at least float32
            dw = torch.zeros_like(weight, dtype=log_total.dtype)
        # -1 where the target is in this rank's columns, 0 elsewhere
        minus_onehot = elsewhere.to(log_total.dtype) - 1
        for rows in row_chunks(len(x), ctx.chunk):
            z = logits_of(x[rows], weight, ctx.columns)
            z.sub_(log_total[rows].unsqueeze(-1)).exp_()
            z.scatter_add_(-1, local[rows].unsqueeze(-1), minus_onehot[rows].unsqueeze(-1))
            dz = z.mul_(grad[rows].unsqueeze(-1)).to(x.dtype)
            dx[rows] = dz @ weight
            if dw is not None:
                dw += dz.t() @ x[rows]
            del z, dz
        return dx, dw, None, None, None, None


def row_chunks(n: int, chunk: int) -> list[slice]:
    """n rows as slices of `chunk` rows; the last may have fewer."""
    return [slice(start, start + chunk) for start in range(0, n, chunk)]


def logits_of(x: Tensor, weight: Tensor, columns: int) -> Tensor:
    """[N, V / t] in at least float32, a new tensor; -∞ after the first `columns`, in padding."""
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
    """The loss of each token, from the head's input and its matrix.

    x: [b, s, h]; weight: [V, h], or [V / t, h] on each rank of a group; targets: [b, s] -> [b, s],
    in at least float32. `chunk` tokens at a time have logits.
    """
    rows = x.flatten(0, 1), weight, targets.flatten()
    return _ChunkedLoss.apply(*rows, chunk, vocab_size, group).view(targets.shape)


# --- in a model -----------------------------------------------------------------------------------


class ChunkedHead(nn.Module):
    """gpt.Head, or its tensor-parallel form, whose loss needs the logits of `chunk` tokens.
    Parameters keep their names."""

    def __init__(self, head: gpt.Head | tensor_parallel.VocabParallelHead, chunk: int):
        super().__init__()
        self.norm = head.norm
        self.output = head.output
        self.chunk = chunk
        self.vocab_size = sharding.sharding_of(head.output.weight).shape[0]
        self.group = getattr(head, "group", None)
        # f, which sequence parallelism replaces by g
        self.enter = nn.Identity()
        if self.group is not None:
            self.enter = tensor_parallel.CopyToRanks(self.group)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """As gpt.Head. Without targets, to generate, the logits are whole."""
        x = self.enter(self.norm(x))  # [b, s, h]
        weight = self.output.weight
        if targets is not None:
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
    """Let the head of a model, or of a pipeline stage that has one, work on `chunk` tokens at a
    time, in place. After tensor_parallel.apply, before sequence_parallel.apply."""
    check_head(chunk)
    if model.head is not None and chunk:
        model.head = ChunkedHead(model.head, chunk)


# --------------------------------------------------------------------------------------------------


def peak_bytes(function) -> int:
    """The most bytes of tensors at one time, of those that `function` makes on the CPU."""
    # the profiler says on standard error when it starts
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    held = most = 0
    for e in sorted(changes, key=lambda e: e.start_ns()):
        held += e.nbytes()
        most = max(most, held)
    return most
