"""Which parameters a rank holds: their shapes after tensor, expert and pipeline parallelism.

A model is an embedding, blocks with one MLP or with experts, and a head. fsdp.py makes units of
their parameters: all of one layer, or with expert parallelism the experts apart from the rest. A
unit is flattened to [N, T], one row for each of N data-parallel ranks (flat_parameters.py).

    of_rank(model, layout, rank)     how many of each part a pipeline rank holds
    sizes(model, layout)             of each part: its parameters, and its units [N, T]

Letters: h hidden, t tensor-parallel ranks, V vocabulary, E experts, N data-parallel ranks that
share a unit.

    python -m planning.shapes        the units of GPT-3 175B under --tp 8 and 16 data-parallel ranks
"""

import math
from functools import lru_cache
from typing import NamedTuple

from flat_parameters import shard_dim
from model_config import GPTConfig
from planning.inputs import Layout

# --- parameters -----------------------------------------------------------------------------------


class Parameter(NamedTuple):
    # on this rank, after tensor and expert parallelism
    shape: tuple[int, ...]
    # over whose ranks it is sharded: "ep", "tp", both, or nobody's
    groups: tuple[str, ...] = ()
    # whether zb-h1 computes its gradient later than those of biases and norms
    waits: bool = False
    # the last pipeline stage's copy of the embedding
    is_copy: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def of_norm(model: GPTConfig) -> list[Parameter]:
    """A weight; LayerNorm has a bias too."""
    return [Parameter((model.hidden_size,))] * (1 if model.llama else 2)


def of_columns(rows: int, columns: int, t: int, bias: bool) -> list[Parameter]:
    """A column-parallel matrix [rows / t, columns], and its bias."""
    groups = ("tp",) if t > 1 else ()
    matrix = Parameter((rows // t, columns), groups, waits=True)
    return [matrix, Parameter((rows // t,), groups)] if bias else [matrix]


def of_rows(rows: int, columns: int, t: int, bias: bool) -> list[Parameter]:
    """A row-parallel matrix [rows, columns / t], and its bias, which is whole."""
    groups = ("tp",) if t > 1 else ()
    matrix = Parameter((rows, columns // t), groups, waits=True)
    return [matrix, Parameter((rows,))] if bias else [matrix]


def of_mlp(model: GPTConfig, t: int) -> list[Parameter]:
    h, ffn, bias = model.hidden_size, model.ffn_hidden_size, not model.llama
    gate = of_columns(ffn, h, t, False) if model.llama else []
    return gate + of_columns(ffn, h, t, bias) + of_rows(h, ffn, t, bias)


def of_experts(model: GPTConfig, t: int, ep: int) -> list[Parameter]:
    """The router is whole; of the E experts this rank has E / ep, and of these a shard of ffn."""
    h, ffn, e = model.hidden_size, model.ffn_hidden_size, model.num_experts
    groups = ("ep",) * (ep > 1) + ("tp",) * (t > 1)
    up = Parameter((e // ep, ffn // t, h), groups)
    down = Parameter((e // ep, h, ffn // t), groups)
    return [Parameter((e, h))] + [up] * (2 if model.llama else 1) + [down]


def of_block(model: GPTConfig, t: int, mlp: list[Parameter]) -> list[Parameter]:
    h, bias = model.hidden_size, not model.llama
    kv = model.num_kv_heads * model.head_dim
    query = of_columns(h, h, t, bias)
    key_and_value = of_columns(kv, h, t, bias) * 2
    output = of_rows(h, h, t, bias)
    return of_norm(model) + query + key_and_value + output + of_norm(model) + mlp


def of_vocabulary(model: GPTConfig, t: int, **fields) -> Parameter:
    """[V / t, h], padded where t does not divide V."""
    shape = -(-model.vocab_size // t), model.hidden_size
    return Parameter(shape, ("tp",) if t > 1 else (), **fields)


def of_embedding(model: GPTConfig, t: int) -> list[Parameter]:
    positions = [] if model.llama else [Parameter((model.seq_length, model.hidden_size))]
    return [of_vocabulary(model, t), *positions]


def of_head(model: GPTConfig, t: int, p: int, chunked: bool) -> list[Parameter]:
    """On one stage a GPT's head has the matrix of the embedding, which counts there."""
    if not model.llama and p == 1:
        return of_norm(model)
    # the chunked head computes the gradient of its matrix at once
    matrix = of_vocabulary(model, t, waits=not chunked, is_copy=not model.llama)
    return [*of_norm(model), matrix]


# --- units ----------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Parameters that fsdp.py sends in one collective: [N, T]."""

    # dp, or edp: the ranks that hold the same experts
    group: str
    # in the group
    ranks: int
    # ranks that share the unit: all, or 1 in stage 0
    N: int
    T: int
    # numbers in its parameters, without padding
    size: int
    # numbers that stages 1 and 2 hold: parameters with room for the padding
    padded: int
    # under zb-h1 some of its gradients come later than others
    mixed: bool


class Part(NamedTuple):
    """The embedding, a block, or the head."""

    # numbers in its parameters
    size: int
    # numbers in those that every tensor-parallel rank holds whole
    whole: int
    units: tuple[Unit, ...]
    # the groups over which parameters are sharded, of each kind of parameter
    groups: frozenset[tuple[str, ...]]


class Sizes(NamedTuple):
    embedding: Part
    block: Part
    # a block with experts; None where the model has none
    expert_block: Part | None
    head: Part
    # of the tied embedding, what one rank updates of it
    tied: int


def make_unit(parameters: list[Parameter], group: str, ranks: int, n: int) -> Unit:
    row = padded = 0
    for p in parameters:
        dim = shard_dim(p.shape, n)
        # rounded up
        shard = p.size // p.shape[dim] * -(-p.shape[dim] // n)
        row += shard
        # not along dimension 0: the parameter, and a copy of its shard (fsdp.share_own_shards)
        padded += n * shard if dim == 0 else p.size + copied_shard(p, dim, shard, n)
    mixed = len({p.waits for p in parameters}) > 1
    return Unit(group, ranks, n, row, sum(p.size for p in parameters), padded, mixed)


def copied_shard(p: Parameter, dim: int, shard: int, n: int) -> int:
    """A shard is a view of the padded parameter where the dimensions before have size 1."""
    return n * shard if math.prod(p.shape[:dim]) == 1 else shard


def make_part(parameters: list[Parameter], layout: Layout) -> Part:
    experts = [p for p in parameters if "ep" in p.groups]
    others = [p for p in parameters if "ep" not in p.groups]
    units = []
    groups = set()
    for group, ranks, some in (("edp", layout.dp // layout.ep, experts), ("dp", layout.dp, others)):
        if some and layout.dp > 1:
            units.append(make_unit(some, group, ranks, ranks if layout.zero_stage else 1))
        shards = (group,) if layout.zero_stage and layout.dp > 1 else ()
        groups |= {p.groups + shards for p in some if not p.is_copy}
    size = sum(p.size for p in parameters)
    whole = sum(p.size for p in parameters if not p.groups)
    return Part(size, whole, tuple(units), frozenset(groups))


def sizes(model: GPTConfig, layout: Layout) -> Sizes:
    """Of each part of the model, on one rank."""
    chunked = layout.head_chunk > 0
    sharded = min(layout.zero_stage, 1)
    return _sizes(model, layout.tp, layout.ep, layout.dp, sharded, min(layout.pp, 2), chunked)


@lru_cache(maxsize=4096)
def _sizes(model, t: int, ep: int, dp: int, zero_stage: int, p: int, chunked: bool) -> Sizes:
    layout = Layout(dp=dp, ep=ep, zero_stage=zero_stage)
    embedding = of_embedding(model, t)
    expert_block = None
    if getattr(model, "num_experts", 0):
        expert_block = make_part(of_block(model, t, of_experts(model, t, ep)), layout)
    tied = make_unit(embedding[:1], "dp", dp, dp if zero_stage else 1).T
    return Sizes(
        make_part(embedding, layout),
        make_part(of_block(model, t, of_mlp(model, t)), layout),
        expert_block,
        make_part(of_head(model, t, p, chunked), layout),
        tied,
    )


def expert_rows(model: GPTConfig, layout: Layout) -> int:
    """Rows that a rank's experts get from one micro-batch, where the load is even: k for each of
    b s tokens, but for those that a capacity drops."""
    rows = layout.micro_batch_size * model.seq_length * model.router_topk
    if not model.capacity_factor:
        return rows
    e = model.num_experts
    factor = min(model.capacity_factor, e)
    # as routers.Routing
    capacity = math.ceil(round(factor * rows / e, 6))
    return min(rows, e * capacity)


# --- the parts of a pipeline rank -----------------------------------------------------------------


class Chunk(NamedTuple):
    """One of the v stages of a pipeline rank."""

    first: bool
    last: bool
    # numbers of blocks
    dense: int
    experts: int
    # whether the last block has experts
    ends_in_experts: bool


def experts_before(model: GPTConfig, layer: int) -> int:
    """Of the first `layer` layers, how many have experts."""
    if not getattr(model, "num_experts", 0):
        return 0
    return layer // model.expert_every


def chunks(model: GPTConfig, layout: Layout, rank: int) -> list[Chunk]:
    """The stages of a pipeline rank."""
    p, v = layout.pp, layout.virtual_stages
    found = []
    for stage in range(rank, p * v, p):
        if layout.layer_split:
            start = sum(layout.layer_split[:stage])
            end = start + layout.layer_split[stage]
        else:
            each = model.num_layers // (p * v)
            start = stage * each
            end = start + each
        experts = experts_before(model, end) - experts_before(model, start)
        ends_in_experts = end > start and experts_before(model, end) > experts_before(
            model, end - 1
        )
        found.append(
            Chunk(stage == 0, stage == p * v - 1, end - start - experts, experts, ends_in_experts)
        )
    return found


def parts(sizes: Sizes, chunks: list[Chunk]) -> list[tuple[Part, int]]:
    """(part of the model, how often this rank has it)"""
    dense = sum(chunk.dense for chunk in chunks)
    experts = sum(chunk.experts for chunk in chunks)
    counted = [
        (sizes.embedding, int(chunks[0].first)),
        (sizes.block, dense),
        (sizes.expert_block, experts),
        (sizes.head, int(chunks[-1].last)),
    ]
    return [(part, count) for part, count in counted if count]


def is_even(model: GPTConfig, layout: Layout) -> bool:
    """Whether all stages have equal layers."""
    stages = layout.pp * layout.virtual_stages
    if layout.layer_split and len(set(layout.layer_split)) > 1:
        return False
    every = getattr(model, "expert_every", 1) if getattr(model, "num_experts", 0) else 1
    return model.num_layers // stages % every == 0
