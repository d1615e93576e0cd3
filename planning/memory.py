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
stages on each, m micro-batches, V vocabulary, n = b s.

Not covered: memory that PyTorch's allocator cannot use, workspaces of libraries, what CUDA kernels
(--kernels auto) and torch.compile keep in another form.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import recompute
from model_config import GPTConfig
from planning import shapes
from planning.inputs import Layout, Software
from planning.shapes import Chunk, Part, Sizes

# --- what a layer keeps ---------------------------------------------------------------------------


class Layer(NamedTuple):
    """Bytes that one block keeps of one micro-batch, on one rank."""

    # with the layout's recomputation
    kept: int
    # at most so many more, while backward computes this layer again
    again: int
    # what the weight gradients of zb-h1 wait for
    deferred: int


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
    # elements of [b, a, s, s]
    scores: int
    # [b, s, ffn / t]
    ffn: int


def counts_of(model: GPTConfig, layout: Layout, software: Software) -> Counts:
    b, s, h, t = layout.micro_batch_size, model.seq_length, model.hidden_size, layout.tp
    n, w = b * s, software.weight
    tokens = n // t if layout.sequence_parallel else n
    return Counts(
        x=tokens * h * w,
        whole=n * h * w,
        tokens=tokens,
        query=n * h // t * w,
        key=n * (model.num_kv_heads * model.head_dim) // t * w,
        scores=b * (model.num_heads // t) * s * s,
        ffn=n * model.ffn_hidden_size // t * w,
    )


def norm_rows(model: GPTConfig, c: Counts, software: Software) -> dict[str, int]:
    """The mean and 1/σ of a token are float32; an RMSNorm has no mean."""
    if not model.llama:
        return {"norm input": c.x, "norm statistics": 8 * c.tokens}
    rows = {"norm input": c.x, "norm statistics": 4 * c.tokens}
    if not software.fused_rms_norm:
        # made of single operations, which work in float32
        wide = max(4, software.weight) // software.weight
        rows["norm input"] = c.x * (1 if wide == 1 else 1 + wide)
        rows["normalised"] = c.x
    return rows


def core_rows(
    model: GPTConfig, layout: Layout, c: Counts, software: Software
) -> dict[str, int]:
    """softmax(q kᵀ) v with its dropout."""
    if model.attention == "fused":
        # two numbers for a row of scores in one: its log Σ exp, float32
        rows = 4 * layout.micro_batch_size * model.num_heads // layout.tp * model.seq_length
        return {"query": c.query, "key": c.key, "value": c.key, "row sums": rows}
    # grouped keys and values are repeated for each head
    rows = {"query": c.query, "key": c.query, "value": c.query}
    rows["softmax"] = c.scores * software.weight
    if model.dropout:
        rows["attention mask"] = c.scores
        rows["dropped softmax"] = c.scores * software.weight
    return rows


def mask_row(model: GPTConfig, c: Counts) -> dict[str, int]:
    """One byte for an element."""
    return {"residual mask": c.tokens * model.hidden_size} if model.dropout else {}


def mlp_rows(model: GPTConfig, c: Counts) -> dict[str, int]:
    """Everything between the norm and the residual. silu(gate) * up needs both factors."""
    rows = {"up input": c.x}
    if model.llama:
        rows |= {"gate": c.ffn, "silu": c.ffn, "up": c.ffn}
    else:
        rows |= {"gelu input": c.ffn}
    return rows | {"down input": c.ffn}


def expert_rows(model: GPTConfig, layout: Layout, c: Counts, software: Software) -> dict[str, int]:
    """As mlp_rows, of experts (moe.py)."""
    n = layout.micro_batch_size * model.seq_length
    k, e = model.router_topk, model.num_experts
    assignments = n * k
    wide = max(4, software.weight)
    rows = {
        "router input": c.tokens * model.hidden_size * wide,
        "expert input": k * c.whole,
        "gelu input": k * c.ffn,
        "down input": k * c.ffn,
        "combine input": k * c.whole,
        "weights of rows": assignments * software.weight,
        # int64: where rows go, and where they come from
        "indices": plan_bytes(model, layout) - 8 * e,
    }
    if model.llama:
        rows |= {"gate": k * c.ffn, "silu": k * c.ffn}
    # sigmoid or softmax, of all logits or of the chosen ones
    chosen_alone = model.router == "topk" and k > 1
    rows["probabilities"] = wide * (assignments if chosen_alone else n * e)
    rows["losses"] = wide * c.tokens * e * ((model.aux_loss > 0) + (model.z_loss > 0))
    return rows


def plan_bytes(model: GPTConfig, layout: Layout) -> int:
    """A DispatchPlan: chosen, order, position; across ranks also by_expert, by_rank. int64."""
    assignments = layout.micro_batch_size * model.seq_length * model.router_topk
    return 8 * assignments * (5 if layout.ep > 1 else 3) + 8 * model.num_experts


def layer_rows(
    model: GPTConfig, layout: Layout, software: Software, experts: bool = False
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """What a block keeps without recomputation: rows before attention's core, of the core, after
    it. A row: what is kept -> bytes."""
    c = counts_of(model, layout, software)
    norm, mask = norm_rows(model, c, software), mask_row(model, c)
    before = {**norm, "q k v input": c.x}
    core = core_rows(model, layout, c, software)
    inner = expert_rows(model, layout, c, software) if experts else mlp_rows(model, c)
    after = {"output input": c.query}
    after |= {f"attention {name}": size for name, size in mask.items()}
    after |= {f"mlp {name}": size for name, size in (norm | inner | mask).items()}
    return before, core, after


def layer(model: GPTConfig, layout: Layout, software: Software, experts: bool = False) -> Layer:
    """One block, with the layout's recomputation."""
    before, core, after = (sum(r.values()) for r in layer_rows(model, layout, software, experts))
    c = counts_of(model, layout, software)
    deferred = deferred_bytes(model, layout, c, experts)
    key = 4 * layout.micro_batch_size if model.dropout else 0
    if layout.recompute == "full":
        kept = c.x + key + (plan_bytes(model, layout) if experts else 0)
        return Layer(kept, before + core + after - c.x, deferred)
    if layout.recompute == "selective" and model.attention == "explicit":
        inputs = c.query + 2 * c.key + key
        # the queries of one sequence are in the order that the matrix product needs
        shared = c.query if layout.micro_batch_size == 1 else 0
        # what comes after the core is free by then
        return Layer(before + inputs + after, max(0, core - shared - after), deferred)
    return Layer(before + core + after, 0, deferred)


def deferred_bytes(model: GPTConfig, layout: Layout, c: Counts, experts: bool) -> int:
    """What W of a block starts from: ∂y and x of each matrix. Inputs and outputs of the block's
    regions are whole. Experts do not wait."""
    attention = 2 * c.whole + 2 * c.query + 2 * c.key
    if experts:
        return attention
    return attention + 2 * c.whole + (3 if model.llama else 2) * c.ffn


# --- outside the layers ---------------------------------------------------------------------------


def embedding_bytes(model: GPTConfig, layout: Layout, c: Counts) -> int:
    """Token ids, int64, and the dropout's mask."""
    ids = 8 * layout.micro_batch_size * model.seq_length
    # where another rank has the token
    elsewhere = ids // 8 if layout.tp > 1 else 0
    return ids + elsewhere + sum(mask_row(model, c).values())


class Head(NamedTuple):
    kept: int
    # as of Layer
    deferred: int
    # copies in the model's own type, for a moment
    moment: int


def head(model: GPTConfig, layout: Layout, software: Software, c: Counts) -> Head:
    """The norm, the input of the matrix, the logits in float32; targets and masks."""
    n, w = layout.micro_batch_size * model.seq_length, software.weight
    wide = max(4, w)
    columns = -(-model.vocab_size // layout.tp)
    norm = sum(norm_rows(model, c, software).values())
    # targets, the mask of the loss; where another rank has the target
    small = (8 + 1) * n + (n if layout.tp > 1 or layout.head_chunk else 0)
    if layout.head_chunk:
        rows = min(n, layout.head_chunk)
        # logits, and the sum of the matrix's gradient with what is added to it
        moment = rows * columns * (wide + w * (w < 4)) + columns * model.hidden_size * (wide + w)
        return Head(norm + c.whole + small + wide * n, 0, moment)
    copies = n * columns * w if w < 4 else 0
    return Head(norm + c.x + small + wide * n * columns, c.whole + n * columns * w, copies)


# --- in flight ------------------------------------------------------------------------------------


class InFlight(NamedTuple):
    """The most micro-batches at a time whose activations a rank holds."""

    # pairs (chunk, micro-batch), as schedules.in_flight
    pairs: int
    # of the first stage, and of the last one
    embeddings: int
    heads: int


def in_flight(layout: Layout, rank: int) -> InFlight:
    """schedules.in_flight in closed form (the tests compare)."""
    p, m, v, name = layout.pp, layout.micro_batches, layout.virtual_stages, layout.pipeline_schedule
    if p == 1:
        return InFlight(1, 1, 1)
    if name == "gpipe":
        return InFlight(m, m, m)
    if v == 1:
        pairs = min(m, p - rank)
        return InFlight(pairs, pairs, pairs)
    # warmup, and one forward more
    pairs = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1)
    return InFlight(pairs, min(m, 2 * p), 1)
