"""The lesson of tensor_parallel.py: two ranks against one.

python -m course.tensor_parallel
"""

import torch
import torch.distributed as dist

import gpt
import sharding
import tensor_parallel
from base.dropout import dropout_key
from course import demo, form, ranks
from course.mutations import tensor_parallel as bugs

WITHOUT = {
    "f": form.Removal(
        bugs.no_f,
        "The first loss is the same, gradients are wrong. Why?",
        "f does nothing in forward. In backward it sums the parts of ∂L/∂X that the ranks have;"
        " without it, each layer below gets the part of one rank.",
    ),
    "g": form.Removal(
        bugs.no_g,
        "Now the loss is wrong too. Why?",
        "Each rank has one term of the sum Z, and takes it for Z.",
    ),
    "own-shard": form.Removal(
        bugs.clones,
        "All collectives are there. What is wrong?",
        "Every rank starts with rank 0's shard of each matrix: the model has half of its width,"
        " twice. It trains, and its loss falls.",
    ),
}


B, S, H, V = 8, 32, 64, 257


def on_rank(rank: int, world: int, mutate) -> dict:
    """One step of a GPT (h 64, L 2, V 257, dropout 0.1, tied embeddings, float64)."""
    if mutate:
        mutate()
    model = demo.meta_model(demo.tiny_config(dropout=0.1))
    if world > 1:
        tensor_parallel.apply(model, dist.group.WORLD)
    sharding.init(model, 0, "cpu", torch.float64)
    tokens, targets = demo.random_tokens(B, S, V)
    context = gpt.Context(dropout_key(0, 1, torch.arange(B)))
    with ranks.Collectives() as whole:
        loss = model(tokens, targets, context).mean()
    loss.backward()
    gradients = demo.gathered_gradients(model)
    x = torch.zeros(B, S, H, dtype=torch.float64, requires_grad=True)
    with ranks.Collectives() as forward:
        y = model.blocks["0"](x, context)
    with ranks.Collectives() as backward:
        y.sum().backward()
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward": forward.calls,
        "backward": backward.calls,
        "whole": whole.calls,
    }


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        f"One layer, 2 ranks, b {B}, s {S}, h {H}, float64: how many all-reduces in forward, in"
        " backward? Bytes each?",
        "in forward; in backward; bytes each",
    )
    two = ranks.run(on_rank, 2, 2, lesson.mutate)[0]
    forward, backward = two["forward"], two["backward"]
    size = B * S * H * 8
    expected = [("all-reduce", size)] * 2
    lesson.check(
        f"forward {len(forward)}, backward {len(backward)}; the paper: 2 and 2, each b s h 8 ="
        f" {size:,} bytes",
        forward == backward == expected,
        [len(forward), len(backward), size],
    )

    lesson.predict("Does sharding the model over 2 ranks change the loss? The gradients?")
    one = ranks.run(on_rank, 1, 1, None)[0]
    same_loss = abs(one["loss"] - two["loss"]) < 1e-10
    lesson.check(f"loss {one['loss']:.12f} on one rank, {two['loss']:.12f} on two", same_loss)
    worst = demo.largest_difference(one["gradients"], two["gradients"])
    lesson.check(f"largest relative difference of a gradient {worst:.1e}", worst < 1e-10)

    lesson.predict(
        f"The model has {one['parameters']:,} parameters. How many has each of two ranks?",
        "parameters",
    )
    half = one["parameters"] / 2
    lesson.check(
        f"{two['parameters']:,}: a little more than half, {half:,.0f}, for norms, positions and two"
        " biases are whole on each rank",
        half < two["parameters"] < 1.05 * half,
        [two["parameters"]],
    )

    lesson.predict(
        f"The logits have b s V 8 = {B * S * V * 8:,} bytes. How many does the loss send?", "bytes"
    )
    sent = sum(size for _, size in two["whole"][-2:])
    lesson.check(
        f"{sent:,}: for each token the maximum, Σ exp and the target's logit, 3 b s 8",
        sent == 3 * B * S * 8,
        [sent],
    )


if __name__ == "__main__":
    form.run("tensor_parallel")
