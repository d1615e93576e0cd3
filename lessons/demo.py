"""What the demonstrations share: a tiny model, random tokens, and gradients compared.

`python FILE` of a technique runs one training step on one rank and on several, and compares the
gradients. The steps that are the same in every file stand here:

    model = demo.meta_model(demo.tiny_config(dropout=0.1))    # shapes without storage
    apply(model, group)                                       # the technique
    sharding.init(model, seed=0, device="cpu", dtype=torch.float64)
    tokens, targets = demo.random_tokens(batch=8, seq=32, vocab=257)
    model(tokens, targets).mean().backward()
    gradients = demo.gathered_gradients(model)                # whole, on every rank

Collectives are counted by `proof.ranks.Collectives`, and written out by `format_calls`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import families
import gpt
import sharding
from model_config import GPTConfig


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


def random_tokens(batch: int, seq: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, targets), each [batch, seq] int64: a target is the token that follows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (batch, seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def singleton_group() -> dist.ProcessGroup:
    """The group of this rank alone: those that share its experts, where each rank has others. A
    collective of all ranks."""
    # every rank makes every group
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def gathered_gradients(*models: nn.Module) -> dict[str, Tensor]:
    """{global name: whole gradient} of models that hold parts of one, copied, so that a later step
    does not change it. A gradient is the fp32 sum `main_grad` where fsdp.py keeps one, else `grad`.

    A collective: every rank that holds a shard of a parameter calls it."""
    gradients = {}
    for name, parameter in sharding.named_parameters(*models):
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
            difference = (expected - gradients[name]).abs().max() / expected.abs().max()
            differences.append(difference.item())
    return max(differences)


def format_calls(calls: list[tuple[str, int]]) -> str:
    """Collectives noted by `ranks.Collectives`, as "all-reduce 1,024, all-gather 512" (bytes)."""
    return ", ".join(f"{kind} {size:,}" for kind, size in calls)
