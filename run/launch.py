"""From the command line to the loop and back: ranks, checks, files, errors, exit status.

main        parse, prepare, connect, train
command     every error becomes one message and an exit status
prepare     what one rank can know: check the flags, open the tokenizer, check the memory
connected   the process groups, and the folder of the run
train_model open the data, build the trainer, resume, run the loop, finish
"""

import contextlib
import dataclasses
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from base import terminal
from base.errors import InputError, RunError
from run import checkpoint, flags, rules, saving
from run.config import ConfigError, RunConfig, flag_name, multiply_in
from run.run_folder import RunFolder, launcher_name
from run.task import Task
from run.tokenizer import BUILT_IN, make_tokenizer, record
from run.training_run import TrainingRun, announce
from run.world import World, WorldError


def main(argv: list[str], config_class: type[RunConfig], trainer_class, loop) -> int:
    """Train. config_class: that of a type of training. Returns the exit status."""

    def work(world: World) -> None:
        config, question = flags.parse_all(argv, world.rank, config_class, world.size)
        if question:
            from planning import as_rank

            return as_rank.main(config, question, trainer_class)
        tokenizer = prepare(config, world)
        with connected(config, world):
            train_model(config, world, tokenizer, trainer_class, loop)

    return command(config_class.name_in_messages(), work)


def command(name: str, work: Callable[[World], None]) -> int:
    """Run work(world), under a launcher or without one. name: of the command, for messages. Exit
    status: 0; 2 for what cannot run and 1 for what fails while running, each with one message; 130
    for Ctrl-C, where work does not handle it."""
    terminal.prepare()
    try:
        world = World.from_launcher()
    except WorldError as e:
        terminal.say(f"{name}: {e}", error=True)
        return 2
    status, error = attempt(name, work, world)
    message = str(error or "")
    alone = status == 1 and not getattr(error, "everywhere", False)
    if status == 2:
        world.share_refusal(message, name)
    elif message and (world.rank == 0 or alone):
        terminal.say(f"{name}: {message}", error=True)
        terminal.tell_launcher(f"{name}: {message}")
    if alone and world.size > 1:
        # Peers may wait for this rank in a collective, so there is no clean end.
        os._exit(1)
    # Its traceback holds groups.
    error = None
    world.disconnect()
    return status


def attempt(name: str, work: Callable[[World], None], world: World) -> tuple[int, Exception | None]:
    """(exit status, the error with its message)"""
    try:
        work(world)
    except InputError as e:
        return 2, e
    except (RunError, WorldError) as e:
        return 1, e
    except KeyboardInterrupt:
        return 130, None
    except Exception as e:
        # Another rank may have left this one in a collective.
        world.follow_refusal()
        rank = f"rank {world.rank}"
        text = f"{rank}: {type(e).__name__}: {e}\n{traceback.format_exc()}{name}: {rank} failed"
        return 1, RunError(text)
    return 0, None


# --- what one rank can know -----------------------------------------------------------------------


def prepare(config: RunConfig, world: World):
    """Refuse what cannot run, and fill in what the flags leave open. Returns the tokenizer."""
    # Loaded for a run; a Trainer alone does not ask.
    from run import least_memory

    rules.validate(config, world.size)
    if config.plan:
        from planning import plan

        plan.machine_of(config.plan)
    tokenizer = open_tokenizer(config, world)
    # A run that learns prompts uses the tokenizer of its model.
    config.tokenizer = tokenizer.name
    if config.lr is None:
        config.lr, what = config.default_lr()
        world.say(f"--lr {config.lr:g}: the default for {what}")
    least_memory.check_memory(config, world)
    return tokenizer


def open_tokenizer(config: RunConfig, world: World):
    """The tokenizer of --tokenizer, or the default one. --vocab-size grows to its vocabulary.
    Raises ConfigError, TokenizerError or CheckpointError."""
    name = config.tokenizer
    moved = name is not None and name not in BUILT_IN and not os.path.exists(name)
    # The file of a run that goes on may have moved: the run has a copy.
    if name is None or (config.resume and moved):
        name = default_tokenizer(config)
    tokenizer = make_tokenizer(name)
    shape = config.model_config()
    ids = config.num_ids(tokenizer)
    of_model = shape.vocab_size
    if ids > of_model:
        beyond = f"--tokenizer {name}: its ids go up to {ids - 1}, beyond"
        if config.vocab_size is not None:
            raise ConfigError(f"{beyond} --vocab-size {of_model}; --vocab-size {ids} would fit")
        if config.load:
            rule = f"the {of_model} of the model in --load {config.load}"
            raise ConfigError(f"{beyond} {rule}; the tokenizer that it was trained with would fit")
        config.vocab_size = ids
        world.say(f"--vocab-size {config.vocab_size}: as many as --tokenizer {name} has")
    elif ids < 0.9 * of_model:
        rule = f"fills {ids:,} of the model's {of_model:,} ids; the others never occur in this run"
        world.say(f"--tokenizer {name}: {rule}")
    return tokenizer


def default_tokenizer(config: RunConfig) -> str:
    """The tokenizer without --tokenizer: that of the resumed run, or of --load."""
    if config.resume:
        found = checkpoint.steps(Path(config.out) / "checkpoints")
        for path in reversed(found.values()):
            # The one before it may be whole; saving.restore says what is wrong.
            with contextlib.suppress(checkpoint.Damaged):
                return checkpoint.tokenizer_of(path)
    return checkpoint.tokenizer_of(checkpoint.find(config.load)) if config.load else "bytes"


# --- all ranks ------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(config: RunConfig, world: World):
    """Connect the ranks, and keep the folder of the run for this run alone."""
    world.connect(config.device, config.timeout, **config.mesh)
    world.beat("the preparation of the first step")
    if world.shares_gpu and config.cp > 1 and config.cp_kind == "ring":
        rule = "gloo, for ranks that share a GPU, cannot send its tensors; all-to-all would do"
        config.refuse("cp_kind", rule)
    check_flags_agree(config, world)
    folder = world.open_on_rank_0(
        lambda: RunFolder(config.out, config.resume, world.restarts, launcher_name())
    )
    if folder and folder.notice:
        world.say(folder.notice)
    config.resume |= world.restarts > 0
    try:
        yield
    finally:
        if folder:
            folder.close()


def check_flags_agree(config: RunConfig, world: World) -> None:
    """Raise ConfigError on all ranks where ranks, started one by one, have other flags each. A
    collective."""
    everywhere = world.gather(dataclasses.asdict(config))
    for rank, fields in enumerate(everywhere):
        for name, expected in everywhere[0].items():
            if fields[name] != expected:
                rule = f"rank {rank} was started with {fields[name]}, and rank 0 with {expected}"
                raise ConfigError(f"{flag_name(name)}: {rule}; give all ranks the same flags")


# --- to the loop ----------------------------------------------------------------------------------


def train_model(config: RunConfig, world: World, tokenizer, trainer_class, loop) -> None:
    """Train in a folder that this run alone uses."""
    task = config.task()
    train_set, held_out = task.open_data(config, world, tokenizer)
    check_data_agree(train_set, held_out, world)
    trainer = build(config, world, trainer_class, task)
    trainer.checkpoints.tokenizer = record(tokenizer)
    start, tokens = saving.restore(trainer, world, train_set, tokenizer)
    if saving.is_done(config, world, Path(config.out) / task.last_file, start):
        # What was loaded is on its way to other ranks.
        task.wait_for_parameters()
        return
    run = TrainingRun(trainer, world, train_set, held_out, start, tokens)
    run.open_files(tokenizer)
    announce(run)
    if config.plan:
        from planning import plan

        run.predicted = plan.predict(config, world.size, task.row_length(train_set))
        world.say(plan.describe(run.predicted, config))
    task.before_steps(run)
    begin = time.perf_counter()
    stopped = loop(trainer, run)
    # Most ranks have nothing more to do, and would leave while others still receive.
    task.wait_for_parameters()
    if not stopped:
        from run import finish

        finish.finish(trainer, run, tokenizer, time.perf_counter() - begin)


def check_data_agree(train_set, held_out, world: World) -> None:
    """Raise ConfigError on all ranks where they have read different data: they would train on a
    mixture, or never meet again. A collective."""
    everywhere = world.gather([data_set.index["corpus"] for data_set in (train_set, held_out)])
    for rank, corpora in enumerate(everywhere):
        if corpora != everywhere[0]:
            why = "a file is another one on its machine, or the chat template asks for chance"
            raise ConfigError(f"rank {rank} has read other data than rank 0: {why}")


def build(config: RunConfig, world: World, trainer_class, task: Task):
    """The trainer. Raises RunError where its memory cannot be allocated."""
    multiply_in(config.precision, world.device)
    if world.device.type == "cpu":
        from base import cpu

        cpu.multiply_by_onednn()
    try:
        return trainer_class(config, world.device, world.groups, task)
    except (RuntimeError, MemoryError) as e:
        no_memory = re.search("alloc|overflow|out of memory", str(e))
        if isinstance(e, RuntimeError) and not no_memory:
            raise
        why = str(e).split("\n")[0]
        raise RunError(
            f"rank {world.rank}: there is no room for this model on {world.device} ({why}); a "
            "smaller one, or more ranks with --tp, --pp or --zero-stage 3, would need less of each"
        ) from None
