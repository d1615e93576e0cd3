"""FP8 training under every layout beside one device; bytes that are renewed, repeated and not kept;
histories in checkpoints; collectives, counted."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from parity import DATA, LLAMA, SMALL, again, check, differs, step, train_each, trainer_of

import fp8
import gpt
from base.float8 import E4M3, decode, encode_by_hand
from base.groups import Groups
from base.model_config import LINEARS, FieldError, MoEConfig
from course import ranks
from fp8 import INPUT, WEIGHT, Recipe, Scaling
from planning.counters import Collectives, saved_bytes

# --- layouts beside one device --------------------------------------------------------------------

# Blocks of 4: two tensor-parallel ranks have 28 of Llama's 56, four have 32 of GPT's 128. Scales of
# any size: with powers of two a wrong one often gives the same numbers.
RECIPES = {
    "current": dict(fp8="current", fp8_scales="any"),
    "delayed": dict(fp8="delayed", fp8_scales="any"),
    "block": dict(fp8="block", fp8_block=4, fp8_scales="any"),
}
ALL = tuple(RECIPES)
# scales are those of a micro-batch: 4 of 2 sequences each
IN_FP8 = dict(fp8_skip=0, micro_batch_size=2)
BASES = {
    # biases, tied embeddings
    "gpt": SMALL | IN_FP8,
    # grouped-query attention, a gate
    "llama": LLAMA | IN_FP8,
    # the first and the last layer are not in FP8
    "deep": SMALL | IN_FP8 | dict(num_layers=4, fp8_skip=1),
    # in every other layer, and two of four are in FP8
    "experts": SMALL | IN_FP8 | dict(num_experts=4, num_layers=4, expert_every=2),
    "lora": SMALL | IN_FP8 | dict(peft="lora"),
    "documents": LLAMA | IN_FP8 | dict(document_mask=True),
}
# the second has histories
STEPS = 2


SEQUENCE = dict(tp=2, sequence_parallel=True)
ZERO_BUBBLE = dict(pp=2, schedule="zb-h1")
EVERYTHING = ZERO_BUBBLE | SEQUENCE | dict(recompute="full")


@pytest.mark.parametrize(
    "base, world, cases",
    [
        again("gpt", 2, [(dict(tp=2), ("current", "block"))]),
        ("gpt", 2, [(SEQUENCE | dict(recompute="full"), ("delayed", "block"))]),
        ("gpt", 2, [(ZERO_BUBBLE, ("current", "block")), (dict(zero_stage=1), ("delayed",))]),
        ("gpt", 2, [(dict(zero_stage=3, recompute="full"), ("delayed", "block"))]),
        (
            *("llama", 2),
            [(SEQUENCE | dict(recompute="selective"), ALL), (dict(zero_stage=2), ("current",))],
        ),
        ("deep", 2, [(dict(pp=2, virtual_stages=2), ("delayed", "block"))]),
        ("deep", 4, [(EVERYTHING, ("delayed",))]),
        ("experts", 2, [(dict(ep=2), ("current",)), (SEQUENCE, ("delayed",))]),
        again("experts", 4, [(dict(tp=2, ep=2, recompute="full"), ("current",))]),
        ("lora", 2, [(dict(tp=2), ("current", "block")), (ZERO_BUBBLE, ("delayed",))]),
        again("documents", 2, [(SEQUENCE, ("current",))]),
    ],
    ids=str,
)
def test_equals_one_device(base, world, cases):
    """In float64. cases: layouts, and the recipes to run in each. (More layouts are drawn at random
    in test_compositions.py.)"""
    pairs = [(layout, recipe) for layout, recipes in cases for recipe in recipes]
    check(world, [layout | RECIPES[recipe] for layout, recipe in pairs], BASES[base], STEPS)


def test_a_recipe_changes_the_result():
    """And the micro-batch does: its tensors have other maxima."""
    variants = [{}, *RECIPES.values(), RECIPES["current"] | dict(micro_batch_size=8)]
    found = train_each(1, variants, STEPS, BASES["gpt"])
    for i, result in enumerate(found):
        for other in found[:i]:
            differs(result, other)


# --- on one rank ----------------------------------------------------------------------------------


def gradients(t) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for name, p in t.model.named_parameters()}


def as_bytes(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8)


def test_delayed_scales_do_not_depend_on_the_micro_batch():
    """Where there is a history. In the first step they are the current ones."""
    one, two, other = (
        trainer_of(**RECIPES["delayed"] | dict(fp8_skip=0, micro_batch_size=b)) for b in (8, 2, 4)
    )
    step(one, 1)
    for t in (two, other):
        t.fp8.load_state_dict(one.fp8.state_dict())
        assert torch.equal(t.fp8.history, one.fp8.history) and len(t.fp8.history) == 1
        t.forward_backward(1, DATA)
    for name, gradient in gradients(two).items():
        apart = (gradients(other)[name] - gradient).abs().max()
        # the gradient of a key's bias is zero
        assert apart <= 1e-10 * gradient.abs().max() or name.endswith("key.bias"), name
    for t in (two, other):
        t.update(1)
    apart = (two.fp8.history - other.fp8.history).abs().max()
    assert len(two.fp8.history) == 2 and apart <= 1e-6 * two.fp8.history.max()


@pytest.mark.parametrize("recipe", ALL)
def test_layers_and_matrices_in_fp8(recipe):
    """Maxima are those of the middle layers, of matrices that a GPT or its experts have, and of all
    operands."""
    flags = IN_FP8 | dict(num_layers=5, fp8_skip=1, expert_every=2, num_experts=4)
    t = trainer_of(**RECIPES[recipe] | flags)
    t.forward_backward(1, DATA)
    assert len(t.fp8.amax) == 5
    has_experts = [not isinstance(block.mlp, gpt.MLP) for block in t.model.blocks.values()]
    assert set(has_experts[1:4]) == {True, False}
    for layer in range(5):
        for m, (name, part) in enumerate(LINEARS.items()):
            seen = t.fp8.amax[layer, m]
            if layer in (0, 4) or name == "gate":
                assert not seen.any()
                continue
            # query, key and value read one input
            first = WEIGHT if name in ("key", "value") else INPUT
            assert (seen[first:] > 0).all(), (layer, name)
            assert t.fp8.by_row[layer, m] == (part == "mlp" and has_experts[layer])


@pytest.mark.parametrize("recipe", ALL)
def test_weight_bytes_are_made_once_a_step_of_the_new_weights(recipe, monkeypatch):
    t = trainer_of(**RECIPES[recipe] | IN_FP8, lr=0.05)
    made = Counter()

    def quantise(x, *rest, original=fp8.quantise):
        made[x.data_ptr()] += 1
        return original(x, *rest)

    monkeypatch.setattr(fp8, "quantise", quantise)
    weights = [block.mlp.up.weight for block in t.model.blocks.values()]
    before = []
    for number in (1, 2):
        made.clear()
        t.forward_backward(number, DATA)
        # four micro-batches, forward and backward
        assert [made[w.data_ptr()] for w in weights] == [1, 1]
        for i, w in enumerate(weights):
            scale, (q, again) = t.fp8.weights[w]
            # here no product reads it by columns
            assert again is q
            block = (4, 4) if recipe == "block" else None
            if recipe != "delayed":
                maxima = fp8.block_maxima(w.detach(), block)
                assert torch.equal(scale, fp8.scale_of(maxima, fp8.E4M3, False))
            right = fp8.quantise(w.detach(), scale, fp8.E4M3, block, False)
            assert torch.equal(as_bytes(q.q), as_bytes(right.q))
            if number == 1:
                before.append(as_bytes(q.q))
            else:
                assert not torch.equal(as_bytes(q.q), before[i])
        t.update(number)
        assert not t.fp8.weights


def test_weights_that_are_loaded_have_new_bytes(tmp_path):
    """Also after a forward that made those of the weights before."""
    t = trainer_of(**RECIPES["current"] | IN_FP8, lr=0.05)
    samples = DATA.batch(range(4))

    def losses() -> torch.Tensor:
        with torch.no_grad():
            return t.model(samples.tokens, samples.targets)

    step(t, 1)
    t.checkpoints.save(tmp_path, 1, 0, "")
    t.checkpoints.saver.wait()
    before = losses()
    step(t, 2)
    assert not torch.equal(losses(), before)
    t.checkpoints.load(tmp_path / "step-000001")
    assert torch.equal(losses(), before)


@pytest.mark.parametrize("recipe", ALL)
def test_zero_stage_3_keeps_no_bytes_of_weights(recipe):
    """Only scales, so that the bytes of a step are the same ones; or with --fp8-keep-bytes."""
    kept, found = [], []
    for flags in ({}, dict(zero_stage=3, fp8_keep_bytes=True), dict(zero_stage=3)):
        t = trainer_of(**RECIPES[recipe] | IN_FP8 | flags)
        t.forward_backward(1, DATA)
        assert len(t.fp8.weights) == 2 * 6
        kept.append({pair is not None for _, pair in t.fp8.weights.values()})
        found.append(gradients(t))
        assert all(torch.equal(found[0][name], g) for name, g in found[-1].items())
    assert kept == [{True}, {True}, {False}]


@pytest.mark.parametrize("recipe", ALL)
def test_backward_keeps_a_byte_of_each_element(recipe):
    """Of x, and a float32 for each scale; without FP8 two bytes."""
    n = 8
    layer = fp8.Layer(Scaling(Recipe(recipe, block=n), 1, "cpu"), ((0, 0), (0, 1)))
    weights = [torch.nn.Parameter(torch.randn(24, 32).bfloat16()) for _ in range(2)]
    x = torch.randn(2, 16, 32).bfloat16().requires_grad_()
    none = [None, None]
    kept = saved_bytes(lambda: fp8.linear(layer, x, *weights, *none), x, *weights)
    scales = x.numel() // n if recipe == "block" else 1
    assert kept == x.numel() + 4 * scales
    # x is not the memory of a parameter
    assert saved_bytes(lambda: torch.nn.functional.linear(x, weights[0]), *weights) == 2 * x.numel()


def gathers(x: torch.Tensor, group):
    """As the all-gather of sequence parallelism, of one rank: another tensor."""
    return x.clone


def test_a_frozen_layer_keeps_nothing():
    x = torch.randn(2, 16, 32, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(24, 32))
    whole = fp8.Layer(Scaling(Recipe(), 1, "cpu"), ((0, 0),))
    for layer in (whole, replace(whole, start_input=gathers)):
        for learns in (True, False):
            w.requires_grad_(learns)
            kept = saved_bytes(lambda layer=layer: fp8.linear(layer, x.view_as(x), w, None), w)
            assert bool(kept) == learns


def test_frozen_experts_keep_nothing():
    """But how many rows each has: 3 numbers of 8 bytes."""
    x = torch.randn(7, 12, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(3, 8, 12))
    counts = torch.tensor([3, 0, 4])
    layer = fp8.ExpertLayer(Scaling(Recipe(), 1, "cpu"), ((0, 5),), None, None)
    for learns, of_x in ((True, 4 * x.numel()), (False, 0)):
        w.requires_grad_(learns)
        kept = saved_bytes(lambda: fp8._GroupedLinear.apply(x, counts, layer, w), w)
        assert kept == of_x + 3 * 8


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(
    "learns, recorded, forward, backward", [(1, 1, 3, 2), (0, 1, 2, 1), (1, 0, 2, 0)]
)
def test_blocks_that_nobody_reads_are_not_made(
    learns, recorded, forward, backward, gathered, monkeypatch
):
    """In forward of x and W; in backward of dy for dx. For dW of x and dy once more, only where W
    learns: of x already in forward, unless it is gathered again."""
    made = count_bytes(monkeypatch, fp8)
    w = torch.nn.Parameter(torch.randn(24, 32), requires_grad=bool(learns))
    x = torch.randn(2, 16, 32, requires_grad=True)
    layer = fp8.Layer(Scaling(Recipe("block", block=8), 1, "cpu"), ((0, 0),))
    if gathered:
        layer = replace(layer, start_input=gathers)
    later = gathered and learns and recorded
    with torch.set_grad_enabled(bool(recorded)):
        (y,) = fp8.linear(layer, x, w, None)
    assert len(made) == forward - later
    if recorded:
        y.sum().backward()
    assert len(made) == forward + backward


@pytest.mark.parametrize("keep, forward, backward", [(True, 3, 1), (False, 2, 2)])
def test_bytes_of_experts(keep, forward, backward, monkeypatch):
    """Those of W for y and for dx are made together, or each for its product; and of x and dy."""
    made = count_bytes(monkeypatch, fp8)
    x = torch.randn(7, 12, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(3, 8, 12))
    scaling = Scaling(Recipe(), 1, "cpu", keep_bytes=keep)
    layer = fp8.ExpertLayer(scaling, ((0, 5),), None, None)
    (y,) = fp8._GroupedLinear.apply(x, torch.tensor([3, 0, 4]), layer, w)
    assert len(made) == forward
    y.sum().backward()
    assert len(made) == forward + backward


def count_bytes(monkeypatch, module) -> list:
    """The shapes of the tensors of which `module` makes bytes."""
    made = []

    def quantise(x, *rest, original=module.quantise):
        made.append(x.shape)
        return original(x, *rest)

    monkeypatch.setattr(module, "quantise", quantise)
    return made


# --- experts --------------------------------------------------------------------------------------


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """e4m3 with a scale for each row, in float64."""
    scale = (448 / x.abs().amax(1, keepdim=True)).float()
    return bytes_by_hand(x * scale.double()) / scale.double()


def bytes_by_hand(x: torch.Tensor) -> torch.Tensor:
    return decode(encode_by_hand(x, E4M3).view(E4M3.dtype), torch.float64)


def test_experts_by_hand():
    """Three experts, of which one has no rows. y and dx have a scale for each row of x and dy, and
    for each row of W, or each column; dw has no bytes."""
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(7, n, generator=g, dtype=torch.float64) for n in (12, 8))
    w = torch.nn.Parameter(torch.randn(3, 8, 12, generator=g, dtype=torch.float64))
    scaling = Scaling(Recipe(power_of_two=False), 1, "cpu")
    layer = fp8.ExpertLayer(scaling, ((0, 5),), None, None)
    x_in = x.clone().requires_grad_()
    counts = torch.tensor([3, 0, 4])
    (y,) = fp8._GroupedLinear.apply(x_in, counts, layer, w)
    dx, dw = torch.autograd.grad(y, (x_in, w), dy)
    for e, rows in ((0, slice(0, 3)), (2, slice(3, 7))):
        w_e = w[e].detach()
        expected = by_rows(x[rows]) @ by_rows(w_e).t()
        assert torch.allclose(y[rows], expected, rtol=0, atol=1e-6 * expected.abs().max())
        expected = by_rows(dy[rows]) @ by_rows(w_e.t()).t()
        assert torch.allclose(dx[rows], expected, rtol=0, atol=1e-6 * expected.abs().max())
        assert torch.allclose(dw[e], dy[rows].t() @ x[rows], rtol=1e-12)
    assert not dw[1].any()
    assert scaling.amax[0, 5].tolist() == pytest.approx([m.abs().max().item() for m in (x, w, dy)])


# --- histories ------------------------------------------------------------------------------------


def test_a_delayed_scale_by_hand():
    """448 over the largest of the last steps, here two; then what is larger saturates."""
    scaling = Scaling(Recipe("delayed", history=2), 1, "cpu")

    def largest_value(amax: float) -> float:
        x = torch.full((1, 4), amax)
        (q,) = scaling.quantise([x], [(0, 0)], INPUT, None, None)
        return q.values(torch.float32)[0, 0].item()

    # its own maximum, for there is no history
    assert largest_value(1.75) == 1.75
    scaling.end_step()
    # 448 / 1.75 = 256: up to 1.75
    assert largest_value(7.0) == 1.75
    scaling.end_step()
    assert scaling.report[1, 0, 0, INPUT] == 1
    assert scaling.warnings(scaling.report) == {"fp8_saturated": ["blocks.0.attention.query input"]}
    # 448 / 7 = 64
    assert largest_value(100.0) == 7.0
    scaling.end_step()
    assert scaling.history[:, 0, 0, INPUT].tolist() == [100.0, 7.0]
    # 448 / 100 = 4.48, and 4 below it
    assert largest_value(1000.0) == 112.0


def test_experts_do_not_saturate():
    """Their scales are those of now, also beside a history; those of the layer between are not."""
    flags = IN_FP8 | dict(num_layers=2, expert_every=2, num_experts=4, lr=0.0)
    t = trainer_of(**RECIPES["delayed"] | flags)
    step(t, 1)
    has_experts = [t.fp8.by_row[n].any().item() for n in range(2)]
    assert set(has_experts) == {True, False}
    with torch.no_grad():
        for block in t.model.blocks.values():
            block.mlp.up.weight *= 100
    step(t, 2)
    saturated = t.fp8.report[1, :, list(LINEARS).index("up"), WEIGHT]
    assert saturated.tolist() == [float(not experts) for experts in has_experts]


# --- collectives ----------------------------------------------------------------------------------


def small_collectives(rank, flags: list[dict]) -> list[list[Counter]]:
    """Of each of two steps, all-reduces by group and bytes."""
    found = []
    for variant in flags:
        groups = Groups.make("cpu", 2, 2, 1)
        t = trainer_of(SMALL | IN_FP8, groups, tp=2, **variant)
        of_steps = []
        for number in (1, 2):
            with Collectives() as noted:
                step(t, number)
            of_steps.append(noted.counted(groups))
        found.append(of_steps)
    return found


def test_collectives_of_each_recipe():
    """What FP8 adds to a step of L = 2 layers and 4 micro-batches on two tensor-parallel ranks.

    current: a layer has two matrices whose input is in parts, and two inputs whose matrices give
    gradients in parts: of query, key and value, 3 numbers, and of the MLP. And each of 6 weights,
    once. delayed: the same in its first step, then nothing. All: the step's maxima, once, over all
    ranks, which these two are.
    """
    off, *recipes = ranks.run(small_collectives, 2, [{}, *RECIPES.values()])[0]
    # what saturated is beside each maximum
    maxima = Counter({("all-reduce", "tp", 2 * 4 * 2 * len(LINEARS) * 3): 1})
    agreed = Counter({("all-reduce", "tp", 4): 2 * (4 * 3 + 6), ("all-reduce", "tp", 12): 2 * 4})
    expected = {
        "current": (agreed + maxima, agreed + maxima),
        "delayed": (agreed + maxima, maxima),
        "block": (maxima, maxima),
    }
    for recipe, found in zip(RECIPES, recipes):
        for number in (0, 1):
            assert off[number] - found[number] == Counter(), recipe
            assert found[number] - off[number] == expected[recipe][number], (recipe, number)


# --- refusals -------------------------------------------------------------------------------------


def test_experts_have_no_blocks_to_cut():
    """But layers 0 and 2 have, where only every second one has experts."""
    model = MoEConfig(
        num_layers=4, hidden_size=32, num_heads=4, ffn_hidden_size=56, num_experts=4, expert_every=1
    )
    fp8.check(model, Recipe("block", block=16), 0, t=2)
    with pytest.raises(FieldError, match=r"28 of ffn_hidden_size"):
        fp8.check(replace(model, expert_every=2), Recipe("block", block=16), 0, t=2)
    with pytest.raises(FieldError, match=r"16 of hidden_size"):
        fp8.check(model, Recipe("block", block=32), 0, t=2)


def test_a_late_call_is_refused():
    """A second one, and one after adapters, whose place FP8 would take."""
    t = trainer_of(**RECIPES["current"] | IN_FP8)
    with pytest.raises(ValueError, match="in FP8 already"):
        fp8.apply(t.model, t.fp8, 0)
    t = trainer_of(peft="lora")
    with pytest.raises(ValueError, match=r"fp8\.apply comes before adapter_layers\.apply"):
        fp8.apply(t.model, Scaling(Recipe(), 2, "cpu"), 0)
