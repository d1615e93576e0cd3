"""Build the CUDA sources of base/csrc/, and make a torch operation from a kernel's signature.

    swiglu_forward = kernel("swiglu(gate[.., h], up[.., h]) -> y[.., h]")

    @gradient(swiglu_forward, keep=(0, 1))
    def swiglu_gradient(ctx, dy): ...

The signature connects torch with the function swiglu of base/csrc/. It gives the checks of
arguments, the new tensors, the arguments in C, and the schema of the operation.

    x[b, s, h]            a tensor with the dtype of the first; equal letters are equal sizes
    x[.., h]              the same with any dimensions before h, which are rows for the kernel
    targets i64[..]       a tensor of another dtype
    bias[h]?              or None: a null pointer
    logits![.., V]        changed in place
    scale: float          a number
    z[.., h] if bias      an output that is empty without that argument: a null pointer
    d_bias sum[n, h]      an output whose blocks write parts [n, blocks, h], which are added up here
    amax max[n]           an output, 0 at first, which blocks raise to their maxima
    q heads[b, a, s, d]   any strides of whole vectors; an output is stored as [b, s, a, d]

The arguments in C are the stream, the tensors, the outputs, three strides of each input of heads,
the sizes in the order in which their letters appear, the number of blocks if there are parts, and
the numbers. Another function, NAME_blocks(sizes), returns the number of blocks.

A library of kernels is built for each element type, which the sources call T. With meta tensors
nothing is launched, so the same operation tells torch.compile the shapes of its outputs. (An empty
operation takes the host 15 to 20 microseconds as a torch.library.custom_op, and 5 in a Library.)
"""

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

CSRC = Path(__file__).parent / "csrc"
ELEMENTS = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}


@functools.cache
def sources() -> dict[str, str]:
    """{file name: text} of base/csrc/."""
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

    They are compiled at the first use, and kept in TORCH_EXTENSIONS_DIR or
    ~/.cache/torch_extensions.
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
    """ "" if the kernels of a dtype run here, else the reason. They are built if necessary."""
    return load(dtype)[1]


# --- signatures -----------------------------------------------------------------------------------

LIBRARY = torch.library.Library("kernels", "DEF")
# Bytes of a vector, and vectors of the longest row that threads can hold in registers.
VECTOR, LONGEST = 16, 2048
DTYPES = {
    "f32": torch.float32,
    "sum": torch.float32,
    "max": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
ITEM = r"(\w+)(?:: (\w+)|(!?)(?: (\w+))?\[(.*?)\](\??)(?: if (\w+))?)"


class Item(NamedTuple):
    """An argument or an output of a signature."""

    name: str
    # The type of a number; None for a tensor.
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


class Form(NamedTuple):
    """The properties of a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def whole_shape(letters: list[str], sizes: dict) -> tuple[int, ...]:
    """The sizes of these letters; for an error message the letter itself if it has no size."""
    if letters[:1] == [".."]:
        return *sizes[".."], *whole_shape(letters[1:], sizes)
    return tuple(sizes.get(letter, letter) for letter in letters)


def dense(t: Tensor | None) -> Tensor | None:
    """t if it is contiguous and begins at a multiple of 16 bytes, else a copy that does."""
    if t is None:
        return None
    t = t.contiguous()
    return t if t.data_ptr() % VECTOR == 0 else t.clone()


def aligned_heads(t: Tensor) -> Tensor:
    """t [b, a, s, d] with any strides, if each head begins at a multiple of 16 bytes; else a
    contiguous copy."""
    begins = t.storage_offset(), *t.stride()[:3]
    in_vectors = t.stride(-1) == 1 and not any(n % vector_elements(t) for n in begins)
    return t if in_vectors else t.clone(memory_format=torch.contiguous_format)


def in_place(t: Tensor) -> Tensor:
    if not t.is_contiguous():
        raise ValueError("a tensor that a kernel changes in place is not contiguous")
    return t


PREPARE = {"heads": aligned_heads}


class Kernel:
    """Checks its arguments, allocates its outputs, and launches the kernel of a signature."""

    def __init__(self, signature: str):
        inputs, outputs = signature.split(" -> ")
        self.name, inputs = inputs.split("(", 1)
        self.inputs, self.outputs = items(inputs), items(outputs)
        self.at = [n for n, i in enumerate(self.inputs) if not i.number]
        self.numbers_at = [n for n, i in enumerate(self.inputs) if i.number]
        tensors = [self.inputs[n] for n in self.at]
        letters = [letter for i in (*tensors, *self.outputs) for letter in i.shape]
        self.letters = list(dict.fromkeys(letters))
        arguments = ", ".join(i.schema() for i in self.inputs)
        self.schema = f"{self.name}({arguments}) -> ({', '.join(['Tensor'] * len(self.outputs))})"
        self.changed = [n for n, i in enumerate(self.inputs) if i.changed]
        self.prepare = [in_place if i.changed else PREPARE.get(i.dtype, dense) for i in tensors]
        self.heads = [n for n, i in enumerate(tensors) if i.dtype == "heads"]
        self.sums = [n for n, o in enumerate(self.outputs) if o.dtype == "sum"]
        # A cached plan takes the host a tenth of the time.
        self.known_plan = functools.lru_cache(maxsize=256)(self.plan)

    def __call__(self, *args):
        first = args[0]
        tensors = [args[n] for n in self.at]
        forms = [t if t is None else (t.shape, t.dtype, t.device) for t in tensors]
        numbers = [args[n] for n in self.numbers_at]
        is_meta = first.device.type == "meta"
        # On the meta device sizes may be symbols, which cannot be cached.
        outputs, in_c = (self.plan if is_meta else self.known_plan)(*forms, *numbers)
        new = [first.new_empty(shape, dtype=dtype) for shape, dtype in outputs]
        for n, o in enumerate(self.outputs):
            if o.dtype == "heads":
                new[n] = new[n].transpose(1, 2)
            if o.dtype == "max" and new[n].numel():
                new[n].zero_()
        if not is_meta:
            tensors = [prepare(t) for prepare, t in zip(self.prepare, tensors)]
            strides = [n for i in self.heads for n in tensors[i].stride()[:3]]
            launch(self.name, first, *tensors, *new, *strides, *in_c)
            for n in self.changed:
                torch.autograd.graph.increment_version(args[n])
        for n in self.sums:
            new[n] = added(new[n], first)
        if len(new) > 1:
            return tuple(new)
        return new[0] if new else None

    def plan(self, *forms) -> tuple[list[tuple], list]:
        """([(shape, dtype) of each output, with parts in place of sums], [sizes, blocks, numbers
        for the kernel]). forms: the Form of each tensor, then the numbers.

        Raises ValueError, which names the operation, the argument and what was expected.
        """
        tensors = [form and Form(*form) for form in forms[: len(self.at)]]
        numbers = {self.inputs[n].name: v for n, v in zip(self.numbers_at, forms[len(self.at) :])}
        first = tensors[0]
        sizes, given = dict(numbers), set()
        for n, form in zip(self.at, tensors):
            i = self.inputs[n]
            if form is None or (i.optional and math.prod(form.shape) == 0):
                continue
            given.add(i.name)
            shape = form.shape
            if i.shape[0] == "..":
                before = len(shape) - len(i.shape) + 1
                shape = shape[:before], *shape[before:]
            # A new letter has the size that it has here.
            sizes = dict(zip(i.shape, shape)) | sizes
            dtype = DTYPES.get(i.dtype, first.dtype)
            check(f"{self.name}: {i.name}", form, first, dtype, whole_shape(i.shape, sizes))
        in_c = [math.prod(sizes[n]) if n == ".." else sizes[n] for n in self.letters]
        if self.sums:
            in_c.append(query(f"{self.name}_blocks", first, *in_c))
        outputs = []
        for o in self.outputs:
            shape = whole_shape(o.shape, sizes)
            if o.condition and o.condition not in given:
                shape = (0,)
            if o.dtype == "sum":
                shape = shape[0], in_c[-1], shape[1]
            if o.dtype == "heads":
                shape = shape[0], shape[2], shape[1], shape[3]
            outputs.append((shape, DTYPES.get(o.dtype, first.dtype)))
        in_c += [v for name, v in numbers.items() if name not in self.letters]
        return outputs, in_c


def added(parts: Tensor, like: Tensor) -> Tensor:
    """The sum of the blocks' parts. [n, blocks, h] -> [n, h]"""
    if len(parts) == 0:
        return like.new_empty(0, parts.shape[2])
    return parts.sum(1).to(like.dtype)


def kernel(signature: str):
    """Make a torch operation from a kernel's signature."""
    function = Kernel(signature)
    return operation(function.schema)(function)


def operation(schema: str):
    """Register a function as a torch operation, which torch.compile and meta tensors support. The
    decorated name is then the operation."""

    def register(function):
        name = schema.split("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA", "Meta"):
            LIBRARY.impl(name, function, key)
        return getattr(torch.ops.kernels, name).default

    return register


def gradient(of, keep: tuple[int, ...] = (), keep_output: bool = False):
    """Register a function of (ctx, *output gradients) as the backward of an operation.
    ctx.saved_tensors has the inputs at the positions `keep`, or the output; ctx.numbers has the
    arguments that are numbers. Nothing else is kept."""

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*(inputs[i] for i in keep), *((output,) if keep_output else ()))
        ctx.numbers = [a for a in inputs if isinstance(a, int | float)]

    def register(function):
        backward = once_differentiable(function)
        # It is registered in the library: before torch 2.13 a module could not be imported again.
        torch.library.register_autograd(of, backward, setup_context=setup_context, lib=LIBRARY)

    return register


def check(subject: str, t: Tensor | Form, first: Tensor | Form, dtype: torch.dtype, shape) -> None:
    """Raises ValueError unless t has this dtype and shape, and the device of the first argument."""
    if t.device != first.device:
        where = f"expected {first.device}, where the first argument is"
        raise ValueError(f"{subject} is on {t.device}, {where}")
    if t.dtype != dtype:
        raise ValueError(f"{subject} is {t.dtype}, expected {dtype}")
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{subject} has shape {list(t.shape)}, expected {list(shape)}")


# --- launching ------------------------------------------------------------------------------------

# The devices that the kernels support; the tests add the CPU, with an emulator.
DEVICES = {"cuda", "meta"}


def call(name: str, device: torch.device, dtype: torch.dtype, *args):
    """Call a function of a dtype's library on a device. None and empty tensors become 0."""
    kernels, reason = load(dtype)
    if kernels is None:
        raise RuntimeError(f"{name}: the kernels do not run here: {reason}")
    # The emulator of the tests has no devices.
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return extensions.call(kernels, name, *args)
    return extensions.call(kernels, name, *args)


def launch(name: str, like: Tensor, *args) -> None:
    """Launch a kernel of like's dtype on the current stream of its device; do nothing on the meta
    device."""
    if like.device.type == "meta":
        return
    stream = None
    if like.is_cuda:
        # torch.cuda.current_stream has the same number, after 6 µs of the host; this takes 0.1.
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(like.get_device()))
    call(name, like.device, like.dtype, stream, *args)


answer = functools.cache(call)


def query(name: str, like: Tensor | Form, *args: int) -> int:
    """Call a function of the library that computes a size, on this device. On the meta device 1."""
    return 1 if like.device.type == "meta" else answer(name, like.device, like.dtype, *args)


def vector_elements(t: Tensor) -> int:
    """The number of elements of t in a vector."""
    return VECTOR // t.element_size()


def supported(t: Tensor) -> bool:
    """Whether the kernels support tensors like t. They count rows in 32 bits."""
    on_device = t.device.type in DEVICES and t.dtype in ELEMENTS
    return on_device and 0 < t.numel() and t.dim() > 0 and math.prod(t.shape[:-1]) < 2**31


def supported_rows(t: Tensor, longest: int = 2**27) -> bool:
    """Whether they support t [.., h], whose rows must be whole vectors, at most `longest`."""
    return (
        supported(t)
        and t.shape[-1] % vector_elements(t) == 0
        and t.shape[-1] <= longest * vector_elements(t)
    )
