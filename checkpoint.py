"""Checkpoints that are whole or not there, load under any layout, and are written while training
goes on: safetensors files and a JSON index, through torch.distributed.checkpoint.

    RUN/checkpoints/step-000100/
        shard-00001-model-00001-of-00001.safetensors       the slices that rank 0 wrote; at about 1 GiB the next file begins
        shard-00002-..
        index.json                                          step, configuration, optimizer numbers, tensors; size and SHA-256 of each file
        index.json.sha256                                   of the index itself, as sha256sum writes it

Tensors stand under global names, weights in fp32 and moments as the optimizer keeps them, each
rank's part as a slice of the global tensor: what was saved under any tensor, pipeline and
data-parallel sizes and any ZeRO stage loads under any other, and no rank ever holds more than its
own part. Slices that several ranks hold are written once, padding never.

    training     step 100 | copy | step 101 | step 102 | ..          `Saver`: a copy of this rank's part in memory, then
    thread                       | write, flush, hash, rename |      a thread that writes it, with a process group of its own

A checkpoint is written beside its place, as `.step-000100.saving`, flushed to the disk, and
renamed: a run that is killed or runs out of disk while it saves leaves the earlier checkpoints as
they were. A flipped byte, a missing or a short file is found, and named, before anything loads: all
ranks read the files once between them, to hash them. Nothing is ever unpickled: loading a file that
somebody sent executes none of it. That is why the index is ours; torch.distributed.checkpoint's own
metadata file is a pickle, and is neither written nor read.

    python checkpoint.py                  saves on two ranks, loads on one and on three, finds a flipped bit
    python checkpoint.py show CKPT        what is in it
    python checkpoint.py verify CKPT      reads all of it and compares the checksums

What a production system adds: files per node instead of per rank, parallel writes from one rank,
copies kept in other nodes' memory."""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from corpus.tokenizer import BUILT_IN, TRAVELS, TokenizerRecord
from gpt import GPTConfig, least_parameters
from runtime import json_files, room
from sharding import local_slice, set_sharding, shard_of, sharding_of, unpad

FORMAT = 2
# of a file, about
FILE_BYTES = 2**30
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
# without a process group there is one rank, yes
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says which, and why."""


class Damaged(CheckpointError):
    """A checkpoint that is not what was written: there may be a whole one before it."""


def name(step: int) -> str:
    return f"step-{step:06d}"


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by step, the newest last. Unfinished ones have another name.
    Raises CheckpointError for a folder that is there and cannot be read: it is not an empty one."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if os.path.islink(folder):
            raise CheckpointError(
                f"{folder}: a link to what is not there; is a disk not mounted?"
            ) from None
        return {}
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"{folder}: cannot be read ({getattr(e, 'strerror', None) or e})"
        ) from None
    found = {
        int(m[1]): Path(folder) / name
        for name in names
        if (m := re.fullmatch(r"step-(\d{6,18})", name))
    }
    return dict(sorted(found.items()))


def find(path: str | Path) -> Path:
    """A checkpoint's folder, or the newest one in the folder of a run. Raises CheckpointError."""
    if path == "":
        raise CheckpointError("'': names no folder")
    try:
        if not Path(path).is_dir():
            raise CheckpointError(f"{path}: no such folder")
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})"
        ) from None
    for folder in (Path(path), Path(path) / "checkpoints"):
        if found := steps(folder):
            return list(found.values())[-1]
    return Path(path)


def beside(path: Path, name: str) -> Path | None:
    """A file that travels with a checkpoint: in its folder, or in that of its run."""
    path = Path(path)
    folders = (path, path.parent.parent) if path.parent.name == "checkpoints" else (path,)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def tokenizer_of(path: Path) -> str:
    """The name or file of the tokenizer that a checkpoint's model was trained with. Raises
    CheckpointError, where the file has another content now."""
    index = read_index(Path(path))
    name = str(index["config"].get("tokenizer") or "bytes")
    if name in BUILT_IN:
        return name
    found = verify_tokenizer(path, index)
    return str(found.get("tokenizer.json", name))


def tokenizer_record(path: Path, index: dict) -> TokenizerRecord:
    """What an index says of the tokenizer. Raises CheckpointError."""
    try:
        return json_files.convert(
            index.get("tokenizer", {}), TokenizerRecord, f"{path}/index.json: tokenizer"
        )
    except json_files.JSONError as e:
        raise CheckpointError(str(e)) from None


def verify_tokenizer(path: Path, index: dict) -> dict[str, Path]:
    """The tokenizer's files: beside the checkpoint or, where there is no tokenizer.json, at the
    path that it was trained with. Raises CheckpointError for one that has another content than
    then."""
    recorded = tokenizer_record(path, index).files
    found = {}
    trained_with = Path(str(index["config"].get("tokenizer")))
    for name in TRAVELS:
        try:
            file = beside(path, name)
            if name == "tokenizer.json" and not file and trained_with.is_file():
                file = trained_with
            content = json_files.read_bytes(file) if file else None
        except OSError as e:
            raise CheckpointError(f"{path}: its {name} cannot be read ({e.strerror})") from None
        if content is None:
            continue
        found[name] = file
        if name in recorded and hashlib.sha256(content).hexdigest() != recorded[name]:
            raise CheckpointError(
                f"{file} is altered: the model in {path} was trained with another content. "
                "Put that back, or name a tokenizer with --tokenizer"
            )
    return found


def gather(x, group: dist.ProcessGroup | None) -> list:
    """Every rank's object, on every rank. Without process groups there is one rank."""
    if not dist.is_initialized():
        return [x]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, x, group=group)
    return gathered


def agree(error: CheckpointError | None, group: dist.ProcessGroup | None = None) -> None:
    """A collective. An error on one rank is raised on all."""
    for e in gather(error, group):
        if e:
            raise e


def chunk(tensor: Tensor) -> ChunkStorageMetadata:
    """Which part of the global tensor this is, padding left out, as torch.distributed.checkpoint
    says it."""
    offset, size, _ = local_slice(sharding_of(tensor))
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size))


class _SavePlanner(dcp.DefaultSavePlanner):
    """Every rank offers its parts; of equal offers the base class takes one, and it checks that the
    parts make up the whole."""

    def __init__(self, tensors: dict[str, Tensor], read=None):
        super().__init__(flatten_state_dict=False)
        self.tensors = tensors
        self.read = read

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(n, chunk(t).offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=chunk(t),
                        properties=TensorProperties.create_from_tensor(t),
                        size=torch.Size(sharding_of(t).shape),
                    ),
                )
                for n, t in self.tensors.items()
                if 0 not in chunk(t).sizes
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor = self.tensors[index.fqn]
        return self.read(index.fqn) if tensor.is_meta else unpad(tensor, sharding_of(tensor))


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
        return unpad(tensor, sharding_of(tensor))


def write(
    path: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict,
    read=None,
    group: dist.ProcessGroup | None = None,
    replace: bool = False,
) -> Path:
    """Write one checkpoint as the folder `path`; all ranks (of the group) call this together.
    tensors: global name -> this rank's part, with its sharding record; each rank names what it
    holds. A tensor on the meta device is asked for by `read(name)` when its file is written, a file
    at a time. state: `config` and `model`, the configurations as dicts, and what else the next step
    depends on, as JSON. replace: a checkpoint that is there already.

    Raises CheckpointError, on all ranks, when a rank cannot write; nothing earlier is touched
    before the new one is whole."""
    path = Path(path)
    building = path.with_name(f".{path.name}.saving")
    aside = path.with_name(f".{path.name}.removing")
    rank = dist.get_rank(group) if dist.is_initialized() else 0

    def on_rank(ranks, action):
        """action(), on rank 0 or on all; its errors are everybody's."""
        error = result = None
        try:
            result = action() if ranks == "all" or rank == 0 else None
        # the second is a BaseException
        except (Exception, dcp.CheckpointException) as e:
            cause = (
                next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) else e
            )
            error = CheckpointError(
                f"cannot save {path}: {cause if isinstance(cause, OSError) else repr(cause)}"
            )
        try:
            agree(error, group)
        except CheckpointError:
            if rank == 0:
                # what is half done takes room
                shutil.rmtree(building, ignore_errors=True)
            raise
        return result

    def prepare():
        if path.exists() and not replace and (not path.is_dir() or any(path.iterdir())):
            raise OSError("it exists already; name another folder, or delete this one")
        path.parent.mkdir(parents=True, exist_ok=True)
        # of a run that was killed
        for leftover in (building, aside):
            remove(leftover)
        building.mkdir()

    def write_tensors():
        writer = dcp.HuggingFaceStorageWriter(
            str(building), fqn_to_index_mapping=files_of(everywhere), save_distributed=True
        )
        dcp.save(
            tensors,
            planner=_SavePlanner(tensors, read),
            storage_writer=writer,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )

    def hash_files():
        return {
            file.name: describe(file) for file in sorted(building.glob(f"shard-{rank + 1:05d}-*"))
        }

    def commit():
        index = {"format": FORMAT, "step": step, **state, "tensors": described, "files": files}
        (building / "index.json").write_text(json.dumps(index, indent=1))
        (building / "index.json.sha256").write_text(
            f"{describe(building / 'index.json')['sha256']}  index.json\n"
        )
        for file in (building / "index.json.sha256", building):
            sync(file)
        # until the next line the one before is the newest
        if os.path.lexists(path):
            os.rename(path, aside)
        os.rename(building, path)
        sync(path.parent)
        remove(aside)

    on_rank(0, prepare)
    everywhere = gather(
        {
            n: [str(t.dtype).removeprefix("torch."), list(sharding_of(t).shape)]
            for n, t in tensors.items()
        },
        group,
    )
    # pipeline stages hold different names
    described = {n: d for one in everywhere for n, d in one.items()}
    on_rank("all", write_tensors)
    files = {
        name: found
        for one in gather(on_rank("all", hash_files), group)
        for name, found in one.items()
    }
    on_rank(0, commit)
    return path


def files_of(everywhere: list[dict]) -> dict[str, int]:
    """Tensor name -> number of the file (of each rank that holds a part) that it goes to, from 1.
    everywhere: what each rank holds, {name: [dtype, shape]}."""
    holders = Counter(n for one in everywhere for n in one)
    number = {}
    file = 0
    room = 0
    for n, (dtype, shape) in {n: d for one in everywhere for n, d in one.items()}.items():
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize // holders[n]
        if size > room:
            file = file + 1
            room = FILE_BYTES
        number[n] = file
        room = room - size
    return number


def describe(file: Path) -> dict:
    """Flush a file to the disk; its size and checksum."""
    sync(file)
    with open(file, "rb") as f:
        return {
            "bytes": file.stat().st_size,
            "sha256": hashlib.file_digest(f, "sha256").hexdigest(),
        }


def remove(path: Path) -> None:
    """A folder, or what stands in its place, if there is one. Of a link the link, not what it leads
    to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Saver:
    """Saves while training goes on, one checkpoint at a time."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        """group: of all ranks, on the CPU, and used for nothing else; None where there is one
        rank."""
        self.group = group
        self.thread = None
        self.error = None

    def save(
        self, folder: Path, step: int, tensors: dict[str, Tensor], state: dict, keep: int = 0
    ) -> None:
        """Copy `tensors`, and start to `save` the copies. Waits for the save before; raises what
        that one raised."""
        self.wait()
        copies = {
            n: set_sharding(t.detach().to("cpu", copy=True), sharding_of(t))
            for n, t in tensors.items()
        }

        def work():
            try:
                save(folder, step, copies, state, keep, self.group)
            except BaseException as e:
                self.error = e

        self.thread = threading.Thread(target=work)
        self.thread.start()

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    @property
    def failed(self) -> bool:
        return self.error is not None

    def wait(self) -> None:
        """Until the latest save is on the disk. Raises what it raised: CheckpointError, on all
        ranks alike, where it could not be written."""
        if self.thread:
            self.thread.join()
        error = self.error
        self.thread = None
        self.error = None
        if error:
            raise error


def save(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict,
    keep: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """`write` folder/step-00NNNN; all ranks (of the group) call this together. keep: how many
    checkpoints remain, 0 for all."""
    path = write(Path(folder) / name(step), step, tensors, state, group=group, replace=True)
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        remove_old(Path(folder), step, keep)
    return path


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step`, which was just written, all but the newest `keep`; and what
    killed runs left. A later one is damaged, or the run would have gone on from it: it is no reason
    to remove a whole one."""
    for old in [path for s, path in steps(folder).items() if s <= step][:-keep] if keep else []:
        # what cannot be removed stays, and hinders no other
        with contextlib.suppress(OSError):
            aside = old.with_name(f".{old.name}.removing")
            remove(aside)
            # gone at once, even when killed while deleting
            os.rename(old, aside)
    for leftover in folder.glob(".step-*"):
        with contextlib.suppress(OSError):
            remove(leftover)


# --------------------------------------------------------------------------------------------------


def read_index(path: Path) -> dict:
    """The index of one checkpoint, after checking that it is as it was written and that its files
    are there and complete. Raises CheckpointError; where there is damage, Damaged."""
    path = Path(path)
    try:
        text = json_files.read_bytes(path / "index.json")
        checksum = json_files.read_bytes(path / "index.json.sha256")
    except FileNotFoundError as e:
        hint = (
            "; python huggingface.py import makes one of a Hugging Face folder"
            if (path / "config.json").exists()
            else ""
        )
        raise Damaged(
            f"{path} is not a checkpoint of this project, or damaged: it has no"
            f" {Path(e.filename).name}{hint}"
        ) from None
    except OSError as e:
        raise Damaged(f"{path}/index.json cannot be read ({e})") from None
    if checksum != f"{hashlib.sha256(text).hexdigest()}  index.json\n".encode():
        raise Damaged(
            f"{path}/index.json, or index.json.sha256 beside it, is damaged: they do not fit"
        )
    try:
        index = json_files.parse(text, dict[str, Any], f"{path}/index.json")
    except json_files.JSONError as e:
        raise Damaged(str(e)) from None
    check_index(index, f"{path}/index.json")
    for file, is_there in index["files"].items():
        found = (path / file).stat().st_size if (path / file).is_file() else None
        if found != is_there["bytes"]:
            what = "missing" if found is None else f"{found} bytes long, not {is_there['bytes']}"
            raise Damaged(f"{path / file} is {what}: the checkpoint is damaged")
    for file in path.glob("*.safetensors"):
        if file.name not in index["files"]:
            raise Damaged(f"{file} is not in the checkpoint's index: somebody has put it there")
    return index


Count = Annotated[int, Meta(ge=0, le=2**53)]


class FileRecord(TypedDict):
    bytes: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ScalerRecord(TypedDict):
    scale: Annotated[float, Meta(ge=1)]
    good_steps: Count
    tolerance: Count


class OptimizerRecord(TypedDict):
    updates: Count
    skipped: Count
    scaler: NotRequired[ScalerRecord | None]


class RunRecord(TypedDict):
    tokenizer: NotRequired[str | None]


class Index(TypedDict):
    """What the code relies on in an index.json. More may stand there; `model` is checked by
    GPTConfig."""

    format: int
    step: Count
    tensors: dict[str, tuple[str, list[Count]]]
    files: dict[Annotated[str, Meta(max_length=255, pattern="^[^/]+$")], FileRecord]
    config: RunRecord
    model: dict[str, Any]
    tokens: NotRequired[Count | None]
    corpus: NotRequired[str | None]
    optimizer: NotRequired[OptimizerRecord | None]


# as an index and as safetensors call it
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def check_index(index: dict, where: str) -> None:
    """Types, ranges, and tensors that are no larger than the files. Raises CheckpointError."""
    if index.get("format") != FORMAT or not {"tensors", "files", "model"} <= index.keys():
        raise CheckpointError(
            f"{where} is not the index of a checkpoint of this project (format {FORMAT})"
        )
    try:
        json_files.convert(index, Index, where)
        if index["model"]:
            GPTConfig(**index["model"])
    except json_files.JSONError as e:
        raise CheckpointError(str(e)) from None
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"{where} does not describe a model of this project ({json_files.one_line(e)})"
        ) from None
    strange = [
        f"{n} is {dtype}" for n, (dtype, _) in index["tensors"].items() if dtype not in DTYPES
    ]
    if strange:
        raise CheckpointError(f"{where}: {strange[0]}; a checkpoint has {', '.join(DTYPES)}")
    size = sum(
        prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in index["tensors"].values()
    )
    there = sum(file["bytes"] for file in index["files"].values())
    if size > there:
        raise CheckpointError(
            f"{where}: its tensors would have {size:,} bytes, and its files have {there:,}"
        )


def read_model(path: Path) -> tuple[GPTConfig, dict]:
    """(configuration, index) of a checkpoint that holds a whole model, its sizes held to its
    tensors. Raises CheckpointError."""
    index = read_index(path)
    weights = {n: shape for n, (_, shape) in index["tensors"].items() if n.startswith("model.")}
    if "model.embedding.tokens.weight" not in weights:
        raise CheckpointError(
            f"{path} holds prompts alone; name the model that they were learned for, and give the"
            " prompt file to prompt_tuning.py"
        )
    try:
        config = GPTConfig(**index["model"])
        check_sizes(config, weights)
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"{path}/index.json does not describe a model of this project"
            f" ({json_files.one_line(e)})"
        ) from None
    return config, index


def check_sizes(config: GPTConfig, shapes: dict[str, list[int]]) -> None:
    """Whether a configuration can be that of tensors that are there, before anything is built of
    its size. shapes: name -> shape; the first number in a name is its layer, in our names as in
    Hugging Face's. What differs by less is found, tensor by tensor, when they are matched. Raises
    ValueError."""
    layers = 1 + max(
        (int(found[1]) for n in shapes if (found := re.search(r"\.(\d{1,6})\.", n))), default=-1
    )
    if config.num_layers != layers:
        raise ValueError(f"num_layers {config.num_layers}: there are tensors of {layers} layers")
    needed = least_parameters(config)
    there = sum(map(prod, shapes.values()))
    if needed > 2 * there:
        sizes = ", ".join(
            f"{field} {getattr(config, field)}"
            for field in (
                "hidden_size",
                "ffn_hidden_size",
                "vocab_size",
                "seq_length",
                "num_experts",
            )
        )
        raise ValueError(
            f"{sizes}: a model of {needed:,} parameters or more, and its tensors have {there:,}"
        )


def check_room(what: str, needed: int, device) -> None:
    """Whether a device could hold so many bytes at all, before they are allocated: on the CPU the
    end comes later, and to any process. Raises CheckpointError."""
    device = torch.device(device)
    has = room.memory(device.type, 1)
    if needed > has:
        raise CheckpointError(f"{what}: takes {needed:,} bytes, and {device} has {has:,} in all")


def read_header(file: Path) -> dict[str, tuple[str, list[int], list[int]]]:
    """Tensor -> (dtype as safetensors calls it, shape, where in the whole tensor it begins) of one
    file. Raises CheckpointError."""
    try:
        with safe_open(file, "pt") as f:
            offsets = (f.metadata() or {}).get("DCP_SHARDING_INFO")
            slices = {name: f.get_slice(name) for name in f.keys()}
            found = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
        starts = (
            json_files.parse(offsets.encode(), dict[str, dict[str, list[Count]]], str(file))
            if offsets
            else {}
        )
        return {
            name: (*x, starts[name]["saved_offsets"] if offsets else [0] * len(x[1]))
            for name, x in found.items()
        }
    except (SafetensorError, OSError, KeyError, json_files.JSONError) as e:
        raise CheckpointError(
            f"{file} cannot be loaded: damaged, or not safetensors ({json_files.one_line(e)})"
        ) from None


def check_slices(file: Path, index: dict) -> None:
    """Whether the slices in one file are of the index's tensors: torch would convert other numbers
    without a word. Raises CheckpointError."""
    for name, (dtype, shape, start) in read_header(file).items():
        whole, sizes = index["tensors"].get(name, (None, []))
        fits = len(start) == len(shape) == len(sizes) and all(
            o + n <= size for o, n, size in zip(start, shape, sizes)
        )
        if dtype != DTYPES.get(whole) or not fits:
            raise CheckpointError(
                f"{file} cannot be loaded: {name} is {dtype} {shape} from {start} on there, and"
                f" {whole} {sizes} in the index"
            )


def verify(path: Path) -> dict:
    """Compare the checksum of every file; the ranks share the reading. All ranks call this
    together. Returns the index. Raises, on all ranks, CheckpointError; where there is damage,
    Damaged, naming the file."""
    path = Path(path)
    index = None
    error = None
    try:
        index = read_index(path)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for file in sorted(index["files"])[rank::world]:
            with open(path / file, "rb") as f:
                if hashlib.file_digest(f, "sha256").hexdigest() != index["files"][file]["sha256"]:
                    raise Damaged(f"{path / file} is damaged: its SHA-256 is not that of the index")
            check_slices(path / file, index)
    except CheckpointError as e:
        error = e
    except OSError as e:
        error = Damaged(f"{path} cannot be read: {e}")
    agree(error)
    return index


def read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, {global name: this rank's part}, in place; all ranks call this together.
    Raises CheckpointError."""
    try:
        dcp.load(
            tensors,
            planner=_LoadPlanner(tensors),
            storage_reader=dcp.HuggingFaceStorageReader(str(path)),
            no_dist=not dist.is_initialized(),
        )
    except (dcp.CheckpointException, OSError) as e:
        cause = next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) else e
        raise CheckpointError(f"{path} cannot be loaded: {cause}") from None


def load(path: Path, tensors: dict[str, Tensor], model: dict | None = None) -> dict:
    """Verify a checkpoint, fill `tensors` in place and return the index; all ranks call this
    together. Raises CheckpointError, on all ranks, when the checkpoint is damaged (Damaged), or is
    of another model: naming the tensors that differ, or, of the fields in `model`, those that
    do."""
    index = verify(path)
    # it may be older than a field
    differ = [
        f"{k} is {index['model'][k]} there and {v} here"
        for k, v in (model or {}).items()
        if index["model"].get(k, v) != v
    ]
    if differ:
        raise CheckpointError(f"{path} holds another model: {'; '.join(differ)}")
    saved = {n: tuple(shape) for n, (_, shape) in index["tensors"].items()}
    wrong = [
        f"{n} is {saved.get(n, 'missing')} there and {sharding_of(t).shape} here"
        for n, t in tensors.items()
        if saved.get(n) != sharding_of(t).shape
    ]
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    agree(
        CheckpointError(f"{path} holds another model: {'; '.join(wrong[:3])}{more}")
        if wrong
        else None
    )
    read(path, tensors)
    return index


# --------------------------------------------------------------------------------------------------


def _lesson(rank: int, folder: str, how: str):
    from sharding import Shard, Sharding

    cuts = (Shard(0, dist.group.WORLD),) if dist.get_world_size() > 1 else ()
    record = Sharding((5, 3), cuts)
    if how == "save":
        part = set_sharding(shard_of(torch.arange(15.0).view(5, 3), record).clone(), record)
        saver = Saver(dist.new_group(backend="gloo"))
        saver.save(Path(folder), 1, {"model.weight": part}, {"config": {}, "model": {}})
        # training goes on; what was saved is a copy
        part.zero_()
        saver.wait()
        return
    part = set_sharding(torch.zeros(local_slice(record)[2]), record)
    load(Path(folder) / name(1), {"model.weight": part})
    return part.tolist()


def lesson():
    import tempfile

    from lessons import ranks

    with tempfile.TemporaryDirectory() as folder:
        ranks.run(_lesson, 2, folder, "save")
        path = Path(folder) / name(1)
        print(
            "a [5, 3] weight, cut by rows over two ranks (3 rows, and 2 and one of padding), is"
            " saved as"
        )
        for file in sorted(path.iterdir()):
            print(f"    {file.name}, {file.stat().st_size:,} bytes")
        print(f"one rank loads     {ranks.run(_lesson, 1, folder, 'load')[0]}")
        print(f"three ranks load   {ranks.run(_lesson, 3, folder, 'load')}")
        for file in sorted(path.iterdir()):
            whole = bytearray(file.read_bytes())
            whole[len(whole) // 2] ^= 1
            original = file.read_bytes()
            file.write_bytes(whole)
            try:
                verify(path)
                print(f"a flipped bit in {file.name} is not found")
            except Damaged as e:
                print(f"a bit flipped: {str(e).removeprefix(str(path) + '/')}")
            file.write_bytes(original)


def main():
    if len(sys.argv) == 1:
        return lesson()
    if len(sys.argv) != 3 or sys.argv[1] not in ("show", "verify"):
        terminal.refuse(
            "usage: python checkpoint.py show CKPT | verify CKPT; CKPT is a checkpoint, or the"
            " folder of a run"
        )
    try:
        path = find(sys.argv[2])
        index = read_index(path) if sys.argv[1] == "show" else verify(path)
        if sys.argv[1] == "verify":
            verify_tokenizer(path, index)
    except CheckpointError as e:
        terminal.refuse(f"checkpoint.py: {e}")
    if sys.argv[1] == "show":
        for tensor, (dtype, shape) in index.pop("tensors").items():
            print(f"{dtype:>9} {shape!s:>16} {tensor}")
        print(json.dumps(index, indent=1))
    else:
        print(
            f"{path}: whole; {len(index['files'])} files,"
            f" {sum(f['bytes'] for f in index['files'].values()):,} bytes, as they were written"
        )


if __name__ == "__main__":
    terminal.run(main)
