// The token permutation of a mixture of experts (moe.py). A row of threads copies a row of x.
// Bytes: permute reads and writes m rows. unpermute reads up to k n rows and writes n; it
// multiplies by the probabilities and keeps the sum over k in registers. The backward of unpermute
// reads m rows of each of two tensors and writes m (a row of dy may be in the cache from its
// token's other choice).
#include "rows.cuh"

// Indices are divided in 32 bits: a division of 64 bits takes many instructions.
__global__ void __launch_bounds__(256)
    permute_rows(In<> x, In<int64_t> order, Out<> y, int64_t m, int64_t n, int h) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= m) return;
    const T* from = x + int64_t(uint32_t(order[row]) % uint32_t(n)) * h;
    #pragma unroll 4
    for (int column = threadIdx.x * W; column < h; column += blockDim.x * W)
        write(y + row * h + column, read(from + column));
}

__global__ void __launch_bounds__(256) unpermute_rows(
    In<> rows, In<int64_t> position, In<float> probabilities, Out<> y, int64_t m, int64_t n, int k,
    int h) {
    int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= n) return;
    // Where the row of a choice is (m: it was dropped), and its probability.
    auto row_of = [&](int choice) { return position[choice * n + token]; };
    auto probability_of = [&](int choice) {
        return probabilities ? probabilities[token * k + choice] : 1.f;
    };
    for (int column = threadIdx.x * W; column < h; column += blockDim.x * W) {
        float sum[W] = {};
        int64_t next = row_of(0);
        float next_probability = probability_of(0);
        for (int choice = 0; choice < k; choice++) {
            int64_t row = next;
            float probability = next_probability;
            // The next choice's are read before this one's row is used, so that not every choice
            // waits for two reads in turn.
            if (choice + 1 < k) {
                next = row_of(choice + 1);
                next_probability = probability_of(choice + 1);
            }
            if (row >= m) continue;
            Vector<> in = read(rows + row * h + column);
            #pragma unroll
            for (int w = 0; w < W; w++)
                sum[w] += probability * to_float(in.at[w]);
        }
        Vector<> out;
        #pragma unroll
        for (int w = 0; w < W; w++)
            round_to(out.at[w], sum[w]);
        write(y + token * h + column, out);
    }
}

// d_rows = probability dy[token],  d_probability = rows . dy[token]
__global__ void __launch_bounds__(256) unpermute_rows_backward(
    In<> dy, In<> rows, In<int64_t> order, In<float> probabilities, Out<> d_rows,
    Out<float> d_probabilities, int64_t m, int64_t n, int k, int h) {
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    // Index into probabilities [n, k].
    int64_t at = 0;
    float dot[1] = {0.f};
    if (row < m) {
        uint32_t choice = order[row];
        int64_t token = choice % uint32_t(n);
        at = token * k + choice / uint32_t(n);
        float probability = probabilities[at];
        for (int column = threadIdx.x * W; column < h; column += blockDim.x * W) {
            Vector<> grad = read(dy + token * h + column), in = read(rows + row * h + column), out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                dot[0] += to_float(grad.at[w]) * to_float(in.at[w]);
                round_to(out.at[w], probability * to_float(grad.at[w]));
            }
            write(d_rows + row * h + column, out);
        }
    }
    over_row<Sum>(dot);
    if (row < m && threadIdx.x == 0) d_probabilities[at] = dot[0];
}

// Threads for rows of h elements: whole warps, at most 256; several short rows share a block.
dim3 row_block(int64_t h) {
    int64_t threads = h / W < 256 ? pieces(h / W, 32) * 32 : 256;
    return dim3(threads, 256 / threads);
}

extern "C" const char* permute(
    cudaStream_t stream, In<> x, In<int64_t> order, In<int64_t>, T* y, int64_t n, int64_t h,
    int64_t m, int64_t) {
    dim3 block = row_block(h);
    return launch_kernel(permute_rows, pieces(m, block.y), block, stream, x, order, y, m, n, h);
}
// probabilities may be null, for 1.
extern "C" const char* unpermute(
    cudaStream_t stream, In<> rows, In<int64_t> position, In<float> probabilities, In<int64_t>,
    T* y, int64_t m, int64_t h, int64_t k, int64_t n) {
    dim3 block = row_block(h);
    return launch_kernel(
        unpermute_rows, pieces(n, block.y), block, stream, rows, position, probabilities, y, m, n,
        k, h);
}
extern "C" const char* unpermute_backward(
    cudaStream_t stream, In<> dy, In<> rows, In<int64_t> order, In<float> probabilities,
    float* d_probabilities, T* d_rows, int64_t n, int64_t h, int64_t m, int64_t k) {
    dim3 block = row_block(h);
    return launch_kernel(
        unpermute_rows_backward, pieces(m, block.y), block, stream, dy, rows, order, probabilities,
        d_rows, d_probabilities, m, n, k, h);
}
