"""LoRA, bottleneck adapters and IA3: parameter-efficient fine-tuning (PEFT) of a frozen model.

Full fine-tuning changes every weight W of a trained model. PEFT freezes W, and trains a few new
parameters beside it. One base model then serves many tasks, with a small file for each.

    LoRA       y = W x + α/r  B A x       A [r, in], B [out, r]: a low-rank update of W [out, in]
    adapter    y = y + U silu(D norm(y))  D [k, h], U [h, k]: after attention and after the MLP
    IA3        y = s * y                  s: one number for each key, value and MLP activation

    (LoRA: Hu et al., arXiv 2106.09685, section 4.1. Adapters: Houlsby et al., arXiv 1902.00751,
    section 2.1, in NeMo's form. IA3: Liu et al., arXiv 2205.05638, section 3.3.)

LoRA (low-rank adaptation) learns the change of W as a product of two thin matrices. Its rank r is
small, usually 8 to 64: for W of 4096 x 4096, A and B of r = 8 have 65,536 numbers instead of
16,777,216. α is a constant that scales the change. A starts with random values and B at 0, so the
model begins exactly as its base (U starts at 0 and s at 1). After training, W + α/r B A can take
the place of W. This merge removes the extra computation.

    python -m course.adapters                                 a lesson: parameters, gradients, merge
    python -m finetune.adapters --load runs/base --data FILE --peft lora --out runs/lora
    python -m inference.adapters merge runs/base runs/lora MERGED     W + α/r B A in the place of W
    picture: docs/figures/ranks_adapters.svg

The base is still there: `disabled` gives its outputs back for a while, without a second copy.
Only the new parameters have gradients, float32 masters and optimizer state, and only they are in
checkpoints. The base needs 2 bytes for each weight where the run computes in 16 bits.

Tensor parallelism shards W. A new parameter shares one dimension with W, and is sharded as W is in
that dimension. Its other dimension is whole. In tensor_parallel.py, f is the identity in forward
and an all-reduce in backward; g is an all-reduce in forward and the identity in backward.

                     W             A             B             who sums
    column-parallel  [out / t, h]  [r, h]        [out / t, r]  f, on A x, sums its gradient
    row-parallel     [h, in / t]   [r, in / t]   [h, r]        the base's g sums W x and A x at once

Under sequence parallelism a rank computes a whole parameter's gradient from its own tokens only. An
all-reduce in backward sums the parts, as for all whole weights (sequence_parallel.synchronise).
Whole parameters in experts (moe.py) lie between f and g, and need the same.

Not covered: LoRA of the embedding and the head, DoRA, quantised bases (QLoRA), other initial values
(PiSSA), and a rank for each layer. The library `peft` has them all; folders go there and back.
"""

import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
import moe
import sequence_parallel
import tensor_parallel
from base.dropout import Dropout
from base.model_config import LINEARS, FieldError, GPTConfig, multiples_near
from sharding import Shard, Sharding, set_sharding, shard_of, sharding_of

METHODS = ("lora", "adapter", "ia3")
# the places that each method can have; the default is all of them
TARGETS = {"lora": tuple(LINEARS), "adapter": ("attention", "mlp"), "ia3": ("key", "value", "down")}

# --- what is asked for ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterConfig:
    """The method, its size and its places. Fields have the names of train.py's flags."""

    # lora, adapter or ia3
    peft: str
    # r, and the scale α / r of B A x
    lora_rank: int = 8
    lora_alpha: float = 16.0
    # probability, of x before A
    lora_dropout: float = 0.0
    # k, the inner size of a bottleneck adapter
    adapter_size: int = 32
    # Names in TARGETS; none: all that the model has.
    peft_targets: tuple[str, ...] = ()


def targets_of(config: AdapterConfig, model: GPTConfig) -> tuple[str, ...]:
    """The targets that are given, or all that this model has. Raises FieldError for another one."""
    missing = set() if model.gated else {"gate"}
    if model.kv_rank:
        # Decoding absorbs these two matrices (inference/kv_cache.py).
        missing |= {"key", "value"}
    fitting = [name for name in TARGETS[config.peft] if name not in missing]
    for name in config.peft_targets:
        if name not in fitting:
            rule = f"{name} is no target of {{peft}} in this model; there are {', '.join(fitting)}"
            raise FieldError("peft_targets", list(config.peft_targets), rule, peft=config.peft)
    return tuple(config.peft_targets) or tuple(fitting)


def check(config: AdapterConfig, model: GPTConfig, t: int = 1) -> None:
    """Whether a model on t tensor-parallel ranks can have these adapters. Raises FieldError."""
    targets = targets_of(config, model)
    for name in ("lora_rank", "adapter_size"):
        if not 1 <= getattr(config, name) < 2**31:
            raise FieldError(name, getattr(config, name), "must be at least 1 and below 2^31")
    if not 0 < config.lora_alpha < math.inf:
        raise FieldError("lora_alpha", config.lora_alpha, "must be above 0 and finite")
    if not 0 <= config.lora_dropout < 1:
        raise FieldError("lora_dropout", config.lora_dropout, "must be at least 0 and below 1")
    if config.peft == "adapter" and config.adapter_size % t:
        size = config.adapter_size
        rule = "must be divisible by {tp}"
        raise FieldError("adapter_size", size, rule, multiples_near(size, t), tp=t)
    of_experts = {"gate", "up", "down"} & set(targets)
    if getattr(model, "num_experts", 0) and config.lora_dropout and of_experts:
        rule = "experts have no dropout; name targets without {peft_targets}, or 0 would fit"
        raise FieldError("lora_dropout", config.lora_dropout, rule, peft_targets=sorted(of_experts))


# row-parallel layers: their input is sharded, their output is whole
ROW_PARALLEL = ("output", "down")
# standard deviation of B and U at the start. Where it is 0, A and D have no gradient in the first
# step, so tests set another one.
OUTPUT_STD = 0.0


# --- new parameters -------------------------------------------------------------------------------


def follow(weight: Tensor, *dims: int) -> nn.Parameter:
    """A parameter that is sharded as `weight` is, in the dimensions that they share.

    weight: [out, in], or of experts [E, out, in]; dims: each -1 for in, -2 for out, or a size. For
    experts, E is added in front.
    """
    record = sharding_of(weight)
    if weight.dim() == 3:
        dims = (-3, *dims)
    shape = tuple(record.shape[d] if d < 0 else d for d in dims)
    local_shape = [weight.shape[d] if d < 0 else d for d in dims]
    placements = []
    for shard in record.placements:
        dim = shard.dim - weight.dim()
        if dim in dims:
            placements.append(Shard(dims.index(dim), shard.group))
    parameter = nn.Parameter(weight.new_empty(local_shape))
    return set_sharding(parameter, Sharding(shape, tuple(placements)))


class LoRA(nn.Module):
    """A and B of one linear layer, or of that layer in every expert: x [.., in] -> B A x [.., out].

    a: [r, in]; b: [out, r]; of experts [E, r, in] and [E, out, r].
    """

    def __init__(self, weight: Tensor, config: AdapterConfig, site: int):
        super().__init__()
        self.enabled = True
        self.a = follow(weight, config.lora_rank, -1)
        self.b = follow(weight, -2, config.lora_rank)
        self.scale = config.lora_alpha / config.lora_rank
        self.dropout = Dropout(config.lora_dropout, site)
        # [b], the layer's dropout key, while its block runs
        self.drop_key: Tensor | None = None

    def down(self, x: Tensor) -> Tensor:
        """A dropout(x): [b, s, in] -> [b, s, r]"""
        return F.linear(self.dropout(x, self.drop_key), self.a)

    def add(self, y: Tensor, z: Tensor) -> Tensor:
        """y + α/r B z. y: [b, s, out]; z: [b, s, r]"""
        return torch.add(y, F.linear(z, self.b), alpha=self.scale)


class IA3(nn.Module):
    """s of the outputs of a linear layer (key, value), or of its inputs (down)."""

    def __init__(self, weight: Tensor, dim: int):
        """dim: of the weight, -2 for its outputs, -1 for its inputs."""
        super().__init__()
        self.enabled = True
        self.scale = follow(weight, dim)


class Bottleneck(nn.Module):
    """y + U silu(D norm(y)). y: [b, s, h] -> [b, s, h]

    D is column-parallel and U row-parallel, so a rank has k / t of the inner size.
    """

    def __init__(self, h: int, config: AdapterConfig, group: dist.ProcessGroup | None):
        super().__init__()
        self.enabled = True
        k = config.adapter_size
        self.norm = nn.LayerNorm(h)
        self.project = gpt.ProjectTogether()
        self.down = nn.Linear(h, k, bias=False)
        self.up = gpt.DeferredBiasLinear(k, h, bias=False)
        if group:
            tensor_parallel.shard_columns(self.down, group)
            self.project = tensor_parallel.ColumnParallelInput(group)
            self.up = tensor_parallel.RowParallelLinear(self.up, group)

    def forward(self, y: Tensor) -> Tensor:
        (inner,) = self.project(self.norm(y), self.down)  # [b, s, k]
        return y + self.up(F.silu(inner))


ADAPTERS = (LoRA, IA3, Bottleneck)


# --- on and off -----------------------------------------------------------------------------------


@contextmanager
def disabled(*stages: nn.Module):
    """Inside, these stages compute what their frozen base computes, bit for bit.

        with torch.no_grad(), adapters.disabled(*stages):
            reference = ...

    So the model before training is at hand without a second copy: the reference of reinforcement
    learning. Nothing of an adapter is computed or sent, so all ranks of a model enter it together.
    """
    found = [m for stage in stages for m in stage.modules() if isinstance(m, ADAPTERS)]
    before = [adapter.enabled for adapter in found]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter, enabled in zip(found, before):
            adapter.enabled = enabled


def adapter_of(linear: nn.Module, name: str) -> nn.Module | None:
    """The adapter `name` ("lora" or "ia3") of a linear layer, if it has one that is enabled."""
    adapter = getattr(linear, name, None)
    return adapter if adapter is not None and adapter.enabled else None


# --- in the forward of a block --------------------------------------------------------------------


class AdaptedInput(gpt.ProjectTogether):
    """Linear layers that read one input, with their LoRA or IA3. It stands where `project` stood.

    enter: f of tensor parallelism, g of sequence parallelism; once for all A x, side by side.
    """

    def __init__(self, project: nn.Module, group: dist.ProcessGroup | None):
        super().__init__()
        self.project = project
        self.enter = tensor_parallel.CopyToRanks(group) if group else nn.Identity()

    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        outputs = list(self.project(x, *linears))  # [b, s, out / t] each
        found = {i: adapter_of(linear, "lora") for i, linear in enumerate(linears)}
        loras = {i: lora for i, lora in found.items() if lora}
        if loras:
            z = torch.cat([lora.down(x) for lora in loras.values()], -1)  # [b, s, n r]
            parts = self.enter(z).chunk(len(loras), -1)  # [b, s, r] each
            for (i, lora), part in zip(loras.items(), parts):
                outputs[i] = lora.add(outputs[i], part)
        for i, linear in enumerate(linears):
            if ia3 := adapter_of(linear, "ia3"):
                outputs[i] = outputs[i] * ia3.scale
        return outputs


def lora_output(linear: nn.Module, x: Tensor) -> Tensor:
    """The forward of a row-parallel layer, with LoRA. x: [b, s, in / t] -> [b, s, h]"""
    lora = adapter_of(linear, "lora")
    if lora is None:
        return type(linear).forward(linear, x)
    z = lora.down(x)  # [b, s, r], of this rank's columns of x
    if isinstance(linear, tensor_parallel.RowParallelLinear):
        y = linear.linear(x, linear.weight)
        # one g for both sums
        both = linear.reduce(torch.cat((y, z), -1))  # [b, s, h + r]
        y, z = both.split((y.shape[-1], z.shape[-1]), -1)
        # B's gradient needs z: as a view it would keep all of [b, s, h + r]
        z = z.contiguous()
    else:
        y = type(linear).forward(linear, x)
    return lora.add(y, z)


def ia3_output(linear: nn.Module, x: Tensor) -> Tensor:
    """The forward of a row-parallel layer, with IA3. x: [b, s, in / t] -> [b, s, h]"""
    ia3 = adapter_of(linear, "ia3")
    return type(linear).forward(linear, x * ia3.scale if ia3 else x)


def multiply_adapted(multiply, rows: Tensor, counts: Tensor, *matrices: nn.Module) -> list[Tensor]:
    """moe.MoE.multiply, with LoRA or IA3. rows: [rows, in]; counts: [E] -> [rows, out] each"""
    for matrix in matrices:
        if ia3 := adapter_of(matrix, "ia3"):
            rows = rows * ia3.scale.repeat_interleave(counts, dim=0)  # [rows, in]
    outputs = list(multiply(rows, counts, *matrices))
    for i, matrix in enumerate(matrices):
        if lora := adapter_of(matrix, "lora"):
            (z,) = moe.grouped_linear(rows, counts, lora.a)  # [rows, r]
            (update,) = moe.grouped_linear(z, counts, lora.b)  # [rows, out]
            outputs[i] = torch.add(outputs[i], update, alpha=lora.scale)
    return outputs


def with_drop_key(forward, loras: list[LoRA], x: Tensor, context: gpt.Context = gpt.PLAIN, *rest):
    """The forward of a block, whose dropout key LoRA needs too."""
    for lora in loras:
        lora.drop_key = context.drop_key
    return forward(x, context, *rest)


def with_bottleneck(forward, bottleneck: Bottleneck, *args) -> Tensor:
    """The forward of attention or of an MLP, before bias, dropout and residual."""
    y = forward(*args)
    return bottleneck(y) if bottleneck.enabled else y


# --- in a model -----------------------------------------------------------------------------------


def apply(
    model: gpt.GPT,
    config: AdapterConfig,
    group: dist.ProcessGroup | None = None,
    sequence: bool = False,
) -> None:
    """Give the blocks of a frozen model, or of a stage of it, their adapters; in place.

    Comes after tensor parallelism over `group`, and after sequence parallelism (`sequence`); before
    zero bubble, recomputation and data parallelism. Raises FieldError as `check`.
    """
    check(config, model.config, group.size() if group else 1)
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        raise ValueError("this model has adapters already: call adapter_layers.apply once")
    targets = targets_of(config, model.config)
    for block in model.blocks.values():
        if config.peft == "adapter":
            add_bottlenecks(block, config, targets, group)
        else:
            adapt_linears(block, config, targets, group, sequence)
        if sequence:
            sequence_parallel.shard_sequence(block, group)
            sequence_parallel.synchronise(block, group)
        elif group and isinstance(block.mlp, moe.MoE) and config.peft != "adapter":
            # between f and g, a whole parameter has only a part of its gradient on each rank
            sequence_parallel.synchronise(block.mlp, group)
    model.init_parameter = partial(init_parameter, model.init_parameter)
    # a pipeline stage may be empty
    if not any(p.is_meta for p in model.parameters()):
        init(model)


def adapt_linears(
    block: gpt.Block,
    config: AdapterConfig,
    targets: tuple[str, ...],
    group: dist.ProcessGroup | None,
    sequence: bool,
) -> None:
    """LoRA or IA3 of the linear layers that are targets, in experts or not."""
    loras = []
    for site, (name, linear) in enumerate(linears_of(block), start=4):
        if name not in targets or linear is None:
            continue
        row_parallel = name in ROW_PARALLEL
        if config.peft == "ia3":
            linear.ia3 = IA3(linear.weight, -1 if row_parallel else -2)
            forward = ia3_output
        else:
            linear.lora = LoRA(linear.weight, config, site)
            loras.append(linear.lora)
            forward = lora_output
            # which shard of x dropout sees: [b, s, in / t], or [b, s/t, h]
            if group and (row_parallel or sequence):
                linear.lora.dropout.shard_index[2 if row_parallel else 1] = group.rank()
        if row_parallel and not isinstance(linear, moe.ExpertLinear):
            linear.forward = partial(forward, linear)
    for attention in attentions_of(block):
        attention.project = AdaptedInput(attention.project, group)
        if hasattr(attention, "project_kv"):
            attention.project_kv = AdaptedInput(attention.project_kv, group)
    if isinstance(block.mlp, moe.MoE):
        block.mlp.multiply = partial(multiply_adapted, block.mlp.multiply)
    else:
        block.mlp.project = AdaptedInput(block.mlp.project, group)
    if config.lora_dropout:
        block.forward = partial(with_drop_key, block.forward, loras)


def attentions_of(block: gpt.Block) -> list[gpt.Attention]:
    """Self-attention and, in T5's decoder, cross attention (models/t5.py)."""
    cross = getattr(block, "cross_attention", None)
    return [block.attention] if cross is None else [block.attention, cross]


def linears_of(block: gpt.Block) -> list[tuple[str, nn.Module | None]]:
    """(the name in LINEARS, the layer) of each linear layer; None for a gate that is not there."""
    places = [(name, getattr(block, part)) for name, part in LINEARS.items()]
    for attention in attentions_of(block)[1:]:
        places += [(name, attention) for name, part in LINEARS.items() if part == "attention"]
    return [(name, getattr(part, name, None)) for name, part in places]


def add_bottlenecks(
    block: gpt.Block,
    config: AdapterConfig,
    targets: tuple[str, ...],
    group: dist.ProcessGroup | None,
) -> None:
    """A bottleneck adapter after attention, after the MLP, or after both."""
    weight = block.attention.output.weight
    places = {"attention": attentions_of(block), "mlp": [block.mlp]}
    for part in (part for name in targets for part in places[name]):
        with weight.device:
            part.adapter = Bottleneck(weight.shape[0], config, group).to(weight.dtype)
        part.forward = partial(with_bottleneck, part.forward, part.adapter)


# --- values and names -----------------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    """Whether a parameter of this global name was added here."""
    return bool(re.search(r"\.(lora|ia3|adapter)\.", name))


def init_parameter(original, name: str, shape, generator: torch.Generator) -> Tensor:
    """gpt.GPT.init_parameter, which also knows the new parameters: the whole value, float32."""
    if name.endswith(".lora.a"):
        # uniform within ±1 / √in, as torch initialises a Linear
        return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1])
    if name.endswith(".adapter.down.weight"):
        # Xavier
        return torch.randn(shape, generator=generator) * math.sqrt(2 / sum(shape))
    if name.endswith((".lora.b", ".adapter.up.weight")):
        return torch.randn(shape, generator=generator) * OUTPUT_STD
    if name.endswith(".ia3.scale"):
        return torch.ones(shape)
    return original(name, shape, generator)


@torch.no_grad()
def init(model: gpt.GPT) -> None:
    """The initial values of seed 0, for a model that is not on the meta device."""
    for name, p in model.named_parameters():
        if is_adapter(name):
            record = sharding_of(p)
            whole = model.init_parameter(name, record.shape, gpt.generator(0, name))
            p.copy_(shard_of(whole, record))
