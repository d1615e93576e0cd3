"""Exclude functions from compiled code: communication, and functions that read values on the host.

    @compiling.left_out
    def gather(x, group): ..

    compiling.apply(model.blocks.values())

torch.compiler.disable does the same, but loads the compiler, which takes one to two seconds also in
a run that compiles nothing. Here `apply` disables all of them when the compiler is needed.
"""

import functools
import sys
from collections.abc import Callable, Iterable

import torch
from torch import nn

_LEFT_OUT = []


def left_out(function: Callable) -> Callable:
    """Mark a function that compiled code calls without compiling it."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return call.function(*args, **kwargs)

    call.function = function
    _LEFT_OUT.append(call)
    return call


def eagerly(function: Callable) -> Callable:
    """Wrap a function in which compiled modules run uncompiled."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return call


def apply(modules: Iterable[nn.Module]) -> None:
    """Compile the forward of each module."""
    while _LEFT_OUT:
        call = _LEFT_OUT.pop()
        call.function = torch.compiler.disable(call.function)
    for module in modules:
        module.forward = torch.compile(module.forward)
