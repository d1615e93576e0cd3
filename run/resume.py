"""Going on with a run: from the newest checkpoint that is whole, and telling what has changed."""

import dataclasses
import os
from pathlib import Path

import checkpoint
from base.world import World
from corpus.tokenizer import CHAT_TEMPLATE
from run.config import ConfigError, flag_name

# flags that may differ between the two parts of a run without a word
SILENT = ("resume", "out", "cache", "log_every", "plan", "tensorboard")


def restore(trainer, world: World, corpus: str, tokenizer) -> tuple[int, int]:
    """Continue from the newest whole checkpoint of --out if asked to, or start from the weights of
    --load. Returns (steps, tokens) that are done. Raises CheckpointError or ConfigError."""
    config = trainer.config
    trainer.task.load_base(tokenizer)
    found = {}
    if config.resume:
        folder = Path(config.out) / "checkpoints"
        errors = (checkpoint.CheckpointError,)
        found = world.on_rank_0(lambda: checkpoint.steps(folder), errors)
    damage = []
    for path in reversed(found.values()):
        try:
            index = trainer.checkpoints.load(path)
        except checkpoint.Damaged as e:
            damage.append(str(e))
            continue
        for message in damage:
            world.say(f"{message}; going back to the one before")
        trainer.task.check_base(path, index)
        changed = changes(trainer, path, index, corpus)
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
    trainer.task.load_weights(world)
    return 0, 0


def changes(trainer, path: Path, index: dict, corpus: str) -> list[str]:
    """What differs between this run and the one that wrote a checkpoint, for people."""
    found = []
    before = index["config"]
    for name, value in dataclasses.asdict(trainer.config).items():
        if before.get(name, value) != value and name not in SILENT:
            found.append(f"{flag_name(name)} {before.get(name)} -> {value}")
    other_tokenizer = check_tokenizer(trainer, path, index)
    if other_tokenizer:
        found.append(other_tokenizer)
    if index.get("corpus") != corpus:
        found.append(f"corpus {index.get('corpus')} -> {corpus}")
    return found


def check_tokenizer(trainer, path: Path, index: dict) -> str:
    """What to say where another tokenizer was named. Raises ConfigError where the file of that name
    has another content than when the checkpoint at `path` was written."""
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
    """A chat template decides what the conversations are, and is no part of the tokenizer."""
    return {name: sha for name, sha in files.items() if name != CHAT_TEMPLATE}
