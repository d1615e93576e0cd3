"""The command of finetune/preference.py: a reward model, or DPO, from pairs of answers.

python -m finetune.preference --method dpo --load CKPT --data pairs.jsonl --out runs/dpo
python -m finetune.preference --method reward --load CKPT --data pairs.jsonl --out runs/reward
"""

from dataclasses import dataclass
from typing import ClassVar

import train
from base.model_config import MoEConfig
from finetune.adapter_training import PeftConfig, lr_beside_reference
from finetune.preference_learning import DPOTask, RewardTask
from finetune.sft_command import ChatConfig, check_answers
from run.config import ConfigError, flag
from run.rules import Need, multiples
from run.task import Task


@dataclass
class PreferenceConfig(ChatConfig):
    """Every flag of finetune/preference.py."""

    command: ClassVar[str] = "-m finetune.preference"
    purpose: ClassVar[str] = "Learn from pairs of answers."
    needs: ClassVar[tuple] = (
        *PeftConfig.needs,
        Need(
            ("beta",),
            lambda run: run.config.method == "dpo",
            "is of --method dpo; a reward model has none",
        ),
        Need(
            ("head_chunk",),
            lambda run: run.config.method != "reward",
            "a reward model has one number for a token, and no logits; leave it out",
        ),
    )
    needed: ClassVar[dict[str, str]] = {
        "data": "FILE, pairs of answers",
        "load": "CKPT, the model that it begins with",
    }
    keeps_dropout: ClassVar[bool] = False
    # a pair of answers is two rows
    least_rows: ClassVar[int] = 2

    method: str = flag(
        "dpo",
        "reward: a model that says how good an answer is; dpo: the model of --load itself",
        ("reward", "dpo"),
    )
    data: list[str] = flag(
        [],
        "JSON lines with prompt, chosen and rejected; a twentieth is held out",
        metavar="FILE",
    )
    val_data: list[str] = flag(
        [], "pairs to evaluate on; all of --data is then trained on", metavar="FILE"
    )
    beta: float | None = flag(
        None, "weight of the KL divergence from the model of --load; the default is 0.1"
    )

    @property
    def value_head(self) -> bool:
        return self.method == "reward"

    @property
    def unpredicted(self) -> str:
        return "learns from pairs of answers"

    @property
    def kl_weight(self) -> float:
        """--beta or its default."""
        return 0.1 if self.beta is None else self.beta

    def task(self) -> Task:
        return RewardTask() if self.method == "reward" else DPOTask(self.learned())

    def default_lr(self) -> tuple[float, str]:
        return super().default_lr() if self.method == "reward" else lr_beside_reference(self)

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        check_answers(self, no_dropout=self.method == "dpo")
        check_method(self)
        check_rows(self, world // self.tp // self.pp)
        super().check(model, world, base_needed)


def check_method(config: PreferenceConfig) -> None:
    """What reward models and DPO have each. Raises ConfigError."""
    if config.method == "reward":
        if config.peft:
            rule = (
                "leaves the head as it is, and a reward model learns a new one; leave it out, or"
                " --method dpo would fit"
            )
            config.refuse("peft", rule)
        return
    if config.beta is not None and not 0 < config.beta <= 1000:
        config.refuse("beta", "must be above 0 and at most 1000; the default is 0.1")


def check_rows(config: PreferenceConfig, dp: int) -> None:
    """Each micro-batch has whole pairs. Raises ConfigError."""
    share = config.global_batch_size // dp
    if share % 2:
        rule = (
            f"leaves {share} rows for each of {dp} data-parallel ranks, and a pair of answers is"
            f" two rows; {multiples(config.global_batch_size, 2 * dp)}"
        )
        config.refuse("global_batch_size", rule)
    micro = config.micro_batch(dp)
    if micro % 2:
        pairs = [n for n in range(2, share + 1, 2) if share % n == 0]
        rule = f"a pair of answers is two rows; {', '.join(map(str, pairs[:4]))} would fit"
        raise ConfigError(f"--micro-batch-size {micro}: {rule}")


def main(argv: list[str]) -> int:
    return train.main(argv, PreferenceConfig)
