"""Checkpoints that are whole or not there: safetensors files and one JSON index, through torch.distributed.checkpoint.

    RUN/checkpoints/step-000100/
        shard-00001-model-00001-of-00001.safetensors       one per rank: the tensors that this rank wrote
        index.json                                          step, configuration, optimizer numbers, tensors, files and their sizes

A checkpoint is written beside its place, as `.step-000100.saving`, flushed to the disk, and renamed: a run that is killed or
runs out of disk while it saves leaves the earlier checkpoints as they were. Tensors stand under global names, in full
precision, each rank's part as a slice of the global tensor: what was saved under one layout loads under any other. Nothing is ever unpickled: loading a file that somebody sent executes none of it. That is why the index is ours;
torch.distributed.checkpoint's own metadata file is a pickle, and is neither written nor read.

    python checkpoint.py RUN/checkpoints/step-000100       what is in it

Megatron-LM writes asynchronously and checks nothing; here a missing or short file is found, and named, before anything loads.
"""
import json
import logging
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import sharding

FORMAT = 1
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says which, and why."""


def name(step: int) -> str:
    return f"step-{step:06d}"


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by step, the newest last. Unfinished ones have another name."""
    found = {int(m[1]): p for p in Path(folder).glob("step-*") if (m := re.fullmatch(r"step-(\d{6,})", p.name))}
    return dict(sorted(found.items()))


def agree(error: Exception | str | None) -> None:
    """A collective. An error on one rank is raised as a CheckpointError on all."""
    message = None if error is None else str(error)
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
        message = next((m for m in messages if m), None)
    if message:
        raise CheckpointError(message)


def chunk(tensor: Tensor) -> ChunkStorageMetadata:
    """Which part of the global tensor this is, padding left out, as torch.distributed.checkpoint says it."""
    offset, size, _ = sharding.place(sharding.of(tensor))
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))


class _SavePlanner(dcp.DefaultSavePlanner):
    """Every rank offers its parts; of equal offers the base class takes one, and it checks that the parts make up the whole."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__(flatten_state_dict=False)
        self.tensors = tensors

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([
            WriteItem(index=MetadataIndex(n, chunk(t).offsets), type=WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk=chunk(t), properties=TensorProperties.create_from_tensor(t),
                                                  size=torch.Size(sharding.of(t).shape)))
            for n, t in self.tensors.items() if 0 not in chunk(t).sizes])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor = self.tensors[index.fqn]
        return sharding.narrow(tensor, sharding.of(tensor))


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Every rank asks for its parts, from whichever files hold them."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__(flatten_state_dict=False)
        self.tensors = tensors

    def create_local_plan(self) -> LoadPlan:
        items = []
        for n, t in self.tensors.items():
            if 0 not in chunk(t).sizes:
                stored = self.metadata.state_dict_metadata.get(n)
                found = create_read_items_for_chunk_list(n, stored, [chunk(t)]) if stored else []
                if sum(item.lengths.numel() for item in found) != chunk(t).sizes.numel():
                    raise ValueError(f"its files lack {n}, or a part of it")
                items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor = self.tensors[index.fqn]
        return sharding.narrow(tensor, sharding.of(tensor))


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict, keep: int = 0) -> Path:
    """Write folder/step-00NNNN; all ranks call this together. tensors: global name -> this rank's part, with its sharding
    record; each rank names what it holds. What several ranks hold is written once, and padding never.
    state: `config` and `model`, the configurations as dicts, and what else the next step depends on, as JSON. keep: how many checkpoints remain, 0 for all.

    Raises CheckpointError, on all ranks, when a rank cannot write; nothing earlier is touched before the new one is whole.
    """
    final = Path(folder) / name(step)
    building = final.with_name(f".{final.name}.saving")
    rank = dist.get_rank() if dist.is_initialized() else 0
    error = None
    try:
        if rank == 0:
            final.parent.mkdir(parents=True, exist_ok=True)
            for leftover in final.parent.glob(".step-*"):                # of runs that were killed
                shutil.rmtree(leftover)
            building.mkdir()
    except OSError as e:
        error = e
    agree(error and f"cannot save {final}: {error}")
    described = {n: [str(t.dtype).removeprefix("torch."), list(sharding.of(t).shape)] for n, t in tensors.items()}
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()                      # pipeline stages hold different names
        dist.all_gather_object(everywhere, described)
        described = {n: d for one in everywhere for n, d in one.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                              # without a process group it says that it assumes one rank
            dcp.save(tensors, planner=_SavePlanner(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(building), save_distributed=True),
                     no_dist=not dist.is_initialized())
    except (dcp.CheckpointException, OSError) as e:                      # the first is a BaseException
        error = next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) else e
    agree(error and f"cannot save {final}: {error}")
    try:
        if rank == 0:
            files = sorted(building.glob("*.safetensors"))
            index = {"format": FORMAT, "step": step, **state,
                     "tensors": described,
                     "files": {f.name: f.stat().st_size for f in files}}
            (building / "index.json").write_text(json.dumps(index, indent=1))
            for path in [*files, building / "index.json", building]:
                sync(path)
            if final.exists():                                           # the same step once more: until the next line the one before is newest
                os.rename(final, final.with_name(f".{final.name}.removing"))
            os.rename(building, final)
            sync(final.parent)
            for old in list(steps(final.parent).values())[:-keep] if keep else []:
                os.rename(old, old.with_name(f".{old.name}.removing"))   # gone at once, even when killed while deleting
            for removed in final.parent.glob(".step-*.removing"):
                shutil.rmtree(removed)
    except OSError as e:
        error = e
    agree(error and f"cannot save {final}: {error}")
    return final


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_index(path: Path) -> dict:
    """The index of one checkpoint, after checking that its files are there and complete. Raises CheckpointError."""
    path = Path(path)
    try:
        index = json.loads((path / "index.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint of this project: it has no index.json") from None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}/index.json cannot be read ({e})") from None
    kinds = {"format": int, "step": int, "tensors": dict, "files": dict, "config": dict, "model": dict}
    if not isinstance(index, dict) or index.get("format") != FORMAT or not all(isinstance(index.get(k), kind) for k, kind in kinds.items()) \
            or not all(isinstance(t, list) and len(t) == 2 and isinstance(t[1], list) for t in index["tensors"].values()):
        raise CheckpointError(f"{path}/index.json is not the index of a checkpoint of this project")
    for file, size in index["files"].items():
        found = (path / file).stat().st_size if (path / file).is_file() else None
        if found != size:
            raise CheckpointError(f"{path / file} is {'missing' if found is None else f'{found} bytes long, not {size}'}: "
                                  "the checkpoint is damaged; delete its folder and the one before it is used")
    return index


def load(path: Path, tensors: dict[str, Tensor], model: dict | None = None) -> dict:
    """Fill `tensors` in place and return the index; all ranks call this together. Raises CheckpointError, on all ranks, when the
    checkpoint is damaged, or is of another model: naming the tensors that differ, or, of the fields in `model`, those that do."""
    path, index, error = Path(path), None, None
    try:
        index = read_index(path)
        differ = [f"{k} is {index['model'].get(k)} there and {v} here" for k, v in (model or {}).items() if index["model"].get(k) != v]
        if differ:
            raise CheckpointError(f"{path} holds another model: {'; '.join(differ)}")
    except CheckpointError as e:
        error = e
    agree(error)
    saved = {n: tuple(shape) for n, (_, shape) in index["tensors"].items()}
    wrong = [f"{n} is {saved.get(n, 'missing')} there and {sharding.of(t).shape} here" for n, t in tensors.items()
             if saved.get(n) != sharding.of(t).shape]
    if wrong:
        raise CheckpointError(f"{path} holds another model: {'; '.join(wrong[:3])}" + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, planner=_LoadPlanner(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(path)),
                     no_dist=not dist.is_initialized())
    except (dcp.CheckpointException, OSError) as e:
        cause = next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) else e
        raise CheckpointError(f"{path} cannot be loaded: {cause}") from None
    return index


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python checkpoint.py CHECKPOINT")
    try:
        index = read_index(Path(sys.argv[1]))
    except CheckpointError as e:
        sys.exit(f"checkpoint.py: {e}")
    for tensor, (dtype, shape) in index.pop("tensors").items():
        print(f"{dtype:>9} {str(shape):>16} {tensor}")
    print(json.dumps(index, indent=1))


if __name__ == "__main__":
    main()
