// Causal softmax of scale x scores, [.., s, s]: row i attends to columns 0 .. i. Bytes: the lower
// triangle in, the whole matrix out, with zeros above the diagonal. The mask is never a tensor. A
// row stays in registers between its maximum, its sum and its use.
#include "rows.cuh"

// A block's rows beyond the last one have no columns, and go along to meet the others in over_row.
struct CausalRow {
    int64_t row;
    // The last column that the row attends to.
    int last;
    // Columns that are read: up to the vector of the last one.
    int n;
    __device__ CausalRow(int64_t rows, int s) {
        row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
        last = row < rows ? int(uint32_t(row) % uint32_t(s)) : -1;
        n = last < 0 ? 0 : (last / W + 1) * W;
    }
};

template <int K, int MOST>
__global__ void __launch_bounds__(MOST) softmax_forward(
    const T* __restrict__ scores, T* __restrict__ y, int64_t rows, int s, float scale) {
    CausalRow at(rows, s);
    Row<K> in(scores + at.row * s, at.n);
    float largest[1] = {-INFINITY}, sum[1] = {0.f};
    in.each([&](int k, int w) {
        if (Row<K>::column(k) + w <= at.last) largest[0] = fmaxf(largest[0], scale * in(k, w));
    });
    over_row<Max>(largest);
    float e[K][W] = {};
    in.each([&](int k, int w) {
        if (Row<K>::column(k) + w <= at.last) e[k][w] = exp_of(scale * in(k, w) - largest[0]);
        sum[0] += e[k][w];
    });
    over_row<Sum>(sum);
    float share = 1.f / sum[0];
    // The whole row.
    in.n = at.row < rows ? s : 0;
    in.store(y + at.row * s, [&](int k, int w) { return e[k][w] * share; });
}

// d scores = scale p (dp - sum of dp p)
template <int K, int MOST>
__global__ void __launch_bounds__(MOST) softmax_backward(
    const T* __restrict__ dp, const T* __restrict__ p, T* __restrict__ out, int64_t rows, int s,
    float scale) {
    CausalRow at(rows, s);
    Row<K> grad(dp + at.row * s, at.n), in(p + at.row * s, at.n);
    float sum[1] = {0.f};
    in.each([&](int k, int w) {
        // Above the diagonal dp may be anything, and counts as 0.
        if (Row<K>::column(k) + w <= at.last) sum[0] += grad(k, w) * in(k, w);
    });
    over_row<Sum>(sum);
    in.n = at.row < rows ? s : 0;
    in.store(out + at.row * s, [&](int k, int w) {
        bool live = Row<K>::column(k) + w <= at.last;
        return live ? scale * in(k, w) * (grad(k, w) - sum[0]) : 0.f;
    });
}

extern "C" const char* causal_softmax(
    cudaStream_t stream, const T* scores, T* y, int64_t rows, int64_t s, double scale) {
    with_row(s, [&](auto K, auto MOST, dim3 block) {
        dim3 grid(pieces(rows, block.y));
        softmax_forward<K.value, MOST.value>
            <<<grid, block, 0, stream>>>(scores, y, rows, s, scale);
    });
    return failure();
}
extern "C" const char* causal_softmax_backward(
    cudaStream_t stream, const T* dp, const T* p, T* out, int64_t rows, int64_t s, double scale) {
    with_row(s, [&](auto K, auto MOST, dim3 block) {
        dim3 grid(pieces(rows, block.y));
        softmax_backward<K.value, MOST.value>
            <<<grid, block, 0, stream>>>(dp, p, out, rows, s, scale);
    });
    return failure();
}
