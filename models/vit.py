"""A Vision Transformer: a transformer that reads a picture as a row of patches (Dosovitskiy et al.,
arXiv 2010.11929).

    picture [b, c, H, W] -> patches [b, n, c p²] -> [class tokens | patches W + b] + positions
                         -> Block x L, without the causal mask -> norm -> class token, or the mean
                            of all -> logits [b, 1, classes]

A picture of 224 x 224 pixels has n = 14 x 14 patches of 16 x 16. Beside the embedding and the head
it is gpt.py's model: each patch sees all others.

Sequence parallelism shards the patches like the tokens of a text. The number of positions must be
divisible by t, and 196 patches and one class token are 197. So Megatron-LM has 8 class tokens, of
which the first is read; without one (0) the mean of all patches is read.

    torchrun --nproc-per-node 2 -m models.vit --data digits --tp 2 --out runs/digits
    python -m course.vit            a lesson: patches, what a patch sees, what tp = 2 needs

Not covered: positions of another picture size (interpolation), Swin, augmentation.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import families
import gpt
import sharding
from base import terminal
from base.cross_entropy import cross_entropy
from base.dropout import Dropout, layer_key
from base.model_config import FieldError, GPTConfig, MoEConfig
from models import bert
from models.pictures import Context
from sequence_parallel import gather_sequence

# --- the shape ------------------------------------------------------------------------------------

# Of encoders whose norms come first, as a GPT's do.
ENCODER_CHOICES = dict(
    norm=("layernorm",),
    activation=("exact-gelu", "gelu"),
    positions=("learned",),
    attention_bias=("all",),
    mlp_bias=(True,),
    tied=(False,),
    post_norm=(False,),
    qk_norm=(False,),
    sliding_window=(0,),
    num_experts=(0,),
)


@dataclass(frozen=True)
class PictureConfig(MoEConfig):
    """The shape of a model that reads pictures; seq_length follows from it. Raises FieldError."""

    picture_size: int = 224  # pixels of a side
    channels: int = 3
    patch_size: int = 16  # pixels of a side
    vocab_size: int = 1  # of text; 1: none
    activation: str = "exact-gelu"
    tied: bool | None = False
    causal: ClassVar[bool] = False
    own_choices: ClassVar[dict[str, tuple]] = ENCODER_CHOICES

    def __post_init__(self):
        self.check_types()
        for field in ("picture_size", "channels", "patch_size"):
            self.check_range(field, 1, 2**15, "must be at least 1 and at most 2^15")
        size, p = self.picture_size, self.patch_size
        if size % p:
            rule = "must divide {picture_size}"
            raise FieldError("patch_size", p, rule, picture_size=size)
        object.__setattr__(self, "seq_length", self.positions_before + self.num_patches)
        super().__post_init__()

    @property
    def num_patches(self) -> int:
        return (self.picture_size // self.patch_size) ** 2

    @property
    def positions_before(self) -> int:
        """The positions of a sequence before those of the patches."""
        return 0

    def make(self) -> gpt.GPT:
        """The model, on the meta device."""
        raise NotImplementedError

    def build(self) -> gpt.GPT:
        """The model, with the initial values of seed 0 (on the meta device: no values)."""
        device = torch.get_default_device()
        with torch.device("meta"):
            model = self.make()
        sharding.init(model, 0, device, torch.get_default_dtype())
        return model


@dataclass(frozen=True)
class ViTConfig(PictureConfig):
    """The shape of a Vision Transformer. Raises FieldError."""

    # As published weights have it.
    norm_eps: float = 1e-12
    # Megatron-LM has 8; 0: the mean of all patches is read.
    class_tokens: int = 1
    classes: int = 1000

    @property
    def positions_before(self) -> int:
        self.check_range("class_tokens", 0, 2**10, "must be at least 0 and at most 2^10")
        return self.class_tokens

    def check(self) -> None:
        super().check()
        self.check_size("classes")

    def make(self) -> "ViT":
        return ViT(self)


# --- the model ------------------------------------------------------------------------------------


def to_patches(pictures: Tensor, p: int) -> Tensor:
    """[b, c, H, W] -> [b, n, c p²], row by row; a patch has all of its first channel first."""
    return F.unfold(pictures, p, stride=p).transpose(1, 2)


def to_pictures(patches: Tensor, p: int) -> Tensor:
    """Square pictures of patches. [b, n, c p²] -> [b, c, H, W]"""
    size = p * int(patches.shape[1] ** 0.5)
    return F.fold(patches.transpose(1, 2), size, p, stride=p)


class InShards(nn.Module):
    """A module that must know its shard of the sequence: sequence_parallel.apply tells it."""

    group: dist.ProcessGroup | None = None
    # This rank's shard, and of how many.
    shard = 0, 1

    def share_sequence(self, group: dist.ProcessGroup) -> None:
        self.group, self.shard = group, (group.rank(), group.size())


class PatchEmbedding(InShards):
    """[class tokens | patches W + b] + positions. pictures: [b, c, H, W] -> [b, s, h], or this
    rank's shard of it, [b, s/t, h]"""

    def __init__(self, config: PictureConfig, class_tokens: int, bias: bool = True):
        super().__init__()
        h, self.patch_size = config.hidden_size, config.patch_size
        self.patch = nn.Linear(config.channels * self.patch_size**2, h, bias)
        self.class_tokens = nn.Parameter(torch.empty(class_tokens, h)) if class_tokens else None
        self.positions = nn.Parameter(torch.empty(class_tokens + config.num_patches, h))

    def forward(self, pictures: Tensor) -> Tensor:
        n, t = self.shard
        # Class tokens, patches and positions become s long each, so that all are cut alike.
        k = 0 if self.class_tokens is None else len(self.class_tokens)
        patches = F.pad(to_patches(pictures, self.patch_size), (0, 0, k, 0))  # [b, s, c p²]
        x = self.patch(patches.chunk(t, 1)[n].to(self.patch.weight.dtype))
        if k:
            at = torch.arange(len(self.positions), device=x.device).unsqueeze(1).chunk(t)[n]
            first = F.pad(self.class_tokens, (0, 0, 0, len(self.positions) - k)).chunk(t)[n]
            x = torch.where(at < k, first, x)
        return x + self.positions.chunk(t)[n]


class Embedding(nn.Module):
    """The picture of each sample as a sequence. tokens: [b, s]; gpt.GPT gives them to each
    embedding, and here they say no more than s -> [b, s, h]"""

    # There is no vocabulary that tensor-parallel ranks could share.
    tokens = None

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.patches = PatchEmbedding(config, config.class_tokens)
        self.dropout = Dropout(config.dropout, site=0)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self.dropout(self.patches(context.pictures), context.drop_key)


class WholeHead(InShards):
    """A head that reads the whole sequence. All tensor-parallel ranks compute it, from the same x.

    Under sequence parallelism x is gathered first, and the ranks' gradients are added up
    afterwards. As all t are equal, each counts for 1 / t.
    """

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.group is None:
            return self.read(x, targets)
        y = self.read(gather_sequence(x, self.group), targets)
        if y.requires_grad:
            y.register_hook(lambda grad: grad / self.shard[1])
        return y

    def read(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """x: [b, s, h]; the result as of gpt.Head, at least in float32."""
        raise NotImplementedError


class Head(WholeHead):
    """x: [b, s, h]; targets: [b, 1] -> the loss of each picture [b, 1]; without targets logits,
    [b, 1, classes]."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.norm, self.mean = gpt.make_norm(config), not config.class_tokens
        self.output = nn.Linear(config.hidden_size, config.classes)

    def read(self, x: Tensor, targets: Tensor | None) -> Tensor:
        x = self.norm(x).mean(1, keepdim=True) if self.mean else self.norm(x[:, :1])
        logits = self.output(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if targets is None else cross_entropy(logits, targets, logits.shape[-1])


def see_all(block: gpt.Block, config: GPTConfig) -> None:
    """Take away a block's causal mask, in place."""
    if config.attention == "fused":
        block.attention.core = bert.FusedAttention()
    else:
        block.attention.core.probabilities = bert.Probabilities()


class Encoder(gpt.GPT):
    """A transformer of blocks that see all positions, with an embedding and a head of its own: a
    subclass sets both."""

    def __init__(self, config: PictureConfig):
        super().__init__(config)
        families.apply(self)
        for block in self.blocks.values():
            see_all(block, config)

    def run_blocks(self, x: Tensor, s: int, context: Context) -> Tensor:
        """x: [b, s, h], or a shard of it; s: the length of the whole sequence."""
        for number, block in self.blocks.items():
            x = block(x, context._replace(drop_key=layer_key(context.drop_key, int(number))))
        return x


class ViT(Encoder):
    """A whole Vision Transformer. Made on the meta device: ViTConfig.build gives it values."""

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.embedding, self.head = Embedding(config), Head(config)


if __name__ == "__main__":
    import train
    from models import picture_runs

    terminal.command(lambda argv: train.main(argv, picture_runs.ViTRun))
