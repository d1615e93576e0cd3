"""The process groups of a rank: one mesh (pp, dp, cp, tp), made once.

Tensor-parallel ranks are neighbours, because they communicate most: on a node of 8 GPUs, `--tp 8`
stays inside the node.

    ranks 0 .. 15 under --pp 2 --cp 2 --tp 2, each pair being tp 0 and tp 1:

                dp 0              dp 1            other samples
            cp 0    cp 1      cp 0    cp 1        other tokens of these samples
    pp 0    0 1     2 3       4 5     6 7
    pp 1    8 9    10 11     12 13   14 15        other layers

The dp and cp ranks of one pipeline stage hold the same weights: they are the `replicas`, over which
gradients are summed. Experts are spread over --ep neighbouring replicas: replicas = (edp, ep).
Hybrid sharding splits the replicas into R groups of neighbours: replicas = (replicate, shard), with
shard = (edp, ep). ZeRO shards inside a group, for example a node, and each group holds all shards.

    torchrun --nproc-per-node 8 train.py --pp 2 --tp 2

No process group is a global variable: each technique gets its group as an argument. The code for
NCCL has not yet run on a GPU; tests/nccl_rules.py has NCCL's rules.
"""

from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass
class Groups:
    """The process groups of this rank; None for a group of one rank."""

    # The ranks that have other samples.
    dp: dist.ProcessGroup | None = None
    # The ranks that have other tokens of the same samples.
    cp: dist.ProcessGroup | None = None
    # The dp times cp ranks that hold the same weights, and sum their gradients.
    replicas: dist.ProcessGroup | None = None
    # The replicas that together hold one copy of each expert.
    ep: dist.ProcessGroup | None = None
    # The replicas that hold the same experts, of one shard group; may be this rank alone.
    edp: dist.ProcessGroup | None = None
    # The replicas that shard together: all, or under hybrid sharding one of several groups.
    shard: dist.ProcessGroup | None = None
    # Hybrid sharding: the replicas that hold the same shards, one of each group.
    replicate: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    # The pipeline's communicators on GPUs, {(sender, receiver, kind): group}, of `nccl_groups`.
    nccl: dict | None = None
    # All ranks.
    all: dist.ProcessGroup | None = None
    # All ranks, on the CPU: for checkpoints that are written during training.
    files: dist.ProcessGroup | None = None

    def __post_init__(self):
        if self.cp is None:
            self.replicas = self.dp
        self.shard = self.shard or self.replicas

    @classmethod
    def make(
        cls,
        device_type: str,
        world: int,
        tp: int = 1,
        pp: int = 1,
        timeout: timedelta | None = None,
        ep: int = 1,
        cp: int = 1,
        replicate: int = 1,
        v_shaped: bool = False,
    ) -> "Groups":
        """One mesh (pp, dp, cp, tp) of `world` ranks. timeout: of collectives. replicate: how many
        groups of replicas hold all shards. v_shaped: as in schedules.Placement. A collective."""
        replicas = world // pp // tp
        names = ("pp", "dp", "cp", "tp")
        mesh = make_mesh(device_type, (pp, replicas // cp, cp, tp), names, timeout)
        groups = cls()
        for name, size in zip(mesh.mesh_dim_names, mesh.shape):
            if size > 1:
                setattr(groups, name, mesh.get_group(name))
        groups.replicas = groups.dp
        if cp > 1:
            groups.replicas = mesh["dp", "cp"]._flatten("replicas").get_group()
        groups.shard = groups.replicas
        if ep > 1 or replicate > 1:
            # These are the same ranks, with dp times cp = (replicate, edp, ep).
            shape = (pp, replicate, replicas // replicate // ep, ep, tp)
            names = ("pp", "replicate", "edp", "ep", "tp")
            mesh_of_shards = make_mesh(device_type, shape, names, timeout)
            if ep > 1:
                groups.ep = mesh_of_shards.get_group("ep")
                groups.edp = mesh_of_shards.get_group("edp")
            if replicate > 1:
                groups.shard = mesh_of_shards["edp", "ep"]._flatten("shard").get_group()
                groups.replicate = mesh_of_shards.get_group("replicate")
        groups.all = dist.group.WORLD
        # The backend is NCCL itself, or NCCL's rules on CPUs (tests/nccl_rules.py).
        is_nccl = dist.get_backend().startswith("nccl")
        # CPU tensors need gloo, because NCCL cannot carry them.
        groups.files = dist.new_group(backend="gloo" if is_nccl else None, timeout=timeout)
        of_data = (groups.dp, groups.cp, groups.replicas, groups.ep, groups.edp)
        for group in (*of_data, groups.shard, groups.replicate, groups.tp, groups.pp):
            if group and timeout:
                set_timeout(group, timeout)
        if pp > 1 and is_nccl:
            pipelines = mesh.mesh.flatten(1).t().tolist()  # [dp tp, pp]
            device = torch.device(device_type)
            groups.nccl = nccl_groups(pipelines, dist.get_rank(), device, timeout, v_shaped)
        return groups


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    try:
        group.set_timeout(timeout)
    except RuntimeError as e:
        # torch 2.11's gloo under TORCH_DISTRIBUTED_DEBUG=DETAIL keeps its default.
        if "does not support" not in str(e):
            raise


# PyTorch has these names from version 2.13 on.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The next computation waits for messages of these groups; it does not wait for sums of gradients.
URGENT = ("pp", "cp", "tp", "ep")


def make_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], timeout: timedelta | None
) -> DeviceMesh:
    """torch's mesh, whose `URGENT` groups have streams of high priority. A collective."""
    options = {}
    for name in names:
        # Each group has its own options, because torch writes into them.
        urgent = high_priority(timeout)
        if urgent and name in URGENT:
            options[name] = urgent
    return init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=options)


def high_priority(timeout: timedelta | None) -> "dist.ProcessGroupNCCL.Options | None":
    """Options that give a communicator a stream of high priority; None without NCCL.

    A matrix multiplication that was launched earlier fills the GPU. As its blocks end, those of the
    stream with the highest priority start first. So communication should overlap with the
    multiplication, without CUDA_DEVICE_MAX_CONNECTIONS=1 (Megatron-LM's option
    --high-priority-stream-groups).
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout:
        options._timeout = timeout
    return options


def nccl_groups(
    pipelines: list[list[int]],
    rank: int,
    device: torch.device,
    timeout: timedelta | None = None,
    v_shaped: bool = False,
) -> dict[tuple[int, int, str], dist.ProcessGroup]:
    """This rank's communicators: {(sender, receiver, kind): group}, with positions in the pipeline.

    There is one for each link of `pipeline_links`. pipelines: the global ranks of every pipeline.
    timeout: of their messages.

    A collective of all ranks. Disjoint pairs of all pipelines are split from the world at once: a
    `new_group` for each pair would be a collective of all ranks each time. A rank without a pair is
    split alone, because torch names a group by the number of groups of this rank, and both ends
    need one name.

    Each communicator carries a first message here, in the same order everywhere. NCCL's first send
    blocks its host until the host of the receive arrives; in a training step two hosts could wait
    for each other. An all-reduce would not help, because collectives use other connections.
    """
    own = {}
    p = len(pipelines[0])
    for links in disjoint(pipeline_links(p, v_shaped)):
        places = [sorted(link[:2]) for link in links]
        places += [[i] for i in range(p) if not any(i in pair for pair in places)]
        splits = [[ranks[i] for i in place] for ranks in pipelines for place in places]
        options = high_priority(timeout)
        group = dist.split_group(split_ranks=splits, timeout=timeout, pg_options=options)
        for ranks in pipelines:
            for link in links:
                sender, receiver = ranks[link[0]], ranks[link[1]]
                message = torch.zeros(1, device=device)
                if rank == sender:
                    dist.send(message, receiver, group=group)
                    own[link] = group
                elif rank == receiver:
                    dist.recv(message, sender, group=group)
                    own[link] = group
    return own


def disjoint(links: list[tuple[int, int, str]]) -> list[list[tuple[int, int, str]]]:
    """Split the links into lists in which each rank occurs at most once."""
    lists = []
    for link in links:
        for others in lists:
            if not any(set(link[:2]) & set(other[:2]) for other in others):
                others.append(link)
                break
        else:
            lists.append([link])
    return lists


def pipeline_links(p: int, v_shaped: bool = False) -> list[tuple[int, int, str]]:
    """(sender, receiver, kind) of all possible messages of a pipeline of p ranks: activations (F)
    to the next rank and gradients (B) to the previous one, both also between last and first rank,
    and the gradient of a tied embedding (B) between first and last. In a V both go both ways
    between neighbours, and no further."""
    if v_shaped:
        pairs = [(i, i + 1) for i in range(p - 1)] + [(i + 1, i) for i in range(p - 1)]
        return sorted((*pair, kind) for pair in pairs for kind in "FB")
    links = {(0, p - 1, "B"), (p - 1, 0, "B")}
    for i in range(p):
        links.add((i, (i + 1) % p, "F"))
        links.add((i, (i - 1) % p, "B"))
    return sorted(links)


# {a group: another communicator of its ranks}, for all models of this process.
SECOND = WeakKeyDictionary()


def second_communicator(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another communicator of these ranks, whose collectives have an order of their own. A
    collective, the first time."""
    if group not in SECOND:
        ranks = dist.get_process_group_ranks(group)
        is_part = len(ranks) < dist.get_world_size()
        SECOND[group] = dist.new_group(ranks, use_local_synchronization=is_part)
    return SECOND[group]
