"""Rollout: a model that is being trained writes answers, and says how likely each token was.

Reinforcement learning trains a model on its own answers (Ouyang et al. 2022, arXiv 2203.02155,
section 3.5). So generation is a part of the training step:

    prompts -> rollout -> answers -> rewards -> losses -> gradients -> step -> next rollout

An answer of n tokens a_1 .. a_n to the prompt x has a log-probability for each token:

    log π(a_i | x, a_1 .. a_i-1) = log_softmax(logits)[a_i]

Generation has these logits anyway: it draws a_i from them, at temperature 1. The losses compare
them with what the model says after an update (finetune/reinforcement.py). So a rollout must give
the log-probability that a training forward gives. If they differ, the ratio of the two is not 1
where it should be, and the model learns from the difference of two programs. Here both are equal up
to rounding, under every layout (1e-15 in float64, 1e-6 in float32, 1e-2 in bf16:
tests/test_rollout.py).

    write_answers   the ranks share the samples; each writes its own, with a cache (generate.py, or
                    engine.py, where answers that have ended make room for others)
    Writer          write_answers for a run: by the model that trains, or by a copy of its weights
                    under another layout (--rollout-tp, --rollout-pp)

finetune/answer_rows.py packs the answers into rows to train on.

The random numbers of an answer depend on (seed, step, sample) alone. So a sample has the same
answer in any batch and under any layout.

    python -m course.rollout  two ranks write answers: equal to one rank's, and to training

Not covered: production systems generate with another program, on GPUs of its own, in 16 bits. There
the log-probabilities do differ, and a correction is needed (TRL, verl: importance sampling).
"""

import itertools
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch.distributed as dist

import generate
import sequence_parallel
import sharding
from base.groups import Groups
from finetune import adapter_layers, resharding
from finetune.adapter_learning import adapter_config
from finetune.answer_rows import Answer
from gpt import GPT
from inference.batches import data_parallel, from_all_ranks
from inference.engine import Engine
from inference.loading import build_stages, materialise
from inference.requests import Output, check_prompts, requests_of
from inference.sampling import hash_of
from pipeline_parallel import Pipeline, stages_of
from run.config import DTYPES

# Tokens of a block of the engine's cache.
BLOCK = 16


def keys(seed: int, step: int, samples) -> list[int]:
    """The 32-bit key of each sample's random numbers, as inference.sampling takes them."""
    return [key_of(seed, step, int(sample)) for sample in samples]


def key_of(seed: int, step: int, sample: int) -> int:
    return hash_of((seed, step, sample))


# --- answers of all ranks -------------------------------------------------------------------------


def write_answers(
    model: GPT | Pipeline,
    prompts: list[list[int]],
    samples: list[int] | range,
    seed: int,
    step: int,
    max_tokens: int,
    end_tokens: tuple[int, ...],
    groups: Groups,
    lockstep: dist.ProcessGroup | None = None,
    cached: bool = True,
) -> list[Answer]:
    """The answers to all prompts, sorted by sample, on every rank. A collective of all ranks.

    prompts, samples: of the global batch, the same on every rank. The data-parallel ranks write
    contiguous shares. max_tokens: of an answer, with its end token. end_tokens: one of these ends
    an answer. lockstep: groups.dp where parameters (ZeRO stage 3) or experts are spread over these
    ranks, else None. cached: as of generate.stream.

    Raises ValueError for a prompt that is not possible, before anything runs; FloatingPointError,
    on every rank, where logits are not finite.
    """
    stages = stages_of(model)
    check(stages[0], prompts, samples, max_tokens)
    dp, dp_rank = data_parallel(groups)
    mine = slice(len(samples) * dp_rank // dp, len(samples) * (dp_rank + 1) // dp)
    prompts, samples = prompts[mine], samples[mine]
    options = dict(keys=keys(seed, step, samples), eot=end_tokens, log_probs=0)
    continuous = cached and not lockstep and end_tokens and suits_engine(stages)
    answers = []
    try:
        with sequence_parallel.whole_sequences(stages, groups.tp):
            if continuous:
                outputs = write_continuously(model, groups, prompts, max_tokens, options)
            else:
                options |= dict(cached=cached, lockstep=lockstep)
                steps = generate.stream(model, prompts, max_tokens, **options)
                outputs = itertools.chain.from_iterable(steps)
            drawn = tokens_of(outputs, len(prompts))
    except FloatingPointError:
        # The other ranks do not know it yet.
        answers = None
    else:
        if hands_in(groups, stage=0 if continuous else -1):
            for sample, prompt, (ids, log_probs) in zip(samples, prompts, drawn):
                ended = ids[-1] in end_tokens
                answers.append(Answer(sample, list(prompt), ids, log_probs, ended))
    of_ranks = from_all_ranks(answers, groups)
    return sorted(itertools.chain(*of_ranks), key=lambda answer: answer.sample)


def suits_engine(stages: list[GPT]) -> bool:
    """Whether inference/engine.py can run the model: one stage on each rank. Not on a GPU, where an
    engine made for these answers would capture its CUDA graphs anew."""
    # A stage in a pipeline may have no parameters, once they are packed.
    return len(stages) == 1 and all(p.device.type == "cpu" for p in stages[0].parameters())


def write_continuously(
    model, groups: Groups, prompts: list[list[int]], max_tokens: int, options: dict
) -> Iterator[Output]:
    """By the engine, whose steps have the answers that have not ended; its driver has the outputs.
    It is faster where lengths differ, and slower where all are equal: so it is for answers that may
    end early. options: of requests_of. A collective of the ranks that hold the model. Raises
    FloatingPointError on one of them."""
    blocks = 1 + sum(-(-(len(prompt) + max_tokens) // BLOCK) for prompt in prompts)
    sizes = dict(max_sequences=max(1, len(prompts)), block_size=BLOCK, num_blocks=max(2, blocks))
    engine = Engine(model, groups, **sizes)
    if not engine.link.is_driver:
        return engine.follow()
    try:
        for request in requests_of(prompts, max_tokens, **options):
            engine.add(request)
        while engine.busy:
            yield from engine.step()
    finally:
        engine.close()


def tokens_of(outputs: Iterable[Output], num_prompts: int) -> list[tuple[list[int], list[float]]]:
    """(ids, log-probabilities) of each prompt's answer, with its end token; empty on a rank that
    has no logits."""
    drawn = [([], []) for _ in range(num_prompts)]
    for output in outputs:
        if output.log_prob:
            ids, log_probs = drawn[output.number]
            ids.append(output.log_prob.token)
            log_probs.append(output.log_prob.log_prob)
    return drawn


def check(stage: GPT, prompts: list[list[int]], samples, max_tokens: int) -> None:
    """Check the prompts of all ranks, so that all raise the same. Raises ValueError, naming what to
    change."""
    if len(samples) != len(prompts) or len(set(samples)) != len(samples):
        raise ValueError(
            f"{len(samples)} samples for {len(prompts)} prompts: give one number for each, no two"
            " alike"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens}: must be at least 1")
    check_prompts(stage, prompts)
    seq_length = stage.config.seq_length
    for sample, prompt in zip(samples, prompts):
        if len(prompt) + max_tokens > seq_length:
            raise ValueError(
                f"the prompt of sample {sample} has {len(prompt)} tokens, and an answer may have"
                f" {max_tokens}: together more than the {seq_length} of the model's context;"
                " shorten the prompt or the answer"
            )


def hands_in(groups: Groups, stage: int) -> bool:
    """Whether this rank hands in the answers of its data-parallel share: one rank of each share.
    stage: 0, where the engine's driver is, or -1, the last one, which alone has logits."""
    has_stage = not groups.pp or groups.pp.rank() == stage % groups.pp.size()
    return has_stage and (not groups.tp or groups.tp.rank() == 0)


# --- which model writes ---------------------------------------------------------------------------


class Writer:
    """Writes the answers of a run. A decoding step computes one token of each answer, so its time
    goes into collectives and into reading weights: the best layout for it is often not that of
    training. With ZeRO stage 3 every token would gather all weights. A copy gets the weights before
    the answers of every step:

        trainer.model --resharding.copy()--> model of --rollout-tp, --rollout-pp --> answers
    """

    def __init__(self, trainer):
        """trainer: the policy, train.Trainer."""
        self.trainer = trainer
        self.config = trainer.config
        self.groups = trainer.groups
        self.model = trainer.model
        self.resharding = None
        # With ZeRO stage 3 or with experts on several ranks, a forward pass is a collective of the
        # data-parallel ranks. So a rank whose answers have all ended goes on until all have: they
        # are in lockstep.
        spread = self.config.zero_stage == 3 or self.config.ep > 1
        self.lockstep = self.groups.dp if spread else None
        tp, pp = self.config.rollout_tp, self.config.rollout_pp
        if tp or pp:
            # Parameters of the copy are not spread over data-parallel ranks.
            self.lockstep = None
            self.build_copy(tp or 1, pp or 1)

    def build_copy(self, tp: int, pp: int) -> None:
        """Another model and another mesh, on the same ranks: tp and pp as asked, and all that
        is left is data parallel."""
        trainer = self.trainer
        if self.groups.all:
            world = self.groups.all.size()
            timeout = timedelta(seconds=self.config.timeout + 60)
            self.groups = Groups.make(trainer.device.type, world, tp, pp, timeout)
        stages = build_stages(trainer.model_config, self.groups)
        if self.config.peft:
            for stage in stages:
                adapter_layers.apply(stage, adapter_config(self.config), self.groups.tp)
        self.model = materialise(stages, self.groups, trainer.device, DTYPES[trainer.precision])
        source = resharding.weights(*trainer.stages)
        target = sharding.named_parameters(*stages)
        self.resharding = resharding.Resharding(source, target, self.groups.all)

    def write(self, prompts, samples: range, step: int, end_tokens) -> list[Answer]:
        """The answers to prompts, in the order of the samples; on every rank. A collective."""
        for gradients in self.trainer.gradients:
            gradients.wait_for_parameters()
        if self.resharding:
            self.resharding.copy()
        return write_answers(
            self.model,
            prompts,
            samples,
            seed=self.config.seed,
            step=step,
            max_tokens=self.config.answer_tokens,
            end_tokens=end_tokens,
            groups=self.groups,
            lockstep=self.lockstep,
        )
