"""The lesson of base/flat_parameters.py: two parameters as one tensor, and back.

python -m base.flat_parameters
"""

import torch
from torch import Tensor, nn

from base.flat_parameters import FlatParameters
from lessons import form


class FullShards(FlatParameters):
    """Copies shards without padding, and leaves out the one that is not full."""

    def views(self, flat: Tensor, p: nn.Parameter, whole: Tensor):
        yield next(super().views(flat, p, whole))


WITHOUT = {"last-shard": FullShards}

# the answers to what break_it asks
WHY = {
    "last-shard": (
        "The rows that stand before the padding: weight[3:5] for N = 2, weight[4] for N = 3,"
        " in all 4 + 2 elements. T is right, for it follows from the shapes; the bias has only"
        " full shards, so it is whole."
    ),
}


def layer() -> list[nn.Parameter]:
    """weight [5, 2] with elements 0 to 9, bias [2] with 10 and 11."""
    weight = nn.Parameter(torch.arange(10.0).view(5, 2))
    return [weight, nn.Parameter(torch.tensor([10.0, 11.0]))]


def flatten(layout: FlatParameters, tensors: list[Tensor]) -> Tensor:
    """[N, T] of the parameters, or of their gradients. Padding is NaN: it belongs to none."""
    flat = torch.full((layout.N, layout.T), torch.nan)
    for p, tensor in zip(layout.parameters, tensors):
        for in_flat, in_whole in layout.views(flat, p, tensor):
            in_flat.copy_(in_whole)
    return flat


def unflatten(layout: FlatParameters, flat: Tensor) -> list[Tensor]:
    tensors = []
    for p in layout.parameters:
        whole = torch.zeros_like(p)
        for in_flat, in_whole in layout.views(flat, p, whole):
            in_whole.copy_(in_flat)
        tensors.append(whole)
    return tensors


def show(lesson: form.Lesson, flat: Tensor) -> None:
    for rank, row in enumerate(flat):
        elements = " ".join("  -" if x.isnan() else f"{x:3.0f}" for x in row)
        lesson.say(f"rank {rank}  {elements}")


@torch.no_grad()
def teach(lesson: form.Lesson) -> None:
    flatten_class = lesson.mutate or FlatParameters
    parameters = layer()
    lesson.predict(
        "weight [5, 2] and bias [2], for N = 2 ranks, both sharded by rows. How many elements T"
        " has a rank's row? How many are padding?"
    )
    two = flatten_class(parameters, 2)
    flat = flatten(two, parameters)
    show(lesson, flat)
    padding = flat.isnan().sum().item()
    lesson.check(
        f"T = {two.T} = 3 · 2 + 1; padding {padding} = 2 · 7 - 12", (two.T, padding) == (7, 2)
    )
    lesson.break_it(
        "last-shard", "Shards with padding are not copied. What is lost?", WHY["last-shard"]
    )

    lesson.predict("And for N = 3? The bias has 2 elements for 3 ranks.")
    three = flatten_class(parameters, 3)
    flat = flatten(three, parameters)
    show(lesson, flat)
    padding = flat.isnan().sum().item()
    lesson.check(
        f"T = {three.T} = 2 · 2 + 1; padding {padding} = 3 · 5 - 12",
        (three.T, padding) == (5, 3),
    )

    lesson.predict("Rows are copied back to a weight and a bias. Is anything lost?")
    back = [*unflatten(two, flatten(two, parameters)), *unflatten(three, flat)]
    lost = sum((a != b).sum().item() for a, b in zip(parameters * 2, back))
    lesson.check(f"{lost} of 24 elements differ", lost == 0)

    lesson.predict(
        "2 ranks have gradients g and 2 g of weight and bias, flattened in the same way. A"
        " reduce-scatter sums them and gives rank r row r. If all elements of g are 1, what"
        " is in row 1, and which elements of the parameters are these?"
    )
    ones = [torch.ones_like(p) for p in parameters]
    summed = flatten(two, ones) + flatten(two, [2 * g for g in ones])
    row = summed[1]
    show(lesson, summed)
    shards = [two.shard_in(row, p) for p in parameters]
    found = [x for shard in shards for x in shard.flatten().tolist() if x == x]
    lesson.check(
        "row 1 has five sums, 1 + 2 = 3, and padding: the sums for weight[3:5] and bias[1:2]",
        found == [3.0] * 5,
    )
