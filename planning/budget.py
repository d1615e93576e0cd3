"""The largest model that a number of GPUs trains in a number of days.

    python planner.py size --gpus 64 --days 7 --gpu h100

The model is a GPT of the proportions of GPT-3 175B, on 20 tokens for each parameter. Its speed is
that of the fastest layout that planner.py finds.

Not covered: other shapes of the same size.
"""

import math
from typing import NamedTuple

from base.model_config import MoEConfig, flops_per_token, least_parameters
from planner import Plan, fitting
from planning import commands
from planning.inputs import TRAIN, Machine, PlanError, Software
from planning.layouts import what_would_fit
from planning.recipe import batch_of, flags_of
from run.config import ConfigError
from run.presets import recipe_of_size

# Tokens for each parameter (Hoffmann et al., arXiv 2203.15556, section 3).
TOKENS_PER_PARAMETER = 20
# layers
SMALLEST = 4
LARGEST = 192


class Sized(NamedTuple):
    """The largest model that a budget trains."""

    model: MoEConfig
    parameters: int
    tokens: float
    days: float
    plan: Plan
    # a larger model would not fit
    memory_is_full: bool = False


def gpt_of(layers: int) -> MoEConfig:
    """A GPT as wide as GPT-3 175B for its depth: h = 128 L, heads of 128."""
    return MoEConfig(
        layers, 128 * layers, layers, seq_length=2048, vocab_size=51200, attention="fused"
    )


def size_for(
    machine: Machine,
    software: Software,
    gpus: int,
    days: float = math.inf,
    flops: float = math.inf,
    tokens: float | None = None,
) -> Sized:
    """The largest model that `gpus` train in so many days, and with so many model FLOPs, at the
    speed that `search` predicts. tokens: to train on; None: 20 for each parameter.

    Raises PlanError where there is none.
    """
    no_room = False
    for layers in range(LARGEST, SMALLEST - 1, -1):
        model = gpt_of(layers)
        count = least_parameters(model)
        batch = batch_of(recipe_of_size(count), model.seq_length, gpus)
        total = tokens or TOKENS_PER_PARAMETER * count
        needed = total * flops_per_token(model)
        # Even at the peak it would take longer.
        if needed > min(flops, days * commands.DAY * gpus * machine.peak):
            continue
        plans = fitting(machine, software, model, gpus, batch)
        plan = min(plans, key=lambda plan: plan.seconds, default=None)
        if plan:
            taken = total / (batch * model.seq_length) * plan.seconds / commands.DAY
            if taken <= days:
                return Sized(model, count, total, taken, plan, memory_is_full=no_room)
        no_room = plan is None
    if no_room:
        message = what_would_fit(machine, software, gpt_of(SMALLEST), gpus, batch)
        raise PlanError(f"a model of {SMALLEST} layers does not fit: {message}")
    advice = "more GPUs, a larger budget or fewer --tokens would do"
    raise PlanError(f"too little for a model of {SMALLEST} layers; {advice}")


def main(argv: list[str]) -> None:
    parser = commands.Parser("size", "The largest GPT that so many GPUs train in so many days.")
    parser.add_machine()
    number = dict(type=commands.number)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--days", default=math.inf, help="of training", **number)
    budget.add_argument("--flops", default=math.inf, help="model FLOPs in all", **number)
    words = f"to train on (default: {TOKENS_PER_PARAMETER} for each parameter)"
    parser.add_argument("--tokens", default=None, help=words, **number)
    args = parser.parse_args(argv)
    machine = commands.machine_of(args)
    try:
        found = size_for(machine, TRAIN, args.gpus, args.days, args.flops, args.tokens)
    except PlanError as e:
        budget = f"--days {args.days:g}" if args.days < math.inf else f"--flops {args.flops:g}"
        raise ConfigError(f"--gpus {args.gpus} {budget}: {e}") from None
    model = found.model
    print(
        f"{commands.billions(found.parameters)} parameters: {model.num_layers} layers, h"
        f" {model.hidden_size:,}, {model.num_heads} heads, s {model.seq_length:,}, without dropout"
    )
    print(
        f"{commands.billions(found.tokens)} tokens, {found.tokens / found.parameters:.1f} for each"
        f" parameter, in {found.days:.2f} days on {args.gpus:,} {machine.name}:"
    )
    if found.memory_is_full:
        print("A larger model would not fit into memory.")
    print("", commands.table([found.plan], machine, TRAIN, model, found.tokens), sep="\n")
    # Any GPT: the flags say the rest of its shape.
    fields = ("num_layers", "hidden_size", "num_heads", "seq_length", "vocab_size")
    shape = {"model": "gpt2"} | {field: getattr(model, field) for field in fields}
    row = recipe_of_size(found.parameters)
    batch = found.plan.layout.global_batch_size
    recipe_flags = flags_of(row, model, batch, found.tokens, {})
    commands.show_command(found.plan, machine, shape, recipe_flags, row)
