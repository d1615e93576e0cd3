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

Any model will do. The caller names the modules that are layers (`units=Block`); by default they are
the model's children. What is in none of them belongs to the root, the model itself. A unit is the
parameters of a layer, flattened to N rows of T numbers; row r is rank r's shard. One collective
moves one unit (in PyTorch's DDP: a bucket). A layer has several units where parameters differ:
experts, frozen ones, lookup tables, types.

    gradients = fsdp.apply(model, group, stage=3, units=Block)

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
                               updated; each layer of the next forward waits for its own; stage 3:
                               drop whole parameters, old now
    wait_for_parameters()      stages 1 and 2: before anything but a forward reads them

    a unit's tensors       stages 0, 1            stage 2                 stage 3
    parameters             in the model           in the model            row [T]; whole for a while
    local_grads [N, T]     all through the step   until reduced           until reduced
    main_grad is in        a row of local_grads   summed_grads [T]        summed_grads [T]

Communication overlaps computation. In stage 3 a unit is gathered while the layer before it runs, in
the order that the last step showed; backward does the same from the last layer to the first. So
two layers are whole at a time, and the root; the table leaves these out. A layer's backward begins
when the first gradient of its result has come. So what needs a gradient must be in the result.

    compute                         | block 0 | block 1 | block 2 |
    all-gather of the unit of    0  |    1    |    2    |   ..

A rank may skip a layer that another rank runs: it adds zeros (`may_skip`, the default). All ranks
call the model equally often. A parameter that nobody has used has gradient 0. Gradients are summed,
never averaged: train.py starts each backward with 1 / n, where n is the number of tokens with a
target in the global batch.

With hybrid sharding the N ranks are a part of all, a node for example. Other nodes hold the same
shards: once a step, a row of gradients is also summed over these (`replicate_group`).

Not covered: units that stay whole between forward and backward, and offload to the CPU, as in
torch.distributed.fsdp; `fully_shard` keeps each parameter as a DTensor of its own.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from base.backward_hook import on_first_gradient, tensors_in, with_gradient
from base.groups import all_gather, reduce_scatter, second_communicator
from base.model_config import FieldError
from optimizer import (
    GradientAccumulator,
    GradientSums,
    LossScaler,
    accumulation_dtype,
    add_product,
    sum_uses_apart,
)
from sharding import (
    FlatParameters,
    Layer,
    Shard,
    layers_of,
    local_part,
    merge,
    set_sharding,
    sharding_of,
)

# --- a unit ---------------------------------------------------------------------------------------


class Unit(FlatParameters):
    """Parameters that are moved together, and where their rows and gradients are at the moment.

    In stage 0 nothing is sharded: N is 1, whatever the size of the group.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup,
        stage: int,
        replicate_group: dist.ProcessGroup | None = None,
        name: str = "",
    ):
        """parameters: of one type; either all of them learn or all are frozen. group: the ranks
        that shard them. replicate_group: the ranks that hold the same shard. name: of the layer."""
        super().__init__(parameters, group.size() if stage else 1)
        self.name = name
        self.trainable = [p for p in parameters if p.requires_grad]
        self.copies = [p for p in parameters if sharding_of(p).copy_of]
        # Sums of gradients may have a communicator of their own (`may_skip`).
        self.group = self.sum_group = group
        self.replicate_group = replicate_group
        self.rank = group.rank() if stage else 0
        self.is_sharded = stage > 0
        self.sum_dtype = accumulation_dtype(parameters[0].dtype)
        # The layers that read it: several for a shared weight.
        self.readers: list[Layer] = []
        # Whether one of them has run since the last update.
        self.has_run = False

        # Parameters whose gradients have not come: in stages 0 and 1 those of the last backward, in
        # 2 and 3 those of the backward that runs.
        self.missing = set(self.trainable)
        # The parameters whose gradients are in `local_grads`.
        self.arrived: set[nn.Parameter] = set()
        # Whether this backward has sent the gradients.
        self.is_sent = False
        # [N, T], the sum over this rank's samples. In stages 0 and 1, after `reduce`, this rank's
        # row is the sum over all ranks, and nothing reads the other rows.
        self.local_grads: Tensor | None = None
        # Stages 2 and 3: [T], this rank's row of the sum over ranks and micro-batches.
        self.summed_grads: Tensor | None = None
        # A running sum of gradients: (this rank's row [T], the collective's handle).
        self.reducing: tuple | None = None
        # Parameters that are being gathered: (flat [N, T], the collective's handle).
        self.gathering: tuple | None = None
        # Stage 3: [T], this rank's shards of the parameters.
        self.row: Tensor | None = None
        # Stage 3: the storage of the whole parameters, empty except from `make_room` to `free`.
        # Each parameter has a view of it, `p.whole`.
        self.whole: Tensor | None = None

    def start_all_gather(self, flat: Tensor, row: Tensor) -> None:
        """Begin to collect the rows [T] of all ranks in flat [N, T]."""
        work = all_gather(flat.view(-1), row, group=self.group, async_op=True)
        self.gathering = flat, work

    @torch.no_grad()
    def gather_shards(self) -> None:
        """Stages 1 and 2: begin to collect the shards, which each rank has updated."""
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
            # Autograd does not count a write to `p.data` as a change, so the tensors that it has
            # saved stay valid. They have the same values again.
            for in_flat, in_whole in self.views(flat, p, p.data):
                in_whole.copy_(in_flat)
        self.gathering = None

    def drop_all_gather(self) -> None:
        """Forget rows that nobody has used."""
        if self.gathering:
            self.gathering[1].wait()
            self.gathering = None

    @torch.no_grad()
    def gather_row(self) -> None:
        """Stage 3: begin to collect the rows. A copy of a tied matrix may have its shard in the row
        of the original (pipeline_parallel.share_tied)."""
        for p in self.copies:
            own = self.shard_in(self.row, p)
            if own.data_ptr() != p.shard.data_ptr():
                own.copy_(p.shard)
        self.start_all_gather(self.row.new_empty(self.N, self.T), self.row)

    @property
    def is_whole(self) -> bool:
        """Stage 3: whether the parameters are gathered. A scalar always is."""
        return not self.is_sharded or self.whole.untyped_storage().size() > 0

    def is_storage_of(self, y: Tensor) -> bool:
        """Stage 3: whether y is a parameter, or a view of one."""
        return self.is_sharded and y.untyped_storage()._cdata == self.whole.untyped_storage()._cdata

    @property
    def needs_gather(self) -> bool:
        return not self.is_whole and not self.gathering

    def make_room(self) -> None:
        """Stage 3: allocate the whole parameters."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        for p in self.parameters:
            p.data = p.whole

    def free(self) -> None:
        """Stage 3: free the whole parameters. They keep their shapes. Who reads one now gets NaN,
        from a storage of one number."""
        placeholder = self.row.new_full((), math.nan if self.row.is_floating_point() else 0)
        for p in self.parameters:
            p.data = placeholder.expand(p.shape)
        self.whole.untyped_storage().resize_(0)


@torch.no_grad()
def keep_own_row(unit: Unit) -> None:
    """Stage 3: keep this rank's row. The parameters have no values until they are gathered."""
    flat = unit.parameters[0].new_zeros(unit.N, unit.T)
    for p in unit.parameters:
        for in_flat, in_whole in unit.views(flat, p, p):
            in_flat.copy_(in_whole)
    unit.row = flat[unit.rank].clone()
    sizes = [p.numel() for p in unit.parameters]
    unit.whole = unit.row.new_empty(sum(sizes))
    for p, part in zip(unit.parameters, unit.whole.split(sizes)):
        p.whole = part.view(p.shape)
        set_shard(unit, p, unit.shard_in(unit.row, p))
    unit.free()


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


# --- the units of a model -------------------------------------------------------------------------


def add_units(
    model: nn.Module, layers: list[Layer], stage: int, init, shard_group, replicate_group
) -> None:
    """Shard the parameters, layer by layer, and tell each layer its units. shard_group(p): whether
    it is an expert, and the ranks that shard it. init, replicate_group: as in `apply`."""
    unit_of = {}
    for layer in layers:
        # A shared parameter is in a unit of the first layer that reads it.
        names = [name for name in layer.reads if name not in unit_of]
        if names and init:
            init(names)
        alike = {}
        for name in names:
            p = model.get_parameter(name)
            is_expert, group = shard_group(p)
            key = p.requires_grad, is_expert, layer.reads[name], p.dim() > 0, str(p.dtype)
            alike.setdefault(key, (group, []))[1].append(name)
        # Sorting gives the same order on every rank.
        for key in sorted(alike, reverse=True):
            group, names = alike[key]
            parameters = [model.get_parameter(name) for name in names]
            unit = make_unit(parameters, stage, group, replicate_group, layer.name)
            unit_of |= dict.fromkeys(names, unit)
    for layer in layers:
        layer.units = [u for u in dict.fromkeys(unit_of[name] for name in layer.reads) if u]
        for unit in layer.units:
            unit.readers.append(layer)
    for layer in layers:
        # The gradient of a lookup reads no table. So a table that is gathered for the backward of
        # another layer too, such as a tied head, is not gathered for this one. (A table of one
        # layer is, as the table at the top says.)
        computed = {unit_of[name] for name, is_lookup in layer.reads.items() if not is_lookup}
        needed = [u for u in layer.units if u in computed or len(u.readers) == 1]
        layer.backward_units = needed


def make_unit(parameters: list, stage: int, group, replicate_group, name: str) -> Unit | None:
    """A unit of parameters that are alike, sharded. Frozen parameters have no gradients, and are in
    units only in stage 3. A scalar is not sharded."""
    p = parameters[0]
    if not p.requires_grad and (stage < 3 or p.dim() == 0):
        return None
    unit = Unit(parameters, group, stage if p.dim() else 0, replicate_group, name)
    if unit.is_sharded and stage == 3:
        keep_own_row(unit)
    elif unit.is_sharded:
        alias_own_shards(unit)
    return unit


def is_sharded_over(p: nn.Parameter, group: dist.ProcessGroup) -> bool:
    """Whether ranks of the data-parallel group hold different shards of p already. Only moe.py
    shards over these ranks, so p then belongs to an expert."""
    ranks = set(dist.get_process_group_ranks(group))
    for shard in sharding_of(p).placements:
        shard_ranks = dist.get_process_group_ranks(shard.group)
        if len(shard_ranks) > 1 and ranks.issuperset(shard_ranks):
            return True
    return False


# --- the table at the top -------------------------------------------------------------------------


def bytes_per_parameter(
    stage: int, n: int, weight: int = 2, gradient: int = 4, state: int = 12
) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer state) of one of n ranks, in bytes for each parameter of
    the model (ZeRO, sections 5.1 to 5.3 with Ψ = 1, N_d = n). The defaults are mixed precision as
    in this project; in the paper a gradient has 2 bytes."""
    return (
        weight / n if stage >= 3 else weight,
        gradient / n if stage >= 2 else gradient,
        state / n if stage >= 1 else state,
    )


def elements_sent(stage: int, m: int) -> int:
    """Elements that a rank sends in a step of m micro-batches, in units of Ψ (N - 1) / N. With ring
    collectives: an all-reduce counts 2 (ZeRO, section 7, has m = 1)."""
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

    def __init__(
        self, layers: list[Layer], stage: int, scaler=None, reduce_dtype=None, may_skip=False
    ):
        """layers: the root first. scaler: in fp16 each backward starts with its scale, so gradients
        are divided by it. reduce_dtype, may_skip: as in `apply`."""
        self.root = layers[0]
        self.units = list(dict.fromkeys(unit for layer in layers for unit in layer.units))
        super().__init__([p for unit in self.units for p in unit.trainable], scaler)
        self.stage, self.reduce_dtype, self.may_skip = stage, reduce_dtype, may_skip
        self.shards_gradients = stage >= 2
        # Whether all ranks reduce all units in one order, whatever they use.
        self.in_order = may_skip or not self.shards_gradients
        self.unit_of = {p: unit for unit in self.units for p in unit.parameters}
        # The units that are being reduced.
        self.reductions: list[Unit] = []
        # Whether a backward runs that reduces in order, or one of stage 3.
        self.in_backward = False
        # The units that it has not reduced yet.
        self.unreduced: list[Unit] = []
        # Stages 1 and 2: the units whose updated parameters have not come yet, in order.
        self.coming: list[Unit] = []
        for layer in layers if stage > 0 else []:
            before = partial(self.before_forward, layer)
            layer.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            layer.module.register_forward_hook(partial(self.after_forward, layer))
        if not self.shards_gradients:
            for unit in self.units:
                unit.local_grads = self.new_grads(unit)
                self.set_main_grads(unit, unit.local_grads[unit.rank])
        self.zero_grad()

    def new_grads(self, unit: Unit) -> Tensor:
        """A buffer [N, T] that gradients overwrite. Padding must be 0: it is part of `main_grad`,
        which the gradient norm reads."""
        new = torch.zeros if unit.padding else torch.empty
        return new(unit.N, unit.T, dtype=unit.sum_dtype, device=unit.parameters[0].device)

    def set_main_grads(self, unit: Unit, row: Tensor | None) -> None:
        """Make `main_grad` of each shard a view of row [T]."""
        for p in unit.trainable:
            local_part(p).main_grad = None
            if row is not None:
                part = unit.shard_in(row, p)
                local_part(p).main_grad = part if p.dim() else part[0]

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
        if not self.shards_gradients:
            self.begin_backward()

    def begin_backward(self) -> None:
        """Stages 0 and 1: the step's last backward begins. Stages 2 and 3: one begins, and autograd
        will say when it ends."""
        self.in_backward = True
        if self.shards_gradients:
            # All ranks have sent what the backward before has summed.
            self.finish_reductions()
            # Autograd calls it when the whole backward is done.
            Variable._execution_engine.queue_callback(self.end_backward)
        if self.in_order:
            self.unreduced = [unit for unit in reversed(self.units) if unit.trainable]
            for unit in self.unreduced:
                unit.missing = set(unit.trainable)
                unit.is_sent = False

    def end_backward(self) -> None:
        self.reduce_in_order(everything=True)
        self.in_backward = False

    def accumulate(self, p: nn.Parameter) -> None:
        """Move p.grad into its unit. Autograd calls this when the gradient of p is complete."""
        # p.grad is None if a pipeline schedule has deferred this weight gradient, or if
        # `accumulate_product` has added it.
        if p.grad is None:
            return
        unit = self.unit_of[p]
        self.check_use(unit)
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

    def check_use(self, unit: Unit) -> None:
        """Raises RuntimeError where a gradient shows a use of a parameter that no hook has seen."""
        if unit.is_sharded and not unit.has_run:
            raise RuntimeError(
                f"{unit.name}: a parameter was read outside the forward of {unit.name}; let `units`"
                " name a module in whose forward it is read"
            )
        if self.in_order and self.in_backward and unit.is_sent:
            raise RuntimeError(
                f"{unit.name}: a backward computed a gradient twice, after it was sent; checkpoint"
                " a shared layer with use_reentrant=False"
            )

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
        if self.in_order:
            self.reduce_in_order()
        elif not unit.missing:
            self.reduce(unit)

    def reduce_in_order(self, everything: bool = False) -> None:
        """Reduce the units that are complete, or everything, from the last layer to the first.

        All ranks must reduce in one order. So a unit that is not complete, because this rank did
        not use it, delays all layers nearer to the input until the backward ends. Then it sends
        zeros.
        """
        while self.unreduced and (everything or not self.unreduced[0].missing):
            self.reduce(self.unreduced.pop(0))

    @torch.no_grad()
    def reduce(self, unit: Unit) -> None:
        """Start to sum a unit's gradients over the ranks that shard it."""
        if self.shards_gradients:
            # This bounds memory: one unit of gradients is filled, and at most one more is being
            # sent. If a rank may skip layers, more are: it sends late, and may wait for a gather of
            # this rank until then.
            self.finish_reductions(only_ended=self.may_skip)
        # Stages 1 and 2: all ranks gather everything before the first sum, used or not.
        self.wait_for_parameters()
        if unit.local_grads is None:
            unit.local_grads = self.new_grads(unit)
        for p in unit.trainable:
            # A parameter not used since the last reduction has an old gradient, or none.
            if p not in unit.arrived:
                unit.shards_in(unit.local_grads, p).zero_()
        unit.missing, unit.arrived, unit.is_sent = set(unit.trainable), set(), True
        # `to` copies only where the type differs.
        flat = unit.local_grads.to(self.sent_dtype(unit, unit.group))  # [N, T]
        # In stage 1 the sum goes to this rank's own row of the input.
        row = flat[unit.rank]  # [T]
        if self.shards_gradients:
            unit.local_grads = None
            row = torch.empty_like(row) if unit.is_sharded else row
        if unit.is_sharded:
            work = reduce_scatter(row, flat.view(-1), group=unit.sum_group, async_op=True)
        else:
            work = dist.all_reduce(flat, group=unit.sum_group, async_op=True)
        unit.reducing = row, work
        self.reductions.append(unit)

    def sent_dtype(self, unit: Unit, group: dist.ProcessGroup) -> torch.dtype:
        return (self.reduce_dtype if group.size() > 1 else None) or unit.sum_dtype

    @torch.no_grad()
    def finish_reductions(self, only_ended: bool = False) -> None:
        """Wait for the running reductions, and leave their sums in `main_grad`. only_ended: do not
        wait for those that still run."""
        while self.reductions:
            unit = self.reductions[0]
            row, work = unit.reducing
            if only_ended and not work.is_completed():
                return
            work.wait()
            if not self.shards_gradients:
                # A sum of another type is not in `local_grads` yet.
                if row.dtype != unit.sum_dtype:
                    unit.local_grads[unit.rank] = row
            elif unit.summed_grads is None:
                unit.summed_grads = row.to(unit.sum_dtype)
                self.set_main_grads(unit, unit.summed_grads)
            else:
                unit.summed_grads += row
            unit.reducing = None
            self.reductions.pop(0)

    def reduce_gradients(self) -> None:
        """After the step's last backward: wait until each `main_grad` is the sum over all ranks."""
        if self.shards_gradients:
            self.finish_reductions()
            for unit in reversed(self.units):
                is_unused = unit.trainable and unit.summed_grads is None
                # Where backward has computed only some gradients of a unit, they are still here.
                if is_unused or unit.arrived:
                    self.reduce(unit)
        else:
            if not self.in_backward:
                # Under zb-h1 nobody can say which backward is the last.
                self.begin_backward()
            self.end_backward()
        self.finish_reductions()
        self.sum_over_shard_groups()

    @torch.no_grad()
    def sum_over_shard_groups(self) -> None:
        """Hybrid sharding: add the rows of the ranks that hold the same shards. Once a step: for
        each micro-batch it would send as much between nodes as hybrid sharding saves there."""
        started = []
        for unit in self.units:
            row = unit.summed_grads if self.shards_gradients else unit.local_grads[unit.rank]
            if unit.replicate_group and row is not None:
                sent = row.to(self.sent_dtype(unit, unit.replicate_group))
                work = dist.all_reduce(sent, group=unit.replicate_group, async_op=True)
                started.append((row, sent, work))
        for row, sent, work in started:
            work.wait()
            if sent is not row:
                row.copy_(sent)

    def renew_parameters(self) -> None:
        """After the optimizer's step: start to get the shards that other ranks have updated."""
        for unit in self.units:
            unit.has_run = False
            unit.drop_all_gather()
        if self.stage > 0:
            self.coming = [unit for unit in self.units if unit.is_sharded]
            self.start_gathers()

    def start_gathers(self) -> None:
        """Start all-gathers, at most two at a time: each needs a buffer of a whole unit."""
        for unit in self.coming[:2]:
            if not unit.gathering:
                unit.gather_shards()

    def wait_for_parameters(self, units: list[Unit] | None = None) -> None:
        """Wait for `units`; by default for all. All ranks gather in the same order, so this also
        waits for earlier units."""
        for unit in self.units if units is None else units:
            while unit in self.coming:
                self.coming[0].finish_all_gather()
                self.coming.pop(0)
                self.start_gathers()

    def before_forward(self, layer: Layer, *_) -> None:
        """A hook of stages 1 to 3. *_: the arguments that a module passes to its hook."""
        for unit in layer.units:
            unit.has_run = True
        self.wait_for_parameters(layer.units)

    def after_forward(self, layer: Layer, module: nn.Module, args, result) -> None:
        """A hook. If a rank may skip layers, all gather everything in each forward, and stage 2 has
        to know when a backward begins."""
        if self.may_skip and layer is self.root:
            self.wait_for_parameters()
        if self.may_skip and self.stage == 2:
            tensors = tensors_in(result, layer.name)
            on_first_gradient(tensors, lambda grad: self.in_backward or self.begin_backward())


# --- stage 3: parameters are gathered for each use ------------------------------------------------


class FullySharded(DataParallel):
    """Stage 3: a rank keeps its row of each unit, and gathers the whole unit for each use.

    forward of a layer     wait for its units, start to gather those of the next; run; free its own
    backward of a layer    free the others; wait for its units, start to gather those of the next

    The first gradient of a layer's result marks the start of its backward. The root is whole from
    its forward to the end of backward. A tied matrix is kept after the head's forward, because
    backward begins at the head.

    A pass is one forward, or one backward, of the model. The next layer is the one that came next
    in the last pass of this direction.

    may_skip=False: all ranks go the same way. Where a pass goes another way than the last one, an
    all-gather comes too late, and one is in vain.
    may_skip=True: all ranks gather the same units in the same order in each pass, also the layers
    that they pass over, and hold these until the pass ends. So nobody has to know what the others
    use. After the first forward, in which all layers stay whole, they exchange their orders once.
    One backward follows one forward, or several.
    """

    def __init__(self, layers, scaler=None, reduce_dtype=None, group=None):
        """As DataParallel. group: if one of these ranks may skip layers; else None."""
        super().__init__(layers, 3, scaler, reduce_dtype, may_skip=group is not None)
        self.layers = layers
        # {whether it is a backward: the layers in the order in which a pass uses them}
        self.orders = {False: layers if self.may_skip else [], True: []}
        # The layers that this pass has used, and those that come next.
        self.used: list[Layer] = []
        self.expected: list[Layer] = []
        # The layers whose forward, or backward, runs: one, and those that called it.
        self.running: list[Layer] = []
        # In forward, for each of them: the nodes of its inputs in autograd's graph.
        self.inputs: list[set] = []
        # The units of layers whose input has a gradient.
        self.fed = set(self.root.units)
        # The units that are whole.
        self.held: dict[Unit, None] = {}
        # Those whose backward has begun, and those that a recomputation has gathered before that.
        self.begun: set[Unit] = set()
        self.recomputed: set[Unit] = set()
        # If a rank may skip layers.
        self.group = group
        self.has_agreed = False
        self.forwards_before_backward = 0
        if self.may_skip:
            for unit in self.units:
                # A rank may begin to sum a unit before another has gathered the next one. One
                # communicator needs one order, so gathers and sums have two.
                unit.sum_group = second_communicator(unit.group)

    # --- what happens when

    def before_forward(self, layer: Layer, module: nn.Module, args, kwargs) -> None:
        super().before_forward(layer)
        if layer is self.root:
            # What a pass that ended in an error has left.
            self.running, self.inputs, self.used, self.in_backward = [], [], [], False
            self.recomputed.clear()
            self.keep_only(self.root.units if self.forwards_before_backward else [])
            self.expected = list(self.orders[False])
        if self.in_backward:
            self.recomputed |= set(layer.units) - self.begun
        else:
            self.running.append(layer)
            inputs = with_gradient((args, kwargs))
            self.inputs.append({x.grad_fn for x in inputs})
            if inputs:
                self.fed.update(layer.units)
        self.gather(layer, layer.units)

    def after_forward(self, layer: Layer, module: nn.Module, args, result) -> None:
        if self.in_backward:
            # This was a recomputation, and backward needs the units now.
            return
        self.running.remove(layer)
        callers = list(self.running)
        tensors = tensors_in(result, layer.name)
        begin = partial(self.before_backward, layer, callers)
        recorded = on_first_gradient(tensors, begin, but=self.inputs.pop())
        for unit in layer.units:
            if any(unit.is_storage_of(y) for y in tensors):
                raise TypeError(f"{layer.name} returns a view of its parameter; return a clone()")
            needed = any(unit in caller.units for caller in callers)
            if not needed and not self.is_needed_later(unit, layer, recorded):
                self.free(unit)
        if layer is self.root:
            self.forwards_before_backward += recorded
            self.end_pass()

    def is_needed_later(self, unit: Unit, layer: Layer, recorded: bool) -> bool:
        """Whether a unit stays whole after the forward of a layer."""
        if layer is self.root:
            return recorded or self.forwards_before_backward > 0
        if self.may_skip and not self.has_agreed:
            return True
        is_tied = len(unit.readers) > 1 and unit.readers[-1] is layer
        return recorded and is_tied and unit in layer.backward_units

    def begin_backward(self) -> None:
        super().begin_backward()
        self.running, self.begun, self.recomputed = [], set(), set()
        if self.may_skip:
            self.keep_only(self.root.units)
            self.expected = self.orders[True] * self.forwards_before_backward

    def before_backward(self, layer: Layer, callers: list[Layer], grad: Tensor) -> None:
        """The backward of a layer begins. That of all layers that ran later is over."""
        if not self.in_backward:
            self.begin_backward()
        # If a layer returns the result of one that it has called, the backward of both begins now.
        if layer not in self.running:
            self.running = [layer, *callers]
        self.begun.update(layer.backward_units)
        self.recomputed -= self.begun
        if layer is not self.root:
            self.keep_only([unit for needed in self.running for unit in needed.backward_units])
        self.gather(layer, layer.backward_units)

    def reduce(self, unit: Unit) -> None:
        if unit not in self.fed and not unit.missing:
            # This is the first layer: no layer's backward comes later, which would free it.
            self.free(unit)
        super().reduce(unit)

    def end_backward(self) -> None:
        self.end_pass()
        self.forwards_before_backward = 0
        self.recomputed.clear()
        self.keep_only([])
        super().end_backward()

    def end_pass(self) -> None:
        """Gather what this rank has passed over, as the others do, and forget it."""
        for layer in self.expected if self.may_skip else []:
            self.start_gathers_of(layer)
            for unit in layer.units:
                unit.drop_all_gather()
        for unit in self.units:
            unit.drop_all_gather()
        if self.used and not self.may_skip:
            self.orders[self.in_backward] = self.used
        elif not self.has_agreed:
            self.agree_on_the_order()
        self.used, self.expected = [], []

    def agree_on_the_order(self) -> None:
        """Merge the orders in which the ranks have used the layers. No later step waits for what
        the others say."""
        orders = [None] * self.group.size()
        used = [self.layers.index(layer) for layer in self.used]
        dist.all_gather_object(orders, used, group=self.group)
        merged = merge(orders)
        merged += [i for i in range(len(self.layers)) if i not in merged]
        order = [self.layers[i] for i in merged]
        # The root is whole when backward begins.
        self.orders = {False: order, True: [x for x in reversed(order) if x is not self.root]}
        self.has_agreed = True

    def renew_parameters(self) -> None:
        """After the optimizer's step: free the old parameters that a forward without a backward has
        left. The next forward gathers the new ones."""
        for unit in self.units:
            unit.has_run = False
        self.forwards_before_backward = 0
        self.keep_only([])

    # --- gather and free

    def gather(self, layer: Layer, units: list[Unit]) -> None:
        """Make the units of a layer whole, and start to gather those of the next one."""
        if any(unit.needs_gather for unit in units):
            self.go_to(layer)
        waited = False
        for unit in units:
            if unit.needs_gather and self.may_skip:
                raise RuntimeError(
                    f"{layer.name}: runs outside the model's forward, or more often than in the"
                    " first one, or in a second backward; do not, or give may_skip=False"
                )
            if unit.needs_gather:
                unit.gather_row()
            if unit.gathering:
                unit.make_room()
                unit.finish_all_gather()
                self.held[unit] = None
                waited = True
        self.used.append(layer)
        while waited and self.expected:
            if self.start_gathers_of(self.expected.pop(0)):
                break

    def go_to(self, layer: Layer) -> None:
        """Expect what comes after this layer. If a rank may skip layers, start to gather all that
        come until then, as the others do."""
        if layer not in self.expected and not self.may_skip:
            # This pass goes another way, or round again.
            self.expected = list(self.orders[self.in_backward])
        other = None
        while layer in self.expected and other is not layer:
            other = self.expected.pop(0)
            if self.may_skip:
                self.start_gathers_of(other)

    def start_gathers_of(self, layer: Layer) -> bool:
        """Start to gather a layer. Returns whether there is anything to gather. If a rank may skip
        layers, all do it, also those that still have the layer; only the root's units are whole on
        all ranks."""
        units = layer.backward_units if self.in_backward else layer.units
        to_gather = [unit for unit in units if unit.needs_gather]
        if self.may_skip:
            whole = [] if layer is self.root else self.root.units
            to_gather = [unit for unit in units if unit.is_sharded and unit not in whole]
        for unit in to_gather:
            unit.drop_all_gather()
            unit.gather_row()
        return bool(to_gather)

    def free(self, unit: Unit) -> None:
        if unit in self.held:
            del self.held[unit]
            unit.free()

    def keep_only(self, units: list[Unit]) -> None:
        for unit in list(self.held):
            if unit not in units and unit not in self.recomputed:
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
    *,
    units=None,
    may_skip: bool = True,
    replicate_group: dist.ProcessGroup | None = None,
) -> GradientSums:
    """Make `model` one of `group.size()` data-parallel replicas, sharded by `stage`. All ranks must
    hold equal weights. Returns the object that sums the gradients.

    scaler: scales the loss in fp16. reduce_dtype: the type in which gradients are sent; by default
    that of their sum, at least float32. init(names): gives the parameters of these names their
    values, for a model on the meta device, one layer at a time: it is sharded before the next one.
    expert_group: the ranks of `group` that hold the same experts, where not all do.
    units: which modules are layers: a class, a tuple of classes, or a function (name, module) ->
    bool; by default sharding.named_layers. may_skip: whether a rank may skip a layer that another
    rank runs; False is a promise that all ranks run the same layers in the same order.
    replicate_group: with hybrid sharding, the ranks of other groups that hold the same shards.
    Raises FieldError for another stage, ValueError where expert_group is missing or units does not
    fit.
    """
    if stage not in (0, 1, 2, 3):
        rule = "must be 0 (nothing is sharded), 1 (optimizer state), 2 (and gradients) or 3 (and"
        raise FieldError("zero_stage", stage, rule + " parameters)")

    def shard_group(p: nn.Parameter) -> tuple:
        if not is_sharded_over(p, group):
            return False, group
        if expert_group is None:
            rule = "give expert_group, the ranks that hold the same ones"
            raise ValueError(f"ranks of the group hold different experts: {rule}")
        return True, expert_group

    layers = layers_of(model, units)
    add_units(model, layers, stage, init, shard_group, replicate_group)
    if not any(layer.units for layer in layers):
        # This is a pipeline stage without a layer, or one without trainable parameters.
        return GradientAccumulator(model, scaler)
    # The gradients of a tied weight's two uses are added in at least float32.
    sum_uses_apart(model)
    if stage < 3:
        return DataParallel(layers, stage, scaler, reduce_dtype, may_skip)
    return FullySharded(layers, scaler, reduce_dtype, group if may_skip else None)
