"""FP8 numbers: 8-bit floating point, and matrices of it (Micikevicius et al., arXiv 2209.05433).

A byte has a sign s, an exponent e and a mantissa m:

    e4m3   s eeee mmm    up to 448       4 significant bits      no infinity
    e5m2   s eeeee mm    up to 57,344    3 significant bits      the upper half of a float16

    (-1)^s 2^(e - bias) (1 + m / 2^M)        bias 7 or 15, M = 3 or 2; subnormal where e = 0

Many tensors are outside this range: gradients are often below 1e-6. So a tensor is multiplied by a
scale before it is rounded to bytes q, and a product is divided by both scales (section 2):

    scale = 448 / max |x|       q(x) = round(scale x)       x wᵀ ≈ q(x) q(w)ᵀ / (scale_x scale_w)

(For e5m2 it is 57,344 / max |x|.) The maximum is that of the whole tensor, or of each block of r
rows x c columns. A number that is too large for its scale saturates: it becomes the largest number
of the format. A scale that is rounded down to a power of two only changes exponents: then the
rounding to bytes is the only one.

On GPUs from compute capability 8.9 on, F.scaled_mm multiplies bytes; with blocks only on Hopper
GPUs (9.0). Elsewhere FP8 is emulated: bytes are decoded and multiplied in higher precision. The
results differ by the rounding of sums. fp8.py trains with these matrices.

    python -m course.float8        a lesson: bytes by hand, rounding, scales by three recipes

Not covered: FP6, FP4 and MX formats, whose blocks have a scale of 8 bits (Blackwell GPUs).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

# --- formats --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format of a byte: one sign bit, then the exponent's bits, then the mantissa's."""

    name: str
    mantissa_bits: int
    # The bias is subtracted from the exponent's bits.
    bias: int
    largest: float
    dtype: torch.dtype


E4M3 = Format("e4m3", 3, 7, 448.0, torch.float8_e4m3fn)
E5M2 = Format("e5m2", 2, 15, 57344.0, torch.float8_e5m2)


def encode_by_hand(x: Tensor, to: Format) -> Tensor:
    """Round each number to a byte, uint8: to the nearest, ties to even, at most ± the largest."""
    magnitude = x.double().abs().clamp(max=to.largest)
    smallest_normal = 2.0 ** (1 - to.bias)
    # 2^e <= |x| < 2^(e + 1). Subnormal numbers have the steps of the smallest normal one.
    e = torch.frexp(magnitude.clamp(min=smallest_normal)).exponent - 1
    # |x| in steps of 2^(e - M): 2^M steps are the leading 1, the others the mantissa.
    steps = torch.ldexp(magnitude, to.mantissa_bits - e).round().int()
    # The leading 1 adds 1 to the exponent. So does the carry, where 1.11..1 is rounded up to 2.
    code = (e + to.bias - 1) * 2**to.mantissa_bits + steps
    code = torch.where(x.isnan(), 127, code)
    return (code + 128 * x.signbit()).to(torch.uint8)


def decode_by_hand(byte: int, of: Format) -> float:
    """± 2^(e - bias) (1 + m / 2^M); for e = 0, subnormal, ± 2^(1 - bias) (m / 2^M)."""
    sign = -1.0 if byte & 128 else 1.0
    e, m = divmod(byte & 127, 2**of.mantissa_bits)
    fraction = m / 2**of.mantissa_bits
    value = 2.0 ** (e - of.bias) * (1 + fraction) if e else 2.0 ** (1 - of.bias) * fraction
    if value <= of.largest:
        return sign * value
    # e4m3 has no infinity, and NaN only as all ones.
    return sign * float("inf") if of is E5M2 and not m else float("nan")


@lru_cache
def table(of: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of the 256 bytes. [256]"""
    return torch.arange(256, dtype=torch.uint8, device=device).view(of).to(dtype)


def decode(q: Tensor, dtype: torch.dtype) -> Tensor:
    """q.to(dtype) by a table, which is faster on CPUs. It is exact in bf16, float32 and float64."""
    numbers = table(q.dtype, dtype, q.device)
    return numbers.index_select(0, q.view(torch.uint8).flatten().int()).view(q.shape)


# --- scales ---------------------------------------------------------------------------------------


# The least maximum, so that a tensor of zeros has a finite scale. It is far below all gradients,
# also of a loss that is divided by millions of tokens.
LEAST_AMAX = 2.0**-100


def scale_of(amax: Tensor, to: Format, power_of_two: bool) -> Tensor:
    """The largest number of the format, divided by amax, the largest absolute value of a tensor.

    amax: any shape, float32; so is the scale. It is NaN where amax is not finite. Then all results
    are NaN, and the step is skipped.
    """
    scale = (to.largest / amax.double().clamp(min=LEAST_AMAX)).float()
    if power_of_two:
        # Only the exponent's bits stay. (ldexp multiplies by a pow, which a GPU may round.)
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


def blocks_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Cut x into blocks of r x c: [M, K] -> [M / r, r, K / c, c]. The last blocks are padded with
    zeros. A block is at most as large as x."""
    m, k = x.shape
    # The size is at least 1: an expert may have no rows.
    r, c = (max(1, min(most, size)) for most, size in zip(block, (m, k)))
    if m % r or k % c:
        x = F.pad(x, (0, -k % c, 0, -m % r))
    return x.unflatten(1, (-1, c)).unflatten(0, (-1, r))


def block_maxima(x: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The largest absolute value of x [M, K], float32: one number, or one for each block,
    [M / r, K / c]."""
    if block is None:
        # aminmax reads x once, and writes no absolute values.
        least, most = x.aminmax()
        return torch.maximum(-least, most).float()
    return blocks_of(x.abs(), block).amax((1, 3)).float()


# --- a matrix in bytes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantised:
    """A matrix in bytes. It has the operations of a tensor that a linear layer needs: a @ b, and
    a.t()."""

    # [M, K], the bytes, float8_e4m3fn or float8_e5m2.
    q: Tensor
    # 1 / scale, float32: one number, or one for each block of r x c, [M / r, K / c].
    inverse: Tensor
    # (r, c), or None for one scale.
    block: tuple[int, int] | None
    # Whether scales are powers of two: multiplying by them rounds nothing.
    exact: bool
    # The type of the matrix before it was rounded; products have it too.
    dtype: torch.dtype

    def t(self) -> "Quantised":
        if self.block is None:
            return replace(self, q=self.q.t())
        return replace(self, q=self.q.t(), inverse=self.inverse.t(), block=self.block[::-1])

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix [M, K] in `dtype`: the decoded bytes, divided by their scales."""
        numbers = decode(self.q, dtype)
        if self.block is None:
            return numbers * self.inverse.to(dtype)
        m, k = self.q.shape
        blocks = blocks_of(numbers, self.block) * self.inverse[:, None, :, None].to(dtype)
        return blocks.flatten(2).flatten(0, 1)[:m, :k]

    def __matmul__(self, other: "Quantised") -> Tensor:
        """[M, K] @ [K, N] -> [M, N]"""
        if runs_in_fp8(self, other):
            return multiply_bytes(self, other)
        wide = product_dtype(self.dtype, self.exact)
        # One scale is a factor of the sum; those of blocks are factors of its terms.
        if self.block is None:
            y = decode(self.q, wide) @ decode(other.q, wide)
            return (y * self.inverse * other.inverse).to(self.dtype)
        return (self.values(wide) @ other.values(wide)).to(self.dtype)


def quantise(x: Tensor, scale: Tensor, to: Format, block, exact: bool) -> Quantised:
    """Round x [M, K] to bytes. scale: float32, one number, or one for each block, [M / r, K / c];
    block: (r, c), or None; exact: as in Quantised."""
    wide = x.to(product_dtype(x.dtype, exact))
    if block is None:
        scaled = wide * scale
    else:
        scaled = blocks_of(wide, block) * scale[:, None, :, None].to(wide.dtype)
        scaled = scaled.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    # Saturate before the cast, whose result for too large numbers depends on the version of torch.
    q = scaled.clamp(-to.largest, to.largest).to(to.dtype)
    return Quantised(q, 1 / scale, block, exact, x.dtype)


# --- products -------------------------------------------------------------------------------------


def product_dtype(dtype: torch.dtype, exact: bool) -> torch.dtype:
    """The type in which tensors of `dtype` are scaled, and bytes are multiplied in emulation: at
    least float32. With exact scales bf16 stays bf16, which is faster without more rounding: bytes
    times powers of two are bf16 numbers, and libraries sum products of bf16 in float32."""
    if dtype == torch.bfloat16 and exact:
        return dtype
    return torch.promote_types(dtype, torch.float32)


def why_emulated(device: torch.device, dtype: torch.dtype, block: int | None) -> str:
    """Why a device does not multiply bytes, with results of `dtype`; "" where it does. block: the
    size of blocks, None for one scale."""
    # torch.version.cuda is None on CPUs and on AMD's GPUs, where e4m3 is another format.
    if device.type != "cuda" or not torch.version.cuda:
        return "FP8 multiplications need a GPU of compute capability 8.9"
    if dtype == torch.float64:
        return "no FP8 multiplication gives float64"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"{torch.cuda.get_device_name(device)} is below compute capability 8.9"
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    if block and (capability != (9, 0) or cuda < (12, 9) or block != 128):
        return "blocks need a Hopper GPU, CUDA 12.9 and --fp8-block 128"
    return ""


def device_multiplies(a: Quantised) -> bool:
    """Whether a is on a GPU that multiplies its bytes."""
    return not why_emulated(a.q.device, a.dtype, a.block and max(a.block))


def runs_in_fp8(a: Quantised, b: Quantised) -> bool:
    """Whether a GPU multiplies the bytes of a @ b: sizes that 16 divides, or whole blocks of
    128."""
    if not device_multiplies(a):
        return False
    if a.block is None:
        return all(size % 16 == 0 for size in (*a.q.shape, *b.q.shape))
    return blocks_for_library(a, b)


def blocks_for_library(a: Quantised, b: Quantised) -> bool:
    """Whether cuBLAS multiplies these blocks: whole ones, 128 long in the dimension that is summed
    over, and 1 wide in at least one of the operands."""
    whole = not any(size % 128 for size in (*a.q.shape, *b.q.shape))
    return whole and {a.block, b.block[::-1]} <= {(1, 128), (128, 128)} and 1 in a.block + b.block


def multiply_bytes(a: Quantised, b: Quantised) -> Tensor:
    """Compute a @ b by torch.nn.functional.scaled_mm."""
    fast = accumulates_fast(a, b)
    return F.scaled_mm(*library_operands(a, b), output_dtype=a.dtype, use_fast_accum=fast)


def accumulates_fast(a: Quantised, b: Quantised) -> bool:
    """Whether Hopper GPUs may use fast accumulation for a @ b, which keeps some 14 bits of a
    running sum. Otherwise partial sums are added up in float32 (arXiv 2412.19437, section 3.3.2).

    As in Transformer Engine, forward may, where both operands are in e4m3. Backward, where ∂y is in
    e5m2, and products of blocks may not.
    """
    return a.block is None and a.q.dtype == b.q.dtype == E4M3.dtype


def library_operands(a: Quantised, b: Quantised) -> tuple:
    """The arguments of scaled_mm: (bytes of a, of b, scales of a, their type, those of b). Before
    compute capability 10 the bytes of both must be contiguous in the dimension that is summed over.
    Otherwise this makes a transposed copy, which `in_both_layouts` avoids."""
    q_a = a.q.contiguous()
    q_b = b.q.t().contiguous().t()
    return q_a, q_b, *scales_for_library(a), *scales_for_library(b.t())


def in_both_layouts(a: Quantised) -> tuple[Quantised, Quantised]:
    """(a, a with contiguous columns), so that no product must copy it. If no GPU multiplies these
    bytes, both are a itself."""
    if not device_multiplies(a):
        return a, a
    return a, replace(a, q=a.q.t().contiguous().t())


def scales_for_library(a: Quantised) -> tuple[Tensor, F.ScalingType]:
    """(scales in the layout of cuBLAS, their type), for a matrix [n, k] whose product sums over k.
    For blocks 1 x 128: [n, k / 128], contiguous along n. For blocks 128 x 128: [k / 128, n / 128],
    contiguous along k, where padding makes the size a multiple of 4."""
    if a.block is None:
        return a.inverse, F.ScalingType.TensorWise
    if a.block[0] == 1:
        return a.inverse.t().contiguous().t(), F.ScalingType.BlockWise1x128
    padded = F.pad(a.inverse, (0, -a.inverse.shape[1] % 4))
    return padded.contiguous().t(), F.ScalingType.BlockWise128x128
