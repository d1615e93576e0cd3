"""Casts to FP8 in one pass on a GPU: the kernels of base/csrc/fp8_cast.cu, for tensors with one
scale.

By PyTorch's operations (float8.py) a cast is some twenty launches, and a product copies the bytes
that it needs transposed. Here it is two launches. They move 6 bytes for each element of 16 bits,
or 4 with a known maximum, where PyTorch's operations move 15.

    maximum    amax = max |x|. With a known maximum, as of the recipe `delayed`, it reads nothing
    cast       the scale, the bytes, those of the transpose, 1 / scale, and max |x| for the log

For the recipe `current` the kernel that makes x can find the maximum, while it has x in registers:
norms and SwiGLU note it on x (kernels.py), and then the cast is one launch, 4 bytes. So are five of
the eleven casts of a Llama layer's inputs and gradients, of 63% of their elements in Llama-2 7B.

Bytes and scales are those of float8.py, to the last bit, but for a tensor that is not finite: with
a known maximum its bytes are other ones, and they mean as little, because 1 / scale is NaN.

Blocks (the recipe `block`) and the rows of experts have scales of their own, and are cast by
PyTorch's operations. The kernels have not yet run on a GPU.
"""

import torch
from torch import Tensor

from base import cuda_kernels
from base.cuda_kernels import kernel
from base.float8 import E5M2, Format, Quantised

# `known` is a maximum from elsewhere, which counts if it is above 0.
fp8_maximum = kernel("fp8_maximum(x[m, k], amax! f32[one], known f32[one]?) -> ()")
# `rows` and `columns` are m, or 0 for bytes that are not wanted.
fp8_cast = kernel(
    "fp8_cast(x[m, k], amax! f32[one], inverse! f32[one], known f32[one]?, rows: int, columns: int,"
    " e5m2: int, power_of_two: int) -> q u8[rows, k], transposed u8[k, columns]"
)


# --- maxima that are known before the cast --------------------------------------------------------


def note_maximum(x: Tensor, amax: Tensor) -> None:
    """Leave max |x| on x, for the cast that reads x next: an attribute of this one tensor.

    Whatever is made of x has no note (a view, a gathered sequence, a sum of gradients), and a note
    does not count once x has changed: then the cast finds the maximum itself. A note of a part of a
    tensor is what a reading of that part would find, so ranks agree on it in the same way. Compiled
    code makes no notes. amax: [1] float32; empty: nothing to note
    """
    if amax.numel() and not torch.compiler.is_compiling() and not x.is_inference():
        x.noted_maximum = amax, x._version


def noted_maximum(x: Tensor) -> Tensor | None:
    amax, version = getattr(x, "noted_maximum", (None, None))
    return amax if amax is not None and version == x._version else None


def as_matrix(x: Tensor) -> Tensor:
    """x [.., n] as [M, n], with its note."""
    matrix = x.detach().flatten(0, -2)
    if (amax := noted_maximum(x)) is not None:
        note_maximum(matrix, amax)
    return matrix


# --- the cast -------------------------------------------------------------------------------------


def supported(x: Tensor) -> bool:
    """Whether the kernels cast x [M, K]: sizes that 16 divides, as a GPU's products need them."""
    return cuda_kernels.supported(x) and all(size % 16 == 0 for size in x.shape)


def cast(
    x: Tensor,
    amax: Tensor,
    inverse: Tensor,
    known: Tensor | None,
    to: Format,
    power_of_two: bool,
    wanted: tuple[bool, bool],
) -> tuple[Quantised | None, Quantised | None]:
    """x [M, K] in bytes, (by rows, by columns); None for what is not wanted.

    amax, inverse, known: [1] float32. The scale comes from `known`; where that is 0 or None, from
    amax. amax is raised to max |x|; inverse, which is 0, becomes 1 / scale.
    """
    rows, columns = (len(x) if is_wanted else 0 for is_wanted in wanted)
    options = int(to is E5M2), int(power_of_two)
    q, transposed = fp8_cast(x, amax, inverse, known, rows, columns, *options)

    def in_bytes(q: Tensor) -> Quantised | None:
        return Quantised(q.view(to.dtype), inverse[0], None, power_of_two, x.dtype)

    by_rows = in_bytes(q) if rows else None
    by_columns = in_bytes(transposed.t()) if columns else None
    return by_rows, by_columns
