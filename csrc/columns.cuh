// Walks down the columns of [rows, h], for bias_gelu.cu and bias_dropout_add.cu, and ends sums over
// rows, for norms.cu too. A thread owns W columns; neighbouring threads own neighbouring columns.
// It reads the bias of its columns once and walks down the rows, FEW at a time, so that several
// loads are in flight. Backward adds up the bias gradient in registers on the way; a sum over the
// rows of dx would be a pass of its own. A block is 64 threads wide and DEEP threads deep; shared
// memory adds up the DEEP sums at the end, so that fewer parts are left. The partial sums
// [gridDim.y, h] are a few percent of the bytes.
#pragma once
#include "common.cuh"

constexpr int FEW = 4, WIDE = 64, DEEP = 4;

// An operation is f(a, b, bias, of_row, of_column) of the elements of two tensors and the bias. The
// last two are f.of_row(row) and f.of_column(column), computed once. This one needs neither.
struct OfElements {
    __device__ static uint32_t of_row(int64_t) { return 0; }
    __device__ static uint32_t of_column(int) { return 0; }
};

// Adds up the sums of a block's threads for each column, and writes them to parts, if not null.
__device__ __forceinline__ void leave_sums(const float (&sum)[W], float* parts, int h) {
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

// out = f(..); b and bias may be null, for 0. parts, if not null, receives the sums of f's results
// over the rows of each block.
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
                uint32_t of_row = f.of_row(first + r);
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float x = to_float(of_a[r].at[w]), second = to_float(of_b[r].at[w]);
                    float d = f(x, second, of_bias[w], of_row, of_column[w]);
                    round_to(y.at[w], d);
                    if constexpr (SUMS) sum[w] += d;
                }
                write(out + (first + r) * h + column, y);
            }
    }
    if constexpr (SUMS) leave_sums(sum, parts, h);
}

// out[column] = sum over parts of the partial sums [parts, n]; blockIdx.y: which of several such
// sums. A block of 32 x 32 threads sums 32 columns; neighbouring threads read neighbouring
// addresses.
static __global__ void __launch_bounds__(1024)
    sum_parts(In<float> parts, Out<> out, int count, int n) {
    // 33 instead of 32, so that the elements of a column lie in 32 different banks.
    __shared__ float sums[32][33];
    int64_t first = int64_t(blockIdx.y) * count;
    int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (column < n)
        #pragma unroll 8
        for (int part = threadIdx.y; part < count; part += 32)
            sum += parts[(first + part) * n + column];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Transposed: a warp holds one column now.
    sum = sums[threadIdx.x][threadIdx.y];
    for (int lane = 16; lane > 0; lane /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && column < n) round_to(out[int64_t(blockIdx.y) * n + column], sum);
}

// parts: [outputs, count, n]; null: nothing is done. out: [outputs, n]
inline void launch_sum_parts(
    cudaStream_t stream, const float* parts, T* out, int64_t outputs, int64_t count, int64_t n) {
    dim3 grid(pieces(n, 32), outputs), block(32, 32);
    if (parts) sum_parts<<<grid, block, 0, stream>>>(parts, out, count, n);
}

// Blocks over [rows, h]: as many as fit on the GPU at once, but none without rows.
template <typename F, bool SUMS>
dim3 column_grid(int64_t rows, int64_t h) {
    int64_t across = pieces(h, WIDE * W), most = pieces(rows, DEEP * FEW);
    int64_t resident = resident_blocks(down_columns<F, SUMS>, WIDE * DEEP);
    return dim3(across, std::min(pieces(resident, across), most));
}

// d_bias and parts, [column_grid.y, h] floats, are null where no gradient of the bias is wanted.
template <typename F, bool SUMS>
const char* launch_columns(
    cudaStream_t stream, In<> a, In<> b, In<> bias, T* out, T* d_bias, float* parts, int64_t rows,
    int64_t h, F f) {
    dim3 grid = column_grid<F, SUMS>(rows, h), block(WIDE, DEEP);
    down_columns<F, SUMS><<<grid, block, 0, stream>>>(a, b, bias, out, parts, rows, h, f);
    launch_sum_parts(stream, parts, d_bias, 1, grid.y, h);
    return failure();
}
