// Rotary embedding of queries and keys in one launch: y = x cos + (-x_high, x_low) sin. Bytes: q
// and k in, q and k out; the table is small and stays in the caches. A block is a token.
// threadIdx.x selects W pairs of a head, threadIdx.y selects heads, so a thread reads its cosines
// once for all its heads. Both halves of a head have the same angles, so half of the table is read.
// The gradient is the rotation by -angle.
#include "common.cuh"

template <typename T, int W>
__global__ void rotary_kernel(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ cosine,
    const T* __restrict__ sine, T* __restrict__ q_out, T* __restrict__ k_out,
    // Strides: q and k are views [b, a, s, d] of any memory layout.
    int64_t q_batch, int64_t q_head, int64_t q_position, int64_t k_batch, int64_t k_head,
    int64_t k_position, int q_heads, int k_heads, int s, int d, float sign) {
    int64_t token = blockIdx.x, b = blockIdx.x / uint32_t(s), position = blockIdx.x % uint32_t(s);
    int low = threadIdx.x * W, high = low + d / 2;
    Vector<T, W> c = read<W>(cosine + position * d + low);
    Vector<T, W> n = read<W>(sine + position * d + low);
    for (int head = threadIdx.y; head < q_heads + k_heads; head += blockDim.y) {
        bool is_q = head < q_heads;
        int h = is_q ? head : head - q_heads;
        const T* x = is_q ? q + b * q_batch + h * q_head + position * q_position
                          : k + b * k_batch + h * k_head + position * k_position;
        // [b, s, a, d], like the projections' outputs.
        T* y = is_q ? q_out + (token * q_heads + h) * d : k_out + (token * k_heads + h) * d;
        Vector<T, W> first = read<W>(x + low), second = read<W>(x + high), out_first, out_second;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x1 = to_float(first.at[w]), x2 = to_float(second.at[w]);
            float cos_w = to_float(c.at[w]), sin_w = sign * to_float(n.at[w]);
            out_first.at[w] = from_float<T>(x1 * cos_w - x2 * sin_w);
            out_second.at[w] = from_float<T>(x2 * cos_w + x1 * sin_w);
        }
        write<W>(y + low, out_first);
        write<W>(y + high, out_second);
    }
}

void rotary(
    int64_t stream, int64_t dtype, int64_t q, int64_t k, int64_t cosine, int64_t sine,
    int64_t q_out, int64_t k_out, int64_t q_batch, int64_t q_head, int64_t q_position,
    int64_t k_batch, int64_t k_head, int64_t k_position, int64_t b, int64_t q_heads,
    int64_t k_heads, int64_t s, int64_t d, double sign) {
    if (b * s == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int W = PER_VECTOR<T>;
        int64_t pairs = d / 2 / W;
        dim3 grid(b * s), block(pairs, pairs < 256 ? 256 / pairs : 1);
        rotary_kernel<T, W><<<grid, block, 0, on(stream)>>>(
            as<T>(q), as<T>(k), as<T>(cosine), as<T>(sine), as<T>(q_out), as<T>(k_out), q_batch,
            q_head, q_position, k_batch, k_head, k_position, q_heads, k_heads, s, d, sign);
        check_launch();
    });
}
