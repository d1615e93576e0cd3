// Cross entropy over a wide vocabulary:
// loss = log sum exp z - z_target,  dz = (softmax z - onehot) dloss.
// Bytes: forward reads the logits once; backward reads them once and writes the gradient in their
// place; forward saves three floats per row. (Eager PyTorch writes a float copy and its
// exponentials; a log-softmax saved for backward would be a second tensor of that size.)
// A block is a row. One pass gives maximum and sum (online softmax, arXiv 1805.02867): where a
// larger element appears, the sum so far is scaled down.
#include "rows.cuh"

// The target of a row whose token is in another rank's columns.
constexpr int64_t ELSEWHERE = -(int64_t(1) << 62);

// Calls f(at, vector) for the elements from `at` on, all along a row. The row may begin at any
// address, because V need not be a multiple of W: first single elements up to an aligned address,
// then whole vectors, then single elements again. The loads of four vectors are in flight together.
template <typename F>
__device__ __forceinline__ void along_row(const T* row, int n, F f) {
    int head = int((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T));
    head = head < n ? head : n;
    int vectors = (n - head) / W;
    int tail = head + vectors * W;
    int v = threadIdx.x;
    int step = blockDim.x;
    if (v < head) f(v, read<1>(row + v));
    for (; v + 3 * step < vectors; v += 4 * step) {
        Vector<> z[4];
        #pragma unroll
        for (int i = 0; i < 4; i++)
            z[i] = read(row + head + (v + i * step) * W);
        #pragma unroll
        for (int i = 0; i < 4; i++)
            f(head + (v + i * step) * W, z[i]);
    }
    for (; v < vectors; v += step)
        f(head + v * W, read(row + head + v * W));
    if (tail + int(threadIdx.x) < n) f(tail + int(threadIdx.x), read<1>(row + tail + threadIdx.x));
}

__global__ void __launch_bounds__(512) cross_entropy_forward(
    In<> logits, In<int64_t> targets, Out<float> largest, Out<float> total,
    Out<float> target_logit, int V, int valid) {
    const T* row = logits + int64_t(blockIdx.x) * V;
    // Not -infinity: (-infinity) - (-infinity) is NaN.
    float most = -FLT_MAX;
    float sum = 0;
    along_row(row, valid, [&](int, auto z) {
        constexpr int N = sizeof(z) / sizeof(T);
        float here = to_float(z.at[0]);
        #pragma unroll
        for (int w = 1; w < N; w++)
            here = fmaxf(here, to_float(z.at[w]));
        if (here > most) {
            sum *= exp_of(most - here);
            most = here;
        }
        #pragma unroll
        for (int w = 0; w < N; w++)
            sum += exp_of(to_float(z.at[w]) - most);
    });
    float all[1] = {most};
    over_row<Max>(all);
    float sums[1] = {sum * exp_of(most - all[0])};
    over_row<Sum>(sums);
    if (threadIdx.x == 0) {
        int64_t target = targets[blockIdx.x];
        // Fails for a token outside this vocabulary.
        assert(target == ELSEWHERE || (target >= 0 && target < valid));
        largest[blockIdx.x] = all[0] == -FLT_MAX ? -INFINITY : all[0];
        total[blockIdx.x] = sums[0];
        target_logit[blockIdx.x] = target == ELSEWHERE ? 0.f : to_float(row[target]);
    }
}

__global__ void __launch_bounds__(512) cross_entropy_backward(
    Out<> logits, In<int64_t> targets, In<float> largest, In<float> total, In<float> grad, int V,
    int valid) {
    T* row = logits + int64_t(blockIdx.x) * V;
    float down = largest[blockIdx.x];
    float d = grad[blockIdx.x];
    // For exp(z - largest) / total: exp(z - log sum exp) would round that large logarithm.
    float share = d / total[blockIdx.x];
    int64_t target = targets[blockIdx.x];
    // Computed before its logit is overwritten. The target's column is written last, so that no
    // other column has to be compared with it.
    float at_target = target >= 0 ? share * exp_of(to_float(row[target]) - down) - d : 0.f;
    __syncthreads();
    along_row(row, V, [&](int at, auto z) {
        constexpr int N = sizeof(z) / sizeof(T);
        #pragma unroll
        for (int w = 0; w < N; w++)
            round_to(z.at[w], at + w < valid ? share * exp_of(to_float(z.at[w]) - down) : 0.f);
        write(row + at, z);
    });
    __syncthreads();
    if (threadIdx.x == 0 && target >= 0) round_to(row[target], at_target);
}

extern "C" const char* cross_entropy_statistics(
    cudaStream_t stream, In<> logits, In<int64_t> targets, float* largest, float* total,
    float* target_logit, int64_t rows, int64_t V, int64_t valid) {
    return launch_kernel(
        cross_entropy_forward, rows, 512, stream, logits, targets, largest, total, target_logit, V,
        valid);
}
extern "C" const char* cross_entropy_gradient(
    cudaStream_t stream, T* logits, In<int64_t> targets, In<float> largest, In<float> total,
    In<float> grad, int64_t rows, int64_t V, int64_t valid) {
    return launch_kernel(
        cross_entropy_backward, rows, 512, stream, logits, targets, largest, total, grad, V, valid);
}
