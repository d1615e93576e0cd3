"""This process among the ranks: its number, its device, how the ranks meet, and how they end.

    world = World.from_launcher()       the numbers that torchrun has set
    world.connect("auto", tp=2, ..)     the device and the process groups (base/groups.py)
    world.on_rank_0(work)               one rank works; all have its result or its error
    world.disconnect()

A rank that is refused alone (a file that only one machine has is missing on the others) would leave
the others in a collective. So it writes its message into the store that the ranks share, where a
thread of every other rank reads it. All ranks end with one line, which names the rank:

    generate.py: rank 1: --checkpoint runs/chat: no such folder

Usually all ranks read the same files and are refused for the same reason. Then rank 0 prints the
line, without the number of a rank. run/watchdog.py ends a run whose ranks wait for each other.
"""

import contextlib
import gc
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from base import terminal
from base.device_queue import number
from base.groups import Groups
from run.watchdog import Watchdog

# Seconds that a refused rank waits for the others.
PATIENCE = 10
# Seconds in which ranks that read the same files find the same fault.
TOGETHER = 2
# Seconds that rank 0 stays alive: its process may hold the store that the others still read.
LAST_WORD = 0.3


class WorldError(RuntimeError):
    """The ranks did not meet. The message says which rank waited, for how long, and for whom."""


# What torchrun sets: the variable, and its least value, which one rank alone has.
VARIABLES = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
VARIABLES["TORCHELASTIC_RESTART_COUNT"] = 0


@dataclass
class World:
    """Which rank this process is, and the groups that it talks to."""

    rank: int
    size: int
    # The number among the ranks of this machine.
    local_rank: int
    local_size: int
    # How often torchrun has restarted these ranks.
    restarts: int
    device: torch.device | None = None
    groups: Groups | None = None
    watchdog: Watchdog | None = None
    # The store through which the ranks have met.
    store: dist.Store | None = None
    refusals: "Refusals | None" = None
    # Whether ranks share GPUs, so that gloo carries their messages.
    shares_gpu: bool = False

    # --- start and end

    @classmethod
    def from_launcher(cls) -> "World":
        """Read what torchrun has set; without torchrun there is one rank. Raises WorldError."""
        values = []
        for name, least in VARIABLES.items():
            text = os.environ.get(name, str(least))
            if not text.isdecimal() or int(text) < least:
                rule = f"must be a whole number, at least {least}; torchrun sets it"
                raise WorldError(f"{name}={text}: {rule}")
            values.append(int(text))
        world = cls(*values)
        if world.rank >= world.size or (world.size > 1 and "RANK" not in os.environ):
            place = f"RANK={os.environ.get('RANK', 'not set')} of WORLD_SIZE={world.size}"
            rule = f"ranks are numbered from 0 to {world.size - 1}; torchrun does it"
            raise WorldError(f"{place}: {rule}")
        return world

    def connect(self, device: str, timeout: float, tp: int = 1, pp: int = 1, **others: int) -> None:
        """Choose the device and, with several ranks, make the process groups. A collective.

        timeout: seconds without progress after which the watchdog ends the run; collectives wait a
        minute longer. others: further sizes of Groups.make. Raises WorldError.
        """
        self.choose_device(device)
        if self.size == 1:
            self.groups = Groups()
            return
        # What is imported by now stays; a garbage collection of `disconnect` would take 0.2 s.
        gc.freeze()
        store = self.meet(timeout)
        self.refusals.watch()
        # A clone has its own connection.
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
            self.say("ranks share a GPU, which NCCL refuses: gloo sends through the host, slowly")
        collective_timeout = timedelta(seconds=timeout + 60)
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=dist.PrefixStore("ranks", store),
            rank=self.rank,
            world_size=self.size,
            timeout=collective_timeout,
            device_id=self.device if nccl else None,
        )
        sizes = dict(tp=tp, pp=pp, timeout=collective_timeout, **others)
        self.groups = Groups.make(self.device.type, self.size, **sizes)
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
        """Whether every rank has a GPU that no other has, as NCCL needs. The UUIDs of the GPUs
        decide: under `srun --gpus-per-task=1` each rank sees one GPU, another one each. A
        collective."""
        name = "none"
        if self.device.type == "cuda":
            name = f"{socket.gethostname()} {torch.cuda.get_device_properties(self.device).uuid}"
        keys = [f"GPU of rank {rank}" for rank in range(self.size)]
        store.set(keys[self.rank], name)
        names = set(store.multi_get(keys))
        return len(names) == self.size and b"none" not in names

    def memory(self, device: str) -> int:
        """Bytes that this rank can have on a device."""
        return memory(device, self.local_size)

    @property
    def cores(self) -> int:
        """Processors for this rank."""
        return max(1, len(os.sched_getaffinity(0)) // self.local_size)

    def meet(self, timeout: float) -> dist.Store:
        """The store through which the ranks find each other. timeout: seconds that each rank waits
        for the others. Raises WorldError."""
        try:
            store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
            store.set_timeout(timedelta(seconds=timeout))
            # torchrun may keep its store over restarts, with addresses of dead ranks in it.
            self.store = dist.PrefixStore(f"start {self.restarts}", store)
            own = dist.PrefixStore("refusals", self.store.clone())
            self.refusals = Refusals(own, self.rank, self.size)
            return self.store
        except ValueError as e:
            why = f"the {self.size} ranks cannot meet: {terminal.one_line(e)}"
            raise WorldError(f"rank {self.rank}: {why}") from None
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
        """Print on one rank why this one, or all, are refused. name: the command's."""

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
            # There is nobody to tell.
            return say(message if self.rank == 0 else f"rank {self.rank}: {message}")
        self.refusals.share(message, say)

    # --- collectives: what all ranks learn

    def gather(self, value) -> list:
        """Every rank's object, on every rank."""
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value)
            if self.watchdog and self.watchdog.last:
                self.beat(self.watchdog.where)
        return gathered

    def on_every_rank(self, work) -> list:
        """Call work() on every rank, and return all results on every rank; or raise the first
        failing rank's exception: the others would wait for that rank."""
        result = error = None
        try:
            result = work()
        except Exception as e:
            error = e
        outcomes = self.gather((result, error))
        for _, error in outcomes:
            if error:
                raise error
        return [result for result, _ in outcomes]

    def on_rank_0(self, work):
        """The result of work() on rank 0. The other ranks only wait."""
        return self.on_every_rank(lambda: work() if self.rank == 0 else None)[0]

    def in_shares(self, work, items: list) -> list:
        """[work(item) for item in items] on every rank: rank r computes items r, r + size, .."""
        shares = self.on_every_rank(lambda: [work(item) for item in items[self.rank :: self.size]])
        return [shares[i % self.size][i // self.size] for i in range(len(items))]

    def open_on_rank_0(self, work):
        """The same for a result that cannot be sent, such as an open file: None on other ranks."""
        opened = []
        self.on_rank_0(lambda: opened.append(work()))
        return opened[0] if opened else None

    def gather_numbers(self, *numbers: torch.Tensor | float) -> torch.Tensor:
        """All ranks' numbers, [ranks, numbers], float64, on the device, by one collective."""
        row = torch.stack([number(n, torch.float64, self.device) for n in numbers])
        if self.size == 1:
            return row.unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    # --- the watchdog and the terminal

    def beat(self, where: str | None) -> None:
        """Note progress for the watchdog. None: it does not watch until the next beat."""
        if self.watchdog and where:
            self.watchdog.beat(where)
        elif self.watchdog:
            self.watchdog.pause()

    def say(self, *words) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            terminal.say(*words)

    def say_aside(self, *words) -> None:
        """Print a line on standard error on rank 0, where a program reads the output."""
        if self.rank == 0:
            terminal.say(*words, error=True)


def why_no_gpu() -> str:
    """Why torch finds no GPU, in torch's words."""
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
    # Another kernel has no such file: count no swap.
    with contextlib.suppress(OSError):
        swap = re.search(r"SwapTotal: *(\d+) kB", Path("/proc/meminfo").read_text())
        total += 1024 * int(swap[1]) if swap else 0
    return total // ranks_on_machine


# --- refusals -------------------------------------------------------------------------------------


class Refusals:
    """What the ranks tell each other about refusals, through their common store."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        """store: a connection that nothing else uses."""
        self.store = store
        self.rank = rank
        self.size = size
        self.stopped = threading.Event()
        # The watching thread and the main thread may find a refusal at the same time.
        self.ending = threading.Lock()

    def first(self) -> str | None:
        """The message of the rank that was refused first, with its number. None: no rank was, or
        the store is gone."""
        with contextlib.suppress(dist.DistError):
            if self.store.check(["first"]):
                return self.store.get("first").decode()
        return None

    def watch(self) -> None:
        """From now on a refusal of another rank ends this process with status 2."""
        threading.Thread(target=self.wait_for_one, daemon=True).start()

    def wait_for_one(self) -> None:
        while not self.stopped.wait(1):
            message = self.first()
            # This rank may be about to find the same fault.
            if message and not self.stopped.wait(TOGETHER):
                self.end(message)

    def end(self, message: str) -> None:
        """End this process, because another rank was refused. Rank 0 says the message."""
        text = f"{Path(sys.argv[0]).name}: {message}"
        with self.ending, contextlib.suppress(dist.DistError):
            terminal.tell_launcher(text)
            if self.rank == 0:
                terminal.say(text, error=True)
                self.store.set("said", "")
                time.sleep(LAST_WORD)
            else:
                # torchrun kills all ranks when the first one ends, so the line comes first.
                self.comes(lambda: self.store.check(["said"]), PATIENCE)
        os._exit(2)

    def share(self, message: str, say: Callable[[str], None]) -> None:
        """Tell the other ranks why this one is refused. say(message) is called on one rank, or on
        each that finds the store gone."""
        self.stopped.set()
        own = f"rank {self.rank}: {message}"
        try:
            self.store.compare_set("first", "", own)
            self.store.add("refused", 1)
            if self.rank:
                if not self.comes(lambda: self.store.check(["said"]), PATIENCE):
                    say(own)
                return
            everywhere = self.comes(lambda: self.store.add("refused", 0) == self.size, TOGETHER)
            say(message if everywhere else own)
            self.store.set("said", "")
            # The others look every second.
            time.sleep(LAST_WORD if everywhere else 2 + TOGETHER)
        except dist.DistError:
            # The store is gone with the rank that held it.
            say(own)

    def comes(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition is true within so many seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True
