"""Builds C++ and CUDA extensions once per machine, and keeps them.

    name = extensions.name_of("fused", sources, flags)
    module = extensions.load(name, lambda folder: compile_sources(name, folder, sources, ..))

torch.utils.cpp_extension compiles. This file adds that one process of a machine builds while the
others wait, that a build which was killed leaves nothing behind, and that a compiled extension is
taken only whole.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

# A launcher: a function of integers and floating-point numbers. What follows a line that ends in >
# is a template.
LAUNCHER = re.compile(r"(?<!>\n)^((?:void|int64_t) (\w+)\([^)]*\)) \{", re.M)
# The wrapper of one launcher, which unpacks Python's arguments. pybind11 could write it, but takes
# eight times as long to compile.
CALL = """
static PyObject* call_{name}(PyObject*, PyObject* arguments) {{
    {variables}
    if (!PyArg_ParseTuple(arguments, "{kinds}"{addresses})) return nullptr;
    try {{
        {result};
    }} catch (const std::exception& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }}
}}
"""
MODULE = """
static PyMethodDef methods[] = {{
{methods}
    {{nullptr, nullptr, 0, nullptr}},
}};
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", nullptr, -1, methods}};
PyMODINIT_FUNC PyInit_{name}() {{ return PyModule_Create(&module); }}
"""


def folder_of(name: str) -> Path:
    """The folder where PyTorch keeps compiled extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "torch_extensions") / name


def name_of(prefix: str, *build) -> str:
    """A name that changes with all that a build depends on. build: sources, flags, versions."""
    everything = repr((*build, CALL, MODULE, sys.version))
    return f"{prefix}_{hashlib.sha256(everything.encode()).hexdigest()[:16]}"


def load(name: str, compile_into):
    """The extension `name`. Where no process of this machine has built it, compile_into(folder)
    makes folder/NAME.so first.

    Raises RuntimeError if a compiler fails, OSError if there is no compiler, ImportError if what
    was built cannot be loaded.
    """
    folder = folder_of(name)
    once(folder, f"{name}.so", lambda: compile_into(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def cuda_root() -> Path | None:
    """The folder of CUDA, with its headers; None where there is none. nvcc may be a script that
    calls another nvcc, so the folder above it need not be CUDA's."""
    nvcc = shutil.which("nvcc")
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    roots.append(nvcc and Path(nvcc).resolve().parent.parent)
    for root in (*filter(None, roots), "/usr/local/cuda"):
        if (Path(root) / "include" / "cuda_runtime.h").exists():
            return Path(root)
    return None


def compile_sources(name: str, folder: Path, sources: dict[str, str], **options) -> None:
    """Compile {file name: text} into folder/NAME.so, a module of all launchers in them.

    A launcher is a function void or int64_t NAME(..) at the start of a line, with arguments of the
    types int64_t and double. Only files that end in .cpp or .cu are compiled; the others are there
    to be included.
    """
    from torch.utils import cpp_extension

    scratch = folder / "build"
    search_path = os.environ.get("PATH", os.defpath)
    # A build that was killed left a lock, which cpp_extension would wait for.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for file, text in (sources | {"bindings.cpp": bindings(name, sources)}).items():
        (scratch / file).write_text(text)
    compiled = [str(path) for path in scratch.iterdir() if path.suffix in (".cpp", ".cu")]
    if root := cuda_root():
        cpp_extension.CUDA_HOME = str(root)
    # pip installs ninja beside the Python executable.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{search_path}"
    try:
        cpp_extension.load(name, sorted(compiled), build_directory=str(scratch), **options)
    finally:
        os.environ["PATH"] = search_path
    os.replace(scratch / f"{name}.so", folder / f"{name}.so")


def launchers(sources: dict[str, str]) -> dict[str, str]:
    """{name: declaration} of all launchers in {file name: text}."""
    compiled = [text for file, text in sources.items() if file.endswith((".cpp", ".cu"))]
    return {name: declaration for text in compiled for declaration, name in LAUNCHER.findall(text)}


def bindings(name: str, sources: dict[str, str]) -> str:
    """The C++ source of a Python module `name` with all launchers."""
    found = launchers(sources)
    text = "#include <Python.h>\n#include <cstdint>\n#include <exception>\n"
    for function, declaration in found.items():
        types = re.findall(r"(int64_t|double)\s+\w+\s*[,)]", declaration)
        variables = []
        for i, kind in enumerate(types):
            variables.append(f"{'double' if kind == 'double' else 'long long'} a{i};")
        call = f"{function}({', '.join(f'a{i}' for i in range(len(types)))})"
        returns_number = declaration.startswith("int64_t")
        text += f"{declaration};" + CALL.format(
            name=function,
            variables=" ".join(variables),
            kinds="".join("d" if kind == "double" else "L" for kind in types),
            addresses="".join(f", &a{i}" for i in range(len(types))),
            result=f"return PyLong_FromLongLong({call})"
            if returns_number
            else f"{call}; Py_RETURN_NONE",
        )
    methods = [f'    {{"{f}", call_{f}, METH_VARARGS, nullptr}},' for f in found]
    return text + MODULE.format(name=name, methods="\n".join(methods))


def first_error(output: str) -> str:
    """The line of a build's output that says why it failed."""
    lines = output.splitlines() or ["no reason given"]
    for line in lines:
        says_why = "error" in line.lower() or "cannot find" in line
        if says_why and "Error building" not in line:
            return line.strip()
    return lines[0].strip()
