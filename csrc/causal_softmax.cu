// Causal softmax of scale x scores, [.., s, s]: row i attends to columns 0 .. i. Bytes: the lower
// triangle in, the whole matrix out, with zeros above the diagonal. The mask is never a tensor. A
// row stays in registers between its maximum, its sum and its use.
#include "common.cuh"

template <typename T, int W, int K, int MOST>
__global__ void __launch_bounds__(MOST) softmax_forward(
    const T* __restrict__ scores, T* __restrict__ y, int64_t rows, int s, float scale) {
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        int last = row < rows ? int(uint32_t(row) % uint32_t(s)) : -1;
        float v[K][W];
        float largest[1] = {-INFINITY};
        float sum[1] = {0.f};
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            Vector<T, W> in;
            if (column <= last) in = read<W>(scores + row * s + column);
            #pragma unroll
            for (int w = 0; w < W; w++) {
                v[k][w] = column + w <= last ? scale * to_float(in.at[w]) : -INFINITY;
                largest[0] = fmaxf(largest[0], v[k][w]);
            }
        }
        over_row<Max>(largest);
        #pragma unroll
        for (int k = 0; k < K; k++)
            #pragma unroll
            for (int w = 0; w < W; w++) {
                v[k][w] = last < 0 ? 0.f : exp_for<T>(v[k][w] - largest[0]);
                sum[0] += v[k][w];
            }
        over_row<Sum>(sum);
        float share = 1.f / sum[0];
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < s) {
                Vector<T, W> out;
                #pragma unroll
                for (int w = 0; w < W; w++)
                    out.at[w] = from_float<T>(v[k][w] * share);
                write<W>(y + row * s + column, out);
            }
        }
    }
}

// d scores = scale p (dp - sum of dp p)
template <typename T, int W, int K, int MOST>
__global__ void __launch_bounds__(MOST) softmax_backward(
    const T* __restrict__ dp, const T* __restrict__ p, T* __restrict__ out, int64_t rows, int s,
    float scale) {
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < rows;
         first += int64_t(gridDim.x) * blockDim.y) {
        int64_t row = first + threadIdx.y;
        int last = row < rows ? int(uint32_t(row) % uint32_t(s)) : -1;
        Vector<T, W> grad[K], in[K];
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (column <= last) {
                grad[k] = read<W>(dp + row * s + column);
                in[k] = read<W>(p + row * s + column);
            }
        }
        float sum[1] = {0.f};
        #pragma unroll
        for (int k = 0; k < K; k++)
            #pragma unroll
            for (int w = 0; w < W; w++)
                if (int((k * blockDim.x + threadIdx.x) * W) + w <= last)
                    sum[0] += to_float(grad[k].at[w]) * to_float(in[k].at[w]);
        over_row<Sum>(sum);
        #pragma unroll
        for (int k = 0; k < K; k++) {
            int column = (k * blockDim.x + threadIdx.x) * W;
            if (row < rows && column < s) {
                Vector<T, W> d;
                #pragma unroll
                for (int w = 0; w < W; w++) {
                    float ds = 0.f;
                    if (column + w <= last)
                        ds = scale * to_float(in[k].at[w]) * (to_float(grad[k].at[w]) - sum[0]);
                    d.at[w] = from_float<T>(ds);
                }
                write<W>(out + row * s + column, d);
            }
        }
    }
}

template <typename T, typename F>
void with_softmax(int64_t rows, int64_t s, F launch) {
    with_row<T, true>(s, [&](auto W, auto K, auto MOST, int64_t threads) {
        dim3 block(threads, threads < 256 ? 256 / threads : 1);
        launch(W, K, MOST, dim3(pieces(rows, block.y)), block);
    });
}

void causal_softmax(
    int64_t stream, int64_t dtype, int64_t scores, int64_t y, int64_t rows, int64_t s,
    double scale) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_softmax<T>(rows, s, [&](auto W, auto K, auto MOST, dim3 grid, dim3 block) {
            softmax_forward<T, W.value, K.value, MOST.value>
                <<<grid, block, 0, on(stream)>>>(as<T>(scores), as<T>(y), rows, s, scale);
            check_launch();
        });
    });
}
void causal_softmax_backward(
    int64_t stream, int64_t dtype, int64_t dp, int64_t p, int64_t out, int64_t rows, int64_t s,
    double scale) {
    if (rows == 0) return;
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_softmax<T>(rows, s, [&](auto W, auto K, auto MOST, dim3 grid, dim3 block) {
            softmax_backward<T, W.value, K.value, MOST.value>
                <<<grid, block, 0, on(stream)>>>(as<T>(dp), as<T>(p), as<T>(out), rows, s, scale);
            check_launch();
        });
    });
}
