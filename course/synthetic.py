"""Data for parity.py: any number of samples, each drawn from its own number.

Synthetic          sequences with unequal loss masks
Ragged             rows of unequal lengths, padded                finetune/sft.py
Documents          several documents in a row                     --document-mask
Prompted           virtual tokens in the middle                   prompt_tuning.py
SyntheticPairs     two answers to one prompt                      finetune/preference.py
Questions          prompts, and a reward for any answer           finetune/reinforcement.py
Pairs              two texts in a row, of two types of token      models/bert.py
Translations       a source and a target in a row                 models/t5.py
Seen               a picture in a row, or none                    models/multimodal.py"""

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.preference import PreferenceConfig
from finetune.prompt_set import Question
from finetune.reinforcement import ReinforcementConfig
from finetune.sft import SFTConfig
from models.batch import Batch
from models.bert import BertConfig
from models.multimodal import MultimodalConfig
from models.picture_runs import PictureRun
from models.pictures import Batch as PictureBatch
from models.pictures import open_pictures
from models.t5 import T5Config
from run import data
from run.tokenizer import ByteTokenizer


class Synthetic(data.Dataset):
    """Sample n is a sequence drawn from seed n, of whose targets about (n mod 4) / 4 or all do not
    count."""

    def __init__(self, seq_length: int, vocab_size: int):
        self.s = seq_length
        self.v = vocab_size
        # The sample numbers of the latest batch.
        self.latest = []

    def batch(self, samples) -> data.Batch:
        self.latest = list(samples)
        tokens = []
        mask = []
        for n in samples:
            g = torch.Generator().manual_seed(int(n))
            tokens.append(self.draw(g))
            mask.append(torch.rand(self.s, generator=g) >= (int(n) % 4) / 4)
        tokens = torch.stack(tokens)
        return data.Batch(
            tokens[:, :-1], tokens[:, 1:], torch.stack(mask), torch.tensor(list(samples))
        )

    def draw(self, generator: torch.Generator) -> Tensor:
        """[s + 1] token ids."""
        return torch.randint(self.v, (self.s + 1,), generator=generator)

    def counted_tokens(self, samples) -> int:
        return int(self.batch(samples).loss_mask.sum())


class Ragged(Synthetic):
    """The same in rows of unequal lengths, 1 to seq_length - 3, padded with token 0 to a multiple
    of `multiple_of`."""

    def __init__(self, seq_length: int, vocab_size: int, multiple_of: int):
        self.longest = seq_length - 3
        super().__init__(-(-self.longest // multiple_of) * multiple_of, vocab_size)
        self.whole = Synthetic(self.longest, vocab_size)

    def batch(self, samples) -> data.Batch:
        self.latest = list(samples)
        batch = self.whole.batch(samples)
        lengths = torch.tensor([self.length(n) for n in samples]).unsqueeze(1)
        real = torch.arange(self.longest) < lengths
        rows = (batch.tokens * real, batch.targets * real, batch.loss_mask & real, real)
        padded = (F.pad(x, (0, self.s - self.longest)) for x in rows)
        tokens, targets, mask, real = padded
        return data.Batch(tokens, targets, mask, batch.samples, real=real)

    def length(self, sample: int) -> int:
        return self.longest - 5 * sample % self.longest

    def positions(self, samples) -> int:
        return sum(map(self.length, samples))


class Documents(Synthetic):
    """The same with documents of unequal lengths, up to half a sequence, in each row."""

    def batch(self, samples) -> data.Batch:
        batch = super().batch(samples)
        rows = []
        for n in self.latest:
            # Another generator than the one that drew the tokens.
            g = torch.Generator().manual_seed(int(n) + 2**32)
            lengths = torch.randint(1, self.s // 2 + 1, (self.s,), generator=g)
            rows.append(torch.arange(self.s).repeat_interleave(lengths)[: self.s])
        return batch._replace(documents=torch.stack(rows))


class Prompted(Synthetic):
    """The same with a task's virtual tokens in the middle, so that sequence-parallel ranks share
    them; the tasks in turn."""

    def __init__(self, seq_length: int, vocab_size: int, prompts):
        super().__init__(seq_length, vocab_size)
        first = prompts.prompt_tasks.first_ids(vocab_size)
        self.virtual = [
            list(range(first[task], first[task] + prompts.templates[task].total_virtual_tokens))
            for task in prompts.tasks
        ]

    def batch(self, samples) -> data.Batch:
        tokens, targets, mask, numbers = (x.clone() for x in super().batch(samples)[:4])
        for row, n in enumerate(numbers.tolist()):
            virtual = torch.tensor(self.virtual[n % len(self.virtual)])
            at = self.s // 2 - 2
            tokens[row, at : at + len(virtual)] = virtual
            mask[row, at - 1 : at - 1 + len(virtual)] = False
        return data.Batch(tokens, targets, mask, numbers)


class SyntheticPairs(Synthetic):
    """Samples 2k and 2k + 1 begin alike and end apart, in answers of unequal lengths. `reference`:
    of each sample, once it is known."""

    reference = None

    def __init__(self, seq_length: int, vocab_size: int, last_token: bool):
        super().__init__(seq_length, vocab_size)
        self.last_token = last_token

    def batch(self, samples) -> data.Batch:
        self.latest = list(samples)
        at = torch.arange(self.s)
        tokens = []
        mask = []
        for n in self.latest:
            begins, ends = (torch.Generator().manual_seed(seed) for seed in (n // 2, n + 2**32))
            answer = self.s // 2 + n // 2 % 3
            last = answer + n % 5
            tokens.append(torch.cat([self.draw(begins)[:answer], self.draw(ends)[answer:]]))
            mask.append(at == last if self.last_token else (at >= answer - 1) & (at < last))
        tokens = torch.stack(tokens)
        numbers = torch.tensor(self.latest)
        reference = None if self.reference is None else self.reference[numbers]
        return data.Batch(
            tokens[:, :-1], tokens[:, 1:], torch.stack(mask), numbers, reference=reference
        )


class Questions:
    """Prompts of 1 to 4 tokens for finetune/reinforcement.py, and a reward for any answer. The
    samples of a group have one prompt."""

    # Either of them ends an answer.
    end_tokens = (3, 4)

    def __init__(self, vocab_size: int, group_size: int):
        self.v = vocab_size
        self.group_size = group_size

    def question(self, sample: int) -> Question:
        g = torch.Generator().manual_seed(sample // self.group_size)
        length = int(torch.randint(1, 5, (1,), generator=g))
        return Question(torch.randint(self.v, (length,), generator=g).tolist(), "", {})

    def reward(self, sample: int, ids: list[int]) -> float:
        return sum(token % 7 for token in ids) / len(ids)


class Pairs(Synthetic):
    """The same with token types, which change at a place of its own in each row. documents: whether
    rows also have two documents, and padding, which is one of its own."""

    def __init__(self, seq_length: int, vocab_size: int, documents: bool, token_types: int):
        super().__init__(seq_length, vocab_size)
        self.documents = documents
        self.token_types = token_types

    def batch(self, samples) -> Batch:
        tokens, targets, mask, numbers = super().batch(samples)[:4]
        at = torch.arange(self.s)
        mask[:, 0] = True
        types = (at >= 3 + numbers.unsqueeze(1) % 5).long() % self.token_types
        if not self.documents:
            return Batch(tokens, targets, mask, numbers, types=types)
        documents = numbered(numbers, self.s)
        real = documents < 2
        return Batch(tokens, targets, mask & real, numbers, documents, real, types)


class Translations(Synthetic):
    """Rows of a source, [s], and of what the decoder reads, [m]. documents: as in `Pairs`."""

    def __init__(self, config: T5Config, documents: bool):
        self.sizes = config.seq_length, config.target_length
        super().__init__(sum(self.sizes), config.vocab_size)
        self.documents = documents

    def batch(self, samples) -> Batch:
        tokens, targets, mask, numbers = super().batch(samples)[:4]
        n = self.sizes[0]
        targets, mask = targets[:, n:], mask[:, n:]
        mask[:, 0] = True
        if not self.documents:
            return Batch(tokens, targets, mask, numbers)
        documents = torch.cat([numbered(numbers, size) for size in self.sizes], 1)
        real = documents < 2
        return Batch(tokens, targets, mask & real[:, n:], numbers, documents, real)


class Seen(Synthetic):
    """The same with a picture of noise in the middle, so that sequence-parallel ranks share it; of
    six samples three have one."""

    def __init__(self, config: MultimodalConfig):
        super().__init__(config.seq_length, config.vocab_size)
        self.shape = config

    def batch(self, samples) -> PictureBatch:
        tokens, targets, mask, numbers = (x.clone() for x in super().batch(samples)[:4])
        c, size, n = self.shape.channels, self.shape.picture_size, self.shape.num_patches
        pictures = torch.zeros(len(numbers), c, size, size)
        for row, number in enumerate(numbers.tolist()):
            if number % 6 < 3:
                at = self.s // 2 - 2 + number % 2
                tokens[row, at : at + n] = self.v + torch.arange(n)
                mask[row, at - 1 : at - 1 + n] = False
                g = torch.Generator().manual_seed(number)
                pictures[row] = torch.randn(c, size, size, generator=g)
        return PictureBatch(tokens, targets, mask, numbers, pictures)


def numbered(samples: Tensor, s: int) -> Tensor:
    """Documents of rows: 0, 1 and, in some, padding, 2. samples: [b] -> [b, s]"""
    at, n = torch.arange(s), samples.unsqueeze(1)
    return (at >= 1 + n % (s // 2 - 1)).long() + (at >= s - n % 3)


def dataset_for(trainer):
    """What a run of these flags trains on. trainer: train.Trainer."""
    config, shape = trainer.config, trainer.model_config
    if isinstance(shape, MultimodalConfig):
        return Seen(shape)
    if isinstance(config, PictureRun):
        examples = open_pictures([], shape.picture_size, config.edit)
        trainer.task.labels = examples.labels
        return trainer.task.dataset(config, examples, ByteTokenizer(), 0, False)
    if isinstance(shape, T5Config):
        return Translations(shape, config.document_mask)
    if isinstance(shape, BertConfig):
        documents, types = config.document_mask, shape.token_types
        return Pairs(shape.seq_length, shape.vocab_size, documents, types)
    sizes = trainer.model_config.seq_length, trainer.model_config.vocab_size
    prompts = getattr(trainer.task.learned, "prompts", None)
    if prompts:
        return Prompted(*sizes, prompts)
    if isinstance(config, PreferenceConfig):
        return SyntheticPairs(*sizes, config.method == "reward")
    if isinstance(config, ReinforcementConfig):
        return Questions(sizes[1], config.answers_per_prompt)
    if isinstance(config, SFTConfig):
        return Ragged(*sizes, config.length_multiple)
    return (Documents if config.document_mask else Synthetic)(*sizes)
