"""PPO and GRPO: what a language model learns from the rewards of its own answers.

The model (the policy π) reads a prompt x and writes an answer y of tokens y_1 .. y_T. A reward
model or a function gives the answer one number, its score. There is no right answer to imitate. So
the model learns by trial: tokens of answers that are better than expected become more likely, the
others less. A step of training is

    rollout       π writes answers. Each token's log-probability is kept: log π_old(y_t)
    score         r(x, y), one number for each answer
    advantage     A_t: how much better was token t than expected?
    update        --epochs times: raise Σ A_t log π(y_t), not too far

The equations, each beside its reason:

    policy gradient  ∇E[r] = E[Σ_t A_t ∇log π(y_t)]. Sampling has no gradient, and this needs none.
    baseline   A_t = what came - what was expected. Any number that does not depend on y_t can be
               subtracted: the mean of the gradient stays, and its variance falls.
    ratio      ρ_t = π(y_t) / π_old(y_t). After one update π is no longer the model that wrote the
               answers. The ratio corrects this, so answers can be used more than once.
    clip       min(ρ A, clip(ρ, 1 - ε, 1 + ε) A). Far from π_old the correction is noise. So a token
               whose ratio has moved by ε in the direction of A has no gradient any more.
    KL         - β KL(π || π_ref). The reward is a model with errors, and π would find them. π_ref,
               the model at the start, keeps the answers close to what the reward was learned from.

PPO (arXiv 1707.06347) and GRPO (arXiv 2402.03300) differ in two places:

                  PPO                                        GRPO
    expected is   V(x, y_<t), by a critic: a model that      the mean score of a group: several
                  learns it, as large as the policy          answers to the same prompt; no critic
    KL is         in the reward of each token                in the loss of each token
    weights       each token of the batch the same           each answer the same, so 1 / T a token

With PPO's KL the best policy is known (Rafailov et al., arXiv 2305.18290, equation 4):

    π*(y) = π_ref(y) exp(r(y) / β) / Z

    python -m course.reinforcement   a lesson: a policy that is a table, against π*

Everything here is a function of tensors: [n, T] for n answers, padded to T tokens, with a mask that
is true at the tokens of an answer. Losses also take rows of several answers, [R, s]; then tokens
outside answers have weight 0. Nothing here communicates: every rank has the scores of all answers.

Not covered: a β that adapts to a wanted KL (Ziegler et al., section 2.2), pretraining loss beside
PPO's (PPO-ptx), rewards for steps of an answer, GRPO without the division by the standard deviation
(Dr. GRPO), a second clip for large ratios of negative advantages, a KL that is weighted by the
ratio (use_bias_correction_kl, which trl has on by default). The library `trl` has most.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

# added to a standard deviation or variance that may be 0; trl has the same
GROUP_EPS = 1e-4
WHITEN_EPS = 1e-8


# --- Kullback-Leibler divergence ------------------------------------------------------------------


def log_ratio(log_probs: Tensor, reference: Tensor) -> Tensor:
    """log π - log π_ref of each token: its mean over tokens that π wrote is KL(π || π_ref).

    It is called k1 (http://joschu.net/blog/kl-approx.html). It can be negative for a token. As a
    loss it is no use: the mean of its gradient is E[∇log π] = 0. PPO has it in the reward.
    """
    return log_probs - reference


def kl_penalty(log_probs: Tensor, reference: Tensor) -> Tensor:
    """π_ref / π - log (π_ref / π) - 1 of each token (k3; GRPO, equation 4).

    Same mean as `log_ratio`, because π_ref / π - 1 has mean 0. Never negative, and of less
    variance where π is near π_ref. With a gradient: GRPO has it in the loss.
    """
    difference = reference - log_probs
    return torch.exp(difference) - difference - 1


# --- rewards and advantages: before the updates of a step -----------------------------------------


def token_rewards(
    scores: Tensor, log_probs: Tensor, reference: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """PPO's reward of each token: -β (log π - log π_ref), and the score at the last one.

        r_t = -β (log π(y_t) - log π_ref(y_t)) + [t = T] r(x, y)

    Summed over an answer: r(x, y) - β log (π(y) / π_ref(y)) (InstructGPT, arXiv 2203.02155,
    equation 2; Ziegler et al., arXiv 1909.08593, equation 2).

    scores: [n]; others [n, T]; mask: true at an answer's tokens -> [n, T], 0 outside the mask.
    """
    rewards = only(mask, -beta * log_ratio(log_probs, reference))
    return rewards + scores[:, None] * is_last(mask)


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, GAE (Schulman et al., arXiv 1506.02438, equation 16).

        δ_t = r_t + γ V_{t+1} - V_t          how much token t surprised the critic
        A_t = δ_t + γ λ A_{t+1}              surprises after t count too, λ less for each step

    λ = 1: A_t = Σ_{u ≥ t} γ^{u-t} r_u - V_t, of high variance. λ = 0: A_t = δ_t, which is only as
    good as the critic. V after the last token is 0: the answer is over, nothing more comes.

    all [.., T]; values[t] is V before token t was written; the mask has no gap in an answer.
    -> (advantages, returns = A + V, what the critic learns), both [.., T], 0 outside the mask.
    """
    mask = mask.bool()
    rewards, values = only(mask, rewards), only(mask, values)
    advantages = torch.zeros_like(values)
    # those of the token after t: [..]
    advantage = next_value = torch.zeros_like(values[..., 0])
    for t in reversed(range(values.shape[-1])):
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        # Where there is no token t, the answer has ended before it: V = 0 and A = 0.
        advantage = only(mask[..., t], delta + gamma * lam * advantage)
        next_value = values[..., t]
        advantages[..., t] = advantage
    return advantages, advantages + values


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the masked elements; 0 outside.

    Then neither the learning rate nor the clip depends on the scale of the rewards. The variance
    is the unbiased one, as in trl. Of all answers of a step, on every rank. x, mask: any shape.
    """
    mask = mask.bool()
    count = mask.sum()
    x = only(mask, x)
    mean = x.sum() / count.clamp(min=1)
    centered = only(mask, x - mean)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + WHITEN_EPS)


def group_advantages(scores: Tensor, group_size: int) -> Tensor:
    """GRPO's advantage of each answer: (r - mean of its group) / (std of its group + 1e-4).

    (arXiv 2402.03300, section 4.1.2.) A group is `group_size` neighbours, the answers to one
    prompt. Their mean is the baseline. If all have the same score, nothing is learned from them.
    std is the unbiased one, as in trl. scores: [n] -> [n]. Raises ValueError.
    """
    if group_size < 2 or len(scores) % group_size:
        rule = "a group has 2 answers or more, all groups the same number"
        raise ValueError(f"{len(scores)} scores in groups of {group_size}: {rule}")
    groups = scores.view(-1, group_size)
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return ((groups - mean) / (std + GROUP_EPS)).view(-1)


# --- losses: in each update -----------------------------------------------------------------------


def policy_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """The clipped loss of each token (PPO, arXiv 1707.06347, equation 7, with a minus).

        ρ = π / π_old        loss = -min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)

    Where ρ = 1 its gradient is that of -A log π. min takes the worse of the two: a token that
    has become too likely or too unlikely in the wrong direction keeps its gradient, and comes back.

    all of one shape -> (losses, bool: where the clip holds, so that there is no gradient)
    """
    ratio = torch.exp(log_probs - old)
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantages
    return -torch.min(free, clipped), clipped < free


def stale_advantages(advantages: Tensor, old: Tensor, written: Tensor, cap: float) -> Tensor:
    """Advantages of answers that older weights μ have written, times min(π_old / μ, cap).

    E_π[f] = E_μ[f π / μ]: so a token counts as often as π_old would write it. π_old is the policy
    before the updates of the step: the clip stays around it, not around μ (decoupled PPO, Hilton et
    al., arXiv 2110.00641; AReaL, arXiv 2505.24298). The cap bounds the variance, and is a bias.
    What μ wrote before a token is not corrected.

    old: log π_old, written: log μ, of the tokens; all of one shape -> the same
    """
    return advantages * torch.exp(old - written).clamp(max=cap)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """The critic's loss of each token: half the squared error, the larger of two.

        1/2 max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²)

    The second is PPO's clip, for values: an update that has moved V by ε towards R moves it no
    further (from OpenAI's baselines; Engstrom et al., arXiv 2005.12729, section 3).

    all of one shape -> the same
    """
    near = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.max((values - returns).square(), (near - returns).square())


def token_weights(mask: Tensor, per_answer: bool) -> Tensor:
    """The weight of each token's loss in the sum that is divided by a count: [n, T] -> [n, T].

    False, PPO: 1, and the count is that of the tokens. True, GRPO: 1 / T for an answer of T tokens,
    and the count is that of the answers (arXiv 2402.03300, equation 3). float64.
    """
    weights = mask.double()
    if per_answer:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return weights


@dataclasses.dataclass
class Targets:
    """What the updates of a step need, fixed by its rollout. Each is [R, s], without gradient.

    Position i is about the token that position i predicts. Where weights is 0, others mean nothing.
    """

    # log π_old of the tokens, by the model that wrote them
    old: Tensor
    advantages: Tensor
    # what `token_weights` gives
    weights: Tensor
    # log π_ref; for GRPO
    reference: Tensor | None = None
    # for the critic of PPO: what it learns, and what it said before the updates
    returns: Tensor | None = None
    old_values: Tensor | None = None

    def at(self, rows, y: Tensor) -> "Targets":
        """The targets of a micro-batch's rows, in the device and dtype of y, the model's output."""

        def pick(x: Tensor | None) -> Tensor | None:
            return x if x is None else x[rows].to(y)

        return Targets(**{name: pick(x) for name, x in vars(self).items()})


def actor_loss(log_probs: Tensor, targets: Targets, clip: float, beta: float = 0.0) -> Tensor:
    """Σ weights (clipped loss + β KL): what a micro-batch adds, before it is divided by the count.

    log_probs: [b, s], of the policy as it is now. beta: of GRPO; PPO has its KL in the advantages.
    """
    # before anything is computed: a number outside answers could overflow, and 0 · inf is nan
    inside = targets.weights > 0
    log_probs, old = only(inside, log_probs), only(inside, targets.old)
    losses, _ = policy_loss(log_probs, old, only(inside, targets.advantages), clip)
    if beta:
        losses = losses + beta * kl_penalty(log_probs, only(inside, targets.reference))
    return (losses * targets.weights).sum()


def critic_loss(values: Tensor, targets: Targets, clip: float) -> Tensor:
    """Σ weights · value loss, as `actor_loss`. values: [b, s], of the critic as it is now."""
    each = values, targets.old_values, targets.returns
    losses = value_loss(*(only(targets.weights > 0, x) for x in each), clip)
    return (losses * targets.weights).sum()


# --- masks ----------------------------------------------------------------------------------------


def only(mask: Tensor, x: Tensor) -> Tensor:
    """x where the mask is true, else 0: also where x is inf or nan."""
    return torch.where(mask.bool(), x, torch.zeros_like(x))


def is_last(mask: Tensor) -> Tensor:
    """True at the last token of each answer. mask: [n, T] -> [n, T]"""
    mask = mask.bool()
    return mask & ~F.pad(mask[:, 1:], (0, 1))
