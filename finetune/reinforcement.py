"""Reinforcement learning as a run: the model writes answers, and learns from their rewards.

    python -m finetune.reinforcement --load CKPT --data p.jsonl --reward check.py:correct --out R

The model that learns is called the policy. One step, in `data_of_step`:

    write      the policy writes global_batch_size answers; each gets     inference/rollout.py,
               a reward, from a function or a reward model                rewards.py
    targets    log-probabilities of the reference, and with ppo values    reference_models.py
               of the critic; from these and the rewards, advantages      policy_gradients.py
    update     --epochs times, from the same answers: forward,         train.py
               backward, a step of the optimizer

The loop of train.py stays as it is: it takes the last of these optimizer steps, as in any run. The
policy is the run's trainer, of which this is the task. The other models are trainers of their own
(reference_models.py).

With --rollout-lag N the answers of step k are written N steps before it, by the weights of then, as
where other machines write while these train. So their tokens have importance weights
(policy_gradients.stale_advantages). Here both still take turns: only the answers' age is real.

Answers depend on the weights and on (seed, step, sample) alone, so a resumed run writes the same
ones. With --peft the reference is the policy itself without its adapters: no second copy.

Shapes: n answers of at most T tokens; packed (answer_rows.py) they are R rows of s tokens.
"""

import time
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import tensor_parallel
import train
from base import json_files, terminal
from base.errors import RunError
from base.model_config import MoEConfig, divisors, flops_per_token
from finetune import adapter_layers, policy_gradients, rl_files
from finetune.adapter_learning import PeftConfig, lr_beside_reference
from finetune.answer_rows import Answer, Rows
from finetune.frozen_base import check_identity, fingerprint
from finetune.preference import PreferenceConfig
from finetune.prompt_set import open_prompts
from finetune.reference_models import Critic, FrozenModel, Learner, OnRows, RewardModel, beside
from finetune.rewards import is_function, open_function
from finetune.sft import ChatConfig, check_answers
from finetune.sft_data import ConversationTask
from inference.rollout import Writer
from run import checkpoint, least_memory
from run.config import MODEL_FLAGS, ConfigError, RunConfig, as_flags, flag
from run.rules import Need, check_techniques, multiples
from run.task import Task

# published runs update up to four times from the same answers
MOST_EPOCHS = 1000
# --beta where it is not given
KL_WEIGHTS = {"ppo": 0.05, "grpo": 0.04}


class ReinforcementTask(Learner, ConversationTask):
    """The policy's task."""

    eval_field = "eval_reward"
    last_file = "rl.png"

    def open_data(self, config, world, tokenizer):
        """Raises ChatError, RewardError or CheckpointError."""
        function = open_function(config.reward) if is_function(config.reward) else None
        return open_prompts(config, world, tokenizer, function)

    def built(self) -> None:
        config, policy = self.config, self.trainer
        self.reference = self.reward_model = self.critic = None
        if not config.peft:
            self.reference = beside(policy, OnRows(FrozenModel()), config)
        if config.reward and not is_function(config.reward):
            of_values = config.of_values(config.reward)
            self.reward_model = beside(policy, OnRows(RewardModel()), of_values)
        if config.method == "ppo":
            start = config.reward if self.reward_model else config.load
            lr = config.peak_lr if config.critic_lr is None else config.critic_lr
            self.critic = beside(policy, Critic(), replace(config.of_values(start), lr=lr))
        self.writer = Writer(policy)
        # {step: (its answers, their rewards)}
        self.written_ahead: dict[int, tuple[list[Answer], Tensor]] = {}
        # Fields of the step's line in metrics.jsonl.
        self.step_metrics: dict[str, float] = {}
        # This rank's share of three sums over the step's tokens and updates: those clipped,
        # |log π - log π_old|, the critic's loss
        self.token_sums = torch.zeros(3, dtype=torch.float64, device=policy.device)

    # -- weights -----------------------------------------------------------------------------------

    def load_base(self, tokenizer) -> None:
        """Load what never changes, and so is not in the run's own checkpoints: reference and reward
        model. A collective. Raises CheckpointError."""
        if self.reference:
            try:
                base = checkpoint.find(self.config.load)
            except checkpoint.CheckpointError as e:
                text = f"--load {e}. The run begins and goes on beside this model, its reference"
                raise checkpoint.CheckpointError(text) from None
            # first, for it says which fields differ in another model
            self.reference.learned.load_from(base)
            self.identity = fingerprint(base, self.model_config)
        if self.reward_model:
            self.reward_model.learned.load_from(self.config.reward)

    def load_weights(self, world) -> None:
        if self.critic:
            self.critic.learned.load_weights(world)

    def check_base(self, path, index: dict) -> None:
        ahead = index.get("written_ahead", []) if self.config.rollout_lag else []
        self.written_ahead = {
            step: (answers, torch.tensor(rewards, dtype=torch.float64))
            for step, answers, rewards in json_files.convert(ahead, WrittenAhead, "written_ahead")
        }
        if self.reference:
            check_identity(self.config, path, index, self.identity)

    def extra_state(self) -> dict:
        ahead = [(step, a, r.tolist()) for step, (a, r) in self.written_ahead.items()]
        base = {"base": self.identity} if self.reference else {}
        return base | ({"written_ahead": ahead} if ahead else {})

    def describe(self) -> str:
        beside = {"a frozen reference": self.reference, "a frozen reward model": self.reward_model}
        models = [name for name, model in (beside | {"a critic": self.critic}).items() if model]
        return f", beside it {', '.join(models)}" if models else ""

    def learners(self) -> dict:
        return super().learners() | ({"critic.": self.critic.trainer} if self.critic else {})

    def go_on(self, steps_done: int, taken: int) -> None:
        # a group begins with the first answer to a question
        size = self.config.answers_per_prompt
        super().go_on(steps_done, -(-taken // size) * size)

    # -- one step ----------------------------------------------------------------------------------

    def data_of_step(self, step: int, dataset) -> Rows:
        """Write the answers of a step, and take all of its updates but the policy's last. The loop
        of train.py takes that one, from the rows of answers that are returned."""
        begin = time.perf_counter()
        self.step = step
        self.make_targets(*self.answers_of(step, dataset))
        self.written = time.perf_counter()
        self.step_metrics["rollout_seconds"] = self.written - begin
        self.token_sums.zero_()
        for epoch in range(1, self.config.epochs + 1):
            if self.critic:
                critic = self.critic.trainer
                self.token_sums[2] += critic.forward_backward(step, self.rows)
                critic.update(step)
            if epoch < self.config.epochs:
                self.trainer.sum_gradients(step, self.rows)
                self.trainer.update(step)
        return self.rows

    def answers_of(self, step: int, dataset) -> tuple[list[Answer], Tensor]:
        """(answers, rewards) of a step, --rollout-lag steps old; in the first steps, as old as the
        run. Those of the step that far ahead are written now. A collective."""
        for later in range(step, step + self.config.rollout_lag + 1):
            samples = self.global_batch(later)
            answers, _ = self.written_ahead.get(later, ([], None))
            # Another batch size, when a run goes on, has other samples.
            if [answer.sample for answer in answers] != list(samples):
                self.written_ahead[later] = self.write(later, dataset, samples)
        answers, rewards = self.written_ahead.pop(step)
        self.rows = self.pack(answers)
        return answers, rewards

    def write(self, step: int, dataset, samples: range) -> tuple[list[Answer], Tensor]:
        """(the answers to the prompts of these samples, their rewards [n]); on every rank. The
        answers also become `rows`. A collective."""
        prompts = [dataset.question(n).ids for n in samples]
        answers = self.writer.write(prompts, samples, step, dataset.end_tokens)
        self.rows = self.pack(answers)
        if self.reward_model:
            values = self.reward_model.outputs(self.rows)
            # the reward model gives [R, s] numbers; the one at an answer's last token is its reward
            last = [values[place.row, place.last] for place in self.rows.places]
            return answers, torch.stack(last)
        return answers, self.rewards_of_function(dataset, answers)

    def pack(self, answers: list[Answer]) -> Rows:
        """R rows of s tokens. Empty rows fill up, so that all ranks have the same number of
        micro-batches, and the interleaved schedule a multiple of pp, DualPipeV of twice as many."""
        config = self.config
        shards = config.length_multiple
        multiple = self.trainer.dp * (config.micro_batch_size or 1)
        needed = {"interleaved": config.pp, "dualpipe-v": 2 * config.pp}
        multiple *= needed.get(config.pipeline_schedule, 1)
        return Rows(answers, self.model_config.seq_length // shards * shards, multiple)

    def rewards_of_function(self, dataset, answers: list[Answer]) -> Tensor:
        """The rewards by the function, [n], on every rank: each rank calls it for its share. Raises
        RunError, on all ranks."""
        group = self.groups.all
        rank, world = (group.rank(), group.size()) if group else (0, 1)
        found, error = {}, None
        try:
            for n in range(rank, len(answers), world):
                found[n] = dataset.reward(answers[n].sample, answers[n].ids)
        except RunError as e:
            error = str(e)
        everywhere = [(found, error)] * world
        if group:
            dist.all_gather_object(everywhere, (found, error), group=group)
        for of_rank, error in everywhere:
            if error:
                raise RunError(error, everywhere=True)
            found |= of_rank
        return torch.tensor([found[n] for n in range(len(answers))], dtype=torch.float64)

    def make_targets(self, answers: list[Answer], rewards: Tensor) -> None:
        """What the updates of the step need: `targets`, of the policy and of the critic. rewards:
        [n]. Tensors here are [n, T], padded, until `spread` makes rows of them."""
        rows = self.rows
        lengths = torch.tensor([len(answer.ids) for answer in answers])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)  # [n, T]
        of_rollout = pad([torch.tensor(a.log_probs, dtype=torch.float64) for a in answers])
        old = of_rollout
        lag = self.config.rollout_lag
        if lag or self.trainer.precision in ("bf16", "fp16"):
            # Generation rounds in other places than training, by 1% in bf16 (1e-6 in float32). So
            # π / π_old would not be 1 before the first update. π_old of a training forward is.
            old = pad(rows.collect(-self.outputs(rows)))
        reference = pad(rows.collect(-self.reference_losses()))
        columns = dict(old=old, reference=reference)
        if self.critic:
            columns |= self.targets_of_critic(rewards, old, reference, mask)
        else:
            advantages = policy_gradients.group_advantages(rewards, self.config.answers_per_prompt)
            columns["advantages"] = advantages.unsqueeze(1) * mask
        if lag and self.config.importance_cap:
            stale = columns["advantages"], old, of_rollout, self.config.importance_cap
            columns["advantages"] = policy_gradients.stale_advantages(*stale)
        per_answer = self.config.method == "grpo"
        columns["weights"] = policy_gradients.token_weights(mask, per_answer)
        count = len(answers) if per_answer else int(mask.sum())
        for name, matrix in columns.items():
            columns[name] = rows.spread([row[:n] for row, n in zip(matrix, lengths)])  # [R, s]
        for learner in self.learners().values():
            learner.task.learn_from(rows, policy_gradients.Targets(**columns), count)
        self.step_metrics = {
            "reward": rewards.mean().item(),
            "kl": ((old - reference) * mask).sum(1).mean().item(),
            "answer_tokens": lengths.double().mean().item(),
            "ended_share": sum(answer.ended for answer in answers) / len(answers),
            "rollout_difference": ((old - of_rollout).abs() * mask).max().item(),
        }

    def targets_of_critic(
        self, rewards: Tensor, old: Tensor, reference: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """Advantages, returns, and the values before the updates, [n, T] each."""
        values = pad(self.rows.collect(self.critic.outputs(self.rows)))
        each = policy_gradients.token_rewards(rewards, old, reference, mask, self.config.kl_weight)
        lam = self.config.gae_lambda
        advantages, returns = policy_gradients.generalized_advantages(each, values, mask, lam=lam)
        advantages = policy_gradients.whiten(advantages, mask)
        return dict(advantages=advantages, returns=returns, old_values=values)

    def reference_losses(self) -> Tensor:
        """- log π_ref of each target, [R, s], as a model's head gives it."""
        if self.reference:
            return self.reference.outputs(self.rows)
        with adapter_layers.disabled(*self.trainer.stages):
            return self.outputs(self.rows)

    def total_loss(self, y: Tensor, batch) -> Tensor:
        """y: [b, s], - log π of each target, by the policy as it is now."""
        clip = self.config.clip_range
        # ppo has the KL in its rewards
        beta = self.config.kl_weight if self.config.method == "grpo" else 0.0
        targets = self.targets.at(batch.samples.cpu(), y.device)
        if not self.groups.tp or self.groups.tp.rank() == 0:
            now = -y.detach()
            _, clipped = policy_gradients.policy_loss(now, targets.old, targets.advantages, clip)
            self.token_sums[0] += (clipped & batch.loss_mask).sum()
            self.token_sums[1] += ((now - targets.old).abs() * batch.loss_mask).sum()
        return policy_gradients.actor_loss(-y, targets, clip, beta)

    def row_length(self, dataset) -> int:
        # answers are packed into rows
        return self.model_config.seq_length

    def processed(self, step: int, dataset) -> tuple[int, int]:
        answers = self.rows.answers
        prompts = sum(len(answer.prompt) for answer in answers)
        learned = sum(len(answer.ids) for answer in answers)
        return learned, prompts + learned

    def statistics(self) -> dict[str, Tensor]:
        sums = self.sum_of_ranks(self.token_sums)
        tokens = self.rows.counted_tokens(self.samples(0)) * self.config.epochs
        self.step_metrics["training_seconds"] = time.perf_counter() - self.written
        numbers = self.step_metrics | dict(
            clip_share=sums[0] / tokens, policy_change=sums[1] / tokens
        )
        if self.critic:
            numbers["value_loss"] = sums[2] / self.config.epochs
        return {n: torch.as_tensor(x, dtype=torch.float64) for n, x in numbers.items()}

    # -- evaluation and the end --------------------------------------------------------------------

    def flops_per_token(self, s: int) -> float:
        """A forward pass has a third of the FLOPs of training once on these tokens: for writing,
        for the reference, the reward model, the critic."""
        forward = 2 + (self.reward_model is not None) + (self.critic is not None)
        trainings = forward / 3 + self.config.epochs * (2 if self.critic else 1)
        return flops_per_token(self.model_config, s) * trainings

    def evaluate(self, dataset, sequences: int) -> float:
        """The mean reward of answers to the first held-out prompts. Their step is 0, so the random
        numbers are always the same. Some answers go to samples.jsonl."""
        answers, rewards = self.write(0, dataset, range(sequences))
        if not self.groups.all or self.groups.all.rank() == 0:
            rl_files.write_samples(self.config.out, self.step, dataset, answers, rewards.tolist())
        return rewards.mean().item()

    def finish(self, run) -> bool:
        if run.world.rank == 0:
            rl_files.finish(run)
        return True


# n tensors [T_i] -> [n, T], with zeros behind the shorter ones
pad = partial(pad_sequence, batch_first=True)
# Of the steps to come, in a checkpoint.
WrittenAhead = list[tuple[int, list[Answer], list[float]]]


# --- the command ----------------------------------------------------------------------------------


@dataclass
class ReinforcementConfig(ChatConfig):
    """Every flag of finetune/reinforcement.py."""

    command: ClassVar[str] = "-m finetune.reinforcement"
    purpose: ClassVar[str] = "Learn from rewards for answers."
    needs: ClassVar[tuple] = (
        *PeftConfig.needs,
        Need(
            ("gae_lambda", "critic_lr"),
            lambda run: run.config.method == "ppo",
            "is only for --method ppo; grpo has no critic",
        ),
        Need(("ep_comm_overlap",), lambda run: False, "needs as many micro-batches in every step"),
        Need(("importance_cap",), lambda run: run.config.rollout_lag, "needs --rollout-lag"),
        Need(
            ("clip_range",),
            lambda run: run.config.epochs > 1,
            "clips updates after the first; --epochs 2 would have one",
        ),
    )
    needed: ClassVar[dict[str, str]] = {
        "load": "CKPT, the model that answers",
        "data": "FILE, which has a prompt on each line",
        "reward": "FILE.py:FUNCTION, or a run of finetune.preference --method reward",
    }
    keeps_dropout: ClassVar[bool] = False

    method: str = flag(
        "grpo", "ppo has a critic; grpo compares the answers of a group", ("ppo", "grpo")
    )
    data: list[str] = flag(
        [], "JSON lines with a prompt, or messages; a twentieth is held out", metavar="FILE"
    )
    reward: str | None = flag(
        None,
        "a run of finetune.preference --method reward, or a function of (prompt, answer, line)",
        metavar="{CKPT,FILE:FUNCTION}",
    )
    beta: float | None = flag(
        None, "weight of the KL from the model of --load; the default: ppo 0.05, grpo 0.04"
    )
    answer_tokens: int = flag(64, "tokens of an answer at most, its end token included")
    group_size: int | None = flag(None, "answers to a prompt; the default: grpo 8, ppo 1")
    epochs: int = flag(2, "updates from the answers of a step; later ones are clipped")
    clip_range: float = flag(0.2, "how far updates may change a token's probability: a share")
    gae_lambda: float = flag(0.95, "of ppo's advantages: 1 has no bias, 0 the least variance")
    critic_lr: float | None = flag(None, "of ppo's critic; the default is --lr")
    rollout_lag: int = flag(0, "age of answers: steps between writing and learning", least=0)
    importance_cap: float = flag(
        2.0, "largest importance weight of a token with --rollout-lag; 0: no weights", least=0
    )
    rollout_tp: int | None = flag(None, "tensor-parallel ranks that write answers; default: --tp")
    rollout_pp: int | None = flag(None, "pipeline ranks that write answers; default: --pp")

    @property
    def unpredicted(self) -> str:
        return "writes what it learns from"

    @property
    def answers_per_prompt(self) -> int:
        """--group-size or its default."""
        default = 8 if self.method == "grpo" else 1
        return default if self.group_size is None else self.group_size

    @property
    def kl_weight(self) -> float:
        """--beta or its default."""
        return KL_WEIGHTS[self.method] if self.beta is None else self.beta

    def task(self) -> Task:
        return ReinforcementTask(self.learned())

    def default_lr(self) -> tuple[float, str]:
        return lr_beside_reference(self)

    def of_values(self, load: str | None) -> "ValueConfig":
        """The configuration of a reward model or critic, with the shape of --load."""
        shape = dict.fromkeys(MODEL_FLAGS) if load != self.load else {}
        micro = self.micro_batch_size or (1 if self.pp > 1 else None)
        common = {field.name: getattr(self, field.name) for field in fields(RunConfig)}
        changes = dict(load=load, micro_batch_size=micro, clip_range=self.clip_range, **shape)
        return ValueConfig(**common | changes)

    def bytes_beside(self, model: MoEConfig, precision: str, ranks: dict, learner: int) -> int:
        """A critic like the policy, and the weights of a frozen reference."""
        options = self.optimizer_state, self.zero_stage, ranks
        frozen, *_ = least_memory.state_parts(model, precision, *options)
        return int((learner if self.method == "ppo" else 0) + (0 if self.peft else frozen))

    def known_micro_batch(self, dp: int) -> int:
        """How many rows the answers will fill is not known."""
        return self.micro_batch_size or 1

    def check(self, model: MoEConfig, world: int, base_needed: bool) -> None:
        check_answers(self)
        check_numbers(self, model)
        check_rollout_layout(self, model, world)
        super().check(model, world, base_needed)
        if self.reward and not is_function(self.reward):
            check_reward_model(self, model, world)


@dataclass
class ValueConfig(PreferenceConfig):
    """The configuration of the reward model and the critic, which see the policy's rows."""

    least_rows: ClassVar[int] = 1

    method: str = flag("reward", "a value for each token", ("reward",))
    clip_range: float = flag(0.2, "that of the policy")


def check_numbers(config: ReinforcementConfig, model: MoEConfig) -> None:
    """Raises ConfigError."""
    size = config.answers_per_prompt
    least = 2 if config.method == "grpo" else 1
    if size < least:
        config.refuse("group_size", f"must be at least {least}")
    if config.global_batch_size % size:
        would_fit = multiples(config.global_batch_size, size)
        config.refuse("global_batch_size", f"must be divisible by --group-size {size}; {would_fit}")
    if not 1 <= config.answer_tokens < model.seq_length:
        rule = f"must be from 1 to below --seq-length {model.seq_length}: a prompt stands before it"
        config.refuse("answer_tokens", rule)
    if not 1 <= config.epochs <= MOST_EPOCHS:
        rule = f"must be from 1 to {MOST_EPOCHS}: answers that old teach nothing"
        config.refuse("epochs", rule)
    for name, low, high in (("clip_range", 0, 1), ("gae_lambda", 0, 1), ("beta", 0, 1000)):
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            config.refuse(name, f"must be from {low} to {high}")
    if config.rollout_lag > MOST_EPOCHS:
        config.refuse("rollout_lag", f"must be at most {MOST_EPOCHS}: so old an answer is noise")
    if config.critic_lr is not None and not (config.min_lr or 0) <= config.critic_lr < 2**31:
        rule = f"must be at least --min-lr {config.min_lr or 0}, to which the cosine comes down"
        config.refuse("critic_lr", rule)


def check_rollout_layout(config: ReinforcementConfig, model: MoEConfig, world: int) -> None:
    """Raises ConfigError."""
    tp, layers = config.rollout_tp or 1, model.num_layers
    for name, ranks in (("rollout_tp", world), ("rollout_pp", world // max(tp, 1))):
        n = getattr(config, name)
        if n is not None and (n < 1 or ranks % n):
            config.refuse(name, f"must divide the {ranks} ranks; {divisors(ranks, n)} would fit")
    with as_flags(tp="rollout_tp"):
        tensor_parallel.check(model, tp, world)
    if layers % (config.rollout_pp or 1):
        fit = divisors(layers, config.rollout_pp)
        config.refuse("rollout_pp", f"must divide the {layers} layers; {fit} would fit")
    if (config.rollout_tp or config.rollout_pp) and config.ep > 1:
        config.refuse("ep", "experts that are spread over ranks write answers where they are")


def check_reward_model(config: ReinforcementConfig, model: MoEConfig, world: int) -> None:
    """Whether the model of --reward fits the layout and the vocabulary. Raises ConfigError."""
    its = config.of_values(config.reward)
    try:
        # not its.base(): in a run that goes on, that falls back to the policy's own checkpoints
        path = checkpoint.find(config.reward)
    except checkpoint.CheckpointError as e:
        rule = "; a function is named FILE.py:FUNCTION" if config.reward.endswith(".py") else ""
        raise ConfigError(f"--reward {e}{rule}") from None
    if "model.head.value.weight" not in checkpoint.read_index(path)["tensors"]:
        rule = "holds no reward model; finetune.preference --method reward trains one"
        config.refuse("reward", f"{rule}, and FILE.py:FUNCTION names a function")
    with as_flags():
        other = its.model_config()
    check_techniques(its, other, world)
    if other.vocab_size != model.vocab_size:
        rule = f"knows {other.vocab_size} tokens, and the model of --load {model.vocab_size}"
        config.refuse("reward", f"{rule}; one that was trained from the same base would fit")
    if other.seq_length < model.seq_length:
        rule = f"reads {other.seq_length} tokens, and --seq-length is {model.seq_length}"
        config.refuse("reward", f"{rule}; --seq-length {other.seq_length} would fit")


def main(argv: list[str]) -> int:
    return train.main(argv, ReinforcementConfig)


if __name__ == "__main__":
    terminal.command(main)
