"""The weights of a model, laid out for decoding.

A decoding step multiplies each matrix W [out, in] with a few rows x [n, in], one for each text:

    one matrix for several      query, key and value read the same input; one call with the three
                                matrices below each other costs less than three calls
    bias inside                 added by the packed layer, also where the block would add it later
    weights first               yᵀ = W xᵀ by oneDNN in place of y = x Wᵀ, for several texts in
                                float32 on a CPU: half of the time from some 16 rows on

The layouts differ in rounding alone. After `pack` the model can only generate, not train: its
parameters are gone. Weights in 8 or 4 bits are inference/quantization.py's.

    python generate.py --checkpoint runs/default --prompt-file prompts.jsonl --batch-size 16

Not covered: oneDNN's packed matrices (its own order of the weights) were tried too: for 16 rows
they take 1.2 times the time of weights first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adapters
import gpt

# --- two ways to multiply: matrix [out, in], x [.., in], bias [out] or None -> [.., out] ----------


def by_rows(matrix: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, matrix, bias)


def weights_first(matrix: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise
    y = linear(matrix, x.flatten(0, -2), None, "none", [], "").t().contiguous()  # [n, out]
    y = y if bias is None else y.add_(bias)
    return y.unflatten(0, x.shape[:-1])


class PackedLinear(nn.Module):
    """Replaces a linear layer. Its bias is added here, also where the layer deferred it."""

    # The block adds a deferred bias itself where there is one.
    bias = None

    def __init__(self, linears: list[nn.Linear]):
        """linears: layers with the same input. Their parameters are removed."""
        super().__init__()
        self.sizes = [len(linear.weight) for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        matrix = torch.cat([linear.weight.detach() for linear in linears])  # [sum of out, in]
        self.layout = by_rows
        self.register_buffer("matrix", matrix)
        self.register_buffer("added_bias", torch.cat(biases) if biases else None)
        for linear in linears:
            linear.weight = linear.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [.., in] -> [.., sum of out]"""
        return self.layout(self.matrix, x, self.added_bias)


class PackedSharedInput(PackedLinear):
    """Replaces gpt.SharedInput: several linear layers with the same input, as one matrix."""

    def forward(self, x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """x: [.., in] -> [.., out] of each layer. linears: unused, they are in the matrix."""
        return super().forward(x).split(self.sizes, -1)


# --- a model --------------------------------------------------------------------------------------


def pack(model: gpt.GPT, texts: int = 1) -> None:
    """Lay out the weights of a model, or of a stage of it, for decoding `texts` texts at a time.
    A layer that is sharded over ranks, or has experts or adapters, stays as it is."""
    pack_linears(model)
    for layer in packed_layers(model):
        on_cpu = layer.matrix.device.type == "cpu" and layer.matrix.dtype == torch.float32
        if texts > 1 and on_cpu and torch.backends.mkldnn.is_available():
            layer.layout = weights_first


def packed_layers(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def pack_linears(model: gpt.GPT) -> None:
    if type(model.head) is gpt.Head:
        model.head.output = PackedLinear([model.head.output])
    for block in model.blocks.values():
        attention = block.attention
        mlp = block.mlp
        if type(attention.project) is gpt.SharedInput and not has_adapter(attention):
            attention.project = PackedSharedInput([attention.query, attention.key, attention.value])
            attention.output = PackedLinear([attention.output])
        is_whole = isinstance(mlp, gpt.MLP) and type(mlp.project) is gpt.SharedInput
        if is_whole and not has_adapter(mlp):
            layers = [linear for linear in (mlp.gate, mlp.up) if linear is not None]
            mlp.project = PackedSharedInput(layers)
            mlp.down = PackedLinear([mlp.down])


def has_adapter(part: nn.Module) -> bool:
    """Whether LoRA, IA3 or a bottleneck adapter works inside attention or an MLP, or after it. They
    read the layers one by one, and before their bias."""
    return any(adapters.is_adapter(f".{name}") for name, _ in part.named_parameters())
