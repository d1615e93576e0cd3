"""Advantages and the clip by hand, and what masks keep out. test_against_trl.py compares every
formula with trl's; test_reinforcement.py follows whole steps by hand."""

import math

import pytest
import torch

from finetune import policy_gradients

# answers of 3, 1 and 2 tokens
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
JUNK = (float("nan"), float("inf"), -float("inf"))


def matrix(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# --- by hand --------------------------------------------------------------------------------------


def test_advantages_by_hand():
    """One answer with γ = λ = 1/2. δ = (0 + 2 - 2, 2 + 1 - 4, 4 - 2) = (0, -1, 2). A, from the
    end: 2, then -1 + 2 / 4, then 0 - 0.5 / 4."""
    rewards, values = matrix([0, 2, 4]), matrix([2, 4, 2])
    mask = torch.ones(1, 3)
    advantages, returns = policy_gradients.generalized_advantages(rewards, values, mask, 0.5, 0.5)
    assert advantages.tolist() == [[-0.125, -0.5, 2]]
    assert returns.tolist() == [[1.875, 3.5, 4]]


@pytest.mark.parametrize("count, size", [(4, 1), (4, 3), (4, 0)])
def test_groups_that_do_not_fit(count, size):
    with pytest.raises(ValueError, match=f"{count} scores in groups of {size}"):
        policy_gradients.group_advantages(torch.zeros(count), size)


def test_nothing_to_whiten():
    """One token, and none: there is nothing to divide by."""
    for few in (torch.zeros(3, 3), torch.tensor([[0, 0, 0], [0, 1, 0], [0, 0, 0]])):
        assert not policy_gradients.whiten(draw(0, 3, 3), few).any()


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
    losses, clipped = policy_gradients.policy_loss(log_probs, old, matrix(advantage), 0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, rel=1e-12)
    assert log_probs.grad.item() == pytest.approx(gradient, rel=1e-12)
    assert clipped.item() == (gradient == 0)


# --- masks, and what the updates get --------------------------------------------------------------


def targets_of(junk: float) -> policy_gradients.Targets:
    """With `junk` at every position outside answers."""

    def field(seed: int) -> torch.Tensor:
        return draw(seed, 3, 3).masked_fill(~MASK, junk)

    weights = policy_gradients.token_weights(MASK, per_answer=True)
    return policy_gradients.Targets(field(0), field(1), weights, field(2), field(3), field(4))


@pytest.mark.parametrize("junk", [*JUNK, 1e300])
def test_positions_outside_answers_do_not_count(junk):
    """Neither in advantages nor in losses nor in gradients."""
    found = {}
    for outside in (0.0, junk):
        log_probs, values = draw(5, 3, 3), draw(6, 3, 3)
        rewards = policy_gradients.token_rewards(
            torch.ones(3, dtype=torch.float64),
            log_probs.masked_fill(~MASK, outside),
            draw(7, 3, 3).masked_fill(~MASK, outside),
            MASK,
            0.1,
        )
        rewards, values = (x.masked_fill(~MASK, outside) for x in (rewards, values))
        advantages, returns = policy_gradients.generalized_advantages(rewards, values, MASK)
        white = policy_gradients.whiten(advantages.masked_fill(~MASK, outside), MASK)
        log_probs = log_probs.masked_fill(~MASK, outside).requires_grad_()
        values.requires_grad_()
        targets = targets_of(outside)
        loss = policy_gradients.actor_loss(log_probs, targets, 0.2, beta=0.1)
        loss = loss + policy_gradients.critic_loss(values, targets, 0.2)
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
