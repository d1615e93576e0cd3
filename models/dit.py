"""A Diffusion Transformer: gpt.py's blocks take noise away from patches (Peebles & Xie, arXiv
2212.09748, section 3.2, "in-context conditioning"; U-ViT, arXiv 2209.12152).

    [caption | time | patches W + b] + positions -> Block x L, without the causal mask
                                                 -> norm -> of each patch its p x p pixels

The caption and the time are positions as the patches are, so each patch reads them in every block,
and each technique works as on a text. Sequence parallelism shards m + 1 + n positions: where t does
not divide them, another --text-length does. The source of an edit is more channels of the picture.

    torchrun --nproc-per-node 2 -m models.dit --data shapes --tp 2 --out runs/dit

Not covered: adaLN-Zero, which the paper prefers (the time scales and shifts each norm: weights of
its own in each block); published weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpt
from base import terminal
from base.dropout import Dropout
from models.diffusion import DenoiserConfig, TimeEmbedding, squared_error
from models.pictures import Context
from models.vit import Encoder, InShards, WholeHead, to_patches, to_pictures


@dataclass(frozen=True)
class DiTConfig(DenoiserConfig):
    """The shape of a Diffusion Transformer. Raises FieldError."""

    def make(self) -> "DiT":
        return DiT(self)


class Embedding(InShards):
    """tokens: [b, s], the caption's first -> [b, s, h], or this rank's shard of it, [b, s/t, h]"""

    def __init__(self, config: DiTConfig):
        super().__init__()
        h, self.patch_size, self.before = config.hidden_size, config.patch_size, config.text_length
        channels = config.channels + config.source_channels
        tokens = torch.empty(config.vocab_size, h)
        self.tokens = gpt.TokenEmbedding.from_pretrained(tokens, freeze=False)
        self.time = TimeEmbedding(h)
        self.patch = nn.Linear(channels * self.patch_size**2, h)
        self.positions = nn.Parameter(torch.empty(config.seq_length, h))
        self.dropout = Dropout(config.dropout, site=0)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        (n, t), m = self.shard, self.before
        patches = F.pad(to_patches(context.pictures, self.patch_size), (0, 0, m + 1, 0))
        x = self.patch(patches.chunk(t, 1)[n].to(self.patch.weight.dtype))
        at = torch.arange(len(self.positions), device=x.device).unsqueeze(1).chunk(t)[n]
        x = torch.where(at == m, self.time(context.times).unsqueeze(1), x)
        x = torch.where(at < m, self.tokens(tokens), x) + self.positions.chunk(t)[n]
        return self.dropout(x, context.drop_key)


class Head(WholeHead):
    """x: [b, s, h]; targets: [b, c, H, W] -> the squared error of each picture, [b, 1]; without
    targets what is found, [b, c, H, W]."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.patch_size, self.before = config.patch_size, config.positions_before
        self.norm = gpt.make_norm(config)
        self.output = nn.Linear(config.hidden_size, config.channels * self.patch_size**2)

    def read(self, x: Tensor, targets: Tensor | None) -> Tensor:
        found = to_pictures(self.output(self.norm(x[:, self.before :])), self.patch_size)
        return found if targets is None else squared_error(found, targets)


class DiT(Encoder):
    """A whole Diffusion Transformer. Made on the meta device: DiTConfig.build gives it values."""

    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.embedding, self.head = Embedding(config), Head(config)


if __name__ == "__main__":
    import train
    from models import diffusion_runs

    terminal.command(lambda argv: train.main(argv, diffusion_runs.DiTRun))
