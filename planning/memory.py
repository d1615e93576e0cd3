"""Bytes that one rank of train.py holds at the peak of a step, by formulas.

    parameters, gradients, optimizer     ZeRO's table, fsdp.bytes_per_parameter, times the numbers
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

import fsdp
import pipeline_parallel
import schedules
from model_config import block_matrices, mlp_matrices
from planning.inputs import Layout, Software
from routers import MoEConfig

# --- the stages of a pipeline rank ----------------------------------------------------------------


class Stage(NamedTuple):
    """One of the v stages of a pipeline rank."""

    # blocks with one MLP; with experts
    dense: int
    experts: int
    # whether it has the embedding; the head
    first: bool
    last: bool


def stages(model: MoEConfig, layout: Layout, rank: int) -> tuple[Stage, ...]:
    return _stages(model, layout.pp, layout.virtual_stages, layout.layer_split, rank)


@lru_cache(maxsize=2**14)
def _stages(
    model: MoEConfig, p: int, v: int, split: tuple[int, ...] | None, rank: int
) -> tuple[Stage, ...]:
    layers = pipeline_parallel.layers_of_stages(model.num_layers, p, v, split)
    found = []
    for number in range(rank, p * v, p):
        experts = sum(layer in model.expert_layers for layer in layers[number])
        dense = len(layers[number]) - experts
        found.append(Stage(dense, experts, number == 0, number == p * v - 1))
    return tuple(found)


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
    of_rank = stages(model, layout, rank)
    attention, mlp, experts = block_parameters(model, layout)
    dense_blocks = sum(stage.dense for stage in of_rank)
    expert_blocks = sum(stage.experts for stage in of_rank)
    vocabularies = of_rank[0].first + of_rank[-1].last
    if model.tied and layout.pp == 1:
        vocabularies = 1
    dense = dense_blocks * (attention + mlp) + expert_blocks * attention
    return dense + vocabularies * vocabulary(model, layout), expert_blocks * experts


def state(
    model: MoEConfig, layout: Layout, software: Software, rank: int
) -> tuple[float, float, float]:
    """Bytes of (parameters, gradients, optimizer state)."""
    number_bytes = software.weight, software.gradient, software.optimizer_state
    n = layout.replicas
    dense = fsdp.bytes_per_parameter(layout.zero_stage, n, *number_bytes)
    experts = fsdp.bytes_per_parameter(layout.zero_stage, n // layout.ep, *number_bytes)
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

    def beyond_peak(self, waits: bool, freed: float) -> float:
        """`again`, over the fullest state between two actions. freed: of the head. waits: whether
        weight gradients do; where they are larger, the fullest state is that after I."""
        left_to_w = waits * (self.deferred - self.kept)
        return max(0.0, self.again - (left_to_w if left_to_w > 0 else freed))


class Activations:
    """Bytes of the tensors that a layer is made of."""

    def __init__(self, model: MoEConfig, layout: Layout, software: Software):
        n, w = layout.tokens(model.seq_length), software.weight
        self.weight = w
        # of what is computed in 32 bits
        self.wide = max(4, w)
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
        # of a dropout after attention, or after the MLP: 1 byte
        self.mask = self.x / w if model.dropout else 0.0

    def norm(self, model: MoEConfig, software: Software, x: float) -> float:
        """Of a norm whose input has x bytes. In single operations RMSNorm keeps its input and the
        normalised one, in 32 bits; 1 + weight multiplies x, which has the dtype of the model."""
        multiplied = x if model.norm == "rmsnorm1p" else 0.0
        if model.norm == "layernorm" or software.fused_rms_norm:
            return x + multiplied
        wide = x * self.wide / self.weight
        return wide + (multiplied or wide)


def layer(model: MoEConfig, layout: Layout, software: Software, experts: bool = False) -> Kept:
    """One block, with one MLP or with experts."""
    a = Activations(model, layout, software)
    norm = a.norm(model, software, a.x)
    core, scores = core_bytes(model, layout, software)
    attention = norm + a.x + core + a.query + a.mask
    if model.qk_norm:
        attention += a.norm(model, software, a.query + a.key)
    inner = 2 * a.ffn * (2 if model.gated else 1)
    if experts:
        rows = expert_rows(model, layout) / a.tokens
        # the router's input in 32 bits; what goes to the experts and what comes back
        mlp = norm + a.x * a.wide / a.weight + rows * (2 * a.whole + inner) + a.mask
    else:
        mlp = norm + a.x + inner + a.mask
    # ∂y and x of each matrix, whole; those of experts do not wait
    deferred = 2 * (a.whole + a.query + a.key)
    if not experts:
        deferred += 2 * a.whole + (3 if model.gated else 2) * a.ffn
    if layout.recompute == "full":
        # a norm that copies its input to 32 bits keeps the copy, not the layer's input
        shared = a.x if model.norm == "layernorm" or software.fused_rms_norm else 0.0
        return Kept(a.x, attention + mlp + scores - shared, deferred)
    if layout.recompute == "selective":
        # the MLP is free by then
        return Kept(attention + mlp, max(0, scores - mlp), deferred)
    return Kept(attention + mlp + scores, 0.0, deferred)


def core_bytes(model: MoEConfig, layout: Layout, software: Software) -> tuple[float, float]:
    """(what attention's core keeps always, what selective recomputation computes again)"""
    a = Activations(model, layout, software)
    qkv = a.query + 2 * a.key
    if is_fused(model, layout, software):
        exchanges = layout.cp > 1 and not is_ring(layout)
        # queries head by head, or a part of the heads; the output matrix keeps another order
        reordered = model.qk_norm or exchanges or (is_ring(layout) and model.dropout)
        bias = bias_heads(model, layout.tp) * model.seq_length**2 * software.weight
        return qkv + (a.query if reordered else 0.0) + bias, 0.0
    # softmax; with dropout its mask and its dropped copy
    each = 2 * software.weight + 1 if model.dropout else software.weight
    # grouped keys and values are repeated for each head
    return qkv, a.scores * each + 2 * (a.query - a.key)


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


def expert_rows(model: MoEConfig, layout: Layout) -> float:
    """Rows that a rank's experts get from one micro-batch, where the load is even."""
    rows = layout.tokens(model.seq_length) * model.router_topk
    return min(1.0, model.capacity_factor or 1.0) * rows


def ends(model: MoEConfig, layout: Layout, software: Software) -> tuple[Kept, Kept]:
    """(embedding, head). The head has logits in 32 bits; the gradient that waits has 16."""
    a = Activations(model, layout, software)
    norm = a.norm(model, software, a.x)
    embedding = Kept(a.mask + (norm if model.embedding_norm else 0.0))
    logits = a.tokens * model.vocab_size / layout.tp
    if layout.head_chunk:
        return embedding, Kept(norm + a.whole)
    return embedding, Kept(norm + a.x + a.wide * logits, 0.0, a.whole + a.weight * logits)


# --- at the peak of the step ----------------------------------------------------------------------


def in_flight(layout: Layout, rank: int) -> np.ndarray:
    """[states, 2 v] of one pipeline rank, from its list of actions (schedules.py): of each of its v
    stages, how many micro-batches are held for backward, then how many wait for their W."""
    name = layout.pipeline_schedule if layout.pp > 1 else "1f1b"
    m = layout.micro_batches
    if name != "gpipe":
        # further micro-batches repeat what 2 p of them do
        m = min(m, 2 * layout.pp)
    return _in_flight(name, layout.pp, m, layout.virtual_stages, rank)


@lru_cache(maxsize=4096)
def _in_flight(name: str, p: int, m: int, v: int, rank: int) -> np.ndarray:
    actions = schedules.lists(name, p, m, v)[rank]
    changes = np.zeros((len(actions), 2 * v), dtype=int)
    for change, action in zip(changes, actions):
        change[action.chunk] = schedules.IN_FLIGHT[action.op]
        if name == "zb-h1":
            change[v + action.chunk] = schedules.DEFERRED[action.op]
    return np.unique(changes.cumsum(axis=0), axis=0)


def activations(model: MoEConfig, layout: Layout, software: Software, rank: int) -> float:
    """Bytes that are kept for backward, at the peak of the step."""
    # what does not change them is left out, so that many layouts share one answer
    m = layout.micro_batches
    b = layout.micro_batch_size
    alike = dataclasses.replace(layout, dp=1, zero_stage=0, global_batch_size=m * b)
    return _activations(model, alike, software, rank)


@lru_cache(maxsize=2**14)
def _activations(model: MoEConfig, layout: Layout, software: Software, rank: int) -> float:
    block = layer(model, layout, software)
    expert_block = layer(model, layout, software, experts=True) if model.num_experts else block
    embedding, head = ends(model, layout, software)
    of_rank = stages(model, layout, rank)
    # no pipeline: no weight gradient waits
    waits = layout.pp > 1 and layout.pipeline_schedule == "zb-h1"
    kept, deferred = [], []
    for stage in of_rank:
        counts = stage.dense, stage.experts, stage.first, stage.last
        parts = block, expert_block, embedding, head
        kept.append(sum(n * part.kept for n, part in zip(counts, parts)))
        kept[-1] += rotary_bytes(model, layout, software)
        deferred.append(sum(n * part.deferred for n, part in zip(counts, parts)))
    peak = float((in_flight(layout, rank) @ np.array(kept + deferred)).max())
    # the first block is computed again when the head's backward is over
    freed = head.kept - waits * head.deferred if of_rank[-1].last else 0.0
    return peak + max(part.beyond_peak(waits, freed) for part in (block, expert_block))


def rotary_bytes(model: MoEConfig, layout: Layout, software: Software) -> float:
    """Of the table of cos and sin. Ranks that share a sequence keep a part of it."""
    if model.positions != "rotary" or (layout.cp > 1 and layout.recompute != "full"):
        return 0.0
    return 2 * model.seq_length * model.head_dim * software.weight


def buffers(model: MoEConfig, layout: Layout, software: Software, rank: int) -> dict[str, float]:
    """Bytes that are there for a moment: an estimate. Whole units of ZeRO stage 3; gradients on
    their way to their sums; what attention's core or the loss needs, and messages."""
    a = Activations(model, layout, software)
    of_rank = stages(model, layout, rank)
    attention, mlp, experts = block_parameters(model, layout)
    block = attention + max(mlp, experts)
    of_ends = vocabulary(model, layout) if of_rank[0].first or of_rank[-1].last else 0.0
    # a unit, while its neighbour is on the way
    units = block + max(block, of_ends)
    found = {"gathered": 0.0, "summed": 0.0}
    if layout.replicas > 1 and layout.zero_stage == 3:
        found["gathered"] = units * software.weight
    if layout.replicas > 1 and layout.zero_stage >= 2:
        # under zb-h1 all units wait for gradients of matrices
        waits = layout.pp > 1 and layout.pipeline_schedule == "zb-h1"
        summed = sum(parameters(model, layout, rank)) if waits else units
        found["summed"] = summed * software.gradient
    # three are received ahead, one is on its way (transfers.lower)
    messages = 4 * a.x if layout.pp > 1 else 0.0
    # the logits in the model's type
    tokens = min(a.tokens, layout.head_chunk or a.tokens)
    logits = of_rank[-1].last * tokens * model.vocab_size / layout.tp * a.weight
    found["moment"] = messages + max(logits, core_moment(model, layout, software))
    return found


def core_moment(model: MoEConfig, layout: Layout, software: Software) -> float:
    """What a ring, an exchange of heads, a window or ALiBi has in one layer."""
    a = Activations(model, layout, software)
    if is_ring(layout):
        # keys and values, and those that arrive; in 32 bits three of their gradients
        return (2 + 3 * a.wide / a.weight) * 2 * a.key
    if layout.cp > 1:
        return 2 * a.query
    # distances, int64; the sum in 32 bits, before and after the mask
    heads = bias_heads(model, layout.tp)
    return (8 + 2 * a.wide * heads) * model.seq_length**2 if heads else 0.0


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
    names = "parameters", "gradients", "optimizer"
    parts = dict(zip(names, state(model, layout, software, rank)))
    parts["activations"] = activations(model, layout, software, rank)
    return parts | buffers(model, layout, software, rank)


def fullest(model: MoEConfig, layout: Layout) -> list[int]:
    """Pipeline ranks of which one is the fullest. The first holds the most micro-batches and the
    last the logits, where stages have equal layers."""
    each = model.num_layers // (layout.pp * layout.virtual_stages)
    uneven = layout.layer_split or (model.num_experts and each % model.expert_every)
    return list(range(layout.pp)) if uneven else sorted({0, layout.pp - 1})
