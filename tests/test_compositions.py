"""Every layout gives the loss, the gradients and the parameters of one device."""

import re

import pytest
import random_layouts
import torch
from parity import (
    LLAMA,
    SMALL,
    again,
    check,
    differs,
    gates,
    needs_compiler,
    put_together,
    same,
    train,
    train_each,
    without_cpp,
)

import generate
import moe
import optimizer
from course import mutations, ranks
from course.parity import Run, first_difference
from course.synthetic import Ragged
from course.training_commands import config_of
from optimizer import LossScaler

# --- the gate -------------------------------------------------------------------------------------


def each(layouts: list[dict], **flags) -> list[dict]:
    return [layout | flags for layout in layouts]


FULL, SELECTIVE = dict(recompute="full"), dict(recompute="selective")
SEQUENCE = dict(tp=2, sequence_parallel=True)
# 3 and 4 ranks divide hardly a size in the model
STAGES = [dict(zero_stage=stage) for stage in (1, 2, 3)]
TWELVE = dict(global_batch_size=12)
SHARDED = [
    *each(STAGES, micro_batch_size=1),
    # which gathers again what it needs again
    dict(zero_stage=3, micro_batch_size=1, **FULL),
    dict(zero_stage=3, micro_batch_size=2, **SELECTIVE),
]
# the third has stages of no layer, the last a rank without one
OF_TWO = [
    dict(schedule="zb-h1"),
    dict(schedule="gpipe", **FULL),
    dict(virtual_stages=2, layer_split=[0, 0, 1, 1]),
    dict(layer_split=[2, 0]),
]

# A vocabulary that no t divides, heads that 4 divides, grouped-query attention. For GPT the
# embeddings are tied.
TENSOR = SMALL | dict(vocab_size=257)
LLAMA_TENSOR = LLAMA | dict(vocab_size=257, num_heads=8, num_kv_heads=4)
WITH_RECOMPUTATION = [
    dict(sequence_parallel=sequence, recompute=recompute)
    for sequence in (False, True)
    for recompute in ("none", "selective", "full")
]
# partly, and with fused attention (no dropout)
PARTLY = [dict(recompute_layers=1, **FULL), SELECTIVE | dict(dropout=0.0), FULL | dict(dropout=0.0)]

SIX, TWELVE_LAYERS = dict(num_layers=6), dict(num_layers=12)
TWO = [
    dict(schedule="gpipe"),
    dict(schedule="1f1b"),
    dict(schedule="zb-h1"),
    dict(virtual_stages=3),
    dict(layer_split=[6, 0], schedule="zb-h1"),
    dict(layer_split=[2, 0, 3, 1], virtual_stages=2),
]
# three chunks a rank
FOUR = [dict(virtual_stages=3), dict(layer_split=[2, 4, 4, 2], schedule="zb-h1")]

CASES = {
    "accumulation": (SMALL, 1, [dict(micro_batch_size=1)]),
    "accumulation of llama": (LLAMA, 1, [dict(micro_batch_size=4)]),
    "data": (LLAMA, 2, [dict()]),
    "data and accumulation": (SMALL, 2, [dict(micro_batch_size=1)]),
    "zero": (SMALL | TWELVE, 2, SHARDED),
    "zero on 3": (SMALL | TWELVE, 3, SHARDED[:3]),
    "zero over sequence": (LLAMA, 4, each(STAGES[:2], **SEQUENCE, **SELECTIVE)),
    "zero over sequence, whole": (SMALL, 4, [SEQUENCE | FULL | STAGES[2]]),
    "zero over pipelines": (SMALL, 4, each(OF_TWO, pp=2, zero_stage=3)),
    "zero over all": (SMALL, 8, [SEQUENCE | SELECTIVE | STAGES[2] | dict(pp=2, schedule="zb-h1")]),
    "tensor": (TENSOR, 2, each(WITH_RECOMPUTATION[::2], tp=2, micro_batch_size=4)),
    "tensor on 4": (TENSOR, 4, each(WITH_RECOMPUTATION[-1:], tp=4, micro_batch_size=4)),
    "recompute": (SMALL, 1, each(PARTLY, micro_batch_size=4)),
    "recompute over sequence": (LLAMA_TENSOR, 2, [SEQUENCE | flags for flags in PARTLY]),
    "pipeline": (TENSOR | SIX, 2, each(TWO, pp=2)),
    "pipeline on 4": (TENSOR | TWELVE_LAYERS, 4, each(FOUR, pp=4)),
}
MORE_CASES = {
    "zero, one micro-batch": (SMALL | TWELVE, 2, STAGES),
    "more tensor": (TENSOR, 2, each(WITH_RECOMPUTATION[1::2], tp=2, micro_batch_size=4)),
}

# DeepSeek's experts, joined forwards and backwards, messages in parts, and a batch that grows, with
# adapters, FP8 and the compiler
LORA = dict(command="adapters.py", peft="lora", lora_rank=2)
FP8 = dict(fp8="current")
DEEPSEEK = LLAMA | dict(num_experts=4, router="bias", router_topk=2, num_layers=4)
DEEPSEEK |= dict(expert_groups=2, topk_groups=1, expert_ffn_size=16, shared_ffn_size=24)
TOPK = SMALL | dict(num_experts=4, router="topk", router_topk=2, num_layers=4)
V = dict(pp=2, virtual_stages=2, micro_batch_size=1)
JOINED = V | dict(ep=2, ep_comm_overlap=True)
IN_PARTS = dict(tp=2, pp=2, micro_batch_size=1)
GROWING = SMALL | dict(rampup_batch_size=[4, 2, 8], num_layers=4)
MORE_CASES |= {
    "deepseek, lora": (
        DEEPSEEK | LORA,
        2,
        each([SEQUENCE, dict(ep=2), dict(pp=2), STAGES[2]], micro_batch_size=1),
    ),
    "joined, lora": (TOPK | LORA, 4, [JOINED, JOINED | dict(schedule="dualpipe-v")]),
    "in parts, experts": (TOPK, 8, [IN_PARTS | dict(ep=2)]),
    "in parts, fp8": (SMALL | FP8, 4, [IN_PARTS]),
    "growing, lora": (GROWING | LORA, 2, [dict(pp=2, micro_batch_size=1), STAGES[2]]),
}


@gates(CASES, MORE_CASES)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


def test_float32():
    """Also with gradients that are sums of 16-bit numbers on their way: as near as 8 bits of
    mantissa are."""
    base = SMALL | dict(precision="fp32")
    check(2, [dict(tp=2), SEQUENCE | FULL], base, 1, 1e-5)
    variants = [dict(zero_stage=stage, micro_batch_size=2) for stage in (0, 1, 2, 3)]
    check(2, variants, base, 1, 1e-5)
    one = train(base=base, steps=1)
    for result in train_each(2, variants, 1, base, reduce_dtype="bf16"):
        differs(result, one, 1e-4)
        same(result, one, 2e-2)


ON_A_GPU = [
    (1, SMALL, dict()),
    (1, SMALL, FULL),
    (2, SMALL, dict(tp=2)),
    (2, SMALL, SEQUENCE | SELECTIVE),
    *[(2, SMALL, stage) for stage in (STAGES[0], SHARDED[1], STAGES[2] | FULL)],
    *[(1, "experts", dict()), (1, "experts", FULL), (2, "experts", dict(ep=2))],
    (2, "experts", SEQUENCE),
]


@pytest.mark.gpu
@pytest.mark.parametrize("world, base, flags", ON_A_GPU, ids=str)
def test_on_a_gpu(world, base, flags):
    """The CPU's loss and gradients; ranks share the GPU. Sinkhorn's iteration ends elsewhere on a
    GPU (moe.py), so its layouts are held to one GPU."""
    layout = [flags | dict(device="cuda")]
    if base != "experts":
        return check(world, layout, base)
    check(world, layout, EXPERTS["topk"])
    check(world, layout, EXPERTS["sinkhorn"], device="cuda")


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


MUON = SMALL | dict(optimizer="muon")
COMPILED = [
    (2, SMALL | dict(num_layers=4), V | dict(schedule="zb-v")),
    (2, SMALL | dict(num_layers=4), V | dict(schedule="dualpipe-v")),
    (4, SMALL, IN_PARTS),
    (2, MUON, dict(zero_stage=2)),
    (2, MUON, dict(tp=2)),
    (2, GROWING, dict(pp=2, micro_batch_size=1)),
]


@needs_compiler
@pytest.mark.repetition
@pytest.mark.parametrize("world, base, layout", COMPILED)
def test_compiled_layouts(world, base, layout):
    compiled = train(world, steps=2, base=base, mutate=without_cpp, compile=True, **layout)
    same(compiled, train(steps=2, base=base))


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
    or course/verify.py names another tensor than the one where it begins."""
    bug = BUGS[name]
    flags = bug.layouts[layout]
    # what is wrong after the update shows in the second step
    steps = 2 if re.match("step 2|step 1: updated", bug.first) else 1
    broken = train(bug.world, steps, trace=True, mutate=bug.apply, **flags)
    one = train(steps=steps, trace=True, **mutations.of_one_device(flags))
    differs(broken, one)
    first = first_difference(broken, one)
    assert re.match(bug.first, first.label), first


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


ON_ROWS = dict(num_experts=4, micro_batch_size=2, command="sft.py", data=["-"])
LOSSES = dict(aux_loss=1.0, z_loss=0.1)
# rows of unequal lengths, which cp and sequence parallelism pad further
RAGGED = {
    "sinkhorn of rows": SMALL | ON_ROWS,
    "rows": LLAMA | ON_ROWS | dict(num_kv_heads=4, router="topk", router_topk=2, **LOSSES),
}
RAGGED["capacity"] = RAGGED["rows"] | dict(capacity_factor=1.0)


ALL_IN_ONE = SEQUENCE | FULL | dict(pp=2, ep=2, zero_stage=3)


@pytest.mark.parametrize(
    "base, world, layouts",
    [
        ("sinkhorn", 1, [FULL, SELECTIVE]),
        ("sinkhorn", 2, [dict(), dict(ep=2), dict(tp=2), dict(pp=2)]),
        ("topk", 2, [dict(ep=2), SEQUENCE]),
        (
            "sinkhorn",
            4,
            [
                SEQUENCE | dict(ep=2),
                dict(pp=2, ep=2, schedule="zb-h1"),
                FULL | dict(ep=4, zero_stage=3),
            ],
        ),
        ("sinkhorn", 8, [ALL_IN_ONE]),
        ("topk", 4, [dict(pp=2, virtual_stages=2, ep=2)]),
        ("rows", 2, [dict(cp=2), SEQUENCE | FULL]),
        ("sinkhorn of rows", 2, [SEQUENCE]),
        ("capacity", 4, [SEQUENCE | dict(ep=2, zero_stage=2)]),
    ],
    ids=str,
)
def test_experts(base, world, layouts):
    """On rows, routers see no padding."""
    check(world, layouts, (EXPERTS | RAGGED)[base])


def route_padding():
    forward = moe.MoE.forward
    moe.MoE.forward = lambda layer, x, context: forward(layer, x, context._replace(real=None))


def count_padding():
    Ragged.positions = lambda self, samples: len(samples) * self.s


@pytest.mark.parametrize("mutate", [route_padding, count_padding])
def test_padding_in_a_router_is_seen(mutate):
    base = RAGGED["rows"]
    one = train(base=base, steps=1)
    differs(train(2, base=base, steps=1, mutate=mutate, cp=2), one)


def after_a_step(rank, world, flags):
    """(loss of held-out rows, texts) of a model with experts, after a step on padded rows."""
    run = Run(world, config_of(flags))
    t = run.trainer
    t.forward_backward(1, run.dataset)
    t.update(1)
    held_out = Ragged(14, t.model_config.vocab_size, 1)
    loss = t.task.evaluate(held_out, 6)
    return loss, generate.generate(t.model, [[1, 2, 3], [4]], 8, seed=1)


@pytest.mark.parametrize(
    "world, layout",
    [(2, dict(pp=2, virtual_stages=2)), (2, dict(tp=2)), again(2, dict(pp=2)), again(2, {})],
)
def test_padding_of_a_step_is_forgotten(world, layout):
    """What routers left out of a batch in training they do not leave out of the next: held-out
    losses and texts are those of one device. (Each chunk of virtual stages had the mask of another
    chunk's batch.)"""
    base = RAGGED["rows"] | dict(num_layers=4, seq_length=16)
    ((expected, texts),) = ranks.run(after_a_step, 1, 1, base)
    for loss, found in ranks.run(after_a_step, world, world, base | layout):
        assert abs(loss / expected - 1) < 1e-10
        assert found == texts


def test_experts_float32():
    layouts = [dict(ep=2, zero_stage=3), SEQUENCE]
    check(2, layouts, EXPERTS["topk"] | dict(precision="fp32"), 1, 1e-5)


@needs_compiler
@pytest.mark.repetition
def test_experts_compiled():
    """And stage 3."""
    base = EXPERTS["sinkhorn"] | dict(num_layers=1)
    flags = dict(ep=2, zero_stage=3, compile=True, mutate=without_cpp)
    same(train(2, base=base, steps=1, **flags), train(base=base, steps=1))


def small_loss_scale():
    optimizer.LossScaler = lambda: LossScaler(2.0**12)


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


MORE = range(200, 208)
WITH_CP = ("", " --families", " --peft", " --fp8", " --families --fp8")
# a few of `python tests/random_layouts.py FLAGS`
DRAWN = [
    ("", 83),
    ("--rows", 2),
    # IA3 in experts, ZeRO 3, expert, tensor and sequence parallelism and recomputation
    ("--peft --fp8", 105),
    *[again("", seed) for seed in range(200, 224)],
    *[again("--rows", seed) for seed in (3, 4, *MORE)],
    *[again(f"--cp{flags}", seed) for flags in WITH_CP for seed in MORE],
    *[again("--peft", seed) for seed in (2, 5, *MORE)],
    *[again("--fp8", seed) for seed in (2, 5, 11, 26, 83, *MORE)],
    *[again("--muon", seed) for seed in MORE],
    *[again("--rampup", seed) for seed in MORE],
    *[again("--cp --families --rampup", seed) for seed in MORE],
    *[again(f"--cp{flags} --muon", seed) for flags in (" --families", " --fp8") for seed in MORE],
    *[again("--peft --fp8", seed) for seed in (24, 43, 91, 102, 255)],
]


@pytest.mark.parametrize("flags, seed", DRAWN)
def test_random_layouts(flags, seed):
    random_layouts.check(random_layouts.drawn(flags, seed))
