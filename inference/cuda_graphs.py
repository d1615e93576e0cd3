"""CUDA graphs: all kernels of a decoding step in one launch.

A decoding step runs hundreds of small kernels, and launching them takes the host longer than the
GPU needs to run them. A CUDA graph records the launches once and replays them together:

    without    launch k1, launch k2, launch k3, ..     each step, from Python
    with       copy the inputs, launch the graph       the kernels follow without the host

Shapes and addresses are fixed in a graph. So the number of cache columns that a step reads is
rounded up to a power of two, and there is one graph for each (stage, number of columns) of a cache.
Inputs are copied to where the graph expects them. A capture takes as long as some steps, so a
`ModelRunner` keeps its caches, with their graphs, for the next texts. inference/engine.py has a
graph for each (number of sequences, number of blocks), both rounded up.

    python -m pytest tests/test_generate.py -k captured      on a GPU: the tokens of the CPU

Source: pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs".
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import moe
from gpt import GPT
from inference.kv_cache import Cache, power_of_two

# A graph reads at least so many columns.
MIN_COLUMNS = 64


class GraphedFunction:
    """A function of tensors as a CUDA graph. pool: of another graph, whose memory this one uses
    too. They run one after the other, and each call returns a copy of the result."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], pool=None):
        self.inputs = [tensor.clone() for tensor in inputs]
        # What a first call sets up (handles, workspaces) must not be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.result = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for captured, tensor in zip(self.inputs, inputs):
            captured.copy_(tensor)
        self.graph.replay()
        return self.result.clone()


class Graphs:
    """Captured functions, by a key for what is fixed in them. They share their memory."""

    def __init__(self):
        self.captured: dict[tuple, GraphedFunction] = {}
        self.pool = None

    def run(self, key: tuple, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), which is captured where this key is new."""
        if key not in self.captured:
            self.captured[key] = GraphedFunction(function, inputs, self.pool)
            self.pool = self.captured[key].graph.pool()
        return self.captured[key](*inputs)


def can_capture(stages: list[GPT], device: torch.device) -> bool:
    """Whether a step runs on the GPU without waiting for the host: routing to experts waits, and so
    do gloo's collectives. Under ZeRO stage 3 a step gathers parameters, into memory that is new
    each time, and ranks that write other answers would capture at other steps."""
    if device.type != "cuda" or moe.ExpertLayers(*stages):
        return False
    # Empty until a layer runs.
    if any(p.untyped_storage().size() < p.nbytes for stage in stages for p in stage.parameters()):
        return False
    modules = [module for stage in stages for module in stage.modules()]
    groups = [module.group for module in modules if getattr(module, "group", None)]
    return all(dist.get_backend(group) == "nccl" for group in groups)


def decode(
    compute: Callable[[int, Cache, Tensor, None], Tensor], chunk: int, cache: Cache, inputs: Tensor
) -> Tensor:
    """compute(chunk, cache, inputs, None), a decoding step, as a graph. It is captured where this
    stage has none yet for so many columns."""
    cache.used = min(cache.columns, power_of_two(max(MIN_COLUMNS, cache.used)))

    def step(inputs: Tensor, positions: Tensor) -> Tensor:
        cache.positions = positions
        return compute(chunk, cache, inputs, None)

    cache.graphs = cache.graphs or Graphs()
    return cache.graphs.run((chunk, cache.used), step, inputs, cache.positions)
