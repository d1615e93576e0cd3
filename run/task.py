"""What a run learns: a task, beside a trainer that is the same for every type of training.

    trainer = Trainer(config, device, groups, task)

A task says what the data is, what the loss is and what it is a mean of, what is reported, evaluated
and saved. In the class `Task` every token of the data counts; each type of training changes some of
its methods (pretraining.py, finetune/). `task.learned` says which parameters learn:

    WholeModel     all of them
    FrozenBase     a few new ones beside a frozen model: adapters, prompts (finetune/frozen_base.py)

The trainer asks each of the two its own questions, and both those of `PartOfTrainer`.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import sharding
from base.model_config import flops_per_token
from run import checkpoint
from run.data import Batch

# How many tokens of the held-out text the sample continues.
SAMPLE_BEGINS = 16


class PartOfTrainer:
    """What a trainer asks both, the learned parameters first: what a run begins with, and what its
    checkpoints say."""

    def join(self, trainer) -> None:
        """Called before the model is built."""
        self.trainer = trainer

    @property
    def config(self):
        return self.trainer.config

    @property
    def groups(self):
        return self.trainer.groups

    @property
    def model_config(self):
        return self.trainer.model_config

    def load_base(self, tokenizer) -> None:
        """Load weights that are not in the run's own checkpoints."""

    def check_base(self, path: Path, index: dict) -> None:
        """Check that the run's checkpoint at `path` belongs to what `load_base` has loaded."""

    def load_weights(self, world) -> None:
        """Load what a new run starts from."""

    def extra_state(self) -> dict:
        """Further fields of a checkpoint's index."""
        return {}

    def describe(self) -> str:
        """Text for the first line of a run, after the number of parameters."""
        return ""

    def statistics(self) -> dict[str, Tensor]:
        """Further fields of the step's line in metrics.jsonl, on the device. A collective."""
        return {}


class WholeModel(PartOfTrainer):
    """Every parameter learns."""

    # Whether anything learns. Otherwise the model only runs forward.
    trains = True
    # FLOPs of a step / FLOPs of training every parameter.
    share_of_flops = 1.0

    @property
    def dropout(self) -> bool:
        """Whether a forward needs a key for dropout."""
        return self.model_config.dropout > 0

    @property
    def balances_experts(self) -> bool:
        """Whether routers are balanced. Otherwise they use their raw logits."""
        return self.trainer.task.balances_experts

    def before_techniques(self, stage) -> None:
        """Change a stage of the model before any technique does."""
        stage.train(self.balances_experts)

    def after_model_parallel(self, stage) -> None:
        """Change a stage after tensor and sequence parallelism, before recomputation."""

    def kept(self) -> dict[str, Tensor]:
        """Frozen tensors that are in the run's checkpoints, by global name: so these have a whole
        model."""
        named = sharding.named_parameters(*self.trainer.stages)
        return {f"model.{name}": p for name, p in named if not p.requires_grad}

    def load_weights(self, world) -> None:
        """Start from the weights of --load."""
        if self.config.load:
            path = checkpoint.find(self.config.load)
            self.trainer.checkpoints.load(path, weights_only=True)
            world.say(f"starting from the weights of {path}")

    def statistics(self) -> dict[str, Tensor]:
        """The load of the experts."""
        if not self.model_config.num_experts or not self.balances_experts:
            return {}
        groups = [group for group in (self.groups.replicas, self.groups.pp) if group]
        layers = self.trainer.expert_layers
        return layers.statistics(self.model_config, groups, self.trainer.device)


class Task(PartOfTrainer):
    """What a run learns, and how that is measured. This one is pretraining: every token of the data
    is predicted from those before it. Other types of training extend it."""

    # Whether routers are balanced, where they learn.
    balances_experts = True
    # The file in --out that shows that a run is done.
    last_file = "sample.txt"
    # The field of metrics.jsonl for the result of `evaluate`.
    eval_field = "eval_loss"
    # What `sample` gives, for the last lines on the screen.
    sample_name = "a sample (generate.py makes more)"
    # Whether all data-parallel ranks take part in `sample`, and not only the first one.
    sampled_by_all = False
    # The class of what the data set's `batch` returns.
    batch_class = Batch
    # What a user should know where a run goes on with other data.
    other_data = ""
    # The steps of the checkpoint that this run goes on from, and the samples that they have taken.
    steps_done = taken = 0

    def __init__(self, learned: WholeModel | None = None):
        """learned: which parameters learn; the default is all."""
        self.learned = learned or WholeModel()

    def open_data(self, config, world, tokenizer):
        """(training set, held-out set), opened before there is a trainer. Raises InputError or
        DataError."""
        raise NotImplementedError

    def built(self) -> None:
        """Called when model, optimizer and checkpoints exist."""

    def before_steps(self, run) -> None:
        """Called before the first step. run: a TrainingRun."""

    # --- one step

    def data_of_step(self, step: int, dataset):
        """What this step learns from: the data set, or something made of it."""
        return dataset

    def samples(self, step: int) -> range:
        """Numbers of the samples that a step, counted from 1, computes with."""
        return self.global_batch(step)

    def global_batch(self, step: int) -> range:
        """Numbers of the samples that a step takes from the data set."""
        _, _, rampup = self.config.rampup_batch_size or (0, 0, 0)
        steps = step - 1 - self.steps_done
        return batch_after(steps, self.taken, self.config.batch_sizes, rampup)

    def go_on(self, steps_done: int, taken: int) -> None:
        """Continue after steps that took so many samples, perhaps in batches of another size."""
        self.steps_done, self.taken = steps_done, taken

    def total_loss(self, y: Tensor, batch) -> Tensor:
        """What a micro-batch adds to the loss, before the division by `loss_count`. y: [b, s], the
        head's output, by default the loss of each token."""
        return (y * batch.loss_mask).sum()

    def loss_count(self, dataset, samples) -> int:
        """How many terms the mean loss of these samples has, known before any forward."""
        return dataset.counted_tokens(samples)

    # --- what it reports

    def processed(self, step: int, dataset) -> tuple[int, int]:
        """(tokens of the loss, tokens that went through the model) of the step just taken."""
        samples = self.samples(step)
        return dataset.counted_tokens(samples), len(samples) * dataset.s

    def row_length(self, dataset) -> int:
        """s: tokens of a sequence that goes through the model."""
        return dataset.s

    def flops_per_token(self, s: int) -> float:
        """FLOPs per token of a step on sequences of s tokens."""
        return flops_per_token(self.model_config, s) * self.learned.share_of_flops

    def evaluate(self, dataset, sequences: int) -> float:
        """Mean loss per token over the first `sequences` samples of a held-out dataset."""
        return evaluate(self.trainer, dataset, sequences)

    def eval_statistics(self) -> dict[str, float]:
        """Further fields of a line with an evaluation, from the last `evaluate`."""
        return {}

    # --- what it leaves

    def learners(self) -> dict:
        """The trainers whose weights and optimizer state a checkpoint keeps: prefix -> trainer."""
        return {"": self.trainer}

    def wait_for_parameters(self) -> None:
        """Wait for the parameters before anything but a forward reads them, or a rank ends."""
        for learner in self.learners().values():
            for gradients in learner.gradients:
                gradients.wait_for_parameters()

    def sample(self, tokenizer, held_out) -> str:
        """Text that shows what the model has learned. A collective of the ranks with its parts."""
        # Loaded only when a run ends.
        from run import finish

        return finish.sample(self.trainer, tokenizer, held_out)

    def sample_prompt(self, tokenizer, held_out) -> tuple[list[int], tuple[int, ...]]:
        """(ids that the sample at the end of training continues, ids at which it stops)"""
        return first_ids(held_out), tokenizer.stop_ids

    def data_name(self, corpus: str) -> str:
        """A name for the training data, for titles. corpus: its hash."""
        paths = self.config.data
        return f"{Path(paths[0]).name}{', ..' if len(paths) > 1 else ''} ({corpus})"

    def finish(self, run) -> bool:
        """Called after the last step. True if the task wrote its own results; then no sample is
        generated."""
        return False


def batch_after(steps: int, taken: int, sizes: range, rampup: int) -> range:
    """Numbers of the samples of the step that comes after `steps` steps, before which `taken`
    samples were taken. Of n + 1 sizes, a step has size k, from 0, if it begins before sample
    (k + 1) rampup / n and not before k rampup / n; after `rampup` samples it has the last one
    (Megatron-LM, core/num_microbatches_calculator.py)."""
    for k, size in enumerate(sizes[:-1], 1):
        end = -(-k * rampup // (len(sizes) - 1))
        of_size = min(steps, max(0, -(-(end - taken) // size)))
        taken, steps = taken + of_size * size, steps - of_size
        if taken < end:
            return range(taken, taken + size)
    taken += steps * sizes[-1]
    return range(taken, taken + sizes[-1])


def first_ids(dataset) -> list[int]:
    """The tokens before the first target that counts, or a few tokens where all count."""
    batch = dataset.batch([0])
    first = int(batch.loss_mask[0].long().argmax())
    return batch.tokens[0, : first + 1 if first else SAMPLE_BEGINS].tolist()


# --- the loss on held-out data, under every layout ------------------------------------------------


@torch.no_grad()
def evaluate(trainer, dataset, sequences: int) -> float:
    """Mean loss over the first `sequences` samples of a held-out dataset."""
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)

    def add(batch, y):
        total.add_(trainer.task.total_loss(y, batch))

    run_forward(trainer, list(evaluation_batches(trainer, dataset, sequences)), add)
    for group in (trainer.groups.replicas, trainer.groups.pp):
        if group:
            dist.all_reduce(total, group=group)
    return total.item() / max(1, trainer.task.loss_count(dataset, range(sequences)))


@torch.no_grad()
def run_forward(trainer, batches: list, result) -> None:
    """Run batches of one size forward, as in inference. The rank with the head calls result(batch,
    y) for each. y: [b, s], the head's output for the targets."""
    training = trainer.stages[0].training
    s = batches[0].tokens.shape[1]
    # Under context parallelism each rank has a part of the sequence.
    batches = [trainer.own_tokens(batch) for batch in batches]
    for stage in trainer.stages:
        # Routers use their raw logits.
        stage.eval()
    if trainer.pipeline:
        trainer.pipeline.evaluate(batches, result, s)
    else:
        (stage,) = trainer.stages
        for batch in batches:
            result(batch, stage(batch.tokens, batch.targets, batch.context()))
    for stage in trainer.stages:
        stage.train(training)


def outputs(trainer, batches: list, shape: tuple[int, ...], of=lambda batch, y: y) -> Tensor:
    """What a model gives for each sample of batches, on every rank; 0 where no target counts.
    of(batch, y): [b, ..], from the head's output. shape: [N, ..], in float64. A collective."""
    found = torch.zeros(shape, dtype=torch.float64, device=trainer.device)

    def keep(batch, y):
        counts = batch.loss_mask.any(1)
        found[batch.samples[counts]] = of(batch, y)[counts].double()

    run_forward(trainer, batches, keep)
    for group in filter(None, (trainer.groups.dp, trainer.groups.pp)):
        dist.all_reduce(found, group=group)
    return found.cpu()


def evaluation_batches(trainer, dataset, sequences: int):
    """Yield this rank's batches. All ranks have equally many of one size, because forward passes
    may be collectives; surplus rows are masked."""
    b = trainer.micro_batch
    for start in range(0, sequences, trainer.dp * b):
        mine = range(start + trainer.dp_rank * b, start + (trainer.dp_rank + 1) * b)
        batch = dataset.batch([min(n, sequences - 1) for n in mine])
        counts = torch.tensor([n < sequences for n in mine]).unsqueeze(1)
        yield batch._replace(loss_mask=batch.loss_mask & counts).to(trainer.device)
