"""A U-Net finds the noise in a picture at several resolutions (Ho et al., arXiv 2006.11239,
appendix B; Stable Diffusion, 2112.10752).

    block 0   H x W         ------------- skip ------------>   block L - 1   H x W     -> noise
      block 1   H/2 x W/2     --------- skip ------->   block L - 2   H/2 x W/2
        block 2   H/4 x W/4   (the middle; three levels have L = 5 blocks)

    block:  x = x + conv(silu(norm(conv(silu(norm(x))) + time)))     upwards x = [x | skip] first
            x = x + attention(norm([caption | pixels]))              at all levels but the first

As in Imagen (2205.11487, appendix D) the caption's vectors stand before the pixels in attention;
they come from blocks of gpt.py. An edit (InstructPix2Pix, 2211.09800) has its source picture as
further channels. The children are those of gpt.GPT, so data parallelism, ZeRO and recomputation are
applied as they are. A skip needs gradients, so it is an argument of its block.

    torchrun --nproc-per-node 2 -m models.unet --data shapes --zero-stage 3 --out runs/unet

Not covered: several blocks at a level, cascades to larger pictures, tensor and pipeline parallelism
(NeMo's has none either: convolutions are not split, and skips would cross the stages in between).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from base import terminal
from base.dropout import layer_key
from base.model_config import FieldError, GPTConfig
from models.diffusion import DenoiserConfig, TimeEmbedding, squared_error
from models.pictures import Context
from models.vit import ENCODER_CHOICES, PictureConfig, see_all
from run.config import RunConfig
from sharding import num_parameters

# Channels of a group in nn.GroupNorm.
GROUP = 8
# The layer number in dropout's keys of the caption's first block; those of the U-Net are smaller.
CAPTION_BLOCKS = 2**16

# --- the shape ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Levels(PictureConfig):
    """A shape whose blocks halve a picture's resolution level by level, and double it again.
    hidden_size: channels of the first level; each one below has twice as many."""

    # PictureConfig counts the positions of a sequence with it: no patch is one here.
    num_patches: ClassVar[int] = 0

    @property
    def levels(self) -> int:
        return (self.num_layers + 1) // 2

    def level(self, number: int) -> int:
        """The level of a block."""
        return min(number, self.num_layers - 1 - number)

    def width(self, level: int) -> int:
        """The channels of a level."""
        return self.hidden_size << level

    def flops(self) -> float:
        """FLOPs of a forward of one picture, without those of scores and of a caption's blocks."""
        with torch.device("meta"):
            blocks = self.make().blocks.values()
        pixels = [(self.picture_size >> self.level(n)) ** 2 for n in range(self.num_layers)]
        return sum(2.0 * n * num_parameters(block) for n, block in zip(pixels, blocks))

    def check(self) -> None:
        super().check()
        for field, n in dict(picture_size=2 ** (self.levels - 1), hidden_size=GROUP).items():
            if getattr(self, field) % n:
                rule = f"must be a multiple of {n} with {{num_layers}}"
                raise FieldError(field, getattr(self, field), rule, num_layers=self.num_layers)


@dataclass(frozen=True)
class UNetConfig(DenoiserConfig, Levels):
    """The shape of a U-Net; a caption's vectors are as wide as the last level. Raises
    FieldError."""

    patch_size: ClassVar[int] = 1
    caption_layers: int = 2
    activation: str = "gelu"
    own_choices: ClassVar[dict[str, tuple]] = ENCODER_CHOICES | dict(activation=("gelu",))

    @property
    def positions_before(self) -> int:
        """A sequence is a caption; DenoiserConfig counts a position of the time too."""
        return super().positions_before - 1

    def check(self) -> None:
        if self.num_layers < 3 or not self.num_layers % 2:
            raise FieldError("num_layers", self.num_layers, "must be odd, and at least 3", [3, 5])
        super().check()
        self.check_range("caption_layers", 0, 2**15, "must be at least 0 and at most 2^15")

    def transformer(self, level: int = -1) -> GPTConfig:
        """The shape of attention at a level, and at the last one (-1) of what reads the caption."""
        own = dict(attention=self.attention, dropout=self.dropout, vocab_size=self.vocab_size)
        width = self.width(level % self.levels)
        return GPTConfig(1, width, self.num_heads, seq_length=self.text_length, **own)

    def make(self) -> "UNet":
        return UNet(self)


def refuse_layouts(config: RunConfig) -> None:
    """Raises ConfigError."""
    for field, without in dict(tp=1, pp=1, fp8="off").items():
        if getattr(config, field) != without:
            rule = "convolutions have none here. Data parallelism fits, with --zero-stage up to 3"
            config.refuse(field, f"{rule}; -m models.dit has --tp, --pp and --fp8")


# --- parts ----------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """conv(silu(norm(x))). x: [b, c, H, W] -> [b, w, H, W]"""

    def __init__(self, c: int, w: int):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(c // GROUP, c), nn.Conv2d(c, w, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x)))


class Residual(nn.Module):
    """x: [b, c, H, W] -> [b, w, H, W]. h: numbers of a vector for each picture; 0: none."""

    def __init__(self, c: int, w: int, h: int = 0):
        super().__init__()
        self.first, self.last = Convolution(c, w), Convolution(w, w)
        self.vector = nn.Linear(h, w) if h else None
        self.shortcut = nn.Identity() if c == w else nn.Conv2d(c, w, 1)

    def forward(self, x: Tensor, vector: Tensor | None = None) -> Tensor:
        y = self.first(x)
        if self.vector is not None:
            y = y + self.vector(F.silu(vector))[..., None, None]
        return self.shortcut(x) + self.last(y)


def resized(x: Tensor, down: int) -> Tensor:
    """x at half of its resolution (down = 1), at twice (-1), or as it is (0)."""
    if down > 0:
        return F.avg_pool2d(x, 2)
    return F.interpolate(x, scale_factor=2.0) if down < 0 else x


class Attention(gpt.Attention):
    """x + attention([caption | pixels]). x: [b, w, H, W]; text: [b, m, h]"""

    def __init__(self, config: UNetConfig, level: int):
        h, w = config.transformer().hidden_size, config.width(level)
        super().__init__(config.transformer(level))
        self.norm, self.text = nn.LayerNorm(w), nn.Linear(h, w)

    def forward(self, x: Tensor, context: Context, text: Tensor) -> Tensor:
        pixels = x.flatten(2).transpose(1, 2)  # [b, H W, w]
        y = super().forward(self.norm(torch.cat((self.text(text), pixels), 1)), context)
        y = y[:, text.shape[1] :] + self.output.bias
        return x + y.transpose(1, 2).reshape(x.shape)


class Block(nn.Module):
    """x: [b, c, H', W'] of the block before -> [b, w, H, W]"""

    def __init__(self, config: UNetConfig, number: int):
        super().__init__()
        level, before = config.level(number), config.level(max(number - 1, 0))
        w, c = config.width(level), config.width(before)
        self.down = level - before
        c += w if self.down < 0 else 0
        self.residual = Residual(c, w, config.transformer().hidden_size)
        self.attention = Attention(config, level) if level else None
        if level:
            see_all(self, config)

    def forward(self, x: Tensor, context: Context, text: Tensor, time: Tensor, skip=None) -> Tensor:
        """text: [b, m, h]; time: [b, h]; skip: [b, w, H, W], upwards."""
        x = resized(x, self.down)
        x = self.residual(x if skip is None else torch.cat((x, skip), 1), time)
        return x if self.attention is None else self.attention(x, context, text)


class Embedding(gpt.Embedding):
    """tokens: [b, m] -> (pixels [b, w, H, W], caption [b, m, h], time [b, h])"""

    def __init__(self, config: UNetConfig):
        shape = config.transformer()
        super().__init__(shape)
        # Only the model's own blocks have numbers as names.
        blocks = {f"block{n}": gpt.Block(shape) for n in range(config.caption_layers)}
        self.caption = nn.ModuleDict(blocks)
        for block in blocks.values():
            see_all(block, shape)
        self.caption_norm = gpt.make_norm(shape)
        self.time = TimeEmbedding(shape.hidden_size)
        channels = config.channels + config.source_channels
        self.pixels = nn.Conv2d(channels, config.width(0), 3, padding=1)

    def forward(self, tokens: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        text = super().forward(tokens, context)
        for n, block in enumerate(self.caption.values(), CAPTION_BLOCKS):
            text = block(text, context._replace(drop_key=layer_key(context.drop_key, n)))
        text = self.caption_norm(text)
        pixels = self.pixels(context.pictures.to(self.pixels.weight.dtype))
        # The blocks get the mean of the caption with the time (Imagen, appendix D).
        return pixels, text, self.time(context.times) + text.mean(1)


class Head(nn.Module):
    """The noise, [b, c, H, W]; with targets of this shape the mean squared error of each picture,
    [b, 1]. Both in at least float32."""

    def __init__(self, w: int, channels: int):
        super().__init__()
        self.output = Convolution(w, channels)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        y = self.output(x)
        if targets is not None:
            return squared_error(y, targets)
        return y.to(torch.promote_types(y.dtype, torch.float32))


# --- the model ------------------------------------------------------------------------------------


class Convolutional(gpt.GPT):
    """Initial values of a model with convolutions."""

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        """Weights: normal, standard deviation 1 / √inputs, for widths are small; the last ones of a
        residual connection 0.02, so that a block begins as almost nothing."""
        if len(shape) < 2:
            return super().init_parameter(name, shape, generator)
        last = name.endswith(("last.conv.weight", "output.conv.weight", "attention.output.weight"))
        std = 0.02 if last else math.prod(shape[1:]) ** -0.5
        return torch.randn(shape, generator=generator, device="cpu") * std


class UNet(Convolutional):
    """A whole U-Net. Made on the meta device: UNetConfig.build gives it values."""

    def __init__(self, config: UNetConfig):
        super().__init__(config)
        self.embedding, self.head = Embedding(config), Head(config.width(0), config.channels)
        for n in range(config.num_layers):
            self.blocks[str(n)] = Block(config, n)

    def run_blocks(self, x: tuple, s: int, context: Context) -> Tensor:
        """x: as of Embedding -> [b, w, H, W]"""
        x, *vectors = x
        skips = []
        for number, block in self.blocks.items():
            own = context._replace(drop_key=layer_key(context.drop_key, int(number)))
            skip = [skips.pop()] if int(number) >= self.config.levels else []
            x = block(x, own, *vectors, *skip)
            if int(number) < self.config.levels - 1:
                skips.append(x)
        return x


if __name__ == "__main__":
    import train
    from models import diffusion_runs

    terminal.command(lambda argv: train.main(argv, diffusion_runs.UNetRun))
