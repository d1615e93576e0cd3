"""The lesson of pipeline_parallel.py: four schedules on two ranks, against one rank.

python pipeline_parallel.py
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

import gpt
import pipeline_parallel
import schedules
import sharding
from dropout import dropout_key
from lessons import demo, form
from pipelines import zero_bubble
from proof import ranks
from proof.mutations import pipeline_parallel as bugs
from schedules import Action, Cost, Event

WITHOUT = {"tied-sum": bugs.no_tied_sum, "loss-scale": bugs.loss_divided_twice}
# name -> why checks fail without it
WHY = {
    "tied-sum": (
        "That of the tied embedding. The first stage has the part from looking tokens up, the"
        " last stage the part from the logits; without the sum each copy has one part, and after"
        " a step the copies differ."
    ),
    "loss-scale": (
        "Every gradient is 1/8 of what it should be, so the relative difference is 7/8. AdamW"
        " divides m by √v: the factor cancels, but for ε and for clipping by the norm."
    ),
}

# p ranks, m micro-batches of one sequence
P, M = 2, 4
S, V = 32, 257
SHAPE = dict(num_layers=4, hidden_size=128, num_heads=4, seq_length=S, dropout=0.1)
# under each schedule; the first warms up
STEPS = 4


def chunks(name: str) -> int:
    """v: virtual stages on each rank."""
    return 2 if name == "interleaved" else 1


class CountingChannels(pipeline_parallel.Channels):
    """Counts what is sent."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        self.sent = 0
        self.bytes = 0

    def send(self, x: torch.Tensor, *arguments) -> dist.Work:
        self.sent += 1
        self.bytes = x.nbytes
        return super().send(x, *arguments)


class WatchedPipeline(pipeline_parallel.Pipeline):
    """Notes the most (chunk, micro-batch) pairs whose graphs are held, the processor time of each
    action, and whether the thread had a processor to itself."""

    def __init__(self, stages: list, channels: CountingChannels):
        super().__init__(stages, channels)
        self.most_held = 0
        self.forget_times()

    def forget_times(self) -> None:
        self.turns = form.Turns()
        # op -> seconds of each action
        self.seconds = defaultdict(list)

    def act(self, step, action: Action, received) -> None:
        before = time.thread_time()
        with self.turns:
            super().act(step, action, received)
        self.seconds[action.op].append(time.thread_time() - before)
        self.most_held = max(self.most_held, len(step.graphs))


@dataclass
class Run:
    """What one rank reports of the steps under one schedule."""

    layers: list[list[str]]
    loss: float
    gradients: dict
    held: int
    sent: int
    message_bytes: int
    # of each step
    events: list[list[Event]] = field(default_factory=list)
    # op -> processor seconds of each action
    seconds: dict[str, list[float]] = field(default_factory=dict)
    shared: bool = False


def make_stages(rank: int, p: int, name: str) -> list:
    """This rank's stages, with the weights of seed 0, in float64."""
    model = demo.meta_model(demo.tiny_config(**SHAPE))
    stages = pipeline_parallel.apply(model, rank, p, chunks(name))
    for stage in stages:
        if name == "zb-h1":
            zero_bubble.apply(stage)
        sharding.init(stage, 0, "cpu", torch.float64)
    return stages


def forward_of(stages: list, losses: list):
    """forward(chunk, micro-batch, activation) as `Pipeline.run` calls it. It adds to `losses`."""
    tokens, targets = demo.random_tokens(M, S, V)

    def forward(chunk: int, k: int, x):
        # of (random seed, step, sample): the same mask on whichever rank
        context = gpt.Context(dropout_key(0, 1, torch.tensor([k])))
        y = stages[chunk](tokens[k : k + 1], targets[k : k + 1], context, x)
        if stages[chunk].head is None:
            return y
        losses.append(y.detach().sum().item() / (M * S))
        return y.sum()

    return forward


# sums of token losses become their mean
LOSS_GRAD = torch.tensor(1 / (M * S), dtype=torch.float64)


def on_one_rank(rank: int) -> Run:
    stages = make_stages(0, 1, "1f1b")
    losses = []
    forward = forward_of(stages, losses)
    for k in range(M):
        forward(0, k, None).backward(LOSS_GRAD)
    gradients = {name: p.grad for name, p in sharding.named_parameters(*stages)}
    return Run([], sum(losses), gradients, 0, 0, 0)


def under_schedule(rank: int, name: str, steps: int) -> Run:
    """Steps without an optimizer: all alike, but for their times."""
    stages = make_stages(rank, P, name)
    channels = CountingChannels(dist.group.WORLD)
    pipeline = WatchedPipeline(stages, channels)
    schedule = schedules.make(name, P, M, len(stages))
    events = []
    for step in range(steps):
        if step == 1:
            pipeline.forget_times()
        losses = []
        for stage in stages:
            stage.zero_grad(set_to_none=True)
        dist.barrier()
        channels.sent = 0
        pipeline.run(schedule, forward_of(stages, losses), 1, S, LOSS_GRAD)
        events.append(pipeline.events)
    sent = channels.sent
    size = channels.bytes
    for parameter in pipeline.parameters():
        # what sum_tied adds to; in training gradients.py makes it
        parameter.main_grad = parameter.grad
    pipeline.sum_tied()
    layers = [list(stage.blocks) for stage in stages]
    gradients = demo.gathered_gradients(*stages)
    return Run(
        layers,
        sum(losses),
        gradients,
        pipeline.most_held,
        sent,
        size,
        events[1:],
        dict(pipeline.seconds),
        pipeline.turns.shared(),
    )


def on_rank(rank: int, steps: int, mutate) -> dict[str, Run]:
    if mutate:
        mutate()
    return {name: under_schedule(rank, name, steps) for name in schedules.NAMES}


# --- times ----------------------------------------------------------------------------------------


def steps_of(runs: list[Run]) -> list[list[Event]]:
    """The events of all ranks, of each step; a step begins at 0."""
    steps = []
    for of_ranks in zip(*(run.events for run in runs)):
        events = sorted((e for events in of_ranks for e in events), key=lambda e: e.start)
        begin = events[0].start
        steps.append([e._replace(start=e.start - begin, end=e.end - begin) for e in events])
    return steps


def measured_costs(of_schedule: dict[str, list[Run]]) -> dict[str, Cost]:
    """For each schedule, the median processor times of its actions: they mean something on a busy
    machine too. Equal work counts as equally long: I and W are half of B each, where there is only
    B, and a chunk of v takes 1 / v."""

    def seconds(op: str) -> float:
        """The median, with one chunk on each rank."""
        runs = [run for name in ("gpipe", "1f1b", "zb-h1") for run in of_schedule[name]]
        return median(x for run in runs for x in run.seconds.get(op, ()))

    forward = seconds("F")
    half = seconds("B") / 2
    whole = Cost(forward, half, half)
    return {
        "gpipe": whole,
        "1f1b": whole,
        "interleaved": Cost(forward / 2, half / 2, half / 2),
        "zb-h1": Cost(forward, seconds("I"), seconds("W")),
    }


def show_times(lesson: form.Lesson, of_schedule: dict[str, list[Run]]) -> None:
    """Time lines and bubbles, measured or simulated, all on one scale."""
    busy = any(run.shared for runs in of_schedule.values() for run in runs)
    if busy:
        lesson.say("This machine is too busy for measured bubbles to mean anything. So these are")
        lesson.say("simulated, with the processor times that were measured for F, B, I and W:")
    steps = {name: steps_of(runs) for name, runs in of_schedule.items()}
    costs = measured_costs(of_schedule)
    simulated = {}
    typical = {}
    for name, cost in costs.items():
        schedule = schedules.make(name, P, M, chunks(name))
        simulated[name] = schedules.simulate(schedule, cost)
        # the step with the median bubble
        typical[name] = sorted(steps[name], key=schedules.bubble)[len(steps[name]) // 2]
    drawn = simulated if busy else typical
    longest = max(e.end for events in drawn.values() for e in events)
    for name, cost in costs.items():
        lesson.draw(schedules.text(drawn[name], longest / 42))
        measured = "" if busy else f"measured {schedules.bubble(typical[name]):.2f}, "
        bubble = schedules.bubble(simulated[name])
        formula = schedules.bubble_formula(name, P, M, chunks(name), cost)
        # the formula of ZB-H1 is for T_W <= T_F
        in_range = name != "zb-h1" or cost.weight <= cost.forward
        lesson.check(
            f"{name}: {measured}simulated {bubble:.3f}, formula {formula:.3f}",
            abs(bubble - formula) < 1e-9 if in_range else bubble > formula,
        )


# --- the lesson -----------------------------------------------------------------------------------


def teach_held_and_sent(lesson: form.Lesson, of_schedule: dict[str, list]) -> None:
    """What a rank holds, and what it sends. of_schedule: name -> the run of each rank."""
    lesson.predict(
        f"{M} micro-batches: activations of how many does each rank hold, under GPipe? 1F1B?"
    )
    held = {name: [run.held for run in runs] for name, runs in of_schedule.items()}
    lesson.check(
        f"GPipe {held['gpipe']}, all m; 1F1B {held['1f1b']}, p - rank",
        held["gpipe"] == [M, M] and held["1f1b"] == [2, 1],
    )

    lesson.predict("v 2 halves the bubble. How many messages does a step send, with v 1 and v 2?")
    sent = {name: sum(run.sent for run in runs) for name, runs in of_schedule.items()}
    size = of_schedule["1f1b"][0].message_bytes
    lesson.check(
        f"{sent['1f1b']} and {sent['interleaved']}, 2 m (p v - 1); each b s h 8 = {size:,} bytes",
        (sent["1f1b"], sent["interleaved"], size) == (8, 24, S * 128 * 8),
    )


def teach(lesson: form.Lesson) -> None:
    one = ranks.run(on_one_rank, 1)[0]
    two = ranks.run(on_rank, P, 2 if lesson.without else STEPS, lesson.mutate)
    of_schedule = {name: [rank[name] for rank in two] for name in schedules.NAMES}

    lesson.predict("4 layers, p 2, v 2 chunks on each rank. Which layers has rank 0?")
    layers = of_schedule["interleaved"][0].layers
    words = ", then ".join(" ".join(chunk) for chunk in layers)
    lesson.check(
        f"{words}: stages c p + rank = 0 and 2, of 1 layer each",
        layers == [["0"], ["2"]],
    )

    lesson.predict(
        "Under which of the four schedules do loss and gradients differ from one rank's?"
    )
    losses = [sum(run.loss for run in runs) for runs in of_schedule.values()]
    lesson.check(
        f"none: loss {one.loss:.12f} on one rank, {losses[0]:.12f} under GPipe and the others",
        max(abs(loss - one.loss) for loss in losses) < 1e-10,
    )
    worst = {}
    for name, runs in of_schedule.items():
        gradients = {key: g for run in runs for key, g in run.gradients.items()}
        worst[name] = demo.largest_difference(one.gradients, gradients)
    lesson.check(
        f"none: the largest relative difference is {max(worst.values()):.1e}",
        max(worst.values()) < 1e-10,
    )

    teach_held_and_sent(lesson, of_schedule)
    lesson.predict(
        "The bubble of each as a fraction of the ideal time, if F, I and W take equally long?"
    )
    show_times(lesson, of_schedule)
    lesson.break_it("tied-sum", "The loss is right. Which gradient is not?", WHY["tied-sum"])
    lesson.break_it(
        "loss-scale", "The loss is right. Why would AdamW hide this?", WHY["loss-scale"]
    )
