"""The lesson of run/checkpoint.py: saved on two ranks, loaded on one and three; flipped bits, a
kill."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from course import form, ranks
from run import checkpoint
from run.checkpoint import folder_name
from sharding import Shard, Sharding, local_slice, set_sharding, shard_of

WITHOUT = form.Removals()


@WITHOUT.add("copy", "A thread writes while training goes on. What is on the disk?")
def no_copy() -> None:
    """The thread writes the weight as it is when the thread comes to it: zeros, and in training a
    mixture of two steps. Each checksum is right, for it is of what was written."""

    def save(self, *arguments):
        self.arguments = arguments

    def wait(self):
        checkpoint.save(*self.arguments, group=self.group)

    checkpoint.Saver.save = save
    checkpoint.Saver.wait = wait


@WITHOUT.add("checksums", "All sizes are right. What does a load give?")
def no_checksums() -> None:
    """The index has a checksum of its own; the shards have theirs in the index, and nobody compares
    them. A flipped bit in a weight is another number, and the load gives it without an error."""
    checkpoint.verify = checkpoint.read_index


@WITHOUT.add("rename", "Step 2 is there. Why would it be better if it were not?")
def no_rename() -> None:
    """A run that goes on from the newest step finds step 2, which has no index and cannot be read.
    If a folder gets its name only when it is whole, the newest one is step 1, and it is good."""

    def prepare(path: Path, building: Path, replace: bool) -> None:
        path.mkdir()
        building.symlink_to(path)

    def commit(path: Path, building: Path, index: dict, original=checkpoint.commit) -> None:
        building.unlink()
        path.rename(building)
        original(path, building, index)

    checkpoint.prepare = prepare
    checkpoint.commit = commit


STATE = {"config": {}, "model": {}}
WHOLE = torch.arange(15.0).view(5, 3)


def my_rows() -> Sharding:
    """The record of a [5, 3] weight, sharded by rows over all ranks."""
    if dist.get_world_size() == 1:
        return Sharding((5, 3))
    return Sharding((5, 3), (Shard(0, dist.group.WORLD),))


def save_rows(rank: int, folder: str) -> None:
    part = set_sharding(shard_of(WHOLE, my_rows()).clone(), my_rows())
    saver = checkpoint.Saver(dist.new_group(backend="gloo"))
    saver.save(Path(folder), 1, {"model.weight": part}, STATE)
    # Training goes on.
    part.zero_()
    saver.wait()


def load_rows(rank: int, folder: str) -> list:
    part = set_sharding(torch.zeros(local_slice(my_rows())[2]), my_rows())
    checkpoint.load(Path(folder) / folder_name(1), {"model.weight": part})
    return part.tolist()


def flip_bits(rank: int, folder: str) -> dict[str, bool]:
    """File -> whether `verify` finds a bit that is flipped in the middle of it."""
    path = Path(folder) / folder_name(1)
    found = {}
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        middle = len(original) // 2
        flipped = bytes([original[middle] ^ 1])
        file.write_bytes(original[:middle] + flipped + original[middle + 1 :])
        try:
            checkpoint.verify(path)
            found[file.name] = False
        except checkpoint.Damaged:
            found[file.name] = True
        file.write_bytes(original)
    return found


def killed_save(rank: int, folder: str) -> None:
    """Save step 2; the process is killed when all its slices are on the disk."""
    checkpoint.commit = lambda path, building, index: os._exit(9)
    weight = set_sharding(WHOLE.clone(), my_rows())
    checkpoint.save(Path(folder), 2, {"model.weight": weight}, STATE)


def rows_in(file: Path) -> int:
    """Rows of the weight in a safetensors file."""
    with safe_open(file, "pt") as f:
        return sum(f.get_slice(name).get_shape()[0] for name in f.keys())


def teach(lesson: form.Lesson) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows(lesson, folder)
        copies(lesson, folder)
        bits(lesson, folder)
        kill(lesson, folder)


def rows(lesson: form.Lesson, folder: str) -> None:
    lesson.predict(
        "A [5, 3] weight, sharded by rows over 2 ranks: 3 rows each, one of them padding. How many"
        " rows does each write?",
        "rows of rank 0; rows of rank 1",
    )
    lesson.on_ranks(2, save_rows, folder)
    files = sorted((Path(folder) / folder_name(1)).glob("*.safetensors"))
    written = [rows_in(file) for file in files]
    for file, count in zip(files, written):
        lesson.say(f"{file.name}: {count} rows, {file.stat().st_size:,} bytes")
    lesson.check(f"{written}: padding is never written", written == [3, 2], written)


def copies(lesson: form.Lesson, folder: str) -> None:
    lesson.predict(
        "3 ranks load it. Which rows does each hold? The weight was set to 0 right after save()"
        " returned, while a thread was writing: what do they get?"
    )
    loaded = ranks.run(load_rows, 3, folder)
    # Rank 2 holds row 4 and a row of padding.
    found = [row for part in loaded for row in part][:5]
    lesson.check(
        f"ranks hold {', '.join(str(len(part)) for part in loaded)} rows, the last one of padding;"
        f" row 0 is {found[0]}, row 4 {found[4]}, as when save() was called",
        [len(part) for part in loaded] == [2, 2, 2] and found == WHOLE.tolist(),
    )


def bits(lesson: form.Lesson, folder: str) -> None:
    lesson.predict("One bit flips in one of the 4 files. For which of them is that found?")
    found = lesson.on_ranks(1, flip_bits, folder)[0]
    names = [file.split("-model")[0] for file in found if found[file]]
    lesson.check(
        f"{len(names)} of {len(found)}: {', '.join(names)}", len(found) == 4 and all(found.values())
    )


def kill(lesson: form.Lesson, folder: str) -> None:
    lesson.predict(
        "A save of step 2 is killed when its slices are written. Which steps are there now?"
    )
    try:
        lesson.on_ranks(1, killed_save, folder)
        death = "the save was not killed"
    except RuntimeError as e:
        death = str(e)
    steps = list(checkpoint.steps(Path(folder)))
    hidden = [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]
    lesson.check(
        f"{death}. Steps {steps}; {', '.join(hidden)} is no checkpoint",
        steps == [1] and "exit code 9" in death,
    )


if __name__ == "__main__":
    form.run("checkpoint")
