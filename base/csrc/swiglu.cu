// SwiGLU: y = silu(gate) up. Bytes: gate and up in, y out; backward dy, gate and up in, both
// gradients out. Each element is independent, so the question is only how to move bytes.
#include "rows.cuh"

__device__ float swiglu_of(float gate, float up) { return gate * sigmoid(gate).here * up; }

// First try: a thread is an element. In 16 bits each load instruction of a warp moves 64 bytes, and
// a thread has 4 bytes in flight. 2048 threads have 8 KB, where 21 KB are needed, so the memory
// should wait for the threads; `python -m course.kernels` times both tries on a GPU. The index
// costs as many instructions as the element.
__global__ void __launch_bounds__(256)
    swiglu_by_element(const T* gate, const T* up, T* y, int64_t n) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) round_to(y[i], swiglu_of(to_float(gate[i]), to_float(up[i])));
}

// Second try: a thread is a vector. A warp's load moves 512 bytes, a thread has 32 bytes in flight,
// and one index serves 8 elements. The thread needs few registers for its 2 or 3 loads, so that
// multiprocessors are full: 64 KB in flight. Bytes are moved once, wide, and early.
__global__ void __launch_bounds__(256)
    swiglu_by_vector(const T* gate, const T* up, T* y, int64_t vectors) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    Vector<> g = read(gate + i * W), u = read(up + i * W), out;
    #pragma unroll
    for (int w = 0; w < W; w++)
        round_to(out.at[w], swiglu_of(to_float(g.at[w]), to_float(u.at[w])));
    write(y + i * W, out);
}

// The same where a cast to FP8 comes next, which needs max |y|: amax is raised to it.
__global__ void __launch_bounds__(256)
    swiglu_with_maximum(const T* gate, const T* up, T* y, float* amax, int64_t vectors) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    float most[1] = {0.f};
    if (i < vectors) {
        Vector<> g = read(gate + i * W), u = read(up + i * W), out;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            round_to(out.at[w], swiglu_of(to_float(g.at[w]), to_float(u.at[w])));
            most[0] = fmaxf(most[0], magnitude(to_float(out.at[w])));
        }
        write(y + i * W, out);
    }
    raise_over_row(amax, most);
}

// silu'(x) = s + x s (1 - s) with s = sigmoid(x). amax, if it is not null: those of both gradients.
__global__ void __launch_bounds__(256) swiglu_backward_by_vector(
    const T* dy, const T* gate, const T* up, T* d_gate, T* d_up, float* amax, int64_t vectors) {
    int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    float most[2] = {0.f, 0.f};
    if (i < vectors) {
        Vector<> d = read(dy + i * W), g = read(gate + i * W), u = read(up + i * W), out_g, out_u;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x = to_float(g.at[w]), grad = to_float(d.at[w]);
            Sigmoid s = sigmoid(x);
            float silu = x * s.here;
            round_to(out_u.at[w], grad * silu);
            // s.there is 1 - s.
            round_to(out_g.at[w], grad * to_float(u.at[w]) * (s.here + silu * s.there));
            most[0] = fmaxf(most[0], magnitude(to_float(out_g.at[w])));
            most[1] = fmaxf(most[1], magnitude(to_float(out_u.at[w])));
        }
        write(d_gate + i * W, out_g);
        write(d_up + i * W, out_u);
    }
    if (amax) raise_over_row(amax, most);
}

// Elements: rows h > 0, a multiple of W but for the first try.
extern "C" const char* swiglu_naive(
    cudaStream_t stream, In<> gate, In<> up, T* y, float*, int64_t rows, int64_t h, int64_t) {
    int64_t n = rows * h;
    return launch_kernel(swiglu_by_element, pieces(n, 256), 256, stream, gate, up, y, n);
}
extern "C" const char* swiglu(
    cudaStream_t stream, In<> gate, In<> up, T* y, float* amax, int64_t rows, int64_t h, int64_t) {
    int64_t n = rows * h / W, blocks = pieces(n, 256);
    if (amax)
        return launch_kernel(swiglu_with_maximum, blocks, 256, stream, gate, up, y, amax, n);
    return launch_kernel(swiglu_by_vector, blocks, 256, stream, gate, up, y, n);
}
extern "C" const char* swiglu_backward(
    cudaStream_t stream, In<> dy, In<> gate, In<> up, T* d_gate, T* d_up, float* amax, int64_t rows,
    int64_t h, int64_t) {
    int64_t n = rows * h / W;
    auto kernel = swiglu_backward_by_vector;
    return launch_kernel(kernel, pieces(n, 256), 256, stream, dy, gate, up, d_gate, d_up, amax, n);
}
