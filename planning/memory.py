"""Bytes that one rank of train.py holds at the peak of a step, by formulas.

    parameters, gradients, optimizer     planning/state.py
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

import schedules
from base.model_config import MoEConfig
from planning.inputs import Layout, Software
from planning.state import (
    Kind,
    block_parameters,
    learned,
    parameters,
    stages_of,
    state,
    vocabulary,
)

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
        self.frozen = software.lora_rank > 0
        # x and scores of LoRA's thin matrices
        self.lora = n * software.lora_rank * w

    def norm(self, x: float) -> float:
        """A norm whose input has x bytes keeps it, in single operations in 32 bits. Then RMSNorm
        keeps the normalised one too, for the gradient of its weight; 1 + weight multiplies it in
        the type of the model."""
        wide = x if self.norm_is_one else x * self.widened
        if self.frozen:
            return wide
        if self.model.norm == "rmsnorm1p":
            return wide + x
        return wide if self.norm_is_one else 2 * wide


def layer(model: MoEConfig, layout: Layout, software: Software, kind: Kind) -> Kept:
    """One block, with one MLP or with experts."""
    size = Sizes(model, layout, software)
    # LoRA's A reads 16 bits
    in_fp8 = kind.fp8 and not size.frozen
    attention, scores, attention_waits = attention_bytes(model, layout, software, in_fp8)
    mlp, mlp_waits = mlp_bytes(model, layout, size, kind.experts, in_fp8)
    if kind.fp8:
        attention_waits, mlp_waits = attention_waits / size.weight, mlp_waits / size.weight
    deferred = attention_waits + mlp_waits
    if size.frozen:
        # thin matrices do not wait
        deferred = mlp_waits = 0.0
    if layout.recompute == "full" and kind.recomputes:
        # a norm that copies its input keeps the copy, not the layer's input
        shared = size.x if size.norm_is_one else 0.0
        return Kept(size.x, attention + mlp + scores - shared, deferred)
    if layout.recompute == "selective" and kind.recomputes:
        # the MLP is free by then, but for what its W waits for
        freed = mlp - waits_for_w(layout) * mlp_waits
        return Kept(attention + mlp, max(0, scores - freed), deferred)
    return Kept(attention + mlp + scores, 0.0, deferred)


def read_bytes(layout: Layout, size: Sizes, in_fp8: bool) -> float:
    """What matrices that read x keep of it. In FP8 it is bytes, but for the shard of sequence
    parallelism, which is gathered again."""
    return size.whole / size.weight if in_fp8 and not layout.sequence_parallel else size.x


def attention_bytes(
    model: MoEConfig, layout: Layout, software: Software, in_fp8: bool
) -> tuple[float, float, float]:
    """(what is kept always, what selective recomputation computes again, what W waits for: ∂y and x
    of each matrix, whole)"""
    size = Sizes(model, layout, software)
    core, scores = core_bytes(model, layout, software)
    output = size.query
    if in_fp8:
        output = size.query / size.weight + kept_output(model, layout, software)
    kept = size.norm(size.x) + read_bytes(layout, size, in_fp8) + core + output + size.mask
    if model.qk_norm:
        kept += size.norm(size.query + size.key)
    return kept + 4 * size.lora, scores, 2 * (size.whole + size.query + size.key)


def mlp_bytes(
    model: MoEConfig, layout: Layout, size: Sizes, experts: bool, in_fp8: bool
) -> tuple[float, float]:
    """(what is kept, what W waits for), of an MLP or of experts."""
    matrices = 3 if model.gated else 2
    down = size.ffn / size.weight if in_fp8 and not experts else size.ffn
    inner = (3 if model.gated else 1) * size.ffn + down
    kept = size.norm(size.x) + size.mask + matrices * size.lora
    if not experts:
        waits = 2 * size.whole + matrices * size.ffn
        return kept + read_bytes(layout, size, in_fp8) + inner, waits
    # rows that a rank's experts get, where the load is even, over its tokens
    rows = min(1.0, model.capacity_factor or 1.0) * model.router_topk
    # the router's input in 32 bits; what goes to the experts and what comes back
    router = 0.0 if size.frozen else size.x * size.widened
    return kept + router + rows * (2 * size.whole + inner), 0.0


def is_reordered(model: MoEConfig, layout: Layout) -> bool:
    """Whether the output matrix reads another order than fused attention writes: queries head by
    head, or a part of the heads."""
    exchanges = layout.cp > 1 and not is_ring(layout)
    return bool(model.qk_norm or exchanges or (is_ring(layout) and model.dropout))


def kept_output(model: MoEConfig, layout: Layout, software: Software) -> float:
    """Bytes of its result that fused attention keeps, and shares with a matrix in 16 bits alone."""
    if not is_fused(model, layout, software) or is_reordered(model, layout):
        return 0.0
    return Sizes(model, layout, software).query


def core_bytes(model: MoEConfig, layout: Layout, software: Software) -> tuple[float, float]:
    """(what attention's core keeps always, what selective recomputation computes again)"""
    size = Sizes(model, layout, software)
    qkv = size.query + 2 * size.key
    if is_fused(model, layout, software):
        reordered = is_reordered(model, layout)
        bias = bias_heads(model, layout.tp) * model.seq_length**2 * software.weight
        return qkv + (size.query if reordered else 0.0) + bias, 0.0
    # softmax; with dropout its mask and its dropped copy
    each = 2 * software.weight + 1 if model.dropout else software.weight
    return qkv, size.scores * each


def waits_for_w(layout: Layout) -> bool:
    """Whether weight gradients are computed later than input gradients."""
    return layout.pp > 1 and layout.pipeline_schedule == "zb-h1"


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
    embedding = size.mask + (norm if model.embedding_norm else 0.0)
    if size.frozen:
        # before LoRA's first matrices nothing needs a gradient: nor does the first norm's input
        embedding = -norm
    if layout.head_chunk:
        return Kept(embedding), Kept(norm + size.whole)
    logits = size.logits * size.widened
    # a frozen head has no use for its input
    read = 0.0 if size.frozen else size.x
    deferred = 0.0 if size.frozen else size.whole + size.logits
    return Kept(embedding), Kept(norm + read + logits, 0.0, deferred)


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
    embedding, head = ends(model, layout, software)
    waits = waits_for_w(layout)
    kept, deferred = [], []
    again = 0.0
    of_rank = stages_of(model, layout, software)[rank]
    logits = head if of_rank[-1].head else Kept(0.0)
    for stage in of_rank:
        parts = [(n, kind, layer(model, layout, software, kind)) for kind, n in stage.blocks]
        parts += [(stage.embedding, None, embedding), (stage.head, None, head)]
        rotary = rotary_bytes(model, layout, software)
        kept.append(sum(n * part.kept for n, _, part in parts) + rotary)
        deferred.append(sum(n * part.deferred for n, _, part in parts))
        again = max(again, again_bytes(layout, parts, logits, waits))
    name = layout.pipeline_schedule if layout.pp > 1 else "1f1b"
    # further micro-batches repeat what 2 p of them do, except under gpipe
    m = layout.micro_batches if name == "gpipe" else min(layout.micro_batches, 2 * layout.pp)
    states = in_flight(name, layout.pp, m, layout.virtual_stages, rank)
    return float((states @ np.array(kept + deferred)).max()) + again


def again_bytes(layout: Layout, parts: list, head: Kept, waits: bool) -> float:
    """What backward computes again beside all that is kept, of one stage. The first block comes
    when the head's backward is over, and that of the layers after it which keep all. parts:
    (how many, kind, Kept); waits: for W of zb-h1."""
    freed = head.kept - waits * head.deferred
    if layout.recompute_layers is not None:
        for n, kind, part in parts:
            if kind and not kind.recomputes:
                freed += n * (part.kept - waits * part.deferred)
    again = 0.0
    for _, _, part in parts:
        # where more waits for W than was kept, the fullest state is that after I
        left_to_w = waits * (part.deferred - part.kept)
        again = max(again, part.again - (left_to_w if left_to_w > 0 else freed))
    return again


def rotary_bytes(model: MoEConfig, layout: Layout, software: Software) -> float:
    """Of the table of cos and sin. Ranks that share a sequence keep a part of it."""
    if model.positions != "rotary" or (layout.cp > 1 and layout.recompute != "full"):
        return 0.0
    return 2 * model.seq_length * model.head_dim * software.weight


def buffers(model: MoEConfig, layout: Layout, software: Software, rank: int) -> dict[str, float]:
    """Bytes that are there for a moment: an estimate. Whole units of ZeRO stage 3; gradients on
    their way to their sums; what attention's core or the loss needs, and messages."""
    size = Sizes(model, layout, software)
    of_rank = stages_of(model, layout, software)[rank]
    attention, mlp, experts = block_parameters(model, layout)
    block = attention + max(mlp, experts)
    is_end = of_rank[0].embedding or of_rank[-1].head
    # a unit, while its neighbour is on the way
    units = block + max(block, is_end * vocabulary(model, layout))
    stage = layout.zero_stage if layout.replicas > 1 else 0
    # under zb-h1 all units wait for gradients of matrices
    whole = sum(parameters(model, layout, software, rank))
    summed = whole if waits_for_w(layout) else units
    if software.lora_rank:
        summed *= sum(learned(model, layout, software, rank)) / whole
    # two are received, one of them ahead; one is on its way (pipeline_parallel.lower)
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
