"""The command of finetune/reinforcement.py: a model writes answers, and learns from their rewards.

python -m finetune.reinforcement --method grpo --load CKPT --data p.jsonl --reward FILE.py:FUNCTION
python -m finetune.reinforcement --method ppo --load CKPT --data p.jsonl --reward runs/reward
"""

from dataclasses import dataclass, fields
from typing import ClassVar

import tensor_parallel
import train
from base.model_config import MoEConfig, divisors
from finetune.adapter_training import PeftConfig, lr_beside_reference
from finetune.preference_command import PreferenceConfig
from finetune.reinforcement_learning import ReinforcementTask
from finetune.rewards import is_function
from finetune.sft_command import ChatConfig, check_answers
from run import checkpoint, least_memory
from run.config import MODEL_FLAGS, ConfigError, RunConfig, as_flags, flag
from run.rules import Need, check_techniques, multiples
from run.task import Task

# published runs update up to four times from the same answers
MOST_EPOCHS = 1000
# --beta where it is not given
KL_WEIGHTS = {"ppo": 0.05, "grpo": 0.04}


@dataclass
class ReinforcementConfig(ChatConfig):
    """Every flag of finetune/reinforcement.py."""

    command: ClassVar[str] = "-m finetune.reinforcement"
    purpose: ClassVar[str] = "Learn from rewards for answers."
    needs: ClassVar[tuple] = (
        *PeftConfig.needs,
        Need(
            ("gae_lambda", "critic_lr"),
            lambda run: run.config.method == "ppo",
            "is only for --method ppo; grpo has no critic",
        ),
        Need(
            ("clip_range",),
            lambda run: run.config.epochs > 1,
            "clips updates after the first; --epochs 2 would have one",
        ),
    )
    needed: ClassVar[dict[str, str]] = {
        "load": "CKPT, the model that answers",
        "data": "FILE, which has a prompt on each line",
        "reward": "FILE.py:FUNCTION, or a run of finetune.preference --method reward",
    }
    keeps_dropout: ClassVar[bool] = False

    method: str = flag(
        "grpo",
        "ppo has a critic; grpo compares the answers of a group",
        ("ppo", "grpo"),
    )
    data: list[str] = flag(
        [],
        "JSON lines with a prompt, or messages, that the model answers; a twentieth is held out",
        metavar="FILE",
    )
    reward: str | None = flag(
        None,
        "gives each answer a number: a run of finetune.preference --method reward, or"
        " FILE.py:FUNCTION, called with (prompt, answer, line of --data)",
        metavar="{CKPT,FILE:FUNCTION}",
    )
    beta: float | None = flag(
        None,
        "weight of the KL divergence from the model of --load; the default is 0.05 for ppo, 0.04"
        " for grpo",
    )
    answer_tokens: int = flag(64, "tokens of an answer at most, its end token included")
    group_size: int | None = flag(
        None, "answers to each prompt of a step; the default is 8 for grpo, 1 for ppo"
    )
    epochs: int = flag(2, "updates from the answers of a step; later ones are clipped")
    clip_range: float = flag(0.2, "how far updates may change a token's probability: a share")
    gae_lambda: float = flag(0.95, "of ppo's advantages: 1 has no bias, 0 the least variance")
    critic_lr: float | None = flag(None, "of ppo's critic; the default is --lr")
    rollout_tp: int | None = flag(
        None, "tensor-parallel ranks that write answers; the default is the layout of training"
    )
    rollout_pp: int | None = flag(
        None, "pipeline ranks that write answers; the default is the layout of training"
    )

    @property
    def unpredicted(self) -> str:
        return "writes what it learns from"

    @property
    def answers_per_prompt(self) -> int:
        """--group-size or its default."""
        default = 8 if self.method == "grpo" else 1
        return default if self.group_size is None else self.group_size

    @property
    def kl_weight(self) -> float:
        """--beta or its default."""
        return KL_WEIGHTS[self.method] if self.beta is None else self.beta

    def task(self) -> Task:
        return ReinforcementTask(self.learned())

    def default_lr(self) -> tuple[float, str]:
        return lr_beside_reference(self)

    def of_values(self, load: str | None) -> "ValueConfig":
        """The configuration of a reward model or critic, with the shape of --load."""
        shape = dict.fromkeys(MODEL_FLAGS) if load != self.load else {}
        micro = self.micro_batch_size or (1 if self.pp > 1 else None)
        common = {field.name: getattr(self, field.name) for field in fields(RunConfig)}
        changes = dict(load=load, micro_batch_size=micro, clip_range=self.clip_range, **shape)
        return ValueConfig(**common | changes)

    def bytes_beside(self, model: MoEConfig, precision: str, ranks: dict, learner: int) -> int:
        """A critic like the policy, and the weights of a frozen reference."""
        frozen = least_memory.state_parts(
            model, precision, self.optimizer_state, self.zero_stage, ranks
        )[0]
        return int((learner if self.method == "ppo" else 0) + (0 if self.peft else frozen))

    def known_micro_batch(self, dp: int) -> int:
        """How many rows the answers will fill is not known."""
        return self.micro_batch_size or 1

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        check_answers(self)
        check_numbers(self, model)
        check_rollout_layout(self, model, world)
        super().check(model, world, base_needed)
        if self.reward and not is_function(self.reward):
            check_reward_model(self, model, world)


@dataclass
class ValueConfig(PreferenceConfig):
    """The configuration of the reward model and the critic, which see the policy's rows."""

    least_rows: ClassVar[int] = 1

    method: str = flag("reward", "a value for each token", ("reward",))
    clip_range: float = flag(0.2, "that of the policy")


def check_numbers(config: ReinforcementConfig, model: MoEConfig) -> None:
    """Raises ConfigError."""
    size = config.answers_per_prompt
    least = 2 if config.method == "grpo" else 1
    if size < least:
        config.refuse("group_size", f"must be at least {least}")
    if config.global_batch_size % size:
        rule = (
            f"must be divisible by --group-size {size}; {multiples(config.global_batch_size, size)}"
        )
        config.refuse("global_batch_size", rule)
    if not 1 <= config.answer_tokens < model.seq_length:
        rule = f"must be from 1 to below --seq-length {model.seq_length}: a prompt stands before it"
        config.refuse("answer_tokens", rule)
    if not 1 <= config.epochs <= MOST_EPOCHS:
        rule = f"must be from 1 to {MOST_EPOCHS}: answers that old teach nothing"
        config.refuse("epochs", rule)
    for name, low, high in (("clip_range", 0, 1), ("gae_lambda", 0, 1), ("beta", 0, 1000)):
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            config.refuse(name, f"must be from {low} to {high}")
    if config.critic_lr is not None and not (config.min_lr or 0) <= config.critic_lr < 2**31:
        rule = f"must be at least --min-lr {config.min_lr or 0}, to which the cosine comes down"
        config.refuse("critic_lr", rule)


def check_rollout_layout(config: ReinforcementConfig, model: MoEConfig, world: int) -> None:
    """Raises ConfigError."""
    tp, layers = config.rollout_tp or 1, model.num_layers
    for name, ranks in (("rollout_tp", world), ("rollout_pp", world // max(tp, 1))):
        n = getattr(config, name)
        if n is not None and (n < 1 or ranks % n):
            config.refuse(name, f"must divide the {ranks} ranks; {divisors(ranks, n)} would fit")
    with as_flags(tp="rollout_tp"):
        tensor_parallel.check(model, tp, world)
    if layers % (config.rollout_pp or 1):
        fit = divisors(layers, config.rollout_pp)
        config.refuse("rollout_pp", f"must divide the {layers} layers; {fit} would fit")
    if (config.rollout_tp or config.rollout_pp) and config.ep > 1:
        config.refuse("ep", "experts that are spread over ranks write answers where they are")


def check_reward_model(config: ReinforcementConfig, model: MoEConfig, world: int) -> None:
    """Whether the model of --reward fits the layout and the vocabulary. Raises ConfigError."""
    its = config.of_values(config.reward)
    try:
        # not its.base(): in a run that goes on, that falls back to the policy's own checkpoints
        path = checkpoint.find(config.reward)
    except checkpoint.CheckpointError as e:
        rule = "; a function is named FILE.py:FUNCTION" if config.reward.endswith(".py") else ""
        raise ConfigError(f"--reward {e}{rule}") from None
    if "model.head.value.weight" not in checkpoint.read_index(path)["tensors"]:
        rule = "holds no reward model; finetune.preference --method reward trains one"
        config.refuse("reward", f"{rule}, and FILE.py:FUNCTION names a function")
    with as_flags():
        other = its.model_config()
    check_techniques(its, other, world)
    if other.vocab_size != model.vocab_size:
        rule = f"knows {other.vocab_size} tokens, and the model of --load {model.vocab_size}"
        config.refuse("reward", f"{rule}; one that was trained from the same base would fit")
    if other.seq_length < model.seq_length:
        rule = f"reads {other.seq_length} tokens, and --seq-length is {model.seq_length}"
        config.refuse("reward", f"{rule}; --seq-length {other.seq_length} would fit")


def main(argv: list[str]) -> int:
    return train.main(argv, ReinforcementConfig)
