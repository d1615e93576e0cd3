"""The graders of exercises whose answers run on two ranks: 1 to 4, 9 and 10. See graders.py."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course.exercises.grading import Par, Watch, leaf, numbers, par_of, same
from fsdp import FlatParameters
from sharding import Shard, Sharding, shard_of

B, S, H = 2, 4, 8
BYTES = B * S * H * 8

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
        # this rank's columns of A, and rows of B
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
        # on rank 1 larger than on rank 0
        whole.data[..., 4:] += 50 if offset else 0
        targets = (torch.arange(B * S).view(B, S) * 3) % vocab
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none")
        expected = expected.view(B, S)
        weights = numbers(B, S, seed=3)
        (expected * weights).sum().backward()
        part = leaf(columns_of(whole.detach(), rank))
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
        same(
            f"the gradient of the logits on rank {rank}",
            part.grad,
            columns_of(whole.grad, rank),
            "It is softmax(z) - onehot(target), and 0 in the padding.",
        )
        sent = sum(size for _, size in calls)
    most = 3 * B * S * 8
    text = f"{sent} bytes for {B * S} tokens; the paper sends 3 b s numbers, {most} bytes"
    if sent > most:
        text += ". Logits are never gathered."
    return "losses and gradients, V = 7 on 2 ranks", Par(sent <= most, text)


def columns_of(logits: Tensor, rank: int) -> Tensor:
    """[b, s, 7] -> [b, s, 4]: on rank 1 the last column is padding, whose logit is 0."""
    return F.pad(logits, (0, 1)).chunk(2, -1)[rank]


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
