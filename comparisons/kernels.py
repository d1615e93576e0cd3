"""Every operation of kernels.py at training sizes: time, and the share of the copy bandwidth that
its bytes came at, beside PyTorch's own operations and `torch.compile` of those.

    python comparisons/kernels.py [--rounds 20] [--only swiglu rotary]        on a GPU
    python comparisons/kernels.py --toy                                       anywhere: the same code at sizes that say nothing, and nothing compiled

Bytes: those of one pass (kernels.Traffic; of causal_softmax half of what is read, for it is never
looked at), for all kinds alike, so a kind that moves more has a smaller share. Copy bandwidth: of
one large tensor to another in the same run, bytes read and written. On a GPU many calls are
captured in a graph and its replays timed with events, so that no launch is waited for; the calls
take turns among sets of arguments that together are larger than the cache. Forward and backward are
timed apart. Medians."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch._functorch.config
import torch.nn.functional as F
from report import median, spread

import kernels

SIZES = {
    "GPT-2 124M": dict(b=16, s=1024, h=768, ffn=3072, vocab_size=50304, heads=12),
    "GPT 1.3B": dict(b=4, s=2048, h=2048, ffn=8192, vocab_size=50304, heads=16),
    "Llama-2 7B": dict(b=2, s=4096, h=4096, ffn=11008, vocab_size=32000, heads=32),
}
TOY = {"toy": dict(b=2, s=32, h=64, ffn=176, vocab_size=512, heads=4)}
# bytes of arguments, all sets together, that no cache holds
CACHE = 2**28


class Backward:
    """One operation's backward, again and again, from a forward that ran once."""

    def __init__(self, function, args: tuple, wanted: tuple):
        self.inputs = [
            a.detach().clone().requires_grad_(i in wanted) if isinstance(a, torch.Tensor) else a
            for i, a in enumerate(args)
        ]
        self.wanted = [self.inputs[i] for i in wanted]
        outputs = function(*self.inputs)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.grads = [torch.randn_like(o) for o in self.outputs]

    def __call__(self):
        return torch.autograd.grad(self.outputs, self.wanted, self.grads, retain_graph=True)


def loss_backward(args: tuple):
    """The fused loss' backward overwrites the logits: the operation itself, whose time does not
    depend on them."""
    logits, targets = args
    largest, total, _ = torch.ops.fused.cross_entropy_statistics(logits, targets, logits.shape[-1])
    grad = torch.randn_like(total)
    logits = logits.clone()
    return lambda: torch.ops.fused.cross_entropy_gradient(
        logits, targets, largest, total, grad, logits.shape[-1]
    )


def calls(name: str, kind: str, function, args: tuple, wanted: tuple, way: str):
    """A function of nothing that runs one call."""
    if way == "backward":
        return (
            loss_backward(args)
            if (name, kind) == ("cross_entropy", "fused")
            else Backward(function, args, wanted)
        )
    return lambda: function(*args)


class Timer:
    """Seconds a call, of several functions in turn."""

    def __init__(self, functions: list, device: str):
        self.functions = functions
        self.device = device
        for f in functions:
            f(), f()
        if device == "cuda":
            torch.cuda.synchronize()
            self.repeats = 5
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
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
    """Bytes read and written, a second, by the device's own copy."""
    x, y = torch.randint(256, (2, size), dtype=torch.uint8, device=device)
    timer = Timer([lambda: y.copy_(x)], device)
    return 2 * size / median([timer() for _ in range(rounds)])


def minimum(name: str, way: str, fused, args: tuple, wanted: tuple) -> int:
    moved = kernels.there_and_back(fused, args, wanted)[0][way == "backward"]
    if name == "causal_softmax":
        moved -= (1 if way == "forward" else 2) * args[0].numel() * args[0].element_size() // 2
    return moved


def measure(
    name: str, size: dict, device: str, rounds: int, sets: int | None, backend: str
) -> list[dict]:
    torch.manual_seed(0)
    args, fused, own, wanted = kernels.examples(**size, device=device)[name]
    # gpt.py's overwrites the logits, and goes back once
    if name == "cross_entropy":
        own = lambda logits, targets: F.cross_entropy(logits.float(), targets, reduction="none")
    rows = []
    for way in ("forward", "backward") if wanted else ("forward",):
        bytes_ = minimum(name, way, fused, args, wanted)
        count = sets or min(8, max(1, -(-CACHE // bytes_)))
        timers = {}
        for kind, function in {
            "fused": fused,
            "PyTorch": own,
            "compiled": torch.compile(own, backend=backend),
        }.items():
            copies = [
                tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
                for _ in range(count)
            ]
            timers[kind] = Timer(
                [calls(name, kind, function, c, wanted, way) for c in copies], device
            )
        times = report.in_turn(timers, rounds)
        seconds = {kind: spread([t[kind] for t in times]) for kind in timers}
        rows.append(
            {
                "operation": name,
                "pass": way,
                "bytes": bytes_,
                "seconds": seconds,
                "over compiled": spread([t["compiled"] / t["fused"] for t in times]),
            }
        )
        del timers
    return rows


def draw(found: dict, bandwidth: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size, rows = list(found.items())[-1]
    figure, axes = plt.subplots(figsize=(9, 0.34 * len(rows) + 1.2), layout="constrained")
    colours = {"fused": "#4c78a8", "compiled": "#f2b447", "PyTorch": "#bbbbbb"}
    for i, (kind, colour) in enumerate(colours.items()):
        shares = [100 * row["bytes"] / row["seconds"][kind]["median"] / bandwidth for row in rows]
        axes.barh(
            [-y - 0.27 * i for y in range(len(rows))], shares, height=0.25, color=colour, label=kind
        )
    axes.axvline(90, color="#333333", linewidth=0.8, linestyle=":")
    axes.set(
        yticks=[-y - 0.27 for y in range(len(rows))],
        yticklabels=[f"{row['operation']} {row['pass']}" for row in rows],
        xlabel="bytes of one pass over the time, % of the copy bandwidth",
        title=f"Sizes of {size}, {report.environment()['device']}, bf16",
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--only", nargs="+", metavar="OPERATION", default=list(kernels.examples(1, 8, 8, 8, 8, 1))
    )
    args = report.parse(parser)
    if unknown := set(args.only) - kernels.examples(1, 8, 8, 8, 8, 1).keys():
        report.refuse(
            parser,
            f"--only {' '.join(unknown)}: no such operation; there are"
            f" {', '.join(kernels.examples(1, 8, 8, 8, 8, 1))}",
        )
    library, why_not = kernels.load()
    if not library and not args.toy:
        sys.exit(
            f"comparisons/kernels.py: the kernels do not run here ({why_not}); --toy runs the"
            " references at tiny sizes"
        )
    rounds, backend = (1, "aot_eager") if args.toy else (args.rounds, "inductor")
    device = "cuda" if library else "cpu"
    # a compiled backward, too, goes back many times
    torch._functorch.config.donated_buffer = False
    bandwidth = copy_bandwidth(device, 2**31 if device == "cuda" else 2**26, rounds)
    print(
        f"copy: {bandwidth / 1e12:.3f} TB/s, bytes read and"
        f" written\n{'':>46}{'% of the copy bandwidth':>34}{'time of compiled':>18}\n"
        f"{'':>30}{'MiB':>8}{'fused µs':>10}{'fused':>10}{'compiled':>10}{'PyTorch':>10}{'over fused':>18}"
    )
    found = {}
    for title, size in (TOY if args.toy else SIZES).items():
        found[title] = []
        print(title)
        for name in args.only:
            for row in measure(name, size, device, rounds, 1 if args.toy else None, backend):
                shares = {
                    kind: row["bytes"] / row["seconds"][kind]["median"] / bandwidth
                    for kind in row["seconds"]
                }
                found[title].append(row | {"share of copy bandwidth": shares})
                print(
                    f"{name:>20}"
                    f" {row['pass']:<9}{row['bytes'] / 2**20:>8.1f}{row['seconds']['fused']['median'] * 1e6:>10.1f}"
                    + "".join(f"{100 * shares[k]:>9.1f}%" for k in ("fused", "compiled", "PyTorch"))
                    + f"{row['over compiled']['median']:>18.2f}",
                    flush=True,
                )
            if device == "cuda":
                torch.cuda.empty_cache()
            torch._dynamo.reset()
    report.save(
        "kernels",
        {"copy_bandwidth": bandwidth, "sizes": TOY if args.toy else SIZES, "results": found},
        args,
    )
    draw(found, bandwidth, args.figures / "kernels.png")


if __name__ == "__main__":
    main()
