"""What a model says of all answers to a question: the exact reward and KL of the policies that
preference.py trains, nothing sampled.

Every question has the 19 sums as answers; all texts that are no sum count as one more, `other`.

    reward = mean over prompts of π(sum)      KL = mean over prompts of Σ π(y) log π(y) / base(y)
"""

import itertools
import math

import torch
from torch import Tensor

from sft import Chat, message

SUMS = 19
COUNTS = (1, 2, 4, 8, 16)
JUDGES = "verifier", "reward model"


class Answers:
    """Every prompt with every sum, as rows."""

    def __init__(self, chat: Chat, prompts: list[str]):
        examples = []
        for prompt, answer in itertools.product(prompts, map(str, range(SUMS))):
            examples.append(chat.example([message("user", prompt), message("assistant", answer)]))
        self.lengths = torch.tensor([len(example.ids) for example in examples])
        self.ids = padded([example.ids for example in examples])
        self.counted = padded([example.counted for example in examples])

    @torch.no_grad()
    def log_probabilities(self, model) -> Tensor:
        """[prompts, sums] float64, of each answer with the token that ends it."""
        losses = []
        for ids, counted in zip(self.ids.split(SUMS * 20), self.counted.split(SUMS * 20)):
            y = model(ids[:, :-1], ids[:, 1:]).double()
            losses.append((y * counted[:, 1:]).sum(1))
        return -torch.cat(losses).view(-1, SUMS)

    @torch.no_grad()
    def rewards(self, model) -> Tensor:
        """[prompts, sums] float64, of a reward model."""
        values = torch.cat([model(ids) for ids in self.ids.split(SUMS * 20)])
        last = self.lengths.unsqueeze(1) - 1
        return values.gather(1, last).double().view(-1, SUMS)


def padded(rows: list[list]) -> Tensor:
    """[rows, the longest], with 0 behind the others."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def with_other(log_p: Tensor) -> Tensor:
    """[prompts, sums] -> probabilities [prompts, sums + 1], with that of all other texts."""
    p = log_p.exp()
    return torch.cat([p, (1 - p.sum(1, keepdim=True)).clamp(min=1e-12)], dim=1)


def describe(log_p: Tensor, base_log_p: Tensor, sums: Tensor, n: int) -> dict:
    """reward, held_out (the reward of the held-out prompts), kl and other of a policy. log_p:
    [prompts, sums], of each answer; sums: the right ones; n: prompts before the held-out ones."""
    p, base = with_other(log_p), with_other(base_log_p)
    kl = (p * (p / base).log()).nan_to_num(0.0).sum(1)
    right = p.gather(1, sums.unsqueeze(1)).squeeze(1)
    values = dict(reward=right[:n], held_out=right[n:], kl=kl[:n], other=p[:n, -1])
    return {name: x.mean().item() for name, x in values.items()}


def best_log_p(log_p: Tensor, scores: Tensor, n: int) -> Tensor:
    """log-probabilities of the best of n samples, by the scores; of equal ones, the first sample.
    All [prompts, sums]. Texts that are no sum are the worst.

    P(score <= s) = F(s)^n; answers of one score share this as they share F."""
    p = log_p.exp()
    other = 1 - p.sum(1, keepdim=True)
    # [prompts, sums, sums]: of the answer in the last dimension
    below = (scores.unsqueeze(1) < scores.unsqueeze(2)).double()
    equal = (scores.unsqueeze(1) == scores.unsqueeze(2)).double()
    worse = other + (below * p.unsqueeze(1)).sum(2)
    same = (equal * p.unsqueeze(1)).sum(2)
    return (p / same * ((worse + same) ** n - worse**n)).log()


def best_of_n(rewards: Tensor, base_log_p: Tensor, sums: Tensor, n: int) -> dict:
    """{"verifier", "reward model": {count: reward, kl, ..}, "bound": {count: nats}, "accuracy"}, of
    a reward model. rewards: [prompts, sums]; the others as in `describe`."""
    right = torch.zeros_like(rewards).scatter_(1, sums.unsqueeze(1), 1.0)
    results = {judge: {} for judge in (*JUDGES, "bound")}
    for count in COUNTS:
        for judge, scores in zip(JUDGES, (right, rewards)):
            best = best_log_p(base_log_p, scores, count)
            results[judge][str(count)] = describe(best, base_log_p, sums, n)
        # arXiv 2401.01879: more than the KL
        results["bound"][str(count)] = math.log(count) - (count - 1) / count
    # [prompts, sums]
    margin = rewards.gather(1, sums.unsqueeze(1)) - rewards
    for name, part in (("accuracy", slice(n)), ("held-out accuracy", slice(n, None))):
        results[name] = (margin[part] > 0)[right[part] == 0].double().mean().item()
    return results


def bound(base_log_p: Tensor, sums: Tensor, n: int) -> list[list[float]]:
    """[KL, reward] of the best policies, for some β."""
    p = with_other(base_log_p).gather(1, sums.unsqueeze(1))[:n, 0]
    rows = []
    for i in range(41):
        # e^(1 / β)
        weight = math.exp(0.25 * i)
        q = p * weight / (p * weight + 1 - p)
        kl = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        rows.append([kl.mean().item(), q.mean().item()])
    return rows
