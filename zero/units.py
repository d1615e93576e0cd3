"""One layer's parameters as one tensor: what fsdp.py sends in a single collective.

Data-parallel ranks each keep a shard of every parameter (ZeRO, arXiv 1910.02054; PyTorch FSDP's
FlatParameter, arXiv 2304.11277, section 3.2.1). A collective for each parameter would send many
small messages. So the parameters of a layer are flattened to one tensor [N, T]. Row r holds rank
r's shard of each parameter, one after the other. A parameter that N does not divide is padded at
its end. For N = 2, weight [5, 2] and bias [2], both sharded along dimension 0, T is 7:

    row 0    w00 w01 w10 w11 w20 w21  b0        weight[0:3], bias[0:1]
    row 1    w30 w31 w40 w41  -   -   b1        weight[3:5] and a row of padding, bias[1:2]

An all-gather collects the rows of all ranks on every rank: all parameters of the layer. A
reduce-scatter sums tensors [N, T] over the ranks and gives rank r row r of the sum. For gradients
in this order, row r has the gradients of rank r's shards.

    python fsdp.py        the lesson of this file and of fsdp.py

fsdp.py decides when the rows are sent. This file knows where each element lies, and what a rank
holds and sends: the table of fsdp.py.

Not covered: PyTorch's newer `fully_shard` keeps each parameter as a DTensor of its own.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("fsdp")

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sharding import Shard, set_sharding, sharding_of

# their names from torch 2.13 on
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

    # where the first element stands
    offset: int
    # the dimension along which the parameter is sharded
    dim: int
    # the shape of a shard, padding included
    shape: torch.Size


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
            # rounded up
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
        # both [full, *shape of a shard]
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
        # parameters whose gradients are in `local_grads`
        self.arrived: set[nn.Parameter] = set()
        # [N, T], from this rank's samples
        self.local_grads: Tensor | None = None
        # stages 2 and 3: [T], this rank's row of the sum over ranks and micro-batches
        self.summed_grads: Tensor | None = None
        # `work` is the handle of a collective that runs. While gradients are being summed:
        # (this rank's row of the sum [T], work)
        self.reducing: tuple | None = None

        # stage 3: [T], this rank's shards of the parameters
        self.row: Tensor | None = None
        # stage 3: the storage of the whole parameters, empty except from `gather` to `free`
        self.whole: Tensor | None = None
        # while parameters are being gathered: (flat [N, T], work)
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
            # `data`: the write must not raise p's version, or backward would refuse what it has
            # saved. The values are the ones that forward has seen.
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
    """The units of a model, in the order of forward. Arguments as in fsdp.apply."""
    units = []
    seen = set()
    for prefix, layer in layers.items():
        # a tied weight is in the unit of the first layer that has it
        names = [f"{prefix}.{name}" for name, p in layer.named_parameters() if p not in seen]
        if names and init:
            init(names)
        # after init, which replaces meta parameters by real ones
        seen.update(layer.parameters())
        for part in parts_of(layer, names):
            parameters = [model.get_parameter(name) for name in part]
            units += make_units(parameters, group, stage, expert_group)
    return units


def parts_of(layer: nn.Module, names: list[str]) -> list[list[str]]:
    """The parameters of a layer, by name; those of an embedding's norm apart. Backward reads the
    norm, and it does not read a tied matrix (FullySharded)."""
    if getattr(layer, "tokens", None) is None:
        return [names]
    of_norm = [name for name in names if name.startswith("embedding.norm.")]
    return [[name for name in names if name not in of_norm], of_norm]


def make_units(parameters: list[nn.Parameter], group, stage: int, expert_group):
    """The units of one layer, sharded: one of experts, which have fewer replicas than the rest, and
    one of the rest. Frozen parameters have no gradients; they make units only in stage 3."""
    subsets = defaultdict(list)
    for p in parameters:
        subsets[p.requires_grad, is_sharded_over(p, group)].append(p)
    units = []
    # the same order on every rank
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
            share_own_shards(unit)
        units.append(unit)
    return units


def is_sharded_over(p: nn.Parameter, group: dist.ProcessGroup) -> bool:
    """Whether ranks of the data-parallel group hold different shards of p already. Only moe.py
    shards over these ranks: then p is of an expert."""
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
def share_own_shards(unit: Unit) -> None:
    """Stages 1 and 2: the shard of a parameter is a view of it where its numbers lie together, so
    it costs no memory: along dimension 0, or where the dimensions before are 1, as of one expert.
    Any other shard is a copy, a share 1 / N of the parameter: of a few experts on many ranks."""
    for p, (_, dim, shape) in unit.slots.items():
        padded_shape = list(shape)
        padded_shape[dim] *= unit.N
        padded = p.new_zeros(padded_shape)
        whole = padded.narrow(dim, 0, p.shape[dim]).copy_(p)
        part = padded.narrow(dim, unit.rank * shape[dim], shape[dim])
        if part.is_contiguous():
            # p moves to where it has room for the padding
            p.data = whole
        # contiguous() of what is contiguous is the same tensor
        set_shard(unit, p, part.contiguous())


def set_shard(unit: Unit, p: nn.Parameter, part: Tensor) -> None:
    """Give p its `shard`: what the optimizer updates, with a sharding record of its own."""
    record = sharding_of(p)
    placements = (*record.placements, Shard(unit.slots[p].dim, unit.group))
    p.shard = nn.Parameter(part, requires_grad=p.requires_grad)
    set_sharding(p.shard, replace(record, placements=placements))


# --- the table of fsdp.py -------------------------------------------------------------------------


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
    """By a rank in a step of m micro-batches, in units of Ψ (N - 1) / N, with ring collectives: an
    all-reduce counts 2 (ZeRO, section 7, has m = 1)."""
    return (2, 2, m + 1, 3 * m)[stage]
