"""Training a CLIP: the task with its two passes, and the flags.

torchrun --nproc-per-node 2 -m models.clip --data shapes --tp 2 --out runs/clip
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import tensor_parallel
from models.clip import CLIPConfig, contrastive_losses, losses_and_gradient
from models.picture_data import Captioned
from models.picture_runs import SHOWN, TINY, PictureRun, PictureTask, flops_of_blocks
from run.config import as_flags, flag
from run.presets import Recipe
from run.task import evaluation_batches, outputs, run_forward


class PairTask(PictureTask):
    """CLIP finds the caption of each picture, and the picture of each caption."""

    # (losses [n], gradient of y [n, 2, e]) of this rank's samples, after a first pass.
    known: tuple[Tensor, Tensor] | None = None

    def dataset(self, config, examples, tokenizer, seed, held_out) -> Captioned:
        shape = config.model_config()
        options = dict(tokenizer=tokenizer, m=shape.text_length)
        return Captioned(examples, shape.seq_length, seed, held_out, **options)

    def data_of_step(self, step: int, dataset):
        """Make the first pass, unless one micro-batch is this rank's whole share. A collective."""
        trainer, b = self.trainer, self.trainer.micro_batch
        share = self.config.global_batch_size // trainer.dp
        if trainer.pipeline or b < share:
            mine = self.samples(step)[trainer.dp_rank * share :][:share]
            parts = [mine[k : k + b] for k in range(0, share, b)]
            batches, found = [dataset.batch(part).to(trainer.device) for part in parts], []
            run_forward(trainer, batches, lambda _, y: found.append(y))
            # The ranks with the head go on.
            if found:
                self.first = mine[0]
                self.known = losses_and_gradient(torch.cat(found), self.groups.dp)
        return dataset

    def total_loss(self, y: Tensor, batch) -> Tensor:
        """y: [b, 2, e], features. In the second pass loss and gradient are known."""
        if self.known is None:
            return contrastive_losses(y, self.groups.dp).sum()
        losses, gradient = (x[batch.samples - self.first] for x in self.known)
        return losses.sum() + ((y - y.detach()) * gradient).sum()

    def flops_per_token(self, s: int) -> float:
        shape, m = self.model_config, self.model_config.text_length
        of_text = flops_of_blocks(shape.text, shape.text_layers, m)
        return (of_text + flops_of_blocks(shape, shape.num_layers - shape.text_layers, s - m)) / s

    def features(self, dataset, n: int) -> tuple[Tensor, list[str], list[str]]:
        """(features [n, 2, e], captions, for each picture the nearest of these captions) of the
        first n samples. A collective."""
        batches = list(evaluation_batches(self.trainer, dataset, n))
        y = outputs(self.trainer, batches, (n, 2, self.model_config.embedding_size))
        captions = [dataset.example(k).caption for k in range(n)]
        distinct = list(dict.fromkeys(captions))
        texts = y[[captions.index(caption) for caption in distinct], 0]
        nearest = (y[:, 1] @ texts.T).argmax(1).tolist()
        return y, captions, [distinct[k] for k in nearest]

    def evaluate(self, dataset, sequences: int) -> float:
        """In batches of the size of a step."""
        y, captions, nearest = self.features(dataset, sequences)
        accuracy = sum(map(str.__eq__, captions, nearest)) / sequences
        self.measured = {"eval_accuracy": accuracy}
        losses = [contrastive_losses(x, None) for x in y.split(self.config.global_batch_size)]
        return torch.cat(losses).mean().item()

    @torch.no_grad()
    def sample(self, tokenizer, held_out) -> str:
        _, captions, nearest = self.features(held_out, min(64, held_out.num_sequences))
        pairs = zip(nearest[:SHOWN], captions)
        return "\n".join(f"{found} (right: {right})" for found, right in pairs)


# --- flags ----------------------------------------------------------------------------------------


def _clip(h: int, heads: int, layers: int, patch: int, text: int) -> dict:
    """h, heads, layers, patch: of the picture. text: h' and e, in heads of 64; it has 12 layers."""
    sizes = dict(num_layers=12 + layers, hidden_size=h, num_heads=heads, patch_size=patch)
    text_sizes = dict(text_hidden_size=text, text_heads=text // 64, embedding_size=text)
    return sizes | text_sizes | dict(text_layers=12)


SMALL_TEXT = dict(text_hidden_size=96, text_length=40, vocab_size=257, embedding_size=64)
CLIP_PRESETS: dict[str, tuple[dict, float]] = {
    "tiny": (TINY | dict(text_heads=4) | SMALL_TEXT, 0),
    "clip-vit-base-32": (_clip(768, 12, 12, 32, 512), 151_277_313),
    "clip-vit-base-16": (_clip(768, 12, 12, 16, 512), 149_620_737),
    "clip-vit-large-14": (_clip(1024, 16, 24, 14, 768), 427_616_513),
}
NAME = "CLIP (arXiv 2103.00020, table 20)"
CLIP_RECIPES = {
    "tiny": Recipe("a small CLIP", 1e-3, 0, 0),
    "clip-vit-large-14": Recipe(NAME, 4e-4, 0, 0),
    "": Recipe(NAME, 5e-4, 0, 0),
}


@dataclass
class CLIPRun(PictureRun):
    """Every flag of python -m models.clip."""

    command: ClassVar[str] = "-m models.clip"
    purpose: ClassVar[str] = "Train a CLIP to tell which caption belongs to which picture."
    presets: ClassVar[dict] = CLIP_PRESETS
    shape_class: ClassVar[type] = CLIPConfig
    recipes: ClassVar[dict[str, Recipe]] = CLIP_RECIPES
    longer_by: ClassVar[str] = "class_tokens"
    dropout: ClassVar[None] = None

    model: str = flag("tiny", f"a preset: {', '.join(CLIP_PRESETS)}", metavar="PRESET")
    num_layers: int | None = flag(None, "layers of text and picture together")
    class_tokens: int | None = flag(None, "positions before the patches, of which one is read")
    text_layers: int | None = flag(None, "layers of the text; the default is half of all")
    text_hidden_size: int | None = flag(None, "of the text; --hidden-size is the picture's")
    text_heads: int | None = flag(None, "of the text; --num-heads are the picture's")
    text_length: int | None = flag(None, "tokens of a caption, its end included")
    embedding_size: int | None = flag(None, "numbers of a feature")

    def task(self) -> PairTask:
        return PairTask()

    def check(self, model: CLIPConfig, world: int, base_needed: bool) -> None:
        super().check(model, world, base_needed)
        with as_flags(num_heads="text_heads"):
            tensor_parallel.check(model.text, self.tp, world)
        short = -model.text_length % self.sequence_shards
        if short:
            rule = f"must be divisible by --tp; {model.text_length + short} would fit"
            self.refuse("text_length", rule)
