"""CPU settings of a training process (keep freed memory, multiply by oneDNN), and a faster GELU.

    cpu.set_up()

Both settings hold for the whole process, and any PyTorch program could make them. A comparison with
another project makes them for both (benchmarks/training_step.py). Generation uses only the first:
it measures which library is faster for its narrow matrices (inference/weight_layouts.py).
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
    """Tell glibc to keep large blocks when they are freed. By default each logits or gradient
    tensor gets new memory, which the kernel zeroes page by page: a fifth of the time of a GPT-2
    124M step on a CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # It is another C library than glibc.
        return
    m_trim_threshold = -1
    m_mmap_max = -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)


def multiply_by_onednn() -> None:
    """Multiply float32 matrices by oneDNN where it is faster, and as exact.

    By default PyTorch calls MKL, which does not use AVX-512 on AMD's processors; oneDNN does, and
    takes half the time. PyTorch calls oneDNN if float32 may be multiplied in bf16 ("medium").
    Without matrix units (AMX) oneDNN still multiplies in float32. This is checked with 1 + 2⁻²⁰,
    which bf16 would round to 1.
    """
    if "AMD" not in processor():
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    x = torch.full((64, 64), 1 + 2**-20)
    if (x @ torch.eye(64) != x).any():
        torch.set_float32_matmul_precision(before)


def processor() -> str:
    """The processor's name; "" if this version of PyTorch does not know it."""
    return getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "")


# The factor is 2 √(2/π).
GELU_FACTOR = 2 * (2 / math.pi) ** 0.5


def gelu_forward(x: Tensor, factor: Tensor) -> Tensor:
    """GELU in the tanh form, without a gradient, in half of PyTorch's time. With z = √(2/π) (x +
    0.044715 x³) it is x (1 + tanh z) / 2 = x / (1 + exp(-2z)), and exp is cheaper than tanh.
    factor: GELU_FACTOR, of the type of x"""
    two_z = torch.addcmul(factor, x, x, value=0.044715 * GELU_FACTOR).mul_(x)
    # `detach` is needed before torch 2.13, where compiled code gave the result of an in-place
    # operation no gradient.
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
