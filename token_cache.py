"""The tokenised corpus on disk, and how it is known to be what was written.

    CACHE/KEY/tokens.npy     every document's token ids, one after the other: uint16, or uint32 for a large vocabulary
    CACHE/KEY/index.json     what it was made of, its counts, and the SHA-256 of each 64 MiB of tokens.npy

A token that changed on disk would train without a word. So whoever opens the cache hashes it first: the ranks share the
blocks, and each rank's threads share its blocks. One core hashes half a GB to 2 GB a second, as it does with the text,
whose hash is the key and is computed at every start too. index.json carries a hash of itself, and the name of its folder.

    python token_cache.py FOLDER        checks one corpus
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

import json_files

BLOCK_BYTES = 64 * 2**20         # of tokens.npy, that one SHA-256 covers


class DataError(ValueError):
    """The data cannot be used; the message says which file, and where in it."""


class CacheError(DataError):
    """The token cache is damaged, or its folder cannot be used."""


@dataclass
class Index:
    """index.json, as it has to be."""
    key: str                     # the folder's name
    corpus: str                  # fingerprint of the text
    tokenizer: str
    vocab_size: int
    eot: int
    tokens: int
    documents: int
    bytes: int                   # of text, as UTF-8
    held_out_from: int           # the first token that belongs to the held-out text
    blocks: list[str]            # SHA-256 of each BLOCK_BYTES of tokens.npy
    sha256: str = ""             # of all the above


def shown(path) -> str:
    """A path for a message of one line: quoted, with escapes, if it has characters in it that do not print."""
    return str(path) if str(path).isprintable() and str(path) else repr(str(path))


def check_name(name: str) -> None:
    """Raises ValueError for what no file can be called, or no config.json can hold."""
    if not name:
        raise ValueError("an empty name")
    if "\0" in name:
        raise ValueError("a zero byte in the name")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the name is not UTF-8") from None


def cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def using(cache):
    """What the system refuses inside becomes one line about --cache. Raises CacheError."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as e:
        raise CacheError(f"--cache {shown(cache)}: cannot be used ({cause(e)}); make room or name another folder") from None


def token_type(vocab_size: int):
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def header(dtype, count: int) -> bytes:
    """The first bytes of the .npy file of a vector: numpy's, byte for byte."""
    buffer, descr = io.BytesIO(), np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": (count,)})
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
    with ThreadPoolExecutor(workers) as pool:                            # hashlib computes outside Python's global lock
        return list(pool.map(hash_block, range(rank * BLOCK_BYTES, os.path.getsize(path), world * BLOCK_BYTES)))


def read(folder: Path) -> tuple[Index, np.ndarray]:
    """A corpus's index, and its token ids [tokens], mapped from disk. Raises CacheError where names, counts or types do not agree;
    only `check` looks at every token."""
    folder = Path(folder)
    try:
        index = json_files.read(folder / "index.json", Index)
        if index.sha256 != index_hash(index) or index.key != folder.name:
            raise ValueError("index.json is not what was written here")
        head, dtype = header(token_type(index.vocab_size), index.tokens), np.dtype(token_type(index.vocab_size))
        with open(folder / "tokens.npy", "rb") as f:
            if f.read(len(head)) != head or os.fstat(f.fileno()).st_size != len(head) + index.tokens * dtype.itemsize:
                raise ValueError(f"tokens.npy does not hold {index.tokens} ids of type {dtype}")
        return index, np.memmap(folder / "tokens.npy", dtype, "r", offset=len(head), shape=(index.tokens,))
    except (OSError, ValueError) as e:
        raise CacheError(f"{shown(folder)}: the cached corpus is damaged ({cause(e)})") from None


def check(folder: Path, rank: int = 0, world: int = 1, workers: int = 1) -> str | None:
    """What is wrong with this rank's share of a cached corpus; None if nothing is."""
    try:
        index, _ = read(folder)
        if block_hashes(folder / "tokens.npy", rank, world, workers) != index.blocks[rank::world]:
            return f"{shown(folder)}: the cached corpus is damaged (tokens in it have changed)"
    except (CacheError, OSError) as e:
        return str(e)
    return None


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python token_cache.py FOLDER, one with an index.json")
    folder = Path(sys.argv[1]).resolve()
    fault = check(folder, workers=os.cpu_count())
    if fault:
        print(f"token_cache.py: {fault}", file=sys.stderr)
        sys.exit(2)
    index = read(folder)[0]
    print(f"{sys.argv[1]}: whole; {index.tokens:,} tokens of {index.tokenizer} in {index.documents:,} documents")


if __name__ == "__main__":
    main()
