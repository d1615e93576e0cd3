"""The lesson of pipeline_parallel.py: one block of a GPT, whose backward runs in two parts."""

import torch
from torch import Tensor, nn

import gpt
import pipeline_parallel
from course import demo, form

# Activations are b s rows of h numbers.
B, S, H = 4, 32, 64
ROWS = B * S
FFN = 4 * H


def start_deferring(block: nn.Module) -> list:
    """As the pipeline does before I: a list for what W is computed from."""
    deferred = []
    for weight in block.parameters():
        weight.deferred = deferred
    return deferred


def start_nothing(block: nn.Module) -> list:
    """No list: backward computes the weight gradients at once."""
    return []


def finish(deferred: list) -> None:
    """W, as the pipeline runs it."""
    for weight, grad_output, x in deferred:
        weight.backward(grad_output.t() @ x)


def finish_all_but_one(deferred: list) -> None:
    """The weight gradient that was deferred last is lost."""
    finish(deferred[:-1])


WITHOUT = form.Removals()
WITHOUT["list"] = form.Removal(
    (start_nothing, finish),
    "Every gradient is right. What is lost?",
    "W is computed inside I, and nothing is kept for later. So the stage before waits for both, as"
    " in 1F1B, and nothing is left to fill idle time.",
)
WITHOUT["last-w"] = form.Removal(
    (start_deferring, finish_all_but_one),
    "Which parameter has no gradient? Would the loss still fall?",
    "attention.query.weight: backward goes from the block's end to its start, and comes to it"
    " last. The loss would still fall, for all the other parameters learn.",
)


def make_block() -> nn.Module:
    """The first block of a GPT (h 64, a 4, no dropout), float64."""
    return gpt.GPT(demo.tiny_config()).double().blocks["0"]


def random_rows(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def with_gradient(block: nn.Module) -> int:
    return sum(p.grad is not None for p in block.parameters())


def gradients_of(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the parameters, and of the block's input."""
    found = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return found | {"input": x.grad}


def teach_gradients(lesson: form.Lesson, expected: dict, found: dict) -> None:
    """Gradients of one whole backward, and of I and W. Each: name -> gradient."""
    lesson.predict("Does any gradient differ from that of one whole backward?")
    missing = [name for name in expected if name not in found]
    if missing:
        lesson.check(f"{', '.join(missing)} has no gradient", False)
    else:
        worst = demo.largest_difference(expected, found)
        lesson.check(f"none: the largest relative difference is {worst:.1e}", worst < 1e-10)


def teach(lesson: form.Lesson) -> None:
    start, finish_weights = lesson.mutate or (start_deferring, finish)
    plain, x = make_block(), random_rows(B, S, H)
    plain(x).square().sum().backward()
    split, x_of_split = make_block(), random_rows(B, S, H)
    pipeline_parallel.split_backward(split)
    y = split(x_of_split)
    deferred = start(split)
    y.square().sum().backward()
    after_i = with_gradient(split)
    kept = {id(weight): [g, x] for weight, g, x in deferred}
    kept_bytes = sum(tensor.nbytes for tensor in kept.get(id(split.mlp.up.weight), []))
    for weight in split.parameters():
        weight.deferred = None
    finish_weights(deferred)

    count = len(list(split.parameters()))
    lesson.predict(
        f"A block has {count} parameters: 6 matrices, 6 biases, 2 norms with weight and bias. How"
        " many have a gradient after I? After W?",
        "after I; after W",
    )
    after_w = with_gradient(split)
    lesson.check(
        f"after I {after_i}, biases and norms; after W {after_w}",
        (after_i, after_w) == (count - 6, count),
        [after_i, after_w],
    )

    lesson.predict(
        f"Between I and W the linear layer mlp.up ({ROWS} rows, {H} -> {FFN}, float64) keeps which"
        " tensors? How many bytes?",
        "bytes",
    )
    lesson.check(
        f"{kept_bytes:,}, of x and ∂y: 8 bytes · rows · (n_in + n_out) = {ROWS * (H + FFN) * 8:,}",
        kept_bytes == ROWS * (H + FFN) * 8,
        [kept_bytes],
    )

    teach_gradients(lesson, gradients_of(plain, x), gradients_of(split, x_of_split))


if __name__ == "__main__":
    form.run("zero_bubble")
