"""Sharded data parallelism, one stage at a time (ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv
2304.11277).

Data-parallel ranks (processes) train one model on different samples and sum their gradients. Plain
data parallelism replicates everything; each stage of ZeRO shards one more thing over the N ranks.
Each of Ψ parameters has 2 bytes of weight (bf16), 4 of gradient (fp32) and 12 of optimizer state
(fp32 master weight and two moments):

    stage  sharded           bytes on a rank       elements that a rank sends in a step of m
                                                   micro-batches, in units of Ψ (N-1)/N
    0      nothing           (2 + 4 + 12) Ψ        2        all-reduce of gradients, once a step
    1      optimizer state   (2 + 4 + 12/N) Ψ      2        reduce-scatter of gradients once a step,
                                                            all-gather of updated parameters
    2      + gradients       (2 + (4 + 12)/N) Ψ    m + 1    m reduce-scatters, 1 all-gather
    3      + parameters      (2 + 4 + 12)/N Ψ      3 m      m reduce-scatters, 2 m all-gathers:
                                                            for each forward and each backward

    python -m course.fsdp     four stages on two ranks in fp32 (4 + 4 + 8 bytes): bytes and elements
                        measured beside the formulas, gradients, parameters
    picture: docs/figures/ranks_zero.svg

A reduce-scatter sums [N, T] tensors over the ranks and gives rank r row r of the sum. An all-gather
collects the ranks' rows to [N, T] on every rank. An all-reduce is a reduce-scatter, then an
all-gather. Stages 0 and 1 add up the gradients of m micro-batches before they send them. Stages 2
and 3 keep only a row of the sum.

A unit is one layer's parameters, flattened to N rows of T numbers; row r is rank r's shard. In
stage 0 a unit is one row. One collective moves one unit (in PyTorch's DDP: a bucket). The embedding
and the head are layers too.
A layer has more than one unit where some of its parameters are experts, are frozen, or are read at
other times.

The training loop calls these methods, and the optimizer between two of them. Indented lines run by
themselves, in autograd and in the layers:

    zero_grad()                forget the gradients of the step before
      forward                  stage 3: gather a unit, run its layer, free the unit
    next_backward_is_last()    only the loop knows which backward is the step's last
      backward                 reduces a unit whose gradients are complete, while it goes on: in
                               stages 0 and 1 in the last backward, in 2 and 3 in every one
    reduce_gradients()         wait until `main_grad` of each shard is the sum over the ranks
    (optimizer step)           updates `parameter.shard` from `main_grad`; in stage 0 the parameter
    renew_parameters()         stages 1 and 2: start to get the shards that other ranks have
                               updated; each layer of the next forward waits for its own, while
                               the next ones come; stage 3: drop whole parameters, old now
    wait_for_parameters()      stages 1 and 2: before anything but a forward reads them

    a unit's tensors       stages 0, 1            stage 2                 stage 3
    parameters             in the model           in the model            row [T]; whole for a while
    local_grads [N, T]     all through the step   until reduced           until reduced
    main_grad is in        a row of local_grads   summed_grads [T]        summed_grads [T]

Communication overlaps computation. In stage 3 a unit is gathered while the layer before it runs;
backward does the same from the last layer to the first:

    compute                         | block 0 | block 1 | block 2 |
    all-gather of the unit of    0  |    1    |    2    |   ..

So whole parameters of two layers exist at a time, and in stages 2 and 3 gradients of two; the table
leaves these out. A tied matrix is gathered for the embedding, and again for the head. Gradients are
summed, never averaged: train.py starts each backward with 1 / count, where count is the number of
tokens that count in the global batch.

Not covered: torch.distributed.fsdp can also keep a unit whole between forward and backward, shard
inside a node and replicate across nodes, and offload to the CPU; its newer `fully_shard` keeps each
parameter as a DTensor of its own.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from base.model_config import FieldError
from optimizer import (
    GradientAccumulator,
    GradientSums,
    LossScaler,
    accumulation_dtype,
    add_product,
    sum_uses_apart,
)
from sharding import Shard, local_part, set_sharding, sharding_of

# === units: the parameters of a layer, as one tensor ==============================================
#
# A collective for each parameter would send many small messages. So the parameters of a layer are
# flattened to one tensor [N, T] (FlatParameter of PyTorch FSDP, arXiv 2304.11277, section 3.2.1).
# Row r holds rank r's shard of each parameter, one after the other. A parameter that N does not
# divide is padded at its end. For N = 2, weight [5, 2] and bias [2], both sharded along dimension
# 0, T is 7:
#
#     row 0    w00 w01 w10 w11 w20 w21  b0        weight[0:3], bias[0:1]
#     row 1    w30 w31 w40 w41  -   -   b1        weight[3:5] and a row of padding, bias[1:2]
#
# Gradients have the same order: row r of their sum has the gradients of rank r's shards.
# `DataParallel`, below, decides when the rows are sent.

# PyTorch has these names from version 2.13 on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- where each element lies ----------------------------------------------------------------------


def shard_dim(shape: torch.Size, n: int) -> int:
    """The dimension along which a parameter is sharded over n ranks: the first one of size n or
    more, else the largest."""
    for dim, size in enumerate(shape):
        if size >= n:
            return dim
    return max(range(len(shape)), key=lambda dim: shape[dim])


class Slot(NamedTuple):
    """Where the shard of one parameter lies in every row."""

    offset: int  # position of the shard's first element
    dim: int  # dimension along which the parameter is sharded
    shape: torch.Size  # of a shard, padding included


class FlatParameters:
    """Parameters, flattened to [N, T] as in the picture above."""

    def __init__(self, parameters: list[nn.Parameter], n: int):
        """n: N, the number of ranks that share them."""
        self.parameters = parameters
        self.N = n
        self.T = 0
        self.padding = False
        self.slots: dict[nn.Parameter, Slot] = {}
        for p in parameters:
            dim = shard_dim(p.shape, n)
            shape = list(p.shape)
            # The size is rounded up, so that all shards have equal shapes.
            shape[dim] = -(-p.shape[dim] // n)
            self.slots[p] = Slot(self.T, dim, torch.Size(shape))
            self.T += math.prod(shape)
            self.padding |= n * shape[dim] > p.shape[dim]

    def shard_in(self, row: Tensor, p: nn.Parameter) -> Tensor:
        """A view of the shard of p, with padding, in row [T]."""
        offset, _, shape = self.slots[p]
        return row[offset : offset + shape.numel()].view(shape)

    def shards_in(self, flat: Tensor, p: nn.Parameter) -> Tensor:
        """A view of the shards of p of all ranks in flat [N, T]: [N, *shape of a shard]."""
        offset, _, shape = self.slots[p]
        return flat[:, offset : offset + shape.numel()].unflatten(1, shape)

    def views(self, flat: Tensor, p: nn.Parameter, whole: Tensor) -> Iterator[tuple]:
        """Pairs (view of flat [N, T], view of whole) of the same elements of p.

        whole has the shape of p: p itself, or its gradient. Copying inside the pairs moves p into
        flat, or out of it. The first pair has all shards that are full; the second one, if there is
        one, has what stands before the padding in the next shard. In the example above: the
        weight's first three rows, then its last two.
        """
        _, dim, shape = self.slots[p]
        size = shape[dim]
        full, rest = divmod(whole.shape[dim], size)
        shards = self.shards_in(flat, p)
        in_whole = whole.narrow(dim, 0, full * size).unflatten(dim, (full, size))
        # Both views are [full, *shape of a shard].
        yield shards[:full], in_whole.movedim(dim, 0)
        if rest:
            yield shards[full].narrow(dim, 0, rest), whole.narrow(dim, full * size, rest)


# --- a unit ---------------------------------------------------------------------------------------


class Unit(FlatParameters):
    """One layer's parameters, and where their rows and gradients are at the moment.

    In stage 0 nothing is sharded: N is 1, whatever the size of the group.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, stage: int):
        """parameters: either all of them learn or all are frozen. group: the ranks that hold the
        same parameters, and sum their gradients."""
        super().__init__(parameters, group.size() if stage else 1)
        self.trainable = [p for p in parameters if p.requires_grad]
        self.group = group
        self.rank = group.rank() if stage else 0

        # Parameters whose gradients have not come: in stages 0 and 1 those of the last backward, in
        # 2 and 3 those of the backward that runs.
        self.missing = set(self.trainable)
        # The parameters whose gradients are in `local_grads`.
        self.arrived: set[nn.Parameter] = set()
        # [N, T], the sum over this rank's samples. In stages 0 and 1, after `reduce`, this rank's
        # row is the sum over all ranks, and nothing reads the other rows.
        self.local_grads: Tensor | None = None
        # Stages 2 and 3: [T], this rank's row of the sum over ranks and micro-batches.
        self.summed_grads: Tensor | None = None
        # While gradients are being summed: (this rank's row of the sum [T], work). `work` is the
        # handle of a running collective.
        self.reducing: tuple | None = None

        # Stage 3: [T], this rank's shards of the parameters.
        self.row: Tensor | None = None
        # Stage 3: the storage of the whole parameters, empty except from `gather` to `free`.
        self.whole: Tensor | None = None
        # While parameters are being gathered: (flat [N, T], work).
        self.gathering: tuple | None = None

    def start_all_gather(self, flat: Tensor, row: Tensor) -> None:
        """Begin to collect the rows [T] of all ranks in flat [N, T]."""
        work = all_gather(flat.view(-1), row, group=self.group, async_op=True)
        self.gathering = flat, work

    @torch.no_grad()
    def gather_shards(self) -> None:
        """Begin to collect the shards, which each rank has updated."""
        flat = self.parameters[0].new_empty(self.N, self.T)
        row = flat[self.rank]
        for p in self.parameters:
            self.shard_in(row, p).copy_(p.shard)
        self.start_all_gather(flat, row)

    @torch.no_grad()
    def finish_all_gather(self) -> None:
        """Wait for the rows, and copy them to where the model reads its parameters."""
        flat, work = self.gathering
        work.wait()
        for p in self.parameters:
            # The copy writes to `p.data`, which does not raise p's version. Otherwise backward
            # would refuse the tensors that it has saved. The values equal those that forward has
            # seen.
            for in_flat, in_whole in self.views(flat, p, p.data):
                in_whole.copy_(in_flat)
        self.gathering = None

    def drop_all_gather(self) -> None:
        """Forget rows that nobody has used, for they are old now."""
        if self.gathering:
            _, work = self.gathering
            work.wait()
            self.gathering = None


# --- the units of a model -------------------------------------------------------------------------


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """{name: layer} in the order of forward: each child of the model, and for the dictionary of
    blocks each block."""
    layers = {}
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict):
            for number, block in child.items():
                layers[f"{name}.{number}"] = block
        else:
            layers[name] = child
    return layers


def units_of(
    model: nn.Module,
    layers: dict[str, nn.Module],
    group: dist.ProcessGroup,
    stage: int,
    init=None,
    expert_group: dist.ProcessGroup | None = None,
) -> list[Unit]:
    """The units of a model, in the order of forward. Arguments as in `apply`."""
    units = []
    seen = set()
    for prefix, layer in layers.items():
        # A tied weight belongs to the unit of the first layer that has it.
        names = [f"{prefix}.{name}" for name, p in layer.named_parameters() if p not in seen]
        if names and init:
            init(names)
        # This comes after init, which replaces meta parameters by real ones.
        seen.update(layer.parameters())
        for part in parts_of(layer, names):
            parameters = [model.get_parameter(name) for name in part]
            units += make_units(parameters, group, stage, expert_group)
    return units


def parts_of(layer: nn.Module, names: list[str]) -> list[list[str]]:
    """The names of a layer's parameters, split into those that make one unit. An embedding's norm
    is a unit of its own: backward reads the norm, but not a tied matrix (FullySharded)."""
    if getattr(layer, "tokens", None) is None:
        return [names]
    of_norm = [name for name in names if name.startswith("embedding.norm.")]
    return [[name for name in names if name not in of_norm], of_norm]


def make_units(parameters: list[nn.Parameter], group, stage: int, expert_group):
    """The units of one layer, sharded: one for experts, which have fewer replicas, and one for the
    other parameters. Frozen parameters have no gradients, and are in units only in stage 3."""
    subsets = defaultdict(list)
    for p in parameters:
        subsets[p.requires_grad, is_sharded_over(p, group)].append(p)
    units = []
    # Sorting gives the same order on every rank.
    for learns, is_expert in sorted(subsets, reverse=True):
        if is_expert and expert_group is None:
            raise ValueError(
                "ranks of the group hold different experts: give expert_group, the ranks that hold "
                "the same ones"
            )
        if not learns and stage < 3:
            continue
        replicas = expert_group if is_expert else group
        unit = Unit(subsets[learns, is_expert], replicas, stage)
        if stage == 3:
            keep_own_row(unit)
        elif stage > 0:
            alias_own_shards(unit)
        units.append(unit)
    return units


def is_sharded_over(p: nn.Parameter, group: dist.ProcessGroup) -> bool:
    """Whether ranks of the data-parallel group hold different shards of p already. Only moe.py
    shards over these ranks, so p then belongs to an expert."""
    ranks = set(dist.get_process_group_ranks(group))
    for shard in sharding_of(p).placements:
        shard_ranks = dist.get_process_group_ranks(shard.group)
        if len(shard_ranks) > 1 and ranks.issuperset(shard_ranks):
            return True
    return False


@torch.no_grad()
def keep_own_row(unit: Unit) -> None:
    """Stage 3: keep this rank's row. The parameters become views of `unit.whole`, whose storage is
    empty until they are gathered."""
    flat = unit.parameters[0].new_zeros(unit.N, unit.T)
    for p in unit.parameters:
        for in_flat, in_whole in unit.views(flat, p, p):
            in_flat.copy_(in_whole)
    unit.row = flat[unit.rank].clone()
    sizes = [p.numel() for p in unit.parameters]
    unit.whole = unit.row.new_empty(sum(sizes))
    for p, storage in zip(unit.parameters, unit.whole.split(sizes)):
        p.data = storage.view(p.shape)
        set_shard(unit, p, unit.shard_in(unit.row, p))
    unit.whole.untyped_storage().resize_(0)


@torch.no_grad()
def alias_own_shards(unit: Unit) -> None:
    """Stages 1 and 2: set the shard of each parameter.

    A contiguous shard is a view of the parameter, and costs no memory. A shard is contiguous along
    dimension 0, or where all dimensions before are 1 (one expert). Other shards, of a few experts
    on many ranks, are copies with 1 / N of the parameter's size.
    """
    for p, (_, dim, shape) in unit.slots.items():
        padded_shape = list(shape)
        padded_shape[dim] *= unit.N
        padded = p.new_zeros(padded_shape)
        whole = padded.narrow(dim, 0, p.shape[dim]).copy_(p)
        part = padded.narrow(dim, unit.rank * shape[dim], shape[dim])
        if part.is_contiguous():
            # p moves to a storage that has space for the padding.
            p.data = whole
        # A contiguous part stays a view: contiguous() returns the same tensor.
        set_shard(unit, p, part.contiguous())


def set_shard(unit: Unit, p: nn.Parameter, part: Tensor) -> None:
    """Set `p.shard`, the parameter that the optimizer updates, with its own sharding record."""
    record = sharding_of(p)
    placements = (*record.placements, Shard(unit.slots[p].dim, unit.group))
    p.shard = nn.Parameter(part, requires_grad=p.requires_grad)
    set_sharding(p.shard, replace(record, placements=placements))


# --- the table at the top -------------------------------------------------------------------------


def bytes_per_parameter(
    stage: int, n: int, weight: int = 2, gradient: int = 4, state: int = 12
) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer state) of one of n ranks, in bytes for each parameter of
    the model (ZeRO, sections 5.1 to 5.3 with Ψ = 1, N_d = n).

    The defaults are mixed precision as in this project; in the paper a gradient has 2 bytes.
    """
    if stage >= 3:
        weight /= n
    if stage >= 2:
        gradient /= n
    if stage >= 1:
        state /= n
    return weight, gradient, state


def elements_sent(stage: int, m: int) -> int:
    """Elements that a rank sends in a step of m micro-batches, in units of Ψ (N - 1) / N.

    With ring collectives: an all-reduce counts 2 (ZeRO, section 7, has m = 1).
    """
    return (2, 2, m + 1, 3 * m)[stage]


# === data parallelism =============================================================================

# --- stages 0 to 2: every rank has all parameters -------------------------------------------------


class DataParallel(GradientSums):
    """Sums the gradients of N replicas of a model, unit by unit. GradientSums (optimizer.py) makes
    `accumulate` the hook of each parameter: autograd calls it.

    In stages 0 and 1 a rank adds up `local_grads` [N, T] over all micro-batches and reduces them
    once, during the last backward. In stages 2 and 3 (`shards_gradients`) it reduces them in every
    backward, frees them, and adds up `summed_grads` [T].
    """

    def __init__(self, units: list[Unit], stage: int, scaler, reduce_dtype):
        """units: in the order of forward. scaler: in fp16 each backward starts with its scale, so
        gradients are divided by it. reduce_dtype: as in `apply`."""
        super().__init__([p for unit in units for p in unit.trainable], scaler)
        self.units = units
        self.stage = stage
        self.shards_gradients = stage >= 2
        self.is_last_backward = False
        # The units whose gradients are being summed.
        self.reductions: list[Unit] = []
        # Stages 1 and 2: the units whose updated parameters are still to be gathered, in order.
        self.coming: list[Unit] = []
        self.unit_of = {p: unit for unit in units for p in unit.parameters}
        first = units[0].parameters[0]
        self.device = first.device
        self.sum_dtype = accumulation_dtype(first.dtype)
        self.reduce_dtype = reduce_dtype or self.sum_dtype
        if not self.shards_gradients:
            for unit in units:
                unit.local_grads = self.new_grads(unit)
                self.set_main_grads(unit, unit.local_grads[unit.rank])
        self.zero_grad()

    def new_grads(self, unit: Unit) -> Tensor:
        """A buffer [N, T] that gradients overwrite. Padding must be 0: it is part of `main_grad`,
        which the gradient norm reads."""
        new = torch.zeros if unit.padding else torch.empty
        return new(unit.N, unit.T, dtype=self.sum_dtype, device=self.device)

    def set_main_grads(self, unit: Unit, row: Tensor | None) -> None:
        """Make `main_grad` of each shard a view of row [T]."""
        for p in unit.trainable:
            local_part(p).main_grad = None if row is None else unit.shard_in(row, p)

    def zero_grad(self) -> None:
        """Forget the gradients of the step before. The first ones to arrive overwrite them."""
        for unit in self.units:
            unit.arrived.clear()
            if self.shards_gradients:
                unit.summed_grads = None
                self.set_main_grads(unit, None)

    def next_backward_is_last(self) -> None:
        """Announce that the next backward is the step's last. In stages 0 and 1 a unit may be
        reduced as soon as this backward has computed all its gradients."""
        self.is_last_backward = True
        if not self.shards_gradients:
            for unit in self.units:
                unit.missing = set(unit.trainable)

    def accumulate(self, p: nn.Parameter) -> None:
        """Move p.grad into its unit. Autograd calls this when the gradient of p is complete."""
        # p.grad is None if a pipeline schedule has deferred this weight gradient, or if
        # `accumulate_product` has added it.
        if p.grad is None:
            return
        unit = self.unit_of[p]
        unscale = self.unscale
        if unit.local_grads is None:
            unit.local_grads = self.new_grads(unit)
        for in_flat, in_grad in unit.views(unit.local_grads, p, p.grad):
            if p in unit.arrived:
                in_flat.add_(in_grad, alpha=unscale)
            else:
                in_flat.copy_(in_grad)
                if unscale != 1:
                    in_flat.mul_(unscale)
        p.grad = None
        self.note_arrival(p)

    def accumulate_product(self, p: nn.Parameter, grad_output: Tensor, x: Tensor) -> None:
        """As in optimizer.py: a linear layer's backward calls this in the place of `accumulate`.
        Stage 0 only, where `main_grad` is the place of the gradient in its unit."""
        beta = 1 if p in self.unit_of[p].arrived else 0
        add_product(p.main_grad, grad_output, x, beta, self.unscale)
        self.note_arrival(p)

    def note_arrival(self, p: nn.Parameter) -> None:
        """Record that the gradient of p is in its unit."""
        unit = self.unit_of[p]
        unit.arrived.add(p)
        # Under zb-h1 (pipeline_parallel.py) weight gradients come later than bias gradients. A bias
        # may receive the gradient of the next micro-batch first: it is added, and the unit still
        # waits for its weights.
        unit.missing.discard(p)
        if not unit.missing:
            self.complete(unit)

    def complete(self, unit: Unit) -> None:
        """Called when a backward has computed all gradients of a unit."""
        if self.shards_gradients:
            self.reduce(unit)
        elif self.is_last_backward:
            self.reduce_in_order()

    def reduce_in_order(self, everything: bool = False) -> None:
        """Stages 0 and 1: reduce the units that are complete, or everything.

        From the last layer to the first, as backward completes them. All ranks must reduce in one
        order. So a unit that is not complete, because this rank's samples did not use it, delays
        all layers nearer to the input until `reduce_gradients`. (In stages 2 and 3 all ranks must
        use the same units in each micro-batch.)
        """
        for unit in reversed(self.units):
            if unit in self.reductions:
                continue
            if unit.missing and not everything:
                return
            self.reduce(unit)

    @torch.no_grad()
    def reduce(self, unit: Unit) -> None:
        """Start to sum a unit's gradients over the ranks."""
        if self.shards_gradients:
            # This bounds memory: one unit of gradients is filled, and at most one more is being
            # sent.
            self.finish_reductions()
        for p in unit.trainable:
            # A parameter not used since the last reduction has an old gradient, or none.
            if p not in unit.arrived:
                unit.shards_in(unit.local_grads, p).zero_()
        unit.missing = set(unit.trainable)
        unit.arrived = set()
        dtype = self.reduce_dtype if unit.group.size() > 1 else self.sum_dtype
        # `to` copies only where the type differs.
        flat = unit.local_grads.to(dtype)  # [N, T]
        # In stage 1 the sum goes to this rank's own row of the input.
        row = flat[unit.rank]  # [T]
        if self.shards_gradients:
            row = torch.empty_like(row)
            unit.local_grads = None
        if self.stage == 0:
            work = dist.all_reduce(flat, group=unit.group, async_op=True)
        else:
            work = reduce_scatter(row, flat.view(-1), group=unit.group, async_op=True)
        unit.reducing = row, work
        self.reductions.append(unit)

    @torch.no_grad()
    def finish_reductions(self) -> None:
        """Wait for the running reductions, and leave their sums in `main_grad`."""
        for unit in self.reductions:
            row, work = unit.reducing
            work.wait()
            if not self.shards_gradients:
                # A sum of another type is not in `local_grads` yet.
                if row.dtype != self.sum_dtype:
                    unit.local_grads[unit.rank] = row
            elif unit.summed_grads is None:
                unit.summed_grads = row.to(self.sum_dtype)
                self.set_main_grads(unit, unit.summed_grads)
            else:
                unit.summed_grads += row
            unit.reducing = None
        self.reductions.clear()

    def reduce_gradients(self) -> None:
        """After the step's last backward: wait until each `main_grad` is the sum over the group."""
        if self.shards_gradients:
            for unit in reversed(self.units):
                # A backward has computed some of this unit's gradients, but not all.
                if unit.arrived:
                    self.reduce(unit)
        else:
            self.reduce_in_order(everything=True)
        self.finish_reductions()
        self.is_last_backward = False

    def renew_parameters(self) -> None:
        """After the optimizer's step: start to get the shards that other ranks have updated."""
        if self.stage == 0:
            return
        for unit in self.units:
            unit.drop_all_gather()
        self.coming = list(self.units)
        self.start_gathers()

    def start_gathers(self) -> None:
        """Start all-gathers, at most two at a time: each needs a buffer of a whole unit."""
        for unit in self.coming[:2]:
            if not unit.gathering:
                unit.gather_shards()

    def wait_for_parameters(self, units: list[Unit] | None = None, *_) -> None:
        """Wait for `units`; by default for all. All ranks gather in the same order, so this also
        waits for earlier units. *_: the arguments that a module passes to its hook."""
        for unit in self.units if units is None else units:
            while unit in self.coming:
                self.coming[0].finish_all_gather()
                self.coming.pop(0)
                self.start_gathers()


# --- stage 3: parameters are gathered for each use ------------------------------------------------


class FullySharded(DataParallel):
    """Stage 3: a rank keeps its row of each unit, and gathers the whole unit for each use.

    forward of layer i     wait for its units, start to gather those of i + 1; run; free its units
    backward of layer i    free the units of i + 1; wait for its own, start to gather those of i - 1

    The hook on the gradient of a layer's output marks the start of that layer's backward. A tied
    matrix is in the embedding's unit, and the head reads that unit too. It is kept after the head's
    forward, because backward begins at the head. It is not gathered again for the backward of the
    embedding: the gradient of a lookup reads no matrix.
    """

    def __init__(self, layers: list[nn.Module], units, scaler, reduce_dtype):
        """layers, units: both in the order of forward."""
        super().__init__(units, 3, scaler, reduce_dtype)
        # {number of a layer: the units that it reads}
        self.layer_units: dict[int, list[Unit]] = {}
        # {unit: the numbers of the layers that read it}, more than one for a tied matrix.
        self.readers: dict[Unit, list[int]] = {unit: [] for unit in units}
        # Whether the first layer's input has a gradient: in a pipeline, from its second stage on.
        self.input_has_gradient = False
        for i, layer in enumerate(layers):
            self.layer_units[i] = list(dict.fromkeys(self.unit_of[p] for p in layer.parameters()))
            for unit in self.layer_units[i]:
                self.readers[unit].append(i)
            layer.forward = partial(self.forward, i, layer.forward)

    def forward(self, i: int, layer_forward, *args) -> Tensor:
        """Replaces the forward of layer i: gather, run, free."""
        self.gather(self.layer_units[i], self.layer_units.get(i + 1, []))
        y = layer_forward(*args)
        recorded = torch.is_grad_enabled() and y.requires_grad
        for unit in self.layer_units[i]:
            is_tied = len(self.readers[unit]) > 1
            if not (recorded and is_tied and unit in self.backward_units(i)):
                self.free(unit)
        if i == 0:
            self.input_has_gradient = args[0].requires_grad
            if recorded and self.input_has_gradient:
                args[0].register_hook(lambda grad: self.before_backward(-1))
        if recorded:
            y.register_hook(lambda grad: self.before_backward(i))
        return y

    def backward_units(self, i: int) -> list[Unit]:
        """The units that backward of layer i reads. The tied one counts for the head alone."""
        return [unit for unit in self.layer_units.get(i, []) if self.readers[unit][-1] == i]

    def before_backward(self, i: int) -> None:
        """Called by autograd when the gradient of layer i's output is complete, so that backward of
        layer i + 1 is over. i = -1: the first layer's input has its gradient; backward is over."""
        needed = self.backward_units(i)
        for unit in self.layer_units.get(i + 1, []):
            if unit not in needed:
                self.free(unit)
        self.gather(needed, self.backward_units(i - 1))

    def complete(self, unit: Unit) -> None:
        # Without a gradient of its input, no hook marks the end of the first layer's backward. Then
        # its unit is freed when its own gradients are complete, and its frozen parameters with it.
        if unit in self.layer_units[0] and not self.input_has_gradient:
            for first in self.layer_units[0]:
                if first is unit or not first.trainable:
                    self.free(first)
        super().complete(unit)

    def gather(self, now: list[Unit], next_units: list[Unit]) -> None:
        """Make the parameters of the units `now` whole, and start to gather `next_units`."""
        for unit in now:
            self.start_gather(unit)
            if unit.gathering:
                unit.whole.untyped_storage().resize_(unit.whole.nbytes)
                unit.finish_all_gather()
        for unit in next_units:
            self.start_gather(unit)

    def start_gather(self, unit: Unit) -> None:
        """Start to gather a unit, unless it is whole or being gathered already."""
        if not unit.gathering and not unit.whole.untyped_storage().size():
            unit.start_all_gather(unit.row.new_empty(unit.N, unit.T), unit.row)

    def free(self, unit: Unit) -> None:
        """Free the memory of a unit's parameters, which keep their shapes."""
        unit.whole.untyped_storage().resize_(0)

    def renew_parameters(self) -> None:
        """After the optimizer's step: free the old parameters that a forward without a backward has
        left. The next forward gathers the new ones."""
        for unit in self.units:
            unit.drop_all_gather()
            self.free(unit)


# --- apply ----------------------------------------------------------------------------------------


def apply(
    model: nn.Module,
    group: dist.ProcessGroup,
    stage: int = 0,
    scaler: LossScaler | None = None,
    reduce_dtype: torch.dtype | None = None,
    init=None,
    expert_group: dist.ProcessGroup | None = None,
) -> GradientSums:
    """Make `model` one of `group.size()` data-parallel replicas, sharded by `stage`. All ranks must
    hold equal weights. Returns the object that sums the gradients.

    scaler: scales the loss in fp16. reduce_dtype: the type in which gradients are sent; by default
    that of their sum, at least float32.
    init(names): gives the parameters of these names their values, for a model on the meta device.
    It is called for one layer at a time, which is sharded before the next one gets values.
    expert_group: the ranks that hold the same experts, where the ranks of `group` hold different
    ones. Raises FieldError for another stage, ValueError where expert_group is missing.
    """
    if stage not in (0, 1, 2, 3):
        rule = "must be 0 (nothing is sharded), 1 (optimizer state), 2 (and gradients) or 3 (and"
        raise FieldError("zero_stage", stage, rule + " parameters)")
    layers = named_layers(model)
    units = units_of(model, layers, group, stage, init, expert_group)
    if not units:
        # This is a pipeline stage without a layer, or one without trainable parameters.
        return GradientAccumulator(model, scaler)
    # The gradients of a tied weight's two uses are added in at least float32.
    sum_uses_apart(model)
    if stage == 3:
        return FullySharded(list(layers.values()), units, scaler, reduce_dtype)
    gradients = DataParallel(units, stage, scaler, reduce_dtype)
    if stage > 0:
        for layer in layers.values():
            own = set(layer.parameters())
            of_layer = [unit for unit in units if not own.isdisjoint(unit.parameters)]
            layer.register_forward_pre_hook(partial(gradients.wait_for_parameters, of_layer))
    return gradients
