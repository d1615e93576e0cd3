"""The lesson of quantization.py: steps and errors, groups and outliers."""

import torch
from torch import Tensor

from course import form
from inference import quantization
from inference.quantization import Int4Matrix, Int8Matrix

WITHOUT = form.Removals()


@WITHOUT.replace(
    "rows", quantization, "row_scale", "One row has an outlier. What happens to the others?"
)
def of_the_matrix(w: Tensor, ranks, original=quantization.row_scale) -> Tensor:
    """An outlier of 1 in one row gives every row the step 1 / 127.5. The other rows have numbers of
    0.02: they keep 3 of their 8 bits."""
    return original(w.reshape(1, -1), ranks).expand(len(w))


@WITHOUT.replace(
    "zero-point", quantization, "group_scale", "Which groups become worse, and how much?"
)
def around_zero(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Groups whose numbers lie on one side of 0. Most of the 16 numbers then stand for values that
    do not occur: from 0.9 to 1.1, one step of 1.1 / 7.5 instead of 15 of 0.2 / 15."""
    largest = groups.abs().amax(2)  # [out, in / g]
    return largest / 7.5, largest / 15


def normal(*shape: int, std: float = 0.02) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * std


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        by_hand(lesson)
        one_sided(lesson)
        outlier(lesson)


def by_hand(lesson: form.Lesson) -> None:
    lesson.predict(
        "w = -0.3, 0.15, 0, 0.45 share a scale in 4 bits. Which numbers from 0 to 15?",
        "of -0.3; of 0.15; of 0; of 0.45",
    )
    w = torch.tensor([[-0.3, 0.15, 0.0, 0.45]])
    matrix = Int4Matrix.of(w, group=4)
    scale, zero = matrix.scale_and_zero.flatten().tolist()
    q = [number for byte in matrix.q[0].tolist() for number in (byte >> 4, byte & 15)]
    lesson.check(
        f"s = 0.75 / 15 = {scale:.3g}, z = -0.3 + 8 s = {zero:.3g}: {q}",
        q == [0, 9, 6, 15] and abs(scale - 0.05) < 1e-6 and abs(zero - 0.1) < 1e-6,
        q,
    )


def one_sided(lesson: form.Lesson) -> None:
    lesson.predict(
        "Numbers from 0.9 to 1.1 in 4 bits, in groups of 32. The largest error?", "largest error"
    )
    w = 1 + 0.1 * (2 * torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) - 1)
    error = (Int4Matrix.of(w).dequantize() - w).abs().max().item()
    lesson.check(
        f"{error:.4f}; at most half a step, 0.2 / 15 / 2 = {0.1 / 15:.4f}",
        error <= 0.1001 / 15,
        [error],
    )


def outlier(lesson: form.Lesson) -> None:
    lesson.predict(
        "64 rows of 256 normal numbers, standard deviation 0.02, and one outlier of 1. Which share"
        " of the outlier's row is lost in 8 bits? Of the other rows? Of its row in 4 bits by group?"
    )
    w = normal(64, 256)
    w[0, 0] = 1.0
    rows = Int8Matrix.of(w).dequantize() - w
    errors = [(rows[i].norm() / w[i, 1:].norm()).item() for i in range(64)]
    groups = (Int4Matrix.of(w).dequantize() - w)[0].unflatten(0, (8, 32)).norm(dim=1)
    coarse = int((groups > 3 * groups.median()).sum())
    lesson.check(
        f"{errors[0]:.1%}; at most {max(errors[1:]):.1%}; in 4 bits {coarse} group of 8 is coarse",
        errors[0] > 0.1 and max(errors[1:]) < 0.02 and coarse == 1,
    )


if __name__ == "__main__":
    form.run("quantization")
