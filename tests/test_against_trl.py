"""Losses of finetune/preference.py and finetune/reinforcement.py are those of the library `trl`, on
equal tensors.

Where trl has a function of its own, it is called, with a substitute for its trainer. Most of PPO's
lines stand inside trl's PPOTrainer.train: they are cut out of its source, and run as they are.
"""

import ast
import inspect
import textwrap
import types
from collections import defaultdict
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F

from finetune import policy_gradients, preference

CLIP = 0.2
BETA = 0.3
LAMBDA = 0.9
# answers of at most T tokens
N, T = 6, 7
LENGTHS = torch.tensor([7, 3, 1, 5, 7, 2])
MASK = torch.arange(T) < LENGTHS[:, None]
FULL = torch.ones(N, T, dtype=torch.bool)


@pytest.fixture(scope="module")
def trl():
    """The modules that are compared with. They take two seconds to import."""
    with pytest.MonkeyPatch.context() as patch:
        # PPO has left trl after 1.12.0, and its import warns that it may
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        where = "pyproject.toml names trl 1.12.0, the last with PPO, and it is not here"
        pytest.importorskip("trl.experimental.ppo", reason=where)
    from trl.experimental.ppo import ppo_trainer
    from trl.trainer import dpo_trainer, grpo_trainer, reward_trainer

    return types.SimpleNamespace(
        ppo=ppo_trainer, grpo=grpo_trainer, dpo=dpo_trainer, reward=reward_trainer
    )


@pytest.fixture(params=[(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
def precision(request):
    """(dtype, tolerance). The default too: trl divides an integer by an integer."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(request.param[0])
    yield request.param
    torch.set_default_dtype(dtype)


def assert_close(ours, theirs, tolerance):
    worst = (ours - theirs).abs().max() / theirs.abs().max()
    assert worst <= tolerance, f"{worst:.1e}"


def log_probs(dtype, seed):
    """[N, T], as of tokens that are not very unlikely."""
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(N, T, generator=generator, dtype=torch.float64).to(dtype)


def numbers(dtype, seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def leaf(x):
    return x.clone().requires_grad_()


def trainer_of_trl(**fields):
    """What its methods read of a trainer, on one process without logging."""
    accelerator = MagicMock(device="cpu")
    for name in ("gather", "gather_for_metrics"):
        getattr(accelerator, name).side_effect = lambda x: x
    accelerator.reduce.side_effect = lambda x, reduction: x
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    settings = dict(use_bias_correction_kl=False, delta=None, center_rewards_coefficient=None)
    return types.SimpleNamespace(
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(**settings),
        _metrics=metrics,
        _total_train_tokens=0,
        aux_loss_enabled=False,
        **fields,
    )


class Outputs(torch.nn.Module):
    """A model that gives what it was given."""

    def __init__(self, logits):
        super().__init__()
        self.outputs = types.SimpleNamespace(logits=logits)

    def forward(self, **inputs):
        return self.outputs


def lines(function, first, last):
    """Statements of a function, from the one that begins with `first` to that with `last`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        block = getattr(node, "body", None)
        texts = [ast.unparse(each) for each in block] if isinstance(block, list) else []
        starts = [n for n, text in enumerate(texts) if text.startswith(first)]
        ends = [n for n, text in enumerate(texts) if text.startswith(last)]
        if starts and ends:
            module = ast.Module(block[starts[0] : ends[-1] + 1], type_ignores=[])
            return compile(module, "lines of trl", "exec")
    raise AssertionError(f"{function.__qualname__} has no lines from {first!r} to {last!r}")


def run(module, code, **names):
    """Their names after the statements ran."""
    names = vars(module) | names
    exec(code, names)
    return types.SimpleNamespace(**names)


# --- PPO ------------------------------------------------------------------------------------------


def trl_advantages(trl, scores, log_probs, reference, values, lengths):
    """Everything between the rollout and the updates. lengths: [n] of answers in [n, T]"""
    code = lines(trl.ppo.PPOTrainer.train, "response_idxs = ", "advantages = torch.masked_fill")
    settings = dict(kl_estimator="k1", kl_coef=BETA, whiten_rewards=False, gamma=0.99, lam=LAMBDA)
    return run(
        trl.ppo,
        code,
        args=types.SimpleNamespace(**settings),
        responses=log_probs,
        sequence_lengths=lengths - 1,
        logprobs=log_probs,
        ref_logprobs=reference,
        values=values,
        scores=scores,
    )


def our_advantages(scores, log_probs, reference, values, mask):
    rewards = policy_gradients.token_rewards(scores, log_probs, reference, mask, BETA)
    return rewards, *policy_gradients.generalized_advantages(rewards, values, mask, 0.99, LAMBDA)


def test_ppo_advantages(trl, precision):
    """Answers of one length: rewards, returns, and advantages after whitening."""
    dtype, tolerance = precision
    old, reference = log_probs(dtype, 0), log_probs(dtype, 1)
    scores, values = numbers(dtype, 2, N), numbers(dtype, 3, N, T)
    theirs = trl_advantages(trl, scores, old, reference, values, torch.full((N,), T))
    rewards, advantages, returns = our_advantages(scores, old, reference, values, FULL)
    assert_close(rewards, theirs.rewards, tolerance)
    assert_close(returns, theirs.returns, tolerance)
    assert_close(policy_gradients.whiten(advantages, FULL), theirs.advantages, tolerance)


def test_ppo_advantages_of_answers_of_several_lengths(trl, precision):
    """trl has each answer alone, without padding; ours are padded, with junk behind them."""
    dtype, tolerance = precision
    old, reference = log_probs(dtype, 0), log_probs(dtype, 1)
    scores, values = numbers(dtype, 2, N), numbers(dtype, 3, N, T)
    junk = [x.masked_fill(~MASK, float("nan")) for x in (old, reference, values)]
    rewards, advantages, returns = our_advantages(scores, *junk, MASK)
    raw = torch.zeros(N, T, dtype=dtype)
    for n, length in enumerate(LENGTHS):
        alone = [x[n : n + 1, :length] for x in (old, reference, values)]
        theirs = trl_advantages(trl, scores[n : n + 1], *alone, length.view(1))
        assert_close(rewards[n : n + 1, :length], theirs.rewards, tolerance)
        assert_close(returns[n : n + 1, :length], theirs.returns, tolerance)
        raw[n, :length] = (theirs.returns - alone[2])[0]
    whitened = torch.masked_fill(trl.ppo.masked_whiten(raw, MASK), ~MASK, 0)
    assert_close(policy_gradients.whiten(advantages, MASK), whitened, tolerance)
    for x in (rewards, advantages, returns):
        assert not x[~MASK].any()


def trl_ppo_loss(trl, **tensors):
    """The two losses of a micro-batch, and their sum."""
    code = lines(trl.ppo.PPOTrainer.train, "vpredclipped = ", "loss = pg_loss")
    args = types.SimpleNamespace(cliprange_value=CLIP, cliprange=CLIP, vf_coef=1.0)
    return run(trl.ppo, code, args=args, micro_batch_inds=slice(None), **tensors)


def test_ppo_losses(trl, precision):
    """Policy and critic, with both gradients, after the policy has moved away."""
    dtype, tolerance = precision
    ours, theirs = leaf(log_probs(dtype, 4)), leaf(log_probs(dtype, 4))
    our_values, their_values = (leaf(numbers(dtype, 5, N, T)) for _ in range(2))
    old, advantages = log_probs(dtype, 0), numbers(dtype, 6, N, T)
    returns, old_values = numbers(dtype, 7, N, T), numbers(dtype, 8, N, T)
    # critic: answers of one length, because trl's learns one value more
    found = trl_ppo_loss(
        trl,
        padding_mask=~MASK,
        padding_mask_p1=~FULL,
        new_logprobs=theirs,
        mb_logprobs=old,
        mb_advantage=advantages,
        vpred=their_values,
        mb_values=old_values,
        mb_return=returns,
    )
    found.loss.backward()
    weights = policy_gradients.token_weights(MASK, per_answer=False).to(dtype)
    targets = policy_gradients.Targets(old, advantages, weights)
    actor = policy_gradients.actor_loss(ours, targets, CLIP) / LENGTHS.sum()
    actor.backward()
    weights = policy_gradients.token_weights(FULL, per_answer=False).to(dtype)
    targets = policy_gradients.Targets(old, advantages, weights, None, returns, old_values)
    critic = policy_gradients.critic_loss(our_values, targets, CLIP) / FULL.sum()
    critic.backward()
    assert_close(actor, found.pg_loss, tolerance)
    assert_close(critic, found.vf_loss, tolerance)
    assert_close(ours.grad, theirs.grad, tolerance)
    assert_close(our_values.grad, their_values.grad, tolerance)
    # which tokens are clipped
    _, clipped = policy_gradients.policy_loss(ours, old, advantages, CLIP)
    assert torch.equal(clipped, found.pg_losses2 > found.pg_losses)
    assert 0 < clipped.float().mean() < 1


# --- GRPO -----------------------------------------------------------------------------------------


def test_grpo_advantages(trl, precision):
    dtype, tolerance = precision
    code = lines(
        trl.grpo.GRPOTrainer._generate_and_score_completions,
        "if self.multi_objective_aggregation",
        "advantages = torch.nan_to_num",
    )
    scores = numbers(dtype, 0, 12)
    # a group whose answers are all as good as each other
    scores[4:8] = 0.5
    found = run(
        trl.grpo,
        code,
        self=types.SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards="group",
            reward_weights=torch.ones(1, dtype=dtype),
        ),
        rewards_per_func=scores[:, None],
        unscorable_mask=torch.zeros(12, dtype=torch.bool),
        num_generations=4,
        device="cpu",
    )
    ours = policy_gradients.group_advantages(scores, 4)
    assert_close(ours, found.advantages, tolerance)
    assert not ours[4:8].any()


@pytest.mark.parametrize("beta", [0.0, BETA])
def test_grpo_loss(trl, precision, beta):
    dtype, tolerance = precision
    ours, theirs = leaf(log_probs(dtype, 4)), leaf(log_probs(dtype, 4))
    old, reference = log_probs(dtype, 0), log_probs(dtype, 1)
    advantages = numbers(dtype, 6, N)
    trainer = trainer_of_trl(
        _get_per_token_logps_and_entropies=lambda *_, **__: (theirs, torch.zeros(N, T), None),
        beta=beta,
        loss_type="grpo",
        epsilon_low=CLIP,
        epsilon_high=CLIP,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros(N, T, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": ids,
        "completion_mask": MASK.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }
    expected = trl.grpo.GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()
    targets = policy_gradients.Targets(
        old,
        advantages[:, None].expand(N, T),
        policy_gradients.token_weights(MASK, per_answer=True).to(dtype),
        reference,
    )
    loss = policy_gradients.actor_loss(ours, targets, CLIP, beta) / N
    loss.backward()
    assert_close(loss, expected, tolerance)
    assert_close(ours.grad, theirs.grad, tolerance)
    if beta:
        kl = (policy_gradients.kl_penalty(ours, reference) * MASK).sum() / MASK.sum()
        assert abs(kl.item() - trainer._metrics["train"]["kl"][0]) <= tolerance * kl


# --- preferences ----------------------------------------------------------------------------------


def interleaved(rows):
    """chosen 0, chosen 1, .., rejected 0, ..: trl's order -> chosen 0, rejected 0, .."""
    chosen, rejected = rows.chunk(2)
    return torch.stack((chosen, rejected), 1).flatten(0, 1)


def test_dpo_loss(trl, precision):
    dtype, tolerance = precision
    vocabulary, s = 11, T + 1
    ids = torch.randint(vocabulary, (N, s), generator=torch.Generator().manual_seed(0))
    counted = F.pad(MASK, (1, 0))
    ours, theirs = (leaf(numbers(dtype, 1, N, s, vocabulary)) for _ in range(2))
    reference = numbers(dtype, 2, N, s, vocabulary)

    trainer = trainer_of_trl(
        ref_model=Outputs(reference),
        beta=BETA,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=False,
        use_weighting=False,
    )
    trainer.model = MagicMock(training=True)
    trainer.args = MagicMock(gradient_checkpointing_kwargs=None)
    inputs = {
        "input_ids": ids,
        "completion_mask": counted.long(),
        "attention_mask": torch.ones_like(ids),
    }
    compute = trl.dpo.DPOTrainer._compute_loss
    expected = compute(trainer, Outputs(theirs), inputs, False)
    expected.backward()

    def answers(logits):
        """log π of each answer: (chosen, rejected)."""
        each = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        sums = preference.sum_over_answers(each, counted[:, 1:])
        return preference.pairs_of(interleaved(sums))

    found = preference.dpo_loss(*answers(ours), *answers(reference), BETA)
    loss = found.loss.mean()
    loss.backward()
    assert_close(loss, expected, tolerance)
    assert_close(ours.grad, theirs.grad, tolerance)
    metrics = trainer._metrics["train"]
    for name in ("chosen", "rejected"):
        reward = getattr(found, f"{name}_reward").mean()
        assert abs(reward - metrics[f"rewards/{name}"][0]) <= tolerance * abs(reward)


def test_reward_loss(trl, precision):
    dtype, tolerance = precision
    ours, theirs = (leaf(numbers(dtype, 0, N, 1)) for _ in range(2))
    inputs = {"attention_mask": torch.ones(N, T)}
    expected = trl.reward.RewardTrainer.compute_loss(trainer_of_trl(), Outputs(theirs), inputs)
    expected.backward()
    chosen, rejected = preference.pairs_of(interleaved(ours[:, 0]))
    loss = preference.reward_loss(chosen, rejected).mean()
    loss.backward()
    assert_close(loss, expected, tolerance)
    assert_close(ours.grad, theirs.grad, tolerance)
