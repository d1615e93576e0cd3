"""The step of ranks that share processors: N CPU ranks on a laptop with C cores.

On GPUs a rank that waits wastes its device. Here another rank computes meanwhile, so what counts is
the work of all:

    step = max(work of all ranks / C, critical path of one) + collectives

    work           each rank's arithmetic, element-wise bytes, update; Python's overhead in each
                   layer, which threads do not divide
    critical path  the slowest rank and the pipeline's bubble: longer only with more processors
                   than ranks have work for
    collectives    their members get a processor one after another, so each pass costs a wait for
                   each member, and copies of its bytes

A pipeline's bubble is therefore free: on many laptops a pipeline is the fastest layout.

    python planner.py measure        the constants of this machine (planning/measure.py)

Not covered: caches that ranks take from each other, and processors of two speeds.
"""

from collections import Counter
from dataclasses import replace

from planning.collectives import Collective, collectives
from planning.inputs import Layout, Machine, Software
from routers import MoEConfig

# bytes/s
INSTANT = 1e24
# group of a collective -> part of a step
PARTS = {"tp": "tensor", "ep": "expert", "cp": "context", "pp": "pipeline"}
PARTS |= dict.fromkeys(("dp", "edp", "replicas"), "data")


def one_each(machine: Machine) -> Machine:
    """The same, where each rank has a processor of its own and collectives take no time."""
    constants = replace(machine.constants, wait=0.0)
    links = {"node_bandwidth": INSTANT, "network_bandwidth": INSTANT}
    return replace(machine, processors=0, constants=constants, **links)


def step_time(
    machine: Machine,
    software: Software,
    model: MoEConfig,
    layout: Layout,
    slowest: dict[str, float],
) -> dict[str, float]:
    """Seconds of one step, by part.

    slowest: seconds by part of the slowest rank, on the machine that `one_each` gives.
    """
    p = layout.pp
    share = machine.processors_of(layout.ranks)
    layers = layout.most_layers(model.num_layers)
    overhead = layers * layout.micro_batches * machine.overhead * passes(layout) / 3
    path = sum(slowest.values()) / max(1, share) + overhead

    # of the mean rank; the update is the fullest rank's
    mean = model.num_layers / p / layers
    seconds = {name: mean * slowest[name] / share for name in ("matmul", "elementwise")}
    seconds["overhead"] = mean * overhead / min(1, share)
    seconds["head"] = slowest["head"] / p / share
    seconds["optimizer"] = slowest["optimizer"] / share
    seconds["bubble"] = max(0.0, path - sum(seconds.values()))
    communication = Counter()
    for rank in range(p):
        for call in collectives(model, layout, software, rank):
            communication[PARTS[call.group]] += collective(machine, layout, call) / p
    return seconds | communication


def passes(layout: Layout) -> int:
    """Through a layer, in a step: forward is one and backward two. A pass more computes forward
    again, or the weight gradients apart."""
    again = layout.recompute == "full"
    apart = layout.pipeline_schedule == "zb-h1" and layout.pp > 1
    return 3 + again + apart


def collective(machine: Machine, layout: Layout, call: Collective) -> float:
    """Seconds of a step's calls of one kind. An all-reduce takes two passes. So does gloo's
    reduce-scatter, an all-reduce of which each rank keeps a part."""
    if call.kind in ("send", "receive"):
        # other ranks compute meanwhile; both ends copy
        return call.count * call.bytes / 2 / machine.node_link
    is_edp = call.group == "edp"
    size = layout.replicas // layout.ep if is_edp else getattr(layout, call.group)
    copied = call.bytes * (size - 1) / size / machine.node_link
    passes_of_each = 2 if call.kind in ("all-reduce", "reduce-scatter") else 1
    return call.count * passes_of_each * (machine.constants.wait * size + copied)
