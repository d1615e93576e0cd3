// The token permutation of a mixture of experts (moe.py). A row of threads copies a row of x.
// Bytes: permute reads and writes m rows. unpermute reads up to k n rows and writes n; it
// multiplies by the probabilities and keeps the sum over k in registers. The backward of unpermute
// reads m rows of each of two tensors and writes m (a row of dy may be in the cache from its
// token's other choice).
#include "common.cuh"

template <typename T, int W>
__global__ void __launch_bounds__(256) permute_rows(
    const T* __restrict__ x, const int64_t* __restrict__ order, T* __restrict__ y, int64_t m,
    int64_t n, int h) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= m) return;
    const T* from = x + int64_t(uint32_t(order[row]) % uint32_t(n)) * h;
    #pragma unroll 4
    for (int column = threadIdx.x * W; column < h; column += blockDim.x * W)
        write<W>(y + row * h + column, read<W>(from + column));
}

template <typename T, int W>
__global__ void __launch_bounds__(256) unpermute_rows(
    const T* __restrict__ rows, const int64_t* __restrict__ position,
    const float* __restrict__ probabilities, T* __restrict__ y, int64_t m, int64_t n, int k,
    int h) {
    int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= n) return;
    for (int column = threadIdx.x * W; column < h; column += blockDim.x * W) {
        float sum[W] = {};
        #pragma unroll 1
        for (int choice = 0; choice < k; choice++) {
            int64_t row = position[choice * n + token];
            // m stands for a dropped token.
            if (row < m) {
                float probability = probabilities ? probabilities[token * k + choice] : 1.f;
                Vector<T, W> in = read<W>(rows + row * h + column);
                #pragma unroll
                for (int w = 0; w < W; w++)
                    sum[w] += probability * to_float(in.at[w]);
            }
        }
        Vector<T, W> out;
        #pragma unroll
        for (int w = 0; w < W; w++)
            out.at[w] = from_float<T>(sum[w]);
        write<W>(y + token * h + column, out);
    }
}

// d_rows = probability dy[token],  d_probability = rows . dy[token]
template <typename T, int W>
__global__ void __launch_bounds__(256) unpermute_rows_backward(
    const T* __restrict__ dy, const T* __restrict__ rows, const int64_t* __restrict__ order,
    const float* __restrict__ probabilities, T* __restrict__ d_rows,
    float* __restrict__ d_probabilities, int64_t m, int64_t n, int k, int h) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    // Index into probabilities [n, k].
    int64_t at = 0;
    float dot[1] = {0.f};
    if (row < m) {
        // 32 bits: a division of 64 bits takes a hundred instructions.
        uint32_t assignment = order[row];
        int64_t token = assignment % uint32_t(n);
        at = token * k + assignment / uint32_t(n);
        float probability = probabilities[at];
        for (int column = threadIdx.x * W; column < h; column += blockDim.x * W) {
            Vector<T, W> grad = read<W>(dy + token * h + column);
            Vector<T, W> in = read<W>(rows + row * h + column);
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                dot[0] += to_float(grad.at[w]) * to_float(in.at[w]);
                out.at[w] = from_float<T>(probability * to_float(grad.at[w]));
            }
            write<W>(d_rows + row * h + column, out);
        }
    }
    over_row<Sum>(dot);
    if (row < m && threadIdx.x == 0) d_probabilities[at] = dot[0];
}

template <typename T, typename F>
void with_rows(int64_t rows, int64_t h, F launch) {
    if (rows == 0) return;
    constexpr int W = PER_VECTOR<T>;
    int64_t threads = h / W < 256 ? row_threads(h / W, 1) : 256;
    dim3 block(threads, 256 / threads);
    launch(Number<W>(), dim3(pieces(rows, block.y)), block);
}

void permute(
    int64_t stream, int64_t dtype, int64_t x, int64_t order, int64_t y, int64_t m, int64_t n,
    int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows<T>(m, h, [&](auto W, dim3 grid, dim3 block) {
            permute_rows<T, W.value>
                <<<grid, block, 0, on(stream)>>>(as<T>(x), as<int64_t>(order), as<T>(y), m, n, h);
            check_launch();
        });
    });
}
void unpermute(
    int64_t stream, int64_t dtype, int64_t rows, int64_t position, int64_t probabilities, int64_t y,
    int64_t m, int64_t n, int64_t k, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows<T>(n, h, [&](auto W, dim3 grid, dim3 block) {
            unpermute_rows<T, W.value><<<grid, block, 0, on(stream)>>>(
                as<T>(rows), as<int64_t>(position), as<float>(probabilities), as<T>(y), m, n, k, h);
            check_launch();
        });
    });
}
void unpermute_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t rows, int64_t order, int64_t probabilities,
    int64_t d_rows, int64_t d_probabilities, int64_t m, int64_t n, int64_t k, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        with_rows<T>(m, h, [&](auto W, dim3 grid, dim3 block) {
            unpermute_rows_backward<T, W.value><<<grid, block, 0, on(stream)>>>(
                as<T>(dy), as<T>(rows), as<int64_t>(order), as<float>(probabilities), as<T>(d_rows),
                as<float>(d_probabilities), m, n, k, h);
            check_launch();
        });
    });
}
