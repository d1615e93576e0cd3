"""A run's checkpoints: written while training goes on, loaded under any layout, removed when old.

A resumed run goes on from the newest whole checkpoint, and says what has changed since. A
checkpoint of step k is good if step k + 1 was taken: its weights gave finite gradients. Older ones
are removed only after that, so a run that diverges keeps good ones.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from run import checkpoint
from run.config import ConfigError, RunConfig, flag_name
from run.data import Dataset
from run.tokenizer import CHAT_TEMPLATE, TokenizerRecord
from run.world import World


class RunCheckpoints:
    """Saves and loads what a trainer changes."""

    def __init__(self, trainer, group: dist.ProcessGroup | None):
        """group: all ranks, on the CPU, used for nothing else; None for one rank."""
        self.trainer = trainer
        self.saver = checkpoint.Saver(group)
        # The step of a checkpoint that no later step has shown to be good yet.
        self.unproven: int | None = None
        # The tokenizer, as every checkpoint records it.
        self.tokenizer = TokenizerRecord()
        # The longest sequence that the model is known to read. --seq-length may be shorter.
        self.longest = trainer.model_config.seq_length

    def save(
        self, folder: Path, step: int, tokens: int, corpus: str, dataset: Dataset | None = None
    ) -> None:
        """Start to write a checkpoint; `saver.wait()` waits for it. dataset: the training data."""
        self.saver.wait()
        # Steps were taken since the previous checkpoint, so it may be good.
        self.remove_old(folder, good=not self.trainer.optimizer.skipped_in_a_row)
        self.unproven = step
        trainer = self.trainer
        samples = trainer.task.global_batch(step + 1).start
        state = {
            "tokens": tokens,
            "samples": samples,
            "taken": dataset.taken(samples) if dataset else None,
            "corpus": corpus,
            "tokenizer": dataclasses.asdict(self.tokenizer),
            **{f"{prefix}optimizer": state for prefix, state in self.numbers().items()},
            **{k: v for part in trainer.parts for k, v in part.extra_state().items()},
            **({"fp8": trainer.fp8.state_dict()} if trainer.fp8 else {}),
            "config": dataclasses.asdict(trainer.config),
            "model": dataclasses.asdict(trainer.model_config) | {"seq_length": self.longest},
        }
        self.saver.save(folder, step, self.tensors(), state=state)

    def numbers(self) -> dict[str, dict]:
        """Steps taken and skipped by each learner, by its prefix."""
        learners = self.trainer.task.learners()
        return {prefix: learner.optimizer.state_dict() for prefix, learner in learners.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of all learners, by global name."""
        tensors = self.trainer.task.learned.kept()
        for prefix, learner in self.trainer.task.learners().items():
            tensors |= {prefix + name: x for name, x in learner.optimizer.tensors().items()}
        return tensors

    def remove_old(self, folder: Path, good: bool) -> None:
        """Remove the checkpoints beyond --keep once the newest one is good: a step was taken from
        its weights, or they gave a finite loss."""
        if self.unproven is not None and good and not self.saver.busy:
            if not dist.is_initialized() or dist.get_rank() == 0:
                checkpoint.remove_old(folder, self.unproven, self.trainer.config.keep)
            self.unproven = None

    def load(
        self, path: Path, weights_only: bool = False, new: Callable[[str], bool] | None = None
    ) -> dict:
        """Continue from a checkpoint, or start from its weights. Returns its index. new(name):
        whether a weight keeps its initial value. Raises CheckpointError, naming the fields in which
        its model differs."""
        wanted = self.tensors()
        if weights_only:
            wanted = {n: t for n, t in wanted.items() if n.startswith("model.")}
        if new:
            wanted = {n: t for n, t in wanted.items() if not new(n.removeprefix("model."))}
        fixed = checkpoint.fixed_fields(self.trainer.model_config, weights_only)
        index = checkpoint.load(path, wanted, fixed)
        if self.trainer.model_config.positions != "learned":
            self.longest = max(self.longest, index["model"]["seq_length"])
        self.use_loaded()
        if weights_only:
            return index
        try:
            for prefix, learner in self.trainer.task.learners().items():
                learner.optimizer.load_state_dict(index[f"{prefix}optimizer"])
            if self.trainer.fp8:
                self.trainer.fp8.load_state_dict(index.get("fp8"))
            return index | {"tokens": int(index["tokens"])}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
            why = f"lacks what training goes on from ({type(e).__name__}: {e})"
            raise checkpoint.CheckpointError(f"{path}/index.json {why}") from None

    @torch.no_grad()
    def use_loaded(self) -> None:
        """Recompute whatever follows from the loaded tensors."""
        if self.trainer.fp8:
            # The cached FP8 weights were made from the previous values.
            self.trainer.fp8.weights.clear()
        for learner in self.trainer.task.learners().values():
            learner.optimizer.weights_from_masters()
            for gradients in learner.gradients:
                gradients.renew_parameters()


# --- going on with a run --------------------------------------------------------------------------

# Flags whose change is not reported when a run goes on.
SILENT = ("resume", "out", "cache", "log_every", "plan", "tensorboard")


def restore(trainer, world: World, dataset: Dataset, tokenizer) -> tuple[int, int]:
    """Continue from the newest whole checkpoint of --out with --resume, or start from the weights
    of --load. Returns the (steps, tokens) done. Raises CheckpointError or ConfigError."""
    config = trainer.config
    for part in trainer.parts:
        part.load_base(tokenizer)
    found = {}
    if config.resume:
        folder = Path(config.out) / "checkpoints"
        found = world.on_rank_0(lambda: checkpoint.steps(folder))
    damage = []
    for path in reversed(found.values()):
        try:
            with checkpoint.agreed(f"{path} cannot be read", error_class=checkpoint.Damaged):
                index = checkpoint.read_index(path)
            # This comes first, because tensors of other shapes would say less.
            for part in trainer.parts:
                part.check_base(path, index)
            index = trainer.checkpoints.load(path)
        except checkpoint.Damaged as e:
            damage.append(str(e))
            continue
        for message in damage:
            world.say(f"{message}; going back to the one before")
        go_on(trainer, index, dataset)
        changed = changes(trainer, path, index, dataset.index["corpus"])
        text = f", with {', '.join(changed)}" if changed else ""
        world.say(f"resuming after step {index['step']}{text}")
        return index["step"], index["tokens"]
    if found:
        raise checkpoint.CheckpointError(
            f"--resume: no checkpoint in {config.out} is whole: {'; '.join(damage)}. Put one back, "
            "or train into another folder"
        )
    if config.resume:
        world.say(f"--resume: no checkpoint in {config.out} yet, starting from step 1")
    for part in trainer.parts:
        part.load_weights(world)
    return 0, 0


def is_done(config: RunConfig, world: World, last_file: Path, start: int) -> bool:
    """Whether nothing is left to do. Raises ConfigError where --steps lies behind."""
    if start > config.steps:
        rule = f"the run in {config.out} is at step {start} already; more would go on"
        config.refuse("steps", rule)
    done = world.on_rank_0(lambda: start >= config.steps and last_file.exists())
    if done:
        rule = "is done, and there is nothing to do; more would go on"
        world.say(f"{config.out}: step {start} of --steps {config.steps} {rule}")
    return done


def go_on(trainer, index: dict, dataset: Dataset) -> None:
    """Let the next step take the samples after those of a checkpoint's steps."""
    # In runs with older checkpoints all batches have one size.
    by_size = index["step"] * index["config"].get("global_batch_size", 0)
    samples = index.get("samples") or by_size
    trainer.task.go_on(index["step"], samples)
    if index.get("taken"):
        dataset.go_on(trainer.task.taken, index["taken"])


def changes(trainer, path: Path, index: dict, corpus: str) -> list[str]:
    """What differs between this run and the one that wrote a checkpoint, as text."""
    found = []
    before = index["config"]
    for name, value in dataclasses.asdict(trainer.config).items():
        if before.get(name, value) != value and name not in SILENT:
            found.append(f"{flag_name(name)} {before.get(name)} -> {value}")
    if other_tokenizer := check_tokenizer(trainer, path, index):
        found.append(other_tokenizer)
    if index.get("corpus") != corpus:
        found.append(f"corpus {index.get('corpus')} -> {corpus}{trainer.task.other_data}")
    return found


def check_tokenizer(trainer, path: Path, index: dict) -> str:
    """What to report where another tokenizer is named. Raises ConfigError where the file of the
    same name has another content than when the checkpoint at `path` was written."""
    config = trainer.config
    then = checkpoint.tokenizer_record(path, index)
    now = trainer.checkpoints.tokenizer
    same = then.fingerprint in ("", now.fingerprint)
    if same and (not then.files or without_template(then.files) == without_template(now.files)):
        return ""
    name_then = os.path.abspath(str(index["config"].get("tokenizer")))
    if name_then != os.path.abspath(str(config.tokenizer)):
        if then.fingerprint == now.fingerprint:
            return "another generation_config.json"
        return f"tokenizer {then.fingerprint[:16]} -> {now.fingerprint[:16]}"
    raise ConfigError(
        f"--tokenizer {config.tokenizer}: has another content than when {path} was written; put "
        f"that back, or name the run's copy: --tokenizer {config.out}/tokenizer.json would fit"
    )


def without_template(files: dict[str, str]) -> dict[str, str]:
    """The files but the chat template, which is no part of the tokenizer."""
    return {name: sha for name, sha in files.items() if name != CHAT_TEMPLATE}
