"""The tokenised corpus on disk, and how it is known to be what was written.

    CACHE/KEY/tokens.npy     every document's token ids, one after the other: uint16, or uint32
    CACHE/KEY/index.json     what it was made of, its counts, and the SHA-256 of each 64 MiB of it

A token that changed on disk would train without a word. So all of tokens.npy is hashed whenever
it is opened: the ranks share the blocks, and the threads of a rank share its blocks. This costs
0.5 to 2 seconds per GB on one core, as much as the hash of the text, which is computed at every
start too, because it is the key. 16 cores check 100 GB in 3 to 12 seconds, if the disk can.
index.json holds a hash of itself, and the name of its folder.

    python -m corpus.token_cache FOLDER        checks one corpus
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus.documents import DataError, cause, shown
from runtime import json_files, terminal

# of tokens.npy, that one SHA-256 covers
BLOCK_BYTES = 64 * 2**20


class CacheError(DataError):
    """The token cache is damaged, or its folder cannot be used."""


@dataclass
class Index:
    """index.json, as it has to be."""

    # the folder's name
    key: str
    # fingerprint of the text
    corpus: str
    tokenizer: str
    vocab_size: int
    eot: int
    tokens: int
    documents: int
    # of text, as UTF-8
    bytes: int
    # the first token that belongs to the held-out text
    held_out_from: int
    # SHA-256 of each BLOCK_BYTES of tokens.npy
    blocks: list[str]
    # of all the above
    sha256: str = ""


@contextlib.contextmanager
def using(cache):
    """What the system refuses inside becomes one line about --cache. Raises CacheError."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as e:
        why = f"cannot be used ({cause(e)}); make room or name another folder"
        raise CacheError(f"--cache {shown(cache)}: {why}") from None


def token_type(vocab_size: int):
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def header(dtype, count: int) -> bytes:
    """The first bytes of the .npy file of a vector: numpy's, byte for byte."""
    buffer = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": (count,)}
    )
    return buffer.getvalue()


def index_hash(index: Index) -> str:
    content = dataclasses.asdict(dataclasses.replace(index, sha256=""))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_index(folder: Path, index: Index) -> None:
    """The last file of a corpus: it names what is in tokens.npy."""
    index = dataclasses.replace(index, sha256=index_hash(index))
    (folder / "index.json").write_text(json.dumps(dataclasses.asdict(index), indent=1))


def block_hashes(path: Path, rank: int = 0, world: int = 1, workers: int = 1) -> list[str]:
    """SHA-256 of this rank's blocks of a file: number rank, rank + world, ..."""

    def hash_block(start: int) -> str:
        digest = hashlib.sha256()
        with open(path, "rb") as f:
            f.seek(start)
            for _ in range(0, BLOCK_BYTES, 2**20):
                digest.update(f.read(min(2**20, BLOCK_BYTES)))
        return digest.hexdigest()

    starts = range(rank * BLOCK_BYTES, os.path.getsize(path), world * BLOCK_BYTES)
    # threads are enough: hashlib does not hold Python's global lock
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(hash_block, starts))


def read(folder: Path) -> tuple[Index, np.ndarray]:
    """A corpus's index, and its token ids [tokens], mapped from disk. Only `check` looks at every
    token. Raises CacheError where names, counts or types do not agree."""
    folder = Path(folder)
    try:
        index = json_files.read(folder / "index.json", Index)
        if index.sha256 != index_hash(index) or index.key != folder.name:
            raise ValueError("index.json is not what was written here")
        dtype = np.dtype(token_type(index.vocab_size))
        head = header(dtype, index.tokens)
        size = len(head) + index.tokens * dtype.itemsize
        with open(folder / "tokens.npy", "rb") as f:
            if f.read(len(head)) != head or os.fstat(f.fileno()).st_size != size:
                raise ValueError(f"tokens.npy does not hold {index.tokens} ids of type {dtype}")
        tokens = np.memmap(
            folder / "tokens.npy", dtype, "r", offset=len(head), shape=(index.tokens,)
        )
        return index, tokens
    except (OSError, ValueError) as e:
        raise damaged(folder, cause(e)) from None


def damaged(folder: Path, why: str) -> CacheError:
    return CacheError(f"{shown(folder)}: the cached corpus is damaged ({why})")


def check(folder: Path, rank: int = 0, world: int = 1, workers: int = 1) -> str | None:
    """What is wrong with this rank's share of a cached corpus: None if nothing is, and the empty
    string if there is no such folder. Raises CacheError where the system does not even say that."""
    with using(folder.parent):
        if not folder.exists():
            return ""
    try:
        index, _ = read(folder)
        if block_hashes(folder / "tokens.npy", rank, world, workers) != index.blocks[rank::world]:
            raise damaged(folder, "tokens in it have changed")
    except (CacheError, OSError) as e:
        return str(e)
    return None


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m corpus.token_cache FOLDER, one with an index.json")
    folder = Path(sys.argv[1]).resolve()
    fault = check(folder, workers=os.cpu_count())
    if fault is not None:
        print(f"token_cache.py: {fault or f'{folder}: no such folder'}", file=sys.stderr)
        sys.exit(2)
    index = read(folder)[0]
    count = f"{index.tokens:,} tokens of {index.tokenizer} in {index.documents:,} documents"
    print(f"{sys.argv[1]}: whole; {count}")


if __name__ == "__main__":
    terminal.run(main)
