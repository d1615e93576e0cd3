"""What one rank of a large run does in a step: bytes, FLOPs and collectives, without the cluster.

    python train.py --as-rank 0 --of 3072 --model megatron-1t --tp 8 --pp 64 --sequence-parallel \\
        --recompute selective --global-batch-size 3072 --micro-batch-size 1

It runs the Trainer of train.py, its forward_backward and its update. So it cannot drift from what
train.py does. Three things take the place of a cluster:

    meta device           tensors have a shape and a type, and no values: they take no memory
    fake process group    a collective of 3,072 ranks returns at once (planning/substitutes.py)
    counters              each operation and each collective passes by them, and what autograd
                          keeps for backward (planning/counters.py)

The micro-batches of a step are alike, so a step of one and a step of two are run (under zb-h1 of p
and p + 1). Each count of a step of m is a + b m, and these two give a and b. What is kept at the
peak follows from the schedule of all m, for each action adds and frees the same bytes
(`Actions.peak_of`).

Every token counts in the loss, and each expert gets an even share of the tokens. On real ranks the
rows that all-to-alls carry vary around it.

Precision is bf16 unless --precision is given, as on GPUs. FLOPs are those of matrix
multiplications; fused attention counts all s² scores, and computes them again in backward.

Not covered: what fused CUDA kernels (--kernels auto) and torch.compile keep in another form; what
exists for a moment (gathered units of ZeRO stage 3, gradients on their way, buffers, workspaces).
No tokenizer is opened: --vocab-size or the preset says how large the vocabulary is.
"""

import dataclasses
import itertools
import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

import schedules
from base import terminal
from base.float8 import Quantised
from base.groups import Groups
from planning.counters import Counters, Held, Kept, by_dtype, key
from planning.substitutes import META, Tokens, cluster
from run import rules
from run.config import ConfigError
from run.pretraining import Config
from sharding import local_part

# Far more than anybody has, and process groups that are made in a second.
MOST_RANKS = 2**17

# --- the answer -----------------------------------------------------------------------------------


class Collective(NamedTuple):
    """kind: all-reduce, all-gather, reduce-scatter, all-to-all, send or receive. group: tp, dp, cp,
    replicas (dp times cp), shard, replicate, pp, ep, edp or world. bytes: of the largest tensor in
    one call. count: calls in one step."""

    kind: str
    group: str
    bytes: int
    count: int


@dataclasses.dataclass
class Report:
    """What a rank holds and does in one step. Bytes by type are {"bfloat16": bytes, ..}."""

    rank: int
    world: int
    # {"tp": (number of this rank, size), ..}
    place: dict[str, tuple[int, int]]
    # Global numbers of this rank's layers.
    layers: list[int]
    micro_batches: int
    # Bytes, true sizes of the tensors: with padding, and a shared tensor once.
    parameters: dict[str, int]
    gradients: dict[str, int]
    optimizer_state: dict[str, int]
    # Bytes that autograd keeps for backward, at the peak; and what W of zb-h1 waits for.
    activations: int
    flops: int
    collectives: list[Collective]


# --- activations of a whole schedule --------------------------------------------------------------


class Deferred(tuple):
    """What a weight gradient waits for: (weight, grad_output, x), held as long as this lives."""

    held = ()


class DeferredList:
    """Stands on a weight during I (pipeline_parallel.py); fills the pipeline's list. In FP8 an
    item has bytes in the place of tensors (float8.Quantised)."""

    def __init__(self, kept: Kept, target: list):
        self.kept = kept
        self.target = target

    def append(self, item: tuple) -> None:
        entry = Deferred(item)
        entry.held = [Held(self.kept, getattr(x, "q", x)) for x in item[1:]]
        self.target.append(entry)


class Actions:
    """Watches a pipeline: how each type of action changes what is kept.

    `change` and `rise`: (op, chunk) -> bytes more after it than before it, and at most during it.
    """

    def __init__(self, pipeline, kept: Kept):
        self.kept = kept
        self.change = {}
        self.rise = defaultdict(int)
        # The pipeline's own methods.
        self.act, self.defer = pipeline.act, pipeline.defer
        pipeline.act, pipeline.defer = self.watched_act, self.watched_defer
        if pipeline.turns:
            # What a second thread does is not counted.
            pipeline.turns.together = lambda first, second: (first(), second())

    def watched_act(self, step, action, received) -> None:
        kept = self.kept
        before = kept.bytes
        # The peak of this action.
        earlier, kept.peak = kept.peak, before
        self.act(step, action, received)
        kind = action.op, action.chunk
        self.change[kind] = kept.bytes - before
        self.rise[kind] = max(self.rise[kind], kept.peak - before)
        kept.peak = max(earlier, kept.peak)

    def watched_defer(self, chunk: int, deferred: list | None) -> None:
        self.defer(chunk, None if deferred is None else DeferredList(self.kept, deferred))

    def peak_of(self, actions: list[schedules.Action]) -> int:
        """Bytes kept at the peak of one rank's list of actions."""
        kinds = [(action.op, action.chunk) for action in actions]
        before = itertools.accumulate((self.change[kind] for kind in kinds), initial=0)
        return max(level + self.rise[kind] for level, kind in zip(before, kinds))


# --- a step ---------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What a step of a few micro-batches has shown."""

    flops: int
    collectives: Counter
    kept: Kept
    # None without a pipeline.
    actions: Actions | None
    # Weights in FP8, as long as the step needs them.
    fp8_weights: list[Tensor]


def run_step(trainer, m: int) -> Step:
    """A step of only m micro-batches, by the trainer's own code."""
    whole = trainer.config, trainer.schedule
    sequences = m * trainer.micro_batch * trainer.dp
    trainer.config = dataclasses.replace(trainer.config, global_batch_size=sequences)
    # The answer is about a step after a ramp-up.
    trainer.config.rampup_batch_size = None
    kept = Kept(p for stage in trainer.stages for p in stage.parameters())
    actions = None
    if trainer.schedule:
        name, (p, v, _) = trainer.config.pipeline_schedule, trainer.config.placement
        if name == "dualpipe-v":
            # Its last micro-batches have actions of their own.
            trainer.schedule = schedules.lists(name, p, m, v)
        trainer.schedule = [[a for a in list_ if a.micro_batch < m] for list_ in trainer.schedule]
        actions = Actions(trainer.pipeline, kept)
    with kept, Counters() as counters:
        text = trainer.model_config, trainer.config.document_mask, trainer.task.batch_class
        trainer.forward_backward(1, Tokens(*text))
        fp8_weights = fp8_weights_of(trainer)
        trainer.update(1)
        # What the next forward would wait for.
        trainer.task.wait_for_parameters()
    if actions:
        # The pipeline's own methods again.
        del trainer.pipeline.act, trainer.pipeline.defer
    trainer.config, trainer.schedule = whole
    calls = counters.counted(trainer.groups)
    return Step(counters.flops, calls, kept, actions, fp8_weights)


def fp8_weights_of(trainer) -> list[Tensor]:
    """Bytes that are kept beside weights, by rows and by columns as on a GPU."""
    found = []
    for kept in trainer.fp8.weights.values() if trainer.fp8 else ():
        # Beside experts' pairs of matrices stands no scale.
        pair = kept if isinstance(kept[0], Quantised) else kept[1]
        found += [quantised.q for quantised in pair or ()]
    return found


def report(config: Config, trainer_class, rank: int, world: int) -> Report:
    """What rank `rank` of `world` does in a step of the run that `config` describes. Raises
    ConfigError as rules.validate."""
    config = as_on_a_cluster(config, world)
    with cluster(rank, world):
        groups = Groups()
        if world > 1:
            groups = Groups.make("cpu", world, **config.mesh)
        trainer = trainer_class(config, META, groups, config.task())
        # It would read whether a step of fp16 is finite.
        trainer.optimizer.scaler = None
        m = config.global_batch_size // trainer.dp // trainer.micro_batch
        few = min(m, fewest(config))
        if config.fp8 == "delayed":
            # The first step of a run has no history, and finds its maxima itself.
            run_step(trainer, few)
        first = run_step(trainer, few)
        second = run_step(trainer, few + 1) if m > few else first
        of_shards = ("replicate", "shard") if groups.replicate else ()
        names = ("pp", "dp", "cp", *of_shards, "edp", "ep", "tp")
        found = {name: getattr(groups, name) for name in names}
        place = {name: (group.rank(), group.size()) for name, group in found.items() if group}
        layers = [int(n) for stage in trainer.stages for n in stage.blocks]
        counts = counts_of(trainer, m - few, first, second)
        held = bytes_of(trainer, first.fp8_weights)
        return Report(rank, world, place, layers, m, **held, **counts)


def fewest(config: Config) -> int:
    """The micro-batches of a step that has every type of action."""
    if config.pipeline_schedule not in schedules.SPLIT_BACKWARD:
        return 1
    # Under zb-h1 up to p micro-batches wait for their weight gradients when the step ends; a V has
    # as many in each half.
    return config.pp * config.virtual_stages


def as_on_a_cluster(config: Config, world: int) -> Config:
    """What is not given is as on `world` GPUs. Raises ConfigError for what cannot run there."""
    # Kernels and the compiler do not run on the meta device.
    meta = {"device": "auto", "kernels": "off", "compile": False}
    config = dataclasses.replace(config, precision=config.precision or "bf16", **meta)
    # Adapters are asked about the base that --model names.
    rules.validate(config, world, base_needed=False)
    return config


def counts_of(trainer, more: int, first: Step, second: Step) -> dict:
    """Fields of Report, of a step with `more` micro-batches than the first has. The second has one
    more, so each of them adds the difference of the two."""
    collectives = []
    for kind in first.collectives | second.collectives:
        count, next_count = first.collectives[kind], second.collectives[kind]
        collectives.append(Collective(*kind, count + more * (next_count - count)))
    activations = second.kept.peak
    if second.actions:
        activations = second.actions.peak_of(trainer.schedule[trainer.groups.pp.rank()])
    return {
        "activations": activations,
        "flops": first.flops + more * (second.flops - first.flops),
        "collectives": sorted(collectives),
    }


def bytes_of(trainer, fp8_weights: list[Tensor]) -> dict[str, dict[str, int]]:
    """What a trainer holds between backward and update, as fields of Report."""
    parameters = [p for stage in trainer.stages for p in stage.parameters()]
    local = [local_part(p) for p in parameters]
    gradients = [getattr(p, "main_grad", None) for p in local]
    optimizer = trainer.optimizer
    state = []
    for tensors in (optimizer.masters, optimizer.low, *optimizer.moments.values()):
        for name, tensor in tensors.items():
            weight = optimizer.parameters[name]
            # a float32 weight is its own master
            if key(tensor.untyped_storage()) != key(weight.untyped_storage()):
                state.append(tensor)
    return {
        "parameters": by_dtype(parameters + local + fp8_weights),
        "gradients": by_dtype(x for x in gradients if x is not None),
        "optimizer_state": by_dtype(state),
    }


# --- the command ----------------------------------------------------------------------------------


def main(config: Config, question: dict, trainer_class) -> None:
    """Answer `train.py --as-rank R --of N`. question: those flags of flags.QUESTION that are given.
    trainer_class: train.Trainer. Raises ConfigError."""
    rank, world = check(config, question)
    answer = report(config, trainer_class, rank, world)
    for line in lines(answer):
        terminal.say(line)
    if "json" in question:
        path, collectives = question["json"], [call._asdict() for call in answer.collectives]
        fields = dataclasses.asdict(answer) | {"collectives": collectives}
        try:
            Path(path).write_text(json.dumps(fields, indent=1))
        except OSError as e:
            raise ConfigError(f"--json {path}: cannot be written ({e.strerror})") from None


def check(config: Config, question: dict) -> tuple[int, int]:
    """(rank, world). Raises ConfigError for a question that has no answer."""
    rank, world = question.get("as_rank"), question.get("of")
    if rank is None:
        name = "of" if world is not None else "json"
        raise ConfigError(f"--{name} {question[name]}: belongs to --as-rank R --of N")
    if world is None:
        raise ConfigError(f"--as-rank {rank}: of how many ranks? --of 256 would say")
    if not 1 <= world <= MOST_RANKS:
        raise ConfigError(f"--of {world}: must be from 1 to {MOST_RANKS:,} ranks")
    if not 0 <= rank < world:
        raise ConfigError(f"--as-rank {rank}: ranks of --of {world} are numbered 0 to {world - 1}")
    if "RANK" in os.environ:
        rule = "one process answers; start it with python, not with torchrun"
        raise ConfigError(f"--as-rank {rank}: {rule}")
    reads, runs = "reads no checkpoint", "runs no step"
    for field, rule in dict(resume=reads, load=reads, plan=runs, profile=runs).items():
        if getattr(config, field):
            raise ConfigError(f"--as-rank {rank}: {rule}; leave --{field} out")
    return rank, world


def lines(answer: Report) -> list[str]:
    """The report for people."""
    place = ", ".join(f"{name} {n} of {size}" for name, (n, size) in answer.place.items())
    held = {
        "parameters": answer.parameters,
        "gradients": answer.gradients,
        "optimizer state": answer.optimizer_state,
        "activations": {"": answer.activations},
    }
    out = [
        f"rank {answer.rank} of {answer.world:,}: {place or 'alone'}",
        f"layers {ranges(answer.layers)}",
        f"{answer.micro_batches} micro-batches, {answer.flops / 1e12:,.3f} TFLOP in a step",
    ]
    for name, sizes in held.items():
        types = ", ".join(f"{dtype} {size:,}" for dtype, size in sizes.items() if dtype)
        total = sum(sizes.values())
        out.append(f"{name:<16}{total / 2**30:>10.3f} GiB{total:>20,} bytes   {types}".rstrip())
    names = "group", "calls", "bytes of a call", "GB of all"
    out.append("{:<14}{:>10}{:>9}{:>17}{:>12}".format("collective", *names))
    for kind, group, size, count in answer.collectives:
        out.append(f"{kind:<14}{group:>10}{count:>9,}{size:>17,}{size * count / 1e9:>12,.3f}")
    return out


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 8, 9] -> "0-2 8-9"; "none" for an empty list."""
    words = []
    # Neighbours differ from their places by the same.
    for _, pairs in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        neighbours = [n for _, n in pairs]
        first, last = neighbours[0], neighbours[-1]
        words.append(f"{first}-{last}" if last > first else str(first))
    return " ".join(words) or "none"
