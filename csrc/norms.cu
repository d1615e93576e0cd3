// LayerNorm, with a bias, and RMSNorm, without: y = (z - mean) rstd weight + bias, where RMSNorm
// leaves the mean out. z is x, or x + residual, which is written beside y. Bytes: forward reads x
// (and the residual) and writes y (and z); backward reads dy and z and writes dx. A row stays in
// registers between its sum and its use. Forward saves two floats per row: the mean, and rstd, the
// reciprocal of the standard deviation.
//
// Weight gradients are sums over all rows. A thread keeps the sums of its columns in registers
// while it walks over rows, so a block ends with one partial sum per column. As many blocks as are
// resident at a time write [blocks, h] floats, which PyTorch adds up: little beside [rows, h] where
// there are many more rows than blocks. The result is the same every time; atomics would add in any
// order.
#include "rows.cuh"

template <int K, int MOST, bool MEAN>
__global__ void __launch_bounds__(MOST) norm_forward_kernel(
    In<> x, In<> residual, In<> weight, In<> bias, Out<> z, Out<> y, Out<float> means,
    Out<float> rstds, int64_t rows, int h, float eps) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    // Threads without a row go along: all threads of a block meet in over_row.
    int n = row < rows ? h : 0;
    Row<K> in(x + row * h, n);
    if (residual) {
        Row<K> other(residual + row * h, n);
        in.each([&](int k, int w) { round_to(in.at[k].at[w], in(k, w) + other(k, w)); });
        in.store(z + row * h, [&](int k, int w) { return in(k, w); });
    }
    float mean = 0, rest = 0;
    if constexpr (MEAN) {
        float sum[1] = {0.f};
        in.each([&](int k, int w) { sum[0] += in(k, w); });
        over_row<Sum>(sum);
        mean = sum[0] / h;
    }
    // The mean is subtracted first, in a second pass over the registers: mean(x^2) - mean^2 would
    // cancel. `rest`, the mean of the differences, is the error that rounding left in the mean.
    float sums[MEAN ? 2 : 1] = {};
    in.each([&](int k, int w) {
        float d = in(k, w) - mean;
        sums[0] += d * d;
        if constexpr (MEAN) sums[1] += d;
    });
    over_row<Sum>(sums);
    if constexpr (MEAN) rest = sums[1] / h;
    float rstd = rsqrtf(sums[0] / h - rest * rest + eps);
    if (row < rows && threadIdx.x == 0) {
        if constexpr (MEAN) means[row] = mean + rest;
        rstds[row] = rstd;
    }
    // After the first rows these come from the caches.
    Row<K> scale(weight, n), shift(bias, MEAN ? n : 0);
    in.store(y + row * h, [&](int k, int w) {
        float unit = (in(k, w) - mean - rest) * rstd;
        return unit * scale(k, w) + (MEAN ? shift(k, w) : 0.f);
    });
}

// u = (z - mean) rstd,  g = dy weight
// dx = rstd (g - u mean(g u) - mean(g)) + dz, where mean(g) is for LayerNorm only, and dz is the
// gradient that reaches z beside the norm, if there is one
// dw = sum over rows of dy u,  db = sum over rows of dy
template <int K, int MOST, bool MEAN>
__global__ void __launch_bounds__(MOST) norm_backward_kernel(
    In<> dy, In<> dz, In<> z, In<> weight, In<float> means, In<float> rstds, Out<> dx,
    Out<float> parts, int64_t rows, int h) {
    Vector<float> of_column[MEAN ? 2 : 1][K] = {};
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        bool live = row < rows;
        Row<K> in(z + row * h, live ? h : 0), grad(dy + row * h, live ? h : 0);
        float rstd = live ? rstds[row] : 0.f;
        float mean = MEAN && live ? means[row] : 0.f;
        Row<K> scale(weight, live ? h : 0);
        float sums[2] = {0.f, 0.f};
        in.each([&](int k, int w) {
            float unit = (in(k, w) - mean) * rstd;
            float g = grad(k, w) * scale(k, w);
            sums[0] += g * unit;
            sums[1] += g;
            of_column[0][k].at[w] += grad(k, w) * unit;
            if constexpr (MEAN) of_column[1][k].at[w] += grad(k, w);
        });
        over_row<Sum>(sums);
        float along = sums[0] / h;
        float shift = MEAN ? sums[1] / h : 0.f;
        Row<K> beside(dz + row * h, dz && live ? h : 0);
        in.store(dx + row * h, [&](int k, int w) {
            float unit = (in(k, w) - mean) * rstd;
            float d = rstd * (grad(k, w) * scale(k, w) - unit * along - shift);
            return dz ? d + beside(k, w) : d;
        });
    }
    if (!parts) return;
    // Rows of a block meet in shared memory, [blockDim.y, h]: at most 256 threads of 3 vectors.
    __shared__ __align__(16) float of_row[256 * 3 * W];
    #pragma unroll
    for (int which = 0; which < (MEAN ? 2 : 1); which++) {
        float* out = parts + (int64_t(which) * gridDim.x + blockIdx.x) * h;
        #pragma unroll
        for (int k = 0; k < K; k++) {
            float* to = blockDim.y == 1 ? out : of_row + threadIdx.y * h;
            if (Row<K>::column(k) < h) write(to + Row<K>::column(k), of_column[which][k]);
        }
        if (blockDim.y == 1) continue;
        __syncthreads();
        for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < h;
             column += blockDim.x * blockDim.y) {
            float sum = 0;
            for (int y = 0; y < int(blockDim.y); y++)
                sum += of_row[y * h + column];
            out[column] = sum;
        }
        __syncthreads();
    }
}

// A bias makes it LayerNorm. residual may be null, and then z is not written.
extern "C" const char* add_norm(
    cudaStream_t stream, In<> x, In<> residual, In<> weight, In<> bias, T* z, T* y, float* means,
    float* rstds, int64_t rows, int64_t h, double eps) {
    return with_row(h, [&](auto K, auto MOST, dim3 block) {
        auto kernel = bias ? norm_forward_kernel<K.value, MOST.value, true>
                           : norm_forward_kernel<K.value, MOST.value, false>;
        return launch_kernel(
            kernel, pieces(rows, block.y), block, stream, x, residual, weight, bias, z, y, means,
            rstds, rows, h, eps);
    });
}

// f(kernel, block), the kernel for rows of h elements.
template <typename F>
auto with_backward(int64_t h, bool mean, F f) {
    return with_row(h, [&](auto K, auto MOST, dim3 block) {
        auto kernel = mean ? norm_backward_kernel<K.value, MOST.value, true>
                           : norm_backward_kernel<K.value, MOST.value, false>;
        return f(kernel, block);
    });
}

// As many blocks as all multiprocessors hold at a time, or as have rows. Each leaves partial sums.
extern "C" int64_t add_norm_backward_blocks(int64_t rows, int64_t h, int64_t sums) {
    return with_backward(h, sums != 1, [&](auto kernel, dim3 block) {
        return std::min(resident_blocks(kernel, block.x * block.y), pieces(rows, block.y));
    });
}

// dz may be null. sums: 2 with means, 1 without, 0 for no gradients of weight and bias. parts:
// [sums, blocks, h] floats.
extern "C" const char* add_norm_backward(
    cudaStream_t stream, In<> dy, In<> dz, In<> z, In<> weight, In<float> means, In<float> rstds,
    T* dx, float* parts, int64_t rows, int64_t h, int64_t sums, int64_t blocks) {
    return with_backward(h, means, [&](auto kernel, dim3 block) {
        return launch_kernel(
            kernel, blocks, block, stream, dy, dz, z, weight, means, rstds, dx, parts, rows, h);
    });
}
