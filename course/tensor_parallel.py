"""The lesson of tensor_parallel.py: two ranks against one."""

import torch

import gpt
import tensor_parallel
from base.dropout import dropout_key
from course import demo, form
from course.mutations import tensor_parallel as bugs

WITHOUT = form.Removals()
WITHOUT["f"] = form.Removal(
    bugs.no_f,
    "The first loss is the same, gradients are wrong. Why?",
    "f does nothing in forward. In backward it sums the parts of ∂L/∂X that the ranks have;"
    " without it, each layer below gets the part of one rank.",
)
WITHOUT["g"] = form.Removal(
    bugs.no_g,
    "Now the loss is wrong too. Why?",
    "Each rank has one term of the sum Z, and takes it for Z.",
)
WITHOUT["own-shard"] = form.Removal(
    bugs.clones,
    "All collectives are there. What is wrong?",
    "Every rank starts with rank 0's shard of each matrix: the model has half of its width, twice."
    " It trains, and its loss falls.",
)

B, S, H, V, D = 8, 32, 64, 257, 16


def on_rank(rank: int, key_heads: int = 4) -> dict:
    """One step of a GPT (h 64, a 4, L 2, V 257, dropout 0.1, tied embeddings, float64)."""
    config = demo.tiny_config(dropout=0.1, num_kv_heads=key_heads)
    model = demo.make_model(config, tensor_parallel.apply, group=demo.all_ranks())
    batch = *demo.random_tokens(B, S, V), gpt.Context(dropout_key(0, 1, torch.arange(B)))
    return {
        **demo.one_step(model, *batch),
        "parameters": sum(p.numel() for p in model.parameters()),
        "layer": demo.layer_calls(model.blocks["0"], demo.zeros(B, S, H), batch[-1]),
        "whole": demo.layer_calls(model, *batch),
    }


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        f"One layer, 2 ranks, b {B}, s {S}, h {H}, float64: how many all-reduces in forward, in"
        " backward? Bytes each?",
        "in forward; in backward; bytes each",
    )
    one, (two, _) = lesson.one_and_many(2, on_rank)
    forward, backward = two["layer"].values()
    size = B * S * H * 8
    expected = [("all-reduce", size)] * 2
    lesson.check(
        f"forward {len(forward)}, backward {len(backward)}; the paper: 2 and 2, each b s h 8 ="
        f" {size:,} bytes",
        forward == backward == expected,
        [len(forward), len(backward), size],
    )

    lesson.predict("Does sharding the model over 2 ranks change the loss? The gradients?")
    demo.check_step(lesson, one, two)

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
    sent = sum(size for _, size in two["whole"]["forward"][-2:])
    lesson.check(
        f"{sent:,}: for each token the maximum, Σ exp and the target's logit, 3 b s 8",
        sent == 3 * B * S * 8,
        [sent],
    )
    teach_one_head(lesson)


def teach_one_head(lesson: form.Lesson) -> None:
    lesson.predict(
        f"With one key and value head of d {D}, each rank holds half of its columns, and needs all."
        " Bytes that each rank exchanges in a layer's forward, its own included?",
        "bytes",
    )
    of_one_head = lesson.on_ranks(2, on_rank, 1)[0]["layer"]["forward"]
    exchanged = sum(size for kind, size in of_one_head if kind == "all-to-all")
    lesson.check(
        f"{exchanged:,}: k and v of each token, 2 b s d 8; backward adds the copies' gradients",
        exchanged == 2 * B * S * D * 8,
        [exchanged],
    )


if __name__ == "__main__":
    form.run("tensor_parallel")
