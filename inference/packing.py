"""A model laid out for decoding.

A step of decoding multiplies each matrix with a few rows, one for each text, and its time is that
of reading the matrix. Then the layout counts: a CPU (MKL) reads a matrix that is stored by columns
faster for one row and for 3 to 8, and slower for 16 and more; one call for query, key and value
together costs less than three; a bias added inside the multiplication costs nothing. `pack`
arranges all that, once; afterwards a model only generates.

    python -m inference.packing        each of these, timed on this machine
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt


class Packed(nn.Module):
    """Linear layers that read one input, as one matrix; biases that were deferred are added here
    too. x: [.., in] -> [.., out] each"""

    # none is left for what follows
    bias = None

    def __init__(self, linears: list[nn.Linear], together: bool, by_columns: bool):
        super().__init__()
        self.sizes = [len(linear.weight) for linear in linears]
        self.together = together
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        matrix = torch.cat([linear.weight.detach() for linear in linears])  # [sum of out, in]
        self.register_buffer("matrix", matrix.t().contiguous().t() if by_columns else matrix)
        self.register_buffer("added", torch.cat(biases) if biases else None)
        for linear in linears:
            linear.weight = linear.bias = None

    def forward(self, x: Tensor, *linears: nn.Linear):
        y = F.linear(x, self.matrix, self.added)
        return y.split(self.sizes, -1) if self.together else y


class PackedRMSNorm(nn.Module):
    """x w / √(mean x² + ε) in four operations, with √h in the weight: torch's has no kernel of its
    own on CPUs. x: [.., h] -> [.., h]"""

    def __init__(self, norm: nn.RMSNorm):
        super().__init__()
        h = norm.weight.numel()
        self.register_buffer("scaled", norm.weight.detach() * h**0.5)
        self.register_buffer("floor", norm.weight.new_tensor((norm.eps * h) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(self.floor) * self.scaled


def pack(model: gpt.GPT, texts: int = 1) -> None:
    """Lay the matrices of a model out for decoding so many texts at a time, once and for all. What
    is cut over ranks, or has experts, stays as it is."""
    on_cpu = all(x.device.type == "cpu" for x in model.parameters())
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if (
                isinstance(norm, nn.RMSNorm)
                and on_cpu
                and norm.weight.dtype in (torch.float32, torch.float64)
            ):
                setattr(parent, name, PackedRMSNorm(norm))

    def packed(*linears: nn.Linear, together: bool = True) -> Packed:
        return Packed(
            [linear for linear in linears if linear is not None], together, on_cpu and texts <= 8
        )

    if type(model.head) is gpt.Head:
        model.head.output = packed(model.head.output, together=False)
    for block in model.blocks.values():
        attention = block.attention
        mlp = block.mlp
        if type(attention.project) is gpt.SharedInput:
            attention.project = packed(attention.query, attention.key, attention.value)
            attention.output = packed(attention.output, together=False)
        if isinstance(mlp, gpt.MLP) and type(mlp.project) is gpt.SharedInput:
            mlp.project = packed(mlp.gate, mlp.up)
            mlp.down = packed(mlp.down, together=False)


def main():
    import time

    torch.set_num_threads(1)
    # more than caches hold
    matrices = [torch.randn(3072, 768) for _ in range(24)]
    stored = {"rows": matrices, "columns": [m.t().contiguous().t() for m in matrices]}
    print(
        f"a [3072, 768] matrix in float32 times n rows, one thread, {torch.__version__}:"
        " microseconds, stored by rows and by columns (medians)"
    )
    for n in (1, 2, 4, 8, 16, 32, 64):
        x = torch.randn(n, 1, 768)
        seconds = {kind: [] for kind in stored}
        for _ in range(3):
            for kind, some in stored.items():
                for m in some:
                    start = time.perf_counter()
                    F.linear(x, m)
                    seconds[kind].append(time.perf_counter() - start)
        rows, columns = (sorted(s)[len(s) // 2] * 1e6 for s in seconds.values())
        print(f"    n = {n:>2}  {rows:>8,.0f}{columns:>8,.0f}   ratio {rows / columns:.2f}")
    x = torch.randn(1, 1, 256)
    q, k, v = torch.randn(3, 256, 256)
    bias = torch.randn(256)
    joined = torch.cat((q, k, v))
    kinds = {
        "three matrices [256, 256]": lambda: (F.linear(x, q), F.linear(x, k), F.linear(x, v)),
        "one [768, 256]": lambda: F.linear(x, joined),
        "a bias added after": lambda: F.linear(x, q) + bias,
        "inside": lambda: F.linear(x, q, bias),
    }
    seconds = {kind: [] for kind in kinds}
    for _ in range(2000):
        for kind, function in kinds.items():
            start = time.perf_counter()
            function()
            seconds[kind].append(time.perf_counter() - start)
    print(
        "microseconds, one row: "
        + ", ".join(f"{kind} {sorted(s)[len(s) // 2] * 1e6:.1f}" for kind, s in seconds.items())
    )


if __name__ == "__main__":
    main()
