"""Weights moved from one layout to another: values, bytes, memory, errors."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from parity import DATA, LLAMA, SMALL, again, trainer_of

import sharding
from base.groups import Groups
from course import form, ranks
from course import resharding as lesson
from course.training_commands import config_of
from finetune import adapter_layers, resharding
from finetune.adapter_learning import adapter_config
from finetune.resharding import Piece, Resharding, Slice
from inference.loading import build_stages, materialise
from sharding import Shard, Sharding, local_slice, set_sharding, shard_of, sharding_of, unpad

# flags of a source, by world
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
    4: [dict(ep=2, tp=2), dict(ep=2, pp=2), dict(ep=2, zero_stage=3)],
}
# (tp, pp, ep) of a target
TARGETS = {
    2: [(1, 1, 1), (2, 1, 1), (1, 2, 1)],
    4: [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1)],
}
EXPERT_TARGETS = {2: [(1, 1, 1), (1, 1, 2)], 4: [(1, 1, 1), (2, 1, 2), (1, 2, 1)]}
MODELS = {
    "gpt": SMALL | dict(num_layers=4),
    "llama": LLAMA | dict(num_layers=4, num_kv_heads=4),
    "experts": SMALL | dict(num_experts=4, router="topk"),
    # 3 ranks divide no size but the number of layers
    "three": SMALL | dict(num_layers=3, global_batch_size=6),
    "lora": SMALL | dict(num_layers=4, peft="lora", lora_rank=3),
}
# several rounds; some weights are larger
BUFFER = 20_000
UNTOUCHED = -7.0


# --- on a rank ------------------------------------------------------------------------------------


def make_trainer(model: str, world: int, **flags):
    layout = {name: flags[name] for name in ("tp", "pp", "ep") if name in flags}
    return trainer_of(MODELS[model], Groups.make("cpu", world, **layout), **flags)


@cache
def whole_weights(model: str) -> dict[str, torch.Tensor]:
    """The weights of one device, which draws the same from their names."""
    named = sharding.named_parameters(*trainer_of(MODELS[model]).stages)
    return {name: p.detach() for name, p in named}


def make_target(model: str, layout: tuple, world: int, dtype=torch.float64) -> list[tuple]:
    """(global name, tensor) in another layout of the same ranks."""
    tp, pp, ep = layout
    groups = Groups.make("cpu", world, tp, pp, ep=ep)
    config = config_of(MODELS[model])
    stages = build_stages(config.model_config(), groups)
    if config.frozen:
        for stage in stages:
            adapter_layers.apply(stage, adapter_config(config), groups.tp)
    materialise(stages, groups, "cpu", dtype)
    return list(sharding.named_parameters(*stages))


class Sent:
    """Bytes that all-to-alls of this process send and receive, and those of their buffers."""

    def __init__(self):
        self.sent = self.received = 0
        # address -> bytes; buffers that live at one time have different addresses
        self.buffers = {}

    def __enter__(self):
        original = self.original = dist.all_to_all_single

        def counting(incoming, outgoing, *args, **options):
            self.sent += outgoing.nbytes
            self.received += incoming.nbytes
            for storage in (incoming.untyped_storage(), outgoing.untyped_storage()):
                self.buffers[storage.data_ptr()] = storage.nbytes()
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


def every_pair(rank, world, model, sources, targets):
    """Failures of each source with each target: after the first copy, and after a second one of
    other values."""
    failures = []
    moved = 0
    every_target = {layout: make_target(model, layout, world) for layout in targets}
    for flags in sources:
        source = make_trainer(model, world, **flags)
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
    if sum(first.buffers.values()) > 2 * BUFFER:
        yield f"buffers of {list(first.buffers.values())} bytes"


# --- values and bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, world, sources, targets",
    [
        # a tied matrix, or none; a vocabulary with padding
        ("gpt", 2, SOURCES[2], TARGETS[2]),
        ("gpt", 4, SOURCES[4][1::2], TARGETS[4][1:]),
        ("llama", 2, SOURCES[2], TARGETS[2]),
        again("llama", 4, SOURCES[4], TARGETS[4]),
        ("experts", 2, EXPERTS[2], EXPERT_TARGETS[2]),
        ("experts", 4, EXPERTS[4][1:2], EXPERT_TARGETS[4]),
        again("gpt", 4, SOURCES[4], TARGETS[4]),
        again("experts", 4, EXPERTS[4], EXPERT_TARGETS[4]),
        # ZeRO stage 3 pads nearly every parameter
        ("three", 3, [dict(zero_stage=3), dict(pp=3)], [(1, 1, 1), (1, 3, 1)]),
        # new parameters have records as all others
        ("lora", 2, [dict(tp=2)], [(1, 1, 1), (1, 2, 1)]),
    ],
    ids=lambda x: str(x) if isinstance(x, str | int) else "",
)
def test_every_pair_of_layouts(model, world, sources, targets):
    """Every element is that of one device, and no byte is sent to a rank that has it."""
    results = ranks.run(every_pair, world, world, model, sources, targets)
    assert [failures for failures, _ in results] == [[]] * world
    assert all(moved for _, moved in results)


def after_a_step(rank, stages):
    """For each ZeRO stage: names of weights that differ from those of training, after its step."""
    target = make_target("gpt", (1, 1, 1), 2)
    wrong = []
    for zero_stage in stages:
        source = make_trainer("gpt", 2, zero_stage=zero_stage)
        copier = Resharding(resharding.weights(*source.stages), target)
        source.forward_backward(1, DATA)
        source.update(1)
        source.task.wait_for_parameters()
        copier.copy()
        for (name, shard), (_, p) in zip(sharding.named_parameters(*source.stages), target):
            trained = sharding.gather(shard.detach(), sharding_of(shard))
            if not torch.equal(trained, p) or torch.equal(p, whole_weights("gpt")[name]):
                wrong.append((zero_stage, name))
        wrong += [zero_stage] * ((copier.bytes_received > 0) != (zero_stage == 3))
    return wrong


def test_the_weights_of_a_step():
    """What the optimizer has changed arrives. Below ZeRO stage 3 a rank has all of it."""
    assert ranks.run(after_a_step, 2, [0, 1, 2, 3]) == [[], []]


# --- the plan -------------------------------------------------------------------------------------


def rows(first: int, n: int, dtype=torch.float32) -> Slice:
    """Rows of a [4, 2] weight."""
    return Slice("w", (4, 2), (first, 0), (n, 2), dtype)


def test_a_plan_by_hand():
    """Ranks 0 and 1 have the upper half, 2 and 3 the lower half; all want all. Each sends once, to
    the nearest that is left."""
    sources = [[rows(0, 2)], [rows(0, 2)], [rows(2, 2)], [rows(2, 2)]]
    pieces = resharding.plan(sources, [[rows(0, 4)]] * 4)
    found = {(piece.sender, piece.receiver): piece.offset[0] for piece in pieces}
    own = {(0, 0): 0, (1, 1): 0, (2, 2): 2, (3, 3): 2}
    assert found == own | {(2, 0): 2, (3, 1): 2, (1, 2): 0, (0, 3): 0}


def test_pieces_are_cut_where_the_buffer_ends():
    """A [3, 5] piece in bands of at most two rows; a row that is too long is cut itself."""
    piece = Piece(0, 1, 0, 0, (1, 10), (3, 5), torch.float32)
    places = [(band.offset, band.size) for band in resharding.cut(piece, 11)]
    assert places == [((1, 10), (2, 5)), ((3, 10), (1, 5))]
    places = [(band.offset, band.size) for band in resharding.cut(piece, 3)]
    assert places[:3] == [((1, 10), (1, 3)), ((1, 13), (1, 2)), ((2, 10), (1, 3))]
    assert len(places) == 6


def test_a_round_has_room_on_both_sides():
    pieces = [
        Piece(sender, receiver, 0, 0, (0,), (n,), torch.float32)
        for sender, receiver, n in ((0, 1, 3), (0, 2, 2), (2, 1, 2), (2, 3, 1), (1, 0, 4))
    ]
    rounds = resharding.make_rounds(pieces, 16)
    assert [[p[:2] for p in r.pieces] for r in rounds] == [
        [(0, 1), (2, 3), (1, 0)],
        [(0, 2), (2, 1)],
    ]


@pytest.mark.parametrize(
    "sources, target, words",
    [
        ([[], []], rows(0, 4), "no rank holds w in the source"),
        ([[rows(0, 2)], []], rows(1, 2), "no rank holds w, or a part of it.* 4 elements 2 were"),
        ([[rows(0, 4)], []], rows(0, 4)._replace(shape=(5, 2)), r"w is \[4, 2\] .* and \[5, 2\]"),
    ],
)
def test_what_no_rank_holds(sources, target, words):
    with pytest.raises(ValueError, match=words):
        resharding.plan(sources, [[], [target]])


def lacking(rank):
    """Rank 1 asks for what neither has."""
    held = {"a": torch.ones(2)}
    needed = {"b": torch.zeros(2)} if rank else {"a": torch.zeros(2)}
    try:
        Resharding(held, needed)
    except ValueError as e:
        return str(e)


def test_all_ranks_learn_what_is_lacking():
    messages = ranks.run(lacking, 2)
    assert messages[0] == messages[1]
    assert "no rank holds b in the source" in messages[0]


# --- dtypes, one rank -----------------------------------------------------------------------------


def between_dtypes(rank):
    """(dtype here, dtype there, bytes received, whether the values are those of a cast)."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    record = Sharding((6, 3), (Shard(0, dist.group.WORLD),))
    results = []
    for here, there in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)):
        held = {"w": set_sharding(shard_of(whole.to(here), record), record), "whole": whole.clone()}
        needed = {"w": torch.zeros(6, 3, dtype=there), "whole": torch.zeros(6, 3, dtype=there)}
        copier = Resharding(held, needed, dist.group.WORLD)
        copier.copy()
        right = torch.equal(needed["w"], whole.to(here).to(there))
        right &= torch.equal(needed["whole"], whole.to(there))
        results.append((copier.bytes_received, right))
    return results


def test_the_narrower_dtype_travels():
    """Three rows of three, 2 bytes each, both ways."""
    assert ranks.run(between_dtypes, 2) == [[(18, True)] * 2] * 2


def separate_ranks(rank):
    """Ranks 0 and 1 train, with half of the rows each; rank 2 generates, rank 3 does neither."""
    trains = dist.new_group([0, 1])
    whole = torch.arange(10.0).view(5, 2)
    record = Sharding((5, 2), (Shard(0, trains),))
    held = {"w": set_sharding(shard_of(whole, record), record)} if rank < 2 else {}
    needed = {"w": torch.zeros(5, 2)} if rank == 2 else {}
    copier = Resharding(held, needed, buffer_bytes=16)
    copier.copy()
    right = all(torch.equal(w, whole) for w in needed.values())
    return copier.bytes_sent, copier.bytes_received, right


def test_ranks_that_only_train_or_only_generate():
    """3 rows of 8 bytes, and 2."""
    expected = [(24, 0, True), (16, 0, True), (0, 40, True), (0, 0, True)]
    assert ranks.run(separate_ranks, 4) == expected


def test_one_rank_copies():
    """Without process groups."""
    held = torch.arange(6.0).view(3, 2)
    needed = torch.zeros(3, 2)
    copier = Resharding({"w": held}, [("w", needed)])
    copier.copy()
    held += 1
    assert torch.equal(needed, held - 1)
    copier.copy()
    assert torch.equal(needed, held) and copier.bytes_sent == 0


# --- what the tests see ---------------------------------------------------------------------------


def no_order():
    """A receiver takes its pieces in the reverse order of ranks."""

    def spaces(buffer, pieces):
        if all(piece.receiver == dist.get_rank() for piece in pieces):
            pieces.reverse()
        return original(buffer, pieces)

    original = resharding.spaces
    resharding.spaces = spaces


def no_rounds():
    """All is sent at once."""
    original = resharding.make_rounds
    resharding.make_rounds = lambda pieces, room: original(pieces, 2**40)


@pytest.mark.parametrize(
    "mutate, seen",
    [
        (lesson.WITHOUT["offset"].mutate, "value of"),
        (lesson.WITHOUT["new-values"].mutate, "second value of"),
        (no_order, "value of"),
        (lesson.WITHOUT["own"].mutate, "missing"),
        (no_rounds, "buffers of"),
    ],
)
def test_the_comparison_sees(mutate, seen):
    sources, targets = [dict(tp=2), dict(zero_stage=2)], [(2, 1, 1), (1, 2, 1)]
    pairs = 2, "gpt", sources, targets
    results = ranks.run(form.on_rank, 2, mutate, every_pair, pairs)
    failures = [what for failures, _ in results for _, _, what in failures]
    assert any(seen in what for what in failures), failures
    if seen == "second value of":
        assert all(what.startswith(seen) for what in failures), failures
