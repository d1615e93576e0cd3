"""Training of models/autoencoder.py: data, task, flags.

Diffusion begins with noise of variance 1, so latents are divided by their standard deviation. It is
measured on held-out pictures, and stands in each checkpoint's index.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import gpt
from base.model_config import MoEConfig
from models.autoencoder import AutoencoderConfig
from models.picture_data import PictureData
from models.picture_runs import SHOWN, PictureTask, TextlessRun
from models.pictures import Batch, Example
from models.unet import refuse_layouts
from run.config import flag
from run.presets import Recipe
from run.task import evaluation_batches, outputs


class Reconstructed(PictureData):
    """Pictures that are their own targets, and the noise of their latents, which depends on (seed,
    sample) alone."""

    def __init__(self, *args, latent: tuple[int, int, int]):
        super().__init__(*args)
        self.latent = latent

    def text_and_target(self, example: Example) -> tuple[list[int], int]:
        return [], 0

    def batch(self, samples) -> Batch:
        batch = super().batch(samples)
        generators = [gpt.generator(0, f"{self.sequence_of.seed}, noise of {n}") for n in samples]
        noise = torch.stack([torch.randn(self.latent, generator=g) for g in generators])
        return batch._replace(targets=batch.pictures, noise=noise)


class AutoencoderTask(PictureTask):
    """Pictures become latents, and pictures again."""

    # Of the latents, in the last evaluation.
    latent_std: float | None = None

    def dataset(self, config, examples, tokenizer, seed, held_out) -> Reconstructed:
        latent = config.model_config().latent
        return Reconstructed(examples, 1, seed, held_out, latent=latent)

    def total_loss(self, y: Tensor, batch: Batch) -> Tensor:
        """y: [b, 2], (squared error, KL)"""
        return (y * y.new_tensor([1, self.config.kl_weight]) * batch.loss_mask).sum()

    @torch.no_grad()
    def evaluate(self, dataset, sequences: int) -> float:
        latents = self.heads_output(dataset, sequences, self.model_config.latent)
        self.latent_std = latents.std().item()
        error, kl = self.errors(dataset, sequences).mean(0).tolist()
        self.measured = {"eval_error": error, "eval_kl": kl, "latent_std": self.latent_std}
        return error + self.config.kl_weight * kl

    def errors(self, dataset, n: int) -> Tensor:
        """(squared error, KL) of the first n samples, [n, 2]. A collective."""
        return outputs(self.trainer, list(evaluation_batches(self.trainer, dataset, n)), (n, 2))

    def extra_state(self) -> dict:
        return {"latent_std": self.latent_std}

    def check_base(self, path, index: dict) -> None:
        self.latent_std = index["latent_std"]

    @torch.no_grad()
    def sample(self, tokenizer, held_out) -> str:
        n = min(SHOWN, held_out.num_sequences)
        errors = self.errors(held_out, n)[:, 0].tolist()
        names = (held_out.example(k).caption for k in range(n))
        return "\n".join(f"squared error {error:.5f}: {name}" for name, error in zip(names, errors))

    def flops_per_token(self, s: int) -> float:
        return 3 * self.model_config.flops()


TINY = dict(num_layers=6, hidden_size=16, picture_size=32)


@dataclass
class AutoencoderRun(TextlessRun):
    """Every flag of python -m models.autoencoder."""

    command: ClassVar[str] = "-m models.autoencoder"
    purpose: ClassVar[str] = "Train an autoencoder, in whose latents a diffusion model works."
    presets: ClassVar[dict] = {"tiny": (TINY, 0)}
    shape_class: ClassVar[type] = AutoencoderConfig
    recipes: ClassVar[dict[str, Recipe]] = {"": Recipe("a small autoencoder", 1e-3, 0, 0)}
    # There is no attention, and no MLP.
    patch_size: ClassVar[None] = None
    num_heads: ClassVar[None] = None
    ffn_hidden_size: ClassVar[None] = None
    head_dim: ClassVar[None] = None
    attention: ClassVar[None] = None
    dropout: ClassVar[None] = None

    model: str = flag("tiny", "a preset: tiny", metavar="PRESET")
    num_layers: int | None = flag(
        None, "blocks of both halves; this flag and those above --tp override the preset"
    )
    latent_channels: int | None = flag(None, "z, the channels of a latent")
    kl_weight: float = flag(1e-4, "weight of the KL term", least=0)

    def task(self) -> AutoencoderTask:
        return AutoencoderTask()

    def model_config(self) -> MoEConfig:
        refuse_layouts(self)
        if self.recompute == "selective":
            self.refuse("recompute", "there is no attention here; full would fit")
        return super().model_config()
