"""What a prediction is made from: a machine, the software that runs on it, and a layout.

    Machine      data-sheet numbers of a device and of the links between devices
    Constants    the share of each number that training reaches: fitted to measured times
    Software     facts about an implementation: what it keeps in memory, what it overlaps
    Layout       how a model and its batch are spread over the ranks

    python -m course.planner      the constants, and what they predict

Not covered: nodes of different kinds, and a network that is slower between distant nodes.
"""

import dataclasses
from dataclasses import dataclass

from base.errors import InputError
from schedules import Placement, placement_of


class PlanError(InputError):
    """There is no prediction, or nothing fits; the message says what would."""


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say: fitted (planning/errors.py) or measured.

    All but `wait`, `zero3` and `hidden` are shares of a data-sheet number, from 0 to 1.
    """

    # The share of the peak that large matrix multiplications reach.
    matmul: float
    # The share of the memory's bandwidth that element-wise operations reach.
    memory: float
    # The shares that collectives reach of a link that one rank has for itself (in a node, or its
    # adapter to the network), and of the adapters that ranks on one node have together.
    node: float
    network: float
    # Seconds that one pass of a collective waits: for the slowest rank, for kernels to start.
    wait: float
    # Seconds that a collective of a single parameter waits, also for the host, in software with
    # `waits_for_reductions`.
    zero3: float = 0.0
    # The share of the time of overlapped data-parallel collectives that the computation loses:
    # the two share processors and memory.
    hidden: float = 0.5
    # The share of twice the peak that FP8 matrix multiplications reach, on machines with FP8.
    fp8: float = 1.0


# Fields of Machine.
POSITIVE = "peak memory memory_bandwidth node_bandwidth network_bandwidth ranks_per_node".split()


def check_between(name: str, value: float, least: float, most: float) -> None:
    """Raises ValueError for a number that no machine has."""
    # NaN fails too.
    if not least <= value <= most:
        raise ValueError(f"{name} {value:g}: must be from {least:g} to {most:g}")


@dataclass(frozen=True)
class Machine:
    """FLOP/s are dense, at the precision of training. Bandwidths are bytes/s of one device, in one
    direction."""

    name: str
    peak: float
    # bytes
    memory: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    ranks_per_node: int
    constants: Constants
    # Whether it multiplies bytes, at twice the peak.
    has_fp8: bool = False

    def __post_init__(self):
        for name in POSITIVE:
            check_between(name, getattr(self, name), 1.0, 1e24)
        for name, share in vars(self.constants).items():
            seconds = dict.fromkeys(("wait", "zero3"), (0.0, 60.0))
            least, most = (seconds | {"hidden": (0.0, 1.0)}).get(name, (1e-6, 1e6))
            check_between(f"constants: {name}", share, least, most)

    @property
    def node_link(self) -> float:
        """Bytes/s that a rank reaches inside a node."""
        return self.node_bandwidth * self.constants.node

    @property
    def network_link(self) -> float:
        """Bytes/s that a rank reaches over an adapter of its own."""
        return self.network_bandwidth * self.constants.node

    def link(self, size: int, stride: int) -> float:
        """Bytes/s of one rank in a collective of `size` ranks, numbered `stride` apart.

        A ring of ranks enters and leaves each node once, so its k members on one node share their
        adapters: the ring has k times the bandwidth of one adapter. It changes from adapter to
        adapter on its way, and reaches less of them than ranks that are alone on their nodes and
        meet through the same switch.
        """
        if size * stride <= self.ranks_per_node:
            return self.node_link
        members_on_node = min(size, self.ranks_per_node // stride)
        if members_on_node <= 1:
            return self.network_link
        return members_on_node * self.network_bandwidth * self.constants.network


@dataclass(frozen=True)
class Software:
    """Facts about an implementation, known from its source; none is fitted. From `fp8` on: what a
    run asks of it.

    Overlapped communication takes time where it is longer than the computation beside it; that of
    data-parallel ranks also slows the computation down (`Constants.hidden`).
    """

    name: str
    # Bytes of one number: a weight and an activation; a gradient; master weight and two moments.
    weight: int = 2
    gradient: int = 4
    optimizer_state: int = 12
    # Matrices of blocks have one moment (run/muon.py).
    muon: bool = False
    # Bytes of a gradient that is summed over data-parallel ranks.
    reduced: int = 4
    # What it has of ZeRO and of schedules.py.
    zero_stages: tuple[int, ...] = (0, 1)
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    # Attention of models without dropout runs in one kernel, which writes no s x s scores.
    fused_attention: bool = False
    # The tensor-parallel all-reduce of backward runs beside the weight gradient.
    overlaps_tensor: bool = True
    # ZeRO stages in which the weight gradient's matrix multiplication adds to the 32-bit sum.
    fuses_accumulation: tuple[int, ...] = ()
    # Under sequence parallelism, gradients of norms are summed after each layer.
    sums_norms_by_layer: bool = False
    # One collective sums the gradients of one layer; else one collective those of all.
    reduces_by_layer: bool = False
    # Gradients are summed over data-parallel ranks beside the last backward.
    overlaps_data: bool = False
    # a tensor-parallel rank sends a slice of the activation to the next stage, which gathers it
    scatters_pipeline: bool = True
    # ZeRO-3: gathers run beside the layer before; reductions are waited for.
    waits_for_reductions: bool = False
    # How ranks can share a sequence (context_parallel.py).
    cp_kinds: tuple[str, ...] = ()
    # RMSNorm in one kernel; else in single operations, as on the meta device, which keep more.
    fused_rms_norm: bool = True
    # Matrices of attention and MLP in FP8 (fp8.py): a recipe, or off; how many of the first and of
    # the last layers are not; whether their bytes are kept for a step under ZeRO stage 3 too.
    fp8: str = "off"
    fp8_skip: int = 0
    fp8_keep_bytes: bool = False
    # The rank of LoRA (adapter_layers.py) in all matrices of a frozen base; 0: all parameters
    # learn.
    lora_rank: int = 0


@dataclass(frozen=True)
class Layout:
    """How a model and its batch are spread. Each field has the name of train.py's flag.

    recompute: none, selective or full; recompute_layers: only of the first so many layers, None for
    all. schedule: None is 1f1b, or interleaved with virtual stages.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    schedule: str | None = None
    # Sequences, of one forward pass and of one step.
    micro_batch_size: int = 1
    global_batch_size: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    zero_stage: int = 0
    recompute_layers: int | None = None
    # Layers of each stage, None for an even split.
    layer_split: tuple[int, ...] | None = None
    # Tokens that have logits at a time, 0 for all of a micro-batch.
    head_chunk: int = 0
    cp: int = 1
    cp_kind: str = "ring"
    data_parallel_replicate_degree: int = 1
    ep_comm_overlap: bool = False
    tp_comm_overlap: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.replicas

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights: they have other samples, or other tokens."""
        return self.dp * self.cp

    @property
    def replicate(self) -> int:
        """Groups of replicas of which each holds all shards."""
        return self.data_parallel_replicate_degree

    @property
    def shard(self) -> int:
        """Replicas over which ZeRO shards."""
        return self.replicas // self.replicate

    @property
    def expert_shard(self) -> int:
        """Ranks over which ZeRO shards the same experts."""
        return self.shard // self.ep

    def tokens(self, s: int) -> int:
        """Tokens of a micro-batch, of sequences of s tokens, that a rank works on."""
        return self.micro_batch_size * s // self.cp

    @property
    def micro_batches(self) -> int:
        """m, of each pipeline in a step."""
        return self.global_batch_size // self.dp // self.micro_batch_size

    def flags(self, without: tuple[str, ...] = ("dp",)) -> list[str]:
        """Those of train.py. dp is what is left of the ranks."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            always = field.name in ("micro_batch_size", "global_batch_size")
            if field.name in without or (value == field.default and not always):
                continue
            words.append("--" + field.name.replace("_", "-"))
            if isinstance(value, tuple):
                words += map(str, value)
            elif value is not True:
                words.append(str(value))
        return words

    @property
    def pipeline_schedule(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    @property
    def placement(self) -> Placement:
        return placement_of(self.pipeline_schedule, self.pp, self.virtual_stages)


# --- presets --------------------------------------------------------------------------------------

# Fitted to the six rows that planning/errors.py names, all of A100s. `hidden` is not: with a half,
# Llama-2 13B gets NeMo's published 2,357 tokens/s on each of 8 A100s to 1%, and FSDP is no longer
# faster than it was measured to be by a half. From 0.4 to 0.6 these change by 2%.
FITTED = Constants(
    matmul=0.768, memory=0.799, node=0.728, network=0.529, wait=156e-6, zero3=2.64e-3, hidden=0.5
)

# A Hopper device reaches less of its peak: with this share Megatron-core's 7.1B model (tp 2,
# micro-batches of 4 x 4,096 tokens) gets the published 466 TFLOP/s to 3%. With its share of FP8,
# Llama-2 7B (stage 1, micro-batches of one sequence) gets NeMo's published 16,913 tokens/s on each
# of 8 H200s to 1%. No other constant is fitted.
HOPPER = dataclasses.replace(FITTED, matmul=0.63, fp8=0.61)

# NVIDIA's data sheets: SXM modules; HDR InfiniBand (200 Gbit/s) or NDR (400), one adapter a GPU.
A100 = Machine("a100", 312e12, 80 * 2**30, 2.039e12, 300e9, 25e9, 8, FITTED)
H100 = Machine("h100", 989e12, 80 * 2**30, 3.35e12, 450e9, 50e9, 8, HOPPER, has_fp8=True)
H200 = Machine("h200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 8, HOPPER, has_fp8=True)
MACHINES = {"a100": A100, "h100": H100, "h200": H200}

# This project as it runs on GPUs.
TRAIN = Software(
    "train.py",
    zero_stages=(0, 1, 2, 3),
    schedules=("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
    fused_attention=True,
    fuses_accumulation=(0,),
    sums_norms_by_layer=True,
    reduces_by_layer=True,
    overlaps_data=True,
    cp_kinds=("ring", "all-to-all"),
)
# What --optimizer-state bf16 keeps: the low half of a master, two moments (optimizer.AdamW).
STATE_IN_16_BITS = 6


SOFTWARE = {
    "train.py": TRAIN,
    # arXiv 2104.04473 and 2205.05198
    "megatron-2021": Software("megatron-2021"),
    "megatron-2022": Software("megatron-2022", fuses_accumulation=(0, 1)),
    # The comparison in section 5.2 of arXiv 2104.04473.
    "deepspeed-zero3-2021": Software(
        "deepspeed-zero3-2021",
        zero_stages=(3,),
        reduced=2,
        reduces_by_layer=True,
        waits_for_reductions=True,
    ),
}
