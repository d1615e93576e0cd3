"""Which backend carries what ranks with GPUs send: NCCL where each has a GPU of its own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import device_mesh

from base.groups import Groups
from planning import substitutes
from run.world import World, WorldError

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


def answers(monkeypatch, devices, names):
    """What each rank is told; names: of the GPU that it sees as cuda:0."""
    store = dist.HashStore()
    worlds = [World(rank, len(names), 0, 1, 0, device) for rank, device in enumerate(devices)]
    of_rank = iter(names)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=next(of_rank))
        )
        with ThreadPoolExecutor(len(worlds)) as pool:
            waiting = [pool.submit(world.have_gpus_of_their_own, store) for world in worlds]
            return {future.result(timeout=20) for future in waiting}


@pytest.mark.parametrize(
    "devices, names, expected",
    [
        # each rank sees one GPU, as under `srun --gpus-per-task=1`
        ([GPU, GPU], ["a", "b"], True),
        ([GPU, GPU], ["a", "a"], False),
        ([GPU, CPU], ["a", "b"], False),
        ([CPU, CPU], ["a", "b"], False),
    ],
)
def test_gpus_are_told_apart_by_name(monkeypatch, devices, names, expected):
    assert answers(monkeypatch, devices, names) == {expected}


def test_a_pipeline_of_ranks_that_share_a_gpu(monkeypatch):
    """gloo has no send of a GPU's tensor."""
    world = World(0, 2, 0, 2, 0)
    monkeypatch.setattr(World, "choose_device", lambda self, device: setattr(self, "device", GPU))
    monkeypatch.setattr(World, "have_gpus_of_their_own", lambda self, store: False)
    world.refusals = SimpleNamespace(watch=lambda: None)
    monkeypatch.setattr(World, "meet", lambda self, timeout: dist.HashStore())
    with pytest.raises(WorldError, match="--pp 2: ranks share a GPU"):
        world.connect("cuda", 5, pp=2)
    world.watchdog.stop()


# --- streams of high priority ---------------------------------------------------------------------


class Options(Backend.Options):
    """In the place of dist.ProcessGroupNCCL.Options, which a build for CPUs lacks."""

    def __init__(self, is_high_priority_stream=False):
        super().__init__("nccl")
        self.is_high_priority_stream = is_high_priority_stream


def groups_asked_for(monkeypatch, backend):
    """[(name in the mesh, backend, options)]: what rank 0 of 16 asks torch for, with every kind of
    group. The groups that are made are fake ones."""
    asked = []
    new_group = dist.new_group

    def noted(ranks=None, timeout=None, backend=None, pg_options=None, group_desc=None, **rest):
        asked.append((group_desc, backend, pg_options))
        return new_group(ranks)

    def noted_split(split_ranks, timeout, pg_options):
        return noted(next(ranks for ranks in split_ranks if 0 in ranks), pg_options=pg_options)

    with substitutes.cluster(0, 16), monkeypatch.context() as patch:
        patch.setattr(device_mesh, "new_group", noted)
        patch.setattr(dist, "new_group", noted)
        patch.setattr(dist, "split_group", noted_split)
        patch.setattr(dist, "get_backend", lambda group=None: backend)
        nccl = SimpleNamespace(Options=Options)
        patch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
        patch.setattr(dist.ProcessGroup, "set_timeout", lambda group, timeout: None)
        sizes = dict(tp=2, pp=2, ep=2, cp=2, replicate=2)
        Groups.make("cpu", 16, timeout=timedelta(seconds=7), **sizes)
    return asked


def test_what_the_computation_waits_for_has_high_priority(monkeypatch):
    """All but the groups that sum gradients, and the one for CPU tensors. The links of the pipeline
    have no name. torch writes into options, so each group has its own."""
    urgent, others = [], set()
    for name, backend, options in groups_asked_for(monkeypatch, "nccl"):
        if options:
            assert options.is_high_priority_stream and options._timeout == timedelta(seconds=7)
            urgent.append((name, options))
        else:
            others.add((name, backend))
    assert {name for name, _ in urgent} == {None, "mesh_pp", "mesh_cp", "mesh_tp", "mesh_ep"}
    names = ("mesh_dp", "mesh_edp", "mesh_replicas", "mesh_replicate", "mesh_shard")
    assert others == {(None, "gloo"), *((name, None) for name in names)}
    of_links = [options for name, options in urgent if name is None]
    assert len(of_links) == len(set(of_links)) > 1


@pytest.mark.parametrize("backend", ["gloo", "nccl-rules"])
def test_other_backends_have_no_priority(monkeypatch, backend):
    assert not any(options for *_, options in groups_asked_for(monkeypatch, backend))
