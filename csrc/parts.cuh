// The second half of a sum over rows, for norms.cu and columns.cuh: out[column] = sum over parts of
// the partial sums [parts, n]. With blockIdx.y = 1: the same for `second`, whose parts follow.
#pragma once
#include "common.cuh"

// A block of 32 x 32 threads sums 32 columns; neighbouring threads read neighbouring addresses.
static __global__ void __launch_bounds__(1024) sum_parts(
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
    if (threadIdx.x == 0 && column < n) round_to(out[column], sum);
}

inline void launch_sum_parts(
    cudaStream_t stream, const float* parts, T* out, T* second, int64_t count, int64_t n) {
    dim3 grid(pieces(n, 32), second ? 2 : 1), block(32, 32);
    sum_parts<<<grid, block, 0, stream>>>(parts, out, second, count, n);
}
