// Bias + GELU. Bytes: forward x in, y out; backward dy and x in, dx out. columns.cuh walks down the
// columns and adds up the bias gradient.
#include "columns.cuh"

// gelu(u) = u / 2 (1 + tanh z) = u sigmoid(2 z),  z = sqrt(2/pi) (u + 0.044715 u^3)
template <typename T>
struct Gelu {
    const T *x, *bias;
    T* y;
    template <int W>
    struct Loaded {
        Vector<T, W> x;
        __device__ void load(const Gelu& f, int64_t at) { x = read<W>(f.x + at); }
    };
    template <int W>
    struct Column {
        Bias<T, W> bias;
        __device__ Column(const Gelu& f, int column) : bias(f.bias, column) {}
        __device__ void arrive(const Gelu&, int64_t, int64_t) {}
        __device__ void run(const Gelu& f, int, int64_t at, const Loaded<W>& in, float (&)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float u = to_float(in.x.at[w]) + bias.at[w];
                float z2 = u * (1.5957691216057308f + 0.07135481282894904f * (u * u));
                out.at[w] = from_float<T>(u * sigmoid<T>(z2).here);
            }
            write<W>(f.y + at, out);
        }
    };
};

template <typename T>
struct GeluBackward {
    const T *dy, *x, *bias;
    T* dx;
    template <int W>
    struct Loaded {
        Vector<T, W> dy, x;
        __device__ void load(const GeluBackward& f, int64_t at) {
            dy = read<W>(f.dy + at);
            x = read<W>(f.x + at);
        }
    };
    template <int W>
    struct Column {
        Bias<T, W> bias;
        __device__ Column(const GeluBackward& f, int column) : bias(f.bias, column) {}
        __device__ void arrive(const GeluBackward&, int64_t, int64_t) {}
        __device__ void run(
            const GeluBackward& f, int, int64_t at, const Loaded<W>& in, float (&sum)[W]) {
            Vector<T, W> out;
            #pragma unroll
            for (int w = 0; w < W; w++) {
                float u = to_float(in.x.at[w]) + bias.at[w];
                float square = u * u;
                Sigmoid s = sigmoid<T>(u * (1.5957691216057308f + 0.07135481282894904f * square));
                float d = to_float(in.dy.at[w]);
                // gelu'(u) = s + u s (1 - s) times the derivative of 2 z
                float slope = u * s.here * s.there;
                slope *= 1.5957691216057308f + 0.21406443848684713f * square;
                d *= s.here + slope;
                out.at[w] = from_float<T>(d);
                sum[w] += d;
            }
            write<W>(f.dx + at, out);
        }
    };
};

void bias_gelu(
    int64_t stream, int64_t dtype, int64_t x, int64_t bias, int64_t y, int64_t rows, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_columns<T>(dtype, rows, h, Gelu<T>{as<T>(x), as<T>(bias), as<T>(y)}, 0, 0, stream);
    });
}
int64_t bias_gelu_parts(int64_t rows, int64_t h, int64_t dtype) {
    return column_parts(rows, h, dtype);
}
void bias_gelu_backward(
    int64_t stream, int64_t dtype, int64_t dy, int64_t x, int64_t bias, int64_t dx, int64_t d_bias,
    int64_t parts, int64_t rows, int64_t h) {
    with_type(dtype, [&](auto zero) {
        using T = decltype(zero);
        launch_columns<T>(
            dtype, rows, h, GeluBackward<T>{as<T>(dy), as<T>(x), as<T>(bias), as<T>(dx)}, parts,
            d_bias, stream);
    });
}
