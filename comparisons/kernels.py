"""Every operation of kernels.py at training sizes, beside PyTorch's own and torch.compile.

    python comparisons/kernels.py [--rounds 20] [--only swiglu rotary]

Measured are the time, and the share of the copy bandwidth: bytes of one pass / time / bandwidth of
a copy. One pass reads every input once and writes every output once; for causal_softmax half of
the reads count, because the upper triangle is not read. The bytes are the same for all three kinds,
so a kind that moves more bytes has a smaller share. The copy bandwidth is that of a copy of a large
tensor in the same run, bytes read and written.

On a GPU a CUDA graph captures many calls, and events time its replays, so that no launch is waited
for. The calls rotate through sets of arguments that together do not fit the cache. Forward and
backward are timed separately. All numbers are medians.

Without a GPU only --toy runs: the same code with the references, at sizes whose times mean nothing,
and torch.compile without a compiler backend.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch._functorch.config
import torch.nn.functional as F
from report import median, spread

import kernels
from lessons import kernel_bytes

SIZES = {
    "GPT-2 124M": dict(b=16, s=1024, h=768, ffn=3072, vocab_size=50304, heads=12),
    "GPT 1.3B": dict(b=4, s=2048, h=2048, ffn=8192, vocab_size=50304, heads=16),
    "Llama-2 7B": dict(b=2, s=4096, h=4096, ffn=11008, vocab_size=32000, heads=32),
}
TOY = {"toy": dict(b=2, s=32, h=64, ffn=176, vocab_size=512, heads=4)}
# Bytes of all sets of arguments together: more than a cache holds.
CACHE = 2**28


class Backward:
    """The backward of one operation, which can run many times after one forward."""

    def __init__(self, function, args: tuple, with_gradient: tuple):
        self.inputs = list(args)
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                self.inputs[i] = a.detach().clone().requires_grad_(i in with_gradient)
        self.wanted = [self.inputs[i] for i in with_gradient]
        self.outputs = kernel_bytes.as_tuple(function(*self.inputs))
        self.grad_outputs = [torch.randn_like(o) for o in self.outputs]

    def __call__(self):
        return torch.autograd.grad(self.outputs, self.wanted, self.grad_outputs, retain_graph=True)


def loss_backward(args: tuple):
    """The backward of the fused loss as a function of nothing.

    It overwrites the logits, so the operation itself is called; its time does not depend on their
    values.
    """
    logits, targets = args
    largest, total, _ = torch.ops.fused.cross_entropy_statistics(logits, targets, logits.shape[-1])
    grad = torch.randn_like(total)
    logits = logits.clone()
    return lambda: torch.ops.fused.cross_entropy_gradient(
        logits, targets, largest, total, grad, logits.shape[-1]
    )


def call(name: str, kind: str, function, args: tuple, with_gradient: tuple, direction: str):
    """One call of an operation, forward or backward, as a function of nothing."""
    if direction == "forward":
        return lambda: function(*args)
    if (name, kind) == ("cross_entropy", "fused"):
        return loss_backward(args)
    return Backward(function, args, with_gradient)


def one_stream(device: str):
    """A context in which everything on a GPU runs on one stream, and not on the default one.

    A CUDA graph is captured on such a stream. Autograd runs a backward on the stream of its
    forward, so forwards and warm-ups must have run there too.
    """
    if device == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())


class Timer:
    """Measures the seconds per call of several functions in turn. On a GPU: in `one_stream`."""

    def __init__(self, functions: list, device: str):
        self.functions = functions
        self.device = device
        for f in functions:
            # Twice, to compile and to warm up.
            f()
            f()
        if device == "cuda":
            torch.cuda.synchronize()
            self.repeats = 5
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                for _ in range(self.repeats):
                    for f in functions:
                        f()

    def __call__(self) -> float:
        if self.device == "cpu":
            return report.timed(lambda: [f() for f in self.functions]) / len(self.functions)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.repeats / len(self.functions)


def copy_bandwidth(device: str, size: int, rounds: int) -> float:
    """Bytes read and written per second by the device's own copy of `size` bytes."""
    x, y = torch.randint(256, (2, size), dtype=torch.uint8, device=device)
    timer = Timer([lambda: y.copy_(x)], device)
    return 2 * size / median([timer() for _ in range(rounds)])


def one_pass_bytes(name: str, direction: str, fused, args: tuple, with_gradient: tuple) -> int:
    """Bytes of every input and output of the operation, once."""
    moved = kernel_bytes.measure(fused, args, with_gradient)[0][direction == "backward"]
    if name == "causal_softmax":
        # The upper triangle of each input is not read.
        inputs = 1 if direction == "forward" else 2
        moved -= inputs * args[0].numel() * args[0].element_size() // 2
    return moved


def measure(
    name: str, size: dict, device: str, rounds: int, sets: int | None, backend: str
) -> list[dict]:
    """One row of results for each direction of an operation.

    sets: how many sets of arguments; None for as many as no cache holds, up to 8. backend: of
    torch.compile.
    """
    torch.manual_seed(0)
    args, fused, eager, with_gradient = kernel_bytes.examples(**size, device=device)[name]
    if name == "cross_entropy":
        # cross_entropy overwrites the logits, so its backward could run only once.
        eager = loss_of_float_logits
    kinds = {"fused": fused, "PyTorch": eager, "compiled": torch.compile(eager, backend=backend)}
    rows = []
    for direction in ("forward", "backward") if with_gradient else ("forward",):
        bytes_ = one_pass_bytes(name, direction, fused, args, with_gradient)
        count = sets or min(8, max(1, -(-CACHE // bytes_)))
        timers = {}
        for kind, function in kinds.items():
            calls = [
                call(name, kind, function, clone(args), with_gradient, direction)
                for _ in range(count)
            ]
            timers[kind] = Timer(calls, device)
        times = report.in_turn(timers, rounds)
        rows.append(
            {
                "operation": name,
                "pass": direction,
                "bytes": bytes_,
                "seconds": {kind: spread([t[kind] for t in times]) for kind in timers},
                "over compiled": spread([t["compiled"] / t["fused"] for t in times]),
            }
        )
        del timers, calls
    return rows


def loss_of_float_logits(logits, targets):
    return F.cross_entropy(logits.float(), targets, reduction="none")


def clone(args: tuple) -> tuple:
    """The arguments with copies of the tensors."""
    copies = list(args)
    for i, a in enumerate(args):
        if isinstance(a, torch.Tensor):
            copies[i] = a.clone()
    return tuple(copies)


def draw(results: dict, bandwidth: float, path: Path) -> None:
    """Bars of the shares of the copy bandwidth, at the last of the sizes."""
    size, rows = list(results.items())[-1]
    figure, axes = report.pyplot().subplots(
        figsize=(9, 0.34 * len(rows) + 1.2), layout="constrained"
    )
    colours = {"fused": "#4c78a8", "compiled": "#f2b447", "PyTorch": "#bbbbbb"}
    for i, (kind, colour) in enumerate(colours.items()):
        shares = [100 * row["bytes"] / row["seconds"][kind]["median"] / bandwidth for row in rows]
        positions = [-y - 0.27 * i for y in range(len(rows))]
        axes.barh(positions, shares, height=0.25, color=colour, label=kind)
    axes.axvline(90, color="#333333", linewidth=0.8, linestyle=":")
    axes.set(
        yticks=[-y - 0.27 for y in range(len(rows))],
        yticklabels=[f"{row['operation']} {row['pass']}" for row in rows],
        xlabel="bytes of one pass / time, % of the copy bandwidth",
        title=f"Sizes of {size}, {report.environment()['device']}, bf16",
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def print_header(bandwidth: float) -> None:
    print(f"copy: {bandwidth / 1e12:.3f} TB/s, bytes read and written")
    print(f"{'':>46}{'% of the copy bandwidth':>34}{'time of compiled':>18}")
    print(
        f"{'':>30}{'MiB':>8}{'fused µs':>10}{'fused':>10}{'compiled':>10}{'PyTorch':>10}"
        f"{'over fused':>18}"
    )


def print_row(row: dict) -> None:
    microseconds = row["seconds"]["fused"]["median"] * 1e6
    shares = row["share of copy bandwidth"]
    percent = "".join(f"{100 * shares[kind]:>9.1f}%" for kind in ("fused", "compiled", "PyTorch"))
    print(
        f"{row['operation']:>20} {row['pass']:<9}{row['bytes'] / 2**20:>8.1f}{microseconds:>10.1f}"
        f"{percent}{row['over compiled']['median']:>18.2f}",
        flush=True,
    )


def parse_arguments():
    names = list(kernel_bytes.examples(1, 8, 8, 8, 8, 1))
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", metavar="OPERATION", default=names)
    args = report.parse(parser)
    if unknown := set(args.only) - set(names):
        operations = " ".join(unknown)
        known = ", ".join(names)
        report.refuse(parser, f"--only {operations}: no such operation; there are {known}")
    return args


def main():
    args = parse_arguments()
    library, why_not = kernels.load()
    if not library and not args.toy:
        sys.exit(
            f"comparisons/kernels.py: the kernels do not run here ({why_not}); --toy runs the"
            " references at tiny sizes"
        )
    device = "cuda" if library else "cpu"
    sizes = TOY if args.toy else SIZES
    sets = 1 if args.toy else None
    rounds = 1 if args.toy else args.rounds
    backend = "aot_eager" if args.toy else "inductor"
    # A compiled backward must run many times, like the others.
    torch._functorch.config.donated_buffer = False
    with one_stream(device):
        bandwidth = copy_bandwidth(device, 2**31 if device == "cuda" else 2**26, rounds)
        print_header(bandwidth)
        results = {}
        for title, size in sizes.items():
            results[title] = []
            print(title)
            for name in args.only:
                for row in measure(name, size, device, rounds, sets, backend):
                    row["share of copy bandwidth"] = {
                        kind: row["bytes"] / seconds["median"] / bandwidth
                        for kind, seconds in row["seconds"].items()
                    }
                    results[title].append(row)
                    print_row(row)
                if device == "cuda":
                    torch.cuda.empty_cache()
                torch._dynamo.reset()
    saved = {"copy_bandwidth": bandwidth, "sizes": sizes, "results": results}
    report.save("kernels", saved, args)
    draw(results, bandwidth, args.figures / "kernels.png")


if __name__ == "__main__":
    main()
