"""The lesson of fp8.py: three products, gradients in e5m2, rows of an expert, two ranks beside
one."""

from unittest import mock

import torch
from torch import Tensor, nn

import fp8
import tensor_parallel
from base.float8 import E4M3, E5M2, Format, block_maxima, quantise, scale_of
from course import demo, form, ranks
from course.float8 import in_bytes_and_back
from course.mutations import fp8 as bugs
from fp8 import GRADIENT, INPUT, Recipe, Scaling

WITHOUT = form.Removals()


@WITHOUT.add("e5m2", "Which gradients are lost, and which get better?")
def no_e5m2():
    """Those of tokens whose gradient is small: it is 0, and so is all that they would teach the
    layers below. Where tokens are alike, e4m3 is the better one: it errs less."""
    return mock.patch.object(Recipe, "format", lambda self, operand: E4M3)


WITHOUT["amax-reduce"] = form.Removal(
    bugs.fp8_maximum_of_a_part,
    "Each rank has its own scales. Who notices?",
    "Only this comparison: each rank rounds its part to other numbers than one device would, and"
    " still learns. With powers of two nearly all numbers stay, because a scale that is half as"
    " large only moves exponents. So `current` has --fp8-scales any here.",
)
WITHOUT["new-bytes"] = form.Removal(
    bugs.stale_weight_bytes,
    "Which step goes wrong, and how?",
    "The optimizer changes the weights, but forward and backward read the bytes of the first step."
    " The first loss is right. From the second step on, attention and MLP stand still.",
)


@WITHOUT.replace(
    "row-scales", fp8.ExpertLayer, "in_bytes", "Is anything wrong then, or only different?"
)
def no_row_scales(self, x: Tensor, place, operand: int, group):
    """What a token becomes now depends on who else chose the expert. On two expert-parallel ranks
    these are tokens of two micro-batches, on one device those of one. No product is wrong, and no
    number is the same."""
    return quantise(x, scale_of(block_maxima(x, None), E4M3, True), E4M3, None, True)


# --- one layer ------------------------------------------------------------------------------------

# Tokens, inputs and outputs of the layer.
N, IN, OUT = 256, 512, 384
RECIPES = ("current", "delayed", "block")


def one_layer(recipe: Recipe) -> fp8.Layer:
    """A linear layer, in the place of a model's first matrix."""
    return fp8.Layer(Scaling(recipe, 1, "cpu"), ((0, 0),))


def three_products(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
    """[y, ∂x, ∂W] in FP8. x: [tokens, in]; w: [out, in]; dy: [tokens, out]"""
    x = x.unsqueeze(0).requires_grad_()
    w = nn.Parameter(w)
    (y,) = fp8.linear(one_layer(recipe), x, w, None)
    y.backward(dy.unsqueeze(0))
    return [y[0].detach(), x.grad[0], w.grad]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, IN, generator=g)
    w = 0.02 * torch.randn(OUT, IN, generator=g)
    return x, w, 1e-6 * torch.randn(N, OUT, generator=g)


def rounding_error(x: Tensor, to: Format) -> float:
    """The relative error of a tensor in bytes: |x - its bytes| / |x|"""
    return demo.relative_error(x, in_bytes_and_back(x, to))


def teach_products(lesson: form.Lesson) -> None:
    x, w, dy = operands()
    e4m3, e5m2 = rounding_error(x, E4M3), rounding_error(dy, E5M2)
    lesson.predict(
        f"Rounding changes a tensor by {e4m3:.1%} in e4m3, by {e5m2:.1%} in e5m2. Both operands are"
        f" rounded. By how much do y = x Wᵀ, each a sum of {IN} products, ∂x and ∂W change?",
        "share with e4m3 twice; share with e5m2 and e4m3",
    )
    exact = [x.double() @ w.double().t(), dy.double() @ w.double(), dy.double().t() @ x.double()]
    lesson.say(f"{'recipe':10}{'y':>8}{'∂x':>8}{'∂W':>8}")
    errors = {}
    for name in RECIPES:
        found = three_products(Recipe(name), x, w, dy)
        errors[name] = list(map(demo.relative_error, exact, found))
        lesson.say(f"{name:10}" + "".join(f"{error:8.1%}" for error in errors[name]))
    both = (2 * e4m3**2) ** 0.5
    mixed = (e4m3**2 + e5m2**2) ** 0.5
    of_tensors = torch.tensor([both, mixed, mixed])
    expected = torch.stack([of_tensors, of_tensors, torch.tensor([both] * 3)])
    near = (torch.tensor(list(errors.values())) / expected - 1).abs() < 0.1
    lesson.check(
        f"errors are independent, so squares add: {both:.1%} with e4m3 twice, {mixed:.1%} with e5m2"
        " and e4m3. A sum errs by no larger share than one product",
        near.all().item(),
        [both, mixed],
    )


def teach_gradients(lesson: form.Lesson) -> None:
    x, w, dy = operands()
    lesson.predict(
        f"From the first of {N} tokens to the last, gradients ∂y fall evenly by 8 powers of ten."
        " e4m3 reaches from 448 down to 2^-9. How many tokens get ∂x = 0? In e5m2?",
        "tokens with 0 in e4m3; tokens with 0 in e5m2",
    )
    dy = dy * torch.logspace(0, -8, N).unsqueeze(1)

    def zeros_of(name: str, what: str) -> int:
        dx = three_products(Recipe(name), x, w, dy)[1]
        zeros = (dx == 0).all(1).sum().item()
        lesson.say(f"{name:9}{Recipe(name).format(GRADIENT).name}, {what:26}{zeros:4} tokens")
        return zeros

    recipes = {"current": "one scale", "block": "a scale for each 1 x 128"}
    zeros = {name: zeros_of(name, what) for name, what in recipes.items()}
    with no_e5m2():
        in_e4m3 = zeros_of("current", recipes["current"])
    lesson.check(
        f"{in_e4m3} in e4m3, which spans 5.4 powers of ten; {zeros['current']} in e5m2, which spans"
        f" 9.6; {zeros['block']} by blocks, where each token has scales of its own",
        zeros == {"current": 0, "block": 0} and N / 8 < in_e4m3 < N / 3,
        [in_e4m3, zeros["current"]],
    )


def teach_experts(lesson: form.Lesson) -> None:
    lesson.predict(
        "Two ranks send 64 tokens each to one expert; those of the second are ten times as large."
        " In how many of the first rank's 64 rows do the bytes differ from those without the"
        " second?",
        "rows",
    )
    layer = fp8.ExpertLayer(Scaling(Recipe(), 1, "cpu"), ((0, 5),), None, None)
    tokens = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    tokens[64:] *= 10
    alone, together = (layer.in_bytes(x, (0, 5), INPUT, None) for x in (tokens[:64], tokens))
    differ = (alone.q.view(torch.uint8) != together.q[:64].view(torch.uint8)).any(1).sum().item()
    lesson.check(
        f"in {differ} of 64: a row's scale depends on this row alone", differ == 0, [differ]
    )


# --- two ranks ------------------------------------------------------------------------------------

B, S, H, V = 4, 32, 64, 257
LR = 0.5
# Any scale is allowed: powers of two would hide a wrong one.
ON_RANKS = {
    "current": Recipe("current", power_of_two=False),
    "delayed": Recipe("delayed"),
    "block": Recipe("block", block=16),
}


def on_rank(rank: int) -> dict:
    """Each recipe: two steps of a GPT (h 64, L 2, float64), and a layer's all-reduces of maxima."""
    return {name: two_steps(recipe) for name, recipe in ON_RANKS.items()}


def two_steps(recipe: Recipe) -> dict:
    group = demo.all_ranks()
    model = demo.make_model(demo.tiny_config(), tensor_parallel.apply, group=group)
    scaling = Scaling(recipe, model.config.num_layers, "cpu")
    fp8.apply(model, scaling, skip=0)
    tokens, targets = demo.random_tokens(B, S, V)
    losses = []
    for _ in range(2):
        model.zero_grad()
        loss = model(tokens, targets).mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
        scaling.end_step(group)
    gradients = demo.gathered_gradients(model)
    calls = demo.layer_calls(model.blocks["0"], demo.zeros(B, S, H))
    return {
        "losses": losses,
        "gradients": gradients,
        "maxima": [small_all_reduces(calls[way]) for way in ("forward", "backward")],
    }


def small_all_reduces(calls: list[tuple[str, int]]) -> int:
    """The number of all-reduces of maxima; those of activations have thousands of bytes."""
    return sum(kind == "all-reduce" and size < 100 for kind, size in calls)


def teach_ranks(lesson: form.Lesson, one: dict, two: dict) -> None:
    lesson.predict(
        "Two tensor-parallel ranks have parts of all weights of a layer, of the inputs of two"
        " matrices, of the gradients of the other four. How many all-reduces of maxima are there in"
        " one forward and backward, by recipe, when two steps are over?",
        "current; delayed; block",
    )
    counts = {name: two[name]["maxima"] for name in RECIPES}
    lesson.check(
        f"current {counts['current'][0]} in forward (6 weights, once a step, and 2 inputs) and"
        f" {counts['current'][1]} in backward (query, key and value in one); delayed"
        f" {sum(counts['delayed'])}, block {sum(counts['block'])}",
        counts == {"current": [8, 2], "delayed": [0, 0], "block": [0, 0]},
        [*map(sum, counts.values())],
    )
    lesson.predict("Two steps on two ranks, float64. Are losses and gradients those of one device?")
    worst = {}
    for name in RECIPES:
        losses = zip(one[name]["losses"], two[name]["losses"])
        of_gradients = demo.largest_difference(one[name]["gradients"], two[name]["gradients"])
        worst[name] = max(of_gradients, *(abs(a - b) for a, b in losses))
    lesson.check(
        "largest relative difference: "
        + ", ".join(f"{name} {apart:.1e}" for name, apart in worst.items()),
        max(worst.values()) < 1e-10,
    )


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        teach_products(lesson)
        teach_gradients(lesson)
        teach_experts(lesson)
    two = lesson.on_ranks(2, on_rank)[0]
    # Without e5m2 one device has no e5m2 either.
    one = (lesson.on_ranks(1, on_rank) if lesson.without == "e5m2" else ranks.run(on_rank, 1))[0]
    teach_ranks(lesson, one, two)


if __name__ == "__main__":
    form.run("fp8")
