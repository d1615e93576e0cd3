"""Seconds of one micro-batch in one layer, forward and backward, on one rank: a part of planner.py.

    Rank       how fast a rank is: products, bytes of its memory, collectives
    Pass       seconds of a layer, by part
    layer      (forward, backward, what W of zb-h1 has), with recomputation, LoRA and FP8

Sources and letters: as in planner.py.

Not covered: as there; casts to FP8 in cross attention.
"""

from typing import NamedTuple

from base.model_config import MoEConfig, attention_matrices, latent_matrices, mlp_matrices, num_mlps
from planning.inputs import Layout, Machine, PlanError, Software
from planning.memory import (
    bias_heads,
    block_parameters,
    is_fused,
    is_ring,
    keeps_fp8_bytes,
    local_share,
    lora_parameters,
    lora_widths,
    tokens_of,
    waits_for_w,
)

# --- what a layer reads and writes ----------------------------------------------------------------
#
# Bytes in forward, with 16-bit numbers. Matrix multiplications that are fused with what follows
# them would save some; Megatron-LM of 2021 and 2022 fused what is one line here.

# For each of b s h: two norms (read 2, write 2), two dropouts with bias and residual (read 4,
# write 2, mask 1).
NORMS_AND_RESIDUALS = 2 * 4 + 2 * 7
# For each of b s a d / t: the context is made contiguous (read 2, write 2).
CONTEXT = 4
# For each number of queries and keys that have norms (read 2, write 2).
HEAD_NORMS = 4
# For each of b s and inner size of the MLP / t: GELU (read 2, write 2); a gate is a second matrix.
GELU = 4
GATED = 6
# For each of a s² b / t: scores (write 2), softmax (4), dropout (4 and its mask 1), probabilities
# (read 2).
SCORES = 13
# For each of s², and under ALiBi of a / t heads, in each layer: what a window or ALiBi adds to the
# scores (families.py) is written in 32 bits (4), masked (8), and written in 16 (6).
LOCAL_BIAS = 18
# Backward reads and writes so many times the bytes of forward: counted as above, 21 of 13 for
# scores, 34 of 22 for norms and residuals.
BACKWARD = 1.6
# For each weight: its gradient, of a micro-batch, is added to a 32-bit sum (4 + 4).
ACCUMULATION = 8
# For each number that becomes a byte: read (2), written by rows and by columns (1 + 1); `current`
# first reads it for its maximum (2), but for what norms and SwiGLU give, which is left out here;
# blocks have two maxima.
CAST = {"off": 0, "delayed": 4, "current": 6, "block": 8}
# LoRA: for each number that A reads (2); that B writes (2) and adds (read 4, write 2)
LORA_READ, LORA_ADD = 2, 8
# For each of h: gradients of two norms and two biases, in 32 bits.
NORM_GRADIENTS = 6 * 4

# --- how fast one rank is -------------------------------------------------------------------------


class Rank:
    """One rank of a run: how long, in seconds, it takes for what. s: tokens of a sequence, by
    default the longest."""

    def __init__(
        self,
        machine: Machine,
        software: Software,
        model: MoEConfig,
        layout: Layout,
        s: int | None = None,
    ):
        self.s = s or model.seq_length + model.target_length
        self.machine = machine
        self.software = software
        self.model = model
        self.layout = layout
        self.flops_per_second = machine.peak * machine.constants.matmul
        self.bytes_per_second = machine.memory_bandwidth * machine.constants.memory
        # Tokens of a micro-batch, b s, over context-parallel ranks; and the bytes of an activation.
        self.tokens = layout.tokens(self.s)
        self.activation = software.weight * self.tokens * model.hidden_size
        # The ranks of a group are numbered so far apart: tensor-parallel ranks are neighbours.
        t = layout.tp
        self.strides = {"tp": 1, "ep": t, "cp": t, "shard": t, "pp": t * layout.replicas}
        self.strides |= {"expert_shard": t * layout.ep, "replicate": t * layout.shard}
        # The ranks over which sequence parallelism shards what tensor parallelism leaves whole.
        self.sequence_ranks = layout.tp if layout.sequence_parallel else 1
        # Heads of keys, copies on several tensor-parallel ranks included.
        self.key_heads = model.num_kv_heads * model.key_copies(layout.tp)
        # MLPs that a token goes through, and numbers in all matrices that it meets, of one layer,
        # without cross attention.
        self.mlps = num_mlps(model, "router_topk")[0] / model.num_layers
        self.met = attention_matrices(model) + self.mlps * mlp_matrices(model)
        # Numbers in the matrices of q, k and v of one layer.
        heads = model.num_heads + 2 * model.num_kv_heads
        self.qkv = heads * model.head_dim * model.hidden_size
        self.fused_attention = software.fused_attention and model.attention == "fused"
        if is_ring(layout) and bias_heads(model, layout):
            self.fused_attention = False
        # In backward, always.
        self.scores_again = is_fused(model, layout, software)
        if software.fp8 != "off" and not machine.has_fp8:
            raise PlanError(f"{machine.name} has no FP8; leave --fp8 out")

    def half(self, crosses: bool) -> "Rank":
        """This rank in a decoder's layers, on the target alone; in an encoder's, on the source."""
        if not self.model.cross_layers:
            return self
        s = tokens_of(self.model, crosses)
        return Rank(self.machine, self.software, self.model, self.layout, s)

    def matmul(self, flops: float, in_fp8: float = 0.0) -> float:
        """in_fp8: of these FLOPs, the share that reads bytes."""
        twice = 2 * self.machine.peak * self.machine.constants.fp8
        return flops * ((1 - in_fp8) / self.flops_per_second + in_fp8 / twice)

    def read_write(self, nbytes: float) -> float:
        """nbytes: where numbers have 16 bits."""
        return nbytes * self.software.weight / 2 / self.bytes_per_second

    def collective(self, group: str, nbytes: float, passes: int = 1, single: bool = False) -> float:
        """An all-gather, reduce-scatter or all-to-all of nbytes in all is one pass around a ring:
        each of N ranks sends (N - 1) / N of the bytes. An all-reduce is two passes. single: of one
        parameter, through one adapter of each node."""
        size = getattr(self.layout, group)
        if size == 1:
            return 0.0
        constants, link = self.machine.constants, self.machine.link(size, self.strides[group])
        if single:
            link = min(link, self.machine.network_link)
        wait = constants.zero3 if single else constants.wait
        return passes * (wait + nbytes * (size - 1) / size / link)

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


def layer(
    rank: Rank, recomputed: float = 1.0, in_fp8: float = 0.0, crosses: bool = False
) -> tuple[Pass, Pass, float]:
    """(forward, backward, the part of backward that zb-h1 computes later: weight gradients), of one
    layer; the mean where only some layers have experts. recomputed, in_fp8: shares of layers.
    crosses: with cross attention."""
    rank = rank.half(crosses)
    model, layout = rank.model, rank.layout
    with_experts = len(model.expert_layers) / model.num_layers
    linear, weight_gradient, deferred = products(rank, with_experts, in_fp8)
    # Scores and context.
    heads = model.num_heads * (model.head_dim + model.value_size)
    core = rank.matmul(2 * rank.tokens * rank.s * heads / layout.tp)
    elementwise, scores, bias = read_and_written(rank)
    # All-reduces after attention and after the MLP; to the experts and back.
    all_reduce = rank.collective("tp", rank.activation, passes=2)
    exchange = 2 * with_experts
    exchange *= rank.collective("ep", rank.activation * model.router_topk / rank.sequence_ranks)
    core_backward = (3 if rank.scores_again else 2) * core
    waits = context(rank, core, core_backward)
    casts, casts_backward = fp8_casts(rank, in_fp8)
    tensor, tensor_again = tensor_waits(rank, all_reduce, weight_gradient)
    if crosses:
        cross = cross_attention(rank, in_fp8)
        linear, weight_gradient, deferred = (
            seconds + cross.linear for seconds in (linear, weight_gradient, deferred)
        )
        core_backward *= 1 + cross.core / core
        core += cross.core
        elementwise, scores = elementwise + cross.outside, scores + cross.scores
        tensor, tensor_again = tensor + cross.waits[0], tensor_again + cross.waits[1]
    read_write = elementwise + scores + bias + casts
    forward = Pass(linear + core, read_write, tensor, exchange, waits[0])

    accumulation = accumulated(rank, with_experts, crosses) / rank.bytes_per_second
    backward = Pass(
        # Fused attention computes the scores again.
        linear + weight_gradient + core_backward,
        BACKWARD * (elementwise + scores) + casts_backward + accumulation,
        tensor_again,
        exchange,
        waits[1],
    )
    again = Pass(0.0, 0.0, 0.0, 0.0, 0.0)
    if layout.recompute == "full":
        again = forward
    elif layout.recompute == "selective" and not rank.scores_again:
        again = Pass(core, scores + bias, 0.0, 0.0, 0.0)
    backward = Pass(*(x + recomputed * y for x, y in zip(backward, again)))
    return forward, backward, deferred + (accumulation if deferred else 0.0)


def products(rank: Rank, with_experts: float, in_fp8: float) -> tuple[float, float, float]:
    """Seconds of the products with one layer's matrices: (forward, which the input gradient takes
    too; weight gradients; those of them that zb-h1 can compute later). LoRA's own are thin."""
    model, t = rank.model, rank.layout.tp
    # Each tensor-parallel rank computes the latents of its tokens.
    whole = latent_matrices(model) * (1 / rank.sequence_ranks - 1 / t)
    flops = 2 * rank.tokens * (rank.met / t + whole)
    forward = rank.matmul(flops, in_fp8)
    r = rank.software.lora_rank
    if r:
        attention, mlp, *_ = lora_parameters(model, rank.layout, r)
        thin = rank.matmul(2 * rank.tokens * (attention + rank.mlps * mlp))
        # The base is frozen.
        return forward + thin, thin, 0.0
    # Weight gradients of experts are not in FP8, and come at once.
    experts = with_experts * model.router_topk * mlp_matrices(model, model.expert_size) / rank.met
    outside = rank.matmul((1 - experts) * flops, in_fp8)
    return forward, outside + rank.matmul(experts * flops), outside


def accumulated(rank: Rank, with_experts: float, crosses: bool = False) -> float:
    """Bytes that one layer's weight gradients of a micro-batch, and their sum, read and write."""
    software = rank.software
    # Products of bytes are not fused.
    fuses = rank.layout.zero_stage in software.fuses_accumulation and software.fp8 == "off"
    # Stages 2 and 3 keep a row of the sum.
    if rank.layout.zero_stage >= 2 or fuses:
        return 0.0
    # Numbers that learn.
    attention, mlp, *experts = block_parameters(rank.model, rank.layout)
    if software.lora_rank:
        attention, mlp, *experts = lora_parameters(rank.model, rank.layout, software.lora_rank)
    held = (1 + crosses) * attention + (1 - with_experts) * mlp + with_experts * sum(experts)
    return (software.weight + ACCUMULATION) * held


def fp8_casts(rank: Rank, in_fp8: float) -> tuple[float, float]:
    """Seconds in which one layer's numbers become bytes, (forward, backward): inputs of matrices
    and gradients of their outputs; weights in each step, or for each product."""
    if not in_fp8:
        return 0.0, 0.0
    model, layout, software = rank.model, rank.layout, rank.software
    heads = model.num_heads * model.head_dim
    inner = rank.mlps * model.ffn_hidden_size
    keys = 2 * model.num_kv_heads * model.head_dim
    inputs = 2 * model.hidden_size + (heads + inner) / layout.tp
    outputs = 2 * model.hidden_size + (heads + keys + inner * (1 + model.gated)) / layout.tp
    attention, mlp, experts, _ = block_parameters(model, layout)
    weights = attention + (experts if model.num_experts else mlp)
    if keeps_fp8_bytes(layout, software):
        weights /= 2 * layout.micro_batches
    cast = in_fp8 * CAST[software.fp8]
    forward, backward = (cast * (rank.tokens * n + weights) for n in (inputs, outputs))
    return rank.read_write(forward), rank.read_write(backward)


def read_and_written(rank: Rank) -> tuple[float, float, float]:
    """Seconds of forward's element-wise operations: (outside, inside core attention, what is added
    to its scores). The last one has no backward."""
    model, t, s = rank.model, rank.layout.tp, rank.s
    activation = (GATED if model.gated else GELU) * model.ffn_hidden_size * rank.mlps
    norms = NORMS_AND_RESIDUALS * model.hidden_size / rank.sequence_ranks
    context = CONTEXT * model.num_heads * model.value_size
    norms += HEAD_NORMS * (model.query_rank + model.kv_rank) / rank.sequence_ranks
    if model.qk_norm:
        context += HEAD_NORMS * (model.num_heads + rank.key_heads) * model.head_dim
    scores = 0 if rank.fused_attention else SCORES * model.num_heads * s / t
    bias = LOCAL_BIAS * local_share(model) * bias_heads(model, rank.layout) * s**2
    if is_ring(rank.layout):
        # This rank's queries, and half of the keys; a window hides more, which is not counted.
        bias /= 2 * rank.layout.cp
    each = norms + (context + activation) / t
    if rank.software.lora_rank:
        reads, adds = lora_widths(model, t, rank.mlps)
        each += LORA_READ * reads + LORA_ADD * adds
    outside = rank.tokens * each
    return rank.read_write(outside), rank.read_write(rank.tokens * scores), rank.read_write(bias)


def sum_of_inputs(rank: Rank, all_reduce: float) -> float:
    """Seconds of the all-reduce of x, or of those of what latent attention gives to the heads."""
    model, h = rank.model, rank.model.hidden_size
    if not model.kv_rank:
        return all_reduce
    sizes = model.query_rank or h, model.kv_rank, model.rope_head_dim
    return sum(rank.collective("tp", rank.activation * n / h, passes=2) for n in sizes)


def tensor_waits(rank: Rank, all_reduce: float, weight_gradient: float) -> tuple[float, float]:
    """Seconds that (forward, backward) waits for tensor-parallel ranks.

    Forward waits for all. In backward, before attention and before the MLP there is an all-reduce,
    beside the weight gradient of q, k, v and of the MLP's first matrix: each a quarter of all of
    the layer's weight gradients; less where heads share keys and values, and none where zb-h1
    computes them later. Sequence parallelism has three collectives instead, each half of an
    all-reduce. Nothing runs beside the all-gather of the output's gradient. The reduce-scatter of
    the input's gradient runs beside the weight gradient, and the kept input is gathered again
    beside the input gradient.
    """
    exchange = key_copies(rank)
    model = rank.model
    if model.shared_ffn_size:
        # Shared experts have an f and a g of their own.
        exchange += len(model.expert_layers) / model.num_layers * all_reduce
    waits = exchange
    sums = sum_of_inputs(rank, all_reduce), all_reduce
    for seconds, share in zip(sums, (min(1 / 4, rank.qkv / rank.met), 1 / 4)):
        waits += input_gradient(rank, seconds, share * weight_gradient)
        # The output's gradient is gathered.
        waits += all_reduce / 2 if rank.layout.sequence_parallel else 0.0
    if rank.layout.sequence_parallel and rank.software.sums_norms_by_layer:
        if model.kv_rank:
            # The rotated key is not gathered again.
            rope = rank.activation * model.rope_head_dim / model.hidden_size
            waits -= rank.collective("tp", rope)
        shared = NORM_GRADIENTS * rank.model.hidden_size + 4 * latent_matrices(rank.model)
        waits += rank.collective("tp", shared, passes=2)
    if rank.model.qk_norm and not rank.layout.sequence_parallel:
        # Gradients of the two norms, which each rank has of its heads.
        waits += rank.collective("tp", 2 * rank.model.head_dim * rank.software.weight, passes=2)
    forward = 2 * all_reduce + exchange
    if rank.layout.sequence_parallel:
        # Attention gathers x, or its latents.
        forward += (sums[0] - all_reduce) / 2
    if rank.layout.tp_comm_overlap:
        columns, rows = hidden_by_rings(rank, *sums)
        forward, waits = forward - columns - rows, waits - rows
    return forward, waits


def hidden_by_rings(rank: Rank, of_input: float, all_reduce: float) -> tuple[float, float]:
    """Of the seconds that column-parallel layers wait for gathers of their input, and row-parallel
    layers for scatters of their output, those that products of single shards hide (base/ring.py).
    Each of t - 1 shards has 1/t of a product beside it. A small product reaches less of the peak,
    which is not counted. of_input: of attention's all-reduce; all_reduce: of the others."""
    model, t, start = rank.model, rank.layout.tp, rank.machine.constants.wait
    output = model.num_heads * model.value_size * model.hidden_size
    # Experts multiply whole inputs.
    mlp = 0 if model.num_experts else mlp_matrices(model)
    down = mlp / (2 + model.gated)

    def hidden(collective: float, numbers: float) -> float:
        shard = start + (collective - start) / (t - 1)
        beside = rank.matmul(2 * rank.tokens * numbers / t) / t
        return collective - (t - 1) * max(0.0, shard - beside)

    columns = hidden(of_input / 2, rank.qkv) + hidden(all_reduce / 2, mlp - down)
    return columns, hidden(all_reduce / 2, output) + hidden(all_reduce / 2, down)


def input_gradient(rank: Rank, all_reduce: float, weight_gradient: float) -> float:
    """Seconds that backward waits for the sum of an input's gradient, beside a weight gradient."""
    overlaps = rank.software.overlaps_tensor and not waits_for_w(rank.layout)
    beside = weight_gradient if overlaps else 0.0
    if rank.layout.sequence_parallel:
        return 2 * max(0.0, all_reduce / 2 - beside)
    return max(0.0, all_reduce - beside)


class Cross(NamedTuple):
    """Seconds of cross attention in one micro-batch, forward: its matrices, core, element-wise
    operations outside and inside the core; and what (forward, backward) waits for tensor-parallel
    ranks."""

    linear: float
    core: float
    outside: float
    scores: float
    waits: tuple[float, float]


def cross_attention(rank: Rank, in_fp8: float) -> Cross:
    """What a decoder's layer has beside self-attention and MLP. rank: on tokens of the target.
    Queries and the output are of the target, keys and values of the source."""
    model, t, n = rank.model, rank.layout.tp, rank.model.seq_length
    width, source = model.num_heads * model.head_dim, rank.layout.tokens(n)
    half = attention_matrices(model) / 2 / t
    of_target, of_source = (rank.matmul(2 * x * half, in_fp8) for x in (rank.tokens, source))
    core = rank.matmul(4 * rank.tokens * n * width / t)
    each = NORMS_AND_RESIDUALS / 2 * model.hidden_size / rank.sequence_ranks + CONTEXT * width / t
    scores = 0 if rank.fused_attention else SCORES * model.num_heads * n / t
    outside, scores = (rank.read_write(rank.tokens * x) for x in (each, scores))
    target_sum = rank.collective("tp", rank.activation, passes=2)
    source_sum = rank.collective("tp", rank.activation / rank.tokens * source, passes=2)
    # Sequence parallelism gathers the source, and in backward the output's gradient.
    forward, backward = target_sum, 0.0
    if rank.layout.sequence_parallel:
        forward, backward = forward + source_sum / 2, target_sum / 2
    backward += input_gradient(rank, target_sum, of_target / 2)
    backward += input_gradient(rank, source_sum, of_source)
    return Cross(of_target + of_source, core, outside, scores, (forward, backward))


def head_bytes(rank: Rank, size: int) -> float:
    """Bytes of this rank's tokens in heads of so many numbers in the whole model."""
    return rank.software.weight * rank.tokens * size / rank.layout.tp


def key_copies(rank: Rank) -> float:
    """Seconds in which neighbours exchange their columns of the key and value head that they share,
    or the gradients."""
    r = rank.model.key_copies(rank.layout.tp)
    if r == 1:
        return 0.0
    nbytes = 2 * head_bytes(rank, rank.key_heads * rank.model.head_dim) * (r - 1) / r
    return rank.machine.constants.wait + nbytes / rank.machine.link(r, 1)


def to_neighbour(rank: Rank, width: float = 1.0) -> float:
    """Seconds in which keys and values go to the next rank of the ring, on all ranks at once.
    width: of a number, over that of a weight."""
    link = rank.machine.link(rank.layout.cp, rank.strides["cp"])
    nbytes = 2 * head_bytes(rank, rank.key_heads * rank.model.head_dim) * width
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
        # Queries and keys, results and values.
        heads = rank.model.num_heads, rank.model.num_kv_heads
        sizes = [a * d for a in heads for d in (rank.model.head_dim, rank.model.value_size)]
        seconds = sum(rank.collective("cp", head_bytes(rank, size)) for size in sizes)
        return seconds, seconds
    keys = to_neighbour(rank)
    gradients = to_neighbour(rank, max(4, rank.software.weight) / rank.software.weight)
    # Attention in each of the n - 1 steps that have something on the way.
    beside_forward, beside_backward = (seconds * (n - 1) / n for seconds in (forward, backward))
    moved = (n - 1) * keys + (n - 2) * gradients
    waits = max(0.0, moved - beside_backward) + gradients
    return max(0.0, (n - 1) * keys - beside_forward), waits
