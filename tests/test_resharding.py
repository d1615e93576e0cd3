"""Weights moved from one layout to another: values, bytes, memory, errors."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from parity import LLAMA, SMALL

import adapters
import resharding
import sharding
import train as trainer
from inference.loading import build_stages, materialise
from lessons import ranks
from resharding import Resharding
from runtime.world import Groups
from sharding import local_slice, set_sharding, shard_of, sharding_of, unpad
from tuning.adapter_learning import adapter_config

# flags of a source, by world; the model has 4 layers, 61 words
SOURCES = {
    2: [dict(tp=2), dict(pp=2), dict(zero_stage=3), dict(zero_stage=2)],
    4: [
        dict(tp=2, pp=2, schedule="1f1b"),
        dict(pp=2, virtual_stages=2, zero_stage=1),
        dict(zero_stage=3),
        dict(tp=2, sequence_parallel=True, zero_stage=3),
    ],
}
EXPERTS = {
    2: [dict(ep=2), dict(tp=2)],
    4: [dict(ep=2, tp=2), dict(ep=2, pp=2), dict(ep=2, zero_stage=3), dict(ep=4)],
}
# (tp, pp, ep) of a target
TARGETS = {
    2: [(1, 1, 1), (2, 1, 1), (1, 2, 1)],
    4: [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1)],
}
EXPERT_TARGETS = {2: [(1, 1, 1), (1, 1, 2)], 4: [(1, 1, 1), (2, 1, 2), (1, 2, 1), (1, 1, 4)]}
MODELS = {
    "gpt": SMALL | dict(num_layers=4),
    "llama": LLAMA | dict(num_layers=4, num_kv_heads=4),
    "experts": SMALL | dict(num_layers=4, num_experts=4, router="topk"),
    # 3 ranks divide no size but the number of layers
    "three": SMALL | dict(num_layers=3, global_batch_size=6),
    "lora": SMALL | dict(num_layers=4, peft="lora", lora_rank=3),
}
# several rounds; some weights are larger
BUFFER = 20_000
UNTOUCHED = -7.0


# --- on a rank ------------------------------------------------------------------------------------


def make_trainer(base: dict, world: int = 1, **flags):
    config = trainer.Config(**(base | flags))
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, config.tp, config.pp, ep=config.ep)
    return trainer.trainer_class(config)(config, torch.device("cpu"), groups)


@cache
def whole_weights(model: str) -> dict[str, torch.Tensor]:
    """Of one device, which draws the same weights from their names."""
    named = sharding.named_parameters(*make_trainer(MODELS[model]).stages)
    return {name: p.detach() for name, p in named}


def make_target(model: str, layout: tuple, world: int, dtype=torch.float64) -> list[tuple]:
    """(global name, tensor) in another layout of the same ranks."""
    tp, pp, ep = layout
    groups = Groups.make("cpu", world, tp, pp, ep=ep)
    config = trainer.Config(**MODELS[model])
    stages = build_stages(config.model_config(), groups)
    if config.peft:
        for stage in stages:
            adapters.apply(stage, adapter_config(config), groups.tp)
    materialise(stages, groups, "cpu", dtype)
    return list(sharding.named_parameters(*stages))


class Sent:
    """Bytes that all-to-alls of this process send and receive, and their largest buffers."""

    def __init__(self):
        self.sent = self.received = self.largest = 0

    def __enter__(self):
        original = self.original = dist.all_to_all_single

        def counting(incoming, outgoing, *args, **options):
            self.sent += outgoing.nbytes
            self.received += incoming.nbytes
            self.largest = max(self.largest, outgoing.nbytes, incoming.nbytes)
            return original(incoming, outgoing, *args, **options)

        dist.all_to_all_single = counting
        return self

    def __exit__(self, *error):
        dist.all_to_all_single = self.original


def bytes_missing(source, target) -> int:
    """|T| - |T ∩ S| in bytes, by masks of the global tensors: what this rank must receive."""
    masks = {}
    for named, kind in ((source, 0), (target, 1)):
        for name, p in named:
            record = sharding_of(p)
            pair = masks.setdefault(name, torch.zeros(2, *record.shape, dtype=torch.bool))
            offset, size, _ = local_slice(record)
            pair[kind][tuple(slice(o, o + n) for o, n in zip(offset, size))] = True
    return sum((needed & ~held).sum().item() for held, needed in masks.values()) * 8


def wrong_names(target, model: str, factor: float) -> list[str]:
    """Names of target tensors that are not what is cut from the whole one, or whose padding is not
    what it was."""
    wrong = []
    for name, p in target:
        record = sharding_of(p)
        expected = torch.full_like(p, UNTOUCHED)
        part = unpad(shard_of(whole_weights(model)[name] * factor, record), record)
        unpad(expected, record).copy_(part)
        if not torch.equal(p, expected):
            wrong.append(name)
    return wrong


def every_pair(rank, world, model, sources, targets, mutate=None):
    """Of each source with each target: what is wrong after the first copy, and after a second one
    of other values."""
    if mutate:
        mutate()
    failures = []
    moved = 0
    every_target = {layout: make_target(model, layout, world) for layout in targets}
    for flags in sources:
        source = make_trainer(MODELS[model], world, **flags)
        held = list(resharding.weights(*source.stages))
        for layout, needed in every_target.items():
            for _, p in needed:
                p.fill_(UNTOUCHED)
            copier = Resharding(held, needed, buffer_bytes=BUFFER)
            failures += [(flags, layout, what) for what in copied(copier, held, needed, model)]
            moved += copier.bytes_sent
    return failures, moved


def copied(copier, held, needed, model):
    """What is wrong, in words."""
    with Sent() as first:
        copier.copy()
    yield from (f"value of {name}" for name in wrong_names(needed, model, 1))
    with torch.no_grad():
        for _, p in held:
            p.mul_(2)
    copier.copy()
    yield from (f"second value of {name}" for name in wrong_names(needed, model, 2))
    with torch.no_grad():
        for _, p in held:
            p.div_(2)
    missing = bytes_missing(held, needed)
    if not first.received == copier.bytes_received == missing:
        yield f"{first.received} bytes received, {copier.bytes_received} planned, {missing} missing"
    if first.sent != copier.bytes_sent:
        yield f"{first.sent} bytes sent, {copier.bytes_sent} planned"
    total = torch.tensor([first.sent, -first.received])
    dist.all_reduce(total)
    if total.sum():
        yield f"{total.tolist()}: bytes sent and received"
    if first.largest > BUFFER:
        yield f"a buffer of {first.largest} bytes"


# --- values and bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_every_pair_of_layouts(model, world):
    """A tied matrix, or none; a vocabulary with padding. Every element is that of one device, and
    no byte is sent to a rank that has it."""
    results = ranks.run(every_pair, world, world, model, SOURCES[world], TARGETS[world])
    assert [failures for failures, _ in results] == [[]] * world
    assert all(moved for _, moved in results)


@pytest.mark.parametrize("world", [2, 4])
def test_experts(world):
    results = ranks.run(every_pair, world, world, "experts", EXPERTS[world], EXPERT_TARGETS[world])
    assert [failures for failures, _ in results] == [[]] * world


def test_three_ranks_divide_nothing():
    """ZeRO stage 3 pads nearly every parameter."""
    sources = [dict(zero_stage=3), dict(pp=3)]
    results = ranks.run(every_pair, 3, 3, "three", sources, [(1, 1, 1), (1, 3, 1)])
    assert [failures for failures, _ in results] == [[]] * 3


def test_adapters_move_too():
    """New parameters have records as all others."""
    results = ranks.run(every_pair, 2, 2, "lora", [dict(tp=2)], [(1, 1, 1), (1, 2, 1)])
    assert [failures for failures, _ in results] == [[]] * 2


# --- what the tests see ---------------------------------------------------------------------------


def no_offset():
    """Of each slice of the source the first elements are read."""

    def view(tensor, piece):
        if tensor.requires_grad:
            first = local_slice(sharding_of(tensor))[0]
            piece = piece._replace(offset=tuple(first))
        return original(tensor, piece)

    original = resharding.view
    resharding.view = view


def old_values():
    """The second copy sends what the first one sent."""

    def copy(self):
        original(self)
        self.source = [set_sharding(p.detach().clone(), sharding_of(p)) for p in self.source]

    original = Resharding.copy
    Resharding.copy = copy


def no_order():
    """A receiver takes its pieces in the reverse order of ranks."""

    def spaces(buffer, pieces):
        if all(piece.receiver == dist.get_rank() for piece in pieces):
            pieces.reverse()
        return original(buffer, pieces)

    original = resharding.spaces
    resharding.spaces = spaces


def first_holder():
    """The first rank that holds a slice sends it, also where the receiver has it."""

    def first(*values, key=None):
        return values[0][0] if len(values) == 1 else min(*values, key=key)

    resharding.min = first


def no_rounds():
    """All is sent at once."""
    original = resharding.make_rounds
    resharding.make_rounds = lambda pieces, room: original(pieces, 2**40)


@pytest.mark.parametrize(
    "mutate, seen",
    [
        (no_offset, "value of"),
        (old_values, "second value of"),
        (no_order, "value of"),
        (first_holder, "missing"),
        (no_rounds, "a buffer of"),
    ],
)
def test_the_comparison_sees(mutate, seen):
    sources, targets = [dict(pp=2), dict(zero_stage=2)], [(2, 1, 1), (1, 2, 1)]
    results = ranks.run(every_pair, 2, 2, "gpt", sources, targets, mutate)
    failures = [what for failures, _ in results for _, _, what in failures]
    assert any(seen in what for what in failures), failures
    if mutate is old_values:
        assert all(what.startswith(seen) for what in failures), failures
