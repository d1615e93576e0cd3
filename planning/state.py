"""Which layers a pipeline rank has, and its bytes of weights, gradients and optimizer state: the
numbers in the matrices of this rank, times ZeRO's table (fsdp.bytes_per_parameter).

With LoRA the base has weights alone. In FP8 a weight of attention or MLP is also kept in bytes.

Not covered: as in planning/memory.py, which has the activations.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import fsdp
import pipeline_parallel
from base.model_config import MoEConfig, block_matrices, mlp_matrices
from planning.inputs import Layout, Software

# --- the stages of a pipeline rank ----------------------------------------------------------------


class Kind(NamedTuple):
    """What decides which bytes a block holds."""

    experts: bool = False
    # by the layout's granularity
    recomputes: bool = True
    fp8: bool = False


class Stage(NamedTuple):
    """What one of the v stages of a pipeline rank has."""

    # (kind, how many blocks)
    blocks: tuple[tuple[Kind, int], ...]
    embedding: bool
    head: bool


@lru_cache(maxsize=2**14)
def stages(
    model: MoEConfig, p: int, v: int, split: tuple[int, ...] | None, recomputed: range, fp8: range
) -> tuple[tuple[Stage, ...], ...]:
    """Of each pipeline rank. recomputed, fp8: numbers of layers."""
    layers = pipeline_parallel.layers_of_stages(model.num_layers, p, v, split)
    ranks = []
    for rank in range(p):
        found = []
        for number in range(rank, p * v, p):
            kinds = Counter(
                Kind(layer in model.expert_layers, layer in recomputed, layer in fp8)
                for layer in layers[number]
            )
            found.append(Stage(tuple(kinds.items()), number == 0, number == p * v - 1))
        ranks.append(tuple(found))
    return tuple(ranks)


def stages_of(
    model: MoEConfig, layout: Layout, software: Software
) -> tuple[tuple[Stage, ...], ...]:
    """Of each pipeline rank."""
    L = model.num_layers
    again = range(0)
    if layout.recompute != "none":
        # of the first layer's input a frozen model needs no gradient: it never computes it again
        first = 1 if software.lora_rank else 0
        again = range(first, L if layout.recompute_layers is None else layout.recompute_layers)
    skip = software.fp8_skip
    fp8 = range(0) if software.fp8 == "off" else range(skip, L - skip)
    return stages(model, layout.pp, layout.virtual_stages, layout.layer_split, again, fp8)


def block_parameters(model: MoEConfig, layout: Layout) -> tuple[float, float, float]:
    """Numbers that one rank has of one block: in attention, in one MLP, in its experts."""
    attention = block_matrices(model, 0) / model.num_layers / layout.tp
    mlp = mlp_matrices(model) / layout.tp
    return attention, mlp, model.num_experts * mlp / layout.ep


def lora_parameters(model: MoEConfig, layout: Layout, r: int) -> tuple[float, float, float]:
    """The same of LoRA's A [r, in] and B [out, r]. Of the two, that one is sharded whose other
    dimension tensor parallelism cuts (adapters.follow)."""
    t, h = layout.tp, model.hidden_size
    heads = (model.num_heads + model.num_kv_heads) * model.head_dim
    attention = r * (4 * h + 2 * heads / t)
    matrices = 3 if model.gated else 2
    mlp = r * matrices * (h + model.ffn_hidden_size / t)
    return attention, mlp, model.num_experts * mlp / layout.ep


# --- numbers and bytes ----------------------------------------------------------------------------


def vocabulary(model: MoEConfig, layout: Layout) -> float:
    """Numbers that one rank has of the embedding, or of the head."""
    return model.vocab_size * model.hidden_size / layout.tp


def in_blocks(of_rank: tuple[Stage, ...], each: tuple[float, float, float]) -> tuple[float, float]:
    """(numbers outside the experts, numbers of the experts) in the blocks of a pipeline rank. each:
    as `block_parameters`."""
    attention, mlp, experts = each
    blocks = [block for stage in of_rank for block in stage.blocks]
    with_experts = sum(n for kind, n in blocks if kind.experts)
    dense = sum(n for _, n in blocks) - with_experts
    return dense * (attention + mlp) + with_experts * attention, with_experts * experts


def parameters(
    model: MoEConfig, layout: Layout, software: Software, rank: int = 0
) -> tuple[float, float]:
    """(numbers outside the experts, numbers of the experts) in the matrices of a pipeline rank. The
    first has the embedding, the last the head, which on one stage may be the embedding."""
    of_rank = stages_of(model, layout, software)[rank]
    outside, experts = in_blocks(of_rank, block_parameters(model, layout))
    ends = of_rank[0].embedding + of_rank[-1].head
    if model.tied and layout.pp == 1:
        ends = 1
    return outside + ends * vocabulary(model, layout), experts


def learned(
    model: MoEConfig, layout: Layout, software: Software, rank: int = 0
) -> tuple[float, float]:
    """As `parameters`, those that have gradients and optimizer state: all, or those of LoRA."""
    if not software.lora_rank:
        return parameters(model, layout, software, rank)
    each = lora_parameters(model, layout, software.lora_rank)
    return in_blocks(stages_of(model, layout, software)[rank], each)


def state(
    model: MoEConfig, layout: Layout, software: Software, rank: int
) -> tuple[float, float, float]:
    """Bytes of (parameters, gradients, optimizer state)."""
    number_bytes = software.weight, software.gradient, software.optimizer_state
    n = layout.replicas
    dense = fsdp.bytes_per_parameter(layout.zero_stage, n, *number_bytes)
    experts = fsdp.bytes_per_parameter(layout.zero_stage, n // layout.ep, *number_bytes)
    numbers, of_experts = parameters(model, layout, software, rank)
    learning, experts_learning = learned(model, layout, software, rank)
    if software.lora_rank:
        numbers, of_experts = numbers + learning, of_experts + experts_learning
    if rank == 0 and model.positions == "learned":
        positions = model.seq_length * model.hidden_size
        numbers += positions
        learning += 0 if software.lora_rank else positions
    held = numbers * dense[0] + of_experts * experts[0] + fp8_bytes(model, layout, software, rank)
    if layout.zero_stage in (1, 2) and 1 < model.num_experts // layout.ep < layout.expert_replicas:
        # a few experts on many ranks: a shard is a copy (fsdp.share_own_shards)
        held += of_experts * software.weight / layout.expert_replicas
    return held, *(learning * x + experts_learning * y for x, y in zip(dense[1:], experts[1:]))


def keeps_fp8_bytes(layout: Layout, software: Software) -> bool:
    """Whether weights become bytes once in a step, and not for each product."""
    return layout.zero_stage < 3 or software.fp8_keep_bytes


def fp8_bytes(model: MoEConfig, layout: Layout, software: Software, rank: int) -> float:
    """Of weights in FP8, which are kept beside them for a step, by rows and by columns."""
    if software.fp8 == "off" or not keeps_fp8_bytes(layout, software):
        return 0.0
    of_rank = stages_of(model, layout, software)[rank]
    in_fp8 = []
    for stage in of_rank:
        blocks = tuple((kind, n) for kind, n in stage.blocks if kind.fp8)
        in_fp8.append(stage._replace(blocks=blocks))
    return 2 * sum(in_blocks(tuple(in_fp8), block_parameters(model, layout)))
