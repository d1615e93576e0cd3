"""course/ranks.py: what ranks return comes back; a failure, a death or a hang is named."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from course import ranks


def add(rank, number):
    x = torch.tensor([rank + number])
    dist.all_reduce(x)
    return x, torch.get_num_threads()


def fail_on_one(rank):
    if rank == 1:
        raise KeyError("no such thing")
    dist.barrier()


def die_on_one(rank):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def missing_peer(rank):
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(20)


def has_imported(rank):
    return {"parity", "train", "kernels", "course.parity"} <= sys.modules.keys()


def test_ranks_begin_with_what_the_server_has_imported():
    """Importing it would take longer than most runs do."""
    assert ranks.run(has_imported, 1) == [True]


def test_returns_what_each_rank_returned():
    results = ranks.run(add, 3, 10)
    sums = [x.item() for x, _ in results]
    threads = [n for _, n in results]
    assert sums == [33] * 3 and threads == [1] * 3


def test_a_failure_names_the_rank_and_its_error():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*no such thing"):
        ranks.run(fail_on_one, 2)


def test_a_death_names_the_rank():
    with pytest.raises(RuntimeError, match="rank 1 of 2 died with exit code 7"):
        ranks.run(die_on_one, 2)


def test_a_missing_peer_fails_instead_of_hanging():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed"):
        ranks.run(missing_peer, 2, timeout=2)
    assert time.monotonic() - start < 15
