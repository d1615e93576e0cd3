"""A few training steps of any layout, beside those of one device.

    one = train()                                   one device
    two = train(world=2, tp=2)                      two gloo ranks
    difference(two, one)                            {"loss": 1e-16, "gradient": 2e-15, ..}

The data are synthetic, with unequal loss masks. Gradients and parameters come under global names:
each rank sends its part and the sharding record that says which part it is. What several ranks hold
must be equal on all of them; where it is not, the tensor is infinite.

`train(.., trace=True)` keeps every tensor of the run, in the order of execution:

    initial embedding.tokens.weight           what the model computes with, on every rank
    step 1: output of blocks.0                [B, s, h], for the samples of the global batch
    step 1: output of head                    [B, s], the loss of each token
    step 1: loss
    step 1: gradient of head.norm.weight      from the last layer to the first, before clipping
    step 1: gradient norm                     of each rank
    step 1: updated embedding.tokens.weight
    step 2: output of embedding

`first_difference(a, b)` is the first of them that differs. verify.py asks this for the flags of a
run; the tests ask it of every bug in course/mutations/.

    python -m course.verify -- --model gpt2 --tp 2
"""

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

import sharding
import train as trainer
from base.groups import Groups
from context_parallel import own_positions
from course import ranks
from course.synthetic import dataset_for
from course.training_commands import config_of
from finetune import adapter_layers
from finetune.preference import DPOTask
from models.t5 import T5Config
from pipeline_parallel import shared_children
from run.config import RunConfig
from sharding import local_part, sharding_of

# From real initialisation, dropout on, tied embeddings, a vocabulary that nothing divides, clipping
# that bites.
SMALL = dict(
    model="gpt2",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    seq_length=16,
    vocab_size=61,
    dropout=0.1,
    global_batch_size=8,
    precision="fp64",
    lr=1e-3,
    warmup_steps=0,
    grad_clip=0.5,
    seed=5,
    device="cpu",
)
LLAMA = SMALL | dict(model="llama2-7b", num_kv_heads=2, ffn_hidden_size=56)


@dataclass
class Result:
    # Of each step.
    losses: list[float] = field(default_factory=list)
    # The global gradient norm, before clipping.
    norms: list[float] = field(default_factory=list)
    # Gradients of the first step, before clipping.
    gradients: dict[str, Tensor] = field(default_factory=dict)
    # Parameters after the last step.
    parameters: dict[str, Tensor] = field(default_factory=dict)
    # The smallest relative difference between a chosen expert and the next one.
    margin: float = math.inf
    # Every tensor, in the order of execution; empty unless asked for.
    trace: dict[str, Tensor] = field(default_factory=dict)


# --- on a rank ------------------------------------------------------------------------------------


def on_rank(
    rank: int, world: int, variants: list[dict], steps: int, mutate, trace: bool = False
) -> list[Result]:
    if mutate:
        mutate()
    results = []
    for flags in variants:
        run = Run(world, config_of(flags), trace)
        results.append(run.train(steps))
    return results


class Run:
    """One run on this rank. What it gathers is on rank 0; the other ranks get nothing."""

    def __init__(self, world: int, config: RunConfig, trace: bool = False):
        self.world = world
        self.trace = trace
        self.groups = Groups()
        if world > 1:
            # Under gloo, ranks on CUDA share one GPU.
            of_messages = "cuda" if dist.get_backend() == "nccl" else "cpu"
            self.groups = Groups.make(of_messages, world, **config.mesh)
        device = torch.device(config.device)
        if getattr(config, "peft", None):
            # With B = 0, A would have no gradient in the first step.
            adapter_layers.OUTPUT_STD = 0.02
        self.trainer = trainer.Trainer(config, device, self.groups, config.task())
        self.dataset = dataset_for(self.trainer)
        # Sequences of this step.
        self.batch = config.global_batch_size
        self.result = Result()
        for layer in self.trainer.expert_layers.values():
            routing, router = layer.routing, layer.router
            noted = partial(partial, scores_with_margin, self.result)
            routing.scores = noted(routing.scores, routing.k)
            router.group_scores = noted(router.group_scores, router.topk_groups)
        # Outputs of layers in this step.
        self.outputs = []
        if trace:
            for stage in self.trainer.stages:
                # A table that several layers read has an output for each of them.
                shared = dict(shared_children(stage))
                layers = sharding.named_layers(stage)
                for name, layer in [(n, layers[n]) for n in layers if n not in shared]:
                    # The hook is not called when recomputation runs the layer again.
                    layer.register_forward_hook(partial(self.note_output, name))

    def train(self, steps: int) -> Result:
        t, result = self.trainer, self.result
        self.note("initial ", self.parameters_in_use())
        self.note_reference(steps)
        for step in range(1, steps + 1):
            self.outputs.clear()
            self.batch = len(t.task.global_batch(step))
            # [1]: what a bug does to all-reduces of scalars is for the trainer, not for this sum
            loss = t.forward_backward(step, self.dataset).reshape(1)
            if self.world > 1:
                dist.all_reduce(loss)
            gradients = self.gradients()
            norm = t.update(step)[0]
            self.end_step(step, loss, gradients, norm)
            result.losses.append(loss.item())
            result.norms.append(norm.item())
        t.task.wait_for_parameters()
        result.parameters = self.gather(self.parameters())
        return result

    def end_step(self, step: int, loss: Tensor, gradients: list[tuple], norm: Tensor) -> None:
        """Keep what a step has given. gradients: before clipping."""
        if step == 1:
            self.result.gradients = self.gather(gradients)
        if self.trace:
            self.trainer.task.wait_for_parameters()
            self.note(f"step {step}: output of ", self.outputs)
            self.note(f"step {step}: ", [("loss", (1,), [0], loss.cpu())])
            self.note(f"step {step}: gradient of ", gradients[::-1])
            self.note(f"step {step}: ", [self.norm_of_rank(norm)])
            self.note(f"step {step}: updated ", self.parameters_in_use())

    def note_reference(self, steps: int) -> None:
        """Log-probabilities of these steps' samples before the first step, for DPO."""
        if isinstance(self.trainer.task, DPOTask):
            count = steps * self.trainer.config.global_batch_size
            self.dataset.reference = None
            self.dataset.reference = self.trainer.task.log_probabilities(self.dataset, count)

    # --- entries: (global name, global shape, offset, part)

    def parameters(self) -> list[tuple]:
        """What the optimizers have updated, and the biases of routers."""
        entries = []
        for prefix, learner in self.trainer.task.learners().items():
            for name, p in sharding.named_parameters(*learner.stages):
                if p.requires_grad:
                    entries.append(entry(prefix + name, p, sharding_of(p)))
        kept = self.trainer.task.learned.kept()
        return entries + [entry(name, p, sharding_of(p)) for name, p in kept.items()]

    def gradients(self) -> list[tuple]:
        named = sharding.named_parameters(*self.trainer.stages)
        return [entry(name, p.main_grad, sharding_of(p)) for name, p in named if p.requires_grad]

    def parameters_in_use(self) -> list[tuple]:
        """What the model computes with: not the shards that the optimizer updates, but where ZeRO
        stage 3 has dropped the rest."""
        entries = []
        for stage in self.trainer.stages:
            for name, p in stage.named_parameters():
                held = p if p.untyped_storage().nbytes() >= p.nbytes else local_part(p)
                entries.append(entry(sharding_of(p).copy_of or name, held, sharding_of(held)))
        return entries

    def norm_of_rank(self, norm: Tensor) -> tuple:
        """Each rank's own: ranks that clip by different norms differ from the reference."""
        rank = dist.get_rank() if self.world > 1 else 0
        return "gradient norm", (self.world,), [rank], norm.reshape(1).cpu()

    def note_output(self, name: str, layer, args, output: Tensor) -> None:
        """output: [b, s, h] of the embedding and of blocks, or a shard of the sequence; [b, s] of
        the head. An entry for each sample and each run of neighbouring positions."""
        batch, parts = self.batch, self.parts_of(name)
        at = self.positions(parts, output.shape[1])
        # Places where a position does not follow the one before.
        cuts = [n for n in range(1, len(at)) if at[n] != at[n - 1] + 1]
        shape = batch, sum(parts), *output.shape[2:]
        for sample, of_sample in zip(self.dataset.latest, output.detach().cpu().clone()):
            for first, end in zip([0, *cuts], [*cuts, len(at)]):
                offset = [sample % batch, at[first], 0][: len(shape)]
                self.outputs.append((name, shape, offset, of_sample[first:end].unsqueeze(0)))

    def parts_of(self, layer: str) -> list[int]:
        """Lengths of the sequences that stand one after the other in a layer's output."""
        shape = self.trainer.model_config
        if not isinstance(shape, T5Config):
            return [self.dataset.s]
        parts = [shape.seq_length, shape.target_length]
        if layer == "embedding":
            return parts
        name, _, number = layer.partition(".")
        in_encoder = name == "blocks" and int(number) < shape.encoder_layers
        return parts[:1] if in_encoder else parts[1:]

    def positions(self, parts: list[int], length: int) -> list[int]:
        """Positions of this rank's tokens in an output of `length` tokens. parts: of the whole
        output, as `parts_of` gives them."""
        of_parts, cp, tp = torch.arange(sum(parts)).split(parts), self.groups.cp, self.groups.tp
        if cp:
            of_parts = [x[own_positions(len(x), cp.rank(), cp.size())] for x in of_parts]
        if length < sum(map(len, of_parts)):
            of_parts = [x.chunk(tp.size())[tp.rank()] for x in of_parts]
        return torch.cat(list(of_parts)).tolist()

    # --- to rank 0

    def note(self, prefix: str, entries: list[tuple]) -> None:
        """Keep global tensors in the trace."""
        if self.trace:
            for name, tensor in self.gather(entries).items():
                self.result.trace[prefix + name] = tensor

    def gather(self, mine: list[tuple]) -> dict[str, Tensor]:
        if self.world == 1:
            return put_together([mine])
        of_ranks = [None] * self.world if dist.get_rank() == 0 else None
        dist.gather_object([(*where, as_array(part)) for *where, part in mine], of_ranks)
        return put_together(
            [[(*where, torch.as_tensor(part)) for *where, part in one] for one in of_ranks or []]
        )


def entry(name: str, part: Tensor, record: sharding.Sharding) -> tuple:
    offset = sharding.local_slice(record)[0]
    return name, record.shape, offset, sharding.unpad(part.detach(), record).cpu().clone()


def as_array(part: Tensor):
    """The same numbers for pickle, which is slow on tensors. NumPy has no bfloat16."""
    return part if part.dtype == torch.bfloat16 else part.numpy()


def put_together(of_ranks: list[list]) -> dict[str, Tensor]:
    """Global tensors from (name, global shape, offset, part) of each rank. What several ranks have
    must be equal on all of them: where it is not, and where nobody has anything, infinity."""
    whole, others = of_first_ranks(of_ranks)
    for first, _ in others:
        first.fill_(math.inf)
    return whole


def of_first_ranks(of_ranks: list[list]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """(global tensors, of what several ranks have that of the first; pairs of views of them and the
    part of a later rank that differs). Where nobody has anything, infinity."""
    whole, views, others = {}, {}, []
    for name, shape, offset, part in itertools.chain(*of_ranks):
        if name not in whole:
            whole[name] = part.new_full(shape, math.inf)
        place = name, tuple(offset)
        if place not in views:
            views[place] = whole[name][tuple(slice(o, o + n) for o, n in zip(offset, part.shape))]
            views[place].copy_(part)
        elif not torch.equal(views[place], part):
            others.append((views[place], part))
    return whole, others


def scores_with_margin(result: Result, original, k: int, *args) -> Tensor:
    """What original(*args) gives, [n, candidates], of which the k largest are chosen: experts or
    groups of experts. Notes in result.margin how near the choice came to another one."""
    scores = original(*args)
    if len(scores) and k < scores.shape[1]:
        # The last score that is chosen, and the first that is not.
        largest = scores.sort(descending=True).values[:, k - 1 : k + 1]
        # -inf where the choice of groups leaves k experts.
        largest = largest[largest[:, 1].isfinite()]
        margins = (largest[:, 0] - largest[:, 1]) / largest.abs().amax(1)
        # 0 / 0 is a tie.
        result.margin = min([result.margin, *margins.nan_to_num(0.0).tolist()])
    return scores


# --- from outside ---------------------------------------------------------------------------------


def train(
    world: int = 1,
    steps: int = 3,
    mutate=None,
    base: dict = SMALL,
    trace: bool = False,
    backend: str = "gloo",
    **flags,
) -> Result:
    """What rank 0 has after `steps` steps. mutate: a function at the top of a module, called first
    on each rank, that breaks something. backend: as of ranks.run."""
    return _train(world, steps, mutate, trace, backend, json.dumps(base | flags, sort_keys=True))


# One-device references are shared between tests.
@lru_cache(maxsize=32)
def _train(world, steps, mutate, trace, backend, flags: str):
    arguments = world, [json.loads(flags)], steps, mutate, trace
    # A hang on GPUs may cost minutes only.
    limit = 600 if backend == "gloo" else 120
    (result,) = ranks.run(on_rank, world, *arguments, backend=backend, limit=limit)[0]
    return result


# --- differences ----------------------------------------------------------------------------------


def relative(
    a: dict[str, Tensor], b: dict[str, Tensor], kind: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """(label, |a - b| / the largest element of b), elementwise; in the order of the reference b.
    kind: "gradient of ", if labels do not say so.

    A gradient that is exactly zero (a key bias: softmax does not see a shift) is measured against
    the largest gradient of the model, a parameter against at least 0.1: Adam makes updates of
    rounding noise."""
    gradients = [g.abs().max().item() for name, g in b.items() if "gradient of" in kind + name]
    for name, reference in b.items():
        label = kind + name
        scale = reference.abs().max().item()
        exactly_zero = label.endswith("key.bias") or scale == 0
        if label.endswith("head.norm.bias") and gradients:
            # A reward model's loss does not see a shift either.
            exactly_zero |= scale < 1e-12 * max(gradients)
        if "gradient of" in label and exactly_zero:
            scale = max(gradients)
        elif re.search("initial|updated", label):
            scale = max(scale, 0.1)
        apart = (a[name] - reference).abs() / scale
        yield name, apart.nan_to_num(nan=math.inf, posinf=math.inf)


def difference(a: Result, b: Result) -> dict[str, float]:
    """Largest relative differences of a from the reference b: loss, norm, gradient, parameter."""
    assert a.gradients.keys() == b.gradients.keys() and a.parameters.keys() == b.parameters.keys()
    worst = {
        "loss": max(abs(x - y) / (abs(y) or 1) for x, y in zip(a.losses, b.losses, strict=True)),
        "norm": max(abs(x - y) / abs(y) for x, y in zip(a.norms, b.norms, strict=True)),
    }
    gradients = relative(a.gradients, b.gradients, "gradient of ")
    parameters = relative(a.parameters, b.parameters, "updated ")
    for kind, found in (("gradient", gradients), ("parameter", parameters)):
        worst[kind] = max(apart.max().item() for _, apart in found)
    return worst


@dataclass
class Difference:
    """A tensor that differs from the reference."""

    # A name of Result.trace: "step 1: output of blocks.0".
    label: str
    # Over the largest element of the reference. It is infinite where ranks that should hold the
    # same do not, and where no rank holds anything.
    largest: float
    # How many elements differ, of how many.
    elements: int
    of: int
    # The first of them.
    index: list[int]

    def __str__(self) -> str:
        return f"{self.label}: {self.elements} of {self.of} elements, the first at {self.index}"


def first_difference(a: Result, b: Result, tolerance: float = 1e-10) -> Difference | None:
    """The first tensor in the order of execution that differs from the reference b, None where all
    are equal. Both results have a trace."""
    for label, apart in relative(a.trace, b.trace):
        wrong = (apart > tolerance).nonzero()
        if len(wrong):
            largest = apart.max().item()
            return Difference(label, largest, len(wrong), apart.numel(), wrong[0].tolist())
    return None


def largest_difference(a: Result, b: Result) -> tuple[float, str]:
    """(relative difference, label) of the tensor of the trace that differs most."""
    return max((apart.max().item(), label) for label, apart in relative(a.trace, b.trace))
