// Casts to FP8 (base/fp8_cast.py). A product reads both operands along the dimension that it
// sums over, so x is wanted by rows in forward, and by columns for the gradient of a weight.
//
// Bytes per element of 16 bits: x in, two bytes out, together 4, if the scale is known beforehand.
// If not, the maximum comes first and reads x once more, 6: no block may round before all blocks
// have looked, and blocks cannot wait for each other. (norms.cu and swiglu.cu can find the maximum
// of what they write.) PyTorch's operations move 15: maximum 2, scaled values 4, clamped values 4,
// bytes 3, their transpose 2.
#include "rows.cuh"
#include <cuda_fp8.h>

// amax becomes the maximum of |x| and of what it was. Where the maximum is known x is not read.
constexpr int LOADS = 4;
__global__ void __launch_bounds__(256)
    largest_magnitude(In<> x, float* amax, In<float> known, int64_t vectors) {
    if (known && *known > 0) return;
    float most[1] = {0};
    int64_t stride = int64_t(gridDim.x) * LOADS * 256;
    for (int64_t i = int64_t(blockIdx.x) * LOADS * 256 + threadIdx.x; i < vectors; i += stride) {
        Packed in[LOADS];
        #pragma unroll
        for (int n = 0; n < LOADS; n++)
            if (i + n * 256 < vectors) in[n] = Packed(read(x + (i + n * 256) * W));
        #pragma unroll
        for (int n = 0; n < LOADS; n++)
            #pragma unroll
            for (int w = 0; w < W; w++)
                most[0] = fmaxf(most[0], magnitude(in[n][w]));
    }
    raise_over_row(amax, most);
}

// scale_of in float8.py, to the last bit.
__device__ float scale_of(float amax, double largest, bool power_of_two) {
    if (!(amax < INFINITY)) return NAN;
    float scale = float(largest / fmax(double(amax), 0x1p-100));
    return power_of_two ? __uint_as_float(__float_as_uint(scale) & 0x7F800000) : scale;
}

// A block casts a tile of 64 rows and ACROSS vectors. A thread holds one vector of ROWS rows, so
// that the ROWS bytes of a column are a word: shared memory transposes words.
constexpr int ACROSS = 16, ROWS = 4, WORDS = 256 / ACROSS, TALL = ROWS * WORDS;

// The maximum is *known if that is above 0, else *amax. amax is raised to the maximum of |x|.
// inverse, 0 before, becomes 1 / scale; NaN if x is not finite, and then no byte means anything.
template <__nv_fp8_interpretation_t FORMAT>
__global__ void __launch_bounds__(256) cast_tile(
    In<> x, float* amax, float* inverse, In<float> known, uint8_t* q, uint8_t* transposed,
    int64_t m, int64_t k, bool power_of_two) {
    int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    int64_t row = int64_t(blockIdx.y) * TALL + down * ROWS;
    int64_t column = (int64_t(blockIdx.x) * ACROSS + across) * W;
    bool inside = row < m && column < k;
    Packed in[ROWS];
    #pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (inside) in[r] = Packed(read(x + (row + r) * k + column));

    // One thread divides, in double, while the others wait for x.
    __shared__ float of_block;
    if (threadIdx.x == 0) {
        float from = known && *known > 0 ? *known : *amax;
        of_block = scale_of(from, FORMAT == __NV_E4M3 ? 448. : 57344., power_of_two);
    }
    __syncthreads();
    float scale = of_block, most[1] = {0};

    uint32_t words[W] = {};
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {
        Vector<uint16_t, W / 2> out;
        #pragma unroll
        for (int w = 0; w < W; w += 2) {
            float a = in[r][w], b = in[r][w + 1];
            most[0] = fmaxf(most[0], fmaxf(magnitude(a), magnitude(b)));
            float2 scaled = {a * scale, b * scale};
            // Too large a number becomes the largest one.
            unsigned pair = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, FORMAT);
            out.at[w / 2] = pair;
            words[w] |= (pair & 255) << 8 * r;
            words[w + 1] |= pair >> 8 << 8 * r;
        }
        if (q && inside) write(reinterpret_cast<uint16_t*>(q + (row + r) * k + column), out);
    }

    // Column ACROSS w + a of shared memory is column W a + w of the tile: lanes then write to
    // different banks, and so do the words of a column, with one word more than there are.
    __shared__ uint32_t columns[ACROSS * W][WORDS + 1];
    if (transposed) {
        #pragma unroll
        for (int w = 0; w < W; w++)
            columns[w * ACROSS + across][down] = words[w];
        __syncthreads();
        for (int i = threadIdx.x; i < ACROSS * W * WORDS / 4; i += 256) {
            int at = i / (WORDS / 4), word = i % (WORDS / 4) * 4;
            int64_t to = (int64_t(blockIdx.x) * ACROSS + at % ACROSS) * W + at / ACROSS;
            int64_t first = int64_t(blockIdx.y) * TALL + word * ROWS;
            if (to >= k || first >= m) continue;
            Vector<uint32_t, 4> out;
            #pragma unroll
            for (int n = 0; n < 4; n++)
                out.at[n] = columns[at][word + n];
            write(reinterpret_cast<uint32_t*>(transposed + to * m + first), out);
        }
    }

    raise_over_row(amax, most);
    if (threadIdx.x > 0) return;
    bool is_finite = most[0] < INFINITY, is_first = blockIdx.x == 0 && blockIdx.y == 0;
    if (is_first || !is_finite) raise_to(inverse, is_finite ? 1 / scale : NAN);
}

// Sizes: m and k multiples of 16; rows and columns m, or 0 for bytes that are not wanted.
extern "C" const char* fp8_maximum(
    cudaStream_t stream, In<> x, float* amax, In<float> known, int64_t m, int64_t k, int64_t) {
    int64_t vectors = m * k / W, most = pieces(vectors, LOADS * 256);
    auto kernel = largest_magnitude;
    int64_t blocks = std::min(resident_blocks(kernel, 256), most);
    return launch_kernel(kernel, blocks, 256, stream, x, amax, known, vectors);
}
extern "C" const char* fp8_cast(
    cudaStream_t stream, In<> x, float* amax, float* inverse, In<float> known, uint8_t* q,
    uint8_t* transposed, int64_t m, int64_t k, int64_t, int64_t, int64_t, int64_t e5m2,
    int64_t power_of_two) {
    dim3 grid(pieces(k, ACROSS * W), pieces(m, TALL));
    auto kernel = e5m2 ? cast_tile<__NV_E5M2> : cast_tile<__NV_E4M3>;
    return launch_kernel(
        kernel, grid, 256, stream, x, amax, inverse, known, q, transposed, m, k, power_of_two);
}
