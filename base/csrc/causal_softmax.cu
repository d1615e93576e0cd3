// Causal softmax of scale x scores, [.., s, s]: row i attends to columns 0 .. i; and the same with
// dropout. Bytes: the lower triangle in, the whole matrix out, with zeros above the diagonal. The
// causal mask is never a tensor, and neither is that of dropout. A row stays in registers between
// its maximum, its sum and its use.
//
// Backward without dropout begins with the probabilities, the result of forward. With dropout that
// result lacks the dropped ones, so backward begins with the scores, and computes softmax again: a
// few instructions, and the bytes are the same.
#include "dropout.cuh"
#include "rows.cuh"

// The last column that a row attends to; -1 for a block's rows beyond the last one, which have no
// columns, and go along to meet the others in over_row.
__device__ __forceinline__ int last_column(int64_t row, int64_t rows, int s) {
    return row < rows ? int(uint32_t(row) % uint32_t(s)) : -1;
}
// Columns that are read: up to the vector of the last one.
__device__ __forceinline__ int columns_read(int last) { return (last + W) / W * W; }

// softmax of scale x scores; p is 0 before, and stays so behind the last column.
template <int K>
__device__ __forceinline__ void softmax(
    const Row<K>& scores, int last, float scale, float (&p)[K][W]) {
    float largest[1] = {-INFINITY}, sum[1] = {0.f};
    scores.each([&](int k, int w) {
        if (Row<K>::column(k) + w <= last) largest[0] = fmaxf(largest[0], scale * scores(k, w));
    });
    over_row<Max>(largest);
    scores.each([&](int k, int w) {
        if (Row<K>::column(k) + w <= last) p[k][w] = exp_of(scale * scores(k, w) - largest[0]);
        sum[0] += p[k][w];
    });
    over_row<Sum>(sum);
    float share = 1.f / sum[0];
    scores.each([&](int k, int w) { p[k][w] *= share; });
}

// drop(k, w) for each element of a row of [b, a, s, s] that dropout removes. In 32 bits, as in
// bias_dropout_add.cu.
template <int K, typename F>
__device__ __forceinline__ void each_dropped(
    const Mask& mask, const Row<K>& in, uint32_t row, uint32_t a, uint32_t s, F drop) {
    // Rows beyond the last one have no elements, and perhaps no key.
    if (in.n == 0) return;
    uint32_t matrix = row / s;
    uint32_t hash = hash_with(mask.hash(matrix / a, matrix % a), row % s);
    uint32_t of_row = Mask::of_row(hash);
    in.each([&](int k, int w) {
        if (mask.drops(of_row, Mask::of_column(Row<K>::column(k) + w))) drop(k, w);
    });
}

template <int K, int MOST, bool DROP>
__global__ void __launch_bounds__(MOST) softmax_forward(
    In<> scores, Out<> y, int64_t rows, int s, float scale, Mask mask, int a) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    int last = last_column(row, rows, s);
    Row<K> in(scores + row * s, columns_read(last));
    float p[K][W] = {};
    softmax(in, last, scale, p);
    if constexpr (DROP)
        each_dropped(mask, in, row, a, s, [&](int k, int w) { p[k][w] = 0.f; });
    // The whole row.
    in.n = row < rows ? s : 0;
    in.set([&](int k, int w) { return p[k][w] * mask.scale; });
    in.write_to(y + row * s);
}

// d scores = scale p (dp - sum of dp p). With DROP dp = dy / (1 - probability), or 0 for what was
// dropped, and p comes from the scores.
template <int K, int MOST, bool DROP>
__global__ void __launch_bounds__(MOST) softmax_backward(
    In<> dy, In<> from, Out<> out, int64_t rows, int s, float scale, Mask mask, int a) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    int last = last_column(row, rows, s);
    Row<K> grad(dy + row * s, columns_read(last)), in(from + row * s, columns_read(last));
    float again[K][W] = {};
    // A bit for each of this thread's elements.
    uint32_t dropped = 0;
    static_assert(K * W <= 32);
    if constexpr (DROP) {
        each_dropped(mask, in, row, a, s, [&](int k, int w) { dropped |= 1u << (k * W + w); });
        softmax(in, last, scale, again);
    }
    auto p = [&](int k, int w) { return DROP ? again[k][w] : in(k, w); };
    auto dp = [&](int k, int w) { return dropped >> (k * W + w) & 1 ? 0.f : grad(k, w); };
    float sum[1] = {0.f};
    in.each([&](int k, int w) {
        // Above the diagonal dy may be anything, and counts as 0.
        if (Row<K>::column(k) + w <= last) sum[0] += dp(k, w) * p(k, w);
    });
    over_row<Sum>(sum);
    scale *= mask.scale;
    in.n = row < rows ? s : 0;
    in.set([&](int k, int w) {
        bool live = Row<K>::column(k) + w <= last;
        return live ? scale * p(k, w) * (dp(k, w) - sum[0]) : 0.f;
    });
    in.write_to(out + row * s);
}

template <bool DROP>
const char* forward(
    cudaStream_t stream, In<> scores, T* y, int64_t rows, int64_t s, double scale,
    Mask mask = {}, int64_t a = 1) {
    return with_row(s, [&](auto K, auto MOST, dim3 block) {
        auto kernel = softmax_forward<K.value, MOST.value, DROP>;
        int64_t blocks = pieces(rows, block.y);
        return launch_kernel(kernel, blocks, block, stream, scores, y, rows, s, scale, mask, a);
    });
}
template <bool DROP>
const char* backward(
    cudaStream_t stream, In<> dy, In<> from, T* out, int64_t rows, int64_t s, double scale,
    Mask mask = {}, int64_t a = 1) {
    return with_row(s, [&](auto K, auto MOST, dim3 block) {
        auto kernel = softmax_backward<K.value, MOST.value, DROP>;
        int64_t blocks = pieces(rows, block.y);
        return launch_kernel(kernel, blocks, block, stream, dy, from, out, rows, s, scale, mask, a);
    });
}

extern "C" const char* causal_softmax(
    cudaStream_t stream, In<> scores, T* y, int64_t n, int64_t s, double scale) {
    return forward<false>(stream, scores, y, n * s, s, scale);
}
extern "C" const char* causal_softmax_backward(
    cudaStream_t stream, In<> dp, In<> p, T* out, int64_t n, int64_t s, double scale) {
    return backward<false>(stream, dp, p, out, n * s, s, scale);
}
extern "C" const char* softmax_dropout(
    cudaStream_t stream, In<> scores, In<int32_t> keys, T* y, int64_t b, int64_t a, int64_t s,
    double scale, int64_t start, int64_t site, int64_t limit, double keep_scale) {
    Mask mask{keys, start, uint32_t(site), uint32_t(limit), float(keep_scale)};
    return forward<true>(stream, scores, y, b * a * s, s, scale, mask, a);
}
extern "C" const char* softmax_dropout_backward(
    cudaStream_t stream, In<> dy, In<> scores, In<int32_t> keys, T* out, int64_t b, int64_t a,
    int64_t s, double scale, int64_t start, int64_t site, int64_t limit, double keep_scale) {
    Mask mask{keys, start, uint32_t(site), uint32_t(limit), float(keep_scale)};
    return backward<true>(stream, dy, scores, out, b * a * s, s, scale, mask, a);
}
