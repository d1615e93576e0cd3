"""What lessons share: a tiny model, random tokens, one training step, and gradients compared.

    group = demo.all_ranks()                                # None on one rank
    model = demo.make_model(demo.tiny_config(dropout=0.1), tensor_parallel.apply, group=group)
    result = demo.one_step(model, *demo.random_tokens(batch=8, seq=32, vocab=257))
    calls = demo.layer_calls(model.blocks["0"], demo.zeros(8, 32, 64))

`lesson.one_and_many` calls such a function on one rank and on several, `check_step` compares them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import families
import gpt
import sequence_parallel
import sharding
import tensor_parallel
from base.model_config import GPTConfig
from course import form, ranks
from optimizer import AdamW, GradientAccumulator


def tiny_config(config_class: type = GPTConfig, **changes) -> GPTConfig:
    """A GPT with L 2, h 64, a 4, s 32, V 257, except for the fields in `changes`. config_class: a
    subclass of GPTConfig whose own fields `changes` may then name."""
    fields = dict(num_layers=2, hidden_size=64, num_heads=4, seq_length=32, vocab_size=257)
    return config_class(**(fields | changes))


def meta_model(config: GPTConfig) -> gpt.GPT:
    """The model on the meta device, where it has shapes but no storage. `sharding.init` gives it
    values once the techniques are applied."""
    with torch.device("meta"):
        return families.build(config)


def make_model(
    config: GPTConfig, *techniques: Callable, group=None, dtype=torch.float64, seed: int = 0
) -> gpt.GPT:
    """The model with its initial values, after technique(model, group) for each of `techniques`;
    without a group none of them is applied."""
    model = meta_model(config)
    for apply in techniques if group else ():
        apply(model, group)
    sharding.init(model, seed, "cpu", dtype)
    return model


def sharded_model(config: GPTConfig) -> gpt.GPT:
    """On two ranks tensor and sequence parallel, on one rank whole."""
    techniques = tensor_parallel.apply, sequence_parallel.apply
    return make_model(config, *techniques, group=all_ranks())


def all_ranks() -> dist.ProcessGroup | None:
    """The group of all ranks; None where this rank is the only one."""
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def zeros(*shape: int) -> Tensor:
    """The input of a layer whose collectives are counted."""
    return torch.zeros(shape, dtype=torch.float64, requires_grad=True)


def one_step(model: gpt.GPT, tokens: Tensor, targets: Tensor, context=gpt.PLAIN) -> dict:
    """{"loss": the mean over all tokens, "gradients": whole}. A collective."""
    loss = model(tokens, targets, context).mean()
    loss.backward()
    return {"loss": loss.item(), "gradients": gathered_gradients(model)}


def chunk_forward(
    stages: list[gpt.GPT], tokens: Tensor, targets: Tensor, context_of: Callable, losses: list
) -> Callable:
    """forward(chunk, micro-batch, activation) as `Pipeline.run` calls it; micro-batch k is row k.
    It adds the row's part of the mean loss to `losses`. context_of(k): of the model's forward."""

    def forward(chunk: int, k: int, x: Tensor | None = None) -> Tensor:
        y = stages[chunk](tokens[k : k + 1], targets[k : k + 1], context_of(k), x)
        if stages[chunk].head is None:
            return y
        losses.append(y.detach().sum().item() / targets.numel())
        return y.sum()

    return forward


def run_pipeline(pipeline, schedule, forward: Callable, s: int, loss_grad: Tensor) -> list[int]:
    """A step of micro-batches of one sequence [s]. Returns the bytes of each message sent."""
    with ranks.Collectives() as counted:
        pipeline.run(schedule, forward, 1, s, loss_grad)
    for parameter in pipeline.parameters():
        # sum_tied and sum_shared add to it; in training optimizer.py makes it.
        parameter.main_grad = parameter.grad
    return [size for kind, size in counted.calls if kind == "send"]


def random_tokens(batch: int, seq: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, targets), each [batch, seq] int64: a target is the token that follows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (batch, seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def singleton_group() -> dist.ProcessGroup:
    """The group of this rank alone: those that share its experts, where each rank has others. A
    collective of all ranks."""
    # Every rank makes every group.
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def gathered_gradients(*models: nn.Module) -> dict[str, Tensor]:
    """{global name: whole gradient} of models that hold parts of one, copied, so that a later step
    does not change it. A gradient is the fp32 sum `main_grad` where fsdp.py keeps one, else `grad`.
    What is frozen has none.

    A collective: every rank that holds a shard of a parameter calls it."""
    gradients = {}
    for name, parameter in sharding.named_parameters(*models):
        if not parameter.requires_grad:
            continue
        gradient = getattr(parameter, "main_grad", None)
        if gradient is None:
            gradient = parameter.grad
        gradients[name] = sharding.gather(gradient.clone(), sharding.sharding_of(parameter))
    return gradients


def largest_difference(reference: dict[str, Tensor], gradients: dict[str, Tensor]) -> float:
    """The largest max|a - b| / max|a| of a gradient a in `reference` and b of the same name.

    Key biases are left out. Their gradient is exactly 0, because softmax does not change when every
    score of a row moves by the same number; only rounding would be compared."""
    differences = []
    for name, expected in reference.items():
        if not name.endswith("key.bias"):
            differences.append(difference(expected, gradients[name]))
    return max(differences)


def positions_changed(before: Tensor, after: Tensor) -> list[int]:
    """The positions at which two outputs [b, s, n] differ by more than rounding."""
    apart = (before - after).abs().amax((0, 2))
    return (apart > 1e-12).nonzero().flatten().tolist()


def difference(expected: Tensor, found: Tensor) -> float:
    """max|a - b| / max|a|"""
    return ((expected - found).abs().max() / expected.abs().max()).item()


def relative_error(exact: Tensor, rounded: Tensor) -> float:
    """‖b - a‖ / ‖a‖"""
    return ((rounded - exact).norm() / exact.norm()).item()


def check_step(lesson: form.Lesson, one: dict, several: dict, what: str = "on two") -> None:
    """The loss and the gradients of a step on one rank and on several: {"loss", "gradients"}."""
    lesson.check(
        f"loss {one['loss']:.12f} on one rank, {several['loss']:.12f} {what}",
        abs(one["loss"] - several["loss"]) < 1e-10,
    )
    worst = largest_difference(one["gradients"], several["gradients"])
    lesson.check(f"largest relative difference of a gradient {worst:.1e}", worst < 1e-10)


def random_words(count: int, besides: Sequence[str]) -> list[str]:
    """Four of the letters a to h each; none of `besides`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(8, (count, 4), generator=generator).tolist()
    words = ["".join("abcdefgh"[letter] for letter in row) for row in rows]
    return [word for word in words if word not in besides]


@dataclass
class Learned:
    # How many numbers learned.
    parameters: int
    steps: int
    # The mean of the last 10 steps.
    loss: float


def learn(model: nn.Module, loss_of: Callable, most_steps: int, enough: float) -> Learned:
    """Train what is not frozen, until the mean loss of 10 steps is below `enough` or `most_steps`
    are over. loss_of(step): the loss of its batch. (There is one micro-batch and one rank, so there
    is nothing to reduce.)"""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = GradientAccumulator(model)
    optimizer = AdamW(learned.items(), 0.0)
    losses = []
    while len(losses) < most_steps and (len(losses) < 10 or mean(losses[-10:]) >= enough):
        gradients.zero_grad()
        loss = loss_of(len(losses))
        loss.backward()
        # A peak of 1e-2 makes logits so large that the loss depends on how a processor rounds.
        optimizer.step(3e-3 * min(1, (len(losses) + 1) / 20))
        losses.append(loss.item())
    return Learned(sum(p.numel() for p in learned.values()), len(losses), mean(losses[-10:]))


def layer_calls(layer: nn.Module, *args) -> dict[str, list[tuple[str, int]]]:
    """The collectives of a layer, (kind, bytes) each: {"forward": [..], "backward": [..]}."""
    with ranks.Collectives() as forward:
        y = layer(*args)
    with ranks.Collectives() as backward:
        y.sum().backward()
    return {"forward": forward.calls, "backward": backward.calls}


def flops(function: Callable[[], object]) -> int:
    """FLOPs of the matrix multiplications in a call."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def format_calls(calls: list[tuple[str, int]]) -> str:
    """Collectives noted by `ranks.Collectives`, as "all-reduce 1,024, all-gather 512" (bytes)."""
    return ", ".join(f"{kind} {size:,}" for kind, size in calls)
