"""What a trainer that is built on train.Trainer may change: the defaults, for pretraining.

prompts/learning.py is the example: it freezes the model, adds prompts, and leaves a prompt file.
tuning/sft_data.py changes the data alone.
"""

from pathlib import Path

from torch import Tensor

import checkpoint
import context_parallel
import moe
from run import opening
from run.evaluation import evaluate
from run.sizes import flops_per_token


class RunHooks:
    # FLOPs of a step over those of training every parameter
    share_of_flops = 1.0
    # in --out: what is there when a run is done
    last_file = "sample.txt"
    # in metrics.jsonl: what `evaluate` gives
    eval_field = "eval_loss"
    # datasets: open_data(config, world, tokenizer) -> (training set, held-out set)
    open_data = staticmethod(opening.open_data)

    def before_techniques(self, stage) -> None:
        """Change a stage of the model before any technique does."""

    def after_model_parallel(self, stage) -> None:
        """Change a stage after tensor and sequence parallelism, before recomputation."""

    def load_base(self, tokenizer) -> None:
        """Load what is not in the run's own checkpoints."""

    def check_base(self, path: Path, index: dict) -> None:
        """Whether the run's checkpoint at `path` belongs to what `load_base` has loaded."""

    def load_weights(self, world) -> None:
        """Before the first step of a new run: start from the weights of --load."""
        if self.config.load:
            path = checkpoint.find(self.config.load)
            self.checkpoints.load(path, weights_only=True)
            world.say(f"starting from the weights of {path}")

    def before_steps(self, run) -> None:
        """When weights and data are there, before the first step. run: a TrainingRun."""

    def own_tokens(self, batch):
        """What this rank sees of a data.Batch."""
        return context_parallel.shard_batch(batch, self.groups.cp) if self.groups.cp else batch

    def total_loss(self, y: Tensor, batch) -> Tensor:
        """What a micro-batch adds to the loss, before it is divided by `loss_count`. y: [b, s] of
        the head, by default the loss of each token."""
        return (y * batch.loss_mask).sum()

    def loss_count(self, dataset, samples) -> int:
        """What the loss is a mean of, counted in these samples: known before any forward."""
        return dataset.counted_tokens(samples)

    def processed(self, step: int, dataset) -> tuple[int, int]:
        """Of a step that was just taken: (tokens of the loss, tokens that went through the
        model)"""
        samples = self.samples(step)
        return dataset.counted_tokens(samples), len(samples) * dataset.s

    def row_length(self, dataset) -> int:
        """s: tokens of a row that goes through the model."""
        return dataset.s

    def flops_per_token(self, s: int) -> float:
        """Of a step on rows of s tokens."""
        return flops_per_token(self.model_config, s) * self.share_of_flops

    def evaluate(self, dataset, sequences: int) -> float:
        """Mean loss per token over the first `sequences` samples of a held-out dataset."""
        return evaluate(self, dataset, sequences)

    def eval_statistics(self) -> dict[str, float]:
        """More fields of a line with an evaluation, from the last `evaluate`."""
        return {}

    def statistics(self) -> dict[str, Tensor]:
        """More fields of the step's line in metrics.jsonl, on the device: the routers'. A
        collective."""
        if not self.model_config.num_experts:
            return {}
        groups = [group for group in (self.groups.replicas, self.groups.pp) if group]
        return moe.statistics(self.model_config, self.expert_layers, groups, self.device)

    def learners(self) -> dict:
        """The trainers whose weights and optimizer state a checkpoint keeps: prefix -> trainer."""
        return {"": self}

    def extra_state(self) -> dict:
        """What a checkpoint's index has beside the usual."""
        return {}

    def describe_learned(self) -> str:
        """For the line at the start, after the number of parameters."""
        return ""

    def sample_prompt(self, tokenizer, held_out) -> tuple[list[int], tuple[int, ...]]:
        """(what the sample at the end of training continues, ids at which it ends)"""
        if self.config.sample_prompt is None:
            return opening.first_ids(held_out), tokenizer.stop_ids
        return opening.sample_ids(self.config, tokenizer), tokenizer.stop_ids

    def finish(self, run) -> bool:
        """After the last step. Returns whether this was all: no sample, no title of its own."""
        return False
