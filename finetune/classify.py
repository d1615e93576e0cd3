"""Classification: a decoder reads a text, and a linear head gives its label.

    [start] text [end], or [start] text [end] second [end]
    scores [n] = U x       x [h]: of the last token, behind the last norm; n labels

(Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", section 3.3.)
The last token alone has seen the whole text. With --pool mean x is the mean of all tokens. Each
token gets its scores first, [b, s, n]; of these one is taken, or their mean, for a linear head and
a mean commute. So ranks that share a sequence gather n numbers of a token in the place of h.

    torchrun --nproc-per-node 2 -m finetune.classify --load CKPT --data FILE.jsonl --out runs/labels
    python -m models.use_bert predict --checkpoint runs/labels --data FILE.jsonl

finetune/labelled_data.py describes the lines of FILE. The loss is a mean over texts.

Not covered: adapters beside the head, several labels for a text, answers (models/classify.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import train
from base import terminal
from base.model_config import MoEConfig
from finetune import preference
from finetune.labelled_data import Reader, Row, best, open_rows
from finetune.packing import Example, Padded, lay_out
from finetune.preference import ValueModel, WithoutLogits
from finetune.scores import macro_f1, mean, of_answer
from run import checkpoint
from run.config import ConfigError, RunConfig, flag
from run.data import Batch
from run.task import evaluation_batches, outputs

# --- what learns ----------------------------------------------------------------------------------


class Classifier(ValueModel):
    """A model and its head learn, or with --freeze the head alone. The head is a reward model's,
    with one output for each label."""

    head_name = "head"

    @property
    def share_of_flops(self) -> float:
        # A forward alone is a third of a step.
        return 1 / 3 if self.config.freeze else 1.0

    def before_techniques(self, stage) -> None:
        super().before_techniques(stage)
        if self.config.freeze:
            stage.requires_grad_(False)

    def after_model_parallel(self, stage) -> None:
        self.trainer.task.add_head(stage)


# --- a run ----------------------------------------------------------------------------------------

# Fewer held-out examples than these are said to be few.
FEW = 20


class Labelled(Padded):
    """Texts as batches. Targets: the number of the label, [b, 1]; without labels None."""

    read_last = True

    def __init__(self, rows: list[Row], seed: int | None, labels=(), multiple_of: int = 1):
        """labels: their names. Other arguments as in Padded."""
        super().__init__(rows, seed, multiple_of)
        self.labels = labels
        # Without it no loss per byte of text is reported.
        del self.index["bytes"]

    def targets(self, rows: list[Row]) -> Tensor | None:
        if not self.labels:
            return None
        return torch.tensor([[self.labels.index(row.record["label"])] for row in rows])

    def batch(self, samples) -> Batch:
        samples = list(samples)
        rows = [self.example(n) for n in samples]
        whole = [[Example(row.ids, [True] * len(row.ids))] for row in rows]
        batch = lay_out(whole, self.s, read_last=True)
        numbers, real = torch.tensor(samples), batch.real
        return Batch(batch.tokens, self.targets(rows), real, numbers, None, real)

    def counted_tokens(self, samples) -> int:
        return len(samples)


class LabelTask(WithoutLogits):
    """Labels of texts."""

    balances_experts = False
    other_data = " (some samples may come again, and others are held out)"
    # Whether answers in a text will do in the place of labels.
    finds_answers = False
    labels: list[str]

    def add_head(self, stage) -> None:
        """After tensor and sequence parallelism."""
        config = self.config
        preference.apply(stage, self.groups.tp, config.sequence_parallel, len(self.labels))

    def reader(self, config, tokenizer, answered: bool = True) -> Reader:
        """answered: as of Reader. Raises ConfigError."""
        if tokenizer.eot is None:
            config.refuse("tokenizer", "has no end of text, at which a label is read")
        begin = tokenizer.eot if tokenizer.bos is None else tokenizer.bos
        s = config.model_config().seq_length // config.length_multiple * config.length_multiple
        return Reader(tokenizer, begin, tokenizer.eot, s, answered=answered)

    def rows(self, config, tokenizer, rows: list[Row], seed: int | None, labels=()) -> Labelled:
        """Arguments as of Labelled."""
        return Labelled(rows, seed, labels, config.length_multiple)

    def open_data(self, config, world, tokenizer):
        """Find the labels too, [] for answers. Raises ChatError or CheckpointError."""
        index = checkpoint.read_index(config.base()) if config.load else {}
        reader = self.reader(config, tokenizer)
        learned, held_out, self.labels = open_rows(config, world, reader, index.get("labels"))
        if not self.labels and not self.finds_answers:
            config.refuse("data", "has answers, for python -m models.classify; labels would fit")
        if self.labels:
            world.say(f"labels: {', '.join(self.labels)}")
        if len(held_out) < FEW:
            rule = "too few to measure how good the model is; --val-data FILE would give more"
            world.say(f"{len(held_out)} held out: {rule}")
        return tuple(
            self.rows(config, tokenizer, rows, seed, self.labels)
            for rows, seed in ((learned, config.seed), (held_out, None))
        )

    def built(self) -> None:
        self.count_head(len(self.labels))

    def extra_state(self) -> dict:
        return {"labels": self.labels}

    def check_base(self, path, index: dict) -> None:
        if index.get("labels") != self.labels:
            rule = "give the data of the run, or --load it and name another --out"
            self.config.refuse("data", f"has other labels than {path}; {rule}")
        for name in ("pool", "freeze"):
            then = index["config"].get(name)
            if then != getattr(self.config, name, None):
                self.config.refuse(name, f"{path} has {then}; leave it out, or name another --out")

    def scores(self, batch, y: Tensor) -> Tensor:
        """[b, n, 1], of each text; answers have 2 in the last place. y: [b, s, n], of each token"""
        length = batch.real.sum(1, keepdim=True)
        if self.config.pool == "last":
            return y[torch.arange(len(y), device=y.device), length[:, 0] - 1].unsqueeze(2)
        return (y * batch.real.unsqueeze(2)).sum(1).div(length).unsqueeze(2)

    def losses(self, scores: Tensor, batch) -> Tensor:
        """- log p of each label, [b]. scores: [b, n, 1]; batch.targets: [b, 1]"""
        return F.cross_entropy(scores, batch.targets, reduction="none").mean(1)

    def total_loss(self, y: Tensor, batch) -> Tensor:
        return (self.losses(self.scores(batch, y), batch) * batch.loss_mask[:, 0]).sum()

    def scores_of(self, dataset) -> Tensor:
        """Of all texts, [N, n, 1]; for answers [N, s, 2]. A collective."""
        n = dataset.num_sequences
        shape = (n, len(self.labels), 1) if self.labels else (n, dataset.s, 2)
        return outputs(
            self.trainer, list(evaluation_batches(self.trainer, dataset, n)), shape, self.scores
        )

    def evaluate(self, dataset, sequences: int) -> float:
        """Mean loss of all held-out examples."""
        scores, rows = self.scores_of(dataset), dataset.examples
        found = [best(of_row, row, self.labels)[0] for of_row, row in zip(scores, rows)]
        right = [row.record["label" if self.labels else "answer"] for row in rows]
        if self.labels:
            accuracy = sum(map(str.__eq__, found, right)) / len(found)
            measured = {"accuracy": accuracy, "macro_f1": macro_f1(found, right)}
        else:
            measured = mean([of_answer(*pair) for pair in zip(found, right)])
        self.measured = {f"eval_{name}": value for name, value in measured.items()}
        return self.losses(scores, dataset.batch(range(len(found)))).mean().item()

    def eval_statistics(self) -> dict[str, float]:
        return self.measured

    def finish(self, run) -> bool:
        use = f"python -m models.use_bert predict --checkpoint {run.out} --data FILE"
        run.world.say(f"{'labels' if self.labels else 'answers'} of other texts: {use}")
        return super().finish(run)


# --- the command ----------------------------------------------------------------------------------


@dataclass
class LabelConfig(RunConfig):
    """The flags of labelled data, which models/classify.py has too."""

    cp: ClassVar[int] = 1

    data: list[str] = flag(
        [], "JSON lines (finetune/labelled_data.py); a twentieth is held out", metavar="FILE"
    )
    val_data: list[str] = flag(
        [], "examples to evaluate on; all of --data is then trained on", metavar="FILE"
    )
    skip_bad_examples: bool = flag(
        False, "leave out, and count, empty texts and answers beyond --seq-length"
    )
    freeze: bool = flag(False, "the head alone learns; there are no adapters here")

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        if base_needed and not self.data:
            raise ConfigError("--data: classify.py needs --data FILE, JSON lines of examples")


@dataclass
class ClassifyConfig(LabelConfig):
    """Every flag of finetune/classify.py."""

    command: ClassVar[str] = "-m finetune.classify"
    purpose: ClassVar[str] = "Fine-tune a decoder to label texts."
    value_head: ClassVar[bool] = True
    unpredicted: ClassVar[str] = "trains another head"
    head_chunk: ClassVar[int] = 0

    pool: str = flag("last", "what the head reads: the last token, or the mean", ("last", "mean"))

    def task(self) -> LabelTask:
        return LabelTask(Classifier("the classifier"))


def main(argv: list[str]) -> int:
    return train.main(argv, ClassifyConfig)


if __name__ == "__main__":
    terminal.command(main)
