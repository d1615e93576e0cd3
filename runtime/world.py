"""Who this process is among the ranks, its device, and the process groups that everything else is
handed.

One mesh (pp, dp, tp), made once. Tensor-parallel ranks are neighbours, because they talk most: on a
node of 8 GPUs, `--tp 8` stays inside.

    ranks 0 .. 7 under --pp 2 --tp 2        pp 0: dp 0: tp 0, 1   dp 1: tp 2, 3        pp 1: dp 0: tp 4, 5   dp 1: tp 6, 7

Experts are spread over --ep of the dp ranks, neighbours again: dp = (edp, ep).
"""

import ctypes
import gc
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from runtime import terminal
from runtime.watchdog import Watchdog


class WorldError(RuntimeError):
    """The ranks did not meet; the message says which rank waited, for how long, and for whom."""


def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks when they are freed. By default each logits or gradient
    tensor is new memory from the kernel, zeroed page by page: a fifth of the time of a GPT-2 124M
    step on a CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    # another C library
    except (OSError, AttributeError):
        return
    m_trim_threshold = -1
    m_mmap_max = -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)


def nccl_groups(
    pipelines: list[list[int]], rank: int, device: torch.device
) -> dict[tuple, dist.ProcessGroup]:
    """One communicator for each neighbour, direction and kind: activations to the next rank,
    gradients to the one before, both round the end, and a tied embedding's gradient between first
    and last. pipelines: the global ranks of every pipeline of the world; all ranks call this
    together. Each is used once here, in the same order everywhere: NCCL sets a communicator up in
    its first operation, which waits for the peer. Returns this rank's own."""
    mine = {}
    for ranks in pipelines:
        p = len(ranks)
        pairs = (
            {(i, (i + 1) % p, "F") for i in range(p)}
            | {(i, (i - 1) % p, "B") for i in range(p)}
            | {(0, p - 1, "B"), (p - 1, 0, "B")}
        )
        for sender, receiver, kind in sorted(pairs):
            group = dist.new_group([ranks[sender], ranks[receiver]])
            if rank in (ranks[sender], ranks[receiver]):
                dist.all_reduce(torch.zeros(1, device=device), group=group)
                mine[sender, receiver, kind] = group
    return mine


@dataclass
class Groups:
    """The process groups of this rank, None where there is one rank in a group; nccl: the
    pipeline's communicators on GPUs."""

    dp: dist.ProcessGroup | None = None
    # of the dp ranks, those that have every expert once between them
    ep: dist.ProcessGroup | None = None
    # .. those that hold replicas of the same experts; a rank alone, maybe
    edp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    nccl: dict | None = None
    # all ranks, on the CPU: for checkpoints that are written meanwhile
    files: dist.ProcessGroup | None = None

    @classmethod
    def make(
        cls,
        device_type: str,
        world: int,
        tp: int = 1,
        pp: int = 1,
        timeout: timedelta | None = None,
        ep: int = 1,
    ) -> "Groups":
        """One mesh (pp, dp, tp). Neighbours are tensor parallel: they talk most; the next ones
        expert parallel. timeout: of collectives. All ranks call this together."""
        dp = world // pp // tp
        mesh = init_device_mesh(device_type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        groups = cls(
            **{
                name: mesh.get_group(name)
                for name, n in zip(mesh.mesh_dim_names, mesh.shape)
                if n > 1
            }
        )
        # the same ranks, with dp = (edp, ep)
        if ep > 1:
            experts = init_device_mesh(
                device_type, (pp, dp // ep, ep, tp), mesh_dim_names=("pp", "edp", "ep", "tp")
            )
            groups.ep = experts.get_group("ep")
            groups.edp = experts.get_group("edp")
        groups.files = dist.new_group(backend="gloo", timeout=timeout)
        for group in (groups.dp, groups.ep, groups.edp, groups.tp, groups.pp):
            if group and timeout:
                group.set_timeout(timeout)
        if pp > 1 and dist.get_backend() == "nccl":
            groups.nccl = nccl_groups(
                mesh.mesh.flatten(1).t().tolist(),
                dist.get_rank(),
                torch.device("cuda", torch.cuda.current_device()),
            )
        return groups


@dataclass
class World:
    """Who this process is among the ranks, and the groups that it talks to."""

    rank: int
    size: int
    # on this machine
    local_rank: int
    local_size: int
    # how often torchrun has started these ranks again
    restarts: int
    device: torch.device | None = None
    groups: Groups | None = None
    watchdog: Watchdog | None = None

    @classmethod
    def from_launcher(cls) -> "World":
        """What torchrun says; without it, one rank. Raises WorldError."""
        defaults = {
            "RANK": 0,
            "WORLD_SIZE": 1,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        said = {name: os.environ.get(name, str(default)) for name, default in defaults.items()}
        for name, text in said.items():
            least = int(name.endswith("SIZE"))
            if not text.isdecimal() or int(text) < least:
                raise WorldError(
                    f"{name}={text}: must be a whole number, at least {least}; torchrun sets it"
                )
        world = cls(*map(int, said.values()))
        if world.rank >= world.size or (world.size > 1 and "RANK" not in os.environ):
            raise WorldError(
                f"RANK={os.environ.get('RANK', 'not set')} of WORLD_SIZE={world.size}: ranks are"
                f" numbered from 0 to {world.size - 1}; torchrun does it"
            )
        return world

    def connect(self, device: str, tp: int, pp: int, timeout: float, ep: int = 1) -> None:
        """Choose the device, and with several ranks make the process groups: one mesh, from which
        everything else is handed groups. timeout: seconds without progress after which the watchdog
        ends the run; collectives wait a minute longer."""
        if device != "cpu" and torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            keep_freed_memory()
            if self.size > 1:
                torch.set_num_threads(self.cores)
        if self.size > 1:
            # NCCL wants a device for each rank
            shared = self.device.type == "cpu" or self.local_size > torch.cuda.device_count()
            # torchrun may keep it over restarts, with dead ranks' addresses
            store = dist.PrefixStore(f"start {self.restarts}", self.meet(timeout))
            # with a connection of its own
            self.watchdog = Watchdog(
                dist.PrefixStore("watchdog", store.clone()), self.rank, self.size, timeout
            )
            self.beat("the start, where the ranks meet")
            dist.init_process_group(
                "gloo" if shared else "nccl",
                store=dist.PrefixStore("ranks", store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout + 60),
                device_id=None if shared else self.device,
            )
            self.groups = Groups.make(
                self.device.type, self.size, tp, pp, timedelta(seconds=timeout + 60), ep
            )
            self.beat(None)
        else:
            self.groups = Groups()

    def meet(self, timeout: float) -> dist.Store:
        """The store through which the ranks find each other. timeout: seconds to wait for the
        others, on every rank. Raises WorldError."""
        try:
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
            store.set_timeout(timedelta(seconds=timeout))
            return store
        except ValueError as e:
            raise WorldError(
                f"rank {self.rank}: the {self.size} ranks cannot meet: {terminal.one_line(e)}"
            ) from None
        except (dist.DistError, OSError) as e:
            why = str(e).split(chr(10))[0]
            raise WorldError(
                f"rank {self.rank}: the {self.size} ranks did not meet within {timeout:.0f} s"
                f" ({why}); start all of them, with the same MASTER_ADDR and MASTER_PORT, or give"
                " them more time with --timeout"
            ) from None

    @property
    def cores(self) -> int:
        """Processors for this rank."""
        return max(1, len(os.sched_getaffinity(0)) // self.local_size)

    def disconnect(self) -> None:
        """Everything that holds a group has to be gone by now: gloo aborts the process at exit
        otherwise, now and then."""
        if self.watchdog:
            self.watchdog.stop()
        self.groups = self.watchdog = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()

    def gather(self, x) -> list:
        """Every rank's object, on every rank."""
        gathered = [x] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, x)
        return gathered

    def on_rank_0(self, work, errors: tuple):
        """What work() gives on rank 0, on every rank; an exception of `errors` is raised on every
        rank. A collective."""
        result = error = None
        try:
            result = work() if self.rank == 0 else None
        except errors as e:
            error = e
        result, error = self.gather((result, error))[0]
        if error:
            raise error
        return result

    def gather_numbers(self, *numbers: torch.Tensor | float) -> list[tuple]:
        """For each number, its values on all ranks: one small collective a step."""
        row = torch.stack(
            [torch.as_tensor(n, dtype=torch.float64, device=self.device) for n in numbers]
        )
        rows = [torch.empty_like(row) for _ in range(self.size)] if self.size > 1 else [row]
        if self.size > 1:
            dist.all_gather(rows, row)
        return list(zip(*(r.tolist() for r in rows)))

    def beat(self, where: str | None) -> None:
        """Progress, for the watchdog; None: nothing to watch until the next."""
        if self.watchdog:
            self.watchdog.beat(where) if where else self.watchdog.pause()

    def say_aside(self, *words) -> None:
        """For people, where standard output is for programs."""
        if self.rank == 0:
            terminal.say(*words, error=True)

    def say(self, *words) -> None:
        if self.rank == 0:
            terminal.say(*words)
