"""What torch.compile leaves as it is: communication, and what asks for values.

    @compiling.left_out
    def gather(x, group): ..

    compiling.apply(model.blocks.values())

torch.compiler.disable says the same. But it loads the compiler, and a run that compiles nothing
would wait one to two seconds for it. Here `apply` does it for all of them, and `eagerly` asks
whether the compiler is loaded.
"""

import functools
import sys
from collections.abc import Callable, Iterable

import torch
from torch import nn

_LEFT_OUT = []


def left_out(function: Callable) -> Callable:
    """The function, which compiled code will call as it is."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return call.function(*args, **kwargs)

    call.function = function
    _LEFT_OUT.append(call)
    return call


def eagerly(function: Callable) -> Callable:
    """The function, in which compiled modules run as they were before they were compiled."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return call


def apply(modules: Iterable[nn.Module]) -> None:
    """Compile the forward of each."""
    while _LEFT_OUT:
        call = _LEFT_OUT.pop()
        call.function = torch.compiler.disable(call.function)
    for module in modules:
        module.forward = torch.compile(module.forward)
