"""A decoder-only transformer on one device, GPT-2 or Llama, with nothing parallel in it.

    tokens [b, s] -> Embedding -> Block x L -> Head -> logits [b, s, V], or the loss of each token

    Block:  x = x + dropout(attention(norm(x)) + bias)        pre-norm (GPT-2, Radford et al. 2019)
            x = x + dropout(mlp(norm(x)) + bias)

    attention(x) = softmax(q kᵀ / √d + causal mask) v  Wₒ   q, k, v = x W_q, x W_k, x W_v
    mlp(x)       = gelu(x W_up) W_down                      Llama: (silu(x W_gate) * x W_up) W_down

`GPTConfig` (model_config.py) chooses each part. LayerNorm, GELU, learned positions, biases and tied
embeddings make a GPT; RMSNorm, SwiGLU, rotary positions, grouped-query attention make a Llama. Like
Llama: Mistral (a window: `local`), Qwen2 (biases), Qwen3 (`HeadNorms`), Gemma (GeGLU, `RMSNorm1p`,
a scaled embedding). Like GPT: BLOOM (ALiBi: `local`; a norm of the embedding). Techniques replace
submodules or wrap blocks from outside; names like `blocks.7.attention.query` never change.

Shapes: b micro-batch, s sequence, h hidden, a heads of d (mostly h / a), L layers, V vocabulary.

    python gpt.py        parameters, the loss before training, what a changed token changes

Not covered: T5's positions, layers of several kinds. Documents in one row: document_mask.py.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("gpt")

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.document_mask import fused_attention, masked_probabilities, positions_of
from attention.local_attention import LocalBias, make_local_bias
from base.cross_entropy import cross_entropy
from dropout import Dropout, layer_key
from model_config import GPTConfig


class Attention(nn.Module):
    """Each token looks at itself and at earlier tokens. x: [b, s, h] -> [b, s, h], without bias."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads * d, config.num_kv_heads * d
        bias = config.attention_bias != "none"
        self.head_dim = d
        self.project = SharedInput()
        self.query = nn.Linear(h, heads, bias)
        self.key = nn.Linear(h, kv_heads, bias)
        self.value = nn.Linear(h, kv_heads, bias)
        self.head_norms = HeadNorms(config) if config.qk_norm else None
        self.rotary = Rotary()
        fused = config.attention == "fused"
        self.core = FusedAttention() if fused else ExplicitAttention(config.dropout, site=1)
        self.core.local = self.local = make_local_bias(config)  # None: no window, no ALiBi
        self.output = DeferredBiasLinear(heads, h, config.attention_bias == "all")

    def forward(self, x: Tensor, drop_key: Tensor | None, rotary, documents=None) -> Tensor:
        projected = self.project(x, self.query, self.key, self.value)  # [b, s, a d or a_kv d]
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        if self.head_norms is not None:
            q, k = self.head_norms(q, k)
        if rotary is not None:
            q, k = self.rotary(q, k, rotary)  # [b, a, s, d]
        return self.output(self.core(q, k, v, drop_key, documents))


class MLP(nn.Module):
    """Works on each token alone. x: [b, s, h] -> [b, s, h], without the last bias."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        h, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.mlp_bias
        self.project = SharedInput()
        self.gate = nn.Linear(h, ffn, bias) if config.gated else None
        self.up = (nn.Linear if config.gated else DeferredBiasLinear)(h, ffn, bias)
        self.activation = ACTIVATIONS[config.activation]()
        self.down = DeferredBiasLinear(ffn, h, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            inner = self.activation(*self.project(x, self.gate, self.up))  # [b, s, ffn]
        else:
            inner = self.activation(*self.project(x, self.up), self.up.bias)
        return self.down(inner)


class Block(nn.Module):
    """One layer. x: [b, s, h] -> [b, s, h]; drop_key: [b] from `layer_key`, None for no dropout."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.attention_residual = BiasDropoutAdd(config.dropout, site=2)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_residual = BiasDropoutAdd(config.dropout, site=3)

    def forward(self, x: Tensor, drop_key=None, rotary=None, documents=None) -> Tensor:
        y = self.attention(self.attention_norm(x), drop_key, rotary, documents)
        x = self.attention_residual(y, self.attention.output.bias, x, drop_key)
        y = self.mlp(self.mlp_norm(x))
        return self.mlp_residual(y, self.mlp.down.bias, x, drop_key)


class GPT(nn.Module):
    """A whole model, with the initial values of seed 0; without values on the meta device."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleDict({str(n): Block(config) for n in range(config.num_layers)})
        self.head = Head(config)
        if config.tied:
            self.head.output.weight = self.embedding.tokens.weight
        if not self.embedding.tokens.weight.is_meta:
            self.init(seed=0)

    def forward(self, tokens: Tensor, targets=None, drop_key=None, documents=None) -> Tensor:
        """The loss of each token, [b, s], in at least float32; without targets logits, [b, s, V].

        tokens, targets, documents: [b, s] int64; drop_key: [b] from `dropout_key`, or None. Raises
        ValueError for s > seq_length, and on a CPU for an id that is not in the vocabulary."""
        x = self.embedding(tokens, drop_key, documents)
        x = self.run_blocks(x, tokens.shape[1], drop_key, documents)
        return self.head(x, targets)

    def run_blocks(self, x: Tensor, s: int, drop_key: Tensor | None, documents=None) -> Tensor:
        """x: [b, s, h], or a shard of it; s: the length of the whole sequence."""
        is_rotary = self.config.positions == "rotary"
        rotary = rotary_table(self.config, s, x, documents) if is_rotary else None
        for number, block in self.blocks.items():
            x = block(x, layer_key(drop_key, int(number)), rotary, documents)
        return x

    @torch.no_grad()
    def init(self, seed: int) -> None:
        """Give every parameter its initial value: the one of which `sharding.init` takes shards."""
        for name, p in self.named_parameters():
            p.copy_(self.init_parameter(name, p.shape, generator(seed, name)))

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        """The initial value of one whole parameter, float32 on the CPU: normal, standard deviation
        0.02, or 0.02 / √(2L) before a residual connection (GPT-2); biases 0, norms scale by 1."""
        if name.endswith("norm.weight"):
            return torch.full(shape, float(self.config.norm != "rmsnorm1p"), device="cpu")
        if name.endswith("bias"):
            return torch.zeros(shape, device="cpu")
        residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * self.config.num_layers) if residual else 0.02
        return torch.randn(shape, generator=generator, device="cpu") * std


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on (seed, global name) alone. Its own seed is below 2^63."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


# --- the parts of a block -------------------------------------------------------------------------


class SharedInput(nn.Module):
    """Linear layers that read one input, in one call: a technique can bring x to all at once."""

    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        return [linear(x) for linear in linears]


class DeferredBiasLinear(nn.Linear):
    """y = x Wᵀ. The next module adds the bias: after any sum over ranks, and fused for free."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class BiasDropoutAdd(nn.Module):
    """residual + dropout(x + bias)"""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.dropout = Dropout(p, site)

    def forward(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, drop_key: Tensor | None
    ) -> Tensor:
        if bias is not None:
            x = x + bias
        return residual + self.dropout(x, drop_key)


class HeadNorms(nn.Module):
    """A norm for each head's query and key (arXiv 2010.04245, 2505.09388). q: [b, a, s, d]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.query_norm = make_norm(config, config.head_dim)
        self.key_norm = make_norm(config, config.head_dim)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class CausalProbabilities(nn.Module):
    """softmax(q kᵀ / √d + causal mask). q, k: [b, a, s, d] -> [b, a, s, s]"""

    def forward(self, q: Tensor, k: Tensor, documents=None, local=None) -> Tensor:
        b, a, s, d = q.shape
        if documents is not None or local is not None:
            return masked_probabilities(q, k, documents, local)
        causal = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        q, k = q.flatten(0, 1), k.flatten(0, 1)  # [b a, s, d]
        scores = torch.baddbmm(causal, q, k.transpose(1, 2), alpha=d**-0.5)
        return scores.softmax(-1).view(b, a, s, s)


class ExplicitAttention(nn.Module):
    """dropout(softmax(q kᵀ / √d + mask)) v. q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, s, ad]"""

    local: LocalBias | None = None

    def __init__(self, p: float, site: int):
        super().__init__()
        self.probabilities = CausalProbabilities()
        self.dropout = Dropout(p, site)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, drop_key, documents=None) -> Tensor:
        # grouped-query attention: a / a_kv query heads share one key head
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        probabilities = self.dropout(self.probabilities(q, k, documents, self.local), drop_key)
        return (probabilities @ v).transpose(1, 2).flatten(2)


class FusedAttention(nn.Module):
    """The same without dropout; the s x s matrix is never written (arXiv 2205.14135)."""

    local: LocalBias | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, drop_key, documents=None) -> Tensor:
        if documents is not None or self.local is not None:
            return fused_attention(q, k, v, documents, self.local).transpose(1, 2).flatten(2)
        grouped = q.shape[1] != k.shape[1]
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return context.transpose(1, 2).flatten(2)


class Rotary(nn.Module):
    """Queries and keys, rotated (RoPE, arXiv 2104.09864). q: [b, a, s, d]; k: [b, a_kv, s, d]"""

    def forward(self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotate(q, table), rotate(k, table)


def rotary_table(config: GPTConfig, s: int, like: Tensor, documents=None) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/d), i < d/2, twice over: [s, d] or [b, 1, s, d] each."""
    d = config.head_dim
    frequency = config.rotary_base ** (-torch.arange(0, d, 2, device=like.device).double() / d)
    if config.rotary_factor != 1:
        frequency = llama3_frequencies(config, frequency)
    at = torch.arange(s, device=like.device)
    if documents is not None:
        at = positions_of(documents).unsqueeze(1)  # [b, 1, s]
    angle = at.double().unsqueeze(-1) * frequency.repeat(2)  # [.., s, d]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def llama3_frequencies(config: GPTConfig, frequency: Tensor) -> Tensor:
    """Llama 3.1, for longer sequences. A pair that turns less than `low` times in the original
    length turns slower by the factor; one with more than `high` as before; others in between."""
    low, high = config.rotary_low_frequency, config.rotary_high_frequency
    turns = config.rotary_original_length * frequency / (2 * math.pi)
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return stays * frequency + (1 - stays) * frequency / config.rotary_factor


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_i, x_{i+d/2}) by its position's angle. x: [b, a, s, d]"""
    low, high = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat((-high, low), dim=-1) * table[1]


class GELU(nn.Module):
    """gelu(x + bias), the tanh form of GPT-2 and Megatron-LM (arXiv 1606.08415). Overwrites x."""

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.gelu(x if bias is None else x.add_(bias), approximate="tanh")


class SwiGLU(nn.Module):
    """silu(gate) * up (arXiv 2002.05202)"""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class GeGLU(nn.Module):
    """gelu(gate) * up (arXiv 2002.05202)"""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


class RMSNorm1p(nn.RMSNorm):
    """y + y w with y = x / rms(x): weight decay pulls the scale to 1, not to 0 (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return torch.addcmul(y, y, self.weight)


ACTIVATIONS = {"gelu": GELU, "swiglu": SwiGLU, "geglu": GeGLU}
NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm, "rmsnorm1p": RMSNorm1p}


def make_norm(config: GPTConfig, size: int = 0) -> nn.Module:
    return NORMS[config.norm](size or config.hidden_size, config.norm_eps)


class TokenEmbedding(nn.Embedding):
    """A vector for each token. [b, s] -> [b, s, h]. On a CPU, names an id beyond the vocabulary."""

    def forward(self, tokens: Tensor) -> Tensor:
        try:
            return super().forward(tokens)
        except IndexError:
            n = self.num_embeddings
            wrong = tokens[(tokens < 0) | (tokens >= n)][0].item()
            limit = f"{n - 1}, for vocab_size is {n}"
            raise ValueError(f"token id {wrong}: must be from 0 to {limit}") from None


class LearnedPositions(nn.Embedding):
    """x + a vector for each position. x: [b, s, h]"""

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        at = slice(x.shape[1]) if documents is None else positions_of(documents)
        return x + self.weight[at]


class Embedding(nn.Module):
    """tokens: [b, s] -> [b, s, h]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        h = config.hidden_size
        self.seq_length = config.seq_length
        self.tokens = TokenEmbedding(config.vocab_size, h)
        self.scale = math.sqrt(h) if config.embedding_scale else 1.0
        self.norm = make_norm(config) if config.embedding_norm else None
        learned = config.positions == "learned"
        self.positions = LearnedPositions(config.seq_length, h) if learned else None
        self.dropout = Dropout(config.dropout, site=0)

    def forward(self, tokens: Tensor, drop_key=None, documents: Tensor | None = None) -> Tensor:
        s, longest = tokens.shape[1], self.seq_length
        if s > longest:
            raise ValueError(f"a sequence of {s} tokens is longer than seq_length {longest}")
        x = self.tokens(tokens)
        if self.scale != 1:
            # in 16 bits the factor is rounded too, as Gemma's authors have it: √3072 is 55.5
            x = x * torch.tensor(self.scale, dtype=x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        if self.positions is not None:
            x = self.positions(x, documents)
        return self.dropout(x, drop_key)


class Head(nn.Module):
    """x: [b, s, h]; targets: [b, s] -> the loss of each token [b, s]; without targets, logits."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = make_norm(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.output(self.norm(x))  # [b, s, V]
        return logits if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets)
