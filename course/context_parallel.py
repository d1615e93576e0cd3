"""The lesson of context_parallel.py: who has which tokens, a merge by hand, ring and all-to-all
beside one rank."""

import math

import torch
import torch.distributed as dist

import context_parallel
import gpt
from base.dropout import dropout_key
from course import demo, form, ranks
from course.mutations import context_parallel as bugs

WITHOUT = form.Removals()
WITHOUT["positions"] = form.Removal(
    bugs.no_zigzag_positions,
    "Positions of a sequence cut in order.",
    "Rank r gives its tokens the vectors of positions r s/N and after, as if the sequence were cut"
    " in order. Shapes are right, attention's mask too, and bytes are the same.",
)
WITHOUT["masks"] = form.Removal(
    bugs.same_masks_on_every_piece,
    "Each rank drops what stands at these places.",
    "A mask is a hash of coordinates, and one of them is a token's place in the sequence. From"
    " place 0 on, a rank drops other elements than one device would drop there.",
)
WITHOUT["rescaling"] = form.Removal(
    bugs.merge_without_rescaling,
    "The mean of the parts: 4. When would it be right?",
    "Each part is a softmax over its own keys, as if their weights added up to 1. The mean of the"
    " parts gives the keys 1 and 3 half of the weight together, though they are 4 of 10. What"
    " travels is the same.",
)
WITHOUT["step"] = form.Removal(
    bugs.ring_stops_early,
    "The loss would still fall. What has a token lost?",
    "What the last keys add is not merged in. The parts before are a softmax, and look healthy:"
    " every weight is too large by the same factor. What travels is the same.",
)
WITHOUT["home"] = form.Removal(
    bugs.key_gradients_stay,
    "Gradients of keys stay where they were found.",
    "A rank finds gradients of keys that are another's. Without the way home it adds them to those"
    " of its own keys. The loss needs no keys' gradients, so it is right.",
)


@WITHOUT.add("zigzag", "Each rank has one slice. Which one waits?")
def in_order():
    """Late tokens see more keys, and the last rank has them all: the others wait for it. And
    nothing else knows of this cut: positions and masks are those of the pieces."""
    context_parallel.shard = lambda x, group, dim=1: x.chunk(group.size(), dim)[group.rank()]


N = 2
B, S, H, A, A_KV = 2, 64, 64, 4, 2


def measure(kind: str) -> dict:
    """A GPT (h 64, a 4, L 2, dropout 0.1, float64): loss and gradients of one step, what a layer's
    attention sends, and the positions of this rank. kind: ring or all-to-all."""
    group = demo.all_ranks()
    config = demo.tiny_config(seq_length=S, num_kv_heads=A_KV, dropout=0.1)
    apply = lambda model, group: context_parallel.apply(model, group, kind)  # noqa: E731
    model = demo.make_model(config, apply, group=group)
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
    """Bytes that leave a rank. Of an all-to-all it keeps 1/N for itself."""
    shares = {"send": 1, "all-to-all": (N - 1) / N}
    return int(sum(shares.get(kind, 0) * size for kind, size in calls))


def on_rank(rank: int) -> dict[str, dict]:
    """On one rank the two are the same model."""
    return {kind: measure(kind) for kind in ("ring", "all-to-all")}


def merged_by_hand(rank: int) -> float:
    """Keys with scores ln 1 and ln 3, values 0 and 8; and one with score ln 6, value 2."""
    (o, log_sum), (more_o, more_sum) = (
        map(torch.tensor, part) for part in ((6.0, math.log(4)), (2.0, math.log(6)))
    )
    return context_parallel.merge(o, log_sum, more_o, more_sum)[0].item()


def teach_merge(lesson: form.Lesson) -> None:
    lesson.predict(
        "One query. Rank 0 has keys with exp(q k / √d) = 1 and 3 and values 0 and 8: its part is 6,"
        " with L = ln 4. Rank 1 has a key with 6 and value 2: its part is 2, with L = ln 6. Over"
        " all keys?",
        "over all keys",
    )
    by_hand = lesson.on_ranks(1, merged_by_hand)[0]
    lesson.check(
        f"4/10 of 6 + 6/10 of 2 = 3.6; merged {by_hand:.1f}; (1 · 0 + 3 · 8 + 6 · 2) / 10 = 3.6",
        abs(by_hand - 3.6) < 1e-6,
        [by_hand],
    )


def teach_work(lesson: form.Lesson, of_ranks: list[dict]) -> None:
    whole = S * (S + 1) // 2
    lesson.predict(
        f"A token at position i sees i + 1 keys, so {S} tokens compute {whole:,} scores. Cut in"
        f" order over 2 ranks, how many has each? And in zigzag: pieces 0 and 3, pieces 1 and 2?",
        "rank 0, in order; rank 1, in order; each, in zigzag",
    )
    half = S // N
    ordered = [half * (half + 1) // 2, whole - half * (half + 1) // 2]
    work = [(result["positions"] + 1).sum().item() for result in of_ranks]
    for name, scores in (("in order", ordered), ("measured", work)):
        lesson.bars({f"{name}, rank {rank}": count for rank, count in enumerate(scores)}, whole)
    lesson.check(
        f"in order {ordered[0]:,} and {ordered[1]:,}; in zigzag {whole // 2:,} each",
        work == [whole // 2] * N,
        [*ordered, work[0]],
    )


def teach_bytes(lesson: form.Lesson, results: dict[str, dict]) -> None:
    tensor, k = B * S * H * 8, A_KV / A
    ring = int(2 * k * (N - 1) * tensor / N)
    exchange = int((2 + 2 * k) * (N - 1) * tensor / N**2)
    lesson.predict(
        f"b s h 8 = {tensor:,} bytes, k = a_kv / a = {k}, N = {N}. In a layer's forward the ring"
        " sends keys and values, the all-to-all one N-th of queries, keys, values and result. Bytes"
        " by each rank?",
        "ring; all-to-all",
    )
    measured = [results[kind]["bytes"] for kind in ("ring", "all-to-all")]
    lesson.check(
        f"ring 2 k (N - 1) b s h 8 / N = {ring:,}, sent {measured[0]:,}; all-to-all (2 + 2 k)"
        f" (N - 1) b s h 8 / N² = {exchange:,}, sent {measured[1]:,}",
        measured == [ring, exchange],
        measured,
    )


def teach(lesson: form.Lesson) -> None:
    one, of_ranks = lesson.one_and_many(N, on_rank)
    results = of_ranks[0]
    teach_merge(lesson)
    teach_work(lesson, [result["ring"] for result in of_ranks])
    teach_bytes(lesson, results)
    lesson.predict(
        "Dropout is 0.1. The ranks sum their losses and their gradients. How far from one device?"
    )
    for kind, result in results.items():
        demo.check_step(lesson, one[kind], result, f"on two, {kind}")


if __name__ == "__main__":
    form.run("context_parallel")
