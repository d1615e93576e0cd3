// Bias + dropout + residual. Bytes: forward x and the residual in, y out; backward dy in, dx out.
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

struct Mask {
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
        uint32_t sample = mix(uint32_t(keys[uint32_t(row) / s]) ^ site);
        return first_step(mix(sample ^ spread(uint32_t(row) % s + 1 + start)));
    }
    __device__ float apply(uint32_t row_hash, uint32_t column_hash, float x) const {
        bool dropped = (rest(row_hash ^ column_hash) ^ 0x80000000u) < limit;
        return dropped ? 0.f : x * scale;
    }
};
struct ColumnHashes {
    uint32_t at[W];
    __device__ ColumnHashes() {
        #pragma unroll
        for (int w = 0; w < W; w++)
            at[w] = first_step(spread(own_column() + w + 1));
    }
};

__global__ void __launch_bounds__(WIDE * DEEP, 2) dropout_add_forward(
    const T* __restrict__ x, const T* __restrict__ bias, const T* __restrict__ residual,
    T* __restrict__ y, int64_t rows, int h, Mask mask) {
    Vector<float> own = own_bias(bias, h);
    ColumnHashes columns;
    auto of_row = [&](int64_t row) { return mask.keys ? mask.of_row(row) : 0u; };
    auto element = [&](uint32_t row_hash, int w, float x, float residual) {
        x += own.at[w];
        return residual + (mask.keys ? mask.apply(row_hash, columns.at[w], x) : x);
    };
    down_columns(x, residual, y, nullptr, rows, h, of_row, element);
}

__global__ void __launch_bounds__(WIDE * DEEP, 2) dropout_add_backward(
    const T* __restrict__ dy, T* __restrict__ dx, float* __restrict__ parts, int64_t rows, int h,
    Mask mask) {
    ColumnHashes columns;
    auto of_row = [&](int64_t row) { return mask.of_row(row); };
    auto element = [&](uint32_t row_hash, int w, float dy, float) {
        return mask.apply(row_hash, columns.at[w], dy);
    };
    down_columns(dy, nullptr, dx, parts, rows, h, of_row, element);
}

extern "C" const char* bias_dropout_add(
    cudaStream_t stream, const T* x, const T* bias, const T* residual, const int32_t* keys, T* y,
    int64_t rows, int64_t h, int64_t s, int64_t start, int64_t site, int64_t limit, double scale) {
    Mask mask{keys, uint32_t(s), start, uint32_t(site), uint32_t(limit), float(scale)};
    dim3 grid = column_grid(rows, h, resident_blocks(dropout_add_forward)), block(WIDE, DEEP);
    dropout_add_forward<<<grid, block, 0, stream>>>(x, bias, residual, y, rows, h, mask);
    return failure();
}
extern "C" int64_t bias_dropout_add_parts(int64_t rows, int64_t h) {
    return column_grid(rows, h, resident_blocks(dropout_add_backward)).y;
}
// parts: [bias_dropout_add_parts, h] floats; null: no gradient of the bias.
extern "C" const char* bias_dropout_add_backward(
    cudaStream_t stream, const T* dy, const int32_t* keys, T* dx, T* d_bias, float* parts,
    int64_t rows, int64_t h, int64_t s, int64_t start, int64_t site, int64_t limit, double scale) {
    Mask mask{keys, uint32_t(s), start, uint32_t(site), uint32_t(limit), float(scale)};
    dim3 grid = column_grid(rows, h, resident_blocks(dropout_add_backward)), block(WIDE, DEEP);
    dropout_add_backward<<<grid, block, 0, stream>>>(dy, dx, parts, rows, h, mask);
    if (parts) launch_sum_parts(stream, parts, d_bias, nullptr, grid.y, h);
    return failure();
}
