"""What a step sends, computes and keeps, counted while it runs: collectives, FLOPs, bytes.

    with Kept(parameters) as kept, Counters() as counters:
        step()
    kept.peak                  bytes that autograd kept for backward, at the most
    counters.flops             of matrix multiplications
    counters.calls             collectives: [("all-reduce", 4096), ..]
    counters.counted(groups)   {("all-reduce", "tp", 4096): 12, ..}
    with LiveTensors() as live:
        step()
    live.peak           bytes of all tensors that lived at a time, at the most

They count what runs, on any device, also on the meta device, where tensors have no values.

    python train.py --as-rank 0 --of 8 --tp 2        prints these counts of one rank of eight

Not covered: memory that is no tensor (workspaces, fragments).
"""

import os
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import recompute

aten = torch.ops.aten
CPU = torch.device("cpu")

# --- collectives ----------------------------------------------------------------------------------

# {part of the name of a c10d operation: its collective}
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "send": "send",
    "recv": "receive",
}


class Collectives(TorchDispatchMode):
    """A context that records every collective of this process, an operation of the namespace c10d:
    `calls` is a list of (name, bytes of the largest tensor in it), `group_names` a list of the
    names of their process groups. A send and a receive are collectives of two ranks."""

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
        name = next((n for part, n in COLLECTIVES.items() if part in operation), operation)
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if "coalesced" in operation:
            # It is one call for several tensors: lists of outputs and inputs.
            sizes = [sum(x.nbytes for x in list_) for list_ in args[:2]]
        self.calls.append((name, max(sizes, default=0)))
        self.group_names.append(group_name(args))

    def counted(self, groups) -> Counter:
        """{(collective, group, bytes): number of calls}. A group has the name of its field in
        `groups` (base.groups.Groups of this rank); another group is "world"."""
        fields = {}
        for field, group in vars(groups).items():
            if isinstance(group, dist.ProcessGroup):
                fields.setdefault(group.group_name, field)
        counts = Counter()
        for (name, size), group in zip(self.calls, self.group_names):
            counts[name, fields.get(group, "world"), size] += 1
        return counts


def group_name(args) -> str:
    """The name of the process group among the arguments of a c10d operation."""
    for x in tree_leaves(args):
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in x._type().qualified_name():
            return dist.ProcessGroup.unbox(x).group_name
    return ""


# --- FLOPs ----------------------------------------------------------------------------------------


def forward_attention(q: Tensor, k: Tensor, *rest, **options) -> int:
    """Two products, q kᵀ and p v. q: [b, a, s, d]; k: [b, a_kv, n, d]"""
    return 2 * 2 * q.numel() * k.shape[2]


def backward_attention(grad: Tensor, q: Tensor, k: Tensor, *rest, **options) -> int:
    """Five: q kᵀ again, and the gradients of p, v, q and k."""
    return 5 * 2 * q.numel() * k.shape[2]


# Torch's formulas, and what they leave out: before 2.13, heads that share keys.
FLOPS = flop_registry | {
    aten.addmm_: flop_registry[aten.addmm],
    aten._scaled_dot_product_flash_attention_for_cpu: forward_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_attention,
}


class Counters(Collectives):
    """While entered, also adds up the FLOPs of matrix multiplications."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(function, types, args, kwargs)
        formula = FLOPS.get(function.overloadpacket)
        if formula:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


# --- bytes ----------------------------------------------------------------------------------------


class Held:
    """What autograd holds of one saved tensor: gone when the graph drops it."""

    def __init__(self, kept: "Kept", tensor: Tensor):
        self.kept = kept
        # Detached: an output itself would keep its own graph alive.
        self.tensor = tensor.detach()
        kept.add(self.tensor.untyped_storage())

    def __del__(self):
        self.kept.drop(self.tensor.untyped_storage())


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """While entered, follows the bytes that autograd keeps for backward: `bytes` now, and `peak`.
    Each storage counts once, whole; those of parameters do not. What recompute.py keeps beside
    saved tensors counts too: a rotary table, plans of routers."""

    def __init__(self, parameters):
        super().__init__(partial(Held, self), lambda held: held.tensor)
        # ZeRO-3 frees a parameter, and keeps its storage in `p.whole` (fsdp.py).
        self.left_out = {key(getattr(p, "whole", p).untyped_storage()) for p in parameters}
        # storage -> by how many tensors it is held
        self.holders = Counter()
        self.bytes = 0
        self.peak = 0

    def __enter__(self):
        self.checkpoint = recompute._Checkpoint.forward
        recompute._Checkpoint.forward = staticmethod(self.forward_of_checkpoint)
        super().__enter__()
        return self

    def __exit__(self, *error):
        recompute._Checkpoint.forward = staticmethod(self.checkpoint)
        super().__exit__(*error)

    def forward_of_checkpoint(self, ctx, function, *args) -> Tensor:
        y = self.checkpoint(ctx, function, *args)
        beside = tree_leaves((ctx.args, ctx.run_once_results))
        ctx.held = [Held(self, x) for x in beside if isinstance(x, Tensor)]
        return y

    def add(self, storage) -> None:
        self.holders[key(storage)] += 1
        if self.holders[key(storage)] == 1 and key(storage) not in self.left_out:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def drop(self, storage) -> None:
        self.holders[key(storage)] -= 1
        if not self.holders[key(storage)]:
            del self.holders[key(storage)]
            if key(storage) not in self.left_out:
                self.bytes -= storage.nbytes()


def key(storage) -> int:
    """Identifies a storage as long as it lives. (On the meta device none has an address.)"""
    return storage._cdata


def saved_bytes(function, *parameters: Tensor) -> int:
    """The bytes that autograd holds for backward after function(), a forward pass that returns an
    output with its graph. Each storage counts once, whole; those of `parameters` do not."""
    with Kept(parameters) as kept:
        # The name keeps the graph alive while it is measured.
        output = function()  # noqa: F841
    return kept.bytes


def by_dtype(tensors) -> dict[str, int]:
    """Bytes of tensors, by type; a storage that several share counts once."""
    storages = {key(tensor.untyped_storage()): tensor for tensor in tensors}
    total = Counter()
    for tensor in storages.values():
        total[str(tensor.dtype).removeprefix("torch.")] += tensor.untyped_storage().nbytes()
    return {name: size for name, size in total.items() if size}


# --- bytes that live ------------------------------------------------------------------------------


class LiveTensors(TorchDispatchMode):
    """While entered, follows the bytes of all tensors that are used: `bytes` now, and `peak`.

    Each storage counts once, with the size that it has, until its last reference is gone, in
    whatever thread. PyTorch's profiler does not see what gloo's threads free: its sum grows with
    every asynchronous collective.
    """

    def __init__(self):
        super().__init__()
        # Weak reference to a storage -> its bytes.
        self.live: dict[StorageWeakRef, int] = {}
        # Bytes of those that lived at the last look, and of all that came since.
        self.bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, Tensor) and tensor.device == CPU:
                self.add(tensor.untyped_storage())
        if self.bytes > self.peak:
            self.look()
            self.peak = max(self.peak, self.bytes)
        return result

    def look(self) -> None:
        """Leave out those that are gone; some have another size since (resize_)."""
        found = {}
        for reference in self.live:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                found[reference] = storage.nbytes()
        self.live = found
        self.bytes = sum(found.values())

    def add(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)
        self.bytes += storage.nbytes() - self.live.get(reference, 0)
        self.live[reference] = storage.nbytes()


def peak_bytes(function) -> int:
    """The peak of the bytes of tensors that `function` makes on the CPU."""
    # The profiler would report on standard error that it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    held = most = 0
    for e in sorted(changes, key=lambda e: e.start_ns()):
        held += e.nbytes()
        most = max(most, held)
    return most
