// LayerNorm, with a bias, and RMSNorm, without: y = (z - mean) rstd weight + bias, where RMSNorm
// leaves the mean out. z is x, or residual + (x + x_bias), which is written beside y. Bytes:
// forward reads x (and the residual) and writes y (and z); backward reads dy and z and writes dx. A
// row stays in registers between its sum and its use. Forward saves two floats per row: the mean,
// and rstd, the reciprocal of the standard deviation.
//
// Weight gradients are sums over all rows. A thread keeps the sums of its columns in registers
// while it walks over rows, so a block ends with one partial sum per column. As many blocks as are
// resident at a time write [blocks, h] floats, which PyTorch adds up: little beside [rows, h] where
// there are many more rows than blocks. The result is the same every time; atomics would add in any
// order.
#include "rows.cuh"

template <int K, int MOST, bool MEAN>
__global__ void __launch_bounds__(MOST) norm_forward_kernel(
    In<> x, In<> x_bias, In<> residual, In<> weight, In<> bias, Out<> z, Out<> y, Out<float> means,
    Out<float> rstds, float* amax, int64_t rows, int h, float eps) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    // Threads without a row go along: all threads of a block meet in over_row.
    int n = row < rows ? h : 0;
    Row<K> in(x + row * h, n);
    if (residual) {
        Row<K> other(residual + row * h, n), own(x_bias, x_bias ? n : 0);
        in.set([&](int k, int w) { return other(k, w) + (in(k, w) + own(k, w)); });
        in.write_to(z + row * h);
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
    in.set([&](int k, int w) {
        float unit = (in(k, w) - mean - rest) * rstd;
        return unit * scale(k, w) + (MEAN ? shift(k, w) : 0.f);
    });
    in.write_to(y + row * h);
    if (!amax) return;
    float most[1] = {0.f};
    in.each([&](int k, int w) { most[0] = fmaxf(most[0], magnitude(in(k, w))); });
    raise_over_row(amax, most);
}

// u = (z - mean) rstd,  g = dy weight
// dx = rstd (g - u mean(g u) - mean(g)) + dz, where mean(g) is for LayerNorm only, and dz is the
// gradient that reaches z beside the norm, if there is one
// Sums over rows: 1 for RMSNorm, dw of dy u; 2 for LayerNorm, also db of dy; 3 also of dx, which is
// the gradient of x_bias
//
// Each sum takes 8 registers for the columns of a vector, and a thread may have 64 if a
// multiprocessor is to hold 1024 threads. So a thread has one vector of a row, and reads those of
// its next row before it computes with this one: 32 bytes a thread are always in flight, 32 KB on a
// multiprocessor. Rows of more than 1024 vectors leave no registers for that, and rows of more than
// 1536 none for all of dz at once.
template <int K>
constexpr int MOST = K == 1 ? 1024 : K == 2 ? 768 : 512;

// Adds up the sums of a block's rows for each column, and writes them to parts [SUMS, blocks, h].
template <int K, int SUMS>
__device__ __forceinline__ void leave_parts(
    const Vector<float> (&of_column)[SUMS][K], float* parts, int h) {
    // [blockDim.y, h]. A block of longer rows has one of them.
    __shared__ __align__(16) float of_row[K == 1 ? 512 * W : 1];
    #pragma unroll
    for (int which = 0; which < SUMS; which++) {
        float* out = parts + (int64_t(which) * gridDim.x + blockIdx.x) * h;
        if (K > 1 || blockDim.y == 1) {
            #pragma unroll
            for (int k = 0; k < K; k++)
                if (Row<K>::column(k) < h) write(out + Row<K>::column(k), of_column[which][k]);
            continue;
        }
        int own = Row<K>::column(0);
        if (own < h) write(of_row + threadIdx.y * h + own, of_column[which][0]);
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

template <int K, int SUMS>
__global__ void __launch_bounds__(MOST<K>) norm_backward_kernel(
    In<> dy, In<> dz, In<> z, In<> weight, In<float> means, In<float> rstds, Out<> dx,
    Out<float> parts, uint32_t rows, int h, float share) {
    constexpr bool MEAN = SUMS > 1, AHEAD = K == 1;
    Vector<float> of_column[SUMS][K] = {};
    uint32_t row = blockIdx.x * blockDim.y + threadIdx.y, step = gridDim.x * blockDim.y;
    auto read_row = [&](const T* from, uint32_t row) {
        return Row<K>(from + int64_t(row) * h, row < rows ? h : 0);
    };
    Row<K> next_z, next_dy;
    if constexpr (AHEAD) next_z = read_row(z, row), next_dy = read_row(dy, row);
    // Threads without a row go along, as in forward.
    for (; row - threadIdx.y < rows; row += step) {
        Row<K> in = AHEAD ? next_z : read_row(z, row), grad = AHEAD ? next_dy : read_row(dy, row);
        if constexpr (AHEAD) next_z = read_row(z, row + step), next_dy = read_row(dy, row + step);
        float rstd = in.n ? rstds[row] : 0.f, mean = MEAN && in.n ? means[row] : 0.f;
        int64_t at = int64_t(row) * h;
        Row<K> beside;
        if constexpr (K < 4) beside = Row<K>(dz + at, dz ? in.n : 0);
        auto unit = [&](int k, int w) { return (in(k, w) - mean) * rstd; };
        float sums[1 + MEAN] = {};
        in.each_vector([&](int k) {
            Packed scale(read(weight + Row<K>::column(k)));
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float d = grad(k, w), g = d * scale[w];
                sums[0] += g * unit(k, w);
                if constexpr (MEAN) sums[1] += g;
                of_column[0][k].at[w] += d * unit(k, w);
                if constexpr (MEAN) of_column[1][k].at[w] += d;
            }
        });
        over_row<Sum>(sums);
        float along = sums[0] * share, shift = MEAN ? sums[MEAN] * share : 0.f;
        in.each_vector([&](int k) {
            // From the cache again: kept until here it would take registers.
            Packed scale(read(weight + Row<K>::column(k)));
            if (K == 4 && dz) beside.at[k] = Packed(read(dz + at + Row<K>::column(k)));
            Vector<> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float d = grad(k, w) * scale[w] - unit(k, w) * along - shift;
                d = rstd * d + beside(k, w);
                if constexpr (SUMS == 3) of_column[2][k].at[w] += d;
                round_to(out.at[w], d);
            }
            write(dx + at + Row<K>::column(k), out);
        });
    }
    if (parts) leave_parts(of_column, parts, h);
}

// A bias makes it LayerNorm. residual may be null, and then z is not written; x_bias may be null.
// amax is raised to max |y|, if it is not null.
extern "C" const char* add_norm(
    cudaStream_t stream, In<> x, In<> x_bias, In<> residual, In<> weight, In<> bias, T* z, T* y,
    float* means, float* rstds, float* amax, int64_t rows, int64_t h, int64_t, double eps) {
    return with_row(h, [&](auto K, auto MOST, dim3 block) {
        auto kernel = bias ? norm_forward_kernel<K.value, MOST.value, true>
                           : norm_forward_kernel<K.value, MOST.value, false>;
        return launch_kernel(
            kernel, pieces(rows, block.y), block, stream, x, x_bias, residual, weight, bias, z, y,
            means, rstds, amax, rows, h, eps);
    });
}

// f(kernel, block), the kernel for rows of h elements. Up to 512 threads share a block, so that few
// parts are left, and two blocks a multiprocessor: one has work while the other waits.
template <typename F>
auto with_backward(int64_t h, int64_t sums, F f) {
    auto block = [&](int64_t K) {
        int64_t threads = pieces(pieces(h / W, K), 32) * 32;
        return dim3(threads, K == 1 && threads < 512 ? 512 / threads : 1);
    };
    if (sums == 3) return f(norm_backward_kernel<1, 3>, block(1));
    bool mean = sums == 2;
    if (h <= 1 * MOST<1> * W)
        return f(mean ? norm_backward_kernel<1, 2> : norm_backward_kernel<1, 1>, block(1));
    if (h <= 2 * MOST<2> * W)
        return f(mean ? norm_backward_kernel<2, 2> : norm_backward_kernel<2, 1>, block(2));
    return f(mean ? norm_backward_kernel<4, 2> : norm_backward_kernel<4, 1>, block(4));
}

// As many blocks as all multiprocessors hold at a time, or as have rows. Each leaves partial sums.
extern "C" int64_t add_norm_backward_blocks(int64_t rows, int64_t h, int64_t sums) {
    return with_backward(h, sums, [&](auto kernel, dim3 block) {
        return std::min(resident_blocks(kernel, block.x * block.y), pieces(rows, block.y));
    });
}

// dz may be null. sums: as in the kernel, or 0 for none. parts: [sums, blocks, h] floats.
extern "C" const char* add_norm_backward(
    cudaStream_t stream, In<> dy, In<> dz, In<> z, In<> weight, In<float> means, In<float> rstds,
    T* dx, float* parts, int64_t rows, int64_t h, int64_t sums, int64_t blocks) {
    return with_backward(h, means && !sums ? 2 : sums, [&](auto kernel, dim3 block) {
        return launch_kernel(
            kernel, blocks, block, stream, dy, dz, z, weight, means, rstds, dx, parts, rows, h,
            1. / h);
    });
}
