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

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import gpt
from base import compiling, terminal
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
    """v · x. [b, s, h] -> [b, s, 1]. Not one of the layers whose weight gradients a zero-bubble
    pipeline defers: there is nothing to gain from a vector."""


class ValueHead(nn.Module):
    """A number for each position. x: [b, s, h] -> [b, s], in at least float32.

    Tensor-parallel ranks hold all of it: it is small, and x is the same on all. With a group (under
    sequence parallelism) x is a shard, [b, s/t, h]; the values are gathered to [b, s].
    """

    def __init__(self, norm: nn.Module, h: int, group: dist.ProcessGroup | None):
        super().__init__()
        self.norm = norm
        # begins as all matrices do, normal with deviation 0.02 (arXiv 2009.01325: 1 / √(h + 1))
        self.value = Value(h, 1, bias=False, device=norm.weight.device)
        self.group = group

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """targets: not read; they stand here as in every head."""
        values = self.value(self.norm(x)).squeeze(-1)  # [b, s], or [b, s/t]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values if self.group is None else gather_values(values, self.group)


# --- in a model -----------------------------------------------------------------------------------


def apply(model: gpt.GPT, group: dist.ProcessGroup | None, sequence_parallel: bool) -> None:
    """Give a model, or every stage of one, a value head in the place of its head, in place. group:
    of tensor parallelism. After tensor and sequence parallelism."""
    # the embedding has no copy on the last stage any more
    model.tied = False
    if model.head is None:
        return
    sharded = group if sequence_parallel else None
    model.head = ValueHead(model.head.norm, model.config.hidden_size, sharded)
    if sharded is not None:
        # norm and value see the tokens of this rank alone
        synchronise(model.head, sharded)


def is_value_head(name: str) -> bool:
    """Whether a parameter of this global name is not in the model that a reward model began as."""
    return name == "head.value.weight"


if __name__ == "__main__":
    from finetune import preference_command

    terminal.command(preference_command.main)
