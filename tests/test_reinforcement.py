"""Learning from rewards: equal under every layout, equal to a loop over single answers, as runs of
train.py, and what is refused."""

import json
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import killed_ranks
import numpy as np
import processes
import pytest
import torch
from parity import LLAMA, SMALL, difference, same, train, train_each

import checkpoint
import generate
import ppo
import rollout
import train as trainer
from inference import cli
from lessons import parity, ranks
from lessons.parity import Run
from optimizer import learning_rate
from runtime.config import Config, ConfigError
from runtime.rules import validate
from sharding import Sharding, set_sharding
from tuning.companions import Critic, Reference, RewardModel, companion
from tuning.reinforcement import Reinforcement
from tuning.rl_files import plot

ROOT = Path(__file__).parent.parent
# rows of several answers; a clip that holds for some tokens of the second update
BASE = SMALL | dict(
    seq_length=24,
    dropout=0.0,
    answer_tokens=8,
    micro_batch_size=1,
    rl_epochs=2,
    clip_range=0.02,
    lr=5e-3,
)
GRPO = dict(rl="grpo", group_size=4)
PPO = dict(rl="ppo", critic_lr=1e-2)
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
]
AGAIN = [
    dict(tp=2),
    dict(pp=2),
    dict(pp=2, schedule="gpipe", recompute="full"),
    dict(zero_stage=0),
    dict(zero_stage=1),
    dict(zero_stage=2, recompute="selective"),
    dict(tp=2, sequence_parallel=True, head_chunk=3),
    dict(zero_stage=1, rollout_pp=2),
    dict(tp=2, sequence_parallel=True, rollout_tp=1),
    dict(pp=2, rollout_pp=1),
]


def compare(method: str, world: int, layouts: list[dict], base: dict = BASE, **flags) -> None:
    """The gradients of the last update of the first step, and what two steps have made of the
    weights, of the critic too."""
    flags = METHODS[method] | flags
    one = train(steps=2, base=base, **flags)
    learns_values = any(name.startswith("critic.") for name in one.parameters)
    assert learns_values == (method == "ppo")
    for result in train_each(world, layouts, steps=2, base=base, **flags):
        same(result, one)


@pytest.mark.parametrize(
    "method, layouts",
    [
        ("ppo", LAYOUTS),
        ("grpo", LAYOUTS[:1]),
        pytest.param("grpo", LAYOUTS[1:], marks=pytest.mark.repetition),
    ],
)
def test_layouts(method, layouts):
    compare(method, 2, layouts)


@pytest.mark.parametrize(
    "method, layouts",
    [
        ("grpo", REMOTE[:2]),
        ("ppo", REMOTE[2:]),
        pytest.param("ppo", REMOTE[:2] + AGAIN, marks=pytest.mark.repetition),
        pytest.param("grpo", REMOTE[2:] + AGAIN, marks=pytest.mark.repetition),
    ],
)
def test_rollout_under_another_layout(method, layouts):
    compare(method, 2, layouts)


@pytest.mark.parametrize("method", ["grpo", pytest.param("ppo", marks=pytest.mark.repetition)])
def test_one_update(method):
    """The gradients of the first update. Its loss is the mean of the advantages, which is 0."""
    flags = METHODS[method] | dict(rl_epochs=1)
    one = train(steps=2, base=BASE, **flags)
    layouts = [dict(tp=2, sequence_parallel=True), dict(zero_stage=3)]
    for result in train_each(2, layouts, steps=2, base=BASE, **flags):
        worst = difference(result, one)
        assert all(worst[kind] < 1e-10 for kind in ("norm", "gradient", "parameter")), worst
        assert result.losses == pytest.approx(one.losses, rel=1e-10, abs=1e-13)


def test_four_ranks():
    layouts = [dict(tp=2, pp=2, virtual_stages=2, sequence_parallel=True)]
    compare("ppo", 4, layouts, DEEP)


@pytest.mark.repetition
@pytest.mark.parametrize("method", METHODS)
def test_four_ranks_again(method):
    layouts = [
        dict(tp=2, pp=2, virtual_stages=2, sequence_parallel=True),
        dict(tp=2, zero_stage=3, rollout_tp=1),
        dict(pp=2, zero_stage=2, rollout_tp=2, rollout_pp=2),
        dict(tp=2, pp=2, schedule="zb-h1"),
        dict(pp=4, rollout_tp=4),
        dict(tp=4, rollout_pp=4),
        dict(zero_stage=3, rollout_tp=2, rollout_pp=2),
        dict(tp=2, pp=2, sequence_parallel=True, rollout_tp=1),
    ]
    compare(method, 4, layouts, DEEP)


@pytest.mark.parametrize("method", ["ppo", pytest.param("grpo", marks=pytest.mark.repetition)])
def test_llama(method):
    """The head is no copy of the embedding."""
    llama = LLAMA | {name: BASE[name] for name in BASE.keys() - SMALL.keys()} | dict(dropout=0.0)
    compare(method, 2, [dict(tp=2, sequence_parallel=True, rollout_pp=2)], llama)


@pytest.mark.parametrize(
    "method, router, layouts",
    [
        ("ppo", EXPERTS, [dict(ep=2)]),
        pytest.param(
            "ppo", EXPERTS, [dict(tp=2, sequence_parallel=True)], marks=pytest.mark.repetition
        ),
        ("grpo", dict(num_experts=4, router="sinkhorn"), [dict(ep=2, zero_stage=3)]),
        pytest.param(
            "grpo", EXPERTS, [dict(pp=2), dict(rollout_tp=2)], marks=pytest.mark.repetition
        ),
        pytest.param(
            "ppo",
            dict(num_experts=4, router="sinkhorn"),
            [dict(ep=2, zero_stage=2), dict(tp=2, rollout_pp=2)],
            marks=pytest.mark.repetition,
        ),
    ],
)
def test_experts(method, router, layouts):
    """Routers take raw logits: an answer does not depend on what is beside it."""
    compare(method, 2, layouts, **router)


@pytest.mark.parametrize(
    "method, layouts",
    [
        ("grpo", [dict(tp=2, sequence_parallel=True), dict(zero_stage=3, rollout_tp=2)]),
        pytest.param("ppo", [dict(pp=2), dict(tp=2)], marks=pytest.mark.repetition),
    ],
)
def test_lora(method, layouts):
    """The reference is the policy without its adapters."""
    compare(method, 2, layouts, peft="lora", lora_rank=2)


# --- before the first update ----------------------------------------------------------------------


def before_the_first_update(rank: int, world: int, variants: list[dict]) -> list[tuple]:
    """Of each layout: whether policy and reference say the same, bit for bit; the KL divergence of
    the first step, and how far training forwards are from what the rollout said."""
    found = []
    for flags in variants:
        run = Run(world, trainer.Config(**flags))
        policy = run.trainer
        policy.write(1, run.dataset, range(8))
        now, reference = policy.outputs(policy.rows), policy.reference_losses()
        if policy.config.peft:
            # adapters change it; without them it is the base, which a second model has too
            assert not torch.equal(now, reference)
            now = companion(policy, Reference, replace(policy.config, peft=None)).outputs(
                policy.rows
            )
        policy.forward_backward(1, run.dataset)
        numbers = {name: x.item() for name, x in policy.statistics().items()}
        found.append((torch.equal(now, reference), numbers["kl"], numbers["policy_change"]))
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.repetition)])
def test_the_policy_begins_as_its_reference(world):
    layouts = {
        1: [dict(), dict(peft="lora"), EXPERTS],
        2: [
            *LAYOUTS,
            *REMOTE[:2],
            dict(peft="lora", tp=2, sequence_parallel=True),
            EXPERTS | dict(ep=2),
        ],
        4: [dict(tp=2, pp=2, sequence_parallel=True), dict(tp=2, zero_stage=3)],
    }[world]
    variants = [BASE | GRPO | dict(rl_epochs=1) | layout for layout in layouts]
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
        if config.rl == "ppo":
            # with other weights than the critic
            of_values = replace(config.of_values(None), seed=9)
            self.trainer.reward_model = companion(self.trainer, RewardModel, of_values)


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
        self.reward_model, self.critic = of_policy.reward_model, of_policy.critic
        self.learner = Learner(self.policy, config.lr, config)
        if self.critic:
            self.critic = self.critic.model
            self.reward_model = self.reward_model.model
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
        for _ in range(self.config.rl_epochs):
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
    config = trainer.Config(**BY_HAND | flags)
    by_hand, run = ByHand(config), Rewarded(config)
    policy = run.trainer
    parameters = dict(policy.model.named_parameters())
    apart = []
    for step in range(1, steps + 1):
        loss = policy.forward_backward(step, run.dataset).item()
        answers = policy.rows.answers
        # else nothing is packed
        assert policy.rows.num_sequences < len(answers)
        gradients, numbers = by_hand.step(step, answers, run.dataset)
        found = {name: p.main_grad for name, p in parameters.items()}
        apart.append(largest("gradient of", found, gradients))
        policy.update(step)
        found = {name: x.item() for name, x in policy.statistics().items()} | dict(loss=loss)
        apart.extend(abs(found[n] - numbers[n]) / max(abs(numbers[n]), 0.1) for n in numbers)
    apart.append(largest("updated", parameters, by_hand.learner.parameters))
    if policy.critic:
        parameters = dict(policy.critic.model.named_parameters())
        apart.append(largest("updated", parameters, by_hand.critic_learner.parameters))
    return max(apart)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_steps_by_hand(method, epochs):
    """With one epoch this is REINFORCE."""
    assert follow(METHODS[method] | dict(rl_epochs=epochs)) < 1e-10


# --- mutations ------------------------------------------------------------------------------------


def wrong_sign(patch):
    """What was better than expected becomes less likely."""
    original = ppo.actor_loss

    def loss(log_probs, targets, *args):
        return original(log_probs, replace(targets, advantages=-targets.advantages), *args)

    patch(ppo, "actor_loss", loss)


def no_kl_in_rewards(patch):
    original = ppo.token_rewards
    patch(ppo, "token_rewards", lambda *args: original(*args[:-1], beta=0.0))


def no_kl_in_the_loss(patch):
    original = ppo.actor_loss
    patch(ppo, "actor_loss", lambda *args: original(*args[:-1], beta=0.0))


def stale_log_probs(patch):
    """log π_old is by the weights of the step before: in the second step, those of the start."""
    original = Reinforcement.make_targets

    def make_targets(self, answers, rewards):
        before = self.rows.collect(-self.reference_losses())
        answers = [a._replace(log_probs=x.tolist()) for a, x in zip(answers, before)]
        original(self, answers, rewards)

    patch(Reinforcement, "make_targets", make_targets)


def prompt_learns(patch):
    """The tokens of a prompt are in the loss, with the advantage of the answer's first one."""
    original = rollout.Rows.spread

    def spread(self, values):
        matrix = original(self, values)
        for place, answer in zip(self.places, self.answers):
            first = place.column - len(answer.prompt) + 1
            matrix[place.row, first : place.column] = matrix[place.row, place.column]
        return matrix

    patch(rollout.Rows, "spread", spread)


def prompt_is_counted(patch):
    """The mask of the answers has the prompt's tokens too."""
    original = rollout.Rows.put

    def put(self, answer, row, at):
        place = original(self, answer, row, at)
        self.loss_mask[row, at : place.last] = True
        return place

    patch(rollout.Rows, "put", put)


def no_document_mask(patch):
    """An answer sees those before it in its row."""
    original = rollout.Rows.batch
    patch(rollout.Rows, "batch", lambda *args: original(*args)._replace(documents=None))


def score_before_the_last_token(patch):
    """The reward model is read where its text has not ended."""
    original = RewardModel.outputs
    patch(RewardModel, "outputs", lambda *args: original(*args).roll(1, dims=1))


def score_at_the_first_token(patch):
    """The critic learns that nothing follows."""
    patch(ppo, "is_last", lambda mask: mask & (torch.arange(mask.shape[1]) == 0))


def moving_reference(patch):
    patch(Reinforcement, "reference_losses", lambda self: self.outputs(self.rows))


def critic_stays(patch):
    patch(Critic, "update", lambda self, step: None)


def one_update(patch):
    """The second epoch of a step has the weights of the first."""
    original = Reinforcement.forward_backward

    def forward_backward(self, step, dataset):
        self.update = lambda step: None
        loss = original(self, step, dataset)
        del self.update
        return loss

    patch(Reinforcement, "forward_backward", forward_backward)


def not_whitened(patch):
    patch(ppo, "whiten", lambda advantages, mask: advantages)


def no_clip(patch):
    def loss(now, old, advantages, clip):
        ratio = (now - old).exp()
        return -ratio * advantages, ratio > 2

    patch(ppo, "policy_loss", loss)


def values_are_not_clipped(patch):
    patch(ppo, "value_loss", lambda values, old, returns, clip: 0.5 * (values - returns) ** 2)


def tokens_weigh_the_same(patch):
    original = ppo.token_weights
    patch(ppo, "token_weights", lambda mask, per_answer: original(mask, False))


def groups_of_others(patch):
    """The answers of a group are not neighbours."""
    original = ppo.group_advantages
    patch(ppo, "group_advantages", lambda scores, size: original(scores.roll(1), size).roll(-1))


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


@pytest.mark.parametrize(
    "mutation, method",
    [*MUTATIONS, *(pytest.param(*case, marks=pytest.mark.repetition) for case in MORE)],
)
def test_the_steps_by_hand_see(mutation, method, monkeypatch):
    mutation(partial(monkeypatch.setattr, raising=False))
    assert follow(METHODS[method]) > 1e-4


# --- runs -----------------------------------------------------------------------------------------

SHAPE = (
    "--num-layers 1 --hidden-size 32 --num-heads 4 --ffn-hidden-size 64 --seq-length 48"
    " --global-batch-size 8 --warmup-steps 0 --device cpu --eval-every 0"
).split()
TIMES = {
    *("step_seconds", "tokens_per_second", "tflops_per_device", "peak_memory_bytes"),
    *("rollout_seconds", "training_seconds"),
}
REWARDS = """
from __future__ import annotations
import os
from dataclasses import dataclass

@dataclass
class Share:
    of: int = 128

def ascii(prompt, answer, record):
    assert prompt == record["prompt"] and record["want"] == "ascii"
    return sum(ord(c) < Share().of for c in answer) / max(1, len(answer))

def raises(prompt, answer, record):
    if len(answer) > 3:
        raise KeyError("no such thing")
    return 1

def no_number(prompt, answer, record):
    return float("nan")

def text(prompt, answer, record):
    return "good"

def leaves(prompt, answer, record):
    raise SystemExit(3)

STEPS = []

def raises_later(prompt, answer, record):
    STEPS.append(prompt)
    # on one of two ranks, each of which rates four answers in a step
    if len(STEPS) > 8 and os.environ.get("RANK") == "1":
        raise ValueError("of rank 1")
    return len(STEPS) % 3
"""


def run(*flags) -> int:
    """`python train.py` without a new interpreter."""
    handlers = [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)]
    try:
        return trainer.main([str(flag) for flag in flags])
    finally:
        for s, handler in handlers:
            signal.signal(s, handler)


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers_of(out) -> list[dict]:
    """metrics.jsonl without what the clock says."""
    return [
        {name: x for name, x in line.items() if name not in TIMES}
        for line in lines_of(out / "metrics.jsonl")
    ]


def tensors_of(out, prefix: str = "") -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, whole: weights, and moments where there is no prefix."""
    path = checkpoint.find(out)
    found = {}
    for name, (dtype, shape) in checkpoint.read_index(path)["tensors"].items():
        if name.startswith(prefix):
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            found[name] = set_sharding(empty, Sharding(tuple(shape), ()))
    checkpoint.read(path, found)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def write_lines(path, records: list[dict]):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(folder, flags without --rl and --reward): a base, prompts, rewards."""
    folder = tmp_path_factory.mktemp("reinforcement")
    talk = [{"prompt": f"{n % 7}+", "completion": "ab"[n % 2] * 3} for n in range(40)]
    sft = write_lines(folder / "sft.jsonl", talk)
    assert run(*SHAPE, "--sft", sft, "--out", folder / "base", "--steps", 4, "--lr", 3e-3) == 0
    records = [{"prompt": f"{n}+", "want": "ascii"} for n in range(60)]
    prompts = write_lines(folder / "prompts.jsonl", records)
    (folder / "rewards.py").write_text(REWARDS)
    flags = ["--load", folder / "base", "--prompts", prompts, *SHAPE[-8:], "--lr", 3e-2]
    return folder, [*flags, "--answer-tokens", 6]


@pytest.fixture(scope="module")
def reward_model(toy):
    """The folder of a reward model, which likes x."""
    folder, _ = toy
    pairs = [{"prompt": f"{n}+", "chosen": "x" * (n % 3 + 1), "rejected": "y"} for n in range(40)]
    flags = ["--load", folder / "base", "--pairs", write_lines(folder / "pairs.jsonl", pairs)]
    words = [*flags, *SHAPE[-8:], "--preference", "reward", "--lr", 3e-3]
    assert run(*words, "--out", folder / "reward", "--steps", 6) == 0
    return folder / "reward"


@pytest.fixture(scope="module")
def grpo_run(toy):
    folder, flags = toy
    words = [*flags, "--rl", "grpo", "--reward", f"{folder}/rewards.py:ascii"]
    words += [
        "--global-batch-size",
        16,
        "--steps",
        16,
        "--eval-every",
        4,
        "--save-every",
        12,
        "--keep",
        0,
    ]
    assert run(*words, "--out", folder / "grpo") == 0
    return folder / "grpo", words


def test_a_run_learns(grpo_run, tmp_path):
    out, _ = grpo_run
    lines = lines_of(out / "metrics.jsonl")
    assert lines[0].keys() - TIMES == {
        *("step", "loss", "grad_norm", "lr", "tokens", "reward", "kl", "answer_tokens"),
        *("ended_share", "rollout_difference", "clip_share", "policy_change"),
    }
    first, last = (sum(line["reward"] for line in some) / 4 for some in (lines[:4], lines[-4:]))
    assert last > first + 0.2
    assert abs(lines[0]["kl"]) < 1e-4 and lines[-1]["kl"] > 1
    assert [line["step"] for line in lines if "eval_reward" in line] == [4, 8, 12, 16]
    tokens = sum(line["answer_tokens"] * 16 for line in lines)
    assert lines[-1]["tokens"] == pytest.approx(tokens, abs=0.1)
    samples = lines_of(out / "samples.jsonl")
    # three prompts are held out
    assert [line["step"] for line in samples] == [n for n in (4, 8, 12, 16) for _ in range(3)]
    assert samples[-1].keys() == {"step", "prompt", "answer", "reward"}
    rewards = [line["reward"] for line in samples[-3:]]
    assert lines[-1]["eval_reward"] == pytest.approx(sum(rewards) / 3)
    assert (out / "rl.png").exists() and not (out / "loss.png").exists()
    assert not (out / "sample.txt").exists()
    plot(lines, tmp_path / "rl.png")
    assert (tmp_path / "rl.png").read_bytes().startswith(b"\x89PNG")


def without_last_step(out, copy, *files: str):
    """A run as it was when its last save had not begun: the checkpoint before is there, and maybe
    lines of later steps."""
    shutil.copytree(out, copy)
    newest = checkpoint.find(copy)
    shutil.rmtree(newest)
    for name in ("rl.png", *files):
        (copy / name).unlink()
    return copy


def test_a_run_goes_on(grpo_run, tmp_path, capsys):
    """With the same answers, numbers and weights, bit for bit, and no line twice."""
    out, words = grpo_run
    parts = without_last_step(out, tmp_path / "parts")
    assert run(*words, "--out", parts, "--resume") == 0
    assert "resuming after step 12" in capsys.readouterr().out
    assert numbers_of(parts) == numbers_of(out)
    assert (parts / "samples.jsonl").read_text() == (out / "samples.jsonl").read_text()
    assert equal(tensors_of(parts), tensors_of(out))
    # and where only the picture is missing; all flags are in config.json
    (parts / "rl.png").unlink()
    assert run("--out", parts, "--resume") == 0
    assert (parts / "rl.png").exists() and numbers_of(parts) == numbers_of(out)


def test_half_a_line_of_samples(grpo_run, tmp_path):
    """A file that cannot be read begins anew; what a run learns is not in it."""
    out, words = grpo_run
    parts = without_last_step(out, tmp_path / "parts")
    whole = (parts / "samples.jsonl").read_text()
    (parts / "samples.jsonl").write_text(whole[:-20])
    assert run(*words, "--out", parts, "--resume") == 0
    assert [line["step"] for line in lines_of(parts / "samples.jsonl")] == [16] * 3
    assert numbers_of(parts) == numbers_of(out)


def test_what_a_run_has_learned_is_a_model(grpo_run, tmp_path, capsys):
    """For generate.py, and for the next run."""
    out, words = grpo_run
    model, _ = cli.load_model(str(out))
    assert equal(dict(model.named_parameters()), tensors_of(out, "model."))
    assert len(generate.generate(model, [[1, 2]], 5)[0]) == 5
    assert run(*words, "--load", out, "--out", tmp_path / "more", "--steps", 1) == 0
    assert f"starting from the weights of {out}" in capsys.readouterr().out
    first = numbers_of(tmp_path / "more")[0]
    # its reference is what it begins as
    assert first["reward"] > 0.8 and abs(first["kl"]) < 1e-4


def test_another_base_is_refused(grpo_run, toy, tmp_path, capsys):
    out, words = grpo_run
    folder, _ = toy
    parts = without_last_step(out, tmp_path / "parts")
    talk = folder / "sft.jsonl"
    assert run(*SHAPE, "--sft", talk, "--out", tmp_path / "base", "--steps", 1, "--seed", 3) == 0
    assert run(*words, "--load", tmp_path / "base", "--out", parts, "--resume") == 2
    error = capsys.readouterr().err
    assert "is not the model that the run in" in error and error.count("\n") == 1
    assert run(*words, "--load", tmp_path / "gone", "--out", parts, "--resume") == 2
    error = capsys.readouterr().err
    assert "gone: no such folder" in error and error.count("\n") == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits(toy, tmp_path, precision):
    """Generation rounds in other places than training. What it wrote is rated by a training
    forward, which the reference says bit for bit."""
    folder, flags = toy
    words = [*flags, "--rl", "ppo", "--reward", f"{folder}/rewards.py:ascii", "--steps", 3]
    assert run(*words, "--precision", precision, "--out", tmp_path / "out") == 0
    first, _, last = numbers_of(tmp_path / "out")
    assert first["kl"] == 0 and 0 < first["rollout_difference"] < 0.1
    # fp16 may skip the first two updates, while it looks for its loss scale
    assert last["kl"] != 0


@pytest.fixture(scope="module")
def ppo_run(toy, reward_model):
    """In float64, rated by the reward model."""
    folder, flags = toy
    words = [*flags, "--rl", "ppo", "--reward", reward_model, "--critic-lr", 3e-3]
    words += ["--precision", "fp64", "--steps", 4, "--eval-every", 2, "--save-every", 2]
    assert run(*words, "--keep", 0, "--out", folder / "ppo") == 0
    return folder / "ppo", words


def test_ppo_leaves_its_critic(ppo_run, reward_model):
    out, _ = ppo_run
    lines = numbers_of(out)
    assert lines[0]["value_loss"] > 0 and all(np.isfinite(line["kl"]) for line in lines)
    tensors = tensors_of(out)
    critic = {name for name in tensors if name.startswith("critic.")}
    whole = tensors_of(reward_model)
    assert critic == {f"critic.{name}" for name in whole}
    # it begins as the reward model, and learns
    value = "model.head.value.weight"
    apart = (tensors[f"critic.{value}"] - whole[value]).abs().max()
    assert 0 < apart < 0.05
    index = checkpoint.read_index(checkpoint.find(out))
    # 4 steps of 2 epochs
    assert index["optimizer"]["updates"] == index["critic.optimizer"]["updates"] == 8


def same_numbers(a, b) -> None:
    for one, two in zip(numbers_of(a), numbers_of(b), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert one[name] == pytest.approx(two[name], rel=1e-10, abs=1e-12), name
    for one, two in zip(*(lines_of(out / "samples.jsonl") for out in (a, b)), strict=True):
        assert one["reward"] == pytest.approx(two["reward"], rel=1e-10)
        assert one | two == one | {"reward": two["reward"]}
    tensors, others = tensors_of(a), tensors_of(b)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        # moments: over their largest element
        scale = others[name].abs().max().clamp(min=0.1 if "exp_avg" not in name else 1e-12)
        assert (tensor - others[name]).abs().max() <= 1e-10 * scale, name


def on_two_ranks(*words):
    done = processes.run(["train.py", *map(str, words)], world=2)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "layout",
    [
        "--tp 2 --sequence-parallel",
        pytest.param("--zero-stage 3 --rollout-tp 2", marks=pytest.mark.repetition),
        pytest.param("--pp 2 --layer-split 1 0", marks=pytest.mark.repetition),
    ],
)
def test_two_ranks_have_the_numbers_of_one(ppo_run, tmp_path, layout):
    out, words = ppo_run
    on_two_ranks(*words, "--out", tmp_path / "two", *layout.split())
    same_numbers(tmp_path / "two", out)


@pytest.mark.parametrize(
    "layout",
    [
        "--zero-stage 2",
        pytest.param("--tp 2 --rollout-pp 2", marks=pytest.mark.repetition),
    ],
)
def test_another_layout_goes_on(ppo_run, tmp_path, layout):
    """One device has taken two steps, two ranks take the others."""
    out, words = ppo_run
    parts = without_last_step(out, tmp_path / "parts")
    done = on_two_ranks(*words, "--out", parts, "--resume", *layout.split())
    assert "resuming after step 2" in done.stdout
    same_numbers(parts, out)


def test_ppo_goes_on(ppo_run, tmp_path):
    """With the critic and its moments."""
    out, words = ppo_run
    parts = without_last_step(out, tmp_path / "parts")
    assert run(*words, "--out", parts, "--resume") == 0
    assert numbers_of(parts) == numbers_of(out) and equal(tensors_of(parts), tensors_of(out))


def test_frozen_models_are_those_of_their_files(ppo_run, toy, reward_model, tmp_path, monkeypatch):
    """Reference and reward model, also after steps; and the critic, where it does not learn."""
    seen = []
    original = Reinforcement.finish
    monkeypatch.setattr(Reinforcement, "finish", lambda *x: seen.append(x[0]) or original(*x))
    _, words = ppo_run
    folder, _ = toy
    still = ["--critic-lr", 0, "--steps", 1, "--out", tmp_path / "still"]
    assert run(*words, "--precision", "fp32", *still) == 0
    (policy,) = seen
    expected = {
        policy.reference: folder / "base",
        policy.reward_model: reward_model,
        policy.critic: reward_model,
    }
    for model, path in expected.items():
        assert equal(dict(model.model.named_parameters()), tensors_of(path, "model."))
    assert not any(p.requires_grad for p in policy.reference.model.parameters())
    assert not any(p.requires_grad for p in policy.reward_model.model.parameters())
    base = tensors_of(folder / "base", "model.")
    assert not equal(dict(policy.model.named_parameters()), base)


def test_adapters_learn(toy, tmp_path, capsys):
    folder, flags = toy
    words = [*flags, "--rl", "ppo", "--peft", "lora", "--reward", f"{folder}/rewards.py:ascii"]
    words += ["--save-every", 2, "--keep", 0, "--out", tmp_path / "lora"]
    assert run(*words, "--steps", 4) == 0
    assert abs(numbers_of(tmp_path / "lora")[0]["kl"]) < 1e-4
    parts = without_last_step(tmp_path / "lora", tmp_path / "parts")
    assert run(*words, "--steps", 4, "--out", parts, "--resume") == 0
    assert numbers_of(parts) == numbers_of(tmp_path / "lora")
    assert equal(tensors_of(parts), tensors_of(tmp_path / "lora"))
    names = tensors_of(parts)
    assert all("lora" in name or name.startswith("critic.") for name in names)
    # the base with it writes text; the critic in the same checkpoint does not matter
    words = ["--adapter", parts, "--prompt", "a", "--max-tokens", 3]
    assert cli.main(["--checkpoint", str(folder / "base"), *map(str, words)]) == 0


@pytest.mark.repetition
def test_killed_ranks_are_started_again(tmp_path):
    """Policy, critic, moments and samples of an undisturbed run, bit for bit. (`python
    tests/killed_ranks.py --rl` does this many times, in new interpreters.)"""
    flags = killed_ranks.rl_flags(tmp_path, lambda flags: run(*flags))
    on_two_ranks(*flags, "--out", tmp_path / "whole")
    launcher = [sys.executable, ROOT / "tests/forked_torchrun.py", "--nproc-per-node", 2]
    command = [*launcher, ROOT / "train.py", *flags, "--out", tmp_path / "killed"]
    kills, output = killed_ranks.run([str(word) for word in command], seed=0, most=1)
    assert kills == 1 and output.count("resuming after step") == 1, output
    curve, tensors = killed_ranks.state(tmp_path / "whole")
    killed_curve, killed_tensors = killed_ranks.state(tmp_path / "killed")
    assert killed_curve == curve and killed_ranks.same(killed_tensors, tensors)
    assert any("exp_avg_sq.head.value" in name for _, name in tensors)


# --- what cannot run ------------------------------------------------------------------------------

ANY = dict(rl="grpo", load="x", prompts=["p.jsonl"], reward="r.py:f", device="cpu")
SHAPED = ANY | dict(load=None, seq_length=64, answer_tokens=16)


@pytest.mark.parametrize(
    "flags, words, world",
    [
        (dict(prompts=["p.jsonl"]), "--prompts p.jsonl: needs --rl ppo or --rl grpo", 1),
        (dict(rl_epochs=3), "--rl-epochs 3: needs --rl", 1),
        (SHAPED, "--rl grpo: --load which model answers?", 1),
        (SHAPED | dict(data=["x"]), "--data: --rl grpo learns from answers", 1),
        (SHAPED | dict(sft=["x"]), "--sft: --rl grpo learns from answers", 1),
        (SHAPED | dict(pack=True), "--pack: ", 1),
        (SHAPED | dict(fp8="current"), "--fp8 current: scales depend", 1),
        (SHAPED | dict(dropout=0.1), "--dropout 0.1: --rl has none", 1),
        (SHAPED | dict(peft="lora", lora_dropout=0.1), "--lora-dropout 0.1: --rl has none", 1),
        (SHAPED | dict(gae_lambda=0.5), "--gae-lambda 0.5: is of --rl ppo", 1),
        (SHAPED | dict(critic_lr=0.5), "--critic-lr 0.5: is of --rl ppo", 1),
        (SHAPED | dict(rl="ppo", critic_lr=-1.0), "--critic-lr -1.0: must be at least 0", 1),
        (SHAPED | dict(rl="ppo", critic_lr=float("nan")), "--critic-lr nan: must be", 1),
        (
            SHAPED | dict(rl="ppo", lr=1e-3, min_lr=1e-4, critic_lr=1e-5),
            "--critic-lr 1e-05: must be at least --min-lr 0.0001",
            1,
        ),
        (SHAPED | dict(group_size=1), "--group-size 1: must be at least 2", 1),
        (SHAPED | dict(rl="ppo", group_size=0), "--group-size 0: must be at least 1", 1),
        (SHAPED | dict(global_batch_size=12), "divisible by --group-size 8; 8 or 16 would fit", 1),
        (SHAPED | dict(answer_tokens=64), "--answer-tokens 64: must be from 1 to below", 1),
        (SHAPED | dict(answer_tokens=0), "--answer-tokens 0: must be from 1 to below", 1),
        (SHAPED | dict(rl_epochs=0), "--rl-epochs 0: must be at least 1", 1),
        (SHAPED | dict(clip_range=1.5), "--clip-range 1.5: must be from 0 to 1", 1),
        (SHAPED | dict(rl="ppo", gae_lambda=2.0), "--gae-lambda 2.0: must be from 0 to 1", 1),
        (SHAPED | dict(beta=-1.0), "--beta -1.0: must be from 0", 1),
        (SHAPED | dict(beta=float("nan")), "--beta nan: must be from 0", 1),
        (SHAPED | dict(rollout_tp=3), "--rollout-tp 3: must divide the 2 ranks; [1, 2]", 2),
        (SHAPED | dict(rollout_pp=3), "--rollout-pp 3: must divide the 2 ranks", 2),
        (SHAPED | dict(rollout_tp=0), "--rollout-tp 0: must divide the 2 ranks", 2),
        (SHAPED | dict(rollout_tp=2, num_heads=3, hidden_size=48), "--rollout-tp 2: must div", 2),
        (SHAPED | dict(rollout_pp=2, num_layers=3), "--rollout-pp 2: must divide the 3 lay", 2),
        (SHAPED | dict(ep=2, num_experts=4, rollout_tp=2), "--ep 2: experts that are spread", 2),
    ],
)
def test_refused(flags, words, world):
    base_needed = "which model" in words
    with pytest.raises(ConfigError) as e:
        validate(Config(**flags), world, base_needed)
    assert words in str(e.value) and "\n" not in str(e.value), str(e.value)


@pytest.mark.parametrize(
    "reward, words, status",
    [
        ("missing.py:f", "there is no file missing.py", 2),
        ("rewards.py:nothing", "has no function 'nothing'; there are ", 2),
        ("rewards.py:STEPS", "has no function 'STEPS'", 2),
        ("broken.py:f", "broken.py fails: SyntaxError", 2),
        ("leaving.py:f", "leaving.py fails: SystemExit: 0", 2),
        ("nowhere", "nowhere: no such folder", 2),
        ("base", "holds no reward model; --preference reward trains one", 2),
        ("rewards.py:raises", "the function fails for the prompt", 1),
        ("rewards.py:leaves", "SystemExit: 3", 1),
        ("rewards.py:no_number", "the function gives nan for the prompt", 1),
        ("rewards.py:text", "ValueError: could not convert string to float: 'good'", 1),
    ],
)
def test_rewards_that_cannot_be_used(toy, reward, words, status, tmp_path, monkeypatch, capsys):
    folder, flags = toy
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "leaving.py").write_text("exit(0)")
    assert run(*flags, "--rl", "grpo", "--reward", reward, "--out", tmp_path / "out") == status
    error = capsys.readouterr().err
    assert words in error and "--reward" in error and error.count("\n") == 1, error


def test_a_function_that_fails_on_one_rank(toy, tmp_path):
    """All ranks end, with one message, and the run can go on."""
    folder, flags = toy
    words = [*flags, "--rl", "grpo", "--reward", f"{folder}/rewards.py:raises_later"]
    words += ["--out", tmp_path / "out", "--steps", 5, "--save-every", 1]
    done = processes.run(["train.py", *map(str, words)], world=2, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "--reward: the function fails for the prompt" in done.stderr
    assert "ValueError: of rank 1" in done.stderr
    assert [line["step"] for line in numbers_of(tmp_path / "out")] == [1, 2]


@pytest.mark.parametrize(
    "record, words",
    [
        ({"text": "a"}, "line 3: is no prompt; a line has"),
        ({"prompt": 3}, "line 3: is no prompt"),
        ({"messages": [{"role": "user"}]}, "line 3: is no prompt"),
        ({"messages": []}, "line 3: is no prompt"),
        ({"prompt": "a" * 40}, "line 3: has "),
        ([], "line 3"),
        (None, "line 3"),
    ],
)
def test_prompts_that_cannot_be_used(toy, record, words, tmp_path, capsys):
    folder, flags = toy
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}, record])
    words_of_run = [*flags, "--rl", "grpo", "--reward", f"{folder}/rewards.py:text"]
    assert run(*words_of_run, "--prompts", path, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert words in error and str(path) in error and error.count("\n") == 1, error


def test_prompts_that_are_skipped(toy, tmp_path, capsys):
    """Those that are too long, and no others. One that is left is too few."""
    folder, flags = toy
    good = [{"prompt": "a", "want": "ascii"}, {"prompt": "b", "want": "ascii"}]
    words = [*flags, "--rl", "grpo", "--reward", f"{folder}/rewards.py:ascii", "--steps", 1]
    long = {"prompt": "a" * 40, "want": "ascii"}
    some = write_lines(tmp_path / "some.jsonl", [*good, long])
    skip = "--skip-bad-examples"
    assert run(*words, "--prompts", some, skip, "--out", tmp_path / "a") == 0
    assert "2 prompts; 1 skipped (1 too long); 1 of them held out" in capsys.readouterr().out
    for lines, error_words in (
        ([good[0], long], "1 prompts that can be used; at least two"),
        ([*good, {"text": 1}], "line 3: is no prompt"),
        ([], "0 prompts"),
    ):
        path = write_lines(tmp_path / "few.jsonl", lines)
        assert run(*words, "--prompts", path, skip, "--out", tmp_path / "b") == 2
        error = capsys.readouterr().err
        assert error_words in error and error.count("\n") == 1, error
