"""Who writes the answers of reinforcement learning: the model that trains, or a copy of its weights
under another layout (--rollout-tp, --rollout-pp).

A decoding step computes one token of each answer, so its time goes into collectives and into
reading weights. The best layout for it is often not that of training: with ZeRO stage 3, every
token would gather all weights.

    trainer.model --resharding.copy()--> model of --rollout-tp, --rollout-pp --> answers

The copy is made before the answers of every step. Without these flags there is no copy.
"""

from datetime import timedelta

import sharding
from base.groups import Groups
from finetune import adapters, resharding
from finetune.adapter_learning import adapter_config
from finetune.rollout import Answer, write_answers
from inference.loading import build_stages, materialise
from run.config import DTYPES


class Writer:
    def __init__(self, trainer):
        """trainer: the policy, train.Trainer."""
        self.trainer = trainer
        self.config = trainer.config
        self.groups = trainer.groups
        self.model = trainer.model
        self.resharding = None
        # With ZeRO stage 3 or with experts on several ranks, a forward pass is a collective of the
        # data-parallel ranks. So a rank whose answers have all ended goes on until all have: they
        # are in lockstep.
        spread = self.config.zero_stage == 3 or self.config.ep > 1
        self.lockstep = self.groups.dp if spread else None
        tp, pp = self.config.rollout_tp, self.config.rollout_pp
        if tp or pp:
            # parameters of the copy are not spread over data-parallel ranks
            self.lockstep = None
            self.build_copy(tp or 1, pp or 1)

    def build_copy(self, tp: int, pp: int) -> None:
        """Another model and another mesh, on the same ranks: tp and pp as asked, and all that
        is left is data parallel."""
        trainer = self.trainer
        if self.groups.all:
            world = self.groups.all.size()
            timeout = timedelta(seconds=self.config.timeout + 60)
            self.groups = Groups.make(trainer.device.type, world, tp, pp, timeout)
        stages = build_stages(trainer.model_config, self.groups)
        if self.config.peft:
            for stage in stages:
                adapters.apply(stage, adapter_config(self.config), self.groups.tp)
        self.model = materialise(stages, self.groups, trainer.device, DTYPES[trainer.precision])
        source = resharding.weights(*trainer.stages)
        target = sharding.named_parameters(*stages)
        self.resharding = resharding.Resharding(source, target, self.groups.all)

    def write(self, prompts, samples: range, step: int, end_tokens) -> list[Answer]:
        """The answers to prompts, in the order of the samples; on every rank. A collective."""
        for gradients in self.trainer.gradients:
            gradients.wait_for_parameters()
        if self.resharding:
            self.resharding.copy()
        return write_answers(
            self.model,
            prompts,
            samples,
            seed=self.config.seed,
            step=step,
            max_tokens=self.config.answer_tokens,
            end_tokens=end_tokens,
            groups=self.groups,
            lockstep=self.lockstep,
        )
