"""Pipeline schedules, measured beside simulated: time lines, bubbles, tokens/s and activations in
flight; and beside torch.distributed.pipelining.

    python -m benchmarks.pipeline [--rounds 15] [--toy] [--out DIR]

Two ranks with one thread each. Each round runs in turn: a step of rank 0 alone on the whole batch;
a step of each schedule with m = 8 and m = 4 micro-batches; forward and backward of PyTorch's
schedules beside ours, on the same chunks and batches. Then, by simulation alone, the bubble against
m for p = 4, 8 and 64 stages. A bubble is idle time over the ideal time. Shape: h 512, L 8, a 8,
s 256, V 257, micro-batch size 1, fp32.

Figures: docs/figures/pipeline_schedules.svg, simulated with F, I and W of equal length;
docs/figures/pipeline_bubble.svg
"""

import itertools
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpt
import schedules
import train
from base import cpu
from base.cross_entropy import cross_entropy
from base.groups import Groups
from benchmarks import report, style
from benchmarks.report import format_spread, median, ratio
from benchmarks.steps import GPT, Random, Steps
from course import demo, ranks
from planning import drawing
from schedules import Cost, Event

# Pipeline ranks.
P = 2
SHAPE = GPT | dict(num_layers=8, micro_batch_size=1)
TOY = SHAPE | dict(hidden_size=64, seq_length=32)
# {layout: (schedule, virtual stages v)}
LAYOUTS = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved v=2": ("interleaved", 2),
    "interleaved v=4": ("interleaved", 4),
    "zb-h1": ("zb-h1", 1),
}
# Micro-batches of a step.
MICRO_BATCHES = (8, 4)
# Layouts that PyTorch has too; compared with m = 8.
IN_TORCH = ("1f1b", "interleaved v=2")
# Layouts whose time lines are drawn, with m = 8.
DRAWN = ("1f1b", "interleaved v=2", "zb-h1")
# {layout: mark and colour in the figure of bubbles}; gpipe and 1f1b have one bubble.
MARKERS = {
    "gpipe": ("x", "#000000"),
    "1f1b": ("o", "#0072b2"),
    "interleaved v=2": ("^", "#d55e00"),
    "zb-h1": ("D", "#009e73"),
    "interleaved v=4": ("v", "#cc79a7"),
}


# --- torch.distributed.pipelining over our chunks -------------------------------------------------


class TorchStage(nn.Module):
    """One of our chunks, as torch.distributed.pipelining calls it: with one tensor."""

    def __init__(self, chunk: gpt.GPT):
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens [b, s] on the first stage, activations [b, s, h] on the others."""
        if self.chunk.embedding is not None:
            return self.chunk(x, None, gpt.PLAIN, None)
        # A chunk reads the length of the sequence from its tokens.
        tokens = x.new_zeros(x.shape[:2], dtype=torch.long)
        return self.chunk(tokens, None, gpt.PLAIN, x)


def torch_schedule(trainer: train.Trainer, m: int, seq_length: int):
    """PyTorch's schedule of a trainer's chunks, for m micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    v = len(trainer.stages)
    group = trainer.groups.pp
    cpu = torch.device("cpu")
    loss_grad = 1.0 / (m * seq_length)

    def loss(logits, targets):
        return cross_entropy(logits, targets).sum() * loss_grad

    stages = [
        PipelineStage(TorchStage(chunk), c * P + group.rank(), P * v, cpu, group=group)
        for c, chunk in enumerate(trainer.stages)
    ]
    options = dict(loss_fn=loss, scale_grads=False)
    if v == 1:
        return Schedule1F1B(stages[0], m, **options)
    return ScheduleInterleaved1F1B(stages, m, **options)


def torch_pipeline(trainer: train.Trainer, m: int, dataset: Random):
    """A function that runs forward and backward of one step by PyTorch, and returns the loss: 0 on
    ranks but the last. The gradients are where our own pipeline leaves them."""
    schedule = torch_schedule(trainer, m, dataset.s)
    batch = dataset.batch(range(m))
    rank = trainer.groups.pp.rank()

    def run() -> float:
        for gradients in trainer.gradients:
            gradients.zero_grad()
        losses = []
        inputs = [batch.tokens] if rank == 0 else []
        outputs = {"target": batch.targets, "losses": losses} if rank == P - 1 else {}
        schedule.step(*inputs, **outputs)
        for gradients in trainer.gradients:
            gradients.reduce_gradients()
        trainer.pipeline.sum_tied()
        return sum(x.item() for x in losses)

    return run


# --- measured -------------------------------------------------------------------------------------


class Pipelined(Steps):
    """A layout on this rank, with the events of each of its steps."""

    def __init__(self, name: str, m: int, shape: dict):
        flags = dict(zip(("schedule", "virtual_stages"), LAYOUTS[name]))
        groups = Groups(pp=dist.group.WORLD)
        super().__init__(shape, groups, global_batch_size=m, pp=P, **flags)
        self.m = m
        self.events = []

    def timed_step(self) -> float:
        seconds = self.together()
        self.events.append(self.trainer.pipeline.events)
        return seconds

    def beside_torch(self):
        """(PyTorch's forward and backward, the largest relative difference of loss and gradients
        from ours)"""
        run = torch_pipeline(self.trainer, self.m, self.dataset)
        loss = run()
        expected = demo.gathered_gradients(*self.trainer.stages)
        our_loss = self.forward_backward()
        gradients = demo.gathered_gradients(*self.trainer.stages)
        difference = demo.largest_difference(expected, gradients)
        if dist.get_rank() == P - 1:
            difference = max(difference, abs(our_loss - loss) / max(1e-9, abs(loss)))
        return run, difference


def on_rank(rank: int, rounds: int, shape: dict) -> dict:
    """times: of each round, {(kind, m or layout): seconds}; events: {(layout, m): this rank's, a
    list for each round}; difference: {layout: of loss and gradients, from PyTorch's}"""
    cpu.set_up()
    kinds = {}
    pipelines = {}
    for m in MICRO_BATCHES:
        kinds["one", m] = Steps(shape, global_batch_size=m).alone
        for name in LAYOUTS:
            pipelines[name, m] = Pipelined(name, m, shape)
            kinds[name, m] = pipelines[name, m].timed_step
    difference = {}
    for name in IN_TORCH:
        pipeline = pipelines[name, 8]
        torch_run, difference[name] = pipeline.beside_torch()
        for kind, run in (("ours", pipeline.forward_backward), ("torch", torch_run)):
            kinds[kind, name] = partial(report.timed_together, run)
    return {
        "times": report.in_turn(kinds, rounds),
        "events": {key: pipeline.events[-rounds:] for key, pipeline in pipelines.items()},
        "difference": difference,
    }


def bubbles(measured: list[dict], name: str, m: int) -> tuple[float, float]:
    """(measured, the median over rounds; simulated from the measured costs), as fractions of the
    ideal time. measured: what `on_rank` returned on each rank."""
    by_rank = [result["events"][name, m] for result in measured]
    # The events of all ranks, round by round.
    rounds = [list(itertools.chain(*of_round)) for of_round in zip(*by_rank)]
    kind, v = LAYOUTS[name]
    seconds = {}
    for e in itertools.chain(*rounds):
        seconds.setdefault((e.op, e.chunk * P + e.rank), []).append(e.end - e.start)

    def cost(op: str) -> list[float]:
        """Seconds on each stage."""
        return [median(seconds[op, stage]) for stage in range(P * v)]

    if name == "zb-h1":
        costs = Cost(cost("F"), cost("I"), cost("W"))
    else:
        costs = Cost(cost("F"), cost("B"), [0.0] * (P * v))
    simulated = schedules.simulate(schedules.make(kind, P, m, v), costs)
    return median([schedules.bubble(events) for events in rounds]), schedules.bubble(simulated)


def schedule_row(measured: list[dict], name: str, m: int, seq_length: int) -> dict:
    """A row of results."""
    times = measured[0]["times"]
    bubble, simulated = bubbles(measured, name, m)
    kind, v = LAYOUTS[name]
    schedule = schedules.make(kind, P, m, v)
    return {
        "tokens_per_second": m * seq_length / median([t[name, m] for t in times]),
        "over_one_rank": ratio(times, ("one", m), (name, m)),
        "over_1f1b_step_time": ratio(times, (name, m), ("1f1b", m)),
        "bubble_measured": bubble,
        "bubble_simulated": simulated,
        "bubble_formula": schedules.bubble_formula(kind, P, m, v),
        "in_flight": schedules.in_flight(schedule),
        "owed": schedules.deferred_weight_gradients(schedule),
    }


# --- simulated ------------------------------------------------------------------------------------


def simulated(name: str, p: int, m: int) -> list[Event]:
    """The events of a layout where F, I and W of a rank's layers take 1 each."""
    kind, v = LAYOUTS[name]
    return schedules.simulate(schedules.make(kind, p, m, v), Cost(1 / v, 1 / v, 1 / v))


def simulated_bubbles(ps: tuple[int, ...]) -> list[dict]:
    """The bubble of each layout for each p, with m = p, 2 p, 4 p and 8 p."""
    rows = []
    for p, name, k in itertools.product(ps, MARKERS, (1, 2, 4, 8)):
        kind, v = LAYOUTS[name]
        row = {"layout": name, "p": p, "m": p * k}
        row["simulated"] = schedules.bubble(simulated(name, p, p * k))
        rows.append(row | {"formula": schedules.bubble_formula(kind, p, p * k, v)})
    return rows


# --- drawn ----------------------------------------------------------------------------------------


def draw_bubbles(rows: list[dict], path: Path) -> None:
    """rows: what `simulated_bubbles` returned."""
    ps = sorted({row["p"] for row in rows})
    figure, panels = style.figure(3.2, 1, len(ps), sharey=True)
    for axes, p in zip(panels, ps):
        for name, (marker, colour) in MARKERS.items():
            points = [row for row in rows if (row["p"], row["layout"]) == (p, name)]
            ms = [row["m"] for row in points]
            axes.plot(ms, [100 * row["formula"] for row in points], color=colour, label=name)
            marks = [100 * row["simulated"] for row in points]
            hollow = "none" if name == "1f1b" else colour
            axes.plot(ms, marks, marker, color=colour, markersize=7, markerfacecolor=hollow)
        style.ticks(axes, x=ms, y={x: f"{x}%" for x in (3, 10, 30, 100)})
        axes.set(xlabel="micro-batches m", title=f"p = {p}")
    panels[0].set_ylabel("bubble: idle / ideal time")
    style.label_ends(panels[-1])
    figure.suptitle(
        "The bubble of pipeline schedules. Lines: by formula; marks: by simulation, with F, I and W"
        " of equal length"
    )
    style.save(figure, path)


def draw(results: dict, figures: Path) -> None:
    """results: what pipeline.json holds."""
    panels = {}
    for name in DRAWN:
        events = simulated(name, P, 8)
        measured = results["schedules"][f"{name}, m=8"]["bubble_measured"]
        ideal = f"{name}: bubble = idle / ideal time = {100 * schedules.bubble(events):.1f}%"
        panels[f"{ideal}; measured, median: {100 * measured:.1f}%"] = events
    style.pyplot()
    unit = "time; F, I and W of all layers of a rank take 1 each, B takes 2"
    drawing.plot(panels, figures / "pipeline_schedules.svg", unit=unit)
    draw_bubbles(results["simulated_bubbles"], figures / "pipeline_bubble.svg")


def main():
    args = report.parse(report.arguments(__doc__, rounds=15), rounds=1)
    shape = TOY if args.toy else SHAPE
    measured = ranks.run(on_rank, P, args.rounds, shape)
    results = {"schedules": {}, "torch": {}}
    table = report.Table()
    for m, name in itertools.product(MICRO_BATCHES, LAYOUTS):
        row = schedule_row(measured, name, m, shape["seq_length"])
        results["schedules"][f"{name}, m={m}"] = row
        table.row({"schedule": name, "m": m} | row)
    interleaved = results["schedules"]["interleaved v=2, m=4"]["over_1f1b_step_time"]
    print(f"m = 4: interleaved v = 2 takes {format_spread(interleaved)} of 1F1B's step time")
    for name in IN_TORCH:
        of_step = ratio(measured[0]["times"], ("ours", name), ("torch", name))
        difference = max(result["difference"][name] for result in measured)
        print(
            f"torch.distributed.pipelining, {name}: our step time over theirs"
            f" {format_spread(of_step)}; loss and gradients differ by at most {difference:.1e}"
        )
        results["torch"][name] = of_step | {"largest_relative_difference": difference}
    results["simulated_bubbles"] = simulated_bubbles((2, 4) if args.toy else (4, 8, 64))
    report.finish("pipeline", results, args, draw, threads=1)


if __name__ == "__main__":
    main()
