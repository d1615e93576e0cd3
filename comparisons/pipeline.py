"""Pipeline schedules, measured beside simulated: time lines, bubbles, tokens/s, activations in
flight; and beside torch.distributed.pipelining.

    python comparisons/pipeline.py [--rounds 15] [--toy] [--out DIR]

Two ranks with one thread each (h 512, L 8, a 8, s 256, V 257, micro-batch 1, fp32). Each round
runs, in turn and in the same two processes: a step of rank 0 alone on the whole batch, a step of
each schedule with m = 8 and m = 4, and PyTorch's Schedule1F1B and ScheduleInterleaved1F1B on the
same chunks and batches. Ratios are medians over rounds. Then, by simulation alone, the bubble
against m for p = 4, 8, 64. Figures: pipeline_schedules.png, pipeline_bubble.png."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import median, spread, timed
from single_device import Random

import schedules
import train
from lessons import ranks
from runtime.world import Groups, keep_freed_memory
from schedules import Cost, Event

V = 257
P = 2
SHAPE = dict(
    model="gpt2",
    dropout=0.0,
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    seq_length=256,
    vocab_size=V,
    precision="fp32",
    micro_batch_size=1,
)
TOY = SHAPE | dict(hidden_size=64, seq_length=32)
LAYOUTS = {
    "gpipe": dict(schedule="gpipe"),
    "1f1b": dict(schedule="1f1b"),
    "interleaved v=2": dict(virtual_stages=2),
    "interleaved v=4": dict(virtual_stages=4),
    "zb-h1": dict(schedule="zb-h1"),
}


def torch_pipeline(trainer: train.Trainer, m: int, dataset):
    """torch.distributed.pipelining over the same chunks: a function that runs the forward and
    backward passes of one step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    class Stage(torch.nn.Module):
        def __init__(self, chunk):
            super().__init__()
            self.chunk = chunk

        def forward(self, x):
            tokens = (
                x
                if self.chunk.embedding is not None
                else x.new_zeros(x.shape[:2], dtype=torch.long)
            )
            return self.chunk(tokens, None, None, None if self.chunk.embedding is not None else x)

    v = len(trainer.stages)
    group = trainer.groups.pp
    batch = dataset.batch(range(m))
    seed = 1.0 / (m * dataset.s)

    def loss(logits, targets):
        from gpt import cross_entropy

        return cross_entropy(logits, targets).sum() * seed

    stages = [
        PipelineStage(Stage(chunk), c * P + group.rank(), P * v, torch.device("cpu"), group=group)
        for c, chunk in enumerate(trainer.stages)
    ]
    kind, stages = (Schedule1F1B, stages[0]) if v == 1 else (ScheduleInterleaved1F1B, stages)
    schedule = kind(stages, m, loss_fn=loss, scale_grads=False)

    def run():
        for gradients in trainer.gradients:
            gradients.zero()
        losses = []
        first = group.rank() == 0
        last = group.rank() == P - 1
        schedule.step(
            *([batch.tokens] if first else []),
            **({"target": batch.targets, "losses": losses} if last else {}),
        )
        for gradients in trainer.gradients:
            gradients.reduce_gradients()
        trainer.model.sum_tied()
        return sum(x.item() for x in losses)

    return run


def on_rank(rank: int, rounds: int, shape: dict) -> dict:
    keep_freed_memory()
    cpu = torch.device("cpu")
    group = dist.group.WORLD
    kinds = {}
    events = {}
    difference = {}
    trainers = {}

    def both(run) -> float:
        dist.barrier()
        return timed(lambda: (run(), dist.barrier()))

    for m in (8, 4):
        dataset = Random(m, shape["seq_length"], V)
        one = train.Trainer(train.Config(**shape, global_batch_size=m), cpu, Groups())

        def alone(one=one, dataset=dataset) -> float:
            dist.barrier()
            seconds = (
                timed(lambda: (one.forward_backward(1, dataset), one.update(1)))
                if rank == 0
                else 0.0
            )
            dist.barrier()
            return seconds

        kinds["one", m] = alone
        for name, flags in LAYOUTS.items():
            t = trainers[name, m] = train.Trainer(
                train.Config(**shape, global_batch_size=m, pp=P, **flags), cpu, Groups(pp=group)
            )

            def step(t=t, name=name, m=m, dataset=dataset) -> float:
                seconds = both(lambda: (t.forward_backward(1, dataset), t.update(1)))
                events.setdefault((name, m), []).append(t.model.events)
                return seconds

            kinds[name, m] = step
    for name in ("1f1b", "interleaved v=2"):
        t = trainers[name, 8]
        dataset = Random(8, shape["seq_length"], V)
        theirs = torch_pipeline(t, 8, dataset)
        loss = theirs()
        expected = [p.main_grad.clone() for chunk in t.stages for p in chunk.parameters()]
        part = t.forward_backward(1, dataset).item()
        found = [p.main_grad for chunk in t.stages for p in chunk.parameters()]
        difference[name] = max(
            [abs(part - loss) / max(1e-9, abs(loss)) if rank == P - 1 else 0.0]
            + [
                ((a - b).abs().max() / b.abs().max()).item()
                for a, b in zip(found, expected)
                if b.abs().max() > 1e-6
            ]
        )
        kinds["ours", name] = lambda t=t, dataset=dataset: both(
            lambda: t.forward_backward(1, dataset)
        )
        kinds["torch", name] = lambda theirs=theirs: both(theirs)
    return {
        "times": report.in_turn(kinds, rounds),
        "events": {k: v[-rounds:] for k, v in events.items()},
        "difference": difference,
    }


def rounds_of(mine: list[dict], name: str, m: int) -> list[list[Event]]:
    """The events of all ranks, round by round."""
    return [
        [e for rank in mine for e in rank["events"][name, m][i]]
        for i in range(len(mine[0]["events"][name, m]))
    ]


def typical_round(panels: list[list[list[Event]]]) -> int:
    """The round in which the lengths of several schedules' steps are together nearest to their
    medians."""
    lengths = [
        [max(e.end for e in events) - min(e.start for e in events) for events in panel]
        for panel in panels
    ]
    return min(
        range(len(panels[0])), key=lambda i: sum(abs(row[i] / median(row) - 1) for row in lengths)
    )


def bubbles(mine: list[dict], name: str, m: int) -> tuple[float, float]:
    """(measured, the median over rounds; simulated from the measured costs), as fractions of the
    ideal time."""
    per_round = rounds_of(mine, name, m)
    v = 1 + max(e.chunk for e in per_round[0])
    seconds = {}
    for one in per_round:
        for e in one:
            seconds.setdefault((e.op, e.chunk * P + e.rank), []).append(e.end - e.start)
    stages = range(P * v)

    def cost(op):
        return [median(seconds[op, s]) for s in stages]

    zb = ("I", 0) in seconds
    flags = LAYOUTS[name]
    costs = Cost(cost("F"), cost("I") if zb else cost("B"), cost("W") if zb else [0.0] * (P * v))
    schedule = schedules.make(flags.get("schedule", "interleaved"), P, m, v)
    return median([schedules.bubble(events) for events in per_round]), schedules.bubble(
        schedules.simulate(schedule, costs, v)
    )


def draw_bubbles(path: Path, stages: tuple[int, ...]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(stages), figsize=(4.3 * len(stages), 3.6), layout="constrained"
    )
    for axes, p in zip(panels, stages):
        ms = [p * k for k in (1, 2, 4, 8)]
        for name, v in (
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved", 2),
            ("interleaved", 4),
            ("zb-h1", 1),
        ):
            values = [
                schedules.bubble(
                    schedules.simulate(schedules.make(name, p, m, v), Cost(1 / v, 1 / v, 1 / v), v)
                )
                for m in ms
            ]
            axes.plot(
                ms,
                values,
                "os^vd"[
                    [
                        ("gpipe", 1),
                        ("1f1b", 1),
                        ("interleaved", 2),
                        ("interleaved", 4),
                        ("zb-h1", 1),
                    ].index((name, v))
                ],
                label=f"{name}{f', v = {v}' if v > 1 else ''}",
                markersize=5,
            )
        for v in (1, 2, 4):
            axes.plot(
                ms,
                [(p - 1) / (v * m) for m in ms],
                "k-",
                linewidth=0.6,
                label="(p-1)/(v m), the paper" if v == 1 else None,
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="micro-batches m",
            ylabel="bubble / ideal time",
            title=f"p = {p}",
        )
        axes.set_xticks(ms, ms)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = report.parse(parser)
    shape, rounds = (TOY, 1) if args.toy else (SHAPE, args.rounds)
    mine = ranks.run(on_rank, P, rounds, shape)
    times = mine[0]["times"]
    results = {"schedules": {}, "torch": {}}
    print(
        f"{'schedule':<17}{'m':>2}{'tokens/s':>10}{'over one rank':>24}{'bubble: measured':>18}{'simulated':>11}{'formula':>9}"
        "  in flight"
    )
    for m in (8, 4):
        for name, flags in LAYOUTS.items():
            measured, simulated = bubbles(mine, name, m)
            v = flags.get("virtual_stages", 1)
            kind = flags.get("schedule", "interleaved")
            over = spread([t["one", m] / t[name, m] for t in times])
            row = results["schedules"][f"{name}, m={m}"] = {
                "tokens_per_second": m * shape["seq_length"] / median([t[name, m] for t in times]),
                "over_one_rank": over,
                "over_1f1b_step_time": spread([t[name, m] / t["1f1b", m] for t in times]),
                "bubble_measured": measured,
                "bubble_simulated": simulated,
                "bubble_formula": schedules.bubble_formula(kind, P, m, v),
                "in_flight": schedules.in_flight(schedules.make(kind, P, m, v)),
                "owed": schedules.deferred_weight_gradients(schedules.make(kind, P, m, v)),
            }
            print(
                f"{name:<17}{m:>2}{row['tokens_per_second']:>10,.0f}{over['median']:>10.2f}"
                f" ({over['min']:.2f} to"
                f" {over['max']:.2f}){100 * measured:>17.1f}%{100 * simulated:>10.1f}%{100 * row['bubble_formula']:>8.1f}%"
                f"  {row['in_flight']}"
            )
    inter = results["schedules"]["interleaved v=2, m=4"]["over_1f1b_step_time"]
    print(
        f"m = 4: interleaved v = 2 takes {inter['median']:.3f} ({inter['min']:.3f} to"
        f" {inter['max']:.3f}) of 1F1B's step time"
    )
    for name in ("1f1b", "interleaved v=2"):
        ratio = results["torch"][name] = spread(
            [t["ours", name] / t["torch", name] for t in times]
        ) | {"largest_relative_difference": max(r["difference"][name] for r in mine)}
        print(
            f"torch.distributed.pipelining, {name}: our step time over theirs {ratio['median']:.3f}"
            f" ({ratio['min']:.3f} to {ratio['max']:.3f}); loss and gradients differ by at most"
            f" {ratio['largest_relative_difference']:.1e}"
        )
    torch.set_num_threads(1)
    report.save("pipeline", results, args)
    panels = {name: rounds_of(mine, name, 8) for name in ("1f1b", "interleaved v=2", "zb-h1")}
    i = typical_round(list(panels.values()))
    schedules.plot(
        {f"{name}, p = {P}, m = 8, measured": panel[i] for name, panel in panels.items()},
        args.figures / "pipeline_schedules.png",
    )
    draw_bubbles(args.figures / "pipeline_bubble.png", (2, 4) if args.toy else (4, 8, 64))


if __name__ == "__main__":
    main()
