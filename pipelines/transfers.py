"""The sends and receives of a pipeline schedule, derived from its lists of actions.

schedules.py says what each rank computes, and in which order. A stage's output is the next stage's
input, so where these stages are on different ranks it must be sent. `lower` puts three kinds of
entries between the actions of a rank:

    receive     posted one action before the one that needs the tensor, so that it travels meanwhile
    send        right after the action that computes the tensor
    settle      waits until a send is complete, and frees its tensor; it comes where the schedule
                shows that the receiver has the tensor already, or at the end of the list

    rank 0: F0; send F0; receive B0; F1; send F1; receive B1; B0; settle F0; B1; settle F1
    rank 1: receive F0; F0; receive F1; B0; send B0; F1; B1; send B1; settle B0; settle B1

F0 is the activation of micro-batch 0, B0 the gradient that comes back. When rank 0 has B0, it knows
that rank 1 has read F0: the send of F0 is settled without a wait.

On GPUs a wrong order hangs: a rank waits for a message, and its peer for another. nccl_model.py
runs the programs of all ranks by the rules of NCCL, so that a deadlock is a failed simulation on a
laptop and not a hang on a cluster.

    python pipeline_parallel.py        the lesson of this file and of pipeline_parallel.py

Not covered: in Megatron-LM communication stands between the lines of the schedule itself, with
sends and receives of neighbours fused to one call.
"""

if __name__ == "__main__":
    from base import start

    start.lesson("pipeline_parallel")

from collections import Counter, defaultdict
from typing import NamedTuple

from schedules import DIRECTION, Action, Schedule, result_of

# --- sends and receives ---------------------------------------------------------------------------


class Transfer(NamedTuple):
    """An entry of a rank's program that communicates."""

    # send, receive or settle
    op: str
    # the rank at the other end
    peer: int
    # F for an activation, B for a gradient
    kind: str
    # the stage that it goes to
    stage: int
    micro_batch: int


# what `lower` makes of one rank's list
Program = list[Action | Transfer]


class Message(NamedTuple):
    """An activation (kind F) or a gradient (kind B) that one rank sends to another."""

    sender: int
    receiver: int
    kind: str
    # the stage that it goes to
    stage: int
    micro_batch: int
    # how many messages of this kind the sender has sent to the receiver before
    number: int
    # the position, in the sender's list, of the action that computes it
    sent_at: int
    # the position, in the receiver's list, of the action that needs it
    used_at: int

    def transfer(self, op: str) -> Transfer:
        peer = self.sender if op == "receive" else self.receiver
        return Transfer(op, peer, self.kind, self.stage, self.micro_batch)


def lower(schedule: Schedule, v: int = 1, ahead: int = 1) -> list[Program]:
    """The lists with their sends and receives.

    A send follows the action that computes its content. A receive is posted `ahead` actions before
    the one that needs it. With 1 a message travels while the action before is computed; with 2 GPUs
    can hang (nccl_model.py). Receives from one peer and of one kind are posted in the order in
    which that peer sends them, as NCCL requires.

    A message from a rank shows that this rank has run all actions of its list that come before the
    send. So the tensors that those actions needed have arrived there, and their sends are settled.
    """
    p = len(schedule)
    messages = _messages(schedule, v)
    return [_program(rank, actions, messages, p, ahead) for rank, actions in enumerate(schedule)]


def _messages(schedule: Schedule, v: int) -> dict[tuple[str, int, int], Message]:
    """Everything that goes from rank to rank, by (kind, stage that it goes to, micro_batch); those
    of one sender in the order of sending. A message has the key of the action that needs it: F of
    stage k needs what F of stage k - 1 sends, and both have the key ("F", k, micro_batch)."""
    p = len(schedule)
    position_of = {
        result_of(action, rank, p): position
        for rank, actions in enumerate(schedule)
        for position, action in enumerate(actions)
    }
    messages = {}
    counts = Counter()
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            kind, stage, k = result_of(action, rank, p)
            goes_to = stage + DIRECTION[action.op]
            receiver = goes_to % p
            if 0 <= goes_to < p * v and receiver != rank:
                number = counts[rank, receiver, kind]
                counts[rank, receiver, kind] += 1
                used_at = position_of[kind, goes_to, k]
                messages[kind, goes_to, k] = Message(
                    rank, receiver, kind, goes_to, k, number, position, used_at
                )
    return messages


def _program(
    rank: int,
    actions: list[Action],
    messages: dict[tuple[str, int, int], Message],
    p: int,
    ahead: int,
) -> Program:
    """One rank's list with its communication; see `lower`."""
    # the message that each action needs, None where it needs none
    incoming = [messages.get(result_of(action, rank, p)) for action in actions]
    # the message that follows an action, by the action's position
    outgoing = {message.sent_at: message for message in messages.values() if message.sender == rank}
    # (sender, kind): the messages in the order of sending, and how many receives are posted
    in_order = defaultdict(list)
    posted = Counter()
    for message in messages.values():
        if message.receiver == rank:
            in_order[message.sender, message.kind].append(message)
    # sends that may not have arrived yet
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
