// Bias + GELU: y = gelu(x + bias). Bytes: forward x in, y out; backward dy and x in, dx out.
//
// gelu(u) = u / 2 (1 + tanh z) = u sigmoid(2 z),  z = sqrt(2/pi) (u + 0.044715 u^3)
// gelu'(u) = s + u s (1 - s) times the derivative of 2 z, with s = sigmoid(2 z)
#include "columns.cuh"

// 2 z = u (LINEAR + CUBIC u^2): 2 sqrt(2/pi), and 0.044715 times that
constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481282894904f;

struct GeluForward : OfElements {
    __device__ float operator()(float x, float, float bias, uint32_t, uint32_t) const {
        float u = x + bias;
        return u * sigmoid(u * (LINEAR + CUBIC * (u * u))).here;
    }
};
struct GeluBackward : OfElements {
    __device__ float operator()(float dy, float x, float bias, uint32_t, uint32_t) const {
        float u = x + bias, square = u * u;
        Sigmoid s = sigmoid(u * (LINEAR + CUBIC * square));
        float slope = u * s.here * s.there;
        return dy * (s.here + slope * (LINEAR + 3 * CUBIC * square));
    }
};

extern "C" const char* bias_gelu(
    cudaStream_t stream, In<> x, In<> bias, T* y, int64_t rows, int64_t h) {
    int64_t blocks = column_blocks<GeluForward, false>(rows, h);
    return launch_columns<GeluForward, false>(
        stream, x, nullptr, bias, y, nullptr, rows, h, blocks, {});
}
extern "C" int64_t bias_gelu_backward_blocks(int64_t rows, int64_t h, int64_t sums) {
    return sums ? column_blocks<GeluBackward, true>(rows, h)
                : column_blocks<GeluBackward, false>(rows, h);
}
extern "C" const char* bias_gelu_backward(
    cudaStream_t stream, In<> dy, In<> x, In<> bias, T* dx, float* parts, int64_t rows, int64_t h,
    int64_t sums, int64_t blocks) {
    auto run = sums ? launch_columns<GeluBackward, true> : launch_columns<GeluBackward, false>;
    return run(stream, dy, x, bias, dx, parts, rows, h, blocks, {});
}
