"""Weight layouts: the weights of a model, laid out for decoding.

A decoding step multiplies each matrix W [out, in] with a few rows x [n, in], one for each text:

    one matrix for several      query, key and value read the same input; one call with the three
                                matrices below each other costs less than three calls
    bias inside                 added by the layer, also where the block would add it later
    a layout for each matrix    on a CPU, the fastest of four ways to get y [n, out]

        by rows            y  = x Wᵀ     torch's own layout
        by columns         y  = x Wᵀ     W is stored transposed
        columns in oneDNN  y  = x Wᵀ     the same by oneDNN instead of MKL; float32 alone
        weights in oneDNN  yᵀ = W xᵀ     with n as the inner dimension; float32 alone

A matrix library is made for two large factors. With few rows one factor is narrow, and each of the
four calls runs another kernel: none is the fastest for every shape, number of rows and processor.
So `apply` measures them once, with the rows that will come. The layouts differ in rounding alone.

After `apply` the model can only generate, not train: its parameters are gone.

    python -m inference.weight_layouts        the time of each, on this machine

Weights in 8 or 4 bits are inference/quantization.py's, with layouts of their own.

Not covered: oneDNN's packed matrices (its own order of the weights) were tried as a fifth layout:
for 16 rows they take 1.2 times the time of `weights in oneDNN`.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
import tensor_parallel
from base import cpu
from base.device_queue import Moment
from base.model_config import GPTConfig
from families import LatentAttention
from finetune import adapter_layers

# A layout other than the first takes at most this share of its time.
CLEARLY_FASTER = 0.95
# Enough matrices to be measured that a cache does not hold them all.
SAMPLE_BYTES = 64 * 2**20
# At least three rounds.
SECONDS_TO_MEASURE = 0.5


# --- four ways to multiply: matrix [out, in], x [.., n, in], bias [out] or None -> [.., n, out] ---


def by_rows(matrix: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, matrix, bias)


def by_columns(matrix: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, matrix, bias)


def columns_in_onednn(matrix: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, matrix, bias, "none", [], "")


def weights_in_onednn(matrix: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise(matrix, x.flatten(0, -2), None, "none", [], "")
    y = product.t().contiguous()  # [n, out]
    y = y if bias is None else y.add_(bias)
    return y.unflatten(0, x.shape[:-1])


def layouts_for(matrix: Tensor) -> list[Callable]:
    """What `apply` chooses from; the first one where nothing is clearly faster. matrix: or a
    quantised one (inference/quantization.py), which knows its own."""
    if not isinstance(matrix, Tensor):
        return matrix.layouts()
    layouts = [by_rows]
    if matrix.device.type == "cpu":
        layouts.append(by_columns)
        if matrix.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            layouts += [columns_in_onednn, weights_in_onednn]
    return layouts


def stored(matrix: Tensor, layout: Callable) -> Tensor:
    if not isinstance(matrix, Tensor):
        return matrix.stored(layout)
    by_column = layout in (by_columns, columns_in_onednn)
    return matrix.t().contiguous().t() if by_column else matrix


class DecodeLinear(nn.Module):
    """Replaces a linear layer. Its bias is added here, also where the layer deferred it."""

    # The block adds a deferred bias itself where there is one.
    bias = None

    def __init__(self, linears: list[nn.Linear], ranks: dist.ProcessGroup | None = None):
        """linears: layers with the same input. Their parameters are removed. ranks: of a
        row-parallel layer, those that share its columns; the block adds its bias to their sum."""
        super().__init__()
        self.ranks = ranks
        self.sizes = [len(linear.weight) for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        biases = [] if ranks else biases
        matrix = torch.cat([linear.weight.detach() for linear in linears])  # [sum of out, in]
        self.layout = by_rows
        self.register_buffer("matrix", matrix)
        self.register_buffer("added_bias", torch.cat(biases) if biases else None)
        for linear in linears:
            linear.weight = None
            linear.bias = linear.bias if ranks else None

    def set_layout(self, layout: Callable) -> None:
        self.layout = layout
        self.matrix = stored(self.matrix, layout)

    def forward(self, x: Tensor, weight: None = None) -> Tensor:
        """x: [.., in] -> [.., sum of out]. weight: of a row-parallel layer, which has none left."""
        return self.layout(self.matrix, x, self.added_bias)


class DecodeProjections(DecodeLinear):
    """Replaces gpt.ProjectTogether: several linear layers with the same input, as one matrix."""

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """x: [.., in] -> [.., out] of each layer. linears: unused, they are in the matrix."""
        return super().forward(x).split(self.sizes, -1)


class DecodeRMSNorm(nn.Module):
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


class DecodeGELU(nn.Module):
    """gpt.GELU, whose bias has been added (base/cpu.py)."""

    def __init__(self, like: Tensor):
        super().__init__()
        self.register_buffer("factor", like.new_tensor(cpu.GELU_FACTOR))

    def forward(self, x: Tensor, bias: None) -> Tensor:
        return cpu.gelu_forward(x, self.factor)


def apply(model: gpt.GPT, texts: int = 1, quantize: Callable | None = None) -> None:
    """Lay out the weights of a model, or of a stage of it, for decoding `texts` texts at a time.
    A layer that is sharded over ranks, or has experts or adapters, stays as it is. quantize(model):
    replaces the matrices (inference/quantization.py), also those of sharded layers."""
    replace_linears(model, sharded=quantize is not None)
    if quantize:
        quantize(model)
    weight = next(model.parameters())
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64):
        replace_pointwise(model, weight)
    # Matrices that have the same layouts choose together.
    alike = defaultdict(list)
    for module in model.modules():
        if isinstance(module, DecodeLinear):
            alike[tuple(layouts_for(module.matrix))].append(module)
    for layers in alike.values():
        choose_layouts(layers, texts)


def replace_linears(model: gpt.GPT, sharded: bool = False) -> None:
    """sharded: also the layers of tensor parallelism, whose f is the identity here."""
    project = (gpt.ProjectTogether, *([tensor_parallel.ColumnParallelInput] * sharded))
    if type(model.head) in (gpt.Head, *([tensor_parallel.VocabParallelHead] * sharded)):
        model.head.output = DecodeLinear([model.head.output])
    for block in model.blocks.values():
        attention = block.attention
        mlp = block.mlp
        if type(attention.project) in project and not has_adapter(attention):
            linears = [attention.query, attention.key, attention.value]
            if isinstance(attention, LatentAttention):
                # Steps absorb the other two (kv_cache.CachedLatents).
                linears = [attention.query]
            attention.project = DecodeProjections(linears)
            attention.output = decode_output(attention.output)
        is_whole = isinstance(mlp, gpt.MLP) and type(mlp.project) in project
        if is_whole and not has_adapter(mlp):
            layers = [linear for linear in (mlp.gate, mlp.up) if linear is not None]
            mlp.project = DecodeProjections(layers)
            mlp.down = decode_output(mlp.down)


def decode_output(linear: nn.Module) -> nn.Module:
    """What replaces the last layer of attention or of an MLP. A row-parallel one keeps its sum."""
    if not isinstance(linear, tensor_parallel.RowParallelLinear):
        return DecodeLinear([linear])
    linear.linear = DecodeLinear([linear], ranks=linear.group)
    return linear


def has_adapter(part: nn.Module) -> bool:
    """Whether LoRA, IA3 or a bottleneck adapter works inside attention or an MLP, or after it. They
    read the layers one by one, and before their bias."""
    return any(adapter_layers.is_adapter(f".{name}") for name, _ in part.named_parameters())


def replace_pointwise(model: gpt.GPT, like: Tensor) -> None:
    for parent in list(model.modules()):
        # It reads the weights of its norms itself.
        if isinstance(parent, tensor_parallel.ParallelHeadNorms):
            continue
        for name, child in parent.named_children():
            if type(child) is nn.RMSNorm:
                setattr(parent, name, DecodeRMSNorm(child))
            # Elsewhere a bias is left for the activation to add.
            if isinstance(parent, gpt.MLP) and isinstance(parent.project, DecodeProjections):
                if type(child) is gpt.GELU:
                    setattr(parent, name, DecodeGELU(like))


# --- the choice -----------------------------------------------------------------------------------


@torch.no_grad()
def choose_layouts(layers: list[DecodeLinear], rows: int) -> None:
    """Give each layer the layout in which matrices of its shape take the least time in a step with
    `rows` rows. layers: in the order of a step."""
    layouts = layouts_for(layers[0].matrix)
    if rows == 1:
        # In a step, its calls take longer than they do alone.
        layouts = [x for x in layouts if x not in (columns_in_onednn, weights_in_onednn)]
    choice = {}
    if len(layouts) > 1:
        for shape, seconds in measure(sample_of(layers), layouts, rows).items():
            best = min(seconds, key=seconds.get)
            clear = seconds[best] < CLEARLY_FASTER * seconds[layouts[0]]
            choice[shape] = best if clear else layouts[0]
    for layer in layers:
        layer.set_layout(choice.get(layer.matrix.shape, layouts[0]))


def sample_of(layers: list[DecodeLinear]) -> list[DecodeLinear]:
    """Some layers of each shape."""
    seen = Counter()
    sample = []
    for layer in layers:
        shape = layer.matrix.shape
        if seen[shape] * layer.matrix.nbytes < SAMPLE_BYTES:
            sample.append(layer)
        seen[shape] += 1
    return sample


def measure(layers: list[DecodeLinear], layouts: list[Callable], rows: int) -> dict:
    """{shape: {layout: seconds}}, the least of some rounds. The layers run one after the other as
    in a step, so that a cache holds as much of them as then."""
    seconds = defaultdict(lambda: dict.fromkeys(layouts, math.inf))
    matrices = {layout: [stored(layer.matrix, layout) for layer in layers] for layout in layouts}
    inputs = [matrix.new_ones(rows, matrix.shape[1]) for matrix in matrices[layouts[0]]]
    end = time.perf_counter() + SECONDS_TO_MEASURE
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for layout in layouts:
            times = Counter()
            for layer, matrix, x in zip(layers, matrices[layout], inputs):
                times[matrix.shape] += time_of(layout, matrix, x, layer.added_bias)
            for shape, total in times.items():
                seconds[shape][layout] = min(seconds[shape][layout], total)
    return seconds


def time_of(layout: Callable, matrix, *args) -> float:
    """Seconds; infinite where this build of PyTorch or this processor has no such operation."""
    device = args[0].device
    start = Moment(device)
    try:
        layout(matrix, *args)
    except (AttributeError, RuntimeError):
        return math.inf
    end = Moment(device)
    end.wait()
    return end.seconds_since(start)


# --------------------------------------------------------------------------------------------------


def main():
    torch.set_num_threads(1)
    config = GPTConfig(num_layers=2, hidden_size=768, num_heads=12, seq_length=64, vocab_size=8192)
    print(
        f"a GPT of h 768 in float32, one thread, {torch.__version__}: microseconds to multiply each"
        " matrix with n rows"
    )
    model = gpt.GPT(config).requires_grad_(False)
    replace_linears(model)
    layers = [module for module in model.modules() if isinstance(module, DecodeLinear)]
    layouts = layouts_for(layers[0].matrix)
    print(" " * 22 + "".join(f"{layout.__name__:>20}" for layout in layouts))
    with torch.inference_mode():
        for n in (1, 4, 16, 64):
            for shape, seconds in measure(layers, layouts, n).items():
                count = sum(layer.matrix.shape == shape for layer in layers)
                times = "".join(f"{seconds[layout] / count * 1e6:>20,.0f}" for layout in layouts)
                print(f"n {n:>2}  {list(shape)!s:>16}{times}")


if __name__ == "__main__":
    main()
