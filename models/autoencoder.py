"""A small convolutional autoencoder: pictures become latents of fewer numbers, in which diffusion
is cheaper (Rombach et al., arXiv 2112.10752, section 3.1).

    picture [b, c, H, W] -> blocks 0 .. n - 1  -> mean, log σ² [b, z, H/f, W/f]       f = 2^(n - 1)
    mean + σ ε           -> blocks n .. 2n - 1 -> reconstruction [b, c, H, W]

    loss = (reconstruction - picture)² + w KL(N(mean, σ²) | N(0, 1))      means over their numbers

    torchrun --nproc-per-node 2 -m models.autoencoder --data shapes --out runs/autoencoder
    python -m models.unet --autoencoder runs/autoencoder --picture-size 8 --out runs/latent

Not covered: perceptual and adversarial losses, without which large pictures are blurred; attention;
a codebook (VQ).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from base import terminal
from base.model_config import FieldError
from models.diffusion import squared_error
from models.pictures import Context
from models.unet import Convolution, Convolutional, Levels, Residual, resized
from models.vit import ENCODER_CHOICES
from run.checkpoint import CheckpointError


@dataclass(frozen=True)
class AutoencoderConfig(Levels):
    """The shape of an autoencoder. Raises FieldError."""

    patch_size: ClassVar[int] = 1
    num_heads: ClassVar[int] = 1
    positions_before: ClassVar[int] = 1
    own_choices: ClassVar[dict[str, tuple]] = ENCODER_CHOICES
    latent_channels: int = 4

    def check(self) -> None:
        if self.num_layers < 4 or self.num_layers % 2:
            raise FieldError("num_layers", self.num_layers, "must be even, and at least 4", [4, 6])
        super().check()
        self.check_size("latent_channels")

    @property
    def latent(self) -> tuple[int, int, int]:
        """The shape of a picture's latent."""
        side = self.picture_size >> self.levels - 1
        return self.latent_channels, side, side

    def make(self) -> "Autoencoder":
        return Autoencoder(self)


class Block(nn.Module):
    """x: [b, c, H', W'] -> [b, w, H, W]. The last block of the encoder gives 2 z channels, mean and
    log σ² (`leave`); the first one of the decoder reads z (`enter`). In other blocks these two do
    nothing."""

    def __init__(self, config: AutoencoderConfig, number: int):
        super().__init__()
        levels, z = config.levels, config.latent_channels
        level, before = config.level(number), config.level(max(number - 1, 0))
        c, w = config.width(before), config.width(level)
        self.down = level - before
        self.enter = nn.Conv2d(z, c, 3, padding=1) if number == levels else nn.Identity()
        self.residual = Residual(c, w)
        self.leave = Convolution(w, 2 * z) if number == levels - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.residual(resized(self.enter(x), self.down)))


class Embedding(nn.Module):
    """The picture of each sample. tokens: not read -> [b, w, H, W]"""

    # There is no vocabulary.
    tokens = None

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        self.pixels = nn.Conv2d(config.channels, config.width(0), 3, padding=1)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self.pixels(context.pictures.to(self.pixels.weight.dtype))


class Head(nn.Module):
    """x: (features, mean, log σ²); targets: pictures -> (squared error, KL) of each, [b, 2];
    without targets the mean, which is the latent."""

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        self.output = Convolution(config.width(0), config.channels)

    def forward(self, x: tuple, targets: Tensor | None = None) -> Tensor:
        features, mean, log_variance = x
        if targets is None:
            return mean
        error = squared_error(self.output(features), targets)
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).to(error.dtype) / 2
        return torch.cat((error, kl.flatten(1).mean(1, keepdim=True)), 1)


class Autoencoder(Convolutional):
    """A whole autoencoder. Made on the meta device: AutoencoderConfig.build gives it values."""

    def __init__(self, config: AutoencoderConfig):
        super().__init__(config)
        self.embedding, self.head = Embedding(config), Head(config)
        for n in range(config.num_layers):
            self.blocks[str(n)] = Block(config, n)

    def run_blocks(self, x: Tensor, s: int, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """As the head takes it. Without context.noise, ε, the latent is the mean."""
        encoder, decoder = self.halves()
        for block in encoder:
            x = block(x)
        mean, log_variance = x.chunk(2, 1)
        log_variance = log_variance.clamp(-30, 20)
        x = mean
        if context.noise is not None:
            x = mean + (log_variance / 2).exp() * context.noise.to(mean.dtype)
        for block in decoder:
            x = block(x)
        return x, mean, log_variance

    def halves(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The blocks of the encoder, and of the decoder."""
        blocks = list(self.blocks.values())
        return blocks[: self.config.levels], blocks[self.config.levels :]


class Latents:
    """Pictures as latents of variance 1, and back: what a diffusion model works with."""

    def __init__(self, model: Autoencoder, std: float):
        """std: of the latents."""
        self.model, self.std = model, std
        self.channels, self.factor = model.config.latent_channels, 2 ** (model.config.levels - 1)

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """[b, c, H, W] -> [b, z, H/f, W/f]"""
        tokens = torch.zeros(len(pictures), 1, dtype=torch.long)
        return self.model(tokens, None, Context(pictures=pictures)) / self.std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        x = latents * self.std
        for block in self.model.halves()[1]:
            x = block(x)
        return self.model.head.output(x)


def open_autoencoder(path: str) -> Latents:
    """The autoencoder of a run, on the CPU in float32. Raises CheckpointError."""
    # Loaded by those who use a trained model.
    from inference.loading import load_model

    model, index = load_model(path, shape_class=AutoencoderConfig)
    if not index["latent_std"]:
        rule = "was saved before an evaluation, which measures the latents; take a later one"
        raise CheckpointError(f"{path} {rule}, or a smaller --eval-every")
    return Latents(model, index["latent_std"])


if __name__ == "__main__":
    import train
    from models import autoencoder_runs

    terminal.command(lambda argv: train.main(argv, autoencoder_runs.AutoencoderRun))
