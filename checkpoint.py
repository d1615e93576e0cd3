"""Checkpoints that are whole or not there, load under any layout, and are written while training goes on: safetensors files and a JSON index, through
torch.distributed.checkpoint.

    RUN/checkpoints/step-000100/
        shard-00001-model-00001-of-00001.safetensors       the slices that rank 0 wrote; at about 1 GiB the next file begins
        shard-00002-..
        index.json                                          step, configuration, optimizer numbers, tensors; size and SHA-256 of each file
        index.json.sha256                                   of the index itself, as sha256sum writes it

Tensors stand under global names, weights in fp32 and moments as the optimizer keeps them, each rank's part as a slice of the global tensor: what was saved under any tensor, pipeline and
data-parallel sizes and any ZeRO stage loads under any other, and no rank ever holds more than its own part. Slices that several ranks hold are written
once, padding never.

    training     step 100 | copy | step 101 | step 102 | ..          `Saver`: a copy of this rank's part in memory, then
    thread                       | write, flush, hash, rename |      a thread that writes it, with a process group of its own

A checkpoint is written beside its place, as `.step-000100.saving`, flushed to the disk, and renamed: a run that is killed or runs out of disk while it
saves leaves the earlier checkpoints as they were. A flipped byte, a missing or a short file is found, and named, before anything loads: all ranks read
the files once between them, to hash them. Nothing is ever unpickled: loading a file that somebody sent executes none of it. That is why the index
is ours; torch.distributed.checkpoint's own metadata file is a pickle, and is neither written nor read.

    python checkpoint.py                  saves on two ranks, loads on one and on three, finds a flipped bit
    python checkpoint.py show CKPT        what is in it
    python checkpoint.py verify CKPT      reads all of it and compares the checksums

What a production system adds: files per node instead of per rank, parallel writes from one rank, copies kept in other nodes' memory.
"""
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
import warnings
from collections import Counter
from math import prod
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import json_files
import sharding
from gpt import GPTConfig, least_parameters

FORMAT = 2
FILE_BYTES = 2**30               # of a file, about
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")                     # without a process group there is one rank, yes


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says which, and why."""


class Damaged(CheckpointError):
    """A checkpoint that is not what was written: there may be a whole one before it."""


def name(step: int) -> str:
    return f"step-{step:06d}"


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by step, the newest last. Unfinished ones have another name. Raises CheckpointError
    for a folder that is there and cannot be read: it is not an empty one."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    found = {int(m[1]): Path(folder) / name for name in names if (m := re.fullmatch(r"step-(\d{6,18})", name))}
    return dict(sorted(found.items()))


def find(path: str | Path) -> Path:
    """A checkpoint's folder, or the newest one in the folder of a run. Raises CheckpointError."""
    try:
