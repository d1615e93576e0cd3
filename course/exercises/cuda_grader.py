"""Builds answers in CUDA for the emulator of the tests, which needs g++ alone: no GPU, no CUDA.

The emulator (tests/cuda_on_cpu.py) runs every thread of a kernel on the CPU. This file gives it the
few names of CUDA's headers that it needs, counts the bytes of vectors that are read and written,
and builds several answers in one call of the compiler.

    python -m course.exercises.check 14
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from base import extensions

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "tests"))
import cuda_on_cpu  # noqa: E402

# The names that base/csrc/common.cuh and the emulator use of CUDA's headers.
NAMES = r"""
#include <cstdint>
#include <cassert>
#include <cfloat>
#define __global__
#define __device__
#define __forceinline__ inline
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorUnknown };
struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half {
    uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
float __half2float(__half);
__half __float2half(float);
__nv_bfloat16 __float2bfloat16(float);
"""
COUNTER = r"""
namespace counter {
int64_t bytes_read = 0, bytes_written = 0;
template <typename V, typename E>
V& counted(E* address) {
    (std::is_const_v<V> ? bytes_read : bytes_written) += sizeof(V);
    return emulator::checked<V>(address);
}
}  // namespace counter
extern "C" int64_t counted_bytes(int64_t written) {
    return written ? counter::bytes_written : counter::bytes_read;
}
extern "C" int64_t forget_bytes() { return counter::bytes_read = counter::bytes_written = 0; }
"""
LAUNCH = 'extern "C" const char* launch('


def counted(source: str) -> str:
    """CUDA as C++ for the emulator, with each vector counted."""
    return cuda_on_cpu.translated(source).replace("emulator::checked<", "counter::counted<")


def program(paths: list[str]) -> str:
    """One C++ file of several answers, each in a namespace of its own."""
    header = cuda_on_cpu.HEADER.replace("#include <cuda", "// #include <cuda")
    common = (ROOT / "base" / "csrc" / "common.cuh").read_text()
    parts = [NAMES, header, COUNTER, counted(common)]
    for path in paths:
        # The emulator translates what common.cuh defines; an answer alone has no such line.
        text = counted(common + Path(path).read_text()).removeprefix(counted(common))
        text = text.replace(LAUNCH, LAUNCH.replace("launch", f"launch_{key(path)}"))
        parts.append(f'namespace of_{key(path)} {{\n#line 1 "{path}"\n{text}\n}}\n')
    return "\n".join(parts)


def key(path: str) -> str:
    """A name made from the text of an answer, whatever its file."""
    return extensions.name_of("swiglu", Path(path).read_text())


def file_of(path: str) -> Path:
    """The library of an answer, once it is built."""
    everything = (
        cuda_on_cpu.HEADER,
        NAMES,
        COUNTER,
        (ROOT / "base" / "csrc" / "common.cuh").read_text(),
    )
    return extensions.folder_of(extensions.name_of(key(path), everything)) / "answer.so"


def build(paths: list[str]) -> str:
    """Compile what is not compiled yet, in one call. Returns "", or why it could not be done."""
    missing = [path for path in dict.fromkeys(paths) if not file_of(path).exists()]
    if not missing:
        return ""
    compiler = shutil.which("g++")
    if compiler is None:
        return "This exercise is compiled by g++, which is not installed here."
    folder = file_of(missing[0]).parent
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "answer.cpp"
    source.write_text(program(missing))
    library = folder / "new.so"
    flags = [*cuda_on_cpu.FLAGS, "-DELEMENT=float", "-std=c++17", "-shared", "-fPIC", "-w"]
    command = [compiler, *flags, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        return compiler_message(done.stderr)
    for path in missing:
        file_of(path).parent.mkdir(parents=True, exist_ok=True)
        # Each answer has a file, so that one dlopen is one answer.
        shutil.copyfile(library, file_of(path))
    library.unlink()
    return ""


def compiler_message(text: str) -> str:
    """The first error of g++, with its lines of source."""
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if "error:" in line), 0)
    return "\n".join(["it does not compile:", *lines[first : first + 3]])


def load(path: str):
    """launch(stream, gate, up, y, n) of an answer that was built, and its library."""
    library = ctypes.CDLL(str(file_of(path)))
    # Threads, and whole warps, run in random order.
    extensions.call(library, "set_order", 2, 2)
    return library, f"launch_{key(path)}"


def run(loaded, gate: Tensor, up: Tensor, y: Tensor) -> tuple[int, int]:
    """Call an answer. Returns the bytes of the vectors that it has read, and written. Raises
    RuntimeError where a vector is outside of the tensors."""
    library, launch = loaded
    extensions.call(library, "forget_bytes")
    extensions.call(library, "forget_memory")
    for t in (gate, up, y):
        begin = t.data_ptr()
        extensions.call(library, "add_memory", begin, begin + t.nbytes)
    with torch.no_grad():
        extensions.call(library, launch, None, gate, up, y, y.numel())
    return tuple(extensions.call(library, "counted_bytes", written) for written in (0, 1))
