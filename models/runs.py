"""Training BERT and T5 on text of which a part is hidden: the task, and the flags.

    torchrun --nproc-per-node 2 -m models.bert --data FILES --tp 2 --out runs/bert
    torchrun --nproc-per-node 2 -m models.t5 --data FILES --pp 2 --out runs/t5

FillIn             the task: the loss, how often the model is right, an example at the end
ModelRun           the flags of train.py that a model of this folder has
BertRun, T5Run     those of the two commands
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from base.cross_entropy import cross_entropy
from base.model_config import FieldError
from finetune.adapter_learning import PeftConfig
from models import masking, special_tokens
from models.batch import Batch
from models.bert import BertConfig
from models.masking import HiddenSpans, HiddenWords
from models.presets import BERT_PRESETS, BERT_RECIPES, T5_PRESETS, T5_RECIPES
from models.t5 import T5Config
from run.config import RunConfig, as_flags, flag
from run.presets import Recipe
from run.pretraining import Pretraining, TextConfig, open_text
from run.task import evaluation_batches, run_forward

# --- the task -------------------------------------------------------------------------------------


class FillIn(Pretraining):
    """The task of filling in what is hidden."""

    sample_name = "a held-out text"
    batch_class = Batch
    # tokenizer -> the special tokens
    tokens_of: Callable

    def logits(self, batches: list, result) -> None:
        """Run this rank's batches forward. The rank with the head calls result(batch, logits) for
        each, with its part of the batch. logits: [b, m, V]"""
        parts = iter([self.trainer.own_tokens(batch) for batch in batches])
        without_targets = [batch._replace(targets=None) for batch in batches]
        run_forward(self.trainer, without_targets, lambda _, y: result(next(parts), y))

    @torch.no_grad()
    def evaluate(self, dataset, sequences: int) -> float:
        totals = torch.zeros(2, dtype=torch.float64, device=self.trainer.device)

        def add(batch, logits: Tensor) -> None:
            right = (logits.argmax(-1) == batch.targets) & batch.loss_mask
            loss = cross_entropy(logits, batch.targets, logits.shape[-1])
            totals.add_(torch.stack((self.total_loss(loss, batch).double(), right.sum())))

        # A sequence at a time: logits of all would take more memory than a step.
        batches = evaluation_batches(self.trainer, dataset, sequences)
        self.logits([row for batch in batches for row in batch.rows()], add)
        for group in filter(None, (self.groups.replicas, self.groups.pp)):
            dist.all_reduce(totals, group=group)
        totals /= max(1, self.loss_count(dataset, range(sequences)))
        loss, self.accuracy = totals.tolist()
        return loss

    def eval_statistics(self) -> dict[str, float]:
        return {"eval_accuracy": self.accuracy}

    @torch.no_grad()
    def sample(self, tokenizer, held_out) -> str:
        """A held-out text, and what the model finds likeliest for each hidden token."""
        batch = held_out.batch([0]).to(self.trainer.device)
        # Each rank of a pipeline, and of context parallelism, fills in what it has computed.
        guess = torch.zeros_like(batch.targets)
        at = torch.arange(guess.shape[1], device=guess.device).unsqueeze(0)

        def fill(part, logits: Tensor) -> None:
            guess.scatter_(1, part.targets, logits.argmax(-1))

        self.logits([batch._replace(targets=at)], fill)
        for group in filter(None, (self.groups.cp, self.groups.pp)):
            dist.all_reduce(guess, group=group)
        found = {
            "reads": batch.tokens[:, : batch.context().source or None],
            "fills in": guess.where(batch.loss_mask, batch.targets),
            "hidden": batch.targets,
        }
        names = self.tokens_of(tokenizer).names
        texts = [special_tokens.spell(ids[0].tolist(), names, tokenizer) for ids in found.values()]
        return "\n\n".join(f"[{title}]\n{text}" for title, text in zip(found, texts))


class FillWords(FillIn):
    """What BERT learns."""

    tokens_of = staticmethod(special_tokens.bert_tokens)

    def open_data(self, config, world, tokenizer):
        text, held_out = open_text(config, world, tokenizer, config.model_config().seq_length - 1)
        return HiddenWords(text, config.seed, tokenizer), HiddenWords(held_out, 0, tokenizer)


class FillSpans(FillIn):
    """What T5 learns."""

    tokens_of = staticmethod(special_tokens.t5_tokens)

    def open_data(self, config, world, tokenizer):
        shape = config.model_config()
        n, m = shape.seq_length, shape.target_length
        text, held_out = open_text(config, world, tokenizer, masking.lengths_of(n).text)
        others = tokenizer, n, m
        return HiddenSpans(text, config.seed, *others), HiddenSpans(held_out, 0, *others)

    def flops_per_token(self, s: int) -> float:
        """Those of a sequence, over its n + m positions. s: n + m"""
        n = s - self.model_config.target_length
        return super().flops_per_token(n) * n / s


# --- flags ----------------------------------------------------------------------------------------


@dataclass
class ModelRun(RunConfig):
    """The flags of a run that trains a model of this folder. A flag of RunConfig that its models
    have no use for is a constant here."""

    # The fields that are the same in all models of one class, and experts.
    num_kv_heads: ClassVar[None] = None
    norm: ClassVar[None] = None
    positions: ClassVar[None] = None
    activation: ClassVar[None] = None
    sliding_window: ClassVar[None] = None
    num_experts: ClassVar[None] = None
    expert_every: ClassVar[None] = None
    router: ClassVar[None] = None
    router_topk: ClassVar[None] = None
    router_temperature: ClassVar[None] = None
    capacity_factor: ClassVar[None] = None
    aux_loss: ClassVar[None] = None
    z_loss: ClassVar[None] = None
    ep: ClassVar[int] = 1

    @property
    def unpredicted(self) -> str:
        return "" if self.supports_as_rank else "trains another head, or on rows of other lengths"


@dataclass
class HiddenText(ModelRun, PeftConfig, TextConfig):
    """The flags of a run that learns from text of which a part is hidden."""

    supports_as_rank: ClassVar[bool] = True


@dataclass
class BertFlags(ModelRun):
    """The flags of a run of a BERT."""

    presets: ClassVar[dict] = BERT_PRESETS
    shape_class: ClassVar[type] = BertConfig
    recipes: ClassVar[dict[str, Recipe]] = BERT_RECIPES
    # A ring is for causal attention.
    cp_kind: ClassVar[str] = "all-to-all"

    model: str = flag("tiny", f"a preset: {', '.join(BERT_PRESETS)}", metavar="PRESET")

    def num_ids(self, tokenizer) -> int:
        return special_tokens.bert_tokens(tokenizer).vocab_size


@dataclass
class BertRun(BertFlags, HiddenText):
    """Every flag of python -m models.bert."""

    command: ClassVar[str] = "-m models.bert"
    purpose: ClassVar[str] = "Train a BERT on text of which 15% of the words are hidden."

    def task(self) -> FillWords:
        return FillWords(self.learned())


@dataclass
class T5Run(HiddenText):
    """Every flag of python -m models.t5."""

    command: ClassVar[str] = "-m models.t5"
    purpose: ClassVar[str] = "Train a T5 on text of which 15% is hidden, in spans."
    presets: ClassVar[dict] = T5_PRESETS
    shape_class: ClassVar[type] = T5Config
    recipes: ClassVar[dict[str, Recipe]] = T5_RECIPES
    cp: ClassVar[int] = 1
    cp_kind: ClassVar[str] = "ring"
    virtual_stages: ClassVar[int] = 1

    model: str = flag("tiny", f"a preset: {', '.join(T5_PRESETS)}", metavar="PRESET")
    num_layers: int | None = flag(
        None, "layers of both halves; this flag and the others of the model override the preset"
    )
    seq_length: int | None = flag(None, "tokens of a source")
    encoder_layers: int | None = flag(None, "layers of the encoder; the default is half")
    target_length: int | None = flag(None, "tokens of a target, with padding")

    def task(self) -> FillSpans:
        return FillSpans(self.learned())

    def num_ids(self, tokenizer) -> int:
        return special_tokens.t5_tokens(tokenizer).vocab_size

    def check(self, model: T5Config, world: int, base_needed: bool) -> None:
        super().check(model, world, base_needed)
        with as_flags():
            masking.check_spans(model.seq_length, model.target_length, special_tokens.SENTINELS)
            if model.target_length % self.sequence_shards:
                rule = "must be divisible by {tp} under sequence parallelism"
                raise FieldError("target_length", model.target_length, rule, tp=self.tp)
