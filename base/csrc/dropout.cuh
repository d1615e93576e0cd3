// The masks of base/dropout.py, bit for bit: whether an element is dropped is a hash of its
// sample's key and of its coordinates. Nothing is stored; backward hashes again. An element costs
// two multiplications, three shifts and a comparison of integers, about as much as the integer
// units can do while the data arrives. The hash's first step, x ^ x >> 16, distributes over ^, so
// that it runs once for what a row's elements share and once per column.
#pragma once
#include "common.cuh"

__device__ __forceinline__ uint32_t first_step(uint32_t x) { return x ^ x >> 16; }
__device__ __forceinline__ uint32_t rest(uint32_t x) {
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
__device__ __forceinline__ uint32_t mix(uint32_t x) { return rest(first_step(x)); }
__device__ __forceinline__ uint32_t spread(int64_t n) {
    return uint32_t(n) * 0x9E3779B1u & 0x7FFFFFFFu;
}
// The hash x with one more coordinate, n.
__device__ __forceinline__ uint32_t hash_with(uint32_t x, int64_t n) {
    return mix(x ^ spread(n + 1));
}

struct Mask {
    // One per sample.
    const int32_t* keys;
    // The global number of this device's first place in dimension 1.
    int64_t start;
    // Which dropout of a layer.
    uint32_t site;
    // A hash below it drops the element: p 2^32.
    uint32_t limit;
    // 1 / (1 - p), for the others.
    float scale = 1.f;
    // The hash of the first two coordinates.
    __device__ uint32_t hash(uint32_t sample, uint32_t place) const {
        return hash_with(mix(uint32_t(keys[sample]) ^ site), place + start);
    }
    // The two parts of an element's hash, which `drops` joins; row is the hash of its row.
    static __device__ uint32_t of_row(uint32_t row) { return first_step(row); }
    static __device__ uint32_t of_column(int column) { return first_step(spread(column + 1)); }
    __device__ bool drops(uint32_t of_row, uint32_t of_column) const {
        return (rest(of_row ^ of_column) ^ 0x80000000u) < limit;
    }
};
