"""fsdp.apply on any module: gradients and parameters of three steps are those of one process that
runs the samples of all ranks.

    python tests/test_fsdp_models.py U-Net          a model of the table, on 2 and 3 ranks
    python tests/test_fsdp_models.py 17             the model that is drawn with this seed"""

import copy
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from fsdp_models import (
    CASES,
    OF_TRANSFORMERS,
    Block,
    Case,
    H,
    Sample,
    Stack,
    Talkers,
    named,
    random_case,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
import sharding
from course import ranks
from optimizer import AdamW, GradientAccumulator

# --- one training ---------------------------------------------------------------------------------

# Micro-batches of each step.
MICRO_BATCHES = (1, 2, 1)
# {(kind, name): a tensor, or this rank's shard}
Found = dict[tuple[str, str], Tensor]


def train(case: Case, model: nn.Module, gradients, members: list[int]) -> Iterator[Found]:
    """What each step finds, with the samples of `members`; and the parameters that are left."""
    learns = {name: p for name, p in sharding.named_parameters(model) if p.requires_grad}
    optimizer = AdamW(learns.items(), clip=0.1)
    for step, m in enumerate(MICRO_BATCHES):
        found: Found = {}
        samples = [Sample(step, rank, micro) for rank in members for micro in range(m)]
        gradients.zero_grad()
        for sample in samples:
            if sample is samples[-1]:
                gradients.next_backward_is_last()
            loss = case.loss(model, sample)
            loss.backward()
            found["loss", str(sample)] = loss.detach()
        gradients.reduce_gradients()
        for name, p in learns.items():
            if p.main_grad is None and isinstance(gradients, GradientAccumulator):
                p.main_grad = torch.zeros_like(p)
            found["gradient", name] = p.main_grad.clone()
        found["norm", ""] = optimizer.step(1e-2)
        gradients.renew_parameters()
        found |= {("parameter", name): p.detach().clone() for name, p in learns.items()}
        yield found
    gradients.wait_for_parameters()
    yield {("whole", name): p.detach() for name, p in model.named_parameters() if p.requires_grad}


def on_one_process(case: Case, model: nn.Module, world: int) -> list[dict]:
    """What each step finds, in arrays of numpy, which are pickled faster than tensors."""
    model = copy.deepcopy(model)
    steps = train(case, model, GradientAccumulator(model), list(range(world)))
    return [{key: x.numpy() for key, x in found.items()} for found in steps]


def differences(
    case: Case, model: nn.Module, expected: list[dict], stage: int, may_skip: bool
) -> list[str]:
    """What differs on this rank from `expected`."""
    model = copy.deepcopy(model)
    group = dist.group.WORLD
    gradients = fsdp.apply(model, group, stage, units=case.units, may_skip=may_skip)
    records = {name: sharding.sharding_of(p) for name, p in sharding.named_parameters(model)}
    tolerance = 1e-5 if case.narrow else 1e-10
    # Adam divides by its own size what rounding has left of a gradient that is 0.
    floors = dict(parameter=0.1, whole=0.1)
    wrong = []
    steps = zip(train(case, model, gradients, [group.rank()]), expected, strict=True)
    for i, (found, of_step) in enumerate(steps):
        largest = max(abs(x).max() for x in of_step.values())
        floors["gradient"] = min(1.0, 1e-3 * largest)
        for (kind, name), x in found.items():
            if kind == "whole" and stage == 3:
                continue
            y = torch.from_numpy(of_step[kind, name])
            scale = max(y.abs().max().item(), floors.get(kind, 0.0))
            if kind in ("gradient", "parameter"):
                y = sharding.shard_of(y, records[name])
            if not (x - y).abs().max() <= tolerance * scale:
                wrong.append(f"step {i}, {kind} {name}: {x.flatten()[:4]}, not {y.flatten()[:4]}")
    return wrong


# --- many trainings in one launch of ranks --------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How one model is trained."""

    name: str | int
    world: int
    stage: int
    may_skip: bool


def case_of(name: str | int) -> Case:
    return random_case(name) if isinstance(name, int) else CASES[name]


def layouts_of(name: str | int) -> list[Layout]:
    """All for a model of the table, one for a random model."""
    skips = case_of(name).skips
    if isinstance(name, int):
        return [Layout(name, 2 + name % 2, name // 2 % 4, skips or name % 3 == 0)]
    layouts = [Layout(name, world, stage, True) for world in (2, 3) for stage in range(4)]
    return layouts + [Layout(name, 2, stage, False) for stage in (2, 3) if not skips]


def in_turn(world: int) -> list[Layout]:
    """Stage 3 of each model of the table; the other stages, and what may not skip, in turn. Models
    of transformers, which ranks import for seconds, are cut on three ranks as the others."""
    names = [name for name in CASES if world == 2 or name not in OF_TRANSFORMERS]
    layouts = []
    for n, name in enumerate(names):
        skips = CASES[name].skips or n % 2 == 0
        layouts += [Layout(name, world, (n + 1) % 3, True), Layout(name, world, 3, skips)]
    return layouts


def on_rank(rank: int, layouts: list[Layout]) -> list[str]:
    """What differs on this rank, in words."""
    world = dist.get_world_size()
    cases = {layout.name: case_of(layout.name) for layout in layouts}
    models = {name: case.model() for name, case in cases.items()}
    # Each rank computes a part of what one process would.
    own = list(cases)[rank::world]
    references = {name: on_one_process(cases[name], models[name], world) for name in own}
    of_ranks = [{}] * world
    dist.all_gather_object(of_ranks, references)
    expected = {name: steps for of_rank in of_ranks for name, steps in of_rank.items()}
    wrong = []
    for layout in layouts:
        case, model = cases[layout.name], models[layout.name]
        what = f"{layout}, rank {rank}, units {case.units}"
        try:
            found = differences(case, model, expected[layout.name], layout.stage, layout.may_skip)
        except Exception as error:
            error.add_note(f"{what}\n{model}")
            raise
        if found:
            wrong += [f"{what}\n{model}", *found[:5]]
    return wrong


def check(names: list[str | int], world: int) -> None:
    check_layouts(
        [layout for n in names for layout in layouts_of(n) if layout.world == world], world
    )


def check_layouts(layouts: list[Layout], world: int) -> None:
    wrong = ranks.run(on_rank, world, layouts, timeout=20) if layouts else []
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


@pytest.mark.parametrize("world", [2, 3])
def test_models(world):
    check_layouts(in_turn(world), world)


@pytest.mark.repetition
@pytest.mark.parametrize("world", [2, 3])
def test_every_stage(world):
    check(list(CASES), world)


@pytest.mark.parametrize("world", [2, 3])
def test_random_models(world):
    check(list(range(24)), world)


@pytest.mark.repetition
@pytest.mark.parametrize("world", [2, 3])
def test_more_random_models(world):
    check(list(range(24, 300)), world)


# --- what is held, what is posted -----------------------------------------------------------------


def most_whole_units(rank: int, names: list[str]) -> dict[str, list[int]]:
    """{model: the most units of blocks that are whole or on their way at a time, in each step}"""
    start_all_gather = fsdp.Unit.start_all_gather
    most = {}
    for name in names:
        case = CASES[name]
        model = case.model()
        of_blocks = {
            p for m in model.modules() if isinstance(m, case.units) for p in m.parameters()
        }
        gradients = fsdp.apply(model, dist.group.WORLD, 3, units=case.units)
        units = [unit for unit in gradients.units if not of_blocks.isdisjoint(unit.parameters)]
        seen = [0]

        def watched(unit, *arguments, units=units, seen=seen):
            start_all_gather(unit, *arguments)
            seen.append(sum(map(is_whole_or_coming, units)))

        fsdp.Unit.start_all_gather = watched
        most[name] = []
        for _ in train(case, model, gradients, [rank]):
            most[name].append(max(seen))
            seen[:] = [0]
        assert not any(map(is_whole_or_coming, units))
    return most


def is_whole_or_coming(unit: fsdp.Unit) -> bool:
    return bool(unit.gathering or unit.whole.untyped_storage().size())


def test_two_units_are_whole():
    """From the second step on, however the parts are registered: of five or six."""
    names = ["encoder-decoder", "encoder-decoder, registered backwards", "two towers"]
    for most in ranks.run(most_whole_units, 2, names):
        assert {name: max(later) for name, (_, *later) in most.items()} == dict.fromkeys(names, 2)


def under_rules(rank: int, jobs: list[tuple[str, int]], mutate=None) -> list[str]:
    """What differs on this rank in (model, stage); raises RuleError."""
    if mutate:
        mutate()
    wrong = []
    for name, stage in jobs:
        case, model = CASES[name], CASES[name].model()
        expected = on_one_process(case, model, 2)
        wrong += differences(case, model, expected, stage, may_skip=True)
    sys.modules["nccl_rules"].check_waits()
    return wrong


def test_rules_of_nccl():
    """Ranks that run other units, or in another order, still post the same collectives."""
    jobs = [(name, stage) for name, case in CASES.items() if case.skips for stage in (1, 2, 3)]
    assert ranks.run(under_rules, 2, jobs, backend="nccl-rules", timeout=20) == [[], []]


# --- mutations ------------------------------------------------------------------------------------


def no_sum_of_loose_parameters(original=fsdp.DataParallel.reduce):
    def reduce(self, unit):
        if unit.name != "the model":
            original(self, unit)

    fsdp.DataParallel.reduce = reduce


def no_zeros_of_a_skipped_unit(original=fsdp.DataParallel.reduce):
    def reduce(self, unit):
        if unit.arrived:
            original(self, unit)

    fsdp.DataParallel.reduce = reduce


def sums_before_all_parameters_have_come(original=fsdp.DataParallel.wait_for_parameters):
    def wait_for_parameters(self, units=None):
        original(self, units or [])

    fsdp.DataParallel.wait_for_parameters = wait_for_parameters


def no_wait_for_parameters():
    def before_forward(self, layer, *_):
        for unit in layer.units:
            unit.has_run = True

    fsdp.DataParallel.before_forward = before_forward


def no_gather_of_skipped_units(original=fsdp.FullySharded.end_pass):
    def end_pass(self):
        self.expected = []
        original(self)

    fsdp.FullySharded.end_pass = end_pass


def an_order_of_each_rank():
    fsdp.dist.all_gather_object = lambda orders, own, group: orders.__setitem__(slice(None), [own])


def one_communicator():
    fsdp.second_communicator = lambda group: group


TOWER, EARLY = "a tower that a rank does not use", "a rank stops early"
LOOSE = "blocks in a list, loose parameters"
# Who is late decides what the rules say: another order, a meeting, an end that does not come.
ORDER = "RuleError"


@pytest.mark.parametrize(
    "mutate, name, stage, seen",
    [
        (no_sum_of_loose_parameters, LOOSE, 1, "gradient table"),
        (no_zeros_of_a_skipped_unit, TOWER, 2, ORDER),
        (sums_before_all_parameters_have_come, EARLY, 1, ORDER),
        (no_wait_for_parameters, LOOSE, 1, "loss"),
        (no_gather_of_skipped_units, EARLY, 3, ORDER),
        (an_order_of_each_rank, "another order", 3, ORDER),
        (one_communicator, EARLY, 3, ORDER),
    ],
)
def test_mutations_are_seen(mutate, name, stage, seen):
    try:
        options = dict(backend="nccl-rules", timeout=3)
        found = str(ranks.run(under_rules, 2, [(name, stage)], mutate, **options))
    except RuntimeError as error:
        found = str(error)
    assert re.search(seen, found), found


# --- what is refused ------------------------------------------------------------------------------


class Opaque(Block):
    """Its result is an object in which nobody finds a tensor."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        return iter([super().forward(x)])


class View(Block):
    """Its result is a part of its parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.weight.expand(x.shape)


class Reader(Stack):
    """Reads a parameter of a block outside the block's forward."""

    order = (0, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.order) + self.blocks[1].norm.weight


class LateReader(Reader):
    order = (0, 1, 2)


class Growing(Stack):
    """Runs its first block once, then twice."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x, (0,) * self.runs)


def second_is(kind: type) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Block(), kind(), Block())


# What: a model, units, stage, what the message says.
REFUSED = {
    "no class": (Stack, nn.Conv2d, 0, "Conv2d"),
    "no name": (Stack, named("Conv2d"), 2, "units .* no module of the Stack"),
    "a list": (Stack, nn.ModuleList, 3, "blocks, a ModuleList"),
    "a dictionary": (Talkers, lambda name, module: name == "layers", 1, "layers, a ModuleDict"),
    "an opaque result": (second_is(Opaque), Block, 3, "1 returns a list_iterator"),
    "a view of a parameter": (second_is(View), Block, 3, "1 returns a view of its parameter"),
    "a parameter read outside": (Reader, Block, 3, r"blocks\.1: a parameter was read outside"),
    "more often": (Growing, Block, 3, r"blocks\.0: runs .* more often"),
    "shared and reentrant": (
        lambda: nn.Sequential(nn.Linear(H, H), Twice()),
        Block,
        2,
        r"1\.block: .* use_reentrant=False",
    ),
}


class Twice(nn.Module):
    """A shared layer that torch recomputes in the old way."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


def refusals(rank: int) -> dict[str, str]:
    messages = {}
    for what, (build, units, stage, _) in REFUSED.items():
        model = build().double()
        try:
            fsdp.apply(model, dist.group.WORLD, stage, units=units)
            for step in range(2):
                model(Sample(step, rank, 0).x()).sum().backward()
            messages[what] = "nothing is refused"
        except (ValueError, TypeError, RuntimeError) as error:
            messages[what] = str(error)
    # Nobody can say where this value comes from, but it is not wrong in silence.
    model = LateReader().double()
    fsdp.apply(model, dist.group.WORLD, 3, units=Block, may_skip=False)
    assert model(Sample(0, rank, 0).x()).isnan().all()
    return messages


def test_refusals():
    for messages in ranks.run(refusals, 2, timeout=20):
        for what, message in messages.items():
            assert re.search(REFUSED[what][3], message), f"{what}: {message}"


if __name__ == "__main__":
    for world in (2, 3):
        check([int(name) if name.isdigit() else name for name in sys.argv[1:]], world)
