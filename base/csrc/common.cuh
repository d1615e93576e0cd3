#pragma once

// For readers who have never written a kernel.
//
// Kernel          A function, __global__, that many threads run, each on its own elements. It may
//                 call __device__ functions. blockIdx and threadIdx tell a thread its position.
// Warp            32 threads, its lanes. They execute each instruction together. A shuffle reads
//                 another lane's register. Loads of neighbouring addresses become one load.
// Multiprocessor  A GPU has about a hundred. Each keeps up to 2048 threads resident (1536 on some
//                 cards), if its 65,536 registers suffice for them. It runs the warps whose data
//                 has arrived while the others wait for memory. Its shared memory is as fast as a
//                 cache, and a kernel says what is in it.
// Block           Up to 1024 threads on one multiprocessor, in one dimension or two (threadIdx.x
//                 and .y). They see the same shared memory and can wait for each other with
//                 __syncthreads().
// Grid            All blocks of a launch. Blocks cannot wait for each other.
// Launch          kernel<<<grid, block, bytes, stream>>>(..). Launches on a stream run in order.
//
// __launch_bounds__(n) promises that a block has at most n threads, so that the compiler may give
// each thread more registers. __restrict__ promises that no other pointer reaches that memory, so
// that loads may be moved before stores. #pragma unroll writes a loop out, so that its arrays
// become registers. Shared memory has 32 banks, word i in bank i % 32; it is slower when lanes of a
// warp read different words of one bank.
//
// A launcher, extern "C", takes addresses and numbers and returns nullptr or an error message: the
// tensors of the signature in kernels.py, its outputs, its sizes, its numbers. ctypes calls it
// (base/cuda_kernels.py). No PyTorch header is included, and the build is short.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <algorithm>
#include <cassert>
#include <cfloat>
#include <cstdint>

// The type of the elements. Each library is built for one: nvcc -DELEMENT=__nv_bfloat16, __half or
// float. Arithmetic is in float, and results are rounded once.
#ifndef ELEMENT
#define ELEMENT __nv_bfloat16
#endif
using T = ELEMENT;

// Memory that a kernel reads, and that it writes: no other pointer reaches it.
template <typename E = T>
using In = const E* __restrict__;
template <typename E = T>
using Out = E* __restrict__;

// What one load or store instruction moves: at most 16 bytes, which are 8 elements of 16 bits. Wide
// vectors need fewer instructions and keep more bytes in flight. If memory answers after 700 ns,
// then 4 TB/s need 4e12 x 700e-9 = 3 MB in flight at any time, 21 KB on each of 132
// multiprocessors. 2048 threads with one vector each have 32 KB in flight; 512 threads need three
// vectors each.
constexpr int W = 16 / sizeof(T);
template <typename E = T, int N = W>
struct alignas(sizeof(E) * N < 16 ? sizeof(E) * N : 16) Vector {
    E at[N];
};

template <int N = W, typename E>
__device__ __forceinline__ Vector<E, N> read(const E* from) {
    return *reinterpret_cast<const Vector<E, N>*>(from);
}
template <typename E, int N>
__device__ __forceinline__ void write(E* to, const Vector<E, N>& v) {
    *reinterpret_cast<Vector<E, N>*>(to) = v;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
    return __uint_as_float(uint32_t(__bfloat16_as_ushort(x)) << 16);
}
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
// Round to nearest.
__device__ __forceinline__ void round_to(float& to, float x) { to = x; }
__device__ __forceinline__ void round_to(__nv_bfloat16& to, float x) { to = __float2bfloat16(x); }
__device__ __forceinline__ void round_to(__half& to, float x) { to = __float2half(x); }

// A vector that a branch may set, 0 at first: 4 registers. (Of a Vector, where two paths meet, the
// compiler keeps each 16-bit element in a register of its own, and runs out of them.)
struct Packed {
    Vector<uint32_t, 4> bits = {};
    Packed() = default;
    __device__ explicit Packed(const Vector<>& v) { memcpy(&bits, &v, sizeof(v)); }
    __device__ Vector<> vector() const {
        Vector<> v;
        memcpy(&v, &bits, sizeof(v));
        return v;
    }
    __device__ float operator[](int w) const { return to_float(vector().at[w]); }
};

// 2^x and 1/x in one instruction each. Results below 2^-126 become 0; __expf and __fdividef spend
// more instructions to keep those.
__device__ __forceinline__ float exp2_fast(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// e^x: two instructions where elements have 16 bits, whose rounding hides the error; the accurate
// function for float. At 4 TB/s an H200 has time for about 8 thread instructions per byte moved; a
// kernel that needs more is limited by instructions, not by memory.
__device__ __forceinline__ float exp_of(float x) {
    if constexpr (sizeof(T) == 2)
        return exp2_fast(1.4426950408889634f * x);
    else
        return expf(x);
}

// here = sigmoid(x), there = sigmoid(-x) = 1 - sigmoid(x) without the cancellation of a difference.
struct Sigmoid {
    float here, there;
};
// From e^-|x|, which never overflows.
__device__ __forceinline__ Sigmoid sigmoid(float x) {
    float e = exp_of(-fabsf(x));
    float s = sizeof(T) == 2 ? reciprocal_fast(1.f + e) : 1.f / (1.f + e);
    return x < 0 ? Sigmoid{e * s, s} : Sigmoid{s, e * s};
}

// --- launching ---

inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

inline const char* failure() {
    cudaError_t error = cudaGetLastError();
    return error ? cudaGetErrorString(error) : nullptr;
}

template <typename... P, typename... A>
const char* launch_kernel(
    void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, A... args) {
    kernel<<<grid, block, 0, stream>>>(static_cast<P>(args)...);
    return failure();
}

// How many blocks of a kernel all multiprocessors hold at once.
template <typename K>
int64_t resident_blocks(K kernel, int threads) {
    int device = 0, multiprocessors = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0);
    return int64_t(multiprocessors) * blocks;
}
