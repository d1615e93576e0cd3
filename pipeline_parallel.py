"""Pipeline parallelism: the layers are split into stages, and micro-batches run through the stages
one after the other (arXiv 2104.04473, section 2.2).

    rank 0   embedding    --activation-->   rank 1   blocks 2 3   --activation-->  ..  last rank:
             blocks 0 1   <--gradient----                         <--gradient----      head, loss

    time ->   rank 0   F0 F1 .. B0 .. B1     F: forward of a micro-batch, B: its backward, 1 column
              rank 1   .. F0 B0 F1 B1 ..     each; .. is the bubble: the rank waits (schedule 1F1B)

Terms: a rank is one process. Each of p ranks holds v stages (v > 1: virtual stages). The stage is
the number in the whole model, the chunk the number on this rank; schedules.Placement turns one into
the other. A batch is split into m micro-batches.

`apply` makes this rank's stages out of a whole model that is still on the meta device (shapes, no
values). A stage is that GPT with the other layers left out; block 2 is still called `blocks.2`.
`Pipeline` runs any schedule of schedules.py: a list of actions for each rank. `add_transfers` adds
the messages that the actions need, and one loop runs the list:

    F       run the stage on the activation received; its output goes to the next stage
    B       backward of the stage from the gradient received; the gradient of its input goes back
    I, W    the two halves of B: input gradient, and later weight gradients (last section)

    python -m course.pipeline_parallel     a lesson: six schedules on two ranks; sends and receives
    picture: docs/figures/ranks_pipeline.svg

After a stage's forward only the autograd graph of its output is kept, not the output itself:
`get_gradient_edge(y)` is where backward starts, and the values of y are freed once they are sent.

A tied matrix is two parameters here: the embedding's on the first stage, the head's on the last.
Both get their initial values under the embedding's name, so they begin equal. `sum_tied` adds their
gradients, so they stay equal. The gradient norm counts only one of them. Where one rank has both
ends of the model (a V), the two are one tensor (`share_tied`), and only the gradients are two.

The times in `events` are the host's: right on CPUs; on a GPU they would have to be CUDA events.

Not covered: starting the data-parallel sum before the last W under zero-bubble schedules; sends and
receives of neighbours that are fused to one call (Megatron-LM has both); ZB-H2.
"""

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import gpt
import sequence_parallel
import sharding
import tensor_parallel
from base.groups import all_gather
from base.model_config import FieldError, multiples_near
from schedules import (
    DIRECTION,
    Action,
    Event,
    Pair,
    Placement,
    Schedule,
    actions_of,
    join_pairs,
    result_of,
)
from sharding import local_part, set_sharding, sharding_of

# === transfers: sends and receives of a schedule ==================================================
#
# schedules.py says what each rank computes, and in which order. A stage's output is the next
# stage's input, so it must be sent where these stages are on different ranks. `add_transfers` puts
# three types of entries between the actions of a rank:
#
#     receive     posted one action before the one that needs the tensor; it travels meanwhile
#     send        right after the action that computes the tensor
#     settle      waits until a send is complete, and frees its tensor; it stands where the schedule
#                 proves that the receiver has the tensor already, or at the end of the list
#
#     rank 0: F0; send F0; receive B0; F1; send F1; receive B1; B0; settle F0; B1; settle F1
#     rank 1: receive F0; F0; receive F1; B0; send B0; F1; B1; send B1; settle B0; settle B1
#
# F0 is the activation of micro-batch 0, B0 the gradient that comes back. A message proves its
# sender's progress: it has run all actions before that send. When rank 0 has B0, it knows that rank
# 1 has read F0, and the send of F0 is settled without a wait.
#
# On GPUs a wrong order hangs: a rank waits for a message, and its peer for another.
# course/nccl_model.py runs the programs of all ranks by the rules of NCCL, so that a deadlock is a
# failed simulation on a laptop and not a hang on a cluster.

# --- from actions to sends and receives -----------------------------------------------------------


class MessageKey(NamedTuple):
    """Names a message by what uses it. ("F", 2, 5) is the activation that stage 2 needs for F of
    micro-batch 5; ("B", 2, 5) is the gradient that it needs for B, or for I."""

    kind: str
    stage: int
    micro_batch: int


class Transfer(NamedTuple):
    """An entry of a rank's program that communicates."""

    op: str  # send, receive or settle
    peer: int  # the rank at the other end
    kind: str  # from here on as in MessageKey
    stage: int
    micro_batch: int

    @property
    def key(self) -> MessageKey:
        return MessageKey(self.kind, self.stage, self.micro_batch)


# The result of `add_transfers` for one rank.
Program = list[Action | Transfer | Pair]


class Message(NamedTuple):
    """An activation (kind F) or a gradient (kind B) that one rank sends to another."""

    sender: int
    receiver: int
    kind: str
    stage: int  # the stage that receives it
    micro_batch: int
    number: int  # earlier messages of this kind from this sender to this receiver
    sent_at: int  # position, in the sender's list, of the action that computes it
    used_at: int  # position, in the receiver's list, of the action that needs it

    def transfer(self, op: str) -> Transfer:
        peer = self.sender if op == "receive" else self.receiver
        return Transfer(op, peer, self.kind, self.stage, self.micro_batch)


def add_transfers(
    schedule: Schedule, placement: Placement | None = None, ahead: int = 1
) -> list[Program]:
    """Add the sends and receives to the lists of a schedule.

    ahead: how many actions before its use a receive is posted. With more than 1 a run on GPUs can
    hang (course/nccl_model.py). Receives from one peer and of one kind are posted in the order in
    which that peer sends them, as NCCL requires. placement: by default looped, one chunk on each
    rank.
    """
    placement = placement or Placement(len(schedule))
    messages = _messages(schedule, placement)
    return [
        _program(rank, actions, messages, placement, ahead) for rank, actions in enumerate(schedule)
    ]


def _messages(schedule: Schedule, placement: Placement) -> dict[MessageKey, Message]:
    """All messages between ranks; those of one sender in the order of sending.

    F of stage k needs what F of stage k - 1 sends: the message has the key ("F", k, micro_batch).
    """
    position_of = {
        result_of(action, rank, placement): position
        for rank, actions in enumerate(schedule)
        for position, action in enumerate(actions)
    }
    messages = {}
    counts = Counter()
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            kind, stage, k = result_of(action, rank, placement)
            goes_to = stage + DIRECTION[action.op]
            receiver = placement.rank_of(goes_to)
            if 0 <= goes_to <= placement.last_stage and receiver != rank:
                number = counts[rank, receiver, kind]
                counts[rank, receiver, kind] += 1
                used_at = position_of[kind, goes_to, k]
                messages[MessageKey(kind, goes_to, k)] = Message(
                    rank, receiver, kind, goes_to, k, number, position, used_at
                )
    return messages


def _program(
    rank: int,
    actions: list[Action],
    messages: dict[MessageKey, Message],
    placement: Placement,
    ahead: int,
) -> Program:
    """One rank's list with its communication; see `add_transfers`."""
    # The message that each action needs; None where it needs none.
    incoming = [messages.get(result_of(action, rank, placement)) for action in actions]
    # {position of an action: the message that follows it}
    outgoing = {message.sent_at: message for message in messages.values() if message.sender == rank}
    # {(sender, kind): messages in the order of sending}, and how many receives are posted.
    in_order = defaultdict(list)
    posted = Counter()
    for message in messages.values():
        if message.receiver == rank:
            in_order[message.sender, message.kind].append(message)
    # Sends that may not have arrived yet.
    unsettled: list[Message] = []
    program: Program = []
    for position, action in enumerate(actions):
        for needed in filter(None, incoming[position : position + ahead + 1]):
            channel = needed.sender, needed.kind
            while posted[channel] <= needed.number:
                program.append(in_order[channel][posted[channel]].transfer("receive"))
                posted[channel] += 1
        program.append(action)
        proof = incoming[position]
        if proof:
            arrived = [
                sent
                for sent in unsettled
                if sent.receiver == proof.sender and sent.used_at <= proof.sent_at
            ]
            program += [sent.transfer("settle") for sent in arrived]
            unsettled = [sent for sent in unsettled if sent not in arrived]
        if position in outgoing:
            program.append(outgoing[position].transfer("send"))
            unsettled.append(outgoing[position])
    return program + [sent.transfer("settle") for sent in unsettled]


# === the pipeline =================================================================================

# --- stages ---------------------------------------------------------------------------------------

# The first copy of a tied matrix.
TIED = "embedding.tokens.weight"


def stage_of(model: gpt.GPT, layers: range, first: bool, last: bool) -> gpt.GPT:
    """A part of a model: some of its blocks, and the embedding on the first stage, the head on the
    last one; elsewhere these are None. Every other child (T5's positions) is on each stage: after
    the first as a copy, as `untie` makes one. `sum_shared` adds their gradients."""
    stage = copy.copy(model)
    stage._modules = dict(model._modules)
    stage.embedding = model.embedding if first else None
    stage.blocks = nn.ModuleDict({str(n): model.blocks[str(n)] for n in layers})
    stage.head = model.head if last else None
    # Whether the last stage has a copy of the first stage's embedding.
    stage.tied = model.config.tied
    for child, module in shared_children(model):
        stage._modules[child] = module = copy.deepcopy(module)
        for name, p in module.named_parameters():
            if not first:
                set_sharding(p, sharding.Sharding(tuple(p.shape), copy_of=f"{child}.{name}"))
    return stage


def shared_children(model: gpt.GPT) -> list[tuple[str, nn.Module]]:
    """The children that are neither embedding nor blocks nor head."""
    parts = ("embedding", "blocks", "head")
    return [(name, child) for name, child in model.named_children() if name not in parts]


def check(num_layers: int, placement: Placement, layer_split: list[int] | None = None) -> None:
    """Raises FieldError if the layers cannot be split into p v stages, or not as given."""
    p, v, _ = placement
    stages = p * v
    sizes = {"pp": p, "virtual_stages": v}
    if layer_split is None:
        if num_layers % stages:
            fits = multiples_near(num_layers, stages)
            rule = "must be divisible by {pp} times {virtual_stages}, unless {layer_split} is given"
            raise FieldError("num_layers", num_layers, rule, fits, **sizes, layer_split=None)
        return
    total = sum(layer_split)
    if len(layer_split) != stages or total != num_layers or min(layer_split) < 0:
        rule = (
            f"must be {stages} numbers ({{pp}} times {{virtual_stages}}), none below 0, that add "
            f"up to {{num_layers}}; these are {len(layer_split)} that add up to {total}"
        )
        raise FieldError("layer_split", layer_split, rule, num_layers=num_layers, **sizes)
    # The first and the last stage have the embedding and the head.
    ends = placement.rank_of(0), placement.rank_of(placement.last_stage)
    for rank in range(p):
        empty = [placement.stage_of(rank, chunk) for chunk in range(v)]
        if rank not in ends and not sum(layer_split[stage] for stage in empty):
            rule = f"leaves pipeline rank {rank} (stages {empty}) without a layer"
            raise FieldError("layer_split", layer_split, rule)


def layers_of_stages(
    num_layers: int, placement: Placement, layer_split: list[int] | None = None
) -> list[range]:
    """The layers of each of the p v stages. layer_split: how many in each (fewer at the ends
    balance embedding and head); the default is an even split. Raises FieldError as `check`."""
    check(num_layers, placement, layer_split)
    stages = placement.p * placement.v
    split = layer_split or [num_layers // stages] * stages
    ends = [sum(split[: i + 1]) for i in range(stages)]
    return [range(end - n, end) for n, end in zip(split, ends)]


def apply(
    model: gpt.GPT, rank: int, placement: Placement, layer_split: list[int] | None = None
) -> list[gpt.GPT]:
    """Split a model on the meta device. Returns this rank's v stages, in the order of chunks.
    Raises FieldError as `check`."""
    layers = layers_of_stages(model.config.num_layers, placement, layer_split)
    last = placement.last_stage
    stages = []
    for number in (placement.stage_of(rank, chunk) for chunk in range(placement.v)):
        stage = stage_of(model, layers[number], first=number == 0, last=number == last)
        if stage.head is not None and stage.embedding is None and model.config.tied:
            untie(stage.head)
        stages.append(stage)
    return stages


def untie(head: gpt.Head) -> None:
    """Make the last stage's copy of a tied matrix a separate parameter. Its sharding record names
    the original: initial values, checkpoints and the gradient norm read that."""
    weight = nn.Parameter(head.output.weight.detach())
    record = sharding.Sharding(tuple(weight.shape), copy_of=TIED)
    head.output.weight = set_sharding(weight, record)


def share_tied(stages: list[gpt.GPT]) -> None:
    """Give both copies of a tied matrix one storage where a rank has the first and the last stage.
    Call it when the stages have values. Optimizer and checkpoints then see the first copy alone
    (sharding.named_parameters)."""
    if len(stages) > 1 and len(copies := tied_copies(stages)) == 2:
        copies[1].data = copies[0].data


def tied_copies(stages: list[gpt.GPT]) -> list[Tensor]:
    """A rank's copies of the tied matrix, or of its local shard if fsdp.py shards it: one on the
    first stage, one on the last."""
    if not stages[0].tied:
        return []
    named = [item for stage in stages for item in stage.named_parameters()]
    return [local_part(p) for name, p in named if TIED in (name, sharding_of(p).copy_of)]


# --- communication --------------------------------------------------------------------------------


class Channels:
    """The communicator (process group) of each message.

    NCCL runs the messages of one communicator in order, and has no tags. With one communicator for
    each (sender, receiver, kind), activations and gradients do not wait for each other. gloo has
    tags, so one group is enough.
    """

    def __init__(
        self, group: dist.ProcessGroup, groups: dict[tuple, dist.ProcessGroup] | None = None
    ):
        """group: the p ranks of this pipeline. groups: (sender, receiver, kind) -> group, for NCCL
        (`groups.nccl_groups`)."""
        self.group = group
        self.groups = groups
        self.ranks = dist.get_process_group_ranks(group)

    def send(self, x: Tensor, peer: int, kind: str, tag: int) -> dist.Work | None:
        group = self.groups[self.group.rank(), peer, kind] if self.groups else self.group
        return dist.isend(x, self.ranks[peer], group=group, tag=tag)

    def receive(self, x: Tensor, peer: int, kind: str, tag: int) -> dist.Work | None:
        group = self.groups[peer, self.group.rank(), kind] if self.groups else self.group
        return dist.irecv(x, self.ranks[peer], group=group, tag=tag)


# Tensor-parallel ranks have equal activations, unless sequence parallelism shards them. So each
# sends 1/t of one to the next stage, over its own adapter, and the next stage's ranks all-gather it
# over the node's links: the scatter/gather optimisation of arXiv 2104.04473, section 4.1.


def message_shape(shape: tuple[int, ...], group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Of a message that carries a tensor of this shape: the same where t does not divide it."""
    t, n = group.size() if group else 1, math.prod(shape)
    return shape if t == 1 or n % t else (n // t,)


def scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part of an activation or gradient, in a message."""
    shape = message_shape(x.shape, group)
    # A copy, so that the whole can be freed.
    return x.contiguous() if shape == x.shape else x.reshape(-1, *shape)[group.rank()].clone()


def gather(part: Tensor, shape: tuple[int, ...], group: dist.ProcessGroup | None) -> Tensor:
    """The tensor of this shape, of which each rank has received a part. A collective."""
    if part.shape == shape:
        return part
    whole = part.new_empty(shape)
    all_gather(whole.view(-1), part, group=group)
    return whole


# --- running a schedule ---------------------------------------------------------------------------


@dataclass
class _Step:
    """One step's mailboxes: tensors that have arrived, that are to be sent or were sent, and graphs
    that wait for their backward.

    Messages are found by their MessageKey; graphs and deferred gradients by (chunk, micro_batch).
    """

    run_stage: Callable
    loss_grad: Tensor | None
    shape: tuple[int, int, int]  # of an activation on this rank
    arriving: dict = field(default_factory=dict)  # {message: (tensor, work)}
    departing: dict = field(default_factory=dict)  # {message: tensor}, until it is sent
    sent: dict = field(default_factory=dict)  # {message: (tensor, work)}, until it settles
    # {(chunk, micro-batch): (input, edge of the output)}
    graphs: dict = field(default_factory=dict)
    # {(chunk, micro-batch): weight gradients}, from I to W
    deferred: dict = field(default_factory=dict)


class Pipeline:
    """Runs schedules on this rank's stages."""

    def __init__(
        self,
        stages: list[gpt.GPT],
        channels: Channels,
        placement: Placement,
        sequence_shards: int = 1,
        overlap: bool = False,
        scatter_group: dist.ProcessGroup | None = None,
    ):
        """sequence_shards: the number of shards of an activation along the sequence. overlap: join
        an F and the B that follows it (`join_pairs`). scatter_group: the tensor-parallel ranks that
        have equal activations, if there are any."""
        self.stages = stages
        self.channels = channels
        self.scatter_group = scatter_group
        self.sequence_shards = sequence_shards
        self.config = stages[0].config
        self.placement = placement
        self.p, self.v, _ = placement
        self.rank = channels.group.rank()
        self.last_stage = placement.last_stage
        # The events of the latest run.
        self.events: list[Event] = []
        # The latest schedule, and this rank's program for it.
        self.schedule: Schedule | None = None
        self.program: Program = []
        self.turns = None
        if overlap:
            from base.turns import Turns

            self.turns = Turns()
            for stage in stages:
                for module in stage.modules():
                    if hasattr(module, "turns"):
                        module.turns = self.turns

    def run(
        self,
        schedule: Schedule,
        run_stage: Callable,
        b: int,
        s: int,
        loss_grad: Tensor | None = None,
        before_backward: Callable | None = None,
    ) -> None:
        """Run one step.

        run_stage(chunk, micro_batch, x): runs this rank's chunk on its input x ([b, s, h], None on
        the first stage). It returns the activation for the next stage or, on the
        last one, a scalar (any value in evaluation, which has no backward). b, s: sequences in a
        micro-batch, and their length. loss_grad: the gradient of the scalar.
        before_backward(action): called before each B, I and W. There train.py announces that a
        stage's gradients may be summed over the data-parallel ranks.
        """
        # The transfers are added once, as long as the same list comes again.
        if self.schedule is not schedule:
            program = add_transfers(schedule, self.placement)[self.rank]
            self.schedule, self.program = schedule, join_pairs(program) if self.turns else program
        shape = b, s // self.sequence_shards, self.config.hidden_size
        step = _Step(run_stage, loss_grad, shape)
        self.events = []
        for item in self.program:
            if isinstance(item, Transfer):
                self.transfer(step, item)
                continue
            actions = actions_of(item)
            parts = [partial(self.act, step, a, self.wait_for_input(step, a)) for a in actions]
            start = time.perf_counter()
            if actions[-1].op != "F" and before_backward:
                before_backward(actions[-1])
            if len(parts) == 1:
                parts[0]()
            else:
                self.turns.together(*parts)
            end = time.perf_counter()
            self.events += [Event(self.rank, *a, start, end) for a in actions]
            # This frees the activation or gradient now, not when the next action rebinds the name.
            del parts

    def act(self, step: _Step, action: Action, received: Tensor | None) -> None:
        if action.op == "F":
            self.forward(step, action, received)
        elif action.op == "W":
            self.weight_gradients(step, action)
        else:
            self.backward(step, action, received)

    def stage_of(self, action: Action) -> int:
        return self.placement.stage_of(self.rank, action.chunk)

    def transfer(self, step: _Step, transfer: Transfer) -> None:
        message = transfer.key
        # Each message of a step has its own tag.
        number = transfer.micro_batch * self.p * self.v + transfer.stage
        tag = 2 * number + (transfer.kind == "B")
        if transfer.op == "receive":
            like = next(self.parameters())
            size = message_shape(step.shape, self.scatter_group)
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            work = self.channels.receive(buffer, transfer.peer, transfer.kind, tag)
            step.arriving[message] = buffer, work
        elif transfer.op == "send":
            tensor = scatter(step.departing.pop(message), self.scatter_group)
            work = self.channels.send(tensor, transfer.peer, transfer.kind, tag)
            step.sent[message] = tensor, work
        else:
            # Returns at once where a message has proved it; at the end of the list it waits.
            step.sent.pop(message)[1].wait()

    def wait_for_input(self, step: _Step, action: Action) -> Tensor | None:
        """The input of an action: an activation for F, a gradient for B and I, else None."""
        stage = self.stage_of(action)
        # The first stage's F and the last stage's B receive nothing.
        begins = 0 if action.op == "F" else self.last_stage
        if action.op == "W" or stage == begins:
            return None
        kind = "F" if action.op == "F" else "B"
        tensor, work = step.arriving.pop(MessageKey(kind, stage, action.micro_batch))
        if work is None:
            return tensor
        work.wait()
        return gather(tensor, step.shape, self.scatter_group)

    def forward(self, step: _Step, action: Action, received: Tensor | None) -> None:
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        y = step.run_stage(action.chunk, action.micro_batch, received)
        if torch.is_grad_enabled():
            # The edge holds the graph of y, not its values. A first stage may have nothing to
            # learn.
            edge = get_gradient_edge(y) if y.requires_grad else None
            step.graphs[action.chunk, action.micro_batch] = received, edge
        stage = self.stage_of(action)
        if stage < self.last_stage:
            self.hand_over(step, MessageKey("F", stage + 1, action.micro_batch), y.detach())

    def backward(self, step: _Step, action: Action, received: Tensor | None) -> None:
        key = action.chunk, action.micro_batch
        x, edge = step.graphs.pop(key)
        if action.op == "I":
            step.deferred[key] = []
            self.defer(action.chunk, step.deferred[key])
        stage = self.stage_of(action)
        grad = step.loss_grad if stage == self.last_stage else received
        if edge is not None:
            torch.autograd.backward(edge, grad)
        self.defer(action.chunk, None)
        if x is not None:
            self.hand_over(step, MessageKey("B", stage - 1, action.micro_batch), x.grad)

    def weight_gradients(self, step: _Step, action: Action) -> None:
        for weight, grad_output, x in step.deferred.pop((action.chunk, action.micro_batch)):
            gradient = sequence_parallel.weight_gradient(weight, grad_output, x)
            if gradient is not None:
                # A backward call adds to weight.grad and runs the weight's hooks.
                weight.backward(gradient)

    def defer(self, chunk: int, deferred: list | None) -> None:
        """Set the list of deferred gradients on a stage's weights, or remove it (None). While a
        weight has one, its linear layer appends (weight, ∂y, x) instead of computing ∂W."""
        for weight in self.stages[chunk].parameters():
            weight.deferred = deferred

    def hand_over(self, step: _Step, message: MessageKey, tensor: Tensor) -> None:
        """Store a result for the send that follows, or for another stage of this rank."""
        if self.placement.rank_of(message.stage) == self.rank:
            step.arriving[message] = tensor, None
        else:
            step.departing[message] = tensor

    # -- evaluation and tied weights ---------------------------------------------------------------

    def parameters(self):
        return (p for stage in self.stages for p in stage.parameters())

    def forward_only(self, m: int) -> Schedule:
        """The schedule of evaluation: p micro-batches run through one stage, then through the next.
        So every rank has work, and few activations wait."""
        order = []
        for first in range(0, m, self.p):
            for chunk in range(self.v):
                group = range(first, min(first + self.p, m))
                order += [Action("F", chunk, k) for k in group]
        return [order] * self.p

    def evaluate(self, batches: list, result: Callable, s: int) -> None:
        """Run the forward of batches of one size; the caller turns gradients off. The last stage
        calls result(batch, loss of each token [b, s]). s: the length of the whole sequence."""

        def run_stage(chunk, k, x):
            stage = self.stages[chunk]
            batch = batches[k]
            y = stage(batch.tokens, batch.targets, batch.context(), x)
            if stage.head is not None:
                result(batch, y)
            return y

        self.run(self.forward_only(len(batches)), run_stage, len(batches[0].tokens), s)

    def sum_tied(self) -> None:
        """Add the gradients of the two copies of a tied matrix, on both ranks. a + b equals b + a
        to the last bit, so the copies stay equal."""
        copies = [weight for weight in tied_copies(self.stages) if weight.requires_grad]
        if len(copies) == 2:
            # One tensor (`share_tied`): the optimizer reads the first gradient.
            copies[0].main_grad.add_(copies[1].main_grad)
            return
        for weight in copies:
            peer = self.p - 1 - self.rank
            other = torch.empty_like(weight.main_grad)
            sending = self.channels.send(weight.main_grad.contiguous(), peer, "B", 0)
            self.channels.receive(other, peer, "B", 0).wait()
            sending.wait()
            weight.main_grad.add_(other)

    def sum_copies(self) -> None:
        """Add the gradients of parameters that several stages have. Call it when the step's
        messages are done, and after the data-parallel sum has filled `main_grad` (optimizer.py)."""
        self.sum_tied()
        self.sum_shared()

    def sum_shared(self) -> None:
        """Add the gradients of the parameters of which every stage has a copy."""
        for _, child in shared_children(self.stages[0]):
            for p in map(local_part, child.parameters()):
                if p.requires_grad:
                    if p.main_grad is None:  # this stage has no block
                        wide = torch.promote_types(p.dtype, torch.float32)
                        p.main_grad = torch.zeros_like(p, dtype=wide)
                    dist.all_reduce(p.main_grad, group=self.channels.group)


def stages_of(model: gpt.GPT | Pipeline) -> list[gpt.GPT]:
    """This rank's stages; a model that is not a pipeline is one stage."""
    return [model] if isinstance(model, gpt.GPT) else model.stages


# === zero bubble: backward in two parts ===========================================================
#
# Zero-bubble pipelines split backward in two (Qi et al., arXiv 2401.10241).
#
# A matrix multiplication y = x Wᵀ has two gradients:
#
#     I    ∂x = ∂y W       the previous stage waits for it
#     W    ∂W = ∂yᵀ x      no stage waits for it
#
# So a schedule can run I as soon as ∂y arrives, and use the time in which a rank would wait for W:
#
#     1f1b     rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
#     zb-h1    rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
#
# with p = 3 and m = 4. B is I and W together: two slots (--). In a slot .. the rank waits.
#
# During I a linear layer appends (weight, ∂y, x) to the list that the pipeline has put on its
# weight (`weight.deferred`); during W the pipeline processes the list. Without a list the weight
# gradient is computed at once. Gradients of biases and norms stay with I. The layer is that of
# sequence_parallel.py, here without communication.


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, whose weight gradient may be deferred."""
    (y,) = sequence_parallel.linear(x, weight, bias)
    return y


def linear_of_module(self: nn.Linear, x: Tensor) -> Tensor:
    """The forward of nn.Linear and of gpt.DeferredBiasLinear with this `linear`."""
    bias = None if isinstance(self, gpt.DeferredBiasLinear) else self.bias
    return linear(x, self.weight, bias)


def split_backward(model: gpt.GPT) -> None:
    """Let the linear layers of a model, or of a stage, defer their weight gradients; in place.

    Call it after sequence_parallel.overlap_backward, whose layers defer too, and before
    recompute.apply.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is gpt.ProjectTogether:
                setattr(parent, name, sequence_parallel.JoinedProjection())
    for module in model.modules():
        # A frozen weight has no gradient to defer.
        if type(module) in (nn.Linear, gpt.DeferredBiasLinear) and module.weight.requires_grad:
            module.forward = MethodType(linear_of_module, module)
        # The layer of fp8.py has another `linear`, which defers too.
        if isinstance(module, tensor_parallel.RowParallelLinear) and module.linear is F.linear:
            module.linear = linear
