"""BERT: an encoder, which reads a text in both directions (Devlin et al., arXiv 1810.04805).

    tokens [b, s] -> norm(token + position + type) -> Block x L -> Head -> logits [b, s, V]

    Block:  x = norm(x + dropout(attention(x) + bias))        post-norm: each norm comes last
            x = norm(x + dropout(mlp(x) + bias))
    Head:   norm(gelu(x W + b)) Eᵀ + c                        E: the embedding's matrix

It is gpt.py's model with four other parts, and every technique is applied to it as it is:

    attention     without the causal mask: a token sees the tokens after it too
    embedding     a vector for the type of a token (first or second text of a pair); a norm
    blocks        families.PostNormBlock; GELU by the error function
    head          a layer before the matrix, and a bias for each token of the vocabulary

The model learns to fill in what was hidden (models/masking.py), so the loss counts hidden tokens
only. RoBERTa (arXiv 1907.11692) is a BERT with one type of token.

    torchrun --nproc-per-node 2 -m models.bert --data FILES --tp 2 --out runs/bert
    python -m course.bert           a lesson: who sees whom, what a technique needs of a model

Not covered: the prediction of the next sentence, which RoBERTa leaves out without a loss.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import families
import gpt
import sharding
from base import terminal
from base.dropout import layer_key
from base.model_config import MoEConfig
from models.batch import Context

# --- the shape ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BertConfig(MoEConfig):
    """The shape of a BERT: the fields of GPTConfig with BERT's defaults. Raises FieldError."""

    seq_length: int = 512
    vocab_size: int = 30522
    norm_eps: float = 1e-12
    activation: str = "exact-gelu"
    post_norm: bool = True
    # 2: a token belongs to the first or the second text of a pair. RoBERTa has 1.
    token_types: int = 2
    causal: ClassVar[bool] = False
    head_transform: ClassVar[bool] = True
    own_choices: ClassVar[dict[str, tuple]] = dict(
        norm=("layernorm",),
        activation=("exact-gelu", "gelu"),
        positions=("learned",),
        attention_bias=("all",),
        mlp_bias=(True,),
        tied=(True,),
        post_norm=(True,),
        qk_norm=(False,),
        sliding_window=(0,),
        num_experts=(0,),
    )

    def check(self) -> None:
        super().check()
        rule = "must be at least 2, for [CLS] and a token of text"
        self.check_range("seq_length", 2, torch.inf, rule)
        self.check_range("token_types", 1, 2**16, "must be at least 1 and at most 2^16")

    def build(self) -> "Bert":
        """The model, with the initial values of seed 0 (on the meta device: no values)."""
        device = torch.get_default_device()
        with torch.device("meta"):
            model = Bert(self)
        sharding.init(model, 0, device, torch.get_default_dtype())
        return model


# --- the model ------------------------------------------------------------------------------------


PLAIN = Context()


def same_document(documents: Tensor | None) -> Tensor | None:
    """The mask of the tokens (last dimension) that each token sees. documents: [b, s] -> [b, 1, s,
    s] bool; None: it sees all."""
    if documents is None:
        return None
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)


class Probabilities(nn.Module):
    """softmax(q kᵀ / √d), in both directions. q, k: [b, a, s, d] -> [b, a, s, s]"""

    def forward(self, q: Tensor, k: Tensor, documents: Tensor | None) -> Tensor:
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        if documents is not None:
            scores = scores.masked_fill(~same_document(documents), -torch.inf)
        return scores.softmax(-1)


class FusedAttention(nn.Module):
    """The same without dropout; the s x s matrix is never written. q: [b, a, s, d] -> [b, s, ad]"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        mask, grouped = same_document(context.documents), q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        return y.transpose(1, 2).flatten(2)


class Embedding(gpt.Embedding):
    """tokens: [b, s] -> [b, s, h], or this rank's shard of the sequence"""

    def __init__(self, config: BertConfig):
        super().__init__(config)
        self.norm = gpt.make_norm(config)
        types = torch.empty(config.token_types, config.hidden_size)
        self.types = nn.Embedding.from_pretrained(types, freeze=False)

    def forward(self, tokens: Tensor, context: Context = PLAIN) -> Tensor:
        s, longest = tokens.shape[1], self.seq_length
        if s > longest:
            raise ValueError(f"a sequence of {s} tokens is longer than seq_length {longest}")
        x = self.positions(self.tokens(tokens), context.documents)
        types = torch.zeros_like(tokens) if context.types is None else context.types
        # Under sequence parallelism x is the n-th shard of the sequence, its dimension 1.
        n, length = self.dropout.shard_index.get(1, 0), x.shape[1]
        x = x + self.types(types[:, n * length : (n + 1) * length])
        return self.dropout(self.norm(x), context.drop_key)


class Transform(nn.Module):
    """The layer before the head's matrix: norm(gelu(x W + b)). x: [b, s, h] -> [b, s, h]"""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = families.ACTIVATIONS[config.activation]()
        self.norm = gpt.make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x), None))


class Bert(gpt.GPT):
    """A whole BERT. Made on the meta device: BertConfig.build gives it values."""

    # Whether the head takes dropout's key in the place of targets (models/classify.py).
    head_has_dropout = False

    def __init__(self, config: BertConfig):
        super().__init__(config)
        families.apply(self)
        self.embedding = Embedding(config)
        for block in self.blocks.values():
            if config.attention == "fused":
                block.attention.core = FusedAttention()
            else:
                block.attention.core.probabilities = Probabilities()
        self.head.norm = Transform(config)
        self.head.output = nn.Linear(config.hidden_size, config.vocab_size)
        self.head.output.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor, targets=None, context: Context = PLAIN, x=None) -> Tensor:
        """As GPT.forward."""
        if self.head_has_dropout:
            targets = layer_key(context.drop_key, self.config.num_layers)
        return super().forward(tokens, targets, context, x)

    def run_blocks(self, x: Tensor, s: int, context: Context = PLAIN) -> Tensor:
        """x: [b, s, h], or a shard of it; s: the length of the whole sequence."""
        for number, block in self.blocks.items():
            x = block(x, context._replace(drop_key=layer_key(context.drop_key, int(number))))
        return x


if __name__ == "__main__":
    import train
    from models import runs

    terminal.command(lambda argv: train.main(argv, runs.BertRun))
