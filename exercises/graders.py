"""One grader for each exercise: what its answer is compared with, and what is counted.

A grader is called on every rank, as grader(answer, rank, watch). It raises AnswerError with a
sentence that teaches, or returns (what was compared, Par). `answer` has what the file defines; 14
has its path. `watch` counts (grading.py).

The reference is plain computation on one rank, or the project's own function.
"""

import math
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import recompute
import routers
import schedules
from base.flat_parameters import FlatParameters
from exercises import cuda_grader
from exercises.grading import AnswerError, Par, Watch, par_of, same
from sharding import Shard, Sharding, shard_of

B, S, H = 2, 4, 8
BYTES = B * S * H * 8
# seconds, of simulated times
TIME_TOLERANCE = 1e-9


def function(answer, name: str):
    """The function of that name."""
    if not callable(getattr(answer, name, None)):
        raise AnswerError(
            f"the file has no function `{name}`. Keep the name that the exercise gives."
        )
    return getattr(answer, name)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """float64, equal on all ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


# --- 1: shards ------------------------------------------------------------------------------------


def shards(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    cut = function(answer, "shard_of")
    gather = function(answer, "gather")
    group = dist.group.WORLD
    cases = [((6, 3), 0), ((3, 4), 1), ((5, 2), 0), ((2, 7), 1), ((1, 4), 0)]
    for n in (1, 2, 3, 4):
        for shape, dim in cases:
            whole = numbers(*shape)
            for r in range(n):
                record = Sharding(shape, (Shard(dim, _Ranks(r, n)),))
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
        watch.agree()
        same(
            f"gather of a weight {list(shape)}, dimension {dim}, on rank {rank}",
            got,
            whole,
            "Parts are joined along the dimension that was cut; padding is dropped at the end.",
        )
        size = 2 * part.nbytes
        par = par_of(calls, [("all-gather", size)], "An all-gather sends half of an all-reduce.")
        if not par.reached:
            return f"{len(cases)} weights, cut and gathered", par
    return f"{len(cases)} weights over 1 to 4 ranks, gathered on 2", par


class _Ranks:
    """What a record asks of a process group."""

    def __init__(self, rank: int, size: int):
        self.rank = lambda: rank
        self.size = lambda: size


# --- 2 and 4: a tensor-parallel MLP ---------------------------------------------------------------


def mlp_on_one_rank() -> dict[str, Tensor]:
    """Z = X + GELU(X A) B, and the gradients of Σ Z G for a fixed G."""
    x, a, b = leaf(numbers(B, S, H)), leaf(numbers(H, 4 * H, seed=1)), leaf(numbers(4 * H, H))
    z = x + F.gelu(x @ a) @ b
    (z * numbers(B, S, H, seed=2)).sum().backward()
    return {"x": x, "a": a, "b": b, "z": z}


def columns_and_rows(one: dict[str, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """This rank's columns of A, and rows of B."""
    return leaf(one["a"].chunk(2, 1)[rank]), leaf(one["b"].chunk(2, 0)[rank])


def f_and_g(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    f = function(answer, "copy_to_ranks")
    g = function(answer, "reduce_from_ranks")
    group = dist.group.WORLD
    one = mlp_on_one_rank()
    a, b = columns_and_rows(one, rank)
    x = leaf(one["x"])
    with watch.counted() as calls:
        y = g(F.gelu(f(x, group) @ a) @ b, group)
        watch.agree()
        same(
            f"Z = GELU(X A) B on rank {rank}",
            y,
            one["z"] - one["x"],
            "Forward of g: each rank has one term of the sum over the columns of A, so Z is their "
            "sum, not their average.",
        )
        ((x + y) * numbers(B, S, H, seed=2)).sum().backward()
    watch.agree()
    for name, got, expected in (("A", a, "a"), ("B", b, "b")):
        gradient = columns_and_rows({k: v.grad for k, v in one.items() if k in "ab"}, rank)
        same(
            f"the gradient of this rank's part of {name}, on rank {rank}",
            got.grad,
            gradient["ab".index(expected)],
            "Backward of g is the identity: Z is the sum of the terms, so ∂L/∂term = ∂L/∂Z, which "
            "every rank has already.",
        )
    same(
        f"the gradient of X on rank {rank}",
        x.grad,
        one["x"].grad,
        "Backward of f: X went to every rank, and each rank has the gradient of its own columns "
        "only. The gradient of X is their sum.",
    )
    paper = [("all-reduce", BYTES)] * 2
    hint = "One all-reduce in forward (g) and one in backward (f)."
    return "Z and the gradients of X, A and B", par_of(calls, paper, hint)


def g_and_g_bar(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    g = function(answer, "gather_sequence")
    g_bar = function(answer, "scatter_sequence")
    group = dist.group.WORLD
    one = mlp_on_one_rank()
    a, b = columns_and_rows(one, rank)

    def mine(t: Tensor) -> Tensor:
        return t.detach().chunk(2, 1)[rank]

    x = leaf(mine(one["x"]))  # [b, s/t, h]
    with watch.counted() as calls:
        whole = g(x, group)
        watch.agree()
        same(
            f"g(x) on rank {rank}",
            whole,
            one["x"],
            "x is [b, s/t, h]: shards are joined along dimension 1, the sequence. A collective "
            "joins along dimension 0, so with b > 1 the result must be put in order.",
        )
        y = g_bar(F.gelu(whole @ a) @ b, group)
        watch.agree()
        same(
            f"ḡ(y) on rank {rank}",
            y,
            mine(one["z"] - one["x"]),
            "ḡ sums the ranks' tensors [b, s, h], and gives each rank its shard of the sequence.",
        )
        ((x + y) * mine(numbers(B, S, H, seed=2))).sum().backward()
    watch.agree()
    parts = columns_and_rows({k: v.grad for k, v in one.items() if k in "ab"}, rank)
    hint = "Backward of ḡ is an all-gather: this rank's term has a part in every shard of the sum."
    same(f"the gradient of this rank's part of B, on rank {rank}", b.grad, parts[1], hint)
    same(f"the gradient of this rank's part of A, on rank {rank}", a.grad, parts[0], hint)
    same(
        f"the gradient of this rank's shard of X, on rank {rank}",
        x.grad,
        mine(one["x"].grad),
        "Backward of g is a reduce-scatter: every rank has used this shard, so its gradient is the "
        "sum of what all ranks have for it.",
    )
    paper = [("all-gather", BYTES), ("reduce-scatter", BYTES)] * 2
    hint = "A reduce-scatter and an all-gather move as much as one all-reduce."
    return "g(x), ḡ(y) and the gradients of X, A and B", par_of(calls, paper, hint)


# --- 3: the loss of a sharded vocabulary ----------------------------------------------------------


def vocabulary_loss(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    loss_of = function(answer, "vocab_parallel_cross_entropy")
    group = dist.group.WORLD
    vocab = 7
    sent = 0
    for offset in (0.0, -3.0, 900.0):
        whole = leaf(3 * numbers(B, S, vocab) + offset)
        # on rank 1 larger than on rank 0
        whole.data[..., 4:] += 50 if offset else 0
        targets = (torch.arange(B * S).view(B, S) * 3) % vocab
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none")
        expected = expected.view(B, S)
        weights = numbers(B, S, seed=3)
        (expected * weights).sum().backward()
        part = leaf(_columns(whole.detach(), rank))
        with watch.counted() as calls:
            # not a leaf, so that it may be overwritten
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
        watch.agree()
        same(
            f"the gradient of the logits on rank {rank}",
            part.grad,
            _columns(whole.grad, rank),
            "It is softmax(z) - onehot(target), and 0 in the padding.",
        )
        sent = sum(size for _, size in calls)
    most = 3 * B * S * 8
    text = f"{sent} bytes for {B * S} tokens; the paper sends 3 b s numbers, {most} bytes"
    if sent <= most:
        return "losses and gradients, V = 7 on 2 ranks", Par(True, text)
    return "losses and gradients", Par(False, text + ". Logits are never gathered.")


def _columns(logits: Tensor, rank: int) -> Tensor:
    """[b, s, 7] -> [b, s, 4]: on rank 1 the last column is padding, whose logit is 0."""
    return F.pad(logits, (0, 1)).chunk(2, -1)[rank]


# --- 5 to 7: schedules ----------------------------------------------------------------------------


def action_text(actions: list, v: int) -> str:
    """F0 F1 B0; with chunks F0.1: micro-batch 0 of chunk 1."""
    words = []
    for op, chunk, k in actions:
        words.append(f"{op}{k}.{chunk}" if v > 1 else f"{op}{k}")
    return " ".join(words)


def difference_of_lists(case: str, got: list, expected: list, v: int, hint: str) -> None:
    """Raises AnswerError at the first action that differs."""
    if not isinstance(got, list) or len(got) != len(expected):
        raise AnswerError(f"{case}: expected a list of {len(expected)} lists, one for each rank.")
    for rank, (mine, right) in enumerate(zip(got, expected)):
        try:
            mine = [schedules.Action(*action) for action in mine]
        except TypeError:
            raise AnswerError(
                f"{case}, rank {rank}: expected a list of Action(op, chunk, micro_batch), got "
                f"{mine!r:.60}"
            ) from None
        right = [tuple(action) for action in right]
        if mine == right:
            continue
        pairs = zip([*mine, None], [*right, None])
        position = next(i for i, (a, b) in enumerate(pairs) if a != b)
        most = max(0, position - 4)
        raise AnswerError(
            f"{case}, rank {rank}, position {position}.\n"
            f"expected  .. {action_text(right[most : position + 5], v)} ..\n"
            f"got       .. {action_text(mine[most : position + 5], v)} ..\n{hint}"
        )


def schedule_par(got: list, expected: list, name: str, case: tuple[int, int, int]) -> Par | None:
    """Micro-batches in flight and the bubble, beside the paper's. None where the lists cannot run:
    then there is nothing to count."""
    p, m, v = case
    try:
        if len(got) != p:
            return None
        got = [[schedules.Action(*action) for action in actions] for actions in got]
        schedules.validate(got, m, v)
    except (schedules.ScheduleError, TypeError):
        return None
    in_flight = [max(schedules.in_flight(lists)) for lists in (got, expected)]
    cost = schedules.Cost(1 / v, 1 / v, 1 / v)
    bubble = schedules.bubble(schedules.simulate(got, cost, v))
    formula = schedules.bubble_formula(name, p, m, v, cost)
    reached = in_flight[0] <= in_flight[1] and bubble <= formula + 1e-9
    unit = "chunks of a micro-batch" if v > 1 else "micro-batches"
    text = (
        f"p {p}, m {m}: {in_flight[0]} {unit} in flight, the paper's {in_flight[1]}; bubble "
        f"{bubble:.4f}, the paper's {formula:.4f}"
    )
    return Par(reached, text)


def schedule_grader(name: str, function_name: str, hint: str, chunks: tuple[int, ...] = (1,)):
    """A grader of lists: equal to the project's for p up to 6 ranks."""

    def grader(answer, rank: int, watch: Watch) -> tuple[str, Par]:
        make = function(answer, function_name)
        count = 0
        par = None
        # the case of the picture first
        for p, m in [(4, 8), *((p, m) for p in range(1, 7) for m in range(1, 13))]:
            for v in chunks:
                if v > 1 and m % p:
                    continue
                sizes = (p, m, v) if chunks != (1,) else (p, m)
                expected = schedules.make(name, p, m, v)
                got = make(*sizes)
                par = par or schedule_par(got, expected, name, (p, m, v))
                case = f"{function_name}{sizes}"
                try:
                    difference_of_lists(case, got, expected, v, hint)
                except AnswerError as error:
                    raise AnswerError(
                        str(error), schedule_par(got, expected, name, (p, m, v))
                    ) from None
                count += 1
        return f"{count} schedules, p from 1 to 6", par

    return grader


one_f_one_b = schedule_grader(
    "1f1b",
    "one_f_one_b",
    "Warmup is p - 1 - rank forwards: what the ranks behind need until the first gradient comes "
    "back. Then one F, one B in turn, and the backwards that are left. With few micro-batches the "
    "warmup ends early.",
)
interleaved = schedule_grader(
    "interleaved",
    "interleaved_one_f_one_b",
    "Forwards go through chunk 0, then chunk 1 and so on, for groups of p micro-batches; backwards "
    "in the same groups, but from the last chunk to the first. Warmup is 2 (p - 1 - rank) + "
    "(v - 1) p actions.",
    (2, 3),
)
zb_h1 = schedule_grader(
    "zb-h1",
    "zero_bubble_h1",
    "I stands where 1F1B has B. On rank r the W of micro-batch k comes right after the I of "
    "micro-batch k + r, and the W that are left come at the end.",
)


# --- 8: simulate ----------------------------------------------------------------------------------


def simulation(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    simulate = function(answer, "simulate")
    cost = schedules.Cost(1.0, 1.25, 0.75, transfer=0.5)
    cases = [("gpipe", 3, 4, 1), ("1f1b", 4, 8, 1), ("interleaved", 2, 4, 2), ("zb-h1", 4, 6, 1)]
    for name, p, m, v in cases:
        schedule = schedules.make(name, p, m, v)
        for of_transfer, now in (("", schedules.Cost()), (", transfers of 0.5 s", cost)):
            expected = {tuple(e)[:4]: e for e in schedules.simulate(schedule, now, v)}
            events = simulate([list(actions) for actions in schedule], now, v)
            got = {tuple(e)[:4]: schedules.Event(*e) for e in events or []}
            case = f"{name}, p {p}, m {m}{of_transfer}"
            _compare_events(case, got, expected)
    _refuses_a_deadlock(simulate)
    events = [schedules.Event(*e) for e in simulate(schedules.make("1f1b", 4, 8), cost=_ONE, v=1)]
    bubble = schedules.bubble(events)
    text = f"1f1b, p 4, m 8: bubble {bubble:.4f}, the paper's (p - 1) / m = {3 / 8:.4f}"
    return f"the times of {2 * len(cases)} runs; a deadlock, refused", Par(bubble == 3 / 8, text)


_ONE = schedules.Cost()


def _compare_events(case: str, got: dict, expected: dict) -> None:
    for key in got.keys() - expected.keys():
        raise AnswerError(
            f"{case}: rank {key[0]} runs {schedules.Action(*key[1:])}, which is not in its list."
        )
    # by start, so that the first difference is the cause of the others
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
    stuck = [
        [action("F", 0, 0), action("B", 0, 1), action("F", 0, 1), action("B", 0, 0)],
        [action("F", 0, 0), action("B", 0, 0), action("F", 0, 1), action("B", 0, 1)],
    ]
    try:
        simulate(stuck, _ONE, 1)
    except schedules.ScheduleError:
        return
    raise AnswerError(
        "Two lists that wait for each other came back as if they had run. Where no rank can go on "
        "and actions are left, raise ScheduleError: a deadlock is found here, not on a cluster."
    )


# --- 9 and 10: ZeRO -------------------------------------------------------------------------------


def zero2_reduce(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    reduce = function(answer, "reduce_gradients")
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
        watch.agree()
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
    return f"rows of 3 gradients, {micro_batches} micro-batches", Par(
        par.reached and kept <= size // 2, text
    )


def zero3_gather(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    linear = function(answer, "sharded_linear")
    group = dist.group.WORLD
    out, into = 5, 4
    weight = leaf(numbers(out, into))
    losses = 0
    inputs = [leaf(numbers(3, into, seed=5 + r)) for r in range(2)]
    for x in inputs:
        losses = losses + (x @ weight.t()).square().sum()
    losses.backward()
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
    watch.agree()
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
    return "y and the gradients of x and of the row", Par(
        par.reached and held < weight.nbytes, text
    )


# --- 11 and 12: activations -----------------------------------------------------------------------


def checkpointing(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    checkpoint = function(answer, "checkpoint")
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
    # not a leaf: another layer may stand before this one
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


def memory_formula(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    layer_bytes = function(answer, "layer_bytes")
    s, b, h, a = 128, 2, 64, 4
    hints = {
        "none": "Attention keeps 11 s b h + 5 a s² b, the MLP 19 s b h, two LayerNorms 4 s b h. "
        "Tensor parallelism divides 24 of the 34 s b h and all scores by t; the other 10 only "
        "sequence parallelism does.",
        "selective": "Selective recomputation keeps no scores: the term with s² is gone, the rest "
        "stays.",
        "full": "Full recomputation keeps the layer's input, 2 s b h; sequence parallelism shards "
        "it too.",
    }
    cases = [(t, sequence, way) for way in hints for t in (1, 2, 8) for sequence in (False, True)]
    for t, sequence, way in cases:
        for sizes in ((s, b, h, a), (2048, 4, 6144, 64)):
            right = recompute.layer_bytes(*sizes, t, sequence, way)
            got = layer_bytes(*sizes, t, sequence, way)
            if not isinstance(got, int | float) or not math.isclose(got, right, rel_tol=1e-12):
                raise AnswerError(
                    f"s, b, h, a = {sizes}, t = {t}, sequence_parallel={sequence}, recompute "
                    f"{way}: expected {right:,.0f}, got {got:,.0f}. {hints[way]}"
                    if isinstance(got, int | float)
                    else f"layer_bytes returned {got!r}, expected a number of bytes."
                )
    ratio = measured_bytes(s, b, h, a) / layer_bytes(s, b, h, a, 1, False, "none")
    text = f"a real layer, measured: {ratio:.4f} times the formula"
    return f"{2 * len(cases)} sizes of table 2", Par(abs(ratio - 1) < 0.02, text)


def measured_bytes(s: int, b: int, h: int, a: int) -> int:
    """What autograd keeps of one layer of the project's GPT in 16 bits."""
    import gpt
    import sharding
    from dropout import dropout_key
    from lessons import demo

    config = demo.tiny_config(
        num_layers=1, hidden_size=h, num_heads=a, seq_length=s, vocab_size=64, dropout=0.1
    )
    model = demo.meta_model(config)
    sharding.init(model, 0, "cpu", torch.bfloat16)
    block = model.blocks["0"]
    x = numbers(b, s, h).bfloat16().requires_grad_()
    context = gpt.Context(dropout_key(0, 1, torch.arange(b)))
    return recompute.saved_bytes(lambda: block(x, context), *block.parameters())


# --- 13: Sinkhorn ---------------------------------------------------------------------------------


def sinkhorn(answer, rank: int, watch: Watch) -> tuple[str, Par]:
    balance = function(answer, "sinkhorn")
    n, e = 24, 4
    made = 0
    for scale in (1.0, 3.0, 400.0):
        # all tokens like expert 0
        logits = scale * (numbers(n, e) + torch.tensor([1.0, 0, 0, 0]))
        if scale == 400:
            # far from 0, but as easy as the first
            logits = numbers(n, e) + 2000
        first = len(watch.sizes)
        plan = balance(logits.clone(), 1e-13)
        made = sum(size == n * e for size in watch.sizes[first:])
        same(
            f"the plan of logits near {logits.mean():.0f}",
            plan,
            routers.sinkhorn(logits, 1.0, 1e-13, 100_000),
            "Rows sum to 1/N and columns to 1/E at the same time. One scaling spoils the other, so "
            "both are repeated until the loads are even within the tolerance. exp overflows for "
            "large logits; of each row only differences matter.",
        )
    text = f"{made} matrices [N, E] made"
    if made > 8:
        return "3 plans", Par(False, f"{text}; a few would do. Keep d0 [N] and d1 [E] instead.")
    return "3 plans within 1e-10", Par(True, f"{text}, however many iterations; the rest: vectors")


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
        # what a kernel writes beyond the end is seen
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
        # the gate of tests/test_kernels.py
        if not error.max() <= 2 * torch_error:
            i = error.argmax()
            raise AnswerError(
                f"n = {n:,}, index {i}: gate {gate[i]:.6g}, up {up[i]:.6g}, expected {exact[i]:.6g}"
                f", got {y[i]:.6g}. y = gate · sigmoid(gate) · up."
            )
    text = f"vectors of 16 bytes: {bytes_in:,} bytes in and {bytes_out:,} out"
    if (bytes_in, bytes_out) == (8 * n, 4 * n):
        return "3 sizes, the error at most twice PyTorch's", Par(
            True, f"{text} for n = {n:,}; gate and up are read once, y is written once"
        )
    return "3 sizes", Par(
        False,
        f"{text}; one pass is {8 * n:,} in and {4 * n:,} out. Move whole vectors with read() and "
        "write(): a load of single floats moves a quarter as much.",
    )


# --- the list -------------------------------------------------------------------------------------

# number: (file, grader, ranks)
EXERCISES = {
    1: ("01_shards.py", shards, 2),
    2: ("02_f_and_g.py", f_and_g, 2),
    3: ("03_vocabulary_loss.py", vocabulary_loss, 2),
    4: ("04_g_and_g_bar.py", g_and_g_bar, 2),
    5: ("05_one_f_one_b.py", one_f_one_b, 1),
    6: ("06_interleaved.py", interleaved, 1),
    7: ("07_zb_h1.py", zb_h1, 1),
    8: ("08_simulate.py", simulation, 1),
    9: ("09_zero2_reduce.py", zero2_reduce, 2),
    10: ("10_zero3_gather.py", zero3_gather, 2),
    11: ("11_checkpoint.py", checkpointing, 1),
    12: ("12_memory_formula.py", memory_formula, 1),
    13: ("13_sinkhorn.py", sinkhorn, 1),
    14: ("14_swiglu.cu", fused_swiglu, 1),
}
