"""The tokenized corpus on disk, and how changes to it are detected.

    CACHE/KEY/tokens.npy     the token ids of all documents, concatenated: uint16 or uint32
    CACHE/KEY/index.json     what it was made of, its counts, and the SHA-256 of each 64 MiB block
    CACHE/KEY.parts/         parts of a corpus that is being built
    CACHE/KEY.lock           held while it is built

A token that changed on disk would be trained on unnoticed. So all of tokens.npy is hashed whenever
it is opened; the ranks, and the threads of each, share the blocks. index.json holds a hash of
itself and the name of its folder. The check costs 0.5 to 2 seconds per GB on one core, as much as
the hash of the text, which is computed at every start for the key.

    python -m run.token_cache FOLDER        checks one corpus
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from base import json_files, terminal
from base.errors import cause
from run.checkpoint import remove
from run.documents import CacheError, DataError, file_hash

# Bytes of tokens.npy that one SHA-256 covers.
BLOCK_BYTES = 64 * 2**20


@dataclass
class Index:
    """The fields of index.json."""

    # The folder's name.
    key: str
    # Fingerprint of the text.
    corpus: str
    tokenizer: str
    vocab_size: int
    eot: int
    tokens: int
    documents: int
    # Bytes of text, as UTF-8.
    bytes: int
    # The first token of the held-out text.
    held_out_from: int
    # SHA-256 of each BLOCK_BYTES of tokens.npy.
    blocks: list[str]
    # A hash of all fields above.
    sha256: str = ""


@contextlib.contextmanager
def cache_errors(cache):
    """Turn an error of the file system into a CacheError, one line that names --cache."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as e:
        helps = "make room or name another folder"
        if isinstance(e, FileNotFoundError):
            helps = "name one that every rank sees, also those on other machines"
        raise CacheError(f"--cache {cache}: cannot be used ({cause(e)}); {helps}") from None


def token_type(vocab_size: int):
    return np.uint16 if vocab_size <= 2**16 else np.uint32


# --- a corpus: written, read, checked -------------------------------------------------------------


def write(folder: Path, index: Index, documents: Iterable[np.ndarray]) -> None:
    """Write a corpus under another name, then rename it, so that `folder` is never half-written.
    documents: token ids of each, `index.tokens` together. Sets the index's hashes."""
    building = folder.with_name(folder.name + ".building")
    remove(building)
    building.mkdir()
    # On a full disk a store into an np.memmap would kill the process without a message.
    with open(building / "tokens.npy", "wb") as f:
        dtype = np.dtype(token_type(index.vocab_size))
        header = {"descr": dtype.str, "fortran_order": False, "shape": (index.tokens,)}
        np.lib.format.write_array_header_1_0(f, header)
        for ids in documents:
            f.write(ids.data)
    index = dataclasses.replace(index, blocks=block_hashes(building / "tokens.npy", workers=4))
    index = dataclasses.replace(index, sha256=index_hash(index))
    (building / "index.json").write_text(json.dumps(dataclasses.asdict(index), indent=1))
    remove(folder)
    os.rename(building, folder)


def read_index(folder: Path) -> Index:
    """The index of a corpus. Raises ValueError where it is not what was written here."""
    index = json_files.read(folder / "index.json", Index)
    if index.sha256 != index_hash(index) or index.key != folder.name:
        raise ValueError("index.json is not what was written here")
    return index


def read(folder: Path) -> tuple[Index, np.ndarray]:
    """A corpus's index and its token ids [tokens], mapped from disk; only `check` reads them all.
    Raises CacheError for a damaged index."""
    try:
        index = read_index(Path(folder))
        return index, np.load(Path(folder, "tokens.npy"), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as e:
        raise damaged(folder, cause(e)) from None


def check(folder: Path, rank: int = 0, world: int = 1, workers: int = 1) -> str | None:
    """What is wrong with this rank's share of a cached corpus. None: nothing; "": there is no such
    folder. Raises CacheError where the cache itself cannot be read."""
    with cache_errors(folder.parent):
        if not folder.exists():
            return ""
    try:
        hashes = block_hashes(folder / "tokens.npy", rank, world, workers)
        if hashes != read_index(folder).blocks[rank::world]:
            raise ValueError("tokens in it have changed")
    except (OSError, ValueError) as e:
        return str(damaged(folder, cause(e)))
    return None


def damaged(folder: Path, why: str) -> CacheError:
    return CacheError(f"{folder}: the cached corpus is damaged ({why})")


def index_hash(index: Index) -> str:
    content = dataclasses.asdict(dataclasses.replace(index, sha256=""))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def block_hashes(path: Path, rank: int = 0, world: int = 1, workers: int = 1) -> list[str]:
    """SHA-256 of this rank's blocks of a file: blocks rank, rank + world, ..."""

    def hash_block(start: int) -> str:
        digest = hashlib.sha256()
        with open(path, "rb") as f:
            f.seek(start)
            for _ in range(0, BLOCK_BYTES, 2**20):
                digest.update(f.read(min(2**20, BLOCK_BYTES)))
        return digest.hexdigest()

    starts = range(rank * BLOCK_BYTES, os.path.getsize(path), world * BLOCK_BYTES)
    # Threads suffice: hashlib releases Python's global lock.
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(hash_block, starts))


# --- while a corpus is built ----------------------------------------------------------------------


def lock(folder: Path):
    """An open file, locked until it is closed or this process ends: one run at a time builds a
    corpus, and others wait. Raises CacheError."""
    with cache_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(folder.with_name(folder.name + ".lock"), "w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            terminal.say("data: waiting for another run of the same text", error=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        return file


def write_part(target: str, ids: np.ndarray, table: np.ndarray) -> None:
    """Write TARGET.tokens.npy, TARGET.documents.npy and, last, TARGET.sha256 with their hashes.
    ids: [tokens]; table: [documents, 3], see `data.tokenize_part`. Raises CacheError."""
    with cache_errors(Path(target).parent.parent):
        np.save(f"{target}.tokens.npy", ids, allow_pickle=False)
        np.save(f"{target}.documents.npy", table, allow_pickle=False)
        Path(f"{target}.sha256").write_text(part_hashes(target))


def read_part(target: str) -> tuple[np.ndarray, np.ndarray]:
    """(ids [tokens], mapped from disk; table [documents, 3]) of a part."""
    ids = np.load(f"{target}.tokens.npy", mmap_mode="r", allow_pickle=False)
    return ids, np.load(f"{target}.documents.npy", allow_pickle=False)


def part_is_complete(target: str) -> bool:
    """Whether an earlier run finished this part, and nothing has changed it since."""
    try:
        return Path(f"{target}.sha256").read_text() == part_hashes(target)
    except (OSError, ValueError):
        return False


def part_hashes(target: str) -> str:
    return " ".join(file_hash(Path(f"{target}.{name}.npy")) for name in ("tokens", "documents"))


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m run.token_cache FOLDER, one with an index.json")
    folder = Path(sys.argv[1]).resolve()
    fault = check(folder, workers=os.cpu_count())
    if fault is not None:
        terminal.refuse(f"token_cache.py: {fault or f'{folder}: no such folder'}")
    index, _ = read(folder)
    count = f"{index.tokens:,} tokens of {index.tokenizer} in {index.documents:,} documents"
    print(f"{sys.argv[1]}: whole; {count}")


if __name__ == "__main__":
    terminal.run(main)
