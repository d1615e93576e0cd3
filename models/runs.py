"""What the training commands of this folder share: which flags of train.py their models have."""

from dataclasses import dataclass
from typing import ClassVar

from run.config import RunConfig


@dataclass
class ModelRun(RunConfig):
    """The flags of a run that trains a model of this folder. A flag of RunConfig that its models
    have no use for is a constant here."""

    # The fields that are the same in all models of one class, and experts.
    num_kv_heads: ClassVar[None] = None
    norm: ClassVar[None] = None
    positions: ClassVar[None] = None
    activation: ClassVar[None] = None
    sliding_window: ClassVar[None] = None
    num_experts: ClassVar[None] = None
    expert_every: ClassVar[None] = None
    router: ClassVar[None] = None
    router_topk: ClassVar[None] = None
    router_temperature: ClassVar[None] = None
    capacity_factor: ClassVar[None] = None
    aux_loss: ClassVar[None] = None
    z_loss: ClassVar[None] = None
    ep: ClassVar[int] = 1

    @property
    def unpredicted(self) -> str:
        return "trains a model that is no decoder"
