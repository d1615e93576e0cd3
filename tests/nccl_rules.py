"""A process group for CPUs that keeps the rules of NCCL, and says who broke one.

gloo forgives what NCCL does not: it has tags, its hosts do not wait for each other, and what it
writes may be there before anyone waits for it. On a GPU a communicator is a *stream*: operations
that run one after the other, in the order in which the host has posted them. Here each process
group is a communicator. Where NCCL hangs or gives wrong numbers, this group raises an error:

    rule          what NCCL does                                    what breaks it
    no tags       the first send of a pair meets its first receive  another size or type comes
    meeting       the first message of a pair, per direction, and   the hosts post first messages
                  the first collective of a kind make connections:  in different orders
                  the hosts of all its ranks wait for each other
    same order    ranks run the same collectives of a group         another operation, size or type
    poison        an output is there after `wait` alone             it is NaN before
    untouched     inputs and outputs are in use until `wait`        they change, or are freed
    waits         an operation is asynchronous                      nobody waits (`check_waits`)
    queue         streams share a few hardware queues; what cannot  compute, whose stream is in
                  start holds up what was posted behind it there    queue 0, is held up

    ranks.run(function, 2, backend="nccl-rules")

Each stream is a thread (nccl_streams.py), and gloo carries the bytes. Messages of
`batch_isend_irecv` start together, as one operation of the group's stream.

Sources: NVIDIA/nccl issue 783; NCCL's connections at run time (NCCL_RUNTIME_CONNECT); torch's
ProcessGroupNCCL with a device_id, where messages use the group's own communicator.

Not covered: NCCL refuses tensors of the CPU, and here all are (tests/test_as_rank.py looks for
those); operations of two groups that wait for each other on the device. A host waits here in one
case in which NCCL's does not: what it posts shares a hardware queue with compute.
"""

import hashlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from nccl_streams import MACHINE, RuleError, Stream
from torch import Tensor

NAME = "nccl-rules"
# bytes of a description that ranks compare
DESCRIBED = 160


# --- one operation --------------------------------------------------------------------------------


class Work(dist._Work):
    """What a host gets for an operation; see the rules `poison` and `untouched`."""

    def __init__(self, stream: Stream, what: str, outputs: list[Tensor], inputs: list[Tensor], run):
        super().__init__()
        # The operation reads and writes its own copies, in another thread, where tensors of an
        # inference mode could not be written to.
        with torch.inference_mode(False):
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
    # `resize_` has freed it
    if x.untyped_storage().size() < x.nbytes:
        return False
    x, y = x.detach().contiguous(), y.contiguous()
    return torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))


def kinds(tensors: list[Tensor]) -> str:
    return ", ".join(f"{list(x.shape)} {str(x.dtype).split('.')[1]}" for x in tensors)


def name_of(op: dist.ReduceOp) -> str:
    return str(op.op).split(".")[-1]


def as_bytes(text: str) -> Tensor:
    """Of one length. A long text is cut, and a hash says what was cut off."""
    data = text.encode()
    if len(data) > DESCRIBED:
        cut = f" .. ({hashlib.sha256(data).hexdigest()[:8]})".encode()
        data = data[: DESCRIBED - len(cut)] + cut
    return torch.frombuffer(bytearray(data.ljust(DESCRIBED)), dtype=torch.uint8)


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
        # kinds of collectives that have a connection
        self.connected: set[str] = set()
        # (sender, receiver): how many messages went this way
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

        self.meet_all(what.split()[0])

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

    def compare_sizes(self, output, output_splits, input, input_splits) -> None:
        """Raises RuleError where a rank sends more or fewer rows than its receiver has room for."""
        sent = torch.tensor(input_splits or [len(input) // self.count] * self.count)
        room = output_splits or [len(output) // self.count] * self.count
        of_all = [torch.empty_like(sent) for _ in range(self.count)]
        self.gloo.allgather([of_all], [sent]).wait()
        for rank, rows in enumerate(of_all):
            if rows[self.me] != room[rank]:
                raise RuleError(
                    f"another size: rank {rank} of {self.stream.name} sends {rows[self.me]} rows,"
                    f" and rank {self.me} has room for {room[rank]}"
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

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None) -> Work:
        def run(results, copies):
            for result, copy in zip(results, copies):
                work = self.gloo._allgather_base(result, copy)
                work.wait()
            return work

        return self.collective(f"all-gathers {kinds(inputs)}", outputs, inputs, run)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None) -> Work:
        opts = opts or dist.ReduceScatterOptions()

        def run(results, copies):
            for result, copy in zip(results, copies):
                work = self.gloo._reduce_scatter_base(result, copy, opts)
                work.wait()
            return work

        what = f"reduce-scatters {name_of(opts.reduceOp)} {kinds(outputs)}"
        return self.collective(what, outputs, inputs, run)

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None) -> Work:
        def run(results, copies):
            self.compare_sizes(output, output_splits, input, input_splits)
            return self.gloo.alltoall_base(results[0], copies[0], output_splits, input_splits)

        what = f"all-to-all {input.dtype}"
        return self.collective(what, [output], [input], run)

    # what torch calls before 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def gather(self, outputs, inputs, opts) -> Work:
        def run(results, copies):
            return self.gloo.gather([results] if results else [], copies, opts)

        flat = outputs[0] if outputs else []
        return self.collective(f"gather to {opts.rootRank} {kinds(inputs)}", flat, inputs, run)

    def scatter(self, outputs, inputs, opts) -> Work:
        def run(results, copies):
            return self.gloo.scatter(results, [copies] if copies else [], opts)

        flat = inputs[0] if inputs else []
        what = f"scatter from {opts.rootRank} {kinds(outputs)}"
        return self.collective(what, outputs, flat, run)

    # --- messages

    def send(self, tensors, peer: int, tag: int) -> Work:
        return self.message("send", tensors[0], self.me, peer)

    def recv(self, tensors, peer: int, tag: int) -> Work:
        return self.message("receive", tensors[0], peer, self.me)

    def message(self, op: str, x: Tensor, sender: int, receiver: int) -> Work:
        return self.start([(op, x, sender, receiver)])

    def start(self, messages: list[tuple]) -> Work:
        """Post (send or receive, tensor, sender, receiver) messages that NCCL starts together."""
        jobs, new = [], []
        for op, x, sender, receiver in messages:
            number = self.messages[sender, receiver]
            self.messages[sender, receiver] += 1
            jobs.append((op, number, kinds([x]), sender + receiver - self.me))
            if number == 0:
                new.append((op, sender, receiver))
        self.meet(new)
        outputs = [x for op, x, *_ in messages if op == "receive"]
        inputs = [x for op, x, *_ in messages if op == "send"]

        def run(results, copies):
            tensors = {"receive": iter(results), "send": iter(copies)}
            with ThreadPoolExecutor(len(jobs)) as threads:
                carried = [threads.submit(self.carry, *job, next(tensors[job[0]])) for job in jobs]
            for one in carried:
                one.result()

        what = "; ".join(f"{op} {number} with {peer}, {kind}" for op, number, kind, peer in jobs)
        return Work(self.stream, what, outputs, inputs, run)

    def carry(self, op: str, number: int, kind: str, peer: int, x: Tensor) -> None:
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
        transfer = self.gloo.send if op == "send" else self.gloo.recv
        transfer([x], peer, 2 * number + 1).wait()

    # --- meetings of hosts

    def meet(self, messages: list[tuple]) -> None:
        """The first message makes a connection: the hosts of both ends wait for each other."""
        other = {"send": "receive", "receive": "send"}
        for op, sender, receiver in messages:
            self.store.set(f"meeting {sender} {receiver} {op}", "here")
        for op, sender, receiver in messages:
            key = f"meeting {sender} {receiver} {other[op]}"
            what = f"{op} from {sender} to {receiver}"
            self.wait_for(lambda key=key: self.store.check([key]), what)

    def meet_all(self, kind: str) -> None:
        """The first collective of a kind makes connections: the hosts of all ranks meet."""
        if kind not in self.connected:
            self.connected.add(kind)
            self.store.add(f"first {kind}", 1)
            self.wait_for(lambda: self.store.add(f"first {kind}", 0) >= self.count, kind)

    def wait_for(self, all_are_here: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.timeout
        while not all_are_here():
            if time.monotonic() > deadline:
                raise RuleError(
                    f"a meeting: the host of rank {self.me} waits in its first {what} of"
                    f" {self.stream.name}, and the other host does not come"
                )
            time.sleep(0.0005)


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
    return [group.start(messages)]


def split_group(
    split_ranks: list[list[int]], timeout: timedelta, pg_options=None
) -> dist.ProcessGroup | None:
    """dist.split_group of all ranks. torch's own splits NCCL's groups only."""
    if len(set(itertools.chain(*split_ranks))) < sum(map(len, split_ranks)):
        raise RuleError(f"split {split_ranks}: a rank is in two of them")
    own = None
    for ranks in split_ranks:
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own


def create(store, rank: int, size: int, timeout: timedelta) -> NCCLRules:
    MACHINE.timeout = MACHINE.timeout or timeout.total_seconds()
    return NCCLRules(store, rank, size, MACHINE.timeout)


def check_waits() -> None:
    """At the end. Raises RuleError for an operation of this process that nobody has waited for."""
    if MACHINE.open:
        whats = sorted(operation.what for operation in MACHINE.open)
        raise RuleError(f"nobody waits for {'; '.join(whats)}")


dist.Backend.register_backend(NAME, create, devices=["cpu"])
one_by_one = dist.batch_isend_irecv
dist.batch_isend_irecv = batch_isend_irecv
dist.split_group = split_group
