"""The lesson of finetune/policy_gradients.py: a policy that is a table learns from its rewards,
held by the KL.

The policy has one logit for each of four tokens, and an answer is one token. So everything can be
computed by hand: the best policy, and how far one rollout may move it."""

import math
from unittest import mock

import torch
from torch import Tensor

from course import form
from finetune import policy_gradients

TOKENS = "abcd"
REFERENCE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
PPO_SCORES = torch.tensor([0.0, 0.0, 0.5, 1.0], dtype=torch.float64)
GRPO_SCORES = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
PPO_BETA = 0.5
GRPO_BETA = 1.0
CLIP = 0.2
# Answers of a rollout; one group for GRPO.
ANSWERS = 512
# The compared policy is the mean of these last steps.
STEPS, LAST = 400, 200
EPOCHS = 2

WITHOUT = form.Removals()


@WITHOUT.replace(
    "next-value",
    policy_gradients,
    "generalized_advantages",
    "δ = r - V. Which tokens are to blame?",
)
def no_next_value(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma=1.0,
    lam=0.95,
    original=policy_gradients.generalized_advantages,
):
    """A token without a reward of its own seems to lose V, though the critic still expects as much
    after it. γ V of the next token says so."""
    # The value behind every token is 0.
    advantages, _ = original(rewards - values, torch.zeros_like(values), mask, gamma, lam)
    return advantages, advantages + values


@WITHOUT.replace("clip", policy_gradients, "policy_loss", "How far does one rollout go?")
def no_clip(log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float):
    """The ratio corrects for the policy that wrote the answers, and nothing says that the
    correction is good only near it."""
    losses = -torch.exp(log_probs - old) * advantages
    return losses, torch.zeros_like(losses, dtype=torch.bool)


@WITHOUT.replace(
    "old",
    policy_gradients,
    "policy_loss",
    "log π_old is taken anew in each update. What is the ratio?",
)
def always_new(log_probs: Tensor, *others, original=policy_gradients.policy_loss):
    """It is always 1, so nothing is ever clipped, and the updates go on as if the policy of each
    update had written the answers."""
    return original(log_probs, log_probs.detach(), *others[1:])


@WITHOUT.add("kl", "What is written then?")
def no_kl():
    """The policy writes d and nothing else: KL log 10 = 2.30, the largest that this reward can
    cause. Where the reward is a model, d is often its mistake."""
    none = lambda log_probs, reference: torch.zeros_like(log_probs)  # noqa: E731
    return mock.patch.multiple(policy_gradients, log_ratio=none, kl_penalty=none)


# --- a policy that is a table ---------------------------------------------------------------------


class Table:
    """Logits of four tokens and a value: the policy and its critic. At the start, π is π_ref."""

    def __init__(self):
        self.logits = REFERENCE.log().requires_grad_()
        self.value = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.generator = torch.Generator().manual_seed(0)

    def probs(self) -> Tensor:
        return self.logits.detach().softmax(0)

    def write(self) -> Tensor:
        """Answers of one token: [n, 1]"""
        drawn = torch.multinomial(self.probs(), ANSWERS, True, generator=self.generator)
        return drawn.unsqueeze(1)

    def log_probs(self, answers: Tensor) -> Tensor:
        return self.logits.log_softmax(0)[answers]

    def step(self, loss: Tensor, lr: float) -> None:
        for x in (self.logits, self.value):
            x.grad = None
        loss.backward()
        with torch.no_grad():
            for x in (self.logits, self.value):
                if x.grad is not None:
                    x -= lr * x.grad


def rollout(policy: Table, scores: Tensor, method: str) -> tuple[Tensor, policy_gradients.Targets]:
    """Answers [n, 1], and what the updates need."""
    answers = policy.write()
    mask = torch.ones_like(answers, dtype=torch.bool)
    old = policy.log_probs(answers).detach()
    reference = REFERENCE.log()[answers]
    weights = policy_gradients.token_weights(mask, per_answer=method == "grpo")
    if method == "grpo":
        advantages = policy_gradients.group_advantages(scores[answers[:, 0]], ANSWERS)
        return answers, policy_gradients.Targets(old, advantages.unsqueeze(1), weights, reference)
    rewards = policy_gradients.token_rewards(scores[answers[:, 0]], old, reference, mask, PPO_BETA)
    values = policy.value.detach().expand(mask.shape)
    advantages, returns = policy_gradients.generalized_advantages(rewards, values, mask)
    return answers, policy_gradients.Targets(old, advantages, weights, None, returns, values)


def update(
    policy: Table, answers: Tensor, targets: policy_gradients.Targets, method: str, lr: float
) -> None:
    beta = GRPO_BETA if method == "grpo" else 0.0
    loss = policy_gradients.actor_loss(policy.log_probs(answers), targets, CLIP, beta)
    if method == "ppo":
        loss = loss + policy_gradients.critic_loss(
            policy.value.expand(answers.shape), targets, CLIP
        )
    policy.step(loss / ANSWERS, lr)


def learn(scores: Tensor, method: str) -> Tensor:
    """The probabilities after training: their mean over the last steps."""
    policy = Table()
    total = torch.zeros_like(REFERENCE)
    for step in range(STEPS):
        answers, targets = rollout(policy, scores, method)
        for _ in range(EPOCHS):
            update(policy, answers, targets, method, lr=0.2)
        if step >= STEPS - LAST:
            total += policy.probs()
    return total / LAST


def divergence(probs: Tensor) -> float:
    """KL(π || π_ref)"""
    return (probs * (probs / REFERENCE).log()).sum().item()


# --- the lesson -----------------------------------------------------------------------------------


def teach_advantages(lesson: form.Lesson) -> None:
    lesson.predict(
        "An answer of 3 tokens has the score 1, and the critic says V = 0.5 before each token."
        " γ = 1, no KL. The advantages of the three tokens with λ = 1? With λ = 0?",
        "first token, λ = 1; first token, λ = 0",
    )
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.full((1, 3), 0.5)
    mask = torch.ones(1, 3)
    found = [
        policy_gradients.generalized_advantages(rewards, values, mask, 1.0, lam)[0][0].tolist()
        for lam in (1.0, 0.0)
    ]
    lesson.check(
        f"λ = 1: {found[0]}, what came less V; λ = 0: {found[1]}, only the last is a surprise",
        found == [[0.5, 0.5, 0.5], [0.0, 0.0, 0.5]],
        [advantages[0] for advantages in found],
    )


def teach_clip(lesson: form.Lesson) -> None:
    lesson.predict(
        f"The policy is a table: tokens {' '.join(TOKENS)} with probabilities 0.4 0.3 0.2 0.1. An"
        f" answer is one token; d is worth 1. One rollout of {ANSWERS} answers, and 300 updates"
        f" from it. With ε = {CLIP}, how likely can d become?",
        "probability of d",
    )
    policy = Table()
    answers, targets = rollout(policy, GRPO_SCORES, "ppo")
    for _ in range(300):
        update(policy, answers, targets, "ppo", lr=0.05)
    after = policy.probs()[3].item()
    lesson.check(
        f"{after:.3f}; (1 + ε) 0.1 = {0.1 * (1 + CLIP):.3f}: at this ratio its gradient ends",
        0.115 < after < 0.125,
        [0.1 * (1 + CLIP)],
    )


def teach_old_answers(lesson: form.Lesson) -> None:
    lesson.predict(
        "Older weights wrote each token a quarter of the time; the policy is the table, d is worth"
        " 1. The mean reward of these answers? With importance weights, which are π / μ?",
        "plain; weighted",
    )
    written = torch.full((4,), 0.25, dtype=torch.float64)
    logs = REFERENCE.log(), written.log()
    weighted = policy_gradients.stale_advantages(GRPO_SCORES, *logs, cap=2.0)
    found = [(written * x).sum().item() for x in (GRPO_SCORES, weighted)]
    lesson.check(
        f"{found[0]:.2f}; {found[1]:.2f}, the mean reward of the policy itself: it writes d a tenth"
        " of the time",
        abs(found[0] - 0.25) + abs(found[1] - 0.1) < 1e-12,
        found,
    )


def teach_ppo(lesson: form.Lesson) -> None:
    lesson.predict(
        "PPO with many rollouts; a and b are worth 0, c 0.5, d 1, and β = 0.5. The best policy is"
        " π_ref exp(r / β) / Z. How likely is each token then? (e = 2.72, e² = 7.39)"
    )
    best = REFERENCE * (PPO_SCORES / PPO_BETA).exp()
    best /= best.sum()
    learned = learn(PPO_SCORES, "ppo")
    for token, of_best, found in zip(TOKENS, best.tolist(), learned.tolist()):
        lesson.say(f"{token}  best {of_best:.3f}   learned {found:.3f}  {form.bar(found, 1)}")
    lesson.check(
        f"the largest difference is {(learned - best).abs().max():.3f}; KL to the model at the"
        f" start {divergence(learned):.2f}, of the best {divergence(best):.2f}",
        (learned - best).abs().max() < 0.01,
    )


def teach_grpo(lesson: form.Lesson) -> None:
    lesson.predict(
        "GRPO with d worth 1, all else 0, and β = 1. Its advantages are divided by their standard"
        " deviation √(p (1 - p)), where p is the probability of d. Its KL is in the loss. The two"
        " pulls are equal where √(p (1 - p)) = β (p - 0.1). p? If d is worth 10?",
        "p; p, worth 10",
    )
    # 2 p² - 1.2 p + 0.01 = 0
    expected = (1.2 + math.sqrt(1.44 - 0.08)) / 4
    one, ten = (learn(GRPO_SCORES * worth, "grpo")[3].item() for worth in (1, 10))
    of_ppo = [1 / (1 + 9 * math.exp(-worth)) for worth in (1, 10)]
    lesson.check(
        f"{one:.3f}, where {expected:.3f} is expected; worth 10: {ten:.3f}. GRPO does not see the"
        f" scale of scores, so its β is not PPO's: that gives {of_ppo[0]:.3f} and {of_ppo[1]:.4f}",
        abs(one - expected) < 0.01 and abs(ten - one) < 0.01,
        [expected, expected],
    )


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        teach_advantages(lesson)
        teach_clip(lesson)
        teach_old_answers(lesson)
        teach_ppo(lesson)
        teach_grpo(lesson)


if __name__ == "__main__":
    form.run("reinforcement")
