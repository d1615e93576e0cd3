"""CUDA graphs: all kernels of a decoding step in one launch.

A decoding step runs hundreds of small kernels, and launching them takes the host longer than the
GPU needs to run them. A CUDA graph records the launches once and replays them together:

    without    launch k1, launch k2, launch k3, ..     each step, from Python
    with       copy the inputs, launch the graph       the kernels follow without the host

Shapes and addresses are fixed in a graph. So the number of cache columns that a step reads is
rounded up to a power of two, and there is one graph for each (stage, number of columns). Inputs are
copied to where the graph expects them.

    python -m pytest tests/test_generate.py -k captured      on a GPU: the tokens of the CPU

This has not yet run on a GPU.

Source: pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs".
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import moe
from gpt import GPT
from inference.kv_cache import Cache

# a graph reads at least so many columns
MIN_COLUMNS = 64


class GraphedFunction:
    """A function of tensors as a CUDA graph. A call overwrites the result of the one before."""

    def __init__(self, function: Callable[..., Tensor], *inputs: Tensor):
        self.inputs = [tensor.clone() for tensor in inputs]
        # what a first call sets up (handles, workspaces) must not be captured
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for captured, tensor in zip(self.inputs, inputs):
            captured.copy_(tensor)
        self.graph.replay()
        return self.result


def can_capture(stages: list[GPT], device: torch.device) -> bool:
    """Whether a step runs on the GPU without waiting for the host: routing to experts waits, and so
    do gloo's collectives. Under ZeRO stage 3 a step gathers parameters, into memory that is new
    each time, and ranks that write other answers would capture at other steps."""
    if device.type != "cuda" or moe.ExpertLayers(*stages):
        return False
    # empty until a layer runs
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
    power_of_two = 1 << (max(MIN_COLUMNS, cache.used) - 1).bit_length()
    cache.used = min(cache.columns, power_of_two)
    key = chunk, cache.used
    if key not in cache.graphs:

        def step(inputs: Tensor, positions: Tensor) -> Tensor:
            cache.positions = positions
            return compute(chunk, cache, inputs, None)

        cache.graphs[key] = GraphedFunction(step, inputs, cache.positions)
    return cache.graphs[key](inputs, cache.positions)
