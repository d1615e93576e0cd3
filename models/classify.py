"""Fine-tuning of a BERT: it labels a text, or finds the answer to a question in a text (Devlin et
al., arXiv 1810.04805, section 4 and figure 4).

Another head takes the place of the one that fills in hidden tokens, and the whole model learns:

    label   [CLS] text [SEP], or [CLS] text [SEP] second [SEP]
            scores [n] = dropout(tanh(x W + b)) U + c      x [h]: of [CLS]; n labels
    span    [CLS] question [SEP] context [SEP]
            scores [s, 2] = x U + c                        x [s, h]: of all tokens; the softmax over
            s says where the answer begins, and where it ends

    torchrun --nproc-per-node 2 -m models.classify --load CKPT --data FILE.jsonl --out runs/labels
    python -m models.use_bert predict --checkpoint runs/labels --data FILE.jsonl

finetune/labelled_data.py describes the lines of FILE. The loss is a mean over examples, so it does
not depend on the layout. Without --load the model learns from these examples alone.

Not covered: several windows of a long context, questions without an answer (SQuAD 2.0), a label for
each token, RoBERTa's dropout before W, an adapter beside the head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import train
from base import terminal
from base.dropout import Dropout
from base.model_config import MoEConfig
from finetune.labelled_data import Reader, agreement, best, open_rows
from finetune.packing import Padded
from finetune.preference import ValueModel, WithoutLogits, gather_values
from models.batch import Batch, pad_rows
from models.bert import Bert, BertConfig
from models.runs import BertFlags
from models.special_tokens import bert_tokens
from run import checkpoint
from run.config import ConfigError, flag
from run.task import evaluation_batches, outputs

# --- the head -------------------------------------------------------------------------------------


class ClassifierHead(nn.Module):
    """x: [b, s, h] -> scores, [b, n, 1] for n labels or [b, s, 2] for spans, in at least float32.

    Tensor-parallel ranks hold all of it, and compute the same. With a group (under sequence
    parallelism) x is a shard, [b, s/t, h], and is gathered first; for labels, of each its first
    token.
    """

    def __init__(self, config: BertConfig, n: int, group: dist.ProcessGroup | None):
        """n: how many labels; 0 for spans."""
        super().__init__()
        h = config.hidden_size
        self.pooler = nn.Linear(h, h) if n else None
        self.dropout = Dropout(config.dropout, site=0)
        self.scores = nn.Linear(h, n or 2)
        self.group = group

    def forward(self, x: Tensor, drop_key: Tensor | None = None) -> Tensor:
        x = x[:, :1] if self.pooler else x
        if self.group:
            x = gather_values(x, self.group)  # [b, s, h]; for labels [b, t, h], [CLS] first
        if self.pooler:
            pooled = torch.tanh(self.pooler(x[:, 0]))
            x = self.dropout(pooled, drop_key).unsqueeze(1)  # [b, 1, h]
        scores = self.scores(x)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return scores.transpose(1, 2) if self.pooler else scores


def apply(model: Bert, n: int, group: dist.ProcessGroup | None = None) -> None:
    """Give a model, or every stage of one, the head for n labels, or for spans (0), in place.
    group: of sequence parallelism. After tensor and sequence parallelism."""
    # The embedding has no copy in the head any more.
    model.tied = False
    if model.head is not None:
        with next(model.head.parameters()).device:
            model.head = ClassifierHead(model.config, n, group)
        model.head_has_dropout = True


def losses(scores: Tensor, batch: Batch) -> Tensor:
    """- log p of each example, [b]; of a span the mean of that of its first and its last token.
    scores: as of the head; batch.targets: [b, 1] or [b, 2]."""
    if batch.targets.shape[1] == 2:
        # The softmax is over real tokens: how much padding there is depends on the layout.
        scores = scores.masked_fill(~batch.real.unsqueeze(2), -torch.inf)
    return F.cross_entropy(scores, batch.targets, reduction="none").mean(1)


# --- a run ----------------------------------------------------------------------------------------


class Rows(Padded):
    """Examples as batches. Targets: the number of the label, [b, 1], or the span, [b, 2]; None for
    examples that say neither."""

    read_last = True

    def __init__(self, rows, seed, pad: int, types: int, labels=(), multiple_of: int = 1):
        """rows: a list of Row. pad: the id of [PAD]; types: how many the model has; labels: their
        names. Other arguments as in Padded."""
        super().__init__(rows, seed, multiple_of)
        self.pad, self.types, self.labels = pad, types, labels
        # The loss is not that of text.
        del self.index["bytes"]

    def batch(self, samples) -> Batch:
        samples = list(samples)
        rows = [self.example(n) for n in samples]
        tokens, real = pad_rows([row.ids for row in rows], self.s, self.pad)
        # A RoBERTa has one type, so its second texts have that one too.
        second = real & (torch.arange(self.s) >= torch.tensor([[row.n] for row in rows]))
        types = second.long().clamp(max=self.types - 1)
        targets = None
        if rows[0].span:
            targets = torch.tensor([row.span for row in rows])
        elif self.labels:
            targets = torch.tensor([[self.labels.index(row.record["label"])] for row in rows])
        # An example counts at all positions or at none.
        counts, numbers = torch.ones_like(real), torch.tensor(samples)
        return Batch(tokens, targets, counts, numbers, (~real).long(), real, types)

    def counted_tokens(self, samples) -> int:
        return len(samples)


class Classifier(ValueModel):
    """A BERT learns, with the head of the task."""

    own_weight = "head.scores.weight"
    head_name = "head"

    def after_model_parallel(self, stage) -> None:
        group = self.groups.tp if self.config.sequence_parallel else None
        apply(stage, len(self.trainer.task.labels), group)

    def extra_state(self) -> dict:
        return {"labels": self.trainer.task.labels}

    def check_base(self, path, index: dict) -> None:
        if index.get("labels") != self.trainer.task.labels:
            rule = "give the data of the run, or --load it and name another --out"
            self.config.refuse("data", f"has other labels than {path}; {rule}")


class ClassifyTask(WithoutLogits):
    """Labels of texts, or answers in them."""

    other_data = " (some samples may come again, and others are held out)"

    def __init__(self):
        super().__init__(Classifier("the classifier"))

    def open_data(self, config, world, tokenizer):
        """Find the labels too, [] for answers. Raises ChatError or CheckpointError."""
        index = checkpoint.read_index(config.base()) if config.load else {}
        shards, special = config.length_multiple, bert_tokens(tokenizer)
        shape = config.model_config()
        s = shape.seq_length // shards * shards
        reader = Reader(tokenizer, special.cls, special.sep, s, shape.token_types)
        learned, held_out, self.labels = open_rows(config, world, reader, index.get("labels"))
        others = special.pad, shape.token_types, self.labels, shards
        return Rows(learned, config.seed, *others), Rows(held_out, None, *others)

    def built(self) -> None:
        h, n = self.model_config.hidden_size, len(self.labels)
        new = (h + 1) * (h + n) if n else (h + 1) * 2
        # A layer, a norm, and a bias for each token.
        former = (h + 1) * h + 2 * h + self.model_config.vocab_size
        self.trainer.num_parameters += new - former

    def total_loss(self, y: Tensor, batch) -> Tensor:
        return (losses(y, batch) * batch.loss_mask[:, 0]).sum()

    def loss_count(self, dataset, samples) -> int:
        return len(samples)

    def evaluate(self, dataset: Rows, sequences: int) -> float:
        """Mean loss of all held-out examples."""
        scores = scores_of(self.trainer, dataset, self.labels)
        found = []
        for of_row, row in zip(scores, dataset.examples):
            right = row.record["label" if self.labels else "answer"]
            name, _ = best(of_row, row, self.labels)
            found.append([name == right] if self.labels else agreement(name, right))
        names = ["eval_accuracy"] if self.labels else ["eval_exact_match", "eval_f1"]
        self.measured = dict(zip(names, torch.tensor(found).double().mean(0).tolist()))
        return losses(scores, dataset.batch(range(len(found)))).mean().item()

    def eval_statistics(self) -> dict[str, float]:
        return self.measured


def scores_of(trainer, dataset: Rows, labels: list[str]) -> Tensor:
    """What the head gives for all examples, [N, n, 1] or [N, s, 2]. A collective."""
    n = dataset.num_sequences
    shape = (n, len(labels), 1) if labels else (n, dataset.s, 2)
    return outputs(trainer, list(evaluation_batches(trainer, dataset, n)), shape)


# --- the command ----------------------------------------------------------------------------------


@dataclass
class ClassifyConfig(BertFlags):
    """Every flag of models/classify.py."""

    command: ClassVar[str] = "-m models.classify"
    purpose: ClassVar[str] = "Fine-tune a BERT to label texts, or to find answers in them."
    cp: ClassVar[int] = 1

    data: list[str] = flag(
        [], "JSON lines of labels or of answers; a twentieth is held out", metavar="FILE"
    )
    val_data: list[str] = flag(
        [], "examples to evaluate on; all of --data is then trained on", metavar="FILE"
    )
    skip_bad_examples: bool = flag(
        False, "leave out, and count, empty texts and answers beyond --seq-length"
    )

    def task(self) -> ClassifyTask:
        return ClassifyTask()

    def default_lr(self) -> tuple[float, str]:
        if self.load:
            return 5e-5, "fine-tuning a BERT (arXiv 1810.04805, appendix A.3)"
        return super().default_lr()

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        if base_needed and not self.data:
            raise ConfigError("--data: classify.py needs --data FILE, JSON lines of examples")


def main(argv: list[str]) -> int:
    return train.main(argv, ClassifyConfig)


if __name__ == "__main__":
    terminal.command(main)
