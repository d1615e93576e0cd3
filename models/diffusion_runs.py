"""Training of models that take noise away: the task, and the flags.

    torchrun --nproc-per-node 2 -m models.dit --data shapes --tp 2 --out runs/dit

What is noised is a picture or, with --autoencoder, its latent (arXiv 2112.10752). The held-out loss
has the same noise in each evaluation. At the end the model draws for a few held-out captions, or
edits by them: OUT/sample.png, OUT/sample.txt.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt
from base.model_config import MoEConfig
from models import diffusion
from models.autoencoder import open_autoencoder
from models.diffusion import OBJECTIVES, NoisedData, Process
from models.dit import DiTConfig
from models.picture_data import caption_ids
from models.picture_runs import SHOWN, TINY, PictureRun, PictureTask
from models.pictures import Batch, to_tensor, to_uint8
from models.unet import UNetConfig, refuse_layouts
from run import checkpoint
from run.checkpoint_index import CheckpointError, read_signed
from run.config import flag
from run.data import Dataset
from run.documents import fingerprint
from run.finish import leave
from run.presets import Recipe

# What else a checkpoint says of its model.
FLAGS_OF_A_MODEL = ("objective", "autoencoder", "edit")


class Sampling(NamedTuple):
    """How pictures are drawn: flags of models/draw.py. count: how many have noise of their own;
    those after them begin with the same noises."""

    count: int = 8
    steps: int = 25
    guidance: float = 3.0
    source_guidance: float = 1.5
    sampler: str = "ddim"
    seed: int = 0


class Pixels:
    """What is noised without an autoencoder: the picture itself."""

    channels, factor = 3, 1

    def encode(self, pictures: Tensor) -> Tensor:
        return pictures

    decode = encode


class Asked(Dataset):
    """Noised pictures at one time, and their captions. pictures: [n, c, H, W]; ids: [n, m]"""

    def __init__(self, pictures: Tensor, t: float, ids: Tensor, s: int):
        self.pictures, self.t = pictures.float(), t
        self.tokens = F.pad(ids, (0, s - ids.shape[1]))

    def batch(self, samples) -> Batch:
        at = torch.tensor(list(samples))
        counts, times = torch.ones(len(at), 1, dtype=torch.bool), torch.full((len(at),), self.t)
        return Batch(self.tokens[at], None, counts, at, self.pictures[at], times)


class DiffusionTask(PictureTask):
    """A model learns what noise is in a picture."""

    sample_name = "drawn in sample.png"

    def side(self, config) -> int:
        return config.model_config().picture_size * config.space.factor

    def dataset(self, config, examples, tokenizer, seed, held_out) -> NoisedData:
        shape = config.model_config()
        options = dict(tokenizer=tokenizer, m=shape.text_length, edits=config.edit)
        options |= dict(process=config.process, encode=config.space.encode)
        return NoisedData(examples, shape.seq_length, seed, held_out, **options)

    def extra_state(self) -> dict:
        flags = {name: getattr(self.config, name) for name in FLAGS_OF_A_MODEL}
        return {"diffusion": flags, "latents": self.config.latents}

    def check_base(self, path, index: dict) -> None:
        if (learned := index["diffusion"]["objective"]) != self.config.objective:
            self.config.refuse("objective", f"{path} learns {learned}")
        self.config.check_latents(index, path)

    def flops_per_token(self, s: int) -> float:
        shape = self.model_config
        return 3 * shape.flops() / s if hasattr(shape, "flops") else super().flops_per_token(s)

    def finish(self, run) -> bool:
        # `sample` comes next, and rank 0 writes its picture.
        self.world = run.world
        return False

    def find(self, x: Tensor, t: float, ids: Tensor, source: Tensor | None) -> Tensor:
        """What the model finds, on every rank. x: [n, c, H, W]. A collective."""
        shape = x.shape[1:]
        x = x if source is None else torch.cat((x, source), 1)
        return self.heads_output(Asked(x, t, ids, self.model_config.seq_length), len(x), shape)

    @torch.no_grad()
    def draw(self, tokenizer, captions: list[str], sources: Tensor | None, o: Sampling) -> Tensor:
        """A picture for each caption, [n, 3, H, W], on every rank. sources: as many, to edit. A
        collective."""
        shape, space = self.model_config, self.config.space
        *ids, empty = (caption_ids(tokenizer, c, shape.text_length)[0] for c in (*captions, ""))
        if sources is not None:
            sources = torch.cat([space.encode(x) for x in sources.split(1)])
        noises = [gpt.generator(o.seed, f"picture {k}") for k in range(o.count)]
        size = shape.channels, shape.picture_size, shape.picture_size

        def noise() -> Tensor:
            each = torch.stack([torch.randn(size, generator=g) for g in noises])
            return each.repeat(len(captions) // o.count, 1, 1, 1)

        weights = o.guidance, sources, o.source_guidance
        find = diffusion.guided(self.find, torch.tensor(ids), torch.tensor(empty), *weights)
        ddpm, clip = o.sampler == "ddpm", not self.config.autoencoder
        drawn = diffusion.sample(self.config.process, find, noise, o.steps, ddpm, clip)
        return space.decode(drawn.float())

    def sample(self, tokenizer, held_out: NoisedData) -> str:
        """Writes sample.png: pictures for held-out captions, under those that they edit."""
        examples = [held_out.example(k) for k in range(min(SHOWN, held_out.num_sequences))]
        captions, n = [example.caption for example in examples], len(examples)
        sources = None
        if self.config.edit:
            sources = to_tensor([example.source for example in examples])
        drawn = self.draw(tokenizer, captions, sources, Sampling(n, seed=self.config.seed))
        rows = drawn if sources is None else torch.cat((sources, drawn))
        if self.world.rank == 0:
            path = Path(self.config.out) / "sample.png"
            leave(self.world, path, partial(save_grid, rows, n))
        return "\n".join(captions)


def save_grid(pictures: Tensor, columns: int, path: Path) -> None:
    """Write a PNG file of rows of pictures. pictures: [rows x columns, 3, H, W]"""
    from PIL import Image

    rows = np.split(to_uint8(pictures), len(pictures) // columns)
    whole = np.concatenate([np.concatenate(row, 1) for row in rows])
    Image.fromarray(whole).save(path, "PNG")


# --- flags ----------------------------------------------------------------------------------------


@dataclass
class DiffusionRun(PictureRun):
    """The flags of a run of a model that takes noise away."""

    model: str = flag("tiny", "a preset: tiny", metavar="PRESET")
    objective: str = flag("noise", "noise: DDPM; flow: flow matching", tuple(OBJECTIVES))
    picture_size: int | None = flag(
        None, "pixels of a picture's side, or with --autoencoder numbers of a latent's", least=1
    )
    text_length: int | None = flag(None, "tokens of a caption, with padding")
    autoencoder: str | None = flag(
        None, "a run of models.autoencoder: what is noised is its latents", metavar="CKPT"
    )
    edit: bool = flag(False, "learn to edit: pairs of pictures, with an instruction as the caption")

    @cached_property
    def space(self):
        """What is noised: Pixels, or latents."""
        try:
            return open_autoencoder(self.autoencoder) if self.autoencoder else Pixels()
        except CheckpointError as e:
            raise CheckpointError(f"--autoencoder {e}") from None

    @cached_property
    def latents(self) -> str | None:
        """Which autoencoder it is, wherever it lies: a hash of its checkpoint's index."""
        if not self.autoencoder:
            return None
        return fingerprint(read_signed(checkpoint.find(self.autoencoder)).decode())

    def check_latents(self, index: dict, path) -> None:
        """Raises ConfigError where the model of a checkpoint has learned in other latents."""
        if index.get("latents") != self.latents:
            self.refuse("autoencoder", f"is not the one with which {path} has learned")

    @property
    def channels(self) -> int:
        return self.space.channels

    @property
    def source_channels(self) -> int:
        return self.channels if self.edit else 0

    @property
    def process(self) -> Process:
        return OBJECTIVES[self.objective]()

    def task(self) -> DiffusionTask:
        return DiffusionTask()


@dataclass
class DiTRun(DiffusionRun):
    """Every flag of python -m models.dit."""

    command: ClassVar[str] = "-m models.dit"
    purpose: ClassVar[str] = "Train a Diffusion Transformer to draw what a caption says."
    presets: ClassVar[dict] = {"tiny": (TINY, 0)}
    shape_class: ClassVar[type] = DiTConfig
    recipes: ClassVar[dict[str, Recipe]] = {"": Recipe("a small DiT", 1e-3, 0, 0)}
    longer_by: ClassVar[str] = "text_length"


UNET_TINY = dict(num_layers=5, hidden_size=32, num_heads=4, picture_size=16)


@dataclass
class UNetRun(DiffusionRun):
    """Every flag of python -m models.unet."""

    command: ClassVar[str] = "-m models.unet"
    purpose: ClassVar[str] = "Train a U-Net to draw what a caption says."
    presets: ClassVar[dict] = {"tiny": (UNET_TINY, 0)}
    shape_class: ClassVar[type] = UNetConfig
    recipes: ClassVar[dict[str, Recipe]] = {"": Recipe("a small U-Net", 2e-3, 0, 0)}
    patch_size: ClassVar[None] = None
    ffn_hidden_size: ClassVar[None] = None
    head_dim: ClassVar[None] = None

    caption_layers: int | None = flag(None, "blocks that read the caption")

    def model_config(self) -> MoEConfig:
        refuse_layouts(self)
        return super().model_config()
