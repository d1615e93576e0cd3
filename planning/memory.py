"""Bytes that one rank of train.py holds at the peak of a step, by formulas.

    parameters, gradients, optimizer     ZeRO's table, units.bytes_per_parameter, times the numbers
                                         in the matrices of this rank
    activations                          what autograd keeps: of a layer, times the layers of a
                                         stage, times the micro-batches in flight (schedules.py)
    gathered, summed, moment             what is there for a moment, an estimate

A layer of gpt.py keeps what the backward of each of its operations reads. In units of n h elements,
n = b s tokens, for a GPT with dropout on one device:

    attention norm   input 1                        mlp norm      input 1
    q, k, v          input 1                        up            input 1
    core             q, k, v 3;  softmax and its    gelu          input 4
                     dropped copy 2 a s² b          down          input 4
    output           input 1                        masks         1 byte: 2 n h + a s² b

With 2 bytes for an element these are the 34 s b h + 5 a s² b of recompute.layer_bytes, equation 1
of arXiv 2205.05198. `layer` has the same for Llama, experts and shared sequences.

`python train.py --as-rank R --of N` counts tensors instead; the tests hold these formulas to it.

Letters: b micro-batch, s sequence, h hidden, a heads, t tensor-parallel ranks, p pipeline ranks, v
stages on each, m micro-batches, V vocabulary. n = b s tokens; with context parallelism b s / cp.

Not covered: what is below 1%, as biases, norms' statistics, indices, padding; memory that PyTorch's
allocator cannot use; workspaces of libraries; what CUDA kernels (--kernels auto) and torch.compile
keep in another form.
"""

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import numpy as np

import pipeline_parallel
import schedules
from model_config import MoEConfig, block_matrices, mlp_matrices
from planning.inputs import Layout, Software
from zero import units

# --- the stages of a pipeline rank ----------------------------------------------------------------


class Stage(NamedTuple):
    """How many of each part one of the v stages of a pipeline rank has."""

    # blocks with one MLP; with experts
    dense: int
    experts: int
    embedding: bool
    head: bool


@lru_cache(maxsize=2**14)
def stages(
    model: MoEConfig, p: int, v: int, split: tuple[int, ...] | None, rank: int
) -> tuple[Stage, ...]:
    layers = pipeline_parallel.layers_of_stages(model.num_layers, p, v, split)
    found = []
    for number in range(rank, p * v, p):
        experts = sum(layer in model.expert_layers for layer in layers[number])
        dense = len(layers[number]) - experts
        found.append(Stage(dense, experts, number == 0, number == p * v - 1))
    return tuple(found)


def stages_of(model: MoEConfig, layout: Layout, rank: int) -> tuple[Stage, ...]:
    return stages(model, layout.pp, layout.virtual_stages, layout.layer_split, rank)


def block_parameters(model: MoEConfig, layout: Layout) -> tuple[float, float, float]:
    """Numbers that one rank has of one block: in attention, in one MLP, in its experts."""
    attention = block_matrices(model, 0) / model.num_layers / layout.tp
    mlp = mlp_matrices(model) / layout.tp
    return attention, mlp, model.num_experts * mlp / layout.ep


def vocabulary(model: MoEConfig, layout: Layout) -> float:
    """Numbers that one rank has of the embedding, or of the head."""
    return model.vocab_size * model.hidden_size / layout.tp


def parameters(model: MoEConfig, layout: Layout, rank: int = 0) -> tuple[float, float]:
    """(numbers outside the experts, numbers of the experts) in the matrices of a pipeline rank. The
    first has the embedding, the last the head, which on one stage may be the embedding."""
    dense, with_experts, embeddings, heads = map(sum, zip(*stages_of(model, layout, rank)))
    attention, mlp, experts = block_parameters(model, layout)
    vocabularies = 1 if model.tied and layout.pp == 1 else embeddings + heads
    outside = dense * (attention + mlp) + with_experts * attention
    return outside + vocabularies * vocabulary(model, layout), with_experts * experts


def state(
    model: MoEConfig, layout: Layout, software: Software, rank: int
) -> tuple[float, float, float]:
    """Bytes of (parameters, gradients, optimizer state)."""
    number_bytes = software.weight, software.gradient, software.optimizer_state
    n = layout.replicas
    dense = units.bytes_per_parameter(layout.zero_stage, n, *number_bytes)
    experts = units.bytes_per_parameter(layout.zero_stage, n // layout.ep, *number_bytes)
    numbers, of_experts = parameters(model, layout, rank)
    if rank == 0 and model.positions == "learned":
        numbers += model.seq_length * model.hidden_size
    return tuple(numbers * x + of_experts * y for x, y in zip(dense, experts))


# --- what one micro-batch keeps -------------------------------------------------------------------


class Kept(NamedTuple):
    """Bytes of one micro-batch in a block, in the embedding or in the head, on one rank."""

    # with the layout's recomputation
    kept: float
    # so many more, while backward computes it again
    again: float = 0.0
    # what the weight gradients of zb-h1 wait for
    deferred: float = 0.0


class Sizes:
    """Bytes of the tensors that a layer is made of."""

    def __init__(self, model: MoEConfig, layout: Layout, software: Software):
        n, w = layout.tokens(model.seq_length), software.weight
        self.model = model
        self.weight = w
        # a number that is computed in 32 bits, over a number of the model
        self.widened = max(4, w) / w
        self.tokens = n
        # [b, s, h], and what sequence parallelism leaves of it
        self.whole = n * model.hidden_size * w
        self.x = self.whole / (layout.tp if layout.sequence_parallel else 1)
        # of this rank's heads: queries or context, keys or values
        self.query = n * model.num_heads * model.head_dim * w / layout.tp
        self.key = n * model.num_kv_heads * model.head_dim * w / layout.tp
        # elements of [b, a, s, s]
        self.scores = n * model.seq_length * model.num_heads / layout.tp
        self.ffn = n * model.ffn_hidden_size * w / layout.tp
        self.logits = n * model.vocab_size * w / layout.tp
        # of a dropout after attention, or after the MLP: 1 byte
        self.mask = self.x / w if model.dropout else 0.0
        self.norm_is_one = model.norm == "layernorm" or software.fused_rms_norm

    def norm(self, x: float) -> float:
        """A norm whose input has x bytes keeps it, in single operations in 32 bits. Then RMSNorm
        keeps the normalised one too; 1 + weight multiplies it in the type of the model."""
        wide = x if self.norm_is_one else x * self.widened
        if self.model.norm == "rmsnorm1p":
            return wide + x
        return wide if self.norm_is_one else 2 * wide


def layer(model: MoEConfig, layout: Layout, software: Software, experts: bool = False) -> Kept:
    """One block, with one MLP or with experts."""
    size = Sizes(model, layout, software)
    norm = size.norm(size.x)
    core, scores = core_bytes(model, layout, software)
    attention = norm + size.x + core + size.query + size.mask
    if model.qk_norm:
        attention += size.norm(size.query + size.key)
    inner = 2 * size.ffn * (2 if model.gated else 1)
    # ∂y and x of each matrix, whole; those of experts do not wait
    deferred = 2 * (size.whole + size.query + size.key)
    if experts:
        # rows that a rank's experts get, where the load is even, over its tokens
        rows = min(1.0, model.capacity_factor or 1.0) * model.router_topk
        # the router's input in 32 bits; what goes to the experts and what comes back
        mlp = norm + size.x * size.widened + rows * (2 * size.whole + inner) + size.mask
    else:
        mlp = norm + size.x + inner + size.mask
        deferred += 2 * size.whole + (3 if model.gated else 2) * size.ffn
    if layout.recompute == "full":
        # a norm that copies its input keeps the copy, not the layer's input
        shared = size.x if size.norm_is_one else 0.0
        return Kept(size.x, attention + mlp + scores - shared, deferred)
    if layout.recompute == "selective":
        # the MLP is free by then
        return Kept(attention + mlp, max(0, scores - mlp), deferred)
    return Kept(attention + mlp + scores, 0.0, deferred)


def core_bytes(model: MoEConfig, layout: Layout, software: Software) -> tuple[float, float]:
    """(what attention's core keeps always, what selective recomputation computes again)"""
    size = Sizes(model, layout, software)
    qkv = size.query + 2 * size.key
    if is_fused(model, layout, software):
        exchanges = layout.cp > 1 and not is_ring(layout)
        # queries head by head, or a part of the heads; the output matrix keeps another order
        reordered = model.qk_norm or exchanges or (is_ring(layout) and model.dropout)
        bias = bias_heads(model, layout.tp) * model.seq_length**2 * software.weight
        return qkv + (size.query if reordered else 0.0) + bias, 0.0
    # softmax; with dropout its mask and its dropped copy
    each = 2 * software.weight + 1 if model.dropout else software.weight
    return qkv, size.scores * each


def is_ring(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_kind == "ring"


def is_fused(model: MoEConfig, layout: Layout, software: Software) -> bool:
    """Whether no s² numbers are kept: a ring keeps none either."""
    return is_ring(layout) or (software.fused_attention and model.attention == "fused")


def bias_heads(model: MoEConfig, t: int) -> int:
    """How many [s, s] are added to the scores: ALiBi has one for each head, a window for all."""
    if model.positions == "alibi":
        return model.num_heads // t
    return int(model.sliding_window > 0)


def ends(model: MoEConfig, layout: Layout, software: Software) -> tuple[Kept, Kept]:
    """(embedding, head). The head has logits in 32 bits; the gradient that waits has 16."""
    size = Sizes(model, layout, software)
    norm = size.norm(size.x)
    embedding = Kept(size.mask + (norm if model.embedding_norm else 0.0))
    if layout.head_chunk:
        return embedding, Kept(norm + size.whole)
    logits = size.logits * size.widened
    return embedding, Kept(norm + size.x + logits, 0.0, size.whole + size.logits)


# --- at the peak of the step ----------------------------------------------------------------------


@lru_cache(maxsize=4096)
def in_flight(name: str, p: int, m: int, v: int, rank: int) -> np.ndarray:
    """[states, 2 v] of one pipeline rank, from its list of actions (schedules.py): of each of its v
    stages, how many micro-batches are held for backward, then how many wait for their W."""
    actions = schedules.lists(name, p, m, v)[rank]
    changes = np.zeros((len(actions), 2 * v), dtype=int)
    for change, action in zip(changes, actions):
        change[action.chunk] = schedules.IN_FLIGHT[action.op]
        if name == "zb-h1":
            change[v + action.chunk] = schedules.DEFERRED[action.op]
    return np.unique(changes.cumsum(axis=0), axis=0)


@lru_cache(maxsize=2**14)
def activations(model: MoEConfig, layout: Layout, software: Software, rank: int) -> float:
    """Bytes that are kept for backward, at the peak of the step."""
    block = layer(model, layout, software)
    expert_block = layer(model, layout, software, experts=True) if model.num_experts else block
    embedding, head = ends(model, layout, software)
    kept, deferred = [], []
    of_rank = stages_of(model, layout, rank)
    for stage in of_rank:
        parts = list(zip(stage, (block, expert_block, embedding, head)))
        kept.append(sum(n * part.kept for n, part in parts) + rotary_bytes(model, layout, software))
        deferred.append(sum(n * part.deferred for n, part in parts))
    name = layout.pipeline_schedule if layout.pp > 1 else "1f1b"
    # further micro-batches repeat what 2 p of them do, except under gpipe
    m = layout.micro_batches if name == "gpipe" else min(layout.micro_batches, 2 * layout.pp)
    states = in_flight(name, layout.pp, m, layout.virtual_stages, rank)
    waits = name == "zb-h1"
    # the first block is computed again when the head's backward is over
    freed = head.kept - waits * head.deferred if of_rank[-1].head else 0.0
    again = 0.0
    for part in (block, expert_block):
        # where more waits for W than was kept, the fullest state is that after I
        left_to_w = waits * (part.deferred - part.kept)
        again = max(again, part.again - (left_to_w if left_to_w > 0 else freed))
    return float((states @ np.array(kept + deferred)).max()) + again


def rotary_bytes(model: MoEConfig, layout: Layout, software: Software) -> float:
    """Of the table of cos and sin. Ranks that share a sequence keep a part of it."""
    if model.positions != "rotary" or (layout.cp > 1 and layout.recompute != "full"):
        return 0.0
    return 2 * model.seq_length * model.head_dim * software.weight


def buffers(model: MoEConfig, layout: Layout, software: Software, rank: int) -> dict[str, float]:
    """Bytes that are there for a moment: an estimate. Whole units of ZeRO stage 3; gradients on
    their way to their sums; what attention's core or the loss needs, and messages."""
    size = Sizes(model, layout, software)
    of_rank = stages_of(model, layout, rank)
    attention, mlp, experts = block_parameters(model, layout)
    block = attention + max(mlp, experts)
    is_end = of_rank[0].embedding or of_rank[-1].head
    # a unit, while its neighbour is on the way
    units = block + max(block, is_end * vocabulary(model, layout))
    stage = layout.zero_stage if layout.replicas > 1 else 0
    # under zb-h1 all units wait for gradients of matrices
    waits = layout.pp > 1 and layout.pipeline_schedule == "zb-h1"
    summed = sum(parameters(model, layout, rank)) if waits else units
    # two are received, one of them ahead; one is on its way (transfers.lower)
    messages = 3 * size.x if layout.pp > 1 else 0.0
    # the logits in the model's type
    share = min(1.0, layout.head_chunk / size.tokens) if layout.head_chunk else 1.0
    logits = of_rank[-1].head * share * size.logits
    return {
        "gathered": units * software.weight if stage == 3 else 0.0,
        "summed": summed * software.gradient if stage >= 2 else 0.0,
        "moment": messages + max(logits, core_moment(model, layout, size)),
    }


def core_moment(model: MoEConfig, layout: Layout, size: Sizes) -> float:
    """What a ring, an exchange of heads, a window or ALiBi has in one layer."""
    if is_ring(layout):
        # keys and values, and those that arrive; in 32 bits three of their gradients
        return (2 + 3 * size.widened) * 2 * size.key
    if layout.cp > 1:
        return 2 * size.query
    # distances, int64; the sum in 32 bits, before and after the mask
    heads = bias_heads(model, layout.tp)
    return (8 + 8 * heads) * model.seq_length**2 if heads else 0.0


# --- a rank ---------------------------------------------------------------------------------------


def memory(
    model: MoEConfig, layout: Layout, software: Software, rank: int | None = None
) -> dict[str, float]:
    """Bytes by part, at the peak of a step, of one rank. rank: of the p pipeline ranks; None: the
    fullest. Tensor- and data-parallel ranks hold the same. Raises ScheduleError for a schedule that
    does not exist; else the layout is one that train.py accepts."""
    if rank is None:
        each = [memory(model, layout, software, r) for r in fullest(model, layout)]
        return max(each, key=lambda parts: sum(parts.values()))
    parts = dict(
        zip(("parameters", "gradients", "optimizer"), state(model, layout, software, rank))
    )
    # what does not change activations is left out, so that many layouts share one answer
    batch = layout.micro_batches * layout.micro_batch_size
    alike = dataclasses.replace(layout, dp=1, zero_stage=0, global_batch_size=batch)
    parts["activations"] = activations(model, alike, software, rank)
    return parts | buffers(model, layout, software, rank)


def fullest(model: MoEConfig, layout: Layout) -> list[int]:
    """Pipeline ranks of which one is the fullest. The first holds the most micro-batches and the
    last the logits, where stages have equal layers."""
    each = model.num_layers // (layout.pp * layout.virtual_stages)
    uneven = layout.layer_split or (model.num_experts and each % model.expert_every)
    return list(range(layout.pp)) if uneven else sorted({0, layout.pp - 1})
