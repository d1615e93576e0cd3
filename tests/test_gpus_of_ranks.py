"""Which backend carries what ranks with GPUs send: NCCL where each has a GPU of its own."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from base.world import World, WorldError

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
        world.connect("cuda", 1, 2, 5)
    world.watchdog.stop()
