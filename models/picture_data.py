"""Pictures as training data: a sample is a picture, and what a model learns about it.

PictureData    what these data sets share
Labelled       the label of each
Captioned      its caption
"""

import torch

from models.pictures import Batch, Example, Examples, to_tensor
from run.data import Dataset, Order
from run.documents import DataError, fingerprint


class PictureData(Dataset):
    """A part of the examples as samples, each with one loss. held_out: which part. A subclass says
    what of an example is text, and what is the target."""

    def __init__(self, examples: Examples, s: int, seed: int | None, held_out: bool):
        """s: positions of a sequence; seed: of the order, None for none."""
        self.examples, self.s = examples, s
        trained_on = len(examples) - examples.held_out
        self.first = trained_on if held_out else 0
        self.num_sequences = examples.held_out if held_out else trained_on
        self.sequence_of = Order(self.num_sequences, seed)
        self.index = {"corpus": fingerprint(examples.content), "tokens": self.num_sequences * s}

    def describe(self) -> str:
        """Text for the first lines of a run. (This is its training set.)"""
        return f"{self.num_sequences:,} to train on, {self.examples.held_out:,} held out"

    def example(self, sample: int) -> Example:
        return self.examples[self.first + self.sequence_of(sample)]

    def text_and_target(self, example: Example) -> tuple[list[int], int]:
        """(ids of the first positions, the target)"""
        raise NotImplementedError

    def batch(self, samples) -> Batch:
        """targets: [b, 1]"""
        examples = [self.example(n) for n in samples]
        rows = [self.text_and_target(example) for example in examples]
        tokens = torch.tensor([ids + [0] * (self.s - len(ids)) for ids, _ in rows])
        targets = torch.tensor([[target] for _, target in rows])
        numbers = torch.tensor(list(samples))
        pictures = to_tensor([example.picture for example in examples])
        return Batch(tokens, targets, torch.ones_like(targets, dtype=torch.bool), numbers, pictures)

    def counted_tokens(self, samples) -> int:
        return len(samples)


class Labelled(PictureData):
    """Pictures and the numbers of their labels."""

    def __init__(self, *args, labels: list[str]):
        super().__init__(*args)
        self.labels = labels

    def text_and_target(self, example: Example) -> tuple[list[int], int]:
        return [], self.labels.index(example.label)


class Captioned(PictureData):
    """Pictures and their captions, cut to m tokens; the target is the place of the last one."""

    def __init__(self, *args, tokenizer, m: int):
        """Raises DataError where a file has no caption."""
        super().__init__(*args)
        self.tokenizer, self.m = tokenizer, m
        for file in self.examples.files:
            if not file.text:
                rule = '"text" in metadata.jsonl, or a .txt file beside it, would do'
                raise DataError(f"--data: {file.file_name} has no caption; {rule}")

    def describe(self) -> str:
        cut = sum(is_cut(self.tokenizer, file.text, self.m) for file in self.examples.files)
        warning = f"; {cut:,} captions are longer than --text-length {self.m}, and are cut"
        return super().describe() + (warning if cut else "")

    def text_and_target(self, example: Example) -> tuple[list[int], int]:
        return caption_ids(self.tokenizer, example.caption, self.m)


def caption_ids(tokenizer, text: str, m: int) -> tuple[list[int], int]:
    """(begin, text, end and padding, [m]; the place of the end). A long text is cut before it."""
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    ids = [*begin, *map(int, tokenizer.encode(text))][: m - 1]
    ids.append(tokenizer.eot)
    return ids + [0] * (m - len(ids)), len(ids) - 1


def is_cut(tokenizer, text: str, m: int) -> bool:
    return caption_ids(tokenizer, text, m + 1)[1] == m
