"""Which parameters a rank holds: their shapes after tensor, expert and pipeline parallelism.

A model is an embedding, blocks with one MLP or with experts, and a head. fsdp.py makes units of
their parameters: all of one layer, or with expert parallelism the experts apart from the rest. A
unit is flattened to [N, T], one row for each of N data-parallel ranks (flat_parameters.py).

    of_rank(model, layout, rank)     the parts that a pipeline rank holds, and their units [N, T]

Letters: h hidden, t tensor-parallel ranks, V vocabulary, E experts, N ranks that share a unit: dp,
times cp.

    python -m planning.shapes        the units of GPT-3 175B under --tp 8 and 16 data-parallel ranks
"""

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import pipeline_parallel
from flat_parameters import shard_dim
from planning.inputs import Layout
from routers import MoEConfig
from run.presets import PRESETS

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


def of_norm(model: MoEConfig) -> list[Parameter]:
    """A weight; LayerNorm has a bias too."""
    return [Parameter((model.hidden_size,))] * (2 if model.norm == "layernorm" else 1)


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


def of_mlp(model: MoEConfig, t: int) -> list[Parameter]:
    h, ffn, bias = model.hidden_size, model.ffn_hidden_size, model.mlp_bias
    up = of_columns(ffn, h, t, bias)
    gate = up if model.gated else []
    return gate + up + of_rows(h, ffn, t, bias)


def of_experts(model: MoEConfig, t: int, ep: int) -> list[Parameter]:
    """The router is whole; of the E experts this rank has E / ep, and of these a shard of ffn."""
    h, ffn, e = model.hidden_size, model.ffn_hidden_size, model.num_experts
    groups = ("ep",) * (ep > 1) + ("tp",) * (t > 1)
    up = Parameter((e // ep, ffn // t, h), groups)
    down = Parameter((e // ep, h, ffn // t), groups)
    return [Parameter((e, h))] + [up] * (2 if model.gated else 1) + [down]


def of_block(model: MoEConfig, t: int, mlp: list[Parameter]) -> list[Parameter]:
    h, d, bias = model.hidden_size, model.head_dim, model.attention_bias
    query = of_columns(model.num_heads * d, h, t, bias != "none")
    key_and_value = of_columns(model.num_kv_heads * d, h, t, bias != "none") * 2
    # of queries and of keys; whole, for all heads share them
    head_norms = [Parameter((d,))] * 2 if model.qk_norm else []
    output = of_rows(h, model.num_heads * d, t, bias == "all")
    attention = query + key_and_value + head_norms + output
    return of_norm(model) + attention + of_norm(model) + mlp


def of_vocabulary(model: MoEConfig, t: int, **fields) -> Parameter:
    """[V / t, h], padded where t does not divide V."""
    shape = -(-model.vocab_size // t), model.hidden_size
    return Parameter(shape, ("tp",) if t > 1 else (), **fields)


def of_embedding(model: MoEConfig, t: int) -> list[Parameter]:
    learned = model.positions == "learned"
    positions = [Parameter((model.seq_length, model.hidden_size))] if learned else []
    return [of_vocabulary(model, t), *positions]


def of_head(model: MoEConfig, t: int, p: int, chunked: bool) -> list[Parameter]:
    """On one stage a tied head has the matrix of the embedding, which counts there."""
    if model.tied and p == 1:
        return of_norm(model)
    # the chunked head computes the gradient of its matrix at once
    matrix = of_vocabulary(model, t, waits=not chunked, is_copy=model.tied)
    return [*of_norm(model), matrix]


# --- units ----------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Parameters that fsdp.py sends in one collective: [N, T]."""

    # dp; replicas with context parallelism; edp: the ranks that hold the same experts
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


def make_part(
    parameters: list[Parameter], layout: Layout, apart: list[Parameter] | None = None
) -> Part:
    """apart: parameters of the same layer that have units of their own (fsdp.parts_of)."""
    if apart:
        one, other = make_part(parameters, layout), make_part(apart, layout)
        return Part(*(a | b if isinstance(a, frozenset) else a + b for a, b in zip(one, other)))
    experts = [p for p in parameters if "ep" in p.groups]
    others = [p for p in parameters if "ep" not in p.groups]
    units = []
    groups = set()
    n = layout.replicas
    for group, ranks, some in (
        ("edp", n // layout.ep, experts),
        (layout.replica_group, n, others),
    ):
        if some and n > 1:
            units.append(make_unit(some, group, ranks, ranks if layout.zero_stage else 1))
        shards = (group,) if layout.zero_stage and n > 1 else ()
        groups |= {p.groups + shards for p in some if not p.is_copy}
    size = sum(p.size for p in parameters)
    whole = sum(p.size for p in parameters if not p.groups)
    return Part(size, whole, tuple(units), frozenset(groups))


def expert_rows(model: MoEConfig, layout: Layout) -> int:
    """Rows that a rank's experts get from one micro-batch, where the load is even: k for each of
    its tokens, but for those that a capacity drops."""
    rows = layout.tokens(model.seq_length) * model.router_topk
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

    # whether it has the embedding; the head
    first: bool
    last: bool
    # of each layer: embedding, dense, experts or head
    layers: tuple[str, ...]
    # blocks with one MLP; with experts
    dense: int
    experts: int
    # whether the last block has experts
    ends_in_experts: bool


class Rank(NamedTuple):
    """What a pipeline rank holds."""

    chunks: tuple[Chunk, ...]
    # in the order of forward: (part of the model, how often)
    parts: tuple[tuple[Part, int], ...]
    # pairs (i, j) of parts of which one comes after the other
    neighbours: frozenset[tuple[int, int]]
    first: bool
    last: bool
    # blocks of all its chunks
    dense: int
    experts: int
    # of a tied matrix, the numbers that one data-parallel rank updates
    tied: int


def of_rank(model: MoEConfig, layout: Layout, rank: int) -> Rank:
    """rank: of the p pipeline ranks."""
    return _of_rank(
        model,
        rank,
        layout.tp,
        layout.pp,
        layout.dp,
        layout.ep,
        layout.virtual_stages,
        layout.layer_split,
        min(layout.zero_stage, 1),
        min(layout.head_chunk, 1),
        layout.cp,
    )


@lru_cache(maxsize=2**14)
def _of_rank(model, rank, tp, pp, dp, ep, virtual_stages, layer_split, zero_stage, head_chunk, cp):
    # with all that the result depends on, so that many layouts share one
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        virtual_stages=virtual_stages,
        layer_split=layer_split,
        zero_stage=zero_stage,
        head_chunk=head_chunk,
        cp=cp,
    )
    chunks = chunks_of(model, layout, rank)
    dense = sum(chunk.dense for chunk in chunks)
    experts = sum(chunk.experts for chunk in chunks)
    first, last = chunks[0].first, chunks[-1].last
    made = {}
    if first:
        norm = of_norm(model) if model.embedding_norm else []
        made["embedding"] = make_part(of_embedding(model, tp), layout, norm), 1
    if dense:
        made["dense"] = make_part(of_block(model, tp, of_mlp(model, tp)), layout), dense
    if experts:
        block = of_block(model, tp, of_experts(model, tp, ep))
        made["experts"] = make_part(block, layout), experts
    if last:
        made["head"] = make_part(of_head(model, tp, pp, head_chunk > 0), layout), 1
    order = list(made)
    neighbours = set()
    for chunk in chunks:
        numbers = [order.index(name) for name in chunk.layers]
        for i, j in pairwise(numbers):
            neighbours |= {(i, j), (j, i)}
    n = layout.replicas
    tied = make_unit([of_vocabulary(model, tp)], "", n, n if zero_stage else 1).T
    parts = tuple(made.values())
    return Rank(chunks, parts, frozenset(neighbours), first, last, dense, experts, tied)


def chunks_of(model: MoEConfig, layout: Layout, rank: int) -> tuple[Chunk, ...]:
    """The stages of a pipeline rank."""
    p, v = layout.pp, layout.virtual_stages
    layers = pipeline_parallel.layers_of_stages(model.num_layers, p, v, layout.layer_split)
    found = []
    for stage in range(rank, p * v, p):
        first, last = stage == 0, stage == p * v - 1
        blocks = ["experts" if n in model.expert_layers else "dense" for n in layers[stage]]
        kinds = ["embedding"] * first + blocks + ["head"] * last
        experts = blocks.count("experts")
        ends = blocks[-1:] == ["experts"]
        found.append(Chunk(first, last, tuple(kinds), len(blocks) - experts, experts, ends))
    return tuple(found)


def is_even(model: MoEConfig, layout: Layout) -> bool:
    """Whether all stages have equal layers."""
    if layout.layer_split and len(set(layout.layer_split)) > 1:
        return False
    if not model.num_experts:
        return True
    each = model.num_layers // (layout.pp * layout.virtual_stages)
    return each % model.expert_every == 0


# --------------------------------------------------------------------------------------------------


def main():
    model = MoEConfig(**PRESETS["gpt3-175b"][0])
    layout = Layout(tp=8, dp=16, zero_stage=1)
    print("GPT-3 175B, --tp 8 --zero-stage 1, 16 data-parallel ranks")
    names = "embedding", "block", "head"
    for name, (part, count) in zip(names, of_rank(model, layout, 0).parts):
        for unit in part.units:
            print(f"  {name:<10}{count:>3} x [{unit.N}, {unit.T:,}]{unit.size:>14,} numbers")


if __name__ == "__main__":
    main()
