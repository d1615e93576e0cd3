"""What is done for CPUs: settings of the process, attention in blocks of rows."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from parity import Synthetic, trainer_of

import gpt
import kernels
from base import causal_blocks, cpu
from optimizer import global_norm

# b, query heads, key heads, s, d: blocks that are whole, a last one of one row, one of few rows
SHAPES = [
    (2, 4, 4, 256, 8),
    (1, 6, 2, 129, 16),
    (2, 3, 1, 300, 8),
    (1, 2, 2, 7, 4),
    (1, 4, 2, 1, 8),
]


def y_and_gradients(attention, shape, dtype: torch.dtype) -> list[torch.Tensor]:
    b, a, a_kv, s, d = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(b, s, heads, d) for heads in (a, a_kv, a_kv, a)]
    numbers = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    # as in gpt.Attention: heads of [b, s, a d]
    *qkv, dy = (x.to(dtype).transpose(1, 2) for x in numbers)
    qkv = [x.detach().requires_grad_() for x in qkv]
    y = attention(*qkv)
    y.backward(dy)
    return [y.detach(), *(x.grad for x in qkv)]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 5e-6), (torch.bfloat16, 3e-2)]
)
def test_blocks_equal_the_kernel(shape, dtype, tolerance):
    expected = y_and_gradients(sdpa, shape, torch.float64)
    found = y_and_gradients(causal_blocks.causal_attention, shape, dtype)
    largest = max(x.abs().max() for x in expected)
    for x, y in zip(found, expected):
        assert (x.double() - y).abs().max() <= tolerance * largest


def test_kernels_auto_puts_blocks_into_a_model_on_a_cpu(monkeypatch):
    """Rows of 3 blocks; --kernels off leaves PyTorch's own; beyond LONGEST and with documents it
    is asked too, and in float32 where MKL multiplies."""
    fields = dict(num_layers=2, hidden_size=16, num_heads=2, seq_length=24, vocab_size=50)
    fields |= dict(model="gpt2", dropout=0.0, global_batch_size=2)
    calls = []
    original = causal_blocks.causal_attention
    count = lambda *qkv: (calls.append(1), original(*qkv))[1]  # noqa: E731
    monkeypatch.setattr(causal_blocks, "causal_attention", count)
    monkeypatch.setattr(causal_blocks, "ROWS", 9)
    losses = {}
    for name in ("auto", "off", "too long", "MKL"):
        torch.set_float32_matmul_precision("highest" if name == "MKL" else "medium")
        monkeypatch.setattr(causal_blocks, "LONGEST", 23 if name == "too long" else 24)
        trainer = trainer_of(fields, kernels="off" if name == "off" else "auto")
        calls.clear()
        losses[name] = trainer.forward_backward(1, Synthetic(24, 50)).item()
        assert len(calls) == (2 if name == "auto" else 0)
    assert losses["auto"] == pytest.approx(losses["off"], rel=1e-6)
    assert losses["too long"] == losses["off"]
    model = gpt.GPT(trainer.model_config)
    kernels.apply(model, torch.device("cpu"), torch.float32)
    calls.clear()
    tokens = torch.zeros(1, 10, dtype=torch.int64)
    model(tokens, context=gpt.Context(documents=tokens))
    assert not calls


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-15), (torch.float32, 1e-6)])
def test_gelu(dtype, tolerance):
    x = torch.linspace(-30, 30, 1001, dtype=dtype)
    results = []
    for function in (cpu.gelu, lambda x: F.gelu(x, approximate="tanh")):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.sum().backward()
        results.append((y.detach(), leaf.grad))
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=10 * tolerance)


def test_onednn_only_where_it_multiplies_in_float32(monkeypatch):
    """The setting is left out for other processors, and taken back where products are rounded."""
    monkeypatch.setattr(cpu, "processor", lambda: "GenuineIntel")
    cpu.multiply_by_onednn()
    assert torch.get_float32_matmul_precision() == "highest"
    monkeypatch.setattr(cpu, "processor", lambda: "AMD EPYC")
    product = torch.Tensor.__matmul__
    for dtype, precision in ((torch.float32, "medium"), (torch.bfloat16, "highest")):
        torch.set_float32_matmul_precision("highest")
        rounded = lambda x, y: product(x.to(dtype), y.to(dtype)).float()  # noqa: B023, E731
        monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
        cpu.multiply_by_onednn()
        assert torch.get_float32_matmul_precision() == precision


def test_settings_need_no_glibc(monkeypatch):
    def without(name):
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", without)
    cpu.keep_freed_memory()


def test_products_keep_float32():
    """With the settings of train.py, whatever multiplies."""
    cpu.set_up()
    x, y = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ y.double()
    assert ((x @ y - exact).abs().max() / exact.abs().max()) < 1e-5


def test_norm_of_a_large_gradient():
    """2^24 numbers, whose squares one float32 sum cannot add up."""
    p = torch.nn.Parameter(torch.empty(4096, 4096))
    p.main_grad = torch.full((4096, 4096), 1.1)
    assert global_norm([p]).item() == pytest.approx(4096 * 1.1, rel=1e-6)
