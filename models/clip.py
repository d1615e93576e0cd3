"""CLIP: two encoders, and a loss that asks which caption belongs to which picture (Radford et al.,
arXiv 2103.00020).

    caption [b, m]          -> causal blocks       -> last token  -> norm, W_t, length 1 -> t_i
    picture [b, c, H, W]    -> blocks as in vit.py -> class token -> norm, W_p, length 1 -> p_i

    z_ij = exp(scale) p_i · t_j,    loss_i = ½ (- log softmax_j(z_ij)_i - log softmax_j(z_ji)_i)

The wrong captions of a picture are those of the whole global batch of N pairs (figure 3). So the
loss is no sum over samples: data-parallel ranks gather all features, [n, 2, e] -> [N, 2, e], and
each compares its own n pairs with all N. It holds [n, N] logits, never [N, N]. Other ranks' losses
depend on its features too: their gradient comes back through the adjoint, a reduce-scatter.

A share of several micro-batches takes two passes (Gao et al., arXiv 2101.06983). The first keeps no
graph: it gives the features of all, and then ∂loss/∂features. The second goes back from this
gradient, one micro-batch at a time. That is exact, as both see the same: there is no dropout.

As in models/t5.py the model is one list of blocks, the text's first, and both halves travel as one
tensor: x = [text | picture], [b, m + n, h]. The text is narrower: zeros fill it up.

    torchrun --nproc-per-node 2 -m models.clip --data shapes --tp 2 --out runs/clip
    python -m course.clip           a lesson: what the gradient through the gather adds

Two pictures of a batch may have the same caption (drawn ones have 64). Then each is a wrong answer
for the other: noise, as in CLIP's own data.

Not covered: CLIP's limit of 100 for exp(scale); augmentation; labels as captions (zero-shot).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from base import terminal
from base.model_config import FieldError, GPTConfig, divisors
from models.pictures import Context
from models.vit import ENCODER_CHOICES, PatchEmbedding, PictureConfig, WholeHead, see_all
from sequence_parallel import gather_sequence

# --- the loss over the global batch ---------------------------------------------------------------


def contrastive_losses(y: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The loss of each of this rank's n pairs among the N of all ranks. y: [n, 2, e], the features
    of captions and of pictures, as the head gives them -> [n]"""
    texts, pictures = pairs = y.transpose(0, 1)  # [n, e] each
    rank, all_texts, all_pictures = 0, texts, pictures
    if group is not None:
        # Pairs stand where a sequence has its positions.
        rank, (all_texts, all_pictures) = group.rank(), gather_sequence(pairs, group)  # [N, e] each
    own = rank * len(y) + torch.arange(len(y), device=y.device)
    of_pictures = F.cross_entropy(pictures @ all_texts.T, own, reduction="none")  # of [n, N]
    of_texts = F.cross_entropy(texts @ all_pictures.T, own, reduction="none")
    return (of_pictures + of_texts) / 2


def losses_and_gradient(y: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """(the same [n], the gradient of all ranks' losses with respect to y [n, 2, e])"""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        losses = contrastive_losses(y, group)
        (gradient,) = torch.autograd.grad(losses.sum(), y)
    return losses.detach(), gradient


# --- the shape ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CLIPConfig(PictureConfig):
    """The shape of a CLIP. num_layers counts the blocks of both halves; hidden_size, num_heads and
    ffn_hidden_size are the picture's. Raises FieldError."""

    vocab_size: int = 49408
    activation: str = "quick-gelu"
    class_tokens: int = 1  # of which the first is read; more make the length divisible by t
    text_layers: int = 0  # 0: half of all
    text_length: int = 77  # m: tokens of the longest caption, its end included
    text_hidden_size: int = 512
    text_heads: int = 8
    embedding_size: int = 512  # e
    own_choices: ClassVar[dict[str, tuple]] = ENCODER_CHOICES | dict(
        activation=("quick-gelu",), dropout=(0.0,)
    )

    def __post_init__(self):
        self.set_default("text_layers", self.num_layers // 2)
        super().__post_init__()

    @property
    def positions_before(self) -> int:
        for field, least in (("class_tokens", 1), ("text_length", 2)):
            self.check_range(field, least, 2**15, f"must be at least {least} and at most 2^15")
        return self.text_length + self.class_tokens

    def check(self) -> None:
        super().check()
        for field in ("text_heads", "embedding_size"):
            self.check_size(field)
        layers, h, heads = self.num_layers, self.text_hidden_size, self.text_heads
        rule = f"must be at least 1 and below the {layers} layers of text and picture"
        self.check_range("text_layers", 1, layers - 1, rule)
        rule = f"must be at least 1 and at most the picture's {self.hidden_size}"
        self.check_range("text_hidden_size", 1, self.hidden_size, rule)
        if h % heads:
            rule, fits = "must divide {text_hidden_size}", divisors(h, heads)
            raise FieldError("text_heads", heads, rule, fits, text_hidden_size=h)

    @property
    def text(self) -> GPTConfig:
        """The shape of the text's encoder."""
        sizes = self.text_layers, self.text_hidden_size, self.text_heads
        fields = dict(seq_length=self.text_length, vocab_size=self.vocab_size)
        return GPTConfig(*sizes, **fields, attention=self.attention, norm_eps=self.norm_eps)

    @property
    def encoders(self) -> tuple[GPTConfig, GPTConfig]:
        sizes = self.num_layers - self.text_layers, self.hidden_size, self.num_heads
        fields = dict(ffn_hidden_size=self.ffn_hidden_size, head_dim=self.head_dim)
        return self.text, GPTConfig(*sizes, **fields, seq_length=1, vocab_size=1)

    def make(self) -> "CLIP":
        return CLIP(self)


# --- the model ------------------------------------------------------------------------------------


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), of x + bias"""

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x if bias is None else x + bias
        return x * (1.702 * x).sigmoid()


def together(text: Tensor, pictures: Tensor) -> Tensor:
    """[text | picture]: [b, m, h'], [b, n, h] -> [b, m + n, h]"""
    return torch.cat((F.pad(text, (0, pictures.shape[2] - text.shape[2])), pictures), 1)


class Embedding(gpt.Embedding):
    """[text | picture]: tokens [b, s], of which the first m are the caption's -> [b, s, h], or the
    shards of both, [b, s/t, h]"""

    def __init__(self, config: CLIPConfig):
        super().__init__(config.text)
        self.patches = PatchEmbedding(config, config.class_tokens, bias=False)
        self.picture_norm = gpt.make_norm(config)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        text = super().forward(tokens[:, : self.seq_length], context)
        return together(text, self.picture_norm(self.patches(context.pictures)))


class Head(WholeHead):
    """x: [b, s, h]; targets: [b, 1], the place of each caption's last token (None: m - 1) ->
    features [b, 2, e]: t_i and exp(scale) p_i"""

    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.m, e = config.text_length, config.embedding_size
        self.text_norm, self.picture_norm = gpt.make_norm(config.text), gpt.make_norm(config)
        self.text = nn.Linear(config.text_hidden_size, e, bias=False)
        self.picture = nn.Linear(config.hidden_size, e, bias=False)
        self.scale = nn.Parameter(torch.empty(1))

    def read(self, x: Tensor, targets: Tensor | None) -> Tensor:
        # Each of t shards has a part of the text, [b, m/t, h'], before its part of the picture.
        shards = x.unflatten(1, (self.shard[1], -1))  # [b, t, s/t, h]
        m = self.m // self.shard[1]
        text = shards[:, :, :m, : self.text.in_features].flatten(1, 2)  # [b, m, h']
        class_token = shards[:, 0, m]  # [b, h]
        end = self.m - 1 if targets is None else targets.squeeze(1)
        last_token = text[torch.arange(len(x), device=x.device), end]  # [b, h']
        t, p = self.text(self.text_norm(last_token)), self.picture(self.picture_norm(class_token))
        dtype = torch.promote_types(x.dtype, torch.float32)
        t, p = (F.normalize(y.to(dtype), dim=1) for y in (t, p))  # [b, e]
        return torch.stack((t, self.scale.to(dtype).exp() * p), 1)


class CLIP(gpt.GPT):
    """A whole CLIP. Made on the meta device: CLIPConfig.build gives it values."""

    def __init__(self, config: CLIPConfig):
        super().__init__(config)
        for number, block in self.blocks.items():
            if int(number) < config.text_layers:
                block = self.blocks[number] = gpt.Block(config.text)
            else:
                see_all(block, config)
            block.mlp.activation = QuickGELU()
        self.embedding, self.head = Embedding(config), Head(config)

    def run_blocks(self, x: Tensor, s: int, context: Context) -> Tensor:
        """x: [text | picture], or a shard of each; s: m + n."""
        m = self.config.text_length * x.shape[1] // s
        text, pictures = x[:, :m, : self.config.text_hidden_size], x[:, m:]
        for number, block in self.blocks.items():
            if int(number) < self.config.text_layers:
                text = block(text, context)
            else:
                pictures = block(pictures, context)
        return together(text, pictures)

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        if name == "head.scale":
            return torch.full(shape, 1 / 0.07, device="cpu").log()
        return super().init_parameter(name, shape, generator)


if __name__ == "__main__":
    import train
    from models import clip_runs

    terminal.command(lambda argv: train.main(argv, clip_runs.CLIPRun))
