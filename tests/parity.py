"""The gate: any layout against one device, in one line.

    same(train(world=4, micro_batch_size=1), train())

`train` runs a few steps of any configuration on `world` ranks, on synthetic data with unequal loss
masks, and returns loss, every gradient and every parameter under global names, gathered through the
sharding record.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist

import data
import sharding
import train as trainer
from lessons import ranks
from runtime.world import Groups
from sharding import sharding_of

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


class Synthetic:
    """Sample n is a sequence drawn from seed n, of whose targets about (n mod 4) / 4 or all do not
    count."""

    def __init__(self, seq_length: int, vocab_size: int):
        self.s = seq_length
        self.v = vocab_size

    def batch(self, samples) -> data.Batch:
        tokens = []
        mask = []
        for n in samples:
            g = torch.Generator().manual_seed(int(n))
            tokens.append(torch.randint(self.v, (self.s + 1,), generator=g))
            mask.append(torch.rand(self.s, generator=g) >= (int(n) % 4) / 4)
        tokens = torch.stack(tokens)
        return data.Batch(
            tokens[:, :-1], tokens[:, 1:], torch.stack(mask), torch.tensor(list(samples))
        )

    def counted_tokens(self, samples) -> int:
        return int(self.batch(samples).loss_mask.sum())


class Prompted(Synthetic):
    """The same with a task's virtual tokens in the middle, so that sequence-parallel ranks share
    them; the tasks in turn."""

    def __init__(self, seq_length: int, vocab_size: int, prompts):
        super().__init__(seq_length, vocab_size)
        first = prompts.first_ids(vocab_size)
        self.virtual = [
            list(range(first[task], first[task] + prompts.templates[task].total_virtual_tokens))
            for task in prompts.tasks
        ]

    def batch(self, samples) -> data.Batch:
        tokens, targets, mask, numbers = (x.clone() for x in super().batch(samples))
        for row, n in enumerate(numbers.tolist()):
            virtual = torch.tensor(self.virtual[n % len(self.virtual)])
            at = self.s // 2 - 2
            tokens[row, at : at + len(virtual)] = virtual
            mask[row, at - 1 : at - 1 + len(virtual)] = False
        return data.Batch(tokens, targets, mask, numbers)


@dataclass
class Result:
    # of each step
    losses: list[float]
    # global gradient norm, before clipping
    norms: list[float]
    # of the first step, before clipping
    gradients: dict[str, torch.Tensor]
    # after the last
    parameters: dict[str, torch.Tensor]
    # the smallest difference, as a share, of an expert that was chosen to the next one that was not
    margin: float = math.inf


def on_rank(rank: int, world: int, variants: list[dict], steps: int, mutate) -> list[Result]:
    if mutate:
        mutate()
    return [one_run(world, trainer.Config(**flags), steps) for flags in variants]


def one_run(world: int, config: trainer.Config, steps: int) -> Result:
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, config.tp, config.pp, ep=config.ep)
    # on CUDA: gloo still, all ranks on one GPU
    t = trainer.trainer_class(config)(config, torch.device(config.device), groups)

    def whole(part) -> dict[str, torch.Tensor]:
        """part(parameter) of all parameters, under global names, put together on rank 0 from all
        ranks."""
        mine = []
        for name, p in sharding.named_parameters(*t.stages):
            if p.requires_grad:
                record = sharding_of(p)
                offset = sharding.local_slice(record)[0]
                own = sharding.unpad(part(p), record).cpu().clone()
                mine.append((name, record.shape, offset, own))
        if world == 1:
            return put_together([mine])
        of_ranks = [None] * world if dist.get_rank() == 0 else None
        dist.gather_object(mine, of_ranks)
        return put_together(of_ranks or [])

    sizes = t.model_config.seq_length, t.model_config.vocab_size
    prompts = getattr(t, "prompts", None)
    dataset = Prompted(*sizes, prompts) if prompts else Synthetic(*sizes)
    result = Result([], [], {}, {})
    for layer in t.expert_layers.values():
        original = layer.routing.scores
        layer.routing.scores = partial(scores_with_margin, result, layer.routing, original)
    for step in range(1, steps + 1):
        loss = t.forward_backward(step, dataset)
        if world > 1:
            dist.all_reduce(loss)
        if step == 1:
            result.gradients = whole(lambda p: p.main_grad)
        result.losses.append(loss.item())
        result.norms.append(t.update(step)[0].item())
    result.parameters = whole(lambda p: p.detach())
    return result


def put_together(of_ranks: list[list]) -> dict[str, torch.Tensor]:
    """Global tensors from (name, global shape, offset, part) of each rank. What several ranks have
    must be equal on all of them: where it is not, and where nobody has anything, infinity."""
    whole = {}
    first = {}
    for name, shape, offset, part in (entry for of_rank in of_ranks for entry in of_rank):
        if name not in whole:
            whole[name] = part.new_full(shape, math.inf)
        at = tuple(slice(o, o + n) for o, n in zip(offset, part.shape))
        if (name, tuple(offset)) not in first:
            first[name, tuple(offset)] = part
            whole[name][at] = part
        elif not torch.equal(first[name, tuple(offset)], part):
            whole[name][at] = math.inf
    return whole


def scores_with_margin(result: Result, routing, original, logits, training):
    """What routing.scores gives; notes in result.margin how near it came to another choice."""
    scores = original(logits, training)
    if routing.k < scores.shape[1]:
        # the last score that is chosen, and the first that is not
        largest = scores.sort(descending=True).values[:, routing.k - 1 : routing.k + 1]
        margin = (largest[:, 0] - largest[:, 1]) / largest.abs().amax(1)
        result.margin = min(result.margin, margin.min().item())
    return scores


def train(world: int = 1, steps: int = 3, mutate=None, base: dict = SMALL, **flags) -> Result:
    """What rank 0 has after `steps` steps. mutate: a function at the top of a module, called first
    on each rank, that breaks something."""
    frozen = {}
    for name, value in (base | flags).items():
        frozen[name] = tuple(value) if isinstance(value, list) else value
    return _train(world, steps, mutate, tuple(sorted(frozen.items())))


# one-device references are shared between tests
@lru_cache(maxsize=32)
def _train(world, steps, mutate, frozen):
    flags = {}
    for name, value in frozen:
        flags[name] = list(value) if isinstance(value, tuple) else value
    (result,) = ranks.run(on_rank, world, world, [flags], steps, mutate)[0]
    return result


def train_each(
    world: int, variants: list[dict], steps: int = 3, base: dict = SMALL, **flags
) -> list[Result]:
    """Several runs on the same ranks, one after the other: launching them costs more than a run."""
    variants = [base | flags | variant for variant in variants]
    return ranks.run(on_rank, world, world, variants, steps, None)[0]


def difference(a: Result, b: Result) -> dict[str, float]:
    """Largest relative differences of a from the reference b: loss, norm, gradient, parameter. A
    tensor whose exact gradient is zero (a key bias: softmax does not see a shift) is measured
    against the largest gradient of the model."""
    assert a.gradients.keys() == b.gradients.keys() and a.parameters.keys() == b.parameters.keys()
    largest = max(g.abs().max().item() for g in b.gradients.values())
    of_gradients = []
    for n, g in b.gradients.items():
        scale = g.abs().max().item()
        if n.endswith("key.bias") or scale == 0:
            scale = largest
        of_gradients.append((a.gradients[n] - g).abs().max().item() / scale)
    of_parameters = []
    for n, p in b.parameters.items():
        # 0.1: at 1e-10 relative, the gate allows 1e-11 absolute
        scale = max(p.abs().max().item(), 0.1)
        of_parameters.append((a.parameters[n] - p).abs().max().item() / scale)
    return {
        "loss": max(abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True)),
        "norm": max(abs(x - y) / abs(y) for x, y in zip(a.norms, b.norms, strict=True)),
        "gradient": max(of_gradients),
        "parameter": max(of_parameters),
    }


def same(a: Result, b: Result, tolerance: float = 1e-10) -> None:
    """In float32 (a wider tolerance) the gate is about loss and gradients: Adam makes steps of
    rounding noise."""
    worst = difference(a, b)
    assert b.margin > 10 * tolerance, f"a token's routing is {b.margin:.1e} from a tie"
    if tolerance > 1e-10:
        del worst["parameter"]
    assert all(x <= tolerance for x in worst.values()), worst


def differs(a: Result, b: Result, at_least: float = 1e-3) -> None:
    """For mutations: something that the gate looks at is off by far more than rounding."""
    worst = difference(a, b)
    assert max(worst.values()) >= at_least, worst
