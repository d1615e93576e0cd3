"""The head and its loss, a few tokens at a time, so that the logits never exist whole.

Logits are [b, s, V]. For GPT-2 (V = 50,257) with 32 sequences of 1,024 tokens they have 3.3 GB in
16 bits, and twice that in float32: often the largest tensor of a step. But the loss of a token
needs the logits of this token alone:

    forward     for N tokens at a time:  z = x Wᵀ [N, V]      L = log Σ exp(z), kept
                                         loss = L - z_target
    backward    for N tokens at a time:  z = x Wᵀ again       ∂z = g (exp(z - L) - onehot)
                                         ∂x = ∂z W            ∂W += ∂zᵀ x

So N V logits exist instead of b s V. Beside them backward has ∂W in float32, and what a chunk adds
to it. The price is one more multiplication by W: 8 instead of 6 b s h V FLOPs. (Selective
recomputation, arXiv 2205.05198, applied to the head.) With tensor parallelism each rank has V / t
columns, and the ranks reduce three numbers of each token, as in
tensor_parallel.vocab_parallel_cross_entropy.

    python chunked_head.py                   peak bytes, whole and in chunks
    python train.py --head-chunk 1024        in a run

Not covered: fused kernels for the loss of a chunk; with --schedule zb-h1 ∂W of the head is computed
with ∂x, and does not wait. Liger computes the gradients in forward: that saves the second
multiplication, but forward must know g, the factor of each token's loss.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("chunked_head")

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import sharding
import tensor_parallel
from base import compiling
from model_config import FieldError


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


def check(chunk: int) -> None:
    """Raises FieldError for a negative number of tokens."""
    if chunk < 0:
        raise FieldError("head_chunk", chunk, "must be 0 (off) or a number of tokens", fits=[1024])


def apply(model: gpt.GPT, chunk: int) -> None:
    """Let the head of a model, or of a pipeline stage that has one, work on `chunk` tokens at a
    time, in place. After tensor_parallel.apply, before sequence_parallel.apply."""
    check(chunk)
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
