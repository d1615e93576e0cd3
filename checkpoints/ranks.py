"""All ranks succeed, or all ranks fail with the same error.

A checkpoint is written by all ranks together. When one of them cannot write, its error must reach
the others: they would wait for it in the next collective until the timeout.

    with agreed(path, building, group):        # each rank does its part
        write_my_file()
    # here every rank has written its file; otherwise CheckpointError was raised on every rank
"""

import contextlib
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from checkpoints.index import CheckpointError


def rank_and_world(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value, group: dist.ProcessGroup | None) -> list:
    """A collective: every rank's value, on every rank. Without process groups there is one rank."""
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def agree(error: CheckpointError | None, group: dist.ProcessGroup | None = None) -> None:
    """A collective: an error on one rank is raised on all."""
    for e in gather(error, group):
        if e:
            raise e


def cause_of(error: BaseException) -> BaseException:
    """torch.distributed.checkpoint collects what its ranks raised; the first of these errors."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


@contextlib.contextmanager
def agreed(path: Path, building: Path, group: dist.ProcessGroup | None):
    """A collective around one step of a save: an error in the body, on any rank, removes the
    unfinished folder and is raised as CheckpointError on all ranks."""
    error = None
    try:
        yield
    # dcp.CheckpointException is a BaseException
    except (Exception, dcp.CheckpointException) as e:
        cause = cause_of(e)
        message = str(cause) if isinstance(cause, OSError) else repr(cause)
        error = CheckpointError(f"cannot save {path}: {message}")
    try:
        agree(error, group)
    except CheckpointError:
        if rank_and_world(group)[0] == 0:
            shutil.rmtree(building, ignore_errors=True)
        raise
