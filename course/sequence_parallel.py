"""The lesson of sequence_parallel.py: two ranks, beside tensor parallelism and beside one rank."""

from collections import Counter
from collections.abc import Callable

import torch

import gpt
import recompute
import sequence_parallel
import tensor_parallel
from base.dropout import dropout_key
from course import demo, form
from course.mutations import sequence_parallel as bugs
from planning import counters

WITHOUT = form.Removals()
WITHOUT["g"] = form.Removal(
    bugs.no_gather_in_g,
    "Each rank repeats its own slice instead of gathering the others'.",
    "No input is gathered, so collectives and bytes differ. Shapes are right, and so is what is"
    " kept. But a rank computes with its own tokens alone, and the reduce-scatter adds parts of"
    " different tokens.",
)
WITHOUT["norm-sum"] = form.Removal(
    bugs.no_norm_gradient_sum,
    "The loss is right. Which gradients are not?",
    "Those of weights that each rank has whole and applies to its slice: norms, positions, and"
    " biases that are added to a slice. A rank has the sum over its own tokens, and the other half"
    " is missing.",
)
WITHOUT["own-masks"] = form.Removal(
    bugs.same_masks_on_every_slice,
    "Every slice has the dropout masks of the first.",
    "The second slice drops other elements than one rank would drop there, so loss and gradients"
    " differ. What is sent and kept does not depend on which elements are dropped.",
)

B, S, H, A, T = 8, 64, 64, 4, 2


def measure(*techniques: Callable, in_shards: bool = False) -> dict:
    """Gradients of a GPT (h 64, a 4, L 2, dropout 0.1, float64) after one step; what a layer sends,
    and the bytes that it keeps for backward in bf16."""
    group = demo.all_ranks()
    config = demo.tiny_config(seq_length=S, dropout=0.1)
    model = demo.make_model(config, *techniques, group=group)
    sequence_parallel.overlap_backward(model, in_shards)
    context = gpt.Context(dropout_key(0, 1, torch.arange(B)))
    step = demo.one_step(model, *demo.random_tokens(B, S, 257), context)
    x = demo.zeros(B, S // T if group and len(techniques) > 1 else S, H)
    calls = demo.layer_calls(model.blocks["0"], x, context)
    block = model.blocks["0"].bfloat16()
    x = x.detach().bfloat16().requires_grad_()
    kept = counters.saved_bytes(lambda: block(x, context), *block.parameters())
    return step | calls | {"kept": kept}


def on_rank(rank: int) -> dict[str, dict]:
    """On one rank the two are the same model."""
    tensor = measure(tensor_parallel.apply)
    return {"tensor": tensor, "sequence": measure(tensor_parallel.apply, sequence_parallel.apply)}


def in_shards(rank: int) -> dict:
    return measure(tensor_parallel.apply, sequence_parallel.apply, in_shards=True)


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
    one, of_ranks = lesson.one_and_many(T, on_rank)
    one, results = one["tensor"], of_ranks[0]
    tensor, sequence = results.values()
    teach_collectives(lesson, tensor, sequence)

    whole = recompute.layer_bytes(S, B, H, A)
    lesson.predict(
        f"In bf16 a layer keeps 34 s b h + 5 a s² b = {whole:,.0f} bytes for backward. Tensor"
        " parallelism over 2 ranks halves all but 10 s b h. And with sequence parallelism?",
        "bytes",
    )
    kept = {name: result["kept"] for name, result in ({"one rank": one} | results).items()}
    lesson.bars(kept, whole)
    ratios = [
        kept[name] / recompute.layer_bytes(S, B, H, A, T, name == "sequence") for name in results
    ]
    lesson.check(
        f"a half of everything; measured / formula: tensor {ratios[0]:.3f}, sequence"
        f" {ratios[1]:.3f}",
        all(abs(ratio - 1) < 0.02 for ratio in ratios),
        [sequence["kept"]],
    )

    lesson.predict("Dropout is 0.1, and each rank has half of the tokens. Does the loss change?")
    demo.check_step(lesson, one, sequence)

    lesson.predict(
        "Cut into shards (--tp-comm-overlap), forward has no collective left: 4 products each have"
        " t - 1 messages of b s h 8 / t bytes beside them. Bytes that a rank sends?",
        "bytes",
    )
    calls = lesson.on_ranks(T, in_shards)[0]["forward"]
    sent = sum(size for kind, size in calls if kind == "send")
    right = sent == 4 * (T - 1) * B * S * H * 8 // T
    lesson.check(f"{counted(calls)}: {sent:,} bytes", right, [sent])


if __name__ == "__main__":
    form.run("sequence_parallel")
