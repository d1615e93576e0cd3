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
    bias_dropout_add     6 + 4     residual + dropout(x + b), mask recomputed    dropout_mask
    causal_softmax       3 + 4     softmax(scale x + causal mask), half is read  (all: 4 + 6)
    cross_entropy        2 + 4     log Σ exp z - z_target, gradient in place     arXiv 1805.02867
    permute              6 + 6     copies of tokens, sorted by expert, k = 2     moe.py
    unpermute            3 + 5     back: times probabilities, summed, k = 2      moe.py
    adamw                20        parameter update, bf16 moments, split master  optimizer.py

Each operation has a chapter with three implementations: CUDA; plain PyTorch (`reference`), which
runs on CPUs, in float64 and where there is no compiler; and output shapes alone (`empty`), for
torch.compile and the meta device. Read SwiGLU first. Matrix multiplications stay with cuBLAS,
attention with scaled_dot_product_attention.

How a memory-bound kernel comes near the limit: instructions that move vectors of 16 bytes; several
loads in flight before the first is used; neighbouring threads at neighbouring addresses; sums in
registers and shuffles; each element read once. Comments in the CUDA sources say where each of these
is decided; comparisons/kernels.py measures how near each kernel comes. 16-bit inputs are computed
in float and rounded once.

`apply(model, device)` puts the operations into a finished model from outside. It changes the class
of a module (nn.RMSNorm becomes RMSNorm below), so names, parameters, hooks and the work of other
techniques stay.

Not covered, and found in Transformer Engine, Apex and Liger: FP8 and its scales; norms fused with
the cast or the matrix multiplication; the loss fused with the last matrix multiplication; kernels
tuned for each card and size.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import math
import os
import re
import shutil
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
from cross_entropy import cross_entropy as eager_cross_entropy
from dropout import dropout_key, dropout_mask
from model_config import GPTConfig
from routers import MoEConfig

# --- what all kernels use -------------------------------------------------------------------------

COMMON = r"""
// For readers who have never written a kernel.
//
// Kernel          A function that many threads run, each on its own elements. blockIdx and
//                 threadIdx tell a thread its position.
// Warp            32 threads, its lanes. They execute each instruction together. A shuffle reads
//                 another lane's register. Loads of neighbouring addresses become one load.
// Block           Up to 1024 threads on one multiprocessor. They share its shared memory and can
//                 wait for each other with __syncthreads().
// Grid            All blocks of a launch. Blocks cannot wait for each other.
// Multiprocessor  Keeps up to 2048 threads resident, if its 65,536 registers suffice for them. It
//                 runs the warps whose data has arrived while the others wait for memory.
// Launch          kernel<<<grid, block, 0, stream>>>(..). Launches on one stream run in order.
//
// __launch_bounds__(n) promises that a block has at most n threads, so that the compiler may give
// each thread more registers. __restrict__ promises that no other pointer reaches that memory.
// Shared memory has 32 banks; it is slower when lanes of a warp read different words of one bank.
//
// Launchers take addresses and numbers, so this source needs no PyTorch headers: it builds in
// seconds, and any C++ compiler can read it.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cassert>
#include <cfloat>
#include <cstdint>
#include <stdexcept>

// What one load or store instruction moves: at most 16 bytes, which are 8 elements of 16 bits. Wide
// vectors need fewer instructions and keep more bytes in flight. Memory answers after about 700 ns,
// so 4 TB/s need 4e12 x 700e-9 = 3 MB in flight at any time, 21 KB on each of 132 multiprocessors.
// 2048 threads with one vector each have 32 KB in flight; 512 threads need three vectors each.
template <typename T, int W>
struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) Vector {
    T at[W];
};
template <typename T>
constexpr int PER_VECTOR = 16 / sizeof(T);

template <int W, typename T>
__device__ __forceinline__ Vector<T, W> read(const T* from) {
    return *reinterpret_cast<const Vector<T, W>*>(from);
}
template <int W, typename T>
__device__ __forceinline__ void write(T* to, const Vector<T, W>& v) {
    *reinterpret_cast<Vector<T, W>*>(to) = v;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
    return __uint_as_float(uint32_t(__bfloat16_as_ushort(x)) << 16);
}
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
// Rounds to nearest.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half(x);
}

// 2^x and 1/x in one instruction each. Results below 2^-126 become 0; __expf and __fdividef spend
// more instructions to keep those.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
__device__ __forceinline__ float reciprocal_fast(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1 / x;
#endif
}

// e^x: two instructions where the result is rounded to 16 bits anyway, the accurate function for
// float. At 4.3 TB/s an H200 has time for about 8 thread instructions per byte moved; a kernel that
// needs more is limited by instructions, not by memory.
template <typename T>
__device__ __forceinline__ float exp_for(float x) {
    if constexpr (sizeof(T) == 2)
        return exp2_fast(1.4426950408889634f * x);
    else
        return expf(x);
}
// e^(x - less)
template <typename T>
__device__ __forceinline__ float exp_for(float x, float less) {
    if constexpr (sizeof(T) == 2)
        return exp2_fast(1.4426950408889634f * (x - less));
    else
        return expf(x - less);
}
// here = sigmoid(x), there = sigmoid(-x) = 1 - sigmoid(x) without the cancellation of a difference.
struct Sigmoid {
    float here, there;
};
// From e^-|x|, which never overflows.
template <typename T>
__device__ __forceinline__ Sigmoid sigmoid(float x) {
    float e = exp_for<T>(-fabsf(x));
    float s;
    if constexpr (sizeof(T) == 2)
        s = reciprocal_fast(1.f + e);
    else
        s = 1.f / (1.f + e);
    return x < 0 ? Sigmoid{e * s, s} : Sigmoid{s, e * s};
}

// All-reduce over the threads of one row: N sums or maxima, which every thread of the row receives.
// The 32 lanes of a warp exchange registers in 5 steps; several warps exchange through shared
// memory. A row is blockDim.x threads, a block holds blockDim.y rows. All threads of the block must
// call it together, because it waits at barriers.
struct Sum {
    static __device__ float of(float a, float b) { return a + b; }
};
struct Max {
    static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

template <typename OF, int N>
__device__ __forceinline__ void over_row(float (&x)[N]) {
    #pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        #pragma unroll
        for (int n = 0; n < N; n++)
            x[n] = OF::of(x[n], __shfl_xor_sync(0xffffffffu, x[n], lane));
    int warps = blockDim.x / 32;
    if (warps == 1) return;
    __shared__ float of_warp[32][N];
    int first = threadIdx.y * warps;
    if (threadIdx.x % 32 == 0)
        #pragma unroll
        for (int n = 0; n < N; n++)
            of_warp[first + threadIdx.x / 32][n] = x[n];
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < N; n++) {
        x[n] = of_warp[first][n];
        // All lanes read one address: a broadcast, no bank conflict.
        for (int w = 1; w < warps; w++)
            x[n] = OF::of(x[n], of_warp[first + w][n]);
    }
    // Only now may the next reduction overwrite of_warp.
    __syncthreads();
}

// --- launching ---

inline void check_launch() {
    if (cudaError_t error = cudaGetLastError()) throw std::runtime_error(cudaGetErrorString(error));
}

int64_t multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

template <typename T>
T* as(int64_t address) {
    return reinterpret_cast<T*>(address);
}
inline cudaStream_t on(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
inline bool aligned(int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0, int64_t e = 0) {
    return (a | b | c | d | e) % 16 == 0;
}

template <typename F>
void with_type(int64_t dtype, F launch) {
    if (dtype == 0)
        launch(float());
    else if (dtype == 1)
        launch(__nv_bfloat16());
    else
        launch(__half());
}

// One thread for each vector of W elements, and one for each element left over at the end.
// f.run<W>(at) computes the W elements from `at` on.
template <int W, typename F>
__global__ void __launch_bounds__(256) each(int64_t n, F f) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    int64_t vectors = n / W;
    if (i < vectors)
        f.template run<W>(i * W);
    else if (i < vectors + n % W)
        f.template run<1>(vectors * W + i - vectors);
}

template <int W, typename F>
void launch_each(int64_t n, F f, int64_t stream, bool whole = true) {
    if (n == 0) return;
    dim3 grid(pieces(whole ? n / W + n % W : n, 256)), block(256);
    if (whole)
        each<W, F><<<grid, block, 0, on(stream)>>>(n, f);
    else
        each<1, F><<<grid, block, 0, on(stream)>>>(n, f);
    check_launch();
}

// Distributes a row of n elements: `threads` threads hold at most K vectors each, which stay in
// registers from the first pass over the row to the last. A row that needs at most 4 vectors a lane
// (3 where the kernel has few registers to spare) takes one warp, and no thread waits for another
// warp. `launch` receives W, K and the most threads of a block as types, so that loops unroll.
// Longer rows do not fit (`row_fits` in Python), and PyTorch's operations compute them.
template <int N>
struct Number {
    static constexpr int value = N;
};
inline int64_t row_threads(int64_t vectors, int K) { return pieces(pieces(vectors, K), 32) * 32; }

template <typename T, bool SPARE, typename F>
void with_row(int64_t n, F launch) {
    constexpr int W = PER_VECTOR<T>;
    constexpr int ONE_WARP = SPARE ? 4 : 3;
    bool whole = n % W == 0;
    if (whole && n <= 32 * ONE_WARP * W)
        launch(Number<W>(), Number<ONE_WARP>(), Number<256>(), 32);
    else if (whole && n <= 512 * W)
        launch(Number<W>(), Number<2>(), Number<256>(), row_threads(n / W, 2));
    else if (whole && n <= 1024 * W)
        launch(Number<W>(), Number<2>(), Number<512>(), row_threads(n / W, 2));
    else if (whole)
        launch(Number<W>(), Number<4>(), Number<512>(), row_threads(n / W, 4));
    else
        launch(Number<1>(), Number<16>(), Number<512>(), row_threads(n, 16));
}

// out[column] = sum over parts of the partial sums [parts, n]. A block of 32 x 32 threads sums 32
// columns; neighbouring threads read neighbouring addresses. With blockIdx.y = 1: the same for
// `second`, whose parts follow those of `out`.
template <typename T>
__global__ void sum_parts(
    const float* __restrict__ parts, T* __restrict__ out, T* __restrict__ second, int count,
    int n) {
    // 33 instead of 32, so that the elements of a column lie in 32 different banks.
    __shared__ float sums[32][33];
    if (blockIdx.y) {
        parts += int64_t(count) * n;
        out = second;
    }
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (column < n)
        #pragma unroll 8
        for (int part = threadIdx.y; part < count; part += 32)
            sum += parts[int64_t(part) * n + column];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Transposed: a warp holds one column now.
    sum = sums[threadIdx.x][threadIdx.y];
    for (int lane = 16; lane > 0; lane /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < n) out[column] = from_float<T>(sum);
}

template <typename T>
void launch_sum_parts(
    const float* parts, T* out, T* second, int64_t count, int64_t n, int64_t stream) {
    dim3 grid(pieces(n, 32), second ? 2 : 1), block(32, 32);
    sum_parts<T><<<grid, block, 0, on(stream)>>>(parts, out, second, count, n);
    check_launch();
}
"""


# --- building -------------------------------------------------------------------------------------


def compile_inline(name: str, folder: Path, cpp: str, cuda: str | None = None, **options):
    """Compile C++ and CUDA with torch's load_inline in folder/build; makes folder/NAME.so whole.

    Raises RuntimeError if a compiler fails, OSError if there is no compiler.
    """
    from torch.utils import cpp_extension

    scratch = folder / "build"
    path = os.environ["PATH"]
    # A build that was killed left a lock, which load_inline would wait for.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    # pip installs ninja beside the Python executable.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    try:
        cpp_extension.load_inline(
            name,
            [cpp],
            cuda and [cuda],
            build_directory=str(scratch),
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            **options,
        )
    finally:
        os.environ["PATH"] = path
    os.replace(scratch / f"{name}.so", folder / f"{name}.so")


def once(folder: Path, file: str, make) -> None:
    """Call make() if folder/file, which it makes, does not exist yet.

    One process of the machine does so at a time, and the others wait. The system releases the lock
    of a process that is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / file).exists():
            make()


def cache_folder(name: str) -> Path:
    """The folder where PyTorch keeps compiled extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "torch_extensions") / name


def import_file(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nvcc_flags(capability: tuple[int, int]) -> list[str]:
    arch = "".join(map(str, capability))
    return ["-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}"]


def compile_kernels(name: str, folder: Path, capability: tuple[int, int]) -> None:
    message = f"kernels.py: compiling CUDA kernels, about half a minute; they are kept in {folder}"
    print(message, file=sys.stderr, flush=True)
    compile_inline(
        name,
        folder,
        cpp=BINDINGS,
        cuda=CUDA,
        functions=list(FUNCTIONS.values()),
        extra_cflags=["-O1"],
        extra_cuda_cflags=nvcc_flags(capability),
    )


def first_error(output: str) -> str:
    """The line of a build's output that says why it failed."""
    lines = output.splitlines() or ["no reason given"]
    errors = (line for line in lines if "error" in line.lower() and "Error building" not in line)
    return next(errors, lines[0]).strip()


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
    versions = torch.__version__, torch.version.cuda, sys.version
    build = (CUDA, BINDINGS, *versions, nvcc_flags(capability))
    name = f"fused_{hashlib.sha256(repr(build).encode()).hexdigest()[:16]}"
    folder = cache_folder(name)
    try:
        once(folder, f"{name}.so", lambda: compile_kernels(name, folder, capability))
        return import_file(name, folder / f"{name}.so"), ""
    except (OSError, RuntimeError, ImportError) as e:
        return None, f"the build failed: {first_error(str(e))}"


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


def row_fits(t: Tensor) -> bool:
    """Whether threads can hold a row of t [.., n] in registers.

    They hold up to 2048 vectors, or 8192 elements if n is not a multiple of a vector.
    """
    n = t.shape[-1]
    w = VECTOR // t.element_size()
    longest = LONGEST * w if n % w == 0 else 8192
    return 0 < n <= longest and rows_of(t) < 2**31


def parts_for(counter: str, *args: int, h: int, like: Tensor, times: int = 1) -> Tensor:
    """An empty tensor for the partial sums of column sums: [times x parts, h] float32.

    The function `counter` of the CUDA source gives the number of parts on this device.
    """
    with torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext():
        parts = times * getattr(load()[0], counter)(*args)
        return torch.empty(parts, h, dtype=torch.float32, device=like.device)


# --- norms ----------------------------------------------------------------------------------------

NORMS = r"""
// RMSNorm and LayerNorm. Bytes: forward reads x and writes y; backward reads dy and x and writes
// dx. A row stays in registers between its sum and its use. Forward saves two floats per row: the
// mean and the reciprocal of the standard deviation.
//
// Weight gradients are sums over all rows. A thread keeps the sums of its columns in registers
// while it walks over rows, so a block ends with one partial sum per column. Three blocks per
// multiprocessor write [blocks, h] floats, which sum_parts adds up: a few percent of the traffic.
// The result is the same every time; atomics would add in any order.
template <typename T, int W, int K, int MOST, bool MEAN>
__global__ void __launch_bounds__(MOST) norm_forward(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
    T* __restrict__ y, float* __restrict__ means, float* __restrict__ rstds, int64_t rows, int h,
    float eps) {
    // All threads of a block make the same number of turns, because they meet in over_row.
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        float v[K][W] = {};
        float sum[1] = {0.f};
        float sums[MEAN ? 2 : 1] = {};
        float mean = 0;
        // The mean of x - mean: what rounding left.
        float rest = 0;
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < h) {
                Vector<T, W> in = read<W>(x + row * h + column);
                #pragma unroll
                for (int w = 0; w < W; w++)
                    v[k][w] = to_float(in.at[w]);
            }
        }
        if constexpr (MEAN) {
            #pragma unroll
            for (int k = 0; k < K; k++)
                #pragma unroll
                for (int w = 0; w < W; w++)
                    sum[0] += v[k][w];
            over_row<Sum>(sum);
            mean = sum[0] / h;
        }
        #pragma unroll
        for (int k = 0; k < K; k++)
            #pragma unroll
            for (int w = 0; w < W; w++) {
                // A second pass over the registers: mean(x^2) - mean^2 would cancel.
                v[k][w] -= mean;
                if (int((k * blockDim.x + threadIdx.x) * W) < h) {
                    sums[0] += v[k][w] * v[k][w];
                    if constexpr (MEAN) sums[1] += v[k][w];
                }
            }
        over_row<Sum>(sums);
        if constexpr (MEAN) rest = sums[1] / h;
        float rstd = rsqrtf(sums[0] / h - rest * rest + eps);
        if (row < rows && threadIdx.x == 0) {
            if constexpr (MEAN) means[row] = mean + rest;
            rstds[row] = rstd;
        }
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < h) {
                // After the first rows these come from the caches.
                Vector<T, W> scale = read<W>(weight + column);
                Vector<T, W> shift = MEAN ? read<W>(bias + column) : Vector<T, W>();
                Vector<T, W> out;
                #pragma unroll
                for (int w = 0; w < W; w++)
                    out.at[w] = from_float<T>(
                        (v[k][w] - rest) * rstd * to_float(scale.at[w]) +
                        (MEAN ? to_float(shift.at[w]) : 0.f));
                write<W>(y + row * h + column, out);
            }
        }
    }
}

// x' = (x - mean) rstd,  g = dy w
// dx = rstd (g - x' mean(g x') - mean(g)), the last term for LayerNorm only
// dw = sum over rows of dy x',  db = sum over rows of dy
template <typename T, int W, int K, int MOST, bool MEAN>
__global__ void __launch_bounds__(MOST) norm_backward(
    const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ weight,
    const float* __restrict__ means, const float* __restrict__ rstds, T* __restrict__ dx,
    float* __restrict__ dw_parts, float* __restrict__ db_parts, int64_t rows, int h) {
    float dw[K][W] = {};
    float db[K][W] = {};
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        bool live = row < rows;
        // Kept in their own dtype: 16 bits take half the registers of floats.
        Vector<T, W> in[K], grad[K];
        // 2 K loads before the first is used.
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (live && column < h) {
                in[k] = read<W>(x + row * h + column);
                grad[k] = read<W>(dy + row * h + column);
            }
        }
        float rstd = live ? rstds[row] : 0.f;
        float mean = MEAN && live ? means[row] : 0.f;
        float sums[2] = {0.f, 0.f};
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (live && column < h) {
                Vector<T, W> scale = read<W>(weight + column);
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float unit = (to_float(in[k].at[w]) - mean) * rstd;
                    float d = to_float(grad[k].at[w]);
                    float g = d * to_float(scale.at[w]);
                    sums[0] += g * unit;
                    sums[1] += g;
                    dw[k][w] += d * unit;
                    if constexpr (MEAN) db[k][w] += d;
                }
            }
        }
        over_row<Sum>(sums);
        float along = sums[0] / h;
        float shift = MEAN ? sums[1] / h : 0.f;
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (live && column < h) {
                Vector<T, W> scale = read<W>(weight + column);
                Vector<T, W> out;
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float g = to_float(grad[k].at[w]) * to_float(scale.at[w]);
                    float unit = (to_float(in[k].at[w]) - mean) * rstd;
                    out.at[w] = from_float<T>(rstd * (g - unit * along - shift));
                }
                write<W>(dx + row * h + column, out);
            }
        }
    }
    // [rows of a block, h] if a block has several rows: at most 256 threads with 24 columns each.
    __shared__ __align__(16) float sums[6144];
    #pragma unroll
    for (int which = 0; which < (MEAN ? 2 : 1); which++) {
        float (&mine)[K][W] = which ? db : dw;
        float* parts = (which ? db_parts : dw_parts) + int64_t(blockIdx.x) * h;
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            Vector<float, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++)
                out.at[w] = mine[k][w];
            if (column < h)
                write<W>(blockDim.y == 1 ? parts + column : sums + threadIdx.y * h + column, out);
        }
        if (blockDim.y == 1) continue;
        __syncthreads();
        for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < h;
             column += blockDim.x * blockDim.y) {
            float sum = 0;
            for (int y = 0; y < int(blockDim.y); y++)
                sum += sums[y * h + column];
            parts[column] = sum;
        }
        __syncthreads();
    }
}

template <bool MEAN>
void launch_norm_forward(
    int64_t stream, int64_t dtype, int64_t x, int64_t weight, int64_t bias, int64_t y, int64_t mean,
    int64_t rstd, int64_t rows, int64_t h, double eps) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_row<T, true>(h, [&](auto W, auto K, auto MOST, int64_t threads) {
            dim3 block(threads, threads < 256 ? 256 / threads : 1);
            dim3 grid(pieces(rows, block.y));
            norm_forward<T, W.value, K.value, MOST.value, MEAN><<<grid, block, 0, on(stream)>>>(
                as<T>(x), as<T>(weight), as<T>(bias), as<T>(y), as<float>(mean), as<float>(rstd),
                rows, h, eps);
            check_launch();
        });
    });
}

int64_t norm_parts() { return 3 * multiprocessors(); }

// parts: [1 or 2, norm_parts(), h] floats.
template <bool MEAN>
void launch_norm_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t weight, int64_t mean,
    int64_t rstd, int64_t dx, int64_t dw, int64_t db, int64_t parts, int64_t rows, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        int64_t count = norm_parts();
        float* dw_parts = as<float>(parts);
        float* db_parts = dw_parts + count * h;
        with_row<T, false>(h, [&](auto W, auto K, auto MOST, int64_t threads) {
            dim3 block(threads, threads <= 256 ? 256 / threads : 1);
            dim3 grid(count);
            norm_backward<T, W.value, K.value, MOST.value, MEAN><<<grid, block, 0, on(stream)>>>(
                as<T>(dy), as<T>(x), as<T>(weight), as<float>(mean), as<float>(rstd), as<T>(dx),
                dw_parts, db_parts, rows, h);
            check_launch();
        });
        launch_sum_parts<T>(dw_parts, as<T>(dw), as<T>(db), count, h, stream);
    });
}

void rms_norm(
    int64_t stream, int64_t dtype, int64_t x, int64_t weight, int64_t y, int64_t rstd, int64_t rows,
    int64_t h, double eps) {
    launch_norm_forward<false>(stream, dtype, x, weight, 0, y, 0, rstd, rows, h, eps);
}
void rms_norm_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t weight, int64_t rstd, int64_t dx,
    int64_t dw, int64_t parts, int64_t rows, int64_t h) {
    launch_norm_backward<false>(stream, dtype, dy, x, weight, 0, rstd, dx, dw, 0, parts, rows, h);
}
void layer_norm(
    int64_t stream, int64_t dtype, int64_t x, int64_t weight, int64_t bias, int64_t y, int64_t mean,
    int64_t rstd, int64_t rows, int64_t h, double eps) {
    launch_norm_forward<true>(stream, dtype, x, weight, bias, y, mean, rstd, rows, h, eps);
}
void layer_norm_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t weight, int64_t mean,
    int64_t rstd, int64_t dx, int64_t dw, int64_t db, int64_t parts, int64_t rows, int64_t h) {
    launch_norm_backward<true>(
        stream, dtype, dy, x, weight, mean, rstd, dx, dw, db, parts, rows, h);
}
"""


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

    @staticmethod
    def fits(x, weight, eps):
        return row_fits(x)

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

    @staticmethod
    def fits(dy, *_):
        return row_fits(dy)

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

    @staticmethod
    def fits(x, *_):
        return row_fits(x)

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

    @staticmethod
    def fits(dy, *_):
        return row_fits(dy)

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

ROTARY = r"""
// Rotary embedding of queries and keys in one launch: y = x cos + (-x_high, x_low) sin. Bytes: q
// and k in, q and k out; the table is small and stays in the caches. A block is a token.
// threadIdx.x selects W pairs of a head, threadIdx.y selects heads, so a thread reads its cosines
// once for all its heads. Both halves of a head have the same angles, so half of the table is read.
// The gradient is the rotation by -angle.
template <typename T, int W>
__global__ void rotary_kernel(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ cosine,
    const T* __restrict__ sine, T* __restrict__ q_out, T* __restrict__ k_out,
    // Strides: q and k are views [b, a, s, d] of any memory layout.
    int64_t q_batch, int64_t q_head, int64_t q_position, int64_t k_batch, int64_t k_head,
    int64_t k_position, int q_heads, int k_heads, int s, int d, float sign) {
    int64_t token = blockIdx.x, b = blockIdx.x / uint32_t(s), position = blockIdx.x % uint32_t(s);
    int low = threadIdx.x * W, high = low + d / 2;
    Vector<T, W> c = read<W>(cosine + position * d + low);
    Vector<T, W> n = read<W>(sine + position * d + low);
    for (int head = threadIdx.y; head < q_heads + k_heads; head += blockDim.y) {
        bool is_q = head < q_heads;
        int h = is_q ? head : head - q_heads;
        const T* x = is_q ? q + b * q_batch + h * q_head + position * q_position
                          : k + b * k_batch + h * k_head + position * k_position;
        // [b, s, a, d], like the projections' outputs.
        T* y = is_q ? q_out + (token * q_heads + h) * d : k_out + (token * k_heads + h) * d;
        Vector<T, W> first = read<W>(x + low), second = read<W>(x + high), out_first, out_second;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x1 = to_float(first.at[w]), x2 = to_float(second.at[w]);
            float cos_w = to_float(c.at[w]), sin_w = sign * to_float(n.at[w]);
            out_first.at[w] = from_float<T>(x1 * cos_w - x2 * sin_w);
            out_second.at[w] = from_float<T>(x2 * cos_w + x1 * sin_w);
        }
        write<W>(y + low, out_first);
        write<W>(y + high, out_second);
    }
}

void rotary(
    int64_t stream, int64_t dtype, int64_t q, int64_t k, int64_t cosine, int64_t sine,
    int64_t q_out, int64_t k_out, int64_t q_batch, int64_t q_head, int64_t q_position,
    int64_t k_batch, int64_t k_head, int64_t k_position, int64_t b, int64_t q_heads,
    int64_t k_heads, int64_t s, int64_t d, double sign) {
    if (b * s == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        auto launch = [&](auto W) {
            int64_t pairs = d / 2 / W.value;
            dim3 grid(b * s), block(pairs, pairs < 256 ? 256 / pairs : 1);
            rotary_kernel<T, W.value><<<grid, block, 0, on(stream)>>>(
                as<T>(q), as<T>(k), as<T>(cosine), as<T>(sine), as<T>(q_out), as<T>(k_out), q_batch,
                q_head, q_position, k_batch, k_head, k_position, q_heads, k_heads, s, d, sign);
            check_launch();
        };
        bool strides =
            (q_batch | q_head | q_position | k_batch | k_head | k_position) % PER_VECTOR<T> == 0;
        if (strides && d / 2 % PER_VECTOR<T> == 0 && aligned(q, k, cosine, sine) &&
            aligned(q_out, k_out))
            launch(Number<PER_VECTOR<T>>());
        else
            launch(Number<1>());
    });
}
"""


def heads_inside(t: Tensor) -> Tensor:
    """An empty [b, a, s, d] that lies in memory as [b, s, a, d], like a projection's output."""
    b, a, s, d = t.shape
    return t.new_empty(b, s, a, d).transpose(1, 2)


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
        return 0 < q.shape[-1] <= 2048

    @staticmethod
    def kernel(outputs, q, k, cosine, sine, sign):
        if q.stride(-1) != 1:
            q = q.contiguous()
        if k.stride(-1) != 1:
            k = k.contiguous()
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

SWIGLU = r"""
// SwiGLU: y = silu(gate) up. Tensors: two in, one out; backward three in, two out. Each element is
// independent, so a thread computes one vector and ends. It needs few registers for its 2 or 3
// loads of 16 bytes, so enough blocks are resident to keep the memory busy.
template <typename T>
struct SwiGLU {
    const T *gate, *up;
    T* y;
    template <int W>
    __device__ void run(int64_t at) const {
        Vector<T, W> g = read<W>(gate + at), u = read<W>(up + at), out;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x = to_float(g.at[w]);
            out.at[w] = from_float<T>(x * sigmoid<T>(x).here * to_float(u.at[w]));
        }
        write<W>(y + at, out);
    }
};

// silu'(x) = s + x s (1 - s)
template <typename T>
struct SwiGLUBackward {
    const T *dy, *gate, *up;
    T *d_gate, *d_up;
    template <int W>
    __device__ void run(int64_t at) const {
        Vector<T, W> d = read<W>(dy + at), g = read<W>(gate + at), u = read<W>(up + at);
        Vector<T, W> out_g, out_u;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x = to_float(g.at[w]), grad = to_float(d.at[w]);
            Sigmoid s = sigmoid<T>(x);
            float silu = x * s.here;
            out_u.at[w] = from_float<T>(grad * silu);
            // s.there is 1 - s.
            out_g.at[w] = from_float<T>(grad * to_float(u.at[w]) * (s.here + silu * s.there));
        }
        write<W>(d_gate + at, out_g);
        write<W>(d_up + at, out_u);
    }
};

void swiglu(int64_t stream, int64_t dtype, int64_t gate, int64_t up, int64_t y, int64_t n) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_each<PER_VECTOR<T>>(n, SwiGLU<T>{as<T>(gate), as<T>(up), as<T>(y)}, stream);
    });
}
void swiglu_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t gate, int64_t up, int64_t d_gate,
    int64_t d_up, int64_t n) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_each<PER_VECTOR<T>>(
            n, SwiGLUBackward<T>{as<T>(dy), as<T>(gate), as<T>(up), as<T>(d_gate), as<T>(d_up)},
            stream);
    });
}
"""


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

COLUMNS = r"""
// Bias + GELU, and bias + dropout + residual. A thread owns W columns; neighbouring threads own
// neighbouring columns. It reads the bias of its columns once and walks down the rows, FEW at a
// time, so that several loads are in flight. Backward adds up the bias gradient in registers on the
// way; a sum over the rows of dx would be a pass of its own. A block is 128 threads wide and DEEP
// threads deep; shared memory adds up the DEEP sums at the end, so that fewer parts are left.
// Bytes: forward x (and the residual) in, y out; backward dy (and x) in, dx out. The partial sums
// [gridDim.y, h] are a few percent.
constexpr int FEW = 4, DEEP = 4;

template <int W, typename F>
__global__ void __launch_bounds__(128 * DEEP)
    down_columns(int64_t rows, int h, F f, float* __restrict__ parts) {
    int column = (blockIdx.x * blockDim.x + threadIdx.x) * W;
    bool live = column < h;
    typename F::template Column<W> mine(f, live ? column : 0);
    float sum[W] = {};
    // `first` is the same for all lanes of a warp.
    for (int64_t first = (int64_t(blockIdx.y) * DEEP + threadIdx.y) * FEW; first < rows;
         first += int64_t(gridDim.y) * DEEP * FEW) {
        typename F::template Loaded<W> loaded[FEW];
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            if (live && first + r < rows) loaded[r].load(f, (first + r) * h + column);
        // All lanes call it: it shuffles.
        mine.arrive(f, first, rows);
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            if (live && first + r < rows) mine.run(f, r, (first + r) * h + column, loaded[r], sum);
    }
    if (!parts) return;
    __shared__ float sums[DEEP][128 * W];
    #pragma unroll
    for (int w = 0; w < W; w++)
        sums[threadIdx.y][threadIdx.x * W + w] = sum[w];
    __syncthreads();
    for (int i = threadIdx.y * 128 + threadIdx.x; i < 128 * W; i += 128 * DEEP) {
        float all = 0;
        #pragma unroll
        for (int y = 0; y < DEEP; y++)
            all += sums[y][i];
        if (blockIdx.x * 128 * W + i < h)
            parts[int64_t(blockIdx.y) * h + blockIdx.x * 128 * W + i] = all;
    }
}

// Over how many blocks down_columns distributes the rows: two blocks per multiprocessor, as far as
// every thread has work.
int64_t column_parts(int64_t rows, int64_t h, int64_t dtype) {
    int64_t across = pieces(h, 128 * (dtype == 0 ? 4 : 8));
    int64_t most = pieces(rows, DEEP * FEW);
    int64_t parts = pieces(multiprocessors() * 2, across);
    parts = parts < most ? parts : most;
    // Without rows: one part, of zeros.
    return parts > 1 ? parts : 1;
}

template <typename T, typename F>
void launch_columns(
    int64_t dtype, int64_t rows, int64_t h, F f, int64_t parts, int64_t d_bias, int64_t stream) {
    int64_t count = column_parts(rows, h, dtype);
    auto launch = [&](auto W) {
        dim3 grid(pieces(h, 128 * W.value), count), block(128, DEEP);
        down_columns<W.value, F><<<grid, block, 0, on(stream)>>>(rows, h, f, as<float>(parts));
        check_launch();
    };
    if (h % PER_VECTOR<T> == 0)
        launch(Number<PER_VECTOR<T>>());
    else
        launch(Number<1>());
    if (parts) launch_sum_parts<T>(as<float>(parts), as<T>(d_bias), nullptr, count, h, stream);
}

// The bias of W columns; 0 where there is no bias.
template <typename T, int W>
struct Bias {
    float at[W];
    __device__ Bias(const T* bias, int column) {
        #pragma unroll
        for (int w = 0; w < W; w++)
            at[w] = 0.f;
        if (bias) {
            Vector<T, W> v = read<W>(bias + column);
            #pragma unroll
            for (int w = 0; w < W; w++)
                at[w] = to_float(v.at[w]);
        }
    }
};

// gelu(u) = u / 2 (1 + tanh z) = u sigmoid(2 z),  z = sqrt(2/pi) (u + 0.044715 u^3)
template <typename T>
struct Gelu {
    const T *x, *bias;
    T* y;
    template <int W>
    struct Loaded {
        Vector<T, W> x;
        __device__ void load(const Gelu& f, int64_t at) { x = read<W>(f.x + at); }
    };
    template <int W>
    struct Column {
        Bias<T, W> bias;
        __device__ Column(const Gelu& f, int column) : bias(f.bias, column) {}
        __device__ void arrive(const Gelu&, int64_t, int64_t) {}
        __device__ void run(const Gelu& f, int, int64_t at, const Loaded<W>& in, float (&)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float u = to_float(in.x.at[w]) + bias.at[w];
                float z2 = u * (1.5957691216057308f + 0.07135481282894904f * (u * u));
                out.at[w] = from_float<T>(u * sigmoid<T>(z2).here);
            }
            write<W>(f.y + at, out);
        }
    };
};

template <typename T>
struct GeluBackward {
    const T *dy, *x, *bias;
    T* dx;
    template <int W>
    struct Loaded {
        Vector<T, W> dy, x;
        __device__ void load(const GeluBackward& f, int64_t at) {
            dy = read<W>(f.dy + at);
            x = read<W>(f.x + at);
        }
    };
    template <int W>
    struct Column {
        Bias<T, W> bias;
        __device__ Column(const GeluBackward& f, int column) : bias(f.bias, column) {}
        __device__ void arrive(const GeluBackward&, int64_t, int64_t) {}
        __device__ void run(
            const GeluBackward& f, int, int64_t at, const Loaded<W>& in, float (&sum)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float u = to_float(in.x.at[w]) + bias.at[w];
                float square = u * u;
                Sigmoid s = sigmoid<T>(u * (1.5957691216057308f + 0.07135481282894904f * square));
                float d = to_float(in.dy.at[w]);
                // gelu'(u) = s + u s (1 - s) times the derivative of 2 z
                float slope = u * s.here * s.there;
                slope *= 1.5957691216057308f + 0.21406443848684713f * square;
                d *= s.here + slope;
                out.at[w] = from_float<T>(d);
                sum[w] += d;
            }
            write<W>(f.dx + at, out);
        }
    };
};

void bias_gelu(
    int64_t stream, int64_t dtype, int64_t x, int64_t bias, int64_t y, int64_t rows, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_columns<T>(dtype, rows, h, Gelu<T>{as<T>(x), as<T>(bias), as<T>(y)}, 0, 0, stream);
    });
}
void bias_gelu_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t bias, int64_t dx, int64_t d_bias,
    int64_t parts, int64_t rows, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_columns<T>(
            dtype, rows, h, GeluBackward<T>{as<T>(dy), as<T>(x), as<T>(bias), as<T>(dx)}, parts,
            d_bias, stream);
    });
}

// The mask is that of dropout_mask, bit for bit: a hash of (key of the sample, site, position,
// column). Nothing is stored; backward hashes again. Each element costs two multiplications, three
// shifts and a comparison of integers, about as much as the integer units can do while the data
// arrives. The hash's first step, x ^ x >> 16, distributes over ^, so that it runs once per row and
// once per column and not once per element.
__device__ __forceinline__ uint32_t first_step(uint32_t x) { return x ^ x >> 16; }
__device__ __forceinline__ uint32_t rest(uint32_t x) {
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
__device__ __forceinline__ uint32_t mix(uint32_t x) { return rest(first_step(x)); }
__device__ __forceinline__ uint32_t spread(int64_t n) {
    return uint32_t(n) * 0x9E3779B1u & 0x7FFFFFFFu;
}

struct Mask {
    // One per sample; null: nothing is dropped.
    const int32_t* keys;
    // Positions of a sample on this device, and the global number of the first one.
    int64_t s, start;
    // Which dropout of a layer.
    uint32_t site;
    // A hash below it drops the element: p 2^32.
    uint32_t limit;
    // 1 / (1 - p).
    float scale;
};

// A thread's part of the mask: the hashes of its columns, and of the FEW rows that it works on. A
// row's hash needs a division and three rounds, so the first FEW lanes compute one each, and a
// shuffle hands them to the other lanes.
template <int W>
struct Hashes {
    uint32_t of_column[W], of_row[FEW];
    __device__ Hashes(int column) {
        #pragma unroll
        for (int w = 0; w < W; w++)
            of_column[w] = first_step(spread(column + w + 1));
    }
    __device__ void arrive(const Mask& mask, int64_t first, int64_t rows) {
        if (!mask.keys) return;
        uint32_t row = first + threadIdx.x % FEW, hash = 0;
        if (row < rows) {
            uint32_t sample = mix(uint32_t(mask.keys[row / uint32_t(mask.s)]) ^ mask.site);
            hash = mix(sample ^ spread(row % uint32_t(mask.s) + 1 + mask.start));
        }
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            of_row[r] = __shfl_sync(0xffffffffu, first_step(hash), r);
    }
    __device__ float apply(const Mask& mask, int r, int w, float x) const {
        if (!mask.keys) return x;
        bool dropped = (rest(of_row[r] ^ of_column[w]) ^ 0x80000000u) < mask.limit;
        return dropped ? 0.f : x * mask.scale;
    }
};

template <typename T>
struct DropoutAdd {
    const T *x, *bias, *residual;
    T* y;
    Mask mask;
    template <int W>
    struct Loaded {
        Vector<T, W> x, residual;
        __device__ void load(const DropoutAdd& f, int64_t at) {
            x = read<W>(f.x + at);
            residual = read<W>(f.residual + at);
        }
    };
    template <int W>
    struct Column {
        Bias<T, W> bias;
        Hashes<W> hashes;
        __device__ Column(const DropoutAdd& f, int column) : bias(f.bias, column), hashes(column) {}
        __device__ void arrive(const DropoutAdd& f, int64_t first, int64_t rows) {
            hashes.arrive(f.mask, first, rows);
        }
        __device__ void run(
            const DropoutAdd& f, int r, int64_t at, const Loaded<W>& in, float (&)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++)
                out.at[w] = from_float<T>(
                    to_float(in.residual.at[w]) +
                    hashes.apply(f.mask, r, w, to_float(in.x.at[w]) + bias.at[w]));
            write<W>(f.y + at, out);
        }
    };
};

template <typename T>
struct DropoutAddBackward {
    const T* dy;
    T* dx;
    Mask mask;
    template <int W>
    struct Loaded {
        Vector<T, W> dy;
        __device__ void load(const DropoutAddBackward& f, int64_t at) { dy = read<W>(f.dy + at); }
    };
    template <int W>
    struct Column {
        Hashes<W> hashes;
        __device__ Column(const DropoutAddBackward&, int column) : hashes(column) {}
        __device__ void arrive(const DropoutAddBackward& f, int64_t first, int64_t rows) {
            hashes.arrive(f.mask, first, rows);
        }
        __device__ void run(
            const DropoutAddBackward& f, int r, int64_t at, const Loaded<W>& in, float (&sum)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float d = hashes.apply(f.mask, r, w, to_float(in.dy.at[w]));
                out.at[w] = from_float<T>(d);
                sum[w] += d;
            }
            write<W>(f.dx + at, out);
        }
    };
};

void bias_dropout_add(
    int64_t stream, int64_t dtype, int64_t x, int64_t bias, int64_t residual, int64_t keys,
    int64_t y, int64_t rows, int64_t h, int64_t s, int64_t start, int64_t site, int64_t limit,
    double scale) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        Mask mask{as<int32_t>(keys), s, start, uint32_t(site), uint32_t(limit), float(scale)};
        launch_columns<T>(
            dtype, rows, h, DropoutAdd<T>{as<T>(x), as<T>(bias), as<T>(residual), as<T>(y), mask},
            0, 0, stream);
    });
}
void bias_dropout_add_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t keys, int64_t dx, int64_t d_bias,
    int64_t parts, int64_t rows, int64_t h, int64_t s, int64_t start, int64_t site, int64_t limit,
    double scale) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        Mask mask{as<int32_t>(keys), s, start, uint32_t(site), uint32_t(limit), float(scale)};
        launch_columns<T>(
            dtype, rows, h, DropoutAddBackward<T>{as<T>(dy), as<T>(dx), mask}, parts, d_bias,
            stream);
    });
}
"""


def rows_fit(t: Tensor, *_) -> bool:
    """Rows are counted in 32 bits."""
    return t.shape[-1] > 0 and rows_of(t) < 2**31


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
            parts = parts_for("column_parts", rows, h, CODES[x.dtype], h=h, like=x)
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
        parts = parts_for("column_parts", rows, h, CODES[dy.dtype], h=h, like=dy) if bias else None
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

SOFTMAX = r"""
// Causal softmax of scale x scores, [.., s, s]: row i attends to columns 0 .. i. Bytes: the lower
// triangle in, the whole matrix out, with zeros above the diagonal. The mask is never a tensor. A
// row stays in registers between its maximum, its sum and its use.
template <typename T, int W, int K, int MOST>
__global__ void __launch_bounds__(MOST) softmax_forward(
    const T* __restrict__ scores, T* __restrict__ y, int64_t rows, int s, float scale) {
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        int last = row < rows ? int(uint32_t(row) % uint32_t(s)) : -1;
        float v[K][W];
        float largest[1] = {-INFINITY};
        float sum[1] = {0.f};
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            Vector<T, W> in;
            if (column <= last) in = read<W>(scores + row * s + column);
            #pragma unroll
            for (int w = 0; w < W; w++) {
                v[k][w] = column + w <= last ? scale * to_float(in.at[w]) : -INFINITY;
                largest[0] = fmaxf(largest[0], v[k][w]);
            }
        }
        over_row<Max>(largest);
        #pragma unroll
        for (int k = 0; k < K; k++)
            #pragma unroll
            for (int w = 0; w < W; w++) {
                v[k][w] = last < 0 ? 0.f : exp_for<T>(v[k][w] - largest[0]);
                sum[0] += v[k][w];
            }
        over_row<Sum>(sum);
        float share = 1.f / sum[0];
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < s) {
                Vector<T, W> out;
                #pragma unroll
                for (int w = 0; w < W; w++)
                    out.at[w] = from_float<T>(v[k][w] * share);
                write<W>(y + row * s + column, out);
            }
        }
    }
}

// d scores = scale p (dp - sum of dp p)
template <typename T, int W, int K, int MOST>
__global__ void __launch_bounds__(MOST) softmax_backward(
    const T* __restrict__ dp, const T* __restrict__ p, T* __restrict__ out, int64_t rows, int s,
    float scale) {
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        int last = row < rows ? int(uint32_t(row) % uint32_t(s)) : -1;
        Vector<T, W> grad[K], in[K];
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (column <= last) {
                grad[k] = read<W>(dp + row * s + column);
                in[k] = read<W>(p + row * s + column);
            }
        }
        float sum[1] = {0.f};
        #pragma unroll
        for (int k = 0; k < K; k++)
            #pragma unroll
            for (int w = 0; w < W; w++)
                if (int((k * blockDim.x + threadIdx.x) * W) + w <= last)
                    sum[0] += to_float(grad[k].at[w]) * to_float(in[k].at[w]);
        over_row<Sum>(sum);
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < s) {
                Vector<T, W> d;
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float ds = 0.f;
                    if (column + w <= last)
                        ds = scale * to_float(in[k].at[w]) * (to_float(grad[k].at[w]) - sum[0]);
                    d.at[w] = from_float<T>(ds);
                }
                write<W>(out + row * s + column, d);
            }
        }
    }
}

template <typename T, typename F>
void with_softmax(int64_t rows, int64_t s, F launch) {
    with_row<T, true>(s, [&](auto W, auto K, auto MOST, int64_t threads) {
        dim3 block(threads, threads < 256 ? 256 / threads : 1);
        launch(W, K, MOST, dim3(pieces(rows, block.y)), block);
    });
}

void causal_softmax(
    int64_t stream, int64_t dtype, int64_t scores, int64_t y, int64_t rows, int64_t s,
    double scale) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_softmax<T>(rows, s, [&](auto W, auto K, auto MOST, dim3 grid, dim3 block) {
            softmax_forward<T, W.value, K.value, MOST.value>
                <<<grid, block, 0, on(stream)>>>(as<T>(scores), as<T>(y), rows, s, scale);
            check_launch();
        });
    });
}
void causal_softmax_backward(
    int64_t stream, int64_t dtype, int64_t dp, int64_t p, int64_t out, int64_t rows, int64_t s,
    double scale) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_softmax<T>(rows, s, [&](auto W, auto K, auto MOST, dim3 grid, dim3 block) {
            softmax_backward<T, W.value, K.value, MOST.value>
                <<<grid, block, 0, on(stream)>>>(as<T>(dp), as<T>(p), as<T>(out), rows, s, scale);
            check_launch();
        });
    });
}
"""


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

    @staticmethod
    def fits(scores, *_):
        return row_fits(scores)

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

    @staticmethod
    def fits(dp, *_):
        return row_fits(dp)

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

CROSS_ENTROPY = r"""
// Cross entropy over a wide vocabulary:
// loss = log sum exp z - z_target,  dz = (softmax z - onehot) dloss.
// Bytes: forward reads the logits once; backward reads them once and writes the gradient in their
// place; forward saves three floats per row. (Eager PyTorch writes a float copy and its
// exponentials; a log-softmax saved for backward would be a second tensor of that size.)
// A block is a row. One pass gives maximum and sum (online softmax, arXiv 1805.02867): where a
// larger element appears, the sum so far is scaled down.

// The target of a row whose token is in another rank's columns.
constexpr int64_t ELSEWHERE = -(int64_t(1) << 62);

// Calls f(at, vector) for the elements from `at` on, all along a row. The row may begin at any
// address, because V need not be a multiple of W: first single elements up to an aligned address,
// then whole vectors, four loads before the first is used, then single elements again.
template <typename T, typename F>
__device__ __forceinline__ void along_row(const T* row, int n, F f) {
    constexpr int W = PER_VECTOR<T>;
    int head = int((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T));
    head = head < n ? head : n;
    int vectors = (n - head) / W;
    int tail = head + vectors * W;
    int v = threadIdx.x;
    int step = blockDim.x;
    if (v < head) f(v, read<1>(row + v));
    for (; v + 3 * step < vectors; v += 4 * step) {
        Vector<T, W> z[4];
        #pragma unroll
        for (int i = 0; i < 4; i++)
            z[i] = read<W>(row + head + (v + i * step) * W);
        #pragma unroll
        for (int i = 0; i < 4; i++)
            f(head + (v + i * step) * W, z[i]);
    }
    for (; v < vectors; v += step)
        f(head + v * W, read<W>(row + head + v * W));
    if (tail + int(threadIdx.x) < n) f(tail + int(threadIdx.x), read<1>(row + tail + threadIdx.x));
}

template <typename T>
__global__ void __launch_bounds__(512) cross_entropy_forward(
    const T* __restrict__ logits, const int64_t* __restrict__ targets, float* __restrict__ largest,
    float* __restrict__ total, float* __restrict__ target_logit, int V, int valid) {
    const T* row = logits + int64_t(blockIdx.x) * V;
    // Not -infinity: (-infinity) - (-infinity) is NaN.
    float most = -FLT_MAX;
    float sum = 0;
    along_row(row, valid, [&](int, auto z) {
        constexpr int W = sizeof(z) / sizeof(T);
        float here = to_float(z.at[0]);
        #pragma unroll
        for (int w = 1; w < W; w++)
            here = fmaxf(here, to_float(z.at[w]));
        if (here > most) {
            sum *= exp_for<T>(most - here);
            most = here;
        }
        #pragma unroll
        for (int w = 0; w < W; w++)
            sum += exp_for<T>(to_float(z.at[w]), most);
    });
    float all[1] = {most};
    over_row<Max>(all);
    float sums[1] = {sum * exp_for<T>(most - all[0])};
    over_row<Sum>(sums);
    if (threadIdx.x == 0) {
        int64_t target = targets[blockIdx.x];
        // Fails for a token outside this vocabulary.
        assert(target == ELSEWHERE || (target >= 0 && target < valid));
        largest[blockIdx.x] = all[0] == -FLT_MAX ? -INFINITY : all[0];
        total[blockIdx.x] = sums[0];
        target_logit[blockIdx.x] = target == ELSEWHERE ? 0.f : to_float(row[target]);
    }
}

template <typename T>
__global__ void __launch_bounds__(512) cross_entropy_backward(
    T* __restrict__ logits, const int64_t* __restrict__ targets, const float* __restrict__ largest,
    const float* __restrict__ total, const float* __restrict__ grad, int V, int valid) {
    T* row = logits + int64_t(blockIdx.x) * V;
    float down = largest[blockIdx.x];
    float d = grad[blockIdx.x];
    // For exp(z - largest) / total: exp(z - log sum exp) would round that large logarithm.
    float share = d / total[blockIdx.x];
    int64_t target = targets[blockIdx.x];
    // Read before it is overwritten. The target's column is written last, so that no other column
    // has to be compared with it.
    float z_target = target >= 0 ? to_float(row[target]) : 0.f;
    __syncthreads();
    along_row(row, V, [&](int at, auto z) {
        constexpr int W = sizeof(z) / sizeof(T);
        if (at + W <= valid)
            #pragma unroll
            for (int w = 0; w < W; w++)
                z.at[w] = from_float<T>(share * exp_for<T>(to_float(z.at[w]), down));
        else
            for (int w = 0; w < W; w++)
                z.at[w] = from_float<T>(
                    at + w < valid ? share * exp_for<T>(to_float(z.at[w]), down) : 0.f);
        write<W>(row + at, z);
    });
    __syncthreads();
    if (threadIdx.x == 0 && target >= 0)
        row[target] = from_float<T>(share * exp_for<T>(z_target, down) - d);
}

void cross_entropy_statistics(
    int64_t stream, int64_t dtype, int64_t logits, int64_t targets, int64_t largest, int64_t total,
    int64_t target_logit, int64_t rows, int64_t V, int64_t valid) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        dim3 grid(rows), block(512);
        cross_entropy_forward<T><<<grid, block, 0, on(stream)>>>(
            as<T>(logits), as<int64_t>(targets), as<float>(largest), as<float>(total),
            as<float>(target_logit), V, valid);
        check_launch();
    });
}
void cross_entropy_gradient(
    int64_t stream, int64_t dtype, int64_t logits, int64_t targets, int64_t largest, int64_t total,
    int64_t grad, int64_t rows, int64_t V, int64_t valid) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        dim3 grid(rows), block(512);
        cross_entropy_backward<T><<<grid, block, 0, on(stream)>>>(
            as<T>(logits), as<int64_t>(targets), as<float>(largest), as<float>(total),
            as<float>(grad), V, valid);
        check_launch();
    });
}
"""


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

PERMUTATION = r"""
// The token permutation of a mixture of experts (moe.py). A row of threads copies a row of x.
// Bytes: permute reads and writes m rows. unpermute reads up to k n rows and writes n; it
// multiplies by the probabilities and keeps the sum over k in registers. The backward of unpermute
// reads m rows of each of two tensors and writes m (a row of dy may be in the cache from its
// token's other choice).
template <typename T, int W>
__global__ void __launch_bounds__(256) permute_rows(
    const T* __restrict__ x, const int64_t* __restrict__ order, T* __restrict__ y, int64_t m,
    int64_t n, int h) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= m) return;
    const T* from = x + int64_t(uint32_t(order[row]) % uint32_t(n)) * h;
    #pragma unroll 4
    for (int column = threadIdx.x * W; column < h; column += blockDim.x * W)
        write<W>(y + row * h + column, read<W>(from + column));
}

template <typename T, int W>
__global__ void __launch_bounds__(256) unpermute_rows(
    const T* __restrict__ rows, const int64_t* __restrict__ position,
    const float* __restrict__ probabilities, T* __restrict__ y, int64_t m, int64_t n, int k,
    int h) {
    int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= n) return;
    for (int column = threadIdx.x * W; column < h; column += blockDim.x * W) {
        float sum[W] = {};
        #pragma unroll 1
        for (int choice = 0; choice < k; choice++) {
            int64_t row = position[choice * n + token];
            // m stands for a dropped token.
            if (row < m) {
                float probability = probabilities ? probabilities[token * k + choice] : 1.f;
                Vector<T, W> in = read<W>(rows + row * h + column);
                #pragma unroll
                for (int w = 0; w < W; w++)
                    sum[w] += probability * to_float(in.at[w]);
            }
        }
        Vector<T, W> out;
        #pragma unroll
        for (int w = 0; w < W; w++)
            out.at[w] = from_float<T>(sum[w]);
        write<W>(y + token * h + column, out);
    }
}

// d_rows = probability dy[token],  d_probability = rows . dy[token]
template <typename T, int W>
__global__ void __launch_bounds__(256) unpermute_rows_backward(
    const T* __restrict__ dy, const T* __restrict__ rows, const int64_t* __restrict__ order,
    const float* __restrict__ probabilities, T* __restrict__ d_rows,
    float* __restrict__ d_probabilities, int64_t m, int64_t n, int k, int h) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    // Index into probabilities [n, k].
    int64_t at = 0;
    float dot[1] = {0.f};
    if (row < m) {
        // 32 bits: a division of 64 bits takes a hundred instructions.
        uint32_t assignment = order[row];
        int64_t token = assignment % uint32_t(n);
        at = token * k + assignment / uint32_t(n);
        float probability = probabilities[at];
        for (int column = threadIdx.x * W; column < h; column += blockDim.x * W) {
            Vector<T, W> grad = read<W>(dy + token * h + column);
            Vector<T, W> in = read<W>(rows + row * h + column);
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                dot[0] += to_float(grad.at[w]) * to_float(in.at[w]);
                out.at[w] = from_float<T>(probability * to_float(grad.at[w]));
            }
            write<W>(d_rows + row * h + column, out);
        }
    }
    over_row<Sum>(dot);
    if (row < m && threadIdx.x == 0) d_probabilities[at] = dot[0];
}

template <typename T, typename F>
void with_rows(int64_t rows, int64_t h, F launch) {
    auto go = [&](auto W) {
        int64_t threads = pieces(h, W.value) < 256 ? row_threads(pieces(h, W.value), 1) : 256;
        dim3 block(threads, 256 / threads);
        launch(W, dim3(pieces(rows, block.y)), block);
    };
    if (rows == 0) return;
    if (h % PER_VECTOR<T> == 0)
        go(Number<PER_VECTOR<T>>());
    else
        go(Number<1>());
}

void permute(
    int64_t stream, int64_t dtype, int64_t x, int64_t order, int64_t y, int64_t m, int64_t n,
    int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows<T>(m, h, [&](auto W, dim3 grid, dim3 block) {
            permute_rows<T, W.value>
                <<<grid, block, 0, on(stream)>>>(as<T>(x), as<int64_t>(order), as<T>(y), m, n, h);
            check_launch();
        });
    });
}
void unpermute(
    int64_t stream, int64_t dtype, int64_t rows, int64_t position, int64_t probabilities, int64_t y,
    int64_t m, int64_t n, int64_t k, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows<T>(n, h, [&](auto W, dim3 grid, dim3 block) {
            unpermute_rows<T, W.value><<<grid, block, 0, on(stream)>>>(
                as<T>(rows), as<int64_t>(position), as<float>(probabilities), as<T>(y), m, n, k, h);
            check_launch();
        });
    });
}
void unpermute_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t rows, int64_t order, int64_t probabilities,
    int64_t d_rows, int64_t d_probabilities, int64_t m, int64_t n, int64_t k, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows<T>(m, h, [&](auto W, dim3 grid, dim3 block) {
            unpermute_rows_backward<T, W.value><<<grid, block, 0, on(stream)>>>(
                as<T>(dy), as<T>(rows), as<int64_t>(order), as<float>(probabilities), as<T>(d_rows),
                as<float>(d_probabilities), m, n, k, h);
            check_launch();
        });
    });
}
"""


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
        return x.numel() > 0 and len(order) < 2**31

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
        return rows.numel() > 0

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
        return rows.numel() > 0

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

ADAMW = r"""
// AdamW in one pass. Everything is computed in float. Bytes per parameter, with 16-bit moments and
// a master split between the bf16 weight and 16 more bits (optimizer.py): in 2 + 2 + 4 + 2 + 2, out
// 2 + 2 + 2 + 2, together 20. With a float master and float moments: in 4 + 4 + 4 + 4, out
// 4 + 2 + 4 + 4, together 30.

// Where the master weight is: the float weight itself; split between `weight` and `low`; a tensor
// of its own beside the 16-bit weight.
enum Master { ITSELF, SPLIT, BESIDE };

template <typename T, typename S, Master MASTER>
struct AdamW {
    T* weight;
    int16_t* low;
    float* master;
    const float* gradient;
    S *exp_avg, *exp_avg_sq;
    // 1 - beta1
    float fresh;
    float beta2;
    // 1 - beta2
    float fresh2;
    float eps;
    // 1 - lr decay
    float keep;
    // lr / (1 - beta1^t)
    float step_size;
    // sqrt(1 - beta2^t)
    float root;
    // of the gradient
    float scale;
    template <int W>
    __device__ void run(int64_t at) const {
        Vector<T, W> weights;
        Vector<int16_t, W> lows;
        Vector<float, W> masters;
        Vector<float, W> g = read<W>(gradient + at);
        Vector<S, W> m = read<W>(exp_avg + at), v = read<W>(exp_avg_sq + at);
        if constexpr (MASTER != BESIDE) weights = read<W>(weight + at);
        if constexpr (MASTER == SPLIT) lows = read<W>(low + at);
        if constexpr (MASTER == BESIDE) masters = read<W>(master + at);
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float grad = g.at[w] * scale;
            float avg = to_float(m.at[w]), sq = to_float(v.at[w]);
            float x;
            if constexpr (MASTER == ITSELF) x = to_float(weights.at[w]);
            if constexpr (MASTER == SPLIT) {
                unsigned high = __bfloat16_as_ushort(weights.at[w]);
                x = __uint_as_float((high << 16) + unsigned(int(lows.at[w])));
            }
            if constexpr (MASTER == BESIDE) x = masters.at[w];
            avg += fresh * (grad - avg);
            sq = beta2 * sq + fresh2 * grad * grad;
            x = x * keep - step_size * avg / (sqrtf(sq) / root + eps);
            m.at[w] = from_float<S>(avg);
            v.at[w] = from_float<S>(sq);
            if constexpr (MASTER == ITSELF) weights.at[w] = from_float<T>(x);
            if constexpr (MASTER == SPLIT) {
                unsigned bits = __float_as_uint(x);
                unsigned high = (bits + 0x8000u) >> 16;
                weights.at[w] = __ushort_as_bfloat16(uint16_t(high));
                lows.at[w] = int16_t(bits - (high << 16));
            }
            if constexpr (MASTER == BESIDE) {
                masters.at[w] = x;
                weights.at[w] = from_float<T>(x);
            }
        }
        write<W>(weight + at, weights);
        if constexpr (MASTER == SPLIT) write<W>(low + at, lows);
        if constexpr (MASTER == BESIDE) write<W>(master + at, masters);
        write<W>(exp_avg + at, m);
        write<W>(exp_avg_sq + at, v);
    }
};

void adamw(
    int64_t stream, int64_t dtype, int64_t weight, int64_t low, int64_t master, int64_t gradient,
    int64_t exp_avg, int64_t exp_avg_sq, int64_t n, double beta1, double beta2, double eps,
    double keep, double step_size, double root, double scale) {
    bool whole = aligned(weight, low, master, gradient) && aligned(exp_avg, exp_avg_sq);
    auto launch = [&](auto zero, auto state, auto kind) {
        using T = decltype(zero);
        using S = decltype(state);
        AdamW<T, S, Master(decltype(kind)::value)> f{
            as<T>(weight), as<int16_t>(low), as<float>(master),
            as<float>(gradient), as<S>(exp_avg), as<S>(exp_avg_sq),
            float(1 - beta1), float(beta2), float(1 - beta2), float(eps),
            float(keep), float(step_size), float(root), float(scale)};
        launch_each<8>(n, f, stream, whole);
    };
    if (low)
        launch(__nv_bfloat16(), __nv_bfloat16(), Number<SPLIT>());
    else if (!master)
        launch(float(), __nv_bfloat16(), Number<ITSELF>());
    else if (dtype == 1)
        launch(__nv_bfloat16(), float(), Number<BESIDE>());
    else
        launch(__half(), float(), Number<BESIDE>());
}
"""


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


# --- all of the source ----------------------------------------------------------------------------

CUDA = COMMON + NORMS + ROTARY + SWIGLU + COLUMNS + SOFTMAX + CROSS_ENTROPY + PERMUTATION + ADAMW
# The launchers, {declaration: name}. What follows a line that ends in > is a template.
FUNCTIONS = dict(re.findall(r"(?<!>\n)^((?:void|int64_t) (\w+)\([^)]*\)) \{", CUDA, re.M))
BINDINGS = "#include <pybind11/pybind11.h>\n" + "".join(
    f"{declaration};\n" for declaration in FUNCTIONS
)


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


# --- bytes and errors, beside PyTorch's own -------------------------------------------------------


class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes that PyTorch's operations have to move.

    Every tensor that an operation reads or writes counts once, every tensor that it changes in
    place twice. Views and empty tensors move nothing.
    """

    ALLOCATIONS = (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
    )

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        schema = function._schema
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if is_view or function in self.ALLOCATIONS:
            return outputs
        # {address: bytes}: an output that is an argument counts once here.
        moved = {
            t.untyped_storage().data_ptr(): t.numel() * t.element_size()
            for t in torch.utils._pytree.tree_leaves((args, kwargs, outputs))
            if isinstance(t, Tensor) and t.numel()
        }
        changed = [
            t.numel() * t.element_size()
            for t, argument in zip(args, schema.arguments)
            if isinstance(t, Tensor) and argument.alias_info and argument.alias_info.is_write
        ]
        self.bytes += sum(moved.values()) + sum(changed)
        return outputs


def module_examples(new, b: int, s: int, h: int, ffn: int, heads: int) -> dict:
    """The examples of what stands in a block; new(*shape) makes a random tensor."""
    d = h // heads
    config = GPTConfig(num_layers=1, hidden_size=h, num_heads=heads, seq_length=s, llama=True)
    table = gpt.rotary_table(config, s, new(1))
    key = dropout_key(0, 1, torch.arange(b, device=new(1).device))
    mask = torch.full_like(new(s, s), -math.inf).triu(1)
    return {
        "rms_norm": (
            (new(b, s, h), new(h)),
            rms_norm,
            lambda x, w: F.rms_norm(x, (h,), w, 1e-5),
            (0, 1),
        ),
        "layer_norm": (
            (new(b, s, h), new(h), new(h)),
            layer_norm,
            lambda x, w, bias: F.layer_norm(x, (h,), w, bias, 1e-5),
            (0, 1, 2),
        ),
        "rotary": (
            (new(b, s, heads, d).transpose(1, 2), new(b, s, heads, d).transpose(1, 2), *table),
            rotary,
            lambda q, k, *t: (gpt.rotate(q, t), gpt.rotate(k, t)),
            (0, 1),
        ),
        "swiglu": ((new(b, s, ffn), new(b, s, ffn)), swiglu, gpt.SwiGLU(), (0, 1)),
        "bias_gelu": (
            (new(b, s, ffn), new(ffn)),
            bias_gelu,
            lambda x, bias: F.gelu(x + bias, approximate="tanh"),
            (0, 1),
        ),
        "bias_dropout_add": (
            (new(b, s, h), new(h), new(b, s, h), key),
            lambda x, bias, r, k: bias_dropout_add(x, bias, r, k, 2, 0, 0.1),
            gpt.BiasDropoutAdd(0.1, 2),
            (0, 1, 2),
        ),
        "causal_softmax": (
            (new(b * heads, s, s),),
            lambda scores: causal_softmax(scores, d**-0.5),
            lambda scores: (scores * d**-0.5 + mask).softmax(-1),
            (0,),
        ),
    }


def loss_examples(new, n: int, vocab_size: int) -> dict:
    logits = new(n, vocab_size)
    targets = torch.randint(vocab_size, (n,), device=logits.device)
    return {"cross_entropy": ((logits, targets), cross_entropy, eager_cross_entropy, (0,))}


def expert_examples(new, n: int, h: int) -> dict:
    """The permutation of n tokens to 2 of 8 experts each."""
    device = new(1).device
    routing = moe.Routing(
        lambda logits, training: logits,
        MoEConfig(
            num_layers=1, hidden_size=8, num_heads=1, num_experts=8, router="topk", router_topk=2
        ),
    )
    plan = routing(torch.rand(n, 8, device=device))
    probabilities = torch.rand(n, 2, device=device)
    rows = new(len(plan.order), h)
    there = new(n, h), plan.order, plan.position
    back = rows, probabilities, plan.position, plan.order
    return {
        "permute": (there, permute, moe.permute, (0,)),
        "unpermute": (back, unpermute, moe.unpermute, (0, 1)),
    }


def optimizer_examples(new, size: int) -> dict:
    """AdamW of one parameter, with 16-bit moments and a split master."""
    weight = new(size)
    low = torch.zeros_like(weight, dtype=torch.int16)
    gradient = torch.randn(size, device=weight.device)
    state = weight, low, None, gradient, new(size), new(size).abs()
    lr, decay, beta1, beta2, eps, step, scale = 1e-3, 0.1, 0.9, 0.95, 1e-8, 10, 1.0
    options = lr, decay, beta1, beta2, eps, step, scale
    return {"adamw": ((*state, *options), adamw, _AdamW.reference, ())}


def examples(
    b: int,
    s: int,
    h: int,
    ffn: int,
    vocab_size: int,
    heads: int = 8,
    device="cpu",
    dtype=torch.bfloat16,
) -> dict:
    """{name: (arguments, fused, PyTorch's own, which arguments have gradients)} of every operation,
    at the sizes of a model. Without gradients there is no backward."""

    def new(*shape):
        return torch.randn(shape, device=device, dtype=dtype)

    return {
        **module_examples(new, b, s, h, ffn, heads),
        **loss_examples(new, b * s, vocab_size),
        **expert_examples(new, b * s, h),
        **optimizer_examples(new, ffn * h),
    }


def as_tuple(outputs) -> tuple:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def measure(function, args: tuple, with_gradient: tuple, dtype: torch.dtype | None = None):
    """One call of a function, forward and backward.

    Floating-point arguments are cast to `dtype`, if it is given. Returns ([bytes moved forward,
    bytes moved backward], [*outputs, *gradients]); without gradients ([bytes moved forward], []).
    """
    inputs = list(args)
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            cast = dtype if dtype is not None and a.is_floating_point() else a.dtype
            inputs[i] = a.detach().to(cast).clone().requires_grad_(i in with_gradient)
        if i in with_gradient:
            # Not a leaf: an operation may overwrite it.
            inputs[i] = inputs[i] * 1
    with Traffic() as forward:
        outputs = function(*inputs)
    if not with_gradient:
        return [forward.bytes], []
    outputs = as_tuple(outputs)
    grad_outputs = [
        torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(o)
        for o in outputs
    ]
    with Traffic() as backward:
        gradients = torch.autograd.grad(outputs, [inputs[i] for i in with_gradient], grad_outputs)
    return [forward.bytes, backward.bytes], [*outputs, *gradients]


def largest_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """The largest |x - y| / |y|, in the 2-norm, of outputs and gradients against float64."""
    pairs = zip(results, exact)
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs)


def main():
    library, why_not = load()
    if library:
        print(f"compiled for {torch.cuda.get_device_name()}")
    else:
        print(f"not compiled here ({why_not}): the references run")
    device, ours = ("cuda", "kernel") if library else ("cpu", "reference")
    print(
        "\nBytes per element of the first argument, bf16, forward + backward:\n"
        "  one pass   every argument and output of the operation once\n"
        f"  PyTorch    summed over PyTorch's own operations on this device ({device})\n"
        "Error: the largest of an output or a gradient, against float64.\n\n"
        f"{'':>18}{'one pass':>14}{'PyTorch':>16}{'ratio':>7}"
        f"{'error: ' + ours:>18}{'PyTorch':>9}"
    )
    torch.manual_seed(0)
    sizes = dict(b=2, s=256, h=512, ffn=1408, vocab_size=4096)
    for name, (args, fused, eager, with_gradient) in examples(**sizes, device=device).items():
        one_pass, fused_results = measure(fused, args, with_gradient)
        several, eager_results = measure(eager, args, with_gradient)
        errors = "", ""
        if with_gradient:
            exact = measure(eager, args, with_gradient, torch.float64)[1]
            results = fused_results, eager_results
            errors = tuple(f"{largest_error(r, exact):.1e}" for r in results)
        counts = [
            " + ".join(f"{moved / args[0].numel():.1f}" for moved in passes)
            for passes in (one_pass, several)
        ]
        ratio = sum(several) / sum(one_pass)
        print(f"{name:>18}{counts[0]:>14}{counts[1]:>16}{ratio:>7.1f}{errors[0]:>18}{errors[1]:>9}")


if __name__ == "__main__":
    main()
