// Rotary embedding of queries and keys in one launch: y = x cos + (-x_high, x_low) sin. Bytes: q
// and k in, q and k out; the table is small and stays in the caches. A thread rotates W pairs of up
// to 4 heads of one token: neighbouring threads have neighbouring pairs, then neighbouring heads.
// Its heads are all queries or all keys: picked by an index for each head, the two records of
// addresses would have to lie in memory. It reads its cosines once. Both halves of a head have the
// same angles, so half of the table is read. The gradient is the rotation by -angle.
#include "common.cuh"

// [b, a, s, d] of any memory layout but for the last dimension.
struct Heads {
    const T* from;
    // [b, s, a, d], like the projections' outputs.
    T* to;
    int64_t batch, head, position;
    int heads;
};

constexpr int OF_THREAD = 4;
// Groups of up to that many heads.
__host__ __device__ inline int groups_of(int heads) { return (heads + OF_THREAD - 1) / OF_THREAD; }

__global__ void __launch_bounds__(256) rotary_kernel(
    Heads q, Heads k, In<> cosine, In<> sine, int64_t tokens, int s, int d, float sign) {
    // 32 bits: a division of 64 bits takes many instructions.
    uint32_t pairs = d / 2 / W, groups_q = groups_of(q.heads), groups_k = groups_of(k.heads);
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, group = i / pairs % (groups_q + groups_k);
    int64_t token = i / (pairs * (groups_q + groups_k));
    if (token >= tokens) return;
    int64_t b = uint32_t(token) / uint32_t(s), position = uint32_t(token) % uint32_t(s);
    int low = i % pairs * W, high = low + d / 2;
    bool of_q = group < groups_q;
    Heads of = of_q ? q : k;
    int head = of_q ? group : group - groups_q, step = of_q ? groups_q : groups_k;
    const T* x = of.from + b * of.batch + position * of.position;
    T* y = of.to + token * of.heads * d;
    Packed c(read(cosine + position * d + low)), n(read(sine + position * d + low));
    Packed first[OF_THREAD], second[OF_THREAD];
    #pragma unroll
    for (int j = 0; j < OF_THREAD; j++)
        if (head + j * step < of.heads) {
            first[j] = Packed(read(x + (head + j * step) * of.head + low));
            second[j] = Packed(read(x + (head + j * step) * of.head + high));
        }
    #pragma unroll
    for (int j = 0; j < OF_THREAD; j++)
        if (head + j * step < of.heads) {
            Vector<> out_first, out_second;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float x1 = first[j][w], x2 = second[j][w], sin_w = sign * n[w];
                round_to(out_first.at[w], x1 * c[w] - x2 * sin_w);
                round_to(out_second.at[w], x2 * c[w] + x1 * sin_w);
            }
            write(y + (head + j * step) * d + low, out_first);
            write(y + (head + j * step) * d + high, out_second);
        }
}

extern "C" const char* rotary(
    cudaStream_t stream, In<> q, In<> k, In<> cosine, In<> sine, T* q_out, T* k_out,
    int64_t q_batch, int64_t q_head, int64_t q_position, int64_t k_batch, int64_t k_head,
    int64_t k_position, int64_t b, int64_t q_heads, int64_t s, int64_t d, int64_t k_heads,
    double sign) {
    Heads of_q{q, q_out, q_batch, q_head, q_position, int(q_heads)};
    Heads of_k{k, k_out, k_batch, k_head, k_position, int(k_heads)};
    int64_t groups = groups_of(q_heads) + groups_of(k_heads);
    int64_t threads = b * s * groups * (d / 2 / W);
    return launch_kernel(
        rotary_kernel, pieces(threads, 256), 256, stream, of_q, of_k, cosine, sine, b * s, s, d,
        sign);
}
