"""planner.py serve: the layouts on the frontier of latency and tokens/s, and the command of one.

    python planner.py serve --model llama2-70b --gpu h100 --gpus 8 --output 100 --latency 2s

Not covered: as in planning/serving.py.
"""

import argparse
import math
import shlex

from inference.serve import most_blocks
from planning import commands
from planning.fits import USABLE, gib
from planning.serving import ENGINES, WEIGHTS, Found, Serving, fitting, frontier, layouts
from run.config import ConfigError

# tokens of a block of the cache
BLOCK = 16
UNITS = {"ms": 1e-3, "s": 1.0}


def duration(text: str) -> float:
    """5s or 500ms, in seconds."""
    unit = "ms" if text.endswith("ms") else "s"
    return commands.number(text.removesuffix(unit)) * UNITS[unit]


def parser() -> commands.Parser:
    parser = commands.make_parser("serve", "Layouts that serve a model: how soon, how many tokens.")
    commands.add_machine(parser, gpus=64)
    parser.add_argument("--model", required=True, help="a preset")
    for name, default, words in (
        ("input", 200, "tokens of each prompt"),
        ("output", 200, "tokens of each answer"),
        ("budget", 2048, "tokens of a step"),
        ("top", 8, "how many layouts"),
    ):
        words = f"{words} (default: {default:,})"
        parser.add_argument(f"--{name}", type=commands.count, default=default, help=words)
    words = "of a whole request, at most: 5s, 500ms"
    parser.add_argument("--latency", type=duration, default=None, metavar="TIME", help=words)
    words = "of each weight (default: bf16)"
    parser.add_argument("--weights", choices=list(WEIGHTS)[1:], default="bf16", help=words)
    return parser


def found_by(case: argparse.Namespace, one: Serving) -> list[Found]:
    """The frontier within --latency. Raises ConfigError where there is none."""
    found = frontier(fitting(one, case.gpus, case.input, case.output, case.budget))
    if not found:
        tokens = case.input + case.output
        least = min(sum(x.bytes(1, tokens, case.budget).values()) for x in layouts(case.gpus, one))
        room = f"{gib(USABLE * one.machine.memory)} GiB for tensors; more GPUs would fit"
        room += ", or --weights int4" if case.weights != "int4" else ", or fewer tokens"
        rule = f"every layout takes at least {gib(least)} GiB on each, of which"
        raise ConfigError(f"--gpus {case.gpus}: {rule} {one.machine.name} has {room}")
    within = [x for x in found if x.latency <= (case.latency or x.latency)]
    if not within:
        soonest = math.ceil(1000 * found[0].latency)
        rule = f"the soonest layout takes longer; {soonest}ms would fit, or less --output"
        raise ConfigError(f"--latency {1000 * case.latency:g}ms: {rule}")
    return within


def table(found: list[Found]) -> list[str]:
    names = " tp  pp batch  first, s  between, ms  request, s  tokens/s/GPU  weights   cache"
    lines = [f"{names}  activ."]
    for x in found:
        line = f"{x.serving.tp:>3}{x.serving.pp:>4}{x.batch:>6}{x.first:>10.3f}"
        line += f"{1e3 * x.between:>13.1f}{x.latency:>12.2f}{x.rate:>14,.1f} "
        lines.append(line + "".join(f"{nbytes / 2**30:>8.1f}" for nbytes in x.bytes.values()))
    return lines


def command_of(case: argparse.Namespace, x: Found) -> str:
    words = [
        "-m",
        "inference.serve",
        "--checkpoint",
        "CHECKPOINT",
        "--tp",
        x.serving.tp,
        "--pp",
        x.serving.pp,
    ]
    # one is nobody's (serve.BlockPool)
    tokens, window = case.input + case.output, x.serving.model.sliding_window
    blocks = x.batch * math.ceil(x.serving.kept(tokens) / BLOCK)
    # a prompt behind a window needs more while it is computed
    blocks = 1 + max(blocks, most_blocks(tokens, BLOCK, case.budget, window))
    layers, p = x.serving.model.num_layers, x.serving.pp
    if layers % p:
        # the last stages have one more
        split = [layers // p + (stage >= p - layers % p) for stage in range(p)]
        words += ["--layer-split", *split]
    words += ["--max-sequences", x.batch, "--block-size", BLOCK, "--blocks", blocks]
    words += ["--budget", case.budget, "--precision", "bf16"]
    if case.weights != "bf16":
        words += ["--weights", case.weights]
    launcher = commands.launcher(x.serving.ranks, x.serving.machine.ranks_per_node)
    return commands.wrapped(shlex.join([*launcher, *map(str, words)]))


def main(argv: list[str]) -> None:
    case = parser().parse_args(argv)
    machine, model = commands.machine_of(case), commands.Config(model=case.model).model_config()
    if case.input + case.output > model.seq_length:
        rule = f"with --input {case.input} they are {case.input + case.output}, and the context of"
        rule += f" --model {case.model} holds {model.seq_length}; fewer would fit"
        raise ConfigError(f"--output {case.output}: {rule}")
    if case.weights == "fp8" and not machine.has_fp8:
        raise ConfigError(f"--weights fp8: {machine.name} has no FP8; h100 or h200 would fit")
    found = found_by(case, Serving(machine, ENGINES["graphs"], model, weights=case.weights))
    print(
        f"{case.model} on {machine.name}, {gib(machine.memory)} GiB each, at most {case.gpus}:"
        f" prompts of {case.input:,} tokens, answers of {case.output:,}; {case.weights} weights"
    )
    # some of the frontier, its last among them
    step = (len(found) - 1) / max(1, case.top - 1)
    shown = sorted({len(found) - 1 - round(i * step) for i in range(case.top)})
    print("\n".join(["", *table([found[i] for i in shown]), ""]))
    best = found[-1]
    copies = case.gpus // best.serving.ranks
    room = f"; {case.gpus} GPUs hold {copies} of it" if copies > 1 else ""
    print(f"The last has the most tokens/s of a GPU{room}:\n")
    is_plain = best.serving.tp == 1 and not model.num_experts
    if case.weights == "bf16" or (case.weights != "fp8" and is_plain):
        print(command_of(case, best))
    else:
        rule = "int8 and int4 are there for --tp 1 and without experts"
        print(f"serve.py has no --weights {case.weights} for it: {rule}")
