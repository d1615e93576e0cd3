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
    OUT.parts/           finished parts: after a kill the same command goes on with them

The bytes do not depend on the number of processes. Shingles are on the disk: a process holds one
part, the search for near-duplicates 160 bytes per document, and 300 if all have near-duplicates.
Not covered: several machines; two runs into one OUT; a document's fields beside its text.
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
from itertools import combinations, count
from pathlib import Path

import ftfy
import msgspec
import numpy as np

from base import json_files, terminal
from base.errors import cause
from run.cleaning import RULES, clean, grams, grams_of_tests, sort_out
from run.documents import DataError, file_hash, find_files, fingerprint, read_documents, split_parts

# Bytes of text in a part; longer plain text is cut into documents at line ends.
PART_BYTES = 4 * 2**20
# A prime of 31 bits, so that a h + c < 2^62, and [n, 1] a and c of permutations (a h + c) mod P.
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


def near_duplicates(shingles: list, bands, threshold: float) -> dict:
    """{document: the first one of its group}, without the first ones. shingles: of each document,
    in the order of the input. bands: of each band, the keys [documents]."""
    # A document that has near-duplicates -> its group, sorted: one list for all of a group.
    group: dict[int, list[int]] = {}
    for keys in bands:
        order = np.argsort(keys, kind="stable")
        edges = np.flatnonzero(np.r_[True, np.diff(keys[order]) != 0, True])
        for k in np.flatnonzero(np.diff(edges) > 1):
            bucket = order[edges[k] : edges[k + 1]].tolist()
            # Copies of a document are one group after the first band.
            one = all(group.get(i) is group.get(bucket[0], i) for i in bucket)
            for i, j in () if one else combinations(bucket, 2):
                x, y = group.get(i, [i]), group.get(j, [j])
                if x is not y and jaccard(shingles[i], shingles[j]) >= threshold:
                    joined = sorted(x + y)
                    group |= dict.fromkeys(joined, joined)
    return {i: same[0] for i, same in group.items() if i != same[0]}


# --- stages ---------------------------------------------------------------------------------------


def prepare(pieces: list, target: Path, b: int, r: int, rules: bool, tests: dict) -> None:
    """What is done with the documents of one part alone. `target` appears when it is complete."""
    counts, kept, removed, keys, shingles = Counter(), [], [], [], [np.zeros(0, np.uint64)]
    for path, start, stop in pieces:
        for number, raw in enumerate(read_documents(path, start, stop)):
            counts.update({"documents in": 1, "characters in": len(raw)})
            results = sort_out(f"{path}:{start}:{number}", clean(raw, counts), rules * RULES, tests)
            for id, x, rule, detail in results:
                if x is None:
                    counts[f"removed: {rule}"] += 1
                    removed.append({"id": id, "rule": rule, "detail": detail})
                else:
                    kept.append({"id": id, "text": x.text})
                    keys.append(band_keys(x.shingles, b, r))
                    shingles.append(x.shingles)
    building = target.with_suffix(f".{os.getpid()}")
    building.mkdir()
    for name, rows in (("documents", kept), ("removed", removed)):
        (building / f"{name}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    np.save(building / "keys.npy", np.array(keys, np.uint64).reshape(-1, b).T.copy())
    np.save(building / "shingles.npy", np.concatenate(shingles))
    np.save(building / "ends.npy", np.cumsum([len(x) for x in shingles])[1:])
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
            why = "one was killed, perhaps for its memory; repeat, with fewer"
            raise DataError(f"--workers {workers}: {why}") from None


def finish(parts: list[Path], threshold: float, b: int) -> Counter:
    """Write the documents that are no near-duplicates, and what was removed, beside the parts."""
    counts, shingles, number = Counter(), [], count()
    for part in parts:
        counts.update(json_files.read(part / "counts.json"))
        of_part = np.asarray(np.load(part / "shingles.npy", mmap_mode="r"))
        shingles += np.split(of_part, np.load(part / "ends.npy"))[:-1]
    keys = [np.load(part / "keys.npy", mmap_mode="r") for part in parts]
    bands = (np.concatenate([of_part[band] for of_part in keys]) for band in range(b))
    first = near_duplicates(shingles, bands, threshold)
    ids = dict.fromkeys(first.values(), "")
    documents, encode = parts[0].with_name("documents"), msgspec.json.Encoder().encode_lines
    documents.mkdir(exist_ok=True)
    with open(parts[0].with_name("removed.jsonl"), "wb") as removed:
        for part in parts:
            kept, gone = [], []
            for _, row in json_files.read_lines(part / "documents.jsonl"):
                if (i := next(number)) in ids:
                    ids[i] = row["id"]
                if (head := first.get(i)) is not None:
                    gone.append({"id": row["id"], "rule": "near-duplicate", "detail": ids[head]})
                else:
                    kept.append(row)
            removed.write((part / "removed.jsonl").read_bytes() + encode(gone))
            if kept:
                (documents / f"{part.name}.jsonl").write_bytes(encode(kept))
            counts.update({"documents out": len(kept), "removed: near-duplicate": len(gone)})
    return counts


def begin(out: Path, of: dict) -> Path:
    """Make OUT.parts, or find it. of: what decides the bytes. Raises DataError."""
    parts = out.with_name(f"{out.name}.parts")
    if out.exists():
        raise DataError(f"{out}: exists; remove it, or name another OUT")
    if not parts.exists():
        building = out.with_name(f"{out.name}.building")
        building.mkdir(parents=True, exist_ok=True)
        (building / "of.json").write_text(json.dumps(of))
        building.rename(parts)
    before = json_files.read(parts / "of.json", dict)
    if changed := [name for name in of if before.get(name) != of[name]]:
        why = f"an unfinished run that had other {', '.join(changed)}"
        raise DataError(f"{parts}: {why}; repeat that one, remove this, or name another OUT")
    return parts


def curate(args: argparse.Namespace) -> str:
    """All stages. Returns the report. Raises DataError, OSError."""
    b, r = choose_bands(args.threshold)
    source, out = (Path(os.path.abspath(name)) for name in (args.input, args.out))
    if source in (out, *out.parents):
        raise DataError(f"{args.out}: lies in {args.input}, which is read; name another OUT")
    files, tests = find_files([args.input]), find_files(args.test_sets) if args.test_sets else []
    of = {"--threshold": args.threshold, "--quality": args.quality}
    of["IN"] = fingerprint(" ".join(f"{path} {file_hash(path)}" for path in files))
    of["--test-sets"] = fingerprint(" ".join(map(file_hash, tests)))
    of["version of ftfy"] = ftfy.__version__
    folder = begin(out, of)
    parts = split_parts(files, PART_BYTES)
    targets = [folder / f"{number:05d}" for number in range(len(parts))]
    jobs = [job for job in zip(parts, targets) if not job[1].exists()]
    rules, grams_cut = args.quality == "gopher", grams_of_tests(tests)
    prepare_all(partial(prepare, b=b, r=r, rules=rules, tests=grams_cut), jobs, args.workers)
    counts = finish(targets, args.threshold, b)
    report = json.dumps({"of": of, "bands": [b, r]} | dict(sorted(counts.items())), indent=1)
    (folder / "report.json").write_text(report)
    for name in ("removed.jsonl", "report.json"):
        (folder / name).replace(out.with_name(f"{out.name}.{name}"))
    (folder / "documents").rename(out)
    shutil.rmtree(folder)
    return report


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Clean, filter and deduplicate training text.")
    parser.add_argument("input", metavar="IN", help="text, .jsonl, .gz, or a folder of them")
    parser.add_argument("out", metavar="OUT", help="a folder that does not exist")
    parser.add_argument("--test-sets", nargs="+", default=[], metavar="FILE", help="are cut out")
    parser.add_argument("--quality", choices=("gopher", "off"), default="gopher", help="rules")
    parser.add_argument("--threshold", type=float, default=0.8, help="similarity of duplicates")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args(argv)
    if args.workers < 1:
        raise DataError(f"--workers {args.workers}: must be at least 1")
    try:
        print(curate(args))
    except OSError as e:
        raise DataError(f"{args.out}: cannot be written ({cause(e)}); make room") from None


if __name__ == "__main__":
    terminal.command(main)
