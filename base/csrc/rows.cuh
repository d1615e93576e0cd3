// Rows that stay in registers, for norms.cu and causal_softmax.cu.
#pragma once
#include "common.cuh"
#include <type_traits>

// A row of n elements, a multiple of W. blockDim.x threads hold K vectors each; neighbouring
// threads hold neighbouring vectors. All K loads are in flight before the first is used. Elements
// stay in their own type: 16 bits take half the registers of floats.
template <int K>
struct Row {
    Packed at[K];
    int n = 0;
    Row() = default;
    __device__ Row(const T* from, int n) : n(n) {
        #pragma unroll
        for (int k = 0; k < K; k++)
            if (column(k) < n) at[k] = Packed(read(from + column(k)));
    }
    static __device__ int column(int k) { return (k * blockDim.x + threadIdx.x) * W; }
    __device__ float operator()(int k, int w) const { return at[k][w]; }
    // f(k) for each vector of this thread.
    template <typename F>
    __device__ void each_vector(F f) const {
        #pragma unroll
        for (int k = 0; k < K; k++)
            if (column(k) < n) f(k);
    }
    // f(k, w) for each element of this thread.
    template <typename F>
    __device__ void each(F f) const {
        each_vector([&](int k) {
            #pragma unroll
            for (int w = 0; w < W; w++)
                f(k, w);
        });
    }
    // The elements become f(k, w), rounded.
    template <typename F>
    __device__ void set(F f) {
        #pragma unroll
        for (int k = 0; k < K; k++) {
            Vector<> out;
            #pragma unroll
            for (int w = 0; w < W; w++)
                round_to(out.at[w], f(k, w));
            at[k] = Packed(out);
        }
    }
    __device__ void write_to(T* to) const {
        each_vector([&](int k) { write(to + column(k), at[k].vector()); });
    }
};

// All-reduce over the threads of one row: N sums or maxima, which every thread of the row receives.
// The 32 lanes of a warp exchange registers in 5 steps; several warps leave their results in shared
// memory, where the lanes of each warp read them, one each, and exchange again. A row is blockDim.x
// threads, a block holds blockDim.y rows. All threads of the block must call it together, because
// it waits at barriers.
struct Sum {
    static constexpr float NOTHING = 0.f;
    static __device__ float of(float a, float b) { return a + b; }
};
struct Max {
    static constexpr float NOTHING = -INFINITY;
    static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

template <typename OF, int N>
__device__ __forceinline__ void over_warp(float (&x)[N]) {
    #pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        #pragma unroll
        for (int n = 0; n < N; n++)
            x[n] = OF::of(x[n], __shfl_xor_sync(0xffffffffu, x[n], lane));
}

template <typename OF, int N>
__device__ __forceinline__ void over_row(float (&x)[N]) {
    over_warp<OF>(x);
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    if (warps == 1) return;
    __shared__ float of_warp[32][N];
    int first = threadIdx.y * warps;
    if (lane == 0)
        #pragma unroll
        for (int n = 0; n < N; n++)
            of_warp[first + threadIdx.x / 32][n] = x[n];
    __syncthreads();
    #pragma unroll
    for (int n = 0; n < N; n++)
        x[n] = lane < warps ? of_warp[first + lane][n] : OF::NOTHING;
    over_warp<OF>(x);
    // Only now may the next reduction overwrite of_warp.
    __syncthreads();
}

// |x|, and infinity for NaN, which a maximum would lose.
__device__ __forceinline__ float magnitude(float x) {
    x = fabsf(x);
    return x < INFINITY ? x : INFINITY;
}

// Raises a number in memory. Numbers that are not negative have the order of their bits. Few blocks
// need the atomic instruction, for all of them would wait for one address.
__device__ __forceinline__ void raise_to(float* memory, float x) {
    unsigned* bits = reinterpret_cast<unsigned*>(memory);
    if (__float_as_uint(x) > *static_cast<volatile unsigned*>(bits))
        atomicMax(bits, __float_as_uint(x));
}

// x becomes the maxima over the threads of a row, and N numbers in memory are raised to them.
template <int N>
__device__ __forceinline__ void raise_over_row(float* memory, float (&x)[N]) {
    over_row<Max>(x);
    if (threadIdx.x == 0)
        #pragma unroll
        for (int n = 0; n < N; n++)
            raise_to(memory + n, x[n]);
}

// Chooses K and the threads of a row of n elements: launch(K, MOST, block), K and MOST as types, so
// that loops unroll. A row that needs at most 3 vectors a lane takes one warp, and no thread waits
// for another warp; several such rows share a block of at most MOST threads. Rows of more than 2048
// vectors do not fit, and PyTorch computes them.
template <int N>
using Number = std::integral_constant<int, N>;

template <typename F>
auto with_row(int64_t n, F launch) {
    auto block = [&](int64_t K) {
        int64_t threads = pieces(pieces(n / W, K), 32) * 32;
        return dim3(threads, threads < 256 ? 256 / threads : 1);
    };
    if (n <= 32 * 3 * W) return launch(Number<3>(), Number<256>(), block(3));
    if (n <= 256 * 2 * W) return launch(Number<2>(), Number<256>(), block(2));
    if (n <= 512 * 2 * W) return launch(Number<2>(), Number<512>(), block(2));
    return launch(Number<4>(), Number<512>(), block(4));
}
