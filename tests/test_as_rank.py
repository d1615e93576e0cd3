"""runtime/as_rank.py: what it says of a rank is what that rank does.

Real gloo ranks train the same small model on values, and are counted by the same counters: every
collective, every byte, every FLOP must be equal, on every rank.
"""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist

import train as trainer
from data import Batch
from lessons import ranks
from lessons.parity import LLAMA, SMALL, Synthetic
from runtime import as_rank
from runtime.world import Groups

GPT = SMALL | dict(precision="fp32", micro_batch_size=1)
LLAMA = LLAMA | dict(precision="fp32", micro_batch_size=1, dropout=0.0)
SEQUENCE = GPT | dict(tp=2, sequence_parallel=True)
EXPERTS = GPT | dict(num_experts=4, expert_every=2, ep=2)
# by the number of ranks
LAYOUTS = {
    1: [
        GPT | dict(recompute="selective"),
        LLAMA | dict(head_chunk=8, precision="bf16", optimizer_state="bf16"),
    ],
    2: [
        GPT | dict(tp=2),
        SEQUENCE | dict(recompute="selective"),
        LLAMA | dict(tp=2, sequence_parallel=True, recompute="full"),
        GPT | dict(zero_stage=1),
        GPT | dict(zero_stage=2),
        LLAMA | dict(zero_stage=3, recompute="full", recompute_layers=1),
        GPT | dict(pp=2, virtual_stages=2, num_layers=4),
        GPT | dict(pp=2, schedule="zb-h1", num_layers=4, layer_split=[3, 1]),
        EXPERTS | dict(recompute="full"),
        EXPERTS | LLAMA | dict(router="topk", router_topk=2, capacity_factor=1.0),
    ],
    4: [
        GPT | dict(tp=2, pp=2),
        SEQUENCE | dict(pp=2, schedule="gpipe", recompute="selective"),
        GPT | dict(pp=2, zero_stage=3),
        GPT | dict(tp=2, zero_stage=2, reduce_dtype="bf16"),
        EXPERTS | SEQUENCE | dict(zero_stage=1),
        EXPERTS | LLAMA | dict(zero_stage=3, router="topk"),
    ],
}


class Apart(Synthetic):
    """Tokens and targets in tensors of their own, as they are on a GPU."""

    def batch(self, samples):
        return Batch(*(tensor.contiguous().clone() for tensor in super().batch(samples)))


def both(rank: int, world: int, layouts: list[dict]) -> list[tuple[dict, dict]]:
    """(what this rank does, what as_rank says) of each layout."""
    configs = [trainer.Config(**layout) for layout in layouts]
    real = [measured(world, config) for config in configs]
    if dist.is_initialized():
        dist.destroy_process_group()
    said = [as_rank.report(config, trainer.Trainer, rank, world) for config in configs]
    return list(zip(real, map(dataclasses.asdict, said)))


def measured(world: int, config: trainer.Config) -> dict:
    """One real step of this rank, as fields of as_rank.Report."""
    groups = Groups()
    if world > 1:
        groups = Groups.make("cpu", world, config.tp, config.pp, ep=config.ep)
    t = trainer.Trainer(config, torch.device("cpu"), groups)
    for layer in t.expert_layers.values():
        layer.routing.scores = partial(as_rank.even_scores, layer.routing.k)
    dataset = Apart(t.model_config.seq_length, t.model_config.vocab_size)
    kept = as_rank.Kept(p for stage in t.stages for p in stage.parameters())
    if t.schedule:
        # so that what W waits for counts
        as_rank.Actions(t.model, kept)
    with kept, as_rank.Counters() as counters:
        t.forward_backward(1, dataset)
        t.update(1)
    collectives = [as_rank.Collective(*key, n) for key, n in counters.counted(groups).items()]
    return as_rank.bytes_of(t) | {
        "activations": kept.peak,
        "flops": counters.flops,
        "collectives": sorted(collectives),
    }


@pytest.mark.parametrize("world", LAYOUTS)
def test_equals_real_ranks(world):
    results = ranks.run(both, world, world, LAYOUTS[world])
    for number, layout in enumerate(LAYOUTS[world]):
        for rank in range(world):
            real, said = results[rank][number]
            for name, value in real.items():
                assert said[name] == value, (layout, rank, name)
