"""Training as others do it, for training_step.py: nanoGPT's GPT-2, a plain Llama, transformers.

    nanoGPT        float32 weights, the forward in bf16 by autocast; LayerNorm, GELU, tied embedding
    plain Llama    weights, gradients and AdamW's state in bf16; RMSNorm, rotary positions, SwiGLU

Both have one matrix for queries, keys and values, attention by scaled_dot_product_attention, the
loss of float32 logits, and AdamW(fused=True). Each block and the loss are compiled, or nothing.

Source of the first: github.com/karpathy/nanoGPT, model.py and train.py. The words here are our own.

`convert` gives the linear layers of a model of this project the FP8 of others:

    torchao tensorwise   convert_to_float8_training: one scale for a tensor, from its maximum now
    torchao rowwise      a scale for each row and for each column
    like nanochat        one scale for a tensor, of any value; inputs, weights and gradients become
                         bytes for each micro-batch; the first product sums with fewer bits

training_step.py compiles each block: the casts are then fused. Biases that the next module adds
(gpt.DeferredBiasLinear) stay there with the last recipe; torchao would add them twice, so it is for
models without biases.

Not covered: weight decay of matrices alone, dropout, checkpoints of activations.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
from base.model_config import GPTConfig
from benchmarks.steps import Random
from run.config import RunConfig


class Block(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        h, ffn, bias = c.hidden_size, c.ffn_hidden_size, not c.llama
        self.heads, self.llama = c.num_heads, c.llama
        self.norm1, self.norm2 = norm(c), norm(c)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias), nn.Linear(h, h, bias)
        # Gate and up in one matrix.
        self.up, self.down = nn.Linear(h, ffn * (1 + c.llama), bias), nn.Linear(ffn, h, bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, a, s, d]
        if self.llama:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        y = self.up(self.norm2(x))
        if self.llama:
            gate, up = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(y, approximate="tanh"))


def norm(c: GPTConfig) -> nn.Module:
    return nn.RMSNorm(c.hidden_size, 1e-5) if c.llama else nn.LayerNorm(c.hidden_size)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Model(nn.Module):
    def __init__(self, c: GPTConfig):
        super().__init__()
        h, s = c.hidden_size, c.seq_length
        self.tokens = nn.Embedding(c.vocab_size, h)
        self.positions = None if c.llama else nn.Embedding(s, h)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = norm(c), nn.Linear(h, c.vocab_size, bias=False)
        if not c.llama:
            self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
        d = h // c.num_heads
        frequencies = 1e4 ** (-torch.arange(0, d, 2, dtype=torch.float32) / d)
        angles = torch.outer(torch.arange(s, dtype=torch.float32), frequencies).repeat(1, 2)
        dtype = self.head.weight.dtype
        self.register_buffer("cos", angles.cos().to(dtype))
        self.register_buffer("sin", angles.sin().to(dtype))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(x, targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TransformersGPT2(nn.Module):
    def __init__(self, c: GPTConfig):
        import transformers

        super().__init__()
        shape = dict(n_embd=c.hidden_size, n_layer=c.num_layers, n_head=c.num_heads)
        shape |= dict(vocab_size=c.vocab_size, n_positions=c.seq_length)
        no_dropout = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        config = transformers.GPT2Config(**shape, **no_dropout, attn_implementation="sdpa")
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # It shifts the targets itself.
        labels = torch.cat((tokens[:, :1], targets), 1)[:, : tokens.shape[1]]
        return self.model(input_ids=tokens, labels=labels, use_cache=False).loss


class Steps:
    """As steps.Steps. config: shape, batch, precision and --compile of a run. plain: weights in the
    precision of the run, as the Llama has them; else in float32 under autocast, as nanoGPT. theirs:
    the model of transformers."""

    def __init__(self, config: RunConfig, device: torch.device, plain=None, theirs: bool = False):
        self.config, c = config, config.model_config()
        self.model_config = c
        plain = c.llama if plain is None else plain
        in_bf16 = config.precision == "bf16"
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if in_bf16 and plain else torch.float32)
        with device:
            self.model = TransformersGPT2(c) if theirs else Model(c)
        torch.set_default_dtype(before)
        if config.compile:
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward)
            self.model.loss = torch.compile(self.model.loss)
        enabled = in_bf16 and not plain
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=enabled)
        options = dict(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        batch = Random(config.global_batch_size, c.seq_length, c.vocab_size).fixed.to(device)
        sizes = config.micro_batch(1)
        self.batches = list(zip(batch.tokens.split(sizes), batch.targets.split(sizes)))

    def step(self, number: int) -> float:
        for tokens, targets in self.batches:
            with self.autocast:
                loss = self.model(tokens, targets) / len(self.batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item() * len(self.batches)


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
        # Sums with fewer bits; in backward with all of them.
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
    return any(name.startswith(f"blocks.{number}.") for number in layers)


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
    # Without a GPU the bytes are decoded, as here.
    config = replace(config, emulate=not torch.cuda.is_available())
    convert_to_float8_training(
        stage, module_filter_fn=lambda _, name: in_layers(name, layers), config=config
    )
