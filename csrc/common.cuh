#pragma once

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
// Launchers take addresses and numbers, so no PyTorch header is included, and the build is short.
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

inline int64_t multiprocessors() {
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

template <typename F>
void with_type(int64_t dtype, F launch) {
    if (dtype == 0)
        launch(float());
    else if (dtype == 1)
        launch(__nv_bfloat16());
    else
        launch(__half());
}

// One thread for each vector of W elements. f.run<W>(at) computes the W elements from `at` on.
template <int W, typename F>
__global__ void __launch_bounds__(256) each(int64_t vectors, F f) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < vectors) f.template run<W>(i * W);
}

// n: elements, a multiple of W.
template <int W, typename F>
void launch_each(int64_t n, F f, int64_t stream) {
    if (n == 0) return;
    dim3 grid(pieces(n / W, 256)), block(256);
    each<W, F><<<grid, block, 0, on(stream)>>>(n / W, f);
    check_launch();
}

// Distributes a row of n elements, a multiple of W: `threads` threads hold at most K vectors each,
// which stay in registers from the first pass over the row to the last. A row that needs at most 4
// vectors a lane (3 where the kernel has few registers to spare) takes one warp, and no thread
// waits for another warp. `launch` receives W, K and the most threads of a block as types, so that
// loops unroll, and `threads`. SPARE: whether the kernel has registers to spare. Longer rows do not
// fit (`row_fits` in Python), and PyTorch's operations compute them.
template <int N>
struct Number {
    static constexpr int value = N;
};
inline int64_t row_threads(int64_t vectors, int K) { return pieces(pieces(vectors, K), 32) * 32; }

template <typename T, bool SPARE, typename F>
void with_row(int64_t n, F launch) {
    constexpr int W = PER_VECTOR<T>;
    constexpr int ONE_WARP = SPARE ? 4 : 3;
    if (n <= 32 * ONE_WARP * W)
        launch(Number<W>(), Number<ONE_WARP>(), Number<256>(), 32);
    else if (n <= 512 * W)
        launch(Number<W>(), Number<2>(), Number<256>(), row_threads(n / W, 2));
    else if (n <= 1024 * W)
        launch(Number<W>(), Number<2>(), Number<512>(), row_threads(n / W, 2));
    else
        launch(Number<W>(), Number<4>(), Number<512>(), row_threads(n / W, 4));
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
