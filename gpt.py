"""A decoder-only transformer on one device: GPT-2, GPT-3 and Llama-2 in one file, with nothing
parallel in it.

    tokens [b, s] -> Embedding -> Block x L -> Head -> logits [b, s, V]

    Block:  x = x + dropout(attention(norm(x)) + bias)              pre-norm, as in GPT-2 (Radford et al. 2019)
            x = x + dropout(mlp(norm(x)) + bias)

One `GPTConfig` covers both families: LayerNorm, GELU, learned positions, biases and tied embeddings
make a GPT; RMSNorm, SwiGLU, rotary positions and grouped-query attention make a Llama (Touvron et
al. 2023).

The techniques in the other files are functions applied to this finished model from outside. The
model makes them only these concessions: embedding, blocks and head can be separated; `blocks.7...`
is the layer's number in the whole model, whichever blocks are present; the number of heads is read
off the tensors (`view(b, s, -1, head_dim)`); query, key, value, gate and up are separate
parameters, and what reads one input is called together (`SharedInput`); and core attention, its
probabilities, the rotation, the activation, and bias + dropout + residual are submodules. The MLPs
with experts are in moe.py.

Shapes: b micro-batch, s sequence, h hidden, a heads, d = h / a, L layers, V vocabulary.

    python gpt.py        every preset: parameters, counted without allocating them, beside the published number

Left out, and found in Megatron-LM: ALiBi and T5 positions, sliding windows, packed variable-length
sequences."""

import hashlib
import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.presets import PRESETS


def divisors(n: int, near: int) -> list[int]:
    """The three divisors of n, of those up to 4096, that are nearest to a number: for error
    messages."""
    return sorted(
        sorted((d for d in range(1, min(n, 4096) + 1) if n % d == 0), key=lambda d: abs(d - near))[
            :3
        ]
    )


# what the value of a field may be, and how a message says it
KINDS = {
    int: (int, "an integer"),
    float: (float | int, "a number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
    float | None: (float | int | None, "a number, or null"),
}
EXPERT_FIELDS = (
    "expert_every",
    "router",
    "router_topk",
    "router_temperature",
    "capacity_factor",
    "aux_loss",
    "z_loss",
)


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Raises ValueError, naming the field, for shapes that cannot be
    built."""

    num_layers: int
    hidden_size: int
    num_heads: int
    # 0: as many as heads; fewer is grouped-query attention
    num_kv_heads: int = 0
    # 0: 4h
    ffn_hidden_size: int = 0
    # the longest sequence
    seq_length: int = 1024
    vocab_size: int = 50257
    # embedding, attention probabilities and both residual branches
    dropout: float = 0.0
    # RMSNorm, SwiGLU, rotary positions, no biases, untied embeddings
    llama: bool = False
    # explicit: scores, softmax, dropout, context; fused: one kernel, the default without dropout
    attention: str = ""
    norm_eps: float = 1e-5
    rotary_base: float = 10000.0
    # MLPs of which each token goes through some (moe.py); 0: one MLP, for all
    num_experts: int = 0
    # every so many layers, the last of them has experts
    expert_every: int = 1
    # or topk
    router: str = "sinkhorn"
    # experts of a token
    router_topk: int = 1
    # of sinkhorn's plan: the lower, the evener the load; 1 as in Megatron-LM
    router_temperature: float = 0.02
    # an expert takes so many times its even share of a micro-batch's tokens, no more; 0: all that
    # come
    capacity_factor: float = 0.0
    # coefficient of the load-balancing loss; the default is 0.01 with router topk, else 0
    aux_loss: float | None = None
    # .. of the router's z-loss; 0.001 with router topk, else 0
    z_loss: float | None = None

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            kind, said = KINDS[field.type]
            # Python's bool is an int
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"{field.name} {value!r}: must be {said}")
        for field, default in (
            ("num_kv_heads", self.num_heads),
            ("ffn_hidden_size", 4 * self.hidden_size),
            ("attention", "explicit" if self.dropout else "fused"),
        ):
            if not getattr(self, field):
                object.__setattr__(self, field, default)
        # what has no meaning is as if it had not been said
        if not self.num_experts:
            for field in EXPERT_FIELDS:
                object.__setattr__(self, field, type(self).__dataclass_fields__[field].default)
        for field, default in (("aux_loss", 0.01), ("z_loss", 0.001)):
            if getattr(self, field) is None:
                object.__setattr__(
                    self, field, default if self.num_experts and self.router == "topk" else 0.0
                )
        for field in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "ffn_hidden_size",
            "seq_length",
            "vocab_size",
        ):
            power = 16 if field == "num_layers" else 31
            if not 1 <= getattr(self, field) < 2**power:
                raise ValueError(
                    f"{field} {getattr(self, field)}: must be at least 1 and below 2^{power}"
                )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads {self.num_heads}: must divide hidden_size {self.hidden_size}; "
                f"{divisors(self.hidden_size, self.num_heads)} would"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads}: must divide num_heads {self.num_heads}; "
                f"{divisors(self.num_heads, self.num_kv_heads)} would"
            )
        if self.llama and self.head_dim % 2:
            raise ValueError(
                f"num_heads {self.num_heads}: rotary positions need an even head size, "
                f"not hidden_size / num_heads = {self.head_dim}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout}: must be at least 0 and below 1")
        # beyond these a float32 is 0 or infinite somewhere in the model; NaN fails too
        for field, least, most in (("norm_eps", 1e-30, 1), ("rotary_base", 1, 1e30)):
            if not least <= getattr(self, field) <= most:
                raise ValueError(
                    f"{field} {getattr(self, field)}: must be from {least:g} to {most:g}"
                )
        if self.attention not in ("explicit", "fused"):
            raise ValueError(f"attention {self.attention}: must be explicit or fused")
        if self.attention == "fused" and self.dropout > 0:
            raise ValueError(
                f"attention fused: never sees the probabilities that dropout {self.dropout} would"
                " mask; use attention explicit, or dropout 0"
            )
        self.check_experts()

    def check_experts(self) -> None:
        if not 0 <= self.num_experts < 2**16:
            raise ValueError(
                f"num_experts {self.num_experts}: must be at least 0 and below 2^16; 0 is one MLP"
                " for all tokens"
            )
        if self.router not in ("sinkhorn", "topk"):
            raise ValueError(f"router {self.router}: must be sinkhorn or topk")
        for field, most, what in (
            ("expert_every", self.num_layers, "num_layers"),
            ("router_topk", self.num_experts or 1, "num_experts"),
        ):
            if not 1 <= getattr(self, field) <= most:
                raise ValueError(f"{field} {getattr(self, field)}: must be from 1 to {what} {most}")
        if not 1e-3 <= self.router_temperature <= 1:
            raise ValueError(
                f"router_temperature {self.router_temperature}: must be from 0.001 to 1"
            )
        for field in ("capacity_factor", "aux_loss", "z_loss"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} {getattr(self, field)}: must be at least 0 and finite")
        if self.router == "sinkhorn" and self.aux_loss:
            raise ValueError(
                f"aux_loss {self.aux_loss}: router sinkhorn evens the load by its plan, and this"
                " loss hardly has a gradient there; aux_loss 0 would fit, or router topk"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def expert_layers(self) -> range:
        """The layers with experts: with expert_every 2, those numbered 1, 3, 5 and so on."""
        return range(
            self.expert_every - 1, self.num_layers if self.num_experts else 0, self.expert_every
        )


# --------------------------------------------------------------------------------------------------
# Dropout without a random-number generator. Whether an element is dropped is a hash of who it is:
# (seed, step, sample) through
# `dropout_key`, the layer through `layer_key`, the site in it through `salt` (0 embedding, 1
# attention, 2 after attention, 3 after
# the MLP), then its coordinates. Nothing is stored or advanced, so each rank can compute just its
# own slice, recomputation gives the
# same mask, and CPU, GPU and compiled code agree bit for bit.


def mix(x: Tensor) -> Tensor:
    """Scramble int32 values in place: two multiplications between xor-shifts (constants: C.
    Wellons, lowbias32)."""
    # >> copies the sign bit; the mask makes it the unsigned shift
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def dropout_key(seed: int, step: int, samples: Tensor) -> Tensor:
    """One int32 key per sample. samples: [b] global sample numbers (int64). Returns [b] int32."""
    key = torch.full_like(samples, seed & 0x7FFFFFFF, dtype=torch.int32)
    for word in (step & 0x7FFFFFFF, (samples & 0x7FFFFFFF).int(), (samples >> 31).int()):
        key = mix(key ^ word)
    return key


def layer_key(key: Tensor | None, layer: int) -> Tensor | None:
    """The key of one layer, made outside the block so that all blocks run the same (compiled) code.
    [b] -> [b]"""
    return None if key is None else mix(key ^ (layer + 1))


def dropped(key: Tensor, salt: int, shape, start: dict[int, int], p: float) -> Tensor:
    """Boolean mask, true with probability p. key: [b]; shape: [b, ...] of this slice; start:
    {dimension: first global coordinate} where the slice does not begin at 0."""
    x = mix(key ^ salt)
    for dim in range(1, len(shape)):
        # int64: compilers take an int32 product
        n = torch.arange(1, shape[dim] + 1, device=key.device) + start.get(dim, 0)
        # of small numbers for positive
        spread = (n * 0x9E3779B1 & 0x7FFFFFFF).int()
        # one more coordinate folded in
        x = mix(x.unsqueeze(-1) ^ spread)
    # x is uniform over the signed 32-bit integers
    return x < round(p * 2**32) - 2**31


class Dropout(nn.Module):
    """Keeps the mask, one byte per element, for backward. A technique that holds only a slice of x
    says which in `slice`: {dimension: n} where x is the n-th of equal slices along that
    dimension."""

    def __init__(self, p: float, salt: int):
        super().__init__()
        self.p = p
        self.salt = salt
        self.slice = {}

    # drop_key None: evaluation, nothing is dropped
    def forward(self, x: Tensor, drop_key: Tensor | None) -> Tensor:
        if drop_key is None or self.p == 0:
            return x
        start = {dim: n * x.shape[dim] for dim, n in self.slice.items()}
        return x.masked_fill(dropped(drop_key, self.salt, x.shape, start, self.p), 0.0) * (
            1 / (1 - self.p)
        )


# --------------------------------------------------------------------------------------------------


class DeferredBiasLinear(nn.Linear):
    """y = x Wᵀ. Its bias is added by the module that follows, where it costs no pass of its own
    once fused, and where it comes after any reduction over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def weight_gradient(weight: Tensor, rows: Tensor, x: Tensor) -> Tensor | None:
    """∂W = ∂yᵀ x for y = x Wᵀ; rows: ∂y [b s, out]; x: [b s, in] -> [out, in]. Where a pipeline
    schedule wants it later, it has handed the parameter a list, `owed`: then the three are appended
    to it, and the result is None."""
    if getattr(weight, "owed", None) is None:
        return rows.t() @ x
    weight.owed.append((weight, rows, x))
    return None


class SharedInput(nn.Module):
    """Linear layers that read the same input, in one call, so that a technique can bring the input
    to all of them at once."""

    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        return [linear(x) for linear in linears]


class BiasDropoutAdd(nn.Module):
    """residual + dropout(x + bias)"""

    def __init__(self, p: float, salt: int):
        super().__init__()
        self.dropout = Dropout(p, salt)

    def forward(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, drop_key: Tensor | None
    ) -> Tensor:
        if bias is not None:
            x = x + bias
        return residual + self.dropout(x, drop_key)


class CausalProbabilities(nn.Module):
    """softmax(q kᵀ / √d + causal mask). q, k: [b, a, s, d] -> [b, a, s, s]"""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        b, a, s, d = q.shape
        # 0 on and below the diagonal
        causal = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        return (
            torch.baddbmm(causal, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=d**-0.5)
            .softmax(-1)
            .view(b, a, s, s)
        )


class ExplicitAttention(nn.Module):
    """softmax(q kᵀ / √d + causal mask) v as the papers write it; dropout acts on the probabilities.

    q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, s, a d]
    """

    def __init__(self, p: float, salt: int):
        super().__init__()
        self.probabilities = CausalProbabilities()
        self.dropout = Dropout(p, salt)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, drop_key: Tensor | None) -> Tensor:
        k, v = (
            x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)
        )  # [b, a, s, d]
        probabilities = self.dropout(self.probabilities(q, k), drop_key)
        return (probabilities @ v).transpose(1, 2).flatten(2)


class FusedAttention(nn.Module):
    """The same without dropout, in one kernel that never writes the s × s matrix (FlashAttention,
    arXiv 2205.14135)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, drop_key: Tensor | None) -> Tensor:
        context = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return context.transpose(1, 2).flatten(2)


def rotary_table(config: GPTConfig, s: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position × base^(-2i/d), each [s, d], the d/2 frequencies twice over, with the
    device and dtype of `like` (RoPE, arXiv 2104.09864)."""
    frequency = config.rotary_base ** (
        -torch.arange(0, config.head_dim, 2, device=like.device).double() / config.head_dim
    )
    angle = torch.arange(s, device=like.device).double()[:, None] * frequency  # [s, d/2]
    return angle.cos().repeat(1, 2).to(like.dtype), angle.sin().repeat(1, 2).to(like.dtype)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_i, x_{i+d/2}) by its position's angle. x: [b, a, s, d]"""
    low, high = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat((-high, low), dim=-1) * rotary[1]


class Rotary(nn.Module):
    """Queries and keys, rotated. q: [b, a, s, d]; k: [b, a_kv, s, d]"""

    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotate(q, table), rotate(k, table)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        h = config.hidden_size
        kv = config.num_kv_heads * config.head_dim
        bias = not config.llama
        self.head_dim = config.head_dim
        self.project = SharedInput()
        self.query = nn.Linear(h, h, bias)
        self.key = nn.Linear(h, kv, bias)
        self.value = nn.Linear(h, kv, bias)
        self.rotary = Rotary()
        self.core = (
            FusedAttention()
            if config.attention == "fused"
            else ExplicitAttention(config.dropout, 1)
        )
        self.output = DeferredBiasLinear(h, h, bias)

    def forward(self, x: Tensor, drop_key: Tensor | None, rotary) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [b, a, s, d]
            for y in self.project(x, self.query, self.key, self.value)
        )
        if rotary is not None:
            q, k = self.rotary(q, k, rotary)
        return self.output(self.core(q, k, v, drop_key))  # [b, s, h]


class GELU(nn.Module):
    """gelu(x + bias), in the tanh form of GPT-2 and Megatron-LM (arXiv 1606.08415). x is
    overwritten."""

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.gelu(x if bias is None else x.add_(bias), approximate="tanh")


class SwiGLU(nn.Module):
    """silu(gate) * up (arXiv 2002.05202)"""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        h = config.hidden_size
        ffn = config.ffn_hidden_size
        bias = not config.llama
        self.project = SharedInput()
        self.gate = nn.Linear(h, ffn, bias=False) if config.llama else None
        self.up = DeferredBiasLinear(h, ffn, bias)
        self.activation = SwiGLU() if config.llama else GELU()
        self.down = DeferredBiasLinear(ffn, h, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            inner = self.activation(*self.project(x, self.gate, self.up))  # [b, s, ffn]
        else:
            inner = self.activation(*self.project(x, self.up), self.up.bias)
        return self.down(inner)  # [b, s, h]


def make_norm(config: GPTConfig) -> nn.Module:
    return (nn.RMSNorm if config.llama else nn.LayerNorm)(config.hidden_size, config.norm_eps)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.attention_residual = BiasDropoutAdd(config.dropout, 2)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_residual = BiasDropoutAdd(config.dropout, 3)

    def forward(self, x: Tensor, drop_key: Tensor | None = None, rotary=None) -> Tensor:
        """x: [b, s, h] -> [b, s, h]"""
        x = self.attention_residual(
            self.attention(self.attention_norm(x), drop_key, rotary),
            self.attention.output.bias,
            x,
            drop_key,
        )
        return self.mlp_residual(self.mlp(self.mlp_norm(x)), self.mlp.down.bias, x, drop_key)


class TokenEmbedding(nn.Embedding):
    """A vector for each token. tokens: [b, s] -> [b, s, h]. Raises ValueError for an id that is not
    in the vocabulary; on a GPU, where that would wait for the device, it stays CUDA's assertion."""

    def forward(self, tokens: Tensor) -> Tensor:
        try:
            return super().forward(tokens)
        except IndexError:
            wrong = tokens[(tokens < 0) | (tokens >= self.num_embeddings)][0].item()
            raise ValueError(
                f"token id {wrong}: must be from 0 to {self.num_embeddings - 1}, "
                f"for vocab_size is {self.num_embeddings}"
            ) from None


class LearnedPositions(nn.Embedding):
    """x + a vector for each position. x: [b, s, h]"""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class Embedding(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.positions = (
            None if config.llama else LearnedPositions(config.seq_length, config.hidden_size)
        )
        self.dropout = Dropout(config.dropout, 0)

    def forward(self, tokens: Tensor, drop_key: Tensor | None = None) -> Tensor:
        """tokens: [b, s] -> [b, s, h]"""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = self.positions(x)
        return self.dropout(x, drop_key)


class Head(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = make_norm(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """x: [b, s, h]; targets: [b, s] int64 -> loss of each token [b, s]; without targets, logits
        [b, s, V]"""
        logits = self.output(self.norm(x))
        return logits if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets)


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on (seed, global name) alone: for the initial value of that
    parameter."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # a seed is below 2^63
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


class GPT(nn.Module):
    """A whole model, with the initial values of seed 0. Built under `torch.device("meta")` it has
    none, and is filled by `sharding.init` or `checkpoint.load`."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config) for layer in range(config.num_layers)}
        )
        if config.expert_layers:
            # which builds on this file
            from moe import MoE

            for layer in config.expert_layers:
                self.blocks[str(layer)].mlp = MoE(config)
        self.head = Head(config)
        if not config.llama:
            # tied (arXiv 1608.05859)
            self.head.output.weight = self.embedding.tokens.weight
        if not self.embedding.tokens.weight.is_meta:
            self.init(seed=0)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        drop_key: Tensor | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """tokens, targets: [b, s] int64, s at most seq_length; drop_key: [b] from `dropout_key`,
        None for no dropout -> loss of each token [b, s], in at least float32; without targets,
        logits [b, s, V]. A part of a model, whose embedding or head is None, takes x [b, s, h]
        instead, or returns it. Raises ValueError for a longer sequence, and on a CPU for a token
        that is not in the vocabulary."""
        if tokens.shape[1] > self.config.seq_length:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens is longer than seq_length"
                f" {self.config.seq_length}"
            )
        if self.embedding is not None:
            x = self.embedding(tokens, drop_key)
        rotary = rotary_table(self.config, tokens.shape[1], x) if self.config.llama else None
        for layer, block in self.blocks.items():
            x = block(x, layer_key(drop_key, int(layer)), rotary)
        return x if self.head is None else self.head(x, targets)

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Give every parameter its initial value, the one that `sharding.init` cuts."""
        for name, p in self.named_parameters():
            p.copy_(self.init_parameter(name, p.shape, generator(seed, name)))

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        """The initial value of one whole parameter, float32 on the CPU: normal with standard
        deviation 0.02, or 0.02 / √(2L) for the projections into the residual stream (GPT-2); biases
        0, norms 1."""
        if name.endswith("norm.weight"):
            return torch.ones(shape, device="cpu")
        if name.endswith("bias"):
            return torch.zeros(shape, device="cpu")
        residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * self.config.num_layers) if residual else 0.02
        return torch.randn(shape, generator=generator, device="cpu") * std


class _CrossEntropy(torch.autograd.Function):
    """loss = log Σ exp(z) - z_label;  ∂loss/∂z = softmax(z) - onehot(label), built where the logits were."""

    @staticmethod
    def forward(ctx, logits, targets):
        # a copy of 16-bit logits, or themselves
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        z -= z.amax(-1, keepdim=True)
        target_logit = z.gather(-1, targets.unsqueeze(-1))  # [..., 1]
        total = z.exp_().sum(-1, keepdim=True)
        ctx.save_for_backward(z.div_(total), targets)
        ctx.dtype = logits.dtype
        return (total.log() - target_logit).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        gradient, targets = ctx.saved_tensors
        gradient.scatter_add_(-1, targets.unsqueeze(-1), -torch.ones_like(grad).unsqueeze(-1))
        return gradient.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Per-token loss in at least float32. logits: [..., V], **overwritten**: the vocabulary is
    wide, so the gradient takes their place (backward can run once). targets: [...] int64. Returns
    [...]."""
    if not logits.requires_grad:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # ignore_index: -100, torch's default, is no label here either; in training it is refused
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=-(2**63)
        ).view(targets.shape)
    return _CrossEntropy.apply(logits, targets)


def num_parameters(model: nn.Module) -> int:
    # a tied weight counts once
    return sum(p.numel() for p in model.parameters())


def least_parameters(config: GPTConfig) -> int:
    """The numbers in a model's matrices, norms and biases left out, without building it: an exact
    integer for any shape."""
    h = config.hidden_size
    kv = config.num_kv_heads * config.head_dim
    experts = len(config.expert_layers)
    mlps = config.num_layers - experts + experts * config.num_experts
    blocks = (
        config.num_layers * (2 * h * h + 2 * h * kv)
        + mlps * (3 if config.llama else 2) * h * config.ffn_hidden_size
    )
    # a GPT has one embedding for tokens and one for positions, a Llama one and an output
    ends = h * config.vocab_size + h * (config.vocab_size if config.llama else config.seq_length)
    return blocks + experts * h * config.num_experts + ends


def flops_per_token(config: GPTConfig) -> float:
    """Model FLOPs to train on one token, matrix multiplications alone, forward once and backward
    twice, attention over all s² scores as the papers count it. For a GPT: 72 L h² (1 + s/6h +
    V/12hL) (arXiv 2205.05198, eq. 7, over B s). Of experts, those that a token goes through, and
    their router."""
    h = config.hidden_size
    kv = config.num_kv_heads * config.head_dim
    experts = len(config.expert_layers)
    mlps = config.num_layers - experts + experts * config.router_topk
    weights = (
        config.num_layers * (2 * h * h + 2 * h * kv)
        + mlps * (3 if config.llama else 2) * h * config.ffn_hidden_size
        + experts * h * config.num_experts
    )
    return 6 * (weights + h * config.vocab_size) + 12 * config.num_layers * config.seq_length * h


# --------------------------------------------------------------------------------------------------


def main():
    print(
        f"{'preset':<15}{'L':>5}{'h':>7}{'heads':>6}{'kv':>5}{'s':>6}{'V':>7}"
        f"{'parameters':>20}{'published':>12}{'ratio':>7}{'GFLOP/token':>13}"
    )
    for name, (fields, published) in PRESETS.items():
        config = GPTConfig(**fields)
        # shapes without storage
        with torch.device("meta"):
            count = num_parameters(GPT(config))
        beside = f"{published / 1e9:>11.4g}B{count / published:>7.3f}" if published else f"{'':>19}"
        print(
            f"{name:<15}{config.num_layers:>5}{config.hidden_size:>7}{config.num_heads:>6}{config.num_kv_heads:>5}"
            f"{config.seq_length:>6}{config.vocab_size:>7}{count:>20,}{beside}{flops_per_token(config) / 1e9:>13,.3f}"
        )


if __name__ == "__main__":
    main()
