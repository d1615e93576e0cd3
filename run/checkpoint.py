"""Checkpoints: saved under one parallel layout, loaded under any other.

Each rank holds slices of the model's global tensors (sharding.py) and writes them under the
tensors' global names, with their offsets. To load, each rank reads the slices that its own layout
needs from whichever files hold them. No rank holds more than its part.

    saved by 2 ranks:     rows 0 1 2 | 3 4        a [5, 3] weight; a slice that several ranks hold
    loaded by 3 ranks:    rows 0 1 | 2 3 | 4      is written once, padding never

    RUN/checkpoints/step-000100/
        shard-00001-model-00001-of-00001.safetensors    slices of rank 0, about 1 GiB in a file
        shard-00002-..                                  slices of rank 1
        index.json             step, configurations, tensors; size and SHA-256 of each file
        index.json.sha256      of the index itself, as sha256sum writes it

torch.distributed.checkpoint plans, writes and reads the slices (run/checkpoint_slices.py). Weights
are saved in fp32, moments in the optimizer's dtype.

    python -m course.checkpoint               a lesson: saved on two ranks, loaded on three, damaged
    python -m run.checkpoint show CKPT       the tensors and the index
    python -m run.checkpoint verify CKPT     reads all of it and compares the checksums

A save may be killed, and a machine may lose power. So a checkpoint comes and goes by one rename,
after everything in it is flushed to the disk; a name that begins with a dot is not a checkpoint:

    .step-000200.saving      being written; becomes step-000200 when it is whole
    .step-000050.removing    being deleted

`Saver` does all of it in a thread with a process group of its own. Training waits for the copies:

    training     step 100 |             | step 101 | step 102 | ..
    thread                | plan | copy | write, flush, hash, rename |

A load does not trust the files. A flipped byte, a missing or a short file is found and named before
anything is loaded, by hashes that the ranks share out. Nothing is ever unpickled, so no file can
execute code (run/checkpoint_index.py).

The tokenizer's files lie beside the checkpoints folder of a run, or in an imported checkpoint. The
index has their SHA-256: with other token ids a model generates nonsense without an error.

Not covered: files per node instead of per rank, parallel writes of one rank, and copies kept in
other nodes' memory, which production systems have."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from base import json_files, terminal
from base.errors import InputError, cause
from run.checkpoint_index import (  # noqa: F401 (other files use checkpoint.read_model)
    FORMAT,
    CheckpointError,
    Damaged,
    check_room,
    check_slices,
    fixed_fields,
    model_fields,
    read_index,
    read_model,
)
from run.tokenizer import BUILT_IN, MORE_TEMPLATES, TOKENIZER_FILES, TokenizerRecord
from sharding import sharding_of

# A rank begins its next file after so many bytes.
FILE_BYTES = 2**30


# --- the folder of the checkpoints ----------------------------------------------------------------


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, step -> path, the newest last; {} where there is no folder.
    Raises CheckpointError for a folder that cannot be read: it may hold checkpoints."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError) as e:
        if isinstance(e, FileNotFoundError) and not os.path.islink(folder):
            return {}
        rule = f"cannot be read ({cause(e)}); is its disk mounted?"
        raise CheckpointError(f"{folder}: {rule}") from None
    matches = [re.fullmatch(r"step-(\d{6,18})", name) for name in names]
    paths = {int(match[1]): Path(folder) / match[0] for match in matches if match}
    return dict(sorted(paths.items()))


def find(path: str | Path) -> Path:
    """The checkpoint at a path, or the newest one of a run or a folder of checkpoints. Raises
    CheckpointError."""
    if path == "":
        raise CheckpointError("'': names no folder")
    try:
        is_folder = Path(path).is_dir()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({cause(e)})") from None
    if str(path).endswith(".nemo") and not is_folder:
        advice = "unpack this tar into NEMO_DIR, then `python -m inference.megatron NEMO_DIR CKPT`"
        raise CheckpointError(f"{path}: no such folder; {advice}, and name CKPT")
    if not is_folder:
        raise CheckpointError(f"{path}: no such folder")
    for folder in (Path(path), Path(path) / "checkpoints"):
        if checkpoints := steps(folder):
            return list(checkpoints.values())[-1]
    return Path(path)


def prepare(path: Path, building: Path, replace: bool) -> None:
    """Make an empty folder to write into. Raises OSError where `path` exists and is not to be
    replaced."""
    if path.exists() and not replace and (not path.is_dir() or any(path.iterdir())):
        raise OSError("it exists already; name another folder, or delete this one")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Left by a run that was killed.
    remove(building)
    remove(path.with_name(f".{path.name}.removing"))
    building.mkdir()


def assign_files(shapes_of_ranks: list[dict[str, list]], limit: int) -> dict[str, int]:
    """Tensor name -> number, from 1, of its file, one for each rank that holds a slice. A file is
    full at about `limit` bytes. shapes_of_ranks: for each rank, name -> [dtype, global shape]."""
    holders = Counter(name for shapes in shapes_of_ranks for name in shapes)
    number = {}
    file = 0
    room = 0
    for name, (dtype, shape) in merge(shapes_of_ranks).items():
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize // holders[name]
        if size > room:
            file += 1
            room = limit
        number[name] = file
        room -= size
    return number


def merge(dicts: list[dict]) -> dict:
    """The union; of equal keys the last one counts."""
    return {key: value for each in dicts for key, value in each.items()}


def flush_and_hash(file: Path) -> dict:
    """Flush a file to the disk. Returns its size and checksum for the index."""
    flush(file)
    with open(file, "rb") as f:
        sha256 = hashlib.file_digest(f, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": sha256}


def flush(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(path: Path, building: Path, index: dict) -> None:
    """Write the index, flush everything, and give the folder its name. Raises OSError."""
    (building / "index.json").write_text(json.dumps(index, indent=1))
    sha256 = flush_and_hash(building / "index.json")["sha256"]
    (building / "index.json.sha256").write_text(f"{sha256}  index.json\n")
    flush(building / "index.json.sha256")
    flush(building)
    aside = path.with_name(f".{path.name}.removing")
    if os.path.lexists(path):
        os.rename(path, aside)
    # Until this rename, the previous checkpoint is the newest.
    os.rename(building, path)
    flush(path.parent)
    remove(aside)


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove what killed runs left, and all but the newest `keep` checkpoints (0: keep all) up to
    `step`, which was just written. Later ones are damaged, or the run would have resumed from one:
    they do not count."""
    if keep:
        for old in [path for saved, path in steps(folder).items() if saved <= step][:-keep]:
            # One that cannot be removed stays, and does not hinder the others.
            with contextlib.suppress(OSError):
                aside = old.with_name(f".{old.name}.removing")
                remove(aside)
                # The name is gone at once, even if this process is killed while it deletes.
                os.rename(old, aside)
    for leftover in folder.glob(".step-*"):
        with contextlib.suppress(OSError):
            remove(leftover)


def remove(path: Path) -> None:
    """Delete a folder, a file, or a link (not what it leads to), if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- all ranks succeed, or all fail with the same error -------------------------------------------


def rank_and_world(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value, group: dist.ProcessGroup | None) -> list:
    """Every rank's value, on every rank. A collective. Without process groups there is one rank."""
    if not dist.is_initialized():
        return [value]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


@contextlib.contextmanager
def agreed(what: str, group: dist.ProcessGroup | None = None, error_class=CheckpointError):
    """Raise an error of the body, on any rank, on all ranks: the others would wait for that rank in
    their next collective. A collective. what: begins the message of an error that is not a
    CheckpointError; error_class: what it becomes."""
    error = None
    try:
        yield
    except CheckpointError as e:
        error = e
    except Exception as e:
        error = error_class(f"{what}: {e if isinstance(e, OSError | InputError) else repr(e)}")
    for e in gather(error, group):
        if e:
            raise e


# --- saving ---------------------------------------------------------------------------------------


def checkpoint_slices():
    """The module run/checkpoint_slices.py, which takes a second to import."""
    from run import checkpoint_slices

    return checkpoint_slices


def write(
    path: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict,
    read: Callable[[str], Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
    replace: bool = False,
    copied: Callable[[], None] | None = None,
) -> Path:
    """Write one checkpoint as the folder `path`. A collective of the ranks in `group`.

    tensors: global name -> this rank's slice, with its sharding record. For a tensor on the meta
    device `read(name)` is called when its file is written, so that one file at a time is in memory.
    state: `config` and `model`, the configurations as dicts, and what else the next step depends
    on, as JSON. replace: overwrite a checkpoint at `path`. copied: called when this rank has copied
    what it will write, so that `tensors` may change.

    Raises CheckpointError on all ranks when one cannot write. Earlier checkpoints are not touched
    before the new one is whole."""
    path = Path(path)
    building = path.with_name(f".{path.name}.saving")
    rank, _ = rank_and_world(group)
    what = f"cannot save {path}"
    try:
        with agreed(what, group):
            if rank == 0:
                prepare(path, building, replace)
        # The names differ between pipeline stages.
        shapes_of_ranks = gather(dtypes_and_shapes(tensors), group)
        number = assign_files(shapes_of_ranks, FILE_BYTES)
        files = {}
        with agreed(what, group):
            checkpoint_slices().write(building, tensors, number, read, group, copied)
            for file in sorted(building.glob(f"shard-{rank + 1:05d}-*")):
                files[file.name] = flush_and_hash(file)
        index = {"format": FORMAT, "step": step, **state, "tensors": merge(shapes_of_ranks)}
        index["files"] = merge(gather(files, group))
        with agreed(what, group):
            if rank == 0:
                commit(path, building, index)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(building, ignore_errors=True)
        raise
    return path


def dtypes_and_shapes(tensors: dict[str, Tensor]) -> dict[str, list]:
    """Name -> [dtype, global shape], as in the index."""
    return {
        name: [str(tensor.dtype).removeprefix("torch."), list(sharding_of(tensor).shape)]
        for name, tensor in tensors.items()
    }


def save(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict,
    keep: int = 0,
    group: dist.ProcessGroup | None = None,
    copied: Callable[[], None] | None = None,
) -> Path:
    """`write` folder/step-00NNNN and keep the newest `keep` checkpoints (0: all). A collective."""
    path = Path(folder) / folder_name(step)
    write(path, step, tensors, state, group=group, replace=True, copied=copied)
    if rank_and_world(group)[0] == 0:
        remove_old(Path(folder), step, keep)
    return path


class Saver:
    """Saves while training goes on, one checkpoint at a time."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        """group: all ranks, on the CPU, for this alone: collectives of two threads must not mix.
        None: one rank."""
        self.group = group
        self.future = None

    def save(
        self, folder: Path, step: int, tensors: dict[str, Tensor], state: dict, keep: int = 0
    ) -> None:
        """Wait for the previous save, raising its error, start to `save`, and wait until each rank
        has copied to the CPU what it will write. A collective."""
        self.wait()
        # Import in this thread, because two at a time may not.
        checkpoint_slices()
        copied = threading.Event()
        thread = ThreadPoolExecutor(1)
        self.future = thread.submit(
            save, folder, step, tensors, state, keep, self.group, copied.set
        )
        # A save that fails may end without its copies.
        self.future.add_done_callback(lambda _: copied.set())
        # The thread ends with the save.
        thread.shutdown(wait=False)
        copied.wait()

    @property
    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    @property
    def failed(self) -> bool:
        return self.future is not None and not self.busy and self.future.exception() is not None

    def wait(self) -> None:
        """Wait until the latest save is on the disk. Raises CheckpointError on all ranks where it
        could not be written."""
        future, self.future = self.future, None
        if future:
            future.result()


# --- loading --------------------------------------------------------------------------------------


def verify(path: Path) -> dict:
    """Compare the checksum of every file, and return the index. A collective in which the ranks
    share the reading. Raises CheckpointError on all ranks, or Damaged, naming the file."""
    path = Path(path)
    rank, world = rank_and_world()
    with agreed(f"{path} cannot be read", error_class=Damaged):
        index = read_index(path)
        for file in sorted(index["files"])[rank::world]:
            with open(path / file, "rb") as f:
                sha256 = hashlib.file_digest(f, "sha256").hexdigest()
            if sha256 != index["files"][file]["sha256"]:
                raise Damaged(f"{path / file} is damaged: its SHA-256 is not that of the index")
            check_slices(path / file, index)
    return index


def read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, global name -> this rank's slice, without verifying the files. A collective.
    Raises CheckpointError."""
    checkpoint_slices().read(path, tensors)


def load(path: Path, tensors: dict[str, Tensor], model: dict | None = None) -> dict:
    """Verify a checkpoint, fill `tensors`, global name -> this rank's slice, and return the index.
    A collective. model: the `fixed_fields` of the model here.

    Raises CheckpointError on all ranks where the checkpoint is damaged (Damaged) or holds another
    model, naming the fields or tensors that differ."""
    index = verify(path)
    # A field that the index lacks has its default in that model.
    differing = differences((model or {}) | model_fields(index["model"]), model or {})
    if not differing:
        shapes = {name: tuple(shape) for name, (_, shape) in index["tensors"].items()}
        here = {name: sharding_of(tensor).shape for name, tensor in tensors.items()}
        differing = differences(shapes, here)
    # With pipeline stages, the tensors of one rank may differ and those of another not.
    with agreed(str(path)):
        if differing:
            more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
            raise CheckpointError(f"{path} holds another model: {'; '.join(differing[:5])}{more}")
    read(path, tensors)
    return index


def differences(there: dict, here: dict) -> list[str]:
    """Text for each item of `here` that is different there."""
    pairs = [(name, there.get(name, "missing"), value) for name, value in here.items()]
    return [f"{name} is {saved} there and {own} here" for name, saved, own in pairs if saved != own]


# --- the tokenizer of a checkpoint's model --------------------------------------------------------


def beside(path: Path, name: str) -> Path | None:
    """A file beside the checkpoint at `path`: in its folder, or in that of its run."""
    path = Path(path)
    places = [path / name, path.parent.parent / name]
    of_run = path.parent.name == "checkpoints"
    return next((file for file in places[: 1 + of_run] if file.is_file()), None)


def tokenizer_of(path: Path) -> str:
    """The name or the file of the tokenizer of a checkpoint's model. Raises CheckpointError where
    the file has another content now."""
    index = read_index(Path(path))
    name = str(index["config"].get("tokenizer") or "bytes")
    if name in BUILT_IN:
        return name
    return str(verify_tokenizer(path, index).get("tokenizer.json", name))


def tokenizer_record(path: Path, index: dict) -> TokenizerRecord:
    """The record of the tokenizer in an index. Raises JSONError."""
    where = f"{path}/index.json: tokenizer"
    return json_files.convert(index.get("tokenizer", {}), TokenizerRecord, where)


def verify_tokenizer(path: Path, index: dict) -> dict[str, Path]:
    """Name -> path of the tokenizer's files: beside the checkpoint or, without a tokenizer.json
    there, at the path used in training. Raises CheckpointError for a file that has changed."""
    recorded = tokenizer_record(path, index).files
    trained_with = Path(str(index["config"].get("tokenizer")))
    files = {}
    templates = (name for name in recorded if re.fullmatch(f"{MORE_TEMPLATES}/[^/]+", name))
    for name in (*TOKENIZER_FILES, *templates):
        try:
            file = beside(path, name)
            if name == "tokenizer.json" and not file and trained_with.is_file():
                file = trained_with
            if not file:
                continue
            content = json_files.read_bytes(file)
        except OSError as e:
            raise CheckpointError(f"{path}: its {name} cannot be read ({e.strerror})") from None
        if name in recorded and hashlib.sha256(content).hexdigest() != recorded[name]:
            rule = f"the model in {path} was trained with another content"
            raise CheckpointError(f"{file} is altered: {rule}. Put that back, or give --tokenizer")
        files[name] = file
    return files


# --- the command line -----------------------------------------------------------------------------


def show(index: dict) -> None:
    for name, (dtype, shape) in index["tensors"].items():
        print(f"{dtype:>9} {shape!s:>16} {name}")
    print(json.dumps({key: index[key] for key in index if key != "tensors"}, indent=1))


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] not in ("show", "verify"):
        terminal.refuse("usage: python -m run.checkpoint show CKPT | verify CKPT (or a run)")
    path = find(argv[1])
    if argv[0] == "show":
        return show(read_index(path))
    index = verify(path)
    verify_tokenizer(path, index)
    sizes = [file["bytes"] for file in index["files"].values()]
    files = f"{len(sizes)} file{'s' * (len(sizes) > 1)}"
    print(f"{path}: whole; {files}, {sum(sizes):,} bytes, as they were written")


if __name__ == "__main__":
    terminal.command(main)
