"""T5: an encoder reads a text, and a decoder writes another (Raffel et al., arXiv 1910.10683).

    source [b, n] -> e = embedding -> encoder blocks -> norm -+
                                                              | cross attention, in each block
    target [b, m] -> d = embedding ------------------> decoder blocks -> norm -> E -> [b, m, V]

    encoder block:  e = e + attention(norm(e));  e = e + mlp(norm(e))
    decoder block:  d = d + attention(norm(d));  d = d + cross(norm(d), e);  d = d + mlp(norm(d))

    attention = softmax(q kᵀ + bias) v    without the mask in the encoder, causal in the decoder,
                                          and without 1 / √d
    cross:      q from the decoder, k and v from the encoder's output; no bias

The bias of query i and key j is a number of its own for each head and each bucket of distances
i - j: near ones have buckets of their own, far ones share them. All layers of the encoder read one
table, and all of the decoder another. mT5 (arXiv 2010.11934) and T5 1.1 have a gated MLP, and a
head of their own.

So that every technique works as it is, the model is a list of blocks, those of the encoder first,
and what travels from block to block is both parts: x = [e | d], [b, n + m, h]. A pipeline stage
passes on what it does not change. So the encoder's output reaches each stage of the decoder, and
its gradient comes back from all of them. The tables are on every stage (Pipeline.sum_shared).

    torchrun --nproc-per-node 2 -m models.t5 --data FILES --pp 2 --out runs/t5
    python -m course.t5             a lesson: buckets of distances, what crosses a stage

Not covered: dropout inside the MLP; stages that send e alone; virtual stages; context parallelism.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import families
import gpt
import sharding
from base import terminal
from base.dropout import Dropout, layer_key
from base.model_config import FieldError, MoEConfig
from models.batch import Context
from sharding import Shard, shard_parameter

# --- the shape ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class T5Config(MoEConfig):
    """The shape of a T5: the fields of GPTConfig with T5's defaults. num_layers counts the blocks
    of both halves. Raises FieldError."""

    # Blocks of the encoder; 0 means half of them.
    encoder_layers: int = 0
    # Tokens of the longest source and of the longest target. No weight depends on them.
    seq_length: int = 512
    target_length: int = 114
    vocab_size: int = 32128
    norm_eps: float = 1e-6
    norm: str = "rmsnorm"
    activation: str = "relu"
    positions: str = "relative"
    attention_bias: str = "none"
    mlp_bias: bool | None = False
    # Distances have so many buckets; those of max_distance or more share the last one.
    buckets: int = 32
    max_distance: int = 128
    own_choices: ClassVar[dict[str, tuple]] = dict(
        norm=("rmsnorm",),
        activation=("relu", "geglu"),
        positions=("relative",),
        attention_bias=("none",),
        mlp_bias=(False,),
        post_norm=(False,),
        qk_norm=(False,),
        sliding_window=(0,),
        num_experts=(0,),
    )

    def __post_init__(self):
        self.set_default("encoder_layers", self.num_layers // 2)
        super().__post_init__()

    def check(self) -> None:
        if self.num_kv_heads != self.num_heads:
            rule = f"keys have {self.num_kv_heads} heads, and a T5 has one number for both"
            raise FieldError("num_heads", self.num_heads, rule, self.num_kv_heads)
        super().check()
        if not 0 < self.encoder_layers < self.num_layers:
            rule = "must be at least 1 and below {num_layers}, for the decoder has the others"
            others = dict(num_layers=self.num_layers)
            raise FieldError("encoder_layers", self.encoder_layers, rule, **others)
        if self.buckets < 4 or self.buckets % 4:
            raise FieldError("buckets", self.buckets, "must be a multiple of 4", [32])
        if self.max_distance <= self.buckets:
            rule = "must be more than {buckets}"
            raise FieldError("max_distance", self.max_distance, rule, buckets=self.buckets)
        self.check_size("target_length")

    def build(self) -> "T5":
        """The model, with the initial values of seed 0 (on the meta device: no values)."""
        device = torch.get_default_device()
        with torch.device("meta"):
            model = T5(self)
        sharding.init(model, 0, device, torch.get_default_dtype())
        return model


# --- attention ------------------------------------------------------------------------------------


def bucket_of(distance: Tensor, both_ways: bool, buckets: int, longest: int) -> Tensor:
    """The bucket of each distance, key - query (int64; any shape). Half of the buckets are for one
    distance each, the others grow on a log scale up to `longest`. both_ways: keys after the query
    have half of all buckets; else they share bucket 0, as they are hidden."""
    first = torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        first = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # As in the published code, float32 decides where a bucket ends.
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(longest / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


class RelativePositions(nn.Module):
    """The two tables of biases, [2, buckets, a]: that of the encoder, that of the decoder."""

    is_lookup = True

    def __init__(self, config: T5Config):
        super().__init__()
        self.buckets, self.longest = config.buckets, config.max_distance
        self.weight = nn.Parameter(torch.empty(2, config.buckets, config.num_heads))

    def shard_heads(self, group) -> None:
        shard_parameter(self, "weight", Shard(2, group))

    def forward(self, queries: Tensor, keys: Tensor, decoder: bool) -> Tensor:
        """The bias between positions. queries: [s]; keys: [n] -> [1, a, s, n]"""
        distance = keys - queries.unsqueeze(1)  # [s, n]
        bucket = bucket_of(distance, not decoder, self.buckets, self.longest)
        return F.embedding(bucket, self.weight[int(decoder)]).permute(2, 0, 1).unsqueeze(0)


class ExplicitAttention(gpt.ExplicitAttention):
    """dropout(softmax(q kᵀ + bias)) v. q: [b, a, s, d]; k, v: [b, a, n, d]; bias: [1 or b, 1 or a,
    s, n], or None -> [b, s, ad]"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context, bias) -> Tensor:
        scores = q @ k.transpose(2, 3)
        p = (scores if bias is None else scores + bias).softmax(-1)
        return (self.dropout(p, context.drop_key) @ v).transpose(1, 2).flatten(2)


class FusedAttention(nn.Module):
    """The same without dropout; the scores are not kept."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context, bias) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return y.transpose(1, 2).flatten(2)


class Attention(gpt.Attention):
    """Self-attention, or cross attention: keys and values of `memory`. x: [b, s, h] -> [b, s, h]"""

    def __init__(self, config: T5Config, site: int, crosses: bool = False):
        super().__init__(config)
        fused = config.attention == "fused"
        self.core = FusedAttention() if fused else ExplicitAttention(config.dropout, site)
        if crosses:
            self.project_kv = gpt.ProjectTogether()

    def forward(self, x: Tensor, context: Context, bias: Tensor | None, memory=None) -> Tensor:
        """memory: [b, n, h], the encoder's output."""
        if memory is None:
            q, k, v = self.project(x, self.query, self.key, self.value)
        else:
            (q,) = self.project(x, self.query)
            k, v = self.project_kv(memory, self.key, self.value)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        return self.output(self.core(q, k, v, context, bias))


# --- blocks ---------------------------------------------------------------------------------------


class Block(gpt.Block):
    """A layer of the encoder, or with `crosses` of the decoder. The last one of each ends with a
    norm and dropout. x: [b, s, h] -> [b, s, h]"""

    def __init__(self, config: T5Config, crosses: bool, last: bool):
        super().__init__(config)
        self.attention = Attention(config, site=1)
        if crosses:
            self.cross_norm = gpt.make_norm(config)
            self.cross_attention = Attention(config, site=20, crosses=True)
            self.cross_residual = gpt.BiasDropoutAdd(config.dropout, site=21)
        self.mlp.activation = families.ACTIVATIONS[config.activation]()
        self.last_norm = gpt.make_norm(config) if last else nn.Identity()
        self.last_dropout = Dropout(config.dropout if last else 0.0, site=22)

    def forward(self, x: Tensor, context: Context, bias: Tensor, memory=None, mask=None) -> Tensor:
        """bias: of the scores, [1 or b, a, s, s]; memory: [b, n, h], for cross attention, whose
        scores have the bias `mask`, [b, 1, s, n]."""
        key = context.drop_key
        y = self.attention(self.attention_norm(x), context, bias)
        x = self.attention_residual(y, None, x, key)
        if memory is not None:
            y = self.cross_attention(self.cross_norm(x), context, mask, memory)
            x = self.cross_residual(y, None, x, key)
        x = self.mlp_residual(self.mlp(self.mlp_norm(x)), None, x, key)
        return self.last_dropout(self.last_norm(x), key)


# --- the model ------------------------------------------------------------------------------------

# The layer number in dropout's key of the target's embedding; those of layers are smaller.
TARGET_EMBEDDING = 2**16


class Embedding(gpt.Embedding):
    """[source | target]: [b, n + m] -> [b, n + m, h], or the shards of both, [b, (n + m)/t, h]"""

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        source, target = tokens[:, : context.source], tokens[:, context.source :]
        of_target = layer_key(context.drop_key, TARGET_EMBEDDING)
        e = self.dropout(self.tokens(source), context.drop_key)
        return torch.cat((e, self.dropout(self.tokens(target), of_target)), 1)


class T5(gpt.GPT):
    """A whole T5. Made on the meta device: T5Config.build gives it values."""

    def __init__(self, config: T5Config):
        super().__init__(config)
        last = (config.encoder_layers - 1, config.num_layers - 1)
        for n in range(config.num_layers):
            self.blocks[str(n)] = Block(config, n >= config.encoder_layers, n in last)
        self.embedding = Embedding(config)
        self.positions = RelativePositions(config)
        # A shared matrix has embeddings of length √h, and the head's input is scaled instead.
        self.head.norm = families.Scale(config.hidden_size**-0.5) if config.tied else nn.Identity()
        if config.tied:
            self.head.output.weight = self.embedding.tokens.weight

    def run_blocks(self, x: Tensor, s: int, context: Context) -> Tensor:
        """x: [e | d], or a shard of each; s: n + m. Returns both, and before the head d alone."""
        if not 0 < context.source < s:
            raise ValueError(f"Context.source is {context.source}; a T5 reads 1 to {s - 1} tokens")
        n = context.source * x.shape[1] // s
        e, d = x[:, :n], x[:, n:]
        biases = self.biases(x, s, context)
        for number, block in self.blocks.items():
            own = context._replace(drop_key=layer_key(context.drop_key, int(number)))
            if int(number) < self.config.encoder_layers:
                e = block(e, own, biases[0])
            else:
                d = block(d, own, biases[1], e, biases[2])
        return torch.cat((e, d), 1) if self.head is None else d

    def biases(self, x: Tensor, s: int, context: Context) -> tuple:
        """The biases of the scores: in the encoder, in the decoder, of the decoder's queries and
        the encoder's keys. None for a half of which this stage has no block."""
        numbers = [int(number) for number in self.blocks]
        at = torch.arange(s, device=x.device)
        source, target = at[: context.source], at[: s - context.source]
        encoder = decoder = cross = None
        documents = context.documents
        if any(n < self.config.encoder_layers for n in numbers):
            encoder = hide_others(self.positions(source, source, False), documents, context, 0, 0)
        if any(n >= self.config.encoder_layers for n in numbers):
            decoder = self.positions(target, target, True)
            decoder = decoder.masked_fill(target > target.unsqueeze(1), -torch.inf)
            decoder = hide_others(decoder, documents, context, 1, 1)
            if documents is not None:
                cross = hide_others(x.new_zeros(1, 1, 1, 1), documents, context, 1, 0)
        return encoder, decoder, cross


def hide_others(bias: Tensor, documents: Tensor | None, context: Context, q: int, k: int) -> Tensor:
    """-∞ where query and key are of two documents. q, k: 0 for the source, 1 for the target."""
    if documents is None:
        return bias
    parts = documents[:, : context.source], documents[:, context.source :]
    other = parts[q].unsqueeze(2) != parts[k].unsqueeze(1)  # [b, s, n]
    return bias.masked_fill(other.unsqueeze(1), -torch.inf)


if __name__ == "__main__":
    import train
    from models import runs

    terminal.command(lambda argv: train.main(argv, runs.T5Run))
