"""The lesson of context_parallel.py: who has which tokens, ring and all-to-all beside one rank.

python context_parallel.py
"""

import torch
import torch.distributed as dist

import context_parallel
import gpt
import sharding
from dropout import dropout_key
from lessons import demo, form
from proof import ranks
from proof.mutations import context_parallel as bugs


def in_order():
    """The sequence is cut in order, into N slices."""
    context_parallel.shard = lambda x, group, dim=1: x.chunk(group.size(), dim)[group.rank()]


WITHOUT = {
    "zigzag": in_order,
    "positions": bugs.no_zigzag_positions,
    "masks": bugs.same_masks_on_every_piece,
}
# name -> why checks fail without it
WHY = {
    "zigzag": (
        "Late tokens see more keys, and the last rank has them all: the others wait for it. And"
        " nothing else knows of this cut: positions and masks are those of the pieces."
    ),
    "positions": (
        "Rank r gives its tokens the vectors of positions r s/N and after, as if the sequence were"
        " cut in order. Shapes are right, attention's mask too, and bytes are the same."
    ),
    "masks": (
        "A mask is a hash of coordinates, and one of them is a token's place in the sequence. From"
        " place 0 on, a rank drops other elements than one device would drop there."
    ),
}

N = 2
B, S, H, A, A_KV = 2, 64, 64, 4, 2


def measure(kind: str) -> dict:
    """A GPT (h 64, a 4, L 2, dropout 0.1, float64): loss and gradients of one step, what a layer's
    attention sends, and the positions of this rank. kind: one, ring or all-to-all."""
    group = None if kind == "one" else dist.group.WORLD
    shape = dict(seq_length=S, num_kv_heads=A_KV, dropout=0.1)
    model = demo.meta_model(demo.tiny_config(**shape))
    context_parallel.apply(model, group, kind)
    sharding.init(model, 0, "cpu", torch.float64)
    tokens, targets = demo.random_tokens(B, S, 257)
    positions = torch.arange(S).unsqueeze(0)
    if group:
        whole = tokens, targets, positions
        tokens, targets, positions = (context_parallel.shard(x, group) for x in whole)
    with ranks.Collectives() as forward:
        context = gpt.Context(dropout_key(0, 1, torch.arange(B)))
        loss = model(tokens, targets, context).sum() / (B * S)
    loss.backward()
    loss = loss.detach()
    if group:
        for tensor in (loss, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor)
    return {
        "loss": loss.item(),
        "gradients": demo.gathered_gradients(model),
        "bytes": bytes_sent(forward.calls) // 2,
        "positions": positions[0],
    }


def bytes_sent(calls: list[tuple[str, int]]) -> int:
    """Of an all-to-all a rank keeps 1/N for itself."""
    sends = sum(size for kind, size in calls if kind == "send")
    exchanged = sum(size for kind, size in calls if kind == "all-to-all")
    return sends + exchanged * (N - 1) // N


def on_rank(rank: int, kinds: tuple[str, ...], mutate) -> dict[str, dict]:
    if mutate:
        mutate()
    return {kind: measure(kind) for kind in kinds}


def teach_work(lesson: form.Lesson, of_ranks: list[dict]) -> None:
    whole = S * (S + 1) // 2
    lesson.predict(
        f"A token at position i sees i + 1 keys, so {S} tokens compute {whole:,} scores. Cut in"
        f" order over 2 ranks, how many has each? And in zigzag: pieces 0 and 3, pieces 1 and 2?"
    )
    half = S // N
    ordered = [half * (half + 1) // 2, whole - half * (half + 1) // 2]
    work = [(result["positions"] + 1).sum().item() for result in of_ranks]
    for name, scores in (("in order", ordered), ("measured", work)):
        for rank, count in enumerate(scores):
            lesson.say(f"{name}, rank {rank} {count:>6,}  {form.bar(count, whole)}")
    lesson.check(
        f"in order {ordered[0]:,} and {ordered[1]:,}; in zigzag {whole // 2:,} each",
        work == [whole // 2] * N,
    )
    lesson.break_it("zigzag", "Each rank has one slice. Which one waits?", WHY["zigzag"])


def teach_bytes(lesson: form.Lesson, results: dict[str, dict]) -> None:
    tensor, k = B * S * H * 8, A_KV / A
    ring = int(2 * k * (N - 1) * tensor / N)
    exchange = int((2 + 2 * k) * (N - 1) * tensor / N**2)
    lesson.predict(
        f"b s h 8 = {tensor:,} bytes, k = a_kv / a = {k}, N = {N}. In a layer's forward the ring"
        " sends keys and values, the all-to-all one N-th of queries, keys, values and result. Bytes"
        " by each rank?"
    )
    measured = [results[kind]["bytes"] for kind in ("ring", "all-to-all")]
    lesson.check(
        f"ring 2 k (N - 1) b s h 8 / N = {ring:,}, sent {measured[0]:,}; all-to-all (2 + 2 k)"
        f" (N - 1) b s h 8 / N² = {exchange:,}, sent {measured[1]:,}",
        measured == [ring, exchange],
    )


def teach(lesson: form.Lesson) -> None:
    one = ranks.run(on_rank, 1, ("one",), None)[0]["one"]
    of_ranks = ranks.run(on_rank, N, ("ring", "all-to-all"), lesson.mutate)
    results = of_ranks[0]
    teach_work(lesson, [result["ring"] for result in of_ranks])
    teach_bytes(lesson, results)
    lesson.predict(
        "Dropout is 0.1. The ranks sum their losses and their gradients. How far from one device?"
    )
    for kind, result in results.items():
        lesson.check(
            f"{kind}: loss {result['loss']:.12f}, on one device {one['loss']:.12f}",
            abs(one["loss"] - result["loss"]) < 1e-10,
        )
        worst = demo.largest_difference(one["gradients"], result["gradients"])
        lesson.check(f"largest relative difference of a gradient {worst:.1e}", worst < 1e-10)
    lesson.break_it("positions", "Positions of a sequence cut in order.", WHY["positions"])
    lesson.break_it("masks", "Each rank drops what stands at these places.", WHY["masks"])
