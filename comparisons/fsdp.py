"""Stage 3 beside torch.distributed.fsdp.fully_shard: the same model, batches and optimizer on the
same two ranks, in turn, in one run.

    python comparisons/fsdp.py [--rounds 25] [--toy] [--out DIR]

Every layer, the embedding and the head are units in both, and are dropped after forward. Step:
forward, backward, clipping by the global norm, AdamW. Peak bytes are those that PyTorch's allocator
handed out for tensors, by its profiler, each kind in processes of its own, from building the model
to the end of the second step; what gloo allocates inside is in neither. The figure is of one of our
steps on rank 0. (Llama's block, h 512, L 6, a 8, ffn 1376, s 256, V 8192, 4 sequences a rank, fp32,
one thread a rank)"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch
import torch.distributed as dist
from report import spread, timed
from single_device import Random
from torch.distributed.fsdp import fully_shard

import fsdp
import gpt
import sharding
import train
from lessons import ranks
from runtime.world import Groups, keep_freed_memory

SHAPE = dict(
    model="llama2-7b",
    num_layers=6,
    hidden_size=512,
    num_heads=8,
    ffn_hidden_size=1376,
    seq_length=256,
    vocab_size=8192,
    precision="fp32",
)
TOY = SHAPE | dict(num_layers=2, hidden_size=64, ffn_hidden_size=176, seq_length=32, vocab_size=512)
# a rank
SEQUENCES = 4


class Ours:
    def __init__(self, shape: dict):
        config = train.Config(
            **shape, zero_stage=3, global_batch_size=2 * SEQUENCES, warmup_steps=0, steps=10**9
        )
        self.trainer = train.Trainer(config, torch.device("cpu"), Groups(dp=dist.group.WORLD))
        self.dataset = Random(2 * SEQUENCES, shape["seq_length"], shape["vocab_size"])

    def step(self) -> float:
        loss = self.trainer.forward_backward(1, self.dataset)
        self.trainer.update(1)
        # this rank's part of the mean
        return loss.item() * 2


class Theirs:
    """The same steps, by torch's own parts."""

    def __init__(self, shape: dict):
        config = train.Config(**shape)
        with torch.device("meta"):
            model = gpt.GPT(config.model_config())
        sharding.init(model, 0, "cpu", torch.float32)
        for layer in (model.embedding, *model.blocks.values(), model.head, model):
            fully_shard(layer, reshard_after_forward=True)
        groups = [
            {
                "params": [p for p in model.parameters() if (p.dim() > 1) == decays],
                "weight_decay": 0.1 * decays,
            }
            for decays in (True, False)
        ]
        self.model = model
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        rank = dist.get_rank()
        self.batch = Random(2 * SEQUENCES, shape["seq_length"], shape["vocab_size"]).batch(
            range(rank * SEQUENCES, (rank + 1) * SEQUENCES)
        )

    def step(self) -> float:
        # theirs averages over ranks
        loss = self.model(self.batch.tokens, self.batch.targets).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


KINDS = {"ours": Ours, "theirs": Theirs}


def peak_bytes(rank: int, kind: str, shape: dict) -> int:
    """The most that was allocated for tensors at any time."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        trainer = KINDS[kind](shape)
        for _ in range(2):
            trainer.step()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    return max(e["args"]["Total Allocated"] for e in events if e["name"] == "[memory]")


def on_rank(rank: int, rounds: int, shape: dict):
    keep_freed_memory()
    trainers = {kind: make(shape) for kind, make in KINDS.items()}
    losses = {kind: [] for kind in KINDS}

    def step(kind: str) -> float:
        dist.barrier()
        return timed(lambda: (losses[kind].append(trainers[kind].step()), dist.barrier()))

    times = report.in_turn({kind: lambda kind=kind: step(kind) for kind in KINDS}, rounds)
    return times, losses, time_line(trainers["ours"])


def time_line(ours: Ours) -> list[tuple[str, int, float, float]]:
    """(what, unit, start, end) in one step: each layer's forward and backward, from when its
    parameters are there until the next are asked for; collectives from their call to their end."""
    sharder = ours.trainer.gradients[0]
    events = []
    asked = []
    unit_of_call = []
    number = {unit: i for i, unit in enumerate(sharder.units)}

    class Noted:
        """A collective that notes its end: an all-gather's own; of a reduce-scatter, whose end gloo
        does not tell, the end of the wait for it."""

        def __init__(self, what, work):
            self.work = work
            self.event = (what, unit_of_call[-1], time.perf_counter())
            if what == "all-gather":
                work.get_future().add_done_callback(
                    lambda _: events.append((*self.event, time.perf_counter()))
                )

        def wait(self):
            self.work.wait()
            if self.event[0] == "reduce-scatter":
                events.append((*self.event, time.perf_counter()))

    def noted(what, collective):
        return lambda *args, **options: Noted(what, collective(*args, **options))

    def for_unit(method):
        return lambda unit: (unit_of_call.append(number[unit]), method(unit))

    def gather(now, soon, original=sharder.gather):
        start = time.perf_counter()
        original(now, soon)
        asked.append((number[now[0]], start, time.perf_counter()))

    def reduce_gradients(original=sharder.reduce_gradients):
        asked.append((None, time.perf_counter(), None))
        original()

    changed = {
        "start": for_unit(sharder.start),
        "reduce": for_unit(sharder.reduce),
        "gather": gather,
        "reduce_gradients": reduce_gradients,
    }
    originals = fsdp.all_gather, fsdp.reduce_scatter
    fsdp.all_gather = noted("all-gather", fsdp.all_gather)
    fsdp.reduce_scatter = noted("reduce-scatter", fsdp.reduce_scatter)
    sharder.__dict__.update(changed)
    dist.barrier()
    begin = time.perf_counter()
    ours.step()
    fsdp.all_gather, fsdp.reduce_scatter = originals
    for name in changed:
        del sharder.__dict__[name]
    for k, ((unit, _, start), (_, end, _)) in enumerate(zip(asked, asked[1:])):
        events.append(("forward" if k < len(number) else "backward", unit, start, end))
    return [(what, unit, start - begin, end - begin) for what, unit, start, end in events]


def hidden(events, what: str) -> float:
    """The share of a collective's time that passed while a layer computed."""
    computing = [(start, end) for kind, _, start, end in events if kind in ("forward", "backward")]
    flights = [(start, end) for kind, _, start, end in events if kind == what]
    return sum(
        max(0, min(e, end) - max(s, start)) for s, e in flights for start, end in computing
    ) / sum(e - s for s, e in flights)


def draw(events, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = {
        "compute": ("forward", "backward"),
        "all-gather": ("all-gather",),
        "reduce-scatter": ("reduce-scatter",),
    }
    colours = {
        "forward": "#4c78a8",
        "backward": "#59a14f",
        "all-gather": "#f2b447",
        "reduce-scatter": "#b07aa1",
    }
    last = max(unit for _, unit, _, _ in events)
    figure, axes = plt.subplots(figsize=(10, 2.2), layout="constrained")
    for y, (row, kinds) in enumerate(rows.items()):
        for what, unit, start, end in events:
            if what in kinds:
                axes.barh(
                    -y,
                    (end - start) * 1e3,
                    left=start * 1e3,
                    height=0.7,
                    color=colours[what],
                    edgecolor="white",
                    linewidth=0.5,
                )
                axes.text(
                    (start + end) / 2 * 1e3,
                    -y,
                    "E" if unit == 0 else "H" if unit == last else unit - 1,
                    ha="center",
                    va="center",
                    fontsize=7,
                    clip_on=True,
                )
    axes.set(
        yticks=[-y for y in range(len(rows))],
        yticklabels=rows,
        xlabel="ms",
        title="A stage-3 step on rank 0: E embedding, 0 .. blocks, H head",
    )
    figure.savefig(path, dpi=150)


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    args = report.parse(parser)
    shape, rounds = (TOY, 1) if args.toy else (SHAPE, args.rounds)
    peaks = {kind: max(ranks.run(peak_bytes, 2, kind, shape)) for kind in KINDS}
    times, losses, events = ranks.run(on_rank, 2, rounds, shape)[0]
    # what the ranks had, for the record
    torch.set_num_threads(1)
    results = {
        "step_seconds": {kind: spread([t[kind] for t in times]) for kind in KINDS},
        "step_time_over_fully_shard": spread([t["ours"] / t["theirs"] for t in times]),
        "peak_tensor_bytes": peaks,
        "peak_over_fully_shard": peaks["ours"] / peaks["theirs"],
        "first_and_last_loss": {kind: (x[0], x[-1]) for kind, x in losses.items()},
        "in_flight_while_computing": {
            what: hidden(events, what) for what in ("all-gather", "reduce-scatter")
        },
    }
    report.save("fsdp", results | {"time_line": events}, args)
    draw(events, args.figures / "fsdp_time_line.png")
    for name, value in results.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
