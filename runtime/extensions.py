"""Builds C++ and CUDA libraries once per machine, keeps them, and calls their functions.

    library = extensions.load("fused", {"swiglu.cu": text}, ["nvcc", "-O3"])
    extensions.call(library, "swiglu", stream, x, y, 1024)

One process of a machine builds while the others wait, a build that was killed leaves nothing
behind, and a library is taken only whole. (torch.utils.cpp_extension.load waits forever for the
lock of a build that was killed, and needs a compiler where everything is built.) Functions are
called through ctypes: extern "C", of addresses and numbers.
"""

import ctypes
import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from torch import Tensor


def folder_of(name: str) -> Path:
    """The folder where PyTorch keeps compiled extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "torch_extensions") / name


def name_of(prefix: str, *build) -> str:
    """A name that changes with all that a build depends on. build: sources, flags, versions."""
    everything = repr(build)
    return f"{prefix}_{hashlib.sha256(everything.encode()).hexdigest()[:16]}"


def load(prefix: str, sources: dict[str, str], command: list[str]) -> ctypes.CDLL:
    """The library of {file name: text}, which a compiler's command makes where no process of this
    machine has done so.

    Raises RuntimeError with the compiler's first error, OSError if there is no compiler, or if what
    was built cannot be loaded.
    """
    folder = folder_of(name_of(prefix, sources, command))
    once(folder, "library.so", lambda: compile_sources(folder, sources, command))
    return ctypes.CDLL(str(folder / "library.so"))


def once(folder: Path, file: str, make) -> None:
    """Call make() if folder/file, which it makes, does not exist yet.

    One process of the machine does so at a time, and the others wait. The system releases the lock
    of a process that is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / file).exists():
            make()


def compile_sources(folder: Path, sources: dict[str, str], command: list[str]) -> None:
    """Compile {file name: text} into folder/library.so. Only files that end in .cpp or .cu are
    compiled; the others are there to be included."""
    print(f"compiling CUDA kernels into {folder}", file=sys.stderr, flush=True)
    scratch = folder / "build"
    scratch.mkdir(exist_ok=True)
    for file, text in sources.items():
        (scratch / file).write_text(text)
    compiled = [file for file in sources if file.endswith((".cpp", ".cu"))]
    done = subprocess.run(
        [*command, "-shared", *compiled, "-o", "library.so"],
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(first_error(done.stdout + done.stderr))
    os.replace(scratch / "library.so", folder / "library.so")


def first_error(output: str) -> str:
    """The line of a compiler's output that says why it failed."""
    lines = output.splitlines() or ["no reason given"]
    for line in lines:
        if "error" in line.lower() or "cannot find" in line:
            return line.strip()
    return lines[0].strip()


def call(library: ctypes.CDLL, name: str, *args) -> int | None:
    """Call NAME(..): tensors as addresses, None as a null pointer, numbers as int64_t or double.

    A function of a stream, which is None or a c_void_p and comes first, returns nullptr or a
    message, which becomes a RuntimeError. Any other returns an int64_t.
    """
    function = getattr(library, name)
    if not args or isinstance(args[0], int):
        function.restype = ctypes.c_int64
        return function(*map(as_c, args))
    function.restype = ctypes.c_char_p
    if message := function(*map(as_c, args)):
        raise RuntimeError(f"{name}: {message.decode()}")


def as_c(argument):
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr() if argument.numel() else None)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return argument
