// AdamW in one pass. Everything is computed in float. Bytes per parameter, with 16-bit moments and
// a master split between the bf16 weight and 16 more bits (optimizer.py): in 2 + 2 + 4 + 2 + 2, out
// 2 + 2 + 2 + 2, together 20. With a float master and float moments: in 4 + 4 + 4 + 4, out
// 4 + 2 + 4 + 4, together 30.
#include "common.cuh"

// Where the master weight is: the float weight itself; split between `weight` and `low`; a tensor
// of its own beside the 16-bit weight.
enum Master { ITSELF, SPLIT, BESIDE };

template <typename T, typename S, Master MASTER>
struct AdamW {
    T* weight;
    int16_t* low;
    float* master;
    const float* gradient;
    S *exp_avg, *exp_avg_sq;
    // 1 - beta1
    float fresh;
    float beta2;
    // 1 - beta2
    float fresh2;
    float eps;
    // 1 - lr decay
    float keep;
    // lr / (1 - beta1^t)
    float step_size;
    // sqrt(1 - beta2^t)
    float root;
    // of the gradient
    float scale;
    template <int W>
    __device__ void run(int64_t at) const {
        Vector<T, W> weights;
        Vector<int16_t, W> lows;
        Vector<float, W> masters;
        Vector<float, W> g = read<W>(gradient + at);
        Vector<S, W> m = read<W>(exp_avg + at), v = read<W>(exp_avg_sq + at);
        if constexpr (MASTER != BESIDE) weights = read<W>(weight + at);
        if constexpr (MASTER == SPLIT) lows = read<W>(low + at);
        if constexpr (MASTER == BESIDE) masters = read<W>(master + at);
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float grad = g.at[w] * scale;
            float avg = to_float(m.at[w]), sq = to_float(v.at[w]);
            float x;
            if constexpr (MASTER == ITSELF) x = to_float(weights.at[w]);
            if constexpr (MASTER == SPLIT) {
                unsigned high = __bfloat16_as_ushort(weights.at[w]);
                x = __uint_as_float((high << 16) + unsigned(int(lows.at[w])));
            }
            if constexpr (MASTER == BESIDE) x = masters.at[w];
            avg += fresh * (grad - avg);
            sq = beta2 * sq + fresh2 * grad * grad;
            x = x * keep - step_size * avg / (sqrtf(sq) / root + eps);
            m.at[w] = from_float<S>(avg);
            v.at[w] = from_float<S>(sq);
            if constexpr (MASTER == ITSELF) weights.at[w] = from_float<T>(x);
            if constexpr (MASTER == SPLIT) {
                unsigned bits = __float_as_uint(x);
                unsigned high = (bits + 0x8000u) >> 16;
                weights.at[w] = __ushort_as_bfloat16(uint16_t(high));
                lows.at[w] = int16_t(bits - (high << 16));
            }
            if constexpr (MASTER == BESIDE) {
                masters.at[w] = x;
                weights.at[w] = from_float<T>(x);
            }
        }
        write<W>(weight + at, weights);
        if constexpr (MASTER == SPLIT) write<W>(low + at, lows);
        if constexpr (MASTER == BESIDE) write<W>(master + at, masters);
        write<W>(exp_avg + at, m);
        write<W>(exp_avg_sq + at, v);
    }
};

void adamw(
    int64_t stream, int64_t dtype, int64_t weight, int64_t low, int64_t master, int64_t gradient,
    int64_t exp_avg, int64_t exp_avg_sq, int64_t n, double beta1, double beta2, double eps,
    double keep, double step_size, double root, double scale) {
    auto launch = [&](auto zero, auto state, auto kind) {
        using T = decltype(zero);
        using S = decltype(state);
        AdamW<T, S, Master(decltype(kind)::value)> f{
            as<T>(weight), as<int16_t>(low), as<float>(master),
            as<float>(gradient), as<S>(exp_avg), as<S>(exp_avg_sq),
            float(1 - beta1), float(beta2), float(1 - beta2), float(eps),
            float(keep), float(step_size), float(root), float(scale)};
        launch_each<8>(n, f, stream);
    };
    if (low)
        launch(__nv_bfloat16(), __nv_bfloat16(), Number<SPLIT>());
    else if (!master)
        launch(float(), __nv_bfloat16(), Number<ITSELF>());
    else if (dtype == 1)
        launch(__nv_bfloat16(), float(), Number<BESIDE>());
    else
        launch(__half(), float(), Number<BESIDE>());
}
