"""Fused CUDA operations: one pass over memory where PyTorch makes several.

Between its matrix multiplications a transformer adds, scales and normalises. That is little
arithmetic per element, so these operations take the time of moving their bytes: a GPU that
multiplies at 800 TFLOP/s copies at 4 TB/s, and could do 400 FLOPs while an element of 2 bytes is
read and written. PyTorch reads and writes memory once per small operation. A fused kernel reads
each input once and writes each output once, and no kernel can be faster than that.

    python kernels.py       do the kernels run here; bytes moved and errors, beside PyTorch's own

Bytes per element of the first argument in bf16, forward + backward:

    operation           one pass   computes                                      source
    rms_norm             4 + 6     x / √(mean x² + ε) w                          arXiv 1910.07467
    layer_norm           4 + 6     (x - mean) / √(variance + ε) w + b            arXiv 1607.06450
    rotary               8 + 8     queries and keys rotated by their position    arXiv 2104.09864
    swiglu               6 + 10    silu(gate) up                                 arXiv 2002.05202
    bias_gelu            4 + 6     gelu(x + b), tanh form                        arXiv 1606.08415
    bias_dropout_add     6 + 4     residual + dropout(x + b), mask recomputed    dropout.py
    causal_softmax       3 + 4     softmax(scale x + causal mask), half is read  (all: 4 + 6)
    cross_entropy        2 + 4     log Σ exp z - z_target, gradient in place     arXiv 1805.02867
    permute              6 + 6     copies of tokens, sorted by expert, k = 2     moe.py
    unpermute            3 + 5     back: times probabilities, summed, k = 2      moe.py
    adamw                20        parameter update, bf16 moments, split master  optimizer.py

The CUDA sources are in csrc/, a file for each operation, or for two that share their kernels: read
common.cuh, then swiglu.cu. Here each operation is a class: plain PyTorch (`reference`), which runs
on CPUs, in float64 and where there is no compiler; output shapes alone (`empty`), for torch.compile
and the meta device; and the launch of its kernel. Matrix multiplications stay with cuBLAS,
attention with scaled_dot_product_attention.

How a memory-bound kernel comes near the limit: instructions that move vectors of 16 bytes; several
loads in flight before the first is used; neighbouring threads at neighbouring addresses; sums in
registers and shuffles; each element read once. Comments in the CUDA sources say where each of these
is decided; comparisons/kernels.py measures how near each kernel comes. 16-bit inputs are computed
in float and rounded once. Rows that are not whole vectors are left to PyTorch, except by
cross_entropy.

`apply(model, device)` puts the operations into a finished model from outside. It changes the class
of a module (nn.RMSNorm becomes RMSNorm below), so names, parameters, hooks and the work of other
techniques stay.

Not covered, and found in Transformer Engine, Apex and Liger: FP8 and its scales; norms fused with
the cast or the matrix multiplication; the loss fused with the last matrix multiplication; kernels
tuned for each card and size.
"""

import contextlib
import functools
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import moe
import optimizer
import tensor_parallel
from dropout import dropout_mask
from runtime import extensions

# --- building -------------------------------------------------------------------------------------

CSRC = Path(__file__).parent / "csrc"


@functools.cache
def sources() -> dict[str, str]:
    """{file name: text} of csrc/."""
    return {path.name: path.read_text() for path in sorted(CSRC.iterdir())}


def nvcc_flags(capability: tuple[int, int]) -> list[str]:
    arch = "".join(map(str, capability))
    return ["-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"]


def compile_kernels(name: str, folder: Path, capability: tuple[int, int]) -> None:
    message = f"kernels.py: compiling CUDA kernels, about half a minute; they are kept in {folder}"
    print(message, file=sys.stderr, flush=True)
    extensions.compile_sources(
        name,
        folder,
        sources(),
        extra_cflags=["-O1"],
        extra_cuda_cflags=nvcc_flags(capability),
    )


@functools.cache
def load():
    """(the compiled kernels, "") for this process's GPU, or (None, why they do not run here).

    Compiled at the first use, and kept in TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions.
    """
    if not torch.cuda.is_available():
        return None, "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        device = torch.cuda.get_device_name()
        version = f"{capability[0]}.{capability[1]}"
        return None, f"{device} has compute capability {version}, and they need 8.0"
    versions = torch.__version__, torch.version.cuda
    name = extensions.name_of("fused", sources(), versions, nvcc_flags(capability))
    try:
        return extensions.load(name, lambda folder: compile_kernels(name, folder, capability)), ""
    except (OSError, RuntimeError, ImportError) as e:
        return None, f"the build failed: {extensions.first_error(str(e))}"


# --- registering ----------------------------------------------------------------------------------

# Bytes of a vector.
VECTOR = 16
# Vectors of the longest row that threads can hold in registers.
LONGEST = 2048
LIBRARY = torch.library.Library("fused", "DEF")
# {name: class}
OPERATIONS = {}
# The dtypes of the kernels, as with_type in the CUDA source reads them.
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOATS = (*CODES, torch.float64)


def operation(schema: str):
    """Register a class, a namespace of functions, as torch.ops.fused.NAME:

    empty(*args)             checks the arguments and allocates the outputs; None if the operation
                             changes its arguments in place
    reference(*args)         plain PyTorch
    kernel(outputs, *args)   launches the CUDA kernel
    fits(*args)              False where only the reference can compute these arguments (optional)
    """

    def register(cls):
        name = schema.split("(")[0]

        def on_cpu(*args):
            cls.empty(*args)
            return cls.reference(*args)

        def on_cuda(*args):
            outputs = cls.empty(*args)
            if args[0].dtype not in CODES or not cls.fits(*args) or load()[0] is None:
                return cls.reference(*args)
            cls.kernel(outputs, *args)
            return outputs

        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key, function in (("CPU", on_cpu), ("CUDA", on_cuda), ("Meta", cls.empty)):
            LIBRARY.impl(name, function, key)
        cls.on_cuda = staticmethod(on_cuda)
        OPERATIONS[name] = cls
        return cls

    return register


class Operation:
    """Base of the classes that `operation` registers."""

    @staticmethod
    def fits(*args) -> bool:
        return True


def launch(name: str, *args) -> None:
    """Call a launcher on the current stream. It receives tensors as addresses and None as 0; its
    dtype is that of the first tensor."""

    def number(argument):
        if argument is None:
            return 0
        return argument.data_ptr() if isinstance(argument, Tensor) else argument

    first = next(a for a in args if isinstance(a, Tensor))
    launcher = getattr(load()[0], name)
    numbers = map(number, args)
    if not first.is_cuda:
        # The emulator of the tests.
        return launcher(0, CODES[first.dtype], *numbers)
    with torch.cuda.device(first.device):
        launcher(torch.cuda.current_stream().cuda_stream, CODES[first.dtype], *numbers)


def expect(operation: str, first: Tensor, **arguments) -> None:
    """Check arguments NAME=(tensor or None, allowed dtypes, shape), on the device of `first`.

    Raises ValueError with the operation, the argument, what it is and what was expected.
    """
    for name, (t, dtypes, shape) in arguments.items():
        if t is None:
            continue
        subject = f"{operation}: {name}"
        if t.device != first.device:
            where = f"expected {first.device}, where the first argument is"
            raise ValueError(f"{subject} is on {t.device}, {where}")
        if t.dtype not in dtypes:
            raise ValueError(f"{subject} is {t.dtype}, expected {' or '.join(map(str, dtypes))}")
        if tuple(t.shape) != tuple(shape):
            raise ValueError(f"{subject} has shape {list(t.shape)}, expected {list(shape)}")


def need(operation: str, name: str, t: Tensor, least: int, dtypes=FLOATS) -> None:
    """Check dtype and number of dimensions (at least `least`) of a first argument. Raises
    ValueError."""
    subject = f"{operation}: {name}"
    if t.dtype not in dtypes:
        raise ValueError(f"{subject} is {t.dtype}, expected {' or '.join(map(str, dtypes))}")
    if t.dim() < least:
        shape = list(t.shape)
        raise ValueError(f"{subject} has shape {shape}, expected at least {least} dimensions")


def dense(t: Tensor | None) -> Tensor | None:
    """t if it is contiguous and begins at a multiple of 16 bytes, else a copy that does."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % VECTOR == 0 else t.clone()


def contiguous(t: Tensor) -> Tensor:
    """A new contiguous tensor with shape, dtype and device of t."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def wide_dtype(t: Tensor) -> torch.dtype:
    """float32 for 16 and 32 bits, float64 for float64."""
    return torch.promote_types(t.dtype, torch.float32)


def wide(t: Tensor) -> Tensor:
    """t in at least float32."""
    return t.to(wide_dtype(t))


def plus_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias in at least float32."""
    return wide(x) if bias is None else wide(x) + wide(bias)


def column_sums(t: Tensor) -> Tensor:
    """The sum over rows: [.., h] -> [h]"""
    return t.sum(tuple(range(t.dim() - 1))) if t.dim() > 1 else t.clone()


def rows_of(t: Tensor) -> int:
    """The number of rows of [.., h]."""
    return math.prod(t.shape[:-1])


def vector_of(t: Tensor) -> int:
    """The number of elements of t in a vector."""
    return VECTOR // t.element_size()


def rows_fit(t: Tensor, *_) -> bool:
    """Whether rows of t [.., h] are whole vectors. Rows are counted in 32 bits."""
    return t.shape[-1] > 0 and t.shape[-1] % vector_of(t) == 0 and rows_of(t) < 2**31


def row_fits(t: Tensor, *_) -> bool:
    """Whether threads can hold a row of t [.., n] in registers, up to 2048 vectors."""
    return rows_fit(t) and t.shape[-1] <= LONGEST * vector_of(t)


def elements_fit(t: Tensor, *_) -> bool:
    """Whether the number of elements of t is a multiple of a vector's."""
    return t.numel() % vector_of(t) == 0


def parts_for(counter: str, *args: int, h: int, like: Tensor, times: int = 1) -> Tensor:
    """An empty tensor for the partial sums of column sums: [times x parts, h] float32.

    The function `counter` of the CUDA source gives the number of parts on this device.
    """
    with torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext():
        parts = times * getattr(load()[0], counter)(*args)
        return torch.empty(parts, h, dtype=torch.float32, device=like.device)


# --- norms ----------------------------------------------------------------------------------------


@operation("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
class _RMSNorm(Operation):
    """x: [.., h]; weight: [h] -> y [.., h]; rstd = 1/√(mean x² + ε) [..], in at least float32"""

    @staticmethod
    def empty(x, weight, eps):
        need("rms_norm", "x", x, 1)
        expect("rms_norm", x, weight=(weight, (x.dtype,), x.shape[-1:]))
        return contiguous(x), x.new_empty(x.shape[:-1], dtype=wide_dtype(x))

    @staticmethod
    def reference(x, weight, eps):
        z = wide(x)
        rstd = (z.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = z * rstd * wide(weight)
        return y.to(x.dtype).contiguous(), rstd.squeeze(-1).contiguous()

    fits = staticmethod(row_fits)

    @staticmethod
    def kernel(outputs, x, weight, eps):
        launch("rms_norm", dense(x), dense(weight), *outputs, rows_of(x), x.shape[-1], eps)


@operation("rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)")
class _RMSNormBackward(Operation):
    """-> dx [.., h], dweight [h]"""

    @staticmethod
    def empty(dy, x, weight, rstd):
        need("rms_norm_backward", "dy", dy, 1)
        expect(
            "rms_norm_backward",
            dy,
            x=(x, (dy.dtype,), dy.shape),
            weight=(weight, (dy.dtype,), dy.shape[-1:]),
            rstd=(rstd, (wide_dtype(dy),), dy.shape[:-1]),
        )
        return contiguous(x), contiguous(weight)

    @staticmethod
    def reference(dy, x, weight, rstd):
        d = wide(dy)
        unit = wide(x) * rstd.unsqueeze(-1)
        g = d * wide(weight)
        dx = rstd.unsqueeze(-1) * (g - unit * (g * unit).mean(-1, keepdim=True))
        return dx.to(x.dtype).contiguous(), column_sums(d * unit).to(x.dtype)

    fits = staticmethod(row_fits)

    @staticmethod
    def kernel(outputs, dy, x, weight, rstd):
        h = x.shape[-1]
        launch(
            "rms_norm_backward",
            *map(dense, (dy, x, weight, rstd)),
            *outputs,
            parts_for("norm_parts", h=h, like=x),
            rows_of(x),
            h,
        )


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, rstd = torch.ops.fused.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *torch.ops.fused.rms_norm_backward(dy, *ctx.saved_tensors), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / √(mean x² + ε) weight, over the last dimension (arXiv 1910.07467, eq. 4).

    x: [.., h]; weight: [h], of the same dtype -> [.., h]. Raises ValueError for shapes and dtypes
    that do not fit together, like every operation here.
    """
    return _RMSNormFunction.apply(x, weight, eps)


@operation(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)"
)
class _LayerNorm(Operation):
    """x: [.., h]; weight, bias: [h] -> y [.., h]; mean, rstd = 1/√(variance + ε) [..]"""

    @staticmethod
    def empty(x, weight, bias, eps):
        need("layer_norm", "x", x, 1)
        expect(
            "layer_norm",
            x,
            weight=(weight, (x.dtype,), x.shape[-1:]),
            bias=(bias, (x.dtype,), x.shape[-1:]),
        )
        mean = x.new_empty(x.shape[:-1], dtype=wide_dtype(x))
        return contiguous(x), mean, torch.empty_like(mean)

    @staticmethod
    def reference(x, weight, bias, eps):
        z = wide(x)
        mean = z.mean(-1, keepdim=True)
        z = z - mean
        rstd = (z.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = z * rstd * wide(weight) + wide(bias)
        return (
            y.to(x.dtype).contiguous(),
            mean.squeeze(-1).contiguous(),
            rstd.squeeze(-1).contiguous(),
        )

    fits = staticmethod(row_fits)

    @staticmethod
    def kernel(outputs, x, weight, bias, eps):
        launch("layer_norm", *map(dense, (x, weight, bias)), *outputs, rows_of(x), x.shape[-1], eps)


@operation(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd)"
    " -> (Tensor, Tensor, Tensor)"
)
class _LayerNormBackward(Operation):
    """-> dx [.., h], dweight [h], dbias [h]"""

    @staticmethod
    def empty(dy, x, weight, mean, rstd):
        need("layer_norm_backward", "dy", dy, 1)
        per_row = (wide_dtype(dy),), dy.shape[:-1]
        expect(
            "layer_norm_backward",
            dy,
            x=(x, (dy.dtype,), dy.shape),
            weight=(weight, (dy.dtype,), dy.shape[-1:]),
            mean=(mean, *per_row),
            rstd=(rstd, *per_row),
        )
        return contiguous(x), contiguous(weight), contiguous(weight)

    @staticmethod
    def reference(dy, x, weight, mean, rstd):
        d = wide(dy)
        unit = (wide(x) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
        g = d * wide(weight)
        along = (g * unit).mean(-1, keepdim=True)
        dx = rstd.unsqueeze(-1) * (g - unit * along - g.mean(-1, keepdim=True))
        dweight, dbias = column_sums(d * unit), column_sums(d)
        return dx.to(x.dtype).contiguous(), dweight.to(x.dtype), dbias.to(x.dtype)

    fits = staticmethod(row_fits)

    @staticmethod
    def kernel(outputs, dy, x, weight, mean, rstd):
        h = x.shape[-1]
        launch(
            "layer_norm_backward",
            *map(dense, (dy, x, weight, mean, rstd)),
            *outputs,
            parts_for("norm_parts", h=h, like=x, times=2),
            rows_of(x),
            h,
        )


class _LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = torch.ops.fused.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *torch.ops.fused.layer_norm_backward(dy, *ctx.saved_tensors), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / √(variance + ε) weight + bias, over the last dimension (arXiv 1607.06450).

    x: [.., h]; weight, bias: [h] -> [.., h]
    """
    return _LayerNormFunction.apply(x, weight, bias, eps)


# --- rotary embedding -----------------------------------------------------------------------------


def heads_inside(t: Tensor) -> Tensor:
    """An empty [b, a, s, d] that lies in memory as [b, s, a, d], like a projection's output."""
    b, a, s, d = t.shape
    return t.new_empty(b, s, a, d).transpose(1, 2)


def aligned_heads(t: Tensor) -> Tensor:
    """t [b, a, s, d] with any strides, if each head begins at a multiple of 16 bytes; else a copy
    of which that is true."""
    in_vectors = t.data_ptr() % VECTOR == 0 and not any(n % vector_of(t) for n in t.stride()[:3])
    return t if t.stride(-1) == 1 and in_vectors else dense(t)


@operation("rotary(Tensor q, Tensor k, Tensor cosine, Tensor sine, float sign) -> (Tensor, Tensor)")
class _Rotary(Operation):
    """q: [b, a, s, d]; k: [b, a_kv, s, d]; cosine, sine: [s, d], whose second half repeats the
    first; sign: 1, or -1 to rotate back, which is the gradient -> q and k, rotated"""

    @staticmethod
    def empty(q, k, cosine, sine, sign):
        need("rotary", "q", q, 4)
        b, _, s, d = q.shape
        need("rotary", "k", k, 4)
        expect(
            "rotary",
            q,
            k=(k, (q.dtype,), (b, k.shape[1], s, d)),
            cosine=(cosine, (q.dtype,), (s, d)),
            sine=(sine, (q.dtype,), (s, d)),
        )
        if d % 2:
            shape = list(q.shape)
            raise ValueError(f"rotary: q has shape {shape}, expected an even last dimension")
        return heads_inside(q), heads_inside(k)

    @staticmethod
    def reference(q, k, cosine, sine, sign):
        table = wide(cosine), wide(sine) * sign
        return tuple(heads_inside(t).copy_(gpt.rotate(wide(t), table)) for t in (q, k))

    @staticmethod
    def fits(q, *_):
        return 0 < q.shape[-1] <= 2048 and q.shape[-1] // 2 % vector_of(q) == 0

    @staticmethod
    def kernel(outputs, q, k, cosine, sine, sign):
        q, k = aligned_heads(q), aligned_heads(k)
        b, a, s, d = q.shape
        launch(
            "rotary",
            q,
            k,
            dense(cosine),
            dense(sine),
            *outputs,
            *q.stride()[:3],
            *k.stride()[:3],
            b,
            a,
            k.shape[1],
            s,
            d,
            sign,
        )


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cosine, sine):
        ctx.save_for_backward(cosine, sine)
        return torch.ops.fused.rotary(q, k, cosine, sine, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        return *torch.ops.fused.rotary(dq, dk, *ctx.saved_tensors, -1.0), None, None


def rotary(q: Tensor, k: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """gpt.rotate of queries and keys together (arXiv 2104.09864, eq. 34).

    q: [b, a, s, d]; k: [b, a_kv, s, d], both of any strides; cosine, sine: [s, d] from
    gpt.rotary_table -> the shapes of q and k
    """
    return _RotaryFunction.apply(q, k, cosine, sine)


# --- SwiGLU ---------------------------------------------------------------------------------------


@operation("swiglu(Tensor gate, Tensor up) -> Tensor")
class _SwiGLU(Operation):
    """gate, up: one shape, any -> the same shape"""

    @staticmethod
    def empty(gate, up):
        need("swiglu", "gate", gate, 0)
        expect("swiglu", gate, up=(up, (gate.dtype,), gate.shape))
        return contiguous(gate)

    @staticmethod
    def reference(gate, up):
        return (F.silu(wide(gate)) * wide(up)).to(gate.dtype).contiguous()

    fits = staticmethod(elements_fit)

    @staticmethod
    def kernel(y, gate, up):
        launch("swiglu", dense(gate), dense(up), y, y.numel())


@operation("swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)")
class _SwiGLUBackward(Operation):
    """-> dgate, dup"""

    @staticmethod
    def empty(dy, gate, up):
        need("swiglu_backward", "dy", dy, 0)
        expect(
            "swiglu_backward",
            dy,
            gate=(gate, (dy.dtype,), dy.shape),
            up=(up, (dy.dtype,), dy.shape),
        )
        return contiguous(gate), contiguous(up)

    @staticmethod
    def reference(dy, gate, up):
        d = wide(dy)
        x = wide(gate)
        s = x.sigmoid()
        dgate = d * wide(up) * (s + x * s * (-x).sigmoid())
        dup = d * x * s
        return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()

    fits = staticmethod(elements_fit)

    @staticmethod
    def kernel(outputs, dy, gate, up):
        launch("swiglu_backward", dense(dy), dense(gate), dense(up), *outputs, dy.numel())


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.ops.fused.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return torch.ops.fused.swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up (arXiv 2002.05202, eq. 6). gate, up: one shape, any -> the same shape"""
    return _SwiGLUFunction.apply(gate, up)


# --- bias + GELU, bias + dropout + residual -------------------------------------------------------


@operation("bias_gelu(Tensor x, Tensor? bias) -> Tensor")
class _BiasGELU(Operation):
    """x: [.., h]; bias: [h] or None -> [.., h]"""

    fits = staticmethod(rows_fit)

    @staticmethod
    def empty(x, bias):
        need("bias_gelu", "x", x, 1)
        expect("bias_gelu", x, bias=(bias, (x.dtype,), x.shape[-1:]))
        return contiguous(x)

    @staticmethod
    def reference(x, bias):
        return F.gelu(plus_bias(x, bias), approximate="tanh").to(x.dtype).contiguous()

    @staticmethod
    def kernel(y, x, bias):
        launch("bias_gelu", dense(x), dense(bias), y, rows_of(x), x.shape[-1])


@operation("bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias) -> (Tensor, Tensor)")
class _BiasGELUBackward(Operation):
    """-> dx [.., h]; dbias [h], empty without a bias"""

    fits = staticmethod(rows_fit)

    @staticmethod
    def empty(dy, x, bias):
        need("bias_gelu_backward", "dy", dy, 1)
        expect(
            "bias_gelu_backward",
            dy,
            x=(x, (dy.dtype,), dy.shape),
            bias=(bias, (dy.dtype,), dy.shape[-1:]),
        )
        return contiguous(x), x.new_empty(0 if bias is None else x.shape[-1])

    @staticmethod
    def reference(dy, x, bias):
        u = plus_bias(x, bias)
        z2 = 2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)
        slope = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * u * u)
        # gelu(u) = u sigmoid(2z)
        d = wide(dy) * (z2.sigmoid() + u * z2.sigmoid() * (-z2).sigmoid() * slope)
        dbias = x.new_empty(0) if bias is None else column_sums(d).to(x.dtype)
        return d.to(x.dtype).contiguous(), dbias

    @staticmethod
    def kernel(outputs, dy, x, bias):
        rows = rows_of(x)
        h = x.shape[-1]
        parts = None
        if bias is not None:
            parts = parts_for("bias_gelu_parts", rows, h, CODES[x.dtype], h=h, like=x)
        launch("bias_gelu_backward", *map(dense, (dy, x, bias)), *outputs, parts, rows, h)


class _BiasGELUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return torch.ops.fused.bias_gelu(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        dx, dbias = torch.ops.fused.bias_gelu_backward(dy, x, bias)
        return dx, None if bias is None else dbias


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x + bias) in the tanh form (arXiv 1606.08415, section 2).

    x: [.., h]; bias: [h] or None -> [.., h]
    """
    return _BiasGELUFunction.apply(x, bias)


def mask_arguments(p: float, start: int, s: int, site: int) -> tuple:
    """The launchers' arguments of struct Mask: s, start, site, limit, scale."""
    return s, start, site, min(round(p * 2**32), 2**32 - 1), 1 / (1 - p)


def check_mask(operation: str, t: Tensor, key: Tensor | None, p: float) -> None:
    """Raises ValueError unless key is None or fits to t [b, s, h], and 0 <= p < 1."""
    if key is not None:
        if t.dim() != 3:
            where = "expected [b, s, h], whose coordinates are hashed"
            raise ValueError(f"{operation}: x has shape {list(t.shape)}, {where}")
        expect(operation, t, key=(key, (torch.int32,), t.shape[:1]))
    if not 0 <= p < 1:
        raise ValueError(f"{operation}: p is {p}, expected at least 0 and below 1")


def dropped_out(x: Tensor, key: Tensor | None, site: int, start: int, p: float) -> Tensor:
    """x with the masked elements 0 and the others scaled by 1 / (1 - p); x itself without a key."""
    if key is None:
        return x
    dropped = dropout_mask(key, site, x.shape, {1: start}, p)
    return x.masked_fill(dropped, 0.0) * (1 / (1 - p))


@operation(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, Tensor? key,"
    " int site, int start, float p) -> Tensor"
)
class _BiasDropoutAdd(Operation):
    """x, residual: [.., h], and [b, s, h] if there is a key; bias: [h] or None; key: [b] int32, or
    None to drop nothing; site: which dropout of a layer; start: global number of the first
    position -> the shape of x"""

    fits = staticmethod(rows_fit)

    @staticmethod
    def empty(x, bias, residual, key, site, start, p):
        need("bias_dropout_add", "x", x, 1)
        expect(
            "bias_dropout_add",
            x,
            bias=(bias, (x.dtype,), x.shape[-1:]),
            residual=(residual, (x.dtype,), x.shape),
        )
        check_mask("bias_dropout_add", x, key, p)
        return contiguous(x)

    @staticmethod
    def reference(x, bias, residual, key, site, start, p):
        y = wide(residual) + dropped_out(plus_bias(x, bias), key, site, start, p)
        return y.to(x.dtype).contiguous()

    @staticmethod
    def kernel(y, x, bias, residual, key, site, start, p):
        s = 1 if key is None else x.shape[-2]
        launch(
            "bias_dropout_add",
            *map(dense, (x, bias, residual, key)),
            y,
            rows_of(x),
            x.shape[-1],
            *mask_arguments(p, start, s, site),
        )


@operation(
    "bias_dropout_add_backward(Tensor dy, Tensor key, int site, int start, float p, bool bias)"
    " -> (Tensor, Tensor)"
)
class _BiasDropoutAddBackward(Operation):
    """dy: [b, s, h] -> dx [b, s, h]; dbias [h], empty without a bias"""

    fits = staticmethod(rows_fit)

    @staticmethod
    def empty(dy, key, site, start, p, bias):
        need("bias_dropout_add_backward", "dy", dy, 1)
        check_mask("bias_dropout_add_backward", dy, key, p)
        return contiguous(dy), dy.new_empty(dy.shape[-1] if bias else 0)

    @staticmethod
    def reference(dy, key, site, start, p, bias):
        d = dropped_out(wide(dy), key, site, start, p)
        dbias = column_sums(d).to(dy.dtype) if bias else dy.new_empty(0)
        return d.to(dy.dtype).contiguous(), dbias

    @staticmethod
    def kernel(outputs, dy, key, site, start, p, bias):
        rows = rows_of(dy)
        h = dy.shape[-1]
        parts = None
        if bias:
            counted = rows, h, CODES[dy.dtype]
            parts = parts_for("bias_dropout_add_parts", *counted, h=h, like=dy)
        launch(
            "bias_dropout_add_backward",
            dense(dy),
            dense(key),
            *outputs,
            parts,
            rows,
            h,
            *mask_arguments(p, start, dy.shape[1], site),
        )


class _BiasDropoutAddFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, residual, key, site, start, p):
        ctx.save_for_backward(key)
        ctx.has_bias_grad = bias is not None and ctx.needs_input_grad[1]
        ctx.mask = (site, start, p)
        return torch.ops.fused.bias_dropout_add(x, bias, residual, key, site, start, p)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (key,) = ctx.saved_tensors
        if key is None:
            # Nothing was dropped: dx is dy itself.
            dx = dy
            dbias = column_sums(dy) if ctx.has_bias_grad else None
        else:
            dx, dbias = torch.ops.fused.bias_dropout_add_backward(
                dy, key, *ctx.mask, ctx.has_bias_grad
            )
        return dx, dbias if ctx.has_bias_grad else None, dy, None, None, None, None


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    key: Tensor | None,
    site: int,
    start: int,
    p: float,
) -> Tensor:
    """residual + dropout(x + bias), with the mask of dropout.dropout_mask.

    x, residual: [b, s, h]; bias: [h] or None; key: [b] from dropout.layer_key, None for no dropout;
    site: which dropout of a layer; start: global number of the first position
    -> [b, s, h]
    """
    return _BiasDropoutAddFunction.apply(x, bias, residual, key if p else None, site, start, p)


# --- causal softmax -------------------------------------------------------------------------------


def check_square(operation: str, name: str, t: Tensor) -> None:
    need(operation, name, t, 2)
    if t.shape[-1] != t.shape[-2]:
        raise ValueError(f"{operation}: {name} has shape {list(t.shape)}, expected [.., s, s]")


@operation("causal_softmax(Tensor scores, float scale) -> Tensor")
class _CausalSoftmax(Operation):
    """scores: [.., s, s] -> probabilities p [.., s, s]"""

    @staticmethod
    def empty(scores, scale):
        check_square("causal_softmax", "scores", scores)
        return contiguous(scores)

    @staticmethod
    def reference(scores, scale):
        s = scores.shape[-1]
        above = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
        p = (wide(scores) * scale).masked_fill(above, -math.inf).softmax(-1)
        return p.to(scores.dtype).contiguous()

    fits = staticmethod(row_fits)

    @staticmethod
    def kernel(y, scores, scale):
        launch("causal_softmax", dense(scores), y, rows_of(y), y.shape[-1], scale)


@operation("causal_softmax_backward(Tensor dp, Tensor p, float scale) -> Tensor")
class _CausalSoftmaxBackward(Operation):
    """dp, p: [.., s, s] -> the gradient of the scores"""

    @staticmethod
    def empty(dp, p, scale):
        check_square("causal_softmax_backward", "dp", dp)
        expect("causal_softmax_backward", dp, p=(p, (dp.dtype,), dp.shape))
        return contiguous(p)

    @staticmethod
    def reference(dp, p, scale):
        z = wide(p)
        # Above the diagonal p is 0, and dp, which may be anything, is not read.
        d = wide(dp)
        d = d.masked_fill(torch.ones_like(d, dtype=torch.bool).triu(1), 0)
        dscores = scale * z * (d - (d * z).sum(-1, keepdim=True))
        return dscores.to(p.dtype).contiguous()

    fits = staticmethod(row_fits)

    @staticmethod
    def kernel(out, dp, p, scale):
        launch("causal_softmax_backward", dense(dp), dense(p), out, rows_of(p), p.shape[-1], scale)


class _CausalSoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, scale):
        p = torch.ops.fused.causal_softmax(scores, scale)
        ctx.save_for_backward(p)
        ctx.scale = scale
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx, dp):
        return torch.ops.fused.causal_softmax_backward(dp, *ctx.saved_tensors, ctx.scale), None


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """softmax(scale scores), in which row i attends to columns 0 .. i.

    scores: [.., s, s] -> [.., s, s], 0 above the diagonal
    """
    return _CausalSoftmaxFunction.apply(scores, scale)


# --- cross entropy --------------------------------------------------------------------------------


# The target of a row whose token is in another rank's columns, as in the CUDA source.
ELSEWHERE = -(2**62)


def row_counts_fit(logits: Tensor, *_) -> bool:
    """Rows and columns are counted in 32 bits."""
    return 0 < logits.shape[-1] < 2**31 and rows_of(logits) < 2**31


@operation(
    "cross_entropy_statistics(Tensor logits, Tensor targets, int valid) -> (Tensor, Tensor, Tensor)"
)
class _CrossEntropyStatistics(Operation):
    """logits: [.., V], of which the first `valid` columns count; targets: [..] int64, or ELSEWHERE
    -> largest, total = Σ exp(z - largest), target_logit (0 for ELSEWHERE), each [..] in at least
    float32"""

    fits = staticmethod(row_counts_fit)

    @staticmethod
    def empty(logits, targets, valid):
        name = "cross_entropy_statistics"
        need(name, "logits", logits, 1)
        expect(name, logits, targets=(targets, (torch.int64,), logits.shape[:-1]))
        if not 0 <= valid <= logits.shape[-1]:
            raise ValueError(f"{name}: valid is {valid}, expected 0 to {logits.shape[-1]}")
        largest = logits.new_empty(logits.shape[:-1], dtype=wide_dtype(logits))
        return largest, torch.empty_like(largest), torch.empty_like(largest)

    @staticmethod
    def reference(logits, targets, valid):
        if not valid:
            largest = logits.new_full(targets.shape, -math.inf, dtype=wide_dtype(logits))
            return largest, torch.zeros_like(largest), torch.zeros_like(largest)
        z = wide(logits[..., :valid])
        largest = z.amax(-1)
        total = (z - largest.unsqueeze(-1)).exp().sum(-1)
        elsewhere = targets == ELSEWHERE
        columns = targets.masked_fill(elsewhere, 0).unsqueeze(-1)
        target_logit = z.gather(-1, columns).squeeze(-1).masked_fill(elsewhere, 0)
        return largest, total, target_logit

    @staticmethod
    def kernel(outputs, logits, targets, valid):
        launch(
            "cross_entropy_statistics",
            logits.contiguous(),
            targets.contiguous(),
            *outputs,
            targets.numel(),
            logits.shape[-1],
            valid,
        )


@operation(
    "cross_entropy_gradient(Tensor(a!) logits, Tensor targets, Tensor largest, Tensor total,"
    " Tensor grad, int valid) -> ()"
)
class _CrossEntropyGradient(Operation):
    """Overwrites logits with their gradient, grad (exp(z - largest) / total - onehot(target)), and
    with 0 beyond the valid columns. largest, total: [..], of the whole row; grad: [..], all in at
    least float32"""

    fits = staticmethod(row_counts_fit)

    @staticmethod
    def empty(logits, targets, largest, total, grad, valid):
        need("cross_entropy_gradient", "logits", logits, 1)
        per_row = (wide_dtype(logits),), logits.shape[:-1]
        expect(
            "cross_entropy_gradient",
            logits,
            targets=(targets, (torch.int64,), logits.shape[:-1]),
            largest=(largest, *per_row),
            total=(total, *per_row),
            grad=(grad, *per_row),
        )

    @staticmethod
    def reference(logits, targets, largest, total, grad, valid):
        p = (wide(logits) - largest.unsqueeze(-1)).exp_().div_(total.unsqueeze(-1))
        p[..., valid:] = 0
        elsewhere = (targets == ELSEWHERE).unsqueeze(-1)
        columns = targets.unsqueeze(-1).masked_fill(elsewhere, 0)
        # - 1 in the target's column, - 0 for ELSEWHERE.
        p.scatter_add_(-1, columns, elsewhere.to(p.dtype) - 1)
        logits.copy_(p.mul_(grad.unsqueeze(-1)))

    @staticmethod
    def kernel(outputs, logits, targets, largest, total, grad, valid):
        z = logits.contiguous()
        launch(
            "cross_entropy_gradient",
            z,
            *(t.contiguous() for t in (targets, largest, total, grad)),
            targets.numel(),
            z.shape[-1],
            valid,
        )
        if z is not logits:
            logits.copy_(z)
        else:
            torch.autograd.graph.increment_version(logits)


class _CrossEntropyFunction(torch.autograd.Function):
    """logits are whole rows if `group` is None. With a group they are this rank's columns, and the
    statistics are all-reduced."""

    @staticmethod
    def forward(ctx, logits, targets, vocab_size, group):
        n = logits.shape[-1]
        if group is None:
            local = targets
            valid = n
        else:
            local, elsewhere = tensor_parallel.local_ids(targets, n, vocab_size, group)
            local = local.masked_fill(elsewhere & (local >= 0), ELSEWHERE)
            valid = min(n, max(0, vocab_size - group.rank() * n))
        largest, total, target_logit = torch.ops.fused.cross_entropy_statistics(
            logits, local, valid
        )
        if group is not None:
            of_all = largest.clone()
            dist.all_reduce(of_all, dist.ReduceOp.MAX, group=group)
            sums = torch.stack((total * (largest - of_all).exp(), target_logit))
            dist.all_reduce(sums, group=group)
            largest = of_all
            total, target_logit = sums
        ctx.save_for_backward(logits, local, largest, total)
        ctx.valid = valid
        return total.log() + (largest - target_logit)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, *statistics = ctx.saved_tensors
        gradient = logits.detach()
        torch.ops.fused.cross_entropy_gradient(gradient, *statistics, grad, ctx.valid)
        return gradient, None, None, None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """log Σ exp z - z_target of each row, in at least float32.

    logits: [.., V]; targets: [..] int64 -> [..]. Backward **overwrites** the logits with their
    gradient, so it can run only once.
    """
    return _CrossEntropyFunction.apply(logits, targets, logits.shape[-1], None)


@torch.compiler.disable
def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup
) -> Tensor:
    """cross_entropy of logits [.., V / t] that are sharded over the vocabulary.

    As tensor_parallel.vocab_parallel_cross_entropy: only the statistics are all-reduced, 3 numbers
    per row.
    """
    return _CrossEntropyFunction.apply(logits, targets, vocab_size, group)


# --- the permutation of a mixture of experts ------------------------------------------------------


INDEX = (torch.int64,)


@operation("permute(Tensor x, Tensor order) -> Tensor")
class _Permute(Operation):
    """x: [n, h]; order: [m], assignments; assignment a belongs to token a % n -> [m, h]"""

    @staticmethod
    def empty(x, order):
        need("permute", "x", x, 2)
        expect("permute", x, order=(order, INDEX, (order.numel(),)))
        return x.new_empty(len(order), x.shape[1])

    @staticmethod
    def reference(x, order):
        return moe.permute_rows(x, order)

    @staticmethod
    def fits(x, order):
        return x.numel() > 0 and rows_fit(x) and len(order) < 2**31

    @staticmethod
    def kernel(y, x, order):
        launch("permute", dense(x), order.contiguous(), y, len(y), len(x), x.shape[1])


@operation("unpermute(Tensor rows, Tensor position, Tensor? probabilities) -> Tensor")
class _Unpermute(Operation):
    """rows: [m, h]; position: [k, n], the row of each token's choices, m where it was dropped;
    probabilities: [n, k] in at least float32, or None for 1 -> [n, h], the sum of each token's rows
    times their probabilities"""

    @staticmethod
    def empty(rows, position, probabilities):
        need("unpermute", "rows", rows, 2)
        need("unpermute", "position", position, 2, INDEX)
        expect(
            "unpermute",
            rows,
            position=(position, INDEX, position.shape),
            probabilities=(probabilities, (wide_dtype(rows),), position.t().shape),
        )
        return rows.new_empty(position.shape[1], rows.shape[1])

    @staticmethod
    def reference(rows, position, probabilities):
        if probabilities is None:
            return moe.unpermute_rows(rows, position)
        # Row m, of zeros, stands for what was dropped.
        kept = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        choices = zip(position, probabilities.t())
        return sum(wide(kept[at]) * p.unsqueeze(1) for at, p in choices).to(rows.dtype)

    @staticmethod
    def fits(rows, *_):
        return rows.numel() > 0 and rows_fit(rows)

    @staticmethod
    def kernel(y, rows, position, probabilities):
        launch(
            "unpermute",
            dense(rows),
            position.contiguous(),
            None if probabilities is None else probabilities.contiguous(),
            y,
            len(rows),
            *position.t().shape,
            rows.shape[1],
        )


@operation(
    "unpermute_backward(Tensor dy, Tensor rows, Tensor order, Tensor probabilities)"
    " -> (Tensor, Tensor)"
)
class _UnpermuteBackward(Operation):
    """dy: [n, h]; rows: [m, h]; order: [m]; probabilities: [n, k] -> drows [m, h]; dprobabilities
    [n, k], 0 for dropped choices"""

    @staticmethod
    def empty(dy, rows, order, probabilities):
        need("unpermute_backward", "dy", dy, 2)
        need("unpermute_backward", "rows", rows, 2)
        expect(
            "unpermute_backward",
            dy,
            rows=(rows, (dy.dtype,), (len(order), dy.shape[1])),
            order=(order, INDEX, (len(order),)),
            probabilities=(probabilities, (wide_dtype(dy),), (len(dy), probabilities.shape[-1])),
        )
        return contiguous(rows), contiguous(probabilities)

    @staticmethod
    def reference(dy, rows, order, probabilities):
        n = max(1, len(dy))
        token, choice = order % n, order // n
        # Index into the flattened probabilities [n, k].
        at = token * probabilities.shape[1] + choice
        d = wide(dy)[token]
        dprobabilities = probabilities.new_zeros(probabilities.shape)
        dprobabilities.view(-1)[at] = (d * wide(rows)).sum(-1)
        return (d * probabilities.flatten()[at].unsqueeze(1)).to(rows.dtype), dprobabilities

    @staticmethod
    def fits(dy, rows, *_):
        return rows.numel() > 0 and rows_fit(rows)

    @staticmethod
    def kernel(outputs, dy, rows, order, probabilities):
        drows, dprobabilities = outputs
        launch(
            "unpermute_backward",
            dense(dy),
            dense(rows),
            order.contiguous(),
            probabilities.contiguous(),
            drows,
            dprobabilities.zero_(),
            len(rows),
            *probabilities.shape,
            rows.shape[1],
        )


class _PermuteFunction(torch.autograd.Function):
    """permute forward, unpermute without probabilities backward: each is the other's adjoint."""

    @staticmethod
    def forward(ctx, x, order, position):
        ctx.save_for_backward(position)
        return torch.ops.fused.permute(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return torch.ops.fused.unpermute(dy, *ctx.saved_tensors, None), None, None


class _UnpermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, probabilities, position, order):
        ctx.save_for_backward(rows, order, probabilities)
        return torch.ops.fused.unpermute(rows, position, probabilities)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return *torch.ops.fused.unpermute_backward(dy, *ctx.saved_tensors), None, None


def permute(x: Tensor, order: Tensor, position: Tensor) -> Tensor:
    """Copies of the tokens in the order of the assignments (moe.DispatchPlan).

    x: [n, h]; order: [m]; position: [k, n], the inverse of order -> [m, h]
    """
    return _PermuteFunction.apply(x, order, position)


def unpermute(rows: Tensor, probabilities: Tensor, position: Tensor, order: Tensor) -> Tensor:
    """The sum of each token's rows times their router probabilities, the way back from `permute`.

    rows: [m, h]; probabilities: [n, k] in at least float32; position: [k, n]; order: [m] -> [n, h]
    """
    return _UnpermuteFunction.apply(rows, probabilities, position, order)


# --- AdamW ----------------------------------------------------------------------------------------


@operation(
    "adamw(Tensor(a!) weight, Tensor(b!)? low, Tensor(c!)? master, Tensor gradient,"
    " Tensor(d!) exp_avg, Tensor(e!) exp_avg_sq,"
    " float lr, float decay, float beta1, float beta2, float eps, int step, float scale) -> ()"
)
class _AdamW(Operation):
    """All tensors have one shape and are contiguous; gradient: float32, multiplied by scale first.

    weight      low      master     exp_avg, exp_avg_sq
    bf16        int16    None       bf16                   the master is split into weight and low
    float32     None     None       bf16                   the weight is the master
    16 bits     None     float32    float32                the master is beside the weight
    """

    @staticmethod
    def empty(weight, low, master, gradient, exp_avg, exp_avg_sq, *_):
        shape = weight.shape
        state = (torch.bfloat16,)
        dtypes = (torch.float32,)
        if master is not None:
            state = (torch.float32,)
            dtypes = (torch.bfloat16, torch.float16)
        if low is not None:
            dtypes = (torch.bfloat16,)
        need("adamw", "weight", weight, 0, dtypes)
        expect(
            "adamw",
            weight,
            low=(low, (torch.int16,), shape),
            master=(master, (torch.float32,), shape),
            gradient=(gradient, (torch.float32,), shape),
            exp_avg=(exp_avg, state, shape),
            exp_avg_sq=(exp_avg_sq, state, shape),
        )
        changed = dict(
            weight=weight, low=low, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq
        )
        for name, t in changed.items():
            if t is not None and not t.is_contiguous():
                strides = list(t.stride())
                raise ValueError(
                    f"adamw: {name} has strides {strides}, expected a contiguous tensor, because it"
                    " is changed in place"
                )

    @staticmethod
    def reference(weight, low, master, gradient, exp_avg, exp_avg_sq, *options):
        lr, decay, beta1, beta2, eps, step, scale = options
        if master is not None:
            x = master
        elif low is not None:
            x = optimizer.join_master(weight, low)
        else:
            x = weight.clone()
        g = gradient * scale
        m = exp_avg.float().lerp_(g, 1 - beta1)
        v = exp_avg_sq.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(eps)
        x.mul_(1 - lr * decay).addcdiv_(m, root, value=-lr / (1 - beta1**step))
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        if low is not None:
            optimizer.split_master(x, weight, low)
        else:
            weight.copy_(x)

    @staticmethod
    def fits(weight, *tensors_and_options):
        tensors = [weight, *(t for t in tensors_and_options if isinstance(t, Tensor))]
        return weight.numel() % 8 == 0 and all(t.data_ptr() % VECTOR == 0 for t in tensors)

    @staticmethod
    def kernel(outputs, weight, low, master, gradient, exp_avg, exp_avg_sq, *options):
        lr, decay, beta1, beta2, eps, step, scale = options
        launch(
            "adamw",
            weight,
            low,
            master,
            gradient.contiguous(),
            exp_avg,
            exp_avg_sq,
            weight.numel(),
            beta1,
            beta2,
            eps,
            1 - lr * decay,
            lr / (1 - beta1**step),
            math.sqrt(1 - beta2**step),
            scale,
        )
        for t in (weight, low, master, exp_avg, exp_avg_sq):
            if t is not None:
                torch.autograd.graph.increment_version(t)


def adamw(*args, **options) -> None:
    """optimizer.AdamW's update of one parameter, in place, in one pass over its bytes (arXiv
    1711.05101, algorithm 2). Arguments: _AdamW's schema; step counts from 1."""
    torch.ops.fused.adamw(*args, **options)


# --- in a model -----------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


class Rotary(gpt.Rotary):
    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        # While decoding, each row has its own position, and so its own table.
        return rotary(q, k, *table) if table[0].dim() == 2 else super().forward(q, k, table)


class SwiGLU(gpt.SwiGLU):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)


class GELU(gpt.GELU):
    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return bias_gelu(x, bias)


class BiasDropoutAdd(gpt.BiasDropoutAdd):
    def forward(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, drop_key: Tensor | None
    ) -> Tensor:
        if bias is None and (drop_key is None or self.dropout.p == 0):
            # PyTorch does this in one pass already.
            return residual + x
        return bias_dropout_add(
            x,
            bias,
            residual,
            drop_key,
            self.dropout.site,
            self.dropout.shard_index.get(1, 0) * x.shape[1],
            self.dropout.p,
        )


class CausalProbabilities(gpt.CausalProbabilities):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return causal_softmax(q @ k.transpose(2, 3), q.shape[-1] ** -0.5)


class Head(gpt.Head):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets)


class VocabParallelHead(tensor_parallel.VocabParallelHead):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, targets, self.vocab_size, self.group)


class MoE(moe.MoE):
    permute = staticmethod(permute)
    unpermute = staticmethod(unpermute)


FUSED = {
    nn.RMSNorm: RMSNorm,
    nn.LayerNorm: LayerNorm,
    gpt.Rotary: Rotary,
    gpt.SwiGLU: SwiGLU,
    gpt.GELU: GELU,
    gpt.BiasDropoutAdd: BiasDropoutAdd,
    gpt.CausalProbabilities: CausalProbabilities,
    gpt.Head: Head,
    tensor_parallel.VocabParallelHead: VocabParallelHead,
    moe.MoE: MoE,
}


def swap(model: nn.Module) -> None:
    """Make the modules of a model compute with the operations above, on any device.

    To be called after tensor_parallel.apply and whatever else replaces modules. The operations need
    arguments of one dtype, so the model does not run under autocast afterwards.
    """
    for module in model.modules():
        if isinstance(module, nn.RMSNorm | nn.LayerNorm) and (
            len(module.normalized_shape) > 1
            or module.weight is None
            or module.eps is None
            or getattr(module, "bias", module) is None
        ):
            # Not a norm that the operations compute.
            continue
        module.__class__ = FUSED.get(type(module), type(module))


def apply(model: nn.Module, device: torch.device) -> str:
    """`swap` if the kernels run on this device; after everything else that replaces modules.

    Returns "", or why the kernels do not run: the model is unchanged then.
    """
    why_not = load()[1] if device.type == "cuda" else "no CUDA device"
    if not why_not:
        swap(model)
    return why_not


if __name__ == "__main__":
    from lessons import kernel_bytes

    kernel_bytes.main()
