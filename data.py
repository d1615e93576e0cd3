"""Text to token ids to batches: the same batches under every layout.

    files -> documents -> token ids, each document closed by an end-of-text token -> one memory-mapped file -> windows of s + 1

- Documents stand in the order of a hash of their text, a shuffle that does not depend on where or in what order the files
  lie. The last twentieth of the stream is held out and never trained on.
- The tokenised stream is cached (token_cache.py) under a key of the files' contents, the tokenizer and this format. Building
  it is spread over ranks and processes, in parts that survive a kill; a file lock keeps a second run waiting until the first
  is done. What has changed in the cache since is built again from the text.
- Sample number n of a training run is a window of the stream that depends on (seed, n) alone: every epoch is a new
  permutation. Step k = 1, 2, ... trains on samples (k - 1) B .. k B - 1, whichever rank holds which of them.

    python data.py [--data PATH ...] [--tokenizer bytes] [--cache DIR]       prepares a corpus and shows a few samples of it

Without `--data` the corpus is the source of Python's standard library, which every machine that can run this has. Attention
is not masked between documents of one window, as in GPT-3. Several corpora with weights: blend.py. Megatron-LM keeps an index
of documents and samples per epoch on disk; a permutation of windows is all that is needed here.
"""
import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import json_files
import token_cache
from token_cache import CacheError, DataError, cause, check_name, shown
from tokenizer import TokenizerError, make_tokenizer

FORMAT = "3"                     # part of the cache key: raise it when the same text would be cached differently
PART_BYTES = 16 * 2**20          # text that one process tokenises at a time
MISSING = "not there yet"        # the state of a corpus that was never built
HELD_OUT = 20                    # the last 1/20 of the stream is never trained on


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


@contextlib.contextmanager
def reading(path):
    """What the system refuses inside becomes one line about the file. Raises DataError."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as e:
        file = shown(getattr(e, "filename", None) or path)
        raise DataError(f"{file}: cannot be read ({cause(e)}); mend this, or leave it out") from None


def find_files(paths: list[str]) -> list[Path]:
    """The files that `paths` name, and all text files in the folders that they name. Raises DataError."""
    if not paths:
        return standard_library()
    files = []
    for name in paths:
        path = Path(name)
        with reading(name):
            check_name(name)
            if path.is_dir():
                files += text_files(path)
            elif not path.exists():
                raise DataError(f"{shown(path)}: no such file or folder")
            elif not path.is_file():
                raise DataError(f"{shown(path)}: neither a file nor a folder; write its text into a file first")
            elif not path.stat().st_size:
                raise DataError(f"{shown(path)}: the file is empty")
            else:
                files.append(path)
    return files


def text_files(folder: Path) -> list[Path]:
    """All text files below a folder whose names do not begin with a dot. A folder that cannot be read is an error, not empty."""
    def refuse(error: OSError):
        raise error
    found = []
    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(where, name) for name in names if not name.startswith(".")]
    found = sorted(path for path in found if path.is_file())
    text = [path for path in found if is_text(path)]
    if not text:
        raise DataError(f"{shown(folder)}: no text in this folder ({len(found)} other files)")
    if len(text) < len(found):
        print(f"data: {shown(folder)}: {len(found) - len(text)} of {len(found)} files are empty or not text, and left out", file=sys.stderr)
    return text


def is_text(path: Path) -> bool:
    with reading(path), open(path, "rb") as f:
        start = f.read(4096)
    return bool(start) and (path.suffix == ".gz" or b"\0" not in start)


def text_of(raw: bytes, where: str, offset: int = 0) -> str:
    """where: what the message of an error begins with; offset: of `raw` in its file. Raises DataError, for a zero byte too."""
    try:
        if (position := raw.find(b"\0")) >= 0:
            raise UnicodeDecodeError("utf-8", raw, position, position + 1, "a zero byte")
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"{where}: not UTF-8 text (byte 0x{raw[e.start]:02x} at offset {offset + e.start})") from None


@dataclass
class Record:
    """A line of a `.jsonl` file; its other fields are not read."""
    text: str


def documents(path: Path, start: int, stop: int | None):
    """The documents of one file between two offsets: one a line in `.jsonl`, otherwise the text itself. Raises DataError."""
    zipped = path.suffix == ".gz"
    with reading(path), (gzip.open if zipped else open)(path, "rb") as f:
        f.seek(start)
        raw = f.read(-1 if stop is None else stop - start)
    if Path(path.stem if zipped else path).suffix != ".jsonl":
        yield text_of(raw, shown(path), start)
        return
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            try:
                text_of(line, "")
                text = json_files.parse(line, Record, "").text
            except (DataError, json_files.JSONError) as e:
                if not zipped:                                           # `raw` began at `start`
                    with reading(path), open(path, "rb") as f:
                        number += f.read(start).count(b"\n")
                fit = '; {"text": "..."} would fit' if isinstance(e, json_files.JSONError) else ""
                raise DataError(f"{shown(path)}, line {number}{e}{fit}") from None
            yield text


def split_parts(files: list[Path]) -> list[list[tuple[Path, int, int | None]]]:
    """Pieces (path, start, stop) of about PART_BYTES a part. A longer file is cut at line ends: a long text becomes several
    documents. A zipped file is one piece."""
    parts, room = [[]], PART_BYTES
    for path in files:
        with reading(path):
            size, start = path.stat().st_size, 0
        while start < size:
            stop = size
            if path.suffix != ".gz" and size - start > PART_BYTES:
                with reading(path), open(path, "rb") as f:
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
    """Write `target`.tokens.npy, `target`.documents.npy, rows (hash, tokens, bytes), and then `target`.sha256, the hashes of
    both. Returns the bytes of text."""
    tokenizer = make_tokenizer(tokenizer_name)
    dtype = token_cache.token_type(tokenizer.vocab_size)
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
    with token_cache.using(Path(target).parent.parent):
        for suffix, array in (("tokens", np.concatenate(streams) if streams else np.zeros(0, dtype)),
                              ("documents", np.array(rows, dtype=np.uint64).reshape(-1, 3))):
            with open(f"{target}.{suffix}.npy", "wb") as f:
                np.save(f, array, allow_pickle=False)
        Path(f"{target}.sha256").write_text(part_hashes(target))
    return sum(int(row[2]) for row in rows)


def part_hashes(target: str) -> str:
    return " ".join(file_hash(Path(f"{target}.{suffix}.npy")) for suffix in ("tokens", "documents"))


def part_is_whole(target: str) -> bool:
    """Whether an earlier run wrote this part to its end, and nothing has changed it since."""
    try:
        return Path(f"{target}.sha256").read_text() == part_hashes(target)
    except (DataError, OSError, ValueError):
        return False


def merge_parts(parts_folder: Path, count: int, folder: Path, **made_of) -> None:
    """All documents in the order of their hashes, as one file, renamed into place when it is whole."""
    names = [parts_folder / f"{i:06d}" for i in range(count)]
    tokens = [np.load(f"{name}.tokens.npy", mmap_mode="r", allow_pickle=False) for name in names]
    rows = [np.load(f"{name}.documents.npy", allow_pickle=False) for name in names]
    part = np.repeat(np.arange(count), [len(r) for r in rows])
    starts = np.concatenate([np.cumsum(r[:, 1]) - r[:, 1] for r in rows]).astype(np.int64)
    hashes, lengths, sizes = (np.concatenate([r[:, column] for r in rows]) for column in range(3))
    total = int(lengths.sum())
    if not total:
        raise DataError("names no text: all documents are empty")
    building = folder.with_name(folder.name + ".building")
    remove(building)
    building.mkdir()
    with open(building / "tokens.npy", "wb") as f:                       # not by memory map: a full disk would end the process
        f.write(token_cache.header(tokens[0].dtype, total))
        for i in np.argsort(hashes, kind="stable"):
            f.write(tokens[part[i]][starts[i]:starts[i] + int(lengths[i])].data)
    token_cache.write_index(building, token_cache.Index(
        key=folder.name, tokens=total, documents=len(hashes), bytes=int(sizes.sum()), held_out_from=total - total // HELD_OUT,
        blocks=token_cache.block_hashes(building / "tokens.npy", workers=4), **made_of))
    remove(folder)
    os.rename(building, folder)


def remove(folder: Path) -> None:
    """A folder, or a file in its place, if there is one."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


class Lockstep:
    """Work that all ranks do at the same time, each its share. An error on one rank is every rank's error."""

    def __init__(self, exchange, rank: int, world: int, flag: str):
        self.exchange, self.rank, self.world, self.flag = exchange, rank, world, flag

    def __call__(self, work) -> list:
        """What `work()` returned on each rank. Raises the first rank's DataError, with the flag in front, the same one everywhere."""
        result = error = None
        try:
            result = work()
        except CacheError as e:
            error = e
        except DataError as e:
            error = DataError(f"{self.flag} {e}")
        except Exception as e:                                           # peers would wait for this rank
            error = e
        outcomes = self.exchange((result, error))
        for _, error in outcomes:
            if error:
                raise error
        return [result for result, _ in outcomes]

    def share(self, items: list) -> list:
        """(number, item) of this rank."""
        return [(i, item) for i, item in enumerate(items) if i % self.world == self.rank]


def prepare(paths: list[str], tokenizer, cache="cache", exchange=lambda x: [x], rank=0, world=1, workers=1, flag="--data") -> Path:
    """The folder of the tokenised corpus, built if the cache does not hold it whole.

    exchange(object): every rank's object, on every rank (`all_gather_object`), which also makes the ranks wait for each
    other. All ranks call this together. flag: what named the paths. Raises DataError, the same one on every rank.
    """
    with token_cache.using(cache):
        check_name(str(cache))
    lockstep, cache = Lockstep(exchange, rank, world, flag), Path(cache)
    files = lockstep(lambda: find_files(paths) if rank == 0 else None)[0]
    hashes = [h for _, h in sorted(sum(lockstep(lambda: [(i, file_hash(f)) for i, f in lockstep.share(files)]), []))]
    corpus = hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:16]
    key = hashlib.sha256(f"{corpus} {tokenizer.fingerprint} {FORMAT} {PART_BYTES}".encode()).hexdigest()[:16]
    folder, locks = cache / key, []                                      # locks: given back by the kernel if this process dies

    def find_fault() -> str | None:                                      # the same answer on every rank; None: whole
        return next(filter(None, lockstep(lambda: fault_in(folder, rank, world, workers))), None)
    try:
        if find_fault():
            lockstep(lambda: rank == 0 and locks.append(take_lock(cache, key)))
            if fault := find_fault():                                    # still, once the lock is ours
                said = f"{fault}; " * (fault != MISSING)
                build([file for _, file in sorted(zip(hashes, files))], corpus, tokenizer, folder, lockstep, workers, said)
    finally:
        for lock in locks:
            lock.close()
    return folder


def fault_in(folder: Path, rank: int, world: int, workers: int) -> str | None:
    with token_cache.using(folder.parent):
        return token_cache.check(folder, rank, world, workers) if folder.exists() else MISSING


def build(files: list[Path], corpus: str, tokenizer, folder: Path, lockstep: Lockstep, workers: int, said: str) -> None:
    """Tokenise all parts, each rank its share, and merge them into `folder`. Parts of an earlier run that are whole are kept."""
    parts = lockstep(lambda: split_parts(files) if lockstep.rank == 0 else None)[0]
    parts_folder, count = folder.with_name(folder.name + ".parts"), f"{len(files)} file{'s' * (len(files) > 1)}"
    if lockstep.rank == 0:
        print(f"data: {said}the text of {count} is tokenized into {shown(folder)} (--cache DIR puts it elsewhere)", file=sys.stderr, flush=True)

    def tokenise():
        with token_cache.using(folder.parent):
            parts_folder.mkdir(exist_ok=True)
        jobs = [(pieces, tokenizer.name, str(parts_folder / f"{i:06d}")) for i, pieces in lockstep.share(parts)]
        jobs = [job for job in jobs if not part_is_whole(job[-1])]
        progress = Progress(len(jobs), lockstep.rank)
        with contextlib.closing(progress):
            if len(jobs) < 2 or workers < 2:
                for job in jobs:
                    progress.add(tokenise_part(*job))
            else:
                # Ctrl-C goes to the workers as well: they end without a traceback each
                with ProcessPoolExecutor(min(workers, len(jobs)), multiprocessing.get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
                    for future in as_completed([pool.submit(tokenise_part, *job) for job in jobs]):
                        progress.add(future.result())

    def merge():
        if lockstep.rank == 0:
            with token_cache.using(folder.parent):
                merge_parts(parts_folder, len(parts), folder, corpus=corpus, tokenizer=shown(tokenizer.name),
                            vocab_size=tokenizer.vocab_size, eot=tokenizer.eot)
                remove(parts_folder)
    lockstep(tokenise)
    lockstep(merge)


def file_hash(path: Path) -> str:
    digest = hashlib.sha256("".join(path.suffixes[-2:]).encode() if path.suffix in (".gz", ".jsonl") else b"")
    with reading(path), open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def take_lock(cache: Path, key: str):
    """An open file, locked until it is closed: one run builds a corpus at a time. Raises CacheError."""
    with token_cache.using(cache):
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / f"{key}.lock", "w")
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
            print(f"\rdata: tokenized {self.done}/{self.total} parts, {rate:.1f} MiB/s", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.show and self.done:
            print(file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# A stream to batches

class Corpus:
    """Windows of a prepared stream. Sample number n is window n of epoch 0, then 1, ...; training epochs are shuffled."""

    def __init__(self, folder: Path, seq_length: int, seed: int | None, split: str = "train", where: str = "--data"):
        """seed None: in order. split: `train`, `held-out`, or `all` of it. where: what named the text, for messages.
        Raises DataError when there is not one whole window, CacheError when the cache is damaged (`prepare` mends it)."""
        index, stream = token_cache.read(folder)
        self.index, at = dataclasses.asdict(index), index.held_out_from
        self.stream = {"train": stream[:at], "held-out": stream[at:], "all": stream}[split]
        self.s, self.seed, self.epoch = seq_length, seed, None
        self.windows = (len(self.stream) - 1) // seq_length
        if self.windows < 1:
            part = "text" if split == "all" else f"{split} part"
            raise DataError(f"{where}: too short: the {part} has {len(self.stream)} tokens of {index.tokens}, and one "
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

    import blend
    terminal.prepare()
    parser = argparse.ArgumentParser(description="Prepare a corpus and show a few samples of it.")
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH", help="text files or folders; or several corpora, each WEIGHT:PATH")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--cache", default="cache", metavar="DIR", help="the folder of tokenised text")
    parser.add_argument("--seq-length", type=int, default=64)
    args = parser.parse_args()
    try:
        tokenizer = make_tokenizer(args.tokenizer)
        parts = blend.prepare(args.data, tokenizer, cache=args.cache, workers=os.cpu_count())
        corpus = blend.open_parts(parts, args.seq_length, seed=0)
    except (DataError, TokenizerError) as e:
        print(f"data.py: {e}", file=sys.stderr)
        sys.exit(2)
    for part in parts:
        index, _ = token_cache.read(part.folder)
        print(f"{shown(part.folder)}: {index.tokens:,} tokens of {index.tokenizer} in {index.documents:,} documents, {index.bytes:,} bytes")
    print(f"{corpus.windows} windows of {args.seq_length} tokens to train on; the first three samples with seed 0:")
    for row in corpus.batch(range(3)).tokens:
        print("   ", repr(tokenizer.decode(row.tolist())))


if __name__ == "__main__":
    main()
