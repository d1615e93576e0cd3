"""Every operation of kernels.py at training sizes, beside PyTorch's own and torch.compile.

    python comparisons/kernels.py [--sizes llama2-7b] [--cases swiglu rotary] [--rounds 20]

Measured are the time, and the share of the copy bandwidth: bytes of one pass / time / bandwidth of
a copy. One pass reads every input once and writes every output once; for causal_softmax and
softmax_dropout half of the reads count, because the upper triangle is not read. The bytes are the
same for all three kinds, so a kind that moves more bytes has a smaller share. The copy bandwidth is
that of a copy of a large tensor in the same run, bytes read and written.

Launching and filling the GPU take microseconds, and no small copy reaches that bandwidth. So a copy
of as many bytes is measured beside each operation, in turn with it and in the same way. Where that
copy takes 12 microseconds or less, its time is the measure of the operation: marked *.

On a GPU a CUDA graph captures many calls, and events time its replays, so that no launch is waited
for. The calls rotate through sets of arguments that together do not fit the cache. The outputs of
each set are kept until its next call, so that writes too go to memory. Forward and backward are
timed separately. All numbers are medians.

kernels.json is written after each case, and cases that it has already stay: a case measured again
replaces the old one. A case that fails takes one line. The figure shows all of the file's cases of
one size. After an access to a wrong address the GPU serves a process no more: it ends, and the same
command goes on with the other cases.

Without a GPU only --toy runs: the same code with PyTorch's own operations as the fused ones, at
sizes whose times mean nothing, and torch.compile without a compiler backend.
"""

import contextlib
import functools
import gc
import itertools
import sys
from datetime import date
from pathlib import Path

import report
import style
import torch
import torch._functorch.config
import torch.nn.functional as F
from report import median, spread

import kernels
from lessons import kernels as lesson

SIZES = {
    "gpt2-124m": dict(b=16, s=1024, h=768, ffn=3072, vocab_size=50304, heads=12),
    "gpt-1.3b": dict(b=4, s=2048, h=2048, ffn=8192, vocab_size=50304, heads=16),
    "llama2-7b": dict(b=2, s=4096, h=4096, ffn=11008, vocab_size=32000, heads=32),
}
TOY = {"toy": dict(b=2, s=32, h=64, ffn=176, vocab_size=512, heads=4)}
CASES = list(lesson.examples(1, 8, 8, 8, 8, 1))
# Bytes of all sets of arguments and outputs together: more than a cache holds.
CACHE = 2**28
# Seconds of a copy up to which an operation is held to it.
SMALL = 12e-6


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
    own."""
    functions = []
    for _ in range(count):
        source = torch.randint(256, (moved // 2,), dtype=torch.uint8, device=device)
        functions.append(functools.partial(torch.empty_like(source).copy_, source))
    return functions


def copy_bandwidth(device: str, rounds: int) -> float:
    """Bytes read and written per second by the device's own copy of a large tensor."""
    moved = 2**32 if device == "cuda" else 2**27
    timer = Timer(copies(moved, 1, device), device)
    return moved / median([timer() for _ in range(rounds)])


def loss_of_float_logits(logits, targets):
    return F.cross_entropy(logits.float(), targets, reduction="none")


def clone(args: tuple) -> tuple:
    """The arguments with copies of the tensors."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def measure(name: str, size: dict, device: str, rounds: int, sets: int | None, backend: str):
    """{direction: `measure_pass`} of an operation.

    sets: how many sets of arguments; None for as many as no cache holds, up to 8. backend: of
    torch.compile.
    """
    torch.manual_seed(0)
    args, fused, eager, with_gradient = lesson.examples(**size, device=device)[name]
    if name == "cross_entropy":
        # cross_entropy overwrites the logits, so its backward could run only once.
        eager = loss_of_float_logits
    kinds = {"fused": fused, "PyTorch": eager, "compiled": torch.compile(eager, backend=backend)}
    rows = {}
    for direction in ("forward", "backward") if with_gradient else ("forward",):
        moved = lesson.one_pass(name, fused, args, with_gradient)[direction == "backward"]
        count = sets or min(8, max(1, -(-CACHE // moved)))

        def calls(kind, direction=direction, count=count):
            one = functools.partial(call, kind, kinds[kind])
            return [one(clone(args), with_gradient, direction) for _ in range(count)]

        functions = {kind: functools.partial(calls, kind) for kind in kinds}
        functions["copy"] = functools.partial(copies, moved, count, device)
        rows[direction] = {"bytes": moved} | measure_pass(functions, device, rounds)
    return rows


def measure_pass(functions: dict, device: str, rounds: int) -> dict:
    """Seconds of each kind and its time over the compiled one's and the copy's. A kind that fails
    is left out, and its error kept. functions: {kind: makes the functions to be timed}."""
    timers = {}
    errors = {}
    for kind, make in functions.items():
        try:
            timers[kind] = Timer(make(), device)
        except Exception as e:
            errors[kind] = report.one_line(e)
            if faulty(device):
                raise
    times = report.in_turn(timers, rounds)

    def ratios(first: str) -> dict:
        others = [kind for kind in timers if kind != first and first in timers]
        return {kind: spread([t[first] / t[kind] for t in times]) for kind in others}

    return {
        "seconds": {kind: spread([t[kind] for t in times]) for kind in timers},
        "share of an equal copy": ratios("copy"),
        "over compiled": ratios("compiled").get("fused"),
        "errors": errors,
    }


def faulty(device: str) -> bool:
    """Whether the GPU serves this process no more, as after an access to a wrong address."""
    if device == "cpu":
        return False
    try:
        torch.ones(1, device=device).item()
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def add_shares(row: dict, bandwidth: float) -> None:
    """Add the shares of the copy bandwidth, and the one that the fused operation is held to."""
    seconds = row["seconds"]
    row["copy bandwidth"] = bandwidth
    row["share of copy bandwidth"] = {
        kind: row["bytes"] / value["median"] / bandwidth for kind, value in seconds.items()
    }
    row["small"] = "copy" in seconds and seconds["copy"]["median"] <= SMALL
    row["share"] = row["share of copy bandwidth"].get("fused")
    if row["small"] and "fused" in seconds:
        row["share"] = row["share of an equal copy"]["fused"]["median"]


def draw(results: dict, figures: Path) -> None:
    """Bars of the shares of the copy bandwidth, at the last of the sizes that was measured.
    results: what kernels.json holds."""
    measured = results["results"]
    size = [title for title in [*TOY, *SIZES] if title in measured][-1]
    rows = {}
    for name in CASES:
        passes = measured[size].get(name, {})
        rows |= {f"{name} {d}": passes[d] for d in ("forward", "backward") if d in passes}
    figure, axes = style.figure(0.4 * len(rows) + 1.4)
    for i, kind in enumerate(("fused", "compiled", "PyTorch")):
        shares = [100 * row["share of copy bandwidth"].get(kind, 0) for row in rows.values()]
        positions = [y + 0.27 * (i - 1) for y in range(len(rows))]
        axes.barh(positions, shares, height=0.25, color=style.COLOURS[kind], label=kind)
    copies = [100 * row["share of copy bandwidth"].get("copy", 0) for row in rows.values()]
    low, high = ([y + end for y in range(len(rows))] for end in (-0.42, 0.42))
    axes.vlines(copies, low, high, color="black", linewidth=1, label="copy of as many bytes")
    style.rows_of(axes, list(rows))
    axes.set(
        xlabel="bytes of one pass / time, % of the bandwidth of a large copy",
        title=f"Sizes of {size}, {results['environment']['device']}, bf16",
    )
    figure.legend(loc="outside lower center", ncols=4)
    style.save(figure, figures / "kernels.svg")


def shown(name: str, direction: str, row: dict) -> dict:
    """The columns of a row of the table: "copy: fused" is the share of an equal copy, * where it is
    the measure."""
    seconds = {kind: value["median"] for kind, value in row["seconds"].items()}
    shares = row["share of copy bandwidth"]
    equal = row["share of an equal copy"].get("fused", {}).get("median")
    cells = {"operation": f"{name} {direction}", "MiB": row["bytes"] / 2**20}
    cells |= {f"{kind}, µs": percent(seconds.get(kind), 1e6) for kind in ("fused", "copy")}
    kinds = "fused", "compiled", "PyTorch"
    cells |= {f"{kind}, % of copy bandwidth": percent(shares.get(kind), 100) for kind in kinds}
    cells["% of copy: fused"] = percent(equal, 100) + "*" * row["small"]
    compiled = (row["over compiled"] or {}).get("median")
    return cells | {"compiled over fused": compiled, "errors": row["errors"] or ""}


def percent(value: float | None, scale: float) -> str:
    """A dash where a kind failed."""
    return "-" if value is None else f"{scale * value:.1f}"


def measure_case(name: str, size: dict, device: str, args, bandwidth: float, table) -> dict:
    """What is kept of one operation: {direction: row}, or {"error": one line}."""
    backend = "aot_eager" if args.toy else "inductor"
    try:
        rows = measure(name, size, device, args.rounds, 1 if args.toy else None, backend)
        for direction, row in rows.items():
            add_shares(row, bandwidth)
            table.row(shown(name, direction, row))
    except Exception as e:
        rows = {"error": report.one_line(e)}
        print(f"{name}: {rows['error']}", flush=True)
    return rows | {"date": date.today().isoformat()}


def run(args, device: str, results: dict) -> None:
    """Add the cases of this process to the results, and write them after each."""
    sizes = TOY if args.toy else SIZES
    pairs = report.missing_first(itertools.product(args.sizes, args.cases), results)
    bandwidth = copy_bandwidth(device, args.rounds)
    print(f"copy: {bandwidth / 1e12:.3f} TB/s, bytes read and written")
    title = None
    for i, (size, name) in enumerate(pairs):
        if report.is_over(args):
            left = ", ".join(f"{size} {name}" for size, name in pairs[i:])
            print(f"no time left for {left}")
            break
        if size != title:
            title, table = size, report.Table()
            print(title)
        rows = measure_case(name, sizes[size], device, args, bandwidth, table)
        results.setdefault(size, {})[name] = rows
        report.write("kernels", {"toy": args.toy, "sizes": sizes, "results": results}, args)
        if faulty(device):
            sys.exit("the GPU serves this process no more; the same command again goes on")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        torch._dynamo.reset()


def main():
    parser = report.arguments(__doc__, rounds=20)
    parser.add_argument("--sizes", nargs="+", metavar="MODEL", default=list(SIZES), choices=SIZES)
    parser.add_argument("--cases", nargs="+", metavar="OPERATION", default=CASES, choices=CASES)
    report.minutes(parser)
    args = report.parse(parser, sizes=list(TOY), rounds=1)
    results = report.earlier("kernels", parser, args)
    why_not = kernels.why_not()
    if why_not and not args.toy:
        sys.exit(
            f"comparisons/kernels.py: the kernels do not run here ({why_not}); --toy runs the same"
            " at tiny sizes with PyTorch's own operations"
        )
    device = "cpu" if why_not else "cuda"
    # A compiled backward must run many times, like the others.
    torch._functorch.config.donated_buffer = False
    with one_stream(device):
        run(args, device, results)
    if results:
        print(f"written: {args.out / 'kernels.json'}")
        draw(report.saved("kernels", args), args.figures)


if __name__ == "__main__":
    main()
