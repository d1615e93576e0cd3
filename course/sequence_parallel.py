"""The lesson of sequence_parallel.py: two ranks, beside tensor parallelism and beside one rank.

python -m course.sequence_parallel
"""

from collections import Counter

import torch
import torch.distributed as dist

import gpt
import recompute
import sequence_parallel
import sharding
import tensor_parallel
from base.dropout import dropout_key
from course import demo, form, ranks
from course.mutations import sequence_parallel as bugs

WITHOUT = {
    "g": form.Removal(
        bugs.no_gather_in_g,
        "Each rank repeats its own slice instead of gathering the others'.",
        "No input is gathered, so collectives and bytes differ. Shapes are right, and so is what"
        " is kept. But a rank computes with its own tokens alone, and the reduce-scatter adds"
        " parts of different tokens.",
    ),
    "norm-sum": form.Removal(
        bugs.no_norm_gradient_sum,
        "The loss is right. Which gradients are not?",
        "Those of weights that each rank has whole and applies to its slice: norms, positions, and"
        " biases that are added to a slice. A rank has the sum over its own tokens, and the other"
        " half is missing.",
    ),
    "own-masks": form.Removal(
        bugs.same_masks_on_every_slice,
        "Every slice has the dropout masks of the first.",
        "The second slice drops other elements than one rank would drop there, so loss and"
        " gradients differ. What is sent and kept does not depend on which elements are dropped.",
    ),
}

B, S, H, A, T = 8, 64, 64, 4, 2


def measure(kind: str) -> dict:
    """Gradients of a GPT (h 64, a 4, L 2, dropout 0.1, float64) after one step; what a layer sends,
    and the bytes that it keeps for backward in bf16. kind: one, tensor or sequence."""
    group = dist.group.WORLD
    model = demo.meta_model(demo.tiny_config(seq_length=S, dropout=0.1))
    if kind != "one":
        tensor_parallel.apply(model, group)
    if kind == "sequence":
        sequence_parallel.apply(model, group)
    sequence_parallel.overlap_backward(model)
    sharding.init(model, 0, "cpu", torch.float64)
    tokens, targets = demo.random_tokens(B, S, 257)
    context = gpt.Context(dropout_key(0, 1, torch.arange(B)))
    loss = model(tokens, targets, context).mean()
    loss.backward()
    gradients = demo.gathered_gradients(model)
    s = S // T if kind == "sequence" else S
    x = torch.zeros(B, s, H, dtype=torch.float64, requires_grad=True)
    with ranks.Collectives() as forward:
        y = model.blocks["0"](x, context)
    with ranks.Collectives() as backward:
        y.sum().backward()
    block = model.blocks["0"].bfloat16()
    x = x.detach().bfloat16().requires_grad_()
    return {
        "loss": loss.item(),
        "gradients": gradients,
        "forward": forward.calls,
        "backward": backward.calls,
        "kept": recompute.saved_bytes(lambda: block(x, context), *block.parameters()),
    }


def on_rank(rank: int, kinds: tuple[str, ...], mutate) -> dict[str, dict]:
    if mutate:
        mutate()
    return {kind: measure(kind) for kind in kinds}


def wire_bytes(calls: list[tuple[str, int]]) -> int:
    """An all-reduce counts twice: it is a reduce-scatter and an all-gather."""
    return sum(size * (2 if kind == "all-reduce" else 1) for kind, size in calls)


def counted(calls: list[tuple[str, int]]) -> str:
    counts = Counter(kind for kind, _ in calls)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def teach_collectives(lesson: form.Lesson, tensor: dict, sequence: dict) -> None:
    size = B * S * H * 8
    lesson.predict(
        "Tensor parallelism has 2 all-reduces in the forward of a layer. Which collectives take"
        f" their place? 8 bytes of each of b s h numbers = {size:,} bytes. How many more bytes are"
        " sent, by both ranks together? (An all-reduce sends its bytes twice.)",
        "more bytes",
    )
    more = wire_bytes(sequence["forward"]) - wire_bytes(tensor["forward"])
    gathers, scatters = [("all-gather", size)] * 2, [("reduce-scatter", size)] * 2
    lesson.check(
        f"{counted(sequence['forward'])}; {more} bytes more",
        sorted(sequence["forward"]) == gathers + scatters and more == 0,
        [more],
    )

    lesson.predict(
        "In backward two inputs, kept as slices, are gathered again; the gradients of 6 whole"
        f" weights of h = {H} elements are summed in one all-reduce. How many more bytes?",
        "more bytes",
    )
    more = wire_bytes(sequence["backward"]) - wire_bytes(tensor["backward"])
    expected = 2 * size + 2 * 6 * H * 8
    lesson.check(
        f"{counted(sequence['backward'])}; {more:,} bytes more; 2 b s h 8 + 2 · 6 h 8 ="
        f" {expected:,}",
        more == expected,
        [more],
    )


def teach(lesson: form.Lesson) -> None:
    one = ranks.run(on_rank, 1, ("one",), None)[0]["one"]
    results = ranks.run(on_rank, T, ("tensor", "sequence"), lesson.mutate)[0]
    tensor, sequence = results["tensor"], results["sequence"]
    teach_collectives(lesson, tensor, sequence)

    whole = recompute.layer_bytes(S, B, H, A)
    lesson.predict(
        f"In bf16 a layer keeps 34 s b h + 5 a s² b = {whole:,.0f} bytes for backward. Tensor"
        " parallelism over 2 ranks halves all but 10 s b h. And with sequence parallelism?",
        "bytes",
    )
    ratios = []
    lesson.say(f"{'one rank':<10}{one['kept']:>10,}  {form.bar(one['kept'], whole)}")
    for name, result in results.items():
        formula = recompute.layer_bytes(S, B, H, A, T, name == "sequence")
        ratios.append(result["kept"] / formula)
        lesson.say(f"{name:<10}{result['kept']:>10,}  {form.bar(result['kept'], whole)}")
    lesson.check(
        f"a half of everything; measured / formula: tensor {ratios[0]:.3f}, sequence"
        f" {ratios[1]:.3f}",
        all(abs(ratio - 1) < 0.02 for ratio in ratios),
        [sequence["kept"]],
    )

    lesson.predict("Dropout is 0.1, and each rank has half of the tokens. Does the loss change?")
    lesson.check(
        f"loss {one['loss']:.12f} on one rank, {sequence['loss']:.12f} on two",
        abs(one["loss"] - sequence["loss"]) < 1e-10,
    )
    worst = demo.largest_difference(one["gradients"], sequence["gradients"])
    lesson.check(f"largest relative difference of a gradient {worst:.1e}", worst < 1e-10)


if __name__ == "__main__":
    form.run("sequence_parallel")
