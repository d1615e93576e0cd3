"""Every layout gives the loss, the gradients and the parameters of one device."""

import re

import pytest
import random_layouts
import torch
from parity import (
    LLAMA,
    SMALL,
    again,
    differs,
    needs_compiler,
    put_together,
    same,
    train,
    train_each,
    without_cpp,
)

import moe
import optimizer
import train as trainer
from proof import mutations
from proof.parity import first_difference
from proof.synthetic import Ragged


@pytest.mark.parametrize(
    "world, micro, base",
    [(1, 1, SMALL), (1, 4, LLAMA), (2, None, LLAMA), (2, 1, SMALL), (4, 1, LLAMA)],
)
def test_data_parallel(world, micro, base):
    same(train(world, base=base, micro_batch_size=micro), train(base=base))


SHARDED = [
    dict(),
    dict(micro_batch_size=1),
    dict(micro_batch_size=1, recompute="full"),
    dict(micro_batch_size=2, recompute="selective"),
]


@pytest.mark.parametrize(
    "world, base, stages",
    [
        (2, SMALL, {1: SHARDED[:2], 2: SHARDED[:2], 3: SHARDED}),
        (3, SMALL, {stage: SHARDED[1:2] for stage in (1, 2, 3)}),
        (4, LLAMA, {stage: SHARDED[1:2] for stage in (1, 2, 3)}),
        again(2, LLAMA, {stage: SHARDED for stage in (1, 2, 3)}),
    ],
    ids=["2 gpt", "3 gpt", "4 llama", "2 llama"],
)
def test_zero_stages(world, base, stages):
    """Stages 1 to 3; 3 and 4 divide hardly a size in the model. Accumulation, and recomputation,
    which gathers again what it needs again."""
    variants = [dict(flags, zero_stage=stage) for stage in stages for flags in stages[stage]]
    sizes = dict(vocab_size=61, global_batch_size=12)
    for result in train_each(world, variants, base=base, **sizes):
        same(result, train(base=base, **sizes))


OVER = [
    (4, dict(tp=2, micro_batch_size=1)),
    (4, dict(tp=2, sequence_parallel=True, recompute="selective")),
    (4, dict(tp=2, sequence_parallel=True, recompute="full")),
    (4, dict(pp=2, num_layers=4, virtual_stages=2)),
    (4, dict(pp=2, schedule="zb-h1")),
    (4, dict(pp=2, schedule="gpipe", recompute="full")),
    (4, dict(pp=2, virtual_stages=2, layer_split=[0, 0, 1, 1])),
    (8, dict(pp=2, tp=2, sequence_parallel=True, recompute="selective")),
    (6, dict(pp=2, layer_split=[2, 0], global_batch_size=12)),
]


@pytest.mark.parametrize(
    "base, world, flags, stages",
    [
        (SMALL, *OVER[0], (2,)),
        (LLAMA, *OVER[1], (1, 3)),
        *[(SMALL, *over, (3,)) for over in OVER[2:]],
        *[again(SMALL, *over, (1, 2)) for over in OVER[2:]],
    ],
    ids=str,
)
def test_zero_stages_over_other_techniques(base, world, flags, stages):
    model = {k: v for k, v in flags.items() if k in ("num_layers", "global_batch_size")}
    for result in train_each(
        world, [dict(zero_stage=stage) for stage in stages], base=base | flags
    ):
        same(result, train(base=base | model))


def test_zero_stages_float32():
    """Also with gradients that are sums of 16-bit numbers on their way: as near as 8 bits of
    mantissa are."""
    one = train(precision="fp32", steps=1)
    variants = [dict(zero_stage=stage, micro_batch_size=2) for stage in (0, 1, 2, 3)]
    for result in train_each(2, variants, precision="fp32", steps=1):
        same(result, one, 1e-5)
    for result in train_each(2, variants, precision="fp32", steps=1, reduce_dtype="bf16"):
        differs(result, one, 1e-4)
        same(result, one, 2e-2)


# A vocabulary that no t divides, heads that 4 divides, grouped-query attention. For GPT the
# embeddings are tied.
TENSOR = {
    "gpt": SMALL | dict(vocab_size=257),
    "llama": LLAMA | dict(vocab_size=257, num_heads=8, num_kv_heads=4),
}


WITH_RECOMPUTATION = [
    dict(sequence_parallel=sequence, recompute=recompute)
    for sequence in (False, True)
    for recompute in ("none", "selective", "full")
]


@pytest.mark.parametrize(
    "base, tp, dp, variants",
    [
        ("gpt", 2, 1, WITH_RECOMPUTATION),
        # without anything else, and with all of it
        ("gpt", 4, 1, WITH_RECOMPUTATION[::5]),
        ("llama", 2, 2, WITH_RECOMPUTATION[::5]),
        again("llama", 2, 2, WITH_RECOMPUTATION[1:5]),
    ],
    ids=str,
)
def test_tensor_parallel(base, tp, dp, variants):
    """With and without sequence parallelism, times every way to recompute."""
    for result in train_each(tp * dp, variants, base=TENSOR[base], tp=tp, micro_batch_size=4 // dp):
        same(result, train(base=TENSOR[base]))


@pytest.mark.parametrize(
    "flags",
    [
        dict(recompute="full", recompute_layers=1),
        dict(dropout=0.0, recompute="selective"),
        dict(dropout=0.0, recompute="full"),
    ],
    ids=str,
)
def test_recompute(flags):
    """Partly, on one device, and with fused attention (no dropout)."""
    reference = {k: v for k, v in flags.items() if k == "dropout"}
    same(train(micro_batch_size=4, **flags), train(**reference))
    same(
        train(2, tp=2, sequence_parallel=True, base=TENSOR["llama"], **flags),
        train(base=TENSOR["llama"], **reference),
    )


@pytest.mark.parametrize(
    "flags",
    [dict(micro_batch_size=2), dict(tp=2), dict(tp=2, sequence_parallel=True, recompute="full")],
    ids=["data", "tensor", "sequence"],
)
def test_float32(flags):
    same(train(2, precision="fp32", steps=1, **flags), train(precision="fp32", steps=1), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "world, flags",
    [
        (1, dict()),
        (1, dict(recompute="full")),
        (2, dict(tp=2)),
        (2, dict(tp=2, sequence_parallel=True, recompute="selective")),
        (2, dict(zero_stage=1)),
        (2, dict(zero_stage=2, micro_batch_size=1)),
        (2, dict(zero_stage=3, recompute="full")),
    ],
    ids=str,
)
def test_on_a_gpu(world, flags):
    """The CPU's loss and gradients; ranks share the GPU."""
    same(train(world, device="cuda", **flags), train())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "world, flags",
    [
        (1, dict()),
        (1, dict(recompute="full")),
        (2, dict(ep=2)),
        (2, dict(tp=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_experts_on_a_gpu(world, flags):
    for base in EXPERTS.values():
        same(train(world, base=base, device="cuda", **flags), train(base=base))


@pytest.mark.gpu
def test_experts_on_a_gpu_in_bfloat16():
    """The library's grouped matrix multiplication. All experts are chosen, for in 16 bits others
    would be."""
    base = LLAMA | dict(num_experts=2, router="topk", router_topk=2, precision="bf16", dropout=0.0)
    one = train(base=base, steps=1)
    gpu = train(base=base, steps=1, device="cuda")
    for name, gradient in one.gradients.items():
        assert (gpu.gradients[name] - gradient).abs().max() < 0.05 * gradient.abs().max(), name


@needs_compiler
@pytest.mark.parametrize(
    "world, flags, mutate",
    [
        # (test_gpt.py generates C++ for dropout)
        (1, dict(recompute="full"), without_cpp),
        again(2, dict(tp=2, sequence_parallel=True, recompute="full"), without_cpp),
        again(1, dict(dropout=0.0), None),
    ],
)
def test_compiled(world, flags, mutate):
    one = dict(num_layers=1, steps=1, dropout=flags.get("dropout", 0.1))
    same(train(world, **one | flags, compile=True, mutate=mutate), train(**one))


def test_what_replicas_disagree_on_is_infinite():
    """Also where a third rank agrees with the first; and what no rank has."""
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    ranks = [[("w", (5, 3), [0, 0], a)], [("w", (5, 3), [0, 0], b)], [("w", (5, 3), [0, 0], a)]]
    assert put_together(ranks)["w"].isinf().all()
    ranks[1] = [("w", (5, 3), [2, 0], b)]
    expected = torch.cat((a, b, torch.full((1, 3), torch.inf)))
    assert torch.equal(put_together(ranks)["w"], expected)


# --- the gate can fail ---------------------------------------------------------------------------

BUGS = mutations.bugs()


def layouts_of_bugs() -> list:
    """(name, which of the layouts in which it shows)"""
    cases = []
    for name, bug in BUGS.items():
        cases += [(name, 0), *(again(name, i) for i in range(1, len(bug.layouts)))]
    return cases


@pytest.mark.parametrize("name, layout", layouts_of_bugs())
def test_gate_sees(name, layout):
    """Each bug removes one thing that parity needs. If this fails, the gate has gone blind to it,
    or verify.py names another tensor than the one where it begins."""
    bug = BUGS[name]
    flags = bug.layouts[layout]
    # what is wrong after the update shows in the second step
    steps = 2 if re.match("step 2|step 1: updated", bug.first) else 1
    broken = train(bug.world, steps, trace=True, mutate=bug.apply, **flags)
    one = train(steps=steps, trace=True, **mutations.of_one_device(flags))
    differs(broken, one)
    first = first_difference(broken, one)
    assert re.match(bug.first, first.label), first


# --- pipelines ------------------------------------------------------------------------------------

PIPELINE = {
    "gpt": SMALL | dict(num_layers=6, vocab_size=257),
    "llama": LLAMA | dict(num_layers=6, vocab_size=257),
}
TWO = [
    dict(schedule="gpipe"),
    dict(schedule="1f1b"),
    dict(schedule="zb-h1"),
    dict(virtual_stages=3),
    dict(layer_split=[2, 4], micro_batch_size=2),
    dict(layer_split=[6, 0], schedule="zb-h1"),
    dict(layer_split=[2, 0, 3, 1], virtual_stages=2),
]
FOUR = [
    dict(schedule="gpipe"),
    dict(schedule="1f1b"),
    dict(schedule="zb-h1"),
    dict(virtual_stages=3),
    dict(layer_split=[2, 4, 4, 2], schedule="zb-h1"),
    dict(layer_split=[1, 2, 2, 2, 2, 2, 1, 0], virtual_stages=2),
]
# tp 2 x pp 2 x dp 2
EIGHT = [dict(schedule="zb-h1"), dict(virtual_stages=2)]


SHARDED_TOO = dict(pp=2, tp=2, num_layers=4, sequence_parallel=True, recompute="selective")


@pytest.mark.parametrize(
    "base, world, variants, flags",
    [
        ("gpt", 2, TWO, dict(pp=2)),
        ("gpt", 2, [dict(virtual_stages=2)], dict(pp=2, num_layers=4)),
        ("llama", 2, TWO[3:4], dict(pp=2)),
        # three chunks a rank
        ("gpt", 4, FOUR[3:5], dict(pp=4, num_layers=12)),
        ("gpt", 8, EIGHT[:1], SHARDED_TOO),
        again("gpt", 4, FOUR[:3] + FOUR[5:], dict(pp=4, num_layers=12)),
        again("gpt", 8, EIGHT[1:], SHARDED_TOO),
    ],
    ids=str,
)
def test_pipeline(base, world, variants, flags):
    """Every schedule, even and uneven splits, tied embeddings (GPT)."""
    model = {k: v for k, v in flags.items() if k == "num_layers"}
    for result in train_each(world, variants, base=PIPELINE[base], **flags):
        same(result, train(base=PIPELINE[base] | model))


# --- experts --------------------------------------------------------------------------------------

# Routing depends on the micro-batch, so one device has the same ones. Four experts in every layer,
# or in every other of four with tokens dropped.
EXPERTS = {
    "sinkhorn": SMALL | dict(num_experts=4, micro_batch_size=2),
    "topk": (
        LLAMA
        | dict(
            num_experts=4,
            micro_batch_size=2,
            router="topk",
            router_topk=2,
            aux_loss=0.1,
            z_loss=0.1,
            num_layers=4,
            expert_every=2,
            capacity_factor=1.2,
        )
    ),
}


@pytest.mark.parametrize(
    "base, world, variants",
    [
        ("sinkhorn", 1, [dict(recompute="full"), dict(recompute="selective")]),
        ("sinkhorn", 2, [dict(), dict(ep=2), dict(tp=2), dict(pp=2)]),
        ("topk", 2, [dict(ep=2), dict(tp=2, sequence_parallel=True)]),
        (
            "sinkhorn",
            4,
            [
                dict(ep=4),
                dict(ep=2, recompute="full"),
                dict(tp=2, sequence_parallel=True, ep=2),
                dict(pp=2, ep=2, schedule="zb-h1"),
                dict(ep=2, zero_stage=2),
                dict(ep=4, zero_stage=3, recompute="full"),
            ],
        ),
        (
            "sinkhorn",
            8,
            [dict(pp=2, tp=2, sequence_parallel=True, ep=2, zero_stage=3, recompute="full")],
        ),
        ("topk", 4, [dict(pp=2, virtual_stages=2, ep=2)]),
        again("sinkhorn", 4, [dict(pp=2, ep=2, schedule="gpipe", recompute="full")]),
        again("topk", 2, [dict(), dict(tp=2), dict(pp=2)]),
        again("topk", 4, [dict(ep=4), dict(tp=2, sequence_parallel=True, ep=2, recompute="full")]),
    ],
    ids=str,
)
def test_experts(base, world, variants):
    for result in train_each(world, variants, base=EXPERTS[base]):
        same(result, train(base=EXPERTS[base]))


# rows of unequal lengths, which cp and sequence parallelism pad further
RAGGED = {
    "sinkhorn": SMALL | dict(num_experts=4, micro_batch_size=2, command="sft.py", data=["-"]),
    "topk": (
        LLAMA
        | dict(num_experts=4, micro_batch_size=2, command="sft.py", data=["-"])
        | dict(num_kv_heads=4, router="topk", router_topk=2, aux_loss=1.0, z_loss=0.1)
    ),
}
RAGGED["capacity"] = RAGGED["topk"] | dict(capacity_factor=1.0)


@pytest.mark.parametrize(
    "base, world, variants",
    [
        ("topk", 4, [dict(cp=4), dict(pp=2, tp=2, sequence_parallel=True, recompute="full")]),
        ("sinkhorn", 4, [dict(tp=4, sequence_parallel=True)]),
        ("capacity", 4, [dict(tp=4, sequence_parallel=True), dict(ep=2, tp=2, zero_stage=2)]),
        again("topk", 4, [dict(cp=2, ep=2), dict(cp=2, tp=2, sequence_parallel=True)]),
    ],
    ids=str,
)
def test_routers_see_no_padding(base, world, variants):
    for result in train_each(world, variants, base=RAGGED[base]):
        same(result, train(base=RAGGED[base]))


def route_padding():
    moe.ExpertLayers.begin_micro_batch = lambda layers, real: None


def count_padding():
    Ragged.positions = lambda self, samples: len(samples) * self.s


@pytest.mark.parametrize("mutate", [route_padding, count_padding])
def test_padding_in_a_router_is_seen(mutate):
    base = RAGGED["topk"]
    one = train(base=base, steps=1)
    differs(train(2, base=base, steps=1, mutate=mutate, cp=2), one)


def test_experts_float32():
    base = EXPERTS["topk"] | dict(precision="fp32")
    for result in train_each(
        4,
        [dict(ep=2), dict(ep=4, zero_stage=3), dict(tp=2, sequence_parallel=True, ep=2)],
        base=base,
        steps=1,
    ):
        same(result, train(base=base, steps=1), 1e-5)


@needs_compiler
@pytest.mark.repetition
def test_experts_compiled():
    """And stage 3."""
    base = EXPERTS["sinkhorn"] | dict(num_layers=1)
    flags = dict(ep=2, zero_stage=3, compile=True, mutate=without_cpp)
    same(train(2, base=base, steps=1, **flags), train(base=base, steps=1))


def small_loss_scale():
    trainer.LossScaler = lambda: optimizer.LossScaler(2.0**12)


def test_experts_float16():
    """The loss scale is in the router's losses too. (All experts chosen: in 16 bits others would
    be.)"""
    base = EXPERTS["topk"] | dict(num_experts=2, z_loss=3.0, capacity_factor=0.0, dropout=0.0)
    one = train(base=base, steps=1)
    half = train(base=base, steps=1, precision="fp16", mutate=small_loss_scale)
    for name in (name for name in one.gradients if "router" in name):
        expected = one.gradients[name]
        assert (half.gradients[name] - expected).abs().max() < 0.03 * expected.abs().max()


def test_gate_sees_the_routers_losses():
    """That they are there. (Twice would be the bug router-losses-counted-twice.)"""
    base = EXPERTS["topk"]
    one = train(base=base)
    differs(train(base=base, aux_loss=0.0), one)
    differs(train(base=base, z_loss=0.0), one)


def test_router_losses_are_means_over_the_global_batch():
    """Where nothing depends on the micro-batch (all experts are chosen), the z-loss does not
    either."""
    base = LLAMA | dict(num_experts=2, router="topk", router_topk=2, z_loss=1.0)
    same(train(base=base, micro_batch_size=2), train(base=base))
    differs(train(base=base, z_loss=0.0), train(base=base))


def test_random_layouts():
    """One of `python tests/random_layouts.py`."""
    random_layouts.check(random_layouts.draw(83))


@pytest.mark.parametrize("seed", [2, again(3), again(4)])
def test_random_layouts_of_experts_on_rows(seed):
    """A few of `python tests/random_layouts.py --rows`."""
    random_layouts.check(random_layouts.with_rows(random_layouts.draw(seed), seed))
