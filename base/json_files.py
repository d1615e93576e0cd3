"""Read untrusted JSON with types: index.json, config.json, prompts.json, JSON lines.

A file from another source may hold anything: a word in place of a number, NaN, deep nesting, half a
character. So each call names the type that it expects, and every failure is a `JSONError` with one
line of text:

    read(path, GPTConfig)           a whole file
    parse(data, dict, where)        bytes; `where` begins the error message
    convert(value, GPTConfig, ..)   a value that was parsed without a type
    read_lines(path, dict)          JSON lines: pairs (line number, object)

    >>> parse(b'{"steps": 2.5}', dict[str, int], "run.json")
    JSONError: run.json: Expected `int`, got `float` - at `$.steps`

    python -m base.json_files FILE        whether a file is JSON; if not, the line and column

The parser is msgspec: strict types, no NaN or Infinity, UTF-8 only. With a dataclass as the type,
unknown fields are ignored. What types cannot express, such as ranges, goes into its
`__post_init__`, which raises ValueError.
"""

import codecs
import dataclasses
import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec

from base import terminal
from base.errors import InputError, cause


class JSONError(InputError):
    """JSON that cannot be used. The message is one line: the file, the place in it, the reason."""


def read(path: "str | Path", as_type=Any):
    """Read a JSON file as `as_type`, any type that msgspec supports. Raises JSONError."""
    try:
        data = read_bytes(path)
    except (OSError, ValueError) as e:
        raise JSONError(f"{path}: cannot be read ({cause(e)})") from None
    return parse(data, as_type, str(path))


def read_bytes(path: "str | Path") -> bytes:
    """The content of a file. Raises OSError, also for a pipe or a device, whose end may never come.
    A pipe that the shell has opened, as <(zcat a.gz) does, is read."""
    mode = os.stat(path).st_mode
    opened = stat.S_ISFIFO(mode) and str(path).startswith("/dev/")
    if not stat.S_ISREG(mode) and not opened:
        raise OSError(errno.EINVAL, "a folder, a pipe or a device, not a file")
    return Path(path).read_bytes()


def parse(data: bytes, as_type=Any, where: str = "JSON"):
    """Parse JSON text as `as_type`. where: the start of an error message. Raises JSONError."""
    try:
        return msgspec.json.decode(data, type=as_type)
    except msgspec.ValidationError as e:
        raise JSONError(f"{where}: {one_line(e)}") from None
    except RecursionError:
        raise JSONError(f"{where}: nested too deeply") from None
    except ValueError:
        raise JSONError(f"{where}: not JSON ({why_not_json(data)})") from None


def convert(value, as_type, where: str):
    """Convert a value that was parsed without a type to `as_type`. Raises JSONError."""
    try:
        return msgspec.convert(value, as_type)
    except (msgspec.ValidationError, ValueError, RecursionError) as e:
        raise JSONError(f"{where}: {one_line(e)}") from None


def convert_exactly(given: dict, as_type, where: str):
    """Convert a dictionary to `as_type`, a dataclass that has all its fields. Raises JSONError."""
    names = [field.name for field in dataclasses.fields(as_type)]
    for name in given:
        if name not in names:
            raise JSONError(f"{where}: {name}: no such field; there are {', '.join(names)}")
    return convert(given, as_type, where)


def read_lines(path: "str | Path", as_type=dict[str, Any]):
    """Yield (line number, object) for each line that is not empty. Lines count from 1; the path `-`
    is standard input. Raises JSONError."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else read_bytes(path)
    except (OSError, ValueError, AttributeError) as e:
        raise JSONError(f"{path}: cannot be read ({cause(e)})") from None
    for number, line in lines(data):
        yield number, parse(line, as_type, f"{path}, line {number}")


def lines(data: bytes):
    """Yield (number, line) for each line of JSON lines that is not empty, without the byte order
    mark that many editors write."""
    for number, line in enumerate(data.split(b"\n"), 1):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield number, line


def why_not_json(data: bytes) -> str:
    """Why text cannot be parsed, with line and column if they are known."""
    try:
        json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as e:
        return f"byte 0x{data[e.start]:02x} at offset {e.start} is not UTF-8"
    except json.JSONDecodeError as e:
        return f"{e.msg}, line {e.lineno}, column {e.colno}"
    except (RecursionError, ValueError):
        return "nested too deeply, or a number too long"
    return "it has NaN, Infinity or half of a surrogate pair in it"


def one_line(error: Exception) -> str:
    """The message of an exception on one line: white space becomes single spaces."""
    return " ".join(str(error).split())


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m base.json_files FILE")
    read(sys.argv[1])
    print(f"{sys.argv[1]}: JSON")


if __name__ == "__main__":
    terminal.run(main)
