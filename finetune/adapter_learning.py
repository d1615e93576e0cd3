"""A run that learns LoRA, bottleneck adapters or IA3 (adapter_layers.py) for a frozen model: its
flags (--peft), and what it trains, loads and saves.

`PeftConfig` is a part of the configuration of every fine-tuning run. `Adapters` changes these
functions of finetune/frozen_base.py:

    after_model_parallel    adapter_layers.apply
    extra_state             what a checkpoint says about its adapter
    check_base              whether a run that goes on computes the same with it

and `num_learned`, for the line at the start.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from base.model_config import MoEConfig
from finetune import adapter_layers
from finetune.adapter_files import num_parameters, open_adapter
from finetune.adapter_layers import AdapterConfig, targets_of
from finetune.frozen_base import FrozenBase
from run.checkpoint import CheckpointError
from run.config import RunConfig, as_flags, flag
from run.presets import lr_of_model
from run.pretraining import Config, Pretraining
from run.rules import Need
from run.task import Task, WholeModel

LORA_FLAGS = ("lora_rank", "lora_alpha", "lora_dropout")
# QLoRA, arXiv 2305.14314, appendix B.2; arXiv 1902.00751, section 3.1; 2205.05638, section 4.1
LEARNING_RATES = {"lora": 2e-4, "adapter": 1e-3, "ia3": 3e-3}
NEEDS = (
    Need(
        ("optimizer",),
        lambda run: not run.config.peft,
        "orthogonalises whole matrices, and adapters are factors or vectors",
    ),
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
)

# --- what a run trains, loads and saves -----------------------------------------------------------


def adapter_config(config) -> AdapterConfig:
    """What --peft and its flags ask for. config: of the run, a PeftConfig."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(AdapterConfig)}
    return AdapterConfig(**given | {"peft_targets": tuple(config.peft_targets)})


class Adapters(FrozenBase):
    learned_things = "adapter"

    def after_model_parallel(self, stage) -> None:
        settings = adapter_config(self.config)
        adapter_layers.apply(stage, settings, self.groups.tp, self.config.sequence_parallel)

    @property
    def dropout(self) -> bool:
        return super().dropout or self.config.lora_dropout > 0

    def is_of_base(self, name: str) -> bool:
        return not adapter_layers.is_adapter(name)

    def num_learned(self) -> int:
        """The number in all pipeline stages: this rank has its own stage only."""
        return num_parameters(adapter_config(self.config), self.model_config)

    def check_base(self, path: Path, index: dict) -> None:
        """Raises CheckpointError too for what no shape tells: another scale, or fewer targets."""
        super().check_base(path, index)
        before = open_adapter(path, self.config.shape_class).config
        then, now = (
            {
                "--lora-alpha": config.lora_alpha if config.peft == "lora" else None,
                "--peft-targets": " ".join(sorted(targets_of(config, self.model_config))),
            }
            for config in (before, adapter_config(self.config))
        )
        for name, value in now.items():
            if value != then[name]:
                rule = f"the adapter in {path} was trained with {name} {then[name]}"
                raise CheckpointError(f"{name} {value}: {rule}; give that, or another --out")

    def extra_state(self) -> dict:
        return super().extra_state() | {"adapter": dataclasses.asdict(adapter_config(self.config))}


# --- flags ----------------------------------------------------------------------------------------


@dataclass
class PeftConfig(RunConfig):
    """The flags of an adapter."""

    needs: ClassVar[tuple] = NEEDS

    # adapters
    peft: str | None = flag(
        None,
        "learn lora, adapter (bottlenecks) or ia3 parameters; the model of --load stays frozen",
        ("lora", "adapter", "ia3"),
    )
    lora_rank: int = flag(8, "r, the rank of LoRA's update")
    lora_alpha: float = flag(16.0, "LoRA's update is scaled by alpha / rank")
    lora_dropout: float = flag(0.0, "probability, for the input of LoRA")
    adapter_size: int = flag(32, "inner size of a bottleneck adapter")
    peft_targets: list[str] = flag(
        [],
        "where: for lora of query key value output gate up down, for ia3 of key value down, for "
        "adapter of attention mlp; the default is all",
        metavar="NAME",
    )

    @property
    def frozen(self) -> bool:
        return bool(self.peft)

    @property
    def unpredicted(self) -> str:
        if self.peft in (None, "lora") and not self.peft_targets and not self.lora_dropout:
            return ""
        return "trains another adapter than LoRA without dropout in all matrices"

    def learned(self) -> WholeModel:
        """Which parameters learn."""
        return Adapters() if self.peft else WholeModel()

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        super().check(model, world, base_needed)
        if not self.peft:
            return
        if base_needed and not self.load:
            self.refuse("peft", "for which model? --load CKPT names it")
        with as_flags():
            adapter_layers.check(adapter_config(self), model, self.tp)

    def default_lr(self) -> tuple[float, str]:
        if self.peft:
            return LEARNING_RATES[self.peft], f"--peft {self.peft}"
        return super().default_lr()


def lr_beside_reference(config: PeftConfig) -> tuple[float, str]:
    """The default of --lr where the model is held near the one of --load: a tenth of what other
    fine-tuning has. config: has a `method`."""
    if config.peft:
        rate, what = PeftConfig.default_lr(config)
        return rate / 10, f"--method {config.method} {what}"
    rate, what = lr_of_model(config)
    return rate / 100, f"--method {config.method} of {what}"


@dataclass
class TextPeftConfig(PeftConfig, Config):
    """Every flag of finetune/adapters.py."""

    command: ClassVar[str] = "-m finetune.adapters"
    purpose: ClassVar[str] = "Train an adapter of a frozen model on text."
    needs: ClassVar[tuple] = (*Config.needs, *NEEDS)

    peft: str | None = flag(
        "lora",
        "learn lora, adapter (bottlenecks) or ia3 parameters; the model of --load stays frozen",
        ("lora", "adapter", "ia3"),
    )

    def task(self) -> Task:
        return Pretraining(self.learned())
