"""A process group for CPUs that keeps the rules of NCCL, and says who broke one.

gloo forgives what NCCL does not: it has tags, its hosts do not wait for each other, and what it
writes may be there before anyone waits for it. Here each communicator is what it is on a GPU: a
*stream*, operations that run one after the other, in the order in which the host has posted them. A
communicator is a process group; for single sends and receives, each pair of ranks in it.

    rule          what breaks it, and what happens then
    no tags       the first send of a pair meets the first receive, whatever their tags say
    meeting       a pair's first message, per direction, makes both hosts wait for each other
    same order    ranks that post another operation, size or type: an error that names both
    poison        the output of an operation is NaN until `wait`
    untouched     an input or output that changes before `wait`: an error
    waits         an operation that nobody waits for: an error at the end
    queue         streams share a few hardware queues: an operation that cannot start holds up what
                  was posted behind it in its queue; the compute stream is in queue 0

    ranks.run(function, 2, backend="nccl-rules")

Each stream is a thread, and gloo carries the bytes.

Not covered: the order in which a GPU frees memory; operations on tensors of the CPU, which NCCL
refuses; the host waits where it would only enqueue, if what it posts shares a queue with compute.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "nccl-rules"
# bytes of a description that ranks compare
DESCRIBED = 160


class RuleError(RuntimeError):
    """A rule of NCCL is broken. The message names the communicator, the operation and the rule."""


# --- streams and hardware queues ------------------------------------------------------------------


class Operation:
    """What a host has posted. `run` is called by the thread of its stream."""

    def __init__(self, what: str, run: Callable, ahead: "Operation | None"):
        self.what = what
        self.run = run
        # the one before it in its hardware queue
        self.ahead = ahead
        self.started = threading.Event()
        self.ended = threading.Event()
        self.error: Exception | None = None


class Machine:
    """What the communicators of one process share: the hardware queues of its GPU."""

    def __init__(self):
        # CUDA_DEVICE_MAX_CONNECTIONS of a GPU
        self.queues = 8
        # the compute stream is the first
        self.streams = 1
        # seconds, of the default group: torch gives others half an hour
        self.timeout: float | None = None
        # hardware queue -> the operation that was posted last
        self.latest: dict[int, Operation] = {}
        # what nobody has waited for yet
        self.open: set[Operation] = set()

    def queue_of_next_stream(self) -> int:
        self.streams += 1
        return (self.streams - 1) % self.queues


MACHINE = Machine()


class Stream:
    """Runs its operations in order, in a thread of its own."""

    def __init__(self, name: str, timeout: float):
        self.name = name
        self.timeout = timeout
        self.queue = MACHINE.queue_of_next_stream()
        self.posted: SimpleQueue = SimpleQueue()
        threading.Thread(target=self.work, daemon=True).start()

    # a rank that writes answers posts tensors of its inference mode
    @torch.inference_mode()
    def work(self) -> None:
        while (operation := self.posted.get()) is not None:
            try:
                if operation.ahead and not operation.ahead.started.wait(self.timeout):
                    raise RuleError(
                        f"{operation.what} cannot start: {operation.ahead.what}, which is before it"
                        " in a hardware queue, waits"
                    )
                operation.started.set()
                operation.run()
            except RuleError as e:
                operation.error = e
            except Exception as e:
                operation.error = RuleError(f"{operation.what} does not end: {e}")
            operation.started.set()
            operation.ended.set()

    def post(self, what: str, run: Callable) -> Operation:
        what = f"{what} of {self.name}"
        operation = Operation(what, run, MACHINE.latest.get(self.queue))
        MACHINE.latest[self.queue] = operation
        MACHINE.open.add(operation)
        self.posted.put(operation)
        # compute is in queue 0, so it is held up by what cannot start there
        if self.queue == 0 and not operation.started.wait(self.timeout):
            raise RuleError(f"{what} holds up the computation: they share a hardware queue")
        return operation


# --- one operation --------------------------------------------------------------------------------


class Work(dist._Work):
    """What a host gets for an operation; see the rules `poison` and `untouched`."""

    def __init__(self, stream: Stream, what: str, outputs: list[Tensor], inputs: list[Tensor], run):
        super().__init__()
        # the operation reads and writes its own copies
        self.copies = [x.detach().clone() for x in inputs]
        self.results = [torch.empty_like(x.detach()) for x in outputs]
        self.outputs = outputs
        self.stream = stream
        self.done = False
        for x in outputs:
            poison(x)
        # an output may be a part of an input, or the other way round
        self.untouched = [(x, x.detach().clone()) for x in [*inputs, *outputs]]
        self.operation = stream.post(what, lambda: run(self.results, self.copies))

    def wait(self, timeout=None) -> bool:
        if self.done:
            return True
        operation = self.operation
        if not operation.ended.wait(self.stream.timeout):
            raise RuleError(f"{operation.what} does not end: nobody posts the match")
        MACHINE.open.discard(operation)
        if operation.error:
            raise operation.error
        for x, copy in self.untouched:
            if not same_bytes(x, copy):
                raise RuleError(f"{operation.what}: its input or output has changed before `wait`")
        for x, result in zip(self.outputs, self.results):
            x.data.copy_(result)
        self.done = True
        return True


def poison(x: Tensor) -> None:
    bad = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min
    x.data.fill_(bad)


def same_bytes(x: Tensor, y: Tensor) -> bool:
    x, y = x.detach().contiguous(), y.contiguous()
    return torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))


def kinds(tensors: list[Tensor]) -> str:
    return ", ".join(f"{list(x.shape)} {str(x.dtype).split('.')[1]}" for x in tensors)


def name_of(op: dist.ReduceOp) -> str:
    return str(op.op).split(".")[-1]


def as_bytes(text: str) -> Tensor:
    data = text.encode()[:DESCRIBED].ljust(DESCRIBED)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_text(data: Tensor) -> str:
    return bytes(data.tolist()).decode(errors="replace").strip()


# --- the process group ----------------------------------------------------------------------------


class NCCLRules(dist.ProcessGroup):
    """What `dist.all_reduce` and the others call."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float):
        super().__init__(rank, size)
        self.me = rank
        self.count = size
        self.store = store
        self.timeout = timeout
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        self.stream = Stream(f"a group of {size} ranks", timeout)
        # (lower, higher rank) -> the stream of their single sends and receives
        self.pairs: dict[tuple[int, int], Stream] = {}
        # (sender, receiver): those that have a connection, and how many messages went each way
        self.met: set[tuple[int, int]] = set()
        self.messages = defaultdict(int)

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.me

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    # --- collectives

    def collective(self, what: str, outputs: list[Tensor], inputs: list[Tensor], run) -> Work:
        """run(outputs, inputs) -> gloo's Work. what: compared between the ranks."""

        def compare_and_run(results, copies):
            self.compare(what)
            run(results, copies).wait()

        return Work(self.stream, what, outputs, inputs, compare_and_run)

    def compare(self, what: str) -> None:
        """Raises RuleError where another rank runs another operation of this communicator."""
        mine = as_bytes(what)
        of_all = [torch.empty_like(mine) for _ in range(self.count)]
        self.gloo.allgather([of_all], [mine]).wait()
        for rank, other in enumerate(of_all):
            if not torch.equal(other, mine):
                raise RuleError(
                    f"another order: rank {self.me} of {self.stream.name} runs {what}, and rank"
                    f" {rank} {as_text(other)}"
                )

    def allreduce(self, tensors, opts=None) -> Work:
        opts = opts or dist.AllreduceOptions()

        def run(results, copies):
            for result, copy in zip(results, copies):
                result.copy_(copy)
            return self.gloo.allreduce(results, opts)

        what = f"all-reduce {name_of(opts.reduceOp)} {kinds(tensors)}"
        return self.collective(what, tensors, tensors, run)

    def broadcast(self, tensors, opts) -> Work:
        def run(results, copies):
            results[0].copy_(copies[0])
            return self.gloo.broadcast(results, opts)

        what = f"broadcast from {opts.rootRank} {kinds(tensors)}"
        return self.collective(what, tensors, tensors, run)

    def allgather(self, outputs, inputs, opts=None) -> Work:
        def run(results, copies):
            return self.gloo.allgather([results], copies)

        return self.collective(f"all-gather {kinds(inputs)}", outputs[0], inputs, run)

    def all_gather_single(self, output, input, opts=None) -> Work:
        def run(results, copies):
            return self.gloo._allgather_base(results[0].view(-1), copies[0].reshape(-1))

        return self.collective(f"all-gather {kinds([input])}", [output], [input], run)

    def reduce_scatter_single(self, output, input, opts=None) -> Work:
        opts = opts or dist.ReduceScatterOptions()

        def run(results, copies):
            return self.gloo._reduce_scatter_base(results[0].view(-1), copies[0].reshape(-1), opts)

        what = f"reduce-scatter {name_of(opts.reduceOp)} {kinds([output])}"
        return self.collective(what, [output], [input], run)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None) -> Work:
        def run(results, copies):
            return self.gloo.alltoall_base(results[0], copies[0], output_splits, input_splits)

        what = f"all-to-all {input.dtype}"
        return self.collective(what, [output], [input], run)

    def gather(self, outputs, inputs, opts) -> Work:
        def run(results, copies):
            return self.gloo.gather([results] if results else [], copies, opts)

        flat = outputs[0] if outputs else []
        return self.collective(f"gather to {opts.rootRank} {kinds(inputs)}", flat, inputs, run)

    # --- messages

    def send(self, tensors, peer: int, tag: int) -> Work:
        return self.message("send", tensors[0], self.me, peer)

    def recv(self, tensors, peer: int, tag: int) -> Work:
        return self.message("receive", tensors[0], peer, self.me)

    def message(self, op: str, x: Tensor, sender: int, receiver: int):
        pair = min(sender, receiver), max(sender, receiver)
        if pair not in self.pairs:
            name = f"the pair {pair} in {self.stream.name}"
            self.pairs[pair] = Stream(name, self.timeout)
        self.meet(op, sender, receiver)
        return self.post(self.pairs[pair], op, x, sender, receiver)

    def post(self, stream: Stream, op: str, x: Tensor, sender: int, receiver: int) -> Work:
        number = self.messages[sender, receiver]
        self.messages[sender, receiver] += 1
        what = f"{op} {number} from {sender} to {receiver}, {kinds([x])}"
        kind = kinds([x])

        def send(results, copies):
            self.greet(number, kind, receiver)
            self.gloo.send(copies, receiver, 2 * number + 1).wait()

        def receive(results, copies):
            self.greet(number, kind, sender)
            self.gloo.recv(results, sender, 2 * number + 1).wait()

        if op == "send":
            return Work(stream, what, [], [x], send)
        return Work(stream, what, [x], [], receive)

    def greet(self, number: int, kind: str, peer: int) -> None:
        """Both ends of a message say what it is, and wait until the other is there."""
        mine, other = as_bytes(kind), as_bytes("")
        sending = self.gloo.send([mine], peer, 2 * number)
        self.gloo.recv([other], peer, 2 * number).wait()
        sending.wait()
        if not torch.equal(mine, other):
            raise RuleError(
                f"message {number} between rank {self.me} and rank {peer} of {self.stream.name}:"
                f" {kind} here, {as_text(other)} there"
            )

    def meet(self, op: str, sender: int, receiver: int) -> None:
        """The first message makes a connection: the hosts of both ends wait for each other."""
        if (sender, receiver) in self.met:
            return
        self.met.add((sender, receiver))
        key = f"meeting {sender} {receiver}"
        self.store.set(f"{key} {op}", "here")
        other = {"send": "receive", "receive": "send"}[op]
        deadline = time.monotonic() + self.timeout
        while not self.store.check([f"{key} {other}"]):
            if time.monotonic() > deadline:
                raise RuleError(
                    f"a meeting: the host of rank {self.me} waits in its first {op} from {sender}"
                    f" to {receiver} of {self.stream.name}, and the other host does not come"
                )
            time.sleep(0.0005)

    def start(self, messages: list[tuple]) -> list[Work]:
        """Post messages that NCCL starts together: each has a stream of its own, and no host waits
        for another one."""
        works = []
        for op, x, sender, receiver in messages:
            if (op, sender, receiver) not in self.pairs:
                name = f"the batches from {sender} to {receiver} in {self.stream.name}"
                stream = Stream(name, self.timeout)
                self.pairs[op, sender, receiver] = stream
            works.append(self.post(self.pairs[op, sender, receiver], op, x, sender, receiver))
        return works


def batch_isend_irecv(ops: list[dist.P2POp]) -> list[dist.Work]:
    """dist.batch_isend_irecv. torch's own posts the messages of a group of this kind one by one."""
    group = ops[0].group or dist.group.WORLD
    if not isinstance(group, NCCLRules):
        return one_by_one(ops)
    messages = []
    for op in ops:
        peer = op.group_peer
        if op.op is dist.isend:
            messages.append(("send", op.tensor, group.me, peer))
        else:
            messages.append(("receive", op.tensor, peer, group.me))
    return group.start(messages)


def create(store, rank: int, size: int, timeout: timedelta) -> NCCLRules:
    MACHINE.timeout = MACHINE.timeout or timeout.total_seconds()
    return NCCLRules(store, rank, size, MACHINE.timeout)


def unwaited() -> list[str]:
    """The operations of this process that nobody has waited for."""
    return sorted(operation.what for operation in MACHINE.open)


dist.Backend.register_backend(NAME, create, devices=["cpu"])
one_by_one = dist.batch_isend_irecv
dist.batch_isend_irecv = batch_isend_irecv
