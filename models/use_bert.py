"""What a trained BERT says: words for hidden tokens, vectors of texts, labels, answers.

    python -m models.use_bert fill --checkpoint CKPT --text "The capital of Britain is [MASK]."
    python -m models.use_bert embed --checkpoint CKPT --data FILE.jsonl --out vectors.npy
    python -m models.use_bert predict --checkpoint RUN --data FILE.jsonl

FILE has lines as of finetune/labelled_data.py, without label or answer. fill and predict print each
line again, with what the model says of it; embed writes an array [lines, h], the mean of a text's
last hidden states or that of [CLS]. predict needs a checkpoint of models/classify.py.

The model is that of a trainer that does not train, so it has any layout: torchrun .. --tp 2 --pp 2
"""

import argparse
import json

import numpy as np
import torch
from torch import Tensor, nn

from base import json_files, terminal
from finetune.chat_template import ChatError
from finetune.labelled_data import Reader, Row, best
from finetune.reference_models import FrozenModel
from inference.cli import check_least, command
from models import classify
from models.special_tokens import bert_tokens
from run import checkpoint, launch, rules
from run.config import DTYPES, ConfigError
from run.task import Task, evaluation_batches, outputs
from train import Trainer

MASK = "[MASK]"


class HiddenStates(nn.Module):
    """A head that changes nothing. x: [b, s, h]"""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return x


class UsedModel(FrozenModel):
    """The model of a task of this command."""

    def __init__(self, task: str, labels: list[str] | None):
        self.task, self.labels = task, labels

    def after_model_parallel(self, stage) -> None:
        if self.task == "predict":
            classify.apply(stage, len(self.labels))
        elif self.task == "embed" and stage.head is not None:
            stage.head = HiddenStates()
        stage.requires_grad_(False)


def masked_row(record: dict, tokenizer, special, limit: int) -> Row:
    """The row of a text in which [MASK] stands for one token. Raises ChatError."""
    ids = []
    for n, piece in enumerate(str(record.get("text")).split(MASK)):
        ids += [special.mask] * (n > 0) + [int(i) for i in tokenizer.encode(piece)]
    ids = [special.cls, *ids[: limit - 2], special.sep]
    if special.mask not in ids:
        raise ChatError(f'has no {MASK} in the first {limit} tokens of its "text"')
    return Row(ids, len(ids), record, [], None)


def read_rows(args: argparse.Namespace, tokenizer, limit: int) -> list[Row]:
    """The rows of --text or --data. Raises ChatError or JSONError."""
    special = bert_tokens(tokenizer)
    reader = Reader(tokenizer, special.cls, special.sep, limit, answered=False)
    lines = json_files.read_lines(args.data) if args.data else [(1, {"text": args.text})]
    rows = []
    for number, record in lines:
        try:
            fills = args.task == "fill"
            row = masked_row(record, tokenizer, special, limit) if fills else reader.row(record)
            rows.append(row)
        except ChatError as e:
            where = f"--data {args.data}, line {number}" if args.data else "--text"
            raise ConfigError(f"{where}: {e}") from None
    return rows


def words(trainer, dataset, k: int, mask: int, tokenizer):
    """Yield for each row the likeliest k words for each [MASK]."""

    def likeliest(batch, logits: Tensor) -> Tensor:
        top = logits.softmax(-1).topk(k)
        return torch.stack((top.values, top.indices), -1) * batch.loss_mask[:, :, None, None]

    n, s = dataset.num_sequences, dataset.s
    batches = list(evaluation_batches(trainer, dataset, n))
    found = outputs(trainer, batches, (n, s, k, 2), likeliest)
    for row, of_row in zip(dataset.examples, found):
        at = [i for i, token in enumerate(row.ids) if token == mask]
        yield {MASK: [[(tokenizer.decode([int(i)]), p) for p, i in of_row[j].tolist()] for j in at]}


def vectors(trainer, dataset, pooling: str) -> np.ndarray:
    """[lines, h] float32"""

    def pool(batch, x: Tensor) -> Tensor:
        counts = batch.real.clone()
        if pooling == "first":
            counts[:, 1:] = False
        mean = (x * counts.unsqueeze(2)).sum(1) / counts.sum(1, keepdim=True)
        return mean * batch.loss_mask

    n = dataset.num_sequences
    batches = list(evaluation_batches(trainer, dataset, n))
    return outputs(trainer, batches, (n, trainer.model_config.hidden_size), pool).float().numpy()


def predictions(trainer, dataset, labels: list[str]):
    """Yield for each row the label or the answer, and its probability."""
    for row, scores in zip(dataset.examples, classify.scores_of(trainer, dataset, labels)):
        name, p = best(scores, row, labels)
        yield {"predicted": name, "probability": p}


def run(args: argparse.Namespace, world) -> None:
    check_least(args, {"batch_size": 1, "top_k": 1, "tp": 1, "pp": 1})
    if (args.text is None) == (args.data is None):
        raise ConfigError("--text, --data: one of them says what to read")
    if (args.out is None) == (args.task == "embed"):
        raise ConfigError("--out FILE: is for embed, which needs it")
    names = ("tp", "pp", "precision", "device", "tokenizer")
    config = classify.ClassifyConfig(
        load=args.checkpoint,
        micro_batch_size=args.batch_size,
        global_batch_size=args.batch_size * world.size,
        **{name: getattr(args, name) for name in names},
    )
    rules.validate(config, world.size, base_needed=False)
    index = checkpoint.read_index(config.base())
    labels = index.get("labels")
    if (args.task == "predict") != (labels is not None):
        which = "models.classify" if args.task == "predict" else "models.bert"
        raise ConfigError(f"--checkpoint {args.checkpoint}: {args.task} needs one of -m {which}")
    tokenizer = launch.open_tokenizer(config, world)
    special = bert_tokens(tokenizer)
    rows = read_rows(args, tokenizer, config.model_config().seq_length)
    dataset = classify.Rows(rows, None, 1, special.pad)
    world.connect(args.device, config.timeout, **config.mesh)
    model = UsedModel(args.task, labels)
    trainer = launch.build(config, world, Trainer, Task(model))
    model.load_from(config.base())
    if args.task == "embed":
        found = vectors(trainer, dataset, args.pooling)
        return world.on_rank_0(lambda: np.save(args.out, found))
    if args.task == "fill":
        said = words(trainer, dataset, args.top_k, special.mask, tokenizer)
    else:
        said = predictions(trainer, dataset, labels)
    for row, of_row in zip(rows, said):
        world.say(json.dumps(row.record | of_row))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m models.use_bert", description="Say what a trained BERT says of texts."
    )
    flag = parser.add_argument
    flag("task", choices=("fill", "embed", "predict"))
    flag("--checkpoint", metavar="DIR", required=True, help="a checkpoint, or the folder of a run")
    flag("--text", help="one text")
    flag("--data", metavar="FILE", help="JSON lines of texts")
    flag("--out", metavar="FILE", help="embed: the array, as numpy.load reads it")
    flag("--pooling", choices=("mean", "first"), default="mean", help="embed: of which tokens")
    flag("--top-k", type=int, default=5, help="fill: words for each [MASK]")
    flag("--batch-size", type=int, default=16, help="texts at a time")
    flag("--tp", type=int, default=1, help="tensor-parallel ranks")
    flag("--pp", type=int, default=1, help="pipeline-parallel ranks; the rest is data parallel")
    flag("--precision", choices=tuple(DTYPES), help="default: bf16 on CUDA, fp32 on CPUs")
    flag("--tokenizer", help="needed where the one that the model was trained with has moved")
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return command("use_bert.py", run, argv, parser)


if __name__ == "__main__":
    terminal.command(main)
