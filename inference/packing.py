"""Packing: the weights of a model, laid out for decoding.

A decoding step multiplies each matrix with a few rows, one for each text. Its time is the time to
read the matrix from memory, so the layout of the matrix matters:

    one matrix for several      query, key and value read the same input; one call with the three
                                matrices below each other costs less than three calls
    bias inside                 added in the multiplication, a bias costs nothing
    stored by columns           a CPU (MKL) reads such a matrix faster for 1 row and for 3 to 8
                                rows, and slower for 16 and more

`pack` does this once. Afterwards the model can only generate, not train: its parameters are gone.

    python -m inference.packing        the time of each, on this machine

Not covered: weights in 8 or 4 bits. oneDNN's packed matrices were tried: up to twice as fast for 4
to 16 rows of a large matrix, slower for small matrices and for one row.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt

# with more texts at a time, a matrix stored by rows is faster on a CPU
MAX_TEXTS_BY_COLUMNS = 8


class PackedLinear(nn.Module):
    """Replaces a linear layer. Its bias is added here, also where the layer deferred it."""

    # The block adds a deferred bias itself where there is one.
    bias = None

    def __init__(self, linears: list[nn.Linear], by_columns: bool):
        """linears: layers with the same input. Their parameters are removed."""
        super().__init__()
        self.sizes = [len(linear.weight) for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        matrix = torch.cat([linear.weight.detach() for linear in linears])  # [sum of out, in]
        if by_columns:
            matrix = matrix.t().contiguous().t()
        self.register_buffer("matrix", matrix)
        self.register_buffer("added_bias", torch.cat(biases) if biases else None)
        for linear in linears:
            linear.weight = linear.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [.., in] -> [.., sum of out]"""
        return F.linear(x, self.matrix, self.added_bias)


class PackedSharedInput(PackedLinear):
    """Replaces gpt.SharedInput: several linear layers with the same input, as one matrix."""

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """x: [.., in] -> [.., out] of each layer. linears: unused, they are in the matrix."""
        return super().forward(x).split(self.sizes, -1)


class PackedRMSNorm(nn.Module):
    """x w / √(mean(x²) + ε) in four operations: on CPUs torch has no kernel of its own for it.

    With the norm ‖x‖ = √(Σ x²), this is x (w √h) / √(‖x‖² + ε h), and hypot(a, b) = √(a² + b²)."""

    def __init__(self, norm: nn.RMSNorm):
        super().__init__()
        h = norm.weight.numel()
        self.register_buffer("scaled_weight", norm.weight.detach() * h**0.5)
        self.register_buffer("root_eps", norm.weight.new_tensor((norm.eps * h) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """x: [.., h] -> [.., h]"""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [.., 1]
        return x / length.hypot(self.root_eps) * self.scaled_weight


def pack(model: gpt.GPT, texts: int = 1) -> None:
    """Lay out the weights of a model, or of a stage of it, for decoding `texts` texts at a time.
    A layer that is sharded over ranks, or has experts, stays as it is."""
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    by_columns = on_cpu and texts <= MAX_TEXTS_BY_COLUMNS
    if on_cpu:
        pack_norms(model)
    if type(model.head) is gpt.Head:
        model.head.output = PackedLinear([model.head.output], by_columns)
    for block in model.blocks.values():
        attention = block.attention
        mlp = block.mlp
        if type(attention.project) is gpt.SharedInput:
            layers = [attention.query, attention.key, attention.value]
            attention.project = PackedSharedInput(layers, by_columns)
            attention.output = PackedLinear([attention.output], by_columns)
        if isinstance(mlp, gpt.MLP) and type(mlp.project) is gpt.SharedInput:
            layers = [linear for linear in (mlp.gate, mlp.up) if linear is not None]
            mlp.project = PackedSharedInput(layers, by_columns)
            mlp.down = PackedLinear([mlp.down], by_columns)


def pack_norms(model: gpt.GPT) -> None:
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            is_rms_norm = isinstance(norm, nn.RMSNorm)
            if is_rms_norm and norm.weight.dtype in (torch.float32, torch.float64):
                setattr(parent, name, PackedRMSNorm(norm))


# --------------------------------------------------------------------------------------------------


def main():
    torch.set_num_threads(1)
    compare_storage()
    compare_calls()


def compare_storage() -> None:
    """A matrix stored by rows and by columns."""
    # together they are larger than a cache
    matrices = [torch.randn(3072, 768) for _ in range(24)]
    by_columns = [matrix.t().contiguous().t() for matrix in matrices]
    print(
        f"a [3072, 768] matrix in float32 times n rows, one thread, {torch.__version__}:"
        " microseconds, stored by rows and by columns (medians)"
    )
    for n in (1, 2, 4, 8, 16, 32, 64):
        x = torch.randn(n, 1, 768)
        times_by_rows = []
        times_by_columns = []
        for _ in range(3):
            times_by_rows += [microseconds(F.linear, x, matrix) for matrix in matrices]
            times_by_columns += [microseconds(F.linear, x, matrix) for matrix in by_columns]
        rows = median(times_by_rows)
        columns = median(times_by_columns)
        print(f"    n = {n:>2}  {rows:>8,.0f}{columns:>8,.0f}   ratio {rows / columns:.2f}")


def compare_calls() -> None:
    """Three calls or one, a bias after the multiplication or inside."""
    x = torch.randn(1, 1, 256)
    q, k, v = torch.randn(3, 256, 256)
    bias = torch.randn(256)
    joined = torch.cat((q, k, v))
    calls = {
        "three matrices [256, 256]": lambda: (F.linear(x, q), F.linear(x, k), F.linear(x, v)),
        "one [768, 256]": lambda: F.linear(x, joined),
        "a bias added after": lambda: F.linear(x, q) + bias,
        "inside": lambda: F.linear(x, q, bias),
    }
    times = {name: [] for name in calls}
    for _ in range(2000):
        for name, call in calls.items():
            times[name].append(microseconds(call))
    results = [f"{name} {median(measured):.1f}" for name, measured in times.items()]
    print("microseconds, one row: " + ", ".join(results))


def microseconds(function: Callable, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return (time.perf_counter() - start) * 1e6


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
