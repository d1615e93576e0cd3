"""Bytes that one rank of train.py holds at the peak of a step, by formulas.

    parameters, gradients, optimizer state       ZeRO's table (fsdp.bytes_per_parameter), with the
                                                 padding of shards and of the vocabulary
    activations                                  what autograd keeps: of a layer, times the layers
                                                 of a stage, times the micro-batches in flight

A layer of gpt.py keeps what the backward of each of its operations reads. In units of n h elements,
n = b s tokens, for a GPT with dropout on one device:

    attention norm   input 1                        mlp norm      input 1
    q, k, v          input 1                        up            input 1
    core             q, k, v 3;  softmax and its    gelu          input 4
                     dropped copy 2 a s² b          down          input 4
    output           input 1                        masks         1 byte: 2 n h + a s² b

With 2 bytes for an element these are the 34 s b h + 5 a s² b of arXiv 2205.05198, equation 1.
`layer_rows` has every row, for Llama and experts too; statistics of norms are 0.1% more.

    python -m planning.memory        the rows of a layer, and a rank of GPT-3 175B

Letters: b micro-batch, s sequence, h hidden, a heads, t tensor-parallel ranks, p pipeline ranks, v
stages on each, m micro-batches, V vocabulary. n = b s tokens; with context parallelism b s / cp.

Not covered: zb-h1 with full recomputation and either experts or sequence parallelism, where up to
3% of a tiny model's activations are missing; memory that PyTorch's allocator cannot use; workspaces
of libraries; what CUDA kernels (--kernels auto) and torch.compile keep in another form.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import schedules
from planning import shapes
from planning.inputs import SOFTWARE, Layout, Software
from planning.shapes import Chunk, Rank, Unit
from routers import MoEConfig
from run.presets import PRESETS

# --- what a layer keeps ---------------------------------------------------------------------------


class Layer(NamedTuple):
    """Bytes that one block keeps of one micro-batch, on one rank."""

    # with the layout's recomputation
    kept: int
    # at most so many more, while backward computes this layer again
    again: int
    # what the weight gradients of zb-h1 wait for
    deferred: int
    # zb-h1: the most that its I adds before it frees the layer
    rise: int


class Counts(NamedTuple):
    """Bytes of the tensors that the rows are made of."""

    # [b, s, h], or a shard of the sequence
    x: int
    # the same, of the whole sequence
    whole: int
    # tokens, or those of a shard of the sequence
    tokens: int
    # [b, s, a d], of this rank's heads: queries, context
    query: int
    # [b, s, a_kv d]: keys, values
    key: int
    # elements of [b, a, s, s], of this rank's heads
    scores: int
    # [b, s, ffn / t]
    ffn: int


def counts_of(model: MoEConfig, layout: Layout, software: Software) -> Counts:
    b, s, h, t = layout.micro_batch_size, model.seq_length, model.hidden_size, layout.tp
    n, w = layout.tokens(s), software.weight
    tokens = n // t if layout.sequence_parallel else n
    return Counts(
        x=tokens * h * w,
        whole=n * h * w,
        tokens=tokens,
        query=n * (model.num_heads * model.head_dim) // t * w,
        key=n * (model.num_kv_heads * model.head_dim) // t * w,
        scores=b * (model.num_heads // t) * s * s // layout.cp,
        ffn=n * model.ffn_hidden_size // t * w,
    )


def norm_rows(model: MoEConfig, c: Counts, software: Software) -> dict[str, int]:
    """The mean and 1/σ of a token are float32; an RMSNorm has no mean."""
    if model.norm == "layernorm":
        return {"norm input": c.x, "norm statistics": 8 * c.tokens}
    return rms_norm_rows(model, c.x, c.tokens, software)


def rms_norm_rows(model: MoEConfig, x: int, vectors: int, software: Software) -> dict[str, int]:
    """x: bytes of that many vectors."""
    rows = {"norm input": x, "norm statistics": 4 * vectors}
    if not software.fused_rms_norm:
        # single operations, in at least float32; the product with the weight keeps its input
        wide = x * max(4, software.weight) // software.weight
        rows |= {"norm input": wide, "normalised": wide}
    if model.norm == "rmsnorm1p":
        # what w multiplies has the dtype of x
        rows["normalised"] = x
    return rows


HEAD_NORMS = "query and key"


def head_norm_rows(model: MoEConfig, layout: Layout, software: Software) -> dict[str, int]:
    """Of the norms of queries and keys."""
    if not model.qk_norm:
        return {}
    rows = Counter()
    for heads in (model.num_heads, model.num_kv_heads):
        vectors = layout.tokens(model.seq_length) * heads // layout.tp
        x = vectors * model.head_dim * software.weight
        rows += rms_norm_rows(model, x, vectors, software)
    if layout.tp > 1 and not layout.sequence_parallel and model.norm == "rmsnorm":
        # both weights, copied side by side (tensor_parallel.ParallelHeadNorms)
        rows["copied weights"] = 2 * model.head_dim * software.weight
    return {f"{HEAD_NORMS} {name}": size for name, size in rows.items()}


def norm_copies(model: MoEConfig, software: Software) -> bool:
    """Whether a norm keeps its input as a copy in float32."""
    return model.norm != "layernorm" and not software.fused_rms_norm and software.weight < 4


def core_rows(model: MoEConfig, layout: Layout, c: Counts, software: Software) -> dict[str, int]:
    """softmax(q kᵀ) v with its dropout."""
    # of scores, on this rank
    rows_of_scores = layout.tokens(model.seq_length) * model.num_heads // layout.tp
    if is_ring(layout) and model.dropout:
        # in single operations, whose result has the order of heads
        log_sums = {"row sums": max(4, software.weight) * rows_of_scores, "result": c.query}
        return {"query": c.query, "key": c.key, "value": c.key} | log_sums
    if is_fused(model, layout, software):
        # log Σ exp of each row of scores, float32
        rows = {"query": c.query, "key": c.key, "value": c.key, "row sums": 4 * rows_of_scores}
        if model.qk_norm or (layout.cp > 1 and not is_ring(layout)):
            # head by head, as the norms leave queries, or of all tokens and a part of the heads;
            # what the output matrix keeps is the other way round
            rows["result"] = c.query
        return rows | local_row(model, layout, software)
    # grouped keys and values are repeated for each head
    rows = {"query": c.query, "key": c.query, "value": c.query}
    rows["softmax"] = c.scores * software.weight
    if model.dropout:
        rows["attention mask"] = c.scores
        rows["dropped softmax"] = c.scores * software.weight
    return rows


def local_row(model: MoEConfig, layout: Layout, software: Software) -> dict[str, int]:
    """What fused attention adds to the scores for a window or ALiBi (local_attention.py)."""
    size = bias_heads(model, layout.tp) * model.seq_length**2 * software.weight
    return {"bias of scores": size} if size else {}


def bias_heads(model: MoEConfig, t: int) -> int:
    """How many [s, s] are added to the scores: ALiBi has one for each head, a window for all."""
    if model.positions == "alibi":
        return model.num_heads // t
    return int(model.sliding_window > 0)


def is_ring(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_kind == "ring"


def is_fused(model: MoEConfig, layout: Layout, software: Software) -> bool:
    """Whether no s² numbers are kept: a ring keeps none either."""
    return is_ring(layout) or (software.fused_attention and model.attention == "fused")


def context_rows(model: MoEConfig, layout: Layout, software: Software) -> dict[str, int]:
    """What context parallelism keeps beside the core."""
    rows = {}
    if layout.cp > 1 and model.positions == "rotary":
        # this rank's rows of cos and sin
        own = 2 * model.seq_length // layout.cp * model.head_dim
        rows["rotary table"] = own * software.weight
    if layout.cp > 1 and not is_ring(layout):
        # int64: where tokens go, and where they come from
        rows["order of tokens"] = 2 * 8 * model.seq_length
    return rows


def mask_row(model: MoEConfig, c: Counts) -> dict[str, int]:
    """One byte for an element."""
    return {"residual mask": c.tokens * model.hidden_size} if model.dropout else {}


def mlp_rows(model: MoEConfig, c: Counts) -> dict[str, int]:
    """Everything between the norm and the residual. act(gate) * up needs both factors."""
    rows = {"up input": c.x}
    if model.gated:
        rows |= {"gate": c.ffn, "activated gate": c.ffn, "up": c.ffn}
    else:
        rows |= {"gelu input": c.ffn}
    return rows | {"down input": c.ffn}


def expert_rows(model: MoEConfig, layout: Layout, c: Counts, software: Software) -> dict[str, int]:
    """As mlp_rows, of experts (moe.py)."""
    n = layout.tokens(model.seq_length)
    k, e = model.router_topk, model.num_experts
    # of n tokens, so many go through an expert of this rank
    per_token = shapes.expert_rows(model, layout) / n
    wide = max(4, software.weight)
    rows = {
        "router input": c.tokens * model.hidden_size * wide,
        "expert input": per_token * c.whole,
        "gelu input": per_token * c.ffn,
        "down input": per_token * c.ffn,
        "combine input": per_token * c.whole,
        "weights of rows": per_token * n * software.weight,
        # int64: where rows go, and where they come from
        "indices": index_bytes(model, layout),
    }
    if model.gated:
        rows |= {"gate": per_token * c.ffn, "activated gate": per_token * c.ffn}
    if software.weight < 4:
        rows["router weight in float32"] = 4 * e * model.hidden_size
    # softmax of the chosen logits keeps all of them too; else sigmoid or softmax of all
    of_chosen = model.router == "topk" and k > 1
    rows["probabilities"] = wide * n * (k + e if of_chosen else e)
    if model.aux_loss:
        # softmax, each expert's load
        rows["load-balancing loss"] = wide * (c.tokens * e + e)
    if model.z_loss:
        # log Σ exp of each token, and the logits, where they are not there already
        is_kept = of_chosen and not layout.sequence_parallel
        rows["z-loss"] = wide * c.tokens * (1 if is_kept else 1 + e)
    return rows


def index_bytes(model: MoEConfig, layout: Layout) -> int:
    """The indices of a DispatchPlan, int64. chosen and position: of all choices; order, and across
    ranks by_expert and by_rank: of those that are not dropped."""
    choices = layout.tokens(model.seq_length) * model.router_topk
    rows = shapes.expert_rows(model, layout)
    return 8 * (2 * choices + rows * (3 if layout.ep > 1 else 1))


def plan_bytes(model: MoEConfig, layout: Layout, software: Software) -> int:
    """Of a DispatchPlan: also each expert's load, and its rows."""
    e = model.num_experts
    return index_bytes(model, layout) + max(4, software.weight) * e + 8 * e // layout.ep


def layer_rows(
    model: MoEConfig, layout: Layout, software: Software, experts: bool = False
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """What a block keeps without recomputation: rows before attention's core, of the core, after
    it. A row: what is kept -> bytes."""
    c = counts_of(model, layout, software)
    norm, mask = norm_rows(model, c, software), mask_row(model, c)
    before = norm | {"q k v input": c.x} | head_norm_rows(model, layout, software)
    core = core_rows(model, layout, c, software) | context_rows(model, layout, software)
    inner = expert_rows(model, layout, c, software) if experts else mlp_rows(model, c)
    after = {"output input": c.query}
    after |= {f"attention {name}": size for name, size in mask.items()}
    after |= {f"mlp {name}": size for name, size in (norm | inner | mask).items()}
    return before, core, after


def layer(model: MoEConfig, layout: Layout, software: Software, experts: bool = False) -> Layer:
    """One block, with the layout's recomputation."""
    c = counts_of(model, layout, software)
    rows = layer_rows(model, layout, software, experts)
    before, core, after = (sum(r.values()) for r in rows)
    deferred = deferred_bytes(model, layout, c, experts)
    *until_core, at_query = rises(model, layout, c, rows, experts)
    key = 4 * layout.micro_batch_size if model.dropout else 0
    if layout.recompute == "full":
        kept, shared = c.x + key, 0 if norm_copies(model, software) else c.x
        if experts:
            # the router's plan is not made again; indices and load are among the rows
            kept += plan_bytes(model, layout, software)
            shared += index_bytes(model, layout)
            shared += max(4, software.weight) * model.num_experts * (model.aux_loss > 0)
        again = before + core + after - shared
        return Layer(kept, again, deferred, again + max(0, *until_core, at_query))
    if layout.recompute == "selective" and not is_fused(model, layout, software):
        beside = sum(context_rows(model, layout, software).values())
        # the queries of one sequence are in the order that the matrix product needs
        again = core - beside - (c.query if layout.micro_batch_size == 1 else 0)
        kept = before + c.query + 2 * c.key + key + after + beside
        # what comes after the core is free by then
        return Layer(
            kept, max(0, again - after), deferred, max(*until_core, until_core[-1] + again)
        )
    return Layer(before + core + after, 0, deferred, max(*until_core, at_query))


def rises(
    model: MoEConfig, layout: Layout, c: Counts, rows: tuple[dict[str, int], ...], experts: bool
) -> tuple[int, int, int, int]:
    """zb-h1: how many bytes I has added when the gradients of these matrices begin to wait: down,
    up, attention's output, query. It keeps ∂y and x of each, and frees all other rows."""
    before, core, after = rows
    mask = sum(mask_row(model, c).values())
    # sequence parallelism has kept a shard, which is free when the whole x has come
    whole, shard = (c.whole, c.x) if layout.sequence_parallel else (0, 0)
    head_norms = sum(size for name, size in before.items() if name.startswith(HEAD_NORMS))
    norm = sum(before.values()) - c.x - head_norms
    if experts:
        # nothing of them waits
        inner = sum(after.values()) - after["output input"] - mask
        at_down = at_up = -mask
        at_output = c.whole - inner - mask
    else:
        at_down = c.whole - mask
        inner = {"mlp gate", "mlp activated gate", "mlp up", "mlp gelu input"}
        freed = sum(size for name, size in after.items() if name in inner)
        at_up = at_down + c.ffn * (2 if model.gated else 1) - freed + whole
        at_output = at_up - shard - norm - mask + c.whole
    at_query = at_output - sum(core.values()) - head_norms + c.query + 2 * c.key + whole
    return at_down, at_up, at_output, at_query


def deferred_bytes(model: MoEConfig, layout: Layout, c: Counts, experts: bool) -> int:
    """What W of a block starts from: ∂y and x of each matrix. Inputs and outputs of the block's
    regions are whole. Experts do not wait."""
    attention = 2 * c.whole + 2 * c.query + 2 * c.key
    if experts:
        return attention
    return attention + 2 * c.whole + (3 if model.gated else 2) * c.ffn


# --- outside the layers ---------------------------------------------------------------------------


def embedding_bytes(model: MoEConfig, layout: Layout, software: Software, c: Counts) -> int:
    """Token ids, int64, the dropout's mask, the input of a norm, a factor."""
    ids = 8 * layout.tokens(model.seq_length)
    # where another rank has the token
    elsewhere = ids // 8 if layout.tp > 1 else 0
    positions = 0
    if layout.cp > 1 and model.positions == "learned":
        # which are no range
        positions = 8 * model.seq_length // layout.cp
    norm = norm_rows(model, c, software) if model.embedding_norm else {}
    # one number
    scale = software.weight if model.embedding_scale else 0
    return ids + elsewhere + positions + scale + sum((norm | mask_row(model, c)).values())


class Head(NamedTuple):
    kept: int
    # as of Layer
    deferred: int
    rise: int
    # copies in the model's own type, for a moment
    moment: int


def head(model: MoEConfig, layout: Layout, software: Software, c: Counts) -> Head:
    """The norm, the input of the matrix, the logits in float32; targets and masks."""
    n, w = layout.tokens(model.seq_length), software.weight
    wide = max(4, w)
    columns = -(-model.vocab_size // layout.tp)
    norm = sum(norm_rows(model, c, software).values())
    # targets, the mask of the loss; where another rank has the target
    small = (8 + 1) * n + (n if layout.tp > 1 or layout.head_chunk else 0)
    if layout.head_chunk:
        rows = min(n, layout.head_chunk)
        # logits, and the sum of the matrix's gradient with what is added to it
        moment = rows * columns * (wide + w * (w < 4)) + columns * model.hidden_size * (wide + w)
        return Head(norm + c.whole + small + wide * n, 0, 0, moment)
    copies = n * columns * w if w < 4 else 0
    logits, gradient = wide * n * columns, w * n * columns
    # the gradient takes the place of the logits; sequence parallelism brings the whole x
    rise = gradient - logits + (c.whole if layout.sequence_parallel else 0)
    return Head(norm + c.x + small + logits, c.whole + gradient, rise, copies)


# --- in flight ------------------------------------------------------------------------------------


class InFlight(NamedTuple):
    """The most micro-batches at a time whose activations a rank holds."""

    # pairs (chunk, micro-batch), as schedules.in_flight
    pairs: int
    # of the first stage, and of the last one
    embeddings: int
    heads: int
    # under zb-h1, pairs whose weight gradients wait
    deferred: int = 0


def in_flight(layout: Layout, rank: int) -> list[InFlight]:
    """schedules.in_flight in closed form (the tests compare); for zb-h1 the states of which one is
    the fullest."""
    p, m, v, name = layout.pp, layout.micro_batches, layout.virtual_stages, layout.pipeline_schedule
    if p == 1:
        return [InFlight(1, 1, 1)]
    if name == "gpipe":
        return [InFlight(m, m, m)]
    if v > 1:
        # warmup, and one forward more
        pairs = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1)
        return [InFlight(pairs, min(m, 2 * p), 1)]
    n = min(m, p - rank)
    if name in ("1f1b", "interleaved"):
        return [InFlight(n, n, n)]
    if name != "zb-h1":
        raise schedules.ScheduleError(f"{name}: how many micro-batches it holds is not known here")
    states = []
    # before I of micro-batch k: when the last F has run, and when most W wait
    for k in (m - n, min(rank, m - 1)):
        pairs = min(n, m - k)
        states.append(InFlight(pairs, pairs, pairs, min(k, rank)))
    return states


def uneven_pairs(layout: Layout, rank: int, sizes_of_chunks: list[int]) -> int:
    """Bytes at the peak where chunks keep different bytes: the list of actions is followed."""
    m = layout.micro_batches
    actions = schedules.lists(layout.pipeline_schedule, layout.pp, m, layout.virtual_stages)[rank]
    level = peak = 0
    for action in actions:
        level += schedules.IN_FLIGHT[action.op] * sizes_of_chunks[action.chunk]
        peak = max(peak, level)
    return peak


# --- of one micro-batch ---------------------------------------------------------------------------


class Kept(NamedTuple):
    """What each part of the model keeps of one micro-batch."""

    block: Layer
    expert_block: Layer
    embedding: int
    head: Head
    # the whole rotary table, of each chunk that has blocks
    rotary: int
    # what goes from stage to stage
    message: int
    # of context parallelism in one layer, or of what is added to its scores, for a moment
    moment: int


def kept(model: MoEConfig, layout: Layout, software: Software) -> Kept:
    return _kept(
        model,
        software,
        layout.micro_batch_size,
        layout.tp,
        layout.ep,
        layout.sequence_parallel,
        layout.recompute,
        layout.head_chunk,
        layout.cp,
        layout.cp_kind,
    )


@lru_cache(maxsize=4096)
def _kept(model, software, b, t, ep, sequence, again, chunk, cp, cp_kind) -> Kept:
    layout = Layout(
        micro_batch_size=b,
        tp=t,
        ep=ep,
        sequence_parallel=sequence,
        recompute=again,
        head_chunk=chunk,
        cp=cp,
        cp_kind=cp_kind,
    )
    c = counts_of(model, layout, software)
    block = expert_block = layer(model, layout, software)
    if model.num_experts:
        expert_block = layer(model, layout, software, experts=True)
    # context parallelism keeps a part in each layer, and the whole where layers run again
    has_table = model.positions == "rotary" and (cp == 1 or again == "full")
    rotary = 2 * model.seq_length * model.head_dim * software.weight if has_table else 0
    of_head = head(model, layout, software, c)
    embedding = embedding_bytes(model, layout, software, c)
    # one or the other, for context parallelism refuses such models
    moment = exchanged_bytes(layout, software, c) or bias_moment(model, software, t)
    return Kept(block, expert_block, embedding, of_head, rotary, c.x, moment)


def bias_moment(model: MoEConfig, software: Software, t: int) -> int:
    """Of what is added to the scores, while it is made: distances, int64; the result in at least 32
    bits, before and after the mask."""
    heads = bias_heads(model, t)
    return (8 + 2 * max(4, software.weight) * heads) * model.seq_length**2 if heads else 0


def exchanged_bytes(layout: Layout, software: Software, c: Counts) -> int:
    """In backward a ring has keys and values, and those that arrive; of their gradients, in at
    least 32 bits, its own, those that leave and those that arrive. An exchange of heads has what
    leaves and what comes."""
    if layout.cp == 1:
        return 0
    wide = max(4, software.weight) / software.weight
    return int((2 + 3 * wide) * 2 * c.key) if is_ring(layout) else 2 * c.query


# --- activations at the peak ----------------------------------------------------------------------


def activations(layout: Layout, kept: Kept, held: Rank, rank: int) -> dict[str, int]:
    """Bytes that are kept for backward, by part, at the peak of the step."""
    chunks = held.chunks
    of_chunks = [chunk_bytes(kept, chunk) for chunk in chunks]
    # of a whole stage's deferred weight gradients; zb-h1 has one stage on a rank
    waits = held.dense * kept.block.deferred + held.experts * kept.expert_block.deferred
    waits += held.last * kept.head.deferred
    if layout.pipeline_schedule == "zb-h1" and layout.pp > 1:
        more = zero_bubble_rise(kept, chunks[0])
    else:
        # the layers are computed again when one head's backward is over
        more = max(0, recomputed_bytes(kept, chunks[-1]) - held.last * kept.head.kept)
    fullest = {}
    for state in in_flight(layout, rank):
        layers = state.pairs * of_chunks[0]
        if min(of_chunks) < max(of_chunks):
            layers = uneven_pairs(layout, rank, of_chunks)
        parts = {
            "layers": layers + more,
            "embedding": state.embeddings * held.first * kept.embedding,
            "head": state.heads * held.last * kept.head.kept,
            "deferred": state.deferred * waits,
        }
        if sum(parts.values()) >= sum(fullest.values()):
            fullest = parts
    return fullest


def zero_bubble_rise(kept: Kept, chunk: Chunk) -> int:
    """The most that I of one stage adds to what is held, on its way from the head to the first
    block: what waits for W takes the place of what is free."""
    level = peak = 0
    for kind in reversed(chunk.layers):
        if kind == "head":
            peak = max(peak, level + kept.head.rise)
            level += kept.head.deferred - kept.head.kept
        elif kind != "embedding":
            block = kept.block if kind == "dense" else kept.expert_block
            peak = max(peak, level + block.rise)
            level += block.deferred - block.kept
        peak = max(peak, level)
    return peak


def chunk_bytes(kept: Kept, chunk: Chunk) -> int:
    """Of one stage's blocks and one micro-batch."""
    rotary = kept.rotary if chunk.dense + chunk.experts else 0
    return chunk.dense * kept.block.kept + chunk.experts * kept.expert_block.kept + rotary


def recomputed_bytes(kept: Kept, chunk: Chunk) -> int:
    """The most that is computed again at a time. Backward begins with the last block; when it comes
    to the one before, that one's input is free."""
    last, other = kept.block, kept.expert_block
    if chunk.ends_in_experts:
        last, other = other, last
    if not chunk.dense + chunk.experts:
        return 0
    if not (chunk.dense and chunk.experts):
        return last.again
    return max(last.again, other.again - last.kept)


# --- weights, gradients, state --------------------------------------------------------------------


def of_parameters(layout: Layout, software: Software, parts: list) -> dict[str, int]:
    """parts: (Part, how often the rank has it)."""
    stage = layout.zero_stage
    parameters = gradients = state = 0
    for part, count in parts:
        # without data parallelism there are no units
        units = part.units or (Unit("", 1, 1, part.size, part.size, part.size, False),)
        for unit in units:
            parameters += count * (unit.size, unit.padded, unit.padded, unit.T)[stage]
            gradients += count * (unit.T if stage >= 2 else unit.N * unit.T)
            state += count * unit.T
    return {
        "parameters": parameters * software.weight,
        "gradients": gradients * software.gradient,
        "optimizer": state * software.optimizer_state,
    }


def numbers(units: tuple[Unit, ...]) -> int:
    """In [N, T] of all units."""
    return sum(unit.N * unit.T for unit in units)


def gathered_bytes(model: MoEConfig, layout: Layout, software: Software, held: Rank) -> int:
    """Stage 3: the parameters of one layer, while those of a neighbour arrive as [N, T]."""
    if layout.zero_stage < 3 or layout.replicas == 1:
        return 0
    of_layers = [part.units for part, _ in held.parts]
    if model.tied and layout.pp == 1:
        # the head reads the tied matrix too, which is in the embedding's first unit
        of_layers[-1] += of_layers[0][:1]
    whole = [sum(unit.size for unit in units) for units in of_layers]
    most = 0
    for units in of_layers:
        # a layer's units arrive together, and are copied to their places one by one
        for k in range(len(units)):
            copied = sum(unit.size for unit in units[: k + 1])
            most = max(most, copied + numbers(units[k:]))
    for i, j in held.neighbours:
        most = max(most, whole[i] + numbers(of_layers[j]))
    return most * software.weight


def gradient_buffers(layout: Layout, software: Software, held: Rank) -> int:
    """Stages 2 and 3: gradients [N, T] on their way to their sums. One unit is filled while the one
    before is being summed. Under zb-h1 all are filled: they wait for gradients of matrices."""
    if layout.zero_stage < 2 or layout.replicas == 1:
        return 0
    of_layers = [[unit.N * unit.T for unit in part.units] for part, _ in held.parts]
    if layout.pipeline_schedule == "zb-h1":
        filled = sum(sum(units) * count for units, (_, count) in zip(of_layers, held.parts))
        # the last one of the micro-batch before
        return (filled + of_layers[-1 - held.last][-1]) * software.gradient
    most = max((sum(units) for units in of_layers), default=0)
    beside_others = [max(units) for units in of_layers]
    if held.first:
        # a block comes beside the embedding's norm, if it has one, and that beside the tokens
        beside_others[0] = of_layers[0][-1]
    for i, j in held.neighbours:
        most = max(most, beside_others[i] + beside_others[j])
    return most * software.gradient


def transient_bytes(layout: Layout, kept: Kept, held: Rank) -> int:
    """An estimate of what is there for a moment: copies of the logits, or what context-parallel
    ranks exchange in a layer, or what makes a window; messages of a pipeline, of which three are
    received ahead (transfers.lower) and one is on its way."""
    logits = kept.head.moment if held.last else 0
    messages = 4 * kept.message if layout.pp > 1 else 0
    return max(logits, kept.moment) + messages


# --- a rank ---------------------------------------------------------------------------------------


def memory(
    model: MoEConfig, layout: Layout, software: Software, rank: int | None = None
) -> dict[str, int]:
    """Bytes by part, at the peak of a step, of one rank. rank: of the p pipeline ranks; None: the
    fullest. Tensor- and data-parallel ranks hold the same.

        parameters, gradients, optimizer     all through the step
        layers, embedding, head              activations that are kept for backward
        deferred                             zb-h1: what weight gradients wait for
        gathered                             stage 3: whole parameters of a layer and the next
        gradient buffers                     stages 2 and 3: on their way to their sums
        transient                            copies of the logits, messages, a ring's buffers, a
                                             window's distances; an estimate

    The layout is one that train.py accepts.
    """
    if rank is None:
        ranks = range(layout.pp)
        if shapes.is_even(model, layout):
            # the first holds the most micro-batches, the last the logits
            ranks = {0, layout.pp - 1}
        each = [memory(model, layout, software, r) for r in ranks]
        return max(each, key=lambda parts: sum(parts.values()))
    held = shapes.of_rank(model, layout, rank)
    of_micro_batch = kept(model, layout, software)
    return {
        **of_parameters(layout, software, held.parts),
        **activations(layout, of_micro_batch, held, rank),
        "gathered": gathered_bytes(model, layout, software, held),
        "gradient buffers": gradient_buffers(layout, software, held),
        "transient": transient_bytes(layout, of_micro_batch, held),
    }


# --------------------------------------------------------------------------------------------------


def main():
    model = MoEConfig(**PRESETS["megatron-22b"][0])
    layout = Layout(tp=8, dp=4, global_batch_size=16, micro_batch_size=4, sequence_parallel=True)
    software = SOFTWARE["train.py"]
    n_h = layout.micro_batch_size * model.seq_length * model.hidden_size
    print("one layer of the 22B model, --tp 8 --sequence-parallel --micro-batch-size 4")
    for rows in layer_rows(model, layout, software):
        for name, size in rows.items():
            print(f"  {name:<28}{size:>14,} bytes{size / n_h:>8.3f} n h")
    layout = Layout(
        tp=8,
        pp=16,
        dp=8,
        virtual_stages=6,
        global_batch_size=1536,
        sequence_parallel=True,
        recompute="selective",
        zero_stage=1,
    )
    model = MoEConfig(**PRESETS["gpt3-175b"][0])
    print("GPT-3 175B on 1,024 GPUs, the fullest rank of --tp 8 --pp 16 --virtual-stages 6")
    parts = memory(model, layout, software)
    for name, size in parts.items():
        print(f"  {name:<28}{size / 2**30:>10.3f} GiB")
    print(f"  {'sum':<28}{sum(parts.values()) / 2**30:>10.3f} GiB")


if __name__ == "__main__":
    main()
