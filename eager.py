"""Functions that torch.compile leaves alone: collectives, and what runs functions a second time.

`torch.compiler.disable` does that, but importing the compiler takes seconds, in every process, also
where nothing is compiled. So `leave_eager` only notes a function, and `compile_blocks`, which
`train.py --compile` calls, disables the compiler for all of them first.

    @leave_eager
    def copy_to_ranks(x, group): ...

It works on functions and methods of a module's top level: their names are bound again.
"""

import contextlib
import sys

import torch

# (module, qualified name)
NOTED: list[tuple[str, str]] = []


def leave_eager(function):
    """Note a function; returns it as it is."""
    NOTED.append((function.__module__, function.__qualname__))
    return function


def disable_compiler() -> None:
    """Let torch.compile leave alone every noted function, from now on."""
    for module, name in NOTED:
        *outer, last = name.split(".")
        owner = sys.modules[module]
        for part in outer:
            owner = getattr(owner, part)
        function = vars(owner)[last]
        if not hasattr(function, "_torchdynamo_disable"):
            setattr(owner, last, torch.compiler.disable(function))


def compile_blocks(model) -> None:
    """torch.compile each block of a GPT. It is traced when it runs first, so it sees what is
    applied later too, selective recomputation for example."""
    disable_compiler()
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward)


def run_eagerly():
    """A context in which compiled blocks run as they were written: generation has new lengths all
    the time, and would compile for each."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")
