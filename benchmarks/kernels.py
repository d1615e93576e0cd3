"""Every operation of kernels.py at training sizes, beside PyTorch's own and torch.compile.

    python -m benchmarks.gpu kernels
    python -m benchmarks.gpu kernels --cases "llama2-7b swiglu" "gpt-1.3b rotary"

Measured are the time, and the share of the copy bandwidth: bytes of one pass / time / bandwidth of
a large copy. One pass reads every input once and writes every output once; for causal_softmax and
softmax_dropout half of the reads count, because the upper triangle is not read.

No small copy reaches that bandwidth. So a copy of as many bytes is measured in turn with each
operation; where it takes 12 microseconds or less, its time is the measure: "small" in the row.

On a GPU a CUDA graph captures many calls, and events time its replays. The calls rotate through
sets of arguments that together do not fit the cache; the outputs of each set are kept until its
next call, so that writes too go to memory. Numbers are medians. What a call costs the host is
measured at sizes so small that the GPU does not wait.

Without a GPU only --toy runs: PyTorch's own operations as the fused ones, and torch.compile without
a compiler backend.
"""

import contextlib
import functools
import time

import torch
import torch._functorch.config
import torch.nn.functional as F

import kernels
from benchmarks import report
from benchmarks.report import median
from course import kernels as lesson
from planning.inputs import H100

SIZES = {
    "llama2-7b": dict(b=2, s=4096, h=4096, ffn=11008, vocab_size=32000, heads=32),
    "gpt2-124m": dict(b=16, s=1024, h=768, ffn=3072, vocab_size=50304, heads=12),
    # Measured by name alone.
    "gpt-1.3b": dict(b=4, s=2048, h=2048, ffn=8192, vocab_size=50304, heads=16),
}
TOY = {"toy": dict(b=2, s=32, h=64, ffn=176, vocab_size=512, heads=4)}
OPERATIONS = list(lesson.examples(1, 8, 8, 8, 8, 1))
# Bytes of all sets of arguments and outputs together: more than a cache holds.
CACHE = 2**28
# Seconds of a copy up to which an operation is held to it.
SMALL = 12e-6
ROUNDS = 7
# The case of what a call costs the host, and its calls.
HOST, CALLS = "host", 300


class Backward:
    """The backward of one operation, which can run many times after one forward."""

    def __init__(self, function, args: tuple, with_gradient: tuple, hooks):
        self.inputs = list(args)
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                self.inputs[i] = a.detach().clone().requires_grad_(i in with_gradient)
        self.wanted = [self.inputs[i] for i in with_gradient]
        with hooks:
            self.outputs = lesson.as_tuple(function(*self.inputs))
        self.grad_outputs = [torch.randn_like(o) for o in self.outputs]

    def __call__(self):
        return torch.autograd.grad(self.outputs, self.wanted, self.grad_outputs, retain_graph=True)


def call(kind: str, function, args: tuple, with_gradient: tuple, direction: str):
    """One call of an operation, forward or backward, as a function of nothing."""
    if direction == "forward":
        return lambda: function(*args)
    hooks = contextlib.nullcontext()
    if kind == "fused":
        # The backward of cross_entropy overwrites the logits that it saved. Autograd does not check
        # what was saved through hooks, so it can run again: its time does not depend on values.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    return Backward(function, args, with_gradient, hooks)


def one_stream(device: str):
    """A context in which everything on a GPU runs on one stream, and not on the default one.

    A CUDA graph is captured on such a stream. Autograd runs a backward on the stream of its
    forward, so forwards and warm-ups must have run there too.
    """
    if device == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())


class Timer:
    """Measures the seconds per call of several functions in turn. On a GPU: in `one_stream`.

    What a function returns is kept until its next call. Freed at once, one block of memory would be
    every call's output, and the cache would hold it.
    """

    def __init__(self, functions: list, device: str):
        self.functions = functions
        self.device = device
        self.outputs = [None] * len(functions)
        # Twice, to compile and to warm up.
        self.call_each()
        self.call_each()
        if device == "cuda":
            torch.cuda.synchronize()
            self.outputs = [None] * len(functions)
            self.repeats = 5
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                for _ in range(self.repeats):
                    self.call_each()

    def call_each(self) -> None:
        for i, function in enumerate(self.functions):
            # The old output is freed after the new one has its memory.
            self.outputs[i] = function()

    def __call__(self) -> float:
        if self.device == "cpu":
            return report.timed(self.call_each) / len(self.functions)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.repeats / len(self.functions)


def copies(moved: int, count: int, device: str) -> list:
    """`count` copies, each of which reads moved / 2 bytes and writes as many, of tensors of its
    own. A kernel copies: it negates each element. Tensor.copy_ calls cudaMemcpyAsync, which moved
    2.4 TB/s on an H100 at most sizes, and a kernel 3.0."""
    functions = []
    for _ in range(count):
        source = torch.randn(moved // 4, device=device).bfloat16()
        functions.append(functools.partial(torch.neg, source, out=torch.empty_like(source)))
    return functions


@functools.cache
def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy of a large tensor."""
    moved = 2**32 if device == "cuda" else 2**24
    timer = Timer(copies(moved, 1, device), device)
    return moved / median([timer() for _ in range(ROUNDS)])


def clone(args: tuple) -> tuple:
    """The arguments with copies of the tensors."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


# --- a case ---------------------------------------------------------------------------------------


def measure(name: str, size: dict, kinds: tuple[str, ...], toy: bool) -> dict:
    """The row of an operation. kinds: fused, PyTorch, compiled and copy."""
    why_not = kernels.why_not()
    if why_not and not toy:
        raise RuntimeError(f"the kernels do not run here ({why_not})")
    device = "cpu" if why_not else "cuda"
    torch.manual_seed(0)
    args, fused, eager, with_gradient = lesson.examples(**size, device=device)[name]
    if name == "cross_entropy":
        # cross_entropy overwrites the logits, so its backward could run only once.
        plain = functools.partial(F.cross_entropy, reduction="none")
        eager = lambda logits, targets: plain(logits.float(), targets)  # noqa: E731
    functions = {"fused": fused}
    if "PyTorch" in kinds:
        functions["PyTorch"] = eager
    if "compiled" in kinds:
        functions["compiled"] = torch.compile(eager, backend="aot_eager" if toy else "inductor")
    row, details = {}, {}
    # A compiled backward must run many times, like the others.
    no_donation = torch._functorch.config.patch(donated_buffer=False)
    with one_stream(device), no_donation:
        for direction in ("forward", "backward") if with_gradient else ("forward",):
            moved = lesson.one_pass(name, fused, args, with_gradient)[direction == "backward"]
            count = 1 if toy else min(8, max(1, -(-CACHE // moved)))
            made = {"copy": copies(moved, count, device)} if "copy" in kinds else {}
            for kind, function in functions.items():
                one = functools.partial(call, kind, function)
                made[kind] = [one(clone(args), with_gradient, direction) for _ in range(count)]
            found = measure_pass(made, moved, device, 1 if toy else ROUNDS)
            row |= {f"{key} {direction}": value for key, value in found.pop("shown").items()}
            details[direction] = found
    return row | details


def measure_pass(functions: dict, moved: int, device: str, rounds: int) -> dict:
    """A direction of an operation. functions: {kind: functions to be timed in turn}."""
    timers = {kind: Timer(of_kind, device) for kind, of_kind in functions.items()}
    times = report.in_turn(timers, rounds)
    seconds = {kind: median([t[kind] for t in times]) for kind in timers}
    found = {"bytes": moved, "µs": {kind: 1e6 * value for kind, value in seconds.items()}}
    if "copy" not in timers:
        over = {"x as long compiled,": report.ratio(times, "compiled", "fused")}
        return found | {"shown": over}
    bandwidth = copy_bandwidth(device)
    found["% of the copy bandwidth"] = {
        kind: 100 * moved / value / bandwidth for kind, value in seconds.items()
    }
    found["small"] = seconds["copy"] <= SMALL
    share = found["% of the copy bandwidth"]["fused"]
    if found["small"]:
        share = 100 * report.ratio(times, "copy", "fused")["median"]
    return found | {"shown": {"% of a copy": share}}


def host_microseconds(toy: bool) -> dict:
    """{operation: of a call, fused and by PyTorch}, at sizes at which the GPU is never late."""
    device = "cpu" if kernels.why_not() else "cuda"
    found = {}
    examples = lesson.examples(1, 8, 64, 64, 64, 4, device=device)
    calls = 3 if toy else CALLS
    for name in ("swiglu", "rms_norm", "rotary", "cross_entropy", "bias_dropout_add"):
        args, fused, eager, _ = examples[name]
        for kind, function in (("fused", fused), ("PyTorch", eager)):
            with torch.no_grad():
                function(*clone(args))
                report.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    function(*args)
                seconds = time.perf_counter() - start
                report.synchronize()
            found[f"µs, {name} {kind}"] = 1e6 * seconds / calls
    return found


def cases_of(stage: str, args) -> dict:
    """{name: a function that measures it}; of gpu.py."""
    sizes = TOY if args.toy else SIZES if args.cases else dict(list(SIZES.items())[:2])
    found = {HOST: functools.partial(host_microseconds, args.toy)}
    for suffix, kinds in (("", ("fused", "PyTorch", "copy")), (", compile", ("fused", "compiled"))):
        for size, shape in sizes.items():
            for name in OPERATIONS:
                one = functools.partial(measure, name, shape, kinds, args.toy)
                found[f"{size} {name}{suffix}"] = one
    return found


def predicted(stage: str, args) -> dict[str, str]:
    """Microseconds on an H100, at the share of its bandwidth that planner.py has for element-wise
    operations."""
    found = {}
    speed = H100.memory_bandwidth * H100.constants.memory
    for size, shape in list(SIZES.items())[:2]:
        for name in OPERATIONS:
            passes = [n * elements(name, **shape) for n in lesson.expected()[name]]
            times = [f"{1e6 * nbytes / speed:,.0f}" for nbytes in passes]
            found[f"{size} {name}"] = f"{' + '.join(times)} µs"
    return found


def elements(name: str, b: int, s: int, h: int, ffn: int, vocab_size: int, heads: int) -> int:
    """Elements of the first argument, to which the bytes in the table of kernels.py refer."""
    scores = b * heads * s * s
    others = dict(swiglu=b * s * ffn, bias_gelu=b * s * ffn, causal_softmax=scores)
    others |= dict(softmax_dropout=scores, cross_entropy=b * s * vocab_size, adamw=ffn * h)
    others["unpermute"] = 2 * b * s * h
    return others.get(name, b * s * h)
