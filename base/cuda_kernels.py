"""Builds the CUDA sources of csrc/, and makes an operation of torch of a kernel's signature.

    swiglu_forward = kernel("swiglu(gate[.., h], up[.., h]) -> y[.., h]")

    @gradient(swiglu_forward, keep=(0, 1))
    def _(ctx, dy): ...

The signature is all that stands between torch and the function swiglu of csrc/. From it come the
checks of arguments, the new tensors, the arguments in C, and the schema of the operation.

    x[b, s, h]            a tensor with the dtype of the first; equal letters are equal sizes
    x[.., h]              the same with any dimensions before h, which are rows for the kernel
    targets i64[..]       a tensor of another dtype
    bias[h]?              or None: a null pointer
    logits![.., V]        changed in place
    scale: float          a number
    z[.., h] if bias      an output that is empty without that argument: a null pointer
    d_bias sum[n, h]      an output whose blocks leave parts [n, blocks, h], which are added up here

In C: the stream, the tensors, the outputs, the sizes in the order in which their letters appear,
the number of blocks if there are parts, the numbers. Another function, NAME_blocks(sizes), says how
many blocks.

A library of kernels is built for each element type: the sources call it T. With meta tensors
nothing is launched, so the same operation tells torch.compile the shapes of its outputs. (As a
torch.library.custom_op an operation takes 15 to 20 microseconds of the host, as one of a Library 5,
measured with operations that do nothing.)
"""

import contextlib
import ctypes
import functools
import math
import re
from pathlib import Path
from typing import NamedTuple

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
    return ["-std=c++17", "-O3", f"-arch=sm_{arch}", f"-DELEMENT={ELEMENTS[dtype]}"]


def nvcc() -> str:
    own = (extensions.cuda_root() or Path()) / "bin" / "nvcc"
    return str(own) if own.exists() else "nvcc"


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
    command = [nvcc(), *nvcc_flags(capability, dtype), "-Xcompiler", "-fPIC"]
    try:
        return extensions.load("fused", sources(), command), ""
    except (OSError, RuntimeError) as e:
        lines = str(e).splitlines() or ["no reason given"]
        first_error = next((line for line in lines if "error" in line.lower()), lines[0])
        return None, f"the build failed: {first_error.strip()}"


def why_not(dtype: torch.dtype = torch.bfloat16) -> str:
    """ "" if the kernels of a dtype run here; they are built if need be. Otherwise the reason."""
    return load(dtype)[1]


# --- signatures -----------------------------------------------------------------------------------

LIBRARY = torch.library.Library("kernels", "DEF")
DTYPES = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
ITEM = r"(\w+)(?:: (\w+)|(!?)(?: (\w+))?\[(.*?)\](\??)(?: if (\w+))?)"


class Item(NamedTuple):
    """An argument or an output of a signature."""

    name: str
    # int or float; None: a tensor
    number: str | None
    changed: str
    dtype: str | None
    shape: list[str]
    optional: str
    condition: str | None

    def schema(self) -> str:
        if self.number:
            return f"{self.number} {self.name}"
        alias = f"({self.name}!)" if self.changed else ""
        return f"Tensor{alias}{self.optional} {self.name}"


def items(text: str) -> list[Item]:
    found = [match.groups() for match in re.finditer(ITEM, text)]
    return [Item(*groups[:4], (groups[4] or "").split(", "), *groups[5:]) for groups in found]


def expected_shape(letters: list[str], shape: torch.Size, sizes: dict) -> tuple[int, ...]:
    """The shape that a tensor of such letters must have. Sizes that are not known yet are its
    own."""
    if letters[0] == "..":
        n = len(shape) - len(letters) + 1
        shape = shape[:n], *shape[n:]
    for letter, size in zip(letters, shape):
        sizes.setdefault(letter, size)
    return whole_shape(letters, sizes)


def whole_shape(letters: list[str], sizes: dict) -> tuple[int, ...]:
    """The sizes of these letters; a letter where there is none, for an error message."""
    if letters[:1] == [".."]:
        return *sizes[".."], *whole_shape(letters[1:], sizes)
    return tuple(sizes.get(letter, letter) for letter in letters)


class Kernel:
    """Checks its arguments, allocates its outputs, and launches the kernel of a signature."""

    def __init__(self, signature: str):
        inputs, outputs = signature.split(" -> ")
        self.name, inputs = inputs.split("(", 1)
        self.inputs, self.outputs = items(inputs), items(outputs)
        tensors = [i for i in (*self.inputs, *self.outputs) if not i.number]
        self.letters = list(dict.fromkeys(letter for i in tensors for letter in i.shape))
        self.numbers = [i.number is not None and i.name not in self.letters for i in self.inputs]
        arguments = ", ".join(i.schema() for i in self.inputs)
        self.schema = f"{self.name}({arguments}) -> ({', '.join(['Tensor'] * len(self.outputs))})"

    def __call__(self, *args):
        first = args[0]
        sizes, given, tensors = {}, set(), []
        for i, value in zip(self.inputs, args):
            if i.number:
                sizes[i.name] = value
                continue
            is_given = value is not None and not (i.optional and value.numel() == 0)
            if is_given:
                given.add(i.name)
                self.check(i, value, first, sizes)
            tensors.append(value if i.changed else dense(value if is_given else None))
        in_c = [math.prod(sizes[n]) if n == ".." else sizes[n] for n in self.letters]
        blocks = []
        if any(o.dtype == "sum" for o in self.outputs):
            blocks = [query(f"{self.name}_blocks", first, *in_c)]
        new = [self.allocate(o, first, sizes, given, *blocks) for o in self.outputs]
        numbers = [value for value, is_number in zip(args, self.numbers) if is_number]
        launch(self.name, first, *tensors, *new, *in_c, *blocks, *numbers)
        for i, value in zip(self.inputs, args):
            if i.changed and value.device.type != "meta":
                torch.autograd.graph.increment_version(value)
        results = [added(t, first) if o.dtype == "sum" else t for o, t in zip(self.outputs, new)]
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None

    def check(self, i: Item, t: Tensor, first: Tensor, sizes: dict) -> None:
        """Raises ValueError with the operation, the argument, what it is and what was expected."""
        expected = expected_shape(i.shape, t.shape, sizes)
        subject = f"{self.name}: {i.name}"
        check(subject, t, first, DTYPES.get(i.dtype, first.dtype), expected)
        if i.changed and not t.is_contiguous():
            raise ValueError(f"{subject} is not contiguous, and it is changed in place")

    def allocate(self, o: Item, first: Tensor, sizes: dict, given: set, blocks: int = 1) -> Tensor:
        if o.condition and o.condition not in given:
            return first.new_empty(0, dtype=DTYPES.get(o.dtype))
        shape = whole_shape(o.shape, sizes)
        if o.dtype == "sum":
            n, h = shape
            return first.new_empty(n, blocks, h, dtype=torch.float32)
        return first.new_empty(shape, dtype=DTYPES.get(o.dtype))


def added(parts: Tensor, like: Tensor) -> Tensor:
    """[n, blocks, h] -> [n, h]"""
    if len(parts) == 0:
        return like.new_empty(0, parts.shape[2])
    return parts.sum(1).to(like.dtype)


def kernel(signature: str):
    """The operation of torch of a kernel's signature."""
    function = Kernel(signature)
    return operation(function.schema)(function)


def operation(schema: str):
    """Register a function as an operation of torch, so that torch.compile and meta tensors know it.
    The name then means the operation."""

    def register(function):
        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA", "Meta"):
            LIBRARY.impl(name, function, key)
        return getattr(torch.ops.kernels, name).default

    return register


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


def check(subject: str, t: Tensor, first: Tensor, dtype: torch.dtype, shape) -> None:
    """Raises ValueError, unless t has this dtype and shape, and is where the first argument is."""
    if t.device != first.device:
        where = f"expected {first.device}, where the first argument is"
        raise ValueError(f"{subject} is on {t.device}, {where}")
    if t.dtype != dtype:
        raise ValueError(f"{subject} is {t.dtype}, expected {dtype}")
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{subject} has shape {list(t.shape)}, expected {list(shape)}")


# --- launching ------------------------------------------------------------------------------------

# Bytes of a vector, and vectors of the longest row that threads can hold in registers.
VECTOR, LONGEST = 16, 2048
# The devices whose tensors the kernels compute; the tests add the CPU, with an emulator.
DEVICES = {"cuda", "meta"}


def call(name: str, device: torch.device, dtype: torch.dtype, *args):
    """Call a function of a dtype's library on a device. None and empty tensors go as 0."""
    kernels, reason = load(dtype)
    if kernels is None:
        raise RuntimeError(f"{name}: the kernels do not run here: {reason}")
    # The emulator of the tests has no devices.
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        return extensions.call(kernels, name, *args)


def launch(name: str, like: Tensor, *args) -> None:
    """Launch a kernel of like's dtype on the current stream of its device; on the meta device,
    nothing."""
    if like.device.type == "meta":
        return
    stream = None
    if like.is_cuda:
        stream = ctypes.c_void_p(torch.cuda.current_stream(like.device).cuda_stream)
    call(name, like.device, like.dtype, stream, *args)


answer = functools.cache(call)


def query(name: str, like: Tensor, *args: int) -> int:
    """What a function of the library says about sizes, on this device. On the meta device 1."""
    return 1 if like.device.type == "meta" else answer(name, like.device, like.dtype, *args)


def dense(t: Tensor | None) -> Tensor | None:
    """t if it is contiguous and begins at a multiple of 16 bytes, else a copy that does."""
    if t is None or t.device.type == "meta":
        return t
    t = t.contiguous()
    return t if t.data_ptr() % VECTOR == 0 else t.clone()


def vector_elements(t: Tensor) -> int:
    """The number of elements of t in a vector."""
    return VECTOR // t.element_size()


def supported(t: Tensor) -> bool:
    """Whether the kernels compute tensors like t. Rows are counted in 32 bits."""
    on_device = t.device.type in DEVICES and t.dtype in ELEMENTS
    return on_device and 0 < t.numel() and t.dim() > 0 and math.prod(t.shape[:-1]) < 2**31


def supported_rows(t: Tensor, longest: int = 2**27) -> bool:
    """Whether they compute t [.., h], whose rows must be whole vectors, at most `longest`."""
    return (
        supported(t)
        and t.shape[-1] % vector_elements(t) == 0
        and t.shape[-1] <= longest * vector_elements(t)
    )
