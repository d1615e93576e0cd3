"""planner.step_time waits for exactly the collectives that train.py calls.

On an ideal machine, with 1e24 FLOP/s and bytes/s, a step is what communication takes. Where
a pass of a collective takes a second and bytes nothing, seconds count passes; where passes take
nothing and links have 1 byte/s, they count bytes. planning/collectives.py has the same from the
layout, and is held to gloo ranks (test_planning_counts.py).
"""

import dataclasses

import pytest

import planner
from model_config import GPTConfig
from planning.collectives import collectives
from planning.inputs import SOFTWARE, Constants, Layout, Machine
from planning.shared import INSTANT
from routers import MoEConfig

# nothing runs beside computation, which takes no time here
SOFTWARE_ALONE = dataclasses.replace(
    SOFTWARE["train.py"], overlaps_tensor=False, overlaps_data=False
)
MODEL = MoEConfig(8, 256, 8, seq_length=128, vocab_size=512)
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
# a send and its receive
PASSES |= {"send": 1, "receive": 0}


def ideal(wait: float, link: float) -> Machine:
    return Machine("ideal", INSTANT, 1, INSTANT, link, link, 8, Constants(1, 1, 1, 1, wait))


def called(layout: Layout, group: str, model: GPTConfig = MODEL) -> tuple[float, float]:
    """(passes, bytes that go over a link) of the first pipeline rank, the gradient norm left
    out."""
    size = getattr(layout, group)
    passes = sent = 0
    for call in collectives(model, layout, SOFTWARE_ALONE, 0):
        # the norm: one number
        if call.group == group and call.bytes > 8:
            passes += PASSES[call.kind] * call.count
            share = 1 if call.kind == "send" else (size - 1) / size
            sent += PASSES[call.kind] * call.count * call.bytes * share
    return passes, sent


def predicted(layout: Layout, *parts: str, model: GPTConfig = MODEL) -> tuple[float, float]:
    return tuple(
        sum(planner.step_time(machine, SOFTWARE_ALONE, model, layout)[part] for part in parts)
        for machine in (ideal(1.0, INSTANT), ideal(0.0, 1.0))
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor(t, recompute):
    layout = Layout(tp=t, global_batch_size=6, micro_batch_size=2, recompute=recompute)
    assert predicted(layout, "tensor", "head") == pytest.approx(called(layout, "tp"))


# heads that are wider than h / a, with norms of their own
QWEN3 = dict(llama=True, qk_norm=True, tied=True, head_dim=48, num_kv_heads=4)


def test_heads_of_another_size():
    model = dataclasses.replace(MODEL, head_dim=48)
    qwen3 = MoEConfig(8, 256, 8, seq_length=128, vocab_size=512, **QWEN3)
    layout = Layout(tp=4, global_batch_size=6)
    expected = called(layout, "tp", qwen3)
    assert predicted(layout, "tensor", "head", model=qwen3) == pytest.approx(expected)
    for kind in ("ring", "all-to-all"):
        layout = Layout(cp=2, cp_kind=kind, global_batch_size=3)
        expected = called(layout, "cp", model)
        assert predicted(layout, "context", model=model) == pytest.approx(expected)
        expected = called(layout, "cp", qwen3)
        assert predicted(layout, "context", model=qwen3) == pytest.approx(expected)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_and_sequence(recompute):
    """All but 5 passes a micro-batch: the head's second gather, and two sums of gradients outside
    the layers."""
    layout = Layout(tp=4, sequence_parallel=True, global_batch_size=3, recompute=recompute)
    passes, sent = predicted(layout, "tensor", "head")
    expected, expected_bytes = called(layout, "tp")
    assert passes == pytest.approx(expected - 5 * 3)
    assert 0.93 < sent / expected_bytes <= 1


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
@pytest.mark.parametrize("n, t", [(2, 1), (4, 2)])
def test_context(n, t, kind, recompute):
    layout = Layout(tp=t, cp=n, cp_kind=kind, global_batch_size=3, recompute=recompute)
    assert predicted(layout, "context") == pytest.approx(called(layout, "cp"))


def test_a_ring_waits_for_what_attention_does_not_hide():
    """Of a long sequence only the last gradients of keys and values, which have 32 bits; of a
    short one all."""
    machine = dataclasses.replace(ideal(0.0, 1e9), peak=1e14)
    layout = Layout(cp=4, global_batch_size=1)
    waits = []
    for s in (2**8, 2**20):
        model = dataclasses.replace(MODEL, seq_length=s)
        rank = planner.Rank(machine, SOFTWARE_ALONE, model, layout)
        waited = planner.step_time(machine, SOFTWARE_ALONE, model, layout)["context"]
        waits.append(waited / planner.to_neighbour(rank) / model.num_layers)
    assert waits[1] == pytest.approx(2)
    assert 11.9 < waits[0] < 12


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data(stage):
    """Matrices alone count: the rest is 1%."""
    layout = Layout(dp=4, global_batch_size=12, zero_stage=stage)
    passes, sent = predicted(layout, "data")
    expected, expected_bytes = called(layout, "dp")
    assert passes == pytest.approx(expected)
    assert 0.985 < sent / expected_bytes <= 1
    if stage == 3:
        # its gathers run beside what a ring waits for
        return
    # tokens in the place of samples: the same gradients
    shared = dataclasses.replace(layout, dp=2, cp=2, global_batch_size=6)
    assert predicted(shared, "data") == pytest.approx((passes, sent))
