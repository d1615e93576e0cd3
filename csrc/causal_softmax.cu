// Causal softmax of scale x scores, [.., s, s]: row i attends to columns 0 .. i. Bytes: the lower
// triangle in, the whole matrix out, with zeros above the diagonal. The mask is never a tensor. A
// row stays in registers between its maximum, its sum and its use.
#include "rows.cuh"

// The last column that a row attends to; -1 for a block's rows beyond the last one, which have no
// columns, and go along to meet the others in over_row.
__device__ __forceinline__ int last_column(int64_t row, int64_t rows, int s) {
    return row < rows ? int(uint32_t(row) % uint32_t(s)) : -1;
}
// Columns that are read: up to the vector of the last one.
__device__ __forceinline__ int columns_read(int last) { return (last + W) / W * W; }

template <int K, int MOST>
__global__ void __launch_bounds__(MOST)
    softmax_forward(In<> scores, Out<> y, int64_t rows, int s, float scale) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    int last = last_column(row, rows, s);
    Row<K> in(scores + row * s, columns_read(last));
    float largest[1] = {-INFINITY}, sum[1] = {0.f};
    in.each([&](int k, int w) {
        if (Row<K>::column(k) + w <= last) largest[0] = fmaxf(largest[0], scale * in(k, w));
    });
    over_row<Max>(largest);
    float e[K][W] = {};
    in.each([&](int k, int w) {
        if (Row<K>::column(k) + w <= last) e[k][w] = exp_of(scale * in(k, w) - largest[0]);
        sum[0] += e[k][w];
    });
    over_row<Sum>(sum);
    float share = 1.f / sum[0];
    // The whole row.
    in.n = row < rows ? s : 0;
    in.store(y + row * s, [&](int k, int w) { return e[k][w] * share; });
}

// d scores = scale p (dp - sum of dp p)
template <int K, int MOST>
__global__ void __launch_bounds__(MOST)
    softmax_backward(In<> dp, In<> p, Out<> out, int64_t rows, int s, float scale) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    int last = last_column(row, rows, s);
    Row<K> grad(dp + row * s, columns_read(last)), in(p + row * s, columns_read(last));
    float sum[1] = {0.f};
    in.each([&](int k, int w) {
        // Above the diagonal dp may be anything, and counts as 0.
        if (Row<K>::column(k) + w <= last) sum[0] += grad(k, w) * in(k, w);
    });
    over_row<Sum>(sum);
    in.n = row < rows ? s : 0;
    in.store(out + row * s, [&](int k, int w) {
        bool live = Row<K>::column(k) + w <= last;
        return live ? scale * in(k, w) * (grad(k, w) - sum[0]) : 0.f;
    });
}

extern "C" const char* causal_softmax(
    cudaStream_t stream, In<> scores, T* y, int64_t n, int64_t s, double scale) {
    return with_row(s, [&](auto K, auto MOST, dim3 block) {
        auto kernel = softmax_forward<K.value, MOST.value>;
        int64_t blocks = pieces(n * s, block.y);
        return launch_kernel(kernel, blocks, block, stream, scores, y, n * s, s, scale);
    });
}
extern "C" const char* causal_softmax_backward(
    cudaStream_t stream, In<> dp, In<> p, T* out, int64_t n, int64_t s, double scale) {
    return with_row(s, [&](auto K, auto MOST, dim3 block) {
        auto kernel = softmax_backward<K.value, MOST.value>;
        int64_t blocks = pieces(n * s, block.y);
        return launch_kernel(kernel, blocks, block, stream, dp, p, out, n * s, s, scale);
    });
}
