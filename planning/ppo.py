"""How long a step of PPO takes: the answers that the model writes, and the updates from them.

    python planner.py ppo --model llama2-70b --gpus 64 --gpu h100

    answers     prompts: one forward; then a step of planning/serving.py for each token
    scores      a forward each of reference, critic and reward model
    updates     planner.step_time, of actor and critic

Two choices make four rows. Answers are written in the layout of training, or in another one (train
with `finetune/reinforcement.py --rollout-tp`): with p pipeline stages a rank reads its weights for
each of p groups of sequences, so p times as long. Actor and critic are on the same ranks, one after
the other; or each on one half of the ranks, at the same time.

Not covered: answers of different lengths; the seconds in which weights go from one layout to the
other; in a forward, the head and the sends between stages.
"""

import argparse
import dataclasses
import math
from typing import NamedTuple

import planner
import tensor_parallel
from base.model_config import MoEConfig, least_parameters
from planning import commands
from planning.inputs import TRAIN, Layout, Machine, PlanError
from planning.layer_time import Rank, layer
from planning.layouts import USABLE, accepts
from planning.serving import BYTES, ENGINES, Serving
from run.config import ConfigError
from run.rules import multiples

# Sequences of an update, answers of a step, tokens of a prompt and of an answer: announced for
# Llama 2 70B, but for the prompts.
BATCH, ANSWERS, PROMPT, ANSWER = 64, 512, 512, 1024


class Step(NamedTuple):
    """Seconds of one PPO step, and the layouts of training and of writing."""

    ranks: str
    training: Layout
    writing: Layout
    answers: float
    scores: float
    updates: float

    @property
    def seconds(self) -> float:
        return self.answers + self.scores + self.updates


# --- answers --------------------------------------------------------------------------------------


def forward_seconds(machine: Machine, model: MoEConfig, layout: Layout, sequences: int) -> float:
    """A forward of so many sequences over all replicas, one at a time."""
    m = -(-sequences // layout.dp)
    alone = Layout(tp=layout.tp, pp=layout.pp, sequence_parallel=layout.sequence_parallel)
    forward = sum(layer(Rank(machine, TRAIN, model, alone))[0])
    return (m + layout.pp - 1) * model.num_layers / layout.pp * forward


def writing_seconds(machine: Machine, model: MoEConfig, layout: Layout, free: float, case) -> float:
    """In which all answers of a step are written; infinite where no cache fits. free: bytes of each
    rank; case: the command's arguments."""
    serving = Serving(machine, ENGINES["graphs"], model, layout.tp, layout.pp)
    each = -(-case.answers // layout.dp)
    cache = serving.cached(1, case.prompt_tokens + case.answer_tokens)
    at_most = int(serving.ranks * free // cache)
    if at_most < 1:
        return math.inf
    rounds = -(-each // at_most)
    prompts = dataclasses.replace(model, seq_length=case.prompt_tokens)
    first = forward_seconds(machine, prompts, layout, case.answers)
    # On average half of the answer is there.
    s = case.prompt_tokens + case.answer_tokens / 2
    return first + rounds * case.answer_tokens * serving.step(-(-each // rounds), s)


def best_writing(
    machine: Machine, model: MoEConfig, gpus: int, free: float, case
) -> tuple[float, Layout]:
    """The fastest layout with one stage whose copy of the weights and cache fit: (seconds, it)."""
    found = []
    for t in range(1, machine.ranks_per_node + 1):
        layout = Layout(tp=t, dp=gpus // t)
        if accepts(tensor_parallel.check, model, t, gpus) and gpus % t == 0:
            left = free - BYTES * least_parameters(model) / t
            seconds = writing_seconds(machine, model, layout, left, case)
            found.append((seconds, -t, layout))
    seconds, _, layout = min(found, key=lambda one: one[:2])
    return seconds, layout


# --- a step ---------------------------------------------------------------------------------------


def steps(machine: Machine, model: MoEConfig, case) -> list[Step]:
    """The four ways; without those whose layout of training cannot write. Raises PlanError."""
    model = dataclasses.replace(model, seq_length=case.prompt_tokens + case.answer_tokens)
    model = dataclasses.replace(model, dropout=0.0, attention="fused")
    found = []
    for ranks, gpus, share in (("all", case.gpus, 2), ("halves", case.gpus // 2, 1)):
        # On the same ranks two models have half of the memory each.
        name = f"half of {machine.name}" if share == 2 else machine.name
        room = dataclasses.replace(machine, name=name, memory=machine.memory / share)
        plans = planner.search(room, TRAIN, model, gpus, case.batch)
        plan = next(plan for plan in plans if plan.layout.cp == 1)
        updates = case.answers / case.batch * plan.seconds * share
        # Reference, critic and reward; on halves the critic's ranks have two of them.
        forwards = 3 if share == 2 else 2
        scores = forwards * forward_seconds(machine, model, plan.layout, case.answers)
        # Beside the state of what learns, and the frozen models.
        state = sum(plan.bytes[part] for part in ("parameters", "gradients", "optimizer"))
        frozen = plan.bytes["parameters"] * (forwards - share + 1)
        free = USABLE * machine.memory - share * state - frozen
        own = writing_seconds(machine, model, plan.layout, free, case)
        # Under stage 3 no rank has whole weights.
        if plan.layout.zero_stage < 3 and own < math.inf:
            found.append(Step(ranks, plan.layout, plan.layout, own, scores, updates))
        answers, layout = best_writing(machine, model, gpus, free, case)
        if answers == math.inf:
            raise PlanError("beside the state no --rollout-tp of one node has room for answers")
        found.append(Step(ranks, plan.layout, layout, answers, scores, updates))
    return found


def table(found: list[Step]) -> str:
    rows = [["ranks", "training", "answers", "answers, s", "scores", "updates", "step, s"]]
    for step in found:
        trained = f"tp {step.training.tp} pp {step.training.pp} dp {step.training.dp}"
        trained += f" zero {step.training.zero_stage} {step.training.recompute}"
        seconds = step.answers, step.scores, step.updates, step.seconds
        written = f"tp {step.writing.tp} pp {step.writing.pp}"
        rows.append([step.ranks, trained, written, *(f"{x:.1f}" for x in seconds)])
    return "\n".join("{:<8}{:<34}{:<16}{:>11}{:>8}{:>9}{:>9}".format(*row) for row in rows)


# --- the command ----------------------------------------------------------------------------------


def arguments(argv: list[str]) -> tuple[argparse.Namespace, MoEConfig]:
    parser = commands.Parser("ppo", "Seconds of a step of reinforcement.py --method ppo.")
    parser.add_machine()
    parser.add_argument("--model", required=True, help="a preset: actor, critic and the others")
    parser.add_counts(
        ("batch", BATCH, "sequences of an update"),
        ("answers", ANSWERS, "of a step"),
        ("prompt-tokens", PROMPT, "of each prompt"),
        ("answer-tokens", ANSWER, "of each answer"),
    )
    case = parser.parse_args(argv)
    if case.answers % case.batch:
        rule = f"must be a multiple of --batch {case.batch}"
        fits = multiples(case.answers, case.batch)
        raise ConfigError(f"--answers {case.answers}: {rule}; {fits}")
    model = commands.Config(model=case.model).model_config()
    tokens = case.prompt_tokens + case.answer_tokens
    if model.positions == "learned" and tokens > model.seq_length:
        rule = f"with --prompt-tokens {case.prompt_tokens} they are {tokens}, and --model"
        rule += f" {case.model} has {model.seq_length} learned positions; fewer would fit"
        raise ConfigError(f"--answer-tokens {case.answer_tokens}: {rule}")
    return case, model


def main(argv: list[str]) -> None:
    case, model = arguments(argv)
    machine = commands.machine_of(case)
    node = machine.ranks_per_node
    if case.gpus % 2 or (case.gpus > node and case.gpus % (2 * node)):
        fits = multiples(case.gpus, 2 if case.gpus <= node else 2 * node)
        raise ConfigError(f"--gpus {case.gpus}: two halves of whole nodes are needed; {fits}")
    try:
        found = steps(machine, model, case)
    except PlanError as e:
        raise ConfigError(f"--gpus {case.gpus}: {e}") from None
    print(
        f"{case.model} on {case.gpus:,} {machine.name}: {case.answers:,} answers of"
        f" {case.answer_tokens:,} tokens to prompts of {case.prompt_tokens:,};"
        f" {case.answers // case.batch} updates of {case.batch} sequences"
    )
    print("", table(found), "", sep="\n")
    best = {step.ranks: step for step in found if step.writing != step.training}
    print(
        f"With a layout of their own for the answers, halves take"
        f" {best['halves'].seconds / best['all'].seconds:.2f} times as long as all ranks."
    )
