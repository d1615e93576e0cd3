"""Text to token ids to batches: the same batches under every layout.

    text files -> documents -> one stream of token ids on disk -> sequences of s + 1 ids -> batches

    stream, s = 4   d1  d1  d1  eot d2  d2  eot d3  d3  ...
    sequence 0      [   tokens    ]                             ids 0 to 3
                        [   targets   ]                         ids 1 to 4
    sequence 1                      [   tokens    ]             ids 4 to 7
                                        [   targets   ]         ids 5 to 8

- Each document ends with an end-of-text token (eot). Documents are sorted by a hash of their text,
  a shuffle that does not depend on where or in what order the files lie.
- The last twentieth of the stream is held out: it is never trained on.
- Sample n of a run is one sequence, a function of (seed, n); every epoch is a new permutation. Step
  k = 1, 2, ... trains on samples (k - 1) B to k B - 1, for a global batch of B. So a layout decides
  which rank computes a sample, never which samples a step has.

Attention is not masked between the documents of a sequence (Brown et al. 2020, "Language Models are
Few-Shot Learners", appendix B). Under `--document-mask` it is: a batch then has the number of each
token's document (document_mask.py). The target of an end-of-text token is still the first token of
the next document, so the model learns to begin a text.

    python -m run.data [--data PATH ...] [--tokenizer bytes] [--cache DIR]       shows a few samples

Without `--data` the corpus is Python's standard library, which every machine that runs this has.
Several corpora with weights are interleaved (run/blend.py).

Text is tokenized once, and cached under a key of the files' contents, the tokenizer and this format
(run/token_cache.py). Ranks and threads share the work, part by part. Complete parts survive a kill,
and a cached stream that has changed since it was written is built again.

Not covered: the index of documents and samples per epoch that Megatron-LM keeps on disk. Here a
permutation of the sequences is enough.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from base import terminal
from base.device_queue import to_device
from base.document_mask import documents_of
from gpt import Context
from run import checkpoint, token_cache
from run.documents import (
    DataError,
    Piece,
    file_hash,
    find_files,
    fingerprint,
    named,
    read_documents,
    split_parts,
    without_bad,
)
from run.tokenizer import make_tokenizer
from run.world import World

# A part of the cache key, to be raised when the same text would be cached differently.
FORMAT = "3"
# Bytes of text that one thread tokenizes at a time.
PART_BYTES = 16 * 2**20
# The last 1/20 of the stream is never trained on.
HELD_OUT = 20
# One rank.
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, restarts=0)

# --- what a run learns from -----------------------------------------------------------------------


class Batch(NamedTuple):
    # [b, s] int64
    tokens: Tensor
    # [b, s] int64: the token after each
    targets: Tensor
    # [b, s] bool: the targets that count
    loss_mask: Tensor
    # [b] int64: global sample numbers, for dropout's key
    samples: Tensor
    # [b, s] int64: the number of each token's document, not decreasing along a row
    documents: Tensor | None = None
    # [b, s] bool: the positions that hold a token and no padding. None: all
    real: Tensor | None = None
    # [b] float64: log-probabilities of answers under a reference (finetune/preference_data.py)
    reference: Tensor | None = None

    def to(self, device) -> "Batch":
        return self._make(None if x is None else to_device(x, device) for x in self)

    def context(self, drop_key: Tensor | None = None) -> Context:
        """The inputs of every layer. drop_key: of base/dropout.py."""
        return Context(drop_key, self.documents, self.real)


class Dataset:
    """Training data. A sample is a row of `s` positions; batch(samples) gives a Batch."""

    s: int

    def taken(self, n: int) -> dict | None:
        """What a checkpoint records of the first n samples of a run, beside their number."""

    def go_on(self, n: int, taken: dict) -> None:
        """Continue with sample n, after those that `taken` describes."""

    def counted_tokens(self, samples) -> int:
        """How many targets of these samples count, known before any forward."""
        return self.positions(samples)

    def positions(self, samples) -> int:
        """How many positions of these samples hold a token and no padding."""
        return len(samples) * self.s


class Order:
    """Sample n -> one of `count` items: all of them in epoch 0, then in epoch 1, ... Every epoch is
    a permutation of its own, by (seed, epoch) alone; without a seed it is the order of the items.
    """

    def __init__(self, count: int, seed: int | None):
        self.count = count
        self.seed = seed
        # The epoch whose permutation is in `permuted`.
        self.epoch = None

    def __call__(self, sample: int) -> int:
        epoch, n = divmod(int(sample), self.count)
        if self.seed is None:
            return n
        if epoch != self.epoch:
            self.permuted = np.random.default_rng([self.seed, epoch]).permutation(self.count)
            self.epoch = epoch
        return int(self.permuted[n])


# --- text to a stream of token ids on disk --------------------------------------------------------


def tokenize_part(pieces: list[Piece], tokenizer, target: str) -> int:
    """Tokenize the documents of one part and write them to disk (`token_cache.write_part`). Returns
    the bytes of text. Raises DataError."""
    dtype = token_cache.token_type(tokenizer.vocab_size)
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    stream = [np.zeros(0, dtype)]
    # One row (hash, tokens, bytes) for each document.
    table = []
    for path, start, stop in pieces:
        for text in filter(None, read_documents(path, start, stop)):
            document = (bos, tokenizer.encode_in_thread(text), [tokenizer.eot])
            ids = np.concatenate([np.asarray(part, dtype) for part in document])
            raw = text.encode("utf-8")
            digest = hashlib.blake2b(raw, digest_size=8).digest()
            stream.append(ids)
            table.append((int.from_bytes(digest, "big"), len(ids), len(raw)))
    rows = np.array(table, np.uint64).reshape(-1, 3)
    token_cache.write_part(target, np.concatenate(stream), rows)
    return int(rows[:, 2].sum())


def tokenize_parts(jobs: list[tuple], workers: int, show: bool) -> None:
    """Run `tokenize_part` for each job in threads, because tokenizers release Python's global lock.
    show: print the progress, in one line that is rewritten."""
    start = time.time()
    mebibytes = done = 0
    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(tokenize_part, *job) for job in jobs]
            for done, future in enumerate(as_completed(futures), 1):
                mebibytes += future.result() / 2**20
                rate = mebibytes / max(time.time() - start, 1e-9)
                if show:
                    message = f"\rdata: tokenized {done}/{len(jobs)} parts, {rate:.1f} MiB/s"
                    terminal.say(message, error=True, end="")
        finally:
            pool.shutdown(cancel_futures=True)
            if show and done:
                terminal.say(error=True)


def merge_parts(targets: list[str], folder: Path, corpus: str, tokenizer) -> None:
    """Write the documents of all parts as one stream, sorted by their hashes. corpus: fingerprint
    of the text. Raises DataError."""
    parts = [token_cache.read_part(target) for target in targets]
    tables = [table for _, table in parts]
    # [documents] each
    hashes, lengths, sizes = np.concatenate(tables).T
    part_of = np.repeat(np.arange(len(parts)), [len(table) for table in tables])
    # Where each document begins in its part.
    starts = np.concatenate([np.cumsum(table[:, 1]) - table[:, 1] for table in tables])
    total = int(lengths.sum())
    if not total:
        raise DataError("names no text: all documents are empty")

    def sorted_documents():
        for i in np.argsort(hashes, kind="stable"):
            ids, _ = parts[part_of[i]]
            start = int(starts[i])
            yield ids[start : start + int(lengths[i])]

    index = token_cache.Index(
        key=folder.name,
        corpus=corpus,
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        tokens=total,
        documents=len(hashes),
        bytes=int(sizes.sum()),
        held_out_from=total - total // HELD_OUT,
        blocks=[],
    )
    token_cache.write(folder, index, sorted_documents())


def build(files, corpus: str, tokenizer, folder: Path, world: World, workers: int) -> None:
    """Tokenize all parts of the files, each rank its share, and merge them into `folder`. Complete
    parts of an earlier run are kept. corpus: fingerprint of the text."""
    parts = world.on_rank_0(lambda: split_parts(files, PART_BYTES))
    parts_folder = folder.with_name(folder.name + ".parts")
    targets = [str(parts_folder / f"{i:06d}") for i in range(len(parts))]

    def tokenize_share():
        with token_cache.cache_errors(folder.parent):
            parts_folder.mkdir(exist_ok=True)
        jobs = []
        for pieces, target in list(zip(parts, targets))[world.rank :: world.size]:
            if not token_cache.part_is_complete(target):
                jobs.append((pieces, tokenizer, target))
        tokenize_parts(jobs, workers, show=world.rank == 0)

    def merge():
        with token_cache.cache_errors(folder.parent):
            merge_parts(targets, folder, corpus, tokenizer)
            checkpoint.remove(parts_folder)

    world.on_every_rank(tokenize_share)
    world.on_rank_0(merge)


def prepare(
    paths: list[str],
    tokenizer,
    cache="cache",
    world: World = ALONE,
    workers=1,
    flag="--data",
    skip_bad=False,
) -> Path:
    """The folder of the tokenized corpus, built unless the cache holds it undamaged. A collective.

    workers: threads of this rank. flag: what named the paths, for messages. skip_bad: leave out
    files that are not UTF-8. Raises DataError, the same one on every rank."""

    def find_fault() -> str | None:
        """The first rank's fault in the cached corpus, on every rank. None: no fault."""
        share = world.rank, world.size
        faults = world.on_every_rank(lambda: token_cache.check(folder, *share, workers))
        return next((fault for fault in faults if fault is not None), None)

    def lock() -> None:
        # The open file stays in this process, because it cannot be sent to other ranks.
        held.enter_context(token_cache.lock(folder))

    with named(flag), contextlib.ExitStack() as held:
        files = world.on_rank_0(lambda: find_files(paths))
        if skip_bad:
            files = without_bad(files, world)
        hashes = world.in_shares(file_hash, files)
        corpus = fingerprint("".join(sorted(hashes)))
        key = fingerprint(f"{corpus} {tokenizer.fingerprint} {FORMAT} {PART_BYTES}")
        folder = Path(cache) / key
        if find_fault() is None:
            return folder
        world.on_rank_0(lock)
        # Another run may have built it meanwhile.
        fault = find_fault()
        if fault is not None:
            if world.rank == 0:
                reason = f"{fault}; " if fault else ""
                message = f"data: {reason}tokenized text goes into {folder} (--cache changes this)"
                terminal.say(message, error=True)
            files = [file for _, file in sorted(zip(hashes, files))]
            build(files, corpus, tokenizer, folder, world, workers)
        return folder


# --- a stream to batches --------------------------------------------------------------------------


class Corpus(Dataset):
    """The sequences of a prepared stream. Sequence i is ids i s to i s + s, both included: its last
    target is the first token of the next sequence."""

    def __init__(
        self,
        folder: Path,
        seq_length: int,
        seed: int | None,
        split: str = "train",
        source: str = "--data",
        document_mask: bool = False,
    ):
        """seed: of the order; None: the order of the stream. split: `train`, `held-out` or `all`.
        source: what named the text, for messages. document_mask: whether batches have documents.
        Raises DataError if there is not one sequence, CacheError if the cache is damaged."""
        index, stream = token_cache.read(folder)
        boundary = index.held_out_from
        splits = {"train": stream[:boundary], "held-out": stream[boundary:], "all": stream}
        self.index = dataclasses.asdict(index)
        # [tokens], on disk
        self.stream = splits[split]
        self.s = seq_length
        self.document_mask = document_mask
        self.num_sequences = (len(self.stream) - 1) // seq_length
        if self.num_sequences < 1:
            part = "text" if split == "all" else f"{split} part"
            has = f"the {part} has {len(self.stream)} tokens of {index.tokens}"
            takes = f"and one sequence takes {seq_length + 1}; give more text, or a --seq-length of"
            most = max(1, len(self.stream) - 1)
            raise DataError(f"{source}: too short: {has}, {takes} at most {most}")
        # Number of a sample of this corpus -> sequence.
        self.sequence_of = Order(self.num_sequences, seed)
        # Where a run went on from other corpora: an offset of sample numbers, and what those gave.
        self.offset, self.others = 0, {}

    def taken(self, n: int) -> dict:
        name = self.index["corpus"]
        corpora = self.others | {name: n + self.offset}
        return {"blend": name, "start": 0, "before": [], "corpora": corpora}

    def go_on(self, n: int, taken: dict) -> None:
        self.others = taken["corpora"]
        self.offset = self.others.get(self.index["corpus"], 0) - n

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers."""
        starts = [self.sequence_of(sample + self.offset) * self.s for sample in samples]
        sequences = np.stack([self.stream[start : start + self.s + 1] for start in starts])
        # [b, s + 1]
        ids = torch.from_numpy(sequences.astype(np.int64))
        targets = ids[:, 1:]
        loss_mask = torch.ones_like(targets, dtype=torch.bool)
        tokens = ids[:, :-1]
        documents = documents_of(tokens, self.index["eot"]) if self.document_mask else None
        return Batch(tokens, targets, loss_mask, torch.as_tensor(list(samples)), documents)


class Blend(Dataset):
    """Several corpora as one, with the interface of a `Corpus`."""

    def __init__(self, corpora: list, weights: list[Fraction]):
        """weights: one for each corpus."""
        # Loaded only where corpora have weights.
        from run.blend import Interleave

        self.corpora = corpora
        self.interleave = Interleave(weights)
        # The sample with which this blend begins; what each corpus had given before, and others.
        self.start, self.before, self.others = 0, [0] * len(corpora), {}
        self.names = [corpus.index["corpus"] for corpus in corpora]
        self.s = corpora[0].s
        self.num_sequences = sum(corpus.num_sequences for corpus in corpora)
        shares = [Fraction(share, self.interleave.total) for share in self.interleave.shares]
        tokens = sum(corpus.index["tokens"] for corpus in corpora)
        bytes_per_token = Fraction(0)
        for share, corpus in zip(shares, corpora):
            bytes_per_token += share * Fraction(corpus.index["bytes"], corpus.index["tokens"])
        self.index = {
            "corpus": fingerprint(" ".join(f"{s}:{n}" for s, n in zip(shares, self.names))),
            "tokens": tokens,
            # Not the sum, so that bytes / tokens is that of the blend's samples.
            "bytes": round(tokens * bytes_per_token),
        }

    def taken(self, n: int) -> dict:
        of_blend = self.interleave.taken(n - self.start)
        counts = [before + m for before, m in zip(self.before, of_blend)]
        return {
            "blend": self.index["corpus"],
            "start": self.start,
            "before": self.before,
            "corpora": self.others | dict(zip(self.names, counts)),
        }

    def go_on(self, n: int, taken: dict) -> None:
        self.others = taken["corpora"]
        if taken["blend"] == self.index["corpus"] and len(taken["before"]) == len(self.names):
            # Go on as if the run had not been interrupted.
            self.start, self.before = min(n, taken["start"]), taken["before"]
        else:
            self.start, self.before = n, [taken["corpora"].get(name, 0) for name in self.names]

    def locate(self, sample: int) -> tuple[int, int]:
        """(k, m): a sample of the run is sample m of corpus k."""
        k, m = self.interleave(sample - self.start)
        return k, self.before[k] + m

    def batch(self, samples) -> Batch:
        """samples: b global sample numbers."""
        rows = [self.corpora[k].batch([m]) for k, m in map(self.locate, samples)]
        # None: without --document-mask no row has documents.
        fields = [None if of_rows[0] is None else torch.cat(of_rows) for of_rows in zip(*rows)]
        # Each corpus counts its own samples; dropout needs the blend's numbers.
        return rows[0]._make(fields)._replace(samples=torch.as_tensor(list(samples)))


class PreparedCorpus(NamedTuple):
    # None: it is the only one.
    weight: Fraction | None
    # The flag that named it, for messages.
    source: str
    # The folder in the token cache.
    folder: Path


def prepare_corpora(
    names: list[str], tokenizer, flag: str = "--data", **options
) -> list[PreparedCorpus]:
    """Tokenize each corpus of `names` (PATH ..., or WEIGHT:PATH ...). options: of `prepare`. Raises
    DataError."""
    weighted_paths = [(None, names)]
    if any(":" in name for name in names):
        from run.blend import parse_weights

        with named(flag):
            weighted_paths = parse_weights(names)
    prepared = []
    for weight, paths in weighted_paths:
        source = flag if weight is None else f"{flag} {paths[0]}"
        folder = prepare(paths, tokenizer, flag=flag, **options)
        prepared.append(PreparedCorpus(weight, source, folder))
    return prepared


def open_corpora(
    prepared: list[PreparedCorpus],
    seq_length: int,
    seed: int | None,
    split: str = "train",
    document_mask: bool = False,
) -> Corpus | Blend:
    """The only corpus, or a blend of several. Arguments as in `Corpus`. Raises DataError."""
    weights, sources, folders = zip(*prepared)
    options = seq_length, seed, split
    corpora = [Corpus(at, *options, of, document_mask) for at, of in zip(folders, sources)]
    return corpora[0] if len(corpora) == 1 else Blend(corpora, weights)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prepare a corpus and show a few samples of it.")
    paths = "text files or folders; or several corpora, each WEIGHT:PATH"
    parser.add_argument("--data", nargs="+", default=[], metavar="PATH", help=paths)
    parser.add_argument("--tokenizer", default="bytes", help="bytes, gpt2, or a JSON file")
    parser.add_argument("--cache", default="cache", metavar="DIR", help="for tokenized text")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens of a sequence")
    args = parser.parse_args(argv)
    if args.seq_length < 1:
        raise DataError(f"--seq-length {args.seq_length}: must be at least 1")
    tokenizer = make_tokenizer(args.tokenizer)
    prepared = prepare_corpora(args.data, tokenizer, cache=args.cache, workers=os.cpu_count())
    corpus = open_corpora(prepared, args.seq_length, seed=0)
    for part in prepared:
        index, _ = token_cache.read(part.folder)
        print(
            f"{part.folder}: {index.tokens:,} tokens of {index.tokenizer} in"
            f" {index.documents:,} documents, {index.bytes:,} bytes; empty documents are left out"
        )
    print(f"{corpus.num_sequences:,} sequences of {args.seq_length} tokens to train on")
    print("the first three samples with seed 0:")
    for row in corpus.batch(range(3)).tokens:
        print("   ", repr(tokenizer.decode(row.tolist())))


if __name__ == "__main__":
    terminal.command(main)
