"""What one rank of a large run does in a step: bytes, FLOPs and collectives, without the cluster.

    python train.py --as-rank 0 --of 3072 --model megatron-1t --tp 8 --pp 64 --sequence-parallel \\
        --recompute selective --global-batch-size 3072 --micro-batch-size 1

It runs the Trainer of train.py, its forward_backward and its update. So it cannot drift from what
train.py does. Three things take the place of a cluster:

    meta device           tensors have a shape and a type, and no values: they take no memory
    fake process group    a collective of 3,072 ranks returns at once
    counters              each operation and each collective passes by them, and what autograd
                          keeps for backward (planning/counters.py)

The micro-batches of a step are alike, so a step of one and a step of two are run (under zb-h1 of p
and p + 1). Each count of a step of m is a + b m, and these two give a and b. What is kept at the
peak follows from the schedule of all m, for each action adds and frees the same bytes
(`Actions.peak_of`).

Where a value decides, none is read: every token counts in the loss, and each expert gets an even
share of the tokens (`EvenRouting`). On real ranks the rows that all-to-alls carry vary around it.

Precision is bf16 unless --precision is given, as on GPUs. FLOPs are those of matrix
multiplications; fused attention counts all s² scores, and five of its matrices in backward, for it
computes the scores again. A ring's blocks of which a query sees no key are not computed.

Not covered: what fused CUDA kernels (--kernels auto) and torch.compile keep in another form; what
exists for a moment (gathered units of ZeRO stage 3, gradients on their way, buffers, workspaces).
No tokenizer is opened: --vocab-size or the preset says how large the vocabulary is.
"""

import contextlib
import dataclasses
import json
import os
from collections import Counter, defaultdict
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dropout
import moe
import schedules
from attention import ring_attention
from base import attention_kernels, terminal
from base.world import Groups
from data import Batch, Dataset
from planning.counters import Counters, Held, Kept, by_dtype, key
from routers import DispatchPlan, Routing
from run import rules
from run.config import ConfigError, flag_name
from run.pretraining import Config
from sharding import local_part

# far more than anybody has, and process groups that are made in a second
MOST_RANKS = 2**17
META = torch.device("meta")
aten = torch.ops.aten

# --- the answer -----------------------------------------------------------------------------------


class Collective(NamedTuple):
    """kind: all-reduce, all-gather, reduce-scatter, all-to-all, send or receive. group: tp, dp, cp,
    replicas (dp times cp), pp, ep, edp or world. bytes: of the largest tensor in one call. count:
    calls in one step."""

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
    # global numbers of this rank's layers
    layers: list[int]
    micro_batches: int
    # bytes, true sizes of the tensors: with padding, and a shared tensor once
    parameters: dict[str, int]
    gradients: dict[str, int]
    optimizer_state: dict[str, int]
    # bytes that autograd keeps for backward, at the peak; and what W of zb-h1 waits for
    activations: int
    flops: int
    collectives: list[Collective]


# --- in the place of values -----------------------------------------------------------------------


class Tokens(Dataset):
    """A data set of shapes, in which every token counts."""

    def __init__(self, s: int, document_mask: bool = False):
        self.s = s
        self.document_mask = document_mask

    def batch(self, samples) -> Batch:
        shape = len(samples), self.s
        tokens = torch.empty(shape, dtype=torch.int64, device=META)
        mask = torch.empty(shape, dtype=torch.bool, device=META)
        documents = tokens.clone() if self.document_mask else None
        return Batch(tokens, tokens.clone(), mask, tokens[:, 0].clone(), documents)


def even_scores(k: int, logits: Tensor, training: bool = True) -> Tensor:
    """Scores whose k largest give token n the experts n k, n k + 1, .. (modulo E). logits, result:
    [n, E]"""
    n, e = logits.shape
    first = k * torch.arange(n, device=logits.device).unsqueeze(1)
    return -((torch.arange(e, device=logits.device) - first) % e).to(logits.dtype)


class EvenRouting(Routing):
    """Takes the place of a router's Routing on the meta device: how many rows an expert gets is a
    value. The plan is made on the CPU, from even scores; what it indexes is on the meta device."""

    def forward(self, logits: Tensor) -> DispatchPlan:
        self.scores = partial(even_scores, self.k)
        plan = super().forward(torch.zeros(logits.shape, dtype=logits.dtype))
        on_meta = {}
        for name, value in plan._asdict().items():
            # of the counts the host reads each number
            if isinstance(value, Tensor) and name != "counts":
                on_meta[name] = value.to(META)
        return plan._replace(**on_meta)

    def exchange(self, counts: Tensor) -> Tensor:
        super().exchange(counts)
        # the other ranks send what this one sends
        ep = self.group.size()
        return counts.view(ep, -1)[self.group.rank()].repeat(ep)


def with_even_routing(task):
    """The task, on a model whose routers need no values."""
    before = task.before_techniques

    def before_techniques(stage) -> None:
        before(stage)
        for layer in moe.layers(stage).values():
            layer.routing.__class__ = EvenRouting

    task.before_techniques = before_techniques
    return task


def attention_in_one(
    q: Tensor, k: Tensor, v: Tensor, attn_mask=None, is_causal: bool = True, enable_gqa=False
) -> Tensor:
    """F.scaled_dot_product_attention. On the meta device torch takes it apart, into matrices of s²
    scores. This is one operation, which keeps q, k, v, the output and a number for each row; and
    what a window or ALiBi adds to the scores (families.py). A mask of documents is boolean,
    and the kernel for GPUs does not keep it (attention/document_mask.py)."""
    bias = attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    return attention(q, k, v, 0.0, bias is None, attn_mask=bias)[0]


def mask_without_bits(key: Tensor, site: int, shape, start: dict[int, int], p: float) -> Tensor:
    """dropout.dropout_mask, without its hash: twenty operations, half of the time of a step."""
    return torch.empty(shape, dtype=torch.bool, device=key.device)


def kernel_in_one(q: Tensor) -> attention_kernels.Kernel:
    """ring_attention.kernel_for: also one operation."""
    return attention_kernels.make(attention_kernels.Kernel)


def one_after_the_other(ops: list[dist.P2POp]) -> list[dist.Work]:
    """dist.batch_isend_irecv, which looks for the backend of a device that is not there."""
    return [op.op(op.tensor, op.peer, op.group, op.tag) for op in ops]


# (module, name of a function): what the meta device runs in its place
STAND_INS = {
    (F, "scaled_dot_product_attention"): attention_in_one,
    (dropout, "dropout_mask"): mask_without_bits,
    (ring_attention, "dropout_mask"): mask_without_bits,
    (ring_attention, "kernel_for"): kernel_in_one,
    (dist, "batch_isend_irecv"): one_after_the_other,
}


@contextlib.contextmanager
def stand_ins():
    originals = {where: getattr(*where) for where in STAND_INS}
    for where, function in STAND_INS.items():
        setattr(*where, function)
    try:
        yield
    finally:
        for where, function in originals.items():
            setattr(*where, function)


@contextlib.contextmanager
def fake_world(rank: int, world: int):
    """A process group of `world` ranks, of which this process is one, and there is no other."""
    # importing it takes a moment, which other runs need not spend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- activations of a whole schedule --------------------------------------------------------------


class Deferred(tuple):
    """What a weight gradient waits for: (weight, grad_output, x), held as long as this lives."""

    held = ()


class DeferredList:
    """Stands on a weight during I (pipelines/zero_bubble.py); fills the pipeline's list."""

    def __init__(self, kept: Kept, target: list):
        self.kept = kept
        self.target = target

    def append(self, item: tuple) -> None:
        entry = Deferred(item)
        entry.held = [Held(self.kept, tensor) for tensor in item[1:]]
        self.target.append(entry)


class Actions:
    """Watches a pipeline: how each kind of action changes what is kept.

    `change` and `rise`: (op, chunk) -> bytes more after it than before it, and at most during it.
    """

    def __init__(self, pipeline, kept: Kept):
        self.kept = kept
        self.change = {}
        self.rise = defaultdict(int)
        # the pipeline's own methods
        self.act, self.defer = pipeline.act, pipeline.defer
        pipeline.act, pipeline.defer = self.watched_act, self.watched_defer

    @staticmethod
    def leave(pipeline) -> None:
        del pipeline.act, pipeline.defer

    def watched_act(self, step, action, received) -> None:
        kept = self.kept
        before = kept.bytes
        # the peak of this action
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
        level = 0
        peak = 0
        for action in actions:
            kind = action.op, action.chunk
            peak = max(peak, level + self.rise[kind])
            level += self.change[kind]
        return peak


# --- a step ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """What a step of a few micro-batches has shown."""

    flops: int
    collectives: Counter
    kept: Kept
    # None without a pipeline
    actions: Actions | None


def run_step(trainer, m: int) -> Step:
    """A step of only m micro-batches, by the trainer's own code."""
    whole = trainer.config, trainer.schedule
    sequences = m * trainer.micro_batch * trainer.dp
    trainer.config = dataclasses.replace(trainer.config, global_batch_size=sequences)
    kept = Kept(p for stage in trainer.stages for p in stage.parameters())
    actions = None
    if trainer.schedule:
        trainer.schedule = [[a for a in list_ if a.micro_batch < m] for list_ in trainer.schedule]
        actions = Actions(trainer.model, kept)
    with kept, stand_ins(), Counters() as counters:
        tokens = Tokens(trainer.model_config.seq_length, trainer.config.document_mask)
        trainer.forward_backward(1, tokens)
        trainer.update(1)
    if actions:
        actions.leave(trainer.model)
    trainer.config, trainer.schedule = whole
    return Step(counters.flops, counters.counted(trainer.groups), kept, actions)


def report(config: Config, trainer_class, rank: int, world: int) -> Report:
    """What rank `rank` of `world` does in a step of the run that `config` describes. Raises
    ConfigError as rules.validate."""
    config = as_on_a_cluster(config, world)
    with fake_world(rank, world):
        groups = Groups()
        if world > 1:
            layout = {name: getattr(config, name) for name in ("tp", "pp", "ep", "cp")}
            groups = Groups.make("cpu", world, **layout)
        trainer = trainer_class(config, META, groups, with_even_routing(config.task()))
        # it would read whether a step of fp16 is finite
        trainer.optimizer.scaler = None
        m = config.global_batch_size // trainer.dp // trainer.micro_batch
        # under zb-h1 up to p micro-batches wait for their weight gradients when the step ends
        few = config.pp if config.pipeline_schedule == "zb-h1" else 1
        first = second = run_step(trainer, min(few, m))
        if m > few:
            second = run_step(trainer, few + 1)
        return summary(trainer, rank, world, m, m - few, first, second)


def as_on_a_cluster(config: Config, world: int) -> Config:
    """What is not given is as on `world` GPUs. Raises ConfigError for what cannot run there."""
    # kernels and the compiler do not run on the meta device
    meta = {"device": "auto", "kernels": "off", "compile": False}
    config = dataclasses.replace(config, precision=config.precision or "bf16", **meta)
    rules.validate(config, world)
    return config


def summary(trainer, rank: int, world: int, m: int, more: int, first: Step, second: Step) -> Report:
    """The report of a step of m micro-batches, `more` than the first step has. The second step has
    one more, so each of them adds the difference of the two."""
    collectives = []
    for kind in first.collectives | second.collectives:
        count, next_count = first.collectives[kind], second.collectives[kind]
        collectives.append(Collective(*kind, count + more * (next_count - count)))
    activations = second.kept.peak
    if second.actions:
        activations = second.actions.peak_of(trainer.schedule[trainer.groups.pp.rank()])
    return Report(
        rank=rank,
        world=world,
        place=place_of(trainer.groups),
        layers=[int(n) for stage in trainer.stages for n in stage.blocks],
        micro_batches=m,
        **bytes_of(trainer),
        activations=activations,
        flops=first.flops + more * (second.flops - first.flops),
        collectives=sorted(collectives),
    )


def bytes_of(trainer) -> dict[str, dict[str, int]]:
    """What a trainer holds between backward and update, as fields of Report."""
    parameters = [p for stage in trainer.stages for p in stage.parameters()]
    local = [local_part(p) for p in parameters]
    gradients = [p.main_grad for p in local if getattr(p, "main_grad", None) is not None]
    optimizer = trainer.optimizer
    state = []
    for tensors in (optimizer.masters, optimizer.low, optimizer.exp_avg, optimizer.exp_avg_sq):
        # a float32 weight is its own master
        state += [t for name, t in tensors.items() if not shares(t, optimizer.parameters[name])]
    return {
        "parameters": by_dtype(parameters + local),
        "gradients": by_dtype(gradients),
        "optimizer_state": by_dtype(state),
    }


def shares(a: Tensor, b: Tensor) -> bool:
    return key(a.untyped_storage()) == key(b.untyped_storage())


def place_of(groups: Groups) -> dict[str, tuple[int, int]]:
    place = {}
    for name in ("pp", "dp", "cp", "edp", "ep", "tp"):
        group = getattr(groups, name)
        if group:
            place[name] = group.rank(), group.size()
    return place


# --- the command ----------------------------------------------------------------------------------


def main(config: Config, question: dict, trainer_class) -> None:
    """Answer `train.py --as-rank R --of N`. question: those flags of flags.QUESTION that are given.
    trainer_class: train.Trainer. Raises ConfigError."""
    rank, world = check(config, question)
    answer = report(config, trainer_class, rank, world)
    for line in lines(answer):
        terminal.say(line)
    path = question.get("json")
    if path:
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(as_json(answer), file, indent=1)
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
        raise ConfigError(
            f"--as-rank {rank}: one process answers; start it with python, not with torchrun"
        )
    check_beside(config, rank)
    return rank, world


def check_beside(config: Config, rank: int) -> None:
    """What the answer does not know. Raises ConfigError."""
    unread = ("resume", "load")
    rules = dict.fromkeys(unread, "reads no checkpoint")
    unrun = ("plan", "profile")
    rules |= dict.fromkeys(unrun, "computes a step on whole rows of text, and runs none")
    for name, rule in rules.items():
        if getattr(config, name):
            raise ConfigError(f"--as-rank {rank}: {rule}; leave {flag_name(name)} out")
    if config.fp8 != "off":
        raise ConfigError(f"--as-rank {rank}: knows a step without FP8; leave --fp8 out")


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
    out.append("{:<16}{:>6}{:>10}{:>18}{:>12}".format("collective", *names))
    for kind, group, size, count in answer.collectives:
        out.append(f"{kind:<16}{group:>6}{count:>10,}{size:>18,}{size * count / 1e9:>12,.3f}")
    return out


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 8, 9] -> "0-2 8-9"; "none" for an empty list."""
    found = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    words = [f"{first}-{last}" if last > first else str(first) for first, last in found]
    return " ".join(words) or "none"


def as_json(answer: Report) -> dict:
    """The report for programs: the fields of Report; each collective with the names of its own."""
    fields = dataclasses.asdict(answer)
    fields["collectives"] = [collective._asdict() for collective in answer.collectives]
    return fields
