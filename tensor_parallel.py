"""Tensor parallelism: every matrix of a layer is sharded over t ranks (Megatron-LM, arXiv
1909.08053, section 3).

Matrices come in pairs, and each pair ends with one sum. The MLP shards A by columns and B by rows.
Attention shards query, key and value by columns (heads), and the output by rows. (nn.Linear stores
the transpose: columns of A are rows of its weight, dimension 0.)

    X --f-->  GELU(X A_i) B_i  --g-->  Z = Σ_i GELU(X A_i) B_i       A = [A_1 .. A_t]
                                                                     B = [B_1; ..; B_t]
    f    identity in forward,   all-reduce in backward     each rank has one term of the sum ∂L/∂X
    g    all-reduce in forward, identity in backward       each rank has one term of the sum Z

f and g are each other's adjoint. f copies X to t ranks, so its gradient is a sum of t terms. g sums
t terms, so the gradient of each is a copy. A layer has two such pairs, which is 2 all-reduces of
b s h elements in forward and 2 in backward. In backward they overlap with the weight gradients
(sequence_parallel.py).

    python -m course.tensor_parallel   two ranks against one: gradients, collectives and their bytes
    picture: docs/figures/ranks_tensor.svg

The embedding is sharded by vocabulary, and so is the head's matrix (often the same one). Training
never gathers logits: the loss needs max, Σ exp and the target's logit, three numbers per token
instead of V. A vocabulary that t does not divide is padded on the last ranks. On GPUs it is padded
to a multiple of 128 t, also for t = 1, for which cuBLAS has faster kernels. The padding has no
probability and no gradient, and is not in checkpoints.

With fewer key and value heads than ranks, r = t / a_kv neighbours attend with the same head. Its
columns are sharded too, so weights and checkpoints know no copies. The neighbours exchange their
d / r columns of k and v, and in backward each sums its columns' gradients over the r copies:

    t 4, a_kv 2, d 8    rank 0: columns 0-3 of head 0  <->  rank 1: columns 4-7 of head 0
                        rank 2: columns 0-3 of head 1  <->  rank 3: columns 4-7 of head 1

Not covered: q, k and v in one matrix; communication inside the matrix multiplication (user
buffers); copies of the key and value weights (vLLM), which send nothing in forward.
"""

from math import gcd

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

import families
import gpt
import sharding
from base import compiling
from base.cross_entropy import gradient_of_logits
from base.model_config import FieldError, GPTConfig, divisors
from sharding import Shard, shard_parameter, sharding_of

# --- f and g --------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # Autograd may still need the gradient that it handed over, so a copy is reduced.
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


@compiling.left_out
def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """f (section 3): x, equal on all ranks, enters a region where each rank computes a part. x has
    any shape."""
    return _Copy.apply(x, group)


@compiling.left_out
def reduce_from_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g (section 3): the ranks' parts leave the region as their sum. x has any shape, and is
    overwritten."""
    return _Reduce.apply(x.contiguous(), group)


class Communication(nn.Module):
    """f or g as a module, so that sequence parallelism can replace it."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.group = group


class CopyToRanks(Communication):
    """f as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return copy_to_ranks(x, self.group)


class ReduceFromRanks(Communication):
    """g as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_ranks(x, self.group)


# --- linear layers --------------------------------------------------------------------------------


class ColumnParallelInput(gpt.ProjectTogether):
    """Y_i = f(X) A_i: each rank computes its columns of Y. x: [b, s, h] -> [b, s, out / t] each.

    It replaces gpt.ProjectTogether, so that f runs once for all layers that read X: query, key and
    value, or gate and up. It has no weights: `apply` shards those of the layers.
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.enter = CopyToRanks(group)

    def forward(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        x = self.enter(x)
        return [linear(x) for linear in linears]


class RowParallelLinear(nn.Module):
    """Z = Σ_i Y_i B_i: the input is sharded like B's rows, g sums. [b, s, in / t] -> [b, s, out]

    The bias is not sharded: the next module adds it once, after the sum.
    """

    def __init__(self, linear: gpt.DeferredBiasLinear, group: dist.ProcessGroup):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.group = group
        shard_parameter(self, "weight", Shard(1, group))  # [out, in / t]
        # fp8.py, pipeline_parallel.py and inference/ replace this product.
        self.linear = F.linear
        self.reduce = ReduceFromRanks(group)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.linear(x, self.weight))


# --- attention ------------------------------------------------------------------------------------


def exchange_copies(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each of r neighbours sends parts[n] to the n-th. parts: [r, ..] -> [r, ..], by sender"""
    r = len(parts)
    first = group.rank() // r * r
    counts = [int(first <= rank < first + r) for rank in range(group.size())]
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, counts, counts, group=group)
    return received


class _GatherHeads(torch.autograd.Function):
    """All-gather of a head's columns over its r copies | reduce-scatter of their gradients."""

    @staticmethod
    def forward(ctx, x, r, group):
        ctx.r, ctx.group = r, group
        parts = x.expand(r, *x.shape).contiguous()  # [r, .., d / r]
        return exchange_copies(parts, group).movedim(0, -2).flatten(-2)  # [.., d]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        parts = grad.unflatten(-1, (ctx.r, -1)).movedim(-2, 0).contiguous()  # [r, .., d / r]
        return exchange_copies(parts, ctx.group).sum(0), None, None


class GatherHeads(Communication):
    """Makes whole the key and value head that this rank and its neighbours hold columns of.
    q: [b, s, a d / t]; k and v: [b, s, d / r] -> [b, s, d]"""

    def __init__(self, r: int, group: dist.ProcessGroup):
        super().__init__(group)
        self.r = r

    @compiling.left_out
    def forward(self, projected: list[Tensor]) -> list[Tensor]:
        q, *k_and_v = projected
        whole = _GatherHeads.apply(torch.stack(k_and_v), self.r, self.group)  # [2, b, s, d]
        return [q, *whole.unbind()]


class ParallelHeadNorms(families.HeadNorms):
    """The norms of this rank's queries and keys. Their two weights are replicated, and each rank's
    heads give a part of the gradients: one f sums both.
    q: [b, a / t, s, d]; k: [b, a_kv / t, s, d]"""

    def __init__(self, norms: families.HeadNorms, group: dist.ProcessGroup):
        nn.Module.__init__(self)
        self.query_norm = norms.query_norm
        self.key_norm = norms.key_norm
        self.enter = CopyToRanks(group)

    def forward(self, heads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        q, k = heads
        weights = torch.stack((self.query_norm.weight, self.key_norm.weight))  # [2, d]
        of_query, of_key = self.enter(weights).unbind()
        q = functional_call(self.query_norm, {"weight": of_query}, q)
        return q, functional_call(self.key_norm, {"weight": of_key}, k)


# --- the vocabulary -------------------------------------------------------------------------------


def local_ids(
    ids: Tensor, n: int, vocab_size: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(local row of each id, 0 where another rank holds it; a mask of the ids held elsewhere).

    n: rows of each rank. An id beyond the vocabulary becomes -1, so that lookups fail on every
    rank, as they do on one device.
    """
    local = ids - group.rank() * n
    elsewhere = (local < 0) | (local >= n)
    beyond = (ids < 0) | (ids >= vocab_size)
    return local.masked_fill(elsewhere, 0).masked_fill(beyond, -1), elsewhere


def columns_of_rank(n: int, vocab_size: int, group: dist.ProcessGroup) -> int:
    """How many of this rank's n columns are in the vocabulary; padding follows."""
    return min(n, max(0, vocab_size - group.rank() * n))


class VocabParallelEmbedding(nn.Module):
    """The sum, by g, of each rank's lookups; a rank gives zeros for tokens that it does not hold.
    tokens: [b, s] -> [b, s, h]"""

    is_lookup = True

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup):
        super().__init__()
        self.weight = embedding.weight
        self.group = group
        self.vocab_size = sharding_of(embedding.weight).shape[0]
        shard_parameter(self, "weight", Shard(0, group))  # [V / t, h]
        # Weights in fewer bits have another one (inference/quantization.py).
        self.lookup = F.embedding
        self.reduce = ReduceFromRanks(group)

    def forward(self, tokens: Tensor) -> Tensor:
        local, elsewhere = local_ids(tokens, self.weight.shape[0], self.vocab_size, self.group)
        x = self.lookup(local, self.weight)
        return self.reduce(x.masked_fill_(elsewhere.unsqueeze(-1), 0))


class VocabParallelHead(nn.Module):
    """The head with its matrix sharded by vocabulary. If `output` is tied to the embedding, it is
    sharded already."""

    def __init__(self, head: gpt.Head, group: dist.ProcessGroup):
        super().__init__()
        self.norm = head.norm
        self.output = head.output
        self.group = group
        self.vocab_size = sharding_of(head.output.weight).shape[0]
        if not sharding_of(head.output.weight).placements:
            shard_parameter(self.output, "weight", Shard(0, group))  # [V / t, h]
        # BERT has one.
        shard_parameter(self.output, "bias", Shard(0, group))  # [V / t]
        self.project = ColumnParallelInput(group)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """As in gpt.Head. Without targets (generation) the logits are gathered, without a
        gradient."""
        (logits,) = self.project(self.norm(x), self.output)  # [b, s, V / t]
        if targets is not None:
            return self.loss(logits, targets)
        return gather_logits(logits, self.vocab_size, self.group)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.group)


def gather_logits(logits: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """[.., V / t] of each rank -> [.., V] on every rank, without padding and without a gradient."""
    *rows, columns = logits.shape
    shape, padded = (*rows, vocab_size), (*rows, columns * group.size())
    record = sharding.Sharding(shape, (Shard(len(rows), group),), padded=padded)
    return sharding.gather(logits.detach(), record)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = log Σ exp(z) - z_target, ∂loss/∂z = softmax(z) - onehot(target), with z sharded by
    vocabulary."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, group):
        n = logits.shape[-1]
        # `z` is a copy of 16-bit logits, or the logits themselves.
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # exp of the padding is 0.
        z[..., columns_of_rank(n, vocab_size, group) :] = -torch.inf
        largest = z.amax(-1)  # [b, s]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        z -= largest.unsqueeze(-1)
        local, elsewhere = local_ids(targets, n, vocab_size, group)
        target_logit = z.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        sums = torch.stack((z.exp_().sum(-1), target_logit))  # [2, b, s]
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(z.div_(sums[0].unsqueeze(-1)), local, elsewhere)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        p, local, elsewhere = ctx.saved_tensors
        return gradient_of_logits(p, local, grad, elsewhere).to(ctx.dtype), None, None, None


@compiling.left_out
def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """The loss of base/cross_entropy.py for logits that are sharded by vocabulary (section 3, "fuse
    with the cross entropy loss"). 3 b s numbers, in at least float32, are reduced.

    logits: [b, s, V / t], **overwritten**; targets: [b, s], global ids. Returns [b, s], on every
    rank.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, vocab_size, group)


def reduce_statistics(
    largest: Tensor, total: Tensor, target_logit: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """max z, Σ exp(z - max z) and z_target of this rank's columns, [..] each -> of the whole rows.
    z_target is 0 where another rank has the target."""
    of_rows = largest.clone()
    dist.all_reduce(of_rows, dist.ReduceOp.MAX, group=group)
    sums = torch.stack((total * (largest - of_rows).exp(), target_logit))  # [2, ..]
    dist.all_reduce(sums, group=group)
    return of_rows, *sums


# --- check and apply ------------------------------------------------------------------------------


# The sizes that t ranks share. Those of experts may be 0.
SHARED = "num_heads num_kv_heads ffn_hidden_size expert_ffn_size shared_ffn_size".split()


def shares_keys(config: GPTConfig, t: int) -> bool:
    """Whether each of t ranks has some whole key heads, or as many columns of one as its
    neighbours."""
    heads = config.num_kv_heads
    return heads % t == 0 or (t % heads == 0 and config.head_dim % config.key_copies(t) == 0)


def sizes_that_fit(config: GPTConfig, near: int, world: int = 0) -> list[int]:
    """The three t that fit and are nearest to a number: divisors of the heads, the MLPs' inner
    sizes and the number of ranks, for which `shares_keys` is true. world: 0 for any number."""
    shared = gcd(*(getattr(config, name, 0) for name in SHARED if name != "num_kv_heads"), world)
    return divisors(shared, near, lambda t: shares_keys(config, t))


def check(config: GPTConfig, t: int, world: int = 0) -> None:
    """Raises FieldError if t ranks (of `world`) cannot share the model."""
    for field in SHARED:
        n = getattr(config, field, 0)
        of_keys = field == "num_kv_heads"
        if not (shares_keys(config, t) if of_keys else n % t == 0):
            rule = f"must divide {{{field}}}" + ", or a multiple cut each head evenly" * of_keys
            fits = sizes_that_fit(config, t, world)
            raise FieldError("tp", t, rule, fits, **{field: n})


def vocabulary_multiple(of_rank: int | None, device: str, t: int) -> int:
    """The multiple to which `pad_vocabulary` pads a vocabulary that t ranks share; 1: no padding.
    of_rank: the multiple for one rank."""
    multiple = of_rank or (128 if device == "cuda" else 1)
    return 1 if multiple == 1 else multiple * t


def pad_vocabulary(
    model: gpt.GPT,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    of_rank: int | None = None,
) -> None:
    """Add rows of zeros to the embedding and the head's matrix of a model or pipeline stage, in
    place. Each rank of `group` then has a multiple of `of_rank` rows, by default 128 on a GPU. Call
    it before `apply`. (Megatron-LM: make-vocab-size-divisible-by.)

    With 50,257 tokens, rows of 16-bit logits begin at any even address, and cuBLAS cannot use its
    fast kernels in three products: z = x Wᵀ, ∂x = ∂z W, ∂W = ∂zᵀ x. With 50,304 = 393 x 128 each
    row begins at a multiple of 256 bytes.
    """
    multiple = vocabulary_multiple(of_rank, device.type, group.size() if group else 1)
    if multiple == 1:
        return
    tokens = model.embedding and model.embedding.tokens
    # A reward model has another head.
    output = model.head.output if isinstance(model.head, gpt.Head) else None
    tied = tokens and output and output.weight is tokens.weight
    if tokens:
        sharding.pad_parameter(tokens, "weight", 0, multiple)
    if tied:
        output.weight = tokens.weight
    elif output:
        sharding.pad_parameter(output, "weight", 0, multiple)
    if output and output.bias is not None:
        sharding.pad_parameter(output, "bias", 0, multiple)


def apply(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Shard `model` over the ranks of `group`, in place; names do not change, nor do experts.

    Call it on the meta device if possible, before weights exist. Raises FieldError as `check`,
    ValueError for a model that is sharded already.
    """
    check(model.config, group.size())
    parallel = RowParallelLinear | VocabParallelEmbedding | VocabParallelHead
    if any(isinstance(module, parallel) for module in model.modules()):
        raise ValueError("this model is tensor parallel already")
    for module in list(model.modules()):
        if isinstance(module, gpt.Attention):
            shard_attention(module, group)
        elif isinstance(module, gpt.MLP):
            shard_columns(module.up, group)
            if module.gate is not None:
                shard_columns(module.gate, group)
            module.project = ColumnParallelInput(group)
            module.down = RowParallelLinear(module.down, group)
        elif hasattr(module, "shard_heads"):
            # A bias of the scores: ALiBi's, T5's.
            module.shard_heads(group)
    shard_vocabulary(model, group)


def shard_attention(attention: gpt.Attention, group: dist.ProcessGroup) -> None:
    for linear in (attention.query, attention.key, attention.value):
        shard_columns(linear, group)
    for name, child in list(attention.named_children()):
        # Cross attention has two: one for the query, one for key and value (models/t5.py).
        if isinstance(child, gpt.ProjectTogether):
            setattr(attention, name, ColumnParallelInput(group))
    if isinstance(attention, families.LatentAttention):
        attention.share_rope_key = CopyToRanks(group)
    elif (r := attention.head_dim // attention.key.weight.shape[0]) > 1:
        attention.gather_heads = GatherHeads(r, group)
    attention.output = RowParallelLinear(attention.output, group)
    if isinstance(attention.head_norms, families.HeadNorms):
        attention.head_norms = ParallelHeadNorms(attention.head_norms, group)
    if isinstance(attention.core, gpt.ExplicitAttention):
        # Dropout masks depend on global coordinates, so the module must know its heads.
        attention.core.dropout.shard_index[1] = group.rank()


def shard_columns(linear: nn.Linear, group: dist.ProcessGroup) -> None:
    shard_parameter(linear, "weight", Shard(0, group))  # [out / t, in]
    shard_parameter(linear, "bias", Shard(0, group))


def shard_vocabulary(model: gpt.GPT, group: dist.ProcessGroup) -> None:
    """Shard the embedding and the head, which a pipeline stage may lack; ties are kept. Those of a
    model without a vocabulary (models/vit.py) stay whole."""
    embedding = model.embedding if model.embedding and model.embedding.tokens else None
    head = model.head if isinstance(model.head, gpt.Head) else None
    if embedding is not None:
        tied = head is not None and head.output.weight is embedding.tokens.weight
        embedding.tokens = VocabParallelEmbedding(embedding.tokens, group)
        if tied:
            head.output.weight = embedding.tokens.weight
    if head is not None:
        model.head = VocabParallelHead(head, group)
