"""Builds the CUDA sources of csrc/, registers functions as operations of torch, launches kernels.

    @operation(library, "swiglu(Tensor gate, Tensor up) -> Tensor")
    def swiglu_forward(gate, up):
        return launch("swiglu", gate, (gate, up), empty(gate), rows(gate), gate.shape[-1])

    @gradient(swiglu_forward, keep=(0, 1))
    def _(ctx, dy): ...

A library of kernels is built for each element type: the sources call it T. With meta tensors
nothing is launched, so the same function tells torch.compile the shapes of the outputs. (As a
torch.library.custom_op an operation takes 15 to 20 microseconds of the host, as one of a Library 5,
measured with operations that do nothing.)
"""

import contextlib
import ctypes
import functools
import math
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
    try:
        return extensions.load("fused", sources(), extra_cuda_cflags=flags), ""
    except (OSError, RuntimeError) as e:
        return None, f"the build failed: {extensions.first_error(str(e))}"


def why_not(dtype: torch.dtype = torch.bfloat16) -> str:
    """ "" if the kernels of a dtype run here; they are built if need be. Otherwise the reason."""
    return load(dtype)[1]


# --- registering and launching --------------------------------------------------------------------

# Bytes of a vector, and vectors of the longest row that threads can hold in registers.
VECTOR, LONGEST = 16, 2048
# The devices whose tensors the kernels compute; the tests add the CPU, with an emulator.
DEVICES = {"cuda", "meta"}


def operation(library: torch.library.Library, schema: str):
    """Register a function as an operation of torch, so that torch.compile and meta tensors know it.
    The name then means the operation."""

    def register(function):
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA", "Meta"):
            library.impl(name, function, key)
        return getattr(getattr(torch.ops, library.ns), name).default

    return register


def of_rows(library: torch.library.Library, schema: str):
    """An operation whose outputs are like its first tensor. The kernel of its name is given its
    tensors, its outputs, the rows and columns of the first tensor, and its numbers."""
    name = schema.split("(")[0]
    inputs, outputs = (side.count("Tensor") for side in schema.split("->"))

    def function(*args):
        first = args[0]
        new = [empty(first) for _ in range(outputs)]
        sizes = rows(first), first.shape[-1]
        launch(name, first, args[:inputs], tuple(new), *sizes, *args[inputs:])
        return tuple(new) if outputs > 1 else new[0]

    return operation(library, schema)(function)


def gradient(of, keep: tuple[int, ...] = (), keep_output: bool = False):
    """Register a function of (ctx, *output gradients) as the backward of an operation. It finds in
    ctx.saved_tensors the inputs at the positions `keep`, or the output, and in ctx.numbers the
    arguments that are numbers. Nothing else stays in memory."""

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*(inputs[i] for i in keep), *((output,) if keep_output else ()))
        ctx.numbers = [a for a in inputs if isinstance(a, int | float)]

    def register(function):
        backward = once_differentiable(function)
        torch.library.register_autograd(of, backward, setup_context=setup_context)

    return register


def call(name: str, device: torch.device, dtype: torch.dtype, *args):
    """Call a function of a dtype's library on a device. None and empty tensors go as 0."""
    kernels, reason = load(dtype)
    if kernels is None:
        raise RuntimeError(f"{name}: the kernels do not run here: {reason}")
    # The emulator of the tests has no devices.
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        return extensions.call(kernels, name, *args)


def launch(name: str, like: Tensor, inputs: tuple, outputs, *others):
    """Launch a kernel of like's dtype on the current stream of its device; on the meta device,
    nothing. inputs: tensors or None, made dense; outputs: a tensor, or a tuple of tensors, which is
    returned; others: what else the kernel is given."""
    if like.device.type != "meta":
        stream = None
        if like.is_cuda:
            stream = ctypes.c_void_p(torch.cuda.current_stream(like.device).cuda_stream)
        written = outputs if isinstance(outputs, tuple) else (outputs,)
        call(name, like.device, like.dtype, stream, *map(dense, inputs), *written, *others)
    return outputs


answer = functools.cache(call)


def query(name: str, like: Tensor, *args: int) -> int:
    """What a function of the library says about sizes, on this device. On the meta device 1."""
    return 1 if like.device.type == "meta" else answer(name, like.device, like.dtype, *args)


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
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % VECTOR == 0 else t.clone()


def empty(t: Tensor, *shape: int, dtype=None) -> Tensor:
    """A new contiguous tensor on the device of t, by default with its shape and dtype. With a shape
    of 0 it is a null pointer for a kernel: an operation returns tensors, never None."""
    return t.new_empty(shape or t.shape, dtype=dtype)


def per_row(t: Tensor) -> Tensor:
    """A new float32 tensor with a number for each row of t [.., h]."""
    return t.new_empty(t.shape[:-1], dtype=torch.float32)


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
