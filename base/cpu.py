"""Two settings of a process that trains on a CPU (freed memory stays, oneDNN multiplies), and GELU.

    cpu.set_up()

Both hold for the whole process, and any PyTorch program could make them. A comparison with another
project makes them for both (benchmarks/training_step.py). Generation has the first alone: it
measures which library is the faster for its narrow matrices (inference/weight_layouts.py).

`gelu` is PyTorch's GELU in the tanh form, in less time.
"""

import ctypes
import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def set_up() -> None:
    keep_freed_memory()
    multiply_by_onednn()


def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks when they are freed. By default the kernel gives new memory,
    zeroed page by page, for each logits or gradient tensor: a fifth of the time of a GPT-2 124M
    step on a CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # Another C library.
        return
    m_trim_threshold = -1
    m_mmap_max = -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)


def multiply_by_onednn() -> None:
    """Let oneDNN multiply float32 matrices where it is faster, and as exact.

    PyTorch leaves them to MKL, which uses no AVX-512 on AMD's processors; oneDNN does, and takes
    half the time. PyTorch asks oneDNN where float32 may be multiplied in bf16 ("medium"). A
    processor without matrix units (AMX) has no such product, and oneDNN multiplies in float32: that
    is checked here, with 1 + 2⁻²⁰, which bf16 would round to 1.
    """
    if "AMD" not in processor():
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    x = torch.full((64, 64), 1 + 2**-20)
    if (x @ torch.eye(64) != x).any():
        torch.set_float32_matmul_precision(before)


def processor() -> str:
    """Its name, where this version of PyTorch knows it."""
    return getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "")


# 2 √(2/π)
GELU_FACTOR = 2 * (2 / math.pi) ** 0.5


def gelu_forward(x: Tensor, factor: Tensor) -> Tensor:
    """GELU in the tanh form, without a gradient, in half of PyTorch's time. With z = √(2/π) (x +
    0.044715 x³) it is x (1 + tanh z) / 2 = x / (1 + exp(-2z)), and exp is cheaper than tanh.
    factor: GELU_FACTOR, of the type of x"""
    two_z = torch.addcmul(factor, x, x, value=0.044715 * GELU_FACTOR).mul_(x)
    # Detached: before torch 2.13 compiled code gave what an operation in place returns no gradient.
    return two_z.sigmoid_().mul_(x).detach()


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return gelu_forward(x, x.new_tensor(GELU_FACTOR))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """F.gelu(x, approximate="tanh") of float32 or float64."""
    return _GELU.apply(x)
