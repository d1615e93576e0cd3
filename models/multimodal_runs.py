"""Training of models/multimodal.py: its data, which parts learn, the task, the flags. LLaVA's two
stages (arXiv 2304.08485, section 4.2):

    python -m models.multimodal --vision runs/vit --decoder runs/default --freeze vision decoder ..
    python -m models.multimodal --load runs/stage1 --freeze vision --out runs/stage2
"""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

import tensor_parallel
from base.cross_entropy import cross_entropy
from base.model_config import MoEConfig, flops_per_token
from finetune.packing import Example, lay_out
from models.clip import CLIPConfig
from models.multimodal import OF_TOWER, PREFIXES, MultimodalConfig, part_of
from models.picture_data import PictureData
from models.picture_runs import SHOWN, PictureRun, PictureTask
from models.pictures import Batch, to_tensor
from models.runs import ModelRun
from models.vit import ViTConfig
from run import checkpoint
from run.checkpoint import CheckpointError
from run.config import as_flags, flag
from run.data import DataError
from run.presets import Recipe, lr_of_model
from run.task import WholeModel, evaluation_batches, outputs
from run.tokenizer import prompt_ids


def prompt_of(tokenizer, question: list[int], shape: MultimodalConfig) -> list[int]:
    """The ids after which an answer comes. question: as of run.tokenizer.prompt_ids."""
    begin = int(tokenizer.bos is not None)
    picture = range(shape.vocab_size, shape.vocab_size + shape.num_patches)
    end = map(int, tokenizer.encode("\n"))
    return [*question[:begin], *picture, *question[begin:], *end]


class Answers(PictureData):
    """Rows [picture | question | answer, end], of which the answer counts. Sample n chooses one of
    the questions about its picture."""

    def __init__(self, *args, tokenizer, shape: MultimodalConfig):
        super().__init__(*args)
        self.tokenizer, self.shape = tokenizer, shape

    def words(self, sample: int) -> tuple[str, str]:
        """(question, answer). The picture is not read."""
        asked = self.examples.questions(self.first + self.sequence_of(sample))
        number = np.random.default_rng([sample, 2]).integers(len(asked))
        return list(asked.items())[number]

    def row(self, sample: int) -> Example:
        """Raises DataError."""
        question, answer = self.words(sample)
        prompt = prompt_of(self.tokenizer, prompt_ids(self.tokenizer, question), self.shape)
        ids = [*map(int, self.tokenizer.encode(answer)), self.tokenizer.eot]
        n = len(prompt) + len(ids)
        if not answer or n > self.s + 1:
            rule = f"is answered by {n} tokens, more than --seq-length {self.s} and one"
            raise DataError(f'--data: "{question}" {rule if answer else "has no answer"}')
        return Example(prompt + ids, [False] * len(prompt) + [True] * len(ids))

    def batch(self, samples) -> Batch:
        """targets, loss_mask: [b, s]"""
        tokens, targets, mask, *_ = lay_out([[self.row(n)] for n in samples], self.s)
        pictures = to_tensor([self.example(n).picture for n in samples])
        return Batch(tokens, targets * mask, mask, torch.tensor(list(samples)), pictures)

    def counted_tokens(self, samples) -> int:
        return sum(sum(self.row(n).counted) for n in samples)


class PartsLearn(WholeModel):
    """All parameters learn but those of the parts that --freeze names."""

    def before_techniques(self, stage) -> None:
        super().before_techniques(stage)
        for name, p in stage.named_parameters():
            p.requires_grad_(part_of(name) not in self.config.freeze)

    def load_weights(self, world) -> None:
        super().load_weights(world)
        for part in ("vision", "decoder"):
            if path := getattr(self.config, part):
                self.load_part(part, checkpoint.find(path))
                world.say(f"the {part} starts from the weights of {path}")
        self.trainer.checkpoints.use_loaded()

    def load_part(self, part: str, path: Path) -> None:
        """Fill a part with the weights of the model that it was. A collective."""
        fixed, first = checkpoint.fixed_fields(self.model_config, weights_only=True), 0
        if part == "vision":
            fixed = {its: getattr(self.model_config, own) for own, its in OF_TOWER.items()}
            first = read_tower(path)[1]
        theirs = {}
        for key, tensor in self.trainer.checkpoints.tensors().items():
            kind, name = key.split(".", 1)
            if kind == "model" and part_of(name) == part:
                name = name.removeprefix(PREFIXES.get(part, ""))
                name = re.sub(r"^blocks\.(\d+)", lambda n: f"blocks.{first + int(n[1])}", name)
                theirs[f"model.{name}"] = tensor
        checkpoint.load(path, theirs, fixed)


def read_tower(path: str | Path) -> tuple[MoEConfig, int]:
    """(the shape of a run of models.vit or models.clip, its first block for pictures). Raises
    CheckpointError, also where a tower would compute something else."""
    path = checkpoint.find(path)
    is_clip = "text_layers" in checkpoint.read_index(path)["model"]
    like = CLIPConfig if is_clip else ViTConfig
    its, _ = checkpoint.read_model(path, shape_class=like)
    first, fault = getattr(its, "text_layers", 0), ""
    if its.num_layers - first < 2:
        fault = "has one layer for pictures, which a tower leaves out"
    for name in ("activation", "norm_eps"):
        there, here = getattr(its, name), getattr(like, name)
        if there != here:
            fault = f"{name} is {there}, and a tower has {here}"
    if fault:
        raise CheckpointError(f"--vision {path}: {fault}")
    return its, first


class AnswerTask(PictureTask):
    """The model learns to answer questions about pictures."""

    sample_name = "held-out questions, and the likeliest answers"

    def open_data(self, config, world, tokenizer):
        sets = super().open_data(config, world, tokenizer)
        for each in sets:
            # What does not fit is mostly refused before anything is built.
            each.counted_tokens(range(min(each.num_sequences, 1000)))
        return sets

    def dataset(self, config, examples, tokenizer, seed, held_out) -> Answers:
        shape = config.model_config()
        others = dict(tokenizer=tokenizer, shape=shape)
        return Answers(examples, shape.seq_length, seed, held_out, **others)

    def flops_per_token(self, s: int) -> float:
        """A frozen decoder has no weight gradient, and a frozen tower no backward."""
        shape, frozen = self.model_config, self.config.freeze
        n = shape.vision.seq_length
        tower = flops_per_token(shape.vision, n) * n / s / (3 if "vision" in frozen else 1)
        return tower + flops_per_token(shape, s) * (1 - ("decoder" in frozen) / 3)

    def answers(self, dataset, n: int) -> Tensor:
        """For each of the first n samples the loss of its answer, whether each token of it is the
        likeliest, and the likeliest token at each position: [n, 2 + s]. A collective."""

        def measure(batch, logits: Tensor) -> Tensor:
            batch = dataset.batch(batch.samples.tolist()).to(logits.device)
            likeliest, mask = logits.argmax(-1), batch.loss_mask
            loss = cross_entropy(logits, batch.targets, logits.shape[-1]) * mask
            right = ((likeliest == batch.targets) | ~mask).all(1)
            return torch.cat((loss.sum(1, True), right.unsqueeze(1), likeliest), 1)

        batches = evaluation_batches(self.trainer, dataset, n)
        without = [batch._replace(targets=None) for batch in batches]
        return outputs(self.trainer, without, (n, 2 + dataset.s), measure)

    def evaluate(self, dataset, sequences: int) -> float:
        loss, right, *_ = self.answers(dataset, sequences).sum(0).tolist()
        accuracy = right / sequences
        self.measured = {"eval_accuracy": accuracy}
        return loss / self.loss_count(dataset, range(sequences))

    def sample(self, tokenizer, held_out) -> str:
        n, lines = min(SHOWN, held_out.num_sequences), []
        for k, found in enumerate(self.answers(held_out, n).long().tolist()):
            counted = held_out.row(k).counted[1:-1]
            text = tokenizer.decode([i for i, counts in zip(found[2:], counted) if counts])
            question, answer = held_out.words(k)
            lines.append(f"{question} {text} (right: {answer})")
        return "\n".join(lines)


# --- flags ----------------------------------------------------------------------------------------

TINY = dict(num_layers=4, hidden_size=128, num_heads=4, seq_length=80, vocab_size=257)
TINY |= dict(picture_size=32, patch_size=8, vision_class_tokens=0)
TINY |= dict(vision_layers=2, vision_hidden_size=128, vision_heads=4)
GROUPED = dict(llama=True, num_kv_heads=2, ffn_hidden_size=344)
VICUNA = dict(num_layers=32, hidden_size=4096, num_heads=32, ffn_hidden_size=11008, llama=True)
VICUNA |= dict(seq_length=4096, vocab_size=32064, picture_size=336, vision_encoder="clip")
PRESETS: dict[str, tuple[dict, float]] = {
    "tiny": (TINY | GROUPED, 0),
    "tiny-gpt2": (TINY, 0),
    # The published number has the last layer and the last norm of CLIP's tower too.
    "llava-1.5-7b": (VICUNA, 7_063_427_072 - 12_598_272),
}
SMALL = Recipe("a small model", 1e-3, 0, 0)
LLAVA = Recipe("LLaVA-1.5's second stage (arXiv 2310.03744, table 9)", 2e-5, 0, 0)


@dataclass
class MultimodalRun(PictureRun):
    """Every flag of python -m models.multimodal."""

    command: ClassVar[str] = "-m models.multimodal"
    purpose: ClassVar[str] = "Train a decoder that answers questions about pictures."
    presets: ClassVar[dict] = PRESETS
    shape_class: ClassVar[type] = MultimodalConfig
    recipes: ClassVar[dict[str, Recipe]] = {"": LLAVA, "tiny": SMALL, "tiny-gpt2": SMALL}
    # The sequence is not that of a picture.
    model_config = ModelRun.model_config

    model: str = flag("tiny", f"a preset: {', '.join(PRESETS)}", metavar="PRESET")
    seq_length: int | None = flag(None, "positions of picture, question and answer together")
    vision_layers: int | None = flag(None, "layers of the tower, which reads pictures")
    vision_hidden_size: int | None = flag(None, "size of its activation vectors")
    vision_heads: int | None = flag(None, "its attention heads")
    vision_class_tokens: int | None = flag(None, "its positions before the patches")
    vision_encoder: str | None = flag(None, "what the tower is as", ("vit", "clip"))
    projection: str | None = flag(None, "from tower to decoder", ("linear", "mlp2x_gelu"))
    freeze: list[str] = flag([], "what does not learn: vision, decoder, or both", metavar="PART")
    vision: str | None = flag(
        None, "start the tower from this run of models.vit or models.clip", metavar="CKPT"
    )
    decoder: str | None = flag(
        None, "start the decoder from this run of train.py, or imported model", metavar="CKPT"
    )

    def __post_init__(self):
        if self.decoder and not self.tokenizer:
            # A decoder that cannot be read is refused later.
            with contextlib.suppress(CheckpointError):
                self.tokenizer = checkpoint.tokenizer_of(checkpoint.find(self.decoder))

    def start_shape(self) -> dict:
        shape = super().start_shape()
        if self.vision:
            its, first = read_tower(self.vision)
            shape = shape | {own: getattr(its, name) for own, name in OF_TOWER.items()}
            shape |= dict(vision_encoder="clip" if first else "vit")
            # The features before its last layer are read.
            shape |= dict(vision_layers=its.num_layers - first - 1)
        if self.decoder:
            _, index = checkpoint.read_model(checkpoint.find(self.decoder))
            shape = shape | index["model"] | {"attention": ""}
        return shape

    @property
    def frozen(self) -> bool:
        return "decoder" in self.freeze

    def task(self) -> AnswerTask:
        return AnswerTask(PartsLearn())

    def default_lr(self) -> tuple[float, str]:
        if self.frozen:
            return 1e-3, "a projection (LLaVA-1.5's first stage, arXiv 2310.03744, table 9)"
        return lr_of_model(self)

    def check(self, model: MultimodalConfig, world: int, base_needed: bool) -> None:
        super().check(model, world, base_needed)
        with as_flags(num_heads="vision_heads"):
            tensor_parallel.check(model.vision, self.tp)
        if self.sequence_parallel and model.vision.seq_length % self.tp:
            self.refuse("sequence_parallel", self.why_no_shards(model.vision))
        for part in self.freeze:
            if part not in ("vision", "decoder"):
                self.refuse("freeze", "must be vision, decoder, or both")
            if not self.load and not getattr(self, part):
                rule = f"the {part} would stay as drawn at random; --{part} CKPT, or --load, is one"
                self.refuse("freeze", f"{rule} that has learned")
        if self.load and (self.vision or self.decoder):
            self.refuse("load", "has all parts; leave out --vision and --decoder")
