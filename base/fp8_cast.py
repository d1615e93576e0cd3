"""Casts to FP8 in one pass on a GPU: the kernels of base/csrc/fp8_cast.cu, for tensors with one
scale.

With PyTorch's operations (float8.py) a cast takes some twenty launches, and a product copies the
bytes that it needs transposed. Here it takes two launches. They move 6 bytes for each element of 16
bits, or 4 with a known maximum; PyTorch's operations move 15.

    maximum    amax = max |x|; reads nothing if the maximum is known, as in the recipe `delayed`
    cast       the scale, the bytes, those of the transpose, 1 / scale, and max |x| for the log

For the recipe `current` the kernel that makes x can compute the maximum while x is in registers:
norms and SwiGLU note it on x (kernels.py), and then the cast is one launch, 4 bytes. This holds for
five of the eleven casts of a Llama layer's inputs and gradients, 63% of their elements in Llama-2
7B.

Bytes and scales equal those of float8.py to the last bit. Only a tensor that is not finite has
other bytes with a known maximum; they have no meaning, because 1 / scale is NaN.

PyTorch's operations cast blocks (the recipe `block`) and the rows of experts, which have more than
one scale.
"""

import torch
from torch import Tensor

from base import cuda_kernels
from base.cuda_kernels import kernel
from base.float8 import E5M2, Format, Quantised

# `known` is a maximum from elsewhere, which is used if it is above 0.
fp8_maximum = kernel("fp8_maximum(x[m, k], amax! f32[one], known f32[one]?) -> ()")
# `rows` and `columns` are m, or 0 for bytes that are not needed.
fp8_cast = kernel(
    "fp8_cast(x[m, k], amax! f32[one], inverse! f32[one], known f32[one]?, rows: int, columns: int,"
    " e5m2: int, power_of_two: int) -> q u8[rows, k], transposed u8[k, columns]"
)


# --- maxima that are known before the cast --------------------------------------------------------


def note_maximum(x: Tensor, amax: Tensor) -> None:
    """Note max |x| on x, as an attribute of this one tensor, for the cast that reads x next.

    Results computed from x have no note (a view, a gathered sequence, a sum of gradients), and a
    note is invalid once x has changed. Then the cast computes the maximum itself. The note of a
    part of a tensor is the maximum of that part, so ranks reduce it as usual. Compiled code makes
    no notes. amax: [1] float32; empty: nothing to note.
    """
    if amax.numel() and not torch.compiler.is_compiling() and not x.is_inference():
        x.noted_maximum = amax, x._version


def noted_maximum(x: Tensor) -> Tensor | None:
    amax, version = getattr(x, "noted_maximum", (None, None))
    return amax if amax is not None and version == x._version else None


def as_matrix(x: Tensor) -> Tensor:
    """x [.., n] as a matrix [M, n], with its note."""
    matrix = x.detach().flatten(0, -2)
    if (amax := noted_maximum(x)) is not None:
        note_maximum(matrix, amax)
    return matrix


# --- the cast -------------------------------------------------------------------------------------


def supported(x: Tensor) -> bool:
    """Whether the kernels cast x [M, K]: 16 must divide the sizes, as in a GPU's products."""
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
    """Round x [M, K] to bytes, (by rows, by columns); None for those that are not wanted.

    amax, inverse, known: [1] float32. The scale comes from `known`, or from amax if that is 0 or
    None. amax is raised to max |x|; inverse, which is 0, becomes 1 / scale.
    """
    rows, columns = (len(x) if is_wanted else 0 for is_wanted in wanted)
    options = int(to is E5M2), int(power_of_two)
    q, transposed = fp8_cast(x, amax, inverse, known, rows, columns, *options)

    def in_bytes(q: Tensor) -> Quantised | None:
        return Quantised(q.view(to.dtype), inverse[0], None, power_of_two, x.dtype)

    by_rows = in_bytes(q) if rows else None
    by_columns = in_bytes(transposed.t()) if columns else None
    return by_rows, by_columns
