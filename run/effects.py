"""Flags that do something only beside others. A value other than the
default that would have no effect is refused.

One table, checked from top to bottom. A new flag that is not for every run gets a row.
"""

from collections.abc import Callable
from typing import NamedTuple

from routers import EXPERT_FIELDS, MoEConfig
from run.config import Config
from run.refusal import refuse

# what --rl alone has
RL_FLAGS = (
    *("prompts", "reward", "answer_tokens", "group_size", "rl_epochs", "clip_range"),
    *("gae_lambda", "critic_lr", "rollout_tp", "rollout_pp"),
)
LORA_FLAGS = ("lora_rank", "lora_alpha", "lora_dropout")


class Run(NamedTuple):
    """What decides whether a flag has an effect."""

    config: Config
    model: MoEConfig
    # ranks that hold the same weights, and sum their gradients
    replicas: int


class Need(NamedTuple):
    fields: tuple[str, ...]
    holds: Callable[[Run], object]
    rule: str


def writes_a_sample(run: Run) -> bool:
    """Whether text is learned, and not preferences or rewards: then the run ends with a sample."""
    return not run.config.preference and not run.config.rl


def tokenizes_text(run: Run) -> bool:
    c = run.config
    return not (c.sft or c.preference or c.rl or c.prompt_config)


NEEDS = (
    # data
    Need(("sft_val", "loss_on"), lambda run: run.config.sft, "needs --sft FILE"),
    Need(
        ("chat_template",),
        lambda run: run.config.sft or run.config.preference or run.config.rl,
        "needs --sft FILE, --preference or --rl",
    ),
    Need(
        ("skip_bad_examples",),
        lambda run: not run.config.prompt_config,
        "is for --data, --sft, --pairs and --prompts; templates skip what is too long",
    ),
    Need(
        ("cache",),
        tokenizes_text,
        "holds tokenized text of --data, and this run reads none; leave it out",
    ),
    # preferences and rewards
    Need(
        ("pairs", "pairs_val"),
        lambda run: run.config.preference,
        "needs --preference reward or --preference dpo",
    ),
    Need(
        ("beta",),
        lambda run: run.config.preference or run.config.rl,
        "needs --preference dpo or --rl",
    ),
    Need(RL_FLAGS, lambda run: run.config.rl, "needs --rl ppo or --rl grpo"),
    Need(
        ("gae_lambda", "critic_lr"),
        lambda run: run.config.rl == "ppo",
        "is only for --rl ppo; grpo has no critic",
    ),
    Need(
        ("clip_range",),
        lambda run: run.config.rl_epochs > 1,
        "clips updates after the first; --rl-epochs 2 would have one",
    ),
    Need(
        ("head_chunk",),
        lambda run: run.config.preference != "reward",
        "a reward model has one number for a token, and no logits; leave it out",
    ),
    Need(
        ("sample_prompt",),
        lambda run: writes_a_sample(run) and not run.config.prompt_config,
        "this run ends without a sample of text; leave it out",
    ),
    # adapters
    Need(
        (*LORA_FLAGS, "adapter_size", "peft_targets"),
        lambda run: run.config.peft,
        "needs --peft, which says what is learned",
    ),
    Need(LORA_FLAGS, lambda run: run.config.peft == "lora", "is only for --peft lora"),
    Need(("adapter_size",), lambda run: run.config.peft == "adapter", "is only for --peft adapter"),
    Need(
        ("weight_decay",),
        lambda run: run.config.peft != "ia3",
        "is of matrices, and ia3 learns vectors; leave it out",
    ),
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
    needs = NEEDS if run.config.resume else NEEDS + NEEDS_RANKS
    for fields, holds, rule in needs:
        if not holds(run):
            for field in fields:
                if getattr(run.config, field) != getattr(Config(), field):
                    refuse(run.config, field, rule)
