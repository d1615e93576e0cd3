"""Flags that do something only beside others. A value other than the default that would have no
effect is refused.

One table, checked from top to bottom. A new flag that is not for every run gets a row; a kind of
training has rows of its own (`needs` of its configuration).
"""

from collections.abc import Callable
from typing import NamedTuple

from model_config import EXPERT_FIELDS, MoEConfig
from run.config import RunConfig
from run.refusal import refuse


class Run(NamedTuple):
    """What decides whether a flag has an effect."""

    config: RunConfig
    model: MoEConfig
    # ranks that hold the same weights, and sum their gradients
    replicas: int


class Need(NamedTuple):
    fields: tuple[str, ...]
    holds: Callable[[Run], object]
    rule: str


NEEDS = (
    # experts
    Need(
        EXPERT_FIELDS,
        lambda run: run.model.num_experts,
        "this model has no experts; --num-experts 8, for example, would give it some",
    ),
    Need(
        ("router_temperature",),
        # verify.py gives the shape of a model whole, defaults too
        lambda run: (
            run.model.router == "sinkhorn"
            or run.config.router_temperature == MoEConfig.router_temperature
        ),
        "is only for --router sinkhorn; topk has no plan",
    ),
    # precision
    Need(
        ("fp8_skip", "fp8_scales", "fp8_block"),
        lambda run: run.config.fp8 != "off",
        "needs --fp8 current, delayed or block",
    ),
    Need(
        ("fp8_block",),
        lambda run: run.config.fp8 == "block",
        "is only for --fp8 block; other recipes have one scale for a tensor",
    ),
    Need(
        ("fp8_keep_bytes",),
        lambda run: run.config.fp8 != "off" and run.config.zero_stage == 3,
        "is for --zero-stage 3 with --fp8; other stages keep them anyway",
    ),
    # layout
    Need(("cp_kind",), lambda run: run.config.cp > 1, "needs --cp 2 or more"),
    Need(("schedule", "layer_split"), lambda run: run.config.pp > 1, "needs --pp 2 or more"),
    # memory
    Need(
        ("recompute_layers",),
        lambda run: run.config.recompute_layers != 0,
        "recomputes nothing; leave it and --recompute out",
    ),
    # the model
    Need(
        ("model",),
        lambda run: not run.config.load,
        "--load fixes the shape already; give one of the two",
    ),
)
# These depend on the number of ranks, and a run may go on with fewer.
NEEDS_RANKS = (
    Need(
        ("reduce_dtype", "zero_stage"),
        lambda run: run.replicas > 1,
        "is about ranks that share the batch, and there is one; leave it out",
    ),
)


def check_effects(run: Run) -> None:
    """Raises ConfigError for the first flag that would do nothing."""
    needs = (*run.config.needs, *NEEDS, *(() if run.config.resume else NEEDS_RANKS))
    default = type(run.config)()
    for fields, holds, rule in needs:
        if not holds(run):
            for field in fields:
                if getattr(run.config, field) != getattr(default, field):
                    refuse(run.config, field, rule)
