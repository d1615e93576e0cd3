"""The folder that holds a run's checkpoints: names, the newest one, safe writing, removal.

    RUN/checkpoints/step-000100             a checkpoint, saved after step 100
                    .step-000200.saving     being written; becomes step-000200 when it is whole
                    .step-000050.removing   being deleted

A name that begins with a dot is not a checkpoint. A checkpoint comes and goes by one rename, which
a killed process cannot leave half done. Everything is flushed to the disk before the rename, so
that a machine that loses power does not keep the name and lose the content.

    ls -A RUN/checkpoints
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import torch

from base.errors import cause
from run.checkpoint_index import CheckpointError


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
        raise CheckpointError(
            f"{folder}: cannot be read ({cause(e)}); is its disk mounted?"
        ) from None
    matches = [re.fullmatch(r"step-(\d{6,18})", name) for name in names]
    paths = {int(match[1]): Path(folder) / match[0] for match in matches if match}
    return dict(sorted(paths.items()))


def find(path: str | Path) -> Path:
    """The checkpoint that a path names: itself or, where it is a run or a folder of checkpoints,
    the newest one. Raises CheckpointError."""
    if path == "":
        raise CheckpointError("'': names no folder")
    try:
        is_folder = Path(path).is_dir()
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({cause(e)})") from None
    if not is_folder:
        advice = ""
        if str(path).endswith(".nemo"):
            advice = (
                "; a .nemo file is not read here: convert it to Hugging Face's format with NeMo's"
                " own script, then `python -m inference.huggingface import HF_DIR CKPT`, and name"
                " CKPT"
            )
        raise CheckpointError(f"{path}: no such folder{advice}")
    for folder in (Path(path), Path(path) / "checkpoints"):
        if checkpoints := steps(folder):
            return list(checkpoints.values())[-1]
    return Path(path)


def prepare(path: Path, building: Path, replace: bool) -> None:
    """Make an empty folder to write into. Raises OSError where `path` exists and is not to be
    replaced, or the disk does not allow it."""
    if path.exists() and not replace and (not path.is_dir() or any(path.iterdir())):
        raise OSError("it exists already; name another folder, or delete this one")
    path.parent.mkdir(parents=True, exist_ok=True)
    # left by a run that was killed
    remove(building)
    remove(path.with_name(f".{path.name}.removing"))
    building.mkdir()


def assign_files(shapes_of_ranks: list[dict[str, list]], limit: int) -> dict[str, int]:
    """Tensor name -> number, from 1, of the file that it goes to; each rank that holds a slice has
    a file of this number. A file is full at about `limit` bytes. shapes_of_ranks: for each rank,
    name -> [dtype, global shape]."""
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
    """Flush a file to the disk; its size and checksum, as they stand in the index."""
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
    # until this rename, the previous checkpoint is the newest
    os.rename(building, path)
    flush(path.parent)
    remove(aside)


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step`, which was just written, remove all but the newest `keep` (0:
    keep all), and what killed runs left. Later checkpoints are damaged, or the run would have
    resumed from one: they do not count towards `keep`."""
    if keep:
        for old in [path for saved, path in steps(folder).items() if saved <= step][:-keep]:
            # one that cannot be removed stays, and does not hinder the others
            with contextlib.suppress(OSError):
                aside = old.with_name(f".{old.name}.removing")
                remove(aside)
                # gone at once, even when this process is killed while it deletes
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
