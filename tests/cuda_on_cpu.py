"""An emulator that runs CUDA kernels on the CPU, to test arithmetic, indices and barriers there.

The source is compiled as C++ by the host's compiler, with the header below in place of CUDA's. The
threads of a block are fibers of one operating system thread. A fiber runs until it waits for a
barrier, or for the other lanes of its warp. Fibers run in ascending, descending or random order; in
random order a warp may also pause until the others cannot continue without it. So a missing barrier
is found, before a read and before the next write. An unaligned vector, or an index beyond shared
memory, ends the process.

    emulated = load(kernels.sources())
    emulated.set_order(2, 5)
    emulated.rms_norm(0, dtype, address, ..)

Not covered: speed, indices beyond a tensor's end, what blocks do to each other at the same time,
and code under #ifdef __CUDA_ARCH__.
"""

import re
from functools import cache
from pathlib import Path

from runtime import extensions

FLAGS = [
    "-O1",
    "-fsanitize=bounds,alignment",
    "-fsanitize-undefined-trap-on-error",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
]
HEADER = r"""
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(...)
#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define cudaGetLastError() cudaSuccess
#define cudaGetErrorString(e) ""
#define cudaGetDevice(device) (*(device) = 0)
#define cudaDeviceGetAttribute(value, attribute, device) (*(value) = emulator::multiprocessors)

namespace emulator {
int multiprocessors = 2;
int order = 0;
uint3 thread, block;
dim3 block_size, grid_size;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[1 << 16]};
    uint3 index;
    bool done;
};
std::vector<std::unique_ptr<Fiber>> fibers;
ucontext_t scheduler;
Fiber* current;
const std::function<void()>* kernel;
// Whether any fiber has advanced in this round over all fibers.
bool progress;

struct Barrier {
    int arrived = 0, generation = 0;
} of_block, of_warp[32];
// What the lanes of a warp exchange. Two sets, so that a fast lane does not overwrite what a slow
// lane has not read yet.
uint64_t slots[32][2][32];

inline void wait(Barrier& barrier, int all) {
    int mine = barrier.generation;
    progress = true;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        barrier.generation++;
        return;
    }
    while (barrier.generation == mine) {
        Fiber* self = current;
        swapcontext(&self->context, &scheduler);
    }
}

inline int threads_of_block() { return block_size.x * block_size.y * block_size.z; }

// The number of the running thread in its block.
inline int number() { return thread.x + block_size.x * (thread.y + block_size.y * thread.z); }

// A shuffle: every lane of the warp gives a value and receives that of lane `from`.
template <typename T>
T exchange(T value, int from) {
    int warp = number() / 32, lane = number() % 32;
    int parity = of_warp[warp].generation % 2;
    memcpy(&slots[warp][parity][lane], &value, sizeof(T));
    wait(of_warp[warp], 32);
    memcpy(&value, &slots[warp][parity][from], sizeof(T));
    return value;
}

inline void enter() {
    (*kernel)();
    current->done = progress = true;
    swapcontext(&current->context, &scheduler);
}

// Order 0: ascending, 1: descending, 2: random.
template <typename T>
inline void arrange(std::vector<T>& items) {
    static std::mt19937 generator(0);
    if (order == 1) std::reverse(items.begin(), items.end());
    if (order == 2) std::shuffle(items.begin(), items.end(), generator);
}

// Runs every thread of a block in a fiber of its own, in turns, until all are done.
inline void run_block(int threads) {
    while (int(fibers.size()) < threads)
        fibers.emplace_back(new Fiber);
    of_block = Barrier();
    for (auto& barrier : of_warp)
        barrier = Barrier();
    std::vector<Fiber*> running;
    for (int i = 0; i < threads; i++) {
        Fiber& f = *fibers[i];
        f.index = {
            i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = 1 << 16;
        makecontext(&f.context, enter, 0);
        running.push_back(&f);
    }
    static std::mt19937 chance(1);
    // A warp that does not run until the others cannot continue; -1: none.
    int paused = -1;
    for (int left = threads; left > 0;) {
        progress = false;
        arrange(running);
        for (Fiber* f : running) {
            int warp = int(f->index.x + block_size.x * f->index.y) / 32;
            if (f->done || warp == paused) continue;
            current = f;
            thread = f->index;
            swapcontext(&scheduler, &f->context);
            left -= f->done;
        }
        if (order == 2 && progress && paused < 0) paused = chance() % (threads / 32 + 1);
        if (!progress && paused < 0)
            throw std::runtime_error("threads of a block wait for others that never come");
        if (!progress) paused = -1;
    }
}

// A launch.
void run(dim3 grid, dim3 size, std::function<void()> f) {
    if (grid.x == 0 || grid.y == 0 || size.x * size.y * size.z > 1024)
        throw std::runtime_error("invalid configuration of a launch");
    grid_size = grid;
    block_size = size;
    kernel = &f;
    std::vector<uint3> blocks;
    for (unsigned y = 0; y < grid.y; y++)
        for (unsigned x = 0; x < grid.x; x++)
            blocks.push_back({x, y, 0});
    arrange(blocks);
    for (uint3 b : blocks) {
        block = b;
        run_block(threads_of_block());
    }
}
}  // namespace emulator

#define __syncthreads() emulator::wait(emulator::of_block, emulator::threads_of_block())
#define __shfl_xor_sync(mask, value, lane) \
    emulator::exchange(value, emulator::number() % 32 ^ (lane))
#define __shfl_sync(mask, value, lane) emulator::exchange(value, lane)
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __uint_as_float(unsigned x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, 4);
    return y;
}
void set_order(int64_t order, int64_t multiprocessors) {
    emulator::order = order;
    emulator::multiprocessors = multiprocessors;
}
"""


def include_folder() -> Path | None:
    """The folder of CUDA's headers, whose 16-bit types work on the host too; None without CUDA."""
    root = extensions.cuda_root()
    return root and root / "include"


def translated(source: str) -> str:
    """Every launch, kernel<T><<<grid, block, 0, on(stream)>>>(..), as a call of emulator::run."""
    here = ('#include "', "#include <cuda", "#pragma once")
    lines = source.splitlines()
    source = "\n".join(line for line in lines if not line.startswith(here))
    return re.sub(
        r"([\w:]+(?:<[^;{}]*?>)?)\s*<<<(\w+), (\w+), 0, on\(stream\)>>>(\(.*?\));",
        r"emulator::run(\2, \3, [=] { \1\4; });",
        source,
        flags=re.DOTALL,
    )


def load(sources: dict[str, str]):
    """A Python module with the launchers of {file name: text} and set_order(order,
    multiprocessors), where order is 0 ascending, 1 descending or 2 random."""
    # common.cuh, which all include, then what includes it
    headers = [file for file in ("common.cuh", "columns.cuh") if file in sources]
    files = [*headers, *(file for file in sources if file not in headers)]
    return _build(HEADER + translated("\n".join(sources[file] for file in files)))


@cache
def _build(text: str):
    name = extensions.name_of("fused_on_cpu", text, FLAGS)

    def compile_into(folder: Path) -> None:
        extensions.compile_sources(
            name,
            folder,
            {"emulator.cpp": text},
            extra_include_paths=[str(include_folder())],
            extra_cflags=FLAGS,
        )

    return extensions.load(name, compile_into)
