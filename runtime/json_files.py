"""JSON that comes from outside, read with types: index.json, config.json, prompts.json, JSON lines.

A file that somebody sent may hold anything: a word where a number belongs, NaN, nesting that never
ends, half of a character. Each reader here names the type that it expects, and every failure is one
`JSONError` with one line of text:

    read(path, GPTConfig)        a whole file
    parse(data, dict, where)     bytes that were read already; `where` begins the message
    convert(value, kind, where)  a part of JSON that was parsed before
    read_lines(path, dict)       JSON lines: (line number, object)

    >>> parse(b'{"steps": 2.5}', dict[str, int], "run.json")
    JSONError: run.json: Expected `int`, got `float` - at `$.steps`

The parser is msgspec: strict types, no NaN or Infinity, UTF-8 only. A dataclass as type ignores
fields that it does not have; give it a `__post_init__` that raises ValueError for what its types
cannot say, such as ranges.

    python -m runtime.json_files FILE        whether a file is JSON, and if not, the line and column
"""

import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec

from runtime import terminal


class JSONError(ValueError):
    """JSON that cannot be used: the file, where in it, and why, in one line."""


def read(path: "str | Path", kind=Any):
    """The content of a JSON file as `kind`, any type that msgspec knows. Raises JSONError."""
    try:
        data = read_bytes(path)
    except (OSError, ValueError) as e:
        raise JSONError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    return parse(data, kind, str(path))


def read_bytes(path: "str | Path") -> bytes:
    """The content of a file. Raises OSError, also for a pipe or a device, which may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "a folder, a pipe or a device, not a file")
    return Path(path).read_bytes()


def parse(data: bytes, kind=Any, where: str = "JSON"):
    """JSON text as `kind`. where: what the message of an error begins with. Raises JSONError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        raise JSONError(f"{where}: {one_line(e)}") from None
    except RecursionError:
        raise JSONError(f"{where}: nested too deeply") from None
    except ValueError:
        raise JSONError(f"{where}: not JSON ({where_it_stops(data)})") from None


def convert(value, kind, where: str):
    """A value that was parsed without a type, as `kind`. Raises JSONError."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError, RecursionError) as e:
        raise JSONError(f"{where}: {one_line(e)}") from None


def read_lines(path: "str | Path", kind=dict[str, Any]):
    """Yield (line number from 1, object) for each line that is not empty; `-` is standard input.
    Raises JSONError."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except (OSError, ValueError, AttributeError) as e:
        raise JSONError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, parse(line, kind, f"{path}, line {number}")


def where_it_stops(data: bytes) -> str:
    """Why JSON text cannot be parsed, with line and column where they are known."""
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
    return " ".join(str(error).split())


def main():
    if len(sys.argv) != 2:
        terminal.refuse("usage: python -m runtime.json_files FILE")
    try:
        read(sys.argv[1])
    except JSONError as e:
        print(f"json_files.py: {e}", file=sys.stderr)
        sys.exit(2)
    print(f"{sys.argv[1]}: JSON")


if __name__ == "__main__":
    terminal.run(main)
