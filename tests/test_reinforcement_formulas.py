"""ppo.py: by hand, what masks keep out, and where the gradient ends. Beside the library trl:
test_against_trl.py."""

import math

import pytest
import torch

from finetune import reinforcement

# answers of 3, 1 and 2 tokens
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
JUNK = (float("nan"), float("inf"), -float("inf"))


def matrix(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# --- by hand --------------------------------------------------------------------------------------


def test_rewards_by_hand():
    """-β (log π - log π_ref) at each token; the score at the last of each answer."""
    log_probs = matrix([-1, -2, -3], [-1, 9, 9], [-2, -2, 9])
    reference = matrix([-2, -2, -1], [-3, 9, 9], [-1, -2, 9])
    scores = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
    rewards = reinforcement.token_rewards(scores, log_probs, reference, MASK, 0.5)
    assert rewards.tolist() == [[-0.5, 0, 11], [19, 0, 0], [0.5, 30, 0]]


def test_advantages_by_hand():
    """One answer with γ = λ = 1/2. δ = (0 + 2 - 2, 2 + 1 - 4, 4 - 2) = (0, -1, 2). A, from the
    end: 2, then -1 + 2 / 4, then 0 - 0.5 / 4."""
    rewards, values = matrix([0, 2, 4]), matrix([2, 4, 2])
    mask = torch.ones(1, 3)
    advantages, returns = reinforcement.generalized_advantages(rewards, values, mask, 0.5, 0.5)
    assert advantages.tolist() == [[-0.125, -0.5, 2]]
    assert returns.tolist() == [[1.875, 3.5, 4]]


def test_answers_that_share_a_row():
    """As in rows of several documents: what is between them keeps them apart."""
    rewards, values = draw(0, 3, 3), draw(1, 3, 3)
    alone = reinforcement.generalized_advantages(rewards, values, MASK, 0.9, 0.8)
    # a prompt of one token before each
    row_mask = torch.nn.functional.pad(MASK, (1, 0)).view(1, -1)
    in_a_row = [torch.nn.functional.pad(x, (1, 0)).view(1, -1) for x in (rewards, values)]
    together = reinforcement.generalized_advantages(*in_a_row, row_mask, 0.9, 0.8)
    for a, b in zip(alone, together):
        assert torch.equal(b.view(3, 4)[:, 1:], a)


def test_group_advantages_by_hand():
    """Groups (0, 2) and (1, 1): std √2 and 0."""
    scores = torch.tensor([0.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    expected = 1 / (math.sqrt(2) + 1e-4)
    found = reinforcement.group_advantages(scores, 2).tolist()
    assert found == pytest.approx([-expected, expected, 0, 0], rel=1e-14)


@pytest.mark.parametrize("count, size", [(4, 1), (4, 3), (4, 0)])
def test_groups_that_do_not_fit(count, size):
    with pytest.raises(ValueError, match=f"{count} scores in groups of {size}"):
        reinforcement.group_advantages(torch.zeros(count), size)


def test_whiten():
    x = 5 + 3 * draw(0, 3, 3)
    white = reinforcement.whiten(x, MASK)
    assert abs(white[MASK].mean()) < 1e-14
    assert abs(white[MASK].var() - 1) < 1e-7
    assert not white[~MASK].any()
    # one token, and none: nothing to divide by
    for few in (torch.zeros(3, 3), torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]])):
        assert not reinforcement.whiten(x, few).any()


def test_weights_by_hand():
    assert reinforcement.token_weights(MASK, per_answer=False).tolist() == MASK.double().tolist()
    by_answer = reinforcement.token_weights(MASK, per_answer=True)
    assert by_answer.tolist() == [[1 / 3, 1 / 3, 1 / 3], [1, 0, 0], [0.5, 0.5, 0]]
    # an answer without a token
    assert not reinforcement.token_weights(torch.zeros(1, 3), per_answer=True).any()


# --- the clip -------------------------------------------------------------------------------------


# old probability 1/2; ε = 0.2, so that ratios from 0.8 to 1.2 are free
@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        # as it was: the gradient of -A log π
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        # gone far enough: no gradient
        (1.5, 2.0, -2.4, 0.0),
        (0.5, -2.0, 1.6, 0.0),
        # gone in the wrong direction: it comes back, and is not clipped
        (0.5, 2.0, -1.0, -1.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_where_the_clip_holds(ratio, advantage, loss, gradient):
    old = torch.tensor([math.log(0.5)], dtype=torch.float64)
    log_probs = (old + math.log(ratio)).requires_grad_()
    losses, clipped = reinforcement.policy_loss(log_probs, old, matrix(advantage), 0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert log_probs.grad.item() == pytest.approx(gradient, rel=1e-12)
    assert clipped.item() == (gradient == 0)


@pytest.mark.parametrize(
    "value, loss, gradient",
    [
        # V_old = 0, R = 1, ε = 0.2
        (0.1, 0.405, -0.9),
        # moved by more than ε towards R: no further
        (0.5, 0.32, 0.0),
        # away from R
        (-0.5, 1.125, -1.5),
    ],
)
def test_where_a_value_is_clipped(value, loss, gradient):
    values = matrix(value).requires_grad_()
    losses = reinforcement.value_loss(values, matrix(0.0), matrix(1.0), 0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert values.grad.item() == pytest.approx(gradient, rel=1e-12)


# --- Kullback-Leibler divergence ------------------------------------------------------------------


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """log π and log π_ref over 5 tokens."""
    return draw(0, 5).log_softmax(0), draw(1, 5).log_softmax(0)


def test_both_estimates_have_the_mean_of_the_divergence():
    policy, reference = distributions()
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    for estimate in (reinforcement.log_ratio, reinforcement.kl_penalty):
        mean = (policy.exp() * estimate(policy, reference)).sum()
        assert mean.item() == pytest.approx(exact.item(), rel=1e-12)
    assert (reinforcement.log_ratio(policy, reference) < 0).any()
    assert (reinforcement.kl_penalty(policy, reference) > 0).all()
    assert not reinforcement.kl_penalty(policy, policy).any()


# --- masks, and what the updates get --------------------------------------------------------------


def targets_of(junk: float) -> reinforcement.Targets:
    """With `junk` at every position outside answers."""

    def field(seed: int) -> torch.Tensor:
        return draw(seed, 3, 3).masked_fill(~MASK, junk)

    weights = reinforcement.token_weights(MASK, per_answer=True)
    return reinforcement.Targets(field(0), field(1), weights, field(2), field(3), field(4))


@pytest.mark.parametrize("junk", [*JUNK, 1e300])
def test_positions_outside_answers_do_not_count(junk):
    """Neither in advantages nor in losses nor in gradients."""
    found = {}
    for outside in (0.0, junk):
        log_probs, values = draw(5, 3, 3), draw(6, 3, 3)
        rewards = reinforcement.token_rewards(
            torch.ones(3, dtype=torch.float64),
            log_probs.masked_fill(~MASK, outside),
            draw(7, 3, 3).masked_fill(~MASK, outside),
            MASK,
            0.1,
        )
        rewards, values = (x.masked_fill(~MASK, outside) for x in (rewards, values))
        advantages, returns = reinforcement.generalized_advantages(rewards, values, MASK)
        white = reinforcement.whiten(advantages.masked_fill(~MASK, outside), MASK)
        log_probs = log_probs.masked_fill(~MASK, outside).requires_grad_()
        values.requires_grad_()
        targets = targets_of(outside)
        loss = reinforcement.actor_loss(log_probs, targets, 0.2, beta=0.1)
        loss = loss + reinforcement.critic_loss(values, targets, 0.2)
        loss.backward()
        found[outside] = (
            rewards[MASK],
            advantages,
            returns,
            white,
            loss,
            log_probs.grad,
            values.grad,
        )
    for clean, dirty in zip(found[0.0], found[junk]):
        assert torch.equal(clean, dirty)
