"""A run that learns LoRA, bottleneck adapters or IA3 for a frozen model.

    python -m finetune.adapters --load runs/base --data FILE --peft lora --out runs/lora

It changes these functions of finetune/frozen_base.py:

    after_model_parallel    adapters.apply
    extra_state             what a checkpoint says about its adapter
    check_base              whether a run that goes on computes the same with it

and `num_learned`, for the line at the start.
"""

import dataclasses
from pathlib import Path

from finetune import adapters
from finetune.adapter_config import AdapterConfig, targets_of
from finetune.adapter_files import num_parameters, open_adapter
from finetune.frozen_base import FrozenBase
from run.checkpoint import CheckpointError


def adapter_config(config) -> AdapterConfig:
    """What --peft and its flags ask for. config: of the run, a PeftConfig
    (adapter_training.py)."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(AdapterConfig)}
    return AdapterConfig(**given | {"peft_targets": tuple(config.peft_targets)})


class Adapters(FrozenBase):
    learned_things = "adapter"

    def after_model_parallel(self, stage) -> None:
        settings = adapter_config(self.config)
        adapters.apply(stage, settings, self.groups.tp, self.config.sequence_parallel)

    @property
    def dropout(self) -> bool:
        return super().dropout or self.config.lora_dropout > 0

    def is_of_base(self, name: str) -> bool:
        return not adapters.is_adapter(name)

    def num_learned(self) -> int:
        """The number in all pipeline stages: this rank has its own stage only."""
        return num_parameters(adapter_config(self.config), self.model_config)

    def check_base(self, path: Path, index: dict) -> None:
        """Raises CheckpointError too for what no shape tells: another scale, or fewer targets."""
        super().check_base(path, index)
        then, now = (
            {
                "--lora-alpha": config.lora_alpha if config.peft == "lora" else None,
                "--peft-targets": " ".join(sorted(targets_of(config, self.model_config))),
            }
            for config in (open_adapter(path).config, adapter_config(self.config))
        )
        for flag, value in now.items():
            if value != then[flag]:
                raise CheckpointError(
                    f"{flag} {value}: the adapter in {path} was trained with {flag} {then[flag]}."
                    " Give the same value, or start again with another --out"
                )

    def extra_state(self) -> dict:
        return super().extra_state() | {"adapter": dataclasses.asdict(adapter_config(self.config))}
