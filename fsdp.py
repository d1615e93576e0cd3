"""Sharded data parallelism, a stage at a time (ZeRO, arXiv 1910.02054; PyTorch FSDP, arXiv
2304.11277).

Data-parallel ranks train one model on different samples, and add up their gradients. Replicas of
everything are the simple way; each stage stops replicating one more thing. Ψ parameters, N ranks,
bytes in mixed precision (bf16 weights, fp32 gradients, fp32 master and moments):

    stage  on a rank         bytes of a rank          sent in a step of m micro-batches, times Ψ (N-1)/N elements
    0      everything        (2 + 4 + 12) Ψ           2        all-reduce of gradients
    1      state / N         (2 + 4 + 12/N) Ψ         2        reduce-scatter of gradients, all-gather of updated parameters
    2      gradients / N     (2 + (4 + 12)/N) Ψ       m + 1    .. the reduce-scatter after each micro-batch: only the sum of a part is kept
    3      parameters / N    (2 + 4 + 12)/N Ψ         3 m      .. parameters gathered for forward, and again for backward

(Between steps. In stage 3 two units of parameters, and in stages 2 and 3 two of gradients, come and
go.) What one collective moves is a unit: the parameters of one layer (the embedding and the head
are layers too), side by side in one flat [N, T] tensor whose row r is rank r's part of each. (A
layer's experts, where they are spread over some of the ranks, are a second unit: fewer ranks hold
the same ones.) A parameter is cut along its first dimension of size N or more (or its largest),
padded where N does not divide it.

    stage 3    compute        | block 0 | block 1 | block 2 |        Forward gathers a unit while the one before it computes, and drops it after use;
    forward    all-gather  0  |    1    |    2    |   ..             backward does the same in reverse, and sends a unit's gradients
                                                                     as soon as its last one is
                                                                     there.

`parameter.shard` is what this rank updates: the optimizer, the norm and checkpoints see shards,
through their sharding record, and nothing else of this file. Gradients are summed, never averaged:
the loss of each micro-batch is already divided by the number of counted tokens in the whole global
batch, so unequal masks and any split into ranks and micro-batches come out right. Only the loop
knows which backward is a step's last: before it, stages 0 and 1 send nothing.

    python fsdp.py      the four stages on two ranks: gradients, bytes, elements sent, how long gathers were in flight and waited for

Left out, and found in torch.distributed.fsdp: keeping the last unit between forward and backward (a
gather less, a unit more), sharding inside a node and replicating across, offloading to the CPU. A
tied matrix is gathered for the lookup, and for the head, where it stays until the head's backward
is over: the lookup's backward does not read it."""

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sharding
from model_config import GPTConfig
from optimizer import GradientAccumulator, LossScaler, accumulation_dtype, sum_uses_apart
from sharding import Shard, local_part, set_sharding, sharding_of

# their names from torch 2.13 on
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def cut_dim(shape, n: int) -> int:
    """The first dimension that n ranks can share, or the largest."""
    return next(
        (dim for dim, size in enumerate(shape) if size >= n),
        max(range(len(shape)), key=lambda dim: shape[dim]),
    )


class Unit:
    """The parameters of one layer, and how they lie in a flat [n, T] tensor: row r holds rank r's
    part of each, one after the other.

    Its gradients go when none is `missing` from the backward that runs. (Under zb-h1 biases of a
    later micro-batch may arrive before the weights of this one; they add up, and leave when the
    unit is full once more, or at the end of the step.)"""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, stage: int):
        """group: the ranks that hold the same parameters, and sum their gradients. In stage 0
        nothing is cut."""
        self.parameters = parameters
        self.trainable = [p for p in parameters if p.requires_grad]
        self.group, self.n, self.rank = group, *((group.size(), group.rank()) if stage else (1, 0))
        # places: parameter -> (offset in a row, dim, shape of a part)
        n = self.n
        self.T = 0
        self.places = {}
        self.padding = False
        for p in parameters:
            dim = cut_dim(p.shape, n)
            shape = torch.Size(
                -(-size // n) if d == dim else size for d, size in enumerate(p.shape)
            )
            self.places[p] = self.T, dim, shape
            self.T += shape.numel()
            self.padding |= n * shape[dim] > p.shape[dim]
        # whose gradients a backward has yet to bring; whose are in `gradients`
        self.missing = set(self.trainable)
        self.arrived = set()
        self.gradients: Tensor | None = None  # [n, T], of this rank's samples
        # [T], stages 2 and 3: this rank's part, summed over ranks and micro-batches
        self.sum: Tensor | None = None
        # (result, work), while gradients are on their way
        self.reducing = None
        # [T], stage 3: this rank's part of the parameters
        self.shards: Tensor | None = None
        # stage 3: where gathered parameters are; its storage comes and goes
        self.whole: Tensor | None = None
        # (flat [n, T], work), while parameters are on their way
        self.arriving = None

    def part(self, row: Tensor, p: nn.Parameter) -> Tensor:
        """The part of p, padded, in a row [T]."""
        offset, _, shape = self.places[p]
        return row[offset : offset + shape.numel()].view(shape)

    def rows(self, flat: Tensor, p: nn.Parameter) -> Tensor:
        """All parts of p in flat [n, T]: [n, *shape of a part]"""
        offset, _, shape = self.places[p]
        return flat[:, offset : offset + shape.numel()].unflatten(1, shape)

    def pairs(self, flat: Tensor, p: nn.Parameter, whole: Tensor):
        """(in_flat, in_whole): views of flat [n, T] and of whole, which is shaped like p, that are
        for the same elements; padding is in none."""
        rows = self.rows(flat, p)
        _, dim, shape = self.places[p]
        # ranks whose part has no padding; what the next one has
        full, rest = divmod(whole.shape[dim], shape[dim])
        yield (
            rows[:full],
            whole.narrow(dim, 0, full * shape[dim])
            .unflatten(dim, (full, shape[dim]))
            .movedim(dim, 0),
        )
        if rest:
            yield rows[full].narrow(dim, 0, rest), whole.narrow(dim, full * shape[dim], rest)


class DataParallel(GradientAccumulator):
    """One of N replicas, of which `stage` decides what is whole. After `reduce_gradients()`,
    `main_grad` of each shard is the sum over the group; after the optimizer's step,
    `gather_parameters()` brings every rank what the others have updated."""

    def __init__(
        self,
        units: list[Unit],
        stage: int,
        scaler: LossScaler | None,
        reduce_dtype: torch.dtype | None,
    ):
        """units: in the order of forward."""
        self.units = units
        self.stage = stage
        self.scaler = scaler
        # sending: units whose gradients are on their way
        self.last = False
        self.sending = []
        self.unit_of = {p: unit for unit in units for p in unit.parameters}
        self.parameters = [p for unit in units for p in unit.trainable]
        first = units[0].parameters[0]
        self.sum_dtype = accumulation_dtype(first.dtype)
        self.device = first.device
        self.reduce_dtype = reduce_dtype or self.sum_dtype
        for unit in units if stage < 2 else []:
            unit.gradients = torch.zeros(unit.n, unit.T, dtype=self.sum_dtype, device=self.device)
            self.hand_over(unit, unit.gradients[unit.rank])
        self.zero()
        self.listen()

    def hand_over(self, unit: Unit, row: Tensor | None) -> None:
        """Let each shard's `main_grad` be its part of a row [T]."""
        for p in unit.trainable:
            local_part(p).main_grad = None if row is None else unit.part(row, p)

    def zero(self) -> None:
        for unit in self.units:
            # what arrives first overwrites
            unit.arrived.clear()
            if self.stage > 1:
                unit.sum = None
                self.hand_over(unit, None)

    def last_backward(self) -> None:
        """The next backward is the step's last: units may go as soon as they are full."""
        self.last = True
        for unit in self.units:
            if self.stage < 2:
                unit.missing = set(unit.trainable)

    # a hook: autograd does not record here
    def accumulate(self, p: nn.Parameter) -> None:
        # owed: a pipeline schedule computes it later
        if p.grad is None:
            return
        unit = self.unit_of[p]
        unscale = 1 / self.scaler.scale if self.scaler else 1
        if unit.gradients is None:
            make = torch.zeros if unit.padding else torch.empty
            unit.gradients = make(unit.n, unit.T, dtype=self.sum_dtype, device=self.device)
        for in_flat, in_whole in unit.pairs(unit.gradients, p, p.grad):
            if p in unit.arrived:
                in_flat.add_(in_whole, alpha=unscale)
            else:
                in_flat.copy_(in_whole)
                if unscale != 1:
                    in_flat.mul_(unscale)
        unit.arrived.add(p)
        unit.missing.discard(p)
        p.grad = None
        if not unit.missing:
            self.complete(unit)

    def complete(self, unit: Unit) -> None:
        """A backward has left all gradients of a unit."""
        if self.stage > 1:
            self.reduce(unit)
        elif self.last:
            self.launch()

    def launch(self, everything: bool = False) -> None:
        """Stages 0 and 1: send the units that are full, in the same order on every rank."""
        # as backward reaches them
        for unit in reversed(self.units):
            if unit not in self.sending:
                if unit.missing and not everything:
                    return
                self.reduce(unit)

    @torch.no_grad()
    def reduce(self, unit: Unit) -> None:
        """Start the sum of a unit's gradients over the ranks."""
        if self.stage > 1:
            # [n, T] is memory: one is filled while one is on its way
            self.finish_reductions()
        # not used this time
        for p in set(unit.parameters) - unit.arrived:
            unit.rows(unit.gradients, p).zero_()
        unit.missing = set(unit.trainable)
        unit.arrived = set()
        # itself, where that is its type
        x = unit.gradients.to(self.reduce_dtype if unit.group.size() > 1 else self.sum_dtype)
        mine = x[unit.rank]
        if self.stage > 1:
            # the next micro-batch's go elsewhere
            mine = torch.empty_like(mine)
            unit.gradients = None
        if self.stage == 0:
            unit.reducing = mine, dist.all_reduce(x, group=unit.group, async_op=True)
        else:
            unit.reducing = mine, reduce_scatter(mine, x.view(-1), group=unit.group, async_op=True)
        self.sending.append(unit)

    @torch.no_grad()
    def finish_reductions(self) -> None:
        for unit in self.sending:
            result, work = unit.reducing
            work.wait()
            # of the first micro-batch
            if self.stage > 1 and unit.sum is None:
                unit.sum = result.to(self.sum_dtype)
                self.hand_over(unit, unit.sum)
            elif self.stage > 1:
                unit.sum += result
            elif result.dtype != self.sum_dtype:
                unit.gradients[unit.rank] = result
            unit.reducing = None
        self.sending.clear()

    def reduce_gradients(self) -> None:
        """Wait until every `main_grad` is the sum over the group."""
        if self.stage < 2:
            self.launch(everything=True)
        for unit in reversed(self.units) if self.stage > 1 else []:
            # by a backward that did not reach all of it
            if unit.arrived:
                self.reduce(unit)
        self.finish_reductions()
        self.last = False

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """After the optimizer's step: every rank gets the parts that the others have updated."""
        if self.stage == 0:
            return
        for before, unit in pairwise([None, *self.units, None]):
            if unit:
                flat = torch.empty(
                    unit.n, unit.T, dtype=unit.parameters[0].dtype, device=self.device
                )
                for p in unit.parameters:
                    unit.part(flat[unit.rank], p).copy_(p.shard)
                unit.arriving = (
                    flat,
                    all_gather(flat.view(-1), flat[unit.rank], group=unit.group, async_op=True),
                )
            # while this one is on its way
            if before:
                self.unpack(before)

    @torch.no_grad()
    def unpack(self, unit: Unit) -> None:
        """Wait for a unit's parameters, and put them where the model reads them."""
        flat, work = unit.arriving
        work.wait()
        for p in unit.parameters:
            # data: a write that autograd does not count, for the values are the same
            for in_flat, in_whole in unit.pairs(flat, p, p.data):
                in_whole.copy_(in_flat)
        unit.arriving = None


class FullySharded(DataParallel):
    """Stage 3: between its uses, a unit is its shards alone."""

    def __init__(
        self,
        layers: list[nn.Module],
        units: list[Unit],
        scaler: LossScaler | None,
        reduce_dtype: torch.dtype | None,
    ):
        super().__init__(units, 3, scaler, reduce_dtype)
        self.needs = [
            list(dict.fromkeys(self.unit_of[p] for p in layer.parameters())) for layer in layers
        ]
        self.chained = False
        self.users = {
            unit: [i for i, needed in enumerate(self.needs) if unit in needed] for unit in units
        }
        for i, layer in enumerate(layers):
            layer.forward = partial(self.forward, i, layer.forward)

    def forward(self, i: int, layer, *args) -> Tensor:
        """A layer, around which its parameters come and go."""
        self.gather(self.needs[i], self.needs[i + 1] if i + 1 < len(self.needs) else [])
        y = layer(*args)
        recorded = torch.is_grad_enabled() and y.requires_grad
        for unit in self.needs[i]:
            # a tied matrix stays with its last user
            if not (recorded and len(self.users[unit]) > 1 and self.users[unit][-1] == i):
                self.free(unit)
        if i == 0:
            # to another pipeline stage, by the gradient of the input
            self.chained = args[0].requires_grad
            if recorded and self.chained:
                args[0].register_hook(lambda grad: self.before_backward(-1))
        if recorded:
            y.register_hook(lambda grad: self.before_backward(i))
        return y

    def before_backward(self, i: int) -> None:
        """The gradient of a layer's output is there: what came after it is done. (i = -1: all is
        done.)"""
        mine, before = (
            [unit for unit in self.needs[k] if self.users[unit][-1] == k] if k >= 0 else []
            for k in (i, i - 1)
        )
        for unit in self.needs[i + 1] if i + 1 < len(self.needs) else []:
            if unit not in mine:
                self.free(unit)
        self.gather(mine, before)

    def complete(self, unit: Unit) -> None:
        # nothing comes before the first layer to say that it is done
        if unit in self.needs[0] and not self.chained:
            for other in self.needs[0]:
                if other is unit or not other.trainable:
                    self.free(other)
        super().complete(unit)

    def gather(self, now: list[Unit], soon: list[Unit]) -> None:
        """Have the parameters of `now`; then start to gather those of `soon`."""
        for unit in now:
            self.start(unit)
            if unit.arriving:
                unit.whole.untyped_storage().resize_(unit.whole.nbytes)
                self.unpack(unit)
        for unit in soon:
            self.start(unit)

    def gather_parameters(self) -> None:
        """Forward gathers; what a forward without a backward has left is old."""
        for unit in self.units:
            if unit.arriving:
                unit.arriving[1].wait()
                unit.arriving = None
            self.free(unit)

    def start(self, unit: Unit) -> None:
        if not unit.arriving and not unit.whole.untyped_storage().size():
            flat = torch.empty(unit.n, unit.T, dtype=unit.shards.dtype, device=self.device)
            unit.arriving = (
                flat,
                all_gather(flat.view(-1), unit.shards, group=unit.group, async_op=True),
            )

    def free(self, unit: Unit) -> None:
        unit.whole.untyped_storage().resize_(0)


@torch.no_grad()
def cut_unit(unit: Unit, stage: int) -> None:
    """Give each parameter its `shard`: a view of this rank's part or, in stage 3, all that is left
    of the parameter."""
    if stage == 3:
        flat = unit.parameters[0].new_zeros(unit.n, unit.T)
        for p in unit.parameters:
            for in_flat, in_whole in unit.pairs(flat, p, p):
                in_flat.copy_(in_whole)
        unit.shards = flat[unit.rank].clone()
        sizes = [p.numel() for p in unit.parameters]
        unit.whole = unit.shards.new_empty(sum(sizes))
        for p, place in zip(unit.parameters, unit.whole.split(sizes)):
            p.data = place.view(p.shape)
        unit.whole.untyped_storage().resize_(0)
    for p, (_, dim, shape) in unit.places.items():
        if stage == 3:
            part = unit.part(unit.shards, p)
        else:
            padded = p.new_zeros([n * unit.n if d == dim else n for d, n in enumerate(shape)])
            padded.narrow(dim, 0, p.shape[dim]).copy_(p)
            # itself, where dim is 0
            part = padded.narrow(dim, unit.rank * shape[dim], shape[dim]).contiguous()
            if dim == 0:
                # p moves to where it has room for the padding
                p.data = padded[: p.shape[0]]
        p.shard = nn.Parameter(part, requires_grad=p.requires_grad)
        set_sharding(
            p.shard,
            replace(
                sharding_of(p), placements=(*sharding_of(p).placements, Shard(dim, unit.group))
            ),
        )


def spread(p: nn.Parameter, group: dist.ProcessGroup) -> bool:
    """Whether ranks of the group hold different parts of p."""
    ranks = set(dist.get_process_group_ranks(group))
    return any(
        c.group.size() > 1 and ranks.issuperset(dist.get_process_group_ranks(c.group))
        for c in sharding_of(p).placements
    )


def apply(
    model: nn.Module,
    group: dist.ProcessGroup,
    stage: int = 0,
    scaler: LossScaler | None = None,
    reduce_dtype: torch.dtype | None = None,
    init=None,
    expert_group: dist.ProcessGroup | None = None,
) -> GradientAccumulator:
    """Make `model` one of `group.size()` replicas, sharded as `stage` says (0 to 3). All ranks must
    hold equal weights. Parameters that are spread over ranks of the group already, experts, have
    fewer replicas: `expert_group`, the ranks that hold the same ones. reduce_dtype: of gradients on
    their way; the default is that of their sum, at least float32. init(names): gives the parameters
    of these names their values, for a model on the meta device: a layer is drawn and cut before the
    next one is drawn. Raises ValueError for another stage."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage {stage}: must be 0 (nothing is sharded), 1 (optimizer state), 2 (and gradients)"
            " or 3 (and parameters)"
        )
    layers = {
        f"{name}.{key}" if key else name: layer
        for name, child in model.named_children()
        for key, layer in (child.items() if isinstance(child, nn.ModuleDict) else [("", child)])
    }
    seen = set()
    units = []
    # a tied weight belongs to the first layer that has it
    for prefix, layer in layers.items():
        names = [f"{prefix}.{name}" for name, p in layer.named_parameters() if p not in seen]
        seen.update(layer.parameters())
        if names and init:
            init(names)
            # they are other objects now
            seen.update(layer.parameters())
        parameters = [model.get_parameter(name) for name in names]
        if expert_group is None and any(spread(p, group) for p in parameters):
            raise ValueError(
                "parameters of this model are spread over ranks of the group: hand over"
                " expert_group, the ranks that hold the same ones"
            )
        # of what is frozen there are no gradients to sum: only stage 3 cuts it
        for learns, spread_out in product((True, False), repeat=2):
            some = [
                p
                for p in parameters
                if p.requires_grad == learns and spread(p, group) == spread_out
            ]
            replicas = expert_group if spread_out else group
            if some and (learns or stage == 3):
                units.append(Unit(some, replicas, stage))
                if stage:
                    cut_unit(units[-1], stage)
    # a pipeline's chunk may be empty
    if not units:
        return GradientAccumulator(model, scaler)
    sum_uses_apart(model)
    return (
        FullySharded(list(layers.values()), units, scaler, reduce_dtype)
        if stage == 3
        else DataParallel(units, stage, scaler, reduce_dtype)
    )


def bytes_per_parameter(
    stage: int, n: int, weight: int = 2, gradient: int = 4, state: int = 12
) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer state) of a rank, in bytes for each parameter of the model
    (section 5.1-5.3, with Ψ = 1, N_d = n). The defaults are mixed precision as here; the paper's
    gradients are 2 bytes."""
    return (
        weight / (n if stage > 2 else 1),
        gradient / (n if stage > 1 else 1),
        state / (n if stage > 0 else 1),
    )


def elements_sent(stage: int, m: int) -> int:
    """By a rank in a step of m micro-batches, in units of Ψ (N - 1) / N, with ring collectives, of
    which an all-reduce is 2 (section 7 for m = 1; here with m)."""
    return (2, 2, m + 1, 3 * m)[stage]


def held_bytes(model: nn.Module, gradients: DataParallel) -> tuple[int, int]:
    """(parameters, gradients) of this rank now, in bytes: each storage once."""

    def storages(tensors):
        found = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors
            if t is not None and t.untyped_storage().nbytes()
        }
        return sum(found.values())

    parameters = list(model.parameters())
    return (
        storages([*parameters, *map(local_part, parameters)]),
        storages(x for unit in gradients.units for x in (unit.gradients, unit.sum)),
    )


# --------------------------------------------------------------------------------------------------


class _Flight:
    """A collective that notes how long it was on its way, and how much of that its rank waited for
    it."""

    flown = waited = 0.0

    def __init__(self, work):
        self.work = work
        self.start = time.perf_counter()
        work.get_future().add_done_callback(self.landed)

    def landed(self, _) -> None:
        _Flight.flown += time.perf_counter() - self.start

    def wait(self) -> None:
        start = time.perf_counter()
        self.work.wait()
        _Flight.waited += time.perf_counter() - start


def _lesson(rank: int, world: int, stage: int, m: int):
    """Two steps by hand: what train.py does, without the rest."""
    global all_gather
    import gpt
    from lessons import ranks
    from optimizer import AdamW

    with torch.device("meta"):
        model = gpt.GPT(
            GPTConfig(
                num_layers=4,
                hidden_size=256,
                num_heads=8,
                ffn_hidden_size=688,
                seq_length=128,
                vocab_size=2048,
                llama=True,
            )
        )

    def init(names=None):
        sharding.init(model, 0, "cpu", torch.float32, names)

    if world == 1:
        init()
    gradients = (
        GradientAccumulator(model)
        if world == 1
        else apply(model, dist.group.WORLD, stage, init=init)
    )
    optimizer = AdamW(sharding.named_parameters(model))
    tokens = (
        torch.randint(2048, (8, 129), generator=torch.Generator().manual_seed(0))
        .chunk(world)[rank]
        .chunk(m)
    )
    original = all_gather
    all_gather = lambda out, x, **options: _Flight(original(out, x, **options))
    for step in (1, 2):
        _Flight.flown = _Flight.waited = 0.0
        with ranks.Collectives() as sent:
            gradients.zero()
            for k in range(m):
                if k == m - 1:
                    gradients.last_backward()
                model(tokens[k][:, :-1], tokens[k][:, 1:]).sum().backward(
                    torch.tensor(1 / (8 * 128))
                )
            gradients.reduce_gradients()
            if step == 1:
                held = held_bytes(model, gradients) if world > 1 else None
                first = {
                    n: sharding.gather(p.main_grad.clone(), sharding_of(p))
                    for n, p in sharding.named_parameters(model)
                }
            optimizer.step(0.0)
            gradients.gather_parameters()
    all_gather = original
    state = sum(
        x.nbytes for kind in (optimizer.exp_avg, optimizer.exp_avg_sq) for x in kind.values()
    )
    # the norm is a number
    calls = [(kind, size) for kind, size in sent.calls if size > 64]
    return first, held, state, calls, (_Flight.flown, _Flight.waited)


def main():
    from lessons import ranks

    n = 2
    m = 2
    one, *_ = ranks.run(_lesson, 1, 1, 0, 1)[0]
    psi = sum(g.numel() for g in one.values())
    print(
        f"a Llama (h 256, L 4, V 2048) of Ψ = {psi:,} parameters in fp32 on {n} ranks, {m}"
        " micro-batches: bytes of a rank, measured / by formula"
    )
    print(
        f"{'stage':>5}{'gradients differ by':>21}{'parameters':>26}{'gradients':>26}{'moments':>26}"
        f"   {'sent, times Ψ (N-1)/N':<23}gathers in flight, waited for"
    )
    for stage in range(4):
        gradients, held, state, calls, (flown, waited) = ranks.run(_lesson, n, n, stage, m)[0]
        worst = max(
            ((one[name] - g).abs().max() / one[name].abs().max()).item()
            for name, g in gradients.items()
        )
        columns = [
            f"{got:,} / {psi * by:,.0f}"
            for got, by in zip((*held, state), bytes_per_parameter(stage, n, 4, 4, 8))
        ]
        sent = sum(size / 4 * (2 if kind == "all-reduce" else 1) for kind, size in calls) / psi
        print(
            f"{stage:>5}{worst:>21.1e}"
            + "".join(f"{c:>26}" for c in columns)
            + f"   {f'{sent:.3f} / {elements_sent(stage, m)}':<23}"
            + (f"{flown * 1e3:.1f} ms, {waited * 1e3:.1f} ms" if flown else "")
        )


if __name__ == "__main__":
    main()
