"""Build C++ and CUDA libraries once per machine, keep them, and call their functions.

    library = extensions.load("fused", {"swiglu.cu": text}, ["nvcc", "-O3"])
    extensions.call(library, "swiglu", stream, x, y, 1, 1024)

One process of a machine builds while the others wait, and a killed build leaves nothing behind.
(torch.utils.cpp_extension waits for the lock of a killed build, and needs ninja.) ctypes calls the
functions, which are extern "C" and take addresses and numbers.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor


def folder_of(name: str) -> Path:
    """The folder where PyTorch keeps compiled extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "torch_extensions") / name


def name_of(prefix: str, *build) -> str:
    """A name that changes with the inputs of a build. build: sources, flags, versions."""
    everything = repr(build)
    return f"{prefix}_{hashlib.sha256(everything.encode()).hexdigest()[:16]}"


def load(prefix: str, sources: dict[str, str], command: list[str]) -> ctypes.CDLL:
    """The library of {file name: text}, built unless this machine has it. command: the compiler and
    its flags. Raises RuntimeError if the compiler fails, OSError if there is none or the result
    cannot be loaded."""
    name = name_of(prefix, sources, command, torch.version.cuda)
    folder = folder_of(name)
    library = folder / f"{name}.so"
    once(folder, library.name, lambda: compile_sources(library, sources, command))
    return ctypes.CDLL(str(library))


def once(folder: Path, file: str, make) -> None:
    """Call make(), which makes folder/file, if that does not exist. One process of the machine does
    so at a time; the system releases the lock of a killed process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / file).exists():
            make()


def cuda_root() -> Path | None:
    """The folder of CUDA with its headers, or None. nvcc may be a script that calls another nvcc,
    so the folder above it may not be CUDA's."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    roots.append(nvcc and Path(nvcc).resolve().parent.parent)
    for root in (*filter(None, roots), "/usr/local/cuda"):
        if (Path(root) / "include" / "cuda_runtime.h").exists():
            return Path(root)
    return None


def compile_sources(library: Path, sources: dict[str, str], command: list[str]) -> None:
    """Compile the .cpp and .cu files of {file name: text} into a library, in parallel. They include
    the other files."""
    print(f"compiling CUDA kernels into {library.parent}", file=sys.stderr, flush=True)
    scratch = library.parent / "build"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for file, text in sources.items():
        (scratch / file).write_text(text)
    files = [file for file in sources if file.endswith((".cpp", ".cu"))]
    finish([start([*command, "-c", file, "-o", f"{file}.o"], scratch) for file in files])
    objects = [f"{file}.o" for file in files]
    finish([start([*command, "-shared", *objects, "-o", library.name], scratch)])
    os.replace(scratch / library.name, library)


def start(command: list[str], folder: Path) -> subprocess.Popen:
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=folder, **options)


def finish(compilers: list[subprocess.Popen]) -> None:
    outputs = [compiler.communicate()[0] for compiler in compilers]
    for compiler, output in zip(compilers, outputs):
        if compiler.returncode:
            raise RuntimeError(output)


def call(library: ctypes.CDLL, name: str, *args) -> int | None:
    """Call NAME(..): tensors as addresses, None as a null pointer, numbers as int64_t or double. A
    function whose first argument is a stream, None or a c_void_p, returns nullptr or a message,
    which becomes a RuntimeError. Any other returns an int64_t."""
    function = getattr(library, name)
    has_stream = bool(args) and not isinstance(args[0], int)
    if function.argtypes is None:
        # Declared once, arguments are converted in C, in a fraction of the time.
        function.argtypes = [c_type(a) for a in args]
        function.restype = ctypes.c_char_p if has_stream else ctypes.c_int64
    found = function(*[a.data_ptr() if isinstance(a, Tensor) else a for a in args])
    if not has_stream:
        return found
    if found:
        raise RuntimeError(f"{name}: {found.decode()}")


def c_type(argument) -> type:
    if isinstance(argument, int):
        return ctypes.c_int64
    # The address of an empty tensor is 0.
    return ctypes.c_double if isinstance(argument, float) else ctypes.c_void_p
