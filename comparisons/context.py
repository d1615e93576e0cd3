"""Context parallelism, measured: work by rank, bytes sent, memory against the length of a sequence,
and speed beside one rank.

    python comparisons/context.py [work bytes memory speed] [--rounds 9] [--toy] [--out DIR]

work      processor seconds of each rank's attention, forward and backward, of a sequence cut in
          zigzag and cut in order, beside the formula. The ranks run one after the other, in one
          process, without messages.
bytes     what one layer sends in forward and backward, counted, beside the formula
memory    what one layer keeps for backward, and the most that a step holds above weights,
          gradients and optimizer state, on 1, 2 and 4 ranks
speed     a training step of two ranks with one thread each, beside one rank alone, in turn; and the
          time line of a step

Parts that are not named stay as they are in context.json. An order of pieces is patched in here:
the ring of other repositories gives rank r the r-th part of the sequence.

Shape of work and speed: GPT, h 512, L 4, a 8, s 4096, b 1, V 257, fp32.

Figures: figures/context.svg and figures/context_time_line.svg
"""

import contextlib
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import style
import torch
import torch.distributed as dist
from report import format_spread, median, spread
from single_device import Random
from torch import Tensor, nn

import context_parallel
import gpt
import recompute
import sharding
import train
from attention import ring_attention
from base.world import Groups, keep_freed_memory
from lessons import demo
from model_config import GPTConfig
from proof import ranks

SHAPE = dict(
    model="gpt2",
    dropout=0.0,
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    seq_length=4096,
    vocab_size=257,
    precision="fp32",
    global_batch_size=1,
    micro_batch_size=1,
)
TOY = SHAPE | dict(num_layers=2, hidden_size=32, num_heads=4, seq_length=64)
# of `memory`
SMALL = SHAPE | dict(num_layers=2, hidden_size=256, num_heads=4)
LENGTHS = (1024, 2048, 4096, 8192)
TOY_LENGTHS = (64,)
# of `work`
SIZES = (2, 4)
# of `bytes`: key heads
KEY_HEADS = (8, 2)

# --------------------------------------------------------------------------------------------------
# cut in order: rank r has the r-th of N parts


class InOrder(ring_attention.Blocks):
    """What meets what where rank r has part r: nothing of later ranks' keys."""

    def meeting(self, source: int, q: Tensor) -> ring_attention.Block:
        queries = visible = None
        if source > self.rank:
            # no query at all; no kernel takes so few
            queries = q.shape[2]
            visible = torch.ones(1, 1, 0, q.shape[2], dtype=torch.bool)
        rows = slice(queries, None)
        return ring_attention.Block(rows, slice(None), source == self.rank, visible, None, 1.0)


def own_part(s: int, rank: int, n: int, device=None) -> Tensor:
    """In the place of `own_positions`."""
    return torch.arange(rank * s // n, (rank + 1) * s // n, device=device)


def shard_in_order(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """In the place of context_parallel.shard."""
    return x.chunk(group.size(), dim)[group.rank()]


@contextlib.contextmanager
def cut_in_order():
    """While entered, sequences are cut in order, not in zigzag."""
    with contextlib.ExitStack() as stack:
        for module, name, other in (
            (ring_attention, "Blocks", InOrder),
            (ring_attention, "own_positions", own_part),
            (context_parallel, "own_positions", own_part),
            (context_parallel, "shard", shard_in_order),
        ):
            stack.enter_context(mock.patch.object(module, name, other))
        yield


CUTTINGS = {"zigzag": contextlib.nullcontext, "in order": cut_in_order}

# --------------------------------------------------------------------------------------------------
# work


class Rank:
    """What a block asks of a process group, where there are no other processes."""

    def __init__(self, rank: int, n: int):
        self.rank = lambda: rank
        self.size = lambda: n


def work(cutting: str, rank: int, n: int) -> float:
    """A rank's share of the work of causal attention, times n: 1 is an even share. Of pairs of
    pieces, those on the diagonal are half the work."""
    if cutting == "zigzag":
        return 1.0
    return (2 * rank + 1) / n


def attention_seconds(cutting: str, rank: int, n: int, shape: dict) -> float:
    """Processor seconds of this rank's blocks, forward and backward."""
    s, a = shape["seq_length"], shape["num_heads"]
    size = (1, s // n, a, shape["hidden_size"] // a)
    q, k, v, grad = (torch.randn(size).transpose(1, 2) for _ in range(4))
    kv = torch.stack((k, v))
    log_sum = torch.ones(*q.shape[:3], 1)
    with CUTTINGS[cutting]():
        core = ring_attention.RingAttention(Rank(rank, n), None)
        blocks = ring_attention.Blocks(core, gpt.PLAIN, s)
        start = time.process_time()
        for source in range(n):
            block = blocks.meeting(source, q)
            rows = [x[:, :, block.queries] for x in (q, log_sum, grad)]
            ring_attention.attend(rows[0], *kv[..., block.keys, :], block)
            ring_attention.through(block, kv, rows[0], *rows)
        return time.process_time() - start


def measure_work(rank: int, shape: dict, rounds: int) -> list[dict]:
    """A row for each cutting, N and rank."""
    keep_freed_memory()
    keys = [(c, n, r) for n in SIZES for c in CUTTINGS for r in range(n)]
    kinds = {key: lambda key=key: attention_seconds(key[0], key[2], key[1], shape) for key in keys}
    times = report.in_turn(kinds, rounds)
    rows = []
    for cutting, n, r in keys:
        even = [sum(t["zigzag", n, other] for other in range(n)) / n for t in times]
        rows.append(
            {
                "cutting": cutting,
                "N": n,
                "rank": r,
                "formula": work(cutting, r, n),
                "seconds": spread([t[cutting, n, r] for t in times]),
                "over_even_share": spread([t[cutting, n, r] / e for t, e in zip(times, even)]),
            }
        )
    return rows


def work_part(shape: dict, rounds: int) -> dict:
    rows = ranks.run(measure_work, 1, shape, rounds, limit=3600)[0]
    for row in rows:
        measured = format_spread(row["over_even_share"], ".2f")
        print(
            f"N {row['N']}, {row['cutting']:<9} rank {row['rank']}: {row['formula']:.2f} of an even"
            f" share by formula, {measured} measured"
        )
    return {"rows": rows}


# --------------------------------------------------------------------------------------------------
# one layer on this rank: its bytes sent, its bytes kept


def layer(shape: dict, kind: str, **changes):
    """(forward and a tensor to start backward with, parameters) of a layer on this rank."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    config = GPTConfig(
        num_layers=1,
        hidden_size=shape["hidden_size"],
        num_heads=shape["num_heads"],
        seq_length=shape["seq_length"],
        vocab_size=64,
        **changes,
    )
    model = demo.meta_model(config)
    context_parallel.apply(model, group, kind)
    sharding.init(model, 0, "cpu", torch.float32)
    block: nn.Module = model.blocks["0"]
    tokens = config.seq_length // dist.get_world_size()
    x = torch.randn(1, tokens, config.hidden_size).requires_grad_()
    return lambda: block(x), list(block.parameters())


def bytes_formula(kind: str, n: int, b: int, s: int, h: int, k: float, x: int) -> dict:
    """What a rank sends in a layer's forward and backward (context_parallel.py). k: a_kv / a; x:
    bytes of a number."""
    if kind == "ring":
        forward = 2 * k * (n - 1) * b * s * h * x / n
        # keys and values again, and their gradients, of at least 4 bytes a number
        return {"forward": forward, "backward": forward + forward * max(x, 4) / x}
    forward = (2 + 2 * k) * (n - 1) * b * s * h * x / n**2
    return {"forward": forward, "backward": forward}


def sent_bytes(noted: ranks.Collectives, n: int) -> float:
    """What this rank sent in noted collectives."""
    factors = {"send": 1, "all-to-all": (n - 1) / n}
    return sum(size * factors.get(name, 0) for name, size in noted.calls)


def count_bytes(rank: int, shape: dict, kind: str, key_heads: int) -> dict:
    """{direction: bytes that this rank sends in one layer}"""
    run, _ = layer(shape, kind, num_kv_heads=key_heads)
    n = dist.get_world_size()
    with ranks.Collectives() as forward:
        y = run()
    with ranks.Collectives() as backward:
        y.sum().backward()
    return {"forward": sent_bytes(forward, n), "backward": sent_bytes(backward, n)}


def bytes_part(shape: dict, toy: bool) -> dict:
    shape = shape | dict(seq_length=shape["seq_length"] // 4)
    s, h, a = (shape[name] for name in ("seq_length", "hidden_size", "num_heads"))
    rows = []
    for n in SIZES[:1] if toy else SIZES:
        for kind in context_parallel.KINDS:
            for heads in (a,) if toy else KEY_HEADS:
                if kind == "all-to-all" and heads % n:
                    continue
                counted = ranks.run(count_bytes, n, shape, kind, heads, timeout=600)
                formula = bytes_formula(kind, n, 1, s, h, heads / a, 4)
                rows.append(
                    {"kind": kind, "N": n, "a_kv": heads, "formula": formula, "by_rank": counted}
                )
                same = all(c == formula for c in counted)
                print(f"N {n}, {kind}, {heads} key heads: {formula}; every rank the same: {same}")
    exact = all(c == row["formula"] for row in rows for c in row["by_rank"])
    return {"shape": dict(s=s, h=h, a=a, b=1), "rows": rows, "exact": exact}


# --------------------------------------------------------------------------------------------------
# memory


def held_bytes(rank: int, shape: dict, kind: str) -> dict:
    """kept: for backward, by one layer on this rank; peak: the most that a step holds"""
    run, parameters = layer(shape, kind)
    kept = recompute.saved_bytes(run, *parameters)
    return {"kept": kept, "peak": peak_bytes(shape, kind)}


def peak_bytes(shape: dict, kind: str) -> int:
    """The most that forward and backward of a step hold above what is there before."""
    trainer, dataset = build(shape, kind)
    trainer.forward_backward(1, dataset)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        trainer.forward_backward(1, dataset)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    before = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    return max(e["args"]["Total Allocated"] for e in memory) - before


def memory_part(toy: bool) -> dict:
    shape = (TOY if toy else SMALL) | dict(num_layers=2)
    rows = []
    for s in TOY_LENGTHS if toy else LENGTHS:
        one = None
        for n in (1, 2) if toy else (1, 2, 4):
            kinds = ("ring",) if toy or n == 1 else context_parallel.KINDS
            for kind in kinds:
                of_length = shape | dict(seq_length=s)
                row = {"s": s, "N": n, "kind": kind if n > 1 else "one rank"}
                held = ranks.run(held_bytes, n, of_length, kind, timeout=600)
                for name in ("kept", "peak"):
                    row[name] = max(h[name] for h in held)
                one = one or row
                for name in ("kept", "peak"):
                    row[f"{name}_over_even_share"] = row[name] * n / one[name]
                rows.append(row)
                print(
                    f"s {s}, N {n}, {row['kind']}: one layer keeps {row['kept']:,},"
                    f" {row['kept_over_even_share']:.3f} of 1/N of one rank's; a step holds at most"
                    f" {row['peak']:,}, {row['peak_over_even_share']:.3f}"
                )
    return {"shape": shape, "rows": rows}


# --------------------------------------------------------------------------------------------------
# speed


def build(shape: dict, kind: str | None):
    """(Trainer, dataset) of this rank; kind: None, of one rank alone."""
    n = dist.get_world_size() if kind else 1
    groups, flags = Groups(), {}
    if n > 1:
        groups = Groups(cp=dist.group.WORLD, replicas=dist.group.WORLD)
        flags = dict(cp=n, cp_kind=kind)
    trainer = train.Trainer(train.Config(**shape, **flags), torch.device("cpu"), groups)
    return trainer, Random(1, shape["seq_length"], shape["vocab_size"])


class Silent(ring_attention.Ring):
    """A ring without messages: a rank gets what it has. What is timed is the computation alone."""

    def start(self, x: Tensor) -> None:
        self.received = x.clone()

    def wait(self) -> Tensor:
        return self.received


class Measured:
    """Steps of one kind on this rank: their losses, and their processor seconds, in which no rank
    waits."""

    def __init__(self, shape: dict, kind: str | None, *contexts):
        self.contexts = contexts
        self.losses = []
        self.processor = []
        with self.entered():
            self.trainer, self.dataset = build(shape, kind)

    @contextlib.contextmanager
    def entered(self):
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            yield

    def step(self) -> None:
        start = time.process_time()
        with self.entered():
            loss = self.trainer.forward_backward(1, self.dataset)
            self.trainer.update(1)
        self.losses.append(loss.item())
        self.processor.append(time.process_time() - start)


def silent_ring():
    return mock.patch.object(ring_attention, "Ring", Silent)


def on_rank(rank: int, rounds: int, shape: dict) -> dict:
    """times: {kind: seconds}, round by round; processor: {kind: seconds of a step}; losses: {kind:
    of the first step, this rank's part}; events: {cutting: time line of a step}"""
    keep_freed_memory()
    one = Measured(shape, None)
    steps = {
        "ring": Measured(shape, "ring"),
        "all-to-all": Measured(shape, "all-to-all"),
        "in order": Measured(shape, "ring", cut_in_order),
        "silent": Measured(shape, "ring", silent_ring, report.without_all_reduce),
        # each rank its own sequence: what the machine has to give
        "apart": one,
    }
    kinds = {"one": lambda: report.timed_alone(one.step)}
    for name, measured in steps.items():
        kinds[name] = lambda run=measured.step: report.timed_together(run)
    times = report.in_turn(kinds, rounds)
    events = {
        "zigzag": recorded(steps["ring"]),
        "in order": recorded(steps["in order"]),
    }
    return {
        "times": times,
        "processor": {name: median(measured.processor) for name, measured in steps.items()},
        "losses": {name: measured.losses[0] for name, measured in steps.items()},
        "events": events,
    }


# --- the time line of a step: (what, direction, start, end), in seconds


class Recorder:
    """While entered, notes when blocks compute and when messages are on their way."""

    def __init__(self):
        self.events = []

    def __enter__(self):
        forward = self.timed("forward", ring_attention.attend)
        backward = self.timed("backward", ring_attention.through)
        self.patches = [
            mock.patch.object(ring_attention, "attend", forward),
            mock.patch.object(ring_attention, "through", backward),
            mock.patch.object(ring_attention, "Ring", self.ring()),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *exception):
        for patch in self.patches:
            patch.stop()

    def note(self, what: str, start: float) -> None:
        self.events.append((what, start, time.perf_counter()))

    def timed(self, what: str, function):
        def call(*args):
            start = time.perf_counter()
            result = function(*args)
            self.note(what, start)
            return result

        return call

    def ring(self):
        recorder = self

        class TimedRing(ring_attention.Ring):
            """A thread waits for each message, for gloo does not tell when one arrives."""

            def start(self, x: Tensor) -> None:
                begin = time.perf_counter()
                super().start(x)
                works, self.works = self.works, []
                what = "gradients" if self.tag else "keys and values"

                def finish():
                    for work in works:
                        work.wait()
                    recorder.note(what, begin)

                self.waiter = threading.Thread(target=finish)
                self.waiter.start()

            def wait(self) -> Tensor:
                self.waiter.join()
                return super().wait()

        return TimedRing


def recorded(measured: Measured) -> list[tuple[str, float, float]]:
    """The events of one step, by this machine's clock."""
    with Recorder() as recorder:
        dist.barrier()
        measured.step()
    return sorted(recorder.events, key=lambda event: event[1])


MESSAGES = ("keys and values", "gradients")


def hidden(events: list, what: str) -> float:
    """The share of messages' time that passed while a block computed."""
    computing = [(start, end) for kind, start, end in events if kind in ("forward", "backward")]
    messages = [(start, end) for kind, start, end in events if kind == what]
    overlap = sum(
        max(0, min(last, end) - max(first, start))
        for first, last in messages
        for start, end in computing
    )
    return overlap / sum(last - first for first, last in messages)


def speed_part(shape: dict, rounds: int) -> dict:
    measured = ranks.run(on_rank, 2, rounds, shape, timeout=600, limit=7200)
    times = measured[0]["times"]
    one_loss = measured[0]["losses"]["apart"]
    results = {"shape": shape, "tokens_per_second": {}, "share_of_twice": {}, "loss_difference": {}}
    for kind in times[0]:
        seconds = median([t[kind] for t in times])
        sequences = 2 if kind == "apart" else 1
        results["tokens_per_second"][kind] = sequences * shape["seq_length"] / seconds
        if kind != "one":
            share = spread([t["one"] / t[kind] * sequences / 2 for t in times])
            results["share_of_twice"][kind] = share
            print(f"{kind:<11} {format_spread(share)} of twice one rank's tokens/s")
        if kind in ("ring", "all-to-all", "in order"):
            loss = sum(m["losses"][kind] for m in measured)
            results["loss_difference"][kind] = abs(loss - one_loss) / one_loss
    # of the rank that has most; "apart" is a whole sequence
    results["processor_seconds"] = {
        kind: max(m["processor"][kind] for m in measured) for kind in measured[0]["processor"]
    }
    results["ring_over_in_order"] = spread([t["in order"] / t["ring"] for t in times])
    print(f"ring over cut in order: {format_spread(results['ring_over_in_order'])}")
    print(f"processor seconds of the busiest rank: {results['processor_seconds']}")
    print(f"relative difference of the first loss: {results['loss_difference']}")
    results["time_line"] = {}
    for cutting in CUTTINGS:
        by_rank = [m["events"][cutting] for m in measured]
        begin = min(start for events in by_rank for _, start, _ in events)
        by_rank = [[(w, x - begin, y - begin) for w, x, y in events] for events in by_rank]
        results["time_line"][cutting] = by_rank
    results["hidden"] = {
        what: [hidden(events, what) for events in results["time_line"]["zigzag"]]
        for what in MESSAGES
    }
    print(f"share of messages' time while a block computes, by rank: {results['hidden']}")
    return results


# --------------------------------------------------------------------------------------------------
# drawn

COLOURS = {
    "forward": style.COLOURS["F"],
    "backward": style.COLOURS["B"],
    "keys and values": style.COLOURS["weights"],
    "gradients": style.COLOURS["gradients"],
    "zigzag": style.SERIES[0],
    "in order": style.SERIES[1],
}
NAMES = {
    "ring": "ring, zigzag",
    "all-to-all": "all-to-all",
    "in order": "ring, cut in order",
    "silent": "ring without messages",
    "apart": "two ranks apart",
}


def draw_work(axes, rows: list[dict]) -> None:
    """A bar of measured work for each rank, and a mark where the formula is."""
    n = max(row["N"] for row in rows)
    for i, cutting in enumerate(CUTTINGS):
        found = [row for row in rows if (row["N"], row["cutting"]) == (n, cutting)]
        at = [row["rank"] + 0.4 * i - 0.2 for row in found]
        measured = [row["over_even_share"]["median"] for row in found]
        axes.bar(at, measured, width=0.36, color=COLOURS[cutting], label=cutting)
        axes.plot(at, [row["formula"] for row in found], "k_", markersize=11)
    axes.set(title=f"Work of a rank, N = {n}", ylabel="times an even share", xlabel="rank")
    axes.set_xticks(range(n))
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper left")


def draw_memory(axes, rows: list[dict]) -> None:
    """What a step holds, against s: a line for each number of ranks."""
    lengths = sorted({row["s"] for row in rows})
    sizes = sorted({row["N"] for row in rows})
    for n, colour in zip(sizes, style.SERIES):
        found = [row for row in rows if row["N"] == n and row["kind"] != "all-to-all"]
        mib = [row["peak"] / 2**20 for row in found]
        axes.plot(lengths, mib, "o-", color=colour, label=f"cp {n}" if n > 1 else "one rank")
    axes.set(title="Memory of a step", xlabel="tokens of a sequence", ylabel="MiB")
    axes.set(xscale="log", yscale="log", xticks=lengths, xticklabels=lengths)
    axes.minorticks_off()
    ticks = [2**k for k in range(-4, 12) if axes.get_ylim()[0] < 2**k < axes.get_ylim()[1]]
    axes.set_yticks(ticks, ticks)
    style.label_ends(axes)


def draw_speed(axes, shares: dict) -> None:
    for y, kind in enumerate(NAMES):
        colour = COLOURS["in order" if kind == "in order" else "zigzag"]
        style.ranges(axes, [y], [shares[kind]], colour if y < 3 else style.COLOURS["one device"])
        style.label(
            axes, f"{shares[kind]['median']:.2f}", (shares[kind]["median"], y), offset=(-9, 9)
        )
    style.rows_of(axes, list(NAMES.values()))
    axes.axvline(0.85, color="black", linestyle="--", linewidth=1, zorder=0.5)
    axes.set(title="Speed of two ranks", xlabel="share of twice one rank's")


def one_attention(events: list, direction: str) -> tuple[float, float]:
    """(begin, end) of the second layer's attention in this direction."""
    starts = [(start, end) for what, start, end in events if what == direction]
    # two blocks of each layer
    (begin, _), (_, end) = starts[2:4]
    return begin, end


def bounds(by_rank: list, direction: str) -> tuple[float, float]:
    """(begin, end) of it on the two ranks."""
    begins, ends = zip(*(one_attention(events, direction) for events in by_rank))
    return min(begins), max(ends)


def draw_time_line(axes, by_rank: list, direction: str, seconds: float) -> None:
    """Of one layer's attention, on two ranks: blocks above, messages below. seconds: shown"""
    begin, _ = bounds(by_rank, direction)
    end = begin + seconds
    margin = 0.12 * seconds
    for rank, events in enumerate(by_rank):
        for what, start, last in events:
            if last < begin - margin or start > end + margin:
                continue
            message = what in MESSAGES
            y = 2 * rank + message
            box = dict(height=0.8 if not message else 0.5, edgecolor="white", linewidth=0.5)
            width = 1e3 * (last - start)
            axes.barh(y, width, left=1e3 * (start - begin), color=COLOURS[what], **box)
    axes.set_xlim(-1e3 * margin, 1e3 * (end - begin + margin))
    rows = [f"rank {rank}\n{what}" for rank in range(2) for what in ("blocks", "messages")]
    style.rows_of(axes, rows)


def draw(results: dict, figures: Path) -> None:
    """results: what context.json holds."""
    results = results["results"]
    panels = {
        "work": lambda axes: draw_work(axes, results["work"]["rows"]),
        "memory": lambda axes: draw_memory(axes, results["memory"]["rows"]),
        "speed": lambda axes: draw_speed(axes, results["speed"]["share_of_twice"]),
    }
    measured = [part for part in panels if part in results]
    if measured:
        figure, (row,) = style.figure(3.2, 1, len(measured), squeeze=False)
        for axes, part in zip(row, measured):
            panels[part](axes)
        style.save(figure, figures / "context.svg")
    if "speed" in results:
        draw_time_lines(results["speed"]["time_line"], figures / "context_time_line.svg")


def draw_time_lines(time_line: dict, path: Path) -> None:
    figure, panels = style.figure(3.6, 2, 2, sharex="col", sharey=True)
    for row, (cutting, by_rank) in zip(panels, time_line.items()):
        for axes, direction in zip(row, ("forward", "backward")):
            both = [bounds(x, direction) for x in time_line.values()]
            draw_time_line(axes, by_rank, direction, max(end - begin for begin, end in both))
            axes.set_title(f"{cutting}: {direction} of one layer's attention")
    for axes in panels[-1]:
        axes.set_xlabel("ms")
    figure.suptitle(
        "Measured, two ranks. Messages, from the call to the end: keys and values dark, their"
        " gradients light"
    )
    style.save(figure, path)


PARTS = ("work", "bytes", "memory", "speed")


def main():
    parser = report.arguments(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=9)
    args = report.parse(parser)
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    shape = TOY if args.toy else SHAPE
    rounds = 1 if args.toy else args.rounds
    torch.set_num_threads(1)
    results = report.earlier("context", parser, args)
    measure = {
        "work": lambda: work_part(shape, rounds),
        "bytes": lambda: bytes_part(shape, args.toy),
        "memory": lambda: memory_part(args.toy),
        "speed": lambda: speed_part(shape, rounds),
    }
    for part in args.parts or PARTS:
        results[part] = measure[part]()
        report.write("context", {"toy": args.toy, "results": results}, args, threads=1)
    report.save("context", {"toy": args.toy, "results": results}, args, threads=1)
    draw(report.saved("context", args), args.figures)


if __name__ == "__main__":
    main()
