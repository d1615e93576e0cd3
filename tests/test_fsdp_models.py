"""fsdp.apply on any module: gradients and parameters of three steps are those of one process that
runs the samples of all ranks.

    python tests/test_fsdp_models.py "U-Net"        one model of the table, stages 0 to 3
    python tests/test_fsdp_models.py 17             one model that is drawn at random"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from fsdp_models import CASES, Block, Case, Sample, Stack, Talkers, named, random_case
from torch import Tensor, nn

import fsdp
import sharding
from course import ranks
from optimizer import AdamW, GradientAccumulator

# --- one training ---------------------------------------------------------------------------------

# Micro-batches of each step.
MICRO_BATCHES = (1, 2, 1)


@dataclass
class Step:
    norm: float = 0.0
    losses: dict[Sample, float] = field(default_factory=dict)
    # by names: of whole tensors, or of this rank's shards
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train(case: Case, model: nn.Module, gradients, members: list[int]) -> Iterator[Step]:
    """Three steps of the samples of `members`."""
    learns = {name: p for name, p in sharding.named_parameters(model) if p.requires_grad}
    optimizer = AdamW(learns.items(), clip=0.1)
    for number, m in enumerate(MICRO_BATCHES):
        step = Step()
        samples = [Sample(number, rank, micro) for rank in members for micro in range(m)]
        gradients.zero_grad()
        for sample in samples:
            if sample is samples[-1]:
                gradients.next_backward_is_last()
            loss = case.loss(model, sample)
            loss.backward()
            step.losses[sample] = loss.item()
        gradients.reduce_gradients()
        for name, p in learns.items():
            if p.main_grad is None and isinstance(gradients, GradientAccumulator):
                p.main_grad = torch.zeros_like(p)
            step.gradients[name] = p.main_grad.clone()
        step.norm = optimizer.step(1e-2).item()
        gradients.renew_parameters()
        step.parameters = {name: p.detach().clone() for name, p in learns.items()}
        yield step


def on_one_process(case: Case, world: int) -> list[Step]:
    model = case.model()
    return list(train(case, model, GradientAccumulator(model), list(range(world))))


def differences(case: Case, expected: list[Step], group, stage: int, may_skip: bool) -> list[str]:
    """What differs on this rank, of whose samples `expected` has the losses."""
    model = case.model()
    gradients = fsdp.apply(model, group, stage, units=case.units, may_skip=may_skip)
    records = {name: sharding.sharding_of(p) for name, p in sharding.named_parameters(model)}
    wrong = []

    def compare(what: str, found: Tensor, whole: Tensor, part: Tensor, scale: float) -> None:
        scale = max(whole.abs().max().item(), scale)
        if not (found - part).abs().max() <= case.tolerance * scale:
            wrong.append(f"{what}: {found.flatten()[:4]}, not {part.flatten()[:4]}")

    for i, (step, other) in enumerate(
        zip(train(case, model, gradients, [group.rank()]), expected, strict=True)
    ):
        largest = max(g.abs().max().item() for g in other.gradients.values())
        for sample, loss in step.losses.items():
            if abs(loss - other.losses[sample]) > case.tolerance:
                wrong.append(f"loss of {sample}: {loss}, not {other.losses[sample]}")
        if abs(step.norm - other.norm) > case.tolerance * other.norm:
            wrong.append(f"step {i}: norm {step.norm}, not {other.norm}")
        for kind in ("gradients", "parameters"):
            for name, found in getattr(step, kind).items():
                whole = getattr(other, kind)[name]
                # A key's bias has gradient 0, and Adam divides it by its own size.
                scale = 1e-3 * largest if kind == "gradients" else 0.1
                part = sharding.shard_of(whole, records[name])
                compare(f"step {i}, {kind}: {name}", found, whole, part, scale)
    if 0 < stage < 3:
        gradients.wait_for_parameters()
        for name, p in model.named_parameters():
            if p.requires_grad:
                whole = expected[-1].parameters[name]
                compare(f"whole {name}", p.detach(), whole, whole, 0.1)
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
    worlds_and_stages = [(world, stage) for world in (2, 3) for stage in range(4)]
    return [
        Layout(name, world, stage, may_skip)
        for world, stage in worlds_and_stages
        for may_skip in {True, skips}
    ]


def on_rank(rank: int, names: list[str | int]) -> list[str]:
    """What differs on this rank of three, in all layouts of these models."""
    groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    layouts = [layout for name in names for layout in layouts_of(name)]
    jobs = list(dict.fromkeys((layout.name, layout.world) for layout in layouts))
    # Each rank computes a third of what one process would.
    references = [None] * 3
    own = {(name, world): on_one_process(case_of(name), world) for name, world in jobs[rank::3]}
    dist.all_gather_object(references, own)
    expected = {job: steps for part in references for job, steps in part.items()}
    wrong = []
    for layout in layouts:
        if rank >= layout.world:
            continue
        case = case_of(layout.name)
        steps = expected[layout.name, layout.world]
        try:
            found = differences(case, steps, groups[layout.world], layout.stage, layout.may_skip)
        except Exception as error:
            error.add_note(f"{layout}, units {case.units}\n{case.model()}")
            raise
        wrong += [f"{layout}, rank {rank}: {line}" for line in found[:5]]
        if found:
            wrong.append(f"units {case.units}\n{case.model()}")
    return wrong


def check(names: list[str | int]) -> None:
    wrong = sum(ranks.run(on_rank, 3, names, timeout=20), [])
    assert not wrong, "\n".join(wrong)


def test_models():
    check(list(CASES))


def test_random_models():
    check(list(range(40)))


@pytest.mark.repetition
@pytest.mark.parametrize("first", range(40, 300, 65))
def test_more_random_models(first):
    check(list(range(first, first + 65)))


# --- what is held, what is posted -----------------------------------------------------------------


def most_whole_units(rank: int, names: list[str]) -> dict[str, list[int]]:
    """{model: the most units that are whole or on their way at a time, in each step}, without the
    unit of the root"""
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
        seen = []

        def watched(unit, *args, units=units, seen=seen):
            start_all_gather(unit, *args)
            seen.append(sum(map(is_whole_or_coming, units)))

        fsdp.Unit.start_all_gather = watched
        most[name] = []
        for _ in train(case, model, gradients, [rank]):
            most[name].append(max(seen))
            seen.clear()
        assert not any(map(is_whole_or_coming, units))
    return most


def is_whole_or_coming(unit: fsdp.Unit) -> bool:
    return bool(unit.gathering or unit.whole.untyped_storage().size())


def test_two_units_are_whole():
    """From the second step on, however the parts are registered: of four to six units."""
    names = ["encoder-decoder", "encoder-decoder, registered backwards", "trained tower"]
    for most in ranks.run(most_whole_units, 2, [*names, "two towers"]):
        assert {name: max(later) for name, (_, *later) in most.items()} == dict.fromkeys(most, 2)


def under_rules(rank: int, names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        expected = on_one_process(CASES[name], 2)
        for stage in (1, 2, 3):
            found = differences(CASES[name], expected, dist.group.WORLD, stage, may_skip=True)
            wrong += [f"{name}, stage {stage}: {line}" for line in found]
    sys.modules["nccl_rules"].check_waits()
    return wrong


def test_rules_of_nccl():
    """Ranks that run other units, or in another order, still post the same collectives."""
    names = [name for name, case in CASES.items() if case.skips]
    assert ranks.run(under_rules, 2, names, backend="nccl-rules", timeout=20) == [[], []]


# --- what is refused ------------------------------------------------------------------------------


class Opaque(Block):
    """Its result is an object in which nobody finds a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return iter([super().forward(x)])


class Reader(Stack):
    """Reads a parameter of a block, while the block does not run."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[1].norm.weight


def refusal(rank: int, build, units, stage: int) -> str:
    model = build().double()
    try:
        fsdp.apply(model, dist.group.WORLD, stage, units=units)
        model(Sample(0, rank, 0).x())
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "nothing is refused"


def opaque() -> nn.Module:
    return nn.Sequential(Block(), Opaque(), Block())


REFUSED = {
    "no module": (Stack, nn.Conv2d, 0, "Conv2d"),
    "no name": (Stack, named("Conv2d"), 2, "units"),
    "a list": (Stack, nn.ModuleList, 3, "blocks"),
    "a dictionary": (Talkers, lambda name, module: name == "layers", 1, "layers"),
    "an opaque result": (opaque, Block, 3, "1"),
    "a parameter read outside": (Reader, Block, 3, r"blocks\.1"),
}


def refusals(rank: int) -> dict[str, str]:
    return {what: refusal(rank, *arguments[:3]) for what, arguments in REFUSED.items()}


def test_refusals():
    for messages in ranks.run(refusals, 2):
        for what, message in messages.items():
            assert re.search(REFUSED[what][3], message), f"{what}: {message}"


if __name__ == "__main__":
    check([int(name) if name.isdigit() else name for name in sys.argv[1:]])
