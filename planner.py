"""Which layout, how much memory, how long: a prediction, before anybody pays for it.

A step is a sum of parts. Each part is a quantity that follows from the layout, divided by a rate
that a data sheet gives, times the share of this rate that training reaches:

    matmul        24 b s h² + 4 b s² h FLOPs forward in each layer, twice backward     / FLOP/s
    memory        bytes that element-wise operations read and write                    / bytes/s
    tensor        2 (t-1)/t bytes of each all-reduce                                   / bytes/s
    pipeline      sends between stages
    bubble        (p - 1) (f + b) / v, with the seconds f and b of a stage's passes
    head          logits and loss, on the last stage: the slowest rank sets the pace
    data          sums of gradients over data-parallel ranks
    optimizer     bytes that the update reads and writes

The shares are six constants (`Constants`), fitted to published times.

    python planner.py      the constants, one layout taken apart, predicted beside published times

Sources: FLOPs, arXiv 2104.04473, appendix; bubble, section 2.2; activations, arXiv 2205.05198;
collectives, ZeRO, arXiv 1910.02054, section 7.

Not covered: times of single kernels and of each matrix size (Calculon, arXiv 2305.14500, has them).
"""

from typing import NamedTuple

from planning.inputs import Layout, Machine, Software
from routers import MoEConfig
from runtime import sizes

# --- what a layer reads and writes ----------------------------------------------------------------
#
# Bytes in forward, with 16-bit numbers. Matrix multiplications that are fused with what follows
# them would save some; Megatron-LM of 2021 and 2022 fused what is one line here.

# for each of b s h: two norms (read 2, write 2), two dropouts with bias and residual (read 4,
# write 2, mask 1)
NORMS_AND_RESIDUALS = 2 * 4 + 2 * 7
# for each of b s h / t: the context is made contiguous (read 2, write 2)
CONTEXT = 4
# for each of b s and inner size of the MLP / t: GELU (read 2, write 2); SwiGLU reads two matrices
GELU = 4
SWIGLU = 6
# for each of a s² b / t: scores (write 2), softmax (4), dropout (4 and its mask 1), probabilities
# (read 2)
SCORES = 13
# backward reads and writes so many times the bytes of forward
BACKWARD = 1.6
# for each weight: the gradient of a micro-batch (2) is added to a 32-bit sum (4 + 4)
ACCUMULATION = 10
# for each logit: to 32 bits (6), maximum (4), minus it (8), exp (8), sum (4), softmax (8), its
# gradient (8), to 16 bits (6)
LOSS = 52
# for each parameter: unscale (8), norm (4), clip (8), AdamW (28), to 16 bits (6), zero (4)
UPDATE = 58

# --- the times of one rank ------------------------------------------------------------------------


class Rates:
    """How long things take on one rank, in seconds."""

    def __init__(self, machine: Machine, software: Software, layout: Layout):
        self.machine = machine
        self.layout = layout
        self.bytes_per_number = software.weight
        self.flops = machine.peak * machine.constants.matmul
        self.bytes = machine.memory_bandwidth * machine.constants.memory
        # a group's ranks are numbered so far apart: tensor-parallel ranks are neighbours
        self.strides = {"tp": 1, "ep": layout.tp, "dp": layout.tp, "pp": layout.tp * layout.dp}

    def matmul(self, flops: float) -> float:
        return flops / self.flops

    def memory(self, nbytes: float) -> float:
        """nbytes: as if numbers had 16 bits."""
        return nbytes * self.bytes_per_number / 2 / self.bytes

    def collective(self, group: str, nbytes: float, passes: int = 1, share: float = 1.0) -> float:
        """An all-gather, reduce-scatter or all-to-all of nbytes in all. An all-reduce takes two
        passes. In a ring of N ranks each sends (N - 1) / N of the bytes. share: of the link."""
        size = getattr(self.layout, group)
        if size == 1:
            return 0.0
        link = self.machine.link(size, self.strides[group]) * share
        return self.machine.constants.wait + passes * nbytes * (size - 1) / size / link

    def send(self, nbytes: float) -> float:
        """To the next stage: in the node if the whole pipeline is there, else over the network."""
        in_node = self.layout.pp * self.strides["pp"] <= self.machine.ranks_per_node
        link = self.machine.node_link if in_node else self.machine.network_link
        return self.machine.constants.wait + nbytes / link


class Pass(NamedTuple):
    """Seconds of one micro-batch going through one layer, forward or backward."""

    matmul: float
    memory: float
    tensor: float
    expert: float

    def plus(self, other: "Pass") -> "Pass":
        return Pass(*(x + y for x, y in zip(self, other)))


def layer(rates: Rates, software: Software, model: MoEConfig, layout: Layout) -> tuple[Pass, Pass]:
    """(forward, backward) of one layer, the mean where only some layers have experts."""
    t, b, s, h = layout.tp, layout.micro_batch_size, model.seq_length, model.hidden_size
    L = model.num_layers
    tokens = b * s
    # MLPs that a token goes through, and numbers in the matrices that it meets
    mlps = sizes.num_mlps(model, "router_topk")[0]
    weights = sizes.block_matrices(model, mlps) / L
    linear = rates.matmul(2 * tokens * weights / t)
    # scores and context
    core = rates.matmul(4 * b * s * s * h / t)

    sequence_ranks = t if layout.sequence_parallel else 1
    activation = SWIGLU if model.llama else GELU
    elementwise = rates.memory(
        NORMS_AND_RESIDUALS * tokens * h / sequence_ranks
        + (CONTEXT * h + activation * model.ffn_hidden_size * mlps / L) * tokens / t
    )
    fused = software.fused_attention and model.attention == "fused"
    scores = 0.0 if fused else rates.memory(SCORES * model.num_heads * s * tokens / t)

    # forward: after attention and after the MLP. Sequence parallelism has a reduce-scatter and an
    # all-gather instead, of as many bytes.
    all_reduce = rates.collective("tp", software.weight * tokens * h, passes=2)
    experts = len(model.expert_layers) / L
    sent = software.weight * tokens * h * model.router_topk / sequence_ranks
    # to the experts and back
    exchange = experts * 2 * rates.collective("ep", sent)
    forward = Pass(linear + core, elementwise + scores, 2 * all_reduce, exchange)

    # Backward: before both. The all-reduce or reduce-scatter runs beside a weight gradient, which
    # is a quarter of the layer's or more. Sequence parallelism's all-gather does not.
    beside = linear / 4 if software.overlaps_tensor else 0.0
    all_gather = all_reduce / 2 if layout.sequence_parallel else 0.0
    exposed = all_gather + max(0.0, all_reduce - all_gather - beside)
    accumulation = (
        0.0
        if layout.zero_stage >= 2 or software.fuses_accumulation
        else rates.memory(ACCUMULATION * weights / t)
    )
    # a fused core computes the scores again
    backward = Pass(
        2 * linear + (3 if fused else 2) * core,
        BACKWARD * (elementwise + scores) + accumulation,
        2 * exposed,
        exchange,
    )
    if layout.recompute == "full":
        backward = backward.plus(forward)
    elif layout.recompute == "selective" and not fused:
        backward = backward.plus(Pass(core, scores, 0.0, 0.0))
    return forward, backward


def head(rates: Rates, software: Software, model: MoEConfig, layout: Layout) -> float:
    """Seconds of one micro-batch in the output layer and the loss, forward and backward."""
    tokens = layout.micro_batch_size * model.seq_length
    logits = tokens * model.vocab_size / layout.tp
    # the input's gradient; maximum, sum of exp, target's logit
    reductions = rates.collective("tp", software.weight * tokens * model.hidden_size, passes=2)
    reductions += 3 * rates.collective("tp", 4 * tokens, passes=2)
    return rates.matmul(6 * logits * model.hidden_size) + rates.memory(LOSS * logits) + reductions


def parameters(model: MoEConfig, layout: Layout) -> float:
    """Numbers in the matrices of the fullest rank: the first, which has the embedding."""
    experts = len(model.expert_layers) * model.num_experts * sizes.mlp_matrices(model)
    everything = sizes.least_parameters(model)
    embedding = model.vocab_size * model.hidden_size
    outside = everything - experts - embedding
    each = (outside + experts / layout.ep) / layout.pp + embedding
    return each / layout.tp


def data_parallel(
    rates: Rates, software: Software, size: float, forward: float, backward: float, m: int
) -> float:
    """Seconds that summing gradients and gathering parameters add to a step.

    size: numbers of this rank's parameters. forward, backward: seconds of one micro-batch.
    """
    stage = rates.layout.zero_stage
    share = rates.machine.constants.zero3 if software.waits_for_reductions else 1.0
    gather = rates.collective("dp", software.weight * size, share=share)
    reduce = rates.collective("dp", software.reduced * size, share=share)
    if stage == 3:
        beside = 0.0 if software.waits_for_reductions else reduce
        exposed = max(0.0, gather - forward) + max(0.0, gather + beside - backward)
        return m * (exposed + reduce - beside)
    if stage == 2:
        return m * max(0.0, reduce - backward) + gather
    if stage == 1:
        return max(0.0, reduce - (backward if software.overlaps_data else 0.0)) + gather
    return max(0.0, 2 * reduce - (backward if software.overlaps_data else 0.0))


def step_time(
    machine: Machine, software: Software, model: MoEConfig, layout: Layout
) -> dict[str, float]:
    """Seconds of one step of the global batch, by part. Their sum is the step."""
    rates = Rates(machine, software, layout)
    p, v, m = layout.pp, layout.virtual_stages, layout.micro_batches
    L = model.num_layers
    forward, backward = layer(rates, software, model, layout)
    both = forward.plus(backward)
    # of the slowest rank
    layers = -(-L // (p * v)) * v
    last = head(rates, software, model, layout)
    seconds = {name: m * layers * value for name, value in zip(Pass._fields, both)}
    seconds["head"] = m * last
    size = parameters(model, layout)
    if p > 1:
        # each rank waits while the others fill and drain the pipeline
        seconds["bubble"] = (p - 1) * L / p * sum(both) / v
        seconds["pipeline"] = pipeline(rates, software, model, layout)
    if layout.dp > 1:
        times = layers * sum(forward), layers * sum(backward)
        seconds["data"] = data_parallel(rates, software, size, *times, m)
    shards = layout.dp if layout.zero_stage else 1
    seconds["optimizer"] = rates.memory(UPDATE * size / shards)
    return seconds


def pipeline(rates: Rates, software: Software, model: MoEConfig, layout: Layout) -> float:
    """Seconds of sends in a step, and of the sum of a tied embedding's two gradients."""
    nbytes = software.weight * layout.micro_batch_size * model.seq_length * model.hidden_size
    send = rates.send(nbytes / (layout.tp if software.scatters_pipeline else 1))
    if software.scatters_pipeline and not layout.sequence_parallel:
        send += rates.collective("tp", nbytes)
    # activations and gradients: of each chunk and micro-batch, and while the pipeline fills
    count = 2 * (layout.micro_batches * layout.virtual_stages + layout.pp - 1)
    tied = 0 if model.llama else software.gradient * model.vocab_size * model.hidden_size
    return count * send + rates.send(tied / layout.tp)
