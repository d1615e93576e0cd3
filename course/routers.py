"""The lesson of moe.py's routers: a plan by hand, temperature, biases, capacity."""

import torch
from torch import Tensor

from base import transport_plan
from course import demo, form
from moe import BiasRouter, MoEConfig, Routing, SinkhornRouter, TopKRouter

WITHOUT = form.Removals()


@WITHOUT.replace(
    "columns",
    transport_plan,
    "scale_rows_and_columns",
    "Every token has the same mass. Where does it all go?",
)
def rows_alone(kernel: Tensor, tolerance: float, most: int):
    """To the experts that most tokens like. Scaling a row does not change its order, so each token
    goes where its raw logits send it, at any temperature."""
    n, e = kernel.shape
    ones = kernel.new_ones(e)
    return 1 / n / (kernel @ ones), ones, True


@WITHOUT.replace(
    "cooling",
    transport_plan,
    "balance",
    "Cooling takes the plan step by step from temperature 1 to a low one. Without it the mass is"
    " even. Why is the load not?",
)
def at_temperature_1(
    logits: Tensor, temperature=1.0, *rest, original=transport_plan.balance, **options
):
    """At temperature 1 the plan divides a token among experts, and it is these parts that are even.
    But a token goes whole to its largest part. A lower temperature divides fewer tokens."""
    return original(logits, 1.0, *rest, **options)


# The picture at the top of moe.py.
EXAMPLE = torch.tensor([[2.0, 1.0], [2.2, 1.0], [1.5, 1.0], [3.0, 0.0]], dtype=torch.float64)


def config_of(**fields) -> MoEConfig:
    return demo.tiny_config(MoEConfig, **fields)


def loads(scores: Tensor) -> Tensor:
    """How many tokens each expert gets. scores: [n, E] -> [E]"""
    return scores.argmax(1).bincount(minlength=scores.shape[1])


def teach(lesson: form.Lesson) -> None:
    with lesson.removed():
        plan_by_hand(lesson)
        temperature(lesson)
    biases(lesson)
    capacity(lesson)


def plan_by_hand(lesson: form.Lesson) -> None:
    lesson.predict(
        "4 tokens, 2 experts: what does a row of Sinkhorn's plan sum to? A column? How many of the"
        f" tokens with logits {EXAMPLE.tolist()} does e0 get in training (temperature 0.02), and in"
        " evaluation?",
        "a row; a column; e0 in training; e0 in evaluation",
    )
    plan = transport_plan.sinkhorn(EXAMPLE)
    rows = [f"{x:.3f}" for x in plan.sum(1)]
    columns = [f"{x:.3f}" for x in plan.sum(0)]
    even = (plan.sum(1) - 1 / 4).abs().max() < 1e-3 and (plan.sum(0) - 1 / 2).abs().max() < 1e-3
    lesson.check(
        f"rows {', '.join(rows)}: 1 / 4; columns {', '.join(columns)}: 1 / 2",
        bool(even),
        [1 / 4, 1 / 2],
    )
    router = SinkhornRouter(config_of(num_experts=2))
    counts = [int(loads(router.scores(EXAMPLE, training))[0]) for training in (True, False)]
    lesson.check(
        f"in training {counts[0]}, by the plan; in evaluation {counts[1]}, by the raw logits",
        counts == [2, 4],
        counts,
    )


def temperature(lesson: form.Lesson) -> None:
    n, e = 4096, 8
    lesson.predict(
        f"{n:,} tokens, {e} experts. The even load? Which plan comes nearer, that of temperature 1"
        " or that of 0.02?",
        "even load",
    )
    logits = uneven_logits(n, e)
    largest = {"raw logits": int(loads(logits).max())}
    for t in (1.0, 0.3, 0.1, 0.02):
        largest[f"plan, temperature {t}"] = int(
            loads(transport_plan.sinkhorn(logits, t, 1e-2)).max()
        )
    lesson.say("largest load of an expert, in tokens:")
    lesson.bars(largest, largest["raw logits"])
    at_1, at_002 = largest["plan, temperature 1.0"], largest["plan, temperature 0.02"]
    lesson.check(
        f"even is {n // e}; the largest load is {at_1:,} at temperature 1, {at_002:,} at 0.02",
        n // e <= at_002 < 1.05 * n // e < at_1,
        [n // e],
    )


def uneven_logits(n: int, e: int) -> Tensor:
    """[n, e], of 3 directions: raw logits are far from even."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=generator) @ torch.randn(3, e, generator=generator)


def biases(lesson: form.Lesson) -> None:
    n, e, steps = 4096, 8, 400
    lesson.predict(
        f"The same tokens, router bias: after each step a bias grows or shrinks by 0.001. After"
        f" {steps} steps, what is the largest load? By how much can a bias have changed at most?",
        "largest load; bias at most",
    )
    router, logits = BiasRouter(config_of(num_experts=e, router="bias")), uneven_logits(n, e)
    largest = []
    for _ in range(steps):
        load = loads(router.scores(logits, training=True))
        largest.append(int(load.max()))
        router.balance(load.double(), torch.tensor(1.0))
    factors = router.probabilities(logits, logits.topk(1).indices)
    lesson.check(
        f"largest load {largest[0]:,} at first, {largest[-1]} after; the largest bias is"
        f" {router.bias.abs().max():.3f}, at most {steps * router.rate:g}. No loss was needed, and"
        " the factors are sigmoids without a bias",
        largest[-1] < 1.05 * n // e < largest[0]
        and router.bias.abs().max() <= steps * router.rate + 1e-6
        and factors.equal(logits.amax(1, keepdim=True).sigmoid()),
        [n // e, steps * router.rate],
    )


def capacity(lesson: form.Lesson) -> None:
    lesson.predict(
        "8 tokens choose among 4 experts: 5, 1, 1 and 1 tokens. Capacity factor 1: how many choices"
        " are dropped? And in evaluation?",
        "in training; in evaluation",
    )
    chosen = torch.tensor([0, 0, 1, 0, 2, 0, 3, 0])
    logits = torch.nn.functional.one_hot(chosen, 4).float()
    config = config_of(num_experts=4, router="topk", capacity_factor=1.0)
    routing = Routing(TopKRouter(config).scores, config)
    dropped = [
        len(chosen) - len(routing.train(training)(logits).order) for training in (True, False)
    ]
    lesson.check(
        f"{dropped[0]}: an expert takes 1 * 8 / 4 = 2; in evaluation {dropped[1]}",
        dropped == [3, 0],
        dropped,
    )


if __name__ == "__main__":
    form.run("routers")
