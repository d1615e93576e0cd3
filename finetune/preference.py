r"""Learning from preferences: people say which of two answers is better, and a model learns it.

It is easier to compare two answers than to write a good one. So the data are pairs: a prompt, an
answer that was chosen (w, it won) and one that was rejected (l, it lost). Bradley and Terry (1952)
turn a comparison into a probability: each answer has a reward r, a number, and

    p(w is better than l) = sigmoid(r_w - r_l)                    loss = -log sigmoid(r_w - r_l)

Only differences of rewards matter. The two losses here are this one, with two definitions of r:

    reward model   r = v · x_last          a number from the hidden state of the answer's last token
    DPO            r = β (log π(y) - log π_ref(y))        y: the answer; π: the model that learns

The reward model (Stiennon et al., arXiv 2009.01325, section 3.4) is a trained model with another
head: a vector v [h] instead of the vocabulary matrix. It says how good an answer is. A second model
can then learn to write answers of high reward (finetune/reinforcement.py).

DPO, direct preference optimization (Rafailov et al., arXiv 2305.18290, equation 7), needs no reward
model. log π(y) is the sum of log-probabilities of the answer's tokens, and π_ref is the model
before training, frozen. The model's own reward of an answer is how much more likely it has become.
At the start π = π_ref, all rewards are 0, and the loss is log 2. β limits how far π moves away.

    pairs as rows of a batch      row 0   prompt, chosen answer            row 2   the next pair
                                  row 1   the same prompt, rejected answer row 3

    python -m course.preference          a lesson: gradients, both losses, a value head on two ranks
    python -m finetune.preference --method reward --load CKPT --data FILE.jsonl --out runs/reward
    python -m finetune.preference --method dpo    --load CKPT --data FILE.jsonl --out runs/dpo

A pair is two rows that stand beside each other, so every micro-batch holds whole pairs. The loss of
a batch is the sum over its pairs, divided by their number, under any layout. Of π_ref the run needs
one number for each row. It is computed once, before the first step, and no second model is held.

Not covered: ties and more than two answers (Plackett-Luce), other losses (IPO, KTO, ORPO), noisy
labels (conservative DPO), a margin for how much better an answer is (Llama 2).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
import train
from base import compiling, terminal
from base.model_config import MoEConfig, flops_per_token
from finetune import preference_data
from finetune.adapter_learning import PeftConfig, lr_beside_reference
from finetune.frozen_base import fingerprint
from finetune.sft import ChatConfig, check_answers
from finetune.sft_data import ConversationTask
from run import checkpoint
from run.checkpoint import CheckpointError
from run.config import ConfigError, flag
from run.finish import draw_loss
from run.rules import Need, multiples
from run.task import Task, WholeModel, evaluation_batches, outputs
from sequence_parallel import start_gather, synchronise

# --- losses ---------------------------------------------------------------------------------------


def sum_over_answers(y: Tensor, mask: Tensor) -> Tensor:
    """A number for each row: the sum over the positions that count. y, mask: [b, s] -> [b]"""
    return (y * mask).sum(1)


def pairs_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(of chosen answers, of rejected answers). rows: [2 n] -> [n] each; row 2k and row 2k + 1 are
    one pair."""
    return rows[0::2], rows[1::2]


def reward_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(r_w - r_l) of each pair (arXiv 2009.01325, section 3.4). Rewards [n] -> [n]"""
    return -F.logsigmoid(chosen - rejected)


class DPO(NamedTuple):
    """[n] each; the rewards have no gradient."""

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float,
) -> DPO:
    """The loss of each pair and the implicit rewards (arXiv 2305.18290, equation 7 and section 4).

    chosen, rejected: [n], log-probabilities of whole answers under the model that learns;
    reference_..: the same under the frozen one.
    """
    # β (log π - log π_ref)
    chosen_reward = beta * (chosen - reference_chosen)
    rejected_reward = beta * (rejected - reference_rejected)
    loss = reward_loss(chosen_reward, rejected_reward)
    return DPO(loss, chosen_reward.detach(), rejected_reward.detach())


# --- a head that gives a number -------------------------------------------------------------------


class _GatherValues(torch.autograd.Function):
    """All-gather of the values of t shards of a sequence. Every rank computes the same loss from
    them, and so has the whole gradient: each takes its slice, and nothing is summed."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return start_gather(values, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad_of_shard(grad, ctx.group), None


def grad_of_shard(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a gradient that every rank has. [b, s] -> [b, s/t]"""
    return grad.chunk(group.size(), dim=1)[group.rank()].contiguous()


@compiling.left_out
def gather_values(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s/t] of each rank -> [b, s] on every rank."""
    return _GatherValues.apply(values, group)


class Value(nn.Linear):
    """v · x. [b, s, h] -> [b, s, n]. Not one of the layers whose weight gradients a zero-bubble
    pipeline defers: there is nothing to gain from a vector."""


class ValueHead(nn.Module):
    """A number for each position. x: [b, s, h] -> [b, s], in at least float32; n of them, for the
    labels of finetune/classify.py, are [b, s, n].

    Tensor-parallel ranks hold all of it: it is small, and x is the same on all. With a group (under
    sequence parallelism) x is a shard, [b, s/t, h]; the values are gathered to [b, s].
    """

    def __init__(self, norm: nn.Module, h: int, group: dist.ProcessGroup | None, n: int = 1):
        super().__init__()
        self.norm = norm
        # begins as all matrices do, normal with deviation 0.02 (arXiv 2009.01325: 1 / √(h + 1))
        self.value = Value(h, n, bias=False, device=norm.weight.device)
        self.group = group

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """targets: not read; they stand here as in every head."""
        values = self.value(self.norm(x)).squeeze(-1)  # [b, s], or [b, s/t]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values if self.group is None else gather_values(values, self.group)


# --- in a model -----------------------------------------------------------------------------------


def apply(
    model: gpt.GPT, group: dist.ProcessGroup | None, sequence_parallel: bool, n: int = 1
) -> None:
    """Give a model, or every stage of one, a value head in the place of its head, in place. group:
    of tensor parallelism; n: numbers of a position. After tensor and sequence parallelism."""
    # the embedding has no copy on the last stage any more
    model.tied = False
    if model.head is None:
        return
    sharded = group if sequence_parallel else None
    model.head = ValueHead(model.head.norm, model.config.hidden_size, sharded, n)
    if sharded is not None:
        # norm and value see the tokens of this rank alone
        synchronise(model.head, sharded)


# --- a run ----------------------------------------------------------------------------------------
#
# The tasks change these functions of run/task.py, on every layout the same:
#
#     after_model_parallel    reward: the value head
#     load_weights            reward: all but the value's vector; a reward model goes on whole
#     before_steps            dpo: what the model says before training, of all pairs
#     total_loss, loss_count  a sum over pairs, and how many there are
#     statistics              accuracy, rewards, margin
#     extra_state             reward: says that the head gives a number
#
# The log-probabilities before training are in OUT/reference.npz, for --resume: two vectors, and of
# which base and pairs they are.

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
        """Means over the pairs of the step, or of the evaluation. A collective."""
        count, *sums = self.sum_of_ranks(self.sums)
        accuracy, chosen, rejected = (each / count for each in sums)
        rewards = dict(reward_chosen=chosen, reward_rejected=rejected, margin=chosen - rejected)
        return {"accuracy": accuracy} | rewards


class ValueModel(WholeModel):
    """A model with a value head (ValueHead) learns: the reward model here, the critic of
    finetune/reinforcement.py."""

    # A weight that no other head has.
    own_weight = "head.value.weight"
    head_name = "value head"

    def __init__(self, name: str):
        """name: what messages call it."""
        self.name = name

    def after_model_parallel(self, stage) -> None:
        apply(stage, self.groups.tp, self.config.sequence_parallel)

    def load_weights(self, world) -> None:
        """Start from --load: a model with this head; or another, and what its head lacks begins at
        random. A collective. Raises CheckpointError."""
        if not self.config.load:
            return
        path = checkpoint.find(self.config.load)
        tensors = checkpoint.read_index(path)["tensors"]
        whole = f"model.{self.own_weight}" in tensors

        def is_new(name: str) -> bool:
            return name.startswith("head.") and f"model.{name}" not in tensors

        self.trainer.checkpoints.load(path, weights_only=True, new=None if whole else is_new)
        head = f"its {self.head_name}" if whole else f"a new {self.head_name}"
        world.say(f"{self.name}: starting from the weights of {path}, with {head}")

    def extra_state(self) -> dict:
        return {"head": "value"}


class WithoutLogits(Task):
    """The task of a model whose head gives no logits: it writes no text."""

    last_file = "loss.png"

    def count_head(self, n: int) -> None:
        """The whole model has n vectors, and no matrix of the head if that was not the
        embedding."""
        config = self.model_config
        matrix = 0 if config.tied else config.vocab_size * config.hidden_size
        self.trainer.num_parameters += n * config.hidden_size - matrix

    def flops_per_token(self, s: int) -> float:
        config = self.model_config
        return flops_per_token(config, s) - 6 * config.vocab_size * config.hidden_size

    def finish(self, run) -> bool:
        if run.world.rank == 0:
            base = self.config.load or self.config.model
            draw_loss(run.world, run, f"{self.learned.name} of {base}")
        run.world.say(f"{run.out}: loss.png, metrics.jsonl, checkpoints")
        return True


class RewardTask(WithoutLogits, PreferenceTask):
    """A value head in the place of the head, on a model that learns whole."""

    def __init__(self):
        super().__init__(ValueModel("the reward model"))

    def built(self) -> None:
        super().built()
        self.count_head(1)

    def losses(self, y: Tensor, batch) -> tuple[Tensor, Tensor, Tensor]:
        """y: [2 n, s], the values; that of the last token counts."""
        rewards = sum_over_answers(y, batch.loss_mask)
        chosen, rejected = pairs_of(rewards)
        return reward_loss(chosen, rejected), chosen.detach(), rejected.detach()


class DPOTask(PreferenceTask):
    """The model of --load itself learns, or adapters of it (--peft)."""

    # The fingerprint of the base, as in reference.npz.
    reference_of: str | None = None

    def losses(self, y: Tensor, batch) -> tuple[Tensor, Tensor, Tensor]:
        """y: [2 n, s], the loss of each token: -log p."""
        log_p = -sum_over_answers(y, batch.loss_mask)
        reference = batch.reference.to(log_p.dtype)
        pairs = *pairs_of(log_p), *pairs_of(reference)
        return dpo_loss(*pairs, self.config.kl_weight)

    # --- the model before training ----------------------------------------------------------------

    def log_probabilities(self, dataset, count: int) -> Tensor:
        """[count] float64 on the CPU: of the answer in each of the first samples, by the model as
        it is. A collective."""
        found = torch.zeros(count, dtype=torch.float64)

        def log_p(batch, y: Tensor) -> Tensor:
            return -sum_over_answers(y, batch.loss_mask)

        for start in range(0, count, BLOCK):
            block = range(start, min(start + BLOCK, count))
            batches = evaluation_batches(self.trainer, Block(dataset, block), len(block))
            found += outputs(self.trainer, list(batches), (count,), log_p)
        return found

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
            run.world.on_rank_0(lambda: self.write(path, sets, found))
        else:
            found = run.world.on_rank_0(lambda: self.read(path, sets))
        for name, dataset in sets.items():
            dataset.reference = torch.from_numpy(found[name])

    def key(self, sets: dict) -> str:
        """Which base, and which rows."""
        return " ".join([self.reference_of, *(each.index["corpus"] for each in sets.values())])

    def write(self, path: Path, sets: dict, found: dict[str, np.ndarray]) -> None:
        try:
            # whole or not there; savez adds .npz to other names
            np.savez(path.with_suffix(".tmp.npz"), key=self.key(sets), **found)
            os.replace(path.with_suffix(".tmp.npz"), path)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot be written ({e.strerror})") from None

    def read(self, path: Path, sets: dict) -> dict[str, np.ndarray]:
        """Raises CheckpointError."""
        try:
            with np.load(path, allow_pickle=False) as file:
                key = str(file["key"])
                found = {name: file[name] for name in sets}
        except Exception as e:
            rule = "put it back, or start again with another --out"
            raise CheckpointError(f"{path}: cannot be read ({type(e).__name__}); {rule}") from None
        if key != self.key(sets):
            raise CheckpointError(
                f"{path}: is of another base, or of other pairs than --data"
                f" {' '.join(self.config.data)} are now. Give the same files, and the same --date"
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


# --- the command ----------------------------------------------------------------------------------


@dataclass
class PreferenceConfig(ChatConfig):
    """Every flag of finetune/preference.py."""

    command: ClassVar[str] = "-m finetune.preference"
    purpose: ClassVar[str] = "Learn from pairs of answers."
    needs: ClassVar[tuple] = (
        *PeftConfig.needs,
        Need(("beta",), lambda run: run.config.method == "dpo", "is only for --method dpo"),
        Need(
            ("head_chunk",), lambda run: run.config.method == "dpo", "a reward model has no logits"
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
        "dpo", "what learns: a reward model, or the model of --load itself", ("reward", "dpo")
    )
    data: list[str] = flag(
        [], "JSON lines with prompt, chosen and rejected; a twentieth is held out", metavar="FILE"
    )
    val_data: list[str] = flag(
        [], "pairs to evaluate on; all of --data is then trained on", metavar="FILE"
    )
    beta: float | None = flag(None, "weight of the KL from the model of --load; the default is 0.1")

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
            config.refuse("peft", "leaves the head as it is; --method dpo would fit")
    elif config.beta is not None and not 0 < config.beta <= 1000:
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


if __name__ == "__main__":
    terminal.command(main)
