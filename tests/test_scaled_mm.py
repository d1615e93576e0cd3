"""float8.py's products on GPUs: scales as cuBLAS reads them, and when it has no such product.

Without a GPU, `cublas` below stands for the library. It refuses what PyTorch 2.11 to 2.13 refuse
(aten/src/ATen/native/cuda/ScaledBlas.cpp), and reads scales from memory, not by their strides.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fp8
from base import float8
from base.float8 import E4M3, E5M2, Quantised, block_maxima, quantise, scale_of
from fp8 import Recipe, Scaling


def matrix(m: int, k: int, block, to=E4M3, dtype=torch.float32, device="cpu") -> Quantised:
    """Bytes of values whose sizes differ from block to block."""
    generator = torch.Generator().manual_seed(m + 3 * k)
    x = torch.randn(m, k, generator=generator)
    x = x * torch.exp2(torch.randint(-9, 0, (m, 1), generator=generator))
    x = x * torch.exp2(torch.arange(k) // 128 % 7 - 6)
    x = x.to(device, dtype)
    return quantise(x, scale_of(block_maxima(x, block), to, True), to, block, True)


def from_memory(scale: torch.Tensor, kind, n: int, k: int) -> torch.Tensor:
    """The scale of each element of a matrix [n, k], from the addresses that cuBLAS reads."""
    if kind == F.ScalingType.TensorWise:
        assert scale.numel() == 1
        return scale.expand(n, k)
    number = -(-k // 128)
    if kind == F.ScalingType.BlockWise1x128:
        assert scale.shape == (n, number) and scale.stride(0) == 1
        assert scale.stride(1) == n or number == 1
        rows = torch.as_strided(scale, (number, n), (n, 1)).t()
    else:
        assert kind == F.ScalingType.BlockWise128x128
        length = -(-number // 4) * 4
        assert scale.shape == (length, -(-n // 128)) and scale.stride(0) == 1
        assert scale.stride(1) == length or scale.shape[1] == 1
        blocks = torch.as_strided(scale, (scale.shape[1], number), (length, 1))
        rows = blocks.repeat_interleave(128, 0)[:n]
    return rows.repeat_interleave(128, 1)[:, :k]


def cublas(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype):
    assert a.is_contiguous() and b.t().is_contiguous()
    assert a.shape[1] % 16 == b.shape[1] % 16 == 0
    assert {a.dtype, b.dtype} != {torch.float8_e5m2}
    assert scale_a.dtype == scale_b.dtype == torch.float32
    blockwise = {kind_a, kind_b} - {F.ScalingType.TensorWise}
    assert not blockwise or a.dtype == b.dtype == torch.float8_e4m3fn
    assert kind_a != F.ScalingType.BlockWise128x128 or kind_b != kind_a
    x = a.double() * from_memory(scale_a, kind_a, *a.shape)
    y = b.t().double() * from_memory(scale_b, kind_b, *b.t().shape)
    return (x @ y.t()).to(output_dtype)


# tokens, out, in. Sums of 6, 5 and 1 blocks are padded, those of 4 are not
SIZES = [(256, 128, 768), (128, 640, 512), (384, 256, 128), (128, 512, 256)]
RECIPES = ["tensor", "block"]


def products(recipe: str, tokens: int, n_out: int, n_in: int, **options):
    """The three products of a layer: (name, left, right)."""
    along, across, square, to = (1, 128), (128, 1), (128, 128), E4M3
    if recipe == "tensor":
        along = across = square = None
        to = E5M2
    weight = matrix(n_out, n_in, square, **options)
    yield "y", matrix(tokens, n_in, along, **options), weight.t()
    yield "dx", matrix(tokens, n_out, along, to, **options), weight
    dy = matrix(tokens, n_out, across, to, **options)
    yield "dw", dy.t(), matrix(tokens, n_in, across, **options)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_library_reads_the_scales_that_were_meant(recipe, sizes, monkeypatch):
    """Only forward, and without blocks, sums in the fast way."""
    fast = []

    def noted(*args, use_fast_accum, **options):
        fast.append(use_fast_accum)
        return cublas(*args, **options)

    monkeypatch.setattr(F, "scaled_mm", noted)
    for name, a, b in products(recipe, *sizes):
        expected = a.values(torch.float64) @ b.values(torch.float64)
        found = float8.multiply_bytes(a, b)
        assert fast.pop() == (name == "y" and recipe == "tensor")
        assert found.dtype == torch.float32
        # rounded once, from float64
        assert torch.allclose(found.double(), expected, rtol=1e-6, atol=0), name


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_a_weight_is_transposed_once_a_step(recipe, monkeypatch):
    """Each micro-batch's products read the same bytes of W, by rows in forward and by columns in
    backward, and copy none. After the step there are others."""
    size = 128
    monkeypatch.setattr(float8, "device_multiplies", lambda a: True)
    read, weight_at = {"y": set(), "dx": set()}, []

    def noted(a, b, *rest, use_fast_accum, **options):
        weight_at.append(b.data_ptr())
        return cublas(a, b, *rest, **options)

    monkeypatch.setattr(F, "scaled_mm", noted)
    scaling = Scaling(Recipe(recipe), 1, "cpu")
    layer = fp8.Layer(scaling, ((0, 0),))
    w = torch.nn.Parameter(torch.randn(size, 2 * size))
    for _ in range(3):
        x = torch.randn(1, size, 2 * size, requires_grad=True)
        (y,) = fp8.linear(layer, x, w, None)
        y.sum().backward()
        for name, address in zip(read, weight_at):
            read[name].add(address)
        weight_at.clear()
    by_rows, by_columns = scaling.weights[w][1]
    assert read == {"y": {by_rows.q.data_ptr()}, "dx": {by_columns.q.data_ptr()}}
    assert torch.equal(by_rows.q.view(torch.uint8), by_columns.q.view(torch.uint8))
    scaling.end_step()
    assert not scaling.weights


@pytest.mark.parametrize(
    "recipe, capability, cuda, sizes, runs",
    [
        ("tensor", (8, 0), "13.0", (128, 128, 128), False),
        ("tensor", (8, 9), "12.6", (128, 128, 128), True),
        ("tensor", (12, 0), "13.0", (16, 48, 32), True),
        ("tensor", (9, 0), "13.0", (16, 48, 40), False),
        ("tensor", (9, 4), None, (128, 128, 128), False),
        ("block", (9, 0), "12.9", (256, 640, 768), True),
        ("block", (9, 0), "13.0", (128, 128, 128), True),
        ("block", (9, 0), "12.8", (128, 128, 128), False),
        ("block", (8, 9), "13.0", (128, 128, 128), False),
        ("block", (10, 0), "13.0", (128, 128, 128), False),
        ("block", (9, 0), "13.0", (128, 128, 192), False),
    ],
)
def test_when_it_runs(recipe, capability, cuda, sizes, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = []
    for _, a, b in products(recipe, *sizes):
        for x in (a, b):
            on_gpu = SimpleNamespace(shape=x.q.shape, device=torch.device("cuda"))
            object.__setattr__(x, "q", on_gpu)
        found.append(float8.runs_in_fp8(a, b))
    # a product of which a size does not fit is enough to know the rule
    assert all(found) if runs else not all(found)


def test_blocks_without_a_product():
    """The library has none of two matrices with 128 x 128 blocks, of smaller blocks, and of blocks
    across the sum."""
    square = matrix(128, 256, (128, 128))
    assert not float8.blocks_for_library(square, square.t())
    assert not float8.blocks_for_library(matrix(128, 256, (1, 64)), square.t())
    assert not float8.blocks_for_library(matrix(128, 256, (128, 1)), square.t())
    assert float8.blocks_for_library(matrix(128, 256, (1, 128)), square.t())


@pytest.mark.gpu
@pytest.mark.parametrize("to", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_scales_on_a_gpu(to):
    """Powers of two, and those of the CPU. What a GPU rounds, it must not round here."""
    amax = torch.exp2(torch.linspace(-110, 127, 5000)) * 1.2
    amax = torch.cat((amax, torch.tensor([0.0, torch.inf, torch.nan])))
    on_cpu = scale_of(amax, to, True)
    assert torch.equal(torch.frexp(on_cpu[:-2]).mantissa, torch.full((5001,), 0.5))
    assert torch.allclose(scale_of(amax.cuda(), to, True).cpu(), on_cpu, 0, 0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu(recipe, sizes, dtype):
    """The library's products are those of the decoded bytes, but for the order of sums."""
    for name, a, b in products(recipe, *sizes, dtype=dtype, device="cuda"):
        if not float8.runs_in_fp8(a, b):
            pytest.skip("this GPU, or this build of PyTorch, multiplies no such bytes")
        expected = a.values(torch.float64) @ b.values(torch.float64)
        # a GPU adds products of a few bits less than float32 has; a wrong scale is a factor of 2
        error = (float8.multiply_bytes(a, b).double() - expected).norm() / expected.norm()
        assert error < 5e-3, (name, error)
    # the same bytes as on a CPU
    for of_gpu, of_cpu in zip(products(recipe, *sizes, device="cuda"), products(recipe, *sizes)):
        for found, expected in zip(of_gpu[1:], of_cpu[1:]):
            assert torch.equal(found.q.cpu().view(torch.uint8), expected.q.view(torch.uint8))
