// Bias + dropout + residual. Bytes: forward x and the residual in, y out; backward dy in, dx out.
// The gradient is the same operation of dy, without bias and residual, with sums over the rows.
#include "columns.cuh"
#include "dropout.cuh"

struct DropoutAdd {
    // Without keys nothing is dropped.
    Mask mask;
    // Positions of a sample on this device.
    uint32_t s;
    // In 32 bits: a division of 64 bits takes many instructions.
    __device__ uint32_t of_row(int64_t row) const {
        if (!mask.keys) return 0;
        return Mask::of_row(mask.hash(uint32_t(row) / s, uint32_t(row) % s));
    }
    __device__ uint32_t of_column(int column) const { return Mask::of_column(column); }
    __device__ float operator()(
        float x, float residual, float bias, uint32_t of_row, uint32_t of_column) const {
        x += bias;
        if (!mask.keys) return residual + x;
        return residual + (mask.drops(of_row, of_column) ? 0.f : x * mask.scale);
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
    Mask mask{keys, start, uint32_t(site), uint32_t(limit), float(scale)};
    DropoutAdd f{mask, uint32_t(s)};
    auto run = sums ? launch_columns<DropoutAdd, true> : launch_columns<DropoutAdd, false>;
    return run(stream, x, residual, bias, y, parts, b * s, h, blocks, f);
}
