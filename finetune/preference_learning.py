"""Runs that learn from pairs of answers: a reward model, or DPO (finetune/preference.py).

    python -m finetune.preference --method reward --load CKPT --data FILE.jsonl --out runs/reward
    python -m finetune.preference --method dpo    --load CKPT --data FILE.jsonl --out runs/dpo

They change these functions of run/task.py, on every layout the same:

    after_model_parallel    reward: the value head
    load_weights            reward: all but the value's vector; a reward model goes on whole
    before_steps            dpo: what the model says before training, of all pairs
    total_loss, loss_count  a sum over pairs, and how many there are
    statistics              accuracy, rewards, margin
    extra_state             reward: says that the head gives a number

The log-probabilities before training are in OUT/reference.npz, for --resume: two vectors, and of
which base and pairs they are.
"""

import io
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from base.model_config import flops_per_token
from finetune import preference, preference_data
from finetune.frozen_base import fingerprint
from finetune.sft_data import ConversationTask
from run import checkpoint
from run.checkpoint import CheckpointError
from run.finish import draw_loss
from run.task import WholeModel, evaluation_batches, run_forward

# rows whose batches are on the device together, before step 1
BLOCK = 512


class PreferenceTask(ConversationTask):
    """What both methods share."""

    # routers use their raw logits, as in generation, and have no balancing losses
    balances_experts = False

    def open_data(self, config, world, tokenizer):
        return preference_data.open_data(config, world, tokenizer)

    def built(self) -> None:
        self.reset()

    def reset(self) -> None:
        # sums over this rank's pairs, of a step or an evaluation: count, right, both rewards
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.trainer.device)

    def losses(self, y: Tensor, batch) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, reward of the chosen answer, reward of the rejected one) of each pair, [n]."""
        raise NotImplementedError

    def data_of_step(self, step: int, dataset):
        self.reset()
        return dataset

    def evaluate(self, dataset, sequences: int) -> float:
        self.reset()
        return super().evaluate(dataset, sequences)

    def eval_statistics(self) -> dict[str, float]:
        return {f"eval_{name}": mean.item() for name, mean in self.statistics().items()}

    def total_loss(self, y: Tensor, batch) -> Tensor:
        loss, chosen, rejected = self.losses(y, batch)
        # evaluation fills its last batch up with rows that do not count
        counts = batch.loss_mask.any(1)[0::2]
        each = torch.stack([counts, chosen > rejected, chosen, rejected])
        self.sums += (each.double() * counts).sum(1)
        return (loss * counts).sum()

    def loss_count(self, dataset, samples) -> int:
        return len(samples) // 2

    def statistics(self) -> dict[str, Tensor]:
        """Means over the pairs of the step, or of the evaluation. A collective; all tensor-parallel
        ranks have the same."""
        sums = self.sums.clone()
        for group in (self.groups.dp, self.groups.pp):
            if group:
                dist.all_reduce(sums, group=group)
        accuracy, chosen, rejected = sums[1:] / sums[0]
        return {
            "accuracy": accuracy,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "margin": chosen - rejected,
        }


class ValueModel(WholeModel):
    """A model with a value head (preference.ValueHead) learns: the reward model here, the critic of
    finetune/reinforcement.py."""

    def __init__(self, name: str):
        """name: what messages call it."""
        self.name = name

    def after_model_parallel(self, stage) -> None:
        preference.apply(stage, self.groups.tp, self.config.sequence_parallel)

    def load_weights(self, world) -> None:
        """Start from --load: a model that has a value head; or one that writes text, all but its
        head, and the value head begins at random. A collective. Raises CheckpointError."""
        path = checkpoint.find(self.config.load)
        whole = "model.head.value.weight" in checkpoint.read_index(path)["tensors"]
        new = None if whole else preference.is_value_head
        self.trainer.checkpoints.load(path, weights_only=True, new=new)
        head = "its value head" if whole else "a new value head"
        world.say(f"{self.name}: starting from the weights of {path}, with {head}")

    def extra_state(self) -> dict:
        return {"head": "value"}


class RewardTask(PreferenceTask):
    """A value head in the place of the head, on a model that learns whole."""

    last_file = "loss.png"

    def __init__(self):
        super().__init__(ValueModel("the reward model"))

    def built(self) -> None:
        super().built()
        config = self.model_config
        # the whole model has no matrix of the head, if that was not the embedding, but a vector
        matrix = 0 if config.tied else config.vocab_size * config.hidden_size
        self.trainer.num_parameters += config.hidden_size - matrix

    def flops_per_token(self, s: int) -> float:
        config = self.model_config
        return flops_per_token(config, s) - 6 * config.vocab_size * config.hidden_size

    def losses(self, y: Tensor, batch) -> tuple[Tensor, Tensor, Tensor]:
        """y: [2 n, s], the values; that of the last token counts."""
        rewards = preference.sum_over_answers(y, batch.loss_mask)
        chosen, rejected = preference.pairs_of(rewards)
        loss = preference.reward_loss(chosen, rejected)
        return loss, chosen.detach(), rejected.detach()

    def finish(self, run) -> bool:
        """No sample: a reward model writes no text."""
        if run.world.rank == 0:
            draw_loss(run.world, run, f"a reward model of {self.config.load}")
        run.world.say(f"{run.out}: loss.png, metrics.jsonl, checkpoints")
        return True


class DPOTask(PreferenceTask):
    """The model of --load itself learns, or adapters of it (--peft)."""

    # The fingerprint of the base, as in reference.npz.
    reference_of: str | None = None

    def losses(self, y: Tensor, batch) -> tuple[Tensor, Tensor, Tensor]:
        """y: [2 n, s], the loss of each token: -log p."""
        log_p = -preference.sum_over_answers(y, batch.loss_mask)
        reference = batch.reference.to(log_p.dtype)
        pairs = *preference.pairs_of(log_p), *preference.pairs_of(reference)
        return preference.dpo_loss(*pairs, self.config.kl_weight)

    # --- the model before training ----------------------------------------------------------------

    def log_probabilities(self, dataset, count: int) -> Tensor:
        """[count] float64 on the CPU: of the answer in each of the first samples, by the model as
        it is. A collective."""
        found = torch.zeros(count, dtype=torch.float64, device=self.trainer.device)

        def add(batch, y: Tensor) -> None:
            # a row that fills the last batch up has no target, and adds 0
            log_p = -preference.sum_over_answers(y, batch.loss_mask)
            found.index_add_(0, batch.samples, log_p.double())

        for start in range(0, count, BLOCK):
            block = range(start, min(start + BLOCK, count))
            batches = evaluation_batches(self.trainer, Block(dataset, block), len(block))
            run_forward(self.trainer, list(batches), add)
        for group in (self.groups.dp, self.groups.pp):
            if group:
                dist.all_reduce(found, group=group)
        return found.cpu()

    def before_steps(self, run) -> None:
        """Compute the reference's log-probabilities, or read them where the run goes on. Raises
        CheckpointError."""
        path = run.out / "reference.npz"
        sets = {"train": run.train_set, "held_out": run.held_out}
        if run.start == 0:
            self.reference_of = fingerprint(checkpoint.find(self.config.load), self.model_config)
            found = {}
            for name, dataset in sets.items():
                rows = dataset.in_order()
                found[name] = self.log_probabilities(rows, rows.num_sequences).numpy()
            run.world.on_rank_0(lambda: self.write(path, sets, found), (CheckpointError,))
        else:
            found = run.world.on_rank_0(lambda: self.read(path, sets), (CheckpointError,))
        for name, dataset in sets.items():
            dataset.reference = torch.from_numpy(found[name])

    def key(self, sets: dict) -> str:
        """Which base, and which rows."""
        return " ".join([self.reference_of, *(each.index["corpus"] for each in sets.values())])

    def write(self, path: Path, sets: dict, found: dict[str, np.ndarray]) -> None:
        content = io.BytesIO()
        np.savez(content, key=self.key(sets), **found)
        try:
            # whole or not there
            path.with_suffix(".tmp").write_bytes(content.getvalue())
            os.replace(path.with_suffix(".tmp"), path)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be written ({e.strerror})") from None

    def read(self, path: Path, sets: dict) -> dict[str, np.ndarray]:
        """Raises CheckpointError."""
        try:
            with np.load(path, allow_pickle=False) as file:
                key = str(file["key"])
                found = {name: file[name] for name in sets}
        except Exception as e:
            raise CheckpointError(
                f"{path}: cannot be read ({type(e).__name__}). It has what the model said of the"
                " pairs before training; put it back, or start again with another --out"
            ) from None
        if key != self.key(sets):
            raise CheckpointError(
                f"{path}: is of another base, or of other pairs than --data"
                f" {' '.join(self.config.data)} are now. Give the same files (and the same --date,"
                " where the chat template writes it), or start again with another --out: older"
                " versions held out other pairs, where several have one prompt"
            )
        return found

    def check_base(self, path: Path, index: dict) -> None:
        self.reference_of = index.get("reference", "")

    def extra_state(self) -> dict:
        return {"reference": self.reference_of}


class Block:
    """Some rows of a data set, as one that begins there."""

    def __init__(self, dataset, rows: range):
        self.dataset = dataset
        self.rows = rows

    def batch(self, samples):
        return self.dataset.batch([self.rows[n] for n in samples])
