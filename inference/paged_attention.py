"""Attention to a paged cache: each token of a step looks at the blocks of its own sequence.

A step has T tokens of several sequences. Norms, matrices and the MLP see T rows, and do not care
whose they are. Attention does: it writes the T keys and values into their blocks, and then reads,
for each token, the blocks in the table of its sequence.

    step        A decodes (position 8) | B decodes (3) | C: positions 4 .. 7 of its prompt
    rows        0                        1               2 3 4 5            T = 6
    slots       block · size + position mod size, one for each row

    decodes     one query for each sequence. Their blocks are gathered, the tables filled up with
                block 0, and attended to in one call, under a mask. On a CPU in several calls, of
                sequences about as long: what is gathered is then still in the processor's cache
    a prompt    its queries attend to its own blocks, in a call by itself
    captured    on a GPU, a step that has decodes alone is a CUDA graph. Its numbers of sequences
                and of blocks are rounded up; rows that fill it up write to block 0

Keys are [a_kv, blocks · size, d] in each layer: heads are the first dimension. So neighbouring
blocks of a sequence are one slice, and gathered blocks need no transpose.

    python -m course.serve       a lesson: blocks by hand, and what batches do

Not covered: a kernel that reads the blocks where they are (vLLM's, FlashInfer), as GPUs need it.
Here the gathered blocks are a copy, but for a sequence that is alone.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from families import LocalBias, window_of
from inference.kv_cache import Windows, decode_attention, power_of_two
from inference.scheduler import Piece, Step

# The most bytes of keys that one call for decodes gathers on a CPU.
CALL_BYTES = 4 * 2**20


class PagedCache:
    """Keys and values of all sequences, for the layers of this rank, and where the rows of the
    current step belong. In the place of inference.kv_cache.Cache."""

    def __init__(self, num_blocks: int, block_size: int, window: int):
        self.num_blocks = num_blocks
        self.size = block_size
        self.window = window
        # Layer -> [2, a_kv, blocks * size, d], keys and values; latents are both, [1, ..].
        self.layers: dict[str, Tensor] = {}
        # Where decodes gather keys, and values, of one layer at a time.
        self.buffers: list[Tensor] = []
        # [T] of a step: the position of each row, and its place in the cache
        self.positions: Tensor | None = None
        self.slots: Tensor | None = None
        # Window of a layer -> one for each call of attention; together their rows, in order, are
        # the rows of the step.
        self.parts: dict[int, list[Decodes | Prompt]] = {}

    def begin(
        self, step: Step, locals: Windows, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Prepare a step. dtype: of the scores. Returns its tokens, [T]."""
        positions, slots, tokens = [], [], []
        for piece in step.pieces:
            span = range(piece.start, piece.start + len(piece.tokens))
            positions += span
            tokens += piece.tokens
            slots += self.slots_of(piece, span)
        self.positions, self.slots, tokens = torch.tensor((positions, slots, tokens), device=device)
        like = torch.empty(0, device=device, dtype=dtype)
        self.parts = {window: [] for window in locals}
        for pieces in self.calls(step.pieces, device):
            part = Prompt if len(pieces[0].tokens) > 1 else Decodes.of
            for window, local in locals.items():
                self.parts[window].append(part(self, pieces, local, like))
        return tokens

    def copy_blocks(self, step: Step) -> None:
        """Before a step writes into them."""
        for source, target in step.copies:
            for stored in self.layers.values():
                blocks = stored.unflatten(2, (-1, self.size))
                blocks[:, :, target] = blocks[:, :, source]

    def decodes_table(self, step: Step) -> list[list[int]] | None:
        """A row for each sequence of a step that only decodes: token, position, slot, number of the
        first block in the table, table. Rows and columns are filled up, so that they are few
        different numbers. None for another step."""
        if any(len(piece.tokens) > 1 for piece in step.pieces):
            return None
        rows = []
        for piece in step.pieces:
            first = self.first_block(piece.start)
            slot = self.slots_of(piece, [piece.start])
            rows.append([*piece.tokens, piece.start, *slot, first, *piece.table[first:]])
        n = len(rows)
        size = power_of_two(n) if n < 8 else -(-n // 8) * 8  # 1 2 4 8 16 24 ..
        blocks = power_of_two(max(map(len, rows)) - 4)
        rows += [[]] * (size - n)
        return [row + [0] * (4 + blocks - len(row)) for row in rows]

    def begin_decodes(self, table: Tensor, locals: Windows, like: Tensor) -> Tensor:
        """As `begin`. table: [b, 4 + blocks] of `decodes_table`."""
        tokens, self.positions, self.slots, first = table[:, :4].unbind(1)
        rows = self.positions, first, table[:, 4:]
        for window, local in locals.items():
            self.parts[window] = [Decodes.masked(self, *rows, local, like)]
        return tokens

    def slots_of(self, piece: Piece, span: range) -> list[int]:
        if not piece.writes:
            return [0] * len(span)
        size, table = self.size, piece.table
        return [table[p // size] * size + p % size for p in span]

    def calls(self, pieces: list[Piece], device: torch.device) -> Iterator[list[Piece]]:
        """The pieces that one call attends for. In the order of a step, the shortest decodes come
        first."""
        most = len(pieces) * self.num_blocks
        if device.type == "cpu":
            keys_and_values = next(iter(self.layers.values()))
            most = CALL_BYTES * self.num_blocks // (keys_and_values.nbytes // len(keys_and_values))
        call = []
        for piece in pieces:
            if call and (len(piece.tokens) > 1 or (len(call) + 1) * len(piece.table) > most):
                yield call
                call = []
            call.append(piece)
        yield call

    def first_block(self, position: int) -> int:
        """The first block that a token looks at."""
        return max(0, position - self.window + 1) // self.size if self.window else 0

    def attend(
        self, layer: str, local: LocalBias | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store k and v, and attend to the tokens of each row's sequence. q: [T, a, 1, d];
        k, v: [T, a_kv, 1, d] -> [T, 1, a d]"""
        stored = self.layers[layer]
        keys, values = stored[0], stored[-1]  # [a_kv, blocks * size, d]
        k, v = k.squeeze(2).transpose(0, 1), v.squeeze(2).transpose(0, 1)  # [a_kv, T, d]
        keys.index_copy_(1, self.slots, k)
        values.index_copy_(1, self.slots, v)
        parts = self.parts[window_of(local)]
        if len(parts) == 1:
            y = parts[0].attend(q, keys, values)
        else:
            rows = q.split([part.count for part in parts])
            y = torch.cat([part.attend(x, keys, values) for part, x in zip(parts, rows)])
        return y.flatten(1).unsqueeze(1)

    def copied(self, n: int, stored: Tensor, rows: Tensor) -> Tensor:
        """These rows, on a CPU in buffer n. stored: [blocks of all heads, size d]"""
        if stored.device.type != "cpu":
            return stored.index_select(0, rows)
        count = len(rows) * stored.shape[1]
        if len(self.buffers) <= n:
            self.buffers.append(stored.new_empty(0))
        if len(self.buffers[n]) < count:
            # New memory would be slow: the system clears each page of it.
            self.buffers[n] = stored.new_empty(2 * count)
        out = self.buffers[n][:count].view(len(rows), -1)
        return torch.index_select(stored, 0, rows, out=out)


class Decodes:
    """One query for each of b sequences."""

    def __init__(self, cache: PagedCache, table: Tensor, mask: Tensor | None):
        """table: [b, blocks]; mask: what is added to the scores, [b, 1 or a, 1, S]"""
        self.cache = cache
        self.count = len(table)
        self.table = table.flatten()  # [b blocks]
        self.mask = mask
        # For a sequence that is alone: its keys, without those that fill up the last block; and the
        # slice of the cache that it is, where its blocks stand next to each other.
        self.columns = self.span = None
        # [a_kv b blocks], of the blocks of all heads
        self.rows: Tensor | None = None

    @classmethod
    def of(
        cls, cache: PagedCache, pieces: list[Piece], local: LocalBias | None, like: Tensor
    ) -> "Decodes":
        """local: of families.py; like: has the scores' device and dtype."""
        first = [cache.first_block(piece.start) for piece in pieces]
        tables = [piece.table[n:] for n, piece in zip(first, pieces)]
        if len(pieces) == 1 and local is None:
            decodes = cls(cache, torch.tensor(tables, device=like.device), None)
            begin, decodes.columns = tables[0][0] * cache.size, pieces[0].start + 1
            # The blocks stand next to each other.
            if tables[0] == list(range(tables[0][0], tables[0][0] + len(tables[0]))):
                decodes.span = slice(begin, begin + decodes.columns)
            return decodes
        longest = max(map(len, tables))
        rows = [
            [piece.start, n, *table, *[0] * (longest - len(table))]
            for piece, n, table in zip(pieces, first, tables)
        ]
        rows = torch.tensor(rows, device=like.device)
        return cls.masked(cache, rows[:, 0], rows[:, 1], rows[:, 2:], local, like)

    @classmethod
    def masked(
        cls, cache: PagedCache, positions: Tensor, first: Tensor, table: Tensor, local, like
    ) -> "Decodes":
        """positions: [b]; first: [b], where the table [b, blocks] of a sequence begins."""
        column = torch.arange(table.shape[1] * cache.size, device=like.device)
        keys = (first * cache.size).unsqueeze(1) + column  # [b, S]
        return cls(cache, table, mask_of(positions.unsqueeze(1), keys, local, like))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q: [b, a, 1, d]; keys, values: of a layer, [a_kv, blocks * size, d] -> [b, a, d]"""
        b, a, _, d = q.shape
        a_kv = len(keys)
        # Query heads that share a key head take the place of the sequence dimension.
        q = q.view(b, a_kv, a // a_kv, d).transpose(0, 1)
        mask = self.mask
        if self.span is not None:
            keys, values = keys[:, None, self.span], values[:, None, self.span]
        else:
            keys, values = self.gathered(0, keys), self.gathered(1, values)
        if mask is not None:
            # [1 or a_kv, b, 1 or a / a_kv, S]
            mask = mask.view(b, min(a_kv, mask.shape[1]), -1, mask.shape[3]).transpose(0, 1)
        return decode_attention(q, keys, values, mask).transpose(0, 1).reshape(b, a, d)

    def gathered(self, n: int, stored: Tensor) -> Tensor:
        """The blocks of the b sequences. stored: [a_kv, blocks * size, d] -> [a_kv, b, S, d]"""
        a_kv, _, d = stored.shape
        num_blocks = self.cache.num_blocks
        if self.rows is None:
            heads = torch.arange(a_kv, device=stored.device).unsqueeze(1) * num_blocks
            self.rows = (heads + self.table).flatten()
        blocks = self.cache.copied(n, stored.view(a_kv * num_blocks, -1), self.rows)
        return blocks.view(a_kv, self.count, -1, d)[:, :, : self.columns]


class Prompt:
    """Several queries of one sequence."""

    def __init__(
        self, cache: PagedCache, pieces: list[Piece], local: LocalBias | None, like: Tensor
    ):
        """Arguments as in Decodes.of; pieces has one piece."""
        [piece] = pieces
        self.cache = cache
        self.count = len(piece.tokens)
        first = cache.first_block(piece.start)
        self.table = torch.tensor(piece.table[first:], device=like.device)
        end = piece.start + self.count
        # The keys that are there.
        self.columns = end - first * cache.size
        # None: plain causal attention.
        self.mask = None
        if local or piece.start:
            queries = torch.arange(piece.start, end, device=like.device).unsqueeze(0)
            keys = torch.arange(first * cache.size, end, device=like.device).unsqueeze(0)
            self.mask = mask_of(queries, keys, local, like)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q: [tokens, a, 1, d]; keys, values: of a layer, [a_kv, blocks * size, d] -> [tokens, a,
        d]"""
        q = q.transpose(0, 2)  # [1, a, tokens, d]
        keys, values = (
            stored.view(len(stored), self.cache.num_blocks, -1, stored.shape[2])
            .index_select(1, self.table)
            .flatten(1, 2)[:, : self.columns]
            .unsqueeze(0)
            for stored in (keys, values)
        )  # [1, a_kv, columns, d]
        causal, grouped = self.mask is None, q.shape[1] != keys.shape[1]
        attention = F.scaled_dot_product_attention
        y = attention(q, keys, values, self.mask, is_causal=causal, enable_gqa=grouped)
        return y[0].transpose(0, 1)


def mask_of(queries: Tensor, keys: Tensor, local: LocalBias | None, like: Tensor) -> Tensor:
    """What is added to the scores. queries: positions [b, s]; keys: [b, S] -> [b, 1 or a, s, S]"""
    if local is not None:
        return local.between(queries, keys, like)
    hidden = keys.unsqueeze(1) > queries.unsqueeze(2)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf).unsqueeze(1)
