"""The configuration of adapters (--peft): method, size and layers; and which ones are refused."""

import math
from dataclasses import dataclass

from base.model_config import LINEARS, FieldError, GPTConfig

METHODS = ("lora", "adapter", "ia3")
# the places that each method can have; the default is all of them
TARGETS = {"lora": tuple(LINEARS), "adapter": ("attention", "mlp"), "ia3": ("key", "value", "down")}


@dataclass(frozen=True)
class AdapterConfig:
    """The method, its size and its places. Fields have the names of train.py's flags."""

    # lora, adapter or ia3
    peft: str
    # r, and the scale α / r of B A x
    lora_rank: int = 8
    lora_alpha: float = 16.0
    # probability, of x before A
    lora_dropout: float = 0.0
    # k, the inner size of a bottleneck adapter
    adapter_size: int = 32
    # Names in TARGETS; none: all that the model has.
    peft_targets: tuple[str, ...] = ()


def targets_of(config: AdapterConfig, model: GPTConfig) -> tuple[str, ...]:
    """The targets that are given, or all that this model has. Raises FieldError for another one."""
    fitting = [name for name in TARGETS[config.peft] if name != "gate" or model.gated]
    for name in config.peft_targets:
        if name not in fitting:
            rule = f"{name} is no target of {{peft}} in this model; there are {', '.join(fitting)}"
            raise FieldError("peft_targets", list(config.peft_targets), rule, peft=config.peft)
    return tuple(config.peft_targets) or tuple(fitting)


def check(config: AdapterConfig, model: GPTConfig, t: int = 1) -> None:
    """Whether a model on t tensor-parallel ranks can have these adapters. Raises FieldError."""
    targets = targets_of(config, model)
    for name in ("lora_rank", "adapter_size"):
        if not 1 <= getattr(config, name) < 2**31:
            raise FieldError(name, getattr(config, name), "must be at least 1 and below 2^31")
    if not 0 < config.lora_alpha < math.inf:
        raise FieldError("lora_alpha", config.lora_alpha, "must be above 0 and finite")
    if not 0 <= config.lora_dropout < 1:
        raise FieldError("lora_dropout", config.lora_dropout, "must be at least 0 and below 1")
    if config.peft == "adapter" and config.adapter_size % t:
        low = config.adapter_size // t * t
        fits = f"{low} or {low + t}" if low else t
        raise FieldError(
            "adapter_size", config.adapter_size, "must be divisible by {tp}", fits, tp=t
        )
    of_experts = {"gate", "up", "down"} & set(targets)
    if getattr(model, "num_experts", 0) and config.lora_dropout and of_experts:
        rule = "experts have no dropout; name targets without {peft_targets}, or 0 would fit"
        raise FieldError("lora_dropout", config.lora_dropout, rule, peft_targets=sorted(of_experts))
