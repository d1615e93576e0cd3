"""Muon: momentum, orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon; at scale
Moonlight, arXiv 2502.16982).

AdamW divides each element of an update by its own size. Muon looks at a whole matrix: it makes all
singular values of the update about 1, so that rare directions move as far as frequent ones. For
each matrix W [out, in] of a block, with gradient G, learning rate lr and weight decay λ:

    M = μ M + G                               momentum; there is no second moment
    O = Newton-Schulz(G + μ M)                near U Vᵀ, where G + μ M = U Σ Vᵀ
    W = W - lr (0.2 √max(out, in) O + λ W)    an element moves about 0.2 lr, as far as with AdamW:
                                              one lr and λ for both (arXiv 2502.16982, section 2.2)

Embedding, positions, head, norms, biases and routers keep AdamW. Query, key, value, gate and up are
matrices of their own, each orthogonalised whole; so is each expert's.

The slice of an orthogonalised matrix is not the orthogonalised slice. So a matrix that ZeRO (from
stage 1 on) or tensor parallelism has sharded gets an owner. All ranks send it their slices of
G + μ M, and it sends slices of O back: two all-to-alls for all matrices together.

    rank 0   A0 B0 C0   all-to-all   A0 A1          O(A)         all-to-all   slices of O: A0 B0 C0
    rank 1   A1 B1 C1   --------->   B0 B1  C0 C1   O(B)  O(C)   --------->                A1 B1 C1

Owners have about equal FLOPs. With ZeRO and tensor parallelism this happens twice: the all-to-all
over ZeRO's ranks makes slices of tensor parallelism whole, then that over tensor-parallel ranks
makes matrices of these. In each, a rank whose slices have Ψ numbers sends 2 Ψ (n - 1) / n to n
ranks if owners are even. An m x n matrix (m <= n) takes 5 (4 m² n + 2 m³) FLOPs, once. Without ZeRO
each data-parallel rank computes the same.

    python train.py --optimizer muon
    python -m course.optimizer    a lesson; one part: singular values, and what a slice gives

Not covered: products in bf16, as Jordan's code has them (here they have the type of the gradient's
sum, so that every layout gives the same numbers; in fp32 a GPU is slower); matrices in groups,
where all slices and results here live at once; state in 16 bits; adapters.
"""

import math
from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from optimizer import AdamW
from sharding import Shard, Sharding, sharding_of

MOMENTUM = 0.95
STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalize(x: Tensor) -> Tensor:
    """U Vᵀ of x = U Σ Vᵀ, with singular values from 0.7 to 1.2 in the place of 1. Each step of
    Newton-Schulz makes of a singular value σ: A σ + B σ³ + C σ⁵. x: [.., out, in]"""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.mT if is_tall else x


def flops(shape: tuple[int, ...]) -> int:
    """Those of `orthogonalize`: three products in each step."""
    m, n = sorted(shape[-2:])
    return math.prod(shape[:-2]) * STEPS * (4 * m * m * n + 2 * m**3)


def scale(shape: tuple[int, ...]) -> float:
    """Elements of an orthogonal [out, in] matrix have the RMS 1 / √max(out, in)."""
    return 0.2 * math.sqrt(max(shape[-2:]))


def owners(costs: dict[str, int], n: int) -> dict[str, int]:
    """{name: rank}: the most expensive first, each to the rank that has the least by then."""
    load = [0] * n
    found = {}
    for name in sorted(costs, key=costs.__getitem__, reverse=True):
        found[name] = load.index(min(load))
        load[found[name]] += costs[name]
    return found


def cuts(record: Sharding) -> list[Shard]:
    """The placements that cut matrices, outermost first. Experts [E, out, in] that are spread over
    ranks stay whole."""
    return [shard for shard in record.placements if shard.dim >= len(record.shape) - 2]


def updates(slices: dict[str, Tensor], records: dict[str, Sharding]) -> dict[str, Tensor]:
    """This rank's slice of each orthogonalised matrix. A collective: the ranks that share matrices
    give the same names in the same order. Padding is rows or columns of zeros, and stays so."""
    found = {}
    shared = defaultdict(dict)
    for name, x in slices.items():
        if cut := cuts(records[name]):
            shared[cut[-1].group][name] = x
        else:
            found[name] = orthogonalize(x)
    for group, of_group in shared.items():
        found |= updates_by_owners(of_group, records, group)
    return found


def updates_by_owners(
    slices: dict[str, Tensor], records: dict[str, Sharding], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """As `updates`, of matrices whose innermost cut is over `group`. An owner puts slices together
    along that cut, and calls `updates` for the cut that remains, or none."""
    n, rank = group.size(), group.rank()
    owner = owners({name: flops(records[name].shape) for name in slices}, n)
    names = sorted(slices, key=owner.__getitem__)
    mine = [name for name in names if owner[name] == rank]
    sizes = [sum(slices[x].numel() for x in names if owner[x] == r) for r in range(n)]
    flat = torch.cat([slices[name].flatten() for name in names])
    # Row r has rank r's slices of the matrices that this rank owns.
    rows = flat.new_empty(n, sizes[rank])
    dist.all_to_all_single(rows.view(-1), flat, [sizes[rank]] * n, sizes, group=group)
    # {matrix: its columns of `rows`}, views: what is written there later is sent back.
    columns = dict(zip(mine, rows.split([slices[name].numel() for name in mine], 1)))
    whole, outer = {}, {}
    for name in mine:
        *outside, cut = cuts(records[name])
        outer[name] = replace(records[name], placements=tuple(outside))
        whole[name] = torch.cat([x.view_as(slices[name]) for x in columns[name]], cut.dim)
    for name, x in updates(whole, outer).items():
        for row, part in zip(columns[name], x.chunk(n, cuts(records[name])[-1].dim)):
            row.copy_(part.flatten())
    dist.all_to_all_single(flat, rows.view(-1), sizes, [sizes[rank]] * n, group=group)
    parts = flat.split([slices[name].numel() for name in names])
    return {name: part.view_as(slices[name]) for name, part in zip(names, parts)}


class Muon(AdamW):
    """Muon for the matrices of blocks, AdamW for the rest. The norm, clipping, skipped steps and
    masters are AdamW's. A matrix has 4 bytes of momentum for each number in the place of 8."""

    def allocate(self) -> None:
        super().allocate()
        self.momentum = {
            name: self.exp_avg.pop(name) for name in filter(self.is_matrix, self.parameters)
        }
        for name in self.momentum:
            del self.exp_avg_sq[name]

    @property
    def moments(self) -> dict[str, dict[str, Tensor]]:
        return super().moments | {"momentum": self.momentum}

    def is_matrix(self, name: str) -> bool:
        """A gate of one row is a vector."""
        in_block = name.startswith("blocks.") and ".router." not in name
        shape = sharding_of(self.parameters[name]).shape
        return in_block and len(shape) >= 2 and min(shape[-2:]) > 1

    def update_parameters(self, lr: float, factor: Tensor, finite: Tensor) -> None:
        super().update_parameters(lr, factor, finite)
        taken = finite.double()
        slices, records = {}, {}
        for name, momentum in self.momentum.items():
            p = self.parameters[name]
            gradient = torch.where(finite, p.main_grad * factor, 0)
            # A skipped step changes nothing.
            momentum.mul_(1 - (1 - MOMENTUM) * taken).add_(gradient)
            slices[name] = gradient.add_(momentum, alpha=MOMENTUM)
            records[name] = sharding_of(p)
        for name, x in updates(slices, records).items():
            rate = lr * taken
            master = self.masters[name].mul_(1 - rate * self.weight_decay)
            master.sub_(x.mul_(rate * scale(records[name].shape)))
        self.weights_from_masters(self.momentum)
