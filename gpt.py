"""A decoder-only transformer, GPT-2 or Llama, on one device and without parallelism.

    tokens [b, s] -> Embedding -> Block x L -> Head -> logits [b, s, V], or the loss of each token

    Block:  x = x + dropout(attention(norm(x)) + bias)        pre-norm (GPT-2, Radford et al. 2019)
            x = x + dropout(mlp(norm(x)) + bias)

    attention(x) = softmax(q kᵀ / √d + causal mask) v  Wₒ   q, k, v = x W_q, x W_k, x W_v
    mlp(x)       = gelu(x W_up) W_down                      Llama: (silu(x W_gate) * x W_up) W_down

`GPTConfig` (base/model_config.py) chooses each part. LayerNorm, GELU, learned positions, biases and
tied embeddings make a GPT; RMSNorm, SwiGLU, rotary positions, grouped-query attention make a Llama.
families.py adds what Mistral, Qwen3, Gemma and BLOOM need. Techniques replace submodules or wrap
blocks from outside; names like `blocks.7.attention.query` never change.

Shapes: b micro-batch, s sequence, h hidden, a heads of d (mostly h / a), L layers, V vocabulary.

    python -m course.gpt        parameters, the loss before training, what a changed token changes

Not covered: layers of several types; BERT and T5 (models/).
"""

import hashlib
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from base.cross_entropy import cross_entropy
from base.document_mask import block_mask, fused_attention, masked_probabilities, positions_of
from base.dropout import Dropout, layer_key
from base.model_config import GPTConfig
from base.rotary import Rotary, rotary_frequencies, rotary_table


class Context(NamedTuple):
    """The inputs of every layer beside x. `GPT.run_blocks` makes the last two."""

    drop_key: Tensor | None = None  # [b], key of its dropout masks (base/dropout.py)
    documents: Tensor | None = None  # [b, s] int64, each token's document
    real: Tensor | None = None  # [b, s] bool, positions that are not padding, for experts
    rotary: tuple[Tensor, Tensor] | None = None  # cos, sin: [s, d] or [b, 1, s, d] each
    block_mask: object | None = None  # mask of documents, for fused attention on a GPU
    future: Tensor | None = None  # [n b, s], tokens 1, 2, .. n after each one (multi_token.py)


PLAIN = Context()


class Attention(nn.Module):
    """Causal self-attention, without the output's bias. x: [b, s, h] -> [b, s, h]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        h, d, bias = config.hidden_size, config.head_dim, config.attention_bias != "none"
        heads, kv_heads = config.num_heads * d, config.num_kv_heads * d
        self.head_dim = d
        self.project = ProjectTogether()
        self.query = nn.Linear(h, heads, bias)
        self.key = nn.Linear(h, kv_heads, bias)
        self.value = nn.Linear(h, kv_heads, bias)
        # tensor_parallel.py and families.py replace these.
        self.gather_heads, self.head_norms = nn.Identity(), nn.Identity()
        self.rotary = Rotary()
        fused = config.attention == "fused"
        self.core = FusedAttention() if fused else ExplicitAttention(config.dropout, site=1)
        self.output = DeferredBiasLinear(heads, h, config.attention_bias == "all")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        projected = self.project(x, self.query, self.key, self.value)  # [b, s, a d or a_kv d]
        projected = self.gather_heads(projected)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        q, k = self.head_norms((q, k))
        if context.rotary is not None:
            q, k = self.rotary(q, k, context.rotary)  # [b, a, s, d]
        return self.output(self.core(q, k, v, context))


class ExplicitAttention(nn.Module):
    """dropout(softmax(q kᵀ / √d + mask)) v. q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, s, ad]"""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.probabilities = CausalProbabilities()
        self.dropout = Dropout(p, site)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        # Grouped-query attention: a / a_kv query heads share one key head.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        probabilities = self.probabilities(q, k, context.documents)
        return (self.dropout(probabilities, context.drop_key) @ v).transpose(1, 2).flatten(2)


class CausalProbabilities(nn.Module):
    """softmax(q kᵀ / √d + causal mask). q, k: [b, a, s, d] -> [b, a, s, s]"""

    def forward(self, q: Tensor, k: Tensor, documents: Tensor | None) -> Tensor:
        b, a, s, d = q.shape
        if documents is not None:
            return masked_probabilities(q, k, documents)
        causal = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        q, k = q.flatten(0, 1), k.flatten(0, 1)  # [b a, s, d]
        scores = torch.baddbmm(causal, q, k.transpose(1, 2), alpha=d**-0.5)
        return scores.softmax(-1).view(b, a, s, s)


class FusedAttention(nn.Module):
    """ExplicitAttention without dropout; the s x s matrix is never written (arXiv 2205.14135)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if context.documents is not None:
            y = fused_attention(q, k, v, context.documents, context.block_mask)
        else:
            grouped = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """The feed-forward layer, without the last bias. x: [b, s, h] -> [b, s, h]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        h, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.mlp_bias
        self.project = ProjectTogether()
        self.gate = nn.Linear(h, ffn, bias) if config.gated else None
        # GELU adds the bias of `up`; SwiGLU does not.
        up = nn.Linear if config.gated else DeferredBiasLinear
        self.up = up(h, ffn, bias)
        self.activation = SwiGLU() if config.gated else GELU()
        self.down = DeferredBiasLinear(ffn, h, bias)

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(*self.project(x, self.up), self.up.bias))
        return self.down(self.activation(*self.project(x, self.gate, self.up)))  # [b, s, ffn]


class Block(nn.Module):
    """One layer. x: [b, s, h] -> [b, s, h]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.attention_residual = BiasDropoutAdd(config.dropout, site=2)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_residual = BiasDropoutAdd(config.dropout, site=3)

    def forward(self, x: Tensor, context: Context = PLAIN) -> Tensor:
        y = self.attention(self.attention_norm(x), context)
        x = self.attention_residual(y, self.attention.output.bias, x, context.drop_key)
        y = self.mlp(self.mlp_norm(x), context)
        return self.mlp_residual(y, self.mlp.down.bias, x, context.drop_key)


class GPT(nn.Module):
    """A whole GPT-2 or Llama, with the initial values of seed 0 (on the meta device: no values).
    Fields of other families have no effect here: `families.build(config)` makes any model."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        # The frequencies of rotary positions, the initial weight of norms; families.py sets others.
        self.rotary_frequencies, self.norm_weight = rotary_frequencies, 1.0
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleDict({str(n): Block(config) for n in range(config.num_layers)})
        self.head = Head(config)
        if config.tied:
            self.head.output.weight = self.embedding.tokens.weight
        if not self.embedding.tokens.weight.is_meta:
            for name, p in self.named_parameters():
                p.data.copy_(self.init_parameter(name, p.shape, generator(0, name)))

    def forward(self, tokens: Tensor, targets=None, context: Context = PLAIN, x=None) -> Tensor:
        """The loss of each token, [b, s], in at least float32; without targets logits, [b, s, V].

        tokens, targets: [b, s] int64. A part without an embedding takes x, [b, s, h]; one without a
        head returns it. Raises ValueError for s > seq_length, and on a CPU for a wrong id."""
        if self.embedding is not None:
            x = self.embedding(tokens, context)
        x = self.run_blocks(x, tokens.shape[1], context)
        return x if self.head is None else self.head(x, targets)

    def run_blocks(self, x: Tensor, s: int, context: Context = PLAIN) -> Tensor:
        """x: [b, s, h], or a shard of it; s: the length of the whole sequence."""
        rotary = self.rotary_table(s, x, context.documents)
        mask = block_mask(context.documents, x) if self.config.attention == "fused" else None
        for number, block in self.blocks.items():
            drop_key = layer_key(context.drop_key, int(number))
            x = block(x, context._replace(drop_key=drop_key, rotary=rotary, block_mask=mask))
        return x

    def rotary_table(self, s: int, like: Tensor, documents: Tensor | None = None):
        """(cos, sin) of base/rotary.py; None for a model without rotary positions."""
        if self.config.positions != "rotary":
            return None
        frequencies = self.rotary_frequencies(self.config, like.device)
        return rotary_table(frequencies, s, like, documents, self.config.rotary_scale)

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        """The initial value of one whole parameter, float32 on the CPU: normal, standard deviation
        σ = 0.02, or σ / √(2L) before a residual connection (GPT-2); biases 0, norms scale by 1."""
        if name.endswith("norm.weight"):
            return torch.full(shape, self.norm_weight, device="cpu")
        if name.endswith("bias"):
            return torch.zeros(shape, device="cpu")
        residual = name.endswith(("attention.output.weight", ".down.weight"))
        std = self.config.init_std / (math.sqrt(2 * self.config.num_layers) if residual else 1)
        return torch.randn(shape, generator=generator, device="cpu") * std


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends only on (seed, global name). Its own seed is below 2^63."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


class ProjectTogether(nn.Module):
    """Calls the linear layers that read one input. It has no weights. A technique replaces it to
    send x to other ranks, once for all the layers."""

    def forward(self, x: Tensor, *linears: nn.Module) -> list[Tensor]:
        return [linear(x) for linear in linears]


class DeferredBiasLinear(nn.Linear):
    """y = x Wᵀ. The next module adds the bias: once, after any sum over ranks, in the same kernel
    as dropout and the residual."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class BiasDropoutAdd(nn.Module):
    """residual + dropout(x + bias)"""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.dropout = Dropout(p, site)

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor, drop_key) -> Tensor:
        if bias is not None:
            x = x + bias
        return residual + self.dropout(x, drop_key)


class GELU(nn.Module):
    """gelu(x + bias), the tanh form of GPT-2 and Megatron-LM (arXiv 1606.08415). Overwrites x."""

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.gelu(x if bias is None else x.add_(bias), approximate="tanh")


class SwiGLU(nn.Module):
    """silu(gate) * up (arXiv 2002.05202)"""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


def make_norm(config: GPTConfig, size: int = 0) -> nn.Module:
    norm = nn.LayerNorm if config.norm.startswith("layernorm") else nn.RMSNorm
    return norm(size or config.hidden_size, config.norm_eps)


class TokenEmbedding(nn.Embedding):
    """A vector for each token. [b, s] -> [b, s, h]. On a CPU the error names the wrong id."""

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
        h, self.seq_length = config.hidden_size, config.seq_length
        # GPT fills these tensors. torch's own initial values would load its compiler on the meta
        # device.
        tokens, positions = (torch.empty(n, h) for n in (config.vocab_size, config.seq_length))
        self.tokens = TokenEmbedding.from_pretrained(tokens, freeze=False)
        self.scale, self.norm = nn.Identity(), nn.Identity()  # families.py replaces these
        positions = LearnedPositions.from_pretrained(positions, freeze=False)
        self.positions = positions if config.positions == "learned" else None
        self.dropout = Dropout(config.dropout, site=0)

    def forward(self, tokens: Tensor, context: Context = PLAIN) -> Tensor:
        s, longest = tokens.shape[1], self.seq_length
        if s > longest:
            raise ValueError(f"a sequence of {s} tokens is longer than seq_length {longest}")
        x = self.norm(self.scale(self.tokens(tokens)))
        if self.positions is not None:
            x = self.positions(x, context.documents)
        return self.dropout(x, context.drop_key)


class Head(nn.Module):
    """x: [b, s, h]; targets: [b, s] -> the loss of each token [b, s]; without targets, logits."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm, self.vocab_size = make_norm(config), config.vocab_size
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        # [b, s, V], and more columns if the matrix has rows of padding (tensor_parallel.py).
        logits = self.output(self.norm(x))
        return logits[..., : self.vocab_size] if targets is None else self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, self.vocab_size)
