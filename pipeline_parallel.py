"""Pipeline parallelism: the layers are cut into stages, and micro-batches run through them like
cars through a factory (arXiv 2104.04473, section 2.2).

    rank 0   blocks 0 1   --activation-->   rank 1   blocks 2 3   --activation-->  ..  last rank: head and loss
             embedding    <--gradient----                         <--gradient----

`split` gives this rank its chunks: a chunk is the same `GPT` with everything else left out, under
global names. `Pipeline` runs any schedule of schedules.py: one loop over the list that `lower` made
of it, an action or a transfer at a time. Receives are posted ahead, a send is waited for only when
it has certainly arrived, and then a stage's output is let go: backward needs its graph, not its
values.

Zero-bubble schedules cut backward in two. A matrix multiplication y = x Wᵀ has two gradients, ∂x =
∂y W, which the stage before waits for, and ∂W = ∂yᵀ x, which nobody waits for. `defer_weights`
makes linear layers hand (W, ∂y, x) to a list instead, during I, and W works the list off.

A tied embedding is two parameters here, one on the first stage and one on the last, drawn alike;
`sum_tied` adds their gradients, so that they stay alike. One of them counts in the norm.

    python pipeline_parallel.py        four schedules on two ranks: gradients of one device, measured time lines

What Megatron-LM adds: the data-parallel sum overlapped with the cooldown under zero-bubble
schedules too (here only where B is one action). The times in `events` are the host's: right on
CPUs; on a GPU they would have to be CUDA events."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

import gpt
import schedules
import sharding
from schedules import Action, Event, Schedule, Transfer, lower
from sharding import local_part, set_sharding, sharding_of

# of transfers: activations, gradients
KINDS = {"F": 0, "B": 1}


def layer_split(num_layers: int, p: int, v: int = 1, given: list[int] | None = None) -> list[range]:
    """The layers of each of the p v stages. given: how many in each (a lighter first and last one
    make room for embedding and head); without it an even split. Raises ValueError."""
    stages = p * v
    if given is None:
        if num_layers % stages:
            low = num_layers // stages * stages
            raise ValueError(
                f"num_layers {num_layers}: must be divisible by pp {p} times virtual_stages {v};"
                f" {f'{low} or ' if low else ''}{low + stages} would fit, or layer_split with any"
                " numbers"
            )
        given = [num_layers // stages] * stages
    if len(given) != stages or sum(given) != num_layers or min(given) < 0:
        raise ValueError(
            f"layer_split {given}: must be {stages} numbers (pp {p} times virtual_stages {v}), none"
            f" below 0, that add up to num_layers {num_layers}; these are {len(given)} that add up"
            f" to {sum(given)}"
        )
    for rank in range(1, p - 1):
        if not sum(given[rank::p]):
            raise ValueError(
                f"layer_split {given}: leaves pipeline rank {rank} (stages"
                f" {list(range(rank, stages, p))}) without a layer"
            )
    ends = [sum(given[: i + 1]) for i in range(stages)]
    return [range(end - n, end) for n, end in zip(given, ends)]


def split(
    config: gpt.GPTConfig, rank: int, p: int, v: int = 1, given: list[int] | None = None
) -> list[gpt.GPT]:
    """This rank's chunks, on the meta device; chunk c is stage c p + rank. Raises ValueError as
    `layer_split`."""
    layers = layer_split(config.num_layers, p, v, given)
    chunks = []
    for stage in range(rank, p * v, p):
        with torch.device("meta"):
            chunk = gpt.GPT(config)
        for name in [name for name in chunk.blocks if int(name) not in layers[stage]]:
            del chunk.blocks[name]
        if stage > 0:
            chunk.embedding = None
        if stage < p * v - 1:
            chunk.head = None
        # the tied matrix's second copy: another parameter
        elif stage > 0 and not config.llama:
            chunk.head.output.weight = nn.Parameter(chunk.head.output.weight.detach())
            set_sharding(
                chunk.head.output.weight,
                sharding.Sharding(
                    tuple(chunk.head.output.weight.shape), copy_of="embedding.tokens.weight"
                ),
            )
        chunks.append(chunk)
    return chunks


# --------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b, whose ∂W may wait."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        # the parameter itself: it knows whether its gradient may wait
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        rows = grad.flatten(0, -2)  # [b s, out]
        d_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        d_weight = (
            gpt.weight_gradient(weight, rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        )
        return (grad @ weight if ctx.needs_input_grad[0] else None), d_weight, d_bias


@torch.compiler.disable
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(x, weight, bias)


def defer_weights(chunk: gpt.GPT) -> None:
    """Let the linear layers of a chunk leave their weight gradients to a list where there is one
    (gpt.weight_gradient)."""
    for module in chunk.modules():
        if isinstance(module, nn.Linear):
            bias = None if isinstance(module, gpt.DeferredBiasLinear) else "bias"
            module.forward = lambda x, module=module, bias=bias: _linear(
                x, module.weight, module.bias if bias else None
            )
        # tensor_parallel.RowParallelLinear
        elif hasattr(module, "multiply"):
            module.multiply = _linear


# --------------------------------------------------------------------------------------------------


class Channels:
    """Who sends what through which communicator: for NCCL one for each (sender, receiver, kind), as
    the model in schedules.py supposes; gloo has tags, and one is enough."""

    def __init__(
        self, group: dist.ProcessGroup, groups: dict[tuple, dist.ProcessGroup] | None = None
    ):
        """group: of the p ranks of this pipeline. groups: (sender, receiver, kind) -> group, for
        NCCL (`nccl_groups`)."""
        self.group = group
        self.groups = groups
        self.ranks = dist.get_process_group_ranks(group)

    def send(self, x: Tensor, peer: int, kind: str, tag: int) -> dist.Work:
        group = self.groups[self.group.rank(), peer, kind] if self.groups else self.group
        return dist.isend(x, self.ranks[peer], group=group, tag=tag)

    def receive(self, x: Tensor, peer: int, kind: str, tag: int) -> dist.Work:
        group = self.groups[peer, self.group.rank(), kind] if self.groups else self.group
        return dist.irecv(x, self.ranks[peer], group=group, tag=tag)


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
class _Step:
    """What is on its way in one step. The keys are (kind, stage, micro_batch), or (chunk,
    micro_batch)."""

    forward: Callable
    backward_of_loss: Tensor | None
    # (tensor, work)
    arriving: dict = field(default_factory=dict)
    # tensor, until its send
    departing: dict = field(default_factory=dict)
    # (work, tensor), until it has settled
    sent: dict = field(default_factory=dict)
    # (input, the edge that backward starts from)
    graphs: dict = field(default_factory=dict)
    # weight gradients between I and W
    owed: dict = field(default_factory=dict)


class Pipeline:
    """Runs schedules on this rank's chunks."""

    def __init__(self, chunks: list[gpt.GPT], channels: Channels, slices: int = 1):
        """slices: t where activations are cut along the sequence."""
        self.chunks = chunks
        self.channels = channels
        self.slices = slices
        self.config = chunks[0].config
        self.p = channels.group.size()
        self.rank = channels.group.rank()
        self.v = len(chunks)
        # stage
        self.last = self.p * self.v - 1
        # of the latest run
        self.events: list[Event] = []
        # a schedule, and this rank's program for it
        self.lowered = None, None

    def run(
        self,
        schedule: Schedule,
        forward,
        b: int,
        s: int,
        backward_of_loss=None,
        before_backward=None,
    ) -> None:
        """One step.

        forward(chunk, micro_batch, x) runs chunk number `chunk` on its input x ([b, s, h], None on
        the first stage) and returns the activation for the next stage or, on the last, a scalar. b,
        s: sequences in a micro-batch, and their length. backward_of_loss: the gradient of the
        scalar. before_backward(action): called before each B, I and W."""
        if self.lowered[0] is not schedule:
            self.lowered = schedule, lower(schedule, self.v)[self.rank]
        like = next(self.parameters())
        shape = (b, s // self.slices, self.config.hidden_size)
        step = _Step(forward, backward_of_loss)
        self.events = []
        for x in self.lowered[1]:
            if not isinstance(x, Action):
                self.transfer(
                    step, x, lambda: torch.empty(shape, dtype=like.dtype, device=like.device)
                )
                continue
            received = self.input_of(step, x)
            start = time.perf_counter()
            if x.op != "F" and before_backward:
                before_backward(x)
            {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights}[x.op](
                step, x, received
            )
            self.events.append(Event(self.rank, *x, start, time.perf_counter()))
            # or it would live as long as the next action
            del received

    def stage(self, x: Action) -> int:
        return x.chunk * self.p + self.rank

    def transfer(self, step: "_Step", x: Transfer, empty) -> None:
        what = x[2:]
        tag = (x.micro_batch * self.p * self.v + x.stage) * 2 + KINDS[x.kind]
        if x.op == "receive":
            buffer = empty()
            step.arriving[what] = buffer, self.channels.receive(buffer, x.peer, x.kind, tag)
        elif x.op == "send":
            tensor = step.departing.pop(what).contiguous()
            step.sent[what] = self.channels.send(tensor, x.peer, x.kind, tag), tensor
        # settle
        else:
            step.sent.pop(what)[0].wait()

    def input_of(self, step: "_Step", x: Action) -> Tensor | None:
        """What an action starts from, waited for: an activation for F, a gradient for B and I."""
        if x.op == "W" or self.stage(x) == (0 if x.op == "F" else self.last):
            return None
        tensor, work = step.arriving.pop(
            ("F" if x.op == "F" else "B", self.stage(x), x.micro_batch)
        )
        if work:
            work.wait()
        return tensor

    def forward(self, step: "_Step", x: Action, received: Tensor | None) -> None:
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        y = step.forward(x.chunk, x.micro_batch, received)
        if torch.is_grad_enabled():
            # the graph of y, not its values
            step.graphs[x[1:]] = received, get_gradient_edge(y)
        if self.stage(x) < self.last:
            self.hand_over(step, ("F", self.stage(x) + 1, x.micro_batch), y.detach())

    def backward(self, step: "_Step", x: Action, received: Tensor | None) -> None:
        given, edge = step.graphs.pop(x[1:])
        if x.op == "I":
            step.owed[x[1:]] = []
            self.owe(x.chunk, step.owed[x[1:]])
        torch.autograd.backward(
            edge, step.backward_of_loss if self.stage(x) == self.last else received
        )
        self.owe(x.chunk, None)
        if given is not None:
            self.hand_over(step, ("B", self.stage(x) - 1, x.micro_batch), given.grad)

    def weights(self, step: "_Step", x: Action, received: None) -> None:
        for weight, rows, inner in step.owed.pop(x[1:]):
            # to where autograd would have added it, hooks included
            weight.backward(rows.t() @ inner)

    def owe(self, chunk: int, weights: list | None) -> None:
        for p in self.chunks[chunk].parameters():
            p.owed = weights

    def hand_over(self, step: "_Step", what: tuple[str, int, int], tensor: Tensor) -> None:
        """To the send that follows, or to another chunk of this rank."""
        if what[1] % self.p == self.rank:
            step.arriving[what] = tensor, None
        else:
            step.departing[what] = tensor

    # -- what else needs the whole model -----------------------------------------------------------

    def parameters(self):
        return (p for chunk in self.chunks for p in chunk.parameters())

    def forward_only(self, m: int) -> Schedule:
        """For evaluation: chunk by chunk in groups of p micro-batches."""
        order = [
            Action("F", chunk, k)
            for first in range(0, m, self.p)
            for chunk in range(self.v)
            for k in range(first, min(first + self.p, m))
        ]
        return [order] * self.p

    def evaluate(self, batches: list, result) -> None:
        """Run batches of one size forward; the last stage hands each to result(batch, loss of each
        token [b, s])."""

        def forward(chunk, k, x):
            y = self.chunks[chunk](batches[k].tokens, batches[k].targets, None, x)
            if self.chunks[chunk].head is not None:
                result(batches[k], y)
            return y

        self.run(self.forward_only(len(batches)), forward, *batches[0].tokens.shape)

    def sum_tied(self) -> None:
        """Add the gradients of the two copies of a tied embedding, on both stages alike (a + b is b
        + a to the last bit). After the data-parallel sum."""
        mine = (
            [p for _, p in sharding.named_parameters(*self.chunks) if sharding_of(p).copy_of]
            if self.rank == self.p - 1
            else []
        )
        if self.rank == 0 and not self.config.llama:
            mine = [local_part(self.chunks[0].embedding.tokens.weight)]
        for p in (p for p in mine if p.requires_grad):
            peer = self.p - 1 - self.rank
            other = torch.empty_like(p.main_grad)
            sending = self.channels.send(p.main_grad.contiguous(), peer, "B", 0)
            self.channels.receive(other, peer, "B", 0).wait()
            sending.wait()
            p.main_grad.add_(other)


# --------------------------------------------------------------------------------------------------


def _lesson(rank: int, name: str, p: int, m: int):
    """One step of a schedule, by hand: what train.py does, without the rest."""
    config = gpt.GPTConfig(
        num_layers=8, hidden_size=256, num_heads=8, seq_length=128, vocab_size=257, dropout=0.1
    )
    chunks = split(config, rank, p, 2 if name == "interleaved" else 1)
    for chunk in chunks:
        if name == "zb-h1":
            defer_weights(chunk)
        sharding.init(chunk, 0, "cpu", torch.float32)
    tokens = torch.randint(257, (m, 129), generator=torch.Generator().manual_seed(0))
    total = torch.zeros(())

    def forward(chunk, k, x):
        inputs = tokens[k : k + 1, :-1]
        targets = tokens[k : k + 1, 1:]
        y = chunks[chunk](inputs, targets, gpt.dropout_key(0, 1, torch.tensor([k])), x)
        if chunks[chunk].head is None:
            return y
        total.add_(y.detach().sum() / (m * 128))
        return y.sum()

    if p == 1:
        for k in range(m):
            forward(0, k, None).backward(torch.tensor(1 / (m * 128)))
        return total.item(), {n: q.grad for n, q in sharding.named_parameters(*chunks)}, [], []
    pipeline = Pipeline(chunks, Channels(dist.group.WORLD))
    schedule = schedules.make(name, p, m, len(chunks))
    # the first is for warming up
    for _ in range(2):
        total.zero_()
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        dist.barrier()
        pipeline.run(schedule, forward, 1, 128, torch.tensor(1 / (m * 128)))
    for q in pipeline.parameters():
        # what sum_tied adds to; in training, optimizer.py has it
        q.main_grad = q.grad
    pipeline.sum_tied()
    events = [None] * p
    dist.all_gather_object(events, pipeline.events)
    return (
        total.item(),
        {n: q.grad for n, q in sharding.named_parameters(*chunks)},
        [e for one in events for e in one],
        schedules.in_flight(schedule),
    )


def main():
    from lessons import ranks

    p = 2
    m = 4
    ((loss, one, _, _),) = ranks.run(_lesson, 1, "1f1b", 1, m)
    print(
        f"a GPT (h 256, L 8, s 128, dropout 0.1, tied embeddings), {m} micro-batches of 1; on one"
        f" rank the loss is {loss:.6f}; on {p} ranks:"
    )
    for name in schedules.NAMES:
        v = 2 if name == "interleaved" else 1
        results = ranks.run(_lesson, p, name, p, m)
        found = {n: g for _, gradients, _, _ in results for n, g in gradients.items()}
        # exactly 0 there
        worst = max(
            ((found[n] - g).abs().max() / g.abs().max()).item()
            for n, g in one.items()
            if not n.endswith("key.bias")
        )
        events = results[0][2]
        first = min(e.start for e in results[0][2])
        events = sorted(
            (e._replace(start=e.start - first, end=e.end - first) for e in events),
            key=lambda e: e.start,
        )
        print(
            f"\n{name}{f', v = {v}' if v > 1 else ''}: loss {sum(r[0] for r in results):.6f},"
            f" largest relative difference of a gradient {worst:.1e}; in flight {results[0][3]};"
            f" bubble {schedules.bubble(events):.2f} measured,"
            f" {schedules.bubble_formula(name, p, m, v):.2f} by formula"
        )
        print(schedules.text(events, max(e.end for e in events) / 50))


if __name__ == "__main__":
    main()
