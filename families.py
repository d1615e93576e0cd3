"""Model families: the parts that Mistral, Qwen3, Gemma, BLOOM, .. add to GPT-2 or Llama.

gpt.py is GPT-2 and Llama. Most released models are one of these with another size. The others have
a few more parts, which this file puts into a finished model, from outside, on the meta device. Each
has a field of GPTConfig (base/model_config.py):

    Qwen3       a norm of each head's query and key                      qk_norm
    Gemma       embeddings times √h                                      embedding_scale
                RMSNorm whose weight is stored less 1; gelu in the gate  norm, activation
    BLOOM       a norm of the embedding; ALiBi                           embedding_norm, positions
    Mistral     a sliding window; in some layers only (Qwen, Gemma 2)    sliding_window, ..
    Llama 3.1   rotary angles for longer sequences; YaRN's               rotary_factor, ..
    GPT-1       norms after the residual addition, not before            post_norm
    Falcon      attention and MLP both read x; GELU by erf               parallel_block, activation
    DeepSeek    multi-head latent attention, a smaller cache             kv_rank, query_rank, ..
    Nemotron    LayerNorm whose weight is stored less 1; relu(x)²        norm, activation
                rotary positions on a part of each head (base/rotary.py) rotary_share

A window and ALiBi are local attention: near tokens count more. Both add a bias to the score of
query i and key j:

    sliding window (Mistral, arXiv 2310.06825)    ALiBi (Press et al., arXiv 2108.12409, section 3)
    -∞ where the distance i - j is w or more      -slope · (i - j), with another slope in each head

    i = 0   .                   w = 3             0                      slope = 1/2
    i = 1   . .                                  -½   0
    i = 2   . . .                                -1  -½   0
    i = 3     . . .     j = 0 is hidden          -1½ -1  -½   0

With a window, L layers together reach L (w - 1) tokens back, and a token needs the keys and values
of w tokens only: the cache of generation stops growing (inference/kv_cache.py). With ALiBi a model
needs no other positions (BLOOM, arXiv 2211.05100). The first head of a has slope r = 2^(-8/a),
the next r², then r³, and so on: 1/2, 1/4, .. 1/256 for 8 heads. `alibi_slopes` has the rule for an
a that is not a power of two.

    python -m course.families      reach of a token, columns of the cache, slopes

Not covered: a kernel that skips hidden tokens (FlashAttention's window_size), instead of computing
their scores and hiding them. Latents that travel round a ring instead of keys and values.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from base.model_config import GPTConfig

# --- GPT-1, Qwen3, Gemma, Llama 3.1 ---------------------------------------------------------------


class PostNormBlock(gpt.Block):
    """x = norm(x + attention(x)), and the same for the MLP (arXiv 1706.03762). x: [b, s, h]"""

    def forward(self, x: Tensor, context: gpt.Context = gpt.PLAIN) -> Tensor:
        y, bias = self.attention(x, context), self.attention.output.bias
        x = self.attention_norm(self.attention_residual(y, bias, x, context.drop_key))
        y, bias = self.mlp(x, context), self.mlp.down.bias
        return self.mlp_norm(self.mlp_residual(y, bias, x, context.drop_key))


class ParallelBlock(gpt.Block):
    """x + attention(norm(x)) + mlp(another norm(x)) (Falcon, arXiv 2311.16867). x: [b, s, h]

    Megatron-LM sums both outputs over tensor-parallel ranks at once; here each has its own sum."""

    def forward(self, x: Tensor, context: gpt.Context = gpt.PLAIN) -> Tensor:
        y = self.attention(self.attention_norm(x), context)
        z = self.mlp(self.mlp_norm(x), context)
        x = self.attention_residual(y, self.attention.output.bias, x, context.drop_key)
        return self.mlp_residual(z, self.mlp.down.bias, x, context.drop_key)


class HeadNorms(nn.Module):
    """A norm for each head's query and key (arXiv 2010.04245, 2505.09388). q: [b, a, s, d]"""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.query_norm = gpt.make_norm(config, config.head_dim)
        self.key_norm = gpt.make_norm(config, config.head_dim)

    def forward(self, heads: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        q, k = heads
        return self.query_norm(q), self.key_norm(k)


class Scale(nn.Module):
    """Multiplies x by a number."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        # In 16 bits the factor is rounded too, as in Gemma's code: √3072 is 55.5.
        return x * torch.tensor(self.factor, dtype=x.dtype)


class RMSNorm1p(nn.RMSNorm):
    """y + y w with y = x / rms(x): weight decay pulls the scale to 1, not to 0 (Gemma)."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return torch.addcmul(y, y, self.weight)


class LayerNorm1p(nn.LayerNorm):
    """LayerNorm that multiplies by 1 + w (Nemotron)."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class GeGLU(nn.Module):
    """gelu(gate) * up (arXiv 2002.05202)"""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


class Activation(nn.Module):
    """f(x + bias)"""

    def __init__(self, f: Callable[[Tensor], Tensor]):
        super().__init__()
        self.f = f

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.f(x if bias is None else x + bias)


def squared_relu(x: Tensor) -> Tensor:
    """max(0, x)² (arXiv 2109.08668, section 3)"""
    return F.relu(x).square()


ACTIVATIONS = {
    "gelu": gpt.GELU,
    "exact-gelu": partial(Activation, F.gelu),  # by the error function (BERT)
    "relu": partial(Activation, F.relu),  # (T5)
    "squared-relu": partial(Activation, squared_relu),
    "swiglu": gpt.SwiGLU,
    "geglu": GeGLU,
}


# --- latent attention: DeepSeek-V2 and V3 ---------------------------------------------------------


class LatentAttention(gpt.Attention):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1). x: [b, s, h] -> [b, s, h]

        c_q = norm(x W_dq)      q = c_q W_uq               a heads of [rotated | plain]
        c   = norm(x W_dkv)     v = c W_uv
        r   = x W_kr            k = [r | c W_uk]           one rotated part for all heads

    Without a query_rank the query reads x. Tensor parallelism shards the matrices that read latents
    by heads; each rank computes whole latents, and f comes after them."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        h, a, d, rank = config.hidden_size, config.num_heads, config.head_dim, config.query_rank
        self.query_down = nn.Linear(h, rank, bias=False) if rank else nn.Identity()
        self.query_norm = gpt.make_norm(config, rank) if rank else nn.Identity()
        self.kv_down = nn.Linear(h, config.kv_rank, bias=False)
        self.kv_norm = gpt.make_norm(config, config.kv_rank)
        self.rope_key = nn.Linear(h, config.rope_head_dim, bias=False)
        self.query = nn.Linear(rank or h, a * d, bias=False)
        self.key = nn.Linear(config.kv_rank, a * (d - config.rope_head_dim), bias=False)
        self.value = nn.Linear(config.kv_rank, a * config.value_size, bias=False)
        self.output = gpt.DeferredBiasLinear(a * config.value_size, h, bias=False)
        self.project_kv = gpt.ProjectTogether()
        # tensor_parallel.py puts its f here for r, and into project_kv for c.
        self.share_rope_key = nn.Identity()
        self.attend = Expanded()
        self.key_size, self.value_size = d - config.rope_head_dim, config.value_size
        # DeepSeek's mscale_all_dim: YaRN's temperature, on the scores.
        self.score_scale = (0.1 * config.rotary_mscale * math.log(config.rotary_factor) + 1) ** 2

    def forward(self, x: Tensor, context: gpt.Context) -> Tensor:
        return self.output(self.attend(self, *self.latents(x, context), context))

    def latents(self, x: Tensor, context: gpt.Context) -> tuple[Tensor, Tensor, Tensor]:
        """q: [b, a, s, d]; c: [b, s, kv_rank]; r: [b, 1, s, rope_head_dim]; q and r are rotated"""
        (q,) = self.project(self.query_norm(self.query_down(x)), self.query)
        q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        c = self.kv_norm(self.kv_down(x))
        q, r = self.rotary(q, self.share_rope_key(self.rope_key(x)).unsqueeze(1), context.rotary)
        return q if self.score_scale == 1 else q * self.score_scale, c, r

    def keys_and_values(self, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Of all heads: [b, a, s, d] and [b, a, s, value_size]"""
        k, v = self.project_kv(c, self.key, self.value)
        k = k.unflatten(-1, (-1, self.key_size)).transpose(1, 2)
        v = v.unflatten(-1, (-1, self.value_size)).transpose(1, 2)
        return torch.cat((r.expand(-1, k.shape[1], -1, -1), k), dim=-1), v


class Expanded(nn.Module):
    """Attention to the keys and values of all heads. It has no weights; generation replaces it."""

    def forward(self, attention: LatentAttention, q, c, r, context: gpt.Context) -> Tensor:
        return attention.core(q, *attention.keys_and_values(c, r), context)


# --- local attention: Mistral, BLOOM --------------------------------------------------------------


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi's slopes, [a], float64. If a is not a power of two: the slopes of the power n below it,
    then every second one of 2n (as in the authors' code and in BLOOM)."""
    n = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    between = [2 ** (-4 * i / n) for i in range(1, 2 * n, 2)]
    # A model on the meta device has real slopes too.
    return torch.tensor((slopes + between)[:num_heads], dtype=torch.float64, device="cpu")


class LocalBias(nn.Module):
    """The bias that is added to the scores, -∞ where a token is hidden."""

    def __init__(self, config: GPTConfig, layer: int = 0):
        super().__init__()
        self.window = config.window_of(layer)
        self.slopes = alibi_slopes(config.num_heads) if config.positions == "alibi" else None

    def shard_heads(self, group: dist.ProcessGroup) -> None:
        """Keep the heads of this tensor-parallel rank."""
        if self.slopes is not None:
            self.slopes = self.slopes.chunk(group.size())[group.rank()]

    def forward(self, q: Tensor, documents: Tensor | None = None) -> Tensor:
        """The bias of a whole sequence. q: [b, a, s, d]; documents: [b, s] as in
        base/document_mask.py -> [1 or b, 1 or a, s, s], in q's dtype"""
        at = torch.arange(q.shape[2], device=q.device).unsqueeze(0)
        bias = self.between(at, at, q)
        if documents is not None:
            other = documents.unsqueeze(2) != documents.unsqueeze(1)  # [b, s, s]
            bias = bias.masked_fill(other.unsqueeze(1), -torch.inf)
        return bias

    def between(self, queries: Tensor, keys: Tensor, like: Tensor) -> Tensor:
        """The bias between positions. queries: [b, s]; keys: [b, n]; like: has the device and the
        dtype of the result -> [b, 1 or a, s, n]"""
        distance = queries.unsqueeze(2) - keys.unsqueeze(1)  # [b, s, n]
        hidden = distance < 0
        if self.window:
            hidden = hidden | (distance >= self.window)
        distance, hidden = distance.unsqueeze(1), hidden.unsqueeze(1)  # [b, 1, s, n]
        if self.slopes is None:
            bias = torch.zeros(hidden.shape, device=like.device)
        else:
            # Distances are whole numbers: float32 is exact up to 2^24.
            slopes = self.slopes_on(like.device).to(torch.promote_types(like.dtype, torch.float32))
            bias = -slopes.view(-1, 1, 1) * distance  # [b, a, s, n]
        return bias.masked_fill(hidden, -torch.inf).to(like.dtype)

    def slopes_on(self, device: torch.device) -> Tensor:
        """The slopes [a] on a device. On a GPU they are kept there, because a CUDA graph cannot
        copy them (cuda_graphs.py)."""
        if device.type == "cuda":
            self.slopes = self.slopes.to(device)
        return self.slopes.to(device)


class LocalProbabilities(nn.Module):
    """Replaces gpt.CausalProbabilities. q, k: [b, a, s, d] -> [b, a, s, s]"""

    def __init__(self, local: LocalBias):
        super().__init__()
        self.local = local

    def forward(self, q: Tensor, k: Tensor, documents: Tensor | None) -> Tensor:
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        return (scores + self.local(q, documents)).softmax(-1)


class LocalFusedAttention(nn.Module):
    """Replaces gpt.FusedAttention. q: [b, a, s, d]; k, v: [b, a_kv, s, d] -> [b, s, ad]"""

    def __init__(self, local: LocalBias):
        super().__init__()
        self.local = local

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: gpt.Context) -> Tensor:
        bias = self.local(q, context.documents)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2)


def window_of(local: LocalBias | None) -> int:
    return local.window if local else 0


def local_bias(module: nn.Module) -> LocalBias | None:
    """The LocalBias of a block, or of its core attention; None for plain causal attention."""
    found = (part for part in module.modules() if isinstance(part, LocalBias))
    return next(found, None)


# --- apply ----------------------------------------------------------------------------------------


def apply(model: gpt.GPT) -> None:
    """Add the parts of the family of model.config, in place, right after GPT(config)."""
    config, embedding = model.config, model.embedding
    # On the meta device tensors have no storage.
    with embedding.tokens.weight.device:
        if config.embedding_scale:
            embedding.scale = Scale(math.sqrt(config.hidden_size))
        if config.embedding_norm:
            embedding.norm = gpt.make_norm(config)
        for number in model.blocks if config.post_norm or config.parallel_block else ():
            block = PostNormBlock if config.post_norm else ParallelBlock
            model.blocks[number] = block(config)
        if config.post_norm:
            # The last block ends with a norm.
            model.head.norm = nn.Identity()
        for number, block in model.blocks.items():
            apply_to_block(block, config, int(number))
        if config.norm.endswith("1p"):
            replace_norms(model)
    if not embedding.tokens.weight.is_meta:
        # New matrices have the values of seed 0 too.
        for name, p in model.named_parameters():
            p.data.copy_(model.init_parameter(name, p.shape, gpt.generator(0, name)))
    if config.rotary_factor != 1:
        from base import rotary_scaling

        model.rotary_frequencies = rotary_scaling.FREQUENCIES[config.rotary_scaling]


def apply_to_block(block: gpt.Block, config: GPTConfig, layer: int) -> None:
    if config.kv_rank:
        block.attention = LatentAttention(config)
    attention = block.attention
    block.mlp.activation = ACTIVATIONS[config.activation]()
    if config.qk_norm:
        attention.head_norms = HeadNorms(config)
    if config.window_of(layer) or config.positions == "alibi":
        local = LocalBias(config, layer)
        if config.attention == "fused":
            attention.core = LocalFusedAttention(local)
        else:
            attention.core.probabilities = LocalProbabilities(local)


def replace_norms(model: gpt.GPT) -> None:
    """Replace every norm by Gemma's or Nemotron's, whose weights begin at 0."""
    model.norm_weight = 0.0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.RMSNorm | nn.LayerNorm):
                norm = RMSNorm1p if isinstance(child, nn.RMSNorm) else LayerNorm1p
                setattr(parent, name, norm(child.normalized_shape, child.eps))


def build(config: GPTConfig) -> gpt.GPT:
    """A whole model of any family, with the initial values of seed 0 (on the meta device: no
    values). moe.apply adds experts. A configuration of models/ builds a model of its own."""
    if hasattr(config, "build"):
        return config.build()
    model = gpt.GPT(config)
    apply(model)
    return model
