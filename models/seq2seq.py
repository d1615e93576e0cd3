r"""T5 learns pairs: a source, and the target that is written for it (summaries, translations).

    {"source": "The house is small.", "target": "La maison est petite."}       a line of --data

    source    --prefix, text </s> <pad> <pad>         the encoder; padding is hidden
    reads     <pad> target                            the decoder
    target    target </s>                             the loss is its mean over these tokens

All of T5's tasks have this form (arXiv 1910.10683, section 2.4), and the prefix names the task:
"translate English to French: ". It belongs to the text, so generation needs the same one.

    torchrun --nproc-per-node 2 -m models.seq2seq --load runs/t5 --data pairs.jsonl --tp 2
    python -m models.generate_t5 --checkpoint runs/default --data new.jsonl

A twentieth of the pairs is held out, by their sources. Without --load a new model learns; with
--peft lora an adapter of the loaded one.

Not covered: several pairs in a row; ROUGE and BLEU.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

import sequence_parallel
import train
from base import terminal
from finetune.adapter_learning import PeftConfig
from finetune.packing import Padded
from finetune.pair_data import Pair, Part, read_pairs
from finetune.sft_data import open_examples
from models.batch import Batch, pad_rows
from models.generate_t5 import stream
from models.runs import FillSpans, T5Run
from models.special_tokens import T5Text, spell, t5_tokens
from models.t5 import T5Config
from run.config import ConfigError, flag

# --- data -----------------------------------------------------------------------------------------


class PaddedPairs(Padded):
    """Pairs as batches, padded to the longest source, n, and the longest target, m."""

    # The source has no last id that is only a target.
    read_last = True

    def __init__(self, pairs: list[Pair], seed: int | None, pad: int, multiple_of: int = 1):
        """seed, multiple_of: as of Padded."""
        super().__init__(pairs, seed, multiple_of)
        longest = max(len(pair.target) for pair in pairs)
        self.pad, self.n, self.m = pad, self.s, -(-longest // multiple_of) * multiple_of
        self.s = self.n + self.m
        # Without the number of bytes: the loss is not that of text.
        tokens = sum(len(pair.ids) + len(pair.target) for pair in pairs)
        self.index = {"corpus": self.index["corpus"], "tokens": tokens}

    def batch(self, samples) -> Batch:
        samples = list(samples)
        pairs = [self.example(n) for n in samples]
        source, in_source = pad_rows([pair.ids for pair in pairs], self.n, self.pad)
        target, in_target = pad_rows([pair.target for pair in pairs], self.m, self.pad)
        reads = torch.cat((torch.full_like(target[:, :1], self.pad), target[:, :-1]), 1)
        # The decoder is causal, so no token sees the padding after its target.
        documents = torch.cat((~in_source, torch.zeros_like(in_target)), 1).long()
        real = torch.cat((in_source, in_target), 1)
        tokens = torch.cat((source, reads), 1)
        return Batch(tokens, target, in_target, torch.tensor(samples), documents, real)

    def counted_tokens(self, samples) -> int:
        return sum(len(self.example(n).target) for n in samples)

    def positions(self, samples) -> int:
        return self.counted_tokens(samples) + super().positions(samples)


# --- a run ----------------------------------------------------------------------------------------


class WritePairs(FillSpans):
    """The task of writing the targets of sources."""

    sample_name = "held-out pairs (python -m models.generate_t5 writes more)"
    other_data = " (some samples may come again, and others are held out)"

    def open_data(self, config, world, tokenizer) -> tuple[PaddedPairs, PaddedPairs]:
        """(training set, held-out set) of --data and --val-data. Raises ChatError."""
        shape, pad = config.model_config(), self.tokens_of(tokenizer).pad
        source = T5Text(tokenizer, shape.vocab_size, config.prefix or "")
        target = T5Text(tokenizer, shape.vocab_size)
        parts = (
            Part("source", source.encode, "--seq-length", shape.seq_length),
            Part("target", target.encode, "--target-length", shape.target_length),
        )
        options = dict(zip(("source", "target"), parts), skip=config.skip_bad_examples)
        read = partial(read_pairs, **options)
        learned, held_out = open_examples(config, world, None, read, "pair")
        shards = config.sequence_shards
        seeds = (learned, config.seed), (held_out, None)
        train_set, val_set = (PaddedPairs(pairs, seed, pad, shards) for pairs, seed in seeds)
        self.lengths = dict(seq_length=train_set.n, target_length=train_set.m)
        return train_set, val_set

    @property
    def model_config(self) -> T5Config:
        """With the lengths of its rows, on which the FLOPs of a step depend."""
        return dataclasses.replace(super().model_config, **self.lengths)

    @torch.no_grad()
    def sample(self, tokenizer, held_out) -> str:
        """The first held-out pairs, and what the model writes."""
        trainer, tokens = self.trainer, self.tokens_of(tokenizer)
        if self.config.sequence_parallel:
            for stage in trainer.stages:
                sequence_parallel.shard_sequence(stage, trainer.groups.tp, sharded=False)
        pairs = held_out.examples[:4]
        options = dict(begin=tokens.pad, eot=tokens.eos, temperature=0.0)
        written = [[] for _ in pairs]
        sources = [pair.ids for pair in pairs]
        for outputs in stream(trainer.model, sources, 2 * held_out.m, **options):
            for output in outputs:
                written[output.number] += [output.token] if output.token is not None else []
        lines = []
        for pair, ids in zip(pairs, written):
            for name, text in ("source", pair.ids), ("target", pair.target), ("written", ids):
                lines.append(f"[{name}] {spell(text, tokens.names, tokenizer)}")
        return "\n".join(lines)


@dataclass
class T5ExampleRun(T5Run):
    """The flags of a run of a T5 that learns from examples, without hidden spans."""

    supports_as_rank: ClassVar[bool] = False
    data: ClassVar[list[str]] = []
    val_data: ClassVar[list[str]] = []
    skip_bad_examples: ClassVar[bool] = False
    document_mask: ClassVar[bool] = False
    cache: ClassVar[str] = ""

    def num_ids(self, tokenizer) -> int:
        """mT5 has no sentinels."""
        return max(tokenizer.vocab_size, t5_tokens(tokenizer).pad + 1)

    def check(self, model: T5Config, world: int, base_needed: bool) -> None:
        """Nothing: T5Run's rules are those of hidden spans, and of text."""


@dataclass
class PairRun(T5ExampleRun):
    """Every flag of models/seq2seq.py."""

    command: ClassVar[str] = "-m models.seq2seq"
    purpose: ClassVar[str] = "Train a T5 to write the target of each source."

    data: list[str] = flag(
        [], "JSON lines with a source and its target; a twentieth is held out", metavar="FILE"
    )
    val_data: list[str] = flag(
        [], "pairs to evaluate on; all of --data is then trained on", metavar="FILE"
    )
    prefix: str | None = flag(None, "text before each source, which names the task", metavar="TEXT")
    skip_bad_examples: bool = flag(False, "leave out, and count, pairs that are too long")

    def task(self) -> WritePairs:
        return WritePairs(self.learned())

    def default_lr(self) -> tuple[float, str]:
        if self.load and not self.peft:
            # As published for AdamW. AdaFactor's 1e-3 (arXiv 1910.10683, section 3.1.2) is
            # multiplied by the size of a weight.
            return 3e-4, "fine-tuning a T5 (huggingface.co/docs/transformers/model_doc/t5)"
        return super().default_lr()

    def check(self, model: T5Config, world: int, base_needed: bool) -> None:
        if base_needed and not self.data:
            raise ConfigError("--data: seq2seq.py needs --data FILE, JSON lines of pairs")
        PeftConfig.check(self, model, world, base_needed)


def main(argv: list[str]) -> int:
    return train.main(argv, PairRun)


if __name__ == "__main__":
    terminal.command(main)
