"""Tensor parallelism: every matrix of a layer is cut over t ranks (Megatron-LM, arXiv 1909.08053,
section 3).

The second of two matrices undoes what the first one's cut did, so a pair needs one sum, at its end.
For the MLP, cut A by columns and B by rows (and attention likewise: query, key and value by
columns, which is by heads; the output by rows):

    X --f-->  GELU(X A_i) B_i  --g-->  Z = Σ_i GELU(X A_i) B_i          A = [A_1 .. A_t],  B = [B_1; ..; B_t]

    f    identity forward,   all-reduce backward       each rank's X A_i gives a part of ∂L/∂X
    g    all-reduce forward, identity backward         each rank's product is a part of Z

f and g are each other's adjoint. (arXiv 2205.05198 writes f̄ for this g, and has another g: see
sequence_parallel.py.) A layer has two such pairs: 2 all-reduces forward, 2 backward, of b s h
elements each.

The embedding is cut by words, and so is the head's matrix (often the same one). Logits are never
gathered: the loss needs max, Σ exp and the label's logit, three numbers per token instead of V. A
vocabulary that t does not divide is padded on the last ranks; the padding gets no probability, no
gradient, and no place in a checkpoint.

    python tensor_parallel.py      two ranks against one: gradients, collectives and their bytes

What Megatron-LM adds: q, k and v in one matrix, communication inside the matrix multiplication
(user buffers), and copies of key and value heads where t is larger than their number; here t has to
divide it."""

from functools import partial
from math import gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import sharding
from sharding import Shard, shard_parameter, sharding_of


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # autograd may still need what it handed us
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


@torch.compiler.disable
def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """f (section 3), written plainly: x, the same on every rank, enters a region in which each rank
    computes a part. Any shape. ColumnParallelLinear does the same inside of one function, where the
    all-reduce can overlap; the tests hold it to this one."""
    return _Copy.apply(x, group)


@torch.compiler.disable
def reduce_from_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g (section 3): each rank's part leaves the region as the sum, the same on every rank. Any
    shape; x is overwritten."""
    return _Reduce.apply(x.contiguous(), group)


def start_nothing(x: Tensor, group: dist.ProcessGroup):
    """f's forward, in the form of `start_all_reduce`: returns a function that gives x."""
    return lambda: x


def start_all_reduce(x: Tensor, group: dist.ProcessGroup):
    """Begin to sum x over the ranks, in place; returns a function that waits and gives x."""
    work = dist.all_reduce(x, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x

    return finish


class _ColumnParallel(torch.autograd.Function):
    """Y_i = f(x) W_iᵀ + b_i for several W_i that read the same x, written out so that communication
    runs beside computation. f is the pair (on_input, on_gradient): nothing, an all-reduce; sequence
    parallelism has another pair."""

    @staticmethod
    # n weights, then n biases or None
    def forward(ctx, x, on_input, on_gradient, group, n, *weights_and_biases):
        weights = weights_and_biases[:n]
        biases = weights_and_biases[n:]
        ctx.on_input = on_input
        ctx.on_gradient = on_gradient
        ctx.group = group
        ctx.n = n
        ctx.save_for_backward(x)
        # the parameters: they know whether a gradient may wait
        ctx.weights = weights
        whole = on_input(x, group)()  # [b, s, h]
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases))  # [b, s, out / t] each

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        weights = ctx.weights
        wanted = ctx.needs_input_grad[5 : 5 + ctx.n]
        bias_wanted = ctx.needs_input_grad[5 + ctx.n :]
        # on its way while ..
        arriving = ctx.on_input(x, ctx.group) if any(wanted) else None
        rows = [grad.flatten(0, 1) for grad in grads]  # [b s, out / t]
        # .. the input gradient is computed
        dx = rows[0] @ weights[0]
        for row, weight in zip(rows[1:], weights[1:]):
            dx.addmm_(row, weight)
        # on its way while ..
        leaving = ctx.on_gradient(dx.view(*grads[0].shape[:2], -1), ctx.group)
        whole = arriving().flatten(0, 1) if arriving else None  # [b s, h]
        # .. the weight gradients are computed
        d_weights = [
            gpt.weight_gradient(weight, row, whole) if want else None
            for weight, row, want in zip(weights, rows, wanted)
        ]
        d_biases = [row.sum(0) if want else None for row, want in zip(rows, bias_wanted)]
        return leaving(), None, None, None, None, *d_weights, *d_biases


class ColumnParallelLinear(gpt.SharedInput):
    """Y_i = X A_i: each rank computes its columns of Y. f comes first, once for all the layers that
    read X: query, key and value, or gate and up. So this stands where gpt.SharedInput stood and
    owns no weight; the layers keep theirs, cut. x: [b, s, h] -> [b, s, out / t] each."""

    on_input = staticmethod(start_nothing)
    on_gradient = staticmethod(start_all_reduce)

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.group = group

    @torch.compiler.disable
    def forward(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        weights = [linear.weight for linear in linears]
        biases = [
            None if isinstance(linear, gpt.DeferredBiasLinear) else linear.bias
            for linear in linears
        ]
        return list(
            _ColumnParallel.apply(
                x, self.on_input, self.on_gradient, self.group, len(linears), *weights, *biases
            )
        )


class RowParallelLinear(nn.Module):
    """Z = Σ_i Y_i B_i: the input is cut like B's rows, g sums. x: [b, s, in / t] -> [b, s, out].
    The bias is not cut: it is added once, after the sum, by what follows."""

    def __init__(self, linear: gpt.DeferredBiasLinear, group: dist.ProcessGroup):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.group = group
        shard_parameter(self, "weight", Shard(1, group))  # [out, in / t]
        self.multiply = F.linear
        self.reduce = reduce_from_ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.multiply(x, self.weight), self.group)


def local_ids(
    ids: Tensor, n: int, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(this rank's row for each id, 0 where another rank has it; where another rank has it). n:
    rows of each rank. An id that is no word becomes -1, at which lookups fail on every rank, as
    they do on one device."""
    local = ids - group.rank() * n
    elsewhere = (local < 0) | (local >= n)
    return (
        local.masked_fill(elsewhere, 0).masked_fill((ids < 0) | (ids >= vocab_size), -1),
        elsewhere,
    )


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the words that it holds and gives zeros for the others; g sums. tokens:
    [b, s] -> [b, s, h]"""

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup):
        super().__init__()
        self.weight = embedding.weight
        self.group = group
        self.vocab_size = sharding_of(embedding.weight).shape[0]
        shard_parameter(self, "weight", Shard(0, group))  # [V / t, h]
        self.reduce = reduce_from_ranks

    def forward(self, tokens: Tensor) -> Tensor:
        local, elsewhere = local_ids(tokens, self.weight.shape[0], self.vocab_size, self.group)
        x = F.embedding(local, self.weight)
        return self.reduce(x.masked_fill_(elsewhere.unsqueeze(-1), 0), self.group)


class VocabParallelHead(nn.Module):
    """The head with its matrix cut by words. `output` may be tied to the embedding; then it is cut
    already."""

    def __init__(self, head: gpt.Head, group: dist.ProcessGroup):
        super().__init__()
        self.norm = head.norm
        self.output = head.output
        self.group = group
        self.vocab_size = sharding_of(head.output.weight).shape[0]
        if not sharding_of(head.output.weight).placements:
            shard_parameter(self.output, "weight", Shard(0, group))  # [V / t, h]
        self.project = ColumnParallelLinear(group)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """As gpt.Head. Only without targets, to generate, are logits gathered; no gradient goes
        through that."""
        (logits,) = self.project(self.norm(x), self.output)  # [b, s, V / t]
        if targets is None:
            return sharding.gather(
                logits.detach(),
                sharding.Sharding(
                    (*logits.shape[:-1], self.vocab_size), (Shard(logits.dim() - 1, self.group),)
                ),
            )
        return self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = log Σ exp(z) - z_label with z cut by columns;  ∂loss/∂z = softmax(z) - onehot(label), each rank its columns."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, group):
        n = logits.shape[-1]
        # a copy of 16-bit logits, or themselves
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # padding: exp gives 0
        z[..., max(0, vocab_size - group.rank() * n) :] = -torch.inf
        largest = z.amax(-1)  # [b, s]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        z -= largest.unsqueeze(-1)
        local, elsewhere = local_ids(targets, n, vocab_size, group)
        local = local.unsqueeze(-1)  # [b, s, 1]
        target_logit = z.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)
        sums = torch.stack((z.exp_().sum(-1), target_logit))  # [2, b, s]
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(z.div_(sums[0].unsqueeze(-1)), local, elsewhere)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gradient, local, elsewhere = ctx.saved_tensors
        gradient.scatter_add_(-1, local, elsewhere.unsqueeze(-1).to(gradient.dtype) - 1)
        return gradient.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None


@torch.compiler.disable
def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """gpt.cross_entropy, of logits that are cut by words (section 3, "fuse with the cross entropy
    loss"): 3 b s numbers, in at least float32, are reduced. logits: [b, s, V / t], **overwritten**;
    targets: [b, s], global ids. Returns [b, s], on every rank."""
    return _VocabParallelCrossEntropy.apply(logits, targets, vocab_size, group)


def sizes_that_fit(config: gpt.GPTConfig, world: int = 0) -> int:
    """What t has to divide: heads, key-value heads and the MLP's inner size, and the number of
    ranks where it is given."""
    return gcd(config.num_heads, config.num_kv_heads, config.ffn_hidden_size, world)


def check(config: gpt.GPTConfig, t: int, world: int = 0) -> None:
    """Raises ValueError, naming what to change, if t ranks (of `world`) cannot share the model."""
    for field, n in (
        ("num_heads", config.num_heads),
        ("num_kv_heads", config.num_kv_heads),
        ("ffn_hidden_size", config.ffn_hidden_size),
    ):
        if n % t:
            raise ValueError(
                f"tp {t}: must divide {field} {n}; {gpt.divisors(sizes_that_fit(config, world), t)}"
                " would fit this model"
            )


def apply(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Shard `model` over the ranks of `group`, in place; names stay. Best on the meta device, before
    weights exist. Raises ValueError as `check`, or for a model that is cut already."""
    check(model.config, group.size())
    if any(
        isinstance(module, RowParallelLinear | VocabParallelEmbedding | VocabParallelHead)
        for module in model.modules()
    ):
        raise ValueError("this model is tensor parallel already")
    for block in model.blocks.values():
        attention = block.attention
        mlp = block.mlp
        for linear in (attention.query, attention.key, attention.value, mlp.up, mlp.gate):
            if linear is not None:
                # [out / t, in], of experts [E, out / t, in]
                shard_parameter(linear, "weight", Shard(linear.weight.dim() - 2, group))
                shard_parameter(linear, "bias", Shard(0, group))
        attention.project = ColumnParallelLinear(group)
        attention.output = RowParallelLinear(attention.output, group)
        if isinstance(mlp, gpt.MLP):
            mlp.project = ColumnParallelLinear(group)
            mlp.down = RowParallelLinear(mlp.down, group)
        # experts: the same f and g, around all of it
        else:
            shard_parameter(mlp.down, "weight", Shard(2, group))  # [E, out, in / t]
            mlp.enter = partial(copy_to_ranks, group=group)
            mlp.leave = partial(reduce_from_ranks, group=group)
        if isinstance(attention.core, gpt.ExplicitAttention):
            # of the heads
            attention.core.dropout.slice[1] = group.rank()
    tied = (
        model.embedding is not None
        and model.head is not None
        and model.head.output.weight is model.embedding.tokens.weight
    )
    if model.embedding is not None:
        model.embedding.tokens = VocabParallelEmbedding(model.embedding.tokens, group)
    if tied:
        model.head.output.weight = model.embedding.tokens.weight
    if model.head is not None:
        model.head = VocabParallelHead(model.head, group)


# --------------------------------------------------------------------------------------------------


def _lesson(rank: int, world: int):
    from lessons import ranks

    group = torch.distributed.group.WORLD
    with torch.device("meta"):
        model = gpt.GPT(
            gpt.GPTConfig(
                num_layers=2,
                hidden_size=64,
                num_heads=4,
                seq_length=32,
                vocab_size=257,
                dropout=0.1,
            )
        )
    if world > 1:
        apply(model, group)
    sharding.init(model, 0, "cpu", torch.float64)
    tokens = torch.randint(257, (8, 33), generator=torch.Generator().manual_seed(0))
    key = gpt.dropout_key(0, 1, torch.arange(8))
    loss = model(tokens[:, :-1], tokens[:, 1:], key).mean()
    loss.backward()
    gradients = {
        name: sharding.gather(p.grad.clone(), sharding_of(p))
        for name, p in model.named_parameters()
    }
    with ranks.Collectives() as forward:
        y = model.blocks["0"](torch.zeros(8, 32, 64, dtype=torch.float64, requires_grad=True), key)
    with ranks.Collectives() as backward:
        y.sum().backward()
    with ranks.Collectives() as model_forward, torch.no_grad():
        model(tokens[:, :-1], tokens[:, 1:], key)
    return (
        loss.item(),
        gradients,
        sum(p.numel() for p in model.parameters()),
        forward.calls,
        backward.calls,
        model_forward.calls,
    )


def main():
    from lessons import ranks

    ((loss, one, all_of_it, *_),) = ranks.run(_lesson, 1, 1)
    (loss_2, two, part, forward, backward, whole), _ = ranks.run(_lesson, 2, 2)
    # exactly 0 there
    worst = max(
        ((one[n] - two[n]).abs().max() / one[n].abs().max()).item()
        for n in one
        if not n.endswith("key.bias")
    )
    print(
        "a GPT (h 64, L 2, V 257, dropout 0.1, tied embeddings) in float64 on one rank, and cut"
        f" over two: loss {loss:.12f} and {loss_2:.12f},\nlargest relative difference of a gradient"
        f" {worst:.1e}; parameters {all_of_it:,} and {part:,} on a rank (norms, positions and two"
        " biases are whole)"
    )
    print(
        "one layer, by the paper: 2 all-reduces forward and 2 backward of b s h = 8 x 32 x 64"
        f" elements of 8 bytes, {8 * 32 * 64 * 8:,} bytes each"
    )
    for name, calls in (("forward", forward), ("backward", backward)):
        print(f"counted {name:>9}: " + ", ".join(f"{kind} {size:,}" for kind, size in calls))
    print(
        f"the whole model forward: embedding {whole[0][1]:,}; 2 layers"
        f" {', '.join(f'{size:,}' for _, size in whole[1:-2])}; loss"
        f" {' + '.join(f'{size:,}' for _, size in whole[-2:])}, where the logits would be"
        f" {8 * 32 * 257 * 8:,} bytes"
    )


if __name__ == "__main__":
    main()
