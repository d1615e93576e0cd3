import copy
import gc
import math
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
import gpt
import optimizer as of_gradients
import sharding
from base.model_config import GPTConfig
from course import parity, ranks
from course.fsdp import held_bytes
from course.training_commands import config_of
from optimizer import AdamW
from sharding import local_part, sharding_of


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])


def units_while_backward_runs(rank, stage, fuse):
    model = small_model()
    reference = copy.deepcopy(model)
    gradients = fsdp.apply(model, dist.group.WORLD, stage, may_skip=False)
    if fuse:
        of_gradients.is_fusable = lambda p: True
        of_gradients.fuse_accumulation(model, gradients)
    log = []

    def noted(original):
        def call(*args, **options):
            sizes = [x.numel() for x in args if isinstance(x, torch.Tensor)]
            log.append(f"send {max(sizes)}")
            return original(*args, **options)

        return call

    fsdp.dist.all_reduce = noted(dist.all_reduce)
    fsdp.reduce_scatter = noted(fsdp.reduce_scatter)
    for i, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, i=i: log.append(f"backward {i}"))
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(rank))
    sent_early = []
    gradients.zero_grad()
    for i in range(3):
        if i == 2:
            gradients.next_backward_is_last()
            if stage < 2:
                log.clear()
        model(x[i]).square().sum().backward()
        sent_early.append(sum(e.startswith("send") for e in log))
    gradients.reduce_gradients()
    # what follows is the reference's
    done = list(log)
    for i in range(3):
        reference(x[i]).square().sum().backward()
    dist.barrier()
    for p, q in zip(model.parameters(), reference.parameters()):
        dist.all_reduce(q.grad)
        shard = local_part(p)
        whole = sharding.gather(shard.main_grad, sharding_of(shard))
        torch.testing.assert_close(whole, q.grad)
        assert p.grad is None
    return done, sent_early


@pytest.mark.parametrize("stage, fuse", [(0, False), (0, True), (1, False), (2, False), (3, False)])
def test_units_go_while_backward_runs(stage, fuse):
    """A layer's gradients leave before the next layer's backward ends: in stages 0 and 1 on the
    last micro-batch alone, in 2 and 3 on each. fuse: weights are summed inside their products."""
    for log, sent_early in ranks.run(units_while_backward_runs, 2, stage, fuse):
        assert sent_early == ([0, 0, 5] if stage < 2 else [5, 10, 15])
        last = log[-10:] if stage > 1 else log
        sends = [i for i, e in enumerate(last) if e.startswith("send")][:5]
        # 8 x 8 + 8, of both ranks
        assert all(last[i] == "send 72" for i in sends)
        # the k-th is layer 4 - k's
        for k, layer in enumerate((3, 2, 1, 0)):
            assert sends[k] < last.index(f"backward {layer}"), last


def unused_parameter(rank, stage):
    model = small_model()
    model.extra = nn.Linear(2, 2)
    gradients = fsdp.apply(model, dist.group.WORLD, stage)
    unused_grads = []
    # used by rank 0 in the first step, by nobody in the second
    for step in range(2):
        gradients.zero_grad()
        gradients.next_backward_is_last()
        y = nn.Sequential.forward(model[:5], torch.ones(1, 8)).sum()
        if rank == 0 and step == 0:
            y = y + model.extra(torch.ones(1, 2)).sum()
        y.backward()
        gradients.reduce_gradients()
        unused_grads.append(local_part(model.extra.weight).main_grad.clone())
    return unused_grads, local_part(model[0].bias).main_grad.clone()


@pytest.mark.parametrize("stage", [0, 1])
def test_unused_parameters_get_zeros_not_an_old_gradient(stage):
    for (first, second), bias in ranks.run(unused_parameter, 2, stage):
        assert (first != 0).all()
        assert (second == 0).all()
        assert (bias != 0).any()


class Two:
    """A group of two ranks, as rank 0 sees it."""

    size = staticmethod(lambda: 2)
    rank = staticmethod(lambda: 0)


def test_shards_by_hand():
    """Five rows over two ranks: three, and two with one of padding. A [1, 4] weight is sharded
    along its second dimension."""
    first = nn.Parameter(torch.arange(10.0).view(5, 2))
    second = nn.Parameter(torch.arange(4.0).view(1, 4))
    unit = sharding.FlatParameters([first, second], 2)
    assert unit.T == 3 * 2 + 2
    assert [slot.dim for slot in unit.slots.values()] == [0, 1]
    assert unit.padding
    flat = torch.full((2, unit.T), -1.0)
    for p in unit.parameters:
        for in_flat, in_whole in unit.views(flat, p, p.detach()):
            in_flat.copy_(in_whole)
    assert flat.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1], [6, 7, 8, 9, -1, -1, 2, 3]]


# --- what is held, what is sent -------------------------------------------------------------------

GPT = dict(num_layers=3, hidden_size=48, num_heads=4, seq_length=16, vocab_size=61)
SHAPES = {"llama": GPT | dict(llama=True), "gpt": GPT}


def sharded_model(shape, stage):
    """(model, its gradients), initialised layer by layer."""
    with torch.device("meta"):
        model = gpt.GPT(GPTConfig(**SHAPES[shape]))
    init = partial(sharding.init, model, 0, "cpu", torch.float32)
    return model, fsdp.apply(model, dist.group.WORLD, stage, init=init, may_skip=False)


def is_there(unit):
    """Whether its parameters are gathered."""
    return unit.is_whole


def norms_after_a_bad_step(rank, stage):
    """Norms of three steps with the same gradients, of which the second is NaN."""
    model = nn.Sequential(nn.Linear(2, 5))
    gradients = fsdp.apply(model, dist.group.WORLD, stage)
    optimizer = AdamW(sharding.named_parameters(model), clip=0.1)
    norms = []
    for factor in (1.0, math.nan, 1.0):
        gradients.zero_grad()
        gradients.next_backward_is_last()
        (model(torch.ones(1, 2)).sum() * factor).backward()
        gradients.reduce_gradients()
        norms.append(optimizer.step(0.0).item())
        gradients.renew_parameters()
    return norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_padding_forgets_a_step_that_is_not_finite(stage):
    """Two ranks share 5 rows: padding is in the norm, and no gradient overwrites it."""
    for first, bad, last in ranks.run(norms_after_a_bad_step, 2, stage):
        assert math.isnan(bad) and last == first == pytest.approx(2 * math.sqrt(15))


def bytes_and_elements(rank, n, stage, shape, m):
    model, gradients = sharded_model(shape, stage)
    optimizer = AdamW(sharding.named_parameters(model))
    tokens = torch.randint(61, (m, 2, 17), generator=torch.Generator().manual_seed(rank))
    with ranks.Collectives() as sent:
        gradients.zero_grad()
        for k in range(m):
            if k == m - 1:
                gradients.next_backward_is_last()
            model(tokens[k][:, :-1], tokens[k][:, 1:]).mean().backward()
        gradients.reduce_gradients()
        held = held_bytes(model, gradients)
        optimizer.step(1e-3)
        gradients.renew_parameters()
        gradients.wait_for_parameters()
    moments = [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    elements = 0
    for kind, size in sent.calls:
        if size > 256:
            elements += size // 4 * (2 if kind == "all-reduce" else 1)
    return dict(
        held=(*held, sum(x.nbytes for x in moments)),
        elements=elements,
        padded=sum(unit.N * unit.T for unit in gradients.units),
        calls=sum(size > 64 for _, size in sent.calls) / len(gradients.units),
        psi=sum(p.numel() for p in model.parameters()),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_and_elements(stage, shape):
    """Held: within 2% of the formula, on every rank, for sizes that 3 does not divide. Sent:
    exactly the formula, padding counted, in one collective for each unit."""
    for n, m in ((2, 1), (3, 2)):
        for measured in ranks.run(bytes_and_elements, n, n, stage, shape, m):
            formulas = fsdp.bytes_per_parameter(stage, n, 4, 4, 8)
            for held, formula in zip(measured["held"], formulas, strict=True):
                assert held == pytest.approx(measured["psi"] * formula, rel=0.02)
            assert measured["elements"] == fsdp.elements_sent(stage, m) * measured["padded"]
            assert measured["calls"] == {0: 1, 1: 2, 2: m + 1, 3: 3 * m}[stage]


def test_the_paper():
    """7.5 B parameters on 64 devices, in GB: section 1, figure 1."""
    totals = [sum(fsdp.bytes_per_parameter(stage, 64, gradient=2)) * 7.5 for stage in range(4)]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert [fsdp.elements_sent(stage, 1) for stage in range(4)] == [2, 2, 2, 3]


def gathers_in_flight(rank):
    """For each layer's compute, in both directions, the units that were on their way when it
    began."""
    with torch.device("meta"):
        model = gpt.GPT(GPTConfig(**SHAPES["llama"]))
    log = []

    def note(i):
        log.append((i, [k for k, unit in enumerate(gradients.units) if unit.gathering]))

    for i, layer in enumerate([model.embedding, *model.blocks.values(), model.head]):

        def forward(*args, i=i, original=layer.forward):
            note(i)
            y = original(*args)
            y.register_hook(lambda grad: note(i))
            return y

        layer.forward = forward
    init = partial(sharding.init, model, 0, "cpu", torch.float32)
    gradients = fsdp.apply(model, dist.group.WORLD, 3, init=init, may_skip=False)
    tokens = torch.randint(61, (2, 17))
    for _ in range(2):
        log.clear()
        gradients.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        gradients.reduce_gradients()
    return log, [is_there(unit) for unit in gradients.units]


def test_the_next_unit_is_on_its_way():
    """While layer i computes, forward, unit i + 1 is being gathered; backward, unit i - 1. At the
    end nothing is left. (The hook inside the layer runs before the one of fsdp.py, which starts the
    next gather: so what it sees is the state before.)"""
    for log, left in ranks.run(gathers_in_flight, 2):
        assert log[:5] == [(0, [1]), (1, [2]), (2, [3]), (3, [4]), (4, [])]
        assert log[5:] == [(4, []), (3, [3]), (2, [2]), (1, [1]), (0, [0])]
        assert not any(left)


def forward_without_backward(rank):
    """A loss that nobody goes back from, after which the tied matrix is still there; then a step
    that changes it: the next forward has the new one."""
    model, gradients = sharded_model("gpt", 3)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    before = model(tokens, tokens)
    with torch.no_grad():
        model.embedding.tokens.weight.shard.mul_(1.5)
    assert is_there(gradients.units[0])
    gradients.renew_parameters()
    with torch.no_grad():
        # nothing is left between these two
        first = model(tokens, tokens)
        second = model(tokens, tokens)
    return torch.equal(first, second), torch.equal(first, before)


def test_nothing_old_is_left_after_a_step():
    assert ranks.run(forward_without_backward, 2) == [(True, False)] * 2


def parameters_on_their_way(rank, stage):
    """[(layer, the units that are being gathered when it runs)] of the forward after a step; those
    before it; whether it was of the new parameters."""
    model, gradients = sharded_model("gpt", stage)
    tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1))
    log = []
    for i, layer in enumerate(sharding.named_layers(model).values()):
        layer.register_forward_pre_hook(
            lambda *_, i=i: log.append(
                (i, [k for k, unit in enumerate(gradients.units) if unit.gathering])
            )
        )
    with torch.no_grad():
        for p in gradients.parameters:
            p.shard.mul_(1.5)
    gradients.renew_parameters()
    started = [k for k, unit in enumerate(gradients.units) if unit.gathering]
    first = model(tokens[:, :-1], tokens[:, 1:])
    reference, _ = sharded_model("gpt", 0)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(1.5)
    return log, started, torch.equal(first, reference(tokens[:, :-1], tokens[:, 1:]))


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_come_while_the_next_forward_runs(stage):
    """Two units are on their way while a layer runs. Each has one; the head is tied to the
    embedding, and its own unit is its norm."""
    for log, started, is_new in ranks.run(parameters_on_their_way, 2, stage):
        assert started == [0, 1] and is_new
        assert log == [(0, [1, 2]), (1, [2, 3]), (2, [3, 4]), (3, [4]), (4, [])]


def two_steps_without_a_forward(rank, stage):
    """What the first one has sent is old when the second one sends."""
    model = small_model()
    gradients = fsdp.apply(model, dist.group.WORLD, stage)
    for factor in (2.0, 3.0):
        with torch.no_grad():
            for p in gradients.parameters:
                p.shard.fill_(factor)
        gradients.renew_parameters()
    gradients.wait_for_parameters()
    return all((p == 3).all() for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 2])
def test_old_parameters_do_not_come_late(stage):
    assert ranks.run(two_steps_without_a_forward, 2, stage) == [True, True]


def garbage_free(rank, stage):
    """A model that is dropped takes its buffers with it."""
    model = small_model()
    gradients = fsdp.apply(model, dist.group.WORLD, stage)
    gone = weakref.ref(gradients)
    del model, gradients
    gc.collect()
    return gone() is None


def test_nothing_keeps_a_dropped_model():
    assert ranks.run(garbage_free, 2, 3) == [True, True]


def whole_when_sent(rank):
    """For each reduce-scatter of a backward, which units are whole."""
    model = small_model()
    gradients = fsdp.apply(model, dist.group.WORLD, 3, may_skip=False)
    log = []

    def noted(*args, original=fsdp.reduce_scatter, **options):
        log.append([unit.is_whole for unit in gradients.units])
        return original(*args, **options)

    fsdp.reduce_scatter = noted
    model(torch.ones(1, 8)).sum().backward()
    return log


def test_the_first_layer_is_freed_before_its_gradients_are_sent():
    """No other layer's backward comes later. The others are whole until one does."""
    for log in ranks.run(whole_when_sent, 2):
        assert [sum(whole) for whole in log] == [1, 1, 1, 1, 0]


def test_unknown_stage():
    with pytest.raises(ValueError, match=r"stage 7: must be 0 .*, 1 .*, 2 .* or 3"):
        fsdp.apply(small_model(), None, 7)


def layers_at_a_time(rank, flags):
    """(the most layers of which whole parameters are there or on their way, layers) of two steps"""
    run = parity.Run(2, config_of(flags))
    (gradients,) = run.trainer.gradients
    most = 0
    gather_row = fsdp.Unit.gather_row

    def watched(unit):
        nonlocal most
        gather_row(unit)
        there = [u for u in gradients.units if u.gathering or u.is_whole]
        most = max(most, len({u.readers[-1].name for u in there}))

    fsdp.Unit.gather_row = watched
    for step in (1, 2):
        run.trainer.forward_backward(step, run.dataset)
        run.trainer.update(step)
    return most, len({u.readers[-1].name for u in gradients.units} | {"embedding"})


@pytest.mark.parametrize("flags", [{}, dict(recompute="full")], ids=str)
@pytest.mark.parametrize("base", [parity.SMALL, parity.LLAMA], ids=["tied", "untied"])
def test_whole_parameters_of_two_layers(base, flags):
    """As the introduction says: of seven."""
    flags = base | flags | dict(zero_stage=3, micro_batch_size=2, num_layers=5)
    assert ranks.run(layers_at_a_time, 2, flags) == [(2, 7)] * 2
