"""The lesson of finetune/resharding.py: a model on two ranks, from tensor parallelism to a
pipeline."""

import torch
import torch.distributed as dist
from torch import nn

import pipeline_parallel
import sharding
import tensor_parallel
from course import demo, form, ranks
from finetune import resharding
from finetune.resharding import Resharding
from schedules import Placement
from sharding import local_slice, set_sharding, sharding_of

L, H, V = 2, 64, 257

WITHOUT = form.Removals()


@WITHOUT.replace("offset", resharding, "view", "Which checks do not see it?")
def no_offset(tensor, piece, original=resharding.view):
    """Rows of the other rank, and a rank's own rows, are written to the first rows of the whole
    matrix. As many bytes travel as before: only values show it."""
    # Only the source learns.
    if not tensor.requires_grad:
        piece = piece._replace(offset=tuple(local_slice(sharding_of(tensor))[0]))
    return original(tensor, piece)


@WITHOUT.replace("new-values", Resharding, "copy", "Which model writes the answers then?")
def no_new_values(self, original=Resharding.copy) -> None:
    """The model that generates is the one before training. Nothing fails: answers are only older
    than one thinks, and so are their probabilities."""
    original(self)
    self.source = [set_sharding(p.detach().clone(), sharding_of(p)) for p in self.source]


@WITHOUT.add("own", "Values are right. What travels that need not?")
def no_own() -> None:
    """Norms, biases and positions, which both ranks hold: rank 0 sends them to rank 1. Values are
    right. With ZeRO stages 0 to 2, where ranks hold whole models, rank 0 would send all."""

    def first(*values, key=None):
        return values[0][0] if len(values) == 1 else min(*values, key=key)

    resharding.min = first


class Received(ranks.Collectives):
    """Collectives, and the bytes that this process receives in all-to-alls."""

    bytes = 0

    def note(self, function, args) -> None:
        super().note(function, args)
        self.bytes += args[0].nbytes


def models(rank: int) -> tuple[nn.Module, dict[str, nn.Module]]:
    """The source, tp 2 with values; targets without: the stage of a pipeline, a whole model."""
    config = demo.tiny_config(num_layers=L, hidden_size=H, vocab_size=V)
    group = dist.group.WORLD
    source = demo.make_model(config, tensor_parallel.apply, group=group, dtype=torch.float32)
    (stage,) = pipeline_parallel.apply(demo.meta_model(config), rank, Placement(2))
    targets = {"pp 2": stage, "whole": demo.meta_model(config)}
    for target in targets.values():
        sharding.materialise(target, "cpu", torch.float32)
        target.requires_grad_(False)
    return source, targets


def move(source: nn.Module, target: nn.Module, prefix: str = "") -> int:
    """Copy the parameters whose name begins so. Returns the bytes that were received."""
    held, needed = (
        {name: p for name, p in sharding.named_parameters(model) if name.startswith(prefix)}
        for model in (source, target)
    )
    copier = Resharding(held, needed)
    with Received() as received:
        copier.copy()
    return received.bytes


def wrong(target: nn.Module, factor: float = 1) -> int:
    """How many elements are not those that one device draws, times a factor."""
    whole = demo.make_model(target.config, dtype=torch.float32)
    expected = dict(whole.named_parameters())
    named = sharding.named_parameters(target)
    return sum((p != expected[name] * factor).sum().item() for name, p in named)


def on_rank(rank: int) -> dict:
    source, targets = models(rank)
    stage = targets["pp 2"]
    result = {
        "blocks": move(source, stage, "blocks."),
        "tokens": move(source, stage, "embedding.tokens."),
        "all": move(source, stage),
        "whole": move(source, targets["whole"]),
        "wrong": [wrong(target) for target in targets.values()],
    }
    copier = Resharding(resharding.weights(source), sharding.named_parameters(stage))
    copier.copy()
    # A step of training.
    with torch.no_grad():
        for p in source.parameters():
            p.mul_(2)
    with Received() as again:
        copier.copy()
    return result | {"again": again.calls, "wrong again": wrong(stage, 2)}


def teach_bytes(lesson: form.Lesson, results: list[dict]) -> None:
    lesson.predict(
        f"A GPT (L {L}, h {H}, float32) is on 2 ranks, tp 2: each has half of every matrix. It goes"
        " to pp 2: rank 0 needs block 0 whole, rank 1 block 1. How many bytes of blocks does a rank"
        " receive?",
        "bytes",
    )
    # query, key, value: h² and h each; output h²; up 4 h² and 4 h; down 4 h²
    half = (12 * H * H + 7 * H) // 2 * 4
    blocks = [result["blocks"] for result in results]
    lesson.check(
        f"{blocks[0]:,} and {blocks[1]:,} = (12 h² + 7 h) / 2 · 4: the other half of one block."
        " Norms and the biases behind an all-reduce are on both ranks, and do not move",
        blocks == [half, half],
        [blocks[0]],
    )

    lesson.predict(
        f"The embedding has V = {V} rows: 129 on rank 0, 128 and one of padding on rank 1. It is"
        " tied: the first stage needs it, and the last one for the head. Bytes?",
        "bytes to rank 0; bytes to rank 1",
    )
    tokens = [result["tokens"] for result in results]
    lesson.check(
        f"rank 0 receives 128 rows, {tokens[0]:,}, and rank 1 129, {tokens[1]:,}; no padding",
        tokens == [128 * H * 4, 129 * H * 4],
        tokens,
    )

    lesson.predict("And from tp 2 to a whole model on each rank? n = 2, Ψ: bytes that are sharded.")
    psi = 2 * L * half + V * H * 4
    whole = [result["whole"] for result in results]
    lesson.check(
        f"{sum(whole):,} in all = (n - 1) Ψ; to pp 2 it was {sum(r['all'] for r in results):,}",
        sum(whole) == psi and all(r["all"] == half + r["tokens"] for r in results),
    )


def teach(lesson: form.Lesson) -> None:
    results = lesson.on_ranks(2, on_rank)
    teach_bytes(lesson, results)

    lesson.predict("Are the pipeline and the whole models those that one device would draw?")
    elements = [sum(result["wrong"]) for result in results]
    lesson.check(f"{elements[0]} and {elements[1]} elements differ", elements == [0, 0])

    lesson.predict("Training changes the weights. What must a second copy send, beside weights?")
    again = [kind for kind, _ in results[0]["again"]]
    differ = sum(result["wrong again"] for result in results)
    lesson.check(
        f"nothing: {', '.join(again)}; the plan stays. {differ} elements are not the new ones",
        again == ["all-to-all"] and differ == 0,
    )


if __name__ == "__main__":
    form.run("resharding")
