"""Context parallelism, measured: work by rank, bytes sent, memory against the length of a sequence,
and speed beside one rank.

    python -m benchmarks.context [work bytes memory speed] [--rounds 9] [--toy] [--out DIR]

work      processor seconds of each rank's attention, forward and backward, of a sequence cut in
          zigzag and cut in order, beside the formula. The ranks run one after the other, in one
          process, without messages.
bytes     what one layer sends in forward and backward, counted, beside the formula
memory    what one layer keeps for backward, and the most that a step holds above weights,
          gradients and optimizer state, on 1, 2 and 4 ranks
speed     a training step of two ranks with one thread each, beside one rank alone, in turn; and the
          share of its messages' time that passes while a block computes

Parts that are not named stay as they are in context.json. An order of pieces is patched in here:
the ring of other repositories gives rank r the r-th part of the sequence.

Shape of work and speed: GPT, h 512, L 4, a 8, s 4096, b 1, V 257, fp32.

Figure: docs/figures/context.svg
"""

import contextlib
import itertools
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import context_parallel
import gpt
import sharding
from base import cpu
from base.groups import Groups
from base.model_config import GPTConfig
from benchmarks import report, style, time_line
from benchmarks.report import format_spread, median, spread
from benchmarks.steps import GPT, Steps
from course import demo, ranks
from planning import counters

SHAPE = GPT | dict(seq_length=4096, global_batch_size=1, micro_batch_size=1)
TOY = SHAPE | dict(num_layers=2, hidden_size=32, num_heads=4, seq_length=64)
# The model of the part `memory`.
SMALL = SHAPE | dict(num_layers=2, hidden_size=256, num_heads=4)
LENGTHS = (1024, 2048, 4096, 8192)
# Ranks in the part `work`.
SIZES = (2, 4)
# Key heads in the part `bytes`.
KEY_HEADS = (8, 2)

# --- cut in order: rank r has the r-th of N parts -------------------------------------------------


class InOrder(context_parallel.Blocks):
    """What meets what where rank r has part r: nothing of later ranks' keys."""

    def meeting(self, source: int, q: Tensor) -> context_parallel.Block:
        queries = visible = None
        if source > self.rank:
            # No query at all; no kernel takes so few.
            queries = q.shape[2]
            visible = torch.ones(1, 1, 0, q.shape[2], dtype=torch.bool)
        rows = slice(queries, None)
        return context_parallel.Block(rows, slice(None), source == self.rank, visible, None, 1.0)


def own_part(s: int, rank: int, n: int, device=None) -> Tensor:
    """In the place of `own_positions`."""
    return torch.arange(rank * s // n, (rank + 1) * s // n, device=device)


def shard_in_order(x: Tensor, group: dist.ProcessGroup, dim: int = 1) -> Tensor:
    """In the place of context_parallel.shard."""
    return x.chunk(group.size(), dim)[group.rank()]


@contextlib.contextmanager
def cut_in_order():
    """While entered, sequences are cut in order, not in zigzag."""
    ring = mock.patch.multiple(context_parallel, Blocks=InOrder, own_positions=own_part)
    others = dict(own_positions=own_part, shard=shard_in_order)
    with ring, mock.patch.multiple(context_parallel, **others):
        yield


CUTTINGS = {"zigzag": contextlib.nullcontext, "in order": cut_in_order}

# --- work -----------------------------------------------------------------------------------------


def attention_seconds(cutting: str, rank: int, n: int, shape: dict) -> float:
    """Processor seconds of this rank's blocks, forward and backward."""
    s, a = shape["seq_length"], shape["num_heads"]
    size = (1, s // n, a, shape["hidden_size"] // a)
    q, k, v, grad = (torch.randn(size).transpose(1, 2) for _ in range(4))
    kv = torch.stack((k, v))
    log_sum = torch.ones(*q.shape[:3], 1)
    # A block asks this of a process group; there are no other processes.
    group = SimpleNamespace(rank=lambda: rank, size=lambda: n)
    with CUTTINGS[cutting]():
        core = context_parallel.RingAttention(group, None)
        blocks = context_parallel.Blocks(core, gpt.PLAIN, s)
        start = time.process_time()
        for source in range(n):
            block = blocks.meeting(source, q)
            rows = [x[:, :, block.queries] for x in (q, log_sum, grad)]
            context_parallel.attend(rows[0], *kv[..., block.keys, :], block)
            context_parallel.through(block, kv, rows[0], *rows)
        return time.process_time() - start


def measure_work(rank: int, shape: dict, rounds: int) -> list[dict]:
    """A row for each cutting, N and rank."""
    cpu.set_up()
    keys = [(c, n, r) for n in SIZES for c in CUTTINGS for r in range(n)]
    kinds = {key: partial(attention_seconds, key[0], key[2], key[1], shape) for key in keys}
    times = report.in_turn(kinds, rounds)
    rows = []
    for cutting, n, r in keys:
        # The share of causal attention, times n; pairs of pieces on the diagonal are half the work.
        formula = 1.0 if cutting == "zigzag" else (2 * r + 1) / n
        row = {"cutting": cutting, "N": n, "rank": r, "formula": formula}
        even = [sum(t["zigzag", n, other] for other in range(n)) / n for t in times]
        shares = [t[cutting, n, r] / e for t, e in zip(times, even)]
        row["seconds"] = spread([t[cutting, n, r] for t in times])
        rows.append(row | {"over_even_share": spread(shares)})
    return rows


def work_part(args) -> dict:
    rows = ranks.run(measure_work, 1, TOY if args.toy else SHAPE, args.rounds, limit=3600)[0]
    report.Table(rows)
    return {"rows": rows}


# --- one layer on this rank: its bytes sent, its bytes kept ---------------------------------------


def layer(shape: dict, kind: str, **changes):
    """(forward and a tensor to start backward with, parameters) of a layer on this rank."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    sizes = {name: shape[name] for name in ("hidden_size", "num_heads", "seq_length")}
    config = GPTConfig(num_layers=1, vocab_size=64, **sizes, **changes)
    model = demo.meta_model(config)
    context_parallel.apply(model, group, kind)
    sharding.init(model, 0, "cpu", torch.float32)
    block = model.blocks["0"]
    tokens = config.seq_length // dist.get_world_size()
    x = torch.randn(1, tokens, config.hidden_size).requires_grad_()
    return lambda: block(x), list(block.parameters())


def bytes_formula(kind: str, n: int, b: int, s: int, h: int, k: float, x: int) -> dict:
    """What a rank sends in a layer's forward and backward (context_parallel.py). k: a_kv / a; x:
    bytes of a number."""
    if kind == "ring":
        forward = 2 * k * (n - 1) * b * s * h * x / n
        # Keys and values again, and their gradients, of at least 4 bytes a number.
        return {"forward": forward, "backward": forward + forward * max(x, 4) / x}
    forward = (2 + 2 * k) * (n - 1) * b * s * h * x / n**2
    return {"forward": forward, "backward": forward}


def count_bytes(rank: int, shape: dict, kind: str, key_heads: int) -> dict:
    """{direction: bytes that this rank sends in one layer}"""
    run, _ = layer(shape, kind, num_kv_heads=key_heads)
    n = dist.get_world_size()
    factors = {"send": 1, "all-to-all": (n - 1) / n}
    found = {}
    for direction, calls in demo.layer_calls(run).items():
        found[direction] = sum(size * factors.get(name, 0) for name, size in calls)
    return found


def bytes_part(args) -> dict:
    shape = TOY if args.toy else SHAPE
    s, h, a = shape["seq_length"] // 4, shape["hidden_size"], shape["num_heads"]
    rows, same = [], []
    table = report.Table()
    sizes, key_heads = (SIZES[:1], (a,)) if args.toy else (SIZES, KEY_HEADS)
    for n, kind, heads in itertools.product(sizes, context_parallel.COMM_TYPES, key_heads):
        if kind == "all-to-all" and heads % n:
            continue
        row = {"kind": kind, "N": n, "a_kv": heads}
        row["formula"] = bytes_formula(kind, n, 1, s, h, heads / a, 4)
        of_layer = shape | dict(seq_length=s)
        row["by_rank"] = ranks.run(count_bytes, n, of_layer, kind, heads, timeout=600)
        rows.append(row)
        same.append(all(counted == row["formula"] for counted in row["by_rank"]))
        table.row(row | {"by_rank": f"the same: {same[-1]}"})
    return {"shape": dict(s=s, h=h, a=a, b=1), "rows": rows, "exact": all(same)}


# --- memory ---------------------------------------------------------------------------------------


def held_bytes(rank: int, shape: dict, kind: str) -> dict:
    """kept: for backward, by one layer on this rank; peak: the most that forward and backward of a
    step hold above what is there before"""
    run, parameters = layer(shape, kind)
    kept = counters.saved_bytes(run, *parameters)
    steps = Measured(shape, kind)
    steps.forward_backward()
    return {"kept": kept, "peak": counters.peak_bytes(steps.forward_backward)}


def memory_part(args) -> dict:
    toy = args.toy
    shape = (TOY if toy else SMALL) | dict(num_layers=2)
    rows = []
    table = report.Table()
    lengths, sizes = ((64,), (1, 2)) if toy else (LENGTHS, (1, 2, 4))
    for s, n, kind in itertools.product(lengths, sizes, context_parallel.COMM_TYPES):
        if kind != "ring" and (toy or n == 1):
            continue
        row = {"s": s, "N": n, "kind": kind if n > 1 else "one rank"}
        held = ranks.run(held_bytes, n, shape | dict(seq_length=s), kind, timeout=600)
        row |= {name: max(h[name] for h in held) for name in ("kept", "peak")}
        if n == 1:
            one = row
        shares = {f"{k}_over_even_share": row[k] * n / one[k] for k in ("kept", "peak")}
        rows.append(row | shares)
        table.row(rows[-1])
    return {"shape": shape, "rows": rows}


# --- speed ----------------------------------------------------------------------------------------

MESSAGES = ("keys and values", "gradients")


class Silent(context_parallel.Ring):
    """A ring without messages: a rank gets what it has. What is timed is the computation alone."""

    def start(self, x: Tensor) -> None:
        self.received = x.clone()

    def wait(self) -> Tensor:
        return self.received


class Measured(Steps):
    """Steps of one kind on this rank, or of one rank alone: their losses, and their processor
    seconds, in which no rank waits. context: in which they run."""

    def __init__(self, shape: dict, kind: str | None = None, context=contextlib.nullcontext):
        self.context = context
        self.losses, self.processor = [], []
        groups, flags = None, {}
        n = dist.get_world_size()
        if kind and n > 1:
            groups = Groups(cp=dist.group.WORLD, replicas=dist.group.WORLD)
            flags = dict(cp=n, cp_kind=kind)
        with self.context():
            super().__init__(shape, groups, **flags)

    def step(self) -> None:
        start = time.process_time()
        with self.context():
            self.losses.append(super().step())
        self.processor.append(time.process_time() - start)


@contextlib.contextmanager
def silent():
    with mock.patch.object(context_parallel, "Ring", Silent), report.without_all_reduce():
        yield


def on_rank(rank: int, rounds: int, shape: dict) -> dict:
    """times: {kind: seconds}, round by round; processor: {kind: seconds of a step}; losses: {kind:
    of the first step, this rank's part}; hidden: {type of messages: share of their time}"""
    cpu.set_up()
    one = Measured(shape)
    steps = {
        "ring": Measured(shape, "ring"),
        "all-to-all": Measured(shape, "all-to-all"),
        "in order": Measured(shape, "ring", cut_in_order),
        "silent": Measured(shape, "ring", silent),
        # Each rank its own sequence: what the machine has to give.
        "apart": one,
    }
    kinds = {"one": one.alone} | {name: measured.together for name, measured in steps.items()}
    times = report.in_turn(kinds, rounds)
    events = recorded(steps["ring"])
    return {
        "times": times,
        "processor": {name: median(measured.processor) for name, measured in steps.items()},
        "losses": {name: measured.losses[0] for name, measured in steps.items()},
        "hidden": {what: time_line.hidden(events, what) for what in MESSAGES},
    }


def speed_part(args) -> dict:
    shape = TOY if args.toy else SHAPE
    measured = ranks.run(on_rank, 2, args.rounds, shape, timeout=600, limit=7200)
    times = measured[0]["times"]
    results = {"shape": shape, "tokens_per_second": {}, "share_of_twice": {}, "loss_difference": {}}
    for kind in times[0]:
        sequences = 2 if kind == "apart" else 1
        tokens = sequences * shape["seq_length"]
        results["tokens_per_second"][kind] = tokens / median([t[kind] for t in times])
        if kind != "one":
            results["share_of_twice"][kind] = report.ratio(times, "one", kind, sequences / 2)
    one_loss = measured[0]["losses"]["apart"]
    for kind in ("ring", "all-to-all", "in order"):
        loss = sum(m["losses"][kind] for m in measured)
        results["loss_difference"][kind] = abs(loss - one_loss) / one_loss
    # The rank that has most counts; "apart" is a whole sequence.
    busiest = {k: max(m["processor"][k] for m in measured) for k in measured[0]["processor"]}
    results["processor_seconds"] = busiest
    results["ring_over_in_order"] = report.ratio(times, "in order", "ring")
    results["hidden"] = {what: [m["hidden"][what] for m in measured] for what in MESSAGES}
    for kind, share in results["share_of_twice"].items():
        print(f"{kind:<11} {format_spread(share)} of twice one rank's tokens/s")
    last = "ring_over_in_order", "processor_seconds", "loss_difference", "hidden"
    report.print_results({name: results[name] for name in last})
    return results


# --- what is hidden: events of a step, (what, start, end), in seconds -----------------------------


class TimedRing(context_parallel.Ring):
    """Notes when messages are on their way. A thread waits for each, for gloo does not tell when
    one arrives."""

    events: list

    def start(self, x: Tensor) -> None:
        what = "gradients" if self.tag else "keys and values"
        begin = time.perf_counter()
        super().start(x)
        works, self.works = self.works, []
        finish = time_line.noted(self.events, what, lambda: [work.wait() for work in works], begin)
        self.waiter = threading.Thread(target=finish)
        self.waiter.start()

    def wait(self) -> Tensor:
        self.waiter.join()
        return super().wait()


def recorded(measured: Measured) -> list[tuple[str, float, float]]:
    """The events of one step, by this machine's clock: when blocks compute, and when messages are
    on their way."""
    events = TimedRing.events = []
    noting = {
        "attend": time_line.noted(events, "forward", context_parallel.attend),
        "through": time_line.noted(events, "backward", context_parallel.through),
        "Ring": TimedRing,
    }
    with mock.patch.multiple(context_parallel, **noting):
        dist.barrier()
        measured.step()
    return events


# --- drawn ----------------------------------------------------------------------------------------

COLOURS = {"zigzag": style.SERIES[0], "in order": style.SERIES[1]}
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
    style.ticks(axes, x=lengths)
    axes.set_yscale("log")
    least, most = axes.get_ylim()
    style.ticks(axes, y=[2**k for k in range(-4, 12) if least < 2**k < most])
    style.label_ends(axes)


def draw_speed(axes, shares: dict) -> None:
    for y, kind in enumerate(NAMES):
        colour = COLOURS["in order" if kind == "in order" else "zigzag"]
        style.ranges(axes, [y], [shares[kind]], colour if y < 3 else style.COLOURS["one device"])
        middle = shares[kind]["median"]
        style.label(axes, f"{middle:.2f}", (middle, y), offset=(-9, 9))
    style.rows_of(axes, list(NAMES.values()))
    axes.axvline(0.85, color="black", linestyle="--", linewidth=1, zorder=0.5)
    axes.set(title="Speed of two ranks", xlabel="share of twice one rank's")


def draw(results: dict, figures: Path) -> None:
    """results: what context.json holds."""
    results = results["results"]
    panels = {
        "work": (draw_work, "rows"),
        "memory": (draw_memory, "rows"),
        "speed": (draw_speed, "share_of_twice"),
    }
    measured = [part for part in panels if part in results]
    if measured:
        figure, (row,) = style.figure(3.2, 1, len(measured), squeeze=False)
        for axes, part in zip(row, measured):
            function, key = panels[part]
            function(axes, results[part][key])
        style.save(figure, figures / "context.svg")


PARTS = {"work": work_part, "bytes": bytes_part, "memory": memory_part, "speed": speed_part}


def main():
    parser = report.arguments(__doc__, rounds=9)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    args = report.parse(parser, rounds=1)
    report.check_names(parser, args.parts, PARTS)
    torch.set_num_threads(1)
    results = {"toy": args.toy, "results": report.earlier("context", parser, args)}
    for part in args.parts or PARTS:
        results["results"][part] = PARTS[part](args)
        report.write("context", results, args, threads=1)
    report.finish("context", results, args, draw, threads=1)


if __name__ == "__main__":
    main()
