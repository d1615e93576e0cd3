"""Text to token ids to batches: the same batches under every layout.

    files -> documents -> token ids, each document closed by an end-of-text token -> one
    memory-mapped file -> windows of s + 1

- Documents stand in the order of a hash of their text, a shuffle that does not depend on where or
in what order the files
  lie. The last twentieth of the stream is held out and never trained on.
- The tokenised stream is cached (token_cache.py) under a key of the files' contents, the tokenizer
and this format. Building
  it is spread over ranks and processes, in parts that survive a kill; a file lock keeps a second
  run waiting until the first is done. What has changed in the cache since is built again from the
  text.
- Sample number n of a training run is a window of the stream that depends on (seed, n) alone: every
epoch is a new
  permutation. Step k = 1, 2, ... trains on samples (k - 1) B .. k B - 1, whichever rank holds which
  of them.

    python data.py [--data PATH ...] [--tokenizer bytes] [--cache DIR]       prepares a corpus and shows a few samples of it

Without `--data` the corpus is the source of Python's standard library, which every machine that can
run this has. Attention is not masked between documents of one window, as in GPT-3. Several corpora
with weights: blend.py. Megatron-LM keeps an index of documents and samples per epoch on disk; a
permutation of windows is all that is needed here."""

from runtime import terminal

if __name__ == "__main__":
    # PyTorch takes seconds to import, and Ctrl-C may come meanwhile.
    terminal.quiet_interrupts()

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from corpus import token_cache
from corpus.documents import DataError, check_name, documents, find_files, reading, shown
from corpus.token_cache import CacheError
from corpus.tokenizer import TokenizerError, make_tokenizer

# part of the cache key: raise it when the same text would be cached differently
FORMAT = "3"
# text that one process tokenises at a time
PART_BYTES = 16 * 2**20
# the last 1/20 of the stream is never trained on
HELD_OUT = 20


class Batch(NamedTuple):
    tokens: Tensor  # [b, s] int64
    targets: Tensor  # [b, s] int64: the next token
    loss_mask: Tensor  # [b, s] bool: the targets that count
    # [b] int64: global sample numbers, for the dropout key
    samples: Tensor

    def to(self, device) -> "Batch":
        return Batch(*(t.to(device) for t in self))


# --------------------------------------------------------------------------------------------------
# Documents to a cached stream of token ids


def split_parts(files: list[Path]) -> list[list[tuple[Path, int, int | None]]]:
    """Pieces (path, start, stop) of about PART_BYTES a part. A longer file is cut at line ends: a
    long text becomes several documents. A zipped file is one piece."""
    parts = [[]]
    room = PART_BYTES
    for path in files:
        with reading(path):
            size = path.stat().st_size
            start = 0
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


def tokenise_part(pieces, tokenizer_name: str, target: str) -> int:
    """Write `target`.tokens.npy; `target`.documents.npy, rows (hash, tokens, bytes); and at the end
    `target`.sha256, the hashes of both. Returns the bytes of text."""
    tokenizer = make_tokenizer(tokenizer_name)
    dtype = token_cache.token_type(tokenizer.vocab_size)
    streams = [np.zeros(0, dtype)]
    rows = []
    for path, start, stop in pieces:
        for text in filter(None, documents(path, start, stop)):
            begin = [] if tokenizer.bos is None else [tokenizer.bos]
            document = begin, tokenizer.encode(text), [tokenizer.eot]
            ids = np.concatenate([np.asarray(part, dtype=dtype) for part in document])
            raw = text.encode("utf-8")
            order = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")
            streams.append(ids)
            rows.append((order, len(ids), len(raw)))
    table = np.array(rows, np.uint64).reshape(-1, 3)
    with token_cache.using(Path(target).parent.parent):
        for suffix, array in (("tokens", np.concatenate(streams)), ("documents", table)):
            # np.save into a file does not say why it failed
            buffer = io.BytesIO()
            np.save(buffer, array, allow_pickle=False)
            Path(f"{target}.{suffix}.npy").write_bytes(buffer.getbuffer())
        Path(f"{target}.sha256").write_text(part_hashes(target))
    return sum(size for _, _, size in rows)


def part_hashes(target: str) -> str:
    return " ".join(file_hash(Path(f"{target}.{suffix}.npy")) for suffix in ("tokens", "documents"))


def part_is_whole(target: str) -> bool:
    """Whether an earlier run wrote this part to its end, and nothing has changed it since."""
    try:
        return Path(f"{target}.sha256").read_text() == part_hashes(target)
    except (OSError, ValueError):
        return False


def merge_parts(targets: list[str], folder: Path, **made_of) -> None:
    """All documents in the order of their hashes, as one file, renamed when it is whole."""
    tokens = [np.load(f"{t}.tokens.npy", mmap_mode="r", allow_pickle=False) for t in targets]
    rows = [np.load(f"{t}.documents.npy", allow_pickle=False) for t in targets]
    part = np.repeat(np.arange(len(targets)), [len(r) for r in rows])
    starts = np.concatenate([np.cumsum(r[:, 1]) - r[:, 1] for r in rows]).astype(np.int64)
    hashes, lengths, sizes = (np.concatenate([r[:, column] for r in rows]) for column in range(3))
    total = int(lengths.sum())
    if not total:
        raise DataError("names no text: all documents are empty")
    building = folder.with_name(folder.name + ".building")
    remove(building)
    building.mkdir()
    # written, not mapped: on a full disk a store into a map ends the process without a word
    with open(building / "tokens.npy", "wb") as f:
        f.write(token_cache.header(tokens[0].dtype, total))
        for i in np.argsort(hashes, kind="stable"):
            f.write(tokens[part[i]][starts[i] : starts[i] + int(lengths[i])].data)
    blocks = token_cache.block_hashes(building / "tokens.npy", workers=4)
    counts = {"tokens": total, "documents": len(hashes), "bytes": int(sizes.sum())}
    token_cache.write_index(
        building,
        token_cache.Index(
            key=folder.name,
            held_out_from=total - total // HELD_OUT,
            blocks=blocks,
            **counts,
            **made_of,
        ),
    )
    remove(folder)
    os.rename(building, folder)


def remove(folder: Path) -> None:
    """A folder, or a file in its place, if there is one."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


class Lockstep:
    """Work that all ranks do at the same time, each its share. An error on one rank is an error on
    every rank, the same one: no rank waits for one that has left."""

    def __init__(self, exchange, rank: int, world: int, flag: str):
        self.exchange = exchange
        self.rank = rank
        self.world = world
        self.flag = flag

    def __call__(self, work) -> list:
        """What `work()` returned on each rank. Raises the first rank's error, with the flag."""
        result = error = None
        try:
            result = work()
        except CacheError as e:
            error = e
        except DataError as e:
            error = DataError(f"{self.flag} {e}")
        except Exception as e:
            error = e
        outcomes = self.exchange((result, error))
        for _, error in outcomes:
            if error:
                raise error
        return [result for result, _ in outcomes]

    def on_first(self, work):
        """What `work()` returned on rank 0, which alone does it."""
        return self(lambda: work() if self.rank == 0 else None)[0]

    def each(self, work, items: list) -> list:
        """[work(item) for item in items], on every rank; each rank does its share."""
        shares = self(lambda: [work(item) for item in items[self.rank :: self.world]])
        return [shares[i % self.world][i // self.world] for i in range(len(items))]


def prepare(
    paths: list[str],
    tokenizer,
    cache="cache",
    exchange=lambda x: [x],
    rank=0,
    world=1,
    workers=1,
    flag="--data",
) -> Path:
    """The folder of the tokenised corpus, built if the cache does not hold it whole.

    exchange(object): every rank's object, on every rank (`all_gather_object`), which also makes the
    ranks wait for each other. All ranks call this together. flag: what named the paths, for
    messages. Raises DataError, the same one on every rank.
    """
    with token_cache.using(cache):
        check_name(str(cache))
    lockstep = Lockstep(exchange, rank, world, flag)
    files = lockstep.on_first(lambda: find_files(paths))
    hashes = lockstep.each(file_hash, files)
    corpus = hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:16]
    made_of = f"{corpus} {tokenizer.fingerprint} {FORMAT} {PART_BYTES}"
    folder = Path(cache) / hashlib.sha256(made_of.encode()).hexdigest()[:16]

    def find_fault() -> str | None:
        """What is wrong with the cached corpus, the same on every rank; None: it is whole."""
        faults = lockstep(lambda: token_cache.check(folder, rank, world, workers))
        return next((fault for fault in faults if fault is not None), None)

    locks = []
    try:
        if find_fault() is not None:
            lockstep.on_first(lambda: locks.append(take_lock(folder)))
            # another run may have built it meanwhile
            if (fault := find_fault()) is not None:
                in_order = [file for _, file in sorted(zip(hashes, files))]
                build(in_order, corpus, tokenizer, folder, lockstep, workers, fault)
    finally:
        for lock in locks:
            lock.close()
    return folder


def build(
    files: list[Path],
    corpus: str,
    tokenizer,
    folder: Path,
    lockstep: Lockstep,
    workers: int,
    fault: str,
) -> None:
    """Tokenise all parts, each rank its share, and merge them into `folder`. Whole parts of an
    earlier run are kept. fault: what was wrong with the folder; empty: it was not there."""
    parts = lockstep.on_first(lambda: split_parts(files))
    parts_folder = folder.with_name(folder.name + ".parts")
    targets = [str(parts_folder / f"{i:06d}") for i in range(len(parts))]
    if lockstep.rank == 0:
        count = f"{len(files)} file{'s' * (len(files) > 1)}"
        what = f"{fault and fault + '; '}tokenized text of {count} goes into {shown(folder)}"
        terminal.say(f"data: {what} (--cache DIR puts it elsewhere)", error=True)

    def tokenise():
        with token_cache.using(folder.parent):
            parts_folder.mkdir(exist_ok=True)
        mine = list(zip(parts, targets))[lockstep.rank :: lockstep.world]
        jobs = [(pieces, tokenizer.name, t) for pieces, t in mine if not part_is_whole(t)]
        with contextlib.closing(Progress(len(jobs), lockstep.rank)) as progress:
            for size in run_jobs(jobs, workers):
                progress.add(size)

    def merge():
        with token_cache.using(folder.parent):
            merge_parts(
                targets,
                folder,
                corpus=corpus,
                tokenizer=shown(tokenizer.name),
                vocab_size=tokenizer.vocab_size,
                eot=tokenizer.eot,
            )
            remove(parts_folder)

    lockstep(tokenise)
    lockstep.on_first(merge)


def run_jobs(jobs: list[tuple], workers: int):
    """Yield what `tokenise_part` returns for each job, in the order in which they end."""
    if len(jobs) < 2 or workers < 2:
        for job in jobs:
            yield tokenise_part(*job)
        return
    context = multiprocessing.get_context("spawn")
    # Ctrl-C goes to the workers as well: they end without a traceback each.
    quiet = signal.signal, (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(min(workers, len(jobs)), context, *quiet) as pool:
        for future in as_completed([pool.submit(tokenise_part, *job) for job in jobs]):
            yield future.result()


def file_hash(path: Path) -> str:
    """Of a file's content, and of how it is read. Raises DataError."""
    suffixes = "".join(path.suffixes[-2:]) if path.suffix in (".gz", ".jsonl") else ""
    digest = hashlib.sha256(suffixes.encode())
    with reading(path), open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def take_lock(folder: Path):
    """An open file, locked until it is closed or this process ends: one run builds a corpus at a
    time. Raises CacheError."""
    with token_cache.using(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_name(folder.name + ".lock"), "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting = "data: waiting for another run that is tokenizing the same text"
            terminal.say(waiting, error=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return lock


class Progress:
    def __init__(self, total: int, rank: int):
        self.total = total
        self.done = 0
        self.bytes = 0
        self.start = time.time()
        self.show = rank == 0 and total

    def add(self, size: int) -> None:
        self.done = self.done + 1
        self.bytes = self.bytes + size
        if self.show:
            rate = self.bytes / 2**20 / max(time.time() - self.start, 1e-9)
            terminal.say(
                f"\rdata: tokenized {self.done}/{self.total} parts, {rate:.1f} MiB/s",
                error=True,
                end="",
            )

    def close(self) -> None:
        if self.show and self.done:
            terminal.say(error=True)


# --------------------------------------------------------------------------------------------------
# A stream to batches


class Corpus:
    """Windows of a prepared stream. Sample number n is window n of epoch 0, then 1, ...; training
    epochs are shuffled."""

    def __init__(
        self,
        folder: Path,
        seq_length: int,
        seed: int | None,
        split: str = "train",
        where: str = "--data",
    ):
        """seed None: in order. split: `train`, `held-out`, or `all` of it. where: what named the
        text. Raises DataError when there is not one whole window, CacheError when the cache is
        damaged (`prepare` builds it again)."""
        index, stream = token_cache.read(folder)
        self.index = dataclasses.asdict(index)
        at = index.held_out_from
        self.stream = {"train": stream[:at], "held-out": stream[at:], "all": stream}[split]
        self.s = seq_length
        self.seed = seed
        self.epoch = None
        self.num_sequences = (len(self.stream) - 1) // seq_length
        if self.num_sequences < 1:
            part = "text" if split == "all" else f"{split} part"
            raise DataError(
                f"{where}: too short: the {part} has {len(self.stream)} tokens of {index.tokens},"
                f" and one sequence takes {seq_length + 1}; give more text, or a --seq-length of at"
                f" most {max(1, len(self.stream) - 1)}"
            )

    def window(self, sample: int) -> int:
        epoch, n = divmod(int(sample), self.num_sequences)
        if self.seed is None:
            return n
        if epoch != self.epoch:
            self.epoch, self.order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences),
            )
        return int(self.order[n])

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers."""
        starts = [self.window(n) * self.s for n in samples]
        rows = torch.from_numpy(
            np.stack([self.stream[i : i + self.s + 1] for i in starts]).astype(np.int64)
        )  # [b, s + 1]
        return Batch(
            rows[:, :-1],
            rows[:, 1:],
            torch.ones_like(rows[:, 1:], dtype=torch.bool),
            torch.as_tensor(list(samples)),
        )

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count: known before any forward."""
        return len(samples) * self.s


def main():
    import argparse

    from corpus import blend

    parser = argparse.ArgumentParser(description="Prepare a corpus and show a few samples of it.")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="text files or folders; or several corpora, each WEIGHT:PATH",
    )
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument(
        "--cache", default="cache", metavar="DIR", help="the folder of tokenised text"
    )
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
        print(
            f"{shown(part.folder)}: {index.tokens:,} tokens of {index.tokenizer} in"
            f" {index.documents:,} documents, {index.bytes:,} bytes"
        )
    print(
        f"{corpus.num_sequences} windows of {args.seq_length} tokens to train on; the first three samples"
        " with seed 0:"
    )
    for row in corpus.batch(range(3)).tokens:
        print("   ", repr(tokenizer.decode(row.tolist())))


if __name__ == "__main__":
    terminal.run(main)
