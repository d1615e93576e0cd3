"""From the command line to the loop and back: ranks, checks, files, errors, exit status.

main        parse, validate; every error becomes one message and an exit status
run         open the tokenizer, connect the ranks, lock the folder
train       open the data, build the trainer, resume, run the loop, finish
"""

import os
import re
import time
import traceback
from pathlib import Path

from base import terminal
from base.errors import InputError, RunError
from base.world import World, WorldError
from optimizer import learning_rate
from run import finish, flags, messages, opening, rules, saving
from run.checkpoint import CheckpointError
from run.config import ConfigError, RunConfig, multiply_in
from run.data import DataError
from run.metrics import MetricsError
from run.run_folder import RunFolderError
from run.task import Task
from run.tokenizer import TokenizerError, record
from run.training_run import TrainingRun

# bad input: exit status 2, one message from rank 0
REFUSED = (
    ConfigError,
    RunFolderError,
    MetricsError,
    DataError,
    TokenizerError,
    CheckpointError,
    # what the other kinds of training refuse
    InputError,
)


def main(argv: list[str], kind: type[RunConfig], trainer_class, loop) -> int:
    """Exit status: 0; 2 for what cannot run, 1 for what fails while running, each with one message;
    130 for Ctrl-C before the first step or after the last. kind: the configuration of a kind of
    training."""
    terminal.prepare()
    try:
        world = World.from_launcher()
    except WorldError as e:
        terminal.say(f"{kind.speaker()}: {e}", error=True)
        return 2
    status, message = attempt(argv, kind, world, trainer_class, loop)
    alone = status == 1 and not getattr(message, "everywhere", False)
    if status == 2:
        world.share_refusal(str(message), kind.speaker())
    elif message and (world.rank == 0 or alone):
        terminal.say(f"{kind.speaker()}: {message}", error=True)
        terminal.tell_launcher(f"{kind.speaker()}: {message}")
    if alone and world.size > 1:
        # peers may wait for this rank in a collective: no goodbye
        os._exit(1)
    # its traceback holds groups
    message = None
    world.disconnect()
    return status


def attempt(
    argv: list[str], kind: type[RunConfig], world: World, trainer_class, loop
) -> tuple[int, Exception | None]:
    """(exit status, what to say)"""
    try:
        config, question = flags.parse_all(argv, world.rank, kind)
        if question:
            # loaded by those who ask
            from planning import as_rank

            as_rank.main(config, question, trainer_class)
        else:
            rules.validate(config, world.size)
            if config.plan:
                from planning import plan

                plan.machine_of(config.plan)
            run(config, world, trainer_class, loop)
    except REFUSED as e:
        return 2, e
    except (RunError, WorldError) as e:
        return 1, e
    except KeyboardInterrupt:
        return 130, None
    except Exception as e:
        # another rank may have left this one in a collective
        world.follow_refusal()
        name = f"rank {world.rank}"
        text = (
            f"{name}, before the first step: {type(e).__name__}: {e}\n{traceback.format_exc()}"
            f"{kind.speaker()}: {name} failed before the first step or after the last"
        )
        return 1, RunError(text)
    return 0, None


def run(config: RunConfig, world: World, trainer_class, loop) -> None:
    """One training run on this rank."""
    tokenizer = opening.open_tokenizer(config, world)
    # a run that learns prompts uses the tokenizer of its model
    config.tokenizer = tokenizer.name
    if config.lr is None:
        config.lr, what = config.default_lr()
        world.say(f"--lr {config.lr:g}: the default for {what}")
    opening.check_room(config, world)
    world.connect(config.device, config.tp, config.pp, config.timeout, config.ep, config.cp)
    world.beat("the preparation of the first step")
    if world.shares_gpu and config.cp > 1 and config.cp_kind == "ring":
        rule = "gloo, for ranks that share a GPU, cannot send its tensors; all-to-all would do"
        rules.refuse(config, "cp_kind", rule)
    opening.check_flags_agree(config, world)
    folder = opening.open_out(config, world)
    if folder and folder.notice:
        world.say(folder.notice)
    config.resume |= world.restarts > 0
    try:
        train(config, world, tokenizer, trainer_class, loop)
    finally:
        if folder:
            folder.close()


def build(config: RunConfig, world: World, trainer_class, task: Task):
    """The trainer. Raises RunError where there is no memory for it."""
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


def train(config: RunConfig, world: World, tokenizer, trainer_class, loop) -> None:
    """The run, in a folder that is its own."""
    task = config.task()
    train_set, held_out = task.open_data(config, world, tokenizer)
    opening.check_data_agree(train_set, held_out, world)
    trainer = build(config, world, trainer_class, task)
    trainer.checkpoints.tokenizer = record(tokenizer)
    out = Path(config.out)
    start, tokens = saving.restore(trainer, world, train_set, tokenizer)
    if is_done(config, world, out / task.last_file, start):
        # what was loaded is on its way to other ranks
        task.wait_for_parameters()
        return
    if config.warmup_steps > config.steps > start:
        end = learning_rate(config.steps, config.lr, 0, config.warmup_steps, config.steps)
        world.say(
            f"--warmup-steps {config.warmup_steps}: longer than --steps {config.steps}, so the "
            f"learning rate ends at {end:.2g}, below --lr {config.lr:g}"
        )
    opened = []
    world.on_rank_0(
        lambda: opened.append(opening.begin_files(config, out, tokenizer, start)),
        (RunFolderError, MetricsError),
    )
    this = TrainingRun(trainer, world, train_set, held_out, start, tokens)
    if world.rank == 0:
        this.metrics = opened[0]
        if this.metrics.notice:
            world.say(this.metrics.notice)
    messages.announce(trainer, world, train_set.index)
    if config.plan:
        from planning import plan

        this.predicted = plan.predict(config, world.size, task.row_length(train_set))
        world.say(plan.describe(this.predicted, config.plan, config.fp8))
    task.before_steps(this)
    begin = time.perf_counter()
    stopped = loop(trainer, this)
    # most ranks have nothing more to do, and would leave while others still receive
    task.wait_for_parameters()
    if not stopped:
        finish.finish(trainer, this, tokenizer, time.perf_counter() - begin)


def is_done(config: RunConfig, world: World, last_file: Path, start: int) -> bool:
    """Whether nothing is left to do. Raises ConfigError where --steps lies behind."""
    if start > config.steps:
        raise ConfigError(
            f"--steps {config.steps}: the run in {config.out} is at step {start} already; more than"
            " that would go on"
        )
    done = world.on_rank_0(lambda: start >= config.steps and last_file.exists(), ())
    if done:
        world.say(
            f"{config.out}: step {start} of --steps {config.steps} is done, and there is nothing to"
            " do; with more --steps the run goes on"
        )
    return done
