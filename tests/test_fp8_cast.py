"""base/csrc/fp8_cast.cu: bytes, scales and maxima are those of PyTorch's operations, to the last
bit.

The kernels run on a GPU, or their source in an emulator on the CPU (cuda_on_cpu.py).
"""

from types import SimpleNamespace

import pytest
import test_kernels
import torch
from parity import DATA, LLAMA, SMALL, again, differs, same, trainer_of
from parity import train as train_ranks
from test_kernels import PLACES, launched

import fp8
import kernels
from base import fp8_cast
from base.float8 import E4M3, E5M2
from fp8 import GRADIENT, INPUT, Recipe, Scaling

# the fixture: a device, after the kernels there or the emulator has been selected
place = test_kernels.place
PLACE = (0, 0)
in_each_place = pytest.mark.parametrize("place", PLACES, indirect=True)


def values(m: int, k: int, dtype, device) -> torch.Tensor:
    """Of all sizes: subnormal bytes, those that round to zero, and zeros with both signs."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator)
    x = x * torch.exp2(torch.randint(-40, 6, (m, k), generator=generator))
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-40, -1e-40])
    return x.to(device, dtype)


def scalings(recipe: Recipe, device) -> list[Scaling]:
    """One that casts in kernels, and one that does not."""
    pair = [Scaling(recipe, 1, device), Scaling(recipe, 1, device)]
    pair[0].fused = True
    return pair


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    "dtype, operand, power_of_two",
    [
        (torch.bfloat16, INPUT, True),
        (torch.bfloat16, GRADIENT, False),
        (torch.float32, INPUT, False),
        (torch.float32, GRADIENT, True),
        again(torch.bfloat16, INPUT, False),
        again(torch.bfloat16, GRADIENT, True),
        again(torch.float16, INPUT, False),
    ],
    ids=str,
)
@in_each_place
def test_bytes_scales_and_maxima(place, dtype, operand, power_of_two):
    """By both recipes, for tiles that are whole and not. In the second step of `delayed` values
    have grown and saturate."""
    to = E5M2 if operand == GRADIENT else E4M3
    for m, k in ((16, 16), (80, 144)):
        x = values(m, k, dtype, place)
        for name in ("current", "delayed"):
            pair = scalings(Recipe(name, power_of_two), place)
            for factor in (1, 8):
                launched.clear()
                ours, theirs = (s.both([x * factor], [PLACE], operand, None)[0] for s in pair)
                assert launched == ["fp8_maximum", "fp8_cast"]
                by_rows, by_columns = ours
                assert by_rows.q.dtype == by_columns.q.dtype == to.dtype
                assert by_rows.q.is_contiguous() and by_columns.q.t().is_contiguous()
                for one in ours:
                    assert equal_bytes(one.q, theirs[0].q) and one.inverse == theirs[0].inverse
                for scaling in pair:
                    scaling.end_step()
                assert torch.equal(pair[0].report, pair[1].report)
                assert torch.equal(pair[0].history, pair[1].history)


@in_each_place
def test_cublas_can_read_every_scale(place):
    """At an address that 16 bytes divide: it refuses a product with another."""
    tensors = [values(16, 32, torch.bfloat16, place) for _ in range(3)]
    scaling, _ = scalings(Recipe("current"), place)
    for pair in scaling.both(tensors, [PLACE] * 3, GRADIENT, None):
        assert all(one.inverse.data_ptr() % 16 == 0 for one in pair)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@in_each_place
def test_what_is_not_finite(place, recipe, bad):
    """Whatever a byte is then, all that is computed with it is NaN. The log names the tensor."""
    pair = scalings(Recipe(recipe), place)
    x = values(80, 16, torch.bfloat16, place)
    for scaling in pair:
        scaling.both([x], [PLACE], INPUT, None)
        scaling.end_step()
    # in the last tile, whose block is not the one that writes 1 / scale of finite tensors
    x[-1, -1] = bad
    for scaling in pair:
        for one in scaling.both([x], [PLACE], INPUT, None)[0]:
            assert one.values(torch.float32).isnan().all()
        scaling.end_step()
        assert scaling.report[0, 0, 0, INPUT] == torch.inf


@in_each_place
def test_a_history_of_zeros(place):
    """The maximum now counts, as in the first step."""
    pair = scalings(Recipe("delayed"), place)
    x = values(32, 32, torch.bfloat16, place)
    for factor in (0, 1):
        ours, theirs = (s.both([x * factor], [PLACE], GRADIENT, None)[0][0] for s in pair)
        assert equal_bytes(ours.q, theirs.q) and ours.inverse == theirs.inverse
        for scaling in pair:
            scaling.end_step()
    assert len(pair[0].history) == 2 and ours.q.float().any()


@in_each_place
def test_a_known_maximum_costs_no_reading(place):
    x = values(32, 32, torch.bfloat16, place)
    for known, found in ((3.0, 0.0), (0.0, x.abs().max().item())):
        amax = torch.zeros(1, device=place)
        fp8_cast.fp8_maximum(x, amax, torch.full_like(amax, known))
        assert amax.item() == found


@pytest.mark.parametrize("recipe, agreed", [("current", 2), ("delayed", 1)])
@in_each_place
def test_ranks_agree_on_a_maximum(place, recipe, agreed, monkeypatch):
    """As by PyTorch's operations: of all tensors together, here with a rank whose maxima are three
    times those of this one; not where a history knows them."""
    sizes = []

    def all_reduce(maxima, op, group):
        sizes.append(maxima.numel())
        maxima *= 3

    ranks = SimpleNamespace(all_reduce=all_reduce, ReduceOp=torch.distributed.ReduceOp)
    monkeypatch.setattr(fp8, "dist", ranks)
    tensors = [values(m, 32, torch.bfloat16, place) for m in (16, 48)]
    pair = scalings(Recipe(recipe), place)
    for _ in range(2):
        both = [s.both(tensors, [PLACE, (0, 1)], GRADIENT, "group") for s in pair]
        for (ours, _), (theirs, _) in zip(*both):
            assert equal_bytes(ours.q, theirs.q) and ours.inverse == theirs.inverse
        pair[0].amax.copy_(pair[1].amax)
        for scaling in pair:
            scaling.end_step()
    assert sizes == [2, 2] * agreed


@in_each_place
def test_bytes_that_nobody_reads_are_not_made(place):
    (scaling, _) = scalings(Recipe(), place)
    x = values(16, 32, torch.bfloat16, place)
    by_rows, nothing = scaling.both([x], [PLACE], INPUT, None, (True, False))[0]
    assert nothing is None and by_rows.q.shape == (16, 32)
    nothing, by_columns = scaling.both([x], [PLACE], INPUT, None, (False, True))[0]
    assert nothing is None and equal_bytes(by_columns.q, by_rows.q)


@in_each_place
def test_who_casts(place):
    """PyTorch's operations: blocks, odd sizes, float64, and where fused kernels are off."""
    x = values(16, 32, torch.bfloat16, place)
    by_blocks = Recipe("block", block=16)
    others = [(by_blocks, x), (Recipe(), x[:15]), (Recipe(), x[:, :24]), (Recipe(), x.double())]
    for recipe, other in others:
        launched.clear()
        ours, theirs = (s.both([other], [PLACE], INPUT, None)[0] for s in scalings(recipe, place))
        assert not launched and all(equal_bytes(a.q, b.q) for a, b in zip(ours, theirs))
    Scaling(Recipe(), 1, place).both([x], [PLACE], INPUT, None)
    assert not launched


@pytest.mark.parametrize(
    "recipe, keep",
    [("current", True), ("delayed", False), again("current", False), again("delayed", True)],
)
@in_each_place
def test_a_layer(place, recipe, keep, monkeypatch):
    """Two steps of two micro-batches: outputs and gradients of two weights that share their
    input. Each weight is cast once a step, and by rows and by columns together; without
    `keep_bytes` for each product, in the one order that it reads."""
    cast_of = []

    def cast(x, *rest, original=fp8_cast.cast):
        cast_of.append(x.data_ptr())
        return original(x, *rest)

    monkeypatch.setattr(fp8_cast, "cast", cast)
    results = []
    for scaling in scalings(Recipe(recipe), place):
        scaling.keep_bytes = keep
        generator = torch.Generator().manual_seed(0)

        def new(*shape, generator=generator):
            return torch.randn(shape, generator=generator).to(place, torch.bfloat16)

        weights = [torch.nn.Parameter(new(16, 32)) for _ in range(2)]
        layer = fp8.Layer(scaling, (PLACE, (0, 1)))
        found = []
        for _ in range(2):
            cast_of.clear()
            for _ in range(2):
                x = new(2, 8, 32).requires_grad_()
                ys = fp8.linear(layer, x, *weights, None, None)
                torch.autograd.backward(ys, [new(*y.shape) for y in ys])
                found += [*ys, x.grad]
            if scaling.fused:
                counts = [cast_of.count(w.data_ptr()) for w in weights]
                assert counts == [1 if keep else 4] * 2
                assert len(cast_of) == sum(counts) + 2 * 3
            scaling.end_step()
            found += [w.grad for w in weights] + [scaling.report]
        results.append(found)
    assert all(map(torch.equal, *results))


# --- maxima that are noted before the cast --------------------------------------------------------


@in_each_place
def test_operations_note_the_maximum_of_what_they_give(place):
    """And NaN as infinity. Without a note: a copy, a view, and what has changed since."""
    x = values(80, 144, torch.bfloat16, place)
    w = torch.full_like(x[0], 0.5)
    grads = {}
    for bad in (None, torch.nan):
        if bad is not None:
            x[-1, -1] = bad
        gate, up = (factor * x for factor in (1, 3))
        gate, up = gate.requires_grad_(), up.requires_grad_()
        gate.register_hook(lambda grad: grads.update(gate=grad))
        up.register_hook(lambda grad: grads.update(up=grad))
        y = kernels.swiglu(gate, up, notes=True)
        y.backward(x)
        norm = kernels.add_norm(x, None, w, w, 1e-5, notes=True)[1]
        for given in (y, norm, *grads.values()):
            amax = given.float().abs().amax().nan_to_num(torch.inf, torch.inf)
            assert fp8_cast.noted_maximum(given) == amax
            assert fp8_cast.noted_maximum(fp8_cast.as_matrix(given)) == amax
    for other in (y.clone(), y.view(-1), kernels.swiglu(gate, up), y.detach().mul_(1), y):
        assert fp8_cast.noted_maximum(other) is None


LAYER = LLAMA | dict(
    num_layers=1,
    hidden_size=64,
    num_kv_heads=4,
    ffn_hidden_size=64,
    dropout=0.0,
    global_batch_size=2,
    precision="fp32",
    fp8="current",
    fp8_skip=0,
    fp8_scales="any",
)


def without_notes() -> None:
    test_kernels.swapped_and_emulated()
    kernels.note_maximum = lambda x, amax: None


def with_notes_of_a_half() -> None:
    """A mutation: a maximum is that of the first half of a tensor."""
    test_kernels.swapped_and_emulated()

    def note(x, amax, original=fp8_cast.note_maximum):
        original(
            x, x.detach().flatten()[: x.numel() // 2].abs().amax().view(1) if len(amax) else amax
        )

    kernels.note_maximum = note


@test_kernels.by_emulator
@pytest.mark.parametrize(
    "world, flags",
    [
        (2, dict(tp=2, recompute="full")),
        again(2, dict(tp=2, sequence_parallel=True)),
        again(1, dict(fp8="delayed")),
    ],
    ids=str,
)
def test_notes_change_no_bit(world, flags):
    """A run whose casts take the maxima that were noted, and one that finds each by reading."""
    test_kernels.emulated(torch.float32)
    found = train_ranks(world, 1, without_notes, LAYER, **flags)
    same(train_ranks(world, 1, test_kernels.swapped_and_emulated, LAYER, **flags), found, 0)
    if flags.get("fp8") != "delayed":
        differs(train_ranks(world, 1, with_notes_of_a_half, LAYER, **flags), found)


@test_kernels.by_emulator
def test_launches_of_a_layer(monkeypatch):
    """Of eleven casts of inputs and gradients, five need no reading of their own for the maximum:
    two norms, SwiGLU, and both of its gradients."""
    test_kernels.emulate(monkeypatch.setattr)
    monkeypatch.setattr(kernels, "apply", lambda model, *_: kernels.swap(model))
    trainer = trainer_of(LAYER)
    launched.clear()
    trainer.forward_backward(1, DATA)
    weights = 7
    assert launched.count("fp8_cast") == 11 + weights
    assert launched.count("fp8_maximum") == 6 + weights


@pytest.mark.parametrize(
    "flag, refused, fused",
    [("auto", None, True), ("auto", "no nvcc", False), ("off", None, False)],
)
def test_when_a_run_has_them(flag, refused, fused, monkeypatch):
    """Where it has the other kernels."""
    monkeypatch.setattr(kernels, "apply", lambda *args: refused)
    assert trainer_of(SMALL, fp8="current", fp8_skip=0, kernels=flag).fp8.fused == fused
