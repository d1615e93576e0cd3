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
from torch import Tensor, nn

import train
from base import terminal
from base.dropout import Dropout
from finetune.classify import Classifier, LabelConfig, Labelled, LabelTask
from finetune.labelled_data import Reader
from finetune.preference import gather_values
from models.batch import Batch, pad_rows
from models.bert import Bert, BertConfig
from models.runs import BertFlags
from models.special_tokens import bert_tokens

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


# --- a run ----------------------------------------------------------------------------------------


class Rows(Labelled):
    """Examples as batches. Targets: the number of the label, [b, 1], or the span, [b, 2]; None for
    examples that say neither."""

    def __init__(self, rows, seed, pad: int, types: int, labels=(), multiple_of: int = 1):
        """pad: the id of [PAD]; types: how many the model has. Other arguments as in Labelled."""
        super().__init__(rows, seed, labels, multiple_of)
        self.pad, self.types = pad, types

    def batch(self, samples) -> Batch:
        samples = list(samples)
        rows = [self.example(n) for n in samples]
        tokens, real = pad_rows([row.ids for row in rows], self.s, self.pad)
        # A RoBERTa has one type, so its second texts have that one too.
        second = real & (torch.arange(self.s) >= torch.tensor([[row.n] for row in rows]))
        types = second.long().clamp(max=self.types - 1)
        spans = rows[0].span
        targets = torch.tensor([row.span for row in rows]) if spans else self.targets(rows)
        # An example counts at all positions or at none.
        counts, numbers = torch.ones_like(real), torch.tensor(samples)
        return Batch(tokens, targets, counts, numbers, (~real).long(), real, types)


class BertClassifier(Classifier):
    own_weight = "head.scores.weight"


class ClassifyTask(LabelTask):
    """Labels of texts, or answers in them."""

    balances_experts = True
    finds_answers = True

    def add_head(self, stage) -> None:
        group = self.groups.tp if self.config.sequence_parallel else None
        apply(stage, len(self.labels), group)

    def reader(self, config, tokenizer, answered: bool = True) -> Reader:
        shards, special = config.length_multiple, bert_tokens(tokenizer)
        shape = config.model_config()
        s = shape.seq_length // shards * shards
        return Reader(tokenizer, special.cls, special.sep, s, shape.token_types, answered)

    def rows(self, config, tokenizer, rows, seed: int | None, labels=()) -> Rows:
        types, pad = config.model_config().token_types, bert_tokens(tokenizer).pad
        return Rows(rows, seed, pad, types, labels, config.length_multiple)

    def built(self) -> None:
        h, n = self.model_config.hidden_size, len(self.labels)
        new = (h + 1) * (h + n) if n else (h + 1) * 2
        # A layer, a norm, and a bias for each token.
        former = (h + 1) * h + 2 * h + self.model_config.vocab_size
        self.trainer.num_parameters += new - former

    def scores(self, batch, y: Tensor) -> Tensor:
        return y

    def losses(self, scores: Tensor, batch) -> Tensor:
        """Of a span the mean of that of its first and its last token. batch.targets: [b, 2]"""
        if batch.targets.shape[1] == 2:
            # The softmax is over real tokens: how much padding there is depends on the layout.
            scores = scores.masked_fill(~batch.real.unsqueeze(2), -torch.inf)
        return super().losses(scores, batch)


# --- the command ----------------------------------------------------------------------------------


@dataclass
class ClassifyConfig(LabelConfig, BertFlags):
    """Every flag of models/classify.py."""

    command: ClassVar[str] = "-m models.classify"
    purpose: ClassVar[str] = "Fine-tune a BERT to label texts, or to find answers in them."

    def task(self) -> ClassifyTask:
        return ClassifyTask(BertClassifier("the classifier"))

    def default_lr(self) -> tuple[float, str]:
        if self.load:
            return 5e-5, "fine-tuning a BERT (arXiv 1810.04805, appendix A.3)"
        return super().default_lr()


def main(argv: list[str]) -> int:
    return train.main(argv, ClassifyConfig)


if __name__ == "__main__":
    terminal.command(main)
