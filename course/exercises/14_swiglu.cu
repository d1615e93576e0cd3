// Exercise 14: a fused SwiGLU in CUDA.                                              (30 minutes)
//
//     y = silu(gate) · up = gate · sigmoid(gate) · up          for each element on its own
//
// PyTorch runs two kernels for F.silu(gate) * up: the first reads gate and writes silu(gate), the
// second reads that and up, and writes y. So 5 tensors go through the memory. One kernel moves 3:
// gate and up in, y out. The arithmetic costs nothing beside it.
//
// A kernel is a function that many threads run. They stand in blocks, here of 256. A thread knows
// its block, blockIdx.x, its place in the block, threadIdx.x, and the size of a block, blockDim.x.
// So it can compute its own number among all threads. Each thread takes one vector: W neighbouring
// elements, 16 bytes, which one instruction loads. For 600 vectors:
//
//     block    0                 1                 2
//     thread   0 1 2 .. 255      0 1 2 .. 255      0 1 .. 87  | 88 .. 255
//     vector   0 1 2 .. 255      256 .. 511        512 .. 599 | beyond the end: no work
//
// base/csrc/common.cuh gives you
//     Vector<> g = read(gate + i * W);      W elements from an address; g.at[w] is one of them
//     Vector<> out;  write(y + i * W, out); the same, to an address
//     to_float(x), round_to(x, value)       from an element to float; from float into an element
//     sigmoid(x).here                       1 / (1 + e^-x) of a float, which never overflows
//
// Read         the top of base/csrc/common.cuh, up to `round_to`
// Paper        GLU Variants Improve Transformer, arXiv 2002.05202, section 2
// Not yet      base/csrc/swiglu.cu: it holds the answer, and a slower one
// Check        python -m course.exercises.check 14 (by an emulator: needs g++); --hint: a hint
// Par          each vector of gate and of up is read once, each vector of y is written once
#include "../../base/csrc/common.cuh"

// gate, up, y: [vectors * W]
__global__ void __launch_bounds__(256)
    swiglu(const T* gate, const T* up, T* y, int64_t vectors) {
    // Your code: the number of this thread; then its vector, if there is one.
}

// Starts enough blocks of 256 threads. n is a multiple of W.
extern "C" const char* launch(cudaStream_t stream, const T* gate, const T* up, T* y, int64_t n) {
    swiglu<<<pieces(n / W, 256), 256, 0, stream>>>(gate, up, y, n / W);
    return failure();
}
