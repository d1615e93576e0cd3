// Rotary embedding of queries and keys in one launch: y = x cos + (-x_high, x_low) sin. Bytes: q
// and k in, q and k out; the table is small and stays in the caches. A thread rotates W pairs of up
// to 4 heads of one token: neighbouring threads have neighbouring pairs, then neighbouring heads.
// It reads its cosines once. Both halves of a head have the same angles, so half of the table is
// read. The gradient is the rotation by -angle.
#include "common.cuh"

// [b, a, s, d] of any memory layout but for the last dimension.
struct Heads {
    const T* from;
    // [b, s, a, d], like the projections' outputs.
    T* to;
    int64_t batch, head, position;
    int heads;
};
// Where a head is read and written; null: there is no such head.
struct Place {
    const T* x;
    T* y;
};

constexpr int OF_THREAD = 4;

__global__ void __launch_bounds__(256) rotary_kernel(
    Heads q, Heads k, In<> cosine, In<> sine, int64_t tokens, int s, int d, float sign) {
    // 32 bits: a division of 64 bits takes many instructions.
    uint32_t pairs = d / 2 / W, groups = (q.heads + k.heads + OF_THREAD - 1) / OF_THREAD;
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    int64_t token = i / (pairs * groups);
    if (token >= tokens) return;
    int low = i % pairs * W, high = low + d / 2, group = i / pairs % groups;
    int64_t b = uint32_t(token) / uint32_t(s), position = uint32_t(token) % uint32_t(s);
    auto place = [&](int j) -> Place {
        int head = group + j * groups;
        const Heads& of = head < q.heads ? q : k;
        int64_t own = head < q.heads ? head : head - q.heads;
        if (own >= of.heads) return {};
        const T* x = of.from + b * of.batch + own * of.head + position * of.position;
        return {x, of.to + (token * of.heads + own) * d};
    };
    Vector<> c = read(cosine + position * d + low), n = read(sine + position * d + low);
    Vector<> first[OF_THREAD], second[OF_THREAD];
    #pragma unroll
    for (int j = 0; j < OF_THREAD; j++) {
        Place at = place(j);
        if (!at.x) continue;
        first[j] = read(at.x + low);
        second[j] = read(at.x + high);
    }
    #pragma unroll
    for (int j = 0; j < OF_THREAD; j++) {
        Place at = place(j);
        if (!at.x) continue;
        Vector<> out_first, out_second;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x1 = to_float(first[j].at[w]), x2 = to_float(second[j].at[w]);
            float cos_w = to_float(c.at[w]), sin_w = sign * to_float(n.at[w]);
            round_to(out_first.at[w], x1 * cos_w - x2 * sin_w);
            round_to(out_second.at[w], x2 * cos_w + x1 * sin_w);
        }
        write(at.y + low, out_first);
        write(at.y + high, out_second);
    }
}

extern "C" const char* rotary(
    cudaStream_t stream, In<> q, In<> k, In<> cosine, In<> sine, T* q_out, T* k_out,
    int64_t q_batch, int64_t q_head, int64_t q_position, int64_t k_batch, int64_t k_head,
    int64_t k_position, int64_t b, int64_t q_heads, int64_t s, int64_t d, int64_t k_heads,
    double sign) {
    Heads of_q{q, q_out, q_batch, q_head, q_position, int(q_heads)};
    Heads of_k{k, k_out, k_batch, k_head, k_position, int(k_heads)};
    int64_t threads = b * s * pieces(q_heads + k_heads, OF_THREAD) * (d / 2 / W);
    return launch_kernel(
        rotary_kernel, pieces(threads, 256), 256, stream, of_q, of_k, cosine, sine, b * s, s, d,
        sign);
}
