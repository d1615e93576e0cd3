"""An emulator that runs CUDA kernels on the CPU, to test arithmetic, indices and barriers there.

The source is compiled as C++ by the host's compiler, with the header below in place of CUDA's. The
threads of a block are fibers of one operating system thread. A fiber runs until it waits for a
barrier, or for the other lanes of its warp. Fibers run in ascending, descending or random order; in
random order a warp may also pause until the others cannot continue without it. So a missing barrier
is found, before a read and before the next write. An unaligned vector, or an index beyond shared
memory, ends the process. A vector that is read or written outside the tensors of a launch makes the
launch fail.

    emulated = load(kernels.sources(), "float")
    extensions.call(emulated, "set_order", 2, 5)
    extensions.call(emulated, "swiglu", None, gate, up, y, rows, h)

Not covered: speed, single elements beyond a tensor's end, what blocks do to each other at the same
time, and the rounding of the two instructions that are written in assembly.
"""

import re
from functools import cache
from pathlib import Path

from base import extensions

FLAGS = [
    "-O1",
    "-fsanitize=bounds,alignment",
    "-fsanitize-undefined-trap-on-error",
    # longjmp to another stack
    "-U_FORTIFY_SOURCE",
    # the shared memory of a template is this library's own, also where another one is loaded
    "-fno-gnu-unique",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
]
HEADER = r"""
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(...)
#define threadIdx emulator::thread
#define blockIdx emulator::block
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define cudaGetLastError() emulator::take_failure()
#define cudaGetErrorString(error) emulator::failure.c_str()
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, bytes) \
    (*(blocks) = emulator::multiprocessors + 1)
#define cudaGetDevice(device) (*(device) = 0)
#define cudaDeviceGetAttribute(value, attribute, device) (*(value) = emulator::multiprocessors)

namespace emulator {
int multiprocessors = 2;
int order = 0;
// Of the launch that failed last, and whether one has since take_failure.
std::string failure;
bool failed = false;
cudaError_t take_failure() {
    bool now = failed;
    failed = false;
    return now ? cudaErrorUnknown : cudaSuccess;
}

// The memory of the tensors of this launch, [begin, end); none: everything is allowed. Shared
// memory is among this library's own variables.
std::vector<std::pair<uintptr_t, uintptr_t>> memory;
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];
template <typename V, typename E>
V& checked(E* address) {
    auto begin = reinterpret_cast<uintptr_t>(address);
    bool inside = memory.empty() || (address >= (E*)__bss_start && address < (E*)_end);
    for (auto [from, to] : memory)
        inside |= from <= begin && begin + sizeof(V) <= to;
    if (!inside) throw std::runtime_error("a vector outside the tensors of the launch");
    return *reinterpret_cast<V*>(address);
}
uint3 thread, block;
dim3 block_size, grid_size;

void run_forever();
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    std::unique_ptr<char[]> stack{new char[1 << 16]};
    uint3 index;
    bool begun = false, done;
    Fiber() {
        getcontext(&context);
        context.uc_stack.ss_sp = stack.get();
        context.uc_stack.ss_size = 1 << 16;
        makecontext(&context, run_forever, 0);
    }
};
std::vector<std::unique_ptr<Fiber>> fibers;
jmp_buf scheduler;
Fiber* current;
const std::function<void()>* kernel;

// From the scheduler to a fiber, and back. setcontext begins a fiber, once; jumps need no call of
// the system.
__attribute__((noinline)) void resume(Fiber& f) {
    current = &f;
    thread = f.index;
    if (_setjmp(scheduler)) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
}
__attribute__((noinline)) void pause() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
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
    while (barrier.generation == mine)
        pause();
}

// The instructions that are written in assembly.
inline float ex2(float x) { return exp2f(x); }
inline float rcp(float x) { return 1 / x; }

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

inline void fail(const std::exception& e) {
    if (!failed) failure = e.what();
    failed = true;
}

// A fiber: the kernel of one launch after another.
void run_forever() {
    for (;;) {
        try {
            (*kernel)();
        } catch (const std::exception& e) {
            fail(e);
        }
        current->done = progress = true;
        pause();
    }
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
            resume(*f);
            left -= f->done;
        }
        if (order == 2 && progress && paused < 0) paused = chance() % (threads / 32 + 1);
        if (!progress && paused < 0) {
            // They stay in the middle of this kernel.
            fibers.clear();
            throw std::runtime_error("threads of a block wait for others that never come");
        }
        if (!progress) paused = -1;
    }
}

void run_blocks(dim3 grid, dim3 size, const std::function<void()>& f) {
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

// A launch.
void run(dim3 grid, dim3 size, std::function<void()> f) {
    try {
        run_blocks(grid, size, f);
    } catch (const std::exception& e) {
        fail(e);
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
// Fibers take turns, so nothing comes between.
inline unsigned atomicMax(unsigned* address, unsigned x) {
    unsigned before = *address;
    *address = std::max(before, x);
    return before;
}
extern "C" int64_t set_order(int64_t order, int64_t multiprocessors) {
    emulator::order = order;
    emulator::multiprocessors = multiprocessors;
    return 0;
}
extern "C" int64_t forget_memory() {
    emulator::memory.clear();
    return 0;
}
extern "C" int64_t add_memory(int64_t begin, int64_t end) {
    emulator::memory.emplace_back(begin, end);
    return 0;
}
"""


def include_folder() -> Path | None:
    """The folder of CUDA's headers, whose 16-bit types work on the host too; None without CUDA."""
    root = extensions.cuda_root()
    return root and root / "include"


def translated(source: str) -> str:
    """Every launch, kernel<T><<<grid, block, 0, stream>>>(..), as a call of emulator::run, every
    vector that is read or written as a call of emulator::checked, and every instruction in assembly
    as a call of its name."""
    here = ('#include "', "#include <cuda", "#pragma once")
    lines = source.splitlines()
    source = "\n".join(line for line in lines if not line.startswith(here))
    source, vectors = re.subn(
        r"\*reinterpret_cast<((?:const )?Vector<E, N>)\*>", r"emulator::checked<\1>", source
    )
    assert vectors == 2, "read and write of common.cuh"
    source = re.sub(r'asm\("(\w+)\..*?\(x\)\);', r"x = emulator::\1(x);", source)
    return re.sub(
        r"([\w:]+(?:<[^;{}]*?>)?)\s*<<<([^;{}]*?), (\w+), 0, stream>>>(\(.*?\));",
        r"emulator::run(\2, \3, [=] { \1\4; });",
        source,
        flags=re.DOTALL,
    )


def load(sources: dict[str, str], element: str = "float"):
    """The library of {file name: text}, for elements of a type, with set_order(order,
    multiprocessors), where order is 0 ascending, 1 descending or 2 random; add_memory(begin, end)
    of each tensor of the next launch, and forget_memory()."""
    # what others include comes first
    files = [file for file in ("common.cuh", "rows.cuh") if file in sources]
    files += [file for file in sources if file.endswith(".cuh") and file not in files]
    files += [file for file in sources if file.endswith(".cu")]
    return _build(HEADER + translated("\n".join(sources[file] for file in files)), element)


@cache
def _build(text: str, element: str):
    options = [f"-I{include_folder()}", f"-DELEMENT={element}", "-std=c++17", "-fPIC"]
    return extensions.load("fused_on_cpu", {"emulator.cpp": text}, ["g++", *FLAGS, *options])
