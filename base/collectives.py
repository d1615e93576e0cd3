"""Count the collectives that a process calls, with their groups and bytes.

    with Collectives() as noted:
        step()
    noted.calls             [("all-reduce", 4096), ..]
    noted.counted(groups)   {("all-reduce", "tp", 4096): 12, ..}

Every collective of torch.distributed is an operation of the namespace c10d, which a dispatch mode
sees on any backend. A send and a receive count as collectives of two ranks.

    python -m course.tensor_parallel        a lesson that counts all-reduces
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# {part of the name of a c10d operation: its collective}
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "send": "send",
    "recv": "receive",
}


class Collectives(TorchDispatchMode):
    """A context that records every collective of this process: `calls` is a list of (name, bytes of
    the largest tensor in it), `group_names` a list of the names of their process groups."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.group_names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.note(function, args)
        return function(*args, **(kwargs or {}))

    def note(self, function, args) -> None:
        operation = str(function.overloadpacket).split(".")[-1]
        kinds = [kind for part, kind in KINDS.items() if part in operation]
        name = kinds[0] if kinds else operation
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if "coalesced" in operation:
            # It is one call for several tensors: lists of outputs and inputs.
            sizes = [sum(x.nbytes for x in list_) for list_ in args[:2]]
        self.calls.append((name, max(sizes, default=0)))
        self.group_names.append(group_name(args))

    def counted(self, groups) -> Counter:
        """{(collective, group, bytes): number of calls}. A group has the name of its field in
        `groups` (base.groups.Groups of this rank); another group is "world"."""
        names = {}
        for name, group in vars(groups).items():
            if isinstance(group, dist.ProcessGroup):
                names.setdefault(group.group_name, name)
        counts = Counter()
        for (kind, size), group in zip(self.calls, self.group_names):
            counts[kind, names.get(group, "world"), size] += 1
        return counts


def group_name(args) -> str:
    """The name of the process group among the arguments of a c10d operation."""
    for x in tree_leaves(args):
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in x._type().qualified_name():
            return dist.ProcessGroup.unbox(x).group_name
    return ""
