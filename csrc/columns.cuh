// Walks down the columns of [rows, h], for bias_gelu.cu and bias_dropout_add.cu. A thread owns W
// columns; neighbouring threads own neighbouring columns. It reads the bias of its columns once and
// walks down the rows, FEW at a time, so that several loads are in flight. Backward adds up the
// bias gradient in registers on the way; a sum over the rows of dx would be a pass of its own. A
// block is 64 threads wide and DEEP threads deep; shared memory adds up the DEEP sums at the end,
// so that fewer parts are left. The partial sums [gridDim.y, h] are a few percent of the bytes.
#pragma once
#include "parts.cuh"

constexpr int FEW = 4, WIDE = 64, DEEP = 4;

__device__ __forceinline__ int own_column() { return (blockIdx.x * WIDE + threadIdx.x) * W; }

// The bias of a thread's columns; 0 where there is no bias.
__device__ __forceinline__ Vector<float> own_bias(const T* bias, int h) {
    Vector<float> out = {};
    if (bias && own_column() < h) {
        Vector<> in = read(bias + own_column());
        #pragma unroll
        for (int w = 0; w < W; w++)
            out.at[w] = to_float(in.at[w]);
    }
    return out;
}

// out = f(of_row(row), w, a, b) for elements a and b of two tensors; b is 0 without a second one.
// parts, if not null, receives the sums of f's results over the rows of this block.
template <typename R, typename F>
__device__ __forceinline__ void down_columns(
    const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ out,
    float* __restrict__ parts, int64_t rows, int h, R of_row, F f) {
    int column = own_column();
    float sum[W] = {};
    for (int64_t first = (int64_t(blockIdx.y) * DEEP + threadIdx.y) * FEW;
         column < h && first < rows; first += int64_t(gridDim.y) * DEEP * FEW) {
        Vector<> of_a[FEW], of_b[FEW] = {};
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            if (first + r < rows) {
                of_a[r] = read(a + (first + r) * h + column);
                if (b) of_b[r] = read(b + (first + r) * h + column);
            }
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            if (first + r < rows) {
                Vector<> y;
                auto here = of_row(first + r);
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float d = f(here, w, to_float(of_a[r].at[w]), to_float(of_b[r].at[w]));
                    round_to(y.at[w], d);
                    sum[w] += d;
                }
                write(out + (first + r) * h + column, y);
            }
    }
    if (!parts) return;
    __shared__ float sums[DEEP][WIDE * W];
    #pragma unroll
    for (int w = 0; w < W; w++)
        sums[threadIdx.y][threadIdx.x * W + w] = sum[w];
    __syncthreads();
    for (int i = threadIdx.y * WIDE + threadIdx.x; i < WIDE * W; i += WIDE * DEEP) {
        float all = 0;
        #pragma unroll
        for (int y = 0; y < DEEP; y++)
            all += sums[y][i];
        if (blockIdx.x * WIDE * W + i < h)
            parts[int64_t(blockIdx.y) * h + blockIdx.x * WIDE * W + i] = all;
    }
}

// Blocks of 256 threads over [rows, h]: as many as fit on the GPU at once, `resident` of them on a
// multiprocessor, but none without rows.
inline dim3 column_grid(int64_t rows, int64_t h, int64_t resident) {
    int64_t across = pieces(h, WIDE * W), most = pieces(rows, DEEP * FEW);
    int64_t down = pieces(multiprocessors() * resident, across);
    return dim3(across, down < most ? down : most);
}
// How many blocks of a kernel are resident on a multiprocessor.
template <typename K>
int64_t resident_blocks(K kernel) {
    int blocks = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, WIDE * DEEP, 0);
    return blocks;
}
