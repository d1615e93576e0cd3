"""Text files to documents: which files there are, and which documents they hold.

    a.txt                one document
    b.jsonl              one document a line, in the field "text"
    a.txt.gz, b.jsonl.gz the same, compressed
    folder/              all text files below it; names that begin with a dot are skipped

Large files are cut into pieces (file, start, stop), so that several processes can read one file.
A piece ends at a line end.

Text that cannot be used is an error: one line with the file, the cause and what to do. Only inside
a folder are empty and binary files skipped, and a message counts them.

    python -m corpus.documents PATH ...        how many documents and characters these files hold
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
from pathlib import Path

from base import json_files, terminal

# A piece of a file: its path and two offsets in bytes. No second offset: up to the file's end.
Piece = tuple[Path, int, int | None]


class DataError(ValueError):
    """The data cannot be used; the message says which file, and where in it."""


# --------------------------------------------------------------------------------------------------
# Names and messages


def printable(path) -> str:
    """A path for a one-line message: quoted, with escapes, if some characters do not print."""
    text = str(path)
    return text if text and text.isprintable() else repr(text)


def check_name(name: str) -> None:
    """Raises ValueError for a name that no file can have, or that config.json cannot hold."""
    if not name:
        raise ValueError("an empty name")
    if "\0" in name:
        raise ValueError("a zero byte in the name")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the name is not UTF-8") from None


def cause(error: Exception) -> str:
    """The operating system's words for an error if it has some, else the exception's, in one
    line."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def file_errors(path):
    """Turns an error while a file is read into a DataError, one line that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as e:
        file = printable(getattr(e, "filename", None) or path)
        raise DataError(
            f"{file}: cannot be read ({cause(e)}); mend this, or leave it out"
        ) from None


# --------------------------------------------------------------------------------------------------
# Paths to files


def find_files(paths: list[str]) -> list[Path]:
    """The named files, and all text files below the named folders. No paths: Python's standard
    library. Raises DataError."""
    if not paths:
        return standard_library()
    files = []
    for name in paths:
        path = Path(name)
        with file_errors(name):
            check_name(name)
            if path.is_dir():
                files += text_files(path)
            elif not path.exists():
                raise DataError(f"{printable(path)}: no such file or folder")
            elif not path.is_file():
                raise DataError(
                    f"{printable(path)}: neither a file nor a folder; copy it into a file"
                )
            elif not path.stat().st_size:
                raise DataError(f"{printable(path)}: the file is empty")
            else:
                files.append(path)
    return files


def standard_library() -> list[Path]:
    """Python's own source files, without tests and installed packages. Raises DataError."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    sources = sorted(root.rglob("*.py"))
    files = [path for path in sources if not skip.intersection(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"{root}: has no source files of the standard library; name text files")
    return files


def text_files(folder: Path) -> list[Path]:
    """All text files below a folder, sorted. Raises DataError if there is none."""

    def refuse(error: OSError):
        raise error

    files = []
    # Not Path.rglob: it takes a folder that cannot be read for an empty one.
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    files = sorted(path for path in files if path.is_file())
    text = [path for path in files if is_text(path)]
    if not text:
        raise DataError(f"{printable(folder)}: no text in this folder ({len(files)} other files)")
    if len(text) < len(files):
        out = sorted(set(files) - set(text))
        skipped = f"{len(out)} of {len(files)} files are empty or not text, and left out"
        terminal.say(f"data: {printable(folder)}: {skipped}: {some_of(out)}", error=True)
    return text


def some_of(files: list[Path]) -> str:
    """The names of the first three."""
    names = ", ".join(printable(path.name) for path in files[:3])
    return names + (", .." if len(files) > 3 else "")


def is_utf8(path: Path) -> bool:
    """Whether a whole file is UTF-8 text. Raises DataError where it cannot be read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    open_file = gzip.open if path.suffix == ".gz" else open
    with file_errors(path), open_file(path, "rb") as f:
        try:
            while block := f.read(2**20):
                if b"\0" in block:
                    return False
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def is_text(path: Path) -> bool:
    """Whether a file is compressed, or begins with at least one byte and no zero byte."""
    with file_errors(path), open(path, "rb") as f:
        start = f.read(4096)
    return bool(start) and (path.suffix == ".gz" or b"\0" not in start)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content and of the suffixes that say how it is read. Raises DataError."""
    suffixes = path.suffixes[-2:] if path.suffix in (".gz", ".jsonl") else []
    digest = hashlib.sha256("".join(suffixes).encode())
    with file_errors(path), open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def fingerprint(text: str) -> str:
    """64 bits of a text's SHA-256, as 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# Files to pieces to documents


def split_parts(files: list[Path], part_bytes: int) -> list[list[Piece]]:
    """Group the files into parts of about `part_bytes` bytes. Raises DataError.

    A longer file is cut into pieces at line ends. If it is plain text, each piece becomes a
    document of its own. A compressed file is always one piece.
    """
    parts = [[]]
    room = part_bytes
    for path in files:
        for start, stop in cut(path, part_bytes):
            if parts[-1] and stop - start > room:
                parts.append([])
                room = part_bytes
            parts[-1].append((path, start, None if path.suffix == ".gz" else stop))
            room -= stop - start
    return parts


def cut(path: Path, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Offsets (start, stop) of a file's pieces. Each ends behind the line in which it reaches
    `piece_bytes` bytes."""
    with file_errors(path):
        size = path.stat().st_size
    start = 0
    while start < size:
        stop = size
        if path.suffix != ".gz" and size - start > piece_bytes:
            with file_errors(path), open(path, "rb") as f:
                f.seek(start + piece_bytes - 1)
                f.readline()
                stop = min(f.tell(), size)
        yield start, stop
        start = stop


@dataclass
class Record:
    """A line of a `.jsonl` file. Its other fields are ignored."""

    text: str


def read_documents(path: Path, start: int, stop: int | None) -> Iterator[str]:
    """Yield the documents of one piece of a file: one a line in `.jsonl`, else the text itself.
    Raises DataError."""
    is_compressed = path.suffix == ".gz"
    open_file = gzip.open if is_compressed else open
    with file_errors(path), open_file(path, "rb") as f:
        f.seek(start)
        raw = f.read(-1 if stop is None else stop - start)
    name = Path(path.stem) if is_compressed else path
    if name.suffix != ".jsonl":
        yield decode(raw, printable(path), start)
        return
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            # The parser's own message would not name the byte and its offset.
            decode(line, "")
            text = json_files.parse(line, Record, "").text
        except (DataError, json_files.JSONError) as e:
            raise line_error(path, start, number, e) from None
        yield text


def decode(raw: bytes, where: str, offset: int = 0) -> str:
    """Bytes as UTF-8 text. where: begins the message of an error; offset: of `raw` in its file.
    Raises DataError, also for a zero byte."""
    try:
        position = raw.find(b"\0")
        if position >= 0:
            raise UnicodeDecodeError("utf-8", raw, position, position + 1, "a zero byte")
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        place = f"byte 0x{raw[e.start]:02x} at offset {offset + e.start}"
        raise DataError(f"{where}: not UTF-8 text ({place})") from None


def line_error(path: Path, start: int, number: int, error: Exception) -> DataError:
    """The error of line `number`, counted from offset `start` of a `.jsonl` file."""
    # People count lines from the start of the file. A compressed file always starts at 0.
    if start:
        with file_errors(path), open(path, "rb") as f:
            number += f.read(start).count(b"\n")
    hint = '; {"text": "..."} would fit' if isinstance(error, json_files.JSONError) else ""
    return DataError(f"{printable(path)}, line {number}{error}{hint}")


def main():
    count = 0
    characters = 0
    try:
        for path in find_files(sys.argv[1:]):
            for text in read_documents(path, 0, None):
                count += 1
                characters += len(text)
    except DataError as e:
        print(f"documents.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(f"{count:,} documents, {characters:,} characters")


if __name__ == "__main__":
    terminal.run(main)
