"""Bytes that one rank of train.py holds at the peak of a step, by formulas.

    parameters, gradients, optimizer     the numbers in the matrices of a rank, times the bytes of
                                         ZeRO's table (run/least_memory.py)
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
of arXiv 2205.05198. `layer` has the same for Llama, experts and shared sequences. A T5 has two
halves: its encoder's layers work on the s tokens of the source, its decoder's on those of the
target, and have a second attention, to the source (`tokens_of`).

`python train.py --as-rank R --of N` counts tensors instead; the tests hold these formulas to it.

Letters: b micro-batch, s sequence, h hidden, a heads, t tensor-parallel ranks, p pipeline ranks, v
stages on each, m micro-batches, V vocabulary. n = b s tokens; with context parallelism b s / cp.

Not covered: what is below 1%, as biases, norms' statistics, indices, padding; memory that PyTorch's
allocator cannot use; workspaces of libraries; what CUDA kernels (--kernels auto) and torch.compile
keep in another form. LoRA beside latents: 5% too much.
"""

import dataclasses
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

import pipeline_parallel
import schedules
from base.model_config import (
    MoEConfig,
    attention_matrices,
    latent_matrices,
    mlp_matrices,
    with_modules,
)
from planning.inputs import Layout, Software
from run import least_memory
from schedules import Placement

# --- the stages of a pipeline rank ----------------------------------------------------------------


class BlockType(NamedTuple):
    """What decides which bytes a block holds."""

    experts: bool = False
    # Recomputed by the layout's granularity.
    recomputes: bool = True
    fp8: bool = False
    # Of T5 (models/t5.py): a decoder's block, which reads the target and the source; the last one
    # of a half, which ends with a norm and dropout.
    crosses: bool = False
    ends: bool = False


class Stage(NamedTuple):
    """One of the v stages of a pipeline rank."""

    # (type, how many blocks)
    blocks: tuple[tuple[BlockType, int], ...]
    embedding: bool
    head: bool


# The stages of each pipeline rank.
Stages = tuple[tuple[Stage, ...], ...]


@lru_cache(maxsize=2**14)
def stages(
    model: MoEConfig,
    placement: Placement,
    split: tuple[int, ...] | None,
    recomputed: range,
    fp8: range,
) -> Stages:
    """recomputed, fp8: numbers of layers."""
    found = []
    decoder, deeper = model.cross_layers, with_modules(model)
    halves_end = (decoder.start - 1, decoder.stop - 1) if decoder else ()
    for number, layers in enumerate(
        pipeline_parallel.layers_of_stages(model.num_layers, placement, split)
    ):
        if number == placement.last_stage:
            layers = range(layers.start, deeper.num_layers)
        types = Counter(
            BlockType(
                layer in deeper.expert_layers,
                layer in recomputed,
                layer in fp8,
                layer in model.cross_layers,
                layer in halves_end,
            )
            for layer in layers
        )
        found.append(Stage(tuple(types.items()), number == 0, number == placement.last_stage))
    p, v, _ = placement
    return tuple(
        tuple(found[placement.stage_of(rank, chunk)] for chunk in range(v)) for rank in range(p)
    )


def stages_of(model: MoEConfig, layout: Layout, software: Software) -> Stages:
    L = model.num_layers
    again = range(0)
    if layout.recompute != "none":
        # A frozen model needs no gradient of the first layer's input, and never recomputes it.
        first = 1 if software.lora_rank else 0
        every = with_modules(model).num_layers
        again = range(first, every if layout.recompute_layers is None else layout.recompute_layers)
    skip = software.fp8_skip
    fp8 = range(0) if software.fp8 == "off" else range(skip, L - skip)
    return stages(model, layout.placement, layout.layer_split, again, fp8)


# --- weights, gradients, optimizer state ----------------------------------------------------------


def block_parameters(model: MoEConfig, layout: Layout) -> tuple[float, float, float, float]:
    """Numbers that one rank has of one block: in one attention, in one MLP, in its experts, in its
    shared experts."""
    whole = latent_matrices(model)
    attention = whole + (attention_matrices(model) - whole) / layout.tp
    mlp = mlp_matrices(model) / layout.tp
    expert, shared = (mlp * n / model.ffn_hidden_size for n in expert_sizes(model))
    return attention, mlp, model.num_experts * expert / layout.ep, shared


def expert_sizes(model: MoEConfig) -> tuple[int, int]:
    """Inner sizes of (one expert, the shared experts together)."""
    return model.expert_size, model.shared_ffn_size


def lora_widths(model: MoEConfig, t: int, mlps: float, inner: int = 0) -> tuple[float, float]:
    """Numbers of a token that (LoRA's A [r, in] read, its B [out, r] write) in one block with so
    many MLPs, by default of ffn_hidden_size. Of the two, that one is sharded whose other dimension
    tensor parallelism cuts (adapters.follow)."""
    h, heads = model.hidden_size, model.num_heads * model.head_dim
    inner = inner or model.ffn_hidden_size
    keys, first, values = 2 * model.num_kv_heads * model.head_dim, 3 * h, heads
    if model.kv_rank:
        # Keys and values have none.
        keys, first, values = 0, model.query_rank or h, model.num_heads * model.value_size
    up = 1 + model.gated
    reads = first + values / t + mlps * (up * h + inner / t)
    return reads, (heads + keys) / t + h + mlps * (up * inner / t + h)


def lora_parameters(model: MoEConfig, layout: Layout, r: int) -> tuple[float, float, float, float]:
    """As `block_parameters`, of LoRA's matrices. Shared experts have none."""
    attention = r * sum(lora_widths(model, layout.tp, 0))
    mlp, expert = (
        r * sum(lora_widths(model, layout.tp, 1, inner)) - attention
        for inner in (model.ffn_hidden_size, model.expert_size)
    )
    return attention, mlp, model.num_experts * expert / layout.ep, 0.0


def vocabulary(model: MoEConfig, layout: Layout) -> float:
    """Numbers that one rank has of the embedding, or of the head."""
    return model.vocab_size * model.hidden_size / layout.tp


def in_blocks(
    of_rank: tuple[Stage, ...], each: tuple[float, float, float, float], only_fp8: bool = False
) -> tuple[float, float]:
    """(numbers outside the experts, numbers of the experts) in the blocks of a pipeline rank. each:
    as `block_parameters`."""
    attention, mlp, experts, shared = each
    if only_fp8:
        shared = 0.0
    outside = inside = 0.0
    for stage in of_rank:
        for block, n in stage.blocks:
            if block.fp8 or not only_fp8:
                outside += n * (1 + block.crosses) * attention
                outside += n * (shared if block.experts else mlp)
                inside += n * experts * block.experts
    return outside, inside


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
    if model.mtp_layers and of_rank[-1].head:
        outside += 2 * model.mtp_layers * model.hidden_size**2
        # The modules read a copy of the embedding; of a tied one the head has it.
        ends += layout.pp > 1 and not model.tied
    if model.head_transform and of_rank[-1].head:
        outside += model.hidden_size**2
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
    over = layout.zero_stage, layout.shard, layout.ep
    of_blocks = stages_of(model, layout, software)[rank], block_parameters(model, layout)
    numbers, experts = learning, experts_learning = parameters(model, layout, software, rank)
    if software.lora_rank:
        learning, experts_learning = learned(model, layout, software, rank)
        numbers, experts = numbers + learning, experts + experts_learning
    if rank == 0 and model.positions == "learned":
        positions = model.seq_length * model.hidden_size
        numbers += positions
        learning += 0 if software.lora_rank else positions
    held, *others = least_memory.sharded(
        (numbers, experts), (learning, experts_learning), number_bytes, *over
    )
    if layout.zero_stage in (1, 2) and 1 < model.num_experts // layout.ep < layout.expert_shard:
        # a few experts on many ranks: a shard is a copy (fsdp.alias_own_shards)
        held += experts * software.weight / layout.expert_shard
    if software.fp8 != "off" and keeps_fp8_bytes(layout, software):
        # Beside the weights, for a step, by rows and by columns.
        held += 2 * sum(in_blocks(*of_blocks, only_fp8=True))
    if software.muon:
        matrices = in_blocks(*of_blocks)
        second = 0, 0, software.gradient
        others[-1] -= least_memory.sharded(matrices, matrices, second, *over)[-1]
    if rank == 0 and layout.placement.v_shaped and (model.tied or model.mtp_layers):
        # Both copies are here: one state, and without ZeRO one storage (share_tied).
        copy = vocabulary(model, layout), 0
        weight, _, of_state = least_memory.sharded(copy, copy, number_bytes, *over)
        held -= 0 if layout.zero_stage else weight
        others[-1] -= 0 if software.lora_rank else of_state
    return held, *others


def keeps_fp8_bytes(layout: Layout, software: Software) -> bool:
    """Whether weights become bytes once in a step, and not for each product."""
    return layout.zero_stage < 3 or software.fp8_keep_bytes


# --- what one micro-batch keeps -------------------------------------------------------------------


class Kept(NamedTuple):
    """Bytes of one micro-batch in a block, in the embedding or in the head, on one rank."""

    # With the layout's recomputation.
    kept: float
    # So many more, while backward computes it again, or has begun (I of a split backward).
    again: float = 0.0
    # What the weight gradients of zb-h1 wait for.
    deferred: float = 0.0


class Sizes:
    """Bytes of the tensors that a layer is made of, on sequences of s tokens."""

    def __init__(self, model: MoEConfig, layout: Layout, software: Software, s: int):
        self.model, self.layout, self.software, self.s = model, layout, software, s
        n, w = layout.tokens(s), software.weight
        self.weight = w
        # a number that is computed in 32 bits, over a number of the model
        self.widened = max(4, w) / w
        self.tokens = n
        # [b, s, h], and what sequence parallelism leaves of it
        self.whole = n * model.hidden_size * w
        self.x = self.whole / (layout.tp if layout.sequence_parallel else 1)
        # This rank's heads: queries or context, keys or values; and its columns of keys, which are
        # fewer where ranks have copies of a head.
        self.query = n * model.num_heads * model.head_dim * w / layout.tp
        self.key_columns = n * model.num_kv_heads * model.head_dim * w / layout.tp
        self.key = self.key_columns * model.key_copies(layout.tp)
        # A value's size over a key's; a ring fills values up.
        self.narrow = model.value_size / model.head_dim
        self.value = self.key * (1 if is_ring(layout) else self.narrow)
        self.result = self.query * self.narrow
        # Those of queries, and of keys and values.
        self.latents = self.x / model.hidden_size * (model.query_rank + model.kv_rank)
        # Elements of [b, a, s, s].
        self.scores = n * s * model.num_heads / layout.tp
        self.ffn = n * model.ffn_hidden_size * w / layout.tp
        self.logits = n * model.vocab_size * w / layout.tp
        # The mask of a dropout after attention, or after the MLP: 1 byte an element.
        self.mask = self.x / w if model.dropout else 0.0
        self.norm_is_one = model.norm.startswith("layernorm") or software.fused_rms_norm
        self.frozen = software.lora_rank > 0
        # Inputs and scores of LoRA's thin matrices.
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

    def read(self, in_fp8: bool) -> float:
        """What matrices that read x keep of it. In FP8 it is bytes, but for the shard of sequence
        parallelism, which is gathered again."""
        return self.whole / self.weight if in_fp8 and not self.layout.sequence_parallel else self.x


def layer(model: MoEConfig, layout: Layout, software: Software, block: BlockType) -> Kept:
    """One block, with one MLP or with experts."""
    size = Sizes(model, layout, software, tokens_of(model, block.crosses))
    # LoRA's A reads 16 bits.
    in_fp8 = block.fp8 and not size.frozen
    attention, scores = attention_bytes(size, in_fp8)
    mlp = mlp_bytes(size, block.experts, in_fp8)
    at_end = size.norm(size.x) + size.mask if block.ends else 0.0
    mlp += at_end
    if model.parallel_block and size.norm_is_one:
        # Both norms keep the same x.
        mlp -= size.x
    # Keys and values of the source, over those of the target.
    longer = model.seq_length / model.target_length if block.crosses else 0.0
    if block.crosses:
        across, more_scores = attention_bytes(size, in_fp8, longer)
        attention, scores = attention + across, scores + more_scores
    mlp_waits, deferred = waiting_bytes(size, block, longer)
    # What I adds: at first ∂y of down; when the MLP is free, all that the MLP's W waits for, and
    # ∂y of the attention's output.
    first, later = -at_end, -mlp
    if waits_for_w(layout) and deferred:
        gradient = size.whole / (size.weight if block.fp8 else 1)
        first += min(mlp_waits, gradient)
        later += mlp_waits + gradient
    rise = max(0.0, first, later)
    if layout.recompute == "full" and block.recomputes:
        # a norm that copies its input keeps the copy, not the layer's input
        shared = size.x if size.norm_is_one else 0.0
        return Kept(size.x, attention + mlp + scores - shared + rise, deferred)
    if layout.recompute == "selective" and block.recomputes:
        return Kept(attention + mlp, max(0.0, first, scores + later), deferred)
    return Kept(attention + mlp + scores, rise, deferred)


def waiting_bytes(size: Sizes, block: BlockType, longer: float) -> tuple[float, float]:
    """What W waits for, (of the MLP, of the whole block): ∂y and x of each matrix, whole; experts
    and thin matrices do not wait. longer: the source over the target, where the block reads both;
    or 0."""
    if size.frozen:
        return 0.0, 0.0
    model = size.model
    matrix_bytes = size.weight if block.fp8 else 1
    ffn, mlp_waits = size.ffn, 0.0
    if block.experts:
        ffn *= model.shared_ffn_size / model.ffn_hidden_size
    if ffn:
        in_bytes = 1 if block.experts else matrix_bytes
        mlp_waits = (2 * size.whole + (2 + model.gated) * ffn) / in_bytes
    waits = (1 + block.crosses) * (2 * size.whole + size.query + size.result)
    waits += (1 + longer) * (1 + size.narrow) * size.key_columns + 2 * size.latents
    if block.crosses and size.layout.sequence_parallel:
        waits += longer * size.whole
    return mlp_waits, mlp_waits + waits / matrix_bytes


def tokens_of(model: MoEConfig, crosses: bool) -> int:
    """Tokens of a sequence that a block works on."""
    return model.target_length if crosses else model.seq_length


def attention_bytes(size: Sizes, in_fp8: bool, keys: float = 1.0) -> tuple[float, float]:
    """(what is kept always, what selective recomputation computes again). keys: so many times as
    many as queries."""
    model, layout = size.model, size.layout
    kept = size.norm(size.x) + size.read(in_fp8) + size.mask + 4 * size.lora
    if model.qk_norm:
        kept += size.norm(size.query + size.key)
    if model.kv_rank:
        kept += size.norm(size.latents) + size.latents
    # Queries, keys, values; what the output's matrix reads.
    kept += size.query + keys * (size.key + size.value)
    kept += size.result / size.weight if in_fp8 else size.result
    if not is_fused(model, layout, size.software):
        # softmax; with dropout its mask and its dropped copy
        each = 2 * size.weight + 1 if model.dropout else size.weight
        return kept, keys * size.scores * each
    # The output matrix reads another order than fused attention writes (queries head by head, or
    # a part of the heads), or bytes: then the result is kept beside what it reads.
    exchanges = layout.cp > 1 and not is_ring(layout)
    by_heads = model.qk_norm or model.rotary_share < 1
    filled_up = model.value_size < model.head_dim
    by_hand = is_ring(layout) and (model.dropout or bias_heads(model, layout) or filled_up)
    if by_heads or exchanges or by_hand or in_fp8:
        kept += size.query if is_ring(layout) else size.result
    # A ring makes it again in backward.
    added = 0 if is_ring(layout) else bias_heads(model, layout) * size.s**2 * size.weight
    added *= local_share(model)
    return kept + added, 0.0


def mlp_bytes(size: Sizes, experts: bool, in_fp8: bool) -> float:
    """What an MLP keeps, or what experts keep."""
    model = size.model
    down = size.ffn / size.weight if in_fp8 and not experts else size.ffn
    # ReLU keeps its result, which the next matrix reads.
    inner = (3 if model.gated else model.activation != "relu") * size.ffn + down
    routed, shared = (inner * n / model.ffn_hidden_size for n in expert_sizes(model))
    kept = size.norm(size.x) + size.mask + (2 + model.gated) * size.lora
    if not experts:
        return kept + size.read(in_fp8) + inner
    # Rows that a rank's experts get, where the load is even, over its tokens.
    rows = min(1.0, model.capacity_factor or 1.0) * model.router_topk
    # The router's input in 32 bits; what goes to the experts and what comes back.
    router = 0.0 if size.frozen else size.x * size.widened
    if shared and size.widened > 1:
        # What their matrices read; the router's copy in 32 bits is another one.
        shared += size.x
    return kept + router + rows * (2 * size.whole + routed) + shared + model.shared_gate * size.x


def waits_for_w(layout: Layout) -> bool:
    """Whether weight gradients are computed later than input gradients."""
    return layout.pp > 1 and layout.pipeline_schedule in schedules.SPLIT_BACKWARD


def is_ring(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_kind == "ring"


def is_fused(model: MoEConfig, layout: Layout, software: Software) -> bool:
    """Whether no s² numbers are kept: a ring keeps none either."""
    return is_ring(layout) or (software.fused_attention and model.attention == "fused")


def bias_heads(model: MoEConfig, layout: Layout) -> int:
    """How many matrices a rank adds to its scores: ALiBi has one for each head, a window for
    all."""
    if model.positions == "alibi":
        return model.num_heads // layout.tp // (1 if is_ring(layout) else layout.cp)
    return int(model.sliding_window > 0)


def local_share(model: MoEConfig) -> float:
    """The share of layers that add something to their scores, of those of the whole model."""
    pattern = model.window_pattern
    return 1.0 if model.positions == "alibi" else pattern.count("1") / len(pattern)


def ends(model: MoEConfig, layout: Layout, software: Software) -> tuple[Kept, Kept]:
    """(embedding, head). The head has logits in 32 bits; the gradient that waits has 16."""
    whole = Sizes(model, layout, software, model.seq_length + model.target_length)
    size = Sizes(model, layout, software, tokens_of(model, bool(model.cross_layers)))
    # T5's last block has it.
    norm = 0.0 if model.cross_layers else size.norm(size.x)
    embedding = whole.mask + (norm if model.embedding_norm or model.head_transform else 0.0)
    if model.head_transform:
        # What its matrix reads, and GELU.
        norm += 2 * size.x
    if size.frozen:
        # Before LoRA's first matrices nothing needs a gradient: nor does the first norm's input.
        embedding = -norm
    depths, modules = 1 + model.mtp_layers, model.mtp_layers
    # Of a module two norms, and what its matrix reads.
    again = layout.recompute == "full" and layout.recompute_layers is None
    beside = 0.0 if again else modules * (2 * size.norm(size.x) + 2 * size.x)
    if size.layout.head_chunk:
        return Kept(embedding), Kept(beside + depths * (norm + size.whole))
    logits = size.logits * size.widened
    if size.frozen:
        # It has no use for its input.
        return Kept(embedding), Kept(norm + logits)
    deferred = depths * (size.whole + size.logits) + modules * 3 * size.x
    return Kept(embedding), Kept(beside + depths * (norm + size.x + logits), 0.0, deferred)


# --- at the peak of the step ----------------------------------------------------------------------


@lru_cache(maxsize=4096)
def in_flight(name: str, p: int, m: int, v: int, rank: int, overlap: bool = False) -> np.ndarray:
    """[states, 2 v] of one pipeline rank, from its list of actions (schedules.py): of each of its v
    stages, how many micro-batches are held for backward, then how many wait for their W."""
    actions = schedules.lists(name, p, m, v, overlap)[rank]
    changes = np.zeros((len(actions), 2 * v), dtype=int)
    for change, action in zip(changes, actions):
        change[action.chunk] = schedules.IN_FLIGHT[action.op]
        change[v + action.chunk] = schedules.DEFERRED[action.op]
    return np.unique(changes.cumsum(axis=0), axis=0)


@lru_cache(maxsize=2**14)
def activations(model: MoEConfig, layout: Layout, software: Software, rank: int) -> float:
    """Bytes that are kept for backward, at the peak of the step."""
    embedding, head = ends(model, layout, software)
    kept, deferred = [], []
    again = 0.0
    of_rank = stages_of(model, layout, software)[rank]
    logits = head if of_rank[-1].head else Kept(0.0)
    types = {block for stage in of_rank for block, _ in stage.blocks}
    of_type = {block: layer(model, layout, software, block) for block in types}
    for stage in of_rank:
        parts = [(n, block, of_type[block]) for block, n in stage.blocks]
        parts += [(stage.embedding, None, embedding), (stage.head, None, head)]
        shared, shared_deferred = shared_bytes(model, layout, software, stage)
        kept.append(sum(n * part.kept for n, _, part in parts) + shared)
        deferred.append(sum(n * part.deferred for n, _, part in parts) + shared_deferred)
        again = max(again, again_bytes(layout, parts, logits, shared))
    name = layout.pipeline_schedule if layout.pp > 1 else "1f1b"
    # Further micro-batches repeat what 2 p of them do, except under gpipe.
    m = layout.micro_batches if name == "gpipe" else min(layout.micro_batches, 2 * layout.pp)
    v, overlap = layout.virtual_stages, layout.ep_comm_overlap
    states = in_flight(name, layout.pp, m, v, rank, overlap)
    return float((states @ np.array(kept + deferred)).max()) + again


def shared_bytes(
    model: MoEConfig, layout: Layout, software: Software, stage: Stage
) -> tuple[float, float]:
    """(kept, waited for by W): what all blocks of a stage read."""
    w, shared = software.weight, 0.0
    if model.positions == "rotary" and (layout.cp == 1 or layout.recompute == "full"):
        # The table of cos and sin; ranks that share a sequence keep a part of it.
        return 2 * model.seq_length * model.rotated_size * w, 0.0
    if not model.cross_layers:
        return 0.0, 0.0
    halves = {block.crosses for block, n in stage.blocks if n}
    for s in (tokens_of(model, half) for half in halves):
        # The buckets, int64; and the bias, which a sum of single operations does not keep.
        heads = 0.0
        if is_fused(model, layout, software) or layout.recompute != "none":
            heads = model.num_heads / layout.tp
        shared += s**2 * (8 + heads * w)
    source = Sizes(model, layout, software, model.seq_length)
    if True not in halves:
        return shared, 0.0
    # Cross attention reads the source in each layer; sequence parallelism gathers it in each.
    return shared + source.x, 0.0 if layout.sequence_parallel else source.whole


def again_bytes(layout: Layout, parts: list, head: Kept, shared: float) -> float:
    """What backward computes again beside all that is kept, of one stage. The first block comes
    when the head's backward is over, and that of the layers after it which keep all; an encoder's
    when the decoder's is over. parts: (how many, block type, Kept); shared: what all blocks
    read."""
    waits = waits_for_w(layout)
    freed = head.kept - waits * head.deferred
    of_decoder = 0.0
    for n, block, part in parts:
        if block and not block.recomputes and layout.recompute_layers is not None:
            freed += n * (part.kept - waits * part.deferred)
        elif block and block.crosses:
            of_decoder += n * (part.kept - waits * part.deferred)
    again = 0.0
    for n, block, part in parts:
        beside = -freed if not block or block.crosses else -freed - of_decoder
        left_to_w = waits * (part.deferred - part.kept)
        if left_to_w > 0:
            # More waits for W than was kept: the fullest state is that after I, or before it.
            beside = min(shared - left_to_w, (n - 1) * left_to_w)
        again = max(again, part.again + beside)
    return again


def buffers(model: MoEConfig, layout: Layout, software: Software, rank: int) -> dict[str, float]:
    """Bytes that are there for a moment: an estimate. Whole units of ZeRO stage 3; gradients on
    their way to their sums; what attention's core or the loss needs, and messages."""
    size = Sizes(model, layout, software, model.seq_length + model.target_length)
    of_head = Sizes(model, layout, software, tokens_of(model, bool(model.cross_layers)))
    of_rank = stages_of(model, layout, software)[rank]
    attention, mlp, experts, shared = block_parameters(model, layout)
    block = (2 if model.cross_layers else 1) * attention + max(mlp, experts + shared)
    is_end = of_rank[0].embedding or of_rank[-1].head
    # a unit, while its neighbour is on the way
    units = block + max(block, is_end * vocabulary(model, layout))
    stage = layout.zero_stage if layout.replicas > 1 else 0
    # Under zb-h1 all units wait for gradients of matrices.
    summed = units
    if waits_for_w(layout) or software.lora_rank:
        whole = sum(parameters(model, layout, software, rank))
        summed = whole if waits_for_w(layout) else units
    if software.lora_rank:
        summed *= sum(learned(model, layout, software, rank)) / whole
    # Two are received, one of them ahead; one is on its way (add_transfers).
    messages = 3 * size.x if layout.pp > 1 else 0.0
    # The logits in the model's type.
    share = min(1.0, layout.head_chunk / of_head.tokens) if layout.head_chunk else 1.0
    logits = of_rank[-1].head * share * (1 + model.mtp_layers) * of_head.logits
    return {
        "gathered": units * software.weight if stage == 3 else 0.0,
        "summed": summed * software.gradient if stage >= 2 else 0.0,
        "moment": messages + max(logits, core_moment(size)),
    }


def core_moment(size: Sizes) -> float:
    """What a ring, an exchange of heads, a window or ALiBi has in one layer."""
    heads = bias_heads(size.model, size.layout)
    # Distances, int64; the sum in 32 bits, before and after the mask.
    added = (8 + 8 * heads) * size.s**2 if heads else 0.0
    if is_ring(size.layout):
        n = size.layout.cp
        # With a bias no kernel computes a block: in 32 bits four of its scores.
        scores = 4 * size.widened * size.weight * size.scores / n if heads else 0.0
        # Keys and values, and those that arrive; in 32 bits three of their gradients.
        return (2 + 3 * size.widened) * 2 * size.key + added / n**2 + scores
    if size.layout.cp > 1:
        return 2 * size.query + added
    return added


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
    # What does not change activations is left out, so that many layouts share one answer.
    batch = layout.micro_batches * layout.micro_batch_size
    of_data = dict(dp=1, zero_stage=0, data_parallel_replicate_degree=1)
    alike = dataclasses.replace(layout, **of_data, global_batch_size=batch)
    parts["activations"] = activations(model, alike, software, rank)
    return parts | buffers(model, layout, software, rank)


def fullest(model: MoEConfig, layout: Layout) -> list[int]:
    """Pipeline ranks of which one is the fullest. The first holds the most micro-batches and the
    last the logits, where stages have equal layers."""
    each = model.num_layers // (layout.pp * layout.virtual_stages)
    uneven = layout.layer_split or (model.num_experts and each % model.expert_every)
    uneven = uneven or model.cross_layers
    return list(range(layout.pp)) if uneven else sorted({0, layout.pp - 1})
