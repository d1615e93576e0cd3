"""Which layout, how much memory, how long: a prediction, before anybody pays for it.

A step is a sum of parts. Each part is a quantity that follows from the layout, divided by a rate
that a data sheet gives, times the share of this rate that training reaches. In one layer, with b
micro-batch, s sequence, h hidden, t tensor-parallel ranks, p stages, v of them on each rank:

    matmul        24 b s h² + 4 b s² h FLOPs forward in each layer, twice backward     / FLOP/s
    elementwise   bytes that norms, dropout, activations, softmax read and write       / bytes/s
    tensor        2 (t-1)/t of the bytes of each all-reduce                            / bytes/s
    context       what a layer waits for keys and values of other ranks' tokens
    pipeline      sends between stages
    bubble        (p - 1) (forward + backward) / v, with the seconds of a rank's layers
    head          logits and loss, on the last stage: the slowest rank sets the pace
    data          sums of gradients over data-parallel ranks
    optimizer     bytes that the update reads and writes

Five shares and one wait, for each pass of a collective, are fitted to published times: `Constants`.

    python planner.py      the constants, one layout taken apart, predicted beside published times

Sources: FLOPs, arXiv 2104.04473, appendix; bubble, section 2.2; activations, arXiv 2205.05198;
collectives, ZeRO, arXiv 1910.02054, section 7.

Not covered: times of single kernels and of each matrix size (Calculon, arXiv 2305.14500, has them);
on GPUs, the time to launch kernels, which is most of a tiny model's step.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("planner", command="planning.commands")

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from model_config import MoEConfig, block_matrices, num_mlps
from planning.fits import USABLE, PlanError, what_would_fit
from planning.inputs import STATE_IN_16_BITS, Layout, Machine, Software
from planning.layouts import layouts
from planning.memory import bias_heads, block_parameters, is_fused, memory, parameters

# --- what a layer reads and writes ----------------------------------------------------------------
#
# Bytes in forward, with 16-bit numbers. Matrix multiplications that are fused with what follows
# them would save some; Megatron-LM of 2021 and 2022 fused what is one line here.

# for each of b s h: two norms (read 2, write 2), two dropouts with bias and residual (read 4,
# write 2, mask 1)
NORMS_AND_RESIDUALS = 2 * 4 + 2 * 7
# for each of b s a d / t: the context is made contiguous (read 2, write 2)
CONTEXT = 4
# for each number of queries and keys that have norms (read 2, write 2)
HEAD_NORMS = 4
# for each of b s and inner size of the MLP / t: GELU (read 2, write 2); a gate is a second matrix
GELU = 4
GATED = 6
# for each of a s² b / t: scores (write 2), softmax (4), dropout (4 and its mask 1), probabilities
# (read 2)
SCORES = 13
# for each of s², and under ALiBi of a / t heads, in each layer: what a window or ALiBi adds to the
# scores (families.py) is written in 32 bits (4), masked (8), and written in 16 (6)
LOCAL_BIAS = 18
# backward reads and writes so many times the bytes of forward: counted as above, 21 of 13 for
# scores, 34 of 22 for norms and residuals
BACKWARD = 1.6
# for each weight: its gradient, of a micro-batch, is added to a 32-bit sum (4 + 4)
ACCUMULATION = 8
# for each logit: to 32 bits (6), maximum (4), minus it (8), exp (8), sum (4), softmax (8), its
# gradient (8), to 16 bits (6)
LOSS = 52
# for each parameter: unscale (8), norm (4), clip (8), zero (4); the gradient (4)
UPDATE = 28
# .. and its state, read and written; in 32 bits also to 16 (6). In 16 bits the weight is the other
# half of the master (4)
TO_16_BITS, OTHER_HALF = 6, 4
# for each of h: gradients of two norms and two biases, in 32 bits
NORM_GRADIENTS = 6 * 4

# --- how fast one rank is -------------------------------------------------------------------------


class Rank:
    """One rank of a run: how long, in seconds, it takes for what."""

    def __init__(self, machine: Machine, software: Software, model: MoEConfig, layout: Layout):
        self.machine = machine
        self.software = software
        self.model = model
        self.layout = layout
        self.flops_per_second = machine.peak * machine.constants.matmul
        self.bytes_per_second = machine.memory_bandwidth * machine.constants.memory
        # tokens of a micro-batch, b s, over context-parallel ranks; and the bytes of an activation
        self.tokens = layout.tokens(model.seq_length)
        self.activation = software.weight * self.tokens * model.hidden_size
        # the ranks of a group are numbered so far apart: tensor-parallel ranks are neighbours
        t = layout.tp
        self.strides = {"tp": 1, "ep": t, "cp": t, "replicas": t, "pp": t * layout.replicas}
        # over which sequence parallelism shards what tensor parallelism leaves whole
        self.sequence_ranks = layout.tp if layout.sequence_parallel else 1
        # MLPs that a token goes through, and numbers in all matrices that it meets, of one layer
        mlps = num_mlps(model, "router_topk")[0]
        self.mlps = mlps / model.num_layers
        self.met = block_matrices(model, mlps) / model.num_layers
        self.fused_attention = software.fused_attention and model.attention == "fused"
        # in backward, always
        self.scores_again = is_fused(model, layout, software)

    def matmul(self, flops: float) -> float:
        return flops / self.flops_per_second

    def read_write(self, nbytes: float) -> float:
        return nbytes / self.bytes_per_second

    def collective(self, group: str, nbytes: float, passes: int = 1, share: float = 1.0) -> float:
        """An all-gather, reduce-scatter or all-to-all of nbytes in all is one pass around a ring:
        each of N ranks sends (N - 1) / N of the bytes. An all-reduce is two passes. share: of the
        link."""
        size = getattr(self.layout, group)
        if size == 1:
            return 0.0
        link = self.machine.link(size, self.strides[group]) * share
        return passes * (self.machine.constants.wait + nbytes * (size - 1) / size / link)

    def send(self, nbytes: float) -> float:
        """To the next stage: in the node if the whole pipeline is there, else over the network."""
        in_node = self.layout.pp * self.strides["pp"] <= self.machine.ranks_per_node
        link = self.machine.node_link if in_node else self.machine.network_link
        return self.machine.constants.wait + nbytes / link


# --- a layer --------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """Seconds of one micro-batch going through one layer, forward or backward."""

    matmul: float
    elementwise: float
    tensor: float
    expert: float
    context: float

    def plus(self, other: "Pass") -> "Pass":
        return Pass(*(x + y for x, y in zip(self, other)))


def layer(rank: Rank) -> tuple[Pass, Pass, float]:
    """(forward, backward, the part of backward that computes weight gradients), of one layer; the
    mean where only some layers have experts."""
    model, layout = rank.model, rank.layout
    t, s, L = layout.tp, model.seq_length, model.num_layers
    heads = model.num_heads * model.head_dim
    # numbers in the matrices of this rank
    attention, mlp, experts = block_parameters(model, layout)
    with_experts = len(model.expert_layers) / L
    held = attention + (1 - with_experts) * mlp + with_experts * experts
    linear = rank.matmul(2 * rank.tokens * rank.met / t)
    # scores and context
    core = rank.matmul(4 * rank.tokens * s * heads / t)
    elementwise, scores, bias = read_and_written(rank)
    # all-reduces after attention and after the MLP; to the experts and back
    all_reduce = rank.collective("tp", rank.activation, passes=2)
    exchange = 2 * with_experts
    exchange *= rank.collective("ep", rank.activation * model.router_topk / rank.sequence_ranks)
    core_backward = (3 if rank.scores_again else 2) * core
    waits = context(rank, core, core_backward)
    forward = Pass(linear + core, elementwise + scores + bias, 2 * all_reduce, exchange, waits[0])

    # stages 2 and 3 keep a row of the sum
    adds = layout.zero_stage < 2 and not rank.software.fuses_accumulation
    accumulated = (rank.software.weight + ACCUMULATION) * held if adds else 0.0
    accumulation = accumulated / rank.bytes_per_second
    backward = Pass(
        # fused attention computes the scores again
        2 * linear + core_backward,
        BACKWARD * (elementwise + scores) + accumulation,
        tensor_backward(rank, all_reduce, linear),
        exchange,
        waits[1],
    )
    if layout.recompute == "full":
        backward = backward.plus(forward)
    elif layout.recompute == "selective" and not rank.scores_again:
        backward = backward.plus(Pass(core, scores + bias, 0.0, 0.0, 0.0))
    return forward, backward, linear + accumulation


def read_and_written(rank: Rank) -> tuple[float, float, float]:
    """Seconds of forward's element-wise operations: (outside, inside core attention, what is added
    to its scores). The last one has no backward."""
    model, t, s = rank.model, rank.layout.tp, rank.model.seq_length
    activation = (GATED if model.gated else GELU) * model.ffn_hidden_size * rank.mlps
    norms = NORMS_AND_RESIDUALS * model.hidden_size / rank.sequence_ranks
    context = CONTEXT * model.num_heads * model.head_dim
    if model.qk_norm:
        context += HEAD_NORMS * (model.num_heads + model.num_kv_heads) * model.head_dim
    scores = 0 if rank.fused_attention else SCORES * model.num_heads * s / t
    bias = LOCAL_BIAS * bias_heads(model, t) * s**2
    outside = rank.tokens * (norms + (context + activation) / t)
    return rank.read_write(outside), rank.read_write(rank.tokens * scores), rank.read_write(bias)


def tensor_backward(rank: Rank, all_reduce: float, linear: float) -> float:
    """Seconds that backward waits for tensor-parallel ranks.

    Before attention and before the MLP there is an all-reduce, beside the weight gradient of q, k,
    v and of the MLP's first matrix: each a quarter of all of the layer's weight gradients, `linear`
    seconds; less where heads share keys and values. Sequence parallelism has three collectives
    instead, each half of an all-reduce. Nothing runs beside the all-gather of the output's
    gradient. The reduce-scatter of the input's gradient runs beside the weight gradient, and the
    kept input is gathered again beside the input gradient.
    """
    half = all_reduce / 2
    waits = 0.0
    model = rank.model
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.hidden_size
    for share in (min(1 / 4, qkv / rank.met), 1 / 4):
        beside = share * linear if rank.software.overlaps_tensor else 0.0
        if rank.layout.sequence_parallel:
            waits += half + 2 * max(0.0, half - beside)
        else:
            waits += max(0.0, all_reduce - beside)
    if rank.layout.sequence_parallel and rank.software.sums_norms_by_layer:
        waits += rank.collective("tp", NORM_GRADIENTS * rank.model.hidden_size, passes=2)
    if rank.model.qk_norm and not rank.layout.sequence_parallel:
        # gradients of the two norms, which each rank has of its heads
        waits += rank.collective("tp", 2 * rank.model.head_dim * rank.software.weight, passes=2)
    return waits


def head_bytes(rank: Rank, heads: int) -> float:
    """Of the keys, for example, of this rank's tokens and of so many heads of the whole model."""
    return rank.software.weight * rank.tokens * heads * rank.model.head_dim / rank.layout.tp


def to_neighbour(rank: Rank, width: float = 1.0) -> float:
    """Seconds in which keys and values go to the next rank of the ring, on all ranks at once.
    width: of a number, over that of a weight."""
    link = rank.machine.link(rank.layout.cp, rank.strides["cp"])
    nbytes = 2 * head_bytes(rank, rank.model.num_kv_heads) * width
    return rank.machine.constants.wait + nbytes / link


def context(rank: Rank, forward: float, backward: float) -> tuple[float, float]:
    """Seconds that (forward, backward) waits for context-parallel ranks. forward, backward: seconds
    of attention to all keys.

    A ring's next keys and values come beside attention to those that are there. In backward the
    gradients of keys and values follow them from the second step on, and nothing runs beside their
    last way, to the rank that they belong to.
    """
    n = rank.layout.cp
    if n == 1:
        return 0.0, 0.0
    if rank.layout.cp_kind == "all-to-all":
        # queries and results, keys and values
        heads = rank.model.num_heads, rank.model.num_kv_heads
        seconds = 2 * sum(rank.collective("cp", head_bytes(rank, a)) for a in heads)
        return seconds, seconds
    keys = to_neighbour(rank)
    gradients = to_neighbour(rank, max(4, rank.software.weight) / rank.software.weight)
    # attention in each of the n - 1 steps that have something on the way
    beside_forward, beside_backward = (seconds * (n - 1) / n for seconds in (forward, backward))
    moved = (n - 1) * keys + (n - 2) * gradients
    waits = max(0.0, moved - beside_backward) + gradients
    return max(0.0, (n - 1) * keys - beside_forward), waits


# --- outside the layers ---------------------------------------------------------------------------


def head(rank: Rank) -> float:
    """Seconds of one micro-batch in the output layer and the loss, forward and backward.

    With one stage the rank has the embedding as well, and waits for its all-reduce too.
    """
    logits = rank.tokens * rank.model.vocab_size / rank.layout.tp
    # the gradient of the head's input; the sum of the embedding's parts
    summed = 2 if rank.layout.pp == 1 else 1
    waits = summed * rank.collective("tp", rank.activation, passes=2)
    # the loss: the largest logit; the sum of exponentials and the target's logit, in 32 bits
    waits += rank.collective("tp", 4 * rank.tokens, passes=2)
    waits += rank.collective("tp", 8 * rank.tokens, passes=2)
    loss = LOSS * logits / rank.bytes_per_second
    return rank.matmul(6 * logits * rank.model.hidden_size) + loss + waits


def pipeline(rank: Rank) -> float:
    """Seconds of sends in a step, and of the sum of a tied embedding's two gradients."""
    model, layout = rank.model, rank.layout
    if rank.software.scatters_pipeline:
        send = rank.send(rank.activation / layout.tp)
        if not layout.sequence_parallel:
            send += rank.collective("tp", rank.activation)
    else:
        send = rank.send(rank.activation / rank.sequence_ranks)
    # activations and gradients: of each chunk and micro-batch, and while the pipeline fills
    count = 2 * (layout.micro_batches * layout.virtual_stages + layout.pp - 1)
    tied = model.vocab_size * model.hidden_size / layout.tp if model.tied else 0
    return count * send + rank.send(rank.software.gradient * tied)


def data_parallel(rank: Rank, forward: float, backward: float) -> float:
    """Seconds that sums of gradients and gathers of parameters add to a step.

    forward, backward: seconds of one micro-batch, beside which they run.
    """
    software, stage, m = rank.software, rank.layout.zero_stage, rank.layout.micro_batches
    size = sum(parameters(rank.model, rank.layout))
    share = rank.machine.constants.zero3 if software.waits_for_reductions else 1.0
    # each layer, the embedding and the head
    units = rank.model.num_layers / rank.layout.pp + 2 if software.reduces_by_layer else 1
    gather = units * rank.collective("replicas", software.weight * size / units, share=share)
    reduce = units * rank.collective("replicas", software.reduced * size / units, share=share)
    if stage == 3:
        if software.waits_for_reductions:
            return m * (max(0, gather - forward) + max(0, gather - backward) + reduce)
        return m * (max(0, gather - forward) + max(0, gather + reduce - backward))
    beside = backward if software.overlaps_data else 0.0
    if stage == 2:
        return m * max(0, reduce - beside) + gather
    if stage == 1:
        return max(0, reduce - beside) + gather
    # an all-reduce: twice the bytes
    return max(0, 2 * reduce - beside)


# --- a step ---------------------------------------------------------------------------------------


def step_time(
    machine: Machine, software: Software, model: MoEConfig, layout: Layout
) -> dict[str, float]:
    """Seconds of one step of the global batch, by part. Their sum is the step.

    The slowest rank sets the pace: it has the most layers, and the head.
    """
    rank = Rank(machine, software, model, layout)
    p, v, m, L = layout.pp, layout.virtual_stages, layout.micro_batches, model.num_layers
    forward, backward, weight_gradient = layer(rank)
    layers = layout.most_layers(L)
    seconds = {}
    for name, in_forward, in_backward in zip(Pass._fields, forward, backward):
        seconds[name] = m * layers * (in_forward + in_backward)
    seconds["head"] = m * head(rank)
    if p > 1:
        # it waits while the others fill and drain the pipeline
        waits = sum(forward) + sum(backward)
        if layout.pipeline_schedule == "zb-h1":
            # f + I - W instead of f + I + W: weight gradients fill the waits for input gradients
            waits -= 2 * min(weight_gradient, sum(backward) / 2)
        seconds["bubble"] = (p - 1) * L / p * waits / v
        seconds["pipeline"] = pipeline(rank)
    if layout.replicas > 1:
        seconds["data"] = data_parallel(rank, layers * sum(forward), layers * sum(backward))
    shards = layout.replicas if layout.zero_stage else 1
    held = sum(parameters(model, layout))
    state = software.optimizer_state
    update = UPDATE + 2 * state + (OTHER_HALF if state == STATE_IN_16_BITS else TO_16_BITS)
    seconds["optimizer"] = update * held / shards / rank.bytes_per_second
    return seconds


# --- which layout ---------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A layout, with what `step_time` and `memory` say of it."""

    layout: Layout
    parts: dict[str, float]
    bytes: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def search(
    machine: Machine, software: Software, model: MoEConfig, gpus: int, global_batch: int
) -> list[Plan]:
    """Every layout that train.py accepts and that fits into memory, the fastest first.

    Raises PlanError where none does.
    """
    plans = sorted(
        fitting(machine, software, model, gpus, global_batch), key=lambda plan: plan.seconds
    )
    if not plans:
        raise PlanError(what_would_fit(machine, software, model, gpus, global_batch))
    return plans


def fitting(
    machine: Machine, software: Software, model: MoEConfig, gpus: int, global_batch: int
) -> Iterator[Plan]:
    """Every layout that train.py accepts and that fits into memory."""
    # layouts, without their micro-batch: larger ones will not fit either
    full = set()
    for layout in layouts(model, software, gpus, global_batch):
        others = dataclasses.replace(layout, micro_batch_size=1)
        if others in full:
            continue
        held = memory(model, layout, software)
        if sum(held.values()) > USABLE * machine.memory:
            full.add(others)
            continue
        yield Plan(layout, step_time(machine, software, model, layout), held)
