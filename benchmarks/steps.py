"""Training in a comparison: a trainer's steps on random tokens, timed on one rank or on all; steps
on the default corpus; and the memory of a step.

    steps = Steps(GPT, Groups(tp=dist.group.WORLD), tp=2)
    seconds = steps.together()
"""

import dataclasses
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import train
from base.groups import Groups
from benchmarks import report
from course import demo, training_commands
from course.training_commands import config_of
from run import checkpoint, data
from run.metrics import read_metrics
from run.task import Task
from run.tokenizer import ByteTokenizer

# Fields of train.Config that several comparisons begin with.
GPT = dict(model="gpt2", dropout=0.0, num_layers=4, hidden_size=512, num_heads=8, seq_length=256)
GPT |= dict(vocab_size=257, precision="fp32")
# A model with Llama's block, on the default corpus.
TOY = dict(model="tiny", num_layers=3, hidden_size=32, num_heads=4, ffn_hidden_size=64)


class Random(data.Dataset):
    """Random tokens that are already in memory, as a data set: sample n is row n of one batch, over
    and over. batch: rows; s: tokens of a row; v: size of the vocabulary."""

    def __init__(self, batch: int, s: int, v: int):
        self.s = s
        tokens, targets = (x.contiguous() for x in demo.random_tokens(batch, s, v))
        counted = torch.ones(batch, s, dtype=torch.bool)
        self.fixed = data.Batch(tokens, targets, counted, torch.arange(batch))

    def batch(self, samples) -> data.Batch:
        """samples: a range that does not pass the last row."""
        first = samples[0] % len(self.fixed.tokens)
        rows = slice(first, first + len(samples))
        tokens, targets, counted, numbers = self.fixed[:4]
        return data.Batch(tokens[rows], targets[rows], counted[rows], numbers[rows])

    def counted_tokens(self, samples) -> int:
        return self.fixed.targets.numel()


class InTurn:
    """Seconds of `step` where ranks take turns."""

    def alone(self) -> float:
        """Of rank 0, while the other ranks wait and return 0."""
        dist.barrier()
        seconds = report.timed(self.step) if dist.get_rank() == 0 else 0.0
        dist.barrier()
        return seconds

    def together(self) -> float:
        """On all ranks, until the last has finished."""
        return report.timed_together(self.step)

    def silent(self) -> float:
        """The same without all-reduces."""
        with report.without_all_reduce():
            return self.together()


class Steps(InTurn):
    """Steps of a trainer on this rank, on random tokens. fields, flags: as of
    course/training_commands.py."""

    def __init__(
        self,
        fields: dict,
        groups: Groups | None = None,
        device: str = "cpu",
        task: Task | None = None,
        **flags,
    ):
        self.config = config_of(fields | flags)
        task = task or self.config.task()
        self.trainer = train.Trainer(self.config, torch.device(device), groups or Groups(), task)
        c = self.model_config = self.trainer.model_config
        self.dataset = Random(self.config.global_batch_size, c.seq_length, c.vocab_size)

    def forward_backward(self) -> float:
        """Returns this rank's part of the loss."""
        return self.trainer.forward_backward(1, self.dataset).item()

    def step(self, number: int = 1) -> float:
        loss = self.trainer.forward_backward(number, self.dataset)
        self.trainer.update(number)
        return loss.item()

    def enqueue(self, number: int = 2) -> float:
        """Seconds in which the host asks for a step; a GPU may compute it later."""
        start = time.perf_counter()
        self.trainer.forward_backward(number, self.dataset)
        self.trainer.update(number)
        seconds = time.perf_counter() - start
        report.synchronize()
        return seconds


def on_corpus(fields: dict, s: int | None = None) -> tuple:
    """(trainer, training set, held-out set) on the default corpus, on this process's CPU. s: tokens
    of a sequence, by default as many as the model takes."""
    config = train.Config(**fields, device="cpu")
    trainer = train.Trainer(config, torch.device("cpu"), Groups())
    s = s or trainer.model_config.seq_length
    folder = data.prepare([], ByteTokenizer())
    held_out = data.Corpus(folder, s, None, "held-out")
    return trainer, data.Corpus(folder, s, config.seed), held_out


def losses(trainer: train.Trainer, corpus: data.Dataset) -> Iterator[tuple[int, float]]:
    """Train; (step, loss) after each step."""
    for step in range(1, trainer.config.steps + 1):
        loss = trainer.forward_backward(step, corpus).item()
        trainer.update(step)
        yield step, loss


def seconds_of_step(trainer, dataset: data.Dataset, number: int = 1) -> float:
    return report.timed(lambda: (trainer.forward_backward(number, dataset), trainer.update(number)))


def write_lines(path: Path, lines: list[dict]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def write_model(path: Path, model) -> Path:
    """A checkpoint of a model."""
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    description = {"config": {}, "model": dataclasses.asdict(model.config)}
    return checkpoint.write(path, 0, weights, description)


def as_argv(flags: str, **paths) -> list[str]:
    """flags: separated by spaces; paths: of flags that name a file or folder, which may have
    spaces."""
    argv = flags.split()
    for flag, path in paths.items():
        argv += [f"--{flag.replace('_', '-')}", str(path)]
    return argv


def run_train(flags: str, config_class=None, **paths) -> dict:
    """A command in this process, by default train.py or what `flags` begin with, with the flags of
    `as_argv`. Returns the last line of metrics.jsonl. Exits if it fails, or if a signal has stopped
    it: what has learned for a part of the steps is no result."""
    argv = as_argv(flags, **paths)
    if config_class is None:
        config_class, argv = training_commands.split(argv)
    status = train.main(argv, config_class)
    if status:
        sys.exit(status)
    index = checkpoint.read_index(checkpoint.find(paths["out"]))
    if index["step"] < index["config"]["steps"]:
        sys.exit(130)
    return read_metrics(paths["out"] / "metrics.jsonl")[0][-1]


def profile(function) -> dict:
    """Where the time of one call goes on a GPU: seconds, those in which kernels ran, how many were
    launched, what waited for the GPU, and the kernels that took most."""
    kinds = torch.profiler.ProfilerActivity
    # Without the operations of the host, of which there are many.
    kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        seconds = report.timed(function)
    kernels = defaultdict(list)
    for event in profiler.events():
        # An annotation, as of Optimizer.step, spans kernels.
        annotated = getattr(event, "is_user_annotation", False) or "#" in event.name
        if event.device_type == torch.autograd.DeviceType.CUDA and not annotated:
            kernels[event.name].append(event.time_range.elapsed_us() / 1e6)
    busy = sum(map(sum, kernels.values()))
    most = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:20]
    waits = {e.key: e.count for e in profiler.key_averages() if "Synchronize" in e.key}
    return {
        "s": seconds,
        "s busy": busy,
        "launched": sum(map(len, kernels.values())),
        "waits": waits,
        "most, %": {f"{name[:80]} x {len(x)}": 100 * sum(x) / busy for name, x in most},
    }


def state_tensors(optimizer) -> list[torch.Tensor]:
    """This rank's optimizer state: fp32 masters, or the low bits that complete bf16 weights to
    them, and both moments."""
    kinds = optimizer.masters, optimizer.low, *optimizer.moments.values()
    return [tensor for kind in kinds for tensor in kind.values()]


def state_bytes(optimizer) -> int:
    return sum(tensor.nbytes for tensor in state_tensors(optimizer))
