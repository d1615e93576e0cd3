"""FP8 numbers: bytes by hand and PyTorch's, scales and blocks by hand, products beside float64,
torch._scaled_mm and the library torchao."""

import math

import pytest
import torch

import fp8
from base import float8
from base.float8 import E4M3, E5M2, LEAST_AMAX, Quantised, blocks_of, quantise, scale_of
from fp8 import GRADIENT, INPUT, WEIGHT, Recipe, Scaling

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
each_format = pytest.mark.parametrize("to", FORMATS.values(), ids=list(FORMATS))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers times powers of two, so that some are subnormal as bytes."""
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 7, shape, generator=g)
    return torch.ldexp(torch.randn(shape, generator=g), exponents).to(dtype)


def bytes_of(x: torch.Tensor, to: float8.Format) -> torch.Tensor:
    """By PyTorch, after clamping."""
    return x.clamp(-to.largest, to.largest).to(to.dtype).view(torch.uint8)


# --- bytes ----------------------------------------------------------------------------------------


@each_format
def test_all_256_bytes(to):
    """decode_by_hand, the table and PyTorch."""
    every = torch.arange(256, dtype=torch.uint8).view(to.dtype)
    by_hand = torch.tensor([float8.decode_by_hand(byte, to) for byte in range(256)])
    assert torch.equal(by_hand.nan_to_num(9e9), every.float().nan_to_num(9e9))
    assert torch.equal(by_hand.signbit()[:127], torch.zeros(127, dtype=torch.bool))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        decoded = float8.decode(every, dtype)
        assert decoded.dtype == dtype
        assert torch.equal(decoded.double().nan_to_num(9e9), by_hand.double().nan_to_num(9e9))
    finite = by_hand[by_hand.isfinite()]
    assert finite.max() == to.largest and len(finite) == {"e4m3": 254, "e5m2": 248}[to.name]


def test_a_byte_by_hand():
    """1.1 is 1 + 0.8 / 8: the nearest is 1 + 1 / 8 of e4m3, and 1 + 0 / 4 of e5m2."""
    x = torch.tensor([1.1, -1.1, 0.0, -0.0, 1000.0, 2.0**-9, 2.0**-10, 3 * 2.0**-11])
    # s eeee mmm, bias 7. 2^-9 is the smallest subnormal; half of it is a tie, and even is 0
    e4m3 = [0b0_0111_001, 0b1_0111_001, 0, 128, 0b0_1111_110, 1, 0, 1]
    # s eeeee mm, bias 15: 1000 is 2^9 · 1.95, and up to 2^10
    e5m2 = [0b0_01111_00, 0b1_01111_00, 0, 128, 0b0_11001_00, 0b0_00110_00, 0b0_00101_00]
    assert float8.encode_by_hand(x, E4M3).tolist() == e4m3
    assert float8.encode_by_hand(x, E5M2).tolist() == [*e5m2, 0b0_00101_10]


def hard_numbers(to: float8.Format) -> torch.Tensor:
    """Exact in bf16: every number of the format, every tie between two of them, what is too large,
    and zeros. With signs."""
    every = torch.arange(256, dtype=torch.uint8).view(to.dtype).float()
    positive = every[every.isfinite() & (every >= 0)].sort().values
    ties = (positive[1:] + positive[:-1]) / 2
    beyond = torch.tensor([to.largest * factor for factor in (1.0625, 1.125, 2.0, 64.0)])
    least = positive[1]
    below = torch.stack([least / 4, least / 2, least * 0.75, least * 2.0**-30])
    x = torch.cat((positive, ties, beyond, below))
    return torch.cat((x, -x))


@each_format
def test_bytes_equal_pytorch(to):
    """Numbers, ties, and what lies directly beside a tie; from four types."""
    hard = hard_numbers(to)
    beside = torch.cat([torch.nextafter(hard, torch.full_like(hard, e)) for e in (1e9, -1e9)])
    many = randn(20000) * to.largest / 64
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for x in (hard, beside, many):
            # float16 has less range, and rounds what lies beside a tie
            x = x.to(dtype)
            x = x[x.isfinite()]
            assert torch.equal(float8.encode_by_hand(x, to), bytes_of(x, to)), dtype
    assert torch.equal(hard.bfloat16().float(), hard)


@each_format
def test_not_a_number_and_infinity(to):
    x = torch.tensor([math.nan, math.inf, -math.inf])
    q = float8.encode_by_hand(x, to).view(to.dtype).float()
    assert q[0].isnan() and q[1:].tolist() == [to.largest, -to.largest]
    assert bytes_of(x, to).view(to.dtype).float()[0].isnan()


# --- scales ---------------------------------------------------------------------------------------


@each_format
def test_scales_by_hand(to):
    """448 / 3 = 149.3, and 128 below it; 57,344 / 3 = 19,114.7, and 16,384."""
    amax = torch.tensor([3.0, to.largest, to.largest / 2, 0.0, 2.0**-120])
    least = to.largest / LEAST_AMAX
    any_number = scale_of(amax, to, False).tolist()
    assert any_number == pytest.approx([to.largest / 3, 1.0, 2.0, least, least], rel=1e-7)
    lowered = 2.0 ** math.floor(math.log2(least))
    below = {"e4m3": 128.0, "e5m2": 16384.0}[to.name]
    assert scale_of(amax, to, True).tolist() == [below, 1.0, 2.0, lowered, lowered]
    # directly above a power of two
    above = torch.nextafter(torch.tensor(to.largest), torch.tensor(math.inf))
    assert scale_of(above, to, True) == 0.5


def test_no_scale_without_a_finite_maximum():
    assert scale_of(torch.tensor([math.inf, math.nan]), E4M3, True).isnan().all()


# --- matrices -------------------------------------------------------------------------------------


def quantised(x: torch.Tensor, to=E4M3, block=None, power_of_two: bool = True) -> Quantised:
    scale = scale_of(float8.block_maxima(x, block), to, power_of_two)
    return quantise(x, scale, to, block, power_of_two)


BLOCKS = [None, (1, 4), (4, 1), (4, 4), (2, 3), (128, 128)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("power_of_two", [True, False])
@each_format
def test_each_block_by_hand(to, power_of_two, block):
    """A matrix of 5 x 7, which no block divides: each block is what it would be alone."""
    x = randn(5, 7)
    found = quantised(x, to, block, power_of_two)
    r, c = block or (5, 7)
    assert found.q.shape == x.shape and found.q.dtype == to.dtype
    if block:
        assert found.inverse.shape == (math.ceil(5 / r), math.ceil(7 / c))
    for i in range(0, 5, r):
        for j in range(0, 7, c):
            part = x[i : i + r, j : j + c]
            scale = scale_of(part.abs().max(), to, power_of_two)
            inverse = found.inverse[i // r, j // c] if block else found.inverse
            assert inverse == 1 / scale
            q = found.q[i : i + r, j : j + c]
            # |part scale| can be above the largest by rounding
            assert torch.equal(q.view(torch.uint8), float8.encode_by_hand(part * scale, to))
            values = found.values(torch.float64)[i : i + r, j : j + c]
            assert torch.equal(values, q.double() * inverse.double())


def test_a_block_larger_than_the_matrix_is_the_matrix():
    """Also where a whole one would not fit into memory."""
    x = randn(6, 9)
    for block, as_if in (((2**40, 2**40), (6, 9)), ((1, 2**40), (1, 9)), ((2**40, 4), (6, 4))):
        found, right = (quantised(x, E4M3, b, True) for b in (block, as_if))
        assert torch.equal(found.values(x.dtype), right.values(x.dtype))
        assert torch.equal(found.t().values(x.dtype), right.values(x.dtype).t())
    assert blocks_of(x[:0], (1, 2**40)).shape == (0, 1, 1, 9)


@pytest.mark.parametrize(
    "a_block, b_block",
    [(None, None), ((1, 4), (4, 4)), ((1, 4), (4, 1)), ((4, 1), (1, 4)), ((2, 3), (4, 1))],
    ids=str,
)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_products_are_those_of_the_values(a_block, b_block, power_of_two):
    """a @ b, and the same of the transposed ones; in float64 of what the bytes stand for."""
    a = quantised(randn(6, 9, dtype=torch.float64), E5M2, a_block, power_of_two)
    b = quantised(randn(9, 10, seed=1, dtype=torch.float64), E4M3, b_block, power_of_two)
    expected = a.values(torch.float64) @ b.values(torch.float64)
    bound = 1e-14 * (a.values(torch.float64).abs() @ b.values(torch.float64).abs())
    assert ((a @ b - expected).abs() <= bound).all()
    assert ((b.t() @ a.t() - expected.t()).abs() <= bound.t()).all()
    assert torch.equal(a.t().t().values(torch.float64), a.values(torch.float64))


@pytest.mark.parametrize("block", [None, (1, 16), (16, 16)], ids=str)
def test_bf16_with_powers_of_two_needs_no_float32(block):
    """product_dtype: bytes times powers of two are bf16 numbers, so the rounding of the result is
    the only one."""
    x = randn(32, 48, dtype=torch.bfloat16)
    w = randn(40, 48, seed=1, dtype=torch.bfloat16)
    a, b = quantised(x, E4M3, block), quantised(w, E4M3, block and (16, 16))
    wide = [quantised(m.float(), E4M3, q.block) for m, q in ((x, a), (w, b))]
    for q, of_float32 in zip((a, b), wide):
        assert torch.equal(q.q.view(torch.uint8), of_float32.q.view(torch.uint8))
        assert torch.equal(q.values(torch.bfloat16).double(), q.values(torch.float64))
    y = a @ b.t()
    exact = (wide[0] @ wide[1].t()).double()
    assert y.dtype == torch.bfloat16
    sums = a.values(torch.float64).abs() @ b.values(torch.float64).abs().t()
    # half a step of bf16, and float32's in the sums
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * sums).all()


def test_zeros():
    for block in (None, (1, 4)):
        zeros = quantised(torch.zeros(4, 8), block=block)
        assert not zeros.q.view(torch.uint8).any() and zeros.inverse.isfinite().all()
        assert torch.equal(zeros @ quantised(randn(4, 8), block=block).t(), torch.zeros(4, 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_what_is_not_finite_makes_all_of_it_not_a_number(recipe, bad):
    """Of a tensor, or of the block that it is in. Delayed scaling has a history that is finite."""
    scaling = Scaling(Recipe(recipe, block=4), 1, "cpu")
    scaling.quantise([torch.ones(4, 8)], [(0, 0)], INPUT, None, (1, 4))
    scaling.end_step()
    x = torch.ones(4, 8)
    x[1, 2] = bad
    (q,) = scaling.quantise([x], [(0, 0)], INPUT, None, (1, 4))
    is_nan = q.values(torch.float32).isnan()
    if recipe == "block":
        assert is_nan[1, :4].all() and is_nan.sum() == 4
    else:
        assert is_nan.all()
    assert scaling.amax[0, 0, INPUT] == math.inf


# --- torch._scaled_mm -----------------------------------------------------------------------------


def sums_of(a: Quantised, b: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    """(a @ b, the sum of the magnitudes), in float64"""
    a, b = a.values(torch.float64), b.values(torch.float64)
    return a @ b, a.abs() @ b.abs()


def close_to_exact(y: torch.Tensor, a: Quantised, b: Quantised, of_sums: float) -> None:
    """Half a step of the result's type, and of_sums of the sum of the magnitudes."""
    exact, sums = sums_of(a, b)
    step = 2.0**-8 if y.dtype == torch.bfloat16 else 2.0**-23
    assert ((y.double() - exact).abs() <= step * exact.abs() + of_sums * sums).all()


def multiply_bytes(a: Quantised, b: Quantised) -> torch.Tensor:
    try:
        return float8.multiply_bytes(a, b)
    except (RuntimeError, NotImplementedError) as e:
        pytest.skip(f"torch._scaled_mm: {str(e).splitlines()[0]}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_a", FORMATS.values(), ids=list(FORMATS))
def test_equals_scaled_mm_on_a_cpu(of_a, dtype):
    """One scale for a tensor: three products of a linear layer."""
    x = quantised(randn(32, 48, dtype=dtype), of_a, power_of_two=False)
    w = quantised(randn(16, 48, seed=1, dtype=dtype), power_of_two=False)
    for a, b in ((x, w.t()), (x.t(), quantised(randn(32, 16, dtype=dtype)))):
        assert not float8.runs_in_fp8(a, b)
        close_to_exact(multiply_bytes(a, b), a, b, 2.0**-20)
        close_to_exact(a @ b, a, b, 2.0**-20)


# --- the library torchao --------------------------------------------------------------------------

each_rounding = pytest.mark.parametrize("power_of_two", [True, False], ids=["power", "any"])


@each_rounding
@each_format
def test_scales_and_bytes_equal_the_library_torchao(to, power_of_two):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    tensors = pytest.importorskip("torchao.float8.float8_training_tensor")
    for seed in range(20):
        for dtype in (torch.float32, torch.bfloat16):
            x = randn(24, 40, seed=seed, dtype=dtype) * 2.0 ** (seed - 10)
            ours = quantised(x, to, None, power_of_two)
            scale = utils.tensor_to_scale(x, to.dtype, round_scales_to_power_of_2=power_of_two)
            assert 1 / scale == ours.inverse
            theirs = tensors.hp_tensor_and_scale_to_float8(x, scale, to.dtype)
            assert torch.equal(theirs._data.view(torch.uint8), ours.q.view(torch.uint8))


@each_rounding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_equals_the_library_torchao(dtype, power_of_two):
    """Output and three gradients of Float8Linear, emulated, beside the recipe `current`."""
    config = pytest.importorskip("torchao.float8.config")
    module = pytest.importorskip("torchao.float8.float8_linear")
    plain = torch.nn.Linear(48, 40, dtype=dtype)
    with torch.no_grad():
        plain.weight.copy_(randn(40, 48, seed=1))
    settings = config.Float8LinearConfig(emulate=True, round_scales_to_power_of_2=power_of_two)
    theirs = module.Float8Linear.from_float(plain, settings)
    recipe = Recipe("current", power_of_two)
    layer = fp8.Layer(Scaling(recipe, 1, "cpu"), ((0, 0),))
    x = randn(2, 16, 48, dtype=dtype)
    grad = randn(2, 16, 40, seed=2, dtype=dtype)
    found = []
    for forward in (theirs, lambda x: fp8.linear(layer, x, plain.weight, plain.bias)[0]):
        x_in = x.clone().requires_grad_()
        y = forward(x_in)
        found.append([y, *torch.autograd.grad(y, (x_in, *plain.parameters()), grad)])
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-7
    for name, them, us in zip(("y", "dx", "dw", "db"), *found):
        assert us.dtype == dtype and us.shape == them.shape
        assert (us - them).abs().max() <= tolerance * them.abs().max(), name


def test_blocks_equal_the_library_torchao():
    """Its tensors by blocks divide by the inverse of our scale: equal where that is exact, so each
    block's largest is 1.75 times a power of two."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    for block in ((1, 8), (8, 1), (8, 8)):
        x = blocks_of(randn(16, 24).clamp(-1.75, 1.75), block)
        x[:, 0, :, 0] = 1.75
        g = torch.Generator().manual_seed(1)
        x = torch.ldexp(x, torch.randint(-8, 8, (x.shape[0], 1, x.shape[2], 1), generator=g))
        x = x.flatten(2).flatten(0, 1)
        ours = quantised(x, E4M3, block)
        inverse = primitives._choose_scale_float8(x, list(block))
        assert torch.equal(inverse, ours.inverse)
        theirs = primitives._quantize_affine_float8(x, inverse)
        assert torch.equal(theirs.view(torch.uint8), ours.q.view(torch.uint8))


def test_blocks_of_128_equal_the_library_torchao():
    """Activations along the sum, for the weight gradient along tokens, and weights."""
    pytest.importorskip("triton", reason="torchao has these beside its Triton kernels")
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    for theirs, block in (
        (kernels.torch_blockwise_scale_act_quant_lhs, (1, 128)),
        (kernels.torch_blockwise_scale_act_quant_rhs, (128, 1)),
        (kernels.torch_blockwise_scale_weight_quant, (128, 128)),
    ):
        x = randn(256, 384)
        q, inverse = theirs(x)
        ours = quantised(x, E4M3, block, False)
        assert torch.equal(inverse, ours.inverse), block
        assert torch.equal(q.view(torch.uint8), ours.q.view(torch.uint8)), block


# --- a layer in FP8 -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
@each_rounding
def test_a_layer_by_hand(recipe, power_of_two):
    """y = q(x) q(w)ᵀ + b, dx = q(dy) q(w), dw = q(dy)ᵀ q(x), db = the sum of dy; gradients in e5m2,
    but with blocks. Blocks lie along the sum: 1 x 8 for y and dx, 8 x 1 for dw."""
    n = 8
    scaling = Scaling(Recipe(recipe, power_of_two, n), 1, "cpu")
    layer = fp8.Layer(scaling, ((0, 3),))
    x, dy = (randn(20, size, seed=size, dtype=torch.float64) for size in (24, 12))
    w, b = (torch.nn.Parameter(randn(*size, dtype=torch.float64)) for size in ((12, 24), (12,)))
    x_in = x.clone().requires_grad_()
    (y,) = fp8.linear(layer, x_in.unsqueeze(0), w, b)
    dx, dw, db = torch.autograd.grad(y, (x_in, w, b), dy.unsqueeze(0))

    def values(m: torch.Tensor, operand: int, block) -> torch.Tensor:
        to = E5M2 if operand == GRADIENT and recipe != "block" else E4M3
        block = block if recipe == "block" else None
        return quantised(m.detach(), to, block, power_of_two).values(torch.float64)

    q_w = values(w, WEIGHT, (n, n))
    expected = dict(
        y=values(x, INPUT, (1, n)) @ q_w.t() + b,
        dx=values(dy, GRADIENT, (1, n)) @ q_w,
        dw=values(dy, GRADIENT, (n, 1)).t() @ values(x, INPUT, (n, 1)),
        db=dy.sum(0),
    )
    for (name, right), found in zip(expected.items(), (y[0], dx, dw, db)):
        assert (found - right).abs().max() <= 1e-14 * right.abs().max() * 64, name
