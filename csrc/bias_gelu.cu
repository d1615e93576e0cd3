// Bias + GELU: y = gelu(x + bias). Bytes: forward x in, y out; backward dy and x in, dx out.
//
// gelu(u) = u / 2 (1 + tanh z) = u sigmoid(2 z),  z = sqrt(2/pi) (u + 0.044715 u^3)
// gelu'(u) = s + u s (1 - s) times the derivative of 2 z, with s = sigmoid(2 z)
#include "columns.cuh"

// 2 z = u (LINEAR + CUBIC u^2): 2 sqrt(2/pi), and 0.044715 times that
constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481282894904f;

__global__ void __launch_bounds__(WIDE * DEEP, 2) gelu_forward(
    const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y, int64_t rows, int h) {
    Vector<float> own = own_bias(bias, h);
    auto nothing = [](int64_t) { return 0; };
    down_columns(x, nullptr, y, nullptr, rows, h, nothing, [&](int, int w, float x, float) {
        float u = x + own.at[w];
        return u * sigmoid(u * (LINEAR + CUBIC * (u * u))).here;
    });
}

__global__ void __launch_bounds__(WIDE * DEEP, 2) gelu_backward(
    const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ bias,
    T* __restrict__ dx, float* __restrict__ parts, int64_t rows, int h) {
    Vector<float> own = own_bias(bias, h);
    auto nothing = [](int64_t) { return 0; };
    down_columns(dy, x, dx, parts, rows, h, nothing, [&](int, int w, float dy, float x) {
        float u = x + own.at[w], square = u * u;
        Sigmoid s = sigmoid(u * (LINEAR + CUBIC * square));
        float slope = u * s.here * s.there;
        return dy * (s.here + slope * (LINEAR + 3 * CUBIC * square));
    });
}

extern "C" const char* bias_gelu(
    cudaStream_t stream, const T* x, const T* bias, T* y, int64_t rows, int64_t h) {
    dim3 grid = column_grid(rows, h, resident_blocks(gelu_forward)), block(WIDE, DEEP);
    gelu_forward<<<grid, block, 0, stream>>>(x, bias, y, rows, h);
    return failure();
}
extern "C" int64_t bias_gelu_parts(int64_t rows, int64_t h) {
    return column_grid(rows, h, resident_blocks(gelu_backward)).y;
}
// parts: [bias_gelu_parts, h] floats; null: no gradient of the bias.
extern "C" const char* bias_gelu_backward(
    cudaStream_t stream, const T* dy, const T* x, const T* bias, T* dx, T* d_bias, float* parts,
    int64_t rows, int64_t h) {
    dim3 grid = column_grid(rows, h, resident_blocks(gelu_backward)), block(WIDE, DEEP);
    gelu_backward<<<grid, block, 0, stream>>>(dy, x, bias, dx, parts, rows, h);
    if (parts) launch_sum_parts(stream, parts, d_bias, nullptr, grid.y, h);
    return failure();
}
