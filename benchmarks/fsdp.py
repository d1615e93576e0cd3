"""ZeRO stage 3 of this project beside torch.distributed.fsdp.fully_shard: the same model, batches
and optimizer on the same two ranks, in turn, in one run.

    python -m benchmarks.fsdp [--rounds 25] [--toy] [--out DIR]

In both, each layer, the embedding and the head are gathered one at a time, and dropped after
forward. A step is forward, backward, clipping by the global norm, and AdamW. Peak bytes are the
most that PyTorch's allocator held for tensors, by its profiler, in processes of their own. Shape:
Llama's block, h 512, L 6, a 8, ffn 1376, s 256, V 8192, 4 sequences a rank, fp32, one thread each.

Figure: docs/figures/fsdp_time_line.svg, one of our steps on rank 0
"""

import itertools
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fsdp
import sharding
import train
from base import cpu
from base.groups import Groups
from benchmarks import report, style, time_line
from benchmarks.report import ratio, spread
from benchmarks.steps import InTurn, Random, Steps
from course import demo, ranks
from planning import counters

SHAPE = dict(model="llama2-7b", num_layers=6, hidden_size=512, num_heads=8, ffn_hidden_size=1376)
SHAPE |= dict(seq_length=256, vocab_size=8192, precision="fp32")
TOY = SHAPE | dict(num_layers=2, hidden_size=64, ffn_hidden_size=176, seq_length=32, vocab_size=512)
# Sequences of a rank.
SEQUENCES = 4


class Ours(Steps):
    """train.py's steps under --zero-stage 3."""

    def __init__(self, shape: dict):
        flags = dict(global_batch_size=2 * SEQUENCES, warmup_steps=0, steps=10**9)
        super().__init__(shape, Groups(dp=dist.group.WORLD), zero_stage=3, **flags)
        self.losses = []

    def step(self) -> None:
        # This rank's part of the mean over both.
        self.losses.append(super().step() * 2)


class Theirs(InTurn):
    """The same steps, by torch's own parts."""

    def __init__(self, shape: dict):
        config = train.Config(**shape)
        self.model = demo.meta_model(config.model_config())
        sharding.init(self.model, 0, "cpu", torch.float32)
        for layer in (self.model.embedding, *self.model.blocks.values(), self.model.head):
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(self.model, reshard_after_forward=True)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}]
        groups += [{"params": vectors, "weight_decay": 0.0}]
        options = dict(lr=config.peak_lr, betas=(0.9, 0.95), fused=True)
        self.optimizer = torch.optim.AdamW(groups, **options)
        first = dist.get_rank() * SEQUENCES
        dataset = Random(2 * SEQUENCES, shape["seq_length"], shape["vocab_size"])
        self.batch = dataset.batch(range(first, first + SEQUENCES))
        self.losses = []

    def step(self) -> None:
        # fully_shard averages gradients over ranks
        loss = self.model(self.batch.tokens, self.batch.targets).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


TRAINERS = {"ours": Ours, "theirs": Theirs}


# --- memory and time ------------------------------------------------------------------------------


def peak_bytes(rank: int, name: str, shape: dict) -> int:
    """The most that was allocated for tensors at any time of two steps."""

    def two_steps():
        trainer = TRAINERS[name](shape)
        trainer.step()
        trainer.step()

    return counters.peak_bytes(two_steps)


def on_rank(rank: int, rounds: int, shape: dict) -> tuple[list[dict], dict, list]:
    """(seconds of each, round by round; {name: its first and its last loss}; the time line of one
    of our steps)"""
    cpu.set_up()
    trainers = {name: make(shape) for name, make in TRAINERS.items()}
    times = report.in_turn({name: one.together for name, one in trainers.items()}, rounds)
    losses = {name: (one.losses[0], one.losses[-1]) for name, one in trainers.items()}
    return times, losses, events_of_a_step(trainers["ours"])


# --------------------------------------------------------------------------------------------------
# the time line of a step: (what, unit, start, end), in seconds. A unit is one layer's parameters;
# they are numbered in the order of forward.


def events_of_a_step(ours: Ours) -> list[tuple[str, int, float, float]]:
    """(what, unit, start, end) of one step: what each layer computes, and each collective from its
    call to its end. Seconds from the beginning of the step."""
    sharder = ours.trainer.gradients[0]
    # The embedding, the blocks and the head; the model itself has no unit.
    number = {layer: i for i, layer in enumerate(sharder.layers[1:])}
    layer_of = {unit: number[unit.readers[0]] for unit in sharder.units}
    clock = time.perf_counter
    events = []
    units = []  # of each collective that was started
    # (unit, start, end) of each wait for parameters; the last one is the end of backward.
    waits = []

    def started(what: str, collective, *args, **options):
        work, unit, start = collective(*args, **options), units[-1], clock()

        def ended(_=None) -> None:
            events.append((what, unit, start, clock()))

        if what == "all-gather":
            work.get_future().add_done_callback(ended)
            return work
        # Gloo does not tell when a reduce-scatter ends: its end is that of the wait for it.
        return SimpleNamespace(wait=lambda: ended(work.wait()))

    def for_unit(method, unit) -> None:
        units.append(layer_of[unit])
        method(unit)

    def gather(method, layer, needed) -> None:
        start = clock()
        method(layer, needed)
        if needed:
            waits.append((number[layer], start, clock()))

    def reduce_gradients(method) -> None:
        waits.append((None, clock(), None))
        method()

    methods = dict(reduce=for_unit, gather=gather, reduce_gradients=reduce_gradients)
    names = dict(all_gather="all-gather", reduce_scatter="reduce-scatter")
    collectives = {name: partial(started, what) for name, what in names.items()}
    gather_row = fsdp.Unit.gather_row
    rows = mock.patch.object(fsdp.Unit, "gather_row", lambda unit: for_unit(gather_row, unit))
    with rows, noting(fsdp, **collectives), noting(sharder, **methods):
        dist.barrier()
        begin = clock()
        ours.step()
    events += computed(waits, len(number))
    return [(what, unit, start - begin, end - begin) for what, unit, start, end in events]


def noting(owner, **functions):
    """A context in which a function of `owner` is one of these, which gets the original first."""
    notes = {name: partial(function, getattr(owner, name)) for name, function in functions.items()}
    return mock.patch.multiple(owner, **notes)


def computed(waits: list, layers: int) -> list[tuple[str, int, float, float]]:
    """Each layer's forward and backward: from when its parameters are there until the next are
    asked for."""
    pairs = enumerate(itertools.pairwise(waits))
    return [
        ("forward" if k < layers else "backward", unit, start, end)
        for k, ((unit, _, start), (_, end, _)) in pairs
    ]


COLOURS = {
    "forward": style.COLOURS["F"],
    "backward": style.COLOURS["B"],
    "all-gather": style.COLOURS["weights"],
    "reduce-scatter": style.COLOURS["gradients"],
}
# {row of the figure: its events}
ROWS = {
    "compute": ("forward", "backward"),
    "all-gather\n(weights)": ("all-gather",),
    "reduce-scatter\n(gradients)": ("reduce-scatter",),
}


def draw(results: dict, figures: Path) -> None:
    """results: what fsdp.json holds."""
    events = results["time_line"]
    last = max(unit for _, unit, _, _ in events)
    names = {0: "E", last: "H"}
    figure, axes = style.figure(2.2)
    axes.set_xlim(0, 1e3 * max(end for _, _, _, end in events))
    style.rows_of(axes, list(ROWS))
    for y, kinds in enumerate(ROWS.values()):
        for what, unit, *seconds in events:
            if what in kinds:
                start, end = (1e3 * x for x in seconds)
                box = dict(color=COLOURS[what], edgecolor="white", linewidth=0.5)
                axes.barh(y, end - start, left=start, height=0.8, **box)
                # Where there is room.
                if end - start > 0.012 * axes.get_xlim()[1]:
                    name = names.get(unit, str(unit - 1))
                    style.inside(axes, name, ((start + end) / 2, y), COLOURS[what])
    for what in ROWS["compute"]:
        begin = 1e3 * min(start for name, _, start, _ in events if name == what)
        style.label(axes, what, (begin, -0.5), COLOURS[what], offset=(0, 6))
    axes.set_xlabel("ms")
    axes.set_title(
        f"A stage-3 step on rank 0, measured. E: embedding, 0 to {last - 2}: blocks, H: head",
        pad=16,
    )
    style.save(figure, figures / "fsdp_time_line.svg")


def main():
    args = report.parse(report.arguments(__doc__, rounds=25), rounds=1)
    shape = TOY if args.toy else SHAPE
    peaks = {name: max(ranks.run(peak_bytes, 2, name, shape)) for name in TRAINERS}
    times, losses, events = ranks.run(on_rank, 2, args.rounds, shape)[0]
    collectives = "all-gather", "reduce-scatter"
    results = {
        "step_seconds": {name: spread([t[name] for t in times]) for name in TRAINERS},
        "step_time_over_fully_shard": ratio(times, "ours", "theirs"),
        "peak_tensor_bytes": peaks,
        "peak_over_fully_shard": peaks["ours"] / peaks["theirs"],
        "first_and_last_loss": losses,
        "in_flight_while_computing": {w: time_line.hidden(events, w) for w in collectives},
    }
    report.print_results(results)
    report.finish("fsdp", results | {"time_line": events}, args, draw, threads=1)


if __name__ == "__main__":
    main()
