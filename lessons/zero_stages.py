"""The demonstration of fsdp.py: two ranks train one step in each stage, beside the table there.

    stage 0: gradients of one rank   bytes held: measured / formula   elements sent   all-gathers

A collective that starts early costs little: while it is in flight, the rank computes. What it costs
is the time that the rank spends in `wait`. Both are measured for the all-gathers.

    python fsdp.py
"""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
import sharding
from lessons import demo, ranks
from optimizer import AdamW

# 8 sequences: of all ranks and micro-batches together
B, S, V = 8, 64, 1024
SHAPE = dict(num_layers=4, hidden_size=128, num_heads=4, ffn_hidden_size=344, llama=True)


def held_bytes(model: nn.Module, gradients: fsdp.DataParallel) -> tuple[int, int]:
    """(parameters, gradients) that this rank holds now, in bytes."""
    parameters = list(model.parameters())
    shards = [sharding.local_part(p) for p in parameters]
    flat = [unit.local_grads for unit in gradients.units]
    flat += [unit.summed_grads for unit in gradients.units]
    return storage_bytes(parameters + shards), storage_bytes(flat)


def storage_bytes(tensors: list[Tensor | None]) -> int:
    """Each storage counts once; a freed one has 0 bytes."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class TimedWork:
    """The handle of one collective. Seconds of all of them: from start to end, and in `wait`."""

    in_flight = 0.0
    waited = 0.0

    def __init__(self, work):
        self.work = work
        self.start = time.perf_counter()
        # called in a thread of the process group, when the collective ends
        work.get_future().add_done_callback(self.end)

    def end(self, future) -> None:
        TimedWork.in_flight += time.perf_counter() - self.start

    def wait(self) -> None:
        start = time.perf_counter()
        self.work.wait()
        TimedWork.waited += time.perf_counter() - start


def on_rank(rank: int, n: int, stage: int, m: int):
    """Two steps of m micro-batches, as train.py makes them. The second one is measured.

    Returns gradients, bytes of (parameters, gradients, moments), elements sent, seconds that
    all-gathers were in flight, seconds that they were waited for.
    """
    model = demo.meta_model(demo.tiny_config(seq_length=S, vocab_size=V, **SHAPE))
    init = partial(sharding.init, model, 0, "cpu", torch.float32)
    gradients = fsdp.apply(model, dist.group.WORLD, stage, init=init)
    optimizer = AdamW(sharding.named_parameters(model))
    # [B / n / m, S] for each micro-batch of this rank
    tokens, targets = (x.chunk(n)[rank].chunk(m) for x in demo.random_tokens(B, S, V))
    loss_grad = torch.tensor(1 / (B * S))
    all_gather = fsdp.all_gather
    fsdp.all_gather = lambda *args, **options: TimedWork(all_gather(*args, **options))
    for _ in range(2):
        TimedWork.in_flight = TimedWork.waited = 0.0
        with ranks.Collectives() as sent:
            gradients.zero()
            for k in range(m):
                if k == m - 1:
                    gradients.last_backward()
                model(tokens[k], targets[k]).sum().backward(loss_grad)
            gradients.reduce_gradients()
            optimizer.step(lr=0.0)
            gradients.gather_parameters()
    fsdp.all_gather = all_gather
    moments = [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    held = (*held_bytes(model, gradients), storage_bytes(moments))
    whole = demo.gathered_gradients(model)
    return whole, held, elements(sent.calls), TimedWork.in_flight, TimedWork.waited


def elements(calls: list[tuple[str, int]]) -> int:
    """fp32 numbers in the collectives of a step, an all-reduce counted twice."""
    total = 0
    for kind, size in calls:
        # the gradient norm is one number
        if size > 64:
            total += size // 4 * (2 if kind == "all-reduce" else 1)
    return total


def main():
    n, m = 2, 2
    reference = ranks.run(on_rank, 1, 1, 0, 1)[0][0]
    psi = sum(gradient.numel() for gradient in reference.values())
    print(f"a Llama (h 128, L 4, V 1024) of Ψ = {psi:,} parameters in fp32 on {n} ranks, {m}")
    print("micro-batches. Bytes of a rank, and elements sent: measured / by formula")
    titles = "".join(f"{title:>26}" for title in ("parameters", "gradients", "moments"))
    print(f"stage  gradients differ by{titles}   sent, Ψ (N-1)/N   gathers in flight, waited for")
    for stage in range(4):
        gradients, held, sent, in_flight, waited = ranks.run(on_rank, n, n, stage, m)[0]
        line = f"{stage:>5}{demo.largest_difference(reference, gradients):>21.1e}"
        for measured, formula in zip(held, fsdp.bytes_per_parameter(stage, n, 4, 4, 8)):
            pair = f"{measured:,} / {psi * formula:,.0f}"
            line += f"{pair:>26}"
        line += f"   {sent / psi:.3f} / {fsdp.elements_sent(stage, m)}"
        if in_flight:
            line += f"         {in_flight * 1e3:.1f} ms, {waited * 1e3:.1f} ms"
        print(line)
