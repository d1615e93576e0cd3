"""Is a layout equal to one device? And is this difference of losses normal?

    python -m course.verify -- --model llama2-7b --tp 2 --pp 2 --zero-stage 1 --sequence-parallel

After `--` stand flags of train.py, or another command that trains and its flags: finetune/sft.py,
finetune/preference.py, finetune/adapters.py. A layout changes the order in which numbers are
added, and nothing else. But (a + b) + c is not a + (b + c): each sum is rounded. So there are two
questions:

    float64       Rounding is 1e-16, so everything else shows. Two steps of the layout and of one
                  device are equal to 1e-10, or verify names the first tensor that differs, in the
                  order of execution: initial parameters; outputs of the embedding, each block and
                  the head; loss; gradients, last layer first; their norm; updated parameters.
    bf16, ..      Rounding shows in the loss. Some runs of one device that differ only in the order
                  of their sums say by how much: the band.

    python -m course.verify --backend nccl -- --tp 2 --pp 2
                  the float64 comparison of ranks that have a GPU each, by NCCL

    python -m course.verify --metrics A/metrics.jsonl --against B/metrics.jsonl -- FLAGS OF BOTH
                  whether the losses of two runs of yours differ by no more than the band

The model is made small (course/shrink.py), so all this takes seconds. What a layout does to it
stays: ranks of each kind, uneven stages, grouped heads, dropout, experts, schedule, micro-batches.

The band at step t is twice the largest relative difference of two of the 6 runs, up to step t; the
first 5 steps share theirs. Where rounding is normal noise, 20 steps without a bug leave it in 1 of
2,000 comparisons. Of runs of your own (--repeats) 3 leave it in 1 of 50, and 2 in 1 of 8. What the
band of the small model assumes, and how to measure your own, is in docs/training.md.

With --fp8, a value nearly halfway between two bytes may round to either. In bf16 some always do,
and the band has them. In fp32 few do, and then the loss moves by 1e-5 instead of 1e-7: a run may
leave the band without a bug. float64 is equal with scales of both kinds (--fp8-scales).

Not covered: CUDA kernels, torch.compile, the reading of data, prompts, reinforcement learning;
losses by NCCL beside the band.
"""

import argparse
import sys
import textwrap
from pathlib import Path

import torch

from base import terminal
from base.errors import InputError
from course import ranks, training_commands
from course.parity import Result, first_difference, largest_difference, train
from course.rounding import RUNS, band_of, losses_of, measure_band, times_band
from course.shrink import described, one_device, shrink
from finetune.prompt_tuning import PromptLearningConfig
from finetune.reinforcement import ReinforcementConfig
from run import flags, rules
from run.config import ConfigError, RunConfig, name_of
from run.metrics import MetricsError, read_metrics
from run.presets import SMALL_RATE
from run.pretraining import Config

# Steps of the band.
STEPS = 20
# The tests of layouts hold float64 to the same.
TOLERANCE = 1e-10
FLOAT64 = dict(precision="fp64", optimizer_state="fp32", reduce_dtype=None)
FLOAT64 |= dict(lr=1e-3, min_lr=None, warmup_steps=0)


# --- float64: equal, or the first difference ------------------------------------------------------


def compare(world: int, layout: dict, mutate=None, backend: str = "gloo") -> tuple[Result, Result]:
    """(the layout on `world` ranks, one device): two steps in float64, with a trace. layout: flags
    as `shrink` gives them. mutate: as in `train`, breaks the layout. backend: of the ranks; under
    nccl they compute on GPUs, and the one device is the CPU still."""
    layout = in_float64(layout)
    one = train(1, steps=2, trace=True, base=one_device(layout))
    layout |= dict(device="cuda" if backend == "nccl" else "cpu")
    return train(world, 2, mutate, layout, True, backend), one


def in_float64(layout: dict) -> dict:
    """With updates that show in two steps, and a clip that bites."""
    return layout | FLOAT64 | dict(grad_clip=0.5 if layout["grad_clip"] else 0.0)


def say_equality(result: Result, one: Result) -> bool:
    first = first_difference(result, one, TOLERANCE)
    if first is None:
        largest, label = largest_difference(result, one)
        equal = f"equal: {len(one.trace)} tensors"
        say("float64", f"{equal}; largest difference {largest:.1e}, {label}")
        return True
    say("float64", f"DIFFERS, first in {first}")
    if first.largest < float("inf"):
        say("", f"by up to {first.largest:.1e} of the tensor's largest element")
    else:
        say("", "ranks that should hold the same do not, or no rank holds it")
    before = list(one.trace).index(first.label)
    if before:
        say("", f"equal: the {before} tensors before it, up to {list(one.trace)[before - 1]}")
    return False


# --- losses, beside the band ----------------------------------------------------------------------


def say_inside(name: str, found: dict[int, float]) -> bool:
    """found: as times_band gives it."""
    steps = f"steps {min(found)} to {max(found)}"
    worst = max(found, key=found.get)
    # NaN is outside, so this is not (x > 1).
    outside = [step for step, times in found.items() if not times <= 1]
    if not outside:
        say(name, f"inside the band in {steps}: at most {found[worst]:.2f} of it, in step {worst}")
        return True
    say(name, f"OUTSIDE the band in {len(outside)} of {len(found)} steps, first in {outside[0]}")
    say("", f"at most {found[worst]:.1f} times the band, in step {worst}")
    return False


def read_losses(path: Path) -> dict[int, float]:
    """{step: loss}. A loss that was not finite is infinite. Raises MetricsError."""
    losses = {}
    for line in read_metrics(path)[0]:
        losses[line["step"]] = float("inf") if line["loss"] is None else line["loss"]
    if not losses:
        raise MetricsError(f"{path}: {'has no steps' if path.exists() else 'no such file'}")
    return losses


# --- the command ----------------------------------------------------------------------------------


def say(name: str, text: str) -> None:
    terminal.say(textwrap.fill(text, 100, initial_indent=f"{name:<12}", subsequent_indent=" " * 12))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m course.verify",
        usage="python -m course.verify [flags] -- [train.py, or another that trains] [its flags]",
        description="Whether a layout equals one device; whether losses differ by rounding alone.",
    )
    parser.add_argument(
        "--ranks", type=int, help="ranks of the layout; the default has 2 data-parallel replicas"
    )
    parser.add_argument(
        "--steps", type=int, help=f"steps of the band; 0: only float64 (default: {STEPS})"
    )
    backend_help = "nccl: a GPU for each rank, and no band (default: gloo, on the CPU)"
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help=backend_help)
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a run of this layout")
    parser.add_argument("--against", type=Path, help="metrics.jsonl of a run to compare it with")
    parser.add_argument(
        "--repeats", type=Path, nargs="+", help="two or more metrics.jsonl, to measure the band by"
    )
    return parser


class VerifyError(ConfigError):
    """An error in what stands after --, unknown to the command there."""


def speaker_of(train_flags: list[str]) -> str:
    """The file whose flags these are."""
    word = train_flags[train_flags[:1] == ["-m"]] if train_flags else "--"
    return "train.py" if word.startswith("-") else name_of(word)


def read_flags(argv: list[str], world: int | None) -> tuple[RunConfig, int]:
    """The configuration, and its number of ranks. Raises InputError, or SystemExit."""
    try:
        config_class, argv = training_commands.split(argv)
    except ConfigError as e:
        raise VerifyError(str(e)) from None
    if config_class in (PromptLearningConfig, ReinforcementConfig):
        command = config_class.name_in_messages()
        raise VerifyError(f"-- {command}: only text, conversations and pairs are drawn here")
    config = flags.parse(argv, 0, config_class)
    if config_class is not Config and not config.data:
        # Its data are drawn at random here.
        config.data = ["-"]
    # float64 and gloo run on the CPU, whatever the user's run has.
    config.device, config.tensorboard = "cpu", False
    if config.lr is None:
        # The small model would hardly learn at the rate of a large one.
        config.lr = SMALL_RATE
    least = config.tp * config.pp * max(config.cp, config.ep)
    least *= config.data_parallel_replicate_degree
    for ranks_of_layout in [world] if world else [2 * least, least]:
        try:
            # Adapters of initial values are as good a test as those of a checkpoint.
            rules.validate(config, ranks_of_layout, base_needed=False)
            return config, ranks_of_layout
        except ConfigError as e:
            refused = e
    raise refused


def verify(
    config: RunConfig, world: int, steps: int, mutate=None, backend: str = "gloo"
) -> tuple[bool, dict]:
    """(whether the small layout is right, the band of each step). world: ranks of `config`; steps:
    of the band, 0 for none; mutate: breaks the layout; backend: as of `compare`. Raises
    VerifyError."""
    small_world, layout = shrink(config, world)
    if backend == "nccl" and small_world > torch.cuda.device_count():
        rule = f"its {small_world} ranks need a GPU each, and here are {torch.cuda.device_count()}"
        raise VerifyError(f"--backend nccl: {rule}; --ranks says how many ranks, or leave it out")
    say("layout", described(config, world, small_world, layout))
    right = say_equality(*compare(small_world, layout, mutate, backend))
    if not steps:
        return right, {}
    layout["precision"] = config.precision or ("bf16" if torch.cuda.is_available() else "fp32")
    band, one = measure_band(layout, steps, parts=max(2, config.tp))
    shown = [step for step in (1, 5, 10, 20, 50, 100) if step <= steps]
    limits = ", ".join(f"{band[step]:.0e} in step {step}" for step in shown)
    say(layout["precision"], f"the band, of {RUNS} runs of one device: {limits}")
    run = ranks.run(losses_of, small_world, small_world, layout, steps, mutate)[0]
    inside = say_inside("this layout", times_band(dict(enumerate(run, 1)), one, band))
    return right and inside, band


def measured_band(paths: list[Path]) -> dict[int, float]:
    """The band of the user's own repeated runs. Raises MetricsError."""
    runs = [read_losses(path) for path in paths]
    for path, run in zip(paths, runs):
        if not all(0 < loss < float("inf") for loss in run.values()):
            raise MetricsError(f"--repeats: {path} has a loss that is not finite and positive")
    band = band_of(runs)
    if not band:
        raise MetricsError("--repeats: these runs have no step in common")
    if not any(band.values()):
        raise MetricsError("--repeats: these losses are equal to the last bit, so there is no band")
    limits = f"{min(band.values()):.0e} to {max(band.values()):.0e}"
    say("your band", f"of {len(paths)} runs, {len(band)} steps: {limits}")
    return band


def attempt(args: argparse.Namespace, train_flags: list[str], mutate) -> bool:
    """Whether everything is right. Raises InputError."""
    pair = []
    if args.metrics:
        pair = [read_losses(path) for path in (args.metrics, args.against)]
    right = True
    if args.repeats:
        band = measured_band(args.repeats)
    else:
        config, world = read_flags(train_flags, args.ranks)
        right, band = verify(config, world, args.steps, mutate, args.backend)
    if pair:
        found = times_band(*pair, band)
        if not found:
            raise MetricsError(f"{args.metrics}: {args.against} and the band have no step of it")
        right &= say_inside("your runs", found)
    return right


def main(argv: list[str] | None = None, mutate=None) -> int:
    """Returns the exit status. mutate: breaks the layout, as in course/parity.py."""
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    train_flags = argv[end + 1 :]
    parser = make_parser()
    args = parser.parse_args(argv[:end])
    if args.repeats and (args.ranks or args.steps is not None or train_flags):
        parser.error("--repeats: the band is that of these runs; leave out --ranks, --steps and --")
    if args.backend == "nccl" and (args.steps or args.metrics):
        parser.error("--backend nccl: measures no band; leave out --steps, --metrics and --against")
    if args.steps is None:
        args.steps = STEPS if args.backend == "gloo" else 0
    if args.steps < 0 or (args.ranks is not None and args.ranks < 1):
        parser.error("--steps and --ranks: steps are 0 or more, ranks 1 or more")
    if bool(args.metrics) != bool(args.against):
        parser.error("--metrics and --against: two runs are compared, so give both")
    if args.metrics and not args.repeats and not args.steps:
        parser.error("--steps 0: without a band there is nothing to compare --metrics with")
    if args.repeats and (len(args.repeats) < 2 or not args.metrics):
        parser.error("--repeats: takes two runs or more, beside --metrics and --against")
    ranks.preload("train", "course.parity")
    try:
        return 0 if attempt(args, train_flags, mutate) else 1
    except InputError as e:
        # The flags after -- belong to another command, the files to this one.
        is_own = isinstance(e, MetricsError | VerifyError)
        speaker = "verify.py" if is_own else speaker_of(train_flags)
        terminal.say(f"{speaker}: {terminal.one_line(e)}", error=True)
        return 2


if __name__ == "__main__":
    terminal.command(main)
