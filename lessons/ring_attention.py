"""The lesson of attention/ring_attention.py: a merge by hand, two ranks beside one, what travels.

python -m attention.ring_attention
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

import gpt
from attention import ring_attention
from attention.ring_attention import RingAttention
from context_parallel import gather, shard
from lessons import form
from proof import ranks
from proof.mutations import context_parallel as bugs

WITHOUT = {
    "rescaling": bugs.merge_without_rescaling,
    "step": bugs.ring_stops_early,
    "home": bugs.key_gradients_stay,
}
# name -> why checks fail without it
WHY = {
    "rescaling": (
        "Each part is a softmax over its own keys, as if their weights added up to 1. The mean of"
        " the parts gives the keys 1 and 3 half of the weight together, though they are 4 of 10."
        " What travels is the same."
    ),
    "step": (
        "What the last keys add is not merged in. The parts before are a softmax, and look"
        " healthy: every weight is too large by the same factor. What travels is the same."
    ),
    "home": (
        "A rank finds gradients of keys that are another's. Without the way home it adds them to"
        " those of its own keys. The result and the gradient of q need no keys' gradients, so they"
        " are right."
    ),
}

N = 2
B, A, A_KV, S, D = 2, 4, 2, 64, 16


def tensors() -> list[Tensor]:
    """q, k, v, and a gradient of the result [b, s, a d], float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, A, S, D), (B, A_KV, S, D), (B, A_KV, S, D), (B, S, A * D)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attention_and_gradients(core, q: Tensor, k: Tensor, v: Tensor, grad: Tensor):
    """([result, ∂q, ∂k, ∂v], sends in forward, sends in backward)"""
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    with ranks.Collectives() as forward:
        y = core(*leaves, gpt.PLAIN)
    with ranks.Collectives() as backward:
        y.backward(grad)
    sends = [[size for kind, size in c.calls if kind == "send"] for c in (forward, backward)]
    return [y.detach(), *(x.grad for x in leaves)], *sends


def on_rank(rank: int, mutate):
    """Of the whole sequence, as one device has it."""
    if mutate:
        mutate()
    group = dist.group.WORLD
    *of_heads, grad = tensors()
    own = [shard(x, group, 2) for x in of_heads]
    core = RingAttention(group)
    parts, *sends = attention_and_gradients(core, *own, shard(grad, group, 1))
    return [gather(x, group, 1 if n == 0 else 2) for n, x in enumerate(parts)], *sends


def merged_by_hand(mutate) -> float:
    """Keys with scores ln 1 and ln 3, values 0 and 8; and one with score ln 6, value 2."""
    original = ring_attention.merge
    if mutate:
        mutate()
    parts = [(6.0, math.log(4)), (2.0, math.log(6))]
    (o, log_sum), (more_o, more_sum) = (map(torch.tensor, part) for part in parts)
    result = ring_attention.merge(o, log_sum, more_o, more_sum)[0].item()
    ring_attention.merge = original
    return result


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        "One query. Rank 0 has keys with exp(q k / √d) = 1 and 3 and values 0 and 8: its part is 6,"
        " with L = ln 4. Rank 1 has a key with 6 and value 2: its part is 2, with L = ln 6. Over"
        " all keys?"
    )
    by_hand = merged_by_hand(lesson.mutate if lesson.without != "home" else None)
    lesson.check(
        f"4/10 of 6 + 6/10 of 2 = 3.6; merged {by_hand:.1f}; (1 · 0 + 3 · 8 + 6 · 2) / 10 = 3.6",
        abs(by_hand - 3.6) < 1e-6,
    )
    lesson.break_it(
        "rescaling", "The mean of the parts: 4. When would it be right?", WHY["rescaling"]
    )

    expected, *_ = attention_and_gradients(gpt.FusedAttention(), *tensors())
    found, forward, backward = ranks.run(on_rank, N, lesson.mutate)[0]
    differences = []
    for reference, tensor in zip(expected, found):
        differences.append(((reference - tensor).abs().max() / reference.abs().max()).item())
    lesson.predict(
        f"Two ranks with half of {S} tokens each, {A} heads of queries and {A_KV} of keys. How far"
        " from the attention of one device, which has all keys at once?"
    )
    lesson.check(f"relative difference of the result {differences[0]:.1e}", differences[0] < 1e-10)
    lesson.break_it("step", "The loss would still fall. What has a token lost?", WHY["step"])
    lesson.predict("And the gradients? Each rank computes with its own queries alone.")
    worst = dict(zip(("∂q", "∂k", "∂v"), differences[1:]))
    lesson.check(
        ", ".join(f"{name} {difference:.1e}" for name, difference in worst.items()),
        max(worst.values()) < 1e-10,
    )
    lesson.break_it(
        "home", "Gradients of keys stay where they were found. Which are wrong?", WHY["home"]
    )

    message = 2 * B * A_KV * S // N * D * 8
    lesson.predict(
        f"Keys and values of a rank: 2 b a_kv s/N d 8 = {message:,} bytes. They go to the next"
        f" rank N - 1 times. A rank's own part of their gradients waits at home: {N - 1} more."
        " How many messages?"
    )
    lesson.check(
        f"forward {len(forward)}, backward {len(backward)}, of {message:,} bytes each",
        forward == [message] * (N - 1) and backward == [message] * (2 * N - 2),
    )
