"""A model that reads pictures: their features stand in a decoder's sequence (LLaVA, Liu et al.,
arXiv 2304.08485; NeMo calls it NeVA).

    picture [b, c, H, W] -> tower, as a ViT's -> projection W -> features [b, n, h]
                                                                      |
    tokens [b, s]    V+0 .. V+n-1 | w h a t .. ? | r e d   ->   F .. F | E E E .. E | E E E
                     the picture    the question   answer       vectors [b, s, h] of the decoder

The decoder is gpt.py's, of any family (families.py). V is the size of the vocabulary: token V + j
stands for feature j of its own sample, as virtual tokens do in prompt_tuning.py. The features are
those before the last layer of a ViT or CLIP, so a tower that starts from one is without this layer.
Only answers count in the loss.

Tower and projection are parts of the embedding, so they are on the first pipeline stage, as in
Megatron-LM by default (--layer-split balances it), and every technique finds them there. Sequence
parallelism shards the patches too; their features are gathered, [b, n/t, h] -> [b, n, h], before
each rank takes those that stand in its shard of the sequence. For a micro-batch without a picture
the tower reads zeros, with gradient 0: all ranks join the same collectives.

    torchrun --nproc-per-node 2 -m models.multimodal --data shapes --tp 2 --out runs/multimodal
    python -m models.ask_picture --checkpoint runs/multimodal --picture FILE.png --prompt "what ..?"
    python -m course.multimodal     a lesson: a row, what learns, the all-gather's adjoint

Not covered: several pictures in a sequence, or of several sizes; recomputing, compiling or FP8 of
the tower; a tower on ranks of its own (Megatron-LM has them).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import families
import gpt
from base import terminal
from base.model_config import FieldError, MoEConfig, divisors
from models import clip, vit
from models.pictures import Context
from sequence_parallel import gather_sequence

# --- the shape ------------------------------------------------------------------------------------


# Fields of a tower -> those of the ViT or CLIP that it is like.
OF_TOWER = {name: name for name in ("picture_size", "channels", "patch_size")}
OF_TOWER |= dict(vision_hidden_size="hidden_size", vision_heads="num_heads")
OF_TOWER |= dict(vision_class_tokens="class_tokens")


@dataclass(frozen=True)
class MultimodalConfig(MoEConfig):
    """The shape of a decoder and of the tower. Raises FieldError."""

    picture_size: int = 224  # pixels of a side
    channels: int = 3
    patch_size: int = 14  # pixels of a side
    vision_layers: int = 23
    vision_hidden_size: int = 1024
    vision_heads: int = 16
    vision_class_tokens: int = 1  # the tower's positions before the patches; the decoder has none
    vision_encoder: str = "vit"  # what the tower is as: a ViT, or the pictures' half of a CLIP
    projection: str = "mlp2x_gelu"  # or linear, the names of LLaVA
    own_choices: ClassVar[dict[str, tuple]] = dict(
        vision_encoder=("vit", "clip"), projection=("linear", "mlp2x_gelu"), num_experts=(0,)
    )

    @property
    def vision(self) -> vit.ViTConfig:
        """The shape of the tower."""
        like = clip.CLIPConfig if self.vision_encoder == "clip" else vit.ViTConfig
        fields = {its: getattr(self, own) for own, its in OF_TOWER.items()}
        return vit.ViTConfig(num_layers=self.vision_layers, norm_eps=like.norm_eps, **fields)

    @property
    def num_patches(self) -> int:
        return self.vision.num_patches

    @property
    def layers_beside(self) -> int:
        return self.vision_layers

    def check(self) -> None:
        super().check()
        for field in ("vision_layers", "vision_hidden_size", "vision_heads"):
            self.check_size(field)
        h, a = self.vision_hidden_size, self.vision_heads
        if h % a:
            others = dict(fits=divisors(h, a), vision_hidden_size=h)
            raise FieldError("vision_heads", a, "must divide {vision_hidden_size}", **others)
        self.check_range("vision_class_tokens", 0, 2**10, "must be at least 0 and at most 2^10")
        if self.seq_length <= self.num_patches:
            rule = f"must be more than the {self.num_patches} positions of a picture"
            raise FieldError("seq_length", self.seq_length, rule)

    build = vit.PictureConfig.build

    def make(self) -> "Multimodal":
        return Multimodal(self)


# --- the model ------------------------------------------------------------------------------------

# The global names of the parts begin so; all others are the decoder's.
PREFIXES = {"vision": "embedding.pictures.tower.", "projection": "embedding.pictures.projection."}


def part_of(name: str) -> str:
    """vision, projection or decoder: where the parameter of this global name is."""
    return next((part for part, begin in PREFIXES.items() if name.startswith(begin)), "decoder")


class CLIPEmbedding(vit.Embedding):
    """The embedding of CLIP's pictures: no bias, and a norm before the blocks."""

    def __init__(self, config: vit.ViTConfig):
        super().__init__(config)
        self.patches = vit.PatchEmbedding(config, config.class_tokens, bias=False)
        self.picture_norm = gpt.make_norm(config)

    def forward(self, tokens: Tensor | None, context: Context) -> Tensor:
        return self.picture_norm(super().forward(tokens, context))


class Tower(vit.ViT):
    """A Vision Transformer without a head. Its parameters have the names of a ViT's or CLIP's."""

    def __init__(self, config: MultimodalConfig):
        super().__init__(config.vision)
        self.head = None
        if config.vision_encoder == "clip":
            self.embedding = CLIPEmbedding(config.vision)
            for block in self.blocks.values():
                block.mlp.activation = clip.QuickGELU()


class Projection(nn.Module):
    """W x, or W₂ gelu(W₁ x) (LLaVA-1.5, arXiv 2310.03744)."""

    def __init__(self, config: MultimodalConfig):
        super().__init__()
        h, wide = config.hidden_size, config.projection == "mlp2x_gelu"
        self.first = nn.Linear(config.vision_hidden_size, h)
        self.second = nn.Linear(h, h) if wide else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.second is None else self.second(F.gelu(x))


class Pictures(vit.InShards):
    """The features of pictures, on every rank all of them. [b, c, H, W] -> [b, n, h]"""

    def __init__(self, config: MultimodalConfig):
        super().__init__()
        self.tower, self.projection = Tower(config), Projection(config)
        self.first = config.vision_class_tokens

    def forward(self, pictures: Tensor) -> Tensor:
        context = Context(pictures=pictures)
        x = self.tower.run_blocks(self.tower.embedding(None, context), 0, context)
        x = self.projection(x)  # [b, n, h] and the class tokens, or a shard of it
        if self.group is not None:
            # Each rank has the gradient of those in its shard: the adjoint is a reduce-scatter.
            x = gather_sequence(x, self.group)
        return x[:, self.first :]

    def write(self, x: Tensor, tokens: Tensor, pictures: Tensor, vocab_size: int) -> Tensor:
        """x with features where tokens are from vocab_size on. x: [b, s, h], or this rank's shard
        of it; tokens: [b, s]"""
        features, (rank, t) = self(pictures), self.shard  # [b, n, h]
        number = (tokens.chunk(t, 1)[rank] - vocab_size).unsqueeze(-1)  # [b, s, 1], or a shard
        found = features.gather(1, number.clamp(min=0).expand_as(x))
        return torch.where(number >= 0, found, x)


class Embedding(gpt.Embedding):
    """tokens: [b, s] -> [b, s, h]. Without pictures in the context it is the decoder's own."""

    def __init__(self, config: MultimodalConfig):
        super().__init__(config)
        self.vocab_size, self.pictures = config.vocab_size, Pictures(config)

    def forward(self, tokens: Tensor, context=gpt.PLAIN) -> Tensor:
        # A decoder that generates gets a gpt.Context, which has no pictures.
        pictures = getattr(context, "pictures", None)
        if pictures is None:
            return super().forward(tokens, context)
        x = self.tokens(tokens.masked_fill(tokens >= self.vocab_size, 0))
        x = self.pictures.write(x, tokens, pictures, self.vocab_size)
        x = self.norm(self.scale(x))
        if self.positions is not None:
            x = self.positions(x, context.documents)
        return self.dropout(x, context.drop_key)


class Multimodal(gpt.GPT):
    """A decoder with a tower. Made on the meta device: MultimodalConfig.build gives it values."""

    def __init__(self, config: MultimodalConfig):
        super().__init__(config)
        self.embedding = Embedding(config)
        if config.tied:
            self.head.output.weight = self.embedding.tokens.weight
        families.apply(self)

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        if part_of(name) == "vision":
            tower = self.embedding.pictures.tower
            return tower.init_parameter(name.removeprefix(PREFIXES["vision"]), shape, generator)
        return super().init_parameter(name, shape, generator)


if __name__ == "__main__":
    import train
    from models import multimodal_runs

    terminal.command(lambda argv: train.main(argv, multimodal_runs.MultimodalRun))
