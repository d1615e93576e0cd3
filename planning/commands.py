"""The commands of planner.py.

    python planner.py plan --model gpt3-175b --gpus 1024 --gpu a100
    python planner.py size --gpus 64 --days 7
    python planner.py predict planning/published_times.json
    python planner.py try 5 --ranks 2
    python planner.py measure --ranks 2
    python planner.py ppo --model llama2-70b --gpus 64 --gpu h100
    python planner.py serve --model gpt3-175b --gpu h100 --latency 5s

plan       the fastest layouts of a model, the command of the best, and why the second one loses
size       which model to train with so many GPUs and days, on how many tokens
predict    a JSON object for each row of a file: name, seconds of a step, bytes of the fullest rank
try        the best layouts, run on this machine for a few steps (planning/try_layouts.py)
measure    this machine's processors, as a file for --machine (planning/measure.py)
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
from collections.abc import Callable

import planner
from base import terminal
from base.errors import InputError
from base.model_config import MoEConfig, flops_per_token, least_parameters
from planning import recipe
from planning.inputs import MACHINES, Layout, Machine, PlanError, Software
from planning.layouts import gib
from planning.plan import machine_of as machine_named
from planning.plan import software_of
from run import flags, rules
from run.config import MODEL_FLAGS, ConfigError, RunConfig, flag_name
from run.presets import Recipe, no_such, recipe_of_model
from run.pretraining import Config

# Published runs of these models; the default of --tokens.
TOKENS = 300e9
# The flags of train.py that `plan` takes, and puts into the commands that it prints: what decides
# time and memory, and how to train (planning/recipe.py).
PLANNED = {"model", *MODEL_FLAGS, "optimizer_state", "reduce_dtype", "fp8", "fp8_skip", "kernels"}
PLANNED |= {"lora_rank", "optimizer", "mtp_layers"}
GIVEN = PLANNED | set(recipe.GIVEN)
# seconds
DAY = 86400

# --- flags ----------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Refuses in one line. A flag of train.py that is not given is not in the result."""

    def __init__(self, name: str, description: str):
        super().__init__(
            prog=f"planner.py {name}",
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )

    def error(self, message: str):
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        terminal.refuse(f"planner.py: {terminal.one_line(message)}; --help lists the flags")

    def add_counts(self, *counts: tuple[str, int, str]) -> None:
        """(flag, default, help) of flags that are whole numbers."""
        for name, default, words in counts:
            words = f"{words} (default: {default:,})"
            self.add_argument(f"--{name}", type=count, default=default, help=words)

    def add_machine(self, gpus: int | None = None) -> None:
        """gpus: the default; None: the flag must be given."""
        words = "how many" + (f" (default: {gpus})" if gpus else "")
        how = dict(default=gpus) if gpus else dict(required=True)
        self.add_argument("--gpus", type=count, metavar="N", help=words, **how)
        words = f"{', '.join(MACHINES)} (default: a100)"
        self.add_argument("--gpu", metavar="NAME", default=None, help=words)
        words = "of each, instead of the GPU's"
        self.add_argument("--memory", type=number, metavar="GIB", default=None, help=words)
        words = "a machine of your own (docs/planning.md)"
        self.add_argument("--machine", metavar="FILE", default=None, help=words)


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


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that --gpu or --machine names. Raises ConfigError or JSONError."""
    if args.machine and args.gpu:
        rule = f"--machine {args.machine} says which; give one of the two"
        raise ConfigError(f"--gpu {args.gpu}: {rule}")
    if args.gpu and args.gpu not in MACHINES:
        fit = f"{', '.join(MACHINES)} would fit, or --machine FILE for another (docs/planning.md)"
        raise ConfigError(f"--gpu {args.gpu}: not known; {fit}")
    machine = machine_named(args.machine or args.gpu or "a100", "--machine")
    if args.memory:
        machine = dataclasses.replace(machine, memory=args.memory * 2**30)
    each = machine.ranks_per_node
    if args.gpus > each and args.gpus % each:
        fit = rules.multiples(args.gpus, each)
        raise ConfigError(f"--gpus {args.gpus}: nodes have {each}, and each is used whole; {fit}")
    return machine


# --- commands that are printed --------------------------------------------------------------------


def launcher(ranks: int, ranks_per_node: int) -> list[str]:
    """The words that start a program on so many ranks; on several nodes, on each of them."""
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


def wrapped(words: list[str]) -> str:
    """A command on lines of at most 96 columns, each but the last with \\ at its end. A flag stays
    on the line of its value."""
    lines = [""]
    parts = re.sub(r" (--|train\.py|-m )", r"\n\1", shlex.join(words)).split("\n")
    for part in parts:
        starts = part.startswith(("train.py", "-m ")) and len(parts) > 8
        if starts or len(lines[-1]) + len(part) > 92:
            lines.append("   ")
        lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(lines)


def show_command(
    plan: planner.Plan,
    machine: Machine,
    given: dict,
    recipe_flags: list[str],
    row: Recipe,
    config_class: type = Config,
) -> None:
    """The command that trains under this plan, and where its values come from. given: flags of the
    model and of its bytes; config_class: those of the command."""
    words = config_class.command.split()
    if "lora_rank" in given:
        # a preset stands for the model that is there already
        words = ["-m", "finetune.adapters", "--load", "BASE"]
        given = {name: value for name, value in given.items() if name != "model"}
    for name, value in given.items():
        if name in PLANNED and name not in recipe.GIVEN:
            words += [flag_name(name), str(value)]
    words = launcher(plan.layout.ranks, machine.ranks_per_node) + words
    # Dimensions that the command decides itself have no flags.
    without = tuple(vars(Layout()).keys() - flags.names_of(config_class))
    print("", wrapped([*words, *plan.layout.flags(without), *recipe_flags]), "", sep="\n")
    print(textwrap.fill(recipe.ADVICE.format(row.name), 96))


def billions(number: float) -> str:
    """1.5e9: 1.5 billion"""
    name, unit = ("billion", 1e9) if number >= 1e9 else ("million", 1e6)
    return f"{number / unit:,.4g} {name}"


# --- the table of layouts -------------------------------------------------------------------------

# What the table calls the parts of planning/memory.py, and how wide they are.
PARTS = {
    "params": (7, ("parameters", "gathered")),
    "grads": (6, ("gradients", "summed")),
    "state": (6, ("optimizer",)),
    "activ.": (7, ("activations", "moment")),
}


def speed(
    machine: Machine, software: Software, model: MoEConfig, layout: Layout, seconds: float
) -> tuple[float, float]:
    """(tokens/s, model FLOPs over those of the peak) of a step. FP8 has twice the peak; the frozen
    weights beside LoRA have no gradients, a third of the FLOPs."""
    rate = layout.global_batch_size * model.seq_length / seconds
    peak = machine.peak * (1 if software.fp8 == "off" else 2)
    flops = flops_per_token(model)
    if software.lora_rank:
        # a third of 6 N: scores have no weights
        flops -= 2 * (least_parameters(model) if not model.num_experts else flops / 6)
    return rate, flops * rate / (layout.ranks * peak)


def schedule_of(layout: Layout) -> str:
    """interleaved with 3 virtual stages: v 3"""
    if layout.pp == 1:
        return "-"
    return f"v {layout.virtual_stages}" if layout.virtual_stages > 1 else layout.pipeline_schedule


# Heading, width, text of a layout.
COLUMNS: list[tuple[str, int, Callable[[Layout], str]]] = [
    ("tp", 3, lambda x: str(x.tp)),
    ("pp", 4, lambda x: str(x.pp)),
    ("dp", 5, lambda x: str(x.dp)),
    ("cp", 4, lambda x: str(x.cp)),
    ("by", 6, lambda x: "-" if x.cp == 1 else {"all-to-all": "heads"}.get(x.cp_kind, x.cp_kind)),
    ("ep", 4, lambda x: str(x.ep)),
    ("sched", 6, schedule_of),
    ("b", 3, lambda x: str(x.micro_batch_size)),
    # full, or of 12 layers alone: full 12
    ("recompute", 10, lambda x: f"{x.recompute} {x.recompute_layers or ''}".rstrip()),
    ("seq", 4, lambda x: "yes" if x.sequence_parallel else "no"),
    ("zero", 5, lambda x: str(x.zero_stage)),
    ("chunk", 6, lambda x: str(x.head_chunk or "-")),
]


def aligned(rows: list[list[str]], least: list[int]) -> str:
    """Rows of cells, to the right in columns that are at least so wide."""
    widths = [max(w, *(len(row[i]) + 1 for row in rows)) for i, w in enumerate(least)]
    return "\n".join("".join(map(str.rjust, row, widths)) for row in rows)


def table(
    plans: list[planner.Plan],
    machine: Machine,
    software: Software,
    model: MoEConfig,
    tokens: float,
) -> str:
    """A heading, and a line for each plan. tokens: to train on."""
    # Without experts there is no ep.
    left_out = set() if model.num_experts else {"ep"}
    if all(plan.layout.cp == 1 for plan in plans):
        left_out |= {"cp", "by"}
    if not any(plan.layout.head_chunk for plan in plans):
        left_out.add("chunk")
    columns = [c for c in COLUMNS if c[0] not in left_out]
    names = [name for name, _, _ in columns] + ["s/step", "tokens/s", "MFU", "days", *PARTS]
    least = [width for _, width, _ in columns] + [8, 10, 6, 7]
    least += [width for width, _ in PARTS.values()]
    rows = [names]
    for plan in plans:
        row = [text(plan.layout) for _, _, text in columns]
        rate, mfu = speed(machine, software, model, plan.layout, plan.seconds)
        days = tokens / rate / DAY
        # Three digits below 100, whole days above.
        days = f"{days:,.0f}" if days >= 100 else f"{days:.3g}"
        row += [f"{plan.seconds:.3f}", f"{rate:,.0f}", f"{mfu:.1%}", days]
        for _, parts in PARTS.values():
            row.append(f"{sum(plan.bytes[part] for part in parts) / 2**30:.1f}")
        rows.append(row)
    return aligned(rows, least)


def why_it_loses(first: planner.Plan, second: planner.Plan) -> str:
    """One sentence: how the second plan differs from the first, and in which parts of the time."""
    changes = []
    for name, _, text in COLUMNS:
        of_first, of_second = text(first.layout), text(second.layout)
        # a schedule comes and goes with a pipeline
        if of_first != of_second and "-" not in (of_first, of_second):
            changes.append(f"{name} {of_second} instead of {of_first}")
    more = second.seconds - first.seconds
    names = first.parts | second.parts
    parts = {name: second.parts.get(name, 0.0) - first.parts.get(name, 0.0) for name in names}
    largest = sorted(parts, key=lambda part: -abs(parts[part]))
    # What is below a tenth of the largest difference explains nothing.
    told = [part for part in largest if abs(parts[part]) > abs(parts[largest[0]]) / 10]
    because = ", ".join(f"{part} {parts[part]:+.3f} s" for part in told)
    differs = f"The second has {', '.join(changes)}"
    if not told:
        return f"{differs}, and is as fast."
    longer = f"it takes {more:.3f} s ({more / first.seconds:.1%}) longer"
    return f"{differs}; {longer}: {because}."


# --- plan -----------------------------------------------------------------------------------------


def plan_parser() -> Parser:
    parser = Parser("plan", "The fastest layouts of a model that fit into memory.")
    parser.add_machine()
    words = "sequences in a step (default: as published models of this size have them)"
    parser.add_argument("--batch", type=count, default=None, metavar="N", help=words)
    words = "to train on (default: 300e9)"
    parser.add_argument("--tokens", type=number, default=TOKENS, help=words)
    parser.add_argument("--top", type=count, default=10, metavar="N", help="how many layouts")
    words = "learn LoRA of this rank in all matrices of a frozen model (adapters.py)"
    parser.add_argument("--lora-rank", type=count, metavar="R", help=words)
    for field in dataclasses.fields(Config):
        if field.name in GIVEN:
            flags.add_flag(parser, field)
    return parser


def command_of(given: dict) -> type[RunConfig]:
    """The flags of the command that trains this model. Raises ConfigError for one that it lacks."""
    if "model" not in given:
        raise ConfigError("--model: which one? for example --model gpt3-175b")
    name = given["model"]
    if name in Config.presets:
        if "lora_rank" not in given:
            return Config
        from finetune.adapter_learning import TextPeftConfig

        return TextPeftConfig
    from models.runs import BertRun, T5Run

    commands = [run for run in (BertRun, T5Run) if name in run.presets]
    if not commands:
        presets = Config.presets | BertRun.presets | T5Run.presets
        raise ConfigError(f"--model {name}: {no_such(name, presets)}")
    # LoRA's bytes and FLOPs are known of decoders.
    for field in sorted(given.keys() - flags.names_of(commands[0]) | given.keys() & {"lora_rank"}):
        rule = f"is not planned of {commands[0].command}, which trains {name}; leave it out"
        raise ConfigError(f"{flag_name(field)} {given[field]}: {rule}")
    return commands[0]


def config_of(given: dict) -> RunConfig:
    """The configuration that these flags of train.py make. Raises ConfigError."""
    config = command_of(given)(**given)
    model = config.model_config()
    rules.check_types(config)
    rules.check_numbers(config)
    # Flags that this model has no use for.
    rules.check_techniques(config, model, world=1)
    rules.check_effects(rules.Run(config, model, replicas=2))
    return config


def plan(argv: list[str]) -> None:
    args = plan_parser().parse_args(argv)
    given = {name: value for name, value in vars(args).items() if name in GIVEN}
    config = config_of(given)
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
    except PlanError as e:
        raise ConfigError(f"--gpus {args.gpus} --batch {batch}: {e}") from None
    best, *others = plans
    if best.layout.replicas == 1:
        # Nothing is reduced, and train.py refuses it.
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
    print("", table(plans[: args.top], machine, software, model, args.tokens), sep="\n")
    show_command(best, machine, given, recipe_flags, row, type(config))
    if others:
        print("", textwrap.fill(why_it_loses(best, others[0]), 96), sep="\n")


# --- all ------------------------------------------------------------------------------------------

# name -> the module whose main(argv) it is
COMMANDS = {
    "size": "planning.budget",
    "predict": "planning.rows",
    "try": "planning.try_layouts",
    "measure": "planning.measure",
    "ppo": "planning.ppo",
    "serve": "planning.serving",
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if name == "plan":
            return plan(rest) or 0
        if name not in COMMANDS:
            said = f"{name}: no such command" if name else "name a command"
            raise ConfigError(f"{said}; there are plan, {', '.join(COMMANDS)}")
        return importlib.import_module(COMMANDS[name]).main(rest) or 0
    except InputError as e:
        terminal.say(f"planner.py: {terminal.one_line(e)}", error=True)
        return 2
