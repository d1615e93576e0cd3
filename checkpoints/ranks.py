"""All ranks succeed, or all ranks fail with the same error.

A checkpoint is written by all ranks together. When one of them cannot write, its error must reach
the others: they would wait for it in the next collective until the timeout.

    with agreed(f"cannot save {path}", group):        # each rank does its part
        write_my_file()
    # here every rank has written its file; otherwise CheckpointError was raised on every rank
"""

import contextlib

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


def cause_of(error: BaseException) -> BaseException:
    """torch.distributed.checkpoint collects what its ranks raised; the first of these errors."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


@contextlib.contextmanager
def agreed(what: str, group: dist.ProcessGroup | None = None, kind=CheckpointError):
    """A collective around a part of the work: an error in the body, on any rank, is raised on all.

    what: the beginning of the message where the error is not a CheckpointError; kind: what it then
    becomes."""
    error = None
    try:
        yield
    except CheckpointError as e:
        error = e
    # dcp.CheckpointException is a BaseException
    except (Exception, dcp.CheckpointException) as e:
        cause = cause_of(e)
        error = kind(f"{what}: {cause if isinstance(cause, OSError) else repr(cause)}")
    for e in gather(error, group):
        if e:
            raise e
