"""What a run leaves after its last step: loss.png and a sample of text."""

import contextlib
from functools import partial
from pathlib import Path

import sequence_parallel
from base.errors import InputError
from run.metrics import duration, plot_loss
from run.world import World

# Tokens of the sample at the end of training.
SAMPLE_TOKENS = 300


def finish(trainer, run, tokenizer, seconds: float) -> None:
    """Write the results of a run that no signal has stopped. A collective."""
    if trainer.task.finish(run):
        return
    config, world = trainer.config, run.world
    # A model whose parameters are spread over the data-parallel ranks runs on all of them.
    spread = config.zero_stage == 3 or config.ep > 1 or trainer.task.sampled_by_all
    if trainer.dp_rank > 0 and not spread:
        return
    try:
        text = trainer.task.sample(tokenizer, run.held_out)
    except (FloatingPointError, InputError) as e:
        text = f"no sample: {e}"
    if world.rank == 0:
        corpus = run.train_set.index["corpus"]
        title = f"{config.load or config.model}, {trainer.task.data_name(corpus)}"
        draw_loss(world, run, title)
        begin = f"[{title}, after step {run.step}]\n\n" if config.load else ""
        leave(world, run.out / "sample.txt", partial(write_text, begin + text))
        samples = ", ".join(sorted(path.name for path in run.out.glob("sample.*")))
        world.say(
            f"\n{trainer.task.sample_name}:\n\n{text}\n\n{run.out}: loss.png, metrics.jsonl,"
            f" {samples}, checkpoints; {duration(seconds)} of training"
        )


def sample(trainer, tokenizer, held_out) -> str:
    """Text that continues --sample-prompt. Tensor-parallel ranks draw the same tokens."""
    config = trainer.config
    if config.sequence_parallel:
        for stage in trainer.stages:
            sequence_parallel.shard_sequence(stage, trainer.groups.tp, sharded=False)
    prompt, stop_ids = trainer.task.sample_prompt(tokenizer, held_out)
    options = dict(temperature=0.8, seed=config.seed, eot=stop_ids)
    options["cp_group"] = trainer.groups.cp
    whole = contextlib.nullcontext()
    if config.cp > 1:
        import context_parallel

        whole = context_parallel.whole_sequences(trainer.stages)
    with whole:
        ids = trainer.continue_text(prompt, SAMPLE_TOKENS, **options)
    return tokenizer.decode(prompt + ids)


def draw_loss(world: World, run, title: str) -> None:
    leave(world, run.out / "loss.png", lambda path: plot_loss(run.metrics.lines, title, path))


def write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")


def leave(world: World, path: Path, write) -> None:
    """Call write(path) for a file that can be made again: a full disk does not fail the run."""
    try:
        write(path)
    except OSError as e:
        world.say(f"{path}: cannot be written ({e.strerror}); the checkpoints are whole")
