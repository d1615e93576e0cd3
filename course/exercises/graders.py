"""One grader for each exercise: what its answer is compared with, and what is counted.

A grader is called on every rank, as grader(*functions, rank, watch), with the answer's functions;
14 has its path. It raises AnswerError with a sentence that teaches, or returns (what was compared,
Par). `watch` counts (grading.py). The reference is plain computation on one rank, or the project's
own function.
"""

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import recompute
import schedules
from base import transport_plan
from course.exercises import cuda_grader
from course.exercises.grading import AnswerError, Par, Watch, leaf, numbers, par_of, same
from sharding import FlatParameters, Shard, Sharding, shard_of

B, S, H = 2, 4, 8
BYTES = B * S * H * 8
# Seconds by which simulated times may differ.
TIME_TOLERANCE = 1e-9
UNIT_COST = schedules.Cost()

# --- 1: shards ------------------------------------------------------------------------------------


def shards(cut, gather, rank: int, watch: Watch) -> tuple[str, Par]:
    group = dist.group.WORLD
    cases = [((6, 3), 0), ((3, 4), 1), ((5, 2), 0), ((2, 7), 1), ((1, 4), 0)]
    for n in (1, 2, 3, 4):
        for shape, dim in cases:
            whole = numbers(*shape)
            for r in range(n):
                of_rank = SimpleNamespace(rank=lambda r=r: r, size=lambda n=n: n)
                record = Sharding(shape, (Shard(dim, of_rank),))
                same(
                    f"part {r} of {n} of a weight {list(shape)}, dimension {dim}",
                    cut(whole.clone(), dim, r, n),
                    shard_of(whole, record),
                    "All parts have ceil(size / n) rows or columns; what is missing at the end is "
                    "filled with zeros, because collectives move equal sizes.",
                )
    for shape, dim in cases:
        whole = numbers(*shape)
        part = shard_of(whole, Sharding(shape, (Shard(dim, group),)))
        with watch.counted() as calls:
            got = gather(part.clone(), shape[dim], dim, group)
        same(
            f"gather of a weight {list(shape)}, dimension {dim}, on rank {rank}",
            got,
            whole,
            "Parts are joined along the dimension that was cut; padding is dropped at the end.",
        )
        size = 2 * part.nbytes
        par = par_of(calls, [("all-gather", size)], "An all-gather sends half of an all-reduce.")
        if not par.reached:
            break
    return f"{len(cases)} weights over 1 to 4 ranks, gathered on 2", par


# --- 2 and 4: a tensor-parallel MLP ---------------------------------------------------------------


def mlp_on_one_rank() -> dict[str, Tensor]:
    """Z = GELU(X A) B, and the gradients of Σ (X + Z) G for a fixed G."""
    x, a, b = leaf(numbers(B, S, H)), leaf(numbers(H, 4 * H, seed=1)), leaf(numbers(4 * H, H))
    z = F.gelu(x @ a) @ b
    ((x + z) * numbers(B, S, H, seed=2)).sum().backward()
    return {"X": x, "A": a, "B": b, "Z": z}


def mlp_grader(mine, checked, hints: dict[str, str], paper, par_hint: str):
    """A grader of two functions: one before the columns of A, one behind the rows of B.

    mine(tensor [b, s, h], rank): what a rank has of it outside. checked: how the first result, if
    it is compared, and the second are called. hints: by what is wrong. paper: collectives."""

    def grader(enter, leave, rank: int, watch: Watch) -> tuple[str, Par]:
        group = dist.group.WORLD
        one = mlp_on_one_rank()
        x = leaf(mine(one["X"].detach(), rank))
        # This rank has columns of A and rows of B.
        a, b = leaf(one["A"].chunk(2, 1)[rank]), leaf(one["B"].chunk(2, 0)[rank])
        with watch.counted() as calls:
            whole = enter(x, group)
            watch.agree()
            if checked[0]:
                same(f"{checked[0]} on rank {rank}", whole, one["X"], hints["enter"])
            y = leave(F.gelu(whole @ a) @ b, group)
            watch.agree()
            same(f"{checked[1]} on rank {rank}", y, mine(one["Z"].detach(), rank), hints["leave"])
            ((x + y) * mine(numbers(B, S, H, seed=2), rank)).sum().backward()
        expected = {
            "part of A": (a, one["A"].grad.chunk(2, 1)[rank]),
            "part of B": (b, one["B"].grad.chunk(2, 0)[rank]),
            "X": (x, mine(one["X"].grad, rank)),
        }
        for name, (got, gradient) in expected.items():
            hint = hints["X" if name == "X" else "parts"]
            same(f"the gradient of this rank's {name}, on rank {rank}", got.grad, gradient, hint)
        return f"{checked[1]} and the gradients of X, A and B", par_of(calls, paper, par_hint)

    return grader


f_and_g = mlp_grader(
    lambda whole, rank: whole,
    ("", "Z = GELU(X A) B"),
    {
        "leave": "Forward of g: each rank has one term of the sum over the columns of A, so Z is "
        "their sum, not their average.",
        "parts": "Backward of g is the identity: Z is the sum of the terms, so ∂L/∂term = ∂L/∂Z, "
        "which every rank has already.",
        "X": "Backward of f: X went to every rank, and each rank has the gradient of its own "
        "columns only. The gradient of X is their sum.",
    },
    [("all-reduce", BYTES)] * 2,
    "One all-reduce in forward (g) and one in backward (f).",
)
g_and_g_bar = mlp_grader(
    lambda whole, rank: whole.chunk(2, 1)[rank],
    ("g(x)", "ḡ(y)"),
    {
        "enter": "x is [b, s/t, h]: shards are joined along dimension 1, the sequence. A "
        "collective joins along dimension 0, so with b > 1 the result must be put in order.",
        "leave": "ḡ sums the ranks' tensors [b, s, h], and gives each rank its shard of the "
        "sequence.",
        "parts": "Backward of ḡ is an all-gather: this rank's term has a part in every shard of "
        "the sum.",
        "X": "Backward of g is a reduce-scatter: every rank has used this shard, so its gradient "
        "is the sum of what all ranks have for it.",
    },
    [("all-gather", BYTES), ("reduce-scatter", BYTES)] * 2,
    "A reduce-scatter and an all-gather move as much as one all-reduce.",
)


# --- 3: the loss of a sharded vocabulary ----------------------------------------------------------


def vocabulary_loss(loss_of, rank: int, watch: Watch) -> tuple[str, Par]:
    group = dist.group.WORLD
    vocab = 7
    sent = 0
    for offset in (0.0, -3.0, 900.0):
        whole = leaf(3 * numbers(B, S, vocab) + offset)
        # Rank 1's logits are larger than rank 0's.
        whole.data[..., 4:] += 50 if offset else 0
        targets = (torch.arange(B * S).view(B, S) * 3) % vocab
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none")
        expected = expected.view(B, S)
        weights = numbers(B, S, seed=3)
        (expected * weights).sum().backward()
        part = leaf(columns_of(whole.detach(), rank))
        with watch.counted() as calls:
            # It is no leaf, so that it may be overwritten.
            loss = loss_of(part * 1, targets, vocab, group)
            watch.agree()
            same(
                f"the loss on rank {rank}, logits near {offset:g}",
                loss,
                expected,
                "log Σ exp(z) - z_target needs three numbers of all ranks: the largest logit, "
                "so that exp does not overflow, Σ exp without the padding, and the target's "
                "logit, which one rank has.",
            )
            (loss * weights).sum().backward()
        same(
            f"the gradient of the logits on rank {rank}",
            part.grad,
            columns_of(whole.grad, rank),
            "It is softmax(z) - onehot(target), and 0 in the padding.",
        )
        sent = sum(size for _, size in calls)
    most = 3 * B * S * 8
    more = ". Logits are never gathered." if sent > most else ""
    text = f"{sent} bytes for {B * S} tokens; the paper sends 3 b s numbers, {most} bytes{more}"
    return "losses and gradients, V = 7 on 2 ranks", Par(sent <= most, text)


def columns_of(logits: Tensor, rank: int) -> Tensor:
    """[b, s, 7] -> [b, s, 4]: on rank 1 the last column is padding, whose logit is 0."""
    return F.pad(logits, (0, 1)).chunk(2, -1)[rank]


# --- 5 to 7: schedules ----------------------------------------------------------------------------


def action_text(actions: list, v: int) -> str:
    """F0 F1 B0; with chunks F0.1: micro-batch 0 of chunk 1."""
    words = []
    for op, chunk, k in actions:
        words.append(f"{op}{k}.{chunk}" if v > 1 else f"{op}{k}")
    return " ".join(words)


def actions_of(case: str, got, p: int) -> list[list[schedules.Action]]:
    """The lists of an answer. Raises AnswerError for anything else."""
    if not isinstance(got, list) or len(got) != p:
        raise AnswerError(f"{case}: expected a list of {p} lists, one for each rank.")
    try:
        return [[schedules.Action(*action) for action in actions] for actions in got]
    except TypeError:
        raise AnswerError(
            f"{case}: expected a list of Action(op, chunk, micro_batch) for each rank, got "
            f"{got!r:.60}"
        ) from None


def compare_lists(case: str, got: list, expected: list, v: int, hint: str) -> None:
    """Raises AnswerError at the first action that differs."""
    for rank, (mine, right) in enumerate(zip(got, expected)):
        pairs = itertools.zip_longest(mine, right)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            near = slice(max(0, position - 4), position + 5)
            raise AnswerError(
                f"{case}, rank {rank}, position {position}.\n"
                f"expected  .. {action_text(right[near], v)} ..\n"
                f"got       .. {action_text(mine[near], v)} ..\n{hint}"
            )


def schedule_par(got: list, expected: list, name: str, p: int, m: int, v: int) -> Par | None:
    """Micro-batches in flight and the bubble, beside the paper's. None where the lists cannot run:
    then there is nothing to count."""
    try:
        schedules.validate(got, m, schedules.Placement(p, v))
    except schedules.ScheduleError:
        return None
    held, of_paper = (max(schedules.in_flight(lists)) for lists in (got, expected))
    cost = schedules.Cost(1 / v, 1 / v, 1 / v)
    bubble = schedules.bubble(schedules.simulate(got, cost))
    formula = schedules.bubble_formula(name, p, m, v, cost)
    unit = "chunks of a micro-batch" if v > 1 else "micro-batches"
    text = (
        f"p {p}, m {m}: {held} {unit} in flight, the paper's {of_paper}; bubble {bubble:.4f}, the "
        f"paper's {formula:.4f}"
    )
    return Par(held <= of_paper and bubble <= formula + TIME_TOLERANCE, text)


def schedule_grader(name: str, hint: str, chunks: tuple[int, ...] = (1,)):
    """A grader of lists: equal to the project's for p up to 6 ranks."""
    # The case of the picture comes first.
    sizes = [(4, 8), *itertools.product(range(1, 7), range(1, 13))]
    cases = [(p, m, v) for p, m in sizes for v in chunks if v == 1 or m % p == 0]

    def grader(make, rank: int, watch: Watch) -> tuple[str, Par]:
        first = None
        for p, m, v in cases:
            given = (p, m, v) if chunks != (1,) else (p, m)
            case = ", ".join(f"{letter} {n}" for letter, n in zip("pmv", given))
            expected = schedules.make(name, p, m, v)
            got = actions_of(case, make(*given), p)
            first = first or schedule_par(got, expected, name, p, m, v)
            try:
                compare_lists(case, got, expected, v, hint)
            except AnswerError as error:
                error.par = schedule_par(got, expected, name, p, m, v)
                raise
        return f"{len(cases)} schedules, p from 1 to 6", first

    return grader


one_f_one_b = schedule_grader(
    "1f1b",
    "Warmup is what the ranks behind need until the first gradient comes back: how many forwards "
    "is that? Then one F, one B in turn, and the backwards that are left. With few micro-batches "
    "the warmup ends early.",
)
interleaved = schedule_grader(
    "interleaved",
    "Forwards go through chunk 0, then chunk 1 and so on, for groups of p micro-batches; backwards "
    "in the same groups, but from the last chunk to the first. Warmup is 2 (p - 1 - rank) + "
    "(v - 1) p actions.",
    (2, 3),
)
zb_h1 = schedule_grader(
    "zb-h1",
    "I stands where 1F1B has B. How many W may wait on this rank? One more, and the oldest comes "
    "right after the I; the W that are left come at the end.",
)


# --- 8: simulate ----------------------------------------------------------------------------------


def simulation(simulate, rank: int, watch: Watch) -> tuple[str, Par]:
    cost = schedules.Cost(1.0, 1.25, 0.75, transfer=0.5)
    cases = [("gpipe", 3, 4, 1), ("1f1b", 4, 8, 1), ("interleaved", 2, 4, 2), ("zb-h1", 4, 6, 1)]
    for name, p, m, v in cases:
        schedule = schedules.make(name, p, m, v)
        placement = schedules.Placement(p, v)
        for of_transfer, now in (("", UNIT_COST), (", transfers of 0.5 s", cost)):
            expected = {tuple(e)[:4]: e for e in schedules.simulate(schedule, now)}
            events = simulate([list(actions) for actions in schedule], now, placement)
            got = {tuple(e)[:4]: schedules.Event(*e) for e in events or []}
            case = f"{name}, p {p}, m {m}{of_transfer}"
            _compare_events(case, got, expected)
    _refuses_a_deadlock(simulate)
    events = simulate(schedules.make("1f1b", 4, 8), UNIT_COST, schedules.Placement(4))
    bubble = schedules.bubble([schedules.Event(*e) for e in events])
    text = f"1f1b, p 4, m 8: bubble {bubble:.4f}, the paper's (p - 1) / m = {3 / 8:.4f}"
    return f"the times of {2 * len(cases)} runs; a deadlock, refused", Par(bubble == 3 / 8, text)


def _compare_events(case: str, got: dict, expected: dict) -> None:
    for key in got.keys() - expected.keys():
        raise AnswerError(
            f"{case}: rank {key[0]} runs {schedules.Action(*key[1:])}, which is not in its list."
        )
    # They are sorted by start, so that the first difference causes the others.
    for key, event in expected.items():
        action = schedules.Action(*key[1:])
        if key not in got:
            raise AnswerError(
                f"{case}: rank {key[0]} never runs {action}. Every action has an event."
            )
        times = got[key].start, got[key].end
        if max(abs(times[0] - event.start), abs(times[1] - event.end)) > TIME_TOLERANCE:
            raise AnswerError(
                f"{case}, rank {key[0]}, {action}: expected {event.start:g} to {event.end:g} s, got"
                f" {times[0]:g} to {times[1]:g}. An action starts when its rank is free and all "
                "that it needs has arrived; what another rank computed arrives after a transfer, "
                "what this rank computed at once."
            )


def _refuses_a_deadlock(simulate) -> None:
    """Rank 0 wants the gradient before rank 1 has the activation."""
    action = schedules.Action
    orders = ("F0 B1 F1 B0", "F0 B0 F1 B1")
    stuck = [[action(op, 0, int(k)) for op, k in order.split()] for order in orders]
    try:
        simulate(stuck, UNIT_COST, schedules.Placement(2))
    except schedules.ScheduleError:
        return
    raise AnswerError(
        "Two lists that wait for each other came back as if they had run. Where no rank can go on "
        "and actions are left, raise ScheduleError: a deadlock is found here, not on a cluster."
    )


# --- 9 and 10: ZeRO -------------------------------------------------------------------------------


def zero2_reduce(reduce, rank: int, watch: Watch) -> tuple[str, Par]:
    group = dist.group.WORLD
    shapes = [(5, 2), (2,), (4, 3)]
    layout = FlatParameters([torch.nn.Parameter(numbers(*shape)) for shape in shapes], 2)
    micro_batches = 3
    total = torch.zeros(layout.N, layout.T, dtype=torch.float64)
    summed = None
    calls = []
    for k in range(micro_batches):
        of_ranks = [[numbers(*s, seed=9 * k + 3 * r) for s in shapes] for r in range(2)]
        for grads in of_ranks:
            for p, grad in zip(layout.parameters, grads):
                for in_flat, in_whole in layout.views(total, p, grad):
                    in_flat += in_whole
        with watch.counted() as of_this:
            summed = reduce([grad.clone() for grad in of_ranks[rank]], summed, group)
        calls += of_this
        same(
            f"the row of rank {rank} after micro-batch {k}",
            summed,
            total[rank],
            "Row r holds shard r of each gradient, one after the other; a gradient that 2 does not "
            "divide is padded at its own end. The row is the sum over ranks and micro-batches.",
        )
    size = total.nbytes
    par = par_of(calls, [("reduce-scatter", size)] * micro_batches, "Only one row is needed here.")
    kept = summed.untyped_storage().nbytes()
    text = f"{par.count}; kept between micro-batches: {kept} bytes, by the paper 1/N: {size // 2}"
    if kept > size // 2:
        text += ". A view keeps the whole tensor alive: return a tensor of its own."
    reached = par.reached and kept <= size // 2
    return f"rows of 3 gradients, {micro_batches} micro-batches", Par(reached, text)


def zero3_gather(linear, rank: int, watch: Watch) -> tuple[str, Par]:
    group = dist.group.WORLD
    out, into = 5, 4
    weight = leaf(numbers(out, into))
    inputs = [leaf(numbers(3, into, seed=5 + r)) for r in range(2)]
    for x in inputs:
        (x @ weight.t()).square().sum().backward()
    record = Sharding((out, into), (Shard(0, group),))
    row = leaf(shard_of(weight.detach(), record))
    x = leaf(inputs[rank])
    first = len(watch.made)
    with watch.counted() as calls:
        y = linear(x * 1, row, out, group)
        held = watch.held(first, y, allowed=x.nbytes) - x.nbytes
        watch.agree()
        same(
            f"y = x Wᵀ on rank {rank}",
            y,
            (inputs[rank] @ weight.t()),
            "W is the rows of all ranks, one under the other, without the padding at the end.",
        )
        y.square().sum().backward()
    same(
        f"the gradient of x on rank {rank}",
        x.grad,
        inputs[rank].grad,
        "Each rank has samples of its own: the gradient of x is ∂y W, and nothing is summed.",
    )
    same(
        f"the gradient of this rank's row on rank {rank}",
        row.grad,
        shard_of(weight.grad, record),
        "∂W = ∂yᵀ x of this rank's samples is one term. The gradient is the sum over the ranks, "
        "and a rank needs the rows of its own shard; those of the padding are 0.",
    )
    size = 2 * row.nbytes
    paper = [("all-gather", size)] * 2 + [("reduce-scatter", size)]
    par = par_of(calls, paper, "Gather in forward, again in backward; sum by reduce-scatter.")
    text = f"{par.count}; held from forward to backward beside x: {max(0, held)} bytes"
    if held >= weight.nbytes:
        text += ". The whole weight must be free between forward and backward."
    reached = par.reached and held < weight.nbytes
    return "y and the gradients of x and of the row", Par(reached, text)


# --- 11 and 12: activations -----------------------------------------------------------------------


def checkpointing(checkpoint, rank: int, watch: Watch) -> tuple[str, Par]:
    a, b = leaf(numbers(H, 4 * H, seed=1)), leaf(numbers(4 * H, H, seed=2))
    runs = []

    def layer(x: Tensor, scale: float, y: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        return scale * (F.gelu(x @ a) @ b) + y

    start = leaf(numbers(B, S, H))
    fixed = numbers(B, S, H, seed=3)
    (layer(start * 2, 0.5, fixed) * fixed).sum().backward()
    expected = [t.grad for t in (start, a, b)]
    start.grad = a.grad = b.grad = None
    runs.clear()
    # It is no leaf, because another layer may stand before this one.
    x = start * 2
    first = len(watch.made)
    y = checkpoint(layer, x, 0.5, fixed)
    held = watch.held(first, y)
    forward_runs = len(runs)
    same("y", y, layer(start * 2, 0.5, fixed), "Forward gives function(*args).")
    runs.clear()
    (y * fixed).sum().backward()
    hints = (
        "In backward the function runs again on a detached copy of x, and its gradient is that "
        "copy's; if the copy is not detached, backward goes through the layers before a second "
        "time.",
        "The parameters inside get their gradients in the inner backward: output.backward(grad), "
        "not torch.autograd.grad of the arguments alone.",
        "The parameters inside get their gradients in the inner backward.",
    )
    for name, t, right, hint in zip(("x", "A", "B"), (start, a, b), expected, hints):
        same(f"the gradient of {name}", t.grad, right, hint)
    text = (
        f"kept beside the arguments: {held:,} bytes, the paper's 0; the function ran "
        f"{forward_runs} + {len(runs)} times, the paper's 1 + 1"
    )
    reached = held == 0 and forward_runs == len(runs) == 1
    if held:
        text += ". Activations are still there: forward must not record, nor save what is inside."
    return "y and the gradients of x, A and B", Par(reached, text)


def memory_formula(layer_bytes, rank: int, watch: Watch) -> tuple[str, Par]:
    # The lesson breaks things, which no grader does.
    from course import recompute as lesson

    small = (lesson.S, lesson.B, lesson.H, lesson.A)
    hints = {
        "none": "Attention keeps 11 s b h + 5 a s² b, the MLP 19 s b h, two LayerNorms 4 s b h. "
        "Tensor parallelism divides 24 of the 34 s b h and all scores by t; the other 10 only "
        "sequence parallelism does.",
        "selective": "Selective recomputation keeps no scores: the term with s² is gone, the rest "
        "stays.",
        "full": "Full recomputation keeps the layer's input, 2 s b h; sequence parallelism shards "
        "it too.",
    }
    large = (2048, 4, 6144, 64)
    cases = list(itertools.product(hints, (1, 2, 8), (False, True), (small, large)))
    for way, t, sequence, sizes in cases:
        right = recompute.layer_bytes(*sizes, t, sequence, way)
        got = layer_bytes(*sizes, t, sequence, way)
        if not isinstance(got, int | float):
            raise AnswerError(f"layer_bytes returned {got!r}, expected a number of bytes.")
        if not math.isclose(got, right, rel_tol=1e-12):
            raise AnswerError(
                f"s, b, h, a = {sizes}, t = {t}, sequence_parallel={sequence}, recompute {way}: "
                f"expected {right:,.0f}, got {got:,.0f}. {hints[way]}"
            )
    # What autograd keeps of a layer of the project's GPT in 16 bits.
    kept, _, _ = lesson.measure("none")
    ratio = kept / layer_bytes(*small, 1, False, "none")
    text = f"a real layer, measured: {ratio:.4f} times the formula"
    return f"{len(cases)} sizes of table 2", Par(abs(ratio - 1) < 0.02, text)


# --- 13: Sinkhorn ---------------------------------------------------------------------------------


def sinkhorn(balance, rank: int, watch: Watch) -> tuple[str, Par]:
    n, e = 24, 4
    made = 0
    for scale in (1.0, 3.0, 400.0):
        # All tokens like expert 0.
        logits = scale * (numbers(n, e) + torch.tensor([1.0, 0, 0, 0]))
        if scale == 400:
            # They are far from 0, but as easy as the first.
            logits = numbers(n, e) + 2000
        first = len(watch.sizes)
        plan = balance(logits.clone(), 1e-13)
        made = sum(size == n * e for size in watch.sizes[first:])
        same(
            f"the plan of logits near {logits.mean():.0f}",
            plan,
            transport_plan.sinkhorn(logits, 1.0, 1e-13, 100_000),
            "Rows sum to 1/N and columns to 1/E at the same time. One scaling spoils the other, so "
            "both are repeated until the loads are even within the tolerance. exp overflows for "
            "large logits; of each row only differences matter.",
        )
    hint = "a few would do. Keep d0 [N] and d1 [E] instead." if made > 8 else "the rest: vectors"
    return "3 plans within 1e-10", Par(made <= 8, f"{made} matrices [N, E] made; {hint}")


# --- 14: a CUDA kernel ----------------------------------------------------------------------------


def fused_swiglu(answer: str, rank: int, watch: Watch) -> tuple[str, Par]:
    """answer: the path of the .cu file, which `cuda_grader.build` has compiled."""
    stub = re.search(r"^ *// Your code: (.*)\n}", Path(answer).read_text(), re.MULTILINE)
    if stub:
        raise NotImplementedError(stub[1].capitalize())
    library = cuda_grader.load(answer)
    W = 4
    for n in (W, 256 * W, 300 * W):
        guard = 1024 * W
        given = numbers(2, n).float()
        # The guards show what a kernel writes beyond the end.
        memory = torch.full((n + 2 * guard,), torch.nan)
        y = memory[guard : guard + n]
        gate, up = given[0].clone(), given[1].clone()
        bytes_in, bytes_out = cuda_grader.run(library, gate, up, y)
        outside = torch.cat((memory[:guard], memory[guard + n :]))
        if not outside.isnan().all():
            raise AnswerError(
                "The kernel has written beyond the end of y: return where i >= vectors."
            )
        missing = y.isnan().sum().item()
        if missing:
            raise AnswerError(
                f"n = {n:,}: {missing:,} numbers of y were never written, the first at index "
                f"{y.isnan().nonzero()[0].item()}. A thread's vector is number blockIdx.x * "
                "blockDim.x + threadIdx.x, and a vector has W = 4 floats."
            )
        exact = F.silu(given[0].double()) * given[1].double()
        torch_error = (F.silu(given[0]) * given[1] - exact).abs().max()
        error = (y - exact).abs()
        # The same bound as in tests/test_kernels.py.
        if not error.max() <= 2 * torch_error:
            i = error.argmax()
            raise AnswerError(
                f"n = {n:,}, index {i}: gate {gate[i]:.6g}, up {up[i]:.6g}, expected {exact[i]:.6g}"
                f", got {y[i]:.6g}. y = gate · sigmoid(gate) · up."
            )
    once = (bytes_in, bytes_out) == (8 * n, 4 * n)
    more = "gate and up are read once, y is written once"
    if not once:
        more = (
            f"one pass is {8 * n:,} in and {4 * n:,} out. Move whole vectors with read() and "
            "write(): a load of single floats moves a quarter as much."
        )
    text = f"vectors of 16 bytes: {bytes_in:,} bytes in and {bytes_out:,} out for n = {n:,}; {more}"
    return "3 sizes, the error at most twice PyTorch's", Par(once, text)


# --- the list -------------------------------------------------------------------------------------


class Exercise(NamedTuple):
    """functions: of the file, the first arguments of the grader. ranks: that the answer needs."""

    file: str
    functions: str
    grader: Callable[..., tuple[str, Par]]
    ranks: int = 1


EXERCISES = {
    1: Exercise("01_shards.py", "shard_of gather", shards, 2),
    2: Exercise("02_f_and_g.py", "copy_to_ranks reduce_from_ranks", f_and_g, 2),
    3: Exercise("03_vocabulary_loss.py", "vocab_parallel_cross_entropy", vocabulary_loss, 2),
    4: Exercise("04_g_and_g_bar.py", "gather_sequence scatter_sequence", g_and_g_bar, 2),
    5: Exercise("05_one_f_one_b.py", "one_f_one_b", one_f_one_b),
    6: Exercise("06_interleaved.py", "interleaved_one_f_one_b", interleaved),
    7: Exercise("07_zb_h1.py", "zero_bubble_h1", zb_h1),
    8: Exercise("08_simulate.py", "simulate", simulation),
    9: Exercise("09_zero2_reduce.py", "reduce_gradients", zero2_reduce, 2),
    10: Exercise("10_zero3_gather.py", "sharded_linear", zero3_gather, 2),
    11: Exercise("11_checkpoint.py", "checkpoint", checkpointing),
    12: Exercise("12_memory_formula.py", "layer_bytes", memory_formula),
    13: Exercise("13_sinkhorn.py", "sinkhorn", sinkhorn),
    14: Exercise("14_swiglu.cu", "", fused_swiglu),
}
