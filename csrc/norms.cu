// RMSNorm and LayerNorm. Bytes: forward reads x and writes y; backward reads dy and x and writes
// dx. A row stays in registers between its sum and its use. Forward saves two floats per row: the
// mean and the reciprocal of the standard deviation.
//
// Weight gradients are sums over all rows. A thread keeps the sums of its columns in registers
// while it walks over rows, so a block ends with one partial sum per column. Three blocks per
// multiprocessor write [blocks, h] floats, which sum_parts adds up: a few percent of the traffic.
// The result is the same every time; atomics would add in any order.
#include "common.cuh"

template <typename T, int W, int K, int MOST, bool MEAN>
__global__ void __launch_bounds__(MOST) norm_forward(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
    T* __restrict__ y, float* __restrict__ means, float* __restrict__ rstds, int64_t rows, int h,
    float eps) {
    // All threads of a block make the same number of turns, because they meet in over_row.
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        float v[K][W] = {};
        float sum[1] = {0.f};
        float sums[MEAN ? 2 : 1] = {};
        float mean = 0;
        // The mean of x - mean: what rounding left.
        float rest = 0;
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < h) {
                Vector<T, W> in = read<W>(x + row * h + column);
                #pragma unroll
                for (int w = 0; w < W; w++)
                    v[k][w] = to_float(in.at[w]);
            }
        }
        if constexpr (MEAN) {
            #pragma unroll
            for (int k = 0; k < K; k++)
                #pragma unroll
                for (int w = 0; w < W; w++)
                    sum[0] += v[k][w];
            over_row<Sum>(sum);
            mean = sum[0] / h;
        }
        #pragma unroll
        for (int k = 0; k < K; k++)
            #pragma unroll
            for (int w = 0; w < W; w++) {
                // A second pass over the registers: mean(x^2) - mean^2 would cancel.
                v[k][w] -= mean;
                if (int((k * blockDim.x + threadIdx.x) * W) < h) {
                    sums[0] += v[k][w] * v[k][w];
                    if constexpr (MEAN) sums[1] += v[k][w];
                }
            }
        over_row<Sum>(sums);
        if constexpr (MEAN) rest = sums[1] / h;
        float rstd = rsqrtf(sums[0] / h - rest * rest + eps);
        if (row < rows && threadIdx.x == 0) {
            if constexpr (MEAN) means[row] = mean + rest;
            rstds[row] = rstd;
        }
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < h) {
                // After the first rows these come from the caches.
                Vector<T, W> scale = read<W>(weight + column);
                Vector<T, W> shift = MEAN ? read<W>(bias + column) : Vector<T, W>();
                Vector<T, W> out;
                #pragma unroll
                for (int w = 0; w < W; w++)
                    out.at[w] = from_float<T>(
                        (v[k][w] - rest) * rstd * to_float(scale.at[w]) +
                        (MEAN ? to_float(shift.at[w]) : 0.f));
                write<W>(y + row * h + column, out);
            }
        }
    }
}

// x' = (x - mean) rstd,  g = dy w
// dx = rstd (g - x' mean(g x') - mean(g)), the last term for LayerNorm only
// dw = sum over rows of dy x',  db = sum over rows of dy
template <typename T, int W, int K, int MOST, bool MEAN>
__global__ void __launch_bounds__(MOST) norm_backward(
    const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ weight,
    const float* __restrict__ means, const float* __restrict__ rstds, T* __restrict__ dx,
    float* __restrict__ dw_parts, float* __restrict__ db_parts, int64_t rows, int h) {
    float dw[K][W] = {};
    float db[K][W] = {};
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        bool live = row < rows;
        // Kept in their own dtype: 16 bits take half the registers of floats.
        Vector<T, W> in[K], grad[K];
        // 2 K loads before the first is used.
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (live && column < h) {
                in[k] = read<W>(x + row * h + column);
                grad[k] = read<W>(dy + row * h + column);
            }
        }
        float rstd = live ? rstds[row] : 0.f;
        float mean = MEAN && live ? means[row] : 0.f;
        float sums[2] = {0.f, 0.f};
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (live && column < h) {
                Vector<T, W> scale = read<W>(weight + column);
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float unit = (to_float(in[k].at[w]) - mean) * rstd;
                    float d = to_float(grad[k].at[w]);
                    float g = d * to_float(scale.at[w]);
                    sums[0] += g * unit;
                    sums[1] += g;
                    dw[k][w] += d * unit;
                    if constexpr (MEAN) db[k][w] += d;
                }
            }
        }
        over_row<Sum>(sums);
        float along = sums[0] / h;
        float shift = MEAN ? sums[1] / h : 0.f;
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (live && column < h) {
                Vector<T, W> scale = read<W>(weight + column);
                Vector<T, W> out;
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float g = to_float(grad[k].at[w]) * to_float(scale.at[w]);
                    float unit = (to_float(in[k].at[w]) - mean) * rstd;
                    out.at[w] = from_float<T>(rstd * (g - unit * along - shift));
                }
                write<W>(dx + row * h + column, out);
            }
        }
    }
    // [rows of a block, h] if a block has several rows: at most 256 threads with 24 columns each.
    __shared__ __align__(16) float sums[6144];
    #pragma unroll
    for (int which = 0; which < (MEAN ? 2 : 1); which++) {
        float (&mine)[K][W] = which ? db : dw;
        float* parts = (which ? db_parts : dw_parts) + int64_t(blockIdx.x) * h;
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            Vector<float, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++)
                out.at[w] = mine[k][w];
            if (column < h)
                write<W>(blockDim.y == 1 ? parts + column : sums + threadIdx.y * h + column, out);
        }
        if (blockDim.y == 1) continue;
        __syncthreads();
        for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < h;
             column += blockDim.x * blockDim.y) {
            float sum = 0;
            for (int y = 0; y < int(blockDim.y); y++)
                sum += sums[y * h + column];
            parts[column] = sum;
        }
        __syncthreads();
    }
}

template <bool MEAN>
void launch_norm_forward(
    int64_t stream, int64_t dtype, int64_t x, int64_t weight, int64_t bias, int64_t y, int64_t mean,
    int64_t rstd, int64_t rows, int64_t h, double eps) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_row<T, true>(h, [&](auto W, auto K, auto MOST, int64_t threads) {
            dim3 block(threads, threads < 256 ? 256 / threads : 1);
            dim3 grid(pieces(rows, block.y));
            norm_forward<T, W.value, K.value, MOST.value, MEAN><<<grid, block, 0, on(stream)>>>(
                as<T>(x), as<T>(weight), as<T>(bias), as<T>(y), as<float>(mean), as<float>(rstd),
                rows, h, eps);
            check_launch();
        });
    });
}

int64_t norm_parts() { return 3 * multiprocessors(); }

// parts: [1 or 2, norm_parts(), h] floats.
template <bool MEAN>
void launch_norm_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t weight, int64_t mean,
    int64_t rstd, int64_t dx, int64_t dw, int64_t db, int64_t parts, int64_t rows, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        int64_t count = norm_parts();
        float* dw_parts = as<float>(parts);
        float* db_parts = dw_parts + count * h;
        with_row<T, false>(h, [&](auto W, auto K, auto MOST, int64_t threads) {
            dim3 block(threads, threads <= 256 ? 256 / threads : 1);
            dim3 grid(count);
            norm_backward<T, W.value, K.value, MOST.value, MEAN><<<grid, block, 0, on(stream)>>>(
                as<T>(dy), as<T>(x), as<T>(weight), as<float>(mean), as<float>(rstd), as<T>(dx),
                dw_parts, db_parts, rows, h);
            check_launch();
        });
        launch_sum_parts<T>(dw_parts, as<T>(dw), as<T>(db), count, h, stream);
    });
}

void rms_norm(
    int64_t stream, int64_t dtype, int64_t x, int64_t weight, int64_t y, int64_t rstd, int64_t rows,
    int64_t h, double eps) {
    launch_norm_forward<false>(stream, dtype, x, weight, 0, y, 0, rstd, rows, h, eps);
}
void rms_norm_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t weight, int64_t rstd, int64_t dx,
    int64_t dw, int64_t parts, int64_t rows, int64_t h) {
    launch_norm_backward<false>(stream, dtype, dy, x, weight, 0, rstd, dx, dw, 0, parts, rows, h);
}
void layer_norm(
    int64_t stream, int64_t dtype, int64_t x, int64_t weight, int64_t bias, int64_t y, int64_t mean,
    int64_t rstd, int64_t rows, int64_t h, double eps) {
    launch_norm_forward<true>(stream, dtype, x, weight, bias, y, mean, rstd, rows, h, eps);
}
void layer_norm_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t weight, int64_t mean,
    int64_t rstd, int64_t dx, int64_t dw, int64_t db, int64_t parts, int64_t rows, int64_t h) {
    launch_norm_backward<true>(
        stream, dtype, dy, x, weight, mean, rstd, dx, dw, db, parts, rows, h);
}
