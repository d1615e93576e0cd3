"""FP8: the numbers that there are, and what rounding to them costs.

    python -m benchmarks.fp8 [--steps 300] [--toy] [--out DIR]

The range of each format, with all positive numbers of e4m3 and e5m2. Then the error of a linear
layer's three products: the default model is trained in float32, with the matrix multiplications of
layers 1 and 2 in FP8, and the inputs, weights and gradients of its last step are rounded by each
recipe:

    bf16               rounded to bf16, without scales
    current            one scale for a tensor, from its own maximum
    delayed            one scale for a tensor, from the maxima of the 16 steps before
    block              a scale for each 1 x 128 or 128 x 128 values
    e4m3 everywhere    current, with gradients in e4m3 instead of e5m2

Sums are in float32. An error is the norm of the difference from the product of the matrices before
they were rounded, in float64, over the norm of that product. Beside it stands how many of the
gradients that were not zero became zero.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from base import cpu, float8
from base.float8 import E4M3, E5M2, Format
from base.model_config import LINEARS
from benchmarks import report, steps, style
from benchmarks.report import format_spread, scaled, spread
from course import demo
from fp8 import GRADIENT, INPUT, WEIGHT, Recipe, Scaling


@dataclass(frozen=True)
class E4M3Everywhere(Recipe):
    def format(self, operand: int) -> Format:
        return E4M3


RECIPES = {
    "current": Recipe("current"),
    "delayed": Recipe("delayed"),
    "block": Recipe("block"),
    "e4m3 everywhere": E4M3Everywhere("current"),
}
PRODUCTS = {"y": "y = x Wᵀ", "dx": "∂x = ∂y W", "dw": "∂W = ∂yᵀ x"}
# The first of the layers that read one input stands for all.
MEASURED = ("query", "output", "gate", "down")

# --- the numbers that there are -------------------------------------------------------------------


def formats() -> dict[str, dict]:
    """Range and precision of each format; of those of 8 bits also all positive numbers."""
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        limits = torch.finfo(dtype)
        found[name] = {
            "largest": limits.max,
            "smallest_normal": limits.tiny,
            "smallest": limits.tiny * limits.eps,
            "significant_bits": 1 - round(math.log2(limits.eps)),
        }
    for of in (E5M2, E4M3):
        values = [float8.decode_by_hand(byte, of) for byte in range(128)]
        values = [x for x in values if 0 < x < math.inf]
        found[of.name] = {
            "largest": max(values),
            "smallest_normal": 2.0 ** (1 - of.bias),
            "smallest": min(values),
            "significant_bits": 1 + of.mantissa_bits,
            "positive": values,
        }
    return found


# --- errors ---------------------------------------------------------------------------------------


class Recorder(Scaling):
    """Keeps the matrices of the first micro-batch once `seen` is there: {(place, operand)}."""

    seen: dict | None = None

    def keep(self, tensors, places, operand: int) -> None:
        if self.seen is not None:
            for x, place in zip(tensors, places):
                self.seen.setdefault((place, operand), x.detach().clone())

    def both(self, tensors, places, operand: int, group, *wanted):
        self.keep(tensors, places, operand)
        return super().both(tensors, places, operand, group, *wanted)

    def weight(self, w, place, *rest):
        self.keep([w], [place], WEIGHT)
        return super().weight(w, place, *rest)


def trained(num_steps: int, fields: dict) -> Recorder:
    """After so many steps: the matrices of the last, and the maxima of those before it."""
    fields = fields | dict(precision="fp32", fp8="delayed", steps=num_steps, lr=1e-3)
    trainer, corpus, _ = steps.on_corpus(fields)
    recorder = trainer.fp8
    recorder.__class__ = Recorder
    for step, loss in steps.losses(trainer, corpus):
        if step == num_steps - 1:
            recorder.seen = {}
            recorder.before = recorder.history.clone()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    return recorder


def operands(scaling: Scaling, place, x: Tensor, w: Tensor, dy: Tensor) -> dict:
    """{product: (left, right)}, bytes of x: [tokens, in], w: [out, in], dy: [tokens, out]"""
    for_y, x_for_dw = scaling.both([x], [place], INPUT, None)[0]
    for_dx, dy_for_dw = scaling.both([dy], [place], GRADIENT, None)[0]
    w_for_y, w_for_dx = scaling.weight(w, place, None)
    return {"y": (for_y, w_for_y.t()), "dx": (for_dx, w_for_dx), "dw": (dy_for_dw.t(), x_for_dw)}


def products(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    return {"y": x @ w.t(), "dx": dy @ w, "dw": dy.t() @ x}


def errors_of(recorder: Recorder, place) -> dict[str, dict]:
    """{recipe: {product: relative error, "zeros": share of gradients}} of one matrix"""
    x, w, dy = (recorder.seen[place, operand] for operand in (INPUT, WEIGHT, GRADIENT))
    exact = products(x.double(), w.double(), dy.double())
    rounded = {"bf16": products(*(t.bfloat16().float() for t in (x, w, dy)))}
    zeros = {"bf16": 0.0}
    for name, recipe in RECIPES.items():
        scaling = Scaling(recipe, len(recorder.amax), "cpu")
        if recipe.scaling == "delayed":
            scaling.history = recorder.before
        pairs = operands(scaling, place, x, w, dy)
        rounded[name] = {product: a @ b for product, (a, b) in pairs.items()}
        # The share of the gradients other than zero that is zero in bytes.
        in_bytes = pairs["dx"][0].q.float()[dy != 0]
        zeros[name] = (in_bytes == 0).sum().item() / in_bytes.numel()
    found = {}
    for name, of_recipe in rounded.items():
        found[name] = {"zeros": zeros[name]}
        for product, y in of_recipe.items():
            found[name][product] = demo.relative_error(exact[product], y.double())
    return found


def numbers(num_steps: int, fields: dict) -> dict:
    recorder = trained(num_steps, fields)
    errors = {}
    for number in range(1, len(recorder.amax) - 1):
        for matrix in MEASURED:
            place = number, list(LINEARS).index(matrix)
            errors[f"blocks.{number} {matrix}"] = errors_of(recorder, place)
    keys = *PRODUCTS, "zeros"
    spreads = {
        name: {key: spread([row[name][key] for row in errors.values()]) for key in keys}
        for name in ("bf16", *RECIPES)
    }
    return {"steps": num_steps, "formats": formats(), "errors": errors, "spreads": spreads}


# --- figures --------------------------------------------------------------------------------------

COLOURS = dict(zip(RECIPES, (*style.SERIES, "#cc79a7"))) | {"bf16": "#4d4d4d"}
# Powers of two between which numbers are shown.
SHOWN = -26, 18


def power_of_two(exponent: float) -> str:
    return "2" + f"{exponent:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def draw_formats(axes, found: dict) -> None:
    for y, row in enumerate(found.values()):
        ends = [math.log2(row[key]) for key in ("smallest", "smallest_normal", "largest")]
        largest = f"{row['largest']:,.0f}" if row["largest"] < 1e6 else power_of_two(ends[2])
        from_to = f"{power_of_two(ends[0])} to {largest}"
        style.label(axes, f"{row['significant_bits']} bits, {from_to}", (SHOWN[1], y))
        left, normal, right = (min(max(end, SHOWN[0]), SHOWN[1]) for end in ends)
        if "positive" not in row:
            axes.hlines(y, left, normal, color="#bbbbbb", linewidth=6)
            axes.hlines(y, normal, right, color=COLOURS["bf16"], linewidth=6)
            continue
        powers = [math.log2(x) for x in row["positive"]]
        colours = ["#bbbbbb" if x < row["smallest_normal"] else "black" for x in row["positive"]]
        axes.vlines(powers, y - 0.3, y + 0.3, color=colours, linewidth=0.8)
    style.rows_of(axes, list(found))
    axes.set_xlim(*SHOWN)
    axes.set(title="Positive numbers of each format: a line is one of them, grey is subnormal")
    axes.set_xlabel("exponent: the number is 2 to the power of it")


def draw(results: dict, figures: Path) -> None:
    """results: what fp8.json holds."""
    figure, panels = style.figure(4.4, 2, 3, height_ratios=(1, 1.1))
    grid = panels[0, 0].get_gridspec()
    for axes in panels[0]:
        axes.remove()
    draw_formats(figure.add_subplot(grid[0, :]), results["formats"])
    spreads = results["spreads"]
    most = max(row[product]["max"] for row in spreads.values() for product in PRODUCTS)
    for axes, (product, title) in zip(panels[1], PRODUCTS.items()):
        for y, (name, of_recipe) in enumerate(spreads.items()):
            style.ranges(axes, [y], [scaled(of_recipe[product], 100)], COLOURS[name])
        style.rows_of(axes, list(spreads), hidden=product != "y")
        axes.set_xlim(-2 * most, 105 * most)
        axes.set(title=f"Error of {title}", xlabel="relative error, %")
    words = "dot: the median of the matrices; line: from the least to the most"
    figure.supxlabel(words, fontsize=style.SMALL)
    style.save(figure, figures / "fp8.svg")


def main():
    parser = report.arguments(__doc__, steps=300)
    args = report.parse(parser, steps=3)
    if args.steps < 2:
        report.refuse(parser, f"--steps {args.steps}: must be at least 2")
    cpu.set_up()
    results = numbers(args.steps, steps.TOY if args.toy else {})
    print("relative error, median (least to most) of the matrices; gradients that became zero\n")
    table = report.Table()
    for name, found in results["spreads"].items():
        table.row({"recipe": name} | {k: format_spread(x, ".2%") for k, x in found.items()})
    report.finish("fp8", results, args, draw)


if __name__ == "__main__":
    main()
