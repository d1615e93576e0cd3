"""A parameter on a rank is a slice of a global tensor. One small record says which slice.

A technique that keeps only part of a parameter writes a `Sharding` on it: the shape of the whole
tensor, and the cuts that lead from the whole to this rank's part, outermost first. Initialisation,
checkpoints, the gradient norm and the tests read that record and nothing else, so none of them has
a case per technique:

    tensor parallel 2, then sharded data parallel 2, of a [6, 3] weight:
    Sharding((6, 3), (Shard(0, tp), Shard(0, dp)))       rows 0..2 | 3..5, then each of those padded to 4 rows and halved again

A size that the ranks do not divide is padded with zeros at the end; the padding belongs to no
global tensor.

Initial weights do not depend on the layout: each parameter is drawn whole, from a generator seeded
by (seed, global name), then cut. Models are built on the meta device first, so no rank ever holds
more than one whole parameter beside its own parts (with parameters sharded by fsdp.py, one whole
layer).

    python sharding.py       cuts one tensor over four ranks and puts it together again

Megatron-LM instead seeds each tensor-parallel rank differently, so a new layout is a new model;
DTensor records the same cuts as placements over a mesh, at the price of a tensor subclass in every
operation."""

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt import generator


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` divided evenly, after padding, over the ranks of `group`."""

    dim: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Sharding:
    """Which part of which global tensor. shape: of the whole, without padding; cuts: outermost
    first; copy_of: the global name of the parameter that this one is a second copy of, on another
    pipeline stage."""

    shape: tuple[int, ...]
    placements: tuple[Shard, ...] = ()
    copy_of: str | None = None


def sharding_of(parameter: Tensor) -> Sharding:
    """The record of a parameter; one without a record is whole."""
    return getattr(parameter, "sharding", None) or Sharding(tuple(parameter.shape))


def local_part(parameter: Tensor) -> Tensor:
    """What this rank updates of a parameter: its shard (fsdp.py), or all of it."""
    return getattr(parameter, "shard", parameter)


def named_parameters(*models: nn.Module):
    """(global name, what this rank updates of the parameter) of models that hold parts of one; a
    tied weight comes once, under its first name."""
    for model in models:
        for name, p in model.named_parameters():
            yield sharding_of(p).copy_of or name, local_part(p)


def num_parameters(model: nn.Module) -> int:
    """Of the whole model, whatever shards this rank holds. A tied weight counts once."""
    return sum(math.prod(sharding_of(p).shape) for p in model.parameters())


def local_slice(sharding: Sharding) -> tuple[list[int], list[int], list[int]]:
    """Where this rank's part lies: (offset in the global tensor, size, size with padding), each a
    number per dimension."""
    offset = [0] * len(sharding.shape)
    end = list(sharding.shape)
    padded = list(sharding.shape)
    for c in sharding.placements:
        # ceil
        padded[c.dim] = -(-padded[c.dim] // c.group.size())
        offset[c.dim] = min(offset[c.dim] + c.group.rank() * padded[c.dim], end[c.dim])
        end[c.dim] = min(offset[c.dim] + padded[c.dim], end[c.dim])
    return offset, [e - o for e, o in zip(end, offset)], padded


def unpad(part: Tensor, sharding: Sharding) -> Tensor:
    """A view of this rank's part without its padding."""
    return part[tuple(slice(0, size) for size in local_slice(sharding)[1])]


def shard_of(whole: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of a global tensor, with zeros for padding where the ranks do not divide
    it."""
    offset, size, padded = local_slice(sharding)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size))]
    if size == padded:
        return part
    # F.pad counts from the last dimension
    ahead = [x for p, n in zip(reversed(padded), reversed(size)) for x in (0, p - n)]
    return torch.nn.functional.pad(part, ahead)


def shard_parameter(module: nn.Module, name: str, shard: Shard) -> None:
    """Replace the parameter `name` of a module by this rank's part of it, and write the cut on its
    record. A missing one (bias=False) stays missing."""
    p = getattr(module, name)
    if p is not None:
        part = nn.Parameter(
            shard_of(p.detach(), Sharding(tuple(p.shape), (shard,))).clone(),
            requires_grad=p.requires_grad,
        )
        setattr(
            module,
            name,
            set_sharding(
                part, replace(sharding_of(p), placements=(*sharding_of(p).placements, shard))
            ),
        )


def set_sharding(part: Tensor, sharding: Sharding) -> Tensor:
    """The same tensor, with its record."""
    part.sharding = sharding
    return part


def gather(part: Tensor, sharding: Sharding) -> Tensor:
    """The global tensor, on every rank of the groups that cut it. A collective: all of those ranks
    call it."""
    # unpadded size along each cut, before that cut
    sizes = []
    shape = list(sharding.shape)
    for c in sharding.placements:
        sizes.append(shape[c.dim])
        shape[c.dim] = -(-shape[c.dim] // c.group.size())
    for c, size in reversed(list(zip(sharding.placements, sizes))):
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for _ in range(c.group.size())
        ]
        dist.all_gather(parts, part.contiguous(), group=c.group)
        part = torch.cat(parts, c.dim).narrow(c.dim, 0, size)
    return part


def init(
    model: nn.Module, seed: int, device, dtype: torch.dtype, names: list[str] | None = None
) -> None:
    """Give a model built on the meta device its values, or only the parameters of these names.
    `model.init_parameter(name, shape, generator)` draws one whole parameter."""
    materialise(model, device, dtype, names)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if names is None or name in names:
                record = sharding_of(p)
                name = sharding_of(p).copy_of or name
                p.copy_(
                    shard_of(
                        model.init_parameter(name, record.shape, generator(seed, name)), record
                    )
                )


def materialise(
    model: nn.Module, device, dtype: torch.dtype, names: list[str] | None = None
) -> None:
    """Replace each meta parameter (of these names) by zeros on `device`, keeping ties and sharding
    records. (Zeros, because padding stays what it is.)"""
    real = {}
    wanted = {p for name, p in model.named_parameters() if names is None or name in names}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p in wanted and p not in real:
                real[p] = nn.Parameter(
                    torch.zeros(p.shape, dtype=dtype, device=device), requires_grad=p.requires_grad
                )
                if hasattr(p, "sharding"):
                    set_sharding(real[p], p.sharding)
            setattr(module, name, real.get(p, p))


# --------------------------------------------------------------------------------------------------


def _lesson(rank: int):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    record = Sharding((6, 3), (Shard(0, mesh.get_group("tp")), Shard(0, mesh.get_group("dp"))))
    whole = torch.arange(18.0).view(record.shape)
    part = shard_of(whole, record)
    return part, torch.equal(gather(part, record), whole)


def main():
    from lessons import ranks

    print("a [6, 3] weight, cut over 2 tensor-parallel ranks, then over 2 data-parallel ranks:")
    for rank, (part, same) in enumerate(ranks.run(_lesson, 4)):
        print(
            f"rank {rank} (dp {rank // 2}, tp {rank % 2}) holds {part.tolist()}; gathered equals"
            f" whole: {same}"
        )


if __name__ == "__main__":
    main()
