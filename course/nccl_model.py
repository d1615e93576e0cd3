"""The programs of a pipeline on GPUs with NCCL, simulated: do they end, and when?

A send on a GPU is not a call that returns when the message is there. The host only *enqueues* it,
and the GPU runs it later. Four rules of the machine decide whether a program ends:

    stream    operations that run one after the other. The actions (F, B, ..) are on the compute
              stream. Each communicator has a stream of its own for its messages.
    message   A send and its receive run together, when both have started. There are no tags: the
              first send of a communicator meets its first receive, and so on.
    meeting   The first message of a communicator makes a connection. For it the two *hosts* wait
              for each other. Afterwards no host waits for a message.
    queue     The streams reach the GPU through a few hardware queues. Where two streams share one,
              an operation that cannot start yet holds up all that were enqueued behind it.

An operation that is enqueued now starts after the actions that were enqueued before it. An action
also waits for the message that it needs.

    events = run(add_transfers(schedule), Cost(transfer=0.1))

returns the actions with their times, as `schedules.simulate` does, or raises ScheduleError with
what is stuck. Nothing depends on chance: an operation that starts sooner never stops another one.

    python -m course.pipeline_parallel      a lesson that runs the schedules through this model

Sources: NVIDIA/nccl issue 783 (the meeting); CUDA C++ Programming Guide, "CUDA Environment
Variables", CUDA_DEVICE_MAX_CONNECTIONS (which stream gets which queue is assumed); torch's
ProcessGroupNCCL, whose streams wait for the current stream.

Not covered: the multiprocessors on which a started receive waits for its sender; other traffic.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from pipeline_parallel import Program, Transfer
from schedules import (
    DIRECTION,
    Action,
    Cost,
    Event,
    Pair,
    Placement,
    Result,
    ScheduleError,
    actions_of,
    result_of,
)

# The hardware queues of a GPU, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise.
QUEUES = 8
UNIT_COST = Cost()


@dataclass(eq=False)
class Operation:
    """What a host has enqueued: an action, a send, a receive, or the wait for a send."""

    rank: int
    entry: Action | Pair | Transfer
    # These operations must have ended before it can start.
    after: list["Operation"]
    start: float | None = None
    end: float | None = None

    def earliest(self) -> float | None:
        """The time from which nothing keeps it; None while something does."""
        ends = [operation.end for operation in self.after]
        return None if None in ends else max(ends, default=0.0)


@dataclass
class Device:
    """One rank: its program, how far its host is, and what its GPU has been given."""

    rank: int
    program: Program
    position: int = 0
    # A stream, "compute" or a channel -> its latest operation.
    latest: dict = field(default_factory=dict)
    # A hardware queue -> its operations in order, and how many of them have started.
    queues: dict = field(default_factory=lambda: defaultdict(list))
    started: dict = field(default_factory=lambda: defaultdict(int))
    # (op, kind, stage, micro_batch) -> the send or receive, for what waits for it
    transfers: dict = field(default_factory=dict)


def channel_of(transfer: Transfer, rank: int) -> tuple[int, int, str]:
    """The communicator that a message takes: (sender, receiver, kind)."""
    ends = (transfer.peer, rank) if transfer.op == "receive" else (rank, transfer.peer)
    return *ends, transfer.kind


class Machine:
    """All ranks; see `run`."""

    def __init__(
        self,
        programs: list[Program],
        cost: Cost,
        placement: Placement,
        queues: int,
        connected: bool,
    ):
        self.devices = [Device(rank, program) for rank, program in enumerate(programs)]
        self.placement = placement
        self.cost = cost
        channels = {
            channel_of(entry, rank)
            for rank, program in enumerate(programs)
            for entry in program
            if isinstance(entry, Transfer)
        }
        # Streams get their hardware queues in turn, the compute stream first.
        streams = ["compute", *sorted(channels)]
        self.queue_of = {stream: n % queues for n, stream in enumerate(streams)}
        self.connected = channels if connected else set()
        # Hosts that wait for a meeting: (channel, op).
        self.calls = set()
        # Channel -> the sends, or the receives, in the order of posting.
        self.sends = defaultdict(list)
        self.receives = defaultdict(list)
        # Channel -> the number of messages that have met.
        self.met = defaultdict(int)

    # --- hosts

    def host_goes_on(self, device: Device) -> bool:
        """Enqueue entries of the program until the host waits or is done. Whether any was."""
        before = device.position
        while device.position < len(device.program):
            entry = device.program[device.position]
            if isinstance(entry, Transfer) and entry.op != "settle":
                if self.must_meet(entry, device.rank):
                    break
            self.enqueue(device, entry)
            device.position += 1
        return device.position > before

    def must_meet(self, entry: Transfer, rank: int) -> bool:
        """Whether the host still waits for its peer to make the channel's connection."""
        channel = channel_of(entry, rank)
        self.calls.add((channel, entry.op))
        if {(channel, "send"), (channel, "receive")} <= self.calls:
            self.connected.add(channel)
        return channel not in self.connected

    def enqueue(self, device: Device, entry: Action | Pair | Transfer) -> None:
        stream = "compute"
        if isinstance(entry, Transfer) and entry.op != "settle":
            stream = channel_of(entry, device.rank)
        after = [device.latest[name] for name in {"compute", stream} if name in device.latest]
        operation = Operation(device.rank, entry, after)
        if stream == "compute":
            operation.after += self.awaited(device, entry)
        else:
            device.transfers[entry.op, *entry[2:]] = operation
            side = self.sends if entry.op == "send" else self.receives
            side[stream].append(operation)
        device.latest[stream] = operation
        device.queues[self.queue_of[stream]].append(operation)

    def awaited(self, device: Device, entry: Action | Pair | Transfer) -> list[Operation]:
        """The message that an action needs, or that a `settle` waits for. Raises ScheduleError
        where no receive, or no send, has been posted."""
        if isinstance(entry, Transfer):
            keys = [("send", *entry[2:])]
        else:
            keys = [("receive", *message) for message in self.received_by(entry, device.rank)]
        for key in keys:
            if key not in device.transfers:
                what = f"{entry} waits for a {key[0]} never posted"
                raise ScheduleError(f"rank {device.rank}: {what}")
        return [device.transfers[key] for key in keys]

    def received_by(self, entry: Action | Pair, rank: int) -> list[Result]:
        """What an action, or a Pair, needs from other ranks."""
        messages = []
        for action in actions_of(entry):
            message = result_of(action, rank, self.placement)
            comes_from = message[1] - DIRECTION[action.op]
            exists = 0 <= comes_from <= self.placement.last_stage
            if exists and self.placement.rank_of(comes_from) != rank:
                messages.append(message)
        return messages

    # --- GPUs

    def gpu_goes_on(self, device: Device) -> bool:
        """Start what can start, queue by queue. Whether anything could."""
        progress = False
        for number, queue in device.queues.items():
            while device.started[number] < len(queue):
                position = device.started[number]
                operation = queue[position]
                start = operation.earliest()
                if start is None:
                    break
                if position:
                    start = max(start, queue[position - 1].start)
                operation.start = start
                self.end(operation)
                device.started[number] += 1
                progress = True
        return progress

    def end(self, operation: Operation) -> None:
        """An operation has started: say when it ends, if that is known now."""
        entry = operation.entry
        if not isinstance(entry, Transfer):
            took = self.cost.of(actions_of(entry), operation.rank, self.placement)
            operation.end = operation.start + took
        elif entry.op == "settle":
            operation.end = operation.start
        else:
            self.meet(channel_of(entry, operation.rank))

    def meet(self, channel: tuple[int, int, str]) -> None:
        """End the channel's next message if its send and its receive have both started."""
        sends, receives = self.sends[channel], self.receives[channel]
        number = self.met[channel]
        if number >= min(len(sends), len(receives)):
            return
        send, receive = sends[number], receives[number]
        if send.entry[2:] != receive.entry[2:]:
            raise ScheduleError(
                f"rank {send.rank} sends {send.entry[3:]} where rank {receive.rank} receives"
                f" {receive.entry[3:]} (stage, micro-batch)"
            )
        if send.start is not None and receive.start is not None:
            send.end = receive.end = max(send.start, receive.start) + self.cost.transfer
            self.met[channel] += 1

    # --- all of it

    def stuck(self) -> list[str]:
        """What has not been enqueued, or has not ended, one line for each rank."""
        lines = []
        for device in self.devices:
            if device.position < len(device.program):
                lines.append(f"host {device.rank} waits to post {device.program[device.position]}")
            waiting = [x for queue in device.queues.values() for x in queue if x.end is None]
            if waiting:
                lines.append(f"GPU {device.rank} waits at {waiting[0].entry}")
        return lines


def run(
    programs: list[Program],
    cost: Cost = UNIT_COST,
    placement: Placement | None = None,
    queues: int = QUEUES,
    connected: bool = True,
) -> list[Event]:
    """Run the programs of all ranks in the model. Returns the actions by start; raises
    ScheduleError, saying what is stuck or what does not match.

    placement: by default looped, one chunk on each rank. queues: the hardware queues of each GPU.
    Programs that end with one queue end with any number: more queues only take waits away.
    connected: every communicator has had a message before, so that no host waits.
    """
    placement = placement or Placement(len(programs))
    machine = Machine(programs, cost, placement, queues, connected)
    progress = True
    while progress:
        progress = False
        for device in machine.devices:
            progress |= machine.host_goes_on(device)
            progress |= machine.gpu_goes_on(device)
    stuck = machine.stuck()
    if stuck:
        raise ScheduleError("; ".join(stuck))
    events = [
        Event(device.rank, *action, operation.start, operation.end)
        for device in machine.devices
        for queue in device.queues.values()
        for operation in queue
        if not isinstance(operation.entry, Transfer)
        for action in actions_of(operation.entry)
    ]
    return sorted(events, key=lambda event: (event.start, event.rank))
