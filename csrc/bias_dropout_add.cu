// Bias + dropout + residual. Bytes: forward x and the residual in, y out; backward dy in, dx out.
// The gradient is the same operation of dy, without bias and residual, with sums over the rows.
//
// The mask is that of dropout_mask, bit for bit: a hash of (key of the sample, site, position,
// column). Nothing is stored; backward hashes again. Each element costs two multiplications, three
// shifts and a comparison of integers, about as much as the integer units can do while the data
// arrives. The hash's first step, x ^ x >> 16, distributes over ^, so that it runs once per row and
// once per column and not once per element.
#include "columns.cuh"

__device__ __forceinline__ uint32_t first_step(uint32_t x) { return x ^ x >> 16; }
__device__ __forceinline__ uint32_t rest(uint32_t x) {
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
__device__ __forceinline__ uint32_t mix(uint32_t x) { return rest(first_step(x)); }
__device__ __forceinline__ uint32_t spread(int64_t n) {
    return uint32_t(n) * 0x9E3779B1u & 0x7FFFFFFFu;
}

struct DropoutAdd {
    // One per sample; null: nothing is dropped.
    const int32_t* keys;
    // Positions of a sample on this device, and the global number of the first one.
    uint32_t s;
    int64_t start;
    // Which dropout of a layer.
    uint32_t site;
    // A hash below it drops the element: p 2^32.
    uint32_t limit;
    // 1 / (1 - p).
    float scale;
    // The first step of a row's hash; in 32 bits: a division of 64 bits takes many instructions.
    __device__ uint32_t of_row(int64_t row) const {
        if (!keys) return 0;
        uint32_t sample = mix(uint32_t(keys[uint32_t(row) / s]) ^ site);
        return first_step(mix(sample ^ spread(uint32_t(row) % s + 1 + start)));
    }
    __device__ uint32_t of_column(int column) const { return first_step(spread(column + 1)); }
    __device__ float operator()(
        float x, float residual, float bias, uint32_t of_row, uint32_t of_column) const {
        x += bias;
        if (!keys) return residual + x;
        bool dropped = (rest(of_row ^ of_column) ^ 0x80000000u) < limit;
        return residual + (dropped ? 0.f : x * scale);
    }
};

extern "C" int64_t bias_dropout_add_blocks(int64_t b, int64_t s, int64_t h, int64_t sums) {
    return sums ? column_blocks<DropoutAdd, true>(b * s, h)
                : column_blocks<DropoutAdd, false>(b * s, h);
}
// residual may be null, for 0.
extern "C" const char* bias_dropout_add(
    cudaStream_t stream, In<> x, In<> bias, In<> residual, In<int32_t> keys, T* y, float* parts,
    int64_t b, int64_t s, int64_t h, int64_t sums, int64_t blocks, int64_t start, int64_t site,
    int64_t limit, double scale) {
    DropoutAdd f{keys, uint32_t(s), start, uint32_t(site), uint32_t(limit), float(scale)};
    auto run = sums ? launch_columns<DropoutAdd, true> : launch_columns<DropoutAdd, false>;
    return run(stream, x, residual, bias, y, parts, b * s, h, blocks, f);
}
