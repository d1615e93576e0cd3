"""Hybrid sharding: ZeRO inside groups of replicas, which all hold the same shards."""

import pytest
import torch
import torch.distributed as dist
from parity import LLAMA, SMALL, again, check

import fsdp
import sharding
import train
from base.groups import Groups
from course import ranks
from course.synthetic import Synthetic
from planning import counters, substitutes

TWO = dict(data_parallel_replicate_degree=2, micro_batch_size=1)
STAGES = [dict(zero_stage=stage, **TWO) for stage in (1, 2, 3)]
EXPERTS = SMALL | dict(num_experts=4, router="topk")
FULL = dict(recompute="full")


def each(**flags) -> list[dict]:
    return [stage | flags for stage in STAGES]


@pytest.mark.parametrize(
    "base, world, layouts",
    [
        (SMALL, 4, [*each(), STAGES[1] | dict(cp=2)]),
        (EXPERTS, 4, [STAGES[2] | dict(ep=2)]),
        again(SMALL, 4, [STAGES[0] | dict(cp=2), STAGES[2] | dict(cp=4)]),
        again(EXPERTS, 4, each(ep=2)),
        again(SMALL | dict(global_batch_size=12), 6, [*each(), STAGES[2] | FULL]),
        again(LLAMA, 8, [dict(STAGES[0], data_parallel_replicate_degree=4), STAGES[1]]),
        again(SMALL, 8, each(tp=2, sequence_parallel=True)),
        again(LLAMA, 8, each(pp=2, schedule="zb-h1") + each(pp=2, schedule="1f1b", **FULL)),
        again(SMALL, 8, each(cp=2)),
        again(EXPERTS, 8, each(ep=2) + each(ep=4) + [STAGES[2] | dict(ep=2, tp=2)]),
        again(EXPERTS, 8, [STAGES[2] | dict(ep=2, pp=2), STAGES[2] | dict(ep=4, cp=2)]),
    ],
)
def test_equals_one_device(base, world, layouts):
    check(world, layouts, base)


def sent(rank: int, world: int, flags: dict) -> dict:
    """Elements that this rank sends in a step inside its shard group, and across; and Ψ, with
    padding."""
    config = train.Config(**SMALL | dict(precision="fp32") | flags)
    groups = Groups.make("cpu", world, **config.mesh)
    t = train.Trainer(config, torch.device("cpu"), groups)
    with counters.Collectives() as noted:
        t.forward_backward(1, Synthetic(16, 61))
        t.update(1)
        t.task.wait_for_parameters()
    found = dict(shard=0.0, replicate=0.0)
    for (kind, group, size), count in noted.counted(groups).items():
        # The norm is one number.
        if size > 8:
            n = getattr(groups, group).size()
            passes = 2 if kind == "all-reduce" else 1
            found[group] += passes * count * size / 4 * (n - 1) / n
    shards = sum(p.numel() for _, p in sharding.named_parameters(*t.stages))
    return found | dict(psi=groups.shard.size() * shards)


@pytest.mark.parametrize(
    "world, replicate", [(4, 2), again(6, 2), again(6, 3), again(8, 2), again(8, 4)]
)
def test_elements_sent(world, replicate):
    """Inside: the table of ZeRO with N = S. Across: an all-reduce of Ψ / S, once a step."""
    s, m = world // replicate, 2
    flags = dict(data_parallel_replicate_degree=replicate, micro_batch_size=1)
    for stage in (1, 2, 3):
        layout = flags | dict(zero_stage=stage, global_batch_size=m * world)
        for found in ranks.run(sent, world, world, layout):
            psi = found["psi"]
            assert found["shard"] == fsdp.elements_sent(stage, m) * psi * (s - 1) / s
            across = 2 * psi / s * (replicate - 1) / replicate
            assert found["replicate"] == pytest.approx(across, rel=1e-12)


def test_neighbours_shard():
    """16 ranks: tp 2 inside ep 2 inside 2 groups of 4 replicas."""
    with substitutes.cluster(5, 16):
        groups = Groups.make("cpu", 16, tp=2, ep=2, replicate=2)
        found = {}
        for name in ("replicas", "shard", "replicate", "ep", "edp", "tp"):
            found[name] = dist.get_process_group_ranks(getattr(groups, name))
    assert found == {
        "replicas": [1, 3, 5, 7, 9, 11, 13, 15],
        "shard": [1, 3, 5, 7],
        "replicate": [5, 13],
        "ep": [5, 7],
        "edp": [1, 5],
        "tp": [4, 5],
    }
