"""Text files to documents: which files there are, and which documents they hold.

    a.txt                one document
    b.jsonl, b.ndjson    one document a line, in the field "text"; so is a .json file that begins
                         with such a line
    a.txt.gz, b.jsonl.gz the same, compressed
    folder/              all text files below it; names that begin with a dot are skipped

Large files are cut at line ends into pieces (file, start, stop), which threads and ranks share.

Text that cannot be used is an error: one line with the file, the cause and what to do. Empty and
binary files inside a folder are skipped, and a message counts them.

    python -m run.documents PATH ...        how many documents and characters these files hold
"""

import codecs
import contextlib
import gzip
import hashlib
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from base import json_files, terminal
from base.errors import InputError, cause

# A piece of a file: its path and two offsets in bytes. No second offset: up to the file's end.
Piece = tuple[Path, int, int | None]


# Bytes of the first line of a .json file that are read to see whether it is a document.
LONGEST_LINE = 2**24


class DataError(InputError):
    """The data cannot be used; the message says which file, and where in it."""


class CacheError(DataError):
    """The token cache is damaged, or its folder cannot be used."""


@contextlib.contextmanager
def named(flag: str):
    """Let errors about the data begin with the flag that named it, and say what helps."""
    try:
        yield
    except CacheError:
        # The message names --cache, or the damaged folder.
        raise
    except DataError as e:
        helps = ""
        if "not UTF-8" in str(e):
            helps = "; iconv -f latin1 -t utf-8 converts it, --skip-bad-examples leaves it out"
        raise DataError(f"{flag} {e}{helps}") from None


@contextlib.contextmanager
def file_errors(path):
    """Turn an error while a file is read into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as e:
        file = getattr(e, "filename", None) or path
        rule = f"cannot be read ({cause(e)}); mend this, or leave it out"
        raise DataError(f"{file}: {rule}") from None


def opener(path: Path):
    """The function that opens a file: `open`, or `gzip.open` for a compressed one."""
    return gzip.open if path.suffix == ".gz" else open


# --- paths to files -------------------------------------------------------------------------------


def find_files(paths: list[str]) -> list[Path]:
    """The named files, and all text files below the named folders. No paths: Python's standard
    library. Raises DataError."""
    if not paths:
        return standard_library()
    files = []
    for name in paths:
        path = Path(name)
        with file_errors(name):
            if not name or not path.exists():
                raise DataError(f"{path if name else repr(name)}: no such file or folder")
            if not path.is_dir() and not path.is_file():
                raise DataError(f"{path}: neither a file nor a folder; copy it into a file")
            if path.is_file() and not path.stat().st_size:
                raise DataError(f"{path}: the file is empty")
            files += text_files(path) if path.is_dir() else [path]
    return files


def standard_library() -> list[Path]:
    """Python's own source files, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    sources = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        sources += [Path(parent, name) for name in names if name.endswith(".py")]
    return sorted(sources)


def text_files(folder: Path) -> list[Path]:
    """All text files below a folder, sorted. Raises DataError if there is none."""

    def refuse(error: OSError):
        raise error

    files = []
    # Path.rglob would take a folder that cannot be read for an empty one.
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    files = sorted(path for path in files if path.is_file())
    text = [path for path in files if is_text(path)]
    if not text:
        raise DataError(f"{folder}: no text in this folder ({len(files)} other files)")
    if len(text) < len(files):
        out = sorted(set(files) - set(text))
        skipped = f"{len(out)} of {len(files)} files are empty or not text, and left out"
        terminal.say(f"data: {folder}: {skipped}: {some_of(out)}", error=True)
    return text


def some_of(files: list[Path]) -> str:
    """The names of the first three."""
    return ", ".join([path.name for path in files[:3]] + [".."] * (len(files) > 3))


def is_utf8(path: Path) -> bool:
    """Whether a whole file is UTF-8 text. Raises DataError where it cannot be read."""
    with file_errors(path), opener(path)(path, "rt", encoding="utf-8") as f:
        try:
            while block := f.read(2**20):
                if "\0" in block:
                    return False
        except UnicodeDecodeError:
            return False
    return True


def without_bad(files: list[Path], world) -> list[Path]:
    """The files that are UTF-8 text; rank 0 names the others. world: of run/world.py. Raises
    DataError if none is left."""
    good = world.in_shares(is_utf8, files)
    bad = [file for file, is_good in zip(files, good) if not is_good]
    if len(bad) == len(files):
        raise DataError(f"none of {len(files)} files is UTF-8 text: {some_of(bad)}")
    if bad and world.rank == 0:
        message = f"data: {len(bad)} files are not UTF-8, and left out: {some_of(bad)}"
        terminal.say(message, error=True)
    return [file for file, is_good in zip(files, good) if is_good]


def is_text(path: Path) -> bool:
    """Whether a file is compressed, or begins with at least one byte and no zero byte."""
    with file_errors(path), open(path, "rb") as f:
        start = f.read(4096)
    return bool(start) and (path.suffix == ".gz" or b"\0" not in start)


def has_lines(path: Path) -> bool:
    """Whether each line of a file is a document. Raises DataError where it cannot be read."""
    *_, suffix = ["", *Path(path.name.removesuffix(".gz")).suffixes]
    if suffix.lower() != ".json":
        return suffix.lower() in (".jsonl", ".ndjson")
    with file_errors(path), opener(path)(path, "rb") as f:
        line = f.readline(LONGEST_LINE).removeprefix(codecs.BOM_UTF8)
    try:
        return bool(json_files.parse(line, Record, "").text)
    except json_files.JSONError:
        return False


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content and of how it is read. Raises DataError."""
    how = ".jsonl" if has_lines(path) else Path(path.stem).suffix if path.suffix == ".gz" else ""
    if path.suffix == ".gz":
        how += ".gz"
    with file_errors(path), open(path, "rb") as f:
        return hashlib.file_digest(f, lambda: sha256(how.encode())).hexdigest()


def fingerprint(text: str) -> str:
    """64 bits of a text's SHA-256, as 16 hexadecimal digits."""
    return sha256(text.encode()).hexdigest()[:16]


# --- files to pieces to documents -----------------------------------------------------------------


def split_parts(files: list[Path], part_bytes: int) -> list[list[Piece]]:
    """Group the files into parts of about `part_bytes` bytes. A longer file is cut at line ends,
    and in plain text each piece becomes a document; a compressed file is always one piece. Raises
    DataError."""
    parts = [[]]
    room = part_bytes
    for path in files:
        with file_errors(path):
            pieces = list(cut(path, part_bytes))
        for start, stop in pieces:
            if parts[-1] and stop - start > room:
                parts.append([])
                room = part_bytes
            parts[-1].append((path, start, None if path.suffix == ".gz" else stop))
            room -= stop - start
    return parts


def cut(path: Path, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets (start, stop) of a file's pieces. Each ends with the line in which it
    reaches `piece_bytes` bytes."""
    size = path.stat().st_size
    start = 0
    with open(path, "rb") as f:
        while start < size:
            f.seek(start + piece_bytes - 1)
            f.readline()
            stop = size if path.suffix == ".gz" else min(f.tell(), size)
            yield start, stop
            start = stop


@dataclass
class Record:
    """A line of a `.jsonl` file. Its other fields are ignored."""

    text: str


def read_documents(path: Path, start: int, stop: int | None) -> Iterator[str]:
    """Yield the documents of one piece of a file: one a line in `.jsonl`, else the text itself.
    Raises DataError."""
    with file_errors(path), opener(path)(path, "rb") as f:
        f.seek(start)
        raw = f.read(-1 if stop is None else stop - start)
    if not has_lines(path):
        yield decode(raw, path, start)
        return
    for number, line in json_files.lines(raw):
        yield parse_line(line, path, start, number)


def decode(raw: bytes, path: Path, offset: int) -> str:
    """Bytes as UTF-8 text. offset: of `raw` in its file. Raises DataError, also for a zero byte."""
    at = raw.find(b"\0")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        at = e.start
    if at >= 0:
        place = f"byte 0x{raw[at]:02x} at offset {offset + at}"
        raise DataError(f"{path}: not UTF-8 text ({place})")
    return text


def parse_line(line: bytes, path: Path, start: int, number: int) -> str:
    """The text of line `number`, counted from offset `start` of a `.jsonl` file. Raises
    DataError."""
    try:
        return json_files.parse(line, Record, "").text
    except json_files.JSONError as e:
        # Count lines from the start of the file. A compressed file always starts at 0.
        with file_errors(path), open(path, "rb") as f:
            number += f.read(start).count(b"\n")
        raise DataError(f'{path}, line {number}{e}; {{"text": "..."}} would fit') from None


def main():
    lengths = []
    for path in find_files(sys.argv[1:]):
        lengths += map(len, read_documents(path, 0, None))
    print(f"{len(lengths):,} documents, {sum(lengths):,} characters")


if __name__ == "__main__":
    terminal.run(main)
