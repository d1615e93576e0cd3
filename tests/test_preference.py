"""Losses by hand, a value head under every layout, pairs from files, runs of train.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from parity import LLAMA, SMALL, differs, same, train, train_each

import preference

NO_DROPOUT = SMALL | dict(dropout=0.0)
EXPERTS = dict(num_experts=4, router="topk", router_topk=2, micro_batch_size=2)


# --- losses ---------------------------------------------------------------------------------------


def test_reward_loss_by_hand():
    chosen = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss = preference.reward_loss(chosen, rejected)
    expected = [math.log(1 + math.exp(-d)) for d in (1, 0, -5)]
    assert loss.tolist() == pytest.approx(expected, abs=1e-15)
    loss.sum().backward()
    # the gradient is how wrong the comparison is: p - 1
    wrong = [1 / (1 + math.exp(d)) for d in (1, 0, -5)]
    assert chosen.grad.tolist() == pytest.approx([-w for w in wrong])
    assert rejected.grad.tolist() == pytest.approx(wrong)


def test_reward_loss_of_far_rewards_is_finite():
    far = torch.tensor([1e4, -1e4])
    assert preference.reward_loss(far, -far).tolist() == [0.0, 2e4]


def test_dpo_loss_by_hand():
    """Equation 7 of arXiv 2305.18290, as it stands there."""
    g = torch.Generator().manual_seed(0)
    pi_w, pi_l, ref_w, ref_l = -torch.rand(4, 5, generator=g, dtype=torch.float64) * 9
    beta = 0.3
    got = preference.dpo_loss(pi_w, pi_l, ref_w, ref_l, beta)
    inner = beta * (pi_w.exp() / ref_w.exp()).log() - beta * (pi_l.exp() / ref_l.exp()).log()
    torch.testing.assert_close(got.loss, -torch.sigmoid(inner).log())
    torch.testing.assert_close(got.chosen_reward - got.rejected_reward, inner)
    # where the model is the reference
    assert preference.dpo_loss(pi_w, pi_l, pi_w, pi_l, beta).loss.tolist() == [math.log(2)] * 5


def test_gradient_of_dpo():
    """Section 4: -β σ(r_l - r_w) (∇ log π(y_w) - ∇ log π(y_l))."""
    log_p = torch.tensor([-3.0, -1.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    preference.dpo_loss(log_p[:1], log_p[1:], zero, zero, 0.5).loss.sum().backward()
    weight = 0.5 * torch.sigmoid(torch.tensor(0.5 * (-1.0 + 3.0), dtype=torch.float64))
    torch.testing.assert_close(log_p.grad, torch.stack([-weight, weight]))


def test_rows_are_pairs():
    chosen, rejected = preference.pairs_of(torch.arange(6))
    assert chosen.tolist() == [0, 2, 4] and rejected.tolist() == [1, 3, 5]
    y = torch.arange(6.0).view(2, 3)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert preference.sum_over_answers(y, mask).tolist() == [2.0, 0.0]


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_layouts(kind):
    one = train(base=NO_DROPOUT, preference=kind)
    layouts = [
        dict(tp=2),
        dict(tp=2, sequence_parallel=True),
        dict(pp=2),
        dict(pp=2, schedule="zb-h1"),
        dict(zero_stage=1),
        dict(zero_stage=2, micro_batch_size=2),
        dict(zero_stage=3, micro_batch_size=2),
    ]
    for result in train_each(2, layouts, base=NO_DROPOUT, preference=kind):
        same(result, one)
