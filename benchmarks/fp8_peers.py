"""FP8 training by others, in a model of this project: torchao, and a recipe like nanochat's.

    convert(stage, "torchao tensorwise", layers)

    torchao tensorwise   convert_to_float8_training: one scale for a tensor, from its maximum now
    torchao rowwise      a scale for each row and for each column
    like nanochat        one scale for a tensor, of any value; inputs, weights and gradients become
                         bytes for each micro-batch; the first product sums with fewer bits

The names are those of cases of training_step.py, which compiles each block: the casts are then
fused. Biases that the next module adds (gpt.DeferredBiasLinear) stay there with the last recipe;
torchao would add them twice, so it is for models without biases. torchao's package must be there.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt

PEERS = ("torchao tensorwise", "torchao rowwise", "like nanochat")


def as_bytes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(bytes, 1 / scale), the scale from the maximum of x"""
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-largest, largest).to(dtype), 1 / scale


def by_columns(q: Tensor) -> Tensor:
    """The same matrix, its columns contiguous"""
    return q.t().contiguous().t()


class _Matmul(torch.autograd.Function):
    """x: [tokens, in], w: [out, in] -> x wᵀ"""

    @staticmethod
    def forward(ctx, x, w):
        q_x, inverse_x = as_bytes(x, torch.float8_e4m3fn)
        q_w, inverse_w = as_bytes(w, torch.float8_e4m3fn)
        ctx.save_for_backward(q_x, inverse_x, q_w, inverse_w)
        # sums with fewer bits; in backward with all of them
        fast = dict(out_dtype=x.dtype, use_fast_accum=True)
        return torch._scaled_mm(q_x, q_w.t(), inverse_x, inverse_w, **fast)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        q_x, inverse_x, q_w, inverse_w = ctx.saved_tensors
        q_dy, inverse_dy = as_bytes(dy, torch.float8_e5m2)
        dx = torch._scaled_mm(q_dy, by_columns(q_w), inverse_dy, inverse_w, out_dtype=dy.dtype)
        left = q_dy.t().contiguous()
        dw = torch._scaled_mm(left, by_columns(q_x), inverse_dy, inverse_x, out_dtype=dy.dtype)
        return dx, dw


class LikeNanochat(nn.Linear):
    """nn.Linear, or gpt.DeferredBiasLinear, which adds no bias."""

    deferred = False

    def forward(self, x: Tensor) -> Tensor:
        y = _Matmul.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)
        return y if self.bias is None or self.deferred else y + self.bias


def in_layers(name: str, layers: range) -> bool:
    """Whether a module's name, blocks.7.attention.query, is of one of these layers."""
    parts = name.split(".")
    return parts[0] == "blocks" and len(parts) > 1 and int(parts[1]) in layers


def convert(stage: gpt.GPT, peer: str, layers: range) -> None:
    """Give the linear layers of these layers the FP8 of a peer; in place."""
    if peer == "like nanochat":
        for name, module in stage.named_modules():
            if isinstance(module, nn.Linear) and in_layers(name, layers):
                module.deferred = isinstance(module, gpt.DeferredBiasLinear)
                module.__class__ = LikeNanochat
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(peer.removeprefix("torchao "))
    # without a GPU the bytes are decoded, as here
    config = replace(config, emulate=not torch.cuda.is_available())
    convert_to_float8_training(
        stage, module_filter_fn=lambda _, name: in_layers(name, layers), config=config
    )
