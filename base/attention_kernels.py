"""PyTorch's fused attention kernels, with the log-sum that ring attention needs to merge results.

`F.scaled_dot_product_attention` returns only the result. The operations below it also return

    L = log Σ_j exp(q k_j / √d)        one number for each query, at least float32

and their backward takes o and L as arguments, which may be those of more keys than k and v.

    CPU                           _scaled_dot_product_flash_attention_for_cpu
    CUDA, 16 bits, new GPUs       _scaled_dot_product_cudnn_attention
    CUDA, 16 bits                 _scaled_dot_product_flash_attention
    CUDA, 32 bits                 _scaled_dot_product_efficient_attention

On CUDA `F.scaled_dot_product_attention` chooses by the GPU, the sizes and cuDNN's version, and
`kernel_for` makes the same choice. PyTorch 2.13 tries cuDNN first on compute capability 9 and 10,
if its version is at least 9.15.1: older ones are wrong for some lengths. (FlashAttention 2 uses 35%
of an H100, arXiv 2407.08608.)

The operations are not public: a version of PyTorch may lack one. Then, and for sizes that a kernel
does not support, `kernel_for` returns None, and context_parallel.py uses tensor operations. Tests
compare the arguments with PyTorch's signatures, and on a GPU the results.

Not covered: query heads that share a key head, which cuDNN and FlashAttention support; here keys
are repeated.
"""

import contextlib
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

PREFIX = "_scaled_dot_product_"


class Kernel:
    """The kernel for CPUs. q: [b, a, m, d]; k, v: [b, a, n, d]. causal: m = n, and query i sees
    keys 0 .. i."""

    # The name in torch.ops.aten; the backward's name ends with _backward.
    name = "flash_attention_for_cpu"

    def __init__(self):
        self.run = getattr(torch.ops.aten, PREFIX + self.name)
        self.run_backward = getattr(torch.ops.aten, PREFIX + self.name + "_backward")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """(o [b, a, m, d], L [b, a, m, 1])"""
        o, log_sum = self.run(q, k, v, 0.0, causal)
        return o, log_sum.unsqueeze(-1)

    def backward(self, grad, q, k, v, o, log_sum, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(∂q, ∂k, ∂v). grad: ∂o."""
        tensors = grad, q, k, v, o, log_sum.squeeze(-1).contiguous()
        return self.run_backward(*tensors, 0.0, causal)


class CuDNN(Kernel):
    """cuDNN's kernel, with the instructions of Hopper and newer GPUs."""

    name = "cudnn_attention"

    def forward(self, q, k, v, causal):
        # The operation takes no bias, and gives L.
        o, log_sum, *_ = self.run(q, k, v, None, True, 0.0, causal)
        return o, log_sum

    def backward(self, grad, q, k, v, o, log_sum, causal):
        # The bounds of sequences in a packed batch; there are none.
        bounds = None, None, q.shape[2], k.shape[2]
        # The random state of dropout, and a bias; there are none.
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        tensors = grad, q, k, v, o, log_sum.contiguous()
        return self.run_backward(*tensors, state, state, None, *bounds, 0.0, causal)


class FlashOnCUDA(Kernel):
    """FlashAttention 2 (arXiv 2307.08691)."""

    name = "flash_attention"

    def forward(self, q, k, v, causal):
        o, log_sum, *_ = self.run(q, k, v, 0.0, causal)
        return o, log_sum.unsqueeze(-1)

    def backward(self, grad, q, k, v, o, log_sum, causal):
        # The bounds of sequences in a packed batch; there are none.
        bounds = None, None, q.shape[2], k.shape[2]
        # The random state of dropout; there is none.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        tensors = grad, q, k, v, o, log_sum.squeeze(-1).contiguous()
        return self.run_backward(*tensors, *bounds, 0.0, causal, state, state)


class EfficientOnCUDA(Kernel):
    """xFormers' kernel (arXiv 2112.05682)."""

    name = "efficient_attention"

    def forward(self, q, k, v, causal):
        o, log_sum, *_ = self.run(q, k, v, None, True, 0.0, causal)
        # Its rows are padded to a multiple of 32.
        return o, log_sum[:, :, : q.shape[2], None]

    def backward(self, grad, q, k, v, o, log_sum, causal):
        log_sum = log_sum.squeeze(-1)
        log_sum = F.pad(log_sum, (0, -log_sum.shape[2] % 32), value=torch.inf)
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        # The last of four gradients is that of a bias, which is not needed.
        wanted = [True, True, True, False]
        arguments = None, o, log_sum, state, state, 0.0, wanted, causal
        return self.run_backward(grad, q, k, v, *arguments)[:3]


@contextlib.contextmanager
def any_shape():
    """A context in which PyTorch does not choose cuDNN's kernel. That one is planned for each new
    shape, which takes tenths of a second: in training once, in generation nearly every step."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@cache
def make(kernel_class: type[Kernel]) -> Kernel | None:
    """A kernel of this class; None if this version of PyTorch does not have it."""
    try:
        return kernel_class()
    except AttributeError:
        return None


KERNELS = {
    SDPBackend.CUDNN_ATTENTION: CuDNN,
    SDPBackend.FLASH_ATTENTION: FlashOnCUDA,
    SDPBackend.EFFICIENT_ATTENTION: EfficientOnCUDA,
}


def kernel_for(q: Tensor, k: Tensor) -> Kernel | None:
    """The kernel for queries [b, a, m, d] and keys [b, a, n, d]; None if there is none."""
    if q.device.type == "cpu":
        return make(Kernel)
    # PyTorch pads other head sizes before it calls a kernel.
    if q.shape[-1] % 8:
        return None
    # Some kernels support sizes in forward that they do not support in backward.
    with torch.enable_grad():
        choice = torch._fused_sdp_choice(q.detach().requires_grad_(), k, k)
    kernel_class = KERNELS.get(SDPBackend(choice))
    return make(kernel_class) if kernel_class else None
