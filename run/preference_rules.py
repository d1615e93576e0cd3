"""Which runs can learn from preferences: --preference and --rl, beside other flags.

run/rules.py asks these before any process group exists.
"""

import tensor_parallel
from model_config import divisors
from moe import MoEConfig
from run.config import Config, ConfigError, as_flags, flag_name
from run.refusal import multiples, refuse

# --- pairs ----------------------------------------------------------------------------------------


def check_preference(config: Config, dp: int, base_needed: bool) -> None:
    """dp: data-parallel ranks. Raises ConfigError."""
    if not config.preference:
        return
    if config.rl:
        refuse(config, "preference", f"--rl {config.rl} learns from answers; one of both")
    for name, why in {
        "pairs": "learns from pairs of answers; --pairs FILE names them",
        "load": "starts from which model? --load CKPT names it",
    }.items():
        if not getattr(config, name) and (base_needed or name == "pairs"):
            refuse(config, "preference", why)
    check_preference_alone(config)
    check_preference_method(config)
    check_rows_of_pairs(config, dp)


def check_preference_alone(config: Config) -> None:
    """What --preference does not go with. Raises ConfigError."""
    for name in ("data", "val_data", "sft", "sft_val", "prompt_config", "pack", "document_mask"):
        value = getattr(config, name)
        if value:
            words = f" {' '.join(value)}" if isinstance(value, list) else ""
            raise ConfigError(
                f"{flag_name(name)}{words}: --preference {config.preference} learns from the pairs"
                " of --pairs; one of both"
            )
    if config.fp8 != "off":
        rule = (
            "scales depend on what is computed together, so an answer would have other rewards in"
            " another batch; --fp8 off would fit"
        )
        refuse(config, "fp8", rule)


def check_preference_method(config: Config) -> None:
    """What reward models and DPO have each. Raises ConfigError."""
    if config.preference == "reward":
        if config.beta is not None:
            refuse(config, "beta", "is of --preference dpo; a reward model has none")
        if config.peft:
            rule = (
                "leaves the head as it is, and a reward model learns a new one; leave it out, or"
                " --preference dpo would fit"
            )
            refuse(config, "peft", rule)
        return
    if config.beta is not None and not 0 < config.beta <= 1000:
        refuse(config, "beta", "must be above 0 and at most 1000; the default is 0.1")
    for name in ("dropout", "lora_dropout"):
        if getattr(config, name):
            rule = (
                "--preference dpo has none: the model before training, which it is compared with,"
                " is computed without; 0 would fit"
            )
            refuse(config, name, rule)


def check_rows_of_pairs(config: Config, dp: int) -> None:
    """Each micro-batch has whole pairs. Raises ConfigError."""
    share = config.global_batch_size // dp
    if share % 2:
        rule = (
            f"leaves {share} rows for each of {dp} data-parallel ranks, and a pair of answers is"
            f" two rows; {multiples(config.global_batch_size, 2 * dp)}"
        )
        refuse(config, "global_batch_size", rule)
    micro = config.micro_batch(dp)
    if micro % 2:
        pairs = [n for n in range(2, share + 1, 2) if share % n == 0]
        rule = f"a pair of answers is two rows; {', '.join(map(str, pairs[:4]))} would fit"
        raise ConfigError(f"--micro-batch-size {micro}: {rule}")


# --- answers --------------------------------------------------------------------------------------

# published runs update up to four times from the same answers
MOST_EPOCHS = 1000


def check_rl(config: Config, model: MoEConfig, world: int, base_needed: bool) -> None:
    """Raises ConfigError or RewardError."""
    if not config.rl:
        return
    for name, why in {
        "load": "--load CKPT, the model that answers",
        "prompts": "--prompts FILE, which has a prompt on each line",
        "reward": "--reward FILE.py:FUNCTION, or --reward RUN, a run of --preference reward",
    }.items():
        if base_needed and not getattr(config, name):
            raise ConfigError(f"--rl {config.rl} needs {why}")
    check_rl_alone(config)
    check_rl_numbers(config, model, world)


def check_rl_alone(config: Config) -> None:
    """What --rl does not go with. Raises ConfigError."""
    for name in ("data", "val_data", "sft", "pairs", "prompt_config", "pack", "document_mask"):
        if getattr(config, name):
            raise ConfigError(
                f"{flag_name(name)}: --rl {config.rl} learns from answers to --prompts; one of both"
            )
    if config.fp8 != "off":
        rule = "scales depend on what is computed together, so answers would have other"
        refuse(config, "fp8", f"{rule} log-probabilities in training than when they were written")
    for name in ("dropout", "lora_dropout"):
        if getattr(config, name):
            refuse(config, name, "--rl has none: the answers are written without it")


def check_rl_numbers(config: Config, model: MoEConfig, world: int) -> None:
    """Raises ConfigError."""
    size = config.answers_per_prompt
    least = 2 if config.rl == "grpo" else 1
    if size < least:
        refuse(config, "group_size", f"must be at least {least}")
    if config.global_batch_size % size:
        rule = (
            f"must be divisible by --group-size {size}; {multiples(config.global_batch_size, size)}"
        )
        refuse(config, "global_batch_size", rule)
    if not 1 <= config.answer_tokens < model.seq_length:
        rule = f"must be from 1 to below --seq-length {model.seq_length}: a prompt stands before it"
        refuse(config, "answer_tokens", rule)
    if not 1 <= config.rl_epochs <= MOST_EPOCHS:
        rule = f"must be from 1 to {MOST_EPOCHS}: answers that old teach nothing"
        refuse(config, "rl_epochs", rule)
    for name, low, high in (("clip_range", 0, 1), ("gae_lambda", 0, 1), ("beta", 0, 1000)):
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            refuse(config, name, f"must be from {low} to {high}")
    if config.critic_lr is not None and config.critic_lr < (config.min_lr or 0):
        rule = f"must be at least --min-lr {config.min_lr}, to which the cosine comes down"
        refuse(config, "critic_lr", rule)
    check_rollout_layout(config, model, world)


def check_rollout_layout(config: Config, model: MoEConfig, world: int) -> None:
    """Raises ConfigError."""
    tp, layers = config.rollout_tp or 1, model.num_layers
    for name, ranks in (("rollout_tp", world), ("rollout_pp", world // max(tp, 1))):
        n = getattr(config, name)
        if n is not None and (n < 1 or ranks % n):
            refuse(config, name, f"must divide the {ranks} ranks; {divisors(ranks, n)} would fit")
    with as_flags(tp="rollout_tp"):
        tensor_parallel.check(model, tp, world)
    if layers % (config.rollout_pp or 1):
        fit = divisors(layers, config.rollout_pp)
        refuse(config, "rollout_pp", f"must divide the {layers} layers; {fit} would fit")
    if (config.rollout_tp or config.rollout_pp) and config.ep > 1:
        refuse(config, "ep", "experts that are spread over ranks write answers where they are")
