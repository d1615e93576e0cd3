"""What a trained BERT gives: words for hidden tokens, vectors of texts, labels, answers. A
classifier that was a GPT (finetune/classify.py) gives labels, too.

    python -m models.use_bert fill --checkpoint CKPT --text "The capital of Britain is [MASK]."
    python -m models.use_bert embed --checkpoint CKPT --data FILE.jsonl --out vectors.npy
    python -m models.use_bert predict --checkpoint RUN --data FILE.jsonl

fill       adds to each line "words": for each [MASK] the likeliest, with their probabilities
embed      writes an array [lines, h]: the mean of a text's last hidden states, or that of [CLS]
predict    adds "predicted" and its "probability"; RUN is one of models/classify.py, or of
           finetune/classify.py

A line of FILE is as of finetune/labelled_data.py, without label and answer. The model is that of a
trainer that does not train, so it has any layout: torchrun --nproc-per-node 4 -m .. --tp 2 --pp 2
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from base import json_files, terminal
from finetune import classify as decoders
from finetune.chat_template import ChatError, Tokens
from finetune.labelled_data import Reader, Row, best
from finetune.reference_models import FrozenModel
from inference.cli import check_least, command
from models import classify
from models.special_tokens import bert_tokens, spell
from run import checkpoint, launch, rules
from run.checkpoint_index import command_of
from run.config import DTYPES, ConfigError
from run.task import Task, evaluation_batches, outputs
from train import Trainer

# What a GPT has instead of each use.
OF_A_GPT = {
    "fill": "generate.py continues its texts",
    "embed": "python -m inference.serve gives its vectors (/v1/embeddings)",
    "predict": "python -m finetune.classify teaches it labels",
}


class Unchanged(nn.Module):
    """A head for vectors. x: [b, s, h]"""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return x


class UsedModel(FrozenModel):
    """A model with the head for one use."""

    def __init__(self, use: str):
        self.use = use

    def after_model_parallel(self, stage) -> None:
        if self.use == "predict":
            self.trainer.task.add_head(stage)
        elif self.use == "embed" and stage.head is not None:
            stage.head = Unchanged()
        stage.requires_grad_(False)


class MaskedReader(Reader):
    """Reads texts in which [MASK] stands for one token. mask: its id."""

    def __init__(self, mask: int, *others, **options):
        super().__init__(*others, **options)
        self.mask, library = mask, self.tokenizer.library
        added = library.get_added_tokens_decoder() if library else {}
        self.name = added[mask].content if mask in added else ""

    def encode(self, text: str) -> Tokens:
        # A published tokenizer finds its token itself, and the spaces that belong to it.
        pieces = [text.replace("[MASK]", self.name)] if self.name else text.split("[MASK]")
        ids = []
        for piece in pieces:
            ids += [self.mask, *super().encode(piece).ids]
        return Tokens(ids[1:], [], [])

    def row(self, record: dict) -> Row:
        row = super().row(record)
        if self.mask not in row.ids:
            raise ChatError(f"has no [MASK] in its first {self.limit} tokens")
        return row


def read_rows(args: argparse.Namespace, reader: Reader, labels: list[str] | None) -> list[Row]:
    """The rows of --text or --data. labels: of the model. Raises ConfigError or JSONError."""
    lines = json_files.read_lines(args.data) if args.data else [(1, {"text": args.text})]
    rows = []
    for number, record in lines:
        try:
            if args.use == "predict" and ("context" in record) == bool(labels):
                needed = '"text"' if labels else '"question" and "context"'
                raise ChatError(f"the model of {args.checkpoint} needs {needed}")
            rows.append(reader.row(record))
        except (ChatError, UnicodeEncodeError) as e:
            where = f"--data {args.data}, line {number}" if args.data else "--text"
            raise ConfigError(f"{where}: {e}") from None
    if not rows:
        raise ConfigError(f"--data {args.data}: has no line")
    return rows


def likeliest(k: int, batch, logits: Tensor) -> Tensor:
    """The k likeliest tokens at each position, and their probabilities: [b, s, k, 2]"""
    p, ids = logits.softmax(-1).topk(k)
    return torch.stack((ids, p), -1)


def pool(pooling: str, batch, x: Tensor) -> Tensor:
    """[b, s, h] -> [b, h]"""
    if pooling == "first":
        return x[:, 0]
    return (x * batch.real.unsqueeze(2)).sum(1) / batch.real.sum(1, keepdim=True)


def config_of(args: argparse.Namespace, world) -> decoders.LabelConfig:
    """That of a run with this model. Raises ConfigError or CheckpointError."""
    check_least(args, {"batch_size": 1, "top_k": 1, "tp": 1, "pp": 1})
    if (args.text is None) == (args.data is None):
        raise ConfigError("--text, --data: one of them says what to read")
    if (args.out is None) == (args.use == "embed"):
        raise ConfigError("--out FILE: is for embed, which needs it")
    folders = {"--checkpoint": args.checkpoint, "--out": Path(args.out or ".").parent}
    for flag, folder in folders.items():
        if not Path(folder).is_dir():
            raise ConfigError(f"{flag} {folder}: no such folder")
    index, kind = checkpoint.read_index(checkpoint.find(args.checkpoint)), classify.ClassifyConfig
    if command_of(index["model"]) == "train.py" and "pool" not in index["config"]:
        rule = OF_A_GPT[args.use]
        raise ConfigError(f"{args.use}: --checkpoint {args.checkpoint} is a GPT; {rule}")
    names = ("tp", "pp", "precision", "device", "tokenizer")
    given = {name: getattr(args, name) for name in names} | {"load": args.checkpoint}
    if args.use == "predict" and "pool" in index["config"]:
        kind, given["pool"] = decoders.ClassifyConfig, index["config"]["pool"]
    batch = dict(micro_batch_size=args.batch_size, global_batch_size=args.batch_size * world.size)
    config = kind(**given | batch)
    rules.validate(config, world.size, base_needed=False)
    return config


def run(args: argparse.Namespace, world) -> None:
    config = config_of(args, world)
    labels = checkpoint.read_index(config.base()).get("labels")
    if args.use != "embed" and (args.use == "fill") != (labels is None):
        what = "of python -m models.classify; predict would fit, or a checkpoint of models.bert"
        if labels is None:
            what = f"not of python -m models.classify, which trains one: --load {args.checkpoint}"
        raise ConfigError(f"{args.use}: --checkpoint {args.checkpoint} is {what}")
    tokenizer, shape = launch.open_tokenizer(config, world), config.model_config()
    if args.top_k > shape.vocab_size:
        raise ConfigError(f"--top-k {args.top_k}: the model has {shape.vocab_size} tokens")
    if args.use == "predict":
        return predict(args, world, config, tokenizer, labels)
    special = bert_tokens(tokenizer)
    kind = partial(MaskedReader, special.mask) if args.use == "fill" else Reader
    others = special.cls, special.sep, shape.seq_length, shape.token_types
    rows = read_rows(args, kind(tokenizer, *others, answered=False), labels)
    world.connect(args.device, config.timeout, **config.mesh)
    model = UsedModel(args.use)
    trainer = launch.build(config, world, Trainer, Task(model))
    model.load_from(config.base())
    dataset = classify.Rows(rows, None, special.pad, trainer.model_config.token_types)
    n, batches = len(rows), list(evaluation_batches(trainer, dataset, len(rows)))
    if args.use == "embed":
        shape = n, trainer.model_config.hidden_size
        found = outputs(trainer, batches, shape, partial(pool, args.pooling))
        world.on_rank_0(lambda: np.save(args.out, found.float().numpy()))
        return
    shape = n, dataset.s, args.top_k, 2
    for row, found in zip(rows, outputs(trainer, batches, shape, partial(likeliest, args.top_k))):
        words = []
        for token, those in zip(row.ids, found.tolist()):
            if token == special.mask:
                words.append([(spell([int(i)], special.names, tokenizer), p) for i, p in those])
        world.say(json.dumps(row.record | {"words": words}))


def predict(args: argparse.Namespace, world, config, tokenizer, labels: list[str]) -> None:
    task = config.task()
    rows = read_rows(args, task.reader(config, tokenizer, answered=False), labels)
    world.connect(args.device, config.timeout, **config.mesh)
    task.labels, task.learned = labels, UsedModel(args.use)
    launch.build(config, world, Trainer, task)
    task.learned.load_from(args.checkpoint)
    for row, scores in zip(rows, task.scores_of(task.rows(config, tokenizer, rows, None))):
        found = dict(zip(("predicted", "probability"), best(scores, row, labels)))
        world.say(json.dumps(row.record | found))


def main(argv: list[str]) -> int:
    about = "Print what a trained BERT, or a classifier of texts (also a GPT), predicts."
    parser = argparse.ArgumentParser(prog="python -m models.use_bert", description=about)
    flag = parser.add_argument
    words = "predict: labels or answers, of a classifier; fill, embed: words, vectors, of a BERT"
    flag("use", choices=("fill", "embed", "predict"), help=words)
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
