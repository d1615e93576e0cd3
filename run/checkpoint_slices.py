"""The slices of a checkpoint, as torch.distributed.checkpoint (DCP) plans, writes and reads them.

The planners below tell DCP which slices of which tensors a rank has, or needs, from the sharding
records. DCP decides which rank writes a slice that several hold, and which files hold what a rank
needs. run/checkpoint.py imports this file with the first checkpoint: DCP takes a second to import.
"""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner, planner_helpers

from run.checkpoint_index import CheckpointError
from sharding import local_slice, set_sharding, sharding_of, unpad

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
# Without a process group there is one rank, as intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def chunk(tensor: Tensor) -> metadata.ChunkStorageMetadata:
    """Offset and size of a rank's slice in the global tensor, without padding."""
    offset, size, _ = local_slice(sharding_of(tensor))
    return metadata.ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))


class _SavePlanner(dcp.DefaultSavePlanner):
    """Offers a rank's slices. The base class keeps one of equal offers, and checks that the slices
    cover every tensor."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        read: Callable[[str], Tensor] | None,
        copied: Callable[[], None] | None,
    ):
        super().__init__(flatten_state_dict=False)
        self.tensors = tensors
        self.read = read
        self.copied = copied

    def create_local_plan(self) -> dcp.SavePlan:
        items = []
        for name, tensor in self.tensors.items():
            # A rank that holds nothing but padding offers nothing.
            if 0 in chunk(tensor).sizes:
                continue
            data = planner.TensorWriteData(
                chunk=chunk(tensor),
                properties=metadata.TensorProperties(dtype=tensor.dtype),
                size=torch.Size(sharding_of(tensor).shape),
            )
            index = metadata.MetadataIndex(name, chunk(tensor).offsets)
            items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data))
        # The base class expects the plan here.
        self.plan = dcp.SavePlan(items)
        return self.plan

    def finish_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """plan: the offers that this rank is to write. Where training waits for a copy, only those
        are copied."""
        if self.copied:
            copies = {}
            for item in plan.items:
                name = item.index.fqn
                copy = host_copy(self.lookup_object(item.index))
                copies[name] = set_sharding(copy, sharding_of(self.tensors[name]))
            self.tensors = copies
            self.copied()
        return super().finish_plan(plan)

    def lookup_object(self, index: metadata.MetadataIndex) -> Tensor:
        tensor = self.tensors[index.fqn]
        part = unpad(tensor, sharding_of(tensor))
        if not isinstance(part, Tensor):
            # A SplitMaster of optimizer.py.
            return part.join()
        return self.read(index.fqn) if part.is_meta else part


def host_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor, in pinned memory if the tensor is on a GPU. PyTorch keeps freed pinned
    memory, so the next save reuses it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Asks for a rank's slices, wherever they are stored."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__(flatten_state_dict=False)
        self.tensors = tensors

    def create_local_plan(self) -> dcp.LoadPlan:
        items = []
        for name, tensor in self.tensors.items():
            needed = chunk(tensor)
            if 0 in needed.sizes:
                continue
            overlaps = []
            if stored := self.metadata.state_dict_metadata.get(name):
                # One item for each stored slice that overlaps the needed one.
                overlaps = planner_helpers.create_read_items_for_chunk_list(name, stored, [needed])
            if sum(item.lengths.numel() for item in overlaps) != needed.sizes.numel():
                raise ValueError(f"its files lack {name}, or a part of it")
            items += overlaps
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: metadata.MetadataIndex) -> Tensor:
        tensor = self.tensors[index.fqn]
        return unpad(tensor, sharding_of(tensor))

    def resolve_tensor(self, item: planner.ReadItem) -> Tensor:
        """The tensor into which the reader puts one stored slice."""
        tensor = self.tensors[item.dest_index.fqn]
        if isinstance(tensor, Tensor):
            return super().resolve_tensor(item)
        return torch.empty(item.lengths, dtype=tensor.dtype)

    def commit_tensor(self, item: planner.ReadItem, read: Tensor) -> None:
        """Called when the reader has filled the tensor of `resolve_tensor`: split a split
        master."""
        tensor = self.tensors[item.dest_index.fqn]
        if not isinstance(tensor, Tensor):
            ends = map(sum, zip(item.dest_offsets, item.lengths))
            tensor[tuple(map(slice, item.dest_offsets, ends))].copy_(read)


def write(
    folder: Path,
    tensors: dict[str, Tensor],
    number: dict[str, int],
    read: Callable[[str], Tensor] | None,
    group: dist.ProcessGroup | None,
    copied: Callable[[], None] | None,
) -> None:
    """Write this rank's safetensors files. A collective. number: tensor name -> number of its file;
    read, copied: as in checkpoint.write. Raises the error of the first rank that failed."""
    to = dcp.HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=number, save_distributed=True
    )
    alone = not dist.is_initialized()
    plans = _SavePlanner(tensors, read, copied)
    try:
        # The planner has the tensors.
        dcp.save({}, planner=plans, storage_writer=to, process_group=group, no_dist=alone)
    except dcp.CheckpointException as e:
        raise first_cause(e) from None


def read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill this rank's slices. A collective. Raises CheckpointError."""
    source = dcp.HuggingFaceStorageReader(str(path))
    alone = not dist.is_initialized()
    try:
        dcp.load({}, planner=_LoadPlanner(tensors), storage_reader=source, no_dist=alone)
    except (dcp.CheckpointException, OSError) as e:
        why = first_cause(e) if isinstance(e, dcp.CheckpointException) else e
        raise CheckpointError(f"{path} cannot be loaded: {why}") from None


def first_cause(error: dcp.CheckpointException) -> BaseException:
    """The first of the errors that DCP has collected from its ranks."""
    return next(iter(error.failures.values()))[0]
