"""Curation of training text, as for Megatron-Turing NLG 530B (arXiv 2201.11990, section 3).

    IN -> clean -> rules of quality -> test sets cut out -> MinHash -> near-duplicates out -> OUT
          `------- run/cleaning.py: N processes, a part each -----´    one process

Near-duplicates have sets of 5-word shingles with a Jaccard similarity s of at least `--threshold`.
Under a random permutation two sets have the same minimum with probability s. n = b r permutations
give b bands of r minima. Pairs with an equal band meet, with probability 1 - (1 - s^r)^b, and are
compared exactly. Of a connected group the first document stays.

    python -m run.curate IN OUT [--test-sets FILE ..]      then: python train.py --data OUT

    OUT/00000.jsonl ..   the documents: {"id", "text"}. An id is file:offset:number, then :piece
    OUT.removed.jsonl    what is not there, and why: {"id", "rule", "detail"}
    OUT.report.json      counts
    OUT.parts/           finished parts: a run that was killed, or refused a file, goes on with them

The bytes do not depend on the number of processes. A process holds one part, the search for
near-duplicates 170 bytes per document, and 250 if half of them are copies.
Not covered: several machines; two runs into one OUT; a document's other fields.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import ftfy
import msgspec
import numpy as np

from base import json_files, terminal
from base.errors import cause
from run.cleaning import RULES, clean, grams, grams_of_tests, sort_out
from run.documents import DataError, file_hash, find_files, fingerprint, is_utf8, split_parts
from run.documents import read_documents as read

# Bytes of text in a part; longer plain text is cut into documents at line ends.
PART_BYTES = 4 * 2**20
# A prime, and [n, 1] a and c of permutations (a h + c) mod P of 31-bit hashes; a h + c < 2^62.
P = np.uint64(2**31 - 1)
A, C = np.random.default_rng(0).integers([[1], [0]], int(P), (2, 128)).astype(np.uint64)[..., None]

# --- near-duplicates ------------------------------------------------------------------------------


def meets(s: float, b: int, r: int) -> float:
    """The probability that a pair of similarity s meets. A band is equal with probability s^r, none
    of b bands with (1 - s^r)^b."""
    return 1 - (1 - s**r) ** b


def choose_bands(threshold: float) -> tuple[int, int]:
    """(b, r), b r <= 128, with the largest r with which a pair at the threshold meets with
    probability 0.95: then the fewest pairs below it meet. Raises DataError."""
    for r in range(len(A), 0, -1):
        if 0 < threshold <= 1 and meets(threshold, len(A) // r, r) >= 0.95:
            return len(A) // r, r
    raise DataError(f"--threshold {threshold}: such pairs would not meet; give 0.03 to 1")


def band_keys(shingles: np.ndarray, b: int, r: int) -> np.ndarray:
    """[b] A hash of the r minima of each band. shingles: of one document."""
    minima = np.full(b * r, P)
    h = shingles >> np.uint64(33)
    for start in range(0, len(h), 1024):
        # [b r, 1024] (a h + c) mod P. numpy's // is faster than its %.
        x = A[: b * r] * h[start : start + 1024] + C[: b * r]
        minima = np.minimum(minima, (x - x // P * P).min(1))
    return grams(minima.reshape(b, r).T, r)[0]


def jaccard(x: np.ndarray, y: np.ndarray) -> float:
    """s = |X and Y| / |X or Y| of two sets."""
    both = len(np.intersect1d(x, y, assume_unique=True))
    return both / (len(x) + len(y) - both)


def first(i: int, earlier: np.ndarray) -> int:
    """The first document of a group. earlier: of each document one of its group, or itself."""
    while earlier[i] != i:
        i = earlier[i]
    return i


def join(bucket: list[int], shingles: list, threshold: float, earlier: np.ndarray) -> None:
    """Join the groups of all near pairs of a bucket."""
    # The documents before j, by group. If a group has many copies of j, one is compared.
    groups: list[list[int]] = []
    for j in bucket:
        apart, together = [], [j]
        for group in groups:
            x, y = sorted((first(group[0], earlier), first(j, earlier)))
            if x == y or any(jaccard(shingles[i], shingles[j]) >= threshold for i in group):
                earlier[y] = x
                group += together
                together = group
            else:
                apart.append(group)
        groups = [*apart, together]


def near_duplicates(shingles: list, bands, threshold: float) -> dict[int, int]:
    """{document: the first one of its group}, without the first ones. shingles: of each document,
    in the order of the input. bands: of each band, the keys [documents]."""
    earlier = np.arange(len(shingles))
    for keys in bands:
        order = np.argsort(keys, kind="stable")
        equal = np.zeros(len(keys), bool)
        equal[1:] = keys[order[1:]] == keys[order[:-1]]
        # Documents that share their key: their key is that of the one before or after.
        met = order[equal | np.roll(equal, -1)]
        for bucket in np.split(met, np.flatnonzero(np.diff(keys[met])) + 1):
            join(bucket.tolist(), shingles, threshold, earlier)
    return {i: first(i, earlier) for i in range(len(earlier)) if earlier[i] != i}


# --- stages ---------------------------------------------------------------------------------------


def prepare(pieces: list, target: Path, b: int, r: int, quality: str, tests: dict) -> None:
    """What is done with the documents of one part alone. `target` appears when it is complete."""
    counts, kept, removed, keys, shingles = Counter(), [], [], [], []
    rules = {"gopher": RULES, "off": []}[quality]
    for path, start, stop in pieces:
        for number, raw in enumerate(read(path, start, stop)):
            counts.update({"documents in": 1, "characters in": len(raw)})
            name = f"{terminal.one_line(path)}:{start}:{number}"
            for id, x, rule, detail in sort_out(name, clean(raw, counts), rules, tests):
                if x is None:
                    counts[f"removed: {rule}"] += 1
                    removed.append({"id": id, "rule": rule, "detail": detail})
                else:
                    kept.append({"id": id, "text": x.text})
                    keys.append(band_keys(x.shingles, b, r))
                    shingles.append(x.shingles)
    building = target.with_suffix(f".{os.getpid()}")
    building.mkdir(parents=True, exist_ok=True)
    for name, rows in (("documents", kept), ("removed", removed)):
        (building / f"{name}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    np.save(building / "keys.npy", np.array(keys, np.uint64).reshape(-1, b).T.copy())
    np.save(building / "lengths.npy", np.fromiter(map(len, shingles), np.int64))
    (building / "shingles").write_bytes(b"".join(shingles))
    (building / "counts.json").write_text(json.dumps(counts))
    building.rename(target)


def end_with_parent() -> None:
    """End this process when the one that started it is killed."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def prepare_all(work, jobs: list[tuple], workers: int) -> None:
    """work(*job) for each job, in `workers` processes. Raises DataError."""
    if min(workers, len(jobs)) <= 1:
        for job in jobs:
            work(*job)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=end_with_parent) as pool:
        try:
            for done, _ in enumerate(pool.map(work, *zip(*jobs)), 1):
                terminal.say(f"curate: {done} of {len(jobs)} parts", error=True)
        except BrokenExecutor:
            why = f"--workers {workers}: one was killed, perhaps for its memory; give fewer"
            raise DataError(why) from None


def finish(parts: list[Path], out: Path, threshold: float, b: int) -> Counter:
    """Write OUT.removed.jsonl, and the documents that stay, beside the parts. Returns counts."""
    counts, ids, folder = Counter(), [], parts[0].parent
    # All shingles in one file, since a process cannot open many. An empty one has no memory map.
    with open(folder / "shingles", "wb") as file:
        for part in parts:
            counts.update(json_files.read(part / "counts.json"))
            file.write((part / "shingles").read_bytes())
        file.write(bytes(8))
    ends = np.cumsum(np.concatenate([np.load(part / "lengths.npy") for part in parts]))
    shingles = np.asarray(np.memmap(file.name, np.uint64, "r"))
    keys = [part / "keys.npy" for part in parts]
    bands = (np.concatenate([np.load(path, "r")[i].copy() for path in keys]) for i in range(b))
    first_one = near_duplicates(np.split(shingles, ends)[:-1], bands, threshold)
    documents, encode = folder / "documents", msgspec.json.Encoder().encode_lines
    shutil.rmtree(documents, ignore_errors=True)
    documents.mkdir()
    with open(out.with_name(f"{out.name}.removed.jsonl"), "wb") as removed:
        for of_part, part in enumerate(parts):
            kept, gone = [], []
            for _, row in json_files.read_lines(part / "documents.jsonl"):
                head = first_one.get(len(ids))
                ids.append(row["id"])
                if head is not None:
                    gone.append({"id": row["id"], "rule": "near-duplicate", "detail": ids[head]})
                else:
                    kept.append(row)
            removed.write((part / "removed.jsonl").read_bytes() + encode(gone))
            if kept:
                (documents / f"{of_part:05d}.jsonl").write_bytes(encode(kept))
            counts.update({"documents out": len(kept), "removed: near-duplicate": len(gone)})
    return counts


def curate(args: argparse.Namespace) -> None:
    """All stages; print the report. Raises DataError, OSError."""
    b, r = choose_bands(args.threshold)
    source, out = (Path(os.path.abspath(name)) for name in (args.input, args.out))
    if source in (out, *out.parents):
        raise DataError(f"{args.out}: lies in {args.input}, which is read; name another OUT")
    if out.exists():
        raise DataError(f"{out}: exists; remove it, or name another OUT")
    files, tests = find_files([args.input]), find_files(args.test_sets) if args.test_sets else []
    if bad := [str(path) for path in files if not is_utf8(path)]:
        raise DataError(f"not UTF-8 text: {', '.join(bad)}; iconv -f latin1 -t utf-8 converts one")
    counts = Counter()
    work = partial(prepare, b=b, r=r, quality=args.quality, tests=grams_of_tests(tests, counts))
    of = {"ftfy": ftfy.__version__, "--threshold": args.threshold, "--quality": args.quality}
    of["--test-sets"] = [file_hash(path) for path in tests]
    hashes = {path: file_hash(path) for path in files}
    # A part is named after all that decides its bytes, so that a finished one can be used again.
    folder, jobs = out.with_name(f"{out.name}.parts"), []
    for pieces in split_parts(files, PART_BYTES):
        content = [(str(path), hashes[path], start, stop) for path, start, stop in pieces]
        jobs.append((pieces, folder / fingerprint(repr((of, content)))))
    prepare_all(work, [job for job in jobs if not job[1].exists()], args.workers)
    counts.update(finish([target for _, target in jobs], out, args.threshold, b))
    report = json.dumps({"of": of, "bands": [b, r]} | dict(sorted(counts.items())), indent=1)
    out.with_name(f"{out.name}.report.json").write_text(report)
    (folder / "documents").rename(out)
    shutil.rmtree(folder)
    terminal.say(report)
    stay, of_all = counts["documents out"], counts["documents in"]
    terminal.say(f"curate: {stay} of {of_all} documents stay", error=True)


def main(argv: list[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("input", metavar="IN", help="text, .jsonl, .gz, or a folder; UTF-8")
    parser.add_argument("out", metavar="OUT", help="a folder that does not exist")
    parser.add_argument("--test-sets", nargs="+", default=[], metavar="FILE", help="are cut out")
    parser.add_argument("--quality", choices=("gopher", "off"), default="gopher", help="of English")
    parser.add_argument("--threshold", type=float, default=0.8, help="0.03 to 1; default 0.8")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args(argv)
    if args.workers < 1:
        raise DataError(f"--workers {args.workers}: must be at least 1")
    try:
        curate(args)
    except OSError as e:
        raise DataError(f"{args.out}: cannot be written ({cause(e)}); make room") from None


if __name__ == "__main__":
    terminal.command(main)
