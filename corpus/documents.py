"""Text files to documents: which files there are, and what text is in them.

A path names a file, or a folder of text files. A `.jsonl` file holds one document a line, in the
field "text"; any other file is one document. Either may be gzipped. What cannot be used is never
left out in silence: it is one line with the file, the cause and what to do.

    python -m corpus.documents PATH ...        how many documents and characters these files hold
"""

import contextlib
import gzip
import os
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

from runtime import json_files, terminal


class DataError(ValueError):
    """The data cannot be used; the message says which file, and where in it."""


def shown(path) -> str:
    """A path for a message of one line: quoted, with escapes, if characters in it do not print."""
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
def reading(path):
    """What the system refuses inside becomes one line about the file. Raises DataError."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zlib.error) as e:
        file = shown(getattr(e, "filename", None) or path)
        message = f"{file}: cannot be read ({cause(e)}); mend this, or leave it out"
        raise DataError(message) from None


def standard_library() -> list[Path]:
    """Python's own source files, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = sorted(root.rglob("*.py"))
    files = [path for path in found if not skip.intersection(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"{root}: has no source files of the standard library; name text files")
    return files


def find_files(paths: list[str]) -> list[Path]:
    """The files that `paths` name, and all text files in the folders that they name; without paths,
    Python's library. Raises DataError."""
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
                raise DataError(f"{shown(path)}: neither a file nor a folder; copy it into a file")
            elif not path.stat().st_size:
                raise DataError(f"{shown(path)}: the file is empty")
            else:
                files.append(path)
    return files


def text_files(folder: Path) -> list[Path]:
    """All text files below a folder whose names do not begin with a dot. A folder that cannot be
    read is an error; Path.rglob would take it for empty."""

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
        count = f"{len(found) - len(text)} of {len(found)} files"
        message = f"data: {shown(folder)}: {count} are empty or not text, and left out"
        terminal.say(message, error=True)
    return text


def is_text(path: Path) -> bool:
    with reading(path), open(path, "rb") as f:
        start = f.read(4096)
    return bool(start) and (path.suffix == ".gz" or b"\0" not in start)


def text_of(raw: bytes, where: str, offset: int = 0) -> str:
    """where: what the message of an error begins with; offset: of `raw` in its file. Raises
    DataError, for a zero byte too."""
    try:
        if (position := raw.find(b"\0")) >= 0:
            raise UnicodeDecodeError("utf-8", raw, position, position + 1, "a zero byte")
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        place = f"byte 0x{raw[e.start]:02x} at offset {offset + e.start}"
        raise DataError(f"{where}: not UTF-8 text ({place})") from None


@dataclass
class Record:
    """A line of a `.jsonl` file; its other fields are not read."""

    text: str


def documents(path: Path, start: int, stop: int | None):
    """The documents of one file between two offsets: one a line in `.jsonl`, otherwise the text
    itself. Raises DataError."""
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
                # lines are counted from the start of the file; a zipped one is read whole
                if not zipped:
                    with reading(path), open(path, "rb") as f:
                        number += f.read(start).count(b"\n")
                fit = '; {"text": "..."} would fit' if isinstance(e, json_files.JSONError) else ""
                raise DataError(f"{shown(path)}, line {number}{e}{fit}") from None
            yield text


def main():
    texts = characters = 0
    try:
        for path in find_files(sys.argv[1:]):
            for text in documents(path, 0, None):
                texts = texts + 1
                characters = characters + len(text)
    except DataError as e:
        print(f"documents.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(f"{texts:,} documents, {characters:,} characters")


if __name__ == "__main__":
    terminal.run(main)
