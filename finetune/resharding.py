"""The weights of a model, moved in memory from one parallel layout to another.

Reinforcement learning trains a model and generates with it in turn. Training wants one layout
(pipelines, ZeRO), generation another one (each token needs all weights, so whole models or tensor
parallelism). Each rank then holds two sets of slices of the same global tensors. After each step of
the optimizer, the new values go from the source (training) to the target (generation).

    one weight, 4 rows      source, tp 2      target, pp 2      what moves
    of layer 0              rank 0: 0 1       rank 0: 0 1 2 3   rows 2 3, rank 1 -> rank 0
                            rank 1: 2 3       rank 1: -
    of layer 1              rank 0: 0 1       rank 0: -
                            rank 1: 2 3       rank 1: 0 1 2 3   rows 0 1, rank 0 -> rank 1

The sharding records (sharding.py) say all that is needed: a slice is a rectangle of a global
tensor, and what one rank must send to another is where their rectangles overlap. So no technique
has a case here. What a rank holds itself it copies; only the rest is sent:

    bytes that rank r receives = Σ over tensors (|T_r| - |T_r ∩ S_r|) · bytes of an element

S_r and T_r are its slices in source and target; |..| counts elements. For a model of Ψ bytes on n
ranks: from tp n or ZeRO stage 3 to whole models, Ψ (n - 1) / n for each; from tp 2 to pp 2, Ψ / 4.

    python -m course.resharding        a lesson: tp 2 to pp 2, bytes by formula and measured

`Resharding` plans once. `copy` sends pieces in rounds of one all-to-all each, whose buffers are
bounded, so the memory beside the two sets of weights does not grow with the model. (HybridFlow,
arXiv 2409.19256, section 5; NeMo-Aligner, arXiv 2405.01481, from pipelines to tensor parallelism.)

Not covered: weights that source and target share instead of having two copies (HybridFlow), a
round that is packed while another is on its way, and a plan that each rank makes for itself alone.
Here each makes the plan of all: seconds on tens of ranks, minutes on hundreds, once.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from run.checkpoint import gather, rank_and_world
from sharding import local_part, local_slice, sharding_of, unpad

# A rank sends at most so much in a round, and receives at most so much.
BUFFER_BYTES = 2**28

# (global name, what this rank holds of it)
Named = dict[str, Tensor] | Iterable[tuple[str, Tensor]]


def weights(*models: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(global name, tensor) of what models compute with, for a source. Unlike
    sharding.named_parameters: in ZeRO stages 1 and 2 the whole parameters, not the shards that this
    rank updates, so that nothing is sent that a rank has already."""
    for model in models:
        for name, p in model.named_parameters():
            shard = local_part(p)
            # In stage 3 it does not: the parameter is there only around its layer.
            shares = shard.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
            yield sharding_of(p).copy_of or name, p if shares else shard


# --- slices, and where they overlap ---------------------------------------------------------------


class Slice(NamedTuple):
    """What one rank holds of a global tensor, without padding: offset and size, a number for each
    dimension."""

    name: str
    # the shape of the global tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


class Piece(NamedTuple):
    """A rectangle of a global tensor that one rank gives to another one, or to itself."""

    sender: int
    receiver: int
    # positions in the sender's source and in the receiver's target
    source: int
    target: int
    # in the global tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    # in which it travels
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def nbytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)


def slice_of(name: str, tensor: Tensor) -> Slice:
    record = sharding_of(tensor)
    offset, size, _ = local_slice(record)
    return Slice(name, tuple(record.shape), tuple(offset), tuple(size), tensor.dtype)


def overlap(a: Slice, b: Slice) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offset, size) of what two slices of a tensor have in common, None if they have nothing."""
    start = tuple(map(max, a.offset, b.offset))
    ends = [min(i + m, j + n) for i, m, j, n in zip(a.offset, a.size, b.offset, b.size)]
    size = tuple(end - first for first, end in zip(start, ends))
    return None if any(n <= 0 for n in size) else (start, size)


def view(tensor: Tensor, piece: Piece) -> Tensor:
    """The elements of a piece in what a rank holds."""
    record = sharding_of(tensor)
    first = local_slice(record)[0]
    where = [slice(o - f, o - f + n) for o, f, n in zip(piece.offset, first, piece.size)]
    return unpad(tensor.detach(), record)[tuple(where)]


# --- the plan -------------------------------------------------------------------------------------


def plan(sources: list[list[Slice]], targets: list[list[Slice]]) -> list[Piece]:
    """Which rank gives what to which, from the slices of all ranks. All ranks compute the same.

    Slices of a tensor in the source are equal or disjoint. Where several ranks hold one, the
    receiver itself is the sender, else the one that has sent least so far; of these the nearest.
    Raises ValueError for what no rank holds.
    """
    # name -> slice -> [(rank, position)]
    holders = defaultdict(lambda: defaultdict(list))
    for rank, slices in enumerate(sources):
        for position, held in enumerate(slices):
            holders[held.name][held].append((rank, position))
    # bytes, by rank
    sent = Counter()
    pieces = []
    for receiver, slices in enumerate(targets):
        for position, needed in enumerate(slices):
            found = pieces_of(needed, receiver, position, holders[needed.name], sent)
            check(needed, holders[needed.name], found)
            pieces += found
    return pieces


def pieces_of(needed: Slice, receiver: int, position: int, holders: dict, sent: Counter):
    """The pieces that make one slice of the target. Adds what they send to `sent`."""
    pieces = []
    for held, ranks in holders.items():
        common = overlap(held, needed)
        if common is None:
            continue

        def cost(place: tuple[int, int]) -> tuple:
            distance = abs(place[0] - receiver)
            return (0, 0) if distance == 0 else (1 + sent[place[0]], distance)

        sender, source = min(ranks, key=cost)
        # the narrower one travels
        dtype = min(held.dtype, needed.dtype, key=lambda dtype: dtype.itemsize)
        piece = Piece(sender, receiver, source, position, *common, dtype)
        if sender != receiver:
            sent[sender] += piece.nbytes
        pieces.append(piece)
    return pieces


def check(needed: Slice, holders: dict, found: list[Piece]) -> None:
    """Raises ValueError if pieces do not make a slice of the target."""
    for held in holders:
        if held.shape != needed.shape:
            shapes = f"{list(held.shape)} in the source and {list(needed.shape)} in the target"
            raise ValueError(f"{needed.name} is {shapes}: both must be of one model")
    elements = sum(math.prod(piece.size) for piece in found)
    if elements != math.prod(needed.size):
        part = ", or a part of it," if found else ""
        of_all = f"of {math.prod(needed.size)} elements {elements} were found"
        raise ValueError(f"no rank holds {needed.name}{part} in the source: {of_all}")


def cut(piece: Piece, most: int) -> Iterator[Piece]:
    """The piece in pieces of at most `most` elements, cut along its first dimensions."""
    if math.prod(piece.size) <= most:
        yield piece
        return
    dim = next(d for d, n in enumerate(piece.size) if n > 1)
    of_one = math.prod(piece.size) // piece.size[dim]
    step = max(1, most // of_one)
    for start in range(0, piece.size[dim], step):
        offset, size = list(piece.offset), list(piece.size)
        offset[dim] += start
        size[dim] = min(step, piece.size[dim] - start)
        yield from cut(piece._replace(offset=tuple(offset), size=tuple(size)), most)


class Round:
    """Pieces of one dtype that are sent by one all-to-all. No rank sends more than `room` bytes in
    it, or receives more."""

    def __init__(self, room: int, dtype: torch.dtype):
        self.room = room
        self.dtype = dtype
        self.pieces: list[Piece] = []
        # bytes, by ("send" or "receive", rank)
        self.used = Counter()

    def ends(self, piece: Piece) -> tuple:
        """The two budgets that a piece takes bytes from."""
        return ("send", piece.sender), ("receive", piece.receiver)

    def has_room(self, piece: Piece) -> bool:
        fits = all(self.used[end] + piece.nbytes <= self.room for end in self.ends(piece))
        return fits and piece.dtype == self.dtype

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        for end in self.ends(piece):
            self.used[end] += piece.nbytes


def make_rounds(pieces: list[Piece], room: int) -> list[Round]:
    """First fit: each piece goes to the first round that has room for it."""
    rounds = []
    for whole in pieces:
        for piece in cut(whole, room // whole.dtype.itemsize):
            first = next((r for r in rounds if r.has_room(piece)), None) or Round(room, piece.dtype)
            if not first.pieces:
                rounds.append(first)
            first.add(piece)
    return rounds


# --- the copy -------------------------------------------------------------------------------------


class Resharding:
    """Copies the weights of one layout to another one, as often as it is asked to.

    source, target: what this rank holds, by global name, with sharding records:
    `weights(*stages)` and `sharding.named_parameters(*stages)`. Their dtypes and devices may
    differ. A rank that only trains, or only generates, has an empty target, or source. The padding
    of the target stays as it is.
    """

    def __init__(
        self,
        source: Named,
        target: Named,
        group: dist.ProcessGroup | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        """A collective of the ranks of `group` (None: all). Raises ValueError, on all of them, for
        a name or a part of a tensor that the target has and no rank's source."""
        source, target = (list(x.items() if isinstance(x, dict) else x) for x in (source, target))
        self.group = group
        self.rank, self.world = rank_and_world(group)
        self.source = [tensor for _, tensor in source]
        self.target = [tensor for _, tensor in target]
        mine = [[slice_of(name, tensor) for name, tensor in named] for named in (source, target)]
        of_ranks = gather(mine, group)
        pieces = plan([held for held, _ in of_ranks], [needed for _, needed in of_ranks])
        moving = [piece for piece in pieces if piece.sender != piece.receiver]
        # what this rank has itself
        self.own = [p for p in pieces if p.sender == p.receiver == self.rank]
        # (what this rank receives, what it sends) in each round
        self.rounds = [self.sides(r.pieces) for r in make_rounds(moving, buffer_bytes)]
        # what this rank receives in a copy
        self.bytes_received = sum(nbytes(receives) for receives, _ in self.rounds)
        self.bytes_sent = sum(nbytes(sends) for _, sends in self.rounds)

    def sides(self, pieces: list[Piece]) -> tuple[list[Piece], list[Piece]]:
        """This rank's pieces of a round: (receives, sends), each in the order of the other ranks.
        What goes from one rank to another is in the same order on both."""
        receives = sorted((p for p in pieces if p.receiver == self.rank), key=lambda p: p.sender)
        sends = sorted((p for p in pieces if p.sender == self.rank), key=lambda p: p.receiver)
        return receives, sends

    @torch.no_grad()
    def copy(self) -> None:
        """Fill the target with the values that the source has now. A collective."""
        for piece in self.own:
            view(self.target[piece.target], piece).copy_(view(self.source[piece.source], piece))
        # All rounds use these two. (Each with buffers of its own, a thread of gloo may still hold
        # those of rounds before.)
        incoming, outgoing = (
            self.buffer(max((nbytes(parts[side]) for parts in self.rounds), default=0))
            for side in (0, 1)
        )
        for receives, sends in self.rounds:
            self.exchange(receives, sends, incoming[: nbytes(receives)], outgoing[: nbytes(sends)])

    def exchange(self, receives, sends, incoming: Tensor, outgoing: Tensor) -> None:
        """One round. receives, sends: this rank's pieces; incoming, outgoing: room for them."""
        for piece, space in zip(sends, spaces(outgoing, sends)):
            space.copy_(view(self.source[piece.source], piece))
        sizes_in = [nbytes(p for p in receives if p.sender == rank) for rank in range(self.world)]
        sizes_out = [nbytes(p for p in sends if p.receiver == rank) for rank in range(self.world)]
        dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, group=self.group)
        for piece, space in zip(receives, spaces(incoming, receives)):
            view(self.target[piece.target], piece).copy_(space)

    def buffer(self, size: int) -> Tensor:
        """Bytes, because gloo does not know every dtype."""
        tensors = self.target or self.source
        return torch.empty(size, dtype=torch.uint8, device=tensors[0].device if tensors else "cpu")


def spaces(buffer: Tensor, pieces: list[Piece]) -> Iterator[Tensor]:
    """For each piece its part of the buffer [bytes], seen as a tensor of its size and dtype."""
    for piece, part in zip(pieces, buffer.split([piece.nbytes for piece in pieces])):
        yield part.view(piece.dtype).view(piece.size)
