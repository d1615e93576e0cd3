"""The other models of reinforcement learning: each is a trainer of its own, on the policy's mesh.

    policy         the model that learns to answer      train.Trainer itself
    reference      the model of --load, frozen          log-probabilities: how far is the policy?
    RewardModel    the model of --reward, frozen        one number for an answer
    Critic         learns the expected reward (ppo)     one number for each token

A frozen model has no gradients and no optimizer state. All of them are built by train.Trainer, so
every technique of the run changes them alike: tensor parallelism shards a critic as it shards the
policy. What differs is in the tasks below (run/task.py has all functions). All of them read the
same rows: R rows of s tokens, into which the answers of a step are packed (answer_rows.py).
"""

from torch import Tensor

import schedules
import sharding
from finetune import policy_gradients, preference
from finetune.preference import ValueModel
from run import checkpoint
from run.task import Task, WholeModel, outputs
from train import Trainer


def beside(policy: Trainer, task: Task, config) -> Task:
    """The task, with a trainer of its own on the mesh of the policy."""
    Trainer(config, policy.device, policy.groups, task)
    return task


def schedule_of(config, m: int) -> schedules.Schedule:
    """A pipeline's schedule of m micro-batches. It is the same list each time, so its transfers are
    added once."""
    return schedules.cached(config.pipeline_schedule, config.pp, m, config.virtual_stages)


class OnRows(Task):
    """The task of a model that sees the answers of a step, packed into rows (answer_rows.py)."""

    rows = None
    # routers use their raw logits, as they did when the answers were written
    balances_experts = False

    def use_rows(self, rows) -> None:
        """Work on these rows from now on. Their number R differs from step to step, and so does the
        number of micro-batches, which a pipeline's schedule is made for."""
        self.rows = rows
        trainer = self.trainer
        share = rows.num_sequences // trainer.dp
        if self.groups.pp:
            trainer.schedule = schedule_of(self.config, share // trainer.micro_batch)
        elif self.config.micro_batch_size is None:
            trainer.micro_batch = share

    def samples(self, step: int) -> range:
        return range(self.rows.num_sequences)

    def outputs(self, rows) -> Tensor:
        """What the head gives at every position of the rows, [R, s] float64 on the CPU: the losses
        of the targets, or values. On every rank. A collective."""
        self.use_rows(rows)
        trainer = self.trainer
        b, share = trainer.micro_batch, rows.num_sequences // trainer.dp
        first = trainer.dp_rank * share
        batches = []
        for start in range(first, first + share, b):
            batches.append(rows.batch(range(start, start + b)).to(trainer.device))
        return outputs(trainer, batches, (rows.num_sequences, rows.s))


class FrozenModel(WholeModel):
    """No parameter learns: the model only runs forward. As the learned part of `OnRows` it is the
    reference: `outputs` gives - log π_ref of each target."""

    trains = False

    def before_techniques(self, stage) -> None:
        super().before_techniques(stage)
        stage.requires_grad_(False)

    def load_from(self, path) -> None:
        """path: of --load or --reward. A collective. Raises CheckpointError."""
        named = sharding.named_parameters(*self.trainer.stages)
        parameters = {f"model.{name}": p for name, p in named}
        fixed = checkpoint.fixed_fields(self.model_config, True)
        checkpoint.load(checkpoint.find(path), parameters, fixed)


class RewardModel(FrozenModel):
    """The model of --reward: `outputs` gives a value at each position, and the one at an answer's
    last token is its reward."""

    def after_model_parallel(self, stage) -> None:
        preference.apply(stage, self.groups.tp, self.config.sequence_parallel)
        # the value head is new since `before_techniques`
        stage.requires_grad_(False)


class Learner(OnRows):
    """The policy or the critic: its loss is about the answers of a step."""

    # What the updates of a step need (advantages ..), and what its loss is divided by.
    targets: policy_gradients.Targets | None = None
    count = 0

    def learn_from(self, rows, targets: policy_gradients.Targets, count: int) -> None:
        """targets: [R, s] each."""
        self.use_rows(rows)
        self.targets = targets
        self.count = count

    def loss_count(self, dataset, samples) -> int:
        return self.count


class Critic(Learner):
    """Learns the value of each token, V: the reward that is expected before the token is known. Its
    weights and its optimizer are in the run's checkpoints, beside the policy's."""

    def __init__(self):
        super().__init__(ValueModel("the critic"))

    def total_loss(self, y: Tensor, batch) -> Tensor:
        targets = self.targets.at(batch.samples.cpu(), y.device)
        return policy_gradients.critic_loss(y, targets, self.config.clip_range)
