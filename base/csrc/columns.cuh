// Walks down the columns of [rows, h], for bias_gelu.cu and bias_dropout_add.cu. A thread owns W
// columns; neighbouring threads own neighbouring columns. It reads the bias of its columns once and
// walks down the rows, FEW at a time, so that several loads are in flight. Backward adds up the
// bias gradient in registers on the way; a sum over the rows of dx would be a pass of its own. A
// block is 64 threads wide and DEEP threads deep; shared memory adds up the DEEP sums at the end,
// so that fewer parts are left. The partial sums [gridDim.y, h], which PyTorch adds up, are a few
// percent of the bytes.
#pragma once
#include "common.cuh"

constexpr int FEW = 4, WIDE = 64, DEEP = 4;

// An operation is f(a, b, bias, of_row, of_column) of the elements of two tensors and the bias. The
// last two are f.of_row(row) and f.of_column(column), computed once. This one needs neither.
struct OfElements {
    __device__ static uint32_t of_row(int64_t) { return 0; }
    __device__ static uint32_t of_column(int) { return 0; }
};

// Adds up the sums of a block's threads for each column, and writes them to parts.
__device__ __forceinline__ void leave_sums(const float (&sum)[W], float* parts, int h) {
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

// out = f(..); b and bias may be null, for 0. With SUMS parts receives the sums of f's results over
// the rows of each block.
template <typename F, bool SUMS>
__global__ void __launch_bounds__(WIDE * DEEP, 2) down_columns(
    In<> a, In<> b, In<> bias, Out<> out, Out<float> parts, int64_t rows, int h, F f) {
    int column = (blockIdx.x * WIDE + threadIdx.x) * W;
    Vector<> own = {};
    if (bias && column < h) own = read(bias + column);
    float of_bias[W], sum[W] = {};
    uint32_t of_column[W];
    #pragma unroll
    for (int w = 0; w < W; w++) {
        of_bias[w] = to_float(own.at[w]);
        of_column[w] = f.of_column(column + w);
    }
    for (int64_t first = (int64_t(blockIdx.y) * DEEP + threadIdx.y) * FEW;
         column < h && first < rows; first += int64_t(gridDim.y) * DEEP * FEW) {
        Packed of_a[FEW], of_b[FEW];
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            if (first + r < rows) {
                of_a[r] = Packed(read(a + (first + r) * h + column));
                if (b) of_b[r] = Packed(read(b + (first + r) * h + column));
            }
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            if (first + r < rows) {
                Vector<> y;
                uint32_t of_row = f.of_row(first + r);
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float d = f(of_a[r][w], of_b[r][w], of_bias[w], of_row, of_column[w]);
                    round_to(y.at[w], d);
                    if constexpr (SUMS) sum[w] += d;
                }
                write(out + (first + r) * h + column, y);
            }
    }
    if constexpr (SUMS) leave_sums(sum, parts, h);
}

// Blocks over [rows, h]: as many as fit on the GPU at once, but none without rows.
template <typename F, bool SUMS>
int64_t column_blocks(int64_t rows, int64_t h) {
    int64_t across = pieces(h, WIDE * W), most = pieces(rows, DEEP * FEW);
    int64_t resident = resident_blocks(down_columns<F, SUMS>, WIDE * DEEP);
    return std::min(pieces(resident, across), most);
}

// parts: [blocks, h] floats, for SUMS.
template <typename F, bool SUMS>
const char* launch_columns(
    cudaStream_t stream, In<> a, In<> b, In<> bias, T* out, float* parts, int64_t rows, int64_t h,
    int64_t blocks, F f) {
    dim3 grid(pieces(h, WIDE * W), blocks), block(WIDE, DEEP);
    auto kernel = down_columns<F, SUMS>;
    return launch_kernel(kernel, grid, block, stream, a, b, bias, out, parts, rows, h, f);
}
