"""Text to token ids to batches: the same batches under every layout.

    files -> documents -> token ids, each document closed by an end-of-text token -> one memory-mapped file -> windows of s + 1

- Documents stand in the order of a hash of their text, a shuffle that does not depend on where or in what order the files
  lie. The last twentieth of the stream is held out and never trained on.
- The tokenised stream is cached under a key of the files' contents, the tokenizer and this format. Building it is spread over
  ranks and processes, in parts that survive a kill; a file lock keeps a second run waiting until the first is done.
- Sample number n of a training run is a window of the stream that depends on (seed, n) alone: every epoch is a new
  permutation. Step k = 1, 2, ... trains on samples (k - 1) B .. k B - 1, whichever rank holds which of them.

    python data.py [--data PATH ...] [--tokenizer bytes]       prepares a corpus and shows a few samples of it

Without `--data` the corpus is the source of Python's standard library, which every machine that can run this has. Attention
is not masked between documents of one window, as in GPT-3. Megatron-LM keeps an index of documents and samples per epoch on
disk, which pays off when several corpora are blended; a permutation of windows is all that one corpus needs.
"""
import fcntl
import gzip
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenizer import TokenizerError, make_tokenizer

FORMAT = "2"                     # part of the cache key: raise it when the same text would be cached differently
PART_BYTES = 16 * 2**20          # text that one process tokenises at a time
HELD_OUT = 20                    # the last 1/20 of the stream is never trained on


class DataError(ValueError):
    """The data cannot be used; the message says which file, and where in it."""


class Batch(NamedTuple):
    tokens: Tensor               # [b, s] int64
    labels: Tensor               # [b, s] int64: the next token
    loss_mask: Tensor            # [b, s] bool: the labels that count
    samples: Tensor              # [b] int64: global sample numbers, for the dropout key

    def to(self, device) -> "Batch":
        return Batch(*(t.to(device) for t in self))


# ---------------------------------------------------------------------------------------------------------------------
# Files to documents

def standard_library() -> list[Path]:
    """Python's own source files, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip.intersection(p.relative_to(root).parts))
    if not files:
        raise DataError(f"{root}: no source files of the standard library here; name text files with --data")
    return files


def find_files(paths: list[str]) -> list[Path]:
    """The files that `paths` name, and all text files in the folders that they name. Raises DataError."""
    if not paths:
        return standard_library()
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not any(n.startswith(".") for n in p.relative_to(path).parts))
            text = [p for p in found if p.stat().st_size and is_text(p)]
            if not text:
                raise DataError(f"--data {path}: no text in this folder ({len(found)} other files)")
            if len(text) < len(found):
                print(f"data: {path}: {len(found) - len(text)} of {len(found)} files are empty or not text, and left out", file=sys.stderr)
            files += text
        elif not path.exists():
            raise DataError(f"--data {path}: no such file or folder")
        else:
            if not path.stat().st_size:
                raise DataError(f"--data {path}: the file is empty")
            files.append(path)
    return files


def is_text(path: Path) -> bool:
    if path.suffix == ".gz":
        return True
    with open(path, "rb") as f:
        return b"\0" not in f.read(4096)


def text_of(raw: bytes) -> str:
    """Raises UnicodeDecodeError, for a zero byte too."""
    if (position := raw.find(b"\0")) >= 0:
        raise UnicodeDecodeError("utf-8", raw, position, position + 1, "a zero byte")
    return raw.decode("utf-8")


def decode_text(raw: bytes, path: Path, offset: int) -> str:
    try:
        return text_of(raw)
    except UnicodeDecodeError as e:
        raise DataError(f"--data {path}: not UTF-8 text (byte 0x{raw[e.start]:02x} at offset {offset + e.start})") from None


def documents(path: Path, start: int, stop: int | None):
    """The documents of one file between two offsets: one a line in `.jsonl`, otherwise the text itself. Raises DataError."""
    zipped = path.suffix == ".gz"
    try:
        with (gzip.open if zipped else open)(path, "rb") as f:
            f.seek(start)
            raw = f.read(-1 if stop is None else stop - start)
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"--data {path}: cannot be read ({e})") from None
    if Path(path.stem if zipped else path).suffix != ".jsonl":
        yield decode_text(raw, path, start)
        return
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            try:
                record = json.loads(text_of(line))
                text = record.get("text") if isinstance(record, dict) else None
                problem = None if isinstance(text, str) else 'no "text" field that is a string'
                if text is not None and not problem:
                    text.encode("utf-8")                                 # half a surrogate pair, which JSON can hold, fails
            except json.JSONDecodeError as e:
                problem = f"malformed JSON ({e.msg}, column {e.colno})"
            except UnicodeDecodeError as e:
                problem = f"not UTF-8 text (byte 0x{line[e.start]:02x})"
            except UnicodeEncodeError as e:
                problem = f"half a surrogate pair (\\u{ord(text[e.start]):04x}) is not text"
            except (ValueError, RecursionError) as e:
                problem = f"JSON that Python does not take ({type(e).__name__})"
            if problem:
                with open(path, "rb") as f:
                    number += 0 if zipped else f.read(start).count(b"\n")
                raise DataError(f"--data {path}, line {number}: {problem}")
            yield text


def split_parts(files: list[Path]) -> list[list[tuple[Path, int, int | None]]]:
    """Pieces (path, start, stop) of about PART_BYTES a part. A longer file is cut at line ends: a long text becomes several
    documents. A zipped file is one piece."""
    parts, room = [[]], PART_BYTES
    for path in files:
        size, start = path.stat().st_size, 0
        while start < size:
            stop = size
            if path.suffix != ".gz" and size - start > PART_BYTES:
                with open(path, "rb") as f:
                    f.seek(start + PART_BYTES - 1)
                    f.readline()
                    stop = min(f.tell(), size)
            if parts[-1] and stop - start > room:
                parts.append([])
                room = PART_BYTES
            parts[-1].append((path, start, None if path.suffix == ".gz" else stop))
            room -= stop - start
            start = stop
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# Documents to a cached stream of token ids

def tokenise_part(pieces, tokenizer_name: str, target: str) -> int:
    """Write `target`.tokens.npy and then `target`.documents.npy, rows (hash, tokens, bytes). Returns the bytes of text."""
    tokenizer = make_tokenizer(tokenizer_name)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    streams, rows = [], []
    for path, start, stop in pieces:
        for text in documents(path, start, stop):
            if text:
                begin = [] if tokenizer.bos is None else [tokenizer.bos]
                document = begin, tokenizer.encode(text), [tokenizer.eot]
                ids = np.concatenate([np.asarray(part, dtype=dtype) for part in document])
                raw = text.encode("utf-8")
                streams.append(ids)
                rows.append((int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big"), len(ids), len(raw)))
    for suffix, array in (("tokens", np.concatenate(streams) if streams else np.zeros(0, dtype)),
                          ("documents", np.array(rows, dtype=np.uint64).reshape(-1, 3))):
        temporary = f"{target}.{suffix}.{os.getpid()}"
        with open(temporary, "wb") as f:
            np.save(f, array)
        os.replace(temporary, f"{target}.{suffix}.npy")                  # whole or not there
    return sum(int(row[2]) for row in rows)


def merge_parts(parts_folder: Path, count: int, folder: Path, index: dict) -> None:
    """All documents in the order of their hashes, as one file, renamed into place when it is whole."""
    names = [parts_folder / f"{i:06d}" for i in range(count)]
    tokens = [np.load(f"{name}.tokens.npy", mmap_mode="r") for name in names]
    rows = [np.load(f"{name}.documents.npy") for name in names]
    part = np.repeat(np.arange(count), [len(r) for r in rows])
    starts = np.concatenate([np.cumsum(r[:, 1]) - r[:, 1] for r in rows]).astype(np.int64)
    hashes, lengths, sizes = (np.concatenate([r[:, column] for r in rows]) for column in range(3))
    total = int(lengths.sum())
    if not total:
        raise DataError("--data: there is no text in these files")
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    stream = np.lib.format.open_memmap(building / "tokens.npy", mode="w+", dtype=tokens[0].dtype, shape=(total,))
    position = 0
    for i in np.argsort(hashes, kind="stable"):
        length = int(lengths[i])
        stream[position:position + length] = tokens[part[i]][starts[i]:starts[i] + length]
        position += length
    stream.flush()
    index |= {"tokens": total, "documents": len(hashes), "bytes": int(sizes.sum()), "held_out_from": total - total // HELD_OUT}
    (building / "index.json").write_text(json.dumps(index, indent=1))
    os.rename(building, folder)


def prepare(paths: list[str], tokenizer, cache="cache", exchange=lambda x: [x], rank=0, world=1, workers=1) -> Path:
    """The folder of the tokenised corpus, built if the cache does not hold it yet.

    exchange(object): every rank's object, on every rank (`all_gather_object`), which also makes the ranks wait for each
    other. All ranks call this together. Raises DataError, the same one on every rank.
    """
    def together(work):                                                  # an error on one rank is every rank's error
        result = error = None
        try:
            result = work()
        except (DataError, OSError) as e:
            error = e if isinstance(e, DataError) else DataError(f"--data: {e}")
        outcomes = exchange((result, error))
        for _, error in outcomes:
            if error:
                raise error
        return [result for result, _ in outcomes]

    def contents():                                                      # this rank's share of the hashes
        return [(i, file_hash(f)) for i, f in enumerate(files) if i % world == rank]

    def build():                                                         # this rank's share of the parts
        missing = {i: pieces for i, pieces in enumerate(parts)
                   if i % world == rank and not (parts_folder / f"{i:06d}.documents.npy").exists()}
        jobs = {i: (pieces, tokenizer.name, str(parts_folder / f"{i:06d}")) for i, pieces in missing.items()}
        progress = Progress(len(jobs), rank)
        if len(jobs) < 2 or workers < 2:
            for job in jobs.values():
                progress.add(tokenise_part(*job))
        else:
            with ProcessPoolExecutor(min(workers, len(jobs)), multiprocessing.get_context("spawn")) as pool:
                for future in as_completed([pool.submit(tokenise_part, *job) for job in jobs.values()]):
                    progress.add(future.result())

    files = together(lambda: find_files(paths))[0]
    hashes = [h for _, h in sorted(sum(together(contents), []))]
    corpus = hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:16]
    key = hashlib.sha256(f"{corpus} {tokenizer.fingerprint} {FORMAT} {PART_BYTES}".encode()).hexdigest()[:16]
    folder, parts_folder = Path(cache) / key, Path(cache) / f"{key}.parts"
    locks = []                                                           # given back by the kernel if this process dies
    try:
        together(lambda: locks.append(take_lock(Path(cache) / f"{key}.lock")) if rank == 0 and not folder.exists() else None)
        if together(lambda: rank == 0 and not folder.exists())[0]:       # still missing once the lock is ours
            parts = split_parts([file for _, file in sorted(zip(hashes, files))])
            parts_folder.mkdir(parents=True, exist_ok=True)
            together(build)
            if rank == 0:
                index = {"corpus": corpus, "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "eot": tokenizer.eot}
            together(lambda: rank == 0 and merge_parts(parts_folder, len(parts), folder, index))
            if rank == 0:
                shutil.rmtree(parts_folder, ignore_errors=True)
    finally:
        for lock in locks:
            lock.close()
    return folder


def file_hash(path: Path) -> str:
    digest = hashlib.sha256("".join(path.suffixes[-2:]).encode() if path.suffix in (".gz", ".jsonl") else b"")
    with open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def take_lock(path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(path, "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("data: waiting for another run that is tokenizing the same text", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


class Progress:
    def __init__(self, total: int, rank: int):
        self.total, self.done, self.bytes, self.start, self.show = total, 0, 0, time.time(), rank == 0 and total

    def add(self, size: int) -> None:
        self.done, self.bytes = self.done + 1, self.bytes + size
        if self.show:
            rate = self.bytes / 2**20 / max(time.time() - self.start, 1e-9)
            print(f"\rdata: tokenized {self.done}/{self.total} parts, {rate:.1f} MiB/s", end="\n" if self.done == self.total else "",
                  file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# A stream to batches

class Corpus:
    """Windows of a prepared stream. Sample number n is window n of epoch 0, then 1, ...; training epochs are shuffled."""

    def __init__(self, folder: Path, seq_length: int, seed: int | None, split: str = "train"):
        """seed None: in order. split: `train` or `held-out`. Raises DataError when there is not one whole window."""
        try:
            self.index = json.loads((Path(folder) / "index.json").read_text())
            stream, at = np.load(Path(folder) / "tokens.npy", mmap_mode="r"), self.index["held_out_from"]
        except (OSError, ValueError, KeyError) as e:
            raise DataError(f"{folder}: the cached corpus is damaged ({e}); delete this folder, and it is built again") from None
        self.stream = stream[:at] if split == "train" else stream[at:]
        self.s, self.seed, self.epoch = seq_length, seed, None
        self.windows = (len(self.stream) - 1) // seq_length
        if self.windows < 1:
            raise DataError(f"--data: too short: the {split} part has {len(self.stream)} tokens of {self.index['tokens']}, and one "
                            f"sequence takes {seq_length + 1}; give more text, or a --seq-length of at most {max(1, len(self.stream) - 1)}")

    def window(self, sample: int) -> int:
        epoch, n = divmod(int(sample), self.windows)
        if self.seed is None:
            return n
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.windows)
        return int(self.order[n])

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers."""
        starts = [self.window(n) * self.s for n in samples]
        rows = torch.from_numpy(np.stack([self.stream[i:i + self.s + 1] for i in starts]).astype(np.int64))     # [b, s + 1]
        return Batch(rows[:, :-1], rows[:, 1:], torch.ones_like(rows[:, 1:], dtype=torch.bool), torch.as_tensor(list(samples)))

    def counted_tokens(self, samples) -> int:
        """How many labels of these samples count: known before any forward."""
        return len(samples) * self.s


def main():
    import argparse
    parser = argparse.ArgumentParser(description="Prepare a corpus and show a few samples of it.")
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--seq-length", type=int, default=64)
    args = parser.parse_args()
    try:
        tokenizer = make_tokenizer(args.tokenizer)
        folder = prepare(args.data, tokenizer, workers=os.cpu_count())
        corpus = Corpus(folder, args.seq_length, seed=0)
    except (DataError, TokenizerError) as e:
        sys.exit(f"data.py: {e}")
    print(f"{folder}: " + ", ".join(f"{k} {v}" for k, v in corpus.index.items()))
    print(f"{corpus.windows} windows of {args.seq_length} tokens to train on; the first three samples with seed 0:")
    for row in corpus.batch(range(3)).tokens:
        print("   ", repr(tokenizer.decode(row.tolist())))


if __name__ == "__main__":
    main()
