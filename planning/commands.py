"""The commands of planner.py.

    python planner.py plan --model gpt3-175b --gpus 1024 --gpu a100
    python planner.py size --gpus 64 --days 7
    python planner.py predict planning/published_times.json
    python planner.py try 5
    python planner.py ppo --model llama2-70b --gpus 64 --gpu h100
    python planner.py serve --model gpt3-175b --gpu h100 --latency 5s

plan       the fastest layouts of a model, the command of the best, and why the second one loses
size       which model to train with so many GPUs and days, on how many tokens
predict    a JSON object for each row of a file: name, seconds of a step, bytes of the fullest rank
try        the best layouts, run on this machine for a few steps (planning/try_layouts.py)
ppo        a step of reinforcement learning: answers, scores, updates (planning/ppo.py)
serve      layouts that serve a model: how soon, how many tokens/s (planning/serving.py)

What cannot be answered is refused in one line: the flag, its value, the rule, what would fit. The
exit status is then 2.

Not covered: prices, and failures of machines. Days are those of training without a pause.
"""

import argparse
import dataclasses
import importlib
import math
import re
import shlex
import sys
import textwrap

import planner
from base import terminal
from base.json_files import JSONError
from base.model_config import MoEConfig, least_parameters
from planning import recipe, table
from planning.fits import gib
from planning.inputs import MACHINES, Layout, Machine
from planning.plan import machine_of as machine_named
from planning.plan import software_of
from run import flags, rules
from run.config import MODEL_FLAGS, ConfigError, flag_name
from run.presets import Recipe, recipe_of_model
from run.pretraining import Config
from run.rules import Run, check_effects

# published runs of these models; the default of --tokens
TOKENS = 300e9
# the flags of train.py that `plan` takes, and puts into the commands that it prints: what decides
# time and memory, and how to train (planning/recipe.py)
PLANNED = {"model", *MODEL_FLAGS, "optimizer_state", "reduce_dtype", "fp8", "fp8_skip", "kernels"}
PLANNED.add("lora_rank")
GIVEN = PLANNED | set(recipe.GIVEN)
REFUSED = (ConfigError, JSONError, planner.PlanError)


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str):
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        terminal.refuse(f"planner.py: {terminal.one_line(message)}; --help lists the flags")


def number(text: str) -> float:
    """3e11, or 300_000_000_000. Above 0 and finite."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and finite")
    return value


def count(text: str) -> int:
    """A whole number from 1 to 2^20."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number") from None
    if not 1 <= value <= rules.MOST_SEQUENCES:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to {rules.MOST_SEQUENCES:,}")
    return value


def make_parser(name: str, description: str) -> Parser:
    """A flag of train.py that is not given is not in the result."""
    return Parser(
        prog=f"planner.py {name}",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )


def add_machine(parser: Parser, gpus: int | None = None) -> None:
    """gpus: the default; None: the flag must be given."""
    words = "how many" + (f" (default: {gpus})" if gpus else "")
    how = dict(default=gpus) if gpus else dict(required=True)
    parser.add_argument("--gpus", type=count, metavar="N", help=words, **how)
    parser.add_argument("--gpu", choices=list(MACHINES), default=None, help="default: a100")
    parser.add_argument(
        "--memory", type=number, metavar="GIB", default=None, help="of each, instead of the GPU's"
    )
    machine_help = "a machine of your own (docs/planning.md)"
    parser.add_argument("--machine", metavar="FILE", default=None, help=machine_help)


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that --gpu or --machine names. Raises ConfigError or JSONError."""
    if args.machine and args.gpu:
        raise ConfigError(
            f"--gpu {args.gpu}: --machine {args.machine} says which; give one of the two"
        )
    machine = machine_named(args.machine or args.gpu or "a100", "--machine")
    if args.memory:
        machine = dataclasses.replace(machine, memory=args.memory * 2**30)
    each = machine.ranks_per_node
    if args.gpus > each and args.gpus % each:
        fit = rules.multiples(args.gpus, each)
        raise ConfigError(f"--gpus {args.gpus}: nodes have {each}, and each is used whole; {fit}")
    return machine


def check_positions(name: str, model: MoEConfig, more: str, n: int, first: str, s: int) -> None:
    """Raises ConfigError where n tokens of flag `more`, behind s of flag `first`, have no
    positions."""
    if model.positions == "learned" and s + n > model.seq_length:
        rule = f"with {first} {s} they are {s + n}, and --model {name}"
        rule += f" has {model.seq_length} learned positions"
        raise ConfigError(f"{more} {n}: {rule}; fewer would fit")


# --- plan -----------------------------------------------------------------------------------------


def command(begin: list[str], layout: Layout, ranks_per_node: int, recipe_flags: list[str]) -> str:
    """The command that trains under this layout. On several nodes it runs on each of them. begin:
    the program, and the flags of the model."""
    train = [*begin, *layout.flags(), *recipe_flags]
    return shlex.join(launcher(layout.ranks, ranks_per_node) + train)


def launcher(ranks: int, ranks_per_node: int) -> list[str]:
    """The words that start a program on so many ranks."""
    if ranks == 1:
        return ["python"]
    nodes, each = 1, ranks
    if ranks > ranks_per_node:
        nodes, each = ranks // ranks_per_node, ranks_per_node
    words = ["torchrun", "--nproc-per-node", str(each)]
    if nodes > 1:
        words[1:1] = ["--nnodes", str(nodes)]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_NODE:29500"]
    return words


def wrapped(text: str) -> str:
    """A command on lines of at most 96 columns, each but the last with \\ at its end. A flag stays
    on the line of its value."""
    lines = [""]
    words = re.sub(r" (--|train\.py|-m )", r"\n\1", text).split("\n")
    for word in words:
        starts = word.startswith(("train.py", "-m ")) and len(words) > 8
        if starts or len(lines[-1]) + len(word) > 92:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def show_command(
    plan: planner.Plan,
    machine: Machine,
    begin: list[str],
    recipe_flags: list[str],
    row: Recipe,
) -> None:
    """The command that trains under this plan, and where its values come from."""
    print()
    print(wrapped(command(begin, plan.layout, machine.ranks_per_node, recipe_flags)))
    print()
    print(textwrap.fill(recipe.ADVICE.format(row.name), 96))


def beginning(given: dict) -> list[str]:
    """The program that trains, and flags of the model and of its bytes, as they were given."""
    words = ["train.py"]
    if "lora_rank" in given:
        # a preset stands for the model that is there already
        words = ["-m", "finetune.adapters", "train", "--load", "BASE"]
        given = {name: value for name, value in given.items() if name != "model"}
    for name, value in given.items():
        if name in PLANNED and name not in recipe.GIVEN:
            words += [flag_name(name), str(value)]
    return words


def plan_parser() -> Parser:
    parser = make_parser("plan", "The fastest layouts of a model that fit into memory.")
    add_machine(parser)
    batch_help = "sequences in a step (default: as published models of this size have them)"
    parser.add_argument("--batch", type=count, default=None, metavar="N", help=batch_help)
    parser.add_argument(
        "--tokens", type=number, default=TOKENS, help="to train on (default: 300e9)"
    )
    parser.add_argument("--top", type=count, default=10, metavar="N", help="how many layouts")
    lora = "learn LoRA of this rank in all matrices of a frozen model (adapters.py)"
    parser.add_argument("--lora-rank", type=count, metavar="R", help=lora)
    for field in dataclasses.fields(Config):
        if field.name in GIVEN:
            flags.add_flag(parser, field)
    return parser


def config_of(args: argparse.Namespace) -> tuple[Config, dict]:
    """(the configuration that flags of train.py make, its fields that were given). Raises
    ConfigError."""
    if not hasattr(args, "model"):
        raise ConfigError("--model: which one? for example --model gpt3-175b")
    given = {name: value for name, value in vars(args).items() if name in GIVEN}
    kind = Config
    if "lora_rank" in given:
        from finetune import adapter_training

        kind = adapter_training.TextPeftConfig
    config = kind(**given)
    model = config.model_config()
    rules.check_types(config)
    rules.check_numbers(config)
    # flags that this model has no use for
    rules.check_techniques(config, model, world=1)
    check_effects(Run(config, model, replicas=2))
    return config, given


def plan(argv: list[str]) -> None:
    args = plan_parser().parse_args(argv)
    config, given = config_of(args)
    model, machine = config.model_config(), machine_of(args)
    if config.fp8 != "off" and not machine.has_fp8:
        rule = f"{machine.name} has no FP8; h100 or h200 would fit, or a file with has_fp8"
        raise ConfigError(f"--fp8 {config.fp8}: {rule}")
    row, _ = recipe_of_model(config)
    if "lora_rank" in given:
        rate, what = config.default_lr()
        row = row._replace(lr=rate, name=f"{row.name}, with the rate of {what}")
    batch = args.batch or recipe.batch_of(row, model.seq_length, args.gpus)
    software = software_of(config)
    try:
        plans = planner.search(machine, software, model, args.gpus, batch)
    except planner.PlanError as e:
        raise ConfigError(f"--gpus {args.gpus} --batch {batch}: {e}") from None
    best, *others = plans
    if best.layout.replicas == 1:
        # nothing is reduced, and train.py refuses it
        given.pop("reduce_dtype", None)
    recipe_flags = recipe.flags_of(row, model, batch, args.tokens, given)
    print(
        f"{args.model}, {billions(least_parameters(model))} parameters; {batch:,}"
        f" sequences of {model.seq_length:,} tokens a step; {billions(args.tokens)} tokens"
    )
    fit = "1 layout fits" if not others else f"{len(plans):,} layouts fit"
    print(f"{args.gpus:,} x {machine.name}, {gib(machine.memory)} GiB each: {fit}")
    print(
        "v: interleaved, v stages on a rank; b: micro-batch; seq: sequence parallelism; right: GiB"
    )
    print()
    print("\n".join(table.lines(plans[: args.top], machine, software, model, args.tokens)))
    show_command(best, machine, beginning(given), recipe_flags, row)
    if others:
        print()
        print(textwrap.fill(table.why_it_loses(best, others[0]), 96))


def billions(number: float) -> str:
    """1.5e9: 1.5 billion"""
    name, unit = ("billion", 1e9) if number >= 1e9 else ("million", 1e6)
    return f"{number / unit:,.4g} {name}"


# --- all ------------------------------------------------------------------------------------------

# name -> the module whose main(argv) it is
COMMANDS = {
    "plan": "planning.commands",
    "size": "planning.budget",
    "predict": "planning.rows",
    "try": "planning.try_layouts",
    "ppo": "planning.ppo",
    "serve": "planning.serving_command",
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if name not in COMMANDS:
            said = f"{name}: no such command" if name else "name a command"
            raise ConfigError(f"{said}; there are {', '.join(COMMANDS)}")
        if name == "plan":
            return plan(rest) or 0
        return importlib.import_module(COMMANDS[name]).main(rest) or 0
    except REFUSED as e:
        terminal.say(f"planner.py: {terminal.one_line(e)}", error=True)
        return 2
