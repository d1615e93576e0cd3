"""Draw with a trained diffusion model, under any layout.

    python -m models.draw --checkpoint runs/dit --caption "a small red circle on white"
    python -m models.draw --checkpoint runs/edit --source a.png --caption "make it blue"

Each --caption gives a row of --count pictures. Picture k begins with the same noise in each row and
with each --count: that of (--seed, k).
"""

import argparse
from functools import partial
from pathlib import Path

from base import terminal
from finetune.reference_models import FrozenModel
from inference.cli import add_model_flags, check_least, command
from models.diffusion import DenoiserConfig, T
from models.diffusion_runs import DiffusionRun, DiTRun, Sampling, UNetRun, save_grid
from models.picture_data import is_cut
from models.pictures import read_picture, to_tensor
from run import checkpoint, launch, rules
from run.checkpoint_index import command_of
from run.config import ConfigError, flag_name
from train import Trainer

# The command that trained a model -> the class of its flags.
RUNS = {run.command: run for run in (DiTRun, UNetRun)}
# The flags that the training had too.
SHARED = ("autoencoder", "tp", "pp", "layer_split", "precision", "device", "tokenizer", "kernels")


def config_of(args: argparse.Namespace, world) -> DiffusionRun:
    """The configuration of a model that does not train. Raises ConfigError or CheckpointError."""
    least = dict(count=1, steps=1, tp=1, pp=1, seed=0, guidance=0, source_guidance=0)
    check_least(args, least)
    where = f"--checkpoint {args.checkpoint}"
    index = checkpoint.read_index(checkpoint.find(args.checkpoint))
    if "diffusion" not in index or (command := command_of(index["model"])) not in RUNS:
        raise ConfigError(f"{where}: is of none of {', '.join(RUNS)}")
    flags = index["diffusion"]
    for name in SHARED:
        if (given := getattr(args, name)) is not None:
            flags[name] = given
    if args.steps > T:
        raise ConfigError(f"--steps {args.steps}: must be at most {T}")
    if args.sampler == "ddpm" and flags["objective"] == "flow":
        raise ConfigError("--sampler ddpm: is for models of noise, and this one learned flow")
    if flags["edit"] != bool(args.source):
        fault = "needs --source, for it edits" if flags["edit"] else "draws; leave --source out"
        raise ConfigError(f"{where}: {fault}")
    if not args.source and args.source_guidance != Sampling().source_guidance:
        raise ConfigError(f"--source-guidance {args.source_guidance}: needs --source")
    out = Path(args.out)
    if out.suffix.lower() != ".png" or out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"--out {out}: must end in .png, in a folder that exists")
    flags |= dict(load=args.checkpoint, micro_batch_size=16, global_batch_size=16 * world.size)
    config = RUNS[command](**flags)
    # Messages name it.
    config.command = "-m models.draw"
    rules.validate(config, world.size, base_needed=False)
    config.check_latents(index, args.checkpoint)
    return config


def run(args: argparse.Namespace, world) -> None:
    config = config_of(args, world)
    tokenizer, shape = launch.open_tokenizer(config, world), config.model_config()
    for caption in args.caption:
        if is_cut(tokenizer, caption, shape.text_length):
            rule = f"is too long: the model reads {shape.text_length} tokens with the end"
            raise ConfigError(f"--caption {caption!r}: {rule}")
    captions, sources = [caption for caption in args.caption for _ in range(args.count)], None
    if args.source:
        picture = to_tensor([read_picture(args.source, shape.picture_size * config.space.factor)])
        sources = picture.expand(len(captions), -1, -1, -1)
    world.connect(args.device, config.timeout, **config.mesh)
    task, model = config.task(), FrozenModel()
    task.learned = model
    launch.build(config, world, Trainer, task)
    model.load_from(config.base())
    options = Sampling(*(getattr(args, name) for name in Sampling._fields))
    drawn = task.draw(tokenizer, captions, sources, options)
    world.on_rank_0(partial(save_grid, drawn, args.count, Path(args.out)))
    world.say(f"{args.out}: {len(drawn)} pictures, {args.count} in a row for each caption")


def main(argv: list[str]) -> int:
    about = "Draw what captions say with a trained diffusion model."
    parser = argparse.ArgumentParser(prog="python -m models.draw", description=about)
    add_model_flags(parser, DenoiserConfig)
    flag, default = parser.add_argument, Sampling()
    row = "may be repeated; a row for each"
    flag("--caption", action="append", required=True, metavar="TEXT", help=row)
    flag("--source", metavar="FILE", help="the picture to edit, of a model trained with --edit")
    flag("--out", metavar="FILE", default="pictures.png", help="a PNG (default: pictures.png)")
    flag("--autoencoder", metavar="CKPT", help="needed where that of the training has moved")
    ddim = "ddim (of flow: Euler's method) draws noise once, ddpm in each step (default: ddim)"
    flag("--sampler", choices=("ddim", "ddpm"), default=default.sampler, help=ddim)
    numbers = dict(count="pictures of a caption", steps="of the sampler", seed="of the noise")
    numbers |= dict(guidance="by the caption; 1: none", source_guidance="by --source; 1: none")
    for name, what in numbers.items():
        value = getattr(default, name)
        flag(flag_name(name), type=type(value), default=value, help=f"{what} (default: {value})")
    return command("draw.py", run, argv, parser)


if __name__ == "__main__":
    terminal.command(main)
