// Bias + dropout + residual. Bytes: forward x and the residual in, y out; backward dy in, dx out.
// columns.cuh walks down the columns and adds up the bias gradient.
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
    int64_t s, start;
    // Which dropout of a layer.
    uint32_t site;
    // A hash below it drops the element: p 2^32.
    uint32_t limit;
    // 1 / (1 - p).
    float scale;
};

// A thread's part of the mask: the hashes of its columns, and of the FEW rows that it works on. A
// row's hash needs a division and three rounds, so the first FEW lanes compute one each, and a
// shuffle hands them to the other lanes.
template <int W>
struct Hashes {
    uint32_t of_column[W], of_row[FEW];
    __device__ Hashes(int column) {
        #pragma unroll
        for (int w = 0; w < W; w++)
            of_column[w] = first_step(spread(column + w + 1));
    }
    __device__ void arrive(const Mask& mask, int64_t first, int64_t rows) {
        if (!mask.keys) return;
        uint32_t row = first + threadIdx.x % FEW, hash = 0;
        if (row < rows) {
            uint32_t sample = mix(uint32_t(mask.keys[row / uint32_t(mask.s)]) ^ mask.site);
            hash = mix(sample ^ spread(row % uint32_t(mask.s) + 1 + mask.start));
        }
        #pragma unroll
        for (int r = 0; r < FEW; r++)
            of_row[r] = __shfl_sync(0xffffffffu, first_step(hash), r);
    }
    __device__ float apply(const Mask& mask, int r, int w, float x) const {
        if (!mask.keys) return x;
        bool dropped = (rest(of_row[r] ^ of_column[w]) ^ 0x80000000u) < mask.limit;
        return dropped ? 0.f : x * mask.scale;
    }
};

template <typename T>
struct DropoutAdd {
    const T *x, *bias, *residual;
    T* y;
    Mask mask;
    template <int W>
    struct Loaded {
        Vector<T, W> x, residual;
        __device__ void load(const DropoutAdd& f, int64_t at) {
            x = read<W>(f.x + at);
            residual = read<W>(f.residual + at);
        }
    };
    template <int W>
    struct Column {
        Bias<T, W> bias;
        Hashes<W> hashes;
        __device__ Column(const DropoutAdd& f, int column) : bias(f.bias, column), hashes(column) {}
        __device__ void arrive(const DropoutAdd& f, int64_t first, int64_t rows) {
            hashes.arrive(f.mask, first, rows);
        }
        __device__ void run(
            const DropoutAdd& f, int r, int64_t at, const Loaded<W>& in, float (&)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++)
                out.at[w] = from_float<T>(
                    to_float(in.residual.at[w]) +
                    hashes.apply(f.mask, r, w, to_float(in.x.at[w]) + bias.at[w]));
            write<W>(f.y + at, out);
        }
    };
};

template <typename T>
struct DropoutAddBackward {
    const T* dy;
    T* dx;
    Mask mask;
    template <int W>
    struct Loaded {
        Vector<T, W> dy;
        __device__ void load(const DropoutAddBackward& f, int64_t at) { dy = read<W>(f.dy + at); }
    };
    template <int W>
    struct Column {
        Hashes<W> hashes;
        __device__ Column(const DropoutAddBackward&, int column) : hashes(column) {}
        __device__ void arrive(const DropoutAddBackward& f, int64_t first, int64_t rows) {
            hashes.arrive(f.mask, first, rows);
        }
        __device__ void run(
            const DropoutAddBackward& f, int r, int64_t at, const Loaded<W>& in, float (&sum)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float d = hashes.apply(f.mask, r, w, to_float(in.dy.at[w]));
                out.at[w] = from_float<T>(d);
                sum[w] += d;
            }
            write<W>(f.dx + at, out);
        }
    };
};

void bias_dropout_add(
    int64_t stream, int64_t dtype, int64_t x, int64_t bias, int64_t residual, int64_t keys,
    int64_t y, int64_t rows, int64_t h, int64_t s, int64_t start, int64_t site, int64_t limit,
    double scale) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        Mask mask{as<int32_t>(keys), s, start, uint32_t(site), uint32_t(limit), float(scale)};
        launch_columns<T>(
            dtype, rows, h, DropoutAdd<T>{as<T>(x), as<T>(bias), as<T>(residual), as<T>(y), mask},
            0, 0, stream);
    });
}
int64_t bias_dropout_add_parts(int64_t rows, int64_t h, int64_t dtype) {
    return column_parts(rows, h, dtype);
}
void bias_dropout_add_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t keys, int64_t dx, int64_t d_bias,
    int64_t parts, int64_t rows, int64_t h, int64_t s, int64_t start, int64_t site, int64_t limit,
    double scale) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        Mask mask{as<int32_t>(keys), s, start, uint32_t(site), uint32_t(limit), float(scale)};
        launch_columns<T>(
            dtype, rows, h, DropoutAddBackward<T>{as<T>(dy), as<T>(dx), mask}, parts, d_bias,
            stream);
    });
}
