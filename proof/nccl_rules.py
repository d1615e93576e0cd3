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
    untouched     an input or output that changes, or is freed, before `wait`: an error
    waits         an operation that nobody waits for: an error at the end (`check_waits`)
    queue         streams share a few hardware queues: an operation that cannot start holds up what
                  was posted behind it in its queue; the compute stream is in queue 0

    ranks.run(function, 2, backend="nccl-rules")

Each stream is a thread (nccl_streams.py), and gloo carries the bytes.

Not covered: tensors of the CPU, which NCCL refuses, and here all are (tests/test_as_rank.py looks
for those); the host waits where it would only enqueue, if what it posts shares a queue with
compute.
"""

import hashlib
import itertools
import time
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from proof.nccl_streams import MACHINE, RuleError, Stream

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
