"""What a run opens before its first step: the tokenizer and the folder. (The task opens the data.)
And what it checks: memory, flags or data that differ between ranks, another run in the folder.
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import torch

import base.world
from base.world import World
from run import checkpoint, room
from run.config import ConfigError, RunConfig, flag_name
from run.metrics import Metrics
from run.run_folder import RunFolder, RunFolderError, launcher_name
from run.tokenizer import BUILT_IN, make_tokenizer, save_files
from tensor_parallel import vocabulary_multiple

# tokens of the held-out text that the sample continues
SAMPLE_BEGINS = 16


def open_out(config: RunConfig, world: World) -> RunFolder | None:
    """The run's folder, locked by rank 0 for all. A collective: every rank refuses what is wrong
    there. Raises RunFolderError."""
    opened = []

    def open_folder():
        folder = RunFolder(config.out, config.resume, world.restarts, launcher_name())
        opened.append(folder)

    world.on_rank_0(open_folder, (RunFolderError,))
    return opened[0] if world.rank == 0 else None


def check_flags_agree(config: RunConfig, world: World) -> None:
    """Ranks that were started one by one may have other flags each. A collective. Raises
    ConfigError, on all ranks."""
    everywhere = world.gather(dataclasses.asdict(config))
    for rank, flags in enumerate(everywhere):
        for name, value in flags.items():
            expected = everywhere[0][name]
            if value != expected:
                raise ConfigError(
                    f"{flag_name(name)}: rank {rank} was started with {value}, and rank 0 with "
                    f"{expected}; give all ranks the same flags"
                )


def check_data_agree(train_set, held_out, world: World) -> None:
    """Ranks that read other data would train on a mixture, or never meet again. A collective.
    Raises ConfigError, on all ranks."""
    everywhere = world.gather([data_set.index["corpus"] for data_set in (train_set, held_out)])
    for rank, corpora in enumerate(everywhere):
        if corpora != everywhere[0]:
            raise ConfigError(
                f"rank {rank} has read other data than rank 0: a file is another one on its"
                " machine, or the chat template asks for chance"
            )


def check_room(config: RunConfig, world: World) -> None:
    """Raises ConfigError for a run that the memory of a rank can never hold."""
    model = config.model_config()
    # what ZeRO shards, it shards over context-parallel ranks too
    replicas = world.size // config.tp // config.pp
    ranks = {"tp": config.tp, "pp": config.pp, "dp": replicas, "ep": config.ep, "cp": config.cp}
    device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
    precision = config.precision or ("bf16" if device == "cuda" else "fp32")
    has = base.world.memory(device, world.local_size)
    multiple = vocabulary_multiple(config.make_vocab_size_divisible_by, device, config.tp)
    padded = -(-model.vocab_size // multiple) * multiple
    # no model has more; a larger one would not fit either
    held = dataclasses.replace(model, vocab_size=min(padded, 2**31 - 1))
    parts = room.state_parts(held, precision, config.optimizer_state, config.zero_stage, ranks)
    learner = int(sum(parts))
    # a frozen model has no gradients and no optimizer state
    needs = 0 if config.frozen else learner
    needs += config.bytes_beside(held, precision, ranks, learner)
    padding = ""
    if padded > 1.1 * model.vocab_size:
        padding = f" --make-vocab-size-divisible-by {multiple // config.tp}"
    if needs > has:
        raise ConfigError(
            f"--hidden-size {model.hidden_size} --num-layers {model.num_layers} --num-experts"
            f" {model.num_experts} --vocab-size {model.vocab_size}{padding}: weights, gradients and"
            f" optimizer state of this model {room.complaint('take', needs, has)}; a smaller model,"
            " or more ranks with --tp, --pp or --zero-stage 3, would need less of each"
        )
    micro = config.known_micro_batch(replicas // config.cp)
    needs = room.activation_bytes(held, precision, micro, ranks, config.head_chunk)
    if needs > has:
        raise ConfigError(
            f"--micro-batch-size {micro}{padding}: the activations of so many sequences of "
            f"{model.seq_length} tokens {room.complaint('take', needs, has)}; --micro-batch-size 1 "
            "would need the least"
        )


def default_tokenizer(config: RunConfig) -> str:
    """The tokenizer where --tokenizer is not given: that of the run that goes on, or of --load."""
    if config.resume:
        found = checkpoint.steps(Path(config.out) / "checkpoints")
        for path in reversed(found.values()):
            # The one before it may be whole; saving.py says what is wrong.
            with contextlib.suppress(checkpoint.Damaged):
                return checkpoint.tokenizer_of(path)
    return checkpoint.tokenizer_of(checkpoint.find(config.load)) if config.load else "bytes"


def open_tokenizer(config: RunConfig, world: World):
    """The tokenizer of --tokenizer, or the default one. Where its vocabulary is larger than the
    preset's, it sets --vocab-size. Raises ConfigError, TokenizerError or CheckpointError."""
    name = config.tokenizer
    moved = name is not None and name not in BUILT_IN and not os.path.exists(name)
    # The file of a run that goes on may have moved: the run has a copy.
    if name is None or (config.resume and moved):
        name = default_tokenizer(config)
    tokenizer = make_tokenizer(name)
    shape = config.model_config()
    if tokenizer.vocab_size > shape.vocab_size:
        beyond = f"--tokenizer {name}: its ids go up to {tokenizer.vocab_size - 1}, beyond "
        if config.vocab_size is not None:
            raise ConfigError(
                f"{beyond}--vocab-size {shape.vocab_size}; --vocab-size {tokenizer.vocab_size} "
                "would fit"
            )
        if config.load:
            raise ConfigError(
                f"{beyond}the {shape.vocab_size} of the model in --load {config.load}; the "
                "tokenizer that it was trained with would fit"
            )
        config.vocab_size = tokenizer.vocab_size
        world.say(f"--vocab-size {config.vocab_size}: as many as --tokenizer {name} has")
    elif tokenizer.vocab_size < 0.9 * shape.vocab_size:
        world.say(
            f"--tokenizer {name}: fills {tokenizer.vocab_size:,} of the model's "
            f"{shape.vocab_size:,} ids; the others never occur in this run"
        )
    return tokenizer


def first_ids(dataset) -> list[int]:
    """The beginning of a data set: what stands before the first target that counts, or where all
    count some tokens."""
    batch = dataset.batch([0])
    first = int(batch.loss_mask[0].long().argmax())
    return batch.tokens[0, : first + 1 if first else SAMPLE_BEGINS].tolist()


def begin_files(config: RunConfig, out: Path, tokenizer, start: int) -> Metrics:
    """What a run leaves from its start: config.json, its tokenizer, metrics.jsonl. On rank 0.

    Raises RunFolderError or MetricsError.
    """
    try:
        # Whole or as it was: a full disk must not truncate the flags of a run.
        flags = {"command": config.command} | dataclasses.asdict(config)
        text = json.dumps(flags, indent=1)
        (out / "config.tmp").write_text(text, encoding="utf-8")
        os.replace(out / "config.tmp", out / "config.json")
        if tokenizer.files:
            # generate.py finds it there
            save_files(tokenizer.files, out)
    except OSError as e:
        raise RunFolderError(f"--out {out}: cannot be written ({e.strerror})") from None
    return Metrics(out / "metrics.jsonl", start)
