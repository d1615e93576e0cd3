"""Learning from rewards: equal under every layout, and equal to a loop over single answers. Runs of
train.py are in test_reinforcement_runs.py."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from parity import LLAMA, SMALL, again, difference, same, train, train_each

import train as trainer
from course import parity, ranks
from course.parity import Run
from course.training_commands import config_of
from finetune import answer_rows, policy_gradients
from finetune.reference_models import Critic, FrozenModel, OnRows, RewardModel, beside
from finetune.reinforcement import ReinforcementTask
from optimizer import learning_rate

# rows of several answers; a clip that holds for some tokens of the second update
BASE = SMALL | dict(seq_length=24, dropout=0.0, answer_tokens=8, micro_batch_size=1, lr=5e-3)
BASE |= dict(epochs=2, clip_range=0.02)
GRPO = dict(command="reinforcement.py", method="grpo", group_size=4)
PPO = dict(command="reinforcement.py", method="ppo", critic_lr=1e-2)
DEEP = BASE | dict(num_layers=4)
METHODS = {"grpo": GRPO, "ppo": PPO}
EXPERTS = dict(num_experts=4, router="topk", router_topk=2)


# --- the gate -------------------------------------------------------------------------------------

LAYOUTS = [
    dict(tp=2, sequence_parallel=True),
    dict(pp=2, schedule="zb-h1"),
    dict(zero_stage=2, micro_batch_size=None),
    dict(zero_stage=3),
]
# where the answers are written under another layout than that of training
REMOTE = [
    dict(zero_stage=3, rollout_tp=2),
    dict(tp=2, rollout_pp=2),
    dict(pp=2, rollout_tp=1),
    # the copy is made while the parameters of the update before are gathered
    dict(zero_stage=1, rollout_tp=2),
]


SEQUENCE = dict(tp=2, sequence_parallel=True)
SINKHORN = dict(num_experts=4, router="sinkhorn")
# the reference is the policy without its adapters
LORA = dict(peft="lora", lora_rank=2)
# the head is no copy of the embedding
OF_LLAMA = LLAMA | {name: BASE[name] for name in BASE.keys() - SMALL.keys()} | dict(dropout=0.0)


@pytest.mark.parametrize(
    "world, base, layouts",
    [
        (2, BASE | PPO, LAYOUTS),
        (2, BASE | GRPO, LAYOUTS[:1]),
        (2, BASE | GRPO, REMOTE[:2]),
        (2, BASE | PPO, REMOTE[2:]),
        (2, DEEP | PPO, [dict(pp=2, virtual_stages=2)]),
        again(2, OF_LLAMA | PPO, [SEQUENCE | dict(rollout_pp=2)]),
        # routers take raw logits: an answer does not depend on what is beside it
        (2, BASE | PPO | EXPERTS, [dict(ep=2)]),
        again(2, BASE | GRPO | SINKHORN, [dict(ep=2, zero_stage=3)]),
        (2, BASE | GRPO | LORA, [dict(zero_stage=3, rollout_tp=2)]),
        again(2, BASE | GRPO | LORA, [SEQUENCE]),
        again(2, BASE | GRPO, LAYOUTS[1:] + REMOTE[2:]),
        again(2, BASE | PPO, REMOTE[:2]),
        again(2, DEEP | PPO, [dict(pp=2, virtual_stages=2, schedule="dualpipe-v")]),
        again(4, DEEP | GRPO, [dict(tp=2, zero_stage=3, rollout_tp=1), dict(tp=4, rollout_pp=4)]),
        again(4, DEEP | PPO, [SEQUENCE | dict(pp=2, virtual_stages=2)]),
        again(4, DEEP | PPO, [dict(pp=2, zero_stage=2, rollout_tp=2, rollout_pp=2)]),
        again(2, BASE | GRPO | EXPERTS, [SEQUENCE, dict(rollout_tp=2)]),
    ],
)
def test_layouts(world, base, layouts):
    """The gradients of the last update of the first step, and what two steps have made of the
    weights, of the critic too."""
    one = train(steps=2, base=base)
    learns_values = any(name.startswith("critic.") for name in one.parameters)
    assert learns_values == (base["method"] == "ppo")
    for result in train_each(world, layouts, steps=2, base=base):
        same(result, one)


def test_one_update():
    """The gradients of the first update. Its loss is the mean of the advantages, which is 0."""
    flags = GRPO | dict(epochs=1)
    one = train(steps=2, base=BASE, **flags)
    for result in train_each(2, [SEQUENCE, dict(zero_stage=3)], steps=2, base=BASE, **flags):
        worst = difference(result, one)
        assert all(worst[kind] < 1e-10 for kind in ("norm", "gradient", "parameter")), worst
        assert result.losses == pytest.approx(one.losses, rel=1e-10, abs=1e-13)


# --- before the first update ----------------------------------------------------------------------


def before_the_first_update(rank: int, world: int, variants: list[dict]) -> list[tuple]:
    """For each layout: whether policy and reference are equal, bit for bit; the KL divergence of
    the first step; the distance of training forwards from the rollout."""
    found = []
    for flags in variants:
        run = Run(world, config_of(flags))
        policy = run.trainer.task
        policy.write(1, run.dataset, range(8))
        now, reference = policy.outputs(policy.rows), policy.reference_losses()
        if policy.config.peft:
            # adapters change it; without them it is the base, which a second model has too
            assert not torch.equal(now, reference)
            alone = replace(policy.config, peft=None)
            now = beside(run.trainer, OnRows(FrozenModel()), alone).outputs(policy.rows)
        run.trainer.forward_backward(1, run.dataset)
        numbers = {name: x.item() for name, x in policy.statistics().items()}
        found.append((torch.equal(now, reference), numbers["kl"], numbers["policy_change"]))
    return found


@pytest.mark.parametrize("world", [1, 2, again(4)])
def test_the_policy_begins_as_its_reference(world):
    layouts = {
        1: [dict(), dict(peft="lora"), EXPERTS],
        2: [
            dict(pp=2, schedule="zb-h1"),
            REMOTE[0],
            dict(peft="lora", tp=2, sequence_parallel=True),
            EXPERTS | dict(ep=2),
        ],
        4: [dict(tp=2, pp=2, sequence_parallel=True), dict(tp=2, zero_stage=3)],
    }[world]
    variants = [BASE | GRPO | dict(epochs=1) | layout for layout in layouts]
    for of_rank in ranks.run(before_the_first_update, world, world, variants):
        for layout, (equal, kl, change) in zip(layouts, of_rank, strict=True):
            assert equal, layout
            # nats in an answer; nats in a token
            if "peft" not in layout:
                assert abs(kl) < 1e-12, layout
            assert change < 1e-13, layout


# --- by hand --------------------------------------------------------------------------------------

BY_HAND = BASE | dict(beta=0.3, gae_lambda=0.9, weight_decay=0.0)


class Rewarded(Run):
    """A run on one device. With ppo a reward model rates the answers, with grpo a function."""

    def __init__(self, config: trainer.Config):
        super().__init__(1, config)
        if config.method == "ppo":
            # with other weights than the critic
            of_values = replace(config.of_values(None), seed=9)
            self.trainer.task.reward_model = beside(self.trainer, OnRows(RewardModel()), of_values)


class Learner:
    """A model with torch's AdamW."""

    def __init__(self, model, lr: float, config: trainer.Config):
        self.parameters = dict(model.named_parameters())
        self.lr, self.config = lr, config
        self.adamw = torch.optim.AdamW(
            self.parameters.values(), lr, (0.9, 0.95), 1e-8, weight_decay=0.0
        )

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        return dict(zip(self.parameters, gradients))

    def update(self, step: int, gradients: dict[str, torch.Tensor]) -> None:
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        for name, p in self.parameters.items():
            p.grad = gradients[name] * min(1.0, self.config.grad_clip / norm)
        lr = learning_rate(step, self.lr, self.lr / 10, 0, self.config.steps)
        self.adamw.param_groups[0]["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()


class ByHand:
    """The same steps, one answer after the other: nothing is packed, padded or cached. Of a run it
    takes what the answers say."""

    def __init__(self, config: trainer.Config):
        self.config = config
        of_policy = Rewarded(config).trainer
        self.policy, self.reference = of_policy.model, Rewarded(config).trainer.model
        task = of_policy.task
        self.reward_model, self.critic = task.reward_model, task.critic
        self.learner = Learner(self.policy, config.lr, config)
        if self.critic:
            self.critic = self.critic.trainer.model
            self.reward_model = self.reward_model.trainer.model
            self.critic_learner = Learner(self.critic, config.critic_lr, config)

    def log_probs(self, model, answer) -> torch.Tensor:
        """[T]: log π of each token."""
        ids = torch.tensor(answer.prompt + answer.ids)
        log_p = model(ids[:-1].unsqueeze(0))[0].log_softmax(-1)  # [n - 1, V]
        return log_p.gather(1, ids[1:, None]).squeeze(1)[len(answer.prompt) - 1 :]

    def values(self, answer) -> torch.Tensor:
        """[T]: what the critic expects before each token."""
        ids = torch.tensor(answer.prompt + answer.ids[:-1])
        return self.critic(ids.unsqueeze(0))[0, len(answer.prompt) - 1 :]

    def scores(self, answers, dataset) -> list[float]:
        if not self.reward_model:
            return [dataset.reward(answer.sample, answer.ids) for answer in answers]
        # of a text as a whole, read at its last token
        texts = [torch.tensor(answer.prompt + answer.ids) for answer in answers]
        return [self.reward_model(ids.unsqueeze(0))[0, -1].item() for ids in texts]

    def in_groups(self, scores, old) -> list:
        """The advantages of GRPO: a list of T numbers for each answer."""
        groups = torch.tensor(scores, dtype=torch.float64).view(-1, self.config.group_size)
        relative = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return [a.expand(len(o)) for a, o in zip(relative.view(-1), old)]

    def generalized(self, scores, old, reference, values) -> tuple[list, list]:
        """(advantages, returns) of PPO."""
        lam = self.config.gae_lambda
        advantages, returns = [], []
        for score, o, r, v in zip(scores, old, reference, values):
            rewards = -self.config.beta * (o - r)
            rewards[-1] += score
            surprise = rewards + torch.cat([v[1:], torch.zeros(1)]) - v
            # with weights 1, λ, λ² .. from each token on
            at = torch.arange(len(v), dtype=torch.float64)
            a = (lam ** (at - at[:, None])).triu() @ surprise
            advantages.append(a)
            returns.append(a + v)
        flat = torch.cat(advantages)
        return [(a - flat.mean()) / (flat.var() + 1e-8).sqrt() for a in advantages], returns

    def policy_loss(self, answers, old, reference, advantages) -> torch.Tensor:
        total, clip = 0.0, self.config.clip_range
        for answer, o, r, a in zip(answers, old, reference, advantages):
            now = self.log_probs(self.policy, answer)
            ratio = (now - o).exp()
            loss = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
            if not self.critic:
                loss = loss + self.config.beta * ((r - now).exp() - (r - now) - 1)
            self.changes.append((now - o).abs().detach())
            total = total + (loss.sum() if self.critic else loss.mean())
        return total / (sum(map(len, old)) if self.critic else len(answers))

    def value_loss(self, answers, old_values, returns) -> torch.Tensor:
        total, clip = 0.0, self.config.clip_range
        for answer, before, target in zip(answers, old_values, returns):
            now = self.values(answer)
            near = torch.maximum(torch.minimum(now, before + clip), before - clip)
            total = total + torch.maximum((now - target) ** 2, (near - target) ** 2).sum() / 2
        return total / sum(map(len, returns))

    def step(self, step: int, answers, dataset) -> tuple[dict, dict]:
        """(gradients of the last update, numbers). That update is left to the caller."""
        with torch.no_grad():
            old = [self.log_probs(self.policy, answer) for answer in answers]
            reference = [self.log_probs(self.reference, answer) for answer in answers]
            scores = self.scores(answers, dataset)
            if self.critic:
                values = [self.values(answer) for answer in answers]
                advantages, returns = self.generalized(scores, old, reference, values)
            else:
                advantages = self.in_groups(scores, old)
        self.changes, value_losses = [], []
        for _ in range(self.config.epochs):
            loss = self.policy_loss(answers, old, reference, advantages)
            gradients = self.learner.gradients(loss)
            self.learner.update(step, gradients)
            if self.critic:
                value_losses.append(self.value_loss(answers, values, returns))
                self.critic_learner.update(step, self.critic_learner.gradients(value_losses[-1]))
        numbers = dict(
            loss=loss.item(),
            reward=sum(scores) / len(scores),
            kl=sum((o - r).sum().item() for o, r in zip(old, reference)) / len(answers),
            policy_change=torch.cat(self.changes).mean().item(),
        )
        if self.critic:
            numbers["value_loss"] = sum(x.item() for x in value_losses) / len(value_losses)
        return gradients, numbers


def largest(kind: str, of_run: dict, expected: dict) -> float:
    pair = [{f"{kind} {n}": x[n].detach() for n in expected} for x in (of_run, expected)]
    return max(apart.max().item() for _, apart in parity.relative(*pair))


def follow(flags: dict, steps: int = 2) -> float:
    """The largest difference of a run from the steps by hand: of gradients, numbers and weights."""
    config = config_of(BY_HAND | flags)
    by_hand, run = ByHand(config), Rewarded(config)
    policy, task = run.trainer, run.trainer.task
    parameters = dict(policy.model.named_parameters())
    apart = []
    for step in range(1, steps + 1):
        loss = policy.forward_backward(step, run.dataset).item()
        answers = task.rows.answers
        # else nothing is packed
        assert task.rows.num_sequences < len(answers)
        gradients, numbers = by_hand.step(step, answers, run.dataset)
        found = {name: p.main_grad for name, p in parameters.items()}
        apart.append(largest("gradient of", found, gradients))
        policy.update(step)
        found = {name: x.item() for name, x in task.statistics().items()} | dict(loss=loss)
        apart.extend(abs(found[n] - numbers[n]) / max(abs(numbers[n]), 0.1) for n in numbers)
    apart.append(largest("updated", parameters, by_hand.learner.parameters))
    if task.critic:
        parameters = dict(task.critic.trainer.model.named_parameters())
        apart.append(largest("updated", parameters, by_hand.critic_learner.parameters))
    return max(apart)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_steps_by_hand(method, epochs):
    """With one epoch this is REINFORCE."""
    assert follow(METHODS[method] | dict(epochs=epochs)) < 1e-10


# --- mutations ------------------------------------------------------------------------------------


def wrong_sign(patch):
    """What was better than expected becomes less likely."""
    original = policy_gradients.actor_loss

    def loss(log_probs, targets, *args):
        return original(log_probs, replace(targets, advantages=-targets.advantages), *args)

    patch(policy_gradients, "actor_loss", loss)


def no_kl_in_rewards(patch):
    original = policy_gradients.token_rewards
    patch(policy_gradients, "token_rewards", lambda *args: original(*args[:-1], beta=0.0))


def no_kl_in_the_loss(patch):
    original = policy_gradients.actor_loss
    patch(policy_gradients, "actor_loss", lambda *args: original(*args[:-1], beta=0.0))


def stale_log_probs(patch):
    """log π_old is by the weights of the step before: in the second step, those of the start."""
    original = ReinforcementTask.make_targets

    def make_targets(self, answers, rewards):
        before = self.rows.collect(-self.reference_losses())
        answers = [a._replace(log_probs=x.tolist()) for a, x in zip(answers, before)]
        original(self, answers, rewards)

    patch(ReinforcementTask, "make_targets", make_targets)


def prompt_learns(patch):
    """The tokens of a prompt are in the loss, with the advantage of the answer's first one."""
    original = answer_rows.Rows.spread

    def spread(self, values):
        matrix = original(self, values)
        for place, answer in zip(self.places, self.answers):
            first = place.column - len(answer.prompt) + 1
            matrix[place.row, first : place.column] = matrix[place.row, place.column]
        return matrix

    patch(answer_rows.Rows, "spread", spread)


def prompt_is_counted(patch):
    """The mask of the answers has the prompt's tokens too."""
    original = answer_rows.Rows.__init__

    def begin(self, answers, *sizes):
        original(self, answers, *sizes)
        for answer, place in zip(answers, self.places):
            first = place.column - len(answer.prompt) + 1
            self.all.loss_mask[place.row, first : place.last] = True

    patch(answer_rows.Rows, "__init__", begin)


def no_document_mask(patch):
    """An answer sees those before it in its row."""
    original = answer_rows.Rows.batch
    patch(answer_rows.Rows, "batch", lambda *args: original(*args)._replace(documents=None))


def score_before_the_last_token(patch):
    """The reward model is read where its text has not ended."""
    original = OnRows.outputs

    def outputs(self, rows):
        found = original(self, rows)
        return found.roll(1, dims=1) if isinstance(self.learned, RewardModel) else found

    patch(OnRows, "outputs", outputs)


def score_at_the_first_token(patch):
    """The critic learns that nothing follows."""
    patch(policy_gradients, "is_last", lambda mask: mask & (torch.arange(mask.shape[1]) == 0))


def moving_reference(patch):
    patch(ReinforcementTask, "reference_losses", lambda self: self.outputs(self.rows))


def critic_stays(patch):
    original = Critic.join

    def join(self, trainer):
        original(self, trainer)
        trainer.update = lambda step: None

    patch(Critic, "join", join)


def one_update(patch):
    """The second epoch of a step has the weights of the first."""
    original = ReinforcementTask.data_of_step

    def data_of_step(self, step, dataset):
        self.trainer.update = lambda step: None
        rows = original(self, step, dataset)
        del self.trainer.update
        return rows

    patch(ReinforcementTask, "data_of_step", data_of_step)


def not_whitened(patch):
    patch(policy_gradients, "whiten", lambda advantages, mask: advantages)


def no_clip(patch):
    def loss(now, old, advantages, clip):
        ratio = (now - old).exp()
        return -ratio * advantages, ratio > 2

    patch(policy_gradients, "policy_loss", loss)


def values_are_not_clipped(patch):
    def loss(values, old, returns, clip):
        return 0.5 * (values - returns) ** 2

    patch(policy_gradients, "value_loss", loss)


def tokens_weigh_the_same(patch):
    original = policy_gradients.token_weights
    patch(policy_gradients, "token_weights", lambda mask, per_answer: original(mask, False))


def groups_of_others(patch):
    """The answers of a group are not neighbours."""
    original = policy_gradients.group_advantages

    def others(scores, size):
        return original(scores.roll(1), size).roll(-1)

    patch(policy_gradients, "group_advantages", others)


MUTATIONS = [
    (wrong_sign, "ppo"),
    (no_kl_in_rewards, "ppo"),
    (no_kl_in_the_loss, "grpo"),
    (stale_log_probs, "grpo"),
    (prompt_learns, "grpo"),
    (prompt_is_counted, "grpo"),
    (no_document_mask, "grpo"),
    (score_before_the_last_token, "ppo"),
    (score_at_the_first_token, "ppo"),
    (moving_reference, "grpo"),
    (critic_stays, "ppo"),
    (one_update, "grpo"),
]
# make test-all
MORE = [
    (wrong_sign, "grpo"),
    (stale_log_probs, "ppo"),
    (prompt_learns, "ppo"),
    (moving_reference, "ppo"),
    (not_whitened, "ppo"),
    (no_clip, "grpo"),
    (values_are_not_clipped, "ppo"),
    (tokens_weigh_the_same, "grpo"),
    (groups_of_others, "grpo"),
]


@pytest.mark.parametrize("mutation, method", [*MUTATIONS, *(again(*case) for case in MORE)])
def test_the_steps_by_hand_see(mutation, method, monkeypatch):
    mutation(partial(monkeypatch.setattr, raising=False))
    assert follow(METHODS[method]) > 1e-4
