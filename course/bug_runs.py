"""A small GPT learns Python's source with one bug of mutations/, beside one device without it.

    one = train(None, {})                       one device, no bug
    two = train(bug.apply, flags_of(bug))       the bug, in the layout in which it shows
    row = compare(two, one)                     numbers: what differs first, and what one would see

In float64 a correct layout gives one device's numbers to 1e-10. What is left is the bug.

    python -m course.exercises.bugs no-tied-sum
"""

import math
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import sharding
import train as trainer
from base.groups import Groups
from course import parity, ranks
from course.mutations import Bug, of_one_device
from course.synthetic import Synthetic
from course.training_commands import config_of
from finetune.packing import Example, Packed
from finetune.preference import DPOTask
from models.batch import Batch
from models.bert import BertConfig
from models.t5 import T5Config
from run import data
from run.config import RunConfig
from run.task import evaluate

# Bytes as tokens. Mutations rely on 8 sequences a step.
SETTING = parity.SMALL | dict(hidden_size=64, seq_length=64, vocab_size=257)
SETTING |= dict(lr=3e-3, warmup_steps=10, steps=100, grad_clip=1.0)
# These are written for sequences of 16.
SHORT = ("routed-by-slice",)
# A relative difference.
ROUNDING = 1e-10


def flags_of(bug: Bug) -> dict:
    """Flags of train.py: the layout in which the bug shows."""
    return bug.flags | (dict(seq_length=16) if bug.name in SHORT else {})


# --- text -----------------------------------------------------------------------------------------


@cache
def python_source() -> Tensor:
    """The bytes of Python's standard library, [n] uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Texts(Synthetic):
    """Sample n is a text of its own length, 1/3 to all of s: the targets after its end do not
    count. held_out: texts that training never sees."""

    def __init__(self, s: int, held_out: bool = False):
        super().__init__(s, SETTING["vocab_size"])
        count = (len(python_source()) - 1) // s
        self.order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        if held_out:
            self.order.reverse()

    def batch(self, samples) -> data.Batch:
        self.latest = list(samples)
        starts = [self.order[n] * self.s for n in samples]
        ids = torch.stack([python_source()[i : i + self.s + 1] for i in starts]).long()
        lengths = torch.tensor([self.s * (6 - n % 5) // 6 for n in samples])
        mask = torch.arange(self.s) < lengths.unsqueeze(1)
        return data.Batch(ids[:, :-1], ids[:, 1:], mask, torch.tensor(self.latest))


class PackedTexts(Packed):
    """Texts of unequal lengths, 1/16 to all of s, several in a row (`--document-mask`)."""

    def __init__(self, s: int, held_out: bool = False):
        starts = Texts(s, held_out).order[:4000]
        lengths = np.random.default_rng(0).lognormal(math.log(s / 4), 0.7, len(starts))
        examples = []
        for start, length in zip(starts, lengths.clip(s // 16, s).astype(int)):
            ids = python_source()[start * s : start * s + length + 1].tolist()
            # Every third target of some texts does not count.
            examples.append(Example(ids, [bool(i % 3 or length % 2) for i in range(length + 1)]))
        super().__init__(examples, s, seed=0)
        self.latest = []

    def batch(self, samples) -> data.Batch:
        self.latest = list(samples)
        return super().batch(samples)


class PairsOfTexts(Texts):
    """Samples 2k and 2k + 1: the beginning of a text, then its own continuation, or that of another
    text in which each letter is replaced by a certain other one (finetune/preference.py)."""

    reference = None

    def __init__(self, s: int, held_out: bool, last_token: bool):
        super().__init__(s, held_out)
        self.last_token = last_token

    def batch(self, samples) -> data.Batch:
        own = super().batch([n - n % 2 for n in samples]).tokens
        others = super().batch([n + 1 - n % 2 for n in samples]).tokens * 7 % 95 + 32
        self.latest = list(samples)
        rejected = (torch.tensor(self.latest) % 2 == 1).unsqueeze(1)
        at = torch.arange(self.s)
        tokens = torch.where(rejected & (at >= self.s // 2), others, own)
        last = torch.tensor([self.s * (6 - n % 3) // 6 - 1 for n in samples]).unsqueeze(1)
        mask = at == last if self.last_token else (at >= self.s // 2 - 1) & (at < last)
        numbers = torch.tensor(self.latest)
        reference = None if self.reference is None else self.reference[numbers]
        return data.Batch(tokens, tokens.roll(-1, 1), mask, numbers, reference=reference)


class HiddenTexts(Texts):
    """The same for BERT: every seventh byte or so is hidden, by 256, and is a target. A token is of
    type 0 or 1."""

    def batch(self, samples) -> Batch:
        batch = super().batch(samples)
        chosen = []
        for n in samples:
            chosen.append(torch.rand(self.s, generator=torch.Generator().manual_seed(n)) < 0.15)
        hidden = torch.stack(chosen)
        types = (torch.arange(self.s) >= self.s // 2).long().expand_as(batch.tokens)
        tokens, mask = batch.tokens.masked_fill(hidden, 256), hidden & batch.loss_mask
        return Batch(tokens, batch.tokens, mask, batch.samples, types=types)


class ContinuedTexts(Texts):
    """The same for T5: the last bytes of a text are what the decoder writes."""

    def __init__(self, s: int, held_out: bool, target_length: int):
        super().__init__(s + target_length, held_out)
        self.m = target_length

    def batch(self, samples) -> Batch:
        batch = super().batch(samples)
        targets = batch.targets[:, -self.m :]
        return Batch(batch.tokens, targets, torch.ones_like(targets).bool(), batch.samples)


def kind_of_texts(config: RunConfig) -> tuple:
    """The first arguments of `texts_of`."""
    s, method = config.seq_length, getattr(config, "method", None)
    if method:
        return PairsOfTexts, s, method == "reward"
    shape = config.model_config()
    if isinstance(shape, T5Config):
        return ContinuedTexts, s, shape.target_length
    if isinstance(shape, BertConfig):
        return HiddenTexts, s
    return (PackedTexts if getattr(config, "document_mask", False) else Texts), s


@cache
def texts_of(kind: type, s: int, *rest, held_out: bool = False):
    return kind(s, held_out, *rest)


# --- on a rank ------------------------------------------------------------------------------------


@dataclass
class Training(parity.Result):
    # For each step, the gradient norm on each rank, before clipping.
    norms_of_ranks: list[list[float]] = field(default_factory=list)
    # The largest relative differences between ranks that should hold the same: in gradients of
    # step 1, in parameters after step 1 and after the last step.
    ranks_differ: list[float] = field(default_factory=list)


class BugRun(parity.Run):
    """Traces two steps and trains on. Where ranks differ, the result has what the first holds."""

    def __init__(self, world: int, config: RunConfig):
        super().__init__(world, config, trace=True)
        self.dataset = texts_of(*kind_of_texts(config))
        # `train` fills it; nothing reads margins here.
        self.result = Training()

    def train(self, steps: int) -> Training:
        result = super().train(steps)
        self.first_of_ranks(self.parameters_in_use())
        result.parameters = self.first_of_ranks(self.parameters(), note=False)
        return result

    def end_step(self, step: int, loss: Tensor, gradients: list[tuple], norm: Tensor) -> None:
        self.trace = step <= 2
        super().end_step(step, loss, gradients, norm)
        self.trainer.task.wait_for_parameters()
        if step == 1:
            self.result.gradients = self.first_of_ranks(gradients)
            self.first_of_ranks(self.parameters_in_use())
        norms = [None] * self.world
        dist.all_gather_object(norms, norm.item())
        self.result.norms_of_ranks.append(norms)

    def first_of_ranks(self, mine: list[tuple], note: bool = True) -> dict[str, Tensor]:
        """Global tensors from the entries of all ranks: of a slice that several hold, the first
        rank's. note: in `ranks_differ`, how far the others are from it."""
        of_ranks = [None] * self.world
        dist.all_gather_object(of_ranks, mine)
        whole, others = parity.of_first_ranks(of_ranks)
        apart = [0.0]
        for first, part in others:
            difference = (part - first).abs().max().item() / max(first.abs().max().item(), 1e-30)
            apart.append(difference if math.isfinite(difference) else math.inf)
        if note:
            self.result.ranks_differ.append(max(apart))
        return whole


def on_rank(rank: int, world: int, mutate, flags: dict, steps: int) -> Training | None:
    if mutate:
        mutate()
    result = BugRun(world, config_of(flags)).train(steps)
    # The other ranks have the same, or less.
    return result if rank == 0 else None


def train(world: int, mutate, flags: dict, steps: int = SETTING["steps"]) -> Training:
    """Train on `world` gloo ranks. mutate: a function at the top of a module, called first on each
    rank, or None. flags: beside SETTING."""
    flags = SETTING | flags
    return ranks.run(on_rank, world, world, mutate, flags, steps, timeout=300)[0]


def held_out_loss(flags: dict, parameters: dict[str, Tensor], sequences: int = 64) -> float:
    """What one device says of weights that some layout has trained: the loss of texts that were
    not seen, in this process."""
    # A frozen model has only its adapters in `parameters`; the rest is drawn from the seed.
    seed = flags.get("seed", SETTING["seed"])
    config = config_of(SETTING | of_one_device(flags) | dict(seed=seed))
    t = trainer.Trainer(config, torch.device("cpu"), Groups(), config.task())
    texts = texts_of(*kind_of_texts(config), held_out=True)
    if isinstance(t.task, DPOTask):
        texts.reference = t.task.log_probabilities(texts, sequences)
    with torch.no_grad():
        for name, p in sharding.named_parameters(*t.stages):
            if p.requires_grad:
                p.copy_(parameters[name])
    return evaluate(t, texts, sequences)


# --- beside one device ----------------------------------------------------------------------------


def late(losses: list[float]) -> float:
    """The mean of the last quarter."""
    return mean(losses[-max(1, len(losses) // 4) :])


def wrong_gradients(two: Training, one: Training) -> dict[str, float]:
    """Gradients of step 1: name -> largest relative difference, where it is more than rounding."""
    gradients = parity.relative(two.gradients, one.gradients, "gradient of ")
    largest = {name: apart.max().item() for name, apart in gradients}
    return {name: value for name, value in largest.items() if value > ROUNDING}


def compare(two: Training, one: Training) -> dict:
    """Numbers of a run with a bug, beside those of one device without. Infinite where a number is
    not finite."""
    first = parity.first_difference(two, one, ROUNDING)
    of_ranks = [max(norms) / min(norms) - 1 for norms in two.norms_of_ranks]
    return {
        # The first tensor that differs, in the order of execution.
        "first": first.label if first else "",
        "loss": two.losses[0] / one.losses[0] - 1,
        "late": late(two.losses) - late(one.losses),
        "norm": two.norms_of_ranks[0][0] / one.norms_of_ranks[0][0],
        "norms of ranks differ": max(of_ranks),
        "wrong gradients": wrong_gradients(two, one),
        # Gradients of key biases are exactly 0: softmax does not see a shift.
        "gradients": sum(not name.endswith("key.bias") for name in one.gradients),
        "ranks differ": two.ranks_differ,
    }
