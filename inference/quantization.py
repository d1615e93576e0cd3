"""Weight-only quantisation: a trained model's matrices in 8 or 4 bits, for generation.

A decoding step reads every weight once, for a few tokens. Reading takes longer than computing, so
fewer bytes are faster as well as smaller. Activations x stay in 16 or 32 bits. A matrix W [out, in]
becomes whole numbers Q, and a few scales that give W back, nearly:

    int8 by row      W ≈ s Q                  Q from -128 to 127, one scale s for each row
    int4 by group    W ≈ s (Q - 8) + z        Q from 0 to 15, a scale s and a zero point z for each
                                              g = 32 neighbours in a row

    one group of 4   w  -0.30  0.15  0.00  0.45       s = (0.45 - -0.30) / 15 = 0.05
    (for a picture)  Q      0     9     6    15       z = -0.30 + 8 s = 0.10

An error is at most s / 2, half a step between two numbers. So what matters is how far apart the
largest and the smallest of the numbers are that share a scale. One outlier coarsens its row, or
only its group. 4 bits have 16 numbers instead of 256: they need the smaller groups, and a zero
point, so that no step is wasted where the group has no numbers. (Frantar et al., arXiv 2210.17323,
section 2, call this round-to-nearest.)

    bits for a weight, with s and z in 16 bits      int8   8 + 16 / in       int4   4 + 2 * 16 / g

The matrices of attention and of the MLPs get the number of bits that is asked for. The embedding
and the head have int8 in both: they are read by the row anyway, and a head in 4 bits costs more of
the quality than it saves (docs/results.md). Where they are tied they share one matrix. Norms and
biases stay.

Under tensor parallelism each rank quantises its shard, and has the numbers that one device has: a
row's scale is that of its largest number on any rank, and no group of int4 lies on two ranks.

Naive: make W again, then multiply (`dequantized`). Fast: a kernel that reads the whole numbers and
makes W in registers (`by_kernel`; for CPUs in bfloat16). inference/weight_layouts.py measures them.

    python -m course.quantization
    python generate.py --checkpoint runs/default --weights int4 --prompt "def "

Numbers are those of torchao's Int8WeightOnlyConfig and Int4WeightOnlyConfig (tinygemm), bit for
bit. One difference: from bfloat16 weights torchao computes int4's Q, s and z in bfloat16 too, here
in float32: 2% of the numbers differ by one, and these are nearer.

Not covered: GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) choose Q or scale channels by what
activations pass through; LLM.int8 (arXiv 2208.07339) keeps columns with outliers in 16 bits, for
activations in 8 bits. Experts and weights with adapters beside them (QLoRA, arXiv 2305.14314) are
refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
import tensor_parallel
from base.model_config import FieldError, MoEConfig, divisors
from inference import weight_layouts

GROUP = 32
# What the kernels know.
GROUPS = (32, 64, 128, 256)
# From so many rows of x on, W made once costs less than a kernel that makes it for each few rows.
MANY_ROWS = 16


# --- int8 by row ----------------------------------------------------------------------------------


@dataclass
class Int8Matrix:
    """W ≈ s Q. q: [out, in] int8; scale: [out]"""

    q: Tensor
    scale: Tensor

    @classmethod
    def of(cls, w: Tensor, ranks: dist.ProcessGroup | None = None) -> "Int8Matrix":
        """w: [out, in]. Symmetric: 0 stays 0, and the largest of a row becomes 127 or -128. ranks:
        those that share its columns; a collective."""
        scale = row_scale(w.float(), ranks).to(w.dtype)  # [out]
        q = (w.float() * (1 / scale.float()).unsqueeze(1)).round_().clamp_(-128, 127)
        return cls(q.to(torch.int8), scale)

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale.nbytes

    def new_ones(self, *shape: int) -> Tensor:
        return self.scale.new_ones(*shape)

    def dequantize(self) -> Tensor:
        return self.q.to(self.scale.dtype) * self.scale.unsqueeze(1)

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows of W, for an embedding. numbers: [b, s] -> [b, s, in]"""
        return self.q[numbers].to(self.scale.dtype) * self.scale[numbers].unsqueeze(-1)

    def layouts(self) -> list[Callable]:
        # It reads 16 numbers of a row at a time, and does not stop at the end of one.
        has_kernel = self.shape[1] % 16 == 0 and self.scale.dtype != torch.float64
        return [dequantized, by_kernel] if has_kernel else [dequantized]

    def stored(self, layout: Callable) -> "Int8Matrix":
        """The kernel reads Q as it is."""
        return self

    def multiply(self, x: Tensor) -> Tensor:
        """x (s Q)ᵀ = s (x Qᵀ), and Q is exact in 16 bits. [.., in] -> [.., out]"""
        return F.linear(x, self.q.to(x.dtype)) * self.scale

    def kernel(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]"""
        if len(x) > MANY_ROWS:
            return self.multiply(x)
        return torch.ops.aten._weight_int8pack_mm(x, self.q, self.scale)


def row_scale(w: Tensor, ranks: dist.ProcessGroup | None) -> Tensor:
    """[out, in] -> [out]: the step of each row, which may lie on several ranks."""
    largest = w.abs().amax(1)
    if ranks:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks)
    # Torchao's least scale: a row of zeros has one too.
    return (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps)


# --- int4 by group --------------------------------------------------------------------------------


@dataclass
class Int4Matrix:
    """W ≈ s (Q - 8) + z. q: [out, in / 2] uint8, two numbers in a byte, or the order in which a
    kernel reads them; scale_and_zero: [in / g, out, 2]"""

    q: Tensor
    scale_and_zero: Tensor
    shape: torch.Size
    group: int

    @classmethod
    def of(cls, w: Tensor, group: int = GROUP) -> "Int4Matrix":
        """w: [out, in]. A last group that is not full is filled up with copies of the last column;
        x will be filled up with zeros."""
        groups = fill(w.float(), group, w[:, -1:].float()).unflatten(1, (-1, group))
        scale, zero = group_scale(groups)  # [out, in / g] each
        scale, zero = scale.to(w.dtype), zero.to(w.dtype)
        # What Q = 0 stands for.
        least = (zero.float() - 8 * scale.float()).unsqueeze(2)
        q = ((groups - least) / scale.float().unsqueeze(2)).round_().clamp_(0, 15)
        q = q.flatten(1).to(torch.uint8)
        scale_and_zero = torch.stack((scale.t(), zero.t()), 2).contiguous()
        return cls(pairs_of(q), scale_and_zero, w.shape, group)

    @property
    def nbytes(self) -> int:
        return self.q.nbytes + self.scale_and_zero.nbytes

    def new_ones(self, *shape: int) -> Tensor:
        return self.scale_and_zero.new_ones(*shape)

    def dequantize(self) -> Tensor:
        scale, zero = self.scale_and_zero.permute(2, 1, 0).unsqueeze(-1)  # [out, in / g, 1] each
        q = torch.stack((self.q >> 4, self.q & 15), 2).view(*scale.shape[:2], -1)
        w = (q.to(scale.dtype) - 8) * scale + zero  # [out, in / g, g]
        return w.flatten(1)[:, : self.shape[1]]

    def layouts(self) -> list[Callable]:
        out, dtype = self.shape[0], self.scale_and_zero.dtype
        if self.q.device.type == "cpu":
            has_kernel = out % 16 == 0 and dtype != torch.float64
        else:
            has_kernel = out % 8 == 0 and dtype == torch.bfloat16
        return [dequantized, by_kernel] if has_kernel else [dequantized]

    def stored(self, layout: Callable) -> "Int4Matrix":
        if layout is dequantized:
            return self
        return replace(self, q=in_tiles(self.q))

    def multiply(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        return F.linear(x, self.dequantize())

    def kernel(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]"""
        x = fill(x, self.group)
        on_cpu = x.device.type == "cpu"
        aten = torch.ops.aten
        multiply = aten._weight_int4pack_mm_for_cpu if on_cpu else aten._weight_int4pack_mm
        return multiply(x, self.q, self.group, self.scale_and_zero)


def group_scale(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in / g, g] -> (the step of each group, the middle of its 16 numbers), [out, in / g]"""
    least, most = groups.aminmax(dim=2)
    scale = ((most - least) / 15).clamp(min=1e-6)
    return scale, least + 8 * scale


def fill(x: Tensor, group: int, value: Tensor | None = None) -> Tensor:
    """x: [n, in], with copies of value [n, 1] or zeros up to a multiple of the group."""
    missing = -x.shape[1] % group
    if not missing:
        return x
    value = x.new_zeros(len(x), 1) if value is None else value
    return torch.cat((x, value.expand(-1, missing)), 1)


def pairs_of(q: Tensor) -> Tensor:
    """Two numbers in a byte, the first in the upper half. [out, in] -> [out, in / 2]"""
    return q[:, ::2] << 4 | q[:, 1::2]


def in_tiles(pairs: Tensor) -> Tensor:
    """The order in which the kernel of this device reads the numbers. pairs: [out, in / 2]"""
    if pairs.device.type == "cpu":
        q = torch.stack((pairs >> 4, pairs & 15), 2).flatten(1)  # [out, in]
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(q.int(), 1)
    inner_tiles = next(n for n in (8, 4, 2) if 2 * pairs.shape[1] % (16 * n) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(pairs, inner_tiles)


# --- two ways to multiply: x [.., in], bias [out] or None -> [.., out] ----------------------------


def dequantized(matrix: Int8Matrix | Int4Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    y = matrix.multiply(x)
    return y if bias is None else y + bias


def by_kernel(matrix: Int8Matrix | Int4Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    y = matrix.kernel(x.flatten(0, -2))
    return (y if bias is None else y + bias).unflatten(0, x.shape[:-1])


# --- a model --------------------------------------------------------------------------------------


class QuantizedEmbedding(nn.Module):
    """Replaces gpt.TokenEmbedding, or the lookup of a rank's rows: it reads rows of whole numbers.
    [b, s] -> [b, s, h]"""

    def __init__(self, matrix: Int8Matrix):
        super().__init__()
        self.matrix = matrix

    def forward(self, tokens: Tensor, weight: Tensor | None = None) -> Tensor:
        """weight: unused, the rows are in the matrix."""
        return self.matrix.rows(tokens)


def check(
    config: MoEConfig, kind: str, tp: int = 1, merged: bool = True, group: int = GROUP
) -> None:
    """Raises FieldError for a model or a layout whose weights cannot be quantised here. merged:
    whether its adapters, if any, are in the weights. group: numbers that share a scale in int4."""
    if config.num_experts:
        rule = "not with the experts of this model ({num_experts}), whose weights stay in 16 bits"
        raise FieldError("weights", kind, rule, num_experts=config.num_experts)
    # The columns that row-parallel layers divide.
    most = config.num_heads
    for n in (config.num_heads * config.value_size, config.ffn_hidden_size):
        most = math.gcd(most, n // group if n % group == 0 else 1)
    if kind == "int4" and most % tp:
        rule = f"{{weights}} has a scale for {group} numbers of a row, which must lie on one rank"
        fits = divisors(most, tp, lambda t: tensor_parallel.shares_keys(config, t))
        raise FieldError("tp", tp, rule, fits, weights="int4")
    if not merged:
        rule = "not with adapters beside the weights; one LoRA or IA3, which is merged, would fit"
        raise FieldError("weights", kind, rule)


def apply(model: gpt.GPT, texts: int = 1, kind: str = "int8", group: int = GROUP) -> None:
    """Quantise a model, or a stage of a pipeline, and lay it out for decoding `texts` texts at a
    time. It can then only generate. kind: int8 or int4."""
    make = {"int8": Int8Matrix.of, "int4": lambda w, ranks: Int4Matrix.of(w, group)}[kind]
    weight_layouts.apply(model, texts, partial(quantize, make=make))


def quantize(model: gpt.GPT, make: Callable) -> None:
    """Replace the matrices of a model in their layers for decoding, one at a time: the old
    one goes before the next one comes. make(matrix, ranks): of the blocks' matrices, whose columns
    are whole or shared by ranks."""
    shared = None
    if model.embedding is not None:
        tokens = model.embedding.tokens
        shared = Int8Matrix.of(tokens.weight)
        if isinstance(tokens, tensor_parallel.VocabParallelEmbedding):
            del tokens.weight
            tokens.weight, tokens.lookup = shared.q, QuantizedEmbedding(shared)
        else:
            model.embedding.tokens = QuantizedEmbedding(shared)
    if model.head is not None:
        tied = shared if model.config.tied else None
        replace_matrix(model.head.output, tied or Int8Matrix.of(model.head.output.matrix))
    for layer in model.blocks.modules():
        if isinstance(layer, weight_layouts.DecodeLinear):
            replace_matrix(layer, make(layer.matrix, layer.ranks))


def replace_matrix(layer: weight_layouts.DecodeLinear, matrix: Int8Matrix | Int4Matrix) -> None:
    # A buffer can hold a tensor alone.
    del layer.matrix
    layer.matrix = matrix
    layer.layout = dequantized


def weight_bytes(*stages: gpt.GPT) -> int:
    """Bytes of all parameters, and of what took their place. Shared ones count once."""
    found = {}
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            found[tensor.data_ptr()] = tensor.nbytes
        for module in stage.modules():
            matrix = getattr(module, "matrix", None)
            if isinstance(matrix, Int8Matrix | Int4Matrix):
                found[matrix.q.data_ptr()] = matrix.nbytes
    return sum(found.values())
