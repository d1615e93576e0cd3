// Walks down the columns of [rows, h], for bias_gelu.cu and bias_dropout_add.cu. A thread owns W
// columns; neighbouring threads own neighbouring columns. It reads the bias of its columns once and
// walks down the rows, FEW at a time, so that several loads are in flight. Backward adds up the
// bias gradient in registers on the way; a sum over the rows of dx would be a pass of its own. A
// block is 128 threads wide and DEEP threads deep; shared memory adds up the DEEP sums at the end,
// so that fewer parts are left. The partial sums [gridDim.y, h] are a few percent of the bytes.
#pragma once
#include "common.cuh"

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
inline int64_t column_parts(int64_t rows, int64_t h, int64_t dtype) {
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
    constexpr int W = PER_VECTOR<T>;
    dim3 grid(pieces(h, 128 * W), count), block(128, DEEP);
    down_columns<W, F><<<grid, block, 0, on(stream)>>>(rows, h, f, as<float>(parts));
    check_launch();
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
