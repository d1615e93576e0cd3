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
          time line of a step

Parts that are not named stay as they are in context.json. An order of pieces is patched in here:
the ring of other repositories gives rank r the r-th part of the sequence.

Shape of work and speed: GPT, h 512, L 4, a 8, s 4096, b 1, V 257, fp32.

Figures: docs/figures/context.svg and docs/figures/context_time_line.svg
"""

import itertools
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import context_parallel
import gpt
import recompute
import sharding
from base import cpu
from base.model_config import GPTConfig
from benchmarks import report, style
from benchmarks.context_speed import (
    COLOURS,
    CUTTINGS,
    Measured,
    draw_speed,
    draw_time_lines,
    speed_part,
)
from benchmarks.report import spread
from benchmarks.steps import GPT, allocated
from course import demo, ranks

SHAPE = GPT | dict(seq_length=4096, global_batch_size=1, micro_batch_size=1)
TOY = SHAPE | dict(num_layers=2, hidden_size=32, num_heads=4, seq_length=64)
# of `memory`
SMALL = SHAPE | dict(num_layers=2, hidden_size=256, num_heads=4)
LENGTHS = (1024, 2048, 4096, 8192)
# of `work`
SIZES = (2, 4)
# of `bytes`: key heads
KEY_HEADS = (8, 2)

# --- work -----------------------------------------------------------------------------------------


def attention_seconds(cutting: str, rank: int, n: int, shape: dict) -> float:
    """Processor seconds of this rank's blocks, forward and backward."""
    s, a = shape["seq_length"], shape["num_heads"]
    size = (1, s // n, a, shape["hidden_size"] // a)
    q, k, v, grad = (torch.randn(size).transpose(1, 2) for _ in range(4))
    kv = torch.stack((k, v))
    log_sum = torch.ones(*q.shape[:3], 1)
    # what a block asks of a process group, where there are no other processes
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
        # of causal attention, times n. Of pairs of pieces, those on the diagonal are half the work
        formula = 1.0 if cutting == "zigzag" else (2 * r + 1) / n
        row = {"cutting": cutting, "N": n, "rank": r, "formula": formula}
        even = [sum(t["zigzag", n, other] for other in range(n)) / n for t in times]
        shares = [t[cutting, n, r] / e for t, e in zip(times, even)]
        row["seconds"] = spread([t[cutting, n, r] for t in times])
        rows.append(row | {"over_even_share": spread(shares)})
    return rows


def work_part(shape: dict, rounds: int) -> dict:
    rows = ranks.run(measure_work, 1, shape, rounds, limit=3600)[0]
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
        # keys and values again, and their gradients, of at least 4 bytes a number
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


def bytes_part(shape: dict, toy: bool) -> dict:
    shape = shape | dict(seq_length=shape["seq_length"] // 4)
    s, h, a = (shape[name] for name in ("seq_length", "hidden_size", "num_heads"))
    rows = []
    table = report.Table()
    sizes, key_heads = (SIZES[:1], (a,)) if toy else (SIZES, KEY_HEADS)
    for n, kind, heads in itertools.product(sizes, context_parallel.KINDS, key_heads):
        if kind == "all-to-all" and heads % n:
            continue
        row = {"kind": kind, "N": n, "a_kv": heads}
        row["formula"] = bytes_formula(kind, n, 1, s, h, heads / a, 4)
        row["by_rank"] = ranks.run(count_bytes, n, shape, kind, heads, timeout=600)
        rows.append(row)
        same = all(counted == row["formula"] for counted in row["by_rank"])
        table.row(row | {"by_rank": f"the same: {same}"})
    exact = all(counted == row["formula"] for row in rows for counted in row["by_rank"])
    return {"shape": dict(s=s, h=h, a=a, b=1), "rows": rows, "exact": exact}


# --- memory ---------------------------------------------------------------------------------------


def held_bytes(rank: int, shape: dict, kind: str) -> dict:
    """kept: for backward, by one layer on this rank; peak: the most that forward and backward of a
    step hold above what is there before"""
    run, parameters = layer(shape, kind)
    kept = recompute.saved_bytes(run, *parameters)
    steps = Measured(shape, kind)
    steps.forward_backward()
    before, most = allocated(steps.forward_backward)
    return {"kept": kept, "peak": most - before}


def memory_part(toy: bool) -> dict:
    shape = (TOY if toy else SMALL) | dict(num_layers=2)
    rows = []
    table = report.Table()
    lengths, sizes = ((64,), (1, 2)) if toy else (LENGTHS, (1, 2, 4))
    for s, n, kind in itertools.product(lengths, sizes, context_parallel.KINDS):
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


# --- drawn ----------------------------------------------------------------------------------------


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


PARTS = ("work", "bytes", "memory", "speed")


def main():
    parser = report.arguments(__doc__, rounds=9)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    args = report.parse(parser, rounds=1)
    report.check_names(parser, args.parts, PARTS)
    shape = TOY if args.toy else SHAPE
    torch.set_num_threads(1)
    results = {"toy": args.toy, "results": report.earlier("context", parser, args)}
    measure = {
        "work": partial(work_part, shape, args.rounds),
        "bytes": partial(bytes_part, shape, args.toy),
        "memory": partial(memory_part, args.toy),
        "speed": partial(speed_part, shape, args.rounds),
    }
    for part in args.parts or PARTS:
        results["results"][part] = measure[part]()
        report.write("context", results, args, threads=1)
    report.finish("context", results, args, draw, threads=1)


if __name__ == "__main__":
    main()
