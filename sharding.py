"""Sharding: a parameter on a rank is a shard of a global tensor, and one small record says which.

A technique that keeps only a part of a parameter writes a `Sharding` on it: the shape of the global
tensor, and the placements that lead from it to this rank's part, outermost first. A [6, 3] weight,
sharded by rows over 2 tensor-parallel ranks, then over 2 data-parallel ranks:

    Sharding((6, 3), (Shard(0, tp), Shard(0, dp)))

    tp 0, rows 0 1 2    dp 0: rows 0 1    dp 1: row 2 and a row of padding
    tp 1, rows 3 4 5    dp 0: rows 3 4    dp 1: row 5 and a row of padding

    python -m course.sharding       this weight on four ranks: its rows, gathered, and initialised

Two more parts are for fsdp.py: which modules of a model are layers, and how the shards of a layer's
parameters lie in rows.

Initialisation, checkpoints, the gradient norm and the tests read this record and nothing else, so
none of them has a case per technique. A size that the ranks do not divide is padded with zeros at
the end. A technique may ask for more (`pad_parameter`). Padding belongs to no global tensor.

Initial weights do not depend on the layout. Each parameter is drawn whole, from a generator seeded
by (seed, global name), then sharded. Models are built on the meta device first, so a rank never
holds more than one whole parameter beside its own shards (with fsdp.py, one whole layer).

Not covered: DTensor records the same placements over a mesh, and pays for a tensor subclass in
every operation. Megatron-LM seeds each tensor-parallel rank differently, so there a new layout
starts from another model.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import generator

# --- the record -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is padded, and divided evenly over the ranks of `group`."""

    dim: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Sharding:
    """Which part of which global tensor a rank holds.

    shape: of the global tensor, without padding. placements: outermost first; none for a whole
    parameter. copy_of: for the second copy of a tied weight, on another pipeline stage, the global
    name of the first. padded: the shape with the padding that a technique asked for; None for no
    more than the ranks need.
    """

    shape: tuple[int, ...]
    placements: tuple[Shard, ...] = ()
    copy_of: str | None = None
    padded: tuple[int, ...] | None = None


def sharding_of(parameter: Tensor) -> Sharding:
    """The record of a parameter. A parameter without a record is whole."""
    return getattr(parameter, "sharding", None) or Sharding(tuple(parameter.shape))


def set_sharding(part: Tensor, sharding: Sharding) -> Tensor:
    """Attach the record to a tensor, and return the tensor."""
    part.sharding = sharding
    return part


def keep_dtype(parameter: Tensor) -> Tensor:
    """Let `materialise` leave the type of a parameter as it is, whatever the model's is."""
    parameter.keeps_dtype = True
    return parameter


# --- the parameters of a model --------------------------------------------------------------------


def local_part(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank updates: its ZeRO shard (fsdp.py), or all of it."""
    return getattr(parameter, "shard", parameter)


def named_parameters(*models: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(global name, local part) of each parameter of models that are parts of one model. A tied
    weight comes once, under its first name."""
    seen = set()
    for model in models:
        for name, p in model.named_parameters():
            name = sharding_of(p).copy_of or name
            if name not in seen:
                seen.add(name)
                yield name, local_part(p)


def num_parameters(model: nn.Module) -> int:
    """The parameters of the whole model, however it is sharded. A tied weight counts once."""
    return sum(math.prod(sharding_of(p).shape) for p in model.parameters())


# --- shard and gather -----------------------------------------------------------------------------


def local_slice(sharding: Sharding) -> tuple[list[int], list[int], list[int]]:
    """The position of this rank's part in the global tensor: (offset, size, size with padding),
    with one number per dimension each."""
    start = [0] * len(sharding.shape)
    end = list(sharding.shape)
    padded = list(sharding.padded or sharding.shape)
    for shard in sharding.placements:
        dim = shard.dim
        padded[dim] = -(-padded[dim] // shard.group.size())  # rounded up
        start[dim] = min(start[dim] + shard.group.rank() * padded[dim], end[dim])
        end[dim] = min(start[dim] + padded[dim], end[dim])
    size = [e - s for s, e in zip(start, end)]
    return start, size, padded


def unpad(part: Tensor, sharding: Sharding) -> Tensor:
    """A view of this rank's part without its padding."""
    _, size, _ = local_slice(sharding)
    return part[tuple(slice(0, n) for n in size)]


def shard_of(whole: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of a global tensor: a view, or a copy if it is padded."""
    offset, size, padded = local_slice(sharding)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size))]
    if size == padded:
        return part
    # F.pad takes (before, after) of each dimension, the last one first.
    amounts = []
    for with_padding, n in zip(reversed(padded), reversed(size)):
        amounts += [0, with_padding - n]
    return F.pad(part, amounts)


def shard_parameter(module: nn.Module, name: str, shard: Shard) -> None:
    """Replace the parameter `name` of a module by this rank's part of it, with a record. A missing
    parameter (bias=False) stays missing."""
    p = getattr(module, name)
    if p is None:
        return
    part = shard_of(p.detach(), Sharding(tuple(p.shape), (shard,))).clone()
    record = sharding_of(p)
    record = replace(record, placements=(*record.placements, shard))
    setattr(module, name, set_sharding(nn.Parameter(part, p.requires_grad), record))


def pad_parameter(module: nn.Module, name: str, dim: int, multiple: int) -> None:
    """Pad the parameter `name` of a module, which is not sharded yet, with zeros, so that its size
    in dimension `dim` is a multiple of `multiple`."""
    p = getattr(module, name)
    padded = list(p.shape)
    padded[dim] = -(-padded[dim] // multiple) * multiple  # rounded up
    record = replace(sharding_of(p), padded=tuple(padded))
    part = shard_of(p.detach(), record)
    setattr(module, name, set_sharding(nn.Parameter(part, p.requires_grad), record))


def gather(part: Tensor, sharding: Sharding) -> Tensor:
    """The global tensor, on every rank of its placements' groups. A collective: all of those ranks
    call it."""
    # For each placement: (shard, its dimension's size before it, without padding).
    steps = []
    shape = list(sharding.padded or sharding.shape)
    for shard in sharding.placements:
        steps.append((shard, shape[shard.dim]))
        shape[shard.dim] = -(-shape[shard.dim] // shard.group.size())
    # Gather from the innermost placement outwards.
    for shard, size in reversed(steps):
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(shard.group.size())]
        dist.all_gather(parts, part, group=shard.group)
        part = torch.cat(parts, shard.dim).narrow(shard.dim, 0, size)
    return part[tuple(slice(0, n) for n in sharding.shape)]


# --- layers: the modules whose parameters are gathered together -----------------------------------


@dataclass(eq=False)
class Layer:
    """A module whose parameters are gathered before it runs (fsdp.py). The model itself, the root,
    is one too: it has the parameters that are in no other layer."""

    name: str
    module: nn.Module
    # {name of a parameter that it reads: whether it only looks up rows of it}
    reads: dict[str, bool] = field(default_factory=dict)
    # The units that its forward reads. A shared weight is in a unit of one of its layers.
    units: list = field(default_factory=list)
    # Those that its backward reads.
    backward_units: list = field(default_factory=list)


def named_layers(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The layers where the caller names none, {name: module}: each child of the model, and in the
    place of a child without a forward (ModuleList, ModuleDict) its children."""
    layers = {}
    for name, child in model.named_children():
        if has_forward(child):
            layers[prefix + name] = child
        else:
            layers |= named_layers(child, f"{prefix}{name}.")
    return layers


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def layers_of(model: nn.Module, units=None) -> list[Layer]:
    """The root, then the other layers in the order of registration. Raises ValueError if units
    (as in fsdp.apply) names no module, or one without a forward."""
    if isinstance(units, (type, tuple)):
        chosen = [module for module in model.modules() if isinstance(module, units)]
    elif units:
        chosen = [module for name, module in model.named_modules() if units(name, module)]
    else:
        chosen = named_layers(model).values()
    layers = {model: Layer("the model", model)}
    names = {p: name for name, p in model.named_parameters()}

    def visit(name: str, module: nn.Module, layer: Layer) -> None:
        if module in chosen and module is not model:
            if not has_forward(module):
                rule = "has no forward; name the modules in it"
                raise ValueError(f"units: {name}, a {type(module).__name__}, {rule}")
            layer = layers.setdefault(module, Layer(name, module))
        is_lookup = getattr(module, "is_lookup", isinstance(module, nn.Embedding))
        for p in module.parameters(recurse=False):
            layer.reads[names[p]] = is_lookup and layer.reads.get(names[p], True)
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, layer)

    visit("", model, layers[model])
    if units and len(layers) == 1:
        raise ValueError(f"units {units}: no module of the {type(model).__name__} is one")
    return list(layers.values())


def merge(orders: list[list[int]]) -> list[int]:
    """A short list that has each of these lists in it, in its order."""
    merged = []
    for order in orders:
        at = 0
        for i in order:
            if i in merged[at:]:
                at = merged.index(i, at)
            else:
                merged.insert(at, i)
            at += 1
    return merged


# --- rows: the shards of several parameters, as one tensor ----------------------------------------
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
# fsdp.py decides when the rows are sent.


def shard_dim(shape: Sequence[int], n: int) -> int:
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
            # A scalar has no dimension.
            whole = list(p.shape) or [1]
            dim = shard_dim(whole, n)
            shape = list(whole)
            # The size is rounded up, so that all shards have equal shapes.
            shape[dim] = -(-whole[dim] // n)
            self.slots[p] = Slot(self.T, dim, torch.Size(shape))
            self.T += math.prod(shape)
            self.padding |= n * shape[dim] > whole[dim]

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
        whole = whole.unsqueeze(0) if whole.dim() == 0 else whole
        size = shape[dim]
        full, rest = divmod(whole.shape[dim], size)
        shards = self.shards_in(flat, p)
        in_whole = whole.narrow(dim, 0, full * size).unflatten(dim, (full, size))
        # Both views are [full, *shape of a shard].
        yield shards[:full], in_whole.movedim(dim, 0)
        if rest:
            yield shards[full].narrow(dim, 0, rest), whole.narrow(dim, full * size, rest)


# --- initial values -------------------------------------------------------------------------------


def init(
    model: nn.Module, seed: int, device, dtype: torch.dtype, names: list[str] | None = None
) -> None:
    """Set the initial values of a model on the meta device, or only of the named parameters.

    `model.init_parameter(name, shape, generator)` draws one whole parameter.
    """
    materialise(model, device, dtype, names)
    if torch.device(device).type == "meta":
        return
    with torch.no_grad():
        for name, p in model.named_parameters():
            if names is None or name in names:
                record = sharding_of(p)
                name = record.copy_of or name
                whole = model.init_parameter(name, record.shape, generator(seed, name))
                p.copy_(shard_of(whole, record))


def materialise(
    model: nn.Module, device, dtype: torch.dtype, names: list[str] | None = None
) -> None:
    """Replace each parameter on the meta device (of these names) by zeros on `device`. Ties and
    records are kept. Padding stays zero."""
    wanted = [p for name, p in model.named_parameters() if names is None or name in names]
    real = {}
    for p in wanted:
        own = p.dtype if hasattr(p, "keeps_dtype") else dtype
        zeros = torch.zeros(p.shape, dtype=own, device=device)
        real[p] = nn.Parameter(zeros, requires_grad=p.requires_grad)
        if hasattr(p, "sharding"):
            set_sharding(real[p], p.sharding)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, real.get(p, p))
