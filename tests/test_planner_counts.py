"""planner.step_time waits for exactly the collectives that train.py calls.

On an ideal machine, with 1e24 FLOP/s and bytes/s, a step is what communication takes. Where a pass
of a collective takes a second and bytes nothing, seconds count passes; where passes take nothing
and links have 1 byte/s, they count bytes. What is called, `train.py --as-rank` says, which is held
to gloo ranks itself (test_as_rank.py).
"""

import dataclasses

import pytest
from parity import again

import planner
import train
from base.model_config import MoEConfig, flops_per_token
from models.runs import BertRun, T5Run
from planning import as_rank, layer_time, plan
from planning.inputs import TRAIN, Constants, Layout, Machine
from run.config import RunConfig

# nothing runs beside computation, which takes no time here
SOFTWARE_ALONE = dataclasses.replace(TRAIN, overlaps_tensor=False, overlaps_data=False)
INSTANT = 1e24
SHAPE = dict(
    num_layers=4, hidden_size=256, num_heads=8, seq_length=128, vocab_size=512, dropout=0.0
)
GPT = SHAPE | dict(model="gpt2")
# heads that are wider than h / a, with norms of their own
QWEN3 = SHAPE | dict(model="qwen3-0.6b", head_dim=48, num_kv_heads=4, ffn_hidden_size=1024)
LATENT = SHAPE | dict(model="llama2-7b", ffn_hidden_size=512, kv_rank=64, query_rank=96)
LATENT |= dict(num_layers=2, head_dim=48, rope_head_dim=16, value_head_dim=32)
BERT = SHAPE | dict(model="bert-base", dropout=0.1)
T5 = SHAPE | dict(model="t5-base", dropout=0.1, target_length=32, ffn_hidden_size=512, head_dim=32)
PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
# a send and its receive
PASSES |= {"send": 1, "receive": 0}


def ideal(wait: float, link: float) -> Machine:
    return Machine("ideal", INSTANT, 1, INSTANT, link, link, 8, Constants(1, 1, 1, 1, wait))


def config_of(flags: dict) -> RunConfig:
    config_class = {"bert-base": BertRun, "t5-base": T5Run}.get(flags.get("model"), train.Config)
    shape = GPT if config_class is train.Config else {}
    return config_class(**shape | dict(micro_batch_size=1) | flags)


def called(flags: dict, group: str, ranks: int) -> tuple[float, float]:
    """(passes, bytes that go over a link) of the first rank of a run, the gradient norm left
    out."""
    report = as_rank.report(config_of(flags), train.Trainer, 0, ranks)
    size = report.place[group][1]
    passes = sent = 0
    for call in report.collectives:
        # the norm: one number
        if call.group == group and call.bytes > 8:
            passes += PASSES[call.kind] * call.count
            share = 1 if call.kind == "send" else (size - 1) / size
            sent += PASSES[call.kind] * call.count * call.bytes * share
    return passes, sent


def inputs(flags: dict, ranks: int) -> tuple[MoEConfig, Layout]:
    config = config_of(flags)
    return config.model_config(), plan.layout_of(config, ranks)


def predicted(flags: dict, parts: tuple[str, ...], ranks: int) -> tuple[float, float]:
    return tuple(
        sum(
            planner.step_time(machine, SOFTWARE_ALONE, *inputs(flags, ranks))[part]
            for part in parts
        )
        for machine in (ideal(1.0, INSTANT), ideal(0.0, 1.0))
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor(t, recompute):
    flags = dict(tp=t, global_batch_size=6, micro_batch_size=2, recompute=recompute)
    assert predicted(flags, ("tensor", "head"), t) == pytest.approx(called(flags, "tp", t))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [BERT, T5], ids=["bert", "t5"])
def test_tensor_of_encoders(model, recompute):
    flags = model | dict(tp=4, global_batch_size=6, micro_batch_size=2, recompute=recompute)
    assert predicted(flags, ("tensor", "head"), 4) == pytest.approx(called(flags, "tp", 4))


def test_tensor_and_sequence_of_t5():
    """All but one pass a micro-batch."""
    flags = T5 | dict(num_layers=8, tp=4, sequence_parallel=True, global_batch_size=3)
    passes, sent = predicted(flags, ("tensor", "head"), 4)
    expected, expected_bytes = called(flags, "tp", 4)
    assert passes == pytest.approx(expected - 3)
    assert sent == pytest.approx(expected_bytes, rel=0.01)


@pytest.mark.parametrize("model", [BERT, T5], ids=["bert", "t5"])
def test_flops_of_encoders(model):
    """Matrix multiplications, forward and backward, are those that the trainer runs."""
    for t in (1, 2):
        flags = model | dict(tp=t, global_batch_size=6, micro_batch_size=2)
        flops = as_rank.report(config_of(flags), train.Trainer, 0, t).flops
        shape, layout = inputs(flags, t)
        machine = dataclasses.replace(ideal(0.0, INSTANT), peak=1.0)
        parts = planner.step_time(machine, SOFTWARE_ALONE, shape, layout)
        assert parts["matmul"] + parts["head"] == pytest.approx(flops, rel=1e-9)
        assert flops_per_token(shape) * shape.seq_length * 6 / t == pytest.approx(flops, rel=0.02)


def test_chunks_of_the_head():
    """As many collectives, however many chunks."""
    flags = dict(tp=2, global_batch_size=6, micro_batch_size=2, head_chunk=64)
    assert predicted(flags, ("tensor", "head"), 2) == pytest.approx(called(flags, "tp", 2))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_modules(recompute):
    """Of multi-token prediction: their blocks, lookups, and rows of the head."""
    flags = dict(tp=2, mtp_layers=2, global_batch_size=6, recompute=recompute)
    assert predicted(flags, ("tensor", "head"), 2) == pytest.approx(called(flags, "tp", 2))


def test_heads_of_another_size():
    tensor = QWEN3 | dict(tp=4, global_batch_size=6)
    assert predicted(tensor, ("tensor", "head"), 4) == pytest.approx(called(tensor, "tp", 4))
    for model in (QWEN3, dict(head_dim=48)):
        for kind in ("ring", "all-to-all"):
            flags = model | dict(cp=2, cp_kind=kind, global_batch_size=6)
            assert predicted(flags, ("context",), 4) == pytest.approx(called(flags, "cp", 4))


@pytest.mark.parametrize("query_rank", [again(96), again(0)])
def test_latents(query_rank):
    """Collectives of tensor and context parallelism, and matrix multiplications."""
    latent = LATENT | dict(query_rank=query_rank)
    tensor = latent | dict(tp=4, global_batch_size=6)
    assert predicted(tensor, ("tensor", "head"), 4) == pytest.approx(called(tensor, "tp", 4))
    for kind in ("ring", "all-to-all"):
        flags = latent | dict(cp=2, cp_kind=kind, global_batch_size=2)
        assert predicted(flags, ("context",), 4) == pytest.approx(called(flags, "cp", 4))
    sequence = tensor | dict(sequence_parallel=True, global_batch_size=3)
    passes, sent = predicted(sequence, ("tensor", "head"), 4)
    expected, expected_bytes = called(sequence, "tp", 4)
    # The head's second gather, and a sum of gradients outside the layers.
    assert passes == pytest.approx(expected - 3 * 3)
    assert 0.95 < sent / expected_bytes <= 1
    flags = tensor | dict(attention="explicit")
    machine = dataclasses.replace(ideal(0.0, INSTANT), peak=1.0)
    parts = planner.step_time(machine, SOFTWARE_ALONE, *inputs(flags, 4))
    flops = as_rank.report(config_of(flags), train.Trainer, 0, 4).flops
    assert parts["matmul"] + parts["head"] == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_and_sequence(recompute):
    """All but 5 passes a micro-batch: the head's second gather, and two sums of gradients outside
    the layers."""
    flags = dict(num_layers=8, tp=4, sequence_parallel=True, global_batch_size=3)
    flags |= dict(recompute=recompute)
    passes, sent = predicted(flags, ("tensor", "head"), 4)
    expected, expected_bytes = called(flags, "tp", 4)
    assert passes == pytest.approx(expected - 5 * 3)
    assert 0.93 < sent / expected_bytes <= 1


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
@pytest.mark.parametrize("n, t", [again(2, 1), (4, 2)])
def test_context(n, t, kind, recompute):
    """Of two samples at a time, so that sums of gradients have another group."""
    flags = dict(tp=t, cp=n, cp_kind=kind, global_batch_size=6, recompute=recompute)
    ranks = 2 * n * t
    assert predicted(flags, ("context",), ranks) == pytest.approx(called(flags, "cp", ranks))


def test_a_ring_waits_for_what_attention_does_not_hide():
    """Of a long sequence only the last gradients of keys and values, which have 32 bits; of a
    short one all."""
    machine = dataclasses.replace(ideal(0.0, 1e9), peak=1e14)
    waits = []
    for s in (2**8, 2**20):
        model, layout = inputs(dict(cp=4, global_batch_size=1, seq_length=s), 4)
        rank = planner.Rank(machine, SOFTWARE_ALONE, model, layout)
        waited = planner.step_time(machine, SOFTWARE_ALONE, model, layout)["context"]
        waits.append(waited / layer_time.to_neighbour(rank) / model.num_layers)
    assert waits[1] == pytest.approx(2)
    assert 11.9 < waits[0] < 12


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data(stage):
    """Matrices alone count: the rest is 1%."""
    flags = dict(global_batch_size=12, zero_stage=stage)
    passes, sent = predicted(flags, ("data",), 4)
    expected, expected_bytes = called(flags, "dp", 4)
    assert passes == pytest.approx(expected)
    assert 0.985 < sent / expected_bytes <= 1
    if stage == 3:
        # its gathers run beside what a ring waits for
        return
    # tokens in the place of samples: the same gradients
    shared = dict(cp=2, global_batch_size=6, zero_stage=stage)
    assert predicted(shared, ("data",), 4) == pytest.approx((passes, sent))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding(stage):
    """Two nodes of 4 ranks: gathers and reduce-scatters inside, all-reduces of rows across."""
    flags = dict(data_parallel_replicate_degree=2, zero_stage=stage, global_batch_size=16)
    inside, across = (called(flags, group, 8) for group in ("shard", "replicate"))
    passes, sent = predicted(flags, ("data",), 8)
    assert passes == pytest.approx(inside[0] + across[0])
    assert 0.985 < sent / (inside[1] + across[1]) <= 1
    slow = dataclasses.replace(ideal(0.0, 1.0), ranks_per_node=4)
    for link, expected in (("network_bandwidth", inside), ("node_bandwidth", across)):
        machine = dataclasses.replace(slow, **{link: INSTANT})
        seconds = planner.step_time(machine, SOFTWARE_ALONE, *inputs(flags, 8))["data"]
        # A ring between nodes has the adapters of its members, one on each node here.
        assert 0.985 < seconds / expected[1] <= 1
