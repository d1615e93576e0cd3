"""Sequence parallelism: what tensor parallelism leaves whole is cut along the sequence (Korthikanti
et al., arXiv 2205.05198, section 4.2.2).

Tensor parallelism cuts the matrices, but every rank still computes and keeps the same LayerNorm,
dropout and residual: 10 sbh of a layer's 34 sbh bytes (two LayerNorms 4, two dropout masks 2, two
matrix inputs 4). Those act on each token alone, so each rank can do s / t of the tokens. An
all-reduce is a reduce-scatter and an all-gather; put the slice between the two, and the bytes on
the wire stay the same:

    tensor      f: identity | all-reduce          attention or MLP         f̄: all-reduce     | identity
    sequence    g: all-gather | reduce-scatter    attention or MLP         ḡ: reduce-scatter | all-gather      (forward | backward)

    [b, s/t, h] --LayerNorm--> --g--> [b, s, h] --X A_i .. B_i--> parts of [b, s, h] --ḡ--> [b, s/t,
    h] --dropout, residual-->

Two things come with it. The input of X A_i is kept for backward as its slice, [b, s/t, h], and
gathered once more there, which is an extra all-gather, in flight while the input gradient is
computed. And a weight that is whole but has seen only s/t of the tokens (norms, positions, the
biases after ḡ) has a part of its gradient on each rank: such weights pass through identity |
all-reduce on their way into the layer, together, as one flat all-reduce for each layer.

    python sequence_parallel.py      two ranks: gradients, bytes on the wire, bytes kept, beside tensor parallelism

The letters are those of figures 4 and 5; f̄ is what arXiv 1909.08053 calls g.

What Megatron-LM adds: activations stored [s, b, h], so that a slice of the sequence is contiguous
and the copies in `start_gather` and `start_scatter` are not needed. It sums the norms' gradients
once a step in the optimizer; here it happens where the weights are used, for each micro-batch, so
that nothing is owed elsewhere."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import sharding
import tensor_parallel
from sharding import sharding_of

# their names from torch 2.13 on
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_gather(x: Tensor, group: dist.ProcessGroup):
    """Begin to all-gather slices of the sequence. x: [b, s/t, h]; returns a function that waits and
    gives [b, s, h]."""
    slices = x.new_empty(group.size() * x.shape[0], *x.shape[1:])  # [t b, s/t, h]
    work = all_gather(slices, x.contiguous(), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return (
            slices.unflatten(0, (-1, x.shape[0])).transpose(0, 1).flatten(1, 2)
        )  # [b, t s/t, h]: a copy if b > 1

    return finish


def start_scatter(x: Tensor, group: dist.ProcessGroup):
    """Begin to reduce-scatter. x: [b, s, h], each rank's part of a sum; returns a function that
    waits and gives [b, s/t, h]."""
    slices = (
        x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    )  # [t b, s/t, h]: a copy if b > 1
    mine = torch.empty_like(slices[: x.shape[0]])
    work = reduce_scatter(mine, slices, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return mine

    return finish


class _Pair(torch.autograd.Function):
    """A collective and its adjoint: `there` forward, `back` backward."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group = group
        ctx.back = back
        return there(x, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.back(grad, ctx.group)(), None, None, None


@torch.compiler.disable
def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g (figure 5), written plainly: slices [b, s/t, h] become the whole [b, s, h] on every rank.
    ColumnParallelLinear does the same and multiplies; the tests hold it to this one."""
    return _Pair.apply(x, group, start_gather, start_scatter)


@torch.compiler.disable
def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """ḡ (figure 5): parts of a sum [b, s, h] become each rank's slice of the sum, [b, s/t, h]."""
    return _Pair.apply(x, group, start_scatter, start_gather)


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """The same with g in the place of f: the input arrives as slices, is kept as slices, and is
    gathered again in backward. x: [b, s/t, h] -> [b, s, out / t] each."""

    on_input = staticmethod(start_gather)
    on_gradient = staticmethod(start_scatter)


class SlicedPositions(nn.Module):
    """x + a vector for each position, where x is the n-th slice of the sequence. x: [b, s/t, h]"""

    def __init__(self, positions: gpt.LearnedPositions, n: int, t: int):
        super().__init__()
        self.weight = positions.weight
        self.n = n
        self.t = t

    def forward(self, x: Tensor) -> Tensor:
        if self.t * x.shape[1] > self.weight.shape[0]:
            raise ValueError(
                f"a sequence of {self.t * x.shape[1]} tokens is longer than seq_length"
                f" {self.weight.shape[0]}"
            )
        return x + self.weight[self.n * x.shape[1] : (self.n + 1) * x.shape[1]]


class _CopyWeights(torch.autograd.Function):
    """Identity forward; backward, one all-reduce of all the gradients laid side by side."""

    @staticmethod
    def forward(ctx, group, *weights):
        ctx.group = group
        return tuple(w.view_as(w) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        flat = torch.cat([grad.flatten() for grad in grads])
        # 16-bit parts are summed in 32
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        dist.all_reduce(flat, group=ctx.group)
        return None, *(
            part.view_as(grad).to(grad.dtype)
            for part, grad in zip(flat.split([grad.numel() for grad in grads]), grads)
        )


def synchronise(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the parameters in `module` that learn and are not cut, which see a slice of the sequence,
    pass through identity | all-reduce, together, whenever it runs: while its forward runs, their
    places hold the copies."""
    places = [
        (m, name)
        for m in module.modules()
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad and not sharding_of(p).placements
    ]
    forward = module.forward

    @torch.compiler.disable
    def put(tensors) -> None:
        for (m, name), tensor in zip(places, tensors):
            m._parameters[name] = tensor

    @torch.compiler.disable
    def copies() -> tuple[list, tuple]:
        parameters = [m._parameters[name] for m, name in places]
        return parameters, _CopyWeights.apply(group, *parameters)

    def synchronised(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        parameters, stand_ins = copies()
        put(stand_ins)
        try:
            return forward(*args, **kwargs)
        finally:
            put(parameters)

    if places:
        module.forward = synchronised


def check(config: gpt.GPTConfig, t: int) -> None:
    """Raises ValueError, naming what to change, if sequences cannot be cut in t."""
    if config.seq_length % t:
        low = config.seq_length // t * t
        raise ValueError(
            f"seq_length {config.seq_length}: must be divisible by tp {t} under sequence"
            f" parallelism; {f'{low} or ' if low else ''}{low + t} would fit"
        )


def cut_sequence(model: gpt.GPT, group: dist.ProcessGroup, cut: bool = True) -> None:
    """g and ḡ around each tensor-parallel region; or, with cut False, f and its partner again: to
    generate, for a step of one token has nothing to cut."""
    column, enter, leave = (
        (ColumnParallelLinear, gather_sequence, scatter_sequence)
        if cut
        else (
            tensor_parallel.ColumnParallelLinear,
            tensor_parallel.copy_to_ranks,
            tensor_parallel.reduce_from_ranks,
        )
    )
    for module in model.modules():
        if isinstance(
            module, (tensor_parallel.RowParallelLinear, tensor_parallel.VocabParallelEmbedding)
        ):
            # ḡ instead of the all-reduce
            module.reduce = leave
        if hasattr(module, "project"):
            module.project = column(group)
        # experts
        if hasattr(module, "enter"):
            module.enter = partial(enter, group=group)
            module.leave = partial(leave, group=group)


def apply(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Turn a model that `tensor_parallel.apply` has cut over the same group into a
    sequence-parallel one, in place. It takes tokens [b, s] with s divisible by t. Raises ValueError
    as `check`, or for a model that is not cut."""
    check(model.config, group.size())
    parts = [
        part for part in (model.embedding, *model.blocks.values(), model.head) if part is not None
    ]
    cut = (
        tensor_parallel.ColumnParallelLinear,
        tensor_parallel.RowParallelLinear,
        tensor_parallel.VocabParallelEmbedding,
    )
    # a pipeline's chunk may be empty
    if parts and {module.group for module in model.modules() if isinstance(module, cut)} != {group}:
        raise ValueError(
            "sequence parallelism works on a model that is cut over the same group: call"
            " tensor_parallel.apply(model, group) first"
        )
    if any(isinstance(module, ColumnParallelLinear) for module in model.modules()):
        raise ValueError("this model is sequence parallel already")
    if any("forward" in vars(block) for block in model.blocks.values()):
        raise ValueError(
            "this model recomputes already: recompute.apply comes after"
            " sequence_parallel.apply, to run what it adds again too"
        )
    cut_sequence(model, group)
    for module in model.modules():
        if isinstance(module, gpt.BiasDropoutAdd):
            # of the sequence
            module.dropout.slice[1] = group.rank()
        elif isinstance(module, gpt.Embedding):
            module.dropout.slice[1] = group.rank()
            if module.positions is not None:
                module.positions = SlicedPositions(module.positions, group.rank(), group.size())
    for part in parts:
        synchronise(part, group)


# --------------------------------------------------------------------------------------------------


def _lesson(rank: int, kind: str):
    import recompute
    from lessons import ranks

    group = dist.group.WORLD
    with torch.device("meta"):
        model = gpt.GPT(
            gpt.GPTConfig(
                num_layers=2,
                hidden_size=64,
                num_heads=4,
                seq_length=64,
                vocab_size=257,
                dropout=0.1,
            )
        )
    if kind != "one rank":
        tensor_parallel.apply(model, group)
    if kind == "sequence":
        apply(model, group)
    sharding.init(model, 0, "cpu", torch.float64)
    tokens = torch.randint(257, (8, 65), generator=torch.Generator().manual_seed(0))
    key = gpt.dropout_key(0, 1, torch.arange(8))
    model(tokens[:, :-1], tokens[:, 1:], key).mean().backward()
    gradients = {
        name: sharding.gather(p.grad.clone(), sharding_of(p))
        for name, p in model.named_parameters()
    }
    x = torch.zeros(
        8,
        64 // (group.size() if kind == "sequence" else 1),
        64,
        dtype=torch.float64,
        requires_grad=True,
    )
    with ranks.Collectives() as forward:
        y = model.blocks["0"](x, key)
    with ranks.Collectives() as backward:
        y.sum().backward()
    # the formula is for 16 bits
    block = model.blocks["0"].bfloat16()
    x = x.detach().bfloat16().requires_grad_()
    kept = recompute.saved_bytes(lambda: block(x, key), *block.parameters())
    return gradients, kept, forward.calls, backward.calls


def main():
    import recompute
    from lessons import ranks

    one = ranks.run(_lesson, 1, "one rank")[0][0]
    print(
        "one layer of a GPT (h 64, a 4, s 64, b 8, dropout 0.1, float64) on two ranks; bytes sent"
        " are those of the whole tensor, b s h x 8 = 262,144"
    )
    for kind in ("tensor", "sequence"):
        gradients, kept, forward, backward = ranks.run(_lesson, 2, kind)[0]
        worst = max(
            ((one[n] - g).abs().max() / one[n].abs().max()).item()
            for n, g in gradients.items()
            if not n.endswith("key.bias")
        )
        formula = recompute.layer_bytes(64, 8, 64, 4, 2, kind == "sequence")
        print(
            f"{kind} parallel: largest relative difference of a gradient from one rank's"
            f" {worst:.1e} (key biases left out: exactly 0); kept for backward, in bf16: {kept:,}"
            f" bytes, by the paper {formula:,.0f}"
        )
        for name, calls in (("forward", forward), ("backward", backward)):
            print(f"{name:>10}: " + ", ".join(f"{what} {size:,}" for what, size in calls))
    print(
        "an all-reduce sends what a reduce-scatter and an all-gather send together: the same bytes,"
        " but for backward's second gathers\nand the one flat all-reduce of the gradients of six"
        " weights of h elements"
    )


if __name__ == "__main__":
    main()
