"""--rollout-lag: answers that older weights have written, and the importance weights for them."""

import math

import pytest
import torch
from parity import again, differs, needs_compiler, same, train, train_each, without_cpp
from test_reinforcement import BASE, EXPERTS, GRPO, PPO, SEQUENCE

from course.parity import Run
from course.training_commands import config_of
from finetune import policy_gradients

LAG = dict(rollout_lag=1)
SHORT = BASE | dict(answer_tokens=4)


@pytest.mark.parametrize(
    "world, base, layouts",
    [
        (2, SHORT | GRPO | LAG, [SEQUENCE]),
        again(2, SHORT | GRPO | LAG, [dict(zero_stage=3, rollout_tp=2)]),
        again(2, SHORT | GRPO | LAG, [dict(pp=2), dict(zero_stage=2), dict(tp=2, rollout_tp=2)]),
        again(2, SHORT | PPO | LAG, [dict(pp=2, schedule="zb-h1"), dict(zero_stage=1)]),
        again(2, SHORT | GRPO | LAG | EXPERTS, [dict(ep=2)]),
        again(2, SHORT | GRPO | LAG, [dict(tp=2, recompute="full", head_chunk=4)]),
        again(2, SHORT | GRPO | LAG | dict(fp8="current", fp8_skip=0), [dict(tp=2)]),
        again(2, SHORT | GRPO | LAG | dict(peft="lora"), [dict(tp=2), dict(pp=2, rollout_tp=1)]),
        again(4, SHORT | GRPO | dict(rollout_lag=2), [dict(tp=2, pp=2), dict(tp=2, zero_stage=2)]),
    ],
)
def test_layouts(world, base, layouts):
    """The second step learns from answers of the weights before the first."""
    for result in train_each(world, layouts, steps=2, base=base):
        same(result, train(steps=2, base=base))


@needs_compiler
@pytest.mark.repetition
def test_compiled():
    compiled = train(steps=2, base=SHORT | GRPO | LAG, compile=True, mutate=without_cpp)
    same(compiled, train(steps=2, base=SHORT | GRPO | LAG))


def traced(**flags) -> tuple[list, list]:
    """Three steps: ((number of the step, sum of the weights) of each call of the writer, the
    samples that each step has learned from)."""
    run = Run(1, config_of(SHORT | GRPO | flags))
    task, calls, learned = run.trainer.task, [], []
    original = task.writer.write

    def write(prompts, samples, step, end_tokens):
        weights = sum(p.detach().double().sum().item() for p in run.trainer.model.parameters())
        calls.append((step, weights))
        return original(prompts, samples, step, end_tokens)

    task.writer.write = write
    for step in (1, 2, 3):
        run.trainer.forward_backward(step, run.dataset)
        run.trainer.update(step)
        learned.append([answer.sample for answer in task.rows.answers])
    return calls, learned


def test_the_weights_of_n_steps_before_write():
    now, learned = traced()
    weights = [w for _, w in now]
    assert [step for step, _ in now] == [1, 2, 3] and len(set(weights)) == 3
    calls, late = traced(rollout_lag=1)
    assert [step for step, _ in calls] == [1, 2, 3, 4]
    assert calls[0][1] == calls[1][1] == weights[0]
    # The third step learns from what the weights after the first have written.
    assert calls[2][1] not in (weights[0], calls[3][1])
    assert late == learned


def test_without_updates_age_changes_nothing():
    """With a rate of 0 all weights are equal: so are the gradients, and the importance weights are
    1."""
    flags = SHORT | GRPO | dict(lr=0.0, min_lr=0.0)
    same(train(steps=2, base=flags, **LAG), train(steps=2, base=flags))


def test_the_importance_weight_by_hand():
    old, written = torch.tensor([0.5, 0.5, 0.1]).log(), torch.tensor([0.25, 0.1, 0.2]).log()
    found = policy_gradients.stale_advantages(torch.tensor([1.0, -1.0, 2.0]), old, written, 2.0)
    torch.testing.assert_close(found, torch.tensor([2.0, -2.0, 1.0]))


def test_it_makes_the_gradient_that_of_the_policy():
    """A policy of four tokens, older weights of other probabilities: the mean over all that these
    write, weighted, is the policy gradient."""
    logits = torch.tensor([0.3, -0.2, 0.1, 0.6], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.1, 0.3, 0.4, 0.2], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=torch.float64)
    log_probs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_probs.exp() * rewards).sum(), logits, retain_graph=True)
    for cap, is_exact in ((math.inf, True), (1.0, False)):
        old = log_probs.detach()
        advantages = policy_gradients.stale_advantages(rewards, old, mu.log(), cap)
        losses, _ = policy_gradients.policy_loss(log_probs, old, advantages, 0.2)
        (found,) = torch.autograd.grad((-losses * mu).sum(), logits, retain_graph=True)
        assert torch.allclose(found, exact, rtol=1e-12, atol=1e-14) == is_exact


def no_importance_weights() -> None:
    policy_gradients.stale_advantages = lambda advantages, old, written, cap: advantages


def test_a_bug_is_seen():
    one = train(steps=2, base=SHORT | GRPO | LAG)
    differs(train(steps=2, base=SHORT | GRPO | LAG, mutate=no_importance_weights), one, 1e-6)
    differs(train(steps=2, base=SHORT | GRPO), one, 1e-6)
