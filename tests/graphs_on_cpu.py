"""A CUDA graph on a CPU: what a function does is recorded once, operation by operation, and then
done again with the very same tensors.

    monkeypatch.setattr(cuda_graphs, "GraphedFunction", TapedFunction)

So a number of Python that has changed since, a tensor at another address, or memory that another
graph of the pool has used is seen in the results. What a capture does not allow raises an error: a
value for the host, and a tensor made of numbers of the host.

Not covered: what runs on other streams; memory of other graphs, which here each has its own.
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
FORBIDDEN = {aten._local_scalar_dense.default, aten.lift_fresh.default, aten.nonzero.default}


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in FORBIDDEN:
            raise RuntimeError(f"not permitted while a CUDA graph is captured: {function}")
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, result))
        return result

    def play(self) -> None:
        for function, args, kwargs, result in self.operations:
            # of a recorded tensor: what is a view of it, or has changed it, is right already
            recorded = memory_of(args) | memory_of(kwargs)
            new = function(*args, **kwargs)
            for old, x in zip(tree_leaves(result), tree_leaves(new)):
                if isinstance(old, Tensor) and not memory_of(old) & recorded:
                    old.copy_(x)


def memory_of(tensors) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(tensors) if isinstance(x, Tensor)}


class TapedFunction:
    """In the place of cuda_graphs.GraphedFunction."""

    captures = 0

    def __init__(self, function, inputs, pool=None):
        TapedFunction.captures += 1
        self.inputs = [x.clone() for x in inputs]
        for _ in range(3):
            function(*self.inputs)
        self.tape = Tape()
        with self.tape:
            self.result = function(*self.inputs)
        self.graph = SimpleNamespace(pool=object)

    def __call__(self, *inputs):
        for mine, x in zip(self.inputs, inputs, strict=True):
            assert mine.shape == x.shape
            mine.copy_(x)
        self.tape.play()
        return self.result.clone()
