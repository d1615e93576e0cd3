"""Which rank this process is, its device, and the process groups that everything else is handed.

There is one mesh (pp, dp, cp, tp), made once. Tensor-parallel ranks are neighbours, because they
talk most: on a node of 8 GPUs, `--tp 8` stays inside the node.

    ranks 0 .. 15 under --pp 2 --cp 2 --tp 2, each pair being tp 0 and tp 1:

                dp 0              dp 1            other samples
            cp 0    cp 1      cp 0    cp 1        other tokens of these samples
    pp 0    0 1     2 3       4 5     6 7
    pp 1    8 9    10 11     12 13   14 15        other layers

dp and cp ranks of one stage hold the same weights: they are the `replicas`, over which gradients
are summed. Experts are spread over --ep of them, neighbours again: replicas = (edp, ep).

    torchrun --nproc-per-node 8 train.py --pp 2 --tp 2

No module of this project keeps a process group in a global variable: a technique gets its group as
an argument (`Groups`). What stands here for NCCL has not yet run on a GPU; tests/nccl_rules.py has
its rules.
"""

import gc
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from base import terminal
from base.device_queue import number
from base.refusals import PATIENCE, Refusals
from base.watchdog import Watchdog


class WorldError(RuntimeError):
    """The ranks did not meet. The message says which rank waited, for how long, and for whom."""


# --- the process groups of a rank -----------------------------------------------------------------


@dataclass
class Groups:
    """The process groups of this rank. None where a group has one rank."""

    # the ranks that have other samples
    dp: dist.ProcessGroup | None = None
    # the ranks that have other tokens of the same samples
    cp: dist.ProcessGroup | None = None
    # dp times cp: the ranks that hold the same weights, and sum their gradients
    replicas: dist.ProcessGroup | None = None
    # the replicas that together hold one copy of each expert
    ep: dist.ProcessGroup | None = None
    # the replicas that hold the same experts; may be this rank alone
    edp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    # the pipeline's communicators on GPUs: (sender, receiver, kind) -> group, as `nccl_groups`
    nccl: dict | None = None
    # all ranks
    all: dist.ProcessGroup | None = None
    # all ranks, on the CPU: for checkpoints that are written while training goes on
    files: dist.ProcessGroup | None = None

    def __post_init__(self):
        if self.cp is None:
            self.replicas = self.dp

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
    ) -> "Groups":
        """One mesh (pp, dp, cp, tp) of `world` ranks. timeout: of collectives. A collective."""
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
        if ep > 1:
            # the same ranks, with dp times cp = (edp, ep)
            shape = (pp, replicas // ep, ep, tp)
            names = ("pp", "edp", "ep", "tp")
            experts = make_mesh(device_type, shape, names, timeout)
            groups.ep = experts.get_group("ep")
            groups.edp = experts.get_group("edp")
        groups.all = dist.group.WORLD
        # NCCL itself, or its rules on CPUs (tests/nccl_rules.py)
        is_nccl = dist.get_backend().startswith("nccl")
        # CPU tensors need gloo, because NCCL cannot carry them
        backend = "gloo" if is_nccl else None
        groups.files = dist.new_group(backend=backend, timeout=timeout)
        of_data = (groups.dp, groups.cp, groups.replicas, groups.ep, groups.edp)
        for group in (*of_data, groups.tp, groups.pp):
            if group and timeout:
                set_timeout(group, timeout)
        if pp > 1 and is_nccl:
            pipelines = mesh.mesh.flatten(1).t().tolist()  # [dp tp, pp]
            device = torch.device(device_type)
            groups.nccl = nccl_groups(pipelines, dist.get_rank(), device, timeout)
        return groups


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    try:
        group.set_timeout(timeout)
    except RuntimeError as e:
        # torch 2.11's gloo under TORCH_DISTRIBUTED_DEBUG=DETAIL: the default stays
        if "does not support" not in str(e):
            raise


# the groups for whose messages the next computation waits; sums of gradients are not waited for
URGENT = ("pp", "cp", "tp", "ep")


def make_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], timeout: timedelta | None
) -> DeviceMesh:
    """torch's mesh, whose `URGENT` groups have streams of high priority. A collective."""
    options = {}
    for name in names:
        # one for each group, because torch writes into it
        urgent = high_priority(timeout)
        if urgent and name in URGENT:
            options[name] = urgent
    return init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=options)


def high_priority(timeout: timedelta | None) -> "dist.ProcessGroupNCCL.Options | None":
    """Options of one communicator: its stream has high priority. None without NCCL.

    A matrix multiplication that was launched earlier fills the GPU. As its blocks end, those of the
    stream with the highest priority start first. So communication is meant to run beside the
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
) -> dict[tuple[int, int, str], dist.ProcessGroup]:
    """This rank's communicators: {(sender, receiver, kind): group}, with positions in the pipeline.

    There is one for each link of `pipeline_links`. pipelines: the global ranks of every pipeline.
    timeout: of their messages.

    A collective of all ranks. Disjoint pairs, of all pipelines, are split from the world at once: a
    `new_group` for each pair would be a collective of all ranks each time. A rank without a pair is
    split alone, because torch names a group by how many this rank has, and both ends need one name.

    Each communicator carries a message here, in the same order everywhere. NCCL's first send blocks
    its host until the host of the receive arrives; in a training step two hosts could wait for each
    other. An all-reduce here would not help, because collectives use other connections.
    """
    own = {}
    p = len(pipelines[0])
    for links in disjoint(pipeline_links(p)):
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
    """The links, in lists of which none has a rank twice."""
    lists = []
    for link in links:
        for others in lists:
            if not any(set(link[:2]) & set(other[:2]) for other in others):
                others.append(link)
                break
        else:
            lists.append([link])
    return lists


def pipeline_links(p: int) -> list[tuple[int, int, str]]:
    """(sender, receiver, kind) of all that a pipeline of p ranks may send: activations (F) to the
    next rank and gradients (B) to the previous one, both also round the end, and the gradient of a
    tied embedding (B) between first and last."""
    links = {(0, p - 1, "B"), (p - 1, 0, "B")}
    for i in range(p):
        links.add((i, (i + 1) % p, "F"))
        links.add((i, (i - 1) % p, "B"))
    return sorted(links)


# --- this process ---------------------------------------------------------------------------------

# what torchrun sets: the variable, its value for one rank alone, its least value
VARIABLES = {
    "RANK": (0, 0),
    "WORLD_SIZE": (1, 1),
    "LOCAL_RANK": (0, 0),
    "LOCAL_WORLD_SIZE": (1, 1),
    "TORCHELASTIC_RESTART_COUNT": (0, 0),
}


@dataclass
class World:
    """Which rank this process is, and the groups that it talks to."""

    rank: int
    size: int
    # its number among the ranks of this machine
    local_rank: int
    local_size: int
    # how often torchrun has started these ranks again
    restarts: int
    device: torch.device | None = None
    groups: Groups | None = None
    watchdog: Watchdog | None = None
    # through which the ranks have met
    store: dist.Store | None = None
    refusals: Refusals | None = None
    # whether ranks share GPUs, so that gloo carries what they send
    shares_gpu: bool = False

    # --- start and end

    @classmethod
    def from_launcher(cls) -> "World":
        """As torchrun has set the environment; without torchrun, one rank. Raises WorldError."""
        values = []
        for name, (default, least) in VARIABLES.items():
            text = os.environ.get(name, str(default))
            if not text.isdecimal() or int(text) < least:
                raise WorldError(
                    f"{name}={text}: must be a whole number, at least {least}; torchrun sets it"
                )
            values.append(int(text))
        world = cls(*values)
        if world.rank >= world.size or (world.size > 1 and "RANK" not in os.environ):
            raise WorldError(
                f"RANK={os.environ.get('RANK', 'not set')} of WORLD_SIZE={world.size}: ranks are"
                f" numbered from 0 to {world.size - 1}; torchrun does it"
            )
        return world

    def connect(
        self, device: str, tp: int, pp: int, timeout: float, ep: int = 1, cp: int = 1
    ) -> None:
        """Choose the device and, with several ranks, make the process groups. A collective.

        timeout: seconds without progress after which the watchdog ends the run; collectives wait a
        minute longer. Raises WorldError.
        """
        self.choose_device(device)
        if self.size == 1:
            self.groups = Groups()
            return
        # What is imported by now stays, so the garbage collections of `disconnect` skip it. Each
        # would take 0.2 s.
        gc.freeze()
        store = self.meet(timeout)
        self.refusals.watch()
        # a clone has its own connection
        beats = dist.PrefixStore("watchdog", store.clone())
        self.watchdog = Watchdog(beats, self.rank, self.size, timeout)
        self.beat("the start, where the ranks meet")
        nccl = self.have_gpus_of_their_own(store)
        self.shares_gpu = self.device.type == "cuda" and not nccl
        if self.shares_gpu and pp > 1:
            raise WorldError(
                f"--pp {pp}: ranks share a GPU, which NCCL refuses, and gloo cannot send a GPU's"
                " tensors from rank to rank: give each rank a GPU, or --pp 1, or --device cpu"
            )
        if self.shares_gpu:
            self.say(
                "ranks share a GPU, which NCCL refuses: gloo carries what they send, through the"
                " host, slowly"
            )
        collective_timeout = timedelta(seconds=timeout + 60)
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=dist.PrefixStore("ranks", store),
            rank=self.rank,
            world_size=self.size,
            timeout=collective_timeout,
            device_id=self.device if nccl else None,
        )
        layout = dict(tp=tp, pp=pp, ep=ep, cp=cp)
        self.groups = Groups.make(self.device.type, self.size, timeout=collective_timeout, **layout)
        self.beat(None)

    def choose_device(self, device: str) -> None:
        """device: cpu; or cuda or auto, which take a GPU where there is one."""
        if device != "cpu" and torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            return
        from base import cpu

        self.device = torch.device("cpu")
        cpu.keep_freed_memory()
        if self.size > 1:
            torch.set_num_threads(self.cores)

    def have_gpus_of_their_own(self, store: dist.Store) -> bool:
        """Whether no two ranks share a GPU, and none is without: NCCL needs that. By the names of
        the GPUs, for under `srun --gpus-per-task=1` each rank sees one, and not the same. A
        collective."""
        name = "none"
        if self.device.type == "cuda":
            name = f"{socket.gethostname()} {torch.cuda.get_device_properties(self.device).uuid}"
        keys = [f"GPU of rank {rank}" for rank in range(self.size)]
        store.set(keys[self.rank], name)
        names = set(store.multi_get(keys))
        return len(names) == self.size and b"none" not in names

    @property
    def cores(self) -> int:
        """Processors for this rank."""
        return max(1, len(os.sched_getaffinity(0)) // self.local_size)

    def meet(self, timeout: float) -> dist.Store:
        """The store through which the ranks find each other. Raises WorldError.

        timeout: seconds that each rank waits for the others.
        """
        try:
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
            store.set_timeout(timedelta(seconds=timeout))
            # torchrun may keep its store over restarts, with addresses of dead ranks in it
            self.store = dist.PrefixStore(f"start {self.restarts}", store)
            own = dist.PrefixStore("refusals", self.store.clone())
            self.refusals = Refusals(own, self.rank, self.size)
            return self.store
        except ValueError as e:
            raise WorldError(
                f"rank {self.rank}: the {self.size} ranks cannot meet: {terminal.one_line(e)}"
            ) from None
        except (dist.DistError, OSError) as e:
            first_line = str(e).split("\n")[0]
            raise WorldError(
                f"rank {self.rank}: the {self.size} ranks did not meet within {timeout:.0f} s"
                f" ({first_line}); start all of them, with the same MASTER_ADDR and MASTER_PORT, or"
                " give them more time with --timeout"
            ) from None

    def disconnect(self) -> None:
        """End the process groups. Everything that holds one must be gone by now: gloo otherwise
        aborts the process at exit, now and then."""
        if self.watchdog:
            self.watchdog.stop()
        if self.refusals:
            self.refusals.stopped.set()
        self.groups = None
        self.watchdog = None
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()
            gc.collect()

    def follow_refusal(self) -> None:
        """End this process if another rank was refused; otherwise do nothing."""
        message = self.refusals and self.refusals.first()
        if message:
            self.refusals.end(message)

    def share_refusal(self, message: str, name: str) -> None:
        """Say on one rank why this one, and perhaps all, are refused. name: of the command."""

        def say(message: str) -> None:
            terminal.say(f"{name}: {terminal.one_line(message)}", error=True)

        if self.size == 1:
            return say(message)
        terminal.tell_launcher(f"{name}: {terminal.one_line(message)}")
        if self.watchdog:
            self.watchdog.stop()
        try:
            if not self.store:
                self.meet(PATIENCE)
        except WorldError:
            # nobody to tell
            return say(message if self.rank == 0 else f"rank {self.rank}: {message}")
        self.refusals.share(message, say)

    # --- what all ranks learn; each of these is a collective

    def gather(self, value) -> list:
        """Every rank's object, on every rank."""
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value)
            if self.watchdog and self.watchdog.last:
                self.beat(self.watchdog.where)
        return gathered

    def on_rank_0(self, work, errors: tuple):
        """Call work() on rank 0. Its result is returned on every rank; an exception of `errors` is
        raised on every rank."""
        result = error = None
        try:
            if self.rank == 0:
                result = work()
        except errors as e:
            error = e
        result, error = self.gather((result, error))[0]
        if error:
            raise error
        return result

    def gather_numbers(self, *numbers: torch.Tensor | float) -> torch.Tensor:
        """All ranks' numbers, [ranks, numbers], float64 on the device: one small collective."""
        row = torch.stack([number(n, torch.float64, self.device) for n in numbers])
        if self.size == 1:
            return row.unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    # --- the watchdog and the terminal

    def beat(self, where: str | None) -> None:
        """Progress, for the watchdog. None: it does not watch until the next beat."""
        if self.watchdog and where:
            self.watchdog.beat(where)
        elif self.watchdog:
            self.watchdog.pause()

    def say(self, *words) -> None:
        """A line on standard output, from rank 0."""
        if self.rank == 0:
            terminal.say(*words)

    def say_aside(self, *words) -> None:
        """A line on standard error, from rank 0: for people, where a program reads the output."""
        if self.rank == 0:
            terminal.say(*words, error=True)


def why_no_gpu() -> str:
    """Why torch finds no GPU, in its words: no driver, one too old for this wheel, .."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as e:
        return terminal.one_line(e)
    return "torch.cuda.is_available() is False"


def memory(device: str, ranks_on_machine: int) -> int:
    """Bytes that one rank can have: its GPU's memory, or its share of the machine's with swap."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("SwapTotal"):
                    # in KiB
                    total += 1024 * int(line.split()[1])
    except OSError:
        # another kernel: count no swap
        pass
    return total // ranks_on_machine
