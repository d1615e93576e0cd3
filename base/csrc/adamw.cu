// AdamW of many parameters in one launch and one pass. Bytes per element, with 16-bit moments and a
// master split between the bf16 weight and 16 more bits (optimizer.py): in 2 + 2 + 4 + 2 + 2, out
// 2 + 2 + 2 + 2, together 20. With a float master and float moments: in 4 + 4 + 4 + 4, out
// 4 + 2 + 4 + 4, together 30.
#include "common.cuh"
#include <type_traits>

// SPLIT: the master weight is split between `weight` and `low`. Otherwise it is `master`: the float
// weight itself, or a tensor beside the 16-bit weight, and then moments are float too.
template <bool SPLIT>
using Moment = std::conditional_t<!SPLIT && sizeof(T) == 2, float, __nv_bfloat16>;

// One row of the table that kernels.py writes, 8 numbers of 64 bits each.
template <bool SPLIT>
struct Parameter {
    T* weight;
    int16_t* low;
    float* master;
    const float* gradient;
    Moment<SPLIT>*exp_avg, *exp_avg_sq;
    int64_t n;
    // The first block that works on it.
    int64_t first_block;
};

struct Options {
    float lr, beta1, beta2, eps;
    // ln beta: 1 - beta^t = -expm1(t ln beta), which does not cancel.
    float log_beta1, log_beta2;
};

// Updates the N elements from `at` on: w = w keep - step_size m / (sqrt(v) / root + eps)
template <int N, bool SPLIT>
__device__ __forceinline__ void update(
    const Parameter<SPLIT>& p, int64_t at, const Options& o, float scale, float keep,
    float step_size, float root) {
    Vector<T, N> weights;
    Vector<int16_t, N> lows;
    Vector<float, N> masters, g = read<N>(p.gradient + at);
    Vector<Moment<SPLIT>, N> m = read<N>(p.exp_avg + at), v = read<N>(p.exp_avg_sq + at);
    if constexpr (SPLIT) {
        weights = read<N>(p.weight + at);
        lows = read<N>(p.low + at);
    } else {
        masters = read<N>(p.master + at);
    }
    #pragma unroll
    for (int w = 0; w < N; w++) {
        float grad = g.at[w] * scale;
        float avg = to_float(m.at[w]), sq = to_float(v.at[w]);
        float x;
        if constexpr (SPLIT) {
            unsigned high = __bfloat16_as_ushort(weights.at[w]);
            x = __uint_as_float((high << 16) + unsigned(int(lows.at[w])));
        } else {
            x = masters.at[w];
        }
        avg += (1 - o.beta1) * (grad - avg);
        sq = o.beta2 * sq + (1 - o.beta2) * grad * grad;
        x = x * keep - step_size * avg / (sqrtf(sq) / root + o.eps);
        round_to(m.at[w], avg);
        round_to(v.at[w], sq);
        if constexpr (SPLIT) {
            unsigned bits = __float_as_uint(x);
            unsigned high = (bits + 0x8000u) >> 16;
            weights.at[w] = __ushort_as_bfloat16(uint16_t(high));
            lows.at[w] = int16_t(bits - (high << 16));
        } else {
            masters.at[w] = x;
            round_to(weights.at[w], x);
        }
    }
    if constexpr (SPLIT) write(p.low + at, lows);
    if constexpr (!SPLIT) write(p.master + at, masters);
    // A float weight is its own master.
    if constexpr (sizeof(T) == 2) write(p.weight + at, weights);
    write(p.exp_avg + at, m);
    write(p.exp_avg_sq + at, v);
}

// Each block updates ELEMENTS of one parameter.
constexpr int ELEMENTS = 256 * 8;

// control: (factor of the gradients, number of this update from 1 on, 0 to skip the step)
template <bool SPLIT>
__global__ void __launch_bounds__(256)
    adamw_kernel(const void* rows, In<float> decays, In<float> control, int count, Options o) {
    if (control[2] == 0.f) return;
    // The last parameter whose first block is not behind this one: a binary search.
    const Parameter<SPLIT>* __restrict__ table = static_cast<const Parameter<SPLIT>*>(rows);
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (table[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle - 1;
    }
    Parameter<SPLIT> p = table[low];
    float keep = 1.f - o.lr * decays[low];
    float step_size = o.lr / -expm1f(control[1] * o.log_beta1);
    float root = sqrtf(-expm1f(control[1] * o.log_beta2));
    int64_t first = (int64_t(blockIdx.x) - p.first_block) * ELEMENTS;
    int64_t end = first + ELEMENTS < p.n ? first + ELEMENTS : p.n;
    // A shard may begin at any address: then one element at a time, like what is left at the end.
    auto bits = reinterpret_cast<uintptr_t>(p.weight) | reinterpret_cast<uintptr_t>(p.low) |
                reinterpret_cast<uintptr_t>(p.master) | reinterpret_cast<uintptr_t>(p.gradient) |
                reinterpret_cast<uintptr_t>(p.exp_avg) | reinterpret_cast<uintptr_t>(p.exp_avg_sq);
    int64_t whole = bits % 16 ? first : end - (end - first) % 8;
    int64_t at = first + threadIdx.x * 8;
    if (at < whole) update<8>(p, at, o, control[0], keep, step_size, root);
    for (at = whole + threadIdx.x; at < end; at += blockDim.x)
        update<1>(p, at, o, control[0], keep, step_size, root);
}

// How many elements a block updates.
extern "C" int64_t adamw_elements() { return ELEMENTS; }

// table: [count, 8]; decays: [count]
extern "C" const char* adamw(
    cudaStream_t stream, const int64_t* table, In<float> decays, In<float> control, int64_t count,
    int64_t blocks, int64_t split, double lr, double beta1, double beta2, double eps,
    double log_beta1, double log_beta2) {
    Options o{float(lr),  float(beta1),     float(beta2),
              float(eps), float(log_beta1), float(log_beta2)};
    constexpr bool IS_BF16 = std::is_same_v<T, __nv_bfloat16>;
    auto kernel = split ? adamw_kernel<IS_BF16> : adamw_kernel<false>;
    return launch_kernel(kernel, blocks, 256, stream, table, decays, control, count, o);
}
