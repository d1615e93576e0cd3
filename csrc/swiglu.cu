// SwiGLU: y = silu(gate) up. Tensors: two in, one out; backward three in, two out. Each element is
// independent, so a thread computes one vector and ends. It needs few registers for its 2 or 3
// loads of 16 bytes, so enough blocks are resident to keep the memory busy.
#include "common.cuh"

template <typename T>
struct SwiGLU {
    const T *gate, *up;
    T* y;
    template <int W>
    __device__ void run(int64_t at) const {
        Vector<T, W> g = read<W>(gate + at), u = read<W>(up + at), out;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x = to_float(g.at[w]);
            out.at[w] = from_float<T>(x * sigmoid<T>(x).here * to_float(u.at[w]));
        }
        write<W>(y + at, out);
    }
};

// silu'(x) = s + x s (1 - s) with s = sigmoid(x)
template <typename T>
struct SwiGLUBackward {
    const T *dy, *gate, *up;
    T *d_gate, *d_up;
    template <int W>
    __device__ void run(int64_t at) const {
        Vector<T, W> d = read<W>(dy + at), g = read<W>(gate + at), u = read<W>(up + at);
        Vector<T, W> out_g, out_u;
        #pragma unroll
        for (int w = 0; w < W; w++) {
            float x = to_float(g.at[w]), grad = to_float(d.at[w]);
            Sigmoid s = sigmoid<T>(x);
            float silu = x * s.here;
            out_u.at[w] = from_float<T>(grad * silu);
            // s.there is 1 - s.
            out_g.at[w] = from_float<T>(grad * to_float(u.at[w]) * (s.here + silu * s.there));
        }
        write<W>(d_gate + at, out_g);
        write<W>(d_up + at, out_u);
    }
};

void swiglu(int64_t stream, int64_t dtype, int64_t gate, int64_t up, int64_t y, int64_t n) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_each<PER_VECTOR<T>>(n, SwiGLU<T>{as<T>(gate), as<T>(up), as<T>(y)}, stream);
    });
}
void swiglu_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t gate, int64_t up, int64_t d_gate,
    int64_t d_up, int64_t n) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_each<PER_VECTOR<T>>(
            n, SwiGLUBackward<T>{as<T>(dy), as<T>(gate), as<T>(up), as<T>(d_gate), as<T>(d_up)},
            stream);
    });
}
