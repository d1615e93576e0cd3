"""Builds the CUDA sources of csrc/, registers functions as operations of torch, launches kernels.

    @operation("swiglu(Tensor gate, Tensor up) -> Tensor")
    def swiglu_forward(gate, up):
        y = empty(gate)
        launch("swiglu", gate, dense(gate), dense(up), y, y.numel())
        return y

    @gradient(swiglu_forward)
    def _(ctx, dy): ...

A library is built for each element type: the sources call it T. With meta tensors nothing is
launched, so the same function tells torch.compile the shapes of the outputs.
"""

import ctypes
import functools
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from base import extensions

# --- building: a library for each element type ----------------------------------------------------

CSRC = Path(__file__).parent.parent / "csrc"
ELEMENTS = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}


@functools.cache
def sources() -> dict[str, str]:
    """{file name: text} of csrc/."""
    return {path.name: path.read_text() for path in sorted(CSRC.iterdir())}


def nvcc_flags(capability: tuple[int, int], dtype: torch.dtype) -> list[str]:
    arch = "".join(map(str, capability))
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    return ["-O3", f"-DELEMENT={ELEMENTS[dtype]}", code]


@functools.cache
def load(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str]:
    """(the compiled kernels, "") for this process's GPU, or (None, why they do not run here).

    Compiled at the first use, and kept in TORCH_EXTENSIONS_DIR or ~/.cache/torch_extensions.
    """
    if not torch.cuda.is_available():
        return None, "no CUDA device"
    if dtype not in ELEMENTS:
        return None, f"there are none for {dtype}"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        device = torch.cuda.get_device_name()
        version = f"{capability[0]}.{capability[1]}"
        return None, f"{device} has compute capability {version}, and they need 8.0"
    flags = nvcc_flags(capability, dtype)
    name = extensions.name_of("fused", sources(), torch.__version__, torch.version.cuda, flags)

    def compile_into(folder: Path) -> None:
        print(f"compiling CUDA kernels into {folder}", file=sys.stderr, flush=True)
        extensions.compile_sources(name, folder, sources(), extra_cuda_cflags=flags)

    try:
        return extensions.load(name, compile_into), ""
    except (OSError, RuntimeError) as e:
        return None, f"the build failed: {extensions.first_error(str(e))}"


def why_not(dtype: torch.dtype = torch.bfloat16) -> str:
    """ "" if the kernels of a dtype run here; they are built if need be. Otherwise the reason."""
    return load(dtype)[1]


# --- registering and launching --------------------------------------------------------------------

# Bytes of a vector, and vectors of the longest row that threads can hold in registers.
VECTOR, LONGEST = 16, 2048
LIBRARY = torch.library.Library("fused", "DEF")
# The devices whose tensors the kernels compute; the tests add the CPU, with an emulator.
DEVICES = {"cuda", "meta"}


def operation(schema: str):
    """Register a function as an operation of torch, fused::NAME, so that torch.compile and meta
    tensors know it. The name then means the operation."""

    def register(function):
        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA", "Meta"):
            LIBRARY.impl(name, function, key)
        return getattr(torch.ops.fused, name).default

    return register


def registered() -> list[str]:
    """The names of all operations, fused::NAME."""
    return sorted(LIBRARY._op_defs)


def gradient(of, keep: tuple[int, ...] = (), keep_output: bool = False):
    """Register a function of (ctx, *output gradients) as the backward of an operation. It finds in
    ctx.saved_tensors the inputs at the positions `keep`, or the output, and in ctx.numbers the
    arguments that are numbers. Nothing else stays in memory."""

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*(inputs[i] for i in keep), *((output,) if keep_output else ()))
        ctx.numbers = [a for a in inputs if isinstance(a, int | float)]

    def register(function):
        torch.library.register_autograd(
            of, once_differentiable(function), setup_context=setup_context, lib=LIBRARY
        )

    return register


def call(name: str, dtype: torch.dtype, *args):
    """Call a function of a dtype's library. Tensors go as addresses; None and empty ones as 0."""
    library, reason = load(dtype)
    if library is None:
        raise RuntimeError(f"{name}: the kernels do not run here: {reason}")
    return extensions.call(library, name, *args)


def launch(name: str, like: Tensor, *args) -> None:
    """Launch a kernel on the current stream of `like`'s device; on the meta device, nothing."""
    if like.device.type == "meta":
        return
    if not like.is_cuda:
        # The emulator of the tests.
        return call(name, like.dtype, None, *args)
    with torch.cuda.device(like.device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call(name, like.dtype, stream, *args)


def query(name: str, device: torch.device, dtype: torch.dtype, *args: int) -> int:
    """What a function of the library says about sizes, on this device. On the meta device 1."""
    return 1 if device.type == "meta" else answer(name, device, dtype, *args)


@functools.cache
def answer(name: str, device: torch.device, dtype: torch.dtype, *args: int) -> int:
    if device.type == "cpu":
        return call(name, dtype, *args)
    with torch.cuda.device(device):
        return call(name, dtype, *args)


def check(operation: str, first: Tensor, **arguments) -> None:
    """Check arguments NAME=(tensor or None, shape), of dtype and device of `first`, or NAME=(tensor
    or None, shape, dtype).

    Raises ValueError with the operation, the argument, what it is and what was expected.
    """
    for name, (t, shape, *dtype) in arguments.items():
        if t is None:
            continue
        (dtype,) = dtype or (first.dtype,)
        subject = f"{operation}: {name}"
        if t.device != first.device:
            where = f"expected {first.device}, where the first argument is"
            raise ValueError(f"{subject} is on {t.device}, {where}")
        if t.dtype != dtype:
            raise ValueError(f"{subject} is {t.dtype}, expected {dtype}")
        if tuple(t.shape) != tuple(shape):
            raise ValueError(f"{subject} has shape {list(t.shape)}, expected {list(shape)}")


def dense(t: Tensor | None) -> Tensor | None:
    """t if it is contiguous and begins at a multiple of 16 bytes, else a copy that does."""
    if t is None or t.device.type == "meta":
        return t
    t = t.contiguous()
    return t if t.data_ptr() % VECTOR == 0 else t.clone()


def empty(t: Tensor, *shape: int, dtype=None) -> Tensor:
    """A new contiguous tensor on the device of t, by default with its shape and dtype."""
    return t.new_empty(shape or t.shape, dtype=dtype)


def per_row(t: Tensor) -> Tensor:
    """A new float32 tensor with a number for each row of t [.., h]."""
    return t.new_empty(t.shape[:-1], dtype=torch.float32)


def not_wanted(t: Tensor) -> Tensor:
    """For an output that is not wanted: an operation returns tensors, never None. A kernel gets an
    empty tensor as a null pointer."""
    return t.new_empty(0)


def rows(t: Tensor) -> int:
    """The number of rows of [.., h]."""
    return math.prod(t.shape[:-1])


def vector_elements(t: Tensor) -> int:
    """The number of elements of t in a vector."""
    return VECTOR // t.element_size()


def supported(t: Tensor) -> bool:
    """Whether the kernels compute tensors like t. Rows are counted in 32 bits."""
    on_device = t.device.type in DEVICES and t.dtype in ELEMENTS
    return on_device and 0 < t.numel() and t.dim() > 0 and rows(t) < 2**31


def supported_rows(t: Tensor, longest: int = 2**27) -> bool:
    """Whether they compute t [.., h], whose rows must be whole vectors, at most `longest`."""
    return (
        supported(t)
        and t.shape[-1] % vector_elements(t) == 0
        and t.shape[-1] <= longest * vector_elements(t)
    )
